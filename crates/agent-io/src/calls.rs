//! Reading, writing, and calls that take paths.
//!
//! A buffer is kept resident during the call. Large buffers go in pieces: a regular file is still read or
//! written to the end; anything else returns a short count, as it may at any time.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

use crate::agent::{Guard, touch, touch_text};
use crate::real::real;

/// Most bytes that are kept resident at a time.
pub const PIECE: usize = 1 << 20;
/// After this many tries, a page that leaves again and again is an error.
pub const TRIES: u32 = 1000;

type Size = usize;
type Signed = isize;

fn errno() -> c_int {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() }
}

fn set_errno(value: c_int) {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() = value }
}

/// Repeats a call that failed with EFAULT while `touch` finds something of ours to touch.
fn again(mut call: impl FnMut() -> Signed, mut touch: impl FnMut() -> bool) -> Signed {
    let mut tries = 0;
    loop {
        let result = call();
        if result >= 0 || errno() != libc::EFAULT || tries == TRIES {
            return result;
        }
        if !touch() {
            set_errno(libc::EFAULT);
            return result;
        }
        tries += 1;
    }
}

/// Moves a whole buffer by `call(at, bytes)`, piece by piece.
fn pieces(
    fd: c_int,
    buffer: *const c_void,
    bytes: Size,
    write: bool,
    mut call: impl FnMut(Size, Size) -> Signed,
) -> Signed {
    let mut done = 0;
    loop {
        let part = (bytes - done).min(PIECE);
        let start = buffer.wrapping_byte_add(done);
        let guard = Guard::new(start, part, write);
        let result = again(|| call(done, part), || touch(start, part, write));
        drop(guard);
        let Ok(moved) = Size::try_from(result) else {
            return if done > 0 { Signed::try_from(done).unwrap_or(Signed::MAX) } else { result };
        };
        done += moved;
        // A page that left in the middle of the call makes it short. If the file has more, the next piece
        // starts there; at its end the next piece brings nothing.
        let short = moved < part && !touch(start.wrapping_byte_add(moved), part - moved, write);
        if done >= bytes || moved == 0 || short || !is_regular(fd) {
            return Signed::try_from(done).unwrap_or(Signed::MAX);
        }
    }
}

fn is_regular(fd: c_int) -> bool {
    // SAFETY: plain data, filled by the call.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        libc::fstat(fd, &raw mut stat) == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFREG
    }
}

/// Most buffers of a vector that are kept resident at a time.
const GUARDED: usize = 16;

/// Moves the buffers of a vector by `call(vector, count, at)`, where `at` bytes were moved before: all at
/// once, as a datagram requires. If a page that left in the middle of the call made it short, and the
/// descriptor is a file, the rest follows in pieces.
fn vectors(
    fd: c_int,
    vector: *const libc::iovec,
    count: c_int,
    write: bool,
    mut call: impl FnMut(*const libc::iovec, c_int, Size) -> Signed,
) -> Signed {
    let result = {
        let _guards = guards(vector, count, write);
        again(|| call(vector, count, 0), || touch_all(vector, count, write))
    };
    let Ok(mut done) = Size::try_from(result) else { return result };
    let mut moved = done;
    while moved > 0 {
        let (rest, count) = rest_of(vector, count, done);
        // If the file has more, the next piece starts there; at its end the next piece brings nothing.
        if count == 0 || !touch_all(rest.as_ptr(), count, write) || !is_regular(fd) {
            break;
        }
        let _guards = guards(rest.as_ptr(), count, write);
        let result = again(|| call(rest.as_ptr(), count, done), || touch_all(rest.as_ptr(), count, write));
        moved = Size::try_from(result).unwrap_or(0);
        done += moved;
    }
    Signed::try_from(done).unwrap_or(Signed::MAX)
}

/// The next buffers of a vector of which `done` bytes were moved: at most as many as can be kept resident
/// together, and none that is empty.
fn rest_of(vector: *const libc::iovec, count: c_int, mut done: Size) -> ([libc::iovec; GUARDED], c_int) {
    let mut rest = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; GUARDED];
    let (mut used, mut room) = (0, PIECE);
    each(vector, count, |_, start, bytes| {
        let skipped = done.min(bytes);
        done -= skipped;
        let part = (bytes - skipped).min(room);
        if part > 0 && used < GUARDED {
            rest[used] = libc::iovec { iov_base: start.wrapping_byte_add(skipped).cast_mut(), iov_len: part };
            used += 1;
            // A buffer that was cut short must be the last.
            room = if part < bytes - skipped { 0 } else { room - part };
        }
    });
    (rest, c_int::try_from(used).expect("a few"))
}

