//! The direct view's part of a pool: layouts cut into requests to the servers that hold their bytes.
//!
//! Where one server holds all of it and its program is short, the program travels whole, and each
//! request is a window of it. Otherwise the runs are dealt out to their servers, and each request
//! carries a program of its own.

use super::body::{Body, Reply};
use super::server::ZeroCopyWish;
use super::{Names, Pool, PoolRegion, entry, names_of};
use crate::error::{LostReason, PoolError};
use rampool_net::transport::zero_copy::{SharedZeroCopy, ZeroCopy, measured_crossover};
use rampool_net::transport::{Link, PieceMut};
use rampool_paging::placement::{Placement, ServerIndex};
use rampool_pinning::path::{NoZeroCopy, Wish};
use rampool_session::{Ask, Class, PageSet, SENT_TOGETHER_BYTES};
use rampool_wire::elements::{Combine, GROUP_BYTES, Kind, MAX_GROUPED, Test, Want};
use rampool_wire::frame::{
    Block, CopyRequest, FetchOp, MAX_PROGRAM_BYTES, NamedRegion, Opcode, Piece, RegionId, ScanRequest,
    Status, Window, accumulate_arg,
};
use rampool_wire::layout::{Collector, Program, Run, Runs};
use rampool_wire::session::Security;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::RegionTicket;
use crate::error::Operation;

/// Bytes one request moves at most: as pages do.
const REQUEST_BYTES: u64 = 256 << 10;
/// The same of copies: they pass by this client, and nothing waits behind the bytes of one.
const COPY_REQUEST_BYTES: u64 = 1 << 20;
/// Elements that one request looks at at most.
const SCAN_REQUEST_ELEMENTS: u64 = REQUEST_BYTES / 8;
/// The same of bodies: heads of other messages leave between two of these.
const BODY_REQUEST_BYTES: u64 = 128 << 10;
/// Requests of one operation whose bytes do not pass by here; so many take about a gigabyte to remember. What
/// moves bytes is bounded by this process's memory.
const MOST_REQUESTS: u64 = 1 << 20;
/// Bytes that one copy moves at most.
pub(crate) const MOST_COPIED_BYTES: u64 = MOST_REQUESTS * COPY_REQUEST_BYTES;
/// Elements that one scan by keys looks at at most.
pub(crate) const MOST_GROUPED: u64 = MOST_REQUESTS * MAX_GROUPED as u64;
/// Elements that one scan looks at at most.
pub(crate) const MOST_SCANNED: u64 = MOST_REQUESTS * SCAN_REQUEST_ELEMENTS;
/// Runs of one request, so that its pieces stay below the wire's limit however they lie.
const REQUEST_RUNS: u64 = 30_000;

/// Bytes for the offsets of a list in one request.
const LIST_BYTES: usize = MAX_PROGRAM_BYTES - 128;

/// What becomes of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Job {
    Gather,
    Scatter,
    /// Scatter that nothing else waits behind: the body of a message.
    SendBody,
    Accumulate(Kind, Combine),
}

/// Which region to open.
#[derive(Clone, Copy, Debug)]
pub enum RegionSelector<'a> {
    /// Made if there is none and a length is given.
    Name(&'a str),
    Ticket(&'a RegionTicket),
}

/// One request of a scan: its number, who answers it, and which of the selected bytes it is
/// about, as (first, count).
pub(crate) struct ScanPart {
    pub request: u64,
    pub server: ServerIndex,
    pub spans: Vec<(u64, u64)>,
}

/// One request of a scan by keys, which looks at so many elements.
pub(crate) struct GroupPart {
    pub request: u64,
    pub server: ServerIndex,
    pub elements: u32,
}

/// A request in the making.
struct Open {
    collector: Collector,
    runs: u64,
    places: Vec<PieceMut>,
    spans: Vec<(u64, u64)>,
}

/// Which server holds what of a region.
#[derive(Clone, Copy)]
struct Spread<'a> {
    placement: &'a Placement,
    names: &'a Names,
}

