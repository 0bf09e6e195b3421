//! Bytes at the servers: get, put, accumulate, reduce, select.

use std::os::fd::RawFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rampool::direct::{self, DirectError, DirectRegion, Filter, Key, Number, Total};
use rampool::proto::elements::{Combine, Kind, of_kind};
use rampool::proto::layout::LayoutError;
use rampool::region::HandedOver;

use crate::bytes::Bytes;
use crate::errors::{own, raise};
use crate::process::{Own, aside, close_at_drop, wait};

/// Which bytes, in which order.
#[pyclass(frozen, module = "rampool._native")]
pub struct Layout {
    layout: rampool::proto::layout::Layout,
}

fn bad(error: LayoutError) -> PyErr {
    raise(DirectError::from(error))
}

#[pymethods]
impl Layout {
    /// `inner` bytes, repeated by each of `dims` (count, distance in bytes), the last of which varies
    /// fastest.
    #[staticmethod]
    fn strided(inner: u64, dims: Vec<(u64, i64)>) -> PyResult<Self> {
        let mut layout = rampool::proto::layout::Layout::bytes(inner).map_err(bad)?;
        for (count, stride) in dims.into_iter().rev() {
            layout = layout.hvector(count, 1, stride).map_err(bad)?;
        }
        Ok(Self { layout })
    }

    /// This layout at each of these distances in bytes, which are native 64-bit integers.
    fn at_each(&self, offsets: PyBuffer<i64>, py: Python<'_>) -> PyResult<Self> {
        let blocks: Vec<(u64, i64)> = offsets.to_vec(py)?.into_iter().map(|offset| (1, offset)).collect();
        Ok(Self { layout: py.detach(|| self.layout.hindexed(&blocks)).map_err(bad)? })
    }

    /// Bytes that it selects.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.size()
    }
}

/// A region of the lease, open.
#[pyclass(frozen, module = "rampool._native", name = "DirectRegion")]
pub struct Region {
    region: DirectRegion,
}

#[pymethods]
impl Region {
    #[getter]
    fn nbytes(&self) -> u64 {
        self.region.bytes()
    }
}

/// One way to the bytes of a lease's regions. Its operations take effect in the order of the calls.
#[pyclass(frozen, module = "rampool._native")]
pub struct Direct {
    direct: Own<direct::Direct>,
    closed: Mutex<bool>,
}

impl Direct {
    pub fn new(direct: direct::Direct) -> Self {
        Self { direct: Own::new(direct), closed: Mutex::new(false) }
    }

    fn check(&self) -> PyResult<()> {
        self.direct.check()?;
        if *self.closed.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(own("Closed", "the pool is closed: call rampool.connect again".to_owned()));
        }
        Ok(())
    }

    /// Calls `f` without the interpreter.
    pub fn call<T: Send, E: Send + crate::errors::Raise>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut direct::Direct) -> Result<T, E> + Send,
    ) -> PyResult<T> {
        self.check()?;
        py.detach(|| f(&mut self.direct.lock())).map_err(raise)
    }

    /// As [`Direct::call`], of what may take longer than a moment and has no started form.
    fn aside<T: Send + 'static, E: Send + crate::errors::Raise + 'static>(
        slf: &Bound<'_, Self>,
        f: impl FnOnce(&mut direct::Direct) -> Result<T, E> + Send + 'static,
    ) -> PyResult<T> {
        slf.get().check()?;
        let this = slf.clone().unbind();
        aside(slf.py(), move || f(&mut this.get().direct.lock()))?.map_err(raise)
    }

    /// Waits for an update; gives the bits from before.
    fn updated<T: Number>(&self, py: Python<'_>, pending: direct::PendingValue) -> PyResult<u64> {
        wait(py, |until| self.direct.lock().value_until(&pending, until).then_some(()))?;
        py.detach(|| self.direct.lock().wait_value::<T>(pending).map(T::bits)).map_err(raise)
    }

    /// Starts an operation and waits for it. One that is interrupted goes on; what it holds is released when
    /// it ends.
    fn wait(
        &self,
        py: Python<'_>,
        start: impl FnOnce(&mut direct::Direct) -> Result<direct::Pending, DirectError> + Send,
    ) -> PyResult<Vec<u8>> {
        self.check()?;
        let (mut start, mut pending) = (Some(start), None);
        let ended = wait(py, |until| {
            let mut direct = self.direct.lock();
            if let Some(start) = start.take() {
                match start(&mut direct) {
                    Ok(started) => pending = Some(started),
                    Err(error) => return Some(Err(error)),
                }
            }
            let ended = pending.take_if(|pending| direct.wait_until(pending, until))?;
            Some(direct.wait(ended))
        })?;
        ended.map_err(raise)
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        close_at_drop(|py| self.close(py));
    }
}

