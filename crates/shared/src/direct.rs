//! The direct view of shared memory: a rank, or a process outside the run, reads and changes bytes of a
//! region in place.
//!
//! ```text
//!   SharedDirect --- pages, runs of bytes ---> Shared::carry_out --> a rank's engine --> the pages' homes
//!                \-> Outside (another process) -> a listener -------^
//! ```
//! The engine defines what that means for the ranks' own loads and stores ([`rampool_sharing::direct`];
//! `docs/reference/shared.md`). This module cuts a [`Layout`] into pages, and long operations into several.

use std::sync::Arc;

use rampool_sharing::{Access, Diff, DirectOp, LockId, OpResult, PageAccess, Spans};
use rampool_wire::elements::{Combine, Kind};
use rampool_wire::layout::{Layout, LayoutError, Program};
use rampool_wire::units::PageIndex;

use super::host::{Host, Waiting};
use super::outside::{Outside, OutsideError};
use super::{Region, Shared, SharedError};
use rampool_client::direct::{Number, aligned, apart, whole_numbers, with_length};

/// The most bytes, and the most runs of them, of one operation of the engine.
const MOST_BYTES: u64 = 1 << 20;
const MOST_RUNS: usize = 1 << 16;

/// Why a direct operation on shared memory failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedDirectError {
    #[error("{0}")]
    Layout(#[from] LayoutError),
    #[error("the layout there selects {there} bytes, the one here {here}")]
    Lengths { there: u64, here: u64 },
    #[error("{how:?} does not apply to elements of kind {kind:?}")]
    NotForKind { kind: Kind, how: Combine },
    #[error("the layout selects {bytes} bytes, more than this process can allocate")]
    NoMemory { bytes: u64 },
    #[error(transparent)]
    Shared(#[from] SharedError),
    #[error(transparent)]
    Outside(#[from] OutsideError),
}

/// A shared region, open for direct operations. [`Shared::direct`] opens one for a rank, [`Outside::open`]
/// for another process. Any thread may use it; each call blocks until its operation has ended.
///
/// A get returns released data, or newer. A put acts as if the rank that carried it out had stored and
/// released the bytes: a thread that synchronises with that rank afterwards sees them.
/// `docs/reference/shared.md` has the details for each protocol.
///
/// An operation is atomic within one page; a longer one may be seen half done.
#[derive(Clone, Debug)]
pub struct SharedDirect {
    route: Route,
    place: PagesOfRegion,
}

#[derive(Clone, Debug)]
enum Route {
    Rank(Shared),
    Outside(Arc<Outside>),
}

/// The place of a region among the pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PagesOfRegion {
    pub first: PageIndex,
    pub page_bytes: u32,
    pub bytes: u64,
}

impl Shared {
    /// Opens a region for direct operations by this rank.
    ///
    /// # Errors
    /// If the region is not, or no longer, allocated.
    pub fn direct(&self, region: Region) -> Result<SharedDirect, SharedError> {
        Ok(SharedDirect { route: Route::Rank(self.clone()), place: self.pages_of(region)? })
    }

    pub(super) fn pages_of(&self, region: Region) -> Result<PagesOfRegion, SharedError> {
        let nowhere = SharedError::NotShared { rank: self.rank(), address: region.address() };
        let host = self.inner.enter()?;
        let Some((first, 0)) = host.memory.locate(region.address()) else { return Err(nowhere) };
        let page_bytes = u32::try_from(host.memory.place(first).1).expect("a page is small");
        Ok(PagesOfRegion { first, page_bytes, bytes: region.bytes() as u64 })
    }

    /// Carries out a direct operation as this rank, which holds the lock `under`. `None`: the rank is at a
    /// barrier, and `waits` is false.
    pub(super) fn carry_out(
        &self,
        what: Waiting,
        op: DirectOp,
        under: Option<LockId>,
        waits: bool,
    ) -> Result<Option<Arc<[u8]>>, SharedError> {
        let begin = |host: &mut Host, thread| host.begin_direct(thread, op, under, waits);
        let result = self.operation(self.run(what, begin)?)?;
        match result {
            OpResult::Bytes(bytes) => Ok(Some(bytes)),
            OpResult::Busy if !waits => Ok(None),
            other => Err(SharedError::Refused {
                rank: self.rank(),
                why: format!("an answer of another kind: {other:?}"),
            }),
        }
    }
}

impl SharedDirect {
    pub(super) fn outside(outside: Arc<Outside>, place: PagesOfRegion) -> Self {
        Self { route: Route::Outside(outside), place }
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.place.bytes
    }

    /// Reads `buffer.len()` bytes from `offset` on.
    ///
    /// # Errors
    /// [`SharedDirectError`], like all others.
    pub fn get(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SharedDirectError> {
        let there = Layout::bytes(buffer.len() as u64)?.placed(offset, self.place.bytes)?;
        self.gather(&there, buffer)
    }

    /// Writes `bytes` from `offset` on.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn put(&self, offset: u64, bytes: &[u8]) -> Result<(), SharedDirectError> {
        let there = Layout::bytes(bytes.len() as u64)?.placed(offset, self.place.bytes)?;
        self.scatter(&there, bytes)
    }

    /// Reads the selection of `there`, at `offset` of the region, into the selection of `here` in `buffer`.
    ///
    /// # Errors
    /// [`SharedDirectError`]; [`LayoutError::Overlap`] if `here` selects a byte twice.
    pub fn get_layout(
        &self,
        offset: u64,
        there: &Layout,
        buffer: &mut [u8],
        here: &Layout,
    ) -> Result<(), SharedDirectError> {
        let (there, here) = self.both(offset, there, buffer.len() as u64, here)?;
        apart(&here)?;
        let bytes = self.gathered(&there)?;
        let mut rest = &bytes[..];
        for run in here.runs() {
            let (mine, behind) = rest.split_at(index(run.len));
            buffer[index(run.offset.cast_unsigned())..][..mine.len()].copy_from_slice(mine);
            rest = behind;
        }
        Ok(())
    }

    /// Writes the selection of `here` in `bytes` to the selection of `there`, at `offset` of the region.
    ///
    /// # Errors
    /// [`SharedDirectError`]; [`LayoutError::Overlap`] if `there` selects a byte twice.
    pub fn put_layout(
        &self,
        offset: u64,
        there: &Layout,
        bytes: &[u8],
        here: &Layout,
    ) -> Result<(), SharedDirectError> {
        let (there, here) = self.both(offset, there, bytes.len() as u64, here)?;
        apart(&there)?;
        let mut stream = Vec::with_capacity(length(&there));
        for run in here.runs() {
            stream.extend_from_slice(&bytes[index(run.offset.cast_unsigned())..][..index(run.len)]);
        }
        self.scatter(&there, &stream)
    }

    /// Reads the numbers that `there` selects.
    ///
    /// # Errors
    /// [`SharedDirectError`]; [`LayoutError::Unaligned`] if it selects a part of a number.
    pub fn get_values<T: Number>(&self, offset: u64, there: &Layout) -> Result<Vec<T>, SharedDirectError> {
        whole_numbers::<T>(there)?;
        self.get_packed(offset, there).map(|bytes| rampool_client::direct::numbers(&bytes))
    }

    /// Reads the selection of `there`: its bytes, one after the other.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn get_packed(&self, offset: u64, there: &Layout) -> Result<Vec<u8>, SharedDirectError> {
        self.gathered(&there.placed(offset, self.place.bytes)?)
    }

    /// Writes bytes, one after the other, to the selection of `there`.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn put_packed(&self, offset: u64, there: &Layout, bytes: Vec<u8>) -> Result<(), SharedDirectError> {
        let there = there.placed(offset, self.place.bytes)?;
        apart(&there)?;
        self.scatter(&there, &self.of_length(&there, bytes)?)
    }

    /// Writes numbers to what `there` selects.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn put_values<T: Number>(
        &self,
        offset: u64,
        there: &Layout,
        values: &[T],
    ) -> Result<(), SharedDirectError> {
        self.put_packed(offset, there, rampool_client::direct::to_bytes(values))
    }

    /// Updates the numbers that `there` selects, each with its operand; each update is atomic among direct
    /// operations. A number that is selected twice is updated twice.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn accumulate<T: Number>(
        &self,
        offset: u64,
        there: &Layout,
        how: Combine,
        operands: &[T],
    ) -> Result<(), SharedDirectError> {
        self.accumulate_bytes(offset, there, T::KIND, how, rampool_client::direct::to_bytes(operands))
    }

    /// Like [`SharedDirect::accumulate`], with the operands as bytes.
    ///
    /// # Errors
    /// As [`SharedDirect::accumulate`].
    pub fn accumulate_bytes(
        &self,
        offset: u64,
        there: &Layout,
        kind: Kind,
        how: Combine,
        operands: Vec<u8>,
    ) -> Result<(), SharedDirectError> {
        fits(kind, how)?;
        let there = there.placed(offset, self.place.bytes)?;
        aligned(&there, kind)?;
        let operands = self.of_length(&there, operands)?;
        self.each(&there, |pieces| {
            let access = |run: &[Piece]| {
                let operands: Vec<u8> = run
                    .iter()
                    .flat_map(|piece| &operands[piece.at..][..piece.len as usize])
                    .copied()
                    .collect();
                Access::Update { spans: spans(run), kind, how, operands: operands.into() }
            };
            self.carry_out(accesses(&pieces, access)).map(drop)
        })
    }

    /// Updates one number and returns its value before; ordered like a lock of that word, as
    /// [`Shared::atomic`] is.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn fetch_op<T: Number>(&self, offset: u64, how: Combine, operand: T) -> Result<T, SharedDirectError> {
        self.fetch_bits(offset, T::KIND, how, operand.bits()).map(T::from_bits)
    }

    /// Adds to one number and returns its value before.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn fetch_add<T: Number>(&self, offset: u64, operand: T) -> Result<T, SharedDirectError> {
        self.fetch_op(offset, Combine::Sum, operand)
    }

    /// Writes `new` if the number is `expected`, bit by bit; returns its value before.
    ///
    /// # Errors
    /// [`SharedDirectError`].
    pub fn compare_exchange<T: Number>(
        &self,
        offset: u64,
        expected: T,
        new: T,
    ) -> Result<T, SharedDirectError> {
        self.swap_bits(offset, T::KIND, expected.bits(), new.bits()).map(T::from_bits)
    }

    /// Like [`SharedDirect::fetch_op`], in bits.
    ///
    /// # Errors
    /// As [`SharedDirect::fetch_op`].
    pub fn fetch_bits(
        &self,
        offset: u64,
        kind: Kind,
        how: Combine,
        operand: u64,
    ) -> Result<u64, SharedDirectError> {
        fits(kind, how)?;
        self.word(offset, kind, |offset| Access::Fetch { offset, kind, how, operand })
    }

    /// Like [`SharedDirect::compare_exchange`], in bits.
    ///
    /// # Errors
    /// As [`SharedDirect::compare_exchange`].
    pub fn swap_bits(
        &self,
        offset: u64,
        kind: Kind,
        expect: u64,
        new: u64,
    ) -> Result<u64, SharedDirectError> {
        self.word(offset, kind, |offset| Access::Swap { offset, kind, expect, new })
    }

    fn word(
        &self,
        offset: u64,
        kind: Kind,
        access: impl FnOnce(u32) -> Access,
    ) -> Result<u64, SharedDirectError> {
        let there = Layout::bytes(kind.bytes() as u64)?.placed(offset, self.place.bytes)?;
        aligned(&there, kind)?;
        let (page, offset) = self.place.locate(offset);
        let bytes = self.carry_out(vec![PageAccess { page, access: access(offset) }].into())?;
        Ok(bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)))
    }

    fn gathered(&self, there: &Program) -> Result<Vec<u8>, SharedDirectError> {
        let bytes = there.bytes();
        let mut bytes = with_length(Vec::new(), bytes).ok_or(SharedDirectError::NoMemory { bytes })?;
        self.gather(there, &mut bytes)?;
        Ok(bytes)
    }

    /// The bytes of `there`, one after the other, into a buffer of that length.
    fn gather(&self, there: &Program, buffer: &mut [u8]) -> Result<(), SharedDirectError> {
        self.each(there, |pieces| {
            let got = self.carry_out(accesses(&pieces, |run| Access::Get { spans: spans(run) }))?;
            let mut rest = &got[..];
            for piece in &pieces {
                let (mine, behind) = rest.split_at(piece.len as usize);
                buffer[piece.at..][..mine.len()].copy_from_slice(mine);
                rest = behind;
            }
            Ok(())
        })
    }

    fn scatter(&self, there: &Program, bytes: &[u8]) -> Result<(), SharedDirectError> {
        self.each(there, |pieces| {
            let access = |run: &[Piece]| {
                let mut diff = Diff::default();
                run.iter().for_each(|piece| {
                    diff.push(piece.offset as usize, &bytes[piece.at..][..piece.len as usize])
                });
                Access::Put { diff }
            };
            self.carry_out(accesses(&pieces, access)).map(drop)
        })
    }

    /// Cuts a program into pages and operations of bounded length; the pieces of one operation are in the
    /// order of the pages.
    fn each(
        &self,
        there: &Program,
        mut act: impl FnMut(Vec<Piece>) -> Result<(), SharedDirectError>,
    ) -> Result<(), SharedDirectError> {
        let mut done = 0;
        while done < there.bytes() {
            let mut pieces: Vec<Piece> = Vec::new();
            let start = done;
            for run in there.window(done, MOST_BYTES) {
                if pieces.len() >= MOST_RUNS {
                    break;
                }
                let mut from = run.offset.cast_unsigned();
                let end = from + run.len;
                while from < end {
                    let (page, offset) = self.place.locate(from);
                    let len = u32::try_from((end - from).min(u64::from(self.place.page_bytes - offset)))
                        .expect("within a page");
                    pieces.push(Piece { page, offset, len, at: index(done) });
                    from += u64::from(len);
                    done += u64::from(len);
                }
            }
            assert!(done > start, "a program has as many bytes as it says");
            pieces.sort_by_key(|piece| (piece.page, piece.offset));
            act(pieces)?;
        }
        Ok(())
    }

    fn carry_out(&self, op: DirectOp) -> Result<Arc<[u8]>, SharedDirectError> {
        match &self.route {
            Route::Rank(shared) => Ok(shared.carry_out(Waiting::Direct, op, None, true)?.expect("it waits")),
            Route::Outside(outside) => Ok(outside.carry_out(&op)?),
        }
    }

    fn both(
        &self,
        offset: u64,
        there: &Layout,
        bytes: u64,
        here: &Layout,
    ) -> Result<(Program, Program), SharedDirectError> {
        let (there, here) = (there.placed(offset, self.place.bytes)?, here.placed(0, bytes)?);
        if there.bytes() != here.bytes() {
            return Err(SharedDirectError::Lengths { there: there.bytes(), here: here.bytes() });
        }
        Ok((there, here))
    }

    fn of_length(&self, there: &Program, bytes: Vec<u8>) -> Result<Vec<u8>, SharedDirectError> {
        let here = bytes.len() as u64;
        if there.bytes() == here {
            Ok(bytes)
        } else {
            Err(SharedDirectError::Lengths { there: there.bytes(), here })
        }
    }
}

