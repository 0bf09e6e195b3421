//! Remote queues against real memory servers.

use super::{
    MIB, Relay, WATCHDOG, address_of, all_gone, config, mix, serve, server_config, through, wait_until,
};
use crate::relay::Cut;
use rampool::direct::{
    Direct, DirectError, Filter, Message, Queue, QueueBounds, QueueError, QueueListener, SendBody, Total,
    Verdict,
};
use rampool::error::{Operation, PoolError};
use rampool::pool::PoolConfig;
use rampool::proto::elements::Combine;
use rampool::proto::layout::Layout;
use rampool::server::{RunningServer, Server, ServerConfig};
use rampool_lease::QueueLimits;
use rampool_wire::frame::MAX_HEAD_BYTES;
use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const NOW: Duration = Duration::ZERO;
const BOUNDS: QueueBounds = QueueBounds { messages: 1000, bytes: 64 * MIB };

fn another(direct: &mut Direct, config: &PoolConfig) -> Direct {
    let mut attach = PoolConfig::attach(direct.pool().lease_ticket(), "another");
    (attach.key, attach.encryption, attach.op_deadline) =
        (config.key.clone(), config.encryption, config.op_deadline);
    Direct::connect(&attach).unwrap()
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut at = seed;
    (0..len.div_ceil(8))
        .flat_map(|_| {
            at = mix(at);
            at.to_le_bytes()
        })
        .take(len)
        .collect()
}

fn must_take(direct: &mut Direct, queue: &Queue) -> Message {
    direct.take(queue, WATCHDOG).unwrap().expect("a message before the watchdog")
}

/// The queue of this name as its server tells of it. While a thread of the server works on a lease, the
/// server tells what it saw last, which may be from before there was such a queue.
fn status(servers: &[&RunningServer], name: &str) -> rampool::server::QueueStatus {
    let look = || {
        let mut leases = servers.iter().flat_map(|server| server.status().leases);
        leases.find_map(|lease| lease.queues.into_iter().find(|queue| queue.name == name))
    };
    wait_until("a queue of this name", || look().is_some());
    look().expect("what was listed once stays listed")
}

#[test]
fn messages_arrive_in_order_with_bodies_of_any_length() {
    let servers = [serve(96 * MIB), serve(96 * MIB)];
    let list = [&servers[0], &servers[1]];
    let config = config(&list, 128 * MIB);
    let mut one = Direct::connect(&config).unwrap();
    let mut two = another(&mut one, &config);
    let names = ["a", "jobs", "a longer name", "ä", "answers"];
    for name in names {
        let sender = one.open_or_create_queue(name, BOUNDS).unwrap();
        let receiver = two.open_queue(name).unwrap();
        assert_eq!(receiver.bounds(), BOUNDS);
        let lengths = [0, 1, 100, 4095, 4096, 4097, 128 << 10, (1 << 20) + 17];
        for (n, len) in lengths.iter().enumerate() {
            one.send(&sender, &bytes(n as u64, n * 36), SendBody::Bytes(&bytes(77 + n as u64, *len)), NOW)
                .unwrap();
        }
        for (n, len) in lengths.iter().enumerate() {
            let mut message = must_take(&mut two, &receiver);
            assert_eq!((message.head(), message.redelivered()), (&bytes(n as u64, n * 36)[..], false));
            assert_eq!(message.body_bytes(), *len as u64);
            if n % 2 == 0 {
                two.prefetch_body(&mut message);
                assert!(two.body(&mut message, WATCHDOG).unwrap() == bytes(77 + n as u64, *len));
            } else {
                let mut room = vec![9; len + 3];
                assert_eq!(two.body_into(&mut message, &mut room, WATCHDOG).unwrap(), *len);
                assert!(room[..*len] == bytes(77 + n as u64, *len) && room[*len..] == [9; 3]);
            }
            two.done(message);
        }
        assert!(two.take(&receiver, NOW).unwrap().is_none());
        assert!(two.take(&receiver, Duration::from_millis(20)).unwrap().is_none());
        let now = status(&list, name);
        assert_eq!((now.messages, now.bytes, now.pushed, now.done), (0, 0, 8, 8));
    }
    let mut listed: Vec<String> = two.queues().unwrap().into_iter().map(|queue| queue.name).collect();
    listed.sort_unstable();
    assert_eq!(listed, ["a", "a longer name", "answers", "jobs", "ä"]);
    assert!(
        servers.iter().all(|s| s.status().leases[0].queues.len() < names.len()),
        "all queues are at one server"
    );
    one.close();
    two.close();
    all_gone(&list);
}