#[pymethods]
impl Direct {
    /// Opens a region: by name, made where there is none and `nbytes` is given; or a new one without a name.
    #[pyo3(signature = (name, nbytes))]
    fn open(slf: Bound<'_, Self>, name: Option<String>, nbytes: Option<u64>) -> PyResult<Region> {
        let region = Self::aside(&slf, move |direct| match (name, nbytes) {
            (Some(name), Some(bytes)) => direct.open_or_create(&name, bytes),
            (Some(name), None) => direct.open(&name),
            (None, bytes) => direct.create(bytes.unwrap_or(0)),
        })?;
        Ok(Region { region })
    }

    /// Opens a copy that [`Region::hand_over`] made; gives it, and where its bytes begin and how many there
    /// are.
    fn open_handed(slf: Bound<'_, Self>, text: &str) -> PyResult<(Region, u64, u64)> {
        let handed: HandedOver = text.parse().map_err(|error| PyValueError::new_err(format!("{error}")))?;
        let (offset, bytes) = (handed.offset(), handed.bytes());
        let region = Self::aside(&slf, move |direct| direct.open_ticket(handed.region()))?;
        Ok((Region { region }, offset, bytes))
    }

    fn open_ticket(slf: Bound<'_, Self>, text: &str) -> PyResult<Region> {
        let ticket = text
            .parse()
            .map_err(|error: rampool::pool::TicketError| PyValueError::new_err(error.to_string()))?;
        Ok(Region { region: Self::aside(&slf, move |direct| direct.open_ticket(&ticket))? })
    }

    fn ticket(&self, py: Python<'_>, region: &Region) -> PyResult<String> {
        self.call(py, |direct| direct.ticket(region.region)).map(|ticket| ticket.to_string())
    }

    /// Frees a region, for every member.
    fn free(slf: Bound<'_, Self>, region: &Region) -> PyResult<()> {
        let region = region.region;
        Self::aside(&slf, move |direct| {
            direct.free(region);
            Ok::<(), DirectError>(())
        })
    }

    /// Begins to read what the layout selects from `offset` on.
    fn start_get(slf: Bound<'_, Self>, region: &Region, offset: u64, layout: &Layout) -> PyResult<Pending> {
        let pending =
            slf.get().call(slf.py(), |direct| direct.start_get(region.region, offset, &layout.layout))?;
        Ok(Pending::new(slf.unbind(), pending))
    }

    /// Begins to write bytes to what the layout selects.
    fn start_put(
        slf: Bound<'_, Self>,
        region: &Region,
        offset: u64,
        layout: &Layout,
        bytes: PyBuffer<u8>,
    ) -> PyResult<Pending> {
        let bytes = bytes.to_vec(slf.py())?;
        let pending = slf
            .get()
            .call(slf.py(), |direct| direct.start_put(region.region, offset, &layout.layout, bytes))?;
        Ok(Pending::new(slf.unbind(), pending))
    }

    fn get(&self, py: Python<'_>, region: &Region, offset: u64, layout: &Layout) -> PyResult<Bytes> {
        self.wait(py, |direct| direct.start_get(region.region, offset, &layout.layout)).map(Bytes::new)
    }

    /// Consecutive bytes, of which there are few.
    fn get_bytes<'py>(
        &self,
        py: Python<'py>,
        region: &Region,
        offset: u64,
        nbytes: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.wait(py, |direct| direct.start_get_bytes(region.region, offset, nbytes))?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn put(
        &self,
        py: Python<'_>,
        region: &Region,
        offset: u64,
        layout: &Layout,
        bytes: PyBuffer<u8>,
    ) -> PyResult<()> {
        let bytes = bytes.to_vec(py)?;
        self.wait(py, |direct| direct.start_put(region.region, offset, &layout.layout, bytes)).map(drop)
    }

