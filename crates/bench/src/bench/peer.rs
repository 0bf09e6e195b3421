//! The raw other end of a comparison: answers requests for bytes over TCP, nothing more.
//!
//! A request is 64 bytes ([`Wanted`], little-endian). The answer is bytes out of [`CONTENT_BYTES`] random
//! ones, repeated: out of the same memory, or out of several copies of it, in pages of 2 MiB as in a memory
//! server. One connection at a time; the process ends with its parent.
//!
//! With `--many` it serves many connections, one request at a time on each, by as few system calls as
//! possible: it receives what came, sends the answer, and asks which sockets have more. There is one copy
//! then.
//!
//! With `--memory` it answers over memory that it shares with its client, spinning: the least that two
//! processes need ([`RawMemory`]).

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rampool_kernel::memory::{Advice, Mapping, advise};
use rampool_kernel::sealed::SealedMemory;
use rampool_wire::frame::page_crc;
use rampool_wire::units::OS_PAGE_BYTES;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;

use super::workload::random_bytes;

pub const REQUEST_BYTES: usize = 64;
pub const CONTENT_BYTES: usize = 1 << 20;
const CONTENT_SEED: u64 = 77;
/// Copies of the content that it sends from.
const MOST_COPIES: u64 = 1024;

/// What a raw peer is asked for: the first four words of a request.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub bytes: u64,
    /// Offset in the copies of the content; it wraps around at their end.
    pub from: u64,
    pub copies: u64,
    /// Makes a checksum of each 4 KiB of the answer before sending, and discards it: the least work of a
    /// sender that checks its pages.
    pub checksummed: bool,
}

impl Wanted {
    /// From the content's start.
    pub fn first(bytes: u64) -> Self {
        Self { bytes, from: 0, copies: 1, checksummed: false }
    }

    pub fn request(self) -> [u8; REQUEST_BYTES] {
        let mut request = [0; REQUEST_BYTES];
        for (place, word) in
            request.chunks_exact_mut(8).zip([self.bytes, self.from, self.copies, self.checksummed.into()])
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
        request
    }

    fn parse(request: &[u8; REQUEST_BYTES]) -> Self {
        let word = |n: usize| u64::from_le_bytes(request[8 * n..8 * n + 8].try_into().expect("eight bytes"));
        Self {
            bytes: word(0),
            from: word(1),
            copies: word(2).clamp(1, MOST_COPIES),
            checksummed: word(3) != 0,
        }
    }
}

/// The raw other end of a benchmark
#[derive(clap::Args, Debug)]
pub struct Args {
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,

    /// Microseconds to spin for bytes before sleeping
    #[arg(long, default_value_t = 0)]
    spin_us: u64,

    /// Pass the first client's bytes on to the second, 64 at a time
    #[arg(long)]
    relay: bool,

    /// Serve many connections
    #[arg(long)]
    many: bool,

    /// Do not change the pacing of sockets
    #[arg(long)]
    as_made: bool,

    /// Answer over the memory of this file
    #[arg(long)]
    memory: Option<std::path::PathBuf>,
}

/// What a peer sends.
pub fn content() -> Vec<u8> {
    random_bytes(CONTENT_SEED, CONTENT_BYTES)
}

pub fn run(args: &Args) -> Result<i32> {
    if let Some(file) = &args.memory {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(file)
            .context("the memory to share cannot be opened")?;
        let memory = RawMemory { memory: SealedMemory::adopt(file.as_fd(), RawMemory::BYTES)? };
        println!("listening on memory");
        memory.answer(&content())
    }
    let listener =
        TcpListener::bind(&args.listen).with_context(|| format!("cannot listen on {}", args.listen))?;
    let content = content();
    println!("listening on {}", listener.local_addr()?);
    let spin = Duration::from_micros(args.spin_us);
    if args.many {
        return answer_many(&listener, &content);
    }
    let mut copies = Copies::new(content)?;
    loop {
        if args.relay {
            let (mut from, mut to) =
                (RawStream::new(listener.accept()?.0, spin)?, RawStream::new(listener.accept()?.0, spin)?);
            // As below.
            let _ = pass_on(&mut from, &mut to);
            continue;
        }
        let (stream, _) = listener.accept()?;
        let mut stream =
            if args.as_made { RawStream::as_made(stream, spin)? } else { RawStream::new(stream, spin)? };
        // A disconnected client is not an error here.
        let _ = answer(&mut stream, &mut copies);
    }
}

