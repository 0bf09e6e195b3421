//! Tells the end of a thread from the end of its process.
//!
//! `exit` runs the destructors of the calling thread's local variables, just as its end does. The values of a
//! POSIX key are only looked at when a thread ends by itself.

/// Calls functions when threads end.
#[derive(Debug)]
pub struct ThreadEnd {
    key: libc::pthread_key_t,
}

impl ThreadEnd {
    /// # Errors
    /// The errno when the process has no key left.
    pub fn new() -> Result<Self, i32> {
        extern "C" fn call(at_end: *mut libc::c_void) {
            // SAFETY: the key's values come from `call`, which takes functions of this type only.
            let at_end = unsafe { std::mem::transmute::<*mut libc::c_void, fn()>(at_end) };
            at_end();
        }
        let mut key = 0;
        // SAFETY: `key` is ours to write; `call` may run in any thread.
        match unsafe { libc::pthread_key_create(&raw mut key, Some(call)) } {
            0 => Ok(Self { key }),
            errno => Err(errno),
        }
    }

    /// Calls `at_end` in the calling thread when that ends, once its local variables are gone; not when the
    /// process exits. Of several functions in one thread, only the last.
    ///
    /// # Errors
    /// The errno when there is no memory for it.
    pub fn call(&self, at_end: fn()) -> Result<(), i32> {
        // SAFETY: our key, which is never deleted.
        match unsafe { libc::pthread_setspecific(self.key, at_end as *const libc::c_void) } {
            0 => Ok(()),
            errno => Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Mutex;

    use super::*;

    static TOLD: Mutex<Vec<&str>> = Mutex::new(Vec::new());

    fn tell(what: &'static str) {
        TOLD.lock().unwrap().push(what);
    }

    struct Local;

    impl Drop for Local {
        fn drop(&mut self) {
            tell("its variables are gone");
        }
    }

    thread_local! {
        static LOCAL: RefCell<Option<Local>> = const { RefCell::new(None) };
    }

    #[test]
    fn a_thread_that_ends_says_so_behind_its_variables() {
        let ends = ThreadEnd::new().unwrap();
        std::thread::spawn(move || {
            LOCAL.set(Some(Local));
            ends.call(|| tell("it ends")).unwrap();
            tell("it runs");
        })
        .join()
        .unwrap();
        assert_eq!(*TOLD.lock().unwrap(), ["it runs", "its variables are gone", "it ends"]);
    }

    #[test]
    fn a_process_that_exits_ends_no_thread_in_this_sense() {
        let ends = ThreadEnd::new().unwrap();
        // SAFETY: the child sets a value and exits; what runs then is the C library's own, and this.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child, with another code than that of a child in which nothing was called.
            let called = ends.call(|| unsafe { libc::_exit(7) });
            // SAFETY: ends the child.
            unsafe { libc::exit(i32::from(called.is_err())) };
        }
        let mut status = -1;
        // SAFETY: waits for our child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
    }
}
