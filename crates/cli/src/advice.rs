//! What more local memory would do for a program that waits for its pages, in words.

use rampool_client::stats::StatsSnapshot;
use rampool_wire::units::ByteLen;

/// A run that waits for less than this share of its time (in hundredths) needs no advice.
const WORTH_A_WORD: u64 = 5;
/// The largest local memory that is thought of, as a multiple of the present one.
const MOST: u64 = 64;

/// Waiting with another local memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    pub local: ByteLen,
    pub waited_ns: u64,
}

/// What `counters`, of processes with `local` each that ran for `time_ns`, say of more: the memory that saves
/// half of what can be saved, and the one that saves nine tenths; only the latter where they are much the
/// same. `None` if the waiting is not worth a word, and nothing where more memory would not help.
pub fn choices(counters: &StatsSnapshot, local: ByteLen, time_ns: u64) -> Option<Vec<Choice>> {
    let waited = counters.waited_ns;
    if waited.saturating_mul(100) < time_ns.saturating_mul(WORTH_A_WORD) || waited == 0 {
        return None;
    }
    let forecast = counters.forecast();
    let avoidable = waited.saturating_sub(forecast.least());
    if avoidable < waited / 10 {
        return Some(Vec::new());
    }
    let choice = |tenths: u64| {
        let pages = forecast.pages_for(waited - avoidable / 10 * tenths)?;
        let local = round(ByteLen(local.0.saturating_add(ByteLen::from_pages(pages).0)));
        Some((pages, local))
    };
    let mut choices: Vec<Choice> = Vec::new();
    for tenths in [9, 5] {
        let Some((_, larger)) = choice(tenths) else { continue };
        if larger.0 > local.0.saturating_mul(MOST)
            || choices.first().is_some_and(|enough| larger.0 / 4 * 5 > enough.local.0)
        {
            continue;
        }
        let more = ByteLen(larger.0 - local.0).pages();
        choices.insert(0, Choice { local: larger, waited_ns: forecast.with(more) });
    }
    Some(choices)
}

/// Up to a number that one would type: an eighth more at most.
fn round(bytes: ByteLen) -> ByteLen {
    let step = (1u64 << (bytes.0.max(1).ilog2().saturating_sub(3))).max(ByteLen::MIB);
    ByteLen(bytes.0.div_ceil(step).saturating_mul(step))
}

/// As an argument of `--local`.
pub fn argument(local: ByteLen) -> String {
    for (unit, name) in [(ByteLen::GIB, "G"), (ByteLen::MIB, "M"), (ByteLen::KIB, "K")] {
        if local.0 >= unit && local.0.is_multiple_of(unit) {
            return format!("{}{name}", local.0 / unit);
        }
    }
    local.0.to_string()
}

#[cfg(test)]
mod tests {
    use rampool_client::stats::bucket_of;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn counters(waited_s: u64, avoidable: &[(u64, u64)]) -> StatsSnapshot {
        let mut counters = StatsSnapshot { waited_ns: waited_s * SECOND, ..StatsSnapshot::default() };
        for (mib, seconds) in avoidable {
            counters.avoidable_ns[bucket_of(mib << 8)] += seconds * SECOND;
        }
        counters
    }

    fn asked(counters: &StatsSnapshot) -> Option<Vec<(String, u64)>> {
        let choices = choices(counters, ByteLen(128 << 20), 20 * SECOND)?;
        Some(choices.iter().map(|c| (argument(c.local), c.waited_ns / SECOND)).collect())
    }

    #[test]
    fn what_helps_is_named_and_what_does_not_is_not_promised() {
        assert_eq!(asked(&counters(0, &[])), None);
        assert_eq!(asked(&counters(10, &[])), Some(vec![]), "first touches only");
        // A scan: the more the better, until it fits.
        let scan = asked(&counters(10, &[(120, 10)])).unwrap();
        assert_eq!(scan, [("192M".to_owned(), 5), ("256M".to_owned(), 0)]);
        // A little would do.
        assert_eq!(asked(&counters(10, &[(10, 10)])).unwrap(), [("144M".to_owned(), 0)]);
        // Half of it at once, the rest with all there is.
        let two = asked(&counters(12, &[(30, 6), (900, 4)])).unwrap();
        assert_eq!(two, [("160M".to_owned(), 6), ("960M".to_owned(), 2)]);
        // More than anyone has.
        assert_eq!(asked(&counters(10, &[(1 << 20, 10)])), Some(vec![]));
    }

    #[test]
    fn arguments_are_what_one_types() {
        let gib = ByteLen::GIB;
        for (bytes, text) in [(3 * gib, "3G"), (3 * gib + gib / 2, "3584M"), (192 << 20, "192M"), (77, "77")]
        {
            assert_eq!(argument(ByteLen(bytes)), text);
            assert_eq!(text.parse::<ByteLen>(), Ok(ByteLen(bytes)));
        }
        for bytes in [1, 5 << 20, 129 << 20, 255 << 20, (3 << 30) + 1] {
            let rounded = round(ByteLen(bytes)).0;
            assert!(rounded >= bytes && (rounded <= bytes + bytes / 8 + (1 << 20)), "{bytes}: {rounded}");
        }
    }
}
