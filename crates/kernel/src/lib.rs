//! The kernel, and nothing else.
//!
//! ```text
//!   uffd      userfaultfd: registration, copy, move, write-protect, events
//!   maps      what this process has mapped (/proc/self/maps) and which pages of it are present (PAGEMAP_SCAN)
//!   memory    mappings of our own: anonymous, locked, hidden from fork; resident-size counters
//!   descriptors  a table of descriptors of one thread's own
//!   thread    threads on stacks of our own, CPU affinity
//!   awake     a CPU that is kept from resting
//!   segv      the same without userfaultfd: a SIGSEGV handler and mprotect
//!   sigbus    userfaultfd without a second thread: faults served in a SIGBUS handler
//!   pagetable one byte per page of the address space, readable in signal handlers
//!   doorbell  one that threads with other descriptors, and signal handlers, can ring
//!   chain     a signal handler of ours before the program's own
//!   guard     ranges that system calls are using, which must stay
//!   touch     the same ranges made resident
//!   ring      io_uring: registered buffers, sends without a copy
//!   sealed    memory that two processes share, which neither can take away
//!   exposed   the same, taken back from the other one when it is lost
//!   selfmem   memory of this process read and filled through /proc/self/mem
//!   output    writing to descriptors that other processes have, too
//!   words     lines on standard error, each by one call
//!   birthplace  whether this is the process that made something, or a child that it forked
//!   probe     what this machine allows, and the fix for what it does not
//! ```
//!
//! Kernel replies become enums here, at the edge; no other crate reads an errno. Nothing here allocates on a
//! fault path or takes a decision. Addresses are plain `usize`: the memory behind them belongs to the
//! program, so no reference to it is ever made.
//!
//! Read `uffd` first, then `maps` and `memory`; the others are read where something calls them.

pub mod awake;
pub mod birthplace;
pub mod chain;
pub mod descriptors;
pub mod doorbell;
pub mod exposed;
pub mod guard;
pub mod maps;
pub mod memory;
pub mod output;
pub mod pagetable;
pub mod probe;
pub mod procfs;
pub mod ring;
pub mod sealed;
pub mod segv;
pub mod selfmem;
pub mod sigbus;
pub mod thread;
pub mod thread_end;
pub mod touch;
pub mod uffd;
pub mod words;

/// Bytes in an operating-system page. rampool supports x86-64 and Arm kernels with 4 KiB pages; [`probe`]
/// refuses others.
pub const OS_PAGE_BYTES: usize = 4096;

/// The last error of this thread.
#[must_use]
pub fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
