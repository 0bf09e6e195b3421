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
 * Or bytes are read and changed where they lie, without pages: rampool_direct_open() opens the direct view, rampool_direct_put()
 * and rampool_direct_get() move bytes, and layouts say which. rampool_mpi.h makes layouts of MPI's datatypes.
 *
 * Or several processes share memory: `rampool launch -n 4 ./program` starts them, each joins with rampool_shared_join() and
 * is one rank of the run. Accesses of one byte by different threads, at least one of them a write, must be ordered by the
 * locks, barriers, condition variables, semaphores or atomic operations of this library. Any thread may use them.
 *
 * Or processes send each other messages through named queues at the memory servers, on the same direct view: rampool_queue_send(),
 * rampool_queue_take(). The head of a message arrives at once, its body lies in the pool.
 *
 * Threads: a builder, and a direct view with the messages it has taken, belongs to one thread at a time. Pools and regions may be used by any threads at once; only
 * freeing or closing one must not meet another use of the same. Regions keep their content across fork() as long as the
 * parent lives; the child must not call functions of this library.
 */

#ifndef RAMPOOL_H
#define RAMPOOL_H

#include <stdbool.h>
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
 * Orders of the elements of a subarray: the last dimension is the densest, or the first.
 */
#define RAMPOOL_ORDER_C 0

#define RAMPOOL_ORDER_FORTRAN 1

/**
 * What an element is: little-endian, of 4 or 8 bytes, at a multiple of its length from the start of its region.
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
 * Which elements of a column count. BETWEEN is from `low` to `high`, both included; the others compare with `low`.
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
   * An argument makes no sense: a null pointer, an unknown option, a value out of range.
   */
  RAMPOOL_STATUS_INVALID = 1,
  /**
   * A memory server could not be reached, refused, or cannot lend as much as is wanted.
   */
  RAMPOOL_STATUS_SERVER = 2,
  /**
   * The region does not fit what was lent; or the queue is full; or the buffer is too short.
   */
  RAMPOOL_STATUS_NO_ROOM = 3,
  /**
   * The kernel does not allow what is needed; `rampool doctor` says what to change.
   */
  RAMPOOL_STATUS_SYSTEM = 4,
  /**
   * The pool still has regions; or somebody has the lock; or the body of a message is on its way still.
   */
  RAMPOOL_STATUS_BUSY = 5,
  /**
   * The ranks of a run did not come together, or the run is over.
   */
  RAMPOOL_STATUS_RUN = 6,
  /**
   * There is no such queue; or the sender of a message was lost before its body was there.
   */
  RAMPOOL_STATUS_GONE = 7,
} rampool_status;

/**
 * Options of a pool, by name. Names, values and defaults are those of the command line without the dashes: "server",
 * "memory", "local", "page-size", "prefetch", "rung", "name", "key-file", "encryption", "compression", "stripe",
 * "same-host", "zero-copy", "pinned", "connect-deadline-ms", "op-deadline-ms". Amounts are written like 4096, 512M or 1.5G.
 */
typedef struct rampool_builder rampool_builder;

/**
 * One thread's way to the bytes of regions, read and changed where they lie. It belongs to one thread at a time.
 */
typedef struct rampool_direct rampool_direct;

/**
 * A region as the direct view knows it.
 */
typedef struct rampool_direct_region rampool_direct_region;

/**
 * Memory of this process that a server on this machine may write to and read from while an operation names it. It belongs to one thread at a time; a forked child
 * does not have it.
 */
typedef struct rampool_exposed rampool_exposed;

/**
 * A copy of a region at the memory servers, and the way there.
 */
typedef struct rampool_handed_over rampool_handed_over;

/**
 * Which bytes, in which order, in the terms of MPI's derived datatypes. Never changes; freed with rampool_layout_free(), also when others were made of it.
 */
typedef struct rampool_layout rampool_layout;

/**
 * A message that was taken, until rampool_message_done() or rampool_message_give_back().
 */
typedef struct rampool_message rampool_message;

/**
 * This process, outside of a run, at the doors of its ranks. Any threads may use it; their operations take turns.
 */
typedef struct rampool_outside rampool_outside;

/**
 * Local memory, memory servers and the pager between them.
 */
typedef struct rampool_pool rampool_pool;

/**
 * A queue: a name that messages are sent to and taken from. Good with every member of the lease.
 */
typedef struct rampool_queue rampool_queue;

/**
 * A piece of memory in a pool.
 */
typedef struct rampool_region rampool_region;

/**
 * A shared region whose bytes are read and changed where they lie: at the homes of its pages. Any threads may use it.
 */
typedef struct rampool_shared_direct rampool_shared_direct;

/**
 * This process as one rank of a run: processes that use one address range as memory.
 */
typedef struct rampool_shared rampool_shared;

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

/**
 * Which elements of a column count: those that pass a test against one or two numbers of the column's kind.
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
   * Likewise, for RAMPOOL_TEST_BETWEEN; else it may be null.
   */
  const void *high;
} rampool_filter;

/**
 * The sum of those elements of a column that count.
 */
typedef struct {
  /**
   * How many elements count.
   */
  uint64_t count;
  /**
   * Of integers: the exact sum is `high` * 2^64 + `low`. Of floating-point numbers: 0.
   */
  uint64_t low;
  int64_t high;
  /**
   * The sum as a floating-point number, rounded where it is one of integers.
   */
  double real;
} rampool_total;

/**
 * What was done with keys to exposed memory.
 */
