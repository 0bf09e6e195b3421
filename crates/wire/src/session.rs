//! The start of a connection: the preface, the choice of version and security, and the bookkeeping of
//! credits.
//!
//! Both sides send one 32-byte preface. The client speaks first; the server reads it, decides with [`agree`],
//! and sends the outcome in its own preface. Where either side has a key, a Noise `NNpsk0` handshake with
//! that key follows, with all of these bytes as its prologue: an attacker who alters some on the way, to
//! negotiate less security, makes the handshake fail. A third message, sealed and empty, proves to the server
//! that its peer can derive the session's keys and is no replay.
//!
//! ```text
//!   client                                    server
//!     preface                        ->
//!     tenant                         ->                                        only with a tenant's key
//!                                    <-       preface (agreed, or why not)
//!     length u16, Noise message 1    ->                                        only with a key
//!                                    <-       length u16, Noise message 2      length 0: wrong key
//!     length u16, sealed empty       ->
//!                                    <-       rings offered, and their memory  if both have that feature
//!     rings taken, or not            ->
//!                                    <-       length u16, address over UCX     the same; sealed with a key
//!     length u16, address over UCX   ->
//!     frames                        <->       frames                           sealed: 65535 bytes at most
//! ```
//! This module decides; it holds no key and performs no cryptography.

use crate::checksum;
use crate::frame::WIRE_VERSION;

/// Bytes of a preface.
pub const PREFACE_BYTES: usize = 32;
/// The first eight bytes of every connection, both ways.
pub const PREFACE_MAGIC: [u8; 8] = *b"RAMPOOL\0";

/// Bits of [`Preface::features`].
pub mod features {
    /// Pages may travel as LZ4 blocks.
    pub const LZ4: u32 = 1;
    /// Frames may travel through rings of shared memory ([`crate::rings`]); offered over Unix sockets only.
    pub const RINGS: u32 = 2;
    /// Memory may be published ([`crate::frame::Publish`]); only together with rings.
    pub const PUBLISH: u32 = 4;
    /// Frames travel over UCX ([`crate::fabric`]); offered over TCP only, by clients told to use it and
    /// servers that provide it.
    pub const UCX: u32 = 8;
    /// A part of a page may be requested without a layout ([`crate::frame::Opcode::ReadPiece`]).
    pub const PIECES: u32 = 16;
    /// The server's frames may be read in their file, and replies say where pages lie
    /// ([`crate::places`]); only together with rings.
    pub const PLACES: u32 = 32;
    /// The rings are long: the client moves much at a time; only together with rings.
    pub const LONG_RINGS: u32 = 64;
    /// Of those, what shared memory is needed for: over Unix sockets only.
    pub const SHARED_MEMORY: u32 = RINGS | PUBLISH | PLACES | LONG_RINGS;
    /// Every bit this build knows.
    pub const KNOWN: u32 = LZ4 | UCX | PIECES | SHARED_MEMORY;
}

/// The encryption that one side wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Encryption {
    /// Encrypt unless both sides see the other on their own machine, or where the other side insists; needs a
    /// key beyond the machine.
    #[default]
    Auto = 0,
    /// Always encrypt.
    On = 1,
    /// Never encrypt. The key is still proved where there is one.
    Off = 2,
}