/// Guards the buffers of a vector; the vector itself is touched.
fn guards(vector: *const libc::iovec, count: c_int, write: bool) -> [Option<Guard>; GUARDED] {
    let mut guards = [const { None }; GUARDED];
    each(vector, count, |index, start, bytes| {
        if let Some(slot) = guards.get_mut(index) {
            *slot = Some(Guard::new(start, bytes.min(PIECE), write));
        } else {
            touch(start, bytes.min(PIECE), write);
        }
    });
    guards
}

fn touch_all(vector: *const libc::iovec, count: c_int, write: bool) -> bool {
    let mut any = touch(vector.cast(), usize::try_from(count).unwrap_or(0) * size_of::<libc::iovec>(), false);
    each(vector, count, |_, start, bytes| any |= touch(start, bytes.min(PIECE), write));
    any
}

fn each(vector: *const libc::iovec, count: c_int, mut act: impl FnMut(usize, *const c_void, usize)) {
    if vector.is_null() {
        return;
    }
    for index in 0..usize::try_from(count).unwrap_or(0).min(1024) {
        // SAFETY: the program says that there are `count` entries.
        let entry = unsafe { vector.add(index).read() };
        act(index, entry.iov_base, entry.iov_len);
    }
}

macro_rules! move_bytes {
    ($($name:ident, $text:literal, $pointer:ty, $write:literal, ($($extra:ident: $type:ty),*), $offset:ident;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, buffer: $pointer, bytes: Size, $($extra: $type),*) -> Signed {
            let next = real!($text, fn(c_int, $pointer, Size, $($type),*) -> Signed);
            // SAFETY: the caller's own arguments, a part of the buffer at a time.
            pieces(fd, buffer.cast(), bytes, $write, |at, part| unsafe {
                next(fd, buffer.wrapping_byte_add(at), part, $(offset!($offset, $extra, at)),*)
            })
        }
    )*};
}

/// The argument with the position in the file advances with the pieces.
macro_rules! offset {
    (moves, $value:ident, $at:ident) => {
        $value + i64::try_from($at).unwrap_or(0)
    };
    (stays, $value:ident, $at:ident) => {
        $value
    };
}

move_bytes! {
    read, c"read", *mut c_void, true, (), stays;
    write, c"write", *const c_void, false, (), stays;
    pread, c"pread", *mut c_void, true, (offset: i64), moves;
    pread64, c"pread64", *mut c_void, true, (offset: i64), moves;
    pwrite, c"pwrite", *const c_void, false, (offset: i64), moves;
    pwrite64, c"pwrite64", *const c_void, false, (offset: i64), moves;
    recv, c"recv", *mut c_void, true, (flags: c_int), stays;
    send, c"send", *const c_void, false, (flags: c_int), stays;
}

/// As `__read_chk`, the checked form of `read`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, bytes: Size, room: Size) -> Signed {
    if bytes > room {
        // SAFETY: what the C library does about an overflow.
        unsafe { libc::abort() };
    }
    // SAFETY: the caller's own arguments.
    unsafe { read(fd, buffer, bytes) }
}

macro_rules! move_vectors {
    ($($name:ident, $text:literal, $write:literal, ($($extra:ident: $type:ty),*), $offset:ident;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, vector: *const libc::iovec, count: c_int, $($extra: $type),*) -> Signed {
            let next = real!($text, fn(c_int, *const libc::iovec, c_int, $($type),*) -> Signed);
            // SAFETY: the caller's own arguments, or what is left of them.
            vectors(fd, vector, count, $write, |vector, count, at| unsafe {
                let _ = at;
                next(fd, vector, count, $(offset!($offset, $extra, at)),*)
            })
        }
    )*};
}

move_vectors! {
    readv, c"readv", true, (), stays;
    writev, c"writev", false, (), stays;
    preadv, c"preadv", true, (offset: i64), moves;
    preadv64, c"preadv64", true, (offset: i64), moves;
    pwritev, c"pwritev", false, (offset: i64), moves;
    pwritev64, c"pwritev64", false, (offset: i64), moves;
    vmsplice, c"vmsplice", false, (flags: c_uint), stays;
}

