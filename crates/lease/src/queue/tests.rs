use super::*;
use proptest::prelude::*;
use std::ops::Range;

const BOUNDS: QueueBounds = QueueBounds { messages: 4, bytes: 30_000 };

fn asker(member: u64, request: u64) -> Asker {
    Asker { member: MemberId(member), request, origin: (0, member) }
}

fn message(head: &[u8]) -> Push<'_> {
    Push { timeout_ms: 0, head, body: Body::None }
}

fn take(timeout_ms: u32, most: u16) -> Take {
    Take { timeout_ms, most, acknowledged: Vec::new() }
}

fn with_queue(bounds: QueueBounds) -> (Queues, QueueId) {
    let mut queues = Queues::new(QueueLimits::default());
    let id = queues.add("jobs", bounds, RegionId(7));
    (queues, id)
}

fn outputs(queues: &mut Queues) -> Vec<Output> {
    let all = std::iter::from_fn(|| queues.poll()).collect();
    queues.check();
    all
}

/// The heads that an output hands over.
fn heads(queues: &Queues, output: &Output) -> Vec<(Vec<u8>, bool)> {
    let Output::Taken { queue, numbers, .. } = output else { panic!("{output:?}") };
    let one = |number: &u64| {
        let delivery = queues.delivery(*queue, *number);
        (delivery.head.to_vec(), delivery.redelivered)
    };
    numbers.iter().map(one).collect()
}

#[test]
fn a_message_waits_for_its_receiver_and_a_receiver_for_its_message() {
    let (mut queues, id) = with_queue(BOUNDS);
    queues.push(Tick(0), asker(1, 1), id, &message(b"a"));
    assert_eq!(outputs(&mut queues), [Output::Pushed { to: asker(1, 1), number: 1, body_at: None }]);
    queues.take(Tick(0), asker(2, 1), id, &take(0, 9));
    let got = outputs(&mut queues);
    assert_eq!(heads(&queues, &got[0]), [(b"a".to_vec(), false)]);
    queues.take(Tick(0), asker(2, 2), id, &take(50, 9));
    assert_eq!(outputs(&mut queues), []);
    assert_eq!(queues.poll_timeout(), Some(Tick(50)));
    queues.push(Tick(9), asker(1, 2), id, &message(b"b"));
    let got = outputs(&mut queues);
    assert!(matches!(got[0], Output::Pushed { number: 2, .. }) && got.len() == 2);
    assert_eq!(heads(&queues, &got[1]), [(b"b".to_vec(), false)]);
    queues.take(Tick(10), asker(2, 3), id, &take(50, 9));
    queues.handle_timeout(Tick(59));
    assert_eq!(outputs(&mut queues), []);
    queues.handle_timeout(Tick(60));
    assert_eq!(outputs(&mut queues), [Output::Taken { to: asker(2, 3), queue: id, numbers: vec![] }]);
}

#[test]
fn who_finds_it_full_waits_in_the_order_of_coming_or_is_told() {
    let (mut queues, id) = with_queue(QueueBounds { messages: 9, bytes: 10 });
    queues.push(Tick(0), asker(1, 1), id, &message(b"12345678"));
    outputs(&mut queues);
    queues.push(Tick(0), asker(1, 2), id, &message(b"123"));
    assert_eq!(
        outputs(&mut queues),
        [Output::Failed { to: asker(1, 2), error: QueueError::Full { messages: 1 } }]
    );
    queues.push(Tick(0), asker(1, 3), id, &Push { timeout_ms: 100, ..message(b"123") });
    queues.push(Tick(0), asker(3, 1), id, &Push { timeout_ms: 200, ..message(b"1") });
    assert_eq!(outputs(&mut queues), [], "there would be room for the second, but the first was first");
    queues.handle_timeout(Tick(100));
    let got = outputs(&mut queues);
    assert_eq!(got[0], Output::Failed { to: asker(1, 3), error: QueueError::Full { messages: 1 } });
    assert!(matches!(got[1], Output::Pushed { to, .. } if to == asker(3, 1)));
    queues.push(Tick(0), asker(1, 4), id, &message(b"12345678901"));
    assert!(matches!(
        outputs(&mut queues)[..],
        [Output::Failed { error: QueueError::TooLong { needs: 11, most: 10 }, .. }]
    ));
}

