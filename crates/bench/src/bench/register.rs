//! The pin-down cache (S3): the cost of a look-up, and throughput against payload when bytes are copied into
//! pinned memory, sent from registered memory, and from memory that is registered for each transfer.

use std::collections::VecDeque;
use std::hint::black_box;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rampool_kernel::OS_PAGE_BYTES;
use rampool_kernel::memory::Mapping;
use rampool_kernel::ring::Sent;
use rampool_kernel::thread::pin_to_cpu;
use rampool_net::registration::{FixedBuffers, Pins};
use rampool_pinning::{Held, Limits, PinCache, RegistrationId, Span};
use rampool_wire::units::PageIndex;
use serde_json::json;

use super::Common;
use super::link::{Link, Rate};
use super::report::{Reach, Report};
use super::service::pin_apart;
use super::workload::{permutation, word};

/// The pin-down cache: look-ups, and throughput against payload for copies, hits and misses
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Put the receiver behind a link of this rate (root only; needs ip and tc) [default: loopback]
    #[arg(long, value_name = "RATE")]
    link: Option<Rate>,
}

const SEED: u64 = 9;
/// Buffers of one payload that take turns, so that none is found in a CPU's small caches.
const BUFFERS: usize = 32;
/// The pinned memory that bytes are copied into, and the longest part of it that is sent at once.
const BOUNCE_BYTES: usize = 2 << 20;
const BOUNCE_PART: usize = 256 << 10;
const DEADLINE: Duration = Duration::from_secs(60);

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let rounds = common.rounds(5, 2);
    // Before any thread starts: namespaces belong to threads.
    let link = args.link.map(Link::make).transpose()?;
    let sink_cpu = pin_apart();
    let over = args.link.map_or("loopback", Rate::name);
    let mut report = Report::start(format!("register, {over}"), common.quick);
    look_ups(&mut report, rounds.max(5), common)?;
    let payloads: Vec<usize> = (10..=common.pick(22, 16)).map(|power| 1 << power).collect();
    let longest = *payloads.last().expect("there are some");
    report.note(format!(
        "TCP between two threads on a CPU each, over {over}; loopback copies whatever the \
        sender does, so a hit saves the copy into pinned memory there and no more"
    ));
    report.note(
        "every byte that arrives is compared once for each way and payload; timed transfers are counted",
    );
    let mut bench = Bench::open(longest, sink_cpu, link.as_ref())?;
    let ways = [Way::Plain, Way::Copy, Way::Hit, Way::Miss];
    let mut figures: Vec<[Vec<f64>; 4]> = Vec::new();
    for payload in &payloads {
        let transfers = (common.pick(16 << 20, 1 << 20) / payload).clamp(8, 2048);
        for way in ways {
            bench
                .transfers(way, *payload, BUFFERS, true)
                .with_context(|| format!("{way:?} of {payload} bytes"))?;
        }
        let mut samples: [Vec<f64>; 4] = Default::default();
        for _ in 0..rounds {
            for (way, samples) in ways.into_iter().zip(&mut samples) {
                let seconds = bench.transfers(way, *payload, transfers, false)?;
                samples.push((payload * transfers) as f64 / seconds / 1e9);
            }
        }
        for (way, samples) in ways.into_iter().zip(&samples) {
            let (registrar, what) = way.names();
            let parameters =
                json!({"experiment": "payload", "payload": payload, "registrar": registrar, "what": what});
            report.series(
                &format!("{} KiB, {registrar}, {what}", payload >> 10),
                "GB/s",
                parameters,
                samples,
            );
        }
        figures.push(samples);
    }
    let of = |way: usize| figures.iter().map(|samples| samples[way].clone()).collect::<Vec<_>>();
    for (what, way) in [("hits", 2), ("misses", 3)] {
        compare(&mut report, what, &payloads, &of(way), &of(1));
    }
    report.note(
        "the paper's, at 4096 KB: copy 248.1 Mbit/s, hits 254.5 (1.026 times as much), misses 253.1 (1.020); \
         zero copy wins from 256 KB on",
    );
    report.finish(common.json.as_deref())
}