impl Spread<'_> {
    fn holder(&self, offset: u64) -> ServerIndex {
        let page = PageIndex(offset / OS_PAGE_BYTES as u64);
        let has = |server: &ServerIndex| self.names.has(*server, Extent::page(page));
        let placed = || self.placement.holders(page).iter().find(has);
        self.names.only.or_else(placed).unwrap_or_else(|| self.placement.holder(page))
    }

    /// What follows each other at one server; longer than any region where that holds all of it. One page
    /// where some servers have missed some.
    fn stripe_bytes(&self) -> u64 {
        if self.names.only.is_some() {
            1 << 60
        } else if !self.names.missed.is_empty() {
            OS_PAGE_BYTES as u64
        } else {
            u64::from(self.placement.stripe_pages()) * OS_PAGE_BYTES as u64
        }
    }

    fn name(&self, server: ServerIndex) -> RegionId {
        self.names.ids[server.as_usize()]
    }
}

impl Names {
    /// Whether the server knows the region, and has these pages.
    fn has(&self, server: ServerIndex, pages: Extent) -> bool {
        let missed = self.missed.get(server.as_usize()).is_some_and(|missed| missed.overlaps(pages));
        self.ids[server.as_usize()].0 != 0 && !missed
    }
}

/// What a request is made of.
struct Chunk {
    server: ServerIndex,
    window: Window,
    places: Vec<PieceMut>,
    spans: Vec<(u64, u64)>,
}

impl Job {
    fn opcode(self) -> Opcode {
        match self {
            Self::Gather => Opcode::Gather,
            Self::Scatter | Self::SendBody => Opcode::Scatter,
            Self::Accumulate(..) => Opcode::Accumulate,
        }
    }

    fn class(self) -> Class {
        if self == Self::SendBody { Class::WriteBack } else { Class::Demand }
    }

    fn request_bytes(self) -> u64 {
        if self == Self::SendBody { BODY_REQUEST_BYTES } else { REQUEST_BYTES }
    }
}

impl Pool {
    /// Opens a region for every member of the lease: by name, or by its ticket. Blocks until all servers have
    /// answered. Returns its length.
    pub fn open_region(
        &mut self,
        selector: RegionSelector<'_>,
        bytes: u64,
    ) -> Result<(PoolRegion, u64), PoolError> {
        let nothing = vec![RegionId(0); self.server_count()];
        let (regions, name, missed) = match selector {
            RegionSelector::Name(name) => (&nothing[..], name, Vec::new()),
            RegionSelector::Ticket(ticket) if ticket.is_of(&self.ticket.parts) => {
                // What is read of another holder meanwhile, others would change at this one.
                let missing = ticket.handed.names.iter().position(|name| name.0 == 0);
                if let Some(server) = missing.and_then(|index| self.shell.servers.get(index)) {
                    return Err(PoolError::NotThere { server: server.name.clone() });
                }
                let history = self.shell.client.as_placed(ticket.handed.history.clone());
                (&ticket.handed.names[..], "", history.missed)
            }
            RegionSelector::Ticket(_) => return Err(PoolError::NoSuchRegion),
        };
        let replies =
            self.ask_all(Opcode::OpenRegion, regions, &vec![bytes; self.server_count()], name.as_bytes())?;
        if replies.iter().flatten().any(|reply| reply.status == Status::NoSuchRegion) {
            return Err(PoolError::NoSuchRegion);
        }
        self.each_ok(&replies, Operation::OpenRegion)?;
        let mut length = None;
        for (server, reply) in self.shell.servers.iter().zip(&replies) {
            let Ok(Reply { arg, .. }) = reply else { continue };
            let length = length.get_or_insert(*arg);
            if *length != *arg {
                let message =
                    format!("its part of the region is of {arg} bytes, another server's of {length}");
                let server = server.name.clone();
                return Err(PoolError::Denied { server, operation: Operation::OpenRegion, message });
            }
        }
        let names = Names { ids: names_of(replies), only: None, missed };
        if let Some(index) = names.ids.iter().position(|name| name.0 == 0) {
            return Err(PoolError::NotThere { server: self.shell.servers[index].name.clone() });
        }
        for pages in names.missed.iter().flat_map(PageSet::extents) {
            let has = |page: PageIndex| {
                self.placement.holders(page).iter().any(|server| names.has(server, Extent::page(page)))
            };
            if !pages.pages().all(has) {
                let server = &self.shell.servers[0].name;
                return Err(super::lost(server, Operation::OpenRegion, &LostReason::Inherited));
            }
        }
        Ok((self.remember_names(names, None), length.unwrap_or(bytes)))
    }

