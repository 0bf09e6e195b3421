//! Random operations, compared with files that are plain vectors. The pool is a map of pages.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use proptest::prelude::*;
use rampool_files::{Change, Cleared, Edge, Files, Kind, Onto, Owner, PAGE, ROOT, Refusal};
use rampool_wire::units::{Extent, PageIndex};

const NOW: SystemTime = SystemTime::UNIX_EPOCH;
const OWNER: Owner = Owner { user: 1, group: 1, permissions: 0o755 };
const PAGE_BYTES: usize = 4096;
/// Few enough that they run out.
const POOL_PAGES: u64 = 40;
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Debug)]
enum Command {
    Make {
        at: (usize, usize),
        directory: bool,
    },
    Remove {
        at: (usize, usize),
        directory: bool,
    },
    Rename {
        from: (usize, usize),
        to: (usize, usize),
        onto: u8,
    },
    Link {
        from: (usize, usize),
        to: (usize, usize),
    },
    /// The kernel looks a file up; the test holds it from then on.
    Open {
        at: (usize, usize),
    },
    Close {
        which: usize,
    },
    Write {
        which: usize,
        offset: u64,
        len: u64,
    },
    Read {
        which: usize,
        offset: u64,
        len: u64,
    },
    SetLen {
        which: usize,
        len: u64,
    },
    Punch {
        which: usize,
        offset: u64,
        len: u64,
    },
    Allocate {
        which: usize,
        offset: u64,
        len: u64,
        keep_len: bool,
    },
}

fn command() -> impl Strategy<Value = Command> {
    let at = || (0..4usize, 0..NAMES.len());
    let which = || 0..8usize;
    let offset = || prop_oneof![0..60_000u64, (0..15u64).prop_map(|page| page * PAGE), Just(1 << 40)];
    let len = || prop_oneof![1..20_000u64, (1..9u64).prop_map(|pages| pages * PAGE)];
    prop_oneof![
        3 => (at(), any::<bool>()).prop_map(|(at, directory)| Command::Make { at, directory }),
        2 => (at(), any::<bool>()).prop_map(|(at, directory)| Command::Remove { at, directory }),
        2 => (at(), at(), 0..3u8).prop_map(|(from, to, onto)| Command::Rename { from, to, onto }),
        1 => (at(), at()).prop_map(|(from, to)| Command::Link { from, to }),
        3 => at().prop_map(|at| Command::Open { at }),
        1 => which().prop_map(|which| Command::Close { which }),
        8 => (which(), offset(), len())
            .prop_map(|(which, offset, len)| Command::Write { which, offset, len }),
        4 => (which(), offset(), len()).prop_map(|(which, offset, len)| Command::Read { which, offset, len }),
        2 => (which(), offset()).prop_map(|(which, len)| Command::SetLen { which, len }),
        2 => (which(), offset(), len())
            .prop_map(|(which, offset, len)| Command::Punch { which, offset, len }),
        1 => (which(), offset(), len(), any::<bool>())
            .prop_map(|(which, offset, len, keep_len)| Command::Allocate { which, offset, len, keep_len }),
    ]
}

/// A file as it should be. Bytes that are not in `bytes` are zero.
#[derive(Default)]
struct Plain {
    len: u64,
    bytes: BTreeMap<u64, u8>,
    pages: BTreeSet<u64>,
    names: u32,
    held: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Node {
    File(u64),
    Directory(u64),
}

struct World {
    files: Files,
    pool: BTreeMap<u64, Vec<u8>>,
    /// By inode number, as all that follows.
    plain: BTreeMap<u64, Plain>,
    names: BTreeMap<(u64, usize), Node>,
    directories: Vec<u64>,
    held: Vec<u64>,
    next_byte: u8,
}

impl World {
    fn new() -> Self {
        // Two runs, so that files are in pieces.
        let pages = [Extent::new(PageIndex(10), 15), Extent::new(PageIndex(100), 25)];
        Self {
            files: Files::new(pages, OWNER, NOW),
            pool: BTreeMap::new(),
            plain: BTreeMap::new(),
            names: BTreeMap::new(),
            directories: vec![ROOT],
            held: Vec::new(),
            next_byte: 0,
        }
    }