    /// Updates the elements that the layout selects, each by its operand.
    fn accumulate(
        &self,
        py: Python<'_>,
        region: &Region,
        offset: u64,
        layout: &Layout,
        kind: &str,
        how: &str,
        operands: PyBuffer<u8>,
    ) -> PyResult<()> {
        let (kind, how, operands) = (parse_kind(kind)?, parse_combine(how)?, operands.to_vec(py)?);
        self.wait(py, |direct| {
            direct.start_accumulate(region.region, offset, &layout.layout, kind, how, operands)
        })
        .map(drop)
    }

    /// Updates one element by an operand, given as bits; gives the bits that it had before.
    fn fetch_op(
        &self,
        py: Python<'_>,
        region: &Region,
        offset: u64,
        kind: &str,
        how: &str,
        operand: u64,
    ) -> PyResult<u64> {
        let (kind, how) = (parse_kind(kind)?, parse_combine(how)?);
        of_kind!(kind, T, {
            let pending = self.call(py, |direct| {
                direct.start_fetch_op::<T>(region.region, offset, how, <T as Number>::from_bits(operand))
            })?;
            self.updated::<T>(py, pending)
        })
    }

    /// Writes `new` if the element is `expected`; gives what it was before. All are bits.
    fn compare_exchange(
        &self,
        py: Python<'_>,
        region: &Region,
        offset: u64,
        kind: &str,
        expected: u64,
        new: u64,
    ) -> PyResult<u64> {
        let kind = parse_kind(kind)?;
        of_kind!(kind, T, {
            let (expected, new) = (<T as Number>::from_bits(expected), <T as Number>::from_bits(new));
            let pending =
                self.call(py, |direct| direct.start_compare_exchange(region.region, offset, expected, new))?;
            self.updated::<T>(py, pending)
        })
    }