typedef struct {
  /**
   * Memories that a server has a key to now.
   */
  uint64_t exposed;
  /**
   * Operations whose bytes did not travel, and those bytes.
   */
  uint64_t requests;
  uint64_t bytes;
  /**
   * Operations that the server refused because it did not know the key any more; they were made again.
   */
  uint64_t stale;
  /**
   * Memories that were replaced because a server with a key was lost, or its connection broke.
   */
  uint64_t replaced;
} rampool_key_stats;

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
   * Bytes in diffs that were made.
   */
  uint64_t diff_bytes;
  uint64_t lock_acquires;
  /**
   * Of them, those that needed no message.
   */
  uint64_t local_acquires;
  uint64_t barriers;
  /**
   * Nanoseconds that pages were waited for.
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
   * Bytes of shared pages in this rank's memory now, and of those that are at memory servers only.
   */
  uint64_t resident_bytes;
  uint64_t away_bytes;
  /**
   * Copies that were forgotten to make room.
   */
  uint64_t evictions;
} rampool_shared_stats;

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

/**
 * `bytes` consecutive bytes.
 *
 * # Safety
 * `layout` is null or can be written.
 */
rampool_status rampool_layout_bytes(uint64_t bytes, rampool_layout **layout);

/**
 * `count` elements, one extent apart.
 *
 * # Safety
 * `element` is null or a layout that was not freed; `layout` is null or can be written.
 */
rampool_status rampool_layout_contiguous(const rampool_layout *element,
                                         uint64_t count,
                                         rampool_layout **layout);

/**
 * `count` blocks of `block` elements, the blocks `stride` extents apart.
 *
 * # Safety
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
 * # Safety
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
 * # Safety
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
 * # Safety
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
 * # Safety
 * `counts`, `displacements` and `fields` have `count` items, the last of which are layouts that were not freed; `layout` is null or can be written.
 */
rampool_status rampool_layout_struct(size_t count,
                                     const uint64_t *counts,
                                     const int64_t *displacements,
                                     const rampool_layout *const *fields,
                                     rampool_layout **layout);

/**
 * A part of an array of `dimensions` dimensions: `subsizes[i]` elements from `starts[i]` on, of `sizes[i]`. `order` is RAMPOOL_ORDER_....
 *
 * # Safety
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
 * The same bytes with other bounds: from `lower`, `extent` bytes.
 *
 * # Safety
 * As rampool_layout_contiguous().
 */
rampool_status rampool_layout_resized(const rampool_layout *element,
                                      int64_t lower,
                                      int64_t extent,
                                      rampool_layout **layout);

/**
 * Bytes that a layout selects; 0 for null.
 *
 * # Safety
 * `layout` is null or a layout that was not freed.
 */
uint64_t rampool_layout_size(const rampool_layout *layout);

/**
 * By how many bytes repetitions of a layout are apart; 0 for null.
 *
 * # Safety
 * As rampool_layout_size().
 */
int64_t rampool_layout_extent(const rampool_layout *layout);

/**
 * The lower bound of a layout; 0 for null.
 *
 * # Safety
 * As rampool_layout_size().
 */
int64_t rampool_layout_lower(const rampool_layout *layout);

/**
 * Copies what a layout selects from `address` on to `packed`, one byte after the other, rampool_layout_size() of them. Nothing for null.
 *
 * # Safety
 * `layout` is null or a layout that was not freed; what it selects can be read, and `packed` can be written and is apart from it.
 */
void rampool_layout_pack(const rampool_layout *layout,
                         const void *address,
                         void *packed);

/**
 * Frees a layout. Null does nothing.
 *
 * # Safety
 * `layout` is null or a layout that was not freed.
 */
void rampool_layout_free(rampool_layout *layout);

/**
 * Connects to the servers and leases memory there, for the direct view: bytes read and changed where they lie. The builder's options for paging do not matter. Blocks, for
 * each server at most the option "connect-deadline-ms". On success, `*direct` is for rampool_direct_close(); otherwise it is null.
 *
 * # Safety
 * `builder` came from rampool_builder_new() and was not freed; `direct` is null or can be written.
 */
rampool_status rampool_direct_open(const rampool_builder *builder,
                                   rampool_direct **direct);

/**
 * Joins the lease of another client, by its ticket: the same queues by the same names. The builder gives key, encryption and deadlines; its servers are not looked at.
 *
 * # Safety
 * `builder` came from rampool_builder_new() and was not freed; `ticket` is null or ends with a zero byte; `direct` is null or can be written.
 */
rampool_status rampool_direct_join(const rampool_builder *builder,
                                   const char *ticket,
                                   rampool_direct **direct);

/**
 * Writes the ticket of the client's lease, a text that ends with a zero byte, to `buffer`. Who has it may join the lease: keep it as secret as a key.
 * RAMPOOL_STATUS_NO_ROOM if it is longer than `size` bytes; 4096 are enough for any 32 servers.
 *
 * # Safety
 * `direct` came from rampool_direct_open() or _join() and was not closed; `buffer` is null or `size` bytes can be written there.
 */
rampool_status rampool_direct_ticket(rampool_direct *direct,
                                     char *buffer,
                                     size_t size);

/**
 * Leaves the servers. Regions go with the lease's last member. Null does nothing.
 *
 * # Safety
 * `direct` is null or came from rampool_direct_open() and was not closed.
 */
void rampool_direct_close(rampool_direct *direct);

/**
 * Opens the region of this name, or makes one of `bytes` bytes, all zero; a null name makes one without. With 0 bytes, it must be there. On success, `*region` is for
 * rampool_direct_region_close() or rampool_direct_region_free(); otherwise it is null.
 *
 * # Safety
 * `direct` came from rampool_direct_open() and was not closed; `name` is null or ends with a zero byte; `region` is null or can be written.
 */
