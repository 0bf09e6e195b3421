//! Updates of many pieces: others come between, and each is carried out once and to the end, whatever becomes
//! of its connection or its member.

use super::*;
use rampool_lease::{Account, Revoked, Rules};
use rampool_net::key::Key;
use rampool_wire::session::Encryption;
use rampool_wire::tenant::TenantId;

/// One is added to each of 30,000 words, of which no two in a row are of one page.
struct Sum {
    window: Window,
    table: Vec<u8>,
    bytes: Vec<u8>,
}

const REGION_BYTES: u64 = 8 << 20;
const ADD_TO_U64: u64 = 0x204;
const MOST_ROUNDS: u64 = 3000;

impl Sum {
    fn new() -> Self {
        let words = Layout::bytes(8).unwrap().hvector(2000, 1, 4096).unwrap().hvector(15, 1, 16).unwrap();
        let window =
            Window { program: words.program().clone(), from: 0, len: u32::try_from(words.size()).unwrap() };
        let bytes = 1_u64.to_le_bytes().repeat(30_000);
        let mut table = Vec::new();
        window.encode_with(&[checksum::crc32c(&bytes)], &mut table);
        Self { window, table, bytes }
    }

    /// Sends it.
    fn start(&self, client: &mut Client, region: RegionId, request: u64) {
        let header = Header::request(Opcode::Accumulate, request).with_region(region).with_arg(ADD_TO_U64);
        let mut head = Vec::new();
        encode_frame(&mut head, header, &self.table, self.bytes.len());
        let piece = Piece { ptr: self.bytes.as_ptr(), len: self.bytes.len() };
        // SAFETY: the bytes live as long as the test.
        unsafe { client.link.send(Urgency::Demand, &head, &[piece], ()) };
        while client.link.queued_bytes() > 0 && client.link.flush().is_ok() {}
    }

    /// Each word has this value.
    fn is(&self, client: &mut Client, region: RegionId, value: u64) {
        let mut table = Vec::new();
        self.window.encode(&mut table);
        let read = client.call(Opcode::Gather, |h| h.with_region(region), &table).unwrap().bulk;
        let differs = |word: &&[u8]| **word != value.to_le_bytes();
        assert_eq!(read.chunks(8).filter(differs).count(), 0, "each word is {value}");
    }
}

fn revoked(generation: u32) -> Rules {
    let below = Revoked::Generations((0..generation).collect());
    Rules { revoked: BTreeMap::from([("alice".parse().unwrap(), below)]), ..Rules::default() }
}

fn with_key(master: &Key, name: &str, generation: u32) -> LocalPolicy {
    let tenant = TenantId { name: name.parse().unwrap(), generation };
    policy(Some(&master.derive(tenant).unwrap()), Encryption::Off)
}

fn server(master: &Key) -> RunningServer {
    let (key, grace) = (Some(master.clone()), Duration::from_secs(60));
    Server::start(ServerConfig { key, grace, shards: 1, ..config(64 * MIB) }).unwrap()
}

fn open_words(client: &mut Client) -> RegionId {
    let open = client.call(Opcode::OpenRegion, |h| h.with_arg(REGION_BYTES), b"words").unwrap();
    RegionId(open.header.region)
}

/// Whether the client's update is half done.
fn is_half_done(server: &RunningServer, client: &Client) -> bool {
    let lease = server.shared.lease(client.granted().lease).unwrap();
    let space = lease.space();
    space.is_updating(client.granted().member)
}

/// Updates are answered in this lease.
fn updates(server: &RunningServer, client: &Client) -> u64 {
    server.shared.lease(client.granted().lease).unwrap().counts.puts.load(Ordering::Relaxed)
}

/// Waits for the middle of the client's update. False: it is over already.
fn wait_for_the_middle(server: &RunningServer, client: &Client, before: u64) -> bool {
    let deadline = Instant::now() + DEADLINE;
    while updates(server, client) == before {
        if is_half_done(server, client) {
            return true;
        }
        assert!(Instant::now() < deadline, "the update never ends");
    }
    false
}

#[test]
fn an_update_makes_way_for_others() {
    let master = Key::generate();
    let server = server(&master);
    let mut victim = Client::with_lease(server.addr(), with_key(&master, "victim", 1), MIB);
    let own = victim.create_region().unwrap();
    let page = vec![9; OS_PAGE_BYTES];
    victim.put(own, 0, std::slice::from_ref(&page), false).unwrap();
    let mut busy = Client::with_lease(server.addr(), with_key(&master, "alice", 1), 16 * MIB);
    let (sum, region) = (Sum::new(), open_words(&mut busy));
    let (mut round, mut between) = (0, 0);
    while between == 0 {
        assert!(round < MOST_ROUNDS, "nothing is answered in the middle of an update");
        let before = updates(&server, &busy);
        let request = busy.number();
        sum.start(&mut busy, region, request);
        while updates(&server, &busy) == before {
            if is_half_done(&server, &busy) {
                assert_eq!(victim.get(own, 0, 1).unwrap(), std::slice::from_ref(&page));
                between += u32::from(is_half_done(&server, &busy));
            }
        }
        busy.reply(request).unwrap().unwrap();
        round += 1;
    }
    sum.is(&mut busy, region, round);
}

