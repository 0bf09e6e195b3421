//! A server's tenants, some of which mean no good: the directory, the leases, and the shares of one thread's
//! time ([`rampool_lease`]), under requests in the worst order.
//!
//! ```text
//!   victim     one connection; asks for a page now and then
//!   one, many  always have as much to do as they may: one connection, and several of unlike requests
//!   erratic    idle for long, then a flood; loses its connections, comes again, tries others' tickets
//!   crashing   takes a lease and goes away without a goodbye, again and again
//!   late       comes when the others are there, and wants one lease
//! ```
//!
//! Time is what requests cost. A request that takes longer than a slice goes on with the next turn, as in the
//! server. What is judged:
//!
//! * the victim waits for a turn that goes on, its own, and little more;
//! * `one` and `many` have the same time, whatever is done for them outside of turns; so have the connections
//!   of `many`;
//! * a page is what was stored in it last, a clone what its region was when it began;
//! * the victim's lease can be filled at any time;
//! * no tenant has more than its quota, or another's lease, and the late one has a place at any time;
//! * when all have gone, nothing is left: no account, no lease, no frame.

use crate::rng::Rng;
use rampool_lease::{
    Charges, ConnectionNumber, Departed, Directory, FrameIndex, LeaseSpace, Limits, OpenError, PageState,
    Payer, Quota, Rules, Shares, SpaceError, StoredPage, TenantRule, Tick,
};
use rampool_wire::frame::{AttachLease, LeaseId, LeaseToken, MemberId, OpenLease, RegionId};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const PAGE: u64 = OS_PAGE_BYTES as u64;
const MEMORY: u64 = 6 * QUOTA;
const QUOTA: u64 = 12 << 20;
const LEASES: usize = 32;
/// Of `erratic`.
const CONNECTIONS: u64 = 5;
const TURNS: u64 = 4000;
/// A turn ends after so long, and no step of a request takes longer than the other.
const SLICE_NS: u64 = 100_000;
const STEP_NS: u64 = 20_000;
/// The longest that is done outside of turns at a time.
const OUTSIDE_NS: u64 = 40_000;
/// A turn that goes on when it comes, the victim's own, and what is done between turns.
const LONGEST_WAIT_NS: u64 = 2 * (SLICE_NS + STEP_NS) + 2 * OUTSIDE_NS;
/// Pages lie so far apart that each is in a part of the page table of its own.
const SPREAD: u64 = 600;
const PAGES: u64 = 24;

const VICTIM: usize = 0;
const ONE: usize = 1;
const MANY: usize = 2;
const ERRATIC: usize = 3;
const CRASHING: usize = 4;
const LATE: usize = 5;
const NAMES: [&str; 6] = ["victim", "one", "many", "erratic", "crashing", "late"];
/// Whose connections they are.
const CLIENTS: [usize; 9] = [VICTIM, ONE, MANY, MANY, MANY, MANY, ERRATIC, ERRATIC, ERRATIC];

/// What went on in a run, so that a test can tell that it was worth it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    pub answered: u64,
    pub refused: u64,
    pub slices: u64,
    pub clones: u64,
    pub changed_while_cloned: u64,
    pub stolen: u64,
    pub lost: u64,
    pub crashed: u64,
    pub kept_out: u64,
    pub victim: u64,
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    Get(u64),
    Put(u64),
    /// Changes a page where it is, if it is its region's own.
    Patch(u64),
    Discard(u64, u32),
    Create,
    Open,
    Clone,
    Free,
    /// Work that is divided, such as a gather or a scan, of so many steps.
    Long(u64),
    Resize(u64),
    Leave,
}

/// What goes on with the next turn.
#[derive(Clone, Debug)]
enum Paused {
    Clone(RegionId),
    Discard(RegionId, Vec<Extent>),
    Bury,
    Long(u64),
}

