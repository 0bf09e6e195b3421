/* Guards (MADV_GUARD_INSTALL) over memory that is here and that is away: an access is a segmentation fault,
   the memory around stays, and when the guard is gone the pages read as zeroes.
   Usage: guards BALLAST_MIB [bare]
   With `bare` the system call is made without the C library, on memory that is here: says what is read when
   the guard is gone. */
#include "common.h"
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#define PAGES 1024UL

static char *memory;
static sigjmp_buf back;
static char *page(size_t p) { return memory + p * PAGE; }
static void on_segv(int sig) { siglongjmp(back, sig); }
static int is_closed(size_t p) {
    if (sigsetjmp(back, 1)) return 1;
    (void)*(volatile char *)page(p);
    return 0;
}

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    size_t absent = 0;
    memory = map_pages(PAGES);
    if (madvise(memory, PAGE, MADV_GUARD_INSTALL) != 0) {
        printf("no guards\n");
        return 0;
    }
    CHECK(madvise(memory, PAGE, MADV_GUARD_REMOVE) == 0);
    ballast(strtoul(argv[1], NULL, 0) * MIB);
    if (argc > 2 && strcmp(argv[2], "bare") == 0) {
        for (size_t p = 0; p < PAGES; p++) fill_page(page(p), p + 1);
        CHECK(syscall(SYS_madvise, page(PAGES - 1), PAGE, MADV_GUARD_INSTALL) == 0 &&
              syscall(SYS_madvise, page(PAGES - 1), PAGE, MADV_GUARD_REMOVE) == 0);
        printf("reads %#lx\n", *(volatile uint64_t *)page(PAGES - 1));
        return 0;
    }
    struct sigaction segv = {.sa_handler = on_segv};
    CHECK(sigaction(SIGSEGV, &segv, NULL) == 0);
    for (uint64_t round = 1; round <= 8; round++) {
        uint64_t tag = round << 20;
        for (size_t p = 0; p < PAGES; p++) fill_page(page(p), tag + p);
        /* Half of the time it is away, and half of that it has come back to be read. */
        if (round % 2) press();
        absent += absent_pages(memory, PAGES);
        if (round % 4 == 3) for (size_t p = 0; p < PAGES; p++) must_be(page(p), tag + p, "before");
        size_t first = mix(round) % (PAGES / 2), count = 1 + mix(round + 100) % (PAGES / 2);
        CHECK(madvise(page(first), count * PAGE, MADV_GUARD_INSTALL) == 0);
        CHECK(is_closed(first) && is_closed(first + count - 1));
        press();
        for (size_t p = 0; p < PAGES; p++)
            if (p < first || p >= first + count) must_be(page(p), tag + p, "around a guard");
        CHECK(madvise(page(first), count * PAGE, MADV_GUARD_REMOVE) == 0);
        for (size_t p = first; p < first + count; p++) must_be(page(p), 0, "after a guard");
        for (size_t p = first; p < first + count; p += 2) fill_page(page(p), tag + PAGES + p);
        press();
        for (size_t p = first; p < first + count; p += 2)
            must_be(page(p), tag + PAGES + p, "written after a guard");
    }
    fprintf(stderr, "absent %zu\n", absent);
    printf("ok\n");
    return 0;
}
