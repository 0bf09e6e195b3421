//! A search engine's inverted index: for each word the documents that have it, as one list behind the other
//! in the pool. A query brings the lists of its two words, and no other byte, by one request; sixteen queries
//! are under way at a time.

use super::ran::Ran;
use rampool::direct::{Direct, Pending};
use rampool::proto::layout::Layout;
use std::collections::VecDeque;
use std::error::Error;
use std::time::Instant;

const UNDER_WAY: usize = 16;

/// Whether a document has a word: the first words are frequent.
fn has(word: u64, document: u64) -> bool {
    let mixed = (word << 32 | document).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 33).is_multiple_of(word + 2)
}

/// What a query waits for: its words, and how many documents are in the list of the first.
type Asked = (u64, u64, usize, Pending);

pub fn run(direct: &mut Direct, words: u64, documents: u64, queries: u64) -> Result<Ran, Box<dyn Error>> {
    let lists: Vec<Vec<u64>> =
        (0..words).map(|word| (0..documents).filter(|document| has(word, *document)).collect()).collect();
    let mut starts = vec![0];
    for list in &lists {
        starts.push(starts[starts.len() - 1] + list.len() as u64 * 8);
    }
    let index = direct.open_or_create("index", starts[lists.len()])?;
    let all: Vec<u64> = lists.concat();
    direct.put_values(index, 0, &Layout::bytes(8)?.contiguous(all.len() as u64)?, &all)?;

    let (mut asked, mut found) = (VecDeque::<Asked>::new(), 0);
    let started = Instant::now();
    for query in 0..queries {
        // Two words, the lesser number first: lists lie in the order of their words.
        let (one, other) = (query % (words - 1), words - 1 - query % (words / 2));
        let (one, other) = (one.min(other), one.max(other) + u64::from(one == other));
        let run = |word: u64| (lists[word as usize].len() as u64, starts[word as usize].cast_signed());
        let both = Layout::bytes(8)?.hindexed(&[run(one), run(other)])?;
        let pending = direct.start_get(index, 0, &both)?;
        asked.push_back((one, other, lists[one as usize].len(), pending));
        if asked.len() == UNDER_WAY {
            found += answer(direct, asked.pop_front().expect("it is full"))?;
        }
    }
    while let Some(next) = asked.pop_front() {
        found += answer(direct, next)?;
    }
    let took = started.elapsed();
    direct.free(index);
    let says =
        format!("{queries} queries in an index of {words} words and {documents} documents found {found}");
    Ok(Ran { says, measured: vec![("queries", queries, took)] })
}

/// How many documents have both words. They are checked against the documents themselves.
fn answer(direct: &mut Direct, (one, other, first, pending): Asked) -> Result<u64, Box<dyn Error>> {
    let bytes = direct.wait(pending)?;
    let (one_list, other_list) = bytes.split_at(first * 8);
    let mut others = other_list.chunks_exact(8).peekable();
    let mut found = 0;
    for document in one_list.chunks_exact(8) {
        let number = u64::from_le_bytes(document.try_into()?);
        while others.next_if(|next| u64::from_le_bytes((*next).try_into().expect("8")) < number).is_some() {}
        let both = others.next_if(|next| *next == document).is_some();
        if both != has(other, number) || !has(one, number) {
            return Err(format!("document {number} is wrong for words {one} and {other}").into());
        }
        found += u64::from(both);
    }
    Ok(found)
}
