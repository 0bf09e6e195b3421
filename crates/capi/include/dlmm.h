/*
 * dlmm.h: the programming interface of DLM-M, a distributed large memory for many clients
 * (K. Saito, H. Midorikawa, M. Kai), provided by rampool.
 *
 * A program starts with dlmm_startup, takes memory with dlmm_alloc, uses it like any other memory, gives it
 * back with dlmm_free and ends with dlmm_shutdown. What does not fit the local memory named in dlmm.conf
 * lives on the memory servers named there, which run `dlmm_server` (or `rampool serve`).
 *
 *     cc program.c $(pkg-config --cflags --libs rampool) -o program
 *     ./program ARGUMENTS -- -n 3 -f dlmm.conf
 *
 * dlmm.conf names one node a line, `host megabytes`, with comments behind two slashes. The first line is this
 * machine and the local memory it may use; every other line is a memory server and the memory wanted from it:
 *
 *     calhost    2048 // 2GB compute node
 *     memhost1   2048 // 2GB memory server 1
 *     memhost2   4096 // 4GB memory server 2
 *
 * -n counts the nodes to use (compute node + servers; all lines unless given), -f names the file (./dlmm.conf
 * unless given). A host may carry a port: memhost1:7000.
 *
 * Every function may be called from any thread. There is one pool a process; a child made by fork() has no
 * access to it and must not touch memory of dlmm_alloc.
 */
#ifndef DLMM_H
#define DLMM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Reads the options after `--` in argv, reads dlmm.conf, connects to the servers and reserves the memory
 * wanted from each. Returns 0. If the options, the file or a server are not usable, prints one line with the
 * reason on standard error, and returns -1. The argument vector is not changed.
 */
int dlmm_startup(int argc, char **argv);

/*
 * Allocates `bytes` of memory, zeroed, aligned to the page. Returns NULL (and prints a line on standard
 * error) if it is more than the nodes lend together, or before dlmm_startup.
 */
void *dlmm_alloc(size_t bytes);

/* Frees memory of dlmm_alloc, here and on the servers, for later dlmm_alloc calls. NULL does nothing. */
void dlmm_free(void *memory);

/* Frees what is still allocated and disconnects from the servers. Returns 0, or -1 before dlmm_startup. */
int dlmm_shutdown(void);

#ifdef __cplusplus
}
#endif

#endif
