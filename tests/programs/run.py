#!/usr/bin/env python3
"""Unmodified programs under `rampool run`: each answers as it does natively, within its budget, at 50 % and
25 % of its own peak.

Every run is bounded by a watchdog that prints stacks. `--reduced` is what `make test` runs; without it the
sizes are those of real work.
"""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "work"))
import redis_work  # noqa: E402
import signal_cases  # noqa: E402
from harness import procs  # noqa: E402
from harness.proxy import Proxy  # noqa: E402
from harness.suite import Suite  # noqa: E402
from harness.world import LASTING_S, MIB, PURGING, ROOT, Failure, allocators, built, check  # noqa: E402
from harness.world import free_port, skip  # noqa: E402

HERE = Path(__file__).resolve().parent
PYTHON = ROOT / ".venv/bin/python"

suite = Suite("unmodified programs")


def within_budget(outcome, local, what):
    # Fresh memory can be mapped and touched before the agent looks again: that is over in a moment,
    # however long the agent was delayed.
    lasting = (outcome.lasting_anonymous, 32 * MIB + local // 20, f"for {LASTING_S} s")
    for held, slack, how in (lasting, (outcome.peak_anonymous, 128 * MIB, "for a moment")):
        check(
            held <= local + slack,
            f"{what}: a process held {held / MIB:.1f} MiB of anonymous memory {how} with --local "
            f"{local / MIB:.1f} MiB and {slack // MIB} MiB of slack",
        )


def both_shares(world, scale, argv, *, timeout, env=None, shares=(0.5, 0.25), memory=None, options=()):
    """Natively, then at 50 % and 25 % of its peak. Same output, same exit code, budget kept, pages really
    left."""
    native = world.run(argv, timeout=timeout, env=env)
    check(native.code == 0, f"natively it ends with {native.code}: {native.said()}")
    scale.note(f"native: {native.wall:.2f} s, peak {native.peak_rss / MIB:.0f} MiB")
    server = world.serve(memory or max(native.peak_rss * 6, 2048 * MIB))
    for share in shares:
        local = max(int(native.peak_rss * share), 4 * MIB)
        paged = world.run(
            argv, timeout=timeout * 8 + 60, local=local, servers=[server], env=env, options=options
        )
        what = f"at {share:.0%}"
        check(paged.code == native.code, f"{what} it ends with {paged.code}: {paged.said()}")
        check(
            paged.digest() == native.digest(),
            f"{what} its output differs: {paged.text()[:400]} instead of {native.text()[:400]}\n"
            f"{paged.said()}",
        )
        check(paged.faults() > 0, f"{what} no page left: the test shows nothing\n{paged.said()}")
        within_budget(paged, local, what)
        scale.note(
            f"{what}: {paged.wall:.2f} s ({paged.wall / native.wall:.1f}x), --local {local / MIB:.0f} MiB, "
            f"most held {paged.peak_anonymous / MIB:.0f} MiB, {paged.faults()} faults"
        )


# ---- the programs


def sort_in_memory(world, scale, size, **how):
    """GNU sort of a file of about `size` bytes, which it keeps in memory."""
    lines = world.dir / "lines"
    with open(lines, "wb") as out:
        subprocess.run(
            [sys.executable, HERE / "lines.py", str(size), str(scale.seed)],
            stdout=out,
            check=True,
            timeout=600,
        )
    argv = ["sort", "-S", "4G", "--parallel=2", lines]
    both_shares(world, scale, argv, timeout=120, env={"LC_ALL": "C"}, **how)


@suite.test()
def gnu_sort(world, scale):
    size = scale.pick(1000 * 1000 * 1000, 6 * MIB)
    sort_in_memory(world, scale, size, shares=scale.pick((0.5, 0.25), (0.5,)))


@suite.test()
def numpy_sort(world, scale):
    both_shares(
        world,
        scale,
        [PYTHON, HERE / "work/numpy_work.py", "sort", scale.pick(1024, 32), scale.seed],
        timeout=120,
        shares=scale.pick((0.5, 0.25), (0.5,)),
    )


@suite.test()
def numpy_column_scan(world, scale):
    both_shares(
        world,
        scale,
        [PYTHON, HERE / "work/numpy_work.py", "columns", scale.pick(1024, 48), scale.seed],
        timeout=300,
        shares=scale.pick((0.5, 0.25), (0.5,)),
    )


@suite.test()
def numpy_matrix_product(world, scale):
    both_shares(
        world,
        scale,
        [PYTHON, HERE / "work/numpy_work.py", "matmul", scale.pick(1024, 32), scale.seed],
        timeout=300,
        shares=scale.pick((0.5, 0.25), (0.5,)),
    )


@suite.test()
def sqlite_in_memory(world, scale):
    argv = [
        PYTHON, HERE / "work/sqlite_work.py", scale.pick(1_000_000, 40_000), scale.pick(200_000, 4_000),
        scale.seed,
    ]
    both_shares(world, scale, argv, timeout=300, shares=scale.pick((0.5, 0.25), (0.25,)))


@suite.test()
def hash_map(world, scale):
    both_shares(
        world,
        scale,
        [built("hashmap"), scale.pick(1024, 24), scale.seed],
        timeout=120,
        shares=scale.pick((0.5, 0.25), (0.5,)),
    )


@suite.test()
def threads_share_memory(world, scale):
    both_shares(
        world,
        scale,
        [built("threads"), scale.pick(512, 32), 4, scale.seed],
        timeout=120,
        shares=scale.pick((0.5, 0.25), (0.5,)),
    )


@suite.test()
def python_makes_processes(world, scale):
    argv = [PYTHON, HERE / "work/family_work.py", scale.pick(512, 24), scale.seed]
    both_shares(
        world,
        scale,
        argv,
        timeout=120,
        memory=scale.pick(16, 2) << 30,
        options=["--memory", scale.pick("15G", "1900M")],
        shares=scale.pick((0.5, 0.25), (0.5,)),
    )


@suite.test()
def redis_serves_and_saves(world, scale):
    keys, operations = scale.pick(1_000_000, 20_000), scale.pick(200_000, 3_000)
    redis_case(world, scale, keys, operations, scale.pick((0.5, 0.25), (0.5,)))


@suite.test()
def redis_saves_what_its_child_shares(world, scale):
    # Little memory, all of it shared with the child that saves: pages that the kernel does not
    # move must leave too.
    redis_case(world, scale, 8_000, 1_000, (0.25,))


def redis_case(world, scale, keys, operations, shares, options=()):
    for share in shares:
        local = int(keys * 1200 * share)
        server = world.serve(keys * 1200 * 6 + 512 * MIB)
        port, home = free_port(), world.dir / f"redis-{share}"
        home.mkdir()
        argv = [
            "redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", home, "--save", "",
            "--appendonly", "no", "--daemonize", "no", "--dbfilename", "dump.rdb",
        ]
        running = world.start(
            argv,
            local=local,
            servers=[server],
            options=["--memory", f"{keys * 1200 * 5 // MIB + 400}M", *options],
        )
        try:
            client = redis_work.Client(port, timeout=scale.pick(300, 60))
            redis_work.fill(client, keys)
            versions = [0] * keys
            redis_work.mix(client, versions, operations, scale.seed)
            # The dump holds what was there when the child was made, whatever is written meanwhile.
            saved = list(versions)
            check(client("BGSAVE") == b"Background saving started", "BGSAVE does not start")
            redis_work.mix(client, versions, operations, scale.seed + 1)
            # How far the child gets meanwhile depends on the scheduler.
            deadline = time.monotonic() + scale.pick(900, 120)
            while b"rdb_bgsave_in_progress:0" not in client("INFO", "persistence"):
                check(time.monotonic() < deadline, "BGSAVE does not end")
                redis_work.mix(client, versions, 200, scale.seed + 2)
            info = client("INFO", "persistence")
            check(
                b"rdb_last_bgsave_status:ok" in info and b"rdb_bgsave_in_progress:0" in info,
                f"BGSAVE: {info.decode()}\n{running.out.read_text()[-1500:]}\n{running.said()[-1500:]}",
            )
            redis_work.verify(client, versions)
            client.send([[b"SHUTDOWN", b"NOSAVE"]])
        except (AssertionError, OSError, RuntimeError) as error:
            if isinstance(error, TimeoutError):
                running.hang(f"redis did not answer: {error!r}")
            running.finish(20) if running.ended() else os.kill(running.process.pid, 9)
            raise Failure(
                f"redis at {share:.0%}: {error!r}\n{running.out.read_text()[-1500:]}\n"
                f"{running.said()[-2500:]}"
            ) from error
        outcome = running.finish(60)
        check(outcome.code == 0, f"redis ends with {outcome.code}: {outcome.said()}")
        check(outcome.faults() > 0, f"no page left\n{outcome.said()}")
        within_budget(outcome, local, f"redis at {share:.0%}")
        # A native Redis reads the dump.
        port = free_port()
        argv[2] = port
        native = world.start(argv)
        reader = redis_work.Client(port)
        deadline = time.monotonic() + scale.pick(600, 60)
        while True:
            try:
                check(reader("DBSIZE") == keys, "the dump lacks keys")
                break
            except RuntimeError as loading:
                check(time.monotonic() < deadline, f"a native Redis does not read the dump: {loading}")
                time.sleep(0.05)
        redis_work.verify(reader, saved)
        reader.send([[b"SHUTDOWN", b"NOSAVE"]])
        native.finish(60)
        scale.note(
            f"at {share:.0%}: {outcome.wall:.2f} s, --local {local / MIB:.0f} MiB, most held "
            f"{outcome.peak_anonymous / MIB:.0f} MiB, {outcome.faults()} faults"
        )


# ---- the lower fault modes, where the kernel cannot wait for a page in a system call

LOWER = ("uffd-user", "segv")


def fault_mode_case(fault_mode):
    def register(function):
        def case(world, scale):
            function(world, scale, ["--fault-mode", fault_mode])

        case.__name__ = f"{function.__name__}_on_{fault_mode}".replace("-", "_")
        suite.test()(case)

    return register


for fault_mode in LOWER:

    @fault_mode_case(fault_mode)
    def sort_and_sqlite(world, scale, options):
        size = scale.pick(200 * MIB, 12 * MIB)
        sort_in_memory(world, scale, size, shares=(0.5,), options=options)
        argv = [
            PYTHON, HERE / "work/sqlite_work.py", scale.pick(200_000, 60_000), scale.pick(20_000, 1_000),
            scale.seed,
        ]
        both_shares(world, scale, argv, timeout=300, shares=(0.5,), options=options)

    @fault_mode_case(fault_mode)
    def python_and_redis(world, scale, options):
        argv = [PYTHON, HERE / "work/family_work.py", scale.pick(128, 16), scale.seed]
        both_shares(
            world,
            scale,
            argv,
            timeout=120,
            memory=2 << 30,
            shares=(0.5,),
            options=["--memory", "1900M", *options],
        )
        redis_case(
            world, scale, scale.pick(50_000, 8_000 if fault_mode == "uffd-user" else 5_000),
            scale.pick(20_000, 1_000), (0.5,), options,
        )

    @fault_mode_case(fault_mode)
    def calls_and_mappings(world, scale, options):
        corner(
            world,
            scale,
            "syscalls",
            scale.pick(128, 40),
            world.dir,
            "wrapped",
            timeout=scale.pick(300, 90),
            options=options,
        )
        corner(world, scale, "freed", 24, options=options)
        # Found children that needed an absent page to start the agent that was to bring it.
        corner(world, scale, "processes", 32, "quick-children", options=options)

    @fault_mode_case(fault_mode)
    def mappings_change_at_random(world, scale, options):
        # Found memory that a forked child did not get: on the lowest fault mode what was managed once and is
        # the program's own again, and, wherever forks are not followed, what mremap left behind or added.
        seeds = [
            (7, 300),
            (4149552136, 1000),
            *((scale.seed + round_, 20000) for round_ in range(scale.pick(4, 0))),
        ]
        for seed, operations in seeds:
            corner(
                world,
                scale,
                "mappings",
                seed,
                operations,
                4096,
                scale.pick(64, 24),
                timeout=scale.pick(400, 120),
                options=options,
                same_output=False,
            )


# ---- the corners: small programs of our own, each of which checks itself against a model


def corner(
    world,
    scale,
    name,
    *arguments,
    local=16 * MIB,
    timeout=120,
    expect=0,
    wants_absent=True,
    memory=2048 * MIB,
    options=(),
    same_output=True,
    budget=True,
):
    argv = [built(name), *arguments]
    native = world.run(argv, timeout=timeout)
    check(native.code == expect, f"natively it ends with {native.code}: {native.said()}")
    server = world.serve(memory)
    paged = world.run(
        argv,
        timeout=timeout,
        local=local,
        servers=[server],
        options=["--memory", memory - 64 * MIB, *options],
    )
    check(
        paged.code == expect, f"ends with {paged.code} instead of {expect}: {paged.said()}\n{server.said()}"
    )
    check(
        not same_output or paged.digest() == native.digest(),
        f"its output differs: {paged.text()[:400]}\n{paged.said()}",
    )
    if budget:
        within_budget(paged, local, name)
    check(paged.faults() > 0, f"no page left: the test shows nothing\n{paged.said()}")
    if wants_absent:
        found = re.search(r"absent (\d+)", paged.err)
        check(
            found and int(found.group(1)) > 0, f"nothing was absent: the test shows nothing\n{paged.said()}"
        )
    scale.note(
        f"{' '.join(map(str, arguments))}: {paged.wall:.2f} s (native {native.wall:.2f} s), most held "
        f"{paged.peak_anonymous / MIB:.0f} MiB, {paged.faults()} faults"
    )
    return paged


@suite.test()
def system_calls_on_absent_pages(world, scale):
    corner(world, scale, "syscalls", scale.pick(128, 40), world.dir, timeout=scale.pick(300, 90))


@suite.test()
def mappings_change_at_random(world, scale):
    for round_ in range(scale.pick(8, 1)):
        corner(
            world,
            scale,
            "mappings",
            scale.seed + round_,
            scale.pick(20000, 2000),
            4096,
            scale.pick(64, 24),
            timeout=scale.pick(400, 120),
            same_output=False,
        )
    # Found a page at the end of the heap that left a child between its taking over and the moment from which
    # its agent's thread needs it.
    corner(world, scale, "mappings", 342148047, 600, 4096, 24, same_output=False)


@suite.test()
def memory_that_is_given_up(world, scale):
    corner(world, scale, "freed", 24)


@suite.test()
def guards_over_memory_that_is_away(world, scale):
    native = world.run([built("guards"), 24])
    check(native.code == 0, f"natively it ends with {native.code}: {native.said()}")
    if native.text() != "ok\n":
        return scale.note("this kernel has no MADV_GUARD_INSTALL")
    corner(world, scale, "guards", 24, options=["--verify"])
    # The kernel reports no guard by itself: the pages are gone, and nobody has given them up.
    bare = world.run([built("guards"), 24, "bare"], local=16 * MIB)
    check(
        bare.code == 74 and not bare.text() and "MADV_GUARD_INSTALL" in bare.err,
        f"ends with {bare.code}: {bare.text()}{bare.said()}",
    )
    for fault_mode in LOWER:
        refused = world.run([built("guards"), 24], local=16 * MIB, options=["--fault-mode", fault_mode])
        check(
            refused.text() == "no guards\n", f"{fault_mode}: {refused.code} {refused.text()} {refused.said()}"
        )


@suite.test()
def allocators_that_purge(world, scale):
    """Freed memory that an allocator gave up, and hands out again as zeroes, by threads that are preempted
    meanwhile: all bytes of all blocks."""
    seconds = scale.pick(30, 3)
    found = allocators()
    for name in PURGING.keys() - found.keys():
        skip("allocators", f"lib{name}.so is not installed")
    for name, env in found.items():
        for threads in (1, 3):
            argv = [built("allocate"), scale.seed, seconds, threads, 64]
            paged = world.run(
                argv,
                timeout=seconds * 10 + 120,
                local=24 * MIB,
                servers=[world.serve("1G")],
                options=["--memory", "900M", "--verify"],
                env=env,
            )
            check(paged.code == 0, f"{name}, {threads} threads: ends with {paged.code}: {paged.said()}")
            check(paged.faults() > 0, f"{name}: no page left: the test shows nothing\n{paged.said()}")
            scale.note(
                f"{name}, {threads} threads: {re.search('allocated.*', paged.err).group()}, {paged.faults()} "
                f"faults in {paged.wall:.1f} s"
            )


@suite.test()
def memory_that_threads_give_up_while_they_are_preempted(world, scale):
    """Pages that were given up do not come back: neither while the old page is still leaving, nor after a
    lazy free, nor in a child."""
    seconds = scale.pick(60, 5)
    for purgers, flags, env in (
        (1, "none", {}),
        (3, "free,forks", {}),
        (2, "free", {"RAMPOOL_EVICT_BY_COPY": "1"}),
    ):
        argv = [built("purge"), scale.seed, seconds, purgers, 48, flags]
        paged = world.run(
            argv,
            timeout=seconds * 10 + 60,
            local=24 * MIB,
            servers=[world.serve("1G")],
            options=["--memory", "900M", "--verify"],
            env=env,
        )
        check(paged.code == 0, f"purge {purgers} {flags} {env} ends with {paged.code}: {paged.said()}")
        check(paged.faults() > 0, f"no page left: the test shows nothing\n{paged.said()}")
        rounds = int(re.search(r"purged (\d+) blocks", paged.err).group(1))
        check(rounds > 0, f"nothing was given up: the test shows nothing\n{paged.said()}")
        scale.note(
            f"{purgers} purgers, {flags} {env or ''}: {rounds} blocks given up, {paged.faults()} faults in "
            f"{paged.wall:.1f} s"
        )


@suite.test()
def memory_that_threads_move_while_they_are_preempted(world, scale):
    """The kernel tells of changes of mappings in another order than threads made them in: memory that was
    moved to a place that another thread had left keeps its content."""
    seconds = scale.pick(30, 3)
    for threads, env, *options in (
        (1, {}), (2, {}), (2, {}, "--verify"), (3, {}, "--verify"),
        (2, {"RAMPOOL_EVICT_BY_COPY": "1"}, "--verify"),
    ):
        argv = [built("remapped"), scale.seed, seconds, threads, 32]
        paged = world.run(
            argv,
            timeout=seconds * 10 + 120,
            local=16 * MIB,
            servers=[world.serve("1G")],
            options=["--memory", "900M", *options],
            env=env,
        )
        check(paged.code == 0, f"{threads} threads {env} {options}: ends with {paged.code}: {paged.said()}")
        moves = int(re.search(r"(\d+) moves", paged.err).group(1))
        check(
            moves > 0 and paged.faults() > 0,
            f"nothing moved, or no page left: the test shows nothing\n{paged.said()}",
        )
        scale.note(
            f"{threads} threads {env or ''} {' '.join(options)}: {moves} moves, {paged.faults()} faults in "
            f"{paged.wall:.1f} s"
        )


@suite.test()
def arrays_that_grow_and_move(world, scale):
    # What has just moved must not be taken for new memory: while the program waits for the event about it to
    # be read, the agent may look at its mappings.
    corner(
        world,
        scale,
        "regrow",
        scale.pick(40, 8),
        scale.pick(128, 64),
        timeout=scale.pick(600, 120),
        local=scale.pick(32, 16) * MIB,
        wants_absent=False,
    )


@suite.test()
def fresh_memory_as_fast_as_can_be(world, scale):
    """The heaps that the C library makes for threads among it: one lies above what a full one has left over.
    Then with every CPU busy."""
    hog = [sys.executable, "-c", "while True: pass"]
    how = {"local": 24 * MIB, "timeout": 300, "wants_absent": False}
    for hogs in (0, os.cpu_count()):
        busy = [subprocess.Popen(hog, preexec_fn=procs.end_with_parent) for _ in range(hogs)]
        try:
            corner(world, scale, "grow", scale.pick(1024, 192), scale.pick(4, 1), 2, **how)
        finally:
            procs.kill_all(hog.pid for hog in busy)
            for hog in busy:
                hog.wait()


@suite.test()
def memory_does_not_grow_while_the_pool_is_joined(world, scale):
    """A program fills what it has mapped, and a server is slow to answer."""
    server = world.serve("1G")
    proxy = Proxy(server.address)
    proxy.mode, proxy.delay_s = "slow", 0.02
    script = "b = b'x' * (160 << 20); print(sum(b[::4096]))"
    options = ["--memory", "900M"]
    running = world.start(
        [sys.executable, "-c", script], local=24 * MIB, servers=[proxy.address], options=options
    )
    running.managed_pids()
    # Long enough for a program that is not held back to fill all of it; only then its pages leave fast.
    time.sleep(2)
    proxy.mode = "pass"
    outcome = running.finish(120)
    right = outcome.code == 0 and outcome.text() == f"{160 * 256 * ord('x')}\n"
    check(right, f"ends with {outcome.code}: {outcome.text()} {outcome.said()}")
    within_budget(outcome, 24 * MIB, "joining slowly")
    proxy.close()


@suite.test()
def stacks_and_signals(world, scale):
    corner(world, scale, "stacks", scale.pick(128, 32), scale.pick(10, 3), timeout=scale.pick(300, 90))


@suite.test()
def pages_that_the_kernel_merges(world, scale):
    """The kernel drops the write protection of pages that it merges (KSM): what the program writes to them
    must not be lost."""
    merging = Path("/sys/kernel/mm/ksm")
    if not os.access(merging / "run", os.W_OK):
        return skip("root", "the kernel cannot be told to merge pages")
    wanted = {merging / "sleep_millisecs": "10", merging / "pages_to_scan": "10000", merging / "run": "1"}
    before = {path: path.read_text() for path in wanted}
    try:
        for path, value in wanted.items():
            path.write_text(value)
        corner(world, scale, "merged", 24, scale.pick(20, 3), timeout=scale.pick(300, 120), same_output=False)
        corner(
            world,
            scale,
            "merged",
            24,
            scale.pick(20, 3),
            timeout=scale.pick(300, 120),
            same_output=False,
            options=["--verify"],
        )
        corner(
            world,
            scale,
            "merged",
            24,
            scale.pick(12, 6),
            20_000,
            timeout=scale.pick(300, 120),
            same_output=False,
        )
    finally:
        for path, value in before.items():
            path.write_text(value)


@suite.test()
def pages_that_the_kernel_moves_itself(world, scale):
    """While the kernel compacts memory, it does not report all pages that it moved for us: none may be
    lost."""
    compact = Path("/proc/sys/vm/compact_memory")
    if not os.access(compact, os.W_OK):
        return skip("root", "the kernel cannot be told to compact memory")
    over = threading.Event()

    def compacts():
        while not over.is_set():
            compact.write_text("1")

    compactor = threading.Thread(target=compacts)
    compactor.start()
    try:
        for _ in range(scale.pick(20, 3)):
            corner(world, scale, "stacks", 32, 3, timeout=90, options=["--verify"])
    finally:
        over.set()
        compactor.join()


def process_case(name, *, reduced=True, **how):
    def case(world, scale):
        corner(
            world,
            scale,
            "processes",
            scale.pick(128, 32),
            name,
            timeout=how.pop("timeout", scale.pick(240, 60)),
            **how,
        )

    case.__name__ = f"process-{name}"
    suite.test(reduced=reduced)(case)


for name in (
    "fork-isolation fork-chain many-children quick-children orphan double-fork spawning fork-threads "
    "alone exec-self close-everything close-all-early no-rights not-dumpable closes-output few-descriptors "
    "locked-memory no-fork-memory main-ends last-thread-ends another-root grow"
).split():
    process_case(name)
# A child made by the bare system call has no agent of its own: its parent serves it, and
# nothing keeps it small.
process_case("bare-clone", budget=False)
process_case("bare-grandchild", budget=False)
# Such a child has no agent of its own either.
process_case("forks-without-files", budget=False)
# Locked pages stay, and are more than the budget.
process_case("all-locked", budget=False)
process_case("killed-parent")
process_case("killed-bare-parent", budget=False)
process_case("many-mappings")
# Reading so many mappings takes long, and the program goes on growing meanwhile.
process_case("many-mappings-first", budget=False)
process_case("daemon", same_output=False)
process_case("exit-42", expect=42)
process_case("last-thread-is-gone", expect=42, wants_absent=False)
process_case("crash", expect=-11)
process_case("abort", expect=-6)


@suite.test()
def children_without_the_right_to_join_a_private_server(world, scale):
    """A private server's socket is for the user that started the run. A process that has become another user
    can still fork."""
    outcome = world.run([built("processes"), 32, "forks-without-rights"], local=16 * MIB, timeout=60)
    check(outcome.code == 0, f"ends with {outcome.code}: {outcome.said()}")
    check(outcome.faults() > 0, f"no page left: the test shows nothing\n{outcome.said()}")


@suite.test()
def settings_of_the_machines_own_server_are_not_the_private_servers(world, scale):
    """A machine that lends memory as well has settings for that in the environment: a file, a port that is
    taken."""
    env = {
        "RAMPOOL_SERVE_CONFIG": "/nonexistent/serve.toml",
        "RAMPOOL_SERVE_METRICS": "256.0.0.1:1",
        "RAMPOOL_SERVE_SHARDS": "none",
    }
    outcome = world.run(["echo", "served"], local=16 * MIB, env=env, timeout=60)
    check(outcome.code == 0 and outcome.text() == "served\n", f"ends with {outcome.code}: {outcome.said()}")


@suite.test()
def a_private_server_that_cannot_start_ends_the_run_with_its_words(world, scale):
    outcome = world.run(
        ["echo", "never"], local=16 * MIB, env={"RAMPOOL_KEY_FILE": "/nonexistent/pool.key"}, timeout=60
    )
    check(outcome.code == 125 and outcome.text() == "", f"ends with {outcome.code}: {outcome.said()}")
    check(
        "the private server ended at once" in outcome.err and "/nonexistent/pool.key" in outcome.err,
        f"does not say why: {outcome.said()}",
    )


@suite.test()
def a_program_that_brings_its_allocator_forks(world, scale):
    for fault_mode in ("auto", "segv"):
        outcome = world.run(
            [built("own_malloc"), scale.pick(500, 20)],
            local=64 * MIB,
            options=["--fault-mode", fault_mode],
            timeout=60,
        )
        check(
            outcome.code == 0 and outcome.text() == "ok\n",
            f"{fault_mode}: ends with {outcome.code}: {outcome.said()}",
        )


@suite.test()
def a_program_in_a_user_namespace_of_its_own(world, scale):
    """The kernel requires a single thread for that."""
    argv = ["unshare", "-U", "id", "-u"]
    native = world.run(argv, timeout=60)
    if native.code != 0:
        return scale.note(f"natively it ends with {native.code}: {native.said()}")
    outcome = world.run(argv, local=64 * MIB, timeout=60)
    check(
        outcome.code == 0 and outcome.text() == native.text(),
        f"ends with {outcome.code}: {outcome.text()} {outcome.said()}",
    )


@suite.test()
def a_program_in_a_process_namespace_of_its_own(world, scale):
    """There, as in a container, the kernel gives the private server outside no number."""
    work = "b = bytes(range(256)) * (96 << 12); print(len(b), sum(b[::4097]))"
    argv = ["unshare", "--pid", "--fork", sys.executable, "-c", work]
    native = world.run(argv, timeout=60)
    if native.code != 0:
        return scale.note(f"natively it ends with {native.code}: {native.said()}")
    outcome = world.run(argv, local=32 * MIB, timeout=60)
    right = outcome.code == 0 and outcome.text() == native.text()
    check(right, f"ends with {outcome.code}: {outcome.text()} {outcome.said()}")
    check(outcome.faults() > 0, f"no page left: the test shows nothing\n{outcome.said()}")


@suite.test()
def a_program_whose_sandbox_hides_the_run_is_named(world, scale):
    argv = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm && exec echo hidden"]
    if world.run(argv, timeout=60).code != 0:
        return scale.note("natively there is no such mount")
    outcome = world.run(argv, local=32 * MIB, timeout=60)
    right = outcome.code == 0 and outcome.text() == "hidden\n"
    check(right, f"ends with {outcome.code}: {outcome.text()} {outcome.said()}")
    named = "runs without rampool" in outcome.err and "sandbox" in outcome.err
    check(named, f"no line says so: {outcome.said()}")


@suite.test()
def programs_of_another_user_run_without_rampool(world, scale):
    become = "import os; os.setgid(65534); os.setuid(65534); os.execvp('echo', ['echo', 'as another user'])"
    outcome = world.run([sys.executable, "-c", become], local=16 * MIB, timeout=60)
    check(
        outcome.code == 0 and outcome.text() == "as another user\n",
        f"ends with {outcome.code}: {outcome.said()}",
    )
    check(
        os.geteuid() != 0 or "belongs to another user" in outcome.err, f"no message says so: {outcome.said()}"
    )


@suite.test()
def a_heap_in_shared_memory_is_named(world, scale):
    """Only private anonymous memory leaves: what stays, and is much, is said as soon as it is seen."""
    script = (
        "import mmap, time; heap = mmap.mmap(-1, 96 << 20); heap.write(b'x' * (96 << 20)); time.sleep(1); "
        "print('ok')"
    )
    outcome = world.run([sys.executable, "-c", script], local=64 * MIB, timeout=60)
    check(outcome.code == 0 and outcome.text() == "ok\n", f"ends with {outcome.code}: {outcome.said()}")
    check(
        outcome.err.count("in shared memory (/dev/zero)") == 1,
        f"no line names the heap, or more than one does: {outcome.said()}",
    )


@suite.test()
def no_mappings_left_in_the_lowest_fault_mode(world, scale):
    """Each page that is protected by itself may need two mappings more: without any, the program goes on, or
    ends with a reason."""
    for case in ("many-mappings", "many-mappings-first"):
        outcome = world.run(
            [built("processes"), 32, case],
            local=16 * MIB,
            servers=[world.serve("1G")],
            options=["--memory", "600M", "--fault-mode", "segv"],
            timeout=120,
        )
        told = outcome.code == 74 and "vm.max_map_count" in outcome.err
        check(outcome.code == 0 or told, f"{case} ends with {outcome.code}: {outcome.said()}")
        scale.note(f"{case}: {'ended with the reason' if told else 'went on'} after {outcome.wall:.1f} s")


@suite.test()
def limited_address_space(world, scale):
    """What is optional leaves room for the program; where there is none for the agent either, the program
    goes on and a line says so."""
    work = (
        "b = bytearray(150 << 20); b[::4096] = bytes([7]) * len(b[::4096]); print([sum(b[::4096]) for _ in "
        "range(3)])"
    )
    told, managed = [], []
    for kib in (180_000, 260_000, 400_000, 560_000, 600_000, 700_000):
        argv = ["bash", "-c", f"ulimit -v {kib}; exec {sys.executable} -c '{work}'"]
        native = world.run(argv, timeout=60)
        outcome = world.run(argv, local=64 * MIB, timeout=60)
        check(
            (outcome.code, outcome.text()) == (native.code, native.text()),
            f"{kib} KiB: ends with {outcome.code} instead of {native.code}: {outcome.said()}",
        )
        if "runs without rampool" in outcome.err:
            check("ulimit -v" in outcome.err, f"{kib} KiB: the line does not say why: {outcome.said()}")
            told.append(kib)
        elif outcome.faults() > 0:
            managed.append(kib)
    check(
        told and managed and max(told) < min(managed), f"not managed with {told} KiB, managed with {managed}"
    )
    scale.note(f"not managed with {told} KiB, managed with {managed}")


# ---- signals

signal_cases.register(suite)


# ---- torture


@suite.test()
def torture(world, scale):
    pages = scale.pick(65536, 8192)
    server, other = world.serve(3072 * MIB), world.serve(3072 * MIB)
    for round_, (local, servers) in enumerate([(16 * MIB, [server]), (10 * MIB, [server, other])]):
        argv = [built("torture"), scale.seed + round_, pages, 4, scale.pick(60000, 3000), scale.pick(200, 12)]
        local = local * pages // 8192
        paged = world.run(
            argv,
            timeout=scale.pick(600, 120),
            local=local,
            servers=servers,
            options=["--memory", "2900M", "--verify"],
        )
        check(paged.code == 0, f"torture ends with {paged.code}: {paged.said()}")
        within_budget(paged, local, "torture")
        found = re.search(r"absent (\d+)", paged.err)
        check(found and int(found.group(1)) > 0, f"nothing was absent\n{paged.said()}")
        scale.note(
            f"seed {scale.seed + round_}, {len(servers)} servers, --local {local / MIB:.0f} MiB: "
            f"{paged.wall:.2f} s, most held {paged.peak_anonymous / MIB:.0f} MiB, {paged.faults()} faults"
        )


if __name__ == "__main__":
    if not PYTHON.exists():
        raise SystemExit("run tests/programs/setup.sh first")
    # A program's core file would only slow the tests down.
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    procs.end_with_parent()
    suite.main()
