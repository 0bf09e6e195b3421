/*
 * rampool.h: the RAM of many machines as memory for a C program.
 *
 * Generated from the Rust source by `make header`; do not edit.
 *
 *     cc program.c $(pkg-config --cflags --libs rampool)
 *
 * A builder collects named options, a pool is opened from it, regions are allocated in the pool. A region is
 * ordinary memory at a fixed address, larger than this machine may hold: what does not fit the pool's local
 * memory lives on the memory servers. Functions that can fail return a status; rampool_error_message() says
 * more.
 *
 * Or bytes are read and changed where they lie, without pages: rampool_direct_open() opens the direct view,
 * rampool_direct_put() and rampool_direct_get() move bytes, and layouts say which. rampool_mpi.h makes
 * layouts of MPI's datatypes. rampool_direct_start_get() and rampool_direct_start_put() return at once;
 * rampool_direct_wait() ends them.
 *
 * Or several processes share memory: `rampool launch -n 4 ./program` starts them, each joins with
 * rampool_shared_join() and is one rank of the run. Accesses of one byte by different threads, at least one
 * of them a write, must be ordered by the locks, barriers, condition variables, semaphores or atomic
 * operations of this library. Any thread may use them.
 *
 * Or processes send each other messages through named queues at the memory servers, on the same direct view:
 * rampool_queue_send(), rampool_queue_take(). The head of a message arrives at once, its body lies in the
 * pool.
 *
 * Threads: a builder, and a direct view with the messages it has taken, belongs to one thread at a time.
 * Pools and regions may be used by any threads at once; only freeing or closing one must not meet another
 * use of the same. Regions keep their content across fork() as long as the parent lives; the child must not
 * call functions of this library.
 */

#ifndef RAMPOOL_H
#define RAMPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Advice: the content of the range is no longer needed; it reads as zeroes from now on.
 */
#define RAMPOOL_ADVICE_DISCARD 0

/**
 * Advice: the range is needed now; the call returns when it is in local memory.
 */
#define RAMPOOL_ADVICE_WILL_NEED 1

/**
 * Order of the elements of a subarray: the last dimension is contiguous, or the first.
 */
#define RAMPOOL_ORDER_C 0

#define RAMPOOL_ORDER_FORTRAN 1

/**
 * Kind of an element: little-endian, of 4 or 8 bytes, at a multiple of its length from the start of its
 * region.
 */
#define RAMPOOL_KIND_I32 1

#define RAMPOOL_KIND_U32 2

#define RAMPOOL_KIND_I64 3

#define RAMPOOL_KIND_U64 4

#define RAMPOOL_KIND_F32 5

#define RAMPOOL_KIND_F64 6

/**
 * How an operand changes an element. AND, OR and XOR are for integers; sums of integers wrap around.
 */
#define RAMPOOL_COMBINE_REPLACE 1

#define RAMPOOL_COMBINE_SUM 2

#define RAMPOOL_COMBINE_MIN 3

#define RAMPOOL_COMBINE_MAX 4

#define RAMPOOL_COMBINE_AND 5

#define RAMPOOL_COMBINE_OR 6

#define RAMPOOL_COMBINE_XOR 7

/**
 * How elements of a column are tested. BETWEEN is from `low` to `high`, both included; the others compare
 * with `low`.
 */
#define RAMPOOL_TEST_ALL 0

#define RAMPOOL_TEST_EQUAL 1

#define RAMPOOL_TEST_NOT_EQUAL 2

#define RAMPOOL_TEST_LESS 3

#define RAMPOOL_TEST_LESS_OR_EQUAL 4

#define RAMPOOL_TEST_GREATER 5

#define RAMPOOL_TEST_GREATER_OR_EQUAL 6

#define RAMPOOL_TEST_BETWEEN 7

/**
 * Atomic operations, for rampool_shared_atomic(). LOAD ignores the operand.
 */
#define RAMPOOL_ATOMIC_LOAD 0

#define RAMPOOL_ATOMIC_STORE 1

#define RAMPOOL_ATOMIC_SWAP 2

#define RAMPOOL_ATOMIC_ADD 3

#define RAMPOOL_ATOMIC_AND 4

#define RAMPOOL_ATOMIC_OR 5

#define RAMPOOL_ATOMIC_XOR 6

/**
 * How a call ended.
 */
typedef enum {
  RAMPOOL_STATUS_OK = 0,
  /**
   * An argument is invalid: a null pointer, an unknown option, a value out of range.
   */
  RAMPOOL_STATUS_INVALID = 1,
  /**
   * A memory server could not be reached, refused, or cannot lend the wanted amount.
   */
  RAMPOOL_STATUS_SERVER = 2,
  /**
   * The region does not fit the lease; or the queue is full; or the buffer is too short.
   */
  RAMPOOL_STATUS_NO_ROOM = 3,
  /**
   * The kernel does not allow what is needed; `rampool doctor` says what to change.
   */
  RAMPOOL_STATUS_SYSTEM = 4,
  /**
   * The pool still has regions; or another thread holds the lock; or the body of a message has not arrived
   * yet.
   */
  RAMPOOL_STATUS_BUSY = 5,
  /**
   * The ranks of a run did not all join, or the run is over.
   */
  RAMPOOL_STATUS_RUN = 6,
  /**
   * The queue does not exist; or the sender of a message was lost before its body arrived.
   */
  RAMPOOL_STATUS_GONE = 7,
} rampool_status;

/**
 * Options of a pool, by name. Names, values and defaults are those of the command line without the dashes:
 * "server", "memory", "local", "page-size", "prefetch", "fault-mode", "name", "key-file", "encryption",
 * "compression", "stripe", "same-host", "zero-copy", "pinned", "connect-deadline-ms", "op-deadline-ms".
 * Write amounts as 4096, 512M or 1.5G.
 */
typedef struct rampool_builder rampool_builder;

/**
 * One thread's connection to the bytes of regions, which are read and changed at the servers. Use it from
 * one thread at a time.
 */
typedef struct rampool_direct rampool_direct;

/**
 * A region of the direct view.
 */
typedef struct rampool_direct_region rampool_direct_region;

/**
 * A copy of a region at the memory servers, and how to reach it.
 */
typedef struct rampool_handed_over rampool_handed_over;

/**
 * Which bytes, in which order, as in MPI's derived datatypes. Immutable. Free it with rampool_layout_free(),
 * even after other layouts were made from it.
 */
typedef struct rampool_layout rampool_layout;

/**
 * A message that was taken, until rampool_message_done() or rampool_message_give_back().
 */
typedef struct rampool_message rampool_message;

/**
 * A process outside the run, connected to the listeners of its ranks. Any threads may use it; their
 * operations take turns.
 */
typedef struct rampool_outside rampool_outside;

/**
 * An operation that was started. End each with rampool_direct_wait().
 */
typedef struct rampool_pending rampool_pending;

/**
 * Local memory, memory servers and the pager between them.
 */
typedef struct rampool_pool rampool_pool;

/**
 * A queue: a name that messages are sent to and taken from. Valid for every member of the lease.
 */
typedef struct rampool_queue rampool_queue;

/**
 * A piece of memory in a pool.
 */
typedef struct rampool_region rampool_region;

/**
 * A shared region whose bytes are read and changed at the homes of its pages. Any threads may use it.
 */
typedef struct rampool_shared_direct rampool_shared_direct;

/**
 * This process as one rank of a run: several processes that use one address range as memory.
 */
typedef struct rampool_shared rampool_shared;

/**
 * A mapping from keys to bytes in the pool, for all members of the lease. Each operation takes effect at
 * once for all of them, and blocks until the servers have answered. Values stay when the handle is freed.
 */
typedef struct rampool_store rampool_store;

/**
 * Counters of a pool since it was opened. A page has 4096 bytes.
 */
