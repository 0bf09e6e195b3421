#!/usr/bin/env python3
"""Block devices from the pool, used by clients of NBD that know nothing of rampool: libnbd's tools, QEMU's,
fio, nbdkit with TLS in front.

Every byte is compared. The kernel's own client is `make test-block`'s affair, which has a kernel of its own
for it.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import procs  # noqa: E402
from harness.suite import Suite  # noqa: E402
from harness.world import MIB, check, free_port, rampool_binary, skip  # noqa: E402

PAGE = 4096
REFUSED = 125
suite = Suite("block")


def missing(*tools):
    """Whether a tool is missing; then the test is skipped, which `make test` only accepts where it cannot be
    installed."""
    absent = [tool for tool in tools if not shutil.which(tool)]
    if absent:
        skip("nbd-clients", f"{', '.join(absent)}: not installed (scripts/setup.sh test)")
    return bool(absent)


def run(*argv, timeout=120, code=0, stdin=None):
    """Runs a client to its end; what it printed."""
    try:
        done = subprocess.run(
            [str(a) for a in argv],
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        check(
            False,
            f"HANG: {argv[0]} runs for {timeout} s\n{(late.output or b'').decode(errors='replace')[-1000:]}",
        )
    text = done.stdout.decode(errors="replace")
    if code is not None:
        check(
            done.returncode == code,
            f"{' '.join(map(str, argv))} ended with {done.returncode}: {text[-1500:]}",
        )
    return text


def serve(world, memory, *exports, options=()):
    """A server with these exports (name=size); its socket."""
    socket = world.dir / f"nbd{len(world.servers)}"
    named = [part for export in exports for part in ("--export", export)]
    server = world.serve(memory, "--nbd", f"unix:{socket}", "--no-lock", *named, *options)
    return server, socket


def uri(socket, export):
    return f"nbd+unix:///{export}?socket={socket}"


def status(server):
    done = subprocess.run(
        [rampool_binary(), "status", "--json", "--server", server.address],
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
    )
    return json.loads(done.stdout)[0]["status"]


def image(world, name, size, seed):
    """A file with data and holes, not in whole pages. Answers with it, and with how many of its pages are not
    zero."""
    path, rng, stored = world.dir / name, random.Random(seed), set()
    with open(path, "wb") as file:
        file.truncate(size)
        for _ in range(60):
            at, length = rng.randrange(size), rng.choice([1, 700, PAGE, 100_000, 1_000_000])
            file.seek(at)
            file.write(rng.randbytes(min(length, size - at)))
    with open(path, "rb") as file:
        for page in range((size + PAGE - 1) // PAGE):
            if any(file.read(PAGE)):
                stored.add(page)
    return path, len(stored)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_until(what, condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, f"after {seconds} s: not {what}")
        time.sleep(0.02)


@suite.test()
def what_a_server_says_of_itself(world, scale):
    if missing("nbdinfo"):
        return
    server, socket = serve(world, "256M", "disk=96M", "scratch=10M")
    disks = json.loads(run("nbdinfo", "--list", "--json", f"nbd+unix://?socket={socket}"))["exports"]
    check(
        [(d["export-name"], d["export-size"]) for d in disks] == [("disk", 96 * MIB), ("scratch", 10 * MIB)],
        f"{disks}",
    )
    wanted = [
        "can_multi_conn", "can_flush", "can_fua", "can_trim", "can_zero", "can_fast_zero", "can_cache",
        "can_df",
    ]
    check(all(disks[0][what] for what in wanted) and not disks[0]["is_read_only"], f"{disks[0]}")
    sizes = [disks[0][f"block_size_{what}"] for what in ("minimum", "preferred", "maximum")]
    check(sizes == [1, PAGE, 32 * MIB] and disks[0]["contexts"] == ["base:allocation"], f"{disks[0]}")
    run("nbdinfo", uri(socket, "none"), code=1)
    said = status(server)
    check(
        [(e["name"], e["bytes"], e["used_bytes"]) for e in said["exports"]]
        == [("disk", 96 * MIB, 0), ("scratch", 10 * MIB, 0)],
        f"{said}",
    )
    check(said["lent_bytes"] == 106 * MIB, f"{said}")
    table = run(rampool_binary(), "status", "--server", server.address)
    check("EXPORT" in table and "scratch" in table, table)


@suite.test()
def a_disk_is_copied_there_and_back(world, scale):
    if missing("nbdcopy", "nbdinfo", "qemu-img"):
        return
    # Not in whole pages. QEMU counts in sectors, and cannot write the last one of a disk that has it in part.
    size = scale.pick(512, 48) * MIB + 1536
    for store in ("raw", "compressed"):
        server, socket = serve(world, 3 * size, f"disk={size}", f"twin={size}", options=["--store", store])
        path, stored = image(world, "image", size, scale.seed)
        run("nbdcopy", path, uri(socket, "disk"), timeout=300)
        check(
            status(server)["frames"] == stored,
            f"{status(server)['frames']} frames for {stored} pages that are not zero",
        )
        back = world.dir / "back"
        run("nbdcopy", "--connections=4", uri(socket, "disk"), back, timeout=300)
        check(digest(back) == digest(path), "other bytes come back")
        run("qemu-img", "compare", "-f", "raw", path, uri(socket, "disk"), timeout=300)
        holes = [
            e for e in json.loads(run("nbdinfo", "--map", "--json", uri(socket, "disk"))) if e["type"] == 3
        ]
        zero_pages = size // PAGE + 1 - stored
        check(
            sum(e["length"] for e in holes) > (zero_pages - 1) * PAGE,
            f"{holes} for {zero_pages} pages of zeroes",
        )
        # From export to export, by a client that asks for what is allocated.
        run(
            "qemu-img",
            "convert",
            "-n",
            "-f",
            "raw",
            "-O",
            "raw",
            uri(socket, "disk"),
            uri(socket, "twin"),
            timeout=300,
        )
        run("qemu-img", "compare", "-f", "raw", path, uri(socket, "twin"), timeout=300)
        said = status(server)
        check(said["exports"][1]["used_bytes"] == said["exports"][0]["used_bytes"], f"{said['exports']}")
        back.unlink()


@suite.test()
def zeroes_and_discards_give_memory_back(world, scale):
    if missing("qemu-io"):
        return
    server, socket = serve(world, "128M", "disk=64M")

    def io(*commands):
        done = run(
            "qemu-io",
            "-f",
            "raw",
            "--discard",
            "unmap",
            *(part for c in commands for part in ("-c", c)),
            uri(socket, "disk"),
        )
        check("mismatch" not in done and "failed" not in done, done)

    def used():
        return status(server)["exports"][0]["used_bytes"]

    io("write -P 0x5a 0 32M", "read -P 0x5a 0 32M", "flush")
    check(used() == 32 * MIB, f"{used()}")
    io("write -P 0 0 4M", "read -P 0 0 4M")
    check(used() == 28 * MIB, f"zeroes that are written: {used()}")
    io("write -z 4M 4M", "write -z -u 8M 4M", "discard 12M 4M", "read -P 0 0 16M", "read -P 0x5a 16M 16M")
    check(used() == 16 * MIB, f"zeroes and discards: {used()}")
    # Not in whole pages or sectors.
    io(
        "write -P 7 16777300 5000", "write -z 16778000 300", "read -P 7 16777300 700",
        "read -P 0 16778000 300", "read -P 7 16778300 4000", "read -P 0x5a 16782300 900",
    )
    io("write -P 1 -f 33553000 1000", "read -P 1 33553000 1000", "read -P 0 40M 24M")


@suite.test()
def fio_verifies_what_it_wrote(world, scale):
    if missing("fio"):
        return
    server, socket = serve(world, "128M", "disk=64M")
    run(
        "fio",
        "--name=verify",
        "--verify_state_save=0",
        "--ioengine=nbd",
        f"--uri={uri(socket, 'disk')}",
        "--rw=randwrite",
        "--bs=6k",
        "--iodepth=32",
        "--size=60M",
        "--verify=crc32c",
        "--verify_fatal=1",
        f"--randseed={scale.seed}",
        "--fsync=50",
        f"--loops={scale.pick(20, 2)}",
        timeout=300,
    )
    check(status(server)["exports"][0]["failures"] == 0, f"{status(server)}")


@suite.test()
def a_file_system_view_of_an_export(world, scale):
    if missing("nbdfuse"):
        return
    if (
        os.geteuid() != 0
        or not os.path.exists("/dev/fuse")
        or not (shutil.which("fusermount3") or shutil.which("fusermount"))
    ):
        skip("fuse", "no /dev/fuse, or fusermount is not installed")
        return
    size = scale.pick(64, 8) * MIB
    _, socket = serve(world, "128M", f"disk={size}")
    file = world.dir / "disk.img"
    file.touch()
    fuse = subprocess.Popen(
        ["nbdfuse", file, uri(socket, "disk")], stdin=subprocess.DEVNULL, preexec_fn=procs.end_with_parent
    )
    try:
        wait_until("mounted", lambda: fuse.poll() is None and file.stat().st_size == size)
        path, _ = image(world, "image", size, scale.seed)
        run("dd", f"if={path}", f"of={file}", "bs=1M", "conv=notrunc,fsync")
        run("cmp", path, file)
    finally:
        run("nbdfuse", "-u", file, code=None)
        try:
            fuse.wait(30)
        except subprocess.TimeoutExpired:
            fuse.kill()
            fuse.wait()


@suite.test()
def a_server_that_is_killed_is_an_error_at_once(world, scale):
    if missing("nbdcopy"):
        return
    server, socket = serve(world, "256M", "disk=128M")
    path, _ = image(world, "image", 128 * MIB, scale.seed)
    run("nbdcopy", path, uri(socket, "disk"))
    copying = subprocess.Popen(
        ["sh", "-c", f"while :; do nbdcopy '{uri(socket, 'disk')}' null: || exit 9; done"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=procs.end_with_parent,
    )
    before = status(server)["exports"][0]["read_bytes"]
    wait_until("the copy is under way", lambda: status(server)["exports"][0]["read_bytes"] > before)
    server.kill()
    try:
        said = copying.communicate(timeout=60)[1].decode()
    except subprocess.TimeoutExpired:
        procs.kill_all(procs.descendants(copying.pid) + [copying.pid])
        check(False, "HANG: the client waits for a server that is gone")
    check(copying.returncode == 9 and said, f"{copying.returncode} {said}")


@suite.test()
def a_stopping_server_waits_for_its_block_clients(world, scale):
    if missing("qemu-io"):
        return
    server, socket = serve(world, "64M", "disk=32M", options=["--drain-ms", "100000"])
    client = subprocess.Popen(
        ["qemu-io", "-f", "raw", uri(socket, "disk")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=procs.end_with_parent,
    )
    wait_until("the client is there", lambda: status(server)["exports"][0]["clients"] > 0)
    server.process.send_signal(signal.SIGTERM)
    wait_until("the server stops", lambda: status(server)["draining"])
    out, _ = client.communicate("write -P 3 0 1M\nread -P 3 0 1M\nquit\n", timeout=60)
    check(out.count("1 MiB, 1 ops") == 2 and "mismatch" not in out and "failed" not in out, out)
    check(server.process.wait(60) == 0, server.said())


@suite.test()
def what_cannot_be_is_refused_at_the_start(world, scale):
    def refused(*options):
        return run(
            rampool_binary(),
            "serve",
            "--memory",
            "64M",
            "--listen",
            f"unix:{world.dir / 'rampool'}",
            *options,
            timeout=30,
            code=REFUSED,
        )

    here = ["--nbd", f"unix:{world.dir / 'nbd'}"]
    check("does not fit" in (said := refused(*here, "--export", "a=48M", "--export", "b=48M")), said)
    check("--export" in (said := refused(*here)), said)
    check(
        "--nbd-plain" in (said := refused("--nbd", "0.0.0.0:0", "--export", "a=1M")) and "nbdkit" in said,
        said,
    )


@suite.test()
def tls_in_front_of_it(world, scale):
    if missing("nbdkit", "nbdcopy", "nbdinfo"):
        return
    _, socket = serve(world, "128M", "disk=64M")
    keys, front, port = world.dir / "keys.psk", world.dir / "front", free_port()
    keys.write_text(f"alice:{random.Random(scale.seed).randbytes(32).hex()}\n")
    keys.chmod(0o600)
    nbdkit = subprocess.Popen(
        [
            "nbdkit", "--foreground", "--tls=require", f"--tls-psk={keys}", "--ipaddr=127.0.0.1",
            f"--port={port}", "nbd", uri(socket, "disk"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=open(front, "wb"),
        stderr=subprocess.STDOUT,
        preexec_fn=procs.end_with_parent,
    )
    secret = f"nbds://alice@127.0.0.1:{port}/?tls-psk-file={keys}"
    wait_until(
        "nbdkit is there",
        lambda: (
            subprocess.run(["nbdinfo", "--size", secret], capture_output=True, check=False).returncode == 0
        ),
    )
    path, _ = image(world, "image", 64 * MIB, scale.seed)
    back = world.dir / "back"
    run("nbdcopy", path, secret)
    run("nbdcopy", secret, back)
    check(digest(back) == digest(path), "other bytes come back")
    run("nbdinfo", "--size", f"nbd://127.0.0.1:{port}/", code=1)
    nbdkit.terminate()
    nbdkit.wait(30)


if __name__ == "__main__":
    procs.end_with_parent()
    suite.main()
