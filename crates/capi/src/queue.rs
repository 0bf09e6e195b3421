//! Remote queues in C: conversions around [`runtime::direct`].

use std::ffi::{c_char, c_void};
use std::time::Duration;

use runtime::direct::{Direct, DirectError, Message, Queue, QueueBounds, QueueError, SendBody};
use runtime::pool::LeaseTicket;

use crate::{Builder, RampoolStatus, fail, status_of, text};

/// One thread's way to the queues of a lease.
pub struct ClientHandle(Direct);

/// A queue: a name that messages are sent to and taken from. Good with every client of the lease.
pub struct QueueHandle(Queue);

/// A message that was taken, until rampool_message_done() or rampool_message_give_back().
pub struct MessageHandle(Message);

/// Connects to the servers that the builder names and leases "memory" there, for messages. Blocks, for each server at most the option "connect-deadline-ms". On success,
/// `*client` is for rampool_client_close(); otherwise it is null.
///
/// # Safety
/// `builder` came from rampool_builder_new() and was not freed; `client` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_client_open(builder: *const Builder, client: *mut *mut ClientHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(builder), Some(out)) = (unsafe { (builder.as_ref(), client.as_mut()) }) else {
        return fail(RampoolStatus::Invalid, "rampool_client_open: a null pointer");
    };
    *out = std::ptr::null_mut();
    match builder.0.open_direct() {
        Ok(direct) => {
            *out = Box::into_raw(Box::new(ClientHandle(direct)));
            RampoolStatus::Ok
        }
        Err(error) => fail(status_of(&error), error),
    }
}

/// Joins the lease of another client, by its ticket: the same queues by the same names. The builder gives key, encryption and deadlines; its servers are not looked at.
///
/// # Safety
/// `builder` came from rampool_builder_new() and was not freed; `ticket` is null or ends with a zero byte; `client` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_client_join(
    builder: *const Builder,
    ticket: *const c_char,
    client: *mut *mut ClientHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (builder, ticket, out) = unsafe { (builder.as_ref(), text(ticket), client.as_mut()) };
    let (Some(builder), Some(ticket), Some(out)) = (builder, ticket, out) else {
        return fail(RampoolStatus::Invalid, "rampool_client_join: a null pointer, or a text that is not UTF-8");
    };
    *out = std::ptr::null_mut();
    let ticket: LeaseTicket = match ticket.parse() {
        Ok(ticket) => ticket,
        Err(error) => return fail(RampoolStatus::Invalid, error),
    };
    match builder.0.join_direct(&ticket) {
        Ok(direct) => {
            *out = Box::into_raw(Box::new(ClientHandle(direct)));
            RampoolStatus::Ok
        }
        Err(error) => fail(status_of(&error), error),
    }
}

/// Writes the ticket of the client's lease, a text that ends with a zero byte, to `buffer`. Who has it may join the lease: keep it as secret as a key.
/// RAMPOOL_STATUS_NO_ROOM if it is longer than `size` bytes; 4096 are enough for any 32 servers.
///
/// # Safety
/// `client` came from rampool_client_open() or _join() and was not closed; `buffer` is null or `size` bytes can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_client_ticket(client: *mut ClientHandle, buffer: *mut c_char, size: usize) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(client) = (unsafe { client.as_mut() }).filter(|_| !buffer.is_null()) else {
        return fail(RampoolStatus::Invalid, "rampool_client_ticket: a null pointer");
    };
    let ticket = client.0.pool().lease_ticket().to_string();
    if ticket.len() >= size {
        return fail(RampoolStatus::NoRoom, format_args!("rampool_client_ticket: the ticket and its end take {} bytes", ticket.len() + 1));
    }
    // SAFETY: `size` bytes can be written, as the caller promises, and the ticket and the zero byte are no more.
    unsafe {
        std::ptr::copy_nonoverlapping(ticket.as_ptr().cast(), buffer, ticket.len());
        *buffer.add(ticket.len()) = 0;
    }
    RampoolStatus::Ok
}

/// Leaves the lease. Messages that this client has taken and is not done with go to other receivers; with its last client the lease is gone, and every queue in it.
/// Blocks a second at most. Null does nothing.
///
/// # Safety
/// `client` is null or came from rampool_client_open() or _join() and was not closed; no other call uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_client_close(client: *mut ClientHandle) {
    if !client.is_null() {
        // SAFETY: made by `Box::into_raw`, and closed once, as the caller promises.
        let mut handle = unsafe { Box::from_raw(client) };
        handle.0.pool().leave();
    }
}