typedef struct {
  /**
   * Local memory that the regions may use, and use now.
   */
  uint64_t budget_pages;
  uint64_t resident_pages;
  /**
   * Pages of all regions now.
   */
  uint64_t managed_pages;
  uint64_t faults;
  /**
   * Pages filled with zeroes, because they were never written.
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
   * Pages that left, and how many of them had to be sent.
   */
  uint64_t evicted_pages;
  uint64_t written_back_pages;
  /**
   * Times that a server had no room.
   */
  uint64_t pool_full_events;
} rampool_stats;

/**
 * Selects the elements of a column that pass a test against one or two numbers of the column's kind.
 */
typedef struct {
  /**
   * RAMPOOL_TEST_....
   */
  uint32_t test;
  /**
   * Points to a number of the column's kind. May be null for RAMPOOL_TEST_ALL.
   */
  const void *low;
  /**
   * Likewise, for RAMPOOL_TEST_BETWEEN; otherwise it may be null.
   */
  const void *high;
} rampool_filter;

/**
 * The sum of the selected elements of a column.
 */
typedef struct {
  /**
   * Number of selected elements.
   */
  uint64_t count;
  /**
   * For integers: the exact sum is `high` * 2^64 + `low`. For floating-point numbers: 0.
   */
  uint64_t low;
  int64_t high;
  /**
   * The sum as a floating-point number; for integers, rounded.
   */
  double real;
} rampool_total;

/**
 * A column of numbers: what `layout` selects from `offset` of the region on.
 */
typedef struct {
  const rampool_direct_region *region;
  uint64_t offset;
  const rampool_layout *layout;
  /**
   * RAMPOOL_KIND_....
   */
  uint32_t kind;
} rampool_column;

/**
 * A number of a column's kind.
 */
typedef union {
  int32_t i32;
  uint32_t u32;
  int64_t i64;
  uint64_t u64;
  float f32;
  double f64;
} rampool_number;

/**
 * A key, and what the elements that have it and are selected come to. NaNs are no least or greatest where
 * there is another.
 */
typedef struct {
  rampool_number key;
  rampool_total total;
  rampool_number least;
  rampool_number greatest;
} rampool_group;

/**
 * Which heads are wanted: those with the bytes of `head` wherever `mask` has a bit, as MPI matches by source
 * and tag. Of `head` and `mask` the first `bytes` count; a shorter head is not wanted.
 */
typedef struct {
  const void *head;
  const void *mask;
  size_t bytes;
} rampool_head_match;

/**
 * Counts of a rank since it joined; times are sums over its threads.
 */
typedef struct {
  uint64_t sent_messages;
  uint64_t received_messages;
  uint64_t read_faults;
  uint64_t write_faults;
  uint64_t pages_fetched;
  uint64_t invalidations;
  uint64_t twins;
  uint64_t diffs;
  /**
   * Bytes in diffs.
   */
  uint64_t diff_bytes;
  uint64_t lock_acquires;
  /**
   * How many of them needed no message.
   */
  uint64_t local_acquires;
  uint64_t barriers;
  /**
   * Nanoseconds of waiting for pages.
   */
  uint64_t fault_wait_ns;
  /**
   * Nanoseconds in lock, unlock and barrier calls.
   */
  uint64_t lock_wait_ns;
  uint64_t unlock_wait_ns;
  uint64_t barrier_wait_ns;
  /**
   * Bytes of twins, diffs and logs that this rank holds now.
   */
  uint64_t overhead_bytes;
  /**
   * Bytes of shared pages in this rank's memory now, and of those that are only at memory servers.
   */
  uint64_t resident_bytes;
  uint64_t away_bytes;
  /**
   * Copies that were dropped to make room.
   */
  uint64_t evictions;
} rampool_shared_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The message of the last failed call on this thread: one line, in English. Valid until the next failed call
 * on this thread; empty before the first. Never null.
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
 * RAMPOOL_STATUS_INVALID for an unknown name or an invalid value; the builder is then unchanged.
 *
 * Requirements:
 * `builder` came from rampool_builder_new() and was not freed; `name` and `value` are null or end with a
 * zero byte.
 */
rampool_status rampool_builder_set(rampool_builder *builder,
                                   const char *name,
                                   const char *value);

/**
 * Frees a builder; pools opened from it stay open. Null does nothing.
 *
 * Requirements:
 * `builder` is null or came from rampool_builder_new() and was not freed.
 */
void rampool_builder_free(rampool_builder *builder);

/**
 * Connects to the servers, leases memory there and starts the pager, a thread of this process. Blocks, for
 * each server at most the option "connect-deadline-ms". On success, close `*pool` with rampool_close();
 * otherwise it is null.
 *
 * Requirements:
 * `builder` came from rampool_builder_new() and was not freed; `pool` is null or can be written.
 */
rampool_status rampool_open(const rampool_builder *builder,
                            rampool_pool **pool);

/**
 * Stops the pager and disconnects from the servers. While the pool has regions it does nothing and returns
 * RAMPOOL_STATUS_BUSY. Null does nothing.
 *
 * Requirements:
 * `pool` is null or came from rampool_open() and was not closed; no other call uses it meanwhile.
 */
rampool_status rampool_close(rampool_pool *pool);

/**
 * Allocates `bytes` bytes of memory, rounded up to whole pages, all zero. On success, free `*region` with
 * rampool_region_free(); otherwise it is null.
 *
 * Requirements:
 * `pool` came from rampool_open() and was not closed; `region` is null or can be written.
 */
rampool_status rampool_region_alloc(rampool_pool *pool,
                                    size_t bytes,
                                    rampool_region **region);

/**
 * The first byte of a region; null for null.
 *
 * Requirements:
 * `region` is null or came from rampool_region_alloc() and was not freed.
 */
void *rampool_region_address(const rampool_region *region);

/**
 * Bytes of a region; 0 for null.
 *
 * Requirements:
 * `region` is null or came from rampool_region_alloc() and was not freed.
 */
size_t rampool_region_bytes(const rampool_region *region);

/**
 * Gives advice (RAMPOOL_ADVICE_...) on `bytes` bytes of a region from `offset` on, both multiples of 4096.
 *
 * Requirements:
 * `region` is null or came from rampool_region_alloc() and was not freed.
 */
rampool_status rampool_region_advise(const rampool_region *region,
                                     size_t offset,
                                     size_t bytes,
                                     uint32_t advice);

/**
 * Frees a region, here and at the servers. Null does nothing.
 *
 * Requirements:
 * `region` is null or came from rampool_region_alloc() and was not freed; nothing uses its memory any more.
 */
void rampool_region_free(rampool_region *region);

/**
 * Writes the pool's counters to `*stats`, as many as fit `size` (pass sizeof(rampool_stats)), so that a
 * program built with an older header keeps working.
 *
 * Requirements:
 * `pool` came from rampool_open() and was not closed; `stats` is null or `size` bytes can be written there.
 */
rampool_status rampool_pool_stats(const rampool_pool *pool,
                                  rampool_stats *stats,
                                  size_t size);

/**
 * `bytes` consecutive bytes.
 *
 * Requirements:
 * `layout` is null or can be written.
 */
rampool_status rampool_layout_bytes(uint64_t bytes, rampool_layout **layout);

/**
 * `count` elements, one extent apart.
 *
 * Requirements:
 * `element` is null or a layout that was not freed; `layout` is null or can be written.
 */
rampool_status rampool_layout_contiguous(const rampool_layout *element,
                                         uint64_t count,
                                         rampool_layout **layout);

/**
 * `count` blocks of `block` elements, the blocks `stride` extents apart.
 *
 * Requirements:
 * As rampool_layout_contiguous().
 */
rampool_status rampool_layout_vector(const rampool_layout *element,
                                     uint64_t count,
                                     uint64_t block,
                                     int64_t stride,
                                     rampool_layout **layout);

