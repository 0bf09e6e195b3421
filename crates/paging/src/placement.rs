//! Which memory server holds which page.
//!
//! The idea: a page's place is *computed*, never stored. Pages are cut into *stripes* of a fixed number of
//! pages; a short table of slots, filled once from the servers' weights (the memory each one lends), says
//! which server holds stripe `s`: slot `s mod slots`. The servers' slots are interleaved as evenly as their
//! weights allow, so that a sequential scan keeps all servers busy at once and each one fills in proportion
//! to what it lends. Every process that knows the servers, their weights and the stripe length computes the
//! same places; a forked child or a second member of a lease needs nothing else.
//!
//! With two copies each stripe has a *home* and a *copy*, always two servers. The home is where it is with
//! one copy. The copy's distance grows with each round through the servers, so that the load of a lost server
//! spreads over all that are left:
//!
//! ```text
//!   home  A B C D | A B C D | A B C D
//!   copy  B C D A | C D A B | D A B C
//! ```
//!
//! With unequal weights the rounds are longer, and a server has as many copies as homes in each of them. No
//! server may have more than half of all weight then: it would have to hold both copies of a page.
//!
//! Or the last server is a *backup* ([`Placement::with_backup`]): it has the copy of each page and is the
//! home of none, so that it is read only where the home is lost.
//!
//! Where a server is out ([`Placement::without`]), the others take its part of each stripe, as much as they
//! lend; where one comes in addition ([`Placement::with`]), it takes its share of stripes from all others.
//! What neither concerns stays where it is, and who knows which servers are out computes the same places.
//!
//! It never knows whether a server is alive, never moves a page, and never looks at bytes.

use rampool_wire::units::{Extent, PageIndex};

/// A server's position in the pool's list of servers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ServerIndex(pub u16);

impl ServerIndex {
    /// For indexing the list itself.
    #[must_use]
    pub fn as_usize(self) -> usize {
        usize::from(self.0)
    }
}

/// Pages in a stripe unless the user says otherwise: 256 KiB, so that a prefetch window of a megabyte asks
/// four servers at once.
pub const DEFAULT_STRIPE_PAGES: u32 = 64;

/// Slots of the table for each server; weights are honoured to about one part in this many times the number
/// of servers.
const SLOTS_PER_SERVER: usize = 64;

/// The most servers a pool can have.
pub const MAX_SERVERS: usize = 4096;

/// Why a placement cannot be made of these numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    #[error("a pool needs at least one memory server")]
    NoServers,
    #[error("{0} memory servers are more than the {MAX_SERVERS} a pool can have")]
    TooManyServers(usize),
    #[error("no memory server lends anything: every weight is zero")]
    NothingLent,
    #[error("a stripe of {0} pages is not a power of two between 1 and 2^20")]
    BadStripe(u32),
    #[error("{0} copies of a page are neither one nor two")]
    BadCopies(u8),
    #[error("two copies need two servers, and none that lends more than all others together")]
    TooUneven,
}

/// The servers that hold a stripe.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Holders {
    pub home: ServerIndex,
    /// Another server; none: there is one copy.
    pub copy: Option<ServerIndex>,
}

impl Holders {
    /// One or two servers, the home first.
    pub fn iter(self) -> impl Iterator<Item = ServerIndex> {
        [Some(self.home), self.copy].into_iter().flatten()
    }

    #[must_use]
    pub fn has(self, server: ServerIndex) -> bool {
        self.home == server || self.copy == Some(server)
    }
}

/// A number for stripes with the same holders ([`Placement::pairs`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Group(pub u16);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Slot {
    holders: Holders,
    group: Group,
}

/// The map from pages to servers.
///
/// Invariant: `slots` is not empty, names only servers with a weight above zero, and each of those at least
/// once. A home and its copy differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    slots: Vec<Slot>,
    /// By [`Group`].
    pairs: Vec<Holders>,
    stripe_shift: u32,
    /// What servers can take over, by server. A backup takes over nothing.
    weights: Vec<u64>,
}

