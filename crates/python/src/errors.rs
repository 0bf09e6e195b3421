//! A Rust error becomes the Python exception of the right kind: those of `rampool/_errors.py`, or a built-in
//! one for arguments that make no sense.

use pyo3::exceptions::{PyIndexError, PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use rampool::builder::{OpenError, OptionError};
use rampool::direct::DirectError;
use rampool::error::{ConnectError, ConnectReason, PoolError};
use rampool::proto::layout::LayoutError;
use rampool::region::{AllocError, HandOverError};

/// An exception of `rampool/_errors.py`.
pub fn own(name: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let class = py.import("rampool._errors").and_then(|module| module.getattr(name));
        match class.and_then(|class| class.call1((message,))) {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        }
    })
}

/// Errors of rampool's that Python shows.
pub trait Raise {
    fn raise(self) -> PyErr;
}

/// `result.map_err(raise)?`
pub fn raise(error: impl Raise) -> PyErr {
    error.raise()
}

impl Raise for OptionError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Unknown(_) => PyTypeError::new_err(text),
            _ => PyValueError::new_err(text),
        }
    }
}

impl Raise for OpenError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Connect(error) => error.raise(),
            Self::Pool(error) => error.raise(),
            Self::Key(_) => own("NotAllowed", text),
            Self::Paged(_) => own("Error", text),
            _ => PyValueError::new_err(text),
        }
    }
}

impl Raise for ConnectError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::TooLittle { .. } | Self::Server { reason: ConnectReason::Refused { .. }, .. } => {
                own("NoRoom", text)
            }
            Self::Server { reason: ConnectReason::Denied { .. }, .. } => own("NotAllowed", text),
            Self::Server { reason: ConnectReason::Deadline { .. }, .. } => own("Timeout", text),
            Self::Server { .. } => own("ServerLost", text),
            _ => PyValueError::new_err(text),
        }
    }
}

impl Raise for PoolError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Lost { .. } | Self::NotThere { .. } => own("ServerLost", text),
            Self::Denied { .. } => own("NotAllowed", text),
            Self::Refused { .. } => own("NoRoom", text),
            _ => own("NotFound", text),
        }
    }
}

impl Raise for DirectError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Layout(LayoutError::OutOfBounds { .. }) => PyIndexError::new_err(text),
            Self::NoSuchName { .. } | Self::NoSuchRegion => own("NotFound", text),
            Self::Full { .. } => own("NoRoom", text),
            Self::Damaged { .. } => own("Damaged", text),
            Self::NoMemory { .. } => PyMemoryError::new_err(text),
            Self::Pool(error) => error.raise(),
            Self::Memory(_) => own("Error", text),
            _ => PyValueError::new_err(text),
        }
    }
}

impl Raise for AllocError {
    fn raise(self) -> PyErr {
        let text = self.to_string();
        match self {
            Self::Empty => PyValueError::new_err(text),
            Self::NoRoom { .. } => own("NoRoom", text),
            Self::Lost(_) | Self::PagerEnded(_) => own("ServerLost", text),
            _ => PyMemoryError::new_err(text),
        }
    }
}

impl Raise for HandOverError {
    fn raise(self) -> PyErr {
        own("Error", self.to_string())
    }
}