/**
 * `count` blocks of `block` elements, the blocks `stride` bytes apart.
 *
 * Requirements:
 * As rampool_layout_contiguous().
 */
rampool_status rampool_layout_hvector(const rampool_layout *element,
                                      uint64_t count,
                                      uint64_t block,
                                      int64_t stride,
                                      rampool_layout **layout);

/**
 * `count` blocks of `blocks[i]` elements at `displacements[i]` extents.
 *
 * Requirements:
 * As rampool_layout_contiguous(); `blocks` and `displacements` have `count` items.
 */
rampool_status rampool_layout_indexed(const rampool_layout *element,
                                      size_t count,
                                      const uint64_t *blocks,
                                      const int64_t *displacements,
                                      rampool_layout **layout);

/**
 * `count` blocks of `blocks[i]` elements at `displacements[i]` bytes.
 *
 * Requirements:
 * As rampool_layout_indexed().
 */
rampool_status rampool_layout_hindexed(const rampool_layout *element,
                                       size_t count,
                                       const uint64_t *blocks,
                                       const int64_t *displacements,
                                       rampool_layout **layout);

/**
 * `count` fields, each `counts[i]` of `layouts[i]` at `displacements[i]` bytes.
 *
 * Requirements:
 * `counts`, `displacements` and `fields` have `count` items, the last of which are layouts that were not
 * freed; `layout` is null or can be written.
 */
rampool_status rampool_layout_struct(size_t count,
                                     const uint64_t *counts,
                                     const int64_t *displacements,
                                     const rampool_layout *const *fields,
                                     rampool_layout **layout);

/**
 * A part of an array of `dimensions` dimensions: `subsizes[i]` elements from `starts[i]` on, of `sizes[i]`.
 * `order` is RAMPOOL_ORDER_....
 *
 * Requirements:
 * As rampool_layout_contiguous(); `sizes`, `subsizes` and `starts` have `dimensions` items.
 */
rampool_status rampool_layout_subarray(const rampool_layout *element,
                                       size_t dimensions,
                                       const uint64_t *sizes,
                                       const uint64_t *subsizes,
                                       const uint64_t *starts,
                                       uint32_t order,
                                       rampool_layout **layout);

/**
 * The same bytes with other bounds: lower bound `lower`, extent `extent`, in bytes.
 *
 * Requirements:
 * As rampool_layout_contiguous().
 */
rampool_status rampool_layout_resized(const rampool_layout *element,
                                      int64_t lower,
                                      int64_t extent,
                                      rampool_layout **layout);

/**
 * Bytes that a layout selects; 0 for null.
 *
 * Requirements:
 * `layout` is null or a layout that was not freed.
 */
uint64_t rampool_layout_size(const rampool_layout *layout);

/**
 * Extent of a layout: bytes between repetitions; 0 for null.
 *
 * Requirements:
 * As rampool_layout_size().
 */
int64_t rampool_layout_extent(const rampool_layout *layout);

/**
 * The lower bound of a layout; 0 for null.
 *
 * Requirements:
 * As rampool_layout_size().
 */
int64_t rampool_layout_lower(const rampool_layout *layout);

/**
 * Copies the bytes that a layout selects from `address` on to `packed`, contiguously: rampool_layout_size()
 * bytes. Null does nothing.
 *
 * Requirements:
 * `layout` is null or a layout that was not freed; the bytes it selects can be read; `packed` can be written
 * and does not overlap them.
 */
void rampool_layout_pack(const rampool_layout *layout,
                         const void *address,
                         void *packed);

/**
 * Frees a layout. Null does nothing.
 *
 * Requirements:
 * `layout` is null or a layout that was not freed.
 */
void rampool_layout_free(rampool_layout *layout);

/**
 * Connects to the servers and leases memory there, for the direct view: bytes are read and changed at the
 * servers. The builder's options for paging are ignored. Blocks, for each server at most the option
 * "connect-deadline-ms". On success, close `*direct` with rampool_direct_close(); otherwise it is null.
 *
 * Requirements:
 * `builder` came from rampool_builder_new() and was not freed; `direct` is null or can be written.
 */
rampool_status rampool_direct_open(const rampool_builder *builder,
                                   rampool_direct **direct);

/**
 * Joins the lease of another client, by its ticket: the same regions and queues by the same names. The
 * builder gives key, encryption and deadlines; its servers are ignored.
 *
 * Requirements:
 * `builder` came from rampool_builder_new() and was not freed; `ticket` is null or ends with a zero byte;
 * `direct` is null or can be written.
 */
rampool_status rampool_direct_join(const rampool_builder *builder,
                                   const char *ticket,
                                   rampool_direct **direct);

/**
 * Writes the ticket of the client's lease to `buffer`, with a terminating zero byte. A program with the
 * ticket can join the lease: keep it as secret as a key. RAMPOOL_STATUS_NO_ROOM if it is longer than `size`
 * bytes; 4096 are enough for any 32 servers.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() or _join() and was not closed; `buffer` is null or `size` bytes
 * can be written there.
 */
rampool_status rampool_direct_ticket(rampool_direct *direct,
                                     char *buffer,
                                     size_t size);

/**
 * Disconnects from the servers. Regions are freed when the lease's last member leaves. Null does nothing.
 *
 * Requirements:
 * `direct` is null or came from rampool_direct_open() and was not closed.
 */
void rampool_direct_close(rampool_direct *direct);

/**
 * Opens the region of this name, or creates one of `bytes` bytes, all zero. A null name creates one without
 * a name. With 0 bytes, the region must exist. On success, release `*region` with
 * rampool_direct_region_close() or rampool_direct_region_free(); otherwise it is null.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() and was not closed; `name` is null or ends with a zero byte;
 * `region` is null or can be written.
 */
rampool_status rampool_direct_open_region(rampool_direct *direct,
                                          const char *name,
                                          uint64_t bytes,
                                          rampool_direct_region **region);

/**
 * Bytes of a region; 0 for null.
 *
 * Requirements:
 * `region` is null or came from rampool_direct_open_region() and was not closed or freed.
 */
uint64_t rampool_direct_region_bytes(const rampool_direct_region *region);

/**
 * Frees the handle of a region; the region stays. Null does nothing.
 *
 * Requirements:
 * As rampool_direct_region_bytes().
 */
void rampool_direct_region_close(rampool_direct_region *region);

/**
 * Frees a region, for every member of the lease, and its handle. Null does nothing.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() and was not closed; `region` as for
 * rampool_direct_region_bytes().
 */
void rampool_direct_region_free(rampool_direct *direct, rampool_direct_region *region);

/**
 * Writes `bytes` bytes to the region, from `offset` on. Blocks until every server has them.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() and was not closed; `region` came from
 * rampool_direct_open_region() of it and was not closed or freed; `from` has `bytes` bytes, which do not
 * change during the call.
 */
rampool_status rampool_direct_put(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  const void *from,
                                  uint64_t bytes);

/**
 * Reads `bytes` bytes of the region, from `offset` on.
 *
 * Requirements:
 * As rampool_direct_put(); `to` has room for `bytes` bytes, which nothing else uses during the call.
 */
rampool_status rampool_direct_get(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  void *to,
                                  uint64_t bytes);

/**
 * Writes the bytes that `here` selects from `address` on to those that `there` selects from `offset` of the
 * region on, in the layouts' order. Both select the same number of bytes.
 *
 * Requirements:
 * As rampool_direct_put(); `there` and `here` are layouts that were not freed; the bytes that `here` selects
 * can be read, and do not change during the call.
 */
rampool_status rampool_direct_put_layout(rampool_direct *direct,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         const rampool_layout *there,
                                         const void *address,
                                         const rampool_layout *here);

