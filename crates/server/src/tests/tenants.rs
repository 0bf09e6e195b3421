//! Tenants: keys of their own, quotas, what each may see, and shares of the server's time.

use super::*;
use crate::lock::lock;
use rampool_lease::{Account, Payer, Quota, Revoked, Rules};
use rampool_net::key::Key;
use rampool_net::transport::{HandshakeError, connect};
use rampool_wire::frame::{CopyRequest, QueueBounds};
use rampool_wire::session::{AcceptError, Encryption, Refusal};
use rampool_wire::tenant::TenantId;
use std::collections::BTreeSet;

fn name(text: &str) -> Payer {
    Some(text.parse().unwrap())
}

fn key(master: &Key, text: &str, generation: u32) -> Key {
    master.derive(TenantId { name: text.parse().unwrap(), generation }).unwrap()
}

fn auto(key: &Key) -> LocalPolicy {
    policy(Some(key), Encryption::Auto)
}

fn quota_of(who: &str, quota: Quota) -> Rules {
    Rules { quotas: BTreeMap::from([(who.parse().unwrap(), quota)]), ..Rules::default() }
}

fn keyed(master: &Key, rules: Rules) -> RunningServer {
    let key = Some(master.clone());
    Server::start(ServerConfig { key, tenants: rules, shards: 1, ..config(64 * MIB) }).unwrap()
}

fn account(server: &RunningServer, who: Payer) -> Account {
    server.shared.directory().accounts().of(who)
}

fn refused(result: Result<impl Sized, No>, what: &str) {
    let no = result.map(drop).unwrap_err();
    assert!(no.status == Status::LimitReached && no.message.contains(what), "{no:?}");
}

#[test]
fn what_a_tenant_has_is_charged_to_it_and_bounded_by_its_quota() {
    let master = Key::generate();
    let quota = Quota {
        memory_bytes: Some(8 * MIB),
        connections: Some(3),
        regions: Some(4),
        queues: Some(1),
        ..Quota::default()
    };
    let server = keyed(&master, quota_of("alice", quota));
    let alice = auto(&key(&master, "alice", 1));
    let mut first = Client::with_lease(server.addr(), alice.clone(), 6 * MIB);
    let mut second = Client::new(server.addr(), alice.clone());
    let no = second.open(3 * MIB).unwrap_err();
    assert_eq!((no.status, no.arg), (Status::LeaseRefused, 2 * MIB), "{}", no.message);
    assert!(no.message.contains("6291456 of the 8388608 bytes"), "{}", no.message);
    second.open(2 * MIB).unwrap();
    let no = second.call(Opcode::ResizeLease, |h| h.with_arg(3 * MIB), &[]).map(drop).unwrap_err();
    assert_eq!((no.status, no.arg), (Status::LeaseRefused, 0));

    let region = first.create_region().unwrap();
    first.region_call(Opcode::CloneRegion, region).unwrap();
    let named = |client: &mut Client, name: &[u8]| client.call(Opcode::OpenRegion, |h| h.with_arg(MIB), name);
    named(&mut second, b"one").unwrap();
    let mut queue = Vec::new();
    QueueBounds { messages: 4, bytes: 1 << 16 }.encode("jobs", &mut queue);
    first.call(Opcode::OpenQueue, |h| h.with_arg(1), &queue).unwrap();
    let has = Account {
        lent_bytes: 8 * MIB,
        leases: 2,
        connections: 2,
        regions: 4,
        queues: 1,
        ..Account::default()
    };
    assert_eq!(account(&server, name("alice")), has);
    refused(first.create_region(), "4 of the 4 regions");
    refused(first.region_call(Opcode::CloneRegion, region), "regions");
    refused(named(&mut second, b"two"), "regions");
    // What is there can be opened again.
    named(&mut second, b"one").unwrap();
    first.call(Opcode::OpenQueue, |h| h.with_arg(1), &queue).unwrap();
    assert_eq!(account(&server, name("alice")), has, "what was refused is not charged");
    first.region_call(Opcode::FreeRegion, region).unwrap();
    refused(
        {
            let mut other = Vec::new();
            QueueBounds { messages: 4, bytes: 1 << 16 }.encode("more", &mut other);
            first.call(Opcode::OpenQueue, |h| h.with_arg(1), &other)
        },
        "1 of the 1 queues",
    );
    first.create_region().unwrap();

    let granted = first.granted().clone();
    let mut third = Client::new(server.addr(), alice.clone());
    third.attach(&granted, MemberId(0)).unwrap();
    let mut fourth = Client::new(server.addr(), alice.clone());
    refused(fourth.attach(&granted, MemberId(0)), "4 of the 3 connections");
    refused(fourth.open(1), "connections");
    // Who comes back is no further connection: its old one is given up.
    fourth.attach(&granted, third.granted().member).unwrap();
    drop(fourth);
    drop(third);

    // Others are not bounded by alice's quota, and the master by none.
    let mut bob = Client::with_lease(server.addr(), auto(&key(&master, "bob", 1)), 20 * MIB);
    let mut owner = Client::with_lease(server.addr(), auto(&master), 20 * MIB);
    for client in [&mut bob, &mut owner] {
        (0..6).for_each(|_| _ = client.create_region().unwrap());
    }
    drop((first, second, bob, owner));
    idle(&server);
    assert_eq!(server.shared.directory().accounts().all().count(), 0, "accounts return to zero");
}

