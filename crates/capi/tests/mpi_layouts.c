/*
 * Random nested datatypes: what a decoded layout selects is what MPI_Pack packs, here and at a memory server.
 *
 *     ./mpi_layouts SERVER SEED COUNT
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rampool_mpi.h>

#define REACH 100000 /* bytes that a datatype may reach on either side */

static unsigned long long state;
static unsigned char buffer[2 * REACH], packed[2 * REACH], expected[2 * REACH], back[2 * REACH],
    image[2 * REACH];

static int below(int n)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int)((state >> 33) % (unsigned long long)n);
}

/* Whether a part of the datatype is empty: of several elements of such a struct, Open MPI 4.1 packs other
 * bytes than lie an extent apart. */
static int hollow;

/* What a process of a grid has of an array of one to three dimensions. */
static MPI_Datatype random_darray(MPI_Datatype part)
{
    static const int all_ways[3] = {MPI_DISTRIBUTE_BLOCK, MPI_DISTRIBUTE_CYCLIC, MPI_DISTRIBUTE_NONE};
    int sizes[3], ways[3], lengths[3], grid[3], n, least, processes = 1, dimensions = 1 + below(3);
    MPI_Datatype type;
    /* Open MPI 4.1 makes none of empty elements. */
    MPI_Type_size(part, &n);
    if (n == 0)
        return part;
    for (n = 0; n < dimensions; n++) {
        ways[n] = all_ways[below(3)];
        grid[n] = ways[n] == MPI_DISTRIBUTE_NONE ? 1 : 1 + below(3);
        sizes[n] = grid[n] + below(6);
        least = ways[n] == MPI_DISTRIBUTE_BLOCK ? (sizes[n] + grid[n] - 1) / grid[n] : 1;
        lengths[n] = ways[n] == MPI_DISTRIBUTE_NONE || below(2) ? MPI_DISTRIBUTE_DFLT_DARG : least + below(3);
        processes *= grid[n];
    }
    MPI_Type_create_darray(processes, below(processes), dimensions, sizes, ways, lengths, grid,
                           below(2) ? MPI_ORDER_C : MPI_ORDER_FORTRAN, part, &type);
    return type;
}

static MPI_Datatype random_type(int depth)
{
    static const int kinds = 13;
    MPI_Datatype named[13] = {
        MPI_CHAR,      MPI_SHORT,     MPI_INT,      MPI_DOUBLE, MPI_LONG_DOUBLE,     MPI_DOUBLE_INT,
        MPI_SHORT_INT, MPI_FLOAT_INT, MPI_LONG_INT, MPI_2INT,   MPI_LONG_DOUBLE_INT, MPI_C_DOUBLE_COMPLEX,
        MPI_BYTE};
    MPI_Datatype type, part[4];
    int lengths[4], places[4], sizes[3], subsizes[3], starts[3], n, count = below(5), block = below(4);
    int stride = below(9) - 3, far_stride = below(400) - 100;
    MPI_Aint far[4], lower, extent;
    /* Open MPI 4.1 takes a stride of -1 for none. */
    stride -= stride == -1;
    far_stride -= far_stride == -1;
    if (depth == 0 || below(6) == 0)
        return named[below(kinds)];
    part[0] = random_type(depth - 1);
    for (n = 0; n < 4; n++) {
        lengths[n] = below(4);
        places[n] = below(15) - 5;
        far[n] = below(300) - 100;
    }
    switch (below(12)) {
    case 0: MPI_Type_contiguous(count, part[0], &type); break;
    case 1: MPI_Type_vector(count, block, stride, part[0], &type); break;
    case 2: MPI_Type_create_hvector(count, block, far_stride, part[0], &type); break;
    case 3: MPI_Type_indexed(count % 5, lengths, places, part[0], &type); break;
    case 4: MPI_Type_create_hindexed(count % 5, lengths, far, part[0], &type); break;
    case 5: MPI_Type_create_indexed_block(count % 5, block, places, part[0], &type); break;
    case 6: MPI_Type_create_hindexed_block(count % 5, block, far, part[0], &type); break;
    case 7:
        for (n = 1; n < 4; n++)
            part[n] = random_type(depth - 1);
        MPI_Type_create_struct(4, lengths, far, part, &type);
        break;
    case 8:
        count = 1 + below(3);
        for (n = 0; n < count; n++) {
            sizes[n] = 1 + below(5);
            starts[n] = below(sizes[n]);
            subsizes[n] = 1 + below(sizes[n] - starts[n]);
        }
        MPI_Type_create_subarray(count, sizes, subsizes, starts, below(2) ? MPI_ORDER_C : MPI_ORDER_FORTRAN,
                                 part[0], &type);
        break;
    case 9:
        MPI_Type_get_extent(part[0], &lower, &extent);
        MPI_Type_create_resized(part[0], below(40) - 20, extent > 0 ? extent + below(64) : below(64), &type);
        break;
    case 10: type = random_darray(part[0]); break;
    default: MPI_Type_dup(part[0], &type); break;
    }
    MPI_Type_size(type, &n);
    hollow |= n == 0;
    return type;
}

