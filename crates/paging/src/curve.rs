//! How many of the misses more local memory would have saved: the part of the miss-ratio curve above the
//! present size.
//!
//! A cache that sees its misses only cannot know that part of the curve below its size, which depends on the
//! hits. It can know the part above: pages that have left form the lower end of the stack of pages by age, and
//! a page that comes back would have been there still with as much more memory as pages have left after it and
//! have not come back since (Mattson, Gecsei, Slutz, Traiger, IBM Systems Journal '70). Pages are counted in
//! groups by the time when they left, small ones for those that left lately (Saemundsson, Bjornsson,
//! Chockler, Vigfusson, SoCC '14). The time of each is kept by the cache anyway, so nothing has to be
//! sampled, no memory grows, and a page that returns costs a search and a sum over the groups.
//!
//! ```text
//!   left long ago                                              lately
//!   | 4096 pages | 3800 | 2047 | 1100 | 512 | 512 | 512 | 200 |
//!                          ^ one of these comes back: 1100 + 512 + 512 + 512 + 200, and half of 2047
//! ```
//!
//! The result is exact for a cache that evicts what was used least recently, but for the size of a group. It
//! says nothing of content that was given up, and of pages that never left.

/// Groups at most.
const GROUPS: usize = 256;
/// A group may have this part of what left after it, as a divisor; or that part of the detail asked for.
const OF_NEWER: u64 = 32;

/// Buckets of a count of pages: up to [`bucket_end`] of them.
pub const BUCKETS: usize = 104;
/// Buckets from one power of two to the next.
const STEPS: u64 = 4;
/// The first bucket has fewer pages than this.
const FIRST: u64 = 16;

/// The bucket that `pages` more pages fall into; the last one has no end.
#[must_use]
pub fn bucket_of(pages: u64) -> usize {
    if pages < FIRST {
        return 0;
    }
    let octave = u64::from(pages.ilog2());
    let step = (pages >> (octave - 2)) % STEPS;
    let bucket = 1 + (octave - u64::from(FIRST.ilog2())) * STEPS + step;
    usize::try_from(bucket).map_or(BUCKETS - 1, |bucket| bucket.min(BUCKETS - 1))
}

/// So many more pages are enough for every count in this bucket; `None` where no number is.
#[must_use]
pub fn bucket_end(bucket: usize) -> Option<u64> {
    if bucket == 0 {
        return Some(FIRST);
    }
    let (octave, step) = ((bucket as u64 - 1) / STEPS, (bucket as u64 - 1) % STEPS);
    (bucket < BUCKETS - 1).then(|| (FIRST << octave) / STEPS * (STEPS + step + 1))
}

/// What is left of a cost with more pages, from what each number of them would have avoided.
///
/// The result above is that of least recently used, where a program that goes round and round meets a cliff: no
/// page is found until all fit. This cache keeps a part of such a round, in proportion to its size, so
/// the forecast is the convex hull of the curve (as in Talus: Beckmann, Sanchez, HPCA '15). Invariant: the
/// corners go down, less and less steeply.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// So many more pages, and what is left of the cost then.
    corners: Vec<(u64, u64)>,
}

impl Forecast {
    /// `avoidable`: what is avoided by the pages of each bucket; of `cost` in all, the rest stays.
    #[must_use]
    pub fn new(cost: u64, avoidable: &[u64; BUCKETS]) -> Self {
        let mut corners = vec![(0, cost)];
        let mut left = cost;
        for (bucket, avoided) in avoidable.iter().enumerate().filter(|(_, avoided)| **avoided > 0) {
            let Some(pages) = bucket_end(bucket) else { break };
            left = left.saturating_sub(*avoided);
            let flatter = |from: (u64, u64), by: (u64, u64), to: (u64, u64)| {
                let cross = |a: u64, b: u64| u128::from(a) * u128::from(b);
                cross(by.1.abs_diff(to.1), by.0 - from.0) < cross(from.1.abs_diff(by.1), to.0 - by.0)
            };
            while let [.., from, by] = corners[..]
                && !flatter(from, by, (pages, left))
            {
                corners.pop();
            }
            corners.push((pages, left));
        }
        Self { corners }
    }

    /// What is left with so many more pages.
    #[must_use]
    pub fn with(&self, pages: u64) -> u64 {
        let next = self.corners.partition_point(|corner| corner.0 <= pages);
        let (from, left) = self.corners[next - 1];
        let Some((to, then)) = self.corners.get(next).copied() else { return left };
        let down = u128::from(left - then) * u128::from(pages - from) / u128::from(to - from);
        left - u64::try_from(down).expect("a part of it")
    }

    /// What no more memory avoids.
    #[must_use]
    pub fn least(&self) -> u64 {
        self.corners[self.corners.len() - 1].1
    }

