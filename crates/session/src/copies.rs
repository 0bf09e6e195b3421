//! What the two holders of pages have, what they have missed, and the pieces that bring them up to date.
//!
//! A holder that is out misses what is stored and discarded: those pages are in its missed set, and it is not asked for
//! them. When it is back, piece after piece is read from the other holder and stored there, and leaves the set. The set
//! may be larger than what was missed, never smaller. What is stored or discarded again meanwhile leaves it with the
//! server's answer: a connection's changes are answered in their order, so the answer to a later one is not there yet.
//!
//! A piece must not bring back what was changed since it was read. So it begins only where no change of its pages is
//! under way, is dropped if one is submitted before it is read, and is stored in the class of all changes: what is
//! submitted later comes to the server later.

use std::collections::BTreeMap;
use std::time::Duration;

use rampool_paging::placement::{Placement, ServerIndex};
use rampool_wire::frame::RegionId;
use rampool_wire::units::{Extent, PageIndex};

use crate::io::Time;
use crate::pages::PageSet;

/// Pieces under way at once, and pages of one.
pub const PIECES: usize = 4;
pub const PIECE_PAGES: u32 = 32;
/// What could not be made up for is tried again after so long.
pub const PASS: Duration = Duration::from_millis(200);

/// What was stored in a region, and what of it each server has missed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct History {
    /// In whole stripes.
    pub stored: PageSet,
    /// By server; empty: nothing.
    pub missed: Vec<PageSet>,
}

/// A region on its way to another process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HandedOver {
    /// What it is called at each server; 0: that process does without it there.
    pub names: Vec<RegionId>,
    pub history: History,
}

impl HandedOver {
    /// What a process asks for that is in another lease at some servers than the one that names it, or in another run of
    /// them: what the names mean there is nothing of its own. The same for who gives back what was not taken.
    #[must_use]
    pub fn where_known(&self, is_known: impl Fn(ServerIndex) -> bool) -> Vec<RegionId> {
        let names = (0..).zip(&self.names);
        names.map(|(index, name)| if is_known(ServerIndex(index)) { *name } else { RegionId(0) }).collect()
    }

    /// What it is called for the process that has taken it over at these servers.
    #[must_use]
    pub fn taken_names(&self, taken: &[bool]) -> Vec<RegionId> {
        let names = self.names.iter().zip(taken);
        names.map(|(name, taken)| if *taken { *name } else { RegionId(0) }).collect()
    }
}

/// A region, as the machine knows it.
#[derive(Clone, Debug)]
pub struct Region {
    /// What it is called at each server; 0: it is not there.
    pub names: Vec<RegionId>,
    /// Its pages have the holders that placement says. Otherwise nothing is made up for.
    pub(crate) placed: bool,
    pub(crate) history: History,
}

impl Region {
    /// Whether the server has missed one of these pages, or all.
    pub(crate) fn has_missed(&self, server: ServerIndex, pages: &[Extent]) -> bool {
        let missed = &self.history.missed[server.as_usize()];
        self.is_absent(server) || pages.iter().any(|extent| missed.overlaps(*extent))
    }

    pub(crate) fn is_absent(&self, server: ServerIndex) -> bool {
        self.names[server.as_usize()].0 == 0
    }

    /// Whether the server has missed something that another holder has, as far as is known: that one is not lost, knows the
    /// region, and has not missed it as well.
    fn is_behind(&self, server: ServerIndex, placement: &Placement, lost: &[ServerIndex]) -> bool {
        let has = |of: ServerIndex, pages: Extent| {
            let missed = &self.history.missed[of.as_usize()];
            !lost.contains(&of) && !self.is_absent(of) && missed.pages_of(pages) < u64::from(pages.count)
        };
        let other_has = |pages: Extent| {
            let mut others = placement.holders(pages.first).iter().filter(|of| *of != server);
            others.any(|of| has(of, pages))
        };
        let may_get = |pages: Extent| placement.split_groups(pages).any(|(_, part)| other_has(part));
        let missed = &self.history.missed[server.as_usize()];
        self.placed && (self.is_absent(server) || missed.extents().any(may_get))
    }

