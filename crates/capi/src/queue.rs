//! Remote queues in C: conversions around [`runtime::direct`].

use std::ffi::{c_char, c_void};
use std::time::Duration;

use runtime::direct::{DirectError, Message, Queue, QueueBounds, QueueError, SendBody};

use crate::direct::{DirectHandle, DirectRegionHandle, LayoutHandle};
use crate::{RampoolStatus, bytes_at, fail, null_pointer, text};

/// Most messages in one call; each takes a little memory on the way.
const MOST_SENT: usize = 1 << 20;

/// A queue: a name that messages are sent to and taken from. Valid for every member of the lease.
pub struct QueueHandle(Queue);

/// A message that was taken, until rampool_message_done() or rampool_message_give_back().
pub struct MessageHandle(Message);

/// Opens the queue of this name. If it does not exist it is created, for at most `messages` messages with
/// `bytes` bytes in all. If both are 0 it is not created, and the status is RAMPOOL_STATUS_GONE. On success,
/// free `*queue` with rampool_queue_free(); otherwise it is null. Blocks until the server has answered.
///
/// # Safety
/// `direct` came from rampool_direct_open() or _join() and was not closed; `name` is null or ends with a zero
/// byte; `queue` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_open(
    direct: *mut DirectHandle,
    name: *const c_char,
    messages: u64,
    bytes: u64,
    queue: *mut *mut QueueHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, name, out) = unsafe { (direct.as_mut(), text(name), queue.as_mut()) };
    let (Some(direct), Some(name), Some(out)) = (direct, name, out) else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_queue_open: a null pointer, or a name that is not UTF-8",
        );
    };
    *out = std::ptr::null_mut();
    let opened = match (messages, bytes) {
        (0, 0) => direct.0.open_queue(name),
        _ => direct.0.open_or_create_queue(name, QueueBounds { messages, bytes }),
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

/// Deletes the queue and all messages in it, for every member of the lease. The handle must still be freed.
///
/// # Safety
/// `direct` and `queue` are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_delete(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(direct), Some(queue)) = (unsafe { (direct.as_mut(), queue.as_ref()) }) else {
        return null_pointer("rampool_queue_delete");
    };
    done(direct.0.free_queue(&queue.0))
}

/// Appends a message: a head of at most 256 bytes, which is delivered at once, and a body of any length (0:
/// none), which follows. Blocks until the server has all of it. If the queue stays full for `timeout_ms`
/// milliseconds, the status is RAMPOOL_STATUS_NO_ROOM. A send that succeeded has appended the message exactly
/// once.
///
/// # Safety
/// `direct` and `queue` are null or valid; `head` and `body` can be read for the given number of bytes, or
/// are null if that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_send(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
    head: *const c_void,
    head_bytes: usize,
    body: *const c_void,
    body_bytes: usize,
    timeout_ms: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, queue) = unsafe { (direct.as_mut(), queue.as_ref()) };
    let (Some(direct), Some(queue), false, false) =
        (direct, queue, head.is_null() && head_bytes > 0, body.is_null() && body_bytes > 0)
    else {
        return null_pointer("rampool_queue_send");
    };
    // SAFETY: the caller promises as many readable bytes, which do not change during the call.
    let (head, body) = unsafe { (bytes_at(head, head_bytes), bytes_at(body, body_bytes)) };
    let body = if body.is_empty() { SendBody::None } else { SendBody::Bytes(body) };
    done(direct.0.send(&queue.0, head, body, Duration::from_millis(timeout_ms.into())))
}

/// Appends a message whose body is what `layout` selects from `offset` of a region on. The body
/// is not copied: it stays the region's, and is what it is when the receiver reads it.
/// Otherwise as rampool_queue_send().
///
/// # Safety
/// As rampool_queue_send(); `region` and `layout` are null or valid, and `region` is of `direct`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_send_region(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
    head: *const c_void,
    head_bytes: usize,
    region: *const DirectRegionHandle,
    offset: u64,
    layout: *const LayoutHandle,
    timeout_ms: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, queue) = unsafe { (direct.as_mut(), queue.as_ref()) };
    // SAFETY: as above.
    let (region, layout) = unsafe { (region.as_ref(), layout.as_ref()) };
    let (Some(direct), Some(queue), Some(region), Some(layout), false) =
        (direct, queue, region, layout, head.is_null() && head_bytes > 0)
    else {
        return null_pointer("rampool_queue_send_region");
    };
    // SAFETY: the caller promises as many readable bytes, which do not change during the call.
    let head = unsafe { bytes_at(head, head_bytes) };
    let body = SendBody::InPool { region: region.0, offset, layout: &layout.0 };
    done(direct.0.send(&queue.0, head, body, Duration::from_millis(timeout_ms.into())))
}

