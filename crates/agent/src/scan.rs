//! Which of the program's memory the agent takes over.
//!
//! Private, writable, anonymous memory of any allocator: the heap, `mmap`, large arrays in .bss. Not: stacks
//! (small, always hot) and small mappings (not worth a registration). The pager leaves the agent's own
//! mappings out, and pages that its thread depends on.

use rampool_kernel::OS_PAGE_BYTES;
use rampool_kernel::maps::{Vma, VmaKind, read_maps};
use rampool_kernel::memory::is_mapped;

/// Mappings below this are left alone, except the heap.
const SMALLEST_BYTES: usize = 64 << 10;
/// A .bss below this belongs to a library more often than to a program's arrays.
const SMALLEST_BSS_BYTES: usize = 1 << 20;
/// Guard areas below thread stacks are at most this large, and the stacks themselves at most
/// [`LARGEST_STACK_BYTES`].
const LARGEST_GUARD_BYTES: usize = 64 << 10;
const LARGEST_STACK_BYTES: usize = 64 << 20;
/// The heaps that the GNU C library's `malloc` makes for threads are this large and begin at multiples of it.
/// What a full one has left over at its end lies below the next one like a guard area. A stack may begin at a
/// multiple too, and must not be taken over: a thread starts with all signals blocked, so in the lowest fault
/// mode the kernel would end the process at the thread's first absent page.
const HEAP_BYTES: usize = 64 << 20;

/// The whole pages that have `[start, end)`.
#[must_use]
pub fn whole_pages(start: usize, end: usize) -> (usize, usize) {
    (start & !(OS_PAGE_BYTES - 1), end.next_multiple_of(OS_PAGE_BYTES))
}

/// Calls `each` with every mapping to be taken over, in address order; parts of it may be our own.
///
/// # Errors
/// When /proc cannot be read.
pub fn candidates(mut each: impl FnMut(usize, usize)) -> std::io::Result<()> {
    judged(|vma, _, is_candidate| {
        if is_candidate {
            each(vma.start, vma.end);
        }
    })
}

/// Calls `each` with every range that has mappings to be taken over and, between what lies below and above,
/// nothing else but gaps, in address order.
///
/// # Errors
/// When /proc cannot be read.
pub fn candidates_with_gaps(mut each: impl FnMut(usize, usize)) -> std::io::Result<()> {
    let mut range = None;
    judged(|vma, before, is_candidate| {
        if is_candidate {
            range.get_or_insert((before.map_or(vma.start, |before| before.end), 0)).1 = vma.end;
        } else if let Some((start, _)) = range.take() {
            each(start, vma.start);
        }
    })?;
    if let Some((start, end)) = range {
        each(start, end);
    }
    Ok(())
}

/// Calls `each` with every mapping, the one before, and whether it is to be taken over.
fn judged(mut each: impl FnMut(&Vma, Option<&Vma>, bool)) -> std::io::Result<()> {
    let (mut before, mut last): (Option<Vma>, Option<Vma>) = (None, None);
    let mut come = |next: Option<&Vma>| {
        if let Some(vma) = &last {
            each(vma, before.as_ref(), is_candidate(vma, before.as_ref(), next));
        }
        before = std::mem::replace(&mut last, next.copied());
    };
    read_maps(|vma| come(Some(vma)))?;
    come(None);
    Ok(())
}

/// Anonymous memory that may not be touched: a guard area, or what is only reserved.
fn is_closed(vma: &Vma) -> bool {
    vma.kind == VmaKind::Anonymous && !vma.readable && !vma.writable
}

fn is_candidate(vma: &Vma, before: Option<&Vma>, after: Option<&Vma>) -> bool {
    if !vma.is_private_memory() {
        return false;
    }
    let touches = before.filter(|b| b.end == vma.start);
    match vma.kind {
        VmaKind::Heap => true,
        VmaKind::Anonymous if vma.bytes() < SMALLEST_BYTES => false,
        VmaKind::Anonymous => {
            let is_bss = touches.is_some_and(|b| b.kind == VmaKind::File);
            let has_guard = touches.is_some_and(|b| is_closed(b) && b.bytes() <= LARGEST_GUARD_BYTES);
            let is_stack = has_guard && vma.bytes() <= LARGEST_STACK_BYTES && !is_heap_of_thread(vma, after);
            !(is_bss && vma.bytes() < SMALLEST_BSS_BYTES || is_stack)
        }
        VmaKind::MainStack | VmaKind::Kernel | VmaKind::File => false,
    }
}

/// Whether `vma` is the used part of a thread's heap, or all of it: what is not used yet lies closed above it.
fn is_heap_of_thread(vma: &Vma, after: Option<&Vma>) -> bool {
    let unused = after.filter(|after| after.start == vma.end && is_closed(after));
    let end = unused.map_or(vma.end, |unused| unused.end);
    vma.start.is_multiple_of(HEAP_BYTES) && end - vma.start >= HEAP_BYTES
}

