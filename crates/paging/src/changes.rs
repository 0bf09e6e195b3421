//! Changes of addresses, in the order in which they were made.
//!
//! `munmap`, `mremap` and `fork` tell of a change after they have made it, each thread on its own. A thread that
//! is preempted in between is overtaken by one that moves its memory to the place that was left: the arrival is
//! read before the departure. Taken in that order, the pages that arrive are lost with those that leave.
//!
//! From before a change until its event was read and its caller runs again, the kernel counts it as under way.
//! So changes are collected until the kernel counts none: then every change made so far is among them, and the
//! order is unknown only within the collection. [`order`] finds it:
//!
//! * Changes that touch no common address have no order. Where nothing is moved to or from a place that another
//!   change touches, the order of reading is right.
//! * Otherwise the orders are searched in which each arrival finds its place free, and what is known then is
//!   what the kernel says: which addresses are registered, and which pages are present. Pages that are at the
//!   servers are absent, and those that count as resident are present.
//! * `madvise` tells before it changes anything: what was read before it was made before it, and what arrives
//!   and was read after it arrived after it.
//! * A moving `mremap` tells of the place that it left once more, as of an unmapping of the same range. The two
//!   are one change. Where it does not (`MREMAP_DONTUNMAP`), the place stays mapped and registered, and is empty.
//!   Whether an unmapping tells of a place that was left or of one that stayed cannot always be told. Where an
//!   order is in doubt, and each move may have left its place, they are taken to have done so.
//! * A place counts as free where no page is known, and nothing has arrived. There may be memory all the same: a
//!   mapping that grows in place raises no event. So an order is worse by each place where memory has arrived
//!   and none is known, and by each move from where nothing is known.
//! * The order of reading is right unless a thread was preempted between a change and its event. So an order is
//!   worse, too, by each change that was overtaken. Where none was, no other order is looked at that is as good
//!   otherwise: a single thread's changes are never in doubt. Where some were, as many and one more are.
//!
//! If several orders remain, none better than another in both, and differ in pages that are resident, it does
//! not matter which of them is taken, as long as no older content of these pages is used again
//! ([`Order::either`]). Otherwise there is a [`Doubt`], and the program must end.
//!
//! One case is beyond this: a mapping grows in place over what another thread has just left, that thread is
//! preempted before it tells, and the grown part alone is moved or given up before it is touched.

use std::collections::{BTreeMap, BTreeSet};

use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex, push_page};

use crate::space::{AddressSpace, Span, sub_span};

/// Addresses, `[start, end)`.
type Range = (usize, usize);

/// One change, as an event tells of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Unmap {
        start: usize,
        end: usize,
    },
    Move {
        from: usize,
        to: usize,
        bytes: usize,
    },
    /// The content is given up; nothing moves.
    GiveUp {
        start: usize,
        end: usize,
    },
    Fork,
}

impl Change {
    fn leaves(self) -> Option<Range> {
        match self {
            Change::Unmap { start, end } | Change::GiveUp { start, end } => Some((start, end)),
            Change::Move { from, bytes, .. } => Some((from, from + bytes)),
            Change::Fork => None,
        }
    }

    fn arrives(self) -> Option<Range> {
        match self {
            Change::Move { to, bytes, .. } => Some((to, to + bytes)),
            _ => None,
        }
    }

    /// The addresses that it touches, `[start, end)` each.
    pub fn ranges(self) -> impl Iterator<Item = Range> {
        [self.leaves(), self.arrives()].into_iter().flatten()
    }

    fn meets(self, range: Range) -> bool {
        self.ranges().any(|own| overlap(own, range))
    }

    fn conflicts(self, other: Self) -> bool {
        other.ranges().any(|range| self.meets(range))
    }
}

/// What the kernel and the cache say while no change is under way.
pub trait Facts {
    /// Whether the page at `address` is mapped and registered.
    fn is_registered(&mut self, address: usize) -> bool;

    /// Whether the registered memory of `[start, end)` has been moved there, and is not a mapping from below
    /// that has grown: a mapping begins at `start`, or a page is present.
    fn has_arrived(&mut self, start: usize, end: usize) -> bool;

    /// Whether the kernel contradicts that these pages are at `start`: one that counts as resident is absent
    /// there, or one whose content is elsewhere is present.
    fn contradicts(&mut self, start: usize, extent: Extent) -> bool;

