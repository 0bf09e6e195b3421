"""NumPy's operators and functions of arrays at the servers: what NumPy gives, of its type and shape."""

import warnings

import numpy as np
import pytest

import rampool
from test_numpy import DTYPES, RECORD, close, outcome, values

NUMBERS = ["?", "i1", "u2", "i4", "u4", "i8", "u8", ">i4", "f2", "f4", "f8", ">f8", "g", "c16"]
# NumPy 1 makes an object of it, whose power has no end.
HUGE = [10**30] if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else []
SHAPES = [(), (1,), (7, 5), (3, 4, 2), (0, 3)]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def placed(pool, here):
    """The same array at the servers. Servers have no empty regions: views of one are empty."""
    if here.size == 0:
        whole = pool.remote(None, tuple(n + 1 for n in here.shape), here.dtype)
        return whole[tuple(slice(n) for n in here.shape)]
    there = pool.remote(None, here.shape, here.dtype)
    there[...] = here
    return there


def alike(got, want, what, *, loose=0.0):
    """The same outcome: both raise, or the values, types and shapes are the same; floats up to rounding of
    the
    terms of a sum, whose size is `loose`."""
    if isinstance(want, Exception):
        assert isinstance(
            got, (TypeError, ValueError, IndexError, OverflowError, type(want))
        ), f"{what}: {got!r}, NumPy: {want!r}"
        return
    assert not isinstance(got, Exception), f"{what}: {got!r}, NumPy: {want!r}"
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), what
        for a, b in zip(got, want, strict=True):
            alike(a, b, what, loose=loose)
        return
    assert np.ndim(got) == 0 or hasattr(got, "shape"), f"{what}: {got!r}"
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (
        want.dtype,
        want.shape,
    ), f"{what}: {got.dtype} {got.shape}, NumPy: {want.dtype} {want.shape}"
    if loose and want.dtype.kind in "fc":
        atol = float(np.finfo(want.dtype).eps) * 64 * loose
        close(got, want, atol, what)
    else:
        np.testing.assert_array_equal(got, want, err_msg=str(what))


def size_of(*arrays):
    with np.errstate(all="ignore"):
        wide = [
            np.abs(array[np.isfinite(array)].astype("G")).sum()
            for array in map(np.asarray, arrays)
            if array.dtype.kind in "iufc"
        ]
    return float(sum(wide)) + 1


