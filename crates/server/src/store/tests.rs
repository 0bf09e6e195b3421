//! One suite over every store.

use super::*;
use proptest::test_runner::{TestRng, TestRunner};
use rampool_wire::frame::page_crc;
use rampool_wire::places::{PLAN_BYTES, Plan};
use rampool_wire::units::OS_PAGE_BYTES;
use std::os::unix::fs::FileExt;

fn config(memory_bytes: u64, arenas: usize) -> StoreConfig {
    StoreConfig { memory_bytes, arenas, transit_bytes: 0, lock: false, open: false, disk: None }
}

fn stores(memory_bytes: u64, arenas: usize) -> Vec<Box<dyn PageStore>> {
    let config = config(memory_bytes, arenas);
    let open = StoreConfig { open: true, ..config.clone() };
    vec![
        Box::new(RawStore::new(&config)),
        Box::new(CompressedStore::new(&config)),
        Box::new(RawStore::new(&open)),
        Box::new(CompressedStore::new(&open)),
    ]
}

/// A page that packs well, half, or not at all.
fn page(rng: &mut TestRng) -> Vec<u8> {
    let mut page = vec![0; OS_PAGE_BYTES];
    let random = [16, 700, 2000, 3800, 4096][below(rng, 5)];
    rng.fill_bytes(&mut page[..random]);
    page
}

fn below(rng: &mut TestRng, end: usize) -> usize {
    usize::try_from(rng.next_u64() % end as u64).unwrap()
}

use proptest::prelude::Rng as _;

fn arrive(store: &dyn PageStore, arena: usize, page: &[u8]) -> Option<StoredPage> {
    let mut frame = Vec::new();
    let len = u32::try_from(page.len()).unwrap();
    if !store.take(arena, &[len], &mut frame) {
        return None;
    }
    // SAFETY: just taken, and long enough.
    unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), store.memory(frame[0]), page.len()) };
    Some(store.settle(arena, frame[0], PageEntry { crc: page_crc(page), len }, &mut Scratch::default()))
}

/// The page's plain bytes, as a client gets them.
fn depart(store: &dyn PageStore, arena: usize, stored: &StoredPage, compressed: bool) -> Vec<u8> {
    let (frame, len) = store.present(arena, stored, compressed).unwrap().unwrap();
    // SAFETY: `present` gave a reference to a frame of `len` settled bytes.
    let bytes = unsafe { std::slice::from_raw_parts(store.memory(frame), len as usize) }.to_vec();
    store.release(&[frame]);
    if len as usize == OS_PAGE_BYTES {
        bytes
    } else {
        lz4_flex::block::decompress(&bytes, OS_PAGE_BYTES).unwrap()
    }
}

#[test]
fn pages_come_back_as_they_went_and_memory_is_given_back() {
    for store in stores(64 << 20, 2) {
        let mut rng = TestRunner::deterministic().new_rng();
        let mut kept: Vec<(StoredPage, Vec<u8>)> = Vec::new();
        for _ in 0..20_000 {
            let arena = below(&mut rng, 2);
            if below(&mut rng, 5) < 3 {
                let page = page(&mut rng);
                kept.push((arrive(&*store, arena, &page).expect("room for all"), page));
            } else if !kept.is_empty() {
                let (stored, page) = kept.swap_remove(below(&mut rng, kept.len()));
                assert!(
                    depart(&*store, arena, &stored, rng.next_u64().is_multiple_of(2)) == page,
                    "another page came back"
                );
                store.release(&[stored.frame]);
            }
        }
        store.check();
        let used: u64 = kept.iter().map(|(stored, _)| u64::from(stored.charge)).sum();
        assert_eq!(store.usage().used_bytes, used);
        for (stored, page) in &kept {
            assert!(depart(&*store, 0, stored, false) == *page);
        }
        store.release(&kept.iter().map(|(stored, _)| stored.frame).collect::<Vec<_>>());
        store.check();
        let usage = store.usage();
        assert_eq!((usage.used_bytes, usage.frames), (0, 0));
        assert!(usage.held_bytes <= 8 << 20, "{} bytes are kept for nothing", usage.held_bytes);
    }
}

