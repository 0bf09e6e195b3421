//! Remote queues: the latency of a head compared with raw messages, heads with and without bodies after them,
//! the rate of eight senders compared with redis lists, and the ways to send a short message.

mod rate;
mod sends;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rampool_client::direct::{Direct, Message, Queue, QueueBounds, SendBody};
use rampool_client::pool::{LeaseTicket, PoolConfig};
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;

use super::Common;
use super::peer::{self, RawStream};
use super::report::{Reach, Report, in_rounds, p50, p50_of};
use super::service::{Place, Service};
use super::workload::random_bytes;

/// Messages through queues, compared with raw connections and redis lists
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Number of senders in the rate
    #[arg(long, default_value_t = 8)]
    senders: usize,

    /// Messages that each sender has unanswered
    #[arg(long, default_value_t = 16)]
    depth: usize,

    /// The redis program to measure against
    #[arg(long, default_value = "redis-server", value_name = "PROGRAM")]
    redis: PathBuf,

    /// Measure only one part [default: latency and rate]
    #[arg(long)]
    only: Option<Part>,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Latency,
    Rate,
    /// Four ways to send 8 to 128 bytes, as DIMMnet-3's figure 7 has them
    Sends,
}

const SPIN: Duration = Duration::from_millis(2);
const TIMEOUT: Duration = Duration::from_secs(20);
const HEAD_BYTES: usize = 64;
const BODY_BYTES: usize = 1 << 20;

pub fn run(args: &Args) -> Result<i32> {
    if args.senders == 0 || args.depth == 0 {
        bail!("senders and depth must be at least 1");
    }
    let common = &args.common;
    let place = Place::loopback();
    let mut report = Report::start("fifo", common.quick);
    report.note(format!(
        "loopback TCP, heads of {HEAD_BYTES} random bytes, every message compared; {}",
        place.describe()
    ));
    report.note(
        "one thread has the sender's and the receiver's connection, and the clock is read in it: \
        before the send, and when the receiver has the head",
    );
    report.note(
        "a queue is at a server, so a head makes two hops; a raw relay makes the same two (a process \
        that passes on what comes), half a raw round trip is one",
    );
    if args.only == Some(Part::Sends) {
        sends::run(&mut report, &place, common.rounds(5, 2), common)?;
        return report.finish(common.json.as_deref());
    }
    if args.only != Some(Part::Rate) {
        latency(&mut report, &place, common.rounds(7, 2), common)?;
    }
    if args.only != Some(Part::Latency) {
        rate::run(&mut report, &place, args)?;
    }
    report.finish(common.json.as_deref())
}

fn connect(server: &Service, bytes: u64) -> Result<Direct> {
    let mut config = PoolConfig::new(vec![server.address.parse()?], ByteLen(bytes), "rampool bench fifo");
    config.encryption = Encryption::Off;
    let mut direct = Direct::connect(&config)?;
    direct.spin_for(SPIN);
    Ok(direct)
}

fn join(first: &mut Direct) -> Result<Direct> {
    join_by(first.pool().lease_ticket())
}

fn join_by(ticket: LeaseTicket) -> Result<Direct> {
    let mut config = PoolConfig::attach(ticket, "rampool bench fifo");
    config.encryption = Encryption::Off;
    let mut direct = Direct::connect(&config)?;
    direct.spin_for(SPIN);
    Ok(direct)
}

/// The two ends of a queue, and a third client that uses it, too.
struct Ends {
    sender: Direct,
    receiver: Direct,
    to: Queue,
    from: Queue,
    head: [u8; HEAD_BYTES],
    number: u64,
}

impl Ends {
    fn next_head(&mut self) {
        self.number += 1;
        self.head[..8].copy_from_slice(&self.number.to_le_bytes());
    }

    /// Polls for the next message until it arrives; the sender's connection and that of `other` make progress
    /// meanwhile.
    fn receive(&mut self, mut other: Option<&mut Direct>) -> Result<Message> {
        let started = Instant::now();
        loop {
            if let Some(message) = self.receiver.poll_message(&self.from)? {
                return Ok(message);
            }
            if let Some(other) = &mut other {
                other.progress();
            }
            if started.elapsed() > TIMEOUT {
                bail!("no message within {TIMEOUT:?}");
            }
        }
    }

