//! Installing by moving: the frame that a page was received into becomes the program's page, and nothing is
//! copied, allocated or freed.
//!
//! `UFFDIO_MOVE` leaves a page open to writes, and there is no mode of it that does not. A page that counts
//! as clean must be protected by a second call, and a write between the two would be lost with the page. So
//! between them the program must not run, and this is checked, not hoped: the process has one thread besides
//! this one, it waits for one of these pages and is not woken before both calls are done, and the kernel's
//! count of how often it was switched in is the same before and after (a signal could have made it run).
//! Otherwise the pages count as written. (What writes into the program's memory from outside, a debugger, is
//! not seen.)
//!
//! It is not the default, because frames are used again: a page that left while a pipe or a socket still
//! referred to it (`vmsplice`, `MSG_ZEROCOPY`; neither pins it, so the kernel lets it leave) would be
//! overwritten under them. A frame that is given back to the kernel lives on as long as they need it.
//!
//! Where the kernel keeps refusing (pinned pages, large folios that it would have to split), every refusal is
//! a useless call and the frames are copied all the same: then no move is tried for a while.
//!
//! A move empties the TLBs of all CPUs where a thread of the process runs; it pays where that is this CPU
//! alone.

use rampool_kernel::thread::{Still, Stillness};
use rampool_kernel::uffd::Reply;
use rampool_paging::cache::{FetchId, Input};
use rampool_paging::reports::Report;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use super::{Pager, page_count};
use crate::backing::Backing;

/// How pages that came from the servers are put into the program.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum InstallBy {
    /// Moved where one thread runs, on the CPU of the pager, and the kernel can move; copied elsewhere. For
    /// memory that is never handed to the kernel without a copy (`vmsplice`, `MSG_ZEROCOPY`): see the module.
    Auto,
    #[default]
    Copy,
    /// Moved wherever the kernel can, at any cost in TLB flushes; what cannot be protected in time counts as
    /// written. For tests and comparisons.
    Move,
}

#[derive(Debug, Default)]
pub(super) struct MoveIn {
    choice: InstallBy,
    /// What the cache was told.
    on: bool,
    /// Faults since the last choice.
    faults: u32,
    stillness: Option<Stillness>,
    refusals: Refusals,
    /// What lands just now and is to be moved.
    arriving: Vec<Arriving>,
    /// Fetches that are done as soon as that is mapped.
    released: Vec<FetchId>,
}

/// Pages of a fetch, with the frames that they wait in.
#[derive(Clone, Copy, Debug)]
struct Arriving {
    extent: Extent,
    fetch: FetchId,
    from: usize,
    writable: bool,
}

impl Arriving {
    /// The two are adjacent, as pages and as frames.
    fn is_followed_by(&self, next: &Self) -> bool {
        let end = self.from + self.extent.count as usize * OS_PAGE_BYTES;
        self.extent.end() == next.extent.first && end == next.from && self.writable == next.writable
    }
}

/// All of a run as one.
fn run_of(pieces: &[Arriving]) -> Arriving {
    let count = pieces.iter().map(|piece| piece.extent.count).sum();
    Arriving { extent: Extent::new(pieces[0].extent.first, count), ..pieces[0] }
}

/// Whether moving in is worth another try.
#[derive(Clone, Copy, Debug, Default)]
struct Refusals {
    tried: u32,
    refused: u32,
    /// Choices until the next try.
    pause: u32,
    /// How long the next pause is; doubles while nothing gets better.
    next_pause: u32,
}

impl Refusals {
    /// Moves that are looked at together. If more than half of them were refused, there is a pause.
    const LOOKED_AT: u32 = 32;
    const SHORTEST_PAUSE: u32 = 16;
    const LONGEST_PAUSE: u32 = 1 << 14;

    fn moved(&mut self, refused: bool) {
        self.tried += 1;
        self.refused += u32::from(refused);
        if self.tried == Self::LOOKED_AT {
            if self.refused > self.tried / 2 {
                self.pause = self.next_pause.clamp(Self::SHORTEST_PAUSE, Self::LONGEST_PAUSE);
                self.next_pause = self.pause * 2;
            } else {
                self.next_pause = 0;
            }
            (self.tried, self.refused) = (0, 0);
        }
    }

    /// Asked at each choice.
    fn may_try(&mut self) -> bool {
        self.pause = self.pause.saturating_sub(1);
        self.pause == 0
    }
}

/// Faults after which the choice is made again.
const FAULTS_OF_A_CHOICE: u32 = 64;