    /// The named regions of the lease. Blocks until a server has answered.
    pub fn named_regions(&mut self) -> Result<Vec<NamedRegion>, PoolError> {
        let (nothing, args) = (vec![RegionId(0); self.server_count()], vec![0; self.server_count()]);
        let mut all: Vec<NamedRegion> = Vec::new();
        loop {
            let behind = all.last().map(|last| last.name.clone()).unwrap_or_default();
            let replies = self.ask_all(Opcode::ListRegions, &nothing, &args, behind.as_bytes())?;
            self.each_ok(&replies, Operation::ListRegions)?;
            // Every server knows all of them.
            let mut answers = self.shell.servers.iter().zip(&replies);
            let Some((server, reply)) =
                answers.find_map(|(server, reply)| Some((server, reply.as_ref().ok()?)))
            else {
                return Ok(all);
            };
            let more = NamedRegion::parse_all(&reply.table).unwrap_or_default();
            let goes_on = more.first().is_some_and(|first| first.name > behind);
            if reply.arg != 0 && !goes_on || reply.table.is_empty() != more.is_empty() {
                let (server, message) = (server.name.clone(), "its list makes no sense".to_owned());
                return Err(PoolError::Denied { server, operation: Operation::ListRegions, message });
            }
            all.extend(more);
            if reply.arg == 0 {
                return Ok(all);
            }
        }
    }

    /// Moves the bytes that `remote` selects in the region to or from those that `local` selects from
    /// `memory` on, in order. Ends in an event with `token`. Does not block. Requests to one server leave,
    /// and are carried out, in the order in which they were made.
    ///
    /// # Safety
    /// What `local` selects is memory (writable, for `Gather`, and not used otherwise; else readable and
    /// unchanged) until the operation's event was returned by [`Pool::poll`] or the pool was dropped.
    pub(crate) unsafe fn move_bytes(
        &mut self,
        region: PoolRegion,
        token: u64,
        job: Job,
        remote: &Program,
        local: &Program,
        memory: *mut u8,
    ) {
        assert_eq!(remote.bytes(), local.bytes(), "both sides select as many bytes");
        let Self { shell, regions, placement, .. } = self;
        let spread = Spread { placement, names: entry(regions, region) };
        let op = shell.begin(token, job != Job::Gather);
        let now = Instant::now();
        let servers = shell.servers.len();
        let mut unsent = 0;
        let mut add = |server: ServerIndex, window: Window, places: &[PieceMut]| {
            let (id, body) = shell.reserve();
            let span = fill(body, window, places);
            if let Job::Accumulate(kind, how) = job {
                body.arg = accumulate_arg(kind, how);
                body.blocks.clear();
                body.blocks.push(Block { len: body.bytes, whole: false });
            }
            let bytes = body.bytes;
            unsent += if job == Job::Gather { SENT_TOGETHER_BYTES } else { bytes as usize };
            let ask = Ask::control(server, job.opcode(), spread.name(server));
            let ask = Ask { class: job.class(), op: Some(op), bytes: bytes.into(), at: span.0, span, ..ask };
            shell.submit(id, ask, now);
            if unsent >= SENT_TOGETHER_BYTES {
                // The server works on it while the next ones are made.
                unsent = 0;
                shell.send(now);
            }
        };
        match (remote.as_run(), local.as_run(), only_holder(spread, servers, remote)) {
            // Consecutive bytes for one request: nothing to cut up.
            (Some(there), Some(here), Some(server)) if there.len <= job.request_bytes() => {
                let ptr = memory
                    .wrapping_add(usize::try_from(here.offset.cast_unsigned()).expect("a 64-bit machine"));
                let len = usize::try_from(there.len).expect("at most REQUEST_BYTES");
                let window = Window {
                    program: remote.clone(),
                    from: 0,
                    len: u32::try_from(there.len).expect("at most REQUEST_BYTES"),
                };
                add(server, window, &[PieceMut { ptr, len }]);
            }
            _ => {
                cut_up(spread, servers, remote, Some((local.runs(), memory)), job.request_bytes(), |chunk| {
                    add(chunk.server, chunk.window, &chunk.places);
                })
            }
        }
        shell.sealed(op, now);
        shell.send(now);
    }

