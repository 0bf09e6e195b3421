//! The load generator: threads that keep a number of requests outstanding on each of their connections.

use anyhow::{Result, bail};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Nothing for this long is a failure.
const SILENCE: Duration = Duration::from_secs(10);

/// One client of the server under test.
pub trait Connection: Send {
    fn fd(&self) -> BorrowedFd<'_>;

    /// Asked before each sleep on the descriptor. False: there is something to take.
    fn may_sleep(&self) -> bool {
        true
    }

    /// Queues a read of this page.
    fn ask(&mut self, page: usize);

    /// Sends what is queued; small enough that it always fits the socket.
    fn send(&mut self) -> Result<()>;

    /// Takes the answers that came, in order: the checksum of each page's bytes.
    fn take(&mut self, answered: &mut Vec<u32>) -> Result<()>;
}

pub struct Load<'a> {
    pub depth: usize,
    pub length: Duration,
    /// What every page's checksum must be.
    pub crcs: &'a [u32],
}

/// One round.
pub struct Sample {
    answers: usize,
    took: Duration,
    latencies_ns: Vec<u64>,
}

impl Sample {
    #[expect(clippy::cast_precision_loss, reason = "far fewer answers than 2^52")]
    pub fn per_second(&self) -> f64 {
        self.answers as f64 / self.took.as_secs_f64()
    }

    pub fn took(&self) -> Duration {
        self.took
    }

    #[expect(clippy::cast_precision_loss, reason = "for people")]
    pub fn median_us(&self) -> f64 {
        self.latencies_ns.get(self.latencies_ns.len() / 2).map_or(0.0, |ns| *ns as f64 / 1000.0)
    }
}

/// Deals the connections out to threads.
pub fn spread(connections: super::Connections, threads: usize) -> Vec<super::Connections> {
    let mut hands: Vec<super::Connections> = (0..threads).map(|_| Vec::new()).collect();
    for (index, connection) in connections.into_iter().enumerate() {
        hands[index % threads].push(connection);
    }
    hands
}

impl Load<'_> {
    /// One round: as many reads as fit the time. Nothing is outstanding after it.
    pub fn run(&self, threads: &mut [super::Connections]) -> Result<Sample> {
        let begin = Instant::now();
        let results: Vec<Result<(usize, Vec<u64>)>> = std::thread::scope(|scope| {
            let running: Vec<_> = threads
                .iter_mut()
                .enumerate()
                .map(|(seed, hand)| scope.spawn(move || self.drive(hand, seed as u64 + 1)))
                .collect();
            running
                .into_iter()
                .map(|thread| thread.join().expect("the load generator does not panic"))
                .collect()
        });
        let took = begin.elapsed();
        let (mut answers, mut latencies_ns) = (0, Vec::new());
        for result in results {
            let (count, times) = result?;
            answers += count;
            latencies_ns.extend(times);
        }
        latencies_ns.sort_unstable();
        Ok(Sample { answers, took, latencies_ns })
    }

    fn drive(&self, hand: &mut super::Connections, seed: u64) -> Result<(usize, Vec<u64>)> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (index, connection) in hand.iter().enumerate() {
            epoll::add(
                &poll,
                connection.fd(),
                epoll::EventData::new_u64(index as u64),
                epoll::EventFlags::IN,
            )?;
        }
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next_page = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random % self.crcs.len() as u64).expect("below the number of pages")
        };
        let begin = Instant::now();
        let mut outstanding: Vec<VecDeque<(usize, Instant)>> = vec![VecDeque::new(); hand.len()];
        for (connection, waiting) in hand.iter_mut().zip(&mut outstanding) {
            for _ in 0..self.depth {
                let page = next_page();
                connection.ask(page);
                waiting.push_back((page, begin));
            }
            connection.send()?;
        }
        let (mut answers, mut latencies) = (0, Vec::with_capacity(1 << 20));
        let mut answered = Vec::new();
        let mut events: Vec<epoll::Event> = Vec::with_capacity(hand.len());
        let silence = Timespec { tv_sec: i64::try_from(SILENCE.as_secs())?, tv_nsec: 0 };
        let mut ready: Vec<usize> = Vec::with_capacity(hand.len());
        while outstanding.iter().any(|waiting| !waiting.is_empty()) {
            ready.clear();
            ready.extend((0..hand.len()).filter(|index| !hand[*index].may_sleep()));
            if ready.is_empty() {
                events.clear();
                epoll::wait(&poll, spare_capacity(&mut events), Some(&silence))?;
                if events.is_empty() {
                    bail!("no answer for {SILENCE:?}");
                }
                for event in &events {
                    ready.push(usize::try_from(event.data.u64())?);
                }
            }
            let now = Instant::now();
            let over = now.duration_since(begin) >= self.length;
            for index in ready.iter().copied() {
                let (connection, waiting) = (&mut hand[index], &mut outstanding[index]);
                answered.clear();
                connection.take(&mut answered)?;
                for crc in &answered {
                    let Some((page, asked)) = waiting.pop_front() else { bail!("an answer to nothing") };
                    if *crc != self.crcs[page] {
                        bail!("page {page} came back altered");
                    }
                    answers += 1;
                    latencies.push(u64::try_from(now.duration_since(asked).as_nanos())?);
                    if !over {
                        let page = next_page();
                        connection.ask(page);
                        waiting.push_back((page, now));
                    }
                }
                connection.send()?;
            }
        }
        Ok((answers, latencies))
    }
}