#[test]
fn messages_are_matched_by_source_and_tag_and_others_keep_their_order() {
    let server = serve(96 * MIB);
    let config = config(&[&server], 32 * MIB);
    let mut sender = Direct::connect(&config).unwrap();
    let mut receiver = another(&mut sender, &config);
    let (to, from) =
        (sender.open_or_create_queue("ranks", BOUNDS).unwrap(), receiver.open_queue("ranks").unwrap());
    // Source, tag and number.
    for number in 0..30u8 {
        sender.send(&to, &[number % 3, number % 5, number], SendBody::None, WATCHDOG).unwrap();
    }
    let mut take = |wanted: &dyn Fn(&[u8]) -> bool| {
        let message = receiver.take_where(&from, wanted, NOW).unwrap()?;
        let number = message.head()[2];
        receiver.done(message);
        Some(number)
    };
    // The first of a source and a tag, then the first of any source, then what is not there.
    assert_eq!(take(&|head| head[..2] == [2, 4]), Some(14));
    assert_eq!(take(&|head| head[1] == 4), Some(4));
    assert_eq!(take(&|head| head[1] == 4), Some(9));
    assert_eq!(take(&|head| head[..2] == [2, 4]), Some(29));
    assert_eq!(take(&|head| head[..2] == [2, 4]), None);
    // What was passed over comes as it was sent.
    let rest: Vec<u8> = std::iter::from_fn(|| take(&|_| true)).collect();
    let expected: Vec<u8> = (0..30).filter(|number| ![4, 9, 14, 29].contains(number)).collect();
    assert_eq!(rest, expected);
    receiver.flush_done(&from).unwrap();
    assert_eq!(status(&[&server], "ranks").messages, 0);
}

#[test]
fn who_waits_for_a_tag_is_not_kept_by_others_and_who_leaves_gives_back_what_it_passed_over() {
    let server = serve(96 * MIB);
    let config = config(&[&server], 32 * MIB);
    let mut sender = Direct::connect(&config).unwrap();
    let mut receiver = another(&mut sender, &config);
    let (to, from) =
        (sender.open_or_create_queue("ranks", BOUNDS).unwrap(), receiver.open_queue("ranks").unwrap());
    sender.send(&to, b"a1", SendBody::None, WATCHDOG).unwrap();
    assert!(receiver.take_where(&from, |head| head[0] == b'b', NOW).unwrap().is_none());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for head in [b"a2", b"b1"] {
                sender.send(&to, head, SendBody::None, WATCHDOG).unwrap();
            }
        });
        let message = receiver.take_where(&from, |head| head[0] == b'b', WATCHDOG).unwrap().unwrap();
        assert_eq!(message.head(), b"b1");
        receiver.done(message);
    });
    receiver.flush_done(&from).unwrap();
    receiver.close();
    drop(receiver);
    let (mut next, queue) = (another(&mut sender, &config), to.clone());
    for expected in [b"a1", b"a2"] {
        let message = must_take(&mut next, &queue);
        assert_eq!((message.head(), message.redelivered()), (&expected[..], true));
        next.done(message);
    }
}

#[test]
fn bodies_up_to_a_length_come_with_their_heads() {
    let server = serve(96 * MIB);
    let config = config(&[&server], 64 * MIB);
    let mut sender = Direct::connect(&config).unwrap();
    let mut receiver = another(&mut sender, &config);
    let (to, from) =
        (sender.open_or_create_queue("bodies", BOUNDS).unwrap(), receiver.open_queue("bodies").unwrap());
    receiver.prefetch_bodies(&from, 5000);
    for len in [5000, 5001, 0, 64] {
        sender.send(&to, b"head", SendBody::Bytes(&bytes(len as u64, len)), WATCHDOG).unwrap();
    }
    for (len, comes) in [(5000, true), (5001, false), (0, false), (64, true)] {
        assert_eq!(receiver.under_way(), 0);
        let mut message = must_take(&mut receiver, &from);
        assert_eq!(receiver.under_way() > 0, comes, "{len} bytes");
        assert_eq!(receiver.body(&mut message, WATCHDOG).unwrap(), bytes(len as u64, len));
        receiver.done(message);
    }
    // One that is never asked for is in nobody's way.
    receiver.prefetch_bodies(&from, u64::MAX);
    sender.send(&to, b"head", SendBody::Bytes(&bytes(7, 5001)), WATCHDOG).unwrap();
    let message = must_take(&mut receiver, &from);
    receiver.done(message);
    receiver.prefetch_bodies(&from, 0);
    sender.send(&to, b"last", SendBody::Bytes(&bytes(8, 5001)), WATCHDOG).unwrap();
    let mut message = must_take(&mut receiver, &from);
    assert_eq!(receiver.body(&mut message, WATCHDOG).unwrap(), bytes(8, 5001));
}