#[test]
fn a_receiver_that_is_lost_loses_nothing() {
    let (mut queues, id) = with_queue(BOUNDS);
    for (request, head) in [b"a", b"b", b"c"].iter().enumerate() {
        queues.push(Tick(0), asker(1, request as u64), id, &message(*head));
    }
    queues.take(Tick(0), asker(2, 1), id, &take(0, 2));
    outputs(&mut queues);
    queues.member_gone(MemberId(2));
    assert_eq!(outputs(&mut queues), []);
    queues.take(Tick(0), asker(3, 1), id, &take(0, 9));
    let got = outputs(&mut queues);
    assert_eq!(
        heads(&queues, &got[0]),
        [(b"a".to_vec(), true), (b"b".to_vec(), true), (b"c".to_vec(), false)]
    );
    // The sender's end changes nothing for what it has sent; the receiver's word counts for what it holds
    // only.
    queues.member_gone(MemberId(1));
    assert_eq!(queues.settle(MemberId(4), id, &[1, 2, 3], Settlement::Done), Ok(0));
    assert_eq!(queues.settle(MemberId(3), id, &[1, 3, 9], Settlement::Done), Ok(2));
    assert_eq!(queues.settle(MemberId(3), id, &[2], Settlement::Return), Ok(1));
    queues.take(Tick(0), asker(4, 1), id, &take(0, 9));
    let got = outputs(&mut queues);
    assert_eq!(heads(&queues, &got[0]), [(b"b".to_vec(), true)]);
}

#[test]
fn a_request_that_is_repeated_is_carried_out_once() {
    let (mut queues, id) = with_queue(BOUNDS);
    for _ in 0..3 {
        queues.push(Tick(0), asker(1, 1), id, &message(b"a"));
        assert_eq!(outputs(&mut queues), [Output::Pushed { to: asker(1, 1), number: 1, body_at: None }]);
    }
    queues.push(Tick(0), asker(1, 2), id, &message(b"b"));
    outputs(&mut queues);
    for _ in 0..3 {
        queues.take(Tick(0), asker(2, 1), id, &take(0, 1));
        assert_eq!(outputs(&mut queues), [Output::Taken { to: asker(2, 1), queue: id, numbers: vec![1] }]);
    }
    // One that waits still waits once.
    let (mut full, small) = with_queue(QueueBounds { messages: 1, bytes: 100 });
    full.push(Tick(0), asker(1, 1), small, &message(b"a"));
    for _ in 0..2 {
        full.push(Tick(0), asker(1, 2), small, &Push { timeout_ms: 9, ..message(b"b") });
    }
    outputs(&mut full);
    full.handle_timeout(Tick(9));
    assert_eq!(outputs(&mut full).len(), 1);
    // Its new connection gets the answer.
    queues.settle(MemberId(2), id, &[1], Settlement::Done).unwrap();
    queues.take(Tick(0), asker(2, 2), id, &take(0, 1));
    queues.take(Tick(0), asker(2, 3), id, &take(9, 1));
    outputs(&mut queues);
    queues.disconnected(MemberId(2));
    let again = Asker { origin: (1, 99), ..asker(2, 3) };
    queues.take(Tick(0), again, id, &take(9, 1));
    queues.push(Tick(0), asker(1, 3), id, &message(b"c"));
    assert!(outputs(&mut queues).contains(&Output::Taken { to: again, queue: id, numbers: vec![3] }));
}

#[test]
fn a_head_is_there_before_its_body() {
    let (mut queues, id) = with_queue(BOUNDS);
    queues.take(Tick(0), asker(2, 1), id, &take(9, 1));
    queues.push(Tick(0), asker(1, 1), id, &Push { body: Body::Bytes(9000), ..message(b"head") });
    let got = outputs(&mut queues);
    assert_eq!(got[0], Output::Pushed { to: asker(1, 1), number: 1, body_at: Some(0) });
    assert_eq!(got[1], Output::Taken { to: asker(2, 1), queue: id, numbers: vec![1] });
    assert!(queues.delivery(id, 1).arriving);
    queues.await_body(Tick(0), asker(2, 2), id, 1, 50);
    queues.await_body(Tick(0), asker(2, 3), id, 1, 0);
    queues.await_body(Tick(0), asker(3, 1), id, 1, 50);
    assert_eq!(
        outputs(&mut queues),
        [
            Output::Body { to: asker(2, 3), there: false },
            Output::Failed { to: asker(3, 1), error: QueueError::NoSuchMessage }
        ]
    );
    // Only its sender stores it, and only there.
    let may = |queues: &Queues, member, from, end| queues.may_store(MemberId(member), RegionId(7), from, end);
    assert!(
        may(&queues, 1, 0, 9000)
            && !may(&queues, 2, 0, 9000)
            && !may(&queues, 1, 0, 9001)
            && !may(&queues, 1, 20_000, 20_001)
    );
    assert!(queues.may_store(MemberId(2), RegionId(8), 0, 1 << 40), "another region");
    queues.body_came(RegionId(7), 0, 8192);
    assert_eq!(outputs(&mut queues), []);
    queues.body_came(RegionId(7), 8192, 808);
    assert_eq!(outputs(&mut queues), [Output::Body { to: asker(2, 2), there: true }]);
    assert!(!may(&queues, 1, 0, 9000), "a complete body does not change");
    queues.push(Tick(0), asker(1, 2), id, &Push { body: Body::Bytes(1), ..message(b"next") });
    assert!(
        matches!(outputs(&mut queues)[0], Output::Pushed { body_at: Some(12288), .. }),
        "behind the three pages of the first"
    );
    queues.settle(MemberId(2), id, &[1], Settlement::Done).unwrap();
    assert_eq!(
        outputs(&mut queues),
        [Output::Free { region: RegionId(7), extent: Extent::new(PageIndex(0), 3) }]
    );
}

