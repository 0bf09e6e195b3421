"""Arrays at the servers have NumPy's values and types, or raise where NumPy's do."""

import operator
import warnings

import numpy as np
import pytest

import rampool

RECORD = [("a", "i4"), ("b", "f8")]
DTYPES = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8", "f2", "f4", "f8", ">f4", ">f8", "g",
    "c8", "c16", ">c16", "M8[s]", "M8[ns]", "m8[ms]", "S3", "U2", "V4", RECORD,
]  # fmt: skip
PARTS = [np.s_[...], np.s_[:, 1], np.s_[::-2, ::3], np.s_[5], np.s_[3, -1], np.s_[4:4], np.s_[:, :0]]
TESTS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def values(random, shape, kind):
    """Any values of the type; of floats some that are no number, or without end."""
    bits = random.integers(0, 256, (*shape, kind.itemsize), "u1")
    if kind.kind == "b":
        return np.asarray(bits[..., 0] % 2, kind)
    if kind.kind in "fc":
        array = np.asarray(random.standard_normal(shape) * 50, kind)
        if kind.kind == "c":
            array = np.asarray(array + 1j * random.standard_normal(shape) * 50, kind)
        odd = [[], [np.nan], [np.inf], [np.inf, -np.inf], [np.nan, -np.inf], [-0.0, 0.0]][random.integers(6)]
        if array.size:
            array.reshape(-1)[random.integers(0, array.size, len(odd))] = odd
        return array
    if kind.kind in "US":
        return np.asarray(random.integers(0, 99, shape).astype(str), kind)
    if kind.names:
        array = np.zeros(shape, kind)
        array["a"], array["b"] = random.integers(0, 9, shape), random.standard_normal(shape)
        return array
    return np.ndarray(shape, kind, bits)


def viewing(key):
    """As NumPy: with `...` one element is a view, too."""
    return (*(key if isinstance(key, tuple) else (key,)), *([] if key is ... else [...]))


def outcome(f):
    try:
        return f()
    except Exception as error:
        return error


def same(there, here, terms, what):
    """What `there` gives is what `here` does; float totals up to the rounding of their terms."""
    want, got = outcome(here), outcome(there)
    if isinstance(want, Exception):
        assert isinstance(got, (TypeError, ValueError)), f"{what}: {got!r}, NumPy: {want!r}"
        return
    assert not isinstance(got, Exception), f"{what}: {got!r}, NumPy: {want!r}"
    want, got = np.asarray(want), np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    if want.dtype.kind not in "fc":
        assert got == want or (want.dtype.kind in "mM" and np.isnat(want) and np.isnat(got)), what
        return
    with np.errstate(all="ignore"):
        finite = terms[np.isfinite(terms)]
        size = np.abs(finite.astype("G" if terms.dtype.kind == "c" else "g")).sum()
        tolerance = float(np.finfo(want.dtype).eps) * float(size) * 32
    close(got, want, tolerance, what)


def close(got, want, tolerance, what):
    """Each part of complex numbers by itself: one of them may be without end."""
    for part in ("real", "imag") if want.dtype.kind == "c" else ("real",):
        np.testing.assert_allclose(
            getattr(got, part), getattr(want, part), rtol=0, atol=tolerance, equal_nan=True, err_msg=str(what)
        )


def reductions(there, here, what, **where):
    counted = here[where.pop("mask", ...)].ravel()
    terms = counted if counted.dtype.kind in "fciu" else np.zeros(0)
    for name in ("sum", "mean"):
        same(lambda: getattr(there, name)(**where), getattr(counted, name), terms, (*what, name))
    for name in ("min", "max"):
        same(lambda: getattr(there, name)(**where), getattr(counted, name), terms[:0], (*what, name))
    assert there.count(**where) == counted.size, what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_reductions_are_numpys(pool, dtype, seed):
    random, kind = np.random.default_rng(seed), np.dtype(dtype)
    for shape in [(), (1,), (70, 4)]:
        here = values(random, shape, kind)
        there = pool.remote(None, shape, kind)
        there[...] = here
        for key in PARTS if len(shape) == 2 else [...]:
            part, same_part = there[viewing(key)], np.asarray(here[key])
            reductions(part, same_part, (dtype, shape, key))
            mask = random.random(same_part.shape) < 0.3
            reductions(part, same_part, (dtype, shape, key, "mask"), where=mask, mask=mask)
            operands = [5, 2.5, np.nan, 2.0**53, *same_part.ravel()[:2]]
            for test in TESTS:
                operand = operands[random.integers(len(operands))]
                mask = outcome(lambda: test(same_part, operand))
                what = (dtype, shape, key, test.__name__, operand)
                if isinstance(mask, bool):
                    continue  # NumPy 1, of what it does not compare
                if not isinstance(mask, (np.ndarray, np.bool_)) or mask.dtype != bool:
                    assert isinstance(outcome(lambda: part.sum(where=test(part, operand))), TypeError), what
                else:
                    reductions(part, same_part, what, where=test(part, operand), mask=mask)
                    got = np.flatnonzero(test(part, operand))
                    np.testing.assert_array_equal(got, np.flatnonzero(mask), err_msg=str(what))
        there.free()


