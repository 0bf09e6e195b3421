//! What the holders of pages have, what they have missed, and the pieces that bring them up to date.
//!
//! A holder that is away misses what is stored and discarded: those pages are in its missed set, and it is
//! not asked for them. When it is back, piece after piece is read from the other holder and stored there, and
//! leaves the set. The set may be larger than what was missed, never smaller. What is stored or discarded
//! again meanwhile leaves it with the server's answer: a connection's changes are answered in their order, so
//! the answer to a later one is not there yet.
//!
//! A piece must not bring back what was changed since it was read. So it begins only where no change of its
//! pages is under way, is dropped if one is submitted before it is read, and is stored in the class of all
//! changes: what is submitted later comes to the server later.
//!
//! Which servers hold a page changes where one is *out*: it drains, or others take the place of a lost one
//! ([`Copies::turn`]). Who holds a page from then on has missed it; who held it until then has it *left*, as
//! long as it is not changed, and can be read until all holders have it. Then it is dropped there, by a piece
//! as well. So rebuilding, draining and growing are catching up, and a page in between has no copy less than
//! it should.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rampool_paging::page_set::PageSet;
use rampool_paging::placement::{Holders, Placement, ServerIndex};
use rampool_wire::frame::RegionId;
use rampool_wire::units::{Extent, PageIndex};

use crate::io::Time;
use crate::rule::{Rule, Rules};

/// Pieces under way at once, and pages of one.
pub const PIECES: usize = 4;
pub const PIECE_PAGES: u32 = 32;
/// Pages that a piece drops at most.
const DROPPED_PAGES: u64 = 2048;
/// What could not be made up for is tried again after so long.
pub const PASS: Duration = Duration::from_millis(200);

/// What was stored in a region, and what of it each server has missed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct History {
    /// In whole stripes.
    pub stored: PageSet,
    /// By server; empty: nothing.
    pub missed: Vec<PageSet>,
    /// What lies at servers that do not hold it any more, by server. What of it is missed there is of no use.
    pub left: Vec<PageSet>,
    /// Which servers are out; empty: none but those that came later.
    pub out: Vec<bool>,
}

impl History {
    /// Pages have other holders from now on.
    fn turn(&mut self, from: &Placement, to: &Placement, rules: Rules) {
        let stripe = to.stripe_pages() as usize;
        let Self { stored, missed, left, .. } = self;
        for first in stored.ranges().flat_map(|(first, end)| (first..end).step_by(stripe)) {
            let (page, count) = (PageIndex(first), to.stripe_pages());
            let (before, now) = (from.holders(page), to.holders(page));
            let stripe = Extent::new(page, count);
            for server in before.iter().filter(|of| !now.has(*of)) {
                left[server.as_usize()].insert(stripe);
            }
            for server in now.iter().filter(|of| !before.has(*of)) {
                let (left, missed) = (&mut left[server.as_usize()], &mut missed[server.as_usize()]);
                let is_had = |page: &PageIndex| {
                    left.overlaps(Extent::page(*page)) && !missed.overlaps(Extent::page(*page))
                };
                let had: Vec<PageIndex> = match left.overlaps(stripe) {
                    true => stripe.pages().filter(is_had).collect(),
                    false => Vec::new(),
                };
                left.remove(stripe);
                if rules.keep(Rule::NewHolderMissedAll) {
                    missed.insert(stripe);
                    had.into_iter().for_each(|page| missed.remove(Extent::page(page)));
                }
            }
        }
    }
}

/// A region on its way to another process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HandedOver {
    /// What it is called at each server; 0: that process does without it there.
    pub names: Vec<RegionId>,
    pub history: History,
}

impl HandedOver {
    /// What a process asks for that is in another lease at some servers than the one that names it,
    /// or in another run of them: what the names mean there is nothing of its own. The same for who
    /// gives back what was not taken.
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

impl History {
    fn fit(&mut self, servers: usize) {
        self.missed.resize_with(servers, Default::default);
        self.left.resize_with(servers, Default::default);
    }
}

impl Region {
    pub(crate) fn fit(&mut self, servers: usize) {
        self.names.resize(servers, RegionId(0));
        self.history.fit(servers);
    }

