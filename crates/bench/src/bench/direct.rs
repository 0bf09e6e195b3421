//! The direct view: small gets compared with raw round trips, long ones with a plain stream, layouts with one
//! get for each element, and a column scan with the paged view.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rampool_client::direct::{Direct, DirectRegion, Filter, Total};
use rampool_client::pool::PoolConfig;
use rampool_kernel::thread::allowed_cpus;
use rampool_net::transport::SameHost;
use rampool_pager::fault::FaultModeChoice;
use rampool_wire::layout::{Layout, Order};
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;

use super::Common;
use super::peer::{self, RawMemory, RawStream, Wanted};
use super::report::{Reach, Report, in_rounds, p50_of};
use super::sequential::{PLAIN_AND_UNPACED, stream_into};
use super::server::WorkDir;
use super::service::{Paged, Place, Service, Words};
use super::workload::{permutation, word};

/// The direct view, compared with round trips, streams, single gets and the paged view
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    /// Measure only this part [default: all]
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Gets of 8 B and 4 KiB, compared with raw round trips
    Small,
    /// Gets and puts of 1 MiB, compared with plain streams
    Long,
    /// Layouts, compared with one get for each element
    Layouts,
    /// A column, compared with the paged view
    Column,
    /// Gets and puts within this host
    SameHost,
    /// Copies from server to server
    Copies,
}

pub const SEED: u64 = 5;
pub const SPIN: Duration = Duration::from_millis(2);
pub const MIB: u64 = 1 << 20;
/// The lattice of the halo exchange: its side, in four dimensions.
const SIDE: u64 = 32;

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let rounds = common.rounds(7, 2);
    // Before this thread keeps to one of them.
    let cpus = allowed_cpus();
    let place = Place::loopback();
    let mut report = Report::start("direct", common.quick);
    let wanted = |part| args.only.is_none_or(|only| only == part);
    let carried = match args.only {
        None => "loopback TCP; within the same host, shared memory and Unix sockets",
        Some(Part::SameHost) => "shared memory and Unix sockets",
        Some(_) => "loopback TCP",
    };
    report.note(format!("{carried}; one connection, both sides spin; {}", place.describe()));
    report.note("content is random, and every byte of every answer is compared");
    if [Part::Small, Part::Long, Part::Layouts, Part::Column].into_iter().any(wanted) {
        over_tcp(&mut report, &place, rounds, common, wanted)?;
    }
    if wanted(Part::SameHost) {
        same_host(&mut report, &place, rounds, common)?;
    }
    if wanted(Part::Copies) {
        copies(&mut report, &cpus, rounds, common)?;
    }
    report.finish(common.json.as_deref())
}

/// One server, one client.
fn over_tcp(
    report: &mut Report,
    place: &Place<'_>,
    rounds: usize,
    common: &Common,
    wanted: impl Fn(Part) -> bool,
) -> Result<()> {
    let bytes = common.pick(64 * MIB, 16 * MIB);
    let rows = common.pick(64 * 1024, 2048);
    let server = Service::memory_server(place, 4 * bytes + rows * 2 * 4096, SPIN)?;
    let peer = Service::raw_peer(place, SPIN)?;
    let plain_peer = Service::plain_peer(place, SPIN)?;
    let mut direct = connect(&server, 2 * bytes + rows * 4096)?;
    let region = direct.create(bytes)?;
    for at in (0..bytes).step_by(index(MIB)) {
        direct.put(region, at, &content(at, MIB))?;
    }
    if wanted(Part::Small) {
        small(report, &mut direct, region, &peer, rounds, common)?;
    }
    if wanted(Part::Long) {
        long(report, &mut direct, region, [&plain_peer, &peer], rounds, common)?;
    }
    if wanted(Part::Layouts) {
        layouts(report, &mut direct, region, rounds, common)?;
    }
    direct.free(region);
    if wanted(Part::Column) {
        column(report, &mut direct, &server, rows, rounds)?;
    }
    direct.close();
    Ok(())
}

