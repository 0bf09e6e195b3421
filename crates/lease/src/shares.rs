//! Who is served next: fair shares of a server thread's time among tenants, and among each tenant's
//! connections.
//!
//! Start-time fair queueing in two levels (Goyal, Vin and Cheng, SIGCOMM '96; Goyal, Guo and Vin, OSDI '96).
//! A tenant with something to do waits with a *start tag*: the virtual time at which its last turn would have
//! ended if it had exactly its share, or now if that is past. The lowest tag is served. The virtual time is
//! the tag of what is served. A turn is charged by the time that it took, which need not be known before: so
//! a request that cannot be divided is paid for afterwards, also by one that goes idle in between.
//!
//! Deficit round robin gives the same shares, but who wakes waits for a round of all others' quanta; here it
//! comes next.
//!
//! A tenant may be served by several threads. What the others gave it counts here as well, up to
//! [`MOST_ELSEWHERE_NS`] at a time: two tenants share two threads also where one is on one of them only, and
//! none waits for long because it was served elsewhere.
//!
//! Invariant: a connection that waits has one valid entry in its tenant's queue, and its tenant one in the
//! upper queue.

use super::rule::{Kept, TenantRule};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Time that a tenant was served by other threads that counts at one turn.
pub const MOST_ELSEWHERE_NS: u64 = 20_000_000;

/// Tags of tenants count so much for a nanosecond, so that weights divide short times as well. They last for
/// thirty years.
const TAGS_PER_NS: u64 = 16;

/// Decides which connection has the next turn. `T` names tenants, connections are small numbers.
#[derive(Debug)]
pub struct Shares<T> {
    queue: Queue,
    tenants: Vec<Tenant>,
    names: BTreeMap<T, usize>,
    connections: Vec<Option<Connection>>,
    serving: Option<Turn>,
    rules: Kept,
}

/// A turn that goes on.
#[derive(Clone, Copy, Debug)]
struct Turn {
    connection: usize,
    tenant: usize,
    /// It has ended meanwhile.
    left: bool,
    /// It has more to do.
    again: bool,
}

/// Flows in the order of their start tags; entries are valid if their flow says so.
#[derive(Debug, Default)]
struct Queue {
    /// Virtual time.
    now: u64,
    next: u64,
    waiting: BinaryHeap<Reverse<(u64, u64, usize)>>,
    rules: Kept,
}

/// A tenant, or a connection.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    /// The tag of its turn, while it waits or is served; then that of the end of its last turn.
    tag: u64,
    /// Its valid entry.
    entry: Option<u64>,
}

#[derive(Debug, Default)]
struct Tenant {
    flow: Flow,
    queue: Queue,
    connections: usize,
}

#[derive(Debug)]
struct Connection {
    tenant: usize,
    flow: Flow,
}

impl Queue {
    fn push(&mut self, index: usize, flow: &mut Flow) {
        if flow.entry.is_none() {
            if self.rules.keep(TenantRule::Idle) {
                flow.tag = flow.tag.max(self.now);
            }
            flow.entry = Some(self.next);
            self.waiting.push(Reverse((flow.tag, self.next, index)));
            self.next += 1;
        }
    }

    /// Its next turn is so much later.
    fn put_off(&mut self, index: usize, flow: &mut Flow, cost: u64) {
        flow.tag = flow.tag.max(self.now) + cost;
        if flow.entry.take().is_some() {
            self.push(index, flow);
        }
    }

    /// The first that is valid.
    fn pop(&mut self, is_valid: impl Fn(usize, u64) -> bool) -> Option<usize> {
        while let Some(Reverse((tag, entry, index))) = self.waiting.pop() {
            if is_valid(index, entry) {
                self.now = tag;
                return Some(index);
            }
        }
        None
    }
}

impl<T> Default for Shares<T> {
    fn default() -> Self {
        let (queue, tenants, names) = (Queue::default(), Vec::new(), BTreeMap::new());
        Self { queue, tenants, names, connections: Vec::new(), serving: None, rules: Kept::default() }
    }
}

impl<T: Ord + Copy> Shares<T> {
    /// Leaves a rule out; call it before anything joins.
    #[cfg(feature = "mutants")]
    pub fn omit(&mut self, rule: TenantRule) {
        self.rules.omit(rule);
        self.queue.rules.omit(rule);
    }

    /// A new connection of this tenant.
    ///
    /// # Panics
    /// If the number is taken.
    pub fn join(&mut self, connection: usize, tenant: T) {
        let tenant = match self.names.get(&tenant) {
            Some(index) => *index,
            None => {
                let index = self.place();
                self.names.insert(tenant, index);
                index
            }
        };
        self.tenants[tenant].connections += 1;
        if self.connections.len() <= connection {
            self.connections.resize_with(connection + 1, || None);
        }
        let place = &mut self.connections[connection];
        assert!(place.is_none(), "a connection joins once");
        *place = Some(Connection { tenant, flow: Flow::default() });
    }