    /// As [`Pool::move_bytes`] of consecutive bytes, where they are a part of one page and its server takes
    /// such requests. False, and nothing done, where not.
    ///
    /// # Safety
    /// As [`Pool::move_bytes`], of as many bytes.
    pub(crate) unsafe fn read_piece(
        &mut self,
        region: PoolRegion,
        token: u64,
        offset: u64,
        place: PieceMut,
    ) -> bool {
        let Some(piece) = Piece::at(offset, place.len) else { return false };
        let spread = Spread { placement: &self.placement, names: entry(&self.regions, region) };
        let server = spread.holder(offset);
        if !self.shell.servers[server.as_usize()].takes_pieces {
            return false;
        }
        let (op, now) = (self.shell.begin(token, false), Instant::now());
        let (id, body) = self.shell.reserve();
        body.arg = piece.encode();
        body.bytes = u32::try_from(piece.len).expect("at most a page");
        body.blocks.push(Block { len: body.bytes, whole: piece.is_whole() });
        body.places.push(place);
        let span = (offset, offset + piece.len as u64);
        let ask = Ask::control(server, Opcode::ReadPiece, spread.name(server));
        let ask =
            Ask { class: Class::Demand, op: Some(op), bytes: piece.len as u64, at: offset, span, ..ask };
        self.shell.submit(id, ask, now);
        self.shell.sealed(op, now);
        self.shell.send(now);
        true
    }

    /// Updates one element; the reply with the number that is returned has its bits before.
    pub(crate) fn fetch_op(&mut self, region: PoolRegion, token: u64, update: &FetchOp) -> u64 {
        let spread = Spread { placement: &self.placement, names: entry(&self.regions, region) };
        let server = spread.holder(update.offset);
        let (op, now) = (self.shell.begin(token, false), Instant::now());
        let (id, body) = self.shell.reserve();
        (body.arg, body.table) = update.encode();
        let number = self.shell.client.number(id);
        let span = (update.offset, update.offset + update.kind.bytes() as u64);
        let ask = Ask::control(server, Opcode::FetchOp, spread.name(server));
        let ask = Ask { class: Class::Demand, op: Some(op), at: update.offset, span, wanted: true, ..ask };
        self.shell.submit(id, ask, now);
        self.shell.sealed(op, now);
        self.shell.send(now);
        number
    }

    /// Filters and reduces a column, at the servers.
    pub(crate) fn scan(
        &mut self,
        region: PoolRegion,
        token: u64,
        (kind, test, want): (Kind, Test, Want),
        (low, high): ([u8; 8], [u8; 8]),
        column: &Program,
    ) -> Vec<ScanPart> {
        let Self { shell, regions, placement, .. } = self;
        let spread = Spread { placement, names: entry(regions, region) };
        let (op, now) = (shell.begin(token, false), Instant::now());
        let mut parts = Vec::new();
        let servers = shell.servers.len();
        cut_up(spread, servers, column, None, SCAN_REQUEST_ELEMENTS * kind.bytes() as u64, |chunk| {
            let (id, body) = shell.reserve();
            let elements = chunk.window.len / u32::try_from(kind.bytes()).expect("4 or 8");
            body.bytes = match want {
                Want::Positions => elements * 4,
                Want::Values => chunk.window.len,
                _ => 0,
            };
            body.arg = ScanRequest::arg(kind, test, want);
            ScanRequest::encode_table(&chunk.window, low, high, &mut body.table);
            let bytes = body.bytes.into();
            let span = bounds(&chunk.window.program);
            let ask = Ask::control(chunk.server, Opcode::Scan, spread.name(chunk.server));
            let ask =
                Ask { class: Class::Demand, op: Some(op), bytes, at: span.0, span, wanted: true, ..ask };
            parts.push(ScanPart {
                request: shell.client.number(id),
                server: chunk.server,
                spans: chunk.spans,
            });
            shell.submit(id, ask, now);
            shell.send(now);
        });
        shell.sealed(op, now);
        parts
    }

