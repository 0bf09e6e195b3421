//! rampool for Python: the extension module `rampool._native`.
//!
//! ```text
//!   errors   a Rust error becomes the Python exception of the right kind
//!   process  calls in a forked child are refused; waits look for signals
//!   pool     connect: options in, the paged and the direct view of one lease out
//!   bytes    what came from servers, as a buffer
//!   region   paged memory as a buffer, which NumPy arrays lie in
//!   allocator  NumPy's own allocations in the pool
//!   direct   bytes at the servers: get, put, accumulate, reduce, select
//!   queue    messages
//!   store    from keys to bytes, for this process
//!   shared_store  the same for all members of a lease
//!   shared   memory that the processes of a parallel program have in common
//! ```
//!
//! What NumPy's habits mean in bytes is decided in Python, in `rampool/_table.py`. This crate moves bytes,
//! releases the interpreter while it waits, and looks for signals ten times a second. No thread of rampool's
//! ever takes the interpreter: a page fault may hold it.
//!
//! Read `pool` first, then `region` for paged memory and `direct` for bytes at the servers.
#![cfg(feature = "extension")]

mod allocator;
mod bytes;
mod direct;
mod errors;
mod pool;
mod process;
mod queue;
mod region;
mod shared;
mod shared_store;
mod store;

/// rampool's native part; use the package `rampool`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::allocator::Allocator;
    #[pymodule_export]
    use crate::bytes::Bytes;
    #[pymodule_export]
    use crate::direct::{Direct, Layout, Pending, Region as DirectRegion};
    #[pymodule_export]
    use crate::pool::Pool;
    #[pymodule_export]
    use crate::queue::{Message, Queue};
    #[pymodule_export]
    use crate::region::Region;
    #[pymodule_export]
    use crate::shared::{Shared, SharedRegion};
    #[pymodule_export]
    use crate::shared_store::SharedStore;
    #[pymodule_export]
    use crate::store::{Store, Value};
}