#[test]
fn what_is_held_stays_as_it_is_when_its_owner_lets_go() {
    for store in stores(8 << 20, 1) {
        let mut rng = TestRunner::deterministic().new_rng();
        let first = page(&mut rng);
        let stored = arrive(&*store, 0, &first).unwrap();
        let (held, len) = store.present(0, &stored, true).unwrap().unwrap();
        // SAFETY: `present` gave a reference to a frame of `len` settled bytes.
        let bytes = || unsafe { std::slice::from_raw_parts(store.memory(held), len as usize) }.to_vec();
        let before = bytes();
        store.release(&[stored.frame]);
        let others: Vec<_> = (0..1500).map(|_| arrive(&*store, 0, &page(&mut rng)).unwrap().frame).collect();
        assert!(!others.contains(&held), "a frame in use was given out again");
        assert_eq!(bytes(), before);
        store.release(&[held]);
        store.release(&others);
        store.check();
    }
}

#[test]
fn a_full_store_refuses_all_of_a_request_and_goes_on() {
    for store in stores(4 << 20, 2) {
        let mut rng = TestRunner::deterministic().new_rng();
        let mut incompressible = vec![0; OS_PAGE_BYTES];
        rng.fill_bytes(&mut incompressible);
        let mut kept = Vec::new();
        while let Some(stored) = arrive(&*store, kept.len() % 2, &incompressible) {
            kept.push(stored.frame);
        }
        assert!(kept.len() >= 1024, "{} pages fit 4 MiB", kept.len());
        let before = store.usage();
        store.release(&kept.split_off(kept.len() - 3));
        let mut frames = Vec::new();
        assert!(!store.take(0, &[4096; 4], &mut frames));
        assert!(frames.is_empty());
        assert!(store.take(1, &[4096; 3], &mut frames), "what one arena gave back another can take");
        assert_eq!(store.usage(), before);
        store.release(&frames);
        store.release(&kept);
        store.check();
    }
}

/// Threads that put, read and release each other's pages.
#[test]
fn threads_share_a_store() {
    for store in stores(64 << 20, 4) {
        let kept = std::sync::Mutex::new(Vec::<(StoredPage, u32)>::new());
        std::thread::scope(|scope| {
            for arena in 0..4 {
                let (store, kept) = (&*store, &kept);
                scope.spawn(move || {
                    let mut rng = TestRunner::deterministic().new_rng();
                    for _ in 0..3000 {
                        let page = page(&mut rng);
                        let stored = arrive(store, arena, &page).unwrap();
                        let other = {
                            let mut kept = kept.lock().unwrap();
                            kept.push((stored, page_crc(&page)));
                            let index = below(&mut rng, kept.len());
                            kept.swap_remove(index)
                        };
                        assert_eq!(page_crc(&depart(store, arena, &other.0, arena % 2 == 0)), other.1);
                        if rng.next_u64().is_multiple_of(4) {
                            kept.lock().unwrap().push(other);
                        } else {
                            store.release(&[other.0.frame]);
                        }
                    }
                });
            }
        });
        store.check();
        let rest: Vec<_> = kept.into_inner().unwrap().into_iter().map(|(stored, _)| stored.frame).collect();
        store.release(&rest);
        store.check();
        assert_eq!(store.usage().used_bytes, 0);
    }
}

#[test]
fn compression_gains_memory_and_a_wrongly_packed_page_is_named() {
    let store = CompressedStore::new(&config(1 << 20, 1));
    let mut page = vec![0; OS_PAGE_BYTES];
    page[..200].copy_from_slice(&[7; 200]);
    let mut frames = Vec::new();
    for _ in 0..1024 {
        let stored = arrive(&store, 0, &page).expect("4 MiB of such pages fit 1 MiB");
        assert_eq!(stored.charge, 256);
        frames.push(stored.frame);
    }
    store.release(&frames);
    let stored = arrive(&store, 0, &[0xff; 100]).unwrap();
    assert_eq!(store.present(0, &stored, false), Err(Unpackable));
    assert!(store.present(0, &stored, true).unwrap().is_some(), "the thread that packed it may have it back");
}

