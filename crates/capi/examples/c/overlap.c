/*
 * Reads and writes of a region at the memory servers, many under way at a time: the program works while they
 * travel. Bodies of messages are taken from the pool. Every answer is checked.
 *
 *     ./overlap BLOCKS SERVER...          for example: ./overlap 1000 memhost1 memhost2
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rampool.h>

enum { BLOCK = 4096, WINDOW = 32 };

#define MUST(call)                                                                  \
    do {                                                                            \
        if ((call) != RAMPOOL_STATUS_OK) {                                          \
            fprintf(stderr, "overlap: %s: %s\n", #call, rampool_error_message()); \
            return 1;                                                               \
        }                                                                           \
    } while (0)

#define CHECK(holds)                                                                \
    do {                                                                            \
        if (!(holds)) {                                                             \
            fprintf(stderr, "overlap: WRONG: %s (line %d)\n", #holds, __LINE__);   \
            return 1;                                                               \
        }                                                                           \
    } while (0)

static void fill(unsigned char *block, uint64_t n)
{
    memset(block, (int)(n % 251 + 1), BLOCK);
    memcpy(block, &n, sizeof n);
}

/* Puts and gets of whole blocks, up to WINDOW under way. */
static int blocks_in_flight(rampool_direct *direct, rampool_direct_region *region, uint64_t blocks)
{
    static unsigned char memory[WINDOW][BLOCK];
    unsigned char expected[BLOCK];
    rampool_pending *pending[WINDOW] = {NULL};
    uint64_t n, polls = 0;

    for (n = 0; n < blocks; n++) {
        MUST(rampool_direct_wait(direct, pending[n % WINDOW]));
        fill(memory[n % WINDOW], n);
        MUST(rampool_direct_start_put(direct, region, n * BLOCK, memory[n % WINDOW], BLOCK,
                                      &pending[n % WINDOW]));
    }
    for (n = 0; n < WINDOW; n++) {
        MUST(rampool_direct_wait(direct, pending[n]));
        pending[n] = NULL;
    }

    for (n = 0; n < blocks + WINDOW; n++) {
        unsigned char *block = memory[n % WINDOW];

        if (pending[n % WINDOW]) {
            /* The program could do something else between two looks. */
            while (!rampool_direct_test(direct, pending[n % WINDOW]))
                polls++;
            MUST(rampool_direct_wait(direct, pending[n % WINDOW]));
            pending[n % WINDOW] = NULL;
            fill(expected, n - WINDOW);
            CHECK(memcmp(block, expected, BLOCK) == 0);
        }
        if (n < blocks) {
            memset(block, 0, BLOCK);
            MUST(rampool_direct_start_get(direct, region, n * BLOCK, block, BLOCK, &pending[n % WINDOW]));
        }
    }
    fprintf(stderr, "overlap: %" PRIu64 " looks were too early\n", polls);
    return 0;
}

/* The number at the start of each block, all in one get, and written back by one put, negated. */
static int numbers(rampool_direct *direct, rampool_direct_region *region, uint64_t blocks)
{
    rampool_layout *word, *there, *here;
    rampool_pending *pending;
    uint64_t *found = calloc(blocks, sizeof *found), n, one;

    CHECK(found != NULL);
    MUST(rampool_layout_bytes(sizeof *found, &word));
    MUST(rampool_layout_hvector(word, blocks, 1, BLOCK, &there));
    MUST(rampool_layout_contiguous(word, blocks, &here));
    MUST(rampool_direct_start_get_layout(direct, region, 0, there, found, here, &pending));
    MUST(rampool_direct_wait(direct, pending));
    for (n = 0; n < blocks; n++) {
        CHECK(found[n] == n);
        found[n] = ~n;
    }
    MUST(rampool_direct_start_put_layout(direct, region, 0, there, found, here, &pending));
    rampool_layout_free(word);
    rampool_layout_free(there);
    rampool_layout_free(here);
    MUST(rampool_direct_wait(direct, pending));
    for (n = 0; n < blocks; n += blocks / 7 + 1) {
        MUST(rampool_direct_get(direct, region, n * BLOCK, &one, sizeof one));
        CHECK(one == ~n);
    }
    free(found);
    return 0;
}

