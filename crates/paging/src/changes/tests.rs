use super::*;

const P: usize = OS_PAGE_BYTES;

/// What a kernel says whose address space is written down: per page of the address space, whether it is present,
/// and where mappings begin.
#[derive(Default)]
struct World {
    registered: BTreeMap<usize, bool>,
    begins: BTreeSet<usize>,
    resident: BTreeSet<PageIndex>,
    child: Option<BTreeSet<usize>>,
}

impl World {
    /// A mapping at page `start`, with these pages present or absent.
    fn map(mut self, start: usize, present: &[bool]) -> Self {
        self.begins.insert(start);
        self.registered.extend(present.iter().enumerate().map(|(nth, there)| (start + nth, *there)));
        self
    }

    fn resident(mut self, extent: Extent, resident: &[bool]) -> Self {
        self.resident.extend(extent.pages().zip(resident).filter(|(_, yes)| **yes).map(|(page, _)| page));
        self
    }
}

impl Facts for World {
    fn is_registered(&mut self, address: usize) -> bool {
        self.registered.contains_key(&(address / P))
    }
    fn has_arrived(&mut self, start: usize, end: usize) -> bool {
        self.begins.contains(&(start / P))
            || (start / P..end / P).any(|page| self.registered.get(&page) == Some(&true))
    }
    fn contradicts(&mut self, start: usize, extent: Extent) -> bool {
        extent.pages().zip(start / P..).any(|(page, at)| {
            self.registered.get(&at).copied().unwrap_or(false) != self.resident.contains(&page)
        })
    }
    fn is_resident(&mut self, page: PageIndex) -> bool {
        self.resident.contains(&page)
    }
    fn child_has(&mut self, _fork: usize, address: usize) -> Option<bool> {
        self.child.as_ref().map(|child| child.contains(&(address / P)))
    }
}

fn unmap(start: usize, end: usize) -> Change {
    Change::Unmap { start: start * P, end: end * P }
}
fn moves(from: usize, to: usize, pages: usize) -> Change {
    Change::Move { from: from * P, to: to * P, bytes: pages * P }
}

const YES: [bool; 4] = [true; 4];
const NO: [bool; 4] = [false; 4];
const SOME: [bool; 4] = [true, false, true, true];

/// Four pages at 16, and four at 32.
fn two() -> (AddressSpace, Extent, Extent) {
    let mut space = AddressSpace::default();
    let (old, new) = (space.insert(16 * P, 4), space.insert(32 * P, 4));
    (space, old, new)
}

#[test]
fn a_move_that_was_read_first_finds_the_place_that_an_unmapping_has_left() {
    let (space, old, new) = two();
    let changes = [moves(32, 16, 4), unmap(16, 20), unmap(32, 36)];
    let mut world = World::default().map(16, &SOME).resident(old, &YES).resident(new, &SOME);
    assert_eq!(order(&changes, &space, &mut world).unwrap().steps, [1, 0, 2]);
}

#[test]
fn where_nothing_is_known_the_kernel_says_what_came_last() {
    let mut space = AddressSpace::default();
    let new = space.insert(32 * P, 4);
    // Registered memory that grew in place was at 16 and is unmapped; or what arrived there is.
    let changes = [moves(32, 16, 4), unmap(32, 36), unmap(12, 20)];
    let mut goes = World::default().resident(new, &YES);
    assert_eq!(order(&changes, &space, &mut goes).unwrap().steps, [0, 1, 2]);
    // What was moved there is gone, and a neighbour has grown: nothing of it is present.
    let mut grown = World::default().map(12, &[false; 8]).resident(new, &SOME);
    assert_eq!(order(&changes, &space, &mut grown).unwrap().steps, [0, 1, 2]);
    // A mapping begins there: either no change was overtaken and something unknown came, or one was.
    let mut stays = World::default().map(16, &NO);
    assert!(order(&changes, &space, &mut stays).is_err());
}

#[test]
fn changes_of_one_thread_are_in_the_order_of_reading_whatever_else_could_be() {
    let (space, ..) = two();
    // Nothing of either is in local memory, and both ways round would do.
    let changes = [unmap(16, 20), moves(32, 16, 4), unmap(32, 36), moves(16, 64, 4), unmap(16, 20)];
    let mut world = World::default().map(64, &NO);
    assert_eq!(order(&changes, &space, &mut world).unwrap().steps, [0, 1, 2, 3, 4]);
}

