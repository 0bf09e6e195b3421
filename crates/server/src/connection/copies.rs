//! `Copy`: orders for the lease's copy worker, and their ends.

use super::{Connection, Handled, Membership, Service};
use crate::lease::{Delivered, Order};
use rampool_wire::frame::{CopyRequest, Header};

impl Connection {
    /// Orders a copy to another server; the answer comes when it has arrived there.
    pub(super) fn copy(&mut self, service: &mut Service, header: Header) -> Handled {
        let copy = CopyRequest::parse(self.link.table())?;
        let Membership { lease, member, connection } = self.membership()?.clone();
        service.shared.order(Order {
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
        Ok(())
    }

    /// A copy has ended.
    pub(crate) fn delivered(&mut self, service: &mut Service, done: Delivered) {
        self.copies -= 1;
        match done.result {
            Ok(arg) => self.answer(done.header, arg),
            Err(refused) => self.refuse(service, done.header, &refused),
        }
    }
}
