//! Tenants that know the whole protocol and mean no good: requests that are well-formed, in the worst order,
//! whose answers are not read. Each has a quota, one a rate, and now and then the key of one is revoked. The
//! server lives, serves the others, keeps each within its quota and its own memory within what it states, and
//! has everything back when they are gone.

use super::*;
use rampool_lease::{Quota, Revoked, Rules};
use rampool_net::key::Key;
use rampool_net::transport::{HandshakeError, PieceMut, connect};
use rampool_wire::frame::{
    AttachLease, AwaitBody, Body, Change, CopyRequest, FetchOp, LeaseId, LeaseToken, OpenLease, Push,
    PushHeads, QueueBounds, Settlement, Take,
};
use rampool_wire::session::{AcceptError, Refusal};

/// Bulk of requests, and the place of what replies bring, is this memory.
const BULK: usize = 2 << 20;
/// One in so many requests is of a kind that only a hostile client sends, such as `Draining`. Such a request
/// ends the connection, so with more of them half of a list of requests would not be reached. No client here
/// sends `Drain`: each of them has the right to it, and the server would end.
const RARELY: u64 = 200;

struct Hostile {
    client: Client,
    /// How many requests it has sent.
    said: usize,
    bulk: Vec<u8>,
    /// Of all hostile clients: they attach to each other's leases.
    granted: Vec<rampool_wire::frame::Granted>,
    /// How many of these it had when it came.
    known: usize,
}

/// The hostile tenants: `poor` has little of everything, `slow` a rate, `free` no quota.
const TENANTS: [&str; 3] = ["poor", "slow", "free"];

/// The rules for them; keys of generations below these are revoked.
fn rules(generations: [u32; 3]) -> Rules {
    let poor = Quota {
        memory_bytes: Some(12 * MIB),
        connections: Some(3),
        regions: Some(12),
        queues: Some(1),
        reply_bytes: Some(MIB),
        ..Quota::default()
    };
    let slow = Quota { rate_bytes: Some(16 * MIB), memory_bytes: Some(20 * MIB), ..Quota::default() };
    let revoked = |(tenant, generation): (&str, u32)| {
        (tenant.parse().unwrap(), Revoked::Generations((0..generation).collect()))
    };
    Rules {
        quotas: BTreeMap::from([("poor".parse().unwrap(), poor), ("slow".parse().unwrap(), slow)]),
        revoked: TENANTS.into_iter().zip(generations).map(revoked).collect(),
        ..Rules::default()
    }
}

/// What one of them connects with.
fn with_key(master: &Key, tenant: &str, generation: u32) -> LocalPolicy {
    let tenant = rampool_wire::tenant::TenantId { name: tenant.parse().unwrap(), generation };
    policy(Some(&master.derive(tenant).unwrap()), rampool_wire::session::Encryption::Off)
}

/// No tenant has more than its quota, and the server no more memory than it states.
fn is_within_bounds(server: &RunningServer) {
    let directory = server.shared.directory();
    directory.check();
    for (payer, account) in directory.accounts().all() {
        let quota = directory.accounts().rules().quota(payer);
        let within = |has: u64, quota: Option<u64>| quota.is_none_or(|quota| has <= quota);
        // Connections beyond the quota have no lease, but for those that come back to one.
        assert!(
            within(account.lent_bytes, quota.memory_bytes)
                && within(account.regions, quota.regions)
                && within(account.queues, quota.queues)
                && within(account.lost, quota.connections)
                && account.leases <= 12,
            "{payer:?} has {account:?}"
        );
    }
    drop(directory);
    let config = &server.shared.config;
    let held = server.shared.store.usage().held_bytes;
    assert!(held <= config.memory_bytes + config.transit_bytes(), "{held} bytes are held");
    let one = 2 * rampool_wire::frame::MAX_BULK_BYTES as u64;
    let waiting = server.shared.replies.waiting_bytes();
    assert!(waiting <= config.reply_bytes() + 12 * one, "{waiting} bytes of replies wait");
    for tenant in server.shared.tenants.all() {
        let waiting = tenant.replies.waiting_bytes();
        let most = if tenant.name == Some("poor".parse().unwrap()) { MIB } else { config.reply_bytes() };
        assert!(waiting <= most + 12 * one, "{waiting} bytes of replies of {:?} wait", tenant.name);
    }
}

