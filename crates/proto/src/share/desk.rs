//! Where regions come from: rank 0 gives pages out, tells every rank, and answers who asked when all know.
//!
//! A demand is made by one rank alone or by all together. In the second case rank 0 waits until all have made it and compares them: ranks that
//! ask for different things are a mistake that ends the run. What was freed is given out again for a wish of the same kind, with the content it
//! had; engines never forget a region, so nothing that is still under way can name a page that they do not know.

use std::collections::{BTreeMap, BTreeSet};

use super::control::{Answer, Demand, Wish};
use super::{Homes, ProtocolKind, Rank, RegionConfig};
use crate::units::{Extent, OS_PAGE_BYTES, PageIndex};

/// What the desk wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order {
    /// Every rank adds this region and says so with the serial.
    Add { serial: u64, region: RegionConfig },
    /// This rank's demand is over.
    Give { to: Rank, ticket: u64, answer: Answer },
    /// The ranks do not agree: the run is over.
    Mismatch { why: String },
}

/// What has been given out, and what waits.
///
/// Invariant: taken, free and never used pages are disjoint; a free extent lies inside one region.
#[derive(Clone, Debug)]
pub struct Desk {
    ranks: u16,
    /// The first page that was never given out, and the end of all pages.
    next: u64,
    end: u64,
    taken: BTreeMap<PageIndex, RegionConfig>,
    free: BTreeMap<PageIndex, (u32, Kind)>,
    /// Demands of all ranks, by turn: who has made it, with which ticket.
    gathering: BTreeMap<u32, Gathering>,
    /// Regions on their way to all ranks: who knows, and who is told then.
    adding: BTreeMap<u64, Adding>,
    serial: u64,
    orders: Vec<Order>,
}

type Kind = (ProtocolKind, Homes, u32);

#[derive(Clone, Debug)]
struct Gathering {
    first: Rank,
    demand: Demand,
    tickets: Vec<(Rank, u64)>,
}

#[derive(Clone, Debug)]
struct Adding {
    region: RegionConfig,
    missing: BTreeSet<Rank>,
    tickets: Vec<(Rank, u64)>,
}

impl Desk {
    /// `pages` pages of the operating system's size, from number 0, for `ranks` ranks.
    #[must_use]
    pub fn new(ranks: u16, pages: u64) -> Self {
        Self {
            ranks,
            next: 0,
            end: pages.min(u64::from(u32::MAX)),
            taken: BTreeMap::new(),
            free: BTreeMap::new(),
            gathering: BTreeMap::new(),
            adding: BTreeMap::new(),
            serial: 0,
            orders: Vec::new(),
        }
    }

    /// A demand of `from`. With `turn` all ranks make it.
    pub fn ask(&mut self, from: Rank, ticket: u64, turn: Option<u32>, demand: Demand) {
        let Some(turn) = turn else {
            self.serve(demand, vec![(from, ticket)]);
            return;
        };
        let gathering = self.gathering.entry(turn).or_insert_with(|| Gathering { first: from, demand, tickets: Vec::new() });
        if gathering.demand != demand {
            let why = format!(
                "ranks do not agree in their collective call {turn}: {} {}, {from} {}",
                gathering.first,
                describe(&gathering.demand),
                describe(&demand)
            );
            self.orders.push(Order::Mismatch { why });
            return;
        }
        if gathering.tickets.iter().any(|&(rank, _)| rank == from) {
            self.orders.push(Order::Mismatch { why: format!("{from} makes its collective call {turn} twice") });
            return;
        }
        gathering.tickets.push((from, ticket));
        if gathering.tickets.len() == usize::from(self.ranks) {
            let gathering = self.gathering.remove(&turn).expect("it is there");
            self.serve(gathering.demand, gathering.tickets);
        }
    }

    /// `from` knows the region with this serial. False if that was not expected of it.
    #[must_use]
    pub fn added(&mut self, from: Rank, serial: u64) -> bool {
        let Some(adding) = self.adding.get_mut(&serial) else { return false };
        if !adding.missing.remove(&from) {
            return false;
        }
        if adding.missing.is_empty() {
            let Adding { region, tickets, .. } = self.adding.remove(&serial).expect("it is there");
            self.give(&tickets, &Answer::Region { region });
        }
        true
    }

    /// What is to be done next.
    pub fn poll(&mut self) -> Option<Order> {
        if self.orders.is_empty() { None } else { Some(self.orders.remove(0)) }
    }

