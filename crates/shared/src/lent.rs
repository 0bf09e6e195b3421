//! Locks that a rank has lent to its own threads: they take one and give it back by one instruction each,
//! without the rank's lock and its engine ([`rampool_sharing::Mem::lend`]).
//!
//! ```text
//!   a slot:   nothing --lent--> free <--taken, given back--> held by a thread
//!                ^---recalled---'-----------recalled-----------'
//! ```
//! Who fails to take or to give back, because the lock is not lent, or not any more, goes through the rank.
//! The lock's number and its state are one word, so that no thread takes what has become another lock.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use rampool_sharing::config::word_lock;
use rampool_sharing::{AtomicOp, LockId, Recalled, ThreadId};

use super::{MEMBER, Shared, SharedError};

/// A power of two. Each lock has its place, and is not lent while another one is there.
const SLOTS: usize = 1 << 13;
const STATE_BITS: u32 = 16;
const STATE: u64 = (1 << STATE_BITS) - 1;
/// Numbers from here on are the addresses of words.
const WORDS: u64 = 1 << (63 - STATE_BITS);

/// A slot's states: nothing is 0, a holder is its thread's number behind these.
const FREE: u64 = 1;
const FIRST_HOLDER: u64 = 2;

/// A lock as it is named here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Name(u64);

impl Name {
    /// A lock that the program names. `None`: it cannot be lent.
    pub fn of_lock(lock: LockId) -> Option<Self> {
        (lock.0 < WORDS).then_some(Self(lock.0))
    }

    /// The lock of the word there.
    pub fn of_word(address: usize) -> Option<Self> {
        (address as u64 & !(WORDS - 1) == 0).then_some(Self(WORDS | address as u64))
    }

    fn with(self, state: u64) -> u64 {
        self.0 << STATE_BITS | state
    }

    fn slot(self) -> usize {
        // Neighbours are 64 bytes apart, or one: the highest bits of a product are spread either way.
        let spread = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SLOTS.trailing_zeros());
        usize::try_from(spread).expect("64-bit addresses")
    }
}

/// The holder's state. `None`: a thread of such a number takes no lent lock.
fn holder(thread: ThreadId) -> Option<u64> {
    let state = FIRST_HOLDER + u64::from(thread.0);
    (state <= STATE).then_some(state)
}

#[derive(Debug, Default)]
struct Slot {
    word: AtomicU64,
    /// How many releases had begun when a thread last gave it back.
    used: AtomicU64,
    times: AtomicU32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lent {
    slots: Box<[Slot]>,
    /// How many releases have begun.
    releases: AtomicU64,
    /// Threads that take a lock look first whether messages have come.
    looks: AtomicBool,
    closed: AtomicBool,
}

impl Lent {
    pub fn new() -> Self {
        Self {
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            releases: AtomicU64::new(1),
            looks: AtomicBool::new(true),
            closed: AtomicBool::new(false),
        }
    }

    // --- the rank ------------------------------------------------------------------------------------------

    /// False: the place is taken.
    pub fn lend(&self, name: Name) -> bool {
        let word = &self.slots[name.slot()].word;
        let is_free = word.load(Ordering::Relaxed) == 0 && !self.closed.load(Ordering::Relaxed);
        if is_free {
            word.store(name.with(FREE), Ordering::Release);
        }
        is_free
    }

    /// How often threads have taken it.
    pub fn times(&self, name: Name) -> u32 {
        self.slots[name.slot()].times.load(Ordering::Relaxed)
    }

    /// It is lent no more.
    pub fn recall(&self, name: Name) -> Recalled {
        let slot = &self.slots[name.slot()];
        let before = slot.word.swap(0, Ordering::AcqRel);
        debug_assert!(before == 0 || before >> STATE_BITS == name.0, "it was lent");
        let holder = (before & STATE).checked_sub(FIRST_HOLDER);
        Recalled {
            times: slot.times.swap(0, Ordering::Relaxed),
            used: slot.used.load(Ordering::Relaxed) == self.releases.load(Ordering::Relaxed),
            holder: holder.map(|thread| ThreadId(u16::try_from(thread).expect("it was one"))),
        }
    }

    /// What is written under locks that are given back from now on is not part of the release that begins.
    pub fn begin_release(&self) {
        self.releases.fetch_add(1, Ordering::SeqCst);
        // With the one in `give`: who gives a lock back and does not see the new count has written before
        // pages are read for this release.
        fence(Ordering::SeqCst);
    }

