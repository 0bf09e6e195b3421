//! Two ranks whose connection is cut again and again ([`rampool_sharing::stream`],
//! [`rampool_sharing::relink`]), in a world that decides when each of them notices, how much of what was on
//! the way still comes, how long an attempt to connect takes, and who else connects.
//!
//! Each end has numbered things to say. What the other end takes is judged at once: the next number, or it is
//! wrong. At the end the cuts stop, and everything must have come, unless somebody had to be given up.

use std::collections::{BTreeMap, VecDeque};

use rampool_sharing::Rank;
use rampool_sharing::control::{Control, FrameKind, Framed, Resume, deframe, frame};
use rampool_sharing::relink::{Attempt, Relink, RelinkRule, RelinkTiming, Step};
use rampool_sharing::stream::{Limits, Stream};

use crate::rng::Rng;

const LIMITS: Limits = Limits { window: 400, answer: 100, chunk: 120 };
/// Microseconds in which no rank is given up.
const TIMING: RelinkTiming =
    RelinkTiming { grace_us: 1 << 40, least_pause_us: 20, most_pause_us: 200, sure_us: 1 << 39 };
const RUN: &str = "this run";
const STEPS: u64 = 3000;
/// Of the end that connects, and of the other.
const INCARNATIONS: [u64; 2] = [11, 22];

/// What went on in a run, so that a test can tell that it was worth it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    pub said: u64,
    pub cuts: u64,
    pub resumed: u64,
    /// Cuts of a connection over which nothing but the agreement had passed, or not even that.
    pub cut_again: u64,
    pub overtaken: u64,
    pub unauthenticated: u64,
    pub held_back: u64,
    pub acknowledged_alone: u64,
}

/// When the world cuts.
#[derive(Clone, Copy, Debug)]
pub enum Cuts {
    /// As the seed says.
    Random,
    /// Once, when so many bytes of both directions have arrived; and again so many bytes later.
    At(u64, u64),
}

/// A connection: bytes on the way to each end, and which ends still believe in it.
#[derive(Clone, Debug, Default)]
struct Wire {
    on_the_way: [VecDeque<u8>; 2],
    is_cut: bool,
    closed: [bool; 2],
    arrived: [Vec<u8>; 2],
    passed: u64,
    attempt: u32,
    by_unauthenticated: bool,
}

struct End {
    stream: Stream,
    relink: Relink,
    /// The connection that it uses.
    over: Option<u64>,
    next_to_say: u64,
    next_to_hear: u64,
}

struct World {
    rng: Rng,
    now: u64,
    /// 0 connects, 1 is connected to.
    ends: [End; 2],
    wires: BTreeMap<u64, Wire>,
    next_wire: u64,
    /// Connections that have not come to the other end yet, with the time when they do.
    probing: Vec<(u64, u64)>,
    to_say: u64,
    quiet: bool,
    cuts: Cuts,
    passed: u64,
    last_cut: u64,
    tally: Tally,
}

/// Runs one seed; panics if a rule is broken.
#[must_use]
pub fn run(seed: u64, cuts: Cuts, omit: Option<RelinkRule>) -> Tally {
    let mut ends = [true, false].map(|dials| End {
        stream: Stream::new(Some(LIMITS)),
        relink: Relink::new(TIMING, dials, false),
        over: Some(0),
        next_to_say: 0,
        next_to_hear: 0,
    });
    if let Some(rule) = omit {
        leave_out(&mut ends, rule);
    }
    let mut world = World {
        rng: Rng::new(seed),
        now: 0,
        ends,
        wires: BTreeMap::from([(0, Wire::default())]),
        next_wire: 1,
        probing: Vec::new(),
        to_say: if matches!(cuts, Cuts::Random) { 150 } else { 12 },
        quiet: false,
        cuts,
        passed: 0,
        last_cut: 0,
        tally: Tally::default(),
    };
    world.run();
    world.tally
}

