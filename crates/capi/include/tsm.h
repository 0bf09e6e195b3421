/*
 * tsm.h: the programming interface of the software distributed shared memory of N. D. Barli, M. Watanabe, S.
 * Sakai and H. Tanaka (software DSM over fast networks, University of Tokyo), provided by rampool.
 *
 *     cc program.c $(pkg-config --cflags --libs rampool) -o program
 *     rampool launch -n 4 ./program ARGUMENTS
 *
 * The paper names these functions; their parameters are this library's interpretation. Every node runs main()
 * as one process. All nodes call tsm_alloc, and get the same address. All see after tsm_create_procs what
 * node 0 has prepared before it:
 *
 *     tsm_startup(argc, argv);
 *     double *a = tsm_alloc(n * sizeof *a);
 *     if (TSM_PID == 0)
 *         ... fill a ...
 *     tsm_create_procs();
 *     ... compute, with tsm_barrier, tsm_lock, tsm_unlock ...
 *     tsm_finish();
 *
 * The protocol (sc, lrc, hlrc, aurc) is chosen when the program is started: rampool launch --protocol.
 * Accesses of one byte by two nodes, at least one of them a write, must be ordered by locks or barriers,
 * except under sc. A mistake in the use of these functions ends the run on all nodes, with a message.
 */
#ifndef TSM_H
#define TSM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Joins the run; blocks until all nodes have joined. Returns 0, or prints one line with the reason on
 * standard error and returns -1. The argument vector is not changed.
 */
int tsm_startup(int argc, char **argv);

/* `bytes` of shared memory, zeroed; NULL, with a line on standard error, if there is no room. All nodes call
 * it. */
void *tsm_alloc(size_t bytes);

/* From here on the nodes compute together. All nodes call it. */
void tsm_create_procs(void);

/* Waits for all nodes, and makes all writes visible to all of them. All name the same barrier. */
void tsm_barrier(int barrier);

/* Takes the lock of this number, and releases it. Any number is valid; locks need not be created. */
void tsm_lock(int lock);
void tsm_unlock(int lock);

/* Leaves the run; blocks until all nodes do. Shared memory is gone afterwards. */
void tsm_finish(void);

/* The number of this node, from 0 on, and the number of nodes. */
#define TSM_PID (tsm_pid())
#define TSM_NUMNODES (tsm_numnodes())
int tsm_pid(void);
int tsm_numnodes(void);

#ifdef __cplusplus
}
#endif

#endif
