//! A page at its home, in the home-based protocols: its master copy, which is always valid.
//!
//! The home writes without twins. While no other rank has a copy of the present version its writes need not even be noticed; the first copy that
//! is handed out write-protects the page, and the next write after that is a change that others have to learn of.
//!
//! Invariant: `!shared` implies that no other rank has a valid copy of this `version`.

use std::sync::Arc;

use super::message::{Advance, PageCopy};
use super::protocol::Cx;
use super::{Diff, Protection};
use crate::units::PageIndex;

#[derive(Clone, Hash, Debug)]
pub(crate) struct HomePage {
    /// Releases that changed it.
    pub version: u32,
    /// Another rank may have a copy of this version.
    pub shared: bool,
    /// A thread of the home may have written to it since it was shared.
    pub dirty: bool,
    pub access: Protection,
}

impl HomePage {
    /// A page that nobody has touched.
    pub fn new() -> Self {
        Self { version: 0, shared: false, dirty: false, access: Protection::None }
    }

    /// A thread of the home needs access. `unnoticed`: writes nobody has to know of may go unnoticed.
    pub fn fault(&mut self, cx: &mut Cx<'_>, page: PageIndex, write: bool, unnoticed: bool) {
        let free = unnoticed && !self.shared;
        self.access = if write || free { Protection::ReadWrite } else { Protection::Read };
        self.dirty |= write && self.shared;
        cx.protect(page, self.access);
    }

    /// A copy for another rank.
    pub fn copy(&mut self, cx: &mut Cx<'_>, page: PageIndex) -> PageCopy {
        if self.access == Protection::ReadWrite {
            // What is written from now on is not in the copy, and has to be noticed.
            self.access = Protection::Read;
            cx.protect(page, Protection::Read);
        }
        self.shared = true;
        PageCopy { page, version: self.version, applied: Vec::new(), bytes: cx.snapshot(page) }
    }

    /// A writer's changes, released. The writer keeps a copy.
    pub fn apply(&mut self, cx: &mut Cx<'_>, page: PageIndex, diff: &Diff) -> Advance {
        if !diff.is_empty() {
            cx.mem.store(page, diff);
        }
        let before = self.version;
        self.version = self.version.saturating_add(1);
        self.shared = true;
        // The writer's copy lacks what the home may have written meanwhile.
        self.dirty |= self.access == Protection::ReadWrite;
        Advance { page, before, after: self.version }
    }

    /// The home releases: the new version, if others have to learn of one.
    pub fn release(&mut self) -> Option<u32> {
        if !self.dirty {
            return None;
        }
        self.dirty = false;
        self.shared = false;
        self.version = self.version.saturating_add(1);
        Some(self.version)
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