    fn free(&self) -> u64 {
        POOL_PAGES - self.plain.values().map(|file| file.pages.len() as u64).sum::<u64>()
    }

    /// Directories that are gone are tried all the same.
    fn place(&self, at: (usize, usize)) -> (u64, usize) {
        (self.directories[at.0 % self.directories.len()], at.1)
    }

    fn name(at: (u64, usize)) -> (u64, &'static [u8]) {
        (at.0, NAMES[at.1].as_bytes())
    }

    /// What was there may be read until something is stored there again: a read overtakes a discard.
    fn discard(&mut self, freed: Vec<Extent>) {
        freed
            .iter()
            .flat_map(Extent::pages)
            .for_each(|page| _ = self.pool.insert(page.0, vec![0xee; PAGE_BYTES]));
    }

    fn clear(&mut self, cleared: Cleared) {
        for (page, range) in cleared.zero {
            self.pool.entry(page.0).or_insert_with(|| vec![0; PAGE_BYTES])[range].fill(0);
        }
        self.discard(cleared.freed);
    }

    fn gone(&mut self) {
        self.plain.retain(|_, file| file.names > 0 || file.held > 0);
    }

    fn lives(&self, directory: u64) -> bool {
        directory == ROOT || self.names.values().any(|node| *node == Node::Directory(directory))
    }

    fn is_within(&self, mut directory: u64, other: u64) -> bool {
        while directory != other {
            let parent = self.names.iter().find(|(_, node)| **node == Node::Directory(directory));
            let Some(((parent, _), _)) = parent else { return false };
            directory = *parent;
        }
        true
    }

    fn is_empty(&self, directory: u64) -> bool {
        !self.names.keys().any(|(of, _)| *of == directory)
    }

    fn step(&mut self, command: &Command) {
        match *command {
            Command::Make { at, directory } => self.make(self.place(at), directory),
            Command::Remove { at, directory } => self.remove(self.place(at), directory),
            Command::Rename { from, to, onto } => {
                let onto = [Onto::Replace, Onto::Refuse, Onto::Exchange][usize::from(onto)];
                self.rename(self.place(from), self.place(to), onto);
            }
            Command::Link { from, to } => self.link(self.place(from), self.place(to)),
            Command::Open { at } => self.open(self.place(at)),
            Command::Close { which } if !self.held.is_empty() => {
                let number = self.held.remove(which % self.held.len());
                let freed = self.files.forget(number, 1);
                self.discard(freed);
                self.plain.get_mut(&number).unwrap().held -= 1;
                self.gone();
            }
            _ if self.held.is_empty() => {}
            Command::Write { which, offset, len } => self.write(which, offset, len),
            Command::Read { which, offset, len } => {
                self.read(self.held[which % self.held.len()], offset, len)
            }
            Command::SetLen { which, len } => self.set_len(which, len),
            Command::Punch { which, offset, len } => self.punch(which, offset, len),
            Command::Allocate { which, offset, len, keep_len } => self.allocate(which, offset, len, keep_len),
            Command::Close { .. } => unreachable!(),
        }
    }

    fn make(&mut self, at: (u64, usize), directory: bool) {
        let kind = if directory { Kind::Directory } else { Kind::File };
        let (parent, name) = Self::name(at);
        let made = self.files.make(parent, name, kind, OWNER, NOW);
        let wanted = match self.names.get(&at) {
            _ if !self.lives(parent) => Err(Refusal::NotFound),
            Some(_) => Err(Refusal::Exists),
            None => Ok(()),
        };
        assert_eq!(made.map(|_| ()), wanted);
        let Ok(made) = made else { return };
        assert_eq!(self.files.forget(made.number, 1), []);
        if directory {
            self.names.insert(at, Node::Directory(made.number));
            self.directories.push(made.number);
        } else {
            self.names.insert(at, Node::File(made.number));
            self.plain.insert(made.number, Plain { names: 1, ..Plain::default() });
        }
    }