rampool_status rampool_direct_open_region(rampool_direct *direct,
                                          const char *name,
                                          uint64_t bytes,
                                          rampool_direct_region **region);

/**
 * Bytes of a region; 0 for null.
 *
 * # Safety
 * `region` is null or came from rampool_direct_open_region() and was not closed or freed.
 */
uint64_t rampool_direct_region_bytes(const rampool_direct_region *region);

/**
 * Gives a region's handle up; the region stays. Null does nothing.
 *
 * # Safety
 * As rampool_direct_region_bytes().
 */
void rampool_direct_region_close(rampool_direct_region *region);

/**
 * Frees a region, for every member of the lease, and its handle. Null does nothing.
 *
 * # Safety
 * `direct` came from rampool_direct_open() and was not closed; `region` as for rampool_direct_region_bytes().
 */
void rampool_direct_region_free(rampool_direct *direct,
                                rampool_direct_region *region);

/**
 * Writes `bytes` bytes to the region, from `offset` on. Blocks until every server has them.
 *
 * # Safety
 * `direct` came from rampool_direct_open() and was not closed, `region` from rampool_direct_open_region() of it and was not closed or freed; `from` has `bytes` bytes, which nobody
 * writes meanwhile.
 */
rampool_status rampool_direct_put(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  const void *from,
                                  uint64_t bytes);

/**
 * Reads `bytes` bytes of the region, from `offset` on.
 *
 * # Safety
 * As rampool_direct_put(); `to` has room for `bytes` bytes, which nobody uses meanwhile.
 */
rampool_status rampool_direct_get(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  void *to,
                                  uint64_t bytes);

/**
 * Writes what `here` selects from `address` on to what `there` selects from `offset` of the region on, byte for byte in the layouts' order. Both select as many bytes.
 *
 * # Safety
 * As rampool_direct_put(); `there` and `here` are layouts that were not freed; what `here` selects can be read, and nobody writes it meanwhile.
 */
rampool_status rampool_direct_put_layout(rampool_direct *direct,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         const rampool_layout *there,
                                         const void *address,
                                         const rampool_layout *here);

/**
 * Reads what `there` selects from `offset` of the region on into what `here` selects from `address` on. Both select as many bytes, `here` none twice.
 *
 * # Safety
 * As rampool_direct_put_layout(); what `here` selects can be written, and nobody uses it meanwhile.
 */
rampool_status rampool_direct_get_layout(rampool_direct *direct,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         const rampool_layout *there,
                                         void *address,
                                         const rampool_layout *here);

/**
 * Memory whose registrations may be kept for sending without a copy.
 *
 * 1: the kernel says when the memory is unmapped, moved or dropped; nobody else needs to. 0: it cannot be watched (files, rampool's own regions, no userfaultfd), and until
 * rampool_direct_forget() puts from it send the pages that were there first, whatever is mapped there.
 *
 * # Safety
 * `direct` came from rampool_direct_open() and was not closed.
 */
int rampool_direct_keep(rampool_direct *direct,
                        const void *address,
                        size_t bytes);

/**
 * This memory is about to be unmapped, freed, moved or dropped, or just was. Memory that was never kept does no harm.
 *
 * # Safety
 * `direct` came from rampool_direct_open() and was not closed.
 */
void rampool_direct_forget(rampool_direct *direct,
                           const void *address,
                           size_t bytes);

/**
 * Changes each element of this kind that `there` selects from `offset` of the region on by an operand, at the servers: `element = combine(element, operand)`. There are as many operands,
 * one after the other at `operands`; an element that is selected twice is changed twice. Each element is changed at once, and exactly once. Blocks until all are.
 *
 * # Safety
 * `direct` came from rampool_direct_open() or _join() and was not closed, `region` is one of it; `there` is a layout that was not freed; `operands` has
 * rampool_layout_size(there) bytes, which nobody writes meanwhile.
 */
rampool_status rampool_direct_accumulate(rampool_direct *direct,
                                         const rampool_direct_region *region,
                                         uint64_t offset,
                                         const rampool_layout *there,
                                         uint32_t kind,
                                         uint32_t combine,
                                         const void *operands);

/**
 * Changes one element of this kind by an operand, and gives what it was before in `*old` (null: nobody wants it). At once, and exactly once: with RAMPOOL_COMBINE_SUM it is
 * fetch-and-add. Blocks until the server has answered.
 *
 * # Safety
 * `direct` and `region` as for rampool_direct_accumulate(); `operand` points to a number of this kind, and one can be written to `old` if that is not null.
 */
rampool_status rampool_direct_fetch_op(rampool_direct *direct,
                                       const rampool_direct_region *region,
                                       uint64_t offset,
                                       uint32_t kind,
                                       uint32_t combine,
                                       const void *operand,
                                       void *old);

/**
 * Writes `*desired` to one element of this kind if it is `*expected`, bit by bit, and gives what it was before in `*old`: it was written if that is `*expected`. At once,
 * and exactly once. Blocks until the server has answered.
 *
 * # Safety
 * As rampool_direct_fetch_op(); `expected` and `desired` point to numbers of this kind.
 */
rampool_status rampool_direct_compare_swap(rampool_direct *direct,
                                           const rampool_direct_region *region,
                                           uint64_t offset,
                                           uint32_t kind,
                                           const void *expected,
                                           const void *desired,
                                           void *old);

/**
 * How many elements of a column count, and their sum: the servers add up, only the results travel. The column is what `column` selects from `offset` of the region on, elements of
 * this kind. Blocks until all servers have answered.
 *
 * # Safety
 * `direct` and `region` as for rampool_direct_accumulate(); `column` is a layout that was not freed; `filter` is null (all count) or valid; `total` is null or can be
 * written.
 */
