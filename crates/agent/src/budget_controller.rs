//! Keeps a program within its budget once it has outgrown it.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rampool_client::error::PoolError;
use rampool_client::pool::Pool;
use rampool_client::pool::{PoolRegion, RegionTicket};
use rampool_kernel::OS_PAGE_BYTES;
use rampool_kernel::memory::ResidentCounter;
use rampool_kernel::uffd::Uffd;
use rampool_pager::fork::{ChildMemory, ForkFaultServer};
use rampool_pager::pager::{Pager, Supervisor};
use rampool_run::fork_fallback::FallbackLine;
use rampool_run::process_registry::Signature;
use rampool_run::settings::Settings;
use rampool_wire::units::ByteLen;

use crate::ending::Ending;
use crate::exclusion::Standstill;
use crate::line::{self, Line};
use crate::priority::ThreadPriority;
use crate::rejoining::Rejoining;
use crate::report::end_process;
use crate::{report, requests, scan};

const SHORTEST_TICK: Duration = Duration::from_millis(1);
/// While the program runs: fresh memory in huge pages is touched at 10 GB/s, and what exceeds the budget when
/// this thread checks has to leave.
const LONGEST_TICK_RUNNING: Duration = Duration::from_millis(2);
const LONGEST_TICK: Duration = Duration::from_millis(10);
/// A program that has run for less than this since the last check counts as waiting.
const WAITS_NS: u64 = 50_000;
/// The cache keeps at least this much, however much else the program uses.
const LEAST_BUDGET_PAGES: u64 = 256;
/// Unmanaged memory that appeared is searched for when it is this much.
const LEAST_GROWTH_PAGES: u64 = 256;
/// A lease that is full is enlarged by a quarter, and by this at least.
const LEAST_LEASE_GROWTH: u64 = 64 << 20;
/// A server that was full is asked again this often.
const RETRY_FULL: Duration = Duration::from_millis(200);

/// A child that is served until it asks for its memory.
struct ServedChild {
    fork_fault_server: ForkFaultServer<PoolRegion>,
    /// Ends when the child does, or starts another program. None: made by a bare clone, it will never ask.
    line: Option<OwnedFd>,
}

/// A child that will serve itself.
struct Expected {
    line: OwnedFd,
    memory: ChildMemory,
    region: PoolRegion,
}

pub struct BudgetController {
    settings: &'static Settings,
    counter: ResidentCounter,
    ending: Ending,
    served: Vec<ServedChild>,
    /// Children that are not served until they have asked, where forks are not followed.
    expected: Vec<Expected>,
    /// Regions that children are about to take over.
    handed_over: Vec<(OwnedFd, RegionTicket)>,
    /// Resident unmanaged pages when the program's mappings were last read.
    other_at_scan: u64,
    tick: Duration,
    /// Nanoseconds that the program had run at the last tick.
    had_run: u64,
    budget_told: u64,
    full_retried: Instant,
    full_reported: bool,
    /// The line to the fork fallback, which serves the children that outlive this process.
    fallback: Option<FallbackLine>,
    /// Contexts of children that the fallback has had since their births were read.
    entrusted: Vec<RawFd>,
    priority: ThreadPriority,
    rejoining: Rejoining,
}

impl BudgetController {
    pub fn new(
        settings: &'static Settings,
        counter: ResidentCounter,
        ending: Ending,
        signature: Option<Signature>,
        fallback: Option<FallbackLine>,
        priority: ThreadPriority,
    ) -> Self {
        Self {
            settings,
            counter,
            ending,
            served: Vec::new(),
            expected: Vec::new(),
            handed_over: Vec::new(),
            other_at_scan: 0,
            tick: SHORTEST_TICK,
            had_run: 0,
            budget_told: 0,
            full_retried: Instant::now() - RETRY_FULL,
            full_reported: false,
            fallback,
            entrusted: Vec::new(),
            priority,
            rejoining: Rejoining::new(signature),
        }
    }

    /// Takes over what the program has mapped since the last look. Where the kernel does not tell of changed
    /// mappings, the caller sees to it that none changes.
    pub fn adopt_new_memory(&mut self, pager: &mut Pager<Pool>) {
        let mut found = Vec::new();
        if let Err(error) = scan::candidates(|start, end| found.push((start, end))) {
            end_process(Some(self.settings), &format!("/proc/self/maps cannot be read: {error}"));
        }
        for (start, end) in found {
            // SAFETY: the program's memory, not ours, and this pager serves all of its faults from now on.
            if unsafe { pager.adopt_mapped(start, end) } == Err(libc::EAGAIN) {
                // The mappings that were read are out of date. The next tick, which comes soon, reads them
                // again.
                return;
            }
        }
        self.other_at_scan = self.other_pages(pager);
    }

