//! Queues whose senders and receivers are processes that are killed (SIGKILL) in the middle of what they do,
//! again and again.
//!
//! What the documentation promises is checked message by message: a send that ended well has appended its
//! message, once; a message is there until its receiver said that it is done with it; and it comes again only
//! if a receiver that had it was killed before it could say so.
#![allow(clippy::cast_possible_truncation)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rampool::direct::{Direct, Message, Queue, QueueBounds, QueueError, SendBody};
use rampool::pool::{PoolConfig, ServerSpec};
use rampool::proto::units::ByteLen;
use rampool::server::{Server, ServerConfig};

const ROLE: &str = "TEST_QUEUE_ROLE";
const TICKET: &str = "TEST_QUEUE_TICKET";
const WATCHDOG: Duration = Duration::from_secs(60);
/// What one sender sends, if it lives.
const MESSAGES: u64 = 40;
const KILLS: usize = 12;

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A message's body: often none, else up to some hundred KiB, which travel in several pieces.
fn body_of(sender: u64, number: u64) -> Vec<u8> {
    let draw = mix(sender << 32 | number);
    if draw.is_multiple_of(2) {
        return Vec::new();
    }
    (0..draw % 300_000).map(|n| (mix(n ^ draw) & 0xff) as u8).collect()
}

/// One line for the parent, at once: a kill cuts no line in two.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Not a test by itself: what a sender or receiver is, in a process of its own.
#[test]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let ticket = std::env::var(TICKET).unwrap().parse().unwrap();
    let mut direct = Direct::connect(&PoolConfig::attach(ticket, role.clone())).unwrap();
    let queue = direct.open_queue("jobs").unwrap();
    if let Some(sender) = role.strip_prefix("send ") {
        let sender: u64 = sender.parse().unwrap();
        for number in 0..MESSAGES {
            let head = [sender.to_le_bytes(), number.to_le_bytes()].concat();
            let body = body_of(sender, number);
            let body = if body.is_empty() { SendBody::None } else { SendBody::Bytes(&body) };
            direct.send(&queue, &head, body, WATCHDOG).unwrap();
            say(&format!("@ sent {sender} {number}"));
        }
        say("@ end");
        direct.pool().close();
        return;
    }
    // Until it is killed.
    loop {
        let Some(message) = direct.take(&queue, Duration::from_secs(1)).unwrap() else { continue };
        receive(&mut direct, &queue, message, say);
    }
}

/// Takes one message in, and says so before and after it is done with it.
fn receive(direct: &mut Direct, queue: &Queue, mut message: Message, mut say: impl FnMut(&str)) {
    let word = |at: usize| u64::from_le_bytes(message.head()[at..at + 8].try_into().unwrap());
    let (sender, number) = (word(0), word(8));
    match direct.body(&mut message, WATCHDOG) {
        Ok(body) => {
            assert!(body == body_of(sender, number), "message {number} of sender {sender} has another body")
        }
        // Its sender was killed in the middle: it was never appended.
        Err(QueueError::BodyLost { .. }) => {
            say(&format!("@ torn {sender} {number}"));
            return;
        }
        Err(error) => panic!("{error}"),
    }
    say(&format!("@ took {sender} {number} {}", message.redelivered()));
    direct.done(message);
    direct.flush_done(queue).unwrap();
    say(&format!("@ done {sender} {number}"));
}

/// What a process said, with its number; none when it has ended.
type Said = (usize, Option<String>);

struct Processes {
    ticket: String,
    running: BTreeMap<usize, (Child, String)>,
    next: usize,
    senders: u64,
    voice: mpsc::Sender<Said>,
}

impl Processes {
    fn start(&mut self, role: &str) -> usize {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "process", "--nocapture"]).env(ROLE, role).env(TICKET, &self.ticket);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (voice, process) = (self.voice.clone(), self.next);
        std::thread::spawn(move || {
            let mut line = String::new();
            while out.read_line(&mut line).is_ok_and(|n| n > 0) && line.ends_with('\n') {
                // The first line shares its line with the test's name.
                if let Some((_, said)) = line.trim_end().split_once("@ ") {
                    let _ = voice.send((process, Some(said.to_owned())));
                }
                line.clear();
            }
            let _ = voice.send((process, None));
        });
        self.running.insert(process, (child, role.to_owned()));
        self.next += 1;
        process
    }

    fn start_sender(&mut self) -> usize {
        self.senders += 1;
        self.start(&format!("send {}", self.senders))
    }

    fn kill(&mut self, process: usize) -> String {
        let (mut child, role) = self.running.remove(&process).expect("it runs");
        child.kill().unwrap();
        child.wait().unwrap();
        role
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, _) in self.running.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What became of a message.
#[derive(Default, Debug)]
struct Fate {
    sent: bool,
    /// Its receiver, and whether it came as a redelivery.
    taken: Vec<(usize, bool)>,
    done: Vec<usize>,
    torn: bool,
}

type Fates = BTreeMap<(u64, u64), Fate>;

fn note(fates: &mut Fates, process: usize, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let fate = fates.entry((words[1].parse().unwrap(), words[2].parse().unwrap())).or_default();
    match words[0] {
        "sent" => fate.sent = true,
        "took" => fate.taken.push((process, words[3] == "true")),
        "done" => fate.done.push(process),
        "torn" => fate.torn = true,
        other => panic!("{other:?}"),
    }
}

