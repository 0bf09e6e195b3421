//! One rank: dispatches events to the synchronisation core and to the protocols, and continues waiting
//! operations.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::by_lock::ByLock;
use super::config::{Regions, Tables};
use super::plugin::Plugin;
use super::protocol::{Cx, Protocol};
use super::rule::{Rule, Rules};
use super::state::{Flushes, Shared};
use super::sync::{Barrier, Begun, Direct, LockManager, LockNode, Pending, Word};
use super::wire::Limits;
use super::{
    Action, Body, Config, ConfigError, Event, Io, LockId, LockPath, Mem, Message, OpError, OpResult,
    ProtocolKind, Rank, Reason, RegionConfig, Stats, ThreadId, TimerId, Violation,
};
use rampool_wire::units::{Extent, PageIndex};

/// A rank of the shared view. See the module for how to drive it.
///
/// Invariants, checked by [`Engine::check`]: a lock that is here and free has no waiter that could have it;
/// no message is parked for an epoch that has begun; a page's protection is what its protocol's state says.
#[derive(Clone, Hash, Debug)]
pub struct Engine {
    pub(crate) shared: Shared,
    pub(crate) plugins: Vec<Plugin>,
    pub(crate) locks: ByLock<LockNode>,
    pub(crate) managed: ByLock<LockManager>,
    /// Locks whose management is on its way here, with the requests that came meanwhile.
    pub(crate) awaited: BTreeMap<LockId, Vec<(Rank, u32, Body)>>,
    pub(crate) barrier: Barrier,
    pub(crate) pending: VecDeque<Pending>,
    /// Locks that are free here, with a critical section's writes that have not been sent because no rank has
    /// requested the lock; and the thread of that section.
    pub(crate) owed: BTreeMap<LockId, ThreadId>,
    /// Releases that their manager has not acknowledged.
    pub(crate) unacked: u32,
    /// How many locks are lent to threads.
    pub(crate) lent: usize,
    /// The lock that another rank got from this one, unless this rank has requested any since.
    pub(crate) handed_over: Option<LockId>,
    pub(crate) words: BTreeMap<ThreadId, Word>,
    pub(crate) directs: BTreeMap<ThreadId, Direct>,
    /// Messages of a later epoch.
    pub(crate) parked: Vec<(Rank, Message)>,
    /// Threads that may leave a barrier as soon as the pages that they will read have come.
    pub(crate) entering: Vec<ThreadId>,
    /// Operations that began while the rank waits in a barrier.
    pub(crate) deferred: VecDeque<(ThreadId, Begun)>,
    /// Threads with an unfinished operation, ascending. They are few, and come and go with every operation.
    blocked: Vec<ThreadId>,
    failed: Option<Reason>,
}