#[test]
fn a_tenant_with_too_many_connections_loses_the_newest() {
    let master = Key::generate();
    let server = keyed(&master, quota_of("alice", Quota { connections: Some(1), ..Quota::default() }));
    let alice = auto(&key(&master, "alice", 1));
    let mut kept: Vec<Client> = (0..9)
        .map(|_| {
            let mut client = Client::new(server.addr(), alice.clone());
            client.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
            client
        })
        .collect();
    let mut more = Client::new(server.addr(), alice.clone());
    more.wait_closed();
    kept[0].call(Opcode::Heartbeat, |h| h, &[]).unwrap();
    assert_eq!(account(&server, name("alice")).connections, 9);
}

/// A job that crashes and starts again, over and over: what it leaves behind for its grace time keeps others
/// from no lease, and itself within its quota.
#[test]
fn leases_that_are_opened_and_dropped_keep_nobody_else_out() {
    let master = Key::generate();
    let quota = Quota { connections: Some(3), ..Quota::default() };
    let rules = quota_of("alice", quota);
    let server = Server::start(ServerConfig {
        key: Some(master.clone()),
        tenants: rules,
        max_connections: 16,
        grace: Duration::from_secs(3600),
        ..config(64 * MIB)
    })
    .unwrap();
    // As often as there are places for leases, for each of those that crash.
    let crash = |who: &str| -> usize {
        let policy = auto(&key(&master, who, 1));
        let open = |_: &usize| {
            let before = account(&server, name(who)).lost;
            let mut client = Client::new(server.addr(), policy.clone());
            let opened = client.open(1);
            let is_open = opened.is_ok();
            drop(client);
            if let Err(no) = opened {
                let limits = ["of the 3 connections", "of the 16 leases"];
                assert_eq!(no.status, Status::LimitReached, "{}", no.message);
                assert!(limits.iter().any(|limit| no.message.contains(limit)), "{}", no.message);
            }
            // The connection's place is free a moment before its member counts as lost.
            let deadline = Instant::now() + DEADLINE;
            let settled = |has: Account| (has.connections, has.lost) == (0, before + u64::from(is_open));
            while !settled(account(&server, name(who))) {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
            is_open
        };
        (0..4 * 16).filter(open).count()
    };
    assert_eq!(crash("alice"), 3, "as many as it may have connections");
    assert_eq!(crash("bob"), 16, "a quarter of the places");
    let has = Account { lent_bytes: 3, leases: 3, lost: 3, ..Account::default() };
    assert_eq!(account(&server, name("alice")), has);
    let mut carol = Client::with_lease(server.addr(), auto(&key(&master, "carol", 1)), MIB);
    carol.create_region().unwrap();
    // A lease that is given back makes room at once.
    carol.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    for _ in 0..40 {
        let mut again = Client::with_lease(server.addr(), auto(&key(&master, "carol", 1)), MIB);
        again.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    }
    // Who has the only key there is, or needs none, has nobody to keep out.
    let owner = auto(&master);
    for _ in 0..20 {
        let before = account(&server, None).lost;
        drop(Client::with_lease(server.addr(), owner.clone(), 1));
        let deadline = Instant::now() + DEADLINE;
        while account(&server, None).lost == before {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    }
    assert_eq!(account(&server, None).lost, 20);
}

/// Small leases, each page of which needs a table of its own: what they have for free is charged to their
/// tenant, and is no more than they are.
#[test]
fn free_page_tables_are_charged_to_their_tenant() {
    const LEASE: u64 = 64 << 10;
    let master = Key::generate();
    let server = keyed(&master, quota_of("alice", Quota { memory_bytes: Some(MIB), ..Quota::default() }));
    let alice = auto(&key(&master, "alice", 1));
    let mut leases: Vec<Client> = Vec::new();
    let no = loop {
        let mut client = Client::new(server.addr(), alice.clone());
        if let Err(no) = client.open(LEASE) {
            break no;
        }
        let region = client.create_region().unwrap();
        // As many pages as it takes, each in a table of its own.
        let page = vec![3; OS_PAGE_BYTES];
        let mut number = 0;
        while client.put(region, number * 512, std::slice::from_ref(&page), false).is_ok() {
            number += 1;
        }
        leases.push(client);
    };
    let has = account(&server, name("alice"));
    assert_eq!(has.lent_bytes, leases.len() as u64 * LEASE);
    assert!(has.table_bytes > has.lent_bytes / 2, "{has:?}");
    let most = has.lent_bytes + leases.len() as u64 * (9 << 10);
    assert!(has.table_bytes <= most, "{has:?}");
    assert!(has.lent_bytes + has.table_bytes > MIB - LEASE, "refused for less: {has:?}");
    assert!(no.status == Status::LeaseRefused && no.message.contains("of the 1048576 bytes"), "{no:?}");
    // What is used densely is charged nothing for its tables.
    let mut dense = Client::with_lease(server.addr(), auto(&key(&master, "bob", 1)), 8 * MIB);
    let region = dense.create_region().unwrap();
    (0..3).for_each(|n| dense.put(region, n * 512, &vec![vec![1; OS_PAGE_BYTES]; 512], false).unwrap());
    assert_eq!(account(&server, name("bob")).table_bytes, 0);
    drop((leases, dense));
    idle(&server);
    assert_eq!(server.shared.directory().accounts().all().count(), 0, "accounts return to zero");
}

/// What all servers of these tests log about the tenant of this name.
const TALKED_ABOUT: &str = "talked-about";

static LINES: std::sync::Mutex<Vec<String>> = std::sync::Mutex::new(Vec::new());

/// Keeps those lines.
struct Log;

struct Line(String);

impl tracing::field::Visit for Line {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!("{field}={value:?} "));
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        if line.0.contains(TALKED_ABOUT) {
            lock(&LINES).push(line.0);
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// A tenant that comes and goes all the time: the log says so a few times, and then how often it was.
#[test]
fn no_tenant_fills_the_log() {
    const TIMES: usize = 40;
    tracing::subscriber::set_global_default(Log).unwrap();
    let master = Key::generate();
    let server = Server::start(ServerConfig {
        key: Some(master.clone()),
        grace: Duration::from_millis(5),
        shards: 1,
        ..config(64 * MIB)
    })
    .unwrap();
    let policy = auto(&key(&master, TALKED_ABOUT, 1));
    for _ in 0..TIMES {
        let client = Client::with_lease(server.addr(), policy.clone(), 4096);
        let granted = client.granted().clone();
        let mut again = Client::new(server.addr(), policy.clone());
        again.attach(&granted, granted.member).unwrap();
        // Both end without a goodbye; the first may be found replaced by then.
        drop((client, again));
        idle(&server);
    }
    drop(server);
    let lines = std::mem::take(&mut *lock(&LINES));
    for kind in
        ["lease granted", "member reconnected", "disconnected", "member did not reconnect", "lease closed"]
    {
        let of = |line: &&String| line.contains(&format!("message={kind}"));
        let lines: Vec<&String> = lines.iter().filter(of).collect();
        let (counts, full): (Vec<&String>, Vec<&String>) =
            lines.into_iter().partition(|line| line.contains("more like this"));
        let counted = counts.iter().filter_map(|line| line.split("times=").nth(1)?.split(' ').next());
        let counted: usize = counted.map(|times| times.parse::<usize>().unwrap()).sum();
        assert!(counts.len() == 1 && full.len() == 10, "{kind}: {counts:?} {full:?}");
        assert!((TIMES..=2 * TIMES).contains(&(counted + full.len())), "{kind}: {counts:?}");
    }
}

#[test]
fn a_revoked_key_ends_its_connections_and_the_next_generation_goes_on() {
    let master = Key::generate();
    let server = Server::start(ServerConfig {
        key: Some(master.clone()),
        grace: Duration::from_secs(60),
        ..config(64 * MIB)
    })
    .unwrap();
    let old = auto(&key(&master, "alice", 1));
    let mut alice = Client::with_lease(server.addr(), old.clone(), MIB);
    let region = alice.create_region().unwrap();
    let page = vec![7; OS_PAGE_BYTES];
    alice.put(region, 0, std::slice::from_ref(&page), false).unwrap();
    let mut bob = Client::with_lease(server.addr(), auto(&key(&master, "bob", 1)), MIB);
    let rules = |revoked| Rules {
        revoked: BTreeMap::from([("alice".parse().unwrap(), revoked)]),
        ..Rules::default()
    };
    server.set_tenants(rules(Revoked::Generations(BTreeSet::from([1]))));
    alice.wait_closed();
    bob.call(Opcode::Heartbeat, |h| h, &[]).unwrap();
    let turned_away = |policy: &LocalPolicy| {
        let refused = connect::<()>(server.addr(), policy.clone(), Instant::now() + DEADLINE);
        assert!(matches!(refused, Err(HandshakeError::NotAccepted(AcceptError::Refused(Refusal::Revoked)))));
    };
    turned_away(&old);
    // Another key of the same tenant has its lease.
    let new = auto(&key(&master, "alice", 2));
    let mut again = Client::new(server.addr(), new.clone());
    again.attach(alice.granted(), alice.granted().member).unwrap();
    assert_eq!(again.get(region, 0, 1).unwrap(), [page]);
    server.set_tenants(rules(Revoked::All));
    again.wait_closed();
    turned_away(&new);
    server.set_tenants(Rules::default());
    Client::new(server.addr(), new).call(Opcode::Heartbeat, |h| h, &[]).unwrap();
}

#[test]
fn a_ticket_is_of_no_use_to_another_tenant_nor_to_the_master() {
    let master = Key::generate();
    let server = keyed(&master, Rules::default());
    let alice = Client::with_lease(server.addr(), auto(&key(&master, "alice", 1)), MIB);
    for other in [key(&master, "bob", 1), master.clone()] {
        let mut other = Client::new(server.addr(), auto(&other));
        for member in [MemberId(0), alice.granted().member] {
            assert_eq!(other.attach(alice.granted(), member).unwrap_err().status, Status::NoSuchLease);
        }
    }
}

#[test]
fn a_tenant_sees_its_own_and_the_master_sees_all() {
    let master = Key::generate();
    let server = keyed(&master, quota_of("alice", Quota { memory_bytes: Some(4 * MIB), ..Quota::default() }));
    let _alice = Client::with_lease(server.addr(), auto(&key(&master, "alice", 1)), MIB);
    let _bob = Client::with_lease(server.addr(), auto(&key(&master, "bob", 1)), 2 * MIB);
    let ask = |key: &Key| query_status(server.addr(), auto(key), Instant::now() + DEADLINE).unwrap();
    let own = ask(&key(&master, "alice", 9));
    assert_eq!(own.leases.iter().map(|lease| lease.tenant.as_str()).collect::<Vec<_>>(), ["alice"]);
    assert_eq!(own.tenants.iter().map(|tenant| tenant.name.as_str()).collect::<Vec<_>>(), ["alice"]);
    assert_eq!((own.memory_bytes, own.lent_bytes, own.free_bytes), (4 * MIB, MIB, 3 * MIB));
    assert_eq!((own.pid, own.failed_handshakes, own.connections), (0, 0, 2));
    assert!(!serde_json::to_string(&own).unwrap().contains("bob"));
    let leaseless = ask(&key(&master, "carol", 1));
    assert_eq!((leaseless.leases.len(), leaseless.lent_bytes, leaseless.connections), (0, 0, 1));
    let all = ask(&master);
    assert_eq!(all.leases.iter().map(|lease| lease.tenant.as_str()).collect::<Vec<_>>(), ["alice", "bob"]);
    assert_eq!(all.lent_bytes, 3 * MIB);
    assert!(
        all.tenants.len() >= 3 && all.tenants.iter().any(|tenant| tenant.name == "bob"),
        "{:?}",
        all.tenants
    );
}

/// A tenant that does not read has its own replies waiting up to its quota, and no more.
#[test]
fn unread_replies_are_charged_to_their_tenant() {
    let master = Key::generate();
    let quota = Quota { reply_bytes: Some(3 * MIB), ..Quota::default() };
    let server = keyed(&master, quota_of("alice", quota));
    let plain = |key: &Key| policy(Some(key), Encryption::Off);
    let mut bystander = Client::with_lease(server.addr(), plain(&key(&master, "bob", 1)), MIB);
    let mut greedy: Vec<Client> =
        (0..4).map(|_| Client::with_lease(server.addr(), plain(&key(&master, "alice", 1)), 4096)).collect();
    for client in &mut greedy {
        socket2::SockRef::from(&client.link.as_fd()).set_recv_buffer_size(64 << 10).unwrap();
        let region =
            client.call(Opcode::OpenRegion, |h| h.with_arg(4 * MIB), b"zeroes").unwrap().header.region;
        let parts = Layout::bytes(16).unwrap().hvector(1 << 16, 1, 64).unwrap();
        let mut table = Vec::new();
        Window { program: parts.program().clone(), from: 0, len: 1 << 20 }.encode(&mut table);
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::Gather, 7).with_region(RegionId(region)), &table, 0);
        (0..24).for_each(|_| client.link.send_head(Urgency::Demand, &head, ()));
    }
    stuck(&server, &mut bystander, &mut greedy);
    let status = server.status();
    let alice = status.tenants.iter().find(|tenant| tenant.name == "alice").unwrap();
    // One reply more for each that had nothing waiting when it was asked.
    assert!(alice.reply_bytes > MIB && alice.reply_bytes <= 3 * MIB + 4 * MIB, "{}", alice.reply_bytes);
    assert_eq!(status.reply_bytes, alice.reply_bytes);
    let leases = status.leases.iter().filter(|lease| lease.tenant == "alice");
    assert_eq!(leases.map(|lease| lease.reply_bytes).sum::<u64>(), alice.reply_bytes);
    for _ in 0..24 {
        assert_eq!(greedy[0].receive().unwrap().bulk.len(), 1 << 20);
    }
    drop((greedy, bystander));
    idle(&server);
}

/// What is beyond a tenant's rate waits, over a socket and over shared memory, and comes in the end.
#[test]
fn a_rate_holds_its_tenant_back_and_no_other() {
    let master = Key::generate();
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(ServerConfig {
        key: Some(master.clone()),
        tenants: quota_of("alice", Quota { rate_bytes: Some(128 << 10), ..Quota::default() }),
        shards: 1,
        listen: vec![local(), Endpoint::Unix(dir.path().join("s"))],
        ..config(64 * MIB)
    })
    .unwrap();
    let alice = auto(&key(&master, "alice", 1));
    let mut bob = Client::with_lease(server.addr(), auto(&key(&master, "bob", 1)), MIB);
    let page = vec![4; OS_PAGE_BYTES];
    let mut held: Vec<Client> = server
        .endpoints()
        .iter()
        .map(|endpoint| {
            let mut client = Client::with_lease(endpoint, alice.clone(), MIB);
            let region = client.create_region().unwrap();
            client.put(region, 0, &vec![page.clone(); 16], false).unwrap();
            for number in 0..4 {
                let mut head = Vec::new();
                let header = Header::request(Opcode::Get, 100 + number).with_region(region);
                encode_extents(&mut head, header, &[Extent::new(PageIndex(0), 16)]);
                client.link.send_head(Urgency::Demand, &head, ());
            }
            client.link.flush().unwrap();
            client
        })
        .collect();
    assert_eq!(held[1].link.means(), Means::RINGS);
    let region = bob.create_region().unwrap();
    bob.put(region, 0, std::slice::from_ref(&page), false).unwrap();
    assert_eq!(bob.get(region, 0, 1).unwrap(), [page]);
    let got = server.status().operations.got_pages;
    assert!(got < 2 * 4 * 16 + 1, "{got} pages were read at once");
    for client in &mut held {
        for number in 0..4 {
            let reply = client.receive().unwrap();
            assert_eq!((reply.header.request, reply.header.status), (100 + number, Status::Ok));
            assert_eq!(reply.bulk, vec![4; 16 * OS_PAGE_BYTES]);
        }
    }
    drop((held, bob));
    idle(&server);
}

/// Gathers of packed pages, each of which takes a while, and a client that wants a page: it does not
/// wait for them.
#[test]
fn long_requests_make_way_for_others() {
    let server =
        Server::start(ServerConfig { store: StoreKind::Compressed, shards: 1, ..config(64 * MIB) }).unwrap();
    let mut victim = Client::with_lease(server.addr(), open_policy(), MIB);
    let own = victim.create_region().unwrap();
    victim.put(own, 0, &[vec![9; OS_PAGE_BYTES]], false).unwrap();
    let mut busy: Vec<(Client, RegionId)> = (0..12)
        .map(|_| {
            let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
            let region =
                client.call(Opcode::OpenRegion, |h| h.with_arg(8 * MIB), b"p").unwrap().header.region;
            (0..4).for_each(|n| {
                client.put(RegionId(region), n * 512, &vec![vec![5; OS_PAGE_BYTES]; 512], false).unwrap();
            });
            (client, RegionId(region))
        })
        .collect();
    // A piece in each page, again and again, further than the cache of unpacked pages reaches.
    let parts = Layout::bytes(16).unwrap().hvector(2048, 1, 4096).unwrap().hvector(8, 1, 16).unwrap();
    let mut table = Vec::new();
    let window =
        Window { program: parts.program().clone(), from: 0, len: u32::try_from(parts.size()).unwrap() };
    window.encode(&mut table);
    for (client, region) in &mut busy {
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::Gather, 7).with_region(*region), &table, 0);
        client.link.send_head(Urgency::Demand, &head, ());
        client.link.flush().unwrap();
    }
    let before = server.status().operations.gets;
    assert_eq!(victim.get(own, 0, 1).unwrap(), [vec![9; OS_PAGE_BYTES]]);
    let others = server.status().operations.gets - before - 1;
    assert!(others < 6, "{others} of the long ones came first");
    for (client, _) in &mut busy {
        let reply = client.receive().unwrap();
        assert_eq!((reply.header.status, reply.bulk.len()), (Status::Ok, window.len as usize));
        assert!(reply.bulk.iter().all(|byte| *byte == 5));
    }
}