pub fn connect(server: &Service, bytes: u64) -> Result<Direct> {
    let mut config = PoolConfig::new(vec![server.address.parse()?], ByteLen(bytes), "rampool bench direct");
    config.encryption = Encryption::Off;
    let mut direct = Direct::connect(&config)?;
    direct.spin_for(SPIN);
    Ok(direct)
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a 64-bit machine")
}

/// The content of a region from `at` on, a multiple of 8.
pub fn content(at: u64, len: u64) -> Vec<u8> {
    (at / 8..(at + len).div_ceil(8)).flat_map(|n| word(SEED, n).to_le_bytes()).take(index(len)).collect()
}

/// The content that a layout at byte 0 selects.
pub fn selected(layout: &Layout) -> Vec<u8> {
    layout.program().runs().flat_map(|run| content(run.offset.cast_unsigned(), run.len)).collect()
}

fn small(
    report: &mut Report,
    direct: &mut Direct,
    region: DirectRegion,
    peer: &Service,
    rounds: usize,
    common: &Common,
) -> Result<()> {
    let samples = common.pick(20_000, 500);
    for (bytes, name) in [(8usize, "8 B"), (4096, "4 KiB")] {
        let mut raw = RawStream::connect(&peer.address, SPIN)?;
        let peer_content = peer::content();
        let mut buffer = vec![0u8; bytes];
        let pages = region.bytes() / 4096;
        let page = |n: usize| word(SEED + 1, n as u64) % pages;
        let found = in_rounds(rounds, |_| {
            let ours = p50_of(samples, |n| get_one(direct, region, page(n) * 4096, &mut buffer))?;
            // The same bytes again and again, and then bytes of the same pages of as much memory.
            let mut raw = |copies| {
                p50_of(samples, |n| {
                    let from = if copies == 1 { 0 } else { page(n) * 4096 };
                    let started = Instant::now();
                    raw.ask(Wanted { from, copies, ..Wanted::first(bytes as u64) })?;
                    raw.read_exactly(&mut buffer)?;
                    let took = started.elapsed();
                    // The same work between two requests as above, so that the peer waits as long, and the
                    // caches hold as much other data.
                    std::hint::black_box(content(page(n) * 4096, bytes as u64));
                    if buffer != peer_content[index(from) % peer_content.len()..][..bytes] {
                        bail!("WRONG CONTENT from the raw peer");
                    }
                    Ok(took)
                })
            };
            Ok([ours, raw(1)?, raw(region.bytes() / peer_content.len() as u64)?])
        })?;
        let what = ["get of", "raw round trip with", "raw round trip with"];
        let which = ["", "", " of as much memory"];
        let names = [0, 1, 2].map(|n| format!("{} {name}{}, p50", what[n], which[n]));
        report.all("us", names.each_ref().map(String::as_str), &found);
        let ([ours, theirs, theirs_of_many], reach) = (found, Some(Reach::AtMost(1.15)));
        report.ratio(&format!("get of {name} / raw round trip"), &ours, &theirs, reach);
        let of_many = format!("get of {name} / raw round trip, of as much memory");
        report.ratio(&of_many, &ours, &theirs_of_many, reach);
    }
    Ok(())
}

/// How long one get takes. Comparing is not part of it.
fn get_one(direct: &mut Direct, region: DirectRegion, at: u64, buffer: &mut [u8]) -> Result<Duration> {
    let started = Instant::now();
    direct.get(region, at, buffer)?;
    let took = started.elapsed();
    if *buffer != content(at, buffer.len() as u64) {
        bail!("WRONG CONTENT at byte {at}");
    }
    Ok(took)
}

