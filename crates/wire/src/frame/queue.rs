//! Tables of remote queues.
//!
//! ```text
//!   OpenQueue     most messages u64, most bytes u64, name                reply: the same two, as they hold
//!   FreeQueue     -
//!   ListQueues    -                                                      reply: queues
//!   Push          timeout_ms u32, kind u8, zero u8, length of the head u16, length of the body u64,
//!                 head, reference
//!                                                                        reply: where the body goes u64
//!   Take          timeout_ms u32, most u16, number of numbers u16, numbers u64 each
//!                                                                        reply: deliveries
//!   Settle        how u32, zero u32, numbers u64 each
//!   AwaitBody     number u64, timeout_ms u32, zero u32
//!   PushHeads     timeout_ms u32, count u16, zero u16, and for each: length of the head u16, head
//! ```
//! A head and the reference to a body in the pool travel in tables; the bytes of a body travel as those of
//! any other region ([`super::Window`]).

use super::{MAX_TABLE_BYTES, Reader, RegionId, WireError, is_name, parse_list, push_listed};
use crate::layout::Program;

/// Bytes of a head.
pub const MAX_HEAD_BYTES: usize = 256;
/// Bytes of a coded [`Reference`].
pub const MAX_REFERENCE_BYTES: usize = 4096;
/// Messages that one request settles, or acknowledges while it takes others.
pub const MAX_SETTLED: usize = 1024;

const KIND_NONE: u8 = 0;
const KIND_BYTES: u8 = 1;
const KIND_IN_POOL: u8 = 2;
const REDELIVERED: u8 = 1;
const ARRIVING: u8 = 2;
/// Of a delivery, without head and reference.
const DELIVERY_BYTES: usize = 32;

/// The body of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body<'a> {
    None,
    /// This many bytes, which follow.
    Bytes(u64),
    /// This many bytes that lie in the pool already; the [`Reference`] says where.
    InPool(u64, &'a [u8]),
}

impl<'a> Body<'a> {
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Bytes(bytes) | Self::InPool(bytes, _) => *bytes,
        }
    }

    /// The coded reference; empty except for a body in the pool.
    #[must_use]
    pub fn reference(&self) -> &'a [u8] {
        match self {
            Self::InPool(_, reference) => reference,
            _ => &[],
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Self::None => KIND_NONE,
            Self::Bytes(_) => KIND_BYTES,
            Self::InPool(..) => KIND_IN_POOL,
        }
    }

    fn parse(kind: u8, bytes: u64, reference: &'a [u8]) -> Result<Self, WireError> {
        match kind {
            KIND_NONE if bytes == 0 && reference.is_empty() => Ok(Self::None),
            KIND_BYTES if bytes > 0 && reference.is_empty() => Ok(Self::Bytes(bytes)),
            KIND_IN_POOL if bytes > 0 && !reference.is_empty() && reference.len() <= MAX_REFERENCE_BYTES => {
                Ok(Self::InPool(bytes, reference))
            }
            _ => Err(WireError::BadMessage),
        }
    }
}

/// A message to a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Push<'a> {
    /// How long it may wait for room.
    pub timeout_ms: u32,
    pub head: &'a [u8],
    pub body: Body<'a>,
}

impl<'a> Push<'a> {
    /// Appends the table.
    ///
    /// # Panics
    /// If head or reference are too long.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let reference = self.body.reference();
        assert!(
            self.head.len() <= MAX_HEAD_BYTES && reference.len() <= MAX_REFERENCE_BYTES,
            "a message that is too long"
        );
        out.extend_from_slice(&self.timeout_ms.to_le_bytes());
        out.extend_from_slice(&[self.body.kind(), 0]);
        out.extend_from_slice(&u16::try_from(self.head.len()).expect("bounded above").to_le_bytes());
        out.extend_from_slice(&self.body.bytes().to_le_bytes());
        out.extend_from_slice(self.head);
        out.extend_from_slice(reference);
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &'a [u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let timeout_ms = reader.u32()?;
        let [kind, zero] = reader.array()?;
        let (head, bytes) = (usize::from(reader.u16()?), reader.u64()?);
        if zero != 0 {
            return Err(WireError::Reserved);
        }
        if head > MAX_HEAD_BYTES {
            return Err(WireError::BadMessage);
        }
        let head = reader.take(head)?;
        Ok(Self { timeout_ms, head, body: Body::parse(kind, bytes, reader.rest())? })
    }
}