/// Appends `count` messages of `head_bytes` bytes each (at most 256), contiguous at `heads`, without bodies.
/// They travel in groups, each of which enters the queue whole. This takes fewer requests and answers than
/// rampool_queue_send() for each. Blocks until all are in the queue, or until a group has waited
/// `timeout_ms` milliseconds for room. `*sent` is the number of messages, from the first on, that are in the
/// queue. It is less than `count` if there was no room for more. If there was room for none, the status is
/// RAMPOOL_STATUS_NO_ROOM. One call sends at most 1048576 messages; with more, the status is
/// RAMPOOL_STATUS_INVALID, and none is sent.
///
/// # Safety
/// `direct` and `queue` are null or valid; `heads` has `count` times `head_bytes` bytes; `sent` is null or
/// can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_send_many(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
    heads: *const c_void,
    head_bytes: usize,
    count: usize,
    timeout_ms: u32,
    sent: *mut usize,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, queue, out) = unsafe { (direct.as_mut(), queue.as_ref(), sent.as_mut()) };
    let total = head_bytes.checked_mul(count);
    let (Some(direct), Some(queue), Some(out), Some(total), false) =
        (direct, queue, out, total, heads.is_null() && total != Some(0))
    else {
        return fail(
            RampoolStatus::Invalid,
            "rampool_queue_send_many: a null pointer, or more messages than memory has bytes",
        );
    };
    *out = 0;
    if count > MOST_SENT {
        return fail(
            RampoolStatus::Invalid,
            format!("rampool_queue_send_many: {count} messages; one call sends at most {MOST_SENT}"),
        );
    }
    // SAFETY: the caller promises as many readable bytes, which do not change during the call.
    let all = unsafe { bytes_at(heads, total) };
    let heads: Vec<&[u8]> = (0..count).map(|n| &all[n * head_bytes..(n + 1) * head_bytes]).collect();
    match direct.0.send_many(&queue.0, &heads, Duration::from_millis(timeout_ms.into())) {
        Ok(sent) => {
            *out = sent;
            RampoolStatus::Ok
        }
        Err(error) => status(&error),
    }
}

/// Takes the next message. Blocks until there is one, for at most `timeout_ms` milliseconds; then `*message`
/// is null, and the call succeeds. A message stays in its queue until rampool_message_done(): if this process
/// is lost before that, or closes the direct view, another receiver gets it.
///
/// # Safety
/// `direct` and `queue` are null or valid; `message` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_take(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
    timeout_ms: u32,
    message: *mut *mut MessageHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(direct), Some(queue), Some(out)) =
        (unsafe { (direct.as_mut(), queue.as_ref(), message.as_mut()) })
    else {
        return null_pointer("rampool_queue_take");
    };
    *out = std::ptr::null_mut();
    took(direct.0.take(&queue.0, Duration::from_millis(timeout_ms.into())), out)
}

/// Which heads are wanted: those with the bytes of `head` wherever `mask` has a bit, as MPI matches by source
/// and tag. Of `head` and `mask` the first `bytes` count; a shorter head is not wanted.
#[repr(C)]
pub struct RampoolHeadMatch {
    pub head: *const c_void,
    pub mask: *const c_void,
    pub bytes: usize,
}