/// 1 MiB at a time, four under way.
fn long(
    report: &mut Report,
    direct: &mut Direct,
    region: DirectRegion,
    [plain_peer, peer]: [&Service; 2],
    rounds: usize,
    common: &Common,
) -> Result<()> {
    report.note(PLAIN_AND_UNPACED);
    let times = common.pick(512u64, 32);
    let places = region.bytes() / MIB;
    let blocks: Vec<Vec<u8>> = (0..places).map(|n| content(n * MIB, MIB)).collect();
    let found = in_rounds(rounds, |_| {
        let (got, put) = megabytes(direct, region, &blocks, times)?;
        // A plain stream repeated out of and into one megabyte, which stays in the caches, and an unpaced
        // one; then out of as much memory as the gets read, and into as much as the puts write. And as puts,
        // by a sender that makes the checksum of each page, as a put has to.
        let stream = |peer: &Service, copies, buffers, checksummed| {
            let wanted = Wanted { copies, checksummed, ..Wanted::first(times * MIB) };
            stream_into(&peer.address, SPIN, wanted, buffers)
        };
        Ok([
            got,
            put,
            stream(plain_peer, 1, 1, false)?,
            stream(peer, 1, 1, false)?,
            stream(peer, places, 4, false)?,
            stream(peer, 4, 4, false)?,
            stream(peer, 4, 4, true)?,
        ])
    })?;
    let names = [
        "get of 1 MiB, four under way",
        "put of 1 MiB, four under way",
        "plain TCP stream of 1 MiB, over and over",
        "unpaced TCP stream of 1 MiB, over and over",
        "unpaced TCP stream of as much memory as the gets",
        "unpaced TCP stream of as much memory as the puts",
        "the same with a checksum of each page made by the sender",
    ];
    report.all("GB/s", names, &found);
    let ([gets, puts, plain, raw, raw_get, raw_put, checked], reach) = (found, Some(Reach::AtLeast(0.9)));
    report.ratio("get of 1 MiB / plain stream", &gets, &plain, reach);
    report.ratio("put of 1 MiB / plain stream", &puts, &plain, reach);
    report.ratio("get of 1 MiB / unpaced stream of as much memory", &gets, &raw_get, reach);
    report.ratio("put of 1 MiB / unpaced stream of as much memory", &puts, &raw_put, reach);
    let checksums = "stream with checksums / stream, unpaced, as much memory as the puts";
    report.ratio(checksums, &checked, &raw_put, None);
    report.ratio("put of 1 MiB / unpaced stream with checksums", &puts, &checked, None);
    report.ratio("get of 1 MiB / unpaced stream of 1 MiB, over and over", &gets, &raw, None);
    report.ratio("put of 1 MiB / unpaced stream of 1 MiB, over and over", &puts, &raw, None);
    Ok(())
}

/// Layouts with their names: each is one get, or several at once.
pub fn cells(bytes: u64, sparse: u64) -> Result<Vec<(String, Vec<Layout>)>> {
    let element = Layout::bytes(8)?;
    let dense = bytes / 64;
    let order = permutation(SEED, index(bytes / 8));
    let list: Vec<(u64, i64)> =
        order.iter().take(index(dense)).map(|n| (1, i64::try_from(*n).expect("far below"))).collect();
    let random = element.indexed(&list)?;
    let face = |dimension: usize, start: u64| {
        let (mut part, mut at) = ([SIDE; 4], [0; 4]);
        (part[dimension], at[dimension]) = (1, start);
        element.subarray(&[SIDE; 4], &part, &at, Order::C)
    };
    let faces = (0..4)
        .flat_map(|dimension| [face(dimension, 0), face(dimension, SIDE - 1)])
        .collect::<Result<Vec<_>, _>>()?;
    Ok(vec![
        (format!("strided get, {sparse} x 8 B, stride 4 KiB"), vec![element.hvector(sparse, 1, 4096)?]),
        (format!("strided get, {dense} x 8 B, stride 64 B"), vec![element.hvector(dense, 1, 64)?]),
        (format!("random gather, {dense} x 8 B"), vec![random]),
        ("8 faces of a 32^4 lattice of 8 B".to_owned(), faces),
    ])
}