#[cfg(feature = "mutants")]
fn leave_out(ends: &mut [End; 2], rule: RelinkRule) {
    for end in ends {
        end.stream.omit(rule);
        end.relink.omit(rule);
    }
}

#[cfg(not(feature = "mutants"))]
fn leave_out(_ends: &mut [End; 2], _rule: RelinkRule) {
    panic!("rules are left out in builds for tests only");
}

impl World {
    fn run(&mut self) {
        for step in 0..STEPS * 10 {
            self.quiet = step > STEPS || (matches!(self.cuts, Cuts::At(..)) && self.tally.cuts > 0);
            self.now += self.rng.between(1, 30);
            match self.rng.below(12) {
                0..=2 => self.say(),
                3..=6 => self.carry(),
                7 => self.maybe_cut(),
                8 => self.notice(),
                9 => self.connect(),
                10 if !self.quiet => self.unauthenticated_peer(),
                _ => self.poll(),
            }
            if self.quiet && self.ends.iter().all(|end| end.next_to_hear == self.to_say) {
                break;
            }
        }
        for end in &self.ends {
            assert_eq!(end.next_to_hear, self.to_say, "something never came: {:?}", self.tally);
        }
    }

    fn say(&mut self) {
        let at = self.rng.index(2);
        let end = &mut self.ends[at];
        for _ in 0..self.rng.between(1, 4) {
            if end.next_to_say < self.to_say {
                // A number, and something that makes it long.
                let why = format!("{:08}{}", end.next_to_say, "x".repeat(self.rng.index(90)));
                end.stream.queue(FrameKind::Control, |out| Control::NotDone { why }.encode(out));
                end.next_to_say += 1;
                self.tally.said += 1;
            }
        }
        self.flush(at);
    }

    /// Everything that may leave does.
    fn flush(&mut self, at: usize) {
        let end = &mut self.ends[at];
        let Some(wire) = end.over.and_then(|over| self.wires.get_mut(&over)) else { return };
        loop {
            let piece = end.stream.front();
            let len = piece.len().min(self.rng.index(64) + 1);
            if len == 0 {
                break;
            }
            if !wire.is_cut {
                wire.on_the_way[1 - at].extend(&piece[..len]);
            }
            self.tally.acknowledged_alone += u64::from(piece.len() == 9 && piece[4] == 2);
            end.stream.sent(len);
        }
        self.tally.held_back += u64::from(end.stream.is_held_back());
    }

    /// Some bytes come to one end of one connection.
    fn carry(&mut self) {
        let Some(&number) = self.wires.keys().nth(self.rng.index(self.wires.len().max(1))) else { return };
        if self.probing.iter().any(|&(_, late)| late == number) {
            return;
        }
        let to = self.rng.index(2);
        let most = match self.cuts {
            Cuts::Random => self.rng.index(300) + 1,
            Cuts::At(..) => 1 + self.rng.index(3),
        };
        let wire = self.wires.get_mut(&number).expect("it was just found");
        if wire.closed[to] {
            return;
        }
        let count = most.min(wire.on_the_way[to].len());
        wire.arrived[to].extend(wire.on_the_way[to].drain(..count));
        wire.passed += count as u64;
        self.passed += count as u64;
        self.hear(number, to);
        if let Cuts::At(first, then) = self.cuts {
            let due = if self.tally.cuts == 0 { first } else { self.last_cut + then };
            if self.tally.cuts < 2 && self.passed >= due && self.wires.contains_key(&number) {
                self.cut(number);
            }
        }
    }

