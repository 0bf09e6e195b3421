//! The allocator of regions: rank 0 assigns pages, tells every rank, and answers the requester when all know.
//!
//! A demand is made by one rank alone or by all together. In the second case rank 0 waits until all have made
//! it and compares them: ranks that ask for different things are a mistake that ends the run.
//!
//! Freed pages go back to the kernel on all ranks before the demand is answered. They are assigned again, for
//! a wish of the same kind, after a barrier has renewed them: only then does no rank know anything older of
//! them. Engines never forget a region, so no message in flight can name a page that they do not know.

use std::collections::{BTreeMap, BTreeSet};

use super::control::{Answer, Demand, Wish};
use super::{Homes, ProtocolKind, Rank, RegionConfig};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

/// Work that the allocator orders.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order {
    /// Every rank adds this region and says so with the serial.
    Add { serial: u64, region: RegionConfig },
    /// This region's pages are no longer used: every rank drops them and reports it with the serial.
    Drop { serial: u64, region: RegionConfig },
    /// All ranks have dropped these pages: the next barrier is to renew them ([`Allocator::renewed`]).
    Renew { pages: Extent },
    /// This rank's demand is over.
    Give { to: Rank, ticket: u64, answer: Answer },
    /// The ranks do not agree: the run is over.
    Mismatch { why: String },
}

/// Assigned pages, and waiting demands.
///
/// Invariant: taken, dropped, free and never used pages are disjoint; a free extent lies inside one region.
#[derive(Clone, Debug)]
pub struct Allocator {
    ranks: u16,
    /// The first page that was never assigned, and the end of all pages.
    next: u64,
    end: u64,
    taken: BTreeMap<PageIndex, RegionConfig>,
    free: BTreeMap<PageIndex, (u32, Kind)>,
    /// Dropped by all ranks, but not renewed yet.
    dropped: Vec<RegionConfig>,
    /// Demands of all ranks, by turn: the ranks that have made it, with their tickets.
    gathering: BTreeMap<u32, Gathering>,
    /// Orders on their way to all ranks: the ranks that have carried them out, and the tickets to answer
    /// then.
    orders_out: BTreeMap<u64, Out>,
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
struct Out {
    region: RegionConfig,
    answer: Answer,
    missing: BTreeSet<Rank>,
    tickets: Vec<(Rank, u64)>,
}

impl Allocator {
    /// `pages` pages of the operating system's size, from number 0, for `ranks` ranks.
    #[must_use]
    pub fn new(ranks: u16, pages: u64) -> Self {
        Self {
            ranks,
            next: 0,
            end: pages.min(u64::from(u32::MAX)),
            taken: BTreeMap::new(),
            free: BTreeMap::new(),
            dropped: Vec::new(),
            gathering: BTreeMap::new(),
            orders_out: BTreeMap::new(),
            serial: 0,
            orders: Vec::new(),
        }
    }

    /// A demand of `from`. With `turn` all ranks make it together.
    pub fn ask(&mut self, from: Rank, ticket: u64, turn: Option<u32>, demand: Demand) {
        let Some(turn) = turn else {
            self.serve(demand, vec![(from, ticket)]);
            return;
        };
        let gathering = self.gathering.entry(turn).or_insert_with(|| Gathering {
            first: from,
            demand,
            tickets: Vec::new(),
        });
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
            self.orders
                .push(Order::Mismatch { why: format!("{from} makes its collective call {turn} twice") });
            return;
        }
        gathering.tickets.push((from, ticket));
        if gathering.tickets.len() == usize::from(self.ranks) {
            let gathering = self.gathering.remove(&turn).expect("it is there");
            self.serve(gathering.demand, gathering.tickets);
        }
    }

    /// `from` has carried out the order with this serial. False if that was not expected of it.
    #[must_use]
    pub fn carried_out(&mut self, from: Rank, serial: u64) -> bool {
        let Some(out) = self.orders_out.get_mut(&serial) else { return false };
        if !out.missing.remove(&from) {
            return false;
        }
        if out.missing.is_empty() {
            let Out { region, answer, tickets, .. } = self.orders_out.remove(&serial).expect("it is there");
            if answer == (Answer::Freed {}) {
                self.dropped.push(region);
                self.orders.push(Order::Renew { pages: region.pages });
            }
            self.give(&tickets, &answer);
        }
        true
    }

