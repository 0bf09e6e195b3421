//! `rampool drain`: has a server's clients move their pages to other servers; then it ends.

use anyhow::Result;
use rampool_client::pool::ServerSpec;
use rampool_net::key::Key;
use rampool_net::transport::LocalPolicy;
use rampool_server::{ServerStatus, ask_to_drain, query_status};
use rampool_wire::session::Encryption;
use rampool_wire::units::ByteLen;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_secs(5);

/// Have a server's clients move their pages elsewhere; then it ends
///
/// It grants no new leases from then on. Programs with two copies of each page, and another server, leave it
/// while they run. It ends when the last client has left, however long that takes.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Memory server: HOST[:PORT] or unix:/PATH
    #[arg(value_name = "SERVER")]
    server: ServerSpec,

    /// Key file of the pool, with the master key (see `rampool key`)
    #[arg(long, env = "RAMPOOL_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Encrypt connections: auto (those to other machines), on or off
    #[arg(long, env = "RAMPOOL_ENCRYPTION", default_value_t = Encryption::Auto, value_name = "WHEN")]
    encryption: Encryption,

    /// Seconds to wait until it has ended; it goes on draining after that
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    timeout: u64,
}

/// 0 if the server has ended, 1 if somebody has memory there still.
pub fn run(args: &Args) -> Result<i32> {
    let key = args.key_file.as_deref().map(Key::load).transpose()?;
    let policy = LocalPolicy { key, encryption: args.encryption, features: 0, ucx: None };
    let endpoint = &args.server.endpoint;
    ask_to_drain(endpoint, policy.clone(), Instant::now() + ANSWER)?;
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    let mut said = String::new();
    // A server that does not answer any more has ended.
    while let Ok(status) = query_status(endpoint, policy.clone(), Instant::now() + ANSWER) {
        let left = left(&status);
        if Instant::now() >= deadline {
            println!("{endpoint} goes on draining: {left}");
            return Ok(1);
        }
        if left != said {
            println!("{endpoint}: {left}");
            said = left;
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