fn answer_many(listener: &TcpListener, content: &[u8]) -> Result<i32> {
    const LISTENER: u64 = u64::MAX;
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poll, listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
    let mut streams: Vec<TcpStream> = Vec::new();
    let mut events: Vec<epoll::Event> = Vec::with_capacity(256);
    loop {
        events.clear();
        epoll::wait(&poll, spare_capacity(&mut events), None)?;
        for event in &events {
            let number = event.data.u64();
            if number == LISTENER {
                let (stream, _) = listener.accept()?;
                set_up(&stream)?;
                epoll::add(
                    &poll,
                    &stream,
                    epoll::EventData::new_u64(streams.len() as u64),
                    epoll::EventFlags::IN,
                )?;
                streams.push(stream);
                continue;
            }
            let stream = &mut streams[usize::try_from(number)?];
            let mut request = [0; REQUEST_BYTES];
            let got = stream.read(&mut request).unwrap_or(0);
            let wanted = Wanted::parse(&request);
            let (from, count) = (usize::try_from(wanted.from)?, usize::try_from(wanted.bytes)?);
            match content.get(from..).and_then(|rest| rest.get(..count)) {
                Some(bytes) if got == REQUEST_BYTES && stream.write_all(bytes).is_ok() => {}
                // It is over, or was never a request of ours.
                _ => epoll::delete(&poll, stream)?,
            }
        }
    }
}

/// Copies of the content, one behind the other.
struct Copies {
    content: Vec<u8>,
    memory: Mapping,
    filled: usize,
}

impl Copies {
    fn new(content: Vec<u8>) -> Result<Self> {
        Ok(Self { memory: Mapping::huge_aligned(content.len())?, content, filled: 0 })
    }

    /// So many of them.
    fn first(&mut self, copies: u64) -> Result<&[u8]> {
        let (size, needed) = (self.content.len(), usize::try_from(copies)? * self.content.len());
        if self.filled < needed {
            self.memory = Mapping::huge_aligned(needed)?;
            // SAFETY: keeps the content; the mapping is ours. Without huge pages it works as well.
            let _ = unsafe { advise(self.memory.start(), self.memory.bytes(), Advice::HugePage) };
            for at in (0..needed).step_by(size) {
                // SAFETY: inside the mapping, which nothing else uses.
                unsafe { self.memory.at(at).copy_from_nonoverlapping(self.content.as_ptr(), size) };
            }
            self.filled = needed;
        }
        // SAFETY: this much of it is filled, and nothing writes it while it is borrowed.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.at(0), needed) })
    }
}

fn answer(stream: &mut RawStream, copies: &mut Copies) -> Result<()> {
    let mut request = [0; REQUEST_BYTES];
    let block = copies.content.len();
    loop {
        stream.read_exactly(&mut request)?;
        let wanted = Wanted::parse(&request);
        let source = copies.first(wanted.copies)?;
        let (mut at, mut left) =
            (usize::try_from(wanted.from % source.len() as u64)?, usize::try_from(wanted.bytes)?);
        while left > 0 {
            // As for a sender that keeps blocks of this size.
            let part = &source[at..][..left.min(block - at % block)];
            if wanted.checksummed {
                for page in part.chunks(OS_PAGE_BYTES) {
                    std::hint::black_box(page_crc(page));
                }
            }
            stream.write_exactly(part)?;
            (at, left) = ((at + part.len()) % source.len(), left - part.len());
        }
    }
}

fn pass_on(from: &mut RawStream, to: &mut RawStream) -> std::io::Result<()> {
    let mut message = [0; REQUEST_BYTES];
    loop {
        from.read_exactly(&mut message)?;
        to.write_exactly(&message)?;
    }
}

/// As rampool's own connections: no delay, and no pacing within a machine.
pub fn set_up(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    if stream.peer_addr()?.ip().is_loopback() {
        // If it cannot be set, the machine's choice stays.
        let _ = rustix::net::sockopt::set_tcp_congestion(stream, "reno");
    }
    Ok(())
}

/// A TCP stream that spins for a while and then sleeps, or sleeps at once.
pub struct RawStream {
    stream: TcpStream,
    spin: Duration,
}

impl RawStream {
    pub fn connect(address: &str, spin: Duration) -> Result<Self> {
        let stream = TcpStream::connect(address)
            .with_context(|| format!("cannot connect to the raw peer at {address}"))?;
        Ok(Self::new(stream, spin)?)
    }

    pub fn new(stream: TcpStream, spin: Duration) -> std::io::Result<Self> {
        set_up(&stream)?;
        Self::as_made(stream, spin)
    }

