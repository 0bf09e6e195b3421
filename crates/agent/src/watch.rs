//! While the program fits: a thread that reads one counter now and then.
//!
//! The nearer the program is to its budget, the more often. When it is near, the pool is joined and the pager
//! begins.
//!
//! The thread has a table of descriptors of its own, and opens what it will need before the program's first
//! instruction: later the program may have given its rights away, closed everything, or used its last
//! descriptor.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rampool_client::pool::{Pool, PoolConfig, PoolRegion};
use rampool_client::stats::PagerStats;
use rampool_kernel::OS_PAGE_BYTES;
use rampool_kernel::awake::AwakePage;
use rampool_kernel::descriptors::Spare;
use rampool_kernel::maps::Pagemap;
use rampool_kernel::memory::ResidentCounter;
use rampool_kernel::thread::SpawnError;
use rampool_net::key::Key;
use rampool_pager::fault::{CopyThread, FaultCatcher};
use rampool_pager::pager::awake::Awake;
use rampool_pager::pager::{Pager, PagerError, Waiting, hold_absent};
use rampool_pager::region::PagedConfig;
use rampool_run::fork_fallback::FallbackLine;
use rampool_run::process_registry::Signature;
use rampool_run::settings::Settings;

use crate::budget_controller::BudgetController;
use crate::ending::Ending;
use crate::exclusion::{self, Transition};
use crate::line::{self, Inheritance};
use crate::priority::ThreadPriority;
use crate::report::{end_process, without_rampool};
use crate::{faults, report, scan, touch};

/// The stack of the agent's thread.
const STACK_BYTES: usize = 1 << 20;
/// Few programs touch fresh memory faster than this, in bytes per second: it bounds how long the watch may
/// sleep. (One thread that fills huge pages does 8 to 10 GB/s.)
const FASTEST_GROWTH: u64 = 16 << 30;
/// Low descriptors that stay free for forks.
const SPARE_DESCRIPTORS: usize = 8;
const LONGEST_SLEEP: Duration = Duration::from_millis(50);
const SHORTEST_SLEEP: Duration = Duration::from_micros(500);

/// The agent's thread has left the program's table of descriptors and, in a child, has the child's memory.
static READY: AtomicBool = AtomicBool::new(false);
/// How long the program waits for that.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// Starts the agent's thread; in a forked child of a managed program with the `line` to its parent. Returns
/// when the thread has what came through the line, and nothing of the program's descriptors.
pub fn begin(settings: &'static Settings, line: Option<RawFd>) {
    if let Err(error) = start(settings, line, false) {
        end_process(Some(settings), &format!("the agent cannot start: {error}"));
    }
}

/// `again`: the program has run with an agent before.
fn start(settings: &'static Settings, line: Option<RawFd>, again: bool) -> Result<(), SpawnError> {
    READY.store(false, Ordering::Release);
    rampool_kernel::thread::spawn_detached(STACK_BYTES, Box::new(move || run(settings, line, again)))?;
    let since = Instant::now();
    while !READY.load(Ordering::Acquire) {
        // SAFETY: gives the CPU up; no preconditions.
        unsafe { libc::sched_yield() };
        if since.elapsed() > START_DEADLINE {
            end_process(Some(settings), "the agent did not start in time");
        }
    }
    Ok(())
}

/// The thread that watches the program, or manages its memory, by its number; 0: none.
static THREAD: AtomicU32 = AtomicU32::new(0);
/// 1: the thread is to end, if it only watches.
static IS_TO_END: AtomicU32 = AtomicU32::new(0);

/// In a forked child: threads are not inherited.
pub fn forget_after_fork() {
    THREAD.store(0, Ordering::Release);
    IS_TO_END.store(0, Ordering::Release);
}

fn is_to_end() -> bool {
    IS_TO_END.load(Ordering::Acquire) != 0
}