/**
 * Reads the bytes that `there` selects from `offset` of the region on into those that `here` selects from
 * `address` on. Both select the same number of bytes, and `here` selects none twice.
 *
 * Requirements:
 * As rampool_direct_put_layout(); the bytes that `here` selects can be written, and nothing else uses them
 * during the call.
 */
rampool_status rampool_direct_get_layout(rampool_direct *direct,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         const rampool_layout *there,
                                         void *address,
                                         const rampool_layout *here);

/**
 * Lets registrations of this memory be kept for sending without a copy.
 *
 * Returns 1 if the kernel reports when the memory is unmapped, moved or dropped. Returns 0 if it cannot
 * (files, rampool's own regions, no userfaultfd): then call rampool_direct_forget() when that happens,
 * because until then puts from it send the old pages, whatever is mapped there.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() and was not closed; the memory is mapped, and readable.
 */
int rampool_direct_keep(rampool_direct *direct,
                        const void *address,
                        size_t bytes);

/**
 * Call this before or right after this memory is unmapped, freed, moved or dropped. For memory that was
 * never kept it does nothing.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() and was not closed.
 */
void rampool_direct_forget(rampool_direct *direct,
                           const void *address,
                           size_t bytes);

/**
 * Combines each element of this kind that `there` selects from `offset` of the region on with an operand, at
 * the servers: `element = combine(element, operand)`. `operands` has one operand for each element,
 * contiguously; an element that is selected twice is changed twice. Each change is atomic and happens
 * exactly once. Blocks until all are done.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() or _join() and was not closed; `region` belongs to it; `there` is
 * a layout that was not freed; `operands` has rampool_layout_size(there) bytes, which do not change during
 * the call.
 */
rampool_status rampool_direct_accumulate(rampool_direct *direct,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         const rampool_layout *there,
                                         uint32_t kind,
                                         uint32_t combine,
                                         const void *operands);

/**
 * Combines one element of this kind with an operand, and stores its previous value in `*old` unless that is
 * null. Atomic, and exactly once: with RAMPOOL_COMBINE_SUM it is fetch-and-add. Blocks until the server has
 * answered.
 *
 * Requirements:
 * `direct` and `region` as for rampool_direct_accumulate(); `operand` points to a number of this kind, and
 * one can be written to `old` if that is not null.
 */
rampool_status rampool_direct_fetch_op(rampool_direct *direct,
                                       const rampool_direct_region *region,
                                       uint64_t offset,
                                       uint32_t kind,
                                       uint32_t combine,
                                       const void *operand,
                                       void *old);

/**
 * Writes `*desired` to one element of this kind if it equals `*expected` bit by bit, and stores its previous
 * value in `*old`. The write happened if `*old` equals `*expected`. Atomic, and exactly once. Blocks until
 * the server has answered.
 *
 * Requirements:
 * As rampool_direct_fetch_op(); `expected` and `desired` point to numbers of this kind.
 */
rampool_status rampool_direct_compare_exchange(rampool_direct *direct,
                                               const rampool_direct_region *region,
                                               uint64_t offset,
                                               uint32_t kind,
                                               const void *expected,
                                               const void *desired,
                                               void *old);

/**
 * Counts and sums the selected elements of a column. The servers add up, and only the results travel. The
 * column is what `column` selects from `offset` of the region on, elements of this kind. Blocks until all
 * servers have answered.
 *
 * Requirements:
 * `direct` and `region` as for rampool_direct_accumulate(); `column` is a layout that was not freed;
 * `filter` is null (all elements) or valid; `total` is null or can be written.
 */
rampool_status rampool_direct_sum(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  const rampool_layout *column,
                                  uint32_t kind,
                                  const rampool_filter *filter,
                                  rampool_total *total);

/**
 * Stores the least of the selected elements of a column in `*value`; `*found` is false if none is selected.
 * NaNs are skipped.
 *
 * Requirements:
 * As rampool_direct_sum(); a number of this kind can be written to `value`; `found` can be written.
 */
rampool_status rampool_direct_min(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  const rampool_layout *column,
                                  uint32_t kind,
                                  const rampool_filter *filter,
                                  void *value,
                                  bool *found);

/**
 * Stores the greatest of the selected elements of a column in `*value`; `*found` is false if none is
 * selected.
 *
 * Requirements:
 * As rampool_direct_min().
 */
rampool_status rampool_direct_max(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  const rampool_layout *column,
                                  uint32_t kind,
                                  const rampool_filter *filter,
                                  void *value,
                                  bool *found);

/**
 * Writes the positions of the selected elements among the elements of the column, in order: the first `room`
 * of them. `*count` is the number of selected elements; if it is more than `room`, the call succeeds and the
 * rest is not written.
 *
 * Requirements:
 * As rampool_direct_sum(); `positions` has room for `room` items, and is not null unless `room` is 0;
 * `count` can be written.
 */
rampool_status rampool_direct_select(rampool_direct *direct,
                                     const rampool_direct_region *region,
                                     uint64_t offset,
                                     const rampool_layout *column,
                                     uint32_t kind,
                                     const rampool_filter *filter,
                                     uint64_t *positions,
                                     size_t room,
                                     uint64_t *count);

/**
 * Writes the values of the selected elements of a column, in no particular order. `room` and `*count` as for
 * rampool_direct_select().
 *
 * Requirements:
 * As rampool_direct_select(); `values` has room for `room` numbers of this kind.
 */
rampool_status rampool_direct_select_values(rampool_direct *direct,
                                            const rampool_direct_region *region,
                                            uint64_t offset,
                                            const rampool_layout *column,
                                            uint32_t kind,
                                            const rampool_filter *filter,
                                            void *values,
                                            size_t room,
                                            uint64_t *count);

/**
 * Copies the bytes that `source` selects from `from_offset` of one region on to those that `target` selects
 * from `to_offset` of another, or the same, in the layouts' order. The bytes go from server to server, not
 * through this process. Both select the same number of bytes, `target` selects none twice, and the two do
 * not overlap. Exactly once; blocks until it is done. It is not ordered with other operations: those that
 * must come before it must have ended.
 *
 * Requirements:
 * `direct`, `from` and `to` as for rampool_direct_accumulate(); `source` and `target` are layouts that were
 * not freed.
 */
rampool_status rampool_direct_copy(rampool_direct *direct,
                                   const rampool_direct_region *from,
                                   uint64_t from_offset,
                                   const rampool_layout *source,
                                   const rampool_direct_region *to,
                                   uint64_t to_offset,
                                   const rampool_layout *target);

/**
 * Counts and sums the selected elements of a column for each key, and finds their least and greatest: the
 * elements of `keys`, integers, say to which group each element of `column` belongs, and are as many. The
 * filter is of the elements. The servers add up. Writes the first `room` groups, by ascending keys; `*count`
 * is the number of all; if it is more than `room`, the call succeeds and the rest is not written. More than
 * 2^20 different keys are refused. Blocks until all servers have answered. A change of keys that was started
 * in another region than the column's must have ended.
 *
 * Requirements:
 * `direct` as for rampool_direct_accumulate(); `keys` and `column` are null or valid, with regions that
 * belong to it and layouts that were not freed; `filter` is null (all elements) or valid; `groups` has room
 * for `room` items, and is not null unless `room` is 0; `count` can be written.
 */
rampool_status rampool_direct_group(rampool_direct *direct,
                                    const rampool_column *keys,
                                    const rampool_column *column,
                                    const rampool_filter *filter,
                                    rampool_group *groups,
                                    size_t room,
                                    uint64_t *count);