/// What the kernel counts for this process, which other tests may share.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * OS_PAGE_BYTES as u64
}

fn pick_one<T: Copy>(rng: &mut TestRng, of: &[T]) -> T {
    of[usize::try_from(below(rng, of.len() as u64)).unwrap()]
}

/// What a client's lease has been asked so far.
fn answered(server: &RunningServer, client: &Client) -> u64 {
    let lease = server.shared.lease(client.granted().lease).unwrap();
    let counts = &lease.counts;
    [&counts.gets, &counts.puts, &counts.discards, &counts.control]
        .into_iter()
        .map(|counter| counter.load(Ordering::Relaxed))
        .sum()
}

impl Hostile {
    /// There may be no place at once: who hangs up has its place until what it asked has been done.
    fn new(server: &RunningServer, policy: LocalPolicy) -> Self {
        let until = Instant::now() + DEADLINE;
        let link = loop {
            match connect(server.addr(), policy.clone(), until) {
                Ok(link) => break link,
                Err(HandshakeError::NotAccepted(AcceptError::Refused(Refusal::TooManyConnections)))
                    if Instant::now() < until => {}
                Err(error) => panic!("{error}"),
            }
        };
        Self { client: Client::over(link), said: 0, bulk: vec![0; BULK], granted: Vec::new(), known: 0 }
    }

    /// Sends one request, without waiting for its answer. False: the connection is over.
    fn say(&mut self, rng: &mut TestRng) -> bool {
        let (header, table, bulk) = self.request(rng);
        let mut head = Vec::new();
        encode_frame(&mut head, header, &table, bulk);
        // SAFETY: the memory is as old as the client, and goes after it.
        unsafe {
            self.client.link.send(Urgency::Demand, &head, &[Piece { ptr: self.bulk.as_ptr(), len: bulk }], ())
        };
        self.client.link.flush().is_ok()
    }

    /// Takes what has been answered. False: the connection is over.
    fn hear(&mut self) -> bool {
        loop {
            match self.client.link.receive() {
                Ok(rampool_net::transport::Received::Blocked) => return true,
                Ok(rampool_net::transport::Received::Head(header)) => {
                    if let Ok(granted) = rampool_wire::frame::Granted::parse(self.client.link.table())
                        && matches!(header.opcode, Opcode::OpenLease | Opcode::AttachLease)
                        && header.status == Status::Ok
                    {
                        self.granted.push(granted);
                    }
                    if header.bulk_len > 0 {
                        let place = PieceMut { ptr: self.bulk.as_mut_ptr(), len: header.bulk_len as usize };
                        // SAFETY: it is long enough, and what is in it does not matter.
                        unsafe { self.client.link.place(&[place]) };
                    }
                }
                Ok(rampool_net::transport::Received::Bulk(_)) => {}
                Err(_) => return false,
            }
        }
    }

