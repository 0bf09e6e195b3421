//! System calls on absent pages, where the kernel cannot wait for them. `rampool run` loads this library with
//! the agent on the fault modes below the full one. A program that pages memory of its own (`PagedMemory`)
//! can load it for the same purpose.
//!
//! ```text
//!   agent    the agent's functions, found when this library is loaded
//!   real     the functions that are replaced here
//!    calls    reading, writing, paths: buffers are kept resident during the call; EFAULT leads to another try
//!    streams  stdio: its buffers lie in memory that is never paged out
//!   memory   malloc, whose fresh memory is touched; munmap, mremap, madvise and the like, told to the agent before they happen
//!    signals  SIGSEGV stays the agent's; the program's own handler gets the faults that are its own
//! ```
//!
//! Only calls through the dynamic linker are seen. Calls inside the C library, and raw system calls, are
//! covered as far as `streams` and `memory` reach; the documentation of the fault modes says what is left.
//!
//! Read `real`, then `calls`: each function does what its buffers need, and calls the one it stands before.

mod agent;
mod calls;
mod memory;
mod real;
mod signals;
mod streams;

#[used]
// SAFETY: the C library calls what stands here once, on the main thread, before `main`; `start` has its
// signature.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Tells the agent that this library is here.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_io() {}

extern "C" fn start() {
    memory::first_use();
    agent::find();
    real::find_all();
    streams::make_standard_streams_ours();
}
