//! Messages between the hosts of ranks, next to the engines' messages: identity, allocations, liveness, the
//! end.
//!
//! ```text
//! frame      length u32 (of the rest) | kind u8 | taken u32 | bytes
//! kind       0 an engine's message, 1 a control message, 2 only `taken`
//! ```
//! Little-endian. `taken`: how many bytes of whole frames of kinds 0 and 1 the sender has received from the
//! receiver, modulo 2^32; 0 if the connection cannot be cut ([`super::stream`]). The first frame of a
//! connection is [`Control::Hello`], from the side that connected; the first of one that replaces another is
//! [`Control::Resume`].

use std::sync::Arc;

use super::direct::PageAccess;
use super::wire::{Malformed, Reader, Wire, wire_enum, wire_struct};
use super::{Homes, LockId, ProtocolKind, Rank, RegionConfig};
use rampool_wire::units::{Extent, PageIndex};

/// The protocol version that two ranks must share to understand each other, in addition to the version of the
/// program.
pub const SHARE_WIRE_VERSION: u32 = 8;
/// The longest frame that a rank takes.
pub const MOST_FRAME_BYTES: usize = 64 << 20;
/// Bytes before a frame's content: its length, its kind, and the sender's `taken`.
pub const FRAME_HEADER_BYTES: usize = 9;

/// The content of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    Message,
    Control,
    /// No content: it acknowledges only.
    Acknowledgement,
}

/// The start of the bytes received on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Framed<'a> {
    /// More bytes are needed.
    Partial,
    /// A frame: its kind, the sender's `taken`, its content, and its length in bytes.
    Whole { kind: FrameKind, has: u32, content: &'a [u8], taken: usize },
}

/// Looks for a frame at the beginning of `bytes`.
///
/// # Errors
/// If the bytes are not a frame; the connection is broken then.
pub fn deframe(bytes: &[u8]) -> Result<Framed<'_>, Malformed> {
    let Some((head, rest)) = bytes.split_at_checked(FRAME_HEADER_BYTES) else { return Ok(Framed::Partial) };
    let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
    if !(FRAME_HEADER_BYTES - 4..=MOST_FRAME_BYTES).contains(&len) {
        return Err(Malformed { what: "a frame's length is impossible", at: 0 });
    }
    let kind = match head[4] {
        0 => FrameKind::Message,
        1 => FrameKind::Control,
        2 if len == FRAME_HEADER_BYTES - 4 => FrameKind::Acknowledgement,
        _ => return Err(Malformed { what: "an unknown kind of frame", at: 4 }),
    };
    let has = u32::from_le_bytes([head[5], head[6], head[7], head[8]]);
    match rest.get(..len - (FRAME_HEADER_BYTES - 4)) {
        Some(content) => Ok(Framed::Whole { kind, has, content, taken: 4 + len }),
        None => Ok(Framed::Partial),
    }
}

/// Appends a frame whose content `write` appends; `has`: the bytes that its sender has received.
///
/// # Panics
/// If the content is longer than [`MOST_FRAME_BYTES`].
pub fn frame(kind: FrameKind, has: u32, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_HEADER_BYTES]);
    write(out);
    let len = out.len() - start - 4;
    assert!(len <= MOST_FRAME_BYTES, "a frame of {len} bytes");
    out[start..start + 4].copy_from_slice(&u32::try_from(len).expect("checked").to_le_bytes());
    out[start + 4] = match kind {
        FrameKind::Message => 0,
        FrameKind::Control => 1,
        FrameKind::Acknowledgement => 2,
    };
    out[start + 5..start + FRAME_HEADER_BYTES].copy_from_slice(&has.to_le_bytes());
}

/// The identity of a rank that connects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// [`SHARE_WIRE_VERSION`].
    pub wire: u32,
    /// The version of rampool.
    pub build: String,
    /// The run's name.
    pub run: String,
    /// The settings that have to be the same everywhere, as text.
    pub settings: String,
    pub rank: Rank,
    pub ranks: u16,
    /// Where this rank listens, and where it receives datagrams (0: nowhere).
    pub port: u16,
    pub datagram_port: u16,
    /// A random number that tells this process from every other that is or was this rank.
    pub incarnation: u64,
}
wire_struct!(Hello { wire, build, run, settings, rank, ranks, port, datagram_port, incarnation });