    /// Copies what `source` selects in one region to what `target` selects in another, in order, from server
    /// to server. Ends in an event with `token`. Does not block.
    pub(crate) fn copy_bytes(
        &mut self,
        token: u64,
        (from, source): (PoolRegion, &Program),
        (to, target): (PoolRegion, &Program),
    ) {
        assert_eq!(source.bytes(), target.bytes(), "both sides select as many bytes");
        let Self { shell, regions, placement, ticket, .. } = self;
        let spread = |region| Spread { placement, names: entry(regions, region) };
        let (from, to) = (spread(from), spread(to));
        let (op, now, servers) = (shell.begin(token, true), Instant::now(), shell.servers.len());
        let mut order = |here: ServerIndex, there: ServerIndex, source: Window, target: Window| {
            let part = &ticket.parts[there.as_usize()];
            let span = bounds(&source.program);
            let (id, body) = shell.reserve();
            let endpoint = part.server.endpoint.to_string();
            CopyRequest {
                source,
                target,
                endpoint,
                lease: part.lease,
                token: part.token,
                region: to.name(there),
            }
            .encode(&mut body.table);
            let ask = Ask::control(here, Opcode::Copy, from.name(here));
            let ask =
                Ask { class: Class::Demand, op: Some(op), at: span.0, span, copy_to: Some(there), ..ask };
            shell.submit(id, ask, now);
            shell.send(now);
        };
        let sides =
            [Side { spread: from, program: source, unit: 1 }, Side { spread: to, program: target, unit: 1 }];
        pair_up(sides, servers, COPY_REQUEST_BYTES, |(here, there), [source, target]| {
            order(here, there, source, target);
        });
        shell.sealed(op, now);
    }

    /// Counts the elements of a column by the keys in another, which has as many. What lies at two servers is
    /// left: the programs of the keys and of the elements.
    pub(crate) fn group(
        &mut self,
        token: u64,
        (keys, by): (PoolRegion, (Kind, &Program)),
        (region, column): (PoolRegion, (Kind, &Program)),
        (test, low, high): (Test, [u8; 8], [u8; 8]),
    ) -> (VecDeque<GroupPart>, Vec<[Program; 2]>) {
        let Self { shell, regions, placement, .. } = self;
        let side = |region, (kind, program): (Kind, _)| Side {
            spread: Spread { placement, names: entry(regions, region) },
            program,
            unit: kind.bytes() as u64,
        };
        let sides = [side(keys, by), side(region, column)];
        let [keys_at, column_at] = sides.each_ref().map(|side| side.spread);
        let (op, now, servers) = (shell.begin(token, false), Instant::now(), shell.servers.len());
        let (mut parts, mut apart) = (VecDeque::new(), Vec::new());
        pair_up(sides, servers, MAX_GROUPED.into(), |(here, there), [keys, window]| {
            if here != there {
                apart.push([keys, window].map(|window| part_of(&window)));
                return;
            }
            let (id, body) = shell.reserve();
            let elements = window.len / u32::try_from(column.0.bytes()).expect("4 or 8");
            body.bytes = elements * u32::try_from(GROUP_BYTES).expect("few");
            body.arg = ScanRequest::keyed_arg(column.0, test, by.0);
            let name = keys_at.name(here);
            body.table = ScanRequest::keyed_table(&window, (low, high), (name, &keys.program));
            let (bytes, mut span) = (body.bytes.into(), bounds(&window.program));
            if name == column_at.name(here) {
                let more = bounds(&keys.program);
                span = (span.0.min(more.0), span.1.max(more.1));
            }
            let ask = Ask::control(here, Opcode::Scan, column_at.name(here));
            let ask =
                Ask { class: Class::Demand, op: Some(op), bytes, at: span.0, span, wanted: true, ..ask };
            parts.push_back(GroupPart { request: shell.client.number(id), server: here, elements });
            shell.submit(id, ask, now);
            shell.send(now);
        });
        shell.sealed(op, now);
        (parts, apart)
    }

