//! One lease's regions and pages.
//!
//! Regions belong to members; only the owner uses one, until another member of the lease adopts it (a fork
//! child takes over the copy its parent made for it), or its owner opens it for all members: then it belongs
//! to the lease, and stays until a member frees it or the lease closes. A lease pays for frames, each once
//! however many regions share it. Page tables are free up to a 64th of the lease, four times what densely
//! used regions need, and a little more for small leases, which is charged to the tenant; beyond that they
//! are paid for, as are regions themselves beyond 64, so that no client can make a server hold tables for
//! pages it does not hold.
//!
//! A queue's messages are paid for as well: their bodies as pages of the queue's region, which belongs to the
//! lease, the rest by [`Queues::memory_bytes`].
//!
//! Invariant: `used_bytes + paid_metadata_bytes + memory of messages <= limit_bytes`.

use super::answers::Answers;
use super::queue::{Asker, Output, QueueError, QueueId, QueueLimits, Queues};
use super::rule::TenantRule;
use super::table::{
    CHUNK_BYTES, Chunk, PageState, ROOT_ENTRY_BYTES, Root, StoredPage, Tables, chunk_of, slot_of,
};
use super::tenants::{Charges, OverQuota};
use super::{ConnectionNumber, FrameIndex, Tick};
use rampool_wire::frame::{
    MAX_PAGE_INDEX, MemberId, Push, PushHeads, QueueBounds, RegionId, Settlement, Take,
};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Regions of one lease.
const MAX_REGIONS: usize = 16 * 1024;
/// Regions of one lease that have a name.
const MAX_NAMES: usize = 1024;
/// What a region is charged, besides its tables, beyond the free number: a name and its record.
const REGION_BYTES: u64 = 512;
const FREE_REGIONS: usize = 64;
/// Extents that a bounded step of a discard looks at.
const EXTENTS_AT_ONCE: usize = 16;
/// Page tables that a lease has for free beyond a 64th of it, so that a small lease is usable at all: not
/// more than its size, and one.
const FREE_METADATA_BYTES: u64 = 16 * CHUNK_BYTES;
const ONE_TABLE_BYTES: u64 = CHUNK_BYTES + ROOT_ENTRY_BYTES;

/// Why a request was refused; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    #[error("the lease is full: {free} bytes are free in it")]
    Full { free: u64 },
    #[error("no such region in this lease")]
    NoSuchRegion,
    #[error("the region belongs to another member")]
    NotOwner,
    #[error("a lease can have {MAX_REGIONS} regions")]
    TooManyRegions,
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error("a lease can have {MAX_NAMES} regions with a name")]
    TooManyNames,
    #[error("a region has from 1 byte to 4 PiB")]
    RegionLength,
    #[error("the region holds the bodies of a queue's messages")]
    OfQueue,
    #[error("the region has {bytes} bytes, the request reaches up to {reach}")]
    BeyondRegion { bytes: u64, reach: u64 },
    #[error("the member has left the lease")]
    MemberGone,
    #[error("the member has reconnected on another connection")]
    Replaced,
}

/// Why a request to a queue was refused; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueSpaceError {
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Space(#[from] SpaceError),
}

/// What a lease uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpaceUsage {
    pub limit_bytes: u64,
    /// Frames, each counted once, and page tables and regions beyond the free allowance.
    pub used_bytes: u64,
    pub metadata_bytes: u64,
    /// Pages that are not zero.
    pub pages: u64,
    /// Frames that more than one page table names.
    pub shared_frames: u64,
    pub regions: u64,
}

/// Regions, page tables and accounts of one lease.
#[derive(Debug)]
pub struct LeaseSpace {
    limit_bytes: u64,
    members: BTreeMap<MemberId, Member>,
    regions: BTreeMap<RegionId, Region>,
    names: BTreeMap<String, RegionId>,
    tables: Tables,
    /// Of freed regions, whose pages are being freed.
    freed: Vec<Root>,
    /// Which region each member clones.
    cloning: BTreeMap<MemberId, RegionId>,
    /// Whose update is half done.
    updating: BTreeSet<MemberId>,
    queues: Queues,
    /// Its tenant can have no more regions, or queues.
    over: Option<OverQuota>,
    next_region: u64,
}

