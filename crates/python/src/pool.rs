//! One lease, and its two views: paged memory for arrays, and the direct view.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use rampool::Builder;
use rampool::builder::OpenError;
use rampool::error::ConnectError;
use rampool::pool::LeaseTicket;
use rampool::proto::units::ByteLen;
use rampool::region::PagedMemory;

use crate::allocator::Allocator;
use crate::direct::Direct;
use crate::errors::{own, raise};
use crate::process::{Own, aside};
use crate::queue::Queue;
use crate::region::Region;
use crate::shared_store::SharedStore;
use crate::store::Store;

/// A lease on memory servers. The paged view begins with the first array.
#[pyclass(frozen, module = "rampool._native")]
pub struct Pool {
    builder: Builder,
    ticket: LeaseTicket,
    paged: Own<Option<PagedMemory>>,
    closed: Mutex<bool>,
}

/// A lease of less, in bytes, is refused: as the servers have no room.
const LEAST_LEASE: u64 = 1 << 20;

/// As [`Builder::set`] takes it.
type Options = Vec<(String, String)>;

fn builder(options: &Options) -> PyResult<Builder> {
    let mut builder = Builder::new();
    for (name, value) in options {
        builder.set(name, value).map_err(raise)?;
    }
    Ok(builder)
}

/// What is leased where nobody says how much, as `rampool run` does: four times what is local, at least 1
/// GiB.
fn usual_lease(options: &Options) -> ByteLen {
    let local = options.iter().rev().find(|(name, _)| name == "local");
    let local = local.and_then(|(_, text)| text.parse().ok()).unwrap_or(ByteLen(0));
    ByteLen(local.0.saturating_mul(4).max(1 << 30))
}

/// Leases what the builder says; if it does not say, what is usual, or what is free if that is less.
fn opened(builder: Builder, usual: ByteLen) -> Result<(Builder, rampool::direct::Direct), OpenError> {
    let wish = |bytes| {
        let builder = builder.clone().memory(bytes);
        builder.open_for_both().map(|direct| (builder, direct))
    };
    match builder.open_for_both() {
        Err(OpenError::NoMemory) => match wish(usual) {
            Err(OpenError::Connect(ConnectError::TooLittle { wanted, missing, .. }))
                if wanted.0 - missing.0 >= LEAST_LEASE =>
            {
                wish(ByteLen(wanted.0 - missing.0))
            }
            opened => opened,
        },
        opened => opened.map(|direct| (builder, direct)),
    }
}

/// Connections of one more member.
fn member(py: Python<'_>, builder: &Builder, ticket: &LeaseTicket) -> PyResult<rampool::direct::Direct> {
    let (builder, ticket) = (builder.clone(), ticket.clone());
    aside(py, move || builder.join_direct(&ticket))?.map_err(raise)
}

impl Pool {
    fn check_open(&self) -> PyResult<()> {
        if *self.closed.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(own("Closed", "the pool is closed: call rampool.connect again".to_owned()));
        }
        self.paged.check()
    }
}

#[pymethods]
impl Pool {
    /// Leases memory; gives the pool and its direct view.
    #[staticmethod]
    fn open(py: Python<'_>, options: Options) -> PyResult<(Self, Direct)> {
        let builder = builder(&options)?;
        let usual = usual_lease(&options);
        let opened = aside(py, move || {
            let (builder, direct) = opened(builder, usual)?;
            let ticket = direct.pool().lease_ticket();
            Ok((builder, direct, ticket))
        })?;
        let (builder, direct, ticket) = opened.map_err(|error: rampool::builder::OpenError| raise(error))?;
        Ok((Self { builder, ticket, paged: Own::new(None), closed: Mutex::new(false) }, Direct::new(direct)))
    }

