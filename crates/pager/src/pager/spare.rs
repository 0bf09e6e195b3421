//! Frames that eviction batches left, on their way to become the buffers of fetches and then the program's
//! pages again.
//!
//! ```text
//!   program --evict--> batch --released--> spare --fetch--> lent --moved in--> program
//! ```
//!
//! Without this, the kernel takes the frames of every released batch back and makes new ones for every page
//! that comes. The cache counts spare frames; what is here is never more than that. Frames lie in the
//! batches' slots, which stay taken until the last of their frames has gone. They are registered with
//! userfaultfd, so nothing here may touch one that is absent.

use rampool_wire::units::OS_PAGE_BYTES;

use crate::fault::FaultCatcher;
use crate::frames::Frames;

/// Present frames at consecutive addresses of one slot.
#[derive(Clone, Copy, Debug)]
struct Run {
    slot: u32,
    start: usize,
    pages: u32,
}

/// The buffer of a fetch.
#[derive(Clone, Copy, Debug)]
struct Lent {
    run: Run,
    /// Frames of it that the program has now.
    moved: u32,
}

#[derive(Debug, Default)]
pub(super) struct Spare {
    /// The oldest first.
    runs: Vec<Run>,
    /// By slot: frames of it that are spare or lent.
    held: Vec<u32>,
    /// By fetch.
    lent: Vec<Option<Lent>>,
    /// Frames that the cache counts as spare and the kernel has already.
    missing: u64,
}

impl Spare {
    /// Keeps the present frames of a released batch: `present` are `(offset, pages)` in its slot. `reserve`
    /// slots are left to batches.
    pub fn keep(
        &mut self,
        batch: u32,
        present: &[(u32, u32)],
        reserve: usize,
        frames: &mut Frames,
        faults: &FaultCatcher,
    ) {
        let pages: u32 = present.iter().map(|(_, pages)| pages).sum();
        let (slot, start) = frames.detach(batch);
        if pages == 0 || frames.free_slots() < reserve {
            // SAFETY: the cache released the batch: its content is not needed.
            unsafe { faults.empty_frames(start, frames.slot_bytes()) };
            frames.put_back(slot);
            self.missing += u64::from(pages);
            return;
        }
        let index = slot as usize;
        if self.held.len() <= index {
            self.held.resize(index + 1, 0);
        }
        assert_eq!(self.held[index], 0, "a batch's slot holds nothing else");
        self.held[index] = pages;
        self.runs.extend(present.iter().map(|&(offset, pages)| Run {
            slot,
            start: start + offset as usize * OS_PAGE_BYTES,
            pages,
        }));
    }

    /// A buffer for `pages` pages of a fetch; `None` where no run is long enough: as many frames have been
    /// given back then.
    pub fn lend(
        &mut self,
        fetch: u32,
        pages: u32,
        frames: &mut Frames,
        faults: &FaultCatcher,
    ) -> Option<usize> {
        // The shortest that will do, the youngest of these: long runs last.
        let best = (0..self.runs.len())
            .rev()
            .filter(|&i| self.runs[i].pages >= pages)
            .min_by_key(|&i| self.runs[i].pages);
        let Some(at) = best else {
            self.give_back(u64::from(pages), frames, faults);
            return None;
        };
        let run = &mut self.runs[at];
        let lent = Run { pages, ..*run };
        run.start += pages as usize * OS_PAGE_BYTES;
        run.pages -= pages;
        if run.pages == 0 {
            self.runs.remove(at);
        }
        let index = fetch as usize;
        if self.lent.len() <= index {
            self.lent.resize(index + 1, None);
        }
        assert!(self.lent[index].is_none(), "a fetch has one buffer");
        self.lent[index] = Some(Lent { run: lent, moved: 0 });
        Some(lent.start)
    }

    /// Where the buffer of a fetch is, if it was lent one.
    pub fn start_of(&self, fetch: u32) -> Option<usize> {
        self.lent.get(fetch as usize).copied().flatten().map(|lent| lent.run.start)
    }

    /// `pages` frames of a lent buffer are in the program now.
    pub fn moved(&mut self, fetch: u32, pages: u32) {
        let lent = self.lent.get_mut(fetch as usize).and_then(Option::as_mut).expect("a lent buffer");
        lent.moved += pages;
        assert!(lent.moved <= lent.run.pages, "no frame is moved twice");
    }

    /// The fetch is done with its buffer; false if it was lent none. What the program did not get goes to the
    /// kernel.
    pub fn release(&mut self, fetch: u32, frames: &mut Frames, faults: &FaultCatcher) -> bool {
        let Some(Lent { run, moved }) = self.lent.get_mut(fetch as usize).and_then(Option::take) else {
            return false;
        };
        if moved < run.pages {
            empty(run.start, run.pages, faults);
        }
        self.let_go(run.slot, run.pages, frames);
        true
    }

    /// Gives frames back to the kernel, the oldest first.
    pub fn give_back(&mut self, pages: u64, frames: &mut Frames, faults: &FaultCatcher) {
        let known = pages.min(self.missing);
        self.missing -= known;
        let mut left = u32::try_from(pages - known).expect("there are fewer spare frames");
        while left > 0 {
            let run = self.runs.first_mut().expect("the cache counts no more spare frames than there are");
            let part = Run { pages: run.pages.min(left), ..*run };
            run.start += part.pages as usize * OS_PAGE_BYTES;
            run.pages -= part.pages;
            if run.pages == 0 {
                self.runs.remove(0);
            }
            empty(part.start, part.pages, faults);
            self.let_go(part.slot, part.pages, frames);
            left -= part.pages;
        }
    }

    fn let_go(&mut self, slot: u32, pages: u32, frames: &mut Frames) {
        let held = &mut self.held[slot as usize];
        *held -= pages;
        if *held == 0 {
            frames.put_back(slot);
        }
    }
}

fn empty(start: usize, pages: u32, faults: &FaultCatcher) {
    // SAFETY: spare frames hold nothing needed, and what a fetch brought is in the program, or still at the
    // servers.
    unsafe { faults.empty_frames(start, pages as usize * OS_PAGE_BYTES) };
}
