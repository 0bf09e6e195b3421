//! The normal form of a layout: runs of bytes under nested loops and lists, and its coding on the wire.
//!
//! ```text
//!   program  = byte 0                                             nothing
//!            | node
//!   node     = 1, offset, length                                  a run of bytes
//!            | 2, count, stride, node                   the node repeatedly, each `stride` further
//!            | 3, count, width, base, count offsets, node  the node at every `base + offset`
//!            | 4, count, count nodes                              one after the other
//! ```
//! Offsets, strides and bases are signed numbers in zigzag form, lengths and counts unsigned, both as LEB128;
//! the offsets of a list are unsigned and `width` bytes each (4 or 8). Decoding allocates no more than a
//! small multiple of the bytes read, and never panics.

use super::{LayoutError, MAX_LAYOUT_BYTES, MAX_LAYOUT_OFFSET, MAX_RUNS};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Nodes below each other.
const MAX_DEPTH: u8 = 16;
/// From this many evenly spaced runs on, [`from_runs`] makes a loop of them.
const MIN_LOOP: usize = 32;
/// The most that coding `n` runs of one length costs, in addition to `width` bytes for each; for runs of
/// different lengths it is the cost of each.
const CODED_EXTRA: usize = 128;
const CODED_RUN: usize = 21;

/// Consecutive bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub offset: i64,
    pub len: u64,
}

impl Run {
    #[must_use]
    pub fn end(&self) -> i64 {
        self.offset + self.len.cast_signed()
    }
}

/// Invariants: `bytes > 0`; `low..high` are the bounds of all runs, within `MAX_LAYOUT_OFFSET`; `runs <=
/// MAX_RUNS` counts runs before neighbours are joined; `steps` counts them and the nodes entered for each;
/// `depth <= MAX_DEPTH`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Node {
    low: i64,
    high: i64,
    bytes: u64,
    runs: u64,
    steps: u64,
    depth: u8,
    shape: Shape,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Shape {
    /// `bytes` bytes at `low`.
    Run,
    Loop {
        count: u64,
        stride: i64,
        body: Box<Node>,
    },
    List {
        offsets: Offsets,
        body: Box<Node>,
    },
    Seq(Box<[Node]>),
}

/// Offsets of a list, shared by its copies and parts. Invariant: `part` is within `all`, and not empty.
#[derive(Clone)]
struct Offsets {
    all: Arc<[i64]>,
    part: Range<usize>,
}

impl Deref for Offsets {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.all[self.part.clone()]
    }
}

impl From<Vec<i64>> for Offsets {
    fn from(offsets: Vec<i64>) -> Self {
        Arc::<[i64]>::from(offsets).into()
    }
}

impl From<Arc<[i64]>> for Offsets {
    fn from(all: Arc<[i64]>) -> Self {
        Self { part: 0..all.len(), all }
    }
}

impl PartialEq for Offsets {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl Eq for Offsets {}

impl std::fmt::Debug for Offsets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self[..].fmt(f)
    }
}

impl Offsets {
    fn part(&self, range: Range<usize>) -> Self {
        assert!(!range.is_empty() && range.end <= self.len(), "{range:?} of {} offsets", self.len());
        Self { all: Arc::clone(&self.all), part: self.part.start + range.start..self.part.start + range.end }
    }

    fn bounds(&self) -> (i64, i64) {
        self.iter()
            .fold((i64::MAX, i64::MIN), |(least, most), offset| (least.min(*offset), most.max(*offset)))
    }
}

/// Selected bytes, in order. Made by [`super::Layout`], from runs, or decoded from the wire.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    root: Option<Node>,
}

