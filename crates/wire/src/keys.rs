//! Keys to exposed memory on the wire: the memory they name, and the access they allow. Their rules are in
//! the crate `pinning`.

/// Names one memory of an owner: its place in the owner's table, and the generation of that place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key {
    pub place: u32,
    /// From 1 on; never used twice.
    pub generation: u64,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.place, self.generation)
    }
}

/// The access that a peer wants.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Access {
    Read,
    Write,
}

/// The access that a peer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rights {
    Read,
    Write,
    Both,
}

impl Rights {
    #[must_use]
    pub fn allow(self, access: Access) -> bool {
        match self {
            Rights::Both => true,
            Rights::Read => access == Access::Read,
            Rights::Write => access == Access::Write,
        }
    }
}

/// A key, and the memory it opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    pub key: Key,
    pub bytes: u64,
    pub rights: Rights,
}
