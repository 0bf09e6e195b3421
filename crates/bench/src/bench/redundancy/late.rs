//! What a reader notices of a server whose answers come late: as in [`super::stalls`], but one of three
//! servers is reached by a detour, which takes 50 ms from some moment on.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::super::Common;
use super::super::report::{Reach, Report};
use super::super::service::Place;
use super::stalls::{Cluster, us};

const LATE: Duration = Duration::from_millis(50);

pub fn measure(common: &Common, report: &mut Report) -> Result<()> {
    let place = Place { host: "127.0.0.1", server_cpu: None, namespace: None, key: None };
    let length = Duration::from_millis(common.pick(1000, 300));
    let (mut prompt, mut late) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let add = |samples: &mut [Vec<f64>; 2], reads: Vec<Duration>| {
        samples[1].push(reads.iter().sum::<Duration>().as_secs_f64() * 1e6 / reads.len() as f64);
        samples[0].push(us(reads, 99));
    };
    for _ in 0..common.rounds(5, 1) {
        let mut cluster = Cluster::start(&place, common.pick(64 << 20, 8 << 20))?;
        add(&mut prompt, cluster.read_while(length, |_| true, |_| Ok(()))?.all());
        let detour = Detour::to(cluster.address(0))?;
        let mut cluster = cluster.by(0, detour.address.clone())?;
        let is_late = |_: &mut _| {
            detour.takes(LATE);
            Ok(())
        };
        let reads = cluster.read_while(length, |_| true, is_late)?;
        add(&mut late, reads.after());
    }
    for (at, (of, reach)) in [("p99", Some(Reach::AtMost(2.0))), ("mean", None)].into_iter().enumerate() {
        for (what, samples) in [("all prompt", &prompt), ("one of three servers 50 ms late", &late)] {
            report.samples(&format!("a read, {of}, {what}"), "us", &samples[at]);
        }
        let name = format!("a read, {of}: one of three servers 50 ms late / all prompt");
        report.ratio(&name, &late[at], &prompt[at], reach);
    }
    Ok(())
}

/// Forwards to a server, later by as much as is asked for: each byte, and none waits for others.
struct Detour {
    address: String,
    later_us: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl Detour {
    fn to(server: &str) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let (later_us, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (server, later, over) = (server.to_owned(), Arc::clone(&later_us), Arc::clone(&is_over));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if over.load(Relaxed) {
                    return;
                }
                let Ok(server) = TcpStream::connect(&server) else { return };
                forward(&client, &server, &Arc::default());
                forward(&server, &client, &later);
            }
        });
        Ok(Self { address, later_us, is_over })
    }

    fn takes(&self, later: Duration) {
        self.later_us.store(u64::try_from(later.as_micros()).expect("short"), Relaxed);
    }
}

impl Drop for Detour {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        // Wakes who waits for connections.
        let _ = TcpStream::connect(&self.address);
    }
}

/// One direction, until one end closes.
fn forward(from: &TcpStream, to: &TcpStream, later_us: &Arc<AtomicU64>) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
    let later_us = Arc::clone(later_us);
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    let _ = to.set_nodelay(true);
    std::thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            let due = Instant::now() + Duration::from_micros(later_us.load(Relaxed));
            if sender.send((due, bytes[..count].to_vec())).is_err() {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        for (due, bytes) in receiver {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
