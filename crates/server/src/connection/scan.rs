//! `Scan`: elements of a window, filtered and reduced where they lie.

use super::grouped::Grouping;
use super::{Connection, Handled, Service, Step, Stepped, Work, count_read};
use crate::collect::{PACKED_COUNTS_FOR, PIECES_AT_ONCE, STEPS_AT_ONCE, Unpacked, ZEROES, copy_small_runs};
use crate::refused::Refused;
use rampool_lease::View;
use rampool_wire::checksum;
use rampool_wire::elements::{Scan, Want};
use rampool_wire::frame::{Header, RegionId, ScanRequest, Status, encode_reduced};
use rampool_wire::units::OS_PAGE_BYTES;

/// Bytes that are scanned between two looks at the clock.
const SCANNED_AT_ONCE: u32 = 64 << 10;

/// A `Scan`: goes through a window, and answers when it was all.
struct Scanning {
    request: ScanRequest,
    scan: Scan,
    found: Vec<u8>,
    done: u32,
}

impl Connection {
    pub(super) fn scan(&mut self, service: &mut Service, header: Header) -> Handled {
        let request = ScanRequest::parse(&header, self.link.table())?;
        if let Some(keys) = &request.keys {
            let grouping = Grouping::new(request.clone(), keys);
            return self.begin(service, header, grouping);
        }
        let scan = Scan::new(request.kind, request.test, request.want, request.low, request.high);
        self.begin(service, header, Scanning { request, scan, found: Vec::new(), done: 0 })
    }
}

impl Work for Scanning {
    fn step(&mut self, connection: &mut Connection, service: &mut Service, header: Header) -> Stepped {
        let (shared, membership) = (&service.shared, connection.membership()?);
        let space = membership.space()?;
        let mut view = space.view(membership.member, RegionId(header.region))?;
        view.reaches(self.request.window.program.bounds().1.cast_unsigned())?;
        let (mut together, mut unpacked) = (Vec::new(), Unpacked::new(shared, connection.arena));
        while self.done < self.request.window.len {
            self.feed(&mut view, &mut together, &mut unpacked)?;
            if self.done < self.request.window.len && service.slice.is_over() {
                return Ok(Step::More);
            }
        }
        count_read(shared, connection.arena, &membership.lease, (0, self.found.len() as u64));
        drop((unpacked, space));
        let (mut table, found) = (Vec::with_capacity(24), std::mem::take(&mut self.found));
        encode_reduced(&self.scan.reduced(), &mut table);
        let is_sent = matches!(self.request.want, Want::Positions | Want::Values);
        let crc = if is_sent { checksum::crc32c(&found) } else { 0 };
        let reply = header.reply(Status::Ok).with_arg(crc.into());
        connection.send_bytes(&mut service.head, reply, &table, found);
        Ok(Step::Done)
    }

    fn bytes(&self) -> usize {
        self.found.len()
    }
}

impl Scanning {
    /// Scans the next elements, about as many as between two looks at the clock.
    fn feed(
        &mut self,
        view: &mut View<'_>,
        together: &mut Vec<u8>,
        unpacked: &mut Unpacked<'_>,
    ) -> Result<(), Refused> {
        let Self { request, scan, found, done } = self;
        let (shared, window) = (unpacked.shared, &request.window);
        let unit = u32::try_from(request.kind.bytes()).expect("at most 8");
        let len = window.bytes_in(*done, STEPS_AT_ONCE, unit).min(SCANNED_AT_ONCE);
        together.clear();
        // Small runs lie anywhere, and copying them in a row takes far less time than one by one.
        if copy_small_runs(shared, view, window, (*done, len), together) {
            scan.feed(together, found);
            *done += len;
            return Ok(());
        }
        let mut looks = 0;
        for piece in window.pieces_of(*done, len) {
            looks += 1;
            *done += u32::try_from(piece.len).expect("at most a page");
            let Some(page) = view.page(piece.page) else {
                scan.feed(&ZEROES[..piece.len], found);
                continue;
            };
            let memory = if usize::from(page.len) == OS_PAGE_BYTES {
                shared.store.memory(page.frame).cast_const()
            } else {
                looks += PACKED_COUNTS_FOR;
                unpacked.page(piece.page, &page, || {})?
            };
            // SAFETY: the piece is within the page, which is not written while the lease is locked, or within
            // the unpacked one, which is kept.
            let bytes = unsafe { std::slice::from_raw_parts(memory.add(piece.within), piece.len) };
            scan.feed(bytes, found);
            if looks >= PIECES_AT_ONCE {
                break;
            }
        }
        Ok(())
    }
}
