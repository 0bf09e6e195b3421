//! Every order of a small world: depth first over all deliveries, all timers and all steps of threads, each
//! state visited once.
//!
//! This is possible because an engine is a value. Here siblings do not run inside memory operations; the
//! random worlds do that.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::hash::{Hash, Hasher};

use rampool_sharing::{Action, Event, Message, Rank, ThreadId, TimerId};

use rampool_wire::units::Extent;

use super::golden::{Failure, Golden};
use super::node::Node;
use super::program::{State, Step};
use super::world::Setup;

/// The states that the search visited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Explored {
    pub states: u64,
    /// States in which everything was over.
    pub ends: u64,
    /// All states were visited; otherwise the limit was reached first.
    pub complete: bool,
}

#[derive(Clone, Hash)]
struct Small {
    nodes: Vec<Node>,
    golden: Golden,
    channels: BTreeMap<(usize, usize), VecDeque<Message>>,
    /// Time passes as it likes: each may be due next.
    timers: BTreeSet<(usize, TimerId)>,
    /// Idle times that may still be given.
    idles: u8,
}

#[derive(Clone, Copy, Debug)]
enum Choice {
    Step { rank: usize, thread: usize },
    Deliver { from: usize, to: usize },
    Timer { rank: usize, timer: TimerId },
    Idle { rank: usize },
}

/// Searches the world of `setup`, `most_states` at most. Engines may be given idle time `idles` times in all.
///
/// # Errors
/// The first failure on any path.
pub fn explore(setup: &Setup, idles: u8, most_states: u64) -> Result<Explored, Failure> {
    let (nodes, golden) = setup.build();
    let mut seen = HashSet::new();
    let mut explored = Explored { complete: true, ..Explored::default() };
    let mut stack = vec![Small { nodes, golden, channels: BTreeMap::new(), timers: BTreeSet::new(), idles }];
    while let Some(state) = stack.pop() {
        if !seen.insert(fingerprint(&state)) {
            continue;
        }
        explored.states += 1;
        if explored.states >= most_states {
            explored.complete = false;
            break;
        }
        let choices = state.choices();
        if !choices.iter().any(|choice| !matches!(choice, Choice::Idle { .. })) {
            state.check_end()?;
            explored.ends += 1;
        }
        for choice in choices {
            let mut next = state.clone();
            next.choose(choice)?;
            stack.push(next);
        }
    }
    Ok(explored)
}

/// Two hashes of 64 bits: among some million states a collision is out of the question.
fn fingerprint(state: &Small) -> (u64, u64) {
    let mut one = DefaultHasher::new();
    state.hash(&mut one);
    let mut two = DefaultHasher::new();
    0x5eed_u64.hash(&mut two);
    state.hash(&mut two);
    (one.finish(), two.finish())
}

fn id(rank: usize) -> Rank {
    Rank(u16::try_from(rank).expect("few ranks"))
}

impl Small {
    fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        for (rank, node) in self.nodes.iter().enumerate() {
            let ready = node.threads.iter().enumerate().filter(|(_, thread)| thread.state == State::Ready);
            choices.extend(ready.map(|(thread, _)| Choice::Step { rank, thread }));
            if self.idles > 0 {
                choices.push(Choice::Idle { rank });
            }
        }
        choices.extend(self.channels.keys().map(|&(from, to)| Choice::Deliver { from, to }));
        choices.extend(self.timers.iter().map(|&(rank, timer)| Choice::Timer { rank, timer }));
        choices
    }

    fn choose(&mut self, choice: Choice) -> Result<(), Failure> {
        match choice {
            Choice::Step { rank, thread } => {
                let own = ThreadId(u16::try_from(thread).expect("few threads"));
                match self.nodes[rank].step(thread, &mut self.golden)? {
                    Step::Did | Step::Computes(_) | Step::Finished => Ok(()),
                    Step::Frees(page) => {
                        let page_bytes = self.nodes[rank].memory.page_bytes();
                        self.golden.fill_range(
                            usize::try_from(page.0).expect("few pages") * page_bytes,
                            page_bytes,
                            0,
                        );
                        self.handle(rank, Event::Freed { pages: Extent::page(page), renew: true })
                    }
                    Step::Fault { page, write } => {
                        self.handle(rank, Event::Fault { thread: own, page, write })
                    }
                    Step::Sync(op) => self.handle(rank, Event::Sync { thread: own, op }),
                    Step::Direct(op) => self.handle(rank, Event::Direct { thread: own, op, under: None }),
                }
            }
            Choice::Deliver { from, to } => {
                let queue = self.channels.get_mut(&(from, to)).expect("a choice");
                let message = queue.pop_front().expect("channels that are listed are not empty");
                if queue.is_empty() {
                    self.channels.remove(&(from, to));
                }
                self.handle(to, Event::Receive { from: id(from), message: &message })
            }
            Choice::Timer { rank, timer } => {
                self.timers.remove(&(rank, timer));
                self.handle(rank, Event::Timer(timer))
            }
            Choice::Idle { rank } => {
                self.idles -= 1;
                self.handle(rank, Event::Idle { budget_bytes: 64 })
            }
        }
    }

    fn handle(&mut self, rank: usize, event: Event<'_>) -> Result<(), Failure> {
        let mut out = Vec::new();
        self.nodes[rank].handle(event, &mut self.golden, None, &mut out)?;
        for action in out {
            match action {
                Action::Send { to, message } => {
                    self.channels.entry((rank, usize::from(to.0))).or_default().push_back(message);
                }
                Action::Done { thread, result } => {
                    self.nodes[rank].thread(thread).done(id(rank), &result, &mut self.golden)?
                }
                Action::Retry { page } => {
                    for thread in &mut self.nodes[rank].threads {
                        thread.retry(page);
                    }
                }
                Action::SetTimer { timer, .. } => {
                    self.timers.insert((rank, timer));
                }
                Action::Renewed { .. } => {}
                Action::Fatal(reason) => return Err(Failure::Stopped { rank: id(rank), reason }),
            }
        }
        self.nodes[rank].check()
    }

    fn check_end(&self) -> Result<(), Failure> {
        let mut waiting = Vec::new();
        for node in &self.nodes {
            let left = node.threads.iter().filter(|thread| thread.state != State::Finished);
            waiting.extend(left.map(|thread| (node.rank(), thread.id, thread.position())));
            if waiting.is_empty() && !node.engine.is_quiescent() {
                return Err(Failure::Unquiet { rank: node.rank() });
            }
        }
        if waiting.is_empty() { Ok(()) } else { Err(Failure::Stuck { waiting }) }
    }
}
