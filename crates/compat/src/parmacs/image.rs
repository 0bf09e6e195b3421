//! What a created process takes over from its creator besides shared memory: the program's variables and its
//! `malloc` memory, byte by byte. Pieces of zeroes, which large variables mostly are, are neither sent nor
//! kept.
//!
//! That is sound only if every process has the program and its libraries at the same addresses. So address
//! randomisation is turned off, and [`Fingerprint`] tells whether that worked. Libraries' own variables are
//! not carried.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStringExt;

use object::{Object as _, ObjectSymbol as _, SymbolKind};

/// Where `malloc` memory of the program lies, in every process, and its limit.
pub(super) const HEAP_BASE: usize = 0x1800_0000_0000;
pub(super) const HEAP_BYTES: usize = 64 << 30;

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
    static mut program_invocation_name: *mut c_char;
    static mut program_invocation_short_name: *mut c_char;
}

/// What must be equal for the image to mean the same in two processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fingerprint {
    /// Of the addresses of the program and its libraries.
    pub layout: u64,
    /// Of the program's file.
    pub file: u64,
}

impl Fingerprint {
    pub fn here(data: &Data) -> std::io::Result<Self> {
        let mut layout = DefaultHasher::new();
        (data.start, data.bytes).hash(&mut layout);
        // SAFETY: the callback is called before this returns, with the pointer that it expects.
        unsafe { libc::dl_iterate_phdr(Some(add_object), (&raw mut layout).cast()) };
        let mut file = DefaultHasher::new();
        std::fs::read("/proc/self/exe")?.hash(&mut file);
        Ok(Self { layout: layout.finish(), file: file.finish() })
    }
}

unsafe extern "C" fn add_object(info: *mut libc::dl_phdr_info, _: usize, hasher: *mut c_void) -> c_int {
    // SAFETY: the loader gives a valid object; the pointer is that of `Fingerprint::here`.
    let (info, hasher) = unsafe { (&*info, &mut *hasher.cast::<DefaultHasher>()) };
    (info.dlpi_addr, info.dlpi_phnum).hash(hasher);
    0
}

/// Starts this program again without address randomisation, unless it is off. Returns if it is off, or with
/// the reason if it cannot be turned off.
pub(super) fn fix_addresses(argv: *const *const c_char) -> Result<(), String> {
    const ASK: libc::c_ulong = 0xffff_ffff;
    // SAFETY: asks only.
    let now = unsafe { libc::personality(ASK) };
    if now & libc::ADDR_NO_RANDOMIZE != 0 {
        return Ok(());
    }
    // SAFETY: concerns only programs that this process starts.
    if now < 0
        // SAFETY: as above.
        || unsafe { libc::personality(libc::c_ulong::from((now | libc::ADDR_NO_RANDOMIZE).cast_unsigned())) }
            < 0
    {
        return Err(format!("personality: {}", std::io::Error::last_os_error()));
    }
    let path = std::env::current_exe().map_err(|error| error.to_string())?;
    let path = CString::new(path.into_os_string().into_vec()).map_err(|error| error.to_string())?;
    // SAFETY: the arguments that this program was started with, as its first instructions got them.
    unsafe { libc::execv(path.as_ptr(), argv) };
    Err(format!("cannot start the program again: {}", std::io::Error::last_os_error()))
}

/// The program's variables: initialised data and what follows.
#[derive(Clone, Copy)]
pub(super) struct Data {
    pub start: usize,
    pub bytes: usize,
}

/// The unit in which variables are saved, and left out where they are zero.
const PIECE: usize = 4096;

/// Variables at some moment: the pieces that were not all zero, by their numbers.
pub(super) type Snapshot = BTreeMap<usize, Box<[u8; PIECE]>>;

impl Data {
    /// Bytes for the bits that say which pieces an image has.
    pub fn bits_bytes(self) -> usize {
        self.bytes.div_ceil(PIECE).div_ceil(64) * 8
    }

    /// Calls `each` with the number and the content of each piece; zeroes follow the last variable.
    fn pieces(self, mut each: impl FnMut(usize, &[u8; PIECE])) {
        let mut content = [0; PIECE];
        for (number, at) in (0..self.bytes).step_by(PIECE).enumerate() {
            let bytes = PIECE.min(self.bytes - at);
            content[bytes..].fill(0);
            let from = std::ptr::with_exposed_provenance::<u8>(self.start + at);
            // SAFETY: the program's own data, which is always readable; the array has room for a piece.
            unsafe { std::ptr::copy_nonoverlapping(from, content.as_mut_ptr(), bytes) };
            each(number, &content);
        }
    }

    /// Writes them to `to`, but for pieces of zeroes, and to `bits` which pieces those are not.
    ///
    /// # Safety
    /// `to` has room for `bytes` bytes, `bits` for `bits_bytes()`, aligned to 8.
    pub unsafe fn save(self, to: *mut u8, bits: *mut u64) {
        // SAFETY: as the caller promises.
        unsafe { bits.write_bytes(0, self.bits_bytes() / 8) };
        self.pieces(|number, content| {
            if content == &[0; PIECE] {
                return;
            }
            let bytes = PIECE.min(self.bytes - number * PIECE);
            // SAFETY: as the caller promises.
            unsafe {
                std::ptr::copy_nonoverlapping(content.as_ptr(), to.add(number * PIECE), bytes);
                *bits.add(number / 64) |= 1 << (number % 64);
            }
        });
    }

