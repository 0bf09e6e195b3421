//! stdio: a stream's buffer lies in memory of our own, which never leaves; large reads and writes go past it, so their buffers are kept resident.

use std::ffi::{c_char, c_int, c_void};

use libc::FILE;

use crate::agent::Guard;
use crate::real::real;

const BUFFER_BYTES: usize = 16 << 10;

/// A buffer that nobody manages: a mapping of its own, too small for the agent to take over.
fn buffer() -> *mut c_char {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice. It stays with the stream for good: a stream that is closed may still
    // be writing it out.
    let at = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            0usize,
            BUFFER_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0usize,
        )
    };
    if at == -1 { std::ptr::null_mut() } else { std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or(0)) }
}

fn settle(stream: *mut FILE, mode: c_int) -> *mut FILE {
    if !stream.is_null() {
        let buffer = buffer();
        if !buffer.is_null() {
            // SAFETY: a stream that has just been opened, and a buffer of this size.
            unsafe { libc::setvbuf(stream, buffer, mode, BUFFER_BYTES) };
        }
    }
    stream
}

pub fn settle_standard_streams() {
    for (name, fd) in [(c"stdin", 0), (c"stdout", 1)] {
        // SAFETY: a terminated name.
        let stream = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.cast::<*mut FILE>();
        if !stream.is_null() {
            // SAFETY: the C library's own variable; isatty has no preconditions.
            unsafe { settle(*stream, if libc::isatty(fd) == 1 { libc::_IOLBF } else { libc::_IOFBF }) };
        }
    }
}

macro_rules! open_streams {
    ($($name:ident, $text:literal, ($($arg:ident: $type:ty),*);)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> *mut FILE {
            let next = real!($text, fn($($type),*) -> *mut FILE);
            $crate::streams::touch_names(&[$($crate::streams::Name::from($arg)),*]);
            // SAFETY: the caller's own arguments.
            settle(unsafe { next($($arg),*) }, libc::_IOFBF)
        }
    )*};
}

/// An argument that may be a string.
pub struct Name(*const c_char);

impl From<*const c_char> for Name {
    fn from(text: *const c_char) -> Self {
        Self(text)
    }
}
impl From<c_int> for Name {
    fn from(_: c_int) -> Self {
        Self(std::ptr::null())
    }
}

pub fn touch_names(names: &[Name]) {
    for name in names {
        crate::agent::touch_text(name.0);
    }
}

open_streams! {
    fopen, c"fopen", (path: *const c_char, mode: *const c_char);
    fopen64, c"fopen64", (path: *const c_char, mode: *const c_char);
    fdopen, c"fdopen", (fd: c_int, mode: *const c_char);
    popen, c"popen", (command: *const c_char, mode: *const c_char);
}

macro_rules! large {
    ($($name:ident, $text:literal, $pointer:ty, $write:literal;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(buffer: $pointer, size: usize, count: usize, stream: *mut FILE) -> usize {
            const PIECE: usize = 1 << 20;
            let next = real!($text, fn($pointer, usize, usize, *mut FILE) -> usize);
            if size == 0 || count == 0 {
                return 0;
            }
            let (mut done, each) = (0, (PIECE / size).max(1));
            while done < count {
                let part = (count - done).min(each);
                let start = buffer.wrapping_byte_add(done * size);
                let guard = Guard::new(start.cast::<c_void>(), part * size, $write);
                // SAFETY: the caller's own arguments, a part of the buffer at a time.
                let moved = unsafe { next(start, size, part, stream) };
                drop(guard);
                done += moved;
                if moved < part {
                    break;
                }
            }
            done
        }
    )*};
}

large! {
    fread, c"fread", *mut c_void, true;
    fread_unlocked, c"fread_unlocked", *mut c_void, true;
    fwrite, c"fwrite", *const c_void, false;
    fwrite_unlocked, c"fwrite_unlocked", *const c_void, false;
}

macro_rules! directories {
    ($($name:ident, $text:literal;)*) => {$(
        /// As the C library's function of this name: its buffer lies behind the directory's structure.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(directory: *mut c_void) -> *mut c_void {
            const ROOM: usize = (32 << 10) + 64;
            let next = real!($text, fn(*mut c_void) -> *mut c_void);
            let guard = Guard::new(directory, ROOM, true);
            // SAFETY: the caller's own argument.
            let entry = unsafe { next(directory) };
            drop(guard);
            entry
        }
    )*};
}

directories! {
    readdir, c"readdir";
    readdir64, c"readdir64";
}
