//! The cache on the real kernel: memory that is unmapped, moved, dropped and forked under it, and bytes that
//! are sent from it.

use super::*;
use rampool_kernel::memory::{Advice, Mapping, advise};
use rampool_kernel::ring::Sent;
use rampool_testing::skip;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

const PAGE: usize = OS_PAGE_BYTES;

/// Two ends of a TCP connection; what is sent into one is compared with what comes out of the other.
struct Wire {
    sender: TcpStream,
    receiver: TcpStream,
}

impl Wire {
    fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sender.set_nonblocking(true).unwrap();
        sender.set_nodelay(true).unwrap();
        let receiver = listener.accept().unwrap().0;
        // A watchdog; nothing depends on it.
        receiver.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { sender, receiver }
    }

    /// What arrives of these bytes, sent from the registration that the cache finds or makes.
    fn send(&mut self, pins: &mut Pins, start: usize, bytes: usize) -> Vec<u8> {
        let held = pins.acquire(start, bytes).unwrap();
        let place = FixedBuffers::place(held.registration());
        let mut got = vec![0; bytes];
        let mut done = 0;
        while done < bytes {
            let memory = std::ptr::with_exposed_provenance(start + done);
            let ring = pins.buffers().ring();
            // SAFETY: the memory is a mapping of the test's, which changes it only when what was sent has
            // arrived.
            match unsafe { ring.send(self.sender.as_fd(), memory, bytes - done, Some(place)) }.unwrap() {
                Sent::Taken { bytes, .. } => {
                    self.receiver.read_exact(&mut got[done..done + bytes]).unwrap();
                    done += bytes;
                }
                other => panic!("{other:?}"),
            }
            // What has arrived is not read any more; the kernel may report that only after a delayed
            // acknowledgement.
            while ring.ended().is_some() {}
        }
        pins.release(held);
        got
    }
}

/// Whether this kernel lets us have a ring.
fn possible() -> bool {
    let Err(error) = Ring::open(1) else { return true };
    skip("io-uring", &error.to_string());
    false
}

fn pins(allowance: usize) -> Pins {
    Pins::new(FixedBuffers::open(64).unwrap(), allowance as u64)
}

/// Pages of this test's own, and the byte that each is filled with.
struct Arena {
    mapping: Mapping,
    content: Vec<u8>,
    next: u8,
}

impl Arena {
    fn new(pages: usize) -> Self {
        let mut arena =
            Self { mapping: Mapping::anonymous(pages * PAGE).unwrap(), content: vec![0; pages], next: 0 };
        arena.write(0..pages);
        arena
    }

    fn at(&self, page: usize) -> usize {
        self.mapping.start() + page * PAGE
    }

    fn write(&mut self, pages: Range<usize>) {
        for page in pages {
            self.next = self.next.wrapping_add(1);
            self.content[page] = self.next;
            // SAFETY: the arena's own page.
            unsafe { self.mapping.at(page * PAGE).write_bytes(self.next, PAGE) };
        }
    }

    fn expected(&self, pages: Range<usize>) -> Vec<u8> {
        pages.flat_map(|page| [self.content[page]; PAGE]).collect()
    }

