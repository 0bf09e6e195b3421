"""Programs that test_shared.py runs on several ranks: they are pickled by name."""

import os
import signal
import time

import numpy as np


def relax(grid, rows, colour):
    """One half of a red-black sweep (Gauss-Seidel with over-relaxation) over some inner rows."""
    for row in rows:
        first = 1 + (row + colour) % 2
        here = grid[row, first:-1:2]
        around = grid[row - 1, first:-1:2] + grid[row + 1, first:-1:2]
        around += grid[row, first - 1 : -2 : 2] + grid[row, first + 1 :: 2]
        here += 1.5 * (around / 4 - here)


def start(grid):
    grid[0] = 1
    grid[-1, :] = np.linspace(0, 2, grid.shape[1])


def serial_sor(size, sweeps):
    grid = np.zeros((size, size))
    start(grid)
    for _ in range(sweeps):
        relax(grid, range(1, size - 1), 0)
        relax(grid, range(1, size - 1), 1)
    return grid


def sor(ranks, size, sweeps, protocol=None):
    grid = ranks.array((size, size), protocol=protocol, blocked=True)
    if ranks.rank == 0:
        start(grid)
    ranks.barrier()
    rows = range(1, size - 1)[ranks.part(size - 2)]
    for _ in range(sweeps):
        for colour in (0, 1):
            with ranks.epoch():
                relax(grid, rows, colour)
    return np.array(grid)


def count(ranks, times):
    cell, words = ranks.array(1, "i8"), ranks.array((2, 2), "i8")
    doubles = ranks.array(3)
    for _ in range(times):
        with ranks.lock(1):
            cell[0] += 1
        ranks.fetch_add(words, (1, -1), 2)
        ranks.fetch_add(doubles, 2, 0.5)
    ranks.barrier()
    with ranks.lock(1, readers=True):
        return ranks.rank, int(cell[0]), int(words[1, 1]), float(doubles[2]), int(words[0].sum())


def fail(ranks):
    if ranks.rank == 1:
        raise ZeroDivisionError("on purpose")
    ranks.barrier()


def die(ranks):
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()


def interrupted(ranks, path):
    """Rank 0 waits for a barrier that rank 1 never comes to, and is interrupted."""
    if ranks.rank == 1:
        while True:
            time.sleep(0.01)
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    try:
        ranks.barrier()
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def mistakes(ranks):
    said = []
    for call in [
        lambda: ranks.array(3, object),
        lambda: ranks.array(3, protocol="nonsense"),
        lambda: ranks.array(0),
        lambda: ranks._native.unlock(3),
        lambda: ranks._native.lock(1 << 62, False, True),
        lambda: ranks.fetch_add(np.zeros(3), 0, 1),
        lambda: ranks.fetch_add(np.zeros(3, "f4"), 0, 1),
        lambda: ranks.fetch_add(np.zeros(3), (0, 0), 1),
    ]:
        try:
            call()
            said.append("nothing")
        except Exception as error:
            said.append(type(error).__name__)
    with ranks.lock(5):
        ranks.barrier(3) if ranks.ranks == 1 else None
    child = os.fork()
    if child == 0:
        try:
            ranks.barrier()
        except Exception as error:
            os._exit(7 if type(error).__name__ == "ForkError" else 8)
        os._exit(9)
    said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return said
