/*
 * A service and its client, on two queues: requests with heads of 64 bytes and bodies of any length, answered
 * with their sums.
 *
 *     ./queue SERVER MESSAGES BODY_BYTES              for example: ./queue memhost1 100 1000000
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rampool.h>

#define TIMEOUT_MS 20000

struct head {
    unsigned long long number, sum;
    char rest[48];
};

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, rampool_error_message());
    return 1;
}

static unsigned long long sum_of(const unsigned char *bytes, size_t count)
{
    unsigned long long sum = 0;
    while (count-- > 0)
        sum += *bytes++;
    return sum;
}

/* Takes requests until an empty one comes. */
static int serve(const char *ticket)
{
    rampool_builder *builder = rampool_builder_new();
    rampool_direct *direct;
    rampool_queue *requests, *answers;
    rampool_message *message;
    int going = 1;

    if (rampool_direct_join(builder, ticket, &direct) != RAMPOOL_STATUS_OK)
        return failed("join");
    rampool_builder_free(builder);
    if (rampool_queue_open(direct, "requests", 100, 64 << 20, &requests) != RAMPOOL_STATUS_OK ||
        rampool_queue_open(direct, "answers", 100, 1 << 20, &answers) != RAMPOOL_STATUS_OK)
        return failed("service: open");
    /* Short requests come whole. */
    if (rampool_queue_prefetch_bodies(direct, requests, 1 << 16) != RAMPOOL_STATUS_OK)
        return failed("service: prefetch");
    while (going) {
        struct head head;
        size_t head_bytes, body_bytes;
        unsigned char *body;

        if (rampool_queue_take(direct, requests, TIMEOUT_MS, &message) != RAMPOOL_STATUS_OK ||
            message == NULL)
            return failed("service: take");
        memset(&head, 0, sizeof head);
        memcpy(&head, rampool_message_head(message, &head_bytes), sizeof head);
        body_bytes = (size_t)rampool_message_body_bytes(message);
        going = body_bytes > 0;
        body = malloc(body_bytes + 1);
        if (rampool_message_body(direct, message, body, body_bytes, TIMEOUT_MS) != RAMPOOL_STATUS_OK)
            return failed("service: body");
        head.sum = sum_of(body, body_bytes);
        free(body);
        if (going &&
            rampool_queue_send(direct, answers, &head, sizeof head, NULL, 0, TIMEOUT_MS) != RAMPOOL_STATUS_OK)
            return failed("service: answer");
        rampool_message_done(direct, message);
    }
    if (rampool_queue_flush(direct, requests) != RAMPOOL_STATUS_OK)
        return failed("service: flush");
    rampool_queue_free(requests);
    rampool_queue_free(answers);
    rampool_direct_close(direct);
    return 0;
}

