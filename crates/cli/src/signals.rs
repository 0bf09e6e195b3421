//! Passes signals on to programs that rampool started, so that each signal reaches them once.
//!
//! The program is in this process's group, as a terminal and a shell's job control need. So a signal to the
//! group (a terminal's Ctrl-C, `kill -INT -PGID`, what Jupyter and supervisors send) reaches the program
//! without help, and one to this process alone must be passed on. A signal does not say which of both it is.
//!
//! A *witness* tells: a child of this process in the same group, which blocks all signals and never runs.
//! What is pending there was sent to the group. The kernel sends to a group under one lock, so what this
//! process has got the witness has got too, once that lock was free ([`settle`]). A witness cannot forget
//! what it has seen without running, so each round of signals ends with a fresh one. That one starts after a
//! signal was seen and before it is taken: then a signal that arrives meanwhile shows in both processes, or
//! in none ([`Signals::take`]).
//!
//! Other ways do not do. `tini` and `dumb-init` give the program a group of its own, where signals to the old
//! group and a pipeline's terminal do not reach it. `sudo` looks at who sent the signal, which any process
//! may be. `strace -D` makes the program the caller's child, which then ends before the summary is written.

use std::ffi::{CStr, CString, c_char};
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Signals that are taken one by one instead of interrupting this process. At rest no signal to the group is
/// pending in the witness that this process has taken.
pub struct Signals {
    before: libc::sigset_t,
    taken: libc::sigset_t,
    /// Readable while one of them is pending.
    pending: OwnedFd,
    witness: Option<Witness>,
    /// Pending here, and sent to the group, as a witness of before has shown.
    owed: Mask,
    /// Those of `owed` that were sent while programs started.
    early: Mask,
}

/// A signal that this process got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Came {
    pub signal: i32,
    pub sent_to: SentTo,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SentTo {
    ThisProcess,
    /// Each process in the group of this one got it as well.
    Group,
    /// Those got it that had started by then.
    GroupEarly,
}

impl Came {
    /// Sends it to a child of this process that has not got it. The child has not been waited for.
    pub fn pass_to(self, child: i32) {
        // SAFETY: no preconditions.
        let in_group = unsafe { libc::getpgid(child) == libc::getpgrp() };
        let has_got_it = match self.sent_to {
            SentTo::ThisProcess => false,
            SentTo::Group => in_group,
            SentTo::GroupEarly => {
                in_group && Status::of(child).is_none_or(|status| status.may_have_got(self.signal))
            }
        };
        if !has_got_it {
            // SAFETY: our own child.
            unsafe { libc::kill(child, self.signal) };
        }
    }
}

impl Signals {
    /// Blocks them in this thread and those it starts from now on.
    pub fn block() -> Result<Self> {
        // SAFETY: the sets are initialised by the calls that fill them.
        unsafe {
            let mut taken = std::mem::zeroed::<libc::sigset_t>();
            let mut before = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut taken);
            for signal in [
                libc::SIGCHLD,
                libc::SIGINT,
                libc::SIGQUIT,
                libc::SIGTERM,
                libc::SIGHUP,
                libc::SIGUSR1,
                libc::SIGUSR2,
                libc::SIGTSTP,
                libc::SIGCONT,
                libc::SIGWINCH,
                libc::SIGALRM,
            ] {
                libc::sigaddset(&raw mut taken, signal);
            }
            if libc::sigprocmask(libc::SIG_BLOCK, &raw const taken, &raw mut before) != 0 {
                bail!("cannot block signals");
            }
            let pending = libc::signalfd(-1, &raw const taken, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if pending < 0 {
                return Err(std::io::Error::last_os_error()).context("cannot watch for signals");
            }
            let pending = OwnedFd::from_raw_fd(pending);
            let none = Mask::default();
            Ok(Self { before, taken, pending, witness: None, owed: none, early: none })
        }
    }

