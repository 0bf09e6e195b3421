/* Threads allocate, check, move and free blocks through whichever `malloc` is loaded, and are preempted while
   it gives memory back.
   Usage: allocate SEED SECONDS THREADS MIB

   Allocators give freed memory up by madvise and count on it being zero later: `calloc` hands it out as it
   is. Every byte of every block is checked when the block is freed, moved or met again, and what `calloc`
   returns must be zero. Blocks are freed by other threads than those that made them. A thread frees at idle
   priority now and then, on a CPU that another one wants, and jemalloc's purging threads always run at idle
   priority. */
#include "common.h"
#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { MEAN_BLOCK = 80 << 10, MOST_THREADS = 64 };
struct block { size_t bytes; uint64_t tag; uint64_t words[]; };
static _Atomic(struct block *) *table;
static size_t slots;
static uint64_t seed;
static _Atomic int over;
static _Atomic size_t made, moved, zeroed, purgers_slowed;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}
static void pin_to_last_cpu(void) {
    cpu_set_t set, last;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0; cpu--)
        if (CPU_ISSET(cpu, &set)) {
            CPU_ZERO(&last);
            CPU_SET(cpu, &last);
            sched_setaffinity(0, sizeof last, &last);
            return;
        }
}
static void *hog(void *unused) {
    pin_to_last_cpu();
    while (!over) {
        for (int64_t until = now_us() + 2000; now_us() < until;) ;
        usleep(200);
    }
    return unused;
}
static void at_priority(int policy) {
    struct sched_param none = {0};
    sched_setscheduler(0, policy, &none);
}
static size_t words_of(const struct block *b) { return (b->bytes - sizeof *b) / 8; }
static void check_words(const struct block *b, size_t count, const char *when) {
    for (size_t k = 0; k < count; k++)
        if (b->words[k] != mix(b->tag ^ k))
            FAIL("%s: seed %lu word %zu of a block of %zu bytes at %p is %#lx, should be %#lx", when, seed, k,
                 b->bytes, (void *)b, b->words[k], mix(b->tag ^ k));
}
static void fill(struct block *b, size_t bytes, uint64_t tag) {
    b->bytes = bytes;
    b->tag = tag;
    for (size_t k = 0; k < words_of(b); k++) b->words[k] = mix(tag ^ k);
}
static size_t some_size(uint64_t *state) {
    uint64_t r = next_random(state);
    size_t most = r % 10 < 6 ? 4 << 10 : r % 10 < 9 ? 128 << 10 : 1 << 20;
    return (sizeof(struct block) + 8 + (r >> 8) % most) & ~7UL;
}
static struct block *make(uint64_t *state) {
    size_t bytes = some_size(state);
    struct block *b;
    if (next_random(state) % 2) {
        b = calloc(1, bytes);
        CHECK(b);
        for (size_t k = 0; k < bytes / 8; k++)
            if (((uint64_t *)b)[k])
                FAIL("seed %lu: calloc returns word %zu of %zu bytes at %p as %#lx", seed, k, bytes,
                     (void *)b, ((uint64_t *)b)[k]);
        zeroed++;
    } else {
        b = malloc(bytes);
        CHECK(b);
    }
    fill(b, bytes, next_random(state));
    made++;
    return b;
}
static struct block *move(struct block *b, uint64_t *state) {
    size_t before = words_of(b), bytes = some_size(state);
    b = realloc(b, bytes);
    CHECK(b);
    b->bytes = bytes;
    check_words(b, before < words_of(b) ? before : words_of(b), "moved");
    fill(b, bytes, next_random(state));
    moved++;
    return b;
}
static void give_back(struct block *b, uint64_t *state) {
    check_words(b, words_of(b), "freed");
    int idly = next_random(state) % 4 == 0;
    if (idly) at_priority(SCHED_IDLE);
    free(b);
    if (idly) at_priority(SCHED_OTHER);
}
static void *work(void *arg) {
    size_t me = (uintptr_t)arg;
    uint64_t state = mix(seed ^ (me + 1) << 40);
    if (me % 2 == 0) pin_to_last_cpu();
    while (!over) {
        size_t at = next_random(&state) % slots;
        struct block *b = atomic_exchange(&table[at], NULL), *next;
        switch (next_random(&state) % 8) {
        case 0: /* many at once, so that there is much to give up */
            if (b) give_back(b, &state);
            for (size_t n = 0; n < slots / 8; n++)
                if ((b = atomic_exchange(&table[(at + n) % slots], NULL))) give_back(b, &state);
            malloc_trim(0);
            continue;
        case 1:
            next = b ? move(b, &state) : make(&state);
            break;
        case 2:
            if (b) check_words(b, words_of(b), "met again");
            next = b ? b : make(&state);
            break;
        default:
            if (b) give_back(b, &state);
            next = make(&state);
        }
        if ((b = atomic_exchange(&table[at], next))) give_back(b, &state);
    }
    return NULL;
}
/* The allocator's own threads run only where no one else wants the CPU. */
static void slow_purgers(void) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[64], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%.20s/comm", task->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        struct sched_param none = {0};
        if (read(fd, name, sizeof name - 1) > 0 && strstr(name, "jemalloc_bg") &&
            sched_setscheduler(atoi(task->d_name), SCHED_IDLE, &none) == 0)
            purgers_slowed++;
        close(fd);
    }
    closedir(tasks);
}

int main(int argc, char **argv) {
    CHECK(argc == 5);
    seed = strtoull(argv[1], NULL, 0);
    int64_t end = now_us() + (int64_t)(atof(argv[2]) * 1e6);
    size_t count = strtoul(argv[3], NULL, 0);
    CHECK(count >= 1 && count <= MOST_THREADS);
    slots = strtoul(argv[4], NULL, 0) * MIB / MEAN_BLOCK;
    table = map_shared(slots * sizeof *table);
    pthread_t threads[MOST_THREADS], busy;
    uint64_t state = mix(seed);
    for (size_t at = 0; at < slots; at++) table[at] = make(&state);
    CHECK(pthread_create(&busy, NULL, hog, NULL) == 0);
    for (size_t i = 0; i < count; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0);
    usleep(50000);
    slow_purgers();
    while (now_us() < end) usleep(10000);
    over = 1;
    for (size_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
    pthread_join(busy, NULL);
    for (size_t at = 0; at < slots; at++)
        if (table[at]) check_words(table[at], words_of(table[at]), "at the end");
    fprintf(stderr,
            "allocated %zu blocks, %zu of them by calloc, %zu moved; %zu purging threads at idle priority\n",
            made, zeroed, moved, purgers_slowed);
    printf("ok\n");
    return 0;
}