#[test]
fn who_is_done_before_the_body_is_there_does_not_trouble_the_sender() {
    let (mut queues, id) = with_queue(QueueBounds { messages: 1, bytes: 1 << 20 });
    let push = |head| Push { timeout_ms: 100, head, body: Body::Bytes(9000) };
    queues.push(Tick(0), asker(1, 1), id, &push(b"one"));
    queues.take(Tick(0), asker(2, 1), id, &take(0, 1));
    queues.await_body(Tick(0), asker(2, 2), id, 1, 100);
    queues.push(Tick(0), asker(1, 2), id, &push(b"two"));
    outputs(&mut queues);
    assert_eq!(queues.settle(MemberId(2), id, &[1], Settlement::Done), Ok(1));
    assert_eq!(outputs(&mut queues), [Output::Failed { to: asker(2, 2), error: QueueError::NoSuchMessage }]);
    // Neither its receiver's going nor another receiver brings it again, and the rest of its body is welcome.
    queues.member_gone(MemberId(2));
    queues.take(Tick(0), asker(3, 1), id, &take(0, 1));
    assert!(outputs(&mut queues).iter().all(|output| heads(&queues, output).is_empty()));
    assert!(queues.may_store(MemberId(1), RegionId(7), 0, 9000));
    queues.body_came(RegionId(7), 0, 8192);
    assert_eq!(outputs(&mut queues), []);
    queues.body_came(RegionId(7), 8192, 808);
    let [Output::Free { .. }, Output::Pushed { to, number: 2, .. }] = &outputs(&mut queues)[..] else {
        panic!("room for the next")
    };
    assert_eq!(*to, asker(1, 2));
    assert!(!queues.may_store(MemberId(1), RegionId(7), 0, 9000));
    // One that is done with and whose sender is lost leaves, too.
    queues.take(Tick(0), asker(3, 2), id, &take(0, 1));
    outputs(&mut queues);
    queues.settle(MemberId(3), id, &[2], Settlement::Done).unwrap();
    queues.member_gone(MemberId(1));
    assert!(matches!(outputs(&mut queues)[..], [Output::Free { .. }]));
    let (listed, counts) = queues.list(QueueId(0)).next().unwrap();
    assert_eq!((listed.messages, listed.held, counts.done, counts.withdrawn), (0, 0, 2, 0));
}

#[test]
fn a_sender_that_is_lost_before_the_body_was_there_is_told_to_who_saw_the_head() {
    let (mut queues, id) = with_queue(QueueBounds { messages: 5, ..BOUNDS });
    for request in 1..=5 {
        queues.push(Tick(0), asker(1, request), id, &Push { body: Body::Bytes(10), ..message(b"head") });
    }
    queues.body_came(RegionId(7), 4096, 10);
    queues.take(Tick(0), asker(2, 1), id, &take(0, 4));
    queues.await_body(Tick(0), asker(2, 2), id, 1, 100);
    outputs(&mut queues);
    queues.member_gone(MemberId(1));
    let got = outputs(&mut queues);
    let free = |page| Output::Free { region: RegionId(7), extent: Extent::new(PageIndex(page), 1) };
    assert!(got.contains(&Output::Failed { to: asker(2, 2), error: QueueError::BodyLost }));
    assert!(got.contains(&free(0)), "the receiver of the first has been told");
    assert!(got.contains(&free(4)), "no receiver had seen the fifth");
    let messages = |queues: &Queues| queues.list(QueueId(0)).next().unwrap().0.messages;
    assert_eq!(messages(&queues), 3);
    for (request, number) in [(3, 1), (4, 2), (5, 3), (6, 3)] {
        queues.await_body(Tick(0), asker(2, request), id, number, 100);
    }
    let failed = |request, error| Output::Failed { to: asker(2, request), error };
    let told = [
        failed(3, QueueError::NoSuchMessage),
        Output::Body { to: asker(2, 4), there: true },
        failed(5, QueueError::BodyLost),
        free(2),
        failed(6, QueueError::NoSuchMessage),
    ];
    assert_eq!(outputs(&mut queues), told, "the receiver that is told holds it no longer");
    // Given back, it is free.
    queues.settle(MemberId(2), id, &[2, 4], Settlement::Return).unwrap();
    outputs(&mut queues);
    queues.take(Tick(0), asker(2, 7), id, &take(0, 9));
    assert_eq!(outputs(&mut queues), [Output::Taken { to: asker(2, 7), queue: id, numbers: vec![2] }]);
    assert_eq!(messages(&queues), 1);
}