impl Encryption {
    const NAMES: [(Self, &'static str); 3] = [(Self::Auto, "auto"), (Self::On, "on"), (Self::Off, "off")];
}

impl std::fmt::Display for Encryption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = Self::NAMES.iter().find(|(value, _)| value == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// A text that is neither `auto`, `on` nor `off`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("encryption is `auto`, `on` or `off`, not `{0}`")]
pub struct EncryptionError(String);

impl std::str::FromStr for Encryption {
    type Err = EncryptionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::NAMES
            .iter()
            .find(|(_, name)| *name == text)
            .map(|(value, _)| *value)
            .ok_or_else(|| EncryptionError(text.to_owned()))
    }
}

/// How the two sides secure the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Security {
    /// No key on either side: loopback and Unix sockets only.
    Open = 1,
    /// Both proved the key; frames travel plain. An attacker who can alter packets on the way can alter
    /// frames.
    ProvedPlain = 2,
    /// Both proved the key; everything after is encrypted and authenticated.
    Sealed = 3,
}

crate::listed! {
    /// Why a server refuses this client.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
    #[repr(u8)]
    #[non_exhaustive]
    pub enum Refusal {
        #[error("no protocol version in common")]
        Version = 1,
        #[error("the server requires a key and this client has none (--key-file)")]
        KeyNeeded = 2,
        #[error("this client has a key but the server was started without one")]
        NoKeyHere = 3,
        #[error("one side insists on encryption and the other forbids it")]
        Encryption = 4,
        #[error("encryption needs a key (make one with `rampool key`)")]
        EncryptionNeedsKey = 5,
        #[error("this user may not use the server's socket")]
        User = 6,
        #[error("the server has as many connections as it allows")]
        TooManyConnections = 7,
        #[error("this key is revoked; ask for one of a later generation")]
        Revoked = 8,
        #[error("the server was started with the key of one tenant, and this client has another")]
        OtherTenant = 9,
    }
}

/// The server's decision in its preface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// A client's preface carries no verdict.
    Ask,
    Agreed(Security),
    Refused(Refusal),
}

/// Why a preface was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrefaceError {
    #[error("the peer does not speak rampool's protocol")]
    NotRampool,
    #[error("the preface is damaged (checksum differs)")]
    Checksum,
    #[error("the preface is invalid")]
    Malformed,
}

/// The first bytes of a connection.
///
/// ```text
///    0  magic "RAMPOOL\0"     8
///    8  lowest version        u8
///    9  highest version       u8      in the server's: the version chosen, twice
///   10  encryption wanted     u8      0 auto, 1 on, 2 off
///   11  has a key             u8      0 or 1
///   12  features              u32     in the server's: those both have
///   16  nonce                 u64     fresh for every connection
///   24  verdict               u8      0 ask, 1 agreed, 2 refused
///   25  detail                u8      agreed: security; refused: reason
///   26  on one machine        u8      in the client's: it sees the server on its own machine; 0 or 1
///   27  tenant                u8      in the client's: its tenant follows ([`crate::tenant`]); 0 or 1
///   28  CRC-32C of the above  u32
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Preface {
    pub min_version: u8,
    pub max_version: u8,
    pub encryption: Encryption,
    pub has_key: bool,
    pub features: u32,
    pub nonce: u64,
    pub verdict: Verdict,
    /// In a client's preface: the server is on its machine, by its address. A relay on the server's machine
    /// is local for the server, but not for the client.
    pub local_peer: bool,
    /// In a client's preface: a [`crate::tenant::TenantId`] follows.
    pub has_tenant: bool,
}

impl Preface {
    /// A client's first message.
    #[must_use]
    pub fn ask(encryption: Encryption, has_key: bool, features: u32, nonce: u64) -> Self {
        let (verdict, local_peer, has_tenant) = (Verdict::Ask, false, false);
        Self {
            min_version: WIRE_VERSION,
            max_version: WIRE_VERSION,
            encryption,
            has_key,
            features,
            nonce,
            verdict,
            local_peer,
            has_tenant,
        }
    }

    /// Whether the client sees the server on its own machine.
    #[must_use]
    pub fn to_local_peer(self, local_peer: bool) -> Self {
        Self { local_peer, ..self }
    }

    /// Whether the client's key is that of a tenant.
    #[must_use]
    pub fn of_tenant(self, has_tenant: bool) -> Self {
        Self { has_tenant, ..self }
    }