/// Gets all of them at once into the buffers.
pub fn get_all(
    direct: &mut Direct,
    region: DirectRegion,
    layouts: &[Layout],
    buffers: &mut [Vec<u8>],
) -> Result<Duration> {
    let started = Instant::now();
    let mut gets = Vec::new();
    for (layout, buffer) in layouts.iter().zip(&mut *buffers) {
        gets.push(direct.start_get_into(region, 0, layout, std::mem::take(buffer))?);
    }
    for (get, buffer) in gets.into_iter().zip(buffers) {
        *buffer = direct.wait(get)?;
    }
    Ok(started.elapsed())
}

fn layouts(
    report: &mut Report,
    direct: &mut Direct,
    region: DirectRegion,
    rounds: usize,
    common: &Common,
) -> Result<()> {
    let bytes = region.bytes();
    let cells = cells(bytes, common.pick(16_384, 4096))?;
    for (name, layouts) in &cells {
        let want: Vec<Vec<u8>> = layouts.iter().map(selected).collect();
        let mut buffers = vec![Vec::new(); layouts.len()];
        let [took] = in_rounds(rounds, |_| {
            let time = get_all(direct, region, layouts, &mut buffers)?.as_secs_f64() * 1e3;
            if buffers != want {
                bail!("WRONG CONTENT: {name}");
            }
            Ok([time])
        })?;
        report.samples(name, "ms", &took);
    }
    // One get for each element, of the first of them.
    let (element, dense) = (Layout::bytes(8)?, bytes / 64);
    let singles = common.pick(4096, 256);
    let strided = element.hvector(dense, 1, 64)?;
    let (mut one_by_one, mut at_once) = (Vec::new(), Vec::new());
    let mut buffer = Vec::new();
    for _ in 0..rounds {
        let mut bytes = [0; 8];
        let started = Instant::now();
        for n in 0..singles {
            direct.get(region, n * 64, &mut bytes)?;
            if bytes != word(SEED, n * 8).to_le_bytes() {
                bail!("WRONG CONTENT of element {n}");
            }
        }
        one_by_one.push(started.elapsed().as_secs_f64() * 1e9 / singles as f64);
        let started = Instant::now();
        let get = direct.start_get_into(region, 0, &strided, buffer)?;
        buffer = direct.wait(get)?;
        at_once.push(started.elapsed().as_secs_f64() * 1e9 / dense as f64);
    }
    report.samples("one get for each element", "ns an element", &one_by_one);
    report.samples("one get of all elements", "ns an element", &at_once);
    report.ratio("one get for each element / one of all", &one_by_one, &at_once, Some(Reach::AtLeast(100.0)));
    // 64-byte elements compared with the same bytes in one piece.
    let count = bytes / 256;
    let (spread, dense) = (Layout::bytes(64)?.hvector(count, 1, 256)?, Layout::bytes(count * 64)?);
    let want = selected(&spread);
    let [gathered, contiguous] = in_rounds(rounds, |_| {
        let mut get = |layout| -> Result<f64> {
            let started = Instant::now();
            let get = direct.start_get_into(region, 0, layout, std::mem::take(&mut buffer))?;
            buffer = direct.wait(get)?;
            let rate = (count * 64) as f64 / started.elapsed().as_secs_f64() / 1e9;
            if std::ptr::eq(layout, &raw const spread) && buffer != want {
                bail!("WRONG CONTENT of 64-byte elements");
            }
            Ok(rate)
        };
        Ok([get(&spread)?, get(&dense)?])
    })?;
    report.samples("gather of 64-byte elements, stride 256 B", "GB/s", &gathered);
    report.samples("the same bytes in one piece", "GB/s", &contiguous);
    let reach = Some(Reach::AtLeast(0.75));
    report.ratio("gather of 64-byte elements / contiguous", &gathered, &contiguous, reach);
    Ok(())
}

