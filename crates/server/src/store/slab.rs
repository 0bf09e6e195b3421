//! Slabs: aligned pieces of locked memory, each cut into frames of one size.
//!
//! An arena per thread keeps the threads out of each other's way; a frame goes back to the arena it came
//! from. New frames are cut from the lowest slab that has room, so that the highest ones run empty and go
//! back to the kernel, and freed frames of any size below 4 KiB leave no hole that another page of that size
//! could not use.
//!
//! Invariants: `held_slabs <= max_slabs`; in each slab, free slots and slots with references make up all
//! slots; `used_bytes` is the sum of the sizes of frames with references.

use super::{StoreConfig, StoreUsage};
use rampool_kernel::sealed::{self, SealedMemory};
use rampool_lease::{FrameIndex, StoredPage};
use rampool_wire::places::{PLAN_BYTES, Place, Plan};
use rampool_wire::units::OS_PAGE_BYTES;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munlock, munmap};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const SLOT_BITS: u32 = 16;
/// Empty slabs of the largest frames, which any page fits, that an arena keeps: as much as one answer has, so
/// that unpacking pages for answer after answer does not map and unmap.
const SPARE_BYTES: usize = 2 << 20;

/// The frames of a store, and where they lie.
pub struct Slabs {
    /// Frame sizes, ascending.
    sizes: Vec<u32>,
    slab_bytes: usize,
    lock: bool,
    /// Where slabs are mapped, if not each on its own.
    file: Option<FramesFile>,
    disk: Option<Disk>,
    cells: Box<[Cell]>,
    arenas: Vec<Mutex<Arena>>,
    /// Numbers of slabs that are not mapped, lowest last.
    unmapped: Mutex<Vec<u32>>,
    held_slabs: AtomicU64,
    used_bytes: AtomicU64,
    frames: AtomicU64,
    unlocked: AtomicBool,
}

/// The file of frames that are open: all slabs one after the other, by their numbers
/// ([`rampool_wire::places`]).
struct FramesFile {
    memory: SealedMemory,
    fd: OwnedFd,
    /// The same, opened to be read only.
    reader: OwnedFd,
    plan: Plan,
    granule_bytes: u32,
}

impl FramesFile {
    /// For this many bytes of slabs; `None` where the kernel refuses it.
    fn create(granule_bytes: u32, bytes: usize) -> Option<Self> {
        let plan = Plan::of(granule_bytes, bytes as u64 / u64::from(granule_bytes)).ok()?;
        let (memory, fd) =
            SealedMemory::create(c"rampool-frames", usize::try_from(plan.file_bytes()).ok()?).ok()?;
        let reader = std::fs::File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?.into();
        let start = memory.span(0, memory.bytes());
        // SAFETY: our own mapping, of this length. A forked child has no use for it.
        let _ = unsafe { madvise(start.cast(), memory.bytes(), Advice::LinuxDontFork) };
        // SAFETY: the first page of a file that no other process knows yet.
        unsafe { std::ptr::copy_nonoverlapping(plan.encode().as_ptr(), start, PLAN_BYTES) };
        Some(Self { memory, fd, reader, plan, granule_bytes })
    }

    /// The first byte of this slab, and its offset in the file.
    fn slab(&self, number: u32, slab_bytes: usize) -> (*mut u8, usize) {
        let first = usize::try_from(self.plan.frames_at()).expect("a 64-bit machine");
        let offset = first + number as usize * slab_bytes;
        (self.memory.span(offset, slab_bytes), offset)
    }

    /// The granule with which a frame of a slab begins.
    fn granule(&self, number: u32, slot: usize, slab: &Slab, slab_bytes: usize) -> u32 {
        let bytes = number as usize * slab_bytes + slot * slab.frame_bytes;
        u32::try_from(bytes / self.granule_bytes as usize).expect("a plan has fewer than 2^32 granules")
    }

    fn generation(&self, granule: u32) -> &AtomicU32 {
        self.memory.word32(usize::try_from(self.plan.generation_at(granule)).expect("a 64-bit machine"))
    }
}

/// Slabs in a file on a disk, by their numbers. Room for one is taken on the disk before it is touched: a
/// write to a page that finds none would be a SIGBUS.
struct Disk {
    memory: SealedMemory,
    file: Arc<File>,
}

