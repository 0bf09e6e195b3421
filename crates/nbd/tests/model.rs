//! A random client talks to the session over a connection that cuts its bytes anywhere, about a disk in
//! memory that sometimes fails. Every command gets one answer, in order, and every answer says what a
//! plain array of bytes would.

use proptest::prelude::*;
use rampool_nbd::{
    End, Export, Exports, Failure, Input, LARGEST_UNIT_BYTES, MOST_PAYLOAD_BYTES, Output, PREFERRED_BYTES,
    Run, SLICE_BYTES, Session, StatusExtent, Violation, ZERO_SLICE_BYTES,
};
use std::collections::VecDeque;
use std::sync::Arc;

const PAGE: usize = PREFERRED_BYTES as usize;

/// A disk whose pages are stored or zero, as a memory server keeps them.
#[derive(Clone)]
struct Disk {
    pages: Vec<Option<Box<[u8; PAGE]>>>,
    /// Work that fails, counted from now; 0: none does.
    fails_at: usize,
}

impl Disk {
    fn new(bytes: u64) -> Self {
        let pages = usize::try_from(bytes.div_ceil(PAGE as u64)).unwrap();
        Self { pages: vec![None; pages], fails_at: 0 }
    }

    fn fails(&mut self) -> bool {
        let now = self.fails_at == 1;
        self.fails_at = self.fails_at.saturating_sub(1);
        now
    }

    fn read(&self, offset: u64, len: u32) -> (Vec<Run>, Vec<u8>) {
        let (mut runs, mut bytes) = (Vec::<Run>::new(), Vec::new());
        self.each(offset, len, |page, from, to| {
            let hole = self.pages[page].is_none();
            match &self.pages[page] {
                None => bytes.extend(std::iter::repeat_n(0, to - from)),
                Some(page) => bytes.extend_from_slice(&page[from..to]),
            }
            let len = u32::try_from(to - from).unwrap();
            match runs.last_mut() {
                Some(last) if last.hole == hole => last.len += len,
                _ => runs.push(Run { len, hole }),
            }
        });
        (runs, bytes)
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut at = 0;
        let mut parts = Vec::new();
        self.each(offset, u32::try_from(data.len()).unwrap(), |page, from, to| parts.push((page, from, to)));
        for (page, from, to) in parts {
            let mut whole = self.pages[page].take().unwrap_or_else(|| Box::new([0; PAGE]));
            whole[from..to].copy_from_slice(&data[at..at + to - from]);
            at += to - from;
            self.pages[page] = whole.iter().any(|byte| *byte != 0).then_some(whole);
        }
    }

    fn each(&self, offset: u64, len: u32, mut tell: impl FnMut(usize, usize, usize)) {
        let (mut at, end) = (offset, offset + u64::from(len));
        while at < end {
            let page = at / PAGE as u64;
            let to = end.min((page + 1) * PAGE as u64);
            tell(
                usize::try_from(page).unwrap(),
                usize::try_from(at % PAGE as u64).unwrap(),
                usize::try_from(to - page * PAGE as u64).unwrap(),
            );
            at = to;
        }
    }
}

/// What carries the bytes of one session.
struct Shell {
    session: Session,
    disk: Disk,
    /// Bytes of the client that the session has not taken.
    buffer: Vec<u8>,
    sent: Vec<u8>,
    opened: Option<usize>,
    end: Option<End>,
    /// What was read and has not been sent.
    read: VecDeque<u8>,
    most_sent_at_once: usize,
}

impl Shell {
    fn new(exports: &Arc<Exports>, disk: Disk) -> Self {
        let session = Session::new(Arc::clone(exports));
        let mut shell = Self {
            session,
            disk,
            buffer: Vec::new(),
            sent: Vec::new(),
            opened: None,
            end: None,
            read: VecDeque::new(),
            most_sent_at_once: 0,
        };
        shell.work(0);
        shell
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
        loop {
            let taken = self.session.handle(Input::Bytes(&self.buffer));
            assert!(taken <= self.buffer.len());
            self.work(taken);
            self.buffer.drain(..taken);
            if taken == 0 || self.buffer.is_empty() {
                break;
            }
        }
        assert!(self.buffer.len() <= LARGEST_UNIT_BYTES, "what is not taken fits the buffer");
    }

