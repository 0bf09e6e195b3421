//! Every target, driven by mutations of valid input from a fixed seed, for a bounded number of rounds.

use rampool_pager::fork::ChildMemory;
use rampool_paging::space::Span;
use rampool_sharing::Rank;
use rampool_sharing::channel::{Channel, ChannelConfig};
use rampool_sharing::control::{Control, FrameKind, Hello, frame};
use rampool_sharing::message::{Body as MessageBody, Message};
use rampool_wire::frame::{
    AttachLease, AwaitBody, Body, Change, CopyRequest, Delivery, FetchOp, Granted, Header, LeaseId,
    LeaseToken, Listed, MemberId, NamedRegion, Opcode, OpenLease, PageEntry, Publish, Push, PushHeads,
    QueueBounds, Reference, RegionId, Rights, ScanRequest, Settlement, Status, Take, Window, encode_error,
    encode_extents, encode_frame, encode_get_reply, encode_put,
};
use rampool_wire::layout::{Layout, Order};
use rampool_wire::session::{Encryption, Preface};
use rampool_wire::tenant::TenantId;
use rampool_wire::units::{Extent, PageIndex};
use rampool_wire::{fabric, rings};

/// xorshift64*: enough to choose mutations, and the same in every run.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).unwrap()
    }
}

/// Numbers on which decoders break.
const EDGES: [u64; 10] = [0, 1, 2, 512, 513, 4095, 4096, u32::MAX as u64, 1 << 40, u64::MAX];

fn mutate(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[rng.below(seeds.len())].clone();
    for _ in 0..=rng.below(4) {
        let at = rng.below(bytes.len());
        match rng.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
            1 if !bytes.is_empty() => bytes[at] = u8::try_from(rng.below(256)).unwrap(),
            2 => bytes.truncate(at),
            3 => {
                let edge = EDGES[rng.below(EDGES.len())].to_le_bytes();
                let width = [1, 2, 4, 8][rng.below(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&edge[..width]);
            }
            4 => {
                let other = &seeds[rng.below(seeds.len())];
                let from = rng.below(other.len());
                bytes.splice(at.., other[from..].iter().copied());
            }
            5 => {
                let extra: Vec<u8> =
                    (0..rng.below(40)).map(|_| u8::try_from(rng.below(256)).unwrap()).collect();
                bytes.splice(at..at, extra);
            }
            _ => {
                let copy = bytes.clone();
                bytes.extend_from_slice(&copy[at..]);
            }
        }
        bytes.truncate(64 * 1024);
    }
    bytes
}

fn drive(target: fn(&[u8]), seeds: &[Vec<u8>], rounds: usize) {
    for seed in seeds {
        target(seed);
    }
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    for _ in 0..rounds {
        target(&mutate(&mut rng, seeds));
    }
}

