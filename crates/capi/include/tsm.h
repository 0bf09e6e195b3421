/*
 * tsm.h: the programming interface of the software distributed shared memory of N. Barli, S. Watanabe, S. Sakai and
 * H. Tanaka (software DSM over fast networks, University of Tokyo), provided by rampool.
 *
 *     cc program.c $(pkg-config --cflags --libs rampool) -o program
 *     rampool launch -n 4 ./program ARGUMENTS
 *
 * The paper names these functions; what they take is this library's reading. Every node runs main() as one process.
 * tsm_alloc is called by all, and gives all the same address. What node 0 prepares before tsm_create_procs, all see
 * after it:
 *
 *     tsm_startup(argc, argv);
 *     double *a = tsm_alloc(n * sizeof *a);
 *     if (TSM_PID == 0)
 *         ... fill a ...
 *     tsm_create_procs();
 *     ... compute, with tsm_barrier, tsm_lock, tsm_unlock ...
 *     tsm_finish();
 *
 * The protocol (sc, lrc, hlrc, aurc) is chosen when the program is started: rampool launch --protocol. Accesses of one
 * byte by two nodes, at least one of them a write, must be ordered by locks or barriers, except under sc. A mistake in
 * the use of these functions ends the run on all nodes, with a message.
 */
#ifndef TSM_H
#define TSM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Joins the run; blocks until all nodes have come. Returns 0, or prints one line on standard error that says why not,
 * and returns -1. The argument vector is left as it is.
 */
int tsm_startup(int argc, char **argv);

/* `bytes` of shared memory, zeroed; NULL, with a line on standard error, where there is no room. All nodes call it. */
void *tsm_alloc(size_t bytes);

/* From here on the nodes compute together. All nodes call it. */
void tsm_create_procs(void);

/* Waits for all nodes, and makes visible what any of them wrote. All name the same barrier. */
void tsm_barrier(int barrier);

/* Takes the lock of this number, and gives it back. Any number; none has to be made. */
void tsm_lock(int lock);
void tsm_unlock(int lock);

/* Leaves the run; blocks until all nodes do. Shared memory is gone afterwards. */
void tsm_finish(void);

/* This node, from 0 on, and how many there are. */
#define TSM_PID (tsm_pid())
#define TSM_NUMNODES (tsm_numnodes())
int tsm_pid(void);
int tsm_numnodes(void);

#ifdef __cplusplus
}
#endif

#endif