    fn work(&mut self, taken: usize) {
        loop {
            let mut asked: Option<Output<'static>> = None;
            let before = self.sent.len();
            self.session.check();
            while let Some(output) = self.session.poll() {
                assert!(
                    asked.is_none() && self.end.is_none(),
                    "work is the last output, and nothing follows the end"
                );
                match output {
                    Output::Send(bytes) => {
                        assert!(!bytes.is_empty());
                        self.sent.extend_from_slice(bytes);
                    }
                    Output::SendData { len } => self.sent.extend(self.read.drain(..len as usize)),
                    Output::SkipData { len } => {
                        assert!(self.read.drain(..len as usize).all(|byte| byte == 0))
                    }
                    Output::Opened { export } => assert!(self.opened.replace(export).is_none()),
                    Output::Close(end) => self.end = Some(end),
                    Output::Read { offset, len } => asked = Some(Output::Read { offset, len }),
                    Output::Write { offset, len } => asked = Some(Output::Write { offset, len }),
                    Output::Zero { offset, len, hint } => asked = Some(Output::Zero { offset, len, hint }),
                    Output::Status { offset, len, most } => {
                        asked = Some(Output::Status { offset, len, most })
                    }
                }
            }
            self.session.check();
            assert!(self.read.is_empty(), "everything that was read has been sent or skipped");
            self.most_sent_at_once = self.most_sent_at_once.max(self.sent.len() - before);
            let Some(asked) = asked else { break };
            assert!(self.opened.is_some(), "an export is chosen before any work on it");
            if self.disk.fails() {
                self.session.handle(Input::Failed(Failure("the disk of this test fails now and then")));
                continue;
            }
            match asked {
                Output::Read { offset, len } => {
                    assert!(len > 0 && len <= SLICE_BYTES);
                    let (runs, bytes) = self.disk.read(offset, len);
                    self.read.extend(bytes);
                    self.session.handle(Input::Found(&runs));
                }
                Output::Write { offset, len } => {
                    assert!(len > 0 && len <= SLICE_BYTES && len as usize == taken);
                    self.disk.write(offset, &self.buffer[..taken]);
                    self.session.handle(Input::Done);
                }
                Output::Zero { offset, len, hint: _ } => {
                    assert!(len > 0 && len <= ZERO_SLICE_BYTES);
                    self.disk.write(offset, &vec![0; len as usize]);
                    self.session.handle(Input::Done);
                }
                Output::Status { offset, len, most } => {
                    let (runs, _) = self.disk.read(offset, len);
                    let extents: Vec<_> = runs
                        .iter()
                        .take(most)
                        .map(|run| StatusExtent { len: run.len, hole: run.hole })
                        .collect();
                    self.session.handle(Input::Extents(&extents));
                }
                _ => unreachable!("only work is asked for"),
            }
        }
    }
}

// --- the client --------------------------------------------------------------------------------------------

/// Takes numbers from the front of what the session has sent.
struct Reply<'a>(&'a [u8]);

impl<'a> Reply<'a> {
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(len);
        self.0 = rest;
        front
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes(2).try_into().unwrap())
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes(8).try_into().unwrap())
    }

    /// The kind of an answer to this option, and its data.
    fn option(&mut self, option: u32) -> (u32, &'a [u8]) {
        assert_eq!(self.u64(), 0x3_e889_0455_65a9);
        assert_eq!(self.u32(), option);
        let kind = self.u32();
        let len = self.u32();
        (kind, self.bytes(len as usize))
    }
}

