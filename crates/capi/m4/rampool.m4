/* m4_define(`divert', m4_defn(`m4_divert'))m4_define(`define', m4_defn(`m4_define'))m4_define(`defn', m4_defn(`m4_defn'))m4_define(`ifelse', m4_defn(`m4_ifelse'))m4_define(`undefine', m4_defn(`m4_undefine'))m4_define(`dnl', m4_defn(`m4_dnl')) PARMACS macros: rampool.m4 */
divert(-1)
# rampool.m4: the PARMACS macros of the SPLASH programs on rampool's shared memory.
#
#     m4 $(pkg-config --variable=parmacs rampool) program.C > program.c
#     cc program.c $(pkg-config --cflags --libs rampool) -lm -o program
#     rampool launch -n 4 ./program ARGUMENTS
#
# Also with m4 -P, for programs whose other macros have the prefix m4_. A C compiler with the extensions of GCC is needed.
# docs/reference/parallel-c.md says what processes share and what not. The first line above gives the names without prefix to this file.

define(`rampool_if_', defn(`ifelse'))

define(`MAIN_ENV', `
#include <rampool_parmacs.h>
static void __attribute__((constructor)) rampool_parmacs_main_env_(int argc, char **argv)
{
    rampool_parmacs_begin(argc, argv, __data_start, _end);
}
')
define(`EXTERN_ENV', `
#include <rampool_parmacs.h>
')
define(`ENV', `')
define(`MAIN_INITENV', `')
define(`MAIN_END', `exit(0);')

# Files with neither MAIN_ENV nor EXTERN_ENV may use the macros up to the condition variables, so these need
# no type or declaration of the header.
# rampool_call_(function, type, parameters, arguments)
define(`rampool_call_', `{ extern $2 rampool_parmacs_$1($3); rampool_parmacs_$1($4); }')

define(`CREATE', `{
    extern void rampool_parmacs_create(void (*)(void), long, int);
    rampool_if_(`$2', `', `rampool_parmacs_create((void (*)(void)) ($1), 1, 0);', `rampool_parmacs_create((void (*)(void)) ($1), (long) ($2) - 1, 1);
    ($1)();')
}')
define(`WAIT_FOR_END', `rampool_call_(`wait_for_end', `void', `long', rampool_if_(`$1', `', `1', `(long) ($1)'))')

# With a semicolon, as in all macro sets for SPLASH: its programs sometimes leave it out.
define(`G_MALLOC', `({ extern void *rampool_parmacs_g_malloc(__SIZE_TYPE__, long); rampool_parmacs_g_malloc((__SIZE_TYPE__) ($1), rampool_if_(`$2', `', `-1', `(long) ($2)')); });')
define(`NU_MALLOC', defn(`G_MALLOC'))
define(`G_MALLOC_F', `rampool_parmacs_g_malloc((__SIZE_TYPE__) ($1), -1)')
define(`NU_MALLOC_F', defn(`G_MALLOC_F'))
define(`G_FREE', `rampool_call_(`g_free', `void', `void *', `(void *) ($1)')')
define(`NU_FREE', defn(`G_FREE'))

define(`LOCKDEC', `struct { unsigned long unused; } $1;')
define(`LOCKINIT', `((void) ($1));')
define(`LOCK', `rampool_call_(`lock', `void', `const void *', `(const void *) &($1)')')
define(`UNLOCK', `rampool_call_(`unlock', `void', `const void *', `(const void *) &($1)')')
define(`ALOCKDEC', `struct { unsigned long unused; } ($1)[$2];')
define(`ALOCKINIT', `((void) ($1));')
define(`ALOCK', `LOCK(($1)[$2])')
define(`AULOCK', `UNLOCK(($1)[$2])')
define(`AUNLOCK', `UNLOCK(($1)[$2])')
define(`AGETL', `(($1)[$2])')

define(`BARDEC', `struct { unsigned long words[4]; } $1;')
define(`BARINIT', `rampool_call_(`barrier_init', `void', `void *, long', `(void *) &($1), rampool_if_(`$2', `', `0', `(long) ($2)')')')
define(`BARRIER', `rampool_call_(`barrier', `void', `void *, long', `(void *) &($1), rampool_if_(`$2', `', `0', `(long) ($2)')')')

define(`CONDVARDEC', `struct { unsigned long words[2]; } $1;')
define(`CONDVARINIT', `rampool_call_(`condition_init', `void', `void *', `(void *) &($1)')')
define(`CONDVARWAIT', `rampool_call_(`condition_wait', `void', `void *, const void *', `(void *) &($1), (const void *) &($2)')')
define(`CONDVARSIGNAL', `rampool_call_(`condition_signal', `void', `const void *, int', `(const void *) &($1), 0')')
define(`CONDVARBCAST', `rampool_call_(`condition_signal', `void', `const void *, int', `(const void *) &($1), 1')')

define(`SEMDEC', `rampool_parmacs_semaphore_t $1;')
define(`SEMINIT', `(($1).count = (uint64_t) rampool_if_(`$2', `', `0', `($2)'));')
define(`SEMWAIT', `rampool_parmacs_semaphore_wait(&($1).count);')
define(`SEMPOST', `rampool_parmacs_semaphore_post(&($1).count);')

define(`PAUSEDEC', `rampool_parmacs_pause_t rampool_if_(`$2', `', `$1', `($1)[$2]');')
define(`PAUSEINIT', `rampool_if_(`$2', `', `(($1).set = 0);', `memset((void *) ($1), 0, sizeof (rampool_parmacs_pause_t) * (size_t) ($2));')')
define(`SETPAUSE', `rampool_parmacs_pause_set(&rampool_if_(`$2', `', `($1)', `(($1)[$2])').set, 1);')
define(`CLEARPAUSE', `rampool_parmacs_pause_set(&rampool_if_(`$2', `', `($1)', `(($1)[$2])').set, 0);')
define(`WAITPAUSE', `rampool_parmacs_pause_wait(&rampool_if_(`$2', `', `($1)', `(($1)[$2])').set);')
define(`PAUSE', `rampool_parmacs_pause_wait(&rampool_if_(`$2', `', `($1)', `(($1)[$2])').set);')

define(`GSDEC', `rampool_parmacs_subscript_t $1;')
define(`GSINIT', `memset((void *) &($1), 0, sizeof (rampool_parmacs_subscript_t));')
define(`GETSUB', `(($2) = rampool_parmacs_getsub(&($1), (long) ($3), (long) ($4)));')
define(`NU_GSDEC', defn(`GSDEC'))
define(`NU_GSINIT', defn(`GSINIT'))
define(`NU_GETSUB', defn(`GETSUB'))

define(`CLOCK', `(($1) = (__typeof__(($1) + 0)) rampool_parmacs_clock());')

# With a semicolon, as in the macro sets of SPLASH-4, whose programs leave it out: statements and right-hand sides.
define(`FETCH_ADD', `({ __typeof__(($1) + 0) rampool_v_ = (__typeof__(($1) + 0)) rampool_parmacs_fetch_add((void *) &($1), sizeof ($1), (uint64_t) ($2)); rampool_v_; });')
define(`FETCH_SUB', `({ __typeof__(($1) + 0) rampool_v_ = (__typeof__(($1) + 0)) rampool_parmacs_fetch_add((void *) &($1), sizeof ($1), (uint64_t) 0 - (uint64_t) ($2)); rampool_v_; });')
define(`LOAD', `({ uint64_t rampool_b_ = rampool_parmacs_load((void *) &($1), sizeof ($1)); __typeof__(($1) + 0) rampool_v_; RAMPOOL_PARMACS_SAME_SIZE(rampool_v_, $1); memcpy((void *) &rampool_v_, &rampool_b_, sizeof rampool_v_); rampool_v_; })')
define(`STORE', `({ __typeof__(($1) + 0) rampool_v_ = ($2); uint64_t rampool_b_; RAMPOOL_PARMACS_BITS(&rampool_b_, rampool_v_); rampool_parmacs_store((void *) &($1), sizeof ($1), rampool_b_); })')
define(`CAS', `({ __typeof__(($1) + 0) rampool_e_ = ($2), rampool_n_ = ($3); uint64_t rampool_eb_, rampool_nb_, rampool_b_; RAMPOOL_PARMACS_SAME_SIZE(rampool_e_, $1); RAMPOOL_PARMACS_BITS(&rampool_eb_, rampool_e_); RAMPOOL_PARMACS_BITS(&rampool_nb_, rampool_n_); rampool_b_ = rampool_parmacs_compare_exchange((void *) &($1), sizeof ($1), rampool_eb_, rampool_nb_); if (rampool_b_ != rampool_eb_) { memcpy((void *) &rampool_e_, &rampool_b_, sizeof rampool_e_); ($2) = rampool_e_; } rampool_b_ == rampool_eb_; })')
define(`FETCH_ADD_DOUBLE', `({ void *rampool_w_ = (void *) ($1); rampool_parmacs_add_double(rampool_w_, (double) ($2)); rampool_parmacs_added(rampool_w_); })')
define(`FENCE', `rampool_parmacs_fence();')
define(`FULL_FENCE', `rampool_parmacs_fence();')
define(`RELEASE_FENCE', `rampool_parmacs_fence();')
define(`ACQUIRE_FENCE', `rampool_parmacs_fence();')

# For simulators and other machines: SPLASH-2 gives them the names of barriers, SPLASH-3 and SPLASH-4 the part
# to measure.
define(`BARINCLUDE')define(`BAREXCLUDE')define(`SPLASH3_ROI_BEGIN')define(`SPLASH3_ROI_END')define(`SPLASH4_ROI_BEGIN')define(`SPLASH4_ROI_END')define(`NEWPROC')define(`AUG_ON')
define(`AUG_OFF')define(`AUG_DELAY')define(`AUG_SET_LOLIMIT')define(`AUG_SET_HILIMIT')define(`TRACE_ON')define(`TRACE_OFF')
define(`REF_TRACE_ON')define(`REF_TRACE_OFF')define(`DYN_TRACE_ON')define(`DYN_TRACE_OFF')define(`DYN_REF_TRACE_ON')define(`DYN_REF_TRACE_OFF')
define(`DYN_SIM_ON')define(`DYN_SIM_OFF')define(`DYN_SCHED_ON')define(`DYN_SCHED_OFF')define(`ST_LOG')

# Names that C programs use for themselves.
undefine(`len')undefine(`index')undefine(`substr')undefine(`format')undefine(`incr')undefine(`decr')undefine(`shift')undefine(`eval')undefine(`unix')
ifelse(m4___gnu__, `m4___gnu__', `divert(0)', `m4_undefine(`divert', `define', `defn', `ifelse', `undefine', `dnl')m4_divert(0)m4_dnl')dnl
