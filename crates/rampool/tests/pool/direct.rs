//! The direct view against real memory servers, and a model that is a vector of bytes.

use super::{MIB, Relay, address_of, all_gone, config, mix, next, serve, server_config, through};
use crate::relay::Cut;
use rampool::direct::{
    Direct, DirectError, DirectRegion, Filter, Number, Pending, QueueBounds, QueueError, SendBody, Total,
};
use rampool::error::{Operation, PoolError};
use rampool::key::Key;
use rampool::pool::{Pool, PoolConfig, PoolEvent, ServerSpec};
use rampool::proto::elements::{Combine, Kind};
use rampool::proto::layout::{Layout, LayoutError, Order};
use rampool::proto::session::Encryption;
use rampool::proto::units::{ByteLen, Extent, OS_PAGE_BYTES, PageIndex};
use rampool::server::{RunningServer, Server, StoreKind};
use std::time::Duration;

// The examples check what they compute.
#[path = "../../../../examples/direct/halo.rs"]
mod halo;
#[path = "../../../../examples/direct/ledger.rs"]
mod ledger;
#[path = "../../../../examples/direct/mesh.rs"]
mod mesh;
#[path = "../../../../examples/direct/ran.rs"]
mod ran;
#[path = "../../../../examples/direct/scan.rs"]
mod scan;
#[path = "../../../../examples/direct/search.rs"]
mod search;
#[path = "../../../../examples/direct/service.rs"]
mod service;
#[path = "../../../../examples/direct/solver.rs"]
mod solver;
#[path = "../../../../examples/direct/store.rs"]
mod store;
#[path = "../../../../examples/direct/video.rs"]
mod video;

#[test]
fn the_examples_find_what_they_expect() {
    let servers = [serve(96 * MIB), serve(96 * MIB)];
    let mut direct = Direct::connect(&config(&[&servers[0], &servers[1]], 128 * MIB)).unwrap();
    let ran = [
        halo::run(&mut direct, 8).unwrap(),
        // Once more: nothing is left of the first time.
        halo::run(&mut direct, 8).unwrap(),
        scan::run(&mut direct, 2000).unwrap(),
        store::run(&mut direct, 3, 200).unwrap(),
        ledger::run(&mut direct, 500, 3, 400, 64).unwrap(),
        service::run(&mut direct, 3, 4, 1 << 20).unwrap(),
        search::run(&mut direct, 40, 3000, 100).unwrap(),
        solver::run(&mut direct, 700).unwrap(),
        mesh::run(&mut direct, 30).unwrap(),
        video::run(&mut direct, 2, 6, 5).unwrap(),
    ];
    assert!(ran.iter().all(|ran| !ran.says.is_empty()
        && ran.measured.iter().all(|(_, amount, took)| *amount > 0 && !took.is_zero())));
    direct.close();
    all_gone(&[&servers[0], &servers[1]]);
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = mix(self.0);
        (self.0 >> 20) % end
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }

    /// A layout of multiples of `unit` bytes, of at most about 300 KiB, that selects no byte twice.
    fn layout(&mut self, unit: u64) -> Layout {
        let element = Layout::bytes(unit).unwrap();
        match self.below(6) {
            0 => element.contiguous(self.below(300 * 1024 / unit) + 1).unwrap(),
            1 => {
                let block = self.below(20) + 1;
                let stride = (block + self.below(700)) as i64;
                element
                    .vector(self.below(300 * 1024 / (stride.unsigned_abs() * unit) + 1) + 1, block, stride)
                    .unwrap()
            }
            2 => {
                let sizes = [self.below(8) + 1, self.below(20) + 1, self.below(100) + 1];
                let starts = sizes.map(|size| self.below(size));
                let part = std::array::from_fn::<_, 3, _>(|i| self.below(sizes[i] - starts[i]) + 1);
                let order = if self.below(2) == 0 { Order::C } else { Order::Fortran };
                element.subarray(&sizes, &part, &starts, order).unwrap()
            }
            3 => {
                // A list in no order.
                let mut places: Vec<i64> =
                    (0..self.below(500) + 1).map(|_| self.below(300 * 1024 / unit) as i64).collect();
                places.sort_unstable();
                places.dedup();
                for i in (1..places.len()).rev() {
                    places.swap(i, self.below(i as u64 + 1) as usize);
                }
                element.indexed(&places.into_iter().map(|at| (1, at)).collect::<Vec<_>>()).unwrap()
            }
            4 => {
                let mut at = 0;
                let mut blocks = Vec::new();
                for _ in 0..self.below(40) + 1 {
                    at += self.below(900) as i64;
                    let block = self.below(200) + 1;
                    blocks.push((block, at));
                    at += block as i64;
                }
                element.indexed(&blocks).unwrap()
            }
            // Whole pages, and not.
            _ => element
                .contiguous(4096 / unit)
                .unwrap()
                .hvector(self.below(9) + 1, 1, 4096 * (1 + self.below(2) as i64))
                .unwrap(),
        }
    }
}

fn selected(layout: &Layout, offset: u64) -> impl Iterator<Item = usize> + use<> {
    let at = move |byte: i64| (byte + offset as i64).unsigned_abs() as usize;
    layout.program().runs().flat_map(|run| run.offset..run.end()).map(at).collect::<Vec<_>>().into_iter()
}

const REGION_BYTES: u64 = 700_000;