/// Shared memory compared with the same server's socket, the least that two processes need, and memcpy.
fn same_host(report: &mut Report, place: &Place<'_>, rounds: usize, common: &Common) -> Result<()> {
    let bytes = common.pick(64 * MIB, 16 * MIB);
    let dir = WorkDir::create()?;
    let listen = format!("unix:{}", dir.0.join("server").display());
    let server = Service::memory_server_at(place, &listen, 4 * bytes, SPIN)?;
    let open = |how| -> Result<(Direct, DirectRegion)> {
        let mut config =
            PoolConfig::new(vec![server.address.parse()?], ByteLen(bytes + MIB), "rampool bench direct");
        config.same_host = Some(how);
        let mut direct = Direct::connect(&config)?;
        direct.spin_for(SPIN);
        let region = direct.create(bytes)?;
        for at in (0..bytes).step_by(index(MIB)) {
            direct.put(region, at, &content(at, MIB))?;
        }
        Ok((direct, region))
    };
    let (mut rings, mut socket) = (open(SameHost::Rings)?, open(SameHost::Socket)?);
    let (memory, file) = RawMemory::create()?;
    let raw = Service::raw_memory_peer(place, file.as_fd())?;
    let samples = common.pick(20_000, 500);
    for (size, name) in [(8usize, "8 B"), (4096, "4 KiB")] {
        let mut buffer = vec![0u8; size];
        let peer_content = peer::content();
        let found = in_rounds(rounds, |_| {
            let mut get = |(direct, region): &mut (Direct, DirectRegion)| {
                let at = |n: usize| word(SEED + 1, n as u64) % (bytes / 4096) * 4096;
                p50_of(samples, |n| get_one(direct, *region, at(n), &mut buffer))
            };
            let (ours, plain) = (get(&mut rings)?, get(&mut socket)?);
            let theirs = p50_of(samples, |_| {
                let started = Instant::now();
                memory.get(&mut buffer)?;
                let took = started.elapsed();
                if buffer != peer_content[..size] {
                    bail!("WRONG CONTENT from the raw peer");
                }
                Ok(took)
            })?;
            Ok([ours, plain, theirs])
        })?;
        let [ours, plain, theirs] = found;
        report.samples(&format!("same host: get of {name}, shared memory, p50"), "us", &ours);
        report.samples(&format!("same host: get of {name}, Unix socket, p50"), "us", &plain);
        report.samples(&format!("same host: raw round trip over memory, {name}, p50"), "us", &theirs);
        report.ratio(&format!("same host: get of {name}, socket / shared memory"), &plain, &ours, None);
        report.ratio(&format!("same host: get of {name} / raw over memory"), &ours, &theirs, None);
    }
    drop(raw);
    let blocks: Vec<Vec<u8>> = (0..bytes / MIB).map(|n| content(n * MIB, MIB)).collect();
    let times = common.pick(1024u64, 32);
    let found = in_rounds(rounds, |_| {
        let (get, put) = megabytes(&mut rings.0, rings.1, &blocks, times)?;
        let copy = copied(&blocks, times);
        let (socket_get, socket_put) = megabytes(&mut socket.0, socket.1, &blocks, times / 4)?;
        Ok([get, put, socket_get, socket_put, copy])
    })?;
    let names = [
        "same host: get of 1 MiB, shared memory",
        "same host: put of 1 MiB, shared memory",
        "same host: get of 1 MiB, Unix socket",
        "same host: put of 1 MiB, Unix socket",
        "same host: memcpy of 1 MiB",
    ];
    report.all("GB/s", names, &found);
    let [gets, puts, _, _, copies] = found;
    report.ratio("same host: get of 1 MiB / memcpy", &gets, &copies, Some(Reach::AtLeast(0.5)));
    report.ratio("same host: put of 1 MiB / memcpy", &puts, &copies, Some(Reach::AtLeast(0.5)));
    for (direct, region) in [&mut rings, &mut socket] {
        direct.free(*region);
        direct.close();
    }
    Ok(())
}