/// What lies in the pool is joined with its head by its receiver, and never passes through the sender.
#[test]
fn a_body_in_the_pool_stays_there_or_goes_from_server_to_server() {
    let servers = [serve(96 * MIB), serve(96 * MIB)];
    let list = [&servers[0], &servers[1]];
    let config = config(&list, 128 * MIB);
    let mut one = Direct::connect(&config).unwrap();
    let mut two = another(&mut one, &config);
    let queue = one.open_or_create_queue("work", BOUNDS).unwrap();
    let theirs = two.open_queue("work").unwrap();
    let table = one.create(4 * MIB).unwrap();
    let content = bytes(5, 4 << 20);
    one.put(table, 0, &content).unwrap();
    let traffic = |direct: &mut Direct| {
        direct.pool().stats().servers.iter().map(|s| s.sent_bytes + s.received_bytes).sum::<u64>()
    };
    let before = (traffic(&mut one), traffic(&mut two));
    // A range, and a column.
    let range = Layout::bytes(2 * MIB).unwrap();
    let column = Layout::bytes(8).unwrap().hvector(4096, 1, 1024).unwrap();
    one.send(&queue, b"range", SendBody::InPool { region: table, offset: 4096, layout: &range }, NOW)
        .unwrap();
    one.send(&queue, b"column", SendBody::InPool { region: table, offset: 16, layout: &column }, NOW)
        .unwrap();
    assert!(traffic(&mut one) - before.0 < 4096, "the bodies do not pass through the sender");
    let mut message = must_take(&mut two, &theirs);
    let landing = two.create(4 * MIB).unwrap();
    two.land_body(&mut message, landing, 100, WATCHDOG).unwrap();
    assert!(
        traffic(&mut two) - before.1 < 64 * 1024,
        "nor through the receiver that has it landed elsewhere"
    );
    let mut landed = vec![0; 2 << 20];
    two.get(landing, 100, &mut landed).unwrap();
    assert!(landed == content[4096..4096 + (2 << 20)]);
    let (place, at) = two.body_place(&mut message, WATCHDOG).unwrap().unwrap();
    assert_eq!((at, place.bytes()), (4096, 4096 + 2 * MIB));
    two.done(message);
    let mut message = must_take(&mut two, &theirs);
    assert_eq!(message.head(), b"column");
    let expected: Vec<u8> =
        (0..4096).flat_map(|row| content[row * 1024 + 16..row * 1024 + 24].to_vec()).collect();
    assert!(two.body(&mut message, WATCHDOG).unwrap() == expected);
    assert!(two.body_place(&mut message, WATCHDOG).unwrap().is_none(), "not in one piece");
    two.done(message);
    // A body that came with its message lies in the pool as well: it lands elsewhere, and is added up where
    // it is.
    let numbers: Vec<u8> = (0..100_000u64).flat_map(u64::to_le_bytes).collect();
    one.send(&queue, b"numbers", SendBody::Bytes(&numbers), NOW).unwrap();
    let mut message = must_take(&mut two, &theirs);
    two.land_body(&mut message, landing, 8, WATCHDOG).unwrap();
    let mut landed = vec![0; numbers.len()];
    two.get(landing, 8, &mut landed).unwrap();
    assert!(landed == numbers);
    let (place, at) = two.body_place(&mut message, WATCHDOG).unwrap().unwrap();
    let words = Layout::bytes(8).unwrap().contiguous(100_000).unwrap();
    let sum = two.sum(place, at, &words, Filter::<u64>::all()).unwrap();
    assert_eq!(sum, (100_000, Total::Integer(99_999 * 100_000 / 2)));
    // Its region is not freed in between.
    two.free(place);
    assert!(two.body(&mut message, WATCHDOG).unwrap() == numbers);
    two.done(message);
    // A body beyond its region is found when it is asked for; the head is good.
    let beyond = Layout::bytes(MIB).unwrap();
    assert!(matches!(
        one.send(&queue, b"", SendBody::InPool { region: table, offset: 4 * MIB - 5, layout: &beyond }, NOW),
        Err(QueueError::Direct { source: DirectError::Layout(_), .. })
    ));
    one.send(&queue, b"gone", SendBody::InPool { region: table, offset: 0, layout: &beyond }, NOW).unwrap();
    let mut message = must_take(&mut two, &theirs);
    one.free(table);
    // Behind the end of the region: the same connection carries both.
    one.flush_done(&queue).unwrap();
    one.send(&queue, b"later", SendBody::None, NOW).unwrap();
    let error = two.body(&mut message, WATCHDOG).unwrap_err().to_string();
    assert!(error.contains("queue work") && error.contains("no such region"), "{error}");
    two.done(message);
    one.close();
    two.close();
    all_gone(&list);
}

