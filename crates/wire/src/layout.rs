//! Layouts: which bytes of a region or of a buffer, in which order, in the terms of MPI's derived datatypes.
//!
//! DIMMnet-3 (Tanabe et al.) runs strided and indexed commands at the memory, so that only useful bytes
//! travel, and lets the memory side execute MPI's datatypes. Here checked constructors, which nest freely,
//! build a [`Layout`]. On the way they bring it into one normal form (a [`Program`]: loops, lists and runs,
//! neighbours joined). The program is sent, and the memory server executes it.
//!
//! A layout has *bounds* as MPI defines them: `lower` and `upper`. Their distance is the *extent*, by which
//! repetitions are spaced; [`Layout::resized`] sets them freely. The selected bytes lie between the program's
//! own bounds. Displacements and strides may be negative; a layout that reaches below the start of a region
//! or buffer is refused where it is used ([`Layout::placed`]).
//!
//! A layout never holds a list of bytes: a million evenly spaced elements are one loop.

mod program;

pub use program::{Collector, Program, ProgramError, Row, Rows, Run, Runs};

/// The most runs of bytes in one layout: a billion take too long for any caller to wait for.
pub const MAX_RUNS: u64 = 1 << 30;
/// The most bytes that a layout selects: as many as a region has.
pub const MAX_LAYOUT_BYTES: u64 = 1 << 52;
/// The farthest that a layout reaches, on either side.
pub const MAX_LAYOUT_OFFSET: u64 = 1 << 54;

/// Why a layout is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    #[error(
        "a layout of {0} separate runs of bytes exceeds the {MAX_RUNS} allowed, or is too large to check for \
         overlaps"
    )]
    TooManyRuns(u64),
    #[error("a layout selects more bytes than a region can have")]
    TooLarge,
    #[error("a layout reaches too far: its numbers overflow")]
    TooFar,
    #[error("layouts are nested too deeply")]
    TooDeep,
    #[error("dimension {dimension} of a subarray: {start} + {subsize} is beyond {size}")]
    Subarray { dimension: usize, size: u64, subsize: u64, start: u64 },
    #[error("a subarray needs as many sizes, subsizes and starts, and at least one of each")]
    Dimensions,
    #[error("an extent is negative")]
    Extent,
    #[error("the layout reaches from byte {low} to byte {high}, of {bytes} bytes")]
    OutOfBounds { low: i64, high: i64, bytes: u64 },
    #[error("the layout selects a byte twice and cannot be written to")]
    Overlap,
    #[error("the layout has elements that are not aligned to {0} bytes, or splits an element")]
    Unaligned(u64),
}

/// In which order the elements of a subarray lie in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// The last dimension is the densest, as in C.
    #[default]
    C,
    /// The first dimension is the densest.
    Fortran,
}

/// Which bytes, in which order.
///
/// Invariant: the bounds are within [`MAX_LAYOUT_OFFSET`], the lower not above the upper; a layout of nothing
/// has none.
///
/// ```
/// use rampool_wire::layout::Layout;
/// // A column of a table: 8 bytes of each of 1000 rows of 4 KiB.
/// let column = Layout::bytes(8)?.hvector(1000, 1, 4096)?;
/// assert_eq!((column.size(), column.extent()), (8000, 999 * 4096 + 8));
/// assert_eq!(column.program().runs().nth(2).map(|run| (run.offset, run.len)), Some((8192, 8)));
/// # Ok::<(), rampool_wire::layout::LayoutError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    program: Program,
    bounds: Option<(i64, i64)>,
}

impl Layout {
    /// `n` consecutive bytes.
    ///
    /// # Errors
    /// [`LayoutError::TooLarge`] or [`LayoutError::TooFar`].
    pub fn bytes(n: u64) -> Result<Self, LayoutError> {
        let program = Program::run(0, n)?;
        let bounds = (n > 0).then(|| program.bounds());
        Ok(Self { program, bounds })
    }

