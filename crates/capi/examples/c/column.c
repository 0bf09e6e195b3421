/*
 * Shared memory, used directly: rank 0 fills a table, the others gather a column of it without its pages, and
 * a process outside the run uses it too.
 *
 *     rampool launch -n 3 ./column
 *     rampool launch -n 3 ./column wait        prints a ticket, and waits for
 *     ./column TICKET
 */
#include <rampool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 500
#define ROW 4096
#define COUNT 24
#define FLAG 32

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

static rampool_layout *column(rampool_layout **dense)
{
    rampool_layout *cell, *all;

    must(rampool_layout_bytes(8, &cell), "a cell");
    must(rampool_layout_hvector(cell, ROWS, 1, ROW, &all), "a column");
    must(rampool_layout_contiguous(cell, ROWS, dense), "numbers");
    rampool_layout_free(cell);
    return all;
}

static void outsider(const char *ticket)
{
    rampool_outside *outside;
    rampool_shared_direct *table;
    rampool_layout *dense, *cells = column(&dense);
    static double prices[ROWS];
    const uint64_t one = 1, none = 0;
    uint64_t before;

    must(rampool_outside_open(ticket, NULL, &outside), "come in");
    check(rampool_outside_open_region(outside, "chair", &table) == RAMPOOL_STATUS_INVALID && table == NULL,
          "no such region");
    must(rampool_outside_open_region(outside, "table", &table), "open");
    must(rampool_shared_direct_get_layout(table, 16, cells, prices, dense), "gather");
    check(prices[0] == 0.5 && prices[ROWS - 1] == ROWS - 0.5, "the prices");
    must(rampool_shared_direct_fetch_op(table, COUNT, RAMPOOL_KIND_U64, RAMPOOL_COMBINE_SUM, &one, NULL),
         "count");
    must(rampool_shared_direct_compare_exchange(table, FLAG, RAMPOOL_KIND_U64, &none, &one, &before), "flag");
    check(before == 0, "the flag");
    printf("%d prices from outside\n", ROWS);
    rampool_shared_direct_close(table);
    rampool_outside_close(outside);
    rampool_layout_free(cells);
    rampool_layout_free(dense);
}

static void run(int waits)
{
    rampool_shared *shared;
    rampool_shared_direct *table;
    rampool_layout *dense, *cells = column(&dense);
    static double prices[ROWS];
    static int64_t ones[ROWS];
    char ticket[4096];
    const uint64_t one = 1;
    uint64_t count;
    uint32_t rank, ranks;
    double sum = 0;
    char *memory;
    void *address;
    long i;

    must(rampool_shared_join(&shared), "join");
    rank = rampool_shared_rank(shared);
    ranks = rampool_shared_ranks(shared);
    must(rampool_shared_alloc(shared, (size_t)ROWS * ROW, NULL, &address), "alloc");
    memory = address;
    must(rampool_shared_direct_open(shared, address, &table), "open");
    check(rampool_shared_direct_bytes(table) == (uint64_t)ROWS * ROW, "its length");
    if (rank == 0)
        for (i = 0; i < ROWS; i++)
            *(double *)(memory + i * ROW + 16) = i + 0.5;
    must(rampool_shared_barrier(shared, 0), "barrier");
    must(rampool_shared_direct_get_layout(table, 16, cells, prices, dense), "gather");
    for (i = 0; i < ROWS; i++) {
        sum += prices[i];
        ones[i] = 1;
    }
    check(sum == ROWS * (double)ROWS / 2, "the prices");
    must(rampool_shared_direct_accumulate(table, 64, cells, RAMPOOL_KIND_I64, RAMPOOL_COMBINE_SUM, ones),
         "add");
    must(rampool_shared_direct_fetch_op(table, COUNT, RAMPOOL_KIND_U64, RAMPOOL_COMBINE_SUM, &one, &count),
         "count");
    check(count <= ranks, "the count before");
    must(rampool_shared_direct_put(table, ROW + 128 + 8 * rank, &sum, sizeof sum), "put");
    sum = 0;
    if (waits) {
        must(rampool_shared_publish(shared, "table", address), "publish");
        must(rampool_shared_listen(shared, "127.0.0.1:0", ticket, sizeof ticket), "listen");
        if (rank == 0) {
            printf("%s\n", ticket);
            fflush(stdout);
        }
        do
            must(rampool_shared_atomic(shared, memory + FLAG, 8, RAMPOOL_ATOMIC_LOAD, 0, &count), "flag");
        while (count == 0);
    }
    must(rampool_shared_barrier(shared, 1), "barrier");
    for (i = 0; i < ROWS; i++)
        check(*(int64_t *)(memory + i * ROW + 64) == ranks, "what all added");
    for (i = 0; i < (long)ranks; i++)
        check(*(double *)(memory + ROW + 128 + 8 * i) == ROWS * (double)ROWS / 2, "what each put");
    must(rampool_shared_atomic(shared, memory + COUNT, 8, RAMPOOL_ATOMIC_LOAD, 0, &count), "count");
    check(count == ranks + (waits ? 1 : 0), "the count");
    check(rampool_shared_direct_put(table, (uint64_t)ROWS * ROW - 4, &sum, 8) == RAMPOOL_STATUS_INVALID,
          "beyond the end");
    if (rank == 0)
        printf("%u ranks, %d rows\n", ranks, ROWS);
    rampool_shared_direct_close(table);
    rampool_layout_free(cells);
    rampool_layout_free(dense);
    must(rampool_shared_close(shared), "close");
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "wait") != 0)
        outsider(argv[1]);
    else
        run(argc == 2);
    return 0;
}
