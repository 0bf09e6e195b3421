//! The page cache, one scenario at a time. The simulator in `rampool-sim` finds the cases that are missing
//! here.

use rampool_paging::cache::{Access, BatchId, Cache, CacheConfig, EvictOutcome, FetchId, Input, Output};
use rampool_wire::units::{Extent, PageIndex, total_pages};

const CONFIG: CacheConfig = CacheConfig {
    budget_pages: 32,
    unit_pages: 1,
    batch_pages: 4,
    max_batches: 4,
    max_prefetch_pages: 0,
    fetch_pages: 4,
    max_fetches: 4,
    tells_unchanged: false,
};

/// A cache whose outputs are collected after each input.
struct Driver {
    cache: Cache,
}

impl Driver {
    fn new(config: CacheConfig) -> Self {
        Self { cache: Cache::new(config) }
    }

    fn tell(&mut self, input: Input<'_>) -> Vec<Output> {
        self.cache.handle(input);
        std::iter::from_fn(|| self.cache.poll()).collect()
    }

    /// `resident` pages, then `remote` ones, then fresh ones.
    fn adopt(&mut self, pages: u32, resident: u32, remote: u32) -> Vec<Output> {
        let (resident, remote) = ([run(0, resident)], [run(u64::from(resident), remote)]);
        self.tell(Input::Adopt {
            extent: run(0, pages),
            resident: if resident[0].count > 0 { &resident } else { &[] },
            remote: if remote[0].count > 0 { &remote } else { &[] },
            given_up: &[],
        })
    }

    fn fault(&mut self, page: u64, access: Access) -> Vec<Output> {
        self.tell(Input::Fault { page: PageIndex(page), access })
    }

    fn evicted(&mut self, batch: BatchId, outcomes: &[EvictOutcome]) -> Vec<Output> {
        let out = self.tell(Input::Evicted { batch, outcomes });
        self.cache.check();
        out
    }

    /// Makes the cache evict by taking budget away; the first batch that leaves.
    fn squeeze(&mut self) -> (BatchId, Vec<Extent>) {
        let out = self.tell(Input::SetBudget { pages: 0 });
        first_eviction(&out).expect("something must leave")
    }
}

fn run(first: u64, count: u32) -> Extent {
    Extent::new(PageIndex(first), count)
}

fn evictions(outputs: &[Output]) -> Vec<(BatchId, Vec<Extent>)> {
    let eviction = |o: &Output| {
        if let Output::Evict { batch, extents } = o { Some((*batch, extents.clone())) } else { None }
    };
    outputs.iter().filter_map(eviction).collect()
}

fn first_eviction(outputs: &[Output]) -> Option<(BatchId, Vec<Extent>)> {
    evictions(outputs).into_iter().next()
}

fn fetch_of(outputs: &[Output]) -> (FetchId, Vec<Extent>) {
    let fetch = |o: &Output| {
        if let Output::Fetch { fetch, extents, .. } = o { Some((*fetch, extents.clone())) } else { None }
    };
    outputs.iter().find_map(fetch).expect("a fetch")
}

fn stores(outputs: &[Output]) -> Vec<BatchId> {
    outputs
        .iter()
        .filter_map(|o| if let Output::Store { batch, .. } = o { Some(*batch) } else { None })
        .collect()
}

fn releases(outputs: &[Output], batch: BatchId) -> bool {
    outputs.contains(&Output::ReleaseBatch { batch })
}

fn all(outcome: EvictOutcome, extents: &[Extent]) -> Vec<EvictOutcome> {
    vec![outcome; usize::try_from(total_pages(extents)).expect("few pages")]
}

/// A driver with one remote page 0 that was just read: mapped write-protected.
fn with_one_clean_page() -> Driver {
    let mut d = Driver::new(CONFIG);
    d.adopt(8, 0, 8);
    let (fetch, extents) = fetch_of(&d.fault(0, Access::Read));
    assert_eq!(extents, [run(0, 1)]);
    let installed = Output::InstallFetched { extent: run(0, 1), fetch, offset_pages: 0, writable: false };
    assert_eq!(d.tell(Input::Fetched { fetch }), [installed, Output::ReleaseFetch { fetch }]);
    d
}

