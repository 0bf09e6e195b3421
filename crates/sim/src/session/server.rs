//! A memory server: the real lease engine, its memory as one number a page, and the lies it may tell.

use std::collections::BTreeSet;

use rampool_lease::{
    ConnectionNumber, Departed, Directory, FrameIndex, LeaseSpace, Limits, SpaceError, StoredPage,
};
use rampool_session::Grant;
use rampool_wire::frame::{AttachLease, LeaseId, LeaseToken, MemberId, Opcode, OpenLease, RegionId, Status};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex, Tick};

use super::plan::Plan;
use crate::rng::mix;

/// Bytes that a lease has when nothing is short.
const ROOM: u64 = 64 << 20;
/// The tables are checked after each so many requests.
const CHECKED: u64 = 64;
/// The part of a frame's number that is what it holds.
const VALUE: u64 = (1 << 40) - 1;
/// Between runs of a server.
pub(super) const LATER_RUN: u64 = 100;
const TOKEN: LeaseToken = LeaseToken([7; 16]);

/// Who speaks over a connection.
pub(super) type Membership = (MemberId, ConnectionNumber);

/// A request as it travels. What the engine need not see is kept as plain numbers.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub number: u64,
    pub opcode: Opcode,
    /// Of this request, however often it is sent: for the judge, not for the server.
    pub uid: u64,
    pub region: RegionId,
    pub extents: Vec<Extent>,
    pub values: Vec<u64>,
    /// The counter of an update or a read.
    pub counter: usize,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    pub status: Option<Status>,
    pub arg: u64,
    pub region: u64,
    pub values: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Server {
    index: usize,
    pub run: u64,
    directory: Directory,
    space: LeaseSpace,
    lease: LeaseId,
    pub member: MemberId,
    pub region: RegionId,
    pub counters: [u64; super::world::COUNTERS * 2],
    /// Updates and regions that were made in this run, by request.
    pub updated: BTreeSet<u64>,
    made: BTreeSet<u64>,
    frames: u64,
    requests: u64,
    /// It drains, until then.
    pub draining: Option<u64>,
    /// The process is gone.
    pub down: bool,
    /// All members of the lease have gone, and it with them.
    is_closed: bool,
}

impl Server {
    pub fn new(plan: &Plan, index: usize, run: u64) -> (Self, Membership) {
        let grace_ms = u64::try_from(plan.grace.as_millis()).expect("short");
        let limits = Limits { memory_bytes: 2 * ROOM, grace_ms, max_leases: 4, max_members: 64 };
        let mut directory = Directory::new(limits);
        let request = OpenLease { bytes: ROOM, pid: 1, name: "sim".into(), host: "sim".into() };
        let (lease, member) = directory.open(None, &request, TOKEN).expect("an empty server has room");
        let mut space = LeaseSpace::new(ROOM);
        space.member_joined(member, ConnectionNumber::FIRST);
        let mut make = || space.create_region(member).expect("a lease has room for a region");
        // Each server has a number of its own for the program's region, and others before it.
        let region = (0..=index).map(|_| make()).last().expect("at least one");
        let counters = [0; super::world::COUNTERS * 2];
        let (updated, made) = (BTreeSet::new(), BTreeSet::new());
        let server = Self {
            index,
            run,
            directory,
            space,
            lease,
            member,
            region,
            counters,
            updated,
            made,
            frames: 0,
            requests: 0,
            draining: None,
            down: false,
            is_closed: false,
        };
        (server, (member, ConnectionNumber::FIRST))
    }

    pub fn grant(&self, plan: &Plan, member: MemberId) -> Grant {
        Grant {
            lease: self.lease,
            member,
            run: self.run,
            max_requests: plan.max_requests,
            max_bytes: plan.max_bytes(self.index),
            grace: plan.grace,
            heartbeat: plan.heartbeat,
        }
    }

    /// The client wants to be the member again that it was; with 0, a new one of the lease in this run.
    pub fn attach(
        &mut self,
        plan: &Plan,
        lease: LeaseId,
        member: MemberId,
        run: u64,
    ) -> Result<(Membership, Grant), Status> {
        if member.0 == 0 && self.run != run {
            // Another run has another token.
            return Err(Status::NoSuchLease);
        }
        let request =
            AttachLease { lease, token: TOKEN, member, pid: 1, name: "sim".into(), host: "sim".into() };
        match self.directory.attach(None, &request) {
            Ok((member, connection, _)) => {
                self.space.member_joined(member, connection);
                Ok(((member, connection), self.grant(plan, member)))
            }
            Err(rampool_lease::AttachError::NoSuchLease) => Err(Status::NoSuchLease),
            Err(rampool_lease::AttachError::MemberGone) => Err(Status::MemberGone),
            Err(_) => Err(Status::LimitReached),
        }
    }

    /// Whether there is a lease to join.
    pub fn has_lease(&self) -> bool {
        !self.is_closed
    }

    pub fn has_member(&self, member: MemberId) -> bool {
        self.directory.has(self.lease, member)
    }

    pub fn disconnected(&mut self, now_ms: u64, (member, connection): Membership) {
        self.space.queue_member_disconnected(member);
        self.directory.disconnected(Tick(now_ms), self.lease, member, connection);
    }

