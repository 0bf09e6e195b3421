//! Installing by moving: the frame that a page was received into becomes the program's page, and nothing is copied, allocated or freed.
//!
//! `UFFDIO_MOVE` leaves a page open to writes, and there is no mode of it that does not. A page that counts as clean must be protected by a second call,
//! and a write between the two would be lost with the page. So between them the program must not run, and this is checked, not hoped: the process
//! has one thread besides this one, it waits for one of these pages and is not woken before both calls are done, and the kernel's count of how often it was
//! switched in is the same before and after (a signal could have made it run). Otherwise the pages count as written.
//! (What writes into the program's memory from outside, a debugger, is not seen.)
//!
//! It is not the default, because frames are used again: a page that left while a pipe or a socket still referred to it (`vmsplice`, `MSG_ZEROCOPY`; neither pins
//! it, so the kernel lets it leave) would be overwritten under them. A frame that is given back to the kernel lives on as long as they need it.
//!
//! Where the kernel keeps refusing (pages that somebody pins, large folios that it would have to split), every refusal is a call for nothing and the frames are copied all the same: then
//! it is left alone for a while.
//!
//! A move empties the TLBs of all CPUs where a thread of the process runs; it pays where that is this CPU alone.

use rampool_proto::cache::{FetchId, Input};
use rampool_proto::units::{Extent, OS_PAGE_BYTES};
use rampool_sys::thread::{Still, Stillness};
use rampool_sys::uffd::Reply;

use super::{FollowUp, Pager, page_count};
use crate::backing::Backing;

/// How pages that came from the servers are put into the program.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum InstallBy {
    /// Moved where one thread runs, on the CPU of the pager, and the kernel can move; copied elsewhere. For memory that is never handed to the kernel
    /// without a copy (`vmsplice`, `MSG_ZEROCOPY`): see the module.
    Auto,
    #[default]
    Copy,
    /// Moved wherever the kernel can, whatever the TLB flushes cost; what cannot be protected in time counts as written. To test, and to compare.
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
            if now.choice == InstallBy::Auto && self.place.cpu.is_none() && !now.on {
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
                    now.stillness = if self.place.cpu.is_some() { Stillness::of(thread) } else { None };
                }
                now.refusals.may_try() && self.place.cpu.is_some() && now.stillness.as_ref().is_some_and(|s| s.threads() == Some(2))
            }
        };
        if on != now.on {
            now.on = on;
            self.tell(Input::MoveIn(on));
        }
    }

    /// Maps the pages of a fetch whose frames may be moved; copies what will not move.
    pub(super) fn install_moved(&mut self, extent: Extent, fetch: FetchId, from: usize, writable: bool) {
        let before = self.look();
        if before.is_none() && !(writable || self.move_in.choice == InstallBy::Move) {
            return self.install(extent, Some(from), writable);
        }
        let faults = &self.faults;
        let mut done = 0;
        let mut stopped = false;
        let mut refused = false;
        let mut protected = true;
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
                _ => 0,
            };
            stopped = moved < piece.bytes;
            done += page_count(moved);
            if moved > 0 && !writable && before.is_some() {
                protected &= faults.protect(piece.start, moved) == Reply::Done;
            }
        });
        self.move_in.refusals.moved(refused);
        let moved = Extent::new(extent.first, done);
        if done > 0 {
            self.spare.moved(fetch.0, done);
            self.stats.moved_in(u64::from(done));
            let still_clean = protected && before.is_some_and(|before| self.has_not_run_since(before));
            if !writable && !still_clean {
                self.follow_ups.push_back(FollowUp::Opened { extent: moved });
            }
            let faults = &self.faults;
            self.space.pieces(moved, |piece| faults.wake(piece.start, piece.bytes));
            if let Some(started) = self.fault_started.take() {
                self.stats.served(started.elapsed());
            }
        }
        if done < extent.count {
            let rest = Extent::new(moved.end(), extent.count - done);
            self.install(rest, Some(from + done as usize * OS_PAGE_BYTES), writable);
        }
    }

    fn look(&self) -> Option<Still> {
        self.move_in.stillness.as_ref()?.look(self.place.cpu?)
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
    fn a_kernel_that_keeps_refusing_is_left_alone_for_longer_and_longer() {
        let mut refusals = Refusals::default();
        assert_eq!(pause_after(&mut refusals, |_| false), None);
        assert_eq!(pause_after(&mut refusals, |n| n.is_multiple_of(4)), None, "a refusal now and then costs less than copying everything");
        let first = pause_after(&mut refusals, |_| true).expect("a pause");
        let second = pause_after(&mut refusals, |n| !n.is_multiple_of(4)).expect("a longer pause");
        assert!(second > first, "{second} after {first}");
        assert_eq!(pause_after(&mut refusals, |_| false), None);
        assert_eq!(pause_after(&mut refusals, |_| true), Some(first), "what was good in between starts anew");
        for _ in 0..40 {
            assert!(pause_after(&mut refusals, |_| true).is_some_and(|choices| choices < Refusals::LONGEST_PAUSE));
        }
    }
}