rampool_status rampool_direct_sum(rampool_direct *direct,
                                  const rampool_direct_region *region,
                                  uint64_t offset,
                                  const rampool_layout *column,
                                  uint32_t kind,
                                  const rampool_filter *filter,
                                  rampool_total *total);

/**
 * The least of the elements of a column that count, in `*value`; `*found` is false if none does. Numbers that are no numbers are passed over.
 *
 * # Safety
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
 * The greatest of the elements of a column that count, in `*value`; `*found` is false if none does.
 *
 * # Safety
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
 * The positions of those elements that count among the elements of the column, in order: the first `room` of them. `*count` is how many there are; if that is more than `room`,
 * nothing is wrong, and the rest is not written.
 *
 * # Safety
 * As rampool_direct_sum(); `positions` has room for `room` of them, and is not null unless that is 0; `count` can be written.
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
 * The elements of a column that count, themselves, in no particular order; `room` and `*count` as for rampool_direct_select().
 *
 * # Safety
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
 * Copies what `source` selects from `from_offset` of one region on to what `target` selects from `to_offset` of another, or the same, byte for byte in the layouts' order. The bytes
 * go from server to server, not through this process. Both select as many bytes, `target` none twice, and what they select does not meet. Exactly once; blocks until it is
 * done. It has no place in the order of operations: what it is to come after must have ended.
 *
 * # Safety
 * `direct`, `from` and `to` as for rampool_direct_accumulate(); `source` and `target` are layouts that were not freed.
 */
rampool_status rampool_direct_copy(rampool_direct *direct,
                                   const rampool_direct_region *from,
                                   uint64_t from_offset,
                                   const rampool_layout *source,
                                   const rampool_direct_region *to,
                                   uint64_t to_offset,
                                   const rampool_layout *target);

/**
 * Makes a copy-on-write copy of a region at its memory servers, for other processes: what is in local memory is stored there, and stays here. The owner goes on at once, and nothing that
 * it does afterwards shows in the copy. What other threads write during the call is in it or not, page by page. Blocks; faults of the pool wait meanwhile. On success, `*handed` is for
 * rampool_handed_over_free(); otherwise it is null, and nothing has changed: RAMPOOL_STATUS_NO_ROOM is not told apart from other trouble at the servers (RAMPOOL_STATUS_SERVER), but said
 * by rampool_error_message().
 *
 * The copy lives until it is freed (rampool_direct_region_free()) or the lease's last member has left.
 *
 * # Safety
 * `region` came from rampool_region_alloc() and was not freed; `handed` is null or can be written.
 */
rampool_status rampool_region_hand_over(const rampool_region *region,
                                        rampool_handed_over **handed);

/**
 * Writes where the copy is, a text that ends with a zero byte, to `buffer`, for another process's rampool_direct_join_handed_over(). Who has it may use the lease: keep it as secret as a
 * key. RAMPOOL_STATUS_NO_ROOM if it is longer than `size` bytes; 8192 are enough for any 32 servers.
 *
 * # Safety
 * `handed` is null or came from rampool_region_hand_over() and was not freed; `buffer` is null or `size` bytes can be written there.
 */
rampool_status rampool_handed_over_text(const rampool_handed_over *handed,
                                        char *buffer,
                                        size_t size);

/**
 * Gives the handle up; the copy stays. Null does nothing.
 *
 * # Safety
 * `handed` is null or came from rampool_region_hand_over() and was not freed.
 */
void rampool_handed_over_free(rampool_handed_over *handed);

/**
 * Joins the lease of whoever handed a region over, and opens the copy: its bytes are those of `*region` from `*offset` on, `*bytes` of them, for any operation of the direct view. The
 * builder gives key, encryption and deadlines; its servers are not looked at. On success, `*direct` is for rampool_direct_close() and `*region` for rampool_direct_region_free() or
 * rampool_direct_region_close(); otherwise both are null.
 *
 * # Safety
 * `builder` came from rampool_builder_new() and was not freed; `handed` is null or ends with a zero byte; the others are null or can be written.
 */
rampool_status rampool_direct_join_handed_over(const rampool_builder *builder,
                                               const char *handed,
                                               rampool_direct **direct,
                                               rampool_direct_region **region,
                                               uint64_t *offset,
                                               uint64_t *bytes);

/**
 * Makes `bytes` bytes of memory, all zero, and gives the key to the first server that is reached through shared memory. Where there is none, or it takes no more (64 memories and 256 MiB for
 * each connection), the memory is as any other: rampool_direct_is_exposed(). Blocks until the server has answered. On success, `*memory` is for rampool_exposed_free(); otherwise it is
 * null.
 *
 * # Safety
 * `direct` came from rampool_direct_open() or _join() and was not closed; `memory` is null or can be written.
 */
rampool_status rampool_direct_expose(rampool_direct *direct,
                                     size_t bytes,
                                     rampool_exposed **memory);

/**
 * The first byte of exposed memory; the address stays until it is freed. Null for null.
 *
 * # Safety
 * `memory` is null or came from rampool_direct_expose() and was not freed.
 */
void *rampool_exposed_address(const rampool_exposed *memory);

/**
 * Bytes of exposed memory; 0 for null.
 *
 * # Safety
 * As rampool_exposed_address().
 */
size_t rampool_exposed_bytes(const rampool_exposed *memory);

/**
 * Whether a server has a key to the memory now. Not between a break of its connection and the comeback. False for null.
 *
 * # Safety
 * `direct` is null or came from rampool_direct_open() or _join() and was not closed; `memory` is null or came from rampool_direct_expose() of it and was not freed.
 */
