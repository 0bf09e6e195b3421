//! Small runs of a window, copied one behind the other.
//!
//! Such runs lie anywhere: a page, and a line of the cache, for each, and the memory takes longer to bring a
//! line than everything else takes together. So addresses come first, many at a time, each line being asked
//! for as its address is known, and the copies follow one batch later.

use super::gather::ZEROES;
use crate::store::Slabs;
use rampool_kernel::memory::prefetch;
use rampool_lease::View;
use rampool_wire::frame::Window;
use rampool_wire::layout::Row;
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};

const PAGE_BYTES: u64 = OS_PAGE_BYTES as u64;
/// Runs of a batch: what the lines of two of them take is well within a cache of the first level, and more
/// than the memory works at at a time.
const BATCH: usize = 128;
/// Lines of a cache of the first level that have the same place within their pages: with the usual eight
/// ways, no more of them can be on their way at a time without driving each other out.
const WAYS: usize = 8;
/// The lines that are asked for of a run longer than one: what comes behind them the processor asks for by
/// itself.
const LINE_BYTES: usize = 64;
const MOST_LINES: usize = 4;

/// Copies `len` bytes of a window, those behind the first `done`, behind those in `buffer`, which has room for
/// them. False, with no effect, where a page is not plain. Call it while the lease of the view is locked, and
/// with a window within the region.
pub(super) fn copy(
    slabs: &Slabs,
    view: &mut View<'_>,
    window: &Window,
    (done, len): (u32, u32),
    buffer: &mut Vec<u8>,
) -> bool {
    let len = len as usize;
    assert!(buffer.capacity() - buffer.len() >= len, "there is room for the window");
    let to = buffer.spare_capacity_mut().as_mut_ptr().cast();
    let mut copier = Copier { slabs, view, to, batches: [Batch::new(), Batch::new()], filling: 0 };
    for row in window.program.rows(window.from + u64::from(done), len as u64) {
        let done = match row {
            Row::Even { first, stride, count, len } => {
                copier.even(first.cast_unsigned(), stride, count, in_memory(len))
            }
            Row::Listed { base, offsets, len } => copier.listed(base, offsets, in_memory(len)),
        };
        if done.is_none() {
            return false;
        }
    }
    copier.turn();
    copier.turn();
    // SAFETY: all bytes of the window, which the rows make up, are written, and there is room for them.
    unsafe { buffer.set_len(buffer.len() + len) };
    true
}

/// Runs whose memory is on its way.
///
/// Invariant: the first `count` are readable memory, which is not written while the lease is locked; `alike`
/// says that they are all as long as the first.
struct Batch {
    from: [*const u8; BATCH],
    len: [usize; BATCH],
    count: usize,
    alike: bool,
}

impl Batch {
    fn new() -> Self {
        Self { from: [std::ptr::null(); BATCH], len: [0; BATCH], count: 0, alike: true }
    }

    /// `more` runs of this length have been written behind the first `count`.
    fn took(&mut self, more: usize, len: usize) {
        if more > 0 {
            self.len[self.count..self.count + more].fill(len);
            self.count += more;
            self.alike &= self.len[0] == len;
        }
    }
}

/// Two batches in turns: while one is filled, the memory of the other comes.
///
/// Invariant: behind `to` there is room for everything in the batches, and for the rest of the window.
struct Copier<'a, 'b> {
    slabs: &'a Slabs,
    view: &'a mut View<'b>,
    to: *mut u8,
    batches: [Batch; 2],
    filling: usize,
}

/// Where a page lies. None: it is not plain.
#[inline]
fn memory_of(slabs: &Slabs, view: &mut View<'_>, page: PageIndex) -> Option<*const u8> {
    match view.page(page) {
        None => Some(ZEROES.as_ptr()),
        Some(page) if usize::from(page.len) == OS_PAGE_BYTES => Some(slabs.memory(page.frame).cast_const()),
        Some(_) => None,
    }
}

impl Copier<'_, '_> {
    fn listed(&mut self, base: i64, offsets: &[i64], len: usize) -> Option<()> {
        self.anywhere(offsets.len(), len, BATCH, |n| (base + offsets[n]).cast_unsigned())
    }

    fn even(&mut self, mut at: u64, stride: i64, mut count: u64, len: usize) -> Option<()> {
        let step = in_memory(stride.unsigned_abs());
        let most = if count == 1 { BATCH } else { most_ahead(step) };
        if step >= OS_PAGE_BYTES || count == 1 {
            return self.anywhere(in_memory(count), len, most, |n| {
                at.wrapping_add_signed(stride.wrapping_mul((n as u64).cast_signed()))
            });
        }
        while count > 0 {
            let within = in_memory(at % PAGE_BYTES);
            let Some(behind) = (OS_PAGE_BYTES - within).checked_sub(len) else {
                self.across(at, len)?;
                at = at.wrapping_add_signed(stride);
                count -= 1;
                continue;
            };
            // As many as lie in this page.
            let room = if stride < 0 { within } else { behind };
            let fit = room.checked_div(step).map_or(count, |more| count.min(more as u64 + 1));
            let memory = memory_of(self.slabs, self.view, PageIndex(at / PAGE_BYTES))?.wrapping_add(within);
            let signed = isize::try_from(stride).expect("less than a page");
            self.in_page(memory, signed, in_memory(fit), (len, most));
            at = at.wrapping_add_signed(stride.wrapping_mul(fit.cast_signed()));
            count -= fit;
        }
        Some(())
    }

