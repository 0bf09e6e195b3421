//! Messages a second: senders append 64 bytes each to one queue, a receiver takes up to 160 at a time and
//! acknowledges them with its next request.
//!
//! Redis does the same in two ways. A list (`RPUSH`, `LPOP key 160`) forgets a message as soon as it is
//! handed out, so a lost receiver loses it. A stream with a consumer group (`XADD`, `XREADGROUP`, `XACK` and
//! `XDEL`) keeps it until it is acknowledged, as a queue does. Each sender has the same number of messages
//! unanswered, sent one by one (a request for each, pipelined), or in one request (`send_many`; `RPUSH` with
//! many values; a stream has no such command). One thread drives all connections of either, and all do the
//! same work: each message is made, sent, received and compared.

use std::collections::{BTreeSet, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rampool_net::transport::{Endpoint, Link, LocalPolicy, Received, Urgency, connect};
use rampool_wire::frame::{
    AttachLease, Body, Delivery, Granted, Header, MemberId, Opcode, OpenLease, Push, PushHeads, QueueBounds,
    Status, Take, encode_frame, parse_message,
};
use rampool_wire::session::Encryption;

use super::super::report::{Reach, Report};
use super::super::server::{WorkDir, memory, start_redis};
use super::super::service::{Place, Service};
use super::super::workload::word;
use super::{Args, HEAD_BYTES, SPIN, TIMEOUT};

/// Messages at a time: as many of 64 bytes as one answer has room for.
const BATCH: u16 = 160;

/// One connection: requests queued, answers taken.
trait Way {
    /// Queues messages, one at least.
    fn push(&mut self, messages: &[[u8; HEAD_BYTES]]);
    /// Queues a request for messages.
    fn take(&mut self);
    fn send(&mut self) -> Result<()>;
    /// Takes what has come: how many messages were accepted, and the messages that came. True if an answer to
    /// a `take` did.
    fn receive(&mut self, accepted: &mut usize, messages: &mut Vec<[u8; HEAD_BYTES]>) -> Result<bool>;
}

pub fn run(report: &mut Report, place: &Place<'_>, args: &Args) -> Result<()> {
    let quick = args.common.quick;
    let length = Duration::from_millis(if quick { 50 } else { 1000 });
    let server = Service::memory_server(place, 2 << 30, SPIN)?;
    let dir = WorkDir::create()?;
    let (redis, address) = start_redis(&args.redis, false, &[], &dir.0, place.server_cpu)?;
    let super::super::server::redis::Address::Tcp(port) = address else { bail!("redis listens over TCP") };
    let endpoint: Endpoint = server.address.parse()?;
    let count = args.senders + 1;
    let mut kinds = Vec::new();
    for together in [false, true] {
        kinds.push(Kind {
            name: "rampool",
            together,
            ways: memory_ways(&endpoint, count, together)?,
            rates: Vec::new(),
        });
        kinds.push(Kind {
            name: "redis list",
            together,
            ways: redis_ways(port, count, Store::List, together)?,
            rates: Vec::new(),
        });
    }
    kinds.push(Kind {
        name: "redis stream",
        together: false,
        ways: redis_ways(port, count, Store::Stream, false)?,
        rates: Vec::new(),
    });
    for round in 0..=args.common.rounds(7, 1) {
        for kind in &mut kinds {
            let rate = drive(&mut kind.ways, args.depth, length)?;
            if round > 0 {
                kind.rates.push(rate);
            }
        }
    }
    drop(redis);
    let senders = args.senders;
    report.note(format!(
        "the rate: {senders} senders with {} messages unanswered each and one receiver that takes up to \
         {BATCH} at a time, driven by one thread; rampool's receiver and that of \
         the stream acknowledge what they took with the next request, the list forgets it at once",
        args.depth
    ));
    for kind in &kinds {
        let how = if kind.together { "in groups" } else { "one by one" };
        let name = format!("messages a second, {senders} senders, {how}: {}", kind.name);
        report.samples(&name, "1/s", &kind.rates);
    }
    let [ours, list, ours_together, list_together, stream] = &kinds[..] else { unreachable!("five kinds") };
    let reach = Some(Reach::AtLeast(3.0));
    report.ratio("messages a second, one by one: rampool / redis list", &ours.rates, &list.rates, reach);
    report.ratio("messages a second, one by one: rampool / redis stream", &ours.rates, &stream.rates, reach);
    report.ratio(
        "messages a second, in groups: rampool / redis list",
        &ours_together.rates,
        &list_together.rates,
        reach,
    );
    report.ratio(
        "messages a second: rampool in groups / redis stream",
        &ours_together.rates,
        &stream.rates,
        reach,
    );
    Ok(())
}

/// A server, and a way to send.
struct Kind {
    name: &'static str,
    /// What a sender may have unanswered goes in one request.
    together: bool,
    ways: Vec<Box<dyn Way>>,
    rates: Vec<f64>,
}

/// As many messages as fit the time; all of them are received at the end. The last way is the receiver's.
fn drive(ways: &mut [Box<dyn Way>], depth: usize, length: Duration) -> Result<f64> {
    let (receiver, senders) = ways.split_last_mut().expect("a receiver");
    let (mut sent, mut accepted, mut got) = (0u64, 0u64, 0u64);
    let mut unanswered = vec![0usize; senders.len()];
    let mut seen: BTreeSet<u64> = BTreeSet::new();
    let mut next_in_order = 0;
    let mut asked = false;
    let (mut messages, mut group) = (Vec::new(), Vec::new());
    let started = Instant::now();
    let mut last = started;
    loop {
        let now = Instant::now();
        let over = now.duration_since(started) >= length;
        for (way, unanswered) in senders.iter_mut().zip(&mut unanswered) {
            if !over && *unanswered < depth {
                group.clear();
                while *unanswered < depth {
                    group.push(message(sent));
                    sent += 1;
                    *unanswered += 1;
                }
                way.push(&group);
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
        if now.duration_since(last) > TIMEOUT {
            bail!("{got} of {sent} messages came, and then none for {TIMEOUT:?}");
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

// --- rampool -----------------------------------------------------------------------------------------------

struct Memory {
    link: Link,
    request: u64,
    queue: u64,
    head: Vec<u8>,
    table: Vec<u8>,
    acknowledged: Vec<u64>,
    /// Sends groups, and how many messages those have that are unanswered.
    together: bool,
    groups: VecDeque<usize>,
}

fn memory_ways(endpoint: &Endpoint, count: usize, together: bool) -> Result<Vec<Box<dyn Way>>> {
    let policy = LocalPolicy { key: None, encryption: Encryption::Auto, features: 0, ucx: None };
    let mut ways: Vec<Box<dyn Way>> = Vec::new();
    let mut granted: Option<Granted> = None;
    for _ in 0..count {
        let link = connect(endpoint, policy.clone(), Instant::now() + TIMEOUT)?;
        let (head, table, acknowledged, groups) = (Vec::new(), Vec::new(), Vec::new(), VecDeque::new());
        let mut way = Memory { link, request: 0, queue: 0, head, table, acknowledged, together, groups };
        match &granted {
            None => {
                let open = OpenLease {
                    bytes: 512 << 20,
                    pid: std::process::id(),
                    name: "bench".into(),
                    host: "here".into(),
                };
                granted = Some(Granted::parse(&way.call(Opcode::OpenLease, 0, &open.encode())?.1)?);
            }
            Some(first) => {
                let (lease, token, member) = (first.lease, first.token, MemberId(0));
                let attach = AttachLease {
                    lease,
                    token,
                    member,
                    pid: std::process::id(),
                    name: "bench".into(),
                    host: "here".into(),
                };
                way.call(Opcode::AttachLease, 0, &attach.encode())?;
            }
        }
        let mut table = Vec::new();
        QueueBounds { messages: 1 << 20, bytes: 256 << 20 }.encode("rate", &mut table);
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
    fn push(&mut self, messages: &[[u8; HEAD_BYTES]]) {
        if self.together {
            self.table.clear();
            let heads: Vec<&[u8]> = messages.iter().map(|message| &message[..]).collect();
            PushHeads::encode(1000, &heads, &mut self.table);
            self.ask(Opcode::PushHeads, self.queue);
            self.groups.push_back(messages.len());
            return;
        }
        for message in messages {
            self.table.clear();
            Push { timeout_ms: 1000, head: message, body: Body::None }.encode(&mut self.table);
            self.ask(Opcode::Push, self.queue);
        }
    }

    fn take(&mut self) {
        self.table.clear();
        let acknowledged = std::mem::take(&mut self.acknowledged);
        // Does not wait, like the other's.
        Take { timeout_ms: 0, most: BATCH, acknowledged }.encode(&mut self.table);
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
                Received::Bulk(_) => bail!("the memory server sent pages without a request"),
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
                // Groups of one sender enter the queue in order.
                Received::Head(header) if header.opcode == Opcode::PushHeads => {
                    *accepted += self.groups.pop_front().context("an answer to nothing")?;
                }
                Received::Head(_) => *accepted += 1,
            }
        }
    }
}

// --- redis -------------------------------------------------------------------------------------------------

/// What holds the messages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Store {
    List,
    Stream,
}

struct Redis {
    socket: TcpStream,
    store: Store,
    together: bool,
    groups: VecDeque<usize>,
    asked: Vec<u8>,
    received: Box<[u8]>,
    filled: usize,
    /// Identities of entries of the stream that were taken.
    taken: Vec<Vec<u8>>,
}

fn redis_ways(port: u16, count: usize, store: Store, together: bool) -> Result<Vec<Box<dyn Way>>> {
    let mut ways: Vec<Box<dyn Way>> = Vec::new();
    for number in 0..count {
        let mut way = Redis::connect(port, store, together)?;
        if store == Store::Stream && number == 0 {
            way.make_group()?;
        }
        ways.push(Box::new(way));
    }
    Ok(ways)
}

/// A value as redis says it.
enum Value {
    Nothing,
    Number,
    Bytes(Range<usize>),
    Array(Vec<Value>),
}

/// `*count`, then each argument.
fn command(out: &mut Vec<u8>, count: usize, arguments: &[&[u8]]) {
    out.extend_from_slice(format!("*{count}\r\n").as_bytes());
    arguments.iter().for_each(|argument| add_argument(out, argument));
}

fn add_argument(out: &mut Vec<u8>, argument: &[u8]) {
    out.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
    out.extend_from_slice(argument);
    out.extend_from_slice(b"\r\n");
}

impl Redis {
    fn connect(port: u16, store: Store, together: bool) -> Result<Self> {
        let socket = TcpStream::connect(("127.0.0.1", port))?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let (asked, received) = (Vec::new(), vec![0; 256 * 1024].into());
        Ok(Self {
            socket,
            store,
            together,
            groups: VecDeque::new(),
            asked,
            received,
            filled: 0,
            taken: Vec::new(),
        })
    }

    fn make_group(&mut self) -> Result<()> {
        self.socket.set_nonblocking(false)?;
        self.socket.write_all(
            b"*6\r\n$6\r\nXGROUP\r\n$6\r\nCREATE\r\n$4\r\nflow\r\n$1\r\ng\r\n$1\r\n$\r\n$8\r\nMKSTREAM\r\n",
        )?;
        let mut answer = [0; 5];
        self.socket.read_exact(&mut answer)?;
        self.socket.set_nonblocking(true)?;
        if &answer == b"+OK\r\n" {
            Ok(())
        } else {
            bail!("redis makes no group of consumers: {:?}", String::from_utf8_lossy(&answer))
        }
    }

    /// The value that begins here, if all of it has come, and where the next one begins.
    fn value(&self, from: usize) -> Result<Option<(Value, usize)>> {
        let rest = &self.received[from..self.filled];
        let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else { return Ok(None) };
        let next = from + end + 2;
        let number = || -> Result<usize> { Ok(std::str::from_utf8(&rest[1..end])?.parse()?) };
        Ok(Some(match rest[0] {
            b':' => (Value::Number, next),
            _ if &rest[..end] == b"*-1" || &rest[..end] == b"$-1" => (Value::Nothing, next),
            b'$' => {
                let bytes = number()?;
                if self.filled < next + bytes + 2 {
                    return Ok(None);
                }
                (Value::Bytes(next..next + bytes), next + bytes + 2)
            }
            b'*' => {
                let (mut values, mut at) = (Vec::new(), next);
                for _ in 0..number()? {
                    let Some((value, next)) = self.value(at)? else { return Ok(None) };
                    values.push(value);
                    at = next;
                }
                (Value::Array(values), at)
            }
            _ => bail!("redis says {:?}", String::from_utf8_lossy(&rest[..end])),
        }))
    }

    fn message(&self, value: &Value) -> Result<[u8; HEAD_BYTES]> {
        let Value::Bytes(range) = value else { bail!("redis gives what is no message") };
        self.received[range.clone()].try_into().context("a message of another length")
    }

    /// Entries of a stream: `[[name, [[identity, [field, message]] ...]]]`.
    fn entries(&mut self, value: &Value, messages: &mut Vec<[u8; HEAD_BYTES]>) -> Result<()> {
        let Value::Array(streams) = value else { return Ok(()) };
        let [Value::Array(stream)] = &streams[..] else { bail!("redis gives other streams") };
        let [_, Value::Array(entries)] = &stream[..] else { bail!("redis gives a stream of another form") };
        for entry in entries {
            let Value::Array(entry) = entry else { bail!("redis gives what is no entry") };
            let [Value::Bytes(identity), Value::Array(fields)] = &entry[..] else {
                bail!("redis gives an entry of another form")
            };
            messages.push(self.message(fields.get(1).context("an entry without a message")?)?);
            self.taken.push(self.received[identity.clone()].to_vec());
        }
        Ok(())
    }
}

impl Way for Redis {
    fn push(&mut self, messages: &[[u8; HEAD_BYTES]]) {
        match self.store {
            Store::Stream => messages.iter().for_each(|message| {
                self.asked
                    .extend_from_slice(b"*5\r\n$4\r\nXADD\r\n$4\r\nflow\r\n$1\r\n*\r\n$1\r\nm\r\n$64\r\n");
                self.asked.extend_from_slice(message);
                self.asked.extend_from_slice(b"\r\n");
            }),
            Store::List if self.together => {
                command(&mut self.asked, 2 + messages.len(), &[b"RPUSH", b"lots"]);
                messages.iter().for_each(|message| add_argument(&mut self.asked, message));
                self.groups.push_back(messages.len());
            }
            Store::List => messages.iter().for_each(|message| {
                self.asked.extend_from_slice(b"*3\r\n$5\r\nRPUSH\r\n$4\r\nrate\r\n$64\r\n");
                self.asked.extend_from_slice(message);
                self.asked.extend_from_slice(b"\r\n");
            }),
        }
    }

    fn take(&mut self) {
        match self.store {
            Store::Stream => {
                let taken = std::mem::take(&mut self.taken);
                if !taken.is_empty() {
                    command(&mut self.asked, 3 + taken.len(), &[b"XACK", b"flow", b"g"]);
                    taken.iter().for_each(|identity| add_argument(&mut self.asked, identity));
                    command(&mut self.asked, 2 + taken.len(), &[b"XDEL", b"flow"]);
                    taken.iter().for_each(|identity| add_argument(&mut self.asked, identity));
                }
                command(
                    &mut self.asked,
                    9,
                    &[b"XREADGROUP", b"GROUP", b"g", b"c", b"COUNT", b"160", b"STREAMS", b"flow", b">"],
                );
            }
            Store::List => {
                let name: &[u8] = if self.together { b"lots" } else { b"rate" };
                command(&mut self.asked, 3, &[b"LPOP", name, b"160"]);
            }
        }
    }

    fn send(&mut self) -> Result<()> {
        let mut sent = 0;
        while sent < self.asked.len() {
            match self.socket.write(&self.asked[sent..]) {
                Ok(n) => sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.asked.drain(..sent);
        Ok(())
    }

    fn receive(&mut self, accepted: &mut usize, messages: &mut Vec<[u8; HEAD_BYTES]>) -> Result<bool> {
        match self.socket.read(&mut self.received[self.filled..]) {
            Ok(0) => bail!("redis closed the connection"),
            Ok(n) => self.filled += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let (mut start, mut took) = (0, false);
        while let Some((value, next)) = self.value(start)? {
            match value {
                // The length of the list; or what XACK and XDEL did.
                Value::Number if self.together => {
                    *accepted += self.groups.pop_front().context("an answer to nothing")?
                }
                Value::Number if self.store == Store::List => *accepted += 1,
                Value::Number => {}
                // The identity of an entry.
                Value::Bytes(_) => *accepted += 1,
                Value::Nothing => took = true,
                value @ Value::Array(_) if self.store == Store::Stream => {
                    self.entries(&value, messages)?;
                    took = true;
                }
                Value::Array(values) => {
                    for value in &values {
                        messages.push(self.message(value)?);
                    }
                    took = true;
                }
            }
            start = next;
        }
        self.received.copy_within(start..self.filled, 0);
        self.filled -= start;
        Ok(took)
    }
}