impl<B: Backing> Pager<B> {
    /// How pages shall be installed; the default is [`InstallBy::Copy`].
    pub fn install_by(&mut self, choice: InstallBy) {
        self.move_in.choice = choice;
    }

    /// Before a fault of `thread` is served.
    pub(super) fn choose_install(&mut self, thread: u32) {
        let now = &mut self.move_in;
        if now.stillness.as_ref().is_none_or(|s| s.thread() != thread) {
            if now.choice == InstallBy::Auto && self.waits.cpu().is_none() && !now.on {
                return;
            }
        } else {
            now.faults += 1;
            if now.faults < FAULTS_OF_A_CHOICE {
                return;
            }
        }
        now.faults = 0;
        let on = match now.choice {
            _ if !self.faults.can_move_in() => false,
            InstallBy::Copy => false,
            InstallBy::Move => true,
            InstallBy::Auto => {
                if now.stillness.as_ref().is_none_or(|s| s.thread() != thread) {
                    now.stillness = if self.waits.cpu().is_some() { Stillness::of(thread) } else { None };
                }
                now.refusals.may_try()
                    && self.waits.cpu().is_some()
                    && now.stillness.as_ref().is_some_and(|s| s.threads() == Some(2))
            }
        };
        if on != now.on {
            now.on = on;
            self.tell(Input::MoveIn(on));
        }
    }

    /// Notes pages in frames that may be moved: pages of the same place are moved together.
    pub(super) fn arrive(&mut self, extent: Extent, fetch: FetchId, from: usize, writable: bool) {
        self.move_in.arriving.push(Arriving { extent, fetch, from, writable });
    }

    /// The fetch is done with its buffer; its noted pages are mapped before.
    pub(super) fn release_fetch(&mut self, fetch: FetchId) {
        let now = &mut self.move_in;
        if now.arriving.iter().any(|piece| piece.fetch == fetch) {
            return now.released.push(fetch);
        }
        if !self.own.spare.release(fetch.0, &mut self.own.batches, &self.faults) {
            self.own.fetches.release(fetch.0);
        }
    }

    /// Maps all that was noted, in runs as long as possible, and wakes the threads that wait for it; copies
    /// what cannot be moved. The state of the program's thread is read once for all of it: reading it takes
    /// as long as moving thirty pages.
    pub(super) fn install_arriving(&mut self) {
        if self.move_in.arriving.is_empty() {
            return;
        }
        let mut arriving = std::mem::take(&mut self.move_in.arriving);
        arriving.sort_unstable_by_key(|piece| piece.extent.first);
        let before = if arriving.iter().all(|piece| piece.writable) { None } else { self.look() };
        let mut moved = Vec::new();
        let mut rest = Vec::new();
        let mut protected = true;
        let mut unexpected = None;
        let mut at = 0;
        while let Some(run) = arriving[at..].chunk_by(Arriving::is_followed_by).next() {
            let Arriving { extent, from, writable, .. } = run_of(run);
            let may_move = before.is_some() || writable || self.move_in.choice == InstallBy::Move;
            let (done, refused) = if may_move {
                self.move_run(extent, from, !writable && before.is_some(), &mut protected, &mut unexpected)
            } else {
                (0, false)
            };
            if done > 0 {
                moved.push((Extent::new(extent.first, done), writable));
            }
            // Where the kernel stopped, the rest of that piece is copied; behind it moving goes on.
            let mut left = done;
            for &Arriving { extent, fetch, from, writable } in run {
                at += 1;
                let of_piece = left.min(extent.count);
                left -= of_piece;
                if of_piece > 0 {
                    self.own.spare.moved(fetch.0, of_piece);
                }
                let whole = of_piece == extent.count;
                if may_move {
                    self.move_in.refusals.moved(refused && !whole);
                }
                if !whole {
                    let first = extent.first.offset(u64::from(of_piece));
                    rest.push((
                        Extent::new(first, extent.count - of_piece),
                        from + of_piece as usize * OS_PAGE_BYTES,
                        writable,
                    ));
                    break;
                }
            }
        }
        if let Some(errno) = unexpected {
            self.breaks(|| format!("the kernel does not move pages into the program, nor say what has become of them (errno {errno})"));
        }
        let still_clean = protected && before.is_some_and(|before| self.has_not_run_since(before));
        for &(extent, writable) in &moved {
            self.stats.moved_in(u64::from(extent.count));
            if !writable && !still_clean {
                self.reports.push(Report::Opened(extent));
            }
            let faults = &self.faults;
            self.space.pieces(extent, |piece| faults.wake(piece.start, piece.bytes));
        }
        if !moved.is_empty() {
            self.served();
        }
        for (extent, from, writable) in rest {
            self.install(extent, Some(from), writable);
        }
        arriving.clear();
        self.move_in.arriving = arriving;
        for fetch in std::mem::take(&mut self.move_in.released) {
            self.release_fetch(fetch);
        }
    }