    /// How many elements match, and their sum.
    fn sum<'py>(
        slf: Bound<'py, Self>,
        region: &Region,
        offset: u64,
        layout: &Layout,
        kind: &str,
        test: Test,
    ) -> PyResult<(u64, Bound<'py, PyAny>)> {
        let (kind, py) = (parse_kind(kind)?, slf.py());
        let (count, total) = of_kind!(kind, T, {
            let (region, layout) = (region.region, layout.layout.clone());
            Self::aside(&slf, move |direct| {
                Ok::<_, Failed>(direct.sum::<T>(region, offset, &layout, filter(&test)?)?)
            })
        })?;
        Ok((count, sum_of(py, total)?))
    }

    fn count(
        slf: Bound<'_, Self>,
        region: &Region,
        offset: u64,
        layout: &Layout,
        kind: &str,
        test: Test,
    ) -> PyResult<u64> {
        of_kind!(parse_kind(kind)?, T, {
            let (region, layout) = (region.region, layout.layout.clone());
            Self::aside(&slf, move |direct| {
                Ok::<_, Failed>(direct.count::<T>(region, offset, &layout, filter(&test)?)?)
            })
        })
    }

    /// The bits of the least (or greatest) element that matches.
    fn extreme(
        slf: Bound<'_, Self>,
        region: &Region,
        offset: u64,
        layout: &Layout,
        kind: &str,
        test: Test,
        greatest: bool,
    ) -> PyResult<Option<u64>> {
        of_kind!(parse_kind(kind)?, T, {
            let (region, layout) = (region.region, layout.layout.clone());
            Self::aside(&slf, move |direct| {
                let filter = filter::<T>(&test)?;
                let found = if greatest {
                    direct.max(region, offset, &layout, filter)
                } else {
                    direct.min(region, offset, &layout, filter)
                };
                Ok::<_, Failed>(found?.map(T::bits))
            })
        })
    }

    /// For each key among `keys` (a region, where it lies there, its kind), of elements that match: the key,
    /// how many there are, their sum, and the bits of the least and the greatest.
    fn group<'py>(
        slf: Bound<'py, Self>,
        keys: (Bound<'py, Region>, u64, Bound<'py, Layout>, String),
        column: (Bound<'py, Region>, u64, Bound<'py, Layout>, String),
        test: Test,
    ) -> PyResult<Vec<Grouped<'py>>> {
        let py = slf.py();
        let place = |column: &(Bound<'py, Region>, u64, Bound<'py, Layout>, String)| {
            (column.0.get().region, column.1, column.2.get().layout.clone())
        };
        let (by, of) = (place(&keys), place(&column));
        let found = of_kind!(parse_kind(&column.3)?, T, {
            match parse_kind(&keys.3)? {
                Kind::I32 => Self::grouped::<i32, T>(&slf, by, of, test),
                Kind::U32 => Self::grouped::<u32, T>(&slf, by, of, test),
                Kind::I64 => Self::grouped::<i64, T>(&slf, by, of, test),
                Kind::U64 => Self::grouped::<u64, T>(&slf, by, of, test),
                Kind::F32 | Kind::F64 => Err(PyValueError::new_err("keys are integers")),
            }
        })?;
        found
            .into_iter()
            .map(|(key, count, total, least, greatest)| Ok((key, count, sum_of(py, total)?, least, greatest)))
            .collect()
    }

    /// The positions of the elements that match, as native 64-bit integers.
    fn select(
        slf: Bound<'_, Self>,
        region: &Region,
        offset: u64,
        layout: &Layout,
        kind: &str,
        test: Test,
    ) -> PyResult<Bytes> {
        let found = of_kind!(parse_kind(kind)?, T, {
            let (region, layout) = (region.region, layout.layout.clone());
            Self::aside(&slf, move |direct| {
                Ok::<_, Failed>(direct.select::<T>(region, offset, &layout, filter(&test)?)?)
            })
        })?;
        Ok(Bytes::new(found.into_iter().flat_map(u64::to_ne_bytes).collect()))
    }

    /// Lets everything under way go on, without blocking.
    fn progress(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |direct| {
            direct.progress();
            Ok::<(), DirectError>(())
        })
    }

    /// What to wait for before the next `progress`: descriptors with poll(2)'s events, and the seconds after
    /// which it is due in any case.
    fn watch(&self, py: Python<'_>) -> PyResult<(Vec<(RawFd, i16)>, f64)> {
        self.call(py, |direct| {
            let mut fds = Vec::new();
            let pool = direct.pool();
            pool.poll_fds(&mut fds);
            let due = pool
                .next_deadline()
                .map_or(Duration::from_secs(1), |due| due.saturating_duration_since(Instant::now()));
            Ok::<_, DirectError>((fds.into_iter().map(|fd| (fd.fd, fd.events)).collect(), due.as_secs_f64()))
        })
    }

    /// Counters of each server: name, whether it is there, bytes leased, requests, bytes sent and received.
    fn servers(&self, py: Python<'_>) -> PyResult<Vec<ServerCounters>> {
        self.call(py, |direct| {
            let stats = direct.pool().stats().servers.into_iter();
            let each =
                stats.map(|s| (s.name, s.alive, s.lease_bytes, s.requests, s.sent_bytes, s.received_bytes));
            Ok::<_, DirectError>(each.collect())
        })
    }

    /// Leaves the lease.
    fn close(&self, py: Python<'_>) {
        let was = std::mem::replace(&mut *self.closed.lock().unwrap_or_else(PoisonError::into_inner), true);
        if !was && self.direct.check().is_ok() {
            py.detach(|| {
                let mut direct = self.direct.lock();
                direct.wait_all();
                direct.close();
            });
        }
    }
}

/// Of one server, as [`Direct::servers`] gives it.
type ServerCounters = (String, bool, u64, u64, u64, u64);

/// An operation under way.
#[pyclass(frozen, module = "rampool._native")]
pub struct Pending {
    direct: Py<Direct>,
    pending: Mutex<Option<direct::Pending>>,
}

impl Pending {
    fn new(direct: Py<Direct>, pending: direct::Pending) -> Self {
        Self { direct, pending: Mutex::new(Some(pending)) }
    }
}

