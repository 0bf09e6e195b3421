//! Messages that stay with the sender until the receiver says where they go, from registered memory to
//! registered memory, over the transports that UCX has everywhere.

use rampool_ucx::{Channel, Context, Memory, SEGMENT_BYTES, TransferId, UcxError};
use std::time::{Duration, Instant};

/// Over sockets, by reading the sender's process, and over memory that both have mapped.
const TRANSPORTS: [&str; 3] = ["tcp", "posix,cma", "sysv"];
const LENGTHS: [usize; 5] = [1, 100, SEGMENT_BYTES + 1, 65_536, 1_000_003];
const DEADLINE: Duration = Duration::from_secs(30);

fn pair(transports: &str) -> (Context, Channel, Channel) {
    let context = Context::open(Some(transports))
        .unwrap_or_else(|error| panic!("the tests need UCX (scripts/setup.sh test installs it): {error}"));
    let [mut near, mut far] = [(), ()].map(|()| Channel::open(&context, 64).unwrap());
    // SAFETY: made by `address`.
    unsafe {
        let mode = near.connect(&far.address().unwrap(), None).unwrap();
        far.connect(&near.address().unwrap(), Some(mode)).unwrap();
    }
    (context, near, far)
}

fn until(near: &mut Channel, far: &mut Channel, mut done: impl FnMut(&mut Channel, &mut Channel) -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done(near, far) {
        assert!(Instant::now() < deadline, "nothing happens");
        near.progress();
        far.progress();
    }
}

fn register(context: &Context, bytes: &[u8]) -> Memory {
    let start = bytes.as_ptr().addr();
    Memory::register(context, start..start + bytes.len()).unwrap()
}

fn send(from: &mut Channel, bytes: &[u8], memory: Option<&Memory>) -> TransferId {
    // SAFETY: every test keeps the bytes, and their registration, until the transfer has ended or the channel
    // is gone, and has both ends.
    unsafe { from.send_from(7, bytes.as_ptr(), bytes.len(), memory) }.unwrap()
}

#[test]
fn bytes_go_from_where_they_lie_to_where_they_are_wanted() {
    for transports in TRANSPORTS {
        let (context, mut near, mut far) = pair(transports);
        // SAFETY: both are of this test.
        unsafe { far.believe() };
        for len in LENGTHS {
            let bytes: Vec<u8> =
                (0..len).map(|at| u8::try_from((at * 7 + at / 251) % 256).expect("a byte")).collect();
            let mut place = vec![0; len];
            for registered in [false, true] {
                place.fill(0);
                let memories = registered.then(|| (register(&context, &bytes), register(&context, &place)));
                let sent = send(&mut near, &bytes, memories.as_ref().map(|(from, _)| from));
                until(&mut near, &mut far, |_, far| far.waiting().is_some());
                assert_eq!((far.waiting(), far.number()), (Some(len), Some(7)));
                assert!(far.take(len, |_, _| ()).is_none(), "its bytes are not here yet");
                // SAFETY: there is room, used for nothing else.
                let landed =
                    unsafe { far.land(place.as_mut_ptr(), memories.as_ref().map(|(_, to)| to)) }.unwrap();
                until(&mut near, &mut far, |near, far| {
                    near.has_ended(sent).unwrap() & far.has_ended(landed).unwrap()
                });
                assert!(place == bytes, "{len} bytes over {transports}, registered: {registered}");
                assert!(far.waiting().is_none() && !far.has_bytes());
            }
        }
    }
}

/// Other messages keep their places in line, and dropping the waiting message leaves no peer waiting.
#[test]
fn what_waits_keeps_its_place_and_ends_with_the_channel() {
    for transports in TRANSPORTS {
        let (_context, mut near, mut far) = pair(transports);
        // SAFETY: both are of this test.
        unsafe { far.believe() };
        let bytes = vec![3; 300_000];
        let short = |to: *mut u8| {
            // SAFETY: there is room for a message.
            unsafe { to.write_bytes(9, 10) };
            10
        };
        assert!(near.send(1, short).unwrap());
        let sent = send(&mut near, &bytes, None);
        assert!(near.send(2, short).unwrap());
        until(&mut near, &mut far, |_, far| far.number() == Some(2));
        assert_eq!((far.waiting(), far.take(100, |_, _| ())), (None, Some((10, true))));
        assert_eq!((far.waiting(), near.has_ended(sent)), (Some(300_000), Ok(false)));
        drop(far);
        drop(near);
        assert!(bytes.iter().all(|byte| *byte == 3));
    }
}

#[test]
fn who_does_not_believe_its_peer_fetches_nothing_for_it() {
    for transports in TRANSPORTS {
        let (_context, mut near, mut far) = pair(transports);
        let bytes = vec![1; 100];
        send(&mut near, &bytes, None);
        until(&mut near, &mut far, |_, far| far.check().is_err());
        assert!(matches!(far.check(), Err(UcxError::Peer(_))) && far.waiting().is_none() && !far.has_bytes());
    }
}
