//! Page tables: a region is a sparse map from chunk numbers to chunks of 512 pages. A copy-on-write clone
//! copies the map and shares the chunks; a chunk is copied when one of its owners writes, and then its frames
//! are shared. The map is copied in steps. What is about to change before its turn is copied first, so that
//! the clone is of the moment when it began.
//!
//! Invariants: `chunk.owners` = roots that name it, and clones that are being made; a frame is in `1 +
//! shares[frame]` slots of all chunks; `used_bytes` counts every frame once.

use super::FrameIndex;
use super::rule::{Kept, TenantRule};
use rampool_wire::frame::MemberId;
use rampool_wire::units::{Extent, PageIndex};
use std::collections::{BTreeMap, BTreeSet};

/// Pages of a chunk.
pub(super) const CHUNK_PAGES: u64 = 512;
/// What a chunk costs the server besides the pages.
pub(super) const CHUNK_BYTES: u64 = 16 * CHUNK_PAGES;
/// What one entry of a region's root costs.
pub(super) const ROOT_ENTRY_BYTES: u64 = 32;

/// What a page is, for a caller that wants to change a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageState {
    Zero,
    /// Another region names the frame as well.
    Shared(StoredPage),
    Own(StoredPage),
}

/// What a page is when it is not zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredPage {
    pub frame: FrameIndex,
    /// The checksum as the client sent it; the client gets it back.
    pub crc: u32,
    /// Bytes in the frame, 1..=4096: 4096 plain, less for LZ4.
    pub len: u16,
    /// Bytes of the lease this page uses: the size of its frame.
    pub charge: u16,
}

/// A slot of a chunk: `len == 0` means no page.
type Slot = StoredPage;
const EMPTY: Slot = StoredPage { frame: FrameIndex(0), crc: 0, len: 0, charge: 0 };
const _: () = assert!(size_of::<Slot>() as u64 * CHUNK_PAGES == CHUNK_BYTES);

#[derive(Debug)]
pub(super) struct Chunk {
    slots: Box<[Slot]>,
    live: u32,
    owners: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChunkId(usize);

/// One region's page table.
#[derive(Debug, Default)]
pub(super) struct Root {
    chunks: BTreeMap<u64, ChunkId>,
    clones: Vec<Cloning>,
}

/// A clone that is being made.
///
/// Invariant: `owed` is the number of chunks that it wants and its root has.
#[derive(Debug)]
struct Cloning {
    member: MemberId,
    /// It has had its turn with the chunks below.
    next: u64,
    /// Those from `next` on that are copied already, or were not there when it began.
    early: BTreeSet<u64>,
    owed: u64,
    chunks: BTreeMap<u64, ChunkId>,
}

impl Cloning {
    fn wants(&self, number: u64) -> bool {
        number >= self.next && !self.early.contains(&number)
    }
}

impl Root {
    fn new(chunks: BTreeMap<u64, ChunkId>) -> Self {
        Self { chunks, clones: Vec::new() }
    }

    /// Whether a clone is still to have this chunk as it is.
    fn is_wanted(&self, number: u64) -> bool {
        self.clones.iter().any(|clone| clone.wants(number))
    }
}

/// All chunks of a lease.
#[derive(Debug, Default)]
pub(super) struct Tables {
    chunks: Vec<Option<Chunk>>,
    free: Vec<usize>,
    live_chunks: u64,
    /// Extra slots that name a frame, where there are any.
    shares: BTreeMap<FrameIndex, u32>,
    used_bytes: u64,
    pages: u64,
    root_entries: u64,
    /// Entries that clones are still to have.
    owed_entries: u64,
    /// Whether `left` is kept.
    pub(super) notes_left: bool,
    /// Frames that a page was in and is not any more, though something else may still refer to them.
    pub(super) left: Vec<FrameIndex>,
    pub(super) rules: Kept,
}

impl Chunk {
    #[inline]
    pub(super) fn page(&self, slot: usize) -> Option<StoredPage> {
        let page = self.slots[slot];
        (page.len != 0).then_some(page)
    }
}

#[inline]
pub(super) fn chunk_of(page: PageIndex) -> u64 {
    page.0 / CHUNK_PAGES
}

#[inline]
pub(super) fn slot_of(page: PageIndex) -> usize {
    usize::try_from(page.0 % CHUNK_PAGES).expect("below CHUNK_PAGES")
}

impl Tables {
    /// Bytes of all frames, each counted once.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Pages that are not zero; a page that two regions share counts once per chunk that names it.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) fn shared_frames(&self) -> u64 {
        self.shares.len() as u64
    }

