"""Workloads of the world's programs that are written in Python, or that need a client: `work.py NAME SIZE`.

Each prints its answer alone.
"""

import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def digest(*parts):
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part if isinstance(part, (bytes, bytearray, memoryview)) else repr(part).encode())
    return hasher.hexdigest()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def connected(port, process):
    """A connection to a server that has just been started."""
    for _ in range(3000):
        try:
            return socket.create_connection(("127.0.0.1", port), 300)
        except OSError:
            if process.poll() is not None:
                sys.exit(f"the server ended with {process.returncode}")
            time.sleep(0.02)
    sys.exit("the server does not listen")


# ---- columns and tables


def duckdb(rows):
    import duckdb

    db = duckdb.connect()
    db.execute("set threads = 2; set preserve_insertion_order = true")
    db.execute(
        "create table t as select i, (i * 7919) % 100003 k, (i * 31) % 997 g, "
        f"'name-' || (i * 104729 % {rows}) s from range({rows}) r(i)"
    )
    grouped = db.execute(
        "select g, count(*), sum(k), min(s), count(distinct s) from t group by g order by g"
    ).fetchall()
    joined = db.execute(
        "select count(*), sum(a.k + b.g) from t a join t b on a.s = b.s where a.g < 600"
    ).fetchall()
    top = db.execute("select s, i from t order by s desc, i limit 20").fetchall()
    return digest(grouped, joined, top)


def polars(rows):
    import polars as pl

    frame = pl.DataFrame({"i": range(rows)}).with_columns(
        k=pl.col("i") * 7919 % 100003,
        g=pl.col("i") * 31 % 997,
        s=pl.format("name-{}", pl.col("i") * 104729 % rows),
    )
    grouped = frame.group_by("g").agg(pl.len(), pl.col("k").sum(), pl.col("s").min()).sort("g")
    joined = frame.join(frame.select("s", other="g"), on="s").select(pl.len(), pl.col("other").sum())
    return digest(grouped.rows(), joined.rows(), frame.sort("s", descending=True).head(20).rows())


def pandas(rows):
    import numpy as np
    import pandas as pd

    i = np.arange(rows)
    frame = pd.DataFrame({"i": i, "k": i * 7919 % 100003, "g": i * 31 % 997, "x": (i * 104729 % rows) / rows})
    grouped = frame.groupby("g").agg({"k": "sum", "x": "max", "i": "count"})
    joined = frame.merge(grouped, left_on="g", right_index=True)
    ordered = joined.sort_values(["x_x", "i_x"], kind="stable")
    return digest(grouped.to_numpy().tobytes(), ordered.iloc[::97].to_numpy().tobytes())


