//! Who a client is: the name of a tenant, and the generation of its key.
//!
//! A pool has one master key. Keys of tenants are derived from it, one for each name and generation, so that
//! a server needs the master alone. A client with such a key says so in its preface, and this follows it:
//!
//! ```text
//!    0  generation            u32
//!    4  length of the name    u8      1 to 31
//!    5  name                  31      ASCII letters, digits, `.`, `_` and `-`; zeroes behind it
//!   36  CRC-32C of the above  u32
//! ```
//! What it says counts once the key of this tenant is proved.

use crate::checksum;
use crate::session::PrefaceError;
use std::fmt;
use std::str::FromStr;

/// Bytes of a tenant's name.
pub const MAX_TENANT_BYTES: usize = 31;
/// Bytes that follow the preface of a tenant.
pub const TENANT_BYTES: usize = 40;

/// The name of a tenant: 1 to 31 ASCII letters, digits, `.`, `_` and `-`; it begins with a letter or digit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantName {
    bytes: [u8; MAX_TENANT_BYTES],
    len: u8,
}

/// A tenant, by one of its keys.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TenantId {
    pub name: TenantName,
    /// Which of its keys: a later one replaces one that is revoked.
    pub generation: u32,
}

/// A text that is no name of a tenant.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0:?} is no name of a tenant: give 1 to {MAX_TENANT_BYTES} letters, digits, `.`, `_` and `-`, the first \
     a letter or digit"
)]
pub struct TenantNameError(String);

impl TenantName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).expect("checked when it was made")
    }

    fn new(name: &[u8]) -> Option<Self> {
        let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        if !name.first()?.is_ascii_alphanumeric()
            || name.len() > MAX_TENANT_BYTES
            || !name.iter().all(allowed)
        {
            return None;
        }
        let mut bytes = [0; MAX_TENANT_BYTES];
        bytes[..name.len()].copy_from_slice(name);
        Some(Self { bytes, len: u8::try_from(name.len()).expect("at most 31") })
    }
}

impl FromStr for TenantName {
    type Err = TenantNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::new(text.as_bytes()).ok_or_else(|| TenantNameError(text.to_owned()))
    }
}

impl fmt::Display for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for TenantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (generation {})", self.name, self.generation)
    }
}

impl TenantId {
    #[must_use]
    pub fn encode(&self) -> [u8; TENANT_BYTES] {
        let mut out = [0; TENANT_BYTES];
        out[..4].copy_from_slice(&self.generation.to_le_bytes());
        out[4] = self.name.len;
        out[5..36].copy_from_slice(&self.name.bytes);
        let crc = checksum::crc32c(&out[..36]);
        out[36..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// # Errors
    /// [`PrefaceError`] for anything that [`TenantId::encode`] does not make.
    pub fn parse(bytes: &[u8; TENANT_BYTES]) -> Result<Self, PrefaceError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if checksum::crc32c(&bytes[..36]) != word(36) {
            return Err(PrefaceError::Checksum);
        }
        let (name, rest) =
            bytes[5..36].split_at_checked(usize::from(bytes[4])).ok_or(PrefaceError::Malformed)?;
        if rest.iter().any(|byte| *byte != 0) {
            return Err(PrefaceError::Malformed);
        }
        let name = TenantName::new(name).ok_or(PrefaceError::Malformed)?;
        Ok(Self { name, generation: word(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sealed(mut bytes: [u8; TENANT_BYTES]) -> [u8; TENANT_BYTES] {
        let crc = checksum::crc32c(&bytes[..36]);
        bytes[36..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn names_are_short_and_can_stand_in_a_log() {
        for name in ["a", "alice", "team-7.batch_x", "0", &"n".repeat(31)] {
            assert_eq!(name.parse::<TenantName>().unwrap().to_string(), name);
        }
        for name in ["", "-a", ".a", "a b", "a\n", "a/b", "\u{e4}", "a\0", &"n".repeat(32)] {
            assert!(name.parse::<TenantName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn only_what_is_encoded_is_accepted() {
        let tenant = TenantId { name: "alice".parse().unwrap(), generation: 3 };
        let coded = tenant.encode();
        assert_eq!(TenantId::parse(&coded), Ok(tenant));
        let mut damaged = coded;
        damaged[0] ^= 1;
        assert_eq!(TenantId::parse(&damaged), Err(PrefaceError::Checksum));
        let refused = |at: usize, byte: u8| {
            let mut bytes = coded;
            bytes[at] = byte;
            assert_eq!(TenantId::parse(&sealed(bytes)), Err(PrefaceError::Malformed), "{at} {byte}");
        };
        refused(4, 0);
        refused(4, 4);
        refused(4, 6);
        refused(4, 32);
        refused(4, 255);
        refused(5, b'-');
        refused(6, b'\n');
        refused(35, b'x');
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(
            bytes in any::<[u8; TENANT_BYTES]>(), len in 0..34u8, text in "[a-z0-9.-]{31}",
        ) {
            let mut bytes = bytes;
            bytes[4] = len;
            bytes[5..36].copy_from_slice(text.as_bytes());
            if usize::from(len) < MAX_TENANT_BYTES {
                bytes[5 + usize::from(len)..36].fill(0);
            }
            let bytes = sealed(bytes);
            if let Ok(tenant) = TenantId::parse(&bytes) {
                prop_assert_eq!(tenant.encode(), bytes);
                prop_assert_eq!(tenant.name.as_str().parse::<TenantName>(), Ok(tenant.name));
            }
        }
    }
}