    pub(super) fn metadata_bytes(&self) -> u64 {
        self.live_chunks * CHUNK_BYTES + (self.root_entries + self.owed_entries) * ROOT_ENTRY_BYTES
    }

    /// Appends what each page of the extent is.
    pub(super) fn look_up(&self, root: &Root, extent: Extent, out: &mut Vec<Option<StoredPage>>) {
        let mut page = extent.first;
        while page < extent.end() {
            let in_chunk = (CHUNK_PAGES - page.0 % CHUNK_PAGES).min(extent.end().0 - page.0);
            let end = out.len() + usize::try_from(in_chunk).expect("at most CHUNK_PAGES");
            match root.chunks.get(&chunk_of(page)) {
                None => out.resize(end, None),
                Some(id) => {
                    let start = slot_of(page);
                    let slots = &self.chunk(*id).slots[start..start + (end - out.len())];
                    out.extend(slots.iter().map(|slot| (slot.len != 0).then_some(*slot)));
                }
            }
            page = page.offset(in_chunk);
        }
    }

    /// The chunk of this number.
    pub(super) fn chunk_at(&self, root: &Root, number: u64) -> Option<&Chunk> {
        root.chunks.get(&number).map(|id| self.chunk(*id))
    }

    /// Whether the page's frame is named here alone.
    pub(super) fn state(&self, root: &Root, page: PageIndex) -> PageState {
        let Some(chunk) = self.chunk_at(root, chunk_of(page)) else { return PageState::Zero };
        let wanted = root.is_wanted(chunk_of(page)) && self.rules.keep(TenantRule::Wanted);
        let shared = chunk.owners > 1 || wanted;
        match chunk.page(slot_of(page)) {
            None => PageState::Zero,
            Some(page) if shared || self.shares.contains_key(&page.frame) => PageState::Shared(page),
            Some(page) => PageState::Own(page),
        }
    }

    /// The page has another checksum.
    ///
    /// # Panics
    /// If another root sees the page as well.
    pub(super) fn set_crc(&mut self, root: &Root, page: PageIndex, crc: u32) {
        let id = root.chunks.get(&chunk_of(page)).expect("the page is stored");
        let chunk = self.chunks[id.0].as_mut().expect("a named chunk exists");
        let slot = &mut chunk.slots[slot_of(page)];
        assert!(
            chunk.owners == 1
                && !root.is_wanted(chunk_of(page))
                && slot.len != 0
                && !self.shares.contains_key(&slot.frame),
            "only what is a region's own changes"
        );
        slot.crc = crc;
    }

    /// The most that writing `charge` bytes here (0: making it zero) can add to frames and metadata.
    pub(super) fn growth(&self, root: &Root, page: PageIndex, charge: u16) -> (u64, u64) {
        let Some(id) = root.chunks.get(&chunk_of(page)) else {
            return if charge == 0 { (0, 0) } else { (charge.into(), CHUNK_BYTES + ROOT_ENTRY_BYTES) };
        };
        let chunk = self.chunk(*id);
        let old = chunk.slots[slot_of(page)];
        if charge == 0 && old.len == 0 {
            return (0, 0);
        }
        let shared = chunk.owners > 1 || root.is_wanted(chunk_of(page));
        let metadata = if shared { CHUNK_BYTES } else { 0 };
        let given_back =
            if old.len == 0 || shared || self.shares.contains_key(&old.frame) { 0 } else { old.charge };
        (u64::from(charge.saturating_sub(given_back)), metadata)
    }