/// Random operations of two clients of one region, many under way, against a model; then every page as the
/// paged view has it.
pub fn exercise(config: &PoolConfig, seed: u64, steps: u32) {
    let mut random = Random(seed);
    let mut one = Direct::connect(config).unwrap();
    let mut attach = PoolConfig::attach(one.pool().lease_ticket(), "second");
    (attach.key, attach.encryption, attach.compression) =
        (config.key.clone(), config.encryption, config.compression);
    let mut two = Direct::connect(&attach).unwrap();
    let region = one.create(REGION_BYTES).unwrap();
    let ticket = one.ticket(region).unwrap();
    let same = two.open_ticket(&ticket).unwrap();
    assert_eq!(same.bytes(), REGION_BYTES);
    let mut model = vec![0u8; REGION_BYTES as usize];
    let mut pending: Vec<(Pending, Vec<u8>)> = Vec::new();
    for step in 0..steps {
        let unit = [1, 4, 8][random.below(3) as usize];
        let there = random.layout(unit);
        let room = REGION_BYTES - there.program().bounds().1.unsigned_abs();
        let offset = random.below(room / unit + 1) * unit;
        let size = there.size() as usize;
        match random.below(8) {
            0..=2 => {
                let bytes = random.bytes(size);
                selected(&there, offset).zip(&bytes).for_each(|(at, byte)| model[at] = *byte);
                pending.push((one.start_put(region, offset, &there, bytes.clone()).unwrap(), bytes));
            }
            3..=4 => {
                let want = selected(&there, offset).map(|at| model[at]).collect();
                pending.push((one.start_get(region, offset, &there).unwrap(), want));
            }
            5 if unit > 1 => {
                let kind = if unit == 4 { Kind::U32 } else { Kind::U64 };
                let operands = random.bytes(size);
                let places: Vec<usize> = selected(&there, offset).collect();
                for (places, operand) in places.chunks(unit as usize).zip(operands.chunks(unit as usize)) {
                    let word = |bytes: &mut dyn Iterator<Item = u8>| {
                        bytes.enumerate().fold(0u64, |n, (i, byte)| n | u64::from(byte) << (8 * i))
                    };
                    let sum = word(&mut places.iter().map(|at| model[*at]))
                        .wrapping_add(word(&mut operand.iter().copied()));
                    places.iter().zip(sum.to_le_bytes()).for_each(|(at, byte)| model[*at] = byte);
                }
                let started = one
                    .start_accumulate(region, offset, &there, kind, Combine::Sum, operands.clone())
                    .unwrap();
                pending.push((started, operands));
            }
            6 => {
                // The other client sees what was waited for, into a layout of its own.
                for (operation, want) in pending.drain(..) {
                    assert!(one.wait(operation).unwrap() == want, "step {step}");
                }
                let here = Layout::bytes(size as u64).unwrap();
                let mut room = vec![0xee; size + 10];
                two.get_layout(same, offset, &there, &mut room, &here).unwrap();
                assert!(
                    room[..size].iter().copied().eq(selected(&there, offset).map(|at| model[at])),
                    "step {step}"
                );
                assert_eq!(room[size..], [0xee; 10]);
            }
            _ => {
                // Layouts on both sides.
                let Some(here) =
                    (0..20).map(|_| random.layout(unit)).find(|here| here.size() >= there.size())
                else {
                    continue;
                };
                let cut = random.bytes(here.program().bounds().1.unsigned_abs() as usize);
                let from: Vec<usize> = selected(&here, 0).collect();
                if from.len() != size {
                    continue;
                }
                selected(&there, offset).zip(from).for_each(|(to, from)| model[to] = cut[from]);
                one.put_layout(region, offset, &there, &cut, &here).unwrap();
            }
        }
        if pending.len() > 12 {
            let (operation, want) = pending.swap_remove(random.below(12) as usize);
            assert!(one.wait(operation).unwrap() == want, "step {step}");
        }
    }
    for (operation, want) in pending {
        assert!(one.wait(operation).unwrap() == want);
    }
    assert_eq!(one.under_way(), 0);
    // As pages: their checksums are checked on the way.
    let pages = u32::try_from(REGION_BYTES.div_ceil(4096)).unwrap();
    let mut memory = vec![0xaa; pages as usize * OS_PAGE_BYTES];
    let mut pool = two.into_pool();
    // SAFETY: the memory lives until the fetch's event.
    unsafe {
        pool.fetch(same.pool_region(), 7, &[Extent::new(PageIndex(0), pages)], memory.as_mut_ptr(), true)
    };
    assert!(matches!(next(&mut pool), PoolEvent::Fetched { token: 7 }));
    let mut two = Direct::new(pool);
    assert!(memory[..model.len()] == model, "the pages are others");
    // And a copy of the region stays as it was while the region changes.
    let mut pool = one.into_pool();
    let copy = pool.clone_region(region.pool_region()).unwrap();
    let mut one = Direct::new(pool);
    let copy = one.open_pages(copy, REGION_BYTES).unwrap();
    one.put(region, 100, &[1; 9000]).unwrap();
    let mut was = vec![0; 9000];
    one.get(copy, 100, &mut was).unwrap();
    assert!(was == model[100..9100]);
    one.free(copy);
    one.close();
    two.get(same, 100, &mut was).unwrap();
    assert_eq!(was, [1; 9000], "the region outlives the member that made it");
    two.close();
}

#[test]
fn layouts_are_carried_out_at_one_server_and_at_three() {
    let one = serve(64 * MIB);
    exercise(&config(&[&one], 32 * MIB), 1, 250);
    let three: Vec<RunningServer> = (0..3).map(|_| serve(32 * MIB)).collect();
    let servers: Vec<&RunningServer> = three.iter().collect();
    exercise(&config(&servers, 48 * MIB), 2, 250);
    all_gone(&[&one]);
    all_gone(&servers);
}

/// Runs of every length up to some hundreds of bytes, forwards, backwards and in no order, within pages and
/// across their ends, of pages that were written and pages that never were.
#[test]
fn short_runs_come_from_wherever_they_lie() {
    let mut random = Random(9);
    let mut packed = server_config(64 * MIB);
    packed.store = StoreKind::Compressed;
    for server in [serve(64 * MIB), Server::start(packed).unwrap()] {
        let mut direct = Direct::connect(&config(&[&server], 16 * MIB)).unwrap();
        let region = direct.create(REGION_BYTES).unwrap();
        let mut model = vec![0; REGION_BYTES as usize];
        for page in (0..REGION_BYTES as usize / 4096).filter(|page| page % 3 != 1) {
            // Half of it packs.
            let bytes = random.bytes(if page % 2 == 0 { 4096 } else { 700 });
            model[page * 4096..page * 4096 + bytes.len()].copy_from_slice(&bytes);
            direct.put(region, page as u64 * 4096, &bytes).unwrap();
        }
        let lengths = [1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 65, 100, 129, 300, 700];
        for len in lengths {
            let element = Layout::bytes(len).unwrap();
            let span = (REGION_BYTES - len) as i64;
            for stride in [len as i64 + 1, 64, 256, 4095, 4096, 4097, 9000] {
                let stride = stride.max(len as i64 + 1);
                let count = (span / stride).min(400).cast_unsigned();
                let back = (count as i64 - 1) * stride;
                let (back, room) = (back.cast_unsigned(), (span - back).cast_unsigned());
                for (stride, offset) in [(stride, random.below(room)), (-stride, back + random.below(room))] {
                    let layout = element.hvector(count, 1, stride).unwrap();
                    let want: Vec<u8> = selected(&layout, offset).map(|at| model[at]).collect();
                    let get = direct.start_get(region, offset, &layout).unwrap();
                    assert!(direct.wait(get).unwrap() == want, "{len} bytes, stride {stride}, from {offset}");
                }
            }
            // One run: of pages that were written, of such as pack, of none, and across their ends.
            for _ in 0..40 {
                let (offset, mut bytes) = (random.below(REGION_BYTES - len), vec![0; len as usize]);
                direct.get(region, offset, &mut bytes).unwrap();
                assert!(bytes == model[offset as usize..][..bytes.len()], "{len} bytes from {offset}");
            }
            // In no order, some twice; and of two lengths in turns.
            let list: Vec<(u64, i64)> =
                (0..500).map(|_| (1, random.below(span.cast_unsigned()) as i64)).collect();
            let listed = element.hindexed(&list).unwrap();
            let other = Layout::bytes(len / 2 + 1).unwrap();
            let turns: Vec<_> = list
                .iter()
                .enumerate()
                .map(|(n, (_, at))| (1, *at, if n % 2 == 0 { element.clone() } else { other.clone() }))
                .collect();
            for layout in [listed, Layout::structure(&turns).unwrap()] {
                let want: Vec<u8> = selected(&layout, 0).map(|at| model[at]).collect();
                let get = direct.start_get(region, 0, &layout).unwrap();
                assert!(direct.wait(get).unwrap() == want, "{len} bytes, in no order");
            }
        }
        direct.close();
        all_gone(&[&server]);
    }
}