impl Hello {
    /// Whether the rank that sent this can run together with the one that sent `mine`; if not, why, naming
    /// both.
    ///
    /// # Errors
    /// The difference.
    pub fn compatible(&self, mine: &Self) -> Result<(), String> {
        let (one, other) = (mine.rank, self.rank);
        if self.wire != mine.wire || self.build != mine.build {
            return Err(format!(
                "{one} is rampool {} (sharing protocol {}), {other} is rampool {} (sharing protocol {}): all ranks must have the same version",
                mine.build, mine.wire, self.build, self.wire
            ));
        }
        if self.ranks != mine.ranks {
            return Err(format!("{one} counts {} ranks, {other} counts {}", mine.ranks, self.ranks));
        }
        if self.rank.0 >= mine.ranks || self.rank == mine.rank {
            return Err(format!("{one} of {} ranks met one that says it is {other}", mine.ranks));
        }
        if self.settings != mine.settings {
            let (mine, theirs) = differences(&mine.settings, &self.settings);
            return Err(format!("ranks have different settings: {one} has {mine}; {other} has {theirs}"));
        }
        Ok(())
    }
}

/// The differences of two lists of settings, one for each list; all settings if the lists have different
/// names.
fn differences(mine: &str, theirs: &str) -> (String, String) {
    let parts = |text: &str| text.split(", ").map(str::to_owned).collect::<Vec<_>>();
    let (mut left, mut right) = (parts(mine), parts(theirs));
    if left.len() == right.len() {
        (left, right) = left.into_iter().zip(right).filter(|(one, other)| one != other).unzip();
    }
    (left.join(", "), right.join(", "))
}

/// The identity of a rank that replaces a cut connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resume {
    /// As in [`Hello`].
    pub run: String,
    pub rank: Rank,
    pub incarnation: u64,
    /// The incarnation of the rank that it wants to resume with.
    pub of: u64,
    /// The number of this attempt of the pair of ranks.
    pub attempt: u32,
    /// Bytes of whole frames that the sender has received from that rank.
    pub received: u64,
}
wire_struct!(Resume { run, rank, incarnation, of, attempt, received });

/// The properties of a new region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    pub bytes: u64,
    pub page_bytes: u32,
    pub protocol: ProtocolKind,
    pub homes: Homes,
}
wire_struct!(Wish { bytes, page_bytes, protocol, homes });

/// A change of the allocations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Demand {
    Alloc {
        wish: Wish,
    },
    /// Named by the first page of the allocation.
    Free {
        first: PageIndex,
    },
}
wire_enum!(Demand { 0 => Alloc { wish }, 1 => Free { first } });

/// The result of a demand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Pages for it, known to all ranks.
    Region {
        region: RegionConfig,
    },
    Freed {},
    Refused {
        why: String,
    },
}
wire_enum!(Answer { 0 => Region { region }, 1 => Freed {}, 2 => Refused { why } });

/// A wait that other ranks can end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    Lock {
        lock: LockId,
    },
    /// The barrier that ends this epoch.
    Barrier {
        epoch: u32,
    },
    /// A change of the allocations; rank 0 knows which ranks have not requested it.
    Allocation {},
}
wire_enum!(Wait { 0 => Lock { lock }, 1 => Barrier { epoch }, 2 => Allocation {} });

