//! Numbers with units. A page is named by its index in a region; addresses exist only in the runtime.

use std::fmt;
use std::str::FromStr;

/// Milliseconds on a machine's clock, from an arbitrary start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Tick(pub u64);

impl Tick {
    /// `ms` later.
    #[must_use]
    pub fn after(self, ms: u32) -> Self {
        Self(self.0.saturating_add(ms.into()))
    }
}

/// Bytes in an operating-system page, the smallest page rampool tracks.
pub const OS_PAGE_BYTES: usize = 4096;

/// The index of a page in its index space (a region, or one process's whole paged view).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The page `pages` further on.
    #[must_use]
    pub fn offset(self, pages: u64) -> Self {
        Self(self.0 + pages)
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

/// A run of consecutive pages: `first, first + 1, .. first + count - 1`. Never empty in a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Extent {
    pub first: PageIndex,
    pub count: u32,
}

impl Extent {
    #[must_use]
    pub fn new(first: PageIndex, count: u32) -> Self {
        Self { first, count }
    }

    /// One page.
    #[must_use]
    pub fn page(page: PageIndex) -> Self {
        Self { first: page, count: 1 }
    }

    /// The page after the last.
    #[must_use]
    pub fn end(&self) -> PageIndex {
        PageIndex(self.first.0 + u64::from(self.count))
    }

    #[must_use]
    pub fn contains(&self, page: PageIndex) -> bool {
        page >= self.first && page < self.end()
    }

    /// Every page of the extent, in order.
    pub fn pages(&self) -> impl Iterator<Item = PageIndex> + use<> {
        (self.first.0..self.end().0).map(PageIndex)
    }
}

/// Pages in a list of extents.
#[must_use]
pub fn total_pages(extents: &[Extent]) -> u64 {
    extents.iter().map(|e| u64::from(e.count)).sum()
}

/// Appends `page` to a list of extents, growing the last one where it continues it.
pub fn push_page(extents: &mut Vec<Extent>, page: PageIndex) {
    match extents.last_mut() {
        Some(last) if last.end() == page && last.count < u32::MAX => last.count += 1,
        _ => extents.push(Extent::page(page)),
    }
}

/// A number of bytes. Users write it as `4096`, `512M`, `1.5G` or `4GiB`: powers of 1024, upper or lower
/// case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ByteLen(pub u64);

impl ByteLen {
    pub const KIB: u64 = 1 << 10;
    pub const MIB: u64 = 1 << 20;
    pub const GIB: u64 = 1 << 30;
    pub const TIB: u64 = 1 << 40;

    #[must_use]
    pub fn from_pages(pages: u64) -> Self {
        Self(pages.saturating_mul(OS_PAGE_BYTES as u64))
    }

    /// OS pages that hold this many bytes, the last one perhaps in part.
    #[must_use]
    pub fn pages(self) -> u64 {
        self.0.div_ceil(OS_PAGE_BYTES as u64)
    }
}

/// Why a text is not a number of bytes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ByteLenError {
    #[error("{0:?} is not an amount of memory; write a number and a unit, such as 512M, 4G or 1.5T")]
    NotANumber(String),
    #[error("{0:?} is more memory than any machine can address")]
    TooLarge(String),
}

impl FromStr for ByteLen {
    type Err = ByteLenError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || ByteLenError::NotANumber(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let unit: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => Self::KIB,
            "m" | "mb" | "mib" => Self::MIB,
            "g" | "gb" | "gib" => Self::GIB,
            "t" | "tb" | "tib" => Self::TIB,
            _ => return Err(bad()),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || fraction.len() > 9 {
            return Err(bad());
        }
        let too_large = || ByteLenError::TooLarge(text.to_owned());
        let parse = |digits: &str| {
            if digits.is_empty() { Ok(0) } else { digits.parse::<u64>().map_err(|_| too_large()) }
        };
        let whole = parse(whole)?.checked_mul(unit).ok_or_else(too_large)?;
        let scale = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| bad())?);
        let part = u128::from(parse(fraction)?) * u128::from(unit) / scale;
        let part = u64::try_from(part).map_err(|_| too_large())?;
        whole.checked_add(part).map(Self).ok_or_else(too_large)
    }
}

impl fmt::Display for ByteLen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, name) in [(Self::TIB, "TiB"), (Self::GIB, "GiB"), (Self::MIB, "MiB"), (Self::KIB, "KiB")] {
            if self.0 >= unit {
                if self.0.is_multiple_of(unit) {
                    return write!(f, "{} {name}", self.0 / unit);
                }
                let (whole, rest) = (self.0 / unit, self.0 % unit);
                let tenths = u128::from(rest) * 10 / u128::from(unit);
                return write!(f, "{whole}.{tenths} {name}");
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("0", 0),
            ("512M", 512 << 20),
            ("512 MiB", 512 << 20),
            ("4g", 4 << 30),
            ("1.5G", 3 << 29),
            (".5k", 512),
            ("2TB", 2 << 40),
        ] {
            assert_eq!(text.parse::<ByteLen>(), Ok(ByteLen(bytes)), "{text}");
        }
        for text in ["", "G", "four", "4X", "-1", "1.2.3G", "4 G B", "."] {
            assert!(matches!(text.parse::<ByteLen>(), Err(ByteLenError::NotANumber(_))), "{text}");
        }
        for text in ["99999999999999999999", "18446744073709551615K"] {
            assert!(matches!(text.parse::<ByteLen>(), Err(ByteLenError::TooLarge(_))), "{text}");
        }
    }

    #[test]
    fn amounts_are_shown_with_a_unit() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (4 << 30, "4 GiB"),
            (3 << 29, "1.5 GiB"),
            (1023, "1023 bytes"),
            (2047, "1.9 KiB"),
        ] {
            assert_eq!(ByteLen(bytes).to_string(), text);
        }
    }
}
