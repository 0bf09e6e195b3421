/* A program that changes its mappings in every way there is, at random, against a model of what each page
   must hold.
   Usage: mappings SEED OPERATIONS WINDOW_PAGES BALLAST_MIB. Everything happens at fixed addresses inside one
   window. */
#include "common.h"
#include <setjmp.h>
#include <signal.h>
#include <sys/wait.h>

static char *window;
static size_t pages;
static uint64_t *tag;   /* what the page holds; 0: zeroes */
static uint8_t *mapped; /* 0: nothing there, 1: mapped */
static uint8_t *prot;   /* PROT_ bits */
static uint64_t seed_state, fresh_tag = 1;
static size_t counts[16], refused;

static uint64_t rnd(uint64_t below) { return next_random(&seed_state) % below; }
static char *at(size_t page) { return window + page * PAGE; }
static sigjmp_buf escape;
static volatile int expecting;
static void on_fault(int sig, siginfo_t *info, void *context) {
    (void)context;
    if (!expecting) {
        psiginfo(info, "memory that should be there is not");
        fprintf(stderr, "signal %d at page %zd of the window\n", sig,
                ((char *)info->si_addr - window) / (ssize_t)PAGE);
        _exit(4);
    }
    expecting = 0;
    siglongjmp(escape, 1);
}
/* Whether the access is refused. */
static int refuses(volatile char *byte, int write) {
    if (sigsetjmp(escape, 1)) return 1;
    expecting = 1;
    if (write) *byte = 1; else (void)*byte;
    expecting = 0;
    return 0;
}