impl Disk {
    fn create(file: &Arc<File>, bytes: usize) -> Option<Self> {
        file.set_len(bytes as u64).ok()?;
        let memory = SealedMemory::over(file.as_fd(), bytes).ok()?;
        // SAFETY: our own mapping, of this length. A forked child has no use for it.
        let _ = unsafe { madvise(memory.span(0, bytes).cast(), bytes, Advice::LinuxDontFork) };
        Some(Self { memory, file: Arc::clone(file) })
    }

    /// The first byte of a slab; `None`: the disk is full.
    fn take(&self, number: u32, slab_bytes: usize) -> Option<*mut u8> {
        let offset = number as usize * slab_bytes;
        sealed::take_room(self.file.as_fd(), offset, slab_bytes).ok()?;
        Some(self.memory.span(offset, slab_bytes))
    }
}

/// What can be asked about a slab without a lock. Only for slabs with a frame that the asker has a reference
/// to.
#[derive(Default)]
struct Cell {
    slab: AtomicPtr<Slab>,
}

/// A mapped slab. Exists while it has frames in use, or as its arena's spare.
struct Slab {
    base: *mut u8,
    /// Of each frame: `sizes[class]`.
    frame_bytes: usize,
    arena: usize,
    class: usize,
    references: Box<[AtomicU32]>,
}

#[derive(Default)]
struct Arena {
    /// Per class, slabs with free slots.
    partial: Vec<BTreeSet<u32>>,
    /// Free slots of every slab of this arena.
    slots: HashMap<u32, Vec<u16>>,
    /// Slabs of the largest class that are empty.
    spare: usize,
}

impl Slabs {
    /// `sizes`: frame sizes, ascending, dividing into `slab_bytes` with at most 65536 slots.
    pub(super) fn new(sizes: Vec<u32>, slab_bytes: usize, max_slabs: usize, config: &StoreConfig) -> Self {
        let (arenas, lock) = (config.arenas, config.lock);
        let max_slabs = max_slabs.max(sizes.len() * arenas);
        let file =
            config.open.then(|| FramesFile::create(sizes[0], max_slabs.checked_mul(slab_bytes)?)).flatten();
        if config.open && file.is_none() {
            tracing::warn!("the kernel does not allow a file for the frames: clients ask for each page");
        }
        let disk = config.disk.as_ref().map(|file| {
            let bytes = max_slabs.checked_mul(slab_bytes).expect("no machine has so many addresses");
            Disk::create(file, bytes).expect("the file was made by this process, which can map it")
        });
        let arena = || {
            Mutex::new(Arena { partial: vec![BTreeSet::new(); sizes.len()], slots: HashMap::new(), spare: 0 })
        };
        Self {
            arenas: (0..arenas).map(|_| arena()).collect(),
            sizes,
            slab_bytes,
            lock,
            file,
            disk,
            cells: (0..max_slabs).map(|_| Cell::default()).collect(),
            unmapped: Mutex::new(
                (0..u32::try_from(max_slabs).expect("fewer than 2^32 slabs")).rev().collect(),
            ),
            held_slabs: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            frames: AtomicU64::new(0),
            unlocked: AtomicBool::new(false),
        }
    }

    /// Takes a frame for each length; all or none.
    pub(super) fn take(&self, arena: usize, lens: &[u32], frames: &mut Vec<FrameIndex>) -> bool {
        let start = frames.len();
        let mut bytes = 0;
        let mut guard = None;
        for len in lens {
            let class = self.class_of(*len);
            let own = self.take_one(arena, guard.get_or_insert_with(|| self.arena(arena)), class);
            let found = own.or_else(|| {
                // No room here and no more slabs are allowed. Never two arenas locked at a time.
                guard = None;
                self.take_anywhere(class)
            });
            let Some(frame) = found else {
                drop(guard);
                self.count_taken(bytes, frames.len() - start);
                self.release(&frames[start..]);
                frames.truncate(start);
                return false;
            };
            bytes += u64::from(self.size(frame));
            frames.push(frame);
        }
        self.count_taken(bytes, lens.len());
        true
    }

