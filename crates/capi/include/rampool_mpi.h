/*
 * rampool_mpi.h: MPI's datatypes as layouts of the direct view, by decoding them, not by packing.
 *
 *     mpicc program.c $(pkg-config --cflags --libs rampool)
 *
 * An MPI_Datatype describes bytes of a buffer; a rampool_layout describes them to a memory server, which
 * gathers and scatters them itself. The code asks MPI how a datatype was constructed (MPI_Type_get_envelope,
 * MPI_Type_get_contents), constructor by constructor, so it works with any MPI. The datatype need not be
 * committed.
 *
 * Every constructor of MPI 3 is supported. Lower bound and extent of each level are MPI's own, with the
 * padding that MPI gives a struct. Nothing here communicates; MPI must have been initialized. Everything is
 * `static inline`: you link only rampool's and MPI's libraries.
 */
#ifndef RAMPOOL_MPI_H
#define RAMPOOL_MPI_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "rampool.h"

/* Most constructors inside each other. */
#define RAMPOOL_MPI_DEPTH 64

/* Why a datatype cannot become a layout: a sentence with static lifetime. Null if rampool_error_message() has
 * it. */
static inline rampool_status rampool_mpi_refuse_(const char **why, const char *reason)
{
    if (why)
        *why = reason;
    return RAMPOOL_STATUS_INVALID;
}

static inline rampool_status rampool_mpi_decode_(MPI_Datatype type, int depth, rampool_layout **layout,
                                                 const char **why);

/* A predefined datatype. */
static inline rampool_status rampool_mpi_named_(MPI_Datatype type, rampool_layout **layout, const char **why)
{
    int size;
    MPI_Aint lower, extent;
    if (MPI_Type_size(type, &size) != MPI_SUCCESS || size < 0 ||
        MPI_Type_get_extent(type, &lower, &extent) != MPI_SUCCESS)
        return rampool_mpi_refuse_(why, "MPI does not tell the size of a predefined datatype");
    if (type == MPI_SHORT_INT) {
        /* The only pair with a hole inside. */
        struct pair { short value; int index; };
        uint64_t blocks[2] = {sizeof(short), sizeof(int)};
        int64_t at[2] = {0, offsetof(struct pair, index)};
        rampool_layout *byte;
        rampool_status status = rampool_layout_bytes(1, &byte);
        if (status != RAMPOOL_STATUS_OK)
            return status;
        status = rampool_layout_hindexed(byte, 2, blocks, at, layout);
        rampool_layout_free(byte);
        return status;
    }
    return rampool_layout_bytes((uint64_t)size, layout);
}

/* Copies the contents that MPI_Type_get_contents returns, and frees them. */
typedef struct rampool_mpi_contents_ {
    int *integers;
    MPI_Aint *addresses;
    MPI_Datatype *types;
    int type_count;
    uint64_t *blocks;
    int64_t *places;
} rampool_mpi_contents_;

static inline void rampool_mpi_free_contents_(rampool_mpi_contents_ *c)
{
    for (int n = 0; n < c->type_count; n++) {
        int integers, addresses, types, combiner;
        /* Predefined datatypes are not freed; every other handle is our own. */
        if (MPI_Type_get_envelope(c->types[n], &integers, &addresses, &types, &combiner) == MPI_SUCCESS &&
            combiner != MPI_COMBINER_NAMED && combiner != MPI_COMBINER_F90_REAL &&
            combiner != MPI_COMBINER_F90_COMPLEX && combiner != MPI_COMBINER_F90_INTEGER)
            MPI_Type_free(&c->types[n]);
    }
    free(c->integers);
    free(c->addresses);
    free(c->types);
    free(c->blocks);
    free(c->places);
}

/*
 * What one process of a grid has of a distributed array (MPI_Type_create_darray). In each dimension it has
 * every so-many-th block: dimension by dimension, from the one whose elements lie next to each other.
 */
