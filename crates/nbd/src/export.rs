//! What a server offers: names and sizes.

/// Exports of one server.
pub const MOST_EXPORTS: usize = 256;
/// Bytes of an export's name.
pub const MOST_NAME_BYTES: usize = 255;
/// Clients count bytes in signed numbers.
const MOST_BYTES: u64 = i64::MAX as u64;

/// One block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    pub name: String,
    pub bytes: u64,
}

/// The exports of a server. Invariant: at most [`MOST_EXPORTS`], each with a name of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exports(Vec<Export>);

/// Why a list of exports cannot be offered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    #[error("a server can have {MOST_EXPORTS} exports, these are {0}")]
    TooMany(usize),
    #[error("an export's name has 1 to {MOST_NAME_BYTES} bytes and no control characters; this is {0:?}")]
    Name(String),
    #[error("two exports are named {0:?}; give each a name of its own")]
    Twice(String),
    #[error("export {name:?} has {bytes} bytes; a block device has from 1 byte to 8 EiB")]
    Size { name: String, bytes: u64 },
}

impl Exports {
    /// # Errors
    /// [`ExportError`].
    pub fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
        if exports.len() > MOST_EXPORTS {
            return Err(ExportError::TooMany(exports.len()));
        }
        for (index, export) in exports.iter().enumerate() {
            let name = &export.name;
            if name.is_empty() || name.len() > MOST_NAME_BYTES || name.chars().any(char::is_control) {
                return Err(ExportError::Name(name.clone()));
            }
            if exports[..index].iter().any(|other| other.name == *name) {
                return Err(ExportError::Twice(name.clone()));
            }
            if export.bytes == 0 || export.bytes > MOST_BYTES {
                return Err(ExportError::Size { name: name.clone(), bytes: export.bytes });
            }
        }
        Ok(Self(exports))
    }

    #[must_use]
    pub fn list(&self) -> &[Export] {
        &self.0
    }

    /// The export that a client names. The empty name means the only export there is.
    pub(crate) fn find(&self, name: &[u8]) -> Option<usize> {
        if name.is_empty() && self.0.len() == 1 {
            return Some(0);
        }
        self.0.iter().position(|export| export.name.as_bytes() == name)
    }
}
