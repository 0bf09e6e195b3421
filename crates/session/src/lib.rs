//! The client's sessions with its memory servers, as one pure state machine.
//!
//! It decides what leaves when, what an answer, a silence or a broken connection means, and how an
//! operation that spans servers ends. It has no socket, no clock and no page: the shell
//! (`rampool_client::pool`) carries bytes, and the simulator (`rampool_sim::session`) runs the same machine
//! against the real lease engine under one seed.
//!
//! ```text
//!                 operations                                        events
//!                     |                                                ^
//!   client    begin, submit_pages, reserve + Submit, Sealed       Ended, Lost, Draining
//!             one Client: operations cut into parts; each ends when its last part has, and fails if one did
//!                     |                                                ^
//!   work      slots of requests and operations; a request's number is its slot and a generation
//!                     |                                                |
//!   session   one Session a server: queues by class, credits, deadlines, heartbeats, reconnecting
//!                     |                                                ^
//!             Send, Close, Connect, Attach                        Head, Body, Written, Down, Attached, Time
//!                     v                                                |
//!   shell     the frame's bytes into the link                     what the link received
//! ```
//!
//! # A session's states
//!
//! ```text
//!   Up          a connection that counts
//!     -> Pausing      it broke, which may pass; the first attempt is due at once
//!     -> Lost         a deadline, a breach, a break for good, or too many breaks without an answer
//!   Pausing     100 ms between attempts
//!     -> Connecting   when due
//!   Connecting  the shell connects and shakes hands, 2.5 s at most
//!     -> Attaching    Connected
//!     -> Pausing      Failed, may pass; or the time is over
//!   Attaching   the shell asks to be the member again that this client was
//!     -> Up           Attached by the same run, as the same member: what had no answer is asked again
//!     -> Pausing      as above
//!   Pausing, Connecting, Attaching
//!     -> Lost         the grace time or the deadline is over, the server refuses, or another run answers
//!   Lost        one Close, one Lost, then every operation that needed the server ends
//! ```
//!
//! # A request's walk
//!
//! 1. [`Client::reserve`] gives it a number; the shell makes its body there and tells
//!    [`Input::Submit`]. Pages come through [`Client::submit_pages`], which cuts extents at stripes and
//!    at what one request may carry.
//! 2. It waits in the queue of its [`Class`]. [`Client::poll`] lets it go while credits last:
//!    control, then demand, then prefetches and write-backs, which leave an eighth of the credits and
//!    have a window of bytes each.
//! 3. [`Output::Send`]: the shell makes the frame and tells [`Input::Queued`] how much waits in the
//!    link, and [`Input::Written`] after each flush. Submitting and sending is one pass: `Submit`,
//!    then `poll` until `None`.
//! 4. [`Input::Head`] brings the answer. Bytes follow: [`Output::Receive`], then [`Input::Body`]. None
//!    follow: [`Output::Answered`]. Damaged bytes are asked for once more, under a new number.
//! 5. [`Output::Ended`] ends the operation with its last part.
//!
//! # What is asked again after a break
//!
//! Everything without an answer, in its order and under its number, and nothing of it before
//! [`Output::Back`]:
//!
//! |request|why that is right|
//! |---|---|
//! |Get, Gather, ReadPiece, Scan|a change of the same bytes waits until the read is answered|
//! |Put, Discard, Scatter, FreeRegion|the server takes them in order: all later ones are unanswered as well|
//! |FetchOp, Accumulate|the server remembers the answers to the latest 256 numbers; no more are outstanding|
//! |CreateRegion, CloneRegion|the server remembers the latest number; one is outstanding at a time|
//! |queues|the server remembers the numbers of pushes and takes|
//! |Heartbeat|not asked again: the reconnection was one|
//!
//! The server ignores what still arrives over the old connection; so does the session
//! ([`LinkId`]). A server that runs anew, or has given this member up, is lost with its pages. It
//! may be joined anew ([`Input::Renew`]).
//!
//! # Two holders of a page
//!
//! Placement ([`Client::place`]) is consulted in [`Client::submit_pages`] alone; what is observed of a
//! server (answers, silence, breaks) is in [`Session`] alone; what follows for a page with two holders is
//! in `Client::settle` alone.
//!
//! ```text
//!   Well        up, and not suspected; it may be slow (`hedge.rs`)
//!     -> Suspect   silent for 20 ms, or 4 times what late answers took     fetches go to the other holder,
//!     -> Away      the connection is broken                                stores wait
//!   Suspect, Away
//!     -> Well      an answer; attached again                               nothing was missed
//!     -> Absent    where every page has another holder that is there:      stores end without it, and are
//!                  after 150 ms of silence or without a connection         in its missed set
//!   Absent
//!     -> Behind    attached again by the same run                          stores go there again; fetches,
//!     -> Lost      another run, a refusal, or a minute                     of what is not in the set
//!   Behind
//!     -> Well      its missed set is empty
//!   Lost
//!     -> Absent    the shell knows of another lease there (Renew)          it has no region, has missed all
//! ```
//!
//! A server that is behind gets what it has missed in *pieces* ([`Output::Piece`]): a fetch from the
//! other holder, and a store. `copies.rs` has the missed sets and says why a piece never brings back
//! what was changed meanwhile. A holder without room is behind as well. What is stored again leaves the
//! set with the holder's answer.
//!
//! A server may be absent, or lost, while another one is behind. Fetches of what only the absent one
//! has wait for it, as long as a silent server without a spare is waited for; then, or when it is
//! lost, those pages are *gone* ([`Client::is_gone`]): who asks for them fails, and everything else
//! goes on. A store makes them anew.
//!
//! A store is a request to each holder, and ends with the last answer. So what is acknowledged lies at every
//! holder that has not missed it, and any of them may be read. A suspected server is waited for: its
//! connection still reads the store's memory, which cannot be used again before that is closed. A fetch is a
//! request to one holder; one that moves has a new number. An answer to the old one counts if it comes
//! first: then the fetch is that server's again, under a third number; if not, it is dropped
//! ([`Output::Drop`]). An operation fails with the last holder of one of its pages. The client's own pauses
//! do not count as a server's silence.
//!
//! # Servers that are out
//!
//! A server is *out* ([`Client::is_out`]) while it drains, once it has been away for [`REBUILD_AFTER`] while
//! two others are there, and before it has ever been there. Other servers hold its pages then, as placement
//! says; when it is back, it holds its own again. The last server that can hold pages is never out. Whoever
//! comes to hold a page has missed it, and gets it in a piece; who held it has it *left*, and is read if no
//! holder has it, until it has been changed or all holders have it. Then a piece drops it. A draining server
//! that has nothing left is told goodbye ([`Lost::Drained`]).
//!
//! So a server that says wrongly that it drains costs its own part of the traffic, and no page: nothing is
//! dropped before others have it. Each process decides for itself. What it hands over says which servers are
//! out, and the next one makes of it what they are for it ([`History`]).
//!
//! # A region for another process
//!
//! ```text
//!   Client::hand_over   names where servers are there, and what each has missed; the rest is freed, later
//!                       where a server is absent
//!   Client::take_over   by a process that has adopted the region at the servers that it could join;
//!                       elsewhere it is made anew. A region whose adoption has no answer when its server
//!                       becomes absent is freed there later: it may be this process's
//!   Client::not_taken   what the first process frees when the other one has taken what it can
//! ```
#![forbid(unsafe_code)]

mod client;
mod copies;
mod hedge;
mod io;
mod pace;
mod places;
mod rule;
mod session;
mod work;

pub use client::{Client, Fill, Pages, REBUILD_AFTER};
pub use copies::{HandedOver, History, PIECE_PAGES, PIECES, Region};
pub use io::{
    Ask, Breach, Break, CLASSES, Class, Failed, Grant, Input, LinkId, Lost, OpId, Outcome, Output, RequestId,
    SENT_TOGETHER_BYTES, Time, What,
};
pub use pace::CALM;
pub use places::{Known, Places, Stamp};
pub use rampool_paging::page_set::PageSet;
pub use rule::Rule;
pub use session::{
    ABSENCE, ATTACH_NUMBER, ATTEMPT, BULK_WINDOW_BYTES, Counts, DEADLINES, LAST_CHANCE, LINK_QUEUE_BYTES,
    MAX_BREAKS, MOST_SPARE_SILENCE, PAUSE, SPARE_SILENCE, SUSPICION, Session,
};
pub use work::Request;
