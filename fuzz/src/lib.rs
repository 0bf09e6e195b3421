//! One function per decoder. Each takes any bytes, must not panic, and must keep the promise of its decoder:
//! accepted values are within the bounds, and encode to the bytes that they were decoded from.
//!
//! `cargo test -p rampool-fuzz` drives them with mutations of valid input for a bounded number of rounds;
//! `fuzz_targets/` passes the same functions to cargo-fuzz.

/// Linking the C interface would export it, so its parser is included as a file.
#[path = "../../crates/compat/src/dlmm/conf.rs"]
mod conf;
mod nbd;
mod predict;

pub use nbd::nbd;

use predict::additive::additive;
use predict::network::Network;
use predict::recording::Recording;
use predict::replay::{Machine, replay};
use rampool_lease::{ConnectionNumber, Tick};
use rampool_net::key::Key;
use rampool_net::transport::{Endpoint, Handshake, Link, LocalPolicy, PieceMut, Received, Stream};
use rampool_pager::fork::ChildMemory;
use rampool_paging::space::AddressSpace;
use rampool_server::ServerConfig;
use rampool_server::threadless::Threadless;
use rampool_sharing::channel::{Channel, ChannelConfig};
use rampool_sharing::control::{Control, FrameKind, Framed, MOST_FRAME_BYTES, deframe};
use rampool_sharing::message::Message;
use rampool_wire::frame::{
    AttachLease, AwaitBody, CopyRequest, Delivery, FetchOp, Granted, HEADER_BYTES, Header, LeaseId,
    LeaseToken, Listed, MAX_BULK_BYTES, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES, MAX_PAGE_INDEX, MAX_PAGES,
    MAX_REFERENCE_BYTES, MAX_SETTLED, MAX_TABLE_BYTES, MemberId, NamedRegion, Opcode, OpenLease, PageEntry,
    Piece, Publish, Published, Push, PushHeads, QueueBounds, Reach, Reference, RegionId, ScanRequest,
    Settlement, Take, Window, encode_extents, encode_frame, encode_put, encode_reduced, glimpse, page_crc,
    parse_accumulate_arg, parse_extents, parse_get_reply, parse_message, parse_put, parse_reduced,
};
use rampool_wire::layout::Program;
use rampool_wire::session::{Encryption, PREFACE_BYTES, Preface, ServerPolicy, accept, agree};
use rampool_wire::tenant::{TENANT_BYTES, TenantId};
use rampool_wire::units::{ByteLen, Extent, PageIndex};
use rampool_wire::{checksum, fabric, rings};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A header, and the table after it, read as the header says. The checksums are corrected, so that mutations
/// reach the fields.
pub fn frame(data: &[u8]) {
    if let Some((_, piece)) = glimpse(data) {
        assert_eq!(Piece::at(piece.offset(), piece.len), Some(piece));
    }
    let mut data = data.to_vec();
    seal_frame(&mut data);
    let Some((head, rest)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(header) = Header::parse(head) else { return };
    assert!(header.table_len as usize <= MAX_TABLE_BYTES && header.bulk_len as usize <= MAX_BULK_BYTES);
    assert_eq!(Header::parse(&header.encode()), Ok(header));
    let table = &rest[..rest.len().min(header.table_len as usize)];
    let (mut extents, mut entries) = (Vec::new(), Vec::new());
    match header.opcode {
        Opcode::Put if !header.is_reply() => {
            if parse_put(&header, table, true, &mut extents, &mut entries).is_ok() {
                assert!(entries.len() <= MAX_PAGES);
                assert_eq!(entries.iter().map(|e| u64::from(e.len)).sum::<u64>(), u64::from(header.bulk_len));
                let mut again = Vec::new();
                encode_put(&mut again, header, &extents, &entries);
                assert_eq!(&again[HEADER_BYTES..], table);
            }
        }
        Opcode::Get if header.is_reply() => {
            let pages = table.len() / 8;
            if parse_get_reply(&header, table, pages, false, &mut entries).is_ok() {
                assert!(entries.iter().all(|e| e.len == 0 || e.len == 4096));
            }
        }
        Opcode::Gather | Opcode::Scatter | Opcode::Accumulate if !header.is_reply() => {
            if let Ok(window) = Window::parse_with(table, &mut Vec::new()) {
                assert_eq!(window.pieces().map(|piece| piece.len as u64).sum::<u64>(), u64::from(window.len));
                assert_eq!(window.blocks().iter().map(|block| block.len).sum::<u32>(), window.len);
            }
            let _ = parse_accumulate_arg(header.arg);
        }
        Opcode::ReadPiece if !header.is_reply() => {
            if let Ok(piece) = Piece::parse(&header) {
                assert!(piece.len > 0 && piece.within + piece.len <= 4096);
                assert_eq!(piece.encode(), header.arg);
            }
        }
        Opcode::Scan if !header.is_reply() => _ = ScanRequest::parse(&header, table),
        Opcode::Scan => {
            if let Ok(reduced) = parse_reduced(table) {
                let mut again = Vec::new();
                encode_reduced(&reduced, &mut again);
                assert_eq!(again, table);
            }
        }
        Opcode::Reach if !header.is_reply() => _ = Reach::parse(header.arg, table),
        Opcode::Reach => _ = Published::parse_all(table),
        Opcode::Publish => {
            if let Ok(publish) = Publish::parse(table) {
                let mut again = Vec::new();
                publish.encode(&mut again);
                assert_eq!(again, table);
            }
        }
        Opcode::FetchOp => _ = FetchOp::parse(&header, table).map(|op| op.apply(header.request)),
        Opcode::Copy => {
            if let Ok(copy) = CopyRequest::parse(table) {
                let mut again = Vec::new();
                copy.encode(&mut again);
                assert_eq!(CopyRequest::parse(&again), Ok(copy));
            }
        }
        Opcode::OpenQueue => {
            _ = QueueBounds::parse(table)
                .map(|(_, name)| assert!(name.len() <= 255 && !name.chars().any(char::is_control)))
        }
        Opcode::ListQueues => _ = Listed::parse_all(table),
        Opcode::ListRegions => _ = NamedRegion::parse_all(table),
        Opcode::Push if !header.is_reply() => {
            if let Ok(push) = Push::parse(table) {
                assert!(
                    push.head.len() <= MAX_HEAD_BYTES && push.body.reference().len() <= MAX_REFERENCE_BYTES
                );
                let mut again = Vec::new();
                push.encode(&mut again);
                assert_eq!(again, table);
                let _ =
                    Reference::parse(push.body.reference()).map(|told| assert!(told.program.bounds().0 >= 0));
            }
        }
        Opcode::PushHeads if !header.is_reply() => {
            if let Ok(pushes) = PushHeads::parse(table) {
                let heads: Vec<&[u8]> = pushes.heads().collect();
                assert!(
                    !heads.is_empty()
                        && heads.len() as u64 == pushes.count()
                        && heads.iter().all(|head| head.len() <= MAX_HEAD_BYTES)
                );
                assert_eq!(PushHeads::fit(&heads), heads.len());
                let mut again = Vec::new();
                PushHeads::encode(pushes.timeout_ms, &heads, &mut again);
                assert_eq!(again, table);
            }
        }
        Opcode::Take if header.is_reply() => {
            if let Ok(deliveries) = Delivery::parse_all(table) {
                let mut again = Vec::new();
                deliveries.iter().for_each(|delivery| delivery.encode(&mut again));
                assert_eq!(again, table);
            }
        }
        Opcode::Take => {
            if let Ok(take) = Take::parse(table) {
                assert!(take.most > 0 && take.acknowledged.len() <= MAX_SETTLED);
                let mut again = Vec::new();
                take.encode(&mut again);
                assert_eq!(again, table);
            }
        }
        Opcode::Settle => {
            _ = Settlement::parse(table).map(|(_, numbers)| assert!(numbers.len() <= MAX_SETTLED))
        }
        Opcode::AwaitBody => _ = AwaitBody::parse(table),
        opcode => {
            if parse_extents(&header, table, &mut extents).is_ok() {
                assert!(extents.iter().all(|e| e.count > 0 && e.end().0 <= MAX_PAGE_INDEX));
                if opcode != Opcode::Discard {
                    let mut again = Vec::new();
                    encode_extents(&mut again, header, &extents);
                    assert_eq!(&again[HEADER_BYTES..], table);
                }
            }
            assert!(parse_message(table).chars().count() <= MAX_MESSAGE_BYTES);
        }
    }
}

/// A layout's encoded form: an accepted layout is within its bounds, encodes to one with the same meaning,
/// and gives the same bytes in pieces as at once.
pub fn layout(data: &[u8]) {
    const MOST: u64 = 20_000;
    let Ok(program) = Program::decode(data) else { return };
    let mut again = Vec::new();
    program.encode(&mut again);
    assert_eq!(Program::decode(&again).as_ref(), Ok(&program));
    let (low, high) = program.bounds();
    let bytes = |from: u64, len: u64| program.window(from, len).flat_map(|run| run.offset..run.end());
    let whole: Vec<i64> = bytes(0, MOST).collect();
    assert_eq!(whole.len() as u64, program.bytes().min(MOST));
    assert!(whole.iter().all(|byte| (low..high).contains(byte)));
    let step = whole.len() as u64 / 3 + 1;
    assert!((0..3).flat_map(|piece| bytes(piece * step, step)).take(whole.len()).eq(whole.iter().copied()));
    // Any layout must be read in a short time.
    let _ = (program.overlaps(), program.is_aligned(8));
    if let Ok(shifted) = program.clone().shifted(64)
        && program.bytes() > 0
    {
        assert_eq!(shifted.bounds(), (low + 64, high + 64));
    }
}

/// Lease requests and grants.
pub fn control(data: &[u8]) {
    if let Ok(open) = OpenLease::parse(data) {
        assert!(!open.name.chars().chain(open.host.chars()).any(char::is_control));
        assert_eq!(OpenLease::parse(&open.encode()), Ok(open));
    }
    if let Ok(attach) = AttachLease::parse(data) {
        assert_eq!(AttachLease::parse(&attach.encode()), Ok(attach));
    }
    if let Ok(granted) = Granted::parse(data) {
        assert_eq!(granted.encode(), data);
    }
}

/// A message between ranks of the shared view.
pub fn message(data: &[u8]) {
    if let Ok(message) = Message::decode(data) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        assert_eq!(Message::decode(&bytes), Ok(message));
    }
}

