//! Copy or zero copy: the path of a transfer's bytes, chosen by their length and by measurements of the path.
//!
//! FireCluster found that copying through a pinned buffer wins below 256 KiB and zero copy above it. The
//! crossover depends on the machine and on the network, so it is measured ([`crossover`]). Where the network
//! copies anyway, as the loopback does, zero copy never pays, and the kernel says so with each transfer.

/// What the user wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wish {
    /// As measured; never where the network copies anyway.
    #[default]
    Auto,
    Never,
    /// From this many bytes on, whatever the network does.
    From(u64),
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    Copy,
    ZeroCopy,
}

/// Why no transfer uses zero copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoZeroCopy {
    #[error("zero copy is off")]
    Off,
    #[error("the connection is encrypted: its bytes are copied as they are sealed")]
    Sealed,
    #[error("the peer is on this machine: what looks like zero copy there is a copy")]
    Local,
    #[error("the network copied {0} zero-copy transfers in a row")]
    Copied(u32),
    #[error("zero copy was not faster than copying at any measured length")]
    Slower,
    #[error(
        "the kernel does not send by zero copy here: a Unix socket, shared memory, no io_uring, or no more \
         memory may be locked (ulimit -l)"
    )]
    Missing,
}

/// After this many transfers in a row that the network copied, zero copy is off.
pub const BELIEVED: u32 = 8;

/// Decides for one connection.
#[derive(Clone, Copy, Debug)]
pub struct PathChoice {
    wish: Wish,
    from: Result<u64, NoZeroCopy>,
    copied: u32,
}

impl PathChoice {
    /// `measured` is what [`crossover`] found.
    #[must_use]
    pub fn new(wish: Wish, sealed: bool, local: bool, measured: Option<u64>) -> Self {
        let from = match wish {
            _ if sealed => Err(NoZeroCopy::Sealed),
            Wish::Never => Err(NoZeroCopy::Off),
            Wish::From(bytes) => Ok(bytes),
            Wish::Auto if local => Err(NoZeroCopy::Local),
            Wish::Auto => measured.ok_or(NoZeroCopy::Slower),
        };
        Self { wish, from, copied: 0 }
    }

    #[must_use]
    pub fn path(&self, bytes: u64) -> Path {
        if self.from.is_ok_and(|from| bytes >= from) { Path::ZeroCopy } else { Path::Copy }
    }

    /// The length from which zero copy is used, or why it never is.
    ///
    /// # Errors
    /// [`Always`].
    pub fn from(&self) -> Result<u64, NoZeroCopy> {
        self.from
    }

    /// A zero-copy transfer has ended; the kernel says whether the network copied it after all.
    pub fn completed(&mut self, copied: bool) {
        self.copied = if copied { self.copied.saturating_add(1) } else { 0 };
        if self.wish == Wish::Auto && self.copied >= BELIEVED && self.from.is_ok() {
            self.from = Err(NoZeroCopy::Copied(self.copied));
        }
    }

    /// The kernel does not support zero copy here.
    pub fn unsupported(&mut self) {
        self.from = Err(NoZeroCopy::Missing);
    }
}

/// What one transfer of `bytes` costs, either way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    pub bytes: u64,
    pub copy_ns: u64,
    pub zero_copy_ns: u64,
}

/// The least length from which zero copy was faster at every longer length that was measured.
#[must_use]
pub fn crossover(costs: &[Cost]) -> Option<u64> {
    let mut costs = costs.to_vec();
    costs.sort_by_key(|cost| cost.bytes);
    let faster = costs.iter().rev().take_while(|cost| cost.zero_copy_ns < cost.copy_ns);
    faster.last().map(|cost| cost.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crossover_is_where_zero_copy_wins_for_good() {
        let cost = |bytes, copy_ns, zero_copy_ns| Cost { bytes, copy_ns, zero_copy_ns };
        assert_eq!(crossover(&[cost(4, 1, 5), cost(64, 16, 9), cost(256, 60, 10)]), Some(64));
        // A single win by chance does not count.
        assert_eq!(crossover(&[cost(4, 9, 5), cost(64, 16, 19), cost(256, 60, 10)]), Some(256));
        assert_eq!(crossover(&[cost(4, 1, 5), cost(64, 16, 16)]), None);
        assert_eq!(crossover(&[]), None);
    }

    #[test]
    fn a_network_that_copies_is_believed_after_a_while() {
        let mut choice = PathChoice::new(Wish::Auto, false, false, Some(1000));
        for _ in 1..BELIEVED {
            choice.completed(true);
        }
        choice.completed(false);
        for _ in 1..BELIEVED {
            choice.completed(true);
            assert_eq!((choice.path(999), choice.path(1000)), (Path::Copy, Path::ZeroCopy));
        }
        choice.completed(true);
        assert_eq!((choice.path(1 << 30), choice.from()), (Path::Copy, Err(NoZeroCopy::Copied(BELIEVED))));
    }

    #[test]
    fn the_user_has_his_way_but_not_with_encrypted_connections() {
        let mut forced = PathChoice::new(Wish::From(1), false, true, None);
        (0..100).for_each(|_| forced.completed(true));
        assert_eq!(forced.path(1), Path::ZeroCopy);
        assert_eq!(PathChoice::new(Wish::From(1), true, false, None).from(), Err(NoZeroCopy::Sealed));
        assert_eq!(PathChoice::new(Wish::Never, false, false, Some(1)).from(), Err(NoZeroCopy::Off));
        assert_eq!(PathChoice::new(Wish::Auto, false, true, Some(1)).from(), Err(NoZeroCopy::Local));
        assert_eq!(PathChoice::new(Wish::Auto, false, false, None).from(), Err(NoZeroCopy::Slower));
        forced.unsupported();
        assert_eq!(forced.path(1 << 30), Path::Copy);
    }
}
