//! A heap whose whole state lies in memory of the caller's: in shared memory for `G_MALLOC`, in the forwarded
//! range for `malloc`.
//!
//! Blocks have one of a few sizes (powers of two, and three steps between), and each size has a list of free
//! ones. Free blocks are not merged. The caller makes sure that only one thread at a time uses the heap.

const GRAIN: usize = 16;
const CLASSES: usize = 160;
/// Before each block: its class, and whether it is in use.
const HEADER: usize = 16;
const USED: u64 = 0x6b6c_6f62_6465_7375;
const FREE: u64 = 0x6b6c_6f62_6565_7266;
/// Larger blocks than that are refused.
const MOST: usize = 1 << 40;
/// An address that is aligned to this is not a block of a heap.
pub(super) const PAGE: usize = 4096;

/// Words that the state takes: where free room begins and ends, and the first free block of each class.
pub(super) const STATE_WORDS: usize = 2 + CLASSES;

#[derive(Clone, Copy)]
pub(super) struct Heap {
    state: *mut u64,
}

/// Why a block could not be freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotABlock {
    Foreign,
    FreedBefore,
}

impl Heap {
    /// # Safety
    /// `state` points to [`STATE_WORDS`] words that this heap alone uses, which are zero or were left by such
    /// a heap, and stay.
    pub unsafe fn new(state: *mut u64) -> Self {
        Self { state }
    }

    fn get(self, word: usize) -> usize {
        assert!(word < STATE_WORDS);
        // SAFETY: inside of the state, as `new` was promised.
        usize::try_from(unsafe { self.state.add(word).read_volatile() }).expect("64-bit addresses")
    }

    fn set(self, word: usize, value: usize) {
        assert!(word < STATE_WORDS);
        // SAFETY: as in `get`.
        unsafe { self.state.add(word).write_volatile(value as u64) };
    }

    /// Where room begins that was never used.
    pub fn next(self) -> usize {
        self.get(0)
    }

    /// Adds room for new blocks. The rest of the old room is lost.
    ///
    /// # Safety
    /// The heap alone uses `start .. start + bytes`, which is zero and aligned to a page.
    pub unsafe fn grow(self, start: usize, bytes: usize) {
        self.set(0, start);
        self.set(1, start + bytes);
    }

    /// `bytes` bytes, aligned to 16, never to a page. `None`: call `grow` first.
    pub fn alloc(self, bytes: usize) -> Option<usize> {
        if bytes > MOST {
            return None;
        }
        let (index, size) = class(bytes);
        let first = self.get(2 + index);
        if first != 0 {
            // SAFETY: a free block of this heap holds the next one's address in its first word.
            let next = unsafe { word(first).read_volatile() };
            self.set(2 + index, usize::try_from(next).expect("64-bit addresses"));
            // SAFETY: the block's header.
            unsafe { word(first - 8).write_volatile(USED) };
            return Some(first);
        }
        let mut block = self.get(0) + HEADER;
        if block.is_multiple_of(PAGE) {
            block += HEADER;
        }
        let end = block.checked_add(size).filter(|&end| self.get(0) != 0 && end <= self.get(1))?;
        self.set(0, end);
        // SAFETY: inside of the room that `grow` was promised.
        unsafe {
            word(block - 16).write_volatile(index as u64);
            word(block - 8).write_volatile(USED);
        }
        Some(block)
    }

    /// Bytes of the block at `address`.
    ///
    /// # Safety
    /// At least [`HEADER`] bytes before `address` can be read.
    pub unsafe fn size(address: usize) -> Result<usize, NotABlock> {
        // SAFETY: as the caller promises.
        let (index, mark) =
            unsafe { (word(address - 16).read_volatile(), word(address - 8).read_volatile()) };
        match (usize::try_from(index), mark) {
            (Ok(index), USED) if index < CLASSES => Ok(size_of_class(index)),
            (_, FREE) => Err(NotABlock::FreedBefore),
            _ => Err(NotABlock::Foreign),
        }
    }

    /// # Safety
    /// As [`Heap::size`]; nothing uses the block any more.
    pub unsafe fn free(self, address: usize) -> Result<(), NotABlock> {
        // SAFETY: as the caller promises.
        let (index, _) = class(unsafe { Self::size(address) }?);
        // SAFETY: a block of this heap, as its mark says.
        unsafe {
            word(address).write_volatile(self.get(2 + index) as u64);
            word(address - 8).write_volatile(FREE);
        }
        self.set(2 + index, address);
        Ok(())
    }
}

fn word(address: usize) -> *mut u64 {
    std::ptr::with_exposed_provenance_mut(address)
}

/// The class of blocks that `bytes` fit, and its size.
fn class(bytes: usize) -> (usize, usize) {
    let units = bytes.div_ceil(GRAIN).max(1);
    if units <= 8 {
        return (units - 1, units * GRAIN);
    }
    let shift = (usize::BITS - (units - 1).leading_zeros() - 3) as usize;
    let quarter = ((units - 1) >> shift) + 1;
    (8 + (shift - 1) * 4 + quarter - 5, (quarter << shift) * GRAIN)
}

fn size_of_class(index: usize) -> usize {
    match index.checked_sub(8) {
        None => (index + 1) * GRAIN,
        Some(above) => ((above % 4 + 5) << (above / 4 + 1)) * GRAIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_what_they_say_and_waste_little() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, MOST - 1, MOST]) {
            let (index, size) = class(bytes);
            assert!(size >= bytes && size <= (bytes + bytes / 4).max(GRAIN) + GRAIN, "{bytes}: {size}");
            assert_eq!((size_of_class(index), class(size)), (size, (index, size)), "{bytes}");
            assert!(index < CLASSES);
        }
    }

    #[test]
    fn blocks_do_not_overlap_and_come_back() {
        let mut room = vec![0u64; 8 * PAGE];
        let mut state = [0u64; STATE_WORDS];
        // SAFETY: `state` is this heap's alone.
        let heap = unsafe { Heap::new(state.as_mut_ptr()) };
        assert_eq!(heap.alloc(1), None);
        let start = room.as_mut_ptr().expose_provenance().next_multiple_of(PAGE);
        // SAFETY: `room` is this heap's alone.
        unsafe { heap.grow(start, 6 * PAGE) };
        let mut blocks: Vec<(usize, usize)> = Vec::new();
        while let Some(at) = heap.alloc(40 + blocks.len() % 3 * 700) {
            let bytes = 40 + blocks.len() % 3 * 700;
            assert!(at % GRAIN == 0 && at % PAGE != 0 && at >= start && at + bytes <= start + 6 * PAGE);
            assert!(blocks.iter().all(|&(other, size)| at + bytes <= other || other + size <= at));
            blocks.push((at, bytes));
        }
        assert!(blocks.len() > 30);
        // SAFETY: blocks of this heap.
        unsafe {
            let (at, bytes) = blocks[4];
            assert!(Heap::size(at).is_ok_and(|size| size >= bytes));
            assert_eq!(heap.free(at), Ok(()));
            assert_eq!(heap.free(at), Err(NotABlock::FreedBefore));
            assert_eq!(heap.alloc(bytes), Some(at));
            assert_eq!(heap.free(blocks[3].0 + 16), Err(NotABlock::Foreign));
        }
    }
}
