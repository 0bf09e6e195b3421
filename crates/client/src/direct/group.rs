//! Totals of a column for each key in another, counted at the servers.

use super::{
    Direct, DirectError, DirectRegion, Filter, Number, ODD_SCAN, Total, aligned, bounded, first_word,
};
use crate::error::Operation;
use crate::pool::{GroupPart, Job, MOST_GROUPED};
use rampool_paging::placement::ServerIndex;
use rampool_wire::elements::{Groups, Kind};
use rampool_wire::frame::parse_reduced;
use rampool_wire::layout::{Layout, Program};

/// Keys that one call finds at most, in about 100 MB of this process's memory.
const MOST_KEYS: u64 = 1 << 20;

/// An integer that says to which group an element belongs.
pub trait Key: Number {}
impl Key for i32 {}
impl Key for u32 {}
impl Key for i64 {}
impl Key for u64 {}

/// Where a column lies: its region, the byte that its layout begins at, and the layout.
pub type Column<'a> = (DirectRegion, u64, &'a Layout);

/// A key, and what the elements that have it and count come to.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct Group<K, T> {
    pub key: K,
    /// At least 1.
    pub count: u64,
    pub sum: Total,
    /// NaNs are skipped where there is another.
    pub min: T,
    pub max: T,
}

/// What answers have come to so far.
struct Found {
    groups: Groups,
    /// The server whose answer was none.
    odd: Option<ServerIndex>,
}

impl Found {
    /// Joins an answer.
    fn join(&mut self, part: &GroupPart, (_, table, found): (u64, Vec<u8>, Vec<u8>)) {
        let reduced = parse_reduced(&table).ok().filter(|reduced| reduced.count <= part.elements.into());
        if self.groups.len() as u64 <= MOST_KEYS
            && !reduced.is_some_and(|reduced| self.groups.join(reduced, &found))
        {
            self.odd = Some(part.server);
        }
    }
}

impl Direct {
    /// Groups the elements of a column that count by their keys, the elements of another column in the same
    /// order, and gives the count, sum, least and greatest of each group, by ascending keys. The servers add
    /// up. Only where a key and its element lie at two servers do both come here; columns of elements of one
    /// length, each at the start of its own region, never do. A change of keys in another region than the
    /// column's that is still under way has no order with this.
    ///
    /// # Errors
    /// [`DirectError::Keys`] if there are not as many keys as elements;
    /// [`DirectError::TooMuch`] for more than 2^20 different keys; others as [`Direct::sum`].
    pub fn group<K: Key, T: Number>(
        &mut self,
        keys: Column<'_>,
        column: Column<'_>,
        filter: Filter<T>,
    ) -> Result<Vec<Group<K, T>>, DirectError> {
        let operation = Operation::Scan(column.1);
        let by = self.column::<K>(keys)?;
        let elements = self.column::<T>(column)?;
        let counts = (by.bytes() / K::KIND.bytes() as u64, elements.bytes() / T::KIND.bytes() as u64);
        if counts.0 != counts.1 {
            return Err(DirectError::Keys { keys: counts.0, elements: counts.1 });
        }
        bounded(operation, "elements", counts.0, MOST_GROUPED)?;
        let (low, high) = (filter.low.bits().to_le_bytes(), filter.high.bits().to_le_bytes());
        let token = self.token(operation);
        let (mut parts, apart) = self.pool.group(
            token,
            (keys.0.region, (K::KIND, &by)),
            (column.0.region, (T::KIND, &elements)),
            (filter.test, low, high),
        );
        let groups = Groups::new(K::KIND, T::KIND, filter.test, low, high);
        let mut found = Found { groups, odd: None };
        let ended = loop {
            // Answers are joined as they come, so that few are kept.
            while let Some(reply) = parts.front().and_then(|part| self.pool.reply(part.request)) {
                found.join(&parts.pop_front().expect("it was there a moment ago"), reply);
            }
            match self.take_ended(token) {
                Some(ended) => break ended,
                None => self.step(),
            }
        };
        for part in parts {
            if let Some(reply) = self.pool.reply(part.request)
                && ended.is_ok()
            {
                found.join(&part, reply);
            }
        }
        ended?;
        if let Some(server) = found.odd {
            return Err(self.odd(server, operation, ODD_SCAN));
        }
        for [by, elements] in apart {
            let keys = self.fetched(keys.0, &by)?;
            found.groups.feed(&keys, &self.fetched(column.0, &elements)?);
            bounded(operation, "different keys", found.groups.len() as u64, MOST_KEYS)?;
        }
        bounded(operation, "different keys", found.groups.len() as u64, MOST_KEYS)?;
        Ok(found.groups.iter().map(group).collect())
    }

    fn column<T: Number>(&self, (region, offset, layout): Column<'_>) -> Result<Program, DirectError> {
        let column = layout.placed(offset, region.bytes)?;
        aligned(&column, T::KIND)?;
        self.must_know(region)?;
        Ok(column)
    }

    fn fetched(&mut self, region: DirectRegion, there: &Program) -> Result<Vec<u8>, DirectError> {
        let bytes = there.bytes();
        let mut buffer = super::with_length(Vec::new(), bytes).ok_or(DirectError::NoMemory { bytes })?;
        let here = Program::run(0, bytes)?;
        // SAFETY: the buffer has as many bytes, and is not touched or dropped before the operation has ended.
        let token = unsafe { self.begin(region, Job::Gather, there, &here, buffer.as_mut_ptr()) }?;
        self.finish(token)?;
        Ok(buffer)
    }
}

fn group<K: Key, T: Number>(group: rampool_wire::elements::Group) -> Group<K, T> {
    let sum = match T::KIND {
        Kind::F32 | Kind::F64 => Total::Float(f64::from_bits(first_word(&group.sum))),
        _ => Total::Integer(i128::from_le_bytes(group.sum)),
    };
    let number = |bits| T::from_bits(u64::from_le_bytes(bits));
    Group {
        key: K::from_bits(group.key),
        count: group.count,
        sum,
        min: number(group.least),
        max: number(group.greatest),
    }
}
