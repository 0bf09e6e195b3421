/*
 * rampool_parmacs.h: what the macros of rampool.m4 expand to. Programs include it through MAIN_ENV and
 * EXTERN_ENV, not directly.
 */
#ifndef RAMPOOL_PARMACS_H
#define RAMPOOL_PARMACS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* SPLASH programs take it from the macros. */
#ifndef PAGE_SIZE
#define PAGE_SIZE 4096
#endif

typedef struct { uint64_t set; } rampool_parmacs_pause_t;
typedef struct { uint64_t count; } rampool_parmacs_semaphore_t;
typedef struct { uint64_t next, arrived, turn; } rampool_parmacs_subscript_t;

void rampool_parmacs_begin(int argc, char **argv, char *data_start, char *data_end);
void rampool_parmacs_create(void (*start)(void), long count, int joined);
void rampool_parmacs_wait_for_end(long count);
uint64_t rampool_parmacs_clock(void);

void *rampool_parmacs_g_malloc(size_t bytes, long home);
void rampool_parmacs_g_free(void *memory);

void rampool_parmacs_lock(const void *lock);
void rampool_parmacs_unlock(const void *lock);
void rampool_parmacs_barrier_init(void *barrier, long count);
void rampool_parmacs_barrier(void *barrier, long count);
void rampool_parmacs_condition_init(void *condition);
void rampool_parmacs_condition_wait(void *condition, const void *lock);
void rampool_parmacs_condition_signal(const void *condition, int all);
void rampool_parmacs_pause_set(uint64_t *pause, int value);
void rampool_parmacs_pause_wait(uint64_t *pause);
void rampool_parmacs_semaphore_wait(uint64_t *semaphore);
void rampool_parmacs_semaphore_post(uint64_t *semaphore);
long rampool_parmacs_getsub(rampool_parmacs_subscript_t *subscript, long last, long count);

uint64_t rampool_parmacs_load(void *word, size_t width);
void rampool_parmacs_store(void *word, size_t width, uint64_t value);
uint64_t rampool_parmacs_fetch_add(void *word, size_t width, uint64_t value);
uint64_t rampool_parmacs_compare_exchange(void *word, size_t width, uint64_t expected, uint64_t desired);
void rampool_parmacs_add_double(void *word, double value);
/* The value before. The compiler leaves it out where nobody uses it: then additions travel together. */
double rampool_parmacs_added(const void *word) __attribute__((pure));
void rampool_parmacs_fence(void);

/*
 * The program's private memory: created processes get a copy of it, as of the program's variables. <stdlib.h>
 * and <string.h> are above, so only the program's own calls change.
 */
void *rampool_parmacs_malloc(size_t bytes);
void *rampool_parmacs_calloc(size_t count, size_t bytes);
void *rampool_parmacs_realloc(void *memory, size_t bytes);
void rampool_parmacs_free(void *memory);
char *rampool_parmacs_strdup(const char *text);
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef strdup
#define malloc(bytes) rampool_parmacs_malloc(bytes)
#define calloc(count, bytes) rampool_parmacs_calloc(count, bytes)
#define realloc(memory, bytes) rampool_parmacs_realloc(memory, bytes)
#define free(memory) rampool_parmacs_free(memory)
#define strdup(text) rampool_parmacs_strdup(text)

/* The program's variables, as the linker places them. */
extern char __data_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));

/* Bits of a word of 1, 2, 4 or 8 bytes (little-endian), and a value of `type` back from them. */
#define RAMPOOL_PARMACS_BITS(bits, value) \
    (*(bits) = 0, (void)memcpy((void *)(bits), &(value), sizeof(value)))
#define RAMPOOL_PARMACS_SAME_SIZE(value, word) ((void)sizeof(char[sizeof(value) == sizeof(word) ? 1 : -1]))

#endif
