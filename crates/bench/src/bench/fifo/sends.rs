//! DIMMnet-3's figure 7: four ways to send 8 to 128 bytes, an envelope of 8 among them, that the receiver
//! compares before it reads the rest. Also bodies that come ahead by rule (HTP), and matching by tag.
//!
//! One thread has both ends. It sends, which lasts until the server has the message, and receives; the clock
//! is read before the send, when the envelope has been compared, and when all bytes are here.

use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};
use rampool_client::direct::{Direct, DirectRegion, Message, Queue, QueueBounds, SendBody};
use rampool_net::transport::Endpoint;
use rampool_wire::layout::Layout;
use serde_json::json;

use super::super::Common;
use super::super::report::Report;
use super::super::server::WorkDir;
use super::super::service::{Place, Service};
use super::super::workload::random_bytes;
use super::{SPIN, TIMEOUT, connect, join_by, p50};

/// The queue is at the receiver's machine, where the receiver takes it through shared memory.
const ONE_HOP: &str = "TCP to the receiver's machine";
const ENVELOPE_BYTES: usize = 8;
const SIZES: [usize; 7] = [8, 16, 32, 48, 64, 96, 128];
/// Bodies that come ahead, and how long the receiver works on a head before it asks for the body.
const BODIES: [usize; 3] = [128, 4096, 64 << 10];
const WORK: Duration = Duration::from_micros(50);
const TAGS: u8 = 16;
const OF_EACH: usize = 8;

/// How a message travels, and the paper's name for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Envelope and data from the CPU; the receiver reads both out of the large memory.
    Body,
    /// The same, and the receiver has both at once.
    Head,
    /// The data are in the large memory: fetched, then sent as a head.
    Fetched,
    /// The data are in the large memory and stay there; the envelope goes ahead.
    InPool,
}

impl Way {
    const ALL: [Self; 4] = [Self::Body, Self::Head, Self::Fetched, Self::InPool];

    fn name(self) -> &'static str {
        match self {
            Self::Body => "BOTF+IPUSH",
            Self::Head => "BOTF+IPUSH+LHS",
            Self::Fetched => "VL+BOTF+IPUSH+LHS",
            Self::InPool => "LHC+IPUSH+LHS",
        }
    }
}

pub fn run(report: &mut Report, place: &Place<'_>, rounds: usize, common: &Common) -> Result<()> {
    report.note(
        "four ways to send: sends last until the server has the message; whole: envelope compared and all \
         bytes here; envelope: it has been compared",
    );
    let dir = WorkDir::create()?;
    let local = format!("unix:{}", dir.0.join("server").display());
    let both = format!("127.0.0.1:0,{local}");
    for (over, listen) in [("TCP", "127.0.0.1:0"), ("shared memory", &local), (ONE_HOP, &both)] {
        let server = Service::memory_server_at(place, listen, 64 << 20, SPIN)?;
        let one_hop = if over == ONE_HOP { Some(local.parse().map_err(Error::msg)?) } else { None };
        let mut ends = Ends::open(&server, one_hop.clone())?;
        let samples = common.pick(4000, 200);
        if one_hop.is_none() {
            ahead(report, &mut ends, over, samples / 10)?;
            matching(report, &mut ends, over, rounds)?;
        }
        for size in SIZES {
            for way in Way::ALL {
                // As in the paper: what is combined has a byte at least on either side.
                if way == Way::InPool && size == ENVELOPE_BYTES {
                    continue;
                }
                let (mut envelope, mut whole) = (Vec::new(), Vec::new());
                for round in 0..=rounds {
                    let times = (0..samples).map(|_| ends.message(way, size)).collect::<Result<Vec<_>>>()?;
                    // The first round warms all up.
                    if round > 0 {
                        envelope.push(p50(times.iter().map(|times| times[0]).collect()));
                        whole.push(p50(times.iter().map(|times| times[1]).collect()));
                    }
                }
                for (what, samples) in [("envelope", &envelope), ("whole", &whole)] {
                    let parameters = json!({
                        "experiment": "sends", "over": over, "way": way.name(), "bytes": size, "what": what,
                    });
                    let name = format!("{over}, {size} B, {}, {what}, p50", way.name());
                    report.series(&name, "us", parameters, samples);
                }
            }
        }
    }
    Ok(())
}

/// How long a receiver waits for a body that it asks for after some work on the head.
fn ahead(report: &mut Report, ends: &mut Ends, over: &str, samples: usize) -> Result<()> {
    for bytes in BODIES {
        for (rule, at_most) in [("by call", 0), ("by rule", u64::MAX)] {
            ends.receiver.prefetch_bodies(&ends.from, at_most);
            let mut waits = Vec::with_capacity(samples);
            for _ in 0..samples {
                let layout = Layout::bytes(u64::try_from(bytes)?)?;
                let body = SendBody::InPool { region: ends.region, offset: 0, layout: &layout };
                ends.sender.send(&ends.to, b"head", body, TIMEOUT)?;
                let mut message = ends.next(Instant::now())?;
                let working = Instant::now();
                while working.elapsed() < WORK {
                    std::hint::spin_loop();
                }
                let asked = Instant::now();
                if ends.receiver.body(&mut message, TIMEOUT)? != ends.data[..bytes] {
                    bail!("WRONG BODY of {bytes} bytes");
                }
                waits.push(asked.elapsed());
                ends.receiver.done(message);
            }
            let parameters = json!({ "experiment": "ahead", "over": over, "bytes": bytes, "how": rule });
            report.series(
                &format!("{over}, body of {bytes} B, {rule}, p50"),
                "us",
                parameters,
                &[p50(waits)],
            );
        }
    }
    ends.receiver.prefetch_bodies(&ends.from, 0);
    Ok(())
}