struct Seat {
    lease: LeaseId,
    member: MemberId,
    connection: ConnectionNumber,
    region: RegionId,
    /// The lease's own, of all its members.
    common: RegionId,
}

struct Client {
    tenant: usize,
    seat: Option<Seat>,
    asks: VecDeque<Ask>,
    paused: Option<Paused>,
    asked_at: Option<u64>,
    served_ns: u64,
}

type Pages = BTreeMap<u64, (FrameIndex, u32)>;

struct Lease {
    tenant: usize,
    token: LeaseToken,
    space: LeaseSpace,
    charged: Charges,
    golden: BTreeMap<RegionId, Pages>,
    clones: BTreeMap<MemberId, (RegionId, Pages)>,
}

struct World {
    rng: Rng,
    now: u64,
    directory: Directory,
    shares: Shares<Payer>,
    leases: BTreeMap<LeaseId, Lease>,
    clients: Vec<Client>,
    departed: Vec<Departed>,
    frames: BTreeSet<FrameIndex>,
    next: u64,
    victim_at: u64,
    flood_until: u64,
    /// The first flood comes after this: who has been idle for so long could have saved much.
    quiet_until: u64,
    outside_ns: [u64; 4],
    omit: Option<TenantRule>,
    tally: Tally,
}

#[cfg(feature = "mutants")]
fn leave_out(rule: TenantRule, shares: &mut Shares<Payer>, directory: &mut Directory) {
    shares.omit(rule);
    directory.omit(rule);
}

#[cfg(not(feature = "mutants"))]
fn leave_out(_: TenantRule, _: &mut Shares<Payer>, _: &mut Directory) {
    panic!("rules are left out in builds for tests only");
}

#[cfg(feature = "mutants")]
fn leave_out_of_space(rule: TenantRule, space: &mut LeaseSpace) {
    space.omit(rule);
}

#[cfg(not(feature = "mutants"))]
fn leave_out_of_space(_: TenantRule, _: &mut LeaseSpace) {
    panic!("rules are left out in builds for tests only");
}

fn payer(tenant: usize) -> Payer {
    Some(NAMES[tenant].parse().expect("a name"))
}

fn at(place: u64) -> PageIndex {
    PageIndex(place * SPREAD)
}

/// Runs a world that follows from the seed; with `omit`, without that rule.
///
/// # Panics
/// If something is wrong: that is what it looks for.
#[must_use]
pub fn run(seed: u64, omit: Option<TenantRule>) -> Tally {
    let limits = Limits { memory_bytes: MEMORY, grace_ms: 3, max_leases: LEASES, max_members: 32 };
    let (mut directory, mut shares) = (Directory::new(limits), Shares::default());
    if let Some(rule) = omit {
        leave_out(rule, &mut shares, &mut directory);
    }
    let quota = Quota { memory_bytes: Some(QUOTA), regions: Some(40), ..Quota::default() };
    let erratic = Quota { connections: Some(CONNECTIONS), ..quota.clone() };
    let quotas = BTreeMap::from([(payer(ERRATIC).expect("a name"), erratic)]);
    directory.accounts_mut().set_rules(Rules { default: quota, quotas, ..Rules::default() });
    let mut world = World {
        rng: Rng::new(seed),
        now: 1,
        directory,
        shares,
        leases: BTreeMap::new(),
        clients: Vec::new(),
        departed: Vec::new(),
        frames: BTreeSet::new(),
        next: 0,
        victim_at: 0,
        flood_until: 0,
        quiet_until: 0,
        outside_ns: [0; 4],
        omit,
        tally: Tally::default(),
    };
    world.quiet_until = world.rng.below(100_000_000);
    for (index, tenant) in CLIENTS.into_iter().enumerate() {
        let asks = VecDeque::new();
        world.clients.push(Client { tenant, seat: None, asks, paused: None, asked_at: None, served_ns: 0 });
        world.shares.join(index, payer(tenant));
        world.directory.accounts_mut().connect(payer(tenant));
        let joins = tenant == MANY && index > MANY;
        let bytes = if tenant == ERRATIC { 1 << 20 } else { QUOTA / 2 };
        assert!(if joins { world.join(index) } else { world.open(index, bytes) }, "the first leases fit");
    }
    for _ in 0..TURNS {
        world.arrive();
        let time = world.turn();
        world.between(time);
        world.check();
    }
    world.fair();
    world.end();
    world.tally
}

