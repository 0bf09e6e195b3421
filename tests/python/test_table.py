"""Arrays at the servers do what NumPy does."""

import asyncio
import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest

import rampool
from conftest import until

RNG = np.random.default_rng(7)


def both(pool, shape, dtype):
    here = (RNG.standard_normal(shape) * 100).astype(dtype)
    there = pool.remote(None, shape, dtype)
    there[...] = here
    return there, here


KEYS_2D = [
    np.s_[...], np.s_[:], np.s_[3], np.s_[-1, -2], np.s_[::7, 3], np.s_[::-3, ::-2], np.s_[5:5],
    np.s_[10:2:-1, 1:4], np.s_[None, 3, :, None],
    np.s_[..., 2], np.s_[[5, 5, 2]], np.s_[[5, 5, 2], 1], np.s_[[5, 2], [1, 0]],
    np.s_[np.array([[1, 2], [3, 4]])], np.s_[:, [3, 0, 3]],
    np.s_[[-1, 0], ::-1], np.s_[np.array([[0], [9]]), [1, 4]], np.s_[2:40:5, [0, 4]], np.s_[[], :],
    np.s_[[1, 2], None, 3], np.s_[4, [0, 2, 2]],
    np.s_[np.array(3)], np.s_[True], np.s_[False], np.s_[None, True, 3], np.s_[3, np.True_, [1, 2]],
    np.s_[np.zeros(0, bool)],
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8", "u8", "f4", "f8", "i2", "c16", ">f8", "S5"])
def test_every_key_selects_what_numpy_selects(pool, dtype):
    there, here = both(pool, (60, 5), dtype)
    for key in KEYS_2D:
        np.testing.assert_array_equal(there[key], here[key], err_msg=str(key))
        assert np.asarray(there[key]).shape == here[key].shape, key
    mask = here[:, 1] > here[:, 2]
    np.testing.assert_array_equal(there[mask], here[mask])
    np.testing.assert_array_equal(there[mask, 1:3], here[mask, 1:3])
    everywhere = here == here
    np.testing.assert_array_equal(there[everywhere], here[everywhere])


def test_keys_in_more_dimensions(pool):
    there, here = both(pool, (4, 5, 6, 3), "f8")
    random = np.random.default_rng(3)

    def word(size):
        kind = random.integers(0, 5)
        if kind == 0:
            return int(random.integers(-size, size))
        if kind == 1:
            return random.integers(-size, size, (2, 3))
        bounds = [
            None if random.random() < 0.5 else int(random.integers(-size - 2, size + 2)) for _ in range(2)
        ]
        return slice(*bounds, int(random.choice([-2, -1, 1, 2, 3])))

    for _ in range(300):
        key = tuple(word(size) for size in here.shape[: random.integers(1, 5)])
        np.testing.assert_array_equal(there[key], here[key], err_msg=str(key))
        assert np.shape(there[key]) == np.shape(here[key])


def test_assignments_change_what_numpy_changes(pool):
    there, here = both(pool, (60, 5), "i8")
    for n, key in enumerate(KEYS_2D):
        value = np.arange(here[key].size).reshape(here[key].shape) + 1000 * n
        there[key] = value
        here[key] = value
        np.testing.assert_array_equal(there[...], here, err_msg=str(key))
        there[key] = n
        here[key] = n
        np.testing.assert_array_equal(there[...], here, err_msg=str(key))
    there[here > 10] = -1
    here[here > 10] = -1
    np.testing.assert_array_equal(there[...], here)


def test_large_assignments_go_in_pieces(pool):
    there = pool.remote(None, (3, 3_000_000), "i4")
    here = np.arange(9_000_000, dtype="i4").reshape(3, -1)
    there[:, ::-1] = here
    np.testing.assert_array_equal(there[...], here[:, ::-1])


@pytest.mark.parametrize("dtype", ["i4", "u8", "f4", "f8", "i2"])
def test_updates_are_those_of_ufunc_at(pool, dtype):
    there, here = both(pool, (60, 5), dtype)
    cases = [("add_at", np.add), ("minimum_at", np.minimum), ("maximum_at", np.maximum)]
    if np.dtype(dtype).kind in "iu":
        cases += [("bitwise_or_at", np.bitwise_or), ("bitwise_and_at", np.bitwise_and)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, ufunc in cases:
            for key in KEYS_2D:
                value = np.arange(here[key].size).reshape(here[key].shape).astype(dtype)
                getattr(there, name)(key, value)
                ufunc.at(here, key, value)
                np.testing.assert_array_equal(there[...], here, err_msg=f"{name} {key}")


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8", "u8", "f8", "f4"])
@pytest.mark.parametrize("key", ["i4", "u8"])
def test_groups_are_those_of_a_loop(pool, dtype, key, monkeypatch):
    there, here = both(pool, (700, 4), dtype)
    keys = RNG.integers(0, 9, 700).astype(key)
    by = pool.remote(None, 700, key)
    by[:] = keys
    for size in [1 << 24, 300]:
        monkeypatch.setattr("rampool._table._SCAN_ELEMENTS", size)
        limit = here[3, 1]
        for where, mask in [
            (None, np.ones(700, bool)),
            (there[:, 1] > limit, here[:, 1] > limit),
            (there[:, 2] > 10, here[:, 2] > 10),
            (here[:, 0] > 10, here[:, 0] > 10),
        ]:
            found = there[:, 1].group_by(by, where=where)
            assert found["key"].tolist() == sorted(set(keys[mask].tolist()))
            for group in found:
                own = here[mask & (keys == group["key"]), 1]
                assert (group["count"], group["min"], group["max"]) == (own.size, own.min(), own.max())
                assert group["sum"] == pytest.approx(own.sum(dtype=group["sum"].dtype))
    with pytest.raises(TypeError, match="float"):
        by.group_by(pool.remote(None, 700, "f8"))
    with pytest.raises(ValueError, match="one length"):
        by.group_by(by[:9])
    with pytest.raises(ValueError, match="backwards"):
        by.group_by(by[::-1])


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8", "u8", "f8", "f4", "i2", ">i4"])
def test_sums_are_numpys(pool, dtype):
    there, here = both(pool, (700, 4), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in [np.s_[:, 3], np.s_[::-2, 1], np.s_[...], np.s_[5]]:
            part, same = there[key], here[key]
            assert part.sum() == pytest.approx(same.sum(), rel=1e-5)
            assert part.sum().dtype == same.sum().dtype
            assert (part.min(), part.max(), part.count()) == (same.min(), same.max(), same.size)
            assert part.mean() == pytest.approx(same.mean(), rel=1e-5)
            limit = same.ravel()[3]
            for name, test in [
                ("lt", np.less),
                ("le", np.less_equal),
                ("gt", np.greater),
                ("ge", np.greater_equal),
                ("eq", np.equal),
                ("ne", np.not_equal),
            ]:
                condition = getattr(part, f"__{name}__")(limit)
                assert part.count(condition) == test(same, limit).sum()
                assert condition.positions().tolist() == np.flatnonzero(test(same, limit)).tolist()
        other = there[:, 1] > 10
        mask = here[:, 1] > 10
        assert there[:, 3].sum(where=other) == pytest.approx(here[:, 3].sum(where=mask), rel=1e-5)
        assert there[:, 3].sum(where=mask) == pytest.approx(here[:, 3].sum(where=mask), rel=1e-5)
        assert there[::-1, 3].max(where=there[::-1, 1] > 10) == here[mask, 3].max()
        np.testing.assert_array_equal(there[:, 3][other], here[mask, 3])
        np.testing.assert_array_equal(there[there[:, 1] > 10], here[mask])
        # No number of the column's kind.
        assert there[:, 3].count(there[:, 3] > 2.5) == (here[:, 3] > 2.5).sum()


def test_sums_of_integers_wrap_as_numpys(pool):
    there = pool.remote(None, 4, "i8")
    there[...] = 2**62
    assert there.sum() == np.full(4, 2**62, "i8").sum() == 0


def test_the_servers_work_out_what_they_can(pool):
    there, _ = both(pool, (100_000, 8), "i8")
    before = sum(server["received_bytes"] for server in pool.servers())
    there[:, 3].sum(where=there[:, 3] > 5)
    np.asarray(there[::512, 3])
    received = sum(server["received_bytes"] for server in pool.servers()) - before
    assert received < 20_000, "of a column of 800,000 bytes"


def test_one_warning_where_servers_cannot(pool):
    there, here = both(pool, 100, "i2")
    from rampool import _duck

    _duck._warned.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert there.sum() == here.sum(dtype="i8")
        there.sum()
    assert len(seen) == 1 and "int16" in str(seen[0].message) and "200 bytes" in str(seen[0].message)
    assert seen[0].category is rampool.FetchWarning and seen[0].filename == __file__


def test_elements_are_updated_at_once(pool):
    there = pool.remote(None, (3, 4), "u8")
    assert there.fetch_add((1, 2), 5) == 0
    assert there.fetch_add((1, -2), 5) == 5
    assert there.compare_exchange((1, 2), 10, 77) == 10
    assert there.compare_exchange((1, 2), 10, 78) == 77
    assert there[1, 2] == 77


def test_what_makes_no_sense_says_what(pool):
    there, _ = both(pool, (10, 4), "i8")
    for key in [10, -11, (0, 4), (0, 0, 0), [10], np.zeros((3, 3), bool), 1.5, "x", (..., ...)]:
        with pytest.raises(IndexError):
            there[key]
    with pytest.raises(ValueError):
        there[0] = [1, 2, 3]
    with pytest.raises(TypeError, match="complex128"):
        there[0] = 1j
    with pytest.raises(ValueError, match="where="):
        if there[:, 0] > 1:
            pass
    with pytest.raises(ValueError):
        there[:, 0].sum(where=there[3] > 1)
    with pytest.raises(TypeError):
        there[:, 0].sum(where=[1] * 10)
    with pytest.raises(ValueError, match="min"):
        there[:, 0].min(where=there[:, 0] > 10**9)
    with pytest.raises(TypeError, match="i4, u4"):
        pool.remote(None, 3, "i2").fetch_add(0, 1)
    with pytest.raises(TypeError):
        pool.remote(None, 3, object)
    with pytest.raises(ValueError):
        pool.remote(None, (3, 0))


def test_what_is_wrong_and_how_to_mend_it(pool, own_server):
    """Each mistake has an exception of the kind that programs catch, which says both."""
    there = pool.remote("used", (10, 4), "i4")
    closed = rampool.connect(own_server.address, memory="16M")
    gone = closed.remote("gone", 10)
    lazy = gone + 1
    closed.close()
    full = rampool.connect(own_server.address, memory="2M", op_deadline_ms=1000)
    small = full.remote("small", 10)
    for call, kind, says in [
        (
            lambda: pool.remote("used", (10, 5), "i4"),
            ValueError,
            r"shape \(10, 4\).*pool.open\('used'\).*pool.delete",
        ),
        (lambda: pool.remote("used", (10, 4), "f4"), ValueError, "dtype int32.*pool.open"),
        (lambda: pool.open("used", "i8"), ValueError, "dtype int32"),
        (lambda: pool.open("unknown"), rampool.NotFound, "unknown"),
        (lambda: pool.delete("unknown"), rampool.NotFound, "unknown"),
        (lambda: pool.remote("x", (0, 3)), ValueError, "at least one element"),
        (lambda: pool.remote("x", 3, object), TypeError, "numbers"),
        (lambda: there.__setitem__(0, [1, 2, 3]), ValueError, "broadcast"),
        (lambda: there.__setitem__(0, 1.5), TypeError, "astype"),
        (lambda: there.reshape(7), ValueError, r"40 elements into shape \(7,\)"),
        (lambda: there.sum(axis=2), IndexError, "axis 2 is out of bounds"),
        (lambda: there.sum(where=there[0] > 1, axis=0, nonsense=1), TypeError, "nonsense"),
        (lambda: there.sum(where=[1, 2, 3, 4]), TypeError, "booleans"),
        (lambda: there.max(axis=0, where=there > 1), ValueError, "initial="),
        (lambda: there + np.zeros(3), ValueError, "broadcast"),
        (lambda: np.add(there, 0.5, out=there), TypeError, "casting"),
        (lambda: np.add(there, np.zeros((2, 10, 4), "i4"), out=there), ValueError, "non-broadcastable"),
        (lambda: bool(there > 1), ValueError, "any.*where="),
        (lambda: int(there), TypeError, "one element"),
        (lambda: there["field"], IndexError, "only integers"),
        (lambda: gone.sum(), rampool.Closed, "connect"),
        (lambda: gone[3], rampool.Closed, "connect"),
        (lambda: np.asarray(gone), rampool.Closed, "connect"),
        (lambda: lazy.max(), rampool.Closed, "connect"),
        (lambda: gone.fill(1), rampool.Closed, "connect"),
        (lambda: closed.open("gone"), rampool.Closed, "connect"),
        (lambda: closed.list(), rampool.Closed, "connect"),
        (lambda: closed.delete("gone"), rampool.Closed, "connect"),
        (lambda: full.remote("large", 10 << 20).fill(1), rampool.NoRoom, "(?i)room|full|free"),
        (lambda: small.__setitem__(..., 1), None, None),
    ]:
        if kind is None:
            call()
            continue
        with pytest.raises(kind, match=says):
            call()
    own_server.stop()
    for call in [
        lambda: small.sum(), lambda: small.fill(1), lambda: small.T[::2].tolist(), lambda: full.open("small"),
        lambda: full.list(),
    ]:
        with pytest.raises(rampool.ServerLost, match="server.sock"):
            call()


def test_arrays_by_name(pool):
    there = pool.remote("table", (10, 4), "i4")
    there[...] = 7
    with rampool.Pool.join(pool.ticket) as again:
        opened = [again.remote("table", (10, 4), "i4"), again.open("table"), pool.remote("table", (10, 4))]
        for array in opened:
            assert (array.shape, array.dtype, array.sum()) == ((10, 4), np.int32, 280)
        wrong = [((5, 8), "i4"), ((10, 4), "f4"), ((10, 4), ">i4"), ((10, 5), "i4"), ((5, 4), "f8")]
        for shape, dtype in [*wrong, (40, None)]:
            with pytest.raises(
                ValueError, match=r"'table' has shape \(10, 4\) and dtype int32.*pool.open.*pool.delete"
            ):
                again.remote("table", shape, dtype)
        with pytest.raises(ValueError, match="float32"):
            again.open("table", "f4")
        with pytest.raises(rampool.NotFound, match="none"):
            again.open("none")
        with pytest.raises(ValueError, match="rampool's own"):
            again.remote("rampool.mine", 3)
        again.open("table").free()
        with pytest.raises((rampool.NotFound, rampool.NotAllowed)):
            there[0, 0]
        # What was said about the last of that name does not hold for the next.
        assert again.remote("table", 20).dtype == np.float64
        assert pool.open("table").shape == (20,)


def test_records_by_name(pool):
    kind = np.dtype({"names": ["a", "b"], "formats": ["i2", "(2,)f8"], "offsets": [4, 8], "itemsize": 32})
    for name, dtype in [("record", kind), ("time", "M8[ns]"), ("text", "U7"), ("bytes", "V3")]:
        dtype = np.dtype(dtype)
        pool.remote(name, (3, 2), dtype)
        assert pool.open(name).dtype == dtype and pool.open(name, dtype).shape == (3, 2)
        with pytest.raises(ValueError, match="dtype"):
            pool.open(name, "i8")
    for dtype in ["(2,)i4", [("a", object)]]:
        with pytest.raises(TypeError):
            pool.remote("subarray", 3, dtype)


def test_regions_that_python_did_not_make(pool):
    raw = pool._region_array("raw", (8,), np.dtype("u1"))
    raw[...] = range(8)
    with pytest.raises(ValueError, match="dtype"):
        pool.open("raw")
    assert pool.open("raw", "u2").shape == (4,)
    with pytest.raises(ValueError, match="8"):
        pool.remote("raw", 9, "u1")
    # The first who says what it is decides.
    assert pool.remote("raw", (2, 2), "u2")[0, 0] == 0x0100
    with pytest.raises(ValueError, match="uint16"):
        pool.remote("raw", 8, "u1")


def test_two_processes_that_make_an_array_at_once_agree(pool, python):
    program = """
import os, threading, rampool
pools = [rampool.Pool.join(os.environ["TICKET"]) for _ in range(4)]
made, gate = [], threading.Barrier(4)
def work(pool, n):
    for k in range(30):
        gate.wait()
        try:
            made.append((k, str(pool.remote(f"race{k}", 10, ["i8", "f8"][n % 2]).dtype)))
        except ValueError:
            pass
        assert str(pool.open(f"race{k}").dtype) in ("int64", "float64")
threads = [threading.Thread(target=work, args=(pool, n)) for n, pool in enumerate(pools)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(set(made)) == 30 and len(made) == 60, (len(made), len(set(made)))
"""
    python(program, TICKET=pool.ticket)


def test_started_gets_end_in_an_event_loop(pool):
    there, here = both(pool, (1000, 16), "i8")

    async def main():
        parts = await asyncio.gather(*[there.start_get(np.s_[k::10]) for k in range(10)])
        await there.start_put(0, 5)
        before = threading.active_count()
        again = await there.start_get(0)
        assert threading.active_count() == before
        return parts, again

    parts, again = asyncio.run(main())
    for k, part in enumerate(parts):
        np.testing.assert_array_equal(part, here[k::10])
    assert again.tolist() == [5] * 16


def test_threads_share_an_array(pool):
    there = pool.remote(None, (8, 1000), "i8")
    failures = []

    def work(n):
        try:
            for k in range(50):
                there[n] = np.arange(1000) * k + n
                assert there[n].tolist() == (np.arange(1000) * k + n).tolist()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures


def test_dask_reads_it(pool):
    da = pytest.importorskip("dask.array")
    there, here = both(pool, (1000, 16), "f8")
    array = da.from_array(there, chunks=(100, 16))
    assert float(array[:, 3].sum().compute(scheduler="threads")) == pytest.approx(here[:, 3].sum())


def test_dask_fetches_the_blocks_that_it_computes_with(pool):
    da = pytest.importorskip("dask.array")
    pytest.importorskip("distributed")
    from rampool import _duck
    from rampool.dask import from_array

    there, here = both(pool, (1000, 16), "f8")
    received = lambda: sum(server["received_bytes"] for server in pool.servers())
    before = received()
    array = from_array(there, chunks=(100, 16))
    assert received() == before
    np.testing.assert_array_equal(
        (array[150:160, ::2] + 1).compute(scheduler="threads"), here[150:160, ::2] + 1
    )
    assert received() - before < 20_000, "of 128,000 bytes"
    np.testing.assert_allclose(array.mean(axis=0).compute(scheduler="threads"), here.mean(axis=0))
    # What was computed is no answer for what is there later.
    assert array.name != from_array(there, chunks=(100, 16)).name
    _duck._warned.clear()
    with pytest.warns(rampool.FetchWarning, match=r"128000 bytes.*rampool\.dask\.from_array"):
        da.from_array(there, chunks=(100, 16))


# --- manners ----------------------------------------------------------------------------------------------


def test_a_forked_child_gets_an_error(pool):
    there, _ = both(pool, 10, "i8")
    queue, store = pool.queue("forked"), pool.store()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in [
            lambda: there[0],
            lambda: pool.empty(3),
            lambda: queue.take(0),
            lambda: store["x"],
            lambda: pool.store(),
            lambda: there.sum(),
        ]:
            try:
                call()
            except rampool.ForkError:
                refused += 1
        del there, queue, store
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert there[0] is not None
    store["x"] = b"y"
    assert bytes(store["x"]) == b"y"


def test_control_c_ends_a_wait(pool):
    queue = pool.queue("empty")
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        queue.take()
    # What was interrupted does no harm.
    queue.send(b"x")
    assert queue.take(10).head == b"x"


def test_control_c_ends_a_get_from_a_server_that_does_not_answer(own_server):
    pool = rampool.connect(own_server.address, memory="16M", same_host="socket")
    there = pool.remote(None, 1000, "i8")
    own_server.process.send_signal(signal.SIGSTOP)
    until(lambda: "\nState:\tT" in open(f"/proc/{own_server.process.pid}/status").read(), "the stop")
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            there[5]
    finally:
        own_server.process.send_signal(signal.SIGCONT)
    assert there[6] == 0


def test_a_wait_for_another_thread_leaves_the_interpreter(pool):
    queue = pool.queue("other")
    thread = threading.Thread(target=lambda: queue.take(30))
    thread.start()
    assert sum(range(1000)) == 499500
    pool.queue("other").send(b"x")
    thread.join()


def test_a_lost_server_is_a_connection_error(own_server):
    pool = rampool.connect(own_server.address, memory="16M", op_deadline_ms=1000)
    there = pool.remote(None, 1000, "i8")
    own_server.stop()
    with pytest.raises(rampool.ServerLost, match="server.sock") as lost:
        for _ in range(2):
            there[5]
    assert isinstance(lost.value, ConnectionError)


def test_a_full_pool_is_a_memory_error(own_server):
    pool = rampool.connect(own_server.address, memory="4M", local="1M")
    there = pool.remote(None, 8 << 20, "u1")
    with pytest.raises(rampool.NoRoom) as full:
        there[...] = 1
    assert isinstance(full.value, MemoryError)
    with pytest.raises(rampool.NoRoom):
        pool.empty(1 << 30, "u1")


def test_a_closed_pool_says_so(server):
    pool = rampool.connect(server, memory="16M")
    there = pool.remote(None, 10)
    pool.close()
    pool.close()
    for call in [
        lambda: there[0],
        lambda: pool.empty(3),
        lambda: pool.remote(None, 3),
        lambda: pool.queue("x"),
    ]:
        with pytest.raises(rampool.Closed):
            call()


def test_a_lease_of_no_stated_size(own_server):
    # The server lends 256 MiB: not the 1 GiB that is usual, but all of it.
    with rampool.connect(own_server.address) as pool:
        assert 200 << 20 < sum(each["lease_bytes"] for each in pool.servers()) <= 256 << 20
        with pytest.raises(rampool.NoRoom, match="memory"):
            rampool.connect(own_server.address)
    with rampool.connect(f"{own_server.address}=1M") as pool:
        assert pool.servers()[0]["lease_bytes"] == 1 << 20


def test_what_connect_is_given(server, monkeypatch):
    monkeypatch.delenv("RAMPOOL_SERVERS", raising=False)
    with pytest.raises(ValueError, match="no memory server"):
        rampool.connect()
    with pytest.raises(rampool.ServerLost, match="/no/such"):
        rampool.connect("unix:/no/such", memory="1M")
    with pytest.raises(rampool.NoRoom):
        rampool.connect(server, memory="100T")
    with pytest.raises(TypeError, match="nonsense"):
        rampool.connect(server, memory="1M", nonsense=1)
    with pytest.raises(ValueError, match="page-size"):
        rampool.connect(server, memory="1M", page_size="much")
    monkeypatch.setenv("RAMPOOL_SERVERS", server)
    with rampool.connect(memory="1M", compression=True) as pool:
        assert pool.servers()[0]["lease_bytes"] == 1 << 20
        assert "server.sock" in repr(pool)


def test_queues_in_an_event_loop(pool):
    async def main():
        jobs, other = pool.queue("loop"), pool.queue("loop")
        asyncio.get_running_loop().call_later(
            0.05, lambda: [other.send(bytes([n]), bytes(1000 * n)) for n in range(5)]
        )
        got = []
        async for job in jobs:
            with job:
                got.append((job.head, len(job.body())))
            if len(got) == 5:
                return got

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [(bytes([n]), 1000 * n) for n in range(5)]


def test_a_message_that_is_not_done_with_comes_again(pool):
    jobs = pool.queue("again", messages=2)
    jobs.send(b"a", np.arange(4))
    jobs.send(b"b")
    with pytest.raises(rampool.Timeout) as full:
        jobs.send(b"c")
    assert isinstance(full.value, TimeoutError)
    with pytest.raises(ZeroDivisionError), jobs.take(10):
        1 / 0
    again = jobs.take(10)
    assert (again.head, again.redelivered, again.nbytes) == (b"a", True, 32)
    assert np.frombuffer(again.body(), "i8").tolist() == [0, 1, 2, 3]
    again.done()
    with pytest.raises(RuntimeError):
        again.done()
    jobs.take(10).done()
    jobs.flush()
    began = time.monotonic()
    with pytest.raises(rampool.Timeout):
        jobs.take(0.3)
    assert time.monotonic() - began >= 0.3
    with pytest.raises(ValueError):
        jobs.send(bytes(257))