bool rampool_direct_is_exposed(const rampool_direct *direct,
                               const rampool_exposed *memory);

/**
 * Takes the key back. Blocks until the server has said that it touches the memory no more, or until it is lost and the bytes are in other memory at the same addresses. The memory stays, as any
 * other.
 *
 * # Safety
 * As rampool_direct_is_exposed().
 */
rampool_status rampool_direct_withdraw(rampool_direct *direct,
                                       const rampool_exposed *memory);

/**
 * Frees exposed memory. A server that still has the key loses it with the next rampool_direct_expose(), or when the view is closed. Null does nothing.
 *
 * # Safety
 * `memory` is null or came from rampool_direct_expose() and was not freed; nothing uses it any more.
 */
void rampool_exposed_free(rampool_exposed *memory);

/**
 * Reads what `there` selects from `offset` of the region on into exposed memory, from its byte `at` on, one byte after the other. By key, the server puts the bytes there itself.
 *
 * # Safety
 * As rampool_direct_is_exposed(); `region` is one of `direct`; `there` is a layout that was not freed; nobody uses those bytes of the memory meanwhile.
 */
rampool_status rampool_direct_get_into(rampool_direct *direct,
                                       const rampool_direct_region *region,
                                       uint64_t offset,
                                       const rampool_layout *there,
                                       const rampool_exposed *memory,
                                       size_t at);

/**
 * Writes bytes of exposed memory, from its byte `at` on, to what `there` selects from `offset` of the region on. By key, the server takes the bytes from there itself.
 *
 * # Safety
 * As rampool_direct_get_into(), but others may read those bytes of the memory meanwhile.
 */
rampool_status rampool_direct_put_from(rampool_direct *direct,
                                       const rampool_direct_region *region,
                                       uint64_t offset,
                                       const rampool_layout *there,
                                       const rampool_exposed *memory,
                                       size_t at);

/**
 * Writes what was done with keys to `*stats`, as many counts as `size` (pass sizeof(rampool_key_stats)) has room for.
 *
 * # Safety
 * `direct` is null or came from rampool_direct_open() or _join() and was not closed; `stats` is null or `size` bytes can be written there.
 */
rampool_status rampool_direct_key_stats(const rampool_direct *direct,
                                        rampool_key_stats *stats,
                                        size_t size);

/**
 * Opens the queue of this name. If there is none it is made, for at most `messages` messages with together `bytes` bytes; unless both are 0, then it is
 * RAMPOOL_STATUS_GONE. On success, `*queue` is for rampool_queue_free(); otherwise it is null. Blocks until the server has answered.
 *
 * # Safety
 * `direct` came from rampool_direct_open() or _join() and was not closed; `name` is null or ends with a zero byte; `queue` is null or can be written.
 */
rampool_status rampool_queue_open(rampool_direct *direct,
                                  const char *name,
                                  uint64_t messages,
                                  uint64_t bytes,
                                  rampool_queue **queue);

/**
 * Frees the handle. The queue stays. Null does nothing.
 *
 * # Safety
 * `queue` is null or came from rampool_queue_open() and was not freed.
 */
void rampool_queue_free(rampool_queue *queue);

/**
 * Gives up the queue with all that is in it, for every member of the lease. The handle stays to be freed.
 *
 * # Safety
 * `direct` and `queue` are null or valid.
 */
rampool_status rampool_queue_delete(rampool_direct *direct,
                                    const rampool_queue *queue);

/**
 * Appends a message: a head of at most 256 bytes, which arrives at once, and a body of any length (0: none), which follows. Blocks until the server has all of it; if the
 * queue is full, `patience_ms` at most, and then it is RAMPOOL_STATUS_NO_ROOM. A send that succeeded has appended the message exactly once.
 *
 * # Safety
 * `direct` and `queue` are null or valid; `head` and `body` can be read for as many bytes as are said, or are null where that is 0.
 */
rampool_status rampool_queue_send(rampool_direct *direct,
                                  const rampool_queue *queue,
                                  const void *head,
                                  size_t head_bytes,
                                  const void *body,
                                  size_t body_bytes,
                                  uint32_t patience_ms);

/**
 * Appends `count` messages of `head_bytes` bytes each (at most 256), which lie one after the other at `heads`, without bodies. They travel in groups, each of which enters the queue
 * whole: fewer requests and answers than as many rampool_queue_send() take. Blocks until all are in the queue; while there is no room for a group, `patience_ms` at most. `*sent` is how
 * many are in it, the first ones: fewer than `count` if there was no room for more, and if there was for none, it is RAMPOOL_STATUS_NO_ROOM. One call sends 1048576 at most: more are
 * RAMPOOL_STATUS_INVALID, and none is sent.
 *
 * # Safety
 * `direct` and `queue` are null or valid; `heads` has `count` times `head_bytes` bytes; `sent` is null or can be written.
 */
rampool_status rampool_queue_send_many(rampool_direct *direct,
                                       const rampool_queue *queue,
                                       const void *heads,
                                       size_t head_bytes,
                                       size_t count,
                                       uint32_t patience_ms,
                                       size_t *sent);

/**
 * Takes the next message. Blocks until there is one, `patience_ms` at most; then `*message` is null, and that is a success. A message stays in its queue until
 * rampool_message_done(): if this process is lost before, or closes the direct view, another receiver gets it.
 *
 * # Safety
 * `direct` and `queue` are null or valid; `message` is null or can be written.
 */
rampool_status rampool_queue_take(rampool_direct *direct,
                                  const rampool_queue *queue,
                                  uint32_t patience_ms,
                                  rampool_message **message);

