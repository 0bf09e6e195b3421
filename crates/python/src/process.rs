//! What holds for every call: not in a forked child, and signals are looked for while it waits.

use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors::own;

/// Ctrl-C is noticed this soon.
pub const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// What a process opened, which its forked children have not: the connections are shared with the parent, and
/// the threads are gone.
pub struct Own<T> {
    value: Option<Mutex<T>>,
    process: u32,
}

impl<T> Own<T> {
    pub fn new(value: T) -> Self {
        Self { value: Some(Mutex::new(value)), process: std::process::id() }
    }

    /// # Errors
    /// `ForkError` in a forked child.
    pub fn check(&self) -> PyResult<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        let text = "this process is a forked child, and the pool belongs to its parent: call rampool.connect \
            here, or use the start method \"spawn\" or \"forkserver\"";
        Err(own("ForkError", text.to_owned()))
    }

    /// Blocks while another thread of this process uses it: call it without the interpreter.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let value = self.value.as_ref().expect("there until it is dropped");
        value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            std::mem::forget(self.value.take());
        }
    }
}

/// What a program drops without closing it leaves its lease too, so that the servers need not
/// wait until they give its members up. Takes `close`, which may wait for a server; the
/// interpreter is left to others meanwhile.
pub fn close_at_drop(close: impl FnOnce(Python<'_>)) {
    // Where the interpreter is about to end, `rampool` has closed its pools, which close all.
    Python::try_attach(close);
}

/// Calls `step` without the interpreter, with a moment to return by, until it gives something. Between the
/// calls signals are looked for.
///
/// # Errors
/// What a signal handler raises, such as `KeyboardInterrupt`.
pub fn wait<T: Send>(py: Python<'_>, mut step: impl FnMut(Instant) -> Option<T> + Send) -> PyResult<T> {
    loop {
        if let Some(value) = py.detach(|| step(Instant::now() + SIGNALS_EVERY)) {
            return Ok(value);
        }
        py.check_signals()?;
    }
}

/// Calls `f` without the interpreter. In the main thread, where signals are handled, it runs on another
/// thread, and signals are looked for meanwhile; a call that they interrupt goes on there, and what comes of
/// it is dropped.
///
/// # Errors
/// As [`wait`].
pub fn aside<T: Send + 'static>(py: Python<'_>, f: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    aside_or(py, f, drop)
}

/// As [`aside`]; `undo` gets what comes of an interrupted call.
///
/// # Errors
/// As [`wait`].
pub fn aside_or<T: Send + 'static>(
    py: Python<'_>,
    f: impl FnOnce() -> T + Send + 'static,
    undo: impl FnOnce(T) + Send + 'static,
) -> PyResult<T> {
    // SAFETY: neither has preconditions.
    if unsafe { libc::gettid() != libc::getpid() } {
        return Ok(py.detach(f));
    }
    // Of no length: what is not taken comes back to the sender.
    let (give, take) = mpsc::sync_channel(0);
    let thread = std::thread::Builder::new().name("rampool-call".to_owned());
    thread.spawn(move || {
        if let Err(mpsc::SendError(value)) = give.send(f()) {
            undo(value);
        }
    })?;
    let ended =
        wait(py, move |soon| match take.recv_timeout(soon.saturating_duration_since(Instant::now())) {
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            ended => Some(ended),
        })?;
    ended.map_err(|_| PyRuntimeError::new_err("the thread of this call ended by a panic"))
}