/// What goes on over many turns gives what one turn gives: packed and plain pages, holes, small and large
/// pieces.
#[test]
fn what_is_gathered_in_many_turns_is_what_is_there() {
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        let server = Server::start(ServerConfig { store, shards: 1, ..config(64 * MIB) }).unwrap();
        let mut client = Client::with_lease(server.addr(), open_policy(), 32 * MIB);
        let region = client.call(Opcode::OpenRegion, |h| h.with_arg(16 * MIB), b"r").unwrap().header.region;
        let mut rng = TestRunner::deterministic().new_rng();
        let pages: Vec<Vec<u8>> = (0..4096).map(|_| random_page(&mut rng)).collect();
        for (first, part) in pages.chunks(512).enumerate() {
            client.put(RegionId(region), 512 * first as u64, part, false).unwrap();
        }
        let memory = pages.concat();
        let mixed =
            Layout::bytes(8).unwrap().hindexed(&[(1, 104), (600, 5000), (1, 8), (2, 20_000)]).unwrap();
        for layout in [
            Layout::bytes(16).unwrap().hvector(60_000, 1, 272).unwrap(),
            Layout::bytes(1200).unwrap().hvector(800, 1, 20_000).unwrap(),
            mixed.hvector(200, 1, 81_920).unwrap(),
            Layout::bytes(1 << 20).unwrap(),
        ] {
            let len = u32::try_from(layout.size().min(1 << 20)).unwrap();
            let window =
                Window { program: layout.program().clone(), from: layout.size() - u64::from(len), len };
            let mut table = Vec::new();
            window.encode(&mut table);
            let expected: Vec<u8> = window
                .pieces()
                .flat_map(|piece| {
                    let at = usize::try_from(piece.offset()).unwrap();
                    memory[at..at + piece.len].to_vec()
                })
                .collect();
            let reply = client.call(Opcode::Gather, |h| h.with_region(RegionId(region)), &table).unwrap();
            assert!(reply.bulk == expected, "{store:?} {layout:?}");
            let mut crcs = Vec::new();
            let blocks = window.blocks();
            rampool_wire::frame::parse_crcs(&reply.table, blocks.len(), &mut crcs).unwrap();
            let mut rest = &reply.bulk[..];
            for (block, crc) in blocks.iter().zip(crcs) {
                let (bytes, tail) = rest.split_at(block.len as usize);
                rest = tail;
                assert!(crc == checksum::crc32c(bytes) || block.whole, "{store:?} {layout:?}");
            }
            let part = Window { len: len.min(1 << 18), ..window };
            let mut table = Vec::new();
            ScanRequest::encode_table(&part, [0; 8], [255; 8], &mut table);
            let arg = ScanRequest::arg(
                rampool_wire::elements::Kind::U64,
                rampool_wire::elements::Test::All,
                rampool_wire::elements::Want::Values,
            );
            let scanned =
                client.call(Opcode::Scan, |h| h.with_region(RegionId(region)).with_arg(arg), &table).unwrap();
            assert!(scanned.bulk == expected[..part.len as usize], "{store:?} {layout:?}");
        }
        client.region_call(Opcode::FreeRegion, RegionId(region)).unwrap();
        assert_eq!(server.status().leases[0].used_bytes, 0);
        // A word of each of many pages, of which some are there, some shared with a copy, and some not there.
        let region = client.call(Opcode::OpenRegion, |h| h.with_arg(16 * MIB), b"s").unwrap().header.region;
        client.put(RegionId(region), 100, &pages[..512], false).unwrap();
        let copy = client.region_call(Opcode::CloneRegion, RegionId(region)).unwrap();
        client.put(RegionId(region), 300, &pages[200..300], false).unwrap();
        let layout = Layout::bytes(8).unwrap().hvector(3000, 1, 4104).unwrap();
        let window = Window { program: layout.program().clone(), from: 0, len: 24_000 };
        let bytes: Vec<u8> = (0..3000_u64).flat_map(u64::to_le_bytes).collect();
        let mut table = Vec::new();
        window.encode_with(&[checksum::crc32c(&bytes)], &mut table);
        let request = client.number();
        let mut head = Vec::new();
        let header = Header::request(Opcode::Scatter, request).with_region(RegionId(region));
        encode_frame(&mut head, header, &table, bytes.len());
        // SAFETY: the bytes live until the reply has come.
        unsafe {
            client.link.send(Urgency::Demand, &head, &[Piece { ptr: bytes.as_ptr(), len: bytes.len() }], ())
        };
        client.reply(request).unwrap().unwrap();
        let mut table = Vec::new();
        window.encode(&mut table);
        let read = client.call(Opcode::Gather, |h| h.with_region(RegionId(region)), &table).unwrap();
        assert!(read.bulk == bytes, "{store:?}");
        assert!(client.get(copy, 100, 512).unwrap() == pages[..512], "the copy has not changed");
    }
}

