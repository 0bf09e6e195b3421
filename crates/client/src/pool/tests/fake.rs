#![allow(clippy::cast_possible_truncation)]
//! A memory server for tests: small, in this process, and able to misbehave on demand. It keeps pages in maps
//! and its own account of credits.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rampool_wire::frame::{
    self, AttachLease, Granted, Header, LeaseId, LeaseToken, MemberId, Opcode, OpenLease, PageEntry, Status,
};
use rampool_wire::session::{Encryption, features};
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use rampool_net::transport::{
    Endpoint, Handshake, Link, Listener, LocalPolicy, Piece, PieceMut, Received, Urgency, Wants,
};

/// What the server does besides, or instead of, its work.
#[derive(Default)]
pub struct Mood {
    /// Send this page with a flipped bit so many times more.
    pub damage: BTreeMap<u64, u32>,
    /// Close the connection instead of answering this.
    pub hang_up_on: Option<Opcode>,
    /// Read, but never answer, this.
    pub ignore: Option<Opcode>,
    /// Read nothing any more.
    pub deaf: bool,
    /// Keep answers until `hold` is off again; then give them last first.
    pub hold: bool,
    /// Answer a store when its head is here, before its pages.
    pub hasty: bool,
    /// Answer twice.
    pub echo: bool,
    /// Send a byte too few of a part of a page, or a checksum that is none.
    pub short_piece: bool,
    pub odd_checksum: bool,
    /// Bytes that are still free; stores beyond fail.
    pub room: Option<u64>,
}

pub struct State {
    pub mood: Mood,
    pub lendable: u64,
    pub lent: u64,
    pub regions: BTreeMap<u64, BTreeMap<u64, (PageEntry, Vec<u8>)>>,
    pub members: u64,
    pub departed: u64,
    /// The order in which requests for pages arrived.
    pub order: Vec<(Opcode, u64)>,
    /// The most requests and page bytes that were unanswered at one time.
    pub most: (u32, u64),
    next_region: u64,
    token: LeaseToken,
}

/// Credits the server grants.
pub const MAX_REQUESTS: u32 = 16;
pub const MAX_BYTES: u32 = 1 << 20;

pub struct Fake {
    pub endpoint: Endpoint,
    state: Arc<Mutex<State>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    pub fn start(lendable: u64) -> Self {
        Self::start_at(&"127.0.0.1:0".parse().unwrap(), lendable, 1)
    }

    /// Ends the server; another run begins at its address, with nothing of what it had, and the same numbers.
    pub fn restart(&mut self) {
        self.kill();
        let lendable = self.state().lendable;
        let run = self.state().token.0[0];
        *self = Self::start_at(&self.endpoint.clone(), lendable, run + 1);
    }

