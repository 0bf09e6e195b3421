//! Taking over memory: which memory, and without missing a change meanwhile.

use rampool_kernel::maps::{Maps, PresentRun, Vma, read_maps};
use rampool_kernel::memory::own_mappings;
use rampool_paging::cache::Input;
use rampool_wire::units::{Extent, OS_PAGE_BYTES};

use super::{Pager, page_count, pages_at};
use crate::backing::Backing;
use crate::fault::FaultCatcher;

impl<B: Backing> Pager<B> {
    /// Takes `[start, start + bytes)` over: registers it and tells the cache which of its pages are present.
    ///
    /// # Errors
    /// The errno of a range that cannot be registered. EAGAIN: mappings are changing, and the event about it
    /// was not read yet. What the caller saw may be memory that is managed already and has just been moved
    /// there, or memory in a place that counts as managed until its unmapping is known. The range stays
    /// registered, so that its faults come here; look again, and ask again, once events have been served. Or
    /// a fork is under way whose child was promised the memory as it was: nothing has happened then, and it
    /// is to be asked again after the fork.
    pub(crate) fn adopt(&mut self, start: usize, bytes: usize) -> Result<(), i32> {
        if self.mappings.frozen {
            return Err(libc::EAGAIN);
        }
        self.faults.manage(start, bytes)?;
        self.take_in(start, start + bytes)
    }

    /// Takes over the part of `[start, end)` that is mapped memory of the program's now, which it may be
    /// changing meanwhile. Memory that is managed already, our own, or left out does not change.
    ///
    /// # Safety
    /// The memory is the program's. While it is managed, nothing but this pager answers for its content: the
    /// pager is driven until the program ends, or the memory is handed on.
    ///
    /// # Errors
    /// EAGAIN: mappings are changing, or a fork is under way; ask again after events have been served. A
    /// mapping that the kernel refuses is passed over.
    pub unsafe fn adopt_mapped(&mut self, start: usize, end: usize) -> Result<(), i32> {
        if self.mappings.frozen {
            return Err(libc::EAGAIN);
        }
        let Ok(maps) = Maps::open() else { return Err(libc::EAGAIN) };
        if self.collects() {
            return Err(libc::EAGAIN);
        }
        let mut at = start;
        while let Some(vma) = maps.from(at).filter(|vma| vma.start < end) {
            let parts = if vma.is_private_memory() { self.unmanaged(vma.start, vma.end) } else { Vec::new() };
            for (from, to) in parts.into_iter().filter(|&(from, to)| from < end && to > at) {
                if self.adopt_whole(&maps, from, to) == Err(libc::EAGAIN) {
                    return Err(libc::EAGAIN);
                }
            }
            at = vma.end;
        }
        Ok(())
    }

    /// Takes `[start, end)` over, which was one mapping, or a part of one, when it was last looked at.
    fn adopt_whole(&mut self, maps: &Maps, start: usize, end: usize) -> Result<(), i32> {
        if !self.faults.follows_mappings() {
            self.faults.manage(start, end - start)?;
            return self.take_in(start, end);
        }
        let part = |address, vma: &Vma| self.unmanaged_around(address, vma);
        let (start, end) = register_whole(maps, (start, end), part, |from, to| {
            // What counts as managed may be elsewhere by now: to register what is left over would divide a
            // mapping.
            if self.collects() || self.faults.is_changing() {
                return Err(libc::EAGAIN);
            }
            self.faults.manage(from, to - from)
        })?;
        self.take_in(start, end)
    }

    /// The parts of `[start, end)` that are not managed and may be, in address order.
    fn unmanaged(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let holes = not_to_be_managed(start, end, &self.mappings.left_out);
        let mut parts = Vec::new();
        self.space.gaps(start, end, |from, to| subtract((from, to), &holes, &mut parts));
        parts
    }

