//! The same three ways over UCX, whose devices the memory is registered with: from registered memory to
//! registered memory by its rendezvous, compared with messages of 8 KiB that are copied on both sides, as a
//! pool's connections over UCX send them.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail};
use rampool_kernel::OS_PAGE_BYTES;
use rampool_kernel::memory::Mapping;
use rampool_kernel::thread::pin_to_cpu;
use rampool_net::registration::{FabricMemory, Pins};
use rampool_pinning::{Held, LeastRecentlyUsed};
use rampool_ucx::{Channel, Context, Memory, SEGMENT_BYTES, TransferId};
use rampool_wire::fabric::Flow;

use super::{BOUNCE_BYTES, BOUNCE_PART, BUFFERS, DEADLINE, content, filled, orders};

/// Messages on their way.
const WINDOW: u32 = 64;
/// Transfers that are read from where they lie at one time.
const DEPTH: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Messages of 8 KiB, copied on both sides.
    Messages,
    /// Into registered memory, and sent from there.
    Copy,
    Hit,
    Miss,
}

pub const WAYS: [Way; 4] = [Way::Messages, Way::Copy, Way::Hit, Way::Miss];

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Self::Messages => "messages",
            Self::Copy => "copy",
            Self::Hit => "hit",
            Self::Miss => "miss",
        }
    }
}

/// What is being read from where it lies, and what it holds.
struct UnderWay {
    transfer: TransferId,
    held: Option<Held>,
}

pub struct Bench {
    channel: Channel,
    flow: Flow,
    /// Whether each end has a CPU for itself, and so may spin.
    apart: bool,
    pins: Pins<FabricMemory>,
    bounce: Mapping,
    bounce_held: Held,
    next_part: usize,
    /// Oldest first.
    under_way: VecDeque<UnderWay>,
    buffers: Mapping,
    sink: Sink,
}

impl Bench {
    /// Over these transports, as `UCX_TLS` has them.
    pub fn open(transports: &str, longest: usize, sink_cpu: Option<usize>) -> Result<Self> {
        let context = Context::open(Some(transports))?;
        let [mut channel, mut far] =
            [Channel::open(&context, WINDOW as usize)?, Channel::open(&context, WINDOW as usize)?];
        // SAFETY: both addresses were made by `address`, and both ends are this bench's own.
        unsafe {
            let mode = channel.connect(&far.address()?, None)?;
            far.connect(&channel.address()?, Some(mode))?;
            far.believe();
        }
        let buffers = filled(BUFFERS * longest)?;
        let allowance = (buffers.bytes() + BOUNCE_BYTES + (1 << 20)) as u64;
        let mut pins =
            Pins::new(FabricMemory::with(context.clone()), allowance, Box::<LeastRecentlyUsed>::default());
        let bounce = Mapping::anonymous(BOUNCE_BYTES)?;
        let bounce_held = pins.acquire(bounce.start(), bounce.bytes())?;
        Ok(Self {
            channel,
            flow: Flow::new(WINDOW, WINDOW),
            apart: sink_cpu.is_some(),
            pins,
            bounce,
            bounce_held,
            next_part: 0,
            under_way: VecDeque::new(),
            buffers,
            sink: Sink::start(context, far, longest, sink_cpu)?,
        })
    }

    /// So many transfers of one payload, the buffers taking turns. Seconds until all had arrived.
    pub fn transfers(&mut self, way: Way, payload: usize, count: usize, compare: bool) -> Result<f64> {
        self.pins.unpin_unused();
        let order = orders(payload);
        if way == Way::Hit {
            for at in &order {
                let held = self.pins.acquire(self.buffers.start() + at, payload)?;
                self.pins.release(held);
            }
        }
        let expected = compare.then(|| content(&order, payload, count));
        self.sink
            .orders
            .as_ref()
            .expect("until it is dropped")
            .send((payload * count, expected))
            .context("the receiving thread is gone")?;
        let before = self.pins.counts();
        let deadline = Instant::now() + DEADLINE;
        let started = Instant::now();
        for at in order.iter().cycle().take(count) {
            self.transfer(way, *at, payload, deadline)?;
        }
        self.settle(0, way, deadline)?;
        let right = loop {
            self.work(deadline)?;
            if let Ok(told) = self.sink.done.try_recv() {
                break told?;
            }
        };
        let seconds = started.elapsed().as_secs_f64();
        if !right {
            bail!("WRONG BYTES arrived");
        }
        let (hits, misses) =
            (self.pins.counts().hits - before.hits, self.pins.counts().misses - before.misses);
        let n = count as u64;
        let wanted = match way {
            Way::Hit => (n, 0),
            Way::Miss => (0, n),
            Way::Messages | Way::Copy => (0, 0),
        };
        if (hits, misses) == wanted {
            Ok(seconds)
        } else {
            bail!("{way:?}: {hits} hits and {misses} misses in {n} transfers")
        }
    }

