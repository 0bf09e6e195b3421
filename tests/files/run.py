#!/usr/bin/env python3
"""`rampool mount`: files in the pool, used by programs that know nothing of it. Every byte is compared."""

import contextlib
import ctypes
import errno
import hashlib
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import procs  # noqa: E402
from harness.suite import Suite  # noqa: E402
from harness.world import MIB, ROOT, check, rampool_binary, skip  # noqa: E402

HERE = Path(__file__).resolve().parent
PYTHON = ROOT / ".venv/bin/python"
REFUSED = 125
suite = Suite("files")


def no_fuse():
    """Whether nothing can be mounted; then the test is skipped."""
    if os.geteuid() == 0 and os.path.exists("/dev/fuse"):
        return False
    skip("fuse", "no /dev/fuse, or not root")
    return True


def wait_until(what, condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, f"after {seconds} s: not {what}")
        time.sleep(0.02)


class Mount:
    """A directory with files in the pool of these servers."""

    def __init__(self, world, servers, size="256M", *options):
        number = next(world.numbers)
        self.at, self.err = world.dir / f"files{number}", world.dir / f"mount{number}.err"
        self.out = world.dir / f"mount{number}.out"
        self.at.mkdir()
        named = [word for server in servers for word in ("--server", server.address)]
        command = [rampool_binary(), "mount", self.at, "--size", size, *named, *options]
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=procs.end_with_parent,
            )
        wait_until(f"mounted: {self.said()}", lambda: "files on" in self.out.read_text() or self.ended())
        check(not self.ended(), f"the mount ended at once: {self.said()}")

    def ended(self):
        return self.process.poll() is not None

    def said(self):
        return self.err.read_text(errors="replace")

    def stop(self):
        """As a user stops it. Nothing is mounted afterwards."""
        if self.ended():
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            check(False, f"HANG: the mount runs 30 s after SIGTERM\n{procs.stacks([self.process.pid])}")
        check(code == 0, f"the mount ended with {code}: {self.said()}")
        check(not os.path.ismount(self.at), "it is still mounted")

    def free(self):
        of = os.statvfs(self.at)
        return of.f_bavail * of.f_frsize


@contextlib.contextmanager
def mounted(world, servers, size="256M", *options):
    mount = Mount(world, servers, size, *options)
    try:
        yield mount
        mount.stop()
    finally:
        if not mount.ended():
            mount.process.kill()
            mount.process.wait()
        subprocess.run(["umount", "-l", mount.at], stderr=subprocess.DEVNULL, check=False)


def run(*argv, timeout=120, code=0, **how):
    try:
        done = subprocess.run(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
            **how,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.output or b"").decode(errors="replace")[-1000:]
        check(False, f"HANG: {argv[0]} runs for {timeout} s\n{said}")
    text = done.stdout.decode(errors="replace")
    if code is not None:
        check(done.returncode == code, f"{argv[0]} ended with {done.returncode}: {text[-1500:]}")
    return text