    fn request(&mut self, rng: &mut TestRng) -> (Header, Vec<u8>, usize) {
        let pick = |rng: &mut TestRng, of: &[u64]| of[usize::try_from(below(rng, of.len() as u64)).unwrap()];
        let mut opcode = Opcode::ALL[usize::try_from(below(rng, Opcode::ALL.len() as u64)).unwrap()];
        let number = if below(rng, 8) == 0 { self.client.number() / 2 } else { self.client.number() };
        let region = RegionId(if below(rng, 2) == 0 { 1 } else { below(rng, 7) });
        let (arg, mut table) = (pick(rng, &[0, 1, 2, 4096, MIB, 40 * MIB, u64::MAX]), Vec::new());
        let extents = [Extent::new(
            PageIndex(pick(rng, &[0, 1, 511, 1 << 30])),
            u32::try_from(below(rng, 64) + 1).unwrap(),
        )];
        let window = |rng: &mut TestRng| {
            let layout = match below(rng, 5) {
                // Takes many slices.
                4 => Layout::bytes(8).unwrap().hvector(250, 1, 4096).unwrap().hvector(120, 1, 16).unwrap(),
                0 => Layout::bytes(8).unwrap().hvector(3000, 1, 4096).unwrap(),
                1 => Layout::bytes(8).unwrap().hvector(below(rng, 20_000) + 1, 1, 16).unwrap(),
                2 => Layout::bytes(64 << 10).unwrap(),
                _ => Layout::bytes(8).unwrap().hindexed(&[(1, 4000), (2, 80), (1, 0), (1, 8000)]).unwrap(),
            };
            let len = u32::try_from(layout.size()).unwrap();
            Window { program: layout.program().clone(), from: 0, len }
        };
        if opcode == Opcode::Drain || opcode == Opcode::Draining && below(rng, RARELY) != 0 {
            opcode = Opcode::Heartbeat;
        }
        // Without a lease and a region there is little to do.
        let first = [[Opcode::OpenLease, Opcode::AttachLease], [Opcode::CreateRegion, Opcode::OpenRegion]];
        if let Some(either) = first.get(self.said).filter(|_| below(rng, 8) > 0) {
            opcode = pick_one(rng, either);
        }
        self.said += 1;
        let mut header = Header::request(opcode, number).with_region(region).with_arg(arg);
        let some_member = |granted: &[rampool_wire::frame::Granted], rng: &mut TestRng| {
            let one = usize::try_from(below(rng, granted.len().max(1) as u64)).unwrap();
            granted.get(one).cloned()
        };
        let queue = below(rng, 4);
        let mut bulk = 0;
        match opcode {
            Opcode::OpenLease => {
                let bytes = pick(rng, &[1, 4096, MIB, 8 * MIB, 1 << 40]);
                table = OpenLease { bytes, pid: 1, name: "hostile".into(), host: "\u{7f}\n".into() }.encode();
            }
            Opcode::AttachLease => {
                let known = some_member(&self.granted, rng);
                let (lease, token, member) = known
                    .map_or((LeaseId(1), LeaseToken([7; 16]), MemberId(0)), |granted| {
                        (granted.lease, granted.token, granted.member)
                    });
                let member = if below(rng, 2) == 0 { MemberId(0) } else { member };
                table = AttachLease {
                    lease,
                    token,
                    member,
                    pid: 2,
                    name: "hostile".into(),
                    host: "there".into(),
                }
                .encode();
            }
            Opcode::Get | Opcode::Discard | Opcode::Put => {
                let mut coded = Vec::new();
                if opcode == Opcode::Put {
                    let zero = below(rng, 3) == 0;
                    let entries = vec![
                        if zero { PageEntry::ZERO } else { PageEntry { crc: 1, len: 4096 } };
                        extents[0].count as usize
                    ];
                    bulk = if zero { 0 } else { 4096 * entries.len() };
                    encode_put(&mut coded, header, &extents, &entries);
                } else {
                    encode_extents(&mut coded, header, &extents);
                }
                header.arg = 1;
                table = coded[rampool_wire::frame::HEADER_BYTES..].to_vec();
            }
            Opcode::OpenRegion if below(rng, 2) == 0 => {
                header.region = 0;
                table = vec![b'a' + u8::try_from(below(rng, 4)).unwrap()];
            }
            Opcode::Gather => window(rng).encode(&mut table),
            Opcode::Scatter | Opcode::Accumulate => {
                let window = window(rng);
                bulk = window.len as usize;
                let crcs = if opcode == Opcode::Accumulate { 1 } else { window.blocks().len() };
                let crc = if below(rng, 2) == 0 { checksum::crc32c(&self.bulk[..bulk]) } else { 3 };
                window.encode_with(&vec![crc; crcs], &mut table);
                header.arg = 0x604;
            }
            Opcode::FetchOp => {
                let op = FetchOp {
                    kind: rampool_wire::elements::Kind::U64,
                    change: Change::IfEqual(0),
                    offset: 8 * below(rng, 10_000),
                    operand: 9,
                };
                (header.arg, table) = op.encode();
            }
            Opcode::Scan if below(rng, 2) == 0 => {
                let (keys, column) = (window(rng).program, window(rng));
                table = ScanRequest::keyed_table(&column, ([0; 8], [9; 8]), (region, &keys));
                header.arg = 0x0407_0104;
            }
            Opcode::Scan => {
                ScanRequest::encode_table(&window(rng), [0; 8], [9; 8], &mut table);
                header.arg = 0x07_0504;
            }
            Opcode::Copy => {
                let window = window(rng);
                let (lease, token) = some_member(&self.granted, rng)
                    .map_or((LeaseId(9), LeaseToken([0; 16])), |g| (g.lease, g.token));
                let endpoint = ["127.0.0.1:1", "unix:/dev/null", "ucx:127.0.0.1:1", "nowhere.invalid:1"];
                let endpoint =
                    endpoint[usize::try_from(below(rng, endpoint.len() as u64)).unwrap()].to_owned();
                CopyRequest { source: window.clone(), target: window, endpoint, lease, token, region }
                    .encode(&mut table);
            }
            Opcode::Goodbye => {
                let dismiss = below(rng, 4) > 0;
                header.arg =
                    some_member(&self.granted, rng).filter(|_| dismiss).map_or(0, |granted| granted.member.0);
            }
            Opcode::OpenQueue => {
                header.arg = 1;
                QueueBounds { messages: below(rng, 20) + 1, bytes: 1 << 16 }
                    .encode(["jobs", "more"][usize::try_from(queue % 2).unwrap()], &mut table);
            }
            Opcode::Push => {
                header.arg = queue;
                let body = if below(rng, 2) == 0 { Body::Bytes(5000) } else { Body::Bytes(0) };
                Push { timeout_ms: u32::try_from(pick(rng, &[0, 60_000])).unwrap(), head: b"head", body }
                    .encode(&mut table);
            }
            Opcode::PushHeads => {
                header.arg = queue;
                PushHeads::encode(0, &[b"one", b"two"], &mut table);
            }
            Opcode::Take => {
                header.arg = queue;
                let timeout_ms = u32::try_from(pick(rng, &[0, 60_000])).unwrap();
                Take { timeout_ms, most: 3, acknowledged: vec![below(rng, 5)] }.encode(&mut table);
            }
            Opcode::Settle => {
                header.arg = queue;
                [Settlement::Done, Settlement::Withdraw][usize::try_from(below(rng, 2)).unwrap()]
                    .encode(&[1, below(rng, 9)], &mut table);
            }
            Opcode::AwaitBody => {
                header.arg = queue;
                AwaitBody { number: below(rng, 9), timeout_ms: 10 }.encode(&mut table);
            }
            _ => {}
        }
        if matches!(opcode, Opcode::OpenRegion | Opcode::ResizeLease | Opcode::FetchOp)
            && header.arg == u64::MAX
        {
            header.arg = MIB;
        }
        (header, table, bulk)
    }
}

