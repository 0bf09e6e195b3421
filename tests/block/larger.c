/* A program that uses more memory than the machine has, and checks every byte of it: larger MIB ROUNDS. With
 * 0 rounds it fills its memory once and checks it for ever.
 *
 * Every page is filled from its number and the round, a sixteenth of it with bytes that do not pack. It ends
 * with 0 where all bytes were right, 3 where one was not. A page that cannot be had again ends it by
 * SIGBUS. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, WORDS = PAGE / 8 };

static uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= 0x7fb5d329728ea185u;
    x ^= x >> 27;
    x *= 0x81dadef4bc2dd44du;
    return x ^ x >> 33;
}

static void make(uint64_t *page, uint64_t seed)
{
    for (int i = 0; i < WORDS; i++)
        page[i] = i % 16 ? seed : mix(seed * WORDS + i);
}

int main(int argc, char **argv)
{
    size_t pages = (argc > 1 ? strtoul(argv[1], NULL, 10) : 512) * 256;
    int rounds = argc > 2 ? atoi(argv[2]) : 2;
    uint64_t *memory =
        mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    static uint64_t expected[WORDS];

    if (memory == MAP_FAILED) {
        perror("larger");
        return 1;
    }
    for (int round = 0; rounds == 0 || round < rounds; round++) {
        for (size_t page = 0; page < pages; page++) {
            if (round > 0) {
                make(expected, page * 1000 + (rounds ? round - 1 : 0));
                if (memcmp(memory + page * WORDS, expected, PAGE)) {
                    printf("larger: page %zu is wrong in round %d\n", page, round);
                    return 3;
                }
            }
            if (rounds || round == 0)
                make(memory + page * WORDS, page * 1000 + round);
        }
        printf("larger: round %d\n", round);
        fflush(stdout);
    }
    for (size_t page = 0; page < pages; page++) {
        make(expected, page * 1000 + rounds - 1);
        if (memcmp(memory + page * WORDS, expected, PAGE)) {
            printf("larger: page %zu is wrong at the end\n", page);
            return 3;
        }
    }
    return 0;
}