    /// Nothing is lent any more, and nothing will be.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for slot in &self.slots {
            slot.word.store(0, Ordering::Release);
        }
    }

    pub fn let_look(&self, look: bool) {
        if self.looks.load(Ordering::Relaxed) != look {
            self.looks.store(look, Ordering::Relaxed);
        }
    }

    // --- its threads ---------------------------------------------------------------------------------------

    /// Whether to look for messages before a lock is taken.
    pub fn looks(&self) -> bool {
        self.looks.load(Ordering::Relaxed)
    }

    /// Takes the lock. False: it is not lent, or held.
    pub fn take(&self, name: Name, thread: ThreadId) -> bool {
        let (slot, Some(holder)) = (&self.slots[name.slot()], holder(thread)) else { return false };
        let free = name.with(FREE);
        let takes = slot.word.load(Ordering::Relaxed) == free
            && slot
                .word
                .compare_exchange(free, name.with(holder), Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if takes {
            // The holder's alone; a recall in between loses a count.
            slot.times.store(slot.times.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
        takes
    }

    /// Gives it back. False: this thread did not take it, or it was recalled meanwhile.
    pub fn give(&self, name: Name, thread: ThreadId) -> bool {
        let (slot, Some(holder)) = (&self.slots[name.slot()], holder(thread)) else { return false };
        let held = name.with(holder);
        if slot.word.load(Ordering::Relaxed) != held {
            return false;
        }
        fence(Ordering::SeqCst);
        let releases = self.releases.load(Ordering::Relaxed);
        if slot.used.load(Ordering::Relaxed) != releases {
            // Not less than it was: if the lock has been recalled, the place may have another one by now.
            slot.used.fetch_max(releases, Ordering::Relaxed);
        }
        slot.word.compare_exchange(held, name.with(FREE), Ordering::Release, Ordering::Relaxed).is_ok()
    }
}

impl Shared {
    /// Takes a lock that is lent to this rank's threads, unless messages are to be taken first.
    pub(super) fn take_lent(&self, name: Option<Name>, looks: bool) -> Option<(Name, ThreadId)> {
        let lent = &self.inner.lent;
        let name = name?;
        let thread = self.unburdened()?;
        if looks && lent.looks() && self.inner.has_something() {
            return None;
        }
        lent.take(name, thread).then_some((name, thread))
    }

    /// Gives it back. False: this thread has not taken it so.
    pub(super) fn give_lent(&self, name: Option<Name>) -> bool {
        let (Some(name), Some(thread)) = (name, self.unburdened()) else { return false };
        self.inner.lent.give(name, thread)
    }

    /// Changes a word whose lock is lent, and returns its value before. `None`: it is not lent.
    pub(super) fn change_lent(
        &self,
        address: usize,
        width: u8,
        op: AtomicOp,
    ) -> Result<Option<u64>, SharedError> {
        if !is_word(address, width, op) {
            return Ok(None);
        }
        // Messages are not taken first: a word that several ranks change in turn would go to another one each
        // time.
        let Some((name, thread)) = self.take_lent(Name::of_word(address), false) else { return Ok(None) };
        // SAFETY: an aligned word of shared memory, since its lock is lent, and this thread has that: every
        // other access to the word is atomic, and no other thread changes it now.
        let before = unsafe { change_word(address, width, op) };
        if !self.inner.lent.give(name, thread) {
            let (page, offset) = self.locate(address)?;
            self.unlock_any(word_lock(page, offset))?;
        }
        Ok(Some(before))
    }

    /// This thread's number, if it has had an operation and its next one has nothing else to do first.
    fn unburdened(&self) -> Option<ThreadId> {
        MEMBER.with(|members| {
            let members = members.borrow();
            let member = members.iter().find(|member| member.instance == self.inner.instance)?;
            (member.kept.is_empty() && self.inner.process.is_here()).then_some(member.thread)
        })
    }
}

/// Whether an atomic operation can be made there at all.
fn is_word(address: usize, width: u8, op: AtomicOp) -> bool {
    matches!(width, 1 | 2 | 4 | 8)
        && address.is_multiple_of(usize::from(width))
        && (width == 8 || !matches!(op, AtomicOp::AddDouble(_)))
}

/// Changes a word in the program's view of the memory, and returns its value before. A page that is absent or
/// read-only comes first, as at any access.
///
/// # Safety
/// [`is_word`], in shared memory; every other access to it is atomic, and no other thread changes it now.
unsafe fn change_word(address: usize, width: u8, op: AtomicOp) -> u64 {
    macro_rules! change {
        ($word:ty, $value:ty) => {{
            // SAFETY: by the caller's promise.
            let word = unsafe { <$word>::from_ptr(std::ptr::with_exposed_provenance_mut(address)) };
            let before = word.load(Ordering::Relaxed);
            if op != AtomicOp::Load {
                #[allow(clippy::cast_possible_truncation, reason = "the word is the low bytes")]
                word.store(op.apply(before.into()) as $value, Ordering::Relaxed);
            }
            u64::from(before)
        }};
    }
    match width {
        1 => change!(AtomicU8, u8),
        2 => change!(AtomicU16, u16),
        4 => change!(AtomicU32, u32),
        _ => change!(AtomicU64, u64),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const ONE: ThreadId = ThreadId(0);
    const OTHER: ThreadId = ThreadId(1);

    fn lock(number: u64) -> Name {
        Name::of_lock(LockId(number)).unwrap()
    }

    #[test]
    fn a_lent_lock_has_one_holder_who_alone_gives_it_back() {
        let lent = Lent::new();
        assert!(!lent.take(lock(7), ONE), "it is not lent");
        assert!(lent.lend(lock(7)) && !lent.lend(lock(7)));
        assert!(lent.take(lock(7), ONE));
        assert!(!lent.take(lock(7), OTHER) && !lent.take(lock(7), ONE));
        assert!(!lent.give(lock(7), OTHER) && lent.give(lock(7), ONE) && !lent.give(lock(7), ONE));
        assert!(lent.take(lock(7), OTHER));
        let recalled = lent.recall(lock(7));
        assert_eq!(recalled, Recalled { times: 2, used: true, holder: Some(OTHER) });
        assert!(!lent.give(lock(7), OTHER) && !lent.take(lock(7), ONE), "it was recalled");
        lent.close();
        assert!(!lent.lend(lock(7)));
    }

    #[test]
    fn uses_before_a_release_are_part_of_it() {
        let lent = Lent::new();
        assert!(lent.lend(lock(1)) && lent.take(lock(1), ONE) && lent.give(lock(1), ONE));
        lent.begin_release();
        assert!(!lent.recall(lock(1)).used);
        assert!(lent.lend(lock(1)) && lent.take(lock(1), ONE));
        lent.begin_release();
        assert!(lent.give(lock(1), ONE));
        assert!(lent.recall(lock(1)).used, "its end is not");
    }

    #[test]
    fn locks_and_words_have_different_names_and_those_beyond_have_none() {
        assert_ne!(Name::of_lock(LockId(64)), Name::of_word(64));
        assert_eq!(Name::of_lock(LockId(WORDS)), None);
        assert_eq!(Name::of_word(1 << 47), None);
        assert!(Name::of_word((1 << 47) - 8).is_some());
        let lent = Lent::new();
        assert!(lent.lend(lock(1)) && !lent.take(lock(1), ThreadId(u16::MAX)));
    }

    /// One thread lends, recalls and releases as a rank does; two take and give back.
    #[test]
    fn there_is_one_holder_at_a_time_and_no_use_is_missing_from_a_release() {
        const USES: u32 = 20_000;
        /// What the rank knows of the lock while it is not lent.
        #[derive(Default)]
        struct Rank {
            holder: Option<ThreadId>,
            used: bool,
        }
        let (lent, rank, name) = (Lent::new(), Mutex::new(Rank::default()), lock(3));
        let (inside, written, done) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
        let user = |thread| {
            let mut uses = 0;
            while uses < USES {
                if !lent.take(name, thread) {
                    std::thread::yield_now();
                    continue;
                }
                assert!(!inside.swap(true, Ordering::Relaxed), "two have it");
                uses += 1;
                written.store(written.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                inside.store(false, Ordering::Relaxed);
                if !lent.give(name, thread) {
                    let mut rank = rank.lock().unwrap();
                    assert_eq!(rank.holder.take(), Some(thread), "it was recalled from its holder");
                    rank.used = true;
                }
            }
            done.fetch_add(1, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| user(ONE));
            scope.spawn(|| user(OTHER));
            let mut released = 0;
            while done.load(Ordering::Relaxed) < 2 {
                let mut rank = rank.lock().unwrap();
                let recalled = if rank.holder.is_none() { lent.recall(name) } else { Recalled::default() };
                rank.holder = rank.holder.or(recalled.holder);
                let used = std::mem::take(&mut rank.used) || recalled.used;
                if rank.holder.is_none() {
                    assert!(used || written.load(Ordering::Relaxed) == released, "a use is missing");
                    lent.lend(name);
                    lent.begin_release();
                    released = written.load(Ordering::Relaxed);
                } else {
                    rank.used = used;
                }
                drop(rank);
                std::thread::yield_now();
            }
        });
        assert_eq!(written.into_inner(), 2 * USES);
    }
}
