//! What spans several servers: operations that are cut into parts, and all sessions together.

use std::time::Duration;

use rampool_paging::placement::{Holders, Placement, ServerIndex};
use rampool_wire::frame::{Opcode, RegionId};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use crate::io::{Ask, Class, Input, Lost, OpId, Output, RequestId, Time};
use crate::rule::Rule;
use crate::session::Session;
use crate::work::{Orphaned, Request, Work};

/// How often the sessions' deadlines are looked at, however often the shell tells the time.
const CHECK_EVERY: Duration = Duration::from_micros(100);

/// A client's sessions with all servers of a pool, and what it has under way there.
#[derive(Debug, Default)]
pub struct Client {
    sessions: Vec<Session>,
    work: Work,
    now: Time,
    check_at: Time,
    /// While an operation is cut up: of each group of holders the request that still has room, with its first page
    /// and how many.
    open: Vec<Option<(RequestId, PageIndex, u32)>>,
    /// The servers that hold the same pages, where there are two copies.
    pairs: Vec<Holders>,
}

/// Pages of an operation: what is asked for, at most so many in one request.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    pub op: OpId,
    pub opcode: Opcode,
    pub class: Class,
    pub limit: u32,
}

/// What a request made by [`Client::submit_pages`] is about.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// These pages, which so many of the extent come before. `new`: it has none yet.
    Pages { request: RequestId, new: bool, extent: Extent, before: u32 },
    /// All pages of `like`, which is complete: to be stored by another server as well.
    Same { request: RequestId, like: RequestId },
}

