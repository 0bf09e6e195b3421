"""rampool.attach: a Python that runs already gets more memory than it may have here."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

ANONYMOUS = """
import os, rampool, numpy as np
def here():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon:")) / 1024
"""
ATTACH = ANONYMOUS + 'rampool.attach("100M", os.environ["SERVER"], memory="700M")\n'


def test_memory_beyond_the_budget_is_in_the_pool_and_right(python):
    said = python(
        ATTACH
        + """
a = np.arange(40_000_000, dtype="f8")          # 305 MiB
assert here() < 100 + 32, here()
assert a[::4096].tolist() == list(range(0, 40_000_000, 4096))
a.sort(); assert float(a[-1]) == 39_999_999
print(rampool.status())
"""
    )
    assert "of at most 100M" in said


def test_forks_subprocesses_and_workers(python):
    said = python(
        ATTACH
        + """
import subprocess, multiprocessing
a = np.arange(40_000_000, dtype="f8")
child = os.fork()
if child == 0:
    os._exit(42 if float(a[::1000].sum()) == sum(range(0, 40_000_000, 1000)) and here() < 132 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert subprocess.run(["echo", "x"], capture_output=True, check=True).stdout == b"x\\n"
assert "RAMPOOL_RUN_DIR" not in os.environ and "LD_PRELOAD" not in os.environ
def part(n):
    return float(a[n * 1000])
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(part, range(8)) == [n * 1000.0 for n in range(8)]
with multiprocessing.get_context("spawn").Pool(1) as pool:
    assert pool.map(abs, [-1]) == [1]
with multiprocessing.get_context("forkserver").Pool(1) as pool:
    assert pool.map(abs, [-1]) == [1]
print("well")
"""
    )
    assert said.endswith("well\n")


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can give CAP_SYS_PTRACE up here"
)
def test_a_fork_that_cannot_be_followed_is_refused(python):
    said = python(
        ATTACH
        + """
import subprocess, multiprocessing
a = np.arange(40_000_000, dtype="f8")
for fork in [os.fork, lambda: multiprocessing.get_context("fork").Pool(1)]:
    try:
        if fork() == 0:
            os._exit(0)
    except rampool.ForkError as error:
        print(error)
assert subprocess.run(["echo", "x"], capture_output=True, check=True).stdout == b"x\\n"
with multiprocessing.get_context("forkserver").Pool(1) as pool:
    assert pool.map(abs, [-1]) == [1]
assert a.sum() == 799_999_980_000_000
""",
        command=("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", sys.executable),
    )
    assert said.count("CAP_SYS_PTRACE") == 2


def test_programs_that_are_started_get_the_same_if_asked_for(python):
    said = python(
        ANONYMOUS
        + """
import subprocess, sys
rampool.attach("100M", os.environ["SERVER"], memory="700M", children=True)
program = '''
import numpy as np
a = np.ones(40_000_000)
print(a.sum(), next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon:")) // 1024)
'''
done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
total, mib = done.stdout.split()
assert total == "40000000.0" and int(mib) < 132, mib
print("well")
"""
    )
    assert said.endswith("well\n")


def test_what_cannot_be_attached_says_why(python):
    said = python("""
import rampool
def refused(*words, **options):
    try:
        rampool.attach(*words, **options)
    except rampool.Error as error:
        print(error)
refused("100M", "unix:/no/such.sock")
refused("much")
refused("100M", SERVER := __import__("os").environ["SERVER"], memory="1T")
refused("100M", SERVER, page_size="5000")
refused("100M", SERVER, nonsense="1")
rampool.attach("100M", SERVER, memory="200M")
assert rampool.attach("100M").local == "100M"
refused("200M")
""").splitlines()
    for line, what in zip(
        said,
        ["/no/such.sock", "much", "cannot lend 1 TiB", "page size 5000", "--nonsense", "attached already"],
        strict=True,
    ):
        assert what in line, line


def test_a_program_of_rampool_run_is_not_attached_twice(python):
    from rampool._command import command

    program = (
        'import rampool\ntry:\n    rampool.attach("100M")\nexcept rampool.Error as error:\n    print(error)'
    )
    said = python(
        program, command=(command(), "run", "--local", "100M", "--memory", "200M", "--", sys.executable)
    )
    assert "manages its memory already" in said


def test_the_lease_ends_with_the_process(python, own_server):
    from rampool._command import command

    python(
        'import rampool, os; rampool.attach("100M", os.environ["SERVER"], memory="64M")',
        SERVER=own_server.address,
    )
    for _ in range(600):
        said = subprocess.run(
            [command(), "status", "--server", own_server.address], capture_output=True, text=True, check=True
        ).stdout
        if "python" not in said:
            return
        time.sleep(0.1)
    pytest.fail(said)


# --- a notebook ---------------------------------------------------------------------------------------------

CGROUPS = pathlib.Path("/sys/fs/cgroup/memory")

JOB = """
import numpy as np, pandas as pd
frames = []
for k in range(24):                                   # 24 x 128 MiB = 3 GiB
    keys = np.arange(8_388_608, dtype="i8") % 97
    frames.append(pd.DataFrame({"key": keys, "value": np.full(8_388_608, float(k))}))
    del keys
total = sum(float(frame["value"].sum()) for frame in frames)
groups = frames[3].groupby("key")["value"].sum()
print("total", total, len(groups))
"""


@pytest.fixture
def cgroup():
    """A memory cgroup of 1 GiB, of version 1, which counts page cache too."""
    if not os.access(CGROUPS / "cgroup.procs", os.W_OK) or not (CGROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("no memory cgroup of version 1 can be made here")
    group = CGROUPS / f"rampool-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(1 << 30))
    yield group
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def kernel(group, code, timeout):
    """Runs cells in a real Jupyter kernel inside a cgroup; what they print, or None where the kernel died."""
    program = textwrap.dedent("""
        import sys, queue, jupyter_client
        manager = jupyter_client.KernelManager(kernel_name="python3")
        manager.start_kernel()
        client = manager.client(); client.start_channels(); client.wait_for_ready(timeout=120)
        for cell in sys.argv[2:]:
            request = client.execute(cell)
            while True:
                try:
                    message = client.get_iopub_msg(timeout=1)
                except queue.Empty:
                    if not manager.is_alive():
                        print("DIED"); sys.exit()
                    continue
                if message["parent_header"].get("msg_id") != request:
                    continue
                kind, content = message["msg_type"], message["content"]
                if kind == "stream": print(content["text"], end="")
                if kind == "error": print("RAISED", content["ename"], content["evalue"])
                if kind == "status" and content["execution_state"] == "idle": break
        client.stop_channels(); manager.shutdown_kernel(now=True)
    """)

    def enter():
        (group / "cgroup.procs").write_text(str(os.getpid()))

    words = [sys.executable, "-c", program, "x", *code]
    return subprocess.run(words, preexec_fn=enter, capture_output=True, text=True, timeout=timeout).stdout


@pytest.mark.slow
def test_a_notebook_that_would_die_goes_on(cgroup, tmp_path):
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    from conftest import Server

    assert "DIED" in kernel(cgroup, [JOB], 600), "the job fits without rampool: the test proves nothing"
    server = Server(tmp_path, "4G")
    try:
        cells = ["%load_ext rampool", f"%rampool 512M {server.address} --memory 4G", JOB, "%rampool status"]
        said = kernel(cgroup, cells, 900)
    finally:
        server.stop()
    assert f"total {sum(range(24)) * 8_388_608.0} 97" in said, said
    assert said.count("of at most 512M") == 2, said
