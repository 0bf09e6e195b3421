//! A store of values in a pool, against a real memory server in this process.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rampool::direct::{Direct, DirectError};
use rampool::pool::{PoolConfig, ServerSpec};
use rampool::proto::units::ByteLen;
use rampool::server::{RunningServer, Server, ServerConfig};
use rampool::values::{SharedStore, SharedStoreError, Store, StoreError};

const MIB: u64 = 1 << 20;

fn serve(bytes: u64) -> RunningServer {
    let mut config = ServerConfig::new(bytes, "127.0.0.1:0".parse().unwrap());
    config.lock_memory = false;
    Server::start(config).unwrap()
}

fn store(server: &RunningServer, bytes: u64) -> Store {
    let spec = ServerSpec { endpoint: server.addr().clone(), memory: None };
    Store::new(Direct::connect(&PoolConfig::new(vec![spec], ByteLen(bytes), "store")).unwrap())
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, Vec<usize>),
    Get(u8),
    GetInto(u8, usize),
    Remove(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![0..100_usize, 4000..5000_usize, 0..200_000_usize];
    prop_oneof![
        (0..6_u8, prop::collection::vec(length.clone(), 0..4)).prop_map(|(key, parts)| Step::Put(key, parts)),
        (0..6_u8).prop_map(Step::Get),
        (0..6_u8, length).prop_map(|(key, room)| Step::GetInto(key, room)),
        (0..6_u8).prop_map(Step::Remove),
    ]
}

#[test]
fn a_store_is_a_map() {
    let server = serve(64 * MIB);
    let mut runner = TestRunner::new(Config { cases: 24, ..Config::default() });
    let seed = Cell::new(0_u8);
    let result = runner.run(&prop::collection::vec(step(), 1..60), |steps| {
        let (mut store, mut model) = (store(&server, 32 * MIB), BTreeMap::<u8, Vec<u8>>::new());
        for step in steps {
            match step {
                Step::Put(key, lengths) => {
                    let parts: Vec<Vec<u8>> = lengths
                        .iter()
                        .map(|length| {
                            seed.set(seed.get().wrapping_add(1));
                            (0..*length)
                                .map(|n| {
                                    seed.get().wrapping_mul(31).wrapping_add(u8::try_from(n % 251).unwrap())
                                })
                                .collect()
                        })
                        .collect();
                    let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
                    store.put(&[key], &slices).unwrap();
                    model.insert(key, parts.concat());
                }
                Step::Get(key) => {
                    let got = store.get(&[key]).unwrap();
                    prop_assert_eq!(got.as_ref(), model.get(&key));
                }
                Step::GetInto(key, room) => {
                    let mut buffer = vec![0; room];
                    match (store.get_into(&[key], &mut buffer), model.get(&key)) {
                        (Ok(None), None) => {}
                        (Ok(Some(bytes)), Some(value)) => prop_assert_eq!(&buffer[..bytes], value.as_slice()),
                        (Err(StoreError::Room { bytes, .. }), Some(value)) => {
                            prop_assert!(value.len() > room && bytes == value.len() as u64);
                        }
                        (got, _) => prop_assert!(false, "{:?}", got.map(|_| ())),
                    }
                }
                Step::Remove(key) => prop_assert_eq!(store.remove(&[key]), model.remove(&key).is_some()),
            }
            prop_assert_eq!(store.len(), model.len());
            prop_assert_eq!(store.bytes(), model.values().map(|value| value.len() as u64).sum::<u64>());
            prop_assert!(store.keys().eq(model.keys().map(std::slice::from_ref)));
        }
        store.close();
        Ok(())
    });
    result.unwrap();
}

#[test]
fn a_put_without_room_leaves_the_value_that_was_there() {
    let server = serve(16 * MIB);
    let mut store = store(&server, 8 * MIB);
    store.put(b"a", &[b"before"]).unwrap();
    let large = vec![7; 12 << 20];
    let refused = store.put(b"a", &[&large]);
    assert!(matches!(refused, Err(StoreError::Direct(DirectError::Full { .. }))), "{refused:?}");
    assert_eq!(store.get(b"a").unwrap().as_deref(), Some(b"before".as_slice()));
    // What was written of it is given back.
    store.put(b"b", &[&large[..6 << 20]]).unwrap();
    assert_eq!(store.get(b"b").unwrap().map(|value| value.len()), Some(6 << 20));
}

#[test]
fn what_is_removed_makes_room() {
    let server = serve(32 * MIB);
    let mut store = store(&server, 16 * MIB);
    let value = vec![3; 10 << 20];
    for round in 0..5_u8 {
        store.put(&[round], &[&value]).unwrap();
        assert!(store.remove(&[round]));
        assert!(!store.remove(&[round]));
    }
    assert!(store.is_empty());
}