/// Why bytes are not a valid program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    #[error("a layout is too short or too long")]
    Length,
    #[error("a layout has a node of kind {0}")]
    Kind(u8),
    #[error("a number in a layout is too long")]
    Number,
    #[error("a layout has an empty node")]
    Empty,
    #[error("a list of a layout has offsets of {0} bytes")]
    Width(u8),
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl Program {
    /// Bytes selected, repetitions included.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.root.as_ref().map_or(0, |node| node.bytes)
    }

    /// Runs, before neighbours are joined.
    #[must_use]
    pub fn run_count(&self) -> u64 {
        self.root.as_ref().map_or(0, |node| node.runs)
    }

    /// The cost of going through bytes `from..from + len` of the program's selection: a step for each run,
    /// before neighbours are joined, and for each node entered on the way, except those around all of it.
    /// Takes time by the number of nodes, not of steps.
    #[must_use]
    pub fn steps(&self, from: u64, len: u64) -> u64 {
        let Some(root) = &self.root else { return 0 };
        let to = from.saturating_add(len).min(root.bytes);
        if from >= to { 0 } else { root.steps_begun(to) - root.steps_ended(from) }
    }

    /// Bytes of the shortest run, before neighbours are joined.
    #[must_use]
    #[inline]
    pub fn shortest_run(&self) -> u64 {
        self.root.as_ref().map_or(0, Node::shortest_run)
    }

    /// Bytes of the longest run, neighbours joined, if the program shows it without expansion.
    #[must_use]
    #[inline]
    pub fn longest_run(&self) -> Option<u64> {
        self.root.as_ref().map_or(Some(0), Node::longest_run)
    }

    /// The single run that this is, if the program shows it without expansion.
    #[must_use]
    #[inline]
    pub fn as_run(&self) -> Option<Run> {
        match &self.root {
            Some(Node { shape: Shape::Run, low, bytes, .. }) => Some(Run { offset: *low, len: *bytes }),
            _ => None,
        }
    }

    /// For a list: the bytes that each member selects, and the number of members.
    #[must_use]
    pub fn as_list(&self) -> Option<(u64, usize)> {
        match &self.root.as_ref()?.shape {
            Shape::List { offsets, body } => Some((body.bytes, offsets.len())),
            _ => None,
        }
    }

    /// Members `range` of a list.
    ///
    /// # Errors
    /// As for a list that is too long; a part of a list never is.
    ///
    /// # Panics
    /// If this is no list, or has fewer members, or the range is empty.
    pub fn members(&self, range: Range<usize>) -> Result<Self, LayoutError> {
        let Some(Node { shape: Shape::List { offsets, body }, .. }) = &self.root else {
            panic!("only a list has members")
        };
        Ok(Self { root: Some(body.as_ref().clone().bare_list(offsets.part(range))?) })
    }

    /// The lowest byte, and the one after the highest; both 0 for an empty program.
    #[must_use]
    #[inline]
    pub fn bounds(&self) -> (i64, i64) {
        self.root.as_ref().map_or((0, 0), |node| (node.low, node.high))
    }

    /// One run.
    ///
    /// # Errors
    /// [`LayoutError`] beyond the bounds.
    #[inline]
    pub fn run(offset: i64, len: u64) -> Result<Self, LayoutError> {
        if len == 0 { Ok(Self::default()) } else { Ok(Self { root: Some(Node::run(offset, len)?) }) }
    }

    /// The same bytes, `by` further on.
    ///
    /// # Errors
    /// [`LayoutError`] beyond the bounds.
    pub fn shifted(mut self, by: i64) -> Result<Self, LayoutError> {
        if let Some(node) = &mut self.root {
            node.shift(by)?;
        }
        Ok(self)
    }

    /// `count` times, each `stride` bytes after the one before.
    pub(super) fn repeated(self, count: u64, stride: i64) -> Result<Self, LayoutError> {
        match self.root {
            Some(node) if count > 0 => Ok(Self { root: Some(node.repeat(count, stride)?) }),
            _ => Ok(Self::default()),
        }
    }

    /// Once at each of the offsets.
    pub(super) fn at_each(self, offsets: Vec<i64>) -> Result<Self, LayoutError> {
        match self.root {
            Some(node) if !offsets.is_empty() => Ok(Self { root: Some(node.list(offsets)?) }),
            _ => Ok(Self::default()),
        }
    }

    /// One after the other.
    pub(super) fn sequence(parts: Vec<Self>) -> Result<Self, LayoutError> {
        Node::sequence(parts.into_iter().filter_map(|part| part.root).collect())
    }

    /// The runs in order, neighbours joined.
    #[must_use]
    pub fn runs(&self) -> Runs<'_> {
        self.window(0, self.bytes())
    }

    /// The runs of bytes `from..from + len` of the program's selection; fewer if it ends before. Finding the
    /// first takes time by the number of nodes on the way to it, not of runs before it.
    #[must_use]
    #[inline]
    pub fn window(&self, from: u64, len: u64) -> Runs<'_> {
        let mut runs =
            Runs { stack: Vec::new(), pending: None, left: len.min(self.bytes().saturating_sub(from)) };
        if let Some(root) = self.root.as_ref().filter(|_| runs.left > 0) {
            runs.stack.reserve_exact(usize::from(root.depth) - 1);
            runs.seek(root, from);
        }
        runs
    }

    /// The same bytes as [`Program::window`], in batches of runs of one length; neighbours are not joined.
    #[must_use]
    pub fn rows(&self, from: u64, len: u64) -> Rows<'_> {
        Rows { runs: self.window(from, len) }
    }

    /// Appends the coded form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match &self.root {
            None => out.push(0),
            Some(node) => node.encode(out),
        }
    }

    /// Bytes of the coded form, or a little more.
    #[must_use]
    #[inline]
    pub fn coded_bytes(&self) -> usize {
        self.root.as_ref().map_or(1, Node::coded_bytes)
    }

    /// Reads a program, and nothing behind it.
    ///
    /// # Errors
    /// [`ProgramError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        let mut rest = bytes;
        if bytes == [0] {
            return Ok(Self::default());
        }
        let node = Node::decode(&mut rest, MAX_DEPTH)?;
        if rest.is_empty() { Ok(Self { root: Some(node) }) } else { Err(ProgramError::Length) }
    }

    /// Whether a byte is selected twice. Compares bounds where they suffice, and every run (sorted) only
    /// where they do not.
    ///
    /// # Errors
    /// [`LayoutError::TooManyRuns`] where more than 4 million runs would have to be compared.
    pub fn overlaps(&self) -> Result<bool, LayoutError> {
        const MOST: u64 = 4 << 20;
        let Some(root) = &self.root else { return Ok(false) };
        if root.is_apart() {
            return Ok(false);
        }
        if root.bytes > (root.high - root.low).unsigned_abs() {
            return Ok(true);
        }
        if root.runs > MOST {
            return Err(LayoutError::TooManyRuns(root.runs));
        }
        let mut runs: Vec<Run> = self.runs().collect();
        runs.sort_unstable_by_key(|run| run.offset);
        Ok(runs.windows(2).any(|pair| pair[0].end() > pair[1].offset))
    }

    /// Whether every run begins at a multiple of `align` and is as long as one.
    #[must_use]
    pub fn is_aligned(&self, align: u64) -> bool {
        self.root.as_ref().is_none_or(|node| node.is_aligned(align, 0))
    }
}

