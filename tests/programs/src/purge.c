/* Threads give memory up while their neighbours fault, and are preempted in the middle of it.
   Usage: purge SEED SECONDS PURGERS SCRATCH_MIB [FLAGS]
   FLAGS: any of `hugepages`, `merge`, `pageout`, `free`, `forks`, separated by commas

   madvise(MADV_DONTNEED) announces what it gives up, waits until that was heard, and only then takes the
   pages away. A thread at idle priority, on a CPU that other threads want, may be kept waiting between the
   two for long. Each purger owns every other block of pages. The main thread touches the block before one
   that is being given up, so that zeroes are filled into it ahead, and reads memory of its own, so that pages
   leave. What was given up must be zero afterwards, and what was not must be what was written: all bytes of
   it, each time. */
#include "common.h"
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <time.h>

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

enum { BLOCK_PAGES = 64, BLOCKS = 16, MOST_PURGERS = 8 };
struct purger {
    char *blocks;
    uint64_t tag[BLOCKS]; /* of the pages of each block; 0: zeroes */
    /* The block that is given up now, plus one; the main thread sets it to 0 when it has had its turn. */
    _Atomic int turn;
    size_t me;
};
static struct purger purgers[MOST_PURGERS];
static uint64_t seed;
static _Atomic int over;
static _Atomic size_t rounds;
static int use_free, merge;
/* What page `n` of the scratch memory holds: with `merge` many pages hold the same, and the kernel makes one
   page of them. */
static uint64_t scratch_tag(size_t n) { return merge ? n % 32 + 1 : n + 1; }

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}
static int last_cpu(void) {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    int last = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) if (CPU_ISSET(cpu, &set)) last = cpu;
    return last;
}
static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}
/* Wants the purgers' CPU most of the time, and lets them have it so briefly that they are preempted
   anywhere. */
static void *hog(void *cpu) {
    pin((int)(intptr_t)cpu);
    while (!over) {
        for (int64_t until = now_us() + 3000; now_us() < until;) ;
        usleep(100);
    }
    return NULL;
}
static char *block_of(struct purger *p, size_t b) { return p->blocks + (2 * b + 1) * BLOCK_PAGES * PAGE; }
static void verify(struct purger *p, size_t b, const char *when) {
    for (size_t page = 0; page < BLOCK_PAGES; page++) {
        uint64_t tag = p->tag[b] ? p->tag[b] + page : 0;
        unsigned k = check_page(block_of(p, b) + page * PAGE, tag);
        if (k != WORDS) {
            uint64_t found = ((volatile uint64_t *)(block_of(p, b) + page * PAGE))[k];
            FAIL("%s: seed %lu round %zu purger %zu block %zu page %zu word %u is %#lx, should be %#lx", when,
                 seed, rounds, p->me, b, page, k, found, word_of(tag, k));
        }
    }
}
static void *purge(void *arg) {
    struct purger *p = arg;
    struct sched_param none = {0};
    pin(last_cpu());
    uint64_t state = mix(seed ^ (p->me + 1) << 40), generation = 0;
    while (!over) {
        size_t b = next_random(&state) % BLOCKS;
        char *block = block_of(p, b);
        verify(p, b, "before it was written");
        p->tag[b] = (p->me + 1) << 56 | ++generation << 16;
        for (size_t page = 0; page < BLOCK_PAGES; page++) fill_page(block + page * PAGE, p->tag[b] + page);
        if (next_random(&state) % 4 == 0) continue;
        int lazily = use_free && next_random(&state) % 4 == 0;
        sched_setscheduler(0, SCHED_IDLE, &none);
        p->turn = (int)b + 1;
        CHECK(madvise(block, BLOCK_PAGES * PAGE, lazily ? MADV_FREE : MADV_DONTNEED) == 0);
        sched_setscheduler(0, SCHED_OTHER, &none);
        if (lazily) {
            /* Each page is as it was or zero, until it is written. The kernel may drop it while it is read,
               but what is zero stays zero: so that is looked for last. */
            for (size_t page = 0; page < BLOCK_PAGES; page++) {
                char *at = block + page * PAGE;
                if (check_page(at, p->tag[b] + page) != WORDS && check_page(at, 0) != WORDS)
                    FAIL("seed %lu: page %zu was freed and is neither zero nor as it was", seed, page);
                fill_page(at, p->tag[b] + page);
            }
        } else {
            p->tag[b] = 0;
        }
        verify(p, b, "after it was given up");
        rounds++;
        while (p->turn && !over) sched_yield();
    }
    for (size_t b = 0; b < BLOCKS; b++) verify(p, b, "at the end");
    return NULL;
}
/* Two huge pages that are written again and again, so that they are all there and the kernel may join their
   pages, and given up now and then. */
