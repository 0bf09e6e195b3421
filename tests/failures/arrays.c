/* Ranks that share an array of which each may keep a part: written by turns, checked by all, until a file is
   there.
   Usage: rampool launch -n RANKS ... arrays FILE MIB */
#include <rampool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define WORDS 512

static void must(rampool_status status, const char *what)
{
    if (status != RAMPOOL_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", what, rampool_error_message());
        exit(1);
    }
}

static uint64_t value(uint64_t page, uint64_t round, uint64_t word)
{
    return (page * WORDS + word) * UINT64_C(0x9e3779b97f4a7c15) + round;
}

int main(int argc, char **argv)
{
    rampool_shared *shared;
    void *memory;
    uint64_t page, pages = argc == 3 ? strtoull(argv[2], NULL, 0) * 256 : 0, round, word;

    must(rampool_shared_join(&shared), "join");
    must(rampool_shared_alloc(shared, (pages + 1) * WORDS * 8, NULL, &memory), "alloc");
    uint64_t rank = rampool_shared_rank(shared), ranks = rampool_shared_ranks(shared);
    uint64_t *words = (uint64_t *)memory + WORDS, *told = memory;
    for (round = 1; !*told; round++) {
        for (page = 0; page < pages; page++)
            for (word = 0; page % ranks == (rank + round) % ranks && word < WORDS; word++)
                words[page * WORDS + word] = value(page, round, word);
        must(rampool_shared_barrier(shared, 0), "barrier");
        for (page = 0; page < pages; page++)
            for (word = 0; word < WORDS; word += 37)
                if (words[page * WORDS + word] != value(page, round, word)) {
                    fprintf(stderr, "rank %lu: page %lu word %lu is %#lx, should be %#lx\n", rank, page, word,
                            words[page * WORDS + word], value(page, round, word));
                    exit(3);
                }
        if (rank == 0) {
            *told = access(argv[1], F_OK) == 0;
            puts("round");
            fflush(stdout);
        }
        must(rampool_shared_barrier(shared, 1), "barrier");
    }
    must(rampool_shared_close(shared), "close");
    return 0;
}