/// Opens the queue of this name. If there is none it is made, for at most `messages` messages with together `bytes` bytes; unless both are 0, then it is
/// RAMPOOL_STATUS_GONE. On success, `*queue` is for rampool_queue_free(); otherwise it is null. Blocks until the server has answered.
///
/// # Safety
/// `client` came from rampool_client_open() or _join() and was not closed; `name` is null or ends with a zero byte; `queue` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_open(
    client: *mut ClientHandle,
    name: *const c_char,
    messages: u64,
    bytes: u64,
    queue: *mut *mut QueueHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (client, name, out) = unsafe { (client.as_mut(), text(name), queue.as_mut()) };
    let (Some(client), Some(name), Some(out)) = (client, name, out) else {
        return fail(RampoolStatus::Invalid, "rampool_queue_open: a null pointer, or a name that is not UTF-8");
    };
    *out = std::ptr::null_mut();
    let opened = match (messages, bytes) {
        (0, 0) => client.0.open_queue(name),
        _ => client.0.open_or_create_queue(name, QueueBounds { messages, bytes }),
    };
    match opened {
        Ok(queue) => {
            *out = Box::into_raw(Box::new(QueueHandle(queue)));
            RampoolStatus::Ok
        }
        Err(error) => status(&error),
    }
}

/// Frees the handle. The queue stays. Null does nothing.
///
/// # Safety
/// `queue` is null or came from rampool_queue_open() and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_free(queue: *mut QueueHandle) {
    if !queue.is_null() {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        drop(unsafe { Box::from_raw(queue) });
    }
}

/// Gives up the queue with all that is in it, for every client. The handle stays to be freed.
///
/// # Safety
/// `client` and `queue` are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_delete(client: *mut ClientHandle, queue: *const QueueHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(client), Some(queue)) = (unsafe { (client.as_mut(), queue.as_ref()) }) else {
        return fail(RampoolStatus::Invalid, "rampool_queue_delete: a null pointer");
    };
    done(client.0.free_queue(&queue.0))
}

/// Appends a message: a head of at most 256 bytes, which arrives at once, and a body of any length (0: none), which follows. Blocks until the server has all of it; if the
/// queue is full, `patience_ms` at most, and then it is RAMPOOL_STATUS_NO_ROOM. A send that succeeded has appended the message exactly once.
///
/// # Safety
/// `client` and `queue` are null or valid; `head` and `body` can be read for as many bytes as are said, or are null where that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_send(
    client: *mut ClientHandle,
    queue: *const QueueHandle,
    head: *const c_void,
    head_bytes: usize,
    body: *const c_void,
    body_bytes: usize,
    patience_ms: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (client, queue) = unsafe { (client.as_mut(), queue.as_ref()) };
    let (Some(client), Some(queue), false, false) = (client, queue, head.is_null() && head_bytes > 0, body.is_null() && body_bytes > 0)
    else {
        return fail(RampoolStatus::Invalid, "rampool_queue_send: a null pointer");
    };
    // SAFETY: the caller promises as many readable bytes, which nobody writes meanwhile.
    let (head, body) = unsafe { (bytes(head, head_bytes), bytes(body, body_bytes)) };
    let body = if body.is_empty() { SendBody::None } else { SendBody::Bytes(body) };
    done(client.0.send(&queue.0, head, body, Duration::from_millis(patience_ms.into())))
}

/// Takes the next message. Blocks until there is one, `patience_ms` at most; then `*message` is null, and that is a success. A message stays in its queue until
/// rampool_message_done(): if this process is lost before, or closes the client, another receiver gets it.
///
/// # Safety
/// `client` and `queue` are null or valid; `message` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_take(
    client: *mut ClientHandle,
    queue: *const QueueHandle,
    patience_ms: u32,
    message: *mut *mut MessageHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(client), Some(queue), Some(out)) = (unsafe { (client.as_mut(), queue.as_ref(), message.as_mut()) }) else {
        return fail(RampoolStatus::Invalid, "rampool_queue_take: a null pointer");
    };
    *out = std::ptr::null_mut();
    match client.0.take(&queue.0, Duration::from_millis(patience_ms.into())) {
        Ok(message) => {
            if let Some(message) = message {
                *out = Box::into_raw(Box::new(MessageHandle(message)));
            }
            RampoolStatus::Ok
        }
        Err(error) => status(&error),
    }
}

/// Blocks until the server knows of every message that the client is done with.
///
/// # Safety
/// `client` and `queue` are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_flush(client: *mut ClientHandle, queue: *const QueueHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(client), Some(queue)) = (unsafe { (client.as_mut(), queue.as_ref()) }) else {
        return fail(RampoolStatus::Invalid, "rampool_queue_flush: a null pointer");
    };
    done(client.0.flush_done(&queue.0))
}

