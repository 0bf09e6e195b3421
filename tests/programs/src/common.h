/* What the small programs of the suites share. Each is an ordinary program: it knows nothing of rampool. */
#ifndef COMMON_H
#define COMMON_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define MIB (1UL << 20)

#define FAIL(...)                                                                                            \
    do {                                                                                                     \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                      \
        fprintf(stderr, __VA_ARGS__);                                                                        \
        fprintf(stderr, " (errno %d)\n", errno);                                                             \
        _exit(3);                                                                                            \
    } while (0)
#define CHECK(c) do { if (!(c)) FAIL("%s does not hold", #c); } while (0)

static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}
/* Bob Jenkins' and others' habit: one state word, one call, one random word. */
static inline uint64_t next_random(uint64_t *state) { return mix(*state += 0x9e3779b97f4a7c15ULL); }

/* A page of tag 0 is all zero; any other page's words follow from its tag. */
static inline uint64_t word_of(uint64_t tag, unsigned k) { return tag ? mix(tag ^ ((uint64_t)k << 48)) : 0; }
static inline void fill_page(void *page, uint64_t tag) {
    volatile uint64_t *w = page;
    for (unsigned k = 0; k < WORDS; k++) w[k] = word_of(tag, k);
}
/* The first word that differs, or WORDS. */
static inline unsigned check_page(const void *page, uint64_t tag) {
    const volatile uint64_t *w = page;
    for (unsigned k = 0; k < WORDS; k++) if (w[k] != word_of(tag, k)) return k;
    return WORDS;
}
static inline void must_be(const void *page, uint64_t tag, const char *what) {
    unsigned k = check_page(page, tag);
    if (k != WORDS)
        FAIL("%s: page %p word %u is %#lx and should be %#lx", what, page, k, ((volatile uint64_t *)page)[k],
             word_of(tag, k));
}
static inline void *map_pages(size_t pages) {
    void *p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) FAIL("mmap of %zu pages", pages);
    return p;
}
/* Memory that no pager of private memory touches: where a test keeps what it must trust. */
static inline void *map_shared(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) FAIL("mmap of %zu shared bytes", bytes);
    return p;
}
/* How many of these pages are not resident, by the kernel's own page map. */
static inline size_t absent_pages(const void *p, size_t pages) {
    int fd = open("/proc/thread-self/pagemap", O_RDONLY | O_CLOEXEC);
    size_t absent = 0;
    if (fd < 0) {
        /* No descriptor left, or no right to look at oneself. */
        unsigned char here;
        for (size_t i = 0; i < pages; i++)
            if (mincore((char *)p + i * PAGE, PAGE, &here) == 0 && !(here & 1)) absent++;
        return absent;
    }
    for (size_t i = 0; i < pages; i++) {
        uint64_t e = 0;
        if (pread(fd, &e, 8, ((uintptr_t)p / PAGE + i) * 8) == 8 && !(e >> 63)) absent++;
    }
    close(fd);
    return absent;
}
static char *ballast_memory;
static size_t ballast_pages;
/* The program's own pressure: memory that is larger than any budget it is run with. */
static inline void ballast(size_t bytes) {
    ballast_pages = bytes / PAGE;
    ballast_memory = map_pages(ballast_pages);
    for (size_t i = 0; i < ballast_pages; i++) fill_page(ballast_memory + i * PAGE, 7000000 + i);
}
/* Walks the ballast, so that everything else has a reason to leave. */
static inline void press(void) {
    for (size_t i = 0; i < ballast_pages; i++) {
        volatile uint64_t *w = (void *)(ballast_memory + i * PAGE);
        if (w[i % WORDS] != word_of(7000000 + i, i % WORDS)) FAIL("ballast page %zu is wrong", i);
    }
}
#endif