/// Makes a call while this process has no thread of ours. `None` where that is impossible, because memory is
/// managed, or useless, because there is no such thread.
pub fn without_thread<T>(call: impl FnOnce() -> T) -> Option<T> {
    let settings = exclusion::settings()?;
    let unmanaged = exclusion::Unmanaged::begin()?;
    // A child made by a bare `clone` has a copy of the number alone.
    let thread = THREAD.load(Ordering::Acquire);
    // SAFETY: a system call without pointers; signal 0 is never sent.
    if thread == 0 || unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) } != 0 {
        return None;
    }
    IS_TO_END.store(1, Ordering::Release);
    // SAFETY: wakes waiters on a static word.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            IS_TO_END.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            i32::MAX,
        )
    };
    let since = Instant::now();
    while !rampool_kernel::thread::ours_are_gone() {
        // SAFETY: gives the CPU up; no preconditions.
        unsafe { libc::sched_yield() };
        if since.elapsed() > START_DEADLINE {
            if rampool_kernel::thread::ours() > 0 {
                end_process(Some(settings), "the agent's thread did not end in time");
            }
            // A thread of the program has the number of one of ours that ended long ago.
            break;
        }
    }
    THREAD.store(0, Ordering::Release);
    IS_TO_END.store(0, Ordering::Release);
    let result = call();
    // A process whose children are to live in another process namespace cannot have threads any more.
    if let Err(error) = start(settings, None, true) {
        without_rampool(&format!("the agent cannot go on after its namespaces have changed: {error}"));
    }
    drop(unmanaged);
    Some(result)
}

/// Descriptors that are opened before the program has run.
struct Tools {
    counter: ResidentCounter,
    pagemap: Pagemap,
    ending: Ending,
    key: Option<Key>,
    /// Needed, and its lack reported, only when the program outgrows its local memory.
    faults: Option<Result<FaultCatcher, String>>,
    stats: PagerStats,
    fallback: Option<FallbackLine>,
    /// While this is held, the run knows that this process lives.
    signature: Option<Signature>,
}

impl Tools {
    fn open(settings: &'static Settings, is_child: bool) -> Result<Self, String> {
        let proc = |error: std::io::Error| format!("the agent cannot read /proc: {error}");
        // Later the program may have another root directory, without /proc. A child has few descriptors to
        // spare, and does not get that far with another root.
        if !is_child {
            rampool_kernel::procfs::keep_open().map_err(proc)?;
        }
        Ok(Self {
            counter: ResidentCounter::open().map_err(proc)?,
            pagemap: Pagemap::open().map_err(proc)?,
            ending: Ending::new(),
            key: settings
                .key_file
                .as_ref()
                .map(|path| Key::load(path).map_err(|error| error.to_string()))
                .transpose()?,
            faults: (!is_child).then(|| faults::open_faults(settings)),
            stats: report::publish(settings),
            // A child may have few descriptors, and has its memory to ask for first.
            fallback: if is_child { None } else { FallbackLine::connect(&settings.run_dir) },
            signature: Signature::sign(&settings.run_dir, is_child),
        })
    }
}