    /// What is left at a server that does not know the region, or soon will not, is nothing.
    pub(crate) fn forget_at(&mut self, server: ServerIndex, leaves: bool) {
        if leaves {
            self.names[server.as_usize()] = RegionId(0);
        }
        if self.is_absent(server) {
            self.history.left[server.as_usize()] = PageSet::default();
        }
    }

    /// Whether the server has missed one of these pages, or all.
    pub(crate) fn has_missed(&self, server: ServerIndex, pages: &[Extent]) -> bool {
        let missed = &self.history.missed[server.as_usize()];
        self.is_absent(server) || pages.iter().any(|extent| missed.overlaps(*extent))
    }

    /// Whether some of these pages are left at the server.
    pub(crate) fn has_left(&self, server: ServerIndex, pages: Extent) -> bool {
        self.history.left[server.as_usize()].overlaps(pages)
    }

    pub(crate) fn is_absent(&self, server: ServerIndex) -> bool {
        self.names[server.as_usize()].0 == 0
    }

    /// The first of these pages that the server has, whether it is to hold them or has them left.
    pub(crate) fn had(&self, server: ServerIndex, within: Extent, placement: &Placement) -> Option<Extent> {
        let History { missed, left, .. } = &self.history;
        let (missed, left) = (&missed[server.as_usize()], &left[server.as_usize()]);
        let (mut at, end) = (within.first, within.end());
        while !self.is_absent(server) && at < end {
            let run = match placement.holders(at).has(server) {
                true => Some((at, placement.same_holders(at).min(end))),
                false => left.next_from(at).map(|(from, to)| (from, to.min(end))),
            };
            let (first, mut last) = run.filter(|(first, _)| *first < end)?;
            match missed.next_from(first) {
                Some((from, to)) if from <= first => at = to,
                next => {
                    last = next.map_or(last, |(from, _)| from.min(last));
                    let count = u32::try_from(last.0 - first.0).expect("within what was asked for");
                    return Some(Extent::new(first, count));
                }
            }
        }
        None
    }

    /// Whether the server has all of these pages.
    pub(crate) fn has(&self, server: ServerIndex, pages: &[Extent], placement: &Placement) -> bool {
        let has = |extent: &Extent| {
            let mut rest = *extent;
            while let Some(run) = self.had(server, rest, placement).filter(|run| run.first == rest.first) {
                if run.count == rest.count {
                    return true;
                }
                rest = Extent::new(run.end(), rest.count - run.count);
            }
            false
        };
        pages.iter().all(has)
    }

    /// Whether the server has missed something of what it is to hold, and another one has that, as far as is
    /// known: that one is not lost, and knows the region.
    fn is_behind(&self, server: ServerIndex, placement: &Placement, lost: &[ServerIndex]) -> bool {
        let other_has = |part: Extent| {
            let others = (0..).take(self.names.len()).map(ServerIndex);
            let mut others = others.filter(|of| *of != server && !lost.contains(of));
            others.any(|of| self.had(of, part, placement).is_some())
        };
        let may_get = |pages: Extent| {
            let mut parts = placement.split_groups(pages).map(|(_, part)| part);
            parts.any(|part| placement.holders(part.first).has(server) && other_has(part))
        };
        let missed = &self.history.missed[server.as_usize()];
        self.placed && (self.is_absent(server) || missed.extents().any(may_get))
    }

    /// Whether all that are to hold these pages have them.
    fn is_whole(&self, pages: Extent, holders: Holders) -> bool {
        holders.iter().all(|of| !self.is_absent(of) && !self.history.missed[of.as_usize()].overlaps(pages))
    }

    /// Whether each of these pages has changed since it was left at a server, or is where it is to be.
    fn is_of_no_use(&self, server: ServerIndex, pages: Extent, placement: &Placement) -> bool {
        let holders = placement.holders(pages.first);
        let missed = &self.history.missed[server.as_usize()];
        let mut of_use = pages.pages().filter(|page| !missed.overlaps(Extent::page(*page)));
        self.is_whole(pages, holders) || of_use.all(|page| self.is_whole(Extent::page(page), holders))
    }