    fn count_taken(&self, bytes: u64, frames: usize) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.frames.fetch_add(frames as u64, Ordering::Relaxed);
    }

    /// A frame of any arena, of this size if there is one, else larger.
    fn take_anywhere(&self, class: usize) -> Option<FrameIndex> {
        (class..self.sizes.len()).find_map(|class| {
            (0..self.arenas.len()).find_map(|arena| self.take_partial(&mut self.arena(arena), class))
        })
    }

    fn take_one(&self, arena: usize, inner: &mut Arena, class: usize) -> Option<FrameIndex> {
        self.take_partial(inner, class).or_else(|| {
            self.map_slab(arena, inner, class)?;
            self.take_partial(inner, class)
        })
    }

    fn take_partial(&self, inner: &mut Arena, class: usize) -> Option<FrameIndex> {
        let number = *inner.partial[class].first()?;
        let slots = inner.slots.get_mut(&number).expect("a partial slab is its arena's");
        if class + 1 == self.sizes.len() && slots.len() == self.slots_of(class) {
            inner.spare -= 1;
        }
        let slot = slots.pop().expect("a partial slab has a free slot");
        if slots.is_empty() {
            inner.partial[class].remove(&number);
        }
        let old = self.slab(number).references[usize::from(slot)].swap(1, Ordering::Relaxed);
        assert_eq!(old, 0, "a free slot has no references");
        Some(FrameIndex(u64::from(number) << SLOT_BITS | u64::from(slot)))
    }

    /// One more reference to a frame the caller knows to have one.
    pub(super) fn hold(&self, frame: FrameIndex) {
        let (number, slot) = split(frame);
        let old = self.slab(number).references[slot].fetch_add(1, Ordering::Relaxed);
        assert!(old > 0, "only a frame in use can be held");
    }

    /// Whether there is one reference to the frame; the caller knows that there is.
    pub(super) fn is_held_once(&self, frame: FrameIndex) -> bool {
        let (number, slot) = split(frame);
        // Acquire: the next writer writes after all readers have read.
        self.slab(number).references[slot].load(Ordering::Acquire) == 1
    }

    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.reader.as_fd())
    }

    /// See [`super::PageStore::place`].
    pub(super) fn place(&self, frame: FrameIndex, len: u32) -> Place {
        let Some(file) = &self.file else { return Place::NONE };
        let (number, slot) = split(frame);
        let granule = file.granule(number, slot, self.slab(number), self.slab_bytes);
        Place { granule, generation: file.generation(granule).load(Ordering::Relaxed), len }
    }

    /// From here on the frame's bytes may be anything.
    pub(super) fn touch(&self, frame: FrameIndex) {
        let (number, slot) = split(frame);
        self.move_on(number, slot, self.slab(number));
    }

    fn move_on(&self, number: u32, slot: usize, slab: &Slab) {
        if let Some(file) = &self.file {
            let granule = file.granule(number, slot, slab, self.slab_bytes);
            file.generation(granule).fetch_add(1, Ordering::Relaxed);
            // Before the bytes change.
            fence(Ordering::Release);
        }
    }

    /// The entry of a page of 4096 plain bytes.
    pub(super) fn plain_page(&self, frame: FrameIndex, crc: u32) -> StoredPage {
        let charge = self.size(frame);
        let len = u16::try_from(OS_PAGE_BYTES).expect("4096");
        assert!(len <= charge, "a frame for a whole page");
        StoredPage { frame, crc, len, charge }
    }

    /// One reference less of each frame.
    pub(super) fn release(&self, frames: &[FrameIndex]) {
        let mut guard: Option<(usize, MutexGuard<'_, Arena>)> = None;
        let (mut bytes, mut count) = (0, 0);
        // The first one last: it is the next that is taken, so that frames which lay one after the other are
        // taken one after the other again.
        for frame in frames.iter().rev() {
            let (number, slot) = split(*frame);
            let slab = self.slab(number);
            // Release and acquire: the next owner of the frame writes after all readers have read.
            let old = slab.references[slot].fetch_sub(1, Ordering::AcqRel);
            assert!(old > 0, "a frame was released too often");
            if old > 1 {
                continue;
            }
            self.move_on(number, slot, slab);
            bytes += u64::from(self.sizes[slab.class]);
            count += 1;
            let (arena, class, total) = (slab.arena, slab.class, slab.references.len());
            if guard.as_ref().is_none_or(|(held, _)| *held != arena) {
                // Never two arenas locked at a time.
                drop(guard.take());
                guard = Some((arena, self.arena(arena)));
            }
            let inner = &mut guard.as_mut().expect("set above").1;
            let slots = inner.slots.get_mut(&number).expect("a frame's slab is its arena's");
            slots.push(u16::try_from(slot).expect("split gives 16 bits"));
            let free = slots.len();
            if free == 1 {
                inner.partial[class].insert(number);
            }
            if free < total {
                continue;
            }
            let is_largest = class + 1 == self.sizes.len();
            inner.spare += usize::from(is_largest);
            // One empty slab stays as a spare, so that a page coming and going does not map and unmap.
            let is_surplus = !is_largest || inner.spare > SPARE_BYTES / self.slab_bytes;
            if is_surplus && inner.partial[class].len() > 1 {
                inner.spare -= usize::from(is_largest);
                inner.partial[class].remove(&number);
                inner.slots.remove(&number);
                self.unmap_slab(number);
            }
        }
        drop(guard);
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.frames.fetch_sub(count, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn memory(&self, frame: FrameIndex) -> *mut u8 {
        let (number, slot) = split(frame);
        let slab = self.slab(number);
        // SAFETY: the slot is one of the slab's, so the offset is within its mapping.
        unsafe { slab.base.add(slot * slab.frame_bytes) }
    }

    /// Bytes of a frame.
    pub(super) fn size(&self, frame: FrameIndex) -> u16 {
        u16::try_from(self.sizes[self.slab(split(frame).0).class]).expect("frames are at most 4096 bytes")
    }

    /// Bytes of the frame that `len` bytes would get.
    pub(super) fn size_for(&self, len: u32) -> u32 {
        self.sizes[self.class_of(len)]
    }

    pub(super) fn usage(&self) -> StoreUsage {
        StoreUsage {
            held_bytes: self.held_slabs.load(Ordering::Relaxed) * self.slab_bytes as u64,
            used_bytes: self.used_bytes.load(Ordering::Relaxed),
            frames: self.frames.load(Ordering::Relaxed),
            unlocked: self.unlocked.load(Ordering::Relaxed),
        }
    }

    /// # Panics
    /// If an invariant is broken. Call only while no other thread uses the store.
    pub(super) fn check(&self) {
        let (mut held, mut used, mut frames) = (0, 0, 0);
        for (index, arena) in self.arenas.iter().enumerate() {
            let inner = arena.lock().unwrap_or_else(PoisonError::into_inner);
            let largest = self.sizes.len() - 1;
            let is_spare = |(number, slots): &(&u32, &Vec<u16>)| {
                self.slab(**number).class == largest && slots.len() == self.slots_of(largest)
            };
            assert_eq!(inner.spare, inner.slots.iter().filter(is_spare).count());
            for (number, slots) in &inner.slots {
                let slab = self.slab(*number);
                held += 1;
                assert_eq!(slab.arena, index);
                let free: BTreeSet<u16> = slots.iter().copied().collect();
                assert_eq!(free.len(), slots.len(), "a slot is free twice");
                assert_eq!(inner.partial[slab.class].contains(number), !free.is_empty());
                for (slot, references) in slab.references.iter().enumerate() {
                    let in_use = references.load(Ordering::Relaxed) > 0;
                    assert_eq!(in_use, !free.contains(&u16::try_from(slot).expect("16 bits")));
                    used += if in_use { u64::from(self.sizes[slab.class]) } else { 0 };
                    frames += u64::from(in_use);
                }
            }
        }
        let unmapped = self.unmapped.lock().unwrap_or_else(PoisonError::into_inner).len();
        assert_eq!(held + unmapped, self.cells.len());
        let usage = self.usage();
        assert_eq!((held * self.slab_bytes) as u64, usage.held_bytes);
        assert_eq!((used, frames), (usage.used_bytes, usage.frames));
    }

    fn class_of(&self, len: u32) -> usize {
        let class = self.sizes.partition_point(|size| *size < len);
        assert!(class < self.sizes.len(), "{len} bytes fit no frame");
        class
    }

    /// Frames of a slab.
    fn slots_of(&self, class: usize) -> usize {
        self.slab_bytes / self.sizes[class] as usize
    }

    fn arena(&self, index: usize) -> MutexGuard<'_, Arena> {
        self.arenas[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slab(&self, number: u32) -> &Slab {
        let slab = self.cells[number as usize].slab.load(Ordering::Acquire);
        assert!(!slab.is_null(), "the slab of a frame in use is mapped");
        // SAFETY: a mapped slab's description lives until `unmap_slab`, which happens when no frame of it is
        // in use; the caller has a reference to one, or the lock of its arena.
        unsafe { &*slab }
    }

    fn map_slab(&self, arena: usize, inner: &mut Arena, class: usize) -> Option<()> {
        let number = self.unmapped.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        let Some(base) = self.map_memory(number) else {
            self.unmapped.lock().unwrap_or_else(PoisonError::into_inner).push(number);
            return None;
        };
        let slots = self.slots_of(class);
        inner.spare += usize::from(class + 1 == self.sizes.len());
        let references = (0..slots).map(|_| AtomicU32::new(0)).collect();
        let slab = Box::new(Slab { base, frame_bytes: self.sizes[class] as usize, arena, class, references });
        self.cells[number as usize].slab.store(Box::into_raw(slab), Ordering::Release);
        self.held_slabs.fetch_add(1, Ordering::Relaxed);
        // The lowest slot last, so that frames taken one after the other lie one after the other.
        inner.slots.insert(number, (0..u16::try_from(slots).expect("16 bits of slots")).rev().collect());
        inner.partial[class].insert(number);
        Some(())
    }

    /// Aligned, so that huge pages fit, and locked if that was asked for and is allowed.
    fn map_memory(&self, number: u32) -> Option<*mut u8> {
        if let Some(file) = &self.file {
            let (base, _) = file.slab(number, self.slab_bytes);
            // SAFETY: a part of our own mapping.
            if self.lock && unsafe { mlock(base.cast(), self.slab_bytes) }.is_err() {
                self.unlocked.store(true, Ordering::Relaxed);
            }
            return Some(base);
        }
        if let Some(disk) = &self.disk {
            return disk.take(number, self.slab_bytes);
        }
        let (bytes, align) = (self.slab_bytes, self.slab_bytes);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice; the ends beyond the aligned
        // middle are unmapped again, and no other code knows of them.
        unsafe {
            let start: *mut u8 = mmap_anonymous(
                null_mut(),
                bytes + align,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
            .ok()?
            .cast();
            let skip = start.align_offset(align);
            let base = start.add(skip);
            if skip > 0 {
                munmap(start.cast(), skip).expect("a part of our own mapping");
            }
            if align > skip {
                munmap(base.add(bytes).cast(), align - skip).expect("a part of our own mapping");
            }
            // Without huge pages it is slower, not wrong.
            let _ = madvise(base.cast(), bytes, Advice::LinuxHugepage);
            let _ = madvise(base.cast(), bytes, Advice::LinuxDontFork);
            if self.lock && mlock(base.cast(), bytes).is_err() {
                self.unlocked.store(true, Ordering::Relaxed);
            }
            Some(base)
        }
    }

    /// The caller has taken the slab out of its arena, and no frame of it is in use.
    fn unmap_slab(&self, number: u32) {
        let slab = self.cells[number as usize].slab.swap(null_mut(), Ordering::AcqRel);
        assert!(!slab.is_null(), "a slab is unmapped once");
        // SAFETY: the pointer came from `Box::into_raw` and was taken out of its cell just now; there is no
        // reference to a frame of the slab.
        let slab = unsafe { Box::from_raw(slab) };
        match (&self.file, &self.disk) {
            (_, Some(disk)) => {
                // The file system gets the room back; a page that it does not take is written over.
                let offset = number as usize * self.slab_bytes;
                let _ = sealed::give_back(disk.file.as_fd(), offset, self.slab_bytes);
            }
            (Some(file), None) => {
                // SAFETY: a part of our own mapping.
                let _ = unsafe { munlock(slab.base.cast(), self.slab_bytes) };
                // What the kernel does not take back is written over when the slab is mapped again.
                let _ =
                    sealed::give_back(file.fd.as_fd(), file.slab(number, self.slab_bytes).1, self.slab_bytes);
            }
            // SAFETY: our own mapping, of this size, with no frame in use.
            (None, None) => unsafe { munmap(slab.base.cast(), self.slab_bytes) }.expect("our own mapping"),
        }
        self.held_slabs.fetch_sub(1, Ordering::Relaxed);
        let mut unmapped = self.unmapped.lock().unwrap_or_else(PoisonError::into_inner);
        unmapped.push(number);
    }
}

impl Drop for Slabs {
    fn drop(&mut self) {
        for number in 0..self.cells.len() {
            if !self.cells[number].slab.load(Ordering::Acquire).is_null() {
                self.unmap_slab(u32::try_from(number).expect("as many as there are cells"));
            }
        }
    }
}

// SAFETY: the pointers in the cells are owned by the slabs and used by the rules above: descriptions are
// immutable but for atomics, memory is written only by the thread that took the frame.
unsafe impl Send for Slabs {}
// SAFETY: as above.
unsafe impl Sync for Slabs {}

fn split(frame: FrameIndex) -> (u32, usize) {
    let number = u32::try_from(frame.0 >> SLOT_BITS).expect("frames come from `take`");
    (number, usize::try_from(frame.0 & ((1 << SLOT_BITS) - 1)).expect("16 bits"))
}