/// Collects runs into a program while its coded form is sure to stay within a bound.
#[derive(Debug)]
pub struct Collector {
    runs: Vec<Run>,
    low: i64,
    high: i64,
    bytes: u64,
    alike: bool,
    max_coded: usize,
}

impl Collector {
    /// `max_coded`: bytes of the coded program, at least 256.
    #[must_use]
    pub fn new(max_coded: usize) -> Self {
        Self { runs: Vec::new(), low: i64::MAX, high: i64::MIN, bytes: 0, alike: true, max_coded }
    }

    /// Takes one more run; false, and nothing taken, if the program might get too long. The first run always
    /// fits.
    #[must_use]
    pub fn push(&mut self, run: Run) -> bool {
        if !self.may_push(run) {
            return false;
        }
        let one = self.runs.len() == 1;
        match self.runs.last_mut() {
            Some(last) if last.end() == run.offset => {
                // The joined run may differ in length from those before it.
                last.len += run.len;
                self.alike = one;
            }
            Some(last) => {
                self.alike &= last.len == run.len;
                self.runs.push(run);
            }
            None => self.runs.push(run),
        }
        (self.low, self.high) = (self.low.min(run.offset), self.high.max(run.offset));
        self.bytes += run.len;
        true
    }

    /// Whether [`Collector::push`] would take this run.
    #[must_use]
    pub fn may_push(&self, run: Run) -> bool {
        let (low, high) = (self.low.min(run.offset), self.high.max(run.offset));
        let (alike, runs) = match self.runs.last() {
            Some(last) if last.end() == run.offset => (self.runs.len() == 1, self.runs.len()),
            Some(last) => (self.alike && last.len == run.len, self.runs.len() + 1),
            None => (true, 1),
        };
        fits(runs, alike, low, high, self.max_coded)
    }

    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The collected program; the collector is empty again.
    ///
    /// # Errors
    /// [`LayoutError`] where a run is beyond the bounds of layouts.
    pub fn finish(&mut self) -> Result<Program, LayoutError> {
        let program = from_runs(&self.runs)?;
        self.runs.clear();
        (self.low, self.high, self.bytes, self.alike) = (i64::MAX, i64::MIN, 0, true);
        Ok(program)
    }
}

fn fits(runs: usize, alike: bool, low: i64, high: i64, max_coded: usize) -> bool {
    let width = if high - low <= i64::from(u32::MAX) { 4 } else { 8 };
    let each = if alike { width } else { CODED_RUN };
    runs == 1 || runs * each + CODED_EXTRA <= max_coded
}

/// A program of these runs: loops where many are evenly spaced, a list where all have one length, else a
/// sequence of runs.
fn from_runs(runs: &[Run]) -> Result<Program, LayoutError> {
    let mut nodes = Vec::new();
    let mut single = 0..0;
    let mut at = 0;
    let flush = |nodes: &mut Vec<Node>, runs: &[Run]| -> Result<(), LayoutError> {
        let Some(first) = runs.first() else { return Ok(()) };
        if runs.len() > 1 && runs.iter().all(|run| run.len == first.len) {
            nodes.push(
                Node::run(0, first.len)?
                    .bare_list(runs.iter().map(|run| run.offset).collect::<Vec<_>>().into())?,
            );
            return Ok(());
        }
        for run in runs {
            nodes.push(Node::run(run.offset, run.len)?);
        }
        Ok(())
    };
    while at < runs.len() {
        let mut end = at + 1;
        if end < runs.len() {
            let stride = runs[end].offset - runs[at].offset;
            while end < runs.len()
                && runs[end].len == runs[at].len
                && runs[end].offset - runs[end - 1].offset == stride
            {
                end += 1;
            }
            if end - at >= MIN_LOOP || end - at == runs.len() {
                flush(&mut nodes, &runs[single.clone()])?;
                nodes.push(Node::run(runs[at].offset, runs[at].len)?.repeat((end - at) as u64, stride)?);
                single = end..end;
                at = end;
                continue;
            }
        }
        // The last of them may begin an evenly spaced row.
        at = (end - 1).max(at + 1);
        single.end = at;
    }
    flush(&mut nodes, &runs[single])?;
    match nodes.len() {
        0 => Ok(Program::default()),
        1 => Ok(Program { root: nodes.pop() }),
        _ => Ok(Program { root: Some(Node::bare_sequence(nodes)?) }),
    }
}