impl World {
    fn frame(&mut self) -> StoredPage {
        self.next += 1;
        let frame = FrameIndex(self.next);
        self.frames.insert(frame);
        StoredPage { frame, crc: 1, len: 4096, charge: 4096 }
    }

    fn free(&mut self, released: &[FrameIndex]) {
        for frame in released {
            assert!(self.frames.remove(frame), "{frame:?} is released twice");
        }
    }

    /// Changes a client's lease, as the server does: its tenant is charged for what there is afterwards.
    fn on<R>(&mut self, id: LeaseId, change: impl FnOnce(&mut Lease) -> R) -> R {
        let lease = self.leases.get_mut(&id).expect("it has not closed");
        let result = change(lease);
        let (charged, now) = (lease.charged, lease.space.charges());
        lease.charged = now;
        self.directory.accounts_mut().settle(payer(lease.tenant), charged, now);
        result
    }

    /// Makes a region, if the quota allows it.
    fn make<R>(&mut self, id: LeaseId, make: impl FnOnce(&mut Lease) -> R) -> R {
        let lease = self.leases.get_mut(&id).expect("it has not closed");
        let charged = self.directory.accounts_mut().charge(payer(lease.tenant), 1, 0);
        if charged.is_ok() {
            lease.charged.regions += 1;
        }
        lease.space.set_over_quota(charged.err());
        self.on(id, make)
    }

    fn open(&mut self, client: usize, bytes: u64) -> bool {
        let Ok((id, member)) = self.grant(self.clients[client].tenant, bytes) else { return false };
        self.sit(client, id, member, ConnectionNumber::FIRST)
    }

    fn grant(&mut self, tenant: usize, bytes: u64) -> Result<(LeaseId, MemberId), OpenError> {
        let request = OpenLease { bytes, pid: 1, name: String::new(), host: String::new() };
        let token = LeaseToken(self.rng.next_u64().to_le_bytes().repeat(2).try_into().expect("16 bytes"));
        let (id, member) = self.directory.open(payer(tenant), &request, token)?;
        let mut space = LeaseSpace::new(bytes);
        if let Some(rule) = self.omit {
            leave_out_of_space(rule, &mut space);
        }
        let (golden, clones) = (BTreeMap::new(), BTreeMap::new());
        self.leases.insert(id, Lease { tenant, token, space, charged: Charges::default(), golden, clones });
        Ok((id, member))
    }

    /// Takes a lease, and is gone.
    fn crash(&mut self) {
        match self.grant(CRASHING, PAGE) {
            Ok((id, member)) => {
                let now = Tick(self.now / 1_000_000);
                self.directory.disconnected(now, id, member, ConnectionNumber::FIRST);
                self.tally.crashed += 1;
            }
            Err(_) => self.tally.kept_out += 1,
        }
    }

    /// One more tenant has its lease at once, and leaves.
    fn come_late(&mut self) {
        let (id, member) = self.grant(LATE, PAGE).expect("others leave a place");
        let departed = self.directory.leave(id, member).expect("it has just come");
        self.settle(departed);
    }

    /// Becomes one more member of the lease that its tenant has.
    fn join(&mut self, client: usize) -> bool {
        let tenant = self.clients[client].tenant;
        let (id, token) =
            self.leases.iter().find(|(_, l)| l.tenant == tenant).map(|(id, l)| (*id, l.token)).expect("one");
        let (name, host) = (String::new(), String::new());
        let request = AttachLease { lease: id, token, member: MemberId(0), pid: 1, name, host };
        let (member, connection, _) = self.directory.attach(payer(tenant), &request).expect("its own lease");
        self.sit(client, id, member, connection)
    }