/// As `recvfrom`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    bytes: Size,
    flags: c_int,
    address: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> Signed {
    let next = real!(
        c"recvfrom",
        fn(c_int, *mut c_void, Size, c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> Signed
    );
    let part = bytes.min(PIECE);
    let room = size_of::<libc::sockaddr_storage>();
    let guards = [
        Guard::new(buffer, part, true),
        Guard::new(address.cast(), room, true),
        Guard::new(length.cast(), 4, true),
    ];
    let touch =
        || touch(buffer, part, true) | touch(address.cast(), room, true) | touch(length.cast(), 4, true);
    // SAFETY: the caller's own arguments.
    let result = again(|| unsafe { next(fd, buffer, part, flags, address, length) }, touch);
    drop(guards);
    result
}

/// As `sendto`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    bytes: Size,
    flags: c_int,
    address: *const libc::sockaddr,
    length: libc::socklen_t,
) -> Signed {
    let next = real!(
        c"sendto",
        fn(c_int, *const c_void, Size, c_int, *const libc::sockaddr, libc::socklen_t) -> Signed
    );
    let guard = Guard::new(buffer, bytes.min(PIECE), false);
    let touch = || touch(buffer, bytes.min(PIECE), false) | touch(address.cast(), length as usize, false);
    // SAFETY: the caller's own arguments.
    let result = again(|| unsafe { next(fd, buffer, bytes, flags, address, length) }, touch);
    drop(guard);
    result
}

fn touch_message(message: *const libc::msghdr, write: bool) -> bool {
    let mut any = touch(message.cast(), size_of::<libc::msghdr>(), true);
    // SAFETY: the program says that this is a message header.
    if let Some(header) = unsafe { message.as_ref() } {
        any |= touch_all(header.msg_iov, c_int::try_from(header.msg_iovlen).unwrap_or(c_int::MAX), write);
        any |= touch(header.msg_name, header.msg_namelen as usize, write);
        any |= touch(header.msg_control, header.msg_controllen, write);
    }
    any
}

macro_rules! move_messages {
    ($($name:ident, $text:literal, $pointer:ty, $write:literal;)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(fd: c_int, message: $pointer, flags: c_int) -> Signed {
            let next = real!($text, fn(c_int, $pointer, c_int) -> Signed);
            // The header too, and all that it points to: the kernel writes these last, after it has received
            // the message, and the message is lost if it cannot.
            let header_stays = Guard::new(message.cast(), size_of::<libc::msghdr>(), true);
            // SAFETY: the program says that this is a message header.
            let guards = unsafe { message.as_ref() }.map(|header| {
                let name = Guard::new(header.msg_name, header.msg_namelen as usize, $write);
                let control = Guard::new(header.msg_control, header.msg_controllen, $write);
                (name, control, guards(header.msg_iov, c_int::try_from(header.msg_iovlen).unwrap_or(c_int::MAX), $write))
            });
            // SAFETY: the caller's own arguments.
            let result = again(|| unsafe { next(fd, message, flags) }, || touch_message(message, $write));
            drop((header_stays, guards));
            result
        }
    )*};
}

move_messages! {
    recvmsg, c"recvmsg", *mut libc::msghdr, true;
    sendmsg, c"sendmsg", *const libc::msghdr, false;
}

/// Calls whose arguments are strings and plain numbers.
macro_rules! with_paths {
    ($($name:ident, $text:literal, ($($arg:ident: $type:ty),*), [$($path:ident),*];)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            let next = real!($text, fn($($type),*) -> c_int);
            // SAFETY: the caller's own arguments.
            let result = again(|| unsafe { next($($arg),*) } as Signed, || false $(| touch_text($path))*);
            c_int::try_from(result).unwrap_or(-1)
        }
    )*};
}

