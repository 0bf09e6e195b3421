//! What a process hands to another so that it can become a member of the same lease, and take over regions.
//!
//! Both tickets have a text form for environment variables and files. A lease ticket carries the
//! lease's tokens, and its holder may use the lease: give it to your own children only. Its `Debug`
//! form does not show the tokens.

use std::fmt;
use std::str::FromStr;

use rampool_net::transport::Endpoint;
use rampool_paging::placement::{Placement, PlacementError, ServerIndex};
use rampool_session::{HandedOver, History, PageSet};
use rampool_wire::frame::{LeaseId, LeaseToken, MAX_PAGE_INDEX, MemberId, RegionId};
use rampool_wire::units::ByteLen;

use super::config::{ServerSpec, ServerSpecError};

const LEASE_MARK: &str = "rampool-lease-1";
const REGION_MARK: &str = "rampool-region-1";
const MEMBER_MARK: &str = "rampool-member-1";

/// The way into a lease, on every server of the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseTicket {
    pub(super) stripe_pages: u32,
    /// Of each page.
    pub(super) copies: u8,
    /// Whether the last server has the second copy of each page.
    pub(super) backup: bool,
    /// So many servers at the end came later than the others.
    pub(super) later: usize,
    pub(super) parts: Vec<LeasePart>,
}

/// The part of a lease on one server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LeasePart {
    /// The endpoint in numbers, so that attaching asks no name service, and the bytes that were leased there
    /// at first, by which pages are placed.
    pub server: ServerSpec,
    pub lease: LeaseId,
    pub token: LeaseToken,
}

/// The names of a region on every server of the pool, in the pool's order. Of use only to
/// members of the same lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionTicket {
    /// Its name is 0 where it is not there: a server that was lost to one process is lost to those that it
    /// forks. And what was stored there, and what of it servers have missed.
    pub(super) handed: HandedOver,
    /// The mark of the lease on each server: elsewhere the same numbers are other regions. 0:
    /// the ticket does not say.
    pub(super) leases: Vec<u64>,
}

impl LeasePart {
    /// Tells it from the others of this server, and of other runs of it; 0: nothing is leased yet. Says too
    /// little of the token to join by.
    pub fn mark(&self) -> u64 {
        if !self.is_leased() {
            return 0;
        }
        (self.lease.0 ^ u64::from(rampool_wire::checksum::crc32c(&self.token.0)) << 32).max(1)
    }

    /// Whether there is a lease. A server that could not be reached has none yet.
    pub fn is_leased(&self) -> bool {
        self.lease.0 != 0
    }
}

impl RegionTicket {
    /// Whether it is of these leases, as far as it says.
    pub(super) fn is_of(&self, parts: &[LeasePart]) -> bool {
        self.leases.len() == parts.len() && (0..parts.len()).all(|index| self.is_of_part(parts, index))
    }

    fn is_of_part(&self, parts: &[LeasePart], index: usize) -> bool {
        let part = self.leases.get(index).zip(parts.get(index));
        part.is_some_and(|(lease, part)| *lease == 0 || *lease == part.mark())
    }

    /// The region's names where it is of these leases; 0 elsewhere.
    pub(super) fn names_at(&self, parts: &[LeasePart]) -> Vec<RegionId> {
        self.handed.where_known(|server| self.is_of_part(parts, server.as_usize()))
    }
}

/// Who a pool is at its servers, in the pool's order; of use to other members of the same lease
/// ([`super::Pool::dismiss`]).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Membership {
    /// With the mark of the lease at each server.
    pub(super) members: Vec<(MemberId, u64)>,
}

/// Why a text is no ticket.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    #[error("the text is no ticket of this version of rampool")]
    Mark,
    #[error("the ticket is cut or damaged")]
    Malformed,
    #[error("the ticket is damaged: {0}")]
    Server(#[from] ServerSpecError),
}

