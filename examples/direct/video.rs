//! A video server's cache: films lie in the pool, and viewers, each somewhere in one of them, get the next
//! segment in turn. A few segments are always under way, so the memory servers' bandwidth is the limit.

use super::ran::Ran;
use rampool::direct::{Direct, Pending};
use rampool::proto::layout::Layout;
use std::collections::VecDeque;
use std::error::Error;
use std::time::Instant;

const SEGMENT_BYTES: u64 = 256 << 10;
const UNDER_WAY: usize = 8;
/// What a film takes a second.
const BIT_RATE: f64 = 5e6;

/// What a segment begins and ends with.
fn mark(film: u64, segment: u64) -> [u8; 8] {
    (film << 32 | segment).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

pub fn run(direct: &mut Direct, films: u64, segments: u64, viewers: u64) -> Result<Ran, Box<dyn Error>> {
    let all = direct.open_or_create("films", films * segments * SEGMENT_BYTES)?;
    let mut bytes = vec![7; SEGMENT_BYTES as usize];
    for number in 0..films * segments {
        let mark = mark(number / segments, number % segments);
        bytes[..8].copy_from_slice(&mark);
        bytes[SEGMENT_BYTES as usize - 8..].copy_from_slice(&mark);
        direct.put(all, number * SEGMENT_BYTES, &bytes)?;
    }
    let whole = Layout::bytes(SEGMENT_BYTES)?;
    let mut under_way = VecDeque::<(u64, u64, Pending)>::new();
    let check = |direct: &mut Direct, (film, segment, pending)| -> Result<(), Box<dyn Error>> {
        let bytes = direct.wait(pending)?;
        if !bytes.starts_with(&mark(film, segment)) || !bytes.ends_with(&mark(film, segment)) {
            return Err(format!("segment {segment} of film {film} is another one").into());
        }
        Ok(())
    };
    let started = Instant::now();
    for turn in 0..segments {
        for viewer in 0..viewers {
            let (film, segment) = (viewer % films, (turn + viewer * 3) % segments);
            let at = (film * segments + segment) * SEGMENT_BYTES;
            under_way.push_back((film, segment, direct.start_get(all, at, &whole)?));
            if under_way.len() == UNDER_WAY {
                check(direct, under_way.pop_front().expect("it is full"))?;
            }
        }
    }
    for next in under_way {
        check(direct, next)?;
    }
    let took = started.elapsed();
    direct.free(all);
    let served = segments * viewers;
    let at_once = (served * SEGMENT_BYTES * 8) as f64 / BIT_RATE / took.as_secs_f64();
    let says = format!("{viewers} viewers got {served} segments: enough for {at_once:.0} films at 5 Mbit/s");
    Ok(Ran { says, measured: vec![("segments", served, took)] })
}