/// GB/s of gets, and of puts, of 1 MiB, four under way. All that is there afterwards is compared.
fn megabytes(
    direct: &mut Direct,
    region: DirectRegion,
    blocks: &[Vec<u8>],
    times: u64,
) -> Result<(f64, f64)> {
    let block = Layout::bytes(MIB)?;
    let places = blocks.len() as u64;
    let rate = |started: Instant| (times * MIB) as f64 / started.elapsed().as_secs_f64() / 1e9;
    let mut buffers: Vec<Vec<u8>> = (0..4).map(|_| vec![0; index(MIB)]).collect();
    let mut under_way = VecDeque::new();
    let started = Instant::now();
    for n in 0..times {
        let buffer = match buffers.pop() {
            Some(buffer) => buffer,
            None => direct.wait(under_way.pop_front().expect("four of them"))?,
        };
        under_way.push_back(direct.start_get_into(region, n % places * MIB, &block, buffer)?);
    }
    for get in under_way.drain(..) {
        buffers.push(direct.wait(get)?);
    }
    let got = rate(started);
    let last = (times - 1) % places;
    if buffers.last() != blocks.get(index(last)) {
        bail!("WRONG CONTENT in block {last}");
    }
    // Each vector has the content of one block, which is put to its place again and again.
    let mut ready: VecDeque<(u64, Vec<u8>)> =
        (0..4.min(places)).map(|n| (n, blocks[index(n)].clone())).collect();
    let mut under_way = VecDeque::new();
    let started = Instant::now();
    for _ in 0..times {
        let (at, bytes) = match ready.pop_front() {
            Some(one) => one,
            None => {
                let (at, put) = under_way.pop_front().expect("four of them");
                (at, direct.wait(put)?)
            }
        };
        under_way.push_back((at, direct.start_put(region, at * MIB, &block, bytes)?));
    }
    for (_, put) in under_way {
        direct.wait(put)?;
    }
    let put = rate(started);
    for (at, want) in (0..).step_by(index(MIB)).zip(blocks) {
        let mut bytes = vec![0; index(MIB)];
        direct.get(region, at, &mut bytes)?;
        if bytes != *want {
            bail!("WRONG CONTENT at byte {at} after it was put");
        }
    }
    Ok((got, put))
}

/// GB/s of copies of these blocks to four others, in turns.
fn copied(blocks: &[Vec<u8>], times: u64) -> f64 {
    let mut buffers: Vec<Vec<u8>> = (0..4).map(|_| vec![0; index(MIB)]).collect();
    let started = Instant::now();
    for (n, block) in (0..times).zip(blocks.iter().cycle()) {
        buffers[index(n % 4)].copy_from_slice(std::hint::black_box(block));
        std::hint::black_box(&mut buffers);
    }
    (times * MIB) as f64 / started.elapsed().as_secs_f64() / 1e9
}