/// Bytes of a connection between ranks: frames, and the messages in them.
pub fn ranks(data: &[u8]) {
    let mut rest = data;
    while let Ok(Framed::Whole { kind, content, taken, .. }) = deframe(rest) {
        assert!(taken > content.len() && taken <= rest.len() && content.len() <= MOST_FRAME_BYTES);
        match kind {
            FrameKind::Message => message(content),
            FrameKind::Control => {
                if let Ok(control) = Control::decode(content) {
                    let mut bytes = Vec::new();
                    control.encode(&mut bytes);
                    assert_eq!(Control::decode(&bytes), Ok(control));
                }
            }
            FrameKind::Acknowledgement => assert!(content.is_empty()),
        }
        rest = &rest[taken..];
    }
}

/// A server that lends so many pages.
fn threadless(pages: u64) -> Threadless {
    let config = ServerConfig::new(pages << 12, Endpoint::Unix("/nonexistent/rampool".into()));
    Threadless::new(ServerConfig {
        max_connections: 4,
        max_requests: 16,
        grace: Duration::from_millis(10),
        copy_to: config.listen.clone(),
        ..config
    })
}

/// Members that come, go, are lost and come back, in any order, and the server's reaper, which settles
/// departures late and in another order than they were told: every frame is freed once, and in the end
/// nothing is lent.
pub fn reaper(data: &[u8]) {
    let mut server = threadless(64);
    // Those let in: lease, token, member, connection.
    let mut members: Vec<(LeaseId, LeaseToken, MemberId, ConnectionNumber)> = Vec::new();
    let mut now = Tick(0);
    for pair in data.chunks_exact(2) {
        let (what, which) = (pair[0], usize::from(pair[1]));
        let chosen = members.get(which % members.len().max(1)).copied();
        match (what % 8, chosen) {
            (0, _) => {
                let token = LeaseToken([pair[1]; 16]);
                if let Some((lease, member)) = server.open((which as u64 % 40) << 12, token) {
                    members.push((lease, token, member, ConnectionNumber::FIRST));
                }
            }
            (1 | 2, Some((lease, token, member, _))) => {
                let member = if what % 8 == 1 { MemberId(0) } else { member };
                if let Some((member, connection)) = server.attach(lease, token, member) {
                    members.push((lease, token, member, connection));
                }
            }
            (3, Some((lease, _, member, connection))) => {
                members.swap_remove(which % members.len());
                server.lose(now, lease, member, connection);
            }
            (4, Some((lease, _, member, _))) => server.leave(lease, member),
            (5, Some((lease, _, member, connection))) => server.store_page(lease, member, connection),
            (6, _) => server.reap(which),
            (7, _) => {
                now.0 += which as u64 % 16;
                server.expire(now);
            }
            _ => {}
        }
        server.check();
    }
    // All of them go.
    for (lease, _, member, _) in members {
        server.leave(lease, member);
    }
    server.let_others_work(true);
    assert_eq!(server.left(), (0, 0), "something is left");
    server.check();
}