    /// One end takes what has come whole.
    fn hear(&mut self, number: u64, to: usize) {
        loop {
            let Some(wire) = self.wires.get_mut(&number) else { return };
            let Framed::Whole { kind, has, content, taken } =
                deframe(&wire.arrived[to]).expect("every message is well formed")
            else {
                return;
            };
            let control = (kind == FrameKind::Control)
                .then(|| Control::decode(content).expect("every message is well formed"));
            wire.arrived[to].drain(..taken);
            match control {
                Some(Control::Resume { resume }) => self.asked(number, &resume),
                Some(Control::Resumed { incarnation, received }) => {
                    self.resumed(number, incarnation, received)
                }
                Some(Control::Refused { why }) => {
                    let wire = &self.wires[&number];
                    let is_late = why.contains("again since") && !self.ends[0].relink.awaits(wire.attempt);
                    assert!(wire.by_unauthenticated || is_late, "{why}");
                    self.close(number, to);
                }
                Some(Control::NotDone { why }) => {
                    let end = &mut self.ends[to];
                    assert_eq!(end.over, Some(number), "it hears what came another way");
                    assert_eq!(why[..8].parse(), Ok(end.next_to_hear), "out of order, twice or never");
                    end.next_to_hear += 1;
                    end.stream.came(kind, taken, has).expect("every count is true");
                }
                Some(other) => panic!("unexpected: {other:?}"),
                None => self.ends[to].stream.came(kind, taken, has).expect("every count is true"),
            }
            // What it has to acknowledge leaves.
            if self.ends[to].over == Some(number) {
                self.flush(to);
            }
        }
    }

    fn asked(&mut self, number: u64, resume: &Resume) {
        let end = &mut self.ends[1];
        let checked = end.relink.check(resume, RUN, INCARNATIONS[1], INCARNATIONS[0]);
        if let Err(why) = checked.and_then(|()| end.relink.asked(resume.attempt).map_err(str::to_owned)) {
            self.tally.overtaken += u64::from(why.contains("again since"));
            self.tally.unauthenticated += u64::from(self.wires[&number].by_unauthenticated);
            let wire = self.wires.get_mut(&number).expect("it came over it");
            put(&mut wire.on_the_way[0], &Control::Refused { why });
            wire.closed[1] = true;
            return;
        }
        assert!(!self.wires[&number].by_unauthenticated, "an unauthenticated peer was let in: {resume:?}");
        let received = end.stream.received();
        end.stream.resume(resume.received).expect("every count is true");
        if let Some(old) = end.over.replace(number) {
            self.close(old, 1);
        }
        let wire = self.wires.get_mut(&number).expect("it came over it");
        if !wire.is_cut {
            put(&mut wire.on_the_way[0], &Control::Resumed { incarnation: INCARNATIONS[1], received });
        }
        self.flush(1);
    }

    fn resumed(&mut self, number: u64, incarnation: u64, received: u64) {
        assert_eq!(incarnation, INCARNATIONS[1]);
        let attempt = self.wires[&number].attempt;
        let end = &mut self.ends[0];
        if !end.relink.resumed(attempt) {
            self.close(number, 0);
            return;
        }
        assert_eq!(end.over, None, "it is connected already");
        end.stream.resume(received).expect("every count is true");
        end.over = Some(number);
        self.tally.resumed += 1;
        self.flush(0);
    }

    fn close(&mut self, number: u64, at: usize) {
        if let Some(wire) = self.wires.get_mut(&number) {
            wire.closed[at] = true;
            wire.is_cut = true;
            wire.arrived[at].clear();
            if wire.closed == [true, true] {
                self.wires.remove(&number);
            }
        }
    }

    fn maybe_cut(&mut self) {
        if matches!(self.cuts, Cuts::Random)
            && !self.quiet
            && let Some(&number) = self.wires.keys().nth(self.rng.index(self.wires.len().max(1)))
        {
            self.cut(number);
        }
    }

    /// Of what is on the way some still comes, in each direction.
    fn cut(&mut self, number: u64) {
        let wire = self.wires.get_mut(&number).expect("it was just found");
        if !std::mem::replace(&mut wire.is_cut, true) {
            for bytes in &mut wire.on_the_way {
                let left = self.rng.index(bytes.len() + 1);
                bytes.truncate(if matches!(self.cuts, Cuts::Random) { left } else { 0 });
            }
            self.tally.cuts += 1;
            self.tally.cut_again += u64::from(number > 0 && wire.passed < 60);
            self.last_cut = self.passed;
        }
    }