/// Messages without bodies that enter a queue together. At least one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PushHeads<'a> {
    /// How long they may wait for room for all of them.
    pub timeout_ms: u32,
    count: u16,
    /// A length (2) and a head for each of `count`.
    coded: &'a [u8],
}

impl<'a> PushHeads<'a> {
    /// How many of these heads one request takes: as many as its table has room for.
    #[must_use]
    pub fn fit(heads: &[&[u8]]) -> usize {
        let mut bytes = 8;
        let fits = |head: &&&[u8]| {
            bytes += 2 + head.len();
            bytes <= MAX_TABLE_BYTES
        };
        heads.iter().take_while(fits).count()
    }

    /// Appends the table.
    ///
    /// # Panics
    /// If there are none, or more than [fit](Self::fit), or one is too long.
    pub fn encode(timeout_ms: u32, heads: &[&[u8]], out: &mut Vec<u8>) {
        assert!(
            !heads.is_empty() && heads.iter().all(|head| head.len() <= MAX_HEAD_BYTES),
            "heads that are not messages"
        );
        let from = out.len();
        out.extend_from_slice(&timeout_ms.to_le_bytes());
        out.extend_from_slice(&u16::try_from(heads.len()).expect("they fit").to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        for head in heads {
            out.extend_from_slice(&u16::try_from(head.len()).expect("at most MAX_HEAD_BYTES").to_le_bytes());
            out.extend_from_slice(head);
        }
        assert!(out.len() - from <= MAX_TABLE_BYTES, "{} heads are too many", heads.len());
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &'a [u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let (timeout_ms, count, zero) = (reader.u32()?, reader.u16()?, reader.u16()?);
        if zero != 0 {
            return Err(WireError::Reserved);
        }
        let coded = reader.rest();
        let mut heads = Reader::new(coded);
        for _ in 0..count {
            let len = usize::from(heads.u16()?);
            if len > MAX_HEAD_BYTES {
                return Err(WireError::BadMessage);
            }
            heads.take(len)?;
        }
        heads.end()?;
        if count == 0 { Err(WireError::BadMessage) } else { Ok(Self { timeout_ms, count, coded }) }
    }

    /// How many they are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.into()
    }

    pub fn heads(&self) -> impl Iterator<Item = &'a [u8]> + Clone + use<'a> {
        let mut rest = self.coded;
        std::iter::from_fn(move || {
            let (len, after) = rest.split_first_chunk::<2>()?;
            let (head, after) = after.split_at(u16::from_le_bytes(*len).into());
            rest = after;
            Some(head)
        })
    }
}

/// A message as its receiver gets it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delivery<'a> {
    /// Its number in its queue.
    pub number: u64,
    /// It was delivered before, to a receiver that did not acknowledge it.
    pub redelivered: bool,
    /// Its body is still on its way.
    pub arriving: bool,
    pub head: &'a [u8],
    pub body: Body<'a>,
    /// Where a body that travelled with the message lies in the queue's region.
    pub body_at: u64,
}

impl<'a> Delivery<'a> {
    /// Bytes that a message takes in the table of a reply.
    #[must_use]
    pub fn coded_bytes(head: usize, reference: usize) -> usize {
        DELIVERY_BYTES + head + reference
    }

