//! What a memory server does with one request, without the memory.
//!
//! ```text
//!   lease   Directory: who has leased how much; members come, go silent, come back or are given up after a grace time
//!   space   LeaseSpace: one lease's regions and what each of their pages is: a frame, a checksum, a length
//!   table   the page tables below a region, in chunks that copy-on-write clones share
//!   complaints  Complaints: what the log says of strangers, and how often
//!   queue   Queues: one lease's remote FIFOs; who waits, what is held, what is delivered again
//! ```
//! A [`FrameIndex`] stands for memory that the runtime's store holds; this module decides which page is in which frame and when a frame is
//! nobody's any more, and never sees a byte of it. One `Directory` serves the whole server and is asked for control operations only; every
//! lease has a `LeaseSpace` of its own, so that clients of different leases never wait for each other.

mod complaints;
mod lease;
mod queue;
mod space;
mod table;

pub use complaints::{Complaints, Repeated};
pub use lease::{
    AttachError, ConnectionNumber, Departed, Directory, LeaseSummary, Limits, MemberSummary, OpenError, ResizeError, resize_lease,
};
pub use queue::{Asker, Output as QueueOutput, QueueCounts, QueueError, QueueId, QueueLimits, Queues};
pub use space::{Door, LeaseSpace, PageState, QueueSpaceError, REMEMBERED, SpaceError, SpaceUsage, View};
pub use table::StoredPage;

/// Names a frame of the store. What the number means is the store's business.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrameIndex(pub u64);

/// Milliseconds on the server's clock, from a start of its choosing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Tick(pub u64);
