//! Memory that a system call is about to use, or has failed on, made resident by touching it: in the fault
//! modes in which the kernel cannot wait for pages.
//!
//! Only what counts as managed in the table of pages is touched ([`crate::pagetable`]), so a bad address
//! stays the caller's own mistake.

use std::ffi::c_char;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::memory::{Advice, advise};
use crate::{OS_PAGE_BYTES, pagetable};

/// What the kernel does to a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// It reads. A call that meets an absent page fails and has done nothing, or less; it can be repeated.
    Read,
    /// It writes. What it had to write may be lost if it cannot.
    Write,
}

/// Makes the managed pages of `[start, start + bytes)` resident, and writable for [`Use::Write`]; true if
/// there were any. Blocks as long as the pages take.
///
/// `doubt`: pages that do not count as managed are looked at as well. The kernel may know better: a range is
/// registered a moment before it counts as managed, and the end of a heap that has just grown belongs to the
/// mapping that it continues.
pub fn touch(start: usize, bytes: usize, how: Use, doubt: bool) -> bool {
    let (mut any, mut page, end) = (false, start & !(OS_PAGE_BYTES - 1), start.saturating_add(bytes));
    let mut unknown: Option<(usize, usize)> = None;
    while page < end {
        if pagetable::mark(page) != 0 {
            any = true;
            touch_byte(page.max(start), how);
        } else if doubt {
            match &mut unknown {
                Some((_, to)) if *to == page => *to += OS_PAGE_BYTES,
                _ => {
                    any |= unknown.take().is_some_and(|(from, to)| touch_unknown(from, to, how));
                    unknown = Some((page, page + OS_PAGE_BYTES));
                }
            }
        }
        page += OS_PAGE_BYTES;
    }
    any | unknown.is_some_and(|(from, to)| touch_unknown(from, to, how))
}

/// As [`touch`] for [`Use::Read`], for a string that ends with a zero byte; false where its first byte is not
/// managed.
///
/// # Safety
/// `text` is such a string, or null, or an address where nothing is mapped.
pub unsafe fn touch_text(text: *const c_char, doubt: bool) -> bool {
    let start = text.expose_provenance();
    if start == 0 || !(pagetable::mark(start) != 0 || doubt && touch(start, 1, Use::Read, true)) {
        return false;
    }
    let mut at = text;
    // SAFETY: the caller's promise; each byte is read in turn, which brings its page.
    while unsafe { at.read_volatile() } != 0 {
        at = at.wrapping_add(1);
    }
    true
}

/// Whether any page of `[start, start + bytes)` counts as managed. Async-signal-safe.
#[must_use]
pub fn managed(start: usize, bytes: usize) -> bool {
    let end = start.saturating_add(bytes);
    let mut page = start & !(OS_PAGE_BYTES - 1);
    while page < end {
        if pagetable::mark(page) != 0 {
            return true;
        }
        page += OS_PAGE_BYTES;
    }
    false
}

fn touch_byte(address: usize, how: Use) {
    let byte = std::ptr::with_exposed_provenance_mut::<u8>(address);
    match how {
        Use::Write => {
            // SAFETY: memory of the program that is or can be managed, so readable and writable; adding zero
            // atomically changes nothing for other threads. The compiler must not know that it is zero: it
            // would emit a load, which leaves the page protected.
            _ = unsafe { AtomicU8::from_ptr(byte) }.fetch_add(std::hint::black_box(0), Ordering::Relaxed)
        }
        // SAFETY: as above.
        Use::Read => _ = unsafe { byte.read_volatile() },
    }
}

/// Pages that do not count as managed: touches what turns out to be. A bad address of the program's stays
/// untouched.
fn touch_unknown(from: usize, to: usize, how: Use) -> bool {
    let advice = if how == Use::Write { Advice::PopulateWrite } else { Advice::PopulateRead };
    // SAFETY: changes no content.
    match unsafe { advise(from, to - from, advice) } {
        // The kernel cannot make it present because that is the fault handler's task. (Before Linux 5.14 it
        // does not know the advice.)
        Err(libc::EFAULT | libc::EINVAL) => {}
        _ => return false,
    }
    let mut any = false;
    let _ = crate::maps::read_maps(|vma| {
        let (from, to) = (vma.start.max(from), vma.end.min(to));
        if from < to && vma.is_private_memory() {
            any = true;
            (from..to).step_by(OS_PAGE_BYTES).for_each(|page| touch_byte(page, how));
        }
    });
    any
}