    /// Replaces what the page is. A frame without references is appended to `released`.
    pub(super) fn set(
        &mut self,
        root: &mut Root,
        page: PageIndex,
        new: Option<StoredPage>,
        released: &mut Vec<FrameIndex>,
    ) {
        let number = chunk_of(page);
        let known = root.chunks.get(&number).copied();
        if new.is_none() && known.is_none_or(|id| self.chunk(id).slots[slot_of(page)].len == 0) {
            return;
        }
        self.copy_first(root, number);
        let id = match known {
            Some(id) => self.own(root, number, id),
            None => {
                let id = self
                    .add_chunk(vec![EMPTY; usize::try_from(CHUNK_PAGES).expect("512")].into_boxed_slice(), 0);
                root.chunks.insert(number, id);
                self.root_entries += 1;
                id
            }
        };
        if let Some(page) = new {
            assert!(page.len > 0 && page.charge > 0, "a stored page has bytes");
            self.used_bytes += u64::from(page.charge);
            self.pages += 1;
        }
        let chunk = self.chunks[id.0].as_mut().expect("a named chunk exists");
        let old = std::mem::replace(&mut chunk.slots[slot_of(page)], new.unwrap_or(EMPTY));
        chunk.live = chunk.live + u32::from(new.is_some()) - u32::from(old.len != 0);
        let empty = chunk.live == 0;
        if old.len != 0 {
            self.pages -= 1;
            if self.notes_left {
                self.left.push(old.frame);
            }
            self.drop_frame(old, released);
        }
        if empty {
            root.chunks.remove(&number);
            self.root_entries -= 1;
            self.drop_chunk(id, released);
        }
    }

    /// The chunks that must be copied before this extent is made zero, because other regions share them and
    /// they keep other pages.
    pub(super) fn copies_to_discard(&self, root: &Root, extent: Extent) -> u64 {
        let edges = [chunk_of(extent.first), chunk_of(PageIndex(extent.end().0 - 1))];
        let partial = |number: u64| {
            let whole =
                extent.first.0 <= number * CHUNK_PAGES && (number + 1) * CHUNK_PAGES <= extent.end().0;
            let shared = |id: &ChunkId| self.chunk(*id).owners > 1 || root.is_wanted(number);
            !whole && root.chunks.get(&number).is_some_and(shared)
        };
        u64::from(partial(edges[0])) + u64::from(edges[1] != edges[0] && partial(edges[1]))
    }

    /// Makes pages of the extent zero, in at most so many chunks; the cost grows with the chunks, not with
    /// the length of the extent. Returns the first page that is left to do.
    pub(super) fn discard(
        &mut self,
        root: &mut Root,
        extent: Extent,
        most: usize,
        released: &mut Vec<FrameIndex>,
    ) -> Option<PageIndex> {
        let last = chunk_of(PageIndex(extent.end().0 - 1));
        let mut range = root.chunks.range(chunk_of(extent.first)..=last).map(|(number, _)| *number);
        let numbers: Vec<u64> = range.by_ref().take(most).collect();
        let next = range.next().map(|number| PageIndex((number * CHUNK_PAGES).max(extent.first.0)));
        for number in numbers {
            let first = extent.first.0.max(number * CHUNK_PAGES);
            let end = extent.end().0.min((number + 1) * CHUNK_PAGES);
            if end - first == CHUNK_PAGES {
                self.copy_first(root, number);
                let id = root.chunks.remove(&number).expect("in the range");
                self.root_entries -= 1;
                if self.notes_left {
                    let chunk = self.chunks[id.0].as_ref().expect("a named chunk exists");
                    self.left.extend(chunk.slots.iter().filter(|s| s.len != 0).map(|slot| slot.frame));
                }
                self.drop_chunk(id, released);
            } else {
                for page in first..end {
                    self.set(root, PageIndex(page), None, released);
                }
            }
        }
        next
    }

