//! A CPU that is kept from resting, by a thread of another process: a page that both share.
//!
//! ```text
//!   pager: beat, once a fault ---> words: beats, cpu, asleep, crowded <--- keep: looks while there are beats
//! ```
//!
//! The thread belongs to another process, because in this one every page that leaves would have to be
//! announced to the CPU that it looks on.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::OS_PAGE_BYTES;
use crate::memory::{Mapping, SharedObject};

/// Without a beat for so long, the thread sleeps.
const REST: Duration = Duration::from_millis(1);
/// So often the thread asks whether others have had the CPU for so many percent of the time. The private
/// store's work for the same faults takes less, also while a program fills its memory, and so do the threads
/// that come by until they stay elsewhere.
const WINDOW: Duration = Duration::from_millis(100);
const CROWDED: u32 = 75;
/// Between two looks others have had the CPU for so long, or not at all.
const AWAY: Duration = Duration::from_micros(50);
/// The niceness of a thread that runs only where others leave the CPU, but for about a hundredth of the time.
const LAST: i32 = 19;

#[repr(C)]
struct Words {
    beats: AtomicU32,
    /// Which CPU to keep awake.
    cpu: AtomicU32,
    /// The thread waits to be woken by a beat.
    asleep: AtomicU32,
    /// How often the thread has found others on the CPU.
    crowded: AtomicU32,
}

/// The shared page.
#[derive(Debug)]
pub struct AwakePage(Mapping);

impl AwakePage {
    /// A new page, for the process whose thread looks.
    ///
    /// # Errors
    /// As making and mapping a file.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        Self::map(&SharedObject::create(path, OS_PAGE_BYTES)?)
    }

    /// The page that another process has made.
    ///
    /// # Errors
    /// As opening and mapping a file.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        Self::map(&SharedObject::open(path, OS_PAGE_BYTES)?)
    }

    fn map(object: &SharedObject) -> std::io::Result<Self> {
        let mapping = Mapping::shared(object).map_err(std::io::Error::other)?;
        mapping.allow(mapping.start(), mapping.bytes()).map_err(std::io::Error::from_raw_os_error)?;
        Ok(Self(mapping))
    }

    fn words(&self) -> &Words {
        // SAFETY: a page of our own mapping, open for reading and writing for as long as `self`; any bytes
        // are words, and other processes change them as atomics.
        unsafe { &*self.0.at(0).cast::<Words>() }
    }

    /// The CPU is to be kept awake for another while. At most a system call, where the thread sleeps.
    pub fn beat(&self, cpu: usize) {
        let words = self.words();
        words.cpu.store(u32::try_from(cpu).unwrap_or(u32::MAX), Ordering::Relaxed);
        words.beats.fetch_add(1, Ordering::SeqCst);
        if words.asleep.swap(0, Ordering::SeqCst) != 0 {
            // SAFETY: wakes the thread that may wait on this word.
            unsafe { libc::syscall(libc::SYS_futex, words.beats.as_ptr(), libc::FUTEX_WAKE, 1) };
        }
    }

    /// How often the thread has found others on the CPU and left it to them, modulo 2^32.
    #[must_use]
    pub fn crowded(&self) -> u32 {
        self.words().crowded.load(Ordering::Acquire)
    }

    /// Keeps the CPU awake while there are beats, with what others leave of it, for as long as the process
    /// lives.
    pub fn keep(&self) -> ! {
        crate::thread::be_nice(LAST);
        loop {
            self.wait();
            self.look();
        }
    }

    /// Until the next beat.
    fn wait(&self) {
        let words = self.words();
        words.asleep.store(1, Ordering::SeqCst);
        let beats = words.beats.load(Ordering::SeqCst);
        while words.asleep.load(Ordering::SeqCst) != 0 {
            // SAFETY: waits while the word is what it was; a beat changes it, and wakes.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    words.beats.as_ptr(),
                    libc::FUTEX_WAIT,
                    beats,
                    std::ptr::null::<libc::timespec>(),
                );
            }
        }
    }

    /// Looks for beats. Ends when none come, or when others use the CPU.
    fn look(&self) {
        let words = self.words();
        let start = Instant::now();
        let (mut last, mut window, mut last_beat) = (start, start, start);
        let mut away = Duration::ZERO;
        let (mut beats, mut cpu) = (words.beats.load(Ordering::Acquire), u32::MAX);
        loop {
            let wanted = words.cpu.load(Ordering::Relaxed);
            if wanted != cpu {
                cpu = wanted;
                // Refused where there is no such CPU: then any will do.
                let _ = crate::thread::pin_to_cpu(cpu as usize);
            }
            for _ in 0..64 {
                std::hint::spin_loop();
            }
            let now = Instant::now();
            let since = now.duration_since(last);
            if since > AWAY {
                away += since;
            }
            last = now;
            let before = std::mem::replace(&mut beats, words.beats.load(Ordering::Acquire));
            if beats != before {
                last_beat = now;
            } else if now.duration_since(last_beat) > REST {
                return;
            }
            if now.duration_since(window) > WINDOW {
                if away > now.duration_since(window) * CROWDED / 100 {
                    words.crowded.fetch_add(1, Ordering::Release);
                    return;
                }
                (window, away) = (now, Duration::ZERO);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_looks_while_there_are_beats_and_sleeps_after_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("awake");
        assert!(AwakePage::open(&path).is_err(), "there is none yet");
        let kept = AwakePage::create(&path).unwrap();
        let page = AwakePage::open(&path).unwrap();
        std::thread::spawn(move || kept.keep());
        let is_asleep = || page.words().asleep.load(Ordering::SeqCst) != 0;
        for _ in 0..3 {
            while !is_asleep() {
                std::thread::yield_now();
            }
            page.beat(0);
        }
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("awake");
        std::fs::write(&path, [0; 16]).unwrap();
        assert_eq!(AwakePage::open(&path).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    }
}