#[derive(Debug)]
struct Member {
    connection: ConnectionNumber,
    /// The latest request that made a region, and the region: a repetition after a broken connection gets the
    /// same answer.
    made: Option<(u64, RegionId)>,
    /// The latest updates, likewise.
    done: Answers,
}

#[derive(Debug)]
struct Region {
    /// `None`: every member's.
    owner: Option<MemberId>,
    root: Root,
    /// 0: as many as a region can have.
    bytes: u64,
}

/// Which region to open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionSelector<'a> {
    Name(&'a str),
    Region(RegionId),
}

/// The pages of a region, for reading.
pub struct View<'a> {
    tables: &'a Tables,
    root: &'a Root,
    bytes: u64,
    /// The chunk looked at last.
    last: Option<(u64, Option<&'a Chunk>)>,
    /// Frequently used others, by the lowest bits of their numbers: for requests that alternate between
    /// regions.
    seen: Vec<Option<(u64, Option<&'a Chunk>)>>,
}

const SEEN: usize = 256;

impl View<'_> {
    /// An error if the region ends before `reach`.
    ///
    /// # Errors
    /// [`SpaceError::BeyondRegion`].
    pub fn reaches(&self, reach: u64) -> Result<(), SpaceError> {
        if reach <= self.bytes { Ok(()) } else { Err(SpaceError::BeyondRegion { bytes: self.bytes, reach }) }
    }

    /// What the page is; `None` is a zero page.
    #[inline]
    pub fn page(&mut self, page: PageIndex) -> Option<StoredPage> {
        let number = chunk_of(page);
        let chunk = match self.last {
            Some((last, chunk)) if last == number => chunk,
            _ => {
                if self.seen.is_empty() && self.last.is_some() {
                    self.seen.resize(SEEN, None);
                }
                let chunk =
                    match self.seen.get_mut(usize::try_from(number % SEEN as u64).expect("below SEEN")) {
                        Some(Some((seen, chunk))) if *seen == number => *chunk,
                        place => {
                            let chunk = self.tables.chunk_at(self.root, number);
                            if let Some(place) = place {
                                *place = Some((number, chunk));
                            }
                            chunk
                        }
                    };
                self.last = Some((number, chunk));
                chunk
            }
        };
        chunk?.page(slot_of(page))
    }
}