/**
 * Blocks until the server knows of every message that this member is done with.
 *
 * # Safety
 * `direct` and `queue` are null or valid.
 */
rampool_status rampool_queue_flush(rampool_direct *direct, const rampool_queue *queue);

/**
 * The head of a message, and its length in `*bytes`; null for null. Valid as long as the message.
 *
 * # Safety
 * `message` is null or valid; `bytes` is null or can be written.
 */
const void *rampool_message_head(const rampool_message *message, size_t *bytes);

/**
 * Bytes of the body of a message; 0 for null.
 *
 * # Safety
 * `message` is null or valid.
 */
uint64_t rampool_message_body_bytes(const rampool_message *message);

/**
 * Whether the message was delivered before, to a receiver that was not done with it; false for null.
 *
 * # Safety
 * `message` is null or valid.
 */
bool rampool_message_redelivered(const rampool_message *message);

/**
 * Reads the body of a message to `buffer`. Blocks until it is there; RAMPOOL_STATUS_BUSY if it has not arrived at the server within `patience_ms`,
 * RAMPOOL_STATUS_GONE if its sender was lost before, RAMPOOL_STATUS_NO_ROOM if it is longer than `size`.
 *
 * # Safety
 * `direct` and `message` are null or valid; `buffer` can be written for `size` bytes, or is null where that is 0.
 */
rampool_status rampool_message_body(rampool_direct *direct,
                                    rampool_message *message,
                                    void *buffer,
                                    size_t size,
                                    uint32_t patience_ms);

/**
 * The message is done with, and its handle freed. Does not block: the server hears of it with the next rampool_queue_take() of that queue, or by rampool_queue_flush().
 * Null does nothing.
 *
 * # Safety
 * `direct` came from rampool_direct_open() or _join() and was not closed; `message` is null or came from rampool_queue_take() with this direct view and was not freed.
 */
void rampool_message_done(rampool_direct *direct,
                          rampool_message *message);

/**
 * Gives the message back to its queue, for the next receiver, and frees its handle. Blocks until the server has it.
 *
 * # Safety
 * As rampool_message_done().
 */
rampool_status rampool_message_give_back(rampool_direct *direct,
                                         rampool_message *message);

/**
 * Joins the run that the environment describes: that of `rampool launch`, mpirun, srun, torchrun or a Kubernetes job; without any, a run of this
 * process alone. Blocks until all ranks have come. On success, `*shared` is for rampool_shared_finish(); otherwise it is null.
 *
 * When the run fails later, on whichever rank, every process of it ends with one reason, on standard error or with `rampool launch`.
 * A child that the process forks is no rank: calls in it give RAMPOOL_STATUS_INVALID, or do nothing.
 *
 * # Safety
 * `shared` is null or can be written.
 */
rampool_status rampool_shared_join(rampool_shared **shared);

/**
 * Leaves the run and frees the handle. Every rank calls it once, by one thread, when nothing of it uses shared memory any more; blocks until all
 * have. Afterwards a touch of shared memory ends the process. Null does nothing.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; no other call uses it meanwhile.
 */
rampool_status rampool_shared_finish(rampool_shared *shared);

/**
 * This rank, from 0 on; 0 for null.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
uint32_t rampool_shared_rank(const rampool_shared *shared);

/**
 * How many ranks there are; 0 for null.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
uint32_t rampool_shared_ranks(const rampool_shared *shared);

/**
 * From now on, `threads` threads of this rank meet at barriers. At the start it is one.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_set_threads(const rampool_shared *shared, uint32_t threads);

/**
 * Allocates `bytes` bytes, in whole pages, at the same address on every rank. Every rank makes the same call, in the same order among such calls.
 * It reads as zeroes. Only addresses are taken: pages take memory when they are touched.
 *
 * `options` is null or words like "protocol=hlrc homes=blocked page-size=16K": protocol sc, lrc, hlrc, aurc, ibec or auto (the run's, unless given);
 * homes cyclic, blocked or the number of one rank (cyclic); page-size from 4K to 64K, a power of two (4K).
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `options` is null or ends with a zero byte; `address` is null or can
 * be written.
 */
rampool_status rampool_shared_alloc(const rampool_shared *shared,
                                    size_t bytes,
                                    const char *options,
                                    void **address);

/**
 * As rampool_shared_alloc(), for all ranks by a call of this one alone. How the others learn the address is the program's business.
 *
 * # Safety
 * As rampool_shared_alloc().
 */
rampool_status rampool_shared_alloc_alone(const rampool_shared *shared,
                                          size_t bytes,
                                          const char *options,
                                          void **address);