/**
 * Makes a copy-on-write copy of a region at its memory servers, for other processes. Pages in local memory
 * are stored there, and stay here. The owner continues at once, and its later writes do not show in the
 * copy. Writes of other threads during the call are included or not, page by page. Blocks; faults of the
 * pool wait meanwhile. On success, free `*handed` with rampool_handed_over_free(). Otherwise it is null, and
 * nothing has changed. If the servers have no room, the status is RAMPOOL_STATUS_SERVER, as for their other
 * errors, and rampool_error_message() says which it is.
 *
 * The copy lives until it is freed (rampool_direct_region_free()) or the lease's last member leaves.
 *
 * Requirements:
 * `region` came from rampool_region_alloc() and was not freed; `handed` is null or can be written.
 */
rampool_status rampool_region_hand_over(const rampool_region *region,
                                        rampool_handed_over **handed);

/**
 * Writes a text that says where the copy is to `buffer`, with a terminating zero byte, for another process's
 * rampool_direct_join_handed_over(). A program with the text can use the lease: keep it as secret as a key.
 * RAMPOOL_STATUS_NO_ROOM if it is longer than `size` bytes; 8192 are enough for any 32 servers.
 *
 * Requirements:
 * `handed` is null or came from rampool_region_hand_over() and was not freed; `buffer` is null or `size`
 * bytes can be written there.
 */
rampool_status rampool_handed_over_text(const rampool_handed_over *handed,
                                        char *buffer,
                                        size_t size);

/**
 * Frees the handle; the copy stays. Null does nothing.
 *
 * Requirements:
 * `handed` is null or came from rampool_region_hand_over() and was not freed.
 */
void rampool_handed_over_free(rampool_handed_over *handed);

/**
 * Joins the lease of the process that handed a region over, and opens the copy: its bytes are the `*bytes`
 * bytes of `*region` from `*offset` on, for any operation of the direct view. The builder gives key,
 * encryption and deadlines; its servers are ignored. On success, close `*direct` with rampool_direct_close()
 * and `*region` with rampool_direct_region_free() or rampool_direct_region_close(); otherwise both are null.
 *
 * Requirements:
 * `builder` came from rampool_builder_new() and was not freed; `handed` is null or ends with a zero byte;
 * the others are null or can be written.
 */
rampool_status rampool_direct_join_handed_over(const rampool_builder *builder,
                                               const char *handed,
                                               rampool_direct **direct,
                                               rampool_direct_region **region,
                                               uint64_t *offset,
                                               uint64_t *bytes);

/**
 * Opens the queue of this name. If it does not exist it is created, for at most `messages` messages with
 * `bytes` bytes in all. If both are 0 it is not created, and the status is RAMPOOL_STATUS_GONE. On success,
 * free `*queue` with rampool_queue_free(); otherwise it is null. Blocks until the server has answered.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() or _join() and was not closed; `name` is null or ends with a zero
 * byte; `queue` is null or can be written.
 */
rampool_status rampool_queue_open(rampool_direct *direct,
                                  const char *name,
                                  uint64_t messages,
                                  uint64_t bytes,
                                  rampool_queue **queue);

/**
 * Frees the handle. The queue stays. Null does nothing.
 *
 * Requirements:
 * `queue` is null or came from rampool_queue_open() and was not freed.
 */
void rampool_queue_free(rampool_queue *queue);

/**
 * Deletes the queue and all messages in it, for every member of the lease. The handle must still be freed.
 *
 * Requirements:
 * `direct` and `queue` are null or valid.
 */
rampool_status rampool_queue_delete(rampool_direct *direct,
                                    const rampool_queue *queue);

/**
 * Appends a message: a head of at most 256 bytes, which is delivered at once, and a body of any length (0:
 * none), which follows. Blocks until the server has all of it. If the queue stays full for `timeout_ms`
 * milliseconds, the status is RAMPOOL_STATUS_NO_ROOM. A send that succeeded has appended the message exactly
 * once.
 *
 * Requirements:
 * `direct` and `queue` are null or valid; `head` and `body` can be read for the given number of bytes, or
 * are null if that is 0.
 */
rampool_status rampool_queue_send(rampool_direct *direct,
                                  const rampool_queue *queue,
                                  const void *head,
                                  size_t head_bytes,
                                  const void *body,
                                  size_t body_bytes,
                                  uint32_t timeout_ms);

/**
 * Appends a message whose body is what `layout` selects from `offset` of a region on. The body
 * is not copied: it stays the region's, and is what it is when the receiver reads it.
 * Otherwise as rampool_queue_send().
 *
 * Requirements:
 * As rampool_queue_send(); `region` and `layout` are null or valid, and `region` is of `direct`.
 */
rampool_status rampool_queue_send_region(rampool_direct *direct,
                                         const rampool_queue *queue,
                                         const void *head,
                                         size_t head_bytes,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         const rampool_layout *layout,
                                         uint32_t timeout_ms);

/**
 * Appends `count` messages of `head_bytes` bytes each (at most 256), contiguous at `heads`, without bodies.
 * They travel in groups, each of which enters the queue whole. This takes fewer requests and answers than
 * rampool_queue_send() for each. Blocks until all are in the queue, or until a group has waited
 * `timeout_ms` milliseconds for room. `*sent` is the number of messages, from the first on, that are in the
 * queue. It is less than `count` if there was no room for more. If there was room for none, the status is
 * RAMPOOL_STATUS_NO_ROOM. One call sends at most 1048576 messages; with more, the status is
 * RAMPOOL_STATUS_INVALID, and none is sent.
 *
 * Requirements:
 * `direct` and `queue` are null or valid; `heads` has `count` times `head_bytes` bytes; `sent` is null or
 * can be written.
 */
rampool_status rampool_queue_send_many(rampool_direct *direct,
                                       const rampool_queue *queue,
                                       const void *heads,
                                       size_t head_bytes,
                                       size_t count,
                                       uint32_t timeout_ms,
                                       size_t *sent);

/**
 * Takes the next message. Blocks until there is one, for at most `timeout_ms` milliseconds; then `*message`
 * is null, and the call succeeds. A message stays in its queue until rampool_message_done(): if this process
 * is lost before that, or closes the direct view, another receiver gets it.
 *
 * Requirements:
 * `direct` and `queue` are null or valid; `message` is null or can be written.
 */
rampool_status rampool_queue_take(rampool_direct *direct,
                                  const rampool_queue *queue,
                                  uint32_t timeout_ms,
                                  rampool_message **message);

/**
 * Takes the next message whose head is wanted, otherwise as rampool_queue_take(). Messages that it passes
 * over stay here, in their order, for later calls: they count against the queue's bounds, and no other
 * receiver gets them unless this one leaves.
 *
 * Requirements:
 * `direct` and `queue` are null or valid; `wanted` is null or valid, and its `head` and `mask` can be read
 * for `bytes` bytes; `message` is null or can be written.
 */
rampool_status rampool_queue_take_where(rampool_direct *direct,
                                        const rampool_queue *queue,
                                        const rampool_head_match *wanted,
                                        uint32_t timeout_ms,
                                        rampool_message **message);

/**
 * From now on the body of a message starts to come here as soon as its head does, without a call, if it has
 * at most so many bytes; 0: none does. Every message that is here may then have so many bytes here.
 *
 * Requirements:
 * `direct` and `queue` are null or valid.
 */
rampool_status rampool_queue_prefetch_bodies(rampool_direct *direct,
                                             const rampool_queue *queue,
                                             uint64_t at_most);

/**
 * Blocks until the server has heard of every message that this member is done with.
 *
 * Requirements:
 * `direct` and `queue` are null or valid.
 */
rampool_status rampool_queue_flush(rampool_direct *direct, const rampool_queue *queue);

/**
 * The head of a message, and its length in `*bytes`; null for null. Valid as long as the message.
 *
 * Requirements:
 * `message` is null or valid; `bytes` is null or can be written.
 */
const void *rampool_message_head(const rampool_message *message, size_t *bytes);

/**
 * Bytes of the body of a message; 0 for null.
 *
 * Requirements:
 * `message` is null or valid.
 */