/// What a message takes that is taken in its turn, or by its tag.
fn matching(report: &mut Report, ends: &mut Ends, over: &str, rounds: usize) -> Result<()> {
    let count = usize::from(TAGS) * OF_EACH;
    for by_tag in [false, true] {
        let mut times = Vec::new();
        for _ in 0..rounds {
            for number in 0..count {
                let tag = u8::try_from(number % usize::from(TAGS))?;
                ends.sender.send(&ends.to, &[tag], SendBody::None, TIMEOUT)?;
            }
            let started = Instant::now();
            for number in 0..count {
                let tag = TAGS - 1 - u8::try_from(number / OF_EACH)?;
                let wanted = |head: &[u8]| !by_tag || head == [tag];
                let Some(message) = ends.receiver.take_where(&ends.from, wanted, TIMEOUT)? else {
                    bail!("a message is missing")
                };
                ends.receiver.done(message);
            }
            times.push(started.elapsed().as_secs_f64() * 1e6 / count as f64);
        }
        let how = if by_tag { "by tag" } else { "in turn" };
        let parameters = json!({ "experiment": "matching", "over": over, "how": how });
        report.series(&format!("{over}, {count} messages of {TAGS} tags, {how}"), "us", parameters, &times);
    }
    Ok(())
}

struct Ends {
    sender: Direct,
    receiver: Direct,
    to: Queue,
    from: Queue,
    /// What messages bring behind their envelopes, also there in the pool.
    data: Vec<u8>,
    region: DirectRegion,
    number: u64,
}

impl Ends {
    /// `near`: where the receiver reaches the server, if not at the sender's address.
    fn open(server: &Service, near: Option<Endpoint>) -> Result<Self> {
        let mut sender = connect(server, 16 << 20)?;
        let ticket = sender.pool().lease_ticket();
        let mut receiver = join_by(match near {
            Some(near) => ticket.reached_at(0, near),
            None => ticket,
        })?;
        let to = sender.open_or_create_queue("sends", QueueBounds { messages: 1000, bytes: 1 << 20 })?;
        let from = receiver.open_queue("sends")?;
        let data = random_bytes(5, *BODIES.last().expect("there are some"));
        let region = sender.create(64 << 10)?;
        sender.put(region, 0, &data)?;
        Ok(Self { sender, receiver, to, from, data, region, number: 0 })
    }

    /// One message; when its envelope was compared, and when all of it was here.
    fn message(&mut self, way: Way, size: usize) -> Result<[Duration; 2]> {
        self.number += 1;
        let (envelope, bytes) = (self.number.to_le_bytes(), size - ENVELOPE_BYTES);
        // The receiver waits before the sender sends.
        if self.receiver.poll_message(&self.from)?.is_some() {
            bail!("a message that was never sent");
        }
        let started = Instant::now();
        match way {
            Way::Body | Way::Head => {
                let whole = [&envelope[..], &self.data[..bytes]].concat();
                self.send(way, &whole)?;
            }
            Way::Fetched => {
                let mut whole = [0; 128];
                whole[..ENVELOPE_BYTES].copy_from_slice(&envelope);
                self.sender.get(self.region, 0, &mut whole[ENVELOPE_BYTES..size])?;
                self.send(way, &whole[..size])?;
            }
            Way::InPool => {
                let layout = Layout::bytes(u64::try_from(bytes)?)?;
                let body = SendBody::InPool { region: self.region, offset: 0, layout: &layout };
                self.sender.send(&self.to, &envelope, body, TIMEOUT)?;
            }
        }
        let times = self.receive(way, envelope, bytes, started)?;
        Ok(times)
    }

    fn send(&mut self, way: Way, whole: &[u8]) -> Result<()> {
        let (head, body) = match way {
            Way::Body => (&[][..], SendBody::Bytes(whole)),
            _ => (whole, SendBody::None),
        };
        Ok(self.sender.send(&self.to, head, body, TIMEOUT)?)
    }

    fn receive(
        &mut self,
        way: Way,
        envelope: [u8; 8],
        bytes: usize,
        started: Instant,
    ) -> Result<[Duration; 2]> {
        let mut message = self.next(started)?;
        let mut whole = message.head().to_vec();
        let mut compared = Duration::ZERO;
        if way != Way::Body {
            compared = started.elapsed();
            if whole[..ENVELOPE_BYTES] != envelope {
                bail!("WRONG ENVELOPE of message {}", self.number);
            }
        }
        if matches!(way, Way::Body | Way::InPool) {
            whole.extend(self.receiver.body(&mut message, TIMEOUT)?);
        }
        let done = started.elapsed();
        if whole[..ENVELOPE_BYTES] != envelope || whole[ENVELOPE_BYTES..] != self.data[..bytes] {
            bail!("WRONG CONTENT of message {}", self.number);
        }
        self.receiver.done(message);
        Ok([if way == Way::Body { done } else { compared }, done])
    }

    fn next(&mut self, started: Instant) -> Result<Message> {
        loop {
            if let Some(message) = self.receiver.poll_message(&self.from)? {
                return Ok(message);
            }
            if started.elapsed() > TIMEOUT {
                bail!("no message within {TIMEOUT:?}");
            }
        }
    }
}
