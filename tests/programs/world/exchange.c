// Two ranks sort and exchange halves. Usage: mpirun -np 2 exchange NUMBERS
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int order(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}
int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const int n = atoi(argv[1]), half = n / 2;
    uint64_t *mine = malloc(n * 8), *theirs = malloc(n * 8), state = rank + 1, sum = 0, all[2];
    for (int i = 0; i < n; i++) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        mine[i] = state >> 20;
    }
    qsort(mine, n, 8, order);
    for (int round = 0; round < 4; round++) {
        MPI_Sendrecv(mine, n, MPI_UINT64_T, 1 - rank, 0, theirs, n, MPI_UINT64_T, 1 - rank, 0, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
        for (int i = 0; i < half; i++) mine[2 * i] = theirs[i + (round & 1) * (n - half)] + round;
    }
    for (int i = 0; i < n; i++) sum = sum * 31 + mine[i];
    MPI_Gather(&sum, 1, MPI_UINT64_T, all, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%lx %lx\n", all[0], all[1]);
    MPI_Finalize();
}
