//! `rampool key`: makes a key file.

use anyhow::Result;
use rampool_net::key::Key;
use std::path::PathBuf;

/// Make a key file: every program that can read it may use the servers started with it
///
/// Give the same file to every server and client of a pool (--key-file). Both ends prove that they have the
/// key, and the key never travels. Only the owner can read the file. An existing file is never overwritten.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The file to create
    file: PathBuf,
}

pub fn run(args: &Args) -> Result<i32> {
    Key::generate().save_new(&args.file)?;
    println!(
        "created {}; copy it to every machine of the pool, and pass it with --key-file",
        args.file.display()
    );
    Ok(0)
}