static int fail(const char *what, int n, const char *why)
{
    fprintf(stderr, "datatype %d: %s: %s\n", n, what, why ? why : rampool_error_message());
    return 1;
}

int main(int argc, char **argv)
{
    rampool_builder *builder = rampool_builder_new();
    rampool_direct *direct;
    rampool_direct_region *region;
    int n, count, checked = 0, scattered = 0;
    const char *why;
    rampool_layout *layout;

    MPI_Init(&argc, &argv);
    if (argc != 4)
        return 2;
    state = strtoull(argv[2], NULL, 10);
    count = atoi(argv[3]);
    if (rampool_builder_set(builder, "server", argv[1]) != RAMPOOL_STATUS_OK ||
        rampool_direct_open(builder, &direct) != RAMPOOL_STATUS_OK ||
        rampool_direct_open_region(direct, "mpi", 2 * REACH, &region) != RAMPOOL_STATUS_OK)
        return fail("open", 0, NULL);
    for (n = 0; n < 2 * REACH; n++)
        buffer[n] = (unsigned char)(below(251) + 1);
    for (n = 0; n < count; n++) {
        hollow = 0;
        MPI_Datatype type = random_type(4);
        MPI_Aint lower, extent;
        int bytes, position = 0, repeat = hollow ? 1 : 1 + below(3);
        uint64_t size;
        MPI_Type_commit(&type);
        MPI_Type_get_true_extent(type, &lower, &extent);
        MPI_Aint bound, step;
        MPI_Type_get_extent(type, &bound, &step);
        MPI_Type_size(type, &bytes);
        if (step < 0) {
            if (rampool_mpi_layout(type, 1, &layout, &why) == RAMPOOL_STATUS_OK)
                return fail("a negative extent", n, "was accepted");
            continue;
        }
        if (lower < -REACH / 4 || lower + extent > REACH / 4 || step > REACH / 4 || bytes > REACH / 4)
            continue;
        if (rampool_mpi_layout(type, (uint64_t)repeat, &layout, &why) != RAMPOOL_STATUS_OK)
            return fail("decode", n, why);
        size = rampool_layout_size(layout);
        if (size != (uint64_t)bytes * (uint64_t)repeat)
            return fail("size", n, "differs");
        MPI_Pack(buffer + REACH, repeat, type, expected, sizeof expected, &position, MPI_COMM_SELF);
        memset(packed, 0, sizeof packed);
        rampool_layout_pack(layout, buffer + REACH, packed);
        if ((uint64_t)position != size || memcmp(packed, expected, size) != 0)
            return fail("pack", n, "other bytes than MPI_Pack's");
        /* Gathered here, one after the other there. */
        if (rampool_mpi_put(direct, region, buffer + REACH, (uint64_t)repeat, type, 0, size, MPI_BYTE,
                            &why) != RAMPOOL_STATUS_OK)
            return fail("put", n, why);
        memset(back, 0, sizeof back);
        if (rampool_direct_get(direct, region, 0, back, size) != RAMPOOL_STATUS_OK ||
            memcmp(back, expected, size) != 0)
            return fail("put", n, "other bytes than MPI_Pack's");
        /* One after the other here, scattered there, and gathered from there: what MPI_Unpack makes of it. */
        memset(image, 0, sizeof image);
        if (rampool_direct_put(direct, region, 0, image, sizeof image) != RAMPOOL_STATUS_OK)
            return fail("clear", n, NULL);
        if (rampool_mpi_put(direct, region, expected, size, MPI_BYTE, REACH, (uint64_t)repeat, type, &why) ==
            RAMPOOL_STATUS_OK) {
            position = 0;
            MPI_Unpack(expected, (int)size, &position, image + REACH, repeat, type, MPI_COMM_SELF);
            if (rampool_direct_get(direct, region, 0, back, sizeof back) != RAMPOOL_STATUS_OK ||
                memcmp(back, image, sizeof back) != 0)
                return fail("scatter", n, "other bytes than MPI_Unpack's");
            memset(back, 0, sizeof back);
            if (rampool_mpi_get(direct, region, back + REACH, (uint64_t)repeat, type, REACH, (uint64_t)repeat,
                                type, &why) != RAMPOOL_STATUS_OK ||
                memcmp(back, image, sizeof back) != 0)
                return fail("get", n, why);
            scattered++;
        } else if (why || !strstr(rampool_error_message(), "twice")) {
            return fail("scatter", n, why);
        }
        rampool_layout_free(layout);
        checked++;
    }
    rampool_direct_region_free(direct, region);
    rampool_direct_close(direct);
    rampool_builder_free(builder);
    printf("%d datatypes, %d of them scattered\n", checked, scattered);
    MPI_Finalize();
    return checked > count / 2 && scattered > count / 8
               ? 0
               : fail("coverage", 0, "too few datatypes were checked");
}