impl Client {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Leaves a rule out.
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: crate::rule::Rule) {
        self.work.rules.omit(rule);
    }

    /// A session with one more server, over a connection that is there: number 0 of that server.
    pub fn add_server(&mut self, op_deadline: Duration, now: Time) -> ServerIndex {
        let server = ServerIndex(u16::try_from(self.sessions.len()).expect("fewer than 65536 servers"));
        self.sessions.push(Session::new(server, op_deadline, now));
        server
    }

    /// Says which servers hold the same pages: once, when all servers are there.
    pub fn place(&mut self, placement: &Placement) {
        self.open = vec![None; placement.pairs().len()];
        self.pairs = placement.pairs().iter().copied().filter(|pair| pair.copy.is_some()).collect();
        self.look_for_spares();
    }

    /// Whether each page has a holder that is not lost.
    #[must_use]
    pub fn has_all_pages(&self) -> bool {
        let mut pairs = self.pairs.iter();
        if self.pairs.is_empty() {
            !self.sessions.iter().any(is_lost)
        } else {
            pairs.all(|pair| self.holds(pair))
        }
    }

    fn holds(&self, pair: &Holders) -> bool {
        pair.iter().any(|server| !is_lost(&self.sessions[server.as_usize()]))
    }

    fn look_for_spares(&mut self) {
        for index in 0..self.sessions.len() {
            let is_other = |server: &ServerIndex| server.as_usize() != index;
            let mut others = self
                .pairs
                .iter()
                .filter(|pair| pair.iter().any(|server| !is_other(&server)))
                .flat_map(|pair| pair.iter().filter(is_other))
                .peekable();
            let paired = others.peek().is_some();
            let spare = paired && others.all(|server| !is_lost(&self.sessions[server.as_usize()]));
            self.sessions[index].set_spare(spare, paired);
        }
    }

    /// Forgets the servers for which `keep` is false. Nothing may be under way; the others are numbered anew.
    ///
    /// # Panics
    /// If something is under way.
    pub fn retain(&mut self, mut keep: impl FnMut(ServerIndex) -> bool) {
        assert!(self.sessions.iter().all(|session| session.load() == (0, 0, 0)), "something is under way");
        let mut before = 0..;
        self.sessions.retain(|_| keep(ServerIndex(before.next().expect("endless"))));
        for (index, session) in (0..).zip(&mut self.sessions) {
            session.renamed(ServerIndex(index));
        }
    }

    #[must_use]
    pub fn session(&self, server: ServerIndex) -> &Session {
        &self.sessions[server.as_usize()]
    }

    pub fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.sessions.iter()
    }

    // --- Submitting ------------------------------------------------------------------------------------------------

    /// A new operation. Submit its parts, then tell [`Input::Sealed`].
    pub fn begin(&mut self, token: u64, store: bool) -> OpId {
        self.work.begin(token, store)
    }

    /// A place for a request. Make its body, then tell [`Input::Submit`].
    pub fn reserve(&mut self) -> RequestId {
        self.work.reserve()
    }

    /// Cuts the pages of an extent into requests to the servers that hold them; full ones are submitted. What is stored
    /// goes to all holders, what is fetched comes from one. `fill` hears which pages go into which request. After the
    /// last extent: [`Client::close_pages`]. `placement` is that of [`Client::place`].
    pub fn submit_pages(
        &mut self,
        now: Time,
        placement: &Placement,
        names: &[RegionId],
        pages: Pages,
        extent: Extent,
        mut fill: impl FnMut(Fill),
    ) {
        self.now = now;
        let mut before = 0;
        for (group, mut piece) in placement.split_groups(extent) {
            let holders = placement.pairs()[usize::from(group.0)];
            let limit = self.request_limit(holders, pages.limit);
            while piece.count > 0 {
                let open = self.open[usize::from(group.0)].take();
                let (id, first, count) = open.unwrap_or_else(|| (self.work.reserve(), piece.first, 0));
                let fits = piece.count.min(limit - count);
                let extent = Extent::new(piece.first, fits);
                fill(Fill::Pages { request: id, new: count == 0, extent, before });
                before += fits;
                piece = Extent::new(piece.first.offset(u64::from(fits)), piece.count - fits);
                if count + fits == limit {
                    self.submit_part(holders, names, pages, (id, first, count + fits), &mut fill);
                } else {
                    self.open[usize::from(group.0)] = Some((id, first, count + fits));
                }
            }
        }
    }

    /// Submits the requests of [`Client::submit_pages`] that still have room.
    pub fn close_pages(
        &mut self,
        placement: &Placement,
        names: &[RegionId],
        pages: Pages,
        mut fill: impl FnMut(Fill),
    ) {
        for group in 0..self.open.len() {
            if let Some(open) = self.open[group].take() {
                self.submit_part(placement.pairs()[group], names, pages, open, &mut fill);
            }
        }
    }

    /// Pages of one request that each of its holders takes.
    fn request_limit(&self, holders: Holders, limit: u32) -> u32 {
        let of = |server: ServerIndex| &self.sessions[server.as_usize()];
        let most = if self.work.rules.keep(Rule::FitsBoth) { 2 } else { 1 };
        let live = holders.iter().take(most).filter(|server| !is_lost(of(*server)));
        live.map(|server| of(server).max_pages(limit)).min().unwrap_or(limit)
    }

    fn submit_part(
        &mut self,
        holders: Holders,
        names: &[RegionId],
        pages: Pages,
        (id, first, count): (RequestId, PageIndex, u32),
        fill: &mut impl FnMut(Fill),
    ) {
        let ask = |server: ServerIndex, other: Option<ServerIndex>| Ask {
            class: pages.class,
            op: Some(pages.op),
            bytes: u64::from(count) * OS_PAGE_BYTES as u64,
            at: first.0,
            other: other.map(|other| (other, names[other.as_usize()])),
            ..Ask::control(server, pages.opcode, names[server.as_usize()])
        };
        let of = |server: ServerIndex| &self.sessions[server.as_usize()];
        let (first, other) = match holders.copy {
            Some(copy) if is_lost(of(copy)) => (holders.home, None),
            Some(copy) if is_lost(of(holders.home)) => (copy, None),
            Some(copy)
                if pages.opcode == Opcode::Get && of(copy).is_well() && !of(holders.home).is_well() =>
            {
                (copy, Some(holders.home))
            }
            copy => (holders.home, copy),
        };
        if let Some(other) = other.filter(|_| pages.opcode != Opcode::Get)
            && self.work.rules.keep(Rule::StoreAtAll)
        {
            let same = self.work.reserve();
            fill(Fill::Same { request: same, like: id });
            let mut ask = ask(other, Some(first));
            if !self.work.rules.keep(Rule::AwaitAll) {
                ask.op = None;
            }
            self.submit(same, ask);
        }
        self.submit(id, ask(first, other));
        self.settle();
    }

    #[inline]
    fn submit(&mut self, id: RequestId, ask: Ask) {
        self.work.submit(id, ask, self.now);
        self.sessions[ask.server.as_usize()].enqueue(&mut self.work, id);
    }

    // --- Several holders -------------------------------------------------------------------------------------------

    /// Decides about requests that got no use of their server: what is fetched comes from another holder, what is
    /// stored is stored if another holder is left, and everything else fails.
    #[inline]
    fn settle(&mut self) {
        if self.work.lost_one || self.work.well_again || !self.work.orphans.is_empty() {
            self.settle_orphans();
        }
    }

    fn settle_orphans(&mut self) {
        if std::mem::take(&mut self.work.lost_one) {
            self.look_for_spares();
        }
        if std::mem::take(&mut self.work.well_again) {
            // What waits for a server that is not well may have another one now.
            let Self { sessions, work, .. } = self;
            sessions.iter_mut().filter(|of| !of.is_well()).for_each(|session| session.turn_away(work));
        }
        while let Some((id, why)) = self.work.orphans.pop_front() {
            let request = *self.work.get(id);
            let Ask { server, opcode, op, other, .. } = request.ask;
            let other = other.map(|(other, _)| other);
            let away = matches!(why, Orphaned::Away);
            let of = |server: ServerIndex| &self.sessions[server.as_usize()];
            let takes = other.filter(|other| if away { of(*other).is_well() } else { !is_lost(of(*other)) });
            let keep = |rule| self.work.rules.keep(rule);
            match (why, takes) {
                (_, Some(other)) if opcode == Opcode::Get && (away || keep(Rule::FetchFromOther)) => {
                    if away {
                        self.sessions[server.as_usize()].moves(&self.work, id);
                    }
                    self.work.turn_to_other(id, !away);
                    self.sessions[other.as_usize()].enqueue(&mut self.work, id);
                    continue;
                }
                (Orphaned::Away, _) => {
                    self.sessions[server.as_usize()].keeps(&self.work, id);
                    continue;
                }
                // The other holder has a request of its own.
                (Orphaned::Lost(_), Some(_)) if opcode == Opcode::Put && keep(Rule::OneHolderSuffices) => {}
                (Orphaned::Lost(_), None) if opcode == Opcode::Put && !keep(Rule::OneHolderIsNeeded) => {}
                (Orphaned::Lost(reason), _) => {
                    op.inspect(|op| self.work.op_lost(*op, server, request.what(), reason));
                }
                (Orphaned::Damaged(page), _) => {
                    op.inspect(|op| self.work.op_corrupt(*op, server, page));
                    let (link, number) = (of(server).attempt(), self.work.number(id));
                    let ended = Output::Answered { link, request: id, number, wanted: false, refused: false };
                    self.work.outputs.push_back(ended);
                }
            }
            self.work.finish(id);
        }
    }

    /// The number of a request on the wire.
    #[must_use]
    pub fn number(&self, id: RequestId) -> u64 {
        self.work.number(id)
    }

    /// Whether the request of this number is under way.
    #[must_use]
    pub fn is_under_way(&self, number: u64) -> bool {
        self.work.find(number).is_some()
    }

    /// A request that is under way.
    #[must_use]
    pub fn request(&self, id: RequestId) -> &Request {
        self.work.get(id)
    }

    /// The shell does not wait for the reply of this number any more. False: it has come.
    pub fn forget(&mut self, number: u64) -> bool {
        let id = self.work.find(number);
        if let Some(id) = id {
            self.work.get_mut(id).ask.wanted = false;
        }
        id.is_some()
    }

    /// Operations that have not ended.
    #[must_use]
    pub fn ops_under_way(&self) -> usize {
        self.work.ops_under_way()
    }

    // --- The machine -----------------------------------------------------------------------------------------------

    /// Something happened. [`Client::poll`] has what follows.
    #[inline]
    pub fn handle(&mut self, now: Time, input: Input) {
        self.now = now;
        let Self { sessions, work, .. } = self;
        match input {
            Input::Submit(id, ask) => self.submit(id, ask),
            Input::Sealed(op) => work.sealed(op),
            Input::Queued { link, waiting, by_key, request } => {
                sessions[link.server.as_usize()].queued(work, link, waiting, by_key, request);
            }
            Input::Pointless { link, request } => {
                sessions[link.server.as_usize()].pointless(work, link, request)
            }
            Input::Written { link, waiting } => sessions[link.server.as_usize()].written(link, waiting, now),
            Input::Departed { number } => {
                if let Some(id) = work.find(number) {
                    work.get_mut(id).departed = true;
                }
            }
            Input::Head { link, header } => sessions[link.server.as_usize()].head(work, link, &header, now),
            Input::Body { link, request, damaged } => {
                sessions[link.server.as_usize()].body(work, link, request, damaged, now);
            }
            Input::Drained { link, all } => sessions[link.server.as_usize()].drained(link, all),
            Input::Down { link, why } => sessions[link.server.as_usize()].down(work, link, why, now),
            Input::Connected { link } => sessions[link.server.as_usize()].connected(work, link),
            Input::Failed { link, why } => sessions[link.server.as_usize()].failed(work, link, why, now),
            Input::Attached { link, header, grant } => {
                sessions[link.server.as_usize()].attached(work, link, &header, grant, now);
            }
            Input::Granted { server, grant, reconnects } => {
                let session = &mut sessions[server.as_usize()];
                session.granted(&grant, work);
                session.set_reconnects(reconnects);
            }
            Input::StayAway => sessions.iter_mut().for_each(|session| session.set_reconnects(false)),
            Input::Lose { server } => sessions[server.as_usize()].lose(work, Lost::Connection),
            Input::Time => self.time(now),
        }
        self.settle();
    }

    fn time(&mut self, now: Time) {
        if now >= self.check_at {
            self.check_at = now + CHECK_EVERY;
            for index in 0..self.sessions.len() {
                self.sessions[index].time(&mut self.work, now);
                // Before the next one: it may have become the only one that has some pages.
                self.settle();
            }
        }
    }

    /// What to do next; `None`: nothing until something happens.
    #[inline]
    pub fn poll(&mut self) -> Option<Output> {
        if let Some(output) = self.work.outputs.pop_front() {
            return Some(output);
        }
        let (work, now) = (&mut self.work, self.now);
        self.sessions.iter_mut().find_map(|session| session.next_to_send(work, now))
    }

    /// When [`Input::Time`] is due at the latest; perhaps in the past.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let soonest = self.sessions.iter().filter_map(|session| session.next_timeout(&self.work)).min();
        // What has arrived and was not looked at does not wait.
        soonest.map(|due| if due == Time(0) { due } else { due.max(self.check_at) })
    }

    /// Checks what must hold between two inputs.
    ///
    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        self.work.check();
        assert!(self.work.orphans.is_empty(), "every request has a server");
        self.sessions.iter().for_each(|session| session.check(&self.work));
    }
}

fn is_lost(session: &Session) -> bool {
    session.lost().is_some()
}
