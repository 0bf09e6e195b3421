//! `rampool doctor`: what this machine allows, and how to fix what it does not.

mod advice;
mod swap;

use anyhow::Result;
use rampool_kernel::probe::{Capabilities, FaultMode};
use rampool_kernel::uffd::{Features, OpenError};
use rampool_net::transport::{SAME_HOST_VARIABLE, probe_rings, probe_ucx, zero_copy};
use rampool_pinning::path::crossover;
use rampool_wire::units::ByteLen;

use crate::available;

/// Show what this machine allows, how page faults will be caught, and how to fix what is missing
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Show only what to raise in a program that sizes itself by this machine's RAM
    #[arg(long = "for", value_name = "PROGRAM")]
    program: Option<advice::Program>,

    /// With --for: the memory that the program is to use in all, local and leased [default: twice this
    /// machine's]
    #[arg(long, value_name = "SIZE", requires = "program")]
    memory: Option<ByteLen>,
}

/// The exit code is 0 if programs run in the best fault mode, 1 if in another, 2 if in none.
pub fn run(args: &Args) -> Result<i32> {
    if let Some(program) = args.program {
        let machine = available::in_all()?;
        let memory = args.memory.map_or(machine.saturating_mul(2), |memory| memory.0);
        println!("For {} in all (--memory names another amount):", ByteLen(memory));
        print!("{}", advice::advice(program, memory, machine));
        return Ok(0);
    }
    let found = Capabilities::probe();
    let best = found.best_fault_mode();
    show(&found);
    println!();
    if best == FaultMode::Segv && found.segv.is_err() {
        println!("No fault mode works here: `rampool run` cannot catch page faults.");
        fix(&found);
        return Ok(2);
    }
    println!("`rampool run` will use the fault mode `{}`: {}", best.name(), meaning(best));
    if best == FaultMode::Full {
        return Ok(0);
    }
    println!("because {}", reason(&found));
    if best == FaultMode::Segv && found.most_mappings < 1 << 18 {
        println!(
            "On this fault mode, a large --local needs larger pages (--page-size 64K) or: sysctl -w \
             vm.max_map_count=1048576"
        );
    }
    fix(&found);
    Ok(1)
}

/// What this machine has.
fn show(found: &Capabilities) {
    println!("kernel             {}", found.kernel);
    println!(
        "page size          {} bytes{}",
        found.page_bytes,
        if found.page_bytes == 4096 { "" } else { ": rampool needs 4096" }
    );
    println!("userfaultfd        {}", describe(&found.full));
    println!("  for user code    {}", describe(&found.user_mode));
    if let Ok(features) = found.full.as_ref().or(found.user_mode.as_ref()) {
        for (feature, name, without) in [
            (Features::WP, "write-protect", "userfaultfd cannot be used (Linux 5.7)"),
            (Features::EVENTS_MAPPING, "mapping events", "userfaultfd cannot be used"),
            (Features::MOVE, "move", "pages leave by copying, which is slower (Linux 6.8 moves them)"),
            (
                Features::POISON,
                "poison",
                "when servers are lost, a program that uses the library ends at once (Linux 6.6 has it)",
            ),
        ] {
            let has = features.has(feature);
            println!("  {name:<17}{}", if has { "yes".to_owned() } else { format!("no: {without}") });
        }
    }
    println!(
        "  fork events      {}",
        if found.fork_events {
            "yes"
        } else {
            "no (CAP_SYS_PTRACE): fork(3) is still followed, a bare clone is not"
        }
    );
    println!(
        "SIGSEGV            {}",
        found.segv.as_ref().map_or_else(|error| format!("no: {error}"), |()| "yes".to_owned())
    );
    println!("  mappings         at most {} (vm.max_map_count)", found.most_mappings);
    println!("huge pages         {}", found.transparent_hugepages);
    println!("memory             {}", memory());
    println!("lockable memory    {}", lockable(found.memlock_bytes));
    println!("processors         {}", rampool_kernel::thread::allowed_cpus().len());
    same_host();
    zero_copy();
    fabrics();
    swap::show();
}

/// How to reach servers on this machine.
fn same_host() {
    match probe_rings() {
        Ok(bytes) => println!(
            "same host          shared memory, {} KiB each way, to servers named unix:PATH \
             ({SAME_HOST_VARIABLE}, or the option same-host: auto, rings, socket)",
            bytes >> 10
        ),
        Err(error) => println!(
            "same host          no shared memory ({error}): servers named unix:PATH are reached through \
             their socket"
        ),
    }
}