/**
 * Frees what rampool_shared_alloc() gave; every rank makes the same call. Nobody uses the memory any more.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_free(const rampool_shared *shared,
                                   void *address);

/**
 * Frees, for all ranks, what rampool_shared_alloc_alone() gave to this rank or another. Nobody uses the memory any more.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_free_alone(const rampool_shared *shared,
                                         void *address);

/**
 * Takes the lock, which any number below 2^62 names, for this thread alone. What was written before earlier releases is visible then (protocol
 * ibec: what was written under this lock).
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_lock(const rampool_shared *shared,
                                   uint64_t lock);

/**
 * As rampool_shared_lock(), without waiting: RAMPOOL_STATUS_BUSY if it is held.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_try_lock(const rampool_shared *shared, uint64_t lock);

/**
 * Takes the lock together with other readers, while nobody has it alone.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_lock_shared(const rampool_shared *shared, uint64_t lock);

/**
 * As rampool_shared_lock_shared(), without waiting: RAMPOOL_STATUS_BUSY if somebody has it alone.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_try_lock_shared(const rampool_shared *shared, uint64_t lock);

/**
 * Takes S5's non-exclusive lock: the newest released data, after which nobody is kept out. Only where everything is ibec; elsewhere as
 * rampool_shared_lock_shared().
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_lock_snapshot(const rampool_shared *shared,
                                            uint64_t lock);

/**
 * Gives a lock back, however it was taken. RAMPOOL_STATUS_INVALID if this thread does not hold it.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_unlock(const rampool_shared *shared, uint64_t lock);

/**
 * Waits for all threads of all ranks (rampool_shared_set_threads()). Everything that anyone wrote is visible to everyone then. All name the same
 * barrier.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_barrier(const rampool_shared *shared,
                                      uint32_t barrier);

/**
 * As rampool_shared_barrier(); pages that one rank alone wrote become that rank's own, and cost it nothing until another reads them.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_barrier_keep(const rampool_shared *shared,
                                           uint32_t barrier);

/**
 * Gives `lock` (which this thread has alone) back, waits for a signal of this condition of the lock, takes the lock again. Check what is waited for
 * in a loop.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_wait(const rampool_shared *shared,
                                   uint32_t condition,
                                   uint64_t lock);

/**
 * Wakes one thread that waits for this condition of the lock.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_signal(const rampool_shared *shared,
                                     uint32_t condition,
                                     uint64_t lock);

/**
 * Wakes all threads that wait for this condition of the lock.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_broadcast(const rampool_shared *shared,
                                        uint32_t condition,
                                        uint64_t lock);

/**
 * Sets a semaphore, of which there are 65536, numbered from 0 on; all are 0 at the start. Nobody waits for it meanwhile.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_semaphore_set(const rampool_shared *shared,
                                            uint32_t semaphore,
                                            uint64_t count);

/**
 * Takes one from the semaphore; waits while it is 0.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_semaphore_wait(const rampool_shared *shared, uint32_t semaphore);

/**
 * Adds one to the semaphore and wakes one who waits.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_semaphore_post(const rampool_shared *shared, uint32_t semaphore);

/**
 * Makes this thread's writes available to whoever synchronises with it later, without giving anything back.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_fence(const rampool_shared *shared);

/**
 * Reads and changes (RAMPOOL_ATOMIC_...) the naturally aligned word of `width` bytes (1, 2, 4 or 8) at `word`, in shared memory, as one step of all
 * ranks, ordered like a lock of that word. `*before`, unless null, is the word's value before.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `before` is null or can be written.
 */
rampool_status rampool_shared_atomic(const rampool_shared *shared,
                                     void *word,
                                     size_t width,
                                     uint32_t operation,
                                     uint64_t operand,
                                     uint64_t *before);

/**
 * Stores `desired` in the word if it is `expected`, as rampool_shared_atomic(); it was if `*before` is `expected` afterwards.
 *
 * # Safety
 * As rampool_shared_atomic().
 */
rampool_status rampool_shared_compare_exchange(const rampool_shared *shared,
                                               void *word,
                                               size_t width,
                                               uint64_t expected,
                                               uint64_t desired,
                                               uint64_t *before);

/**
 * Adds to a double, as rampool_shared_atomic(). `*before`, unless null, is its value before.
 *
 * # Safety
 * As rampool_shared_atomic().
 */
rampool_status rampool_shared_add_double(const rampool_shared *shared,
                                         double *word,
                                         double value,
                                         double *before);

/**
 * From the next barrier on, rank `manager` manages the lock.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_set_lock_manager(const rampool_shared *shared,
                                               uint64_t lock,
                                               uint32_t manager);

/**
 * From the next barrier on, rank `home` is the home of every page that holds one of these bytes.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished.
 */
rampool_status rampool_shared_set_home(const rampool_shared *shared,
                                       const void *address,
                                       size_t bytes,
                                       uint32_t home);

/**
 * Writes to `*home` which rank is now the home of the page at `address`.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `home` is null or can be written.
 */
rampool_status rampool_shared_home(const rampool_shared *shared,
                                   const void *address,
                                   uint32_t *home);

/**
 * Writes the rank's counts to `*stats`, as many of them as `size` (pass sizeof(rampool_shared_stats)) has room for.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `stats` is null or `size` bytes can be written there.
 */
rampool_status rampool_shared_count(const rampool_shared *shared,
                                    rampool_shared_stats *stats,
                                    size_t size);

/**
 * Ends the run on every rank, this one too, and says why.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `why` is null or ends with a zero byte.
 */
rampool_status rampool_shared_abort(const rampool_shared *shared,
                                    const char *why);

/**
 * Opens for direct operations what begins at `address` and all ranks have allocated together. On success, `*view` is for rampool_shared_direct_close(); otherwise it is null.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `view` is null or can be written.
 */
rampool_status rampool_shared_direct_open(const rampool_shared *shared,
                                          const void *address,
                                          rampool_shared_direct **view);

/**
 * Gives the view up; the region stays. Null does nothing.
 *
 * # Safety
 * `view` is null or came from rampool_shared_direct_open() or rampool_outside_open_region() and was not closed.
 */
void rampool_shared_direct_close(rampool_shared_direct *view);

/**
 * Bytes of the region; 0 for null.
 *
 * # Safety
 * As rampool_shared_direct_close().
 */
uint64_t rampool_shared_direct_bytes(const rampool_shared_direct *view);

/**
 * Lets processes outside of the run use, by this name, what begins at `address` and all ranks have allocated together. Every rank makes the call.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `name` is null or ends with a zero byte.
 */
rampool_status rampool_shared_publish(const rampool_shared *shared,
                                      const char *name,
                                      const void *address);

