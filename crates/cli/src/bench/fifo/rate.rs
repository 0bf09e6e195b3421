//! Messages a second: senders append 64 bytes each to one queue (`RPUSH` to one list), a receiver takes 160 at a time and acknowledges them (`LPOP key 160`).
//!
//! One thread drives all connections of either, and both do the same work: each message is made, sent, received and compared.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool::transport::{Endpoint, Link, LocalPolicy, Received, Urgency, connect};
use rampool_proto::session::Encryption;
use rampool_proto::wire::{
    AttachLease, Body, Delivery, Granted, Header, MemberId, Opcode, OpenLease, Push, QueueBounds, Status, Take, encode_frame, parse_message,
};
use serde_json::json;

use super::super::report::{Reach, Report};
use super::super::server::{WorkDir, memory, start_redis};
use super::super::service::{Place, Service};
use super::super::workload::word;
use super::{Args, HEAD_BYTES, PATIENCE, SPIN};

/// Messages at a time: as many of 64 bytes as one answer has room for.
const BATCH: u16 = 160;

/// One connection: requests queued, answers taken.
trait Way {
    /// Queues a message.
    fn push(&mut self, message: &[u8; HEAD_BYTES]);
    /// Queues a request for messages.
    fn take(&mut self);
    fn send(&mut self) -> Result<()>;
    /// Takes what has come: how many messages were accepted, and the messages that came. True if an answer to a `take` did.
    fn receive(&mut self, accepted: &mut usize, messages: &mut Vec<[u8; HEAD_BYTES]>) -> Result<bool>;
}

pub fn run(report: &mut Report, place: &Place<'_>, args: &Args) -> Result<()> {
    let quick = args.common.quick;
    let length = Duration::from_millis(if quick { 50 } else { 1000 });
    let server = Service::memory_server(place, 2 << 30, SPIN)?;
    let dir = WorkDir::create()?;
    let (redis, address) = start_redis(&args.redis, false, &[], &dir.0, place.server_cpu)?;
    let super::super::server::redis::Address::Tcp(port) = address else { bail!("redis listens over TCP") };
    let mut ours = memory_ways(&server.address.parse()?, args.senders + 1)?;
    let mut theirs: Vec<Box<dyn Way>> = Vec::new();
    for _ in 0..=args.senders {
        theirs.push(Box::new(Redis::connect(port)?));
    }
    let (mut our_rates, mut their_rates) = (Vec::new(), Vec::new());
    for round in 0..=args.common.rounds(7, 1) {
        let rates = [drive(&mut ours, args.depth, length)?, drive(&mut theirs, args.depth, length)?];
        if round > 0 {
            our_rates.push(rates[0]);
            their_rates.push(rates[1]);
        }
    }
    drop(redis);
    let senders = args.senders;
    report.note(format!(
        "the rate: {senders} senders with {} messages unanswered each and one receiver that takes up to {BATCH} at a time, driven by one thread; rampool's receiver \
         acknowledges what it took with its next request, redis forgets it at once",
        args.depth
    ));
    report.series(
        &format!("messages a second, {senders} senders: rampool"),
        "1/s",
        json!({ "what": "rate", "server": "rampool" }),
        &our_rates,
    );
    report.series(
        &format!("messages a second, {senders} senders: redis RPUSH and LPOP"),
        "1/s",
        json!({ "what": "rate", "server": "redis" }),
        &their_rates,
    );
    report.ratio("messages a second: rampool / redis", &our_rates, &their_rates, Some(Reach::AtLeast(3.0)));
    Ok(())
}