fn frames() -> Vec<Vec<u8>> {
    let extents = [Extent::new(PageIndex(3), 2), Extent::page(PageIndex(1 << 39))];
    let entries = [PageEntry { crc: 5, len: 4096 }, PageEntry::ZERO, PageEntry { crc: 6, len: 77 }];
    let framed = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        write(&mut bytes);
        bytes
    };
    let column = Layout::bytes(8).unwrap().hvector(700, 1, 400).unwrap().program().clone();
    let window = Window { program: column, from: 80, len: 4096 };
    let (mut scatter, mut scan, mut copy) = (Vec::new(), Vec::new(), Vec::new());
    window.encode_with(&[7], &mut scatter);
    ScanRequest::encode_table(&window, [1; 8], [2; 8], &mut scan);
    let grouped = ScanRequest::keyed_table(&window, ([1; 8], [2; 8]), (RegionId(3), &window.program));
    let reference = Reference { regions: vec![RegionId(4), RegionId(5)], program: window.program.clone() }
        .encode()
        .unwrap();
    let (mut push, mut deliveries, mut take, mut settle, mut wait, mut open) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    Push { timeout_ms: 9, head: &[7; 64], body: Body::InPool(5600, &reference) }.encode(&mut push);
    let delivery = Delivery {
        number: 3,
        redelivered: true,
        arriving: true,
        head: b"head",
        body: Body::Bytes(9000),
        body_at: 4096,
    };
    delivery.encode(&mut deliveries);
    let in_pool = Delivery { arriving: false, body: Body::InPool(5600, &reference), body_at: 0, ..delivery };
    in_pool.encode(&mut deliveries);
    let mut heads = Vec::new();
    PushHeads::encode(9, &[&[7; 64], b"", b"head"], &mut heads);
    Take { timeout_ms: 9, most: 5, acknowledged: vec![1, 2, 3] }.encode(&mut take);
    Settlement::Return.encode(&[1, 2], &mut settle);
    AwaitBody { number: 3, timeout_ms: 4 }.encode(&mut wait);
    QueueBounds { messages: 100, bytes: 1 << 20 }.encode("jobs", &mut open);
    let mut listed = Vec::new();
    for name in ["jobs", "other jobs"] {
        assert!(Listed { queue: 3, messages: 4, name: name.into(), ..Listed::default() }.encode(&mut listed));
    }
    let mut named = Vec::new();
    assert!(NamedRegion { region: RegionId(3), bytes: 4096, name: "table".into() }.encode(&mut named));
    let mut published = Vec::new();
    Publish { rights: Rights::Both, bytes: 1 << 20, name: "inbox" }.encode(&mut published);
    let (lease, token) = (LeaseId(3), LeaseToken([9; 16]));
    let endpoint = "127.0.0.1:7117".to_owned();
    CopyRequest { source: window.clone(), target: window, endpoint, lease, token, region: RegionId(1) }
        .encode(&mut copy);
    let get = Header::request(Opcode::Get, 1);
    vec![
        framed(&|out| encode_extents(out, get, &extents)),
        framed(&|out| encode_extents(out, Header::request(Opcode::Discard, 2), &extents)),
        framed(&|out| _ = encode_put(out, Header::request(Opcode::Put, 3), &extents, &entries)),
        framed(&|out| _ = encode_get_reply(out, get.reply(Status::Ok), &entries, &[])),
        framed(&|out| encode_error(out, get.reply(Status::PoolFull).with_arg(9), "no")),
        framed(&|out| encode_frame(out, Header::request(Opcode::Heartbeat, 4), &[], 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Scatter, 5), &scatter, 4096)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Scan, 6).with_arg(0x07_0504), &scan, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Scan, 6).with_arg(0x0407_0104), &grouped, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::FetchOp, 7).with_arg(0x204), &[8; 24], 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Copy, 8), &copy, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Push, 9), &push, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::PushHeads, 9), &heads, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Take, 10).reply(Status::Ok), &deliveries, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Take, 10), &take, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Settle, 11), &settle, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::AwaitBody, 12), &wait, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::OpenQueue, 13), &open, 0)),
        framed(&|out| {
            encode_frame(out, Header::request(Opcode::ListQueues, 19).reply(Status::Ok), &listed, 0)
        }),
        framed(&|out| {
            encode_frame(out, Header::request(Opcode::ListRegions, 20).reply(Status::Ok), &named, 0)
        }),
        framed(&|out| encode_frame(out, Header::request(Opcode::Scan, 14).reply(Status::Ok), &[3; 24], 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Publish, 15), &published, 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Reach, 21).with_arg(1), &[1; 40], 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::Withdraw, 16).with_arg(3), &[], 0)),
        framed(&|out| encode_frame(out, Header::request(Opcode::ReadPiece, 18).with_arg(0x300_8ff7), &[], 0)),
    ]
}

#[test]
fn frames_and_tables() {
    drive(rampool_fuzz::frame, &frames(), 100_000);
}