    /// Begins a copy-on-write copy of the root as it is now; [`Tables::clone_some`] makes it.
    pub(super) fn begin_clone(&mut self, root: &mut Root, member: MemberId) {
        let owed = root.chunks.len() as u64;
        self.owed_entries += owed;
        let (early, chunks) = (BTreeSet::new(), BTreeMap::new());
        root.clones.push(Cloning { member, next: 0, early, owed, chunks });
    }

    /// Whether a clone of this root goes on for the member.
    pub(super) fn is_cloning(&self, root: &Root, member: MemberId) -> bool {
        root.clones.iter().any(|clone| clone.member == member)
    }

    /// Goes on with a clone, by so many chunks at most. Returns it when it is complete.
    ///
    /// # Panics
    /// If none goes on for the member.
    pub(super) fn clone_some(&mut self, root: &mut Root, member: MemberId, most: usize) -> Option<Root> {
        let at = root.clones.iter().position(|clone| clone.member == member).expect("it has begun");
        let clone = &mut root.clones[at];
        let mut range = root.chunks.range(clone.next..);
        for (number, id) in range.by_ref().take(most) {
            if clone.wants(*number) {
                self.chunks[id.0].as_mut().expect("a named chunk exists").owners += 1;
                clone.chunks.insert(*number, *id);
                clone.owed -= 1;
                self.owed_entries -= 1;
                self.root_entries += 1;
            }
            clone.next = number + 1;
        }
        if range.next().is_some() {
            clone.early = clone.early.split_off(&clone.next);
            return None;
        }
        let clone = root.clones.swap_remove(at);
        assert_eq!(clone.owed, 0, "a complete clone has all that was there");
        Some(Root::new(clone.chunks))
    }

    /// Gives up clones of this root: those of the member, or all. Returns what there is of them.
    pub(super) fn stop_clones(&mut self, root: &mut Root, member: Option<MemberId>) -> Vec<Root> {
        if member.is_none() && !self.rules.keep(TenantRule::StopClones) {
            return Vec::new();
        }
        let stops = |clone: &mut Cloning| member.is_none_or(|member| clone.member == member);
        let stopped: Vec<Cloning> = root.clones.extract_if(.., stops).collect();
        self.owed_entries -= stopped.iter().map(|clone| clone.owed).sum::<u64>();
        stopped.into_iter().map(|clone| Root::new(clone.chunks)).collect()
    }

    /// The chunk is about to change: clones that are still to have it as it is have it now.
    fn copy_first(&mut self, root: &mut Root, number: u64) {
        if !self.rules.keep(TenantRule::CopyFirst) {
            return;
        }
        for clone in root.clones.iter_mut().filter(|clone| clone.wants(number)) {
            clone.early.insert(number);
            if let Some(id) = root.chunks.get(&number) {
                self.chunks[id.0].as_mut().expect("a named chunk exists").owners += 1;
                clone.chunks.insert(number, *id);
                clone.owed -= 1;
                self.owed_entries -= 1;
                self.root_entries += 1;
            }
        }
    }

    pub(super) fn clone_cost(&self, root: &Root) -> u64 {
        root.chunks.len() as u64 * ROOT_ENTRY_BYTES
    }

    /// Takes at most so many chunks out of a root. Returns how many; fewer: it is empty.
    pub(super) fn drop_chunks(&mut self, root: &mut Root, most: u64, released: &mut Vec<FrameIndex>) -> u64 {
        assert!(root.clones.is_empty(), "clones of what is freed are given up");
        let mut dropped = 0;
        while dropped < most
            && let Some((_, id)) = root.chunks.pop_last()
        {
            self.root_entries -= 1;
            self.drop_chunk(id, released);
            dropped += 1;
        }
        dropped
    }

