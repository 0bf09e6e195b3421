//! What the machine is told, and what it orders.

use std::ops::{Add, Sub};
use std::time::Duration;

use rampool_paging::placement::ServerIndex;
use rampool_wire::frame::{Granted, Header, LeaseId, MemberId, Opcode, RegionId, Status};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};

/// A moment on the shell's clock: nanoseconds since a start of its choosing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, after: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Time {
    type Output = Duration;

    /// Zero where `earlier` is later.
    fn sub(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// What goes first. Within a class, requests to one server leave in the order in which they were made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    /// Leases, regions, keys, heartbeats. They carry no pages.
    Control = 0,
    /// A thread waits.
    Demand = 1,
    Prefetch = 2,
    /// Stores and discards; in one class so that they never overtake each other.
    WriteBack = 3,
}

pub const CLASSES: usize = 4;

/// Stores of the direct view that carry so much leave together: each call to send ends in a small segment of
/// its own, with its share of the kernel's work.
pub const SENT_TOGETHER_BYTES: usize = 512 << 10;

/// A request, as long as it is under way. The shell keeps its body (extents, tables, memory)
/// under this number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub u32);

/// An operation, as long as it is under way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpId(pub u32);

/// One connection to one server, or one attempt to make it. No number is used twice for a server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId {
    pub server: ServerIndex,
    pub connection: u32,
}

/// What the machine knows of a request.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub server: ServerIndex,
    pub opcode: Opcode,
    pub class: Class,
    pub region: RegionId,
    /// The operation that this is a part of.
    pub op: Option<OpId>,
    /// Bytes of credit it takes: of pages or of a window, sent or asked for.
    pub bytes: u64,
    /// The first page, or the first byte, for people.
    pub at: u64,
    /// The bytes of the region that a request of the direct view reads or changes: first, and
    /// the one after the last.
    pub span: (u64, u64),
    /// Of a copy: the server that is to store the bytes.
    pub copy_to: Option<ServerIndex>,
    /// Another server that holds the same pages; what it has of them, the machine knows.
    pub other: Option<ServerIndex>,
    /// The region as the client calls it, where there may be another server.
    pub of: u32,
    /// The piece that it is a step of, where the machine itself copies pages to a server that
    /// has missed them.
    pub piece: Option<u8>,
    /// The shell waits for the reply itself.
    pub wanted: bool,
}

impl Ask {
    /// A request without pages.
    #[must_use]
    pub fn control(server: ServerIndex, opcode: Opcode, region: RegionId) -> Self {
        let class = Class::Control;
        Self {
            server,
            opcode,
            class,
            region,
            op: None,
            bytes: 0,
            at: 0,
            span: (0, 0),
            copy_to: None,
            other: None,
            of: 0,
            piece: None,
            wanted: false,
        }
    }
}

/// What a request was about, for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct What {
    pub opcode: Opcode,
    /// The first page, or the first byte.
    pub at: u64,
}

/// What a server granted, as far as it decides anything here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    pub lease: LeaseId,
    pub member: MemberId,
    /// This run of the server.
    pub run: u64,
    pub max_requests: u32,
    pub max_bytes: u32,
    pub grace: Duration,
    /// Zero: the server does not ask for heartbeats.
    pub heartbeat: Duration,
}

impl Grant {
    /// Whether one page at a time fits at all.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.max_requests > 0 && self.max_bytes as usize >= OS_PAGE_BYTES
    }
}

impl From<&Granted> for Grant {
    fn from(granted: &Granted) -> Self {
        Self {
            lease: granted.lease,
            member: granted.member,
            run: granted.server,
            max_requests: granted.max_requests,
            max_bytes: granted.max_bytes,
            grace: Duration::from_millis(granted.grace_ms.into()),
            heartbeat: Duration::from_millis(granted.heartbeat_ms.into()),
        }
    }
}

/// Why a connection is of no use any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Break {
    /// It closed, or the kernel reports an error: the next one may work.
    MayPass,
    /// What came over it makes no sense.
    Final,
}

/// Why an attempt to connect failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failed {
    /// The next one may work.
    MayPass,
    /// The server refuses the connection or the handshake: it has ended, with its pages, or
    /// another one is there.
    ForGood,
}

