/* Threads write, read and verify random pages while eviction, prefetch and forks go on.
   Usage: torture SEED PAGES THREADS OPERATIONS FORKS

   The oracle lies in shared memory, which no pager of private memory touches: for every page a lock, a
   version and how often it was emptied. A page of version v holds words that follow from (page, v). A forked
   child checks its snapshot against the versions that the oracle showed before the fork (not older) and shows
   after it (not newer), writes its own, and may fork again. */
#include "common.h"
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>

struct oracle {
    _Atomic uint32_t lock;
    _Atomic uint32_t version;
    _Atomic uint32_t emptied;
    uint32_t is_zero;
};
static struct oracle *oracle;
static size_t pages, threads, operations, forks;
static char **page_at;
static uint64_t seed;
static _Atomic int working;
static _Atomic size_t done_writes, done_reads, done_children;
static int pipes[2][2];

static uint64_t tag_of(size_t page, uint32_t version) { return (uint64_t)(page + 1) << 24 | version; }
static void lock(size_t p) {
    uint32_t free_ = 0;
    while (!__atomic_compare_exchange_n(&oracle[p].lock, &free_, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        free_ = 0;
        sched_yield();
    }
}
static void unlock(size_t p) { __atomic_store_n(&oracle[p].lock, 0, __ATOMIC_RELEASE); }
static void verify(size_t p, const char *who) {
    uint64_t tag = oracle[p].is_zero ? 0 : tag_of(p, oracle[p].version);
    unsigned k = check_page(page_at[p], tag);
    if (k != WORDS)
        FAIL("%s: seed %lu page %zu (%p) word %u is %#lx, should be %#lx of version %u", who, seed, p,
             page_at[p], k, ((uint64_t *)page_at[p])[k], word_of(tag, k), oracle[p].version);
}
static void rewrite(size_t p) {
    uint32_t v = oracle[p].version + 1;
    oracle[p].version = v; /* before the bytes: a child may see them at once */
    oracle[p].is_zero = 0;
    fill_page(page_at[p], tag_of(p, v));
}
static void *worker(void *arg) {
    size_t me = (uintptr_t)arg;
    uint64_t state = mix(seed ^ me << 32);
    char *through = malloc(2 * PAGE);
    for (size_t i = 0; i < operations; i++) {
        size_t p = next_random(&state) % pages;
        switch (next_random(&state) % 16) {
        case 0: case 1: case 2: case 3: case 4:
            lock(p); verify(p, "writer"); rewrite(p); unlock(p); done_writes++;
            break;
        case 5: case 6: case 7: case 8: case 9: case 10:
            lock(p); verify(p, "reader"); unlock(p); done_reads++;
            break;
        case 11: /* in order, so that reading ahead begins */
            for (size_t q = p; q < p + 64 && q < pages; q++) {
                lock(q);
                verify(q, "sweep");
                unlock(q);
                done_reads++;
            }
            break;
        case 12: /* backwards, every third */
            for (size_t q = p, n = 0; q >= 3 && n < 24; q -= 3, n++) {
                lock(q);
                verify(q, "stride");
                if (n & 1) rewrite(q);
                unlock(q);
                done_reads++;
            }
            break;
        case 13: /* emptied */
            lock(p);
            CHECK(madvise(page_at[p], PAGE, MADV_DONTNEED) == 0);
            oracle[p].is_zero = 1; oracle[p].version++; oracle[p].emptied++;
            unlock(p);
            break;
        case 14: /* by system calls, out of the page and into it */
            if (me < 2) {
                lock(p);
                CHECK(write(pipes[me][1], page_at[p], PAGE) == (ssize_t)PAGE);
                CHECK(read(pipes[me][0], through, PAGE) == (ssize_t)PAGE);
                CHECK(check_page(through, oracle[p].is_zero ? 0 : tag_of(p, oracle[p].version)) == WORDS);
                uint32_t v = oracle[p].version + 1;
                fill_page(through, tag_of(p, v));
                CHECK(write(pipes[me][1], through, PAGE) == (ssize_t)PAGE);
                oracle[p].version = v; oracle[p].is_zero = 0;
                CHECK(read(pipes[me][0], page_at[p], PAGE) == (ssize_t)PAGE);
                verify(p, "system call");
                unlock(p);
            }
            break;
        case 15: /* write only the last word's line: the rest must come from where it was */
            lock(p);
            if (!oracle[p].is_zero) {
                volatile uint64_t *w = (void *)page_at[p];
                w[WORDS - 1] = word_of(tag_of(p, oracle[p].version), WORDS - 1);
                verify(p, "one word written");
            }
            unlock(p);
            break;
        }
    }
    free(through);
    working--;
    return NULL;
}

struct look { size_t page; uint32_t version, emptied; int was_zero; };
static void check_snapshot(struct look *l, const char *who) {
    const volatile uint64_t *w = (void *)page_at[l->page];
    uint32_t newest = __atomic_load_n(&oracle[l->page].version, __ATOMIC_ACQUIRE);
    int may_be_zero = l->was_zero ||
                      __atomic_load_n(&oracle[l->page].emptied, __ATOMIC_ACQUIRE) != l->emptied ||
                      l->version == 0;
    /* A writer may have been in the middle: its version in front, the former behind. */
    uint64_t first = w[0], last = w[WORDS - 1];
    int head = -1, tail = -1;
    for (uint32_t v = l->version; v <= newest; v++) {
        uint64_t tag = tag_of(l->page, v);
        if (first == word_of(tag, 0)) head = v;
        if (last == word_of(tag, WORDS - 1)) tail = v;
    }
    if (first == 0 && may_be_zero) head = -2;
    if (last == 0 && may_be_zero) tail = -2;
    if (head == -1 || tail == -1)
        FAIL("%s: seed %lu page %zu begins %#lx and ends %#lx, which is no version from %u to %u (zero "
             "allowed: %d)",
             who, seed, l->page, first, last, l->version, newest, may_be_zero);
    unsigned k = 0;
    while (k < WORDS && w[k] == word_of(head < 0 ? 0 : tag_of(l->page, head), k)) k++;
    for (unsigned j = k; j < WORDS; j++)
        if (w[j] != word_of(tail < 0 ? 0 : tag_of(l->page, tail), j))
            FAIL("%s: seed %lu page %zu word %u is %#lx, of neither version %d nor %d", who, seed, l->page, j,
                 w[j], head, tail);
}
static void *forker(void *arg) {
    (void)arg;
    uint64_t state = mix(seed ^ 0xf0f0);
    enum { LOOKS = 300 };
    struct look looks[LOOKS];
    for (size_t f = 0; f < forks && working > 0; f++) {
        for (int i = 0; i < LOOKS; i++) {
            size_t p = next_random(&state) % pages;
            lock(p);
            looks[i] = (struct look){p, oracle[p].version, oracle[p].emptied, oracle[p].is_zero};
            unlock(p);
        }
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            for (int i = 0; i < LOOKS; i++) check_snapshot(&looks[i], "child");
            for (int i = 0; i < LOOKS; i += 2) fill_page(page_at[looks[i].page], 0xc0ffee + looks[i].page);
            pid_t grandchild = f % 3 == 0 ? fork() : -1;
            if (grandchild == 0) {
                for (int i = 0; i < LOOKS; i++)
                    if (i % 2 == 0) must_be(page_at[looks[i].page], 0xc0ffee + looks[i].page, "grandchild");
                _exit(0);
            }
            for (int i = 0; i < LOOKS; i += 2)
                must_be(page_at[looks[i].page], 0xc0ffee + looks[i].page, "child after its writes");
            int status = 0;
            if (grandchild > 0) CHECK(waitpid(grandchild, &status, 0) == grandchild);
            _exit(status != 0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0) FAIL("seed %lu: child %zu ended with %#x", seed, f, status);
        done_children++;
    }
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 6);
    seed = strtoull(argv[1], NULL, 0); pages = strtoul(argv[2], NULL, 0); threads = strtoul(argv[3], NULL, 0);
    operations = strtoul(argv[4], NULL, 0); forks = strtoul(argv[5], NULL, 0);
    fprintf(stderr, "torture: seed %lu\n", seed);
    oracle = map_shared(pages * sizeof *oracle);
    page_at = malloc(pages * sizeof *page_at);
    /* Half one mapping, half many of odd sizes and the heap. */
    char *big = map_pages(pages / 2);
    size_t p = 0;
    for (; p < pages / 2; p++) page_at[p] = big + p * PAGE;
    uint64_t state = seed;
    while (p < pages) {
        size_t n = 1 + next_random(&state) % 400;
        if (n > pages - p) n = pages - p;
        char *some = next_random(&state) % 2 ? map_pages(n) : aligned_alloc(PAGE, n * PAGE);
        CHECK(some);
        memset(some, 0, n * PAGE);
        for (size_t i = 0; i < n; i++) page_at[p++] = some + i * PAGE;
    }
    for (p = 0; p < pages; p++) { oracle[p].is_zero = 1; rewrite(p); }
    for (int i = 0; i < 2; i++) CHECK(pipe(pipes[i]) == 0);
    pthread_t t[64], f;
    working = threads;
    for (size_t i = 0; i < threads; i++)
        CHECK(pthread_create(&t[i], NULL, worker, (void *)(uintptr_t)i) == 0);
    CHECK(pthread_create(&f, NULL, forker, NULL) == 0);
    for (size_t i = 0; i < threads; i++) pthread_join(t[i], NULL);
    pthread_join(f, NULL);
    for (p = 0; p < pages; p++) verify(p, "at the end");
    fprintf(stderr, "torture: %zu writes, %zu reads, %zu children; absent %zu\n", done_writes, done_reads,
            done_children, absent_pages(big, pages / 2));
    printf("ok\n");
    return 0;
}