#[pymethods]
impl Pending {
    /// Lets everything under way go on without blocking; whether this has ended.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let direct = self.direct.get();
        direct.check()?;
        Ok(py.detach(|| {
            let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            pending.as_ref().is_none_or(|pending| direct.direct.lock().is_done(pending))
        }))
    }

    /// Waits for it, and gives its bytes, once; `None` if it has not ended within `seconds`.
    #[pyo3(signature = (seconds=None))]
    fn take(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Bytes>> {
        let direct = self.direct.get();
        direct.check()?;
        let until = seconds.map(|s| {
            Instant::now() + Duration::try_from_secs_f64(s.max(0.0)).unwrap_or(Duration::from_secs(1 << 30))
        });
        let lock = || self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = wait(py, |soon| {
            let pending = lock();
            let Some(pending) = pending.as_ref() else { return Some(true) };
            let ended = direct.direct.lock().wait_until(pending, until.map_or(soon, |until| until.min(soon)));
            (ended || until.is_some_and(|until| Instant::now() >= until)).then_some(ended)
        })?;
        if !ended {
            return Ok(None);
        }
        let pending = lock().take().ok_or_else(|| PyRuntimeError::new_err("its bytes were taken already"))?;
        py.detach(|| direct.direct.lock().wait(pending)).map(|bytes| Some(Bytes::new(bytes))).map_err(raise)
    }
}

/// A key, and what its elements come to: how many, their sum, and the bits of the least and the greatest.
type Grouped<'py> = (i128, u64, Bound<'py, PyAny>, u64, u64);
/// A region, where in it, and which bytes.
type Place = (DirectRegion, u64, rampool::proto::layout::Layout);

impl Direct {
    #[expect(clippy::type_complexity, reason = "as Grouped, before its sum is Python's")]
    fn grouped<K: Key + Into<i128>, T: Number>(
        slf: &Bound<'_, Self>,
        by: Place,
        of: Place,
        test: Test,
    ) -> PyResult<Vec<(i128, u64, Total, u64, u64)>> {
        Self::aside(slf, move |direct| {
            let found =
                direct.group::<K, T>((by.0, by.1, &by.2), (of.0, of.1, &of.2), filter(&test)?)?.into_iter();
            let each = found.map(|g| (g.key.into(), g.count, g.sum, g.min.bits(), g.max.bits()));
            Ok::<_, Failed>(each.collect())
        })
    }
}

fn sum_of(py: Python<'_>, total: Total) -> PyResult<Bound<'_, PyAny>> {
    Ok(match total {
        Total::Integer(whole) => whole.into_pyobject(py)?.into_any(),
        Total::Float(float) => float.into_pyobject(py)?.into_any(),
        _ => return Err(own("Error", "this sum is of a kind that this version does not know".to_owned())),
    })
}

/// Which elements count: the name of a test, and the bits of its operand.
type Test = (String, u64);

/// Why a scan was not made.
enum Failed {
    Test(String),
    Direct(DirectError),
}

impl From<DirectError> for Failed {
    fn from(error: DirectError) -> Self {
        Self::Direct(error)
    }
}

impl crate::errors::Raise for Failed {
    fn raise(self) -> PyErr {
        match self {
            Self::Test(name) => PyValueError::new_err(format!("there is no test {name:?}")),
            Self::Direct(error) => raise(error),
        }
    }
}

fn filter<T: Number>((name, bits): &Test) -> Result<Filter<T>, Failed> {
    let operand = T::from_bits(*bits);
    Ok(match name.as_str() {
        "all" => Filter::all(),
        "==" => Filter::equal(operand),
        "!=" => Filter::not_equal(operand),
        "<" => Filter::less(operand),
        "<=" => Filter::at_most(operand),
        ">" => Filter::greater(operand),
        ">=" => Filter::at_least(operand),
        _ => return Err(Failed::Test(name.clone())),
    })
}

fn parse_kind(name: &str) -> PyResult<Kind> {
    Ok(match name {
        "i4" => Kind::I32,
        "u4" => Kind::U32,
        "i8" => Kind::I64,
        "u8" => Kind::U64,
        "f4" => Kind::F32,
        "f8" => Kind::F64,
        _ => return Err(PyValueError::new_err(format!("servers do not compute with {name:?}"))),
    })
}

fn parse_combine(name: &str) -> PyResult<Combine> {
    Ok(match name {
        "add" => Combine::Sum,
        "minimum" => Combine::Min,
        "maximum" => Combine::Max,
        "and" => Combine::And,
        "or" => Combine::Or,
        "xor" => Combine::Xor,
        "replace" => Combine::Replace,
        _ => return Err(PyValueError::new_err(format!("servers do not compute {name:?}"))),
    })
}
