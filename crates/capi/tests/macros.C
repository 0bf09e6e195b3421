/*
 * Every macro of rampool.m4 that the other programs do not use, and those that change words, with numbers that are known.
 *
 *     macros PROCESSES
 */
#include <stdio.h>

MAIN_ENV

#define LOCKS 8000
#define LATE 100000

struct late {
    LOCKDEC(lock)
    CONDVARDEC(filled)
    long here;
};

struct global {
    LOCKDEC(id)
    ALOCKDEC(locks, LOCKS)
    BARDEC(all)
    SEMDEC(one)
    PAUSEDEC(go)
    PAUSEDEC(done, 64)
    NU_GSDEC(numbers)
    long next, guarded[LOCKS], word, swapped, told, subscripts, alone, too_little;
    int small;
    double sum;
    long *numbers_of_one;
    struct late *late;
};
struct global *global;
long P = 1;

/* Words, changed by all at once. */
void change(void)
{
    long i, before;

    for (i = 0; i < LOCKS; i += 7) {
        ALOCK(global->locks, i)
        global->guarded[i]++;
        AUNLOCK(global->locks, i)
    }
    for (i = 0; i < 50; i++) {
        FETCH_ADD(global->word, 3);
        FETCH_SUB(global->word, 1);
        FETCH_ADD(global->small, 1);
        FETCH_ADD_DOUBLE(&global->sum, 0.25);
        /* Its own additions are in what the word was before. */
        if (FETCH_ADD_DOUBLE(&global->sum, 0.25) < 0.5 * i + 0.25)
            FETCH_ADD(global->too_little, 1);
    }
    for (i = 0; i < 20; i++) {
        before = LOAD(global->swapped);
        while (!CAS(global->swapped, before, before + 1))
            ;
    }
    NU_GETSUB(global->numbers, i, 99, P)
    while (i >= 0) {
        FETCH_ADD(global->subscripts, i);
        NU_GETSUB(global->numbers, i, 99, P)
    }
}

/* What one process allocates after CREATE, all use. */
long late(long me)
{
    long i, sum = 0;
    struct late *made;

    if (me == 0) {
        made = (struct late *) G_MALLOC_F(sizeof(struct late));
        LOCKINIT(made->lock)
        CONDVARINIT(made->filled)
        made->here = 0;
        global->late = made;
        global->numbers_of_one = (long *) NU_MALLOC(LATE * sizeof(long), 0)
        for (i = 0; i < LATE; i++)
            global->numbers_of_one[i] = i;
    }
    BARRIER(global->all, P)
    for (i = 0; i < LATE; i++)
        sum += global->numbers_of_one[i];
    LOCK(global->late->lock)
    if (++global->late->here == P)
        CONDVARBCAST(global->late->filled)
    while (global->late->here < P)
        CONDVARWAIT(global->late->filled, global->late->lock)
    UNLOCK(global->late->lock)
    return sum;
}

void work(void)
{
    long me, i, good;

    LOCK(global->id)
    me = global->next++;
    UNLOCK(global->id)
    change();
    good = late(me) == (long)LATE * (LATE - 1) / 2;
    SEMWAIT(global->one)
    global->alone++;
    SEMPOST(global->one)
    if (me == P - 1) {
        STORE(global->told, 77);
        FENCE
        FULL_FENCE
        RELEASE_FENCE
        ACQUIRE_FENCE
        SETPAUSE(global->go)
    }
    PAUSE(global->go)
    good = good && LOAD(global->told) == 77;
    BARRIER(global->all, P)
    /* Cleared, it keeps everybody until it is set again. */
    if (me == 0) {
        CLEARPAUSE(global->go)
        STORE(global->told, 78);
        SETPAUSE(global->done, 1)
        for (i = 2; i <= P; i++)
            PAUSE(global->done, i)
        SETPAUSE(global->go)
    } else {
        WAITPAUSE(global->done, 1)
        good = good && LOAD(global->told) == 78;
        SETPAUSE(global->done, me + 1)
        WAITPAUSE(global->go)
    }
    LOCK(AGETL(global->locks, 1))
    global->guarded[1] += good;
    UNLOCK(AGETL(global->locks, 1))
}

int main(int argc, char **argv)
{
    long i, wrong = 0;
    unsigned long began, ended;

    MAIN_INITENV(,1000000)
    ENV NEWPROC AUG_ON AUG_OFF AUG_DELAY AUG_SET_LOLIMIT AUG_SET_HILIMIT TRACE_ON TRACE_OFF REF_TRACE_ON REF_TRACE_OFF
    DYN_TRACE_ON DYN_TRACE_OFF DYN_REF_TRACE_ON DYN_REF_TRACE_OFF DYN_SIM_ON DYN_SIM_OFF DYN_SCHED_ON DYN_SCHED_OFF ST_LOG BAREXCLUDE
    CLOCK(began)
    P = atol(argv[1]);
    global = (struct global *) NU_MALLOC_F(sizeof(struct global));
    LOCKINIT(global->id)
    ALOCKINIT(global->locks, LOCKS)
    BARINIT(global->all, P)
    SEMINIT(global->one, 1)
    PAUSEINIT(global->go)
    PAUSEINIT(global->done, 64)
    NU_GSINIT(global->numbers)
    CREATE(work, P)
    WAIT_FOR_END(P)
    for (i = 0; i < LOCKS; i++)
        wrong += global->guarded[i] != (i % 7 == 0 || i == 1 ? P : 0);
    printf("%ld wrong, %ld %d %g %ld %ld %ld\n", wrong + global->too_little, global->word, global->small, global->sum, global->swapped, global->subscripts, global->alone);
    NU_FREE(global->numbers_of_one)
    CLOCK(ended)
    return ended < began;
    MAIN_END
}