impl Node {
    fn run(offset: i64, len: u64) -> Result<Self, LayoutError> {
        Self { low: 0, high: 0, bytes: len, runs: 1, steps: 1, depth: 1, shape: Shape::Run }
            .bounded(offset.into(), i128::from(offset) + i128::from(len))
    }

    /// Sets the bounds, if they and everything else are within the limits of layouts.
    fn bounded(mut self, low: i128, high: i128) -> Result<Self, LayoutError> {
        let inside = |n: i128| i64::try_from(n).ok().filter(|n| n.unsigned_abs() <= MAX_LAYOUT_OFFSET);
        (self.low, self.high) =
            (inside(low).ok_or(LayoutError::TooFar)?, inside(high).ok_or(LayoutError::TooFar)?);
        if self.bytes > MAX_LAYOUT_BYTES {
            return Err(LayoutError::TooLarge);
        }
        if self.runs > MAX_RUNS {
            return Err(LayoutError::TooManyRuns(self.runs));
        }
        if self.depth > MAX_DEPTH {
            return Err(LayoutError::TooDeep);
        }
        Ok(self)
    }

    fn is_run(&self) -> bool {
        matches!(self.shape, Shape::Run)
    }

    fn shift(&mut self, by: i64) -> Result<(), LayoutError> {
        for bound in [&mut self.low, &mut self.high] {
            *bound = bound
                .checked_add(by)
                .filter(|n| n.unsigned_abs() <= MAX_LAYOUT_OFFSET)
                .ok_or(LayoutError::TooFar)?;
        }
        match &mut self.shape {
            Shape::Run => Ok(()),
            Shape::Loop { body, .. } => body.shift(by),
            Shape::List { offsets, body } => {
                // The offsets stay shared and unchanged if the node under them can move instead.
                let mut moved = body.clone();
                if moved.shift(by).is_ok() {
                    *body = moved;
                    return Ok(());
                }
                let moved = offsets.iter().map(|offset| offset.checked_add(by).ok_or(LayoutError::TooFar));
                *offsets = moved.collect::<Result<Vec<_>, _>>()?.into();
                Ok(())
            }
            Shape::Seq(nodes) => nodes.iter_mut().try_for_each(|node| node.shift(by)),
        }
    }

    fn repeat(self, count: u64, stride: i64) -> Result<Self, LayoutError> {
        if count == 1 {
            return Ok(self);
        }
        let bytes = self.bytes.checked_mul(count).ok_or(LayoutError::TooLarge)?;
        if self.is_run() && i128::from(stride) == i128::from(self.bytes) {
            return Self::run(self.low, bytes);
        }
        if let Shape::Loop { count: inner, stride: inner_stride, body } = &self.shape
            && i128::from(*inner) * i128::from(*inner_stride) == i128::from(stride)
        {
            let (inner, inner_stride) = (*inner, *inner_stride);
            return body.as_ref().clone().bare_loop(
                inner.checked_mul(count).ok_or(LayoutError::TooManyRuns(u64::MAX))?,
                inner_stride,
            );
        }
        self.bare_loop(count, stride)
    }

    fn bare_loop(self, count: u64, stride: i64) -> Result<Self, LayoutError> {
        let reach = i128::from(count - 1) * i128::from(stride);
        let (low, high) = (i128::from(self.low) + reach.min(0), i128::from(self.high) + reach.max(0));
        self.times(count, |body| Shape::Loop { count, stride, body })?.bounded(low, high)
    }