    /// Whether `page` counts as resident.
    fn is_resident(&mut self, page: PageIndex) -> bool;

    /// Whether the child of the fork that is number `fork` of the changes has registered memory at `address`;
    /// `None` if that cannot be told.
    fn child_has(&mut self, fork: usize, address: usize) -> Option<bool>;
}

/// The order in which changes were made.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Order {
    /// Each change once, by its number in the order of reading.
    pub steps: Vec<usize>,
    /// These pages are resident, and hold what they hold: whether the cache knows older content of these very
    /// pages, or of others that are gone, cannot be told.
    pub either: Vec<Extent>,
}

/// The order cannot be told, and it matters: what is at these addresses is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "threads of the program unmapped and moved memory at {start:#x} to {end:#x} at the same time, and what is there now cannot be told"
)]
pub struct Doubt {
    pub start: usize,
    pub end: usize,
}

/// Rules that hold except where something happened that no event tells of.
#[derive(Clone, Copy)]
struct Rules {
    /// What the cache says of pages is what the kernel says.
    presence: bool,
    /// Arrivals find their places free. Not so in a child that was forked between a change and its event.
    free: bool,
}

const RULES: [Rules; 4] = [
    Rules { presence: true, free: true },
    Rules { presence: false, free: true },
    Rules { presence: true, free: false },
    Rules { presence: false, free: false },
];

/// The longest search: so many orders begun.
const MOST_NODES: usize = 50_000;

/// So many changes may have been overtaken in a group: each is a thread that was preempted before it told of it.
const MOST_OVERTAKEN: usize = 4;

/// Finds the order of `changes`, which are all that were made since the last ones were applied to `space`.
///
/// # Errors
/// [`Doubt`], if several orders with different outcomes are possible.
pub fn order(changes: &[Change], space: &AddressSpace, facts: &mut impl Facts) -> Result<Order, Doubt> {
    let near = trailing(changes, Told::Next);
    order_of(changes, &near, space, facts).or_else(|doubt| {
        let same = trailing(changes, Told::Same);
        let moves = changes.iter().filter(|change| matches!(change, Change::Move { .. })).count();
        if same.len() < moves || same == near {
            return Err(doubt);
        }
        order_of(changes, &same, space, facts)
    })
}

fn order_of(
    changes: &[Change],
    trailing: &[(usize, usize)],
    space: &AddressSpace,
    facts: &mut impl Facts,
) -> Result<Order, Doubt> {
    let forks = changes.contains(&Change::Fork);
    let ends_move = |number: usize| trailing.iter().any(|&(_, unmap)| unmap == number);
    let moved: Vec<usize> =
        (0..changes.len()).filter(|&number| changes[number] != Change::Fork && !ends_move(number)).collect();
    let contested = moved.iter().any(|&number| is_contested(number, &moved, changes, space));
    if !contested && (!forks || moved.is_empty()) {
        return Ok(Order { steps: (0..changes.len()).collect(), either: Vec::new() });
    }
    let mut either = Vec::new();
    let mut ordered = Vec::new();
    for group in groups(&moved, changes) {
        let search = group.iter().any(|&number| is_contested(number, &group, changes, space));
        let steps =
            if search { Search::run(&group, changes, trailing, space, facts, &mut either)? } else { group };
        ordered.push(steps);
    }
    let mut steps = Vec::with_capacity(changes.len());
    let mut emit = |number: usize| {
        steps.push(number);
        steps.extend(trailing.iter().filter(|(of, _)| *of == number).map(|(_, unmap)| *unmap));
    };
    let mut cuts: Vec<(usize, Vec<Cut>)> = Vec::new();
    for fork in (0..changes.len()).filter(|&number| changes[number] == Change::Fork) {
        let cut = ordered
            .iter()
            .map(|steps| cut(fork, steps, changes, trailing, space, facts))
            .collect::<Result<_, _>>()?;
        cuts.push((fork, cut));
    }
    cuts.sort_by_key(|(fork, cut)| (cut.iter().map(|cut| cut.least).sum::<usize>(), *fork));
    let mut done = vec![0; ordered.len()];
    for (fork, cut) in cuts {
        for ((steps, done), cut) in ordered.iter().zip(&mut done).zip(cut) {
            while *done < cut.nearest {
                emit(steps[*done]);
                *done += 1;
            }
        }
        emit(fork);
    }
    for (steps, done) in ordered.iter().zip(done) {
        steps[done..].iter().copied().for_each(&mut emit);
    }
    Ok(Order { steps, either })
}

