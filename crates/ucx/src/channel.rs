//! A connection: messages of at most [`SEGMENT_BYTES`] in order, each with a number from the sender.
//!
//! Each connection has a worker of its own, so its owner drives it, on any thread, and sleeps on its
//! descriptor alone. UCX calls back only from within a call of ours.

use crate::api::{
    AM_CAME_AS_RENDEZVOUS, AM_CAME_IN_MEMORY_TO_KEEP, AM_EAGER, AM_HANDLER_ALL, AM_WHOLE_MESSAGE, Address,
    AmHandlerParams, AmReceived, CLOSE_BY_FORCE, ENDPOINT_ERROR_HANDLER, ENDPOINT_ERROR_MODE,
    ENDPOINT_REMOTE_ADDRESS, ERRORS_NONE, ERRORS_PEER, EndpointParams, ErrorHandler, Functions, OP_CALLBACK,
    OP_FLAGS, OP_USER_DATA, RawEndpoint, RawWorker, RequestParams, SentCallback, THREADS_SERIALIZED,
    WORKER_THREAD_MODE, WorkerParams,
};
use crate::library::{Started, loaded};
use crate::{Context, Status, UcxError};
use libc::{c_int, c_void, size_t};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::time::Instant;

/// The most bytes of a message: with UCX's header they fit one of its buffers, over every common transport,
/// so that no message is assembled from parts.
pub const SEGMENT_BYTES: usize = 7936;
/// Received messages up to this length are copied rather than kept in UCX's memory.
const COPY_BYTES: usize = 1024;
/// The one kind of message.
const MESSAGE: u32 = 0;
/// The bytes of the number in front of each message.
const NUMBER_BYTES: usize = 8;
/// After this many calls, requests that have not ended are closed with the worker.
const MOST_CLOSING_CALLS: u32 = 10_000;

/// Whether UCX itself watches the peer. Both sides use the same mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Watched,
    /// Its shared memory does not support watching.
    Unwatched,
}

/// One side of a connection. Not for sharing: one thread uses it at a time.
pub struct Channel {
    context: Context,
    functions: &'static Functions,
    worker: *mut RawWorker,
    endpoint: *mut RawEndpoint,
    mode: Mode,
    /// Written by UCX's callbacks; no reference into it lives during a call to UCX.
    arrivals: *mut Arrivals,
    /// Buffers for messages until UCX has taken them.
    free: Vec<*mut Slot>,
    busy: Vec<*mut Slot>,
    most_slots: usize,
    /// Bytes taken of the first message in line.
    taken: usize,
}

// SAFETY: the worker is made for any thread, one at a time (`THREADS_SERIALIZED`), and what it points to
// belongs to the channel alone.
unsafe impl Send for Channel {}

#[derive(Default)]
struct Arrivals {
    line: VecDeque<Arrival>,
    /// Buffers of messages that were read.
    spare: Vec<Vec<u8>>,
    most: usize,
    /// The number of the last message that came.
    number: Option<u64>,
    spoilt: Option<&'static str>,
    failed: Option<Status>,
}

enum Arrival {
    /// UCX's memory, until it is given back.
    Kept(*mut u8, usize),
    Copied(Vec<u8>),
}

impl Arrival {
    /// Where its bytes are.
    fn start(&self) -> (*const u8, usize) {
        match self {
            Arrival::Kept(start, len) => (start.cast_const(), *len),
            Arrival::Copied(bytes) => (bytes.as_ptr(), bytes.len()),
        }
    }
}

struct Slot {
    number: [u8; NUMBER_BYTES],
    bytes: [u8; SEGMENT_BYTES],
    sent: Option<Status>,
}