    /// The reply of this number, if it has come: argument, table, bulk.
    pub(crate) fn reply(&mut self, request: u64) -> Option<(u64, Vec<u8>, Vec<u8>)> {
        self.shell.take_reply(request).map(|reply| (reply.arg, reply.table, reply.bulk))
    }

    /// From now on large pieces leave without a copy where that pays. Their memory stays as it is until the
    /// operation has ended. None where nothing leaves that way, or cannot.
    pub(crate) fn send_without_copies(&mut self, wish: Wish, allowance_bytes: u64) -> Option<SharedZeroCopy> {
        let worth = |link: &Link<_>| match wish {
            Wish::Never => false,
            Wish::Auto => link.security() != Security::Sealed && !link.is_local(),
            Wish::From(_) => link.security() != Security::Sealed,
        };
        let any = self.shell.servers.iter().any(|server| server.link.as_ref().is_some_and(worth));
        let engine = if any {
            ZeroCopy::open(allowance_bytes).ok().map(|engine| Arc::new(Mutex::new(engine)))
        } else {
            None
        };
        let measured = if wish == Wish::Auto && engine.is_some() { measured_crossover() } else { None };
        for server in &mut self.shell.servers {
            server.send_without_copies(ZeroCopyWish { engine: engine.clone(), wish, measured });
        }
        engine
    }

    /// For each server, from how many bytes on pieces leave without a copy, or why they never do.
    pub(crate) fn zero_copy_from(&self) -> Vec<Result<u64, NoZeroCopy>> {
        self.shell
            .servers
            .iter()
            .map(|server| server.link.as_ref().map_or(Err(NoZeroCopy::Off), Link::zero_copy_from))
            .collect()
    }

    /// Gives every server up: everything under way ends.
    pub(crate) fn give_up(&mut self, reason: &LostReason) {
        self.shell.give_up(reason, Instant::now());
    }
}

/// Cuts what a program selects into requests of at most `most` bytes to the servers that hold it.
fn cut_up(
    spread: Spread<'_>,
    servers: usize,
    remote: &Program,
    local: Option<(Runs<'_>, *mut u8)>,
    most: u64,
    mut emit: impl FnMut(Chunk),
) {
    let mut local = Local::new(local);
    if remote.bytes() == 0 {
        return;
    }
    if let Some(server) = only_holder(spread, servers, remote) {
        let mut window = |program: Program, from: u64, len: u64, at: u64| {
            let mut places = Vec::new();
            local.take(len, &mut places);
            let window = Window { program, from, len: u32::try_from(len).expect("at most REQUEST_BYTES") };
            // A move needs none.
            let spans = if local.runs.is_none() { vec![(at, len)] } else { Vec::new() };
            emit(Chunk { server, window, places, spans });
        };
        if remote.coded_bytes() <= MAX_PROGRAM_BYTES {
            let most = most.min(REQUEST_RUNS.saturating_mul(remote.shortest_run()));
            let mut from = 0;
            while from < remote.bytes() {
                let len = most.min(remote.bytes() - from);
                window(remote.clone(), from, len, from);
                from += len;
            }
            return;
        }
        let (low, high) = remote.bounds();
        let width = if high - low <= i64::from(u32::MAX) { 4 } else { 8 };
        let fit = LIST_BYTES / width;
        if let Some((each, members)) = remote.as_list()
            && each * fit as u64 <= most
            && remote.shortest_run() == each
        {
            for first in (0..members).step_by(fit) {
                let end = members.min(first + fit);
                let part = remote.members(first..end).expect("a part of a list is shorter");
                let len = part.bytes();
                window(part, 0, len, first as u64 * each);
            }
            return;
        }
    }
    let mut open: Vec<Option<Open>> = (0..servers).map(|_| None).collect();
    let stripe_bytes = spread.stripe_bytes();
    let mut at = 0;
    for mut run in remote.runs() {
        while run.len > 0 {
            let start = run.offset.cast_unsigned();
            let server = spread.holder(start);
            let slot = &mut open[server.as_usize()];
            let chunk = slot.get_or_insert_with(Open::new);
            let room = most - chunk.collector.bytes();
            let len = run.len.min(stripe_bytes - start % stripe_bytes).min(room);
            let fits = len > 0
                && chunk.runs < REQUEST_RUNS / 2
                && chunk.collector.push(Run { offset: run.offset, len });
            if !fits {
                if let Some(chunk) = slot.take() {
                    emit(chunk.finish(server));
                }
                continue;
            }
            chunk.runs += 1;
            local.take(len, &mut chunk.places);
            match chunk.spans.last_mut() {
                Some((first, count)) if *first + *count == at => *count += len,
                _ => chunk.spans.push((at, len)),
            }
            at += len;
            run = Run { offset: run.offset + len.cast_signed(), len: run.len - len };
        }
    }
    for (server, chunk) in (0..).zip(open) {
        if let Some(chunk) = chunk {
            emit(chunk.finish(ServerIndex(server)));
        }
    }
}

/// One of two programs that select as many units each.
#[derive(Clone, Copy)]
struct Side<'a> {
    spread: Spread<'a>,
    program: &'a Program,
    /// Bytes that are never cut.
    unit: u64,
}