    /// Starts a program with the signal mask from before, and with the default action of SIGPIPE; returns its
    /// process id. Unlike `fork`, this does not copy the process.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn spawn(
        &self,
        program: &CStr,
        arguments: &[CString],
        environment: &[CString],
    ) -> std::io::Result<i32> {
        let pointers = |strings: &[CString]| -> Vec<*mut c_char> {
            strings.iter().map(|s| s.as_ptr().cast_mut()).chain([std::ptr::null_mut()]).collect()
        };
        let (arguments, environment) = (pointers(arguments), pointers(environment));
        let result =
            |errno: i32| if errno == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(errno)) };
        let flags = libc::POSIX_SPAWN_SETSIGMASK | libc::POSIX_SPAWN_SETSIGDEF;
        let mut process = 0;
        // SAFETY: the attributes and the set are initialised by the calls that fill them, and the attributes
        // are released once; both lists end with a null pointer, and what they point to lives across the
        // call, which does not change it.
        unsafe {
            let mut default = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut default);
            libc::sigaddset(&raw mut default, libc::SIGPIPE);
            let mut attributes = std::mem::zeroed::<libc::posix_spawnattr_t>();
            result(libc::posix_spawnattr_init(&raw mut attributes))?;
            let started =
                result(libc::posix_spawnattr_setsigmask(&raw mut attributes, &raw const self.before))
                    .and_then(|()| {
                        result(libc::posix_spawnattr_setsigdefault(&raw mut attributes, &raw const default))
                    })
                    .and_then(|()| {
                        result(libc::posix_spawnattr_setflags(
                            &raw mut attributes,
                            flags.try_into().expect("small flags"),
                        ))
                    })
                    .and_then(|()| {
                        let (attributes, arguments, environment) =
                            (&raw const attributes, arguments.as_ptr(), environment.as_ptr());
                        result(libc::posix_spawn(
                            &raw mut process,
                            program.as_ptr(),
                            std::ptr::null(),
                            attributes,
                            arguments,
                            environment,
                        ))
                    });
            libc::posix_spawnattr_destroy(&raw mut attributes);
            started?;
        }
        Ok(process)
    }

    /// The signals that were blocked before: programs start with them.
    pub fn before(&self) -> libc::sigset_t {
        self.before
    }

    /// From now on, signals that are sent to the group are told from others. Called before programs start,
    /// and again when they have started. A signal to the group in between reaches a program or not.
    pub fn watch_group(&mut self) {
        let next = Witness::start();
        let shown = |witness: &Option<Witness>| witness.as_ref().map_or(Mask::default(), Witness::pending);
        let before = shown(&self.witness);
        settle();
        self.owed = before.and(Mask::pending_here());
        self.early = self.owed.without(shown(&next));
        self.witness = next;
    }

    /// Waits for a signal for at most `time`, and gives `came` each one but SIGCHLD.
    pub fn wait(&mut self, time: Duration, came: impl FnMut(Came)) {
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
        // Whatever the answer is: what is pending is asked below.
        let _ = poll(&mut [PollFd::new(&self.pending, PollFlags::IN)], Some(&timeout));
        let mut seen = Mask::pending_here().and(Mask::of_set(&self.taken));
        if seen.has(libc::SIGCHLD) {
            seen = seen.without(Mask::of(libc::SIGCHLD));
            take_one(Mask::of(libc::SIGCHLD));
        }
        if !seen.is_empty() {
            self.take(seen, came);
        }
    }

    /// Whether this process is about to get SIGCONT.
    pub fn is_continued(&self) -> bool {
        Mask::pending_here().has(libc::SIGCONT)
    }

    /// Takes the signals that were `seen` pending, and gives them to `came`.
    fn take(&mut self, seen: Mask, mut came: impl FnMut(Came)) {
        let mut next = Witness::start();
        let shown = |witness: &Option<Witness>| witness.as_ref().map_or(Mask::default(), Witness::pending);
        let to_group = self.owed.or(shown(&self.witness));
        let mut taken = Mask::default();
        while let Some(signal) = take_one(seen.without(taken)) {
            taken = taken.or(Mask::of(signal));
            let sent_to = match (to_group.has(signal), self.early.has(signal)) {
                (false, _) => SentTo::ThisProcess,
                (true, false) => SentTo::Group,
                (true, true) => SentTo::GroupEarly,
            };
            came(Came { signal, sent_to });
        }
        settle();
        let mut late = shown(&next);
        if !late.and(taken).is_empty() {
            // Sent again to the group, before the signal was taken here, and then it was taken as well, or
            // after, and then it is pending here now.
            let fresh = Witness::start();
            late = late.or(shown(&next));
            next = fresh;
            settle();
        }
        // A signal that stops a process removes a pending one that continues it, and the reverse.
        self.owed = to_group.without(taken).or(late).and(Mask::pending_here());
        self.early = self.early.without(taken).and(self.owed);
        self.witness = next;
    }
}