impl Channel {
    /// Opens half a channel: it has an address, and no peer yet. At most `most` messages may wait in it to be
    /// read; a peer that sends more breaks it. Takes some milliseconds.
    ///
    /// # Errors
    /// [`UcxError::Call`].
    pub fn open(context: &Context, most: usize) -> Result<Self, UcxError> {
        let functions = context.functions();
        let params = WorkerParams {
            field_mask: WORKER_THREAD_MODE,
            thread_mode: THREADS_SERIALIZED,
            rest: [0; 23],
            reserve: [0; 24],
        };
        let mut worker = null_mut();
        // SAFETY: a context, parameters whose mask names the fields in use, and a place to write to.
        let status = unsafe { (functions.worker_create)(context.raw(), &raw const params, &raw mut worker) };
        if status != Status::OK {
            return Err(UcxError::Call { what: "make a worker", status });
        }
        let channel = Self {
            context: context.clone(),
            functions,
            worker,
            endpoint: null_mut(),
            mode: Mode::Watched,
            arrivals: Box::into_raw(Box::new(Arrivals { most, ..Arrivals::default() })),
            free: Vec::new(),
            busy: Vec::new(),
            // One for a message that only carries a number.
            most_slots: most + 1,
            taken: 0,
        };
        let handler = AmHandlerParams {
            field_mask: AM_HANDLER_ALL,
            id: MESSAGE,
            flags: AM_WHOLE_MESSAGE,
            callback: came,
            argument: channel.arrivals.cast(),
        };
        // SAFETY: a worker and parameters; the argument lives until the worker is destroyed.
        let status = unsafe { (functions.set_am_handler)(worker, &raw const handler) };
        if status != Status::OK {
            return Err(UcxError::Call { what: "take messages", status });
        }
        Ok(channel)
    }

