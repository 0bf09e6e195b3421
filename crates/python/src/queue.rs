//! Remote queues: messages whose heads and bodies travel apart.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rampool::direct::{self, QueueBounds, QueueError, SendBody};

use crate::bytes::Bytes;
use crate::errors::{Raise, own, raise};
use crate::process::{Own, SIGNALS_EVERY, aside_or, close_at_drop, wait};

impl Raise for QueueError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Full { .. } | Self::BodyLate { .. } => own("Timeout", text),
            Self::NoSuchQueue { .. } => own("NotFound", text),
            Self::NoRoom { .. } => own("NoRoom", text),
            Self::BodyLost { .. } => own("ServerLost", text),
            Self::Refused { .. } => own("NotAllowed", text),
            Self::Direct { source, .. } => source.raise(),
            _ => PyValueError::new_err(text),
        }
    }
}

fn seconds(seconds: Option<f64>) -> Option<Instant> {
    let long = Duration::from_secs(1 << 30);
    seconds.map(|s| Instant::now() + Duration::try_from_secs_f64(s.max(0.0)).unwrap_or(long).min(long))
}

/// A queue, with connections of its own.
#[pyclass(frozen, module = "rampool._native")]
pub struct Queue {
    direct: Own<direct::Direct>,
    queue: direct::Queue,
    closed: AtomicBool,
}

impl Queue {
    pub fn open(
        mut direct: direct::Direct,
        name: &str,
        messages: u64,
        bytes: u64,
    ) -> Result<Self, QueueError> {
        let queue = direct.open_or_create_queue(name, QueueBounds { messages, bytes })?;
        Ok(Self { direct: Own::new(direct), queue, closed: AtomicBool::new(false) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        close_at_drop(|py| self.close(py));
    }
}

#[pymethods]
impl Queue {
    /// Messages and bytes that it holds at most.
    #[getter]
    fn bounds(&self) -> (u64, u64) {
        let bounds = self.queue.bounds();
        (bounds.messages, bounds.bytes)
    }

    /// Appends a message; waits for room for so many seconds.
    fn send(
        &self,
        py: Python<'_>,
        head: &[u8],
        body: Option<PyBuffer<u8>>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.direct.check()?;
        let body = body.map(|body| body.to_vec(py)).transpose()?;
        let until = seconds(timeout);
        let sent = wait(py, |soon| {
            let left = until.map_or(soon, |until| until.min(soon)).saturating_duration_since(Instant::now());
            let body = body.as_deref().map_or(SendBody::None, SendBody::Bytes);
            match self.direct.lock().send(&self.queue, head, body, left) {
                Err(QueueError::Full { .. }) if until.is_none_or(|until| Instant::now() < until) => None,
                done => Some(done),
            }
        })?;
        sent.map_err(raise)
    }

    /// Takes the next message; `None` if there is none for so many seconds.
    fn take(slf: Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Option<Message>> {
        let this = slf.get();
        this.direct.check()?;
        let until = seconds(timeout);
        // A server that does not answer keeps even a short wait longer.
        let interrupted = Arc::new(AtomicBool::new(false));
        let (queue, undo, stop) = (slf.clone().unbind(), slf.clone().unbind(), Arc::clone(&interrupted));
        let take = move || loop {
            let soon = Instant::now() + SIGNALS_EVERY;
            let left = until.map_or(soon, |until| until.min(soon)).saturating_duration_since(Instant::now());
            let this = queue.get();
            match this.direct.lock().take(&this.queue, left) {
                Ok(None)
                    if until.is_none_or(|until| Instant::now() < until) && !stop.load(Ordering::Relaxed) => {}
                done => return done,
            }
        };
        let give_back = move |taken| {
            if let Ok(Some(message)) = taken {
                // Where that fails it comes again, when this process has ended.
                drop(undo.get().direct.lock().give_back(message));
            }
        };
        let taken = aside_or(slf.py(), take, give_back)
            .inspect_err(|_| interrupted.store(true, Ordering::Relaxed))?;
        Ok(taken
            .map_err(raise)?
            .map(|message| Message { queue: slf.unbind(), message: Mutex::new(Some(message)) }))
    }

    /// Takes the next message if it is here, without blocking.
    fn poll(slf: Bound<'_, Self>) -> PyResult<Option<Message>> {
        let this = slf.get();
        this.direct.check()?;
        let polled = slf.py().detach(|| this.direct.lock().poll_message(&this.queue)).map_err(raise)?;
        Ok(polled.map(|message| Message { queue: slf.unbind(), message: Mutex::new(Some(message)) }))
    }

    /// As the direct view's.
    fn watch(&self, py: Python<'_>) -> PyResult<(Vec<(RawFd, i16)>, f64)> {
        self.direct.check()?;
        Ok(py.detach(|| {
            let mut fds = Vec::new();
            let direct = self.direct.lock();
            let pool = direct.pool();
            pool.poll_fds(&mut fds);
            let due = pool
                .next_deadline()
                .map_or(Duration::from_secs(1), |due| due.saturating_duration_since(Instant::now()));
            (fds.into_iter().map(|fd| (fd.fd, fd.events)).collect(), due.as_secs_f64())
        }))
    }

    /// Tells the server which messages are done with.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.direct.check()?;
        py.detach(|| self.direct.lock().flush_done(&self.queue)).map_err(raise)
    }

    /// Gives the queue up, for every member.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        self.direct.check()?;
        py.detach(|| self.direct.lock().free_queue(&self.queue)).map_err(raise)
    }

    fn close(&self, py: Python<'_>) {
        let was = self.closed.swap(true, Ordering::Relaxed);
        if !was && self.direct.check().is_ok() {
            py.detach(|| {
                let mut direct = self.direct.lock();
                // Where that fails the messages come again.
                let _ = direct.flush_done(&self.queue);
                direct.wait_all();
                direct.close();
            });
        }
    }
}

/// A message that was taken.
#[pyclass(frozen, module = "rampool._native")]
pub struct Message {
    queue: Py<Queue>,
    message: Mutex<Option<direct::Message>>,
}

impl Message {
    fn with<T>(&self, f: impl FnOnce(&mut direct::Message) -> T) -> PyResult<T> {
        let mut message = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(f(message.as_mut().ok_or_else(is_done)?))
    }