    /// New pages where others were: the mapping changes, the addresses do not.
    fn remap(&mut self, pages: Range<usize>) {
        let (start, bytes) = (self.at(pages.start), pages.len() * PAGE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: replaces pages of the arena's own mapping, to which no reference exists; in one step, for
        // another thread's memory would be put into a gap.
        unsafe {
            let at = std::ptr::with_exposed_provenance_mut(start);
            assert_eq!(libc::mmap(at, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0), at);
        }
    }

    /// Moves the pages away and others, from elsewhere, to where they were.
    fn move_in(&mut self, pages: Range<usize>) {
        let (start, bytes) = (self.at(pages.start), pages.len() * PAGE);
        let target: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(start);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, moved over pages of the arena's own mapping, to which no reference exists.
        let at = unsafe {
            let from =
                libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(from, libc::MAP_FAILED);
            libc::mremap(from, bytes, bytes, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, target)
        };
        assert_eq!(at, target);
    }

    fn drop_content(&self, pages: Range<usize>) {
        // SAFETY: the arena's own pages, written anew before they are read.
        unsafe { advise(self.at(pages.start), pages.len() * PAGE, Advice::DontNeed) }.unwrap();
    }

    /// A child that ends at once: for as long as it lives, pages are shared, and the first to write one gets
    /// another.
    fn fork(&mut self) {
        // SAFETY: the child calls nothing but `_exit`.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(0);
            }
            assert!(child > 0);
            // The parent writes while the child is, or may be, there.
            let pages = self.content.len();
            self.write(0..pages);
            assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        }
    }
}

/// Numbers that look random, the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % n
    }

    fn pages(&mut self, of: usize) -> Range<usize> {
        let first = self.below(of);
        first..(first + 1 + self.below(12)).min(of)
    }
}

/// How changes to mappings are reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tells {
    NoOne,
    Program,
    Kernel,
}

/// Sends from an arena whose mappings change in every way. Returns how many sends carried what was not there
/// any more.
fn storm(seed: u64, steps: usize, tells: Tells) -> usize {
    const PAGES: usize = 96;
    let (mut dice, mut arena, mut wire) = (Dice(seed), Arena::new(PAGES), Wire::open());
    let mut pins = pins(PAGES * PAGE / 2);
    let all = arena.at(0)..arena.at(PAGES);
    let mut stale = 0;
    if tells == Tells::Kernel {
        assert!(pins.watch(&all), "this kernel lets a process watch its memory");
    }
    for _ in 0..steps {
        let pages = dice.pages(PAGES);
        match dice.below(12) {
            0..6 => {
                let mut gone = false;
                pins.catch_up(|_| gone = true);
                // What is mapped there instead is not watched yet; writes to it since then do not count.
                if gone {
                    assert!(tells == Tells::Kernel && pins.watch(&all));
                }
                let got = wire.send(&mut pins, arena.at(pages.start), pages.len() * PAGE);
                stale += usize::from(got != arena.expected(pages));
                continue;
            }
            6 | 7 => {
                arena.write(pages);
                continue;
            }
            8 => arena.remap(pages.clone()),
            9 => arena.move_in(pages.clone()),
            10 => arena.drop_content(pages.clone()),
            _ if dice.below(8) == 0 => {
                arena.fork();
                continue;
            }
            _ => continue,
        }
        if tells == Tells::Program {
            pins.invalidate(arena.at(pages.start), pages.len() * PAGE);
        }
        arena.write(pages);
    }
    let counts = pins.counts();
    assert!(counts.hits > 0 && counts.misses > 0 && counts.unpinned > 0, "{counts:?}");
    stale
}

#[test]
fn no_send_carries_pages_that_are_gone_whatever_happens_to_the_mappings() {
    if !possible() {
        return;
    }
    for seed in 1..=4 {
        for tells in [Tells::Program, Tells::Kernel] {
            assert_eq!(storm(seed, 1500, tells), 0, "seed {seed}, {tells:?}");
        }
    }
}

/// Many threads unmap at once, faster than any reader catches up: what was not remembered counts as changed.
#[test]
fn a_rank_that_misses_changes_takes_everything_as_changed() {
    if !possible() {
        return;
    }
    let mut pins = pins(1 << 20);
    let (arena, elsewhere) = (Arena::new(4), Arena::new(1000));
    assert!(pins.watch(&(arena.at(0)..arena.at(4))) && pins.watch(&(elsewhere.at(0)..elsewhere.at(1000))));
    let held = pins.acquire(arena.at(0), PAGE).unwrap();
    pins.release(held);
    std::thread::scope(|scope| {
        for part in 0..4 {
            let elsewhere = &elsewhere;
            scope.spawn(move || {
                (0..250).for_each(|page| elsewhere.drop_content(part * 250 + page..part * 250 + page + 1))
            });
        }
    });
    let mut gone = Vec::new();
    pins.catch_up(|range| gone.push(range));
    assert_eq!((pins.pinned_bytes(), gone.len()), (0, 1), "a thousand changes are more than are remembered");
    assert_eq!(gone[0], 0..ADDRESSES);
}