/**
 * Opens a door for processes outside of the run, which may use what is published. Every rank makes the call, each with an address of its own to listen on ("HOST:PORT"; port 0: the
 * kernel chooses), and gets the same ticket, a text that ends with a zero byte, for rampool_outside_open(). Blocks until all have called. RAMPOOL_STATUS_NO_ROOM if the ticket is longer than
 * `size` bytes: 256 for each rank, and the run's name, are enough.
 *
 * # Safety
 * `shared` is null or came from rampool_shared_join() and was not finished; `listen` is null or ends with a zero byte; `buffer` is null or `size` bytes can be written there.
 */
rampool_status rampool_shared_open_door(const rampool_shared *shared,
                                        const char *listen,
                                        char *buffer,
                                        size_t size);

/**
 * Comes to the doors of a run, by the ticket that rampool_shared_open_door() gave; from another machine with the run's key, in the file `key_file` (null: without). Blocks at most a minute. On
 * success, `*outside` is for rampool_outside_close(); otherwise it is null.
 *
 * # Safety
 * `ticket` and `key_file` are null or end with a zero byte; `outside` is null or can be written.
 */
rampool_status rampool_outside_open(const char *ticket,
                                    const char *key_file,
                                    rampool_outside **outside);

/**
 * Leaves the doors; views that were opened stay as they are until they are closed. Null does nothing.
 *
 * # Safety
 * `outside` is null or came from rampool_outside_open() and was not closed.
 */
void rampool_outside_close(rampool_outside *outside);

/**
 * Opens a region that the ranks have published. RAMPOOL_STATUS_INVALID if there is none of that name. On success, `*view` is for rampool_shared_direct_close(); otherwise it is null.
 *
 * # Safety
 * `outside` is null or came from rampool_outside_open() and was not closed; `name` is null or ends with a zero byte; `view` is null or can be written.
 */
rampool_status rampool_outside_open_region(const rampool_outside *outside,
                                           const char *name,
                                           rampool_shared_direct **view);

/**
 * Reads what `there` selects from `offset` of the region on into what `here` selects from `address` on. Both select as many bytes. Nothing comes here but those bytes.
 *
 * # Safety
 * `view` is null or was opened and not closed; `there` and `here` are null or layouts that were not freed; what `here` selects can be written, and nobody uses it meanwhile.
 */
rampool_status rampool_shared_direct_get_layout(const rampool_shared_direct *view,
                                                uint64_t offset,
                                                const rampool_layout *there,
                                                void *address,
                                                const rampool_layout *here);

/**
 * Writes what `here` selects from `address` on to what `there` selects from `offset` of the region on. Both select as many bytes, `there` none twice.
 *
 * # Safety
 * As rampool_shared_direct_get_layout(); what `here` selects can be read, and nobody writes it meanwhile.
 */
rampool_status rampool_shared_direct_put_layout(const rampool_shared_direct *view,
                                                uint64_t offset,
                                                const rampool_layout *there,
                                                const void *address,
                                                const rampool_layout *here);

/**
 * Reads `bytes` bytes of the region, from `offset` on.
 *
 * # Safety
 * `view` is null or was opened and not closed; `to` has room for `bytes` bytes, which nobody uses meanwhile.
 */
rampool_status rampool_shared_direct_get(const rampool_shared_direct *view,
                                         uint64_t offset,
                                         void *to,
                                         uint64_t bytes);

/**
 * Writes `bytes` bytes to the region, from `offset` on. When it returns they are there, as if the rank that carried it out had stored and released them.
 *
 * # Safety
 * `view` is null or was opened and not closed; `from` has `bytes` bytes, which nobody writes meanwhile.
 */
rampool_status rampool_shared_direct_put(const rampool_shared_direct *view,
                                         uint64_t offset,
                                         const void *from,
                                         uint64_t bytes);

/**
 * Changes each element of this kind that `there` selects from `offset` of the region on by an operand: `element = combine(element, operand)`. There are as many operands, one after the other at
 * `operands`. Each element is changed at once, among direct operations; not beside rampool_shared_atomic() or stores of ranks to the same word.
 *
 * # Safety
 * `view` is null or was opened and not closed; `there` is null or a layout that was not freed; `operands` has rampool_layout_size(there) bytes, which nobody writes meanwhile.
 */
rampool_status rampool_shared_direct_accumulate(const rampool_shared_direct *view,
                                                uint64_t offset,
                                                const rampool_layout *there,
                                                uint32_t kind,
                                                uint32_t combine,
                                                const void *operands);

/**
 * Changes one element of this kind by an operand, and gives what it was before in `*old` (null: nobody wants it). Ordered like a lock of that word, as rampool_shared_atomic() is.
 *
 * # Safety
 * `view` is null or was opened and not closed; `operand` is null or points to a number of this kind; one can be written to `old` if that is not null.
 */
rampool_status rampool_shared_direct_fetch_op(const rampool_shared_direct *view,
                                              uint64_t offset,
                                              uint32_t kind,
                                              uint32_t combine,
                                              const void *operand,
                                              void *old);

/**
 * Writes `*desired` to one element of this kind if it is `*expected`, bit by bit, and gives what it was before in `*old`. Ordered as rampool_shared_direct_fetch_op().
 *
 * # Safety
 * As rampool_shared_direct_fetch_op(); `expected` and `desired` are null or point to numbers of this kind.
 */
rampool_status rampool_shared_direct_compare_swap(const rampool_shared_direct *view,
                                                  uint64_t offset,
                                                  uint32_t kind,
                                                  const void *expected,
                                                  const void *desired,
                                                  void *old);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RAMPOOL_H */
