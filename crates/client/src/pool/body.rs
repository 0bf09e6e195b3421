//! What the shell keeps of a request: the bytes of its frame, and the caller's memory.

use std::cell::OnceCell;
use std::rc::Rc;

use rampool_net::transport::PieceMut;
use rampool_session::{Stamp, What};
use rampool_wire::frame::{Block, Opcode, PageEntry, RegionId, Status, Window};
use rampool_wire::units::{Extent, PageIndex};

use super::PoolRegion;
use crate::error::{LostReason, Operation, PoolError};

/// The body of the request with the same number; its lists keep their capacity from request to request.
#[derive(Default)]
pub(super) struct Body {
    pub arg: u64,
    /// For Get, Put and Discard. `memory[i]` is where the pages of `extents[i]` lie, or will;
    /// unused by Discard.
    pub extents: Vec<Extent>,
    pub memory: Vec<*mut u8>,
    /// For Get and Put: which region it is of, and the stamp of the store, if places are kept.
    pub of: Option<(PoolRegion, Stamp)>,
    /// The checksums of the pages of a Put.
    pub crcs: Vec<u32>,
    /// The checksums of pages that two servers store, once they are made; both requests have them.
    pub entries: Option<Rc<OnceCell<Vec<PageEntry>>>>,
    /// The table of a control request, a `FetchOp` or a `Scan`.
    pub table: Vec<u8>,
    /// For Gather, Scatter and Accumulate.
    pub window: Option<Window>,
    /// The blocks of a Gather or Scatter that have a checksum each.
    pub blocks: Vec<Block>,
    /// Where the bytes of a window lie, or will, one after the other.
    pub places: Vec<PieceMut>,
    /// The bytes themselves, where the places are too many to be sent from or received into;
    /// or a scan's answer.
    pub staging: Vec<u8>,
    /// Bytes of a window, or the most that a scan answers with.
    pub bytes: u32,
}

impl Body {
    /// Nothing of the request that was here before.
    pub fn clear(&mut self) {
        self.arg = 0;
        self.extents.clear();
        self.memory.clear();
        self.of = None;
        self.crcs.clear();
        self.entries = None;
        self.table.clear();
        self.window = None;
        self.blocks.clear();
        self.places.clear();
        self.staging.clear();
        self.bytes = 0;
    }

    /// Whether the bytes of a window go through the staging: the places are too many, and too
    /// small, for the kernel.
    pub fn is_staged(&self) -> bool {
        self.places.len() > 1 && self.places.len() * 1024 > self.bytes as usize
    }

    /// For Get, Put and Discard: the pages, in order.
    pub fn indices(&self) -> impl Iterator<Item = PageIndex> {
        self.extents.iter().flat_map(Extent::pages)
    }

    pub fn pages(&self) -> u32 {
        self.extents.iter().map(|extent| extent.count).sum()
    }
}

/// The answer to a request whose reply is waited for.
pub(super) struct Reply {
    pub request: u64,
    pub status: Status,
    pub region: RegionId,
    pub arg: u64,
    pub table: Vec<u8>,
    pub bulk: Vec<u8>,
}

/// A request, for error texts.
pub(super) fn operation(what: What) -> Operation {
    match what.opcode {
        Opcode::Get => Operation::Fetch(PageIndex(what.at)),
        Opcode::Put => Operation::Store(PageIndex(what.at)),
        Opcode::Discard => Operation::Discard(PageIndex(what.at)),
        Opcode::Gather | Opcode::ReadPiece => Operation::Gather(what.at),
        Opcode::Scatter => Operation::Scatter(what.at),
        Opcode::Accumulate => Operation::Accumulate(what.at),
        Opcode::FetchOp => Operation::FetchOp(what.at),
        Opcode::Scan => Operation::Scan(what.at),
        Opcode::Copy => Operation::Copy(what.at),
        other => super::operation_of(other),
    }
}

/// The error that every later use of a lost server gets.
pub(super) fn lost(server: &str, operation: Operation, reason: &LostReason) -> PoolError {
    PoolError::Lost { server: server.to_owned(), operation, reason: reason.clone() }
}
