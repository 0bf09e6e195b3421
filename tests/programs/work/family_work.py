"""Python's ways of making processes, from a parent whose memory does not fit: subprocess, os.fork,
multiprocessing by fork and by spawn."""
import hashlib
import multiprocessing
import os
import subprocess
import sys

mib, seed = int(sys.argv[1]), int(sys.argv[2])
BLOCK = 1 << 16
blocks = []


def block(i):
    return hashlib.shake_128(b"%d.%d" % (seed, i)).digest(BLOCK)


def digest(part):
    hasher = hashlib.sha256()
    for i in range(part, len(blocks), 8):
        hasher.update(blocks[i])
    return hasher.hexdigest()


def doubled(i):
    mine = bytearray(blocks[i])
    mine.extend(mine)
    return hashlib.sha256(mine).hexdigest()


def squares(n):
    return sum(i * i for i in range(n))


if __name__ == "__main__":
    blocks = [block(i) for i in range(mib * (1 << 20) // BLOCK)]
    expected = [digest(p) for p in range(8)]
    # Everything through a pipe to a program and back.
    data = b"".join(blocks[: len(blocks) // 4])
    echoed = subprocess.run(["cat"], input=data, stdout=subprocess.PIPE, check=True, timeout=300).stdout
    assert echoed == data
    del echoed, data
    # subprocess with a preexec function forks instead of vforking.
    done = subprocess.run(
        ["sh", "-c", "echo $0 $1", "a", "b"],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.nice(0),
        check=True,
        timeout=60,
    )
    assert done.stdout == b"a b\n"
    # A forked child checks everything and changes its own.
    pid = os.fork()
    if pid == 0:
        good = [digest(p) for p in range(8)] == expected
        for i in range(0, len(blocks), 3):
            blocks[i] = bytes(BLOCK)
        good = good and all(blocks[i] == bytes(BLOCK) for i in range(0, len(blocks), 3))
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(digest, range(8), chunksize=1) == expected
        some = list(range(0, len(blocks), max(1, len(blocks) // 64)))
        assert pool.map(doubled, some) == [doubled(i) for i in some]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(squares, [10, 100, 1000]) == [285, 328350, 332833500]
    assert [digest(p) for p in range(8)] == expected
    print("ok", hashlib.sha256("".join(expected).encode()).hexdigest())