static inline rampool_status rampool_mpi_darray_(const int *i, MPI_Datatype type,
                                                 const rampool_layout *element, rampool_layout **layout,
                                                 const char **why)
{
    int rank = i[1], dimensions = i[2], fortran = i[3 + 4 * dimensions] == MPI_ORDER_FORTRAN;
    const int *sizes = i + 3, *ways = sizes + dimensions, *lengths = ways + dimensions,
              *grid = lengths + dimensions;
    MPI_Aint lower, stride;
    rampool_layout *whole = NULL;
    if (MPI_Type_get_extent(type, &lower, &stride) != MPI_SUCCESS)
        return rampool_mpi_refuse_(why, "MPI does not tell the extent of a datatype");
    rampool_status status = rampool_layout_contiguous(element, 1, &whole);
    for (int n = 0; status == RAMPOOL_STATUS_OK && n < dimensions; n++) {
        int d = fortran ? n : dimensions - 1 - n, behind = 1;
        for (int later = d + 1; later < dimensions; later++)
            behind *= grid[later];
        int64_t size = sizes[d], processes = grid[d], place = rank / behind % processes, block = lengths[d];
        if (ways[d] == MPI_DISTRIBUTE_NONE)
            block = size;
        else if (block == MPI_DISTRIBUTE_DFLT_DARG)
            block = ways[d] == MPI_DISTRIBUTE_BLOCK ? (size + processes - 1) / processes : 1;
        size_t count = 0, room = (size_t)(size / (block * processes) + 1);
        uint64_t *blocks = (uint64_t *)calloc(room, sizeof *blocks);
        int64_t *places = (int64_t *)calloc(room, sizeof *places);
        rampool_layout *one = NULL, *line = NULL;
        if (!blocks || !places)
            status = rampool_mpi_refuse_(why, "there is no memory to decode a datatype in");
        for (int64_t at = place * block; status == RAMPOOL_STATUS_OK && at < size; at += block * processes) {
            blocks[count] = (uint64_t)(at + block > size ? size - at : block);
            places[count++] = at * stride;
        }
        if (status == RAMPOOL_STATUS_OK)
            status = rampool_layout_resized(whole, 0, stride, &one);
        if (status == RAMPOOL_STATUS_OK)
            status = rampool_layout_hindexed(one, count, blocks, places, &line);
        free(blocks);
        free(places);
        rampool_layout_free(one);
        rampool_layout_free(whole);
        whole = line;
        stride *= size;
    }
    *layout = whole;
    return status;
}

