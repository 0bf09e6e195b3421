//! For cargo-fuzz: `cargo +nightly fuzz run --features libfuzzer counts`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rampool_fuzz::counts(data));
