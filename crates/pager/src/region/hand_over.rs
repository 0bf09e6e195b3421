//! What another process needs to read memory that was paged here ([`super::Region::hand_over`]).

use std::fmt;
use std::str::FromStr;

use rampool_client::pool::{LeaseTicket, RegionTicket, TicketError};

const MARK: &str = "rampool-handed-over-1";

/// A copy of a region's bytes at the memory servers, and the way there: join the lease
/// ([`rampool_client::pool::PoolConfig::attach`]), open the region
/// ([`rampool_client::direct::Direct::open_ticket`]), and read from [`HandedOver::offset`] on.
///
/// Its text form is for environment variables, pipes and files. It carries the lease's tokens: a process that
/// has it may use the lease, so only hand it to your own processes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HandedOver {
    pub(super) lease: LeaseTicket,
    pub(super) region: RegionTicket,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl HandedOver {
    #[must_use]
    pub fn lease(&self) -> &LeaseTicket {
        &self.lease
    }

    #[must_use]
    pub fn region(&self) -> &RegionTicket {
        &self.region
    }

    /// Where in the opened region the first byte is.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes there are.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Why a region was not handed over. It is as it was.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandOverError {
    #[error("the pager of this memory has ended: {0}")]
    PagerEnded(String),
    #[error("the region could not be copied at its memory servers: {0}")]
    NotCopied(String),
}

impl fmt::Display for HandedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The lease comes last: a path in it may have spaces.
        write!(f, "{MARK} {:x} {:x} {} {}", self.offset, self.bytes, self.region, self.lease)
    }
}

impl FromStr for HandedOver {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, TicketError> {
        let mut words = text.trim().splitn(5, ' ');
        if words.next() != Some(MARK) {
            return Err(TicketError::Mark);
        }
        let mut word = || words.next().ok_or(TicketError::Malformed);
        let number = |text: &str| u64::from_str_radix(text, 16).map_err(|_| TicketError::Malformed);
        let (offset, bytes) = (number(word()?)?, number(word()?)?);
        offset.checked_add(bytes).ok_or(TicketError::Malformed)?;
        Ok(Self { offset, bytes, region: word()?.parse()?, lease: word()?.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_comes_back_as_it_was_and_others_are_refused() {
        let lease = "rampool-lease-1;64*1;1,000102030405060708090a0b0c0d0e0f,unix:/run/a b=4096";
        let handed = HandedOver {
            lease: lease.parse().unwrap(),
            region: "rampool-region-1;7;a".parse().unwrap(),
            offset: 4096,
            bytes: 1 << 20,
        };
        assert_eq!(handed.to_string().parse(), Ok(handed.clone()));
        let text = handed.to_string();
        for cut in 0..text.len() - 1 {
            assert!(text[..cut].parse::<HandedOver>() != Ok(handed.clone()), "{cut}");
        }
        assert_eq!("rampool-region-1;7".parse::<HandedOver>(), Err(TicketError::Mark));
        let beyond = text.replacen(" 1000 ", " ffffffffffffffff ", 1);
        assert_eq!(beyond.parse::<HandedOver>(), Err(TicketError::Malformed));
    }
}