#[test]
fn faults_that_walk_over_fresh_pages_are_answered_by_growing_runs() {
    let mut d = Driver::new(CacheConfig { budget_pages: 4096, ..CONFIG });
    d.adopt(2048, 0, 0);
    let mut next = 0;
    let mut runs = Vec::new();
    while next < 200 {
        let out = d.fault(next, Access::Write);
        let [Output::InstallZero { extent }] = out[..] else { panic!("{out:?}") };
        assert_eq!(extent.first, PageIndex(next));
        runs.push(extent.count);
        next += u64::from(extent.count);
    }
    assert_eq!(runs[..6], [1, 2, 4, 8, 16, 32]);
    assert_eq!(
        d.fault(1000, Access::Write),
        [Output::InstallZero { extent: run(1000, 1) }],
        "elsewhere it starts small again"
    );
}

#[test]
fn the_first_write_protection_fault_of_all_opens_its_page() {
    let mut d = with_one_clean_page();
    assert_eq!(d.fault(0, Access::WriteProtected), [Output::Unprotect { extent: run(0, 1) }]);
}

#[test]
fn a_clean_page_leaves_without_a_store() {
    let mut d = with_one_clean_page();
    let (batch, extents) = d.squeeze();
    assert_eq!(extents, [run(0, 1)]);
    let out = d.evicted(batch, &[EvictOutcome::Moved]);
    assert!(stores(&out).is_empty());
    assert!(releases(&out, batch), "the budget is gone, and nothing keeps its frame: {out:?}");
}

#[test]
fn a_written_page_is_released_only_after_its_store_is_acknowledged() {
    let mut d = with_one_clean_page();
    d.fault(0, Access::WriteProtected);
    let (batch, _) = d.squeeze();
    assert_eq!(
        d.evicted(batch, &[EvictOutcome::Moved]),
        [Output::Store { batch, pages: vec![(run(0, 1), 0)] }]
    );
    assert!(!releases(&d.tell(Input::SetBudget { pages: 1 }), batch));
    assert!(!releases(&d.tell(Input::SetBudget { pages: 0 }), batch));
    assert!(releases(&d.tell(Input::Stored { batch }), batch));
}

#[test]
fn a_page_that_is_only_read_back_is_clean_again_in_the_end() {
    let mut d = with_one_clean_page();
    d.fault(0, Access::WriteProtected);
    for round in 0..8 {
        let (batch, _) = d.squeeze();
        let out = d.evicted(batch, &[EvictOutcome::Moved]);
        if stores(&out).is_empty() {
            assert!(round > 0, "a page that was written needs a store");
            return;
        }
        d.tell(Input::SetBudget { pages: 32 });
        // Back before the acknowledgement. Its habit of being written has to wear off before it is
        // write-protected again.
        let out = d.fault(0, Access::Read);
        assert!(matches!(out[..], [Output::InstallStaged { .. }]), "{out:?}");
        d.tell(Input::Stored { batch });
    }
    panic!("the page is stored again and again although it is not written");
}

#[test]
fn a_page_written_back_before_the_acknowledgement_stays_dirty_after_it() {
    let mut d = with_one_clean_page();
    d.fault(0, Access::WriteProtected);
    let (batch, _) = d.squeeze();
    d.evicted(batch, &[EvictOutcome::Moved]);
    d.tell(Input::SetBudget { pages: 32 });
    let out = d.fault(0, Access::Write);
    assert!(matches!(out[..], [Output::InstallStaged { writable: true, .. }]), "{out:?}");
    assert_eq!(first_eviction(&d.tell(Input::SetBudget { pages: 0 })), None, "one store of a page at a time");
    let (again, _) = first_eviction(&d.tell(Input::Stored { batch })).expect("now it may leave");
    assert_eq!(stores(&d.evicted(again, &[EvictOutcome::Moved])), [again]);
}

