//! Totals of a column for each key: the elements of another column, in the same order, say to which group
//! each element belongs.
//!
//! Groups lie in a tree, so that no choice of keys makes one expensive to find.

use super::{Element, Kind, Reduced, Sum, Test, of_kind, passes};
use std::collections::BTreeMap;

/// Elements that one request looks at at most, and so the groups that it finds.
pub const MAX_GROUPED: u32 = 16 * 1024;
/// Bytes of a group on its way: key 8, count 8, sum 16, least 8, greatest 8.
pub const GROUP_BYTES: usize = 48;

/// A key, and what the elements that have it and count come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Group {
    /// Its bits; of 4 bytes, extended to 8 by its sign.
    pub key: u64,
    /// At least 1.
    pub count: u64,
    /// The number, in 128 bits, or the bits of an `f64`.
    pub sum: [u8; 16],
    /// The bits of the least and the greatest; not a number, where no other is there.
    pub least: [u8; 8],
    pub greatest: [u8; 8],
}

#[derive(Clone, Copy)]
struct Tally {
    count: u64,
    sum: Sum,
    least: [u8; 8],
    greatest: [u8; 8],
}

/// The groups that are found so far, in the order of their keys.
#[derive(Clone)]
pub struct Groups {
    /// Of integers.
    keys: Kind,
    kind: Kind,
    test: Test,
    low: [u8; 8],
    high: [u8; 8],
    groups: BTreeMap<u64, Tally>,
}

impl Groups {
    /// `low` and `high`: the operands of the test on the elements, in the first bytes.
    ///
    /// # Panics
    /// If the keys are floating-point numbers.
    #[must_use]
    pub fn new(keys: Kind, kind: Kind, test: Test, low: [u8; 8], high: [u8; 8]) -> Self {
        assert!(!keys.is_float(), "keys are integers");
        Self { keys, kind, test, low, high, groups: BTreeMap::new() }
    }

    /// The next elements, and the key of each.
    ///
    /// # Panics
    /// If there are not as many of the one as of the other.
    pub fn feed(&mut self, keys: &[u8], elements: &[u8]) {
        let count = keys.len() / self.keys.bytes();
        assert!(
            keys.len() == count * self.keys.bytes() && elements.len() == count * self.kind.bytes(),
            "a key for each element"
        );
        of_kind!(self.kind, T, self.feed_of::<T>(keys, elements));
    }

    fn feed_of<T: Element>(&mut self, keys: &[u8], elements: &[u8]) {
        let (low, high) = (T::read(&self.low), T::read(&self.high));
        for (key, element) in keys.chunks_exact(self.keys.bytes()).zip(elements.chunks_exact(T::BYTES)) {
            let value = T::read(element);
            if passes(self.test, value, low, high) {
                let mut one = Tally::new(element);
                value.add_to(&mut one.sum);
                add::<T>(&mut self.groups, place(self.keys, extended(self.keys, key)), one);
            }
        }
    }

    /// Joins what a request found to these. False, and nothing joined, if that is no answer: groups in the
    /// order of their keys, whose counts come to `reduced`'s.
    #[must_use]
    pub fn join(&mut self, reduced: Reduced, found: &[u8]) -> bool {
        let (groups, rest) = found.as_chunks::<GROUP_BYTES>();
        let groups: Vec<Group> = groups.iter().map(Group::decode).collect();
        let places = || groups.iter().map(|group| place(self.keys, group.key));
        let counts = groups.iter().try_fold(0u64, |sum, group| sum.checked_add(group.count));
        let keys = groups.iter().all(|group| {
            group.count > 0 && extended(self.keys, &group.key.to_le_bytes()[..self.keys.bytes()]) == group.key
        });
        if !rest.is_empty() || !keys || counts != Some(reduced.count) || !places().is_sorted_by(|a, b| a < b)
        {
            return false;
        }
        for group in &groups {
            let (whole, float) = (i128::from_le_bytes(group.sum), f64::read(&group.sum));
            let sum = Sum { whole, float };
            let tally = Tally { count: group.count, sum, least: group.least, greatest: group.greatest };
            of_kind!(self.kind, T, add::<T>(&mut self.groups, place(self.keys, group.key), tally));
        }
        true
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// In the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = Group> {
        self.groups.iter().map(|(at, tally)| {
            let mut sum = tally.sum.whole.to_le_bytes();
            if self.kind.is_float() {
                sum = [0; 16];
                tally.sum.float.write(&mut sum);
            }
            let Tally { count, least, greatest, .. } = *tally;
            Group { key: place(self.keys, *at), count, sum, least, greatest }
        })
    }
}

impl Group {
    /// Appends it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&self.count.to_le_bytes());
        out.extend_from_slice(&self.sum);
        out.extend_from_slice(&self.least);
        out.extend_from_slice(&self.greatest);
    }

    fn decode(bytes: &[u8; GROUP_BYTES]) -> Self {
        let word = |at: usize| bytes[at..at + 8].try_into().expect("eight bytes");
        Self {
            key: u64::from_le_bytes(word(0)),
            count: u64::from_le_bytes(word(8)),
            sum: bytes[16..32].try_into().expect("sixteen bytes"),
            least: word(32),
            greatest: word(40),
        }
    }
}

