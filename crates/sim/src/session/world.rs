//! The program, the shell, the network and the clock around the client's sessions, and the
//! judge of all of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rampool_paging::placement::{Placement, ServerIndex};
use rampool_session::{
    ABSENCE, ATTACH_NUMBER, ATTEMPT, Ask, BULK_WINDOW_BYTES, Break, CALM, Class, Client, DEADLINES, Failed,
    Fill, Grant, HandedOver, History, Input, LAST_CHANCE, LinkId, Lost, MAX_BREAKS, MOST_SPARE_SILENCE,
    Outcome, Output, PAUSE, PIECES, Pages, REBUILD_AFTER, RequestId, Rule, SPARE_SILENCE, Time,
};
use rampool_wire::frame::{HEADER_BYTES, Header, LeaseId, MemberId, Opcode, RegionId, Status};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

use super::plan::{Faults, Plan};
use super::server::{Answer, Asked, LATER_RUN, Membership, Server};
use crate::rng::Rng;

/// Of each client.
pub(super) const COUNTERS: usize = 4;
const PAGES: u64 = 2048;
const STRIPE_PAGES: u32 = 16;
const US: u64 = 1000;
const MS: u64 = 1000 * US;
/// Answers that a liar remembers.
const REMEMBERED_ANSWERS: usize = 50;
/// What the memory of the machine's pieces is called, where operations have their tokens.
const PIECE_TOKEN: u64 = 1 << 60;
/// What the parent calls a clone that is for the child.
const CLONE: u32 = 1 << 20;

macro_rules! tally {
    ($($name:ident)*) => {
        /// What went on, so that a test can tell that a run was worth it.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Tally {
            $(pub $name: u64,)*
            /// Others took a server's place as it was away, or drained; it was left; what was left there was
            /// dropped; one came in addition; one was told of anew, and was back; a read that had gone
            /// elsewhere was answered first where it came from.
            pub turns: [u64; 8],
        }

        impl Tally {
            /// All of them.
            pub fn counts_mut(&mut self) -> impl Iterator<Item = &mut u64> {
                [$(&mut self.$name),*].into_iter().chain(&mut self.turns)
            }
        }
    };
}

tally! {
    stored fetched updated read made full corrupt failed cuts reconnects resent lost_deadline
    lost_connection lost_given_up lost_breach late lies draining heartbeats moved dropped spared absent
    caught_up pieces forks children taken not_taken may_be_taken
}

impl Tally {
    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        let mut other = *other;
        self.counts_mut().zip(other.counts_mut()).for_each(|(mine, theirs)| *mine += *theirs);
    }
}

#[derive(Clone, Debug)]
enum ToServer {
    /// To a lease in this run of the server.
    Attach(LeaseId, MemberId, u64),
    Request(Asked),
}

#[derive(Clone, Debug)]
struct ToClient {
    header: Header,
    values: Vec<u64>,
    grant: Option<Grant>,
    run: u64,
    /// A lie that counts only while this frame has not left yet.
    if_in_link: Option<u64>,
}

#[derive(Debug)]
enum Event {
    AtServer(LinkId, ToServer),
    AtClient(LinkId, ToClient),
    ClientNotices(LinkId),
    ServerNotices(LinkId),
    Connected(LinkId),
    Refused(LinkId),
    Flush(LinkId),
    Program,
    Watch,
    Fault,
    Knock,
    Expire(ServerIndex),
    /// Whether a server that drains can end.
    Drained(ServerIndex),
    Grow,
    Wake,
    Pause,
    Cut(LinkId),
}

/// A frame on its way into the network: its number, the bytes that are not in it yet.
#[derive(Debug)]
struct Frame {
    number: u64,
    token: Option<u64>,
    bytes: usize,
    message: ToServer,
}

#[derive(Debug)]
struct Conn {
    membership: Option<Membership>,
    run: u64,
    out: VecDeque<Frame>,
    flushing: bool,
    departed: Vec<u64>,
    inbox: VecDeque<ToClient>,
    /// The operation and the request whose bytes are coming.
    receiving: Option<(u64, RequestId, ToClient)>,
    /// Of each direction: when the latest message arrives.
    at_server: u64,
    at_client: u64,
    free_at: u64,
    cut: bool,
    /// After the cut: how much later the rest comes to the server; none: never.
    late: Option<u64>,
    client_closed: bool,
    attached: bool,
    up: bool,
    /// What was sent over it and has no answer yet.
    unanswered: BTreeMap<RequestId, (Class, u64, Opcode)>,
    /// The same of requests that went to another holder meanwhile, by number.
    moved: BTreeMap<u64, u64>,
}

/// The way to one server.
#[derive(Clone, Copy, Debug, Default)]
struct Network {
    delay: u64,
    silent_to: u64,
    silent_from: u64,
    hang_until: u64,
    slow_until: u64,
    slow: u64,
    lags_until: u64,
    lag: u64,
    /// One in so many answers.
    lag_odds: u64,
    /// Attempts to connect are refused until then.
    lies: bool,
}

/// What the judge knows of one server.
#[derive(Clone, Debug, Default)]
struct Judge {
    lost: bool,
    absent_since: Option<u64>,
    /// Since when it is lost or absent.
    away_since: Option<u64>,
    /// Others hold its pages.
    out: bool,
    /// It said that it drains; it was left since.
    drains: bool,
    drained: bool,
    /// The client's own time when it was lost or absent last, and for how long it was absent.
    out_at: u64,
    absent_for: u64,
    lied: bool,
    refused: bool,
    broke_for_good: bool,
    dismissed: bool,
    /// It was joined anew, and was not there yet.
    renewed: bool,
    down_since: Option<u64>,
    /// Since when all that hold its pages as well have been there, and known the region.
    filled_since: Option<u64>,
    /// The client's own time when its connection broke.
    down_at: u64,
    /// Since when nothing has been wrong with it or the way to it.
    well_since: u64,
    heard: u64,
    sent: u64,
    reachable_since: u64,
    breaks: u32,
    connected_at: Option<u64>,
    /// Regions that the program has made there, and those of which the client did not hear.
    regions: usize,
    run: u64,
    member: MemberId,
    control: BTreeSet<RequestId>,
    demand: BTreeSet<RequestId>,
    /// Reads that it was asked for since it was to be used again after it was slow.
    reads: u64,
}

/// The shell's side of a request.
#[derive(Clone, Debug)]
struct Body {
    ask: Ask,
    asked: Asked,
    token: Option<u64>,
    /// Where it is now.
    over: Option<LinkId>,
    sent_before: bool,
    made_at: u64,
    /// How often its bytes came damaged.
    damaged: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Fetch,
    Store,
    Update,
    Read,
}

#[derive(Clone, Debug)]
struct Op {
    kind: Kind,
    /// Each page, and the number of its store.
    pages: Vec<(u64, u64)>,
    got: BTreeMap<u64, u64>,
    /// What an update or a read must answer.
    expected: u64,
    uid: u64,
    server: ServerIndex,
    made_at: u64,
    requests: Vec<RequestId>,
    /// A thread waits.
    demand: bool,
    /// The server of one of its parts is lost.
    failed: bool,
    /// No holder of a page was there.
    excused: bool,
    /// A server had no room.
    refused: bool,
}

/// What a page may hold: each value with the number of the store that brings it.
#[derive(Clone, Debug)]
struct Page {
    candidates: Vec<(u64, u64)>,
    stores: u32,
    fetches: u32,
    /// What was stored last was not acknowledged, or is not what the region has.
    unsure: bool,
}

/// A region is being cloned; the program waits.
#[derive(Debug)]
struct Fork {
    history: Option<History>,
    names: Vec<RegionId>,
    waits: BTreeSet<RequestId>,
    refused: bool,
    /// A child has taken this over, where it has a name, from these runs of the servers.
    adopts: Option<(HandedOver, Vec<u64>)>,
}

/// How far the parent has come with its child.
#[derive(Debug)]
enum Child {
    Unborn,
    /// The clone is the parent's; what its pages hold.
    Cloned(Vec<Page>),
    Adopting,
    /// It has said that it has what it can have of what was handed over from these runs of the servers.
    Said(HandedOver, Vec<u64>),
    Grown,
}

/// One client: its machine and shell, its program, and what the judge knows of them.
struct Process {
    number: usize,
    client: Client,
    /// When pages got other holders last.
    turned_at: u64,
    judges: Vec<Judge>,
    conns: BTreeMap<LinkId, Conn>,
    /// Answers of closed connections that the shell had taken in already.
    stale: Vec<(LinkId, Header)>,
    bodies: BTreeMap<RequestId, Body>,
    ops: BTreeMap<u64, Op>,
    pages: Vec<Page>,
    /// The program's region, as it calls it: another one after each fork.
    of: u32,
    fork: Option<Fork>,
    /// What each piece has read.
    pieces: [Vec<u64>; PIECES],
    /// When a thread began to wait for something last.
    demanded_at: Option<u64>,
    /// Reads for which threads waited; those that went elsewhere; those that took long.
    reads: [u64; 3],
    counters: Vec<[u64; COUNTERS]>,
    answers: VecDeque<(ServerIndex, ToClient)>,
    /// The head that the shell just told of.
    head: Option<(LinkId, ToClient)>,
    receiving: Option<RequestId>,
    damaged: BTreeMap<u64, u32>,
    paused_until: u64,
    paused: u64,
    awake_since: u64,
    last_pause: u64,
}

/// A run.
pub struct World {
    plan: Plan,
    rng: Rng,
    now: u64,
    sequence: u64,
    /// Each with the number of its client.
    events: BTreeMap<(u64, u64), (usize, Event)>,
    placement: Placement,
    servers: Vec<Server>,
    networks: Vec<Network>,
    /// The client whose turn it is, and the other one.
    me: Box<Process>,
    other: Option<Box<Process>>,
    child: Child,
    damage_once: BTreeSet<u64>,
    damage_always: BTreeSet<u64>,
    /// The fetch that cuts its connection, once it is made.
    poison: Option<u64>,
    poisons: bool,
    next_token: u64,
    next_uid: u64,
    next_store: u64,
    quiet: bool,
    tally: Tally,
}

#[cfg(feature = "mutants")]
fn leave_out(client: &mut Client, rule: rampool_session::Rule) {
    client.omit(rule);
}

#[cfg(not(feature = "mutants"))]
fn leave_out(_client: &mut Client, _rule: rampool_session::Rule) {
    panic!("rules are left out in builds for tests only");
}