    /// A barrier has renewed these pages. They may be assigned again.
    pub fn renewed(&mut self, pages: Extent) {
        let Some(at) = self.dropped.iter().position(|region| region.pages.contains(pages.first)) else {
            return;
        };
        let region = self.dropped[at];
        self.release(&RegionConfig { pages, ..region });
        // Pieces come in order.
        if pages.end() >= region.pages.end() {
            self.dropped.swap_remove(at);
        }
    }

    /// Makes every rank carry out an order about a region; then `tickets` get the answer.
    fn order(&mut self, region: RegionConfig, answer: Answer, tickets: Vec<(Rank, u64)>) {
        let serial = self.serial;
        self.serial += 1;
        self.orders.push(match answer {
            Answer::Freed {} => Order::Drop { serial, region },
            _ => Order::Add { serial, region },
        });
        let missing = (0..self.ranks).map(Rank).collect();
        self.orders_out.insert(serial, Out { region, answer, missing, tickets });
    }

    /// The next order.
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
                Ok((region, true)) => self.order(region, Answer::Region { region }, tickets),
                Ok((region, false)) => self.give(&tickets, &Answer::Region { region }),
                Err(why) => self.give(&tickets, &Answer::Refused { why }),
            },
            Demand::Free { first } => match self.taken.remove(&first) {
                Some(region) => self.order(region, Answer::Freed {}, tickets),
                None => self.give(&tickets, &Answer::Refused { why: "no allocation begins there".into() }),
            },
        }
    }

    /// Finds pages. True if they are new to the ranks.
    fn place(&mut self, wish: &Wish) -> Result<(RegionConfig, bool), String> {
        let page_bytes = u64::from(wish.page_bytes);
        if !wish.page_bytes.is_power_of_two() || !(OS_PAGE_BYTES as u64..=65536).contains(&page_bytes) {
            return Err(format!(
                "a shared page has 4096, 8192, 16384, 32768 or 65536 bytes, not {page_bytes}"
            ));
        }
        if let Homes::At(rank) | Homes::BlockedFrom(rank) = wish.homes
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
            if let Some((first, len)) =
                fits.map(|(&first, &(len, _))| (first, len)).min_by_key(|&(_, len)| len)
            {
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
            let soon: u64 = self
                .dropped
                .iter()
                .map(|region| u64::from(region.pages.count) * u64::from(region.page_bytes))
                .sum();
            let soon = if soon > 0 {
                format!(", and {soon} freed ones become available after the next barrier")
            } else {
                String::new()
            };
            return Err(format!(
                "cannot allocate {} bytes of shared memory: {} are free{soon}",
                wish.bytes,
                left * OS_PAGE_BYTES as u64
            ));
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
            format!(
                "allocates {} bytes ({}, pages of {}, homes {:?})",
                wish.bytes,
                wish.protocol.name(),
                wish.page_bytes,
                wish.homes
            )
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

    /// Lets all ranks add the new regions; returns the answers.
    fn drain(allocator: &mut Allocator, ranks: u16) -> Vec<(Rank, Answer)> {
        let mut answers = Vec::new();
        while let Some(order) = allocator.poll() {
            match order {
                Order::Add { serial, .. } | Order::Drop { serial, .. } => {
                    for rank in (0..ranks).rev() {
                        assert!(allocator.carried_out(Rank(rank), serial));
                        assert!(!allocator.carried_out(Rank(rank), serial), "once is enough");
                    }
                }
                Order::Renew { .. } => {}
                Order::Give { to, answer, .. } => answers.push((to, answer)),
                Order::Mismatch { why } => panic!("{why}"),
            }
        }
        answers
    }

    #[test]
    fn a_collective_demand_is_answered_when_all_ranks_have_made_it() {
        let mut allocator = Allocator::new(3, 1000);
        for rank in [2, 0] {
            allocator.ask(Rank(rank), 7, Some(0), wish(5000, 4096));
            assert_eq!(allocator.poll(), None);
        }
        assert_eq!(allocator.absent(), Some(vec![Rank(1)]));
        allocator.ask(Rank(1), 8, Some(0), wish(5000, 4096));
        let answers = drain(&mut allocator, 3);
        assert_eq!(answers.len(), 3);
        assert!(answers.iter().all(|(_, answer)| *answer == answers[0].1));
        assert_eq!(allocator.absent(), None);
    }

    #[test]
    fn ranks_that_ask_for_different_things_are_named() {
        let mut allocator = Allocator::new(2, 1000);
        allocator.ask(Rank(1), 0, Some(4), wish(4096, 4096));
        allocator.ask(Rank(0), 0, Some(4), wish(8192, 4096));
        let Some(Order::Mismatch { why }) = allocator.poll() else { panic!("no mismatch") };
        for word in ["rank 0 allocates 8192 bytes", "rank 1 allocates 4096 bytes", "call 4"] {
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn what_does_not_fit_or_does_not_exist_is_refused() {
        let mut allocator = Allocator::new(2, 100);
        allocator.ask(Rank(1), 0, None, wish(101 * 4096, 4096));
        allocator.ask(Rank(1), 0, None, wish(u64::MAX, 4096));
        allocator.ask(Rank(1), 0, None, wish(1, 5000));
        allocator.ask(Rank(1), 0, None, Demand::Free { first: PageIndex(3) });
        let answers = drain(&mut allocator, 2);
        assert_eq!(answers.len(), 4);
        assert!(answers.iter().all(|(_, answer)| matches!(answer, Answer::Refused { .. })), "{answers:?}");
    }

    #[test]
    fn what_is_freed_is_given_out_again_when_a_barrier_has_made_it_new() {
        let mut allocator = Allocator::new(2, 100);
        allocator.ask(Rank(0), 0, None, wish(60 * 4096, 4096));
        let Some((_, Answer::Region { region })) = drain(&mut allocator, 2).pop() else {
            panic!("no region")
        };
        allocator.ask(Rank(1), 0, None, Demand::Free { first: region.pages.first });
        let Some(Order::Drop { serial, .. }) = allocator.poll() else { panic!("no rank drops it") };
        assert!(allocator.carried_out(Rank(0), serial));
        assert_eq!(allocator.poll(), None, "rank 1 still has it");
        assert!(allocator.carried_out(Rank(1), serial));
        assert_eq!(allocator.poll(), Some(Order::Renew { pages: region.pages }));
        assert!(matches!(allocator.poll(), Some(Order::Give { answer: Answer::Freed {}, .. })));
        allocator.ask(Rank(0), 0, None, wish(60 * 4096, 4096));
        let Some((_, Answer::Refused { why })) = drain(&mut allocator, 2).pop() else {
            panic!("it is not new yet")
        };
        assert!(why.contains("245760 freed ones become available after the next barrier"), "{why}");
        allocator.renewed(region.pages);
        allocator.ask(Rank(0), 0, None, wish(60 * 4096, 4096));
        assert_eq!(drain(&mut allocator, 2).pop(), Some((Rank(0), Answer::Region { region })));
    }

    proptest! {
        /// Each number asks for that many pages, or frees something.
        #[test]
        fn what_is_given_out_never_overlaps(steps in proptest::collection::vec((0_u64..20, 0_u8..3, any::<usize>()), 1..60)) {
            let mut allocator = Allocator::new(1, 400);
            let mut held: Vec<RegionConfig> = Vec::new();
            for (pages, size, which) in steps {
                let page_bytes = 4096 << size;
                let demand = match held.len() {
                    0 => wish(pages * 4096, page_bytes),
                    _ if pages == 0 => Demand::Free { first: held.swap_remove(which % held.len()).pages.first },
                    _ => wish(pages * 4096, page_bytes),
                };
                allocator.ask(Rank(0), 0, None, demand);
                let answers = drain(&mut allocator, 1);
                prop_assert_eq!(answers.len(), 1);
                if pages % 2 == 0 {
                    for region in allocator.dropped.clone() {
                        allocator.renewed(region.pages);
                    }
                }
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