    /// The one of these parts that has `address`.
    fn unmanaged_around(&self, address: usize, vma: &Vma) -> Option<(usize, usize)> {
        self.unmanaged(vma.start, vma.end).into_iter().find(|&(from, to)| from <= address && address < to)
    }

    /// Pages that the driver of this pager depends on: [`Self::adopt_mapped`] passes them over.
    pub fn leave_out(&mut self, start: usize, end: usize) {
        self.mappings.left_out.push((start, end));
    }

    /// Counts `[start, end)`, which is registered, as managed.
    fn take_in(&mut self, start: usize, end: usize) -> Result<(), i32> {
        if self.faults.mappings_change(start) {
            return Err(libc::EAGAIN);
        }
        if self.mappings.frozen {
            // The child of the fork under way inherits it: nothing of it has left.
            self.faults.inheritable(start, end - start, true);
        }
        let mut present = Vec::new();
        self.pagemap.present_runs(start, end, &mut present);
        if self.faults.mappings_change(start) {
            // What is present there may be other memory already.
            return Err(libc::EAGAIN);
        }
        // A span holds fewer than 2^31 pages; larger mappings become several.
        const MOST: usize = (1 << 30) * OS_PAGE_BYTES;
        let mut at = start;
        while at < end {
            let part = (end - at).min(MOST);
            let extent = self.space.insert(at, page_count(part));
            let resident = self.resident_extents(&present, at, extent);
            // Since it was registered: those still present will vanish.
            let given_up = self.mappings.given_up.adopted(pages_at(at, at + part), extent);
            self.stats.adopted(u64::from(extent.count));
            self.tell(Input::Adopt { extent, resident: &resident, remote: &[], given_up: &given_up });
            at += part;
        }
        Ok(())
    }

    /// Which pages of a span that was just taken over are among these present runs.
    pub(super) fn resident_extents(
        &self,
        present: &[PresentRun],
        start: usize,
        extent: Extent,
    ) -> Vec<Extent> {
        let end = start + extent.count as usize * OS_PAGE_BYTES;
        let page = |address: usize| extent.first.offset(((address - start) / OS_PAGE_BYTES) as u64);
        let cut = |run: &PresentRun| (run.start.max(start), (run.start + run.bytes).min(end));
        let here = present.iter().map(cut).filter(|(from, to)| from < to);
        here.map(|(from, to)| {
            self.faults.present(from, to - from);
            Extent::new(page(from), page_count(to - from))
        })
        .collect()
    }

    /// A mapping grew in place (`mremap`, the heap): its new part is registered like the old one, but no span
    /// covers it yet. What was to be left out is not there any more, if a page of it is absent.
    pub(super) fn adopt_around(&mut self, address: usize) {
        let left_out = std::mem::take(&mut self.mappings.left_out);
        for range in left_out {
            subtract(range, &[(address, address + OS_PAGE_BYTES)], &mut self.mappings.left_out);
        }
        let Ok(maps) = Maps::open() else { return };
        let Some(vma) = maps.at(address) else { return };
        let Some((start, end)) = self.unmanaged_around(address, &vma) else { return };
        // A mapping that cannot be registered again is not ours to serve; the thread is woken and meets the
        // kernel's own answer.
        let _ = self.adopt_whole(&maps, start, end);
    }
}

/// Before there is a pager: threads that touch absent pages of `ranges`, except in `left_out`, wait until one
/// serves these faults, which takes the memory over. Nothing else changes. Only where the kernel waits for
/// pages in system calls too; elsewhere nothing is done.
///
/// A range may have gaps: what the program maps there meanwhile is held, too. It ends where something else
/// begins. If it ended with a mapping, one that takes its place meanwhile would be divided, and stay so: the
/// kernel refuses an `mremap` of two mappings as one (EFAULT).
///
/// The caller makes the pager soon, needs no absent page of that memory until then, and no other thread of
/// the process changes our own mappings meanwhile.
pub fn hold_absent(faults: &FaultCatcher, ranges: &[(usize, usize)], left_out: &[(usize, usize)]) {
    let mut parts = Vec::new();
    for &(start, end) in ranges {
        subtract((start, end), &not_to_be_managed(start, end, left_out), &mut parts);
    }
    for &(from, to) in &parts {
        faults.hold_absent(from, to - from);
    }
    // What has come into the gaps and is not to be taken over is not waited for.
    let _ = read_maps(|vma| {
        if !vma.is_private_memory() && parts.iter().any(|&(from, to)| vma.start >= from && vma.end <= to) {
            faults.let_go(vma.start, vma.bytes());
        }
    });
}

