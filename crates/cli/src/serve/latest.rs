//! The server's status for those who ask over HTTP.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rampool_server::{Observer, ServerStatus};

/// Least time between two collections of the status, however often it is requested: each one takes the lock
/// of every lease.
const FRESH: Duration = Duration::from_millis(200);

/// The server's status, not asked for too often.
#[derive(Debug)]
pub struct Latest {
    observer: Observer,
    last: Mutex<Kept<ServerStatus>>,
}

impl Latest {
    pub fn new(observer: Observer) -> Arc<Self> {
        Arc::new(Self { observer, last: Mutex::new(Kept(None)) })
    }

    pub fn status(&self) -> ServerStatus {
        let mut last = self.last.lock().expect("no thread panics holding it");
        last.get(Instant::now(), || self.observer.status())
    }
}

/// A value that is made again when it is old.
#[derive(Debug)]
struct Kept<T>(Option<(Instant, T)>);

impl<T: Clone> Kept<T> {
    fn get(&mut self, now: Instant, make: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some((made, kept)) if now.duration_since(*made) < FRESH => kept.clone(),
            _ => self.0.insert((now, make())).1.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_fresh_is_not_made_again() {
        let (mut kept, mut made, began) = (super::Kept(None), 0, std::time::Instant::now());
        let get = |after: u32| {
            kept.get(began + super::FRESH * after / 10, || {
                made += 1;
                made
            })
        };
        assert_eq!([0, 1, 9, 10, 19, 20].map(get), [1, 1, 1, 2, 2, 3]);
    }
}
