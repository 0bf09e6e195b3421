"""Arrays at the servers have NumPy's values and types, or raise where NumPy's do."""

import numpy as np
import pytest


@pytest.mark.parametrize("dtype", [">i4", ">f8", ">c16", "S3", "U4"])
def test_one_element_is_written_as_it_is(pool, dtype):
    there = pool.remote(None, (2, 3), dtype)
    there[1, 2] = np.asarray(7, dtype)
    there[0] = np.asarray([1, 2, 3], dtype)
    there.at[1, 0][...] = np.asarray(5, dtype)
    assert there[1, 2] == np.asarray(7, dtype) and there[1, 0] == np.asarray(5, dtype)
    np.testing.assert_array_equal(there[0], np.asarray([1, 2, 3], dtype))