/// As many messages as fit the time; all of them are received at the end. The last way is the receiver's.
fn drive(ways: &mut [Box<dyn Way>], depth: usize, length: Duration) -> Result<f64> {
    let (receiver, senders) = ways.split_last_mut().expect("a receiver");
    let (mut sent, mut accepted, mut got) = (0u64, 0u64, 0u64);
    let mut unanswered = vec![0usize; senders.len()];
    let mut seen: BTreeSet<u64> = BTreeSet::new();
    let mut next_in_order = 0;
    let mut asked = false;
    let mut messages = Vec::new();
    let started = Instant::now();
    let mut last = started;
    loop {
        let now = Instant::now();
        let over = now.duration_since(started) >= length;
        for (way, unanswered) in senders.iter_mut().zip(&mut unanswered) {
            if !over {
                while *unanswered < depth {
                    way.push(&message(sent));
                    sent += 1;
                    *unanswered += 1;
                }
            }
            way.send()?;
            let mut answers = 0;
            way.receive(&mut answers, &mut messages)?;
            *unanswered -= answers;
            accepted += answers as u64;
        }
        if !asked {
            receiver.take();
            receiver.send()?;
            asked = true;
        }
        asked &= !receiver.receive(&mut 0, &mut messages)?;
        if !messages.is_empty() {
            last = now;
        }
        for got_message in messages.drain(..) {
            got += 1;
            let number = u64::from_le_bytes(got_message[..8].try_into().expect("eight bytes"));
            if got_message != message(number) || number < next_in_order || !seen.insert(number) {
                bail!("WRONG MESSAGE {number}");
            }
            while seen.remove(&next_in_order) {
                next_in_order += 1;
            }
        }
        if over && accepted == sent && got == sent && !asked {
            return Ok(sent as f64 / started.elapsed().as_secs_f64());
        }
        if now.duration_since(last) > PATIENCE {
            bail!("{got} of {sent} messages came, and then none for {PATIENCE:?}");
        }
    }
}

fn message(number: u64) -> [u8; HEAD_BYTES] {
    let mut bytes = [0; HEAD_BYTES];
    for (n, place) in (0..).zip(bytes.chunks_exact_mut(8)) {
        place.copy_from_slice(&if n == 0 { number } else { word(9, number + n) }.to_le_bytes());
    }
    bytes
}

// --- rampool ---------------------------------------------------------------------------------------------------------------------------

struct Memory {
    link: Link,
    request: u64,
    queue: u64,
    head: Vec<u8>,
    table: Vec<u8>,
    acknowledged: Vec<u64>,
}

fn memory_ways(endpoint: &Endpoint, count: usize) -> Result<Vec<Box<dyn Way>>> {
    let policy = LocalPolicy { key: None, encryption: Encryption::Auto, features: 0 };
    let mut ways: Vec<Box<dyn Way>> = Vec::new();
    let mut granted: Option<Granted> = None;
    for _ in 0..count {
        let link = connect(endpoint, policy.clone(), Instant::now() + PATIENCE)?;
        let mut way = Memory { link, request: 0, queue: 0, head: Vec::new(), table: Vec::new(), acknowledged: Vec::new() };
        match &granted {
            None => {
                let open = OpenLease { bytes: 1 << 30, pid: std::process::id(), name: "bench".into(), host: "here".into() };
                granted = Some(Granted::parse(&way.call(Opcode::OpenLease, 0, &open.encode())?.1)?);
            }
            Some(first) => {
                let (lease, token, member) = (first.lease, first.token, MemberId(0));
                let attach = AttachLease { lease, token, member, pid: std::process::id(), name: "bench".into(), host: "here".into() };
                way.call(Opcode::AttachLease, 0, &attach.encode())?;
            }
        }
        let mut table = Vec::new();
        QueueBounds { messages: 1 << 20, bytes: 512 << 20 }.encode("rate", &mut table);
        way.queue = way.call(Opcode::OpenQueue, 1, &table)?.0.arg;
        ways.push(Box::new(way));
    }
    Ok(ways)
}

impl Memory {
    fn ask(&mut self, opcode: Opcode, arg: u64) {
        self.request += 1;
        self.head.clear();
        encode_frame(&mut self.head, Header::request(opcode, self.request).with_arg(arg), &self.table, 0);
        self.link.send_head(Urgency::Demand, &self.head, ());
    }

    /// A request and its answer. Blocks.
    fn call(&mut self, opcode: Opcode, arg: u64, table: &[u8]) -> Result<(Header, Vec<u8>)> {
        self.table = table.to_vec();
        self.ask(opcode, arg);
        memory::answer(&mut self.link)
    }
}

