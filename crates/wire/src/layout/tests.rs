//! Compares layouts with a naive reference, which lists every byte by MPI's definitions.

use super::*;
use proptest::prelude::*;

/// A layout as a user writes it.
#[derive(Clone, Debug)]
enum Text {
    Bytes(u64),
    Contiguous(u64, Box<Text>),
    Vector(u64, u64, i64, Box<Text>),
    Hvector(u64, u64, i64, Box<Text>),
    Indexed(Vec<(u64, i64)>, Box<Text>),
    Hindexed(Vec<(u64, i64)>, Box<Text>),
    Struct(Vec<(u64, i64, Text)>),
    Subarray(Vec<(u64, u64, u64)>, Order, Box<Text>),
    Resized(i64, i64, Box<Text>),
}

/// Every byte in order, and the bounds.
#[derive(Clone, Debug, Default)]
struct Naive {
    bytes: Vec<i64>,
    bounds: Option<(i64, i64)>,
}

impl Naive {
    fn extent(&self) -> i64 {
        self.bounds.map_or(0, |(lower, upper)| upper - lower)
    }

    fn add(&mut self, other: &Naive, at: i64) {
        self.bytes.extend(other.bytes.iter().map(|b| b + at));
        if let Some((lower, upper)) = other.bounds {
            let (a, b) = self.bounds.unwrap_or((i64::MAX, i64::MIN));
            self.bounds = Some((a.min(lower + at), b.max(upper + at)));
        }
    }

    fn of(text: &Text) -> Self {
        let mut all = Self::default();
        match text {
            Text::Bytes(n) => {
                all.bytes = (0..n.cast_signed()).collect();
                all.bounds = (*n > 0).then_some((0, n.cast_signed()));
            }
            Text::Contiguous(count, inner) => {
                let inner = Self::of(inner);
                (0..count.cast_signed()).for_each(|i| all.add(&inner, i * inner.extent()));
            }
            Text::Vector(count, block, stride, inner) => {
                let inner = Self::of(inner);
                for i in 0..count.cast_signed() {
                    (0..block.cast_signed()).for_each(|j| all.add(&inner, (i * stride + j) * inner.extent()));
                }
            }
            Text::Hvector(count, block, stride, inner) => {
                let inner = Self::of(inner);
                for i in 0..count.cast_signed() {
                    (0..block.cast_signed()).for_each(|j| all.add(&inner, i * stride + j * inner.extent()));
                }
            }
            Text::Indexed(blocks, inner) => {
                let inner = Self::of(inner);
                for (block, at) in blocks {
                    (0..block.cast_signed()).for_each(|j| all.add(&inner, (at + j) * inner.extent()));
                }
            }
            Text::Hindexed(blocks, inner) => {
                let inner = Self::of(inner);
                for (block, at) in blocks {
                    (0..block.cast_signed()).for_each(|j| all.add(&inner, at + j * inner.extent()));
                }
            }
            Text::Struct(fields) => {
                for (count, at, inner) in fields {
                    let inner = Self::of(inner);
                    (0..count.cast_signed()).for_each(|j| all.add(&inner, at + j * inner.extent()));
                }
            }
            Text::Subarray(dimensions, order, inner) => {
                let inner = Self::of(inner);
                let mut offsets = vec![0i64];
                let mut dimensions = dimensions.clone();
                if *order == Order::Fortran {
                    dimensions.reverse();
                }
                // The densest dimension comes last.
                for (size, subsize, start) in &dimensions {
                    let next = |offset: &i64| {
                        let first = offset * size.cast_signed() + start.cast_signed();
                        (0..subsize.cast_signed()).map(move |i| first + i).collect::<Vec<_>>()
                    };
                    offsets = offsets.iter().flat_map(next).collect();
                }
                offsets.iter().for_each(|offset| all.add(&inner, offset * inner.extent()));
                let whole = dimensions.iter().map(|(size, _, _)| size.cast_signed()).product::<i64>()
                    * inner.extent();
                let lower = inner.bounds.unwrap_or((0, 0)).0;
                all.bounds = Some((lower, lower + whole));
            }
            Text::Resized(lower, extent, inner) => {
                all = Self::of(inner);
                all.bounds = Some((*lower, lower + extent));
            }
        }
        all
    }
}

