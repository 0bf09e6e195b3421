//! Why a request is refused, as its client is told.

use crate::store::Unpackable;
use rampool_lease::{OverQuota, QueueError, QueueSpaceError, SpaceError};
use rampool_wire::frame::Status;

/// A refused request: what to tell the client.
pub(super) struct Refused {
    pub(super) status: Status,
    pub(super) arg: u64,
    pub(super) message: String,
}

impl Refused {
    pub(super) fn new(status: Status, message: impl ToString) -> Self {
        Self { status, arg: 0, message: message.to_string() }
    }
}

impl From<SpaceError> for Refused {
    fn from(error: SpaceError) -> Self {
        let (status, arg) = match error {
            SpaceError::Full { free } => (Status::PoolFull, free),
            SpaceError::NoSuchRegion => (Status::NoSuchRegion, 0),
            SpaceError::NotOwner | SpaceError::OfQueue => (Status::NotAllowed, 0),
            SpaceError::MemberGone | SpaceError::Replaced => (Status::MemberGone, 0),
            SpaceError::BeyondRegion { .. } | SpaceError::RegionLength => (Status::BadRequest, 0),
            _ => (Status::LimitReached, 0),
        };
        Self { status, arg, message: error.to_string() }
    }
}

impl From<OverQuota> for Refused {
    fn from(error: OverQuota) -> Self {
        Self::new(Status::LimitReached, error)
    }
}

impl From<Unpackable> for Refused {
    fn from(error: Unpackable) -> Self {
        Self::new(Status::BadRequest, error)
    }
}

impl From<QueueError> for Refused {
    fn from(error: QueueError) -> Self {
        let (status, arg) = match error {
            QueueError::NoSuchQueue => (Status::NoSuchQueue, 0),
            QueueError::TooManyQueues(_) => (Status::LimitReached, 0),
            QueueError::Full { messages } => (Status::QueueFull, messages),
            QueueError::NoSuchMessage | QueueError::BodyLost => (Status::NoSuchMessage, 0),
            _ => (Status::BadRequest, 0),
        };
        Self { status, arg, message: error.to_string() }
    }
}

impl From<QueueSpaceError> for Refused {
    fn from(error: QueueSpaceError) -> Self {
        match error {
            QueueSpaceError::Queue(error) => error.into(),
            QueueSpaceError::Space(error) => error.into(),
            other => Self::new(Status::BadRequest, other),
        }
    }
}