    /// Another member says that this one is gone.
    pub fn dismiss(&mut self, member: MemberId) {
        if let Some(departed) = self.directory.leave(self.lease, member) {
            self.depart(departed);
        }
    }

    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.directory.next_expiry().map(|tick| tick.0)
    }

    pub fn expire(&mut self, now_ms: u64) {
        for departed in self.directory.expire(Tick(now_ms)) {
            self.depart(departed);
        }
    }

    fn depart(&mut self, departed: Departed) {
        self.space.member_gone(departed.member);
        self.space.bury(u64::MAX, &mut Vec::new());
        if departed.lease_closes {
            self.space.close();
            self.space.bury(u64::MAX, &mut Vec::new());
            self.directory.closed(departed.lease);
            self.is_closed = true;
        }
    }

    /// What the page holds, as its owner sees it; none: the member was given up, with its pages.
    pub fn value(&self, member: MemberId, region: RegionId, page: u64) -> Option<u64> {
        let mut pages = Vec::new();
        let extent = [Extent::page(PageIndex(page))];
        self.space.look_up(member, region, &extent, &mut pages).ok()?;
        Some(pages[0].map_or(0, |page| page.frame.0 & VALUE))
    }

    /// Regions that there are.
    pub fn regions(&self) -> usize {
        usize::try_from(self.space.usage().regions).expect("few")
    }

    /// Leaves room for so many more pages.
    pub fn set_room(&mut self, pages: u64) {
        let _ =
            self.space.set_limit((self.space.usage().used_bytes + pages * OS_PAGE_BYTES as u64).min(ROOM));
    }

    /// One request, as the server's runtime carries it out.
    pub fn request(&mut self, (member, connection): Membership, asked: &Asked) -> Answer {
        let mut answer = Answer::default();
        let done =
            self.space.admit(member, connection).and_then(|()| self.carry_out(member, asked, &mut answer));
        answer.status = Some(match done {
            Ok(()) => Status::Ok,
            Err(SpaceError::Full { free }) => {
                answer.arg = free;
                Status::PoolFull
            }
            Err(SpaceError::NoSuchRegion) => Status::NoSuchRegion,
            Err(SpaceError::MemberGone | SpaceError::Replaced) => Status::MemberGone,
            Err(_) => Status::LimitReached,
        });
        self.requests += 1;
        if self.requests.is_multiple_of(CHECKED) {
            self.space.check();
        }
        answer
    }

    fn carry_out(&mut self, member: MemberId, asked: &Asked, answer: &mut Answer) -> Result<(), SpaceError> {
        if asked.opcode == Opcode::Goodbye {
            self.dismiss(member);
            return Ok(());
        }
        let Self { space, .. } = self;
        match asked.opcode {
            Opcode::Get => {
                let mut pages = Vec::new();
                space.look_up(member, asked.region, &asked.extents, &mut pages)?;
                answer
                    .values
                    .extend(pages.into_iter().map(|page| page.map_or(0, |page| page.frame.0 & VALUE)));
            }
            Opcode::Put => {
                let page = |value: &u64| {
                    // What is stored again lies in another frame.
                    self.frames += VALUE + 1;
                    (*value != 0).then(|| stored(self.frames | *value))
                };
                let pages: Vec<_> = asked.values.iter().map(page).collect();
                space.put(member, asked.region, &asked.extents, &pages, &mut Vec::new())?;
            }
            Opcode::Discard => space.discard(member, asked.region, &asked.extents, &mut Vec::new())?,
            Opcode::FetchOp => {
                if let Some(before) = space.answered(member, asked.number) {
                    answer.arg = before;
                    return Ok(());
                }
                answer.arg = self.counters[asked.counter];
                self.counters[asked.counter] += 1;
                space.remember(member, asked.number, answer.arg);
                assert!(self.updated.insert(asked.uid), "update-once: {} took effect twice", asked.uid);
            }
            Opcode::Gather => answer.values.push(self.counters[asked.counter]),
            Opcode::CreateRegion | Opcode::CloneRegion => {
                let made = &mut self.made;
                let region = space.make_once(member, asked.number, |space| {
                    let region = match asked.opcode {
                        Opcode::CloneRegion => space.clone_region(member, asked.region),
                        _ => space.create_region(member),
                    }?;
                    assert!(made.insert(asked.uid), "region-once: request {} made two", asked.uid);
                    Ok(Some(region))
                })?;
                answer.region = region.expect("it is made in one go").0;
            }
            Opcode::AdoptRegion => space.adopt_region(member, asked.region)?,
            Opcode::FreeRegion => {
                space.free_region(member, asked.region)?;
                space.bury(u64::MAX, &mut Vec::new());
            }
            Opcode::Heartbeat => {}
            other => panic!("the program asks for no {other:?}"),
        }
        Ok(())
    }
}

fn stored(value: u64) -> StoredPage {
    let crc = u32::try_from(mix(value) >> 32).expect("32 bits");
    StoredPage { frame: FrameIndex(value), crc, len: 4096, charge: 4096 }
}