/// Frames of two hostile clients, by turns, to a whole server but for its threads: it answers each or ends
/// its connection, another client's page stays what it is, and when they are gone nothing of theirs is left.
/// Checksums are corrected, and what joins a lease has the token of one that was granted.
pub fn server(data: &[u8]) {
    let mut server = threadless(256);
    let victim = server.connect();
    let encode = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        write(&mut bytes);
        bytes
    };
    let open = OpenLease { bytes: 8 << 12, pid: 1, name: String::new(), host: String::new() }.encode();
    let open = encode(&|out| encode_frame(out, Header::request(Opcode::OpenLease, 1), &open, 0));
    let made = encode(&|out| encode_frame(out, Header::request(Opcode::CreateRegion, 2), &[], 0));
    let (page, extent) = ([7; 4096], [Extent::page(PageIndex(3))]);
    let entry = [PageEntry { crc: page_crc(&page), len: 4096 }];
    let put = Header::request(Opcode::Put, 3).with_region(RegionId(1));
    let mut put = encode(&|out| _ = encode_put(out, put, &extent, &entry));
    put.extend_from_slice(&page);
    let get = Header::request(Opcode::Get, 4).with_region(RegionId(1));
    let get = encode(&|out| encode_extents(out, get, &extent));
    for request in [&open, &made, &put] {
        server.say(victim, request).expect("the victim is served");
    }
    let page = server.say(victim, &get).expect("the victim is served");
    assert!(page.ends_with(&[7; 4096]), "the victim's page");
    let before = server.left();

    let mut clients = [server.connect(), server.connect()];
    let mut granted: Option<Granted> = None;
    let mut rest = data;
    while let Some((head, tail)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let mut head = *head;
        seal(&mut head);
        let Ok(header) = Header::parse(&head) else { break };
        let (table, tail) = tail.split_at(tail.len().min(header.table_len as usize));
        let (bulk, tail) = tail.split_at(tail.len().min(header.bulk_len as usize));
        rest = tail;
        let mut table = table.to_vec();
        if header.opcode == Opcode::AttachLease
            && let (Ok(attach), Some(granted)) = (AttachLease::parse(&table), &granted)
        {
            let member = if attach.member.0.is_multiple_of(2) { MemberId(0) } else { granted.member };
            table = AttachLease { lease: granted.lease, token: granted.token, member, ..attach }.encode();
        }
        // As long as it is, not as long as it says.
        let mut frame = Vec::new();
        let header = Header { bulk_len: u32::try_from(bulk.len()).expect("a part of the input"), ..header };
        encode_frame(&mut frame, header, &table, bulk.len());
        frame.extend_from_slice(bulk);
        let who = usize::from(header.request % 2 == 1);
        match server.say(clients[who], &frame) {
            Some(answer) => {
                let told = answer.split_first_chunk::<HEADER_BYTES>();
                let told = told.and_then(|(head, rest)| Some((Header::parse(head).ok()?, rest)));
                if let Some((told, table)) = told
                    && matches!(told.opcode, Opcode::OpenLease | Opcode::AttachLease)
                    && let Some(table) = table.get(..told.table_len as usize)
                    && let Ok(new) = Granted::parse(table)
                {
                    granted = Some(new);
                }
            }
            None => clients[who] = server.connect(),
        }
        if header.request.is_multiple_of(5) {
            server.let_others_work(header.request.is_multiple_of(3));
        }
        assert_eq!(server.say(victim, &get).as_ref(), Some(&page), "the victim's page");
    }
    server.check();
    clients.into_iter().for_each(|client| server.hang_up(client));
    server.let_others_work(true);
    assert_eq!(server.left(), before, "leases and frames");
    assert_eq!(server.say(victim, &get), Some(page), "the victim's page");
    server.hang_up(victim);
    server.let_others_work(true);
    assert_eq!(server.left(), (0, 0), "something is left");
    server.check();
}