/// Whichever server a queue is at, what would change a body there is asked of that one, and refused.
#[test]
fn a_body_in_a_queue_is_read_and_never_written() {
    let servers = [serve(64 * MIB), serve(64 * MIB), serve(64 * MIB)];
    let list = [&servers[0], &servers[1], &servers[2]];
    let config = config(&list, 48 * MIB);
    let mut one = Direct::connect(&config).unwrap();
    let mut two = another(&mut one, &config);
    let word = Layout::bytes(8).unwrap();
    let elsewhere = one.create(MIB).unwrap();
    for name in ["a", "b", "c", "d", "e", "f"] {
        let queue = one.open_or_create_queue(name, BOUNDS).unwrap();
        one.send(&queue, b"", SendBody::Bytes(&[7; 10_000]), NOW).unwrap();
        let mut message = must_take(&mut one, &queue);
        let (place, at) = one.body_place(&mut message, WATCHDOG).unwrap().unwrap();
        let at_two = two.open_queue(name).unwrap();
        two.send(&at_two, b"", SendBody::Bytes(&[8; 10_000]), NOW).unwrap();
        let mut theirs = must_take(&mut two, &at_two);
        let (their_place, _) = two.body_place(&mut theirs, WATCHDOG).unwrap().unwrap();
        let results = [
            one.put(place, at, &[1; 8]),
            two.put(their_place, at, &[1; 8]),
            one.accumulate(place, at, &word, Combine::Sum, &[1u64]),
            one.fetch_add(place, at, 1u64).map(drop),
            one.compare_exchange(place, at, 7u64, 8).map(drop),
            one.copy((elsewhere, 0, &word), (place, at, &word)),
        ];
        for result in results {
            match result {
                Err(DirectError::Pool(PoolError::Denied { message, .. })) => {
                    assert!(message.contains("bodies of a queue"), "{message}")
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(one.body(&mut message, WATCHDOG).unwrap() == [7; 10_000]);
        one.done(message);
        two.done(theirs);
    }
    one.close();
    two.close();
    all_gone(&list);
}

#[test]
fn what_a_lost_receiver_held_comes_again_and_says_so() {
    let server = serve(64 * MIB);
    let config = config(&[&server], 32 * MIB);
    let mut sender = Direct::connect(&config).unwrap();
    let queue = sender.open_or_create_queue("jobs", BOUNDS).unwrap();
    for n in 0..10u8 {
        sender.send(&queue, &[n], SendBody::Bytes(&[n; 5000]), NOW).unwrap();
    }
    let mut first = another(&mut sender, &config);
    let first_queue = first.open_queue("jobs").unwrap();
    let held = first.take_many(&first_queue, 4, NOW).unwrap();
    assert_eq!(held.len(), 4);
    let mut held = held.into_iter();
    first.done(held.next().unwrap());
    first.flush_done(&first_queue).unwrap();
    first.give_back(held.next().unwrap()).unwrap();
    assert_eq!(status(&[&server], "jobs").held, 2);
    // The server hears of its end, and need not wait for it to come back.
    let mut second = another(&mut sender, &config);
    let second_queue = second.open_queue("jobs").unwrap();
    first.close();
    drop((first, held));
    // What a member held is settled behind the answer to its goodbye.
    wait_until("the first receiver is settled", || status(&[&server], "jobs").held == 0);
    let expected = [(1, true), (2, true), (3, true), (4, false), (5, false)];
    for (n, redelivered) in expected {
        let mut message = must_take(&mut second, &second_queue);
        assert_eq!((message.head(), message.redelivered()), (&[n][..], redelivered));
        assert!(second.body(&mut message, WATCHDOG).unwrap() == [n; 5000]);
        second.done(message);
    }
    let now = status(&[&server], "jobs");
    // The server hears of the last one with the next request.
    assert_eq!((now.messages, now.held, now.redelivered), (5, 1, 3));
    sender.close();
    second.close();
    all_gone(&[&server]);
}

/// A process that is killed says nothing: its connection breaks, and after the grace time it is given up.
#[test]
fn a_receiver_that_is_killed_gives_back_after_the_grace_time_and_a_sender_takes_back_what_it_had_not_sent() {
    let server =
        Server::start(ServerConfig { grace: Duration::from_millis(50), ..server_config(64 * MIB) }).unwrap();
    let config = config(&[&server], 32 * MIB);
    let mut other = Direct::connect(&config).unwrap();
    let queue = other.open_or_create_queue("jobs", BOUNDS).unwrap();
    let mut killed = another(&mut other, &config);
    let its = killed.open_queue("jobs").unwrap();
    other.send(&queue, b"one", SendBody::None, NOW).unwrap();
    let message = must_take(&mut killed, &its);
    // Half-way through a body: the head has left, and is waited for; the body never will.
    let half = killed.start_send(&its, b"half", vec![7; 1 << 20], NOW).unwrap();
    let mut got = must_take(&mut other, &queue);
    assert_eq!(got.head(), b"half");
    assert!(matches!(other.body(&mut got, NOW), Err(QueueError::BodyLate { number: 2, .. })));
    drop(killed);
    drop((message, half));
    match other.body(&mut got, WATCHDOG) {
        Err(QueueError::BodyLost { queue, server: name, number: 2 }) => {
            assert_eq!((queue.as_str(), name), ("jobs", server.addr().to_string()));
        }
        other => panic!("{other:?}"),
    }
    other.done(got);
    let again = must_take(&mut other, &queue);
    assert_eq!((again.head(), again.redelivered()), (&b"one"[..], true));
    other.done(again);
    other.flush_done(&queue).unwrap();
    let now = status(&[&server], "jobs");
    assert_eq!((now.messages, now.bytes, now.withdrawn), (0, 0, 1));
    other.close();
    all_gone(&[&server]);
}

#[test]
fn a_full_queue_makes_senders_wait_or_tells_them() {
    let server = serve(64 * MIB);
    let config = config(&[&server], 32 * MIB);
    let mut sender = Direct::connect(&config).unwrap();
    let queue = sender.open_or_create_queue("small", QueueBounds { messages: 2, bytes: 10_000 }).unwrap();
    sender.send(&queue, b"1", SendBody::None, NOW).unwrap();
    sender.send(&queue, b"2", SendBody::Bytes(&[2; 9000]), NOW).unwrap();
    match sender.send(&queue, b"3", SendBody::None, NOW) {
        Err(QueueError::Full { queue, server: name, messages: 2 }) => {
            assert_eq!((queue.as_str(), name), ("small", server.addr().to_string()))
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        sender.send(&queue, b"3", SendBody::None, Duration::from_millis(30)),
        Err(QueueError::Full { .. })
    ));
    // A body that will never fit is not waited for.
    match sender.send(&queue, b"", SendBody::Bytes(&[0; 10_001]), WATCHDOG) {
        Err(QueueError::Refused { operation: Operation::Push, message, .. }) => {
            assert!(message.contains("10001 bytes"), "{message}")
        }
        other => panic!("{other:?}"),
    }
    let (started, waits) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut receiver = another(&mut sender, &config);
        let waiting = scope.spawn(|| {
            let mut patient = another(&mut sender, &config);
            let queue = patient.open_queue("small").unwrap();
            started.send(()).unwrap();
            patient.send(&queue, b"patient", SendBody::Bytes(&[3; 9000]), WATCHDOG).unwrap();
            patient.close();
        });
        waits.recv().unwrap();
        wait_until("the sender waits", || status(&[&server], "small").waiting_senders != 0);
        let queue = receiver.open_queue("small").unwrap();
        for head in [&b"1"[..], b"2", b"patient"] {
            let mut message = must_take(&mut receiver, &queue);
            assert_eq!(message.head(), head);
            receiver.body(&mut message, WATCHDOG).unwrap();
            receiver.done(message);
        }
        waiting.join().unwrap();
        receiver.close();
    });
    assert_eq!(status(&[&server], "small").full, 2);
    sender.close();
    all_gone(&[&server]);
}

#[test]
fn what_makes_no_sense_is_named() {
    let limits = QueueLimits { queues: 2, bounds: QueueBounds { messages: 10, bytes: 1 << 30 } };
    let server = Server::start(ServerConfig { queues: limits, ..server_config(64 * MIB) }).unwrap();
    let name = server.addr().to_string();
    let config = config(&[&server], 4 * MIB);
    let mut direct = Direct::connect(&config).unwrap();
    for wrong in ["", "with\nnewline", &"x".repeat(256)] {
        assert!(matches!(direct.open_queue(wrong), Err(QueueError::Name)));
    }
    match direct.open_queue("no such") {
        Err(QueueError::NoSuchQueue { queue, server }) => {
            assert_eq!((queue.as_str(), &server), ("no such", &name))
        }
        other => panic!("{other:?}"),
    }
    for bounds in [QueueBounds { messages: 11, bytes: 5 }, QueueBounds { messages: 0, bytes: 5 }] {
        match direct.open_or_create_queue("x", bounds) {
            Err(QueueError::Refused { operation: Operation::OpenQueue, message, .. }) => {
                assert!(message.contains("1 to 10 messages"), "{message}")
            }
            other => panic!("{other:?}"),
        }
    }
    let bounds = QueueBounds { messages: 10, bytes: 1 << 30 };
    let queue = direct.open_or_create_queue("one", bounds).unwrap();
    direct.open_or_create_queue(&"y".repeat(255), bounds).unwrap();
    assert!(matches!(direct.open_or_create_queue("three", bounds), Err(QueueError::Refused { .. })));
    assert!(matches!(
        direct.send(&queue, &[0; MAX_HEAD_BYTES + 1], SendBody::None, NOW),
        Err(QueueError::Head { bytes: 257, .. })
    ));
    direct.send(&queue, &[0; MAX_HEAD_BYTES], SendBody::None, NOW).unwrap();
    // The lease is full before the queue is.
    match direct.send(&queue, b"", SendBody::Bytes(&vec![1; 5 << 20]), NOW) {
        Err(QueueError::NoRoom { queue, server, free }) => {
            assert_eq!((queue.as_str(), &server), ("one", &name));
            assert!(free.0 < 4 * MIB);
        }
        other => panic!("{other:?}"),
    }
    // Another tenant sees nothing of it.
    let mut other_tenant = Direct::connect(&super::config(&[&server], 4 * MIB)).unwrap();
    assert!(matches!(other_tenant.open_queue("one"), Err(QueueError::NoSuchQueue { .. })));
    assert!(other_tenant.queues().unwrap().is_empty());
    // A request that waits for a removed queue is told.
    std::thread::scope(|scope| {
        let mut waiter = another(&mut direct, &config);
        let its = waiter.open_queue("one").unwrap();
        let message = must_take(&mut waiter, &its);
        let waiting = scope.spawn(move || {
            let result = waiter.take(&its, WATCHDOG);
            assert!(matches!(result, Err(QueueError::NoSuchQueue { .. })), "{result:?}");
            drop(message);
            waiter.close();
        });
        wait_until("the receiver waits", || status(&[&server], "one").waiting_receivers != 0);
        direct.free_queue(&queue).unwrap();
        waiting.join().unwrap();
    });
    assert!(matches!(direct.send(&queue, b"", SendBody::None, NOW), Err(QueueError::NoSuchQueue { .. })));
    other_tenant.close();
    direct.close();
    all_gone(&[&server]);
}

#[test]
fn a_lost_server_is_named_with_its_queue_and_nothing_hangs() {
    let server = serve(64 * MIB);
    let name = server.addr().to_string();
    let config = config(&[&server], 32 * MIB);
    let mut direct = Direct::connect(&config).unwrap();
    let queue = direct.open_or_create_queue("jobs", BOUNDS).unwrap();
    let mut waiter = another(&mut direct, &config);
    let its = waiter.open_queue("jobs").unwrap();
    direct.send(&queue, b"x", SendBody::Bytes(&[1; 10]), NOW).unwrap();
    let mut message = must_take(&mut direct, &queue);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || waiter.take(&its, WATCHDOG).unwrap_err());
        wait_until("the receiver waits", || server.status().leases[0].queues[0].waiting_receivers != 0);
        server.stop();
        let errors = [
            waiting.join().unwrap().to_string(),
            direct.take(&queue, WATCHDOG).unwrap_err().to_string(),
            direct.send(&queue, b"", SendBody::None, WATCHDOG).unwrap_err().to_string(),
            direct.body(&mut message, WATCHDOG).unwrap_err().to_string(),
            direct.open_queue("jobs").unwrap_err().to_string(),
        ];
        for (error, operation) in errors.iter().zip([
            "out of a queue",
            "out of a queue",
            "to a queue",
            "the get",
            "opening a queue",
        ]) {
            assert!(
                error.contains("queue jobs") && error.contains(&name) && error.contains(operation),
                "{error}"
            );
        }
    });
}

