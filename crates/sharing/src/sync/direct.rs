//! Direct operations at the requesting rank. See [`crate::direct`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{After, Scope};
use crate::config::page_lock;
use crate::direct::{Changed, DirectOp, PageAccess};
use crate::engine::Engine;
use crate::protocol::unexpected;
use crate::rule::Rule;
use crate::{
    Body, Checked, Io, LockId, LockMode, OpError, OpResult, Protection, ProtocolKind, Rank, ThreadId,
};
use rampool_wire::units::PageIndex;

/// The most bytes of one request, its own and those of the answer, approximately.
const MOST_CALL_BYTES: usize = 256 << 10;

/// A thread's direct operation.
///
/// Invariant: every access is in `calls`, in `here`, or has its bytes in `got`.
#[derive(Clone, Hash, Debug)]
pub(crate) struct Direct {
    op: DirectOp,
    /// The result of each access.
    got: Vec<Vec<u8>>,
    /// Requests to homes, by the flush that stands for each.
    calls: BTreeMap<u64, Call>,
    /// Accesses that this rank makes itself, one after the other.
    here: VecDeque<usize>,
    /// The locks of the whole operation: those still to be taken, in order, and those taken.
    wanted: VecDeque<LockId>,
    held: Vec<LockId>,
    /// The lock of the next page.
    page_held: Option<LockId>,
    stage: Stage,
}

#[derive(Clone, Hash, Debug)]
struct Call {
    home: Rank,
    protocol: ProtocolKind,
    accesses: Vec<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Stage {
    /// Takes its locks, then asks the homes.
    Begins,
    /// Waits for one of its locks.
    Ordering,
    /// Waits for the lock of its next page.
    Locking,
    /// May go on.
    Ready,
    Faulting(PageIndex),
    /// Waits for homes.
    Away,
}

impl Engine {
    pub(crate) fn direct_begin(
        &mut self,
        io: &mut Io<'_>,
        thread: ThreadId,
        op: DirectOp,
        under: Option<LockId>,
    ) {
        if let Some(error) = self.mistake(&op) {
            self.done(io, thread, OpResult::Failed(error));
            return;
        }
        let word = op.first().and_then(|first| first.access.word_lock(first.page));
        let direct = Direct {
            got: vec![Vec::new(); op.len()],
            op,
            calls: BTreeMap::new(),
            here: VecDeque::new(),
            wanted: under.into_iter().chain(word).collect(),
            held: Vec::new(),
            page_held: None,
            stage: Stage::Begins,
        };
        self.directs.insert(thread, direct);
    }

    fn mistake(&self, op: &DirectOp) -> Option<OpError> {
        for PageAccess { page, access } in op.iter() {
            let Some(region) = self.shared.regions.find(*page) else {
                return Some(OpError::NoSuchPage { page: *page });
            };
            if !access.fits(region.page_bytes as usize) || (op.len() > 1 && access.word_lock(*page).is_some())
            {
                return Some(OpError::NoSuchAccess { page: *page, page_bytes: region.page_bytes });
            }
        }
        None
    }

    /// Its lock is here.
    pub(super) fn direct_locked(&mut self, thread: ThreadId) {
        let direct = self.directs.get_mut(&thread).expect("it asked for the lock");
        direct.stage = if direct.stage == Stage::Locking { Stage::Ready } else { Stage::Begins };
    }

    /// Continues one direct operation. False if none can continue.
    pub(super) fn direct_progress(&mut self, io: &mut Io<'_>) -> bool {
        let can_go_on = |direct: &Direct| match direct.stage {
            Stage::Begins | Stage::Ready => true,
            Stage::Faulting(page) => self.shared.retried.contains(&page),
            Stage::Ordering | Stage::Locking | Stage::Away => false,
        };
        let Some((&thread, direct)) = self.directs.iter().find(|(_, direct)| can_go_on(direct)) else {
            return false;
        };
        if direct.stage == Stage::Begins {
            let direct = self.directs.get_mut(&thread).expect("just found");
            match direct.wanted.pop_front() {
                Some(lock) => {
                    direct.held.push(lock);
                    direct.stage = Stage::Ordering;
                    self.lock_begin(io, thread, lock, LockMode::Exclusive, true);
                }
                None => self.direct_ask(io, thread),
            }
        } else if let Some(&index) = direct.here.front() {
            self.direct_here(io, thread, index);
        } else if direct.calls.is_empty() {
            self.direct_end(io, thread);
        } else {
            self.directs.get_mut(&thread).expect("just found").stage = Stage::Away;
        }
        true
    }