#[test]
fn layouts() {
    let word = Layout::bytes(8).unwrap();
    let row = word.subarray(&[9, 7, 5], &[3, 4, 2], &[1, 1, 1], Order::C).unwrap();
    let list = word.hindexed(&[(1, 40), (2, -9), (1, 100), (1, 1 << 33)]).unwrap();
    let all = [
        Layout::bytes(100).unwrap(),
        word.vector(50, 2, 5).unwrap(),
        row.clone(),
        list.clone(),
        Layout::structure(&[(1, 0, row), (2, 3000, list), (3, 7, word)])
            .unwrap()
            .hvector(3, 1, 9000)
            .unwrap(),
    ];
    let coded = |layout: &Layout| {
        let mut out = Vec::new();
        layout.program().encode(&mut out);
        out
    };
    drive(rampool_fuzz::layout, &all.iter().map(coded).collect::<Vec<_>>(), 20_000);
}

#[test]
fn lease_requests_and_grants() {
    let token = LeaseToken([9; 16]);
    let open = OpenLease { bytes: 1 << 30, pid: 7, name: "sort".into(), host: "here".into() };
    let attach = AttachLease {
        lease: LeaseId(3),
        token,
        member: MemberId(4),
        pid: 7,
        name: "sort".into(),
        host: "here".into(),
    };
    let granted = Granted {
        lease: LeaseId(3),
        token,
        member: MemberId(4),
        server: 5,
        lease_bytes: 1 << 30,
        max_requests: 64,
        max_bytes: 1 << 24,
        grace_ms: 1000,
        heartbeat_ms: 100,
    };
    drive(rampool_fuzz::control, &[open.encode(), attach.encode(), granted.encode()], 100_000);
}

#[test]
fn messages_between_ranks() {
    let bodies = [
        MessageBody::ScData { page: PageIndex(3), write: true, acks: 2, bytes: Some(vec![5u8; 4096].into()) },
        MessageBody::ScAck { page: PageIndex(9) },
        MessageBody::Abort { why: "a rank is lost".into() },
    ];
    let seeds = bodies.map(|body| {
        let mut bytes = Vec::new();
        Message { epoch: 4, body }.encode(&mut bytes);
        bytes
    });
    drive(rampool_fuzz::message, &seeds, 100_000);
}

#[test]
fn connections_between_ranks() {
    let hello = Hello {
        wire: 7,
        build: "0.1.0".into(),
        run: "run".into(),
        settings: "hlrc".into(),
        rank: Rank(1),
        ranks: 4,
        port: 7117,
        datagram_port: 0,
        incarnation: 9,
    };
    let controls = [
        Control::Hello { hello },
        Control::Refused { why: "another run".into() },
        Control::Open { name: "table".into() },
    ];
    let mut seeds: Vec<Vec<u8>> = controls
        .iter()
        .map(|control| {
            let mut bytes = Vec::new();
            frame(FrameKind::Control, 77, &mut bytes, |out| control.encode(out));
            bytes
        })
        .collect();
    let message = Message { epoch: 4, body: MessageBody::ScAck { page: PageIndex(9) } };
    let mut bytes = Vec::new();
    frame(FrameKind::Message, 5, &mut bytes, |out| message.encode(out));
    frame(FrameKind::Acknowledgement, 6, &mut bytes, |_| {});
    seeds.push([&bytes[..], &seeds[1], &bytes].concat());
    drive(rampool_fuzz::ranks, &seeds, 100_000);
}

#[test]
fn offers_of_memory_and_fabrics() {
    let rings = rings::Offer::of(1 << 18).unwrap().encode().to_vec();
    let fabric =
        fabric::Offer { major: 1, watch: 1, message_bytes: 8192, window: 64, address: vec![7; 300] }.encode();
    drive(
        rampool_fuzz::offer,
        &[rings, fabric, rings::Offer::NONE.encode().to_vec(), fabric::Offer::NONE.encode()],
        100_000,
    );
}