/// Senders and receivers whose connections break at any byte, again and again: every message whose send ended
/// well is received, none is in the queue twice, and bodies are what they were.
#[test]
fn cut_links_lose_no_message_and_append_none_twice() {
    for cut in [Cut::Clean, Cut::Late] {
        let server = serve(96 * MIB);
        let relay = Relay::start(address_of(&server), cut, 300_000);
        let mut owner = Direct::connect(&super::config(&[&server], 64 * MIB)).unwrap();
        let queue = owner.open_or_create_queue("jobs", QueueBounds { messages: 20, bytes: MIB }).unwrap();
        let ticket = owner.pool().lease_ticket();
        let join = |name: &str| {
            // Through the relay, which the lease's ticket knows nothing of.
            let ticket = ticket.to_string().replace(&server.addr().to_string(), &relay.address.to_string());
            Direct::connect(&PoolConfig::attach(ticket.parse().unwrap(), name)).unwrap()
        };
        const EACH: u64 = 120;
        let body_of = |id: u64| {
            if id.is_multiple_of(2) {
                bytes(id, usize::try_from(id * 997 % 60_000).unwrap())
            } else {
                Vec::new()
            }
        };
        let got = std::thread::scope(|scope| {
            for sender in 0..2 {
                let (join, body_of) = (&join, &body_of);
                scope.spawn(move || {
                    let mut direct = join("sender");
                    let queue = direct.open_queue("jobs").unwrap();
                    for n in 0..EACH {
                        let id = sender * EACH + n;
                        direct
                            .send(&queue, &id.to_le_bytes(), SendBody::Bytes(&body_of(id)), WATCHDOG)
                            .unwrap();
                    }
                    direct.close();
                });
            }
            let receivers: Vec<_> = (0..2)
                .map(|_| {
                    let (join, body_of) = (&join, &body_of);
                    scope.spawn(move || {
                        let mut direct = join("receiver");
                        let queue = direct.open_queue("jobs").unwrap();
                        let mut got: Vec<(u64, u64)> = Vec::new();
                        loop {
                            let messages = direct.take_many(&queue, 3, WATCHDOG).unwrap();
                            let mut end = false;
                            for mut message in messages {
                                if message.head() == b"end" {
                                    if std::mem::replace(&mut end, true) {
                                        // The other receiver's.
                                        direct.give_back(message).unwrap();
                                        continue;
                                    }
                                } else {
                                    let id = u64::from_le_bytes(message.head().try_into().unwrap());
                                    assert!(
                                        direct.body(&mut message, WATCHDOG).unwrap() == body_of(id),
                                        "the body of {id}"
                                    );
                                    assert!(!message.redelivered(), "no member left");
                                    got.push((id, message.number()));
                                }
                                direct.done(message);
                            }
                            if end {
                                direct.flush_done(&queue).unwrap();
                                direct.close();
                                return got;
                            }
                        }
                    })
                })
                .collect();
            let mut told = 0;
            loop {
                let now = status(&[&server], "jobs");
                if now.pushed == 2 * EACH && now.messages <= 6 {
                    break;
                }
                if now.done >= told + 20 {
                    // One receiver's reply does not arrive.
                    told = now.done;
                    relay.lose_answer();
                }
                std::thread::yield_now();
            }
            relay.calm();
            for _ in &receivers {
                owner.send(&queue, b"end", SendBody::None, WATCHDOG).unwrap();
            }
            receivers.into_iter().flat_map(|receiver| receiver.join().unwrap()).collect::<Vec<_>>()
        });
        let ids: BTreeMap<u64, u64> = got.iter().copied().collect();
        assert_eq!((got.len() as u64, ids.len() as u64), (2 * EACH, 2 * EACH), "every message once");
        let now = status(&[&server], "jobs");
        assert_eq!((now.pushed, now.done, now.messages, now.bytes), (2 * EACH + 2, 2 * EACH + 2, 0, 0));
        assert!(relay.cuts() >= 10, "{} cuts", relay.cuts());
        // What it holds back arrives now.
        drop(relay);
        owner.close();
        all_gone(&[&server]);
    }
}