uint64_t rampool_message_body_bytes(const rampool_message *message);

/**
 * Whether the message was delivered before, to a receiver that did not finish it; false for null.
 *
 * Requirements:
 * `message` is null or valid.
 */
bool rampool_message_redelivered(const rampool_message *message);

/**
 * Reads the body of a message to `buffer`. Blocks until it is there. RAMPOOL_STATUS_BUSY if it has not
 * arrived at the server within `timeout_ms` milliseconds, RAMPOOL_STATUS_GONE if its sender was lost
 * before, RAMPOOL_STATUS_NO_ROOM if it is longer than `size`.
 *
 * Requirements:
 * `direct` and `message` are null or valid; `buffer` can be written for `size` bytes, or is null if that is
 * 0.
 */
rampool_status rampool_message_body(rampool_direct *direct,
                                    rampool_message *message,
                                    void *buffer,
                                    size_t size,
                                    uint32_t timeout_ms);

/**
 * Copies the body of a message to a region, from `offset` on, from server to server: no byte of it comes
 * here. Blocks and fails as rampool_message_body().
 *
 * Requirements:
 * `direct`, `message` and `region` are null or valid, and `region` is of `direct`.
 */
rampool_status rampool_message_land_body(rampool_direct *direct,
                                         rampool_message *message,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         uint32_t timeout_ms);

/**
 * Where the body of a message lies in the pool: a region and the offset of its first byte. Every
 * operation of the direct view works there; a body that came with its message may only be read,
 * until rampool_message_done(). If the message has no body, or its body is not in one piece,
 * `*region` is null and the call succeeds. Close `*region` with rampool_direct_region_close().
 * Blocks and fails as rampool_message_body().
 *
 * Requirements:
 * `direct` and `message` are null or valid; `region` and `offset` are null or can be written.
 */
rampool_status rampool_message_body_place(rampool_direct *direct,
                                          rampool_message *message,
                                          uint32_t timeout_ms,
                                          rampool_direct_region **region,
                                          uint64_t *offset);

/**
 * Acknowledges the message, and frees its handle. Does not block: the server hears of it with the next
 * rampool_queue_take() of that queue, or by rampool_queue_flush(). Null does nothing.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() or _join() and was not closed; `message` is null or came from
 * rampool_queue_take() with this direct view and was not freed.
 */
void rampool_message_done(rampool_direct *direct,
                          rampool_message *message);

/**
 * Returns the message to its queue, for the next receiver, and frees its handle. Blocks until the server has
 * it.
 *
 * Requirements:
 * As rampool_message_done().
 */
rampool_status rampool_message_give_back(rampool_direct *direct,
                                         rampool_message *message);

/**
 * Joins the run that the environment describes: that of `rampool launch`, mpirun, srun, torchrun or a
 * Kubernetes job. Without one, it starts a run of this process alone. Blocks until all ranks have joined. On
 * success, leave with rampool_shared_close(); otherwise `*shared` is null.
 *
 * If the run fails later, on any rank, every process of it ends with the same reason, on standard error or
 * through `rampool launch`. A child that the process forks is no rank: calls in it return
 * RAMPOOL_STATUS_INVALID, or do nothing.
 *
 * Requirements:
 * `shared` is null or can be written.
 */
rampool_status rampool_shared_join(rampool_shared **shared);

/**
 * Leaves the run and frees the handle. One thread of every rank calls it once, after its last use of shared
 * memory; blocks until all have. Afterwards an access to shared memory ends the process. Null does nothing.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; no other call uses it meanwhile.
 */
rampool_status rampool_shared_close(rampool_shared *shared);

/**
 * This rank, from 0 on; 0 for null.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
uint32_t rampool_shared_rank(const rampool_shared *shared);

/**
 * Number of ranks; 0 for null.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
uint32_t rampool_shared_ranks(const rampool_shared *shared);

/**
 * Sets how many threads of this rank meet at barriers from now on. It is 1 at the start.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_set_threads(const rampool_shared *shared, uint32_t threads);

/**
 * Allocates `bytes` bytes, in whole pages, at the same address on every rank. Every rank makes the same
 * call, in the same order among such calls. The memory reads as zeroes. Only addresses are reserved: pages
 * take memory when they are touched.
 *
 * `options` is null or words such as "protocol=hlrc homes=blocked page-size=16K": protocol sc, lrc, hlrc,
 * aurc, ibec or auto (default: the run's); homes cyclic, blocked or the number of one rank (default:
 * cyclic); page-size from 4K to 64K, a power of two (default: the run's).
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `options` is null or ends with a
 * zero byte; `address` is null or can be written.
 */
rampool_status rampool_shared_alloc(const rampool_shared *shared,
                                    size_t bytes,
                                    const char *options,
                                    void **address);

/**
 * As rampool_shared_alloc(), for all ranks by a call of this one alone. The program passes the address to
 * the others.
 *
 * Requirements:
 * As rampool_shared_alloc().
 */
rampool_status rampool_shared_alloc_alone(const rampool_shared *shared,
                                          size_t bytes,
                                          const char *options,
                                          void **address);

/**
 * Frees memory of rampool_shared_alloc(). Every rank makes the same call, after its last use of the memory.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_free(const rampool_shared *shared,
                                   void *address);

/**
 * Frees, for all ranks, memory of rampool_shared_alloc_alone() of this rank or another. No rank may use it
 * any more.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_free_alone(const rampool_shared *shared,
                                         void *address);

/**
 * Takes the lock, named by any number below 2^62, for this thread alone. Then all writes before earlier
 * releases are visible (protocol ibec: those under this lock).
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_lock(const rampool_shared *shared,
                                   uint64_t lock);

/**
 * As rampool_shared_lock(), without waiting: RAMPOOL_STATUS_BUSY if it is held.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_try_lock(const rampool_shared *shared, uint64_t lock);

/**
 * Takes the lock together with other readers, while no thread has it exclusively.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_lock_shared(const rampool_shared *shared, uint64_t lock);

/**
 * As rampool_shared_lock_shared(), without waiting: RAMPOOL_STATUS_BUSY if a thread has it exclusively.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_try_lock_shared(const rampool_shared *shared,
                                              uint64_t lock);

/**
 * Takes S5's non-exclusive lock: it brings the newest released data, and keeps no thread out. Only where
 * everything is ibec; elsewhere as rampool_shared_lock_shared().
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_lock_snapshot(const rampool_shared *shared,
                                            uint64_t lock);

/**
 * Releases a lock, however it was taken. RAMPOOL_STATUS_INVALID if this thread does not hold it.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_unlock(const rampool_shared *shared, uint64_t lock);

/**
 * Waits for all threads of all ranks (rampool_shared_set_threads()). Afterwards all writes are visible to
 * all threads. All name the same barrier.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_barrier(const rampool_shared *shared,
                                      uint32_t barrier);

/**
 * As rampool_shared_barrier(). Pages that only one rank wrote become that rank's own, and cost it nothing
 * until another rank reads them.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_barrier_keep(const rampool_shared *shared,
                                           uint32_t barrier);

/**
 * Releases `lock`, which this thread holds exclusively, waits for a signal of this condition of the lock,
 * and takes the lock again. Check the condition in a loop.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_wait(const rampool_shared *shared,
                                   uint32_t condition,
                                   uint64_t lock);

/**
 * Wakes one thread that waits for this condition of the lock.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_signal(const rampool_shared *shared,
                                     uint32_t condition,
                                     uint64_t lock);

/**
 * Wakes all threads that wait for this condition of the lock.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_broadcast(const rampool_shared *shared,
                                        uint32_t condition,
                                        uint64_t lock);

/**
 * Sets one of 65536 semaphores, numbered from 0; all are 0 at the start. No thread may wait for it during
 * the call.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_semaphore_set(const rampool_shared *shared,
                                            uint32_t semaphore,
                                            uint64_t count);

/**
 * Takes one from the semaphore; waits while it is 0.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_semaphore_wait(const rampool_shared *shared, uint32_t semaphore);

/**
 * Adds one to the semaphore and wakes one waiting thread.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_semaphore_post(const rampool_shared *shared, uint32_t semaphore);

/**
 * Makes this thread's writes visible to threads that synchronise with it later, without releasing anything.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_fence(const rampool_shared *shared);

/**
 * Reads and changes (RAMPOOL_ATOMIC_...) the naturally aligned word of `width` bytes (1, 2, 4 or 8) at
 * `word`, in shared memory, atomically among all ranks, ordered like a lock of that word. `*before`, unless
 * null, gets the word's value before.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `before` is null or can be
 * written.
 */