fn run(settings: &'static Settings, line: Option<RawFd>, again: bool) {
    let line = match rampool_kernel::descriptors::leave_shared_table(line) {
        Ok(line) => line,
        Err(errno) => end_process(
            Some(settings),
            &format!("the agent cannot have descriptors of its own (errno {errno})"),
        ),
    };
    report::this_is_the_agent(settings);
    name_thread();
    touch::this_is_the_agents_thread();
    let spare = Spare::hold(SPARE_DESCRIPTORS);
    let mut tools = match Tools::open(settings, line.is_some()) {
        Ok(tools) => tools,
        // Nothing of it is away yet, and it can go on without us.
        Err(reason) if line.is_none() && !std::path::Path::new("/proc/self").exists() => {
            without_rampool(&format!("{reason} (its root directory has none)"));
            drop(spare);
            READY.store(true, Ordering::Release);
            return;
        }
        // As in another mount namespace, where the key has no file.
        Err(reason) if line.is_none() && again => {
            without_rampool(&reason);
            drop(spare);
            READY.store(true, Ordering::Release);
            return;
        }
        Err(reason) => end_process(Some(settings), &reason),
    };
    drop(spare);
    // Threads that are made by this one inherit it: those that need not go first are there by now.
    let mut priority = ThreadPriority::begin();
    THREAD.store(rampool_kernel::thread::current(), Ordering::Release);
    // A child's program goes on when the child holds its memory itself: otherwise its parent's death would
    // turn every absent page into zeroes. And where the child was not served so far, its memory must be
    // registered again first.
    if line.is_none() {
        READY.store(true, Ordering::Release);
    }
    // From here on a fork waits until the change to paging is complete.
    let (inheritance, transition) = match line {
        None => {
            priority.set(true);
            wait_for_pressure(settings, &tools.counter, tools.stats, &mut tools.ending);
            let Some(transition) = exclusion::begin_transition(is_to_end) else { return };
            // As in a user namespace of its own, where what the run was allowed is not allowed.
            if let Some(Err(reason)) = &tools.faults {
                without_rampool(reason);
                THREAD.store(0, Ordering::Release);
                return;
            }
            (None, transition)
        }
        Some(line) => match ask_parent(&line, settings) {
            Ok(inheritance) => (Some(inheritance), Transition::inherited()),
            Err(reason) => {
                end_process(
                    Some(settings),
                    &format!("a forked child did not get its memory from its parent: {reason}"),
                );
            }
        },
    };
    // Its parent may end as soon as it goes on, and the process that started the run says goodbye for the
    // parent, unless this process has announced that it is about to take a region over. If that announcement
    // failed, the region is taken over first.
    let signed = tools.signature.is_some();
    if signed {
        READY.store(true, Ordering::Release);
    }
    let main_block = touch::main_thread_block().map(|(start, end)| scan::whole_pages(start, end));
    let table = scan::thread_table().map(|(start, end)| scan::whole_pages(start, end));
    let spare = Spare::hold(SPARE_DESCRIPTORS);
    let started = start_pager(settings, inheritance, tools, priority, main_block, table);
    let Ok((mut pager, mut budget_controller)) = started.inspect_err(|reason| without_rampool(reason)) else {
        THREAD.store(0, Ordering::Release);
        return;
    };
    READY.store(true, Ordering::Release);
    drop(spare);
    budget_controller.adopt_new_memory(&mut pager);
    transition.complete();
    pager.run(&mut budget_controller);
}

fn ask_parent(line: &OwnedFd, settings: &Settings) -> Result<Inheritance, String> {
    // Making a thread needs the program's heap, which the parent still serves.
    let thread = if faults::inherits_copying() {
        Some(CopyThread::start().map_err(|error| error.to_string())?)
    } else {
        None
    };
    // What this thread needs of the program's heap must be resident before only this thread could bring it.
    if let Some((start, end)) = scan::thread_table() {
        scan::touch(start, end);
    }
    line::ask(line, settings, thread)
}