    /// Ranks that have not made the demand that others wait in, if there is one.
    #[must_use]
    pub fn absent(&self) -> Option<Vec<Rank>> {
        let gathering = self.gathering.values().next()?;
        let here = |rank: Rank| gathering.tickets.iter().any(|&(other, _)| other == rank);
        Some((0..self.ranks).map(Rank).filter(|&rank| !here(rank)).collect())
    }

    fn give(&mut self, tickets: &[(Rank, u64)], answer: &Answer) {
        for &(to, ticket) in tickets {
            self.orders.push(Order::Give { to, ticket, answer: answer.clone() });
        }
    }

    fn serve(&mut self, demand: Demand, tickets: Vec<(Rank, u64)>) {
        match demand {
            Demand::Alloc { wish } => match self.place(&wish) {
                Ok((region, true)) => {
                    let serial = self.serial;
                    self.serial += 1;
                    let missing = (0..self.ranks).map(Rank).collect();
                    self.adding.insert(serial, Adding { region, missing, tickets });
                    self.orders.push(Order::Add { serial, region });
                }
                Ok((region, false)) => self.give(&tickets, &Answer::Region { region }),
                Err(why) => self.give(&tickets, &Answer::Refused { why }),
            },
            Demand::Free { first } => {
                let answer = match self.taken.remove(&first) {
                    Some(region) => {
                        self.release(&region);
                        Answer::Freed {}
                    }
                    None => Answer::Refused { why: "nothing that was allocated and not freed begins there".into() },
                };
                self.give(&tickets, &answer);
            }
        }
    }

    /// Finds pages. True if they are new to the ranks.
    fn place(&mut self, wish: &Wish) -> Result<(RegionConfig, bool), String> {
        let page_bytes = u64::from(wish.page_bytes);
        if !wish.page_bytes.is_power_of_two() || !(OS_PAGE_BYTES as u64..=65536).contains(&page_bytes) {
            return Err(format!("a shared page has 4096, 8192, 16384, 32768 or 65536 bytes, not {page_bytes}"));
        }
        if let Homes::At(rank) = wish.homes
            && rank.0 >= self.ranks
        {
            return Err(format!("{rank} is not one of the {} ranks", self.ranks));
        }
        let count = wish.bytes.div_ceil(page_bytes).max(1);
        let kind = (wish.protocol, wish.homes, wish.page_bytes);
        let region = |first, count| RegionConfig {
            pages: Extent::new(first, count),
            page_bytes: wish.page_bytes,
            protocol: wish.protocol,
            homes: wish.homes,
        };
        if let Ok(count) = u32::try_from(count) {
            let fits = self.free.iter().filter(|&(_, &(len, of))| of == kind && len >= count);
            if let Some((first, len)) = fits.map(|(&first, &(len, _))| (first, len)).min_by_key(|&(_, len)| len) {
                self.free.remove(&first);
                if len > count {
                    self.free.insert(first.offset(u64::from(count)), (len - count, kind));
                }
                let region = region(first, count);
                self.taken.insert(first, region);
                return Ok((region, false));
            }
        }
        let os_pages = page_bytes / OS_PAGE_BYTES as u64;
        let first = self.next.next_multiple_of(os_pages);
        let left = self.end.saturating_sub(first);
        let end = count.checked_mul(os_pages).filter(|&wanted| wanted <= left).map(|wanted| first + wanted);
        let (Some(end), Ok(count)) = (end, u32::try_from(count)) else {
            return Err(format!("{} bytes of shared memory are wanted, {} are left", wish.bytes, left * OS_PAGE_BYTES as u64));
        };
        self.next = end;
        let region = region(PageIndex(first), count);
        self.taken.insert(region.pages.first, region);
        Ok((region, true))
    }

    fn release(&mut self, region: &RegionConfig) {
        let kind = (region.protocol, region.homes, region.page_bytes);
        let (mut first, mut count) = (region.pages.first, region.pages.count);
        if let Some((&before, &(len, of))) = self.free.range(..first).next_back()
            && before.offset(u64::from(len)) == first
            && of == kind
            && let Some(sum) = len.checked_add(count)
        {
            self.free.remove(&before);
            (first, count) = (before, sum);
        }
        let after = first.offset(u64::from(count));
        if let Some(&(len, of)) = self.free.get(&after)
            && of == kind
            && let Some(sum) = len.checked_add(count)
        {
            self.free.remove(&after);
            count = sum;
        }
        self.free.insert(first, (count, kind));
    }
}

