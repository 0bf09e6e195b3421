"""The programs in examples/python end well, with the real libraries."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent.parent / "examples/python"
NEEDS = {
    "dask_cluster.py": ["distributed", "dask.array"],
    "duckdb_spill.py": ["duckdb", "fsspec"],
    "pandas_frames.py": ["pandas", "pyarrow", "fsspec"],
    "pytorch_offload.py": ["torch"],
    "ray_results.py": ["ray"],
}


def test_each_is_run():
    assert set(NEEDS) == {path.name for path in EXAMPLES.glob("*.py")}
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == {"attach.ipynb", "tutorial.ipynb"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_it_ends_well(tmp_path, name):
    for needed in NEEDS[name]:
        pytest.importorskip(needed)
    from conftest import Server

    server = Server(tmp_path, "2G")
    try:
        ended = subprocess.run(
            [sys.executable, EXAMPLES / name],
            env={**os.environ, "RAMPOOL_SERVERS": server.address},
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        server.stop()
    assert ended.returncode == 0 and ended.stdout, ended.stderr + ended.stdout


@pytest.mark.slow
def test_the_notebook_that_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    manager = pytest.importorskip("jupyter_client.manager")
    from conftest import Server

    server = Server(tmp_path, "2G")
    monkeypatch.setenv("RAMPOOL_SERVERS", server.address)
    try:
        kernels, kernel = manager.start_new_kernel(kernel_name="python3")
        try:
            for cell in json.loads((EXAMPLES / "attach.ipynb").read_text())["cells"]:
                if cell["cell_type"] == "code":
                    said = []
                    reply = kernel.execute_interactive(
                        "".join(cell["source"]), timeout=120, output_hook=said.append
                    )
                    assert reply["content"]["status"] == "ok", reply["content"]
            assert "of at most 64M" in str(said)
        finally:
            kernels.shutdown_kernel(now=True)
    finally:
        server.stop()