    fn list(mut self, offsets: Vec<i64>) -> Result<Self, LayoutError> {
        let stride = offsets
            .get(1)
            .map_or(Some(0), |second| second.checked_sub(offsets[0]))
            .ok_or(LayoutError::TooFar)?;
        if offsets.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(stride)) {
            self.shift(offsets[0])?;
            return self.repeat(offsets.len() as u64, stride);
        }
        self.bare_list(offsets.into())
    }

    fn bare_list(self, offsets: Offsets) -> Result<Self, LayoutError> {
        let bounds = offsets.bounds();
        self.list_within(offsets, bounds)
    }

    /// `least` and `most`: the offsets' bounds.
    fn list_within(self, offsets: Offsets, (least, most): (i64, i64)) -> Result<Self, LayoutError> {
        let (low, high) =
            (i128::from(least) + i128::from(self.low), i128::from(most) + i128::from(self.high));
        self.times(offsets.len() as u64, |body| Shape::List { offsets, body })?.bounded(low, high)
    }

    /// A shape that repeats this one `count` times; its bounds are still to be set.
    fn times(self, count: u64, shape: impl FnOnce(Box<Self>) -> Shape) -> Result<Self, LayoutError> {
        let bytes = self.bytes.checked_mul(count).ok_or(LayoutError::TooLarge)?;
        let (runs, steps) =
            (self.runs.saturating_mul(count), self.steps.saturating_mul(count).saturating_add(1));
        Ok(Self { low: 0, high: 0, bytes, runs, steps, depth: self.depth + 1, shape: shape(Box::new(self)) })
    }

    /// Joins neighbours, and makes a list of similar parts.
    fn sequence(parts: Vec<Self>) -> Result<Program, LayoutError> {
        let mut nodes: Vec<Self> = Vec::with_capacity(parts.len());
        for part in parts {
            let list = match part.shape {
                Shape::Seq(inner) => inner.into_vec(),
                _ => vec![part],
            };
            for node in list {
                match nodes.last_mut() {
                    Some(last) if last.is_run() && node.is_run() && last.high == node.low => {
                        *last = Self::run(last.low, last.bytes + node.bytes)?
                    }
                    _ => nodes.push(node),
                }
            }
        }
        if nodes.is_empty() {
            return Ok(Program::default());
        }
        if nodes.len() == 1 {
            return Ok(Program { root: nodes.pop() });
        }
        let alike = |a: &Self, b: &Self| a.is_run() && b.is_run() && a.bytes == b.bytes;
        if nodes.iter().all(|node| alike(node, &nodes[0])) {
            let offsets = nodes.iter().map(|node| node.low).collect();
            return Ok(Program { root: Some(Self::run(0, nodes[0].bytes)?.list(offsets)?) });
        }
        Ok(Program { root: Some(Self::bare_sequence(nodes)?) })
    }

    fn bare_sequence(nodes: Vec<Self>) -> Result<Self, LayoutError> {
        let sum = |of: fn(&Self) -> u64| nodes.iter().try_fold(0u64, |sum, node| sum.checked_add(of(node)));
        let node = Self {
            low: 0,
            high: 0,
            bytes: sum(|node| node.bytes).ok_or(LayoutError::TooLarge)?,
            runs: sum(|node| node.runs).ok_or(LayoutError::TooManyRuns(u64::MAX))?,
            steps: sum(|node| node.steps).ok_or(LayoutError::TooManyRuns(u64::MAX))?.saturating_add(1),
            depth: nodes.iter().map(|node| node.depth).max().expect("not empty") + 1,
            shape: Shape::Run,
        };
        let low = nodes.iter().map(|node| node.low).min().expect("not empty");
        let high = nodes.iter().map(|node| node.high).max().expect("not empty");
        let node = node.bounded(low.into(), high.into())?;
        Ok(Self { shape: Shape::Seq(nodes.into()), ..node })
    }

    /// Whether bounds alone prove that no byte is selected twice.
    fn is_apart(&self) -> bool {
        let span = |node: &Self| (node.high - node.low).unsigned_abs();
        match &self.shape {
            Shape::Run => true,
            Shape::Loop { stride, body, .. } => stride.unsigned_abs() >= span(body) && body.is_apart(),
            Shape::List { offsets, body } => {
                offsets.windows(2).all(|p| p[1] - p[0] >= span(body).cast_signed()) && body.is_apart()
            }
            Shape::Seq(nodes) => {
                nodes.windows(2).all(|pair| pair[0].high <= pair[1].low) && nodes.iter().all(Self::is_apart)
            }
        }
    }

    /// `base`: where byte 0 is, or any number that differs from that by a multiple of `align`.
    fn is_aligned(&self, align: u64, base: i64) -> bool {
        let even = |n: i64| n.unsigned_abs().is_multiple_of(align);
        match &self.shape {
            Shape::Run => even(base + self.low) && self.bytes.is_multiple_of(align),
            Shape::Loop { stride, body, .. } => even(*stride) && body.is_aligned(align, base),
            Shape::List { offsets, body } => {
                let first = offsets[0];
                offsets.iter().all(|offset| even(offset - first)) && body.is_aligned(align, base + first)
            }
            Shape::Seq(nodes) => nodes.iter().all(|node| node.is_aligned(align, base)),
        }
    }

    /// Where its first run begins, and where its last one ends.
    fn ends(&self) -> (i64, i64) {
        match &self.shape {
            Shape::Run => (self.low, self.high),
            Shape::Loop { count, stride, body } => {
                let (start, end) = body.ends();
                (start, end + (count - 1).cast_signed() * stride)
            }
            Shape::List { offsets, body } => {
                let (start, end) = body.ends();
                (offsets[0] + start, offsets[offsets.len() - 1] + end)
            }
            Shape::Seq(nodes) => (nodes[0].ends().0, nodes[nodes.len() - 1].ends().1),
        }
    }

    /// Bytes of the longest run, if no two are to be joined.
    fn longest_run(&self) -> Option<u64> {
        match &self.shape {
            Shape::Run => Some(self.bytes),
            Shape::Loop { stride, body, .. } => {
                let (start, end) = body.ends();
                body.longest_run().filter(|_| start.wrapping_add(*stride) != end)
            }
            Shape::List { offsets, body } => {
                let (start, end) = body.ends();
                // Looks at all of them, rather than up to the first that joins: this vectorises.
                let joined =
                    offsets.windows(2).fold(false, |any, pair| any | (pair[1] - pair[0] == end - start));
                body.longest_run().filter(|_| !joined)
            }
            Shape::Seq(nodes) => {
                let (mut longest, mut last) = (0, None);
                for node in nodes {
                    let (start, end) = node.ends();
                    longest = node.longest_run().filter(|_| last != Some(start))?.max(longest);
                    last = Some(end);
                }
                Some(longest)
            }
        }
    }

    /// Steps begun before byte `to`, which is within the node or at its end; the step into the node itself
    /// counts only for a run.
    fn steps_begun(&self, to: u64) -> u64 {
        match &self.shape {
            Shape::Run => u64::from(to > 0),
            Shape::Loop { body, .. } | Shape::List { body, .. } => {
                (to / body.bytes) * body.steps + body.steps_begun_from_outside(to % body.bytes)
            }
            Shape::Seq(nodes) => {
                let (mut left, mut steps) = (to, 0);
                for node in nodes {
                    if left < node.bytes {
                        return steps + node.steps_begun_from_outside(left);
                    }
                    (left, steps) = (left - node.bytes, steps + node.steps);
                }
                steps
            }
        }
    }

    /// Like [`Self::steps_begun`], with the step into the node.
    fn steps_begun_from_outside(&self, to: u64) -> u64 {
        self.steps_begun(to) + u64::from(to > 0 && !self.is_run())
    }

    /// Steps into the parts that have ended at byte `from`, which is within the node.
    fn steps_ended(&self, from: u64) -> u64 {
        match &self.shape {
            Shape::Run => 0,
            Shape::Loop { body, .. } | Shape::List { body, .. } => {
                (from / body.bytes) * body.steps + body.steps_ended(from % body.bytes)
            }
            Shape::Seq(nodes) => {
                let (mut left, mut steps) = (from, 0);
                for node in nodes {
                    if left < node.bytes {
                        return steps + node.steps_ended(left);
                    }
                    (left, steps) = (left - node.bytes, steps + node.steps);
                }
                steps
            }
        }
    }

    fn shortest_run(&self) -> u64 {
        match &self.shape {
            Shape::Run => self.bytes,
            Shape::Loop { body, .. } | Shape::List { body, .. } => body.shortest_run(),
            Shape::Seq(nodes) => nodes.iter().map(Self::shortest_run).min().expect("not empty"),
        }
    }

    fn coded_bytes(&self) -> usize {
        match &self.shape {
            Shape::Run => CODED_RUN,
            Shape::Loop { body, .. } => CODED_RUN + body.coded_bytes(),
            Shape::List { offsets, body } => CODED_RUN + 1 + 8 * offsets.len() + body.coded_bytes(),
            Shape::Seq(nodes) => 11 + nodes.iter().map(Self::coded_bytes).sum::<usize>(),
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match &self.shape {
            Shape::Run => {
                out.push(1);
                push_signed(out, self.low);
                push_number(out, self.bytes);
            }
            Shape::Loop { count, stride, body } => {
                out.push(2);
                push_number(out, *count);
                push_signed(out, *stride);
                body.encode(out);
            }
            Shape::List { offsets, body } => {
                let (base, most) = (self.low - body.low, self.high - body.high);
                let wide = most - base > i64::from(u32::MAX);
                out.push(3);
                push_number(out, offsets.len() as u64);
                out.push(if wide { 8 } else { 4 });
                push_signed(out, base);
                let start = out.len();
                if wide {
                    out.resize(start + 8 * offsets.len(), 0);
                    for (place, offset) in out[start..].as_chunks_mut().0.iter_mut().zip(offsets.iter()) {
                        *place = (offset - base).to_le_bytes();
                    }
                } else {
                    out.resize(start + 4 * offsets.len(), 0);
                    for (place, offset) in out[start..].as_chunks_mut().0.iter_mut().zip(offsets.iter()) {
                        // Only the lowest four bytes hold data.
                        let [a, b, c, d, ..] = (offset - base).to_le_bytes();
                        *place = [a, b, c, d];
                    }
                }
                body.encode(out);
            }
            Shape::Seq(nodes) => {
                out.push(4);
                push_number(out, nodes.len() as u64);
                nodes.iter().for_each(|node| node.encode(out));
            }
        }
    }

    fn decode(rest: &mut &[u8], depth: u8) -> Result<Self, ProgramError> {
        let below = depth.checked_sub(1).ok_or(LayoutError::TooDeep)?;
        let kind = take(rest, 1)?[0];
        match kind {
            1 => {
                let offset = read_signed(rest)?;
                match read_number(rest)? {
                    0 => Err(ProgramError::Empty),
                    len => Ok(Self::run(offset, len)?),
                }
            }
            2 => {
                let (count, stride) = (read_number(rest)?, read_signed(rest)?);
                if count == 0 {
                    return Err(ProgramError::Empty);
                }
                Ok(Self::decode(rest, below)?.bare_loop(count, stride)?)
            }
            3 => {
                let count = read_number(rest)?;
                let width = take(rest, 1)?[0];
                if width != 4 && width != 8 {
                    return Err(ProgramError::Width(width));
                }
                let base = read_signed(rest)?;
                if count == 0 {
                    return Err(ProgramError::Empty);
                }
                // A list is never longer than the bytes read, so its allocation is bounded.
                let bytes = usize::try_from(count)
                    .ok()
                    .and_then(|n| n.checked_mul(width.into()))
                    .ok_or(ProgramError::Length)?;
                let list = take(rest, bytes)?;
                if base.unsigned_abs() > 2 * MAX_LAYOUT_OFFSET {
                    return Err(LayoutError::TooFar.into());
                }
                let offsets: Arc<[i64]> = if width == 4 {
                    list.as_chunks()
                        .0
                        .iter()
                        .map(|bytes| base + i64::from(u32::from_le_bytes(*bytes)))
                        .collect()
                } else {
                    let offset = |bytes: &[u8; 8]| {
                        i64::try_from(u64::from_le_bytes(*bytes)).ok().and_then(|n| n.checked_add(base))
                    };
                    list.as_chunks().0.iter().map(offset).collect::<Option<_>>().ok_or(LayoutError::TooFar)?
                };
                let offsets = Offsets::from(offsets);
                let (least, most) = offsets.bounds();
                if least.unsigned_abs().max(most.unsigned_abs()) > MAX_LAYOUT_OFFSET {
                    return Err(LayoutError::TooFar.into());
                }
                Ok(Self::decode(rest, below)?.list_within(offsets, (least, most))?)
            }
            4 => {
                let count = read_number(rest)?;
                if count == 0 {
                    return Err(ProgramError::Empty);
                }
                // Every node is at least three bytes.
                if count > rest.len() as u64 / 3 {
                    return Err(ProgramError::Length);
                }
                let nodes = (0..count).map(|_| Self::decode(rest, below)).collect::<Result<Vec<_>, _>>()?;
                Ok(Self::bare_sequence(nodes)?)
            }
            other => Err(ProgramError::Kind(other)),
        }
    }
}