    #[must_use]
    pub fn encode(&self) -> [u8; PREFACE_BYTES] {
        let mut out = [0; PREFACE_BYTES];
        out[..8].copy_from_slice(&PREFACE_MAGIC);
        out[8] = self.min_version;
        out[9] = self.max_version;
        out[10] = self.encryption as u8;
        out[11] = u8::from(self.has_key);
        out[12..16].copy_from_slice(&self.features.to_le_bytes());
        out[16..24].copy_from_slice(&self.nonce.to_le_bytes());
        (out[24], out[25]) = match self.verdict {
            Verdict::Ask => (0, 0),
            Verdict::Agreed(security) => (1, security as u8),
            Verdict::Refused(reason) => (2, reason as u8),
        };
        out[26] = u8::from(self.local_peer);
        out[27] = u8::from(self.has_tenant);
        let crc = checksum::crc32c(&out[..28]);
        out[28..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// # Errors
    /// [`PrefaceError`] for anything that is not a well-formed preface. Versions are not judged here.
    pub fn parse(bytes: &[u8; PREFACE_BYTES]) -> Result<Self, PrefaceError> {
        if bytes[..8] != PREFACE_MAGIC {
            return Err(PrefaceError::NotRampool);
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if checksum::crc32c(&bytes[..28]) != word(28) {
            return Err(PrefaceError::Checksum);
        }
        let encryption = match bytes[10] {
            0 => Encryption::Auto,
            1 => Encryption::On,
            2 => Encryption::Off,
            _ => return Err(PrefaceError::Malformed),
        };
        let verdict = match (bytes[24], bytes[25]) {
            (0, 0) => Verdict::Ask,
            (1, 1) => Verdict::Agreed(Security::Open),
            (1, 2) => Verdict::Agreed(Security::ProvedPlain),
            (1, 3) => Verdict::Agreed(Security::Sealed),
            (2, reason) => {
                let index = usize::from(reason).checked_sub(1).ok_or(PrefaceError::Malformed)?;
                Verdict::Refused(*Refusal::ALL.get(index).ok_or(PrefaceError::Malformed)?)
            }
            _ => return Err(PrefaceError::Malformed),
        };
        if bytes[11] > 1 || bytes[26] > 1 || bytes[27] > 1 || bytes[8] > bytes[9] {
            return Err(PrefaceError::Malformed);
        }
        // Only a client is a tenant, and only by its key.
        if bytes[27] == 1 && (bytes[11] == 0 || verdict != Verdict::Ask) {
            return Err(PrefaceError::Malformed);
        }
        Ok(Self {
            min_version: bytes[8],
            max_version: bytes[9],
            encryption,
            has_key: bytes[11] == 1,
            features: word(12),
            nonce: u64::from(word(16)) | u64::from(word(20)) << 32,
            verdict,
            local_peer: bytes[26] == 1,
            has_tenant: bytes[27] == 1,
        })
    }
}

/// The server's settings for a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerPolicy {
    pub encryption: Encryption,
    pub has_key: bool,
    /// Bits of [`features`].
    pub features: u32,
    /// The peer is on this machine, by its source address.
    pub local_peer: bool,
    /// The server's own reason, found before the preface is judged (draining, too many connections, a user
    /// not allowed).
    pub refuse: Option<Refusal>,
}

/// The server's decision: its preface.
#[must_use]
pub fn agree(client: &Preface, server: &ServerPolicy, nonce: u64) -> Preface {
    let refused = |reason| Verdict::Refused(reason);
    let verdict = if client.min_version > WIRE_VERSION || client.max_version < WIRE_VERSION {
        refused(Refusal::Version)
    } else if let Some(reason) = server.refuse {
        refused(reason)
    } else {
        match choose_security(client, server) {
            Ok(security) => Verdict::Agreed(security),
            Err(reason) => refused(reason),
        }
    };
    Preface {
        min_version: WIRE_VERSION,
        max_version: WIRE_VERSION,
        encryption: server.encryption,
        has_key: server.has_key,
        features: client.features & server.features,
        nonce,
        verdict,
        local_peer: false,
        has_tenant: false,
    }
}

fn choose_security(client: &Preface, server: &ServerPolicy) -> Result<Security, Refusal> {
    use Encryption::{Auto, Off, On};
    let wanted = (client.encryption, server.encryption);
    match (client.has_key, server.has_key) {
        (false, true) => return Err(Refusal::KeyNeeded),
        (true, false) => return Err(Refusal::NoKeyHere),
        (false, false) if wanted.0 == On || wanted.1 == On => {
            return Err(Refusal::EncryptionNeedsKey);
        }
        (false, false) if !server.local_peer => return Err(Refusal::KeyNeeded),
        (false, false) => return Ok(Security::Open),
        (true, true) => {}
    }
    match wanted {
        (On, Off) | (Off, On) => Err(Refusal::Encryption),
        (On, _) | (_, On) => Ok(Security::Sealed),
        (Off, Off) => Ok(Security::ProvedPlain),
        (Auto, _) | (_, Auto) if server.local_peer && client.local_peer => Ok(Security::ProvedPlain),
        (Auto, Auto) => Ok(Security::Sealed),
        (Auto, Off) | (Off, Auto) => Err(Refusal::Encryption),
    }
}

/// Why a client rejects a server's preface.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    #[error("the server refused: {0}")]
    Refused(Refusal),
    #[error("the server speaks protocol version {server}, this client speaks {WIRE_VERSION}")]
    Version { server: u8 },
    #[error("the server did not prove the key it was asked to prove")]
    KeyIgnored,
    #[error("the server chose a security this client did not offer")]
    NotOffered,
    #[error(
        "the server chose an unencrypted local connection, but it is not on this machine: a relay forwards \
         the connection"
    )]
    PlainFromAfar,
}

