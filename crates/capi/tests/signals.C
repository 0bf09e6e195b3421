/*
 * A timer's handler touches shared memory, whatever its thread is doing. The page may be absent then, and it must come.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

EXTERN_ENV

MAIN_ENV

#define PAGES 64
#define ROUNDS 300

struct global {
    LOCKDEC(lock)
    BARDEC(bar)
    long next, sum;
};

struct global *global;
/* Each page is one process's, and all read it. */
volatile long *pages;
static volatile sig_atomic_t ticks;

static void tick(int number)
{
    long seen = 0;
    int page;

    (void) number;
    ticks++;
    for (page = 0; page < PAGES; page += 7)
        seen += pages[page * 512];
    if (seen < 0)
        abort();
}

void work()
{
    struct sigaction action = {0};
    struct itimerval every = {{0, 2000}, {0, 2000}};
    long me, round, page;

    LOCK(global->lock)
    me = global->next++;
    UNLOCK(global->lock)
    action.sa_handler = tick;
    action.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &every, NULL);
    for (round = 0; round < ROUNDS || ticks < 20; round++) {
        if (round < ROUNDS) {
            for (page = me; page < PAGES; page += 2)
                pages[page * 512]++;
            LOCK(global->lock)
            global->sum++;
            UNLOCK(global->lock)
            BARRIER(global->bar, 2)
        }
    }
    every.it_value.tv_usec = 0;
    setitimer(ITIMER_REAL, &every, NULL);
}

int main(int argc, char **argv)
{
    long page, right = 0;

    MAIN_INITENV()
    (void) argc;
    (void) argv;
    global = (struct global *) G_MALLOC(sizeof (struct global))
    pages = (volatile long *) G_MALLOC(PAGES * 4096)
    LOCKINIT(global->lock)
    BARINIT(global->bar, 2)
    CREATE(work, 2)
    WAIT_FOR_END(2)
    for (page = 0; page < PAGES; page++)
        right += pages[page * 512] == ROUNDS;
    printf("%ld pages right, sum %ld, ticks %s\n", right, global->sum, ticks >= 20 ? "came" : "are missing");
    MAIN_END
}