const ACK: u32 = 1;
const ERROR: u32 = 1 << 31;

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(text.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn go(name: &str) -> Vec<u8> {
    let mut data = string(name);
    data.extend([0, 1, 0, 3]);
    data
}

fn context(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
    queries.iter().for_each(|query| data.extend(string(query)));
    data
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    Unknown,
}

#[derive(Clone, Debug)]
struct Command {
    kind: Kind,
    flags: u16,
    cookie: u64,
    offset: u64,
    len: u32,
    fill: u8,
}

impl Command {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend(self.flags.to_be_bytes());
        let number: u16 = if self.kind == Kind::Unknown { 77 } else { self.kind as u16 };
        bytes.extend(number.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
        bytes.extend(self.len.to_be_bytes());
        bytes.extend(self.data());
        bytes
    }

    fn data(&self) -> Vec<u8> {
        if self.kind != Kind::Write {
            return Vec::new();
        }
        // Some pages of it are zero.
        (0..self.len as usize).map(|at| if at / PAGE % 3 == 1 { 0 } else { self.fill }).collect()
    }

    /// The error that the specification asks for, if there is one.
    fn refusal(&self, bytes: u64, structured: bool, allocation: bool) -> Option<u32> {
        let known = match self.kind {
            Kind::Read if structured => 1 | 4,
            Kind::WriteZeroes => 1 | 2 | 16,
            Kind::BlockStatus if !allocation => return Some(22),
            Kind::BlockStatus => 1 | 8,
            Kind::Unknown => return Some(22),
            _ => 1,
        };
        if self.flags & !known != 0 {
            return Some(22);
        }
        let beyond = self.kind != Kind::Flush
            && self.offset.checked_add(self.len.into()).is_none_or(|end| end > bytes);
        match self.kind {
            Kind::Write | Kind::WriteZeroes if beyond => Some(28),
            _ if beyond => Some(22),
            Kind::Read if self.len > MOST_PAYLOAD_BYTES => Some(22),
            Kind::Read if self.flags & 4 != 0 && self.len > SLICE_BYTES => Some(75),
            Kind::BlockStatus if self.len == 0 => Some(22),
            _ => None,
        }
    }
}

/// One answer, put together.
#[derive(Debug, Default)]
struct Answer {
    error: u32,
    data: Vec<u8>,
    content_chunks: usize,
    extents: Vec<(u32, u32)>,
}

/// Takes the answer to a command from the front of what was sent.
fn answer(reply: &mut Reply<'_>, command: &Command, structured: bool) -> Answer {
    let reads = command.kind == Kind::Read && u64::from(command.len) <= DISK_BYTES;
    let mut answer =
        Answer { data: vec![0xee; if reads { command.len as usize } else { 0 }], ..Answer::default() };
    let mut covered = 0;
    loop {
        let magic = reply.u32();
        if magic == 0x6744_6698 {
            answer.error = reply.u32();
            assert_eq!(reply.u64(), command.cookie);
            assert!(!(structured && command.kind == Kind::Read), "a read has a structured reply");
            if command.kind == Kind::Read && answer.error == 0 {
                answer.data.copy_from_slice(reply.bytes(command.len as usize));
            }
            return answer;
        }
        assert!(structured && magic == 0x668e_33ef, "{magic:#x} is no reply");
        let (flags, kind) = (reply.u16(), reply.u16());
        assert_eq!(reply.u64(), command.cookie);
        let len = reply.u32();
        let mut payload = Reply(reply.bytes(len as usize));
        match kind {
            0 => assert!(len == 0 && flags == 1),
            1 | 2 => {
                let offset = payload.u64();
                let hole = kind == 2;
                let hole_bytes = if hole { payload.u32() as usize } else { payload.0.len() };
                assert!(hole_bytes > 0);
                let from = usize::try_from(offset - command.offset).unwrap();
                assert_eq!(from, covered, "chunks follow each other");
                let target = &mut answer.data[from..from + hole_bytes];
                if hole {
                    target.fill(0)
                } else {
                    target.copy_from_slice(payload.bytes(hole_bytes))
                }
                covered += hole_bytes;
                answer.content_chunks += 1;
            }
            5 => {
                assert_eq!(payload.u32(), 1);
                while !payload.0.is_empty() {
                    answer.extents.push((payload.u32(), payload.u32()));
                }
            }
            0x8001 => {
                answer.error = payload.u32();
                let message = payload.u16();
                let message = payload.bytes(message.into());
                assert!(answer.error != 0 && std::str::from_utf8(message).is_ok());
            }
            other => panic!("chunk {other}"),
        }
        assert!(payload.0.is_empty());
        if flags & 1 == 1 {
            assert!(answer.error != 0 || command.kind != Kind::Read || covered == command.len as usize);
            return answer;
        }
    }
}

fn exports(bytes: u64) -> Arc<Exports> {
    let export = |name: &str, bytes| Export { name: name.to_owned(), bytes };
    Arc::new(Exports::new(vec![export("other", 1), export("disk", bytes)]).unwrap())
}

/// How a client goes through the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Style {
    structured: bool,
    allocation: bool,
    old: bool,
    no_zeroes: bool,
}