#[test]
fn counts_in_memory_that_another_process_writes() {
    let steps = |kinds: [u8; 3], count: u64| -> Vec<u8> {
        (0..60)
            .flat_map(|step| std::iter::once(kinds[step % 3]).chain((count * step as u64).to_le_bytes()))
            .collect()
    };
    drive(
        rampool_fuzz::counts,
        &[steps([2, 40, 255], 700), steps([128, 3, 8], 1), steps([254, 254, 0], 4096)],
        30_000,
    );
}

#[test]
fn departures_that_are_settled_late() {
    // Two members of one lease, one lost and one that leaves while its order waits; and one of
    // another, which comes back.
    let seeds = [
        vec![0, 20, 1, 0, 5, 0, 5, 1, 3, 1, 4, 0, 7, 15, 6, 0, 0, 30],
        vec![0, 8, 0, 9, 5, 0, 5, 1, 2, 1, 5, 2, 3, 1, 2, 0, 4, 0, 7, 12, 6, 0, 6, 0],
    ];
    drive(rampool_fuzz::reaper, &seeds, 15_000);
}

#[test]
fn datagrams_of_channels() {
    let mut channel = Channel::new(ChannelConfig::default(), 0);
    channel.send(b"short");
    channel.send(&[9; 3000]);
    let seeds: Vec<Vec<u8>> = std::iter::from_fn(|| channel.poll(0)).collect();
    assert!(seeds.len() > 1);
    drive(rampool_fuzz::datagram, &seeds, 30_000);
}

#[test]
fn prefaces() {
    let seeds: Vec<Vec<u8>> = [Encryption::Auto, Encryption::On, Encryption::Off]
        .iter()
        .flat_map(|e| {
            let preface = Preface::ask(*e, true, 1, 2);
            [preface.encode().to_vec(), of_tenant(preface)]
        })
        .collect();
    drive(rampool_fuzz::preface, &seeds, 100_000);
}

#[test]
fn streams_of_frames() {
    let mut seeds = frames();
    let mut with_bulk = seeds[2].clone();
    with_bulk.extend_from_slice(&[0xab; 4096 + 77]);
    let all = [&with_bulk[..], &seeds[0], &with_bulk, &seeds[4]].concat();
    seeds.extend([with_bulk, all]);
    drive(rampool_fuzz::link, &seeds, 3_000);
}