/// Which move an unmapping may belong to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    /// The last one from there, or from a part of it, if it is of the same range. Where something else was moved
    /// from there in between, the place may have stayed mapped, and the unmapping counts as one of its own.
    Next,
    /// The last one of the same range. That is right where each move leaves its place.
    Same,
}

/// Moves, each with the unmapping that tells of the place that it has left.
fn trailing(changes: &[Change], told: Told) -> Vec<(usize, usize)> {
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    for (number, change) in changes.iter().enumerate() {
        let Change::Unmap { start, end } = *change else { continue };
        let left = |of: usize| changes[of].leaves().filter(|_| matches!(changes[of], Change::Move { .. }));
        let is_unpaired = |of: &usize| !pairs.iter().any(|(before, _)| before == of);
        let is_same = |of: &usize| left(*of) == Some((start, end)) && is_unpaired(of);
        let mut before =
            (0..number).rev().filter(|of| left(*of).is_some_and(|left| overlap(left, (start, end))));
        let of = match told {
            Told::Next => before.next().filter(is_same),
            Told::Same => before.find(is_same),
        };
        pairs.extend(of.map(|of| (of, number)));
    }
    pairs
}

/// Whether change `number`, if it is a move, leaves the place mapped that it comes from.
fn keeps_place(number: usize, trailing: &[(usize, usize)]) -> bool {
    !trailing.iter().any(|(of, _)| *of == number)
}

/// Whether it matters when this was made: pages arrive where others are known, or where another change takes
/// something away or brings it; or they are moved from where another change does.
fn is_contested(number: usize, group: &[usize], changes: &[Change], space: &AddressSpace) -> bool {
    let change = changes[number];
    let (Some(place), Some(left)) = (change.arrives(), change.leaves()) else { return false };
    let others = || group.iter().filter(|other| **other != number).map(|other| changes[*other]);
    let mut contested = others().any(|other| other.meets(place))
        || others().any(|other| !matches!(other, Change::GiveUp { .. }) && other.meets(left));
    space.extents_in(place.0, place.1, |_, _| contested = true);
    contested
}

/// The changes that touch common addresses, directly or through others, each group in the order of reading.
fn groups(moved: &[usize], changes: &[Change]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for &number in moved {
        let touches = |group: &Vec<usize>| group.iter().any(|&n| changes[n].conflicts(changes[number]));
        let mut joined: Vec<usize> = groups.extract_if(.., |group| touches(group)).flatten().collect();
        joined.push(number);
        joined.sort_unstable();
        groups.push(joined);
    }
    groups
}

/// How many changes of a group were made before a fork: the least number that is as good as any, and the one
/// that is nearest to the order of reading.
struct Cut {
    least: usize,
    nearest: usize,
}

/// How many of `steps` were made before `fork`, by what the child has.
fn cut(
    fork: usize,
    steps: &[usize],
    changes: &[Change],
    trailing: &[(usize, usize)],
    space: &AddressSpace,
    facts: &mut impl Facts,
) -> Result<Cut, Doubt> {
    let atoms = atoms(steps, changes);
    let read_before = steps.iter().filter(|step| **step < fork).count();
    let mut books = Books::of(space, &atoms);
    let mut best: Vec<(usize, Books)> = Vec::new();
    let (mut least, mut all_told) = (usize::MAX, true);
    for made in 0..=steps.len() {
        let mut wrong = 0;
        for &(start, end) in &atoms {
            let mut before = false;
            books.each(start, end, |at, known| {
                let there = facts.child_has(fork, at);
                all_told &= there.is_some();
                wrong += match (known.is_some(), there) {
                    (true, Some(false)) => 2,
                    (false, Some(there)) if books.is_taken((at, at + OS_PAGE_BYTES)) => {
                        usize::from(!there) * 2
                    }
                    // What follows known pages has grown in place.
                    (false, Some(true)) if !before => 1,
                    _ => 0,
                };
                before = known.is_some();
            });
        }
        if wrong < least {
            least = wrong;
            best.clear();
        }
        if wrong == least {
            best.push((made, books.clone()));
        }
        if let Some(&next) = steps.get(made) {
            books.apply(changes[next], keeps_place(next, trailing));
        }
    }
    if all_told && best.iter().any(|(_, books)| books.known != best[0].1.known) {
        return Err(Doubt { start: atoms[0].0, end: atoms[atoms.len() - 1].1 });
    }
    let made = || best.iter().map(|(made, _)| *made);
    let nearest = made().min_by_key(|made| made.abs_diff(read_before)).expect("there is a best one");
    Ok(Cut { least: made().min().expect("there is a best one"), nearest })
}

