/*
 * A store that several processes share: a child puts results, the parent reads and removes them.
 *
 *     ./store SERVER RESULTS BYTES              for example: ./store memhost1 100 100000
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rampool.h>

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, rampool_error_message());
    return 1;
}

/* Puts the results, each under its number. */
static int work(const char *ticket, unsigned results, size_t bytes)
{
    rampool_builder *builder = rampool_builder_new();
    rampool_direct *direct;
    rampool_store *store;
    unsigned char *value = malloc(bytes);

    if (value == NULL || rampool_direct_join(builder, ticket, &direct) != RAMPOOL_STATUS_OK)
        return failed("join");
    rampool_builder_free(builder);
    if (rampool_store_open(direct, "results", 0, 0, &store) != RAMPOOL_STATUS_OK)
        return failed("worker: open");
    for (unsigned n = 0; n < results; n++) {
        memset(value, (int)n, bytes);
        if (rampool_store_put(direct, store, &n, sizeof n, value, bytes) != RAMPOOL_STATUS_OK)
            return failed("worker: put");
    }
    rampool_store_free(store);
    rampool_direct_close(direct);
    free(value);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: %s SERVER RESULTS BYTES\n", argv[0]);
        return 2;
    }
    unsigned results = (unsigned)strtoul(argv[2], NULL, 10);
    size_t bytes = strtoul(argv[3], NULL, 10), has = 0;
    rampool_builder *builder;
    rampool_direct *direct;
    rampool_store *store;
    unsigned char *value = malloc(bytes);
    uint64_t count;
    char ticket[4096];
    int ways[2], status;
    pid_t worker;

    /* The worker joins by ticket. It is started before there are connections. */
    if (value == NULL || pipe(ways) != 0 || (worker = fork()) < 0)
        return 1;
    if (worker == 0) {
        close(ways[1]);
        return read(ways[0], ticket, sizeof ticket) <= 0 ? 1 : work(ticket, results, bytes);
    }
    builder = rampool_builder_new();
    if (rampool_builder_set(builder, "server", argv[1]) != RAMPOOL_STATUS_OK ||
        rampool_builder_set(builder, "memory", "128M") != RAMPOOL_STATUS_OK ||
        rampool_direct_open(builder, &direct) != RAMPOOL_STATUS_OK)
        return failed("open");
    rampool_builder_free(builder);
    if (rampool_store_open(direct, "results", 10000, 0, &store) != RAMPOOL_STATUS_OK ||
        rampool_direct_ticket(direct, ticket, sizeof ticket) != RAMPOOL_STATUS_OK ||
        write(ways[1], ticket, sizeof ticket) != sizeof ticket)
        return failed("store");
    if (waitpid(worker, &status, 0) != worker || status != 0)
        return 1;
    if (rampool_store_count(direct, store, &count) != RAMPOOL_STATUS_OK || count != results)
        return failed("count");
    for (unsigned n = 0; n < results; n++) {
        status = rampool_store_get(direct, store, &n, sizeof n, value, bytes - 1, &has);
        if (status != RAMPOOL_STATUS_NO_ROOM || has != bytes)
            return failed("a buffer that is too short");
        if (rampool_store_get(direct, store, &n, sizeof n, value, bytes, &has) != RAMPOOL_STATUS_OK ||
            has != bytes)
            return failed("get");
        if (value[0] != (unsigned char)n || value[bytes - 1] != (unsigned char)n) {
            fprintf(stderr, "result %u is wrong\n", n);
            return 1;
        }
        if (rampool_store_remove(direct, store, &n, sizeof n) != RAMPOOL_STATUS_OK ||
            rampool_store_get(direct, store, &n, sizeof n, value, bytes, &has) != RAMPOOL_STATUS_GONE)
            return failed("remove");
    }
    printf("%u results of %zu bytes were put, read and removed\n", results, bytes);
    rampool_store_free(store);
    rampool_direct_close(direct);
    free(value);
    return 0;
}