rampool_status rampool_shared_atomic(const rampool_shared *shared,
                                     void *word,
                                     size_t width,
                                     uint32_t operation,
                                     uint64_t operand,
                                     uint64_t *before);

/**
 * Stores `desired` in the word if it equals `expected`, as rampool_shared_atomic(). It was stored if
 * `*before` equals `expected` afterwards.
 *
 * Requirements:
 * As rampool_shared_atomic().
 */
rampool_status rampool_shared_compare_exchange(const rampool_shared *shared,
                                               void *word,
                                               size_t width,
                                               uint64_t expected,
                                               uint64_t desired,
                                               uint64_t *before);

/**
 * Adds to a double, as rampool_shared_atomic(). `*before`, unless null, gets its value before.
 *
 * Requirements:
 * As rampool_shared_atomic().
 */
rampool_status rampool_shared_add_double(const rampool_shared *shared,
                                         double *word,
                                         double value,
                                         double *before);

/**
 * From the next barrier on, rank `manager` manages the lock.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_set_lock_manager(const rampool_shared *shared,
                                               uint64_t lock,
                                               uint32_t manager);

/**
 * From the next barrier on, rank `home` is the home of every page that holds one of these bytes.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_set_home(const rampool_shared *shared,
                                       const void *address,
                                       size_t bytes,
                                       uint32_t home);

/**
 * Writes the rank that is now the home of the page at `address` to `*home`.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `home` is null or can be
 * written.
 */
rampool_status rampool_shared_home(const rampool_shared *shared,
                                   const void *address,
                                   uint32_t *home);

/**
 * Writes the rank's counts to `*stats`, as many as fit `size` (pass sizeof(rampool_shared_stats)).
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `stats` is null or `size` bytes
 * can be written there.
 */
rampool_status rampool_shared_count(const rampool_shared *shared,
                                    rampool_shared_stats *stats,
                                    size_t size);

/**
 * Ends the run on every rank, this one included, with this reason.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `why` is null or ends with a
 * zero byte.
 */
rampool_status rampool_shared_abort(const rampool_shared *shared,
                                    const char *why);

/**
 * Opens the region that begins at `address`, which all ranks allocated together, for direct operations. On
 * success, close `*view` with rampool_shared_direct_close(); otherwise it is null.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `view` is null or can be
 * written.
 */
rampool_status rampool_shared_direct_open(const rampool_shared *shared,
                                          const void *address,
                                          rampool_shared_direct **view);

/**
 * Closes the view; the region stays. Null does nothing.
 *
 * Requirements:
 * `view` is null or came from rampool_shared_direct_open() or rampool_outside_open_region() and was not
 * closed.
 */
void rampool_shared_direct_close(rampool_shared_direct *view);

/**
 * Bytes of the region; 0 for null.
 *
 * Requirements:
 * As rampool_shared_direct_close().
 */
uint64_t rampool_shared_direct_bytes(const rampool_shared_direct *view);

/**
 * Publishes the region that begins at `address`, which all ranks allocated together, under this name for
 * processes outside the run. Every rank makes the call.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `name` is null or ends with a
 * zero byte.
 */
rampool_status rampool_shared_publish(const rampool_shared *shared,
                                      const char *name,
                                      const void *address);

/**
 * Opens a listener on every rank for processes outside the run, which may use what is published. Every
 * rank makes the call, each with its own address ("HOST:PORT"; with port 0 the kernel chooses). Each
 * gets the same ticket, with a terminating zero byte, for rampool_outside_open(). Blocks until all have
 * called. RAMPOOL_STATUS_NO_ROOM if the ticket is longer than `size` bytes; 256 for each rank and 64
 * for the secret are enough.
 *
 * Requirements:
 * `shared` is null or came from rampool_shared_join() and was not finished; `listen` is null or ends with a
 * zero byte; `buffer` is null or `size` bytes can be written there.
 */
rampool_status rampool_shared_listen(const rampool_shared *shared,
                                     const char *listen,
                                     char *buffer,
                                     size_t size);

/**
 * Connects to the listeners of a run, by the ticket of rampool_shared_listen(). From another machine it
 * needs the run's key, in the file `key_file` (null: none). Blocks at most a minute. On success, close
 * `*outside` with rampool_outside_close(); otherwise it is null.
 *
 * Requirements:
 * `ticket` and `key_file` are null or end with a zero byte; `outside` is null or can be written.
 */
rampool_status rampool_outside_open(const char *ticket,
                                    const char *key_file,
                                    rampool_outside **outside);

/**
 * Disconnects from the run. Views that are open stay valid until they are closed. Null does nothing.
 *
 * Requirements:
 * `outside` is null or came from rampool_outside_open() and was not closed.
 */
void rampool_outside_close(rampool_outside *outside);

/**
 * Opens a region that the ranks have published. RAMPOOL_STATUS_INVALID if there is none of that name. On
 * success, close `*view` with rampool_shared_direct_close(); otherwise it is null.
 *
 * Requirements:
 * `outside` is null or came from rampool_outside_open() and was not closed; `name` is null or ends with a
 * zero byte; `view` is null or can be written.
 */
rampool_status rampool_outside_open_region(const rampool_outside *outside,
                                           const char *name,
                                           rampool_shared_direct **view);

/**
 * Reads the bytes that `there` selects from `offset` of the region on into those that `here` selects from
 * `address` on. Both select the same number of bytes. Only those bytes travel.
 *
 * Requirements:
 * `view` is null or was opened and not closed; `there` and `here` are null or layouts that were not freed;
 * the bytes that `here` selects can be written, and nothing else uses them during the call.
 */
rampool_status rampool_shared_direct_get_layout(const rampool_shared_direct *view,
                                                uint64_t offset,
                                                const rampool_layout *there,
                                                void *address,
                                                const rampool_layout *here);

/**
 * Writes the bytes that `here` selects from `address` on to those that `there` selects from `offset` of the
 * region on. Both select the same number of bytes, and `there` selects none twice.
 *
 * Requirements:
 * As rampool_shared_direct_get_layout(); the bytes that `here` selects can be read, and do not change during
 * the call.
 */
rampool_status rampool_shared_direct_put_layout(const rampool_shared_direct *view,
                                                uint64_t offset,
                                                const rampool_layout *there,
                                                const void *address,
                                                const rampool_layout *here);

/**
 * Reads `bytes` bytes of the region, from `offset` on.
 *
 * Requirements:
 * `view` is null or was opened and not closed; `to` has room for `bytes` bytes, which nothing else uses
 * during the call.
 */
rampool_status rampool_shared_direct_get(const rampool_shared_direct *view,
                                         uint64_t offset,
                                         void *to,
                                         uint64_t bytes);

/**
 * Writes `bytes` bytes to the region, from `offset` on. When it returns they are there, as if the rank that
 * executed it had stored and released them.
 *
 * Requirements:
 * `view` is null or was opened and not closed; `from` has `bytes` bytes, which do not change during the
 * call.
 */