#[test]
fn an_install_that_failed_right_after_the_eviction_does_not_lose_the_page() {
    let mut d = with_one_clean_page();
    d.fault(0, Access::WriteProtected);
    let (batch, _) = d.squeeze();
    assert_eq!(d.fault(0, Access::Read), [], "the answer comes with the eviction's");
    d.tell(Input::SetBudget { pages: 32 });
    let out = d.evicted(batch, &[EvictOutcome::Moved]);
    assert!(matches!(out[0], Output::InstallStaged { .. }), "{out:?}");
    assert_eq!(stores(&out), [batch], "the batch may turn out to have the only copy: {out:?}");
    d.tell(Input::InstallFailed { extent: run(0, 1) });
    d.cache.check();
    let out = d.fault(0, Access::Read);
    assert!(matches!(out[..], [Output::InstallStaged { .. }]), "{out:?}");
}

#[test]
fn a_page_that_was_written_and_leaves_unchanged_is_not_sent() {
    let mut d = with_one_clean_page();
    d.fault(0, Access::WriteProtected);
    let (batch, _) = d.squeeze();
    let out = d.evicted(batch, &[EvictOutcome::MovedUnchanged]);
    assert!(stores(&out).is_empty(), "{out:?}");
    assert!(releases(&out, batch), "the servers have it: {out:?}");
    d.tell(Input::SetBudget { pages: 32 });
    assert_eq!(fetch_of(&d.fault(0, Access::Read)).1, [run(0, 1)]);
    assert_eq!(d.cache.stats().unchanged_pages, 1);
}

#[test]
fn a_page_that_is_as_it_was_once_is_sent_when_the_servers_were_told_to_drop_it() {
    let mut d = with_one_clean_page();
    assert_eq!(d.tell(Input::Zeroed { extent: run(0, 1) }), [Output::Discard { extent: run(0, 1) }]);
    assert_eq!(d.fault(0, Access::Write), [Output::InstallZero { extent: run(0, 1) }]);
    let (batch, _) = d.squeeze();
    assert_eq!(stores(&d.evicted(batch, &[EvictOutcome::MovedUnchanged])), [batch]);
}

#[test]
fn pages_come_open_to_writes_while_others_are_written_and_not_when_most_leave_unchanged() {
    for tells_unchanged in [false, true] {
        let mut d =
            Driver::new(CacheConfig { budget_pages: 4096, batch_pages: 64, tells_unchanged, ..CONFIG });
        d.adopt(1000, 0, 1000);
        let read = |d: &mut Driver, page: u64| {
            let (fetch, _) = fetch_of(&d.fault(page, Access::Read));
            let out = d.tell(Input::Fetched { fetch });
            matches!(out[0], Output::InstallFetched { writable: true, .. })
        };
        assert!(!read(&mut d, 10), "nothing was written yet");
        d.fault(10, Access::WriteProtected);
        // Far apart from one another, so that they are no stream.
        assert!((1..40).all(|n| read(&mut d, 10 + 20 * n) == tells_unchanged));
        let mut leaving = evictions(&d.tell(Input::SetBudget { pages: 0 }));
        while let Some((batch, extents)) = leaving.pop() {
            leaving.extend(evictions(&d.evicted(batch, &all(EvictOutcome::MovedUnchanged, &extents))));
        }
        d.tell(Input::SetBudget { pages: 4096 });
        assert!(!read(&mut d, 30), "one fault pays for so many looks, and no more");
    }
}

#[test]
fn a_page_of_zeroes_is_never_sent() {
    let mut d = with_one_clean_page();
    let (batch, _) = d.squeeze();
    let out = d.evicted(batch, &[EvictOutcome::MovedZero]);
    assert!(stores(&out).is_empty());
    assert!(
        out.contains(&Output::Discard { extent: run(0, 1) }),
        "what the servers held is of no use: {out:?}"
    );
    d.tell(Input::SetBudget { pages: 32 });
    assert_eq!(d.fault(0, Access::Read), [Output::InstallZero { extent: run(0, 1) }]);
}

#[test]
fn a_page_that_vanished_is_fresh() {
    let mut d = with_one_clean_page();
    let (batch, _) = d.squeeze();
    let out = d.evicted(batch, &[EvictOutcome::Vanished]);
    assert!(out.contains(&Output::Discard { extent: run(0, 1) }), "{out:?}");
    assert_eq!(d.cache.used_pages(), 0);
}

/// A driver with one page that the program has given up, and that the kernel has yet to take away.
fn with_one_page_still_to_go() -> Driver {
    let mut d = Driver::new(CacheConfig { budget_pages: 4096, ..CONFIG });
    d.adopt(8, 8, 0);
    assert_eq!(d.tell(Input::Zeroed { extent: run(0, 1) }), []);
    d
}

