//! A store of values in a pool, against a real memory server in this process.

use std::cell::Cell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rampool::direct::{Direct, DirectError};
use rampool::pool::{PoolConfig, ServerSpec};
use rampool::proto::units::ByteLen;
use rampool::server::{RunningServer, Server, ServerConfig};
use rampool::values::{Store, StoreError};

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
