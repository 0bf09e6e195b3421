//! The command is no library, so what reads the traces of runs comes as files.

#![allow(dead_code, reason = "the command uses more of it")]

#[path = "../../crates/cli/src/predict/additive.rs"]
pub mod additive;
#[path = "../../crates/cli/src/predict/network.rs"]
pub mod network;
#[path = "../../crates/cli/src/predict/recording.rs"]
pub mod recording;
#[path = "../../crates/cli/src/predict/replay.rs"]
pub mod replay;
