//! `rampool key`: makes a key file.

use anyhow::{Context, Result};
use rampool_net::key::Key;
use rampool_wire::tenant::{TenantId, TenantName};
use std::path::PathBuf;

/// Make a key file: every program that can read it may use the servers started with it
///
/// Give the same file to every server and client of a pool (--key-file). Both ends prove that they have the
/// key, and the key never travels. Only the owner can read the file. An existing file is never overwritten.
///
/// To tell tenants apart, keep that key, the master, on the servers, and give each tenant a key derived from
/// it: rampool key --tenant alice --from pool.key alice.key
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The file to create
    file: PathBuf,

    /// Derive the key of this tenant: 1 to 31 letters, digits, `.`, `_` and `-`
    #[arg(long, value_name = "NAME", requires = "from")]
    tenant: Option<TenantName>,

    /// Master key file to derive it from
    #[arg(long, value_name = "FILE", requires = "tenant")]
    from: Option<PathBuf>,

    /// Which key of the tenant: take the next number after revoking one
    #[arg(long, value_name = "N", default_value_t = 1, requires = "tenant")]
    generation: u32,
}

pub fn run(args: &Args) -> Result<i32> {
    let file = args.file.display();
    let (Some(name), Some(from)) = (args.tenant, &args.from) else {
        Key::generate().save_new(&args.file)?;
        println!("created {file}; copy it to every machine of the pool, and pass it with --key-file");
        return Ok(0);
    };
    let tenant = TenantId { name, generation: args.generation };
    let key = Key::load(from)?.derive(tenant);
    key.with_context(|| format!("cannot derive a key from {}", from.display()))?.save_new(&args.file)?;
    println!(
        "created {file} for tenant {tenant}; give it to that tenant, and keep {} to the servers",
        from.display()
    );
    Ok(0)
}
