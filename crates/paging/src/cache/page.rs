//! One entry per page of the index space: 12 bytes, in a table that takes memory only where pages were
//! touched.
//!
//! What the two words mean depends on the state, because no state needs more than two:
//!
//! ```text
//!   state               a                 b
//!   Resident            previous page     next page      (a doubly linked queue through the array)
//!   Evicting, Staged    batch slot        offset in the batch
//!   Fetching, Ready     fetch slot        offset in the fetch
//!   Remote              eviction clock    --             (the ghost history of S3-FIFO, one for every page, and `curve`)
//!   Fresh               eviction clock    --             (as above, if it has a ghost)
//! ```

use std::fmt;

/// Where a page is. See the picture in [`crate::cache`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Unmanaged,
    Fresh,
    Resident,
    Evicting,
    Staged,
    Remote,
    Fetching,
    Ready,
}

const STATES: [State; 8] = [
    State::Unmanaged,
    State::Fresh,
    State::Resident,
    State::Evicting,
    State::Staged,
    State::Remote,
    State::Fetching,
    State::Ready,
];

/// One bit of a page's entry.
#[derive(Clone, Copy)]
pub(super) struct Flag(u32);

/// The servers hold bytes for this page, perhaps old ones: they must be told when the content is discarded.
pub(super) const COPY: Flag = Flag(1 << 3);
/// Resident, Evicting, Staged: the servers do not hold these bytes.
pub(super) const DIRTY: Flag = Flag(1 << 4);
/// Mapped write-protected. `!PROTECTED` implies `DIRTY` for every Resident page.
pub(super) const PROTECTED: Flag = Flag(1 << 5);
/// A `Store` of this page is not acknowledged. It survives every change of state, and such a page is never
/// evicted: one store at a time.
pub(super) const STORING: Flag = Flag(1 << 6);
/// A thread waits for this page and has not been answered.
pub(super) const WANTED: Flag = Flag(1 << 7);
/// One of the waiting threads wants to write.
pub(super) const WANTED_WRITE: Flag = Flag(1 << 8);
/// The page stands in the queue of faults that wait for frames.
pub(super) const QUEUED: Flag = Flag(1 << 9);
/// Evicting only: the program gave the content up meanwhile.
pub(super) const GONE: Flag = Flag(1 << 10);
/// Evicting only, with `GONE`: the page left management meanwhile.
pub(super) const FORGOTTEN: Flag = Flag(1 << 11);
/// Small queue, and then ghost history: the page came back while its ghost was young. See `policy.rs`.
pub(super) const CANDIDATE: Flag = Flag(1 << 12);
/// Ghost history: the page left the main queue.
pub(super) const FROM_MAIN: Flag = Flag(1 << 13);
/// Fetching, Ready: install into the main queue on arrival.
pub(super) const TO_MAIN: Flag = Flag(1 << 14);
/// Fetching, Ready: install writable on arrival.
pub(super) const TO_WRITE: Flag = Flag(1 << 15);
/// Remote, Fresh: word `a` holds an eviction clock, which counts for the choice of pages that stay.
pub(super) const GHOST: Flag = Flag(1 << 16);
/// Installed in this step: the install may yet fail, so the page may not leave.
pub(super) const NEW: Flag = Flag(1 << 17);
/// Fetched as part of a stream, not on demand: as far as one can see, it was not used yet.
pub(super) const EARLY: Flag = Flag(1 << 18);
/// The program has given the content up since the page was adopted. The kernel takes pages away at an unknown
/// time after it said so, so a page that is mapped where the cache holds none is not to be kept: its removal
/// may be still to come.
pub(super) const GIVEN_UP: Flag = Flag(1 << 19);
/// Resident, Evicting: the frame is the program's own, from before the adoption. The kernel may drop such a
/// page at any time (MADV_FREE).
pub(super) const FOREIGN: Flag = Flag(1 << 20);

const STATE_MASK: u32 = 7;
const QUEUE_SHIFT: u32 = 24;
const QUEUE_MASK: u32 = 3 << QUEUE_SHIFT;
const HEAT_SHIFT: u32 = 26;
const HEAT_MASK: u32 = 7 << HEAT_SHIFT;
const HABIT_SHIFT: u32 = 29;
const HABIT_MASK: u32 = 3 << HABIT_SHIFT;

/// The most passes of the hand that a page survives.
pub(super) const MAX_HEAT: u32 = 7;
/// The strongest habit of being written.
pub(super) const MAX_HABIT: u32 = 3;

#[derive(Clone, Copy)]
pub(super) struct Page {
    pub a: u32,
    pub b: u32,
    meta: u32,
}

impl Page {
    pub const UNMANAGED: Page = Page { a: 0, b: 0, meta: 0 };

    /// Managed, and as it was when that began, or given up since.
    pub fn is_untouched(&self) -> bool {
        self.meta & !GIVEN_UP.0 == State::Fresh as u32
    }