    fn sit(&mut self, client: usize, id: LeaseId, member: MemberId, connection: ConnectionNumber) -> bool {
        let made = self.make(id, |lease| {
            lease.space.member_joined(member, connection);
            lease.clones.remove(&member);
            let region = lease.space.create_region(member)?;
            let selector = rampool_lease::RegionSelector::Name("common");
            let common = lease.space.open_region(member, selector, 1 << 40);
            lease.golden.insert(region, Pages::new());
            if let Ok((common, _)) = common {
                lease.golden.entry(common).or_default();
            }
            Ok::<_, SpaceError>((region, common.map_or(region, |(common, _)| common)))
        });
        match made {
            Ok((region, common)) => {
                self.clients[client].seat = Some(Seat { lease: id, member, connection, region, common });
                true
            }
            Err(_) => {
                self.departed.extend(self.directory.leave(id, member));
                false
            }
        }
    }

    /// Those that always have something to do have it, and the others now and then.
    fn arrive(&mut self) {
        if self.clients[VICTIM].asked_at.is_none() && self.now >= self.victim_at {
            let page = self.rng.below(PAGES);
            let ask = if self.rng.one_in(2) { Ask::Get(page) } else { Ask::Put(page) };
            self.clients[VICTIM].asks.push_back(ask);
            self.clients[VICTIM].asked_at = Some(self.now);
            self.shares.wake(VICTIM);
        }
        if self.now > self.flood_until.max(self.quiet_until) && self.rng.one_in(200) {
            self.flood_until = self.now + self.rng.between(1, 40) * SLICE_NS;
        }
        for index in 1..CLIENTS.len() {
            let tenant = self.clients[index].tenant;
            if tenant == ERRATIC && self.now >= self.flood_until {
                continue;
            }
            while self.clients[index].asks.len() < 3 {
                let ask = self.ask(index);
                self.clients[index].asks.push_back(ask);
            }
            self.shares.wake(index);
        }
    }

    fn ask(&mut self, index: usize) -> Ask {
        let tenant = self.clients[index].tenant;
        let page = self.rng.below(PAGES);
        match self.rng.below(16) {
            0..3 => Ask::Put(page),
            3 => Ask::Get(page),
            4 => Ask::Patch(page),
            5 => Ask::Discard(page, [1, 600, 4000][self.rng.index(3)]),
            6 if tenant == ERRATIC => Ask::Open,
            7 if tenant == ERRATIC => Ask::Leave,
            7 => Ask::Create,
            8 => Ask::Resize(self.rng.between(1, 1 << 21)),
            9 => Ask::Free,
            10..13 => Ask::Clone,
            // Those of `many` are of unlike length.
            _ if tenant == MANY => Ask::Long(1 + 12 * index as u64),
            _ => Ask::Long(self.rng.between(1, 30)),
        }
    }

    /// Returns how long it took.
    fn turn(&mut self) -> u64 {
        let Some(index) = self.shares.pick() else {
            self.now += SLICE_NS / 4;
            return SLICE_NS / 4;
        };
        let mut time = 0;
        while time < SLICE_NS
            && (self.clients[index].paused.is_some() || !self.clients[index].asks.is_empty())
        {
            let step = match self.clients[index].paused.take() {
                Some(paused) => self.go_on(index, paused),
                None => {
                    let ask = self.clients[index].asks.pop_front().expect("there is one");
                    self.begin(index, ask)
                }
            };
            assert!((1..=STEP_NS).contains(&step), "a step of {step} ns");
            time += step;
        }
        let time = time.max(500);
        self.now += time;
        self.clients[index].served_ns += time;
        if let Some(asked) = self.clients[VICTIM].asked_at.filter(|_| index == VICTIM) {
            let waited = self.now - asked;
            assert!(waited <= LONGEST_WAIT_NS, "the victim waits for {waited} ns");
            self.clients[VICTIM].asked_at = None;
            self.victim_at = self.now + self.rng.between(100, 900) * 1000;
            self.tally.victim += 1;
        }
        if self.clients[index].paused.is_some() {
            self.tally.slices += 1;
        }
        if self.clients[index].paused.is_some() || !self.clients[index].asks.is_empty() {
            self.shares.wake(index);
        }
        self.shares.served(time, 0, 1);
        time
    }

