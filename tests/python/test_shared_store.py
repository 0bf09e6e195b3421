"""A store of several processes, some of which are killed."""

import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import stop

import rampool


def test_two_members_and_a_model(pool):
    choose, model = random.Random(7), {}
    with rampool.Pool.join(pool.ticket) as other:
        stores = [pool.shared_store("model"), other.shared_store("model")]
        for n in range(300):
            store, key = choose.choice(stores), choose.choice("abcdefghij")
            match choose.randrange(3):
                case 0:
                    parts = [
                        os.urandom(choose.choice([0, 1, 5000, 70_000])) for _ in range(choose.randrange(3))
                    ]
                    store.put(key, parts)
                    model[key] = b"".join(parts)
                case 1:
                    assert store.get(key) == model.get(key), n
                case 2 if key in model:
                    del store[key], model[key]
                case _:
                    assert (key in store) == (key in model)
            assert len(stores[0]) == len(model)
        for store in stores:
            assert {key.decode(): bytes(value) for key, value in store.items()} == model
        with pytest.raises(KeyError):
            stores[0]["none"]
        with pytest.raises(KeyError):
            del stores[1]["none"]
        with pytest.raises(ValueError, match="number of keys"):
            pool.shared_store("model", keys=5_000_000)
        long = "k" * 3000
        stores[0][long] = b"long"
        assert bytes(stores[1][long]) == b"long"


def test_a_full_index_says_so(pool):
    store = pool.shared_store("small", keys=20)
    with pytest.raises(rampool.NoRoom, match="index"):
        for n in range(100):
            store[str(n)] = b"x"
    kept = len(store)
    assert 16 < kept <= 32 and all(bytes(store[str(n)]) == b"x" for n in range(kept))


def test_room_that_others_let_go_of_is_used_again(pool):
    with rampool.Pool.join(pool.ticket) as other:
        here, there = pool.shared_store("reuse"), other.shared_store("reuse")
        value = np.zeros(
            1 << 20, "u1"
        )  # 64 slots would be 80 MiB, the lease has 64: so an extent is all there is.
        for n in range(60):
            here["k"] = value
            there["k"] = value
            del here["k"]
        assert pool.open("reuse.head", "u8")[1] == 2 and len(here) == 0, "an extent each"


WRITER = """
import os, sys
import rampool
pool = rampool.Pool.join(os.environ["TICKET"])
store = pool.shared_store("killed", stale=float(os.environ["STALE"]))
me, n = sys.argv[1], 0
while True:
    for key in ("own-" + me, "common"):
        size = (n * 7919) % 20_000
        store[key] = f"{me} {n} ".encode() + bytes([n % 256]) * size
    print(n, flush=True)
    n += 1
"""


def whole(value):
    me, n, rest = bytes(value).split(b" ", 2)
    n = int(n)
    assert rest == bytes([n % 256]) * ((n * 7919) % 20_000)
    return me.decode(), n


def start(pool, name, stale):
    environment = {**os.environ, "TICKET": pool.ticket, "STALE": str(stale)}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, name], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_writers_that_are_killed_leave_the_store_whole(pool):
    store, choose = pool.shared_store("killed", stale=60), random.Random(3)
    for round_number in range(3):
        writers = [start(pool, str(n), 60) for n in range(2)]
        try:
            first = [int(writer.stdout.readline()) for writer in writers]
            for _ in range(choose.randrange(20, 60)):
                whole(store["common"])
            acknowledged = []
            for writer, n in zip(writers, first, strict=True):
                writer.kill()
                acknowledged.append(int([n, *writer.stdout.read().split()][-1]))
        finally:
            [writer.kill() for writer in writers]
        for n, last in enumerate(acknowledged):
            me, has = whole(store[f"own-{n}"])
            assert me == str(n) and has in (last, last + 1), (round_number, has, last)
        whole(store["common"])
    # What the dead had is taken over, with the values in it.
    heir = pool.shared_store("killed", stale=0.0)
    before = {key: bytes(value) for key, value in store.items()}
    moved = heir.adopt()
    assert moved >= 6 and heir.adopt() == moved, "and then their room goes back"
    assert {key: bytes(value) for key, value in store.items()} == before and len(before) == 3
    assert heir.adopt() == 0


def test_an_owner_that_was_only_slow_puts_again(pool):
    store = pool.shared_store("killed", stale=0.0)
    writer = start(pool, "slow", 60)
    try:
        for _ in range(3):
            writer.stdout.readline()
        for _ in range(8):
            stop(writer.pid)  # Where it is by then is up to chance.
            store.adopt()
            os.kill(writer.pid, signal.SIGCONT)
            for _ in range(3):
                last = int(writer.stdout.readline())
            whole(store["common"])
            assert whole(store["own-slow"])[1] >= last
    finally:
        writer.kill()