with_paths! {
    open, c"open", (path: *const c_char, flags: c_int, mode: c_uint), [path];
    open64, c"open64", (path: *const c_char, flags: c_int, mode: c_uint), [path];
    openat, c"openat", (dir: c_int, path: *const c_char, flags: c_int, mode: c_uint), [path];
    openat64, c"openat64", (dir: c_int, path: *const c_char, flags: c_int, mode: c_uint), [path];
    creat, c"creat", (path: *const c_char, mode: c_uint), [path];
    access, c"access", (path: *const c_char, mode: c_int), [path];
    faccessat, c"faccessat", (dir: c_int, path: *const c_char, mode: c_int, flags: c_int), [path];
    chdir, c"chdir", (path: *const c_char), [path];
    mkdir, c"mkdir", (path: *const c_char, mode: c_uint), [path];
    mkdirat, c"mkdirat", (dir: c_int, path: *const c_char, mode: c_uint), [path];
    rmdir, c"rmdir", (path: *const c_char), [path];
    unlink, c"unlink", (path: *const c_char), [path];
    unlinkat, c"unlinkat", (dir: c_int, path: *const c_char, flags: c_int), [path];
    rename, c"rename", (from: *const c_char, to: *const c_char), [from, to];
    renameat, c"renameat", (from_dir: c_int, from: *const c_char, to_dir: c_int, to: *const c_char), [from, to];
    link, c"link", (from: *const c_char, to: *const c_char), [from, to];
    symlink, c"symlink", (from: *const c_char, to: *const c_char), [from, to];
    truncate, c"truncate", (path: *const c_char, bytes: c_long), [path];
    chmod, c"chmod", (path: *const c_char, mode: c_uint), [path];
    chown, c"chown", (path: *const c_char, user: c_uint, group: c_uint), [path];
}

/// Calls that fill a structure, perhaps of the file at a path.
macro_rules! that_fill {
    ($($name:ident, $text:literal, ($($arg:ident: $type:ty),*), $filled:ident, $bytes:expr, [$($path:ident),*];)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            let next = real!($text, fn($($type),*) -> c_int);
            let guard = Guard::new($filled.cast(), $bytes, true);
            // SAFETY: the caller's own arguments.
            let result = again(|| unsafe { next($($arg),*) } as Signed, || touch($filled.cast(), $bytes, true) $(| touch_text($path))*);
            drop(guard);
            c_int::try_from(result).unwrap_or(-1)
        }
    )*};
}

that_fill! {
    stat, c"stat", (path: *const c_char, to: *mut libc::stat), to, size_of::<libc::stat>(), [path];
    stat64, c"stat64", (path: *const c_char, to: *mut libc::stat64), to, size_of::<libc::stat64>(), [path];
    lstat, c"lstat", (path: *const c_char, to: *mut libc::stat), to, size_of::<libc::stat>(), [path];
    lstat64, c"lstat64", (path: *const c_char, to: *mut libc::stat64), to, size_of::<libc::stat64>(), [path];
    fstat, c"fstat", (fd: c_int, to: *mut libc::stat), to, size_of::<libc::stat>(), [];
    fstat64, c"fstat64", (fd: c_int, to: *mut libc::stat64), to, size_of::<libc::stat64>(), [];
    fstatat, c"fstatat", (dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int), to, size_of::<libc::stat>(), [path];
    fstatat64, c"fstatat64", (dir: c_int, path: *const c_char, to: *mut libc::stat64, flags: c_int), to, size_of::<libc::stat64>(), [path];
    poll, c"poll", (fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int), fds,
        usize::try_from(count).unwrap_or(0).min(PIECE / 8) * size_of::<libc::pollfd>(), [];
    epoll_wait, c"epoll_wait", (fd: c_int, events: *mut libc::epoll_event, most: c_int, timeout: c_int), events,
        usize::try_from(most).unwrap_or(0).min(PIECE / 16) * size_of::<libc::epoll_event>(), [];
    epoll_ctl, c"epoll_ctl", (fd: c_int, what: c_int, other: c_int, event: *mut libc::epoll_event), event, size_of::<libc::epoll_event>(), [];
    pipe, c"pipe", (ends: *mut c_int), ends, 8, [];
    pipe2, c"pipe2", (ends: *mut c_int, flags: c_int), ends, 8, [];
}

/// How a call uses the memory that a pointer argument leads to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Touch {
    /// The kernel reads it, or writes what can be requested again: handled after the call has failed.
    Late,
    /// A failed call would lose what the kernel writes (a connection, the status of a child): kept resident
    /// from before the call.
    Early,
}
use Touch::{Early, Late};