    fn start_at(endpoint: &Endpoint, lendable: u64, run: u8) -> Self {
        let listener = Listener::bind(endpoint).unwrap();
        let endpoint = listener.endpoint().clone();
        let stop = Arc::new(AtomicBool::new(false));
        let state = Arc::new(Mutex::new(State {
            mood: Mood::default(),
            lendable,
            lent: 0,
            regions: BTreeMap::new(),
            members: 0,
            departed: 0,
            order: Vec::new(),
            most: (0, 0),
            next_region: 1,
            token: LeaseToken([run; 16]),
        }));
        let thread = {
            let (state, stop) = (state.clone(), stop.clone());
            std::thread::spawn(move || accept(&listener, &state, &stop))
        };
        Self { endpoint, state, stop, thread: Some(thread) }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Ends the server and all its connections, as a kill does.
    pub fn kill(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

fn accept(listener: &Listener, state: &Arc<Mutex<State>>, stop: &Arc<AtomicBool>) {
    let mut threads = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        wait(listener, false);
        let Some(stream) = listener.accept().unwrap() else { continue };
        let (state, stop) = (state.clone(), stop.clone());
        threads.push(std::thread::spawn(move || {
            let local = LocalPolicy {
                key: None,
                encryption: Encryption::Auto,
                features: features::PIECES,
                ucx: None,
            };
            let mut handshake = Handshake::server(stream, local, None);
            while !stop.load(Ordering::Relaxed) {
                match handshake.advance::<Vec<u8>>() {
                    Ok(Some(link)) => return serve(link, &state, &stop),
                    Ok(None) => wait(&handshake, handshake.wants() == Wants::Write),
                    Err(_) => return,
                }
            }
        }));
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Waits for a socket, but not for long: `stop` is looked at in between.
fn wait(fd: &impl AsFd, write: bool) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let flags = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let _ = poll(&mut [PollFd::new(fd, flags)], Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
}

struct Connection {
    link: Link<Vec<u8>>,
    held: Vec<(Header, Vec<u8>, Vec<u8>)>,
    bulk: Vec<u8>,
    put: (Vec<Extent>, Vec<PageEntry>),
    unanswered: BTreeMap<u64, u64>,
}

fn serve(link: Link<Vec<u8>>, state: &Mutex<State>, stop: &AtomicBool) {
    let mut connection = Connection {
        link,
        held: Vec::new(),
        bulk: Vec::new(),
        put: Default::default(),
        unanswered: BTreeMap::new(),
    };
    while !stop.load(Ordering::Relaxed) {
        if state.lock().unwrap().mood.deaf {
            std::thread::yield_now();
            continue;
        }
        if !state.lock().unwrap().mood.hold {
            for (header, table, bulk) in std::mem::take(&mut connection.held).into_iter().rev() {
                connection.send(header, &table, bulk);
            }
        }
        if connection.link.flush().is_err() {
            return;
        }
        match connection.link.receive() {
            Ok(Received::Blocked) => {
                let _ = connection.link.wait(Instant::now() + Duration::from_millis(2));
            }
            Ok(Received::Head(header)) => {
                if !connection.head(header, &mut state.lock().unwrap()) {
                    return;
                }
            }
            Ok(Received::Bulk(header)) => connection.stored(&header, &mut state.lock().unwrap()),
            Err(_) => return,
        }
    }
}

impl Connection {
    /// False: hang up.
    fn head(&mut self, header: Header, state: &mut State) -> bool {
        let table = self.link.table().to_vec();
        if state.mood.hang_up_on == Some(header.opcode) {
            return false;
        }
        let mut extents = Vec::new();
        let bytes = match header.opcode {
            Opcode::Get => frame::parse_extents(&header, &table, &mut extents).unwrap() * OS_PAGE_BYTES,
            Opcode::Put => {
                frame::parse_put(&header, &table, false, &mut self.put.0, &mut self.put.1).unwrap()
                    * OS_PAGE_BYTES
            }
            _ => 0,
        };
        self.unanswered.insert(header.request, bytes as u64);
        let now = (self.unanswered.len() as u32, self.unanswered.values().sum());
        state.most = (state.most.0.max(now.0), state.most.1.max(now.1));
        if let Some(first) = extents.first().or(self.put.0.first()).filter(|_| bytes > 0) {
            state.order.push((header.opcode, first.first.0));
        }
        let ok = header.reply(Status::Ok);
        match header.opcode {
            Opcode::OpenLease => {
                let asked = OpenLease::parse(&table).unwrap().bytes;
                if asked > state.lendable - state.lent {
                    self.answer(
                        state,
                        header.reply(Status::LeaseRefused).with_arg(state.lendable - state.lent),
                        &[],
                        Vec::new(),
                    );
                    return true;
                }
                state.lent += asked;
                state.members += 1;
                self.grant(state, ok);
            }
            Opcode::AttachLease => {
                let asked = AttachLease::parse(&table).unwrap();
                if !asked.token.matches(&state.token) {
                    self.answer(state, header.reply(Status::NoSuchLease), b"no such lease", Vec::new());
                    return true;
                }
                // Who comes back is who it was.
                if asked.member == MemberId(0) {
                    state.members += 1;
                }
                self.grant(state, ok);
            }
            Opcode::ResizeLease if header.arg > state.lendable => {
                self.answer(
                    state,
                    header.reply(Status::LeaseRefused).with_arg(state.lendable - state.lent),
                    &[],
                    Vec::new(),
                );
            }
            Opcode::ResizeLease => {
                state.lent = header.arg;
                self.answer(state, ok, &[], Vec::new());
            }
            Opcode::CreateRegion | Opcode::CloneRegion => {
                let content = state
                    .regions
                    .get(&header.region)
                    .filter(|_| header.opcode == Opcode::CloneRegion)
                    .cloned()
                    .unwrap_or_default();
                let id = state.next_region;
                state.next_region += 1;
                state.regions.insert(id, content);
                self.answer(state, Header { region: id, ..ok }, &[], Vec::new());
            }
            Opcode::OpenRegion => {
                self.answer(state, Header { region: header.region, arg: header.arg, ..ok }, &[], Vec::new());
            }
            Opcode::FreeRegion => {
                state.regions.remove(&header.region);
                self.answer(state, ok, &[], Vec::new());
            }
            Opcode::Get => self.get(header, &extents, state),
            Opcode::Put => {
                if state.mood.hasty {
                    self.answer(state, ok, &[], Vec::new());
                }
                if header.bulk_len == 0 {
                    self.stored(&header, state);
                } else {
                    self.bulk.resize(header.bulk_len as usize, 0);
                    // SAFETY: `bulk` is not touched before the link says that it is filled, or is gone.
                    unsafe {
                        self.link.place(&[PieceMut { ptr: self.bulk.as_mut_ptr(), len: self.bulk.len() }])
                    };
                }
            }
            Opcode::Discard => {
                frame::parse_extents(&header, &table, &mut extents).unwrap();
                let region = state.regions.get_mut(&header.region).unwrap();
                region.retain(|page, _| {
                    !extents.iter().any(|e| e.contains(rampool_wire::units::PageIndex(*page)))
                });
                self.answer(state, ok, &[], Vec::new());
            }
            Opcode::ReadPiece => {
                let piece = frame::Piece::parse(&header).unwrap();
                state.order.push((header.opcode, piece.page.0));
                let stored = state.regions[&header.region].get(&piece.page.0);
                let mut bytes =
                    stored.map_or(vec![0; piece.len], |(_, page)| page[piece.within..][..piece.len].to_vec());
                let crc = rampool_wire::checksum::crc32c(&bytes);
                if let Some(times) = state.mood.damage.get_mut(&piece.page.0).filter(|times| **times > 0) {
                    *times -= 1;
                    bytes[0] ^= 4;
                }
                bytes.truncate(piece.len - usize::from(state.mood.short_piece));
                let odd = u64::from(state.mood.odd_checksum) << 32;
                self.answer(state, ok.with_arg(u64::from(crc) | odd), &[], bytes);
            }
            Opcode::Goodbye => {
                state.departed += 1;
                self.answer(state, ok, &[], Vec::new());
            }
            _ => self.answer(state, ok, &[], Vec::new()),
        }
        true
    }

    fn grant(&mut self, state: &mut State, ok: Header) {
        let granted = Granted {
            lease: LeaseId(1),
            token: state.token,
            member: MemberId(state.members),
            server: state.token.0[0].into(),
            lease_bytes: state.lent,
            max_requests: MAX_REQUESTS,
            max_bytes: MAX_BYTES,
            grace_ms: 1000,
            heartbeat_ms: 200,
        };
        self.answer(state, ok, &granted.encode(), Vec::new());
    }

    fn get(&mut self, header: Header, extents: &[Extent], state: &mut State) {
        let Some(region) = state.regions.get(&header.region) else {
            self.answer(state, header.reply(Status::NoSuchRegion), b"no such region", Vec::new());
            return;
        };
        let (mut entries, mut bulk) = (Vec::new(), Vec::new());
        for page in extents.iter().flat_map(Extent::pages) {
            let Some((entry, bytes)) = region.get(&page.0) else {
                entries.push(PageEntry::ZERO);
                continue;
            };
            entries.push(*entry);
            let at = bulk.len();
            bulk.extend_from_slice(bytes);
            if let Some(times) = state.mood.damage.get_mut(&page.0).filter(|times| **times > 0) {
                *times -= 1;
                bulk[at + 1234] ^= 4;
            }
        }
        let mut head = Vec::new();
        frame::encode_get_reply(&mut head, header.reply(Status::Ok), &entries, &[]);
        self.answer(state, header.reply(Status::Ok), &head[frame::HEADER_BYTES..], bulk);
    }

    fn stored(&mut self, header: &Header, state: &mut State) {
        let (extents, entries) = std::mem::take(&mut self.put);
        let needed = entries.iter().filter(|e| !e.is_zero()).count() as u64 * OS_PAGE_BYTES as u64;
        if let Some(room) = &mut state.mood.room {
            if needed > *room {
                let free = *room;
                self.answer(state, header.reply(Status::PoolFull).with_arg(free), b"full", Vec::new());
                return;
            }
            *room -= needed;
        }
        let Some(region) = state.regions.get_mut(&header.region) else {
            self.answer(state, header.reply(Status::NoSuchRegion), b"no such region", Vec::new());
            return;
        };
        let mut bulk = &self.bulk[..];
        for (page, entry) in extents.iter().flat_map(Extent::pages).zip(entries) {
            if entry.is_zero() {
                region.remove(&page.0);
                continue;
            }
            let (bytes, rest) = bulk.split_at(entry.len as usize);
            assert_eq!(frame::page_crc(bytes), entry.crc, "the client's checksum");
            region.insert(page.0, (entry, bytes.to_vec()));
            bulk = rest;
        }
        if !state.mood.hasty {
            self.answer(state, header.reply(Status::Ok), &[], Vec::new());
        }
    }

    fn answer(&mut self, state: &State, header: Header, table: &[u8], bulk: Vec<u8>) {
        if state.mood.ignore == Some(header.opcode) {
            return;
        }
        if state.mood.hold && matches!(header.opcode, Opcode::Get | Opcode::Put) {
            self.held.push((header, table.to_vec(), bulk));
            return;
        }
        if state.mood.echo {
            self.send(header, table, bulk.clone());
        }
        self.send(header, table, bulk);
    }

    fn send(&mut self, header: Header, table: &[u8], bulk: Vec<u8>) {
        self.unanswered.remove(&header.request);
        let mut head = Vec::new();
        frame::encode_frame(&mut head, header, table, bulk.len());
        let piece = Piece { ptr: bulk.as_ptr(), len: bulk.len() };
        // SAFETY: the piece is the guard's own memory.
        unsafe { self.link.send(Urgency::Demand, &head, &[piece], bulk) };
    }
}