    /// Asks the homes.
    fn direct_ask(&mut self, io: &mut Io<'_>, thread: ThreadId) {
        let op = Arc::clone(&self.directs[&thread].op);
        let ordered = op.iter().any(|one| one.access.word_lock(one.page).is_some());
        let (mut here, mut calls) = (VecDeque::new(), Vec::<Call>::new());
        // By home, the call that has room, and its requests so far.
        let mut open: BTreeMap<(ProtocolKind, Rank), (usize, usize)> = BTreeMap::new();
        let mut unreleased = false;
        for (index, PageAccess { page, access }) in op.iter().enumerate() {
            let protocol = self.shared.regions.find(*page).expect("it was looked at").protocol;
            let plugin = self
                .plugins
                .iter()
                .find(|plugin| plugin.kind() == protocol)
                .expect("the region has a protocol")
                .get();
            // Under ibec a word's value travels with its lock.
            if !plugin.serves_direct() || (ordered && protocol == ProtocolKind::Ibec) {
                here.push_back(index);
                continue;
            }
            unreleased |= plugin.is_unreleased(*page);
            let home = self.shared.tables.home(&self.shared.regions, *page);
            let bytes = access.request_bytes() + access.answer_bytes();
            match open.get_mut(&(protocol, home)) {
                Some((at, so_far)) if *so_far + bytes <= MOST_CALL_BYTES => {
                    *so_far += bytes;
                    calls[*at].accesses.push(index);
                }
                _ => {
                    open.insert((protocol, home), (calls.len(), bytes));
                    calls.push(Call { home, protocol, accesses: vec![index] });
                }
            }
        }
        // This rank's own stores there go first, on the same way.
        if unreleased && self.shared.rules.keep(Rule::DirectRelease) {
            self.release(io, Scope::Fence, After::Nothing);
        }
        let mut asked = BTreeMap::new();
        for call in calls {
            let number = self.shared.flushes.begin();
            let accesses = call.accesses.iter().map(|&index| op[index].clone()).collect();
            self.send(io, call.home, Body::Direct { call: number, accesses });
            asked.insert(number, call);
        }
        let direct = self.directs.get_mut(&thread).expect("it is under way");
        (direct.here, direct.calls, direct.stage) = (here, asked, Stage::Ready);
    }

    /// Makes an access here, if the page is here.
    fn direct_here(&mut self, io: &mut Io<'_>, thread: ThreadId, index: usize) {
        let op = Arc::clone(&self.directs[&thread].op);
        let PageAccess { page, access } = &op[index];
        let lazy = self.shared.regions.find(*page).expect("it was looked at").protocol == ProtocolKind::Lrc;
        // Several ranks may have a page writable at once: a lock makes them update it one after the other.
        let lock = (lazy && access.is_update()).then(|| page_lock(*page));
        if let Some(lock) = lock
            && self.directs[&thread].page_held.is_none()
        {
            let direct = self.directs.get_mut(&thread).expect("it is under way");
            (direct.page_held, direct.stage) = (Some(lock), Stage::Locking);
            self.lock_begin(io, thread, lock, LockMode::Exclusive, true);
            return;
        }
        let needed = if access.writes() { Protection::ReadWrite } else { Protection::Read };
        let (plugin, mut cx) = self.plugin_of(io, *page).expect("it was looked at");
        if plugin.access(*page) < needed {
            cx.shared.retried.remove(page);
            plugin.fault(&mut cx, thread, *page, access.writes());
            self.directs.get_mut(&thread).expect("it is under way").stage = Stage::Faulting(*page);
            return;
        }
        let outcome = access.carry_out(&cx.snapshot(*page));
        if !outcome.diff.is_empty() {
            cx.mem.store(*page, &outcome.diff);
        }
        let direct = self.directs.get_mut(&thread).expect("it is under way");
        direct.here.pop_front();
        direct.got[index] = outcome.bytes;
        direct.stage = Stage::Ready;
        if let Some(lock) = lock {
            direct.page_held = None;
            assert!(self.let_go(io, thread, lock), "it has the page's lock");
        }
    }

    /// A home has carried out its request.
    pub(super) fn on_direct_done(
        &mut self,
        io: &mut Io<'_>,
        from: Rank,
        number: u64,
        bytes: &[u8],
        changed: &[Changed],
    ) -> Checked {
        let asked = self.directs.values_mut().find_map(|direct| {
            let call = direct.calls.get(&number).filter(|call| call.home == from)?;
            let wanted: usize =
                call.accesses.iter().map(|&index| direct.op[index].access.answer_bytes()).sum();
            let writes = |page: PageIndex| {
                call.accesses
                    .iter()
                    .any(|&index| direct.op[index].page == page && direct.op[index].access.writes())
            };
            (bytes.len() == wanted && changed.iter().all(|changed| writes(changed.page))).then_some(direct)
        });
        let Some(direct) = asked else { return unexpected("end of a direct operation") };
        let call = direct.calls.remove(&number).expect("just found");
        let mut rest = bytes;
        for index in call.accesses {
            let (mine, behind) = rest.split_at(direct.op[index].access.answer_bytes());
            direct.got[index] = mine.to_vec();
            rest = behind;
        }
        if direct.calls.is_empty() && direct.stage == Stage::Away {
            direct.stage = Stage::Ready;
        }
        self.shared.flushes.end(number)?;
        if let Some((plugin, mut cx)) = self.plugin_by(io, call.protocol) {
            plugin.direct_done(&mut cx, changed);
        }
        Ok(())
    }

    fn direct_end(&mut self, io: &mut Io<'_>, thread: ThreadId) {
        let direct = self.directs.remove(&thread).expect("it is under way");
        // The changes are at their homes: from here on others are told.
        self.each(io, |plugin, cx| plugin.released(cx));
        let result = OpResult::Bytes(direct.got.concat().into());
        for lock in direct.held.into_iter().rev() {
            assert!(self.let_go(io, thread, lock), "it has its locks");
        }
        self.done(io, thread, result);
    }
}
