//! What tests write into memory of the pool, word by word, and find again.

use std::sync::atomic::AtomicU64;

use rampool_pager::region::Region;

pub fn word(region: &Region, index: usize) -> &AtomicU64 {
    assert!(index * 8 < region.len());
    // SAFETY: inside the region, aligned, and only ever used as an atomic.
    unsafe { &*region.as_ptr().cast::<AtomicU64>().add(index) }
}

/// A number that looks like no other's.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^ (x >> 29)
}