    /// The address at which a peer reaches it: some hundred bytes for [`Channel::connect`] on the other side.
    ///
    /// # Errors
    /// [`UcxError::Call`].
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (mut address, mut len) = (null_mut::<Address>(), 0);
        // SAFETY: a worker, and two places to write to.
        let status =
            unsafe { (self.functions.worker_get_address)(self.worker, &raw mut address, &raw mut len) };
        if status != Status::OK {
            return Err(UcxError::Call { what: "tell its address", status });
        }
        // SAFETY: what was written is memory of that length until it is given back.
        unsafe {
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            (self.functions.worker_release_address)(self.worker, address);
            Ok(bytes)
        }
    }

    /// Names the peer. `mode`: as the peer has chosen; `None`: chosen here. Messages reach the peer once it
    /// has named this side as well.
    ///
    /// # Errors
    /// [`UcxError::Unreachable`], [`UcxError::Call`].
    ///
    /// # Safety
    /// The address was made by [`Channel::address`]: UCX trusts every byte of it.
    pub unsafe fn connect(&mut self, address: &[u8], mode: Option<Mode>) -> Result<Mode, UcxError> {
        assert!(self.endpoint.is_null(), "a channel has one peer");
        let modes = mode.map_or(vec![Mode::Watched, Mode::Unwatched], |mode| vec![mode]);
        let mut status = Status::UNREACHABLE;
        for mode in modes {
            let params = EndpointParams {
                field_mask: ENDPOINT_REMOTE_ADDRESS | ENDPOINT_ERROR_MODE | ENDPOINT_ERROR_HANDLER,
                address: address.as_ptr().cast(),
                error_mode: if mode == Mode::Watched { ERRORS_PEER } else { ERRORS_NONE },
                error_handler: ErrorHandler { callback: broke, argument: self.arrivals.cast() },
                user_data: null_mut(),
                flags: 0,
                socket_address: [0; 2],
                rest: [0; 4],
                reserve: [0; 24],
            };
            // SAFETY: a worker, parameters whose mask names the fields in use, an address by the caller's
            // promise, and a place to write to.
            status = unsafe {
                (self.functions.endpoint_create)(self.worker, &raw const params, &raw mut self.endpoint)
            };
            if status == Status::OK {
                self.mode = mode;
                return Ok(mode);
            }
            self.endpoint = null_mut();
        }
        if status == Status::UNREACHABLE {
            return Err(UcxError::Unreachable(self.context.transports().join(" ")));
        }
        Err(UcxError::Call { what: "make a connection", status })
    }

    /// A descriptor that becomes readable when there is work, once [`Channel::may_sleep`] has returned true.
    ///
    /// # Errors
    /// [`UcxError::Call`].
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>, UcxError> {
        let mut fd: c_int = -1;
        // SAFETY: a worker, and a place to write to.
        let status = unsafe { (self.functions.worker_get_efd)(self.worker, &raw mut fd) };
        if status != Status::OK {
            return Err(UcxError::Call { what: "wake a sleeping thread", status });
        }
        // SAFETY: the worker's own descriptor, open as long as the worker is.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Lets UCX work; returns whether it had anything to do.
    pub fn progress(&mut self) -> bool {
        // SAFETY: the worker, from the one thread that has the channel; no reference into the callbacks'
        // memory is live.
        unsafe { (self.functions.worker_progress)(self.worker) != 0 }
    }

    /// Works until nothing is left to do, and arms the descriptor. False: there is more to do, do not sleep.
    pub fn may_sleep(&mut self) -> bool {
        for _ in 0..4 {
            while self.progress() {}
            // SAFETY: the worker, from the one thread that has the channel.
            match unsafe { (self.functions.worker_arm)(self.worker) } {
                Status::OK => return true,
                Status::BUSY => {}
                // The descriptor cannot be armed. The caller goes on polling.
                _ => return false,
            }
        }
        false
    }

    /// Messages that have come. Do not hold this over a call to UCX.
    fn arrivals(&mut self) -> &mut Arrivals {
        // SAFETY: the channel's own until it is dropped; UCX writes to it in its calls only, for which this
        // borrow is over.
        unsafe { &mut *self.arrivals }
    }

    /// The number of the last message, if any has come.
    pub fn number(&mut self) -> Option<u64> {
        self.arrivals().number
    }

    /// Whether bytes wait to be read.
    pub fn has_bytes(&mut self) -> bool {
        !self.arrivals().line.is_empty()
    }

    /// # Errors
    /// Why the channel no longer sends or receives.
    pub fn check(&mut self) -> Result<(), UcxError> {
        let arrivals = self.arrivals();
        if let Some(rule) = arrivals.spoilt {
            return Err(UcxError::Peer(rule));
        }
        match arrivals.failed {
            Some(status) => Err(UcxError::Call { what: "reach the peer any more", status }),
            None => Ok(()),
        }
    }

    /// Whether UCX has room for one more message.
    pub fn has_room(&mut self) -> bool {
        self.reap();
        !self.free.is_empty() || self.busy.len() < self.most_slots
    }

    /// Sends a message: this number, and the bytes that `fill` writes into the given room; `fill` returns
    /// their length. False: no room now, and `fill` was not called.
    ///
    /// # Errors
    /// [`UcxError::Call`].
    pub fn send(&mut self, number: u64, fill: impl FnOnce(*mut u8) -> usize) -> Result<bool, UcxError> {
        assert!(!self.endpoint.is_null(), "a channel without a peer");
        if !self.has_room() {
            return Ok(false);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = Slot { number: [0; NUMBER_BYTES], bytes: [0; SEGMENT_BYTES], sent: None };
            Box::into_raw(Box::new(slot))
        });
        let (header, bytes);
        // SAFETY: a slot of ours that UCX does not have.
        let len = unsafe {
            (*slot).number = number.to_le_bytes();
            (*slot).sent = None;
            header = (&raw const (*slot).number).cast::<c_void>();
            bytes = (&raw mut (*slot).bytes).cast::<u8>();
            fill(bytes)
        };
        assert!(len <= SEGMENT_BYTES, "a message of {len} bytes");
        let params = request(OP_CALLBACK | OP_USER_DATA | OP_FLAGS, AM_EAGER, Some(sent), slot.cast());
        // SAFETY: an endpoint; header and bytes stay as they are until UCX says that it has them.
        let started = unsafe {
            (self.functions.am_send)(
                self.endpoint,
                MESSAGE,
                header,
                NUMBER_BYTES,
                bytes.cast(),
                len,
                &raw const params,
            )
        };
        match Started::of(started) {
            Started::Done => self.free.push(slot),
            Started::Request(_) => self.busy.push(slot),
            Started::Failed(status) => {
                self.free.push(slot);
                return Err(UcxError::Call { what: "send", status });
            }
        }
        Ok(true)
    }

    /// Takes up to `most` of the received bytes, in one piece, with `take`; returns how many, and whether
    /// they end their message. `None`: nothing has come.
    pub fn take(&mut self, most: usize, take: impl FnOnce(*const u8, usize)) -> Option<(usize, bool)> {
        let (start, len) = self.arrivals().line.front()?.start();
        let left = len - self.taken;
        let step = left.min(most);
        take(start.wrapping_add(self.taken), step);
        self.taken += step;
        if step < left {
            return Some((step, false));
        }
        self.taken = 0;
        match self.arrivals().line.pop_front().expect("seen above") {
            // SAFETY: the worker, and its memory, which was kept and is given back once.
            Arrival::Kept(start, _) => unsafe { (self.functions.am_release)(self.worker, start.cast()) },
            Arrival::Copied(bytes) => self.arrivals().spare.push(bytes),
        }
        Some((step, true))
    }

    /// What a hostile peer does: a message that stays here until it is fetched. Leaks its request.
    ///
    /// # Panics
    /// If UCX refuses it.
    #[cfg(feature = "hostile")]
    pub fn send_to_be_fetched(&mut self, bytes: &'static [u8]) {
        const RENDEZVOUS: u32 = 1 << 2;
        static NUMBER: [u8; NUMBER_BYTES] = [0; NUMBER_BYTES];
        let params = request(OP_FLAGS, RENDEZVOUS, None, null_mut());
        // SAFETY: an endpoint; number and bytes stay for ever.
        let started = unsafe {
            (self.functions.am_send)(
                self.endpoint,
                MESSAGE,
                NUMBER.as_ptr().cast(),
                NUMBER_BYTES,
                bytes.as_ptr().cast(),
                bytes.len(),
                &raw const params,
            )
        };
        assert!(!matches!(Started::of(started), Started::Failed(_)), "UCX refuses the message");
    }

    /// Works until UCX has handed over everything sent, or until the deadline.
    pub fn flush(&mut self, deadline: Instant) {
        if self.endpoint.is_null() || self.check().is_err() {
            return;
        }
        let params = request(0, 0, None, null_mut());
        // SAFETY: an endpoint, and parameters whose mask names the fields in use.
        let started = unsafe { (self.functions.endpoint_flush)(self.endpoint, &raw const params) };
        if let Started::Request(flush) = Started::of(started) {
            // SAFETY: the request is valid until it is freed, below; the flush goes on or ends with the
            // endpoint.
            while unsafe { (self.functions.request_status)(flush) } == Status::IN_PROGRESS
                && Instant::now() < deadline
            {
                self.progress();
            }
            // SAFETY: a request that is not used from here on.
            unsafe { (self.functions.request_free)(flush) };
        }
        self.reap();
    }

    /// Gives unread memory back to UCX and to peers.
    fn give_back(&mut self) {
        for arrival in std::mem::take(&mut self.arrivals().line) {
            let kept: *mut c_void = match arrival {
                Arrival::Kept(start, _) => start.cast(),
                Arrival::Copied(_) => continue,
            };
            // SAFETY: the worker, and its memory that we kept, which is given back once.
            unsafe { (self.functions.am_release)(self.worker, kept) };
        }
    }

    /// Frees slots that UCX is done with.
    fn reap(&mut self) {
        let Self { busy, free, .. } = self;
        busy.retain(|slot| {
            // SAFETY: a slot of ours; UCX writes `sent` in its calls only.
            let done = unsafe { (**slot).sent.is_some() };
            if done {
                free.push(*slot);
            }
            !done
        });
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Before the endpoint closes, since peers cannot be told later.
        self.give_back();
        if !self.endpoint.is_null() && self.mode == Mode::Watched {
            let params = request(OP_FLAGS, CLOSE_BY_FORCE, None, null_mut());
            // SAFETY: an endpoint, not used from here on.
            let started = unsafe { (self.functions.endpoint_close)(self.endpoint, &raw const params) };
            if let Started::Request(close) = Started::of(started) {
                let mut calls = 0;
                // SAFETY: as in `flush`.
                while unsafe { (self.functions.request_status)(close) } == Status::IN_PROGRESS
                    && calls < MOST_CLOSING_CALLS
                {
                    self.progress();
                    calls += 1;
                }
                // SAFETY: as in `flush`.
                unsafe { (self.functions.request_free)(close) };
            }
        }
        self.give_back();
        // SAFETY: the worker, not used from here on. It ends its remaining endpoint and requests, so the
        // slots are ours again.
        unsafe {
            (self.functions.worker_destroy)(self.worker);
            drop(Box::from_raw(self.arrivals));
            for slot in self.free.drain(..).chain(self.busy.drain(..)) {
                drop(Box::from_raw(slot));
            }
        }
    }
}