impl Placement {
    /// Server `i` receives stripes in proportion to `weights[i]` (any unit: usually the pages it lends); a
    /// weight of zero receives none. `stripe_pages` is a power of two. Of each page there are so many copies,
    /// one or two.
    pub fn new(weights: &[u64], stripe_pages: u32, copies: u8) -> Result<Self, PlacementError> {
        if weights.is_empty() {
            return Err(PlacementError::NoServers);
        }
        if weights.len() > MAX_SERVERS {
            return Err(PlacementError::TooManyServers(weights.len()));
        }
        if !stripe_pages.is_power_of_two() || stripe_pages > 1 << 20 {
            return Err(PlacementError::BadStripe(stripe_pages));
        }
        let lenders = weights.iter().filter(|w| **w > 0).count();
        if lenders == 0 {
            return Err(PlacementError::NothingLent);
        }
        let counts = slot_counts(weights, lenders);
        let holders = match copies {
            1 => interleave(&counts).into_iter().map(|home| Holders { home, copy: None }).collect(),
            2 => with_copies(&counts)?,
            more => return Err(PlacementError::BadCopies(more)),
        };
        Ok(Self::of(&holders, stripe_pages, weights.to_vec()))
    }

    /// As [`Placement::new`] with one copy on all servers but the last, which has the other copy of each
    /// page. Its weight does not count.
    pub fn with_backup(weights: &[u64], stripe_pages: u32) -> Result<Self, PlacementError> {
        let (_, others) = weights.split_last().ok_or(PlacementError::NoServers)?;
        let one = Self::new(others, stripe_pages, 1)?;
        // No more servers than MAX_SERVERS and this one, which fits.
        #[allow(clippy::cast_possible_truncation)]
        let copy = Some(ServerIndex(others.len() as u16));
        let holders: Vec<Holders> =
            one.slots.iter().map(|slot| Holders { home: slot.holders.home, copy }).collect();
        Ok(Self::of(&holders, stripe_pages, [others, &[0]].concat()))
    }

    /// The same without some servers: each of their parts has the other server that has least for what it
    /// lends. A stripe has one holder where there is no other, and those that it had where there is none.
    #[must_use]
    pub fn without(&self, out: impl Fn(ServerIndex) -> bool) -> Self {
        let mut loads = self.loads();
        let mut place = |not: Option<ServerIndex>| {
            let may = |of: &usize| {
                self.weights[*of] > 0 && index(*of).is_some_and(|of| !out(of) && Some(of) != not)
            };
            let load = |of: &usize| (loads[*of] + 1) as f64 / self.weights[*of] as f64;
            let found = (0..self.weights.len()).filter(may).min_by(|a, b| load(a).total_cmp(&load(b)))?;
            loads[found] += 1;
            index(found)
        };
        let mut holders = Vec::with_capacity(self.slots.len());
        for Slot { holders: all, .. } in &self.slots {
            let stays = |of: &ServerIndex| !out(*of);
            let copy = all.copy.filter(stays);
            let home = Some(all.home).filter(stays).or_else(|| place(copy));
            let copy = copy.or_else(|| all.copy.and_then(|_| place(home)));
            holders.push(match (home, copy) {
                (Some(home), copy) | (None, copy @ Some(home)) => {
                    Holders { home, copy: copy.filter(|copy| *copy != home) }
                }
                (None, None) => *all,
            });
        }
        Self::of(&holders, self.stripe_pages(), self.weights.clone())
    }

    /// The same with the first holder of each page alone.
    #[must_use]
    pub fn alone(&self) -> Self {
        let homes = self.slots.iter().map(|slot| Holders { copy: None, ..slot.holders });
        Self::of(&homes.collect::<Vec<_>>(), self.stripe_pages(), self.weights.clone())
    }

    /// The same with one more server, which lends so much: it takes its share from those that have most.
    #[must_use]
    pub fn with(&self, server: ServerIndex, weight: u64) -> Self {
        let mut weights = self.weights.clone();
        weights.resize(weights.len().max(server.as_usize() + 1), 0);
        weights[server.as_usize()] = weight;
        let wanted = weights.iter().filter(|weight| **weight > 0).count() * SLOTS_PER_SERVER;
        let rounds = wanted.min(MOST_SLOTS_WITH_COPIES).div_ceil(self.slots.len());
        let mut holders: Vec<Holders> = Vec::new();
        (0..rounds).for_each(|_| holders.extend(self.slots.iter().map(|slot| slot.holders)));
        let mut loads = self.loads();
        loads.iter_mut().for_each(|load| *load *= rounds as u64);
        let parts: u64 =
            { loads.iter().zip(&weights) }.filter(|(_, weight)| **weight > 0).map(|(load, _)| *load).sum();
        let (slots, mut left) = (holders.len() as u64, apportion(parts, &weights)[server.as_usize()]);
        left = left.min(slots);
        let load = |loads: &[u64], of: ServerIndex| match weights[of.as_usize()] {
            0 => 0.0,
            weight => loads[of.as_usize()] as f64 / weight as f64,
        };
        let mut credit = 0;
        for Holders { home, copy } in &mut holders {
            credit += left;
            if credit < slots {
                continue;
            }
            credit -= slots;
            let from = match copy {
                Some(copy) if load(&loads, *copy) > load(&loads, *home) => copy,
                _ => home,
            };
            loads[from.as_usize()] -= 1;
            *from = server;
        }
        Self::of(&holders, self.stripe_pages(), weights)
    }