#[test]
fn of_two_departures_from_a_place_the_pages_tell_which_was_which() {
    let (space, old, new) = two();
    // One of the occupants of 16 was unmapped, the other moved to 64.
    let changes = [moves(32, 16, 4), unmap(32, 36), moves(16, 64, 4), unmap(16, 20), unmap(16, 20)];
    let told = |at_64: &[bool], of_old: &[bool], of_new: &[bool]| {
        let mut world = World::default().map(64, at_64).resident(old, of_old).resident(new, of_new);
        order(&changes, &space, &mut world)
    };
    let position = |order: &Order, step| order.steps.iter().position(|s| *s == step).unwrap();
    let arrived = told(&SOME, &YES, &SOME).unwrap();
    assert!(position(&arrived, 4) < position(&arrived, 0) && arrived.either.is_empty());
    let before = told(&YES, &YES, &SOME).unwrap();
    assert!(position(&before, 2) < position(&before, 0) && before.either.is_empty());
    assert_eq!(told(&YES, &YES, &YES).unwrap().either.iter().map(|e| e.count).sum::<u32>(), 4);
    assert!(told(&SOME, &SOME, &SOME).is_err(), "an absent page, of one or of the other");
}

#[test]
fn moves_that_follow_each_other_are_put_in_a_row() {
    let (mut space, a, b) = two();
    let c = space.insert(48 * P, 4);
    let changes =
        [moves(48, 32, 4), moves(32, 16, 4), moves(16, 64, 4), unmap(16, 20), unmap(48, 52), unmap(32, 36)];
    let mut world = World::default().map(64, &YES).map(16, &SOME).map(32, &NO);
    world = world.resident(a, &YES).resident(b, &SOME).resident(c, &NO);
    assert_eq!(order(&changes, &space, &mut world).unwrap().steps, [2, 3, 1, 5, 0, 4]);
}

#[test]
fn an_arrival_where_something_is_known_for_good_replaces_it() {
    let (space, _, new) = two();
    let mut world = World::default().map(16, &SOME).resident(new, &SOME);
    assert_eq!(order(&[moves(32, 16, 4), unmap(32, 36)], &space, &mut world).unwrap().steps, [0, 1]);
}

#[test]
fn what_is_given_up_is_what_had_arrived_by_then() {
    let (space, old, new) = two();
    let give_up = Change::GiveUp { start: 16 * P, end: 18 * P };
    let mut world = World::default().map(16, &SOME).resident(old, &SOME).resident(new, &YES);
    let after = [moves(32, 16, 4), give_up, unmap(16, 20), unmap(32, 36)];
    assert_eq!(order(&after, &space, &mut world).unwrap().steps, [2, 0, 3, 1]);
    let mut world = World::default().map(16, &YES).resident(old, &SOME).resident(new, &YES);
    let before = [give_up, moves(32, 16, 4), unmap(16, 20), unmap(32, 36)];
    assert_eq!(order(&before, &space, &mut world).unwrap().steps, [0, 2, 1, 3]);
}

#[test]
fn a_place_that_a_move_leaves_mapped_can_be_moved_as_well() {
    let (space, ..) = two();
    // Of the four pages at 16 that stay mapped, two are moved on: nothing of them is known.
    let changes = [moves(16, 64, 4), moves(18, 80, 2), unmap(18, 20)];
    let mut world = World::default().map(64, &NO).map(16, &[false; 2]).map(80, &[false; 2]);
    assert_eq!(order(&changes, &space, &mut world).unwrap().steps, [0, 1, 2]);
}

#[test]
fn a_place_that_was_left_is_taken_and_left_again_before_the_first_departure_is_told() {
    let mut space = AddressSpace::default();
    let (page, block) = (space.insert(18 * P, 1), space.insert(32 * P, 4));
    let changes =
        [moves(18, 64, 1), moves(32, 16, 4), unmap(32, 36), moves(16, 80, 4), unmap(18, 19), unmap(16, 20)];
    let mut world = World::default().map(64, &[false]).map(80, &NO).resident(page, &[false]);
    world = world.resident(block, &NO);
    assert_eq!(order(&changes, &space, &mut world).unwrap().steps, [0, 4, 1, 2, 3, 5]);
}

#[test]
fn a_fork_comes_where_the_child_says() {
    let (space, ..) = two();
    let changes = [Change::Fork, moves(32, 48, 4), unmap(16, 20), unmap(32, 36)];
    let child = |pages: &[usize]| {
        let mut world = World { child: Some(pages.iter().copied().collect()), ..World::default() };
        order(&changes, &space, &mut world).unwrap().steps
    };
    assert_eq!(child(&[16, 32]), [0, 1, 3, 2], "neither was made");
    assert_eq!(child(&[16, 48]), [1, 3, 0, 2], "it was moved");
    assert_eq!(child(&[48]), [1, 3, 2, 0], "both were made");
    assert_eq!(child(&[32]), [2, 0, 1, 3], "it was unmapped");
}