    /// Appends it to the table of a reply.
    ///
    /// # Panics
    /// If head or reference are too long.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let reference = self.body.reference();
        assert!(
            self.head.len() <= MAX_HEAD_BYTES && reference.len() <= MAX_REFERENCE_BYTES,
            "a message that is too long"
        );
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.body_at.to_le_bytes());
        out.extend_from_slice(&self.body.bytes().to_le_bytes());
        let flags = (u8::from(self.redelivered) * REDELIVERED) | (u8::from(self.arriving) * ARRIVING);
        out.extend_from_slice(&[self.body.kind(), flags]);
        for len in [self.head.len(), reference.len(), 0] {
            out.extend_from_slice(&u16::try_from(len).expect("bounded above").to_le_bytes());
        }
        out.extend_from_slice(self.head);
        out.extend_from_slice(reference);
    }

    /// Reads the deliveries in the table of a reply to `Take`.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn parse_all(table: &'a [u8]) -> Result<Vec<Self>, WireError> {
        let mut reader = Reader::new(table);
        let mut all = Vec::new();
        while !reader.rest().is_empty() {
            let (number, body_at, bytes) = (reader.u64()?, reader.u64()?, reader.u64()?);
            let [kind, flags] = reader.array()?;
            let (head, reference, zero) =
                (usize::from(reader.u16()?), usize::from(reader.u16()?), reader.u16()?);
            if zero != 0 || flags & !(REDELIVERED | ARRIVING) != 0 {
                return Err(WireError::Reserved);
            }
            if head > MAX_HEAD_BYTES {
                return Err(WireError::BadMessage);
            }
            let head = reader.take(head)?;
            let body = Body::parse(kind, bytes, reader.take(reference)?)?;
            let arriving = flags & ARRIVING != 0;
            if !matches!(body, Body::Bytes(_)) && (arriving || body_at != 0) {
                return Err(WireError::BadMessage);
            }
            all.push(Self { number, redelivered: flags & REDELIVERED != 0, arriving, head, body, body_at });
        }
        Ok(all)
    }
}

/// A request for messages, which also acknowledges others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Take {
    pub timeout_ms: u32,
    /// At least 1.
    pub most: u16,
    pub acknowledged: Vec<u64>,
}

impl Take {
    /// Appends the table.
    ///
    /// # Panics
    /// If too many are acknowledged.
    pub fn encode(&self, out: &mut Vec<u8>) {
        assert!(self.acknowledged.len() <= MAX_SETTLED, "{} messages at once", self.acknowledged.len());
        out.extend_from_slice(&self.timeout_ms.to_le_bytes());
        out.extend_from_slice(&self.most.to_le_bytes());
        out.extend_from_slice(&u16::try_from(self.acknowledged.len()).expect("bounded above").to_le_bytes());
        self.acknowledged.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let (timeout_ms, most, count) = (reader.u32()?, reader.u16()?, usize::from(reader.u16()?));
        let acknowledged = read_numbers(&mut reader)?;
        if most == 0 || acknowledged.len() != count {
            return Err(WireError::BadMessage);
        }
        Ok(Self { timeout_ms, most, acknowledged })
    }
}

/// What becomes of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Settlement {
    /// A receiver is done with them.
    Done = 1,
    /// A receiver gives them back, for the next one.
    Return = 2,
    /// Their sender withdraws them: their bodies will never arrive.
    Withdraw = 3,
}

impl Settlement {
    pub const ALL: [Self; 3] = [Self::Done, Self::Return, Self::Withdraw];