impl Engine {
    /// # Errors
    /// If the configuration contradicts itself.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        if config.rank.0 >= config.ranks {
            return Err(ConfigError::Rank { rank: config.rank, ranks: config.ranks });
        }
        if let super::Managers::At(rank) = config.managers
            && rank.0 >= config.ranks
        {
            return Err(ConfigError::Rank { rank, ranks: config.ranks });
        }
        let entry = config.regions.iter().any(|region| region.protocol == ProtocolKind::Ibec);
        let natural = if entry { LockPath::Either } else { LockPath::Forward };
        let mut engine = Self {
            shared: Shared {
                rank: config.rank,
                ranks: config.ranks,
                epoch: 0,
                at_barrier: false,
                released: false,
                regions: Regions::new(),
                tables: Tables::new(config.ranks, config.managers),
                lock_path: config.lock_path.unwrap_or(natural),
                tuning: config.tuning,
                rules: Rules::default(),
                flushes: Flushes::default(),
                loopback: VecDeque::new(),
                retried: BTreeSet::new(),
                stats: Stats::default(),
            },
            plugins: Vec::new(),
            locks: ByLock::default(),
            managed: ByLock::default(),
            awaited: BTreeMap::new(),
            barrier: Barrier::default(),
            pending: VecDeque::new(),
            owed: BTreeMap::new(),
            unacked: 0,
            lent: 0,
            handed_over: None,
            words: BTreeMap::new(),
            directs: BTreeMap::new(),
            parked: Vec::new(),
            entering: Vec::new(),
            deferred: VecDeque::new(),
            blocked: Vec::new(),
            failed: None,
        };
        for region in &config.regions {
            engine.add_region(*region)?;
        }
        Ok(engine)
    }

    /// Adds a region. Every rank adds the same ones, and none uses a region before all have it (a barrier in
    /// between is enough).
    ///
    /// # Errors
    /// If the region is not well-formed or overlaps another.
    pub fn add_region(&mut self, region: RegionConfig) -> Result<(), ConfigError> {
        self.shared.regions.add(region, self.shared.ranks)?;
        self.add_protocol(region.protocol);
        Ok(())
    }

    /// Has this protocol from now on. Another rank may know of a region before this one does, and mention it
    /// in its messages.
    pub(crate) fn add_protocol(&mut self, kind: ProtocolKind) {
        if self.plugins.iter().all(|plugin| plugin.kind() != kind) {
            self.plugins.push(Plugin::new(kind));
            self.plugins.sort_by_key(Plugin::kind);
        }
    }

    /// Leaves one rule out.
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: Rule) {
        self.shared.rules.omit(rule);
    }

    #[must_use]
    pub fn rank(&self) -> Rank {
        self.shared.rank
    }

    /// Barriers this rank has left.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.shared.epoch
    }

    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    /// Why the run ended, if it did.
    #[must_use]
    pub fn failure(&self) -> Option<&Reason> {
        self.failed.as_ref()
    }

    /// The page's home in this epoch.
    #[must_use]
    pub fn home(&self, page: PageIndex) -> Rank {
        self.shared.tables.home(&self.shared.regions, page)
    }

    /// The lock's manager in this epoch.
    #[must_use]
    pub fn lock_manager(&self, lock: LockId) -> Rank {
        self.shared.tables.manager(&self.shared.regions, lock)
    }

    /// The engine's view of the application's access to the page.
    #[must_use]
    pub fn access(&self, page: PageIndex) -> Option<super::Protection> {
        let kind = self.shared.regions.find(page)?.protocol;
        self.plugins.iter().find(|plugin| plugin.kind() == kind).map(|plugin| plugin.get().access(page))
    }

    /// Bytes that this rank holds for the protocols, in addition to its pages: twins, diffs, logs.
    /// Approximate.
    #[must_use]
    pub fn overhead_bytes(&self) -> usize {
        self.plugins.iter().map(|plugin| plugin.get().overhead_bytes()).sum()
    }

    /// Takes one event. The resulting actions are appended to `out`.
    pub fn handle(&mut self, event: Event<'_>, mem: &mut dyn Mem, out: &mut Vec<Action>) {
        let io = &mut Io { mem, out };
        match event {
            Event::Sync { thread, op } => self.begin(io, thread, Begun::Sync(op)),
            Event::Direct { thread, op, under } => self.begin(io, thread, Begun::Direct(op, under)),
            Event::PeerLost { peer, how } => self.fail(io, Reason::PeerLost { peer, how: how.to_owned() }),
            Event::Stop { why } => self.fail(io, Reason::Stopped { why: why.to_owned() }),
            _ if self.failed.is_some() => {}
            Event::Fault { thread, page, write } => self.fault(io, thread, page, write),
            Event::Receive { from, message } => self.receive(io, from, message),
            Event::Timer(TimerId::Hold(page)) => {
                if let Some((plugin, mut cx)) = self.plugin_of(io, page) {
                    plugin.timer(&mut cx, page);
                }
            }
            Event::Timer(TimerId::Keep(lock)) => self.kept(io, lock),
            Event::Evict { pages } => self.evict(io, pages),
            Event::Freed { pages, renew } => self.freed(io, pages, renew),
            Event::Recall => self.recall_all(io),
            Event::Idle { budget_bytes } => {
                if !self.barrier.is_inside() {
                    self.each(io, |plugin, cx| plugin.idle(cx, budget_bytes));
                }
            }
        }
        self.proceed(io);
    }

    fn begin(&mut self, io: &mut Io<'_>, thread: ThreadId, op: Begun) {
        if let Some(reason) = &self.failed {
            let result = OpResult::Failed(OpError::Stopped(reason.clone()));
            io.out.push(Action::Done { thread, result });
            return;
        }
        let at = self.blocked.partition_point(|&other| other < thread);
        assert!(self.blocked.get(at) != Some(&thread), "{thread} asks for a second operation at a time");
        self.blocked.insert(at, thread);
        if self.barrier.is_inside() {
            self.deferred.push_back((thread, op));
        } else {
            self.start(io, thread, op);
        }
    }

    pub(crate) fn is_blocked(&self, thread: ThreadId) -> bool {
        self.blocked.binary_search(&thread).is_ok()
    }

    /// Ends a thread's operation.
    pub(crate) fn done(&mut self, io: &mut Io<'_>, thread: ThreadId, result: OpResult) {
        self.blocked.retain(|&other| other != thread);
        if self.is_entering() {
            self.each(io, |plugin, cx| plugin.overtaken(cx));
        }
        io.out.push(Action::Done { thread, result });
    }

    fn fault(&mut self, io: &mut Io<'_>, thread: ThreadId, page: PageIndex, write: bool) {
        let allowed = self.access(page).expect("a fault is in a shared region");
        let wanted = if write { super::Protection::ReadWrite } else { super::Protection::Read };
        if allowed >= wanted {
            self.shared.stats.spurious_faults += 1;
            io.mem.reassert(page);
            io.out.push(Action::Retry { page });
            return;
        }
        if write {
            self.shared.stats.write_faults += 1;
        } else {
            self.shared.stats.read_faults += 1;
        }
        let (plugin, mut cx) = self.plugin_of(io, page).expect("the region has a protocol");
        plugin.fault(&mut cx, thread, page, write);
    }

    /// Cuts pages up by the regions they are in.
    pub(crate) fn by_region(&self, pages: Extent) -> Vec<Extent> {
        let (mut cut, mut first) = (Vec::new(), pages.first);
        while first < pages.end()
            && let Some(region) = self.shared.regions.find(first)
        {
            let end = region.pages.end().min(pages.end());
            cut.push(Extent::new(first, u32::try_from(end.0 - first.0).expect("no more than there were")));
            first = end;
        }
        cut
    }

    fn freed(&mut self, io: &mut Io<'_>, pages: Extent, renew: bool) {
        // Other words may come to lie there.
        self.recall_all(io);
        for pages in self.by_region(pages) {
            if let Some((plugin, mut cx)) = self.plugin_of(io, pages.first) {
                plugin.freed(&mut cx, pages);
                cx.mem.clear(pages);
            }
            if renew {
                self.barrier.propose_freed(pages);
            }
        }
    }

    fn evict(&mut self, io: &mut Io<'_>, pages: &[PageIndex]) {
        for at in 0..self.plugins.len() {
            let plugin = &mut self.plugins[at];
            let kind = plugin.kind();
            let of_it = |page: &PageIndex| {
                self.shared.regions.find(*page).is_some_and(|region| region.protocol == kind)
            };
            let pages: Vec<PageIndex> = pages.iter().copied().filter(of_it).collect();
            let mut cx = Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out };
            plugin.get_mut().evict(&mut cx, &pages);
        }
    }

    fn receive(&mut self, io: &mut Io<'_>, from: Rank, message: &Message) {
        assert!(from.0 < self.shared.ranks && from != self.shared.rank, "messages come from other ranks");
        if let Body::Abort { why } = &message.body {
            self.fail(io, Reason::Aborted { peer: from, why: why.clone() });
            return;
        }
        let limits = Limits { ranks: self.shared.ranks, regions: &self.shared.regions };
        if !message.sane(&limits) {
            self.violated(io, from, Violation::new("it names what does not exist"));
            return;
        }
        if message.epoch > self.shared.epoch && self.shared.rules.keep(Rule::Park) {
            if message.epoch > self.shared.epoch + 1 {
                self.violated(io, from, Violation::new("it comes from a later epoch"));
                return;
            }
            self.parked.push((from, message.clone()));
            return;
        }
        self.deliver(io, from, message.epoch, &message.body);
    }

    /// Hands a message whose epoch has begun to its recipient.
    pub(crate) fn deliver(&mut self, io: &mut Io<'_>, from: Rank, epoch: u32, body: &Body) {
        if self.failed.is_some() {
            return;
        }
        let result = match page_of(body) {
            Some(Subject::Page(page)) => match self.plugin_of(io, page) {
                Some((plugin, mut cx)) => plugin.receive(&mut cx, from, body),
                None => Err(Violation::new("it names a page that does not exist")),
            },
            Some(Subject::Protocol(kind)) => match self.plugin_by(io, kind) {
                Some((plugin, mut cx)) => plugin.receive(&mut cx, from, body),
                None => Err(Violation::new("it names a protocol that no region has")),
            },
            Some(Subject::None) => Ok(()),
            None => self.synchronise(io, from, epoch, body),
        };
        if let Err(violation) = result {
            self.violated(io, from, violation);
        }
    }

    pub(crate) fn violated(&mut self, io: &mut Io<'_>, peer: Rank, violation: Violation) {
        self.fail(io, Reason::BadMessage { peer, what: violation.0 });
    }

    /// Ends the run: every waiting thread, and every other rank, is told why.
    pub(crate) fn fail(&mut self, io: &mut Io<'_>, reason: Reason) {
        if self.failed.is_some() {
            return;
        }
        for thread in std::mem::take(&mut self.blocked) {
            let result = OpResult::Failed(OpError::Stopped(reason.clone()));
            io.out.push(Action::Done { thread, result });
        }
        let lost = match reason {
            Reason::PeerLost { peer, .. } => Some(peer),
            _ => None,
        };
        if !matches!(reason, Reason::Aborted { .. }) {
            for to in
                (0..self.shared.ranks).map(Rank).filter(|&to| to != self.shared.rank && Some(to) != lost)
            {
                let message =
                    Message { epoch: self.shared.epoch, body: Body::Abort { why: reason.to_string() } };
                io.out.push(Action::Send { to, message });
            }
        }
        io.out.push(Action::Fatal(reason.clone()));
        self.failed = Some(reason);
    }

    /// Continues everything that has become possible, until nothing more does.
    fn proceed(&mut self, io: &mut Io<'_>) {
        while self.failed.is_none() {
            if let Some(body) = self.shared.loopback.pop_front() {
                self.deliver(io, self.shared.rank, self.shared.epoch, &body);
            } else if !self.progress(io) {
                break;
            }
        }
        self.shared.retried.clear();
    }

    /// The protocol of `page`, and its context.
    pub(crate) fn plugin_of<'a>(
        &'a mut self,
        io: &'a mut Io<'_>,
        page: PageIndex,
    ) -> Option<(&'a mut dyn Protocol, Cx<'a>)> {
        let kind = self.shared.regions.find(page)?.protocol;
        self.plugin_by(io, kind)
    }

    pub(crate) fn plugin_by<'a>(
        &'a mut self,
        io: &'a mut Io<'_>,
        kind: ProtocolKind,
    ) -> Option<(&'a mut dyn Protocol, Cx<'a>)> {
        let plugin = self.plugins.iter_mut().find(|plugin| plugin.kind() == kind)?;
        Some((plugin.get_mut(), Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out }))
    }

    /// Calls `f` for every protocol in use.
    pub(crate) fn each(&mut self, io: &mut Io<'_>, mut f: impl FnMut(&mut dyn Protocol, &mut Cx<'_>)) {
        for plugin in &mut self.plugins {
            let mut cx = Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out };
            f(plugin.get_mut(), &mut cx);
        }
    }

    /// Whether a barrier is over, but its threads wait for the pages that they will read.
    #[must_use]
    pub fn is_entering(&self) -> bool {
        !self.entering.is_empty()
    }

    /// Whether the rank has arrived at a barrier and not left. Operations that begin meanwhile wait until it
    /// leaves.
    #[must_use]
    pub fn is_at_barrier(&self) -> bool {
        self.barrier.is_inside()
    }

    /// Whether pages fetched ahead are on their way.
    pub(crate) fn fetches_ahead(&self) -> bool {
        self.plugins.iter().any(|plugin| plugin.get().fetches_ahead())
    }

    /// Sends to any rank, this one included.
    pub(crate) fn send(&mut self, io: &mut Io<'_>, to: Rank, body: Body) {
        Cx { shared: &mut self.shared, mem: &mut *io.mem, out: &mut *io.out }.send(to, body);
    }

    /// Whether nothing is in flight that still needs a message or an acknowledgement.
    #[must_use]
    pub fn is_quiescent(&self) -> bool {
        self.parked.is_empty()
            && self.pending.is_empty()
            && self.deferred.is_empty()
            && self.unacked == 0
            && self.awaited.is_empty()
            && self.words.is_empty()
            && self.directs.is_empty()
            && self.entering.is_empty()
            && !self.fetches_ahead()
            && self.shared.flushes.settled(0, u64::MAX)
    }

    /// Checks the invariants between events.
    ///
    /// # Panics
    /// If it does not.
    pub fn check(&self) {
        if self.failed.is_some() {
            return;
        }
        assert!(self.shared.loopback.is_empty(), "a rank's messages to itself are handled at once");
        for (_, message) in &self.parked {
            assert!(
                message.epoch > self.shared.epoch || self.barrier.is_inside(),
                "a parked message's time has come"
            );
        }
        for (lock, node) in self.locks.iter() {
            node.check(lock, self.owed.contains_key(&lock));
        }
        for (lock, manager) in self.managed.iter() {
            manager.check(lock);
        }
        for plugin in &self.plugins {
            plugin.get().check(&self.shared);
        }
        assert!(self.entering.is_empty() || self.fetches_ahead(), "threads wait for nothing");
        assert!(
            !self.barrier.is_inside() || !self.fetches_ahead(),
            "a rank that is at a barrier has what it asked for"
        );
    }
}