    /// How many pages the server has missed, and no other one.
    fn missed_alone(&self, server: ServerIndex) -> u64 {
        let missed = &self.history.missed[server.as_usize()];
        let others = self.history.missed.iter().zip(0..).filter(|(_, index)| *index != server.0);
        let both: u64 = others.map(|(other, _)| missed.common_pages(other)).sum();
        let left = missed.common_pages(&self.history.left[server.as_usize()]);
        missed.pages().saturating_sub(both + left)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// The region is made at the server.
    Naming,
    Reading,
    Writing,
    /// What other servers hold now is dropped.
    Dropping,
}

/// A part of a region on its way to a server that has missed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub to: ServerIndex,
    pub from: ServerIndex,
    pub of: u32,
    pub pages: Extent,
    pub step: Step,
    /// Its pages, or their holders, were changed meanwhile.
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

/// All regions; and of those whose pages may have several holders, what each server has missed.
#[derive(Debug)]
pub(crate) struct Copies {
    pub regions: BTreeMap<u32, Region>,
    pub placement: Arc<Placement>,
    /// Whether servers' misses are noted.
    pub tracked: bool,
    /// With all servers that there were at first; those that came later, with what they lend; which are out.
    base: Option<Placement>,
    grown: Vec<(ServerIndex, u64)>,
    pub out: Vec<bool>,
    targets: Vec<Target>,
    /// The same, of what is to be dropped.
    drops: Vec<Target>,
    lost: Vec<ServerIndex>,
    pub pieces: [Option<Piece>; PIECES],
}

impl Default for Copies {
    fn default() -> Self {
        Self {
            regions: BTreeMap::new(),
            placement: Arc::new(Placement::new(&[1], 1, 1).expect("one server")),
            tracked: false,
            base: None,
            grown: Vec::new(),
            out: Vec::new(),
            targets: Vec::new(),
            drops: Vec::new(),
            lost: Vec::new(),
            pieces: Default::default(),
        }
    }
}

impl Copies {
    pub fn place(&mut self, placement: &Placement, servers: usize) {
        self.tracked = placement.pairs().iter().any(|pair| pair.copy.is_some());
        (self.placement, self.base) = (Arc::new(placement.clone()), Some(placement.clone()));
        self.out = vec![false; servers];
        self.targets = vec![Target::default(); servers];
        self.drops = vec![Target::default(); servers];
    }

    /// As that, for regions that lie at the first holders alone.
    pub fn place_alone(&mut self, placement: &Placement, servers: usize) {
        self.place(placement, servers);
        (self.tracked, self.placement) = (false, Arc::new(placement.alone()));
    }

    /// There is one more server, which lends so much; it is out at first.
    pub fn grow(&mut self, server: ServerIndex, weight: u64) {
        self.grown.push((server, weight));
        self.out.push(true);
        self.targets.push(Target::default());
        self.drops.push(Target::default());
        for region in self.regions.values_mut() {
            region.fit(self.out.len());
        }
    }

    /// Where pages lie if these servers are out.
    fn view(&self, out: &[bool]) -> Placement {
        let mut view = self.base.clone().expect("it was placed");
        for (server, weight) in self.grown.iter().filter(|(of, _)| out.get(of.as_usize()) == Some(&false)) {
            view = view.with(*server, *weight);
        }
        view.without(|of| out.get(of.as_usize()) == Some(&true))
    }

    /// Pages lie where they do without these servers, from now on.
    pub fn turn(&mut self, out: Vec<bool>, rules: Rules) {
        let to = Arc::new(self.view(&out));
        for region in self.regions.values_mut().filter(|region| region.placed) {
            region.history.turn(&self.placement, &to, rules);
        }
        if rules.keep(Rule::VoidWhereHoldersChange) {
            self.pieces.iter_mut().flatten().for_each(|piece| piece.void = true);
        }
        (self.placement, self.out) = (to, out);
        for target in &mut self.drops {
            *target = Target { behind: true, ..Target::default() };
        }
    }

    /// What a region has left at servers is to be dropped there.
    pub fn drop_anew(&mut self, region: &Region) {
        for (target, left) in self.drops.iter_mut().zip(&region.history.left) {
            target.behind |= !left.is_empty();
        }
    }

    /// What is known of a region of another process, as of where pages lie here.
    pub fn own(&self, mut history: History, rules: Rules) -> History {
        history.fit(self.out.len());
        let theirs = self.canonical(&history.out);
        if self.tracked && theirs != self.out && rules.keep(Rule::OtherViewIsTurned) {
            history.turn(&self.view(&theirs), &self.placement, rules);
        }
        history.out = Vec::new();
        history
    }