/// More heads than one request takes, through a queue that holds fewer than that, from several senders: all
/// arrive, in each sender's order, and no group is torn.
#[test]
fn many_heads_travel_in_groups_that_are_not_torn() {
    let server = Server::start(ServerConfig { shards: 2, ..server_config(64 * MIB) }).unwrap();
    let config = config(&[&server], 32 * MIB);
    let mut receiver = Direct::connect(&config).unwrap();
    let from = receiver.open_or_create_queue("many", QueueBounds { messages: 100, bytes: 12_000 }).unwrap();
    let head = |sender: u64, n: u64| {
        [&sender.to_le_bytes()[..], &n.to_le_bytes(), &bytes(n, usize::try_from(n * 7 % 240).unwrap())]
            .concat()
    };
    const EACH: u64 = 700;
    std::thread::scope(|scope| {
        for sender in 0..2 {
            let mut direct = another(&mut receiver, &config);
            scope.spawn(move || {
                let queue = direct.open_queue("many").unwrap();
                let heads: Vec<Vec<u8>> = (0..EACH).map(|n| head(sender, n)).collect();
                let heads: Vec<&[u8]> = heads.iter().map(Vec::as_slice).collect();
                assert_eq!(direct.send_many(&queue, &heads, WATCHDOG).unwrap(), heads.len());
                // Many in flight, and waited for in another order.
                let started: Vec<_> = (0..20)
                    .map(|n| direct.start_send_many(&queue, &heads[n..=n + 1], WATCHDOG).unwrap())
                    .collect();
                for (pending, count) in started.into_iter().rev() {
                    assert_eq!(count, 2);
                    direct.wait_send(pending).unwrap();
                }
                direct.close();
            });
        }
        let (mut next, mut pairs, mut last) = ([0; 2], 0, None);
        while next != [EACH; 2] || pairs < 80 {
            for message in receiver.take_many(&from, 64, WATCHDOG).unwrap() {
                let (sender, n) = message.head().split_at(8);
                let sender = u64::from_le_bytes(sender.try_into().unwrap());
                let n = u64::from_le_bytes(n[..8].try_into().unwrap());
                assert!(message.head() == head(sender, n));
                let expected = &mut next[usize::try_from(sender).unwrap()];
                if *expected < EACH {
                    assert_eq!(n, *expected, "in the order of its sends");
                    *expected += 1;
                } else {
                    // The pairs: the second one of each right behind the first.
                    last = match last {
                        None => Some((sender, n)),
                        Some(first) => {
                            assert_eq!((sender, n), (first.0, first.1 + 1), "a pair is torn");
                            None
                        }
                    };
                    pairs += 1;
                }
                receiver.done(message);
            }
        }
    });
    receiver.flush_done(&from).unwrap();
    // What there is no room for is left out, from some group on.
    let full: Vec<&[u8]> = vec![b"head"; 250];
    assert_eq!(receiver.send_many(&from, &full, NOW).unwrap(), 100);
    assert!(matches!(receiver.send_many(&from, &full, NOW), Err(QueueError::Full { messages: 100, .. })));
    assert!(matches!(
        receiver.send_many(&from, &[b"", &[0; MAX_HEAD_BYTES + 1]], NOW),
        Err(QueueError::Head { bytes, .. }) if bytes == MAX_HEAD_BYTES + 1
    ));
    assert_eq!(receiver.send_many(&from, &[], NOW).unwrap(), 0);
    receiver.close();
    all_gone(&[&server]);
}

