/*
 * A histogram with a lock for each of thousands of bins, then smoothed between barriers; written as programs for PARMACS are. Each process is
 * created by a CREATE of its own. Rank 0 computes the same alone and compares.
 *
 *     m4 $(pkg-config --variable=parmacs rampool) histogram.C > histogram.c
 *     cc histogram.c $(pkg-config --cflags --libs rampool) -o histogram
 *     rampool launch -n 4 ./histogram -p 4 -n 200000
 */
#include <stdio.h>
#include <unistd.h>

MAIN_ENV

#define BINS 5000
#define ROUNDS 10

/* Shared: all in G_MALLOC memory. */
struct global {
    LOCKDEC(idlock)
    ALOCKDEC(binlock, BINS)
    BARDEC(start)
    BARDEC(rows)
    PAUSEDEC(go)
    PAUSEDEC(ready, 64)
    GSDEC(blocks)
    SEMDEC(sem)
    long id;
    long bins[BINS];
    long taken[64];
    long *extra;
};

/* Private: set before CREATE, and seen by every process that is created. */
struct global *Global;
double *smooth, *next;
long P = 1, N = 100000, bound;
long *weight;
char *title = "none";
unsigned long started;

long bin_of(long i)
{
    unsigned long x = (unsigned long)i * 2654435761UL;
    return (long)((x >> 7) % BINS);
}

void relax(double *from, double *to, long first, long last)
{
    long i;
    for (i = first; i < last; i++)
        to[i] = i == 0 || i == BINS - 1 ? from[i] : (from[i - 1] + 2 * from[i] + from[i + 1]) / 4;
}

void slave_start()
{
    long me, i, block, round;
    double *swap, *from = smooth, *to = next;

    LOCK(Global->idlock)
    me = Global->id++;
    UNLOCK(Global->idlock)
    if (me != 0) {
        /* The creating process says when. */
        WAITPAUSE(Global->go)
        SETPAUSE(Global->ready, me)
    }
    BARRIER(Global->start, P)
    for (i = me; i < N; i += P) {
        ALOCK(Global->binlock, bin_of(i))
        Global->bins[bin_of(i)] += weight[i % bound];
        AULOCK(Global->binlock, bin_of(i))
    }
    BARRIER(Global->start, P)

    /* Blocks of ten bins, for the next free process. */
    GETSUB(Global->blocks, block, BINS / 10 - 1, P)
    while (block >= 0) {
        for (i = block * 10; i < block * 10 + 10; i++)
            smooth[i] = (double)Global->bins[i];
        Global->taken[me]++;
        GETSUB(Global->blocks, block, BINS / 10 - 1, P)
    }
    BARRIER(Global->rows, P)
    for (round = 0; round < ROUNDS; round++) {
        relax(from, to, BINS * me / P, BINS * (me + 1) / P);
        BARRIER(Global->rows, P)
        swap = from;
        from = to;
        to = swap;
    }
    /* Memory that is allocated late is shared too. */
    if (me == P - 1) {
        Global->extra = (long *) G_MALLOC(3 * sizeof(long));
        Global->extra[1] = 4711;
        SEMPOST(Global->sem)
    }
    if (me == 0) {
        SEMWAIT(Global->sem)
        if (Global->extra[1] != 4711) {
            printf("the late allocation has %ld\n", Global->extra[1]);
            exit(1);
        }
        G_FREE(Global->extra);
    }
    bound = -1; /* private again: no other process may see that */
}

int main(int argc, char **argv)
{
    long i, round, total = 0, wrong = 0, sum = 0;
    long expected[BINS];
    double *a, *b, *swap;
    int c;

    while ((c = getopt(argc, argv, "p:n:t:")) != -1) {
        switch (c) {
        case 'p': P = atol(optarg); break;
        case 'n': N = atol(optarg); break;
        case 't': title = optarg; break;
        }
    }
    MAIN_INITENV(,80000000)
    CLOCK(started)
    bound = 17;
    weight = (long *)malloc(bound * sizeof(long));
    for (i = 0; i < bound; i++)
        weight[i] = i + 1;
    Global = (struct global *) G_MALLOC(sizeof(struct global));
    smooth = (double *) G_MALLOC(BINS * sizeof(double));
    next = (double *) G_MALLOC(BINS * sizeof(double));
    LOCKINIT(Global->idlock)
    ALOCKINIT(Global->binlock, BINS)
    BARINIT(Global->start, P)
    BARINIT(Global->rows, P)
    PAUSEINIT(Global->go)
    PAUSEINIT(Global->ready, 64)
    GSINIT(Global->blocks)
    SEMINIT(Global->sem, 0)
    Global->id = 0;
    /* Each CREATE copies the variables as they are at that moment. */
    for (i = 1; i < P; i++) {
        CREATE(slave_start)
    }
    SETPAUSE(Global->go)
    slave_start();
    for (i = 1; i < P; i++) {
        WAITPAUSE(Global->ready, i)
    }
    WAIT_FOR_END(P - 1)

    for (i = 0; i < BINS; i++)
        expected[i] = 0;
    for (i = 0; i < N; i++)
        expected[bin_of(i)] += weight[i % 17];
    a = (double *)malloc(BINS * sizeof(double));
    b = (double *)malloc(BINS * sizeof(double));
    for (i = 0; i < BINS; i++) {
        a[i] = (double)expected[i];
        total += Global->bins[i];
        wrong += Global->bins[i] != expected[i];
    }
    for (round = 0; round < ROUNDS; round++) {
        relax(a, b, 0, BINS);
        swap = a;
        a = b;
        b = swap;
    }
    for (i = 0; i < BINS; i++)
        wrong += a[i] != smooth[i];
    for (i = 0; i < P; i++)
        sum += Global->taken[i];
    if (wrong != 0 || sum != BINS / 10 || Global->id != P || bound != -1) {
        printf("%ld wrong, %ld blocks, %ld processes, bound %ld\n", wrong, sum, Global->id, bound);
        exit(1);
    }
    printf("%s: total %ld\n", title, total);
    free(a);
    free(b);
    MAIN_END
}
