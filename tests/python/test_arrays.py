"""Paged arrays are NumPy arrays whose pages come and go."""

import gc
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import rampool
from conftest import until


def test_an_array_larger_than_local_memory(pool):
    array = pool.zeros((3000, 1000), "f8")  # 23 MiB, of which 2 MiB may be here
    assert type(array) is np.ndarray and array.flags.writeable and array.flags.c_contiguous
    array[:] = np.arange(1000)
    array *= 2
    assert array.sum() == 3000 * 999 * 1000
    assert array[2999, 7] == 14 and array[::100, 3].tolist() == [6] * 30
    array.sort(axis=1)
    stats = pool.stats()
    assert stats["demand_pages"] + stats["prefetched_pages"] > 1000, stats
    assert stats["resident_pages"] * 4096 <= (2 << 20) + (1 << 20), stats


@pytest.mark.parametrize("fault_mode", ["auto", "uffd-user", "segv"])
def test_every_fault_mode(python, fault_mode):
    said = python(f"""
import os, warnings, numpy as np, faulthandler
import rampool
warnings.simplefilter("ignore")
pool = rampool.connect(os.environ["SERVER"], memory="64M", local="2M", fault_mode={fault_mode!r})
a = pool.from_array(np.arange(2_000_000))
a += 1
assert a.sum() == 2_000_000 * 2_000_001 // 2
b = np.sort(a[::-1])
assert (b == a).all()
del a; pool.close(); print("well")
""")
    assert said == "well\n"


def test_system_calls_below_the_full_mode_are_warned_of(pool, server):
    with rampool.connect(server, memory="16M", local="1M", fault_mode="uffd-user") as below:
        from rampool import _pool

        _pool._warned_of_system_calls = False
        with pytest.warns(RuntimeWarning, match="python -m rampool"):
            below.empty(1000)


def test_files_are_read_and_written(pool, tmp_path):
    array = pool.from_array(np.arange(1_000_000))
    array.tofile(tmp_path / "numbers")
    again = pool.empty(1_000_000, "i8")
    with open(tmp_path / "numbers", "rb") as file:
        assert file.readinto(memoryview(again).cast("B")) == again.nbytes
    assert (again == array).all()


def test_every_way_to_make_one(pool):
    assert pool.empty(3).dtype == np.float64
    assert pool.zeros((2, 0)).shape == (2, 0)
    assert pool.full((2, 3), 7).tolist() == [[7, 7, 7], [7, 7, 7]]
    assert pool.full(2, 7, "f4").dtype == np.float32
    records = pool.empty(5, [("a", "i4"), ("b", "f8")])
    records["b"] = 3
    assert records["b"].sum() == 15
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    assert pool.from_array(fortran).tolist() == fortran.tolist()
    with pytest.raises(TypeError, match="objects"):
        pool.empty(3, object)
    with pytest.raises(ValueError):
        pool.empty(-1)


def test_memory_goes_back_with_the_last_view(pool):
    for _ in range(20):
        array = pool.empty(30 << 20, "u1")
        part = array[::2]
        del array
        part[0] = 1
        del part
        gc.collect()
    pool.empty(60 << 20, "u1")


def test_an_array_outlives_its_pool(server):
    pool = rampool.connect(server, memory="32M", local="1M")
    array = pool.from_array(np.arange(1_000_000))
    pool.close()
    del pool
    gc.collect()
    assert array.sum() == 999_999 * 500_000


@pytest.mark.parametrize("copies", [{}, {"copies": 2}], ids=["by default", "by request"])
def test_an_array_outlives_kill_9_of_either_server(two_servers, copies):
    addresses = [server.address for server in two_servers]
    with rampool.connect(addresses, memory="64M", local="2M", fault_mode="segv", **copies) as pool:
        a, at_servers = pool.empty(1_000_000, "i8"), pool.remote(None, 1_000_000)
        for version, server in enumerate([*two_servers, two_servers[0]]):
            a[:] = np.arange(1_000_000) + version
            server.stop()
            assert (a == np.arange(1_000_000) + version).all()
            a += 7
            assert (a == np.arange(1_000_000) + version + 7).all()
            if version == 0:
                # What lies at the servers alone has one copy.
                with pytest.raises(rampool.ServerLost):
                    at_servers[:] = 1
            server.start()
            stats = lambda: dict(pool.stats())
            until(lambda: stats()["lost_mask"] == stats()["lacking_pages"] == 0, "two copies of each page")
        del a