impl PagesOfRegion {
    pub fn holds(&self, page: PageIndex) -> bool {
        let pages = self.bytes / u64::from(self.page_bytes);
        page.0.checked_sub(self.first.0).is_some_and(|index| index < pages)
    }

    /// A byte of the region.
    fn locate(&self, offset: u64) -> (PageIndex, u32) {
        let page_bytes = u64::from(self.page_bytes);
        (self.first.offset(offset / page_bytes), u32::try_from(offset % page_bytes).expect("within a page"))
    }
}

/// Bytes of one page, and where they are among the operation's.
#[derive(Clone, Copy, Debug)]
struct Piece {
    page: PageIndex,
    offset: u32,
    len: u32,
    at: usize,
}

/// Pieces in the order of the pages, as one access for each page; more where they overlap.
fn accesses(pieces: &[Piece], access: impl Fn(&[Piece]) -> Access) -> DirectOp {
    let together = |one: &Piece, next: &Piece| one.page == next.page && one.offset + one.len <= next.offset;
    pieces.chunk_by(together).map(|run| PageAccess { page: run[0].page, access: access(run) }).collect()
}

fn spans(run: &[Piece]) -> Spans {
    let mut spans = Spans::default();
    for piece in run {
        assert!(spans.push(piece.offset, piece.len), "the pieces of an access ascend");
    }
    spans
}

fn fits(kind: Kind, how: Combine) -> Result<(), SharedDirectError> {
    if how.fits(kind) { Ok(()) } else { Err(SharedDirectError::NotForKind { kind, how }) }
}

fn length(program: &Program) -> usize {
    index(program.bytes())
}

fn index(at: u64) -> usize {
    usize::try_from(at).expect("64-bit addresses")
}
