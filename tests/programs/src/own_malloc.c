/* A program that brings its allocator with it, as some browsers do: locked while the process forks, and
   unlocked in the child by its own handler, which comes after those of libraries that are loaded first.
   Usage: own_malloc FORKS. */
#include "common.h"
#include <pthread.h>
#include <sys/wait.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char heap[64 << 20];
static size_t used;

static void take(void) { pthread_mutex_lock(&lock); }
static void leave(void) { pthread_mutex_unlock(&lock); }

void *malloc(size_t bytes) {
    take();
    size_t at = used;
    used += 16 + ((bytes + 15) & ~15UL);
    if (used > sizeof heap) _exit(4);
    leave();
    *(size_t *)(heap + at) = bytes;
    return heap + at + 16;
}
void free(void *memory) { (void)memory; }
void *calloc(size_t count, size_t bytes) { return malloc(count * bytes); }
void *realloc(void *memory, size_t bytes) {
    char *new = malloc(bytes);
    if (memory) {
        size_t old = *(size_t *)((char *)memory - 16);
        memcpy(new, memory, old < bytes ? old : bytes);
    }
    return new;
}

int main(int argc, char **argv) {
    int forks = argc > 1 ? atoi(argv[1]) : 1;
    CHECK(pthread_atfork(take, leave, leave) == 0);
    for (int i = 0; i < forks; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) { free(malloc(100)); _exit(0); }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    printf("ok\n");
    return 0;
}
