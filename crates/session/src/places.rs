//! Where the pages of a region lie at servers on this machine, as far as their answers have said: such a page
//! is read there, without asking.
//!
//! ```text
//!            Put submitted          its answer
//!   unknown ---------------> changing ---------> known ---> read there: the generation and the checksum
//!      ^  \_______________________________________^ |       must be the entry's, or else it is asked for
//!      |        the answer to a Get                 |
//!      `--- Discard; or a read that did not fit ----'
//! ```
//! What an answer says is of the past. It counts only if the page has not been submitted again since: a later
//! answer will say more. What others do to the page meanwhile (members of the lease, a server that gives this
//! one up) moves the generation of its frame on, so a place that is no longer true is noticed by its reader.
//! It does so also where the frame stays as it was, for a copy of the region or for an answer on its way.

use rampool_paging::placement::ServerIndex;
use rampool_paging::table::Table;
use rampool_wire::places::Place;
use rampool_wire::units::{Extent, PageIndex};

/// Where a page lies, and what it must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Known {
    pub server: ServerIndex,
    pub place: Place,
    /// Of the plain page.
    pub crc: u32,
}

impl Known {
    /// Whether the bytes that were copied between two looks at the frame's generation are the
    /// page's, as far as that can tell.
    #[must_use]
    pub fn held(&self, before: u32, after: u32) -> bool {
        before == self.place.generation && after == before
    }
}

/// Which store of a page it is; the next one of the same page has another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stamp(pub u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    Unknown,
    /// Submitted to be stored; the answer is not here.
    Changing(Stamp),
    Known {
        granule: u32,
        generation: u32,
        crc: u32,
        len: u16,
        server: ServerIndex,
    },
}

/// The places of one region's pages.
#[derive(Debug, Default)]
pub struct Places {
    entries: Table<Entry>,
}

impl Places {
    /// A store of these pages has been submitted.
    pub fn changing(&mut self, stamp: Stamp, extent: Extent) {
        let Some((first, end)) = range(extent) else { return };
        if self.entries.len() < end {
            self.entries.grow(end, Entry::Unknown);
        }
        self.entries.change(first..end, |_, entry| *entry = Entry::Changing(stamp));
    }

    /// These pages have been given up.
    pub fn discarded(&mut self, extent: Extent) {
        let Some((first, end)) = range(extent) else { return };
        let end = end.min(self.entries.len());
        self.entries.change(first.min(end)..end, |_, entry| *entry = Entry::Unknown);
    }

    /// The answer to a store says where this page lies.
    pub fn stored(&mut self, stamp: Stamp, page: PageIndex, known: Known) {
        if let Some(at) = self.find(page).filter(|at| self.entries[*at] == Entry::Changing(stamp)) {
            self.entries[at] = entry(known);
        }
    }

    /// The answer to a question for this page says where it lies.
    pub fn fetched(&mut self, page: PageIndex, known: Known) {
        if let Some(at) = self.find(page).filter(|at| self.entries[*at] == Entry::Unknown) {
            self.entries[at] = entry(known);
        }
    }

    /// The page did not lie there any more.
    pub fn missed(&mut self, page: PageIndex, known: Known) {
        if let Some(at) = self.find(page).filter(|at| self.entries[*at] == entry(known)) {
            self.entries[at] = Entry::Unknown;
        }
    }

    /// Nothing lies at this server any more: it is lost.
    pub fn forget(&mut self, server: ServerIndex) {
        let end = self.entries.len();
        self.entries.change(0..end, |_, entry| {
            if matches!(entry, Entry::Known { server: at, .. } if *at == server) {
                *entry = Entry::Unknown;
            }
        });
    }

    /// Where to read the page.
    #[must_use]
    pub fn known(&self, page: PageIndex) -> Option<Known> {
        match *self.entries.get(usize::try_from(page.0).ok()?)? {
            Entry::Known { granule, generation, crc, len, server } => {
                Some(Known { server, place: Place { granule, generation, len: len.into() }, crc })
            }
            Entry::Unknown | Entry::Changing(_) => None,
        }
    }

    /// The index of a page; answers to questions make the table longer.
    fn find(&mut self, page: PageIndex) -> Option<usize> {
        let (at, end) = range(Extent::page(page))?;
        if self.entries.len() < end {
            self.entries.grow(end, Entry::Unknown);
        }
        Some(at)
    }
}