    /// It has ended.
    pub fn leave(&mut self, connection: usize) {
        let Some(gone) = self.connections.get_mut(connection).and_then(Option::take) else { return };
        self.tenants[gone.tenant].connections -= 1;
        if let Some(turn) = self.serving.as_mut().filter(|turn| turn.connection == connection) {
            turn.left = true;
        }
    }

    /// A place for a tenant: that of one without connections and without a debt.
    fn place(&mut self) -> usize {
        let now = self.queue.now;
        let is_idle = |tenant: &Tenant| {
            tenant.connections == 0 && tenant.flow.entry.is_none() && tenant.flow.tag <= now
        };
        match self.tenants.iter().position(is_idle) {
            Some(index) => {
                self.names.retain(|_, named| *named != index);
                self.tenants[index] = Tenant::default();
                index
            }
            None => {
                self.tenants.push(Tenant::default());
                self.tenants.len() - 1
            }
        }
    }

    /// It has something to do; during its turn: it has more to do. Of no effect if that is known, or it has
    /// ended.
    pub fn wake(&mut self, connection: usize) {
        if let Some(turn) = self.serving.as_mut().filter(|turn| turn.connection == connection && !turn.left) {
            turn.again = true;
            return;
        }
        let Some(Some(known)) = self.connections.get_mut(connection) else { return };
        let index = known.tenant;
        self.tenants[index].queue.push(connection, &mut known.flow);
        if self.serving.is_none_or(|turn| turn.tenant != index) {
            self.queue.push(index, &mut self.tenants[index].flow);
        }
    }

    /// Whether a turn goes on.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.serving.is_some()
    }

    /// Something was done for this connection outside of its turns, for so long: it is paid for as a turn is.
    ///
    /// # Panics
    /// If one is being served: its turn pays.
    pub fn charge(&mut self, connection: usize, time_ns: u64, elsewhere_ns: u64, weight: u32) {
        assert!(self.serving.is_none(), "what is done in a turn is paid for by that turn");
        let Some(Some(known)) = self.connections.get_mut(connection) else { return };
        if !self.rules.keep(TenantRule::Outside) {
            return;
        }
        let tenant = &mut self.tenants[known.tenant];
        tenant.queue.put_off(connection, &mut known.flow, time_ns);
        self.queue.put_off(known.tenant, &mut tenant.flow, cost(time_ns, elsewhere_ns, weight));
    }

    /// Whether none has anything to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.waiting.is_empty()
    }

    /// The next to serve; [`Shares::served`] follows.
    ///
    /// # Panics
    /// If one is being served.
    #[must_use]
    pub fn pick(&mut self) -> Option<usize> {
        assert!(self.serving.is_none(), "one is served at a time");
        let (tenants, connections) = (&mut self.tenants, &mut self.connections);
        loop {
            let index = self.queue.pop(|index, entry| tenants[index].flow.entry == Some(entry))?;
            let tenant = &mut tenants[index];
            tenant.flow.entry = None;
            let is_valid = |connection: usize, entry: u64| {
                connections
                    .get(connection)
                    .and_then(Option::as_ref)
                    .is_some_and(|c| c.tenant == index && c.flow.entry == Some(entry))
            };
            if let Some(connection) = tenant.queue.pop(is_valid) {
                connections[connection].as_mut().expect("it is valid").flow.entry = None;
                self.serving = Some(Turn { connection, tenant: index, left: false, again: false });
                return Some(connection);
            }
        }
    }

    /// The one that was next has been served for so long; it goes on if it was woken meanwhile.
    /// `elsewhere_ns`: its tenant's time with other threads since this was told last.
    ///
    /// # Panics
    /// If no one is being served.
    pub fn served(&mut self, time_ns: u64, elsewhere_ns: u64, weight: u32) {
        let turn = self.serving.take().expect("one is being served");
        let tenant = &mut self.tenants[turn.tenant];
        // Also what takes no time is a turn: others with the same tag come first.
        let time_ns = time_ns.max(1);
        if !turn.left {
            let known = self.connections[turn.connection].as_mut().expect("it has not left");
            if self.rules.keep(TenantRule::OwnTurns) {
                known.flow.tag += time_ns;
            }
            if turn.again {
                tenant.queue.push(turn.connection, &mut known.flow);
            }
        }
        if self.rules.keep(TenantRule::Turns) {
            tenant.flow.tag += cost(time_ns, elsewhere_ns, weight);
        }
        if !tenant.queue.waiting.is_empty() {
            self.queue.push(turn.tenant, &mut tenant.flow);
        }
    }
}

/// What a tenant's tag moves by.
fn cost(time_ns: u64, elsewhere_ns: u64, weight: u32) -> u64 {
    let time_ns = time_ns + elsewhere_ns.min(MOST_ELSEWHERE_NS);
    (time_ns * TAGS_PER_NS).div_ceil(u64::from(weight.max(1)))
}

#[cfg(test)]
mod tests;