    /// One end notices that its connection is cut, when all has come that will. Or an attempt is given up,
    /// though it may be on its way still.
    fn notice(&mut self) {
        let at = self.rng.index(2);
        let is_cut = |wire: &Wire| (wire.is_cut || wire.closed[1 - at]) && wire.on_the_way[at].is_empty();
        if let Some(over) = self.ends[at].over.filter(|over| self.wires.get(over).is_none_or(is_cut)) {
            self.ends[at].over = None;
            self.close(over, at);
            self.ends[at].relink.cut(self.now, None);
        } else if at == 0 && self.ends[0].relink.is_down() {
            let failed = self
                .wires
                .iter()
                .find(|(_, wire)| !wire.by_unauthenticated && self.ends[0].relink.awaits(wire.attempt));
            if let Some((&number, _)) =
                failed.filter(|(_, wire)| is_cut(wire) || self.rng.one_in(if self.quiet { 60 } else { 4 }))
            {
                // What it said may come all the same.
                self.wires.get_mut(&number).expect("it was just found").closed[0] = true;
                self.ends[0].relink.came_to(self.now, Attempt::Failed);
            }
        }
    }

    fn poll(&mut self) {
        for at in 0..2 {
            match self.ends[at].relink.poll(self.now) {
                Some(Step::Dial { attempt }) => {
                    let mut wire = Wire { attempt, ..Wire::default() };
                    let resume = self.resume(attempt);
                    put(&mut wire.on_the_way[1], &Control::Resume { resume });
                    self.arrive(wire);
                }
                Some(Step::Probe) => self.ends[at].relink.came_to(self.now, Attempt::Answered),
                Some(Step::GiveUp(verdict)) => panic!("given up: {verdict:?}"),
                None => {}
            }
        }
    }

    fn resume(&self, attempt: u32) -> Resume {
        let received = self.ends[0].stream.received();
        Resume {
            run: RUN.into(),
            rank: Rank(1),
            incarnation: INCARNATIONS[0],
            of: INCARNATIONS[1],
            attempt,
            received,
        }
    }

    fn arrive(&mut self, wire: Wire) {
        let number = self.next_wire;
        self.next_wire += 1;
        // Until it comes, nothing of it is carried.
        let late = if self.rng.one_in(4) { 3000 } else { 60 };
        self.probing.push((self.now + self.rng.below(late), number));
        self.wires.insert(number, wire);
    }

    /// Attempts whose time has come may be carried; before, their bytes wait like any others.
    fn connect(&mut self) {
        self.probing.retain(|&(due, _)| due > self.now);
        let dead: Vec<u64> = self
            .wires
            .iter()
            .filter(|(_, wire)| wire.closed[0] && wire.on_the_way[1].is_empty())
            .map(|(&number, _)| number)
            .collect();
        for number in dead.into_iter().filter(|&number| self.ends.iter().all(|end| end.over != Some(number)))
        {
            self.wires.remove(&number);
        }
    }

    /// Somebody who is not the rank that was met: of another run, an old process, or who looks for one.
    fn unauthenticated_peer(&mut self) {
        if !matches!(self.cuts, Cuts::Random) || !self.rng.one_in(20) {
            return;
        }
        let attempt = u32::try_from(self.rng.below(1000)).expect("small") + 1_000_000;
        let good = self.resume(attempt);
        let resume = match self.rng.below(3) {
            0 => Resume { run: "another".into(), ..good },
            1 => Resume { incarnation: INCARNATIONS[0] + 1, ..good },
            _ => Resume { of: INCARNATIONS[1] - 1, ..good },
        };
        let mut wire = Wire { attempt, by_unauthenticated: true, ..Wire::default() };
        put(&mut wire.on_the_way[1], &Control::Resume { resume });
        self.arrive(wire);
    }
}

fn put(bytes: &mut VecDeque<u8>, control: &Control) {
    let mut out = Vec::new();
    frame(FrameKind::Control, 0, &mut out, |out| control.encode(out));
    bytes.extend(out);
}