#[test]
fn layouts_are_carried_out_where_pages_are_compressed_and_the_wire_is_sealed() {
    let key = Key::generate();
    let mut server = server_config(64 * MIB);
    (server.key, server.store) = (Some(key.clone()), StoreKind::Compressed);
    let server = Server::start(server).unwrap();
    let mut config = config(&[&server], 32 * MIB);
    (config.key, config.encryption, config.compression) = (Some(key), Encryption::On, true);
    exercise(&config, 3, 120);
    all_gone(&[&server]);
}

/// Broken connections, clean and with what was said last arriving late: an update is made once.
#[test]
fn an_update_is_made_once_however_often_the_connection_breaks() {
    for (cut, seed) in [(Cut::Clean, 5), (Cut::Late, 6)] {
        let server = serve(64 * MIB);
        let relay = Relay::start(address_of(&server), cut, 1_000_000);
        exercise(&through(&relay, 32 * MIB), seed, 120);
        let mut direct = Direct::connect(&through(&relay, 8 * MIB)).unwrap();
        let region = direct.create(MIB).unwrap();
        let word = Layout::bytes(8).unwrap();
        let mut adds = 0u64;
        for round in 0..60u64 {
            relay.lose_answer();
            assert_eq!(direct.fetch_add(region, 64, 1u64).unwrap(), round + adds);
            relay.lose_answer();
            let updates: Vec<Pending> = (0..20)
                .map(|_| {
                    direct
                        .start_accumulate(
                            region,
                            64,
                            &word,
                            Kind::U64,
                            Combine::Sum,
                            1u64.to_le_bytes().to_vec(),
                        )
                        .unwrap()
                })
                .collect();
            adds += updates.len() as u64;
            for update in updates {
                direct.wait(update).unwrap();
            }
        }
        assert!(relay.cuts() >= 20, "{} cuts", relay.cuts());
        assert_eq!(direct.get_value::<u64>(region, 64).unwrap(), adds + 60);
        relay.calm();
        direct.close();
        all_gone(&[&server]);
    }
}

#[test]
fn many_clients_update_the_same_words_and_none_is_lost() {
    let servers = [serve(32 * MIB), serve(32 * MIB)];
    let mut first = Direct::connect(&config(&[&servers[0], &servers[1]], 32 * MIB)).unwrap();
    let region = first.open_or_create("counters", 256 * 1024).unwrap();
    let lease = first.pool().lease_ticket();
    const CLIENTS: u64 = 4;
    const ROUNDS: u64 = 150;
    // Word 0: fetch_add. Word 1: compare_exchange loops. The words at 4 KiB steps: accumulate. Page 20: a run
    // of bytes that is always written alike.
    let steps = Layout::bytes(8).unwrap().hvector(40, 1, 4096).unwrap();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (lease, steps) = (lease.clone(), steps.clone());
            scope.spawn(move || {
                let mut direct = Direct::connect(&PoolConfig::attach(lease, "client")).unwrap();
                let region = direct.open("counters").unwrap();
                let mut seen = Vec::new();
                for round in 0..ROUNDS {
                    seen.push(direct.fetch_add(region, 0, 1u64).unwrap());
                    direct.accumulate(region, 16, &steps, Combine::Sum, &[client + 1; 40]).unwrap();
                    let mut old = direct.get_value::<u64>(region, 8).unwrap();
                    loop {
                        let found = direct.compare_exchange(region, 8, old, old + 3).unwrap();
                        if found == old {
                            break;
                        }
                        old = found;
                    }
                    let fill = (client * ROUNDS + round) as u8;
                    direct.put(region, 20 * 4096 + 33, &[fill; 1000]).unwrap();
                    let mut bytes = [0; 1000];
                    direct.get(region, 20 * 4096 + 33, &mut bytes).unwrap();
                    assert!(
                        bytes.iter().all(|byte| *byte == bytes[0]),
                        "what is within a page is written and read at once"
                    );
                }
                assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
                direct.close();
            });
        }
    });
    assert_eq!(first.get_value::<u64>(region, 0).unwrap(), CLIENTS * ROUNDS);
    assert_eq!(first.get_value::<u64>(region, 8).unwrap(), CLIENTS * ROUNDS * 3);
    let sums = first.get_values::<u64>(region, 16, &steps).unwrap();
    assert_eq!(sums, [ROUNDS * CLIENTS * (CLIENTS + 1) / 2; 40]);
    first.close();
    all_gone(&[&servers[0], &servers[1]]);
}

#[test]
fn every_kind_of_element_is_updated_in_its_arithmetic() {
    fn ops<T: Number + PartialEq + std::fmt::Debug>(
        direct: &mut Direct,
        region: DirectRegion,
        at: u64,
        values: [T; 4],
    ) {
        let [start, add, sum, other] = values;
        direct.put_value(region, at, start).unwrap();
        assert_eq!(direct.fetch_add(region, at, add).unwrap(), start);
        assert_eq!(direct.fetch_op(region, at, Combine::Max, start).unwrap(), sum);
        assert_eq!(direct.compare_exchange(region, at, sum, other).unwrap(), sum);
        assert_eq!(direct.compare_exchange(region, at, sum, start).unwrap(), other);
        assert_eq!(direct.fetch_op(region, at, Combine::Replace, start).unwrap(), other);
        assert_eq!(direct.get_value::<T>(region, at).unwrap(), start);
    }
    let server = serve(16 * MIB);
    let mut direct = Direct::connect(&config(&[&server], 8 * MIB)).unwrap();
    let region = direct.create(8192).unwrap();
    ops(&mut direct, region, 4092, [-7i32, 9, 2, -1]);
    ops(&mut direct, region, 4, [7u32, 9, 16, 1]);
    ops(&mut direct, region, 8, [-7i64, 9, 2, i64::MIN]);
    ops(&mut direct, region, 4096, [7u64, 9, 16, u64::MAX]);
    ops(&mut direct, region, 20, [-1.5f32, 4.0, 2.5, 0.0]);
    ops(&mut direct, region, 24, [-1.5f64, 4.0, 2.5, 1e300]);
    // What is no number stays.
    for (start, operand) in [(f64::NAN, 1.5), (1.5, f64::NAN)] {
        for how in [Combine::Min, Combine::Max] {
            direct.put_value(region, 24, start).unwrap();
            direct.fetch_op(region, 24, how, operand).unwrap();
            assert!(direct.get_value::<f64>(region, 24).unwrap().is_nan(), "{how:?}");
        }
        direct.fetch_add(region, 24, f64::NAN).unwrap();
        assert!(direct.get_value::<f64>(region, 24).unwrap().is_nan());
    }
    let floats = Combine::Xor;
    assert!(matches!(direct.fetch_op(region, 24, floats, 1.0f64), Err(DirectError::NotForKind { .. })));
    direct.close();
    all_gone(&[&server]);
}

