/* Pages that hold the same, and that the program asks the kernel to merge (MADV_MERGEABLE), while they leave
   and come back to be read: what is written to them afterwards stays. With many mappings, the pager looks
   rarely whether it has done so. Usage: merged BALLAST_MIB ROUNDS [MAPPINGS] */
#include "common.h"

#define PAGES 2048UL
static char *memory;
static char *page(size_t p) { return memory + p * PAGE; }
static size_t merging_pages(void) {
    FILE *file = fopen("/proc/self/ksm_merging_pages", "r");
    size_t pages = 0;
    if (file) {
        if (fscanf(file, "%zu", &pages) != 1) pages = 0;
        fclose(file);
    }
    return pages;
}

int main(int argc, char **argv) {
    CHECK(argc == 3 || argc == 4);
    size_t mappings = argc == 4 ? strtoul(argv[3], NULL, 0) : 0;
    char *many = mappings ? map_pages(mappings) : NULL;
    for (size_t p = 0; p < mappings; p += 2) CHECK(mprotect(many + p * PAGE, PAGE, PROT_READ) == 0);
    size_t rounds = strtoul(argv[2], NULL, 0), merged = 0, absent = 0;
    memory = map_pages(PAGES);
    ballast(strtoul(argv[1], NULL, 0) * MIB);
    for (uint64_t round = 1; round <= rounds; round++) {
        for (size_t p = 0; p < PAGES; p++) fill_page(page(p), round << 20 | p % 4);
        if (round % 2) CHECK(madvise(memory, PAGES * PAGE, MADV_MERGEABLE) == 0);
        press();
        absent += absent_pages(memory, PAGES);
        for (size_t p = 0; p < PAGES; p++) must_be(page(p), round << 20 | p % 4, "before it was merged");
        CHECK(madvise(memory, PAGES * PAGE, MADV_MERGEABLE) == 0);
        for (int looks = 0; looks < 30; looks++) {
            size_t now = merging_pages();
            if (now > merged) merged = now;
            if (now > PAGES / 2) break;
            usleep(10000);
        }
        for (size_t p = 0; p < PAGES; p++) ((volatile uint64_t *)page(p))[p % WORDS] = round << 20 ^ p;
        press();
        for (size_t p = 0; p < PAGES; p++) {
            volatile uint64_t *words = (void *)page(p);
            if (words[p % WORDS] != (round << 20 ^ p))
                FAIL("round %lu: what was written to page %zu is lost: %#lx", round, p, words[p % WORDS]);
            words[p % WORDS] = word_of(round << 20 | p % 4, p % WORDS);
            must_be(page(p), round << 20 | p % 4, "around what was written");
        }
    }
    fprintf(stderr, "absent %zu; merged %zu\n", absent, merged);
    printf("ok\n");
    return 0;
}