/// Messages that set shared memory up, and connections over UCX, the checksums corrected.
pub fn offer(data: &[u8]) {
    if let Some(bytes) = data.first_chunk::<{ rings::OFFER_BYTES }>() {
        let mut bytes = *bytes;
        let crc = checksum::crc32c(&bytes[..rings::OFFER_BYTES - 4]);
        bytes[rings::OFFER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        if let Ok(offer) = rings::Offer::parse(&bytes) {
            assert_eq!(offer.encode(), bytes);
            assert!(offer.geometry().is_none_or(|geometry| geometry.ring_bytes().is_power_of_two()));
        }
    }
    let mut bytes = data.to_vec();
    if let Some((body, sum)) = bytes.split_last_chunk_mut::<4>() {
        *sum = checksum::crc32c(body).to_le_bytes();
    }
    if let Ok(offer) = fabric::Offer::parse(&bytes) {
        assert_eq!(offer.encode(), bytes);
    }
}

/// The counts of a pair of rings, and of messages over UCX, which the other process may change at any time.
/// Whatever it writes, this side stays within the ring, and within what it was granted.
pub fn counts(data: &[u8]) {
    let geometry = rings::Offer::of(rings::MIN_RING_BYTES)
        .ok()
        .and_then(rings::Offer::geometry)
        .expect("the shortest ring");
    let (mut writer, mut reader) = (rings::Writer::new(geometry), rings::Reader::new(geometry));
    let mut flow = fabric::Flow::new(8, 8);
    let inside = |span: rings::Span| assert!(span.at + span.len <= geometry.ring_bytes());
    for step in data.chunks_exact(9) {
        let told = u64::from_le_bytes(*step[1..].first_chunk().expect("nine bytes"));
        let most = usize::from(step[0]) * 32;
        // Half of them are plausible, so that there is something to corrupt.
        let near = |from: u64| if step[0].is_multiple_of(2) { from + told % 5000 } else { told };
        let _ = (writer.would_write(told), reader.would_read(told));
        if writer.saw(near(writer.written().saturating_sub(5000))).is_ok() {
            inside(writer.next(most));
            writer.wrote(writer.next(most).len);
        }
        assert!(writer.room() <= geometry.ring_bytes());
        if reader.saw(near(reader.read())).is_ok() {
            inside(reader.next(most));
            reader.took(reader.next(most).len);
        }
        assert!(reader.waiting() <= geometry.ring_bytes());
        if flow.hears(near(flow.sent().saturating_sub(told % 10))).is_ok() && flow.may_send() {
            flow.has_sent();
        }
        flow.has_read();
        if flow.should_tell() {
            flow.has_told();
        }
    }
}

/// A datagram at one end of a channel that has something under way, its length and checksum corrected, and
/// every other byte unchanged.
pub fn datagram(data: &[u8]) {
    let mut bytes = data[..data.len().min(usize::from(u16::MAX))].to_vec();
    if bytes.len() >= 6 {
        let len = u16::try_from(bytes.len()).expect("cut off above");
        bytes[..2].copy_from_slice(&len.to_le_bytes());
        let checksum = checksum::crc32c(&bytes[6..]);
        bytes[2..6].copy_from_slice(&checksum.to_le_bytes());
    }
    let mut channel = Channel::new(ChannelConfig::default(), 0);
    channel.send(&[7; 4000]);
    while channel.poll(0).is_some() {}
    let mut out = Vec::new();
    let _ = channel.receive(&bytes, 100, &mut out);
    assert!(out.iter().map(Vec::len).sum::<usize>() <= bytes.len());
    // The channel continues: it answers, repeats, or gives the peer up.
    while channel.poll(1_000).is_some() {}
}

/// Prefaces, and how both sides handle them.
pub fn preface(data: &[u8]) {
    let Some((bytes, rest)) = data.split_first_chunk::<PREFACE_BYTES>() else { return };
    if let Some(tenant) = rest.first_chunk::<TENANT_BYTES>() {
        let mut tenant = *tenant;
        let crc = checksum::crc32c(&tenant[..TENANT_BYTES - 4]);
        tenant[TENANT_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        if let Ok(parsed) = TenantId::parse(&tenant) {
            assert_eq!(parsed.encode(), tenant);
            assert_eq!(parsed.name.as_str().parse(), Ok(parsed.name));
        }
    }
    let mut bytes = *bytes;
    let crc = checksum::crc32c(&bytes[..PREFACE_BYTES - 4]);
    bytes[PREFACE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    let Ok(preface) = Preface::parse(&bytes) else { return };
    assert_eq!(Preface::parse(&preface.encode()), Ok(preface));
    for has_key in [false, true] {
        let policy = ServerPolicy {
            encryption: Encryption::Auto,
            has_key,
            features: 1,
            local_peer: false,
            refuse: None,
        };
        let answer = agree(&preface, &policy, 1);
        assert_eq!(answer.features & !1, 0);
        let asked = Preface::ask(Encryption::On, has_key, 0, 1);
        if let Ok((security, features)) = accept(&asked, &preface) {
            assert_eq!((security, features), (rampool_wire::session::Security::Sealed, 0));
        }
    }
}

/// A stream of frames as a link receives it, in two pieces: never more than announced, never a panic.
pub fn link(data: &[u8]) {
    let (mut ours, mut link) = open_link();
    let (first, second) = data.split_at(data.len() / 2);
    let mut room = Vec::new();
    for part in [first, second] {
        if ours.write_all(part).is_err() || !receive_all(&mut link, &mut room) {
            return;
        }
    }
}

/// Bytes of an unauthenticated peer to a server with a key, and to a client with one: no link is established.
pub fn handshake(data: &[u8]) {
    let policy = LocalPolicy {
        key: Some(Key::from_bytes([7; 32])),
        encryption: Encryption::Auto,
        features: 1,
        ucx: None,
    };
    for client in [false, true] {
        let (mut ours, theirs) = UnixStream::pair().expect("a socket pair");
        let stream = Stream::adopt(theirs).expect("it is connected");
        let mut handshake = if client {
            Handshake::client(stream, policy.clone())
        } else {
            Handshake::server(stream, policy.clone(), None)
        };
        ours.write_all(data).expect("it fits the socket's buffer");
        ours.shutdown(std::net::Shutdown::Write).expect("it is connected");
        loop {
            match handshake.advance::<()>() {
                Ok(None) => {}
                Ok(Some(_)) => panic!("a link without the key"),
                Err(_) => break,
            }
        }
    }
}

/// Text from users and from elsewhere: addresses, amounts, tickets, listeners, a server's status.
pub fn text(data: &[u8]) {
    let _ = serde_json::from_slice::<rampool_server::ServerStatus>(data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = text.parse::<ByteLen>();
    if let Ok(endpoint) = text.parse::<rampool_net::transport::Endpoint>() {
        assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
    }
    if let Ok(spec) = text.parse::<rampool_client::pool::ServerSpec>() {
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }
    let _ = rampool_net::transport::zero_copy::parse_wish(text);
    let _ = text.parse::<rampool_client::pool::LeaseTicket>();
    let _ = text.parse::<rampool_client::pool::RegionTicket>();
    let _ = text.parse::<rampool_client::pool::Membership>();
    if let Ok(ticket) = text.parse::<rampool_shared::OutsideTicket>() {
        assert_eq!(ticket.to_string().parse::<rampool_shared::OutsideTicket>().ok(), Some(ticket));
    }
    if let Ok(handed) = text.parse::<rampool_pager::region::HandedOver>() {
        assert_eq!(handed.to_string().parse(), Ok(handed));
    }
}

/// What a forked child is told of its memory: accepted bytes are exactly what an encoder produces, and can be
/// taken over.
pub fn child(data: &[u8]) {
    let Some(memory) = ChildMemory::decode(data) else { return };
    assert_eq!(memory.encode(), data);
    let space = AddressSpace::from_spans(&memory.spans);
    assert_eq!(space.spans(), memory.spans);
    let pages = |extent: &Extent| extent.first.0..extent.end().0;
    assert!(memory.absent.windows(2).all(|two| pages(&two[0]).end <= two[1].first.0));
    assert!(memory.absent.iter().all(|extent| !pages(extent).is_empty()));
}

/// DLM-M's file: an accepted file means what it says, and a file with only that content means the same.
pub fn dlmm(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let words: Vec<&str> = text.split_whitespace().collect();
    if let Ok(options) = conf::Options::parse(&words) {
        assert!(options.nodes.is_none_or(|nodes| nodes >= 2));
    }
    for nodes in [None, Some(0), Some(1), Some(2), Some(usize::MAX)] {
        let Ok(conf) = conf::Conf::parse(text, nodes) else { continue };
        assert!(!conf.servers.is_empty() && nodes.is_none_or(|nodes| conf.servers.len() == nodes - 1));
        let mut again = format!("{} {}\n", conf.compute_node, conf.local.0 / ByteLen::MIB);
        for server in &conf.servers {
            let memory = server.memory.expect("every line says how much").0;
            again += &format!("{} {} // a comment\n", server.endpoint, memory / ByteLen::MIB);
        }
        assert_eq!(conf::Conf::parse(&again, nodes), Ok(conf), "{again}");
    }
}

/// The trace of two ranks, one file after the other: an accepted trace is predicted in numbers, on any
/// network, unchanged and undisturbed. If a line is invalid, the valid ones are tried without it.
pub fn trace(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let makes_sense =
        |line: &&str| serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(line).is_ok();
    let sane: Vec<&str> = text.lines().filter(|line| line.is_empty() || makes_sense(line)).collect();
    let dir = tempfile::tempdir().expect("a directory for the files");
    for text in [&*text, &sane.join("\n")] {
        let (zero, one) = text.split_once("\n\n").unwrap_or((text, ""));
        for (rank, text) in [zero, one].iter().enumerate() {
            std::fs::write(dir.path().join(format!("rank-{rank}.jsonl")), text).expect("it fits");
        }
        let Ok(recording) = Recording::read(dir.path()) else { continue };
        let machine = Machine { slower: 1.0, software_slower: 1.0, updates_by_hardware: false };
        for recording in [recording.clone(), recording.undisturbed()] {
            let networks = Network::presets().into_iter().take(2).chain(Network::recorded(&recording));
            for network in networks {
                let Ok(prediction) = replay(&recording, &network, machine) else { continue };
                assert!(
                    prediction.elapsed_us() >= 0.0 && prediction.elapsed_us().is_finite(),
                    "{}",
                    prediction.elapsed_us()
                );
                assert!(additive(&recording, &network, machine) >= 0.0);
            }
        }
    }
}

/// Corrects the checksums of a frame, and makes its table as long as there are bytes.
fn seal_frame(data: &mut [u8]) {
    let Some((head, table)) = data.split_first_chunk_mut::<HEADER_BYTES>() else { return };
    if table.len() <= MAX_TABLE_BYTES {
        let table_len = u32::try_from(table.len()).expect("at most MAX_TABLE_BYTES");
        head[32..36].copy_from_slice(&table_len.to_le_bytes());
        head[40..44].copy_from_slice(&rampool_wire::frame::table_crc(table).to_le_bytes());
    }
    seal(head);
}

/// Corrects the checksum of a header.
fn seal(head: &mut [u8; HEADER_BYTES]) {
    let crc = checksum::crc32c(&head[..HEADER_BYTES - 4]);
    head[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
}

/// A plain link and the socket at its other end.
fn open_link() -> (UnixStream, Link) {
    let policy = LocalPolicy { key: None, encryption: Encryption::Auto, features: 0, ucx: None };
    let (mut ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut server = Handshake::server(Stream::adopt(theirs).expect("it is connected"), policy, None);
    ours.write_all(&Preface::ask(Encryption::Auto, false, 0, 1).encode())
        .expect("it fits the socket's buffer");
    let link = server.advance().expect("a good preface").expect("nothing else is awaited");
    ours.set_nonblocking(true).expect("a socket");
    (ours, link)
}

/// False: the link is over.
fn receive_all(link: &mut Link, room: &mut Vec<u8>) -> bool {
    loop {
        match link.receive() {
            Ok(Received::Blocked) => return true,
            Ok(Received::Head(header)) => {
                assert_eq!(link.table().len(), header.table_len as usize);
                if header.bulk_len > 0 {
                    room.clear();
                    room.resize(header.bulk_len as usize, 0);
                    // SAFETY: `room` is not touched before the link is asked again, and outlives the link's
                    // use of it: `link` receives only here.
                    unsafe { link.place(&[PieceMut { ptr: room.as_mut_ptr(), len: room.len() }]) };
                }
            }
            Ok(Received::Bulk(_)) => {}
            Err(_) => return false,
        }
    }
}