    /// How many parts of slots each server has.
    fn loads(&self) -> Vec<u64> {
        let mut loads = vec![0; self.weights.len()];
        self.slots.iter().flat_map(|slot| slot.holders.iter()).for_each(|of| loads[of.as_usize()] += 1);
        loads
    }

    /// How many copies of a page the server has on average.
    #[must_use]
    pub fn part(&self, server: ServerIndex) -> f64 {
        self.copies_without(|_| false) - self.copies_without(|of| of == server)
    }

    fn of(holders: &[Holders], stripe_pages: u32, weights: Vec<u64>) -> Self {
        let mut pairs: Vec<Holders> = holders.to_vec();
        pairs.sort_unstable();
        pairs.dedup();
        let group = |holders| {
            let at = pairs.binary_search(holders).expect("each slot's holders are listed");
            Group(u16::try_from(at).expect("fewer pairs than the table of copies has slots"))
        };
        let slots = holders.iter().map(|holders| Slot { holders: *holders, group: group(holders) }).collect();
        Self { slots, pairs, stripe_shift: stripe_pages.trailing_zeros(), weights }
    }

    /// The home of `page`.
    #[must_use]
    pub fn holder(&self, page: PageIndex) -> ServerIndex {
        self.slot(page).holders.home
    }

    /// All servers that hold `page`.
    #[must_use]
    pub fn holders(&self, page: PageIndex) -> Holders {
        self.slot(page).holders
    }

    /// The holders of stripes, by [`Group`]: each home with each of its copies.
    #[must_use]
    pub fn pairs(&self) -> &[Holders] {
        &self.pairs
    }

    /// How many copies of a page there are on average without the servers that are lost.
    #[must_use]
    pub fn copies_without(&self, is_lost: impl Fn(ServerIndex) -> bool) -> f64 {
        let left = self.slots.iter().flat_map(|slot| slot.holders.iter()).filter(|server| !is_lost(*server));
        left.count() as f64 / self.slots.len() as f64
    }

    /// The first page behind this one whose holders may be others.
    #[must_use]
    pub fn same_holders(&self, page: PageIndex) -> PageIndex {
        PageIndex((page.0 | (u64::from(self.stripe_pages()) - 1)).saturating_add(1))
    }

    fn slot(&self, page: PageIndex) -> &Slot {
        let stripe = page.0 >> self.stripe_shift;
        let slots = self.slots.len() as u64;
        let slot = if slots == 1 { 0 } else { stripe % slots };
        // The remainder is below `slots.len()`, a usize, so the cast loses nothing.
        #[allow(clippy::cast_possible_truncation)]
        &self.slots[slot as usize]
    }

    /// Cuts an extent where its home changes: the pieces in order, neighbours on one server joined.
    #[must_use]
    pub fn split(&self, extent: Extent) -> Pieces<'_, ServerIndex> {
        Pieces { placement: self, of: |slot| slot.holders.home, next: extent.first, end: extent.end() }
    }

    /// Cuts an extent where its holders change.
    #[must_use]
    pub fn split_groups(&self, extent: Extent) -> Pieces<'_, Group> {
        Pieces { placement: self, of: |slot| slot.group, next: extent.first, end: extent.end() }
    }

    #[must_use]
    pub fn stripe_pages(&self) -> u32 {
        1 << self.stripe_shift
    }
}

/// No placement has more servers than fit.
fn index(server: usize) -> Option<ServerIndex> {
    u16::try_from(server).ok().map(ServerIndex)
}

/// The pieces of an extent, from [`Placement::split`] or [`Placement::split_groups`].
pub struct Pieces<'a, T> {
    placement: &'a Placement,
    of: fn(&Slot) -> T,
    next: PageIndex,
    end: PageIndex,
}