#[test]
fn a_page_that_was_given_up_and_is_still_there_never_leaves() {
    let mut d = with_one_page_still_to_go();
    assert_eq!(d.fault(0, Access::Read), [Output::InstallZero { extent: run(0, 1) }]);
    assert_eq!(d.tell(Input::AlreadyThere { extent: run(0, 1) }), [Output::Unprotect { extent: run(0, 1) }]);
    d.cache.check();
    assert!(!d.cache.is_resident(PageIndex(0)));
    let leaving = evictions(&d.tell(Input::SetBudget { pages: 0 }));
    assert!(
        leaving.iter().flat_map(|(_, extents)| extents).all(|extent| !extent.contains(PageIndex(0))),
        "{leaving:?}"
    );
}

#[test]
fn a_write_to_a_page_that_was_given_up_and_is_still_there_opens_it_and_nothing_else() {
    let mut d = with_one_page_still_to_go();
    assert_eq!(d.fault(0, Access::WriteProtected), [Output::Unprotect { extent: run(0, 1) }]);
    assert!(!d.cache.is_resident(PageIndex(0)));
    assert_eq!(
        d.fault(0, Access::Write),
        [Output::InstallZero { extent: run(0, 1) }],
        "once it is gone, it is zero"
    );
    assert!(d.cache.is_resident(PageIndex(0)));
}

#[test]
fn a_page_that_the_kernel_made_before_it_was_adopted_is_managed_when_it_is_found() {
    let mut d = Driver::new(CacheConfig { budget_pages: 4096, ..CONFIG });
    d.adopt(8, 0, 0);
    d.fault(0, Access::Read);
    assert_eq!(d.tell(Input::AlreadyThere { extent: run(0, 1) }), []);
    assert!(d.cache.is_resident(PageIndex(0)));
    assert!(d.cache.needs_store(PageIndex(0)), "no server has it");
}

#[test]
fn what_was_given_up_before_it_was_adopted_is_fresh_though_it_is_mapped() {
    let mut d = Driver::new(CacheConfig { budget_pages: 4096, ..CONFIG });
    d.tell(Input::Adopt { extent: run(0, 8), resident: &[run(0, 4)], remote: &[], given_up: &[run(2, 3)] });
    d.cache.check();
    assert_eq!(
        (0..8).map(|page| d.cache.is_resident(PageIndex(page))).filter(|resident| *resident).count(),
        2
    );
    d.fault(3, Access::Read);
    assert_eq!(d.tell(Input::AlreadyThere { extent: run(3, 1) }), [Output::Unprotect { extent: run(3, 1) }]);
    assert!(!d.cache.is_resident(PageIndex(3)));
}

#[test]
fn changes_that_were_read_together_are_one_step() {
    let mut d = Driver::new(CONFIG);
    d.adopt(8, 0, 8);
    d.fault(0, Access::Read);
    d.cache.handle(Input::Zeroed { extent: run(0, 1) });
    d.cache.handle(Input::Forget { extent: run(4, 4) });
    let out = d.tell(Input::Zeroed { extent: run(2, 1) });
    assert!(
        out.contains(&Output::InstallZero { extent: run(0, 1) }),
        "the thread that waits sees zeroes: {out:?}"
    );
    // Of the same step, so it may have failed.
    d.tell(Input::InstallFailed { extent: run(0, 1) });
    d.cache.check();
    assert!(!d.cache.is_resident(PageIndex(0)));
}

#[test]
fn the_kernel_may_drop_pages_from_before_they_were_adopted() {
    let mut d = Driver::new(CONFIG);
    d.adopt(1, 1, 0);
    assert_eq!(d.fault(0, Access::Read), [Output::Confirm { page: PageIndex(0), may_be_gone: true }]);
    d.tell(Input::WasMissing { page: PageIndex(0) });
    // From now on it is a frame of ours.
    assert_eq!(d.fault(0, Access::Read), [Output::Confirm { page: PageIndex(0), may_be_gone: false }]);
    let mut d = Driver::new(CONFIG);
    d.adopt(1, 1, 0);
    let (batch, _) = d.squeeze();
    d.evicted(batch, &[EvictOutcome::Vanished]);
    assert_eq!((d.cache.stats().missing_pages, d.cache.stats().vanished_pages), (0, 0));
}

