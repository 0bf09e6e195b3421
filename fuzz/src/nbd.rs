//! A client of a block device that sends anything.

use rampool_nbd::{
    Export, Exports, Failure, Input, LARGEST_UNIT_BYTES, Output, Run, SLICE_BYTES, Session, StatusExtent,
    ZERO_SLICE_BYTES,
};
use std::sync::Arc;

const DISK_BYTES: u64 = 1 << 20;

/// A session that receives these bytes, cut as the first of them says, about a disk that fails, or has holes,
/// as they say: work stays within the disk, and what is sent and kept stays within the bounds.
pub fn nbd(data: &[u8]) {
    let Some((how, bytes)) = data.split_first() else { return };
    let exports =
        Exports::new(vec![Export { name: "disk".to_owned(), bytes: DISK_BYTES }]).expect("one export");
    let mut session = Session::new(Arc::new(exports));
    let mut at = 0;
    let mut end = 0;
    let mut asked = 0u32;
    let mut over = false;
    let cut = 1 + usize::from(*how);
    loop {
        let (mut work, mut sent, mut read) = (None, 0, 0);
        session.check();
        while let Some(output) = session.poll() {
            assert!(work.is_none() && !over, "work and the end come last");
            match output {
                Output::Send(bytes) => sent += bytes.len(),
                Output::SendData { len } | Output::SkipData { len } => read += len,
                Output::Opened { export } => assert_eq!(export, 0),
                Output::Close(_) => over = true,
                Output::Read { offset, len } => {
                    work = Some((Output::Read { offset, len }, offset, len, SLICE_BYTES))
                }
                Output::Write { offset, len } => {
                    work = Some((Output::Write { offset, len }, offset, len, SLICE_BYTES))
                }
                Output::Zero { offset, len, hint } => {
                    work = Some((Output::Zero { offset, len, hint }, offset, len, ZERO_SLICE_BYTES))
                }
                Output::Status { offset, len, most } => {
                    work = Some((Output::Status { offset, len, most }, offset, len, u32::MAX))
                }
            }
        }
        assert!(sent <= 256 << 10 && read <= SLICE_BYTES);
        if let Some((work, offset, len, most)) = work {
            assert!(len > 0 && len <= most && offset + u64::from(len) <= DISK_BYTES);
            asked += 1;
            let hole = asked.is_multiple_of(2);
            let runs = [Run { len: len / 2, hole }, Run { len: len - len / 2, hole: !hole }];
            let extents = [StatusExtent { len, hole }];
            session.handle(match work {
                _ if asked.is_multiple_of(16) && how.is_multiple_of(3) => {
                    Input::Failed(Failure("so the test wants it"))
                }
                Output::Read { .. } if len > 1 => Input::Found(&runs),
                Output::Read { .. } => Input::Found(&runs[1..]),
                Output::Status { .. } => Input::Extents(&extents),
                _ => Input::Done,
            });
            continue;
        }
        if over && at == bytes.len() {
            return;
        }
        let taken = session.handle(Input::Bytes(&bytes[at..end]));
        assert!(taken <= end - at && (taken > 0 || end - at < LARGEST_UNIT_BYTES));
        at += taken;
        if taken == 0 {
            if end == bytes.len() {
                return;
            }
            end = (end + cut).min(bytes.len());
        }
    }
}
