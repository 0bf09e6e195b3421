//! Where pages lie in a server's memory, for a client on the same machine that reads them itself.
//!
//! The frames of the server's store lie in a memory file, the *frames file*, that the client may read. The
//! reply to a `Put`, and to a `Get`, says for each page where it lies ([`Place`]). A later read of such a
//! page wakes no thread of the server: it is a copy out of the file.
//!
//! ```text
//!      0                magic, bytes of a granule, granules     24 bytes
//!   4096                generations                             u32 for each granule
//!   4096 + generations  frames                                  granules, one after the other
//! ```
//! A frame is some granules long, and its generation is that of its first one. The server moves the
//! generation on before the frame's bytes are anything else than what was stored, and when a page that more
//! than one member has lies in another frame from then on. So a reader looks at the generation, copies the
//! bytes, and looks again: they are the page's if both times it was the one of the [`Place`] (a sequence
//! lock; Lameter, Effective synchronization on Linux/NUMA systems, 2005), and if the page's checksum fits.
//!
//! This module never touches memory. It says where to access it.

use crate::frame::WireError;
use crate::units::OS_PAGE_BYTES;

const MAGIC: [u8; 8] = *b"RAMPLACE";
/// Bytes of a file's [`Plan`].
pub const PLAN_BYTES: usize = 24;
/// Bytes of a [`Place`] on the wire.
const PLACE_BYTES: usize = 12;
/// The generations begin here.
const GENERATIONS_AT: u64 = 4096;
/// More granules than any machine has memory for; their offsets fit a file.
const MAX_GRANULES: u64 = u32::MAX as u64;

/// How a frames file is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    granule_bytes: u32,
    granules: u64,
}

/// The bytes are not a valid [`Plan`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the file of a server's frames begins with something else")]
pub struct PlanError;

impl Plan {
    /// # Errors
    /// [`PlanError`] unless a granule is a part of a page, and a place can name each.
    pub fn of(granule_bytes: u32, granules: u64) -> Result<Self, PlanError> {
        let fits = (64..=4096).contains(&granule_bytes) && granule_bytes.is_power_of_two();
        if fits && granules <= MAX_GRANULES { Ok(Self { granule_bytes, granules }) } else { Err(PlanError) }
    }

    #[must_use]
    pub fn encode(self) -> [u8; PLAN_BYTES] {
        let mut out = [0; PLAN_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..16].copy_from_slice(&u64::from(self.granule_bytes).to_le_bytes());
        out[16..].copy_from_slice(&self.granules.to_le_bytes());
        out
    }

    /// # Errors
    /// [`PlanError`].
    pub fn parse(bytes: &[u8; PLAN_BYTES]) -> Result<Self, PlanError> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        if bytes[..8] != MAGIC {
            return Err(PlanError);
        }
        Self::of(u32::try_from(word(8)).map_err(|_| PlanError)?, word(16))
    }

    /// Bytes before the frames: the plan and the generations.
    #[must_use]
    pub fn frames_at(self) -> u64 {
        (GENERATIONS_AT + self.granules * 4).next_multiple_of(OS_PAGE_BYTES as u64)
    }

    /// Bytes of the whole file.
    #[must_use]
    pub fn file_bytes(self) -> u64 {
        self.frames_at() + self.granules * u64::from(self.granule_bytes)
    }

    /// Where the generation of the frame that begins with this granule is.
    #[must_use]
    pub fn generation_at(self, granule: u32) -> u64 {
        GENERATIONS_AT + u64::from(granule) * 4
    }

    /// Where the frame that begins with this granule is.
    #[must_use]
    pub fn frame_at(self, granule: u32) -> u64 {
        self.frames_at() + u64::from(granule) * u64::from(self.granule_bytes)
    }

    /// Whether a place lies within the file.
    #[must_use]
    pub fn has(self, place: Place) -> bool {
        let granules = u64::from(place.len).div_ceil(u64::from(self.granule_bytes));
        u64::from(place.granule) + granules <= self.granules
    }
}