    /// How many pages the server has missed, and no other one.
    fn missed_alone(&self, server: ServerIndex) -> u64 {
        let missed = &self.history.missed[server.as_usize()];
        let others = self.history.missed.iter().zip(0..).filter(|(_, index)| *index != server.0);
        let both: u64 = others.map(|(other, _)| missed.common_pages(other)).sum();
        missed.pages().saturating_sub(both)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// The region is made at the server.
    Naming,
    Reading,
    Writing,
}

/// A part of a region on its way to a server that has missed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub to: ServerIndex,
    pub of: u32,
    pub pages: Extent,
    pub step: Step,
    /// Its pages were changed while it was read.
    pub void: bool,
}

#[derive(Clone, Debug, Default)]
struct Target {
    behind: bool,
    /// Where to look for the next piece.
    region: u32,
    page: u64,
    pass_ends: Time,
}

/// All regions; and of those with two holders, what each server has missed.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub regions: BTreeMap<u32, Region>,
    /// Where there are two.
    pub placement: Option<Placement>,
    targets: Vec<Target>,
    lost: Vec<ServerIndex>,
    pub pieces: [Option<Piece>; PIECES],
}

impl Copies {
    pub fn place(&mut self, placement: &Placement, servers: usize) {
        self.placement = placement.pairs().iter().any(|pair| pair.copy.is_some()).then(|| placement.clone());
        self.targets = vec![Target::default(); servers];
    }

    pub fn is_behind(&self, server: ServerIndex) -> bool {
        self.targets.get(server.as_usize()).is_some_and(|target| target.behind)
    }

    /// Whether the server has missed something, be it gone for good.
    pub fn lacks(&self, server: ServerIndex) -> bool {
        let lacks = |region: &Region| !region.history.missed[server.as_usize()].is_empty();
        self.is_behind(server) || self.regions.values().any(lacks)
    }

    /// Whether the server has all that there is, and another one has it too.
    pub fn has_all(&self, server: ServerIndex) -> bool {
        !self.is_behind(server) && (self.lost.is_empty() || !self.lacks(server))
    }

    pub fn are_behind(&self) -> bool {
        self.targets.iter().any(|target| target.behind)
    }

    /// Looks whether the server has missed something. True: that has changed.
    pub fn look(&mut self, server: ServerIndex, now: Time) -> bool {
        let Some(target) = self.targets.get_mut(server.as_usize()) else { return false };
        let is_behind = |placement: &Placement| {
            self.regions.values().any(|region| region.is_behind(server, placement, &self.lost))
        };
        let behind = self.placement.as_ref().is_some_and(is_behind);
        if behind && !target.behind {
            *target = Target { behind, region: 0, page: 0, pass_ends: now + PASS };
            return true;
        }
        std::mem::replace(&mut target.behind, behind) != behind
    }

    /// These pages of a region were stored, or will be.
    pub fn stored(&mut self, of: u32, extent: Extent) {
        let (Some(placement), Some(region)) = (&self.placement, self.regions.get_mut(&of)) else { return };
        let stripe = u64::from(placement.stripe_pages());
        let end = extent.end().0.next_multiple_of(stripe);
        region.history.stored.insert_range(extent.first.0 / stripe * stripe, end);
    }

    /// The server missed a change of those of these pages that it holds. True: it had missed nothing before.
    pub fn miss(&mut self, server: ServerIndex, of: u32, pages: &[Extent], now: Time) -> bool {
        let (Some(placement), Some(region)) = (&self.placement, self.regions.get_mut(&of)) else {
            return false;
        };
        // More than was missed must not be what the other holder has missed.
        let missed = region.history.missed.iter().zip(&self.targets).zip(0..);
        let exact = { missed }
            .any(|((missed, target), index)| index != server.0 && (target.behind || !missed.is_empty()));
        let missed = &mut region.history.missed[server.as_usize()];
        let had_all = missed.is_empty();
        for (_, piece) in pages.iter().flat_map(|extent| placement.split_groups(*extent)) {
            if placement.holders(piece.first).iter().any(|holder| holder == server) {
                if exact { missed.insert(piece) } else { missed.insert_about(piece) }
            }
        }
        (!self.is_behind(server) && self.look(server, now)) || had_all
    }