    /// The fewest more pages with which no more than `cost` is left, if any.
    #[must_use]
    pub fn pages_for(&self, cost: u64) -> Option<u64> {
        let next = self.corners.partition_point(|corner| corner.1 > cost);
        let (to, then) = self.corners.get(next).copied()?;
        let Some((from, left)) = next.checked_sub(1).map(|before| self.corners[before]) else {
            return Some(0);
        };
        let ahead = (u128::from(to - from) * u128::from(left - cost)).div_ceil(u128::from(left - then));
        Some(from + u64::try_from(ahead).expect("a part of it"))
    }
}

/// The pages that have left and not come back, by the time when they left: a wrapping count of all that left.
///
/// Invariant: the groups' sum is the number of pages that [`left`](Self::left) and did not [`return`
/// ](Self::returned).
#[derive(Clone, Debug)]
pub struct Curve {
    /// When the first page of each group may have left, the oldest group first; the oldest has all before it.
    starts: [u64; GROUPS],
    /// Pages of each group.
    sizes: [u32; GROUPS],
    used: usize,
    /// The group of the latest change: pages that left together mostly return together.
    latest: usize,
    /// The latest time, which does not wrap.
    now: u64,
    /// Groups of so many pages are small enough.
    detail: u64,
}

impl Curve {
    /// `detail`: pages to which the result is exact at best.
    #[must_use]
    pub fn new(detail: u64) -> Self {
        Self { starts: [0; GROUPS], sizes: [0; GROUPS], used: 1, latest: 0, now: 0, detail: detail.max(1) }
    }

    /// Counts from here on in groups of so many pages.
    pub fn set_detail(&mut self, detail: u64) {
        self.detail = detail.max(1);
    }