/// A client that does a little of everything with its lease; the numbers of its requests are even or odd.
fn conversation(odd: u64) -> Vec<u8> {
    let mut all = Vec::new();
    let mut number = 100 + odd;
    let mut say = |opcode: Opcode, region: u64, arg: u64, table: &[u8], bulk: &[u8]| {
        number += 2;
        let header = Header::request(opcode, number).with_region(RegionId(region)).with_arg(arg);
        encode_frame(&mut all, header, table, bulk.len());
        all.extend_from_slice(bulk);
    };
    let coded = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        write(&mut bytes);
        bytes[rampool_wire::frame::HEADER_BYTES..].to_vec()
    };
    let (name, host) = (String::from("n"), String::from("h"));
    let (lease, token, member) = (LeaseId(1), LeaseToken([9; 16]), MemberId(4));
    if odd == 0 {
        say(Opcode::OpenLease, 0, 0, &OpenLease { bytes: 64 << 12, pid: 1, name, host }.encode(), &[]);
    } else {
        let attach = AttachLease { lease, token, member, pid: 1, name, host };
        say(Opcode::AttachLease, 0, 0, &attach.encode(), &[]);
    }
    say(Opcode::CreateRegion, 0, 0, &[], &[]);
    say(Opcode::OpenRegion, 0, 1 << 20, b"common", &[]);
    let extents = [Extent::new(PageIndex(0), 2), Extent::page(PageIndex(700))];
    let page = [5; 4096];
    let crc = rampool_wire::frame::page_crc(&page);
    let entries = [PageEntry { crc, len: 4096 }, PageEntry::ZERO, PageEntry { crc, len: 4096 }];
    let put = coded(&|out| _ = encode_put(out, Header::request(Opcode::Put, 1), &extents, &entries));
    let table = coded(&|out| encode_extents(out, Header::request(Opcode::Get, 1), &extents));
    for region in 1..4 {
        say(Opcode::Put, region, 2, &put, &[page, page].concat());
        say(Opcode::Get, region, 2, &table, &[]);
        say(Opcode::CloneRegion, region, 0, &[], &[]);
    }
    let parts = Layout::bytes(8).unwrap().hvector(300, 1, 104).unwrap();
    let window = Window { program: parts.program().clone(), from: 0, len: 2400 };
    let bytes = [3; 2400];
    let (mut gather, mut update, mut scan, mut copy) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    window.encode(&mut gather);
    window.encode_with(&[rampool_wire::checksum::crc32c(&bytes)], &mut update);
    ScanRequest::encode_table(&window, [1; 8], [2; 8], &mut scan);
    let grouped = ScanRequest::keyed_table(&window, ([1; 8], [2; 8]), (RegionId(3), &window.program));
    let endpoint = "unix:/nonexistent/rampool".to_owned();
    let (source, target) = (window.clone(), window);
    CopyRequest { source, target, endpoint, lease, token, region: RegionId(1) }.encode(&mut copy);
    let (kind, change) = (rampool_wire::elements::Kind::U64, Change::IfEqual(0));
    let fetch = FetchOp { kind, change, offset: 8, operand: 9 }.encode();
    for region in [2, 3] {
        say(Opcode::Accumulate, region, 0x604, &update, &bytes);
        say(Opcode::Gather, region, 0, &gather, &[]);
        say(Opcode::Scan, region, 0x07_0504, &scan, &[]);
        say(Opcode::Scan, region, 0x0407_0104, &grouped, &[]);
        say(Opcode::FetchOp, region, fetch.0, &fetch.1, &[]);
        say(Opcode::ReadPiece, region, 0x300_8ff7, &[], &[]);
    }
    say(Opcode::Copy, 2, 0, &copy, &[]);
    let (mut queue, mut push, mut take, mut settle, mut wait) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    QueueBounds { messages: 10, bytes: 1 << 16 }.encode("jobs", &mut queue);
    Push { timeout_ms: 9, head: &[7; 64], body: Body::Bytes(5000) }.encode(&mut push);
    Take { timeout_ms: 9, most: 5, acknowledged: vec![1] }.encode(&mut take);
    Settlement::Done.encode(&[1, 2], &mut settle);
    AwaitBody { number: 1, timeout_ms: 4 }.encode(&mut wait);
    say(Opcode::OpenQueue, 0, 1, &queue, &[]);
    say(Opcode::Push, 0, 1, &push, &[]);
    say(Opcode::Take, 0, 1, &take, &[]);
    say(Opcode::AwaitBody, 0, 1, &wait, &[]);
    say(Opcode::Settle, 0, 1, &settle, &[]);
    say(Opcode::ListQueues, 0, 0, &[], &[]);
    say(Opcode::ListRegions, 0, 0, b"a", &[]);
    say(Opcode::Discard, 1, 2, &table, &[]);
    say(Opcode::AdoptRegion, 3, 0, &[], &[]);
    say(Opcode::ResizeLease, 0, 80 << 12, &[], &[]);
    say(Opcode::Status, 0, 0, &[], &[]);
    say(Opcode::FreeQueue, 0, 1, &[], &[]);
    say(Opcode::FreeRegion, 1, 0, &[], &[]);
    say(Opcode::Goodbye, 0, 0, &[], &[]);
    all
}

#[test]
fn conversations_with_a_server() {
    let (one, other) = (conversation(0), conversation(1));
    let half = one.len() / 2;
    let both = [&one[..half], &other, &one[half..]].concat();
    let mut seeds = vec![[&one[..], &other].concat(), both, one];
    // And requests that have little to do with each other, after a lease.
    let mut any = seeds[2][..200].to_vec();
    frames().into_iter().for_each(|frame| any.extend_from_slice(&frame));
    seeds.push(any);
    drive(rampool_fuzz::server, &seeds, 1_000);
}

