"""Random nested datatypes of mpi4py: what a decoded layout selects is what MPI packs. `mpi_datatypes.py
SERVER SEED COUNT`"""

import math
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))

import rampool_mpi  # noqa: E402
from mpi4py import MPI  # noqa: E402

REACH = 40_000
NAMED = [
    MPI.CHAR, MPI.SHORT, MPI.INT, MPI.DOUBLE, MPI.LONG_DOUBLE, MPI.DOUBLE_INT, MPI.SHORT_INT, MPI.FLOAT_INT,
    MPI.TWOINT, MPI.BYTE,
]


def random_type(dice, depth):
    if depth == 0 or dice.random() < 0.15:
        return dice.choice(NAMED)
    part, count, block = random_type(dice, depth - 1), dice.randrange(5), dice.randrange(4)
    lengths = [dice.randrange(4) for _ in range(count)]
    places = [dice.randrange(-5, 10) for _ in range(count)]
    far = [dice.randrange(-100, 200) for _ in range(count)]
    # Open MPI 4.1 takes a stride of -1 for none.
    stride, far_stride = dice.choice([-3, -2, 0, 1, 2, 3, 4, 5]), dice.randrange(300) - 100
    far_stride -= far_stride == -1
    kind = dice.randrange(12)
    if kind == 0:
        return part.Create_contiguous(count)
    if kind == 1:
        return part.Create_vector(count, block, stride)
    if kind == 2:
        return part.Create_hvector(count, block, far_stride)
    if kind == 3:
        return part.Create_indexed(lengths, places)
    if kind == 4:
        return part.Create_hindexed(lengths, far)
    if kind == 5:
        return part.Create_indexed_block(block, places)
    if kind == 6:
        return part.Create_hindexed_block(block, far)
    if kind == 7:
        return MPI.Datatype.Create_struct(lengths, far, [random_type(dice, depth - 1) for _ in lengths])
    if kind == 8:
        sizes = [dice.randrange(1, 6) for _ in range(1 + count % 3)]
        starts = [dice.randrange(size) for size in sizes]
        parts = [dice.randrange(1, size - start + 1) for size, start in zip(sizes, starts)]
        return part.Create_subarray(sizes, parts, starts, dice.choice([MPI.ORDER_C, MPI.ORDER_FORTRAN]))
    if kind == 9:
        return part.Create_resized(dice.randrange(-20, 20), max(part.Get_extent()[1], 0) + dice.randrange(64))
    if kind == 10:
        return random_darray(dice, part)
    return part.Dup()


def random_darray(dice, part):
    """What a process of a grid has of an array of one to three dimensions."""
    if part.Get_size() == 0:
        return part.Dup()  # Open MPI 4.1 makes none of empty elements.
    ways = [
        dice.choice([MPI.DISTRIBUTE_BLOCK, MPI.DISTRIBUTE_CYCLIC, MPI.DISTRIBUTE_NONE])
        for _ in range(dice.randrange(1, 4))
    ]
    grid = [1 if way == MPI.DISTRIBUTE_NONE else dice.randrange(1, 4) for way in ways]
    sizes = [dice.randrange(processes, 9) for processes in grid]
    lengths = []
    for way, size, processes in zip(ways, sizes, grid):
        least = -(-size // processes) if way == MPI.DISTRIBUTE_BLOCK else 1
        free = way != MPI.DISTRIBUTE_NONE and dice.random() < 0.5
        lengths.append(dice.randrange(least, least + 3) if free else MPI.DISTRIBUTE_DFLT_DARG)
    processes = math.prod(grid)
    order = dice.choice([MPI.ORDER_C, MPI.ORDER_FORTRAN])
    return part.Create_darray(processes, dice.randrange(processes), sizes, ways, lengths, grid, order)


def is_hollow(datatype):
    """Whether a part of it is empty: of several elements of such a struct, Open MPI 4.1 packs other bytes
    than lie an extent apart."""
    if datatype.is_predefined:
        return False
    return datatype.Get_size() == 0 or any(is_hollow(part) for part in datatype.Get_contents()[-1])


def refused(wrong):
    try:
        wrong()
    except rampool_mpi.RampoolError as error:
        assert str(error)
        return str(error)
    raise AssertionError("it was not refused")


def main():
    server, seed, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dice = random.Random(seed)
    memory = bytearray(dice.randrange(1, 256) for _ in range(2 * REACH))
    address = MPI.buffer.frombuffer(memory).address
    direct = rampool_mpi.Direct(server=server, memory="8M")
    region = direct.region("mpi4py", 2 * REACH)
    assert len(region) == 2 * REACH
    checked = 0
    for number in range(wanted):
        datatype = random_type(dice, 4).Dup().Commit()
        (lower, extent), step = datatype.Get_true_extent(), datatype.Get_extent()[1]
        if (
            step <= 0
            or lower < -REACH // 4
            or lower + extent > REACH // 4
            or step > REACH // 4
            or datatype.Get_size() > REACH // 4
        ):
            continue
        count = 1 if is_hollow(datatype) else 2
        layout = rampool_mpi.Layout.of(datatype).contiguous(count)
        assert layout.size == count * datatype.Get_size(), number
        expected = bytearray(max(layout.size, 1))
        # As many elements as extents fit the buffer.
        datatype.Pack(MPI.buffer.fromaddress(address + REACH, count * step), expected, 0, MPI.COMM_SELF)
        whole = MPI.buffer.fromaddress(address + REACH, REACH)
        assert layout.pack(address + REACH) == bytes(expected[: layout.size]), (
            f"datatype {number}: other bytes than MPI packs"
        )
        if lower >= 0 and layout.size:
            direct.put(region, whole, datatype, count, offset=64)
            back = bytearray(layout.size)
            direct.get(region, back, offset=64)
            assert back == expected, f"datatype {number}: other bytes arrived"
        checked += 1
    assert checked > wanted // 2, checked
    for wrong in (lambda: direct.put(region, bytearray(10), MPI.INT, 3),
                  lambda: direct.get(region, b"constant"),
                  lambda: direct.region("never created")):
        refused(wrong)
    # What C's types do not hold is not cut down to what they hold.
    direct.region("a", 8)
    for wrong, why in (
        (lambda: direct.region("a\0b", 8), "NUL"),
        (lambda: direct.put(region, bytearray(8), offset=-8), "-8 "),
        (lambda: direct.put(region, bytearray(8), offset=1 << 64), f"{1 << 64} "),
        (lambda: direct.put(region, bytearray(8), MPI.INT, -1), "-1 "),
        (lambda: rampool_mpi.Layout.bytes(8).hvector(2, 1, 16 + (1 << 64)), f"{16 + (1 << 64)} "),
        (lambda: rampool_mpi.Layout.bytes(8).indexed([1 + (1 << 64)], [0]), f"{1 + (1 << 64)} "),
        (lambda: rampool_mpi.Direct(server=server + "\0=1M"), "NUL"),
    ):
        assert why in refused(wrong)
    direct.close()
    for late in (lambda: direct.region("a", 8), lambda: direct.put(region, bytearray(8))):
        assert "closed" in refused(late)
    print(f"{checked} datatypes")


if __name__ == "__main__":
    main()