/// An answer that is lost with its connection: the message was appended, or handed over, already.
#[test]
fn a_lost_answer_is_given_again() {
    let server = serve(32 * MIB);
    let relay = Relay::start(address_of(&server), Cut::Clean, 0);
    let mut direct = Direct::connect(&through(&relay, 8 * MIB)).unwrap();
    let queue = direct.open_or_create_queue("jobs", BOUNDS).unwrap();
    for n in 0..30u8 {
        relay.lose_answer();
        direct.send(&queue, &[n], SendBody::None, NOW).unwrap();
        relay.lose_answer();
        let message = direct.take(&queue, NOW).unwrap().expect("what was sent is there");
        assert_eq!(
            (message.head(), message.number(), message.redelivered()),
            (&[n][..], u64::from(n) + 1, false)
        );
        direct.done(message);
    }
    assert!(relay.cuts() >= 60);
    for n in 0..10u8 {
        relay.lose_answer();
        assert_eq!(direct.send_many(&queue, &[b"group", &[n], b""], NOW).unwrap(), 3);
        let got = direct.take_many(&queue, 9, NOW).unwrap();
        assert_eq!(got.iter().map(Message::head).collect::<Vec<_>>(), [&b"group"[..], &[n], b""], "once");
        got.into_iter().for_each(|message| direct.done(message));
    }
    assert!(relay.cuts() >= 70);
    direct.flush_done(&queue).unwrap();
    let now = status(&[&server], "jobs");
    assert_eq!((now.messages, now.pushed), (0, 60));
    direct.close();
    all_gone(&[&server]);
}

