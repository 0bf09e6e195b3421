//! What spans several servers: operations that are cut into parts, and all sessions together.

use std::sync::Arc;
use std::time::Duration;

use rampool_paging::page_set::PageSet;
use rampool_paging::placement::{Holders, Placement, ServerIndex};
use rampool_wire::frame::{Opcode, RegionId};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use crate::copies::{Copies, HandedOver, History, Piece, Region, Step, sources};
use crate::hedge::Budget;
use crate::io::{Ask, Class, Input, LinkId, Lost, OpId, Output, RequestId, Time};
use crate::rule::Rule;
use crate::session::{DEADLINES, Session};
use crate::work::{Orphaned, Request, Work};

/// How often the sessions' deadlines are looked at, however often the shell tells the time.
const CHECK_EVERY: Duration = Duration::from_micros(100);
/// Others take the place of a server that has been away for so long. One that is restarted is mostly back
/// before.
pub const REBUILD_AFTER: Duration = Duration::from_secs(5);

/// A client's sessions with all servers of a pool, and what it has under way there.
#[derive(Debug, Default)]
pub struct Client {
    sessions: Vec<Session>,
    work: Work,
    now: Time,
    check_at: Time,
    /// While an operation is cut up: of each group of holders the request that still has room, with its first
    /// page and how many.
    open: Vec<Option<(RequestId, PageIndex, u32)>>,
    copies: Copies,
    budget: Budget,
    /// Since when each server is away.
    away: Vec<Option<Time>>,
    /// An operation is being cut up: holders stay.
    cuts: bool,
    /// A server drains.
    drains: bool,
    /// It is not taken leave of.
    stays: bool,
}