impl Way for Memory {
    fn push(&mut self, message: &[u8; HEAD_BYTES]) {
        self.table.clear();
        Push { patience_ms: 1000, head: message, body: Body::None }.encode(&mut self.table);
        self.ask(Opcode::Push, self.queue);
    }

    fn take(&mut self) {
        self.table.clear();
        let acknowledged = std::mem::take(&mut self.acknowledged);
        // Not a patient one: the same as the other's.
        Take { patience_ms: 0, most: BATCH, acknowledged }.encode(&mut self.table);
        self.ask(Opcode::Take, self.queue);
    }

    fn send(&mut self) -> Result<()> {
        self.link.flush()?;
        Ok(())
    }

    fn receive(&mut self, accepted: &mut usize, messages: &mut Vec<[u8; HEAD_BYTES]>) -> Result<bool> {
        let mut took = false;
        loop {
            match self.link.receive()? {
                Received::Blocked => return Ok(took),
                Received::Bulk(_) => bail!("the memory server sent pages that nobody asked for"),
                Received::Head(header) if header.status != Status::Ok => {
                    bail!("the memory server says: {}", parse_message(self.link.table()))
                }
                Received::Head(header) if header.opcode == Opcode::Take => {
                    took = true;
                    for delivery in Delivery::parse_all(self.link.table())? {
                        messages.push(delivery.head.try_into().context("a head of another length")?);
                        self.acknowledged.push(delivery.number);
                    }
                }
                Received::Head(_) => *accepted += 1,
            }
        }
    }
}

// --- redis -----------------------------------------------------------------------------------------------------------------------------

struct Redis {
    socket: TcpStream,
    asked: Vec<u8>,
    received: Box<[u8]>,
    filled: usize,
    /// Values of an answer that have not come.
    values: usize,
}

impl Redis {
    fn connect(port: u16) -> Result<Self> {
        let socket = TcpStream::connect(("127.0.0.1", port))?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, asked: Vec::new(), received: vec![0; 256 * 1024].into(), filled: 0, values: 0 })
    }

    /// The next line of what has come, and where what follows it begins.
    fn line(&self, from: usize) -> Option<(&[u8], usize)> {
        let rest = &self.received[from..self.filled];
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        Some((&rest[..end], from + end + 2))
    }
}

impl Way for Redis {
    fn push(&mut self, message: &[u8; HEAD_BYTES]) {
        self.asked.extend_from_slice(b"*3\r\n$5\r\nRPUSH\r\n$4\r\nrate\r\n$64\r\n");
        self.asked.extend_from_slice(message);
        self.asked.extend_from_slice(b"\r\n");
    }

    fn take(&mut self) {
        self.asked.extend_from_slice(b"*3\r\n$4\r\nLPOP\r\n$4\r\nrate\r\n$3\r\n160\r\n");
    }

    fn send(&mut self) -> Result<()> {
        while !self.asked.is_empty() {
            match self.socket.write(&self.asked) {
                Ok(n) => drop(self.asked.drain(..n)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn receive(&mut self, accepted: &mut usize, messages: &mut Vec<[u8; HEAD_BYTES]>) -> Result<bool> {
        match self.socket.read(&mut self.received[self.filled..]) {
            Ok(0) => bail!("redis closed the connection"),
            Ok(n) => self.filled += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        let (mut start, mut took) = (0, false);
        while let Some((line, next)) = self.line(start) {
            match line {
                // The length of the list.
                [b':', ..] => *accepted += 1,
                b"*-1" | b"$-1" => took = true,
                [b'*', digits @ ..] => self.values = std::str::from_utf8(digits)?.parse()?,
                b"$64" => {
                    let Some(value) = self.received[next..self.filled].first_chunk::<{ HEAD_BYTES + 2 }>() else { break };
                    messages.push(*value.first_chunk().expect("shorter"));
                    self.values -= 1;
                    took = self.values == 0;
                    start = next + HEAD_BYTES + 2;
                    continue;
                }
                other => bail!("redis says {:?}", String::from_utf8_lossy(other)),
            }
            start = next;
        }
        self.received.copy_within(start..self.filled, 0);
        self.filled -= start;
        Ok(took)
    }
}