impl<T: PartialEq> Iterator for Pieces<'_, T> {
    type Item = (T, Extent);

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.end {
            return None;
        }
        let first = self.next;
        let holder = (self.of)(self.placement.slot(first));
        if self.placement.slots.len() == 1 {
            self.next = self.end;
        } else {
            let stripe = u64::from(self.placement.stripe_pages());
            let mut cut = PageIndex((first.0 | (stripe - 1)).saturating_add(1));
            while cut < self.end && (self.of)(self.placement.slot(cut)) == holder {
                cut = PageIndex(cut.0.saturating_add(stripe));
            }
            self.next = cut.min(self.end);
        }
        // An extent's count is a u32, and a piece is never longer than the extent.
        #[allow(clippy::cast_possible_truncation)]
        let count = (self.next.0 - first.0) as u32;
        Some((holder, Extent::new(first, count)))
    }
}

/// How many slots each server gets: in proportion to its weight, at least one for every weight above zero.
fn slot_counts(weights: &[u64], lenders: usize) -> Vec<u64> {
    if lenders == 1 {
        return weights.iter().map(|w| u64::from(*w > 0)).collect();
    }
    let positive = weights.iter().copied().filter(|w| *w > 0);
    let first = positive.clone().next().unwrap_or(0);
    if positive.clone().all(|w| w == first) {
        return weights.iter().map(|w| u64::from(*w > 0)).collect();
    }
    let total = (lenders * SLOTS_PER_SERVER) as u64;
    let mut counts = apportion(total, weights);
    for (count, weight) in counts.iter_mut().zip(weights) {
        if *weight > 0 {
            *count = (*count).max(1);
        }
    }
    counts
}

/// Spreads the servers' slots over the table as evenly as can be (smooth weighted round robin): at each step
/// every server earns its count, the richest takes the slot and pays the total.
fn interleave(counts: &[u64]) -> Vec<ServerIndex> {
    let total: u64 = counts.iter().sum();
    let mut credit: Vec<i128> = vec![0; counts.len()];
    let mut slots = Vec::new();
    for _ in 0..total {
        let mut richest = 0;
        for server in 0..counts.len() {
            credit[server] += i128::from(counts[server]);
            if credit[server] > credit[richest] {
                richest = server;
            }
        }
        credit[richest] -= i128::from(total);
        // At most MAX_SERVERS servers, which fits.
        #[allow(clippy::cast_possible_truncation)]
        slots.push(ServerIndex(richest as u16));
    }
    slots
}

/// Slots of the table with copies, unless one round alone has more.
const MOST_SLOTS_WITH_COPIES: usize = 1 << 15;
/// Rounds after which the copies' distances repeat: so few of many servers share stripes with each one, and
/// few pairs of them have all copies of a page.
const MOST_ROUNDS: usize = 12;

/// Rounds of homes, as [`interleave`] has them, with copies at growing distances.
///
/// In a list with all slots of the first server, then all of the second, and so on, the slot at a fixed
/// distance belongs to another server if no server has more slots than that, or all others together. Each
/// round takes another distance, so each server has as many copies as homes in each.
fn with_copies(counts: &[u64]) -> Result<Vec<Holders>, PlacementError> {
    let homes = interleave(counts);
    let mut sorted = homes.clone();
    sorted.sort_unstable();
    let most = usize::try_from(counts.iter().copied().max().unwrap_or(0)).unwrap_or(usize::MAX);
    if most > homes.len() / 2 {
        return Err(PlacementError::TooUneven);
    }
    // From `most` to `homes.len() - most`, both included.
    let distances = homes.len() - 2 * most + 1;
    let lenders = counts.iter().filter(|count| **count > 0).count();
    let rounds = (lenders - 1).min(MOST_ROUNDS).min(MOST_SLOTS_WITH_COPIES / homes.len()).clamp(1, distances);
    let mut holders = Vec::with_capacity(rounds * homes.len());
    for round in 0..rounds {
        let distance = most + (2 * round + 1) * distances / (2 * rounds);
        let mut next: Vec<usize> = (0..counts.len())
            .map(|server| sorted.partition_point(|other| other.as_usize() < server))
            .collect();
        for home in &homes {
            let at = &mut next[home.as_usize()];
            let copy = sorted[(*at + distance) % sorted.len()];
            *at += 1;
            holders.push(Holders { home: *home, copy: Some(copy) });
        }
    }
    Ok(holders)
}