    pub fn state(&self) -> State {
        STATES[(self.meta & STATE_MASK) as usize]
    }

    pub fn set_state(&mut self, state: State) {
        self.meta = (self.meta & !STATE_MASK) | state as u32;
    }

    pub fn has(&self, flag: Flag) -> bool {
        self.meta & flag.0 != 0
    }

    /// The program may have let the kernel take the frame at any time: before the page was adopted, or by a
    /// call that went on after the frame was installed.
    pub fn may_be_reclaimed(&self) -> bool {
        self.has(FOREIGN) || self.has(GIVEN_UP)
    }

    pub fn set(&mut self, flag: Flag) {
        self.meta |= flag.0;
    }

    pub fn clear(&mut self, flag: Flag) {
        self.meta &= !flag.0;
    }

    pub fn put(&mut self, flag: Flag, on: bool) {
        if on { self.set(flag) } else { self.clear(flag) }
    }

    /// Which queue holds the page while it is Resident.
    pub fn queue(&self) -> u32 {
        (self.meta & QUEUE_MASK) >> QUEUE_SHIFT
    }

    pub fn set_queue(&mut self, queue: u32) {
        self.meta = (self.meta & !QUEUE_MASK) | (queue << QUEUE_SHIFT);
    }

    /// Passes of the hand that the page will survive: earned by coming back from an eviction batch.
    pub fn heat(&self) -> u32 {
        (self.meta & HEAT_MASK) >> HEAT_SHIFT
    }

    pub fn set_heat(&mut self, heat: u32) {
        self.meta = (self.meta & !HEAT_MASK) | (heat.min(MAX_HEAT) << HEAT_SHIFT);
    }

    /// How strong the page's habit of being written after it was fetched is; each unproven guess weakens it.
    pub fn habit(&self) -> u32 {
        (self.meta & HABIT_MASK) >> HABIT_SHIFT
    }

    pub fn set_habit(&mut self, habit: u32) {
        self.meta = (self.meta & !HABIT_MASK) | (habit.min(MAX_HABIT) << HABIT_SHIFT);
    }

    /// Is this page, in `state`, the one that batch or fetch `slot` holds at `offset`?
    pub fn is_at(&self, state: State, slot: u32, offset: u32) -> bool {
        self.state() == state && self.a == slot && self.b == offset
    }

    pub fn place(&mut self, state: State, slot: u32, offset: u32) {
        self.set_state(state);
        self.a = slot;
        self.b = offset;
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (COPY, "copy"),
            (DIRTY, "dirty"),
            (PROTECTED, "protected"),
            (STORING, "storing"),
            (WANTED, "wanted"),
            (WANTED_WRITE, "for writing"),
            (QUEUED, "queued"),
            (GONE, "gone"),
            (FORGOTTEN, "forgotten"),
            (NEW, "new"),
            (GIVEN_UP, "given up"),
            (FOREIGN, "foreign"),
        ];
        write!(f, "{:?} ({}, {})", self.state(), self.a, self.b)?;
        names.iter().filter(|(flag, _)| self.has(*flag)).try_for_each(|(_, name)| write!(f, " {name}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FLAGS: [Flag; 18] = [
        COPY,
        DIRTY,
        PROTECTED,
        STORING,
        WANTED,
        WANTED_WRITE,
        QUEUED,
        GONE,
        FORGOTTEN,
        CANDIDATE,
        FROM_MAIN,
        TO_MAIN,
        TO_WRITE,
        GHOST,
        NEW,
        EARLY,
        GIVEN_UP,
        FOREIGN,
    ];

    #[test]
    fn an_entry_takes_12_bytes() {
        assert_eq!(size_of::<Page>(), 12);
    }

    proptest! {
        #[test]
        fn no_field_disturbs_another(
            sets in prop::collection::vec((0usize..22, 0u32..8), 0..60)
        ) {
            let mut page = Page::UNMANAGED;
            let mut flags = [false; FLAGS.len()];
            let (mut state, mut queue, mut heat, mut habit) = (0, 0, 0, 0);
            for (field, value) in sets {
                match field {
                    18 => { state = value; page.set_state(STATES[value as usize]); }
                    19 => { queue = value % 4; page.set_queue(queue); }
                    20 => { heat = value; page.set_heat(heat); }
                    21 => { habit = value.min(MAX_HABIT); page.set_habit(value); }
                    flag => { flags[flag] = value % 2 == 0; page.put(FLAGS[flag], flags[flag]); }
                }
                prop_assert_eq!(page.state() as u32, state);
                prop_assert_eq!((page.queue(), page.heat(), page.habit()), (queue, heat, habit));
                for (flag, on) in FLAGS.into_iter().zip(flags) {
                    prop_assert_eq!(page.has(flag), on);
                }
            }
        }
    }
}
