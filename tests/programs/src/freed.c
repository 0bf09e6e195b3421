/* MADV_FREE over memory that is here, that is away, and that came back for reading: each page reads as what
   it was or as zeroes, as a whole, and what is written afterwards stays. Usage: freed BALLAST_MIB */
#include "common.h"

#define PAGES 1024UL
static char *memory;
static char *page(size_t p) { return memory + p * PAGE; }

static void old_or_zero(size_t p, uint64_t tag) {
    if (check_page(page(p), tag) != WORDS) must_be(page(p), 0, "neither what it was nor zeroes");
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    size_t absent = 0;
    memory = map_pages(PAGES);
    ballast(strtoul(argv[1], NULL, 0) * MIB);
    for (uint64_t round = 1; round <= 12; round++) {
        uint64_t tag = round << 20;
        for (size_t p = 0; p < PAGES; p++) fill_page(page(p), tag + p);
        /* A third was just written, a third is away, a third came back and has not been written since. */
        if (round % 3) press();
        absent += absent_pages(memory, PAGES);
        if (round % 3 == 2) for (size_t p = 0; p < PAGES; p++) must_be(page(p), tag + p, "before");
        size_t first = mix(round) % (PAGES / 2), count = 1 + mix(round + 100) % (PAGES / 2);
        CHECK(madvise(page(first), count * PAGE, MADV_FREE) == 0);
        /* Some are written without having been read. */
        for (size_t p = first; p < first + count; p += 3) fill_page(page(p), tag + PAGES + p);
        if (round & 1) press();
        for (size_t p = first; p < first + count; p++) {
            if ((p - first) % 3 == 0) must_be(page(p), tag + PAGES + p, "written after it was given up");
            else old_or_zero(p, tag + p);
        }
        for (size_t p = first; p < first + count; p++)
            if ((p - first) % 3 == 1) fill_page(page(p), tag + 2 * PAGES + p);
        press();
        press();
        for (size_t p = 0; p < PAGES; p++) {
            if (p < first || p >= first + count) must_be(page(p), tag + p, "never given up");
            else if ((p - first) % 3 == 0) must_be(page(p), tag + PAGES + p, "written after it was given up");
            else if ((p - first) % 3 == 1) must_be(page(p), tag + 2 * PAGES + p, "read, then written");
            else old_or_zero(p, tag + p);
        }
    }
    fprintf(stderr, "absent %zu\n", absent);
    printf("ok\n");
    return 0;
}