/// The sum of 8 bytes of every row of 4 KiB.
fn column(
    report: &mut Report,
    direct: &mut Direct,
    server: &Service,
    rows: u64,
    rounds: usize,
) -> Result<()> {
    let bytes = rows * 4096;
    let table = direct.create(bytes)?;
    for at in (0..bytes).step_by(index(MIB)) {
        direct.put(table, at, &content(at, MIB.min(bytes - at)))?;
    }
    let want: i128 = (0..rows).map(|row| i128::from(word(SEED, row * 512 + 2).cast_signed())).sum();
    let layout = Layout::bytes(8)?.hvector(rows, 1, 4096)?;
    let memory = Paged {
        server: &server.address,
        key: None,
        memory_bytes: bytes * 9 / 8,
        local_bytes: bytes / 8,
        page_bytes: 4096,
        prefetch_bytes: 2 << 20,
        spin: SPIN,
        fault_mode: FaultModeChoice::Auto,
    }
    .open()?;
    let region = memory.alloc(index(bytes))?;
    let words = Words::new(&region);
    words.fill(SEED);
    let mut wire = 0;
    let mut part = vec![0; index(MIB)];
    let found = in_rounds(rounds, |_| {
        let before = direct.pool().stats().servers[0].received_bytes;
        let started = Instant::now();
        let sum = direct.sum(table, 16, &layout, Filter::<i64>::all())?;
        let summed = started.elapsed().as_secs_f64() * 1e3;
        wire = direct.pool().stats().servers[0].received_bytes - before;
        let started = Instant::now();
        let column = direct.get_values::<i64>(table, 16, &layout)?;
        let here: i128 = column.iter().map(|value| i128::from(*value)).sum();
        let got = started.elapsed().as_secs_f64() * 1e3;
        let started = Instant::now();
        let mut whole = 0;
        for at in (0..bytes).step_by(index(MIB)) {
            let part = &mut part[..index(MIB.min(bytes - at))];
            direct.get(table, at, part)?;
            let column = part
                .chunks_exact(4096)
                .map(|row| i64::from_le_bytes(*row[16..].first_chunk().expect("a row is longer")));
            whole += column.map(i128::from).sum::<i128>();
        }
        let fetched = started.elapsed().as_secs_f64() * 1e3;
        let started = Instant::now();
        let through_pages: i128 =
            (0..index(rows)).map(|row| i128::from(words.read(row * 512 + 2).cast_signed())).sum();
        let scanned = started.elapsed().as_secs_f64() * 1e3;
        if sum != (rows, Total::Integer(want)) || here != want || whole != want || through_pages != want {
            bail!("WRONG SUM of the column");
        }
        Ok([summed, got, fetched, scanned])
    })?;
    report.note(format!(
        "column scan: {rows} rows of 4 KiB; added up at the server {wire} bytes came back, gathered {} \
         bytes, of {bytes}",
        rows * 8
    ));
    let names = [
        "column scan, added up at the server",
        "column scan, gathered and added up here",
        "column scan, the whole table copied and added up here",
        "column scan, paged, an eighth local",
    ];
    report.all("ms", names, &found);
    let [at_server, gathered, copied, paged] = found;
    report.ratio("paged scan / scan at the server", &paged, &at_server, Some(Reach::AtLeast(20.0)));
    report.ratio("paged scan / gathered", &paged, &gathered, Some(Reach::AtLeast(20.0)));
    report.ratio("table copied / scan at the server", &copied, &at_server, None);
    report.ratio("table copied / gathered", &copied, &gathered, None);
    direct.free(table);
    Ok(())
}

