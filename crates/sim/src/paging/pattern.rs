//! Where a program looks next.

use crate::rng::Rng;

/// One way of walking over pages `0 .. pages`.
#[derive(Clone, Debug)]
pub enum Pattern {
    /// Up or down by `stride`, from the start again at the end.
    Cyclic {
        at: u64,
        stride: i64,
    },
    Random,
    /// Rank r is drawn in proportion to `1 / (r + 1)^skew`; ranks are scattered over the pages.
    Zipf {
        skew: f64,
    },
    /// Random within a window that jumps every so often.
    Phases {
        start: u64,
        width: u64,
        left: u64,
    },
    /// `threads` sequential walks in turn, as array expressions do.
    Interleaved {
        at: Vec<u64>,
        turn: usize,
    },
    /// What a program did.
    Recorded {
        pages: Vec<u64>,
        at: usize,
    },
}

impl Pattern {
    /// Any of them.
    pub fn any(rng: &mut Rng, pages: u64) -> Self {
        match rng.below(6) {
            0 => Self::Cyclic { at: rng.below(pages), stride: 1 },
            1 => Self::Cyclic { at: rng.below(pages), stride: [-1, 2, 3, 8, -4][rng.index(5)] },
            2 => Self::Random,
            3 => Self::Zipf { skew: 0.6 + rng.unit() },
            4 => Self::Phases { start: rng.below(pages), width: pages / 4 + 1, left: 50 },
            _ => {
                let ways = rng.between(2, 4);
                Self::Interleaved { at: (0..ways).map(|w| w * pages / ways).collect(), turn: 0 }
            }
        }
    }

    pub fn next(&mut self, rng: &mut Rng, pages: u64) -> u64 {
        match self {
            Self::Cyclic { at, stride } => {
                let page = *at % pages;
                *at = if *stride < 0 {
                    let back = stride.unsigned_abs() % pages;
                    (page + pages - back) % pages
                } else {
                    let next = page + stride.unsigned_abs();
                    // The next round of a strided walk starts one further, so that every page has its turn.
                    if next >= pages { (next + u64::from(*stride > 1)) % pages } else { next }
                };
                page
            }
            Self::Random => rng.below(pages),
            Self::Zipf { skew } => scatter(zipf(rng, pages, *skew), pages),
            Self::Phases { start, width, left } => {
                if *left == 0 {
                    *start = rng.below(pages);
                    *left = 20 * *width;
                }
                *left -= 1;
                (*start + rng.below((*width).min(pages))) % pages
            }
            Self::Interleaved { at, turn } => {
                *turn = (*turn + 1) % at.len();
                let page = at[*turn] % pages;
                at[*turn] = page + 1;
                page
            }
            Self::Recorded { pages, at } => {
                *at += 1;
                pages[(*at - 1) % pages.len()]
            }
        }
    }
}

/// A rank by the inverse of the continuous distribution: close enough to Zipf's law, without a table.
fn zipf(rng: &mut Rng, pages: u64, skew: f64) -> u64 {
    #[expect(clippy::cast_precision_loss, reason = "pages are far below 2^53")]
    let n = pages as f64;
    let u = rng.unit();
    let x = if (skew - 1.0).abs() < 1e-9 {
        (n + 1.0).powf(u)
    } else {
        let e = 1.0 - skew;
        (u * ((n + 1.0).powf(e) - 1.0) + 1.0).powf(1.0 / e)
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and pages + 1")]
    let rank = x as u64;
    rank.saturating_sub(1).min(pages - 1)
}

/// Spreads neighbouring ranks over the pages, one to one for any number of pages.
fn scatter(rank: u64, pages: u64) -> u64 {
    let mut factor = 2_654_435_761 % pages;
    while gcd(factor, pages) != 1 {
        factor += 1;
    }
    rank * factor % pages
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