static void touch(size_t page, int write) {
    if (!mapped[page] || !(prot[page] & PROT_READ)) {
        /* It must not be readable: what is closed stays closed, absent or not. */
        if (!refuses(at(page), 0)) FAIL("page %zu can be read and should not", page);
        return;
    }
    must_be(at(page), tag[page], "touch");
    if (write && prot[page] & PROT_WRITE) { tag[page] = fresh_tag++; fill_page(at(page), tag[page]); }
    else if (write) {
        if (!refuses(at(page), 1)) FAIL("page %zu can be written and should not", page);
        must_be(at(page), tag[page], "a refused write changed something");
    }
}
static void map_fixed(size_t first, size_t count) {
    CHECK(mmap(at(first), count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
               0) == at(first));
    for (size_t p = first; p < first + count; p++) {
        tag[p] = 0;
        mapped[p] = 1;
        prot[p] = PROT_READ | PROT_WRITE;
    }
}
static void unmap(size_t first, size_t count) {
    CHECK(munmap(at(first), count * PAGE) == 0);
    for (size_t p = first; p < first + count; p++) mapped[p] = 0;
}
/* Mapped pages of one protection from `first` on. */
static size_t run(size_t first, size_t most) {
    size_t n = 0;
    while (n < most && first + n < pages && mapped[first + n] && prot[first + n] == prot[first]) n++;
    return n;
}
static size_t hole(size_t first, size_t most) {
    size_t n = 0;
    while (n < most && first + n < pages && !mapped[first + n]) n++;
    return n;
}
static void moved(size_t from, size_t to, size_t count, int keep) {
    for (size_t i = 0; i < count; i++) {
        tag[to + i] = tag[from + i]; mapped[to + i] = 1; prot[to + i] = prot[from + i];
        if (keep) tag[from + i] = 0; else mapped[from + i] = 0;
    }
}
static void step(void) {
    unsigned op = rnd(15);
    size_t first = rnd(pages), most = 1 + rnd(rnd(4) ? 32 : 600),
           count = most < pages - first ? most : pages - first;
    counts[op]++;
    switch (op) {
    case 0: map_fixed(first, count); break;
    case 1: unmap(first, count); break;
    case 2: case 3: case 4:
        for (size_t p = first; p < first + count; p++) touch(p, rnd(2));
        break;
    case 5: /* madvise(DONTNEED): zeroes from now on, also where the pages were elsewhere */
        count = run(first, count);
        if (count) {
            CHECK(madvise(at(first), count * PAGE, MADV_DONTNEED) == 0);
            for (size_t p = first; p < first + count; p++) tag[p] = 0;
        }
        break;
    case 6: /* madvise(FREE): the old bytes or zeroes, page by page, until written */
        count = run(first, count);
        if (count && prot[first] == (PROT_READ | PROT_WRITE)) {
            CHECK(madvise(at(first), count * PAGE, MADV_FREE) == 0);
            for (size_t p = first; p < first + count; p++) {
                if (check_page(at(p), tag[p]) != WORDS) { must_be(at(p), 0, "MADV_FREE"); tag[p] = 0; }
                tag[p] = fresh_tag++; fill_page(at(p), tag[p]);
            }
        }
        break;
    case 7: { /* mprotect */
        static const int kinds[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE};
        count = run(first, count);
        int p2 = kinds[rnd(4)];
        if (count) {
            CHECK(mprotect(at(first), count * PAGE, p2) == 0);
            for (size_t p = first; p < first + count; p++) prot[p] = p2;
        }
        break;
    }
    case 8: case 9: case 10: { /* mremap to a place of our choice, over whatever is there */
        size_t to = rnd(pages);
        count = run(first, count);
        if (to + count > pages) count = pages - to;
        if (!count || (to < first + count && first < to + count)) return;
        int keep = op == 10;
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (keep ? MREMAP_DONTUNMAP : 0);
        void *got = mremap(at(first), count * PAGE, count * PAGE, flags, at(to));
        /* A range of several mappings: kernels differ in how much they have moved by then, so both ends begin
           anew. */
        if (got == MAP_FAILED) {
            CHECK(errno == EFAULT || errno == EINVAL);
            refused++;
            map_fixed(to, count);
            map_fixed(first, count);
        } else {
            CHECK(got == at(to));
            moved(first, to, count, keep);
        }
        break;
    }
    case 11: { /* grow in place */
        size_t have = run(first, count), room = hole(first + have, most);
        if (!have || !room) return;
        void *got = mremap(at(first), have * PAGE, (have + room) * PAGE, 0);
        if (got == MAP_FAILED) {
            CHECK(errno == EFAULT || errno == ENOMEM || errno == EINVAL);
            refused++;
            return;
        }
        CHECK(got == at(first));
        for (size_t p = first + have; p < first + have + room; p++) {
            mapped[p] = 1;
            tag[p] = 0;
            prot[p] = prot[first];
        }
        break;
    }
    case 12: { /* shrink */
        size_t have = run(first, count);
        if (have < 2) return;
        size_t stay = 1 + rnd(have - 1);
        if (mremap(at(first), have * PAGE, stay * PAGE, 0) == MAP_FAILED) {
            CHECK(errno == EFAULT);
            refused++;
            return;
        }
        for (size_t p = first + stay; p < first + have; p++) mapped[p] = 0;
        break;
    }
    case 13: /* advice that must not change a byte */
        count = run(first, count);
        if (count) {
            static const int advice[] = {MADV_HUGEPAGE, MADV_NOHUGEPAGE,  MADV_WILLNEED,   MADV_RANDOM,
                                         20 /* COLD */, 21 /* PAGEOUT */, MADV_SEQUENTIAL, MADV_NORMAL};
            (void)madvise(at(first), count * PAGE, advice[rnd(8)]);
        }
        break;
    case 14: { /* a child sees the same, writes, and we do not see it */
        if (rnd(12)) return;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            for (int i = 0; i < 300; i++) { size_t p = rnd(pages); if (mapped[p]) touch(p, 1); }
            for (int i = 0; i < 300; i++) { size_t p = rnd(pages); if (mapped[p]) touch(p, 0); }
            _exit(0);
        }
        for (int i = 0; i < 300; i++) { size_t p = rnd(pages); if (mapped[p]) touch(p, rnd(2)); }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0) FAIL("a child ended with %#x", status);
        break;
    }
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 5);
    seed_state = strtoull(argv[1], NULL, 0);
    size_t operations = strtoul(argv[2], NULL, 0);
    pages = strtoul(argv[3], NULL, 0);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_NODEFER | SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL); sigaction(SIGBUS, &action, NULL);
    /* Each process has its own model, in memory that a fork copies but that is small and hot. */
    /* Far below where the kernel puts mappings of its own choice: a hole in the window stays a hole. */
    window = mmap((void *)0x2000000000, pages * PAGE, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(window == (void *)0x2000000000);
    tag = calloc(pages, 8); mapped = calloc(pages, 1); prot = calloc(pages, 1);
    unmap(0, pages);
    map_fixed(0, pages / 2);
    ballast(strtoul(argv[4], NULL, 0) * MIB);
    size_t absent = 0;
    for (size_t i = 0; i < operations; i++) {
        step();
        if (i % 64 == 0) { press(); absent += absent_pages(window, pages); }
    }
    uint64_t sum = 0;
    for (size_t p = 0; p < pages; p++) if (mapped[p]) { touch(p, 0); sum = mix(sum ^ tag[p] ^ p); }
    fprintf(stderr, "seed %s: absent %zu, refused %zu\n", argv[1], absent, refused);
    printf("ok");
    for (int i = 0; i < 15; i++) printf(" %zu", counts[i]);
    printf("\n");
    return 0;
}