impl fmt::Display for LeaseTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let backup = if self.backup { "b" } else { "" };
        write!(f, "{LEASE_MARK};{}*{}{backup}", self.stripe_pages, self.copies)?;
        if self.later > 0 {
            write!(f, "+{}", self.later)?;
        }
        for part in &self.parts {
            write!(f, ";{:x},", part.lease.0)?;
            for byte in part.token.0 {
                write!(f, "{byte:02x}")?;
            }
            // Separators inside a path are written as %3b.
            write!(f, ",{}", part.server.to_string().replace('%', "%25").replace(';', "%3b"))?;
        }
        Ok(())
    }
}

impl FromStr for LeaseTicket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut fields = text.trim().split(';');
        if fields.next() != Some(LEASE_MARK) {
            return Err(TicketError::Mark);
        }
        let (stripe_pages, copies) =
            fields.next().and_then(|field| field.split_once('*')).ok_or(TicketError::Malformed)?;
        let (copies, later) = copies.split_once('+').unwrap_or((copies, "0"));
        let later: usize = later.parse().map_err(|_| TicketError::Malformed)?;
        let (copies, backup) = copies.strip_suffix('b').map_or((copies, false), |copies| (copies, true));
        let number = |text: &str| text.parse().map_err(|_| TicketError::Malformed);
        let (stripe_pages, copies) = (number(stripe_pages)?, number(copies)?);
        let copies = u8::try_from(copies).map_err(|_| TicketError::Malformed)?;
        let mut parts = Vec::new();
        for field in fields {
            let mut words = field.splitn(3, ',');
            let mut word = || words.next().ok_or(TicketError::Malformed);
            let lease = u64::from_str_radix(word()?, 16).map_err(|_| TicketError::Malformed)?;
            let token = parse_token(word()?).ok_or(TicketError::Malformed)?;
            let server: ServerSpec = word()?.replace("%3b", ";").replace("%25", "%").parse()?;
            if server.memory.is_none() {
                return Err(TicketError::Malformed);
            }
            parts.push(LeasePart { server, lease: LeaseId(lease), token });
        }
        if parts.len() <= later {
            return Err(TicketError::Malformed);
        }
        Ok(Self { stripe_pages, copies, backup, later, parts })
    }
}

impl LeaseTicket {
    /// The servers that the lease lies on, in the pool's order.
    pub fn servers(&self) -> impl Iterator<Item = &ServerSpec> {
        self.parts.iter().map(|part| &part.server)
    }

    /// On how many servers each page lies.
    #[must_use]
    pub fn copies(&self) -> u8 {
        self.copies
    }

    /// The same lease, where a server has another name to this process: its Unix socket, on its own machine.
    ///
    /// # Panics
    /// If the ticket has no such server.
    #[must_use]
    pub fn reached_at(mut self, server: usize, endpoint: Endpoint) -> Self {
        self.parts[server].server.endpoint = endpoint;
        self
    }

    /// Whether both tickets have the same lease at this server.
    #[must_use]
    pub fn is_same_at(&self, other: &Self, server: ServerIndex) -> bool {
        let mark = |ticket: &Self| ticket.parts.get(server.as_usize()).map(LeasePart::mark);
        mark(self) == mark(other)
    }

    /// The same for processes that are not to join this server any more.
    #[must_use]
    pub fn leaving(mut self, server: ServerIndex) -> Self {
        if let Some(part) = self.parts.get_mut(server.as_usize()) {
            part.lease = LeaseId(0);
        }
        self
    }

    /// What the lease is called there, in the same order.
    pub fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.parts.iter().map(|part| part.lease)
    }

    /// How many servers there were at first.
    pub(super) fn first(&self) -> usize {
        self.parts.len() - self.later
    }

    /// Where pages lie on the servers that there were at first.
    pub(super) fn placement(&self) -> Result<Placement, PlacementError> {
        let weights = &self.weights()[..self.first()];
        if self.backup {
            Placement::with_backup(weights, self.stripe_pages)
        } else {
            Placement::new(weights, self.stripe_pages, self.copies)
        }
    }

    /// The weights by which pages are placed.
    pub(super) fn weights(&self) -> Vec<u64> {
        self.parts.iter().map(|p| p.server.memory.map_or(0, ByteLen::pages)).collect()
    }
}

