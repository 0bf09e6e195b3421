//! A `Scan` by keys: totals of a column for each key of another column, sliced as other scans are.
//!
//! A batch of keys is copied, then the elements that belong to them, then both are counted. Memory is bounded
//! by what one request may look at, and is charged as a reply is.

use super::{Connection, Service, Step, Stepped, Work, count_read};
use crate::collect::{PACKED_COUNTS_FOR, PIECES_AT_ONCE, Unpacked, ZEROES, copy_small_runs};
use crate::refused::Refused;
use crate::shared::Shared;
use crate::slice::Slice;
use rampool_lease::View;
use rampool_wire::checksum;
use rampool_wire::elements::{GROUP_BYTES, Groups, Reduced};
use rampool_wire::frame::{Header, Keys, RegionId, ScanRequest, Status, Window, encode_reduced};
use rampool_wire::units::OS_PAGE_BYTES;

/// Elements that are counted between two looks at the clock.
const BATCH: u32 = 1024;
/// What a group takes while it is counted.
const GROUP_TAKES: usize = 2 * GROUP_BYTES;

/// A `Scan` by keys: answers when all elements are counted.
pub(super) struct Grouping {
    request: ScanRequest,
    groups: Groups,
    /// Elements that are counted.
    done: u32,
    /// Of the next batch, as far as they are copied.
    keys: Vec<u8>,
    elements: Vec<u8>,
}

/// What copies bytes of stored pages for a request.
struct Copier<'a, 'b> {
    shared: &'a Shared,
    unpacked: Unpacked<'a>,
    slice: &'b mut Slice,
}

impl Grouping {
    pub(super) fn new(request: ScanRequest, keys: &Keys) -> Self {
        let groups = Groups::new(keys.kind, request.kind, request.test, request.low, request.high);
        Self { request, groups, done: 0, keys: Vec::new(), elements: Vec::new() }
    }

    /// False: the slice is over before all are counted; call it again.
    fn collect(
        &mut self,
        connection: &Connection,
        region: RegionId,
        shared: &Shared,
        slice: &mut Slice,
    ) -> Result<bool, Refused> {
        let Self { request, groups, done, keys, elements } = self;
        let by = request.keys.as_ref().expect("it has keys");
        let membership = connection.membership()?;
        let space = membership.space()?;
        let mut copier = Copier { shared, unpacked: Unpacked::new(shared, connection.arena), slice };
        let each = |window: &Window, bytes: usize| window.len / u32::try_from(bytes).expect("at most 8");
        let count = each(&request.window, request.kind.bytes());
        while *done < count {
            let batch = BATCH.min(count - *done);
            for (region, window, bytes, to) in [
                (by.region, &by.window, by.kind.bytes(), &mut *keys),
                (region, &request.window, request.kind.bytes(), &mut *elements),
            ] {
                let mut view = space.view(membership.member, region)?;
                view.reaches(window.program.bounds().1.cast_unsigned())?;
                let bytes = u32::try_from(bytes).expect("at most 8");
                if !copier.copy(&mut view, window, (*done * bytes, batch * bytes), to)? {
                    return Ok(false);
                }
            }
            groups.feed(keys, elements);
            keys.clear();
            elements.clear();
            *done += batch;
            if *done < count && copier.slice.is_over() {
                return Ok(false);
            }
        }
        let bytes = (groups.len() * GROUP_BYTES) as u64;
        count_read(shared, connection.arena, &membership.lease, (0, bytes));
        Ok(true)
    }
}

impl Copier<'_, '_> {
    /// Copies `len` bytes of a window behind its first `done`, from where it stopped: `to` has those that are
    /// copied. False: the slice is over before.
    fn copy(
        &mut self,
        view: &mut View<'_>,
        window: &Window,
        (done, len): (u32, u32),
        to: &mut Vec<u8>,
    ) -> Result<bool, Refused> {
        if to.is_empty() && copy_small_runs(self.shared, view, window, (done, len), to) {
            return Ok(true);
        }
        let copied = u32::try_from(to.len()).expect("a batch");
        let mut looks = 0;
        for piece in window.pieces_of(done + copied, len - copied) {
            if looks >= PIECES_AT_ONCE {
                looks = 0;
                if self.slice.is_over() {
                    return Ok(false);
                }
            }
            looks += 1;
            let memory = match view.page(piece.page) {
                None => ZEROES.as_ptr(),
                Some(page) if usize::from(page.len) == OS_PAGE_BYTES => {
                    self.shared.store.memory(page.frame).cast_const()
                }
                Some(page) => {
                    looks += PACKED_COUNTS_FOR;
                    self.unpacked.page(piece.page, &page, || {})?
                }
            };
            // SAFETY: the piece is within the page, which is not written while the lease is locked, or within
            // the unpacked one, which is kept.
            to.extend_from_slice(unsafe { std::slice::from_raw_parts(memory.add(piece.within), piece.len) });
        }
        Ok(true)
    }
}

impl Work for Grouping {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let region = RegionId(header.region);
        if !self.collect(connection, region, &service.shared, &mut service.slice)? {
            return Ok(Step::More);
        }
        let groups = &self.groups;
        let (mut table, mut found) = (Vec::new(), Vec::with_capacity(groups.len() * GROUP_BYTES));
        groups.iter().for_each(|group| group.encode(&mut found));
        let count = groups.iter().map(|group| group.count).sum();
        encode_reduced(&Reduced { count, value: [0; 16] }, &mut table);
        let reply = header.reply(Status::Ok).with_arg(checksum::crc32c(&found).into());
        connection.send_bytes(&mut service.head, reply, &table, found);
        Ok(Step::Done)
    }

    /// Of its reply, and what leads to it.
    fn bytes(&self) -> usize {
        self.groups.len() * GROUP_TAKES + self.keys.len() + self.elements.len()
    }
}
