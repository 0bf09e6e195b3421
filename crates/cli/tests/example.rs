//! The parallel programs, small, under every protocol that is legal for them, as two and as four processes. Each compares its answer with a sequential run.

use std::process::Command;

const PROTOCOLS: [&str; 5] = ["sc", "lrc", "hlrc", "aurc", "ibec"];

fn rampool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RAMPOOL_")) {
        command.env_remove(name);
    }
    // A run that hangs says what in.
    command.env("RAMPOOL_DEADLINE_S", "60").env("RAMPOOL_JOIN_S", "60");
    command
}

/// What is listed as legal, by program.
fn listed() -> Vec<(String, Vec<String>)> {
    let output = rampool().args(["example", "list"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let legal = |words: &[String]| words.iter().filter(|word| PROTOCOLS.contains(&word.as_str())).cloned().collect();
    text.lines().map(words).map(|words| (words[0].clone(), legal(&words))).collect()
}

fn all_are_right(protocol: &str, ranks: &str) {
    let output = rampool()
        .args(["launch", "-n", ranks, "--protocol", protocol])
        .arg(env!("CARGO_BIN_EXE_rampool"))
        .args(["example", "all", "--small"])
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{protocol}, {ranks} ranks: {output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for (program, legal) in listed() {
        let told = text.lines().any(|line| line.starts_with(&format!("{program} ")) && line.ends_with("verified"));
        assert_eq!(told, legal.iter().any(|legal| legal == protocol), "{program} under {protocol}: {text}");
    }
}

#[test]
fn the_list_names_all_programs() {
    let listed = listed();
    assert_eq!(listed.len(), 9);
    assert!(listed.iter().all(|(program, legal)| legal.len() == if program == "tasks" { 4 } else { 5 }), "{listed:?}");
}

#[test]
fn two_ranks_compute_what_one_does() {
    for protocol in PROTOCOLS {
        all_are_right(protocol, "2");
    }
}

#[test]
fn four_ranks_compute_what_one_does() {
    for protocol in PROTOCOLS {
        all_are_right(protocol, "4");
    }
}

#[test]
fn a_program_is_refused_where_it_is_not_legal() {
    let output = rampool().args(["example", "tasks", "--small"]).env("RAMPOOL_PROTOCOL", "ibec").output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("tasks relies on what ibec does not promise") && said.contains("sc, lrc, hlrc, aurc"), "{said}");
}