    /// `count` of this layout, one extent apart (`MPI_Type_contiguous`).
    ///
    /// # Errors
    /// [`LayoutError`] where the result exceeds the bounds, as for every constructor.
    pub fn contiguous(&self, count: u64) -> Result<Self, LayoutError> {
        self.repeated(count, self.extent())
    }

    /// `count` blocks of `block` elements, the blocks `stride` *extents* apart (`MPI_Type_vector`).
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn vector(&self, count: u64, block: u64, stride: i64) -> Result<Self, LayoutError> {
        self.hvector(count, block, stride.checked_mul(self.extent()).ok_or(LayoutError::TooFar)?)
    }

    /// `count` blocks of `block` elements, the blocks `stride` *bytes* apart (`MPI_Type_create_hvector`).
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn hvector(&self, count: u64, block: u64, stride: i64) -> Result<Self, LayoutError> {
        self.contiguous(block)?.repeated(count, stride)
    }

    /// Blocks of (length, displacement), both in elements (`MPI_Type_indexed`).
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn indexed(&self, blocks: &[(u64, i64)]) -> Result<Self, LayoutError> {
        let extent = self.extent();
        let far =
            blocks.iter().map(|(block, at)| Ok((*block, at.checked_mul(extent).ok_or(LayoutError::TooFar)?)));
        self.hindexed(&far.collect::<Result<Vec<_>, _>>()?)
    }

    /// Blocks of (length in elements, displacement in bytes) (`MPI_Type_create_hindexed`).
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn hindexed(&self, blocks: &[(u64, i64)]) -> Result<Self, LayoutError> {
        let Some((first, _)) = blocks.iter().find(|(block, _)| *block > 0) else {
            return Ok(Self::default());
        };
        let blocks: Vec<(u64, i64)> = blocks.iter().copied().filter(|(block, _)| *block > 0).collect();
        if blocks.iter().all(|(block, _)| block == first) {
            return self.contiguous(*first)?.at_each(blocks.into_iter().map(|(_, at)| at).collect());
        }
        let parts: Vec<Self> =
            blocks.iter().map(|(block, at)| self.contiguous(*block)?.moved(*at)).collect::<Result<_, _>>()?;
        Self::sequence(parts)
    }

    /// Fields of (count, displacement in bytes, layout), in this order (`MPI_Type_create_struct`).
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn structure(fields: &[(u64, i64, Layout)]) -> Result<Self, LayoutError> {
        let fields = fields.iter().filter(|(count, _, _)| *count > 0);
        Self::sequence(
            fields
                .map(|(count, at, layout)| layout.contiguous(*count)?.moved(*at))
                .collect::<Result<_, _>>()?,
        )
    }

    /// A part of an array: `subsizes` elements from `starts` on, of `sizes` in each dimension
    /// (`MPI_Type_create_subarray`). Its extent is the whole array.
    ///
    /// # Errors
    /// [`LayoutError::Subarray`] or [`LayoutError::Dimensions`], or as for every constructor.
    pub fn subarray(
        &self,
        sizes: &[u64],
        subsizes: &[u64],
        starts: &[u64],
        order: Order,
    ) -> Result<Self, LayoutError> {
        if sizes.is_empty() || sizes.len() != subsizes.len() || sizes.len() != starts.len() {
            return Err(LayoutError::Dimensions);
        }
        let mut dense_first: Vec<usize> = (0..sizes.len()).collect();
        if order == Order::C {
            dense_first.reverse();
        }
        let mut part = self.clone();
        let (mut stride, mut offset) = (self.extent(), 0i64);
        for dimension in dense_first {
            let (size, subsize, start) = (sizes[dimension], subsizes[dimension], starts[dimension]);
            if start.checked_add(subsize).is_none_or(|end| end > size) {
                return Err(LayoutError::Subarray { dimension, size, subsize, start });
            }
            part = part.repeated(subsize, stride)?;
            let signed = |n: u64| i64::try_from(n).map_err(|_| LayoutError::TooFar);
            let skipped = signed(start)?.checked_mul(stride).ok_or(LayoutError::TooFar)?;
            offset = offset.checked_add(skipped).ok_or(LayoutError::TooFar)?;
            stride = signed(size)?.checked_mul(stride).ok_or(LayoutError::TooFar)?;
        }
        let program = part.program.shifted(offset)?;
        Self { program, bounds: None }.resized(self.bounds().0, stride)
    }