/// The connection ends in the middle of an update, or its member comes back over another one: the update goes
/// on to its end, and the repeated request is not carried out again.
#[test]
fn an_update_whose_connection_ends_is_carried_out_once() {
    let master = Key::generate();
    let server = server(&master);
    let mut generation = 1;
    let mut client = Client::with_lease(server.addr(), with_key(&master, "alice", generation), 16 * MIB);
    let mut other = Client::new(server.addr(), with_key(&master, "victim", 1));
    other.open(MIB).unwrap();
    let (sum, region) = (Sum::new(), open_words(&mut client));
    let (mut round, mut replaced, mut ended) = (0, 0, 0);
    while replaced < 3 || ended < 3 {
        assert!(round < MOST_ROUNDS, "the middle of an update is never met");
        let (request, before) = (1000 + round, updates(&server, &client));
        sum.start(&mut client, region, request);
        round += 1;
        if !wait_for_the_middle(&server, &client, before) {
            client.reply(request).unwrap().unwrap();
            continue;
        }
        if round % 2 == 0 {
            generation += 1;
            server.set_tenants(revoked(generation));
            // It had no answer before the end.
            ended += u32::from(client.reply(request).is_err());
        } else {
            replaced += u32::from(is_half_done(&server, &client));
        }
        let mut again = Client::new(server.addr(), with_key(&master, "alice", generation));
        again.attach(client.granted(), client.granted().member).unwrap();
        assert!(!is_half_done(&server, &again), "nobody comes back in the middle");
        sum.start(&mut again, region, request);
        again.reply(request).unwrap().unwrap();
        sum.is(&mut again, region, round);
        client = again;
    }
    client.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    other.call(Opcode::Goodbye, |h| h, &[]).unwrap();
    drop((client, other));
    idle(&server);
    for tenant in ["alice", "victim"] {
        let has = server.shared.directory().accounts().of(Some(tenant.parse().unwrap()));
        assert_eq!(has, Account::default(), "{tenant}");
    }
}

/// Of many pieces, what would write a page as a whole and in part is refused when they are looked at.
#[test]
fn a_page_is_not_written_twice_by_many_pieces() {
    for store in [StoreKind::Raw, StoreKind::Compressed] {
        let server = Server::start(ServerConfig { store, ..config(64 * MIB) }).unwrap();
        let mut client = Client::with_lease(server.addr(), open_policy(), 16 * MIB);
        let region = open_words(&mut client);
        let scatter = |client: &mut Client, from: i64| {
            let page = (1, 0, Layout::bytes(OS_PAGE_BYTES as u64).unwrap());
            let bytes = (1, from, Layout::bytes(1).unwrap().hvector(5000, 1, 2).unwrap());
            let layout = Layout::structure(&[page, bytes]).unwrap();
            let window = Window { program: layout.program().clone(), from: 0, len: 4096 + 5000 };
            let bulk = [vec![3; 4096], vec![4; 5000]].concat();
            let crcs = [checksum::crc32c(&bulk[..4096]), checksum::crc32c(&bulk[4096..])];
            let mut table = Vec::new();
            window.encode_with(&crcs, &mut table);
            direct(client, Opcode::Scatter, region, 0, &table, &bulk).unwrap()
        };
        assert_eq!(scatter(&mut client, 0).map(drop).unwrap_err().status, Status::BadRequest);
        assert!(client.get(region, 0, 4).unwrap().concat().iter().all(|byte| *byte == 0));
        scatter(&mut client, 4096).unwrap();
        let pages = client.get(region, 0, 2).unwrap();
        assert!(pages[0] == [3; 4096] && pages[1] == [4, 0].repeat(2048));
        drop(client);
        idle(&server);
    }
}

/// A member is dismissed in the middle of its update of a region of all: it is finished. A region that is
/// freed in the middle ends it.
#[test]
fn an_update_whose_member_is_dismissed_is_finished() {
    let server = Server::start(ServerConfig { shards: 1, ..config(64 * MIB) }).unwrap();
    let mut stays = Client::with_lease(server.addr(), open_policy(), 16 * MIB);
    let (sum, region) = (Sum::new(), open_words(&mut stays));
    let (mut round, mut dismissed) = (0, 0);
    while dismissed < 3 {
        assert!(round < MOST_ROUNDS, "the middle of an update is never met");
        let mut goes = Client::new(server.addr(), open_policy());
        goes.attach(stays.granted(), MemberId(0)).unwrap();
        let (request, before) = (1000, updates(&server, &goes));
        sum.start(&mut goes, region, request);
        round += 1;
        if wait_for_the_middle(&server, &goes, before) {
            let member = goes.granted().member;
            stays.call(Opcode::Goodbye, |h| h.with_arg(member.0), &[]).unwrap();
            dismissed += u32::from(is_half_done(&server, &goes));
        }
        goes.reply(request).unwrap().unwrap();
        sum.is(&mut stays, region, round);
    }
    loop {
        let mut last = Client::new(server.addr(), open_policy());
        last.attach(stays.granted(), MemberId(0)).unwrap();
        let (request, before) = (1000, updates(&server, &last));
        sum.start(&mut last, region, request);
        if wait_for_the_middle(&server, &last, before) {
            stays.region_call(Opcode::FreeRegion, region).unwrap();
            if let Err(no) = last.reply(request).unwrap() {
                assert_eq!(no.status, Status::NoSuchRegion, "{}", no.message);
            }
            assert!(!is_half_done(&server, &last));
            break;
        }
        last.reply(request).unwrap().unwrap();
    }
    drop(stays);
    idle(&server);
}