    fn take(&self) -> PyResult<direct::Message> {
        self.message.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(is_done)
    }
}

fn is_done() -> PyErr {
    PyRuntimeError::new_err("this message was done with, or given back")
}

#[pymethods]
impl Message {
    #[getter]
    fn head<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.with(|message| PyBytes::new(py, message.head()))
    }

    #[getter]
    fn body_bytes(&self) -> PyResult<u64> {
        self.with(|message| message.body_bytes())
    }

    #[getter]
    fn redelivered(&self) -> PyResult<bool> {
        self.with(|message| message.redelivered())
    }

    #[getter]
    fn number(&self) -> PyResult<u64> {
        self.with(|message| message.number())
    }

    /// The body; waits for it for so many seconds.
    fn body(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Bytes> {
        let queue = self.queue.get();
        queue.direct.check()?;
        let until = seconds(timeout);
        let body = wait(py, |soon| {
            let left = until.map_or(soon, |until| until.min(soon)).saturating_duration_since(Instant::now());
            match self.with(|message| queue.direct.lock().body(message, left)) {
                Ok(Err(QueueError::BodyLate { .. })) if until.is_none_or(|until| Instant::now() < until) => {
                    None
                }
                done => Some(done),
            }
        })?;
        body?.map(Bytes::new).map_err(raise)
    }

    /// Begins to bring the body here.
    fn prefetch(&self, py: Python<'_>) -> PyResult<()> {
        let queue = self.queue.get();
        queue.direct.check()?;
        py.detach(|| self.with(|message| queue.direct.lock().prefetch_body(message)))
    }

    fn done(&self, py: Python<'_>) -> PyResult<()> {
        let queue = self.queue.get();
        queue.direct.check()?;
        let message = self.take()?;
        py.detach(|| queue.direct.lock().done(message));
        Ok(())
    }

    fn give_back(&self, py: Python<'_>) -> PyResult<()> {
        let queue = self.queue.get();
        queue.direct.check()?;
        let message = self.take()?;
        py.detach(|| queue.direct.lock().give_back(message)).map_err(raise)
    }
}