#[test]
fn columns_are_filtered_and_added_up_at_the_servers() {
    let servers = [serve(32 * MIB), serve(32 * MIB), serve(32 * MIB)];
    for count in [1, 3] {
        let list: Vec<&RunningServer> = servers[..count].iter().collect();
        let mut direct = Direct::connect(&config(&list, 24 * MIB)).unwrap();
        // 100,000 rows of 40 bytes, the column in the middle: more than one request each.
        const ROWS: u64 = 100_000;
        let region = direct.create(ROWS * 40).unwrap();
        let mut random = Random(9);
        let values: Vec<i64> = (0..ROWS).map(|_| random.below(2001) as i64 - 1000).collect();
        let column = Layout::bytes(8).unwrap().hvector(ROWS, 1, 40).unwrap();
        direct.put_values(region, 16, &column, &values).unwrap();
        type Case = (Filter<i64>, fn(i64) -> bool);
        let filters: [Case; 4] = [
            (Filter::all(), |_| true),
            (Filter::between(-10, 10), |v| (-10..=10).contains(&v)),
            (Filter::greater(990), |v| v > 990),
            (Filter::equal(5000), |v| v == 5000),
        ];
        for (filter, counts) in filters {
            let matching: Vec<i64> = values.iter().copied().filter(|v| counts(*v)).collect();
            let sum = matching.iter().map(|v| i128::from(*v)).sum();
            assert_eq!(direct.count(region, 16, &column, filter).unwrap(), matching.len() as u64);
            assert_eq!(
                direct.sum(region, 16, &column, filter).unwrap(),
                (matching.len() as u64, Total::Integer(sum))
            );
            assert_eq!(direct.min(region, 16, &column, filter).unwrap(), matching.iter().copied().min());
            assert_eq!(direct.max(region, 16, &column, filter).unwrap(), matching.iter().copied().max());
            let positions = (0..).zip(&values).filter(|(_, v)| counts(**v)).map(|(n, _)| n);
            assert!(direct.select(region, 16, &column, filter).unwrap().into_iter().eq(positions));
            let mut found = direct.select_values(region, 16, &column, filter).unwrap();
            found.sort_unstable();
            let mut matching = matching;
            matching.sort_unstable();
            assert_eq!(found, matching);
        }
        // Never written: zeroes.
        let floats = direct.create(MIB).unwrap();
        let column = Layout::bytes(4).unwrap().contiguous(MIB / 4).unwrap();
        assert_eq!(direct.count(floats, 0, &column, Filter::equal(0f32)).unwrap(), MIB / 4);
        direct.put_value(floats, 12_288, 2.5f32).unwrap();
        assert_eq!(
            direct.sum(floats, 0, &column, Filter::<f32>::all()).unwrap(),
            (MIB / 4, Total::Float(2.5))
        );
        assert_eq!(direct.select(floats, 0, &column, Filter::greater(1f32)).unwrap(), [3072]);
        direct.close();
        all_gone(&list);
    }
}

#[test]
fn columns_are_grouped_by_keys_at_the_servers() {
    const ROWS: u64 = 100_000;
    let servers = [serve(32 * MIB), serve(32 * MIB), serve(32 * MIB)];
    for count in [1, 3] {
        let list: Vec<&RunningServer> = servers[..count].iter().collect();
        let mut direct = Direct::connect(&config(&list, 24 * MIB)).unwrap();
        let mut random = Random(9);
        let keys: Vec<i32> = (0..ROWS).map(|_| random.below(500) as i32 - 250).collect();
        let values: Vec<i64> = (0..ROWS).map(|_| random.below(2001) as i64 - 1000).collect();
        // Rows of 40 bytes, some of which end in another page; two columns in one region; two regions.
        let rows = direct.create(ROWS * 40).unwrap();
        let columns = direct.create(ROWS * 12).unwrap();
        let alone = direct.create(ROWS * 4).unwrap();
        let in_rows = |bytes| Layout::bytes(bytes).unwrap().hvector(ROWS, 1, 40).unwrap();
        let packed = |bytes| Layout::bytes(bytes).unwrap().contiguous(ROWS).unwrap();
        let (few, many, dense, packed) = (in_rows(4), in_rows(8), packed(4), packed(8));
        let ways = [
            ((rows, 4, &few), (rows, 16, &many)),
            ((columns, ROWS * 8, &dense), (columns, 0, &packed)),
            ((alone, 0, &dense), (columns, 0, &packed)),
        ];
        let less = |v: i64| v < 100;
        let mut model: std::collections::BTreeMap<i32, Vec<i64>> = std::collections::BTreeMap::new();
        for (key, value) in keys.iter().zip(&values).filter(|(_, value)| less(**value)) {
            model.entry(*key).or_default().push(*value);
        }
        for (by, column) in ways {
            direct.put_values(by.0, by.1, by.2, &keys).unwrap();
            direct.put_values(column.0, column.1, column.2, &values).unwrap();
            let groups = direct.group::<i32, i64>(by, column, Filter::less(100)).unwrap();
            assert_eq!(groups.len(), model.len());
            for (group, (key, values)) in groups.iter().zip(&model) {
                let sum = Total::Integer(values.iter().map(|v| i128::from(*v)).sum());
                assert_eq!((group.key, group.count, group.sum), (*key, values.len() as u64, sum));
                let ends = (*values.iter().min().unwrap(), *values.iter().max().unwrap());
                assert_eq!((group.min, group.max), ends);
            }
        }
        // A key for each element, of which all differ; and what was never written has one key.
        let numbers: Vec<u32> = (0..u32::try_from(ROWS).unwrap()).rev().collect();
        direct.put_values(alone, 0, &dense, &numbers).unwrap();
        let each =
            direct.group::<u32, i64>((alone, 0, &dense), (columns, 0, &packed), Filter::all()).unwrap();
        let said = each.iter().map(|group| (group.key, group.count, i128::from(group.min)));
        let backwards = (0..).zip(values.iter().rev()).map(|(key, value)| (key, 1, i128::from(*value)));
        assert!(said.eq(backwards));
        let fresh = direct.create(ROWS * 8).unwrap();
        direct.put_value(fresh, 8, 2.5f64).unwrap();
        let zero = direct
            .group::<u64, f64>(
                (fresh, 16, &Layout::bytes(8).unwrap().contiguous(9).unwrap()),
                (fresh, 0, &Layout::bytes(8).unwrap().contiguous(9).unwrap()),
                Filter::all(),
            )
            .unwrap();
        assert_eq!(zero.len(), 1);
        assert_eq!((zero[0].key, zero[0].count, zero[0].sum), (0, 9, Total::Float(2.5)));
        assert_eq!((zero[0].min, zero[0].max), (0.0, 2.5));
        let short = Layout::bytes(4).unwrap().contiguous(ROWS - 1).unwrap();
        let refused = direct.group::<i32, i64>((alone, 0, &short), (columns, 0, &packed), Filter::all());
        assert!(matches!(refused, Err(DirectError::Keys { keys: 99_999, elements: 100_000 })), "{refused:?}");
        direct.close();
        all_gone(&list);
    }
}