enum Subject {
    Page(PageIndex),
    Protocol(ProtocolKind),
    /// It concerns pages, but there are none in it.
    None,
}

/// The subject of a message of the page protocols; `None` for messages of the synchronisation core.
fn page_of(body: &Body) -> Option<Subject> {
    Some(match body {
        Body::ScRequest { page, .. }
        | Body::ScForward { page, .. }
        | Body::ScData { page, .. }
        | Body::ScInvalidate { page, .. }
        | Body::ScAck { page }
        | Body::ScDone { page, .. }
        | Body::ScMove { page, .. }
        | Body::GetPage { page, .. }
        | Body::DiffRequest { page, .. }
        | Body::Diffs { page, .. }
        | Body::HomePull { page, .. } => Subject::Page(*page),
        Body::Page { copy } | Body::HomeMove { copy } => Subject::Page(copy.page),
        Body::Flush { protocol, .. } | Body::FlushAck { protocol, .. } => Subject::Protocol(*protocol),
        Body::GetPages { pages } => pages.first().map_or(Subject::None, |&first| Subject::Page(first)),
        Body::Pages { copies } | Body::Push { copies } => {
            copies.first().map_or(Subject::None, |first| Subject::Page(first.page))
        }
        Body::Direct { accesses, .. } => {
            accesses.first().map_or(Subject::None, |first| Subject::Page(first.page))
        }
        Body::Update { diffs } => diffs.first().map_or(Subject::None, |first| Subject::Page(first.page)),
        Body::Log { .. } => Subject::Protocol(ProtocolKind::Ibec),
        _ => return None,
    })
}