#[test]
fn a_value_on_its_way_survives_its_removal() {
    let server = serve(32 * MIB);
    let mut store = store(&server, 16 * MIB);
    let value: Vec<u8> = (0..1_000_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    store.put(b"a", &[&value]).unwrap();
    let pending = store.start_get(b"a").unwrap().unwrap();
    store.remove(b"a");
    store.put(b"b", &[&value[1..]]).unwrap();
    assert_eq!(store.wait(pending).unwrap(), value);
}

#[derive(Clone, Debug)]
enum SharedStep {
    Put(u8, usize),
    Get(u8),
    Remove(u8),
    /// Takes over what the other member has, which may go on.
    Adopt,
    /// Another process opens the store in its place, and knows nothing.
    Restart,
}

fn shared_step() -> impl Strategy<Value = (bool, SharedStep)> {
    let length = prop_oneof![0..100_usize, 4000..5000_usize, 0..200_000_usize];
    let step = prop_oneof![
        8 => (0..6_u8, length).prop_map(|(key, bytes)| SharedStep::Put(key, bytes)),
        6 => (0..6_u8).prop_map(SharedStep::Get),
        3 => (0..6_u8).prop_map(SharedStep::Remove),
        1 => Just(SharedStep::Adopt),
        1 => Just(SharedStep::Restart),
    ];
    (any::<bool>(), step)
}

/// Two members of a lease, and what they open.
fn members(server: &RunningServer, bytes: u64) -> [Direct; 2] {
    let spec = ServerSpec { endpoint: server.addr().clone(), memory: None };
    let one = Direct::connect(&PoolConfig::new(vec![spec], ByteLen(bytes), "one")).unwrap();
    let other = Direct::connect(&PoolConfig::attach(one.pool().lease_ticket(), "other")).unwrap();
    [one, other]
}

#[test]
fn a_shared_store_is_one_map_whoever_takes_over() {
    let server = serve(512 * MIB);
    let mut runner = TestRunner::new(Config { cases: 64, max_shrink_iters: 0, ..Config::default() });
    let result = runner.run(&prop::collection::vec(shared_step(), 1..60), |steps| {
        assert!(server.wait_until_idle(std::time::Instant::now() + Duration::from_secs(20)));
        let mut directs = members(&server, 400 * MIB);
        let open = |direct: &mut Direct| SharedStore::open(direct, "s", Some(50), Duration::ZERO).unwrap();
        let mut stores = directs.each_mut().map(open);
        let (mut model, mut seed) = (BTreeMap::<u8, Vec<u8>>::new(), 0_u8);
        for (second, step) in steps {
            let nth = usize::from(second);
            let (store, direct) = (&mut stores[nth], &mut directs[nth]);
            match step {
                SharedStep::Put(key, bytes) => {
                    seed = seed.wrapping_add(1);
                    let value = vec![seed; bytes];
                    store.put(direct, &[key], &[&value[..bytes / 3], &value[bytes / 3..]]).unwrap();
                    model.insert(key, value);
                }
                SharedStep::Get(key) => {
                    prop_assert_eq!(store.get(direct, &[key]).unwrap(), model.get(&key).cloned());
                }
                SharedStep::Remove(key) => {
                    prop_assert_eq!(store.remove(direct, &[key]).unwrap(), model.remove(&key).is_some());
                }
                SharedStep::Adopt => drop(store.adopt(direct).unwrap()),
                SharedStep::Restart => *store = open(direct),
            }
            let (store, direct) = (&mut stores[1 - nth], &mut directs[1 - nth]);
            prop_assert_eq!(store.len(direct).unwrap(), model.len() as u64);
        }
        let keys = stores[0].keys(&mut directs[0]).unwrap();
        let has: Vec<Vec<u8>> = model.keys().map(|key| vec![*key]).collect();
        prop_assert_eq!(keys, has);
        for (key, value) in &model {
            prop_assert_eq!(stores[1].get(&mut directs[1], &[*key]).unwrap(), Some(value.clone()));
        }
        directs.iter_mut().for_each(Direct::close);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn a_shared_store_says_what_is_wrong_with_it() {
    let server = serve(64 * MIB);
    let [mut direct, mut other] = members(&server, 32 * MIB);
    let mut store = SharedStore::open(&mut direct, "small", Some(20), Duration::from_secs(60)).unwrap();
    let refused = (0..100_u8).find_map(|key| store.put(&mut direct, &[key], &[b"x"]).err());
    assert!(matches!(refused, Some(SharedStoreError::IndexFull { .. })), "{refused:?}");
    let mut reader = SharedStore::open(&mut other, "small", None, Duration::from_secs(60)).unwrap();
    let kept = store.len(&mut direct).unwrap();
    assert!((17..=32).contains(&kept) && reader.get(&mut other, &[0]).unwrap().is_some(), "{kept}");
    let many = SharedStore::open(&mut other, "small", Some(5_000_000), Duration::from_secs(60));
    assert!(matches!(many, Err(SharedStoreError::OtherKeys { places: 32, .. })), "{many:?}");
    let large = vec![1; 40 << 20];
    let refused = reader.put(&mut other, &[0], &[&large]);
    assert!(matches!(refused, Err(SharedStoreError::Direct(DirectError::Full { .. }))), "{refused:?}");
    assert_eq!(reader.get(&mut other, &[0]).unwrap().as_deref(), Some(&b"x"[..]));
    // What others write may be anything: it is no value, and nothing hangs.
    let index = other.open("small.index").unwrap();
    other.put(index, 0, &vec![0xA5; usize::try_from(index.bytes()).unwrap()]).unwrap();
    assert_eq!(reader.get(&mut other, &[0]).unwrap(), None);
    assert!(reader.keys(&mut other).unwrap().is_empty());
    let refused = reader.put(&mut other, &[1], &[b"x"]);
    assert!(matches!(refused, Err(SharedStoreError::IndexFull { .. })), "{refused:?}");
}
