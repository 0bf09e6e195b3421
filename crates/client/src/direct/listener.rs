//! Messages by callback: a thread that takes them.

use super::{Direct, Message, QueueBounds, QueueError};
use crate::error::ConnectError;
use crate::pool::PoolConfig;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How soon a listener hears that it is to end.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What a callback made of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is done with.
    Done,
    /// The next receiver gets it, which may be this one.
    GiveBack,
}

/// A thread that calls back for each message of a queue, one after the other. It is a member of the lease of
/// its own. Dropping it ends it after the message at hand; [`QueueListener::close`] tells how it went as
/// well.
pub struct QueueListener {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), QueueError>>>,
}

impl QueueListener {
    /// Joins the lease (`config` is made with [`PoolConfig::attach`]), opens the queue, makes it with these
    /// bounds if there is none, and starts the thread. The callback runs there, and has its connection to the
    /// pool for bodies, answers and other operations. One that panics ends the listener, and the next
    /// receiver gets the message. Blocks until the queue is open.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn start(
        config: &PoolConfig,
        name: &str,
        bounds: QueueBounds,
        mut callback: impl FnMut(&mut Direct, &mut Message) -> Verdict + Send + 'static,
    ) -> Result<Self, ListenError> {
        let mut direct = Direct::connect(config)?;
        let queue = direct.open_or_create_queue(name, bounds)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || {
            while !stopped.load(Ordering::Acquire) {
                let Some(mut message) = direct.take(&queue, LOOK_EVERY)? else { continue };
                // The listener is not used any more after a panic, but for leaving.
                match catch_unwind(AssertUnwindSafe(|| callback(&mut direct, &mut message))) {
                    Ok(Verdict::Done) => direct.done(message),
                    Ok(Verdict::GiveBack) => direct.give_back(message)?,
                    Err(panic) => {
                        direct.pool().close();
                        resume_unwind(panic);
                    }
                }
            }
            direct.flush_done(&queue)?;
            direct.pool().close();
            Ok(())
        };
        let thread = std::thread::Builder::new()
            .name("rampool-queue".to_owned())
            .spawn(work)
            .map_err(ListenError::Thread)?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends it after the message at hand, and waits for that.
    ///
    /// # Errors
    /// What ended the thread before: the queue was given up, or its server is lost.
    ///
    /// # Panics
    /// If the callback has.
    pub fn close(mut self) -> Result<(), QueueError> {
        self.stop.store(true, Ordering::Release);
        let thread = self.thread.take().expect("it is joined once");
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// It has ended by itself: [`QueueListener::close`] says why.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for QueueListener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The caller that drops it ignores the result.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for QueueListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("QueueListener")
    }
}

/// Why a listener did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error("cannot start a thread for the listener: {0}")]
    Thread(std::io::Error),
}