#[test]
fn handshakes() {
    let preface = Preface::ask(Encryption::Auto, true, 1, 2).encode();
    let mut answer = Preface::ask(Encryption::Auto, true, 1, 2);
    answer.verdict = rampool_wire::session::Verdict::Agreed(rampool_wire::session::Security::Sealed);
    let message = [&preface[..], &[48, 0], &[3; 48]].concat();
    let reply = [&answer.encode()[..], &[48, 0], &[3; 48], &[16, 0], &[1; 16]].concat();
    let tenant = of_tenant(Preface::ask(Encryption::Auto, true, 1, 2));
    let tenants_message = [&tenant[..], &[48, 0], &[3; 48]].concat();
    drive(rampool_fuzz::handshake, &[preface.to_vec(), message, reply, tenant, tenants_message], 2_000);
}

/// The first bytes of a tenant.
fn of_tenant(preface: Preface) -> Vec<u8> {
    let tenant = TenantId { name: "alice.b-c_7".parse().unwrap(), generation: 3 };
    [&preface.of_tenant(true).encode()[..], &tenant.encode()].concat()
}

#[test]
fn texts() {
    let status = br#"{"server":1,"version":"0.1.0","leases":[{"lease":1,"name":"x","members":[{"pid":3}]}]}"#;
    let handed = b"rampool-handed-over-1 1000 2000 rampool-region-1;1;2 \
            rampool-lease-1;64;3,09090909090909090909090909090909,127.0.0.1:7117=4G";
    let ticket = b"127.0.0.1:4040,unix:/run/rank#run-17";
    let seeds = [
        &handed[..],
        ticket,
        b"rampool-member-1;3;1f",
        b"127.0.0.1:7117=4G",
        b"unix:/run/x",
        b"[::1]:80",
        b"1.5G",
        b"17179869184",
        status,
    ]
    .map(<[u8]>::to_vec);
    drive(rampool_fuzz::text, &seeds, 100_000);
}

#[test]
fn memory_of_a_forked_child() {
    let span = |start, pages, first| Span { start, pages, first: PageIndex(first) };
    let spans = vec![span(0x7000_0000, 7, 30), span(0x7000_7000, 9, 3), span(0x7fff_0000_0000, 4, 12)];
    let absent =
        vec![Extent::new(PageIndex(3), 2), Extent::new(PageIndex(9), 6), Extent::page(PageIndex(31))];
    let all = [
        ChildMemory { spans, absent: absent.clone() },
        ChildMemory { spans: vec![], absent },
        ChildMemory::default(),
    ];
    drive(rampool_fuzz::child, &all.map(|memory| memory.encode()), 100_000);
}

#[test]
fn files_of_dlmm() {
    let paper = b"calhost    2048 // 2GB compute node\n\
                  memhost1   2048 // 2GB memory server 1\n\
                  memhost2   4096 // 4GB memory server 2\n";
    let other = b"// the cluster\n\n  a\t16//x\r\n//b 17\nlocalhost:7001 18\n[::1]:7002 17592186044415";
    let options = b"prog 100 -- -n 4 -f my.conf";
    drive(rampool_fuzz::dlmm, &[&paper[..], other, options].map(<[u8]>::to_vec), 100_000);
}