/// What the machine is told.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// The body of this request is ready ([`crate::Client::reserve`]).
    Submit(RequestId, Ask),
    /// All parts of this operation are submitted ([`crate::Client::begin`]).
    Sealed(OpId),
    /// The frame of [`Output::Send`] is in the link, where so many bytes wait to leave.
    Queued { link: LinkId, waiting: usize },
    /// The link was flushed; so many bytes still wait to leave.
    Written { link: LinkId, waiting: usize },
    /// The frame of the request with this number has left this process altogether.
    Departed { number: u64 },
    /// A head with its table has arrived.
    Head { link: LinkId, header: Header },
    /// The bytes of [`Output::Receive`] are in their places; the first page of what is
    /// damaged, if anything is.
    Body { link: LinkId, request: RequestId, damaged: Option<PageIndex> },
    /// Whether everything that has arrived was looked at.
    Drained { link: LinkId, all: bool },
    /// The connection broke. The shell keeps the error's text.
    Down { link: LinkId, why: Break },
    /// The connection of [`Output::Connect`] is there, and both sides have proved what they had to.
    Connected { link: LinkId },
    /// [`Output::Connect`] or [`Output::Attach`] came to nothing, and the shell has dropped
    /// what there was of it.
    Failed { link: LinkId, why: Failed },
    /// The answer to [`Output::Attach`]; `None`: its table makes no sense.
    Attached { link: LinkId, header: Header, grant: Option<Grant> },
    /// The first grant of this server. `reconnects`: a broken connection is made again.
    Granted { server: ServerIndex, grant: Grant, reconnects: bool },
    /// From now on broken connections stay broken.
    StayAway,
    /// The shell cannot go on with this server. It keeps the reason's text.
    Lose { server: ServerIndex },
    /// A lost server may be joined anew: the shell knows how. [`Output::Attach`] asks to open a lease there,
    /// or to become a new member of one. It has nothing of what it had.
    Renew { server: ServerIndex },
    /// Nothing happened but time.
    Time,
}

/// What the machine orders. The shell carries out each one before it asks for the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// Give the frame of this request to the link; then tell [`Input::Queued`].
    Send { link: LinkId, request: RequestId, number: u64 },
    /// The head that has just come answers this request and bytes follow: say where they go, check them,
    /// then tell [`Input::Body`].
    Receive { link: LinkId, request: RequestId },
    /// The head that has just come, or the body, ended this request. `wanted`: the shell waits
    /// for the reply itself.
    Answered { link: LinkId, request: RequestId, number: u64, wanted: bool, refused: bool },
    /// Make this connection, and shake hands. Ends with [`Input::Connected`] or [`Input::Failed`].
    Connect { link: LinkId },
    /// Ask over it to become the member again that this client was. Ends with
    /// [`Input::Attached`], or as `Connect`.
    Attach { link: LinkId },
    /// Drop this connection with everything queued for it: its memory belongs to the operations again.
    Close { link: LinkId },
    /// The connection is made again; what had no answer follows.
    Back { link: LinkId },
    /// The server is lost for good. `during`: what it was asked for longest; none: nothing. `spare`: every
    /// page that it held has another holder that is there. What that has missed is gone.
    Lost { server: ServerIndex, during: Option<What>, reason: Lost, spare: bool },
    /// This request for pages goes to another of their holders. The first one may still answer it before that
    /// does: [`Output::Receive`] names who does.
    Moved { request: RequestId, from: ServerIndex },
    /// The machine makes this request itself ([`Ask::piece`]): its body is these pages, in the memory of the
    /// piece; or nothing, if there are none.
    Piece { request: RequestId, piece: u8, pages: Extent },
    /// The server does not answer, and its pages have other holders. These are used instead until it is back.
    Absent { server: ServerIndex, during: Option<What>, reason: Lost },
    /// It is back, and gets what it has missed.
    Returned { server: ServerIndex },
    /// It has all of its pages again.
    CaughtUp { server: ServerIndex },
    /// Bytes follow the head that has just come, to a request that was moved: drop them.
    /// Nothing is told of their end.
    Drop { link: LinkId },
    /// From now on other servers hold the pages of this one, or it holds its own again. They are copied.
    Holds { server: ServerIndex, out: bool },
    /// The server stops after so many milliseconds.
    Draining { server: ServerIndex, left_ms: u64 },
    /// The operation has ended; nothing touches its memory any more.
    Ended { op: OpId, token: u64, store: bool, outcome: Outcome },
}

/// How an operation ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    /// A server had no room for all of it.
    Full {
        server: ServerIndex,
        free: u64,
    },
    /// Twice in a row, bytes came damaged.
    Corrupt {
        server: ServerIndex,
        page: PageIndex,
    },
    /// A server said no; the shell has the text.
    Denied {
        server: ServerIndex,
        what: What,
        status: Status,
    },
    Lost {
        server: ServerIndex,
        what: What,
        reason: Lost,
    },
}

/// Why a server is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lost {
    /// The connection broke and could not be made again; the shell has the text.
    Connection,
    /// No answer for so long.
    Deadline(Duration),
    /// It does not know this member any more.
    GivenUp,
    /// It drains, and nothing of this client is left there.
    Drained,
    Breach(Breach),
}

/// How a server broke the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Breach {
    #[error("the server asks for {0:?}")]
    Asks(Opcode),
    #[error("an answer ({0:?}) to nothing that was asked")]
    NothingAsked(Opcode),
    #[error("an answer to {answered:?}, asked was {asked:?}")]
    OtherOperation { answered: Opcode, asked: Opcode },
    #[error("an answer to {0:?} that carries pages")]
    CarriesPages(Opcode),
    #[error("an answer to a store before all of it was sent")]
    TooEarly,
    #[error("the server counts more requests than were sent")]
    OverCredit,
    #[error("what {0:?} found came damaged twice")]
    DamagedTwice(Opcode),
    #[error("it took this client for another")]
    AnotherMember,
    #[error("it grants not even one page at a time")]
    NothingGranted,
    #[error("its grant makes no sense")]
    OddGrant,
}
