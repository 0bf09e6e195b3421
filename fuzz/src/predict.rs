//! The command is not a library, so the modules that read traces are included as files.

#![allow(dead_code, reason = "the command uses more of it")]

#[path = "../../crates/bench/src/predict/additive.rs"]
pub mod additive;
#[path = "../../crates/bench/src/predict/network.rs"]
pub mod network;
#[path = "../../crates/bench/src/predict/recording.rs"]
pub mod recording;
#[path = "../../crates/bench/src/predict/replay.rs"]
pub mod replay;