    /// Pages that have left and not returned.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.sizes[..self.used].iter().map(|size| u64::from(*size)).sum()
    }

    /// A page left at `clock`, in any order within 2^31 of the latest.
    pub fn left(&mut self, clock: u32) {
        let ahead = clock.wrapping_sub(low(self.now));
        if ahead < 1 << 31 {
            self.now += u64::from(ahead);
            let newest = self.used - 1;
            if self.now > self.starts[newest] && u64::from(self.sizes[newest]) >= self.detail {
                if self.used == GROUPS {
                    self.merge();
                }
                self.starts[self.used] = self.now;
                self.sizes[self.used] = 0;
                self.used += 1;
            }
        }
        self.latest = self.group_of(clock);
        self.sizes[self.latest] += 1;
    }

    /// How many pages have left after one that left at `clock`, and have not returned.
    #[must_use]
    pub fn newer(&self, clock: u32) -> u64 {
        let group = self.group_of(clock);
        let newer: u32 = self.sizes[group + 1..self.used].iter().sum();
        u64::from(newer) + u64::from(self.sizes[group]) / 2
    }

    /// A page that left at `clock` is back, or has no content any more.
    pub fn returned(&mut self, clock: u32) {
        let group = self.group_of(clock);
        self.latest = group;
        // A page that left more than 2^32 pages ago is taken for a younger one.
        let held = (0..=group).rev().chain(group + 1..self.used).find(|group| self.sizes[*group] > 0);
        self.sizes[held.expect("a page returns that did not leave")] -= 1;
    }

    fn group_of(&self, clock: u32) -> usize {
        let time = self.now.saturating_sub(u64::from(low(self.now).wrapping_sub(clock)));
        let (from, next) = (self.latest, self.latest + 1);
        if self.starts[from] <= time && (next == self.used || time < self.starts[next]) {
            return from;
        }
        self.starts[1..self.used].partition_point(|start| *start <= time)
    }

    /// Makes room for new groups: neighbours become one where that is small against what left after them.
    fn merge(&mut self) {
        let mut part = OF_NEWER;
        while self.used > GROUPS / 4 * 3 {
            let mut kept = GROUPS;
            let mut newer = 0;
            for group in (0..self.used).rev() {
                let size = self.sizes[group];
                let most = (newer / part).max(self.detail);
                if kept < GROUPS && u64::from(self.sizes[kept]) + u64::from(size) <= most {
                    self.sizes[kept] += size;
                } else {
                    newer += if kept < GROUPS { u64::from(self.sizes[kept]) } else { 0 };
                    kept -= 1;
                    self.sizes[kept] = size;
                }
                self.starts[kept] = self.starts[group];
            }
            self.starts.copy_within(kept.., 0);
            self.sizes.copy_within(kept.., 0);
            self.used = GROUPS - kept;
            self.latest = 0;
            part /= 2;
            if part == 0 {
                // Only where the detail is far too fine for what has left.
                self.detail *= 2;
                part = 1;
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
fn low(time: u64) -> u32 {
    time as u32
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_are_in_order_and_a_fifth_wide_at_most() {
        assert_eq!((bucket_of(0), bucket_of(15), bucket_of(16), bucket_of(19)), (0, 0, 1, 1));
        let mut before = 0;
        for pages in (0..100_000).chain((17..40).map(|bit| (1 << bit) - 1)) {
            let bucket = bucket_of(pages);
            assert!(bucket >= before, "{pages}");
            before = bucket;
            match bucket_end(bucket) {
                Some(end) => assert!(
                    pages < end && (pages < FIRST || end * 4 <= pages * 5),
                    "{pages} of bucket {bucket} up to {end}"
                ),
                None => assert_eq!(bucket, BUCKETS - 1),
            }
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn a_cliff_becomes_a_slope_and_a_slope_stays() {
        let mut avoidable = [0; BUCKETS];
        avoidable[bucket_of(1000)] = 90;
        let end = bucket_end(bucket_of(1000)).unwrap();
        let cliff = Forecast::new(100, &avoidable);
        assert_eq!((cliff.with(0), cliff.with(end / 2), cliff.with(end)), (100, 55, 10));
        assert_eq!((cliff.with(u64::MAX), cliff.least()), (10, 10));
        assert_eq!((cliff.pages_for(100), cliff.pages_for(9)), (Some(0), None));
        avoidable[0] = 5;
        avoidable[BUCKETS - 1] = 7;
        let forecast = Forecast::new(102, &avoidable);
        assert_eq!((forecast.with(16), forecast.with(end), forecast.least()), (97, 7, 7));
        assert_eq!(Forecast::new(0, &[0; BUCKETS]).with(5), 0);
    }

    proptest! {
        #[test]
        fn a_forecast_falls_ever_less_steeply_and_promises_no_less_than_is_known(
            costs in prop::collection::vec((0..BUCKETS, 1u64..1 << 40), 0..40),
            rest in 0u64..1 << 40,
        ) {
            let mut avoidable = [0; BUCKETS];
            for (bucket, cost) in costs {
                avoidable[bucket] += cost;
            }
            let cost = rest + avoidable.iter().sum::<u64>();
            let forecast = Forecast::new(cost, &avoidable);
            prop_assert_eq!(forecast.least(), rest + avoidable[BUCKETS - 1]);
            let mut left = cost;
            for (bucket, avoided) in avoidable[..BUCKETS - 1].iter().enumerate() {
                left -= avoided;
                let pages = bucket_end(bucket).unwrap();
                prop_assert!(forecast.with(pages) <= left);
                let needed = forecast.pages_for(forecast.with(pages)).expect("so many are enough");
                prop_assert!(needed <= pages, "{needed} of {pages}");
            }
            for corners in forecast.corners.windows(3) {
                let steep = |a: (u64, u64), b: (u64, u64)| (a.1 - b.1) as f64 / (b.0 - a.0) as f64;
                prop_assert!(steep(corners[0], corners[1]) > steep(corners[1], corners[2]) * 0.999_999);
            }
        }

        /// Against a plain list of what left.
        #[test]
        fn pages_that_left_after_another_are_counted_to_a_group(
            start in prop_oneof![Just(0u32), any::<u32>(), Just(u32::MAX - 3000)],
            detail in 1u64..40,
            ops in prop::collection::vec((0usize..1000, 1usize..9), 100..1500),
        ) {
            let mut curve = Curve::new(detail);
            let mut clock = start;
            // As it is after a long run.
            for on_the_way in [start / 3, start / 3 * 2, start] {
                curve.left(on_the_way);
                curve.returned(on_the_way);
            }
            let mut list: VecDeque<u32> = VecDeque::new();
            let mut most = 0;
            for (choice, count) in ops {
                if choice % 3 > 0 || list.is_empty() {
                    clock = clock.wrapping_add(u32::try_from(count).unwrap());
                    for _ in 0..count {
                        curve.left(clock);
                        list.push_back(clock);
                    }
                } else {
                    let at = choice * list.len() / 1000;
                    let asked = list[at];
                    let exact = list.iter().filter(|c| c.wrapping_sub(asked).wrapping_sub(1) < 1 << 31).count() as u64;
                    let same = list.iter().filter(|c| **c == asked).count() as u64;
                    let told = curve.newer(asked);
                    // Pages that left together have no order, and groups are merged when there are many.
                    let slack = same + 8 + detail.max(curve.detail) + most / 32;
                    prop_assert!(told.abs_diff(exact) <= slack, "{told} of {exact}, {most} at most");
                    curve.returned(asked);
                    list.remove(at);
                }
                most = most.max(list.len() as u64);
                prop_assert_eq!(curve.pages(), list.len() as u64);
            }
        }
    }
}
