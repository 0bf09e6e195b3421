//! The registry of protocols: a new one is added here, and to [`ProtocolKind`].

use super::ProtocolKind;
use super::protocol::{Protocol, aurc, hlrc, ibec, lrc, sc};

/// All protocols.
#[derive(Clone, Hash, Debug)]
pub(crate) enum Plugin {
    Sc(sc::Sc),
    Lrc(lrc::Lrc),
    Hlrc(hlrc::Hlrc),
    Aurc(aurc::Aurc),
    Auto(aurc::Aurc),
    Ibec(ibec::Ibec),
}

impl Plugin {
    pub fn new(kind: ProtocolKind) -> Self {
        match kind {
            ProtocolKind::Sc => Self::Sc(sc::Sc::new()),
            ProtocolKind::Lrc => Self::Lrc(lrc::Lrc::new()),
            ProtocolKind::Hlrc => Self::Hlrc(hlrc::Hlrc::new()),
            ProtocolKind::Aurc => Self::Aurc(aurc::Aurc::of_kind(kind)),
            ProtocolKind::Auto => Self::Auto(aurc::Aurc::of_kind(kind)),
            ProtocolKind::Ibec => Self::Ibec(ibec::Ibec::new()),
        }
    }

    pub fn kind(&self) -> ProtocolKind {
        match self {
            Self::Sc(_) => ProtocolKind::Sc,
            Self::Lrc(_) => ProtocolKind::Lrc,
            Self::Hlrc(_) => ProtocolKind::Hlrc,
            Self::Aurc(_) => ProtocolKind::Aurc,
            Self::Auto(_) => ProtocolKind::Auto,
            Self::Ibec(_) => ProtocolKind::Ibec,
        }
    }

    pub fn get(&self) -> &dyn Protocol {
        match self {
            Self::Sc(protocol) => protocol,
            Self::Lrc(protocol) => protocol,
            Self::Hlrc(protocol) => protocol,
            Self::Aurc(protocol) | Self::Auto(protocol) => protocol,
            Self::Ibec(protocol) => protocol,
        }
    }

    pub fn get_mut(&mut self) -> &mut dyn Protocol {
        match self {
            Self::Sc(protocol) => protocol,
            Self::Lrc(protocol) => protocol,
            Self::Hlrc(protocol) => protocol,
            Self::Aurc(protocol) | Self::Auto(protocol) => protocol,
            Self::Ibec(protocol) => protocol,
        }
    }
}
