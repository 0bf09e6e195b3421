//! Why a request is refused.

use crate::bytes::NoRoom;
use crate::{MOST_LINKS, MOST_NAME_BYTES};

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    #[error("there is no such file")]
    NotFound,
    #[error("the name is taken")]
    Exists,
    #[error("it is no directory")]
    NotDirectory,
    #[error("it is a directory")]
    IsDirectory,
    #[error("the directory is not empty")]
    NotEmpty,
    #[error("no page is free")]
    NoSpace,
    #[error("a file has less than 8 EiB")]
    TooLong,
    #[error("a name has at most {MOST_NAME_BYTES} bytes")]
    LongName,
    #[error("a file has at most {MOST_LINKS} names")]
    ManyLinks,
    #[error("it makes no sense for this file")]
    Invalid,
}

impl From<NoRoom> for Refusal {
    fn from(no: NoRoom) -> Self {
        match no {
            NoRoom::Space => Self::NoSpace,
            NoRoom::Length => Self::TooLong,
        }
    }
}
