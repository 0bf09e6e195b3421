/*
 * One array in a region, larger than the local memory.
 *
 *     ./array SERVER MEGABYTES LOCAL_MEGABYTES        for example: ./array memhost1=4G 2048 512
 */
#include <stdio.h>
#include <stdlib.h>

#include <rampool.h>

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, rampool_error_message());
    return 1;
}

int main(int argc, char **argv)
{
    rampool_builder *builder;
    rampool_pool *pool;
    rampool_region *region;
    rampool_stats stats;
    char local[32];
    unsigned long long *a;
    unsigned long long sum = 0;
    size_t i, n;

    if (argc != 4) {
        fprintf(stderr, "usage: %s SERVER MEGABYTES LOCAL_MEGABYTES\n", argv[0]);
        return 2;
    }
    n = strtoul(argv[2], NULL, 10) * 1024 * 1024 / sizeof *a;
    snprintf(local, sizeof local, "%sM", argv[3]);

    builder = rampool_builder_new();
    if (rampool_builder_set(builder, "server", argv[1]) != RAMPOOL_STATUS_OK ||
        rampool_builder_set(builder, "local", local) != RAMPOOL_STATUS_OK)
        return failed("options");
    if (rampool_open(builder, &pool) != RAMPOOL_STATUS_OK)
        return failed("open");
    rampool_builder_free(builder);
    if (rampool_region_alloc(pool, n * sizeof *a, &region) != RAMPOOL_STATUS_OK)
        return failed("alloc");

    a = rampool_region_address(region);
    for (i = 0; i < n; i++)
        a[i] = i;
    for (i = 0; i < n; i++)
        sum += a[i];
    if (sum != (unsigned long long)n * (n - 1) / 2)
        return 1;

    if (rampool_pool_stats(pool, &stats, sizeof stats) != RAMPOOL_STATUS_OK)
        return failed("stats");
    printf("sum of %zu numbers: %llu\n", n, sum);
    printf("%llu faults, %llu pages fetched, %llu written back\n", (unsigned long long)stats.faults,
           (unsigned long long)(stats.demand_pages + stats.prefetched_pages),
           (unsigned long long)stats.written_back_pages);

    if (rampool_region_advise(region, 0, 4096, RAMPOOL_ADVICE_DISCARD) != RAMPOOL_STATUS_OK)
        return failed("advise");
    if (a[0] != 0 || a[511] != 0 || a[512] != 512)
        return 1;

    rampool_region_free(region);
    return rampool_close(pool) == RAMPOOL_STATUS_OK ? 0 : failed("close");
}