enum { WHOLE_PAGES = 1024 };
static char *whole;
static uint64_t whole_tag;
static void work_on_whole(size_t turn) {
    for (size_t page = 0; page < WHOLE_PAGES; page++) {
        must_be(whole + page * PAGE, whole_tag ? whole_tag + page : 0,
                "a page that the kernel may have joined with others");
    }
    if (turn % 16 == 15) {
        CHECK(madvise(whole, WHOLE_PAGES * PAGE, MADV_DONTNEED) == 0);
        whole_tag = 0;
    } else {
        whole_tag = 0xffUL << 48 | turn << 16;
        for (size_t page = 0; page < WHOLE_PAGES; page++) fill_page(whole + page * PAGE, whole_tag + page);
    }
}
static void let_child_verify(char *scratch, size_t pages) {
    pid_t child = fork();
    if (child < 0) FAIL("fork");
    if (child == 0) {
        for (size_t page = 0; page < pages; page++)
            must_be(scratch + page * PAGE, scratch_tag(page), "in a child");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status != 0) FAIL("a child ends with status %#x", status);
}

int main(int argc, char **argv) {
    if (argc < 5) FAIL("usage: purge SEED SECONDS PURGERS SCRATCH_MIB [FLAGS]");
    seed = strtoull(argv[1], NULL, 0);
    int64_t end = now_us() + (int64_t)(atof(argv[2]) * 1e6);
    size_t count = strtoul(argv[3], NULL, 0), pages = strtoul(argv[4], NULL, 0) * MIB / PAGE;
    const char *flags = argc > 5 ? argv[5] : "";
    CHECK(count >= 1 && count <= MOST_PURGERS && pages > 4096);
    use_free = strstr(flags, "free") != NULL;
    merge = strstr(flags, "merge") != NULL;
    char *scratch = map_pages(pages);
    int hugepages = strstr(flags, "hugepages") != NULL;
    if (hugepages) {
        madvise(scratch, pages * PAGE, MADV_HUGEPAGE);
        char *room = map_pages(WHOLE_PAGES * 2);
        whole = room + (-(uintptr_t)room & (2 * MIB - 1));
        madvise(whole, WHOLE_PAGES * PAGE, MADV_HUGEPAGE);
    }
    if (merge) madvise(scratch, pages * PAGE, MADV_MERGEABLE);
    for (size_t page = 0; page < pages; page++) fill_page(scratch + page * PAGE, scratch_tag(page));
    pthread_t threads[MOST_PURGERS], hogs[3];
    for (size_t i = 0; i < count; i++) {
        purgers[i].me = i;
        purgers[i].blocks = map_pages(2 * BLOCKS * BLOCK_PAGES);
        if (hugepages) madvise(purgers[i].blocks, 2 * BLOCKS * BLOCK_PAGES * PAGE, MADV_HUGEPAGE);
        if (merge) madvise(purgers[i].blocks, 2 * BLOCKS * BLOCK_PAGES * PAGE, MADV_MERGEABLE);
        memset(purgers[i].blocks, 1, 2 * BLOCKS * BLOCK_PAGES * PAGE);
        CHECK(madvise(purgers[i].blocks, 2 * BLOCKS * BLOCK_PAGES * PAGE, MADV_DONTNEED) == 0);
    }
    for (size_t i = 0; i < 3; i++)
        CHECK(pthread_create(&hogs[i], NULL, hog, (void *)(intptr_t)last_cpu()) == 0);
    for (size_t i = 0; i < count; i++) CHECK(pthread_create(&threads[i], NULL, purge, &purgers[i]) == 0);
    uint64_t state = mix(seed);
    size_t at = 0, turns = 0;
    while (now_us() < end) {
        for (size_t i = 0; i < count; i++) {
            struct purger *p = &purgers[i];
            int turn = p->turn;
            if (!turn) continue;
            char *before = block_of(p, turn - 1) - BLOCK_PAGES * PAGE;
            for (size_t page = 0; page < BLOCK_PAGES; page++) *(volatile char *)(before + page * PAGE) = 1;
            for (size_t n = 0; n < 1024; n++, at = (at + 1) % pages) {
                if (*(volatile uint64_t *)(scratch + at * PAGE) != word_of(scratch_tag(at), 0))
                    FAIL("seed %lu: page %zu, which was never given up, is lost", seed, at);
            }
            must_be(scratch + at * PAGE, scratch_tag(at), "a page that was never given up");
            p->turn = 0;
            CHECK(madvise(before, BLOCK_PAGES * PAGE, MADV_DONTNEED) == 0);
            turns++;
            if (strstr(flags, "pageout") && turns % 16 == 0) {
                size_t from = next_random(&state) % (pages - 1024);
                madvise(scratch + from * PAGE, 1024 * PAGE, MADV_PAGEOUT);
            }
            if (hugepages && turns % 32 == 0) work_on_whole(turns / 32);
            if (strstr(flags, "forks") && turns % 200 == 0) let_child_verify(scratch, pages);
        }
        sched_yield();
    }
    over = 1;
    for (size_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
    for (size_t i = 0; i < 3; i++) pthread_join(hogs[i], NULL);
    for (size_t page = 0; page < pages; page++)
        must_be(scratch + page * PAGE, scratch_tag(page), "at the end");
    fprintf(stderr, "absent %zu\n", absent_pages(scratch, pages));
    fprintf(stderr, "purged %zu blocks\n", rounds);
    return 0;
}