    /// What other threads do in this time: settle departures, lose connections, bring answers.
    fn between(&mut self, time: u64) {
        if self.rng.below(3 * SLICE_NS) < time {
            let index = 1 + self.rng.index(2);
            // More for `many`: it must not have more time by that.
            let time = if index == MANY { self.rng.between(1, OUTSIDE_NS) } else { 1000 };
            self.now += time;
            self.outside_ns[index] += time;
            self.shares.charge(index, time, 0, 1);
        }
        if self.rng.one_in(20) {
            self.lose(6 + self.rng.clone().index(3));
        }
        if self.rng.one_in(2) {
            self.crash();
        }
        let expired = self.directory.expire(Tick(self.now / 1_000_000));
        self.departed.extend(expired);
        if !self.departed.is_empty() && self.rng.one_in(2) {
            let departed = self.departed.remove(self.rng.clone().index(self.departed.len()));
            self.settle(departed);
        }
    }

    /// A connection breaks. Its client comes again, perhaps with another's ticket, or with a new lease.
    fn lose(&mut self, index: usize) {
        self.tally.lost += 1;
        self.shares.leave(index);
        self.shares.join(index, payer(ERRATIC));
        let client = &mut self.clients[index];
        client.paused = None;
        client.asks.clear();
        let Some(seat) = client.seat.take() else {
            let bytes = self.rng.between(1 << 16, 1 << 20);
            self.open(index, bytes);
            return;
        };
        let now = Tick(self.now / 1_000_000);
        self.directory.disconnected(now, seat.lease, seat.member, seat.connection);
        let others: Vec<LeaseId> =
            self.leases.iter().filter(|(_, lease)| lease.tenant != ERRATIC).map(|(id, _)| *id).collect();
        let stolen = others[self.rng.index(others.len())];
        for (lease, member, may) in [(stolen, MemberId(0), false), (seat.lease, seat.member, true)] {
            let token = self.leases[&lease].token;
            let (name, host) = (String::new(), String::new());
            let request = AttachLease { lease, token, member, pid: 1, name, host };
            if may && self.rng.one_in(3) {
                return;
            }
            match self.directory.attach(payer(ERRATIC), &request) {
                Ok((member, connection, _)) => {
                    assert!(may, "another tenant's ticket is of use");
                    // Its regions are there: it has one more.
                    self.sit(index, lease, member, connection);
                }
                Err(_) => self.tally.stolen += u64::from(!may),
            }
        }
    }

    fn settle(&mut self, departed: Departed) {
        let Some(lease) = self.leases.get_mut(&departed.lease) else { return };
        lease.space.member_gone(departed.member);
        if departed.lease_closes {
            lease.space.close();
        }
        let mut released = Vec::new();
        while lease.space.bury(1, &mut released) {}
        self.on(departed.lease, |_| ());
        self.free(&released);
        if departed.lease_closes {
            self.leases.remove(&departed.lease);
            self.directory.closed(departed.lease);
        } else {
            let lease = self.leases.get_mut(&departed.lease).expect("seen above");
            let member = departed.member;
            let is_there = |space: &LeaseSpace, region| {
                !matches!(space.view(member, region), Err(SpaceError::NoSuchRegion))
            };
            lease.golden.retain(|region, _| is_there(&lease.space, *region));
            lease.clones.retain(|of, (region, _)| *of != member && lease.golden.contains_key(region));
        }
    }