/// The head of a message, and its length in `*bytes`; null for null. Valid as long as the message.
///
/// # Safety
/// `message` is null or valid; `bytes` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_head(message: *const MessageHandle, bytes: *mut usize) -> *const c_void {
    // SAFETY: null or valid, as the caller promises.
    let (message, out) = unsafe { (message.as_ref(), bytes.as_mut()) };
    let head = message.map(|message| message.0.head());
    if let Some(out) = out {
        *out = head.map_or(0, <[u8]>::len);
    }
    head.map_or(std::ptr::null(), |head| head.as_ptr().cast())
}

/// Bytes of the body of a message; 0 for null.
///
/// # Safety
/// `message` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_body_bytes(message: *const MessageHandle) -> u64 {
    // SAFETY: null or valid, as the caller promises.
    unsafe { message.as_ref() }.map_or(0, |message| message.0.body_bytes())
}

/// Whether the message was delivered before, to a receiver that was not done with it; false for null.
///
/// # Safety
/// `message` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_redelivered(message: *const MessageHandle) -> bool {
    // SAFETY: null or valid, as the caller promises.
    unsafe { message.as_ref() }.is_some_and(|message| message.0.redelivered())
}

/// Reads the body of a message to `buffer`. Blocks until it is there; RAMPOOL_STATUS_BUSY if it has not arrived at the server within `patience_ms`,
/// RAMPOOL_STATUS_GONE if its sender was lost before, RAMPOOL_STATUS_NO_ROOM if it is longer than `size`.
///
/// # Safety
/// `client` and `message` are null or valid; `buffer` can be written for `size` bytes, or is null where that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_body(
    client: *mut ClientHandle,
    message: *mut MessageHandle,
    buffer: *mut c_void,
    size: usize,
    patience_ms: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (client, message) = unsafe { (client.as_mut(), message.as_mut()) };
    let (Some(client), Some(message), false) = (client, message, buffer.is_null() && size > 0) else {
        return fail(RampoolStatus::Invalid, "rampool_message_body: a null pointer");
    };
    let room: &mut [u8] = if size == 0 {
        &mut []
    } else {
        // SAFETY: the caller promises as many writable bytes, which nobody else uses meanwhile.
        unsafe { std::slice::from_raw_parts_mut(buffer.cast(), size) }
    };
    done(client.0.body_into(&mut message.0, room, Duration::from_millis(patience_ms.into())).map(drop))
}

/// The message is done with, and its handle freed. Does not block: the server hears of it with the next rampool_queue_take() of that queue, or by rampool_queue_flush().
/// Null does nothing.
///
/// # Safety
/// `client` came from rampool_client_open() or _join() and was not closed; `message` is null or came from rampool_queue_take() with this client and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_done(client: *mut ClientHandle, message: *mut MessageHandle) {
    // SAFETY: null or valid, as the caller promises.
    if let Some(client) = unsafe { client.as_mut() }
        && !message.is_null()
    {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        client.0.done(unsafe { Box::from_raw(message) }.0);
    }
}

/// Gives the message back to its queue, for the next receiver, and frees its handle. Blocks until the server has it.
///
/// # Safety
/// As rampool_message_done().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_give_back(client: *mut ClientHandle, message: *mut MessageHandle) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(client) = (unsafe { client.as_mut() }).filter(|_| !message.is_null()) else {
        return fail(RampoolStatus::Invalid, "rampool_message_give_back: a null pointer");
    };
    // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
    done(client.0.give_back(unsafe { Box::from_raw(message) }.0))
}

fn done(result: Result<(), QueueError>) -> RampoolStatus {
    match result {
        Ok(()) => RampoolStatus::Ok,
        Err(error) => status(&error),
    }
}

fn status(error: &QueueError) -> RampoolStatus {
    let status = match error {
        QueueError::Name | QueueError::Head { .. } | QueueError::Reference { .. } | QueueError::Refused { .. } => RampoolStatus::Invalid,
        QueueError::Direct { source: DirectError::Layout(_), .. } => RampoolStatus::Invalid,
        QueueError::Full { .. } | QueueError::NoRoom { .. } | QueueError::Room { .. } => RampoolStatus::NoRoom,
        QueueError::NoSuchQueue { .. } | QueueError::BodyLost { .. } => RampoolStatus::Gone,
        QueueError::BodyLate { .. } => RampoolStatus::Busy,
        _ => RampoolStatus::Server,
    };
    fail(status, error)
}

/// # Safety
/// `at` is null, or can be read for `len` bytes that nobody writes while the result is used.
unsafe fn bytes<'a>(at: *const c_void, len: usize) -> &'a [u8] {
    // SAFETY: promised by the caller.
    if at.is_null() || len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(at.cast(), len) } }
}