    fn as_made(stream: TcpStream, spin: Duration) -> std::io::Result<Self> {
        stream.set_nonblocking(!spin.is_zero())?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.set_write_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self { stream, spin })
    }

    pub fn ask(&mut self, wanted: Wanted) -> std::io::Result<()> {
        self.write_exactly(&wanted.request())
    }

    /// Asks for `bytes` bytes from the content's start on.
    pub fn request(&mut self, bytes: u64) -> std::io::Result<()> {
        self.ask(Wanted::first(bytes))
    }

    pub fn read_exactly(&mut self, buffer: &mut [u8]) -> std::io::Result<()> {
        let (mut have, mut waiting) = (0, Waiting::default());
        while have < buffer.len() {
            match self.stream.read(&mut buffer[have..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => have += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock && !self.spin.is_zero() => {
                    self.wait(&mut waiting, libc::POLLIN)?
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    pub fn write_exactly(&mut self, mut bytes: &[u8]) -> std::io::Result<()> {
        let mut waiting = Waiting::default();
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock && !self.spin.is_zero() => {
                    self.wait(&mut waiting, libc::POLLOUT)?
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Returns at once while there is time to spin; then sleeps until the socket is ready.
    fn wait(&self, waiting: &mut Waiting, events: i16) -> std::io::Result<()> {
        if waiting.since.get_or_insert_with(Instant::now).elapsed() < self.spin {
            std::hint::spin_loop();
            return Ok(());
        }
        let mut poll = libc::pollfd { fd: self.stream.as_raw_fd(), events, revents: 0 };
        // SAFETY: one pollfd, which lives across the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 60_000) };
        if ready > 0 { Ok(()) } else { Err(ErrorKind::TimedOut.into()) }
    }
}

/// Memory that two processes share: the number of bytes wanted, the number of requests, the number of
/// answers, each on its own cache line; then the bytes.
pub struct RawMemory {
    memory: SealedMemory,
}

impl RawMemory {
    const WANTED: usize = 0;
    const ASKED: usize = 128;
    const ANSWERED: usize = 256;
    const CONTENT: usize = 4096;
    const BYTES: usize = Self::CONTENT + CONTENT_BYTES;

    /// The client's side, and what the peer opens.
    pub fn create() -> Result<(Self, std::os::fd::OwnedFd)> {
        let (memory, fd) = SealedMemory::create(c"rampool-bench", Self::BYTES)?;
        Ok((Self { memory }, fd))
    }

    fn answer(&self, content: &[u8]) -> ! {
        let mut answered = 0;
        loop {
            while self.memory.word64(Self::ASKED).load(Ordering::Acquire) == answered {
                std::hint::spin_loop();
            }
            let wanted = usize::try_from(self.memory.word64(Self::WANTED).load(Ordering::Relaxed))
                .map_or(0, |n| n.min(CONTENT_BYTES));
            // SAFETY: as long as both; the client does not touch it until it is answered.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    content.as_ptr(),
                    self.memory.span(Self::CONTENT, wanted),
                    wanted,
                )
            };
            answered += 1;
            self.memory.word64(Self::ANSWERED).store(answered, Ordering::Release);
        }
    }

    /// Asks for as many bytes as the buffer is long, and spins until they are there.
    pub fn get(&self, buffer: &mut [u8]) -> Result<()> {
        anyhow::ensure!(buffer.len() <= CONTENT_BYTES, "no more than {CONTENT_BYTES} bytes at a time");
        let asked = self.memory.word64(Self::ASKED).load(Ordering::Relaxed) + 1;
        self.memory.word64(Self::WANTED).store(buffer.len() as u64, Ordering::Relaxed);
        self.memory.word64(Self::ASKED).store(asked, Ordering::Release);
        let started = Instant::now();
        let mut looks = 0u32;
        while self.memory.word64(Self::ANSWERED).load(Ordering::Acquire) != asked {
            std::hint::spin_loop();
            looks += 1;
            anyhow::ensure!(
                !looks.is_multiple_of(1 << 16) || started.elapsed() < Duration::from_secs(60),
                "the raw peer does not answer"
            );
        }
        // SAFETY: as long as both; the peer does not touch it until the next request.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.memory.span(Self::CONTENT, buffer.len()),
                buffer.as_mut_ptr(),
                buffer.len(),
            )
        };
        Ok(())
    }
}

#[derive(Default)]
struct Waiting {
    since: Option<Instant>,
}
