"""What `rampool doctor --for` says to raise, given to the real programs."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from rampool._command import command

MIB = 1 << 20


def advice(program):
    words = [command(), "doctor", "--for", program, "--memory", "64G"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_duckdb_takes_it():
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    before = connection.execute("SELECT current_setting('memory_limit')").fetchone()
    connection.execute(re.search(r"SET .*;", advice("duckdb")).group())
    after = connection.execute("SELECT current_setting('memory_limit')").fetchone()
    assert before != after and after[0].startswith("54.3 GiB"), after


@pytest.mark.slow
def test_dask_takes_it():
    pytest.importorskip("distributed")
    from distributed.worker_memory import parse_memory_limit

    said = re.search(r'memory_limit="(\w+)"', advice("dask")).group(1)
    # It takes no more than the machine has, unless that is asked for: then it says so.
    assert parse_memory_limit(said, 1, 1, logger=__import__("logging").getLogger()) > 0


@pytest.mark.slow
def test_polars_knows_the_variables():
    pytest.importorskip("polars")
    lines = re.findall(r"^  (\w+)=(\S+)$", advice("polars"), re.M)
    assert [name for name, _ in lines] == ["POLARS_OVERRIDE_TOTAL_MEMORY_MB", "_RJEM_MALLOC_CONF"]
    program = (
        "import polars as pl; print(pl.DataFrame({'a': [2, "
        "1]}).lazy().sort('a').collect(engine='streaming')['a'].to_list())"
    )

    def run(**variables):
        environment = {**os.environ, "POLARS_VERBOSE": "1", **variables}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )

    plain, told = run(), run(**dict(lines))
    assert plain.stdout == told.stdout == "[1, 2]\n"
    assert "total memory: 57.6" in told.stderr and "total memory: 57.6" not in plain.stderr
    assert "jemalloc" not in told.stderr
    assert "nonsense_ms" in run(_RJEM_MALLOC_CONF="nonsense_ms:0").stderr, "it is read"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("java"), reason="java is not installed")
def test_java_takes_it():
    options = re.search(r"^  (-Xmx.*)$", advice("java"), re.M).group(1).split()
    words = ["java", *options, "-XX:+PrintFlagsFinal", "-version"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    heap = int(re.search(r"MaxHeapSize\s*=\s*(\d+)", said).group(1))
    assert heap == int(options[0][4:-1]) * MIB