VIEWS = {
    "T": lambda a: a.T,
    "transpose": lambda a: np.transpose(a, (*range(1, a.ndim), 0)),
    "swapaxes": lambda a: a.swapaxes(0, -1),
    "moveaxis": lambda a: np.moveaxis(a, 0, -1),
    "reshape": lambda a: a.reshape(-1),
    "reshape2": lambda a: np.reshape(a, (a.shape[0], -1, 1)),
    "ravel F": lambda a: np.ravel(a.T, "F"),
    "flip": lambda a: np.flip(a, 0),
    "rot90": lambda a: np.rot90(a),
    "newaxis": lambda a: a[None, ..., None],
    "squeeze": lambda a: np.squeeze(a[:1]),
    "expand": lambda a: np.expand_dims(a, 1),
    "steps": lambda a: a[::-2],
    "steps of T": lambda a: a.T[1::2, ::-1],
    "row": lambda a: a[-1],
    "of views": lambda a: a[1:].T[..., ::-1].swapaxes(0, -1)[::2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_a_view_in_numpy_is_one_at_the_servers(pool, dtype):
    random = np.random.default_rng(3)
    for shape in SHAPES:
        here = values(random, shape, np.dtype(dtype))
        there = placed(pool, here)
        for name, view in VIEWS.items():
            want, what = outcome(lambda: view(here)), (dtype, shape, name)
            before = sum(server["received_bytes"] for server in pool.servers())
            got = outcome(lambda: view(there))
            if not isinstance(want, np.ndarray):
                alike(got, want, what)
                continue
            assert isinstance(got, rampool.RemoteArray), what
            assert before == sum(server["received_bytes"] for server in pool.servers()), what
            alike(got, want, what)
            # It is a view: what is written to it is written to the array, and the other way.
            if want.size:
                fresh = values(random, want.shape, np.dtype(dtype))
                got[...] = fresh
                want[...] = fresh
                alike(there, here, (*what, "written"))
                alike(got, want, what)
        for key in [np.s_[[0, 1, 0]], np.s_[:, [1, 0]], np.s_[[1, 0], [0, 1]]]:
            if len(shape) > 1 and shape[0]:
                alike(there.T[key], here.T[key], (dtype, key))


@pytest.mark.parametrize("dtype", ["i8", "f4", "i2", RECORD], ids=str)
def test_a_transposed_array_is_as_any_other(pool, dtype):
    random = np.random.default_rng(4)
    here = values(random, (6, 5, 4), np.dtype(dtype))
    there = placed(pool, here)
    for view in (
        lambda a: a.T,
        lambda a: a.transpose(1, 2, 0)[::-1, ::2],
        lambda a: a[:, ::-1].swapaxes(1, 2),
    ):
        a, b = view(there), view(here)
        for key in [np.s_[[2, 0, 2]], np.s_[:, [1, 0], 2], np.s_[1], np.s_[..., ::-2]]:
            alike(a[key], b[key], key)
            fresh = values(random, b[key].shape, np.dtype(dtype))
            a[key] = fresh
            b[key] = fresh
            alike(there, here, key)
        if dtype != RECORD:
            limit = b.ravel()[3]
            alike((a > limit).positions(), np.flatnonzero(b > limit), "positions")
            alike(a[a > limit], b[b > limit], "mask")
            a.add_at((slice(None), [1, 1]), np.ones((), dtype))
            np.add.at(b, (slice(None), [1, 1]), np.ones((), dtype))
            alike(there, here, "add_at")


def test_views_of_one_element_are_elements(pool):
    there, here = placed(pool, np.array(5)), np.array(5)
    for view in (
        np.flip,
        np.transpose,
        np.squeeze,
        lambda a: a.T,
        lambda a: a[...],
        lambda a: a.reshape(1, 1),
        lambda a: np.expand_dims(a, 0),
        lambda a: a[True],
        lambda a: a[np.False_],
    ):
        alike(view(there), view(here), "of no dimensions")


def test_shapes_of_views_are_numpys():
    from rampool._duck import _Copies, _reshaped

    random = np.random.default_rng(6)
    for _ in range(2000):
        shape = random.choice([1, 1, 2, 3, 4, 6], random.integers(0, 5))
        array = np.zeros(shape * 2, "i4")[
            (
                ...,
                *(
                    slice(None, n * step, step)
                    for n, step in zip(shape, random.choice([1, 1, 2], shape.size), strict=True)
                ),
            )
        ]
        array = array.transpose(random.permutation(array.ndim)) if random.random() < 0.3 else array
        left, sizes = array.size, []
        while left > 1:
            sizes.append(int(random.choice([n for n in range(2, left + 1) if left % n == 0])))
            left //= sizes[-1]
        for at in random.integers(0, len(sizes) + 1, random.integers(0, 3)):
            sizes.insert(at, 1)
        order = random.choice(list("CFA"))
        want = array.reshape(sizes, order=order)
        try:
            got = _reshaped(array, sizes, order)
        except _Copies:
            assert not np.shares_memory(want, array), (array.shape, array.strides, sizes, order)
        else:
            assert (
                np.shares_memory(want, array)
                and got.shape == want.shape
                and got.ctypes.data == want.ctypes.data
            )
            assert all(n == 1 or a == b for n, a, b in zip(got.shape, got.strides, want.strides, strict=True))


def test_a_shape_that_needs_a_copy_is_fetched(pool):
    here = np.arange(24).reshape(4, 6)
    there = placed(pool, here)
    for order in "CFA":
        for a, b in [(there, here), (there.T, here.T), (there[:, ::2], here[:, ::2])]:
            got, want = a.reshape(-1, 2, order=order), b.reshape(-1, 2, order=order)
            alike(got, want, order)
            assert isinstance(got, rampool.RemoteArray) == np.shares_memory(want, here)
    with pytest.raises(ValueError, match="reshape"):
        there.reshape(5, -1)


# --- reductions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_reductions_along_axes(pool, dtype, seed):
    random = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    for shape in SHAPES:
        here = values(random, shape, kind)
        there = placed(pool, here)
        masks = [random.random(shape) < 0.6, random.random(shape[-1:]) < 0.5, False]
        for name in (
            "sum",
            "mean",
            "min",
            "max",
            "any",
            "all",
            "prod",
            "std",
            "argmax",
            "count_nonzero",
            "ptp",
            "cumsum",
            "median",
        ):
            for axis in [None, 0, -1, (0, 1), (), 5]:
                for more in [
                    {}, {"keepdims": True}, {"dtype": "f8"}, {"dtype": "i4"}, {"dtype": "f4"}, {"initial": 3},
                    {"where": masks[0]},
                    {"where": masks[1], "initial": 1}, {"where": masks[2], "keepdims": True, "initial": 2},
                ]:  # fmt: skip
                    what = (dtype, shape, name, axis, list(more))
                    # NumPy wants to be told what the least of no element is; here a single one is enough.
                    if (
                        name in ("min", "max")
                        and "where" in more
                        and "initial" not in more
                        and (axis is None or shape == () or len(shape) == 1 or axis == (0, 1))
                    ):
                        continue
                    # A mean along a dimension that is not there: NumPy refuses it only without a `where`.
                    if name == "mean" and shape == () and axis in (0, -1):
                        continue
                    run = lambda array: getattr(np, name)(array, axis=axis, **more)  # noqa: B023
                    want = outcome(lambda: run(here))  # noqa: B023
                    alike(
                        outcome(lambda: run(there)),
                        want,
                        what,
                        loose=size_of(here) * (size_of(here) if name == "std" else 1),
                    )  # noqa: B023
        for name in ("add", "minimum", "maximum", "logical_or", "logical_and", "multiply"):
            function = getattr(np, name)
            for call in [function.reduce, lambda a, f=function: f.reduce(a, axis=None),
                         lambda a, f=function: f.reduce(a, keepdims=True), function.accumulate]:  # fmt: skip
                alike(
                    outcome(lambda: call(there)),
                    outcome(lambda: call(here)),
                    (dtype, shape, name),
                    loose=size_of(here),
                )  # noqa: B023


def test_a_reduction_writes_where_it_is_told(pool):
    here = np.arange(40_000.0).reshape(4, -1)
    there, result = placed(pool, here), placed(pool, np.zeros(4))
    assert np.sum(there, axis=1, out=result) is result
    alike(result, here.sum(1), "remote out")
    assert there.max(axis=1, out=(local := np.zeros(4))) is local
    alike(local, here.max(1), "out here")
    with pytest.raises(ValueError, match="shape"):
        there.sum(axis=0, out=result)
    with pytest.raises(TypeError):
        there.sum(axis=1, out=np.zeros(4, "i4"))


def received(pool):
    return sum(server["received_bytes"] for server in pool.servers())


def test_few_long_columns_are_added_up_at_the_servers(pool):
    here = np.random.default_rng(5).integers(-9, 9, (5000, 4, 2))
    there = placed(pool, here)
    before = received(pool)
    for name in ("sum", "mean", "min", "max", "any", "all"):
        alike(getattr(there, name)(axis=0), getattr(here, name)(axis=0), name)
        alike(
            getattr(there, name)(axis=(0, 2), keepdims=True),
            getattr(here, name)(axis=(0, 2), keepdims=True),
            name,
        )
    alike(there.sum(axis=0, where=there > 3), here.sum(axis=0, where=here > 3), "where")
    assert received(pool) - before < 20_000, "of 320,000 bytes"


# --- expressions ------------------------------------------------------------------------------------------

STEPS = {
    "times 2": lambda a: a * 2,
    "2 times": lambda a: 2 * a,
    "plus": lambda a: a + 7,
    "3 minus": lambda a: 3 - a,
    "minus": lambda a: a - 3,
    "half": lambda a: a / 2,
    "float": lambda a: a * 1.5,
    "negative": lambda a: -a,
    "large": lambda a: a * 2_000_000_000,
    "huge": lambda a: a * 1e30,
    "float32": lambda a: a + np.float32(0.1),
    "int16": lambda a: a * np.int16(300),
    "0-d": lambda a: np.array(3) * a,
    "chain": lambda a: (a * 3 - 5) / 4 + 1,
    "wraps": lambda a: a * 3_000_000_000 - 17,
    "zero": lambda a: a * 0,
}


@pytest.mark.parametrize("dtype", ["i4", "u4", "i8", "u8", "f4", "f8", "i2", ">f8"])
@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_column_changed_by_numbers(pool, dtype, seed):
    random = np.random.default_rng(seed)
    here = values(random, (40, 3), np.dtype(dtype))
    if seed == 3 and np.dtype(dtype).kind in "iu":
        here = (here % 100).astype(dtype)
    there = placed(pool, here)
    for name, step in STEPS.items():
        for view in (lambda a: a[:, 1], lambda a: a[::-2].T):
            a, b = outcome(lambda: step(view(there))), outcome(lambda: step(view(here)))  # noqa: B023
            what = (dtype, seed, name)
            alike(a, b, what)
            if isinstance(b, Exception):
                continue
            mask = view(here) > 5
            loose = size_of(view(here), b) + 10 * b.size
            for reduce in ("sum", "mean", "min", "max", "std", "any"):
                alike(
                    getattr(a, reduce)(),
                    getattr(b, reduce)(),
                    (*what, reduce),
                    loose=loose if reduce != "std" else loose * loose,
                )
            if mask.any() and isinstance(a, rampool.Expression):
                for reduce in ("sum", "mean", "max"):
                    want = getattr(b[mask], reduce)()
                    alike(
                        getattr(a, reduce)(where=view(there) > 5), want, (*what, reduce, "where"), loose=loose
                    )
                    alike(getattr(a, reduce)(where=mask), want, (*what, reduce, "mask"), loose=loose)
            alike(a[1:3], b[1:3], what)
            alike(a[[2, 0, 2]], b[[2, 0, 2]], what)
            alike(a + there[5, 0], b + here[5, 0], what)
            alike(np.sqrt(np.abs(a)), np.sqrt(np.abs(b)), what)
            if b.dtype == b.astype(dtype).dtype:
                alike(a > 4, b > 4, what)


@pytest.mark.parametrize("dtype", ["i8", "f8", "i4", "f4"])
def test_nothing_is_fetched_for_a_sum_of_an_expression(pool, dtype):
    here = np.arange(400_000).reshape(-1, 4).astype(dtype)
    there = placed(pool, here)
    before = received(pool)
    for reduce in ("sum", "mean", "min", "max"):
        want = getattr((here[:, 3] * 2 - 1).astype("f8"), reduce)()
        assert getattr(there[:, 3] * 2 - 1, reduce)() == pytest.approx(want)
    assert received(pool) - before < 10_000, "of a column of 400,000 bytes or more"


def test_an_expression_has_the_values_of_when_it_was_made(pool):
    there = placed(pool, np.arange(10))
    other = pool.remote(None, 10, "i8")
    doubled, odd, part, apart = there * 2, there > 4, there[5:] + 1, other + 1
    there[:6] = 0
    assert doubled.tolist() == list(range(0, 20, 2)) and doubled.sum() == 90 and doubled[3] == 6
    assert (
        odd.sum() == 5
        and odd.positions().tolist() == [5, 6, 7, 8, 9]
        and there[odd].tolist() == [0, 6, 7, 8, 9]
    )
    assert part.tolist() == [6, 7, 8, 9, 10] and apart._settled is None
    assert there.sum(where=odd) == 30 and there.count(odd) == 5
    later = there[6:] * 3
    for change in [
        lambda: there.add_at([7], 1), lambda: np.add(there, 1, out=there), lambda: there.fetch_add(8, 1),
        lambda: there.compare_exchange(9, int(there[9]), 0), lambda: np.multiply(there, 2, out=there),
    ]:  # fmt: skip
        want = there[6:].copy() * 3
        later = there[6:] * 3
        change()
        assert later.tolist() == want.tolist()
    # Another handle of the same array, and one that does not overlap.
    named = pool.remote("twice", 10, "i8")
    first, second = named[:5] + 1, named[5:] + 1
    pool.open("twice")[:5] = 9
    assert first.tolist() == [1] * 5 and second._settled is None
    with pytest.raises(TypeError, match="write to that array"):
        second[0] = 5


# --- ufuncs and functions ---------------------------------------------------------------------------------

UFUNCS = ["add", "subtract", "multiply", "true_divide", "floor_divide", "remainder", "power", "minimum",
          "maximum", "equal", "less", "greater_equal", "not_equal", "logical_and", "bitwise_xor", "hypot",
          "arctan2", "left_shift"]  # fmt: skip
UNARY = [
    "negative",
    "absolute",
    "sqrt",
    "exp",
    "sign",
    "isnan",
    "invert",
    "floor",
    "square",
    "conjugate",
    "logical_not",
    "spacing",
]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_ufuncs(pool, dtype):
    random = np.random.default_rng(8)
    for shape in SHAPES:
        here = values(random, shape, np.dtype(dtype))
        there = placed(pool, here)
        others = [
            3,
            -2,
            2.5,
            1j,
            True,
            np.int8(3),
            np.float64(0.5),
            np.ones(shape[-1:], "i2"),
            here,
            [1] * (shape[-1] if shape else 1),
            *HUGE,
        ]
        for name in UFUNCS:
            function = getattr(np, name)
            for other in others:
                what = (dtype, shape, name, other)
                alike(
                    outcome(lambda: function(there, other)), outcome(lambda: function(here, other)), what
                )  # noqa: B023
                alike(
                    outcome(lambda: function(other, there)),
                    outcome(lambda: function(other, here)),
                    (*what, "reversed"),
                )  # noqa: B023
            alike(
                outcome(lambda: function(there, there)),
                outcome(lambda: function(here, here)),
                (dtype, shape, name, "itself"),
            )  # noqa: B023
        for name in UNARY:
            function = getattr(np, name)
            alike(
                outcome(lambda: function(there)), outcome(lambda: function(here)), (dtype, shape, name)
            )  # noqa: B023
        alike(
            outcome(lambda: np.divmod(there, 3)),
            outcome(lambda: np.divmod(here, 3)),
            (dtype, shape, "divmod"),
        )  # noqa: B023
        alike(
            outcome(lambda: there @ there.T),
            outcome(lambda: here @ here.T),
            (dtype, shape, "matmul"),
            loose=size_of(here) ** 2,
        )  # noqa: B023
        alike(
            outcome(lambda: np.add.outer(there, [1, 2])),
            outcome(lambda: np.add.outer(here, [1, 2])),
            (dtype, shape, "outer"),
        )  # noqa: B023


@pytest.mark.parametrize("dtype", ["i4", "u8", "f4", "f8", "i2", "?", ">i4", "c16"])
def test_updates_in_place(pool, dtype):
    random = np.random.default_rng(9)
    others = [1, -1, 2.5, True, np.int16(-3), np.float64(0.5), np.arange(5), np.full(5, 0.25),
              np.arange(35, dtype="u1").reshape(7, 5), 1j, *HUGE, np.arange(3), np.zeros((2, 7, 5), "i1"),
              [1, 2, 3, 4, 5]]  # fmt: skip
    for name in [
        "add",
        "subtract",
        "multiply",
        "true_divide",
        "minimum",
        "maximum",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "floor_divide",
        "left_shift",
        "power",
    ]:
        function = getattr(np, name)
        for other in others:
            for view in (lambda a: a, lambda a: a.T[::-1].T, lambda a: a[::2, 1]):
                here = values(random, (7, 5), np.dtype(dtype))
                there = placed(pool, here)
                a, b = view(there), view(here)
                got, want = outcome(lambda: function(a, other, out=a)), outcome(
                    lambda: function(b, other, out=b)
                )  # noqa: B023
                what = (dtype, name, other)
                alike(got, want, what)
                # An update that fails has happened here not at all, and with NumPy perhaps in part.
                if not isinstance(want, Exception):
                    alike(there, here, what)
                    assert got is a, what
                there.free()


def test_what_python_writes_as_an_update(pool):
    here = np.arange(30.0).reshape(6, 5)
    there = placed(pool, here)
    for array in (there, here):
        array += 1
        array[:, 2] *= 3
        array[1:4, ::2] -= np.arange(3)
        array[[0, 2]] += 5
        array[array > 20] /= 2
        array.T[1] **= 2
        array[0, 0] += 9
        np.add(array[1:], array[:-1], out=array[1:])
        np.multiply(array, 2, out=array, where=np.arange(5) > 2)
        np.clip(array, 1, 500, out=array)
        np.negative(array[0], out=array[5])
    alike(there, here, "updates")
    (same := there).__iadd__(1)
    assert same is there


def test_updates_in_pieces_read_what_was_there(pool, monkeypatch):
    from rampool import _ufuncs

    monkeypatch.setattr(_ufuncs, "_PIECE_BYTES", 80)
    here, other = np.arange(60.0).reshape(12, 5), np.arange(60.0, 120.0).reshape(12, 5)
    there, apart = placed(pool, here), placed(pool, other)
    for a, b in ((there, apart), (here, other)):
        np.multiply(a[:-1], 2, out=a[1:])
        np.add(a[1:], a[::-1][1:], out=a[:-1])
        np.subtract(b, a, out=a)
        np.multiply(a, a[0], out=a, where=b > 70)
        np.divide(a.T, np.arange(1.0, 13), out=a.T)
        np.sqrt(b[3], out=b[3])
        np.add(np.arange(5), b[:, :1], out=b)
    alike(there, here, "the one")
    alike(apart, other, "the other")


def test_updates_that_servers_make_send_and_fetch_nothing_back(pool):
    there = placed(pool, np.arange(100_000))
    before = received(pool)
    there += 5
    there[::2] -= 3
    np.maximum(there, 7, out=there)
    assert received(pool) - before < 10_000
    here = np.arange(100_000) + 5
    here[::2] -= 3
    alike(there, np.maximum(here, 7), "updates")


FUNCTIONS = {
    "where": lambda a: np.where(a > 2, a, 0),
    "where positions": lambda a: np.where(a > 2),
    "nonzero": lambda a: (a != 0).nonzero(),
    "count_nonzero": lambda a: np.count_nonzero(a > 2),
    "count along": lambda a: np.count_nonzero(a, axis=0),
    "concatenate": lambda a: np.concatenate([a, a[::-1]]),
    "stack": lambda a: np.stack([a, a * 1], axis=1),
    "sort": lambda a: np.sort(a, axis=0),
    "argsort": lambda a: a.argsort(axis=None),
    "unique": lambda a: np.unique(a),
    "median": lambda a: np.median(a, axis=0),
    "percentile": lambda a: np.percentile(a, 30),
    "cumsum": lambda a: a.cumsum(0),
    "diff": lambda a: np.diff(a, axis=0),
    "dot": lambda a: a.T.dot(a),
    "einsum": lambda a: np.einsum("ij,ij->i", a, a),
    "take": lambda a: a.take([1, 0], axis=1),
    "clip": lambda a: a.clip(2, 5),
    "round": lambda a: a.round(1),
    "tile": lambda a: np.tile(a, 2),
    "pad": lambda a: np.pad(a, 1),
    "split": lambda a: np.array_split(a, 3),
    "broadcast": lambda a: np.broadcast_to(a[0], (3, 5)),
    "zeros_like": lambda a: np.zeros_like(a),
    "full_like": lambda a: np.full_like(a, 3, dtype="f4"),
    "isin": lambda a: np.isin(a, [1, 2]),
    "allclose": lambda a: np.allclose(a, a * 1),
    "array_equal": lambda a: np.array_equal(a, a),
    "linalg": lambda a: np.linalg.norm(a),
    "fft": lambda a: np.fft.rfft(a, axis=0),
    "searchsorted": lambda a: np.searchsorted(np.arange(5), a),
    "histogram": lambda a: np.histogram(a, bins=3),
    "histogram2d": lambda a: np.histogram(a),
    "shape": lambda a: [np.shape(a), np.ndim(a), np.size(a), np.size(a, 0), len(a)],
    "types": lambda a: [np.result_type(a, "i1") == np.result_type(a.dtype, "i1"), np.iscomplexobj(a),
                        np.isrealobj(a), np.can_cast(a.dtype, "f8")],
    "copy": lambda a: a.copy(),
    "astype": lambda a: a.astype("f4"),
    "asarray": lambda a: np.asarray(a, "c16"),
    "flatten": lambda a: a.flatten(),
    "tolist": lambda a: a.tolist(),
    "item": lambda a: [a.item(3), a.item(1, 2), a[:1, :1].item()],
    "contains": lambda a: [3 in a, 10**6 in a],
    "rows": lambda a: list(a),
    "elements": lambda a: list(a[0]),
    "and": lambda a: (a > 1) & (a < 5),
    "not": lambda a: ~(a > 1),
    "mask": lambda a: a[(a > 1) & (a < 5)],
    "any": lambda a: [(a > 3).any(), (a > 10**6).any(), (a >= a.min()).all()],
    "mean of condition": lambda a: [(a > 3).mean(), (a > 3).sum(), (a > 3).sum(axis=0), (a > 3).max()],
    "real": lambda a: [a.real, a.imag, np.real(a), np.imag(a)],
    "bool": lambda a: bool(a[:1, :1] == a[0, 0]),
    "int": lambda a: [int(a[:1, :1].reshape(())), float(a[1, 1, ...]),
                      range(10)[np.asarray(a[0, 0, ...]).astype(int) % 3]],
    "ptp": lambda a: [np.ptp(a), np.ptp(a, axis=0)],
    "apply": lambda a: np.apply_along_axis(np.sum, 0, a),
    "lists": lambda a: np.block([[a, a], [a, a]]),
    "nan": lambda a: [np.nansum(a), np.nanmax(a)],
    "trapezoid": lambda a: np.cumprod(a[:2], axis=1),
    "var": lambda a: a.var(axis=1, ddof=1),
    "triu": lambda a: np.triu(a),
    "at": lambda a: np.bincount(np.abs(a.ravel().astype("i8")) % 10),
    "index": lambda a: np.arange(100)[(a[:, 0] > 2)[:6].astype(bool).nonzero()],
    "compare arrays": lambda a: a == np.asarray(a),
    "compare None": lambda a: a == None,  # noqa: E711
    "0-d": lambda a: a[2, 3] + a[2, 3, ...],
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["i4", "i8", "f8", "f4", "i2", ">f4"])
def test_functions(pool, dtype):
    here = (np.random.default_rng(10).standard_normal((6, 5)) * 4).astype(dtype)
    there = placed(pool, here)
    for name, function in FUNCTIONS.items():
        got, want = outcome(lambda: function(there)), outcome(lambda: function(here))  # noqa: B023
        alike(
            got,
            want,
            (dtype, name),
            loose=size_of(here) ** 2 if name in ("linalg", "fft", "var", "dot", "einsum") else size_of(here),
        )


def test_arrays_here_are_changed_by_arrays_there(pool):
    here = np.arange(10.0)
    there = placed(pool, here)
    result = np.zeros(10)
    result += there
    result[2:] -= there[:8] * 2
    result[::-1] *= there + 1
    np.add(there, there, out=result, where=here > 5)
    want = np.zeros(10)
    want += here
    want[2:] -= here[:8] * 2
    want[::-1] *= here + 1
    np.add(here, here, out=want, where=here > 5)
    alike(result, want, "results here")


def test_functions_that_write(pool):
    here = np.arange(30).reshape(6, 5)
    there = placed(pool, here)
    for array in (there, here):
        np.copyto(array, 7, where=np.arange(5) > 2)
        np.copyto(array[0], np.arange(5, dtype="i1"))
        np.put(array, [3, 4], [-1, -2])
        np.place(array, np.asarray(array) == 7, [1, 2, 3])
        np.putmask(array, np.asarray(array) > 20, 20)
        np.fill_diagonal(array, 99)
        np.add.at(array, [1, 1], 5)
        np.multiply.at(array, [2, 2], 3)
        np.bitwise_xor.at(array, ([0, 0], [1, 1]), 3)
        array.fill(4)
        np.cumsum(np.arange(5), out=array[2])
        np.maximum.accumulate(np.arange(30).reshape(6, 5)[::-1], out=array[:, ::-1])
    alike(there, here, "written")
    for refused in [
        lambda: np.copyto(there, 2.5),
        lambda: np.copyto(there * 2, 1),
        lambda: np.add(there, 1, out=there * 2),
        lambda: np.put(there + 1, 0, 0),
    ]:
        with pytest.raises(TypeError):
            refused()


def test_what_would_be_lost_is_refused(pool):
    there = placed(pool, np.arange(30).reshape(6, 5))
    records = placed(pool, np.zeros(3, RECORD))
    for lose in [
        lambda: next(iter(there)).__setitem__(0, 1),
        lambda: np.array_split(there, 2)[0].fill(1),
        lambda: np.broadcast_arrays(there, 1)[0].__setitem__(0, 1),
        lambda: records[1].__setitem__("a", 1),
        lambda: (there * 2).__setitem__(0, 1),
        lambda: np.random.default_rng().shuffle(there * 2),
    ]:
        with pytest.raises((ValueError, TypeError)):
            lose()
    with pytest.raises(AttributeError):
        there.sort()
    with pytest.raises(ValueError, match="copy"):
        (
            np.asarray(there, copy=False)
            if np.lib.NumpyVersion(np.__version__) >= "2.0.0"
            else there.__array__(copy=False)
        )


def test_fields_of_records(pool):
    kind = np.dtype(
        [("a", "i4"), ("b", "f8", (2,)), ("c", "S3"), ("d", [("x", "u8"), ("y", "f4")])], align=True
    )
    here = np.zeros((4, 3), kind)
    here["a"], here["b"], here["d"]["y"] = np.arange(12).reshape(4, 3), 0.5, 2
    there = placed(pool, here)
    for array in (there, here):
        array["a"] += 3
        array["b"][..., 1] = 7
        array["d"]["x"] = np.arange(3)
        array["c"] = b"abc"
        array[["a", "c"]][1] = np.array((5, b"xy"), [("a", "i4"), ("c", "S3")])
        array[["c", "a"]][2] = np.array((b"z", 6), [("c", "S3"), ("a", "i4")])
    alike(there, here, "fields")
    for name in ("a", "b", "c"):
        alike(there[name], here[name], name)
    alike(there["d"]["x"].sum(), here["d"]["x"].sum(), "sum of a field")
    alike(there["b"].T, here["b"].T, "subarrays")
    alike(there[there["a"] > 8], here[here["a"] > 8], "selected by a field")
    assert there[["a", "c"]].dtype == here[["a", "c"]].dtype and there[1, 1] == here[1, 1]
    with pytest.raises((ValueError, KeyError, IndexError)):
        there["none"]


def test_complex_parts_are_views(pool):
    here = np.arange(6) * (1 + 2j)
    there = placed(pool, here)
    there.real[...] = 1
    there.imag[::2] = 5
    here.real[...] = 1
    here.imag[::2] = 5
    alike(there, here, "parts")
    assert there.imag.sum() == here.imag.sum()


def test_bytes_are_viewed_as_another_dtype(pool):
    here = np.arange(24, dtype="i4").reshape(4, 6)
    there = placed(pool, here)
    for dtype in ("u1", "f8", "i4", [("a", "i2"), ("b", "u2")]):
        got = there.view(dtype)
        assert isinstance(got, rampool.RemoteArray)
        alike(got, here.view(dtype), dtype)
    there.view("i8")[1] = here.view("i8")[1] = 5
    alike(there, here, "written")
    for wrong in [lambda a: a.T.view("i8"), lambda a: a.view("V5"), lambda a: a.view(object)]:
        with pytest.raises((ValueError, TypeError)):
            wrong(there)


def test_shared_memory_is_known(pool):
    there, other = pool.remote(None, 10), pool.remote(None, 10)
    assert (
        np.shares_memory(there[3:], there[:4])
        and not np.shares_memory(there, other)
        and not np.may_share_memory(there, np.zeros(3))
    )


def test_each_kind_of_fetch_is_said_once(pool):
    from rampool import _duck

    there = pool.remote("said", (10, 4), "i8")
    _duck._warned.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            np.median(there)
            np.sqrt(there)
            there + there[0]
            np.asarray(there), there.tolist(), there.sum(), there.T.max(), there[3:].copy(), (
                there > 3
            ).sum()  # asked for, or not fetched
    assert [str(each.message).split(" is ")[0] for each in seen] == ["np.median", "np.sqrt", "np.add"]
    assert all(each.category is rampool.FetchWarning and each.filename == __file__ for each in seen)
    assert "320 bytes of 'said' were fetched" in str(seen[0].message) and "352 bytes" in str(seen[2].message)


def test_other_libraries_arrays_decide_first(pool):
    class Other:
        __array_ufunc__ = None

        def __radd__(self, other):
            return "other"

    class Function:
        def __array_function__(self, *_):
            return "function"

    there = pool.remote(None, 3)
    assert there + Other() == "other"
    assert np.concatenate([there, Function()]) == "function"