/// Calls that take structures. Each pointer comes with the bytes there. A system call's arguments are words,
/// and these functions pass them on unchanged.
macro_rules! words {
    ($($name:ident, $text:literal, ($($arg:ident),*), [$(($pointer:expr, $bytes:expr, $way:ident)),* $(,)?];)*) => {$(
        /// As the C library's function of this name.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: usize),*) -> usize {
            let next = real!($text, fn($(word!($arg)),*) -> usize);
            // SAFETY: the caller's own arguments.
            with_pointers(&[$((std::ptr::with_exposed_provenance($pointer), $bytes, $way)),*], || unsafe { next($($arg),*) })
        }
    )*};
}
macro_rules! word {
    ($arg:ident) => {
        usize
    };
}

fn with_pointers(pointers: &[(*const c_void, usize, Touch)], mut call: impl FnMut() -> usize) -> usize {
    const MOST: usize = 4;
    let mut guards = [const { None }; MOST];
    for (slot, (start, bytes, _)) in
        guards.iter_mut().zip(pointers.iter().filter(|pointer| pointer.2 == Early))
    {
        *slot = Some(Guard::new(*start, (*bytes).min(PIECE), true));
    }
    let mut tries = 0;
    loop {
        let result = call();
        // Results of 32 and of 64 bits both represent -1 like this.
        if result & 0xffff_ffff != 0xffff_ffff || errno() != libc::EFAULT || tries == TRIES {
            return result;
        }
        tries += 1;
        // All of them, because it is unknown which one it was.
        if pointers.iter().filter(|(start, bytes, _)| touch(*start, (*bytes).min(PIECE), true)).count() == 0 {
            set_errno(libc::EFAULT);
            return result;
        }
    }
}

const ADDRESS: usize = size_of::<libc::sockaddr_storage>();
const TIMES: usize = 2 * size_of::<libc::timespec>();
/// Larger than any structure that is not named here, and any option of a socket.
const STRUCTURE: usize = 1024;

