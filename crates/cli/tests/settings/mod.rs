//! Programs that the tests start take no settings from the environment of the tests.

use std::process::Command;

pub fn clear(command: &mut Command) {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RAMPOOL_")) {
        command.env_remove(name);
    }
}