/// Pages of an operation: what is asked for, at most so many in one request.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// The region, as it is called in [`Client::open_region`].
    pub of: u32,
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
        self.now = now;
        let server = ServerIndex(u16::try_from(self.sessions.len()).expect("fewer than 65536 servers"));
        self.sessions.push(Session::new(server, op_deadline, now));
        server
    }

    /// A session with one more server, which cannot be reached now. It is joined as soon as it can.
    pub fn add_absent(&mut self, op_deadline: Duration, now: Time) -> ServerIndex {
        let server = self.add_server(op_deadline, now);
        self.sessions[server.as_usize()] = Session::absent(server, op_deadline, now);
        server
    }

    /// Says which servers hold the same pages: once, when all servers are there.
    pub fn place(&mut self, placement: &Placement) {
        self.copies.place(placement, self.sessions.len());
        self.open = vec![None; placement.pairs().len()];
        self.look_who_is_away();
        self.look_for_spares();
    }

    /// As [`Client::place`], for a client whose regions have one copy in a lease whose pages may have two: it
    /// waits for servers as if these were not.
    pub fn place_alone(&mut self, placement: &Placement) {
        self.copies.place_alone(placement, self.sessions.len());
        self.open = vec![None; self.copies.placement.pairs().len()];
        self.look_who_is_away();
    }

    /// One more server, which lends so much. It is used once it is there.
    pub fn grow(&mut self, op_deadline: Duration, now: Time, weight: u64) -> ServerIndex {
        let server = self.add_absent(op_deadline, now);
        self.copies.grow(server, weight);
        self.look_who_is_away();
        server
    }

    /// Others have taken the place of these servers, where they are away.
    pub fn begin_without(&mut self, out: &[bool]) {
        let is_out = |(index, before): (usize, &bool)| {
            *before || self.away[index].is_some() && out.get(index) == Some(&true)
        };
        let out: Vec<bool> = self.copies.out.iter().enumerate().map(is_out).collect();
        if self.copies.tracked && out.contains(&false) && out != self.copies.out {
            self.hold_without(out);
            self.settle();
        }
    }

    /// Which servers hold which pages now.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.copies.placement
    }

    /// Whether the server is to hold no pages for now: it drains, or others have taken its place.
    #[must_use]
    pub fn is_out(&self, server: ServerIndex) -> bool {
        self.copies.out.get(server.as_usize()) == Some(&true)
    }

    fn pairs(&self) -> &[Holders] {
        if self.copies.tracked { self.copies.placement.pairs() } else { &[] }
    }

    fn servers(&self) -> impl Iterator<Item = ServerIndex> + use<> {
        (0..).take(self.sessions.len()).map(ServerIndex)
    }

    fn look_who_is_away(&mut self) {
        self.away.resize(self.sessions.len(), None);
        for (away, session) in self.away.iter_mut().zip(&self.sessions) {
            *away = (!session.takes_part()).then(|| away.unwrap_or(self.now));
        }
    }

    /// Which servers should be out. The last one that can hold pages never is.
    fn wanted_out(&self) -> Vec<bool> {
        let keep = |rule| self.work.rules.keep(rule);
        let usable = |session: &&Session| session.takes_part() && !session.is_draining();
        let usable = self.sessions.iter().filter(usable).count();
        let copies = if keep(Rule::RebuildsWhereOthersAre) { 2 } else { 0 };
        let is_out = |(index, session): (usize, &Session)| {
            let was_out = self.copies.out[index];
            match self.away[index] {
                None if session.is_draining() && keep(Rule::DrainingIsOut) => {
                    session.leaves() || usable > 0 || !keep(Rule::LastOneStays)
                }
                None => false,
                Some(_) if was_out => true,
                Some(since) => {
                    usable >= copies && keep(Rule::Rebuilds) && self.now >= since + self.rebuild_after()
                }
            }
        };
        self.sessions.iter().enumerate().map(is_out).collect()
    }

    fn rebuild_after(&self) -> Duration {
        if self.work.rules.keep(Rule::RebuildsLate) { REBUILD_AFTER } else { Duration::ZERO }
    }

    /// Looks whether pages are to have other holders.
    fn look_who_holds(&mut self) {
        self.look_who_is_away();
        self.drains = self.sessions.iter().any(Session::is_draining);
        if !self.copies.tracked || self.cuts {
            return;
        }
        let out = self.wanted_out();
        if out != self.copies.out {
            self.hold_without(out);
        }
    }

    fn hold_without(&mut self, out: Vec<bool>) {
        for (server, (now, before)) in self.servers().zip(out.iter().zip(&self.copies.out)) {
            if now != before {
                self.work.outputs.push_back(Output::Holds { server, out: *now });
            }
        }
        self.copies.turn(out, self.work.rules);
        self.open = vec![None; self.copies.placement.pairs().len()];
        self.work.turns += 1;
        (self.work.changed, self.work.well_again) = (true, true);
        self.look_at_all();
    }

    /// From now on this client stays at servers that drain, or not: others may need it there.
    pub fn stay(&mut self, stays: bool) {
        self.stays = stays;
    }

    /// Takes leave of servers that drain, where nothing of this client is left.
    fn leave(&mut self) {
        if self.stays {
            return;
        }
        for server in self.servers() {
            let session = &self.sessions[server.as_usize()];
            let is_used = |region: &Region| !region.placed && !region.is_absent(server);
            let ready = self.is_out(server) && session.may_leave(self.now);
            let empty = !self.copies.has_left(server) || !self.work.rules.keep(Rule::LeavesEmpty);
            if ready && empty && !self.copies.regions.values().any(is_used) && !session.has_write_backs() {
                let id = self.work.reserve();
                let ask = Ask::control(server, Opcode::Goodbye, RegionId(0));
                self.sessions[server.as_usize()].leaving(&self.work, id);
                self.work.outputs.push_back(Output::Piece { request: id, piece: 0, pages: NO_PAGES });
                self.submit(id, Ask { class: Class::WriteBack, ..ask });
            }
        }
    }

    /// Whether each page has a holder that is there. Some may have missed some pages.
    #[must_use]
    pub fn has_all_pages(&self) -> bool {
        if !self.copies.tracked {
            return self.sessions.iter().all(Session::takes_part);
        }
        let is_there = |server: ServerIndex| self.sessions[server.as_usize()].takes_part();
        self.pairs().iter().all(|pair| pair.iter().any(is_there))
    }

    /// Whether a server is there, and knows all regions: others can be done without, but for what it has
    /// missed.
    fn fills_in(&self, server: ServerIndex) -> bool {
        let behind = self.copies.is_behind(server) && !self.work.rules.keep(Rule::SpareByPages);
        self.sessions[server.as_usize()].takes_part() && self.copies.are_named(server) && !behind
    }

    fn look_for_spares(&mut self) {
        for index in 0..self.sessions.len() {
            let server = ServerIndex(u16::try_from(index).expect("few"));
            // One that is out has left something of all, perhaps.
            let is_out = self.is_out(server);
            let pairs = || self.pairs().iter().filter(|pair| is_out || pair.has(server));
            let others = |pair: &Holders| pair.iter().filter(|of| *of != server);
            let takes_part = |other: ServerIndex| self.takes_part(other);
            let loses = |other: ServerIndex| {
                self.copies.is_behind(other) && !self.work.rules.keep(Rule::LosesPagesOnly)
            };
            let paired = pairs().any(|pair| others(pair).next().is_some());
            let spare = paired && pairs().all(|pair| others(pair).any(|other| self.fills_in(other)));
            let is_empty =
                is_out && !self.copies.has_left(server) && self.work.rules.keep(Rule::NothingLeftIsNotLost);
            // Where it holds pages alone, one that drains may hold them again.
            let any = self.servers().any(|of| of != server && takes_part(of));
            let is_kept = is_empty
                || pairs().next().is_some()
                    && pairs().all(|pair| {
                        let alone = pair.copy.is_none() && any;
                        alone || others(pair).any(|other| takes_part(other) && !loses(other))
                    });
            let behind = self.copies.lacks(server);
            self.sessions[index].set_spare(spare, is_kept, paired, behind, self.now);
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

    // --- Regions
    // ---------------------------------------------------------------------------------------------------

    /// A region by a number of the caller's, with its name at each server. `history`: what is known of its
    /// pages, where these have the holders that placement says.
    pub fn open_region(&mut self, now: Time, of: u32, names: Vec<RegionId>, history: Option<History>) {
        self.now = now;
        let placed = history.is_some();
        let history = self.copies.own(history.unwrap_or_default(), self.work.rules);
        let mut region = Region { names, placed, history };
        region.fit(self.sessions.len());
        for (server, session) in self.servers().zip(&self.sessions) {
            // It goes with what was said there.
            region.forget_at(server, session.leaves());
        }
        self.copies.drop_anew(&region);
        self.copies.regions.insert(of, region);
        self.work.changed = true;
        self.look_at_all();
        self.settle();
    }

    /// The region is not used any more; it may have to be freed at the servers.
    pub fn close_region(&mut self, of: u32) -> Option<Region> {
        let region = self.copies.regions.remove(&of)?;
        self.copies.changing(of, Extent::new(PageIndex(0), u32::MAX));
        self.work.changed = true;
        self.look_at_all();
        self.settle();
        Some(region)
    }

    /// The region goes to another process, for [`Client::take_over`]; this one forgets it. With it: what it
    /// is called where that process cannot have it, and where it is to be freed.
    pub fn hand_over(&mut self, of: u32) -> Option<(HandedOver, Vec<RegionId>)> {
        let history = self.history(of).unwrap_or_default();
        let region = self.close_region(of)?;
        let named = |there: bool| {
            let names = region.names.iter().zip(&self.sessions);
            let name = |(name, session): (&RegionId, &Session)| match session.takes_part() == there {
                true => *name,
                false => RegionId(0),
            };
            names.map(name).collect::<Vec<_>>()
        };
        let left = match self.work.rules.keep(Rule::FreesWhatIsLeft) {
            true => named(false),
            false => Vec::new(),
        };
        Some((HandedOver { names: named(true), history }, left))
    }

    /// What may not have been taken of a region that was handed over, by the name at each server: to be
    /// freed once the other process has taken what it can. What it has taken, only that process can free.
    #[must_use]
    pub fn not_taken(&self, handed: &HandedOver) -> Vec<RegionId> {
        match self.work.rules.keep(Rule::FreesWhatIsNotTaken) {
            true => handed.names.clone(),
            false => Vec::new(),
        }
    }

    /// Goes on with the region of another process. `taken`: at which servers it is this one's now. False:
    /// some pages have no holder here.
    pub fn take_over(&mut self, now: Time, of: u32, handed: &HandedOver, taken: &[bool]) -> bool {
        let names = handed.taken_names(taken);
        let mut history = handed.history.clone();
        if !self.work.rules.keep(Rule::MissedIsTakenOver) {
            history.missed.clear();
        }
        self.now = now;
        let complete = self.is_complete(&names, &history);
        if complete {
            self.open_region(now, of, names, Some(history));
        }
        complete
    }

    /// What servers have missed that hold pages while none is out.
    #[must_use]
    pub fn as_placed(&self, history: History) -> History {
        self.copies.as_placed(history, self.work.rules)
    }

    #[must_use]
    pub fn region(&self, of: u32) -> Option<&Region> {
        self.copies.regions.get(&of)
    }

    /// What another region has missed that is made of this one as it is now, or this one for another process.
    #[must_use]
    pub fn history(&self, of: u32) -> Option<History> {
        let region = self.copies.regions.get(&of).filter(|region| region.placed)?;
        let mut history = region.history.clone();
        if !self.work.rules.keep(Rule::MissedIsInherited) {
            history.missed.clear();
        }
        history.out = self.copies.told_out();
        // As a ticket carries it.
        for sets in [&mut history.missed, &mut history.left] {
            while sets.last().is_some_and(PageSet::is_empty) {
                sets.pop();
            }
        }
        Some(history)
    }

    /// Whether each page of a region with these names and this history has a holder that is there. Those do
    /// not count that no holder has which is there or waited for.
    #[must_use]
    pub fn is_complete(&self, names: &[RegionId], history: &History) -> bool {
        if names.len() > self.sessions.len() {
            return false;
        }
        let history = self.copies.own(history.clone(), self.work.rules);
        let named = |server: &ServerIndex| {
            let name = names.get(server.as_usize()).is_some_and(|name| name.0 != 0);
            name && self.sessions[server.as_usize()].takes_part()
        };
        let has_all = |server: ServerIndex| {
            named(&server) && history.missed.get(server.as_usize()).is_none_or(PageSet::is_empty)
        };
        let is_out = |server: ServerIndex| {
            let session = &self.sessions[server.as_usize()];
            !session.takes_part() && !session.is_awaited(&self.work, self.now)
        };
        self.pairs().iter().all(|pair| {
            let mut holders = pair.iter();
            let all = pair.iter().all(|server| named(&server) || is_out(server));
            holders.any(|server| named(&server)) && (all || pair.iter().any(has_all))
        })
    }

    /// Pages that the server has missed, and that it is to get; and pages of all regions.
    #[must_use]
    pub fn missed_pages(&self, server: ServerIndex) -> (u64, u64) {
        (self.copies.missed_pages(server), self.copies.stored_pages())
    }

    /// Whether the server has missed this page.
    #[must_use]
    pub fn has_missed(&self, server: ServerIndex, of: u32, page: PageIndex) -> bool {
        self.region(of).is_none_or(|region| region.has_missed(server, &[Extent::page(page)]))
    }

    /// Whether the server has this page as it is now, as a holder or not.
    #[must_use]
    pub fn has_page(&self, server: ServerIndex, of: u32, page: PageIndex) -> bool {
        self.region(of).is_some_and(|region| region.has(server, &[Extent::page(page)], self.placement()))
    }

    /// Pages that lie at servers that do not hold them any more.
    #[must_use]
    pub fn left_pages(&self, server: ServerIndex) -> u64 {
        self.copies.regions.values().map(|region| region.history.left[server.as_usize()].pages()).sum()
    }

    /// Whether no holder of this page has it that is there or waited for.
    #[must_use]
    pub fn is_gone(&self, of: u32, page: PageIndex) -> bool {
        let has = |server: ServerIndex| {
            let session = &self.sessions[server.as_usize()];
            let is_there = session.takes_part() || session.is_awaited(&self.work, self.now);
            is_there && self.has_page(server, of, page)
        };
        self.copies.tracked && !self.servers().any(has)
    }

    fn name(&self, of: u32, server: ServerIndex) -> RegionId {
        self.region(of).map_or(RegionId(0), |region| region.names[server.as_usize()])
    }

    fn look_at_all(&mut self) {
        for index in 0..self.sessions.len() {
            self.look_at(ServerIndex(u16::try_from(index).expect("few")));
        }
    }

    /// Looks whether a server has missed something.
    fn look_at(&mut self, server: ServerIndex) {
        let session = &self.sessions[server.as_usize()];
        if session.lost().is_none() && self.copies.look(server, self.now) {
            self.work.changed = true;
            if self.copies.has_all(server) && session.takes_part() {
                self.work.outputs.push_back(Output::CaughtUp { server });
            }
        }
    }

    /// A server has these pages from now on: others that have missed them may get them there.
    fn look_who_lacks(&mut self, of: u32, pages: &[Extent]) {
        for server in self.servers() {
            let region = self.region(of).filter(|region| !region.is_absent(server));
            let lacks = region.is_some_and(|region| region.has_missed(server, pages));
            if lacks && !self.copies.is_behind(server) {
                self.look_at(server);
            }
        }
    }

    // --- Submitting
    // ------------------------------------------------------------------------------------------------

    /// A new operation. Submit its parts, then tell [`Input::Sealed`].
    pub fn begin(&mut self, token: u64, store: bool) -> OpId {
        self.work.begin(token, store)
    }

    /// A place for a request. Make its body, then tell [`Input::Submit`].
    pub fn reserve(&mut self) -> RequestId {
        self.work.reserve()
    }

    /// Cuts the pages of an extent into requests to the servers that hold them; full ones are submitted. What
    /// is stored goes to all holders that are there, what is fetched comes from one. `fill` hears which pages
    /// go into which request. After the last extent: [`Client::close_pages`].
    pub fn submit_pages(&mut self, now: Time, pages: Pages, extent: Extent, mut fill: impl FnMut(Fill)) {
        self.now = now;
        if pages.opcode == Opcode::Put && self.copies.tracked {
            self.copies.stored(pages.of, extent);
            self.changing(pages.of, extent);
        }
        self.cuts = true;
        let placement = Arc::clone(&self.copies.placement);
        let mut before = 0;
        for (group, mut piece) in placement.split_groups(extent) {
            let holders = placement.pairs()[usize::from(group.0)];
            let alone = self.is_read_alone(holders, pages, piece);
            let limit = self.request_limit(holders, pages, piece, alone);
            if let Some(open) = self.open[usize::from(group.0)].take_if(|_| alone) {
                self.submit_part(holders, pages, open, &mut fill);
            }
            while piece.count > 0 {
                let open = self.open[usize::from(group.0)].take();
                if let Some(full) = open.filter(|(.., count)| *count >= limit) {
                    self.submit_part(holders, pages, full, &mut fill);
                    continue;
                }
                let (id, first, count) = open.unwrap_or_else(|| (self.work.reserve(), piece.first, 0));
                let fits = piece.count.min(limit - count);
                let extent = Extent::new(piece.first, fits);
                fill(Fill::Pages { request: id, new: count == 0, extent, before });
                if self.copies.tracked {
                    self.work.pages[id.0 as usize].push(extent);
                }
                before += fits;
                piece = Extent::new(piece.first.offset(u64::from(fits)), piece.count - fits);
                if count + fits == limit || alone && piece.count == 0 {
                    self.submit_part(holders, pages, (id, first, count + fits), &mut fill);
                } else {
                    self.open[usize::from(group.0)] = Some((id, first, count + fits));
                }
            }
        }
    }

    /// Submits the requests of [`Client::submit_pages`] that still have room.
    pub fn close_pages(&mut self, pages: Pages, mut fill: impl FnMut(Fill)) {
        let placement = Arc::clone(&self.copies.placement);
        for group in 0..self.open.len() {
            if let Some(open) = self.open[group].take() {
                self.submit_part(placement.pairs()[group], pages, open, &mut fill);
            }
        }
        self.cuts = false;
    }

    /// Tells the servers that hold these pages that they are not needed; `fill` hears which go into which
    /// request.
    pub fn discard_pages(
        &mut self,
        now: Time,
        of: u32,
        extent: Extent,
        mut fill: impl FnMut(RequestId, Extent),
    ) {
        self.now = now;
        self.changing(of, extent);
        let placement = Arc::clone(&self.copies.placement);
        let mut add = |client: &mut Self, server: ServerIndex, extent: Extent| {
            if client.name(of, server).0 == 0 {
                return;
            }
            let id = client.work.reserve();
            fill(id, extent);
            client.work.pages[id.0 as usize].push(extent);
            let ask = Ask::control(server, Opcode::Discard, client.name(of, server));
            client.submit(id, Ask { class: Class::WriteBack, at: extent.first.0, of, ..ask });
            client.settle();
        };
        if extent.count <= placement.stripe_pages() {
            for (group, piece) in placement.split_groups(extent) {
                placement.pairs()[usize::from(group.0)].iter().for_each(|server| add(self, server, piece));
            }
        } else {
            // One request for each server instead of one for each stripe: pages it does not hold are nothing
            // to it.
            for server in 0..self.sessions.len() {
                add(self, ServerIndex(u16::try_from(server).expect("fewer than 65536 servers")), extent);
            }
        }
    }

    fn changing(&mut self, of: u32, extent: Extent) {
        if self.work.rules.keep(Rule::VoidPiece) {
            self.copies.changing(of, extent);
        }
        if self.work.rules.keep(Rule::LeftIsOutdated) {
            self.copies.outdate(of, extent);
        }
    }

    /// Pages of one request that each of its holders takes.
    fn request_limit(&self, holders: Holders, pages: Pages, extent: Extent, alone: bool) -> u32 {
        let limit = pages.limit;
        let is_behind = |server: ServerIndex| self.copies.is_behind(server);
        if self.copies.tracked && holders.iter().all(is_behind) {
            // One has missed some pages, and the other one others.
            return 1;
        }
        if alone {
            let has_all =
                |server: ServerIndex| self.takes_part(server) && !self.lacks(server, pages.of, extent);
            if !holders.iter().any(has_all) {
                // What is there is not to wait for the rest.
                return 1;
            }
        }
        let of = |server: ServerIndex| &self.sessions[server.as_usize()];
        let most = if self.work.rules.keep(Rule::FitsBoth) { 2 } else { 1 };
        let live = holders.iter().take(most).filter(|server| !is_lost(of(*server)));
        live.map(|server| of(server).max_pages(limit)).min().unwrap_or(limit)
    }

    /// Whether a holder that is there lacks some of what is read, or none is there: it is asked for in
    /// requests of its own, since another server may lack other pages.
    fn is_read_alone(&self, holders: Holders, pages: Pages, extent: Extent) -> bool {
        if pages.opcode != Opcode::Get || !self.copies.tracked {
            return false;
        }
        let lacks = |server: ServerIndex| self.takes_part(server) && self.lacks(server, pages.of, extent);
        let is_left = |region: &Region| {
            self.servers().any(|server| self.takes_part(server) && region.has_left(server, extent))
        };
        // What is left where it is not held any more may be part of it.
        let none_there = || !holders.iter().any(|server| self.takes_part(server));
        holders.iter().any(lacks) || none_there() && self.region(pages.of).is_some_and(is_left)
    }

    fn takes_part(&self, server: ServerIndex) -> bool {
        self.sessions[server.as_usize()].takes_part()
    }

    fn lacks(&self, server: ServerIndex, of: u32, extent: Extent) -> bool {
        self.region(of).is_some_and(|region| region.has_missed(server, &[extent]))
    }

    fn submit_part(
        &mut self,
        holders: Holders,
        pages: Pages,
        (id, first, count): (RequestId, PageIndex, u32),
        fill: &mut impl FnMut(Fill),
    ) {
        let Pages { of, op, opcode, class, .. } = pages;
        let probes = self.may_probe(holders, pages, count);
        let takes = |server: ServerIndex| match opcode {
            Opcode::Get => self.has(server, of, id),
            _ => self.sessions[server.as_usize()].takes_part() && self.name(of, server).0 != 0,
        };
        let at_copy = match holders.copy {
            Some(copy) if takes(copy) && !takes(holders.home) => true,
            // What both have comes from the one that answers in time.
            Some(copy) if takes(copy) && opcode == Opcode::Get => self.prefers(copy, holders.home, probes),
            _ => false,
        };
        let (first_at, other) = match holders.copy.filter(|_| at_copy) {
            Some(copy) => (copy, Some(holders.home)),
            None => (holders.home, holders.copy),
        };
        let ask = |server: ServerIndex, other: Option<ServerIndex>| Ask {
            class,
            op: Some(op),
            bytes: u64::from(count) * OS_PAGE_BYTES as u64,
            at: first.0,
            other,
            of,
            ..Ask::control(server, opcode, self.name(of, server))
        };
        let left = self.source(of, id, |_| true).filter(|_| opcode == Opcode::Get && !takes(first_at));
        let (first_at, other) = left.map_or((first_at, other), |left| (left, Some(first_at)));
        let is_there = left.is_some() || takes(first_at);
        let one = ask(first_at, other);
        let two = other.map(|other| (other, takes(other), ask(other, Some(first_at))));
        if let Some((other, takes, mut ask)) = two.filter(|_| opcode != Opcode::Get)
            && self.work.rules.keep(Rule::StoreAtAll)
        {
            if takes {
                let same = self.work.reserve();
                let extents = self.work.pages[id.0 as usize].clone();
                self.work.pages[same.0 as usize] = extents;
                fill(Fill::Same { request: same, like: id });
                if !self.work.rules.keep(Rule::AwaitAll) {
                    ask.op = None;
                }
                self.submit(same, ask);
            } else if self.work.rules.keep(Rule::MissesWhileAbsent) {
                self.miss(other, of, id);
            }
        }
        if self.copies.tracked && !is_there {
            // No holder is there that has all of it, or knows the region.
            let mut all = self.servers().filter(|_| opcode == Opcode::Get);
            let awaited = all.find(|server| self.awaits(*server, of, id));
            let lost = holders.iter().find(|server| is_lost(&self.sessions[server.as_usize()]));
            let server = awaited.or(lost).unwrap_or(first_at);
            let reason = self.sessions[server.as_usize()].lost().unwrap_or(Lost::Connection);
            let other = holders.iter().find(|holder| *holder != server);
            let region = self.name(of, server);
            self.work.submit(id, Ask { server, other, region, ..one }, self.now);
            self.work.orphans.push_back((id, Orphaned::Lost(reason)));
        } else {
            self.submit(id, one);
        }
        self.settle();
    }

    /// A read is made of what these hold. Whether it may begin at a server that is slow.
    fn may_probe(&mut self, holders: Holders, pages: Pages, count: u32) -> bool {
        if holders.copy.is_none() || (pages.opcode, pages.class) != (Opcode::Get, Class::Demand) {
            return false;
        }
        self.budget.earn();
        let home = &self.sessions[holders.home.as_usize()];
        let is_probed = home.promptness.is_slow() && self.work.rules.keep(Rule::SlowIsProbed);
        is_probed && self.budget.probes() && home.takes_at_once(u64::from(count) * OS_PAGE_BYTES as u64)
    }

    /// Whether the copy is read instead of the home. `probes`: also where the home is slow.
    fn prefers(&self, copy: ServerIndex, home: ServerIndex, probes: bool) -> bool {
        let of = |server: ServerIndex| self.sessions[server.as_usize()].preference(&self.work);
        of(copy) > of(home) && !probes
    }

    /// Whether the server is there and has what the request is for.
    fn has(&self, server: ServerIndex, of: u32, id: RequestId) -> bool {
        let missed = |region: &Region| {
            region.is_absent(server)
                || self.work.rules.keep(Rule::MissedIsNotRead)
                    && region.has_missed(server, &self.work.pages[id.0 as usize])
        };
        self.sessions[server.as_usize()].takes_part() && self.region(of).is_some_and(|region| !missed(region))
    }

    /// A server that is there and has what is fetched, as a holder or not.
    fn source(&self, of: u32, id: RequestId, may: impl Fn(ServerIndex) -> bool) -> Option<ServerIndex> {
        let pages = &self.work.pages[id.0 as usize];
        let (first, region) = (pages.first()?.first, self.region(of)?);
        let has = |server: &ServerIndex| {
            let holds = self.placement().holders(first).has(*server);
            let may = may(*server) && self.takes_part(*server);
            let asks = may && (holds || self.work.rules.keep(Rule::LeftIsRead));
            asks && region.has(*server, pages, self.placement())
        };
        sources(self.placement(), first, self.sessions.len()).find(has)
    }

    /// Whether a server that was asked for the same, or would be, has it: it may not be a holder any more.
    fn has_still(&self, server: ServerIndex, of: u32, id: RequestId, away: bool) -> bool {
        let pages = &self.work.pages[id.0 as usize];
        let had = self.region(of).is_some_and(|region| region.has(server, pages, self.placement()));
        had && self.has(server, of, id) && (!away || self.sessions[server.as_usize()].is_well())
    }

    /// Where a request's pages can be fetched instead.
    fn other_source(&self, id: RequestId, away: bool) -> Option<ServerIndex> {
        let Ask { server, opcode, of, piece, .. } = self.work.get(id).ask;
        let may = |of: ServerIndex| of != server && (!away || self.sessions[of.as_usize()].is_well());
        let fetches = self.copies.tracked && opcode == Opcode::Get && piece.is_none();
        if fetches { self.source(of, id, may) } else { None }
    }

    /// Whether one of two holders is there, or waited for.
    fn is_left(&self, server: ServerIndex, other: Option<ServerIndex>) -> bool {
        let left = |session: &Session| session.takes_part() || session.is_awaited(&self.work, self.now);
        match other {
            Some(other) => [server, other].iter().any(|of| left(&self.sessions[of.as_usize()])),
            None => self.copies.tracked && self.sessions.iter().any(left),
        }
    }

    /// Whether what the request is for is waited for until the server is back.
    fn awaits(&self, server: ServerIndex, of: u32, id: RequestId) -> bool {
        let pages = &self.work.pages[id.0 as usize];
        let has = |region: &Region| region.has(server, pages, self.placement());
        self.sessions[server.as_usize()].is_awaited(&self.work, self.now) && self.region(of).is_some_and(has)
    }

    /// The server does not get the change that the request is.
    fn miss(&mut self, server: ServerIndex, of: u32, id: RequestId) {
        if !is_lost(&self.sessions[server.as_usize()]) {
            self.work.changed |= self.copies.miss(server, of, &self.work.pages[id.0 as usize], self.now);
        }
    }

    #[inline]
    fn submit(&mut self, id: RequestId, ask: Ask) {
        self.work.submit(id, ask, self.now);
        self.sessions[ask.server.as_usize()].enqueue(&mut self.work, id);
    }

    // --- Several holders
    // -------------------------------------------------------------------------------------------

    /// Decides about requests that got no use of their server: what is fetched comes from another holder,
    /// what is stored is stored if another holder is left, and everything else fails.
    #[inline]
    fn settle(&mut self) {
        let work = &self.work;
        let ended = !work.orphans.is_empty() || !work.steps.is_empty() || !work.repairs.is_empty();
        if work.changed || work.well_again || ended {
            self.settle_orphans();
        }
    }

    fn settle_orphans(&mut self) {
        if self.work.changed {
            // What a lost server was asked for may have another holder by that.
            self.look_who_holds();
        }
        if std::mem::take(&mut self.work.well_again) {
            // What waits for a server that is not well may have another one now.
            let Self { sessions, work, .. } = self;
            sessions.iter_mut().filter(|of| !of.is_well()).for_each(|session| session.turn_away(work));
        }
        while let Some((server, of, pages)) = self.work.repairs.pop() {
            self.work.well_again = true;
            if self.copies.repaired(server, of, &pages) {
                self.look_at(server);
            }
            self.look_who_lacks(of, &pages);
        }
        while let Some((id, why)) = self.work.orphans.pop_front() {
            self.settle_orphan(id, why);
        }
        while let Some((piece, made)) = self.work.steps.pop_front() {
            self.step(piece, made);
        }
        while std::mem::take(&mut self.work.changed) {
            for index in 0..self.sessions.len() {
                for region in self.sessions[index].take_freed() {
                    let server = ServerIndex(u16::try_from(index).expect("few"));
                    let id = self.work.reserve();
                    let ask = Ask::control(server, Opcode::FreeRegion, region);
                    self.submit(id, Ask { class: Class::WriteBack, ..ask });
                    self.work.outputs.push_back(Output::Piece { request: id, piece: 0, pages: NO_PAGES });
                }
            }
            for (index, _) in (0..).zip(&self.sessions).filter(|(_, session)| is_lost(session)) {
                self.copies.forget(ServerIndex(index));
            }
            if self.copies.are_behind() {
                self.look_at_all();
            }
            self.look_who_holds();
            self.look_for_spares();
        }
        self.begin_pieces();
    }

    fn settle_orphan(&mut self, id: RequestId, why: Orphaned) {
        let request = *self.work.get(id);
        let Ask { server, opcode, op, other, of, piece, .. } = request.ask;
        let away = matches!(why, Orphaned::Away);
        // It has another one, or gets it by a request of its own.
        let has = |client: &Self, other: ServerIndex| client.has_still(other, of, id, away);
        let keep = |client: &Self, rule| client.work.rules.keep(rule);
        // A request, however often it moves, does not wait for ever.
        let long = self.sessions[server.as_usize()].op_deadline() * DEADLINES;
        let is_old = self.now - request.made_at >= long && keep(self, Rule::AgeLimit);
        let source = other.filter(|other| has(self, *other)).or_else(|| self.other_source(id, away));
        if opcode == Opcode::Get
            && !is_old
            && let Some(other) = source
            && (away || keep(self, Rule::FetchFromOther))
            && !(request.is_odd && matches!(why, Orphaned::Damaged(_)))
        {
            self.work.get_mut(id).is_odd |= matches!(why, Orphaned::Damaged(_));
            if away {
                self.sessions[server.as_usize()].moves(&self.work, id);
            }
            self.work.get_mut(id).ask.other = Some(other);
            self.work.turn_to_other(id, self.name(of, other));
            self.sessions[other.as_usize()].enqueue(&mut self.work, id);
            return;
        }
        let awaits = opcode == Opcode::Get && piece.is_none() && self.copies.tracked && !is_old;
        if awaits && matches!(why, Orphaned::Lost(_)) && self.awaits(server, of, id) {
            let Self { sessions, work, .. } = self;
            return sessions[server.as_usize()].waits(work, id);
        }
        let misses = matches!(opcode, Opcode::Put | Opcode::Discard) && piece.is_none();
        match why {
            Orphaned::Away => return self.sessions[server.as_usize()].keeps(&self.work, id),
            Orphaned::Lost(_) if misses && keep(self, Rule::MissesWhatWasUnderWay) => {
                self.miss(server, of, id)
            }
            _ => {}
        }
        let spared = other.is_some_and(|other| {
            let stores = opcode == Opcode::Put && matches!(why, Orphaned::Lost(_));
            let answers = || keep(self, Rule::OtherAnswers) && self.work.is_also_at(id, other);
            has(self, other) || stores && answers()
        });
        if matches!(why, Orphaned::Full(_)) && spared && keep(self, Rule::FullIsMissed) {
            self.miss(server, of, id);
        }
        match (why, op) {
            (Orphaned::Lost(_), Some(_))
                if opcode == Opcode::Put && spared && keep(self, Rule::OneHolderSuffices) => {}
            (Orphaned::Lost(_), Some(_))
                if opcode == Opcode::Put && !spared && !keep(self, Rule::OneHolderIsNeeded) => {}
            (Orphaned::Full(_), _) if spared => {}
            // Later there may be a holder again that is there and has room.
            (Orphaned::Lost(_), Some(op)) if opcode == Opcode::Put && self.is_left(server, other) => {
                self.work.op_full(op, other.unwrap_or(server), 0);
            }
            (Orphaned::Full(free), Some(op)) => self.work.op_full(op, server, free),
            (Orphaned::Lost(reason), Some(op)) => self.work.op_lost(op, server, request.what(), reason),
            (Orphaned::Damaged(page), Some(op)) => self.work.op_corrupt(op, server, page),
            _ => {}
        }
        if matches!(why, Orphaned::Damaged(_) | Orphaned::Full(_)) {
            let (link, number) = (self.sessions[server.as_usize()].attempt(), self.work.number(id));
            let ended = Output::Answered { link, request: id, number, wanted: false, refused: false };
            self.work.outputs.push_back(ended);
        }
        self.work.finish(id);
        if let Some(piece) = piece {
            self.work.steps.push_back((piece, None));
        }
    }

    // --- Making up for what was missed
    // -------------------------------------------------------------------------------

    /// Begins what can be read now and is not to wait.
    fn begin_pieces(&mut self) {
        if !self.copies.tracked || !self.work.rules.keep(Rule::CatchUp) {
            return;
        }
        for to in self.servers() {
            while self.sessions[to.as_usize()].is_well()
                && (self.copies.is_behind(to) || self.copies.next_drops(to).is_some())
                && let Some(most) = self.piece_room()
            {
                let pieces = &self.copies.pieces;
                let slot = pieces.iter().position(Option::is_none).expect("fewer than there may be");
                let Some(piece) = self.next_piece(to, most).or_else(|| self.next_drop(to)) else { break };
                self.work.pace.began(self.now);
                self.begin_piece(slot, piece);
            }
        }
    }

    fn next_piece(&mut self, to: ServerIndex, most: u32) -> Option<Piece> {
        if !self.copies.is_behind(to) {
            return None;
        }
        let Self { sessions, work, copies, .. } = self;
        let takes = |region: &Region, of: u32, from: ServerIndex, pages: Extent| {
            let source = &sessions[from.as_usize()];
            let quiet = !work.is_changing(of, pages) || !work.rules.keep(Rule::QuietPiece);
            let most = source.max_pages(pages.count).min(sessions[to.as_usize()].max_pages(pages.count));
            (source.is_well() && quiet && !region.has_missed(from, &[pages])).then_some(most)
        };
        let piece = copies.next_piece(to, self.now, most, takes);
        if piece.is_none() {
            self.look_at(to);
        }
        piece
    }

    fn next_drop(&mut self, to: ServerIndex) -> Option<Piece> {
        let Self { work, copies, now, .. } = self;
        if !work.rules.keep(Rule::LeftIsDropped) {
            return None;
        }
        let is_read = |of: u32, pages: Extent| work.is_reading(to, of, pages);
        copies.next_drop(to, *now, work.rules, is_read)
    }

    /// How many pages a piece may have that begins now, if one may.
    fn piece_room(&self) -> Option<u32> {
        let Work { pace, rules, .. } = &self.work;
        let busy = pace.is_busy(self.now) && rules.keep(Rule::PiecesGiveWay);
        if busy && !rules.keep(Rule::PiecesGoOn) {
            return None;
        }
        if busy { pace.room_beside_demand(self.now) } else { pace.room() }
    }

    fn begin_piece(&mut self, slot: usize, piece: Piece) {
        let Piece { to, from, of, pages, step, .. } = piece;
        let (server, opcode, class) = match step {
            Step::Naming => (to, Opcode::CreateRegion, Class::Control),
            Step::Reading => (from, Opcode::Get, Class::Prefetch),
            Step::Writing => (to, Opcode::Put, Class::WriteBack),
            Step::Dropping => (to, Opcode::Discard, Class::WriteBack),
        };
        let bytes = if step == Step::Dropping { 0 } else { u64::from(pages.count) * OS_PAGE_BYTES as u64 };
        self.copies.pieces[slot] = Some(piece);
        let id = self.work.reserve();
        self.work.pages[id.0 as usize].push(pages);
        let region = if step == Step::Naming { RegionId(0) } else { self.name(of, server) };
        let slot = u8::try_from(slot).expect("few");
        self.work.outputs.push_back(Output::Piece { request: id, piece: slot, pages });
        let ask = Ask {
            class,
            bytes,
            at: pages.first.0,
            of,
            piece: Some(slot),
            ..Ask::control(server, opcode, region)
        };
        self.submit(id, ask);
    }

    /// A step of a piece has ended.
    fn step(&mut self, slot: u8, made: Option<RegionId>) {
        let Some(piece) = self.copies.pieces[usize::from(slot)].take() else { return };
        let Piece { to, of, pages, step, void, .. } = piece;
        let there = self.sessions[to.as_usize()].takes_part();
        let known = self.copies.regions.contains_key(&of);
        match (step, made) {
            (Step::Reading, Some(_)) if !void && there && self.name(of, to).0 != 0 => {
                return self.begin_piece(usize::from(slot), Piece { step: Step::Writing, ..piece });
            }
            (Step::Dropping, Some(_)) if there && known && !void => {
                self.copies.dropped(to, of, pages);
                self.work.changed |= !self.copies.has_left(to);
            }
            (Step::Writing, Some(_)) if there && known && !void => {
                let region = self.copies.regions.get_mut(&of).expect("seen above");
                region.history.missed[to.as_usize()].remove(pages);
                // What waits for a silent server may be here now.
                self.work.well_again = true;
                self.look_who_lacks(of, &[pages]);
            }
            (Step::Writing, None) if there && known => self.copies.put_off(to, self.now),
            (Step::Naming, Some(name)) if there && known => {
                self.copies.named(to, of, name, self.work.rules.keep(Rule::NewNameMissedAll));
                self.work.changed = true;
            }
            (Step::Naming, Some(name)) if there => {
                let id = self.work.reserve();
                self.work.outputs.push_back(Output::Piece { request: id, piece: 0, pages: NO_PAGES });
                let ask = Ask::control(to, Opcode::FreeRegion, name);
                self.submit(id, Ask { class: Class::WriteBack, ..ask });
            }
            _ => {}
        }
        self.work.pace.ended(self.now);
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

    // --- The machine
    // -----------------------------------------------------------------------------------------------

    /// Something happened. [`Client::poll`] has what follows.
    #[inline]
    pub fn handle(&mut self, now: Time, input: Input) {
        self.now = now;
        let Self { sessions, work, .. } = self;
        match input {
            Input::Submit(id, ask) => self.submit(id, ask),
            Input::Sealed(op) => work.sealed(op),
            Input::Queued { link, waiting } => sessions[link.server.as_usize()].queued(link, waiting),
            Input::Written { link, waiting } => sessions[link.server.as_usize()].written(link, waiting, now),
            Input::Departed { number } => {
                if let Some(id) = work.find(number) {
                    work.get_mut(id).departed = true;
                }
            }
            Input::Head { link, header } => {
                if let Some(id) = sessions[link.server.as_usize()].head(work, link, &header, now) {
                    self.answers(link, id, header.request);
                }
            }
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
                session.granted(&grant, work, now);
                session.set_reconnects(reconnects);
            }
            Input::StayAway => sessions.iter_mut().for_each(|session| session.set_reconnects(false)),
            Input::Lose { server } => sessions[server.as_usize()].lose(work, Lost::Connection),
            Input::Renew { server } => self.renew(server),
            Input::Time => self.time(now),
        }
        self.settle();
        if self.drains {
            self.leave();
        }
    }

    /// A server that is lost is an absent one from now on, which has no region and nothing that was stored.
    fn renew(&mut self, server: ServerIndex) {
        let Self { sessions, work, copies, now, .. } = self;
        let session = &mut sessions[server.as_usize()];
        if session.lost().is_some() {
            session.renew(work, *now);
            let forgets = work.rules.keep(Rule::RenewedHasNothing);
            copies.renew(server, forgets, work.rules.keep(Rule::RenewedIsNotLost));
            work.changed = true;
            self.look_at_all();
        }
    }

    fn time(&mut self, now: Time) {
        if now >= self.check_at {
            self.check_at = now + CHECK_EVERY;
            self.work.changed |= self.rebuild_at().is_some_and(|at| now >= at);
            for index in 0..self.sessions.len() {
                self.sessions[index].time(&mut self.work, now);
                // Before the next one: it may have become the only one that has some pages.
                self.settle();
            }
            self.hedge();
            self.begin_pieces();
        }
    }

    /// The server answers first what went elsewhere when it had this number.
    fn answers(&mut self, link: LinkId, id: RequestId, before: u64) {
        let Ask { server, of, .. } = self.work.get(id).ask;
        self.sessions[server.as_usize()].moves(&self.work, id);
        self.work.get_mut(id).ask.other = Some(link.server);
        self.work.belongs_to_other(id, self.name(of, link.server));
        self.sessions[link.server.as_usize()].answers(&mut self.work, link, id, before);
    }

    /// When the oldest read at a server turns to another one, if it can.
    fn turns_at(&self, server: ServerIndex) -> Option<(RequestId, ServerIndex, Time)> {
        let (id, sent) = self.sessions[server.as_usize()].oldest_read(&self.work)?;
        let patience = self.sessions[server.as_usize()].promptness.patience()?;
        Some((id, self.work.get(id).ask.other?, sent + patience))
    }

    /// Reads that take longer than nearly all others turn to the other holder, while that may cost something.
    fn hedge(&mut self) {
        if !self.copies.tracked {
            return;
        }
        self.compare();
        if !self.work.rules.keep(Rule::HedgesLateReads) {
            return;
        }
        for server in self.servers() {
            while let Some((id, other, at)) = self.turns_at(server)
                && self.now >= at
            {
                self.sessions[server.as_usize()].forget_reads(&self.work, id);
                let may = self.budget.is_enough() || !self.work.rules.keep(Rule::HedgesFewReads);
                let of = self.work.get(id).ask.of;
                let is_slow = |of: ServerIndex| self.sessions[of.as_usize()].promptness.is_slow();
                let pays = !(is_slow(server) && is_slow(other));
                if may && pays && self.has_still(other, of, id, true) {
                    self.budget.spend();
                    self.work.get_mut(id).turned = true;
                    self.settle_orphan(id, Orphaned::Away);
                }
            }
        }
        self.settle();
    }

    /// Tells each server how prompt the fastest other one is.
    fn compare(&mut self) {
        let usual = |(index, of): (usize, &Session)| {
            let usual = of.promptness.usual().filter(|_| of.takes_part());
            usual.map(|usual| (usual, index))
        };
        let all = || self.sessions.iter().enumerate().filter_map(usual);
        let Some((fastest, at)) = all().min() else { return };
        let next = all().filter(|(_, index)| *index != at).map(|(usual, _)| usual).min();
        for (index, session) in self.sessions.iter_mut().enumerate() {
            session.promptness.compare(if index == at { next } else { Some(fastest) });
        }
    }

    /// When others take the place of a server that is away.
    fn rebuild_at(&self) -> Option<Time> {
        let away = self.servers().zip(&self.away).filter(|(of, _)| self.copies.tracked && !self.is_out(*of));
        let soonest = away.filter_map(|(_, since)| *since).min()? + self.rebuild_after();
        // What is due and does not happen waits for something else.
        (soonest > self.now || self.wanted_out() != self.copies.out).then_some(soonest)
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
        let well = || self.servers().filter(|of| self.sessions[of.as_usize()].is_well());
        let next_piece = |of| self.copies.next_pass(of).or(self.work.pace.next_at());
        let passes = well().filter(|of| self.copies.is_behind(*of)).filter_map(next_piece);
        let drops = well().filter(|_| self.work.rules.keep(Rule::LeftIsDropped));
        let drops = drops.filter_map(|of| self.copies.next_drops(of));
        let passes = passes.chain(drops.filter_map(|pass| pass.or(self.work.pace.next_at())));
        let soonest = self.sessions.iter().filter_map(|session| session.next_timeout(&self.work));
        let soonest = soonest.chain(passes.filter(|_| self.work.rules.keep(Rule::CatchUp)));
        let leaves = self.sessions.iter().filter(|session| session.is_draining() && !session.leaves());
        let soonest = soonest.chain(leaves.filter_map(|session| session.settled_at(self.now)));
        let hedges = self.work.rules.keep(Rule::HedgesLateReads);
        let turns = self.servers().filter(|_| hedges).filter_map(|of| self.turns_at(of));
        let soonest = soonest.chain(self.rebuild_at()).chain(turns.map(|(.., at)| at)).min();
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
        self.copies.check();
    }
}

const NO_PAGES: Extent = Extent { first: PageIndex(0), count: 0 };

fn is_lost(session: &Session) -> bool {
    session.lost().is_some()
}
