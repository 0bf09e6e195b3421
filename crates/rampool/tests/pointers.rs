//! Pages that are fetched because others point to them. Alone in its process: pointers are searched for while
//! no thread waits for a page, and forks of other tests, whose children the pager serves, would leave no time
//! for that.

mod words;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rampool_kernel::probe::{Capabilities, NEEDED};
use rampool_pager::backing::memory::MemoryBacking;
use rampool_pager::fault::FaultModeChoice;
use rampool_pager::pager::Waiting;
use rampool_pager::region::{PagedConfig, PagedMemory};
use rampool_testing::skip;
use words::{mix, word};

/// Records of four words, of which the first points to an object on a page of its own, in no order; they are
/// gone through forwards and backwards.
#[test]
fn an_array_of_pointers_brings_what_it_points_to() {
    const OBJECTS: usize = 12_288;
    const RECORD: usize = 4;
    let found = Capabilities::probe().full;
    if !found.as_ref().is_ok_and(|features| features.has(NEEDED)) {
        return skip(
            "uffd",
            &format!("the kernel does not allow faults of system calls to be caught here: {found:?}"),
        );
    }
    let mut backing = MemoryBacking::default();
    let region = backing.create_region();
    let config = PagedConfig {
        local_bytes: 20 << 20,
        waiting: Waiting { follow_faults: false, ..Waiting::default() },
        fault_mode: FaultModeChoice::Full,
        ..PagedConfig::default()
    };
    let memory = PagedMemory::start(&config, backing, region).unwrap();
    let array = memory.alloc(OBJECTS * RECORD * 8).unwrap();
    let objects = memory.alloc(OBJECTS * 4096).unwrap();
    let mut order: Vec<usize> = (0..OBJECTS).collect();
    order.sort_unstable_by_key(|object| mix(*object as u64 + 1));
    for index in 0..objects.len() / 8 {
        word(&objects, index).store(mix(index as u64), Ordering::Relaxed);
    }
    for (record, object) in order.iter().enumerate() {
        word(&array, record * RECORD)
            .store(objects.as_ptr() as u64 + *object as u64 * 4096, Ordering::Relaxed);
    }
    let go_through = |record: usize| {
        let at = usize::try_from(word(&array, record * RECORD).load(Ordering::Relaxed)).unwrap();
        let object = (at - objects.as_ptr() as usize) / 4096;
        assert_eq!(object, order[record], "record {record} was changed");
        for index in object * 512..(object + 1) * 512 {
            assert_eq!(word(&objects, index).load(Ordering::Relaxed), mix(index as u64), "word {index}");
        }
    };
    let mut passes = 0;
    let mut pass = || {
        for step in 0..OBJECTS {
            go_through(if passes % 2 == 0 { step } else { OBJECTS - 1 - step });
        }
        passes += 1;
    };
    // The array has to be found first, by a search that goes on while no thread waits for a page.
    let begun = Instant::now();
    while memory.stats().pointer_used_pages == 0 {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "nothing came because of a pointer: {:?}",
            memory.stats()
        );
        pass();
    }
    let before = memory.stats();
    (0..6).for_each(|_| pass());
    let after = memory.stats();
    let demanded = after.demand_pages - before.demand_pages;
    let ahead = after.pointer_pages - before.pointer_pages;
    assert!(demanded < ahead, "{demanded} pages were waited for, only {ahead} came ahead by pointers");
}