#[test]
fn receivers_poll_or_are_called_back() {
    let servers = [serve(64 * MIB), serve(64 * MIB)];
    let list = [&servers[0], &servers[1]];
    let config = config(&list, 32 * MIB);
    let mut direct = Direct::connect(&config).unwrap();
    let queue = direct.open_or_create_queue("requests", BOUNDS).unwrap();
    let answers = direct.open_or_create_queue("answers", BOUNDS).unwrap();
    assert!(direct.poll_message(&queue).unwrap().is_none());
    direct.send(&queue, b"polled", SendBody::None, NOW).unwrap();
    let deadline = Instant::now() + WATCHDOG;
    let message = loop {
        if let Some(message) = direct.poll_message(&queue).unwrap() {
            break message;
        }
        assert!(Instant::now() < deadline);
    };
    assert_eq!(message.head(), b"polled");
    direct.done(message);
    direct.flush_done(&queue).unwrap();
    let attach = PoolConfig::attach(direct.pool().lease_ticket(), "service");
    let mut answer_to = None;
    let mut refused = false;
    let service = QueueListener::start(&attach, "requests", BOUNDS, move |direct, message| {
        if !refused {
            // It comes again.
            refused = true;
            return Verdict::GiveBack;
        }
        let answers = answer_to.get_or_insert_with(|| direct.open_queue("answers").unwrap()).clone();
        let mut body = direct.body(message, WATCHDOG).unwrap();
        body.reverse();
        direct.send(&answers, message.head(), SendBody::Bytes(&body), WATCHDOG).unwrap();
        Verdict::Done
    })
    .unwrap();
    let pending: Vec<_> = (0..20u8)
        .map(|n| direct.start_send(&queue, &[n], bytes(n.into(), 20_000 * usize::from(n)), WATCHDOG).unwrap())
        .collect();
    for send in pending {
        direct.wait_send(send).unwrap();
    }
    for n in 0..20u8 {
        let mut answer = must_take(&mut direct, &answers);
        assert_eq!(answer.head(), [n]);
        let mut expected = bytes(n.into(), 20_000 * usize::from(n));
        expected.reverse();
        assert!(direct.body(&mut answer, WATCHDOG).unwrap() == expected);
        direct.done(answer);
    }
    assert!(!service.has_ended());
    service.close().unwrap();
    assert_eq!(status(&list, "requests").messages, 0);
    // A thread whose queue is given up ends, and says why.
    let attach = PoolConfig::attach(direct.pool().lease_ticket(), "service");
    let service = QueueListener::start(&attach, "requests", BOUNDS, |_, _| Verdict::Done).unwrap();
    direct.free_queue(&queue).unwrap();
    wait_until("the service ends", || service.has_ended());
    assert!(matches!(service.close(), Err(QueueError::NoSuchQueue { .. })));
    direct.close();
    all_gone(&list);
}

/// It leaves as it ends: no grace time, which is longer than this test, has to pass.
#[test]
fn a_callback_that_panics_leaves_its_message_to_the_next_receiver() {
    let server = Server::start(ServerConfig { grace: 10 * WATCHDOG, ..server_config(64 * MIB) }).unwrap();
    let mut direct = Direct::connect(&config(&[&server], 32 * MIB)).unwrap();
    let queue = direct.open_or_create_queue("requests", BOUNDS).unwrap();
    let attach = PoolConfig::attach(direct.pool().lease_ticket(), "service");
    let service = QueueListener::start(&attach, "requests", BOUNDS, |_, _| panic!("on purpose")).unwrap();
    direct.send(&queue, b"poison", SendBody::None, NOW).unwrap();
    wait_until("the service ends", || service.has_ended());
    let message = must_take(&mut direct, &queue);
    assert_eq!((message.head(), message.redelivered()), (&b"poison"[..], true));
    direct.done(message);
    let finished = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| service.close()));
    assert_eq!(finished.unwrap_err().downcast_ref(), Some(&"on purpose"));
    direct.close();
    all_gone(&[&server]);
}

/// A receiver that only needs the head does not wait for the body, and the sender does not notice.
#[test]
fn a_receiver_may_be_done_with_a_message_before_its_body_is_there() {
    let server = serve(96 * MIB);
    let config = config(&[&server], 64 * MIB);
    let mut one = Direct::connect(&config).unwrap();
    let mut two = another(&mut one, &config);
    let sender = one.open_or_create_queue("jobs", BOUNDS).unwrap();
    let receiver = two.open_queue("jobs").unwrap();
    // Its body follows when the sender waits for it.
    let pending = one.start_send(&sender, b"nothing to do", bytes(1, 3 << 20), NOW).unwrap();
    let message = must_take(&mut two, &receiver);
    assert_eq!(message.body_bytes(), 3 << 20);
    two.done(message);
    two.flush_done(&receiver).unwrap();
    one.wait_send(pending).unwrap();
    let now = status(&[&server], "jobs");
    assert_eq!((now.messages, now.bytes, now.pushed, now.done, now.withdrawn), (0, 0, 1, 1, 0));
    // The next one is whole.
    let pending = one.start_send(&sender, b"scale", bytes(2, 3 << 20), NOW).unwrap();
    let mut message = must_take(&mut two, &receiver);
    one.wait_send(pending).unwrap();
    assert!(two.body(&mut message, WATCHDOG).unwrap() == bytes(2, 3 << 20));
    two.done(message);
    one.close();
    two.close();
    all_gone(&[&server]);
}