    /// The same as of where pages lie while no server is out.
    pub fn as_placed(&self, mut history: History, rules: Rules) -> History {
        history.fit(self.out.len());
        let theirs = self.canonical(&history.out);
        if theirs.contains(&true) {
            history.turn(&self.view(&theirs), &self.view(&self.canonical(&[])), rules);
        }
        while history.missed.last().is_some_and(PageSet::is_empty) {
            history.missed.pop();
        }
        history
    }

    /// Servers that are not named are out if they came later.
    fn canonical(&self, out: &[bool]) -> Vec<bool> {
        let came_later = |index: usize| self.grown.iter().any(|(of, _)| of.as_usize() == index);
        (0..self.out.len()).map(|index| out.get(index).copied().unwrap_or(came_later(index))).collect()
    }

    /// Which servers are out, for another process.
    pub fn told_out(&self) -> Vec<bool> {
        if self.out == self.canonical(&[]) { Vec::new() } else { self.out.clone() }
    }

    /// Whether something lies at the server that it does not hold any more.
    pub fn has_left(&self, server: ServerIndex) -> bool {
        let left = |region: &Region| !region.history.left[server.as_usize()].is_empty();
        self.regions.values().any(left)
    }

    pub fn is_behind(&self, server: ServerIndex) -> bool {
        self.targets.get(server.as_usize()).is_some_and(|target| target.behind)
    }

    /// Whether the server has missed something, be it gone for good.
    pub fn lacks(&self, server: ServerIndex) -> bool {
        let lacks = |region: &Region| {
            let missed = &region.history.missed[server.as_usize()];
            missed.pages() > missed.common_pages(&region.history.left[server.as_usize()])
        };
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
        let behind = self.tracked && is_behind(&self.placement);
        if behind && !target.behind {
            *target = Target { behind, region: 0, page: 0, pass_ends: now + PASS };
            return true;
        }
        std::mem::replace(&mut target.behind, behind) != behind
    }

    /// These pages of a region were stored, or will be.
    pub fn stored(&mut self, of: u32, extent: Extent) {
        let (true, Some(region)) = (self.tracked, self.regions.get_mut(&of)) else { return };
        let stripe = u64::from(self.placement.stripe_pages());
        let end = extent.end().0.next_multiple_of(stripe);
        region.history.stored.insert_range(extent.first.0 / stripe * stripe, end);
    }

    /// These pages change: what is left of them anywhere is of no use.
    pub fn outdate(&mut self, of: u32, extent: Extent) {
        let Some(region) = self.regions.get_mut(&of) else { return };
        let History { missed, left, .. } = &mut region.history;
        for (missed, left) in missed.iter_mut().zip(left).filter(|(_, left)| !left.is_empty()) {
            left.parts_of(extent).for_each(|part| missed.insert(part));
        }
    }

    /// The server missed a change of those of these pages that it holds. True: it had missed nothing before.
    pub fn miss(&mut self, server: ServerIndex, of: u32, pages: &[Extent], now: Time) -> bool {
        let (true, Some(region)) = (self.tracked, self.regions.get_mut(&of)) else { return false };
        let placement = &self.placement;
        // More than was missed must not be what the other holder has missed.
        let missed = region.history.missed.iter().zip(&self.targets).zip(0..);
        let exact = { missed }
            .any(|((missed, target), index)| index != server.0 && (target.behind || !missed.is_empty()));
        let missed = &mut region.history.missed[server.as_usize()];
        let had_all = missed.is_empty();
        for (_, piece) in pages.iter().flat_map(|extent| placement.split_groups(*extent)) {
            region.history.left[server.as_usize()].parts_of(piece).for_each(|part| missed.insert(part));
            if placement.holders(piece.first).has(server) {
                if exact { missed.insert(piece) } else { missed.insert_about(piece) }
            }
        }
        (!self.is_behind(server) && self.look(server, now)) || had_all
    }