fn entry(known: Known) -> Entry {
    let Known { server, place: Place { granule, generation, len }, crc } = known;
    match u16::try_from(len) {
        Ok(len @ 1..) => Entry::Known { granule, generation, crc, len, server },
        // A page of zeroes has no place.
        _ => Entry::Unknown,
    }
}

fn range(extent: Extent) -> Option<(usize, usize)> {
    Some((usize::try_from(extent.first.0).ok()?, usize::try_from(extent.end().0).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const PAGES: usize = 3;
    const FRAMES: usize = 6;
    /// Kinds of steps.
    const STEPS: u8 = 14;

    /// What a test leaves out, to see that the model notices.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Mutant {
        None,
        /// A read believes any generation.
        AnyGeneration,
        /// A read looks at the generation only before it copies.
        LookOnce,
        /// The server leaves the generation of a freed frame as it was.
        Unmoved,
        /// Or that of a frame that something else still refers to.
        UnmovedIfHeld,
        /// An answer counts whatever was submitted since.
        AnyStamp,
        /// The answer to a question goes before that to a store.
        OldAnswer,
    }

    enum ToServer {
        Put(usize, u32, Stamp),
        Discard(usize),
        Get(usize),
    }

    enum ToClient {
        Stored(usize, Stamp, Known),
        Fetched(usize, Option<Known>),
    }

    /// A client, the queues between, and a server with few frames, so that they are used again soon. Contents
    /// are numbers, each stored once; there are no checksums, so only places and generations tell.
    struct Model {
        mutant: Mutant,
        places: Places,
        stamp: u32,
        content: u32,
        /// What each page holds for the client; `None`: given up, or never stored.
        holds: [Option<u32>; PAGES],
        to_server: VecDeque<ToServer>,
        to_client: VecDeque<ToClient>,
        frames: [(u32, u32); FRAMES],
        /// Which of them a copy, or an answer on its way, refers to besides.
        held: [bool; FRAMES],
        free: Vec<usize>,
        table: [Option<usize>; PAGES],
    }

    impl Model {
        fn new(mutant: Mutant) -> Self {
            Self {
                mutant,
                places: Places::default(),
                stamp: 0,
                content: 0,
                holds: [None; PAGES],
                to_server: VecDeque::new(),
                to_client: VecDeque::new(),
                frames: [(0, 0); FRAMES],
                held: [false; FRAMES],
                free: (0..FRAMES).collect(),
                table: [None; PAGES],
            }
        }

        fn index(page: usize) -> PageIndex {
            PageIndex(page as u64)
        }

        fn put(&mut self, page: usize) {
            self.content += 1;
            self.stamp += 1;
            self.holds[page] = Some(self.content);
            self.places.changing(Stamp(self.stamp), Extent::page(Self::index(page)));
            self.to_server.push_back(ToServer::Put(page, self.content, Stamp(self.stamp)));
        }

        fn discard(&mut self, page: usize) {
            self.holds[page] = None;
            self.places.discarded(Extent::page(Self::index(page)));
            self.to_server.push_back(ToServer::Discard(page));
        }

        fn known(&self, frame: usize) -> Known {
            let place =
                Place { granule: u32::try_from(frame).unwrap(), generation: self.frames[frame].0, len: 1 };
            Known { server: ServerIndex(0), place, crc: 0 }
        }

        fn free(&mut self, page: usize) {
            if let Some(frame) = self.table[page].take() {
                let unmoved = match self.mutant {
                    Mutant::Unmoved => true,
                    Mutant::UnmovedIfHeld => self.held[frame],
                    _ => false,
                };
                self.frames[frame].0 += u32::from(!unmoved);
                if !self.held[frame] {
                    self.free.push(frame);
                }
            }
        }

        /// A copy, or an answer on its way, refers to the page's frame.
        fn hold(&mut self, page: usize) {
            if let Some(frame) = self.table[page]
                && !self.held.contains(&true)
            {
                self.held[frame] = true;
            }
        }

        fn let_go(&mut self) {
            if let Some(frame) = self.held.iter().position(|held| *held) {
                self.held[frame] = false;
                if !self.table.contains(&Some(frame)) {
                    self.frames[frame].0 += 1;
                    self.free.push(frame);
                }
            }
        }

        fn serve(&mut self) {
            match self.to_server.pop_front() {
                Some(ToServer::Put(page, content, stamp)) => {
                    let frame = self.free.pop().unwrap();
                    self.frames[frame].1 = content;
                    let known = self.known(frame);
                    self.free(page);
                    self.table[page] = Some(frame);
                    self.to_client.push_back(ToClient::Stored(page, stamp, known));
                }
                Some(ToServer::Discard(page)) => self.free(page),
                Some(ToServer::Get(page)) => {
                    let known = self.table[page].map(|frame| self.known(frame));
                    self.to_client.push_back(ToClient::Fetched(page, known));
                }
                None => {}
            }
        }

        fn hear(&mut self) {
            match self.to_client.pop_front() {
                Some(ToClient::Stored(page, stamp, known)) => {
                    if self.mutant == Mutant::AnyStamp {
                        self.places.changing(stamp, Extent::page(Self::index(page)));
                    }
                    self.places.stored(stamp, Self::index(page), known);
                }
                Some(ToClient::Fetched(page, Some(known))) => {
                    if self.mutant == Mutant::OldAnswer {
                        self.places.discarded(Extent::page(Self::index(page)));
                    }
                    self.places.fetched(Self::index(page), known);
                }
                Some(ToClient::Fetched(_, None)) | None => {}
            }
        }

        /// Reads a page where it lies, if that is known. A page that was given up is not read. `meanwhile`:
        /// another member changes the page while it is copied.
        fn read(&mut self, page: usize, meanwhile: bool) -> Result<(), (Option<u32>, u32)> {
            if self.holds[page].is_none() {
                return Ok(());
            }
            let Some(known) = self.places.known(Self::index(page)) else { return Ok(()) };
            let frame = known.place.granule as usize;
            let before = self.frames[frame].0;
            if meanwhile {
                self.others(page);
            }
            let bytes = self.frames[frame].1;
            let after = if self.mutant == Mutant::LookOnce { before } else { self.frames[frame].0 };
            if known.held(before, after) || self.mutant == Mutant::AnyGeneration {
                if self.holds[page] != Some(bytes) {
                    return Err((self.holds[page], bytes));
                }
            } else {
                self.places.missed(Self::index(page), known);
            }
            Ok(())
        }

        /// Another member changes a page that both have: after this the client's content is what it reads by
        /// asking.
        fn others(&mut self, page: usize) {
            if self.table[page].is_some() && self.to_server.is_empty() && !self.free.is_empty() {
                self.content += 1;
                let frame = self.free.pop().unwrap();
                self.frames[frame].1 = self.content;
                self.free(page);
                self.table[page] = Some(frame);
                self.holds[page] = self.holds[page].map(|_| self.content);
            }
        }

        fn step(&mut self, what: u8, page: usize) -> Result<(), (Option<u32>, u32)> {
            match what {
                0 | 1 if self.to_server.len() + 1 < FRAMES - PAGES => self.put(page),
                2 => self.discard(page),
                3 => self.to_server.push_back(ToServer::Get(page)),
                4..=6 => self.serve(),
                7 | 8 => self.hear(),
                9 => self.others(page),
                10 => return self.read(page, false),
                11 => return self.read(page, true),
                12 => self.hold(page),
                13 => self.let_go(),
                _ => {}
            }
            Ok(())
        }
    }

    fn steps() -> impl Strategy<Value = Vec<(u8, usize)>> {
        prop::collection::vec((0..STEPS, 0..PAGES), 1..400)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn no_page_is_read_that_is_stale(steps in steps()) {
            let mut model = Model::new(Mutant::None);
            for (what, page) in steps {
                prop_assert_eq!(model.step(what, page), Ok(()));
            }
        }
    }

    /// Whether some run shows that a rule is missing.
    fn is_noticed(mutant: Mutant) -> bool {
        let mut seed = 1u64;
        let mut random = move |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        (0..2000).any(|_| {
            let mut model = Model::new(mutant);
            (0..400).any(|_| {
                let (what, page) = (random(STEPS.into()), random(PAGES as u64));
                model.step(u8::try_from(what).unwrap(), usize::try_from(page).unwrap()).is_err()
            })
        })
    }

    #[test]
    fn each_rule_is_needed() {
        assert!(!is_noticed(Mutant::None));
        for mutant in [
            Mutant::AnyGeneration,
            Mutant::LookOnce,
            Mutant::Unmoved,
            Mutant::UnmovedIfHeld,
            Mutant::AnyStamp,
            Mutant::OldAnswer,
        ] {
            assert!(is_noticed(mutant), "{mutant:?}");
        }
    }
}