/// Whether bytes can be sent without a copy, and from what length that pays.
fn zero_copy() {
    let costs = match zero_copy::measure() {
        Ok(costs) => costs,
        Err(error) => return println!("zero copy          no: {error}"),
    };
    let from = match crossover(&costs) {
        Some(bytes) => format!("from {} KiB on, pinning costs less than a copy", bytes >> 10),
        None => "pinning costs more than a copy at every length".to_owned(),
    };
    println!(
        "zero copy          io_uring; {from} (RAMPOOL_ZERO_COPY, or the option zero-copy, sets another \
         length)"
    );
    for cost in costs {
        let micros = |ns: u64| ns as f64 / 1000.0;
        println!(
            "  {:>5} KiB        copied in {:.1} us, pinned and unpinned in {:.1} us",
            cost.bytes >> 10,
            micros(cost.copy_ns),
            micros(cost.zero_copy_ns)
        );
    }
    println!("  to this machine  never: loopback and Unix sockets always copy");
    println!("  encrypted        never: encryption copies the bytes");
}

/// Whether servers can be reached over UCX, and by which transports.
fn fabrics() {
    match probe_ucx() {
        Ok((version, transports)) => {
            println!(
                "UCX                {version}, to servers named ucx:HOST:PORT (UCX_TLS and UCX_NET_DEVICES \
                 choose among its transports)"
            );
            println!(
                "  transports       {}",
                if transports.is_empty() { "none".to_owned() } else { transports.join(" ") }
            );
            let rdma =
                ["rc_", "dc_", "ud_"].iter().any(|kind| transports.iter().any(|name| name.starts_with(kind)));
            println!(
                "  RDMA             {}",
                if rdma {
                    "yes"
                } else {
                    "no device: UCX uses sockets here, and rampool's own sockets are faster"
                }
            );
            println!("  in `run`         never: UCX changes the process that loads it");
        }
        Err(error) => println!("UCX                no: {error}"),
    }
}

/// Why the best fault mode is not available.
fn reason(found: &Capabilities) -> String {
    let why = |found: &Result<Features, OpenError>| match found {
        Ok(_) => "this kernel's userfaultfd lacks write protection or mapping events".to_owned(),
        Err(error) => error.to_string(),
    };
    match found.best_fault_mode() {
        FaultMode::Full => "nothing is missing".to_owned(),
        FaultMode::UserMode => format!("for the kernel's own faults: {}", why(&found.full)),
        FaultMode::Segv => format!("for user code: {}", why(&found.user_mode)),
    }
}

/// The exact fix.
fn fix(found: &Capabilities) {
    println!();
    if matches!(found.full, Err(OpenError::NotInKernel)) {
        println!("For a better fault mode, run a kernel with CONFIG_USERFAULTFD.");
        return;
    }
    if found.full.is_ok() {
        println!("For a better fault mode, run a newer kernel: Linux 5.7 at least, 6.8 for moving pages.");
        return;
    }
    println!("For the best fault mode, as root, one of:");
    println!(
        "  sysctl -w vm.unprivileged_userfaultfd=1          (every user; put it in /etc/sysctl.d/ to keep it)"
    );
    println!(
        "  chgrp GROUP /dev/userfaultfd && chmod g+rw /dev/userfaultfd   (members of a group; Linux 6.1 and \
         later)"
    );
    println!(
        "  setpriv --reuid USER --init-groups --inh-caps=+sys_ptrace --ambient-caps=+sys_ptrace rampool run \
         ...   (this adds fork events)"
    );
    if found.user_mode.is_err() {
        println!(
            "In a container the system call itself may be blocked: allow `userfaultfd` in its seccomp \
             profile, or add CAP_SYS_PTRACE."
        );
    }
}

fn describe(found: &Result<Features, OpenError>) -> String {
    match found {
        Ok(features) => format!("yes (features {:#x})", features.0),
        Err(error) => format!("no: {error}"),
    }
}

fn meaning(fault_mode: FaultMode) -> &'static str {
    match fault_mode {
        FaultMode::Full => "faults of the program and of system calls on its behalf",
        FaultMode::UserMode => "faults of the program; buffers of system calls are made resident first",
        FaultMode::Segv => "protected pages and a signal handler; system calls as on `uffd-user`",
    }
}

fn memory() -> String {
    match (available::bytes(), available::in_all()) {
        (Ok(bytes), Ok(in_all)) => {
            format!(
                "{} available of {} (of this machine, or what a container leaves of it)",
                ByteLen(bytes),
                ByteLen(in_all)
            )
        }
        (Err(error), _) | (_, Err(error)) => format!("unknown: {error}"),
    }
}

fn lockable(bytes: u64) -> String {
    match bytes {
        u64::MAX => "unlimited".to_owned(),
        // SAFETY: geteuid has no preconditions.
        _ if unsafe { libc::geteuid() } == 0 => "unlimited (root)".to_owned(),
        bytes => format!(
            "{} KiB: `rampool serve` locks what it lends (LimitMEMLOCK=infinity, or ulimit -l)",
            bytes / 1024
        ),
    }
}