impl fmt::Display for RegionTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REGION_MARK)?;
        for (region, lease) in self.handed.names.iter().zip(&self.leases) {
            write!(f, ";{:x}", region.0)?;
            if *lease != 0 {
                write!(f, ".{lease:x}")?;
            }
        }
        if !self.handed.history.stored.is_empty() {
            write_pages(f, 's', &self.handed.history.stored)?;
            self.handed.history.missed.iter().try_for_each(|missed| write_pages(f, 'm', missed))?;
            self.handed.history.left.iter().try_for_each(|left| write_pages(f, 'l', left))?;
        }
        if !self.handed.history.out.is_empty() {
            f.write_str(";o")?;
            self.handed.history.out.iter().try_for_each(|out| f.write_str(if *out { "1" } else { "0" }))?;
        }
        Ok(())
    }
}

impl FromStr for RegionTicket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut fields = text.trim().split(';');
        if fields.next() != Some(REGION_MARK) {
            return Err(TicketError::Mark);
        }
        let number = |text| u64::from_str_radix(text, 16).map_err(|_| TicketError::Malformed);
        let handed = HandedOver { names: Vec::new(), history: History::default() };
        let mut ticket = Self { handed, leases: Vec::new() };
        for field in fields {
            if let Some(pages) = field.strip_prefix('s') {
                ticket.handed.history.stored = parse_pages(pages)?;
                continue;
            }
            if let Some(pages) = field.strip_prefix('m') {
                ticket.handed.history.missed.push(parse_pages(pages)?);
                continue;
            }
            if let Some(pages) = field.strip_prefix('l') {
                ticket.handed.history.left.push(parse_pages(pages)?);
                continue;
            }
            if let Some(out) = field.strip_prefix('o') {
                ticket.handed.history.out = out.bytes().map(|byte| byte == b'1').collect();
                continue;
            }
            let (region, lease) = field.split_once('.').unwrap_or((field, "0"));
            ticket.handed.names.push(RegionId(number(region)?));
            ticket.leases.push(number(lease)?);
        }
        let servers = ticket.handed.names.len();
        let History { missed, left, out, .. } = &ticket.handed.history;
        if servers == 0 || missed.len().max(left.len()).max(out.len()) > servers {
            return Err(TicketError::Malformed);
        }
        Ok(ticket)
    }
}

/// Each range: pages after the one before, and how many.
fn write_pages(f: &mut fmt::Formatter<'_>, mark: char, pages: &PageSet) -> fmt::Result {
    write!(f, ";{mark}")?;
    let mut at = 0;
    for (first, end) in pages.ranges() {
        write!(f, "{:x}+{:x},", first - at, end - first)?;
        at = end;
    }
    Ok(())
}

fn parse_pages(text: &str) -> Result<PageSet, TicketError> {
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (mut pages, mut at) = (PageSet::default(), 0u64);
    for range in text.split_terminator(',') {
        let (skip, count) = range.split_once('+').ok_or(TicketError::Malformed)?;
        let first = number(skip).and_then(|skip| at.checked_add(skip));
        let end =
            number(count).and_then(|count| first?.checked_add(count)).filter(|end| *end <= MAX_PAGE_INDEX);
        let (Some(first), Some(end)) = (first, end) else { return Err(TicketError::Malformed) };
        pages.insert_range(first, end);
        at = end;
    }
    Ok(pages)
}

impl fmt::Display for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MEMBER_MARK)?;
        for (member, lease) in &self.members {
            write!(f, ";{:x}.{lease:x}", member.0)?;
        }
        Ok(())
    }
}

