//! A small number for every OS page of the address space: its manager, and how it is mapped.
//!
//! Read in signal handlers and before system calls, by any thread, without locks; written by pagers only. Two
//! levels, the lower ones made when first needed and never given back, so a reader needs no protection from
//! them going away.
//!
//! A process may have several pagers, and memory that one of them managed is unmapped, and mapped and managed
//! again by another, before the first has read of it: each has marks of its own, and takes away no others
//! ([`replace`]).

use std::sync::atomic::{AtomicI64, AtomicPtr, AtomicU16, Ordering};

use crate::OS_PAGE_BYTES;
use crate::memory::Mapping;

const LEAF_PAGES: usize = 1 << 18;
/// 2^47 bytes of user addresses in leaves of 1 GiB.
const ROOTS: usize = 1 << 17;

static ROOT: AtomicPtr<AtomicPtr<AtomicU16>> = AtomicPtr::new(std::ptr::null_mut());
/// Neighbouring managed pages of different marks: about as many mappings as the kernel has to keep for them.
static BOUNDARIES: AtomicI64 = AtomicI64::new(0);

/// What is known of a page; 0 for unmanaged pages.
pub type Mark = u16;

/// The mark of the page at `address`. Async-signal-safe.
#[must_use]
pub fn mark(address: usize) -> Mark {
    leaf(address).map_or(0, |(leaf, page)| leaf[page].load(Ordering::Acquire))
}

/// Whether any page was ever marked. Async-signal-safe.
#[must_use]
pub fn has_marks() -> bool {
    root().is_some()
}

/// Marks every page of `[start, start + bytes)`. Allocates, so not for signal handlers.
///
/// # Errors
/// When there is no memory for the table.
pub fn set(start: usize, bytes: usize, mark: Mark) -> Result<(), crate::memory::MapError> {
    change(start, bytes, |_| mark)
}

/// Marks those pages of `[start, start + bytes)` with `new` that are marked with `old`, and no others.
/// Allocates, so not for signal handlers.
///
/// # Errors
/// When there is no memory for the table.
pub fn replace(start: usize, bytes: usize, old: Mark, new: Mark) -> Result<(), crate::memory::MapError> {
    change(start, bytes, |mark| if mark == old { new } else { mark })
}

fn change(start: usize, bytes: usize, new: impl Fn(Mark) -> Mark) -> Result<(), crate::memory::MapError> {
    if bytes == 0 {
        return Ok(());
    }
    let mut at = start;
    let mut before = self::mark(start.wrapping_sub(OS_PAGE_BYTES));
    let (mut had, mut have) = (0, 0);
    let mut old_before = before;
    while at < start + bytes {
        let (leaf, first) = match leaf(at) {
            Some(found) => found,
            None => make_leaf(at)?,
        };
        let count = ((start + bytes - at) / OS_PAGE_BYTES).min(LEAF_PAGES - first);
        for entry in &leaf[first..first + count] {
            let old = entry
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |mark| Some(new(mark)))
                .unwrap_or_default();
            had += boundary(old_before, old);
            have += boundary(before, new(old));
            old_before = old;
            before = new(old);
        }
        at += count * OS_PAGE_BYTES;
    }
    let after = self::mark(start + bytes);
    had += boundary(old_before, after);
    have += boundary(before, after);
    BOUNDARIES.fetch_add(have - had, Ordering::Relaxed);
    Ok(())
}

fn boundary(a: Mark, b: Mark) -> i64 {
    i64::from(a != b)
}

/// How many boundaries between different marks there are.
#[must_use]
pub fn boundaries() -> i64 {
    BOUNDARIES.load(Ordering::Relaxed)
}

fn root() -> Option<&'static [AtomicPtr<AtomicU16>]> {
    let root = ROOT.load(Ordering::Acquire);
    // SAFETY: a non-null root is a table of ROOTS pointers that is never freed; all-zero is a valid table.
    (!root.is_null()).then(|| unsafe { std::slice::from_raw_parts(root, ROOTS) })
}

fn leaf(address: usize) -> Option<(&'static [AtomicU16], usize)> {
    let page = address / OS_PAGE_BYTES;
    let leaf = root()?.get(page / LEAF_PAGES)?.load(Ordering::Acquire);
    // SAFETY: a non-null leaf is a table of LEAF_PAGES marks that is never freed.
    (!leaf.is_null()).then(|| (unsafe { std::slice::from_raw_parts(leaf, LEAF_PAGES) }, page % LEAF_PAGES))
}

#[cold]
fn make_leaf(address: usize) -> Result<(&'static [AtomicU16], usize), crate::memory::MapError> {
    if root().is_none() {
        install(&ROOT, ROOTS * size_of::<AtomicPtr<AtomicU16>>())?;
    }
    let page = address / OS_PAGE_BYTES;
    let slot = &root().expect("just made")[page / LEAF_PAGES];
    install(slot, LEAF_PAGES * size_of::<Mark>())?;
    Ok(leaf(address).expect("just made"))
}

/// Puts a zeroed table into an empty slot; another thread's, when that was faster.
fn install<T>(slot: &AtomicPtr<T>, bytes: usize) -> Result<(), crate::memory::MapError> {
    if !slot.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    let table = Mapping::anonymous(bytes)?;
    let new = table.at(0).cast();
    if slot.compare_exchange(std::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        let _ = table.leak();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_the_boundaries_between_them_are_kept() {
        // Around the end of a leaf, far from what other tests map.
        let start = 0x1000 * LEAF_PAGES * OS_PAGE_BYTES - 4 * OS_PAGE_BYTES;
        let page = |n: usize| start + n * OS_PAGE_BYTES;
        assert_eq!(mark(page(0)), 0);
        let before = boundaries();
        set(page(0), 8 * OS_PAGE_BYTES, 5).unwrap();
        assert_eq!((mark(page(0)), mark(page(7)), mark(page(8))), (5, 5, 0));
        assert_eq!(boundaries() - before, 2);
        set(page(3), 2 * OS_PAGE_BYTES, 6).unwrap();
        assert_eq!(boundaries() - before, 4);
        set(page(0), OS_PAGE_BYTES, 6).unwrap();
        assert_eq!(boundaries() - before, 5);
        set(page(1), 2 * OS_PAGE_BYTES, 6).unwrap();
        assert_eq!(boundaries() - before, 3);
        replace(page(0), 8 * OS_PAGE_BYTES, 5, 700).unwrap();
        assert_eq!((0..9).map(|n| mark(page(n))).collect::<Vec<_>>(), [6, 6, 6, 6, 6, 700, 700, 700, 0]);
        assert_eq!(boundaries() - before, 3);
        replace(page(0), 8 * OS_PAGE_BYTES, 6, 0).unwrap();
        assert_eq!((mark(page(4)), mark(page(5))), (0, 700));
        assert_eq!(boundaries() - before, 2);
        set(page(0), 8 * OS_PAGE_BYTES, 0).unwrap();
        assert_eq!(boundaries(), before);
    }
}