#[test]
fn more_keys_than_a_call_may_find_are_refused_with_the_bound() {
    const ROWS: u64 = (1 << 20) + 1;
    let server = serve(32 * MIB);
    let mut direct = Direct::connect(&config(&[&server], 24 * MIB)).unwrap();
    let keys = direct.create(ROWS * 8).unwrap();
    let numbers: Vec<u64> = (0..ROWS).collect();
    let layout = |rows| Layout::bytes(8).unwrap().contiguous(rows).unwrap();
    direct.put_values(keys, 0, &layout(ROWS), &numbers).unwrap();
    let mut group = |rows| {
        let column = (keys, 0, &layout(rows));
        direct.group::<u64, u64>(column, column, Filter::all()).map(|groups| groups.len() as u64)
    };
    assert_eq!(group(ROWS - 1).unwrap(), ROWS - 1);
    let refused = group(ROWS).unwrap_err();
    assert!(
        matches!(refused, DirectError::TooMuch { what: "different keys", most: 1_048_576, .. }),
        "{refused}"
    );
    direct.close();
}

#[test]
fn what_makes_no_sense_is_refused_with_a_reason_and_harms_no_client() {
    let server = serve(16 * MIB);
    let mut direct = Direct::connect(&config(&[&server], 8 * MIB)).unwrap();
    let mut other = Direct::connect(&PoolConfig::attach(direct.pool().lease_ticket(), "other")).unwrap();
    let region = direct.open_or_create("a", 10_000).unwrap();
    direct.put(region, 0, &[7; 10_000]).unwrap();
    let mut room = vec![0; 100];
    let outside = direct.get(region, 9_901, &mut room);
    assert!(
        matches!(
            outside,
            Err(DirectError::Layout(LayoutError::OutOfBounds { high: 10_001, bytes: 10_000, .. }))
        ),
        "{outside:?}"
    );
    let word = Layout::bytes(8).unwrap();
    let twice = word.hvector(3, 1, 4).unwrap();
    assert!(matches!(
        direct.put_layout(region, 0, &twice, &[0; 24], &Layout::bytes(24).unwrap()),
        Err(DirectError::Layout(LayoutError::Overlap))
    ));
    assert!(matches!(
        direct.get_layout(region, 0, &Layout::bytes(24).unwrap(), &mut room, &twice),
        Err(DirectError::Layout(LayoutError::Overlap))
    ));
    let backwards = word.vector(2, 1, -1).unwrap();
    assert!(matches!(
        direct.start_get(region, 0, &backwards),
        Err(DirectError::Layout(LayoutError::OutOfBounds { low: -8, .. }))
    ));
    assert!(matches!(
        direct.put_layout(region, 0, &word, &[0; 7], &Layout::bytes(7).unwrap()),
        Err(DirectError::Lengths { there: 8, here: 7 })
    ));
    assert!(matches!(direct.fetch_add(region, 4, 1u64), Err(DirectError::Layout(LayoutError::Unaligned(8)))));
    assert!(matches!(
        direct.count(region, 2, &word, Filter::<i32>::all()),
        Err(DirectError::Layout(LayoutError::Unaligned(4)))
    ));
    let longer = direct.open_or_create("a", 10_001).unwrap_err();
    assert_eq!(longer.to_string(), "region a has 10000 bytes, not the 10001 it was opened for");
    // Numbers are read anywhere, but not in part.
    assert_eq!(direct.get_values::<u64>(region, 1, &word).unwrap(), [0x0707_0707_0707_0707]);
    let one_and_a_half = direct.get_values::<u64>(region, 0, &Layout::bytes(12).unwrap());
    assert!(
        matches!(one_and_a_half, Err(DirectError::Layout(LayoutError::Unaligned(8)))),
        "{one_and_a_half:?}"
    );
    for bytes in [0, (4 << 50) + 1, u64::MAX] {
        for made in [direct.create(bytes), direct.open_or_create("none", bytes)] {
            assert!(matches!(made, Err(DirectError::RegionLength { wanted }) if wanted == bytes), "{made:?}");
        }
    }
    assert_eq!(direct.open("b").unwrap_err().to_string(), "there is no region b");
    assert!(matches!(direct.open(""), Err(DirectError::Name)));
    assert!(matches!(direct.open_or_create(&"x".repeat(256), 1), Err(DirectError::Name)));
    // A region of another member that is not open.
    let mut pool = direct.into_pool();
    let own = pool.create_region().unwrap();
    let ticket = pool.region_ticket(own).unwrap();
    let mut direct = Direct::new(pool);
    match other.open_ticket(&ticket) {
        Err(DirectError::Pool(PoolError::Denied { operation: Operation::OpenRegion, .. })) => {}
        refused => panic!("{refused:?}"),
    }
    // A put that does not fit: it says what is free, and each request is carried out or not.
    let big = direct.create(32 * MIB).unwrap();
    let old = 9u64.to_le_bytes();
    direct.put(big, 31 * MIB, &old).unwrap();
    match direct.put(big, 0, &vec![3; 31 * MIB as usize]) {
        Err(DirectError::Full { operation: Operation::Scatter(0), server: name, .. }) => {
            assert_eq!(name, server.addr().to_string())
        }
        full => panic!("{full:?}"),
    }
    assert_eq!(direct.get_value::<u64>(big, 31 * MIB).unwrap(), 9);
    direct.free(big);
    // After all that everything is as it was.
    let same = other.open("a").unwrap();
    let mut all = vec![0; 10_000];
    other.get(same, 0, &mut all).unwrap();
    assert_eq!(all, [7; 10_000]);
    // Freed for all.
    other.free(same);
    let gone = other.open("a");
    assert!(matches!(gone, Err(DirectError::NoSuchName { .. })), "{gone:?}");
    match direct.get(region, 0, &mut room) {
        Err(DirectError::Pool(PoolError::Denied { operation: Operation::Gather(0), .. })) => {}
        gone => panic!("{gone:?}"),
    }
    direct.close();
    other.close();
    all_gone(&[&server]);
}