/// A client that can make the server connect anywhere learns no more about an address than that no server of
/// the pool is there.
#[test]
fn a_copy_tells_nothing_about_what_is_at_an_address() {
    let server = Server::start(config(8 * MIB)).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
    let region = client.create_region().unwrap();
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let open = other.local_addr().unwrap().to_string();
    // It takes the connection, and ends it.
    let answers = std::thread::spawn(move || drop(other.accept()));
    let layout = Layout::bytes(8).unwrap();
    let window = Window { program: layout.program().clone(), from: 0, len: 8 };
    let granted = client.granted().clone();
    let mut told = |endpoint: &str| {
        let mut table = Vec::new();
        CopyRequest {
            source: window.clone(),
            target: window.clone(),
            endpoint: endpoint.to_owned(),
            lease: granted.lease,
            token: granted.token,
            region,
        }
        .encode(&mut table);
        let no = client.call(Opcode::Copy, |h| h.with_region(region), &table).map(drop).unwrap_err();
        (no.status, no.message.replace(endpoint, "THERE"))
    };
    let nothing = told(&closed);
    assert!(nothing.1.contains("no server of this pool"), "{nothing:?}");
    assert_eq!(told(&open), nothing);
    assert_eq!(told("host.invalid:1"), nothing);
    let file = told("unix:/etc/passwd");
    assert_eq!(told("unix:/no/such/file"), file);
    assert!(file.1.contains("--copy-to"), "{file:?}");
    answers.join().unwrap();
}