impl World {
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        let mut rng = Rng::new(plan.seed ^ 0x5e55_1011);
        let servers = usize::from(plan.servers);
        let mut world = Self {
            placement: Placement::new(&vec![1; servers], STRIPE_PAGES, plan.copies)
                .expect("a few equal servers"),
            servers: Vec::new(),
            networks: Vec::new(),
            me: Box::new(Process::new(0, &plan)),
            other: None,
            child: Child::Unborn,
            damage_once: BTreeSet::new(),
            damage_always: BTreeSet::new(),
            poison: None,
            poisons: false,
            now: 0,
            sequence: 0,
            events: BTreeMap::new(),
            next_token: 1,
            next_uid: 1,
            next_store: 1,
            quiet: false,
            tally: Tally::default(),
            rng: rng.clone(),
            plan,
        };
        for index in 0..world.plan.servers {
            let (server, membership) = Server::new(&world.plan, index.into(), u64::from(index) + 1);
            let link =
                LinkId { server: world.me.client.add_server(world.plan.op_deadline, Time(0)), connection: 0 };
            let grant = server.grant(&world.plan, server.member);
            world.me.conns.insert(link, Conn::up(server.run, membership));
            let judge = Judge { run: server.run, member: server.member, ..Judge::default() };
            world.me.judges.push(judge);
            world.servers.push(server);
            let most = if world.plan.only_lags() { 200 } else { 2000 };
            let delay = rng.between(20, most) * US;
            world.networks.push(Network {
                delay,
                lies: world.plan.faults.lies && index == 0,
                ..Network::default()
            });
            world.tell(Input::Granted { server: link.server, grant, reconnects: true });
        }
        world.me.client.place(&world.placement);
        let names = world.servers.iter().map(|server| server.region).collect();
        world.me.client.open_region(Time(0), 0, names, Some(History::default()));
        world.at(0, Event::Program);
        world.at(1, Event::Fault);
        if world.plan.watches {
            world.at(3, Event::Watch);
        }
        if world.plan.renews {
            world.at(2, Event::Knock);
        }
        if world.plan.grows {
            let after = rng.below(world.op_ns() * 15);
            world.at(after, Event::Grow);
        }
        world
    }

    fn op_ns(&self) -> u64 {
        u64::try_from(self.plan.op_deadline.as_nanos()).expect("short")
    }

    fn at(&mut self, after: u64, event: Event) {
        self.sequence += 1;
        self.events.insert((self.now + after, self.sequence), (self.me.number, event));
    }

    fn awake(&self) -> u64 {
        self.now + self.me.paused_until.saturating_sub(self.now) - self.me.paused
    }

    fn tell(&mut self, input: Input) {
        self.me.client.handle(Time(self.now), input);
    }

    /// Gives the turn to a client.
    fn turn(&mut self, number: usize) {
        if self.me.number != number {
            let other = self.other.as_mut().expect("it was made");
            std::mem::swap(&mut self.me, other);
        }
    }

    fn each(&mut self, mut work: impl FnMut(&mut Self)) {
        let mine = self.me.number;
        for number in 0..=usize::from(self.other.is_some()) {
            self.turn(number);
            work(self);
        }
        self.turn(mine);
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        std::iter::once(&self.me).chain(&self.other).map(|process| &**process)
    }

    /// When a client's machine wants to look at the clock.
    fn timer(&self, process: &Process) -> Option<u64> {
        let due = process.client.poll_timeout().filter(|_| self.now >= process.paused_until);
        due.map(|due| due.0)
    }

    /// Runs to the end; panics where an invariant is broken.
    pub fn run(mut self) -> Tally {
        let storm = self.op_ns() * 25;
        // Beside a thread that waits, what is missing comes page by page.
        let end = storm + self.op_ns() * 30 + if self.plan.watches { 100_000 * MS } else { 0 };
        loop {
            let timers = self.processes().filter_map(|process| self.timer(process));
            let timer = timers.min().map(|due| due.max(self.now + MS));
            let event = self.events.first_key_value().map(|((at, _), _)| *at);
            let Some(next) = [timer, event].into_iter().flatten().min() else { break };
            self.now = self.now.max(next);
            if self.now >= storm && !self.quiet {
                self.calm();
            }
            if self.now >= end {
                break;
            }
            let mut stirred = [self.other.is_none(), false];
            while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= self.now) {
                let (number, event) = entry.remove();
                self.turn(number);
                stirred[number] = true;
                self.happen(event);
            }
            self.each(|world| {
                let due = world.timer(&world.me).is_some_and(|due| due <= world.now);
                if !due && !stirred[world.me.number] {
                    return;
                }
                if world.now >= world.me.paused_until {
                    world.step();
                }
                // What is wrong in the machine's tables stays so for some steps.
                if world.sequence.is_multiple_of(4) {
                    world.me.client.check();
                }
                world.check_waits();
            });
            let idle = |process: &Process| process.ops.is_empty() && process.bodies.is_empty();
            let grown = matches!(self.child, Child::Unborn | Child::Grown);
            if self.quiet && grown && self.processes().all(idle) {
                let mut whole = true;
                self.each(|world| whole = whole && world.is_whole());
                if whole {
                    break;
                }
            }
        }
        self.each(|world| {
            assert!(world.me.ops.is_empty(), "completes-after-faults: {:?}", world.me.ops.values().next());
            assert!(
                world.me.bodies.is_empty(),
                "completes-after-faults: {:?}",
                world.me.bodies.values().next()
            );
            assert_eq!(world.me.client.ops_under_way(), 0, "completes-after-faults");
            assert!(world.is_whole(), "redundancy-returns: {:?}", world.me.judges);
            (0..PAGES).for_each(|page| world.judge_stored(page, 0));
            world.judge_kept();
        });
        let grown = matches!(self.child, Child::Unborn | Child::Grown);
        assert!(grown, "completes-after-faults: {:?}", self.child);
        self.judge_regions();
        self.tally
    }

    /// Every page has as many copies as there can be, and a server that drains has none.
    fn is_whole(&self) -> bool {
        let servers = || (0..).zip(&self.me.judges).map(|(index, judge)| (ServerIndex(index), judge));
        if servers().any(|(server, judge)| judge.lost && self.may_renew(server)) {
            return false;
        }
        let away = servers().any(|(_, judge)| judge.absent_since.is_some());
        let draining = |server: &ServerIndex| self.me.client.session(*server).is_draining();
        let usable = servers().filter(|(server, judge)| !judge.lost && !draining(server)).count();
        let copies = usable.min(usize::from(self.plan.copies));
        let has = |page: u64, server: ServerIndex| self.has(server, std::iter::once(PageIndex(page)));
        let lacks = |page: u64| {
            let had = servers().filter(|(server, _)| has(page, *server)).count();
            let held = servers().filter(|(server, _)| !draining(server) && has(page, *server)).count();
            had > 0 && held < copies
        };
        // What there was no room for comes with the next pass.
        let passes =
            servers().any(|(server, _)| self.me.client.missed_pages(server).0 > 0) || !self.plan.faults.full;
        let tracked = self.plan.copies > 1 && self.me.client.region(self.me.of).is_some();
        let left = |(server, judge): (ServerIndex, &Judge)| {
            // Until others have all of it.
            let pairs = self.me.client.placement().pairs().iter();
            let stays = usable == 0 || pairs.flat_map(|pair| pair.iter()).any(|of| !self.is_there(of));
            !judge.lost && !stays && (self.me.client.left_pages(server) > 0 || draining(&server))
        };
        !away && !(tracked && (passes && (0..PAGES).any(lacks) || servers().any(left)))
    }

    /// What was acknowledged is with a holder, as long as none of them was lost.
    fn judge_kept(&self) {
        let lost = self.me.judges.iter().any(|judge| judge.lost && !judge.drained);
        for (page, kept) in (0..).zip(&self.me.pages) {
            assert!(lost || kept.unsure || self.has_holder(page), "kept-is-had: page {page} has no holder");
        }
    }

    /// No region is left behind where no client was kept from knowing of it.
    fn judge_regions(&self) {
        for (at, server) in self.servers.iter().enumerate() {
            let known = |process: &Process| {
                let own = process.client.region(process.of).is_some();
                usize::from(own) + usize::from(process.fork.is_some()) + process.judges[at].regions
            };
            let lost = self.processes().any(|process| process.judges[at].lost);
            // A run that was begun anew has a region that is nobody's.
            let is_nobodys = server.run > LATER_RUN || at >= usize::from(self.plan.servers);
            let begun = at + usize::from(is_nobodys);
            let most = if lost { usize::MAX } else { begun + self.processes().map(known).sum::<usize>() };
            assert!(
                server.regions() <= most,
                "freed-is-freed: {} regions, {most} expected",
                server.regions()
            );
        }
    }

    /// Faults stop, and the program.
    fn calm(&mut self) {
        self.each(Self::judge_forgiven);
        self.quiet = true;
        let now = self.now;
        for network in &mut self.networks {
            let Network { silent_to, silent_from, slow_until, lags_until, .. } = network;
            for until in [silent_to, silent_from, slow_until, lags_until] {
                *until = (*until).min(now);
            }
            network.hang_until = network.hang_until.min(now);
        }
        for index in 0..self.servers.len() {
            self.unreachable(index, now);
        }
        (self.poison, self.poisons) = (None, false);
        self.damage_once.clear();
        self.damage_always.clear();
        for server in &mut self.servers {
            server.set_room(PAGES * 4);
            server.down &= !self.plan.renews;
        }
        self.each(|world| {
            for link in world.me.conns.keys().copied().collect::<Vec<_>>() {
                world.at(0, Event::Flush(link));
            }
        });
    }

    // --- The shell -----------------------------------------------------------------------------------------

    /// One turn of the client's thread: takes in what has come, sends, looks at the clock.
    fn step(&mut self) {
        self.pump();
        let open = |(link, conn): (&LinkId, &Conn)| (!conn.client_closed).then_some(*link);
        for link in self.me.conns.iter().filter_map(open).collect::<Vec<_>>() {
            self.receive(link);
        }
        self.tell(Input::Time);
        self.pump();
    }

    fn receive(&mut self, link: LinkId) {
        for _ in 0..self.rng.between(1, 40) {
            let Some(conn) = self.me.conns.get_mut(&link).filter(|conn| !conn.client_closed) else { return };
            if let Some((_, request, message)) = conn.receiving.take() {
                self.body(link, request, message);
                continue;
            }
            let Some(message) = conn.inbox.pop_front() else { break };
            if message.if_in_link.is_some_and(|number| !conn.out.iter().any(|frame| frame.number == number)) {
                continue;
            }
            for number in std::mem::take(&mut conn.departed) {
                self.tell(Input::Departed { number });
            }
            if self.me.conns[&link].up {
                self.head(link, message);
            } else if message.header.is_reply() {
                let ToClient { header, grant, .. } = message;
                self.tell(Input::Attached { link, header, grant });
                self.pump();
            }
        }
        if let Some(conn) = self.me.conns.get(&link).filter(|conn| conn.up && !conn.client_closed) {
            let all = conn.inbox.is_empty() && conn.receiving.is_none();
            self.tell(Input::Drained { link, all });
            self.pump();
        }
    }

    fn head(&mut self, link: LinkId, message: ToClient) {
        let judge = &mut self.me.judges[link.server.as_usize()];
        judge.heard = self.now;
        let header = message.header;
        let gone = header.is_reply() && matches!(header.status, Status::MemberGone | Status::NoSuchLease);
        let conn = self.me.conns.get_mut(&link);
        let moved = conn.and_then(|conn| conn.moved.remove(&header.request)).is_some();
        let first = moved && header.status == Status::Ok && self.waits_elsewhere(header.request);
        self.me.head = Some((link, message));
        self.tell(Input::Head { link, header });
        self.pump();
        assert!(!first || self.me.receiving.is_some(), "first-answer-counts: {header:?}");
        if gone {
            assert!(self.me.judges[link.server.as_usize()].lost, "given-up-is-lost");
        }
        let (link, message) = self.me.head.take().expect("set above");
        if let Some(request) = self.me.receiving.take() {
            let token = self.me.bodies[&request].memory().expect("only operations and pieces read");
            let conn = self.me.conns.get_mut(&link).expect("a head came over it");
            conn.receiving = Some((token, request, message));
        }
    }

    fn body(&mut self, link: LinkId, request: RequestId, message: ToClient) {
        let body = self.me.bodies.get(&request).expect("its bytes come for a request that lives").clone();
        let token = body.memory().expect("only operations and pieces read");
        let mut damaged = None;
        let mut op = self.me.ops.get_mut(&token);
        assert_eq!(message.run, self.me.judges[link.server.as_usize()].run, "nothing-from-another-run");
        let pages: Vec<u64> = match &op {
            Some(op) if op.kind != Kind::Fetch => vec![PAGES + op.uid],
            _ => body.asked.extents.iter().flat_map(Extent::pages).map(|page| page.0).collect(),
        };
        if let Some(piece) = body.ask.piece {
            self.me.pieces[usize::from(piece)].clone_from(&message.values);
        }
        for (page, value) in pages.into_iter().zip(&message.values) {
            if self.damage_always.contains(&page) || self.damage_once.remove(&page) {
                *self.me.damaged.entry(token).or_default() += 1;
                damaged = damaged.or(Some(PageIndex(page)));
            }
            if let Some(op) = &mut op {
                op.got.insert(page, *value);
            }
        }
        self.me.judges[link.server.as_usize()].heard = self.now;
        if damaged.is_some() {
            let body = self.me.bodies.get_mut(&request).expect("seen above");
            body.over = None;
            body.damaged += 1;
            assert!(body.damaged <= 2, "asks-again-once: {:?}", body.asked);
            self.me.conns.get_mut(&link).expect("it came over it").unanswered.remove(&request);
            let judge = &mut self.me.judges[link.server.as_usize()];
            if body.ask.class == Class::Demand {
                judge.demand.insert(request);
            }
        }
        self.tell(Input::Body { link, request, damaged });
        self.pump();
    }

    fn pump(&mut self) {
        while let Some(output) = self.me.client.poll() {
            self.carry_out(output);
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Send { link, request, number } => self.send(link, request, number),
            Output::Receive { link, request } => {
                self.answers(link, request);
                self.me.receiving = Some(request);
            }
            Output::Answered { link, request, wanted, .. } => self.answered(link, request, wanted),
            Output::Connect { link } => self.connect(link),
            Output::Attach { link } => {
                let server = &self.me.judges[link.server.as_usize()];
                let attach = ToServer::Attach(LeaseId(1), server.member, server.run);
                self.carry_to_server(link, attach);
            }
            Output::Close { link } => self.close(link),
            Output::Back { link } => self.back(link),
            Output::Lost { server, reason, spare, .. } => self.lost(server, reason, spare),
            Output::Moved { request, from } => self.moved(request, from),
            Output::Piece { request, piece, pages } => self.piece(request, piece, pages),
            Output::Absent { server, reason, .. } => self.absent(server, reason),
            Output::Returned { server } => {
                let awake = self.awake();
                let judge = &mut self.me.judges[server.as_usize()];
                let since = judge.absent_since.take().expect("only an absent server returns");
                (judge.out_at, judge.absent_for) = (awake, self.now - since);
                (judge.away_since, judge.drained) = (None, false);
                self.tally.turns[6] += u64::from(std::mem::take(&mut judge.renewed));
            }
            Output::CaughtUp { .. } => self.tally.caught_up += 1,
            Output::Drop { .. } => self.tally.dropped += 1,
            Output::Draining { server, .. } => {
                self.me.judges[server.as_usize()].drains = true;
                self.tally.draining += 1;
            }
            Output::Holds { server, out } => self.holds(server, out),
            Output::Ended { token, outcome, .. } => self.ended(token, outcome),
        }
    }

    fn send(&mut self, link: LinkId, request: RequestId, number: u64) {
        if self.me.client.request(request).ask.opcode == Opcode::Heartbeat && !self.is_own(request) {
            // The machine's own.
            let ask = Ask::control(link.server, Opcode::Heartbeat, RegionId(0));
            let asked = Asked::of(Opcode::Heartbeat, 0, RegionId(0));
            let made_at = self.now;
            let body = Body { ask, asked, token: None, over: None, sent_before: false, made_at, damaged: 0 };
            self.me.bodies.insert(request, body);
            self.tally.heartbeats += 1;
        }
        self.judge_send(link, request);
        let body = self.me.bodies.get_mut(&request).expect("just made");
        self.tally.resent += u64::from(body.sent_before);
        body.over = Some(link);
        body.sent_before = true;
        body.asked.number = number;
        let bytes = HEADER_BYTES + body.asked.values.len() * OS_PAGE_BYTES;
        let message = ToServer::Request(body.asked.clone());
        // What is asked for lies nowhere yet.
        let token = body.memory().filter(|_| body.asked.opcode == Opcode::Put);
        let conn = self.me.conns.get_mut(&link).expect("nothing is sent over a connection that was closed");
        assert!(conn.up && !conn.client_closed, "nothing is sent over a connection that was closed");
        conn.unanswered.insert(request, (body.ask.class, body.ask.bytes, body.ask.opcode));
        conn.out.push_back(Frame { number, token, bytes, message });
        let waiting = conn.out.iter().map(|frame| frame.bytes).sum();
        self.me.judges[link.server.as_usize()].sent = self.now;
        self.tell(Input::Queued { link, waiting });
        let conn = self.me.conns.get_mut(&link).expect("seen above");
        if !std::mem::replace(&mut conn.flushing, true) {
            self.at(0, Event::Flush(link));
        }
    }

    /// Whether the judge knows this request as one of the machine's own.
    fn is_own(&self, request: RequestId) -> bool {
        self.me.bodies.get(&request).is_some_and(|body| body.ask.opcode == Opcode::Heartbeat)
    }

    /// What must hold of everything that leaves.
    fn judge_send(&mut self, link: LinkId, request: RequestId) {
        let Ask { class, bytes, .. } = self.me.bodies[&request].ask;
        let sent =
            &self.me.conns.get(&link).expect("nothing is sent over a connection that was closed").unanswered;
        let (requests, taken) =
            sent.values().fold((0, 0), |(n, taken), (_, bytes, _)| (n + 1, taken + bytes));
        let moved = &self.me.conns[&link].moved;
        let (requests, taken) =
            moved.values().fold((requests, taken), |(n, taken), bytes| (n + 1, taken + bytes));
        let most_bytes = u64::from(self.plan.max_bytes(link.server.as_usize()));
        let most = self.plan.max_requests.min(256);
        assert!(requests < self.plan.max_requests, "credits-kept: {requests} requests are outstanding");
        assert!(taken + bytes <= most_bytes, "credits-kept: {taken} bytes are outstanding");
        let bulk = class >= Class::Prefetch;
        if bulk && requests > 0 {
            let spare = requests + most / 8 < most && taken + bytes + most_bytes / 8 <= most_bytes;
            assert!(spare, "demand-finds-room: {requests} requests and {taken} bytes are outstanding");
            let window: u64 = sent.values().filter(|(of, ..)| *of == class).map(|(_, bytes, _)| bytes).sum();
            assert!(
                window == 0 || window + bytes <= BULK_WINDOW_BYTES,
                "bulk-window: {window} bytes of {class:?}"
            );
        }
        let made = sent.values().any(|(.., opcode)| *opcode == Opcode::CreateRegion);
        let forgiven = self.now >= self.forgiven_at(link.server);
        let judge = &mut self.me.judges[link.server.as_usize()];
        judge.reads += u64::from(class == Class::Demand && forgiven);
        judge.control.remove(&request);
        judge.demand.remove(&request);
        let making = |id: &&RequestId| self.me.bodies[id].ask.opcode == Opcode::CreateRegion;
        if class != Class::Control {
            let starved = judge.control.iter().find(|id| !(made && making(id)));
            assert!(starved.is_none(), "control-is-not-starved: {starved:?} waits while {request:?} leaves");
        }
        if bulk {
            let is_asked = |id: &&RequestId| {
                self.me.bodies.get(id).is_some_and(|body| lives(&self.me.client, **id, body))
            };
            let waits = judge.demand.iter().find(is_asked);
            assert!(waits.is_none(), "demand-first: {waits:?} waits while {request:?} leaves");
        }
    }

    fn answered(&mut self, link: LinkId, request: RequestId, wanted: bool) {
        let body = self.me.bodies.remove(&request).expect("a request is answered once");
        let judge = &mut self.me.judges[link.server.as_usize()];
        if let Some(conn) = self.me.conns.get_mut(&link) {
            conn.unanswered.remove(&request);
        }
        judge.breaks = 0;
        judge.demand.remove(&request);
        if body.ask.opcode == Opcode::CreateRegion && body.ask.piece.is_none() {
            assert!(wanted, "the program waits for its region");
            self.tally.made += 1;
            self.me.judges[link.server.as_usize()].regions += 1;
        }
        let Some((_, message)) = &self.me.head else { return };
        if let Some(fork) = &mut self.me.fork
            && fork.waits.remove(&request)
        {
            let name = &mut fork.names[link.server.as_usize()];
            match (message.header.status, &fork.adopts) {
                (Status::Ok, None) => *name = RegionId(message.header.region),
                (Status::Ok, Some(_)) => *name = body.ask.region,
                _ => fork.refused = true,
            }
        }
        assert_eq!(message.run, self.me.judges[link.server.as_usize()].run, "nothing-from-another-run");
        self.tally.turns[3] += u64::from(body.ask.piece.is_some() && body.ask.opcode == Opcode::Discard);
        if message.header.status == Status::PoolFull
            && let Some(op) = body.token.and_then(|token| self.me.ops.get_mut(&token))
        {
            op.refused = true;
        }
        let changes = matches!(body.ask.opcode, Opcode::Put | Opcode::Discard) && body.ask.piece.is_none();
        if changes && body.made_at > self.me.turned_at && message.header.status == Status::Ok {
            let mut pages = body.asked.extents.iter().flat_map(Extent::pages);
            let holders = |page| self.me.client.placement().holders(page);
            let missed = |page: &PageIndex| self.me.client.has_missed(link.server, self.me.of, *page);
            let missed = pages.find(|page| holders(*page).has(link.server) && missed(page));
            assert!(missed.is_none(), "stored-is-not-missed: {missed:?} at {:?}", link.server);
        }
        if wanted && body.ask.opcode == Opcode::FetchOp {
            let op = &self.me.ops[&body.token.expect("an update is an operation")];
            assert_eq!(message.header.arg, op.expected, "updates-in-order: {:?}", body.asked);
        }
    }

    fn connect(&mut self, link: LinkId) {
        let judge = &mut self.me.judges[link.server.as_usize()];
        if let Some(before) = judge.connected_at.replace(self.now) {
            let apart = self.now - before;
            let pause = u64::try_from(PAUSE.as_nanos()).expect("short");
            assert!(apart >= pause, "no-hammering: attempts are {apart} ns apart");
        }
        let (server, network) =
            (&self.servers[link.server.as_usize()], self.networks[link.server.as_usize()]);
        let conn = Conn::new(server.run);
        let before = self.me.conns.insert(link, conn);
        assert!(before.is_none(), "connection-numbers-are-new: {link:?}");
        let silent = network.silent_to.max(network.silent_from);
        let way = network.delay * 2 + silent.saturating_sub(self.now);
        if server.down {
            judge.refused = true;
            self.at(way, Event::Refused(link));
        } else if self.now >= network.hang_until || self.rng.one_in(3) {
            self.at(way, Event::Connected(link));
        } else if self.rng.one_in(2) {
            self.at(way, Event::ClientNotices(link));
        }
    }

    fn close(&mut self, link: LinkId) {
        let Some(conn) = self.me.conns.get_mut(&link) else { return };
        assert!(!conn.client_closed, "a connection is closed once");
        conn.client_closed = true;
        conn.out.clear();
        conn.receiving = None;
        let heads = conn.inbox.drain(..).filter(|message| message.if_in_link.is_none());
        self.me.stale.extend(heads.map(|message| (link, message.header)));
        for body in self.me.bodies.values_mut().filter(|body| body.over == Some(link)) {
            body.over = None;
        }
        self.me
            .bodies
            .retain(|_, body| body.ask.opcode != Opcode::Heartbeat || body.ask.server != link.server);
        let judge = &mut self.me.judges[link.server.as_usize()];
        let waits = |class| {
            let of = move |body: &Body| body.ask.server == link.server && body.ask.class == class;
            self.me.bodies.iter().filter(move |(_, body)| of(body) && body.over.is_none()).map(|(id, _)| *id)
        };
        judge.control = waits(Class::Control).collect();
        judge.demand = waits(Class::Demand).collect();
        // The server hears of it, sooner or later.
        if !std::mem::replace(&mut conn.cut, true) {
            let delay = self.networks[link.server.as_usize()].delay;
            self.at(delay, Event::ServerNotices(link));
        }
    }

    fn back(&mut self, link: LinkId) {
        self.tally.reconnects += 1;
        let member = self.me.client.session(link.server).member();
        let judge = &mut self.me.judges[link.server.as_usize()];
        if judge.member.0 == 0 {
            // It joins late.
            judge.member = member;
        }
        judge.connected_at = None;
        judge.down_since = None;
        judge.well_since = judge.well_since.max(self.now);
        judge.heard = self.now;
        let conn = self.me.conns.get_mut(&link).expect("it was just attached");
        conn.up = true;
        assert_eq!(conn.run, judge.run, "nothing-from-another-run: a session goes on with it");
        assert_eq!(member, judge.member, "nothing-from-another-run: a session goes on as another member");
        // What the shell had taken in from the old connection is told late.
        for (old, header) in std::mem::take(&mut self.me.stale) {
            if old.server == link.server {
                self.tally.late += 1;
                self.tell(Input::Head { link: old, header });
                self.pump();
            }
        }
    }

    /// Other servers hold what this one did, or it does again.
    fn holds(&mut self, server: ServerIndex, out: bool) {
        self.me.turned_at = self.now;
        let before = std::mem::replace(&mut self.me.judges[server.as_usize()].out, out);
        // A child begins as its parent ends.
        if !out || before {
            return;
        }
        let judge = &self.me.judges[server.as_usize()];
        let away = judge.away_since.map(|since| self.now - since);
        let there = (0..self.servers.len())
            .filter(|index| self.is_there(ServerIndex(u16::try_from(*index).expect("few"))));
        let there = there.count();
        if let Some(away) = away {
            let least = u64::try_from(REBUILD_AFTER.as_nanos()).expect("short");
            assert!(away >= least, "restarted-is-preferred: others take its place after {away} ns");
            assert!(there >= 2, "others-are-there: {there} take the place of {server:?}");
            self.tally.turns[0] += 1;
        } else {
            assert!(judge.drains, "only-draining-moves: {server:?}");
            self.tally.turns[1] += 1;
        }
        let mut holders = self.me.client.placement().pairs().iter().flat_map(|pair| pair.iter());
        let left = holders.any(|of| !self.me.client.session(of).is_draining() || self.me.client.is_out(of));
        assert!(away.is_some() || left, "last-one-stays: {server:?}");
    }

    fn servers(&self) -> impl Iterator<Item = ServerIndex> + use<> {
        (0..).take(self.servers.len()).map(ServerIndex)
    }

    fn holders(&self, page: u64) -> impl Iterator<Item = ServerIndex> + use<> {
        self.me.client.placement().holders(PageIndex(page)).iter()
    }

    fn is_there(&self, server: ServerIndex) -> bool {
        let judge = &self.me.judges[server.as_usize()];
        !judge.lost && judge.absent_since.is_none()
    }

    /// Whether a server is there and has not missed these pages.
    fn has(&self, server: ServerIndex, pages: impl Iterator<Item = PageIndex>) -> bool {
        let mut pages = pages;
        self.is_there(server) && pages.all(|page| self.me.client.has_page(server, self.me.of, page))
    }

    /// Whether a holder of the page is there and has not missed it.
    fn has_holder(&self, page: u64) -> bool {
        self.servers().any(|server| self.has(server, std::iter::once(PageIndex(page))))
    }

    /// Whether what an absent server has is waited for.
    fn is_awaited(&self, server: ServerIndex) -> bool {
        let judge = &self.me.judges[server.as_usize()];
        let out = !judge.lost && !judge.renewed;
        out && judge.absent_since.is_some_and(|since| self.now - since < self.awaited_ns())
    }

    fn awaited_ns(&self) -> u64 {
        self.op_ns().min(u64::try_from(self.plan.grace.as_nanos()).expect("short"))
    }

    /// Whether a request waits for its server, which alone has some of its pages.
    fn is_awaited_by(&self, id: RequestId, body: &Body) -> bool {
        let server = body.ask.server;
        let mut pages = body.asked.extents.iter().flat_map(Extent::pages);
        body.token.is_some()
            && body.asked.opcode == Opcode::Get
            && self.is_awaited(server)
            // A discard behind it may be what is missed.
            && (pages.all(|page| self.me.client.has_page(server, self.me.of, page))
                || lives(&self.me.client, id, body))
    }

    /// The other holder of a request's pages, if it has them.
    fn live_other(&self, body: &Body) -> Option<ServerIndex> {
        body.asked.extents.first().filter(|_| body.token.is_some())?;
        let pages = || body.asked.extents.iter().flat_map(Extent::pages);
        let same = |of: &Body| (of.token, &of.asked.extents) == (body.token, &body.asked.extents);
        let is_also_at = |other: ServerIndex| {
            let of_it = |of: &&Body| of.ask.server == other && of.ask.opcode == Opcode::Put && same(of);
            body.ask.opcode == Opcode::Put && self.me.bodies.values().any(|of| of_it(&of))
        };
        let others = self.servers().filter(|other| *other != body.ask.server);
        let fetched = body.asked.opcode == Opcode::Get;
        let holds = |other: &ServerIndex| fetched || body.ask.other == Some(*other);
        let lacks =
            |other: ServerIndex| pages().any(|page| self.me.client.has_missed(other, self.me.of, page));
        let has = |other: ServerIndex| match fetched {
            true => self.has(other, pages()),
            false => self.is_there(other) && !lacks(other),
        };
        others.filter(holds).find(|other| has(*other) || is_also_at(*other))
    }

    /// Another holder of each page of a server is there and has what the page may hold, or
    /// knows that it has not.
    fn judge_spare(&self, server: ServerIndex) {
        for page in 0..PAGES {
            let holders = self.me.client.placement().holders(PageIndex(page));
            if !holders.has(server) {
                continue;
            }
            let Some(other) = holders.iter().find(|holder| *holder != server) else { continue };
            let judge = &self.me.judges[other.as_usize()];
            assert!(!judge.lost && judge.absent_since.is_none(), "spare-is-spare: {other:?} is not there");
            if self.me.client.has_missed(other, self.me.of, PageIndex(page)) {
                continue;
            }
            let kept = &self.me.pages[usize::try_from(page).expect("few")];
            let value = self.servers[other.as_usize()].value(
                self.me.judges[other.as_usize()].member,
                self.name(other),
                page,
            );
            let known = value.is_some_and(|value| kept.candidates.iter().any(|(_, may)| *may == value));
            let own_run = self.servers[other.as_usize()].run == judge.run;
            let gone = !own_run
                || judge.dismissed
                || judge.lied
                || self.now > u64::try_from(self.plan.grace.as_nanos()).expect("short");
            assert!(
                known || gone,
                "spare-is-spare: page {page} is {value:?} at {other:?}, not of {:?}",
                kept.candidates
            );
        }
    }

    /// What the program's region is called at a server.
    fn name(&self, server: ServerIndex) -> RegionId {
        let region = self.me.client.region(self.me.of);
        region.map_or(RegionId(0), |region| region.names[server.as_usize()])
    }

    /// The machine makes a request of its own.
    fn piece(&mut self, request: RequestId, piece: u8, pages: Extent) {
        let ask = self.me.client.request(request).ask;
        let mut asked = Asked::of(ask.opcode, 0, ask.region);
        if pages.count > 0 {
            asked.extents.push(pages);
        }
        if ask.opcode == Opcode::Put {
            asked.values.clone_from(&self.me.pieces[usize::from(piece)]);
            self.tally.pieces += 1;
        }
        if ask.opcode == Opcode::Get {
            let token = Some(PIECE_TOKEN + u64::from(piece));
            for (link, conn) in self.me.conns.iter().filter(|(_, conn)| !conn.client_closed) {
                let receives = conn.receiving.as_ref().map(|(of, ..)| *of) == token;
                let sends = conn.out.iter().any(|frame| frame.token == token);
                assert!(!receives && !sends, "memory-returned: {link:?} still has memory of piece {piece}");
            }
            let waits = self.me.demanded_at.is_some_and(|at| {
                at < self.now && self.now - at < u64::try_from(CALM.as_nanos()).expect("short")
            });
            let others = self.me.bodies.values().filter(|body| body.ask.piece.is_some_and(|of| of != piece));
            assert!(!waits || others.count() == 0, "pieces-give-way: to what threads wait for");
        }
        self.note(request, ask, asked, None);
    }

    fn absent(&mut self, server: ServerIndex, reason: Lost) {
        self.tally.absent += 1;
        self.judge_spare(server);
        self.judge_early(server, reason);
        let (now, awake) = (self.now, self.awake());
        let judge = &mut self.me.judges[server.as_usize()];
        judge.out_at = awake;
        judge.away_since = judge.away_since.or(Some(now));
        assert!(judge.absent_since.replace(now).is_none(), "absent-once: {server:?}");
        judge.down_since = None;
        // What it may have made, it keeps.
        let makes = |body: &Body| matches!(body.ask.opcode, Opcode::CreateRegion | Opcode::CloneRegion);
        judge.regions +=
            self.me.bodies.values().filter(|body| body.ask.server == server && makes(body)).count();
        self.drop_bodies(server);
    }

    /// A server is given up early only after silence that is not the client's own.
    fn judge_early(&self, server: ServerIndex, reason: Lost) {
        let judge = &self.me.judges[server.as_usize()];
        let limit = self.op_ns().min(u64::try_from(SPARE_SILENCE.as_nanos()).expect("short"));
        if reason == Lost::Connection {
            let awake_down = self.awake().saturating_sub(judge.down_at);
            let grace = u64::try_from(self.plan.grace.as_nanos()).expect("short");
            assert!(awake_down >= limit.min(grace) / 2, "paused-client-does-not-blame: {awake_down} ns away");
        } else {
            self.judge_deadline(server, limit, false);
        }
    }

    fn judge_deadline(&self, server: ServerIndex, limit: u64, old: bool) {
        let silent = self.now - self.me.judges[server.as_usize()].heard;
        assert!(silent >= limit || old, "slow-is-not-dead: it was heard {silent} ns ago");
        let chance = u64::try_from(LAST_CHANCE.as_nanos()).expect("short").min(limit / 4);
        let listened = self.now - self.me.awake_since >= chance || self.me.last_pause <= chance / 4;
        assert!(listened, "paused-client-does-not-blame");
        // What came on a connection that the client has closed since cannot be read.
        let unread = self
            .me
            .conns
            .iter()
            .any(|(link, conn)| link.server == server && !conn.client_closed && !conn.inbox.is_empty());
        assert!(!unread || old, "paused-client-does-not-blame: its answer lies there");
    }

    /// What was asked of a server that is not there any more: what is fetched moves, if another one has it.
    fn drop_bodies(&mut self, server: ServerIndex) {
        let of_it = |body: &Body| body.ask.server == server;
        let (mut gone, mut failed) = (Vec::new(), Vec::new());
        for (id, body) in self.me.bodies.iter().filter(|(_, body)| of_it(body)) {
            let old = self.now - body.made_at >= self.op_ns() * u64::from(DEADLINES);
            let fetched = body.asked.opcode == Opcode::Get;
            let spared =
                (self.live_other(body).is_some() || self.is_awaited_by(*id, body)) && !(old && fetched);
            if !spared {
                failed.extend(body.token);
            }
            if !spared || !fetched {
                gone.push(*id);
            }
        }
        for token in failed {
            let op = self.me.ops.get_mut(&token).expect("its request lives");
            (op.failed, op.excused) = (true, true);
        }
        if let Some(fork) = &mut self.me.fork {
            let waits = |id: &&RequestId| fork.adopts.is_some() && fork.waits.contains(*id);
            self.tally.may_be_taken += gone.iter().filter(waits).count() as u64;
            fork.waits.retain(|id| !gone.contains(id));
        }
        self.me.bodies.retain(|id, _| !gone.contains(id));
        // What waits for it, or goes elsewhere, begins anew.
        self.me.bodies.values_mut().filter(|body| of_it(body)).for_each(|body| body.damaged = 0);
        let judge = &mut self.me.judges[server.as_usize()];
        judge.control.clear();
        judge.demand.clear();
    }

    /// A fetch goes to the other holder of its pages.
    fn moved(&mut self, request: RequestId, from: ServerIndex) {
        self.tally.moved += 1;
        self.me.reads[1] += 1;
        let body = self.me.bodies.get(&request).expect("what moves is under way");
        assert_eq!(body.asked.opcode, Opcode::Get, "only what is fetched moves");
        let to = self.me.client.request(request).ask.server;
        assert!(to != from, "what moves goes elsewhere");
        let region = self.name(to);
        let body = self.me.bodies.get_mut(&request).expect("seen above");
        if let Some(conn) = body.over.take().and_then(|link| self.me.conns.get_mut(&link)) {
            assert!(
                conn.receiving.as_ref().is_none_or(|(_, of, _)| *of != request),
                "memory-returned: bytes still come for {request:?}"
            );
            conn.unanswered.remove(&request);
            conn.moved.insert(body.asked.number, body.ask.bytes);
        }
        body.ask.server = to;
        // The judge's own servers answer only to their own number.
        body.asked.region = if self.plan.omit == Some(Rule::OwnName) { body.asked.region } else { region };
        body.damaged = 0;
        body.sent_before = false;
        let demand = body.ask.class == Class::Demand;
        self.me.judges[from.as_usize()].demand.remove(&request);
        if demand {
            self.me.judges[to.as_usize()].demand.insert(request);
        }
    }

    /// Whether the request that went elsewhere when its number was this one has no answer yet.
    fn waits_elsewhere(&self, number: u64) -> bool {
        let now = number.wrapping_add(1 << 32);
        let id = RequestId(u32::try_from(number & u64::from(u32::MAX)).expect("a half"));
        let comes = |conn: &Conn| conn.receiving.as_ref().is_some_and(|(_, of, _)| *of == id);
        self.me.client.is_under_way(now) && !self.me.conns.values().any(comes)
    }

    /// The bytes of a request begin to come; it may have gone elsewhere meanwhile.
    fn answers(&mut self, link: LinkId, request: RequestId) {
        let region = self.name(link.server);
        let body = self.me.bodies.get_mut(&request).expect("its bytes come for a request that lives");
        let from = body.ask.server;
        if from == link.server {
            return;
        }
        self.tally.turns[7] += 1;
        let Ask { class, bytes, opcode, .. } = body.ask;
        if let Some(conn) = body.over.take().and_then(|link| self.me.conns.get_mut(&link)) {
            conn.unanswered.remove(&request);
            conn.moved.insert(body.asked.number, bytes);
        }
        (body.ask.server, body.asked.region, body.over) = (link.server, region, Some(link));
        let conn = self.me.conns.get_mut(&link).expect("a head came over it");
        conn.unanswered.insert(request, (class, bytes, opcode));
        self.me.judges[from.as_usize()].demand.remove(&request);
    }

    /// When a server that was slow is to be read again.
    fn forgiven_at(&self, server: ServerIndex) -> u64 {
        self.networks[server.as_usize()].lags_until + self.op_ns() * 10
    }

    /// Who was slow is read again after a while.
    fn judge_forgiven(&mut self) {
        for server in self.servers() {
            let reads = std::mem::take(&mut self.me.judges[server.as_usize()].reads);
            let long = self.now >= self.forgiven_at(server) + self.op_ns();
            let is_judged = long && self.plan.only_lags();
            assert!(!is_judged || reads >= 100, "slow-is-forgiven: {server:?} had {reads} reads since");
        }
    }

    /// Answers of a server come late for a while: so many that it is slow, or more than may go elsewhere.
    fn lag(&mut self, server: ServerIndex) {
        let last = self.networks.iter().map(|of| of.lags_until).max().expect("at least one");
        let since = if last > 0 { self.op_ns() * 12 } else { self.op_ns() * 2 };
        if self.now < last + since {
            return;
        }
        self.each(Self::judge_forgiven);
        let (lag, lag_odds, length) = [(50 * MS, 1, 1), (5 * MS, 12, 8)][self.rng.index(2)];
        let lags_until = self.now + self.op_ns() * length;
        let network = &mut self.networks[server.as_usize()];
        *network = Network { lag, lag_odds, lags_until, ..*network };
    }

    /// Reads go elsewhere now and then, and hardly one takes long.
    fn judge_reads(&self) {
        let [reads, turned, late] = self.me.reads;
        // Some turn for silence, too.
        let most = 16 + 16 + reads * 3 / 100;
        assert!(turned <= most, "few-reads-turn: {turned} of {reads}");
        assert!(late <= 8, "late-reads-turn: {late} of {reads} took long");
    }

    fn lost(&mut self, server: ServerIndex, reason: Lost, spare: bool) {
        let (op, now, awake) = (self.op_ns(), self.now, self.awake());
        let others = |page: u64| self.holders(page).filter(|of| *of != server);
        let is_out = self.me.client.is_out(server);
        let is_its = |page: &u64| is_out || self.holders(*page).any(|of| of == server);
        let any = self.plan.copies > 1 && self.servers().any(|of| of != server && self.is_there(of));
        let alone = |page: u64| self.holders(page).count() == 1 && any;
        let kept = |page: u64| alone(page) || others(page).any(|other| self.is_there(other));
        let all = (0..PAGES).filter(is_its).all(kept);
        let filled = all || is_out && self.me.client.left_pages(server) == 0;
        let never_here = self.me.judges[server.as_usize()].member.0 == 0;
        // Holders may have changed with it.
        let turned = self.servers().any(|of| self.me.client.is_out(of) != self.me.judges[of.as_usize()].out);
        assert!(
            turned || spare == (filled || never_here),
            "loses-pages-only: {server:?} is lost, spare: {spare}, not {filled}"
        );
        if spare && filled && !turned {
            self.judge_spare(server);
        }
        self.tally.spared += u64::from(spare);
        let judge = &mut self.me.judges[server.as_usize()];
        assert!(!std::mem::replace(&mut judge.lost, true), "lost-once: {server:?}");
        judge.out_at = awake;
        judge.away_since = judge.away_since.or(Some(now));
        judge.drained = reason == Lost::Drained;
        let ages = self.me.bodies.values().filter(|body| body.ask.server == server && body.sent_before);
        let oldest = ages.map(|body| now - body.made_at).max().unwrap_or(0);
        let old = oldest + MS >= op * u64::from(DEADLINES - 1);
        let absent = judge.absent_since.take();
        // What was waited for in vain before is excused after, too.
        judge.absent_for = absent.map_or(judge.absent_for, |since| now - since);
        let judge = &self.me.judges[server.as_usize()];
        match reason {
            _ if judge.lied => {}
            Lost::Breach(breach) => panic!("honest-is-not-blamed: {breach}"),
            Lost::Deadline(_) => self.judge_deadline(server, op, old),
            Lost::Drained => {
                assert!(judge.drains, "only-draining-moves: {server:?}");
                assert_eq!(self.me.client.left_pages(server), 0, "leaves-empty: {server:?}");
            }
            Lost::GivenUp => {
                let at = &self.servers[server.as_usize()];
                let gone = at.run != judge.run || at.draining.is_some() || !at.has_lease();
                let grace = u64::try_from(self.plan.grace.as_nanos()).expect("short");
                assert!(gone || judge.dismissed || judge.drains || self.now > grace, "given-up-has-a-reason");
            }
            Lost::Connection => {
                let often = judge.breaks >= MAX_BREAKS;
                let attempt = u64::try_from((ATTEMPT + PAUSE * 2).as_nanos()).expect("short") + 500 * MS;
                let unreachable = now.saturating_sub(judge.reachable_since) < attempt;
                let long = u64::try_from(ABSENCE.as_nanos()).expect("short");
                let away = absent.is_some_and(|since| now - since >= long);
                let excused = judge.refused || judge.broke_for_good || often || old || unreachable || away;
                assert!(excused, "reachable-is-not-lost: {judge:?}");
            }
        }
        match reason {
            Lost::Breach(_) => self.tally.lost_breach += 1,
            Lost::Deadline(_) => self.tally.lost_deadline += 1,
            Lost::GivenUp => self.tally.lost_given_up += 1,
            Lost::Connection => self.tally.lost_connection += 1,
            Lost::Drained => self.tally.turns[2] += 1,
        }
        self.drop_bodies(server);
        if self.plan.renews {
            self.lacks_pages();
        }
    }

    /// Whether a server that is lost can be joined anew: it has begun anew, or has given this
    /// client up alone.
    fn may_renew(&self, server: ServerIndex) -> bool {
        let (judge, at) = (&self.me.judges[server.as_usize()], &self.servers[server.as_usize()]);
        let renews = self.plan.renews && judge.lost && !judge.lied && !at.down;
        renews && at.has_lease() && (at.run != judge.run || !at.has_member(judge.member))
    }

    /// The client hears of a lease at each server that it has lost, where there is one again.
    fn knock(&mut self) {
        let after = self.op_ns() / 20 + self.rng.below(self.op_ns() / 4);
        self.at(after, Event::Knock);
        if self.now < self.me.paused_until {
            return;
        }
        for server in self.servers() {
            if self.may_renew(server) && (self.quiet || self.rng.one_in(2)) {
                self.renew(server);
            }
        }
    }

    fn renew(&mut self, server: ServerIndex) {
        self.tally.turns[5] += 1;
        let (at, now) = (&self.servers[server.as_usize()], self.now);
        let counters = self.me.number * COUNTERS..(self.me.number + 1) * COUNTERS;
        self.me.counters[server.as_usize()].copy_from_slice(&at.counters[counters]);
        let judge = &mut self.me.judges[server.as_usize()];
        *judge = Judge {
            run: at.run,
            renewed: true,
            absent_since: Some(now),
            reachable_since: judge.reachable_since,
            well_since: now,
            heard: now,
            sent: now,
            out_at: judge.out_at,
            connected_at: judge.connected_at,
            away_since: judge.away_since,
            out: judge.out,
            ..Judge::default()
        };
        if let Some(fork) = &mut self.me.fork {
            // What was made or taken over there before.
            fork.names[server.as_usize()] = RegionId(0);
        }
        self.tell(Input::Renew { server });
        self.pump();
    }

    /// Whether a server is, or was, absent for so long that what it alone has was waited for in vain.
    fn was_long_absent(&self, server: ServerIndex) -> bool {
        let judge = &self.me.judges[server.as_usize()];
        judge.absent_since.map_or(judge.absent_for, |since| self.now - since) >= self.awaited_ns()
    }

    fn ended(&mut self, token: u64, outcome: Outcome) {
        let mut op =
            self.me.ops.remove(&token).unwrap_or_else(|| panic!("one-end: operation {token} ends twice"));
        if matches!(outcome, Outcome::Lost { .. }) {
            // What was waited for in vain.
            let client = &self.me.client;
            let in_vain =
                |(id, body): &(&RequestId, &Body)| body.token == Some(token) && !lives(client, **id, body);
            let mut gone = self.me.bodies.iter().filter(in_vain).map(|(_, body)| body.ask.server);
            op.excused |= gone.any(|server| self.was_long_absent(server));
            self.me.bodies.retain(|id, body| body.token != Some(token) || lives(client, *id, body));
        }
        for body in op.requests.iter().filter_map(|request| self.me.bodies.get(request)) {
            assert!(body.token != Some(token), "every-part: operation {token} ends before {:?}", body.asked);
        }
        for (link, conn) in self.me.conns.iter().filter(|(_, conn)| !conn.client_closed) {
            let receives = conn.receiving.as_ref().is_some_and(|(of, ..)| *of == token);
            let sends = conn.out.iter().any(|frame| frame.token == Some(token));
            assert!(!receives && !sends, "memory-returned: {link:?} still has memory of operation {token}");
        }
        let done = outcome == Outcome::Done;
        assert!(!(done && op.failed), "fails-as-one: {op:?}");
        match outcome {
            Outcome::Corrupt { .. } => {
                self.tally.corrupt += 1;
                assert!(
                    self.me.damaged.get(&token).is_some_and(|n| *n > 1),
                    "corrupt-is-damaged-twice: {token}"
                );
            }
            Outcome::Full { .. } => {
                self.tally.full += 1;
                let none_left = op.pages.iter().any(|(page, _)| !self.has_holder(*page));
                // What had it may not hold it any more.
                let moved = self.me.turned_at >= op.made_at;
                assert!(op.refused || op.excused || none_left || moved, "full-has-a-reason: {op:?}");
            }
            Outcome::Done => {}
            Outcome::Denied { server, .. } => {
                let own_run = self.servers[server.as_usize()].run == self.me.judges[server.as_usize()].run;
                assert!(
                    !own_run || self.me.judges[server.as_usize()].lied,
                    "honest-is-not-blamed: {outcome:?}"
                );
                self.tally.failed += 1;
            }
            Outcome::Lost { server, .. } => {
                let judge = &self.me.judges[server.as_usize()];
                let out = judge.lost || judge.absent_since.is_some() || judge.out_at >= op.made_at;
                assert!(out || op.excused, "lost-has-a-reason: {outcome:?} {op:?}");
                let old = self.awake() - op.made_at >= self.op_ns() * u64::from(DEADLINES - 1);
                let none_left = op.pages.iter().any(|(page, _)| !self.has_holder(*page));
                assert!(old || op.pages.is_empty() || op.excused || none_left, "one-holder-suffices: {op:?}");
                self.tally.failed += 1;
            }
        }
        // What a holder acknowledged that was lost before the other parts ended.
        let went = |page: u64| self.plan.renews && !self.has_holder(page);
        let went: Vec<bool> = op.pages.iter().map(|(page, _)| went(*page)).collect();
        for ((page, store), went) in op.pages.iter().zip(went) {
            let kept = &mut self.me.pages[usize::try_from(*page).expect("few")];
            if op.kind == Kind::Store {
                kept.stores -= 1;
                if done {
                    kept.candidates.retain(|(number, _)| number >= store);
                }
                // What was discarded since is nobody's.
                let changed = kept.candidates.last().is_some_and(|(number, _)| number > store);
                kept.unsure = !done || went || changed;
            } else {
                kept.fetches -= 1;
                if done {
                    let value = op.got.get(page).copied();
                    let known =
                        value.is_some_and(|value| kept.candidates.iter().any(|(_, may)| *may == value));
                    assert!(
                        known,
                        "fetched-is-stored: page {page} is {value:?}, not of {:?}",
                        kept.candidates
                    );
                }
            }
        }
        if done {
            match op.kind {
                Kind::Store => {
                    self.tally.stored += 1;
                    for (page, store) in &op.pages {
                        self.judge_stored(*page, *store);
                    }
                }
                Kind::Fetch => self.fetched(&op),
                Kind::Read => {
                    self.tally.read += 1;
                    let value = op.got.get(&(PAGES + op.uid)).copied();
                    assert_eq!(value, Some(op.expected), "reads-in-order: {op:?}");
                }
                Kind::Update => {
                    self.tally.updated += 1;
                    let server = &self.servers[op.server.as_usize()];
                    let own_run = server.run == self.me.judges[op.server.as_usize()].run;
                    assert!(
                        !own_run || server.updated.contains(&op.uid),
                        "update-once: {op:?} never took effect"
                    );
                }
            }
        }
    }

    fn fetched(&mut self, op: &Op) {
        self.tally.fetched += 1;
        let one = op.demand && op.pages.len() == 1;
        let long = one && self.awake() - op.made_at > 10 * MS;
        // More are late now than may go elsewhere.
        let many = self.networks.iter().any(|of| self.now < of.lags_until && of.lag_odds > 1);
        self.me.reads[2] += u64::from(long && !many);
    }

    /// An acknowledged store lies at its server, as long as that lives, or what was stored since.
    fn judge_stored(&self, page: u64, store: u64) {
        self.servers().for_each(|server| self.judge_stored_at(server, page, store));
    }

    fn judge_stored_at(&self, holder: ServerIndex, page: u64, store: u64) {
        let (server, judge) = (&self.servers[holder.as_usize()], &self.me.judges[holder.as_usize()]);
        if server.run != judge.run || judge.lost || !self.has(holder, std::iter::once(PageIndex(page))) {
            return;
        }
        let Some(value) = server.value(judge.member, self.name(holder), page) else { return };
        let candidates = &self.me.pages[usize::try_from(page).expect("few")].candidates;
        let known = candidates.iter().any(|(number, may)| *number >= store && *may == value);
        assert!(known, "acknowledged-is-kept: page {page} is {value} at {holder:?}, not of {candidates:?}");
    }

    /// Nothing waits past its deadline.
    fn check_waits(&mut self) {
        let limit = self.op_ns() * 20;
        let awake = self.awake();
        if let Some((token, op)) = self.me.ops.first_key_value() {
            assert!(awake - op.made_at <= limit, "ends-in-time: operation {token}, {op:?}");
        }
        if self.now < self.me.paused_until {
            return;
        }
        self.check_reads();
        if self.plan.only_lags() {
            self.judge_reads();
        }
        self.check_spares();
        let beat = u64::try_from(self.plan.heartbeat.as_nanos()).expect("short") / 2 + 5 * MS;
        let reconnect = self.op_ns().min(u64::try_from(self.plan.grace.as_nanos()).expect("short"));
        // One that can be done without has its time, even if that is late.
        let spare = u64::try_from(MOST_SPARE_SILENCE.as_nanos()).expect("short").min(reconnect);
        let reconnect = reconnect + spare + 5 * MS;
        let there = |judge: &Judge| !judge.lost && judge.absent_since.is_none();
        for (index, judge) in self.me.judges.iter().enumerate().filter(|(_, judge)| there(judge)) {
            let down = judge.down_since.map_or(0, |since| self.now - since.max(self.me.awake_since));
            assert!(down <= reconnect, "reconnecting-ends: it has taken {down} ns");
            let server = ServerIndex(u16::try_from(index).expect("few"));
            let idle = self.me.client.session(server).link().is_some()
                && self.me.client.session(server).load().1 == 0;
            let since = judge.sent.max(self.me.awake_since).max(judge.heard);
            assert!(
                !idle || self.now - since <= beat,
                "idle-notices: nothing was sent for {} ns",
                self.now - since
            );
        }
    }

    /// A server whose connection is broken is soon done without, if others can fill in.
    fn check_spares(&mut self) {
        let Faults { slow, pauses, poison, lies, .. } = self.plan.faults;
        if self.plan.copies == 1 || !self.plan.pages || slow || pauses || poison || lies {
            return;
        }
        let most = u64::try_from(MOST_SPARE_SILENCE.as_nanos()).expect("short") * 2;
        for server in self.servers() {
            let pages = (0..PAGES).step_by(STRIPE_PAGES as usize).map(PageIndex);
            let holders = pages.map(|page| self.me.client.placement().holders(page));
            let others = holders.filter(|of| of.has(server)).flat_map(|of| of.iter());
            let mut others = others.filter(|other| *other != server);
            let clone = self.me.client.region(CLONE);
            let knows_clone =
                |other: ServerIndex| clone.is_none_or(|region| region.names[other.as_usize()].0 != 0);
            let is_named = |other: ServerIndex| self.name(other).0 != 0 && knows_clone(other);
            let alone =
                self.me.client.placement().pairs().iter().any(|pair| pair.has(server) && pair.copy.is_none());
            let paired = !alone && !self.me.client.is_out(server);
            let filled = paired && others.all(|other| self.is_there(other) && is_named(other));
            let judge = &mut self.me.judges[server.as_usize()];
            judge.filled_since = filled.then(|| judge.filled_since.unwrap_or(self.now));
            let since = judge.filled_since.zip(judge.down_since).map(|(filled, down)| filled.max(down));
            let waits = since.filter(|_| !judge.lost && judge.absent_since.is_none());
            let waited = waits.map_or(0, |since| self.now - since);
            assert!(waited <= most, "spares-are-used: {server:?} is waited for, {waited} ns");
        }
    }

    /// A thread does not wait for one holder of its pages while nothing is wrong with the other one.
    fn check_reads(&self) {
        let faults = self.plan.faults;
        let busy = self.plan.max_bytes < 1 << 20
            || faults.slow
            || faults.pauses
            || faults.damage
            || faults.poison
            || faults.lies;
        if self.plan.copies == 1 || !self.plan.pages || self.plan.narrow || self.plan.burst > 12 || busy {
            return;
        }
        let silent = u64::try_from(MOST_SPARE_SILENCE.as_nanos()).expect("short") * 9 / 10;
        let most = if faults.silence { silent } else { 100 * MS };
        for (token, op) in self.me.ops.iter().filter(|(_, op)| op.kind == Kind::Fetch && op.demand) {
            // A server that has just come to hold pages is asked from then on.
            let since = op.made_at.max(self.me.turned_at);
            let age = self.now - since;
            let well = |server: ServerIndex, page: u64| {
                let judge = &self.me.judges[server.as_usize()];
                self.has(server, std::iter::once(PageIndex(page)))
                    && judge.down_since.is_none()
                    && judge.well_since + most < since
            };
            let served = |page: u64| self.servers().any(|holder| well(holder, page));
            let waits = age > most && op.pages.iter().all(|(page, _)| served(*page));
            assert!(!waits, "reads-find-a-holder: operation {token} waits for {age} ns, {op:?}");
        }
    }

    // --- The network and the servers -----------------------------------------------------------------------

    fn happen(&mut self, event: Event) {
        let paused = self.me.paused_until.saturating_sub(self.now);
        if paused > 0 && matches!(event, Event::Connected(_) | Event::Refused(_)) {
            // The client hears of it when it has time.
            return self.at(paused, event);
        }
        match event {
            Event::AtServer(link, message) => self.at_server(link, message),
            Event::AtClient(link, message) => {
                if let Some(conn) =
                    self.me.conns.get_mut(&link).filter(|conn| !conn.client_closed && !conn.cut)
                {
                    conn.inbox.push_back(message);
                }
            }
            Event::ClientNotices(link) => self.client_notices(link),
            Event::ServerNotices(link) => self.server_notices(link),
            Event::Connected(link) => {
                if self.me.conns.get(&link).is_some_and(|conn| !conn.client_closed && !conn.cut) {
                    self.tell(Input::Connected { link });
                }
            }
            Event::Refused(link) => {
                if let Some(conn) = self.me.conns.get_mut(&link).filter(|conn| !conn.client_closed) {
                    conn.client_closed = true;
                    self.tell(Input::Failed { link, why: Failed::ForGood });
                }
            }
            Event::Flush(link) => self.flush(link),
            Event::Program => self.program(),
            Event::Watch => self.watch(),
            Event::Fault => self.fault(),
            Event::Knock => self.knock(),
            Event::Drained(server) => self.drained(server),
            Event::Grow => self.grow(),
            Event::Expire(server) => {
                let now_ms = self.now / MS;
                self.servers[server.as_usize()].expire(now_ms);
            }
            Event::Wake => {}
            Event::Pause => {
                let pause = self.rng.below(self.op_ns());
                self.pause(pause);
            }
            Event::Cut(link) => self.cut(link),
        }
    }

    /// The client's kernel takes bytes, as many as it likes, unless the other end takes none.
    fn flush(&mut self, link: LinkId) {
        let network = self.networks[link.server.as_usize()];
        let most = if self.plan.narrow { 8 << 10 } else { 1 << 20 };
        let mut room = usize::try_from(self.rng.between(1 << 10, most)).expect("small");
        let Some(conn) = self.me.conns.get_mut(&link).filter(|conn| !conn.client_closed) else { return };
        if conn.out.is_empty() {
            conn.flushing = false;
            return;
        }
        if self.now < network.silent_to || self.now < self.me.paused_until {
            let wait = network.silent_to.max(self.me.paused_until) - self.now;
            self.at(wait.min(self.op_ns()), Event::Flush(link));
            return;
        }
        let mut left = Vec::new();
        while let Some(frame) = conn.out.front_mut() {
            let taken = frame.bytes.min(room);
            frame.bytes -= taken;
            room -= taken;
            if frame.bytes > 0 {
                break;
            }
            let frame = conn.out.pop_front().expect("seen above");
            conn.departed.push(frame.number);
            left.push(frame.message);
        }
        let waiting = conn.out.iter().map(|frame| frame.bytes).sum();
        for message in left {
            self.carry_to_server(link, message);
        }
        self.tell(Input::Written { link, waiting });
        let pause = if self.plan.narrow { 200 * US } else { 20 * US };
        self.at(pause, Event::Flush(link));
    }

    fn carry_to_server(&mut self, link: LinkId, message: ToServer) {
        let network = self.networks[link.server.as_usize()];
        let jitter = self.rng.below(network.delay + 1);
        let conn = self.me.conns.get_mut(&link).expect("something left over it");
        conn.at_server = (self.now + network.delay + jitter).max(network.silent_to).max(conn.at_server + 1);
        let after = conn.at_server - self.now;
        self.at(after, Event::AtServer(link, message));
    }

    fn carry_to_client(&mut self, link: LinkId, message: ToClient, after: u64) {
        let network = self.networks[link.server.as_usize()];
        let jitter = self.rng.below(network.delay + 1);
        let conn = self.me.conns.get_mut(&link).expect("something came over it");
        let leaves = self.now + after;
        conn.at_client = (leaves + network.delay + jitter).max(network.silent_from).max(conn.at_client + 1);
        let after = conn.at_client - self.now;
        self.at(after, Event::AtClient(link, message));
    }

    fn at_server(&mut self, link: LinkId, message: ToServer) {
        let Some(conn) = self.me.conns.get_mut(&link) else { return };
        let server = &mut self.servers[link.server.as_usize()];
        if server.down || conn.run != server.run {
            return;
        }
        if conn.cut {
            // What was on its way may still come, much later, over a connection that looks
            // alive to the server.
            let Some(late) = conn.late else { return };
            if late > 0 {
                self.at(late, Event::AtServer(link, message));
                return;
            }
        }
        match message {
            ToServer::Attach(lease, member, run) => {
                let attached = server.attach(&self.plan, lease, member, run);
                let conn = self.me.conns.get_mut(&link).expect("seen above");
                let header = Header::request(Opcode::AttachLease, ATTACH_NUMBER);
                let run = conn.run;
                let (status, mut grant) = match attached {
                    Ok((membership, grant)) => {
                        conn.membership = Some(membership);
                        conn.attached = true;
                        (Status::Ok, Some(grant))
                    }
                    Err(status) => (status, None),
                };
                if self.networks[link.server.as_usize()].lies && !self.quiet && self.rng.one_in(6) {
                    self.lie(link.server);
                    if let Some(grant) = &mut grant {
                        match self.rng.below(2) {
                            0 => grant.member.0 += 1,
                            _ => grant.max_requests = 0,
                        }
                    }
                }
                let message = ToClient {
                    header: header.reply(status),
                    values: Vec::new(),
                    grant,
                    run,
                    if_in_link: None,
                };
                self.carry_to_client(link, message, 0);
                if status == Status::Ok && self.servers[link.server.as_usize()].draining.is_some() {
                    self.say_draining(link);
                }
            }
            ToServer::Request(asked) => self.serve(link, &asked),
        }
    }

    /// The server says that it ends.
    fn say_draining(&mut self, link: LinkId) {
        let header = Header::request(Opcode::Draining, 0).with_arg(1000);
        let run = self.me.conns[&link].run;
        let message = ToClient { header, values: Vec::new(), grant: None, run, if_in_link: None };
        self.carry_to_client(link, message, 0);
    }

    /// The server drains: it says so, also to who comes later.
    fn drain(&mut self, index: usize) {
        let server = ServerIndex(u16::try_from(index).expect("few"));
        self.servers[index].draining = Some(self.now + self.op_ns() * 4);
        self.each(|world| {
            let up = |(link, conn): (&LinkId, &Conn)| {
                (link.server == server && conn.up && !conn.cut).then_some(*link)
            };
            if let Some(link) = world.me.conns.iter().find_map(up) {
                world.say_draining(link);
            }
        });
        let after = self.op_ns() / 10;
        self.at(after, Event::Drained(server));
    }

    fn drained(&mut self, server: ServerIndex) {
        let of = &self.servers[server.as_usize()];
        match of.draining {
            Some(until) if self.now < until && of.has_lease() && !self.quiet => {
                let after = self.op_ns() / 10;
                self.at(after, Event::Drained(server));
            }
            Some(_) => self.restart(server.as_usize()),
            None => {}
        }
    }

    /// One more server is named to each client.
    fn grow(&mut self) {
        if self.quiet {
            return;
        }
        self.tally.turns[4] += 1;
        let index = self.servers.len();
        let (server, _) = Server::new(&self.plan, index, index as u64 + 1);
        self.servers.push(server);
        self.networks.push(Network { delay: self.rng.between(20, 2000) * US, ..Network::default() });
        self.each(|world| world.add_grown(index));
    }

    fn add_grown(&mut self, index: usize) {
        let run = self.servers[index].run;
        let absent_since = Some(self.now);
        let judge = Judge {
            run,
            absent_since,
            away_since: absent_since,
            out: true,
            well_since: self.now,
            ..Judge::default()
        };
        self.me.judges.push(judge);
        self.me.add_later(&self.plan, Time(self.now));
        if let Some(fork) = &mut self.me.fork {
            fork.names.push(RegionId(0));
        }
    }

    fn serve(&mut self, link: LinkId, asked: &Asked) {
        let network = self.networks[link.server.as_usize()];
        let Some(membership) = self.me.conns[&link].membership else { return };
        if self.poison == Some(asked.uid) {
            // What others asked is answered before.
            let after = self.op_ns() / 4;
            self.at(after, Event::Cut(link));
            return;
        }
        let server = &mut self.servers[link.server.as_usize()];
        let answer = server.request(membership, asked);
        let run = server.run;
        let conn = self.me.conns.get_mut(&link).expect("seen above");
        let slow = if self.now < network.slow_until { network.slow } else { 0 };
        conn.free_at = (conn.free_at.max(self.now) + slow).min(network.slow_until.max(self.now));
        let after = conn.free_at - self.now;
        let message = reply(asked, answer, run);
        if conn.cut {
            return;
        }
        let lags = self.now < network.lags_until && self.rng.one_in(network.lag_odds);
        let after = if lags { after + network.lag } else { after };
        let odds = if self.plan.lie.is_some() { 8 } else { 40 };
        if network.lies && !self.quiet && self.rng.one_in(odds) {
            self.tell_a_lie(link, &message);
        }
        if self.me.answers.len() == REMEMBERED_ANSWERS {
            self.me.answers.pop_front();
        }
        self.me.answers.push_back((link.server, message.clone()));
        self.carry_to_client(link, message, after);
    }

    fn lie(&mut self, server: ServerIndex) {
        self.tally.lies += 1;
        self.me.judges[server.as_usize()].lied = true;
    }

    /// Something that was not asked, on top of the answer.
    fn tell_a_lie(&mut self, link: LinkId, answer: &ToClient) {
        let mut lie = answer.clone();
        let kind = self.plan.lie.unwrap_or_else(|| self.rng.below(4));
        match kind {
            0 => {
                // An answer of before: to what had the same slot as something that waits now,
                // if there is one.
                let waits = |old: &ToClient| {
                    self.me.bodies.iter().any(|(id, body)| {
                        let same_slot = old.header.request & u64::from(u32::MAX) == u64::from(id.0);
                        let earlier = same_slot && old.header.request != body.asked.number;
                        earlier && body.over == Some(link) && body.asked.opcode == old.header.opcode
                    })
                };
                let apt = self.me.answers.iter().position(|(_, old)| waits(old));
                let at = match (apt, self.plan.lie) {
                    (Some(at), _) => at,
                    (None, Some(_)) => return,
                    (None, None) => self.rng.index(self.me.answers.len().max(1)),
                };
                let Some((_, old)) = self.me.answers.get(at) else { return };
                lie = ToClient { run: answer.run, ..old.clone() };
            }
            1 => {
                let opcodes = [Opcode::Get, Opcode::Put, Opcode::Gather, Opcode::FetchOp, Opcode::Discard];
                let other = opcodes[self.rng.index(opcodes.len())];
                if other == lie.header.opcode {
                    return;
                }
                lie.header.opcode = other;
                lie.header.bulk_len = 0;
            }
            2 => {
                let sent = |body: &&Body| body.over.is_some_and(|over| over.server != link.server);
                let Some(body) = self.me.bodies.values().find(sent) else { return };
                lie = reply(
                    &body.asked,
                    Answer { status: Some(Status::Ok), values: vec![0; 64], ..Answer::default() },
                    answer.run,
                );
            }
            _ => {
                let Some(frame) = self.me.conns[&link].out.iter().find(|frame| frame.bytes > 0) else {
                    return;
                };
                let ToServer::Request(asked) = &frame.message else { return };
                if asked.opcode != Opcode::Put {
                    return;
                }
                lie = reply(asked, Answer { status: Some(Status::Ok), ..Answer::default() }, answer.run);
                lie.if_in_link = Some(frame.number);
            }
        }
        self.lie(link.server);
        self.carry_to_client(link, lie, 0);
    }

    /// Cuts a connection: each end notices in its own time.
    fn cut(&mut self, link: LinkId) {
        let late = match self.rng.below(3) {
            0 => None,
            1 => Some(0),
            _ => Some(self.rng.between(1, 400) * MS),
        };
        let Some(conn) = self.me.conns.get_mut(&link).filter(|conn| !conn.cut && !conn.client_closed) else {
            return;
        };
        conn.cut = true;
        conn.late = late;
        self.tally.cuts += 1;
        let (soon, later) = (self.rng.below(20 * MS), self.rng.below(200 * MS));
        self.at(soon, Event::ClientNotices(link));
        if self.plan.faults.pauses && self.rng.one_in(3) {
            // Soon after it has noticed.
            let after = soon + self.rng.below(40 * MS);
            self.at(after, Event::Pause);
        }
        self.at(later, Event::ServerNotices(link));
    }

    fn client_notices(&mut self, link: LinkId) {
        if self.now < self.me.paused_until {
            let wait = self.me.paused_until - self.now;
            return self.at(wait, Event::ClientNotices(link));
        }
        let Some(conn) = self.me.conns.get_mut(&link).filter(|conn| !conn.client_closed) else { return };
        if !conn.up {
            conn.client_closed = true;
            self.tell(Input::Failed { link, why: Failed::MayPass });
            self.pump();
            return;
        }
        let awake = self.awake();
        let judge = &mut self.me.judges[link.server.as_usize()];
        judge.breaks += 1;
        judge.connected_at = None;
        judge.down_since = Some(self.now);
        judge.well_since = self.now;
        judge.down_at = awake;
        self.tell(Input::Down { link, why: Break::MayPass });
        self.pump();
        let judge = &self.me.judges[link.server.as_usize()];
        assert!(judge.lost || judge.breaks <= MAX_BREAKS, "breaks-end: {} without an answer", judge.breaks);
    }

    fn server_notices(&mut self, link: LinkId) {
        let Some(conn) = self.me.conns.get_mut(&link) else { return };
        let server = &mut self.servers[link.server.as_usize()];
        if conn.run != server.run || server.down {
            return;
        }
        // From now on nothing more comes of it.
        conn.late = None;
        if let Some(membership) = conn.membership.take() {
            server.disconnected(self.now / MS, membership);
            if let Some(due) = server.next_expiry_ms() {
                let after = (due * MS).saturating_sub(self.now);
                self.at(after, Event::Expire(link.server));
            }
        }
    }

    // --- Faults --------------------------------------------------------------------------------------------

    fn fault(&mut self) {
        if self.quiet {
            return;
        }
        let op = self.op_ns();
        let gap = self.rng.between(op / 50, op / 2);
        self.at(gap, Event::Fault);
        let (faults, lags) = (self.plan.faults, self.plan.lags);
        let Faults {
            cuts,
            silence,
            slow,
            pauses,
            restarts,
            full,
            drain,
            damage,
            hangs,
            poison,
            dismissals,
            ..
        } = faults;
        let kinds = [
            cuts, cuts, cuts, silence, slow, pauses, restarts, full, drain, damage, hangs, poison,
            dismissals, lags,
        ];
        let enabled: Vec<usize> = (0..kinds.len()).filter(|kind| kinds[*kind]).collect();
        if enabled.is_empty() {
            return;
        }
        let kind = enabled[self.rng.index(enabled.len())];
        let index = self.rng.index(self.servers.len());
        let server = ServerIndex(u16::try_from(index).expect("few"));
        let now = self.now;
        if self.other.is_some() {
            let number = self.rng.index(2);
            self.turn(number);
        }
        match kind {
            0..=2 => {
                let of = |(link, conn): (&LinkId, &Conn)| {
                    (link.server == server && !conn.cut && !conn.client_closed).then_some(*link)
                };
                if let Some(link) = self.me.conns.iter().find_map(of) {
                    self.cut(link);
                }
            }
            3 => {
                let most = if self.rng.one_in(8) { op * 40 } else { op };
                let until = now + self.rng.below(most);
                let ways = self.rng.between(1, 3);
                let network = &mut self.networks[index];
                if ways & 1 != 0 {
                    network.silent_to = network.silent_to.max(until);
                }
                if ways & 2 != 0 {
                    network.silent_from = network.silent_from.max(until);
                }
                self.unreachable(index, until);
            }
            4 => {
                let network = &mut self.networks[index];
                // In between it catches up: what is stored waits behind what is fetched.
                if now >= network.slow_until + op * 3 {
                    (network.slow, network.slow_until) = (op / 4, now + op);
                }
            }
            5 => {
                let pause = self.rng.below(op * 2);
                self.pause(pause);
            }
            6 if self.rng.one_in(4) => self.restart(index),
            7 => {
                let room = if self.rng.one_in(2) { PAGES * 4 } else { self.rng.below(64) };
                self.servers[index].set_room(room);
            }
            8 if self.plan.copies > 1 && self.rng.one_in(2) && self.servers[index].draining.is_none() => {
                self.drain(index)
            }
            8 => {
                let up = |(link, conn): (&LinkId, &Conn)| {
                    (link.server == server && conn.up && !conn.cut).then_some(*link)
                };
                if let Some(link) = self.me.conns.iter().find_map(up) {
                    self.say_draining(link);
                }
            }
            9 => self.damage(),
            10 => {
                let until = now + self.rng.below(op);
                self.networks[index].hang_until = until;
                self.unreachable(index, until);
            }
            11 => self.poisons = true,
            12 if self.rng.one_in(8) => {
                let judge = &mut self.me.judges[index];
                judge.dismissed = true;
                self.servers[index].dismiss(judge.member);
            }
            13 => self.lag(server),
            _ => {}
        }
    }

    fn damage(&mut self) {
        for _ in 0..self.rng.below(200) {
            let page = self.rng.below(PAGES);
            self.damage_once.insert(page);
        }
        if self.rng.one_in(8) {
            let page = self.rng.below(PAGES);
            self.damage_always.insert(page);
        }
    }

    /// The client gets no time for so long.
    fn pause(&mut self, pause: u64) {
        let now = self.now;
        if self.me.paused_until <= now && !self.quiet {
            self.me.paused_until = now + pause;
            self.me.paused += pause;
            self.me.last_pause = pause;
            self.me.awake_since = now + pause;
            self.at(pause, Event::Wake);
            for judge in &mut self.me.judges {
                judge.unreachable(now + pause);
            }
        }
    }

    fn unreachable(&mut self, index: usize, until: u64) {
        self.each(|world| world.me.judges[index].unreachable(until));
    }

    /// The process ends; another run begins at the same address, and may have lent the same numbers.
    fn restart(&mut self, index: usize) {
        let server = ServerIndex(u16::try_from(index).expect("few"));
        self.each(|world| {
            let links = world.me.conns.keys().copied().filter(|link| link.server == server);
            for link in links.collect::<Vec<_>>() {
                world.cut(link);
                world.me.conns.get_mut(&link).expect("listed").late = None;
            }
            world.me.judges[index].broke_for_good = true;
        });
        let run = self.servers[index].run + LATER_RUN;
        (self.servers[index], _) = Server::new(&self.plan, index, run);
        self.servers[index].down = self.rng.one_in(3);
    }

    // --- The program ---------------------------------------------------------------------------------------

    fn program(&mut self) {
        let grows = !matches!(self.child, Child::Unborn | Child::Grown);
        if self.quiet && !grows {
            return;
        }
        let op = self.op_ns();
        let gap =
            if self.plan.idle && self.rng.one_in(6) { op * 3 } else { self.rng.between(op / 100, op / 5) };
        self.at(gap, Event::Program);
        if self.now < self.me.paused_until || self.me.ops.len() > 600 {
            return;
        }
        self.pump();
        if self.me.fork.is_some() {
            return self.end_fork();
        }
        if self.me.number == 0 && grows && (self.quiet || self.rng.one_in(2)) {
            self.raise();
        }
        if self.quiet || self.me.client.region(self.me.of).is_none() {
            return;
        }
        let quiet = self.me.ops.is_empty()
            && !self.me.client.sessions().any(rampool_session::Session::has_write_backs);
        if quiet && self.plan.copies > 1 && self.rng.one_in(6) {
            return self.fork();
        }
        let burst = if self.rng.one_in(8) { self.plan.burst } else { 12 };
        for _ in 0..self.rng.between(1, burst) {
            let kind = match (self.plan.updates, self.plan.pages) {
                (true, _) => 8,
                (_, true) => self.rng.below(7),
                _ => self.rng.below(12),
            };
            match kind {
                0..=2 => self.store(),
                3..=5 => self.fetch(Class::Demand),
                6 => self.fetch(Class::Prefetch),
                7 => self.discard(),
                8 | 9 => self.update(),
                10 => self.read(),
                _ => self.make_region(),
            }
        }
        self.pump();
    }

    /// A thread that waits for a page again and again.
    fn watch(&mut self) {
        let (least, most) = if self.plan.only_lags() { (1, 4) } else { (5, 50) };
        let pause = self.rng.between(least * MS, most * MS);
        self.at(pause, Event::Watch);
        let is_held_up = self.now < self.me.paused_until || self.me.fork.is_some();
        if is_held_up || self.me.client.region(self.me.of).is_none() || self.me.ops.len() > 600 {
            return;
        }
        let page = self.rng.below(PAGES);
        let kept = &mut self.me.pages[usize::try_from(page).expect("few")];
        if kept.stores == 0 {
            kept.fetches += 1;
            let token = self.begin(Kind::Fetch, vec![(page, 0)]);
            let extent = Extent::page(PageIndex(page));
            self.pages_of(token, Class::Demand, Opcode::Get, &[extent], &[]);
            self.pump();
        }
    }

    fn extents(&mut self, allowed: impl Fn(&Page) -> bool) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for _ in 0..self.rng.between(1, 3) {
            let long = if self.rng.one_in(4) { 200 } else { 12 };
            let count = self.rng.between(1, long);
            let first = self.rng.below(PAGES - count);
            let pages = first..first + count;
            let apart =
                extents.iter().all(|other| other.end().0 <= pages.start || pages.end <= other.first.0);
            let free = pages.clone().all(|page| allowed(&self.me.pages[usize::try_from(page).expect("few")]));
            if apart && free {
                extents.push(Extent::new(PageIndex(first), u32::try_from(count).expect("few")));
            }
        }
        extents
    }

    fn begin(&mut self, kind: Kind, pages: Vec<(u64, u64)>) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let made_at = self.awake();
        let got = BTreeMap::new();
        let requests = Vec::new();
        let op = Op {
            kind,
            pages,
            got,
            expected: 0,
            uid: 0,
            server: ServerIndex(0),
            made_at,
            requests,
            demand: false,
            failed: false,
            excused: false,
            refused: false,
        };
        self.me.ops.insert(token, op);
        token
    }

    fn pages_of(
        &mut self,
        token: u64,
        class: Class,
        opcode: Opcode,
        extents: &[Extent],
        values: &[Vec<u64>],
    ) {
        let op = self.me.client.begin(token, opcode == Opcode::Put);
        let takes = |server: ServerIndex, page: PageIndex| match opcode {
            Opcode::Put => self.is_there(server) && self.name(server).0 != 0,
            _ => {
                let has = self.me.client.has_page(server, self.me.of, page);
                (self.is_there(server) || self.is_awaited(server)) && has
            }
        };
        let stores = opcode == Opcode::Put;
        let may =
            |of: ServerIndex, page: PageIndex| !stores || self.me.client.placement().holders(page).has(of);
        let has_holder = |page: PageIndex| self.servers().any(|of| may(of, page) && takes(of, page));
        let excused = !extents.iter().flat_map(Extent::pages).all(has_holder);
        self.me.ops.get_mut(&token).expect("just begun").excused = excused;
        let mut parts: BTreeMap<RequestId, Asked> = BTreeMap::new();
        let pages =
            Pages { of: self.me.of, op, opcode, class, limit: if opcode == Opcode::Put { 32 } else { 64 } };
        let mut order = Vec::new();
        let (client, now) = (&mut self.me.client, Time(self.now));
        for (place, extent) in extents.iter().enumerate() {
            client.submit_pages(now, pages, *extent, |fill| {
                fill_part(fill, opcode, &values[place.min(values.len().max(1) - 1)..], &mut parts, &mut order)
            });
        }
        client.close_pages(pages, |fill| fill_part(fill, opcode, &[], &mut parts, &mut order));
        for id in order {
            let mut asked = parts.remove(&id).expect("it was filled");
            let ask = self.me.client.request(id).ask;
            if ask.op != Some(op) || !self.me.client.is_under_way(self.me.client.number(id)) {
                // It has ended.
                self.me.ops.get_mut(&token).expect("it is not sealed").failed = true;
                continue;
            }
            asked.region = ask.region;
            self.note(id, ask, asked, Some(token));
        }
        self.me.ops.get_mut(&token).expect("it is not sealed").demand = class == Class::Demand;
        self.tell(Input::Sealed(op));
    }

    /// The judge notes a request that was submitted.
    fn note(&mut self, id: RequestId, ask: Ask, mut asked: Asked, token: Option<u64>) {
        asked.uid = self.next_uid;
        self.next_uid += 1;
        if self.poisons && self.poison.is_none() && asked.opcode == Opcode::Get {
            self.poison = Some(asked.uid);
        }
        if let Some(op) = token.and_then(|token| self.me.ops.get_mut(&token)) {
            op.requests.push(id);
            op.server = ask.server;
            op.uid = asked.uid;
            op.failed |= self.me.judges[ask.server.as_usize()].lost;
        }
        if let Some(before) = self.me.bodies.get(&id).filter(|before| before.token != token) {
            // It has ended without a word.
            let in_vain = self.was_long_absent(before.ask.server);
            if let Some(op) = before.token.and_then(|token| self.me.ops.get_mut(&token)) {
                op.excused |= in_vain;
            }
        }
        // What had this number before has ended.
        self.me.judges.iter_mut().for_each(|judge| _ = judge.demand.remove(&id));
        let judge = &mut self.me.judges[ask.server.as_usize()];
        let waits = asked.opcode == Opcode::Get && token.is_some();
        if judge.lost || judge.absent_since.is_some() && !waits {
            return;
        }
        match ask.class {
            Class::Control => _ = judge.control.insert(id),
            Class::Demand => {
                judge.demand.insert(id);
                self.me.demanded_at = Some(self.now);
                self.me.reads[0] += 1;
            }
            _ => {}
        }
        let made_at = self.now;
        self.me
            .bodies
            .insert(id, Body { ask, asked, token, over: None, sent_before: false, made_at, damaged: 0 });
    }

    fn store(&mut self) {
        let extents = self.extents(|page| page.fetches == 0);
        let mut pages = Vec::new();
        let number = self.next_store;
        self.next_store += 1;
        let mut values = Vec::new();
        for extent in &extents {
            let mut of_extent = Vec::new();
            for page in extent.pages() {
                let value = if self.rng.one_in(8) { 0 } else { number << 16 | page.0 };
                let kept = &mut self.me.pages[usize::try_from(page.0).expect("few")];
                kept.stores += 1;
                kept.candidates.push((number, value));
                pages.push((page.0, number));
                of_extent.push(value);
            }
            values.push(of_extent);
        }
        let token = self.begin(Kind::Store, pages);
        self.pages_of(token, Class::WriteBack, Opcode::Put, &extents, &values);
    }

    fn fetch(&mut self, class: Class) {
        let extents = self.extents(|page| page.stores == 0);
        let pages: Vec<(u64, u64)> = extents.iter().flat_map(Extent::pages).map(|page| (page.0, 0)).collect();
        for (page, _) in &pages {
            self.me.pages[usize::try_from(*page).expect("few")].fetches += 1;
        }
        let token = self.begin(Kind::Fetch, pages);
        self.pages_of(token, class, Opcode::Get, &extents, &[]);
    }

    fn discard(&mut self) {
        let extents = self.extents(|page| page.fetches == 0);
        let number = self.next_store;
        self.next_store += 1;
        for extent in extents {
            for page in extent.pages() {
                let kept = &mut self.me.pages[usize::try_from(page.0).expect("few")];
                kept.candidates.push((number, 0));
                kept.unsure = true;
            }
            let mut made: Vec<(RequestId, Extent)> = Vec::new();
            let (client, now) = (&mut self.me.client, Time(self.now));
            client.discard_pages(now, self.me.of, extent, |id, extent| {
                made.retain(|(other, _)| *other != id);
                made.push((id, extent));
            });
            for (id, extent) in made {
                let ask = self.me.client.request(id).ask;
                let lives = self.me.client.is_under_way(self.me.client.number(id));
                if lives && ask.opcode == Opcode::Discard {
                    let asked = Asked { extents: vec![extent], ..Asked::of(Opcode::Discard, 0, ask.region) };
                    self.note(id, ask, asked, None);
                }
            }
        }
    }

    /// The program's region is cloned: for a child, or the program itself goes on as the clone.
    fn fork(&mut self) {
        let names = self.me.client.region(self.me.of).expect("the program has a region").names.clone();
        self.me.fork = Some(Fork {
            history: self.me.client.history(self.me.of),
            names: vec![RegionId(0); names.len()],
            waits: BTreeSet::new(),
            refused: false,
            adopts: None,
        });
        self.ask_holders(Opcode::CloneRegion, names);
    }

    /// Asks all servers that are there, and waits for them.
    fn ask_holders(&mut self, opcode: Opcode, names: Vec<RegionId>) {
        for (index, name) in (0..).zip(names).filter(|(_, name)| name.0 != 0) {
            let server = ServerIndex(index);
            if !self.is_there(server) {
                continue;
            }
            let class = Class::Demand;
            let ask = Ask { class, wanted: true, ..Ask::control(server, opcode, name) };
            let id = self.me.client.reserve();
            self.me.fork.as_mut().expect("it waits for this").waits.insert(id);
            self.note(id, ask, Asked::of(opcode, 0, name), None);
            self.tell(Input::Submit(id, ask));
        }
        self.pump();
    }

    fn end_fork(&mut self) {
        if self.me.fork.as_ref().is_some_and(|fork| !fork.waits.is_empty()) {
            return;
        }
        let fork = self.me.fork.take().expect("seen above");
        if let Some((handed, runs)) = fork.adopts {
            return self.end_adoption(handed, runs, fork.names);
        }
        let complete =
            fork.history.as_ref().is_some_and(|history| self.me.client.is_complete(&fork.names, history));
        if fork.refused || !complete {
            assert!(fork.refused || !self.is_clone(&fork.names), "clones-do-not-wait: {:?}", fork.names);
            self.free(fork.names);
        } else if self.plan.child && matches!(self.child, Child::Unborn) {
            self.me.client.open_region(Time(self.now), CLONE, fork.names, fork.history);
            self.child = Child::Cloned(self.me.pages.clone());
        } else {
            self.tally.forks += 1;
            self.me.client.open_region(Time(self.now), self.me.of + 1, fork.names, fork.history);
            let old = self.me.client.close_region(self.me.of).expect("the program has a region");
            self.me.of += 1;
            self.lacks_pages();
            self.free(old.names);
        }
        self.pump();
    }

    /// Whether each page of a region with these names has a holder, and each holder has the
    /// region, or brings nothing.
    fn is_clone(&self, names: &[RegionId]) -> bool {
        let out = |server: ServerIndex| {
            let judge = &self.me.judges[server.as_usize()];
            judge.lost || judge.renewed
        };
        let named = |server: ServerIndex| names[server.as_usize()].0 != 0 && self.is_there(server);
        let mut pairs = self.me.client.placement().pairs().iter();
        pairs.all(|pair| pair.iter().any(named) && pair.iter().all(|server| named(server) || out(server)))
    }

    /// What no server has, the program cannot count on.
    fn lacks_pages(&mut self) {
        for page in 0..PAGES {
            let unsure = !self.has_holder(page);
            self.me.pages[usize::try_from(page).expect("few")].unsure |= unsure;
        }
    }

    fn free(&mut self, names: Vec<RegionId>) {
        for (index, name) in (0..).zip(names).filter(|(_, name)| name.0 != 0) {
            let ask = Ask::control(ServerIndex(index), Opcode::FreeRegion, name);
            self.submit(Ask { class: Class::WriteBack, ..ask }, Asked::of(Opcode::FreeRegion, 0, name), None);
        }
    }

    // --- The child ---------------------------------------------------------------------------------------

    /// What the parent has to do for its child.
    fn raise(&mut self) {
        match std::mem::replace(&mut self.child, Child::Adopting) {
            Child::Cloned(pages) => {
                let (handed, left) = self.me.client.hand_over(CLONE).expect("the clone is the parent's");
                self.free(left);
                self.pump();
                self.bear(handed, pages);
            }
            Child::Said(handed, runs) => {
                let kept = self.me.client.not_taken(&handed);
                let judges = &self.me.judges;
                let freed = HandedOver { names: kept, ..handed.clone() };
                let freed =
                    freed.where_known(|server| judges[server.as_usize()].run == runs[server.as_usize()]);
                self.free(freed);
                self.pump();
                self.child = Child::Grown;
            }
            other => self.child = other,
        }
    }

    /// A child begins, joins the servers that it can reach, and takes the clone over.
    fn bear(&mut self, handed: HandedOver, pages: Vec<Page>) {
        let mut child = Box::new(Process::new(1, &self.plan));
        child.pages = pages;
        let now = Time(self.now);
        let mut grants = Vec::new();
        let runs: Vec<u64> = self.me.judges.iter().map(|judge| judge.run).collect();
        for (index, parents) in self.me.judges.iter().enumerate() {
            let (server, network) = (&mut self.servers[index], self.networks[index]);
            let silent = network.silent_to.max(network.silent_from).max(network.hang_until);
            let grown = index >= usize::from(self.plan.servers);
            let reached = !server.down && self.now >= silent && !self.rng.one_in(4) && !grown;
            // It may have heard of a lease that its parent has not heard of.
            let newer = self.plan.renews && !server.down && self.rng.one_in(2);
            let run = if newer { server.run } else { parents.run };
            let mut judge = Judge {
                run,
                dismissed: parents.dismissed,
                reachable_since: parents.reachable_since,
                ..Judge::now(self.now)
            };
            let member = MemberId(0);
            match reached.then(|| server.attach(&self.plan, LeaseId(1), member, run)).and_then(Result::ok) {
                Some((membership, grant)) => {
                    let server_index = child.client.add_server(self.plan.op_deadline, now);
                    let conn = Conn::up(server.run, membership);
                    child.conns.insert(LinkId { server: server_index, connection: 0 }, conn);
                    judge.member = membership.0;
                    grants.push(Input::Granted { server: server_index, grant, reconnects: true });
                }
                None => {
                    if !grown {
                        child.client.add_absent(self.plan.op_deadline, now);
                    }
                    (judge.absent_since, judge.away_since) =
                        (Some(self.now), parents.away_since.or(Some(self.now)));
                    judge.out = grown || handed.history.out.get(index) == Some(&true);
                }
            }
            child.judges.push(judge);
        }
        child.client.place(&self.placement);
        let later = usize::from(self.plan.servers)..child.judges.len();
        later.for_each(|_| child.add_later(&self.plan, now));
        child.client.begin_without(&handed.history.out);
        if !child.client.has_all_pages() {
            // It ends at once.
            for (server, judge) in self.servers.iter_mut().zip(&child.judges) {
                server.dismiss(judge.member);
            }
            self.child = Child::Said(handed, runs);
            return;
        }
        self.other = Some(child);
        self.turn(1);
        grants.into_iter().for_each(|granted| self.tell(granted));
        let judges = &self.me.judges;
        let names = handed.where_known(|server| judges[server.as_usize()].run == runs[server.as_usize()]);
        self.me.fork = Some(Fork {
            history: None,
            names: vec![RegionId(0); names.len()],
            waits: BTreeSet::new(),
            refused: false,
            adopts: Some((handed, runs)),
        });
        self.ask_holders(Opcode::AdoptRegion, names);
        self.at(0, Event::Program);
        if self.plan.renews {
            self.at(0, Event::Knock);
        }
        if self.plan.faults.cuts && self.rng.one_in(2) {
            self.cut_while_adopting();
        }
        self.turn(0);
    }

    /// A server takes part in the adoption, but its answer may be lost, and it cannot be reached for a while.
    fn cut_while_adopting(&mut self) {
        let links: Vec<LinkId> = self.me.conns.keys().copied().collect();
        let link = links[self.rng.index(links.len())];
        let index = link.server.as_usize();
        let until = self.now + self.rng.below(self.op_ns());
        let network = &mut self.networks[index];
        network.silent_from = network.silent_from.max(until);
        let after = self.rng.below(network.delay * 4);
        self.unreachable(index, until);
        self.at(after, Event::Cut(link));
    }

    /// All servers have answered the child.
    fn end_adoption(&mut self, handed: HandedOver, runs: Vec<u64>, names: Vec<RegionId>) {
        let taken: Vec<bool> = names.iter().map(|name| name.0 != 0).collect();
        let missing = handed.names.iter().zip(&taken).filter(|(name, taken)| name.0 != 0 && !**taken);
        self.tally.not_taken += missing.count() as u64;
        if self.me.client.take_over(Time(self.now), self.me.of, &handed, &taken) {
            self.tally.children += 1;
            self.tally.taken += taken.iter().filter(|taken| **taken).count() as u64;
        } else {
            // It cannot go on; with it, what it has taken would end.
            self.free(names);
        }
        self.lacks_pages();
        self.child = Child::Said(handed, runs);
        self.pump();
    }

    fn submit(&mut self, ask: Ask, asked: Asked, token: Option<u64>) {
        let id = self.me.client.reserve();
        self.note(id, ask, asked, token);
        self.tell(Input::Submit(id, ask));
    }

    fn direct(&mut self, kind: Kind, opcode: Opcode, bytes: u64, wanted: bool) {
        let server = ServerIndex(u16::try_from(self.rng.index(self.plan.servers.into())).expect("few"));
        let counter = self.rng.index(COUNTERS);
        if self.me.judges[server.as_usize()].absent_since.is_some() {
            return;
        }
        let token = self.begin(kind, Vec::new());
        self.me.ops.get_mut(&token).expect("just made").expected =
            self.me.counters[server.as_usize()][counter];
        if kind == Kind::Update {
            self.me.counters[server.as_usize()][counter] += 1;
        }
        let op = self.me.client.begin(token, false);
        let region = self.servers[server.as_usize()].region;
        let at = counter as u64 * 8;
        let ask = Ask {
            class: Class::Demand,
            op: Some(op),
            bytes,
            at,
            span: (at, at + 8),
            wanted,
            ..Ask::control(server, opcode, region)
        };
        let counter = self.me.number * COUNTERS + counter;
        self.submit(ask, Asked { counter, ..Asked::of(opcode, 0, region) }, Some(token));
        self.tell(Input::Sealed(op));
    }

    fn update(&mut self) {
        self.direct(Kind::Update, Opcode::FetchOp, 0, true);
    }

    fn read(&mut self) {
        self.direct(Kind::Read, Opcode::Gather, 8, false);
    }

    fn make_region(&mut self) {
        let server = ServerIndex(u16::try_from(self.rng.index(self.servers.len())).expect("few"));
        let ask = Ask { wanted: true, ..Ask::control(server, Opcode::CreateRegion, RegionId(0)) };
        self.submit(ask, Asked::of(Opcode::CreateRegion, 0, RegionId(0)), None);
    }
}