impl FromStr for Membership {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut fields = text.trim().split(';');
        if fields.next() != Some(MEMBER_MARK) {
            return Err(TicketError::Mark);
        }
        let member = |field: &str| {
            let (member, lease) = field.split_once('.')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some((MemberId(number(member)?), number(lease)?))
        };
        let members: Vec<_> = fields.map(member).collect::<Option<_>>().ok_or(TicketError::Malformed)?;
        if members.is_empty() { Err(TicketError::Malformed) } else { Ok(Self { members }) }
    }
}

fn parse_token(text: &str) -> Option<LeaseToken> {
    if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut token = [0; 16];
    for (byte, n) in token.iter_mut().zip((0..32).step_by(2)) {
        *byte = u8::from_str_radix(text.get(n..n + 2)?, 16).ok()?;
    }
    Some(LeaseToken(token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tickets_come_back_as_they_were() {
        let ticket = LeaseTicket {
            stripe_pages: 64,
            copies: 2,
            backup: false,
            later: 1,
            parts: vec![
                LeasePart {
                    server: "127.0.0.1:7000=1048576".parse().unwrap(),
                    lease: LeaseId(1),
                    token: LeaseToken([0xab; 16]),
                },
                LeasePart {
                    server: "unix:/run/a,b;c%3b%=4096".parse().unwrap(),
                    lease: LeaseId(u64::MAX),
                    token: LeaseToken([1; 16]),
                },
            ],
        };
        assert_eq!(ticket.to_string().parse::<LeaseTicket>(), Ok(ticket.clone()));
        assert_eq!(ticket.weights(), [256, 1]);
        assert!(!format!("{ticket:?}").contains("ab, ab"), "tokens stay out of logs");
        let region = RegionTicket {
            handed: HandedOver { names: vec![RegionId(7), RegionId(1 << 60)], history: History::default() },
            leases: vec![0x2a, 0],
        };
        assert_eq!(region.to_string(), "rampool-region-1;7.2a;1000000000000000");
        assert_eq!(region.to_string().parse::<RegionTicket>(), Ok(region.clone()));
        let pages = |ranges: &[(u64, u64)]| {
            let mut pages = PageSet::default();
            ranges.iter().for_each(|(first, end)| pages.insert_range(*first, *end));
            pages
        };
        let missed = vec![pages(&[]), pages(&[(70, 72)])];
        let left = vec![pages(&[(70, 80)])];
        let stored = pages(&[(64, 128), (1 << 20, 1 << 21)]);
        let history = History { stored, missed, left, out: vec![false, true] };
        let handed = HandedOver { history, ..region.handed };
        let region = RegionTicket { handed, ..region };
        assert!(region.to_string().ends_with(";s40+40,fff80+100000,;m;m46+2,;l46+a,;o01"), "{region}");
        assert_eq!(region.to_string().parse::<RegionTicket>(), Ok(region));
        let member = Membership { members: vec![(MemberId(3), 7), (MemberId(0x1f), 0x2b)] };
        assert_eq!(member.to_string(), "rampool-member-1;3.7;1f.2b");
        assert_eq!(member.to_string().parse::<Membership>(), Ok(member));
    }

    #[test]
    fn other_texts_are_refused() {
        assert_eq!("".parse::<LeaseTicket>(), Err(TicketError::Mark));
        assert_eq!("rampool-lease-1;64*1".parse::<LeaseTicket>(), Err(TicketError::Malformed));
        assert_eq!("rampool-lease-1;64*1;1,zz,h:1=1".parse::<LeaseTicket>(), Err(TicketError::Malformed));
        assert_eq!("rampool-region-1".parse::<RegionTicket>(), Err(TicketError::Malformed));
        assert_eq!("rampool-region-1;x".parse::<RegionTicket>(), Err(TicketError::Malformed));
    }

    proptest! {
        #[test]
        fn damaged_tickets_never_panic(text in "rampool-(lease|region)-1(;[l-s]?[0-9a-f,:=.*+]{0,60}){0,4}") {
            let _ = text.parse::<LeaseTicket>();
            let _ = text.parse::<RegionTicket>();
        }
    }
}
