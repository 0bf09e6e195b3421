//! The program's own memory, as [`Pointers`] reads it: which pages an array of pointers foretells.
//!
//! Only pages that the cache counts as resident are read, and through [`SelfMemory`], which never waits for a page: this thread is the one that
//! everybody else's pages wait for.

use rampool_proto::cache::Cache;
use rampool_proto::pointers::{Memory, Pointers};
use rampool_proto::units::{OS_PAGE_BYTES, PageIndex};
use rampool_sys::selfmem::SelfMemory;

use crate::space::AddressSpace;

/// Faults that nothing foresaw before it is worth opening anything.
const IDLE_STRAYS: u64 = 128;
/// With less local memory than this, what a few walks ask for would drive out what is in use.
const LEAST_BUDGET_PAGES: u64 = 4096;
/// Read in one call while everything resident is searched.
const PIECE_WORDS: usize = 8 * 1024;
const WORD_BYTES: usize = size_of::<u64>();

#[derive(Debug, Default)]
pub(super) struct Foresight {
    pointers: Pointers,
    memory: Opened,
    strays_seen: u64,
    piece: Vec<u64>,
    ahead: Vec<PageIndex>,
}

#[derive(Debug, Default)]
enum Opened {
    #[default]
    NotYet,
    /// This process may not read itself so.
    Refused,
    Open(SelfMemory),
}

impl Foresight {
    /// A thread waits for the content at `address`; the cache has taken notice. Returns the pages that will be wanted next, often none.
    pub fn fault(&mut self, address: usize, space: &AddressSpace, cache: &Cache) -> &[PageIndex] {
        let strays = cache.stray_faults();
        let stray = strays != self.strays_seen;
        self.strays_seen = strays;
        self.ahead.clear();
        if strays < IDLE_STRAYS || cache.budget_pages() < LEAST_BUDGET_PAGES {
            return &[];
        }
        if matches!(self.memory, Opened::NotYet) {
            self.memory = SelfMemory::open(false).map_or(Opened::Refused, Opened::Open);
            self.piece.resize(PIECE_WORDS, 0);
        }
        if let Opened::Open(memory) = &self.memory {
            let mut view = View { space, cache, memory, piece: &mut self.piece };
            self.pointers.fault(address as u64, stray, &mut view, &mut self.ahead);
        }
        &self.ahead
    }
}

struct View<'a> {
    space: &'a AddressSpace,
    cache: &'a Cache,
    memory: &'a SelfMemory,
    piece: &'a mut Vec<u64>,
}

impl Memory for View<'_> {
    fn read(&mut self, address: u64, words: &mut [u64]) -> usize {
        // Pages that are managed and absent are not there to be read; asking the cache is cheaper than asking the kernel.
        if self.look(address).is_none_or(|(_, absent)| absent) {
            return 0;
        }
        // SAFETY: the words are borrowed exclusively.
        let bytes = unsafe { self.memory.read(to_usize(address), words.as_mut_ptr().cast(), size_of_val(words)) };
        bytes / WORD_BYTES
    }

    fn look(&self, address: u64) -> Option<(PageIndex, bool)> {
        let page = self.space.page_at(to_usize(address))?;
        Some((page, self.cache.is_absent(page)))
    }

    fn each_piece(&mut self, visit: &mut dyn FnMut(u64, &[u64]) -> bool) {
        let (space, memory, piece) = (self.space, self.memory, &mut *self.piece);
        self.cache.resident_runs(|extent| {
            let mut go_on = true;
            space.pieces(extent, |part| {
                let mut done = 0;
                while go_on && done < part.bytes {
                    let bytes = (part.bytes - done).min(PIECE_WORDS * WORD_BYTES);
                    // SAFETY: the buffer is that long and borrowed exclusively.
                    let have = unsafe { memory.read(part.start + done, piece.as_mut_ptr().cast(), bytes) };
                    go_on = visit((part.start + done) as u64, &piece[..have / WORD_BYTES]);
                    // A page that cannot be read is passed over.
                    done += (have / OS_PAGE_BYTES + usize::from(have < bytes)) * OS_PAGE_BYTES;
                }
            });
            go_on
        });
    }

    fn resident_pages(&self) -> u64 {
        self.cache.used_pages()
    }
}

fn to_usize(address: u64) -> usize {
    usize::try_from(address).unwrap_or(usize::MAX)
}
