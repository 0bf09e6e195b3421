"""The wheel in fresh environments, as users install it."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

WHEEL = os.environ.get("RAMPOOL_WHEEL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEEL, reason="RAMPOOL_WHEEL is not set: `make test-python` sets it"),
]
MOST_BYTES = 12_000_000
USE = """
import subprocess, sys, rampool
assert "numpy" not in sys.modules, "importing rampool imports NumPy"
words = [rampool._command.command(), "serve", "--listen", "unix:{place}/s", "--memory", "64M"]
words += ["--until-stdin-closes"]
server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
server.stdout.readline()
with rampool.connect("unix:{place}/s", memory="32M", local="1M") as pool:
    a = pool.zeros(1_000_000)
    a += 1
    print(a.sum())
    del a
server.kill()
"""


def pythons():
    found = [sys.executable]
    names = sorted(pathlib.Path.home().glob(".pyenv/versions/3.1[2-9].*/bin/python3"))
    names += [
        pathlib.Path(path)
        for name in ("python3.14", "python3.13", "python3.12")
        if (path := shutil.which(name))
    ]
    for name in reversed(names):
        works = (
            subprocess.run(
                [name, "-c", "import sys; assert sys.version_info >= (3, 12)"], capture_output=True
            ).returncode
            == 0
        )
        if works:
            return [*found, str(name)]
    return found


@pytest.mark.parametrize("python", pythons())
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_it_installs_and_works(python, installer, tmp_path):
    place = tmp_path / "venv"
    if installer == "uv":
        uv = shutil.which("uv") or str(pathlib.Path(sys.executable).parent / "uv")
        if not os.access(uv, os.X_OK):
            pytest.skip("uv is not installed")
        subprocess.run([uv, "venv", "--quiet", "--python", python, place], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", place / "bin/python", WHEEL], check=True)
    else:
        subprocess.run([python, "-m", "venv", place], check=True)
        subprocess.run(
            [place / "bin/pip", "install", "--quiet", "--disable-pip-version-check", WHEEL], check=True
        )
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAMPOOL", "PYTHON", "VIRTUAL"))
    }
    run = lambda *words: (
        subprocess.run(
            words, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path
        ).stdout
    )
    assert run(place / "bin/rampool", "--version").startswith("rampool ")
    said = run(
        place / "bin/rampool",
        "run",
        "--local",
        "64M",
        "--memory",
        "64M",
        "--",
        place / "bin/python",
        "-c",
        "print(sum(range(10)))",
    )
    assert said == "45\n"
    program = "import rampool._command\n" + USE.replace("{place}", str(tmp_path))
    assert run(place / "bin/python", "-c", program) == "1000000.0\n"
    assert (
        run(place / "bin/python", "-m", "rampool", "--local", "64M", "--memory", "64M", "-c", "print(7)")
        == "7\n"
    )


def test_what_is_inside():
    assert os.path.getsize(WHEEL) < MOST_BYTES
    names = zipfile.ZipFile(WHEEL).namelist()
    for wanted in ["rampool/py.typed", "rampool/_native.pyi", "rampool/_native.abi3.so"]:
        assert wanted in names
    for end in ["scripts/rampool", "lib/rampool/librampool_agent.so", "lib/rampool/librampool_agent_io.so"]:
        assert any(name.endswith(end) for name in names), end