    /// The server has these pages as they were changed last. True: it has missed nothing else of the region.
    pub fn repaired(&mut self, server: ServerIndex, of: u32, pages: &[Extent]) -> bool {
        let Some(region) = self.regions.get_mut(&of) else { return false };
        let missed = &mut region.history.missed[server.as_usize()];
        // What is left where it was changed by the way may be changed elsewhere only since.
        let parts =
            pages.iter().flat_map(|extent| self.placement.split_groups(*extent)).map(|(_, part)| part);
        let held = parts.filter(|part| self.placement.holders(part.first).has(server));
        held.for_each(|part| missed.remove(part));
        missed.is_empty()
    }

    /// The server is lost: what it has missed is of no interest, and what others have missed
    /// cannot come from it.
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
            region.history.left[server.as_usize()] = PageSet::default();
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
        let (true, Some(region)) = (self.tracked, self.regions.get_mut(&of)) else { return };
        region.names[server.as_usize()] = name;
        if all {
            region.history.missed[server.as_usize()] = held(&self.placement, server, &region.history.stored);
            region.history.left[server.as_usize()] = PageSet::default();
        }
        let target = &mut self.targets[server.as_usize()];
        (target.region, target.page) = (target.region, target.page).min((of, 0));
    }

    /// The next piece for a server, of at most so many pages, as long as a pass lasts. `takes`: whether this
    /// part can be read now, and how many of its pages at once.
    pub fn next_piece(
        &mut self,
        server: ServerIndex,
        now: Time,
        most: u32,
        mut takes: impl FnMut(&Region, u32, ServerIndex, Extent) -> Option<u32>,
    ) -> Option<Piece> {
        let placement = &*self.placement;
        let stripe = u64::from(placement.stripe_pages());
        let target = &mut self.targets[server.as_usize()];
        let piece = |of, pages, step| Some(Piece { to: server, from: server, of, pages, step, void: false });
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
            let missed = &region.history.missed[server.as_usize()];
            let Some((first, end)) = missed.next_from(PageIndex(target.page)) else {
                (target.region, target.page) = (of + 1, 0);
                continue;
            };
            let stripe_ends = (first.0 / stripe + 1) * stripe;
            let count = u32::try_from(end.0.min(stripe_ends) - first.0).expect("less than a stripe");
            let extent = Extent::new(first, count.min(most));
            if !placement.holders(first).has(server) {
                if region.history.left[server.as_usize()].overlaps(extent) {
                    target.page = extent.end().0;
                } else {
                    // It only came to be in the set with others.
                    region.history.missed[server.as_usize()].remove(extent);
                }
                continue;
            }
            if let Some(busy) = is_at_work(first) {
                target.page = busy.pages.end().0;
                continue;
            }
            let others = sources(placement, first, region.names.len()).filter(|of| *of != server);
            let mut next = extent.end();
            for from in others {
                match region.had(from, extent, placement) {
                    Some(had) if had.first == first => {
                        if let Some(count) = takes(region, *of, from, had) {
                            let pages = Extent::new(first, had.count.min(count));
                            target.page = pages.end().0;
                            return Some(Piece { from, ..piece(*of, pages, Step::Reading)? });
                        }
                    }
                    Some(had) => next = next.min(had.first),
                    None => {}
                }
            }
            target.page = next.0;
        }
        None
    }

