//! What a fault costs in the cache itself: from `Fault` through `Fetch`, `Fetched` and the install, with the evictions that make room.
//! `cargo run --release -p rampool-sim --example fault_cost`

use rampool_paging::cache::{Access, Cache, EvictOutcome, FetchId, Input, Output};
use rampool_sim::paging::policy::config;
use rampool_sim::rng::Rng;
use rampool_wire::units::{Extent, PageIndex, total_pages};

const BUDGET_PAGES: u64 = 128 << 10;
const PAGES: u32 = 512 << 10;
const FAULTS: u32 = 1 << 20;

fn main() {
    for (name, sequential) in [("random", false), ("sequential", true)] {
        let mut cache = Cache::new(config(BUDGET_PAGES, true));
        let all = Extent::new(PageIndex(0), PAGES);
        cache.handle(Input::Adopt { extent: all, resident: &[], remote: &[all], given_up: &[] });
        let mut fetches: Vec<FetchId> = Vec::new();
        let mut rng = Rng::new(1);
        let mut mapped = vec![false; PAGES as usize];
        let mut page = 0u64;
        let mut faults = 0u32;
        let started = cpu_ns();
        while faults < FAULTS {
            page = if sequential { (page + 1) % u64::from(PAGES) } else { rng.below(u64::from(PAGES)) };
            faults += u32::from(sequential);
            if mapped[usize::try_from(page).expect("few pages")] {
                continue;
            }
            faults += u32::from(!sequential);
            cache.handle(Input::Fault { page: PageIndex(page), access: Access::Read });
            drain(&mut cache, &mut fetches, &mut mapped);
            while let Some(fetch) = fetches.pop() {
                cache.handle(Input::Fetched { fetch });
                drain(&mut cache, &mut fetches, &mut mapped);
            }
        }
        let took = cpu_ns() - started;
        let stats = cache.stats();
        println!(
            "{name}: {} ns of CPU a page; {} faults, {} fetches, {} pages fetched, {} evicted in {} batches",
            took / u64::from(FAULTS),
            stats.faults,
            stats.fetches,
            stats.fetched_pages,
            stats.evicted_pages,
            stats.batches
        );
    }
}

/// Time this process spent on a CPU: other processes do not count.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").expect("Linux with schedstat");
    text.split(' ').next().and_then(|n| n.parse().ok()).expect("a number first")
}

fn drain(cache: &mut Cache, fetches: &mut Vec<FetchId>, mapped: &mut [bool]) {
    let mut evicted = Vec::new();
    loop {
        while let Some(output) = cache.poll() {
            match output {
                Output::InstallZero { extent }
                | Output::InstallFetched { extent, .. }
                | Output::InstallStaged { extent, .. } => set(mapped, extent, true),
                Output::Evict { batch, extents } => {
                    extents.iter().for_each(|e| set(mapped, *e, false));
                    evicted.push((batch, total_pages(&extents)));
                }
                Output::Fetch { fetch, .. } => fetches.push(fetch),
                Output::Store { batch, .. } => evicted.push((batch, 0)),
                _ => {}
            }
        }
        match evicted.pop() {
            Some((batch, 0)) => cache.handle(Input::Stored { batch }),
            Some((batch, pages)) => {
                let outcomes = vec![EvictOutcome::Moved; usize::try_from(pages).expect("few pages")];
                cache.handle(Input::Evicted { batch, outcomes: &outcomes });
            }
            None => return,
        }
    }
}

fn set(mapped: &mut [bool], extent: Extent, to: bool) {
    for page in extent.pages() {
        mapped[usize::try_from(page.0).expect("few pages")] = to;
    }
}
