use super::*;
use proptest::prelude::*;

/// Serves as a thread does, and counts the time of each tenant and connection.
struct Thread {
    shares: Shares<u32>,
    of: BTreeMap<usize, u32>,
    time: BTreeMap<usize, u64>,
}

impl Thread {
    fn new(connections: &[(usize, u32)]) -> Self {
        let mut shares = Shares::default();
        connections.iter().for_each(|(connection, tenant)| shares.join(*connection, *tenant));
        Self { shares, of: connections.iter().copied().collect(), time: BTreeMap::new() }
    }

    fn serve(&mut self, cost: impl Fn(usize) -> u64, weight: impl Fn(u32) -> u32, goes_on: bool) -> usize {
        let next = self.shares.pick().expect("someone has something to do");
        *self.time.entry(next).or_default() += cost(next);
        if goes_on {
            self.shares.wake(next);
        }
        self.shares.served(cost(next), 0, weight(self.of[&next]));
        next
    }

    fn tenant_time(&self, tenant: u32) -> u64 {
        self.time.iter().filter(|(c, _)| self.of[c] == tenant).map(|(_, time)| time).sum()
    }
}

#[test]
fn one_connection_has_the_share_of_sixty_four() {
    let all: Vec<_> = (0..64).map(|c| (c, 7)).chain([(64, 8)]).collect();
    let mut thread = Thread::new(&all);
    all.iter().for_each(|(c, _)| thread.shares.wake(*c));
    for _ in 0..6400 {
        thread.serve(|c| if c == 64 { 3 } else { 100 }, |_| 1, true);
    }
    let (many, one) = (thread.tenant_time(7), thread.tenant_time(8));
    assert!(many.abs_diff(one) <= 200, "{many} {one}");
    let each: Vec<u64> = (0..64).map(|c| thread.time[&c]).collect();
    assert!(each.iter().max().unwrap() - each.iter().min().unwrap() <= 200, "{each:?}");
}

#[test]
fn weights_divide_the_time() {
    let mut thread = Thread::new(&[(0, 0), (1, 1)]);
    (0..2).for_each(|c| thread.shares.wake(c));
    for _ in 0..10_000 {
        thread.serve(|_| 50, |tenant| if tenant == 0 { 4 } else { 1 }, true);
    }
    let (heavy, light) = (thread.tenant_time(0), thread.tenant_time(1));
    assert!(heavy.abs_diff(4 * light) <= 500, "{heavy} {light}");
}

#[test]
fn who_wakes_comes_next() {
    let mut thread = Thread::new(&[(0, 0), (1, 0), (2, 0), (3, 1)]);
    (0..3).for_each(|c| thread.shares.wake(c));
    for _ in 0..100 {
        thread.serve(|_| 1000, |_| 1, true);
        // A request now and then, far less than its share.
        thread.shares.wake(3);
        assert_eq!(thread.shares.pick(), Some(3));
        thread.shares.served(5, 0, 1);
    }
}

#[test]
fn a_long_request_is_paid_for_by_one_that_goes_idle() {
    let mut thread = Thread::new(&[(0, 0), (1, 1)]);
    thread.shares.wake(0);
    thread.serve(|_| 10_000, |_| 1, false);
    thread.shares.wake(1);
    thread.shares.wake(0);
    let mut before = 0;
    while thread.serve(|_| 100, |_| 1, true) != 0 {
        before += 1;
    }
    assert!((99..=101).contains(&before), "{before}");
}

/// Also where it waits already: its tenant as a whole, and the connection among those of its tenant.
#[test]
fn what_is_done_outside_of_turns_is_paid_for() {
    for waits in [true, false] {
        let mut thread = Thread::new(&[(0, 0), (1, 1), (2, 0)]);
        (0..3).filter(|c| *c != 0 || waits).for_each(|c| thread.shares.wake(c));
        thread.shares.charge(0, 10_000, 0, 1);
        thread.shares.wake(0);
        let mut before = [0; 3];
        let first = loop {
            let next = thread.serve(|_| 100, |_| 1, true);
            before[next] += 1;
            if next == 0 {
                break before;
            }
        };
        assert!((195..=205).contains(&first[1]) && (95..=101).contains(&first[2]), "{waits} {first:?}");
    }
}

#[test]
fn who_was_idle_has_saved_nothing() {
    let mut thread = Thread::new(&[(0, 0), (1, 1), (2, 1)]);
    (1..3).for_each(|c| thread.shares.wake(c));
    for _ in 0..100 {
        thread.serve(|_| 100, |_| 1, true);
    }
    thread.shares.wake(0);
    let turns = (0..20).filter(|_| thread.serve(|_| 100, |_| 1, true) == 0).count();
    assert!((9..=11).contains(&turns), "{turns} of 20 turns");
    // The same among the connections of a tenant.
    thread.shares.leave(0);
    thread.shares.join(3, 1);
    thread.of.insert(3, 1);
    thread.shares.wake(3);
    let turns = (0..30).filter(|_| thread.serve(|_| 100, |_| 1, true) == 3).count();
    assert!((9..=11).contains(&turns), "{turns} of 30 turns");
}

#[test]
fn a_new_connection_does_not_shed_its_tenants_debt() {
    let mut thread = Thread::new(&[(0, 0), (1, 1)]);
    thread.shares.wake(0);
    thread.serve(|_| 10_000, |_| 1, false);
    thread.shares.leave(0);
    // Nor does another tenant take its place meanwhile.
    thread.shares.join(2, 9);
    thread.shares.join(0, 0);
    (0..2).for_each(|c| thread.shares.wake(c));
    let before = (0..1000).take_while(|_| thread.serve(|_| 100, |_| 1, true) != 0).count();
    assert!((99..=101).contains(&before), "{before}");
}

