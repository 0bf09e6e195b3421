/*
 * What created processes have of their creator, and what happens when one goes wrong. The first argument says what to do.
 */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

EXTERN_ENV

MAIN_ENV

struct global {
    LOCKDEC(lock)
    CONDVARDEC(turned)
    BARDEC(bar)
    long seen[16];
    long count, turn;
    int small[4];
};

struct global *global;
static long initialised = 41;
static long zero;
char big[300000];
char *argument, *copy;
long (*function)(long);
FILE *out;
long *table;
static struct { BARDEC(bar) } outside;
long *to_local;
/* Each process counts for itself. */
static long calls;

static long twice(long x)
{
    return 2 * x;
}

void child()
{
    long me, good;

    LOCK(global->lock)
    me = global->count++;
    UNLOCK(global->lock)
    good = initialised == 42 + me && zero == 7 + me && big[299999] == 'x' && strcmp(argument, "look") == 0 && strcmp(copy, "copied") == 0;
    good = good && function(21) == 42 && out == stdout && table[999] == 999 + me && calls == 0 && getenv("RAMPOOL_RANK") != NULL;
    calls++;
    global->seen[me] = good;
    /* Private: the creator must not see that. */
    initialised = -1;
    big[299999] = 'y';
    table[999] = -1;
    free(table);
    table = (long *) malloc(100);
    table[0] = -1;
    fprintf(out, "process %ld\n", me);
    if (me == 3)
        exit(0);
}

/* The creation waits for no child's end, and a turn goes from one to the next by a condition that is made late. */
void turns()
{
    long me;
    calls++;
    LOCK(global->lock)
    me = global->count++;
    if (me == 0)
        CONDVARINIT(global->turned)
    while (global->turn != me)
        CONDVARWAIT(global->turned, global->lock)
    global->turn++;
    CONDVARBCAST(global->turned)
    UNLOCK(global->lock)
    FETCH_ADD(global->small[me % 4], -2);
}

/* One process has the sum, as in Water: it need not be the first. */
void sums()
{
    if (strcmp(getenv("RAMPOOL_RANK"), "1") == 0)
        zero = 9;
}

void crash()
{
    abort();
}

/* A program for threads sets for all what this process sets for itself: another one crashes. */
void faults()
{
    if (strcmp(getenv("RAMPOOL_RANK"), "0") == 0)
        zero = 9;
    BARRIER(global->bar, 2)
    if (zero != 9)
        *(volatile long *) 8 = 1;
}

void leaves()
{
    exit(5);
}

void nested()
{
    CREATE(turns)
}

int main(int argc, char **argv)
{
    long i, round;

    if (argc < 2)
        return 2;
    argument = argv[1];
    if (strcmp(argument, "usage") == 0)
        exit(4);
    MAIN_INITENV(,1000)
    global = (struct global *) G_MALLOC(sizeof(struct global));
    memset(global, 0, sizeof *global);
    if (strcmp(argument, "crash") == 0) {
        CREATE(crash)
    } else if (strcmp(argument, "faults") == 0) {
        BARINIT(global->bar, 2)
        CREATE(faults, 2)
    } else if (strcmp(argument, "leaves") == 0) {
        CREATE(leaves)
    } else if (strcmp(argument, "nested") == 0) {
        CREATE(nested)
    } else if (strcmp(argument, "outside") == 0) {
        BARINIT(outside.bar, 1)
        BARRIER(outside.bar, 1)
    } else if (strcmp(argument, "double") == 0) {
        G_FREE(global);
        G_FREE(global);
    } else if (strcmp(argument, "forks") == 0) {
        int status = -1;
        if (fork() == 0)
            exit(0);
        wait(&status);
        printf("a forked child ends with %d\n", status);
        MAIN_END
    } else if (strcmp(argument, "local") == 0) {
        to_local = &i;
        CREATE(turns)
        WAIT_FOR_END(1)
        MAIN_END
    } else if (strcmp(argument, "alone") == 0) {
        CREATE(turns)
        zero = 9;
        calls++;
        WAIT_FOR_END(1)
        MAIN_END
    } else if (strcmp(argument, "other") == 0) {
        CREATE(sums, 2)
        WAIT_FOR_END(2)
        MAIN_END
    } else if (strcmp(argument, "far") == 0) {
        /* As many homes as the machine has processors that the program was written for. */
        table = (long *) G_MALLOC(8 * 4096, 1000)
        table[0] = 1;
        MAIN_END
    } else if (strcmp(argument, "word") == 0) {
        zero = FETCH_ADD(initialised, 1)
    } else if (strcmp(argument, "turns") == 0) {
        CREATE(turns, 4)
        WAIT_FOR_END(4)
        printf("turn %ld, small %d\n", global->turn, global->small[0] + global->small[1] + global->small[2] + global->small[3]);
        MAIN_END
    }
    if (strcmp(argument, "look") != 0)
        WAIT_FOR_END(1)
    initialised = 42;
    zero = 7;
    big[299999] = 'x';
    copy = strdup("copied");
    function = twice;
    out = stdout;
    table = (long *) calloc(1000, sizeof(long));
    table = (long *) realloc(table, 100000);
    table[999] = 999;
    /* Two rounds, by the same ranks. The second finds variables as they are then, not as the first left them. */
    for (round = 0; round < 2; round++) {
        for (i = 0; i < 2; i++) {
            CREATE(child)
            if (round == 0 || i == 0)
                WAIT_FOR_END(1)
            initialised++;
            zero++;
            table[999]++;
        }
    }
    /* Children run in any order only in the last step, where both have ended by now or end here. */
    WAIT_FOR_END(4)
    for (i = 0; i < 4; i++)
        if (!global->seen[i]) {
            printf("process %ld does not see what it should\n", i);
            exit(1);
        }
    if (initialised != 46 || big[299999] != 'x' || table[999] != 1003) {
        printf("private variables changed: %ld %c %ld\n", initialised, big[299999], table[999]);
        exit(1);
    }
    printf("all is well\n");
    return 0;
}