def forget():
    """The kernel forgets what it can."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def expect(number, action):
    try:
        action()
    except OSError as error:
        name = errno.errorcode.get(error.errno)
        check(error.errno == number, f"{name}, not {errno.errorcode[number]}")
        return
    check(False, f"no error, {errno.errorcode[number]} is due")


@suite.test()
def what_a_mount_says_and_gives_back(world, scale):
    if no_fuse():
        return
    server = world.serve("512M", "--no-lock")
    with mounted(world, [server], "300M") as mount:
        of = os.statvfs(mount.at)
        check(of.f_blocks * of.f_frsize == 300 * MIB and of.f_bfree == of.f_blocks, f"{of}")
        (mount.at / "a").write_bytes(bytes(MIB))
        (mount.at / "b").write_bytes(random.Random(scale.seed).randbytes(5 * MIB + 1))
        forget()
        check(mount.free() == 300 * MIB - 6 * MIB - 4096, f"{mount.free()}")
        (mount.at / "b").unlink()
        wait_until("the room is back", lambda: mount.free() == 299 * MIB)
        busy = world.dir / "busy"
        busy.mkdir()
        (busy / "file").touch()
        for directory, why in [(busy, "empty"), (world.dir / "none", "cannot mount")]:
            command = [rampool_binary(), "mount", directory, "--size", "1M", "--server", server.address]
            check(why in (said := run(*command, code=REFUSED)), said)
        said = run(rampool_binary(), "mount", world.dir / "none", "--size", "1G", code=REFUSED)
        check("cannot mount" in said, said)
    free = run(rampool_binary(), "status", "--server", server.address)
    check(free.count("512 MiB") == 2, f"the lease is given back: {free}")
    # Without a server named, one of its own.
    with mounted(world, [], "64M", "--allow-other") as mount:
        (mount.at / "file").write_bytes(bytes(range(256)) * 4096 * 8)
        forget()
        check((mount.at / "file").read_bytes() == bytes(range(256)) * 4096 * 8, "other bytes come back")
        mode = os.stat(mount.at).st_mode & 0o7777
        check(mode == 0o1777 and "private server" in mount.said(), f"{mode:o} {mount.said()}")
    # Somebody else unmounts it, and the command ends.
    with contextlib.ExitStack() as stack:
        mount = Mount(world, [server])
        stack.callback(mount.process.kill)
        run("umount", mount.at)
        check(mount.process.wait(30) == 0, mount.said())


@suite.test()
def names_and_attributes(world, scale):
    if no_fuse():
        return
    with mounted(world, [world.serve("128M", "--no-lock")], "64M") as mount:
        at = mount.at
        (at / "d/e").mkdir(parents=True)
        (at / "d/file").write_text("one")
        os.link(at / "d/file", at / "other")
        os.symlink("d/file", at / "link")
        os.mkfifo(at / "pipe")
        check((at / "link").read_text() == "one" and os.stat(at / "other").st_nlink == 2, "links")
        os.chmod(at / "other", 0o640)
        os.utime(at / "other", ns=(10**18, 2 * 10**18 + 5))
        seen = os.stat(at / "d/file")
        times = (seen.st_atime_ns, seen.st_mtime_ns)
        check((seen.st_mode & 0o7777, times) == (0o640, (10**18, 2 * 10**18 + 5)), f"{seen}")
        (at / "new").write_text("two")
        os.replace(at / "new", at / "other")
        check((at / "other").read_text() == "two" and (at / "d/file").read_text() == "one", "replaced")
        check(os.stat(at / "d/file").st_nlink == 1, "one name less")
        expect(errno.ENOTEMPTY, lambda: os.rmdir(at / "d"))
        expect(errno.EINVAL, lambda: os.rename(at / "d", at / "d/e/f"))
        expect(errno.EEXIST, lambda: os.mkdir(at / "d/e"))
        expect(errno.ENOTDIR, lambda: os.rename(at / "d", at / "other"))
        expect(errno.EISDIR, lambda: os.rename(at / "other", at / "d"))
        expect(errno.ENAMETOOLONG, lambda: (at / ("n" * 256)).touch())
        for number in range(1000):
            (at / f"d/{number}").touch()
        check(len(os.listdir(at / "d")) == 1002, f"{len(os.listdir(at / 'd'))} names")
        shutil.rmtree(at / "d")
        check(sorted(os.listdir(at)) == ["link", "other", "pipe"], f"{os.listdir(at)}")


@suite.test()
def random_operations_are_as_in_memory(world, scale):
    if no_fuse():
        return
    with mounted(world, [world.serve("128M", "--no-lock")], "64M") as mount:
        for seed in range(scale.pick(40, 4)):
            run(sys.executable, HERE / "exercise.py", mount.at, scale.seed + seed, scale.pick(4000, 1500))
        wait_until("all of it is free", lambda: mount.free() == 64 * MIB)


@suite.test()
def what_is_not_there_is_refused(world, scale):
    if no_fuse():
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def called(name, *arguments):
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), name)

    with mounted(world, [world.serve("128M", "--no-lock")], "64M") as mount:
        one, two = mount.at / "one", mount.at / "two"
        one.write_bytes(bytes(MIB))
        two.write_bytes(b"two")
        fd = os.open(one, os.O_RDWR)
        # All of a file is data, also what is a hole: the kernel may have bytes that are not written yet.
        called("fallocate", fd, 3, ctypes.c_long(0), ctypes.c_long(MIB // 2))
        check(os.fstat(fd).st_blocks * 512 == MIB // 2, "a hole has no pages")
        found = (os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, 0, os.SEEK_HOLE))
        check(found == (0, MIB), f"no holes are told: {found}")
        expect(errno.ENXIO, lambda: os.lseek(fd, MIB, os.SEEK_DATA))
        for mode in (0x08, 0x20, 0x40):  # collapse, insert, unshare
            page = (ctypes.c_long(0), ctypes.c_long(4096))
            expect(errno.EOPNOTSUPP, lambda: called("fallocate", fd, mode, *page))
        expect(errno.EOPNOTSUPP, lambda: os.open(mount.at, os.O_TMPFILE | os.O_RDWR))
        expect(errno.EOPNOTSUPP, lambda: os.setxattr(one, "user.a", b"1"))
        expect(errno.EOPNOTSUPP, lambda: os.getxattr(one, "user.a"))
        expect(errno.EOPNOTSUPP, lambda: os.listxattr(one))
        rename = lambda flags: called("renameat2", -100, bytes(one), -100, bytes(two), flags)  # noqa: E731
        expect(errno.EEXIST, lambda: rename(1))
        rename(2)
        check(one.read_bytes() == b"two" and two.stat().st_size == MIB, "they are exchanged")
        expect(errno.EINVAL, lambda: rename(4))  # whiteout
        rename(0)
        check(os.listdir(mount.at) == ["two"] and two.read_bytes() == b"two", "one has replaced the other")
        os.close(fd)


@suite.test()
def a_user_mounts_by_fusermount3(world, scale):
    if no_fuse():
        return
    check(shutil.which("fusermount3") and shutil.which("setpriv"), "fuse3 is missing: scripts/setup.sh test")
    server, user = world.serve("128M", "--no-lock"), 65534
    mode = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        binary = shutil.copy(rampool_binary(), place)
        at, run_dir = Path(place, "at"), Path(place, "run")
        for made in (at, run_dir):
            made.mkdir(mode=0o700)
            os.chown(made, user, user)
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        try:
            # As distributions have it.
            os.chmod("/dev/fuse", 0o666)
            mount = subprocess.Popen(
                [*command, binary, "mount", at, "--size", "64M", "--server", server.address],
                stdout=subprocess.PIPE, preexec_fn=procs.end_with_parent,
                env={**os.environ, "XDG_RUNTIME_DIR": str(run_dir), "TMPDIR": str(run_dir)},
            )  # fmt: skip
            check(b"files on" in mount.stdout.readline(), "it is not mounted")
            run(*command, "sh", "-c", f"echo mine > {at}/file && cat {at}/file && df {at}")
            owner = run(*command, "stat", "-c", "%u %a %s", at / "file").split()
            check(owner == [str(user), "644", "5"], f"{owner}")
            expect(errno.EACCES, lambda: os.listdir(at))
            # Directly, since `setpriv` is the command itself by now.
            mount.terminate()
            check(mount.wait(30) == 0, "it ended with an error")
            check(not os.path.ismount(at), "it is still mounted")
        finally:
            os.chmod("/dev/fuse", mode)
            subprocess.run(["umount", "-l", at], stderr=subprocess.DEVNULL, check=False)


@suite.test()
def fio_verifies_what_it_wrote(world, scale):
    if no_fuse():
        return
    if not shutil.which("fio"):
        skip("nbd-clients", "fio: not installed (scripts/setup.sh test)")
        return
    with mounted(world, [world.serve("256M", "--no-lock")], "200M") as mount:
        engines = {"mmap": [], "psync": ["--fsync=50"], "libaio": ["--direct=1", "--iodepth=16"]}
        for engine, more in engines.items():
            run(
                "fio", f"--name={engine}", f"--directory={mount.at}", f"--ioengine={engine}", "--bs=4k",
                "--rw=randwrite", f"--size={scale.pick(128, 24)}M", "--verify=crc32c", "--verify_fatal=1",
                *more, "--verify_state_save=0", f"--randseed={scale.seed}", "--unlink=1", cwd=world.dir,
            )


@suite.test()
def a_full_directory_is_an_error_and_no_more(world, scale):
    if no_fuse():
        return
    with mounted(world, [world.serve("128M", "--no-lock")], "32M") as mount:
        kept = random.Random(scale.seed).randbytes(8 * MIB)
        (mount.at / "kept").write_bytes(kept)
        said = run("dd", "if=/dev/zero", f"of={mount.at}/much", "bs=1M", "count=64", "conv=fsync", code=1)
        check("No space left" in said, said)
        expect(errno.ENOSPC, lambda: os.posix_fallocate(os.open(mount.at / "kept", os.O_RDWR), 0, 64 * MIB))
        (mount.at / "much").unlink()
        wait_until("the room is back", lambda: mount.free() == 24 * MIB)
        forget()
        check((mount.at / "kept").read_bytes() == kept, "other bytes come back")
        (mount.at / "more").write_bytes(kept * 3)
        forget()
        check(mount.free() == 0 and (mount.at / "more").read_bytes() == kept * 3, "all of it can be used")


def lines(path, count, seed):
    rng = random.Random(seed)
    path.write_bytes(b"".join(b"%016x %d\n" % (rng.getrandbits(64), number) for number in range(count)))
    return path


@suite.test()
def sort_spills_there(world, scale):
    if no_fuse():
        return
    source = lines(world.dir / "lines", scale.pick(3_000_000, 400_000), scale.seed)
    env = {**os.environ, "LC_ALL": "C"}
    run("sort", "-o", world.dir / "wanted", source, env=env)
    with mounted(world, [world.serve("1G", "--no-lock")], "512M") as mount:
        run("sort", "-S", "2M", "-T", mount.at, "-o", world.dir / "found", source, env=env)
        run("cmp", world.dir / "wanted", world.dir / "found")
        check(os.listdir(mount.at) == [] and mount.free() < 2**40, "sort removes its files")


SQLITE = """
import hashlib, sqlite3, sys
rows = int(sys.argv[1])
c = sqlite3.connect(sys.argv[2])
c.executescript("PRAGMA temp_store=FILE; PRAGMA cache_size=-512; PRAGMA temp.cache_size=-512;")
c.execute("CREATE TABLE t AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
          " SELECT i, i * 2654435761 % 4294967296 AS k, hex(i * 7919) AS s FROM n", (rows,))