/// For so many seconds other orders of requests follow (`make soak`); each names its seed, which
/// `RAMPOOL_HOSTILE_SEED` repeats.
const SECONDS: &str = "RAMPOOL_HOSTILE_S";
const SEED: &str = "RAMPOOL_HOSTILE_SEED";

#[test]
fn well_formed_requests_in_the_worst_order_hurt_their_sender_only() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let (began, length) = (Instant::now(), Duration::from_secs(number(SECONDS).unwrap_or(0)));
    let mut seed = number(SEED).unwrap_or(0);
    let before = resident_bytes();
    loop {
        worst_order(seed);
        if !length.is_zero() {
            // This test is alone, and its server gone: nothing of it is left, but for what the allocator
            // keeps.
            let left = resident_bytes().saturating_sub(before);
            assert!(left <= 128 * MIB, "{left} bytes are resident after seed {seed}");
        }
        if began.elapsed() >= length {
            return;
        }
        seed += 1;
        println!("seed {seed}");
    }
}

fn worst_order(seed: u64) {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let master = Key::generate();
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        let mut generations = [1; 3];
        let server = Server::start(ServerConfig {
            store,
            key: Some(master.clone()),
            tenants: rules(generations),
            max_connections: 12,
            grace: Duration::from_millis(5),
            ..config(64 * MIB)
        })
        .unwrap();
        let mut victim = Client::with_lease(server.addr(), with_key(&master, "victim", 1), 24 * MIB);
        let mut rng = TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &bytes);
        let come = |generations: [u32; 3], who: usize| {
            let tenant = who % TENANTS.len();
            Hostile::new(&server, with_key(&master, TENANTS[tenant], generations[tenant]))
        };
        let mut hostile: Vec<Hostile> = (0..6).map(|who| come(generations, who)).collect();
        let (mut ended, mut granted) = (0, 0);
        for round in 0..6000 {
            let who = usize::try_from(below(&mut rng, hostile.len() as u64)).unwrap();
            let goes_on = match below(&mut rng, 40) {
                0 => false,
                1..10 => hostile[who].hear(),
                _ => hostile[who].say(&mut rng),
            };
            if !goes_on {
                // It is cut off, or cuts itself off, and comes again. The tickets that it has
                // are known to all.
                ended += 1;
                granted += hostile[who].granted.len().saturating_sub(hostile[who].known);
                let mut again = come(generations, who);
                again.granted =
                    hostile.iter().flat_map(|one| one.granted.iter().rev().take(3).cloned()).collect();
                again.known = again.granted.len();
                hostile[who] = again;
            }
            if round % 300 == 0 {
                let before = answered(&server, &victim);
                exercise(&mut victim, &mut rng, 10);
                // Some steps do nothing.
                assert!(answered(&server, &victim) >= before + 5, "the victim makes no progress");
                is_within_bounds(&server);
                assert!(!server.is_broken(), "round {round}");
            }
            if round % 1500 == 1499 {
                let revoked = usize::try_from(below(&mut rng, 3)).unwrap();
                generations[revoked] += 1;
                server.set_tenants(rules(generations));
            }
        }
        assert!(ended > 10, "they got about");
        // What was promised to the victim is there: all of it.
        let region = victim.create_region().unwrap();
        let free = 24 * MIB
            - server
                .status()
                .leases
                .iter()
                .find(|lease| lease.lease == victim.granted().lease.0)
                .unwrap()
                .used_bytes;
        let pages = usize::try_from(free / 4096).unwrap() - 64;
        for first in (0..pages).step_by(512) {
            victim
                .put(region, first as u64, &vec![vec![6; OS_PAGE_BYTES]; 512.min(pages - first)], false)
                .unwrap();
        }
        is_within_bounds(&server);
        // They got about: what nobody was granted, or refused, shows nothing.
        let did = server.status().operations;
        let of_victim = answered(&server, &victim);
        let of_hostile = did.puts + did.gets + did.discards + did.control - of_victim;
        assert!(of_hostile > 1000 && did.refused > 100 && granted > 30, "{of_victim} {granted} {did:?}");
        drop((hostile, victim));
        idle(&server);
        for tenant in TENANTS.into_iter().chain(["victim"]) {
            let has = server.shared.directory().accounts().of(Some(tenant.parse().unwrap()));
            assert_eq!(has, rampool_lease::Account::default(), "{tenant}");
        }
        assert_eq!(server.shared.directory().accounts().all().count(), 0, "accounts return to zero");
        assert!(!server.is_broken());
        Client::with_lease(server.addr(), with_key(&master, "victim", 1), 64 * MIB);
    }
}
