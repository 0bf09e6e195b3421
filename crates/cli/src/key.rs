//! `rampool key`: makes a key file.

use anyhow::Result;
use rampool::key::Key;
use std::path::PathBuf;

/// Make a key file: whoever has it may use the servers started with it
///
/// Give the same file to every server and client of a pool (--key-file). Both ends prove that they have the key; it never travels. The file is
/// readable for its owner only, and an existing file is never overwritten.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The file to make
    file: PathBuf,
}

pub fn run(args: &Args) -> Result<i32> {
    Key::generate().save_new(&args.file)?;
    println!("made {}; copy it to every machine of the pool, and name it with --key-file", args.file.display());
    Ok(0)
}
