//! A network between clients and one server that cuts connections, as a middlebox does, and lets new ones
//! through.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Both sides learn of it at once, and what was under way is gone.
    Clean,
    /// The client learns of it. What it said last reaches the server later, when the client has been at work
    /// over another connection for a while.
    Late,
}

pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    target: SocketAddr,
    cut: Cut,
    /// Bytes that a client may send until its connection is cut, give or take a half. Zero: no cuts any more.
    every: AtomicU64,
    cuts: AtomicU32,
    /// Bytes that have reached the server, over all connections.
    passed: AtomicU64,
    /// Bytes said before a cut that have reached the server after it.
    late: AtomicU64,
    /// The next answer does not arrive: the connection is cut instead.
    lose_answer: AtomicBool,
    stop: AtomicBool,
    refuse: AtomicBool,
    mute: AtomicBool,
    /// Connections that were not answered.
    muted: Mutex<Vec<TcpStream>>,
}

impl Relay {
    pub fn start(target: SocketAddr, cut: Cut, every: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let shared = Arc::new(Shared {
            target,
            cut,
            every: AtomicU64::new(every),
            cuts: AtomicU32::new(0),
            passed: AtomicU64::new(0),
            late: AtomicU64::new(0),
            lose_answer: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            refuse: AtomicBool::new(false),
            mute: AtomicBool::new(false),
            muted: Mutex::default(),
        });
        let relay = Self { address: listener.local_addr().unwrap(), shared: Arc::clone(&shared) };
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if shared.stop.load(Ordering::SeqCst) {
                    return;
                }
                if shared.refuse.load(Ordering::SeqCst) {
                    reset(&client);
                    continue;
                }
                if shared.mute.load(Ordering::SeqCst) {
                    shared.muted.lock().unwrap().push(client);
                    continue;
                }
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(&client, &shared));
            }
        });
        relay
    }

    pub fn cuts(&self) -> u32 {
        self.shared.cuts.load(Ordering::SeqCst)
    }

    pub fn late_bytes(&self) -> u64 {
        self.shared.late.load(Ordering::SeqCst)
    }

    /// Cuts the connection at the next answer, which does not arrive.
    pub fn lose_answer(&self) {
        self.shared.lose_answer.store(true, Ordering::SeqCst);
    }

    /// From now on new connections are reset as they come; those that exist go on until their next cut.
    pub fn refuse(&self) {
        self.shared.refuse.store(true, Ordering::SeqCst);
    }

    /// From now on new connections are taken and never answered, as by a server that hangs.
    pub fn mute(&self) {
        self.shared.mute.store(true, Ordering::SeqCst);
    }

    /// How many connections were taken and not answered.
    pub fn muted(&self) -> usize {
        self.shared.muted.lock().unwrap().len()
    }

    pub fn calm(&self) {
        self.shared.every.store(0, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(client: &TcpStream, shared: &Shared) {
    let Ok(server) = TcpStream::connect(shared.target) else { return reset(client) };
    for socket in [client, &server] {
        socket.set_nodelay(true).unwrap();
    }
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| {
            let (mut from, mut to) = (&server, client);
            let mut buffer = vec![0; 16 << 10];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                if shared.lose_answer.swap(false, Ordering::SeqCst) {
                    shared.cuts.fetch_add(1, Ordering::SeqCst);
                    reset(client);
                    continue;
                }
                if to.write_all(&buffer[..n]).is_err() {
                    // Answers to late requests have no receiver.
                    continue;
                }
            }
            let _ = client.shutdown(Shutdown::Both);
        });
        pass_requests(client, &server, shared);
        let _ = server.shutdown(Shutdown::Both);
        answers.join().unwrap();
    });
}

fn pass_requests(client: &TcpStream, server: &TcpStream, shared: &Shared) {
    let (mut from, mut to) = (client, server);
    let mut buffer = vec![0; 16 << 10];
    let mut passed = 0;
    // Never the same moment of the conversation twice.
    let part = u64::from(shared.cuts.load(Ordering::SeqCst)).wrapping_mul(7919) % 1000;
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let every = shared.every.load(Ordering::SeqCst);
        if every > 0 && passed + n as u64 > every / 2 + every / 1000 * part {
            shared.cuts.fetch_add(1, Ordering::SeqCst);
            if shared.cut == Cut::Clean {
                let half = n / 2;
                let _ = to.write_all(&buffer[..half]);
                return reset(client);
            }
            let mut held = buffer[..n].to_vec();
            // What the client says next, as far as it says anything without an answer.
            client.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                held.extend_from_slice(&buffer[..n]);
            }
            reset(client);
            let (deadline, before) =
                (Instant::now() + Duration::from_secs(5), shared.passed.load(Ordering::SeqCst));
            while shared.passed.load(Ordering::SeqCst) < before + (512 << 10)
                && Instant::now() < deadline
                && !shared.stop.load(Ordering::SeqCst)
            {
                std::thread::sleep(Duration::from_micros(200));
            }
            if to.write_all(&held).is_ok() {
                shared.late.fetch_add(held.len() as u64, Ordering::SeqCst);
                // Time for the server to read it: it closes the connection when it has seen that it was
                // replaced.
                let mut rest = Vec::new();
                server.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                let _ = (&mut { server }).take(64 << 20).read_to_end(&mut rest);
            }
            return;
        }
        if to.write_all(&buffer[..n]).is_err() {
            return;
        }
        passed += n as u64;
        shared.passed.fetch_add(n as u64, Ordering::SeqCst);
    }
}

/// Ends a connection as a middlebox does: with a reset.
fn reset(client: &TcpStream) {
    let linger = socket2::SockRef::from(client);
    linger.set_linger(Some(Duration::ZERO)).unwrap();
    let _ = client.shutdown(Shutdown::Both);
}