/// Where a page's bytes lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The first one of its frame.
    pub granule: u32,
    /// That of the frame when the page was put there.
    pub generation: u32,
    /// Bytes in the frame: 4096 plain, less for one LZ4 block. 0: there is no place, the page is all zero.
    pub len: u32,
}

impl Place {
    /// A page that has none.
    pub const NONE: Place = Place { granule: 0, generation: 0, len: 0 };
}

/// Appends places to a table.
pub fn push_places(out: &mut Vec<u8>, places: &[Place]) {
    for place in places {
        out.extend_from_slice(&place.granule.to_le_bytes());
        out.extend_from_slice(&place.generation.to_le_bytes());
        out.extend_from_slice(&place.len.to_le_bytes());
    }
}

/// Reads a table of one place for each of `pages` pages into `places` (cleared first).
///
/// # Errors
/// [`WireError::TableLength`], or [`WireError::PageLength`] for a page longer than a page.
pub fn parse_places(table: &[u8], pages: usize, places: &mut Vec<Place>) -> Result<(), WireError> {
    places.clear();
    let (list, rest) = table.as_chunks::<PLACE_BYTES>();
    if list.len() != pages || !rest.is_empty() {
        return Err(WireError::TableLength);
    }
    for bytes in list {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        let place = Place { granule: word(0), generation: word(4), len: word(8) };
        if place.len as usize > OS_PAGE_BYTES {
            return Err(WireError::PageLength);
        }
        places.push(place);
    }
    Ok(())
}

/// Divides the table of a reply to a `Get` of `pages` pages, which ends with their places.
///
/// # Errors
/// [`WireError::TableLength`] where it is too short for them.
pub fn split_places(table: &[u8], pages: usize) -> Result<(&[u8], &[u8]), WireError> {
    let entries = table.len().checked_sub(pages * PLACE_BYTES).ok_or(WireError::TableLength)?;
    Ok(table.split_at(entries))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_plan_comes_back_and_its_parts_do_not_overlap() {
        let plan = Plan::of(256, 1024 * 3).unwrap();
        assert_eq!(Plan::parse(&plan.encode()), Ok(plan));
        assert!(plan.generation_at(1024 * 3 - 1) + 4 <= plan.frames_at());
        assert_eq!(plan.frames_at() % 4096, 0);
        assert_eq!(plan.frame_at(1024 * 3), plan.file_bytes());
        let page = |granule, len| plan.has(Place { granule, generation: 0, len });
        assert!(page(1024 * 3 - 16, 4096) && page(1024 * 3 - 1, 256));
        assert!(!page(1024 * 3 - 15, 4096) && !page(1024 * 3 - 1, 257) && !page(u32::MAX, 4096));
    }

    #[test]
    fn another_file_is_refused() {
        for (granule_bytes, granules) in [(0, 1), (100, 1), (8192, 1), (256, u64::MAX)] {
            assert_eq!(Plan::of(granule_bytes, granules), Err(PlanError));
        }
        assert_eq!(Plan::parse(&[0; PLAN_BYTES]), Err(PlanError));
    }

    proptest! {
        #[test]
        fn places_come_back_as_they_were(
            list in prop::collection::vec((any::<u32>(), any::<u32>(), 0..=4096u32), 0..99),
        ) {
            let places: Vec<Place> =
                list.iter().map(|&(granule, generation, len)| Place { granule, generation, len }).collect();
            let mut table = vec![9; 8];
            push_places(&mut table, &places);
            let (entries, rest) = split_places(&table, places.len()).unwrap();
            prop_assert_eq!(entries, &[9; 8]);
            let mut got = Vec::new();
            prop_assert_eq!(parse_places(rest, places.len(), &mut got), Ok(()));
            prop_assert_eq!(&got, &places);
            prop_assert!(parse_places(rest, places.len() + 1, &mut got).is_err());
        }

        #[test]
        fn arbitrary_tables_never_panic(
            table in prop::collection::vec(any::<u8>(), 0..200), pages in 0..20usize,
        ) {
            let mut places = Vec::new();
            if parse_places(&table, pages, &mut places).is_ok() {
                prop_assert!(places.iter().all(|place| place.len <= 4096));
            }
            let _ = split_places(&table, pages);
        }
    }
}