/// Divides `total` in proportion to `weights` without remainder: the parts sum to `total` exactly (to zero
/// when every weight is zero). Largest remainders win the left-over units, the lower index on a tie.
#[must_use]
pub fn apportion(total: u64, weights: &[u64]) -> Vec<u64> {
    let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
    if sum == 0 {
        return vec![0; weights.len()];
    }
    let mut parts = Vec::with_capacity(weights.len());
    let mut remainders: Vec<(u128, usize)> = Vec::with_capacity(weights.len());
    for (i, weight) in weights.iter().enumerate() {
        // u64 * u64 fits a u128; the quotient is at most `total`.
        let product = u128::from(total) * u128::from(*weight);
        parts.push(u64::try_from(product / sum).unwrap_or(total));
        remainders.push((product % sum, i));
    }
    let left = total - parts.iter().sum::<u64>();
    remainders.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    let left = usize::try_from(left).unwrap_or(usize::MAX);
    for (_, i) in remainders.iter().take(left) {
        parts[*i] += 1;
    }
    parts
}

/// What one server is asked for, before a lease is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Want {
    /// Asked from this very server by the user; `None`: an equal part of what the named amounts leave.
    pub named: Option<u64>,
    /// The most it can give, once it said so.
    pub free: Option<u64>,
}

/// The servers together cannot give what is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{missing} bytes of the wanted memory are not free on the servers")]
pub struct Shortage {
    pub missing: u64,
}

/// Shares a lease of `total` over the servers (all in one unit): servers with a named amount give that, the
/// others share the rest equally, and what one of them cannot give the others take over.
pub fn share_lease(total: u64, wants: &[Want]) -> Result<Vec<u64>, Shortage> {
    let named: u64 = wants.iter().filter_map(|w| w.named).fold(0, u64::saturating_add);
    let short: u64 =
        wants.iter().filter_map(|w| Some(w.named?.saturating_sub(w.free?))).fold(0, u64::saturating_add);
    if short > 0 {
        return Err(Shortage { missing: short });
    }
    let mut shares: Vec<u64> = wants.iter().map(|w| w.named.unwrap_or(0)).collect();
    let mut rest = total.saturating_sub(named);
    let mut open: Vec<usize> = (0..wants.len()).filter(|i| wants[*i].named.is_none()).collect();
    while rest > 0 {
        if open.is_empty() {
            return Err(Shortage { missing: rest });
        }
        let parts = apportion(rest, &vec![1; open.len()]);
        let mut still_open = Vec::new();
        for (i, part) in open.iter().zip(parts) {
            let room = wants[*i].free.map_or(u64::MAX, |free| free.saturating_sub(shares[*i]));
            let take = part.min(room);
            shares[*i] += take;
            rest -= take;
            if take < room {
                still_open.push(*i);
            }
        }
        open = still_open;
    }
    Ok(shares)
}

/// Shares a lease that holds `total` so many times, once at most on each server. A named amount above `total`
/// counts as `total`.
pub fn share_copies(total: u64, copies: u8, wants: &[Want]) -> Result<Vec<u64>, Shortage> {
    if copies < 2 {
        return share_lease(total, wants);
    }
    let once = |want: &Want| Want {
        named: want.named.map(|named| named.min(total)),
        free: Some(want.free.unwrap_or(u64::MAX).min(total)),
    };
    let wants: Vec<Want> = wants.iter().map(once).collect();
    let missing = |shortage: Shortage| Shortage { missing: shortage.missing.div_ceil(copies.into()) };
    share_lease(total.saturating_mul(copies.into()), &wants).map_err(missing)
}

