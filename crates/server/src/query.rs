//! Asking a server for its status, or to drain, from outside.

use super::status::ServerStatus;
use rampool_net::transport::{
    Endpoint, HandshakeError, Link, LinkError, LocalPolicy, PieceMut, Received, Urgency, connect,
};
use rampool_wire::frame::{Header, Opcode, Status, parse_message};
use std::time::Instant;

/// Why the status could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    #[error("cannot reach {endpoint}: {source}")]
    Handshake { endpoint: Endpoint, source: HandshakeError },
    #[error("lost {endpoint} before it answered: {source}")]
    Link { endpoint: Endpoint, source: LinkError },
    #[error("{endpoint} did not answer in time")]
    TimedOut { endpoint: Endpoint },
    #[error("{endpoint} refuses: {message}")]
    Refused { endpoint: Endpoint, message: String },
    #[error("{endpoint} told its status in a form this tool does not understand: {source}")]
    Malformed { endpoint: Endpoint, source: serde_json::Error },
}

impl QueryError {
    /// Whether it shows that no server is there any more.
    #[must_use]
    pub fn nobody_listens(&self) -> bool {
        matches!(self, Self::Handshake { source, .. } if source.nobody_listens())
    }

    /// Whether a server that has answered before may answer again: it was silent, or the connection broke.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Handshake { source, .. } => source.may_pass(),
            Self::Link { .. } | Self::TimedOut { .. } => true,
            Self::Refused { .. } | Self::Malformed { .. } => false,
        }
    }
}

/// Connects, asks, and disconnects. Blocks until the answer or the deadline.
///
/// # Errors
/// [`QueryError`], which names the server.
pub fn query_status(
    endpoint: &Endpoint,
    policy: LocalPolicy,
    deadline: Instant,
) -> Result<ServerStatus, QueryError> {
    let bytes = ask(endpoint, policy, Opcode::Status, deadline)?;
    serde_json::from_slice(&bytes)
        .map_err(|source| QueryError::Malformed { endpoint: endpoint.clone(), source })
}

/// Asks a server to drain: it grants no new leases, its clients move what they can to other servers, and it
/// ends when the last one has left. Blocks until the answer or the deadline.
///
/// # Errors
/// As [`query_status`].
pub fn ask_to_drain(endpoint: &Endpoint, policy: LocalPolicy, deadline: Instant) -> Result<(), QueryError> {
    ask(endpoint, policy, Opcode::Drain, deadline).map(|_| ())
}

fn ask(
    endpoint: &Endpoint,
    policy: LocalPolicy,
    opcode: Opcode,
    deadline: Instant,
) -> Result<Vec<u8>, QueryError> {
    let link = connect::<()>(endpoint, policy, deadline);
    let mut link = link.map_err(|source| QueryError::Handshake { endpoint: endpoint.clone(), source })?;
    let link_error = |source| QueryError::Link { endpoint: endpoint.clone(), source };
    link.send_head(Urgency::Demand, &Header::request(opcode, 1).encode(), ());
    let (header, bytes) = reply(&mut link, deadline)
        .map_err(link_error)?
        .ok_or_else(|| QueryError::TimedOut { endpoint: endpoint.clone() })?;
    match header.status {
        Status::Ok => Ok(bytes),
        _ => Err(QueryError::Refused { endpoint: endpoint.clone(), message: parse_message(&bytes) }),
    }
}

/// The next reply: its bulk, or without one its table. `Ok(None)`: the deadline came first.
fn reply(link: &mut Link, deadline: Instant) -> Result<Option<(Header, Vec<u8>)>, LinkError> {
    let mut bulk = Vec::new();
    loop {
        link.flush()?;
        match link.receive()? {
            Received::Blocked => {
                if !link.wait(deadline)? {
                    return Ok(None);
                }
            }
            Received::Head(header) if header.bulk_len > 0 => {
                bulk = vec![0; header.bulk_len as usize];
                // SAFETY: `bulk` is not touched before `Bulk`, and outlives the link's use of it: on an error
                // the caller drops the link.
                unsafe { link.place(&[PieceMut { ptr: bulk.as_mut_ptr(), len: bulk.len() }]) };
            }
            Received::Head(header) if header.is_reply() => return Ok(Some((header, link.table().to_vec()))),
            Received::Head(_) => {}
            Received::Bulk(header) if header.is_reply() => return Ok(Some((header, bulk))),
            Received::Bulk(_) => {}
        }
    }
}