#[test]
fn locked_memory_is_locked() {
    let locked_kib = || -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|l| l.starts_with("VmLck:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let store = RawStore::new(&StoreConfig { lock: true, ..config(64 << 20, 1) });
    let before = locked_kib();
    let mut frames = Vec::new();
    assert!(store.take(0, &[4096; 1024], &mut frames));
    assert!(store.usage().unlocked || locked_kib() >= before + 4096, "4 MiB are in use and not locked");
    store.release(&frames);
}

/// Who reads frames in their file: the bytes of a page at its place, and the generation there now.
struct Reader {
    plan: Plan,
    file: std::fs::File,
}

impl Reader {
    fn of(store: &dyn PageStore) -> Self {
        let file =
            std::fs::File::from(store.file().expect("the frames are open").try_clone_to_owned().unwrap());
        let mut plan = [0; PLAN_BYTES];
        file.read_exact_at(&mut plan, 0).unwrap();
        Self { plan: Plan::parse(&plan).unwrap(), file }
    }

    fn read(&self, place: Place) -> (Vec<u8>, u32) {
        let (mut bytes, mut generation) = (vec![0; place.len as usize], [0; 4]);
        self.file.read_exact_at(&mut bytes, self.plan.frame_at(place.granule)).unwrap();
        self.file.read_exact_at(&mut generation, self.plan.generation_at(place.granule)).unwrap();
        (bytes, u32::from_ne_bytes(generation))
    }
}

#[test]
fn an_open_frame_is_where_its_place_says_until_its_generation_moves_on() {
    let open = StoreConfig { open: true, ..config(16 << 20, 2) };
    let stores: [Box<dyn PageStore>; 2] =
        [Box::new(RawStore::new(&open)), Box::new(CompressedStore::new(&open))];
    for store in stores {
        let reader = Reader::of(&*store);
        let mut rng = TestRunner::deterministic().new_rng();
        let mut kept: Vec<(StoredPage, Place, Vec<u8>)> = Vec::new();
        let mut gone: Vec<Place> = Vec::new();
        for step in 0..5000 {
            if below(&mut rng, 5) < 3 && kept.len() < 2000 {
                let page = page(&mut rng);
                let stored = arrive(&*store, below(&mut rng, 2), &page).expect("room for all");
                let place = store.place(&stored);
                assert!(reader.plan.has(place) && !gone.contains(&place), "a place of a page that is gone");
                kept.push((stored, place, page));
            } else if !kept.is_empty() {
                let (stored, place, _) = kept.swap_remove(below(&mut rng, kept.len()));
                store.release(&[stored.frame]);
                gone.push(place);
            }
            if step % 100 == 0 {
                for (stored, place, page) in &kept {
                    let (bytes, generation) = reader.read(*place);
                    assert_eq!((generation, store.place(stored)), (place.generation, *place));
                    let plain = if bytes.len() == OS_PAGE_BYTES {
                        bytes
                    } else {
                        lz4_flex::block::decompress(&bytes, OS_PAGE_BYTES).unwrap()
                    };
                    assert!(plain == *page, "another page lies there");
                }
                assert!(gone.iter().all(|place| reader.read(*place).1 != place.generation));
            }
        }
        let (stored, place, _) = &kept[0];
        store.touch(stored.frame);
        assert_ne!(reader.read(*place).1, place.generation, "its bytes may change now");
        store.release(&kept.iter().map(|(stored, ..)| stored.frame).collect::<Vec<_>>());
        store.check();
        // To be read only.
        use std::io::Write as _;
        assert!((&reader.file).write(&[0]).is_err());
    }
    assert!(RawStore::new(&config(16 << 20, 1)).file().is_none(), "frames are open on request only");
}