/// The runs of a program, or of a window of it. Takes memory by the depth of the program, not by its runs.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    stack: Vec<Frame<'a>>,
    pending: Option<Run>,
    /// Bytes still to come, those of `pending` among them.
    left: u64,
}

#[derive(Clone, Copy, Debug)]
struct Frame<'a> {
    node: &'a Node,
    index: u64,
    base: i64,
}

impl<'a> Runs<'a> {
    /// Goes to byte `skip` of `root`'s selection.
    fn seek(&mut self, root: &'a Node, mut skip: u64) {
        let (mut node, mut base) = (root, 0);
        loop {
            match &node.shape {
                Shape::Run => {
                    self.pending =
                        Some(Run { offset: base + node.low + skip.cast_signed(), len: node.bytes - skip });
                    return;
                }
                Shape::Loop { stride, body, .. } => {
                    let index = skip / body.bytes;
                    skip %= body.bytes;
                    self.stack.push(Frame { node, index: index + 1, base });
                    base += index.cast_signed() * stride;
                    node = body;
                }
                Shape::List { offsets, body } => {
                    let index = skip / body.bytes;
                    skip %= body.bytes;
                    self.stack.push(Frame { node, index: index + 1, base });
                    base += offsets[at(index)];
                    node = body;
                }
                Shape::Seq(nodes) => {
                    let mut index = 0;
                    while skip >= nodes[index].bytes {
                        skip -= nodes[index].bytes;
                        index += 1;
                    }
                    self.stack.push(Frame { node, index: index as u64 + 1, base });
                    node = &nodes[index];
                }
            }
        }
    }