/* One constructor, whose element or fields are layouts already. */
static inline rampool_status rampool_mpi_build_(int combiner, const rampool_mpi_contents_ *c,
                                                rampool_layout **parts, rampool_layout **layout,
                                                const char **why)
{
    const int *i = c->integers;
    int count = i ? i[0] : 0;
    const rampool_layout *element = parts[0];
    switch (combiner) {
    case MPI_COMBINER_DUP:
    case MPI_COMBINER_RESIZED: /* its bounds are set for every constructor alike */
        return rampool_layout_contiguous(element, 1, layout);
    case MPI_COMBINER_CONTIGUOUS:
        return rampool_layout_contiguous(element, (uint64_t)count, layout);
    case MPI_COMBINER_VECTOR:
        return rampool_layout_vector(element, (uint64_t)count, (uint64_t)i[1], i[2], layout);
    case MPI_COMBINER_HVECTOR:
        return rampool_layout_hvector(element, (uint64_t)count, (uint64_t)i[1], (int64_t)c->addresses[0],
                                      layout);
    case MPI_COMBINER_INDEXED:
    case MPI_COMBINER_INDEXED_BLOCK:
    case MPI_COMBINER_HINDEXED:
    case MPI_COMBINER_HINDEXED_BLOCK:
    case MPI_COMBINER_STRUCT: {
        int one_length = combiner == MPI_COMBINER_INDEXED_BLOCK || combiner == MPI_COMBINER_HINDEXED_BLOCK;
        const int *places = i + (one_length ? 2 : 1 + count);
        for (int n = 0; n < count; n++) {
            c->blocks[n] = (uint64_t)(one_length ? i[1] : i[1 + n]);
            c->places[n] = c->addresses ? (int64_t)c->addresses[n] : places[n];
        }
        if (combiner == MPI_COMBINER_STRUCT)
            return rampool_layout_struct((size_t)count, c->blocks, c->places,
                                         (const rampool_layout *const *)parts, layout);
        if (combiner == MPI_COMBINER_INDEXED || combiner == MPI_COMBINER_INDEXED_BLOCK)
            return rampool_layout_indexed(element, (size_t)count, c->blocks, c->places, layout);
        return rampool_layout_hindexed(element, (size_t)count, c->blocks, c->places, layout);
    }
    case MPI_COMBINER_SUBARRAY: {
        uint64_t *starts = c->blocks + 2 * count;
        for (int n = 0; n < 3 * count; n++)
            c->blocks[n] = (uint64_t)i[1 + n];
        return rampool_layout_subarray(
            element, (size_t)count, c->blocks, c->blocks + count, starts,
            i[1 + 3 * count] == MPI_ORDER_FORTRAN ? RAMPOOL_ORDER_FORTRAN : RAMPOOL_ORDER_C, layout);
    }
    case MPI_COMBINER_DARRAY:
        return rampool_mpi_darray_(i, c->types[0], element, layout, why);
    default:
        return rampool_mpi_refuse_(why, "a datatype was made by a constructor that is not known here");
    }
}

static inline rampool_status rampool_mpi_decode_(MPI_Datatype type, int depth, rampool_layout **layout,
                                                 const char **why)
{
    int integers, addresses, types, combiner;
    *layout = NULL;
    if (depth >= RAMPOOL_MPI_DEPTH)
        return rampool_mpi_refuse_(why, "a datatype is nested too deeply");
    if (type == MPI_DATATYPE_NULL ||
        MPI_Type_get_envelope(type, &integers, &addresses, &types, &combiner) != MPI_SUCCESS)
        return rampool_mpi_refuse_(why, "MPI does not tell what a datatype was made of");

    rampool_layout *bare = NULL;
    rampool_status status = RAMPOOL_STATUS_OK;
    if (combiner == MPI_COMBINER_NAMED || combiner == MPI_COMBINER_F90_REAL ||
        combiner == MPI_COMBINER_F90_COMPLEX || combiner == MPI_COMBINER_F90_INTEGER) {
        status = rampool_mpi_named_(type, &bare, why);
    } else {
        rampool_mpi_contents_ c = {NULL, NULL, NULL, 0, NULL, NULL};
        /* Blocks are counted by integers or by addresses. */
        size_t room = (size_t)integers + (size_t)addresses + 1;
        rampool_layout **parts = (rampool_layout **)calloc((size_t)types + 1, sizeof *parts);
        c.integers = (int *)calloc(room, sizeof *c.integers);
        c.addresses = addresses > 0 ? (MPI_Aint *)calloc(room, sizeof *c.addresses) : NULL;
        c.types = (MPI_Datatype *)calloc((size_t)types + 1, sizeof *c.types);
        c.blocks = (uint64_t *)calloc(room, sizeof *c.blocks);
        c.places = (int64_t *)calloc(room, sizeof *c.places);
        if (!parts || !c.integers || (addresses > 0 && !c.addresses) || !c.types || !c.blocks || !c.places)
            status = rampool_mpi_refuse_(why, "there is no memory to decode a datatype in");
        else if (MPI_Type_get_contents(type, integers, addresses, types, c.integers, c.addresses, c.types) !=
                 MPI_SUCCESS)
            status = rampool_mpi_refuse_(why, "MPI does not tell what a datatype was made of");
        else
            c.type_count = types;
        for (int n = 0; status == RAMPOOL_STATUS_OK && n < types; n++)
            status = rampool_mpi_decode_(c.types[n], depth + 1, &parts[n], why);
        if (status == RAMPOOL_STATUS_OK)
            status = rampool_mpi_build_(combiner, &c, parts, &bare, why);
        for (int n = 0; parts && n < types; n++)
            rampool_layout_free(parts[n]);
        free(parts);
        rampool_mpi_free_contents_(&c);
    }
    MPI_Aint lower, extent;
    if (status == RAMPOOL_STATUS_OK && MPI_Type_get_extent(type, &lower, &extent) != MPI_SUCCESS)
        status = rampool_mpi_refuse_(why, "MPI does not tell the extent of a datatype");
    if (status == RAMPOOL_STATUS_OK)
        status = rampool_layout_resized(bare, (int64_t)lower, (int64_t)extent, layout);
    rampool_layout_free(bare);
    return status;
}

