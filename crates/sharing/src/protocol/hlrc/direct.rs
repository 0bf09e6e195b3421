//! Direct operations at a page's home ([`crate::direct`]).

use super::Hlrc;
use crate::direct::{Changed, PageAccess, can_be_answered};
use crate::notice::Notice;
use crate::protocol::{Cx, unexpected};
use crate::rule::Rule;
use crate::{Body, Checked, Protection, Rank};
use rampool_wire::units::PageIndex;

impl Hlrc {
    /// A change counts as one that `from` has released: the page gets a version, and a rank with an older one
    /// has a stale copy.
    pub(super) fn on_direct(
        &mut self,
        cx: &mut Cx<'_>,
        from: Rank,
        call: u64,
        accesses: &[PageAccess],
    ) -> Checked {
        let mine = |one: &PageAccess| cx.is_home(one.page) && cx.kind(one.page) == Some(self.kind);
        if !accesses.iter().all(mine) || !can_be_answered(accesses) {
            return unexpected("direct operation on another home's page, or too large");
        }
        let (mut bytes, mut changed) = (Vec::new(), Vec::new());
        for PageAccess { page, access } in accesses {
            let outcome = access.carry_out(&cx.snapshot(*page));
            bytes.extend_from_slice(&outcome.bytes);
            if !outcome.diff.is_empty() {
                let advance = self.apply(cx, *page, &outcome.diff, from, None);
                changed.push(Changed { page: *page, version: advance.after });
            }
        }
        cx.send(from, Body::DirectDone { call, bytes: bytes.into(), changed });
        Ok(())
    }

    /// A direct operation of this rank at a home is done. Others learn of it like of its own writes; its own
    /// copy lacks it.
    pub(super) fn on_direct_done(&mut self, cx: &mut Cx<'_>, changed: &[Changed]) {
        let mut stale: Vec<PageIndex> = Vec::new();
        for &Changed { page, version } in changed {
            if cx.keep(Rule::DirectTold) {
                // No writer: no rank has it in a copy of its own.
                self.fresh.add(page, Notice::sent(version, None));
            }
            let Some(copy) = self.copies.get_mut(&page).filter(|_| cx.keep(Rule::DirectOwn)) else {
                continue;
            };
            copy.need = copy.need.max(version);
            if copy.valid && copy.version < version {
                (copy.valid, copy.access) = (false, Protection::None);
                stale.push(page);
            }
        }
        stale.sort_unstable();
        cx.shared.stats.invalidations += stale.len() as u64;
        cx.protect_all(stale, Protection::None);
    }
}