impl Process {
    fn new(number: usize, plan: &Plan) -> Self {
        let mut client = Client::new();
        if let Some(rule) = plan.omit {
            leave_out(&mut client, rule);
        }
        Self {
            number,
            client,
            turned_at: 0,
            judges: Vec::new(),
            conns: BTreeMap::new(),
            stale: Vec::new(),
            bodies: BTreeMap::new(),
            ops: BTreeMap::new(),
            pages: vec![
                Page { candidates: vec![(0, 0)], stores: 0, fetches: 0, unsure: false };
                usize::try_from(PAGES).expect("few")
            ],
            of: 0,
            fork: None,
            pieces: Default::default(),
            demanded_at: None,
            reads: [0; 3],
            counters: vec![[0; COUNTERS]; usize::from(plan.servers)],
            answers: VecDeque::new(),
            head: None,
            receiving: None,
            damaged: BTreeMap::new(),
            paused_until: 0,
            paused: 0,
            awake_since: 0,
            last_pause: 0,
        }
    }

    /// One more server.
    fn add_later(&mut self, plan: &Plan, now: Time) {
        self.client.grow(plan.op_deadline, now, 1);
        self.counters.push([0; COUNTERS]);
    }
}

impl Judge {
    fn now(now: u64) -> Self {
        Self { well_since: now, heard: now, sent: now, ..Self::default() }
    }

