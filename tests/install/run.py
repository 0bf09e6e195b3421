#!/usr/bin/env python3
"""What `make install` installs, used without the checkout: the command, the libraries, manual pages, and
DLM-M's interface.

The DLM-M tests have a small world of their own, network and mount namespaces in which `calhost` and
`memhost1` to `memhost3` are names of one machine, so that its file and its commands stand here exactly as in
the paper. That needs root, or user namespaces.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import procs  # noqa: E402
from harness.suite import Suite  # noqa: E402
from harness.world import MIB, ROOT, TARGET, check, skip  # noqa: E402
from install import packages  # noqa: E402

HERE = Path(__file__).resolve().parent
suite = Suite("installed")
for each in (packages.debian_packages, packages.image, packages.chart, packages.page):
    suite.test()(each)

# The paper's file: host, megabytes, comments; the first line is the compute node. Only the
# sizes are this test's.
DLMM_CONF = """\
calhost      16 // 16MB compute node
memhost1     32 // 32MB memory server 1
memhost2     32 // 32MB memory server 2
memhost3     64 // 64MB memory server 3
"""
HOSTS = {"calhost": "127.0.0.1", "memhost1": "127.0.1.1", "memhost2": "127.0.1.2", "memhost3": "127.0.1.3"}
# Of the array of tests/install/paper.c: 24 Mi numbers, 0 to 999 again and again.
SUM = f"sum = {sum(range(1000)) * (24 * MIB // 1000) + sum(range(24 * MIB % 1000))}\n"


def installed(world, destdir=""):
    """`make install` without building again; returns the prefix."""
    prefix = world.dir / "prefix"
    env = {**os.environ, "PREFIX": str(prefix), "DESTDIR": str(destdir), "TARGET": str(TARGET)}
    done = subprocess.run(
        [ROOT / "scripts/install.sh"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    check(done.returncode == 0, f"installing ends with {done.returncode}: {done.stdout}{done.stderr}")
    return prefix


def must(argv, *, env=None, cwd=None, timeout=120):
    done = subprocess.run(
        [str(a) for a in argv],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    check(
        done.returncode == 0,
        f"{' '.join(map(str, argv))} ends with {done.returncode}: {done.stdout}{done.stderr}",
    )
    return done.stdout


def library_flags(prefix):
    env = {"PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    return must(["pkg-config", "--cflags", "--libs", "rampool"], env=env).split()


def files(directory):
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir())


# ---- what is there


@suite.test()
def everything_in_its_place(world, scale):
    destdir = world.dir / "dest"
    prefix = installed(world, destdir)
    found = files(Path(f"{destdir}{prefix}"))
    version = must([TARGET / "release/rampool", "--version"]).split()[1]
    for wanted in (
        "bin/rampool", "bin/rampool-bench", "bin/dlmm_server", "lib/rampool/librampool_agent.so",
        "lib/rampool/librampool_agent_io.so", "include/rampool.h", "include/dlmm.h", "include/tsm.h",
        "include/rampool_parmacs.h", "include/rampool_mpi.h", "share/rampool/rampool.m4",
        "share/rampool/rampool_mpi.py", "lib/librampool.so", f"lib/librampool.so.{version}",
        "lib/librampool.a", "lib/pkgconfig/rampool.pc", "lib/cmake/rampool/rampool-config.cmake",
        "lib/cmake/rampool/rampool-config-version.cmake", "share/man/man1/rampool.1",
        "share/man/man1/rampool-run.1", "share/man/man1/rampool-serve.1",
        "share/bash-completion/completions/rampool.bash", "share/zsh/site-functions/_rampool",
        "share/fish/vendor_completions.d/rampool.fish",
    ):
        check(wanted in found, f"{wanted} is not installed, only {found}")
    for name in found:
        if name.endswith((".pc", ".cmake")):
            check(
                str(destdir) not in Path(f"{destdir}{prefix}/{name}").read_text(),
                f"{name} names the staging directory",
            )
    env = {**os.environ, "PREFIX": str(prefix), "DESTDIR": str(destdir)}
    subprocess.run([ROOT / "scripts/install.sh", "--remove"], env=env, check=True, timeout=60)
    left = files(destdir)
    check(not left, f"uninstalling leaves {left}")


@suite.test()
def installed_command_finds_agent(world, scale):
    rampool = installed(world) / "bin/rampool"
    program = "b = bytearray(48 << 20); b[::4096] = b'x' * (len(b) // 4096); print(sum(b[::4096]))"
    stats = world.dir / "stats"
    run = [
        rampool, "run", "--local", "16M", "--memory", "256M", f"--stats={stats}", "--", "python3", "-c",
        program,
    ]
    # Not from the checkout, which has a built agent.
    out = must(run, cwd="/")
    check(out == f"{(48 << 20) // 4096 * ord('x')}\n", f"it says {out!r}")
    said = stats.read_text()
    check(re.search(r"^ *faults +[1-9]", said, re.M), f"no page left: {said}")


@suite.test()
def manual_pages_and_completions(world, scale):
    prefix = installed(world)
    for page in (prefix / "share/man/man1").iterdir():
        text = page.read_text()
        check(text.count(".SH") >= 2, f"{page.name} is no manual page: {text[:200]}")
    script = f". {prefix}/share/bash-completion/completions/rampool.bash && complete -p rampool"
    check("rampool" in must(["bash", "-c", script]), "bash gets no completions")


@suite.test()
def the_c_of_the_manual_compiles(world, scale):
    flags, seen = library_flags(installed(world)), 0
    for document in sorted((ROOT / "docs").rglob("*.md")):
        for number, block in enumerate(re.findall(r"^```c\n(.*?)^```", document.read_text(), re.M | re.S)):
            if not re.search(r"^\w[^;=]*\)\s*\{", block, re.M):
                # Statements, with what a program around them would have.
                block = (
                    "#include <stdio.h>\n#include <stdlib.h>\n#include <rampool.h>\nvoid shown(size_t "
                    f"bytes);\nvoid shown(size_t bytes)\n{{\n{block}}}\n"
                )
            source = world.dir / f"{document.stem}{number}.c"
            source.write_text(block)
            compiler = "mpicc" if "rampool_mpi.h" in block else "cc"
            must(
                [
                    compiler,
                    "-Wall",
                    "-Werror",
                    "-Wno-unused-variable",
                    "-c",
                    source,
                    "-o",
                    source.with_suffix(".o"),
                    *[f for f in flags if not f.startswith("-l")],
                ]
            )
            seen += 1
    check(seen >= 3, f"only {seen} pieces of C in the manual")


@suite.test()
def pkg_config_and_cmake(world, scale):
    prefix = installed(world)
    flags = library_flags(prefix)
    examples = ROOT / "crates/capi/examples/c"
    for source in sorted(examples.glob("*.c")):
        must(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", source, "-o", world.dir / source.stem, *flags])
        check(os.path.exists(world.dir / source.stem), f"{source.name} gives no program")
    # The headers are C++ as well, and what C was when the paper was written.
    both = world.dir / "both.cpp"
    both.write_text(
        "#include <rampool.h>\n#include <dlmm.h>\n#include <tsm.h>\nint main() { return rampool_version() == "
        "nullptr; }\n"
    )
    must(["c++", "-Wall", "-Wextra", "-Werror", both, "-o", world.dir / "both", *flags])
    must([world.dir / "both"], env={"LD_LIBRARY_PATH": str(prefix / "lib")})
    must(
        [
            "cc", "-std=c89", "-pedantic", "-Wall", "-Wextra", "-Werror", HERE / "paper.c", "-o",
            world.dir / "paper", *flags,
        ]
    )
    if (
        subprocess.run(["sh", "-c", "command -v cmake"], stdout=subprocess.DEVNULL, check=False).returncode
        == 0
    ):
        must(["cmake", "-S", examples, "-B", world.dir / "cmake", f"-DCMAKE_PREFIX_PATH={prefix}"])
        must(["cmake", "--build", world.dir / "cmake"])
    else:
        scale.note("there is no cmake on this machine")


@suite.test()
def parallel_programs(world, scale):
    """Installed as they say: a program for tsm.h, and one with the PARMACS macros that pkg-config names."""
    prefix = installed(world)
    flags = library_flags(prefix)
    env = {"PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig"), "LD_LIBRARY_PATH": str(prefix / "lib")}
    examples = ROOT / "crates/capi/examples"
    launch = [prefix / "bin/rampool", "launch", "-n", "2"]
    must(["cc", "-std=c99", examples / "c/tsm_sum.c", "-o", world.dir / "tsm_sum", *flags])
    out = must([*launch, world.dir / "tsm_sum", "1000"], env=env)
    check(out == "sum of 1000 numbers on 2 nodes: 499500\n", f"it says {out!r}")
    macros = must(["pkg-config", "--variable=parmacs", "rampool"], env=env).strip()
    (world.dir / "tasks.c").write_text(must(["m4", macros, examples / "parmacs/tasks.C"]))
    must(["cc", world.dir / "tasks.c", "-o", world.dir / "tasks", *flags])
    out = must([*launch, world.dir / "tasks", "2", "9"], env=env)
    check(out == "511 moves, 2 tickets, 2, 99, 1\n", f"it says {out!r}")


# ---- DLM-M


def in_a_world_of_hosts(world):
    """The command that runs another one in a namespace with the names HOSTS and free ports; None if this
    machine allows none."""
    hosts = world.dir / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in HOSTS.items())
    )
    script = f'mount --bind {hosts} /etc/hosts && ip link set lo up && exec "$@"'
    # Processes of this world end with it.
    prefix = [
        "unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "--net", "sh",
        "-c", script, "sh",
    ]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode == 0:
        return prefix
    skip("netns", f"a world with hosts of its own: {tried.stderr.strip()}")
    return None


class TwoMachines:
    """Two network namespaces and a link; `client` and `server` are what to run a command with."""

    def __init__(self, world):
        self.world, self.holders = world, []
        hosts = world.dir / "hosts"
        hosts.write_text("127.0.0.1 localhost\n10.78.0.1 calhost\n10.78.0.2 memhost1\n")
        self.user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        new = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "--net"]
        self.client = self.hold([*new, "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec sleep 600"])
        self.server = self.hold([*self.client, "unshare", "--net", "sleep", "600"])
        far = self.holders[1].pid
        must([*self.client, "ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", far])
        for side, device, address in ((self.client, "near", "10.78.0.1"), (self.server, "far", "10.78.0.2")):
            must([*side, "ip", "addr", "add", f"{address}/30", "dev", device])
            for name in ("lo", device):
                must([*side, "ip", "link", "set", name, "up"])

    def hold(self, argv):
        """Keeps a namespace alive; the command that enters it."""
        argv = [str(a) for a in argv]
        holder = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=procs.end_with_parent)
        self.holders.append(holder)
        deadline = time.monotonic() + 30
        asleep = os.path.basename(os.path.realpath(shutil.which("sleep")))
        while os.path.basename(os.readlink(f"/proc/{holder.pid}/exe")) != asleep:
            check(holder.poll() is None and time.monotonic() < deadline, f"{argv} makes no namespace")
            time.sleep(0.01)
        return ["nsenter", "--target", str(holder.pid), *self.user, "--mount", "--net"]


class Dlmm:
    """Everything of a DLM-M installation: three servers, each a process `dlmm_server` at an address of its
    own, the file, and the compiled program."""

    def __init__(self, world, servers=("memhost1", "memhost2", "memhost3"), megabytes=64):
        self.world, self.prefix, self.enter = world, installed(world), None
        self.home, self.started = world.dir / "home", []
        self.home.mkdir()
        (self.home / "dlmm.conf").write_text(DLMM_CONF)
        self.program = self.home / "User_program"
        must(["cc", "-O1", HERE / "paper.c", "-o", self.program, *library_flags(self.prefix)])
        self.enter = in_a_world_of_hosts(world)
        if self.enter:
            self.start_world(servers, megabytes)

    def start_world(self, servers, megabytes):
        # One process keeps the namespace alive; the others enter it.
        holder = self.popen([*self.enter, "sleep", "600"])
        deadline = time.monotonic() + 30
        while os.readlink(f"/proc/{holder.pid}/exe").rsplit("/", 1)[1] != os.path.basename(
            os.path.realpath("/bin/sleep")
        ):
            check(holder.poll() is None and time.monotonic() < deadline, "the world of hosts cannot be made")
            time.sleep(0.01)
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", "--target", holder.pid, *user, "--mount", "--net", f"--wd={self.home}"]
        for name in servers:
            ready = self.world.dir / f"{name}.ready"
            # Names of loopback: without a key a server listens only there.
            command = [
                self.prefix / "bin/dlmm_server", 7117, megabytes, "--listen", f"{HOSTS[name]}:7117",
                "--ready-file", ready,
            ]
            log = open(self.world.dir / f"{name}.log", "wb")
            server = self.popen([*self.enter, *command], out=log)
            self.started.append((name, server))
            deadline = time.monotonic() + 30
            while not ready.exists():
                check(server.poll() is None, f"dlmm_server ended at once: {self.log(name)}")
                check(time.monotonic() < deadline, f"dlmm_server is not ready: {self.log(name)}")
                time.sleep(0.005)

    def popen(self, argv, out=subprocess.DEVNULL):
        return subprocess.Popen(
            [str(a) for a in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=procs.end_with_parent,
        )

    def log(self, name):
        return (self.world.dir / f"{name}.log").read_text(errors="replace")

    def run(self, *arguments, program=None, env=None):
        """Runs the program in its world; (exit code, standard output, standard error)."""
        argv = [*self.enter, program or self.program, *arguments]
        done = subprocess.run(
            [str(a) for a in argv],
            env={**os.environ, "LD_LIBRARY_PATH": str(self.prefix / "lib"), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def status(self, name):
        return must([*self.enter, self.prefix / "bin/rampool", "status", "--server", HOSTS[name]])

    def end(self):
        """Ends the servers as an administrator does; every one must exit without an error."""
        for name, server in self.started:
            server.send_signal(signal.SIGTERM)
            check(server.wait(30) == 0, f"{name} ended with {server.returncode}: {self.log(name)}")


@suite.test()
def dlmm_program_of_the_paper(world, scale):
    dlmm = Dlmm(world)
    if not dlmm.enter:
        scale.note("skipped: no namespaces here")
        return
    # As the paper says it.
    code, out, err = dlmm.run("--", "-n", "4", "-f", "dlmm.conf")
    check((code, out, err) == (0, SUM, ""), f"it ends with {code}: {out}{err}")
    # 96 MB do not fit the 16 of the compute node: every server was used, and has got everything back.
    for name in ("memhost1", "memhost2", "memhost3"):
        said = must([*dlmm.enter, dlmm.prefix / "bin/rampool", "status", "--json", "--server", HOSTS[name]])
        found = re.search(r'"puts": ?(\d+)', said)
        check(found and int(found.group(1)) > 0, f"{name} held nothing: {said}")
        check(re.search(r'"free_bytes": ?67108864\b', said), f"{name} did not get its memory back: {said}")
    # dlmm.conf in the working directory and all of its lines are the defaults.
    check(dlmm.run() == (0, SUM, ""), "without options it does not run")
    # A larger DLM page.
    check(
        dlmm.run("--", "-n", "4", env={"RAMPOOL_PAGE_SIZE": "128K"}) == (0, SUM, ""),
        "with pages of 128 KiB it does not run",
    )
    dlmm.end()


@suite.test()
def dlmm_server_as_printed_on_another_machine(world, scale):
    """The paper's figure 3, letter for letter, with a key in the environment; without one nobody gets in."""
    if not in_a_world_of_hosts(world):
        scale.note("skipped: no namespaces here")
        return
    machines, prefix = TwoMachines(world), installed(world)
    program = world.dir / "User_program"
    must(["cc", "-O1", HERE / "paper.c", "-o", program, *library_flags(prefix)])
    (world.dir / "dlmm.conf").write_text("calhost 16 // compute node\nmemhost1 128 // memory server\n")
    key = world.dir / "key"
    must([prefix / "bin/rampool", "key", key])
    for keyed in (False, True):
        env = {**os.environ, "LD_LIBRARY_PATH": str(prefix / "lib")}
        env |= {"RAMPOOL_KEY_FILE": str(key)} if keyed else {}
        log = open(world.dir / f"server{keyed}.log", "wb")
        argv = [*machines.server, prefix / "bin/dlmm_server"]
        how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": env}
        server = subprocess.Popen([str(a) for a in argv], preexec_fn=procs.end_with_parent, **how)
        deadline = time.monotonic() + 30
        while b"listening" not in (world.dir / f"server{keyed}.log").read_bytes():
            check(server.poll() is None and time.monotonic() < deadline, f"no server: {world.dir}")
            time.sleep(0.01)
        argv = [*machines.client, f"--wd={world.dir}", program, "--", "-n", "2", "-f", "dlmm.conf"]
        streams = {"capture_output": True, "text": True}
        done = subprocess.run([str(a) for a in argv], env=env, timeout=120, check=False, **streams)
        server.send_signal(signal.SIGTERM)
        check(server.wait(30) == 0, "the server ends with an error")
        if keyed:
            check((done.returncode, done.stdout, done.stderr) == (0, SUM, ""), f"with a key: {done}")
        else:
            check("memhost1" in done.stderr and SUM not in done.stdout, f"without a key: {done}")