/// The page that holds this thread's table of thread-local storage: the C library keeps it on the program's
/// heap, and the agent's thread may read it at any time.
#[must_use]
pub fn thread_table() -> Option<(usize, usize)> {
    #[cfg(target_arch = "x86_64")]
    {
        let table: usize;
        // SAFETY: on x86-64 Linux the second word of the thread control block, at %fs:8, is the dtv pointer
        // (ELF TLS ABI, variant II).
        unsafe {
            std::arch::asm!("mov {}, fs:[8]", out(reg) table, options(nostack, readonly, preserves_flags))
        };
        const ENTRY_BYTES: usize = 16;
        // SAFETY: entry -1 of the table holds how many entries follow entry 0.
        let entries = unsafe { std::ptr::with_exposed_provenance::<usize>(table - ENTRY_BYTES).read() };
        // With the C library's allocator, the header of the block lies below it, and the next block's above.
        // With others there may be no memory at all.
        Some((table - 2 * ENTRY_BYTES, table + (entries + 1) * ENTRY_BYTES))
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        None
    }
}

/// Makes the pages of `[start, end)` resident that are mapped, through the present fault server. What is
/// mapped there must be readable.
pub fn touch(start: usize, end: usize) {
    let mut at = start;
    while at < end {
        if is_mapped(at) {
            // SAFETY: mapped, and readable as the caller says; the value is not used.
            unsafe { std::ptr::with_exposed_provenance::<u8>(at).read_volatile() };
        }
        at = (at & !(OS_PAGE_BYTES - 1)) + OS_PAGE_BYTES;
    }
}

#[cfg(test)]
mod tests {
    use rampool_kernel::memory::Mapping;

    use super::*;

    fn vma(start: usize, end: usize, kind: VmaKind, open: bool) -> Vma {
        Vma { start, end, readable: open, writable: open, private: true, kind }
    }

    #[test]
    fn stacks_small_mappings_and_library_bss_stay() {
        let big = 16 << 20;
        let anonymous = vma(big, 2 * big, VmaKind::Anonymous, true);
        assert!(is_candidate(&anonymous, None, None));
        assert!(!is_candidate(&vma(big, big + 4096, VmaKind::Anonymous, true), None, None));
        let guard = vma(big - 4096, big, VmaKind::Anonymous, false);
        assert!(!is_candidate(&anonymous, Some(&guard), None));
        let heap = vma(HEAP_BYTES, 2 * HEAP_BYTES - 4096, VmaKind::Anonymous, true);
        let left_over = vma(HEAP_BYTES - (24 << 10), HEAP_BYTES, VmaKind::Anonymous, false);
        let unused = vma(2 * HEAP_BYTES - 4096, 2 * HEAP_BYTES, VmaKind::Anonymous, false);
        assert!(is_candidate(&heap, Some(&left_over), Some(&unused)), "a heap of a thread above a full one");
        let stack = vma(HEAP_BYTES, HEAP_BYTES + (8 << 20), VmaKind::Anonymous, true);
        let guard_above = vma(stack.end, stack.end + 4096, VmaKind::Anonymous, false);
        for after in [None, Some(&guard_above)] {
            assert!(!is_candidate(&stack, Some(&left_over), after), "a stack that begins where a heap could");
        }
        let arena = vma(0, big, VmaKind::Anonymous, false);
        assert!(is_candidate(&anonymous, Some(&arena), None), "a large closed mapping below is no guard");
        let file = vma(0, big, VmaKind::File, true);
        assert!(!is_candidate(&vma(big, big + (512 << 10), VmaKind::Anonymous, true), Some(&file), None));
        assert!(
            is_candidate(&anonymous, Some(&file), None),
            "a program's large static arrays are memory like any other"
        );
        assert!(!is_candidate(&vma(0, big, VmaKind::Anonymous, false), None, None));
    }

    #[test]
    fn what_is_not_mapped_is_not_touched() {
        // A thread's table may begin where its allocator's memory does.
        // Parts of it go; what other threads map there next must not go with the rest.
        let memory = std::mem::ManuallyDrop::new(Mapping::anonymous(3 * OS_PAGE_BYTES).unwrap());
        let (start, end) = (memory.start(), memory.start() + memory.bytes());
        // SAFETY: the first and the last page of our own mapping, which are not used.
        unsafe {
            assert_eq!(libc::munmap(memory.at(0).cast(), OS_PAGE_BYTES), 0);
            assert_eq!(libc::munmap(memory.at(2 * OS_PAGE_BYTES).cast(), OS_PAGE_BYTES), 0);
        }
        touch(start + 16, end - 16);
        assert!(is_mapped(start + OS_PAGE_BYTES));
    }

    #[test]
    fn a_scan_finds_memory_whatever_made_it() {
        let layout = std::alloc::Layout::from_size_align(8 << 20, 4096).unwrap();
        // SAFETY: a valid layout; freed below.
        let program = unsafe { std::alloc::alloc(layout) };
        let mut found = false;
        candidates(|start, end| found |= start <= program.addr() && end > program.addr()).unwrap();
        assert!(found);
        // SAFETY: allocated above.
        unsafe { std::alloc::dealloc(program, layout) };
    }
}