impl LeaseSpace {
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            members: BTreeMap::new(),
            regions: BTreeMap::new(),
            names: BTreeMap::new(),
            tables: Tables::default(),
            freed: Vec::new(),
            cloning: BTreeMap::new(),
            updating: BTreeSet::new(),
            queues: Queues::new(QueueLimits::default()),
            over: None,
            next_region: 1,
        }
    }

    /// With other limits of queues; call it before there are queues.
    #[must_use]
    pub fn with_queue_limits(self, limits: QueueLimits) -> Self {
        Self { queues: Queues::new(limits), ..self }
    }

    /// Leaves a rule out.
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: TenantRule) {
        self.tables.rules.omit(rule);
    }

    #[must_use]
    pub fn usage(&self) -> SpaceUsage {
        SpaceUsage {
            limit_bytes: self.limit_bytes,
            used_bytes: self.used_bytes(self.tables.used_bytes(), self.tables.metadata_bytes()),
            metadata_bytes: self.tables.metadata_bytes(),
            pages: self.tables.pages(),
            shared_frames: self.tables.shared_frames(),
            regions: self.regions.len() as u64,
        }
    }

    /// Changes the size of the lease.
    ///
    /// # Errors
    /// [`SpaceError::Full`] where more is in use.
    pub fn set_limit(&mut self, limit_bytes: u64) -> Result<(), SpaceError> {
        let old = std::mem::replace(&mut self.limit_bytes, limit_bytes);
        let fits = self.room_for(0, 0);
        if fits.is_err() {
            self.limit_bytes = old;
        }
        fits
    }

    /// A member has joined the lease, or reconnected: from now on it may have regions, and uses this
    /// connection, unless it has reconnected again since.
    pub fn member_joined(&mut self, member: MemberId, connection: ConnectionNumber) {
        let known =
            self.members.entry(member).or_insert(Member { connection, made: None, done: Answers::default() });
        if known.connection <= connection {
            known.connection = connection;
            self.queues.disconnected(member);
            self.stop_cloning(member);
        }
    }

    /// Whether this connection of the member is the current one. Call it under the same lock as the request
    /// itself: a request that was under way when its member reconnected must not undo what the member did
    /// since.
    ///
    /// # Errors
    /// [`SpaceError::MemberGone`] or [`SpaceError::Replaced`].
    pub fn admit(&self, member: MemberId, connection: ConnectionNumber) -> Result<(), SpaceError> {
        match self.members.get(&member) {
            None => Err(SpaceError::MemberGone),
            Some(known) if known.connection != connection => Err(SpaceError::Replaced),
            Some(_) => Ok(()),
        }
    }

    /// Makes a region by `make`, or, if this very request of the member has made one already, answers with
    /// that. `None`: `make` is not done.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn make_once(
        &mut self,
        member: MemberId,
        request: u64,
        make: impl FnOnce(&mut Self) -> Result<Option<RegionId>, SpaceError>,
    ) -> Result<Option<RegionId>, SpaceError> {
        let made = self.members.get(&member).ok_or(SpaceError::MemberGone)?.made;
        if let Some((_, region)) =
            made.filter(|(number, region)| *number == request && self.owned(member, *region).is_ok())
        {
            return Ok(Some(region));
        }
        let region = make(self)?;
        if let Some(region) = region {
            self.members.get_mut(&member).expect("it was there a moment ago").made = Some((request, region));
        }
        Ok(region)
    }

    /// The answer to an update that this very request has carried out already.
    #[must_use]
    pub fn answered(&self, member: MemberId, request: u64) -> Option<u64> {
        self.members.get(&member)?.done.get(request)
    }

    /// Remembers the answer to an update, in place of the oldest one: an update is carried out once, however
    /// often its request is repeated after broken connections.
    pub fn remember(&mut self, member: MemberId, request: u64, answer: u64) {
        if let Some(member) = self.members.get_mut(&member) {
            member.done.insert(request, answer);
        }
    }

    /// The member's update has begun and goes on later. Until [`LeaseSpace::update_ended`] it may change the
    /// regions of all members, though it be dismissed, and must not join again.
    pub fn update_begun(&mut self, member: MemberId) {
        self.updating.insert(member);
    }

    /// The member's update has ended.
    pub fn update_ended(&mut self, member: MemberId) {
        self.updating.remove(&member);
    }

    /// Whether the member's update is half done.
    #[must_use]
    pub fn is_updating(&self, member: MemberId) -> bool {
        self.updating.contains(&member)
    }

    /// Opens a region for every member: one of the member's own, one that is open already, or one with a
    /// name. `bytes`: the length of a region that has none yet; a name without a region gets one if this is
    /// not 0. Returns the region and its length. To repeat it is harmless.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn open_region(
        &mut self,
        member: MemberId,
        selector: RegionSelector<'_>,
        bytes: u64,
    ) -> Result<(RegionId, u64), SpaceError> {
        if bytes > MAX_PAGE_INDEX * OS_PAGE_BYTES as u64 {
            return Err(SpaceError::RegionLength);
        }
        let id = match selector {
            RegionSelector::Region(id) => id,
            RegionSelector::Name(name) => match self.names.get(name) {
                Some(id) => *id,
                None if bytes == 0 => return Err(SpaceError::NoSuchRegion),
                None if self.names.len() >= MAX_NAMES => return Err(SpaceError::TooManyNames),
                None => {
                    let id = self.add_region(member, Root::default())?;
                    self.names.insert(name.to_owned(), id);
                    id
                }
            },
        };
        self.owned(member, id)?;
        let region = self.regions.get_mut(&id).expect("seen above");
        if region.bytes == 0 {
            region.bytes = bytes;
        }
        if region.bytes == 0 {
            return Err(SpaceError::RegionLength);
        }
        region.owner = None;
        Ok((id, region.bytes))
    }

    /// The named regions behind this name, by name, with their lengths.
    pub fn named(&self, behind: &str) -> impl Iterator<Item = (&str, RegionId, u64)> {
        let behind = (Bound::Excluded(behind), Bound::Unbounded);
        self.names.range::<str, _>(behind).map(|(name, id)| (name.as_str(), *id, self.regions[id].bytes))
    }

    /// The pages of a region, for reading.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn view(&self, member: MemberId, region: RegionId) -> Result<View<'_>, SpaceError> {
        let region = self.owned(member, region)?;
        let bytes = if region.bytes == 0 { MAX_PAGE_INDEX * OS_PAGE_BYTES as u64 } else { region.bytes };
        Ok(View { tables: &self.tables, root: &region.root, bytes, last: None, seen: Vec::new() })
    }

    /// Whether the frame of a page is named by this page alone.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn page_state(
        &self,
        member: MemberId,
        region: RegionId,
        page: PageIndex,
    ) -> Result<PageState, SpaceError> {
        Ok(self.tables.state(&self.owned(member, region)?.root, page))
    }

    /// The bytes of a page that is its region's own have changed, and this is their checksum now.
    ///
    /// # Errors
    /// [`SpaceError`].
    ///
    /// # Panics
    /// If the page is not [`PageState::Own`].
    pub fn page_changed(
        &mut self,
        member: MemberId,
        region: RegionId,
        page: PageIndex,
        crc: u32,
    ) -> Result<(), SpaceError> {
        self.owned(member, region)?;
        let root = &self.regions[&region].root;
        self.tables.set_crc(root, page, crc);
        Ok(())
    }

    /// An empty region.
    ///
    /// # Errors
    /// [`SpaceError::TooManyRegions`] or [`SpaceError::MemberGone`].
    pub fn create_region(&mut self, member: MemberId) -> Result<RegionId, SpaceError> {
        self.add_region(member, Root::default())
    }

    /// A copy of a region as of now, sharing every frame until one of the two is written. Costs one step per
    /// 512 pages.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn clone_region(&mut self, member: MemberId, region: RegionId) -> Result<RegionId, SpaceError> {
        self.stop_cloning(member);
        Ok(self.clone_some(member, region, usize::MAX)?.expect("without a bound all is done"))
    }

    /// The same in at most so many steps; call it again until it is a region. It is of the moment of the
    /// first call. A member has one such clone at a time; it is given up when the region is freed or the
    /// member leaves or reconnects.
    ///
    /// # Errors
    /// [`SpaceError`]; what there is of the clone is given up.
    pub fn clone_some(
        &mut self,
        member: MemberId,
        region: RegionId,
        most_chunks: usize,
    ) -> Result<Option<RegionId>, SpaceError> {
        let result = self.try_clone(member, region, most_chunks);
        if result.is_err() {
            self.stop_cloning(member);
        }
        result
    }

    fn try_clone(
        &mut self,
        member: MemberId,
        region: RegionId,
        most_chunks: usize,
    ) -> Result<Option<RegionId>, SpaceError> {
        self.is_ordinary(region)?;
        let goes_on = self.tables.is_cloning(&self.owned(member, region)?.root, member);
        self.may_add_region(member)?;
        if !goes_on {
            self.stop_cloning(member);
            let cost = self.tables.clone_cost(&self.regions[&region].root);
            self.room_for(self.region_cost(), cost)?;
            let root = &mut self.regions.get_mut(&region).expect("seen above").root;
            self.tables.begin_clone(root, member);
            self.cloning.insert(member, region);
        }
        let root = &mut self.regions.get_mut(&region).expect("seen above").root;
        let Some(root) = self.tables.clone_some(root, member, most_chunks) else { return Ok(None) };
        self.cloning.remove(&member);
        Ok(Some(self.add_region(member, root).expect("it may be added, as seen above")))
    }

    /// The member's clone is given up; [`LeaseSpace::bury`] frees what there is of it.
    pub fn stop_cloning(&mut self, member: MemberId) {
        if let Some(region) = self.cloning.remove(&member)
            && let Some(region) = self.regions.get_mut(&region)
        {
            self.freed.extend(self.tables.stop_clones(&mut region.root, Some(member)));
        }
    }

    /// Makes `member` the owner of a region of any member of the lease.
    ///
    /// # Errors
    /// [`SpaceError::NoSuchRegion`] or [`SpaceError::MemberGone`].
    pub fn adopt_region(&mut self, member: MemberId, region: RegionId) -> Result<(), SpaceError> {
        if !self.members.contains_key(&member) {
            return Err(SpaceError::MemberGone);
        }
        self.is_ordinary(region)?;
        self.regions.get_mut(&region).ok_or(SpaceError::NoSuchRegion)?.owner = Some(member);
        Ok(())
    }

    /// Frees a region. Its pages stay charged until [`LeaseSpace::bury`] has freed them.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn free_region(&mut self, member: MemberId, region: RegionId) -> Result<(), SpaceError> {
        self.is_ordinary(region)?;
        self.owned(member, region)?;
        self.names.retain(|_, named| *named != region);
        let region = self.regions.remove(&region).expect("seen above");
        self.free_later(region);
        Ok(())
    }

    /// Whether pages of freed regions are still to be freed.
    #[must_use]
    pub fn has_freed(&self) -> bool {
        !self.freed.is_empty()
    }

    /// Frees pages of freed regions, at most so many times 512. Their frames without other references are
    /// appended to `released`. True: there are more.
    pub fn bury(&mut self, most_chunks: u64, released: &mut Vec<FrameIndex>) -> bool {
        let mut left = most_chunks;
        while let Some(root) = self.freed.last_mut() {
            let dropped = self.tables.drop_chunks(root, left, released);
            if dropped == left {
                return true;
            }
            left -= dropped;
            self.freed.pop();
        }
        false
    }

    /// Appends what each page of the extents is; `None` is a zero page.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn look_up(
        &self,
        member: MemberId,
        region: RegionId,
        extents: &[Extent],
        pages: &mut Vec<Option<StoredPage>>,
    ) -> Result<(), SpaceError> {
        let root = &self.owned(member, region)?.root;
        for extent in extents {
            self.tables.look_up(root, *extent, pages);
        }
        Ok(())
    }

    /// Replaces pages: all of them, or with an error none, and then the new frames stay the caller's. The
    /// frames they replaced are appended to `released` where they have no other reference.
    ///
    /// # Errors
    /// [`SpaceError`]. `Full` assumes that no frame is given back where several pages of the request share
    /// one, so a request within a few pages of the limit may be refused that would just have fitted.
    ///
    /// # Panics
    /// If there is not one entry per page.
    pub fn put(
        &mut self,
        member: MemberId,
        region: RegionId,
        extents: &[Extent],
        pages: &[Option<StoredPage>],
        released: &mut Vec<FrameIndex>,
    ) -> Result<(), SpaceError> {
        assert_eq!(rampool_wire::units::total_pages(extents), pages.len() as u64, "one entry per page");
        let root = &self.owned(member, region)?.root;
        let each = || extents.iter().flat_map(Extent::pages).zip(pages);
        let (mut frames, mut metadata, mut last_chunk) = (0, 0, None);
        for (page, new) in each() {
            let (more_frames, more_metadata) = self.tables.growth(root, page, new.map_or(0, |p| p.charge));
            frames += more_frames;
            // A chunk is made or copied once for all its pages that follow each other in the request.
            let chunk = page.0 / super::table::CHUNK_PAGES;
            if more_metadata > 0 && last_chunk != Some(chunk) {
                metadata += more_metadata;
                last_chunk = Some(chunk);
            }
        }
        self.room_for(frames, metadata)?;
        let region = self.regions.get_mut(&region).expect("seen above");
        self.tables.notes_left = region.owner.is_none();
        for (page, new) in each() {
            self.tables.set(&mut region.root, page, *new, released);
        }
        self.tables.notes_left = false;
        Ok(())
    }

    /// Takes the frames that pages of every member's regions were in before [`LeaseSpace::put`] and
    /// [`LeaseSpace::discard_some`] changed them. A member may know that its page lies there, and a clone, or
    /// an answer on its way, may keep the frame: move its generation on before the change is answered.
    pub fn left(&mut self) -> std::vec::Drain<'_, FrameIndex> {
        self.tables.left.drain(..)
    }

    /// Makes pages zero. The cost depends on what is stored there, not on the length of the range.
    ///
    /// # Errors
    /// [`SpaceError`]; `Full` where a shared page table would have to be copied and there is no room.
    pub fn discard(
        &mut self,
        member: MemberId,
        region: RegionId,
        extents: &[Extent],
        released: &mut Vec<FrameIndex>,
    ) -> Result<(), SpaceError> {
        let all = self.discard_some(member, region, &mut extents.to_vec(), usize::MAX, released)?;
        assert!(all, "without a bound all is done");
        Ok(())
    }

    /// The same in at most so many chunks of 512 pages. Takes what is done off the extents. True: it is all.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn discard_some(
        &mut self,
        member: MemberId,
        region: RegionId,
        extents: &mut Vec<Extent>,
        most_chunks: usize,
        released: &mut Vec<FrameIndex>,
    ) -> Result<bool, SpaceError> {
        let bounded = most_chunks < usize::MAX;
        let root = &self.owned(member, region)?.root;
        let at_once = if bounded { EXTENTS_AT_ONCE } else { extents.len() };
        let first = extents.len().saturating_sub(at_once);
        let copies: u64 = extents[first..].iter().map(|e| self.tables.copies_to_discard(root, *e)).sum();
        if copies > 0 {
            self.room_for(0, copies * CHUNK_BYTES)?;
        }
        let region = self.regions.get_mut(&region).expect("seen above");
        self.tables.notes_left = region.owner.is_none();
        while extents.len() > first {
            let extent = extents.last_mut().expect("there are more than `first`");
            if let Some(next) = self.tables.discard(&mut region.root, *extent, most_chunks, released) {
                let left = u32::try_from(extent.end().0 - next.0).expect("a part of an extent");
                *extent = Extent::new(next, left);
                break;
            }
            extents.pop();
        }
        self.tables.notes_left = false;
        Ok(extents.is_empty())
    }

    /// Frees every region of a member that is gone; it can have no more. [`LeaseSpace::bury`]
    /// frees the pages.
    pub fn member_gone(&mut self, member: MemberId) {
        self.members.remove(&member);
        self.queues.member_gone(member);
        self.stop_cloning(member);
        let gone: Vec<RegionId> =
            self.regions.iter().filter(|(_, r)| r.owner == Some(member)).map(|(id, _)| *id).collect();
        self.names.retain(|_, named| !gone.contains(named));
        for id in gone {
            let region = self.regions.remove(&id).expect("listed above");
            self.free_later(region);
        }
    }

    /// Frees everything: the lease closes, and nothing can be stored in it any more. [`LeaseSpace::bury`]
    /// frees the pages.
    pub fn close(&mut self) {
        self.members.clear();
        self.names.clear();
        self.queues = Queues::new(QueueLimits::default());
        self.cloning.clear();
        self.updating.clear();
        for region in std::mem::take(&mut self.regions).into_values() {
            self.free_later(region);
        }
    }

    /// Whether its tenant can have one more of the regions or queues that are about to be made.
    pub fn set_over_quota(&mut self, over: Option<OverQuota>) {
        self.over = over;
    }

    /// For its tenant's account.
    #[must_use]
    pub fn charges(&self) -> Charges {
        let tables = self.tables.metadata_bytes().saturating_sub(self.limit_bytes / 64);
        Charges {
            regions: self.regions.len() as u64,
            queues: self.queues.count() as u64,
            table_bytes: tables.min(self.free_metadata()),
        }
    }

    // --- queues --------------------------------------------------------------------------------------------

    /// Opens the queue of this name, or makes it, with `bounds`, if there is none. Returns its number, the
    /// region of its bodies, and its bounds. To repeat it is harmless.
    ///
    /// # Errors
    /// [`QueueError`], or what keeps a region from being made.
    pub fn open_queue(
        &mut self,
        member: MemberId,
        name: &str,
        bounds: Option<QueueBounds>,
    ) -> Result<(QueueId, RegionId, QueueBounds), QueueSpaceError> {
        match (self.queues.find(name), bounds) {
            (Ok(found), _) => Ok(found),
            (Err(error), None) => Err(error.into()),
            (Err(_), Some(bounds)) => {
                self.queues.may_add(bounds)?;
                self.room_for(OS_PAGE_BYTES as u64, 0)?;
                let region = self.add_region(member, Root::default())?;
                let made = self.regions.get_mut(&region).expect("just made");
                (made.owner, made.bytes) = (None, MAX_PAGE_INDEX * OS_PAGE_BYTES as u64);
                Ok((self.queues.add(name, bounds, region), region, bounds))
            }
        }
    }

    /// Removes a queue with all that is in it. Outputs follow.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`].
    pub fn free_queue(&mut self, queue: QueueId) -> Result<(), QueueError> {
        let region = self.queues.remove(queue)?;
        let region = self.regions.remove(&region).expect("a queue has a region");
        self.free_later(region);
        Ok(())
    }

    /// [`Queues::push`], if the lease has room for the message. Outputs follow.
    ///
    /// # Errors
    /// [`SpaceError::Full`] or [`QueueError`]; then no output does.
    pub fn push(
        &mut self,
        now: Tick,
        asker: Asker,
        queue: QueueId,
        push: &Push<'_>,
    ) -> Result<(), QueueSpaceError> {
        let (memory, pages) = self.queues.needs(queue, push)?;
        if let Err(error) = self.room_for(memory + pages, 0)
            && !self.queues.has_pushed(&asker)
        {
            return Err(error.into());
        }
        self.queues.push(now, asker, queue, push);
        Ok(())
    }

    /// [`Queues::push_heads`], if the lease has room for the messages. Outputs follow.
    ///
    /// # Errors
    /// [`SpaceError::Full`] or [`QueueError`]; then no output does.
    pub fn push_heads(
        &mut self,
        now: Tick,
        asker: Asker,
        queue: QueueId,
        heads: &PushHeads<'_>,
    ) -> Result<(), QueueSpaceError> {
        let memory = self.queues.heads_need(queue, heads)?;
        if let Err(error) = self.room_for(memory, 0)
            && !self.queues.has_pushed(&asker)
        {
            return Err(error.into());
        }
        self.queues.push_heads(now, asker, queue, heads);
        Ok(())
    }

    /// [`Queues::take`]. Outputs follow.
    pub fn take(&mut self, now: Tick, asker: Asker, queue: QueueId, take: &Take) {
        self.queues.take(now, asker, queue, take);
    }

    /// [`Queues::settle`]. Outputs follow.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`].
    pub fn settle(
        &mut self,
        member: MemberId,
        queue: QueueId,
        numbers: &[u64],
        how: Settlement,
    ) -> Result<u64, QueueError> {
        self.queues.settle(member, queue, numbers, how)
    }

    /// [`Queues::await_body`]. Outputs follow.
    pub fn await_body(&mut self, now: Tick, asker: Asker, queue: QueueId, number: u64, timeout_ms: u32) {
        self.queues.await_body(now, asker, queue, number, timeout_ms);
    }

    /// [`Queues::handle_timeout`]. Outputs follow.
    pub fn queue_timeout(&mut self, now: Tick) {
        self.queues.handle_timeout(now);
    }

    /// [`Queues::disconnected`]. Outputs follow.
    pub fn queue_member_disconnected(&mut self, member: MemberId) {
        self.queues.disconnected(member);
    }

    /// For reading: deliveries, lists, deadlines.
    #[must_use]
    pub fn queues(&self) -> &Queues {
        &self.queues
    }

    /// The next answer of a queue. Frees the bodies that are not needed any more; their frames are appended
    /// to `released`.
    pub fn poll_queues(&mut self, released: &mut Vec<FrameIndex>) -> Option<Output> {
        loop {
            match self.queues.poll()? {
                Output::Free { region, extent } => {
                    // The region of a removed queue was freed with it.
                    if let Some(region) = self.regions.get_mut(&region) {
                        self.tables.discard(&mut region.root, extent, usize::MAX, released);
                    }
                }
                output => return Some(output),
            }
        }
    }

    /// Whether a member may change these bytes: those of a queue's region only while they are the body that
    /// it sends.
    ///
    /// # Errors
    /// [`SpaceError::OfQueue`].
    pub fn may_change(
        &self,
        member: MemberId,
        region: RegionId,
        from: u64,
        end: u64,
    ) -> Result<(), SpaceError> {
        if self.queues.may_store(member, region, from, end) { Ok(()) } else { Err(SpaceError::OfQueue) }
    }

    /// These bytes have been stored: if they are of a body, this may complete it. Outputs follow.
    pub fn bytes_came(&mut self, region: RegionId, from: u64, bytes: u64) {
        self.queues.body_came(region, from, bytes);
    }

    /// An error for the region of a queue, which lives and dies with it.
    ///
    /// # Errors
    /// [`SpaceError::OfQueue`].
    pub fn is_ordinary(&self, region: RegionId) -> Result<(), SpaceError> {
        if self.queues.owns(region) { Err(SpaceError::OfQueue) } else { Ok(()) }
    }

    /// # Panics
    /// If an invariant is broken.
    pub fn check(&self) {
        self.tables.check(self.regions.values().map(|r| &r.root).chain(&self.freed));
        assert!(self.used_bytes(self.tables.used_bytes(), self.tables.metadata_bytes()) <= self.limit_bytes);
        assert!(self.regions.len() <= MAX_REGIONS);
        for (member, region) in &self.cloning {
            let of = self.regions.get(region);
            assert!(of.is_none_or(|region| self.tables.is_cloning(&region.root, *member)));
        }
        assert!(self.regions.keys().all(|id| id.0 < self.next_region));
        let owners = self.regions.values().filter_map(|r| r.owner);
        assert!(
            { owners }.all(|owner| self.members.contains_key(&owner)),
            "a region of a member that is gone"
        );
        assert!(self.names.len() <= MAX_NAMES && self.names.values().all(|id| self.regions.contains_key(id)));
        self.members.values().for_each(|member| member.done.check());
        self.queues.check();
    }

    fn owned(&self, member: MemberId, region: RegionId) -> Result<&Region, SpaceError> {
        let region = self.regions.get(&region).ok_or(SpaceError::NoSuchRegion)?;
        match region.owner {
            Some(owner) if owner != member => Err(SpaceError::NotOwner),
            None if !self.members.contains_key(&member) && !self.is_updating(member) => {
                Err(SpaceError::MemberGone)
            }
            _ => Ok(region),
        }
    }

    /// Its pages are freed by [`LeaseSpace::bury`].
    fn free_later(&mut self, mut region: Region) {
        self.freed.extend(self.tables.stop_clones(&mut region.root, None));
        self.freed.push(region.root);
    }

    fn may_add_region(&self, owner: MemberId) -> Result<(), SpaceError> {
        if !self.members.contains_key(&owner) {
            return Err(SpaceError::MemberGone);
        }
        if self.regions.len() >= MAX_REGIONS {
            return Err(SpaceError::TooManyRegions);
        }
        if let Some(over) = self.over {
            return Err(over.into());
        }
        self.room_for(self.region_cost(), 0)
    }

    fn add_region(&mut self, owner: MemberId, root: Root) -> Result<RegionId, SpaceError> {
        self.may_add_region(owner)?;
        let id = RegionId(self.next_region);
        self.next_region += 1;
        self.regions.insert(id, Region { owner: Some(owner), root, bytes: 0 });
        Ok(id)
    }

    fn used_bytes(&self, frames: u64, metadata: u64) -> u64 {
        let free = self.free_metadata() + self.limit_bytes / 64;
        let regions = self.regions.len().saturating_sub(FREE_REGIONS) as u64 * REGION_BYTES;
        frames + metadata.saturating_sub(free) + regions + self.queues.memory_bytes()
    }

    /// Page tables that are free beyond a 64th of the lease.
    fn free_metadata(&self) -> u64 {
        FREE_METADATA_BYTES.min(self.limit_bytes.saturating_add(ONE_TABLE_BYTES))
    }

    /// What one more region is charged.
    fn region_cost(&self) -> u64 {
        if self.regions.len() < FREE_REGIONS { 0 } else { REGION_BYTES }
    }

    fn room_for(&self, frames: u64, metadata: u64) -> Result<(), SpaceError> {
        let would_use =
            self.used_bytes(self.tables.used_bytes() + frames, self.tables.metadata_bytes() + metadata);
        if would_use > self.limit_bytes && self.tables.rules.keep(TenantRule::Room) {
            let used = self.used_bytes(self.tables.used_bytes(), self.tables.metadata_bytes());
            return Err(SpaceError::Full { free: self.limit_bytes.saturating_sub(used) });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
