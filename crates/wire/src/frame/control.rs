//! Tables of the control operations: requests for leases, and what the server grants.

use super::{Reader, WireError};

/// Longest name or host name in a lease request, in bytes.
pub const MAX_NAME_BYTES: usize = 255;

/// A lease on one server. Numbers are never used twice by a server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct LeaseId(pub u64);

/// A member of a lease: one process that uses it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct MemberId(pub u64);

/// A region on one server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct RegionId(pub u64);

/// The secret of a lease: a process that knows the token may attach. Its `Debug` form does not show it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LeaseToken(pub [u8; 16]);

impl LeaseToken {
    /// Compares in constant time, so that its duration does not reveal the first difference.
    #[must_use]
    pub fn matches(&self, other: &LeaseToken) -> bool {
        self.0.iter().zip(&other.0).fold(0, |acc, (a, b)| acc | (a ^ b)) == 0
    }
}

impl std::fmt::Debug for LeaseToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LeaseToken(..)")
    }
}

/// Asks for a lease of `bytes`.
///
/// ```text
///   bytes u64 | pid u32 | name length u16 | host length u16 | name | host
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenLease {
    pub bytes: u64,
    pub pid: u32,
    /// What the lease is for, shown by `rampool status`.
    pub name: String,
    pub host: String,
}

impl OpenLease {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        out.extend_from_slice(&self.bytes.to_le_bytes());
        push_identity(&mut out, self.pid, &self.name, &self.host);
        out
    }

    /// # Errors
    /// [`WireError::TableLength`] or [`WireError::BadName`].
    pub fn parse(table: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let bytes = reader.u64()?;
        let (pid, name, host) = read_identity(&mut reader)?;
        Ok(Self { bytes, pid, name, host })
    }
}

/// Asks to join a lease.
///
/// ```text
///   lease u64 | token 16 bytes | member u64 | pid u32 | name length u16 | host length u16 | name | host
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AttachLease {
    pub lease: LeaseId,
    pub token: LeaseToken,
    /// The member that reconnects after a cut link, or `MemberId(0)` to become a new member.
    pub member: MemberId,
    pub pid: u32,
    pub name: String,
    pub host: String,
}

impl AttachLease {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        out.extend_from_slice(&self.lease.0.to_le_bytes());
        out.extend_from_slice(&self.token.0);
        out.extend_from_slice(&self.member.0.to_le_bytes());
        push_identity(&mut out, self.pid, &self.name, &self.host);
        out
    }

    /// # Errors
    /// [`WireError::TableLength`] or [`WireError::BadName`].
    pub fn parse(table: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let lease = LeaseId(reader.u64()?);
        let token = LeaseToken(reader.array()?);
        let member = MemberId(reader.u64()?);
        let (pid, name, host) = read_identity(&mut reader)?;
        Ok(Self { lease, token, member, pid, name, host })
    }
}

/// What a server granted.
///
/// ```text
///   lease u64 | token 16 bytes | member u64 | server u64 | lease bytes u64
///   | max requests u32 | max bytes u32 | grace_ms u32 | heartbeat_ms u32
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Granted {
    pub lease: LeaseId,
    pub token: LeaseToken,
    pub member: MemberId,
    /// Names the server process: a restarted server has another number, and holds none of the old pages.
    pub server: u64,
    pub lease_bytes: u64,
    /// Credits: requests this connection may have outstanding.
    pub max_requests: u32,
    /// Credits: bytes of pages, requested or sent, that this connection may have outstanding.
    pub max_bytes: u32,
    /// How long the server keeps the regions of a member after losing contact.
    pub grace_ms: u32,
    /// The member sends something at least this often.
    pub heartbeat_ms: u32,
}