    /// Joins the lease of a ticket.
    #[staticmethod]
    fn join(py: Python<'_>, ticket: &str, options: Options) -> PyResult<(Self, Direct)> {
        let builder = builder(&options)?;
        let ticket: LeaseTicket =
            ticket.parse().map_err(|error| pyo3::exceptions::PyValueError::new_err(format!("{error}")))?;
        let direct = member(py, &builder, &ticket)?;
        Ok((Self { builder, ticket, paged: Own::new(None), closed: Mutex::new(false) }, Direct::new(direct)))
    }

    /// A queue, made with these bounds if there is none, on connections of its own.
    fn queue(&self, py: Python<'_>, name: String, messages: u64, bytes: &str) -> PyResult<Queue> {
        self.check_open()?;
        let bytes: ByteLen =
            bytes.parse().map_err(|error| pyo3::exceptions::PyValueError::new_err(format!("{error}")))?;
        let direct = member(py, &self.builder, &self.ticket)?;
        aside(py, move || Queue::open(direct, &name, messages, bytes.0))?.map_err(raise)
    }

    /// A store, on connections of its own.
    fn store(&self, py: Python<'_>) -> PyResult<Store> {
        self.check_open()?;
        Ok(Store::new(rampool::values::Store::new(member(py, &self.builder, &self.ticket)?)))
    }

    /// The shared store of this name, on connections of its own.
    fn shared_store(
        &self,
        py: Python<'_>,
        name: String,
        keys: Option<u64>,
        seconds: f64,
    ) -> PyResult<SharedStore> {
        self.check_open()?;
        let direct = member(py, &self.builder, &self.ticket)?;
        aside(py, move || SharedStore::open(direct, &name, keys, seconds))?
    }

    /// A handler for NumPy's allocations of `over` bytes and more, with local memory of its own.
    fn allocator(&self, py: Python<'_>, local: &str, over: &str) -> PyResult<Allocator> {
        self.check_open()?;
        let mut builder = self.builder.clone();
        builder.set("local", local).map_err(raise)?;
        let over: ByteLen =
            over.parse().map_err(|error| pyo3::exceptions::PyValueError::new_err(format!("{error}")))?;
        let memory = py.detach(|| builder.join(&self.ticket)).map_err(raise)?;
        Allocator::new(py, memory, usize::try_from(over.0).unwrap_or(usize::MAX))
    }

    /// Paged memory of so many bytes, all zero.
    fn alloc(slf: Bound<'_, Self>, bytes: usize) -> PyResult<Region> {
        slf.get().check_open()?;
        let this = slf.clone().unbind();
        aside(slf.py(), move || {
            let this = this.get();
            let mut paged = this.paged.lock();
            if paged.is_none() {
                *paged = Some(this.builder.join(&this.ticket).map_err(raise)?);
            }
            let memory = paged.as_ref().expect("just started");
            memory.alloc(bytes).map(|region| Region::new(region, bytes)).map_err(raise)
        })?
    }

    /// What another process needs to join the lease. It carries the lease's tokens.
    #[getter]
    fn ticket(&self) -> String {
        self.ticket.to_string()
    }

    /// How faults are caught, and whether system calls may be given absent pages; none before the first
    /// array.
    fn paging(&self, py: Python<'_>) -> PyResult<Option<(&'static str, bool)>> {
        self.paged.check()?;
        Ok(py.detach(|| {
            self.paged.lock().as_ref().map(|paged| (paged.fault_mode().name(), paged.serves_system_calls()))
        }))
    }

    /// Counters of the paged view by name; none before the first array.
    fn stats(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, u64)>> {
        self.paged.check()?;
        Ok(py.detach(|| self.paged.lock().as_ref().map(|paged| paged.stats().named())).unwrap_or_default())
    }

    fn set_local(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        self.check_open()?;
        py.detach(|| self.paged.lock().as_ref().map(|paged| paged.set_local_bytes(bytes)));
        Ok(())
    }

    /// Ends the paged view once its last array is gone.
    fn close(&self, py: Python<'_>) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        if self.paged.check().is_ok() {
            py.detach(|| drop(self.paged.lock().take()));
        }
    }
}