#[test]
fn a_tenant_that_was_served_by_other_threads_waits_here_but_not_for_long() {
    let mut shares = Shares::default();
    shares.join(0, 'a');
    shares.join(1, 'b');
    (0..2).for_each(|c| shares.wake(c));
    let mut turns = [0; 2];
    for _ in 0..2000 {
        let next = shares.pick().unwrap();
        turns[next] += 1;
        shares.wake(next);
        shares.served(100_000, if next == 0 { u64::MAX } else { 0 }, 1);
    }
    let most = 100_000 + MOST_ELSEWHERE_NS;
    let expected = 2000 * 100_000 / most;
    assert!(turns[0] >= expected && turns[0] <= expected + 2, "{turns:?}");
}

#[test]
fn what_has_ended_is_not_served_and_its_number_is_free() {
    let mut shares = Shares::default();
    shares.join(0, 1);
    shares.join(1, 2);
    (0..2).for_each(|c| shares.wake(c));
    shares.leave(0);
    shares.join(0, 3);
    assert_eq!(shares.pick(), Some(1));
    // It ends in its turn, and another one takes its number.
    shares.wake(1);
    shares.leave(1);
    shares.join(1, 2);
    shares.served(5, 0, 1);
    assert_eq!(shares.pick(), None);
    shares.leave(1);
    shares.wake(1);
    shares.wake(99);
    assert_eq!(shares.pick(), None);
    shares.wake(0);
    shares.wake(0);
    assert_eq!(shares.pick(), Some(0));
    shares.served(1, 0, 1);
    assert_eq!(shares.pick(), None);
    assert!(shares.is_empty());
}

#[test]
fn tenants_that_come_and_go_leave_nothing_behind() {
    let mut shares = Shares::default();
    for tenant in 0..10_000u32 {
        shares.join(0, tenant);
        shares.wake(0);
        assert_eq!(shares.pick(), Some(0));
        shares.served(3, 0, 1);
        shares.leave(0);
        shares.join(1, 1_000_000);
        shares.wake(1);
        let _ = shares.pick();
        shares.served(10, 0, 1);
        shares.leave(1);
    }
    assert!(shares.tenants.len() < 10 && shares.names.len() < 10, "{}", shares.tenants.len());
}

#[derive(Clone, Debug)]
enum Step {
    Wake(usize),
    Sleep(usize),
    Serve(u64),
    Leave(usize),
}

const CONNECTIONS: usize = 9;
const LONGEST: u64 = 1000;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..CONNECTIONS).prop_map(Step::Wake),
        1 => (0..CONNECTIONS).prop_map(Step::Sleep),
        6 => (1..=LONGEST).prop_map(Step::Serve),
        1 => (0..CONNECTIONS).prop_map(Step::Leave),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// Whatever the others do: between two tenants that always have something to do, and between two such
    /// connections of one of them, the difference of their times, divided by their weights, is at most a turn
    /// of each. Every one that wakes is served.
    #[test]
    fn shares_hold_for_any_arrivals(
        steps in prop::collection::vec(step(), 1..400), weights in prop::collection::vec(1..5u32, 4),
    ) {
        // Connections 0 and 1 are of tenant 0, 2 of tenant 1: they always have something to do.
        let tenant = |connection: usize| [0, 0, 1, 0, 1, 2, 2, 3, 3][connection];
        let mut shares = Shares::default();
        (0..CONNECTIONS).for_each(|c| shares.join(c, tenant(c)));
        let mut wants = [false; CONNECTIONS];
        for (always, wants) in wants.iter_mut().enumerate().take(3) {
            shares.wake(always);
            *wants = true;
        }
        let (mut of_tenant, mut of_connection) = ([0u64; 4], [0u64; CONNECTIONS]);
        for step in steps {
            match step {
                Step::Wake(c) => {
                    shares.wake(c);
                    wants[c] = true;
                }
                Step::Sleep(c) if c > 2 => wants[c] = false,
                Step::Leave(c) if c > 2 => {
                    shares.leave(c);
                    shares.join(c, tenant(c));
                    wants[c] = false;
                }
                Step::Sleep(_) | Step::Leave(_) => {}
                Step::Serve(time) => {
                    let c = shares.pick().expect("some always want");
                    // One that has nothing to do any more is asked once, which takes a moment.
                    let time = if wants[c] { time } else { 1 };
                    let weight = weights[usize::try_from(tenant(c)).unwrap()];
                    if wants[c] {
                        shares.wake(c);
                    }
                    shares.served(time, 0, weight);
                    of_tenant[usize::try_from(tenant(c)).unwrap()] += time;
                    of_connection[c] += time;
                }
            }
            let share = |tenant: usize| of_tenant[tenant] / u64::from(weights[tenant]);
            prop_assert!(share(0).abs_diff(share(1)) <= 2 * LONGEST + 400, "{of_tenant:?} {weights:?}");
            prop_assert!(
                of_connection[0].abs_diff(of_connection[1]) <= 2 * LONGEST + 400,
                "{of_connection:?}"
            );
        }
        // All that want are served, once no more comes.
        while let Some(c) = shares.pick() {
            shares.served(1, 0, 1);
            wants[c] = false;
        }
        prop_assert_eq!(wants, [false; CONNECTIONS]);
    }
}