    /// One message, from before its send until its head is here.
    fn one_way(&mut self, body: Vec<u8>, expected: Option<&[u8]>) -> Result<Duration> {
        self.next_head();
        // The receiver waits before the sender sends.
        if self.receiver.poll_message(&self.from)?.is_some() {
            bail!("a message that was never sent");
        }
        let started = Instant::now();
        let send = self.sender.start_send(&self.to, &self.head, body, TIMEOUT)?;
        let mut message = self.receive(None)?;
        let took = started.elapsed();
        if message.head() != self.head {
            bail!("WRONG HEAD of message {}", self.number);
        }
        self.sender.wait_send(send)?;
        if let Some(expected) = expected
            && self.receiver.body(&mut message, TIMEOUT)? != expected
        {
            bail!("WRONG BODY of message {}", self.number);
        }
        self.receiver.done(message);
        Ok(took)
    }
}

fn latency(report: &mut Report, place: &Place<'_>, rounds: usize, common: &Common) -> Result<()> {
    let server = Service::memory_server(place, 512 << 20, SPIN)?;
    let echo = Service::raw_peer(place, SPIN)?;
    let relay = Service::raw_relay(place, SPIN)?;
    let mut sender = connect(&server, 256 << 20)?;
    let mut receiver = join(&mut sender)?;
    let mut other = join(&mut sender)?;
    let bounds = QueueBounds { messages: 1000, bytes: 64 << 20 };
    let to = sender.open_or_create_queue("heads", bounds)?;
    let from = receiver.open_queue("heads")?;
    let elsewhere = other.open_or_create_queue("bodies", bounds)?;
    let mut head = [0; HEAD_BYTES];
    head.copy_from_slice(&random_bytes(3, HEAD_BYTES));
    let mut ends = Ends { sender, receiver, to, from, head, number: 0 };
    let mut raw = RawStream::connect(&echo.address, SPIN)?;
    let content = peer::content();
    let mut relay_in = RawStream::connect(&relay.address, SPIN)?;
    let mut relay_out = RawStream::connect(&relay.address, SPIN)?;
    let body = random_bytes(4, BODY_BYTES);
    let (samples, few) = (common.pick(10_000, 300), common.pick(400, 20));
    let series = in_rounds(rounds, |_| {
        let queue = p50_of(samples, |_| ends.one_way(Vec::new(), None))?;
        let mut buffer = [0; peer::REQUEST_BYTES];
        let relayed = p50_of(samples, |_| {
            let started = Instant::now();
            relay_in.write_exactly(&ends.head)?;
            relay_out.read_exactly(&mut buffer)?;
            let took = started.elapsed();
            if buffer != ends.head {
                bail!("WRONG CONTENT from the raw relay");
            }
            Ok(took)
        })?;
        let round_trip = p50_of(samples, |_| {
            let started = Instant::now();
            raw.request(HEAD_BYTES as u64)?;
            raw.read_exactly(&mut buffer)?;
            let took = started.elapsed();
            if buffer != content[..HEAD_BYTES] {
                bail!("WRONG CONTENT from the raw peer");
            }
            Ok(took)
        })?;
        // Heads alone and heads with a megabyte after them, in turns, each after a head that is not counted:
        // the megabyte before it has emptied the caches.
        let (mut alone, mut followed, mut next_to) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..few {
            ends.one_way(Vec::new(), None)?;
            alone.push(ends.one_way(Vec::new(), None)?);
            let expected = (n % 8 == 0).then_some(&body[..]);
            let own = body.clone();
            ends.one_way(Vec::new(), None)?;
            followed.push(ends.one_way(own, expected)?);
            ends.one_way(Vec::new(), None)?;
            // Another client's megabyte is on its way through the same server.
            let send = other.start_send(&elsewhere, b"", body.clone(), TIMEOUT)?;
            while other.under_way() == 0 {
                other.advance_sends();
            }
            next_to.push(ends.one_way(Vec::new(), None)?);
            other.wait_send(send)?;
            let Some(message) = other.take(&elsewhere, TIMEOUT)? else { bail!("a message is missing") };
            other.done(message);
        }
        Ok([queue, relayed, round_trip / 2.0, p50(alone), p50(followed), p50(next_to)])
    })?;
    let names = [
        "head through a queue, one way, p50",
        "64 B through a raw relay, one way, p50",
        "half a raw round trip of 64 B, p50",
        "head alone, p50",
        "head with a body of 1 MiB behind it, p50",
        "head while somebody else sends a body of 1 MiB, p50",
    ];
    report.all("us", names, &series);
    let ([queue, relayed, half, alone, followed, next_to], reach) = (series, Some(Reach::AtMost(1.2)));
    report.ratio("one way through a queue / through a raw relay", &queue, &relayed, reach);
    report.ratio("one way through a queue / half a raw round trip", &queue, &half, reach);
    report.ratio("head with a body behind it / alone", &followed, &alone, Some(Reach::AtMost(1.3)));
    report.ratio("head next to another sender's body / alone", &next_to, &alone, None);
    ends.sender.send(&ends.to, b"", SendBody::None, TIMEOUT)?;
    Ok(())
}