/// Takes the next message whose head is wanted, otherwise as rampool_queue_take(). Messages that it passes
/// over stay here, in their order, for later calls: they count against the queue's bounds, and no other
/// receiver gets them unless this one leaves.
///
/// # Safety
/// `direct` and `queue` are null or valid; `wanted` is null or valid, and its `head` and `mask` can be read
/// for `bytes` bytes; `message` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_take_where(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
    wanted: *const RampoolHeadMatch,
    timeout_ms: u32,
    message: *mut *mut MessageHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, queue, wanted, out) =
        unsafe { (direct.as_mut(), queue.as_ref(), wanted.as_ref(), message.as_mut()) };
    let (Some(direct), Some(queue), Some(wanted), Some(out)) = (direct, queue, wanted, out) else {
        return null_pointer("rampool_queue_take_where");
    };
    *out = std::ptr::null_mut();
    if wanted.bytes > 0 && (wanted.head.is_null() || wanted.mask.is_null()) {
        return null_pointer("rampool_queue_take_where");
    }
    // SAFETY: readable for so many bytes, as the caller promises.
    let (head, mask) = unsafe { (bytes_at(wanted.head, wanted.bytes), bytes_at(wanted.mask, wanted.bytes)) };
    let matches = |found: &[u8]| {
        found.len() >= head.len()
            && found.iter().zip(head.iter().zip(mask)).all(|(found, (head, mask))| (found ^ head) & mask == 0)
    };
    took(direct.0.take_where(&queue.0, matches, Duration::from_millis(timeout_ms.into())), out)
}

/// Gives a message to C, or none.
fn took(taken: Result<Option<Message>, QueueError>, out: &mut *mut MessageHandle) -> RampoolStatus {
    match taken {
        Ok(message) => {
            if let Some(message) = message {
                *out = Box::into_raw(Box::new(MessageHandle(message)));
            }
            RampoolStatus::Ok
        }
        Err(error) => status(&error),
    }
}

/// From now on the body of a message starts to come here as soon as its head does, without a call, if it has
/// at most so many bytes; 0: none does. Every message that is here may then have so many bytes here.
///
/// # Safety
/// `direct` and `queue` are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_prefetch_bodies(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
    at_most: u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(direct), Some(queue)) = (unsafe { (direct.as_mut(), queue.as_ref()) }) else {
        return null_pointer("rampool_queue_prefetch_bodies");
    };
    direct.0.prefetch_bodies(&queue.0, at_most);
    RampoolStatus::Ok
}

/// Blocks until the server has heard of every message that this member is done with.
///
/// # Safety
/// `direct` and `queue` are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_queue_flush(
    direct: *mut DirectHandle,
    queue: *const QueueHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (Some(direct), Some(queue)) = (unsafe { (direct.as_mut(), queue.as_ref()) }) else {
        return null_pointer("rampool_queue_flush");
    };
    done(direct.0.flush_done(&queue.0))
}

/// The head of a message, and its length in `*bytes`; null for null. Valid as long as the message.
///
/// # Safety
/// `message` is null or valid; `bytes` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_head(
    message: *const MessageHandle,
    bytes: *mut usize,
) -> *const c_void {
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

/// Whether the message was delivered before, to a receiver that did not finish it; false for null.
///
/// # Safety
/// `message` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_redelivered(message: *const MessageHandle) -> bool {
    // SAFETY: null or valid, as the caller promises.
    unsafe { message.as_ref() }.is_some_and(|message| message.0.redelivered())
}

/// Reads the body of a message to `buffer`. Blocks until it is there. RAMPOOL_STATUS_BUSY if it has not
/// arrived at the server within `timeout_ms` milliseconds, RAMPOOL_STATUS_GONE if its sender was lost
/// before, RAMPOOL_STATUS_NO_ROOM if it is longer than `size`.
///
/// # Safety
/// `direct` and `message` are null or valid; `buffer` can be written for `size` bytes, or is null if that is
/// 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_body(
    direct: *mut DirectHandle,
    message: *mut MessageHandle,
    buffer: *mut c_void,
    size: usize,
    timeout_ms: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, message) = unsafe { (direct.as_mut(), message.as_mut()) };
    let (Some(direct), Some(message), false) = (direct, message, buffer.is_null() && size > 0) else {
        return null_pointer("rampool_message_body");
    };
    let room: &mut [u8] = if size == 0 {
        &mut []
    } else {
        // SAFETY: the caller promises as many writable bytes, which nothing else uses during the call.
        unsafe { std::slice::from_raw_parts_mut(buffer.cast(), size) }
    };
    done(direct.0.body_into(&mut message.0, room, Duration::from_millis(timeout_ms.into())).map(drop))
}