rampool_status rampool_shared_direct_put(const rampool_shared_direct *view,
                                         uint64_t offset,
                                         const void *from,
                                         uint64_t bytes);

/**
 * Combines each element of this kind that `there` selects from `offset` of the region on with an operand:
 * `element = combine(element, operand)`. `operands` has one operand for each element, contiguously. Each
 * change is atomic among direct operations, but not with rampool_shared_atomic() or stores of ranks to the
 * same word.
 *
 * Requirements:
 * `view` is null or was opened and not closed; `there` is null or a layout that was not freed; `operands`
 * has rampool_layout_size(there) bytes, which do not change during the call.
 */
rampool_status rampool_shared_direct_accumulate(const rampool_shared_direct *view,
                                                uint64_t offset,
                                                const rampool_layout *there,
                                                uint32_t kind,
                                                uint32_t combine,
                                                const void *operands);

/**
 * Combines one element of this kind with an operand, and stores its previous value in `*old` unless that is
 * null. Ordered like a lock of that word, as rampool_shared_atomic() is.
 *
 * Requirements:
 * `view` is null or was opened and not closed; `operand` is null or points to a number of this kind; one can
 * be written to `old` if that is not null.
 */
rampool_status rampool_shared_direct_fetch_op(const rampool_shared_direct *view,
                                              uint64_t offset,
                                              uint32_t kind,
                                              uint32_t combine,
                                              const void *operand,
                                              void *old);

/**
 * Writes `*desired` to one element of this kind if it equals `*expected` bit by bit, and stores its previous
 * value in `*old`. Ordered as rampool_shared_direct_fetch_op().
 *
 * Requirements:
 * As rampool_shared_direct_fetch_op(); `expected` and `desired` are null or point to numbers of this kind.
 */
rampool_status rampool_shared_direct_compare_exchange(const rampool_shared_direct *view,
                                                      uint64_t offset,
                                                      uint32_t kind,
                                                      const void *expected,
                                                      const void *desired,
                                                      void *old);

/**
 * Begins to read `bytes` bytes of the region, from `offset` on, and returns at once. Many operations may be
 * under way; they may end in any order. On success, end `*pending` with rampool_direct_wait(); otherwise it
 * is null.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() and was not closed; `region` came from
 * rampool_direct_open_region() of it and was not closed or freed; `to` has room for `bytes` bytes, which
 * nothing else uses until rampool_direct_wait() has returned or `direct` is closed; `pending` is null or can
 * be written.
 */
rampool_status rampool_direct_start_get(rampool_direct *direct,
                                        const rampool_direct_region *region,
                                        uint64_t offset,
                                        void *to,
                                        uint64_t bytes,
                                        rampool_pending **pending);

/**
 * Begins to write `bytes` bytes to the region, from `offset` on, and returns at once, as
 * rampool_direct_start_get().
 *
 * Requirements:
 * As rampool_direct_start_get(); `from` has `bytes` bytes, which do not change until rampool_direct_wait()
 * has returned or `direct` is closed.
 */
rampool_status rampool_direct_start_put(rampool_direct *direct,
                                        const rampool_direct_region *region,
                                        uint64_t offset,
                                        const void *from,
                                        uint64_t bytes,
                                        rampool_pending **pending);

/**
 * Begins what rampool_direct_get_layout() does, and returns at once, as rampool_direct_start_get(). The
 * layouts may be freed at once.
 *
 * Requirements:
 * As rampool_direct_start_get(); `there` and `here` are layouts that were not freed; nothing
 * else uses the bytes that `here` selects from `address` on until rampool_direct_wait() has
 * returned or `direct` is closed.
 */
rampool_status rampool_direct_start_get_layout(rampool_direct *direct,
                                               const rampool_direct_region *region,
                                               uint64_t offset,
                                               const rampool_layout *there,
                                               void *address,
                                               const rampool_layout *here,
                                               rampool_pending **pending);

/**
 * Begins what rampool_direct_put_layout() does, and returns at once, as rampool_direct_start_get(). The
 * layouts may be freed at once.
 *
 * Requirements:
 * As rampool_direct_start_get_layout(); the bytes that `here` selects do not change until
 * rampool_direct_wait() has returned or `direct` is closed.
 */
rampool_status rampool_direct_start_put_layout(rampool_direct *direct,
                                               const rampool_direct_region *region,
                                               uint64_t offset,
                                               const rampool_layout *there,
                                               const void *address,
                                               const rampool_layout *here,
                                               rampool_pending **pending);

/**
 * Whether an operation has ended; false for null. Does not block, and lets everything under way go on. When
 * it has ended, rampool_direct_wait() returns at once and says how.
 *
 * Requirements:
 * `direct` is null or was not closed; `pending` is null or was started with it and not waited for.
 */
bool rampool_direct_test(rampool_direct *direct,
                         const rampool_pending *pending);

/**
 * Blocks until an operation has ended, returns its status, and frees `pending`, also when it failed. Null
 * does nothing.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() and was not closed; `pending` is null or was started with it and
 * not waited for.
 */
rampool_status rampool_direct_wait(rampool_direct *direct,
                                   rampool_pending *pending);

/**
 * Opens the store of this name, which is made if there is none, for at most `keys` keys (0: as many as the
 * store is for that there is, or else 100000). The room of a process that has put, and has not been heard of
 * for `stale_ms` milliseconds, is taken over (0: 60 seconds). Rust and Python open the same store. On
 * success, free `*store` with rampool_store_free(); otherwise it is null.
 *
 * Requirements:
 * `direct` came from rampool_direct_open() or _join() and was not closed; `name` is null or ends with a zero
 * byte; `store` is null or can be written.
 */
rampool_status rampool_store_open(rampool_direct *direct,
                                  const char *name,
                                  uint64_t keys,
                                  uint32_t stale_ms,
                                  rampool_store **store);

/**
 * Frees the handle. Null does nothing.
 *
 * Requirements:
 * `store` is null or came from rampool_store_open() and was not freed.
 */
void rampool_store_free(rampool_store *store);

/**
 * Makes `bytes` bytes the value of a key. Without room the status is RAMPOOL_STATUS_NO_ROOM, and the key has
 * the value that it had.
 *
 * Requirements:
 * `direct` and `store` are null or valid, and `store` is of `direct`; `key` and `value` can be read for the
 * given number of bytes, or are null if that is 0.
 */
rampool_status rampool_store_put(rampool_direct *direct,
                                 rampool_store *store,
                                 const void *key,
                                 size_t key_bytes,
                                 const void *value,
                                 size_t bytes);

/**
 * Reads the value of a key: `*bytes` is its length, and the buffer gets it. If the key has no value the
 * status is RAMPOOL_STATUS_GONE; if the value is longer than `room`, RAMPOOL_STATUS_NO_ROOM, and only
 * `*bytes` is written.
 *
 * Requirements:
 * `direct` and `store` are null or valid, and `store` is of `direct`; `key` can be read and `buffer` written
 * for the given number of bytes, or they are null if that is 0; `bytes` is null or can be written.
 */
rampool_status rampool_store_get(rampool_direct *direct,
                                 rampool_store *store,
                                 const void *key,
                                 size_t key_bytes,
                                 void *buffer,
                                 size_t room,
                                 size_t *bytes);

/**
 * Removes a key with its value. If it has none the status is RAMPOOL_STATUS_GONE.
 *
 * Requirements:
 * As rampool_store_get().
 */
rampool_status rampool_store_remove(rampool_direct *direct,
                                    rampool_store *store,
                                    const void *key,
                                    size_t key_bytes);

/**
 * How many keys have a value.
 *
 * Requirements:
 * `direct` and `store` are null or valid, and `store` is of `direct`; `count` is null or can be written.
 */
rampool_status rampool_store_count(rampool_direct *direct,
                                   const rampool_store *store,
                                   uint64_t *count);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAMPOOL_H */
