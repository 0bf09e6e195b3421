//! Random content that follows from a seed, so that every byte can be checked.

/// Word `index` of the content of `seed` (the mixing step of SplitMix64, Steele, Lea and Flood, OOPSLA '14).
pub fn word(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The first `count` bytes of that content.
pub fn random_bytes(seed: u64, count: usize) -> Vec<u8> {
    (0..count.div_ceil(8) as u64).flat_map(|n| word(seed, n).to_le_bytes()).take(count).collect()
}

/// The numbers below `count` in random order.
pub fn permutation(seed: u64, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        let other = word(seed, last as u64) % (last as u64 + 1);
        order.swap(last, usize::try_from(other).expect("below count"));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_has_every_number_once_and_depends_on_its_seed() {
        let mut order = permutation(1, 1000);
        assert_ne!(order, permutation(2, 1000));
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..1000));
    }

    #[test]
    fn content_is_told_again() {
        let bytes = random_bytes(5, 20);
        assert_eq!(bytes.len(), 20);
        assert_eq!(bytes[8..16], word(5, 1).to_le_bytes());
    }
}