/// The ranges of these changes, cut at all of their bounds.
fn atoms(group: &[usize], changes: &[Change]) -> Vec<Range> {
    let ranges: Vec<Range> = group.iter().flat_map(|&number| changes[number].ranges()).collect();
    let bounds: BTreeSet<usize> = ranges.iter().flat_map(|&(start, end)| [start, end]).collect();
    let bounds: Vec<usize> = bounds.into_iter().collect();
    let covered = |&atom: &Range| ranges.iter().any(|range| overlap(*range, atom));
    bounds.windows(2).map(|two| (two[0], two[1])).filter(covered).collect()
}

/// What is known of a part of the address space: sorted, and joined where it can be.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct Books {
    known: Vec<Span>,
    /// Where memory has arrived, known or not. Sorted.
    taken: Vec<Range>,
}

impl Books {
    fn of(space: &AddressSpace, atoms: &[Range]) -> Self {
        let mut books = Self::default();
        for &(start, end) in atoms {
            space.extents_in(start, end, |at, extent| {
                books.known.push(Span { start: at, pages: extent.count, first: extent.first });
            });
        }
        books.join();
        books
    }

    fn join(&mut self) {
        self.known.sort_unstable();
        self.known.dedup_by(|span, before| {
            let follows = before.end() == span.start && before.extent().end() == span.first;
            if follows {
                before.pages += span.pages;
            }
            follows
        });
    }

    fn take(&mut self, start: usize, end: usize) -> Vec<Span> {
        let mut taken = Vec::new();
        for span in std::mem::take(&mut self.known) {
            let (from, to) = (span.start.max(start), span.end().min(end));
            if from >= to {
                self.known.push(span);
                continue;
            }
            taken.push(sub_span(span, from, to));
            if span.start < from {
                self.known.push(sub_span(span, span.start, from));
            }
            if to < span.end() {
                self.known.push(sub_span(span, to, span.end()));
            }
        }
        taken
    }

    fn vacate(&mut self, start: usize, end: usize) {
        for (from, to) in std::mem::take(&mut self.taken) {
            let left = [(from, to.min(start)), (from.max(end), to)];
            self.taken.extend(left.into_iter().filter(|part| part.0 < part.1));
        }
    }

    /// What is where it arrives is dropped. `keeps_place`: a move leaves empty memory where it comes from.
    fn apply(&mut self, change: Change, keeps_place: bool) {
        match change {
            Change::Unmap { start, end } => {
                self.take(start, end);
                self.vacate(start, end);
            }
            Change::Move { from, to, bytes } => {
                let moved = self.take(from, from + bytes);
                self.take(to, to + bytes);
                self.vacate(from, from + bytes);
                self.vacate(to, to + bytes);
                self.taken.push((to, to + bytes));
                if keeps_place {
                    self.taken.push((from, from + bytes));
                }
                self.taken.sort_unstable();
                self.known
                    .extend(moved.into_iter().map(|span| Span { start: span.start - from + to, ..span }));
            }
            Change::GiveUp { .. } | Change::Fork => {}
        }
        self.join();
    }

    /// The parts of `[start, end)`: where, and what is known there.
    fn each(&self, start: usize, end: usize, mut each: impl FnMut(usize, Option<Span>)) {
        let mut at = start;
        for span in self.known.iter().filter(|span| overlap((span.start, span.end()), (start, end))) {
            let (from, to) = (span.start.max(start), span.end().min(end));
            if at < from {
                each(at, None);
            }
            each(from, Some(sub_span(*span, from, to)));
            at = to;
        }
        if at < end {
            each(at, None);
        }
    }

    fn page_at(&self, address: usize) -> Option<PageIndex> {
        let span = self.known.iter().find(|span| span.start <= address && address < span.end())?;
        Some(span.first.offset(((address - span.start) / OS_PAGE_BYTES) as u64))
    }

    fn is_free(&self, (start, end): Range) -> bool {
        !self.known.iter().any(|span| overlap((span.start, span.end()), (start, end)))
            && !self.is_taken((start, end))
    }

    fn is_taken(&self, range: Range) -> bool {
        self.taken.iter().any(|taken| overlap(*taken, range))
    }
}

