//! Cut connections to other ranks: their messages are kept, and continue over the next connection.
//! [`rampool_sharing::relink`] decides, the thread of [`super::super::relink`] makes connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rampool_sharing::Rank;
use rampool_sharing::control::{Control, Hello, Resume};
use rampool_sharing::relink::{Attempt, Relink, RelinkTiming, Step, Verdict};

use super::{Host, Leaving, PROCESS_ENDED, Unsent};
use crate::line::Line;
use crate::relink::{Order, Orders};

/// State for reconnecting. Empty if no connection may be cut.
#[derive(Default)]
pub(super) struct Links {
    orders: Option<Arc<Orders>>,
    incarnation: u64,
    /// Incarnations of the others, by rank.
    incarnations: Vec<u64>,
    grace: Duration,
}

/// The state of one connection that may be cut, and why it was cut.
pub(super) struct Link {
    relink: Relink,
    /// The reason, while it is cut.
    how: String,
    /// This rank cut it because the peer was silent.
    was_silent: bool,
    /// The outcome of the last attempt.
    last: String,
}

impl Links {
    /// No rank reconnects any more.
    pub fn end(&self) {
        if let Some(orders) = &self.orders {
            orders.give(Order::End);
        }
    }
}

impl Host {
    /// Cut connections are made again from now on.
    pub fn may_relink(&mut self, hello: &Hello, incarnations: &[u64], orders: Arc<Orders>, grace: Duration) {
        let timing = RelinkTiming::new(microseconds(grace));
        for (peer, rank) in self.peers.iter_mut().zip(0..) {
            if let Some(peer) = peer.as_mut().filter(|peer| !peer.line.is_shared_memory()) {
                let relink = Relink::new(timing, rank < self.rank.0, peer.line.is_local());
                peer.link = Some(Link { relink, how: String::new(), was_silent: false, last: String::new() });
            }
        }
        self.links = Links {
            orders: Some(orders),
            incarnation: hello.incarnation,
            incarnations: incarnations.to_vec(),
            grace,
        };
    }

    fn now_us(&self, now: Instant) -> u64 {
        microseconds(now.saturating_duration_since(self.began))
    }

    /// A connection is broken. False: it cannot be made again.
    pub(super) fn cut(&mut self, rank: Rank, how: &str, was_silent: bool) -> bool {
        let now = Instant::now();
        let now_us = self.now_us(now);
        let silence = self.silence;
        if self.stopped.is_some() || self.leaving == Leaving::Done {
            return false;
        }
        let Some(peer) = self.peers[usize::from(rank.0)].as_mut() else { return false };
        let Some(link) = &mut peer.link else { return false };
        if peer.line.is_cut() {
            return true;
        }
        tracing::warn!("the connection to {rank} is cut: {how}");
        if let Some(fd) = peer.line.fd() {
            self.watch.remove_line(fd);
        }
        peer.line.cut();
        peer.backlog = false;
        link.how = if how == PROCESS_ENDED { "its connection closed".to_owned() } else { how.to_owned() };
        link.was_silent = was_silent;
        link.last = "it did not come".to_owned();
        let until_us =
            was_silent.then(|| now_us + microseconds((peer.heard + silence).saturating_duration_since(now)));
        link.relink.cut(now_us, until_us);
        // The service thread continues with it.
        self.expect(now);
        self.waiters.need_service();
        true
    }

    /// Connects again, or gives up, for every rank whose turn it is.
    pub(super) fn look_after_links(&mut self, now: Instant) {
        let now_us = self.now_us(now);
        let Some(orders) = self.links.orders.clone() else { return };
        for rank in 0..self.ranks {
            while let Some(link) = self.peers[usize::from(rank)].as_mut().and_then(|peer| peer.link.as_mut())
                && let Some(step) = link.relink.poll(now_us)
            {
                let rank = Rank(rank);
                match step {
                    Step::Dial { attempt } => orders.give(Order::Dial { rank, attempt }),
                    Step::Probe => orders.give(Order::Probe { rank }),
                    Step::GiveUp(verdict) => {
                        let how = self.why_given_up(rank, verdict);
                        self.lose_unless_done(rank, &how);
                    }
                }
            }
        }
    }

    fn why_given_up(&self, rank: Rank, verdict: Verdict) -> String {
        let silence = self.silence.as_secs();
        let link = self.peers[usize::from(rank.0)]
            .as_ref()
            .and_then(|peer| peer.link.as_ref())
            .expect("it was just asked");
        match verdict {
            Verdict::Ended => PROCESS_ENDED.to_owned(),
            Verdict::TooLong { .. } if link.was_silent => {
                format!("it has said nothing for {silence} s: it hangs, or the network is cut")
            }
            Verdict::TooLong { tries } => {
                let (how, last, grace) = (&link.how, &link.last, self.links.grace.as_secs_f64());
                format!("{how}, and reconnecting failed for {grace} s ({tries} attempts; the last: {last})")
            }
        }
    }

    /// When [`Host::look_after_links`] has something to do next.
    pub(super) fn links_due(&self) -> Option<Instant> {
        if self.stopped.is_some() || self.leaving == Leaving::Done {
            return None;
        }
        let links = self.peers.iter().flatten().filter_map(|peer| peer.link.as_ref());
        let due = links.filter_map(|link| link.relink.poll_timeout()).min()?;
        Some(self.began + Duration::from_micros(due))
    }