/* What cannot be started is refused at once and gives no handle. */
static int refusals(rampool_direct *direct, rampool_direct_region *region, uint64_t blocks)
{
    unsigned char byte = 0;
    rampool_pending *pending = (rampool_pending *)&byte;

    CHECK(rampool_direct_start_get(direct, region, blocks * BLOCK, &byte, 1, &pending) ==
          RAMPOOL_STATUS_INVALID);
    CHECK(pending == NULL && strlen(rampool_error_message()) > 0);
    CHECK(rampool_direct_start_put(direct, NULL, 0, &byte, 1, &pending) == RAMPOOL_STATUS_INVALID);
    CHECK(rampool_direct_start_put(direct, region, 0, NULL, 1, &pending) == RAMPOOL_STATUS_INVALID);
    CHECK(rampool_direct_start_get(direct, region, 0, &byte, 1, NULL) == RAMPOOL_STATUS_INVALID);
    CHECK(!rampool_direct_test(direct, NULL));
    MUST(rampool_direct_wait(direct, NULL));
    return 0;
}

/* A message's body is a block of the region; the receiver reads it there, and copies it within the pool. */
static int bodies(rampool_direct *direct, rampool_direct_region *region, uint64_t blocks)
{
    rampool_queue *queue;
    rampool_message *message;
    rampool_layout *block;
    rampool_direct_region *lies, *copy;
    unsigned char expected[BLOCK], body[BLOCK];
    uint64_t offset;

    MUST(rampool_queue_open(direct, "blocks", 8, 1 << 20, &queue));
    MUST(rampool_layout_bytes(BLOCK, &block));
    MUST(rampool_direct_open_region(direct, NULL, 2 * BLOCK, &copy));
    MUST(rampool_direct_get(direct, region, (blocks - 1) * BLOCK, expected, BLOCK));

    MUST(rampool_queue_send_region(direct, queue, "last", 4, region, (blocks - 1) * BLOCK, block, 1000));
    rampool_layout_free(block);
    MUST(rampool_queue_take(direct, queue, 10000, &message));
    CHECK(message != NULL && rampool_message_body_bytes(message) == BLOCK);
    MUST(rampool_message_body(direct, message, body, sizeof body, 10000));
    CHECK(memcmp(body, expected, BLOCK) == 0);
    MUST(rampool_message_body_place(direct, message, 10000, &lies, &offset));
    CHECK(lies != NULL && offset == (blocks - 1) * BLOCK);
    memset(body, 0, sizeof body);
    MUST(rampool_direct_get(direct, lies, offset, body, BLOCK));
    CHECK(memcmp(body, expected, BLOCK) == 0);
    rampool_direct_region_close(lies);
    MUST(rampool_message_land_body(direct, message, copy, BLOCK, 10000));
    memset(body, 0, sizeof body);
    MUST(rampool_direct_get(direct, copy, BLOCK, body, BLOCK));
    CHECK(memcmp(body, expected, BLOCK) == 0);
    rampool_message_done(direct, message);

    /* A message without a body lies nowhere. */
    MUST(rampool_queue_send(direct, queue, "bare", 4, NULL, 0, 1000));
    MUST(rampool_queue_take(direct, queue, 10000, &message));
    CHECK(message != NULL);
    MUST(rampool_message_body_place(direct, message, 1000, &lies, &offset));
    CHECK(lies == NULL);
    rampool_message_done(direct, message);
    rampool_direct_region_free(direct, copy);
    MUST(rampool_queue_delete(direct, queue));
    rampool_queue_free(queue);
    return 0;
}

int main(int argc, char **argv)
{
    rampool_builder *builder = rampool_builder_new();
    rampool_direct *direct;
    rampool_direct_region *region;
    uint64_t blocks = argc > 2 ? strtoull(argv[1], NULL, 10) : 0;
    int n;

    if (blocks < 1) {
        fprintf(stderr, "usage: overlap BLOCKS SERVER..., at least 1 block\n");
        return 2;
    }
    for (n = 2; n < argc; n++)
        MUST(rampool_builder_set(builder, "server", argv[n]));
    MUST(rampool_builder_set(builder, "memory", "32M"));
    MUST(rampool_direct_open(builder, &direct));
    rampool_builder_free(builder);
    MUST(rampool_direct_open_region(direct, NULL, blocks * BLOCK, &region));
    if (blocks_in_flight(direct, region, blocks) || refusals(direct, region, blocks) ||
        numbers(direct, region, blocks) || bodies(direct, region, blocks))
        return 1;
    rampool_direct_region_free(direct, region);
    rampool_direct_close(direct);
    printf("%" PRIu64 " blocks went and came back\n", blocks);
    return 0;
}
