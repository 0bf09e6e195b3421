//! Requests and answers through queues: heads of 64 bytes, bodies of a megabyte. Clients know the service by
//! the name of its queue, and the service knows its clients by that of theirs; no side knows an address.
//! Workers come and go, and another worker gets a request that one of them drops.

use super::ran::Ran;
use rampool::direct::{Direct, Message, Queue, QueueBounds, SendBody};
use rampool::pool::PoolConfig;
use std::error::Error;
use std::time::{Duration, Instant};

const HEAD_BYTES: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(30);
const BOUNDS: QueueBounds = QueueBounds { messages: 64, bytes: 64 << 20 };

/// The content of a head: the client, the number of its request, and the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Head {
    client: u64,
    number: u64,
    sum: u64,
}

impl Head {
    /// The client that ends the service.
    const END: u64 = u64::MAX;

    fn to_bytes(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip([self.client, self.number, self.sum]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn of(message: &Message) -> Result<Self, Box<dyn Error>> {
        let bytes: &[u8; HEAD_BYTES] = message.head().try_into()?;
        let word = |n: usize| u64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().expect("eight bytes"));
        Ok(Self { client: word(0), number: word(1), sum: word(2) })
    }
}

/// The body of a request, different for each.
fn body(client: u64, number: u64, bytes: usize) -> Vec<u8> {
    let mut word = (client << 32 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word.to_le_bytes()
    });
    words.flatten().take(bytes).collect()
}

fn sum_of(body: &[u8]) -> u64 {
    body.iter().map(|byte| u64::from(*byte)).sum()
}

/// Answers requests with the sum of their bytes and their bytes reversed. Bodies arrive while heads are
/// processed.
fn work(direct: &mut Direct, give_up_after: Option<u64>) -> Result<u64, Box<dyn Error>> {
    let requests = direct.open_queue("requests")?;
    let mut served = 0;
    loop {
        let mut message = direct.take(&requests, TIMEOUT)?.ok_or("no request comes any more")?;
        direct.prefetch_body(&mut message);
        let head = Head::of(&message)?;
        if head.client == Head::END {
            direct.done(message);
            direct.flush_done(&requests)?;
            return Ok(served);
        }
        if give_up_after == Some(served) {
            // This worker ends in the middle of a request. Another one gets it.
            return Ok(served);
        }
        let answers = direct.open_queue(&format!("answers to {}", head.client))?;
        let mut body = direct.body(&mut message, TIMEOUT)?;
        let answer = Head { sum: sum_of(&body), ..head };
        body.reverse();
        direct.send(&answers, &answer.to_bytes(), SendBody::Bytes(&body), TIMEOUT)?;
        direct.done(message);
        served += 1;
    }
}

/// Asks `requests` times, two at a time, and checks every byte of every answer.
fn ask(direct: &mut Direct, client: u64, requests: u64, bytes: usize) -> Result<(), Box<dyn Error>> {
    let queue = direct.open_queue("requests")?;
    let answers = direct.open_or_create_queue(&format!("answers to {client}"), BOUNDS)?;
    let mut seen = vec![false; usize::try_from(requests)?];
    for number in 0..requests {
        let head = Head { client, number, sum: 0 };
        let send = direct.start_send(&queue, &head.to_bytes(), body(client, number, bytes), TIMEOUT)?;
        if number > 0 {
            take_answer(direct, &answers, client, bytes, &mut seen)?;
        }
        direct.wait_send(send)?;
    }
    take_answer(direct, &answers, client, bytes, &mut seen)?;
    direct.flush_done(&answers)?;
    direct.free_queue(&answers)?;
    if seen.iter().all(|seen| *seen) { Ok(()) } else { Err("a request has no answer".into()) }
}

fn take_answer(
    direct: &mut Direct,
    answers: &Queue,
    client: u64,
    bytes: usize,
    seen: &mut [bool],
) -> Result<(), Box<dyn Error>> {
    loop {
        let mut message = direct.take(answers, TIMEOUT)?.ok_or("no answer comes")?;
        let answer = Head::of(&message)?;
        let mut got = direct.body(&mut message, TIMEOUT)?;
        direct.done(message);
        got.reverse();
        if answer.client != client || got != body(client, answer.number, bytes) || answer.sum != sum_of(&got)
        {
            return Err(format!("the answer {answer:?} is wrong").into());
        }
        // A worker that was lost may have answered before it acknowledged the request.
        if !std::mem::replace(&mut seen[usize::try_from(answer.number)?], true) {
            return Ok(());
        }
    }
}

/// `clients` clients ask `requests` times each; two workers answer, and a third gives up in the middle.
pub fn run(direct: &mut Direct, clients: u64, requests: u64, bytes: usize) -> Result<Ran, Box<dyn Error>> {
    let queue = direct.open_or_create_queue("requests", BOUNDS)?;
    let lease = direct.pool().lease_ticket();
    let started = Instant::now();
    let join = |name: &str| {
        Direct::connect(&PoolConfig::attach(lease.clone(), name)).map_err(|error| error.to_string())
    };
    let worker = |give_up_after| -> Result<u64, String> {
        let mut direct = join("worker")?;
        let served = work(&mut direct, give_up_after).map_err(|error| error.to_string());
        direct.pool().close();
        served
    };
    let client = |number| -> Result<(), String> {
        let mut direct = join("client")?;
        let asked = ask(&mut direct, number, requests, bytes).map_err(|error| error.to_string());
        direct.pool().close();
        asked
    };
    let served = std::thread::scope(|scope| {
        let (worker, client) = (&worker, &client);
        let weak = scope.spawn(move || worker(Some(1)));
        let clients: Vec<_> = (0..clients).map(|number| scope.spawn(move || client(number))).collect();
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(move || worker(None))).collect();
        let asked: Result<Vec<()>, String> =
            clients.into_iter().map(|client| joined(client.join())).collect();
        for _ in 0..3 {
            // A client that has given up needs no answer, so it is dropped.
            let end = Head { client: Head::END, number: 0, sum: 0 };
            direct
                .send(&queue, &end.to_bytes(), SendBody::None, TIMEOUT)
                .map_err(|error| error.to_string())?;
        }
        let mut served = joined(weak.join())?;
        for worker in workers {
            served += joined(worker.join())?;
        }
        asked.map(|_| served)
    })?;
    let took = started.elapsed();
    direct.free_queue(&queue)?;
    if served < clients * requests {
        return Err(format!("{served} of {} requests were served", clients * requests).into());
    }
    let says =
        format!("{clients} clients had {requests} requests of {bytes} bytes each answered, in {took:?}");
    Ok(Ran { says, measured: vec![("requests", clients * requests, took)] })
}

fn joined<T>(result: std::thread::Result<Result<T, String>>) -> Result<T, String> {
    result.unwrap_or_else(|_| Err("a thread panicked".to_owned()))
}
