//! What it costs to take memory from the pool and to give it back (left open by DLM-M), compared with the
//! kernel's own memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rampool_kernel::OS_PAGE_BYTES;
use rampool_kernel::memory::Mapping;
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::region::PagedMemory;
use serde_json::json;

use super::Common;
use super::report::Report;
use super::service::{Paged, Place, Service};

/// Taking memory from the pool and giving it back, compared with mmap and munmap
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

const LOCAL_BYTES: u64 = 16 << 20;

pub fn run(args: &Args) -> Result<i32> {
    let common = &args.common;
    let place = Place::loopback();
    let mut report = Report::start("allocation", common.quick);
    report.note(format!(
        "loopback TCP, 4 KiB pages, {} MiB local; touched: a byte of every page is written before it is \
         given back; {}",
        LOCAL_BYTES >> 20,
        place.describe()
    ));
    let largest: usize = common.pick(256 << 20, 64 << 20);
    let server = Service::memory_server(&place, 2 * largest as u64, Duration::ZERO)?;
    let memory = Paged {
        server: &server.address,
        key: None,
        memory_bytes: largest as u64 + (32 << 20),
        local_bytes: LOCAL_BYTES,
        page_bytes: 4096,
        prefetch_bytes: 0,
        spin: Duration::ZERO,
        fault_mode: FaultModeChoice::Auto,
    }
    .open()?;
    for bytes in [4096, 1 << 20, 16 << 20, largest] {
        for touched in [false, true] {
            one_size(&mut report, &memory, bytes, touched, common)?;
        }
    }
    report.finish(common.json.as_deref())
}

/// Memory of one size, taken and given back again and again, here and from the kernel in turns.
fn one_size(
    report: &mut Report,
    memory: &PagedMemory,
    bytes: usize,
    touched: bool,
    common: &Common,
) -> Result<()> {
    let rounds = common.rounds(15, 3);
    // Many of what is short, so that the clock is read seldom.
    let times = if touched { 1 } else { (common.pick(64 << 20, 8 << 20) / bytes).clamp(1, 256) };
    let mut found: [Vec<f64>; 4] = Default::default();
    for round in 0..=rounds {
        let mut spent = [0.0; 4];
        for _ in 0..times {
            let at = Instant::now();
            let region = memory.alloc(bytes).with_context(|| format!("{bytes} bytes of the pool"))?;
            spent[0] += at.elapsed().as_secs_f64();
            touch(region.as_ptr(), if touched { bytes } else { 0 });
            let at = Instant::now();
            drop(region);
            spent[1] += at.elapsed().as_secs_f64();
            let at = Instant::now();
            let mapping = Mapping::anonymous(bytes)?;
            spent[2] += at.elapsed().as_secs_f64();
            touch(mapping.at(0), if touched { bytes } else { 0 });
            let at = Instant::now();
            drop(mapping);
            spent[3] += at.elapsed().as_secs_f64();
        }
        if round > 0 {
            found.iter_mut().zip(spent).for_each(|(found, spent)| found.push(spent * 1e6 / times as f64));
        }
    }
    let how = if touched { "touched" } else { "untouched" };
    let names = [("pool", "alloc"), ("pool", "free"), ("kernel", "mmap"), ("kernel", "munmap")];
    for ((whose, what), samples) in names.iter().zip(&found) {
        let parameters = json!({
            "experiment": "allocation", "bytes": bytes, "touched": touched, "whose": whose, "what": what,
        });
        report.series(&format!("{} KiB, {how}: {what}", bytes >> 10), "us", parameters, samples);
    }
    Ok(())
}

/// Writes a byte of each page.
fn touch(start: *mut u8, bytes: usize) {
    for at in (0..bytes).step_by(OS_PAGE_BYTES) {
        // SAFETY: within memory that the caller has just taken, and that nothing else uses.
        unsafe { start.add(at).write_volatile(1) };
    }
}