#[test]
fn a_server_that_dies_in_the_middle_ends_what_needs_it_with_its_name() {
    let servers = [serve(32 * MIB), serve(32 * MIB)];
    let mut config = config(&[&servers[0], &servers[1]], 32 * MIB);
    config.op_deadline = Duration::from_secs(2);
    let mut direct = Direct::connect(&config).unwrap();
    let region = direct.create(16 * MIB).unwrap();
    direct.put(region, 0, &vec![5; 16 * MIB as usize]).unwrap();
    let column = Layout::bytes(64).unwrap().hvector(16 * MIB / 256, 1, 256).unwrap();
    let [alive, dies] = servers;
    let name = dies.addr().to_string();
    let gathers: Vec<Pending> = (0..8).map(|_| direct.start_get(region, 0, &column).unwrap()).collect();
    let on_the_other = Layout::bytes(100).unwrap();
    dies.stop();
    let mut failed = 0;
    for gather in gathers {
        match direct.wait(gather) {
            // It was faster.
            Ok(bytes) => assert!(bytes.iter().all(|byte| *byte == 5)),
            Err(DirectError::Pool(PoolError::Lost { server, operation: Operation::Gather(_), .. })) => {
                assert_eq!(server, name);
                failed += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(failed > 0, "eight gathers of 4 MiB were over at once");
    // What the other server holds is there, if it can be told apart.
    let mine = (0..64).find(|page| direct.pool().holder(PageIndex(*page)).0 == 0).unwrap();
    let pending = direct.start_get(region, mine * 4096, &on_the_other).unwrap();
    assert_eq!(direct.wait(pending).unwrap(), [5; 100]);
    assert!(matches!(
        direct.get_value::<u64>(region, 0),
        Ok(_) | Err(DirectError::Pool(PoolError::Lost { .. }))
    ));
    direct.close();
    all_gone(&[&alive]);
}

#[test]
fn operations_on_the_same_bytes_happen_in_the_order_in_which_they_were_started() {
    let servers = [serve(32 * MIB), serve(32 * MIB)];
    let mut direct = Direct::connect(&config(&[&servers[0], &servers[1]], 32 * MIB)).unwrap();
    let region = direct.create(MIB).unwrap();
    let all = Layout::bytes(MIB).unwrap();
    let every = Layout::bytes(8).unwrap().hvector(MIB / 64, 1, 64).unwrap();
    let mut pending = Vec::new();
    for round in 1..6u8 {
        pending.push((direct.start_put(region, 0, &all, vec![round; MIB as usize]).unwrap(), None));
        pending.push((direct.start_get(region, 0, &all).unwrap(), Some(round)));
        let ones = 0x0101_0101_0101_0101u64.to_le_bytes().repeat((MIB / 64) as usize);
        pending
            .push((direct.start_accumulate(region, 0, &every, Kind::U64, Combine::Sum, ones).unwrap(), None));
        pending.push((direct.start_get(region, 0, &every).unwrap(), Some(round + 1)));
    }
    direct.wait_all();
    for (operation, want) in pending {
        assert!(direct.is_done(&operation));
        let bytes = direct.wait(operation).unwrap();
        assert!(want.is_none_or(|want| bytes.iter().all(|byte| *byte == want)));
    }
    direct.close();
    all_gone(&[&servers[0], &servers[1]]);
}

/// What arrives is checked against its own checksums, whatever leaves before all of it is here: the answers
/// are longer than a socket takes at once.
#[test]
fn long_answers_arrive_while_other_requests_leave() {
    const BLOCK: u64 = 256 << 10;
    const BLOCKS: u64 = 32;
    let server = serve(32 * MIB);
    let mut direct = Direct::connect(&config(&[&server], 32 * MIB)).unwrap();
    let region = direct.create(BLOCK * BLOCKS).unwrap();
    let block = Layout::bytes(BLOCK).unwrap();
    let mut random = Random(7);
    let mut filled: Vec<u8> = vec![0; BLOCKS as usize];
    let mut pending: Vec<(u64, Option<u8>, Pending)> = Vec::new();
    for round in 0..600u32 {
        let number = random.below(BLOCKS);
        if pending.iter().all(|(other, ..)| *other != number) {
            let content = &mut filled[number as usize];
            if random.below(2) == 0 {
                *content = (round % 251) as u8 + 1;
                let bytes = vec![*content; BLOCK as usize];
                let put = direct.start_put(region, number * BLOCK, &block, bytes).unwrap();
                pending.push((number, None, put));
            } else {
                let get = direct.start_get(region, number * BLOCK, &block).unwrap();
                pending.push((number, Some(*content), get));
            }
        }
        if pending.len() > 2 {
            let at = random.below(pending.len() as u64) as usize;
            let (number, want, operation) = pending.swap_remove(at);
            let bytes = direct.wait(operation).unwrap();
            assert!(want.is_none_or(|want| bytes.iter().all(|byte| *byte == want)), "block {number}");
        }
    }
    direct.wait_all();
    pending.clear();
    direct.close();
    all_gone(&[&server]);
}

/// A region goes from a client that pages it to one that reads it directly, and back.
#[test]
fn a_region_is_handed_from_pages_to_bytes_and_back() {
    let server = serve(32 * MIB);
    let mut pager = Pool::connect(&config(&[&server], 16 * MIB)).unwrap();
    let region = pager.create_region().unwrap();
    super::store(&mut pager, region, super::extent(0, 8), 1);
    let ticket = pager.region_ticket(region).unwrap();
    let lease = pager.lease_ticket();
    let mut pager = Direct::new(pager);
    assert_eq!(pager.open_pages(region, 8 * 4096).unwrap().bytes(), 8 * 4096);
    let mut reader = Direct::connect(&PoolConfig::attach(lease, "reader")).unwrap();
    let same = reader.open_ticket(&ticket).unwrap();
    let mut bytes = vec![0; 8 * 4096];
    reader.get(same, 0, &mut bytes).unwrap();
    assert!(bytes == super::expected(&[super::extent(0, 8)], 1));
    reader.put(same, 4000, &[9; 200]).unwrap();
    // Back: the member that adopts it is its only user.
    let mut pager = pager.into_pool();
    let own = pager.adopt_region(&ticket).unwrap();
    let page = super::fetch(&mut pager, own, &[super::extent(0, 2)]);
    assert_eq!(page[4000..4200], [9; 200]);
    assert!(matches!(reader.get(same, 0, &mut bytes), Err(DirectError::Pool(PoolError::Denied { .. }))));
    assert_eq!(pager.lease_bytes(), ByteLen(16 * MIB));
    pager.close();
    reader.close();
    all_gone(&[&server]);
}

#[test]
fn bytes_go_from_server_to_server_without_the_client() {
    for count in [1, 3] {
        let servers: Vec<RunningServer> = (0..count).map(|_| serve(64 * MIB)).collect();
        let list: Vec<&RunningServer> = servers.iter().collect();
        let mut direct = Direct::connect(&config(&list, 48 * MIB)).unwrap();
        let mut random = Random(70 + count);
        let regions = [direct.create(REGION_BYTES).unwrap(), direct.create(REGION_BYTES).unwrap()];
        let mut models = [random.bytes(REGION_BYTES as usize), vec![0; REGION_BYTES as usize]];
        direct.put(regions[0], 0, &models[0]).unwrap();
        let place = |random: &mut Random, layout: &Layout| {
            random.below(REGION_BYTES - layout.program().bounds().1.unsigned_abs() + 1)
        };
        for round in 0..40 {
            let (from, to) = (round % 2, 1 - round % 2);
            let unit = [1, 8][random.below(2) as usize];
            let source = random.layout(unit);
            // The same, or one of the same size: contiguous, or spread.
            let target = match random.below(3) {
                0 => source.clone(),
                1 => Layout::bytes(source.size()).unwrap(),
                _ if source.size() < 20_000 => {
                    Layout::bytes(1).unwrap().hvector(source.size(), 1, 3).unwrap()
                }
                _ => Layout::bytes(source.size()).unwrap(),
            };
            let (source_at, target_at) = (place(&mut random, &source), place(&mut random, &target));
            let bytes: Vec<u8> = selected(&source, source_at).map(|at| models[from][at]).collect();
            selected(&target, target_at).zip(bytes).for_each(|(at, byte)| models[to][at] = byte);
            direct.copy((regions[from], source_at, &source), (regions[to], target_at, &target)).unwrap();
        }
        for (region, model) in regions.iter().zip(&models) {
            let mut bytes = vec![0; model.len()];
            direct.get(*region, 0, &mut bytes).unwrap();
            assert!(bytes == *model);
        }
        // Eight megabytes, of which the client sees nothing.
        let (one, two) = (direct.create(8 * MIB).unwrap(), direct.create(8 * MIB).unwrap());
        let content = random.bytes(MIB as usize);
        (0..8).for_each(|n| direct.put(one, n * MIB, &content).unwrap());
        let traffic = |direct: &mut Direct| {
            direct.pool().stats().servers.iter().map(|s| s.sent_bytes + s.received_bytes).sum::<u64>()
        };
        let before = traffic(&mut direct);
        let all = Layout::bytes(8 * MIB).unwrap();
        let copy = direct.start_copy((one, 0, &all), (two, 0, &all)).unwrap();
        direct.wait(copy).unwrap();
        let travelled = traffic(&mut direct) - before;
        assert!(travelled < MIB / 2, "{travelled} bytes through the client");
        let mut bytes = vec![0; MIB as usize];
        direct.get(two, 5 * MIB, &mut bytes).unwrap();
        assert!(bytes == content);
        let short = Layout::bytes(7).unwrap();
        assert!(matches!(direct.copy((one, 0, &all), (two, 0, &short)), Err(DirectError::Lengths { .. })));
        direct.close();
        all_gone(&list);
    }
}

/// A copy whose answer is lost, between the client and the source or between the servers, is carried out
/// once: the target takes its bytes once, although the client and the source ask again.
#[test]
fn a_copy_is_made_once_however_often_links_break() {
    let [source, target] = [serve(32 * MIB), serve(32 * MIB)];
    let relays = [&source, &target].map(|server| Relay::start(address_of(server), Cut::Clean, 0));
    let specs = relays
        .iter()
        .map(|relay| ServerSpec { endpoint: relay.address.to_string().parse().unwrap(), memory: None });
    let mut config = PoolConfig::new(specs.collect(), ByteLen(32 * MIB), "test");
    config.stripe_pages = 4;
    let mut direct = Direct::connect(&config).unwrap();
    let region = direct.create(MIB).unwrap();
    let page_of =
        |server: u16| (0..64).find(|page| direct.pool().holder(PageIndex(*page)).0 == server).unwrap() * 4096;
    let (here, there) = (page_of(0), page_of(1));
    let page = Layout::bytes(4096).unwrap();
    for n in 0..20u8 {
        direct.put(region, here, &[n; 4096]).unwrap();
        let before = target.status().operations.puts;
        let cuts = relays.each_ref().map(Relay::cuts);
        let lost = usize::from(n % 2);
        if lost == 1 {
            // So that the servers know each other by now, and the next answer is that to a copy.
            direct.copy((region, here, &page), (region, there, &page)).unwrap();
        }
        relays[lost].lose_answer();
        direct.copy((region, here, &page), (region, there, &page)).unwrap();
        assert!(relays[lost].cuts() > cuts[lost], "the answer was to be lost");
        assert_eq!(target.status().operations.puts - before, 1 + lost as u64, "copy {n}");
        let mut bytes = [0; 4096];
        direct.get(region, there, &mut bytes).unwrap();
        assert_eq!(bytes, [n; 4096]);
    }
    direct.close();
    drop(relays);
    all_gone(&[&source, &target]);
}

#[test]
fn a_copy_to_a_server_that_is_gone_ends_with_its_name_and_the_source_goes_on() {
    let [source, target] = [serve(32 * MIB), serve(32 * MIB)];
    let mut direct = Direct::connect(&config(&[&source, &target], 32 * MIB)).unwrap();
    let region = direct.create(MIB).unwrap();
    let page_of =
        |server: u16| (0..64).find(|page| direct.pool().holder(PageIndex(*page)).0 == server).unwrap() * 4096;
    let (here, there) = (page_of(0), page_of(1));
    direct.put(region, here, &[4; 4096]).unwrap();
    let page = Layout::bytes(4096).unwrap();
    direct.copy((region, here, &page), (region, there, &page)).unwrap();
    let name = target.addr().to_string();
    target.stop();
    for _ in 0..3 {
        match direct.copy((region, here, &page), (region, there, &page)) {
            Err(DirectError::Pool(PoolError::Denied { server, operation: Operation::Copy(_), message })) => {
                assert_eq!(server, source.addr().to_string());
                assert!(message.contains(&name), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
    let mut bytes = [0; 4096];
    direct.get(region, here, &mut bytes).unwrap();
    assert_eq!(bytes, [4; 4096]);
    direct.close();
    all_gone(&[&source]);
}

/// The bytes are stored by the server that they go to, which is the one that has no room.
#[test]
fn a_copy_that_does_not_fit_says_where_and_what_is_free() {
    let [source, target] = [serve(64 * MIB), serve(64 * MIB)];
    let mut direct = Direct::connect(&config(&[&source, &target], 4 * MIB)).unwrap();
    let region = direct.create(64 * MIB).unwrap();
    let pages_of = |server: u16| {
        (0..64 * MIB / 4096)
            .filter(|page| direct.pool().holder(PageIndex(*page)).0 == server)
            .collect::<Vec<_>>()
    };
    let (from, to) = (pages_of(0)[0] * 4096, pages_of(1));
    direct.put(region, from, &[4; 4096]).unwrap();
    let page = Layout::bytes(4096).unwrap();
    let full = to.iter().find_map(|to| direct.copy((region, from, &page), (region, to * 4096, &page)).err());
    match full.expect("a lease of 4 MiB holds fewer than 32 MiB") {
        DirectError::Full { server, operation: Operation::Copy(_), free } => {
            assert!(server == target.addr().to_string() && free.0 < 4096, "{server}: {free}");
        }
        other => panic!("{other:?}"),
    }
    direct.close();
    all_gone(&[&source, &target]);
}

#[test]
fn a_region_that_was_freed_is_none_for_every_operation() {
    let server = serve(16 * MIB);
    let mut direct = Direct::connect(&config(&[&server], 8 * MIB)).unwrap();
    let (freed, other) = (direct.create(MIB).unwrap(), direct.create(MIB).unwrap());
    let queue = direct.open_or_create_queue("jobs", QueueBounds { messages: 9, bytes: MIB }).unwrap();
    direct.put_value(freed, 0, 1u64).unwrap();
    direct.free(freed);
    let word = Layout::bytes(8).unwrap();
    let none = |result: Result<(), DirectError>| {
        assert!(matches!(result, Err(DirectError::NoSuchRegion)), "{result:?}")
    };
    none(direct.get_value::<u64>(freed, 0).map(drop));
    none(direct.get(freed, 0, &mut [0; 9000]));
    none(direct.put_value(freed, 0, 1u64));
    none(direct.accumulate(freed, 0, &word, Combine::Sum, &[1u64]));
    none(direct.fetch_add(freed, 0, 1u64).map(drop));
    none(direct.sum(freed, 0, &word, Filter::<u64>::all()).map(drop));
    none(direct.copy((freed, 0, &word), (other, 0, &word)));
    none(direct.copy((other, 0, &word), (freed, 0, &word)));
    none(direct.ticket(freed).map(drop));
    let sent = direct.send(
        &queue,
        b"",
        SendBody::InPool { region: freed, offset: 0, layout: &word },
        Duration::ZERO,
    );
    assert!(matches!(sent, Err(QueueError::Direct { source: DirectError::NoSuchRegion, .. })), "{sent:?}");
    direct
        .send(&queue, b"", SendBody::InPool { region: other, offset: 0, layout: &word }, Duration::ZERO)
        .unwrap();
    let mut message = direct.take(&queue, Duration::ZERO).unwrap().unwrap();
    let landed = direct.land_body(&mut message, freed, 0, Duration::ZERO);
    assert!(
        matches!(landed, Err(QueueError::Direct { source: DirectError::NoSuchRegion, .. })),
        "{landed:?}"
    );
    direct.done(message);
    direct.close();
    all_gone(&[&server]);
}

/// A megabyte that is selected half a billion times, and petabytes of zeroes.
#[test]
fn a_layout_that_selects_more_than_there_is_memory_or_time_for_is_refused() {
    let server = serve(16 * MIB);
    let mut direct = Direct::connect(&config(&[&server], 8 * MIB)).unwrap();
    let region = direct.create(MIB).unwrap();
    direct.put_value(region, 8, 7u64).unwrap();
    let much = Layout::bytes(MIB).unwrap().hvector(1 << 29, 1, 0).unwrap();
    assert!(matches!(
        direct.start_get(region, 0, &much),
        Err(DirectError::NoMemory { bytes }) if bytes == MIB << 29
    ));
    assert!(matches!(direct.get_values::<u64>(region, 0, &much), Err(DirectError::NoMemory { .. })));
    // Nor is it looked through or copied, where not a byte of it would come here.
    let elements = (MIB / 8) << 29;
    match direct.count(region, 0, &much, Filter::<u64>::all()) {
        Err(DirectError::TooMuch { operation: Operation::Scan(0), wanted, .. }) => {
            assert_eq!(wanted, elements)
        }
        other => panic!("{other:?}"),
    }
    let sparse = direct.create(4 << 50).unwrap();
    let half = Layout::bytes(2 << 50).unwrap();
    match direct.copy((sparse, 0, &half), (sparse, 2 << 50, &half)) {
        Err(DirectError::TooMuch { operation: Operation::Copy(0), wanted, .. }) => {
            assert_eq!(wanted, 2 << 50)
        }
        other => panic!("{other:?}"),
    }
    let queue = direct.open_or_create_queue("jobs", QueueBounds { messages: 9, bytes: MIB }).unwrap();
    direct
        .send(&queue, b"", SendBody::InPool { region: sparse, offset: 0, layout: &half }, Duration::ZERO)
        .unwrap();
    let mut message = direct.take(&queue, Duration::ZERO).unwrap().unwrap();
    let landed = direct.land_body(&mut message, sparse, 2 << 50, Duration::ZERO);
    assert!(
        matches!(landed, Err(QueueError::Direct { source: DirectError::TooMuch { .. }, .. })),
        "{landed:?}"
    );
    assert!(matches!(direct.body(&mut message, Duration::ZERO), Err(QueueError::Room { room: 0, .. })));
    direct.done(message);
    assert_eq!(direct.get_value::<u64>(region, 8).unwrap(), 7);
    direct.close();
    all_gone(&[&server]);
}

/// A server that hangs delays the copies to it, and no others.
#[test]
fn a_copy_to_a_server_that_hangs_keeps_no_other_tenants_copies_waiting() {
    let [source, target] = [serve(64 * MIB), serve(64 * MIB)];
    let page = Layout::bytes(4096).unwrap();
    let mut stuck = Vec::new();
    for _ in 0..2 {
        let relay = Relay::start(address_of(&target), Cut::Clean, 0);
        let endpoints = [source.addr().clone(), relay.address.to_string().parse().unwrap()];
        let specs = endpoints.map(|endpoint| ServerSpec { endpoint, memory: None });
        let mut config = PoolConfig::new(specs.into(), ByteLen(16 * MIB), "test");
        config.stripe_pages = 4;
        let mut direct = Direct::connect(&config).unwrap();
        let region = direct.create(MIB).unwrap();
        let (here, there) = (on_server(&mut direct, 0), on_server(&mut direct, 1));
        direct.put(region, here, &[4; 4096]).unwrap();
        relay.mute();
        stuck.push((
            direct.start_copy((region, here, &page), (region, there, &page)).unwrap(),
            direct,
            relay,
        ));
    }
    let mut config = config(&[&source, &target], 16 * MIB);
    config.op_deadline = Duration::from_secs(5);
    let mut direct = Direct::connect(&config).unwrap();
    let region = direct.create(MIB).unwrap();
    let (here, there) = (on_server(&mut direct, 0), on_server(&mut direct, 1));
    direct.put(region, here, &[5; 4096]).unwrap();
    super::wait_until("the source looks for the server that hangs", || stuck[0].2.muted() > 0);
    direct.copy((region, here, &page), (region, there, &page)).unwrap();
    let mut bytes = [0; 4096];
    direct.get(region, there, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 4096]);
    direct.close();
    for (pending, mut direct, relay) in stuck {
        let name = relay.address.to_string();
        match direct.wait(pending) {
            Err(DirectError::Pool(PoolError::Denied { message, .. })) => {
                assert!(message.contains(&name), "{message}")
            }
            other => panic!("{other:?}"),
        }
        direct.close();
    }
    all_gone(&[&source, &target]);
}

/// The first byte of a page that this server holds.
fn on_server(direct: &mut Direct, server: u16) -> u64 {
    (0..64).find(|page| direct.pool().holder(PageIndex(*page)).0 == server).unwrap() * 4096
}
