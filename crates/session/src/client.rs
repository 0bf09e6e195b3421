//! What spans several servers: operations that are cut into parts, and all sessions together.

use std::time::Duration;

use rampool_paging::placement::{Placement, ServerIndex};
use rampool_wire::frame::{Opcode, RegionId};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use crate::io::{Ask, Class, Input, Lost, OpId, Output, RequestId, Time};
use crate::session::Session;
use crate::work::{Request, Work};

/// How often the sessions' deadlines are looked at, however often the shell tells the time.
const CHECK_EVERY: Duration = Duration::from_micros(100);

/// A client's sessions with all servers of a pool, and what it has under way there.
#[derive(Debug, Default)]
pub struct Client {
    sessions: Vec<Session>,
    work: Work,
    now: Time,
    check_at: Time,
    /// While an operation is cut up: the request to each server that still has room, with its first page and how many.
    open: Vec<Option<(RequestId, PageIndex, u32)>>,
}

/// Pages of an operation: what is asked for, at most so many in one request.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    pub op: OpId,
    pub opcode: Opcode,
    pub class: Class,
    pub limit: u32,
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
        self.open.push(None);
        server
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
        self.open.truncate(self.sessions.len());
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

    /// Cuts the pages of an extent into requests to the servers that hold them; full ones are submitted. `fill` hears
    /// which pages go into which request: the request, whether it is new, the pages, and how many of the extent come
    /// before them. After the last extent: [`Client::close_pages`].
    pub fn submit_pages(
        &mut self,
        now: Time,
        placement: &Placement,
        names: &[RegionId],
        pages: Pages,
        extent: Extent,
        mut fill: impl FnMut(RequestId, bool, Extent, u32),
    ) {
        self.now = now;
        let mut before = 0;
        for (server, mut piece) in placement.split(extent) {
            let limit = self.sessions[server.as_usize()].max_pages(pages.limit);
            while piece.count > 0 {
                let open = self.open[server.as_usize()].take();
                let (id, first, count) = open.unwrap_or_else(|| (self.work.reserve(), piece.first, 0));
                let fits = piece.count.min(limit - count);
                fill(id, count == 0, Extent::new(piece.first, fits), before);
                before += fits;
                piece = Extent::new(piece.first.offset(u64::from(fits)), piece.count - fits);
                if count + fits == limit {
                    self.submit_part(server, names, pages, (id, first, count + fits));
                } else {
                    self.open[server.as_usize()] = Some((id, first, count + fits));
                }
            }
        }
    }

    /// Submits the requests of [`Client::submit_pages`] that still have room.
    pub fn close_pages(&mut self, names: &[RegionId], pages: Pages) {
        for server in 0..self.open.len() {
            if let Some(open) = self.open[server].take() {
                let server = ServerIndex(u16::try_from(server).expect("fewer than 65536 servers"));
                self.submit_part(server, names, pages, open);
            }
        }
    }

    fn submit_part(
        &mut self,
        server: ServerIndex,
        names: &[RegionId],
        pages: Pages,
        (id, first, count): (RequestId, PageIndex, u32),
    ) {
        let ask = Ask {
            class: pages.class,
            op: Some(pages.op),
            bytes: u64::from(count) * OS_PAGE_BYTES as u64,
            at: first.0,
            ..Ask::control(server, pages.opcode, names[server.as_usize()])
        };
        self.submit(id, ask);
    }

    #[inline]
    fn submit(&mut self, id: RequestId, ask: Ask) {
        self.work.submit(id, ask, self.now);
        self.sessions[ask.server.as_usize()].enqueue(&mut self.work, id);
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
    }

    fn time(&mut self, now: Time) {
        if now >= self.check_at {
            self.check_at = now + CHECK_EVERY;
            for session in &mut self.sessions {
                session.time(&mut self.work, now);
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
        self.sessions.iter().for_each(|session| session.check(&self.work));
    }
}
