/*
 * A sum over shared memory, with the interface of tsm.h. Node 0 fills an array, all nodes add up parts of it
 * under a lock, then each replaces its part, and all check the whole.
 *
 *     rampool launch -n 4 ./tsm_sum 1000000
 */
#include <stdio.h>
#include <stdlib.h>
#include <tsm.h>

int main(int argc, char **argv)
{
    long n = argc > 1 ? atol(argv[1]) : 100000, i, first, last, sum = 0, wrong = 0;
    long *a, *total;

    if (tsm_startup(argc, argv) != 0)
        return 1;
    a = tsm_alloc((size_t)n * sizeof *a);
    total = tsm_alloc(sizeof *total);
    if (a == NULL || total == NULL)
        return 1;
    if (TSM_PID == 0)
        for (i = 0; i < n; i++)
            a[i] = i;
    tsm_create_procs();

    first = n * TSM_PID / TSM_NUMNODES;
    last = n * (TSM_PID + 1) / TSM_NUMNODES;
    for (i = first; i < last; i++)
        sum += a[i];
    tsm_lock(1);
    *total += sum;
    tsm_unlock(1);
    tsm_barrier(0);
    if (TSM_PID == 0)
        printf("sum of %ld numbers on %d nodes: %ld\n", n, TSM_NUMNODES, *total);
    for (i = first; i < last; i++)
        a[i] = n - i;
    tsm_barrier(1);
    for (i = 0; i < n; i++)
        wrong += a[i] != n - i;
    tsm_finish();
    return wrong != 0;
}
