//! Last words, counters in a file that `rampool run`, `top` and `status` map, and the name people know the
//! program by.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, Ordering};

use rampool_client::stats::{PagerStats, StatsPage};
use rampool_kernel::words;
use rampool_run::settings::{LOST_EXIT_CODE, Settings};

/// The agent's thread: its descriptor 2 is not the program's.
static AGENT: AtomicU32 = AtomicU32::new(0);

/// Called on the agent's thread. From here on a broken invariant ends the program: without its agent it would
/// wait for ever.
pub fn this_is_the_agent(settings: &'static Settings) {
    AGENT.store(rampool_kernel::thread::current(), Ordering::Release);
    std::panic::set_hook(Box::new(move |panic| {
        if AGENT.load(Ordering::Acquire) == rampool_kernel::thread::current() {
            end_process(Some(settings), &format!("the agent broke an invariant: {panic}"));
        }
    }));
}

/// Writes the process's last line to the program's standard error; waits a moment if it is not read.
pub fn last_words(line: &str) {
    on_standard_error(|fd| words::last_words_to(fd, line));
}

/// Writes a line to the program's standard error if that is possible without waiting: the program's threads
/// wait for this one.
pub fn remark(line: &str) {
    on_standard_error(|fd| words::remark_to(fd, line));
}

fn on_standard_error(write: impl FnOnce(BorrowedFd<'_>)) {
    let of_program = if AGENT.load(Ordering::Acquire) == rampool_kernel::thread::current() {
        rampool_kernel::descriptors::take_from(std::process::id(), 2)
    } else {
        None
    };
    write(of_program.as_ref().map_or_else(|| words::standard_error(), AsFd::as_fd));
}

/// Publishes this process's counters; in private memory when the run's directory cannot be written (the run
/// is over).
pub fn publish(settings: &Settings) -> PagerStats {
    map_file(settings).unwrap_or_else(PagerStats::private)
}

fn map_file(settings: &Settings) -> Option<PagerStats> {
    let path = settings.stats_path(std::process::id());
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .ok()?;
    file.set_len(size_of::<StatsPage>() as u64).ok()?;
    // SAFETY: maps a file of the page's size, zeroed, at an address of the kernel's choice; never unmapped,
    // so 'static holds. All-zero is a valid StatsPage (atomics), and atomics are what may be shared with
    // readers in other processes.
    let page = unsafe {
        let at = libc::syscall(
            libc::SYS_mmap,
            0usize,
            size_of::<StatsPage>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            // As wide as a register: the sixth argument travels on the stack, where half a word would bring
            // garbage along.
            0usize,
        );
        let at = usize::try_from(at).ok().filter(|at| *at != 0)?;
        std::ptr::with_exposed_provenance::<StatsPage>(at).as_ref()?
    };
    Some(PagerStats::new(page))
}

/// As `ps` shows it.
pub fn program_name() -> String {
    std::fs::read_to_string("/proc/self/comm").map_or_else(|_| "?".into(), |name| name.trim().to_owned())
}

/// Ends the program: pages of it are lost, and going on would mean wrong data.
pub fn end_process(settings: Option<&Settings>, reason: &str) -> ! {
    let text = format!("rampool: process {} ({}): {reason}", std::process::id(), program_name());
    last_words(&text);
    if let Some(settings) = settings {
        let _ = std::fs::write(settings.lost_path(std::process::id()), format!("{text}\n"));
    }
    // Not exit(3): its handlers run program code, which may need the very pages that are lost.
    // SAFETY: ends every thread of this process.
    unsafe {
        libc::syscall(libc::SYS_exit_group, LOST_EXIT_CODE);
        libc::abort()
    }
}

/// Reports that this process is not managed, and why. None of its memory has left.
pub fn without_rampool(reason: &str) {
    let (process, program) = (std::process::id(), program_name());
    remark(&format!(
        "rampool: process {process} ({program}) runs without rampool, with all of its memory on this \
         machine: {reason}"
    ));
}