fn build(text: &Text) -> Result<Layout, LayoutError> {
    match text {
        Text::Bytes(n) => Layout::bytes(*n),
        Text::Contiguous(count, inner) => build(inner)?.contiguous(*count),
        Text::Vector(count, block, stride, inner) => build(inner)?.vector(*count, *block, *stride),
        Text::Hvector(count, block, stride, inner) => build(inner)?.hvector(*count, *block, *stride),
        Text::Indexed(blocks, inner) => build(inner)?.indexed(blocks),
        Text::Hindexed(blocks, inner) => build(inner)?.hindexed(blocks),
        Text::Struct(fields) => {
            let fields = fields
                .iter()
                .map(|(count, at, inner)| Ok((*count, *at, build(inner)?)))
                .collect::<Result<Vec<_>, _>>()?;
            Layout::structure(&fields)
        }
        Text::Subarray(dimensions, order, inner) => {
            let of = |pick: fn(&(u64, u64, u64)) -> u64| dimensions.iter().map(pick).collect::<Vec<_>>();
            build(inner)?.subarray(&of(|d| d.0), &of(|d| d.1), &of(|d| d.2), *order)
        }
        Text::Resized(lower, extent, inner) => build(inner)?.resized(*lower, *extent),
    }
}

fn any_text() -> impl Strategy<Value = Text> {
    let blocks = || prop::collection::vec((0..4u64, -20..40i64), 0..5);
    (0..9u64).prop_map(Text::Bytes).prop_recursive(4, 24, 3, move |inner| {
        let boxed = inner.clone().prop_map(Box::new);
        let dimension = (1..5u64)
            .prop_flat_map(|size| (Just(size), 0..=size))
            .prop_flat_map(|(size, sub)| (Just(size), Just(sub), 0..=size - sub));
        let order = prop_oneof![Just(Order::C), Just(Order::Fortran)];
        prop_oneof![
            (0..5u64, boxed.clone()).prop_map(|(n, t)| Text::Contiguous(n, t)),
            (0..5u64, 0..4u64, -6..9i64, boxed.clone()).prop_map(|(n, b, s, t)| Text::Vector(n, b, s, t)),
            (0..5u64, 0..4u64, -60..90i64, boxed.clone()).prop_map(|(n, b, s, t)| Text::Hvector(n, b, s, t)),
            (blocks(), boxed.clone()).prop_map(|(b, t)| Text::Indexed(b, t)),
            (blocks(), boxed.clone()).prop_map(|(b, t)| Text::Hindexed(b, t)),
            prop::collection::vec((0..3u64, -50..90i64, inner), 0..4).prop_map(Text::Struct),
            (prop::collection::vec(dimension, 1..4), order, boxed.clone())
                .prop_map(|(d, o, t)| Text::Subarray(d, o, t)),
            (-20..20i64, 0..60i64, boxed).prop_map(|(l, e, t)| Text::Resized(l, e, t)),
        ]
    })
}

fn bytes_of(runs: impl Iterator<Item = Run>) -> Vec<i64> {
    runs.flat_map(|run| run.offset..run.end()).collect()
}