    fn begin(&mut self, index: usize, ask: Ask) -> u64 {
        self.tally.answered += 1;
        let Some(seat) = &self.clients[index].seat else {
            // It asks until it has one.
            let bytes = self.rng.between(1 << 16, 1 << 20);
            self.open(index, bytes);
            return STEP_NS;
        };
        let (id, member, connection) = (seat.lease, seat.member, seat.connection);
        let own = if self.rng.one_in(2) { seat.common } else { seat.region };
        if self.leases.get(&id).is_none_or(|lease| lease.space.admit(member, connection).is_err()) {
            self.clients[index].seat = None;
            return 1000;
        }
        let mut released = Vec::new();
        match ask {
            Ask::Get(page) => {
                let mut found = Vec::new();
                let lease = &self.leases[&id];
                if lease.space.look_up(member, own, &[Extent::page(at(page))], &mut found).is_ok() {
                    let golden = lease.golden[&own].get(&at(page).0).copied();
                    assert_eq!(found[0].map(|page| (page.frame, page.crc)), golden, "what was stored last");
                }
                2000
            }
            Ask::Put(page) => {
                let stored = self.frame();
                let lease = self.leases.get_mut(&id).expect("seen above");
                let extent = [Extent::page(at(page))];
                match lease.space.put(member, own, &extent, &[Some(stored)], &mut released) {
                    Ok(()) => {
                        lease
                            .golden
                            .get_mut(&own)
                            .expect("it is there")
                            .insert(at(page).0, (stored.frame, 1));
                        let cloned = lease.clones.values().any(|(of, _)| *of == own);
                        self.tally.changed_while_cloned += u64::from(cloned);
                    }
                    Err(_) => {
                        assert!(index != VICTIM, "what was promised to the victim is there");
                        released.push(stored.frame);
                        self.tally.refused += 1;
                    }
                }
                self.free(&released);
                3000
            }
            Ask::Patch(page) => {
                let lease = self.leases.get_mut(&id).expect("seen above");
                if let Ok(PageState::Own(found)) = lease.space.page_state(member, own, at(page)) {
                    let crc = found.crc + 1;
                    lease.space.page_changed(member, own, at(page), crc).expect("seen above");
                    lease.golden.get_mut(&own).expect("it is there").insert(at(page).0, (found.frame, crc));
                }
                2000
            }
            Ask::Discard(page, count) => {
                self.go_on(index, Paused::Discard(own, vec![Extent::new(at(page), count)]))
            }
            Ask::Create => {
                let made = self.make(id, |lease| {
                    let made = lease.space.create_region(member)?;
                    lease.golden.insert(made, Pages::new());
                    Ok::<_, SpaceError>(made)
                });
                match made {
                    Ok(made) => self.clients[index].seat.as_mut().expect("seen above").region = made,
                    Err(_) => self.tally.refused += 1,
                }
                // Another member may have freed the common one.
                let common = self.make(id, |lease| {
                    let selector = rampool_lease::RegionSelector::Name("common");
                    let (common, _) = lease.space.open_region(member, selector, 1 << 40)?;
                    lease.golden.entry(common).or_default();
                    Ok::<_, SpaceError>(common)
                });
                if let Ok(common) = common {
                    self.clients[index].seat.as_mut().expect("seen above").common = common;
                }
                2000
            }
            Ask::Clone => self.go_on(index, Paused::Clone(own)),
            Ask::Free => {
                let seat = self.clients[index].seat.as_mut().expect("seen above");
                let common = seat.common;
                let all = index > ONE && self.rng.one_in(6);
                let freed = if all { common } else { std::mem::replace(&mut seat.region, common) };
                if (freed != common || all)
                    && self.on(id, |lease| lease.space.free_region(member, freed)).is_ok()
                {
                    let lease = self.leases.get_mut(&id).expect("seen above");
                    lease.golden.remove(&freed);
                    lease.clones.retain(|_, (of, _)| *of != freed);
                    return self.go_on(index, Paused::Bury);
                }
                2000
            }
            Ask::Long(steps) => self.go_on(index, Paused::Long(steps)),
            Ask::Resize(bytes) => {
                if index != VICTIM {
                    let lease = self.leases.get_mut(&id).expect("seen above");
                    let resized =
                        rampool_lease::resize_lease(&mut self.directory, &mut lease.space, id, bytes);
                    self.tally.refused += u64::from(resized.is_err());
                }
                2000
            }
            Ask::Open => 1000,
            Ask::Leave => {
                self.clients[index].seat = None;
                self.departed.extend(self.directory.leave(id, member));
                let bytes = self.rng.between(1 << 16, 6 << 20);
                self.open(index, bytes);
                4000
            }
        }
    }

