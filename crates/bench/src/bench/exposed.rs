//! Exposed memory compared with ordinary memory: the same gets and puts through rings on one host, where the
//! server reaches the client's memory by key, and where the bytes are copied through the ring. On two CPUs
//! the two copies of a ring overlap; on one they do not.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rampool_client::direct::{Direct, DirectRegion, Exposed};
use rampool_client::pool::PoolConfig;
use rampool_net::transport::SameHost;
use rampool_wire::layout::Layout;
use rampool_wire::units::ByteLen;
use serde_json::json;

use super::Common;
use super::direct::{MIB, SPIN};
use super::report::Report;
use super::server::WorkDir;
use super::service::{Place, Service, pin_apart};
use super::workload::word;

/// Gets and puts of memory that the server reaches by key, compared with bytes that travel through rings
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

const SEED: u64 = 7;
const SIZES: [(u64, &str); 4] =
    [(16 << 10, "16 KiB"), (64 << 10, "64 KiB"), (256 << 10, "256 KiB"), (MIB, "1 MiB")];
/// What is read into and written from, in turns.
const BUFFERS: u64 = 4;

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let rounds = common.rounds(7, 2);
    let cpus = rampool_kernel::thread::allowed_cpus();
    let other = pin_apart();
    let mut report = Report::start("exposed", common.quick);
    report.note("rings on one host, one operation at a time, each cut into requests of at most 256 KiB; content is random, and every answer is compared");
    if let Some(other) = other {
        report
            .note(format!("two CPUs: the program on CPU {}, the server on CPU {other}; both spin", cpus[0]));
        let place = Place { host: "127.0.0.1", server_cpu: Some(other), namespace: None, key: None };
        compare(&mut report, "two CPUs", &place, SPIN, rounds, common)?;
    }
    report.note(format!("one CPU: both on CPU {}; nothing spins", cpus[0]));
    let place = Place { host: "127.0.0.1", server_cpu: Some(cpus[0]), namespace: None, key: None };
    compare(&mut report, "one CPU", &place, Duration::ZERO, rounds, common)?;
    report.finish(common.json.as_deref())
}

fn compare(
    report: &mut Report,
    title: &str,
    place: &Place<'_>,
    spin: Duration,
    rounds: usize,
    common: &Common,
) -> Result<()> {
    let bytes = common.pick(64 * MIB, 16 * MIB);
    let dir = WorkDir::create()?;
    let server = Service::memory_server_at(
        place,
        &format!("unix:{}", dir.0.join("server").display()),
        4 * bytes,
        spin,
    )?;
    let mut config =
        PoolConfig::new(vec![server.address.parse()?], ByteLen(bytes + MIB), "rampool bench exposed");
    config.same_host = Some(SameHost::Rings);
    let mut direct = Direct::connect(&config)?;
    direct.spin_for(spin);
    let region = direct.create(bytes)?;
    let model: Vec<u8> = (0..bytes / 8).flat_map(|n| word(SEED, n).to_le_bytes()).collect();
    direct.put(region, 0, &model)?;
    let memory = direct.expose(index(BUFFERS * MIB))?;
    if !direct.is_exposed(&memory) {
        bail!("the server took no key");
    }
    let mut ordinary = vec![0; index(BUFFERS * MIB)];
    let volume = common.pick(512 * MIB, 8 * MIB);
    for (size, name) in SIZES {
        let mut figures: [Vec<f64>; 4] = Default::default();
        for round in 0..=rounds {
            let trial = Trial { region, model: &model, size, times: volume / size / 4 };
            let measured = [
                trial.gets(&mut direct, Side::Exposed(&memory))?,
                trial.gets(&mut direct, Side::Ordinary(&mut ordinary))?,
                trial.puts(&mut direct, Side::Exposed(&memory))?,
                trial.puts(&mut direct, Side::Ordinary(&mut ordinary))?,
            ];
            if round > 0 {
                figures.iter_mut().zip(measured).for_each(|(samples, value)| samples.push(value));
            }
        }
        let [get, get_copied, put, put_copied] = figures;
        for (what, by_key, copied) in [("get", get, get_copied), ("put", put, put_copied)] {
            let parameters = |how: &str| json!({ "what": what, "cpus": title, "bytes": size, "how": how });
            report.series(&format!("{title}: {what} of {name}, by key"), "GB/s", parameters("key"), &by_key);
            report.series(
                &format!("{title}: {what} of {name}, copied"),
                "GB/s",
                parameters("copied"),
                &copied,
            );
            report.ratio(&format!("{title}: {what} of {name}, by key / copied"), &by_key, &copied, None);
        }
    }
    let stats = direct.key_stats();
    if stats.stale > 0 || stats.replaced > 0 || stats.requests == 0 {
        bail!("the operations did not use the key as expected: {stats:?}");
    }
    direct.free(region);
    direct.pool().close();
    Ok(())
}

enum Side<'a> {
    Exposed(&'a Exposed),
    Ordinary(&'a mut [u8]),
}

struct Trial<'a> {
    region: DirectRegion,
    model: &'a [u8],
    size: u64,
    times: u64,
}

impl Trial<'_> {
    fn gets(&self, direct: &mut Direct, mut side: Side<'_>) -> Result<f64> {
        let layout = Layout::bytes(self.size)?;
        let mut back = vec![0; index(self.size)];
        self.rate(|offset, at| {
            let started = Instant::now();
            match &mut side {
                Side::Exposed(memory) => direct.get_into(self.region, offset, &layout, memory, at)?,
                Side::Ordinary(memory) => {
                    direct.get(self.region, offset, &mut memory[at..at + index(self.size)])?
                }
            }
            let took = started.elapsed();
            match &side {
                Side::Exposed(memory) => memory.read(at, &mut back),
                Side::Ordinary(memory) => back.copy_from_slice(&memory[at..at + index(self.size)]),
            }
            if back != self.model[index(offset)..index(offset + self.size)] {
                bail!("WRONG CONTENT at byte {offset}");
            }
            Ok(took)
        })
    }

    /// Puts what is there already: the content of the region does not change, and is compared by the gets.
    fn puts(&self, direct: &mut Direct, mut side: Side<'_>) -> Result<f64> {
        let layout = Layout::bytes(self.size)?;
        self.rate(|offset, at| {
            let bytes = &self.model[index(offset)..index(offset + self.size)];
            match &mut side {
                Side::Exposed(memory) => memory.write(at, bytes),
                Side::Ordinary(memory) => memory[at..at + index(self.size)].copy_from_slice(bytes),
            }
            let started = Instant::now();
            match &side {
                Side::Exposed(memory) => direct.put_from(self.region, offset, &layout, memory, at)?,
                Side::Ordinary(memory) => {
                    direct.put(self.region, offset, &memory[at..at + index(self.size)])?
                }
            }
            Ok(started.elapsed())
        })
    }

    /// GB/s while `one` works: from an offset of the region, to or from an offset of the memory.
    fn rate(&self, mut one: impl FnMut(u64, usize) -> Result<Duration>) -> Result<f64> {
        let (places, buffers) = (self.model.len() as u64 / self.size, BUFFERS * MIB / self.size);
        let mut took = Duration::ZERO;
        for n in 0..self.times {
            took += one(n % places * self.size, index(n % buffers * self.size))?;
        }
        Ok((self.times * self.size) as f64 / took.as_secs_f64() / 1e9)
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a 64-bit machine")
}
