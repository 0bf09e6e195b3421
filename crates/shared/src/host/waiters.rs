//! Who of this rank waits for messages, and how: threads of the program that look for them, one that sleeps
//! on the connections, and the service thread, which serves the rest.
//!
//! ```text
//!   a thread waits:  looks --nothing for a while--> sleeps on the connections, if no other does
//!                      |                              | its wait is over, or memory has something: nudged
//!                      '--the answer came-------------'
//!   the service:     serves --nothing to do--> sleeps --messages, unless a thread looks--> serves
//!                                                     '--needed, or its time has come------'
//! ```
//!
//! A thread that looks takes all threads' messages, which then wake no other. The host tells the kernel.

use std::time::Instant;

use rampool_sharing::ThreadId;

use crate::habit::Habits;

/// See the module.
#[derive(Debug)]
pub(super) struct Waiters {
    /// Threads that look, the service thread among them.
    lookers: usize,
    /// The one that sleeps on the connections, or is about to look after that.
    sleeper: Option<ThreadId>,
    /// It was told to wake up.
    nudged: bool,
    /// The service thread sleeps, or is about to.
    service_sleeps: bool,
    /// Messages on connections wake the service thread.
    wakes_service: bool,
    /// The service thread has to look again: something was left to do, or is due before its planned time.
    needs_service: bool,
    /// When it looks by itself.
    planned: Instant,
    pub habits: Habits,
}

/// Whom to wake because memory that is shared with a peer has something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wake {
    Nobody,
    Service,
    Sleeper,
}

impl Waiters {
    pub fn new(now: Instant) -> Self {
        Self {
            lookers: 0,
            sleeper: None,
            nudged: false,
            service_sleeps: false,
            wakes_service: true,
            needs_service: false,
            planned: now,
            habits: Habits::new(),
        }
    }

    /// Whether any thread looks.
    pub fn look(&self) -> bool {
        self.lookers > 0
    }

    /// A thread looks from now on. Whether messages on connections would wake the service thread.
    pub fn begin_to_look(&mut self) -> bool {
        self.lookers += 1;
        self.wakes_service
    }

    /// It looks no more. Whether it was the last one.
    pub fn end_looking(&mut self) -> bool {
        self.lookers -= 1;
        self.lookers == 0
    }

    /// Messages on connections wake the service thread from now on, or do not. Whether that is news.
    pub fn wake_service(&mut self, yes: bool) -> bool {
        std::mem::replace(&mut self.wakes_service, yes) != yes
    }

    /// Whether this thread may sleep on the connections: no other one does.
    pub fn begin_to_sleep(&mut self, thread: ThreadId) -> bool {
        let is_free = self.sleeper.is_none();
        if is_free {
            self.sleeper = Some(thread);
        }
        is_free
    }

    /// It is awake. Whether it was nudged.
    pub fn end_sleeping(&mut self) -> bool {
        self.sleeper = None;
        std::mem::take(&mut self.nudged)
    }

    /// The wait of a thread is over. Whether to nudge it.
    pub fn is_over(&mut self, thread: ThreadId) -> bool {
        let sleeps = self.sleeper == Some(thread);
        self.nudged |= sleeps;
        sleeps
    }

    /// Whether somebody sleeps who does not see what is in shared memory: peers are to ring.
    pub fn rely_on_rings(&self) -> bool {
        self.sleeper.is_some() || (self.lookers == 0 && self.service_sleeps)
    }

    /// Something is in shared memory, and somebody [relies on rings](Self::rely_on_rings).
    pub fn something_came(&mut self) -> Wake {
        match self.sleeper {
            None => Wake::Service,
            Some(_) if std::mem::replace(&mut self.nudged, true) => Wake::Nobody,
            Some(_) => Wake::Sleeper,
        }
    }

    /// The service thread serves.
    pub fn service_serves(&mut self) {
        self.needs_service = false;
        self.service_sleeps = false;
    }

    /// It is about to sleep.
    pub fn service_sleeps(&mut self) {
        self.service_sleeps = true;
    }

    /// It looks by itself then.
    pub fn plan(&mut self, until: Instant) {
        self.planned = until;
    }

    /// It has something to do at `due`.
    pub fn expect(&mut self, due: Instant) {
        if due < self.planned {
            self.planned = due;
            self.needs_service = true;
        }
    }

    /// It has something to do that it does not look for.
    pub fn need_service(&mut self) {
        self.needs_service = true;
    }

    pub fn needs_service(&self) -> bool {
        self.needs_service
    }

    /// Whether to wake it. True once.
    pub fn wants_service(&mut self) -> bool {
        std::mem::take(&mut self.needs_service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_sleeps_on_the_connections_and_is_nudged_once() {
        let mut waiters = Waiters::new(Instant::now());
        let (one, other) = (ThreadId(1), ThreadId(2));
        assert!(!waiters.rely_on_rings());
        assert!(waiters.begin_to_sleep(one) && !waiters.begin_to_sleep(other));
        assert!(waiters.rely_on_rings());
        assert!(!waiters.is_over(other));
        assert_eq!(waiters.something_came(), Wake::Sleeper);
        assert_eq!(waiters.something_came(), Wake::Nobody, "it is about to wake up");
        assert!(waiters.is_over(one));
        assert!(waiters.end_sleeping() && !waiters.end_sleeping());
        assert!(waiters.begin_to_sleep(other));
        assert!(!waiters.end_sleeping());
    }

    #[test]
    fn a_sleeping_service_thread_relies_on_rings_unless_a_thread_looks() {
        let mut waiters = Waiters::new(Instant::now());
        waiters.service_sleeps();
        assert!(waiters.rely_on_rings());
        assert_eq!(waiters.something_came(), Wake::Service);
        assert!(waiters.begin_to_look(), "messages wake it, so far");
        assert!(waiters.look() && !waiters.rely_on_rings());
        assert!(waiters.wake_service(false) && !waiters.wake_service(false));
        assert!(!waiters.begin_to_look());
        assert!(!waiters.end_looking() && waiters.end_looking());
        assert!(waiters.rely_on_rings());
        waiters.service_serves();
        assert!(!waiters.rely_on_rings());
    }

    #[test]
    fn the_service_thread_is_wanted_once_for_what_is_due_before_it_looks_by_itself() {
        let now = Instant::now();
        let at = |ms| now + std::time::Duration::from_millis(ms);
        let mut waiters = Waiters::new(now);
        waiters.plan(at(10));
        waiters.expect(at(20));
        assert!(!waiters.wants_service());
        waiters.expect(at(5));
        assert!(waiters.needs_service() && waiters.wants_service() && !waiters.wants_service());
        waiters.need_service();
        waiters.service_serves();
        assert!(!waiters.wants_service(), "it has looked since");
    }
}