    fn transfer(&mut self, way: Way, at: usize, payload: usize, deadline: Instant) -> Result<()> {
        let memory = self.buffers.at(at).cast_const();
        match way {
            Way::Messages => {
                for done in (0..payload).step_by(SEGMENT_BYTES) {
                    let len = SEGMENT_BYTES.min(payload - done);
                    let fill = |to: *mut u8| {
                        // SAFETY: the buffers are as long as the payload, and there is room for a message.
                        unsafe { std::ptr::copy_nonoverlapping(memory.wrapping_add(done), to, len) };
                        len
                    };
                    self.room(deadline)?;
                    while !self.channel.send(self.flow.read(), fill)? {
                        self.work(deadline)?;
                    }
                    self.flow.has_sent();
                }
            }
            Way::Hit | Way::Miss => {
                self.settle(DEPTH - 1, way, deadline)?;
                let held = self.pins.acquire(self.buffers.start() + at, payload)?;
                self.send_from(memory, payload, Some(held), deadline)?;
            }
            Way::Copy => {
                let part = payload.min(BOUNCE_PART);
                for done in (0..payload).step_by(part) {
                    // There are more parts than transfers at one time: this one is free.
                    self.settle(DEPTH - 1, way, deadline)?;
                    let to = self.bounce.at(self.next_part % (BOUNCE_BYTES / part) * part);
                    self.next_part += 1;
                    // SAFETY: the part is this bench's own, and read by no transfer; the buffers are as long
                    // as the payload.
                    unsafe { std::ptr::copy_nonoverlapping(memory.wrapping_add(done), to, part) };
                    self.send_from(to, part, None, deadline)?;
                }
            }
        }
        Ok(())
    }

    /// From memory that is held for now, or for good.
    fn send_from(
        &mut self,
        memory: *const u8,
        len: usize,
        held: Option<Held>,
        deadline: Instant,
    ) -> Result<()> {
        self.room(deadline)?;
        let registration = held.as_ref().unwrap_or(&self.bounce_held).registration();
        // SAFETY: memory of this bench's own, which lives as long as the channel, holds the same bytes until
        // the transfer has ended, and is held until then.
        let transfer = unsafe {
            self.channel.send_from(
                self.flow.read(),
                memory,
                len,
                Some(self.pins.registrar().memory(registration)),
            )
        }?;
        self.flow.has_sent();
        self.under_way.push_back(UnderWay { transfer, held });
        Ok(())
    }

    /// Until the peer has room for one more message.
    fn room(&mut self, deadline: Instant) -> Result<()> {
        while !self.flow.may_send() {
            self.work(deadline)?;
        }
        Ok(())
    }

    /// Until at most so many transfers are under way.
    fn settle(&mut self, most: usize, way: Way, deadline: Instant) -> Result<()> {
        while self.under_way.len() > most {
            let oldest = self.under_way.front().expect("there are more").transfer;
            if !self.channel.has_ended(oldest)? {
                self.work(deadline)?;
                continue;
            }
            if let Some(held) = self.under_way.pop_front().and_then(|ended| ended.held) {
                self.pins.release(held);
            }
            if way == Way::Miss {
                self.pins.unpin_unused();
            }
        }
        Ok(())
    }