#[test]
fn pages_that_go_though_the_program_did_not_give_them_up_are_counted() {
    let mut d = with_one_clean_page();
    d.fault(0, Access::Read);
    d.tell(Input::WasMissing { page: PageIndex(0) });
    assert_eq!(d.cache.stats().missing_pages, 1);
    let (batch, _) = d.squeeze();
    d.evicted(batch, &[EvictOutcome::Vanished]);
    assert_eq!(d.cache.stats().vanished_pages, 1);
    d.tell(Input::SetBudget { pages: 32 });
    d.tell(Input::Zeroed { extent: run(1, 1) });
    d.fault(1, Access::Write);
    d.fault(1, Access::Write);
    d.tell(Input::WasMissing { page: PageIndex(1) });
    let (batch, extents) = d.squeeze();
    d.evicted(batch, &all(EvictOutcome::Vanished, &extents));
    assert_eq!(
        (d.cache.stats().missing_pages, d.cache.stats().vanished_pages),
        (1, 1),
        "what was given up may go late"
    );
}

#[test]
fn bytes_that_arrive_for_a_page_given_back_meanwhile_are_dropped() {
    let mut d = Driver::new(CONFIG);
    d.adopt(8, 0, 8);
    let (fetch, _) = fetch_of(&d.fault(0, Access::Read));
    let out = d.tell(Input::Zeroed { extent: run(0, 1) });
    assert!(out.contains(&Output::Discard { extent: run(0, 1) }));
    assert!(
        out.contains(&Output::InstallZero { extent: run(0, 1) }),
        "the thread that waits sees zeroes: {out:?}"
    );
    assert_eq!(d.tell(Input::Fetched { fetch }), [Output::ReleaseFetch { fetch }]);
}

#[test]
fn a_page_forgotten_twice_and_adopted_again_while_it_is_moved_out_is_unmanaged_in_the_end() {
    let mut d = Driver::new(CONFIG);
    d.adopt(1, 1, 0);
    let (batch, _) = d.squeeze();
    d.tell(Input::Forget { extent: run(0, 1) });
    d.adopt(1, 0, 0);
    d.tell(Input::Forget { extent: run(0, 1) });
    d.tell(Input::Zeroed { extent: run(0, 1) });
    let out = d.evicted(batch, &[EvictOutcome::Moved]);
    assert!(stores(&out).is_empty() && releases(&out, batch), "{out:?}");
    assert_eq!(d.fault(0, Access::Read), [Output::Wake { page: PageIndex(0) }]);
}

#[test]
fn a_stale_fault_on_a_resident_page_installs_zeroes_that_the_kernel_refuses() {
    let mut d = with_one_clean_page();
    assert_eq!(d.fault(0, Access::Read), [Output::Confirm { page: PageIndex(0), may_be_gone: false }]);
    let (batch, _) = d.squeeze();
    let out = d.evicted(batch, &[EvictOutcome::Moved]);
    assert_eq!(stores(&out), [batch], "unknown bytes count as written");
}

#[test]
fn a_fault_waits_for_the_servers_rather_than_exceed_the_budget() {
    let mut d = Driver::new(CONFIG);
    let mut unanswered: Vec<BatchId> = Vec::new();
    let mut leaving = evictions(&d.adopt(128, 32, 96));
    let mut page = 40;
    let waiting = loop {
        while let Some((batch, extents)) = leaving.pop() {
            let out = d.evicted(batch, &all(EvictOutcome::Moved, &extents));
            unanswered.extend(stores(&out));
            leaving.extend(evictions(&out));
        }
        let out = d.fault(page, Access::Read);
        leaving.extend(evictions(&out));
        if !out.iter().any(|o| matches!(o, Output::Fetch { .. })) {
            break page;
        }
        leaving.extend(evictions(&d.tell(Input::Fetched { fetch: fetch_of(&out).0 })));
        assert!(d.cache.used_pages() <= 32);
        page += 1;
        assert!(page < 120, "without a single acknowledgement this cannot go on");
    };
    assert!(leaving.is_empty());
    let out = d.tell(Input::Stored { batch: unanswered[0] });
    assert_eq!(fetch_of(&out).1, [run(waiting, 1)]);
    assert_eq!(d.cache.stats().forced_pages, 0);
}