/// One way compared with copies: its speed with the longest payload, and from which payload on it is faster.
fn compare(report: &mut Report, what: &str, payloads: &[usize], way: &[Vec<f64>], copies: &[Vec<f64>]) {
    let longest = payloads.last().expect("there are some") >> 10;
    let last = payloads.len() - 1;
    report.ratio(&format!("{longest} KiB, io_uring, {what} against copies"), &way[last], &copies[last], None);
    let median = |samples: &Vec<f64>| super::report::median(samples);
    let from = payloads
        .iter()
        .zip(way.iter().zip(copies))
        .rev()
        .take_while(|(_, (way, copies))| median(way) > median(copies))
        .last();
    report.note(match from {
        Some((payload, _)) => {
            format!("io_uring: {what} are faster than copies from {} KiB on", payload >> 10)
        }
        None => format!("io_uring: {what} are slower than copies up to {longest} KiB"),
    });
}

/// Memory with the content that every transfer is compared with.
fn filled(bytes: usize) -> Result<Mapping> {
    let memory = Mapping::anonymous(bytes)?;
    for at in (0..memory.bytes()).step_by(8) {
        // SAFETY: inside of a mapping of this function's own, at a multiple of 8.
        unsafe { memory.at(at).cast::<u64>().write(word(SEED, at as u64)) };
    }
    Ok(memory)
}

/// Where the buffers of one payload are, in the order in which they take turns.
fn orders(payload: usize) -> Vec<usize> {
    let stride = payload.next_multiple_of(OS_PAGE_BYTES);
    permutation(SEED, BUFFERS).into_iter().map(|buffer| buffer * stride).collect()
}

/// What so many transfers bring.
fn content(order: &[usize], payload: usize, count: usize) -> Vec<u8> {
    let words = order.iter().cycle().take(count).flat_map(|at| (*at..at + payload).step_by(8));
    words.flat_map(|at| word(SEED, at as u64).to_le_bytes()).collect()
}

/// What it costs to find a registration, for caches of different sizes.
fn look_ups(report: &mut Report, rounds: usize, common: &Common) -> Result<()> {
    const PAGES: u64 = 16;
    let looks = common.pick(400_000, 10_000);
    for count in [1u32, 1024, 16384] {
        let limits = Limits { allowance_pages: u64::MAX, registration_pages: PAGES, registrations: count };
        let mut cache = PinCache::new(limits);
        let span = |n: u64| {
            let first = PageIndex(n * (PAGES + 1));
            Span::new(first, first.offset(PAGES)).expect("sixteen pages")
        };
        for n in 0..count.into() {
            let id: RegistrationId = cache.admit(span(n)).map_err(|refused| anyhow!("{refused}"))?;
            while cache.poll().is_some() {}
            let held = cache.registered(id).context("nothing came in between")?;
            cache.release(held);
        }
        let order: Vec<Span> = (0..looks).map(|n| span(word(SEED, n) % u64::from(count))).collect();
        let (mut found, mut pairs) = (Vec::new(), Vec::new());
        let mut held: Vec<Held> = Vec::with_capacity(order.len());
        for _ in 0..rounds {
            let started = Instant::now();
            held.extend(order.iter().filter_map(|span| cache.look_up(*span)));
            found.push(started.elapsed().as_secs_f64() * 1e9 / looks as f64);
            if held.len() != order.len() {
                bail!("WRONG ANSWER: {} of {} look-ups found what is registered", held.len(), order.len());
            }
            held.drain(..).for_each(|held| cache.release(held));
            let started = Instant::now();
            for span in &order {
                let held = cache.look_up(*span).context("WRONG ANSWER: what is registered was not found")?;
                cache.release(black_box(held));
            }
            pairs.push(started.elapsed().as_secs_f64() * 1e9 / looks as f64);
        }
        let parameters = |what: &str| json!({"what": what, "registrations": count});
        report.series(&format!("look-up among {count}"), "ns", parameters("look-up"), &found);
        report.series(&format!("look-up and release among {count}"), "ns", parameters("both"), &pairs);
        if count == 1024 {
            let floor = vec![100.0; found.len()];
            report.ratio("look-up among 1024, in 100 ns", &found, &floor, Some(Reach::AtMost(1.0)));
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// `send` from where the bytes are: the kernel copies.
    Plain,
    /// Into pinned memory, and sent from there.
    Copy,
    Hit,
    Miss,
}

impl Way {
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Plain => ("none", "plain send"),
            Self::Copy => ("io_uring", "copy"),
            Self::Hit => ("io_uring", "hit"),
            Self::Miss => ("io_uring", "miss"),
        }
    }
}