    /// What a server can drop now: the holders have it, or it has changed. `is_read`: whether something is
    /// being read of it there.
    pub fn next_drop(
        &mut self,
        server: ServerIndex,
        now: Time,
        rules: Rules,
        is_read: impl Fn(u32, Extent) -> bool,
    ) -> Option<Piece> {
        let placement = &*self.placement;
        let stripe = u64::from(placement.stripe_pages());
        let target = self.drops.get_mut(server.as_usize()).filter(|target| target.behind)?;
        if now >= target.pass_ends && self.regions.range(target.region..).next().is_none() {
            *target = Target { behind: true, region: 0, page: 0, pass_ends: now + PASS };
            target.behind = self.regions.values().any(|of| !of.history.left[server.as_usize()].is_empty());
        }
        while let Some((of, region)) = self.regions.range_mut(target.region..).next() {
            if *of > target.region {
                (target.region, target.page) = (*of, 0);
            }
            let left = &region.history.left[server.as_usize()];
            let next = |from: PageIndex| {
                let (first, end) = left.next_from(from)?;
                let end = end.0.min((first.0 / stripe + 1) * stripe);
                Some(Extent::new(first, u32::try_from(end - first.0).expect("less than a stripe")))
            };
            let is_done = |part: &Extent| {
                region.is_of_no_use(server, *part, placement) || !rules.keep(Rule::LeftUntilCopied)
            };
            let Some(mut pages) = next(PageIndex(target.page)).filter(|_| !region.is_absent(server)) else {
                (target.region, target.page) = (of + 1, 0);
                continue;
            };
            target.page = pages.end().0;
            if !is_done(&pages) {
                continue;
            }
            // What lies between is not there where it holds nothing.
            let holds = !self.out[server.as_usize()];
            let more = |pages: Extent| {
                let follows = |part: &Extent| {
                    part.end().0 - pages.first.0 <= DROPPED_PAGES && (part.first == pages.end() || !holds)
                };
                next(pages.end()).filter(follows).filter(is_done)
            };
            while let Some(part) = more(pages) {
                let count = u32::try_from(part.end().0 - pages.first.0).expect("a few");
                pages = Extent::new(pages.first, count);
            }
            target.page = pages.end().0;
            let mut pieces = self.pieces.iter().flatten();
            if pieces.any(|piece| (piece.to, piece.of) == (server, *of)) || is_read(*of, pages) {
                continue;
            }
            let parts: Vec<Extent> = left.parts_of(pages).collect();
            let missed = &mut region.history.missed[server.as_usize()];
            parts.into_iter().for_each(|part| missed.insert(part));
            return Some(Piece {
                to: server,
                from: server,
                of: *of,
                pages,
                step: Step::Dropping,
                void: false,
            });
        }
        None
    }

    /// A server has dropped these pages.
    pub fn dropped(&mut self, server: ServerIndex, of: u32, pages: Extent) {
        let Some(region) = self.regions.get_mut(&of) else { return };
        let History { missed, left, .. } = &mut region.history;
        let (missed, left) = (&mut missed[server.as_usize()], &mut left[server.as_usize()]);
        left.parts_of(pages).for_each(|part| missed.remove(part));
        left.remove(pages);
    }

    /// Whether the server may have something to drop, and when it is looked at next if there is nothing now.
    pub fn next_drops(&self, server: ServerIndex) -> Option<Option<Time>> {
        let target = self.drops.get(server.as_usize()).filter(|target| target.behind)?;
        Some(self.regions.range(target.region..).next().is_none().then_some(target.pass_ends))
    }

    /// Pages that the server has missed, and that it is to get; about so many, where it has a
    /// region yet to be made.
    pub fn missed_pages(&self, server: ServerIndex) -> u64 {
        if !self.tracked {
            return 0;
        }
        // As large a part of all as of the places.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let part = |pages: u64| (pages as f64 * self.placement.part(server)) as u64;
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
        let copies = |piece: &&Piece| matches!(piece.step, Step::Reading | Step::Writing) && !piece.void;
        for piece in self.pieces.iter().flatten().filter(copies) {
            assert!(self.placement.holders(piece.pages.first).has(piece.to), "a piece goes to a holder");
        }
    }

    /// Pages of all regions, in whole stripes.
    pub fn stored_pages(&self) -> u64 {
        self.regions.values().map(|region| region.history.stored.pages()).sum()
    }
}

/// Servers in the order in which they are asked for a page: first those that are to hold it.
pub(crate) fn sources(
    placement: &Placement,
    page: PageIndex,
    servers: usize,
) -> impl Iterator<Item = ServerIndex> {
    let holders = placement.holders(page);
    let others = (0..).take(servers).map(ServerIndex).filter(move |of| !holders.has(*of));
    holders.iter().chain(others)
}

/// What a server holds of these pages.
fn held(placement: &Placement, server: ServerIndex, pages: &PageSet) -> PageSet {
    let mut set = PageSet::default();
    for (first, end) in pages.ranges() {
        let mut next = first;
        while next < end {
            let count = u32::try_from(end - next).unwrap_or(u32::MAX);
            for (_, piece) in placement.split_groups(Extent::new(PageIndex(next), count)) {
                if placement.holders(piece.first).has(server) {
                    set.insert(piece);
                }
            }
            next += u64::from(count);
        }
    }
    set
}
