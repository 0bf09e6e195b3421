//! A page at its home, in the home-based protocols: its master copy, which is always valid.
//!
//! The home writes without twins. While no other rank has a copy of the present version, its writes need not
//! even be noticed. Handing out the first copy write-protects the page, and the next write after that is a
//! change that others have to learn of.
//!
//! A page that is written in epoch after epoch and requested in between is *hot*: it stays writable when it
//! is handed out, and each release compares it with the copy handed out.
//!
//! Invariant: `!shared` implies that no other rank has a valid copy of this `version`. While the page is
//! shared and writable, it is dirty, or all copies of this version are equal to `handed`.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::adapt::Mode;
use super::message::{Advance, PageCopy};
use super::protocol::Cx;
use super::rule::Rule;
use super::{Diff, Protection};
use rampool_wire::units::PageIndex;

#[derive(Clone, Hash, Debug)]
pub(crate) struct HomePage {
    /// The number of releases that changed it.
    pub version: u32,
    /// Another rank may have a copy of this version.
    pub shared: bool,
    /// A thread of the home may have written to it since it was shared.
    pub dirty: bool,
    pub access: Protection,
    /// The epoch in which it was first used, by a write that went unnoticed; or a rank's last one before it
    /// became the page's home as the only one to write it.
    pub begun: Option<u32>,
    /// The copy of this version that was handed out while the page stayed writable.
    pub handed: Option<Arc<[u8]>>,
    /// Times it was written after it had been shared.
    pub heat: u8,
    /// Comparisons since then that found it unchanged.
    pub quiet: u8,
    pub spare: Spare,
}

/// A buffer that held a handed-out copy of a hot page, for reuse: allocating costs more than filling it. Not
/// part of the state.
#[derive(Clone, Default, Debug)]
pub(crate) struct Spare(pub Option<Arc<[u8]>>);

impl Hash for Spare {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl HomePage {
    /// An untouched page.
    pub fn new() -> Self {
        Self {
            version: 0,
            shared: false,
            dirty: false,
            access: Protection::None,
            begun: None,
            handed: None,
            heat: 0,
            quiet: 0,
            spare: Spare::default(),
        }
    }

    /// A thread of the home needs access. `unnoticed`: writes that no other rank has to know of may go
    /// unnoticed.
    pub fn fault(&mut self, cx: &mut Cx<'_>, page: PageIndex, write: bool, unnoticed: bool) {
        let free = unnoticed && !self.shared;
        if write && free && self.access == Protection::None {
            self.begun = Some(cx.shared.epoch);
        }
        self.access = if write || free { Protection::ReadWrite } else { Protection::Read };
        self.dirty |= write && self.shared;
        self.heat = self.heat.saturating_add(u8::from(write && self.shared && unnoticed));
        cx.protect(page, self.access);
    }

    /// Before a thread of the home needs it: makes it writable, so that each write that others have to learn
    /// of is found at the next release. False if it is, or cannot be.
    pub fn open(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> bool {
        let is_closed = self.access != Protection::ReadWrite;
        let can_be_compared = self.access == Protection::Read && !self.dirty && self.handed.is_none();
        if !is_closed || (self.shared && !(can_be_compared && cx.is_near(page))) {
            return false;
        }
        if self.shared {
            let over = self.spare.0.take();
            self.handed = Some(cx.snapshot_over(page, over));
        } else if self.access == Protection::None {
            self.begun = Some(cx.shared.epoch);
        }
        self.access = Protection::ReadWrite;
        true
    }

    /// Later writes are not in copies that are made, and have to be noticed. True if the page has to be
    /// write-protected for that.
    pub fn close(&mut self, cx: &Cx<'_>) -> bool {
        let hot = self.heat > 0 && self.heat >= cx.shared.tuning.hot_after;
        let closes = self.access == Protection::ReadWrite && !hot;
        if closes {
            self.access = Protection::Read;
        }
        closes
    }

    /// A copy for another rank.
    pub fn copy(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> PageCopy {
        if self.close(cx) {
            cx.protect(page, Protection::Read);
        }
        self.shared = true;
        let stays_writable = self.access == Protection::ReadWrite && !self.dirty;
        let over = self.spare.0.take_if(|_| stays_writable && self.handed.is_none());
        let bytes = cx.snapshot_over(page, over);
        if stays_writable {
            match &self.handed {
                None => self.handed = Some(Arc::clone(&bytes)),
                // It was written in between: the earlier copy is stale.
                Some(earlier) => self.dirty |= *earlier != bytes && cx.keep(Rule::HandedTwice),
            }
        }
        PageCopy { page, version: self.version, applied: Vec::new(), mode: Mode::Invalidate, bytes }
    }

    /// A writer's changes, released. The writer keeps a copy.
    pub fn apply(&mut self, cx: &mut Cx<'_>, page: PageIndex, diff: &Diff) -> Advance {
        if !diff.is_empty() {
            cx.mem.store(page, diff);
        }
        let before = self.version;
        self.version = self.version.saturating_add(1);
        self.shared = true;
        // The writer's copy lacks the home's own writes since then.
        self.dirty |= self.access == Protection::ReadWrite;
        Advance { page, before, after: self.version, mode: Mode::Invalidate }
    }

    /// What the home wrote in this epoch before another rank had the page becomes a version: who writes it
    /// now is not alone. Not before the first barrier, where one rank prepares what others use.
    pub fn count_own(&mut self, cx: &Cx<'_>) {
        if self.begun.take_if(|&mut epoch| epoch == cx.shared.epoch && epoch > 0).is_some() {
            self.version = self.version.saturating_add(1);
        }
    }

    /// The home releases: the new version, if others have to learn of one.
    pub fn release(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> Option<u32> {
        if let Some(handed) = self.handed.take_if(|_| !self.dirty) {
            self.compare(cx, page, handed);
        }
        if !self.dirty {
            return None;
        }
        if let Some(handed) = self.handed.take() {
            self.spare.0 = Some(handed);
        }
        self.dirty = false;
        self.shared = false;
        self.version = self.version.saturating_add(1);
        Some(self.version)
    }

    /// Compares the page with the copy handed out. If they are equal again and again, its writes are noticed
    /// by faults again.
    fn compare(&mut self, cx: &mut Cx<'_>, page: PageIndex, handed: Arc<[u8]>) {
        cx.shared.stats.scans += 1;
        let cools = self.quiet + 1 >= cx.shared.tuning.cool_after;
        if cools {
            // One more write makes it hot again: it may be written with its old content.
            (self.heat, self.quiet) = (self.heat.min(cx.shared.tuning.hot_after).saturating_sub(1), 0);
            self.access = Protection::Read;
            cx.protect(page, Protection::Read);
        }
        if cx.snapshot(page) != handed && cx.keep(Rule::Handed) {
            self.dirty = true;
            self.quiet = 0;
            self.spare.0 = Some(handed).filter(|_| !cools);
        } else if !cools {
            self.quiet += 1;
            self.handed = Some(handed);
        }
    }
}

/// Puts changes over a page's content.
pub(crate) fn patched(bytes: &Arc<[u8]>, diff: &Diff) -> Arc<[u8]> {
    if diff.is_empty() {
        return Arc::clone(bytes);
    }
    let mut copy = bytes.to_vec();
    diff.apply(&mut copy);
    copy.into()
}
