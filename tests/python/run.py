#!/usr/bin/env python3
"""The Python package's tests, against the wheel in a fresh environment; with --brief against what `make
build` built, in under a minute.

tests/python/run.py            all of it: `make wheel` first
tests/python/run.py --build    builds all that is released, with the extension module
tests/python/run.py --brief    what `make test` runs
tests/python/run.py -- -k X    further words go to pytest
"""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute()
VENV = ROOT / ".venv/bin"
# Where scripts/setup.sh has found Debian's PyTorch: that of the registry is for GPUs, and has gigabytes.
TORCH = ROOT / ".venv-torch/bin"
PACKAGE = ROOT / "crates/python/python/rampool"
HERE = pathlib.Path(__file__).parent


def run(*words, **environment):
    print(
        "+",
        *(pathlib.Path(str(word)).name if str(word).startswith("/") else word for word in words),
        flush=True,
    )
    subprocess.run([str(word) for word in words], check=True, cwd=HERE, env={**os.environ, **environment})


def build():
    """The workspace, without what tests alone use, and with the extension module."""
    left_out = [word for crate in ("sim", "fuzz", "testing") for word in ("--exclude", f"rampool-{crate}")]
    subprocess.run(
        [
            "cargo", "build", "--workspace", *left_out, "--release", "--quiet", "--features",
            "rampool-python/extension",
        ],
        check=True,
        cwd=ROOT,
        # An extension is not linked to one interpreter's library.
        env={**os.environ, "PYO3_PYTHON": str(VENV / "python"), "PYO3_BUILD_EXTENSION_MODULE": "1"},
    )


def brief(words):
    """From the workspace's own build, with nothing installed."""
    build()
    place = TARGET / "python"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(PACKAGE, place / "rampool", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(TARGET / "release/librampool_python.so", place / "rampool/_native.abi3.so")
    environment = {"PYTHONPATH": str(place), "RAMPOOL_COMMAND": str(TARGET / "release/rampool")}
    test(VENV, "-m", "not slow", HERE, *words, **environment)


def test(environment, *words, **variables):
    run(environment / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, **variables)


def whole(words):
    """The wheel, as users get it."""
    wheels = list((TARGET / "wheels").glob("rampool-*.whl"))
    assert len(wheels) == 1, f"one wheel is expected in {TARGET / 'wheels'}: run `make wheel`"
    run(
        VENV / "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--force-reinstall",
        wheels[0],
    )
    test(VENV, HERE, *words, RAMPOOL_WHEEL=str(wheels[0]))
    if not words:
        if TORCH.is_dir():
            install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
            run(TORCH / "pip", *install, wheels[0])
            test(TORCH, HERE / "test_torch.py", HERE / "test_doctests.py", HERE / "test_examples.py")
        run(VENV / "python", "-m", "mypy", "--strict", "-p", "rampool")
        run(
            VENV / "python",
            "-m",
            "mypy.stubtest",
            "rampool._native",
            "--ignore-disjoint-bases",
            "--allowlist",
            HERE / "stubtest.txt",
        )


def main():
    words = sys.argv[1:]
    if words == ["--build"]:
        return build()
    is_brief = words[:1] == ["--brief"]
    rest = words[1:] if is_brief else words
    (brief if is_brief else whole)(rest[1:] if rest[:1] == ["--"] else rest)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"tests/python: `{' '.join(map(str, error.cmd[:4]))} ...` ended with {error.returncode}")
