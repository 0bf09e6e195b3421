/*
 * A region that is paged here is handed over to another process, which reads the copy directly, with
 * rampool.h.
 *
 *     ./handed copy SERVER
 */
#define _POSIX_C_SOURCE 200809L
#include <rampool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096
#define PAGES 2000

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
    check(rampool_direct_join_handed_over(options, "nonsense", &direct, &region, &offset, &bytes)
              == RAMPOOL_STATUS_INVALID,
          "nonsense");
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

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "read") == 0) {
        reader();
    } else if (argc == 3 && strcmp(argv[1], "copy") == 0) {
        owner(argv[2], argv[0]);
    } else {
        fprintf(stderr, "usage: %s copy SERVER\n", argv[0]);
        return 2;
    }
    return 0;
}