#[test]
fn traces_of_runs() {
    // Rank 1 fetches a page from rank 0, they meet at a barrier, and rank 0 takes a lock.
    let first = br#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}
{"at_ns":900,"event":"start"}
{"at_ns":31000,"event":"receive","from":1,"type":"GetPage","ns":2000}
{"at_ns":32000,"event":"send","to":1,"type":"Page","bytes":4109}
{"at_ns":1000,"event":"compute","thread":0,"ns":100000,"cpu_ns":100000}
{"at_ns":101000,"event":"wait","thread":0,"what":"barrier","ns":29000}
{"at_ns":120000,"event":"receive","from":1,"type":"BarrierArrive","ns":1000}
{"at_ns":120500,"event":"send","to":1,"type":"BarrierDepart","bytes":20}
{"at_ns":140000,"event":"stop"}

{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}
{"at_ns":21000,"event":"send","to":0,"type":"GetPage","bytes":10}
{"at_ns":45000,"event":"receive","from":0,"type":"Page","ns":3000}
{"at_ns":20000,"event":"wait","what":"read fault","ns":30000}
{"at_ns":1000,"event":"compute","thread":0,"ns":109000,"cpu_ns":50000}
{"at_ns":111000,"event":"send","to":0,"type":"BarrierArrive","bytes":20}
{"at_ns":130000,"event":"receive","from":0,"type":"BarrierDepart","ns":1000}
{"at_ns":110000,"event":"wait","thread":0,"what":"barrier","ns":25000}"#;
    let second = br#"{"at_ns":5,"event":"cost","what":"write fault","cpu_ns":5200}
{"at_ns":10,"event":"send","to":1,"type":"LockRequest","bytes":30,"lock":7}
{"at_ns":9,"event":"wait","thread":0,"what":"lock","lock":7,"ns":5000}
{"at_ns":4000,"event":"receive","from":1,"type":"LockGrant","lock":7,"ns":100}
{"at_ns":6000,"event":"wait","thread":0,"what":"unlock","lock":7,"ns":300}

{"at_ns":2000,"event":"receive","from":0,"type":"LockRequest","lock":7,"ns":100}
{"at_ns":2050,"event":"send","to":0,"type":"LockGrant","bytes":40,"lock":7}
{"at_ns":1,"event":"wait","thread":0,"what":"other","ns":9000}"#;
    drive(rampool_fuzz::trace, &[first.to_vec(), second.to_vec()], 5_000);
}

#[test]
fn sessions_of_block_device_clients() {
    let option = |number: u32, data: &[u8]| {
        let len = u32::try_from(data.len()).unwrap();
        [b"IHAVEOPT", &number.to_be_bytes()[..], &len.to_be_bytes(), data].concat()
    };
    let request = |flags: u16, command: u16, offset: u64, len: u32| {
        let head =
            [&0x2560_9513u32.to_be_bytes()[..], &flags.to_be_bytes(), &command.to_be_bytes(), b"a cookie"]
                .concat();
        [&head[..], &offset.to_be_bytes(), &len.to_be_bytes()].concat()
    };
    let go = b"\0\0\0\x04disk\0\x02\0\x01\0\x03";
    let contexts = b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation";
    let old = [
        &[0xff, 0, 0, 0, 3][..],
        &option(3, b""),
        &option(1, b"disk"),
        &request(0, 0, 4090, 9000),
        &request(0, 2, 0, 0),
    ]
    .concat();
    let new = [
        &[3, 0, 0, 0, 1][..],
        &option(8, b""),
        &option(9, contexts),
        &option(10, contexts),
        &option(6, go),
        &option(7, go),
        &request(1, 1, 100, 5000),
        &[9; 5000],
        &request(0, 0, 0, 400_000),
        &request(4, 0, 4096, 8192),
        &request(0, 3, 0, 0),
        &request(0, 4, 0, 1 << 20),
        &request(18, 6, 5, 70_000),
        &request(8, 7, 0, 1 << 20),
        &request(0, 5, 0, 4096),
        &request(0, 1, 1 << 20, 4),
        &[9; 4],
    ]
    .concat();
    drive(rampool_fuzz::nbd, &[old, new], 50_000);
}

#[test]
fn every_target_is_driven_here() {
    // rustfmt breaks a long call over several lines.
    let here: String = include_str!("mutations.rs").split_whitespace().collect();
    let targets = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz_targets")).unwrap();
    let names: Vec<String> =
        targets.map(|f| f.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    let forgotten: Vec<&String> =
        names.iter().filter(|name| !here.contains(&format!("drive(rampool_fuzz::{name},"))).collect();
    assert!(names.len() >= 14 && forgotten.is_empty(), "{forgotten:?} of {names:?}");
}
