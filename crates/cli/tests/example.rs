//! The parallel programs, small, under every protocol that is legal for them, as two and as four processes.
//! Each compares its answer with a sequential run.

use std::process::Command;

mod settings;

const PROTOCOLS: [&str; 6] = ["sc", "lrc", "hlrc", "aurc", "ibec", "auto"];

fn rampool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    settings::clear(&mut command);
    // A run that hangs says what in.
    command.env("RAMPOOL_DEADLINE_S", "60").env("RAMPOOL_JOIN_S", "60");
    command
}

/// What is listed as legal, by program.
fn listed() -> Vec<(String, Vec<String>)> {
    let output = rampool().args(["example", "list"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let legal =
        |words: &[String]| words.iter().filter(|word| PROTOCOLS.contains(&word.as_str())).cloned().collect();
    text.lines().map(words).map(|words| (words[0].clone(), legal(&words))).collect()
}

fn all_are_right(protocol: &str, ranks: &str, more: &[&str]) {
    let output = rampool()
        .args(["launch", "-n", ranks, "--protocol", protocol])
        .args(more)
        .arg(env!("CARGO_BIN_EXE_rampool"))
        .args(["example", "all", "--small"])
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{protocol}, {ranks} ranks: {output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for (program, legal) in listed() {
        let told =
            text.lines().any(|line| line.starts_with(&format!("{program} ")) && line.ends_with("verified"));
        assert_eq!(told, legal.iter().any(|legal| legal == protocol), "{program} under {protocol}: {text}");
    }
}

#[test]
fn the_list_names_all_programs() {
    let listed = listed();
    assert_eq!(listed.len(), 9);
    assert!(
        listed.iter().all(|(program, legal)| legal.len() == if program == "tasks" { 5 } else { 6 }),
        "{listed:?}"
    );
}

#[test]
fn two_ranks_compute_what_one_does() {
    for protocol in PROTOCOLS {
        all_are_right(protocol, "2", &[]);
    }
}

#[test]
fn four_ranks_compute_what_one_does() {
    for protocol in PROTOCOLS {
        all_are_right(protocol, "4", &[]);
    }
}

#[test]
fn whole_programs_run_with_pages_of_another_size() {
    for protocol in PROTOCOLS {
        all_are_right(protocol, "2", &["--page-size", "8K"]);
    }
    all_are_right("hlrc", "2", &["--page-size", "64K"]);
}

#[test]
fn a_page_of_no_such_size_is_refused() {
    let said = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for size in ["2K", "6K", "128K", "many"] {
        let launched = said(rampool().args(["launch", "-n", "2", "--page-size", size, "true"]));
        let wanted = "a shared page has 4K, 8K, 16K, 32K or 64K";
        assert!(launched.contains("--page-size") && launched.contains(wanted), "{launched}");
        let alone = said(rampool().args(["example", "fft", "--small"]).env("RAMPOOL_SHARED_PAGE_SIZE", size));
        let wanted = format!("RAMPOOL_SHARED_PAGE_SIZE=\"{size}\" is not 4K, 8K, 16K, 32K or 64K");
        assert!(alone.contains(&wanted), "{alone}");
    }
}

/// S4, figure 11. A rank reads its columns of every other rank's rows. S4 counts 128 and 192 faults on two
/// and four nodes for 512 rows of 8 KB, which fits pages of two rows.
#[test]
fn a_transpose_faults_once_for_each_page_of_the_other_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("stats");
    let faults = |protocol, points, ranks: u64, page| {
        let output = rampool()
            .args(["launch", "-n", &ranks.to_string(), "--protocol", protocol, "--page-size", page])
            .arg(format!("--stats={}", file.display()))
            .arg(env!("CARGO_BIN_EXE_rampool"))
            .args(["example", "fft", points])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let reports: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let of = |report: &serde_json::Value| report["counts"]["read faults"].as_u64().unwrap();
        reports.as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    for protocol in ["sc", "lrc"] {
        for (points, page, two, four) in [
            ("262144", "16K", 128, 192),
            ("262144", "8K", 256, 384),
            ("262144", "4K", 256, 384),
            ("65536", "4K", 128, 192),
            ("65536", "8K", 64, 96),
        ] {
            for (ranks, one) in [(2, two), (4, four)] {
                let found = faults(protocol, points, ranks, page);
                let transposes = 3;
                assert!(
                    found.len() as u64 == ranks && found.iter().all(|&count| count == transposes * one),
                    "{points} points, {ranks} ranks, pages of {page}, {protocol}: {found:?}, not {one} each"
                );
            }
        }
    }
}

#[test]
fn a_program_is_refused_where_it_is_not_legal() {
    let output =
        rampool().args(["example", "tasks", "--small"]).env("RAMPOOL_PROTOCOL", "ibec").output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("tasks needs guarantees that ibec does not give")
            && said.contains("sc, lrc, hlrc, aurc"),
        "{said}"
    );
}

#[test]
fn statistics_add_up_and_the_trace_tells_of_every_message() {
    let dir = tempfile::tempdir().unwrap();
    let stats = dir.path().join("stats.json");
    let mut command = rampool();
    command
        .args(["launch", "-n", "2", "--protocol", "hlrc"])
        .arg(format!("--stats={}", stats.display()))
        .arg("--trace")
        .arg(dir.path());
    let output =
        command.arg(env!("CARGO_BIN_EXE_rampool")).args(["example", "hash", "--small"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let ranks: Vec<serde_json::Value> =
        serde_json::from_str(&std::fs::read_to_string(&stats).unwrap()).unwrap();
    assert_eq!(ranks.len(), 2);
    let mut sent = 0;
    for rank in &ranks {
        let seconds = |name: &str| rank[format!("{name}_s")].as_f64().unwrap();
        let parts = [
            "computing",
            "read_fault",
            "write_fault",
            "requests",
            "lock",
            "unlock",
            "barrier",
            "word",
            "other",
        ];
        let sum: f64 = parts.map(seconds).iter().sum();
        assert!((sum - seconds("elapsed")).abs() < 1e-6, "{rank}");
        assert!(seconds("lock") > 0.0 && seconds("barrier") > 0.0, "{rank}");
        assert_eq!(rank["counts"]["lock acquires"], 300, "{rank}");
        sent += rank["sent"]
            .as_object()
            .unwrap()
            .values()
            .map(|kind| kind["messages"].as_u64().unwrap())
            .sum::<u64>();
    }
    let (mut sends, mut receives) = (0, 0);
    for rank in 0..2 {
        let text = std::fs::read_to_string(dir.path().join(format!("rank-{rank}.jsonl"))).unwrap();
        for line in text.lines() {
            let event: serde_json::Value = serde_json::from_str(line).unwrap();
            sends += u64::from(event["event"] == "send");
            receives += u64::from(event["event"] == "receive");
        }
    }
    // The trace is of the whole run, the statistics of its parallel part.
    assert!(sent > 0 && sends > sent && sends == receives, "{sent} {sends} {receives}");
}
