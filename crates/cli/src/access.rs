//! How a command that asks servers proves who it is.

use anyhow::Result;
use rampool_net::key::Key;
use rampool_net::transport::LocalPolicy;
use rampool_wire::session::Encryption;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct Access {
    /// Key file of the servers named here (see `rampool key`)
    #[arg(long, env = "RAMPOOL_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Encrypt connections: auto (those to other machines), on or off
    #[arg(long, env = "RAMPOOL_ENCRYPTION", default_value_t = Encryption::Auto, value_name = "WHEN")]
    encryption: Encryption,
}

impl Access {
    pub fn policy(&self) -> Result<LocalPolicy> {
        let key = self.key_file.as_deref().map(Key::load).transpose()?;
        Ok(policy(key, self.encryption))
    }
}

/// Asks for nothing beyond the handshake.
pub fn policy(key: Option<Key>, encryption: Encryption) -> LocalPolicy {
    LocalPolicy { key, encryption, features: 0, ucx: None }
}