/// Copies the body of a message to a region, from `offset` on, from server to server: no byte of it comes
/// here. Blocks and fails as rampool_message_body().
///
/// # Safety
/// `direct`, `message` and `region` are null or valid, and `region` is of `direct`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_land_body(
    direct: *mut DirectHandle,
    message: *mut MessageHandle,
    region: *const DirectRegionHandle,
    offset: u64,
    timeout_ms: u32,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, message, region) = unsafe { (direct.as_mut(), message.as_mut(), region.as_ref()) };
    let (Some(direct), Some(message), Some(region)) = (direct, message, region) else {
        return null_pointer("rampool_message_land_body");
    };
    let timeout = Duration::from_millis(timeout_ms.into());
    done(direct.0.land_body(&mut message.0, region.0, offset, timeout))
}

/// Where the body of a message lies in the pool: a region and the offset of its first byte. Every
/// operation of the direct view works there; a body that came with its message may only be read,
/// until rampool_message_done(). If the message has no body, or its body is not in one piece,
/// `*region` is null and the call succeeds. Close `*region` with rampool_direct_region_close().
/// Blocks and fails as rampool_message_body().
///
/// # Safety
/// `direct` and `message` are null or valid; `region` and `offset` are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_body_place(
    direct: *mut DirectHandle,
    message: *mut MessageHandle,
    timeout_ms: u32,
    region: *mut *mut DirectRegionHandle,
    offset: *mut u64,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let (direct, message) = unsafe { (direct.as_mut(), message.as_mut()) };
    // SAFETY: as above.
    let (region, offset) = unsafe { (region.as_mut(), offset.as_mut()) };
    let (Some(direct), Some(message), Some(region), Some(offset)) = (direct, message, region, offset) else {
        return null_pointer("rampool_message_body_place");
    };
    (*region, *offset) = (std::ptr::null_mut(), 0);
    match direct.0.body_place(&mut message.0, Duration::from_millis(timeout_ms.into())) {
        Ok(place) => {
            if let Some((found, at)) = place {
                (*region, *offset) = (Box::into_raw(Box::new(DirectRegionHandle(found))), at);
            }
            RampoolStatus::Ok
        }
        Err(error) => status(&error),
    }
}

/// Acknowledges the message, and frees its handle. Does not block: the server hears of it with the next
/// rampool_queue_take() of that queue, or by rampool_queue_flush(). Null does nothing.
///
/// # Safety
/// `direct` came from rampool_direct_open() or _join() and was not closed; `message` is null or came from
/// rampool_queue_take() with this direct view and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_done(direct: *mut DirectHandle, message: *mut MessageHandle) {
    // SAFETY: null or valid, as the caller promises.
    if let Some(direct) = unsafe { direct.as_mut() }
        && !message.is_null()
    {
        // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
        direct.0.done(unsafe { Box::from_raw(message) }.0);
    }
}

/// Returns the message to its queue, for the next receiver, and frees its handle. Blocks until the server has
/// it.
///
/// # Safety
/// As rampool_message_done().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rampool_message_give_back(
    direct: *mut DirectHandle,
    message: *mut MessageHandle,
) -> RampoolStatus {
    // SAFETY: null or valid, as the caller promises.
    let Some(direct) = (unsafe { direct.as_mut() }).filter(|_| !message.is_null()) else {
        return null_pointer("rampool_message_give_back");
    };
    // SAFETY: made by `Box::into_raw`, and freed once, as the caller promises.
    done(direct.0.give_back(unsafe { Box::from_raw(message) }.0))
}

fn done(result: Result<(), QueueError>) -> RampoolStatus {
    match result {
        Ok(()) => RampoolStatus::Ok,
        Err(error) => status(&error),
    }
}

fn status(error: &QueueError) -> RampoolStatus {
    let status = match error {
        QueueError::Name
        | QueueError::Head { .. }
        | QueueError::Reference { .. }
        | QueueError::Refused { .. } => RampoolStatus::Invalid,
        QueueError::Direct { source: DirectError::Layout(_), .. } => RampoolStatus::Invalid,
        QueueError::Full { .. } | QueueError::NoRoom { .. } | QueueError::Room { .. } => {
            RampoolStatus::NoRoom
        }
        QueueError::NoSuchQueue { .. } | QueueError::BodyLost { .. } => RampoolStatus::Gone,
        QueueError::BodyLate { .. } => RampoolStatus::Busy,
        _ => RampoolStatus::Server,
    };
    fail(status, error)
}