    /// A thread of the program is about to fork, and the kernel will not report it.
    fn serve_request(&mut self, pager: &mut Pager<Pool>) {
        match requests::requested() {
            None => return,
            Some(requests::Request::Thaw) => pager.thaw(),
            Some(requests::Request::Change(change, start, end)) => {
                // SAFETY: the program asks the kernel for just this, and waits until it is done here.
                unsafe {
                    match change {
                        requests::Change::Forget => pager.forget(start, end),
                        requests::Change::Discard => pager.discard(start, end),
                        requests::Change::Return => pager.give_back(start, end),
                    }
                }
            }
            Some(requests::Request::Prepare) => {
                let deadline = Instant::now() + Duration::from_millis(self.settings.op_deadline_ms);
                // A mapping that grew in place would not be inherited as a part of what is managed, nor as
                // memory of its own.
                self.adopt_new_memory(pager);
                match (pager.prepare_fork(self, deadline), line::take_line()) {
                    (Ok((memory, region)), Some(line)) => {
                        self.expected.push(Expected { line, memory, region })
                    }
                    (Ok((_, region)), None) => pager.free_region(region),
                    (Err(reason), _) => end_process(
                        Some(self.settings),
                        &format!("a forked child cannot be given its memory: {reason}"),
                    ),
                }
            }
        }
        requests::request_done();
    }

    fn serve_expected(&mut self, pager: &mut Pager<Pool>) {
        let settings = self.settings;
        let handed_over = &mut self.handed_over;
        self.expected.retain(|child| match line::listen(&child.line) {
            Line::Quiet => true,
            Line::Asked => {
                match pager.hand_over_region(child.region) {
                    Ok(ticket) => {
                        let taken = line::hand_over(&child.line, None, &child.memory, &ticket);
                        handed_over.extend(taken.map(|taken| (taken, ticket)));
                    }
                    Err(error) => end_process(
                        Some(settings),
                        &format!("a forked child cannot be given its memory: {error}"),
                    ),
                }
                false
            }
            Line::Closed => {
                pager.free_region(child.region);
                false
            }
        });
    }

    /// Before this process ends without having served its children to the end: they must not meet zeroes.
    fn give_served_up(&mut self) {
        for child in &mut self.served {
            child.fork_fault_server.give_up();
        }
    }

    fn report_full(&self) {
        let text = format!(
            "rampool: the pool is full; process {} now keeps more than its {} MiB of local memory. Lend more (`rampool serve --memory`, or one more --server).",
            std::process::id(),
            self.settings.local_bytes >> 20
        );
        report::remark(&text);
    }

    /// Resident anonymous pages that are not the cache's.
    fn other_pages(&self, pager: &Pager<Pool>) -> u64 {
        let anonymous = self.counter.read().anonymous_pages();
        pager.stats().process(anonymous);
        anonymous.saturating_sub(pager.cache().used_pages())
    }
}

/// Without a fork fallback (the run is over, or the process may not enter its directory) the child is not
/// served once this process is gone.
fn hand_to_fallback(fallback: Option<&FallbackLine>, child: &Uffd) {
    let _ = fallback.is_some_and(|fallback| fallback.hand_over(child));
}

/// Asks the servers for a larger lease, by a quarter or by what they have left. Returns whether it became
/// larger.
fn grow_lease(pager: &mut Pager<Pool>) -> bool {
    let now = pager.backing().lease_bytes().0;
    let wanted = now + (now / 4).max(LEAST_LEASE_GROWTH);
    match pager.resize_lease(ByteLen(wanted)) {
        Ok(()) => true,
        Err(PoolError::Refused { free, .. }) if free.0 >= LEAST_LEASE_GROWTH => {
            pager.resize_lease(ByteLen(now + free.0)).is_ok()
        }
        // Other errors of a server show in its own event.
        Err(_) => false,
    }
}

impl Supervisor<Pool> for BudgetController {
    fn tick(&mut self, pager: &mut Pager<Pool>) -> Duration {
        self.ending.look();
        self.rejoining.look(pager, self.settings);
        let mut other = self.other_pages(pager);
        let grown = other > self.other_at_scan + LEAST_GROWTH_PAGES;
        if grown {
            let told_by_kernel = pager.faults().follows_mappings();
            // While the program changes its mappings, reading them is useless. The next tick, which comes
            // soon, tries again.
            let still = if told_by_kernel { None } else { Standstill::begin() };
            if told_by_kernel || still.is_some() {
                self.adopt_new_memory(pager);
            }
            other = self.other_at_scan;
        } else {
            self.other_at_scan = self.other_at_scan.min(other);
        }
        let local = self.settings.local_bytes / OS_PAGE_BYTES as u64;
        let is_over = other + pager.cache().used_pages() > local + local / 20;
        self.priority.set(is_over);
        let budget = local.saturating_sub(other).max(LEAST_BUDGET_PAGES.min(local));
        if budget.abs_diff(self.budget_told) > 32 {
            self.budget_told = budget;
            pager.set_budget(budget);
        }
        pager.publish();
        if pager.has_refused() && self.full_retried.elapsed() > RETRY_FULL {
            self.full_retried = Instant::now();
            if !grow_lease(pager) && !self.full_reported {
                self.full_reported = true;
                self.report_full();
            }
            pager.retry_refused();
        }
        let has_run = rampool_kernel::thread::others_cpu_ns();
        let waits = has_run.saturating_sub(self.had_run) < WAITS_NS;
        self.had_run = has_run;
        self.tick = if grown || is_over {
            SHORTEST_TICK
        } else {
            (self.tick * 2).min(if waits { LONGEST_TICK } else { LONGEST_TICK_RUNNING })
        };
        self.tick
    }

