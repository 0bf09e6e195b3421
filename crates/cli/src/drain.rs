//! `rampool drain`: has a server's clients move their pages to other servers; then it ends.

use anyhow::{Context, Result};
use rampool_client::pool::ServerSpec;
use rampool_server::{ServerStatus, ask_to_drain, query_status};
use rampool_wire::units::ByteLen;
use std::time::{Duration, Instant};

use crate::access::Access;

const LOOK_EVERY: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_secs(5);

/// Have a server's clients move their pages elsewhere; then it ends
///
/// It grants no new leases from then on. Programs with two copies of each page, and another server, leave it
/// while they run. It ends when the last client has left, however long that takes. The key must be the master
/// key.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Memory server: HOST[:PORT] or unix:/PATH
    #[arg(value_name = "SERVER")]
    server: ServerSpec,

    #[command(flatten)]
    access: Access,

    /// Seconds to wait until it has ended; it goes on draining after that
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    timeout: u64,
}

/// 0 if the server has ended, 1 if somebody has memory there still.
pub fn run(args: &Args) -> Result<i32> {
    let policy = args.access.policy()?;
    let endpoint = &args.server.endpoint;
    ask_to_drain(endpoint, policy.clone(), Instant::now() + ANSWER)?;
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    let mut said = String::new();
    loop {
        let answer = query_status(endpoint, policy.clone(), Instant::now() + ANSWER);
        let is_over = Instant::now() >= deadline;
        match answer {
            Err(error) if error.nobody_listens() => break,
            // Another one is there.
            Ok(status) if !status.draining => break,
            Ok(status) => {
                let left = left(&status);
                if is_over {
                    println!("{endpoint} goes on draining: {left}");
                    return Ok(1);
                }
                if left != said {
                    println!("{endpoint}: {left}");
                    said = left;
                }
            }
            // It may hold pages still.
            Err(error) if is_over || !error.may_pass() => {
                return Err(error).context(format!("whether {endpoint} has ended is not known"));
            }
            Err(_) => {}
        }
        std::thread::sleep(LOOK_EVERY);
    }
    println!("{endpoint} has ended");
    Ok(0)
}

fn left(status: &ServerStatus) -> String {
    let used = status.leases.iter().map(|lease| lease.used_bytes).sum();
    format!("{} in use by {} leases", ByteLen(used), status.leases.len())
}