fn coded(program: &Program) -> Vec<u8> {
    let mut out = Vec::new();
    program.encode(&mut out);
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_layout_selects_the_bytes_that_mpi_says_in_that_order(text in any_text()) {
        let (layout, naive) = (build(&text).unwrap(), Naive::of(&text));
        prop_assert_eq!(layout.size(), naive.bytes.len() as u64);
        prop_assert_eq!(&bytes_of(layout.program().runs()), &naive.bytes);
        prop_assert_eq!(layout.bounds(), naive.bounds.unwrap_or((0, 0)));
        if !naive.bytes.is_empty() {
            let (low, high) = layout.program().bounds();
            prop_assert_eq!(Some(&low), naive.bytes.iter().min());
            prop_assert_eq!(Some(high - 1), naive.bytes.iter().max().copied());
        }
        // Neighbours are joined, and the count of runs is an upper bound.
        let runs: Vec<Run> = layout.program().runs().collect();
        prop_assert!(runs.windows(2).all(|pair| pair[0].end() != pair[1].offset));
        prop_assert!(runs.len() as u64 <= layout.program().run_count());
        if let Some(longest) = layout.program().longest_run() {
            prop_assert_eq!(longest, runs.iter().map(|run| run.len).max().unwrap_or(0));
        }
        prop_assert!(
            layout.size() == 0
                || layout.program().shortest_run() <= runs.iter().map(|run| run.len).min().unwrap()
        );
        prop_assert!(coded(layout.program()).len() <= layout.program().coded_bytes());
        if let Some((each, members)) = layout.program().as_list() {
            let (first, second) =
                (layout.program().members(0..1).unwrap(), layout.program().members(1..members).unwrap());
            prop_assert_eq!(first.bytes(), each);
            prop_assert_eq!([bytes_of(first.runs()), bytes_of(second.runs())].concat(), naive.bytes.clone());
        }
        // Overlap is found exactly.
        let mut sorted = naive.bytes.clone();
        sorted.sort_unstable();
        prop_assert_eq!(layout.program().overlaps(), Ok(sorted.windows(2).any(|pair| pair[0] == pair[1])));
        for align in [1, 2, 4, 8] {
            if layout.program().is_aligned(align) {
                prop_assert!(
                    runs.iter().all(|run| run.offset.unsigned_abs().is_multiple_of(align)
                        && run.len.is_multiple_of(align))
                );
            }
        }
    }

    #[test]
    fn a_program_comes_off_the_wire_as_it_was(text in any_text(), by in -1000..1000i64) {
        let program = build(&text).unwrap().program().clone().shifted(by).unwrap();
        let bytes = coded(&program);
        prop_assert_eq!(Program::decode(&bytes), Ok(program));
        prop_assert!(Program::decode(&bytes[..bytes.len() - 1]).is_err());
        prop_assert!(Program::decode(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn a_window_is_that_part_of_all_bytes(text in any_text(), from in 0..200u64, len in 0..100u64) {
        let program = build(&text).unwrap().program().clone();
        let all = bytes_of(program.runs());
        let cut = |n: u64| usize::try_from(n).unwrap().min(all.len());
        prop_assert_eq!(bytes_of(program.window(from, len)), &all[cut(from)..cut(from + len)]);
        let of_row = |row: Row<'_>| match row {
            Row::Even { first, stride, count, len } => {
                bytes_of((0..count.cast_signed()).map(|n| Run { offset: first + n * stride, len }))
            }
            Row::Listed { base, offsets, len } => {
                bytes_of(offsets.iter().map(|offset| Run { offset: base + offset, len }))
            }
        };
        prop_assert_eq!(
            program.rows(from, len).flat_map(of_row).collect::<Vec<_>>(),
            &all[cut(from)..cut(from + len)]
        );
    }

    #[test]
    fn collected_runs_come_back_and_their_code_keeps_the_bound(
        steps in prop::collection::vec(
            (
                prop_oneof![-50..200i64, Just(64), Just(5_000_000_000)],
                prop_oneof![Just(8u64), 1..40u64],
                1..60usize,
            ),
            0..40,
        ),
        max_coded in 256..2000usize,
    ) {
        let mut runs = Vec::new();
        let mut at = 1_000_000;
        for (step, len, times) in steps {
            for _ in 0..times {
                runs.push(Run { offset: at, len });
                at += step;
            }
        }
        let mut collector = Collector::new(max_coded);
        let mut came = Vec::new();
        let mut take = |collector: &mut Collector| {
            let bytes = collector.bytes();
            let program = collector.finish().unwrap();
            assert_eq!(program.bytes(), bytes);
            assert!(coded(&program).len() <= max_coded, "{} bytes", coded(&program).len());
            assert_eq!(Program::decode(&coded(&program)), Ok(program.clone()));
            came.extend(bytes_of(program.runs()));
        };
        for run in &runs {
            if !collector.push(*run) {
                take(&mut collector);
                assert!(collector.push(*run), "the first run always fits");
            }
        }
        take(&mut collector);
        prop_assert_eq!(came, bytes_of(runs.into_iter()));
    }

    #[test]
    fn arbitrary_bytes_never_panic_as_a_program(
        bytes in prop::collection::vec(prop_oneof![0..9u8, any::<u8>()], 0..80),
    ) {
        if let Ok(program) = Program::decode(&bytes) {
            let (low, high) = program.bounds();
            let most = 10_000;
            let mut left = most;
            for run in program.window(0, most) {
                assert!(run.len > 0 && run.offset >= low && run.end() <= high);
                left -= run.len;
            }
            assert_eq!(left, most - program.bytes().min(most));
            assert_eq!(Program::decode(&coded(&program)), Ok(program));
        }
    }
}

#[test]
fn what_is_regular_becomes_one_loop() {
    let byte = Layout::bytes(1).unwrap();
    let element = byte.contiguous(8).unwrap();
    for (layout, coded_bytes) in [
        (element.contiguous(1 << 20).unwrap(), 6),
        (element.vector(1 << 20, 1, 8).unwrap(), 9),
        // One loop: the outer continues the inner.
        (element.vector(1024, 1, 8).unwrap().hvector(1024, 1, 1024 * 64).unwrap(), 9),
        (element.indexed(&[(1, 3), (1, 6), (1, 9)]).unwrap(), 7),
        (element.hindexed(&[(1, 0), (2, 8), (1, 24)]).unwrap(), 3),
        // The faces of a four-dimensional lattice are loops of at most one level.
        (element.subarray(&[32; 4], &[32, 32, 32, 1], &[0, 0, 0, 31], Order::C).unwrap(), 10),
        (element.subarray(&[32; 4], &[32, 32, 1, 32], &[0, 0, 31, 0], Order::C).unwrap(), 12),
        (element.subarray(&[32; 4], &[1, 32, 32, 32], &[31, 0, 0, 0], Order::C).unwrap(), 8),
    ] {
        assert!(coded(layout.program()).len() <= coded_bytes, "{:?}", layout.program());
    }
}

#[test]
fn bad_layouts_are_named_for_what_they_are() {
    use LayoutError::*;
    let byte = Layout::bytes(1).unwrap();
    let word = Layout::bytes(8).unwrap();
    assert_eq!(Layout::bytes(u64::MAX), Err(TooFar));
    assert_eq!(Layout::bytes(MAX_LAYOUT_BYTES + 1), Err(TooLarge));
    assert_eq!(word.contiguous(u64::MAX), Err(TooLarge));
    assert_eq!(word.contiguous(1 << 51), Err(TooLarge));
    assert_eq!(byte.vector(2 << 30, 1, 2), Err(TooManyRuns(2 << 30)));
    assert_eq!(byte.vector(1 << 20, 1, 2).unwrap().hvector(1 << 20, 1, 1 << 22), Err(TooManyRuns(1 << 40)));
    assert_eq!(word.vector(3, 1, i64::MAX), Err(TooFar));
    assert_eq!(word.hvector(3, 1, i64::MAX / 2), Err(TooFar));
    assert_eq!(word.hvector(3, 1, i64::MIN), Err(TooFar));
    assert_eq!(word.indexed(&[(1, i64::MAX / 2)]), Err(TooFar));
    assert_eq!(word.hindexed(&[(1, i64::MAX), (2, 0)]), Err(TooFar));
    assert_eq!(word.hindexed(&[(1, i64::MIN), (1, i64::MAX)]), Err(TooFar));
    assert_eq!(word.resized(0, -1), Err(Extent));
    assert_eq!(word.resized(i64::MAX, 1), Err(TooFar));
    assert_eq!(
        word.subarray(&[4, 4], &[2, 3], &[0, 2], Order::C),
        Err(Subarray { dimension: 1, size: 4, subsize: 3, start: 2 })
    );
    assert_eq!(
        word.subarray(&[4], &[2], &[u64::MAX], Order::C),
        Err(Subarray { dimension: 0, size: 4, subsize: 2, start: u64::MAX })
    );
    assert_eq!(word.subarray(&[], &[], &[], Order::C), Err(Dimensions));
    assert_eq!(word.subarray(&[4], &[2, 2], &[0], Order::C), Err(Dimensions));
    assert_eq!(word.subarray(&[1 << 40, 1 << 40], &[1, 1], &[0, 0], Order::C), Err(TooFar));
    let mut deep = byte.vector(2, 1, 3).unwrap();
    let too_deep = (0..40).find_map(|n| match deep.hvector(2, 1, 7 * 3i64.pow(n)) {
        Ok(deeper) => {
            deep = deeper;
            None
        }
        Err(error) => Some(error),
    });
    assert_eq!(too_deep, Some(TooDeep));
    // Where it is used.
    assert_eq!(word.placed(8, 16).map(|p| p.bounds()), Ok((8, 16)));
    assert_eq!(word.placed(9, 16), Err(OutOfBounds { low: 9, high: 17, bytes: 16 }));
    assert_eq!(word.placed(u64::MAX, 16), Err(TooFar));
    let backwards = word.vector(3, 1, -1).unwrap();
    assert_eq!(backwards.placed(8, 100), Err(OutOfBounds { low: -8, high: 16, bytes: 100 }));
    assert_eq!(bytes_of(backwards.placed(16, 24).unwrap().runs()).first(), Some(&16));
}

#[test]
fn hostile_programs_are_refused_and_cost_nothing() {
    let decode = |bytes: &[u8]| Program::decode(bytes).unwrap_err();
    assert_eq!(decode(&[]), ProgramError::Length);
    assert_eq!(decode(&[9]), ProgramError::Kind(9));
    assert_eq!(decode(&[0, 0]), ProgramError::Kind(0));
    assert_eq!(decode(&[1, 0, 0]), ProgramError::Empty);
    assert_eq!(decode(&[2, 0, 0, 1, 0, 1]), ProgramError::Empty);
    assert_eq!(decode(&[3, 1, 3, 0, 0, 0, 0, 0, 1, 0, 1]), ProgramError::Width(3));
    assert_eq!(
        decode(&[1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x7f, 1]),
        ProgramError::Number
    );
    // A list that announces more than is there.
    assert_eq!(decode(&[3, 0xff, 0xff, 0xff, 0xff, 0x7f, 8, 0, 1, 2, 3]), ProgramError::Length);
    assert_eq!(decode(&[4, 0xff, 0xff, 0xff, 0xff, 0x7f, 1, 0, 1]), ProgramError::Length);
    assert_eq!(decode(&[2, 2, 0].repeat(5000)), ProgramError::Layout(LayoutError::TooDeep));
    // A loop of billions of loops of billions.
    let billions = [0x80, 0x80, 0x80, 0x80, 0x10];
    let bytes = [&[2][..], &billions, &[0, 1, 0, 1]].concat();
    assert_eq!(decode(&bytes), ProgramError::Layout(LayoutError::TooManyRuns(1 << 32)));
}
