/*
 * A queue of tasks that make tasks: the moves of the towers of Hanoi, counted. Tasks and condition variables are made while the processes run; the
 * processes come by one CREATE of P.
 *
 *     m4 $(pkg-config --variable=parmacs rampool) tasks.C > tasks.c
 *     cc tasks.c $(pkg-config --cflags --libs rampool) -o tasks
 *     rampool launch -n 4 ./tasks 4 12
 */
#include <stdio.h>

MAIN_ENV

typedef struct task {
    struct task *next;
    long disks;
} task;

typedef struct {
    CONDVARDEC(full)
    CONDVARDEC(done)
} late_conditions;

typedef struct {
    LOCKDEC(lock)
    task *first;
    long waiting;
    int over;
    late_conditions *late;
    long moves, tickets, cas, flag, alike;
    double average;
} global_memory;

global_memory *gm;
long processes, size;

void put(long disks)
{
    task *t = (task *) G_MALLOC(sizeof(task));
    t->disks = disks;
    LOCK(gm->lock)
    t->next = gm->first;
    gm->first = t;
    CONDVARSIGNAL(gm->late->full)
    UNLOCK(gm->lock)
}

task *get()
{
    task *t;
    LOCK(gm->lock)
    while (gm->first == NULL && !gm->over) {
        gm->waiting++;
        if (gm->waiting == processes) {
            gm->over = 1;
            CONDVARBCAST(gm->late->full)
        } else {
            CONDVARWAIT(gm->late->full, gm->lock)
        }
        gm->waiting--;
    }
    t = gm->first;
    if (t != NULL)
        gm->first = t->next;
    UNLOCK(gm->lock)
    return t;
}

void work()
{
    task *t;
    long seen, first;

    /* The first to come makes the condition variables. */
    LOCK(gm->lock)
    first = gm->late == NULL;
    if (first) {
        gm->late = (late_conditions *) G_MALLOC(sizeof(late_conditions));
        CONDVARINIT(gm->late->full)
        CONDVARINIT(gm->late->done)
    }
    UNLOCK(gm->lock)
    if (first)
        put(size);
    while ((t = get()) != NULL) {
        if (t->disks > 6) {
            put(t->disks - 1);
            put(t->disks - 1);
            FETCH_ADD(gm->moves, 1);
        } else {
            FETCH_ADD(gm->moves, (1L << t->disks) - 1);
        }
        G_FREE(t);
    }
    /* Each way to add one. */
    FETCH_ADD(gm->tickets, 2);
    FETCH_SUB(gm->tickets, 1);
    FETCH_ADD_DOUBLE(&gm->average, 0.5);
    seen = LOAD(gm->cas);
    while (!CAS(gm->cas, seen, seen + 1)) {
    }
    FENCE
    seen = FETCH_ADD(gm->alike, 1)
    if (seen == processes - 1) {
        STORE(gm->flag, 99);
        LOCK(gm->lock)
        gm->waiting = -1;
        CONDVARBCAST(gm->late->done)
        UNLOCK(gm->lock)
    }
    LOCK(gm->lock)
    while (gm->waiting != -1) {
        CONDVARWAIT(gm->late->done, gm->lock)
    }
    UNLOCK(gm->lock)
}

int main(int argc, char **argv)
{
    processes = argc > 1 ? atol(argv[1]) : 1;
    size = argc > 2 ? atol(argv[2]) : 10;
    MAIN_INITENV(,80000000)
    gm = (global_memory *) G_MALLOC(sizeof(global_memory));
    memset(gm, 0, sizeof *gm);
    LOCKINIT(gm->lock)
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    printf("%ld moves, %ld tickets, %ld, %ld, %g\n", gm->moves, gm->tickets, LOAD(gm->cas), LOAD(gm->flag), gm->average);
    return 0;
}
