/*
 * rampool.h: the RAM of many machines as memory for a C program.
 *
 * Generated from the Rust source by `make header`; do not edit.
 *
 *     cc program.c $(pkg-config --cflags --libs rampool)
 *
 * A builder collects named options, a pool is opened from it, regions are allocated in the pool. A region is ordinary
 * memory at a fixed address, larger than this machine may hold: what does not fit the pool's local memory lives on the
 * memory servers. Functions that can fail return a status; rampool_error_message() says more.
 *
 * Threads: a builder belongs to one thread at a time. Pools and regions may be used by any threads at once; only
 * freeing or closing one must not meet another use of the same. Regions keep their content across fork() as long as the
 * parent lives; the child must not call functions of this library.
 */

#ifndef RAMPOOL_H
#define RAMPOOL_H

#include <stddef.h>
#include <stdint.h>

/**
 * Advice: the content of the range is not needed any more; it reads as zeroes from now on.
 */
#define RAMPOOL_ADVICE_DISCARD 0

/**
 * Advice: the range is needed now; the call returns when it has been brought here.
 */
#define RAMPOOL_ADVICE_WILL_NEED 1

/**
 * How a call ended.
 */
typedef enum {
  RAMPOOL_STATUS_OK = 0,
  /**
   * An argument makes no sense: a null pointer, an unknown option, a value out of range.
   */
  RAMPOOL_STATUS_INVALID = 1,
  /**
   * A memory server could not be reached, refused, or cannot lend as much as is wanted.
   */
  RAMPOOL_STATUS_SERVER = 2,
  /**
   * The region does not fit what was lent.
   */
  RAMPOOL_STATUS_NO_ROOM = 3,
  /**
   * The kernel does not allow what is needed; `rampool doctor` says what to change.
   */
  RAMPOOL_STATUS_SYSTEM = 4,
  /**
   * The pool still has regions.
   */
  RAMPOOL_STATUS_BUSY = 5,
} rampool_status;

/**
 * Options of a pool, by name. Names, values and defaults are those of the command line without the dashes: "server",
 * "memory", "local", "page-size", "prefetch", "rung", "name", "key-file", "encryption", "compression", "stripe",
 * "connect-deadline-ms", "op-deadline-ms". Amounts are written like 4096, 512M or 1.5G.
 */
typedef struct rampool_builder rampool_builder;

/**
 * Local memory, memory servers and the pager between them.
 */
typedef struct rampool_pool rampool_pool;

/**
 * A piece of memory in a pool.
 */
typedef struct rampool_region rampool_region;

/**
 * Counters of a pool since it was opened. Pages are of 4096 bytes.
 */
typedef struct {
  /**
   * Local memory the regions may use, and use now.
   */
  uint64_t budget_pages;
  uint64_t resident_pages;
  /**
   * Pages of all regions now.
   */
  uint64_t managed_pages;
  uint64_t faults;
  /**
   * Pages filled with zeroes, because nobody had written them.
   */
  uint64_t zero_filled_pages;
  /**
   * Fetches that a thread waited for, and their pages.
   */
  uint64_t demand_fetches;
  uint64_t demand_pages;
  /**
   * Pages fetched ahead of need.
   */
  uint64_t prefetched_pages;
  /**
   * Pages that were about to leave and were needed again, without traffic.
   */
  uint64_t second_chance_pages;
  /**
   * Pages that left, and those of them that had to be sent.
   */
  uint64_t evicted_pages;
  uint64_t written_back_pages;
  /**
   * Times a server had no room.
   */
  uint64_t pool_full_events;
} rampool_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * What the last call on this thread that did not succeed had to say: one line, in English, for people. Valid until the next such call on this
 * thread; empty before the first. Never null.
 */
const char *rampool_error_message(void);

/**
 * The version of the library, such as "0.1.0". Static.
 */
const char *rampool_version(void);

/**
 * A builder with every option at its default. Free it with rampool_builder_free().
 */
rampool_builder *rampool_builder_new(void);

/**
 * Sets an option. "server" may be set several times, once for each server; others keep the last value.
 * RAMPOOL_STATUS_INVALID for a name that does not exist or a value that does not fit; the builder is then as before.
 *
 * # Safety
 * `builder` came from rampool_builder_new() and was not freed; `name` and `value` are null or end with a zero byte.
 */
rampool_status rampool_builder_set(rampool_builder *builder,
                                   const char *name,
                                   const char *value);

/**
 * Frees a builder; pools opened from it live on. Null does nothing.
 *
 * # Safety
 * `builder` is null or came from rampool_builder_new() and was not freed.
 */
void rampool_builder_free(rampool_builder *builder);

/**
 * Connects to the servers, leases memory there and starts the pager, a thread of this process. Blocks, for each server at most the option
 * "connect-deadline-ms". On success, `*pool` is for rampool_close(); otherwise it is null.
 *
 * # Safety
 * `builder` came from rampool_builder_new() and was not freed; `pool` is null or can be written.
 */
rampool_status rampool_open(const rampool_builder *builder,
                            rampool_pool **pool);

/**
 * Ends the pager and leaves the servers. RAMPOOL_STATUS_BUSY, and nothing done, while the pool has regions. Null does nothing.
 *
 * # Safety
 * `pool` is null or came from rampool_open() and was not closed; no other call uses it meanwhile.
 */
rampool_status rampool_close(rampool_pool *pool);

/**
 * Memory of `bytes` bytes, rounded up to whole pages, all zero. On success, `*region` is for rampool_region_free(); otherwise it is null.
 *
 * # Safety
 * `pool` came from rampool_open() and was not closed; `region` is null or can be written.
 */
rampool_status rampool_region_alloc(rampool_pool *pool,
                                    size_t bytes,
                                    rampool_region **region);

/**
 * The first byte of a region; null for null.
 *
 * # Safety
 * `region` is null or came from rampool_region_alloc() and was not freed.
 */
void *rampool_region_address(const rampool_region *region);

/**
 * Bytes of a region; 0 for null.
 *
 * # Safety
 * `region` is null or came from rampool_region_alloc() and was not freed.
 */
size_t rampool_region_bytes(const rampool_region *region);

/**
 * Says something (RAMPOOL_ADVICE_...) about `bytes` bytes of a region from `offset` on, both multiples of 4096.
 *
 * # Safety
 * `region` is null or came from rampool_region_alloc() and was not freed.
 */
rampool_status rampool_region_advise(const rampool_region *region,
                                     size_t offset,
                                     size_t bytes,
                                     uint32_t advice);

/**
 * Frees a region, here and at the servers. Null does nothing.
 *
 * # Safety
 * `region` is null or came from rampool_region_alloc() and was not freed; nothing uses its memory any more.
 */
void rampool_region_free(rampool_region *region);

/**
 * Writes the pool's counters to `*stats`, as many of them as `size` (pass sizeof(rampool_stats)) has room for: a program built with an older header
 * goes on working.
 *
 * # Safety
 * `pool` came from rampool_open() and was not closed; `stats` is null or `size` bytes can be written there.
 */
rampool_status rampool_pool_stats(const rampool_pool *pool,
                                  rampool_stats *stats,
                                  size_t size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAMPOOL_H */