    fn drop_name(&mut self, node: Node) {
        if let Node::File(number) = node {
            self.plain.get_mut(&number).unwrap().names -= 1;
        }
    }

    fn remove(&mut self, at: (u64, usize), directory: bool) {
        let (parent, name) = Self::name(at);
        let freed = self.files.remove(parent, name, directory, NOW);
        let wanted = match self.names.get(&at) {
            None => Err(Refusal::NotFound),
            Some(Node::File(_)) if directory => Err(Refusal::NotDirectory),
            Some(Node::Directory(_)) if !directory => Err(Refusal::IsDirectory),
            Some(Node::Directory(of)) if !self.is_empty(*of) => Err(Refusal::NotEmpty),
            Some(node) => Ok(*node),
        };
        assert_eq!(freed.as_ref().map(|_| ()), wanted.as_ref().map(|_| ()));
        if let (Ok(freed), Ok(node)) = (freed, wanted) {
            self.discard(freed);
            self.names.remove(&at);
            self.drop_name(node);
            self.gone();
        }
    }

    fn rename(&mut self, from: (u64, usize), to: (u64, usize), onto: Onto) {
        let freed = self.files.rename(Self::name(from), Self::name(to), onto, NOW);
        let (node, taken) = (self.names.get(&from).copied(), self.names.get(&to).copied());
        let moves_into_itself =
            |node, to| matches!(node, Some(Node::Directory(of)) if self.is_within(to, of));
        let wanted = match (node, taken) {
            (None, _) => Err(Refusal::NotFound),
            (_, None) if onto == Onto::Exchange || !self.lives(to.0) => Err(Refusal::NotFound),
            _ if moves_into_itself(node, to.0) => Err(Refusal::Invalid),
            _ if onto == Onto::Exchange && moves_into_itself(taken, from.0) => Err(Refusal::Invalid),
            (_, Some(_)) if onto == Onto::Refuse => Err(Refusal::Exists),
            (Some(Node::File(_)), Some(Node::Directory(_))) if onto == Onto::Replace => {
                Err(Refusal::IsDirectory)
            }
            (Some(Node::Directory(_)), Some(Node::File(_))) if onto == Onto::Replace => {
                Err(Refusal::NotDirectory)
            }
            (Some(Node::Directory(a)), Some(Node::Directory(b)))
                if onto == Onto::Replace && a != b && !self.is_empty(b) =>
            {
                Err(Refusal::NotEmpty)
            }
            _ => Ok(()),
        };
        assert_eq!(freed.as_ref().map(|_| ()), wanted.as_ref().map(|_| ()), "{from:?} to {to:?} {onto:?}");
        let Ok(freed) = freed else { return };
        self.discard(freed);
        if node == taken {
            return;
        }
        self.names.remove(&from);
        self.names.insert(to, node.unwrap());
        match taken {
            Some(taken) if onto == Onto::Exchange => _ = self.names.insert(from, taken),
            Some(taken) => self.drop_name(taken),
            None => {}
        }
        self.gone();
    }

    fn link(&mut self, from: (u64, usize), to: (u64, usize)) {
        let Some(Node::File(number)) = self.names.get(&from).copied() else { return };
        let (parent, name) = Self::name(to);
        let wanted = match self.names.get(&to) {
            _ if !self.lives(parent) => Err(Refusal::NotFound),
            Some(_) => Err(Refusal::Exists),
            None => Ok(()),
        };
        let linked = self.files.link(number, parent, name, NOW);
        assert_eq!(linked.map(|_| ()), wanted);
        if linked.is_ok() {
            self.files.forget(number, 1);
            self.names.insert(to, Node::File(number));
            self.plain.get_mut(&number).unwrap().names += 1;
        }
    }

    fn open(&mut self, at: (u64, usize)) {
        let Some(Node::File(number)) = self.names.get(&at).copied() else { return };
        let (parent, name) = Self::name(at);
        assert_eq!(self.files.look_up(parent, name).unwrap().number, number);
        self.plain.get_mut(&number).unwrap().held += 1;
        self.held.push(number);
    }

