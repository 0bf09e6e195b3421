//! Settings that all ranks agree on before they start: ranks, regions, default homes and managers.

use std::collections::BTreeMap;

use super::{LockId, Rank};
use rampool_wire::units::{Extent, PageIndex};

/// A consistency protocol.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ProtocolKind {
    /// Sequential consistency: one writer or many readers, by invalidation.
    Sc,
    /// Lazy release consistency, homeless: diffs are fetched from their writers.
    Lrc,
    /// Home-based lazy release consistency: diffs go to the home at release.
    Hlrc,
    /// Automatic update release consistency: as hlrc, with updates streamed to the home while the rank is
    /// idle.
    Aurc,
    /// Implicit-binding entry consistency: writes under a lock travel with the lock.
    Ibec,
    /// Like hlrc, with each page in the mode that suits its use.
    Auto,
}

impl ProtocolKind {
    pub const ALL: [Self; 6] = [Self::Sc, Self::Lrc, Self::Hlrc, Self::Aurc, Self::Ibec, Self::Auto];

    /// The name by which users choose it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sc => "sc",
            Self::Lrc => "lrc",
            Self::Hlrc => "hlrc",
            Self::Aurc => "aurc",
            Self::Ibec => "ibec",
            Self::Auto => "auto",
        }
    }

    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// The initial homes of pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Homes {
    /// Page `i` of the region at rank `i mod ranks`.
    Cyclic,
    /// The region in `ranks` equal parts.
    Blocked,
    /// The same, the first part at this rank, the next one at the next rank.
    BlockedFrom(Rank),
    /// All at one rank.
    At(Rank),
}

/// The initial managers of locks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Managers {
    /// Lock `l` at rank `l mod ranks`.
    Cyclic,
    /// All at one rank (S5's single manager).
    At(Rank),
}

/// How a lock's data travels.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LockPath {
    /// The manager forwards a request to the last holder, which grants directly (TreadMarks, S5's old
    /// scheme). The last holder takes the lock again without a message.
    Forward,
    /// A release goes to the manager, which grants (S5's new scheme).
    Central,
    /// The manager chooses for each lock: central, until one rank alone requests it again and again.
    Either,
}

/// Pages that share a protocol.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RegionConfig {
    /// Its pages in the space of all shared pages; regions are disjoint.
    pub pages: Extent,
    /// Bytes in a page (the unit of coherence), at most 64 KiB.
    pub page_bytes: u32,
    pub protocol: ProtocolKind,
    pub homes: Homes,
}

/// Tunable parameters. The defaults are for a local network.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tuning {
    /// A lock passes at most this many times between threads of one rank while another rank waits.
    pub local_handovers: u8,
    /// `sc`: a page that just arrived is kept this long, so that the thread that waited can use it. 0: not at
    /// all.
    pub hold_us: u32,
    /// A lock that goes to and fro between ranks is kept for `keep_us` when another rank wants it, as long as
    /// threads of this rank mostly take it so often meanwhile.
    pub keep_uses: u32,
    /// 0: not at all.
    pub keep_us: u32,
    /// `hlrc`, `aurc`, `auto`, and `ibec` at a page's home: a page that was written in this many intervals
    /// stays writable over releases and is scanned instead. 255: never.
    pub hot_after: u8,
    /// A hot page cools after this many scans without a change.
    pub cool_after: u8,
    /// `hlrc`, `aurc`, `auto`: at most this many bytes of untouched pages are fetched at a time: a rank's own
    /// requests queue behind the pages that it sends. 0: none.
    pub ahead_bytes: u32,
    /// `lrc`: bytes of diffs kept by one rank after which it asks for a collection at the next barrier.
    pub collect_bytes: u32,
    /// Children of a node of the barrier tree. With up to `flat_barrier` ranks the root is the parent of all.
    pub barrier_arity: u16,
    pub flat_barrier: u16,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            local_handovers: 16,
            hold_us: 200,
            keep_uses: 8,
            keep_us: 200,
            hot_after: 3,
            cool_after: 8,
            ahead_bytes: 256 << 10,
            collect_bytes: 16 << 20,
            barrier_arity: 8,
            flat_barrier: 16,
        }
    }
}

/// Everything one engine needs to start. All ranks use the same values, except for `rank`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    pub rank: Rank,
    pub ranks: u16,
    pub regions: Vec<RegionConfig>,
    pub managers: Managers,
    /// `None`: `Either` if any region is `ibec`, else `Forward`.
    pub lock_path: Option<LockPath>,
    pub tuning: Tuning,
}

/// Why a configuration, or a region that is added later, is refused.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("{rank} of {ranks} ranks")]
    Rank { rank: Rank, ranks: u16 },
    #[error("a region at {first} is empty, or ends beyond page {}", u32::MAX)]
    Extent { first: PageIndex },
    #[error("the region at {first} overlaps the one at {other}")]
    Overlap { first: PageIndex, other: PageIndex },
    #[error("a page has {page_bytes} bytes: use a multiple of 8 from 8 to 65536")]
    PageBytes { page_bytes: u32 },
}

