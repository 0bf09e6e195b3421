//! Fingerprints: whether a page holds the bytes that it held before, told from eight bytes.
//!
//! Programs often write the value that is already there (silent stores: Lepak, Lipasti, ISCA 2000). A page
//! that was open to writes and
//! holds what the servers hold need not be sent to them.
//!
//! Different pages have the same fingerprint with a probability of less than 2^-62, whatever they hold, as
//! long as the party that chooses their content does not know the key: NH over words of 64 bits (Black,
//! Halevi, Krawczyk, Krovetz, Rogaway: UMAC, CRYPTO '99), and its 128 bits multiplied down to 64
//! (Dietzfelbinger, STACS '96), each wrong with 2^-64, and one bit to tell a fingerprint from none. A
//! checksum that is linear, as CRC is, promises nothing of the kind.

use std::num::NonZeroU64;

use rampool_wire::units::OS_PAGE_BYTES;

const WORDS: usize = OS_PAGE_BYTES / 8;
/// Words of the key that multiply NH's result down: a factor and a summand of 192 bits each.
const LAST_WORDS: usize = 6;

/// Of the 4096 bytes of a page, under one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fingerprint(NonZeroU64);

/// The key of fingerprints that are compared. It must be random and secret.
#[derive(Clone)]
pub struct FingerprintKey {
    words: Box<[u64; WORDS]>,
    last: [u64; LAST_WORDS],
}

impl std::fmt::Debug for FingerprintKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FingerprintKey")
    }
}

impl FingerprintKey {
    /// Random bytes that a key is made of.
    pub const BYTES: usize = (WORDS + LAST_WORDS) * 8;

    #[must_use]
    pub fn new(random: &[u8; Self::BYTES]) -> Self {
        let mut words = random.chunks_exact(8).map(word);
        let mut next = || words.next().expect("as many words as bytes were asked for");
        Self { words: Box::new(std::array::from_fn(|_| next())), last: std::array::from_fn(|_| next()) }
    }

    /// The fingerprint of a page, in about a tenth of a microsecond where it is in the processor's cache.
    #[must_use]
    pub fn of(&self, page: &[u8; OS_PAGE_BYTES]) -> Fingerprint {
        // Two sums, so that neither addition waits for the other.
        let mut sums = [0u128; 2];
        for (bytes, key) in page.chunks_exact(32).zip(self.words.chunks_exact(4)) {
            for (half, sum) in sums.iter_mut().enumerate() {
                let a = word(&bytes[16 * half..][..8]).wrapping_add(key[2 * half]);
                let b = word(&bytes[16 * half + 8..][..8]).wrapping_add(key[2 * half + 1]);
                *sum = sum.wrapping_add(u128::from(a) * u128::from(b));
            }
        }
        let hash = self.down(sums[0].wrapping_add(sums[1]));
        Fingerprint(NonZeroU64::new(hash | 1).expect("a bit of it is set"))
    }

    /// The highest 64 of the 192 bits of `factor * x + summand`.
    fn down(&self, x: u128) -> u64 {
        let [a0, a1, a2, b0, b1, b2] = self.last;
        let (x0, x1) = (low(x), high(x));
        let product = |a: u64, x: u64| u128::from(a) * u128::from(x);
        let first = product(a0, x0) + u128::from(b0);
        // Three words and a carry: far below 128 bits.
        let second = u128::from(high(first))
            + u128::from(low(product(a1, x0)))
            + u128::from(low(product(a0, x1)))
            + u128::from(b1);
        high(second)
            .wrapping_add(high(product(a1, x0)))
            .wrapping_add(high(product(a0, x1)))
            .wrapping_add(a2.wrapping_mul(x0))
            .wrapping_add(a1.wrapping_mul(x1))
            .wrapping_add(b2)
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

fn low(x: u128) -> u64 {
    u64::try_from(x & u128::from(u64::MAX)).expect("masked")
}

fn high(x: u128) -> u64 {
    u64::try_from(x >> 64).expect("64 bits are left")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(seed: u64) -> FingerprintKey {
        let mut state = seed;
        FingerprintKey::new(&std::array::from_fn(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state.to_be_bytes()[0]
        }))
    }

    /// As the papers have it, word by word and with long numbers.
    fn plainly(key: &FingerprintKey, page: &[u8; OS_PAGE_BYTES]) -> u64 {
        let mut nh = 0u128;
        for n in (0..WORDS).step_by(2) {
            let at = |n: usize| word(&page[8 * n..8 * n + 8]).wrapping_add(key.words[n]);
            nh = nh.wrapping_add(u128::from(at(n)) * u128::from(at(n + 1)));
        }
        // In digits of 32 bits, as by hand.
        let digits =
            |words: &[u64]| words.iter().flat_map(|w| [w & 0xffff_ffff, w >> 32]).collect::<Vec<u64>>();
        let (a, b, x) = (digits(&key.last[..3]), digits(&key.last[3..]), digits(&[low(nh), high(nh)]));
        let mut sum = b.iter().map(|d| u128::from(*d)).collect::<Vec<u128>>();
        for (i, a) in a.iter().enumerate() {
            for (j, x) in x.iter().enumerate().filter(|(j, _)| i + j < 6) {
                sum[i + j] += u128::from(*a) * u128::from(*x);
            }
        }
        for n in 0..5 {
            let carry = sum[n] >> 32;
            sum[n + 1] += carry;
            sum[n] &= 0xffff_ffff;
        }
        low((sum[5] << 32) & u128::from(u64::MAX) | sum[4] & 0xffff_ffff)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn it_is_the_hash_of_the_papers(seed: u64, bytes in prop::collection::vec(any::<u8>(), OS_PAGE_BYTES)) {
            let page: [u8; OS_PAGE_BYTES] = bytes.try_into().unwrap();
            prop_assert_eq!(key(seed).of(&page).0.get(), plainly(&key(seed), &page) | 1);
        }

        #[test]
        fn one_changed_bit_changes_it(seed: u64, fill: u8, bit in 0..OS_PAGE_BYTES * 8) {
            let mut page = [fill; OS_PAGE_BYTES];
            let before = key(seed).of(&page);
            prop_assert_eq!(before, key(seed).of(&page));
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(before, key(seed).of(&page));
        }
    }

    #[test]
    fn words_that_change_places_change_it() {
        let key = key(1);
        let mut page = [0; OS_PAGE_BYTES];
        page[0] = 1;
        let before = key.of(&page);
        for at in (8..OS_PAGE_BYTES).step_by(8) {
            let mut moved = [0; OS_PAGE_BYTES];
            moved[at] = 1;
            assert_ne!(before, key.of(&moved), "at {at}");
        }
        assert_ne!(key.of(&page), super::tests::key(2).of(&page), "another key");
    }
}
