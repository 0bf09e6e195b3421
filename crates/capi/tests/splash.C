/*
 * What programs of SPLASH do, and other programs for PARMACS need not: declare and use what processes share in files with neither MAIN_ENV nor
 * EXTERN_ENV, leave out the semicolon behind G_MALLOC, take PAGE_SIZE from the macros, and name to
 * simulators what is to be measured.
 *
 *     splash PROCESSES
 */
#include <stdio.h>

struct cell {
    LOCKDEC(lock)
    ALOCKDEC(locks, 3)
    CONDVARDEC(filled)
    BARDEC(all)
    long next, sums[3], filled_sums;
    double *room;
};
struct cell *cell;
long P = 1;

long add(long me)
{
    long of = me % 3, last;

    ALOCK(cell->locks, of)
    cell->sums[of] += me + 1;
    AULOCK(cell->locks, of)
    LOCK(cell->lock)
    if (++cell->filled_sums == P)
        CONDVARBCAST(cell->filled)
    while (cell->filled_sums < P)
        CONDVARWAIT(cell->filled, cell->lock)
    last = cell->sums[0] + cell->sums[1] + cell->sums[2];
    UNLOCK(cell->lock)
    BARRIER(cell->all, P)
    return last;
}

void begin()
{
    LOCKINIT(cell->lock)
    ALOCKINIT(cell->locks, 3)
    CONDVARINIT(cell->filled)
    BARINIT(cell->all, P)
    BARINCLUDE(cell->all);
}

MAIN_ENV

double *new_room(long numbers)
{
    double *room = (double *) G_MALLOC(numbers * sizeof(double) + PAGE_SIZE)
    return room;
}

void work()
{
    long me;

    /* As SPLASH-4 writes it. */
    me = FETCH_ADD(cell->next, 1)
    cell->room[me] = (double)add(me);
}

int main(int argc, char **argv)
{
    long i;
    double sum = 0;

    MAIN_INITENV(,1000)
    P = argc > 1 ? atol(argv[1]) : 1;
    cell = (struct cell *) G_MALLOC(sizeof(struct cell));
    begin();
    cell->room = new_room(P);
    SPLASH3_ROI_BEGIN();
    SPLASH4_ROI_BEGIN();
    CREATE(work, P)
    WAIT_FOR_END(P)
    SPLASH4_ROI_END();
    SPLASH3_ROI_END();
    for (i = 0; i < P; i++)
        sum += cell->room[i];
    printf("%ld processes: %g\n", P, sum);
    G_FREE(cell->room)
    MAIN_END
}
