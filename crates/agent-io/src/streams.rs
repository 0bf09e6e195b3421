//! stdio: a stream's buffer lies in memory of our own, which is never paged out. Large reads and writes
//! bypass it, so their buffers are kept resident.

use std::ffi::{c_char, c_int, c_void};

use libc::FILE;

use crate::agent::{self, Guard};
use crate::calls::{PIECE, TRIES};
use crate::real::real;

/// Where `struct _IO_FILE` of the GNU C library has the start of its buffer; part of its ABI since 2.1.
const BUFFER_FIELD: usize = 56;

fn use_our_buffer(stream: *mut FILE, mode: c_int) -> *mut FILE {
    if !stream.is_null()
        && let Some((buffer, bytes)) = agent::stream_buffer()
    {
        // SAFETY: a stream that has no buffer yet, and a buffer of this size.
        let set = unsafe { set_buffer(stream, buffer, mode, bytes) };
        if set != 0 {
            agent::stream_closed(buffer.cast());
        }
    }
    stream
}

fn buffer_of(stream: *mut FILE) -> *const c_void {
    if stream.is_null() {
        std::ptr::null()
    } else {
        // SAFETY: an open stream, which has this field.
        unsafe { stream.cast::<u8>().add(BUFFER_FIELD).cast::<*const c_void>().read() }
    }
}

unsafe fn set_buffer(stream: *mut FILE, buffer: *mut c_char, mode: c_int, bytes: usize) -> c_int {
    let next = real!(c"setvbuf", fn(*mut FILE, *mut c_char, c_int, usize) -> c_int);
    // SAFETY: the caller's own arguments.
    unsafe { next(stream, buffer, mode, bytes) }
}

/// As `setvbuf`. A program may not look into its buffer until the stream is closed, so a buffer of ours
/// serves as well.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setvbuf(stream: *mut FILE, buffer: *mut c_char, mode: c_int, bytes: usize) -> c_int {
    let had = buffer_of(stream);
    let ours = if mode == libc::_IONBF { None } else { agent::stream_buffer() };
    let (to, room) = ours.unwrap_or((buffer, bytes));
    // SAFETY: the caller's own stream; a buffer of this size.
    let set = unsafe { set_buffer(stream, to, mode, room) };
    agent::stream_closed(if set == 0 { had } else { to.cast() });
    set
}

/// As `setbuf`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setbuf(stream: *mut FILE, buffer: *mut c_char) {
    let (mode, bytes) =
        if buffer.is_null() { (libc::_IONBF, 0) } else { (libc::_IOFBF, libc::BUFSIZ as usize) };
    // SAFETY: the caller's own arguments.
    unsafe { setvbuf(stream, buffer, mode, bytes) };
}

macro_rules! close_streams {
    ($($name:ident, $text:literal;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(stream: *mut FILE) -> c_int {
            let had = buffer_of(stream);
            let next = real!($text, fn(*mut FILE) -> c_int);
            // SAFETY: the caller's own argument.
            let result = unsafe { next(stream) };
            agent::stream_closed(had);
            result
        }
    )*};
}

close_streams! {
    fclose, c"fclose";
    pclose, c"pclose";
}

macro_rules! reopen_streams {
    ($($name:ident, $text:literal;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
            let had = buffer_of(stream);
            let next = real!($text, fn(*const c_char, *const c_char, *mut FILE) -> *mut FILE);
            touch_names(&[Name(path), Name(mode)]);
            // SAFETY: the caller's own arguments.
            let stream = unsafe { next(path, mode, stream) };
            let has = buffer_of(stream);
            if has.is_null() || has != had {
                agent::stream_closed(had);
                return use_our_buffer(stream, libc::_IOFBF);
            }
            stream
        }
    )*};
}

reopen_streams! {
    freopen, c"freopen";
    freopen64, c"freopen64";
}

