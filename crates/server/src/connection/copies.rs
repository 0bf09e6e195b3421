//! `Copy`: orders for the lease's copy worker, and their ends.

use super::{Connection, End, Membership, ScratchBuffers};
use crate::copy_worker::{Delivered, Order};
use crate::shared::Shared;
use rampool_wire::frame::{CopyRequest, Header};
use std::sync::Arc;

impl Connection {
    /// Orders a copy to another server; the answer comes when it has arrived there.
    pub(super) fn copy(
        &mut self,
        shared: &Shared,
        buffers: &mut ScratchBuffers,
        header: Header,
    ) -> Result<(), End> {
        let copy = match CopyRequest::parse(self.link.table()) {
            Ok(copy) => copy,
            Err(error) => return Err(self.protocol_error(shared, buffers, header, error.into())),
        };
        match self.membership() {
            Ok(Membership { lease, member, connection }) => {
                let (lease, member, connection) = (Arc::clone(lease), *member, *connection);
                shared.order(Order {
                    shard: self.arena,
                    token: self.token,
                    header,
                    lease,
                    member,
                    connection,
                    identity: self.identity,
                    copy,
                });
                self.copies += 1;
            }
            Err(refused) => self.refuse(buffers, header, &refused, shared),
        }
        Ok(())
    }

    /// A copy has ended.
    pub(crate) fn delivered(&mut self, shared: &Shared, buffers: &mut ScratchBuffers, done: Delivered) {
        self.copies -= 1;
        self.answer(shared, buffers, done.header, done.result);
    }
}