/// Lets a client choose `disk`; answers with the session as far as that.
fn connect(style: Style, bytes: u64, disk: Disk, cuts: &mut impl FnMut() -> usize) -> Shell {
    let exports = exports(bytes);
    let mut shell = Shell::new(&exports, disk);
    let mut client = Vec::new();
    client.extend((1 | u32::from(style.no_zeroes) << 1).to_be_bytes());
    client.extend(option(99, b"what no server knows"));
    if style.structured {
        client.extend(option(8, &[]));
        if style.allocation {
            client.extend(option(10, &context("disk", &["base:allocation", "x-other:thing"])));
        }
    }
    client.extend(if style.old { option(1, b"disk") } else { option(7, &go("disk")) });
    send(&mut shell, &client, cuts);
    assert_eq!((shell.opened, shell.end), (Some(1), None));
    let sent = std::mem::take(&mut shell.sent);
    let mut reply = Reply(&sent);
    assert_eq!(reply.bytes(18), b"NBDMAGICIHAVEOPT\x00\x03");
    assert_eq!(reply.option(99).0, ERROR + 1);
    if style.structured {
        assert_eq!(reply.option(8), (ACK, &[][..]));
        if style.allocation {
            assert_eq!(reply.option(10), (4, &b"\0\0\0\x01base:allocation"[..]));
            assert_eq!(reply.option(10), (ACK, &[][..]));
        }
    }
    let flags = 0b1101_0110_1101 | u16::from(style.structured) << 7;
    if style.old {
        assert_eq!((reply.u64(), reply.u16()), (bytes, flags));
        assert_eq!(reply.0, if style.no_zeroes { &[][..] } else { &[0; 124][..] });
    } else {
        let (kind, info) = reply.option(7);
        let mut info = Reply(info);
        assert_eq!((kind, info.u16(), info.u64(), info.u16()), (3, 0, bytes, flags));
        let (kind, sizes) = reply.option(7);
        let mut sizes = Reply(sizes);
        assert_eq!((kind, sizes.u16(), sizes.u32(), sizes.u32(), sizes.u32()), (3, 3, 1, 4096, 32 << 20));
        assert_eq!(reply.option(7), (ACK, &[][..]));
        assert!(reply.0.is_empty());
    }
    shell
}

/// The bytes arrive in pieces.
fn send(shell: &mut Shell, mut bytes: &[u8], cuts: &mut impl FnMut() -> usize) {
    while !bytes.is_empty() {
        let (piece, rest) = bytes.split_at(cuts().clamp(1, bytes.len()));
        shell.receive(piece);
        bytes = rest;
    }
}

const DISK_BYTES: u64 = 9 * (1 << 20) + 1234;

fn command() -> impl Strategy<Value = Command> {
    use Kind::*;
    let kinds = vec![
        Read,
        Read,
        Read,
        Write,
        Write,
        Write,
        Flush,
        Trim,
        Cache,
        WriteZeroes,
        BlockStatus,
        BlockStatus,
        Unknown,
    ];
    let offset = prop_oneof![
        6 => 0..DISK_BYTES,
        3 => (0..DISK_BYTES / 4096).prop_map(|page| page * 4096),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        4 => 0..20_000u32,
        3 => (0..40u32).prop_map(|pages| pages * 4096),
        1 => 200_000..1_500_000u32,
        1 => any::<u32>(),
    ];
    let flags =
        prop_oneof![6 => Just(0), 3 => Just(1), 3 => (0..5).prop_map(|bit| 1u16 << bit), 1 => any::<u16>()];
    (proptest::sample::select(kinds), flags, any::<u64>(), offset, len, any::<u8>()).prop_map(
        |(kind, flags, cookie, offset, len, fill)| {
            // Data that long is what the test would spend its time on.
            let len = if kind == Write { len % 1_500_000 } else { len };
            Command { kind, flags, cookie, offset, len, fill }
        },
    )
}