    fn work(&mut self, deadline: Instant) -> Result<()> {
        drive(&mut self.channel, &mut self.flow, self.apart, deadline)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.sink.orders = None;
        // UCX must not be at work when the process ends. A sink that still waits for bytes, because something
        // failed, ends at its own deadline.
        let _ = self.sink.thread.take().map(JoinHandle::join);
    }
}

/// Lets UCX work, and hears what the peer has read.
fn drive(channel: &mut Channel, flow: &mut Flow, apart: bool, deadline: Instant) -> Result<()> {
    if !channel.progress() && !apart {
        std::thread::yield_now();
    }
    channel.check()?;
    if let Some(read) = channel.number() {
        flow.hears(read)?;
    }
    if Instant::now() >= deadline {
        bail!("the other end does nothing");
    }
    Ok(())
}

/// The other end: takes messages, fetches what stays where it is into registered memory, compares where it is
/// told to, and says when all is there.
struct Sink {
    orders: Option<Sender<(usize, Option<Vec<u8>>)>>,
    done: Receiver<Result<bool>>,
    thread: Option<JoinHandle<()>>,
}

impl Sink {
    fn start(context: Context, mut channel: Channel, longest: usize, cpu: Option<usize>) -> Result<Self> {
        let (orders, wanted) = std::sync::mpsc::channel();
        let (tell, done) = std::sync::mpsc::channel();
        let room = filled(longest.max(SEGMENT_BYTES).next_multiple_of(OS_PAGE_BYTES))?;
        let memory = Memory::register(&context, room.start()..room.start() + room.bytes())?;
        let thread = std::thread::spawn(move || {
            if let Some(cpu) = cpu {
                // Where it may not run there, it runs elsewhere.
                let _ = pin_to_cpu(cpu);
            }
            let mut flow = Flow::new(WINDOW, WINDOW);
            for (bytes, expected) in wanted {
                let arrived =
                    arrive(&mut channel, &mut flow, cpu.is_some(), (&room, &memory), bytes, expected);
                if tell.send(arrived).is_err() {
                    break;
                }
            }
            // What is under way in it ends before the room does.
            drop(channel);
            drop((memory, room));
        });
        Ok(Self { orders: Some(orders), done, thread: Some(thread) })
    }
}

/// Whether so many bytes came as they were expected.
fn arrive(
    channel: &mut Channel,
    flow: &mut Flow,
    apart: bool,
    (room, memory): (&Mapping, &Memory),
    bytes: usize,
    expected: Option<Vec<u8>>,
) -> Result<bool> {
    let deadline = Instant::now() + DEADLINE;
    let (mut got, mut right) = (0, true);
    while got < bytes {
        let waiting = channel.waiting();
        // All of the room is used in turn, whichever way the bytes come, so that none of it stays in a CPU's
        // small caches for one of them.
        let at = got % room.bytes();
        let at = if at + waiting.unwrap_or(SEGMENT_BYTES) <= room.bytes() { at } else { 0 };
        let len = if let Some(len) = waiting {
            if len > room.bytes() {
                return Err(anyhow!("{len} bytes are more than there is room for"));
            }
            // SAFETY: there is room, registered and used by nothing else, as long as the channel lives.
            let landed = unsafe { channel.land(room.at(at), Some(memory)) }?;
            while !channel.has_ended(landed)? {
                drive(channel, flow, apart, deadline)?;
            }
            len
        } else {
            // SAFETY: there is room for a message there.
            let took = channel.take(SEGMENT_BYTES, |from, len| unsafe {
                std::ptr::copy_nonoverlapping(from, room.at(at), len)
            });
            let Some((len, _whole)) = took else {
                drive(channel, flow, apart, deadline)?;
                continue;
            };
            len
        };
        flow.has_read();
        if let Some(expected) = &expected {
            // SAFETY: a mapping of this bench's own, which nothing writes during the call.
            let came = unsafe { std::slice::from_raw_parts(room.at(at), len) };
            right &= expected.get(got..got + len) == Some(came);
        }
        got += len;
        if flow.should_tell() && channel.send(flow.read(), |_| 0)? {
            flow.has_told();
        }
    }
    // The sender is told that its memory was read, before this end rests.
    channel.flush(deadline);
    Ok(right)
}
