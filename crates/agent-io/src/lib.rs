//! System calls on absent pages, where the kernel cannot wait for them: loaded by `rampool run` on the rungs below the full one, beside the agent; and by whoever
//! wants them in a program that pages memory of its own (`PagedMemory`) there.
//!
//! ```text
//!   agent    the agent's functions, found when this library is loaded
//!   real     the functions that are replaced here
//!   calls    reading, writing, paths: buffers are made resident and kept so during the call; EFAULT leads to another try
//!   streams  stdio: its buffers lie in memory that never leaves
//!   memory   malloc, whose fresh memory is touched; munmap, mremap, madvise and the like, told to the agent before they happen
//!   signals  SIGSEGV stays the agent's; what the program sets for it gets the faults that are its own
//! ```
//!
//! Only calls through the dynamic linker are seen. What the C library does inside itself, and system calls made by hand, are covered as far as `streams`
//! and `memory` reach; the documentation of the ladder says what is left.

mod agent;
mod calls;
mod memory;
mod real;
mod signals;
mod streams;

#[used]
// SAFETY: the C library calls what stands here once, on the main thread, before `main`; `start` has its signature.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Tells the agent that this library is here.
#[unsafe(no_mangle)]
pub extern "C" fn rampool_agent_io() {}

extern "C" fn start() {
    memory::first_use();
    agent::find();
    real::find_all();
    streams::settle_standard_streams();
}