    fn go_on(&mut self, index: usize, paused: Paused) -> u64 {
        let Some(seat) = &self.clients[index].seat else { return 1000 };
        let (id, member, connection) = (seat.lease, seat.member, seat.connection);
        if self.leases.get(&id).is_none_or(|lease| lease.space.admit(member, connection).is_err()) {
            return 1000;
        }
        let mut released = Vec::new();
        match paused {
            Paused::Long(0) => 1000,
            Paused::Long(steps) => {
                self.clients[index].paused = Some(Paused::Long(steps - 1));
                STEP_NS / 2
            }
            Paused::Bury => {
                let more = self.on(id, |lease| lease.space.bury(1, &mut released));
                self.free(&released);
                self.clients[index].paused = more.then_some(Paused::Bury);
                STEP_NS / 4
            }
            Paused::Discard(region, mut extents) => {
                let before = extents.clone();
                let done = self.on(id, |lease| {
                    let done = lease.space.discard_some(member, region, &mut extents, 1, &mut released);
                    if done.is_ok() {
                        let left = |page: &u64| extents.iter().any(|e| e.contains(PageIndex(*page)));
                        let gone =
                            |page: &u64| before.iter().any(|e| e.contains(PageIndex(*page))) && !left(page);
                        lease.golden.get_mut(&region).expect("it is there").retain(|page, _| !gone(page));
                    }
                    done
                });
                self.free(&released);
                if let Ok(false) = done {
                    self.clients[index].paused = Some(Paused::Discard(region, extents));
                }
                STEP_NS / 2
            }
            Paused::Clone(region) => {
                let done = self.make(id, |lease| {
                    let began = match lease.clones.remove(&member) {
                        Some((of, pages)) if of == region => pages,
                        _ => lease.golden.get(&region).cloned().unwrap_or_default(),
                    };
                    let done = lease.space.clone_some(member, region, 1)?;
                    match done {
                        None => _ = lease.clones.insert(member, (region, began)),
                        Some(clone) => _ = lease.golden.insert(clone, began),
                    }
                    Ok::<_, SpaceError>(done)
                });
                match done {
                    Ok(None) => self.clients[index].paused = Some(Paused::Clone(region)),
                    Ok(Some(clone)) => {
                        self.tally.clones += 1;
                        self.compare(id, member, clone);
                        let seat = self.clients[index].seat.as_mut().expect("seen above");
                        if seat.region == seat.common || self.rng.one_in(2) {
                            seat.region = clone;
                        } else {
                            self.on(id, |lease| {
                                lease.golden.remove(&clone);
                                lease.space.free_region(member, clone).expect("it was made for it");
                            });
                            self.clients[index].paused = Some(Paused::Bury);
                        }
                    }
                    Err(_) => self.tally.refused += 1,
                }
                STEP_NS / 2
            }
        }
    }

    /// A region is what it should be.
    fn compare(&self, id: LeaseId, member: MemberId, region: RegionId) {
        let lease = &self.leases[&id];
        for page in 0..PAGES {
            let mut found = Vec::new();
            lease.space.look_up(member, region, &[Extent::page(at(page))], &mut found).expect("it is there");
            let golden = lease.golden[&region].get(&at(page).0).copied();
            assert_eq!(found[0].map(|page| (page.frame, page.crc)), golden, "page {page} of a clone");
        }
    }