impl Side<'_> {
    /// Units until the end of the stripe.
    fn in_stripe(&self, offset: i64) -> u64 {
        let stripe = self.spread.stripe_bytes();
        (stripe - offset.cast_unsigned() % stripe) / self.unit
    }

    fn window(&self, program: Program, from: u64, units: u64) -> Window {
        let len = u32::try_from(units * self.unit).expect("at most MAX_DIRECT_BYTES");
        Window { program, from: from * self.unit, len }
    }
}

/// Goes through two programs side by side, and cuts them into requests of at most `most` units, each with the
/// servers that hold the two.
fn pair_up(
    sides: [Side<'_>; 2],
    servers: usize,
    most: u64,
    mut emit: impl FnMut((ServerIndex, ServerIndex), [Window; 2]),
) {
    let [one, other] = sides;
    let units = one.program.bytes() / one.unit;
    assert_eq!(units, other.program.bytes() / other.unit, "both sides select as many");
    if units == 0 {
        return;
    }
    let only = |side: Side<'_>| only_holder(side.spread, servers, side.program);
    let short = |side: &Side<'_>| side.program.coded_bytes() <= CopyRequest::MAX_PROGRAM_BYTES;
    if let Some(pair) = only(one).zip(only(other))
        && sides.iter().all(short)
    {
        let run = sides.map(|side| side.program.shortest_run() / side.unit);
        let most = most.min(REQUEST_RUNS.saturating_mul(run[0].min(run[1])));
        for from in (0..units).step_by(usize::try_from(most).expect("of one request")) {
            emit(pair, sides.map(|side| side.window(side.program.clone(), from, most.min(units - from))));
        }
        return;
    }
    let mut open: BTreeMap<(ServerIndex, ServerIndex), [Collector; 2]> = BTreeMap::new();
    let collectors = || [(); 2].map(|()| Collector::new(CopyRequest::MAX_PROGRAM_BYTES));
    let mut finish = |pair, [mut here, mut there]: [Collector; 2]| {
        let units = here.bytes() / one.unit;
        let [here, there] =
            [&mut here, &mut there].map(|side| side.finish().expect("the runs come out of a program"));
        emit(pair, [one.window(here, 0, units), other.window(there, 0, units)]);
    };
    let mut others = other.program.runs();
    let mut there_run = Run { offset: 0, len: 0 };
    for mut here_run in one.program.runs() {
        while here_run.len > 0 {
            if there_run.len == 0 {
                there_run = others.next().expect("both sides select as many");
            }
            let holder = |side: Side<'_>, run: Run| side.spread.holder(run.offset.cast_unsigned());
            let pair = (holder(one, here_run), holder(other, there_run));
            let [here, there] = open.entry(pair).or_insert_with(collectors);
            let stripes = one.in_stripe(here_run.offset).min(other.in_stripe(there_run.offset));
            let runs = (here_run.len / one.unit).min(there_run.len / other.unit);
            let units = runs.min(stripes).min(most - here.bytes() / one.unit);
            let part = |side: Side<'_>, run: Run| Run { offset: run.offset, len: units * side.unit };
            let (here_part, there_part) = (part(one, here_run), part(other, there_run));
            if units == 0 || !here.may_push(here_part) || !there.may_push(there_part) {
                let sides = open.remove(&pair).expect("it was there a moment ago");
                finish(pair, sides);
                continue;
            }
            assert!(here.push(here_part) && there.push(there_part), "they fit");
            let rest =
                |run: Run, done: u64| Run { offset: run.offset + done.cast_signed(), len: run.len - done };
            here_run = rest(here_run, here_part.len);
            there_run = rest(there_run, there_part.len);
        }
    }
    for (pair, sides) in open {
        finish(pair, sides);
    }
}

/// What a window selects, as a program of its own.
fn part_of(window: &Window) -> Program {
    let mut part = Collector::new(usize::MAX);
    for run in window.program.window(window.from, window.len.into()) {
        assert!(part.push(run), "there is no bound");
    }
    part.finish().expect("the runs come out of a program")
}

/// The server that holds all of these bytes, where that is plain to see.
fn only_holder(spread: Spread<'_>, servers: usize, program: &Program) -> Option<ServerIndex> {
    let (low, high) = program.bounds();
    let stripe_bytes = spread.stripe_bytes().cast_signed();
    let holder = spread.holder(low.cast_unsigned());
    (servers == 1 || low / stripe_bytes == (high - 1) / stripe_bytes).then_some(holder)
}

impl Open {
    fn new() -> Self {
        Self { collector: Collector::new(MAX_PROGRAM_BYTES), runs: 0, places: Vec::new(), spans: Vec::new() }
    }

    fn finish(mut self, server: ServerIndex) -> Chunk {
        let len = u32::try_from(self.collector.bytes()).expect("at most REQUEST_BYTES");
        let program = self.collector.finish().expect("the runs come out of a program");
        Chunk { server, window: Window { program, from: 0, len }, places: self.places, spans: self.spans }
    }
}

/// This side's bytes, taken from the front.
struct Local<'a> {
    runs: Option<(Runs<'a>, *mut u8)>,
    rest: Run,
}

impl<'a> Local<'a> {
    fn new(runs: Option<(Runs<'a>, *mut u8)>) -> Self {
        Self { runs, rest: Run { offset: 0, len: 0 } }
    }

    /// Appends the places of the next `len` bytes.
    fn take(&mut self, mut len: u64, places: &mut Vec<PieceMut>) {
        let Some((runs, memory)) = &mut self.runs else { return };
        while len > 0 {
            if self.rest.len == 0 {
                self.rest = runs.next().expect("both sides select as many bytes");
            }
            let part = len.min(self.rest.len);
            let in_memory = |n: u64| usize::try_from(n).expect("a 64-bit machine");
            let ptr = memory.wrapping_add(in_memory(self.rest.offset.cast_unsigned()));
            match places.last_mut() {
                Some(last) if last.ptr.wrapping_add(last.len) == ptr => last.len += in_memory(part),
                _ => places.push(PieceMut { ptr, len: in_memory(part) }),
            }
            self.rest = Run { offset: self.rest.offset + part.cast_signed(), len: self.rest.len - part };
            len -= part;
        }
    }
}

/// Fills the body of a request that moves bytes, and gives the span of those.
fn fill(body: &mut Body, window: Window, places: &[PieceMut]) -> (u64, u64) {
    body.bytes = window.len;
    let span = bounds(&window.program);
    window.append_blocks(&mut body.blocks);
    body.places.extend_from_slice(places);
    body.window = Some(window);
    span
}

/// The bytes of a region that a program reaches.
fn bounds(program: &Program) -> (u64, u64) {
    let (low, high) = program.bounds();
    (low.cast_unsigned(), high.cast_unsigned())
}