words! {
    accept, c"accept", (fd, address, length), [(address, ADDRESS, Early), (length, 4, Early)];
    accept4, c"accept4", (fd, address, length, flags), [(address, ADDRESS, Early), (length, 4, Early)];
    bind, c"bind", (fd, address, length), [(address, ADDRESS, Late)];
    connect, c"connect", (fd, address, length), [(address, ADDRESS, Late)];
    getsockname, c"getsockname", (fd, address, length), [(address, ADDRESS, Late), (length, 4, Late)];
    getpeername, c"getpeername", (fd, address, length), [(address, ADDRESS, Late), (length, 4, Late)];
    getsockopt, c"getsockopt", (fd, level, name, value, length), [(value, STRUCTURE, Early), (length, 4, Early)];
    setsockopt, c"setsockopt", (fd, level, name, value, length), [(value, STRUCTURE, Late)];
    select, c"select", (fds, reads, writes, others, time),
        [(reads, fds / 8 + 8, Early), (writes, fds / 8 + 8, Early), (others, fds / 8 + 8, Early), (time, TIMES, Early)];
    pselect, c"pselect", (fds, reads, writes, others, time, mask),
        [(reads, fds / 8 + 8, Early), (writes, fds / 8 + 8, Early), (others, fds / 8 + 8, Early), (time, TIMES, Late), (mask, 128, Late)];
    ppoll, c"ppoll", (fds, count, time, mask), [(fds, count.saturating_mul(8), Early), (time, TIMES, Late), (mask, 128, Late)];
    epoll_pwait, c"epoll_pwait", (fd, events, most, time, mask), [(events, most.saturating_mul(12), Early), (mask, 128, Late)];
    wait, c"wait", (status), [(status, 4, Early)];
    waitpid, c"waitpid", (pid, status, options), [(status, 4, Early)];
    wait3, c"wait3", (status, options, usage), [(status, 4, Early), (usage, STRUCTURE, Early)];
    wait4, c"wait4", (pid, status, options, usage), [(status, 4, Early), (usage, STRUCTURE, Early)];
    waitid, c"waitid", (kind, id, info, options), [(info, 128, Early)];
    getrusage, c"getrusage", (who, usage), [(usage, STRUCTURE, Late)];
    getrlimit, c"getrlimit", (resource, limit), [(limit, 16, Late)];
    getrlimit64, c"getrlimit64", (resource, limit), [(limit, 16, Late)];
    setrlimit, c"setrlimit", (resource, limit), [(limit, 16, Late)];
    setrlimit64, c"setrlimit64", (resource, limit), [(limit, 16, Late)];
    prlimit, c"prlimit", (pid, resource, new, old), [(new, 16, Late), (old, 16, Early)];
    prlimit64, c"prlimit64", (pid, resource, new, old), [(new, 16, Late), (old, 16, Early)];
    uname, c"uname", (names), [(names, size_of::<libc::utsname>(), Late)];
    sysinfo, c"sysinfo", (info), [(info, 128, Late)];
    times, c"times", (buffer), [(buffer, 32, Late)];
    getcwd, c"getcwd", (buffer, bytes), [(buffer, bytes, Early)];
    nanosleep, c"nanosleep", (time, left), [(time, TIMES, Late), (left, TIMES, Early)];
    clock_gettime, c"clock_gettime", (clock, time), [(time, TIMES, Late)];
    getrandom, c"getrandom", (buffer, bytes, flags), [(buffer, bytes, Late)];
    getdents64, c"getdents64", (fd, buffer, bytes), [(buffer, bytes, Early)];
    flistxattr, c"flistxattr", (fd, list, bytes), [(list, bytes, Late)];
    fgetxattr, c"fgetxattr", (fd, name, value, bytes), [(name, 256, Late), (value, bytes, Late)];
    fstatfs, c"fstatfs", (fd, to), [(to, STRUCTURE, Late)];
    fstatfs64, c"fstatfs64", (fd, to), [(to, STRUCTURE, Late)];
    statfs, c"statfs", (path, to), [(path, 4096, Late), (to, STRUCTURE, Late)];
    statfs64, c"statfs64", (path, to), [(path, 4096, Late), (to, STRUCTURE, Late)];
    statx, c"statx", (dir, path, flags, mask, to), [(path, 4096, Late), (to, STRUCTURE, Late)];
    readlinkat, c"readlinkat", (dir, path, to, bytes), [(path, 4096, Late), (to, bytes, Late)];
    mkstemp, c"mkstemp", (path), [(path, 4096, Late)];
    mkstemp64, c"mkstemp64", (path), [(path, 4096, Late)];
    mkostemp, c"mkostemp", (path, flags), [(path, 4096, Late)];
    mkostemp64, c"mkostemp64", (path, flags), [(path, 4096, Late)];
    sched_getaffinity, c"sched_getaffinity", (pid, bytes, mask), [(mask, bytes, Late)];
    sched_setaffinity, c"sched_setaffinity", (pid, bytes, mask), [(mask, bytes, Late)];
    sigpending, c"sigpending", (set), [(set, 128, Late)];
    sigtimedwait, c"sigtimedwait", (set, info, time), [(set, 128, Late), (info, 128, Early), (time, TIMES, Late)];
    sigwaitinfo, c"sigwaitinfo", (set, info), [(set, 128, Late), (info, 128, Early)];
    sigaltstack, c"sigaltstack", (new, old), [(new, 24, Late), (old, 24, Early)];
    getitimer, c"getitimer", (which, value), [(value, 32, Late)];
    setitimer, c"setitimer", (which, new, old), [(new, 32, Late), (old, 32, Early)];
    timerfd_gettime, c"timerfd_gettime", (fd, value), [(value, 32, Late)];
    timerfd_settime, c"timerfd_settime", (fd, flags, new, old), [(new, 32, Late), (old, 32, Early)];
    semop, c"semop", (id, operations, count), [(operations, count.saturating_mul(6), Late)];
    semtimedop, c"semtimedop", (id, operations, count, time), [(operations, count.saturating_mul(6), Late), (time, TIMES, Late)];
    msgsnd, c"msgsnd", (id, message, bytes, flags), [(message, bytes.saturating_add(8), Late)];
    msgrcv, c"msgrcv", (id, message, bytes, kind, flags), [(message, bytes.saturating_add(8), Early)];
    sendfile, c"sendfile", (to, from, offset, bytes), [(offset, 8, Early)];
    sendfile64, c"sendfile64", (to, from, offset, bytes), [(offset, 8, Early)];
    // The argument is a number, a pointer, or nothing.
    ioctl, c"ioctl", (fd, request, argument), [(argument, STRUCTURE, Late)];
    fcntl, c"fcntl", (fd, what, argument), [(argument, 32, Late)];
    fcntl64, c"fcntl64", (fd, what, argument), [(argument, 32, Late)];
    // Which arguments are pointers, and to how much, depends on the call.
    syscall, c"syscall", (number, a, b, c, d, e, f),
        [(a, 64 << 10, Late), (b, 64 << 10, Late), (c, 64 << 10, Late), (d, 64 << 10, Late), (e, 64 << 10, Late), (f, 64 << 10, Late)];
}