    fn check(&mut self) {
        self.directory.check();
        self.come_late();
        let members = |tenant: usize| -> usize {
            let leases = self.directory.summary().into_iter().filter(|lease| lease.tenant == payer(tenant));
            leases.map(|lease| lease.members.len()).sum()
        };
        assert!(members(ERRATIC) as u64 <= CONNECTIONS, "more members than connections");
        for (tenant, account) in self.directory.accounts().all() {
            let fits = account.lent_bytes <= QUOTA && account.regions <= 40;
            assert!(fits && account.leases <= LEASES as u64 / 4, "{tenant:?} has {account:?}");
        }
        if self.rng.one_in(50) {
            self.leases.values().for_each(|lease| lease.space.check());
            assert!(self.frames.len() as u64 * PAGE <= self.directory.lent_bytes(), "more than is lent");
        }
    }

    /// Of as much time: `one` and `many`, and the connections of `many`.
    fn fair(&self) {
        let of = |tenant: usize| -> u64 {
            let clients = self.clients.iter().filter(|client| client.tenant == tenant);
            clients.map(|client| client.served_ns).sum::<u64>() + self.outside_ns[tenant]
        };
        let (one, many) = (of(ONE), of(MANY));
        let most = 4 * (SLICE_NS + STEP_NS + OUTSIDE_NS);
        assert!(one.abs_diff(many) <= most, "{one} ns of time for one connection, {many} ns for many");
        // What was done outside is of the first.
        let each: Vec<u64> = (2..6)
            .map(|index| self.clients[index].served_ns + if index == 2 { self.outside_ns[MANY] } else { 0 })
            .collect();
        let (least, longest) = (each.iter().min().expect("four"), each.iter().max().expect("four"));
        assert!(longest - least <= most, "connections of one tenant: {each:?} ns");
    }

    /// The victim fills its lease. Then all leave, and nothing is left.
    fn end(&mut self) {
        let seat = self.clients[VICTIM].seat.as_ref().expect("it never leaves");
        let (id, member, region) = (seat.lease, seat.member, seat.region);
        for number in 0.. {
            let stored = self.frame();
            let lease = self.leases.get_mut(&id).expect("seen above");
            let extent = [Extent::page(PageIndex(1_000_000 + number))];
            let mut released = Vec::new();
            match lease.space.put(member, region, &extent, &[Some(stored)], &mut released) {
                Ok(()) => {}
                Err(SpaceError::Full { free }) => {
                    // A page, and a part of the page table for it.
                    assert!(free < PAGE + 8192 + 32, "{free} bytes that were granted cannot be filled");
                    self.free(&[stored.frame]);
                    break;
                }
                Err(error) => panic!("{error}"),
            }
            assert!(number * PAGE < QUOTA, "a lease that is never full");
        }
        assert!(self.frames.len() as u64 * PAGE <= MEMORY, "more frames than the server has");
        for index in 0..CLIENTS.len() {
            self.shares.leave(index);
            self.directory.accounts_mut().disconnect(payer(self.clients[index].tenant));
            if let Some(seat) = self.clients[index].seat.take() {
                let now = Tick(self.now / 1_000_000);
                self.directory.disconnected(now, seat.lease, seat.member, seat.connection);
            }
        }
        let expired = self.directory.expire(Tick(u64::MAX));
        self.departed.extend(expired);
        for departed in std::mem::take(&mut self.departed) {
            self.settle(departed);
        }
        assert!(self.leases.is_empty() && self.directory.summary().is_empty(), "a lease is left");
        assert_eq!(self.directory.accounts().all().count(), 0, "an account is left");
        assert!(self.frames.is_empty(), "frames are left");
        assert_eq!(self.shares.pick(), None);
    }
}