/*
 * The layout of `count` elements of a datatype. On success, free `*layout` with rampool_layout_free().
 * Otherwise it is null, and `*why` (unless `why` is null) has the reason, or is null if
 * rampool_error_message() has it.
 */
static inline rampool_status rampool_mpi_layout(MPI_Datatype type, uint64_t count, rampool_layout **layout,
                                                const char **why)
{
    rampool_layout *element;
    if (why)
        *why = NULL;
    *layout = NULL;
    rampool_status status = rampool_mpi_decode_(type, 0, &element, why);
    if (status == RAMPOOL_STATUS_OK)
        status = rampool_layout_contiguous(element, count, layout);
    rampool_layout_free(element);
    return status;
}

/* Two layouts for one transfer: of the local memory, and of the region. Both are NULL, or free both with
 * rampool_layout_free. */
static inline rampool_status rampool_mpi_layouts_(MPI_Datatype type, uint64_t count, rampool_layout **here,
                                                  MPI_Datatype target_type, uint64_t target_count,
                                                  rampool_layout **there, const char **why)
{
    *there = NULL;
    rampool_status status = rampool_mpi_layout(type, count, here, why);
    if (status == RAMPOOL_STATUS_OK)
        status = rampool_mpi_layout(target_type, target_count, there, why);
    if (status != RAMPOOL_STATUS_OK) {
        rampool_layout_free(*here);
        *here = NULL;
    }
    return status;
}

/*
 * Writes `count` elements of a datatype from `buffer`, as MPI_Put takes them, to the bytes that
 * `target_count` elements of `target_type` select from `offset` of the region on. Both select the same number
 * of bytes; nothing is packed here.
 */
static inline rampool_status rampool_mpi_put(rampool_direct *direct, const rampool_direct_region *region,
                                             const void *buffer, uint64_t count, MPI_Datatype type,
                                             uint64_t offset, uint64_t target_count, MPI_Datatype target_type,
                                             const char **why)
{
    rampool_layout *here, *there;
    rampool_status status = rampool_mpi_layouts_(type, count, &here, target_type, target_count, &there, why);
    if (status == RAMPOOL_STATUS_OK)
        status = rampool_direct_put_layout(direct, region, offset, there, buffer, here);
    rampool_layout_free(here);
    rampool_layout_free(there);
    return status;
}

/* Reads the bytes that `target_count` elements of `target_type` select from `offset` of the region on into
 * `count` elements of a datatype in `buffer`. */
static inline rampool_status rampool_mpi_get(rampool_direct *direct, const rampool_direct_region *region,
                                             void *buffer, uint64_t count, MPI_Datatype type, uint64_t offset,
                                             uint64_t target_count, MPI_Datatype target_type,
                                             const char **why)
{
    rampool_layout *here, *there;
    rampool_status status = rampool_mpi_layouts_(type, count, &here, target_type, target_count, &there, why);
    if (status == RAMPOOL_STATUS_OK)
        status = rampool_direct_get_layout(direct, region, offset, there, buffer, here);
    rampool_layout_free(here);
    rampool_layout_free(there);
    return status;
}

#endif /* RAMPOOL_MPI_H */
