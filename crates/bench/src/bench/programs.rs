//! Programs that `bench/paged.py` measures: natively, under `rampool run`, and with kernel swap.

pub mod least;
pub mod map;
pub mod touch;
