/* Two arrays, and a test that says when to go on: `behind DIRECTORY 0|1`.
 *
 * 1. writes both, says "stored"
 * 2. at the file "1": writes the second one anew and reads the first one, so that the second one leaves; says
 *    "behind"
 * 3. at the file "2": reads the beginning of the first one; says "read"
 * 4. at the file "3": reads all of the first one, or with 1 all of the second one, and says "all right"
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { WORDS = 512, FIRST = 16384, SECOND = 4096 };

static unsigned long *array(size_t pages) {
    void *at = mmap(NULL, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(2);
    return at;
}

static void fill(unsigned long *at, size_t pages, unsigned long value) {
    for (size_t i = 0; i < pages * WORDS; i++) at[i] = value + i;
}

static void verify(const char *what, const unsigned long *at, size_t pages, unsigned long value) {
    for (size_t i = 0; i < pages * WORDS; i++)
        if (at[i] != value + i) {
            fprintf(stderr, "%s: word %zu is %lx and should be %lx\n", what, i, at[i], value + i);
            exit(3);
        }
}

static void say(const char *text) {
    printf("%s\n", text);
    fflush(stdout);
}

static void wait_for(const char *directory, int step) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", directory, step);
    while (access(path, F_OK)) usleep(10000);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int touches = atoi(argv[2]);
    unsigned long *first = array(FIRST), *second = array(SECOND);
    fill(first, FIRST, 1);
    fill(second, SECOND, 2);
    // What was read twice is known to be what the servers have.
    for (int round = 0; round < 3; round++) {
        verify("first", first, FIRST, 1);
        verify("second", second, SECOND, 2);
    }
    say("stored");
    wait_for(argv[1], 1);
    fill(second, SECOND, 3);
    verify("first", first, FIRST, 1);
    say("behind");
    wait_for(argv[1], 2);
    verify("first", first, FIRST / 4, 1);
    say("read");
    wait_for(argv[1], 3);
    if (touches) verify("second", second, SECOND, 3);
    else verify("first", first, FIRST, 1);
    say("all right");
    return 0;
}