/// A place in the search: what is left to be done, and what is known by now.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    left: Vec<usize>,
    books: Books,
    given_up: Vec<Extent>,
    /// Places where memory has arrived and none is known, and arrivals where something was known.
    cost: usize,
    /// How many changes were put before one that was read earlier.
    overtaken: usize,
}

struct Search<'a, F> {
    changes: &'a [Change],
    trailing: &'a [(usize, usize)],
    atoms: Vec<Range>,
    facts: &'a mut F,
    rules: Rules,
    /// The best orders so far, with different outcomes.
    found: Vec<(Vec<usize>, Books)>,
    /// More than this is worse than what was found.
    most_cost: usize,
    most_overtaken: usize,
    nodes: usize,
    seen: BTreeSet<State>,
    contradictions: BTreeMap<Span, bool>,
}

impl<'a, F: Facts> Search<'a, F> {
    fn run(
        group: &[usize],
        changes: &'a [Change],
        trailing: &'a [(usize, usize)],
        space: &AddressSpace,
        facts: &'a mut F,
        either: &mut Vec<Extent>,
    ) -> Result<Vec<usize>, Doubt> {
        let atoms = atoms(group, changes);
        let doubt = Doubt { start: atoms[0].0, end: atoms[atoms.len() - 1].1 };
        let books = Books::of(space, &atoms);
        let mut search = Self {
            changes,
            trailing,
            atoms,
            facts,
            rules: RULES[0],
            found: Vec::new(),
            most_cost: usize::MAX,
            most_overtaken: 0,
            nodes: 0,
            seen: BTreeSet::new(),
            contradictions: BTreeMap::new(),
        };
        let first = State { left: group.to_vec(), books, given_up: Vec::new(), cost: 0, overtaken: 0 };
        for rules in RULES {
            search.rules = rules;
            let mut best = Vec::new();
            search.most_cost = usize::MAX;
            for most_overtaken in 0..=MOST_OVERTAKEN.min(group.len() - 1) {
                search.most_overtaken = most_overtaken;
                search.nodes = 0;
                search.seen.clear();
                search.explore(first.clone(), &mut Vec::new());
                if search.nodes > MOST_NODES {
                    return Err(doubt);
                }
                let was_found = !best.is_empty();
                best.append(&mut search.found);
                match search.most_cost {
                    _ if was_found => break,
                    usize::MAX => {}
                    // No change is overtaken: an order in which one is must explain more.
                    0 if most_overtaken == 0 => break,
                    cost if most_overtaken == 0 => search.most_cost = cost - 1,
                    _ => {}
                }
            }
            if !best.is_empty() {
                return search.choose(best, doubt, either);
            }
        }
        Err(doubt)
    }

    fn explore(&mut self, state: State, order: &mut Vec<usize>) {
        if state.cost > self.most_cost || self.seen.contains(&state) {
            return;
        }
        self.nodes += 1;
        if self.nodes > MOST_NODES {
            return;
        }
        if state.left.is_empty() {
            if state.cost < self.most_cost {
                self.most_cost = state.cost;
                self.found.clear();
            }
            if !self.found.iter().any(|(_, books)| books.known == state.books.known) {
                self.found.push((order.clone(), state.books));
            }
            return;
        }
        let last = if state.overtaken < self.most_overtaken { state.left.len() } else { 1 };
        for nth in 0..last {
            if let Some(next) = self.step(&state, nth, order.last().copied()) {
                order.push(state.left[nth]);
                self.explore(next, order);
                order.pop();
            }
        }
        self.seen.insert(state);
    }