#[test]
fn when_every_page_refuses_to_leave_the_budget_is_exceeded_and_counted() {
    let mut d = Driver::new(CONFIG);
    let mut leaving = evictions(&d.adopt(64, 40, 24));
    let mut tried = 0;
    while let Some((batch, extents)) = leaving.pop() {
        tried += total_pages(&extents);
        leaving.extend(evictions(&d.evicted(batch, &all(EvictOutcome::Busy, &extents))));
    }
    assert_eq!(tried, 40, "each page is tried once, not for ever");
    let (fetch, _) = fetch_of(&d.fault(50, Access::Read));
    assert!(d.tell(Input::Fetched { fetch }).iter().any(|o| matches!(o, Output::InstallFetched { .. })));
    assert!(d.cache.stats().forced_pages > 0);
}

#[test]
fn a_kernel_that_moves_nothing_just_now_is_left_alone_until_the_next_input() {
    let mut d = Driver::new(CONFIG);
    let leaving = evictions(&d.adopt(64, 40, 24));
    assert!(!leaving.is_empty());
    for (batch, extents) in leaving {
        let out = d.evicted(batch, &all(EvictOutcome::Later, &extents));
        assert!(evictions(&out).is_empty(), "{out:?}");
    }
    assert!(first_eviction(&d.tell(Input::SetBudget { pages: 32 })).is_some());
}

#[test]
fn while_the_pool_is_full_only_clean_pages_leave() {
    let mut d = Driver::new(CONFIG);
    d.adopt(64, 8, 56);
    for page in 8..24 {
        let (fetch, _) = fetch_of(&d.fault(page, Access::Read));
        d.tell(Input::Fetched { fetch });
    }
    d.tell(Input::PoolFull(true));
    let mut leaving = evictions(&d.tell(Input::SetBudget { pages: 8 }));
    let mut left = 0;
    while let Some((batch, extents)) = leaving.pop() {
        assert!(extents.iter().all(|e| e.first >= PageIndex(8)), "a dirty page was to leave: {extents:?}");
        left += total_pages(&extents);
        let out = d.evicted(batch, &all(EvictOutcome::Moved, &extents));
        assert!(stores(&out).is_empty());
        leaving.extend(evictions(&out));
    }
    assert_eq!(left, 16);
}

/// Lets a program read `pages` in order, everything arriving at once: how many fetches it waited for, and how
/// many came ahead.
fn walk(d: &mut Driver, pages: impl Iterator<Item = u64>) -> (u64, u64) {
    let mut mapped = std::collections::BTreeSet::new();
    for page in pages {
        if mapped.contains(&page) {
            continue;
        }
        let mut inbox = d.fault(page, Access::Read);
        while !inbox.is_empty() {
            for output in std::mem::take(&mut inbox) {
                match output {
                    Output::Fetch { fetch, .. } => inbox.extend(d.tell(Input::Fetched { fetch })),
                    Output::InstallFetched { extent, .. } => mapped.extend(extent.pages().map(|p| p.0)),
                    _ => {}
                }
            }
        }
        assert!(mapped.contains(&page), "page {page} never came");
    }
    let stats = d.cache.stats();
    (stats.demand_fetches, stats.fetches - stats.demand_fetches)
}

fn prefetching() -> Driver {
    let mut d = Driver::new(CacheConfig {
        budget_pages: 8192,
        unit_pages: 1,
        batch_pages: 64,
        max_batches: 8,
        max_prefetch_pages: 64,
        fetch_pages: 64,
        max_fetches: 16,
        tells_unchanged: false,
    });
    d.adopt(1 << 16, 0, 1 << 16);
    d
}

#[test]
fn an_ascending_scan_waits_only_at_its_start() {
    let (waited, ahead) = walk(&mut prefetching(), 1000..3000);
    assert!(waited <= 4 && ahead > 0, "{waited} waits, {ahead} fetches ahead");
}

