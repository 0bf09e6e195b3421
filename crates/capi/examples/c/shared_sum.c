/*
 * Ranks that share memory, with rampool.h: a table filled by all, sums under a lock and by atomic words, a
 * hand-over by a condition variable and by semaphores.
 *
 *     rampool launch -n 4 ./shared_sum
 */
#include <rampool.h>
#include <stdio.h>
#include <stdlib.h>

#define ENTRIES 20000
#define LOCK 7
#define CONDITION 1

static void must(rampool_status status, const char *what)
{
    if (status != RAMPOOL_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", what, rampool_error_message());
        exit(1);
    }
}

static void check(int right, const char *what)
{
    if (!right) {
        fprintf(stderr, "wrong: %s\n", what);
        exit(1);
    }
}

struct table {
    long sum;
    long turn;
    uint64_t tickets;
    uint32_t small;
    double average;
    long entries[ENTRIES];
};

int main(void)
{
    rampool_shared *shared;
    void *memory, *private_memory;
    uint64_t before;
    uint32_t home, rank, ranks;
    double halves;
    long i, sum = 0;

    must(rampool_shared_join(&shared), "join");
    rank = rampool_shared_rank(shared);
    ranks = rampool_shared_ranks(shared);
    must(rampool_shared_alloc(shared, sizeof(struct table), "homes=blocked page-size=8K", &memory), "alloc");
    struct table *table = memory;

    for (i = rank; i < ENTRIES; i += ranks)
        table->entries[i] = i;
    must(rampool_shared_barrier_keep(shared, 0), "barrier");
    for (i = 0; i < ENTRIES; i++)
        sum += table->entries[i];
    must(rampool_shared_lock(shared, LOCK), "lock");
    table->sum += sum;
    must(rampool_shared_unlock(shared, LOCK), "unlock");

    /* Ranks take turns, in order. */
    must(rampool_shared_lock(shared, LOCK), "lock");
    while (table->turn != (long)rank)
        must(rampool_shared_wait(shared, CONDITION, LOCK), "wait");
    table->turn++;
    must(rampool_shared_broadcast(shared, CONDITION, LOCK), "broadcast");
    must(rampool_shared_unlock(shared, LOCK), "unlock");

    must(rampool_shared_atomic(shared, &table->tickets, 8, RAMPOOL_ATOMIC_ADD, 3, NULL), "add");
    must(rampool_shared_atomic(shared, &table->small, 4, RAMPOOL_ATOMIC_OR, UINT64_C(1) << rank, NULL), "or");
    must(rampool_shared_add_double(shared, &table->average, 0.5, &halves), "add a double");
    check(halves >= 0 && halves < ranks, "the double before");

    /* A ring of semaphores. */
    if (rank == 0)
        must(rampool_shared_semaphore_post(shared, 0), "post");
    must(rampool_shared_semaphore_wait(shared, rank), "wait for the semaphore");
    must(rampool_shared_semaphore_post(shared, rank + 1), "post");

    /* Readers together, a try, and errors that are returned. */
    must(rampool_shared_lock_shared(shared, LOCK + 1), "lock shared");
    must(rampool_shared_barrier(shared, 1), "barrier");
    check(ranks == 1 || rampool_shared_try_lock(shared, LOCK + 1) != RAMPOOL_STATUS_OK,
          "a lock that others read is taken");
    check(rampool_shared_unlock(shared, 12345) == RAMPOOL_STATUS_INVALID,
          "a lock that is not held is given back");
    check(rampool_shared_alloc(shared, 1, "colour=red", &private_memory) == RAMPOOL_STATUS_INVALID &&
              private_memory == NULL,
          "an option");
    check(rampool_shared_atomic(shared, &sum, 8, RAMPOOL_ATOMIC_LOAD, 0, NULL) == RAMPOOL_STATUS_INVALID,
          "an atomic on the stack");
    must(rampool_shared_barrier(shared, 2), "barrier");
    must(rampool_shared_unlock(shared, LOCK + 1), "unlock");
    must(rampool_shared_barrier(shared, 3), "barrier");
    if (rank == 0) {
        must(rampool_shared_try_lock(shared, LOCK + 1), "try");
        must(rampool_shared_unlock(shared, LOCK + 1), "unlock");
    }

    must(rampool_shared_atomic(shared, &table->tickets, 8, RAMPOOL_ATOMIC_LOAD, 0, &before), "load");
    check(before == 3 * (uint64_t)ranks, "tickets");
    must(rampool_shared_atomic(shared, &table->small, 4, RAMPOOL_ATOMIC_LOAD, 0, &before), "load");
    check(before == (UINT64_C(1) << ranks) - 1, "bits");
    must(rampool_shared_barrier(shared, 6), "barrier");
    if (rank == 0) {
        must(rampool_shared_compare_exchange(shared, &table->tickets, 8, 3 * (uint64_t)ranks, 1, &before),
             "exchange");
        check(before == 3 * (uint64_t)ranks, "the word before the exchange");
    }

    /* Homes and managers by hand. */
    must(rampool_shared_set_home(shared, memory, 1, ranks - 1), "set home");
    must(rampool_shared_set_lock_manager(shared, LOCK, ranks - 1), "set manager");
    must(rampool_shared_barrier(shared, 4), "barrier");
    must(rampool_shared_home(shared, memory, &home), "home");
    check(home == ranks - 1, "the home did not move");
    check(table->average == 0.5 * ranks && table->turn == (long)ranks, "the table");

    rampool_shared_stats stats;
    must(rampool_shared_count(shared, &stats, sizeof stats), "count");
    check(stats.barriers >= 5 && stats.lock_acquires > 0 && (ranks == 1 || stats.sent_messages > 0),
          "counts");
    if (rank == 0)
        printf("sum %ld\n", table->sum);
    must(rampool_shared_barrier(shared, 5), "barrier");
    must(rampool_shared_free(shared, memory), "free");
    check(rampool_shared_free(shared, memory) == RAMPOOL_STATUS_INVALID, "freed twice");
    must(rampool_shared_close(shared), "close");
    return 0;
}
