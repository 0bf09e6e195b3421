/*
 * A DLM-M program as its authors write one: it takes one array, uses it, gives it back, and looks at nothing
 * that the system returns. It knows no option of the system and no name of rampool; what stands behind `--`
 * on its command line is not its business.
 */
#include <stdio.h>
#include <dlmm.h>

#define N (24 * 1024 * 1024)

int main(int argc, char *argv[])
{
    int *data;
    long i, sum = 0;

    dlmm_startup(argc, argv);

    data = (int *)dlmm_alloc(N * sizeof(int));
    for (i = 0; i < N; i++)
        data[i] = i % 1000;
    for (i = 0; i < N; i++)
        sum += data[i];
    dlmm_free(data);

    dlmm_shutdown();

    printf("sum = %ld\n", sum);
    return 0;
}