#[test]
fn a_queue_that_is_given_up_says_so_to_who_waits() {
    let (mut queues, id) = with_queue(QueueBounds { messages: 1, bytes: 100 });
    queues.push(Tick(0), asker(1, 1), id, &Push { body: Body::Bytes(10), ..message(b"a") });
    queues.push(Tick(0), asker(1, 2), id, &Push { timeout_ms: 5, ..message(b"b") });
    queues.take(Tick(0), asker(2, 1), id, &take(5, 1));
    queues.take(Tick(0), asker(2, 2), id, &take(5, 1));
    queues.await_body(Tick(0), asker(2, 3), id, 1, 5);
    outputs(&mut queues);
    assert_eq!(queues.remove(id), Ok(RegionId(7)));
    let gone: Vec<u64> = outputs(&mut queues)
        .iter()
        .map(|output| match output {
            Output::Failed { to, error: QueueError::NoSuchQueue } => to.member.0 * 10 + to.request,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(gone, [12, 22, 23]);
    assert_eq!(queues.memory_bytes(), 0);
    assert_eq!(queues.find("jobs"), Err(QueueError::NoSuchQueue));
    queues.take(Tick(0), asker(2, 4), id, &take(5, 1));
    assert!(matches!(outputs(&mut queues)[..], [Output::Failed { error: QueueError::NoSuchQueue, .. }]));
}

#[test]
fn heads_that_are_sent_together_enter_together() {
    let (mut queues, id) = with_queue(QueueBounds { messages: 4, bytes: 30 });
    let table = |timeout_ms, heads: &[&[u8]]| {
        let mut table = Vec::new();
        PushHeads::encode(timeout_ms, heads, &mut table);
        table
    };
    let send = |queues: &mut Queues, request, table: &[u8]| {
        queues.push_heads(Tick(0), asker(1, request), id, &PushHeads::parse(table).unwrap())
    };
    send(&mut queues, 1, &table(0, &[b"a", b"b", b"c"]));
    assert_eq!(outputs(&mut queues), [Output::Pushed { to: asker(1, 1), number: 1, body_at: None }]);
    send(&mut queues, 2, &table(0, &[b"d", b"e"]));
    assert_eq!(
        outputs(&mut queues),
        [Output::Failed { to: asker(1, 2), error: QueueError::Full { messages: 3 } }],
        "there is room for one of them"
    );
    send(&mut queues, 3, &table(9, &[b"d", b"e"]));
    // A single one that would fit waits behind them.
    queues.push(Tick(0), asker(2, 1), id, &Push { timeout_ms: 9, ..message(b"f") });
    assert_eq!(outputs(&mut queues), []);
    queues.take(Tick(0), asker(3, 1), id, &take(0, 2));
    queues.settle(MemberId(3), id, &[1, 2], Settlement::Done).unwrap();
    let got = outputs(&mut queues);
    assert_eq!(
        got[1..],
        [
            Output::Pushed { to: asker(1, 3), number: 4, body_at: None },
            Output::Pushed { to: asker(2, 1), number: 6, body_at: None }
        ]
    );
    queues.take(Tick(0), asker(3, 2), id, &take(0, 9));
    let got = outputs(&mut queues);
    assert_eq!(
        heads(&queues, &got[0]).iter().flat_map(|(head, _)| head.clone()).collect::<Vec<u8>>(),
        b"cdef"
    );
    // A message that never fits is refused at once, whatever its timeout.
    send(&mut queues, 4, &table(9, &[b"1", b"2", b"3", b"4", b"5"]));
    assert_eq!(
        outputs(&mut queues),
        [Output::Failed { to: asker(1, 4), error: QueueError::TooMany { count: 5, most: 4 } }]
    );
    send(&mut queues, 5, &table(9, &[b"0123456789", b"0123456789", b"0123456789a"]));
    assert_eq!(
        outputs(&mut queues),
        [Output::Failed { to: asker(1, 5), error: QueueError::TooLong { needs: 31, most: 30 } }]
    );
}

#[test]
fn places_of_bodies_come_around_and_pass_over_those_in_use() {
    let (mut queues, id) = with_queue(QueueBounds { messages: 9, bytes: 1 << 40 });
    let body = |pages: u64| Push { body: Body::Bytes(pages * 4096), ..message(b"") };
    queues.push(Tick(0), asker(1, 1), id, &body(3));
    queues.queues.get_mut(&id).unwrap().next_page = MAX_PAGE_INDEX - 2;
    queues.push(Tick(0), asker(1, 2), id, &body(2));
    queues.push(Tick(0), asker(1, 3), id, &body(5));
    let places: Vec<Option<u64>> = outputs(&mut queues)
        .iter()
        .map(|output| {
            if let Output::Pushed { body_at, .. } = output {
                body_at.map(|at| at / 4096)
            } else {
                panic!("{output:?}")
            }
        })
        .collect();
    assert_eq!(places, [Some(0), Some(MAX_PAGE_INDEX - 2), Some(3)]);
}

#[test]
fn limits_are_named() {
    let most = QueueBounds { messages: 10, bytes: 1000 };
    let mut queues = Queues::new(QueueLimits { queues: 1, bounds: most });
    for wrong in [
        QueueBounds { messages: 11, ..most },
        QueueBounds { messages: 0, ..most },
        QueueBounds { bytes: 1001, ..most },
    ] {
        assert_eq!(queues.may_add(wrong), Err(QueueError::Bounds { messages: 10, bytes: 1000 }));
    }
    queues.add("one", most, RegionId(1));
    assert_eq!(queues.may_add(most), Err(QueueError::TooManyQueues(1)));
}

// --- against a model ---------------------------------------------------------------------------------------

/// What a naive queue would do: a list that is searched from its start for everything.
#[derive(Default)]
struct Model {
    list: VecDeque<Naive>,
    /// Members' requests that wait for room, and for messages.
    senders: VecDeque<(Asker, u64, Vec<Naive>)>,
    receivers: VecDeque<(Asker, u64, usize)>,
    pushed: Vec<(u64, u64, u64)>,
    answers: Vec<(u64, u64, Answer)>,
}

#[derive(Clone, Debug)]
struct Naive {
    id: u64,
    sender: u64,
    bytes: u64,
    missing: bool,
    holder: Option<(u64, u64)>,
    redelivered: bool,
    withdrawn: bool,
    finished: bool,
}

impl Naive {
    fn is_ready(&self) -> bool {
        self.holder.is_none() && !self.finished
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Answer {
    Pushed(u64),
    Full,
    /// Identity, and whether it was delivered before.
    Taken(Vec<(u64, bool)>),
}

impl Model {
    fn settle_down(&mut self) {
        loop {
            let used: u64 = self.list.iter().map(|m| m.bytes + 8).sum();
            let fits = |group: &[Naive]| {
                let bytes: u64 = group.iter().map(|m| m.bytes + 8).sum();
                (self.list.len() + group.len()) as u64 <= BOUNDS.messages && used + bytes <= BOUNDS.bytes
            };
            if self.senders.front().is_some_and(|(_, _, group)| fits(group)) {
                let (asker, _, group) = self.senders.pop_front().unwrap();
                self.pushed.push((asker.member.0, asker.request, group[0].id));
                self.answers.push((asker.member.0, asker.request, Answer::Pushed(group[0].id)));
                self.list.extend(group);
                continue;
            }
            break;
        }
        while self.list.iter().any(Naive::is_ready) && !self.receivers.is_empty() {
            let (asker, _, most) = self.receivers.pop_front().unwrap();
            let by = (asker.member.0, asker.request);
            let free = self.list.iter_mut().filter(|m| m.is_ready()).take(most);
            let got = free.map(|m| {
                m.holder = Some(by);
                (m.id, m.redelivered)
            });
            let got = got.collect();
            self.answers.push((by.0, by.1, Answer::Taken(got)));
        }
    }

    fn push(&mut self, asker: Asker, until: u64, group: Vec<Naive>, patient: bool) {
        let (member, request) = (asker.member.0, asker.request);
        if let Some((_, _, id)) = self.pushed.iter().find(|(m, r, _)| (*m, *r) == (member, request)) {
            self.answers.push((member, request, Answer::Pushed(*id)));
            return;
        }
        self.senders.push_back((asker, until, group));
        self.settle_down();
        if !patient {
            self.time(0, Some(asker));
        }
    }

    fn take(&mut self, asker: Asker, until: u64, most: usize, patient: bool) {
        let by = (asker.member.0, asker.request);
        let again: Vec<_> =
            self.list.iter().filter(|m| m.holder == Some(by)).map(|m| (m.id, m.redelivered)).collect();
        if !again.is_empty() {
            self.answers.push((by.0, by.1, Answer::Taken(again)));
            return;
        }
        self.receivers.push_back((asker, until, most));
        self.settle_down();
        if !patient {
            self.time(0, Some(asker));
        }
    }

    fn time(&mut self, now: u64, of: Option<Asker>) {
        let over = |asker: &Asker, until: u64| {
            until <= now && of.is_none() || of.is_some_and(|of| of.is_same(asker))
        };
        let answers = &mut self.answers;
        self.senders.retain(|(asker, until, _)| {
            let over = over(asker, *until);
            if over {
                answers.push((asker.member.0, asker.request, Answer::Full));
            }
            !over
        });
        self.receivers.retain(|(asker, until, _)| {
            let over = over(asker, *until);
            if over {
                answers.push((asker.member.0, asker.request, Answer::Taken(Vec::new())));
            }
            !over
        });
        self.settle_down();
    }

    fn disconnected(&mut self, member: u64) {
        self.senders.retain(|(asker, ..)| asker.member.0 != member);
        self.receivers.retain(|(asker, ..)| asker.member.0 != member);
        self.settle_down();
    }

    fn gone(&mut self, member: u64) {
        self.senders.retain(|(asker, ..)| asker.member.0 != member);
        self.receivers.retain(|(asker, ..)| asker.member.0 != member);
        for message in &mut self.list {
            if message.holder.is_some_and(|(holder, _)| holder == member) {
                (message.holder, message.redelivered) = (None, true);
            }
            message.withdrawn |= message.sender == member && message.missing;
        }
        self.list.retain(|m| !m.withdrawn || m.holder.is_some());
        self.settle_down();
    }

    fn settle(&mut self, member: u64, id: u64, how: Settlement) {
        let Some(at) = self.list.iter().position(|m| m.id == id) else { return };
        let held = self.list[at].holder.is_some_and(|(holder, _)| holder == member);
        match how {
            Settlement::Done if held && self.list[at].missing && !self.list[at].withdrawn => {
                (self.list[at].holder, self.list[at].finished) = (None, true);
            }
            Settlement::Done if held => _ = self.list.remove(at),
            Settlement::Return if held => {
                (self.list[at].holder, self.list[at].redelivered) = (None, true);
                if self.list[at].withdrawn {
                    self.list.remove(at);
                }
            }
            _ => {}
        }
        self.settle_down();
    }
}

/// A client: what it has asked and has no answer to, and what it has in hand.
#[derive(Default)]
struct Client {
    unanswered: Vec<(u64, Ask)>,
    /// Answers on their way to it; a connection that breaks loses them.
    coming: Vec<(u64, Answer)>,
    in_hand: Vec<u64>,
    next: u64,
}

#[derive(Clone, Debug)]
enum Ask {
    Push {
        id: u64,
        bytes: u64,
        timeout_ms: u32,
    },
    /// Messages with these identities and no bodies.
    PushHeads {
        ids: Range<u64>,
        timeout_ms: u32,
    },
    Take {
        most: u16,
        timeout_ms: u32,
    },
}

impl Ask {
    fn pushes(&self) -> Range<u64> {
        match self {
            Self::Push { id, .. } => *id..*id + 1,
            Self::PushHeads { ids, .. } => ids.clone(),
            Self::Take { .. } => panic!("it pushes nothing"),
        }
    }
}

fn naive(id: u64, sender: u64, bytes: u64) -> Naive {
    Naive {
        id,
        sender,
        bytes,
        missing: bytes > 0,
        holder: None,
        redelivered: false,
        withdrawn: false,
        finished: false,
    }
}

struct World {
    queues: Queues,
    queue: QueueId,
    model: Model,
    clients: BTreeMap<u64, Client>,
    numbers: BTreeMap<u64, u64>,
    now: u64,
    sent: BTreeSet<u64>,
    withdrawn: BTreeSet<u64>,
    done: Vec<u64>,
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

impl World {
    fn ask(&mut self, member: u64, request: u64, ask: &Ask) {
        let asker = asker(member, request);
        let now = Tick(self.now);
        match ask {
            Ask::Push { id, bytes, timeout_ms } => {
                let head = id.to_le_bytes();
                let body = if *bytes == 0 { Body::None } else { Body::Bytes(*bytes) };
                self.queues.push(
                    now,
                    asker,
                    self.queue,
                    &Push { timeout_ms: *timeout_ms, head: &head, body },
                );
                self.model.push(
                    asker,
                    self.now + u64::from(*timeout_ms),
                    vec![naive(*id, member, *bytes)],
                    *timeout_ms > 0,
                );
            }
            Ask::PushHeads { ids, timeout_ms } => {
                let all: Vec<[u8; 8]> = ids.clone().map(u64::to_le_bytes).collect();
                let mut table = Vec::new();
                PushHeads::encode(
                    *timeout_ms,
                    &all.iter().map(|head| &head[..]).collect::<Vec<_>>(),
                    &mut table,
                );
                self.queues.push_heads(now, asker, self.queue, &PushHeads::parse(&table).unwrap());
                let group = ids.clone().map(|id| naive(id, member, 0)).collect();
                self.model.push(asker, self.now + u64::from(*timeout_ms), group, *timeout_ms > 0);
            }
            Ask::Take { most, timeout_ms } => {
                self.queues.take(now, asker, self.queue, &take(*timeout_ms, *most));
                self.model.take(
                    asker,
                    self.now + u64::from(*timeout_ms),
                    usize::from(*most),
                    *timeout_ms > 0,
                );
            }
        }
        self.compare();
    }

    /// The machine and the model answer alike.
    fn compare(&mut self) {
        let mut answers = Vec::new();
        while let Some(output) = self.queues.poll() {
            let (to, answer) = match &output {
                Output::Pushed { to, number, .. } => {
                    let ask = self.clients[&to.member.0]
                        .unanswered
                        .iter()
                        .find(|(request, _)| *request == to.request);
                    let ids = ask.expect("an answer to nothing").1.pushes();
                    for (id, number) in ids.clone().zip(*number..) {
                        assert_eq!(
                            *self.numbers.entry(id).or_insert(number),
                            number,
                            "one message has one number"
                        );
                    }
                    (*to, Answer::Pushed(ids.start))
                }
                Output::Failed { to, error: QueueError::Full { .. } } => (*to, Answer::Full),
                Output::Taken { to, .. } => {
                    let id = |(head, again): &(Vec<u8>, bool)| {
                        (u64::from_le_bytes(head[..].try_into().unwrap()), *again)
                    };
                    (*to, Answer::Taken(heads(&self.queues, &output).iter().map(id).collect()))
                }
                Output::Free { .. } => continue,
                other => panic!("{other:?}"),
            };
            answers.push((to.member.0, to.request, answer));
        }
        self.queues.check();
        assert_eq!(answers, std::mem::take(&mut self.model.answers));
        for (member, request, answer) in answers {
            self.clients.get_mut(&member).unwrap().coming.push((request, answer));
        }
    }

    /// The client reads its answers.
    fn read(&mut self, member: u64) {
        let client = self.clients.get_mut(&member).unwrap();
        for (request, answer) in std::mem::take(&mut client.coming) {
            let at = client.unanswered.iter().position(|(asked, _)| *asked == request);
            let asked = at.map(|at| client.unanswered.remove(at).1);
            match answer {
                Answer::Pushed(_) => {
                    asked
                        .expect("acknowledged twice")
                        .pushes()
                        .for_each(|id| assert!(self.sent.insert(id), "acknowledged twice"));
                }
                Answer::Taken(got) => client.in_hand.extend(got.iter().map(|(id, _)| *id)),
                Answer::Full => {}
            }
        }
    }

    fn come_back(&mut self, member: u64) {
        self.queues.disconnected(MemberId(member));
        self.model.disconnected(member);
        self.compare();
        let client = self.clients.get_mut(&member).unwrap();
        client.coming.clear();
        for (request, ask) in client.unanswered.clone() {
            self.ask(member, request, &ask);
        }
    }

    /// The body of some such message is there. False if none is on its way.
    fn body_comes(&mut self, such: impl Fn(&Naive) -> bool) -> bool {
        let Some(message) = self.model.list.iter_mut().find(|m| m.missing && !m.withdrawn && such(m)) else {
            return false;
        };
        message.missing = false;
        let (number, bytes) = (self.numbers[&message.id], message.bytes);
        let at = self.queues.delivery(self.queue, number).body_at;
        assert!(self.queues.may_store(MemberId(message.sender), RegionId(7), at, at + bytes));
        self.queues.body_came(RegionId(7), at, bytes);
        self.model.list.retain(|m| m.missing || !m.finished);
        self.model.settle_down();
        self.compare();
        true
    }

    fn settle(&mut self, member: u64, id: u64, how: Settlement) {
        self.queues.settle(MemberId(member), self.queue, &[self.numbers[&id]], how).unwrap();
        self.model.settle(member, id, how);
        self.compare();
    }
}

/// Senders and receivers that come, go, are cut off and repeat what they have no answer to.
fn live(seed: u64, steps: usize) {
    let mut rng = Rng(seed);
    let (queues, queue) = with_queue(BOUNDS);
    let mut world = World {
        queues,
        queue,
        model: Model::default(),
        clients: (1..=4).map(|member| (member, Client::default())).collect(),
        numbers: BTreeMap::new(),
        now: 0,
        sent: BTreeSet::new(),
        withdrawn: BTreeSet::new(),
        done: Vec::new(),
    };
    let (mut next_id, mut next_member) = (1, 5);
    for _ in 0..steps {
        let members: Vec<u64> = world.clients.keys().copied().collect();
        let member = members[usize::try_from(rng.below(members.len() as u64)).unwrap()];
        let client = world.clients.get_mut(&member).unwrap();
        match rng.below(16) {
            0..=4 => {
                let bytes = if rng.below(3) == 0 { 1 + rng.below(12_000) } else { 0 };
                let timeout_ms = u32::try_from(rng.below(3) * 10).unwrap();
                let ask = if bytes == 0 && rng.below(2) == 0 {
                    Ask::PushHeads { ids: next_id..next_id + 1 + rng.below(BOUNDS.messages), timeout_ms }
                } else {
                    Ask::Push { id: next_id, bytes, timeout_ms }
                };
                next_id = ask.pushes().end;
                client.next += 1;
                client.unanswered.push((client.next, ask.clone()));
                let request = client.next;
                world.ask(member, request, &ask);
            }
            5..=8 => {
                let ask = Ask::Take {
                    most: u16::try_from(1 + rng.below(3)).unwrap(),
                    timeout_ms: u32::try_from(rng.below(3) * 10).unwrap(),
                };
                client.next += 1;
                client.unanswered.push((client.next, ask.clone()));
                let request = client.next;
                world.ask(member, request, &ask);
            }
            9 | 10 => world.read(member),
            11 | 12 => {
                if let Some(id) = client.in_hand.pop() {
                    let how = if rng.below(4) == 0 { Settlement::Return } else { Settlement::Done };
                    if how == Settlement::Done {
                        world.done.push(id);
                    }
                    world.settle(member, id, how);
                }
            }
            13 => {
                world.now += rng.below(15);
                world.queues.handle_timeout(Tick(world.now));
                world.model.time(world.now, None);
                world.compare();
            }
            14 => world.come_back(member),
            _ if rng.below(3) == 0 => {
                // What it had heard was done stays done; what it was not told may have been done or not.
                world.withdrawn.extend(
                    world.model.list.iter().filter(|m| m.sender == member && m.missing).map(|m| m.id),
                );
                world.queues.member_gone(MemberId(member));
                world.model.gone(member);
                world.clients.remove(&member);
                world.compare();
                world.clients.insert(next_member, Client::default());
                next_member += 1;
            }
            _ => _ = world.body_comes(|_| true),
        }
    }
    // All members reconnect, read what there is and acknowledge it; then nothing acknowledged is missing.
    for member in world.clients.keys().copied().collect::<Vec<_>>() {
        loop {
            world.come_back(member);
            world.read(member);
            world.now += 1000;
            world.queues.handle_timeout(Tick(world.now));
            world.model.time(world.now, None);
            world.compare();
            for id in std::mem::take(&mut world.clients.get_mut(&member).unwrap().in_hand) {
                world.done.push(id);
                world.settle(member, id, Settlement::Done);
            }
            if world.clients[&member].unanswered.is_empty() && world.clients[&member].coming.is_empty() {
                break;
            }
            world.read(member);
        }
    }
    while world.body_comes(|message| message.finished) {}
    let last = *world.clients.keys().next().unwrap();
    while !world.model.list.is_empty() {
        let client = world.clients.get_mut(&last).unwrap();
        client.next += 1;
        let (request, ask) = (client.next, Ask::Take { most: 9, timeout_ms: 0 });
        client.unanswered.push((request, ask.clone()));
        world.ask(last, request, &ask);
        world.read(last);
        for id in std::mem::take(&mut world.clients.get_mut(&last).unwrap().in_hand) {
            world.done.push(id);
            world.settle(last, id, Settlement::Done);
        }
        while world.body_comes(|message| message.finished) {}
    }
    let done: BTreeSet<u64> = world.done.iter().copied().collect();
    for id in &world.sent {
        assert!(
            done.contains(id) || world.withdrawn.contains(id),
            "message {id} was acknowledged to its sender and is lost"
        );
    }
    let counts = world.queues.list(QueueId(0)).next().unwrap();
    assert_eq!((counts.0.messages, counts.0.bytes, counts.0.held), (0, 0, 0));
}

/// What a member held is there again before others that waited behind it send or receive anything.
#[test]
fn what_a_lost_receiver_held_goes_before_what_comes_in_by_its_going() {
    live(3_696_778_456_970_303_536, 300);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn nothing_acknowledged_is_lost_and_nothing_is_appended_twice(seed: u64) {
        live(seed, 300);
    }
}