/// A thread that goes on after `munmap` finds the change written down, however late the watcher is.
#[test]
fn a_change_is_known_when_the_call_that_made_it_returns() {
    if !possible() {
        return;
    }
    let mut pins = pins(1 << 20);
    let mut arena = Arena::new(8);
    for round in 0..2000 {
        assert!(pins.watch(&(arena.at(0)..arena.at(8))));
        let held = pins.acquire(arena.at(1), PAGE).unwrap();
        pins.release(held);
        match round % 3 {
            0 => arena.remap(1..2),
            1 => arena.move_in(0..4),
            _ => arena.drop_content(1..3),
        }
        pins.catch_up(|_| {});
        assert_eq!(pins.pinned_bytes(), 0, "round {round}");
    }
}

/// What cannot be watched is not said to be.
#[test]
fn files_and_holes_are_not_watched() {
    let mut pins = pins(1 << 20);
    let arena = Arena::new(4);
    // SAFETY: pages of the arena's own mapping, to which no reference exists.
    assert_eq!(unsafe { libc::munmap(arena.mapping.at(2 * PAGE).cast(), PAGE) }, 0);
    assert!(!pins.watch(&(arena.at(0)..arena.at(4))));
    assert!(pins.watch(&(arena.at(0)..arena.at(2))));
    static CONSTANT: [u8; PAGE] = [7; PAGE];
    let start = CONSTANT.as_ptr().addr();
    assert!(!pins.watch(&(start..start + PAGE)));
}

#[test]
fn without_invalidation_old_pages_are_sent() {
    if !possible() {
        return;
    }
    assert!(storm(1, 1500, Tells::NoOne) > 0);
}

#[test]
fn a_page_that_was_dropped_is_sent_again_only_if_no_rank_says_so() {
    if !possible() {
        return;
    }
    for tells in [false, true] {
        let (mut arena, mut wire, mut pins) = (Arena::new(4), Wire::open(), pins(1 << 20));
        let old = wire.send(&mut pins, arena.at(1), PAGE);
        assert_eq!(old, arena.expected(1..2));
        arena.remap(1..2);
        if tells {
            pins.invalidate(arena.at(1), PAGE);
        }
        arena.write(1..2);
        let got = wire.send(&mut pins, arena.at(1), PAGE);
        assert_eq!(got, if tells { arena.expected(1..2) } else { old });
    }
}

#[test]
fn memory_that_cannot_be_pinned_is_refused_and_nothing_is_kept() {
    if !possible() {
        return;
    }
    let mut pins = pins(1 << 20);
    assert!(matches!(
        pins.acquire(PAGE, PAGE),
        Err(PinError::Kernel(error)) if error.raw_os_error() == Some(libc::EFAULT)
    ));
    assert!(matches!(pins.acquire(PAGE, 0), Err(PinError::Nothing)));
    assert!(matches!(pins.acquire(PAGE, 2 << 20), Err(PinError::Refused(Refused::Allowance { .. }))));
    assert_eq!(pins.pinned_bytes(), 0);
}

/// What an unprivileged user meets on registering more than may be locked.
#[test]
fn memory_that_the_limit_forbids_to_pin_is_refused_with_a_hint() {
    let says = |errno| PinError::Kernel(io::Error::from_raw_os_error(errno)).to_string();
    assert!(says(libc::ENOMEM).contains("ulimit -l") && says(libc::EPERM).contains("ulimit -l"));
    assert!(!says(libc::EFAULT).contains("ulimit"));
}