struct Bench {
    socket: TcpStream,
    buffers: Mapping,
    pins: Pins,
    bounce: Bounce,
    sink: Sink,
}

/// Pinned memory that bytes are copied into.
struct Bounce {
    memory: Mapping,
    held: Held,
    /// Which part is used next, and the sends that still read from parts, oldest first.
    next: usize,
    reading: VecDeque<u64>,
}

impl Bounce {
    fn new(pins: &mut Pins) -> Result<Self> {
        let memory = Mapping::anonymous(BOUNCE_BYTES)?;
        let held = pins.acquire(memory.start(), memory.bytes())?;
        Ok(Self { memory, held, next: 0, reading: VecDeque::new() })
    }
}

impl Bench {
    fn open(longest: usize, sink_cpu: Option<usize>, link: Option<&Link>) -> Result<Self> {
        let buffers = filled(BUFFERS * longest)?;
        let listener = match link {
            Some(link) => link.listen()?,
            None => TcpListener::bind("127.0.0.1:0")?,
        };
        let socket = TcpStream::connect(listener.local_addr()?)?;
        // The machine's own choice may pace even connections within it, by a timer (BBR).
        super::peer::set_up(&socket)?;
        socket.set_nonblocking(true)?;
        let (receiving, _) = listener.accept()?;
        receiving.set_read_timeout(Some(DEADLINE))?;
        let allowance = (buffers.bytes() + BOUNCE_BYTES + (1 << 20)) as u64;
        let mut pins = Pins::new(FixedBuffers::open(64)?, allowance);
        let bounce = Bounce::new(&mut pins)?;
        Ok(Self { socket, buffers, pins, bounce, sink: Sink::start(receiving, sink_cpu) })
    }

    /// So many transfers of one payload, the buffers taking turns. Seconds until all had arrived.
    fn transfers(&mut self, way: Way, payload: usize, count: usize, compare: bool) -> Result<f64> {
        let order = orders(payload);
        if way == Way::Hit {
            for at in &order {
                let held = self.pins.acquire(self.buffers.start() + at, payload)?;
                self.pins.release(held);
            }
        } else {
            self.pins.unpin_unused();
        }
        let expected = compare.then(|| content(&order, payload, count));
        self.sink.expect(payload * count, expected)?;
        let before = self.pins.counts();
        let started = Instant::now();
        for at in order.iter().cycle().take(count) {
            self.transfer(way, *at, payload)?;
        }
        self.sink.wait()?;
        let seconds = started.elapsed().as_secs_f64();
        let after = self.pins.counts();
        let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
        let n = count as u64;
        let wanted = match way {
            Way::Hit => (n, 0),
            Way::Miss => (0, n),
            Way::Plain | Way::Copy => (0, 0),
        };
        if (hits, misses) == wanted {
            Ok(seconds)
        } else {
            bail!("{way:?}: {hits} hits and {misses} misses in {n} transfers")
        }
    }

    fn transfer(&mut self, way: Way, at: usize, payload: usize) -> Result<()> {
        let (start, memory) = (self.buffers.start() + at, self.buffers.at(at).cast_const());
        match way {
            Way::Plain => send(&self.socket, memory, payload),
            Way::Hit | Way::Miss => {
                let held = self.pins.acquire(start, payload)?;
                send_zero_copy(&self.socket, &mut self.pins, &held, memory, payload)?;
                self.pins.release(held);
                if way == Way::Miss {
                    self.pins.unpin_unused();
                }
                Ok(())
            }
            Way::Copy => {
                let part = payload.min(BOUNCE_PART);
                for done in (0..payload).step_by(part) {
                    let bounce = &mut self.bounce;
                    let parts = (BOUNCE_BYTES / part).min(128);
                    let to = bounce.memory.at(bounce.next % parts * part);
                    bounce.next += 1;
                    // The part is free when the send that read from it has ended.
                    while bounce.reading.len() >= parts {
                        self.pins.buffers().ring().wait()?;
                        while let Some(ended) = self.pins.buffers().ring().ended() {
                            bounce.reading.retain(|number| *number != ended.number);
                        }
                    }
                    // SAFETY: the part is this bench's own, and read by no send; the buffers are as long as
                    // the payload.
                    unsafe { std::ptr::copy_nonoverlapping(memory.add(done), to, part) };
                    let last = send_zero_copy(&self.socket, &mut self.pins, &bounce.held, to, part)?;
                    bounce.reading.push_back(last);
                }
                Ok(())
            }
        }
    }
}

