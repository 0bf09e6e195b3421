/*
 * The program of the DLM-M paper in shape: start, take one array larger than this machine lends, write it,
 * read it, give it back, end.
 *
 *     ./dlmm_array MEGABYTES -- -n 3 -f dlmm.conf
 */
#include <stdio.h>
#include <stdlib.h>

#include <dlmm.h>

int main(int argc, char **argv)
{
    double *a;
    double sum = 0;
    size_t i, n;

    if (argc < 2) {
        fprintf(stderr, "usage: %s MEGABYTES -- -n NODES -f dlmm.conf\n", argv[0]);
        return 2;
    }
    n = strtoul(argv[1], NULL, 10) * 1024 * 1024 / sizeof(double);

    if (dlmm_startup(argc, argv) != 0)
        return 1;
    a = (double *)dlmm_alloc(n * sizeof(double));
    if (a == NULL)
        return 1;

    for (i = 0; i < n; i++)
        a[i] = (double)i;
    for (i = 0; i < n; i++)
        sum += a[i];

    dlmm_free(a);
    dlmm_shutdown();

    printf("sum of %zu numbers: %.0f\n", n, sum);
    return sum == (double)n * (double)(n - 1) / 2 ? 0 : 1;
}
