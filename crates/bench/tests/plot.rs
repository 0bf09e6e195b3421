//! `rampool plot`, and the pictures of `rampool launch --plot`.

use std::process::Command;

mod product;
#[path = "../../cli/tests/settings/mod.rs"]
mod settings;

fn rampool() -> Command {
    let mut command = Command::new(product::rampool());
    settings::clear(&mut command);
    // A run that hangs says what in.
    command.env("RAMPOOL_DEADLINE_S", "60").env("RAMPOOL_JOIN_S", "60");
    command
}

/// What a picture says of each part of its bars: rank, category and share in percent.
fn drawn(picture: &std::path::Path) -> Vec<(u64, String, f64)> {
    let svg = std::fs::read_to_string(picture).unwrap();
    let parts = svg.split("<title>rank ").skip(1).map(|part| part.split_once("</title>").unwrap().0);
    let told = parts.map(|part| {
        let ((rank, rest), (_, share)) = (part.split_once(", ").unwrap(), part.rsplit_once(", ").unwrap());
        let name = rest.split_once(':').unwrap().0;
        (rank.parse().unwrap(), name.to_owned(), share.trim_end_matches(" %").parse().unwrap())
    });
    told.collect()
}

#[test]
fn a_plot_is_drawn_of_one_run_at_once_and_of_several_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut own = Vec::new();
    for protocol in ["hlrc", "sc"] {
        let mut command = rampool();
        command
            .args(["launch", "-n", "2", "--protocol", protocol, "--plot"])
            .arg(at(&format!("{protocol}.svg")));
        command.arg(format!("--stats={}", at(&format!("{protocol}.json")).display()));
        let output = command.arg(product::rampool()).args(["example", "hash", "--small"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let picture = at(&format!("{protocol}.svg"));
        assert!(
            std::fs::read_to_string(&picture)
                .unwrap()
                .contains("<title>rampool example hash --small</title>")
        );
        let parts = drawn(&picture);
        let stats: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(at(&format!("{protocol}.json"))).unwrap()).unwrap();
        for (rank, name, share) in &parts {
            let of = |name: &str| {
                stats[usize::try_from(*rank).unwrap()][format!("{}_s", name.replace(' ', "_"))]
                    .as_f64()
                    .unwrap()
            };
            // On a busy machine they are more than the time that passed: threads wait for each other.
            let total: f64 = parts.iter().filter(|(of, ..)| of == rank).map(|(_, name, _)| of(name)).sum();
            assert!((of(name) / total * 100.0 - share).abs() <= 0.51, "{rank} {name} {share}: {stats}");
        }
        own.extend(parts);
    }
    let mut command = rampool();
    command
        .arg("plot")
        .args([at("hlrc.json"), at("sc.json")])
        .arg("--output")
        .arg(at("both.svg"))
        .args(["--title", "R&D"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(drawn(&at("both.svg")), own, "the bars of one run, then those of the other");
    let svg = std::fs::read_to_string(at("both.svg")).unwrap();
    assert!(svg.contains(">R&amp;D</text>") && svg.contains(">hlrc, ") && svg.contains(">sc, "), "{svg}");
}

#[test]
fn a_plot_says_what_it_cannot_draw() {
    let dir = tempfile::tempdir().unwrap();
    let (empty, other) = (dir.path().join("empty.json"), dir.path().join("other.json"));
    std::fs::write(&empty, "[]\n").unwrap();
    std::fs::write(&other, "{}\n").unwrap();
    for (file, words) in
        [(&empty, "none finished its run"), (&other, "is not a file of `rampool launch --stats=FILE`")]
    {
        let output =
            rampool().arg("plot").arg(file).arg("-o").arg(dir.path().join("x.svg")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains(words) && said.contains(file.to_str().unwrap()),
            "{said}"
        );
        assert!(!dir.path().join("x.svg").exists());
    }
    let picture = dir.path().join("y.svg");
    let output = rampool()
        .args(["launch", "-n", "2", "--plot"])
        .arg(&picture)
        .args(["sh", "-c", "exit 3"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("no rank finished") && said.contains("exit code 3") && output.status.code() == Some(3),
        "{said}"
    );
}