    /// Appends the table of a `Settle`.
    ///
    /// # Panics
    /// If there are too many.
    pub fn encode(self, numbers: &[u64], out: &mut Vec<u8>) {
        assert!(numbers.len() <= MAX_SETTLED, "{} messages at once", numbers.len());
        out.extend_from_slice(&(self as u32).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &[u8]) -> Result<(Self, Vec<u64>), WireError> {
        let mut reader = Reader::new(table);
        let (how, zero) = (reader.u32()?, reader.u32()?);
        let how = Self::ALL.into_iter().find(|known| *known as u32 == how).ok_or(WireError::BadMessage)?;
        if zero != 0 {
            return Err(WireError::Reserved);
        }
        Ok((how, read_numbers(&mut reader)?))
    }
}

fn read_numbers(reader: &mut Reader<'_>) -> Result<Vec<u64>, WireError> {
    let count = reader.rest().len() / 8;
    if count > MAX_SETTLED || !reader.rest().len().is_multiple_of(8) {
        return Err(WireError::TableLength);
    }
    (0..count).map(|_| reader.u64()).collect()
}

/// A request to wait until the body of a message is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AwaitBody {
    pub number: u64,
    pub timeout_ms: u32,
}

impl AwaitBody {
    /// Appends the table.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.timeout_ms.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(table);
        let (number, timeout_ms, zero) = (reader.u64()?, reader.u32()?, reader.u32()?);
        reader.end()?;
        if zero == 0 { Ok(Self { number, timeout_ms }) } else { Err(WireError::Reserved) }
    }
}

/// How much a queue holds at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueBounds {
    pub messages: u64,
    /// Bytes of heads and of the bodies that came with them.
    pub bytes: u64,
}

impl QueueBounds {
    /// Appends the table of an `OpenQueue`, or with an empty name that of its reply.
    pub fn encode(&self, name: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.messages.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(name.as_bytes());
    }

    /// The bounds and the name.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn parse(table: &[u8]) -> Result<(Self, &str), WireError> {
        let mut reader = Reader::new(table);
        let bounds = Self { messages: reader.u64()?, bytes: reader.u64()? };
        let name = name_of(reader.rest())?;
        Ok((bounds, name))
    }
}

fn name_of(bytes: &[u8]) -> Result<&str, WireError> {
    std::str::from_utf8(bytes).ok().filter(|name| is_name(name)).ok_or(WireError::BadName)
}

/// A queue in a list.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listed {
    pub queue: u64,
    /// Messages in the queue, and how many of them are with a receiver that has not acknowledged them.
    pub messages: u64,
    pub held: u64,
    pub bytes: u64,
    pub waiting_senders: u64,
    pub waiting_receivers: u64,
    pub most_messages: u64,
    pub name: String,
}

impl Listed {
    /// Appends it to the table of a reply to `ListQueues`; false if there is no room.
    #[must_use]
    pub fn encode(&self, out: &mut Vec<u8>) -> bool {
        let numbers = [
            self.queue,
            self.messages,
            self.held,
            self.bytes,
            self.waiting_senders,
            self.waiting_receivers,
            self.most_messages,
        ];
        push_listed(numbers.map(u64::to_le_bytes).as_flattened(), &self.name, out)
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse_all(table: &[u8]) -> Result<Vec<Self>, WireError> {
        parse_list(table, |reader| {
            Ok(Self {
                queue: reader.u64()?,
                messages: reader.u64()?,
                held: reader.u64()?,
                bytes: reader.u64()?,
                waiting_senders: reader.u64()?,
                waiting_receivers: reader.u64()?,
                most_messages: reader.u64()?,
                name: name_of(reader.counted()?)?.to_owned(),
            })
        })
    }
}

/// Where a body lies in the pool: a program's selection in a region, which has a number at each server. The
/// sender writes it; servers pass it on unread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reference {
    /// By server.
    pub regions: Vec<RegionId>,
    pub program: Program,
}

