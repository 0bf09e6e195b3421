#!/usr/bin/env python3
"""Random operations on files, compared with what memory would hold: exercise.py DIRECTORY SEED OPERATIONS.

In the manner of fsx, with several files, holes, renames, files without a name, and mmap. The kernel is told
to forget what it has cached now and then, so that bytes come from the file system."""

import ctypes
import errno
import mmap
import os
import random
import sys

MOST = 3 << 20
PUNCH, ZERO, KEEP = 2, 16, 1
libc = ctypes.CDLL(None, use_errno=True)


class File:
    def __init__(self, path):
        self.path, self.holds = path, bytearray()
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def grow(self, to):
        if len(self.holds) < to:
            self.holds.extend(bytes(to - len(self.holds)))


def fallocate(file, mode, offset, length):
    done = libc.fallocate(file.fd, mode, ctypes.c_long(offset), ctypes.c_long(length))
    if done:
        raise OSError(ctypes.get_errno(), f"fallocate {mode}")


def direct(file, rng):
    """Past the kernel's cache, at any byte."""
    offset, data = place(rng), rng.randbytes(length(rng))
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    try:
        fd = os.open(file.path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return
    try:
        if os.pwritev(fd, [buffer], offset) != len(data):
            sys.exit(f"{file.path}: a direct write is cut short")
        file.grow(offset + len(data))
        file.holds[offset : offset + len(data)] = data
        found = mmap.mmap(-1, len(data))
        os.preadv(fd, [found], offset)
        compare(file, offset, found[:])
    finally:
        os.close(fd)


def compare(file, offset, found):
    wanted = file.holds[offset : offset + len(found)]
    if found == wanted:
        return
    at = next(i for i, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1])
    sys.exit(f"{file.path}: byte {offset + at} is {found[at]}, not {wanted[at]} (of {len(file.holds)})")


def write(file, rng):
    offset, data = place(rng), rng.randbytes(length(rng))
    os.pwrite(file.fd, data, offset)
    file.grow(offset + len(data))
    file.holds[offset : offset + len(data)] = data


def read(file, rng):
    offset, size = place(rng), length(rng)
    found = os.pread(file.fd, size, offset)
    if len(found) != max(0, min(size, len(file.holds) - offset)):
        sys.exit(f"{file.path}: {len(found)} bytes of {size} from {offset} on, it has {len(file.holds)}")
    compare(file, offset, found)


def truncate(file, rng):
    size = place(rng)
    os.ftruncate(file.fd, size)
    del file.holds[size:]
    file.grow(size)


def punch(file, rng):
    offset, size = place(rng), length(rng)
    fallocate(file, PUNCH | KEEP, offset, size)
    end = min(offset + size, len(file.holds))
    file.holds[offset:end] = bytes(max(end - offset, 0))


def zero(file, rng):
    offset, size = place(rng), length(rng)
    fallocate(file, ZERO, offset, size)
    file.grow(offset + size)
    file.holds[offset : offset + size] = bytes(size)


def allocate(file, rng):
    offset, size, mode = place(rng), length(rng), rng.choice([0, KEEP])
    fallocate(file, mode, offset, size)
    if mode == 0:
        file.grow(offset + size)


def mapped(file, rng):
    if not file.holds:
        return
    with mmap.mmap(file.fd, len(file.holds)) as view:
        offset = rng.randrange(len(file.holds))
        data = rng.randbytes(min(length(rng), len(file.holds) - offset))
        compare(file, offset, view[offset : offset + len(data)])
        view[offset : offset + len(data)] = data
        file.holds[offset : offset + len(data)] = data


def forget(file, rng):
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def close(file, rng):
    os.close(file.fd)
    file.fd = os.open(file.path, os.O_RDWR)


def rename(file, rng):
    to = f"{file.path}x" if len(file.path) % 7 else file.path.rstrip("x")
    os.rename(file.path, to)
    file.path = to


def nameless(file, rng):
    """The name goes; what is open stays until it is closed. Then it is a new file."""
    os.unlink(file.path)
    forget(file, rng)
    compare(file, 0, os.pread(file.fd, MOST * 2, 0))
    os.close(file.fd)
    file.__init__(file.path)


def place(rng):
    return rng.choice([rng.randrange(MOST), rng.randrange(MOST // 4096) * 4096])


def length(rng):
    return rng.choice([1, rng.randrange(1, 5000), rng.randrange(1, 200_000), 4096 * rng.randrange(1, 40)])


STEPS = [(write, 10), (read, 8), (truncate, 1), (punch, 2), (zero, 1), (allocate, 1)]
STEPS += [(mapped, 3), (forget, 2), (direct, 3), (close, 1), (rename, 1), (nameless, 0.3)]


def main():
    where, seed, operations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    files = [File(os.path.join(where, f"f{number}")) for number in range(3)]
    steps, weights = zip(*STEPS)
    for number in range(operations):
        file, step = rng.choice(files), rng.choices(steps, weights)[0]
        try:
            step(file, rng)
            size = os.fstat(file.fd).st_size
            if size != len(file.holds):
                sys.exit(f"{file.path} has {size} bytes, not {len(file.holds)}")
        except OSError as error:
            sys.exit(f"operation {number}, {step.__name__}: {errno.errorcode.get(error.errno)}: {error}")
    for file in files:
        forget(file, rng)
        compare(file, 0, os.pread(file.fd, MOST * 2, 0))
        os.close(file.fd)
        os.unlink(file.path)


if __name__ == "__main__":
    main()
