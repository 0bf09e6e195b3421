/* What OpenMPI's one-sided operations take for the layouts of `rampool bench openmpi`.
 *
 * Rank 1 exposes a window; rank 0 reads the number of a layout from each line of standard input, gets it,
 * compares every byte with what MPI_Pack makes of the same content, and prints the microseconds. Between two
 * turns neither rank runs: OpenMPI waits by polling, which would disturb the other side's turn.
 * Arguments: bytes of the window, elements with stride 4 KiB, the seed, and a named pipe by which rank 0
 * wakes rank 1. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CELLS = 4, SIDE = 32 };

static uint64_t word(uint64_t seed, uint64_t index)
{
    uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void *memory(size_t bytes)
{
    void *found = malloc(bytes);
    if (!found) {
        fprintf(stderr, "no memory\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return found;
}

/* `count` words at random places among `words`, none twice. */
static MPI_Datatype random_words(uint64_t seed, size_t words, size_t count)
{
    uint32_t *order = memory(words * sizeof *order);
    for (size_t n = 0; n < words; n++)
        order[n] = (uint32_t)n;
    for (size_t last = words - 1; last > 0; last--) {
        size_t other = word(seed, last) % (last + 1);
        uint32_t kept = order[last];
        order[last] = order[other];
        order[other] = kept;
    }
    int *places = memory(count * sizeof *places);
    for (size_t n = 0; n < count; n++)
        places[n] = (int)order[n];
    MPI_Datatype type;
    MPI_Type_create_indexed_block((int)count, 1, places, MPI_UINT64_T, &type);
    free(places);
    free(order);
    return type;
}

/* The eight faces of a lattice of SIDE^4 words. */
static MPI_Datatype faces(void)
{
    MPI_Datatype parts[8], type;
    int lengths[8];
    MPI_Aint places[8];
    for (int face = 0; face < 8; face++) {
        int sizes[4] = {SIDE, SIDE, SIDE, SIDE}, part[4] = {SIDE, SIDE, SIDE, SIDE}, start[4] = {0, 0, 0, 0};
        part[face / 2] = 1;
        start[face / 2] = face % 2 ? SIDE - 1 : 0;
        MPI_Type_create_subarray(4, sizes, part, start, MPI_ORDER_C, MPI_UINT64_T, &parts[face]);
        lengths[face] = 1;
        places[face] = 0;
    }
    MPI_Type_create_struct(8, lengths, places, parts, &type);
    return type;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 5 || ranks != 2) {
        fprintf(stderr, "two ranks, and: BYTES SPARSE SEED PIPE\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    size_t bytes = strtoull(argv[1], NULL, 10), sparse = strtoull(argv[2], NULL, 10);
    uint64_t seed = strtoull(argv[3], NULL, 10);
    size_t words = bytes / 8, dense = bytes / 64;

    /* Each rank on a CPU of its own, where there are two. */
    cpu_set_t all, one;
    CPU_ZERO(&all);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        CPU_SET(cpu, &all);
    /* The parent may be bound to one CPU. The kernel ignores CPUs that do not exist. */
    sched_setaffinity(0, sizeof all, &all);
    sched_getaffinity(0, sizeof all, &all);
    int first = -1, last = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all)) {
            first = first < 0 ? cpu : first;
            last = cpu;
        }
    CPU_ZERO(&one);
    CPU_SET(rank ? last : first, &one);
    sched_setaffinity(0, sizeof one, &one);

    uint64_t *content, *exposed;
    MPI_Win window;
    MPI_Win_allocate(rank ? (MPI_Aint)bytes : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &exposed, &window);
    if (rank) {
        for (size_t n = 0; n < words; n++)
            exposed[n] = word(seed, n);
        MPI_Barrier(MPI_COMM_WORLD);
        int turns = open(argv[4], O_RDONLY);
        char turn;
        while (read(turns, &turn, 1) == 1) {
            MPI_Send(NULL, 0, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
            /* Waiting for a message is what keeps one-sided operations going. */
            MPI_Recv(NULL, 0, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        }
    } else {
        content = memory(bytes);
        for (size_t n = 0; n < words; n++)
            content[n] = word(seed, n);
        MPI_Datatype types[CELLS];
        MPI_Type_create_hvector((int)sparse, 1, 4096, MPI_UINT64_T, &types[0]);
        MPI_Type_create_hvector((int)dense, 1, 64, MPI_UINT64_T, &types[1]);
        types[2] = random_words(seed, words, dense);
        types[3] = faces();
        void *got[CELLS], *wanted[CELLS];
        int sizes[CELLS];
        for (int cell = 0; cell < CELLS; cell++) {
            int at = 0;
            MPI_Type_commit(&types[cell]);
            MPI_Type_size(types[cell], &sizes[cell]);
            got[cell] = memory((size_t)sizes[cell]);
            wanted[cell] = memory((size_t)sizes[cell]);
            MPI_Pack(content, 1, types[cell], wanted[cell], sizes[cell], &at, MPI_COMM_SELF);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        int turns = open(argv[4], O_WRONLY);
        printf("ready\n");
        fflush(stdout);
        char line[32];
        while (fgets(line, sizeof line, stdin)) {
            int cell = atoi(line);
            if (cell < 0 || cell >= CELLS)
                break;
            memset(got[cell], 0, (size_t)sizes[cell]);
            if (write(turns, "t", 1) != 1)
                break;
            MPI_Recv(NULL, 0, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Win_lock(MPI_LOCK_SHARED, 1, 0, window);
            MPI_Win_flush(1, window);
            double began = MPI_Wtime();
            MPI_Get(got[cell], sizes[cell], MPI_BYTE, 1, 0, 1, types[cell], window);
            MPI_Win_flush(1, window);
            double took = MPI_Wtime() - began;
            MPI_Win_unlock(1, window);
            MPI_Send(NULL, 0, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
            if (memcmp(got[cell], wanted[cell], (size_t)sizes[cell])) {
                fprintf(stderr, "WRONG CONTENT of layout %d\n", cell);
                MPI_Abort(MPI_COMM_WORLD, 3);
            }
            printf("%.3f\n", took * 1e6);
            fflush(stdout);
        }
        close(turns);
    }
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
