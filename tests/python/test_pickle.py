"""What is pickled opens in another process: by the lease's ticket, and without the key."""

import multiprocessing
import os
import pickle
import subprocess

import numpy as np
import pytest

import rampool


def raised(array):
    """What a worker does: changes an array where it lies, and says what it saw."""
    before = float(array.sum())
    # At the servers, so that two at once both count.
    array += 1
    return os.getpid(), type(array).__name__, array.name, before


def test_in_this_process_it_is_the_same_pool(pool):
    there = pool.remote("pickled", (10, 4), "i4")
    there[...] = np.arange(40).reshape(10, 4)
    assert pickle.loads(pickle.dumps(pool)) is pool
    for part in (there, there[::-2, 1:], there.T, there[3]):
        again = pickle.loads(pickle.dumps(part))
        assert again._keeps is pool and again.name == "pickled" and again.dtype == part.dtype
        np.testing.assert_array_equal(again, part)
        again += 1
        np.testing.assert_array_equal(again, part)
    unnamed = pickle.loads(pickle.dumps(pool.remote(None, 3)))
    unnamed[1] = 5
    assert unnamed.tolist() == [0, 5, 0]
    # Freed by the one, gone for the other.
    pickle.loads(pickle.dumps(there)).free()
    assert pool.list() == []
    with pytest.raises((rampool.NotFound, rampool.NotAllowed)):
        there[0, 0]


def test_an_expression_is_pickled_with_its_values(pool):
    there = pool.remote(None, 5, "i8")
    there[...] = range(5)
    text = pickle.dumps([there * 2, there > 3])
    there[...] = 0
    doubled, large = pickle.loads(text)
    assert doubled.tolist() == [0, 2, 4, 6, 8] and large.tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing(pool, method):
    there = pool.remote(f"for {method}", (2, 1000))
    there[...] = 1
    with multiprocessing.get_context(method).Pool(2) as workers:
        seen = workers.map(raised, [there[0], there[1], there[0]], chunksize=1)
    assert there.tolist() == [[3] * 1000, [2] * 1000]
    assert all(
        pid != os.getpid() and kind == "RemoteArray" and name == f"for {method}"
        for pid, kind, name, _ in seen
    )


def test_queues_and_stores(pool, python):
    jobs, results = pool.queue("to do", messages=10, bytes="1M"), pool.shared_store("done", keys=100)
    jobs.send(b"7")
    text = pickle.dumps((jobs, results, pool.remote("all", 3)))
    program = """
import pickle, sys
jobs, results, array = pickle.loads(bytes.fromhex(sys.argv[1]))
with jobs.take(10) as job:
    results["answer"] = str(int(job.head) * 6).encode()
array[1] = 42
assert jobs._pool is results._pool is array._keeps
"""
    python(f"import sys; sys.argv[1:] = [{text.hex()!r}]\n{program}")
    assert bytes(results["answer"]) == b"42" and pool.open("all").tolist() == [0, 42, 0]


def test_the_key_is_not_in_it(tmp_path, python):
    from rampool._command import command

    key = tmp_path / "pool.key"
    subprocess.run([command(), "key", str(key)], check=True, capture_output=True)
    secret = key.read_bytes().strip()
    words = [
        command(),
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--memory",
        "64M",
        "--shards",
        "1",
        "--key-file",
        str(key),
        "--until-stdin-closes",
    ]
    server = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        address = next(
            word.rstrip(",") for word in server.stdout.readline().split() if word.startswith("127.0.0.1:")
        )
        with rampool.connect(address, memory="16M", key_file=str(key)) as pool:
            there = pool.remote("keyed", 3, "i8")
            text = pickle.dumps(there)
            assert secret not in text and bytes.fromhex(secret.decode()) not in text
            program = f"import pickle; array = pickle.loads(bytes.fromhex({text.hex()!r})); array += 3"
            python(program)
            assert there.tolist() == [3, 3, 3]
            key.rename(tmp_path / "away")
            ended = python(program, check=False)
            assert "NotAllowed" in ended.stderr and str(key) in ended.stderr
    finally:
        server.kill()
        server.wait()


def test_what_is_gone_says_so(own_server, python):
    pool = rampool.connect(own_server.address, memory="16M")
    there = pool.remote("gone", 3)
    text = pickle.dumps(there)
    pool.close()
    with pytest.raises(rampool.Closed):
        there.sum()
    with pytest.raises(rampool.Closed):
        pickle.dumps(there)
    # Nobody has the lease any more.
    program = f"import pickle; pickle.loads(bytes.fromhex({text.hex()!r}))"
    ended = python(program, check=False)
    assert ended.returncode == 1 and "rampool._errors." in ended.stderr.splitlines()[-1]
    own_server.stop()
    ended = python(program, check=False)
    assert ended.returncode == 1 and "rampool._errors.ServerLost" in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_joblib_workers(pool):
    joblib = pytest.importorskip("joblib")
    there = pool.remote("for joblib", (4, 1000))
    there[...] = 1
    seen = joblib.Parallel(n_jobs=2)(joblib.delayed(raised)(there[n]) for n in range(4))
    assert there.sum() == 8000 and all(pid != os.getpid() and kind == "RemoteArray" for pid, kind, *_ in seen)


@pytest.mark.slow
def test_dask_workers(pool):
    distributed = pytest.importorskip("distributed")
    da = pytest.importorskip("dask.array")
    from rampool.dask import from_array

    here = np.random.default_rng(3).random((1000, 16))
    there = pool.remote("for dask", here.shape)
    there[...] = here
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        array = from_array(there, chunks=(100, 16))
        assert float(array[:, 3].sum().compute()) == pytest.approx(here[:, 3].sum())
        np.testing.assert_allclose((array + 1)[::2].T.mean(axis=0).compute(), (here + 1)[::2].T.mean(axis=0))
        assert client.submit(raised, there).result()[1:3] == ("RemoteArray", "for dask")
        np.testing.assert_array_equal(there, here + 1)
        # And back: blocks are written where they are computed.
        da.store(da.from_array(here, chunks=(100, 16)) * 3, there, lock=False)
        np.testing.assert_array_equal(there, here * 3)


@pytest.mark.slow
def test_ray_tasks(pool, tmp_path):
    ray = pytest.importorskip("ray")
    there = pool.remote("for ray", 1000)
    there[...] = 1
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
    )
    try:
        seen = ray.get(ray.remote(lambda array: array.sum()).remote(there))
        assert seen == 1000
    finally:
        ray.shutdown()