    /// The server has these pages as they were changed last. True: it has missed nothing else of the region.
    pub fn repaired(&mut self, server: ServerIndex, of: u32, pages: &[Extent]) -> bool {
        let Some(region) = self.regions.get_mut(&of) else { return false };
        let missed = &mut region.history.missed[server.as_usize()];
        pages.iter().for_each(|extent| missed.remove(*extent));
        missed.is_empty()
    }

    /// The server is lost: what it has missed is of no interest, and what others have missed cannot come from it.
    pub fn forget(&mut self, server: ServerIndex) {
        if let Some(target) = self.targets.get_mut(server.as_usize()) {
            target.behind = false;
        }
        if !self.lost.contains(&server) {
            self.lost.push(server);
        }
    }

    /// The server, which was lost, is joined anew. It has no region, and so nothing of one.
    pub fn renew(&mut self, server: ServerIndex, forgets: bool, is_found: bool) {
        for region in self.regions.values_mut().filter(|_| forgets) {
            region.names[server.as_usize()] = RegionId(0);
            region.history.missed[server.as_usize()] = PageSet::default();
        }
        self.lost.retain(|lost| *lost != server || !is_found);
    }

    /// Whether all regions have a name at the server.
    pub fn are_named(&self, server: ServerIndex) -> bool {
        self.regions.values().all(|region| !region.placed || !region.is_absent(server))
    }

    /// These pages change: what is being read of them is of no use.
    pub fn changing(&mut self, of: u32, extent: Extent) {
        for piece in self.pieces.iter_mut().flatten().filter(|piece| piece.of == of) {
            piece.void |= piece.pages.first < extent.end() && extent.first < piece.pages.end();
        }
    }

    /// Goes over what the server has missed once more, later: this time there is no room for it.
    pub fn put_off(&mut self, server: ServerIndex, now: Time) {
        let target = &mut self.targets[server.as_usize()];
        (target.region, target.pass_ends) = (u32::MAX, now + PASS * 5);
    }

    /// When the next pass over what this server has missed begins, if there is nothing left of this one.
    pub fn next_pass(&self, server: ServerIndex) -> Option<Time> {
        let target = self.targets.get(server.as_usize()).filter(|target| target.behind)?;
        self.regions.range(target.region..).next().is_none().then_some(target.pass_ends)
    }

    /// The region has a name at the server, and has missed all there that was ever stored.
    pub fn named(&mut self, server: ServerIndex, of: u32, name: RegionId, all: bool) {
        let (Some(placement), Some(region)) = (&self.placement, self.regions.get_mut(&of)) else { return };
        region.names[server.as_usize()] = name;
        if all {
            region.history.missed[server.as_usize()] = held(placement, server, &region.history.stored);
        }
        let target = &mut self.targets[server.as_usize()];
        (target.region, target.page) = (target.region, target.page).min((of, 0));
    }

