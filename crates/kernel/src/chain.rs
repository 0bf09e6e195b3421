//! A signal handler of ours before the program's own: what is not ours does what it would have done without
//! us.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use crate::last_errno;

// SAFETY: the GNU C library's own name of `sigaction`, of the same type. `sigaction` itself may be replaced
// by a function that asks this module.
unsafe extern "C" {
    fn __sigaction(signal: i32, new: *const libc::sigaction, old: *mut libc::sigaction) -> i32;
}

/// `sigaction` of the program, for a signal whose handler is ours: foreign signals go to `new` from now on
/// (null: nothing changes), and `old` (null: not asked for) is what the program set before. False, and
/// nothing is done, if the handler is not ours.
///
/// # Safety
/// As `sigaction`.
pub unsafe fn take_note(signal: i32, new: *const libc::sigaction, old: *mut libc::sigaction) -> bool {
    let chain = match signal {
        libc::SIGSEGV => &crate::segv::CHAIN,
        libc::SIGBUS => &crate::sigbus::CHAIN,
        _ => return false,
    };
    // Either may lie where a page has to be waited for.
    // SAFETY: the caller's promise.
    let new = unsafe { new.as_ref() }.copied();
    let was = {
        let mut previous = chain.previous.lock().expect("no panic under this lock");
        let Some(was) = *previous else { return false };
        if let Some(new) = &new {
            *previous = Some(*new);
            chain.store(new);
        }
        was
    };
    if !old.is_null() {
        // SAFETY: the caller's promise.
        unsafe { old.write(was) };
    }
    true
}

/// A handler as the kernel calls it.
pub(crate) type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// One signal, and its handler before ours.
pub(crate) struct Chain {
    signal: i32,
    /// The program's own action: replaced by interposers on `sigaction`.
    previous: Mutex<Option<libc::sigaction>>,
    /// The same, for the handler to read.
    function: AtomicUsize,
    flags: AtomicI32,
}

impl Chain {
    pub(crate) const fn new(signal: i32) -> Self {
        Self {
            signal,
            previous: Mutex::new(None),
            function: AtomicUsize::new(libc::SIG_DFL),
            flags: AtomicI32::new(0),
        }
    }

    /// Installs `ours` in front of the signal's present handler; does nothing if it is installed already.
    /// `mask`: signals that are blocked while it runs.
    pub(crate) fn install(&self, ours: Handler, flags: i32, mask: &libc::sigset_t) -> Result<(), i32> {
        let mut previous = self.previous.lock().expect("no panic under this lock");
        // SAFETY: plain data, and calls that fill or read it.
        unsafe {
            let mut current: libc::sigaction = std::mem::zeroed();
            if __sigaction(self.signal, std::ptr::null(), &raw mut current) != 0 {
                return Err(last_errno());
            }
            if current.sa_sigaction == ours as usize {
                return Ok(());
            }
            self.store(&current);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ours as usize;
            action.sa_flags = libc::SA_SIGINFO | flags;
            action.sa_mask = *mask;
            if __sigaction(self.signal, &raw const action, std::ptr::null_mut()) != 0 {
                return Err(last_errno());
            }
            *previous = Some(current);
        }
        Ok(())
    }

    fn store(&self, action: &libc::sigaction) {
        self.flags.store(action.sa_flags, Ordering::Release);
        self.function.store(action.sa_sigaction, Ordering::Release);
    }

    /// Not ours: what would have happened without us. Async-signal-safe.
    ///
    /// # Safety
    /// The arguments are those that the kernel handed to our handler of this signal.
    pub(crate) unsafe fn foreign(&self, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let signal = self.signal;
        let function = self.function.load(Ordering::Acquire);
        match function {
            libc::SIG_DFL | libc::SIG_IGN => {
                // The access is repeated and ends the process, with the right signal and core file. A signal
                // that was sent by a process is sent again. SAFETY: async-signal-safe calls.
                unsafe {
                    if function == libc::SIG_IGN && (*info).si_code <= 0 {
                        return;
                    }
                    let mut action: libc::sigaction = std::mem::zeroed();
                    action.sa_sigaction = libc::SIG_DFL;
                    __sigaction(signal, &raw const action, std::ptr::null_mut());
                    if (*info).si_code <= 0 {
                        libc::raise(signal);
                    }
                }
            }
            function if self.flags.load(Ordering::Acquire) & libc::SA_SIGINFO != 0 => {
                // SAFETY: the program registered this function with this signature.
                let call: Handler =
                    unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(function)) };
                call(signal, info, context);
            }
            function => {
                // SAFETY: the program registered this function with this signature.
                let call: extern "C" fn(i32) =
                    unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(function)) };
                call(signal);
            }
        }
    }
}

/// Whether the faulting access was a write. Where we cannot tell, it counts as one: the page is written back
/// once too often at worst.
///
/// # Safety
/// `context` is what the kernel handed to a handler with SA_SIGINFO.
pub(crate) unsafe fn is_write(context: *mut libc::c_void) -> bool {
    // SAFETY: the caller's promise.
    unsafe { error_code(context) }.is_none_or(|code| code & 2 != 0)
}

/// Whether the faulting access was of the instruction itself. Where we cannot tell, it counts as one.
///
/// # Safety
/// As for [`is_write`].
pub(crate) unsafe fn is_fetch(context: *mut libc::c_void) -> bool {
    // SAFETY: the caller's promise.
    unsafe { error_code(context) }.is_none_or(|code| code & 16 != 0)
}

/// What the processor says of a page fault.
///
/// # Safety
/// As for [`is_write`].
#[cfg(target_arch = "x86_64")]
unsafe fn error_code(context: *mut libc::c_void) -> Option<i64> {
    // SAFETY: the kernel hands a SA_SIGINFO handler a ucontext.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    Some(context.uc_mcontext.gregs[usize::try_from(libc::REG_ERR).expect("an index")])
}
#[cfg(not(target_arch = "x86_64"))]
unsafe fn error_code(_context: *mut libc::c_void) -> Option<i64> {
    None
}