/// The kernel copies.
fn send(socket: &TcpStream, memory: *const u8, bytes: usize) -> Result<()> {
    // SAFETY: memory of this bench's own, which nothing writes during the call.
    let mut left = unsafe { std::slice::from_raw_parts(memory, bytes) };
    while !left.is_empty() {
        match (&*socket).write(left) {
            Ok(n) => left = &left[n..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => writable(socket)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The number of the last send.
fn send_zero_copy(
    socket: &TcpStream,
    pins: &mut Pins,
    held: &Held,
    memory: *const u8,
    bytes: usize,
) -> Result<u64> {
    let (place, ring) = (FixedBuffers::place(held.registration()), pins.buffers().ring());
    let (mut done, mut last) = (0, 0);
    while done < bytes {
        // SAFETY: memory of this bench's own, registered at that place; it is not written before its sends
        // have ended, or holds the same bytes for good.
        match unsafe { ring.send(socket.as_fd(), memory.wrapping_add(done), bytes - done, Some(place)) }? {
            Sent::Taken { bytes, number } => (done, last) = (done + bytes, number),
            Sent::Blocked => writable(socket)?,
            Sent::Unsupported => bail!("the kernel does not send without a copy here"),
        }
    }
    Ok(last)
}

fn writable(socket: &TcpStream) -> Result<()> {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    let limit = i32::try_from(DEADLINE.as_millis())?;
    // SAFETY: one pollfd, which lives across the call.
    if unsafe { libc::poll(&raw mut poll, 1, limit) } <= 0 {
        bail!("the other end takes no more bytes")
    } else {
        Ok(())
    }
}

/// The other end: reads, compares where it is told to, and says when all is there.
struct Sink {
    orders: Option<Sender<(usize, Option<Vec<u8>>)>>,
    done: Receiver<std::io::Result<bool>>,
    thread: Option<JoinHandle<()>>,
}

impl Sink {
    fn start(mut socket: TcpStream, cpu: Option<usize>) -> Self {
        let (orders, wanted) = channel::<(usize, Option<Vec<u8>>)>();
        let (tell, done) = channel();
        let thread = std::thread::spawn(move || {
            if let Some(cpu) = cpu {
                // Where it may not run there, it runs elsewhere.
                let _ = pin_to_cpu(cpu);
            }
            let mut room = vec![0; 256 << 10];
            for (bytes, expected) in wanted {
                let mut got = 0;
                let mut right = true;
                let result = loop {
                    if got == bytes {
                        break Ok(right);
                    }
                    let most = room.len().min(bytes - got);
                    match socket.read(&mut room[..most]) {
                        Ok(0) => break Err(ErrorKind::UnexpectedEof.into()),
                        Ok(n) => {
                            // A sender without copies has its memory back when the bytes are acknowledged: at
                            // once.
                            let _ = quick(&socket);
                            right &=
                                expected.as_ref().is_none_or(|expected| room[..n] == expected[got..got + n]);
                            got += n;
                        }
                        Err(error) => break Err(error),
                    }
                };
                if tell.send(result).is_err() {
                    return;
                }
            }
        });
        Self { orders: Some(orders), done, thread: Some(thread) }
    }

    fn expect(&self, bytes: usize, expected: Option<Vec<u8>>) -> Result<()> {
        self.orders
            .as_ref()
            .expect("until it is dropped")
            .send((bytes, expected))
            .context("the receiving thread is gone")
    }

    fn wait(&self) -> Result<()> {
        match self.done.recv_timeout(DEADLINE)? {
            Ok(true) => Ok(()),
            Ok(false) => bail!("WRONG BYTES arrived"),
            Err(error) => Err(error).context("the receiving end"),
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.orders = None;
        // It ends with the connection or at its own deadline; a bench that failed does not wait for it.
        drop(self.thread.take());
    }
}

fn quick(socket: &TcpStream) -> std::io::Result<()> {
    let on: libc::c_int = 1;
    let len = libc::socklen_t::try_from(size_of_val(&on)).expect("four");
    // SAFETY: the option is an int, which lives across the call.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_QUICKACK,
            (&raw const on).cast(),
            len,
        )
    };
    if rc == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