def test_two_copies_need_two_servers(server):
    with pytest.raises(ValueError, match="need two servers"):
        rampool.connect(server, memory="1M", copies=2)


def test_others_read_what_is_shared(pool):
    array = pool.from_array(np.arange(100_000).reshape(100, 1000))
    handle = rampool.share(array[10:20], pool)
    array[:] = 0
    text = pickle.dumps(handle)
    program = (
        "import sys, pickle; t = pickle.load(sys.stdin.buffer).open(); print(t.shape, t[3, ::500].tolist(), "
        "t.sum())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], input=text, capture_output=True, check=True
    ).stdout.decode()
    assert said.strip() == f"(10, 1000) [13000, 13500] {sum(range(10_000, 20_000))}"
    handle.open(pool).free()
    for wrong in [np.zeros(3), array[:, 3]]:
        with pytest.raises(TypeError, match="from_array"):
            rampool.share(wrong)


def test_others_see_the_same_memory(pool):
    array = pool.from_array(np.arange(10_000.0))
    assert np.from_dlpack(array).ctypes.data == array.ctypes.data
    pyarrow = pytest.importorskip("pyarrow")
    compute = pytest.importorskip("pyarrow.compute")
    column = pyarrow.Array.from_buffers(pyarrow.float64(), len(array), [None, pyarrow.py_buffer(array)])
    assert column.buffers()[1].address == array.ctypes.data
    assert compute.sum(column).as_py() == array.sum()


def test_a_paged_array_in_an_attached_process(python):
    said = python("""
import os, rampool, numpy as np
pool = rampool.connect(os.environ["SERVER"], memory="64M", local="2M")
a = pool.from_array(np.arange(2_000_000))
rampool.attach("100M", os.environ["SERVER"], memory="500M")
b = np.ones(30_000_000)
c = pool.from_array(np.arange(1_000_000))
assert (b.sum(), a.sum(), c.sum()) == (30_000_000, 1_999_999 * 1_000_000, 999_999 * 500_000)
print("well")
""")
    assert said == "well\n"


def test_numpys_own_allocations_go_to_the_pool(pool):
    with rampool.local("2M", over="1M", pool=pool) as given:
        large = np.ones(2_000_000)
        small = np.ones(1000)
        total = (large * 2).sum()
        copy = np.concatenate([large, large])
        assert given.live == 2 and given.nbytes >= 48_000_000
    outside = np.ones(2_000_000)
    assert (
        total == 4_000_000 and copy.sum() == 4_000_000 and small.sum() == 1000 and outside.sum() == 2_000_000
    )
    assert given.live == 2
    del large, copy
    gc.collect()
    assert given.live == 0 and given.nbytes == 0


def test_allocations_without_room_are_numpys_own_again(server):
    with (
        rampool.connect(server, memory="4M", local="1M") as small,
        rampool.local("1M", over="1M", pool=small) as given,
    ):
        large = np.ones(10_000_000)
        assert large.sum() == 10_000_000 and given.live == 0 and given.refused == 1


def test_zeroed_and_grown_allocations(pool):
    with rampool.local("2M", over="1M", pool=pool):
        assert np.zeros(1_000_000).sum() == 0
        array = np.arange(300_000)
        array.resize(500_000, refcheck=False)
        assert array[:300_000].tolist() == list(range(300_000)) and array[300_000:].sum() == 0
        array.resize(10, refcheck=False)
        assert array.tolist() == list(range(10))


def test_a_task_has_an_allocator_of_its_own(pool):
    import asyncio

    async def main():
        with rampool.local("2M", over="1M", pool=pool) as given:
            there = await asyncio.to_thread(np.ones, 1_000_000)
            assert given.live == 1
            del there

    asyncio.run(main())


def test_python_m_rampool(tmp_path, server):
    script = tmp_path / "script.py"
    script.write_text("import sys, os; print(sys.argv[1:], 'RAMPOOL_RUN_DIR' in os.environ)")
    words = [
        sys.executable,
        "-m",
        "rampool",
        "--local",
        "64M",
        "--server",
        server,
        "--memory",
        "16M",
        str(script),
        "a",
        "--b",
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ})
    assert said.stdout.strip() == "['a', '--b'] True"
    ended = subprocess.run([*words[:9], "-c", "raise SystemExit(7)"], capture_output=True)
    assert ended.returncode == 7
    assert subprocess.run([sys.executable, "-m", "rampool"], capture_output=True).returncode == 2
