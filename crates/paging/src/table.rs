//! Tables with an entry for each page of an index space, of which most entries may never have been anything
//! else than their neighbours.
//!
//! Programs reserve far more memory than they touch: a sort that may use 4 GiB, the arenas of an allocator, a
//! heap that could grow. What is known of each page is itself local memory, taken from what the program may
//! keep. So a *piece* of the table has memory of its own only once one of its entries differs from the
//! others.

use std::ops::{Index, IndexMut, Range};

/// Entries of a piece.
pub const PIECE: usize = 512;

#[derive(Clone, Debug)]
enum Piece<T> {
    /// All its entries are this one.
    Same(T),
    Own(Box<[T; PIECE]>),
}

impl<T: Copy> Piece<T> {
    #[cold]
    fn make_own(&mut self) -> &mut [T; PIECE] {
        if let Self::Same(entry) = self {
            *self = Self::Own(Box::new([*entry; PIECE]));
        }
        match self {
            Self::Own(entries) => entries,
            Self::Same(_) => unreachable!("it was made its own just now"),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Table<T> {
    pieces: Vec<Piece<T>>,
    len: usize,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { pieces: Vec::new(), len: 0 }
    }
}

impl<T: Copy> Table<T> {
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the table at least `len` entries long; the new ones are `entry`, which must be the same in every
    /// call.
    pub fn grow(&mut self, len: usize, entry: T) {
        self.len = self.len.max(len);
        self.pieces.resize(self.len.div_ceil(PIECE), Piece::Same(entry));
    }

    #[inline]
    #[must_use]
    pub fn get(&self, at: usize) -> Option<&T> {
        (at < self.len).then(|| match &self.pieces[at / PIECE] {
            Piece::Same(entry) => entry,
            Piece::Own(entries) => &entries[at % PIECE],
        })
    }

    /// As if it had been changed: look with [`get`](Self::get) first where it may not be.
    #[inline]
    pub fn get_mut(&mut self, at: usize) -> Option<&mut T> {
        if at >= self.len {
            return None;
        }
        Some(match &mut self.pieces[at / PIECE] {
            Piece::Own(entries) => &mut entries[at % PIECE],
            same => &mut same.make_own()[at % PIECE],
        })
    }

    /// Changes each entry of the range, those of a whole piece together where they are the same: `change`
    /// gets one of them, and its index, for all.
    ///
    /// # Panics
    /// When the range goes beyond the table.
    pub fn change(&mut self, range: Range<usize>, mut change: impl FnMut(usize, &mut T)) {
        assert!(range.end <= self.len, "{range:?} of {} entries", self.len);
        let mut at = range.start;
        while at < range.end {
            let until = (at / PIECE + 1) * PIECE;
            if at.is_multiple_of(PIECE)
                && until <= range.end
                && let Piece::Same(entry) = &mut self.pieces[at / PIECE]
            {
                change(at, entry);
                at = until;
            } else {
                change(at, &mut self[at]);
                at += 1;
            }
        }
    }

    /// Where the piece of `at` ends, if all entries from there on are known to be the same.
    #[must_use]
    pub fn same_until(&self, at: usize) -> Option<usize> {
        matches!(self.pieces.get(at / PIECE)?, Piece::Same(_))
            .then(|| ((at / PIECE + 1) * PIECE).min(self.len))
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        (0..self.len).map(|at| &self[at])
    }

    /// Pieces with memory of their own.
    #[must_use]
    pub fn own_pieces(&self) -> usize {
        self.pieces.iter().filter(|piece| matches!(piece, Piece::Own(_))).count()
    }
}

impl<T: Copy> Index<usize> for Table<T> {
    type Output = T;

    #[inline]
    fn index(&self, at: usize) -> &T {
        self.get(at).expect("inside the table")
    }
}

impl<T: Copy> IndexMut<usize> for Table<T> {
    #[inline]
    fn index_mut(&mut self, at: usize) -> &mut T {
        self.get_mut(at).expect("inside the table")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_the_same_everywhere_takes_no_memory() {
        let mut table = Table::default();
        table.grow(1_000_000, 0u8);
        table.change(0..900_000, |_, entry| *entry = 1);
        // The last of the changed pieces is changed in part.
        assert_eq!(table.own_pieces(), 1);
        table[700_000] = 2;
        assert_eq!(table.own_pieces(), 2);
        assert_eq!(
            (table[0], table[699_999], table[700_000], table[899_999], table[900_000]),
            (1, 1, 2, 1, 0)
        );
        assert_eq!(table.same_until(1), Some(PIECE));
        assert_eq!(table.same_until(700_000), None);
        assert_eq!(table.get(1_000_000), None);
    }

    proptest! {
        #[test]
        fn a_table_is_a_vector(
            steps in prop::collection::vec((0usize..4, 0usize..3000, 0usize..3000, any::<u8>()), 1..40)
        ) {
            let (mut table, mut vector) = (Table::default(), Vec::new());
            for (step, a, b, value) in steps {
                match step {
                    0 => {
                        table.grow(a, 7);
                        vector.resize(a.max(vector.len()), 7);
                    }
                    1 if a < vector.len() => (table[a], vector[a]) = (value, value),
                    2 | 3 => {
                        let (from, to) = (a.min(b).min(vector.len()), a.max(b).min(vector.len()));
                        table.change(from..to, |_, entry| *entry = entry.wrapping_add(value));
                        vector[from..to].iter_mut().for_each(|entry| *entry = entry.wrapping_add(value));
                    }
                    _ => {}
                }
                prop_assert!(table.iter().eq(vector.iter()));
                prop_assert_eq!(table.get(a), vector.get(a));
            }
        }
    }
}