impl Reference {
    /// The coded form; `None` if it is too long.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        out.extend_from_slice(&u16::try_from(self.regions.len()).ok()?.to_le_bytes());
        self.regions.iter().for_each(|region| out.extend_from_slice(&region.0.to_le_bytes()));
        self.program.encode(&mut out);
        (out.len() <= MAX_REFERENCE_BYTES).then_some(out)
    }

    /// # Errors
    /// [`WireError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(bytes);
        let count = usize::from(reader.u16()?);
        if count > bytes.len() / 8 {
            return Err(WireError::TableLength);
        }
        let regions = (0..count).map(|_| reader.u64().map(RegionId)).collect::<Result<_, _>>()?;
        let program = Program::decode(reader.rest()).map_err(|_| WireError::BadLayout)?;
        if program.bounds().0 < 0 {
            return Err(WireError::BadLayout);
        }
        Ok(Self { regions, program })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use proptest::prelude::*;

    fn coded(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        out
    }

    #[test]
    fn the_documented_bytes_of_a_message_are_these() {
        let push = Push { timeout_ms: 5, head: b"head", body: Body::InPool(7, b"ref") };
        let bytes = coded(|out| push.encode(out));
        assert_eq!(bytes, [&[5, 0, 0, 0, 2, 0, 4, 0, 7, 0, 0, 0, 0, 0, 0, 0][..], b"headref"].concat());
        let delivery = Delivery {
            number: 9,
            redelivered: true,
            arriving: true,
            head: b"h",
            body: Body::Bytes(3),
            body_at: 4096,
        };
        let bytes = coded(|out| delivery.encode(out));
        let expected = [
            &[9, 0, 0, 0, 0, 0, 0, 0][..],
            &[0, 16, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            &[1, 3, 1, 0, 0, 0, 0, 0],
            b"h",
        ];
        assert_eq!(bytes, expected.concat());
        assert_eq!(bytes.len(), Delivery::coded_bytes(1, 0));
        let bytes = coded(|out| PushHeads::encode(5, &[b"head", b""], out));
        assert_eq!(bytes, [&[5, 0, 0, 0, 2, 0, 0, 0, 4, 0][..], b"head", &[0, 0]].concat());
    }

    #[test]
    fn heads_fill_a_table_and_not_more() {
        let head = [7; MAX_HEAD_BYTES];
        let mut heads: Vec<&[u8]> = vec![&head; 63];
        // 8 + 63 * 258 bytes; the rest fits exactly one head.
        let left = MAX_TABLE_BYTES - 8 - 63 * 258 - 2;
        heads.extend([&head[..left], b""]);
        assert_eq!(PushHeads::fit(&heads), 64);
        assert_eq!(coded(|out| PushHeads::encode(0, &heads[..64], out)).len(), MAX_TABLE_BYTES);
        assert!(PushHeads::parse(&[0; 8]).is_err(), "none");
        assert!(PushHeads::parse(&[0, 0, 0, 0, 1, 0, 0, 0, 1, 1]).is_err(), "a head that is too long");
    }

    proptest! {
        #[test]
        fn messages_come_back_as_they_were(
            head in prop::collection::vec(any::<u8>(), 0..=MAX_HEAD_BYTES),
            reference in prop::collection::vec(any::<u8>(), 1..100),
            bytes in 1..u64::MAX,
            kind in 0..3u8,
            flags in any::<[bool; 2]>(),
            numbers in prop::collection::vec(any::<u64>(), 0..40),
        ) {
            let body = [Body::None, Body::Bytes(bytes), Body::InPool(bytes, &reference)][usize::from(kind)];
            let push = Push { timeout_ms: 7, head: &head, body };
            let table = coded(|out| push.encode(out));
            prop_assert_eq!(Push::parse(&table), Ok(push));
            let heads = [&head[..], b"", &head[..head.len() / 2]];
            let table = coded(|out| PushHeads::encode(7, &heads, out));
            prop_assert_eq!(PushHeads::parse(&table).unwrap().heads().collect::<Vec<_>>(), heads);
            prop_assert!(PushHeads::parse(&table[..table.len() - 1]).is_err());
            let arriving = flags[1] && kind == 1;
            let one = Delivery {
                number: 3,
                redelivered: flags[0],
                arriving,
                head: &head,
                body,
                body_at: if kind == 1 { 8192 } else { 0 },
            };
            let table = coded(|out| {
                one.encode(out);
                one.encode(out)
            });
            prop_assert_eq!(Delivery::parse_all(&table), Ok(vec![one, one]));
            prop_assert!(Delivery::parse_all(&table[..table.len() - 1]).is_err());
            let take = Take { timeout_ms: 1, most: 5, acknowledged: numbers.clone() };
            prop_assert_eq!(Take::parse(&coded(|out| take.encode(out))), Ok(take));
            for how in Settlement::ALL {
                prop_assert_eq!(
                    Settlement::parse(&coded(|out| how.encode(&numbers, out))),
                    Ok((how, numbers.clone()))
                );
            }
            let wait = AwaitBody { number: bytes, timeout_ms: 9 };
            prop_assert_eq!(AwaitBody::parse(&coded(|out| wait.encode(out))), Ok(wait));
            let bounds = QueueBounds { messages: 3, bytes };
            let table = coded(|out| bounds.encode("jobs", out));
            prop_assert_eq!(QueueBounds::parse(&table), Ok((bounds, "jobs")));
            let listed = Listed { queue: 4, messages: bytes, name: "jobs".into(), ..Listed::default() };
            let table = coded(|out| assert!(listed.encode(out)));
            prop_assert_eq!(table.len(), 58 + 4);
            prop_assert_eq!(Listed::parse_all(&table), Ok(vec![listed]));
            let program = Layout::bytes(8).unwrap().hvector(5, 1, 100).unwrap().program().clone();
            let reference = Reference { regions: numbers.iter().map(|n| RegionId(*n)).collect(), program };
            prop_assert_eq!(Reference::parse(&reference.encode().unwrap()), Ok(reference));
        }

        #[test]
        fn arbitrary_tables_never_panic(
            bytes in prop::collection::vec(prop_oneof![0..5u8, any::<u8>()], 0..200),
        ) {
            let _ = (
                Push::parse(&bytes),
                Take::parse(&bytes),
                Settlement::parse(&bytes),
                AwaitBody::parse(&bytes),
            );
            let _ = (
                QueueBounds::parse(&bytes),
                Listed::parse_all(&bytes),
                Delivery::parse_all(&bytes),
                Reference::parse(&bytes),
            );
        }
    }

    #[test]
    fn messages_that_make_no_sense_are_refused() {
        let push = |kind, head: u16, bytes: u64, rest: &[u8]| {
            [&[0; 4][..], &[kind, 0], &head.to_le_bytes(), &bytes.to_le_bytes(), rest].concat()
        };
        assert!(Push::parse(&push(0, 2, 0, b"hi")).is_ok());
        assert_eq!(Push::parse(&push(0, 2, 1, b"hi")), Err(WireError::BadMessage), "a length without a body");
        assert_eq!(Push::parse(&push(1, 2, 0, b"hi")), Err(WireError::BadMessage), "a body without a length");
        assert_eq!(
            Push::parse(&push(2, 2, 1, b"hi")),
            Err(WireError::BadMessage),
            "a body in the pool, nowhere"
        );
        assert_eq!(Push::parse(&push(3, 2, 1, b"hi")), Err(WireError::BadMessage));
        assert_eq!(Push::parse(&push(0, 257, 0, &[0; 257])), Err(WireError::BadMessage));
        assert_eq!(Push::parse(&push(0, 3, 0, b"hi")), Err(WireError::TableLength));
        assert!(Take::parse(&[0, 0, 0, 0, 0, 0, 0, 0]).is_err(), "no messages are asked for");
        assert_eq!(QueueBounds::parse(&[b'a'; 16 + 256]), Err(WireError::BadName));
        assert_eq!(QueueBounds::parse(&[7; 17]), Err(WireError::BadName));
    }
}