    fn held(&mut self, which: usize) -> (u64, &mut Plain, u64) {
        let (free, number) = (self.free(), self.held[which % self.held.len()]);
        (number, self.plain.get_mut(&number).unwrap(), free)
    }

    fn write(&mut self, which: usize, offset: u64, len: u64) {
        self.next_byte = self.next_byte.wrapping_add(1).max(1);
        let byte = self.next_byte;
        let (number, plain, free) = self.held(which);
        let wanted: BTreeSet<u64> = (offset / PAGE..(offset + len).div_ceil(PAGE)).collect();
        let fits = wanted.difference(&plain.pages).count() as u64 <= free;
        if fits {
            plain.pages.extend(&wanted);
            plain.len = plain.len.max(offset + len);
            plain.bytes.extend((offset..offset + len).map(|at| (at, byte)));
        }
        let plan = match self.files.write(number, offset, len, NOW) {
            Err(refusal) => {
                assert_eq!((refusal, fits), (Refusal::NoSpace, false));
                return;
            }
            Ok(plan) => plan,
        };
        assert!(fits);
        let pages: Vec<u64> = plan.pages.iter().flat_map(Extent::pages).map(|page| page.0).collect();
        assert_eq!(pages.len(), wanted.len());
        // What is not kept is garbage until it is written: a plan that keeps too little is found out.
        let mut whole = vec![0xee; pages.len() * PAGE_BYTES];
        let last = (pages.len() - 1) * PAGE_BYTES;
        for (edge, at) in [(plan.head, 0), (plan.tail, last)] {
            let there = edge.map(|edge| match edge {
                Edge::Zero => vec![0; PAGE_BYTES],
                Edge::Keep(page) => self.pool.get(&page.0).cloned().unwrap_or_else(|| vec![0; PAGE_BYTES]),
            });
            if let Some(there) = there {
                whole[at..at + PAGE_BYTES].copy_from_slice(&there);
            }
        }
        let within = usize::try_from(offset % PAGE).unwrap();
        whole[within..within + usize::try_from(len).unwrap()].fill(byte);
        for (page, bytes) in pages.iter().zip(whole.chunks(PAGE_BYTES)) {
            self.pool.insert(*page, bytes.to_vec());
        }
    }

    fn read(&mut self, number: u64, offset: u64, len: u64) {
        let (pieces, bytes) = self.files.read(number, offset, len).unwrap();
        let plain = &self.plain[&number];
        assert_eq!(bytes, plain.len.min(offset + len).saturating_sub(offset));
        let mut found = Vec::new();
        for piece in pieces {
            for page in 0..u64::from(piece.pages) {
                let there = piece.at.and_then(|at| self.pool.get(&(at.0 + page)));
                found.extend(there.map_or(vec![0; PAGE_BYTES], Clone::clone));
            }
        }
        let within = usize::try_from(offset % PAGE).unwrap();
        for at in 0..usize::try_from(bytes).unwrap() {
            let wanted = plain.bytes.get(&(offset + at as u64)).copied().unwrap_or(0);
            assert_eq!(found[within + at], wanted, "byte {} of file {number}", offset + at as u64);
        }
    }

    fn set_len(&mut self, which: usize, len: u64) {
        let (number, plain, _) = self.held(which);
        if len < plain.len {
            plain.bytes.retain(|at, _| *at < len);
            plain.pages.retain(|page| page * PAGE < len);
        }
        plain.len = len;
        let cleared =
            self.files.change(number, Change { bytes: Some(len), ..Change::default() }, NOW).unwrap();
        self.clear(cleared);
    }

    fn punch(&mut self, which: usize, offset: u64, len: u64) {
        let (number, plain, _) = self.held(which);
        plain.bytes.retain(|at, _| !(offset..offset + len).contains(at));
        plain.pages.retain(|page| !(page * PAGE >= offset && (page + 1) * PAGE <= offset + len));
        let cleared = self.files.punch(number, offset, len, NOW).unwrap();
        self.clear(cleared);
    }