    /// The next run, neighbours not joined.
    #[inline]
    fn step(&mut self) -> Option<Run> {
        loop {
            let top = self.stack.last_mut()?;
            let index = top.index;
            let (child, base) = match &top.node.shape {
                Shape::Loop { count, stride, body } if index < *count => {
                    (body.as_ref(), top.base + index.cast_signed() * stride)
                }
                Shape::List { offsets, body } if index < offsets.len() as u64 => {
                    (body.as_ref(), top.base + offsets[at(index)])
                }
                Shape::Seq(nodes) if index < nodes.len() as u64 => (&nodes[at(index)], top.base),
                _ => {
                    self.stack.pop();
                    continue;
                }
            };
            top.index += 1;
            if child.is_run() {
                return Some(Run { offset: base + child.low, len: child.bytes });
            }
            self.stack.push(Frame { node: child, index: 0, base });
        }
    }
}

/// An index that was counted in memory.
fn at(index: u64) -> usize {
    usize::try_from(index).expect("an index into memory")
}

impl Iterator for Runs<'_> {
    type Item = Run;

    #[inline]
    fn next(&mut self) -> Option<Run> {
        if self.left == 0 {
            return None;
        }
        let mut run = match self.pending.take() {
            Some(run) => run,
            None => self.step()?,
        };
        while run.len < self.left {
            match self.step() {
                Some(next) if next.offset == run.end() => run.len += next.len,
                other => {
                    self.pending = other;
                    break;
                }
            }
        }
        run.len = run.len.min(self.left);
        self.left -= run.len;
        Some(run)
    }
}

/// Runs of one length, in the order of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Row<'a> {
    /// `count` of them, each `stride` bytes further than the one before.
    Even { first: i64, stride: i64, count: u64, len: u64 },
    /// One at `base` and each of the offsets.
    Listed { base: i64, offsets: &'a [i64], len: u64 },
}

/// The runs of a program, or of a window of it, in the batches of its innermost loops and lists.
#[derive(Clone, Debug)]
pub struct Rows<'a> {
    runs: Runs<'a>,
}