    /// It cannot be heard of until then.
    fn unreachable(&mut self, until: u64) {
        self.reachable_since = self.reachable_since.max(until);
        self.well_since = self.well_since.max(until);
    }
}

impl Conn {
    /// One that is attached.
    fn up(run: u64, membership: Membership) -> Self {
        Self { membership: Some(membership), attached: true, up: true, ..Self::new(run) }
    }

    fn new(run: u64) -> Self {
        Self {
            membership: None,
            run,
            out: VecDeque::new(),
            flushing: false,
            departed: Vec::new(),
            inbox: VecDeque::new(),
            receiving: None,
            at_server: 0,
            at_client: 0,
            free_at: 0,
            cut: false,
            late: None,
            client_closed: false,
            attached: false,
            up: false,
            unanswered: BTreeMap::new(),
            moved: BTreeMap::new(),
        }
    }
}

impl Body {
    /// What the memory that its bytes come from or go to is called.
    fn memory(&self) -> Option<u64> {
        self.token.or(self.ask.piece.map(|piece| PIECE_TOKEN + u64::from(piece)))
    }
}

impl Asked {
    fn of(opcode: Opcode, number: u64, region: RegionId) -> Self {
        Self { number, opcode, uid: 0, region, extents: Vec::new(), values: Vec::new(), counter: 0 }
    }
}