    /// The next piece for a server, of at most so many pages, as long as a pass lasts. `takes`: whether this part can be read now, and how many
    /// of its pages at once.
    pub fn next_piece(
        &mut self,
        server: ServerIndex,
        now: Time,
        most: u32,
        mut takes: impl FnMut(&Region, u32, ServerIndex, Extent) -> Option<u32>,
    ) -> Option<Piece> {
        let placement = self.placement.as_ref()?;
        let stripe = u64::from(placement.stripe_pages());
        let target = &mut self.targets[server.as_usize()];
        let piece = |of, pages, step| Some(Piece { to: server, of, pages, step, void: false });
        if now >= target.pass_ends && self.regions.range(target.region..).next().is_none() {
            *target = Target { behind: true, region: 0, page: 0, pass_ends: now + PASS };
        }
        while let Some((of, region)) = self.regions.range_mut(target.region..).next() {
            if *of > target.region {
                (target.region, target.page) = (*of, 0);
            }
            let is_at_work = |first: PageIndex| {
                let same = |piece: &&Piece| piece.to == server && piece.of == *of;
                self.pieces.iter().flatten().filter(same).find(|piece| piece.pages.contains(first))
            };
            if region.is_absent(server) {
                (target.region, target.page) = (of + 1, 0);
                let named = self.pieces.iter().flatten().any(|piece| piece.to == server && piece.of == *of);
                if !named {
                    return piece(*of, Extent::new(PageIndex(0), 0), Step::Naming);
                }
                continue;
            }
            let missed = &region.history.missed;
            let Some((first, end)) = missed[server.as_usize()].next_from(PageIndex(target.page)) else {
                (target.region, target.page) = (of + 1, 0);
                continue;
            };
            let stripe_ends = (first.0 / stripe + 1) * stripe;
            let count = u32::try_from(end.0.min(stripe_ends) - first.0).expect("less than a stripe");
            let mut extent = Extent::new(first, count.min(most));
            let mut holders = placement.holders(first).iter();
            let others = holders.by_ref().filter(|other| *other != server).collect::<Vec<_>>();
            let [from] = others[..] else {
                // It only came to be in the set with others.
                region.history.missed[server.as_usize()].remove(extent);
                continue;
            };
            if let Some((from, to)) =
                missed[from.as_usize()].next_from(first).filter(|of| of.0 < extent.end())
            {
                // The other one has missed these.
                if from == first {
                    target.page = to.0;
                    continue;
                }
                extent.count = u32::try_from(from.0 - first.0).expect("within the piece");
            }
            if let Some(busy) = is_at_work(first) {
                target.page = busy.pages.end().0;
                continue;
            }
            if let Some(count) = takes(region, *of, from, extent) {
                let pages = Extent::new(first, extent.count.min(count));
                target.page = pages.end().0;
                return piece(*of, pages, Step::Reading);
            }
            target.page = extent.end().0;
        }
        None
    }

    /// Pages that the server has missed, and that it is to get; about so many, where it has a region yet to be made.
    pub fn missed_pages(&self, server: ServerIndex) -> u64 {
        let Some(placement) = &self.placement else { return 0 };
        // As large a part of all as of the places.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let part = |pages: u64| (pages as f64 * (2.0 - placement.copies_without(|of| of == server))) as u64;
        let of = |region: &Region| match region.is_absent(server) {
            true => part(region.history.stored.pages()),
            false => region.missed_alone(server),
        };
        let left = (0..).zip(&self.targets).any(|(index, _)| {
            let other = ServerIndex(index);
            other != server && !self.lost.contains(&other)
        });
        if !left {
            return 0;
        }
        self.regions.values().filter(|region| region.placed).map(of).sum()
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        let Some(placement) = &self.placement else { return };
        for piece in self.pieces.iter().flatten().filter(|piece| piece.step != Step::Naming) {
            let holds = |holder: ServerIndex| holder == piece.to;
            assert!(placement.holders(piece.pages.first).iter().any(holds), "a piece goes to a holder");
        }
    }

    /// Pages of all regions, in whole stripes.
    pub fn stored_pages(&self) -> u64 {
        self.regions.values().map(|region| region.history.stored.pages()).sum()
    }
}

/// What a server holds of these pages.
fn held(placement: &Placement, server: ServerIndex, pages: &PageSet) -> PageSet {
    let mut set = PageSet::default();
    for (first, end) in pages.ranges() {
        let mut next = first;
        while next < end {
            let count = u32::try_from(end - next).unwrap_or(u32::MAX);
            for (_, piece) in placement.split_groups(Extent::new(PageIndex(next), count)) {
                if placement.holders(piece.first).iter().any(|holder| holder == server) {
                    set.insert(piece);
                }
            }
            next += u64::from(count);
        }
    }
    set
}