found = hashlib.sha256()
for row in c.execute("SELECT k, s, i FROM t ORDER BY s, k"):
    found.update(repr(row).encode())
c.execute("CREATE INDEX by_k ON t(k)")
print(found.hexdigest(), c.execute("PRAGMA integrity_check").fetchone()[0])
"""

DUCKDB = """
import duckdb, sys
c = duckdb.connect()
c.execute("SET threads=2; SET enable_progress_bar=false")
if len(sys.argv) > 2:
    c.execute(f"SET memory_limit='{sys.argv[3]}'; SET temp_directory='{sys.argv[2]}'")
c.execute("CREATE TABLE t AS SELECT hash(i) AS k, i FROM range(%s) r(i)" % sys.argv[1])
c.execute("CREATE TABLE s AS SELECT k, i FROM t ORDER BY k")
print(c.execute("SELECT sum(i), sum(k % 1000003 * (rowid % 1009)), count(*) FROM s").fetchone())
spilled = c.execute("SELECT sum(size) FROM duckdb_temporary_files()").fetchone()[0] or 0
print(spilled, file=sys.stderr)
"""

POLARS = """
import polars as pl, sys
rows, path = int(sys.argv[1]), sys.argv[2]
frame = pl.LazyFrame({"i": range(rows)}).with_columns(k=pl.col("i").hash(7))
frame.sink_ipc(path + "/t.arrow")
out = frame.join(pl.scan_ipc(path + "/t.arrow"), on="k").sort("k").collect(engine="streaming")
print(out.height, out["i"].sum(), out["i"].head(3).to_list(), out["i"].tail(3).to_list())
"""


@suite.test()
def sqlite_duckdb_and_polars_spill_there(world, scale):
    if no_fuse():
        return
    check(PYTHON.exists(), f"{PYTHON} is missing: scripts/setup.sh test")
    env = {name: value for name, value in os.environ.items() if name != "SQLITE_TMPDIR"}
    with mounted(world, [world.serve("5G", "--no-lock")], scale.pick("4G", "1G")) as mount:
        rows = scale.pick(2_000_000, 150_000)
        wanted = run(sys.executable, "-c", SQLITE, rows, world.dir / "wanted.db", env=env)
        there = {**env, "SQLITE_TMPDIR": str(mount.at)}
        found = run(sys.executable, "-c", SQLITE, rows, mount.at / "found.db", env=there)
        check(found == wanted and " ok" in found, f"{found} {wanted}")
        rows = scale.pick(20_000_000, 4_000_000)
        wanted, _ = spilled(run(PYTHON, "-c", DUCKDB, rows))
        found, bytes_ = spilled(run(PYTHON, "-c", DUCKDB, rows, mount.at, scale.pick("192MB", "48MB")))
        check(found == wanted, f"{found} {wanted}")
        check(bytes_ > 16 * MIB, f"DuckDB has spilled {bytes_} bytes: the test is too small")
        plain = world.dir / "plain"
        plain.mkdir()
        rows = scale.pick(5_000_000, 1_000_000)
        wanted = run(PYTHON, "-c", POLARS, rows, plain)
        options = {"SPILL_DIR": mount.at, "MEMORY_BUDGET_MB": 16, "SPILL_MIN_BYTES": 65536, "LOG_METRICS": 1}
        options = {f"POLARS_OOC_{name}": str(value) for name, value in options.items()}
        options["POLARS_OOC_SPILL_POLICY"] = "spill"
        found = run(PYTHON, "-c", POLARS, rows, mount.at, env={**env, **options})
        check(found.splitlines()[-1:] == wanted.splitlines(), f"{found} {wanted}")
        written = re.findall(r"file_mb\(written=([\d.]+)", found)
        check(any(float(megabytes) > 1 for megabytes in written), f"Polars does not spill: {found}")


def spilled(text):
    *lines_, bytes_ = text.strip().splitlines()
    return lines_, int(bytes_)


@suite.test(reduced=False)
def ray_and_spark_spill_there(world, scale):
    if no_fuse():
        return
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with mounted(world, [world.serve("2G", "--no-lock")], "1500M") as mount:
        for words, least in ((["ray_spills.py"], 256 * MIB), (["spark_spills.py", 1_000_000], 32 * MIB)):
            said = run(PYTHON, HERE / words[0], *words[1:], mount.at, env=env, timeout=600)
            bytes_ = int(said.split()[-1])
            check(bytes_ > least, f"{words[0]} has spilled {bytes_} bytes: the test is too small")
            scale.note(f"{words[0]}: {bytes_ // MIB} MiB")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@suite.test()
def a_server_with_the_only_copy_is_killed(world, scale):
    if no_fuse():
        return
    server = world.serve("256M", "--no-lock")
    with mounted(world, [server], "128M") as mount:
        (mount.at / "file").write_bytes(random.Random(scale.seed).randbytes(32 * MIB))
        forget()
        server.kill()
        expect(errno.EIO, lambda: (mount.at / "file").read_bytes())
        wait_until("it names the server", lambda: server.address in mount.said())

        def write():
            with open(mount.at / "new", "wb") as new:
                new.write(bytes(4 * MIB))
                new.flush()
                os.fsync(new.fileno())

        expect(errno.EIO, write)
        check(sorted(os.listdir(mount.at)) == ["file", "new"], "names are here")


@suite.test()
def one_of_two_servers_is_killed_and_comes_back(world, scale):
    if no_fuse():
        return
    servers = [world.serve("256M", "--no-lock", name=name) for name in ("one", "two")]
    with mounted(world, servers, "128M") as mount:
        check("2 copies of each page" in mount.said(), mount.said())
        data = random.Random(scale.seed).randbytes(24 * MIB)
        (mount.at / "file").write_bytes(data)
        forget()
        writer = subprocess.Popen(
            [sys.executable, HERE / "exercise.py", mount.at, str(scale.seed), "1500"],
            stderr=subprocess.PIPE, preexec_fn=procs.end_with_parent,
        )
        time.sleep(0.2)
        servers[scale.seed % 2].kill()
        said = writer.communicate(timeout=60)[1].decode()
        check(writer.returncode == 0, f"{said}\n{mount.said()}")
        forget()
        check((mount.at / "file").read_bytes() == data, "other bytes come back")
        wait_until("it says so", lambda: servers[scale.seed % 2].address in mount.said())
        # It is back, empty, and gets its copies; then the other one goes.
        back = world.serve("256M", "--no-lock", listen=servers[scale.seed % 2].address)
        wait_until("it is back", lambda: f"{back.address} is back" in mount.said())
        (mount.at / "more").write_bytes(data[::-1])
        forget()
        table = lambda: run(rampool_binary(), "status", "--server", back.address)  # noqa: E731
        wait_until("it has all pages", lambda: f"{24 * 2} MiB" in table())
        servers[1 - scale.seed % 2].kill()
        forget()
        check((mount.at / "file").read_bytes() == data, "other bytes come back")
        check((mount.at / "more").read_bytes() == data[::-1], "other bytes come back")


@suite.test()
def a_directory_in_use_is_unmounted_all_the_same(world, scale):
    if no_fuse():
        return
    with mounted(world, [world.serve("128M", "--no-lock")], "64M") as mount:
        fd = os.open(mount.at / "file", os.O_RDWR | os.O_CREAT)
        os.write(fd, bytes(MIB))
        mount.stop()
        check("is in use" in mount.said(), mount.said())
        expect(errno.ENOTCONN, lambda: os.ftruncate(fd, 0))
        with contextlib.suppress(OSError):
            os.close(fd)


if __name__ == "__main__":
    procs.end_with_parent()
    suite.main()
