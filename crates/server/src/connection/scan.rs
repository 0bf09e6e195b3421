//! `Scan`: elements of a window, filtered and reduced where they lie.

use super::gather::{PACKED_COUNTS_FOR, PIECES_AT_ONCE, STEPS_AT_ONCE, Unpacked, ZEROES, copy_small_runs};
use super::grouped::Grouping;
use super::held::Held;
use super::{Connection, End, Paused, ScratchBuffers, count_alone};
use crate::shared::Shared;
use rampool_net::transport::{Piece as Place, Urgency};
use rampool_wire::checksum;
use rampool_wire::elements::{Scan, Want};
use rampool_wire::frame::{Header, RegionId, ScanRequest, Status, encode_frame, encode_reduced};
use rampool_wire::units::OS_PAGE_BYTES;

/// Bytes that are scanned between two looks at the clock.
const SCANNED_AT_ONCE: u32 = 64 << 10;

/// A `Scan` that goes on with the next turn.
pub(super) struct Scanning {
    header: Header,
    request: ScanRequest,
    scan: Scan,
    found: Vec<u8>,
    done: u32,
}

impl Scanning {
    /// Of its reply, so far.
    pub(super) fn bytes(&self) -> usize {
        self.found.len()
    }
}

impl Connection {
    pub(super) fn scan(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let request = match ScanRequest::parse(&header, self.link.table()) {
            Ok(request) => request,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        if let Some(keys) = &request.keys {
            let grouping = Grouping::new(header, request.clone(), keys);
            self.go_on_grouping(shared, buffers, grouping);
            return Ok(());
        }
        let scan = Scan::new(request.kind, request.test, request.want, request.low, request.high);
        let scanning = Scanning { header, request, scan, found: Vec::new(), done: 0 };
        self.go_on_scanning(shared, buffers, scanning);
        Ok(())
    }

    /// Scans a window from where it stopped, and answers when it was all.
    pub(super) fn go_on_scanning(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        mut scanning: Scanning,
    ) {
        let Scanning { header, request, scan, found, done } = &mut scanning;
        let (header, window) = (*header, &request.window);
        let unit = u32::try_from(request.kind.bytes()).expect("at most 8");
        let result = self.membership().and_then(|membership| {
            let space = membership.space()?;
            let mut view = space.view(membership.member, RegionId(header.region))?;
            view.reaches(window.program.bounds().1.cast_unsigned())?;
            let mut together = Vec::new();
            let mut unpacked = Unpacked::new(shared, self.arena);
            while *done < window.len {
                let len = window.bytes_in(*done, STEPS_AT_ONCE, unit).min(SCANNED_AT_ONCE);
                together.clear();
                // Small runs lie anywhere, and copying them in a row takes far less time than one by one.
                if copy_small_runs(shared, &mut view, window, (*done, len), &mut together) {
                    scan.feed(&together, found);
                    *done += len;
                } else {
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
                        // SAFETY: the piece is within the page, which is not written while the lease is locked,
                        // or within the unpacked one, which is kept.
                        let bytes =
                            unsafe { std::slice::from_raw_parts(memory.add(piece.within), piece.len) };
                        scan.feed(bytes, found);
                        if looks >= PIECES_AT_ONCE {
                            break;
                        }
                    }
                }
                if *done < window.len && buffers.slice.is_over() {
                    return Ok(false);
                }
            }
            for counts in [&shared.shards[self.arena].counts, &membership.lease.counts] {
                count_alone(&counts.gets, 1);
                count_alone(&counts.bytes_out, found.len() as u64);
            }
            Ok(true)
        });
        match result {
            Ok(false) => self.paused = Some(Paused::Scan(Box::new(scanning))),
            Ok(true) => {
                let Scanning { request, scan, found, .. } = scanning;
                buffers.head.clear();
                let mut table = Vec::with_capacity(24);
                encode_reduced(&scan.reduced(), &mut table);
                let crc = if matches!(request.want, Want::Positions | Want::Values) {
                    checksum::crc32c(&found)
                } else {
                    0
                };
                encode_frame(
                    &mut buffers.head,
                    header.reply(Status::Ok).with_arg(crc.into()),
                    &table,
                    found.len(),
                );
                let piece = [Place { ptr: found.as_ptr(), len: found.len() }];
                // SAFETY: the guard owns the bytes, whose address does not change with the move of the
                // vector.
                unsafe { self.link.send(Urgency::Demand, &buffers.head, &piece, Held::bytes(found)) };
            }
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
    }
}
