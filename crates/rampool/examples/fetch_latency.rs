//! The price of a pool: the median time of a 4 KiB fetch through [`rampool::pool::Pool`] from a memory server
//! on loopback, compared with a raw request and reply of the same sizes over the same kind of socket, both
//! sides spinning in both cases; rounds take turns.
//!
//!     cargo run --release -p rampool --example fetch_latency [ROUNDS [SAMPLES]]
//!
//! Two processors that have nothing else to do are needed for numbers that mean anything.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rampool::pool::{Pool, PoolConfig, PoolEvent, ServerSpec};
use rampool::proto::units::{ByteLen, Extent, PageIndex};
use rampool::server::{Server, ServerConfig};

const PAGES: u64 = 4096;

fn main() {
    let number = |n: usize, default: u32| {
        std::env::args().nth(n).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (rounds, samples) = (number(1, 5), number(2, 20_000));
    let mut config = ServerConfig::new(64 << 20, "127.0.0.1:0".parse().expect("an address"));
    config.shards = 1;
    // Long enough never to sleep in its own turn, short enough to leave the processor to the raw server in
    // that one's.
    config.spin = Duration::from_millis(2);
    config.lock_memory = false;
    let server = Server::start(config).expect("a server on loopback");
    let spec = ServerSpec { endpoint: server.addr().clone(), memory: None };
    let mut pool =
        Pool::connect(&PoolConfig::new(vec![spec], ByteLen(32 << 20), "fetch_latency")).expect("a pool");
    let region = pool.create_region().expect("a region");
    let content: Vec<u8> = (0..PAGES * 4096).map(|n| (n % 251 + 1).to_le_bytes()[0]).collect();
    let all = Extent::new(PageIndex(0), u32::try_from(PAGES).expect("few pages"));
    // SAFETY: `content` lives until the event.
    unsafe { pool.store(region, 0, &[(all, content.as_ptr())]) };
    wait(&mut pool);

    let stop = Arc::new(AtomicBool::new(false));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut raw = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
    let (echo, _) = listener.accept().expect("a connection");
    for socket in [&raw, &echo] {
        socket.set_nodelay(true).expect("a TCP socket");
        socket.set_nonblocking(true).expect("a socket");
    }

    let never = AtomicBool::new(false);
    let mut page = vec![0u8; 4096];
    for round in 0..rounds {
        let pooled = median(samples, |n| {
            let at = u64::from(n) * 7919 % PAGES;
            // SAFETY: `page` lives until the event.
            unsafe { pool.fetch(region, 1, &[Extent::page(PageIndex(at))], page.as_mut_ptr(), true) };
            wait(&mut pool);
            assert_eq!(page[0], content[usize::try_from(at * 4096).expect("small")]);
        });
        // The raw server lives only in its own turn.
        stop.store(false, Ordering::Relaxed);
        let echo_thread = {
            let (mut echo, stop) = (echo.try_clone().expect("a socket"), stop.clone());
            std::thread::spawn(move || answer(&mut echo, &stop))
        };
        let plain = median(samples, |_| {
            raw.write_all(&[1; 64]).expect("room for 64 bytes");
            read_exactly(&mut raw, &mut page, &never);
        });
        stop.store(true, Ordering::Relaxed);
        echo_thread.join().expect("the raw server");
        println!(
            "round {round}: pool {:.2} us, raw {:.2} us, ratio {:.3}",
            pooled.as_nanos() as f64 / 1000.0,
            plain.as_nanos() as f64 / 1000.0,
            pooled.as_secs_f64() / plain.as_secs_f64()
        );
    }
}

fn wait(pool: &mut Pool) {
    loop {
        match pool.poll() {
            None => std::hint::spin_loop(),
            Some(PoolEvent::Fetched { .. } | PoolEvent::Stored { .. }) => return,
            Some(other) => panic!("{other:?}"),
        }
    }
}

fn median(samples: u32, mut once: impl FnMut(u32)) -> Duration {
    let mut times: Vec<Duration> = (0..samples)
        .map(|n| {
            let start = Instant::now();
            once(n);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

fn answer(socket: &mut TcpStream, stop: &AtomicBool) {
    let page = [7u8; 4096];
    let mut request = [0u8; 64];
    while read_exactly(socket, &mut request, stop) {
        socket.write_all(&page).expect("room for a page");
    }
}

fn read_exactly(socket: &mut TcpStream, buffer: &mut [u8], stop: &AtomicBool) -> bool {
    let mut have = 0;
    while have < buffer.len() {
        match socket.read(&mut buffer[have..]) {
            Ok(0) => return false,
            Ok(n) => have += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                if stop.load(Ordering::Relaxed) {
                    return false;
                }
                std::hint::spin_loop();
            }
            Err(e) => panic!("{e}"),
        }
    }
    true
}