@pytest.mark.parametrize("dtype", [">i4", ">f8", ">c16", "S3", "U4"])
def test_one_element_is_written_as_it_is(pool, dtype):
    there = pool.remote(None, (2, 3), dtype)
    there[1, 2] = np.asarray(7, dtype)
    there[0] = np.asarray([1, 2, 3], dtype)
    there[1, 0, ...][...] = np.asarray(5, dtype)
    assert there[1, 2] == np.asarray(7, dtype) and there[1, 0] == np.asarray(5, dtype)
    np.testing.assert_array_equal(there[0], np.asarray([1, 2, 3], dtype))


def test_a_sum_of_booleans_counts_them(pool):
    there = pool.remote(None, 5, "?")
    there[...] = [True, True, False, True, False]
    assert there.sum() == 3 and there.sum().dtype == np.int64 and there.mean() == 0.6


def test_a_mean_of_complex_numbers_is_complex(pool):
    there = pool.remote(None, 2, "c16")
    there[...] = [1 + 2j, 3 + 4j]
    assert there.mean() == 2 + 3j


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_nan_is_the_least_and_the_greatest(pool, dtype):
    there = pool.remote(None, (3, 2), dtype)
    there[...] = [[1, 2], [np.nan, 3], [4, 5]]
    for part in (there, there[::-1, 0], there[1, 0, ...]):
        assert np.isnan(part.min()) and np.isnan(part.max())
    assert (there[:, 1].min(), there.max(where=there > 1), there.min(where=there < 5)) == (2, 5, 1)
    assert np.isnan(there.min(where=there != 1)) and np.isnan(there.max(where=there != np.nan))
    assert np.isnan(there[:, 0].max(where=there[:, 1] == 3))
    assert there.min(where=~np.isnan(there[...])) == 1


def test_nan_is_found_in_every_part_of_a_long_array(pool, monkeypatch):
    monkeypatch.setattr(rampool._table, "_SCAN_ELEMENTS", 10)
    there = pool.remote(None, (7, 5), "f8")
    for place in [(0, 0), (3, 3), (6, 4)]:
        there[...] = 1
        there[place] = np.nan
        assert np.isnan(there.min()) and np.isnan(there[::-1].max())


def test_a_large_integer_is_compared_as_numpy_does(pool):
    there = pool.remote(None, 3, "i8")
    there[...] = here = np.array([2**53, 2**53 + 1, 2**53 + 2])
    assert there.count(there == 2.0**53) == (here == 2.0**53).sum()
    assert there.count(there == 2**53) == 1


def test_a_number_that_does_not_fit_is_refused(pool):
    small, words = pool.remote(None, 3, "i1"), pool.remote(None, 3, "u8")
    for array, value in [(small, 300), (small, [1, 2, -129]), (words, -1)]:
        with pytest.raises(OverflowError):
            array[:] = value
        with pytest.raises(OverflowError):
            array.add_at(np.s_[:], value)
    for call in [lambda: words.fetch_add(0, -1), lambda: words.compare_exchange(0, -1, 1)]:
        with pytest.raises(OverflowError):
            call()
    for call in [lambda: words.fetch_add(0, 2.5), lambda: words.compare_exchange(0, 0, 2.5)]:
        with pytest.raises(TypeError):
            call()
    assert small[...].tolist() == words[...].tolist() == [0, 0, 0]
    small[...] = here = np.array([300, -129, 5])
    assert small[...].tolist() == here.astype("i1").tolist()


def test_tuples_are_records(pool):
    there, here = pool.remote(None, 2, RECORD), np.zeros(2, RECORD)
    for array in (there, here):
        array[:] = (1, 2.5)
        array[1] = (3, 4.5)
    np.testing.assert_array_equal(there[...], here)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("how", ["add", "minimum", "maximum"])
def test_updates_treat_nan_as_numpy_does(pool, dtype, how):
    there, here = pool.remote(None, 4, dtype), np.array([np.nan, 1, np.nan, 1], dtype)
    there[...] = here
    values = np.array([2, np.nan, np.nan, 0.5], dtype)
    getattr(there, f"{how}_at")(slice(None), values)
    getattr(np, how).at(here, np.arange(4), values)
    np.testing.assert_array_equal(there[...], here)
