//! The tables of the protocols' pages name the tests behind each row; those tests exist.

use std::path::Path;

const SOURCES: [&str; 7] = [
    include_str!("counts.rs"),
    include_str!("failures.rs"),
    include_str!("generated.rs"),
    include_str!("litmus.rs"),
    include_str!("mutants.rs"),
    include_str!("papers.rs"),
    include_str!("search.rs"),
];

fn is_test(name: &str) -> bool {
    let (function, listed) = (format!("fn {name}("), format!(" {name}: "));
    SOURCES.iter().any(|source| source.contains(&function) || source.contains(&listed))
}

#[test]
fn every_row_of_every_protocols_table_names_tests_that_exist() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/internals/protocols");
    let mut rows = 0;
    for protocol in ["sc", "lrc", "hlrc", "aurc", "ibec", "auto"] {
        let text = std::fs::read_to_string(folder.join(format!("{protocol}.md"))).unwrap();
        let table = text.lines().filter(|line| line.starts_with('|')).skip(2);
        for row in table {
            rows += 1;
            let last = row.trim_end_matches([' ', '|']).rsplit('|').next().unwrap();
            let names: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
            assert!(!names.is_empty(), "{protocol}: no test in {row}");
            for name in names {
                assert!(is_test(name), "{protocol}: there is no test {name}");
            }
        }
    }
    assert!(rows > 40, "{rows} rows");
}