    fn allocate(&mut self, which: usize, offset: u64, len: u64, keep_len: bool) {
        let (number, plain, free) = self.held(which);
        let wanted: BTreeSet<u64> = (offset / PAGE..(offset + len).div_ceil(PAGE)).collect();
        let fits = wanted.difference(&plain.pages).count() as u64 <= free;
        if fits {
            plain.pages.extend(&wanted);
            plain.len = if keep_len { plain.len } else { plain.len.max(offset + len) };
        }
        let done = self.files.allocate(number, offset, len, keep_len);
        assert_eq!(done, if fits { Ok(()) } else { Err(Refusal::NoSpace) });
    }

    fn check(&mut self) {
        self.files.check();
        assert_eq!(self.files.totals().free_pages, self.free());
        assert_eq!(self.files.totals().inodes, (self.plain.len() + self.live_directories()) as u64);
        for (number, plain) in &self.plain {
            let is = self.files.attributes(*number).unwrap();
            assert_eq!((is.bytes, is.pages, is.links), (plain.len, plain.pages.len() as u64, plain.names));
        }
    }

    fn live_directories(&self) -> usize {
        self.directories.iter().filter(|directory| self.lives(**directory)).count()
    }

    fn compare_all(&mut self) {
        for number in self.plain.keys().copied().collect::<Vec<_>>() {
            self.read(number, 0, 100_000);
            self.read(number, 1 << 40, 100_000);
        }
        for directory in self.directories.clone() {
            let listed: BTreeMap<Vec<u8>, u64> = match self.files.list(directory, 2) {
                Ok(entries) => entries.map(|entry| (entry.name.to_vec(), entry.number)).collect(),
                Err(_) => BTreeMap::new(),
            };
            let named = self.names.iter().filter(|((of, _), _)| *of == directory);
            let wanted = named.map(|((_, name), node)| {
                let (Node::File(number) | Node::Directory(number)) = *node;
                (NAMES[*name].as_bytes().to_vec(), number)
            });
            assert_eq!(listed, wanted.collect());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn files_hold_what_plain_vectors_would_hold(commands in proptest::collection::vec(command(), 1..120)) {
        let mut world = World::new();
        for command in &commands {
            world.step(command);
            world.check();
        }
        world.compare_all();
    }
}

#[test]
fn a_list_goes_on_where_it_was_whatever_was_removed_meanwhile() {
    let mut files = Files::new([], OWNER, NOW);
    for name in 0..100u8 {
        files.make(ROOT, &[b'a', name], Kind::File, OWNER, NOW).unwrap();
    }
    let (mut behind, mut seen) = (0, Vec::new());
    loop {
        let next = files.list(ROOT, behind).unwrap().next().map(|entry| (entry.name.to_vec(), entry.place));
        let Some(entry) = next else { break };
        behind = entry.1;
        if entry.0.len() == 2 && entry.0[0] == b'a' {
            files.remove(ROOT, &entry.0, false, NOW).unwrap();
        }
        seen.push(entry.0);
    }
    assert_eq!(seen.len(), 102);
}

#[test]
fn a_file_lies_in_one_run_while_there_is_room() {
    let mut files = Files::new([Extent::new(PageIndex(0), 1000)], OWNER, NOW);
    let of = |files: &mut Files, name: &[u8]| files.make(ROOT, name, Kind::File, OWNER, NOW).unwrap().number;
    let (a, b) = (of(&mut files, b"a"), of(&mut files, b"b"));
    for at in 0..10 {
        files.write(a, at * 10 * PAGE, 10 * PAGE, NOW).unwrap();
    }
    files.write(b, 0, 10 * PAGE, NOW).unwrap();
    assert_eq!(files.read(a, 0, 100 * PAGE).unwrap().0.len(), 1);
    assert_eq!(files.write(a, 1 << 63, 1, NOW), Err(Refusal::TooLong));
}