/// As `readlink`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlink(path: *const c_char, to: *mut c_char, bytes: Size) -> Signed {
    let next = real!(c"readlink", fn(*const c_char, *mut c_char, Size) -> Signed);
    let guard = Guard::new(to.cast(), bytes.min(PIECE), true);
    // SAFETY: the caller's own arguments.
    let result = again(
        || unsafe { next(path, to, bytes) },
        || touch_text(path) | touch(to.cast(), bytes.min(PIECE), true),
    );
    drop(guard);
    result
}

fn touch_strings(strings: *const *const c_char) -> bool {
    let mut any = false;
    if strings.is_null() {
        return false;
    }
    for index in 0..1 << 20 {
        // SAFETY: the program says that this is a list which ends with null.
        let text = unsafe { strings.add(index).read_volatile() };
        if text.is_null() {
            break;
        }
        any |= touch_text(text);
    }
    any
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

macro_rules! executes {
    ($($name:ident, $text:literal, ($path:ident: $type:ty, $arguments:ident $(, $environment:ident)?), $touch_path:expr;)*) => {$(
        /// As the C library's function of this name. The strings are touched first: the kernel copies them
        /// before it replaces the old program.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($path: $type, $arguments: *const *const c_char $(, $environment: *const *const c_char)?) -> c_int {
            let next = real!($text, fn($type, *const *const c_char $(, word_list!($environment))?) -> c_int);
            // SAFETY: the C library's own variable.
            let _environment = unsafe { environ };
            $(let _environment = $environment;)?
            let touch = || $touch_path | touch_strings($arguments) | touch_strings(_environment);
            touch();
            // SAFETY: the caller's own arguments.
            let result = again(|| unsafe { next($path, $arguments $(, $environment)?) } as Signed, touch);
            c_int::try_from(result).unwrap_or(-1)
        }
    )*};
}
macro_rules! word_list {
    ($arg:ident) => {
        *const *const c_char
    };
}

executes! {
    execve, c"execve", (path: *const c_char, arguments, environment), touch_text(path);
    execv, c"execv", (path: *const c_char, arguments), touch_text(path);
    execvp, c"execvp", (path: *const c_char, arguments), touch_text(path);
    execvpe, c"execvpe", (path: *const c_char, arguments, environment), touch_text(path);
    fexecve, c"fexecve", (fd: c_int, arguments, environment), false;
}

/// As `system`, whose child reads the command.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn system(command: *const c_char) -> c_int {
    let next = real!(c"system", fn(*const c_char) -> c_int);
    // SAFETY: the program's own text, which ends with a zero byte.
    let guard =
        (!command.is_null()).then(|| Guard::new(command.cast(), unsafe { libc::strlen(command) } + 1, false));
    // SAFETY: the caller's own argument.
    let result = unsafe { next(command) };
    drop(guard);
    result
}

macro_rules! spawns {
    ($($name:ident, $text:literal;)*) => {$(
        /// As the C library's function of this name. Its child calls `execve` inside the C library, so the
        /// strings are touched before.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            pid: *mut libc::pid_t,
            path: *const c_char,
            actions: *const c_void,
            attributes: *const c_void,
            arguments: *const *const c_char,
            environment: *const *const c_char,
        ) -> c_int {
            let next = real!(
                $text,
                fn(*mut libc::pid_t, *const c_char, *const c_void, *const c_void, *const *const c_char, *const *const c_char) -> c_int
            );
            let mut tries = 0;
            loop {
                let touched = touch_text(path) | touch_strings(arguments) | touch_strings(environment);
                // SAFETY: the caller's own arguments.
                let result = unsafe { next(pid, path, actions, attributes, arguments, environment) };
                if result != libc::EFAULT || !touched || tries == TRIES {
                    return result;
                }
                tries += 1;
            }
        }
    )*};
}

spawns! {
    posix_spawn, c"posix_spawn";
    posix_spawnp, c"posix_spawnp";
}