impl Tally {
    fn new(element: &[u8]) -> Self {
        let mut bits = [0; 8];
        bits[..element.len()].copy_from_slice(element);
        Self { count: 1, sum: Sum::default(), least: bits, greatest: bits }
    }
}

fn add<T: Element>(groups: &mut BTreeMap<u64, Tally>, at: u64, more: Tally) {
    let Some(tally) = groups.get_mut(&at) else {
        groups.insert(at, more);
        return;
    };
    tally.count += more.count;
    tally.sum.whole = tally.sum.whole.wrapping_add(more.sum.whole);
    tally.sum.float += more.sum.float;
    let (least, greatest) = (T::read(&more.least), T::read(&more.greatest));
    if T::read(&tally.least).is_none() || least < T::read(&tally.least) {
        tally.least = more.least;
    }
    if T::read(&tally.greatest).is_none() || greatest > T::read(&tally.greatest) {
        tally.greatest = more.greatest;
    }
}

/// A key's bits, extended to 8 bytes.
fn extended(kind: Kind, key: &[u8]) -> u64 {
    match kind {
        Kind::I32 => i64::from(i32::read(key)).cast_unsigned(),
        Kind::U32 => u32::read(key).into(),
        _ => u64::read(key),
    }
}

/// Where a key comes among all, and back.
fn place(kind: Kind, key: u64) -> u64 {
    if matches!(kind, Kind::I32 | Kind::I64) { key ^ 1 << 63 } else { key }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes<T: Element>(values: impl IntoIterator<Item = T>) -> Vec<u8> {
        let mut out = Vec::new();
        for value in values {
            let mut bits = [0; 8];
            value.write(&mut bits);
            out.extend_from_slice(&bits[..T::BYTES]);
        }
        out
    }

    proptest! {
        #[test]
        fn groups_in_parts_are_those_of_all(
            rows in prop::collection::vec((-4..4i32, -50..50i64), 0..60),
            cut in 0..60usize,
            low in -60..60i64,
        ) {
            let new = || Groups::new(Kind::I32, Kind::I64, Test::Greater, low.to_le_bytes(), [0; 8]);
            let feed = |groups: &mut Groups, rows: &[(i32, i64)]| {
                groups.feed(&bytes(rows.iter().map(|row| row.0)), &bytes(rows.iter().map(|row| row.1)));
            };
            let (first, second) = rows.split_at(cut.min(rows.len()));
            let mut whole = new();
            feed(&mut whole, first);
            feed(&mut whole, second);
            let mut joined = new();
            for part in [first, second] {
                let (mut found, mut coded) = (new(), Vec::new());
                feed(&mut found, part);
                found.iter().for_each(|group| group.encode(&mut coded));
                let count = part.iter().filter(|row| row.1 > low).count() as u64;
                let reduced = |count| Reduced { count, value: [0; 16] };
                prop_assert!(!joined.join(reduced(count + 1), &coded), "another count");
                prop_assert!(joined.join(reduced(count), &coded));
            }
            let mut model: BTreeMap<i32, Vec<i64>> = BTreeMap::new();
            for row in rows.iter().filter(|row| row.1 > low) {
                model.entry(row.0).or_default().push(row.1);
            }
            let model: Vec<Group> = model.iter().map(|(key, values)| Group {
                key: i64::from(*key).cast_unsigned(),
                count: values.len() as u64,
                sum: values.iter().map(|value| i128::from(*value)).sum::<i128>().to_le_bytes(),
                least: values.iter().min().unwrap().to_le_bytes(),
                greatest: values.iter().max().unwrap().to_le_bytes(),
            }).collect();
            prop_assert!(whole.iter().eq(model.iter().copied()));
            prop_assert!(joined.iter().eq(model));
        }

        #[test]
        fn any_answer_is_joined_whole_or_not_at_all(
            found in prop::collection::vec(prop_oneof![Just(0u8), 0..3u8, any::<u8>()], 0..200),
            count in 0..4u64,
        ) {
            let mut groups = Groups::new(Kind::I32, Kind::F32, Test::All, [0; 8], [0; 8]);
            let joined = groups.join(Reduced { count, value: [0; 16] }, &found);
            let mut again = Vec::new();
            groups.iter().for_each(|group| group.encode(&mut again));
            prop_assert_eq!(groups.len() * GROUP_BYTES, if joined { found.len() } else { 0 });
            let all: u64 = groups.iter().map(|group| group.count).sum();
            prop_assert_eq!(all, if joined { count } else { 0 });
        }
    }

    #[test]
    fn what_is_no_number_counts_and_is_no_extreme() {
        let mut groups = Groups::new(Kind::U64, Kind::F64, Test::All, [0; 8], [0; 8]);
        groups.feed(&bytes([u64::MAX, 7, 7, 7, u64::MAX]), &bytes([f64::NAN, f64::NAN, 2.0, 1.5, f64::NAN]));
        let found: Vec<Group> = groups.iter().collect();
        let ends = |group: &Group| (f64::read(&group.least), f64::read(&group.greatest));
        assert_eq!((found[0].key, found[0].count, ends(&found[0])), (7, 3, (1.5, 2.0)));
        assert_eq!((found[1].key, found[1].count), (u64::MAX, 2));
        assert!(ends(&found[1]).0.is_nan() && f64::read(&found[0].sum).is_nan());
    }
}