impl<'a> Rows<'a> {
    fn one(&mut self, run: Run) -> Row<'a> {
        let len = run.len.min(self.runs.left);
        self.runs.left -= len;
        Row::Even { first: run.offset, stride: 0, count: 1, len }
    }
}

impl<'a> Iterator for Rows<'a> {
    type Item = Row<'a>;

    fn next(&mut self) -> Option<Row<'a>> {
        if self.runs.left == 0 {
            return None;
        }
        if let Some(run) = self.runs.pending.take() {
            return Some(self.one(run));
        }
        let left = self.runs.left;
        if let Some(top) = self.runs.stack.last_mut() {
            match &top.node.shape {
                Shape::Loop { count, stride, body }
                    if body.is_run() && top.index < *count && body.bytes <= left =>
                {
                    let fit = (count - top.index).min(left / body.bytes);
                    let first = top.base + top.index.cast_signed() * stride + body.low;
                    top.index += fit;
                    self.runs.left -= fit * body.bytes;
                    return Some(Row::Even { first, stride: *stride, count: fit, len: body.bytes });
                }
                Shape::List { offsets, body }
                    if body.is_run() && top.index < offsets.len() as u64 && body.bytes <= left =>
                {
                    let fit = (offsets.len() as u64 - top.index).min(left / body.bytes);
                    let offsets = &offsets[at(top.index)..at(top.index + fit)];
                    let base = top.base + body.low;
                    top.index += fit;
                    self.runs.left -= fit * body.bytes;
                    return Some(Row::Listed { base, offsets, len: body.bytes });
                }
                _ => {}
            }
        }
        // A part of a run, a single run, or the way into the next row.
        let run = self.runs.step()?;
        Some(self.one(run))
    }
}

fn push_number(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push((n & 0x7f) as u8 | 0x80);
        n >>= 7;
    }
    out.push((n & 0x7f) as u8);
}

fn push_signed(out: &mut Vec<u8>, n: i64) {
    push_number(out, ((n << 1) ^ (n >> 63)).cast_unsigned());
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], ProgramError> {
    let (head, tail) = rest.split_at_checked(len).ok_or(ProgramError::Length)?;
    *rest = tail;
    Ok(head)
}

fn read_number(rest: &mut &[u8]) -> Result<u64, ProgramError> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = take(rest, 1)?[0];
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return Err(ProgramError::Number);
        }
        n |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(n);
        }
    }
    Err(ProgramError::Number)
}

fn read_signed(rest: &mut &[u8]) -> Result<i64, ProgramError> {
    let n = read_number(rest)?;
    Ok((n >> 1).cast_signed() ^ -((n & 1).cast_signed()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_node() -> impl Strategy<Value = Node> {
        let run = (-20..20i64, 1..5u64).prop_map(|(offset, len)| Node::run(offset, len).unwrap());
        run.prop_recursive(4, 40, 4, |inner| {
            prop_oneof![
                (1..5u64, -9..9i64, inner.clone())
                    .prop_map(|(count, stride, body)| body.bare_loop(count, stride).unwrap()),
                (prop::collection::vec(-9..9i64, 1..5), inner.clone())
                    .prop_map(|(at, body)| body.bare_list(at.into()).unwrap()),
                prop::collection::vec(inner, 1..4).prop_map(|nodes| Node::bare_sequence(nodes).unwrap()),
            ]
        })
    }

    /// Steps into the parts within bytes `wanted` of a node whose first byte is number `at`.
    fn walked(node: &Node, at: u64, wanted: &Range<u64>) -> u64 {
        if at >= wanted.end || at + node.bytes <= wanted.start {
            return 0;
        }
        let each = |count: u64, body: &Node| {
            (0..count).map(|index| walked(body, at + index * body.bytes, wanted)).sum::<u64>()
        };
        1 + match &node.shape {
            Shape::Run => 0,
            Shape::Loop { count, body, .. } => each(*count, body),
            Shape::List { offsets, body } => each(offsets.len() as u64, body),
            Shape::Seq(nodes) => {
                let starts =
                    nodes.iter().scan(at, |next, node| Some(std::mem::replace(next, *next + node.bytes)));
                nodes.iter().zip(starts).map(|(node, start)| walked(node, start, wanted)).sum()
            }
        }
    }

    proptest! {
        #[test]
        fn steps_are_what_a_walk_through_all_runs_takes(
            root in any_node(), from in 0..60u64, len in 1..80u64,
        ) {
            let (bytes, depth) = (root.bytes, u64::from(root.depth));
            let (from, len) = (from % bytes, len.min(bytes - from % bytes));
            let program = Program { root: Some(root.clone()) };
            let (steps, walked) = (program.steps(from, len), walked(&root, 0, &(from..from + len)));
            // The nodes around the first byte are entered to find it; those that began before it are not
            // counted.
            prop_assert!(steps <= walked && walked <= steps + depth, "{steps} counted, {walked} taken");
            prop_assert!(program.window(from, len).count() as u64 <= steps);
            prop_assert_eq!(program.steps(0, bytes) + u64::from(!root.is_run()), root.steps);
        }
    }
}