    /// The first message over a new connection to this rank; `None` if none is awaited any more.
    pub fn resume_request(&self, rank: Rank, attempt: u32, run: &str) -> Option<Resume> {
        let peer = self.peers[usize::from(rank.0)].as_ref()?;
        peer.link.as_ref().filter(|link| link.relink.awaits(attempt))?;
        Some(Resume {
            run: run.to_owned(),
            rank: self.rank,
            incarnation: self.links.incarnation,
            of: self.links.incarnations[usize::from(rank.0)],
            attempt,
            received: peer.line.received(),
        })
    }

    /// The outcome of an attempt to connect to this rank, or of a check that it listens.
    pub fn tried(&mut self, rank: Rank, attempt: Option<u32>, outcome: Attempt, why: &str) {
        let now = Instant::now();
        let now_us = self.now_us(now);
        let Some(link) = self.peers[usize::from(rank.0)].as_mut().and_then(|peer| peer.link.as_mut()) else {
            return;
        };
        if attempt.is_none_or(|attempt| link.relink.awaits(attempt)) {
            tracing::debug!("no connection to {rank}: {why}");
            why.clone_into(&mut link.last);
            link.relink.came_to(now_us, outcome);
            self.after_links(now);
        }
    }

    /// The process that listens there will never resume with this rank.
    pub fn refused(&mut self, rank: Rank, attempt: Option<u32>, why: &str) {
        let Some(link) = self.peers[usize::from(rank.0)].as_mut().and_then(|peer| peer.link.as_mut()) else {
            return;
        };
        if attempt.is_some_and(|attempt| link.relink.awaits(attempt)) {
            link.relink.give_up();
            let how = format!("{}, and it refuses a new one: {why}", link.how);
            self.lose_unless_done(rank, &how);
            self.after_links(Instant::now());
        }
    }

    /// The rank that was asked resumes over this connection, and has received this many bytes.
    pub fn resumed(&mut self, rank: Rank, attempt: u32, incarnation: u64, line: Line, received: u64) {
        let expected = self.links.incarnations.get(usize::from(rank.0)).copied();
        let Some(link) = self.peers[usize::from(rank.0)].as_mut().and_then(|peer| peer.link.as_mut()) else {
            return;
        };
        if !link.relink.resumed(attempt) {
            return;
        }
        if expected == Some(incarnation) {
            self.go_on_over(rank, line, received);
        } else {
            self.lose(rank, "another process answers in its place");
        }
    }

    /// A peer asks to resume over this connection.
    ///
    /// # Errors
    /// The connection, and why it is refused.
    pub fn asked(
        &mut self,
        resume: &Resume,
        run: &str,
        mut line: Box<Line>,
    ) -> Result<(), (Box<Line>, String)> {
        let rank = resume.rank;
        let theirs = self.links.incarnations.get(usize::from(rank.0)).copied();
        let peer = self.peers.get_mut(usize::from(rank.0)).and_then(Option::as_mut);
        let Some((peer, theirs)) = peer.zip(theirs) else {
            return Err((line, format!("there is no {rank} that could connect here")));
        };
        let Some(link) = peer.link.as_mut().filter(|_| !peer.closed) else {
            return Err((line, "its connection is over".to_owned()));
        };
        let checked = link.relink.check(resume, run, self.links.incarnation, theirs);
        if let Err(why) = checked.and_then(|()| link.relink.asked(resume.attempt).map_err(str::to_owned)) {
            return Err((line, why));
        }
        if self.stopped.is_some() {
            return Err((line, "the run is over".to_owned()));
        }
        // This end may not have noticed yet. Bytes that are still in the old connection are sent again.
        if let Some(fd) = peer.line.fd() {
            self.watch.remove_line(fd);
            peer.line.cut();
        }
        line.queue_control(&Control::Resumed {
            incarnation: self.links.incarnation,
            received: peer.line.received(),
        });
        self.go_on_over(rank, *line, resume.received);
        Ok(())
    }

    fn go_on_over(&mut self, rank: Rank, mut line: Line, peer_has: u64) {
        let now = Instant::now();
        let peer = self.peers[usize::from(rank.0)].as_mut().expect("it has a connection");
        // A new connection has room for the short messages that were sent over it; if not, it was cut again.
        let is_whole = line.flush().is_ok_and(|all| all && !line.has_backlog());
        if let Err(error) = peer.line.resume(line, peer_has) {
            self.lose(rank, &error.to_string());
            return;
        }
        peer.heard = now;
        peer.backlog = false;
        let added = peer.line.fd().is_some_and(|fd| self.watch.add_line(rank, fd).is_ok());
        if !added {
            self.lose(rank, "its new connection cannot be watched");
            return;
        }
        tracing::info!("{rank} is connected again");
        self.account.stats.reconnections += 1;
        if is_whole {
            // Bytes that came with the answer make nothing readable.
            self.take_frames(rank, now);
        } else {
            self.cut(rank, "its connection was cut again", false);
        }
        self.unsent = Unsent::Urgent;
        self.after_links(now);
    }

    fn after_links(&mut self, now: Instant) {
        self.look_after_links(now);
        self.look_for_end();
        self.flush();
        self.waiters.need_service();
    }
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
