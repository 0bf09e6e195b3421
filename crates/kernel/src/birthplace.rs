//! Tells the process that made something from the children that it forks later.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::memory::{Advice, MapError, Mapping, advise};

/// The process in which this was made. Looking costs a load.
#[derive(Debug)]
pub struct Birthplace {
    /// Its first byte is true here, and wiped in every child.
    mapping: Mapping,
}

impl Birthplace {
    /// # Errors
    /// When there is no room for a page.
    pub fn new() -> Result<Self, MapError> {
        let mapping = Mapping::anonymous(crate::OS_PAGE_BYTES)?;
        // SAFETY: changes no content of this process.
        unsafe { advise(mapping.start(), mapping.bytes(), Advice::WipeOnFork) }
            .map_err(|errno| MapError { bytes: mapping.bytes(), errno })?;
        let this = Self { mapping };
        this.mark().store(true, Ordering::Release);
        Ok(this)
    }

    fn mark(&self) -> &AtomicBool {
        // SAFETY: the mapping's first byte, zero or one, which nothing else uses.
        unsafe { &*self.mapping.at(0).cast::<AtomicBool>() }
    }

    /// False in a forked child.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.mark().load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_somewhere_else() {
        let birthplace = Birthplace::new().unwrap();
        assert!(birthplace.is_here());
        // SAFETY: the child looks at a byte and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(birthplace.is_here());
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: waits for our child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 && birthplace.is_here());
    }
}
