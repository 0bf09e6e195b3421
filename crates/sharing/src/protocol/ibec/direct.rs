//! Direct operations at a page's home ([`crate::direct`]): changes outside of locks, made there at once.

use super::{Ibec, OUTER};
use crate::direct::{Changed, PageAccess, can_be_answered};
use crate::home::patched;
use crate::message::PageCopy;
use crate::notice::Notice;
use crate::protocol::{Cx, unexpected};
use crate::rule::Rule;
use crate::{Body, Checked, Diff, ProtocolKind, Rank};

impl Ibec {
    /// The answer is the content at the barrier, without changes under locks since, but with direct changes.
    pub(super) fn on_direct(
        &mut self,
        cx: &mut Cx<'_>,
        from: Rank,
        call: u64,
        accesses: &[PageAccess],
    ) -> Checked {
        let mine = |one: &PageAccess| cx.is_home(one.page) && cx.kind(one.page) == Some(ProtocolKind::Ibec);
        if !accesses.iter().all(mine) || !can_be_answered(accesses) {
            return unexpected("direct operation on another home's page, or too large");
        }
        let (mut bytes, mut changed) = (Vec::new(), Vec::new());
        for PageAccess { page, access } in accesses {
            let now = PageCopy {
                page: *page,
                version: 0,
                applied: Vec::new(),
                mode: Default::default(),
                bytes: cx.snapshot(*page),
            };
            let outcome = access.carry_out(&self.as_of_barrier(*page, now).bytes);
            bytes.extend_from_slice(&outcome.bytes);
            if outcome.diff.is_empty() {
                continue;
            }
            let local = self.locals.entry(*page).or_default();
            local.stamps.put(&outcome.diff, OUTER, 1);
            if let Some(base) = &mut local.base {
                *base = patched(base, &outcome.diff);
            }
            self.write_through(cx, *page, &outcome.diff);
            let advance = self.home(*page).apply(cx, *page, &Diff::default());
            changed.push(Changed { page: *page, version: advance.after });
        }
        cx.send(from, Body::DirectDone { call, bytes: bytes.into(), changed });
        Ok(())
    }

    /// All ranks learn of it at the barrier, this rank included.
    pub(super) fn on_direct_done(&mut self, cx: &Cx<'_>, changed: &[Changed]) {
        for changed in changed.iter().filter(|_| cx.keep(Rule::DirectTold)) {
            self.fresh.add(changed.page, Notice::sent(0, None));
        }
    }
}