/// Registers the memory `part`, which was one mapping, or a part of one, when it was last looked at, and says
/// what was registered as one.
///
/// The mapping may have grown since, or be gone, with another one in its place. Registering a part of a
/// mapping splits it, and the kernel refuses an `mremap` of two mappings as one (EFAULT). Or there may be a
/// hole now, which is not registered, and whatever is mapped there next is not either. So it is checked again
/// once it is registered, and what has come beside it is registered with it, which makes one mapping of the
/// two again: events report all later changes. `part_around` says which part of a mapping with an address is
/// to be registered.
///
/// # Errors
/// What `register` says; EAGAIN: the mapping changes all the time, or is gone. What is registered stays so.
fn register_whole(
    maps: &Maps,
    part: (usize, usize),
    part_around: impl Fn(usize, &Vma) -> Option<(usize, usize)>,
    register: impl Fn(usize, usize) -> Result<(), i32>,
) -> Result<(usize, usize), i32> {
    /// Mappings that change faster than that are left to the next scan.
    const MOST_LOOKS: usize = 16;
    let (mut start, mut end) = part;
    for _ in 0..MOST_LOOKS {
        let (below, above) = (maps.at(start - 1), maps.at(end));
        let now = maps.from(start).filter(|vma| vma.start < end);
        let now = now.and_then(|vma| part_around(vma.start.max(start), &vma)).ok_or(libc::EAGAIN)?;
        if now != (start, end) {
            (start, end) = now;
            continue;
        }
        register(start, end)?;
        let came = |address, before: Option<Vma>| {
            let vma = maps.at(address).filter(|vma| Some(*vma) != before && vma.is_private_memory())?;
            part_around(address, &vma)
        };
        let (below, above) = (came(start - 1, below), came(end, above));
        if below.is_none() && above.is_none() {
            let is_whole = maps.at(start).is_some_and(|vma| vma.end >= end);
            return if is_whole { Ok((start, end)) } else { Err(libc::EAGAIN) };
        }
        start = below.map_or(start, |(from, _)| from);
        end = above.map_or(end, |(_, to)| to);
        register(start, end)?;
    }
    Err(libc::EAGAIN)
}

/// Our own mappings in `[start, end)`, and what is left out, in address order.
fn not_to_be_managed(start: usize, end: usize, left_out: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let mut holes = left_out.to_vec();
    own_mappings(|from, to| holes.push((from, to)));
    holes.retain(|&(from, to)| from < end && to > start);
    holes.sort_unstable();
    holes
}

/// Appends the parts of `range` that none of `holes` (sorted) covers.
fn subtract(range: (usize, usize), holes: &[(usize, usize)], parts: &mut Vec<(usize, usize)>) {
    let mut at = range.0;
    for &(start, end) in holes {
        if end <= at || start >= range.1 {
            continue;
        }
        if start > at {
            parts.push((at, start));
        }
        at = at.max(end);
    }
    if at < range.1 {
        parts.push((at, range.1));
    }
}

#[cfg(test)]
mod tests {
    use super::subtract;

    #[test]
    fn holes_are_cut_out() {
        let mut parts = Vec::new();
        subtract((100, 200), &[(50, 110), (120, 130), (125, 140), (190, 300)], &mut parts);
        assert_eq!(parts, [(110, 120), (140, 190)]);
    }
}