fn describe(demand: &Demand) -> String {
    match demand {
        Demand::Alloc { wish } => {
            format!("allocates {} bytes ({}, pages of {}, homes {:?})", wish.bytes, wish.protocol.name(), wish.page_bytes, wish.homes)
        }
        Demand::Free { first } => format!("frees what begins at {first}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wish(bytes: u64, page_bytes: u32) -> Demand {
        Demand::Alloc { wish: Wish { bytes, page_bytes, protocol: ProtocolKind::Hlrc, homes: Homes::Cyclic } }
    }

    /// Lets all ranks add what is new; returns the answers.
    fn settle(desk: &mut Desk, ranks: u16) -> Vec<(Rank, Answer)> {
        let mut answers = Vec::new();
        while let Some(order) = desk.poll() {
            match order {
                Order::Add { serial, .. } => {
                    for rank in (0..ranks).rev() {
                        assert!(desk.added(Rank(rank), serial));
                        assert!(!desk.added(Rank(rank), serial), "once is enough");
                    }
                }
                Order::Give { to, answer, .. } => answers.push((to, answer)),
                Order::Mismatch { why } => panic!("{why}"),
            }
        }
        answers
    }

    #[test]
    fn a_collective_demand_is_answered_when_all_ranks_have_made_it() {
        let mut desk = Desk::new(3, 1000);
        for rank in [2, 0] {
            desk.ask(Rank(rank), 7, Some(0), wish(5000, 4096));
            assert_eq!(desk.poll(), None);
        }
        assert_eq!(desk.absent(), Some(vec![Rank(1)]));
        desk.ask(Rank(1), 8, Some(0), wish(5000, 4096));
        let answers = settle(&mut desk, 3);
        assert_eq!(answers.len(), 3);
        assert!(answers.iter().all(|(_, answer)| *answer == answers[0].1));
        assert_eq!(desk.absent(), None);
    }

    #[test]
    fn ranks_that_ask_for_different_things_are_named() {
        let mut desk = Desk::new(2, 1000);
        desk.ask(Rank(1), 0, Some(4), wish(4096, 4096));
        desk.ask(Rank(0), 0, Some(4), wish(8192, 4096));
        let Some(Order::Mismatch { why }) = desk.poll() else { panic!("no mismatch") };
        for word in ["rank 0 allocates 8192 bytes", "rank 1 allocates 4096 bytes", "call 4"] {
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn what_does_not_fit_or_does_not_exist_is_refused() {
        let mut desk = Desk::new(2, 100);
        desk.ask(Rank(1), 0, None, wish(101 * 4096, 4096));
        desk.ask(Rank(1), 0, None, wish(u64::MAX, 4096));
        desk.ask(Rank(1), 0, None, wish(1, 5000));
        desk.ask(Rank(1), 0, None, Demand::Free { first: PageIndex(3) });
        let answers = settle(&mut desk, 2);
        assert_eq!(answers.len(), 4);
        assert!(answers.iter().all(|(_, answer)| matches!(answer, Answer::Refused { .. })), "{answers:?}");
    }

    proptest! {
        /// Each number asks for that many pages, or frees something.
        #[test]
        fn what_is_given_out_never_overlaps(steps in proptest::collection::vec((0_u64..20, 0_u8..3, any::<usize>()), 1..60)) {
            let mut desk = Desk::new(1, 400);
            let mut held: Vec<RegionConfig> = Vec::new();
            for (pages, size, which) in steps {
                let page_bytes = 4096 << size;
                let demand = match held.len() {
                    0 => wish(pages * 4096, page_bytes),
                    _ if pages == 0 => Demand::Free { first: held.swap_remove(which % held.len()).pages.first },
                    _ => wish(pages * 4096, page_bytes),
                };
                desk.ask(Rank(0), 0, None, demand);
                let answers = settle(&mut desk, 1);
                prop_assert_eq!(answers.len(), 1);
                match &answers[0].1 {
                    Answer::Region { region } => held.push(*region),
                    Answer::Freed {} => prop_assert!(matches!(demand, Demand::Free { .. }), "freed"),
                    Answer::Refused { .. } => prop_assert!(matches!(demand, Demand::Alloc { .. }), "refused"),
                }
                let mut spans: Vec<(u64, u64)> = held.iter().map(|region| (region.pages.first.0, region.pages.end().0)).collect();
                spans.sort_unstable();
                prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            }
        }
    }
}
