//! Pages that the kernel merges with others that hold the same (KSM): not in managed memory.
//!
//! As of Linux 6.18 the kernel drops the write protection of a page that it merges. The next write would not
//! be seen, and be lost when the page leaves as unwritten. So memory becomes unmergeable when it is taken
//! over ([`FaultCatcher::manage`](crate::fault::FaultCatcher::manage)). No event tells that the program makes
//! it mergeable later: the pager looks now and then, undoes that, and takes all of its resident pages for
//! written. A page may be merged, written and leave between two looks. So once the kernel has been seen to merge
//! pages at all, every page that leaves as unwritten is compared with what was stored last.

use std::time::{Duration, Instant};

use rampool_kernel::maps;
use rampool_paging::cache::Input;
use rampool_wire::units::OS_PAGE_BYTES;

use super::Pager;
use crate::backing::Backing;
use crate::fault::keep_apart;

/// The kernel looks at a page at most this often, unless it is told otherwise, and merges it when it has seen
/// it twice.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Looking takes one part in so many of the time.
const SHARE: u32 = 100;

#[derive(Debug, Default)]
pub(super) struct Merged {
    next_look: Option<Instant>,
    /// The kernel merges no pages, or does not say.
    never: bool,
    switch: Switch,
}

/// The machine's own switch, which its administrator turns.
#[derive(Debug, Default)]
enum Switch {
    #[default]
    Off,
    NoSuch,
    /// It was on once: pages may still be merged.
    On,
}

impl Merged {
    /// Whether a page may have been written that the kernel reports as unwritten.
    pub fn may_hide_writes(&mut self) -> bool {
        if let Switch::Off = self.switch {
            match maps::merges_pages() {
                Ok(false) => {}
                Ok(true) => self.switch = Switch::On,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => self.switch = Switch::NoSuch,
                // Not for this time.
                Err(_) => return true,
            }
        }
        matches!(self.switch, Switch::On)
    }
}

impl<B: Backing> Pager<B> {
    /// Looks whether the program has made managed memory mergeable, and undoes it.
    pub(super) fn undo_merging(&mut self, now: Instant) {
        if self.collects() || self.merged.never || self.merged.next_look.is_some_and(|next| now < next) {
            return;
        }
        if !self.faults.follows_mappings() {
            self.merged.never = true;
            return;
        }
        self.merged.may_hide_writes();
        let began = Instant::now();
        let mut ranges = Vec::new();
        self.merged.never = maps::mergeable(|start, end| ranges.push((start, end))).is_err();
        let mut unguarded = Vec::new();
        for (start, end) in ranges {
            self.space.extents_in(start, end, |at, extent| {
                keep_apart(at, extent.count as usize * OS_PAGE_BYTES);
                unguarded.push(extent);
            });
        }
        for extent in unguarded {
            self.tell(Input::Unguarded { extent });
        }
        let took = began.elapsed();
        self.merged.next_look = Some(now + LOOK_EVERY.max(took * SHARE));
    }
}