/// The regions by their first page.
#[derive(Clone, Hash, Debug)]
pub(crate) struct Regions(BTreeMap<PageIndex, RegionConfig>);

impl Regions {
    pub fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub fn add(&mut self, region: RegionConfig, ranks: u16) -> Result<(), ConfigError> {
        let first = region.pages.first;
        if region.pages.count == 0 || region.pages.end().0 > u64::from(u32::MAX) {
            return Err(ConfigError::Extent { first });
        }
        if !(8..=65536).contains(&region.page_bytes) || !region.page_bytes.is_multiple_of(8) {
            return Err(ConfigError::PageBytes { page_bytes: region.page_bytes });
        }
        if let Homes::At(rank) | Homes::BlockedFrom(rank) = region.homes
            && rank.0 >= ranks
        {
            return Err(ConfigError::Rank { rank, ranks });
        }
        let before = self.0.range(..region.pages.end()).next_back();
        if let Some((_, other)) = before
            && other.pages.end() > first
        {
            return Err(ConfigError::Overlap { first, other: other.pages.first });
        }
        self.0.insert(first, region);
        Ok(())
    }

    pub fn find(&self, page: PageIndex) -> Option<&RegionConfig> {
        self.0
            .range(..=page)
            .next_back()
            .map(|(_, region)| region)
            .filter(|region| region.pages.contains(page))
    }

    /// Whether each of these pages is in a region.
    pub fn hold(&self, pages: Extent) -> bool {
        let Some(end) = pages.first.0.checked_add(u64::from(pages.count)) else { return false };
        let mut page = pages.first;
        while page.0 < end {
            let Some(region) = self.find(page) else { return false };
            page = region.pages.end();
        }
        true
    }
}

/// Current homes and managers, as changed by barriers.
#[derive(Clone, Hash, Debug)]
pub(crate) struct Tables {
    ranks: u16,
    managers: Managers,
    moved_homes: BTreeMap<PageIndex, Rank>,
    moved_managers: BTreeMap<LockId, Rank>,
}

/// Locks with this bit are the engine's own: one for each word that an atomic operation touched.
const WORD_LOCK: u64 = 1 << 63;

/// The lock of the word at `offset` of `page`.
#[must_use]
pub fn word_lock(page: PageIndex, offset: u32) -> LockId {
    LockId(WORD_LOCK | page.0 << 17 | u64::from(offset))
}

/// The page of a word's lock, and the word's offset in it. `None`: the program names the lock.
#[must_use]
pub fn word_of(lock: LockId) -> Option<(PageIndex, u64)> {
    let number = lock.0 & !WORD_LOCK;
    (number != lock.0).then_some((PageIndex(number >> 17), number & ((1 << 17) - 1)))
}

/// The lock of a whole page, for operations on several of its words. No word has this number.
pub(crate) fn page_lock(page: PageIndex) -> LockId {
    word_lock(page, 1 << 16)
}

impl Tables {
    pub fn new(ranks: u16, managers: Managers) -> Self {
        Self { ranks, managers, moved_homes: BTreeMap::new(), moved_managers: BTreeMap::new() }
    }

    pub fn home(&self, regions: &Regions, page: PageIndex) -> Rank {
        self.moved_homes.get(&page).copied().unwrap_or_else(|| self.first_home(regions, page))
    }

    fn first_home(&self, regions: &Regions, page: PageIndex) -> Rank {
        let Some(region) = regions.find(page) else { return Rank(0) };
        let index = page.0 - region.pages.first.0;
        let ranks = u64::from(self.ranks);
        let part = || index * ranks / u64::from(region.pages.count);
        let rank = match region.homes {
            Homes::Cyclic => index % ranks,
            Homes::Blocked => part(),
            Homes::BlockedFrom(rank) => (part() + u64::from(rank.0)) % ranks,
            Homes::At(rank) => u64::from(rank.0),
        };
        Rank(u16::try_from(rank).expect("a rank is below the number of ranks"))
    }

    pub fn manager(&self, regions: &Regions, lock: LockId) -> Rank {
        if let Some(&rank) = self.moved_managers.get(&lock) {
            return rank;
        }
        if lock.0 & WORD_LOCK != 0 {
            // It stays there when the home moves: a lock's management never moves by itself.
            return self.first_home(regions, PageIndex((lock.0 & !WORD_LOCK) >> 17));
        }
        match self.managers {
            Managers::Cyclic => Rank(
                u16::try_from(lock.0 % u64::from(self.ranks))
                    .expect("a remainder is below the number of ranks"),
            ),
            Managers::At(rank) => rank,
        }
    }

    pub fn move_home(&mut self, page: PageIndex, to: Rank) {
        self.moved_homes.insert(page, to);
    }

    pub fn move_manager(&mut self, lock: LockId, to: Rank) {
        self.moved_managers.insert(lock, to);
    }
}
