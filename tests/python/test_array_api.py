"""The array API's own tests, of arrays at a server: none fails that NumPy passes.

They are not in the package registry: RAMPOOL_ARRAY_API_TESTS names a checkout of
github.com/data-apis/array-api-tests,
with its submodule. The namespace is a test's (`array_api.py`); its names, signatures and DLPack are not
claimed.
"""

import os
import pathlib
import subprocess
import sys

import pytest

PARTS = [
    "array_object", "operators_and_elementwise_functions", "statistical_functions", "searching_functions",
    "sorting_functions", "set_functions", "manipulation_functions", "indexing_functions", "utility_functions",
    "linalg", "fft",
]  # fmt: skip


@pytest.mark.slow
def test_none_fails_that_numpy_passes(server):
    place = os.environ.get("RAMPOOL_ARRAY_API_TESTS")
    if place is None:
        pytest.skip("RAMPOOL_ARRAY_API_TESTS names no checkout of data-apis/array-api-tests")
    for needed in ("hypothesis", "ndindex", "pytest_jsonreport"):
        pytest.importorskip(needed)

    def failures(module):
        here = str(pathlib.Path(__file__).parent)
        words = [
            "-q",
            "-rfE",
            "-p",
            "no:cacheprovider",
            "--max-examples",
            "20",
            "-W",
            "ignore",
            "--tb=no",
            "--derandomize",
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *(f"array_api_tests/test_{part}.py" for part in PARTS)],
            cwd=place,
            env={
                **os.environ,
                "SERVER": server,
                "ARRAY_API_TESTS_MODULE": module,
                "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}",
            },
            capture_output=True,
            text=True,
            timeout=1200,
        )
        said = ended.stdout.splitlines()
        assert " passed" in said[-1], ended.stdout[-3000:] + ended.stderr[-3000:]
        return {line.split()[1] for line in said if line.startswith(("FAILED ", "ERROR "))}

    assert failures("array_api") - failures("numpy") == set()
