//! Additions whose result nobody uses: a thread keeps them, and they travel together to the homes of their
//! pages with its next operation.

use std::sync::Arc;

use rampool_sharing::{Access, DirectOp, PageAccess, Spans};
use rampool_wire::elements::{Combine, Kind};
use rampool_wire::units::PageIndex;

use super::host::Waiting;
use super::{MEMBER, Shared, SharedError};

/// As many are kept.
const MOST: usize = 4096;
const WORD_BYTES: u32 = 8;

#[derive(Clone, Copy, Debug)]
pub(super) struct Addition {
    address: usize,
    value: f64,
}

/// An addition, and where its word is.
#[derive(Clone, Copy, Debug)]
struct Located {
    page: PageIndex,
    offset: u32,
    value: f64,
}

/// The sum for each word, by page.
fn by_page(mut additions: Vec<Located>) -> DirectOp {
    additions.sort_by_key(|one| (one.page, one.offset));
    let of_page = |run: &[Located]| {
        let (mut spans, mut operands) = (Spans::default(), Vec::new());
        for of_word in run.chunk_by(|one, next| one.offset == next.offset) {
            spans.push(of_word[0].offset, WORD_BYTES);
            let sum: f64 = of_word.iter().map(|one| one.value).sum();
            operands.extend(sum.to_le_bytes());
        }
        let access = Access::Update { spans, kind: Kind::F64, how: Combine::Sum, operands: operands.into() };
        PageAccess { page: run[0].page, access }
    };
    additions.chunk_by(|one, next| one.page == next.page).map(of_page).collect()
}

impl Shared {
    /// Adds to the double at `word` where its page's home is, at the beginning of this thread's next
    /// operation: all that it has kept until then travel together. Whoever synchronises with this thread
    /// after that finds the sum, and so does this thread. Between two synchronisations a word is changed by
    /// this alone and, but under `ibec`, [`Shared::add_f64_at_home`]. A thread that ends without an operation
    /// adds nothing. Blocks only where many are kept.
    ///
    /// # Errors
    /// If there is no double in shared memory at `word`; mostly the next operation says so.
    pub fn add_f64_later(&self, word: *mut f64, value: f64) -> Result<(), SharedError> {
        self.member()?;
        if self.with_kept(|kept| kept.len() >= MOST) {
            self.add_kept()?;
        }
        let addition = Addition { address: word.expose_provenance(), value };
        self.with_kept(|kept| kept.push(addition));
        Ok(())
    }

    /// Carries out what this thread has kept last, with no operation since, and returns the word's value
    /// before, as [`Shared::add_f64_at_home`] does. `None`: it has kept nothing. Blocks.
    ///
    /// # Errors
    /// As [`Shared::add_f64_at_home`].
    pub fn add_last_f64(&self) -> Result<Option<f64>, SharedError> {
        let last = self.with_kept(Vec::pop);
        let add = |one: Addition| {
            self.add_f64_at_home(std::ptr::with_exposed_provenance_mut(one.address), one.value)
        };
        last.map(add).transpose()
    }

    /// Adds to the double at `word` where its page's home is, and returns its value before. Ordered like a
    /// lock of that word. Blocks.
    ///
    /// # Errors
    /// If there is no double in shared memory at `word`.
    pub fn add_f64_at_home(&self, word: *mut f64, value: f64) -> Result<f64, SharedError> {
        let address = word.expose_provenance();
        let (page, offset) = self.locate(address)?;
        let access = Access::Fetch { offset, kind: Kind::F64, how: Combine::Sum, operand: value.to_bits() };
        let before = self.at_home(address, vec![PageAccess { page, access }].into())?;
        Ok(f64::from_bits(before.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte))))
    }

    /// Carries out what this thread has kept.
    pub(super) fn add_kept(&self) -> Result<(), SharedError> {
        let kept = self.with_kept(std::mem::take);
        let Some(first) = kept.first().map(|one| one.address) else { return Ok(()) };
        let located: Result<Vec<Located>, SharedError> = {
            let host = self.inner.enter()?;
            let locate = |&Addition { address, value }: &Addition| {
                let (page, offset) = host
                    .memory
                    .locate(address)
                    .ok_or(SharedError::NotShared { rank: self.rank(), address })?;
                Ok(Located { page, offset, value })
            };
            kept.iter().map(locate).collect()
        };
        self.at_home(first, by_page(located?)).map(drop)
    }

    fn at_home(&self, address: usize, op: DirectOp) -> Result<Arc<[u8]>, SharedError> {
        Ok(self.carry_out(Waiting::Word { address }, op, None, true)?.expect("it waits"))
    }

    /// `T`'s default if this thread has had no operation.
    fn with_kept<T: Default>(&self, with: impl FnOnce(&mut Vec<Addition>) -> T) -> T {
        MEMBER.with(|members| {
            let mut members = members.borrow_mut();
            let member = members.iter_mut().find(|member| member.instance == self.inner.instance);
            member.map(|member| with(&mut member.kept)).unwrap_or_default()
        })
    }
}
