//! Memory that a client on this machine publishes: it hands over a memory file, which this server maps, and
//! every member of the lease may use it ([`crate::published`]).

use super::{Connection, End, Fail, Handled, Service, no_lease, tell};
use crate::published::Owner;
use crate::refused::Refused;
use rampool_kernel::sealed::SealedMemory;
use rampool_wire::frame::{Header, Publish, Reach, Status};
use std::os::fd::{AsFd, OwnedFd};

impl Connection {
    /// Maps what was handed over, and lists it.
    pub(super) fn publish(&mut self, service: &mut Service, header: Header) -> Handled {
        let mut handed = self.link.take_handed();
        let memory = handed.pop();
        let surplus = !handed.is_empty();
        handed.into_iter().for_each(|fd| service.shared.close_elsewhere(fd));
        let published = if surplus {
            Err(End::Protocol("more descriptors than one came with a request".to_owned()).into())
        } else {
            self.list(header.arg, memory.as_ref())
        };
        if let Err(fail) = published {
            memory.into_iter().for_each(|fd| service.shared.close_elsewhere(fd));
            return Err(fail);
        }
        // It is memory, which is closed at once.
        self.done(header, 0)
    }

    fn list(&self, place: u64, memory: Option<&OwnedFd>) -> Result<(), Fail> {
        let what = Publish::parse(self.link.table())?;
        let membership = self.membership()?;
        // A connection that its member has replaced publishes nothing.
        drop(membership.space()?);
        if !self.link.takes_memory() {
            let said = "memory is published over connections through shared memory only";
            return Err(Refused::new(Status::NotAllowed, said).into());
        }
        let memory = memory.ok_or_else(|| Refused::new(Status::BadRequest, "no memory came with it"))?;
        let owner = Owner { member: membership.member, place, connection: membership.connection };
        let adopt = |bytes| SealedMemory::adopt(memory.as_fd(), bytes);
        Ok(membership.lease.published().publish(what, owner, adopt)?)
    }

    /// No use is under way afterwards.
    pub(super) fn withdraw(&mut self, _: &mut Service, header: Header) -> Handled {
        let membership = self.membership()?;
        membership.lease.published().withdraw(membership.member, header.arg);
        self.done(header, 0)
    }

    /// Uses what a member has published.
    pub(super) fn reach(&mut self, service: &mut Service, header: Header) -> Handled {
        let reach = Reach::parse(header.arg, self.link.table())?;
        let membership = self.membership.as_ref().ok_or_else(no_lease)?;
        service.table.clear();
        let arg = membership.lease.published().reach(reach, &mut service.table)?;
        tell(&mut self.link, &mut service.head, header.reply(Status::Ok).with_arg(arg), &service.table);
        Ok(())
    }
}