    /// Moves a run of frames in, and protects what has moved; returns how many pages have, from the first on,
    /// and whether the kernel refused one.
    fn move_run(
        &self,
        extent: Extent,
        from: usize,
        protect: bool,
        protected: &mut bool,
        unexpected: &mut Option<i32>,
    ) -> (u32, bool) {
        let faults = &self.faults;
        let mut done = 0;
        let mut stopped = false;
        let mut refused = false;
        self.space.pieces(extent, |piece| {
            if stopped {
                return;
            }
            let source = from + piece.offset_pages as usize * OS_PAGE_BYTES;
            let moved = match faults.move_in(piece.start, source, piece.bytes) {
                Reply::Done => piece.bytes,
                Reply::Partial(part) => part,
                Reply::Busy | Reply::NoMemory => {
                    refused = true;
                    0
                }
                Reply::Unexpected(errno) => {
                    *unexpected = Some(errno);
                    0
                }
                // To be copied, which says more.
                Reply::MapChanging | Reply::AlreadyMapped | Reply::Gone | Reply::Exiting => 0,
            };
            stopped = moved < piece.bytes;
            done += page_count(moved);
            if moved > 0 && protect {
                *protected &= faults.protect(piece.start, moved) == Reply::Done;
            }
        });
        (done, refused)
    }

    fn look(&self) -> Option<Still> {
        self.move_in.stillness.as_ref()?.look(self.waits.cpu()?)
    }

    fn has_not_run_since(&self, before: Still) -> bool {
        self.move_in.stillness.as_ref().is_some_and(|s| s.since(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves until there is a pause, and how many choices that lasts.
    fn pause_after(refusals: &mut Refusals, refused: impl Fn(u32) -> bool) -> Option<u32> {
        (0..Refusals::LOOKED_AT).for_each(|n| refusals.moved(refused(n)));
        let mut choices = 0;
        while !refusals.may_try() {
            choices += 1;
        }
        (choices > 0).then_some(choices)
    }

    #[test]
    fn what_lies_together_as_pages_and_as_frames_is_one_run() {
        let piece = |first: u64, count: u32, from: usize, writable: bool| Arriving {
            extent: Extent::new(rampool_wire::units::PageIndex(first), count),
            fetch: FetchId(0),
            from: from * OS_PAGE_BYTES,
            writable,
        };
        let (a, b) = (piece(8, 4, 100, false), piece(12, 2, 104, false));
        assert!(a.is_followed_by(&b));
        let both = run_of(&[a, b]);
        assert_eq!((both.extent, both.from), (Extent::new(a.extent.first, 6), a.from));
        for (next, why) in [
            (piece(13, 2, 104, false), "a page between"),
            (piece(12, 2, 105, false), "a frame between"),
            (piece(12, 2, 104, true), "open to writes"),
            (piece(6, 2, 98, false), "before it"),
        ] {
            assert!(!a.is_followed_by(&next), "{why}");
        }
    }

    #[test]
    fn a_kernel_that_keeps_refusing_is_left_alone_for_longer_and_longer() {
        let mut refusals = Refusals::default();
        assert_eq!(pause_after(&mut refusals, |_| false), None);
        assert_eq!(
            pause_after(&mut refusals, |n| n.is_multiple_of(4)),
            None,
            "a refusal now and then costs less than copying everything"
        );
        let first = pause_after(&mut refusals, |_| true).expect("a pause");
        let second = pause_after(&mut refusals, |n| !n.is_multiple_of(4)).expect("a longer pause");
        assert!(second > first, "{second} after {first}");
        assert_eq!(pause_after(&mut refusals, |_| false), None);
        assert_eq!(pause_after(&mut refusals, |_| true), Some(first), "what was good in between starts anew");
        for _ in 0..40 {
            assert!(
                pause_after(&mut refusals, |_| true).is_some_and(|choices| choices < Refusals::LONGEST_PAUSE)
            );
        }
    }
}