    /// Runs of which each may lie in another page, at most so many in a batch.
    #[inline]
    fn anywhere(&mut self, count: usize, len: usize, most: usize, at: impl Fn(usize) -> u64) -> Option<()> {
        let mut done = 0;
        while done < count {
            let batch = self.room(most);
            // Only addresses in here: a list of a million elements goes through this loop.
            let (slabs, view, filled) = (self.slabs, &mut *self.view, self.batches[batch].count);
            let mut more = 0;
            for (place, n) in self.batches[batch].from[filled..most].iter_mut().zip(done..count) {
                let at = at(n);
                let within = in_memory(at % PAGE_BYTES);
                if within + len > OS_PAGE_BYTES {
                    break;
                }
                let from = memory_of(slabs, view, PageIndex(at / PAGE_BYTES))?.wrapping_add(within);
                prefetch_run(from, len);
                *place = from;
                more += 1;
            }
            self.batches[batch].took(more, len);
            done += more;
            if more == 0 {
                self.across(at(done), len)?;
                done += 1;
            }
        }
        Some(())
    }

    /// A run that goes on where its page ends.
    #[cold]
    fn across(&mut self, at: u64, len: usize) -> Option<()> {
        let within = in_memory(at % PAGE_BYTES);
        let here = len.min(OS_PAGE_BYTES - within);
        let memory = memory_of(self.slabs, self.view, PageIndex(at / PAGE_BYTES))?;
        self.in_page(memory.wrapping_add(within), 0, 1, (here, BATCH));
        if here < len { self.across(at + here as u64, len - here) } else { Some(()) }
    }

    /// Runs of this length that lie in one page, at most so many in a batch.
    fn in_page(&mut self, mut from: *const u8, stride: isize, mut count: usize, (len, most): (usize, usize)) {
        while count > 0 {
            let batch = self.room(most);
            let batch = &mut self.batches[batch];
            let more = count.min(most - batch.count);
            for place in &mut batch.from[batch.count..batch.count + more] {
                prefetch_run(from, len);
                *place = from;
                from = from.wrapping_offset(stride);
            }
            batch.took(more, len);
            count -= more;
        }
    }

    /// The batch that is being filled; there are fewer in it than `most`, which is 1 at least.
    #[inline]
    fn room(&mut self, most: usize) -> usize {
        if self.batches[self.filling].count >= most {
            self.turn();
        }
        self.filling
    }

    /// Copies the batch that has waited, which is the one to fill from now on; the other one waits.
    fn turn(&mut self) {
        self.filling ^= 1;
        let batch = &mut self.batches[self.filling];
        // SAFETY: the invariants of both.
        self.to = unsafe { copy_batch(batch, self.to) };
        (batch.count, batch.alike) = (0, true);
    }
}

/// Copies the runs of a batch one behind the other; tells where the last one ends.
///
/// # Safety
/// There is room for all of them from `to` on.
unsafe fn copy_batch(batch: &Batch, mut to: *mut u8) -> *mut u8 {
    let from = &batch.from[..batch.count];
    // SAFETY: the batch's invariant, and the caller's promise.
    unsafe {
        match (batch.alike, batch.len[0]) {
            (true, 1) => copy_alike::<1>(from, to),
            (true, 2) => copy_alike::<2>(from, to),
            (true, 4) => copy_alike::<4>(from, to),
            (true, 8) => copy_alike::<8>(from, to),
            (true, 16) => copy_alike::<16>(from, to),
            (true, 32) => copy_alike::<32>(from, to),
            (true, 64) => copy_alike::<64>(from, to),
            _ => {
                for (from, len) in from.iter().zip(&batch.len) {
                    copy_one(*from, to, *len);
                    to = to.add(*len);
                }
                to
            }
        }
    }
}

/// # Safety
/// As `copy_batch`, of runs of `N` bytes.
unsafe fn copy_alike<const N: usize>(from: &[*const u8], mut to: *mut u8) -> *mut u8 {
    for from in from {
        // SAFETY: the caller's promise.
        unsafe {
            to.cast::<[u8; N]>().write_unaligned(from.cast::<[u8; N]>().read_unaligned());
            to = to.add(N);
        }
    }
    to
}

/// Copies without a call for the usual lengths.
///
/// # Safety
/// As `copy_nonoverlapping`.
#[inline]
pub(super) unsafe fn copy_one(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned()),
            4 => to.cast::<u32>().write_unaligned(from.cast::<u32>().read_unaligned()),
            64 => to.cast::<[u64; 8]>().write_unaligned(from.cast::<[u64; 8]>().read_unaligned()),
            _ => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// How many runs of a batch, of which each lies `step` bytes behind the one before. What decides where in the
/// cache a line may be is its place within its page: the higher the power of two that divides the step, the
/// fewer places there are.
fn most_ahead(step: usize) -> usize {
    let places = OS_PAGE_BYTES >> step.trailing_zeros().min(OS_PAGE_BYTES.trailing_zeros());
    (places * WAYS).min(BATCH)
}

/// Asks for the lines of a run, the first ones of a long one. A run that begins with a line has none behind
/// its last byte: to ask for that would take as much of the memory's time as the run itself.
#[inline]
fn prefetch_run(from: *const u8, len: usize) {
    prefetch(from);
    for line in 1..=(len / LINE_BYTES).min(MOST_LINES) {
        prefetch(from.wrapping_add((line * LINE_BYTES).min(len - 1)));
    }
}

fn in_memory(n: u64) -> usize {
    usize::try_from(n).expect("a 64-bit machine")
}