fn run(seed: u64) {
    let mut config = ServerConfig::new(256 << 20, "127.0.0.1:0".parse().unwrap());
    config.lock_memory = false;
    config.grace = Duration::from_millis(50);
    let server = Server::start(config).unwrap();
    let spec = ServerSpec { endpoint: server.addr().clone(), memory: None };
    let mut direct = Direct::connect(&PoolConfig::new(vec![spec], ByteLen(200 << 20), "parent")).unwrap();
    // Few places: senders wait for room, too, when they are killed.
    let queue = direct.open_or_create_queue("jobs", QueueBounds { messages: 6, bytes: 16 << 20 }).unwrap();
    let (voice, said) = mpsc::channel();
    let ticket = direct.pool().lease_ticket().to_string();
    let mut processes = Processes { ticket, running: BTreeMap::new(), next: 0, senders: 0, voice };
    for _ in 0..2 {
        processes.start_sender();
        processes.start("take");
    }
    let mut fates = Fates::new();
    let (mut kills, mut lines, mut next_kill) = (0, 0, 3 + mix(seed) % 12);
    let mut killed = Vec::new();
    let mut ended = Vec::new();
    let sending =
        |processes: &Processes| processes.running.values().any(|(_, role)| role.starts_with("send"));
    while sending(&processes) {
        let (process, line) = said.recv_timeout(WATCHDOG).expect("something happens before the watchdog");
        let Some(line) = line else {
            if let Some((mut child, role)) = processes.running.remove(&process) {
                assert!(
                    child.wait().unwrap().success() && ended.contains(&process),
                    "{role} ended by itself"
                );
            }
            continue;
        };
        if line == "end" {
            ended.push(process);
            continue;
        }
        note(&mut fates, process, &line);
        lines += 1;
        // The one that spoke last, or another one that is in the middle of a request.
        let alive: Vec<usize> =
            processes.running.keys().copied().filter(|process| !ended.contains(process)).collect();
        if lines >= next_kill && kills < KILLS && !alive.is_empty() {
            let draw = mix(seed << 20 | kills as u64);
            next_kill = lines + 2 + draw % 16;
            let victim = alive[(draw >> 20) as usize % alive.len()];
            let role = processes.kill(victim);
            killed.push(victim);
            kills += 1;
            if role.starts_with("send") {
                processes.start_sender();
            } else {
                processes.start("take");
            }
        }
    }
    // All receivers are killed, and what is left is taken here.
    let parent = processes.next;
    for process in processes.running.keys().copied().collect::<Vec<_>>() {
        processes.kill(process);
        killed.push(process);
    }
    drop(std::mem::replace(&mut processes.voice, mpsc::channel().0));
    while let Ok((process, line)) = said.recv_timeout(WATCHDOG) {
        if let Some(line) = line.filter(|line| line != "end") {
            note(&mut fates, process, &line);
        }
    }
    let until = Instant::now() + WATCHDOG;
    let left = |direct: &mut Direct| {
        direct.queues().unwrap().iter().find(|info| info.name == "jobs").unwrap().messages
    };
    while left(&mut direct) > 0 {
        assert!(Instant::now() < until, "what killed receivers held never comes back: {:?}", direct.queues());
        if let Some(message) = direct.take(&queue, Duration::from_millis(200)).unwrap() {
            receive(&mut direct, &queue, message, |line| {
                note(&mut fates, parent, line.trim_start_matches("@ "))
            });
        }
    }
    assert_eq!(kills, KILLS, "seed {seed}: the senders were too fast");
    let mut redelivered = 0;
    for ((sender, number), fate) in &fates {
        let what = format!("seed {seed}: message {number} of sender {sender}: {fate:?}, killed {killed:?}");
        assert!(!fate.sent || !fate.taken.is_empty(), "lost: {what}");
        assert!(!fate.sent || !fate.torn, "a send that ended well was torn: {what}");
        assert!(fate.done.len() <= 1, "came again after it was acknowledged: {what}");
        assert!(
            fate.taken.iter().filter(|(_, again)| !again).count() <= 1,
            "twice for the first time: {what}"
        );
        let unfinished = fate.taken.iter().filter(|(taker, _)| !fate.done.contains(taker));
        for (taker, _) in unfinished {
            assert!(killed.contains(taker), "left by a receiver that lives: {what}");
        }
        let mut takers: Vec<usize> = fate.taken.iter().map(|(taker, _)| *taker).collect();
        takers.dedup();
        assert_eq!(takers.len(), fate.taken.len(), "twice to the same receiver: {what}");
        redelivered += usize::from(fate.taken.iter().any(|(_, again)| *again));
    }
    assert!(fates.values().filter(|fate| fate.sent).count() >= 2 * MESSAGES as usize);
    println!("seed {seed}: {} messages, {redelivered} redelivered", fates.len());
    direct.free_queue(&queue).unwrap();
    direct.pool().close();
    assert!(server.wait_until_idle(Instant::now() + WATCHDOG));
    server.check();
}

#[test]
fn nothing_acknowledged_is_lost_and_nothing_comes_twice_but_from_the_killed() {
    for seed in [1, 2, 3] {
        run(seed);
    }
}