def kmeans(rows):
    import numpy as np
    from sklearn.cluster import KMeans

    points = np.random.default_rng(1).random((rows, 16))
    points[: rows // 2] += 2
    model = KMeans(4, n_init=1, max_iter=6, random_state=1, algorithm="lloyd").fit(points)
    return digest(sorted(np.bincount(model.labels_).tolist()), round(float(model.inertia_), 3))


def splu(side):
    import numpy as np
    import scipy.sparse as sparse
    from scipy.sparse.linalg import splu

    line = sparse.diags([-1.0, 4.0, -1.0], [-1, 0, 1], shape=(side, side))
    matrix = sparse.kron(sparse.eye(side), line) + sparse.kron(
        sparse.diags([-1.0, -1.0], [-1, 1], shape=(side, side)), sparse.eye(side)
    )
    wanted = np.arange(side * side) % 101 - 50.0
    found = splu(matrix.tocsc()).solve(matrix @ wanted)
    return digest(np.rint(found).astype(int).tobytes(), bool(np.abs(found - wanted).max() < 1e-6))


def torch(rows):
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(2)
    table = torch.arange(rows * 64, dtype=torch.int32).reshape(rows, 64)
    total = torch.zeros(64, dtype=torch.int64)
    for step in range(20):
        at = (torch.arange(1500, dtype=torch.int64) * 104729 + step * 7919) % rows
        total += table[at].to(torch.int64).sum(0)
        table[at] += 1
    product = (table[:2000].double() % 97) @ (table[-2000:].double() % 89).T
    return digest(total.tolist(), float(product.sum()))


def sqlite(rows):
    import sqlite3

    db = sqlite3.connect(":memory:")
    db.execute("pragma temp_store = memory")
    db.execute("create table t (id integer primary key, k integer, body blob)")
    db.executemany(
        "insert into t values (?, ?, ?)", ((i, i * 7919 % rows, b"%0100d" % i) for i in range(rows))
    )
    db.execute("create index t_k on t (k)")
    rng, found = random.Random(1), []
    for _ in range(rows // 20):
        found.append(db.execute("select body from t where k = ?", (rng.randrange(rows),)).fetchone())
    return digest(
        found,
        db.execute("select count(*), sum(k), max(body) from t").fetchone(),
        db.execute("select id from t order by body desc limit 50").fetchall(),
    )


# ---- processes


BLOCK = 1 << 12
blocks = []


def of_blocks(part):
    """What a forked child gathers at random from its parent's memory."""
    rng, hasher = random.Random(part), hashlib.sha256()
    for _ in range(len(blocks) // 4):
        hasher.update(blocks[rng.randrange(len(blocks))][:64])
    return hasher.hexdigest()


def fork_pool(mib):
    import multiprocessing

    global blocks
    blocks = [(b"%016d" % i) * (BLOCK // 16) for i in range(mib * (1 << 20) // BLOCK)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return digest(pool.map(of_blocks, range(4), chunksize=1))


def sort_of(part):
    import numpy as np

    numbers = np.random.default_rng(part).integers(0, 1 << 60, 9_000_000)
    numbers.sort()
    return hashlib.sha256(numbers[::1001].tobytes()).hexdigest()


def spawn_pool(parts):
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return digest(pool.map(sort_of, range(parts), chunksize=1))


def loky(parts):
    from joblib import Parallel, delayed

    return digest(Parallel(n_jobs=2, backend="loky")(delayed(sort_of)(part) for part in range(parts)))


def jupyter(mib):
    from jupyter_client.manager import start_new_kernel

    cells = (
        f"import numpy as np; a = np.arange({mib} << 17) * 7919 % 1000003",
        "b = np.sort(a); c = {i: str(i) for i in range(300000)}",
        "print(int(b[::1001].sum()), sum(len(c[i * 7919 % 300000]) for i in range(300000)))",
    )
    # The kernel comes up without the user's own settings.
    os.environ["IPYTHONDIR"] = os.environ["JUPYTER_RUNTIME_DIR"] = tempfile.mkdtemp()
    said = []
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=300)
    try:
        for cell in cells:
            reply = client.execute_interactive(
                cell,
                timeout=600,
                output_hook=lambda m: said.append(m["content"]) if m["msg_type"] == "stream" else None,
            )
            if reply["content"]["status"] != "ok":
                sys.exit(f"the kernel answers {reply['content']}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
        shutil.rmtree(os.environ["IPYTHONDIR"], ignore_errors=True)
    return "".join(one["text"] for one in said).strip()


# ---- servers, each with a client that asks for keys at random


def redis(keys):
    import redis_work

    port, home = free_port(), tempfile.mkdtemp()
    server = subprocess.Popen(
        [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            home,
            "--save",
            "",
            "--appendonly",
            "no",
            "--enable-debug-command",
            "local",
        ],
        stdout=subprocess.DEVNULL,
    )
    connected(port, server).close()
    client = redis_work.Client(port, timeout=600)
    assert client("DEBUG", "POPULATE", keys, "k", 500) == b"OK"
    before = client("DEBUG", "DIGEST")
    assert client("BGSAVE") == b"Background saving started"
    while b"rdb_bgsave_in_progress:1" in client("INFO", "persistence"):
        time.sleep(0.05)
    assert b"rdb_last_bgsave_status:ok" in client("INFO", "persistence")
    # What the child saved is what there is, read back.
    assert client("DEBUG", "RELOAD", "NOSAVE") == b"OK"
    after, size = client("DEBUG", "DIGEST"), client("DBSIZE")
    client.send([[b"SHUTDOWN", b"NOSAVE"]])
    server.wait(300)
    shutil.rmtree(home, ignore_errors=True)
    assert before == after, (before, after)
    return digest(before, size)


def memcached(keys):
    port = free_port()
    server = subprocess.Popen(
        ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", str(port), "-m", "1000", "-t", "2", "-U", "0"]
    )
    link = connected(port, server)
    replies, hasher, rng = link.makefile("rb", 1 << 18), hashlib.sha256(), random.Random(1)
    for start in range(0, keys, 200):
        link.sendall(
            b"".join(b"set k%d 0 0 500\r\n%0500d\r\n" % (i, i * 7919) for i in range(start, start + 200))
        )
        assert all(replies.readline() == b"STORED\r\n" for _ in range(200))
    for _ in range(keys // 4 // 100):
        asked = [rng.randrange(keys) for _ in range(100)]
        link.sendall(b"get " + b" ".join(b"k%d" % k for k in asked) + b"\r\n")
        while (line := replies.readline()) != b"END\r\n":
            hasher.update(line + replies.read(int(line.split()[3]) + 2))
    link.close()
    server.terminate()
    server.wait(300)
    return hasher.hexdigest()


def postgresql(rows):
    """Run as the user that the server wants to be."""
    port, home = free_port(), tempfile.mkdtemp()
    tools = sorted(Path("/usr/lib/postgresql").iterdir())[-1] / "bin"
    subprocess.run(
        [tools / "initdb", "-D", f"{home}/db", "-A", "trust", "-N", "--locale=C"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    settings = (
        "work_mem=400MB",
        "maintenance_work_mem=200MB",
        "shared_buffers=32MB",
        "fsync=off",
        "max_parallel_workers_per_gather=0",
        "hash_mem_multiplier=2",
        "jit=off",
    )
    options = [part for setting in settings for part in ("-c", setting)]
    server = subprocess.Popen(
        [tools / "postgres", "-D", f"{home}/db", "-p", str(port), "-k", home, *options],
        stderr=subprocess.DEVNULL,
    )
    connected(port, server).close()
    queries = (
        "create unlogged table t as select i, (i::bigint * 7919) % 100003 k, md5(i::text) s "
        f"from generate_series(1, {rows}) i",
        "select count(*), sum(a.k) from t a join t b on a.s = b.s",
        "select count(*), max(c) from (select s, count(*) c from t group by s) g",
        "select md5(string_agg(s, '')) from (select s from t order by s limit 100000) o",
    )
    for _ in range(600):
        done = subprocess.run(
            [
                "psql",
                "-qAt",
                "-h",
                home,
                "-p",
                str(port),
                "-d",
                "postgres",
                *[p for q in queries for p in ("-c", q)],
            ],
            capture_output=True,
            text=True,
        )
        if "starting up" not in done.stderr:
            break
        time.sleep(0.05)
    server.terminate()
    server.wait(300)
    shutil.rmtree(home, ignore_errors=True)
    if done.returncode:
        sys.exit(done.stderr)
    return digest(done.stdout)


if __name__ == "__main__":
    print(globals()[sys.argv[1]](int(sys.argv[2])))