int main(int argc, char **argv)
{
    rampool_builder *builder;
    rampool_direct *direct;
    rampool_queue *requests, *answers, *many;
    rampool_message *message;
    const rampool_head_match wanted = {"s", "\xff", 1};
    struct head head;
    size_t sent;
    char ticket[4096];
    unsigned char *body;
    unsigned long long number, count;
    size_t bytes, i;
    int status, ways[2];
    pid_t service;

    if (argc != 4) {
        fprintf(stderr, "usage: %s SERVER MESSAGES BODY_BYTES\n", argv[0]);
        return 2;
    }
    count = strtoull(argv[2], NULL, 10);
    bytes = strtoul(argv[3], NULL, 10);
    /* The service is a process of its own, and joins by ticket. It is started before there are
     * connections. */
    if (pipe(ways) != 0 || (service = fork()) < 0)
        return 1;
    if (service == 0) {
        close(ways[1]);
        if (read(ways[0], ticket, sizeof ticket) <= 0)
            return 1;
        return serve(ticket);
    }
    close(ways[0]);
    builder = rampool_builder_new();
    if (rampool_builder_set(builder, "server", argv[1]) != RAMPOOL_STATUS_OK ||
        rampool_builder_set(builder, "memory", "16M") != RAMPOOL_STATUS_OK)
        return failed("options");
    if (rampool_direct_open(builder, &direct) != RAMPOOL_STATUS_OK)
        return failed("open");
    rampool_builder_free(builder);
    if (rampool_queue_open(direct, "nothing", 0, 0, &requests) != RAMPOOL_STATUS_GONE || requests != NULL)
        return failed("a queue that is not there");
    if (rampool_queue_open(direct, "requests", 100, 64 << 20, &requests) != RAMPOOL_STATUS_OK ||
        rampool_queue_open(direct, "answers", 100, 1 << 20, &answers) != RAMPOOL_STATUS_OK)
        return failed("queues");
    if (rampool_direct_ticket(direct, ticket, 3) != RAMPOOL_STATUS_NO_ROOM ||
        rampool_direct_ticket(direct, ticket, sizeof ticket) != RAMPOOL_STATUS_OK ||
        write(ways[1], ticket, sizeof ticket) != sizeof ticket)
        return failed("ticket");

    /* Many small messages at once. */
    if (rampool_queue_open(direct, "many", 5, 1000, &many) != RAMPOOL_STATUS_OK ||
        rampool_queue_send_many(direct, many, "onetwosixten", 3, 4, 0, &sent) != RAMPOOL_STATUS_OK ||
        sent != 4)
        return failed("many");
    if (rampool_queue_send_many(direct, many, "onetwosixten", 3, 4, 0, &sent) != RAMPOOL_STATUS_NO_ROOM ||
        sent != 0)
        return failed("no room for many");
    /* Heads without bytes need no memory of the caller's, however many there are. */
    if (rampool_queue_send_many(direct, many, NULL, 0, (size_t)1 << 60, 0, &sent) != RAMPOOL_STATUS_INVALID ||
        sent != 0)
        return failed("more than one call sends");
    /* The first whose head begins with an s; the others keep their order. */
    if (rampool_queue_take_where(direct, many, &wanted, TIMEOUT_MS, &message) != RAMPOOL_STATUS_OK ||
        message == NULL || memcmp(rampool_message_head(message, &sent), "six", 3) != 0)
        return failed("take by its head");
    rampool_message_done(direct, message);
    if (rampool_queue_take_where(direct, many, &wanted, 0, &message) != RAMPOOL_STATUS_OK || message != NULL)
        return failed("take by a head that is not there");
    for (i = 0; i < 3; i++) {
        size_t length;
        if (rampool_queue_take(direct, many, TIMEOUT_MS, &message) != RAMPOOL_STATUS_OK || message == NULL)
            return failed("take one of many");
        if (memcmp(rampool_message_head(message, &length), "onetwoten" + 3 * i, 3) != 0 || length != 3) {
            fprintf(stderr, "message %zu of many is wrong\n", i);
            return 1;
        }
        rampool_message_done(direct, message);
    }
    rampool_queue_free(many);

    body = malloc(bytes);
    memset(&head, 0, sizeof head);
    for (number = 0; number < count; number++) {
        for (i = 0; i < bytes; i++)
            body[i] = (unsigned char)(number * 31 + i);
        head.number = number;
        if (rampool_queue_send(direct, requests, &head, sizeof head, body, bytes, TIMEOUT_MS) !=
            RAMPOOL_STATUS_OK)
            return failed("send");
        if (rampool_queue_take(direct, answers, TIMEOUT_MS, &message) != RAMPOOL_STATUS_OK || message == NULL)
            return failed("take");
        memcpy(&head, rampool_message_head(message, &i), sizeof head);
        if (i != sizeof head || head.number != number || head.sum != sum_of(body, bytes) ||
            rampool_message_redelivered(message)) {
            fprintf(stderr, "answer %llu is wrong\n", number);
            return 1;
        }
        rampool_message_done(direct, message);
    }
    if (rampool_queue_send(direct, requests, &head, sizeof head, NULL, 0, 0) != RAMPOOL_STATUS_OK)
        return failed("the last request");
    if (waitpid(service, &status, 0) != service || status != 0)
        return 1;
    printf("%llu requests with %zu bytes each were answered\n", count, bytes);
    free(body);
    rampool_queue_free(requests);
    rampool_queue_free(answers);
    rampool_direct_close(direct);
    return 0;
}
