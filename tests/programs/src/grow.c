/* Touches fresh memory as fast as it can, on every CPU, in the ways in which programs get it.
   Usage: grow MIB ROUNDS THREADS

   Each thread has its part of MIB. A round: one mapping for all of it, and again after its content was given
   up; many small mappings; blocks of the C library's heap. Every page is written first and checked when all
   are; then the memory goes back. */
#include "common.h"
#include <malloc.h>
#include <pthread.h>

enum { SMALL = 1 << 20, BLOCK = 100 << 10 };
static size_t part;
static unsigned rounds;
static pthread_barrier_t together;

static void touch(char *memory, size_t bytes, uint64_t tag) {
    for (size_t at = 0; at < bytes; at += PAGE) *(volatile uint64_t *)(memory + at) = mix(tag ^ at);
}
static void check(const char *memory, size_t bytes, uint64_t tag, const char *what) {
    for (size_t at = 0; at < bytes; at += PAGE)
        if (*(volatile uint64_t *)(memory + at) != mix(tag ^ at))
            FAIL("%s: %p lost what was written", what, (void *)(memory + at));
}
static void one_mapping(uint64_t tag) {
    char *all = map_pages(part / PAGE);
    for (unsigned again = 0; again < 2; again++) {
        touch(all, part, tag + again);
        check(all, part, tag + again, again ? "one mapping, given up" : "one mapping");
        CHECK(madvise(all, part, MADV_DONTNEED) == 0);
    }
    CHECK(munmap(all, part) == 0);
}
static void many_mappings(uint64_t tag) {
    size_t count = part / SMALL;
    char **all = calloc(count, sizeof *all);
    CHECK(all);
    for (size_t k = 0; k < count; k++) touch(all[k] = map_pages(SMALL / PAGE), SMALL, tag + k);
    for (size_t k = 0; k < count; k++) {
        check(all[k], SMALL, tag + k, "many mappings");
        CHECK(munmap(all[k], SMALL) == 0);
    }
    free(all);
}
static void heap(uint64_t tag) {
    size_t count = part / BLOCK;
    char **all = calloc(count, sizeof *all);
    CHECK(all);
    for (size_t k = 0; k < count; k++) {
        CHECK((all[k] = malloc(BLOCK)));
        touch(all[k], BLOCK, tag + k);
    }
    for (size_t k = 0; k < count; k++) {
        check(all[k], BLOCK, tag + k, "heap");
        free(all[k]);
    }
    free(all);
    malloc_trim(0);
}
static void *grow(void *arg) {
    static void (*const ways[])(uint64_t) = {one_mapping, many_mappings, heap};
    for (unsigned round = 0; round < rounds; round++)
        for (unsigned way = 0; way < 3; way++) {
            pthread_barrier_wait(&together);
            ways[way](mix((uintptr_t)arg << 32 | round << 8 | way));
        }
    return NULL;
}
int main(int argc, char **argv) {
    CHECK(argc == 4);
    unsigned threads = atoi(argv[3]);
    pthread_t id[64];
    CHECK(threads > 0 && threads <= 64);
    part = atol(argv[1]) * MIB / threads / SMALL * SMALL;
    rounds = atoi(argv[2]);
    CHECK(pthread_barrier_init(&together, NULL, threads) == 0);
    for (uintptr_t k = 0; k < threads; k++) CHECK(pthread_create(&id[k], NULL, grow, (void *)(k + 1)) == 0);
    for (unsigned k = 0; k < threads; k++) CHECK(pthread_join(id[k], NULL) == 0);
    printf("%u rounds of %lu MiB\n", rounds, part * threads / MIB);
    return 0;
}