    fn born(&mut self, child: &Uffd) {
        // Made by a bare clone: it cannot ask for its memory, and must not read zeroes should this process be
        // killed.
        if !line::waits() {
            hand_to_fallback(self.fallback.as_ref(), child);
            self.entrusted.push(child.raw_fd());
        }
    }

    fn forked(&mut self, pager: &mut Pager<Pool>, child: Uffd) {
        let entrusted = self.entrusted.extract_if(.., |fd| *fd == child.raw_fd()).count() > 0;
        let line = if entrusted { None } else { line::take_line() };
        if line.is_none() && !entrusted {
            hand_to_fallback(self.fallback.as_ref(), &child);
        }
        match pager.fork_child(child) {
            Ok(fork_fault_server) => self.served.push(ServedChild { fork_fault_server, line }),
            Err(reason) => {
                self.give_served_up();
                end_process(
                    Some(self.settings),
                    &format!("a forked child cannot be given its memory: {reason}"),
                )
            }
        }
    }

    fn lost(&mut self, pager: &mut Pager<Pool>, reason: String) {
        self.give_served_up();
        let mut remote = 0;
        pager.cache().absent_content(|extent, staged| {
            remote += if staged.is_none() { u64::from(extent.count) } else { 0 }
        });
        end_process(
            Some(self.settings),
            &format!(
                "{reason}; {remote} pages ({} MiB) of this program were in the pool and cannot be read any more. Ending it (exit code {}) rather than letting it go on with wrong data.",
                (remote * OS_PAGE_BYTES as u64) >> 20,
                rampool_run::settings::LOST_EXIT_CODE
            ),
        )
    }

    fn broken(&mut self, reason: String) {
        end_process(Some(self.settings), &rampool_pager::events::broken_text(&reason))
    }

    fn poll_fds(&self, out: &mut Vec<libc::pollfd>) {
        out.extend(requests::doorbell().map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }));
        out.extend(self.expected.iter().map(|child| libc::pollfd {
            fd: child.line.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }));
        out.extend(self.handed_over.iter().map(|(taken, _)| libc::pollfd {
            fd: taken.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }));
        for child in &self.served {
            out.push(libc::pollfd { fd: child.fork_fault_server.raw_fd(), events: libc::POLLIN, revents: 0 });
            if let Some(line) = &child.line {
                out.push(libc::pollfd { fd: line.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            }
        }
    }

    fn wake_up(&mut self, pager: &mut Pager<Pool>) -> bool {
        self.serve_request(pager);
        self.serve_expected(pager);
        self.handed_over.retain(|(taken, ticket)| match line::listen(taken) {
            Line::Quiet => true,
            Line::Asked => {
                pager.free_what_was_not_taken(ticket);
                false
            }
            // It may take the region over yet, without a word.
            Line::Closed => false,
        });
        let mut served = std::mem::take(&mut self.served);
        while let Some(mut child) = served.pop() {
            let fallback = self.fallback.as_ref();
            match pager
                .serve_forked(&mut child.fork_fault_server, &mut |child| hand_to_fallback(fallback, child))
            {
                Ok(children) => self.served.extend(
                    children
                        .into_iter()
                        .map(|fork_fault_server| ServedChild { fork_fault_server, line: None }),
                ),
                Err(reason) => {
                    self.served.push(child);
                    self.served.append(&mut served);
                    self.give_served_up();
                    end_process(Some(self.settings), &format!("a forked child cannot be served: {reason}"))
                }
            }
            match child.line.as_ref().map_or(Line::Quiet, line::listen) {
                Line::Quiet => self.served.push(child),
                Line::Asked => {
                    let line = child.line.take().expect("it was listened to");
                    let handed = child.fork_fault_server.hand_over().and_then(|(uffd, memory, region)| {
                        let ticket = pager.hand_over_region(region).map_err(|error| error.to_string())?;
                        Ok((uffd, memory, ticket))
                    });
                    match handed {
                        Ok((uffd, memory, ticket)) => {
                            let taken = line::hand_over(&line, Some(&uffd), &memory, &ticket);
                            self.handed_over.extend(taken.map(|taken| (taken, ticket)));
                        }
                        Err(error) => {
                            self.served.append(&mut served);
                            self.give_served_up();
                            end_process(
                                Some(self.settings),
                                &format!("a forked child cannot be given its memory: {error}"),
                            )
                        }
                    }
                }
                Line::Closed => {
                    let region = child.fork_fault_server.region();
                    pager.free_region(region);
                }
            }
        }
        true
    }
}