impl Granted {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        out.extend_from_slice(&self.lease.0.to_le_bytes());
        out.extend_from_slice(&self.token.0);
        out.extend_from_slice(&self.member.0.to_le_bytes());
        out.extend_from_slice(&self.server.to_le_bytes());
        out.extend_from_slice(&self.lease_bytes.to_le_bytes());
        for number in [self.max_requests, self.max_bytes, self.grace_ms, self.heartbeat_ms] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out
    }

    /// # Errors
    /// [`WireError::TableLength`].
    pub fn parse(table: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let granted = Self {
            lease: LeaseId(reader.u64()?),
            token: LeaseToken(reader.array()?),
            member: MemberId(reader.u64()?),
            server: reader.u64()?,
            lease_bytes: reader.u64()?,
            max_requests: reader.u32()?,
            max_bytes: reader.u32()?,
            grace_ms: reader.u32()?,
            heartbeat_ms: reader.u32()?,
        };
        reader.end()?;
        Ok(granted)
    }
}

fn push_identity(out: &mut Vec<u8>, pid: u32, name: &str, host: &str) {
    let (name, host) = (cut(name), cut(host));
    out.extend_from_slice(&pid.to_le_bytes());
    for text in [name, host] {
        out.extend_from_slice(&u16::try_from(text.len()).expect("cut to MAX_NAME_BYTES").to_le_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(host.as_bytes());
}

fn read_identity(reader: &mut Reader<'_>) -> Result<(u32, String, String), WireError> {
    let pid = reader.u32()?;
    let (name_len, host_len) = (usize::from(reader.u16()?), usize::from(reader.u16()?));
    let name = text(reader, name_len)?;
    let host = text(reader, host_len)?;
    reader.end()?;
    Ok((pid, name, host))
}

/// Names end up in logs and terminals: control characters are replaced on arrival.
fn text(reader: &mut Reader<'_>, len: usize) -> Result<String, WireError> {
    if len > MAX_NAME_BYTES {
        return Err(WireError::BadName);
    }
    let text = std::str::from_utf8(reader.take(len)?).map_err(|_| WireError::BadName)?;
    Ok(text.chars().map(|c| if c.is_control() { '?' } else { c }).collect())
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_NAME_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lease_requests_come_back_as_they_were(
            bytes: u64, pid: u32, name in "[a-zäß/ ]{0,100}", host in "[a-z.]{0,255}",
        ) {
            let open = OpenLease { bytes, pid, name: name.clone(), host: host.clone() };
            prop_assert_eq!(OpenLease::parse(&open.encode()), Ok(open));
            let attach = AttachLease {
                lease: LeaseId(bytes),
                token: LeaseToken([7; 16]),
                member: MemberId(9),
                pid,
                name,
                host,
            };
            prop_assert_eq!(AttachLease::parse(&attach.encode()), Ok(attach));
        }

        #[test]
        fn a_grant_comes_back_as_it_was(n in any::<[u64; 4]>(), m in any::<[u32; 4]>(), token: [u8; 16]) {
            let granted = Granted {
                lease: LeaseId(n[0]),
                token: LeaseToken(token),
                member: MemberId(n[1]),
                server: n[2],
                lease_bytes: n[3],
                max_requests: m[0],
                max_bytes: m[1],
                grace_ms: m[2],
                heartbeat_ms: m[3],
            };
            prop_assert_eq!(Granted::parse(&granted.encode()), Ok(granted));
        }

        #[test]
        fn cut_or_longer_tables_are_refused(cut in 1usize..40, name in "[a-z]{0,20}") {
            let bytes = OpenLease { bytes: 1, pid: 2, name, host: "h".into() }.encode();
            prop_assert!(OpenLease::parse(&bytes[..bytes.len().saturating_sub(cut)]).is_err());
            let longer = [&bytes[..], b"x"].concat();
            prop_assert_eq!(OpenLease::parse(&longer), Err(WireError::TableLength));
        }
    }

    #[test]
    fn control_characters_in_names_do_not_reach_a_terminal() {
        let open = OpenLease { bytes: 1, pid: 2, name: "a\x1b[2J".into(), host: "h\n".into() };
        let parsed = OpenLease::parse(&open.encode()).unwrap();
        assert_eq!((parsed.name.as_str(), parsed.host.as_str()), ("a?[2J", "h?"));
    }

    #[test]
    fn tokens_match_only_themselves_and_are_not_printed() {
        let token = LeaseToken([3; 16]);
        let mut other = token;
        assert!(token.matches(&other));
        other.0[15] ^= 1;
        assert!(!token.matches(&other));
        assert_eq!(format!("{token:?}"), "LeaseToken(..)");
    }
}
