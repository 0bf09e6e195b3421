/*
 * Memory that two processes see, with rampool.h.
 *
 *     ./handed copy SERVER       a region that is paged here is handed over to another process, which reads the copy directly
 *     ./handed keys SERVER       memory to which the server has a key, if it is on this machine (unix:PATH)
 */
#define _POSIX_C_SOURCE 200809L
#include <rampool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096
#define PAGES 2000
#define MEMORY (1 << 20)

static void must(rampool_status status, const char *what)
{
    if (status != RAMPOOL_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", what, rampool_error_message());
        exit(1);
    }
}

static void check(int right, const char *what)
{
    if (!right) {
        fprintf(stderr, "wrong: %s\n", what);
        exit(1);
    }
}

static rampool_builder *builder(const char *server)
{
    rampool_builder *options = rampool_builder_new();

    must(rampool_builder_set(options, "server", server), "server");
    must(rampool_builder_set(options, "memory", "32M"), "memory");
    must(rampool_builder_set(options, "local", "1M"), "local");
    return options;
}

/* The owner: eight megabytes, one of which fits here. */
static void owner(const char *server, const char *program)
{
    rampool_builder *options = builder(server);
    rampool_pool *pool;
    rampool_region *region;
    rampool_handed_over *handed, *nothing;
    char text[8192], command[4096];
    unsigned char *bytes;
    FILE *reader;
    long i;

    must(rampool_open(options, &pool), "open");
    must(rampool_region_alloc(pool, (size_t)PAGES * PAGE, &region), "alloc");
    bytes = rampool_region_address(region);
    for (i = 0; i < PAGES; i++)
        bytes[i * PAGE + 7] = (unsigned char)(i % 251);
    must(rampool_region_hand_over(region, &handed), "hand over");
    check(rampool_handed_over_text(handed, text, 10) == RAMPOOL_STATUS_NO_ROOM, "a text that fits nowhere");
    must(rampool_handed_over_text(handed, text, sizeof text), "text");
    /* The owner goes on; its later writes are not in the copy. */
    for (i = 0; i < PAGES; i++)
        bytes[i * PAGE + 7] = 255;
    snprintf(command, sizeof command, "'%s' read", program);
    reader = popen(command, "w");
    check(reader != NULL && fprintf(reader, "%s\n", text) > 0, "a reader");
    check(pclose(reader) == 0, "what the reader found");
    check(rampool_region_hand_over(NULL, &nothing) == RAMPOOL_STATUS_INVALID, "no region");
    rampool_handed_over_free(handed);
    rampool_region_free(region);
    must(rampool_close(pool), "close");
    rampool_builder_free(options);
}

/* Another process: one byte of each page, and nothing else travels. */
static void reader(void)
{
    rampool_builder *options = rampool_builder_new();
    rampool_direct *direct;
    rampool_direct_region *region;
    rampool_layout *byte, *column, *dense;
    static unsigned char found[PAGES];
    char text[8192];
    uint64_t offset, bytes;
    long i;

    check(fgets(text, sizeof text, stdin) != NULL, "a text");
    text[strcspn(text, "\n")] = 0;
    check(rampool_direct_join_handed_over(options, "nonsense", &direct, &region, &offset, &bytes) == RAMPOOL_STATUS_INVALID, "nonsense");
    must(rampool_direct_join_handed_over(options, text, &direct, &region, &offset, &bytes), "join");
    check(bytes == (uint64_t)PAGES * PAGE, "its length");
    must(rampool_layout_bytes(1, &byte), "a byte");
    must(rampool_layout_hvector(byte, PAGES, 1, PAGE, &column), "a column");
    must(rampool_layout_bytes(PAGES, &dense), "bytes");
    must(rampool_direct_get_layout(direct, region, offset + 7, column, found, dense), "get");
    for (i = 0; i < PAGES; i++)
        check(found[i] == i % 251, "the copy");
    printf("%d bytes of %d pages\n", PAGES, PAGES);
    rampool_layout_free(byte);
    rampool_layout_free(column);
    rampool_layout_free(dense);
    rampool_direct_region_free(direct, region);
    rampool_direct_close(direct);
    rampool_builder_free(options);
}

static void keys(const char *server)
{
    rampool_builder *options = builder(server);
    rampool_direct *direct;
    rampool_direct_region *region;
    rampool_exposed *memory;
    rampool_layout *half, *too_much;
    rampool_key_stats stats;
    unsigned char *bytes;
    int exposed;
    long i;

    must(rampool_direct_open(options, &direct), "open");
    must(rampool_direct_open_region(direct, NULL, MEMORY, &region), "region");
    must(rampool_direct_expose(direct, MEMORY, &memory), "expose");
    must(rampool_layout_bytes(MEMORY / 2, &half), "half");
    must(rampool_layout_bytes(MEMORY, &too_much), "all");
    exposed = rampool_direct_is_exposed(direct, memory);
    bytes = rampool_exposed_address(memory);
    check(rampool_exposed_bytes(memory) == MEMORY && bytes != NULL, "the memory");
    for (i = 0; i < MEMORY / 2; i++)
        bytes[i] = (unsigned char)(i % 253);
    must(rampool_direct_put_from(direct, region, 4096, half, memory, 0), "put");
    must(rampool_direct_get_into(direct, region, 4096, half, memory, MEMORY / 2), "get");
    check(memcmp(bytes, bytes + MEMORY / 2, MEMORY / 2) == 0, "what came back");
    check(rampool_direct_get_into(direct, region, 0, too_much, memory, 1) == RAMPOOL_STATUS_INVALID, "beyond the end");
    must(rampool_direct_key_stats(direct, &stats, sizeof stats), "counts");
    check((stats.requests > 0) == exposed && (stats.bytes > 0) == exposed, "what was done by key");
    must(rampool_direct_withdraw(direct, memory), "withdraw");
    check(!rampool_direct_is_exposed(direct, memory), "withdrawn");
    /* Ordinary memory from now on. */
    memset(bytes + MEMORY / 2, 0, MEMORY / 2);
    must(rampool_direct_get_into(direct, region, 4096, half, memory, MEMORY / 2), "get, without a key");
    check(memcmp(bytes, bytes + MEMORY / 2, MEMORY / 2) == 0, "what came back without a key");
    printf("%s\n", exposed ? "by key" : "by copies");
    rampool_layout_free(half);
    rampool_layout_free(too_much);
    rampool_exposed_free(memory);
    rampool_direct_region_free(direct, region);
    rampool_direct_close(direct);
    rampool_builder_free(options);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "read") == 0) {
        reader();
    } else if (argc == 3 && strcmp(argv[1], "copy") == 0) {
        owner(argv[2], argv[0]);
    } else if (argc == 3 && strcmp(argv[1], "keys") == 0) {
        keys(argv[2]);
    } else {
        fprintf(stderr, "usage: %s copy|keys SERVER\n", argv[0]);
        return 2;
    }
    return 0;
}