/// Returns when nobody is in the middle of sending a signal to a group. This changes nothing: a group that it
/// is in already. The kernel takes its lock on groups for that, even where it refuses (a session's leader).
fn settle() {
    // SAFETY: no preconditions.
    unsafe { libc::setpgid(0, libc::getpgrp()) };
}

/// Takes a pending signal of this process, the lowest first.
fn take_one(of: Mask) -> Option<i32> {
    let (set, none) = (of.to_set(), libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: the set and the time live across the call.
    let signal = unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const none) };
    (signal > 0).then_some(signal)
}

/// Signals as the kernel shows them in `/proc`: bit 0 is signal 1.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Mask(u64);

impl Mask {
    fn of(signal: i32) -> Self {
        Self(1 << (signal - 1))
    }

    fn of_set(set: &libc::sigset_t) -> Self {
        // SAFETY: the set is initialised, and the number of a signal.
        let has = |signal: &i32| unsafe { libc::sigismember(set, *signal) == 1 };
        (1..=64).filter(has).map(Self::of).fold(Self::default(), Self::or)
    }

    fn to_set(self) -> libc::sigset_t {
        // SAFETY: the set is initialised by the call that empties it; numbers of signals.
        unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigemptyset(&raw mut set);
            (1..=64).filter(|signal| self.has(*signal)).for_each(|signal| {
                libc::sigaddset(&raw mut set, signal);
            });
            set
        }
    }

    /// Those that this thread blocks and that are pending.
    fn pending_here() -> Self {
        // SAFETY: the set is initialised by the call.
        unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigpending(&raw mut set);
            Self::of_set(&set)
        }
    }

    fn has(self, signal: i32) -> bool {
        self.0 & Self::of(signal).0 != 0
    }

    fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// A child in this process's group that blocks all signals and waits for its end. It ends with this value, or
/// with this process.
struct Witness(i32);

impl Witness {
    /// `None` if no process can be made.
    fn start() -> Option<Self> {
        // SAFETY: the sets are initialised by the calls that fill them. The copy of this process uses nothing
        // but what is safe after a fork of several threads: system calls, no memory that is allocated.
        unsafe {
            let mut all = std::mem::zeroed::<libc::sigset_t>();
            let mut before = std::mem::zeroed::<libc::sigset_t>();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            let parent = libc::getpid();
            let process = libc::fork();
            if process == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::prctl(libc::PR_SET_NAME, c"rampool-witness".as_ptr());
                // Nobody must wait for the end of what this process has open.
                libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0);
                while libc::getppid() == parent {
                    libc::pause();
                }
                libc::_exit(0);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
            (process > 0).then_some(Self(process))
        }
    }

    /// What was sent to it since its start; nothing if somebody has ended it.
    fn pending(&self) -> Mask {
        Status::of(self.0).filter(Status::lives).map_or(Mask::default(), |status| status.pending)
    }
}

/// What the kernel says of a process.
struct Status {
    state: char,
    pending: Mask,
    ignored: Mask,
    caught: Mask,
}

impl Status {
    /// `None` if there is none of that number.
    fn of(process: i32) -> Option<Self> {
        let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let mask = |name: &str| u64::from_str_radix(field(name)?, 16).ok().map(Mask);
        Some(Self {
            state: field("State:")?.chars().next()?,
            pending: mask("ShdPnd:")?,
            ignored: mask("SigIgn:")?,
            caught: mask("SigCgt:")?,
        })
    }

    fn lives(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }

    /// No, if it would have ended or stopped by now, or would have it pending: it has just started, and the
    /// agent blocks signals for a moment then.
    fn may_have_got(&self, signal: i32) -> bool {
        let shows_nothing = self.pending.or(self.ignored).or(self.caught).has(signal);
        shows_nothing || self.state == 'T' || !self.lives()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        // SAFETY: our own child, which is waited for here only.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            while libc::waitpid(self.0, std::ptr::null_mut(), 0) < 0
                && *libc::__errno_location() == libc::EINTR
            {}
        }
    }
}