    /// # Panics
    /// If an invariant is broken.
    pub(super) fn check<'a>(&self, roots: impl Iterator<Item = &'a Root>) {
        let mut owners: BTreeMap<usize, u32> = BTreeMap::new();
        let (mut entries, mut owed) = (0, 0);
        for root in roots {
            for chunks in root.clones.iter().map(|clone| &clone.chunks).chain([&root.chunks]) {
                entries += chunks.len() as u64;
                chunks.values().for_each(|id| *owners.entry(id.0).or_default() += 1);
            }
            for clone in &root.clones {
                assert_eq!(root.chunks.keys().filter(|n| clone.wants(**n)).count() as u64, clone.owed);
                owed += clone.owed;
            }
        }
        assert_eq!((entries, owed), (self.root_entries, self.owed_entries));
        let mut named: BTreeMap<FrameIndex, (u32, u16)> = BTreeMap::new();
        let (mut live_chunks, mut pages) = (0, 0);
        for (index, chunk) in self.chunks.iter().enumerate() {
            let Some(chunk) = chunk else {
                assert!(self.free.contains(&index));
                continue;
            };
            live_chunks += 1;
            assert_eq!(Some(&chunk.owners), owners.get(&index), "owners of chunk {index}");
            let live = chunk.slots.iter().filter(|s| s.len != 0);
            assert_eq!(chunk.live as usize, live.clone().count());
            assert!(chunk.live > 0, "an empty chunk is kept");
            pages += u64::from(chunk.live);
            for slot in live {
                let entry = named.entry(slot.frame).or_insert((0, slot.charge));
                entry.0 += 1;
                assert_eq!(entry.1, slot.charge);
            }
        }
        assert_eq!((live_chunks, pages), (self.live_chunks, self.pages));
        assert_eq!(self.free.len() + owners.len(), self.chunks.len());
        assert_eq!(self.used_bytes, named.values().map(|(_, charge)| u64::from(*charge)).sum::<u64>());
        let shares: BTreeMap<_, _> =
            named.into_iter().filter(|(_, (n, _))| *n > 1).map(|(frame, (n, _))| (frame, n - 1)).collect();
        assert_eq!(shares, self.shares);
    }

    fn chunk(&self, id: ChunkId) -> &Chunk {
        self.chunks[id.0].as_ref().expect("a named chunk exists")
    }

    /// The chunk itself if this root is its only owner, else a copy that is.
    fn own(&mut self, root: &mut Root, number: u64, id: ChunkId) -> ChunkId {
        let chunk = self.chunks[id.0].as_mut().expect("a named chunk exists");
        if chunk.owners == 1 {
            return id;
        }
        chunk.owners -= 1;
        let (slots, live) = (chunk.slots.clone(), chunk.live);
        for slot in slots.iter().filter(|s| s.len != 0) {
            *self.shares.entry(slot.frame).or_default() += 1;
        }
        self.pages += u64::from(live);
        let copy = self.add_chunk(slots, live);
        root.chunks.insert(number, copy);
        copy
    }

    fn add_chunk(&mut self, slots: Box<[Slot]>, live: u32) -> ChunkId {
        let chunk = Some(Chunk { slots, live, owners: 1 });
        self.live_chunks += 1;
        match self.free.pop() {
            Some(index) => {
                self.chunks[index] = chunk;
                ChunkId(index)
            }
            None => {
                self.chunks.push(chunk);
                ChunkId(self.chunks.len() - 1)
            }
        }
    }

    fn drop_chunk(&mut self, id: ChunkId, released: &mut Vec<FrameIndex>) {
        let chunk = self.chunks[id.0].as_mut().expect("a named chunk exists");
        chunk.owners -= 1;
        if chunk.owners > 0 {
            return;
        }
        let chunk = self.chunks[id.0].take().expect("seen above");
        self.free.push(id.0);
        self.live_chunks -= 1;
        for slot in chunk.slots.iter().filter(|s| s.len != 0) {
            self.pages -= 1;
            self.drop_frame(*slot, released);
        }
    }

    fn drop_frame(&mut self, page: StoredPage, released: &mut Vec<FrameIndex>) {
        match self.shares.get_mut(&page.frame) {
            Some(1) => {
                self.shares.remove(&page.frame);
            }
            Some(extra) => *extra -= 1,
            None => {
                self.used_bytes -= u64::from(page.charge);
                released.push(page.frame);
            }
        }
    }
}