#[test]
fn a_descending_scan_waits_only_at_its_start() {
    let (waited, _) = walk(&mut prefetching(), (1000..3000).rev());
    assert!(waited <= 4, "{waited} waits");
}

#[test]
fn a_strided_scan_waits_only_at_its_start_and_fetches_nothing_in_between() {
    let mut d = prefetching();
    let (waited, _) = walk(&mut d, (1000..17000).step_by(8));
    assert!(waited <= 5, "{waited} waits");
    assert!(d.cache.stats().fetched_pages < 2200, "{} pages for 2000", d.cache.stats().fetched_pages);
}

#[test]
fn several_scans_in_turn_wait_only_at_their_starts() {
    let (waited, _) =
        walk(&mut prefetching(), (0..1000).flat_map(|i| [i, 20_000 + i, 40_000 + i, 60_000 - i]));
    assert!(waited <= 20, "{waited} waits");
}

/// Places all over memory, in no order, with room for two pages on either side of each.
fn places(seed: u64) -> impl Iterator<Item = u64> {
    let mut x = seed;
    std::iter::repeat_with(move || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % (1 << 13) * 8 + 4
    })
}

#[test]
fn random_faults_fetch_nothing_ahead() {
    let mut x = 1u64;
    let pages = std::iter::repeat_with(move || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % (1 << 16)
    });
    let mut d = prefetching();
    let (_, ahead) = walk(&mut d, pages.take(1500));
    assert!(ahead <= 4, "{ahead} fetches ahead");
    assert_eq!(d.cache.stats().company_pages, 0);
}

#[test]
fn a_neighbour_that_is_wanted_with_most_pages_comes_along() {
    for (what, other) in [("below", -1), ("above", 1)] {
        let mut d = prefetching();
        let (waited, _) =
            walk(&mut d, places(1).take(1500).flat_map(|page| [page, page.strict_add_signed(other)]));
        let stats = d.cache.stats();
        let distinct = places(1).take(1500).collect::<std::collections::BTreeSet<_>>().len() as u64;
        assert!(waited < distinct * 5 / 4, "{what}: {waited} waits for {distinct} places");
        assert!(
            stats.company_pages < distinct * 5 / 4,
            "{what}: {} pages came along at {distinct} places",
            stats.company_pages
        );
    }
}

#[test]
fn a_neighbour_that_is_wanted_with_few_pages_does_not_come_along() {
    let mut d = prefetching();
    walk(
        &mut d,
        (0..)
            .zip(places(1))
            .take(1500)
            .flat_map(|(n, page)| std::iter::once(page).chain((n % 8 == 0).then_some(page + 1))),
    );
    assert_eq!(d.cache.stats().company_pages, 0);
}

#[test]
fn a_neighbour_that_is_wanted_no_longer_stays_away() {
    let company = |alone| {
        let mut d = prefetching();
        walk(&mut d, places(1).take(500).flat_map(|page| [page, page - 1]).chain(places(2).take(alone)));
        d.cache.stats().company_pages
    };
    assert!(company(0) > 0, "nothing came along");
    assert_eq!(company(3500), company(2500));
}

#[test]
fn what_a_child_needs_is_everything_that_is_not_mapped() {
    let mut d = Driver::new(CONFIG);
    let mut leaving = evictions(&d.adopt(64, 32, 24));
    let mut staged = 0;
    while let Some((batch, extents)) = leaving.pop() {
        staged += total_pages(&extents);
        leaving.extend(evictions(&d.evicted(batch, &all(EvictOutcome::Moved, &extents))));
    }
    let (mut at_servers, mut in_batches) = (Vec::new(), 0);
    d.cache.absent_content(|extent, batch| match batch {
        None => at_servers.push(extent),
        Some(_) => in_batches += u64::from(extent.count),
    });
    assert_eq!(at_servers, [run(32, 24)]);
    assert!(staged > 0);
    assert_eq!(in_batches, staged);
}

#[test]
fn a_clone_decides_like_its_original() {
    let mut d = prefetching();
    walk(&mut d, 0..300);
    let mut twin = Driver { cache: d.cache.clone() };
    for page in [300, 301, 5000, 5001, 5002, 5003, 302] {
        assert_eq!(d.fault(page, Access::Read), twin.fault(page, Access::Read));
    }
}
