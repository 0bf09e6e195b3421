//! What catches this process's faults: opened before the program runs, remembered for the children that
//! inherit it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rampool_kernel::probe::FaultMode;
use rampool_kernel::uffd::Features;
use rampool_pager::fault::{CatchConfig, FaultCatcher, FaultModeChoice};
use rampool_run::settings::Settings;

use crate::requests;

/// The kernel tells the pager of forks.
static FOLLOWED: AtomicBool = AtomicBool::new(true);
/// The features of the context, for children that inherit it.
static FEATURES: AtomicU64 = AtomicU64::new(0);
/// Opens the fault mode of this run.
pub fn open_faults(settings: &Settings) -> Result<FaultCatcher, String> {
    let fault_mode = match settings.fault_mode {
        FaultMode::Full => FaultModeChoice::Full,
        FaultMode::UserMode => FaultModeChoice::UserMode,
        FaultMode::Segv => FaultModeChoice::Segv,
    };
    FaultCatcher::open(CatchConfig { fault_mode, evict_by_copy: settings.evict_by_copy }).map_err(|error| {
        format!("page faults cannot be caught: {error}; `rampool doctor` says what to change")
    })
}

/// Once a pager is about to start, and before it has any memory.
pub fn note_faults(faults: &FaultCatcher) {
    FOLLOWED.store(faults.follows_forks(), Ordering::Release);
    FEATURES.store(faults.features().0, Ordering::Release);
    if !faults.follows_forks() || !faults.follows_mappings() {
        requests::install_doorbell();
    }
}

/// The kernel tells the pager of forks.
pub fn follows_forks() -> bool {
    FOLLOWED.load(Ordering::Acquire)
}

/// The features of a context that this process inherited.
pub fn inherited_features() -> Features {
    Features(FEATURES.load(Ordering::Acquire))
}

/// The parent's context, which a child inherits, cannot move pages.
pub fn inherits_copying() -> bool {
    follows_forks() && !inherited_features().has(Features::MOVE)
}