/// A control message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Control {
    Hello {
        hello: Hello,
    },
    /// From rank 0, when all have joined: where each rank listens, and where it receives datagrams.
    Table {
        addresses: Vec<String>,
        datagrams: Vec<String>,
        incarnations: Vec<u64>,
    },
    /// The sender refuses to run together with the receiver.
    Refused {
        why: String,
    },
    /// From the side that was connected to, after `Hello`.
    Welcome {},
    Heartbeat {},
    /// To rank 0. `turn`: all ranks make this demand together; it is their n-th of that kind.
    Ask {
        ticket: u64,
        turn: Option<u32>,
        demand: Demand,
    },
    /// From rank 0: this region exists from now on.
    Add {
        serial: u64,
        region: RegionConfig,
    },
    /// To rank 0: the order with this serial is carried out here.
    Added {
        serial: u64,
    },
    /// While ranks meet, over a sealed connection: the key of the sender's datagrams.
    DatagramKey {
        key: Vec<u8>,
    },
    /// While ranks meet, to a rank with a higher number: processes of the same machine reach the sender by
    /// this name as well. Empty: none do.
    Nearby {
        name: String,
    },
    /// The answer: whether later messages go that way.
    Move {
        there: bool,
    },
    /// From rank 0: this region's pages are no longer used.
    Drop {
        serial: u64,
        region: RegionConfig,
    },
    /// From rank 0.
    Given {
        ticket: u64,
        answer: Answer,
    },
    /// The sender has finished, after that many barriers.
    Bye {
        epoch: u32,
    },
    /// The sender has waited past its deadline, and asks what keeps it waiting. Answered by `Keeps`.
    WhoKeeps {
        inquiry: u32,
        wait: Wait,
    },
    /// The answer: the threads of the sender's rank that keep it waiting, each in words.
    Keeps {
        inquiry: u32,
        who: Vec<String>,
    },
    /// The first message of a process outside the run to a rank: its [`SHARE_WIRE_VERSION`], and the secret
    /// of its ticket. Answered by `Welcome` or `Refused`. `client`: a number of its own, the same at every
    /// rank.
    Visit {
        wire: u32,
        secret: String,
        client: u32,
    },
    /// From outside: where is the region of that name? Answered by `Opened` or `NotDone`.
    Open {
        name: String,
    },
    Opened {
        first: PageIndex,
        page_bytes: u32,
        bytes: u64,
    },
    /// From outside: a direct operation. Answered by `Did`, `Busy` or `NotDone`.
    /// `moved`: another rank did the one before.
    Do {
        accesses: Vec<PageAccess>,
        moved: bool,
    },
    Did {
        bytes: Arc<[u8]>,
    },
    /// This rank is at a barrier.
    Busy {},
    NotDone {
        why: String,
    },
    /// The first message over a connection that replaces a cut one.
    Resume {
        resume: Resume,
    },
    /// The answer: the sender is that rank, and continues after this many bytes of whole frames.
    Resumed {
        incarnation: u64,
        received: u64,
    },
}
wire_enum!(Control {
    1 => Hello { hello },
    2 => Table { addresses, datagrams, incarnations },
    3 => Refused { why },
    4 => Welcome {},
    5 => Heartbeat {},
    6 => Ask { ticket, turn, demand },
    7 => Add { serial, region },
    8 => Added { serial },
    9 => Given { ticket, answer },
    10 => Bye { epoch },
    11 => WhoKeeps { inquiry, wait },
    12 => Drop { serial, region },
    13 => DatagramKey { key },
    14 => Nearby { name },
    15 => Move { there },
    16 => Visit { wire, secret, client },
    17 => Open { name },
    18 => Opened { first, page_bytes, bytes },
    19 => Do { accesses, moved },
    20 => Did { bytes },
    21 => Busy {},
    22 => NotDone { why },
    23 => Resume { resume },
    24 => Resumed { incarnation, received },
    25 => Keeps { inquiry, who },
});

impl Control {
    /// Appends the message's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.put(out);
    }

    /// Reads a message that fills `bytes` exactly.
    ///
    /// # Errors
    /// If the bytes are not a control message.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader::new(bytes);
        let message = Wire::take(&mut from)?;
        if from.left() > 0 {
            return from.fail("there is more than one message");
        }
        Ok(message)
    }
}

impl Wire for Homes {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Cyclic => out.push(0),
            Self::Blocked => out.push(1),
            Self::At(rank) => {
                out.push(2);
                rank.put(out);
            }
            Self::BlockedFrom(rank) => {
                out.push(3);
                rank.put(out);
            }
        }
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        match from.bytes(1)?[0] {
            0 => Ok(Self::Cyclic),
            1 => Ok(Self::Blocked),
            2 => Ok(Self::At(Wire::take(from)?)),
            3 => Ok(Self::BlockedFrom(Wire::take(from)?)),
            _ => from.fail("an unknown placement of homes"),
        }
    }
}