    /// What follows if the change `nth` of those left is made next; `None` where that cannot be.
    fn step(&mut self, state: &State, nth: usize, last: Option<usize>) -> Option<State> {
        let number = state.left[nth];
        let change = self.changes[number];
        if last.is_some_and(|last| number < last && !change.conflicts(self.changes[last])) {
            // The same, the other way round.
            return None;
        }
        let mut next = state.clone();
        next.left.remove(nth);
        next.overtaken += usize::from(nth > 0);
        if let Change::GiveUp { start, end } = change {
            if nth > 0 {
                return None;
            }
            next.books.each(start, end, |_, known| next.given_up.extend(known.map(|span| span.extent())));
            next.given_up.sort_unstable_by_key(|extent| extent.first);
            next.given_up.dedup();
        }
        if let Some(place) = change.arrives() {
            let gives_up = |n: &usize| matches!(self.changes[*n], Change::GiveUp { .. });
            if state.left[..nth].iter().any(|n| gives_up(n) && self.changes[*n].meets(place)) {
                return None;
            }
            if !next.books.is_free(place) {
                if self.rules.free {
                    return None;
                }
                next.cost += 1;
            }
        }
        if let Change::Move { from, .. } = change
            && next.books.is_free((from, from + OS_PAGE_BYTES))
        {
            // What has grown, and is not known, follows known pages.
            next.cost += 1;
        }
        next.books.apply(change, keeps_place(number, self.trailing));
        let settled: Vec<Range> = self
            .atoms
            .iter()
            .copied()
            .filter(|atom| change.meets(*atom) && !next.left.iter().any(|n| self.changes[*n].meets(*atom)))
            .collect();
        for atom in settled {
            next.cost += self.judge(atom, &next)?;
        }
        Some(next)
    }

    /// Compares what is known of a range that no change left touches with what the kernel says; `None` if it
    /// cannot be.
    fn judge(&mut self, (start, end): Range, state: &State) -> Option<usize> {
        let mut parts = Vec::new();
        state.books.each(start, end, |at, known| parts.push((at, known)));
        let mut cost = 0;
        let ends = parts.iter().skip(1).map(|part| part.0).chain([end]).collect::<Vec<_>>();
        for ((at, known), end) in parts.into_iter().zip(ends) {
            match known {
                Some(span) => {
                    if !self.facts.is_registered(at)
                        || (self.rules.presence && self.is_contradicted(span, state))
                    {
                        return None;
                    }
                }
                None if state.books.is_taken((at, end)) => {
                    if !self.facts.is_registered(at) {
                        return None;
                    }
                }
                None => cost += usize::from(self.facts.is_registered(at) && self.facts.has_arrived(at, end)),
            }
        }
        Some(cost)
    }

    fn is_contradicted(&mut self, span: Span, state: &State) -> bool {
        let mut at = span.start;
        while at < span.end() {
            let page = span.first.offset(((at - span.start) / OS_PAGE_BYTES) as u64);
            // Up to where given-up pages begin or end: these may be there, or not.
            let given_up = state.given_up.iter().find(|extent| extent.contains(page));
            let border = match given_up {
                Some(extent) => extent.end(),
                None => {
                    let next = state.given_up.iter().map(|extent| extent.first).filter(|first| *first > page);
                    next.min().unwrap_or(span.extent().end())
                }
            };
            let pages = usize::try_from(border.0 - page.0).expect("in a span");
            let end = (at + pages * OS_PAGE_BYTES).min(span.end());
            if given_up.is_none() {
                let part = sub_span(span, at, end);
                let facts = &mut *self.facts;
                let no = self
                    .contradictions
                    .entry(part)
                    .or_insert_with(|| facts.contradicts(part.start, part.extent()));
                if *no {
                    return true;
                }
            }
            at = end;
        }
        false
    }

    /// The first of the best orders, if the others do not matter.
    fn choose(
        mut self,
        best: Vec<(Vec<usize>, Books)>,
        doubt: Doubt,
        either: &mut Vec<Extent>,
    ) -> Result<Vec<usize>, Doubt> {
        let mut found = best.into_iter();
        let (order, books) = found.next().ok_or(doubt)?;
        for (_, other) in found {
            // Both ways round: what is known in one of them alone matters.
            self.compare(&books, &other, either).ok_or(doubt)?;
            self.compare(&other, &books, &mut Vec::new()).ok_or(doubt)?;
        }
        Ok(order)
    }

    /// Appends the pages of `ours` in whose place `other` has another one that is resident as well; `None`
    /// where that is not all that differs.
    fn compare(&mut self, ours: &Books, other: &Books, either: &mut Vec<Extent>) -> Option<()> {
        for span in &ours.known {
            for (page, at) in span.extent().pages().zip((span.start..).step_by(OS_PAGE_BYTES)) {
                let there = other.page_at(at)?;
                if there != page {
                    if !self.facts.is_resident(there) || !self.facts.is_resident(page) {
                        return None;
                    }
                    if !either.iter().any(|extent| extent.contains(page)) {
                        push_page(either, page);
                    }
                }
            }
        }
        Some(())
    }
}

fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.1 && b.0 < a.1
}

#[cfg(test)]
mod tests;
