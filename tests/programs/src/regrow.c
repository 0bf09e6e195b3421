/* Arrays that grow by mremap, so that they move, and blocks mapped into the places they left: what a list
   that grows among many small objects does.
   Usage: regrow ROUNDS TOTAL_MIB. Every page is checked at the end of each round, and on the way at
   random. */
#include "common.h"

#define BLOCK (256 * 1024UL)

static char *grown(char *array, size_t from, size_t to) {
    char *moved = mremap(array, from, to, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED);
    return moved;
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    size_t rounds = strtoul(argv[1], NULL, 10), total = strtoul(argv[2], NULL, 10) * MIB, moves = 0;
    uint64_t random = 1;
    for (size_t round = 0; round < rounds; round++) {
        size_t array_bytes = 64 * 1024, blocks = 0, most = total / BLOCK;
        char *array = mmap(NULL, array_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char **block = calloc(most, sizeof *block);
        CHECK(array != MAP_FAILED && block);
        for (size_t p = 0; p < array_bytes / PAGE; p++) fill_page(array + p * PAGE, 1 + p);
        while (blocks < most) {
            char *b = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(b != MAP_FAILED);
            for (size_t p = 0; p < BLOCK / PAGE; p++)
                fill_page(b + p * PAGE, ((uint64_t)(blocks + 1) << 32) + p);
            block[blocks++] = b;
            size_t old = next_random(&random) % blocks, page = next_random(&random) % (BLOCK / PAGE);
            must_be(block[old] + page * PAGE, ((uint64_t)(old + 1) << 32) + page, "a block on the way");
            if (blocks % 4 == 0) {
                size_t bigger = (array_bytes + array_bytes / 8 + PAGE) & ~(PAGE - 1);
                char *before = array;
                array = grown(array, array_bytes, bigger);
                moves += array != before;
                for (size_t p = array_bytes / PAGE; p < bigger / PAGE; p++)
                    fill_page(array + p * PAGE, 1 + p);
                array_bytes = bigger;
                if (array_bytes > total / 4) {
                    CHECK(munmap(array + total / 8, array_bytes - total / 8) == 0);
                    array_bytes = total / 8;
                }
            }
        }
        for (size_t p = 0; p < array_bytes / PAGE; p++) must_be(array + p * PAGE, 1 + p, "the array");
        for (size_t n = 0; n < blocks; n++) {
            for (size_t p = 0; p < BLOCK / PAGE; p++)
                must_be(block[n] + p * PAGE, ((uint64_t)(n + 1) << 32) + p, "a block");
            CHECK(munmap(block[n], BLOCK) == 0);
        }
        CHECK(munmap(array, array_bytes) == 0);
        free(block);
    }
    CHECK(moves > rounds);
    printf("ok\n");
    return 0;
}
