//! The invariants, as equations over the whole state.

use super::page::{COPY, DIRTY, FORGOTTEN, GONE, PROTECTED, QUEUED, STORING, State, WANTED};
use super::under_way::{BatchPhase, FetchPhase};
use super::{Cache, index_of};
use rampool_wire::units::PageIndex;

impl Cache {
    /// One page's state in words, and the frames in use: for a log line or a failing test.
    #[must_use]
    pub fn describe(&self, page: PageIndex) -> String {
        let Some(entry) = self.pages.get(index_of(page) as usize) else {
            return format!("{page} is unknown");
        };
        let under_way = (self.evictions_in_flight, self.stores_in_flight, self.fetches_in_flight);
        format!(
            "{page} is {entry:?}; {:?}; evictions, stores, fetches under way: {under_way:?}; waiting: {}",
            self.frames,
            self.waiting.len()
        )
    }

    /// Verifies every invariant. Takes time in proportion to the index space: for the simulator and for
    /// tests.
    ///
    /// # Panics
    /// When one does not hold.
    pub fn check(&self) {
        let queued: u64 = self.queues.all.iter().map(|q| q.check(&self.pages)).sum();
        assert_eq!(queued, self.frames.resident, "every resident page stands in one queue");
        let (mut evicting, mut fetching, mut clean, mut ready, mut remote) = (0, 0, 0, 0, 0);
        for (index, page) in (0u32..).zip(self.pages.iter()) {
            let state = page.state();
            assert!(!page.has(GONE) || state == State::Evicting, "page {index} is gone in {state:?}");
            assert!(!page.has(FORGOTTEN) || page.has(GONE), "page {index} is forgotten but not gone");
            match state {
                State::Resident => {
                    assert!(
                        page.has(PROTECTED) || page.has(DIRTY),
                        "page {index} can be written but counts as clean"
                    );
                    assert!(
                        page.has(DIRTY) || page.has(COPY),
                        "page {index} is clean but the servers do not have it"
                    );
                    clean += u64::from(!page.has(DIRTY));
                }
                State::Evicting => {
                    evicting += 1;
                    let batch = &self.batches[page.a as usize];
                    assert_eq!(batch.phase, BatchPhase::Evicting, "page {index}");
                    assert_eq!(batch.pages[page.b as usize], index);
                    assert!(!page.has(STORING), "page {index} is evicted while it is stored");
                }
                State::Staged => {
                    let batch = &self.batches[page.a as usize];
                    assert!(!matches!(batch.phase, BatchPhase::Free | BatchPhase::Evicting), "page {index}");
                    assert_eq!(batch.pages[page.b as usize], index);
                    assert!(page.has(DIRTY) || page.has(COPY), "page {index} is nowhere");
                    assert!(
                        !page.has(DIRTY) || batch.phase != BatchPhase::Lingering,
                        "page {index} is dirty in an acknowledged batch"
                    );
                }
                State::Fetching => {
                    fetching += 1;
                    assert_eq!(self.fetches[page.a as usize].phase, FetchPhase::InFlight, "page {index}");
                    assert!(page.has(COPY), "page {index} is fetched from nowhere");
                }
                State::Ready => {
                    ready += 1;
                    assert_eq!(self.fetches[page.a as usize].phase, FetchPhase::Idle, "page {index}");
                    assert!(page.has(COPY), "page {index} is fetched from nowhere");
                }
                State::Remote => {
                    remote += 1;
                    assert!(page.has(COPY) && !page.has(STORING), "page {index} is nowhere");
                }
                State::Fresh | State::Unmanaged => {
                    assert!(
                        !page.has(COPY) || page.has(STORING),
                        "page {index} is empty but the servers still hold it"
                    );
                }
            }
            if page.has(WANTED) {
                assert!(
                    state != State::Unmanaged && state != State::Resident,
                    "a thread waits for page {index}, which is {state:?}"
                );
                assert!(
                    page.has(QUEUED) || matches!(state, State::Evicting | State::Fetching),
                    "a thread waits for page {index} ({state:?}) and no answer is due"
                );
            }
        }
        assert_eq!(clean, self.clean_resident, "clean resident pages");
        assert_eq!(remote, self.curve.pages(), "every page that has left counts once");
        self.check_batches(evicting);
        self.streams.check();
        self.check_fetches(fetching, ready);
        let queued = self.pages.iter().filter(|p| p.has(QUEUED)).count();
        assert_eq!(queued, self.waiting.len(), "every waiting fault stands in the queue once");
        assert!(self.waiting.iter().all(|&i| self.pages[i as usize].has(QUEUED)));
    }

