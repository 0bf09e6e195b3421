//! The time of a turn.

use std::time::{Duration, Instant};

/// The longest turn, checked after so many frames, or within a long request: a longer one delays the other
/// connections.
const TURN: Duration = Duration::from_micros(100);

/// The time of a turn, from when it is asked about first.
#[derive(Default)]
pub(super) struct Slice(Option<Instant>);

impl Slice {
    /// A turn begins.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.0 = None;
    }

    /// Whether the turn should end.
    #[inline]
    pub(super) fn is_over(&mut self) -> bool {
        self.0.get_or_insert_with(Instant::now).elapsed() >= TURN
    }
}