    /// The same bytes with other bounds: from `lower`, `extent` bytes (`MPI_Type_create_resized`).
    ///
    /// # Errors
    /// [`LayoutError::Extent`] for a negative extent, [`LayoutError::TooFar`].
    pub fn resized(&self, lower: i64, extent: i64) -> Result<Self, LayoutError> {
        if extent < 0 {
            return Err(LayoutError::Extent);
        }
        let upper = lower.checked_add(extent).ok_or(LayoutError::TooFar)?;
        Self { program: self.program.clone(), bounds: Some((lower, upper)) }.bounded()
    }

    /// Bytes selected (`MPI_Type_size`).
    #[must_use]
    pub fn size(&self) -> u64 {
        self.program.bytes()
    }

    /// The distance between repetitions.
    #[must_use]
    pub fn extent(&self) -> i64 {
        let (lower, upper) = self.bounds();
        upper - lower
    }

    /// Lower and upper bound, as in MPI; both 0 for an empty layout.
    #[must_use]
    pub fn bounds(&self) -> (i64, i64) {
        self.bounds.unwrap_or((0, 0))
    }

    /// The normal form.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The layout at byte `offset` of `bytes` bytes.
    ///
    /// # Errors
    /// [`LayoutError::OutOfBounds`] where it reaches outside.
    pub fn placed(&self, offset: u64, bytes: u64) -> Result<Program, LayoutError> {
        let program =
            self.program.clone().shifted(i64::try_from(offset).map_err(|_| LayoutError::TooFar)?)?;
        let (low, high) = program.bounds();
        if low < 0 || high.cast_unsigned() > bytes {
            return Err(LayoutError::OutOfBounds { low, high, bytes });
        }
        Ok(program)
    }

    fn repeated(&self, count: u64, stride: i64) -> Result<Self, LayoutError> {
        if count == 0 {
            return Ok(Self::default());
        }
        let reach = i128::from(count - 1) * i128::from(stride);
        let program = self.program.clone().repeated(count, stride)?;
        Self { program, bounds: self.widened(reach.min(0), reach.max(0))? }.bounded()
    }

    fn at_each(&self, offsets: Vec<i64>) -> Result<Self, LayoutError> {
        let (Some(least), Some(most)) = (offsets.iter().min(), offsets.iter().max()) else {
            return Ok(Self::default());
        };
        let bounds = self.widened((*least).into(), (*most).into())?;
        Self { program: self.program.clone().at_each(offsets)?, bounds }.bounded()
    }

    fn moved(&self, by: i64) -> Result<Self, LayoutError> {
        self.at_each(vec![by])
    }

    fn sequence(parts: Vec<Self>) -> Result<Self, LayoutError> {
        let union = |a: (i64, i64), b: (i64, i64)| (a.0.min(b.0), a.1.max(b.1));
        let bounds = parts.iter().filter_map(|part| part.bounds).reduce(union);
        Self { program: Program::sequence(parts.into_iter().map(|part| part.program).collect())?, bounds }
            .bounded()
    }

    /// The bounds of several of this layout, with the first at `low` and the last at `high`.
    fn widened(&self, low: i128, high: i128) -> Result<Option<(i64, i64)>, LayoutError> {
        let Some((lower, upper)) = self.bounds else { return Ok(None) };
        let bound = |n: i128| i64::try_from(n).map_err(|_| LayoutError::TooFar);
        Ok(Some((bound(i128::from(lower) + low)?, bound(i128::from(upper) + high)?)))
    }

    fn bounded(self) -> Result<Self, LayoutError> {
        let inside = |n: i64| n.unsigned_abs() <= MAX_LAYOUT_OFFSET;
        let (lower, upper) = self.bounds();
        if inside(lower) && inside(upper) { Ok(self) } else { Err(LayoutError::TooFar) }
    }
}

#[cfg(test)]
mod tests;
