//! Whether a server's machine, or its control group, is short of memory.
//!
//! The kernel says for how much of the time all tasks waited for memory (pressure stall information, "PSI").
//! Whoever swaps or reclaims makes every client wait, so a server in need takes no new leases. It begins at a
//! tenth of the time and ends at a hundredth: in between nothing changes.

/// Hundredths of a percent of ten seconds from which on, and below which, memory is short or not.
const BEGINS: u32 = 1000;
const ENDS: u32 = 100;

/// Follows what the kernel says.
#[derive(Debug, Default)]
pub struct Pressure {
    short: bool,
}

impl Pressure {
    /// The kernel's text, of each place that limits memory: `some avg10=0.12 ...` and `full avg10=0.05 ...`.
    /// Text that is none says nothing. Returns whether memory is short from now on, if that is new.
    pub fn hear<'a>(&mut self, texts: impl IntoIterator<Item = &'a str>) -> Option<bool> {
        let most = texts.into_iter().filter_map(full_avg10).max()?;
        let short = if self.short { most >= ENDS } else { most >= BEGINS };
        (std::mem::replace(&mut self.short, short) != short).then_some(short)
    }

    /// Whether memory is short.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.short
    }
}

fn full_avg10(text: &str) -> Option<u32> {
    let full = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let value = full.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    let (whole, part) = value.split_once('.')?;
    let part = part.get(..2)?.parse::<u32>().ok()?;
    whole.parse::<u32>().ok()?.checked_mul(100)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(avg10: &str) -> String {
        format!(
            "some avg10=99.00 avg60=99.00 avg300=1.00 total=5\n\
             full avg10={avg10} avg60=99.00 avg300=0.00 total=4\n"
        )
    }

    #[test]
    fn it_begins_at_a_tenth_and_ends_at_a_hundredth() {
        let mut pressure = Pressure::default();
        for (avg10, change, short) in [
            ("0.00", None, false),
            ("9.99", None, false),
            ("10.00", Some(true), true),
            ("80.25", None, true),
            ("1.00", None, true),
            ("0.99", Some(false), false),
            ("5.00", None, false),
        ] {
            assert_eq!(pressure.hear([text(avg10).as_str()]), change, "{avg10}");
            assert_eq!(pressure.is_short(), short, "{avg10}");
        }
    }

    #[test]
    fn the_worst_place_counts_and_nonsense_says_nothing() {
        let mut pressure = Pressure::default();
        assert_eq!(pressure.hear(["", "full", "full avg10=x.yz", "full avg10=99", "some avg10=99.00"]), None);
        assert_eq!(pressure.hear([text("0.10").as_str(), text("33.00").as_str(), "?"]), Some(true));
        assert_eq!(pressure.hear([]), None);
        assert!(pressure.is_short(), "what cannot be read changes nothing");
        assert_eq!(pressure.hear(["full avg10=42949673.00 x"]), None);
    }
}
