//! What this machine allows.

use crate::selfmem::{SelfMemory, SelfMemoryError};
use crate::uffd::{Features, OpenError, Scope, Uffd};

/// How faults of absent pages are caught, best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FaultMode {
    /// userfaultfd for user code and for system calls.
    Full,
    /// userfaultfd for user code; a system call on an absent page fails with EFAULT unless the agent makes it
    /// resident first.
    UserMode,
    /// SIGSEGV and mprotect; system calls as above.
    Segv,
}

impl FaultMode {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "uffd",
            Self::UserMode => "uffd-user",
            Self::Segv => "segv",
        }
    }

    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Full, Self::UserMode, Self::Segv].into_iter().find(|fault_mode| fault_mode.name() == name)
    }
}

/// Everything `doctor` reports about the kernel.
#[derive(Debug)]
pub struct Capabilities {
    pub kernel: String,
    pub page_bytes: usize,
    pub full: Result<Features, OpenError>,
    pub user_mode: Result<Features, OpenError>,
    /// EVENT_FORK may be asked for (CAP_SYS_PTRACE).
    pub fork_events: bool,
    /// Why the last fault mode would not work either.
    pub segv: Result<(), SelfMemoryError>,
    /// How many mappings a process may have (vm.max_map_count).
    pub most_mappings: u64,
    pub memlock_bytes: u64,
    pub transparent_hugepages: String,
}

impl Capabilities {
    #[must_use]
    pub fn probe() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        // SAFETY: sysconf has no preconditions.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: getrlimit fills the structure it is given.
        unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
        Self {
            kernel: read("/proc/sys/kernel/osrelease"),
            page_bytes: usize::try_from(page_bytes).unwrap_or(0),
            full: Uffd::probe(Scope::Everything),
            user_mode: Uffd::probe(Scope::UserMode),
            fork_events: Uffd::open(Scope::Everything, Features::EVENT_FORK).is_ok(),
            segv: SelfMemory::open(true).map(|_| ()),
            most_mappings: read("/proc/sys/vm/max_map_count").parse().unwrap_or(65530),
            memlock_bytes: limit.rlim_cur,
            transparent_hugepages: read("/sys/kernel/mm/transparent_hugepage/enabled"),
        }
    }

    /// The best fault mode that this machine allows.
    #[must_use]
    pub fn best_fault_mode(&self) -> FaultMode {
        let usable = |found: &Result<Features, OpenError>| found.as_ref().is_ok_and(|f| f.has(NEEDED));
        if usable(&self.full) {
            FaultMode::Full
        } else if usable(&self.user_mode) {
            FaultMode::UserMode
        } else {
            FaultMode::Segv
        }
    }
}

/// Without these a kernel's userfaultfd cannot carry the paged view.
pub const NEEDED: Features = Features::WP.with(Features::EVENTS_MAPPING);