@suite.test()
def dlmm_says_what_is_wrong(world, scale):
    dlmm = Dlmm(world, servers=("memhost1", "memhost2"))
    if not dlmm.enter:
        scale.note("skipped: no namespaces here")
        return
    # The example that looks at what dlmm_startup returns.
    program = dlmm.home / "dlmm_array"
    must(["cc", ROOT / "crates/capi/examples/c/dlmm_array.c", "-o", program, *library_flags(dlmm.prefix)])
    check(dlmm.run("8", "--", "-n", "3", program=program)[0] == 0, "what should work does not")
    for conf, options, words in (
        (None, ["-f", "missing.conf"], ["missing.conf", "No such file"]),
        ("calhost 16\nmemhost9 32\n", [], ["memhost9", "Name or service not known|failed to lookup"]),
        ("calhost 16\nmemhost1 32MB\n", [], ["line 2", "32MB"]),
        ("calhost 16\nmemhost1\n", [], ["line 2", "host megabytes"]),
        ("calhost 16\n", [], ["memory server"]),
        ("// nothing\n", [], ["compute node"]),
        ("calhost 16\nmemhost1 65\n", [], ["memhost1", "64 MiB"]),
        (DLMM_CONF, [], ["memhost3", "refused"]),
        (DLMM_CONF, ["-n", "5"], ["-n 5", "4"]),
        (DLMM_CONF, ["-n", "many"], ["-n", "many"]),
        (DLMM_CONF, ["-x"], ["-x"]),
    ):
        if conf is not None:
            (dlmm.home / "wrong.conf").write_text(conf)
            options = [*options, "-f", "wrong.conf"]
        code, out, err = dlmm.run("8", "--", *options, program=program)
        case = f"{conf!r} {options}: {code} {out}{err}"
        check(code == 1 and not out and err.startswith("dlmm_startup: ") and err.count("\n") == 1, case)
        for word in words:
            check(re.search(word, err), f"{case} lacks {word!r}")
    # More than the nodes lend together.
    code, out, err = dlmm.run("500", "--", "-n", "2", program=program)
    check(code == 1 and err.startswith("dlmm_alloc: ") and "500 MiB" in err, f"{code} {err}")
    dlmm.end()


if __name__ == "__main__":
    procs.end_with_parent()
    suite.main()
