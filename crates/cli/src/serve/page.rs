//! The page that shows people what goes on: files that are part of this binary, and the numbers of `rampool
//! top` for this server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rampool_net::transport::Endpoint;
use rampool_server::ServerStatus;

use super::latest::Latest;
use crate::top::{Look, Watch, compare};

/// Least time between two readings, whoever asks.
const FRESH: Duration = Duration::from_millis(500);
/// A reading that is older than this is not compared with: rates are those of the last moments.
const OLDEST: Duration = Duration::from_secs(10);

/// What the page consists of.
pub struct Page {
    latest: Arc<Latest>,
    watch: Watch,
    endpoints: Vec<Endpoint>,
    before: Option<Look>,
    now: Option<(Instant, ServerStatus, Look)>,
}

impl Page {
    pub fn new(latest: Arc<Latest>, endpoints: Vec<Endpoint>) -> Self {
        Self { latest, watch: Watch::new(Vec::new()), endpoints, before: None, now: None }
    }

    /// Content type and content of what has this path.
    pub fn resource(&mut self, path: &[u8]) -> Option<(&'static str, String)> {
        Some(match path {
            b"/" => ("text/html; charset=utf-8", include_str!("page/index.html").to_owned()),
            b"/page.css" => ("text/css; charset=utf-8", include_str!("page/page.css").to_owned()),
            b"/page.js" => ("text/javascript; charset=utf-8", include_str!("page/page.js").to_owned()),
            b"/rows.json" => ("application/json", self.rows(Instant::now())),
            _ => return None,
        })
    }

    /// The server's status, and the rows that `rampool top` would show, as JSON.
    fn rows(&mut self, now: Instant) -> String {
        let age = self.now.as_ref().map(|(made, ..)| now.duration_since(*made));
        if age.is_none_or(|age| age >= FRESH) {
            let status = self.latest.status();
            let look = self.watch.look_from(&self.endpoints, &status);
            let last = self.now.replace((now, status, look)).map(|(.., look)| look);
            self.before = last.filter(|_| age.is_some_and(|age| age <= OLDEST));
        }
        let (_, status, look) = self.now.as_ref().expect("made above, if it was not there");
        let rows = compare(self.before.as_ref().unwrap_or(look), look);
        serde_json::json!({ "status": status, "rows": rows }).to_string()
    }
}