/// A machine that is short of memory keeps its leases, and gives no new ones until that is over.
#[test]
fn under_memory_pressure_new_leases_are_refused_and_the_others_served() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("memory");
    // In one step: it is read while it is written.
    let say = |full: &str| {
        let next = dir.path().join("next");
        std::fs::write(&next, format!("some avg10=50.00 total=1\nfull avg10={full} avg60=0.00 total=1\n"))
            .unwrap();
        std::fs::rename(next, &file).unwrap();
    };
    say("0.00");
    let server = Server::start(ServerConfig { pressure: vec![file.clone()], ..config(8 * MIB) }).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), MIB);
    let until = |short: bool| {
        let deadline = Instant::now() + DEADLINE;
        while server.status().short_of_memory != short {
            assert!(Instant::now() < deadline, "the server does not notice");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    say("40.00");
    until(true);
    let mut other = Client::new(server.addr(), open_policy());
    let no = other.open(MIB).unwrap_err();
    assert!(no.status == Status::ShortOfMemory && no.message.contains("short of memory"), "{no:?}");
    let mut resize = |bytes| client.call(Opcode::ResizeLease, |h| h.with_arg(bytes), &[]).map(drop);
    assert_eq!(resize(2 * MIB).unwrap_err().status, Status::ShortOfMemory);
    resize(MIB / 2).unwrap();
    let region = client.create_region().unwrap();
    client.put(region, 0, &[vec![3; OS_PAGE_BYTES]], false).unwrap();
    assert_eq!(client.get(region, 0, 1).unwrap(), [vec![3; OS_PAGE_BYTES]]);
    say("0.50");
    until(false);
    other.open(MIB).unwrap();
}

/// What is cloned over many turns is what was there; a clone that is given up halfway leaves nothing.
#[test]
fn a_clone_of_many_turns_is_what_was_there() {
    let server = Server::start(config(64 * MIB)).unwrap();
    let mut client = Client::with_lease(server.addr(), open_policy(), 60 * MIB);
    let region = client.create_region().unwrap();
    let content = |number: u64| {
        let mut page = vec![0; OS_PAGE_BYTES];
        page[..8].copy_from_slice(&(number + 1).to_le_bytes());
        page
    };
    // Each in a part of the page table of its own.
    let far = |number: u64| number * 512;
    for number in 0..3500 {
        client.put(region, far(number), &[content(number)], false).unwrap();
    }
    let used = server.status().leases[0].used_bytes;
    let copy = client.region_call(Opcode::CloneRegion, region).unwrap();
    for number in (0..3500).step_by(7) {
        client.put(region, far(number), &[vec![9; OS_PAGE_BYTES]], false).unwrap();
    }
    for number in 0..3500 {
        assert_eq!(client.get(copy, far(number), 1).unwrap(), [content(number)], "{number}");
    }
    client.region_call(Opcode::FreeRegion, copy).unwrap();
    assert!(server.status().leases[0].used_bytes <= used);
    // It goes away while its clones are made.
    for _ in 0..8 {
        let mut head = Vec::new();
        encode_frame(&mut head, Header::request(Opcode::CloneRegion, 1 << 20).with_region(region), &[], 0);
        client.link.send_head(Urgency::Demand, &head, ());
        client.link.flush().unwrap();
        let granted = client.granted().clone();
        client = Client::new(server.addr(), open_policy());
        client.attach(&granted, granted.member).unwrap();
    }
    client.region_call(Opcode::FreeRegion, region).unwrap();
    server.shared.check();
    drop(client);
    idle(&server);
}

/// Two tenants with as much to do, one with 24 connections: they have as much of the server's time.
#[test]
fn shares_are_the_tenants_not_the_connections() {
    let master = Key::generate();
    let server = keyed(&master, Rules::default());
    let plain = |text: &str| policy(Some(&key(&master, text, 1)), Encryption::Off);
    let layout = Layout::bytes(16).unwrap().hvector(1 << 14, 1, 64).unwrap();
    let mut clients: Vec<Client> = std::iter::once("one")
        .chain(std::iter::repeat_n("many", 24))
        .map(|who| Client::with_lease(server.addr(), plain(who), MIB))
        .collect();
    let regions: Vec<u64> = clients
        .iter_mut()
        .map(|client| client.call(Opcode::OpenRegion, |h| h.with_arg(MIB), b"r").unwrap().header.region)
        .collect();
    let ask = |client: &mut Client, region: u64| {
        let (mut head, mut scan) = (Vec::new(), Vec::new());
        ScanRequest::encode_table(
            &Window { program: layout.program().clone(), from: 0, len: 1 << 18 },
            [1; 8],
            [2; 8],
            &mut scan,
        );
        let arg = ScanRequest::arg(
            rampool_wire::elements::Kind::U64,
            rampool_wire::elements::Test::Equal,
            rampool_wire::elements::Want::Count,
        );
        let header = Header::request(Opcode::Scan, 1).with_region(RegionId(region)).with_arg(arg);
        encode_frame(&mut head, header, &scan, 0);
        client.link.send_head(Urgency::Demand, &head, ());
        client.link.flush().unwrap();
    };
    // Each has always some requests there.
    for _ in 0..40 {
        clients.iter_mut().zip(&regions).for_each(|(client, region)| ask(client, *region));
    }
    for _ in 0..160 {
        ask(&mut clients[0], regions[0]);
    }
    // When the one has its 100th answer, the 24 together have had about as much time.
    for _ in 0..100 {
        clients[0].receive().unwrap();
    }
    let status = server.status();
    let served = |who: &str| status.tenants.iter().find(|tenant| tenant.name == who).unwrap().served_us;
    let (one, many) = (served("one"), served("many"));
    assert!(many < 3 * one, "{one} us for one connection, {many} us for 24");
}