fn request(mask: u32, flags: u32, callback: Option<SentCallback>, user_data: *mut c_void) -> RequestParams {
    RequestParams {
        mask,
        flags,
        request: null_mut(),
        callback,
        datatype: 0,
        user_data,
        reply_buffer: null_mut(),
        memory_type: 0,
        receive_info: null_mut(),
        memory: null_mut(),
        reserve: [0; 8],
    }
}

/// A message has come. Called by UCX from within `progress`.
unsafe extern "C" fn came(
    argument: *mut c_void,
    header: *const c_void,
    header_len: size_t,
    data: *mut c_void,
    len: size_t,
    how: *const AmReceived,
) -> Status {
    // SAFETY: the channel's own, which has no reference into it during a call of UCX's.
    let arrivals = unsafe { &mut *argument.cast::<Arrivals>() };
    // SAFETY: UCX says how the bytes came.
    let attributes = unsafe { (*how).attributes };
    // A message that would have to be fetched is none of ours.
    if header_len != NUMBER_BYTES || len > SEGMENT_BYTES || attributes & AM_CAME_AS_RENDEZVOUS != 0 {
        arrivals.spoilt = Some("a message of another kind, or longer than any");
        return Status::OK;
    }
    // SAFETY: a header of this many bytes.
    arrivals.number =
        Some(u64::from_le_bytes(unsafe { header.cast::<[u8; NUMBER_BYTES]>().read_unaligned() }));
    if len == 0 {
        return Status::OK;
    }
    if arrivals.line.len() >= arrivals.most {
        arrivals.spoilt = Some("more messages than there is room for");
        return Status::OK;
    }
    if len > COPY_BYTES && attributes & AM_CAME_IN_MEMORY_TO_KEEP != 0 {
        arrivals.line.push_back(Arrival::Kept(data.cast(), len));
        return Status::IN_PROGRESS;
    }
    let mut bytes = arrivals.spare.pop().unwrap_or_default();
    bytes.clear();
    // SAFETY: UCX vouches for `len` bytes during this call.
    bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) });
    arrivals.line.push_back(Arrival::Copied(bytes));
    Status::OK
}

/// UCX has taken a message, or never will. Called by UCX from within a call of ours.
unsafe extern "C" fn sent(request: *mut c_void, status: Status, slot: *mut c_void) {
    // SAFETY: the slot that the message lies in, which lives until the worker has ended.
    unsafe { (*slot.cast::<Slot>()).sent = Some(status) };
    let library = loaded().expect("UCX calls");
    // SAFETY: a request that has ended, and has no other user.
    unsafe { (library.functions.request_free)(request) };
}

/// The peer cannot be reached any more. Called by UCX from within a call of ours.
unsafe extern "C" fn broke(argument: *mut c_void, _endpoint: *mut RawEndpoint, status: Status) {
    // SAFETY: as in `came`.
    unsafe { (*argument.cast::<Arrivals>()).failed.get_or_insert(status) };
}