    /// Addresses of variables that point into this thread's stack, which the image does not have. The C
    /// library's own do not count.
    pub fn pointers_to_stack(self) -> Vec<usize> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let range = maps
            .lines()
            .find(|line| line.ends_with("[stack]"))
            .and_then(|line| line.split_once(' '))
            .and_then(|(range, _)| {
                let (start, end) = range.split_once('-')?;
                Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
            });
        let Some(stack) = range else { return Vec::new() };
        let own = [
            (&raw const environ).addr(),
            (&raw const program_invocation_name).addr(),
            (&raw const program_invocation_short_name).addr(),
        ];
        let words = (self.start.next_multiple_of(8)..self.start + self.bytes - 7).step_by(8);
        // SAFETY: aligned words of the program's data, which is always readable.
        let value = |&at: &usize| unsafe { std::ptr::with_exposed_provenance::<usize>(at).read_volatile() };
        words.filter(|at| stack.contains(&value(at)) && !own.contains(at)).collect()
    }

    /// As they are now.
    pub fn snapshot(self) -> Snapshot {
        let mut snapshot = Snapshot::new();
        self.pieces(|number, content| {
            if content != &[0; PIECE] {
                snapshot.insert(number, Box::new(*content));
            }
        });
        snapshot
    }

    /// Calls `each` with the number of each word that differs from `before`.
    pub fn changed_words(self, before: &Snapshot, mut each: impl FnMut(usize)) {
        self.pieces(|number, now| {
            let before = before.get(&number).map_or(&[0; PIECE], |piece| piece);
            if now != before {
                let pairs = now.chunks(8).zip(before.chunks(8)).enumerate();
                let changed = pairs.filter(|(_, (now, before))| now != before);
                changed.for_each(|(word, _)| each(number * (PIECE / 8) + word));
            }
        });
    }

    /// Replaces the variables by an image. Pointers to this process's own environment stay.
    ///
    /// # Safety
    /// `from` and `bits` are what [`Data::save`] wrote in a process of the same [`Fingerprint`]; nothing of
    /// this program runs.
    pub unsafe fn load(self, from: *const u8, bits: *const u64) {
        // SAFETY: the C library's own variables, which may lie in the program's data.
        let own = unsafe { (environ, program_invocation_name, program_invocation_short_name) };
        self.pieces(|number, now| {
            let at = number * PIECE;
            let to = std::ptr::with_exposed_provenance_mut::<u8>(self.start + at);
            let bytes = PIECE.min(self.bytes - at);
            // SAFETY: the program's own data, which ends there or later; else as the caller promises.
            unsafe {
                if *bits.add(number / 64) >> (number % 64) & 1 != 0 {
                    std::ptr::copy_nonoverlapping(from.add(at), to, bytes);
                } else if now != &[0; PIECE] {
                    to.write_bytes(0, bytes);
                }
            }
        });
        // SAFETY: as above.
        unsafe { (environ, program_invocation_name, program_invocation_short_name) = own };
    }
}

/// The variables by name, as far as the program's file has them.
pub(super) struct Variables {
    /// First byte and the one after the last, counted from the first variable, and the name. Sorted.
    by_start: Vec<(u64, u64, String)>,
}

impl Variables {
    pub fn of_this_program() -> Self {
        Self { by_start: Self::read().unwrap_or_default() }
    }

    fn read() -> Option<Vec<(u64, u64, String)>> {
        let file = std::fs::read("/proc/self/exe").ok()?;
        let file = object::File::parse(&*file).ok()?;
        let base = file.symbols().find(|symbol| symbol.name() == Ok("__data_start"))?.address();
        let mut by_start: Vec<_> = file
            .symbols()
            .filter(|symbol| symbol.kind() == SymbolKind::Data && symbol.size() != 0)
            .filter_map(|symbol| {
                let start = symbol.address().checked_sub(base)?;
                Some((start, start + symbol.size(), symbol.name().ok()?.to_owned()))
            })
            .collect();
        by_start.sort_unstable();
        Some(by_start)
    }

    /// The variable that has a byte of `[from, to)`, which is short.
    pub fn find(&self, from: u64, to: u64) -> Option<&str> {
        let end = self.by_start.partition_point(|variable| variable.0 < to);
        let (_, last, name) = self.by_start[..end].last()?;
        (*last > from).then_some(name)
    }
}

/// Maps the range for `malloc` memory: addresses only.
pub(super) fn map_heap() -> std::io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let at = std::ptr::with_exposed_provenance_mut(HEAP_BASE);
    // SAFETY: a new mapping that replaces none.
    let got = unsafe { libc::mmap(at, HEAP_BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if got == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