/// Extents lie within the command, one where it asks for one, and say zero only where all bytes are.
fn check_extents(extents: &[(u32, u32)], command: &Command, model: &[u8]) {
    let total: u64 = extents.iter().map(|(len, _)| u64::from(*len)).sum();
    assert!(total > 0 && total <= command.len.into());
    assert!(command.flags & 8 == 0 || extents.len() == 1);
    let mut at = usize::try_from(command.offset).unwrap();
    for (len, flags) in extents {
        assert!(*flags == 0 || *flags == 3);
        assert!(*flags == 0 || model[at..at + *len as usize].iter().all(|byte| *byte == 0));
        at += *len as usize;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_random_client_finds_what_a_plain_array_would_hold(
        structured: bool, allocation: bool, old: bool, no_zeroes: bool,
        commands in proptest::collection::vec((command(), proptest::option::weighted(0.1, 1..5usize)), 1..24),
        cuts in proptest::collection::vec(prop_oneof![1..40usize, 1..70_000usize, Just(usize::MAX)], 8),
    ) {
        let mut which = 0;
        let mut cuts = || {
            which += 1;
            cuts[which % cuts.len()]
        };
        let allocation = structured && allocation;
        let style = Style { structured, allocation, old, no_zeroes };
        let mut shell = connect(style, DISK_BYTES, Disk::new(DISK_BYTES), &mut cuts);
        let mut model = vec![0; usize::try_from(DISK_BYTES).unwrap()];
        for (command, fails_at) in &commands {
            shell.disk.fails_at = fails_at.unwrap_or(0);
            send(&mut shell, &command.encode(), &mut cuts);
            let failed = fails_at.is_some() && shell.disk.fails_at == 0;
            shell.disk.fails_at = 0;
            if failed && let Some(End::ReadFailed(_)) = shell.end {
                prop_assert!(!structured && command.kind == Kind::Read && command.len > SLICE_BYTES - 4096);
                return Ok(());
            }
            prop_assert_eq!(shell.end, None);
            prop_assert!(shell.buffer.is_empty(), "a command is taken whole");
            let sent = std::mem::take(&mut shell.sent);
            let mut reply = Reply(&sent);
            let answer = answer(&mut reply, command, structured);
            prop_assert!(reply.0.is_empty(), "one answer to a command");
            if let Some(error) = command.refusal(DISK_BYTES, structured, allocation) {
                prop_assert_eq!(answer.error, error);
                continue;
            }
            let first = || usize::try_from(command.offset).unwrap();
            let range = || first()..first() + command.len as usize;
            if failed {
                prop_assert_eq!(answer.error, 5);
                // What was carried out before it failed is anybody's guess.
                if matches!(command.kind, Kind::Write | Kind::Trim | Kind::WriteZeroes) {
                    model[range()].copy_from_slice(&shell.disk.read(command.offset, command.len).1);
                }
                continue;
            }
            prop_assert_eq!(answer.error, 0);
            match command.kind {
                Kind::Read => {
                    prop_assert!(answer.data == model[range()]);
                    prop_assert!(command.flags & 4 == 0 || answer.content_chunks <= 1);
                }
                Kind::Write => model[range()].copy_from_slice(&command.data()),
                Kind::Trim | Kind::WriteZeroes => model[range()].fill(0),
                Kind::BlockStatus => check_extents(&answer.extents, command, &model),
                Kind::Flush | Kind::Cache | Kind::Unknown | Kind::Disconnect => {}
            }
        }
        // Bounded: a slice with its heads, or the extents of a status.
        prop_assert!(
            shell.most_sent_at_once <= SLICE_BYTES as usize + 65 * 28 + 16,
            "{} bytes at once",
            shell.most_sent_at_once
        );
        let bye = Command { kind: Kind::Disconnect, flags: 0, cookie: 0, offset: 0, len: 0, fill: 0 };
        send(&mut shell, &bye.encode(), &mut cuts);
        prop_assert_eq!(shell.end, Some(End::Goodbye));
        prop_assert!(shell.sent.is_empty());
        // Bytes after it belong to no request.
        shell.receive(&[7; 100]);
        prop_assert!(shell.buffer.is_empty() && shell.sent.is_empty());
    }

    #[test]
    fn any_bytes_end_a_session_or_are_taken_or_waited_for(
        bytes in proptest::collection::vec(any::<u8>(), 0..200), style: (bool, bool),
    ) {
        let mut shell = connect(
            Style { structured: style.0, allocation: style.0, old: style.1, no_zeroes: true },
            DISK_BYTES,
            Disk::new(DISK_BYTES),
            &mut || usize::MAX,
        );
        shell.receive(&bytes);
        let mut shell = Shell::new(&exports(DISK_BYTES), Disk::new(DISK_BYTES));
        shell.receive(&bytes);
    }
}

// --- the handshake -----------------------------------------------------------------------------------------

fn shaking() -> Shell {
    let mut shell = Shell::new(&exports(DISK_BYTES), Disk::new(DISK_BYTES));
    shell.receive(&3u32.to_be_bytes());
    shell.sent.clear();
    shell
}

/// Sends an option; its answers, the last of which is final.
fn ask(shell: &mut Shell, number: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
    shell.receive(&option(number, data));
    let sent = std::mem::take(&mut shell.sent);
    let mut reply = Reply(&sent);
    let mut answers = Vec::new();
    while !reply.0.is_empty() {
        let (kind, data) = reply.option(number);
        answers.push((kind, data.to_vec()));
    }
    answers
}

fn kinds(answers: &[(u32, Vec<u8>)]) -> Vec<u32> {
    answers.iter().map(|(kind, _)| *kind).collect()
}

#[test]
fn exports_are_listed_and_described() {
    let mut shell = shaking();
    let listed = ask(&mut shell, 3, &[]);
    assert_eq!(kinds(&listed), [2, 2, ACK]);
    assert_eq!((&listed[0].1[..], &listed[1].1[..]), (&string("other")[..], &string("disk")[..]));
    assert_eq!(kinds(&ask(&mut shell, 3, b"data")), [ERROR + 3]);
    let named = [string("disk"), vec![0, 2, 0, 1, 0, 3]].concat();
    assert_eq!(kinds(&ask(&mut shell, 6, &named)), [3, 3, 3, ACK]);
    assert_eq!(shell.opened, None);
    // Two exports: neither of them is the default.
    assert_eq!(kinds(&ask(&mut shell, 7, &go(""))), [ERROR + 6]);
    assert_eq!(kinds(&ask(&mut shell, 7, &go("none"))), [ERROR + 6]);
    assert_eq!(kinds(&ask(&mut shell, 7, &go("disk")[..7])), [ERROR + 3]);
    assert_eq!(kinds(&ask(&mut shell, 7, &[go("disk"), vec![0]].concat())), [ERROR + 3]);
    assert_eq!(kinds(&ask(&mut shell, 7, &go("disk"))), [3, 3, ACK]);
    assert_eq!(shell.opened, Some(1));
}

#[test]
fn the_only_export_has_no_need_of_its_name() {
    let exports = Arc::new(Exports::new(vec![Export { name: "disk".to_owned(), bytes: 5 }]).unwrap());
    let mut shell = Shell::new(&exports, Disk::new(5));
    shell.receive(&[&3u32.to_be_bytes()[..], &option(1, &[])].concat());
    assert_eq!((shell.opened, shell.end), (Some(0), None));
}

#[test]
fn block_status_is_agreed_upon_for_the_export_that_is_chosen() {
    let selects = |name: &str, query: &str, after: Option<&[u8]>| {
        let mut shell = shaking();
        ask(&mut shell, 8, &[]);
        ask(&mut shell, 10, &context(name, &[query]));
        if let Some(again) = after {
            ask(&mut shell, 10, again);
        }
        ask(&mut shell, 7, &go("disk"));
        shell.sent.clear();
        let status = Command { kind: Kind::BlockStatus, flags: 0, cookie: 9, offset: 0, len: 4096, fill: 0 };
        shell.receive(&status.encode());
        answer(&mut Reply(&shell.sent), &status, true).error
    };
    assert_eq!(selects("disk", "base:allocation", None), 0);
    assert_eq!(selects("other", "base:allocation", None), 22);
    assert_eq!(selects("disk", "base:", None), 22);
    assert_eq!(selects("disk", "base:nothing", None), 22);
    assert_eq!(selects("disk", "base:allocation", Some(&context("disk", &[]))), 22);
    assert_eq!(selects("disk", "base:allocation", Some(b"broken")), 22);

    let mut shell = shaking();
    assert_eq!(
        kinds(&ask(&mut shell, 9, &context("disk", &[]))),
        [ERROR + 3],
        "structured replies come first"
    );
    ask(&mut shell, 8, &[]);
    let id_0 = [&[0; 4][..], b"base:allocation"].concat();
    for queries in [&[][..], &["base:"], &["qemu:all", "base:allocation"]] {
        assert_eq!(ask(&mut shell, 9, &context("disk", queries)), [(4, id_0.clone()), (ACK, Vec::new())]);
    }
    assert_eq!(kinds(&ask(&mut shell, 9, &context("disk", &["qemu:"]))), [ACK]);
    assert_eq!(kinds(&ask(&mut shell, 9, &context("none", &[]))), [ERROR + 6]);
    assert_eq!(kinds(&ask(&mut shell, 9, &[context("disk", &["base:"]), vec![1]].concat())), [ERROR + 3]);
    // A count that the data has no room for.
    assert_eq!(kinds(&ask(&mut shell, 9, &[string("disk"), vec![255; 4]].concat())), [ERROR + 3]);
}

#[test]
fn an_option_that_is_too_long_is_refused_without_being_kept() {
    let mut shell = shaking();
    let long = vec![b'x'; 1 << 20];
    assert_eq!(kinds(&ask(&mut shell, 7, &long)), [ERROR + 9]);
    assert_eq!(kinds(&ask(&mut shell, 5, &long)), [ERROR + 1]);
    assert_eq!(kinds(&ask(&mut shell, 7, &go("disk"))), [3, 3, ACK], "and what follows it is understood");

    let mut shell = shaking();
    shell.receive(&[&b"IHAVEOPT"[..], &7u32.to_be_bytes(), &u32::MAX.to_be_bytes()].concat());
    assert_eq!(shell.end, Some(End::Violation(Violation::LongOption { option: 7, len: u32::MAX })));
}

#[test]
fn what_no_client_says_ends_the_session() {
    let mut shell = Shell::new(&exports(1), Disk::new(1));
    shell.receive(&7u32.to_be_bytes());
    assert_eq!(shell.end, Some(End::Violation(Violation::ClientFlags(7))));

    let mut shell = shaking();
    shell.receive(b"IHAVENOPT-------");
    assert_eq!(shell.end, Some(End::Violation(Violation::NoOption)));

    let mut shell = shaking();
    shell.receive(&option(1, b"none"));
    assert_eq!(shell.end, Some(End::Violation(Violation::NoSuchExport)));

    let mut shell = shaking();
    for _ in 0..5000 {
        shell.receive(&option(3, &[]));
    }
    assert_eq!(shell.end, Some(End::Violation(Violation::ManyOptions)));

    let mut shell = shaking();
    ask(&mut shell, 7, &go("disk"));
    shell.receive(&[0; 28]);
    assert_eq!(shell.end, Some(End::Violation(Violation::NoRequest)));

    let mut shell = shaking();
    ask(&mut shell, 7, &go("disk"));
    let long = Command { kind: Kind::Write, flags: 0, cookie: 1, offset: 0, len: 4, fill: 1 }.encode();
    shell.receive(&[&long[..24], &(MOST_PAYLOAD_BYTES + 1).to_be_bytes()].concat());
    assert_eq!(shell.end, Some(End::Violation(Violation::LongWrite(MOST_PAYLOAD_BYTES + 1))));

    let mut shell = shaking();
    assert_eq!(kinds(&ask(&mut shell, 2, b"ignored")), [ACK]);
    assert_eq!(shell.end, Some(End::Goodbye));
}

#[test]
fn a_server_that_drains_takes_no_new_client_and_keeps_the_ones_it_has() {
    let mut shell = shaking();
    shell.session.handle(Input::Draining);
    assert_eq!(kinds(&ask(&mut shell, 7, &go("disk"))), [ERROR + 7]);
    shell.receive(&option(1, b"disk"));
    assert_eq!(shell.end, Some(End::Violation(Violation::NoSuchExport)));

    let mut shell = shaking();
    ask(&mut shell, 7, &go("disk"));
    shell.session.handle(Input::Draining);
    let flush = Command { kind: Kind::Flush, flags: 0, cookie: 3, offset: 0, len: 0, fill: 0 };
    shell.receive(&flush.encode());
    assert_eq!(answer(&mut Reply(&shell.sent), &flush, false).error, 0);
}

#[test]
fn what_cannot_be_offered_is_refused() {
    let export = |name: &str, bytes| Export { name: name.to_owned(), bytes };
    for wrong in [
        vec![export("", 1)],
        vec![export("a\nb", 1)],
        vec![export(&"a".repeat(256), 1)],
        vec![export("a", 0)],
        vec![export("a", 1 << 63)],
        vec![export("a", 1), export("a", 2)],
        (0..257).map(|number| export(&number.to_string(), 1)).collect(),
    ] {
        assert!(Exports::new(wrong.clone()).is_err(), "{wrong:?}");
    }
}
