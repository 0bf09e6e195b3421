"""Stores, and the libraries that spill to them."""

import io
import os
import random
import threading

import numpy as np
import pytest

import rampool


def test_a_store_is_a_mapping(pool):
    store, model, choose = pool.store(), {}, random.Random(5)
    for n in range(400):
        key = choose.choice("abcdefgh")
        match choose.randrange(4):
            case 0:
                parts = [os.urandom(choose.choice([0, 1, 4096, 50_000])) for _ in range(choose.randrange(4))]
                store.put(key, parts)
                model[key] = b"".join(parts)
            case 1:
                store[key] = model[key] = bytes([n % 256]) * choose.randrange(10_000)
            case 2:
                assert store.get(key) == model.get(key)
            case 3:
                assert (key in store) == (key in model)
                if key in model:
                    del store[key], model[key]
        assert len(store) == len(model) and store.nbytes == sum(map(len, model.values()))
    assert {key.decode(): bytes(value) for key, value in store.items()} == model
    with pytest.raises(KeyError):
        store["none"]
    with pytest.raises(KeyError):
        del store["none"]
    store.close()
    with pytest.raises(rampool.Closed):
        store["a"]


def test_values_are_any_buffers(pool):
    store = pool.store()
    array = np.arange(100_000.0).reshape(100, 1000)
    store["array"] = array
    again = np.frombuffer(store["array"]).reshape(array.shape)
    assert (again == array).all() and again.flags.writeable
    store.put("parts", [array[3], b"x", pool.from_array(array[4])])
    assert bytes(store["parts"]) == array[3].tobytes() + b"x" + array[4].tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        store["column"] = array[:, 3]


def test_a_full_store_keeps_what_it_has(own_server):
    with rampool.connect(own_server.address, memory="8M") as pool:
        store = pool.store()
        store["a"] = b"before"
        with pytest.raises(rampool.NoRoom):
            store["a"] = bytes(range(256)) * 65536
        assert bytes(store["a"]) == b"before"


def test_threads_share_a_store(pool):
    store, failures = pool.store(), []

    def work(n):
        try:
            for k in range(100):
                store[f"{n}"] = bytes([n, k]) * 5000
                assert bytes(store[f"{n}"]) == bytes([n, k]) * 5000
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures


# --- files --------------------------------------------------------------------------------------------------


def test_a_file_in_the_pool_is_a_file(server):
    pytest.importorskip("fsspec")
    from rampool.fsspec import filesystem

    choose = random.Random(11)
    with rampool.connect(server, memory="128M") as pool:
        fs = filesystem(pool)
        there, here = fs.open("rampool://a/b", "wb+"), io.BytesIO()
        for _ in range(300):
            place = choose.choice([0, 100, 16 << 20, (16 << 20) - 50, choose.randrange(40 << 20)])
            there.seek(place)
            here.seek(place)
            match choose.randrange(3):
                case 0:
                    data = os.urandom(choose.choice([1, 100, 300_000]))
                    assert there.write(data) == here.write(data)
                case 1:
                    assert there.read(300_000) == here.read(300_000)
                case 2:
                    end = there.seek(0, 2)
                    assert end == here.seek(0, 2)
                    if choose.random() < 0.3:
                        there.truncate(place)
                        here.truncate(place) if place <= end else here.write(bytes(place - end))
            assert fs.info("a/b")["size"] == len(here.getbuffer())
        there.seek(0)
        assert there.read() == here.getvalue()
        assert fs.ls("a", detail=False) == ["a/b"] and fs.exists("a") and not fs.exists("b")
        fs.mv("a/b", "c")
        fs.cp("c", "d")
        assert fs.cat("d") == here.getvalue()
        fs.rm("c")
        with pytest.raises(FileNotFoundError):
            fs.open("c")
        fs.touch("d")
        assert fs.cat("d") == b""
        kept = fs.open("e", "wb+")
        kept.write(b"abc")
        fs.touch("e")
        fs.rm("e")
        kept.seek(0)
        assert kept.read() == b"abc" and not fs.exists("e")
        kept.close()
        with fs.open("text", "w") as text:
            text.write("line\n")
        assert fs.open("text", "r").read() == "line\n"


def test_threads_move_in_a_file_apart(pool):
    pytest.importorskip("fsspec")
    from rampool.fsspec import filesystem

    file, failures = filesystem(pool).open("shared", "rb+"), []
    file.write(b"".join(bytes([n]) * 100_000 for n in range(20)))

    def work(first):
        for n in list(range(first, 20)) + list(range(first)):
            file.seek(n * 100_000)
            if file.read(100_000) != bytes([n]) * 100_000:
                failures.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures


@pytest.mark.slow
def test_duckdb_spills_to_the_pool(tmp_path):
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("fsspec")
    from conftest import Server

    from rampool.fsspec import filesystem

    server = Server(tmp_path, "3G")
    try:
        with rampool.connect(server.address, memory="2G") as pool:
            connection = duckdb.connect()
            connection.execute("SET memory_limit = '100MB'; SET threads = 2")
            connection.register_filesystem(filesystem(pool))
            connection.execute("SET temp_directory = 'rampool://spill'")
            rows = 8_000_000  # Columns of 8 bytes: 61 MiB each, and what the sort adds
            numbers = f"SELECT hash(i) AS h, i FROM range({rows}) r(i)"
            before = f"SELECT h, i, lag(h) OVER (ORDER BY h) AS before FROM ({numbers})"
            counts = f"SELECT count(*), sum(i), count(*) FILTER (before > h), count(before) FROM ({before})"
            assert connection.execute(counts).fetchone() == (rows, rows * (rows - 1) // 2, 0, rows - 1)
            join = f"SELECT count(*), sum(a.i) FROM ({numbers}) a JOIN ({numbers}) b ON a.h = b.h"
            assert connection.execute(join).fetchone() == (rows, rows * (rows - 1) // 2)
            sent = sum(each["sent_bytes"] for each in pool.servers())
            assert sent > 50 << 20, "nothing was spilled: the test proves nothing"
            connection.close()
    finally:
        server.stop()


# --- Dask ---------------------------------------------------------------------------------------------------


def test_dasks_buffer_in_the_pool(pool):
    pytest.importorskip("distributed")
    from rampool.dask import Spill

    buffer = Spill(memory=0, target="2MB", pool=pool)
    values = {f"x-{n}": np.full(100_000, n) for n in range(20)}
    for key, value in values.items():
        buffer[key] = value
    assert len(buffer.fast) < 4 and len(buffer.disk) > 15
    assert buffer.spilled_total.disk > 10_000_000
    for key, value in values.items():
        assert (buffer[key] == value).all()
    assert buffer.evict() > 0
    buffer["huge"] = np.zeros(20_000_000)  # No room for it: it stays in memory.
    assert "huge" in buffer.fast
    for key in values:
        del buffer[key]
    assert len(buffer) == 1


def test_dasks_keys_come_back_as_they_were(pool):
    pytest.importorskip("distributed")
    from rampool.dask import Spill

    buffer = Spill(memory=0, target="1MB", pool=pool)
    # The text of the first is the second.
    values = {("x", 0): 1, "('x', 0)": 2, ("x", (1, "y")): 3, b"raw": 4, 5: 5}
    for key, n in values.items():
        buffer[key] = np.full(200_000, n)
    assert len(buffer.disk) >= 4
    assert set(buffer) == set(values) and set(buffer.disk) <= set(values)
    for key, n in values.items():
        assert (buffer[key] == n).all()
    buffer[("x", 0)] = np.full(200_000, 9)
    assert (buffer[("x", 0)] == 9).all() and (buffer["('x', 0)"] == 2).all()
    for key in values:
        del buffer[key]
    assert len(buffer) == 0 and list(buffer.disk) == []


@pytest.mark.slow
def test_dask_workers_spill_to_the_pool(tmp_path):
    distributed = pytest.importorskip("distributed")
    da = pytest.importorskip("dask.array")
    from conftest import Server

    from rampool.dask import spill

    server = Server(tmp_path, "3G")
    try:
        data = spill(server.address, memory="1G", target="128MiB")
        with (
            distributed.LocalCluster(
                n_workers=1,
                threads_per_worker=2,
                memory_limit="600MiB",
                processes=True,
                dashboard_address=None,
                data=data,
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            array = (
                da.random.default_rng(1).random((8_000, 12_000), chunks=(1_000, 1_000)).persist()
            )  # 732 MiB
            distributed.wait(array)
            held = client.run(
                lambda dask_worker: (type(dask_worker.data).__name__, len(dask_worker.data.disk))
            )
            assert next(iter(held.values()))[0] == "Spill" and next(iter(held.values()))[1] > 50, held
            total = float(array.sum().compute())
            assert total == pytest.approx(48_000_000, rel=1e-3)
            assert float((array.T @ array[:, :5]).sum().compute()) > 0
    finally:
        server.stop()


# --- joblib -------------------------------------------------------------------------------------------------


def test_joblib_keeps_results_in_the_pool(pool):
    joblib = pytest.importorskip("joblib")
    import rampool.joblib

    rampool.joblib.register()
    memory = joblib.Memory("cache", backend="rampool", backend_options={"pool": pool}, verbose=0)
    calls = []

    @memory.cache
    def work(n):
        calls.append(n)
        return np.arange(n)

    for _ in range(3):
        assert work(100_000).sum() == 99_999 * 50_000 and work(3).tolist() == [0, 1, 2]
    assert calls == [100_000, 3]
    memory.clear(warn=False)
    work(3)
    assert calls == [100_000, 3, 3]
    with pytest.raises(ValueError, match="pool"):
        joblib.Memory("cache", backend="rampool", verbose=0)