/// Shares a lease of `total` over all servers but the last, which gets room for a copy of everything.
pub fn share_with_backup(total: u64, wants: &[Want]) -> Result<Vec<u64>, Shortage> {
    let Some((backup, others)) = wants.split_last() else { return Err(Shortage { missing: total }) };
    let mut shares = share_lease(total, others)?;
    let all: u64 = shares.iter().sum();
    let missing = all.saturating_sub(backup.free.unwrap_or(u64::MAX));
    shares.push(all);
    if missing > 0 { Err(Shortage { missing }) } else { Ok(shares) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_backup_has_a_copy_of_each_page_and_is_the_home_of_none() {
        let placement = Placement::with_backup(&[3, 1, 4], 4).unwrap();
        let alone = Placement::new(&[3, 1], 4, 1).unwrap();
        for n in 0..4000 {
            let holders = placement.holders(page(n));
            assert_eq!((holders.home, holders.copy), (alone.holder(page(n)), Some(ServerIndex(2))));
        }
        assert_eq!(placement.pairs().len(), 2);
        assert!((placement.copies_without(|lost| lost == ServerIndex(2)) - 1.0).abs() < 1e-9);
        assert_eq!(Placement::with_backup(&[4], 4), Err(PlacementError::NoServers));
        assert_eq!(Placement::with_backup(&[], 4), Err(PlacementError::NoServers));
        let want = |named, free| Want { named, free };
        assert_eq!(share_with_backup(10, &[want(None, None), want(Some(4), None)]), Ok(vec![10, 10]));
        assert_eq!(
            share_with_backup(9, &[want(Some(4), None), want(None, None), want(None, None)]),
            Ok(vec![4, 5, 9])
        );
        let missing = share_with_backup(9, &[want(None, None), want(None, Some(7))]);
        assert_eq!(missing, Err(Shortage { missing: 2 }));
    }

    fn page(n: u64) -> PageIndex {
        PageIndex(n)
    }

    #[test]
    fn equal_servers_take_turns() {
        let p = Placement::new(&[5, 5, 5], 4, 1).unwrap();
        let holders: Vec<u16> = (0..24).map(|n| p.holder(page(n)).0).collect();
        assert_eq!(holders[..12], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!(holders[..12], holders[12..]);
    }

    #[test]
    fn a_server_that_lends_nothing_holds_nothing() {
        let p = Placement::new(&[0, 7, 0, 7], 1, 1).unwrap();
        assert_eq!((0..4).map(|n| p.holder(page(n)).0).collect::<Vec<_>>(), [1, 3, 1, 3]);
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(Placement::new(&[], 4, 1), Err(PlacementError::NoServers));
        assert_eq!(Placement::new(&[0, 0], 4, 1), Err(PlacementError::NothingLent));
        assert_eq!(Placement::new(&[1], 3, 1), Err(PlacementError::BadStripe(3)));
        assert_eq!(Placement::new(&[1], 0, 1), Err(PlacementError::BadStripe(0)));
        assert_eq!(Placement::new(&[1; 5000], 4, 1), Err(PlacementError::TooManyServers(5000)));
    }

    #[test]
    fn the_last_pages_of_the_index_space_have_a_holder() {
        let p = Placement::new(&[1, 2], 64, 1).unwrap();
        let extent = Extent::new(page((1 << 40) - 10), 10);
        assert_eq!(p.split(extent).map(|(_, e)| e.count).sum::<u32>(), 10);
    }

    #[test]
    fn a_server_that_is_short_is_relieved_by_the_others() {
        let wants =
            [Want { named: None, free: Some(2) }, Want::default(), Want { named: Some(3), free: Some(3) }];
        assert_eq!(share_lease(13, &wants), Ok(vec![2, 8, 3]));
        let wants = [Want { named: None, free: Some(2) }, Want { named: Some(3), free: None }];
        assert_eq!(share_lease(13, &wants), Err(Shortage { missing: 8 }));
        let wants = [Want { named: Some(4), free: Some(3) }];
        assert_eq!(share_lease(4, &wants), Err(Shortage { missing: 1 }));
    }

    #[test]
    fn copies_are_at_growing_distances() {
        let p = Placement::new(&[5, 5, 5, 5], 1, 2).unwrap();
        let copies: Vec<u16> = (0..12).map(|n| p.holders(page(n)).copy.unwrap().0).collect();
        assert_eq!(copies, [1, 2, 3, 0, 2, 3, 0, 1, 3, 0, 1, 2]);
        assert_eq!(p.pairs().len(), 12);
        assert!((p.copies_without(|server| server.0 == 1) - 1.5).abs() < 1e-9);
        let two = Placement::new(&[5, 5], 1, 2).unwrap();
        assert_eq!(two.pairs().len(), 2);
        assert_eq!(Placement::new(&[5], 1, 2), Err(PlacementError::TooUneven));
        assert_eq!(Placement::new(&[5, 1], 1, 2), Err(PlacementError::TooUneven));
        assert_eq!(Placement::new(&[5, 5], 1, 3), Err(PlacementError::BadCopies(3)));
        assert_eq!(Placement::new(&[1; 4096], 1, 2).unwrap().pairs().len(), 4096 * 8);
    }

    #[test]
    fn a_lease_with_copies_has_each_page_on_two_servers() {
        let none = Want::default();
        let free = |free| Want { named: None, free: Some(free) };
        let named = |named| Want { named: Some(named), free: None };
        assert_eq!(share_copies(12, 2, &[none; 3]), Ok(vec![8, 8, 8]));
        assert_eq!(share_copies(12, 1, &[none; 3]), Ok(vec![4, 4, 4]));
        assert_eq!(share_copies(12, 2, &[none; 2]), Ok(vec![12, 12]));
        assert_eq!(share_copies(12, 2, &[free(2), none, none]), Ok(vec![2, 11, 11]));
        assert_eq!(share_copies(12, 2, &[named(30), named(12)]), Ok(vec![12, 12]));
        assert_eq!(share_copies(12, 2, &[none]), Err(Shortage { missing: 6 }));
        assert_eq!(share_copies(12, 2, &[free(8), none]), Err(Shortage { missing: 2 }));
    }

    #[test]
    fn others_take_the_place_of_a_server_and_give_it_back() {
        let base = Placement::new(&[5, 5, 5, 5], 1, 2).unwrap();
        let out = |server: ServerIndex| server.0 == 1;
        let view = base.without(out);
        for n in 0..12 {
            let (before, now) = (base.holders(page(n)), view.holders(page(n)));
            let stays = before.iter().filter(|of| !out(*of)).all(|of| now.iter().any(|now| now == of));
            assert!(stays && now.iter().count() == 2 && !now.iter().any(out), "{before:?} {now:?}");
        }
        assert_eq!(view.loads(), [8, 0, 8, 8], "the others share it alike");
        assert_eq!(base.without(|_| false), base);
        let one = Placement::new(&[5, 5], 1, 2).unwrap().without(out);
        assert_eq!(one.pairs(), [Holders { home: ServerIndex(0), copy: None }]);
        assert_eq!(one.without(|_| true), one, "the last one stays");
        let backup = Placement::with_backup(&[3, 3, 3], 4).unwrap();
        let (alone, none) = (backup.without(out), backup.without(|of| of.0 < 2));
        assert_eq!(alone.pairs(), [Holders { home: ServerIndex(0), copy: Some(ServerIndex(2)) }]);
        assert_eq!(none.pairs(), [Holders { home: ServerIndex(2), copy: None }]);
        assert!((none.part(ServerIndex(2)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn one_more_server_takes_its_share_and_no_more_moves() {
        for (base, loads) in [
            (Placement::new(&[5, 5], 1, 2).unwrap(), [128, 128, 128]),
            (Placement::new(&[10], 1, 1).unwrap(), [86, 0, 42]),
            (Placement::with_backup(&[10, 9], 4).unwrap(), [86, 128, 42]),
        ] {
            let weight = 5;
            let now = base.with(ServerIndex(2), weight);
            let moved = |(first, of): (u64, &Slot)| {
                let before = base.slots[usize::try_from(first).unwrap() % base.slots.len()].holders;
                of.holders.iter().filter(|of| !before.iter().any(|was| was == *of)).count()
            };
            let moved: usize = (0..).zip(&now.slots).map(moved).sum();
            assert_eq!(moved as u64, now.loads()[2]);
            let scaled: Vec<u64> =
                now.loads().iter().map(|load| load * 192 / now.slots.len() as u64).collect();
            assert!(scaled.iter().zip(loads).all(|(is, was)| is.abs_diff(was) <= was / 2 + 1), "{scaled:?}");
        }
    }

    proptest! {
        #[test]
        fn a_copy_is_elsewhere_and_loads_are_in_proportion(
            weights in prop::collection::vec(0u64..1000, 2..9),
            equal: bool,
        ) {
            let weights: Vec<u64> = if equal { vec![7; weights.len()] } else { weights };
            let (most, sum) = (*weights.iter().max().unwrap(), weights.iter().sum::<u64>());
            prop_assume!(sum > 0);
            let Ok(p) = Placement::new(&weights, 1, 2) else {
                prop_assert!(most * 2 + weights.len() as u64 >= sum, "{weights:?}");
                return Ok(());
            };
            let one = Placement::new(&weights, 1, 1).unwrap();
            for n in 0..p.slots.len() as u64 {
                let Holders { home, copy } = p.holders(page(n));
                prop_assert_eq!(home, one.holder(page(n)), "homes are where they are with one copy");
                prop_assert!(copy.is_some_and(|copy| copy != home && weights[copy.as_usize()] > 0));
            }
            for i in 0..weights.len() {
                let homes = p.slots.iter().filter(|slot| slot.holders.home.as_usize() == i).count();
                let copies =
                    p.slots.iter().filter(|slot| slot.holders.copy.unwrap().as_usize() == i).count();
                prop_assert_eq!(homes, copies);
                if equal {
                    // The load of a lost server spreads over all others alike.
                    for j in (0..weights.len()).filter(|j| *j != i) {
                        let of = |slot: &&Slot| slot.holders.home.as_usize() == i
                            && slot.holders.copy.unwrap().as_usize() == j;
                        prop_assert_eq!(p.slots.iter().filter(of).count(), 1);
                    }
                }
            }
        }

        #[test]
        fn groups_and_holders_agree(first in 0u64..10_000, count in 1u32..3000, servers in 2usize..7) {
            let p = Placement::new(&vec![3; servers], 16, 2).unwrap();
            let extent = Extent::new(page(first), count);
            let mut next = extent.first;
            for (group, piece) in p.split_groups(extent) {
                prop_assert_eq!(piece.first, next);
                for page in piece.pages() {
                    prop_assert_eq!(p.holders(page), p.pairs()[usize::from(group.0)]);
                }
                next = piece.end();
            }
            prop_assert_eq!(next, extent.end());
        }

        #[test]
        fn every_page_has_one_holder_and_split_agrees(
            weights in prop::collection::vec(0u64..1 << 40, 1..9),
            stripe_shift in 0u32..10,
            first in 0u64..1 << 40,
            count in 1u32..3000,
        ) {
            prop_assume!(weights.iter().any(|w| *w > 0));
            let p = Placement::new(&weights, 1 << stripe_shift, 1).unwrap();
            let extent = Extent::new(page(first), count);
            let mut next = extent.first;
            let mut last = None;
            for (server, piece) in p.split(extent) {
                prop_assert_eq!(piece.first, next);
                prop_assert!(piece.count > 0);
                prop_assert!(last != Some(server), "neighbours on one server are joined");
                for page in piece.pages() {
                    prop_assert_eq!(p.holder(page), server);
                }
                prop_assert!(weights[server.as_usize()] > 0);
                next = piece.end();
                last = Some(server);
            }
            prop_assert_eq!(next, extent.end());
        }

        #[test]
        fn servers_fill_in_proportion_to_what_they_lend(weights in prop::collection::vec(1u64..1000, 1..7)) {
            let p = Placement::new(&weights, 1, 1).unwrap();
            let n = p.slots.len() as u64;
            let total: u64 = weights.iter().sum();
            for (i, weight) in weights.iter().enumerate() {
                let held = p.slots.iter().filter(|slot| slot.holders.home.as_usize() == i).count() as f64;
                let fair = n as f64 * *weight as f64 / total as f64;
                // A slot of rounding, and one for each server so small that it got its only slot as a gift.
                prop_assert!((held - fair).abs() <= 1.0 + weights.len() as f64, "server {} holds {} of {}, fair is {}", i, held, n, fair);
            }
        }

        #[test]
        fn a_window_of_stripes_reaches_every_equal_server(servers in 1usize..9, first in 0u64..10_000) {
            let p = Placement::new(&vec![3; servers], 1, 1).unwrap();
            let window: std::collections::BTreeSet<_> = (first..first + servers as u64).map(|n| p.holder(page(n))).collect();
            prop_assert_eq!(window.len(), servers);
        }

        #[test]
        fn apportioned_parts_sum_to_the_total(total: u64, weights in prop::collection::vec(any::<u64>(), 1..9)) {
            let parts = apportion(total, &weights);
            let sum: u128 = parts.iter().map(|p| u128::from(*p)).sum();
            let expected = if weights.iter().all(|w| *w == 0) { 0 } else { u128::from(total) };
            prop_assert_eq!(sum, expected);
            for (part, weight) in parts.iter().zip(&weights) {
                prop_assert!(*weight > 0 || *part == 0);
            }
        }

        #[test]
        fn a_shared_lease_is_whole_and_within_what_is_free(
            total in 0u64..10_000,
            wants in prop::collection::vec((prop::option::of(0u64..4000), prop::option::of(0u64..4000)), 1..7),
        ) {
            let wants: Vec<Want> = wants.into_iter().map(|(named, free)| Want { named, free }).collect();
            let named: u64 = wants.iter().filter_map(|w| w.named).sum();
            match share_lease(total, &wants) {
                Ok(shares) => {
                    prop_assert_eq!(shares.iter().sum::<u64>(), total.max(named));
                    for (share, want) in shares.iter().zip(&wants) {
                        prop_assert!(want.free.is_none_or(|free| *share <= free));
                        prop_assert!(want.named.is_none_or(|named| *share == named));
                    }
                }
                Err(Shortage { missing }) => {
                    prop_assert!(missing > 0);
                    let named_fits = wants.iter().all(|w| w.named.is_none_or(|n| w.free.is_none_or(|f| n <= f)));
                    let room: u64 = wants.iter().map(|w| if w.named.is_some() { 0 } else { w.free.unwrap_or(1 << 40) }).sum();
                    prop_assert!(!named_fits || room < total.saturating_sub(named));
                }
            }
        }
    }
}