/// Whether the machine still knows a request. One that was waited for in vain has ended without a word.
fn lives(client: &Client, id: RequestId, body: &Body) -> bool {
    client.is_under_way(client.number(id)) && client.request(id).ask.op == body.ask.op
}

/// The judge's copy of what goes into a request.
fn fill_part(
    fill: Fill,
    opcode: Opcode,
    values: &[Vec<u64>],
    parts: &mut BTreeMap<RequestId, Asked>,
    order: &mut Vec<RequestId>,
) {
    let mut begin = |id: RequestId, parts: &mut BTreeMap<RequestId, Asked>, asked: Asked| {
        // One for a lost server has ended, and its number is used again.
        order.retain(|other| *other != id);
        order.push(id);
        parts.insert(id, asked);
    };
    match fill {
        Fill::Pages { request, new, extent, before } => {
            if new {
                begin(request, parts, Asked::of(opcode, 0, RegionId(0)));
            }
            let asked = parts.get_mut(&request).expect("it is open");
            asked.extents.push(extent);
            if opcode == Opcode::Put {
                let before = before as usize;
                asked.values.extend(&values[0][before..before + extent.count as usize]);
            }
        }
        Fill::Same { request, like } => {
            let same = parts[&like].clone();
            begin(request, parts, same);
        }
    }
}

fn reply(asked: &Asked, answer: Answer, run: u64) -> ToClient {
    let status = answer.status.expect("every request is answered");
    let mut header = Header::request(asked.opcode, asked.number).reply(status).with_arg(answer.arg);
    header.region = answer.region;
    let reads = status == Status::Ok && matches!(asked.opcode, Opcode::Get | Opcode::Gather);
    header.bulk_len = if reads { 8 } else { 0 };
    ToClient { header, values: answer.values, grant: None, run, if_in_link: None }
}
