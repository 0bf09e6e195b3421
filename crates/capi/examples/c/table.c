/*
 * A table at the memory servers, row by row: its columns are changed, filtered and added up there, and copied
 * from server to server. Every answer is checked.
 *
 *     ./table ROWS SERVER...              for example: ./table 10000 memhost1 memhost2
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rampool.h>

struct row {
    int64_t account, balance;
    double rate;
    char rest[40];
};

#define MUST(call)                                                                  \
    do {                                                                            \
        if ((call) != RAMPOOL_STATUS_OK) {                                          \
            fprintf(stderr, "table: " #call ": %s\n", rampool_error_message());     \
            return 1;                                                               \
        }                                                                           \
    } while (0)

#define CHECK(holds)                                                                \
    do {                                                                            \
        if (!(holds)) {                                                             \
            fprintf(stderr, "table: WRONG: " #holds " (line %d)\n", __LINE__);      \
            return 1;                                                               \
        }                                                                           \
    } while (0)

/* Invalid arguments are refused with a message, and change nothing. */
#define REFUSED(call, word)                                                         \
    do {                                                                            \
        CHECK((call) == RAMPOOL_STATUS_INVALID);                                    \
        CHECK(strstr(rampool_error_message(), word) != NULL);                       \
    } while (0)

int main(int argc, char **argv)
{
    rampool_builder *builder = rampool_builder_new();
    rampool_direct *direct;
    rampool_direct_region *table, *copy;
    rampool_layout *word, *column, *packed;
    uint64_t rows = argc > 2 ? strtoull(argv[1], NULL, 10) : 0, n, count, negative = 0;
    const uint64_t balance_at = offsetof(struct row, balance), rate_at = offsetof(struct row, rate);
    int64_t sum = 0, old, zero = 0, one = 1, hundred = 100, least, value;
    int64_t *operands, *balances;
    uint64_t *positions;
    double rate, half = 0.5;
    struct row *content;
    bool found;
    rampool_total total;
    rampool_filter below_zero = {RAMPOOL_TEST_LESS, &zero, NULL}, none = {RAMPOOL_TEST_GREATER, NULL, NULL};
    rampool_column by, of;
    rampool_group groups[4];
    rampool_filter some = {RAMPOOL_TEST_BETWEEN, &zero, &hundred};

    if (rows < 10) {
        fprintf(stderr, "usage: table ROWS SERVER..., at least 10 rows\n");
        return 2;
    }
    content = calloc(rows, sizeof *content);
    operands = calloc(rows, sizeof *operands);
    balances = calloc(rows, sizeof *balances);
    positions = calloc(rows, sizeof *positions);
    if (!content || !operands || !balances || !positions)
        return 1;
    for (n = 2; n < (uint64_t)argc; n++)
        MUST(rampool_builder_set(builder, "server", argv[n]));
    MUST(rampool_builder_set(builder, "memory", "16M"));
    MUST(rampool_direct_open(builder, &direct));
    rampool_builder_free(builder);
    MUST(rampool_direct_open_region(direct, "table", rows * sizeof(struct row), &table));
    MUST(rampool_direct_open_region(direct, NULL, rows * sizeof(int64_t), &copy));
    MUST(rampool_layout_bytes(sizeof(int64_t), &word));
    MUST(rampool_layout_hvector(word, rows, 1, sizeof(struct row), &column));
    MUST(rampool_layout_contiguous(word, rows, &packed));

    for (n = 0; n < rows; n++) {
        content[n].account = (int64_t)n;
        content[n].balance = (int64_t)(n * 7919 % 1009) - 300;
        content[n].rate = (double)n / 2;
        operands[n] = (int64_t)(n % 5);
    }
    MUST(rampool_direct_put(direct, table, 0, content, rows * sizeof *content));

    /* Every balance grows, each by another amount: only the amounts travel. */
    MUST(rampool_direct_accumulate(direct, table, balance_at, column, RAMPOOL_KIND_I64, RAMPOOL_COMBINE_SUM,
                                   operands));
    least = INT64_MAX;
    for (n = 0; n < rows; n++) {
        content[n].balance += operands[n];
        sum += content[n].balance;
        negative += content[n].balance < 0;
        if (content[n].balance < least)
            least = content[n].balance;
    }

    /* One element at a time: fetch-and-add, and compare-and-swap. */
    MUST(rampool_direct_fetch_op(direct, table, balance_at, RAMPOOL_KIND_I64, RAMPOOL_COMBINE_SUM, &hundred,
                                 &old));
    CHECK(old == content[0].balance);
    MUST(rampool_direct_fetch_op(direct, table, balance_at, RAMPOOL_KIND_I64, RAMPOOL_COMBINE_REPLACE, &old,
                                 NULL));
    MUST(rampool_direct_compare_exchange(direct, table, balance_at, RAMPOOL_KIND_I64, &content[0].balance,
                                         &one, &value));
    CHECK(value == content[0].balance);
    MUST(rampool_direct_compare_exchange(direct, table, balance_at, RAMPOOL_KIND_I64, &content[0].balance,
                                         &hundred, &value));
    CHECK(value == 1);
    MUST(rampool_direct_put(direct, table, balance_at, &content[0].balance, sizeof(int64_t)));
    MUST(
        rampool_direct_fetch_op(direct, table, rate_at, RAMPOOL_KIND_F64, RAMPOOL_COMBINE_MAX, &half, &rate));
    CHECK(rate == 0.0);
    MUST(rampool_direct_get(direct, table, rate_at, &rate, sizeof rate));
    CHECK(rate == 0.5);

    /* Filters and totals: only the results travel. */
    MUST(rampool_direct_sum(direct, table, balance_at, column, RAMPOOL_KIND_I64, NULL, &total));
    CHECK(total.count == rows && (int64_t)total.low == sum && total.high == (sum < 0 ? -1 : 0) &&
          total.real == (double)sum);
    MUST(rampool_direct_sum(direct, table, balance_at, column, RAMPOOL_KIND_I64, &below_zero, &total));
    CHECK(total.count == negative && total.high == (negative > 0 ? -1 : 0));
    MUST(rampool_direct_sum(direct, table, rate_at, column, RAMPOOL_KIND_F64, NULL, &total));
    CHECK(total.count == rows && total.low == 0 && total.real == (double)(rows * (rows - 1) / 2) / 2 + 0.5);
    MUST(rampool_direct_min(direct, table, balance_at, column, RAMPOOL_KIND_I64, NULL, &value, &found));
    CHECK(found && value == least);
    value = least - 1;
    below_zero.low = &value;
    MUST(rampool_direct_max(direct, table, balance_at, column, RAMPOOL_KIND_I64, &below_zero, &old, &found));
    CHECK(!found);
    MUST(rampool_direct_max(direct, table, rate_at, column, RAMPOOL_KIND_F64, NULL, &rate, &found));
    CHECK(found && rate == (double)(rows - 1) / 2);
    MUST(rampool_direct_select(direct, table, balance_at, column, RAMPOOL_KIND_I64, &some, positions, rows,
                               &count));
    for (n = 0; n < count; n++)
        CHECK(positions[n] < rows && (n == 0 || positions[n] > positions[n - 1]) &&
              content[positions[n]].balance >= 0 && content[positions[n]].balance <= 100);
    MUST(rampool_direct_select_values(direct, table, balance_at, column, RAMPOOL_KIND_I64, &some, balances,
                                      rows, &n));
    CHECK(n == count);
    for (n = 0; n < count; n++)
        CHECK(balances[n] >= 0 && balances[n] <= 100);
    /* As many positions as there is room for, and the number of all. */
    positions[1] = 12345678;
    MUST(rampool_direct_select(direct, table, balance_at, column, RAMPOOL_KIND_I64, NULL, positions, 1, &n));
    CHECK(n == rows && positions[0] == 0 && positions[1] == 12345678);
    MUST(rampool_direct_select(direct, table, balance_at, column, RAMPOOL_KIND_I64, NULL, NULL, 0, &n));
    CHECK(n == rows);

    /* A total for each key: `copy` says which row belongs to which of five. */
    MUST(rampool_direct_put(direct, copy, 0, operands, rows * sizeof *operands));
    by = (rampool_column){copy, 0, packed, RAMPOOL_KIND_I64};
    of = (rampool_column){table, balance_at, column, RAMPOOL_KIND_I64};
    MUST(rampool_direct_group(direct, &by, &of, &some, groups, 4, &count));
    CHECK(count <= 5);
    MUST(rampool_direct_group(direct, &by, &of, NULL, groups, 4, &count));
    CHECK(count == 5);
    for (n = 0; n < 4; n++) {
        int64_t group = 0, low = INT64_MAX, high = INT64_MIN;
        uint64_t row;

        for (row = n; row < rows; row += 5) {
            value = content[row].balance;
            group += value;
            low = value < low ? value : low;
            high = value > high ? value : high;
        }
        CHECK(groups[n].key.i64 == (int64_t)n && groups[n].total.count == (rows - n + 4) / 5);
        CHECK((int64_t)groups[n].total.low == group && groups[n].total.real == (double)group);
        CHECK(groups[n].least.i64 == low && groups[n].greatest.i64 == high);
    }

    /* A column becomes an array of its own, from server to server. */
    MUST(rampool_direct_copy(direct, table, balance_at, column, copy, 0, packed));
    MUST(rampool_direct_get(direct, copy, 0, balances, rows * sizeof *balances));
    for (n = 0; n < rows; n++)
        CHECK(balances[n] == content[n].balance);

    REFUSED(rampool_direct_accumulate(direct, table, balance_at, column, 9, RAMPOOL_COMBINE_SUM, operands),
            "kind 9");
    REFUSED(rampool_direct_fetch_op(direct, table, 0, RAMPOOL_KIND_I64, 8, &one, NULL), "unknown way 8");
    REFUSED(
        rampool_direct_fetch_op(direct, table, rate_at, RAMPOOL_KIND_F64, RAMPOOL_COMBINE_XOR, &half, NULL),
        "F64");
    REFUSED(rampool_direct_fetch_op(direct, table, 3, RAMPOOL_KIND_I64, RAMPOOL_COMBINE_SUM, &one, NULL),
            "aligned");
    REFUSED(rampool_direct_compare_exchange(direct, table, 0, RAMPOOL_KIND_I64, NULL, &one, NULL), "null");
    REFUSED(
        rampool_direct_sum(direct, table, rows * sizeof(struct row), column, RAMPOOL_KIND_I64, NULL, &total),
        "reaches");
    REFUSED(rampool_direct_sum(direct, table, 0, column, RAMPOOL_KIND_I64, &none, &total), "filter");
    REFUSED(rampool_direct_copy(direct, table, 0, column, copy, 0, word), "bytes");
    REFUSED(rampool_direct_group(direct, &by, &of, &none, groups, 4, &n), "filter");
    REFUSED(rampool_direct_group(direct, &by, &of, NULL, NULL, 1, &n), "null");
    by.kind = RAMPOOL_KIND_F64;
    REFUSED(rampool_direct_group(direct, &by, &of, NULL, groups, 4, &n), "integers");
    by = (rampool_column){copy, 0, word, RAMPOOL_KIND_I64};
    REFUSED(rampool_direct_group(direct, &by, &of, NULL, groups, 4, &n), "1 keys");
    REFUSED(rampool_direct_select(direct, table, 0, column, RAMPOOL_KIND_I64, NULL, NULL, 1, &n), "null");

    printf("%" PRIu64 " rows: sum %" PRId64 ", %" PRIu64 " below zero\n", rows, sum, negative);
    rampool_layout_free(word);
    rampool_layout_free(column);
    rampool_layout_free(packed);
    rampool_direct_region_free(direct, table);
    rampool_direct_region_free(direct, copy);
    rampool_direct_close(direct);
    free(content);
    free(operands);
    free(balances);
    free(positions);
    return 0;
}
