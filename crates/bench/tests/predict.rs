//! `rampool predict` on a trace that `rampool launch` has just written.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

mod product;

fn rampool(arguments: &[&str]) -> Output {
    Command::new(product::rampool()).args(arguments).env("RAMPOOL_DEADLINE_S", "60").output().unwrap()
}

fn record(program: &str, protocol: &str, dir: &Path) {
    let binary = product::rampool().to_str().unwrap();
    let dir = dir.to_str().unwrap();
    let done = rampool(&[
        "launch",
        "-n",
        "3",
        "--protocol",
        protocol,
        "--trace",
        dir,
        binary,
        "example",
        program,
        "--small",
    ]);
    assert!(done.status.success(), "{done:?}");
}

/// What is said of each network, in its order.
fn predict(dir: &Path, arguments: &[&str]) -> Vec<Value> {
    let file = dir.join("predicted");
    let done =
        rampool(&[&["predict", dir.to_str().unwrap(), "--json", file.to_str().unwrap()], arguments].concat());
    assert!(done.status.success(), "{done:?}");
    let text: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    text["predictions"].as_array().unwrap().clone()
}

fn ms(row: &Value) -> f64 {
    row["replayed_ms"].as_f64().unwrap()
}

#[test]
fn every_protocols_trace_can_be_replayed() {
    for protocol in ["sc", "lrc", "hlrc", "aurc", "ibec", "auto"] {
        for program in ["water", "sor"] {
            let dir = tempfile::tempdir().unwrap();
            record(program, protocol, dir.path());
            let rows = predict(dir.path(), &["-n", "rdma100", "-n", "eth1g", "-n", "wan"]);
            let [recorded, rdma, ethernet, far] = &rows[..] else { panic!("{rows:?}") };
            assert_eq!(recorded["network"]["name"], "as recorded");
            assert!(ms(rdma) < ms(ethernet) && ms(ethernet) < ms(far), "{program}, {protocol}: {rows:?}");
            // No rank gets through a barrier without a message, and these take ten milliseconds.
            assert!(ms(far) > 20.0, "{program}, {protocol}: {rows:?}");
            for row in &rows {
                let shares =
                    row["waits_percent"].as_object().unwrap().values().map(|share| share.as_f64().unwrap());
                let sum = shares.sum::<f64>() + row["computing_percent"].as_f64().unwrap();
                assert!(sum > 0.0 && sum < 101.0, "{program}, {protocol}: {row}");
            }
        }
    }
}

#[test]
fn the_transposes_of_an_fft_do_not_pay_for_what_they_communicate() {
    let dir = tempfile::tempdir().unwrap();
    record("fft", "hlrc", dir.path());
    let rows = predict(dir.path(), &["-n", "eth100-1999"]);
    let unpaid = |row: &Value| {
        let phases = row["phases_that_do_not_pay"].as_array().unwrap();
        phases.iter().map(|phase| phase["phase"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let ethernet = &rows[1];
    assert!([1, 3, 5].iter().all(|transpose| unpaid(ethernet).contains(transpose)), "{ethernet}");
    let done = rampool(&["predict", dir.path().to_str().unwrap(), "-n", "eth100-1999"]);
    let said = String::from_utf8(done.stdout).unwrap();
    let line = said.lines().last().unwrap();
    let of = format!("{} of {}", unpaid(ethernet).len(), ethernet["phases"]);
    assert!(line.starts_with("eth100-1999") && line.contains(&of), "{said}");
}

#[test]
fn updates_by_hardware_are_no_slower_than_by_software() {
    let dir = tempfile::tempdir().unwrap();
    record("ocean", "hlrc", dir.path());
    let networks = ["-n", "eth100-1999", "-n", "loh-hb", "--slower", "100"];
    let software = predict(dir.path(), &networks);
    let hardware = predict(dir.path(), &[&networks[..], &["--updates-by-hardware"]].concat());
    for (software, hardware) in software.iter().zip(&hardware).skip(1) {
        assert!(ms(hardware) <= ms(software) * 1.01, "{hardware} {software}");
    }
}

#[test]
fn what_cannot_be_predicted_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&str]| {
        let done = rampool(arguments);
        assert!(!done.status.success(), "{done:?}");
        String::from_utf8(done.stderr).unwrap()
    };
    let path = dir.path().to_str().unwrap();
    let said = refused(&["predict", path]);
    assert!(said.contains("it was not written by `rampool launch --trace"), "{said}");
    std::fs::write(dir.path().join("rank-0.jsonl"), "{\"at_ns\":1,\"event\":\"sta").unwrap();
    let said = refused(&["predict", path]);
    assert!(said.contains("rank-0.jsonl, line 1"), "{said}");
    std::fs::write(dir.path().join("rank-0.jsonl"), "").unwrap();
    let said = refused(&["predict", path]);
    assert!(said.contains("there is nothing in it"), "{said}");
    record("sor", "hlrc", dir.path());
    let said = refused(&["predict", path, "-n", "token-ring"]);
    assert!(said.contains("unknown network token-ring"), "{said}");
}
