//! What programs must be told that size themselves by this machine's RAM: they know nothing of the pool, and
//! would spill to a disk, or refuse work, while the pool is empty.

use std::fmt::Write;

use rampool_wire::units::ByteLen;

/// A program that sizes itself.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    Duckdb,
    Dask,
    Polars,
    Java,
}

/// What to tell a program that runs with `memory` bytes in all, on a machine of `machine` bytes, as text with
/// a line end.
pub fn advice(program: Program, memory: u64, machine: u64) -> String {
    // None of their limits counts everything: what is missing there must fit into the rest.
    let share = |percent: u64| (memory / 100 * percent) >> 20;
    let here = |percent: u64| ByteLen(machine.saturating_mul(percent) / 100);
    let mut text = String::new();
    let mut say = |line: &str| writeln!(text, "{line}").expect("a string takes what is written");
    match program {
        Program::Duckdb => {
            say(&format!("DuckDB spills to its disk from 80 % of this machine's RAM on: {}.", here(80)));
            say("In each connection:");
            say(&format!("  SET memory_limit = '{}MiB';", share(85)));
            say("Start it with `rampool run`, or call rampool.attach before it is imported.");
            say(
                "The other way: keep the limit, and spill to the pool (rampool.fsspec, docs/guide/python.md).",
            );
        }
        Program::Dask => {
            say(
                "A Dask worker spills by memory_limit, which is its share of this machine's RAM. For a worker",
            );
            say("that is started with `rampool run` and has so much:");
            say(&format!("  dask worker --memory-limit {}MiB ...", share(85)));
            say(&format!("  LocalCluster(memory_limit=\"{}MiB\", ...)", share(85)));
            say(
                "The fractions spill, pause and terminate look at RAM in use here, which stays below --local.",
            );
            say("Only `target` counts values: it decides when a worker spills.");
            say("The other way: keep the limit, and spill to the pool (rampool.dask, docs/guide/python.md).");
        }
        Program::Polars => {
            say(&format!("Polars plans for this machine's RAM: {}.", ByteLen(machine)));
            say("In the program's environment:");
            // Its megabytes are decimal.
            say(&format!("  POLARS_OVERRIDE_TOTAL_MEMORY_MB={}", memory / 100 * 90 / 1_000_000));
            say("  _RJEM_MALLOC_CONF=muzzy_decay_ms:0");
            say(
                "The second line makes Polars' allocator give memory back at once that it has freed, so that the",
            );
            say(
                "pool does not keep it. Where you have set POLARS_OOC_MEMORY_BUDGET_MB, it spills to a disk from",
            );
            say("there on: raise that as well.");
        }
        Program::Java => {
            say(&format!("Java's heap ends at a quarter of this machine's RAM: {}.", here(25)));
            say("On its command line, or in JAVA_TOOL_OPTIONS:");
            say(&format!("  -Xmx{}m -XX:+UseParallelGC", share(80)));
            say(
                "Not ZGC: its heap is shared memory, which stays on this machine. Each full collection reads",
            );
            say("the live heap: what does not fit into --local comes from the pool each time.");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_below_the_memory_and_above_what_the_program_takes_by_itself() {
        let (memory, machine) = (64 << 30, 16_u64 << 30);
        for (program, option) in [
            (Program::Duckdb, "memory_limit = '"),
            (Program::Dask, "--memory-limit "),
            (Program::Polars, "POLARS_OVERRIDE_TOTAL_MEMORY_MB="),
            (Program::Java, "-Xmx"),
        ] {
            let text = advice(program, memory, machine);
            let (_, after) = text.split_once(option).expect("the option is named");
            let digits = &after[..after.find(|c: char| !c.is_ascii_digit()).expect("a unit or a line end")];
            let limit = digits.parse::<u64>().expect("a number") << 20;
            assert!(limit > machine && limit < memory, "{program:?}: {limit}");
        }
    }

    #[test]
    fn what_a_program_takes_by_itself_is_of_this_machine() {
        assert!(advice(Program::Duckdb, 64 << 30, 20 << 30).contains("RAM on: 16"));
        assert!(advice(Program::Java, 64 << 30, 20 << 30).contains("RAM: 5"));
    }
}