pub fn make_standard_streams_ours() {
    for (name, fd) in [(c"stdin", 0), (c"stdout", 1)] {
        // SAFETY: a terminated name.
        let stream = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.cast::<*mut FILE>();
        if !stream.is_null() {
            // SAFETY: the C library's own variable; isatty has no preconditions.
            unsafe {
                use_our_buffer(*stream, if libc::isatty(fd) == 1 { libc::_IOLBF } else { libc::_IOFBF })
            };
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
            use_our_buffer(unsafe { next($($arg),*) }, libc::_IOFBF)
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

unsafe extern "C" {
    fn flockfile(stream: *mut FILE);
    fn funlockfile(stream: *mut FILE);
    fn clearerr_unlocked(stream: *mut FILE);
    fn ferror_unlocked(stream: *mut FILE) -> c_int;
}

/// Moves `bytes` bytes by `call(at, bytes)`, piece by piece. A failure for an absent page is not the stream's
/// error: the rest is moved then.
fn in_pieces(
    stream: *mut FILE,
    start: *const c_void,
    bytes: usize,
    write: bool,
    mut call: impl FnMut(usize, usize) -> usize,
) -> usize {
    let (mut done, mut tries) = (0, 0);
    // SAFETY: the program's own stream, which is open.
    let had_error = unsafe { ferror_unlocked(stream) } != 0;
    while done < bytes {
        let part = (bytes - done).min(PIECE);
        let at = start.wrapping_byte_add(done);
        let guard = Guard::new(at, part, write);
        let moved = call(done, part);
        drop(guard);
        done += moved;
        if moved == part {
            continue;
        }
        // SAFETY: as above.
        let failed = !had_error
            && unsafe { ferror_unlocked(stream) } != 0
            && std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT);
        tries += 1;
        if !failed || tries > TRIES || !agent::touch(at.wrapping_byte_add(moved), part - moved, write) {
            break;
        }
        // SAFETY: as above.
        unsafe { clearerr_unlocked(stream) };
    }
    done
}

macro_rules! large {
    ($($name:ident, $text:literal, $pointer:ty, $write:literal, $locked:literal;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(buffer: $pointer, size: usize, count: usize, stream: *mut FILE) -> usize {
            let next = real!($text, fn($pointer, usize, usize, *mut FILE) -> usize);
            let Some(bytes) = size.checked_mul(count).filter(|bytes| *bytes > 0) else {
                // SAFETY: the caller's own arguments.
                return unsafe { next(buffer, size, count, stream) };
            };
            if $locked {
                // SAFETY: the caller's own stream. Its lock may be taken again by the thread that has it.
                unsafe { flockfile(stream) };
            }
            // SAFETY: the caller's own arguments, a part of the buffer at a time.
            let done = in_pieces(stream, buffer.cast(), bytes, $write, |at, part| unsafe { next(buffer.wrapping_byte_add(at), 1, part, stream) });
            if $locked {
                // SAFETY: taken above.
                unsafe { funlockfile(stream) };
            }
            done / size
        }
    )*};
}

large! {
    fread, c"fread", *mut c_void, true, true;
    fread_unlocked, c"fread_unlocked", *mut c_void, true, false;
    fwrite, c"fwrite", *const c_void, false, true;
    fwrite_unlocked, c"fwrite_unlocked", *const c_void, false, false;
}

macro_rules! texts {
    ($($name:ident, $write:ident;)*) => {$(
        /// As the C library's function of this name: a long text bypasses the stream's buffer.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(text: *const c_char, stream: *mut FILE) -> c_int {
            // SAFETY: the caller's own arguments; the text ends with a zero byte.
            unsafe {
                let bytes = libc::strlen(text);
                if $write(text.cast(), 1, bytes, stream) == bytes { 1 } else { libc::EOF }
            }
        }
    )*};
}

texts! {
    fputs, fwrite;
    fputs_unlocked, fwrite_unlocked;
}

macro_rules! directories {
    ($($name:ident, $text:literal;)*) => {$(
        /// As the C library's function of this name: its buffer lies after the directory's structure.
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