fn wait_for_pressure(settings: &Settings, counter: &ResidentCounter, stats: PagerStats, ending: &mut Ending) {
    let budget = settings.local_bytes;
    // Room for what the program may touch while the pool is joined.
    let start_at = budget - (budget / 16).clamp(1 << 20, 64 << 20).min(budget / 4);
    while !is_to_end() {
        let used_pages = counter.read().anonymous_pages();
        stats.process(used_pages);
        let used = used_pages * OS_PAGE_BYTES as u64;
        if used >= start_at {
            return;
        }
        ending.look();
        let room = Duration::from_nanos(
            (start_at - used).saturating_mul(1_000_000_000 / (FASTEST_GROWTH >> 10)) >> 10,
        );
        sleep(room.clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
    }
}

/// Ends the process where there can be no pager, while all that it was given is still there: a child's
/// program runs already, and would read zeroes where pages are absent as soon as the context that it has
/// inherited is closed.
///
/// # Errors
/// With the reason, if the kernel gives no memory for the pager, and nothing of this process is away.
fn start_pager(
    settings: &'static Settings,
    inheritance: Option<Inheritance>,
    tools: Tools,
    priority: ThreadPriority,
    main_block: Option<(usize, usize)>,
    table: Option<(usize, usize)>,
) -> Result<(Pager<Pool>, BudgetController), String> {
    let kept_open = inheritance.as_ref().and_then(|inheritance| inheritance.faults.keep_open());
    let config = pool_config(settings, tools.key, inheritance.as_ref());
    let stays: Vec<(usize, usize)> = main_block.into_iter().chain(table).collect();
    if let Some(Ok(faults)) = &tools.faults {
        hold_growth(faults, &stays);
    }
    let mut pool = or_end(settings, Pool::connect(&config));
    let paged = PagedConfig {
        local_bytes: settings.local_bytes,
        page_bytes: settings.page_bytes,
        prefetch_bytes: settings.prefetch_bytes,
        waiting: Waiting {
            spin: Duration::from_micros(settings.spin_us),
            follow_faults: settings.follow_faults,
        },
        ..PagedConfig::default()
    };
    let cache = or_end(settings, paged.cache_config());
    let mut signature = tools.signature;
    let (faults, region, memory): (_, PoolRegion, _) = match inheritance {
        Some(Inheritance { faults, memory, region, taking }) => {
            let own = or_end(settings, pool.adopt_region(&region));
            // What was not taken over anywhere, the parent frees.
            if let Some(taking) = taking {
                taking.done();
            }
            (faults, own, Some(memory))
        }
        None => {
            let faults = or_end(settings, tools.faults.expect("opened at start"));
            (faults, or_end(settings, pool.create_region()), None)
        }
    };
    if let Some(signature) = &mut signature {
        // A run that does not know this member keeps its pages for the grace time, no more.
        let _ = signature.joined(&pool.membership());
    }
    let pager = Pager::new(faults, tools.pagemap, pool, region, cache, paged.waiting, tools.stats);
    let mut pager = match pager {
        Err(error @ PagerError::Memory(_)) if memory.is_none() => return Err(error.to_string()),
        pager => or_end(settings, pager),
    };
    if settings.verify {
        pager.verify();
    }
    // Not there with other numbers of CPUs, or for another user.
    let awake = AwakePage::open(&Settings::awake_path(&settings.run_dir));
    pager.keep_awake(awake.ok().and_then(Awake::new));
    drop(kept_open);
    for (start, end) in stays {
        pager.leave_out(start, end);
    }
    if let Some(memory) = memory {
        // A child inherits the table as managed; it is resident, and stays so.
        pager.take_over(&memory, table);
    }
    let fallback = tools.fallback.or_else(|| FallbackLine::connect(&settings.run_dir));
    let controller =
        BudgetController::new(settings, tools.counter, tools.ending, signature, fallback, priority);
    Ok((pager, controller))
}

/// How this process joins the pool.
fn pool_config(settings: &Settings, key: Option<Key>, inheritance: Option<&Inheritance>) -> PoolConfig {
    // A server may have been leased anew since this program, or the one that it was forked from, began.
    let ticket = match settings.ticket.copies() {
        2.. => Settings::read(&settings.run_dir).map_or_else(|_| settings.ticket.clone(), |now| now.ticket),
        _ => settings.ticket.clone(),
    };
    let mut config = PoolConfig::attach(ticket, report::program_name());
    config.op_deadline = Duration::from_millis(settings.op_deadline_ms);
    config.compression = settings.compression;
    config.key = key;
    config.encryption = settings.encryption;
    // Not left to the environment: some programs move it into memory of their own, which a forked child has
    // only with this pool.
    config.same_host = Some(settings.same_host);
    if let Some(inheritance) = inheritance {
        config.to_adopt(&inheritance.region);
    }
    config.without_silent(&Settings::read_silent(&settings.run_dir));
    config
}

/// Joining takes as long as the servers and other programs let it: meanwhile the program does not grow into
/// the memory that it has mapped. Nothing is away yet, and to join needs no memory of the program's that is
/// absent: tickets have no names to be resolved.
fn hold_growth(faults: &FaultCatcher, stays: &[(usize, usize)]) {
    faults::note_faults(faults);
    let mut found = Vec::new();
    // What cannot be read now is not held; taking it over says so.
    let _ = scan::candidates_with_gaps(|start, end| found.push((start, end)));
    hold_absent(faults, &found, stays);
}

fn or_end<T, E: std::fmt::Display>(settings: &Settings, result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| end_process(Some(settings), &error.to_string()))
}

fn name_thread() {
    // SAFETY: a constant, terminated name.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"rampool".as_ptr()) };
}

/// Ends early when this thread is to end.
fn sleep(time: Duration) {
    let time = libc::timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(0),
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    // SAFETY: waits on a static word for a valid time; being woken early is no harm.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            IS_TO_END.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            0,
            &raw const time,
        )
    };
}