/// The client's check of the server's preface. Returns the security and the features of the connection.
///
/// # Errors
/// [`AcceptError`]; the connection must be closed.
pub fn accept(asked: &Preface, server: &Preface) -> Result<(Security, u32), AcceptError> {
    let security = match server.verdict {
        Verdict::Refused(Refusal::Version) => {
            return Err(AcceptError::Version { server: server.max_version });
        }
        Verdict::Refused(reason) => return Err(AcceptError::Refused(reason)),
        Verdict::Ask => return Err(AcceptError::NotOffered),
        Verdict::Agreed(security) => security,
    };
    if server.min_version != WIRE_VERSION || server.max_version != WIRE_VERSION {
        return Err(AcceptError::Version { server: server.max_version });
    }
    if server.features & !asked.features != 0 {
        return Err(AcceptError::NotOffered);
    }
    match (security, asked.has_key) {
        (Security::Open, true) => Err(AcceptError::KeyIgnored),
        (Security::Sealed | Security::ProvedPlain, false) => Err(AcceptError::NotOffered),
        (Security::Open | Security::ProvedPlain, _) if asked.encryption == Encryption::On => {
            Err(AcceptError::NotOffered)
        }
        (Security::Sealed, true) if asked.encryption == Encryption::Off => Err(AcceptError::NotOffered),
        (Security::Open | Security::ProvedPlain, _)
            if asked.encryption == Encryption::Auto && !asked.local_peer =>
        {
            Err(AcceptError::PlainFromAfar)
        }
        _ => Ok((security, server.features)),
    }
}

/// Counts the outstanding requests and bytes of one connection against its grant. Both sides keep one: the
/// client never exceeds it, the server checks.
///
/// Invariant: `requests <= max_requests && bytes <= max_bytes`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Credits {
    max_requests: u32,
    max_bytes: u64,
    requests: u32,
    bytes: u64,
}

impl Credits {
    #[must_use]
    pub fn new(max_requests: u32, max_bytes: u32) -> Self {
        Self { max_requests, max_bytes: u64::from(max_bytes), requests: 0, bytes: 0 }
    }

    /// Takes one request and `bytes` (of pages sent, or requested at 4096 each); false, and nothing taken, if
    /// that exceeds the grant.
    #[must_use]
    pub fn take(&mut self, bytes: u64) -> bool {
        let fits = self.requests < self.max_requests && self.bytes.saturating_add(bytes) <= self.max_bytes;
        if fits {
            self.requests += 1;
            self.bytes += bytes;
        }
        fits
    }

    /// Gives back what one request took.
    ///
    /// # Panics
    /// If more is given back than was taken.
    pub fn give_back(&mut self, bytes: u64) {
        assert!(self.requests > 0 && self.bytes >= bytes, "credits given back that were never taken");
        self.requests -= 1;
        self.bytes -= bytes;
    }

    #[must_use]
    pub fn outstanding(&self) -> (u32, u64) {
        (self.requests, self.bytes)
    }

    /// # Panics
    /// If the invariant is broken.
    pub fn check(&self) {
        assert!(self.requests <= self.max_requests && self.bytes <= self.max_bytes);
        assert!(self.requests > 0 || self.bytes == 0);
    }
}

#[cfg(test)]
mod tests;
