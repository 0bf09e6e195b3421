//! The program's own memory, as [`Pointers`] reads it: which pages an array of pointers foretells.
//!
//! Only pages that the cache counts as resident are read, and through [`SelfMemory`], which never waits for a
//! page: all other threads' pages wait for this thread.

use rampool_kernel::selfmem::SelfMemory;
use rampool_paging::cache::Cache;
use rampool_paging::pointers::{Memory, Pointers};
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};

use rampool_paging::space::AddressSpace;

/// How many faults without a prediction must happen before the search starts.
const IDLE_RANDOM_FAULTS: u64 = 128;
/// With less local memory than this, the pages of a few walks would evict pages in use.
const LEAST_BUDGET_PAGES: u64 = 4096;
/// Pages looked at for one piece of a search.
const LOOKS_A_PIECE: usize = 4096;
const WORD_BYTES: usize = size_of::<u64>();

#[derive(Debug, Default)]
pub(super) struct PointerPrefetcher {
    pointers: Pointers,
    memory: Opened,
    random_faults_seen: u64,
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

impl PointerPrefetcher {
    /// A thread waits for the content at `address`; the cache has taken notice. Returns the pages that will
    /// be wanted next, often none.
    pub fn fault(&mut self, address: usize, space: &AddressSpace, cache: &Cache) -> &[PageIndex] {
        let random_faults = cache.random_faults();
        let random = random_faults != self.random_faults_seen;
        self.random_faults_seen = random_faults;
        self.ahead.clear();
        if random_faults < IDLE_RANDOM_FAULTS || cache.budget_pages() < LEAST_BUDGET_PAGES {
            return &[];
        }
        if matches!(self.memory, Opened::NotYet) {
            self.memory = SelfMemory::open(false).map_or(Opened::Refused, Opened::Open);
        }
        if let Opened::Open(memory) = &self.memory {
            let mut view = View { space, cache, memory };
            self.pointers.fault(address as u64, random, &mut view, &mut self.ahead);
        }
        &self.ahead
    }

    pub fn used_pages(&self) -> u64 {
        self.pointers.used_pages()
    }

    /// Whether [`search`](Self::search) has something to do.
    pub fn is_searching(&self) -> bool {
        self.pointers.is_searching()
    }

    /// Searches a bounded number of pages for arrays of pointers.
    pub fn search(&mut self, space: &AddressSpace, cache: &Cache) {
        if let Opened::Open(memory) = &self.memory {
            self.pointers.search(&mut View { space, cache, memory });
        }
    }
}

struct View<'a> {
    space: &'a AddressSpace,
    cache: &'a Cache,
    memory: &'a SelfMemory,
}

impl Memory for View<'_> {
    fn read(&mut self, address: u64, words: &mut [u64]) -> usize {
        // Pages that are managed and absent are not there to be read; asking the cache is cheaper than asking
        // the kernel.
        if self.look(address).is_none_or(|(_, absent)| absent) {
            return 0;
        }
        // SAFETY: the words are borrowed exclusively.
        let bytes =
            unsafe { self.memory.read(to_usize(address), words.as_mut_ptr().cast(), size_of_val(words)) };
        bytes / WORD_BYTES
    }

    fn look(&self, address: u64) -> Option<(PageIndex, bool)> {
        let page = self.space.page_at(to_usize(address))?;
        Some((page, self.cache.is_absent(page)))
    }

    fn next_piece(&mut self, from: u64, until: u64, words: &mut [u64]) -> (u64, usize) {
        let mut at = to_usize(from);
        let until_at = to_usize(until);
        let mut looks = LOOKS_A_PIECE;
        while at < until_at
            && let Some(span) = self.space.span_from(at)
        {
            at = at.max(span.start);
            let end = span.end().min(until_at).max(at);
            let resident = |at: usize| {
                self.cache.is_resident(span.first.offset(((at - span.start) / OS_PAGE_BYTES) as u64))
            };
            while at < end && looks > 0 && !resident(at) {
                at = page_end(at);
                looks -= 1;
            }
            if looks == 0 {
                return (at as u64, 0);
            }
            if at < end {
                let mut run = page_end(at);
                while run < end && run - at < size_of_val(words) && resident(run) {
                    run += OS_PAGE_BYTES;
                }
                let bytes = (run.min(end) - at).min(size_of_val(words));
                // SAFETY: the words are borrowed exclusively, and are that many.
                let have = unsafe { self.memory.read(at, words.as_mut_ptr().cast(), bytes) } / WORD_BYTES;
                // A page that the kernel does not show is passed over.
                return if have == 0 { (page_end(at) as u64, 0) } else { (at as u64, have) };
            }
        }
        (until, 0)
    }

    fn resident_pages(&self) -> u64 {
        self.cache.used_pages()
    }
}

/// Where the page of `address` ends.
fn page_end(address: usize) -> usize {
    (address | (OS_PAGE_BYTES - 1)).saturating_add(1)
}

fn to_usize(address: u64) -> usize {
    usize::try_from(address).unwrap_or(usize::MAX)
}