/// From one server to another, by the servers themselves and through the client.
fn copies(report: &mut Report, cpus: &[usize], rounds: usize, common: &Common) -> Result<()> {
    let bytes = common.pick(64 * MIB, 8 * MIB);
    let place = |cpu: Option<&usize>| Place {
        host: "127.0.0.1",
        server_cpu: cpu.copied(),
        namespace: None,
        key: None,
    };
    // The client has nothing to do while the servers copy, so the second server shares its CPU.
    let servers = [
        Service::memory_server(&place(cpus.last()), 3 * bytes, Duration::ZERO)?,
        Service::memory_server(&place(cpus.first()), 3 * bytes, Duration::ZERO)?,
    ];
    if let [first, .., last] = cpus {
        report.note(format!(
            "copies: the source on CPU {last}, target and client on CPU {first}, nothing spins"
        ));
    }
    let mut config = PoolConfig::new(
        servers.iter().map(|server| server.address.parse()).collect::<Result<_, _>>()?,
        ByteLen(4 * bytes),
        "rampool bench direct",
    );
    config.encryption = Encryption::Off;
    // One stripe on each server.
    config.stripe_pages = u32::try_from(bytes / 4096)?;
    let mut direct = Direct::connect(&config)?;
    let region = direct.create(2 * bytes)?;
    let block = Layout::bytes(MIB)?;
    let whole = Layout::bytes(bytes)?;
    let (mut by_servers, mut by_client) = (Vec::new(), Vec::new());
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    let mut control = 0;
    for round in 0..=rounds as u64 {
        for at in (0..bytes).step_by(index(MIB)) {
            direct.put(region, at, &content(round * bytes + at, MIB))?;
        }
        for by_the_servers in [true, false] {
            let traffic = |direct: &mut Direct| {
                direct.pool().stats().servers.iter().map(|s| s.sent_bytes + s.received_bytes).sum::<u64>()
            };
            let before = traffic(&mut direct);
            let started = Instant::now();
            if by_the_servers {
                direct.copy((region, 0, &whole), (region, bytes, &whole))?;
                control = traffic(&mut direct) - before;
            } else {
                let mut gets = std::collections::VecDeque::new();
                let mut puts = std::collections::VecDeque::new();
                for at in (0..bytes + 4 * MIB).step_by(index(MIB)) {
                    if at < bytes {
                        gets.push_back(direct.start_get_into(
                            region,
                            at,
                            &block,
                            buffers.pop().unwrap_or_default(),
                        )?);
                    }
                    if at >= 4 * MIB {
                        let got = direct.wait(gets.pop_front().expect("four are under way"))?;
                        puts.push_back(direct.start_put(region, bytes + at - 4 * MIB, &block, got)?);
                    }
                    if puts.len() > 4 {
                        buffers.push(direct.wait(puts.pop_front().expect("more than four"))?);
                    }
                }
                for put in puts {
                    buffers.push(direct.wait(put)?);
                }
            }
            let rate = bytes as f64 / started.elapsed().as_secs_f64() / 1e9;
            for at in (0..bytes).step_by(index(MIB)) {
                let mut found = vec![0; index(MIB)];
                direct.get(region, bytes + at, &mut found)?;
                if found != content(round * bytes + at, MIB) {
                    bail!("WRONG CONTENT {at} bytes into the copy");
                }
                // So that the next copy has something to do.
                direct.put(region, bytes + at, &found[..8].iter().map(|byte| !byte).collect::<Vec<u8>>())?;
            }
            if round > 0 {
                if by_the_servers { &mut by_servers } else { &mut by_client }.push(rate);
            }
        }
    }
    report
        .note(format!("{control} bytes travelled between the client and the servers for a copy of {bytes}"));
    report.samples("copy from server to server", "GB/s", &by_servers);
    report.samples("get and put, four of each under way", "GB/s", &by_client);
    report.ratio("copy / get and put", &by_servers, &by_client, Some(Reach::AtLeast(1.8)));
    direct.close();
    Ok(())
}

/// Gets of 8 bytes from a server that runs already, for bench/python.py, which asks the same of it
#[derive(clap::Args, Debug)]
pub struct Gets {
    #[arg(long)]
    server: String,
    #[arg(long, default_value_t = 20_000)]
    count: usize,
}

/// Prints the median time of a get, in microseconds.
pub fn gets(args: &Gets) -> Result<i32> {
    let mut builder = rampool::Builder::new();
    builder.set("server", &args.server)?;
    builder.set("memory", "64M")?;
    let mut direct = builder.open_direct()?;
    let region = direct.create(32 * MIB)?;
    let mut buffer = [0; 8];
    direct.put(region, 0, &content(0, 32 * MIB))?;
    let at = |n: usize| word(SEED, n as u64) % (32 * MIB / 4096) * 4096;
    let p50_us = p50_of(args.count, |n| get_one(&mut direct, region, at(n), &mut buffer))?;
    println!("{p50_us}");
    direct.close();
    Ok(0)
}
