//! Prints how the page cache's policy does on each workload: `cargo run --release -p rampool-sim --example
//! policy [BUDGET_PAGES [PART_OF_A_NAME]]`, or on recorded programs: `... policy --recorded FILE...`, as
//! `bench/traces.py` calls it.

use rampool_sim::paging::policy::{
    Workload, config, fifo_misses, lru_misses, measure, optimum_misses, recorded, workloads,
};

fn main() {
    println!("                              hits without prefetch               |            with prefetch");
    println!(
        "workload                      FIFO    LRU  rampool  optimum   soft |   hits   waits   soft  wasted  stored"
    );
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, files @ ..] = &arguments[..]
        && mode == "--recorded"
    {
        for file in files {
            let bytes = std::fs::read(file).expect("a file that can be read");
            let stem = file.rsplit('/').next().unwrap_or(file).trim_end_matches(".trace");
            for percent in [50, 25] {
                print(&recorded(format!("{stem}, {percent} %").leak(), &bytes, percent));
            }
        }
        return;
    }
    let budget = arguments.first().map_or(2048, |a| a.parse().expect("a number of pages"));
    let only = arguments.get(1).cloned().unwrap_or_default();
    for workload in workloads(budget).into_iter().filter(|w| w.name.contains(&only)) {
        print(&workload);
    }
}

fn print(workload: &Workload) {
    let trace = workload.trace();
    let share = |misses: u64| 100.0 * (1.0 - ratio(misses, trace.len() as u64));
    let plain = measure(workload, config(workload.budget, false), 8);
    let ahead = measure(workload, config(workload.budget, true), 8);
    println!(
        "{:28} {:5.1}  {:5.1}    {:5.1}    {:5.1}  {:5.1} |  {:5.1}   {:5.1}  {:5.1}  {:6}  {:6}",
        workload.name,
        share(fifo_misses(&trace, workload.budget)),
        share(lru_misses(&trace, workload.budget)),
        100.0 * plain.hit_share(),
        share(optimum_misses(&trace, workload.budget)),
        100.0 * plain.soft_share(),
        100.0 * ahead.hit_share(),
        100.0 * ahead.wait_share(),
        100.0 * ahead.soft_share(),
        ahead.stats.wasted_markers,
        ahead.stats.stored_pages,
    );
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