    fn check_batches(&self, evicting: u64) {
        let (mut frames, mut moving, mut evictions, mut stores, mut lingering) = (0, 0, 0, 0, 0);
        for (slot, batch) in (0u32..).zip(&self.batches) {
            match batch.phase {
                BatchPhase::Free => assert_eq!(batch.frames, 0, "batch {slot} leaks frames"),
                BatchPhase::Evicting => {
                    evictions += 1;
                    moving += batch.pages.len() as u64;
                }
                BatchPhase::Held => {
                    assert!(self.pool_full, "batch {slot} is held back for nothing");
                }
                BatchPhase::Storing => stores += 1,
                BatchPhase::Lingering => {
                    lingering += 1;
                    assert!(self.lingering.contains(&slot), "batch {slot} will never be released");
                }
            }
            assert_eq!(
                batch.phase == BatchPhase::Storing,
                !batch.storing.is_empty(),
                "batch {slot} {:?}",
                batch.phase
            );
            for &index in &batch.storing {
                assert!(self.pages[index as usize].has(STORING), "page {index} of batch {slot}");
            }
            frames += batch.frames;
        }
        assert_eq!(frames, self.frames.staged, "frames in batches");
        assert_eq!(moving, self.frames.evicting, "frames in evictions");
        assert_eq!(evicting, moving, "every evicting page is in a batch");
        assert_eq!(evictions, self.evictions_in_flight);
        assert_eq!(stores, self.stores_in_flight);
        assert_eq!(lingering, self.lingering.len());
        let storing = self.pages.iter().filter(|p| p.has(STORING)).count();
        let listed: usize = self.batches.iter().map(|b| b.storing.len()).sum();
        assert_eq!(storing, listed, "each store is in one batch");
    }

    fn check_fetches(&self, fetching: u64, ready: u64) {
        let (mut buffered, mut landing, mut in_flight, mut held) = (0, 0, 0, 0);
        let mut live = 0;
        for (slot, fetch) in (0u32..).zip(&self.fetches) {
            buffered += u64::from(fetch.pages);
            landing += u64::from(fetch.landing);
            held += u64::from(fetch.ready);
            in_flight += u64::from(fetch.phase == FetchPhase::InFlight);
            match fetch.phase {
                FetchPhase::Free => assert_eq!(fetch.pages, 0, "fetch {slot} leaks frames"),
                FetchPhase::InFlight => {
                    let pages = fetch.extents.iter().flat_map(rampool_wire::units::Extent::pages);
                    live += (0u32..)
                        .zip(pages)
                        .filter(|(o, p)| self.pages[index_of(*p) as usize].is_at(State::Fetching, slot, *o))
                        .count();
                }
                FetchPhase::Idle => assert!(
                    fetch.ready > 0 && fetch.landing <= fetch.ready,
                    "fetch {slot} is kept for nothing"
                ),
            }
        }
        assert_eq!(buffered, self.frames.buffered, "frames in fetches");
        assert_eq!(landing, self.frames.landing, "frames reserved for fetches");
        assert_eq!(live as u64, fetching, "every fetching page is in a fetch");
        assert_eq!(held, ready, "every ready page is in a fetch");
        assert_eq!(in_flight, u64::from(self.fetches_in_flight));
    }
}
