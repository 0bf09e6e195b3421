//! How a mutex is locked whose holder may have panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of another thread is reported where it happened; what it left is checked by assertions.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