impl Wire for RegionConfig {
    fn put(&self, out: &mut Vec<u8>) {
        self.pages.first.put(out);
        self.pages.count.put(out);
        self.page_bytes.put(out);
        self.protocol.put(out);
        self.homes.put(out);
    }
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let pages = Extent::new(Wire::take(from)?, Wire::take(from)?);
        Ok(Self {
            pages,
            page_bytes: Wire::take(from)?,
            protocol: Wire::take(from)?,
            homes: Wire::take(from)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::{Access, Spans};
    use proptest::prelude::*;

    fn examples() -> Vec<Control> {
        let mut spans = Spans::default();
        assert!(spans.push(8, 4) && spans.push(64, 8));
        let wish = Wish {
            bytes: 1 << 33,
            page_bytes: 4096,
            protocol: ProtocolKind::Hlrc,
            homes: Homes::At(Rank(3)),
        };
        let region = RegionConfig {
            pages: Extent::new(PageIndex(7), 9),
            page_bytes: 8192,
            protocol: ProtocolKind::Ibec,
            homes: Homes::BlockedFrom(Rank(1)),
        };
        vec![
            Control::Hello {
                hello: Hello {
                    wire: 1,
                    build: "0.1.0".into(),
                    run: "r".into(),
                    settings: "s".into(),
                    rank: Rank(1),
                    ranks: 4,
                    port: 5,
                    datagram_port: 6,
                    incarnation: 1 << 60,
                },
            },
            Control::Table {
                addresses: vec!["a:1".into(), "b:2".into()],
                datagrams: vec![],
                incarnations: vec![3, 1 << 63],
            },
            Control::Refused { why: "no".into() },
            Control::Welcome {},
            Control::Heartbeat {},
            Control::Ask { ticket: 1, turn: Some(2), demand: Demand::Alloc { wish } },
            Control::Ask { ticket: 1, turn: None, demand: Demand::Free { first: PageIndex(3) } },
            Control::Add { serial: 5, region },
            Control::Added { serial: 5 },
            Control::Given { ticket: 1, answer: Answer::Region { region } },
            Control::Given { ticket: 1, answer: Answer::Freed {} },
            Control::Given { ticket: 1, answer: Answer::Refused { why: "full".into() } },
            Control::Bye { epoch: 9 },
            Control::WhoKeeps { inquiry: 3, wait: Wait::Lock { lock: LockId(7) } },
            Control::WhoKeeps { inquiry: 4, wait: Wait::Barrier { epoch: 9 } },
            Control::WhoKeeps { inquiry: 5, wait: Wait::Allocation {} },
            Control::Keeps { inquiry: 3, who: vec!["rank 1".into()] },
            Control::Drop { serial: 6, region },
            Control::DatagramKey { key: vec![7; 32] },
            Control::Nearby { name: "rampool-7".into() },
            Control::Move { there: true },
            Control::Visit { wire: 5, secret: "r".into(), client: 7 },
            Control::Open { name: "table".into() },
            Control::Opened { first: PageIndex(3), page_bytes: 4096, bytes: 1 << 33 },
            Control::Do {
                accesses: vec![PageAccess { page: PageIndex(3), access: Access::Get { spans } }],
                moved: true,
            },
            Control::Did { bytes: vec![1, 2, 3].into() },
            Control::Busy {},
            Control::NotDone { why: "no".into() },
            Control::Resume {
                resume: Resume {
                    run: "r".into(),
                    rank: Rank(2),
                    incarnation: 7,
                    of: 8,
                    attempt: 9,
                    received: 1 << 40,
                },
            },
            Control::Resumed { incarnation: 8, received: 5 },
        ]
    }

    #[test]
    fn a_control_message_survives_its_bytes_and_its_frame() {
        let mut stream = Vec::new();
        for control in examples() {
            frame(FrameKind::Control, 7, &mut stream, |out| control.encode(out));
        }
        let mut rest = &stream[..];
        for control in examples() {
            for cut in 0..rest.len().min(FRAME_HEADER_BYTES) {
                assert_eq!(deframe(&rest[..cut]), Ok(Framed::Partial));
            }
            let Ok(Framed::Whole { kind: FrameKind::Control, has: 7, content, taken }) = deframe(rest) else {
                panic!("no frame")
            };
            assert_eq!(Control::decode(content), Ok(control));
            rest = &rest[taken..];
        }
        assert!(rest.is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_taken_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Control::decode(&bytes);
            let _ = deframe(&bytes);
        }

        #[test]
        fn a_changed_message_is_refused_or_another(which in 0..examples().len(), at in any::<usize>(), bit in 0_u8..8) {
            let mut bytes = Vec::new();
            examples()[which].encode(&mut bytes);
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            if let Ok(control) = Control::decode(&bytes) {
                let mut again = Vec::new();
                control.encode(&mut again);
                prop_assert_eq!(Control::decode(&again), Ok(control));
            }
        }
    }

    #[test]
    fn ranks_that_differ_are_told_apart_by_name() {
        let hello = |rank, build: &str, settings: &str| Hello {
            wire: 1,
            build: build.into(),
            run: "r".into(),
            settings: settings.into(),
            rank: Rank(rank),
            ranks: 4,
            port: 0,
            datagram_port: 0,
            incarnation: 0,
        };
        let mine = hello(0, "1.0", "a");
        assert_eq!(hello(1, "1.0", "a").compatible(&mine), Ok(()));
        for (other, words) in [
            (hello(1, "1.1", "a"), ["rank 0", "rank 1", "1.0", "1.1"]),
            (hello(2, "1.0", "b"), ["rank 0", "rank 2", "has a", "has b"]),
            (hello(0, "1.0", "a"), ["rank 0", "rank 0", "4 ranks", "met"]),
            (hello(9, "1.0", "a"), ["rank 0", "rank 9", "4 ranks", "met"]),
        ] {
            let why = other.compatible(&mine).unwrap_err();
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        }
        let why = hello(1, "1.0", "sc, pages of 4096, udp")
            .compatible(&hello(0, "1.0", "lrc, pages of 4096, tcp"))
            .unwrap_err();
        assert_eq!(why, "ranks have different settings: rank 0 has lrc, tcp; rank 1 has sc, udp");
        let why = hello(1, "1.0", "sc, udp, new").compatible(&hello(0, "1.0", "sc, tcp")).unwrap_err();
        assert_eq!(why, "ranks have different settings: rank 0 has sc, tcp; rank 1 has sc, udp, new");
    }
}
