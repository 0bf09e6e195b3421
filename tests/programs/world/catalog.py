"""The world's programs that `make test-programs` runs: what each needs and does, and how long it may take.

Each runs some seconds natively, and holds 100 to 400 MiB in one process. It prints its answer, which is the
same in every run.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON = ROOT / ".venv/bin/python"


class Place:
    """Where programs are compiled and their input lies."""

    def __init__(self, home):
        self.home = home

    def compiled(self, source, *compiler, name=None):
        binary = self.home / (name or Path(source).stem)
        subprocess.run(
            [*compiler, "-o", binary, HERE / source], check=True, timeout=300, stdin=subprocess.DEVNULL
        )
        return binary

    def classes(self, source):
        subprocess.run(
            ["javac", "-d", self.home, HERE / source], check=True, timeout=300, stdin=subprocess.DEVNULL
        )
        return self.home

    def lines(self, mib):
        path = self.home / f"lines-{mib}"
        with open(path, "wb") as out:
            subprocess.run(
                [sys.executable, HERE.parent / "lines.py", str(mib << 20), "1"],
                stdout=out,
                check=True,
                timeout=300,
            )
        return path


@dataclass
class Program:
    name: str
    argv: Callable[[Place], list]
    # How many times its native time it may take at half and at a quarter of its peak: the most that was
    # measured on a machine with much other work, and half as much again. Far beyond it is ended, and fails.
    bound: tuple
    # Packages of Debian's and Python's registries, each as `WHAT IS LOOKED FOR:PACKAGE`: a command, a file,
    # a module.
    debian: tuple = ()
    python: tuple = ()
    # What is aimed for. A figure without one has a bound only.
    reach: tuple = (None, None)
    env: dict = field(default_factory=dict)
    # What starts the whole run, natively and else.
    before: tuple = ()
    # Why none of its memory leaves, where that is so.
    stays: str | None = None


def found(what):
    """Whether a command, or a file (`/` in its pattern), is on this machine."""
    if "/" in what:
        return any(Path("/").glob(what.lstrip("/")))
    return shutil.which(what, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def has_module(name):
    return (
        PYTHON.exists()
        and subprocess.run([PYTHON, "-c", f"import {name}"], capture_output=True, timeout=300).returncode == 0
    )


def missing(program):
    """The Debian packages and the Python packages that this program lacks here."""
    debian = [
        package for what, package in (each.rsplit(":", 1) for each in program.debian) if not found(what)
    ]
    python = [
        package
        for module, package in (each.split(":", 1) for each in program.python)
        if not has_module(module)
    ]
    return debian, python


def work(name, size, python=PYTHON):
    return lambda place: [python, HERE / "work.py", name, size]


def shell(text):
    return ["sh", "-c", text]


COLUMNS, OBJECTS, OTHER = (2, 3), (8, None), (2, None)
LIBRARIES = "/usr/lib/*/"


def library(name):
    return str(next(Path("/").glob(f"usr/lib/*/lib{name}"), ""))


ALLOCATORS = {
    "glibc": None,
    "jemalloc": ("jemalloc.so.2", "libjemalloc2"),
    "mimalloc": ("mimalloc.so.2", "libmimalloc2.0"),
    "tcmalloc": ("tcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
}


def maps(language, argv, needs):
    for allocator, what in ALLOCATORS.items():
        yield Program(
            f"hash map in {language}, {allocator}",
            argv,
            debian=(*needs, *([f"{LIBRARIES}lib{what[0]}:{what[1]}"] if what else [])),
            env={"LD_PRELOAD": library(what[0])} if what else {},
            bound=(60, 90),
        )


def java(collector, reach, *more, **how):
    return Program(
        f"OpenJDK, {collector}",
        lambda place: [
            "java",
            f"-XX:+Use{collector}GC",
            "-Xmx256m",
            *more,
            "-cp",
            place.classes("Maps.java"),
            "Maps",
            1_200_000,
            400_000,
        ],
        debian=("javac:default-jdk-headless",),
        reach=reach,
        **how,
    )


PROGRAMS = [
    Program("DuckDB", bound=(6, 10), argv=work("duckdb", 900_000), python=("duckdb:duckdb",), reach=COLUMNS),
    Program(
        "Polars", bound=(6, 30), argv=work("polars", 2_000_000), python=("polars:polars",), reach=COLUMNS
    ),
    Program(
        "pandas", bound=(6, 10), argv=work("pandas", 1_500_000), python=("pandas:pandas",), reach=COLUMNS
    ),
    Program(
        "scikit-learn, k-means",
        bound=(4, 6),
        argv=work("kmeans", 800_000),
        python=("sklearn:scikit-learn",),
        reach=COLUMNS,
    ),
    Program("SciPy, sparse LU", bound=(4, 6), argv=work("splu", 260), python=("scipy:scipy",)),
    Program(
        "PyTorch, embeddings",
        bound=(6, 10),
        argv=work("torch", 700_000, "/usr/bin/python3"),
        debian=("/usr/lib/python3/dist-packages/torch:python3-torch",),
    ),
    java("Serial", (3, None), bound=(20, 40)),
    java("Parallel", (None, None), bound=(20, 45)),
    java("G1", (3, None), bound=(20, 30)),
    java("Z", (3, None), bound=(15, 35), stays="its heap is shared memory"),
    java("Shenandoah", (None, None), bound=(40, 100)),
    Program(
        "Node",
        bound=(6, 35),
        argv=lambda place: ["node", HERE / "objects.js", 500_000],
        debian=("node:nodejs",),
        reach=COLUMNS,
    ),
    Program("SQLite in memory", bound=(6, 25), argv=work("sqlite", 500_000), reach=COLUMNS),
    Program(
        "Redis with BGSAVE", bound=(6, 10), argv=work("redis", 200_000), debian=("redis-server:redis-server",)
    ),
    Program(
        "memcached",
        bound=(20, 30),
        argv=work("memcached", 250_000),
        debian=("memcached:memcached",),
        reach=OBJECTS,
    ),
    Program(
        "PostgreSQL",
        bound=(6, 25),
        argv=work("postgresql", 700_000, "/usr/bin/python3"),
        debian=("/usr/lib/postgresql/*/bin/initdb:postgresql",),
        # It refuses to be root. The kernel lets this user have what root has of userfaultfd.
        before=(
            "setpriv",
            "--reuid=postgres",
            "--regid=postgres",
            "--clear-groups",
            "--inh-caps=+sys_ptrace",
            "--ambient-caps=+sys_ptrace",
        ),
        reach=OTHER,
    ),
    Program(
        "LuaJIT",
        bound=(45, 70),
        argv=lambda place: ["luajit", HERE / "objects.lua", 1_500_000, 500_000],
        debian=("luajit:luajit",),
        reach=OBJECTS,
    ),
    Program(
        "Perl",
        bound=(30, 50),
        argv=lambda place: ["perl", HERE / "hash.pl", 700_000, 200_000],
        debian=("perl:perl",),
        reach=OBJECTS,
        env={"PERL_HASH_SEED": "1"},
    ),
    Program(
        "R",
        bound=(6, 6),
        argv=lambda place: ["Rscript", "--vanilla", HERE / "frames.R", 900_000],
        debian=("Rscript:r-base-core",),
    ),
    *maps(
        "Rust",
        lambda place: [
            place.compiled("maps.rs", "rustc", "-O", "--edition=2021", name="maps-rust"),
            900_000,
            100_000,
        ],
        (),
    ),
    *maps(
        "C++",
        lambda place: [place.compiled("maps.cpp", "g++", "-O2", name="maps-cpp"), 1_000_000, 150_000],
        ("g++:g++",),
    ),
    Program(
        "graph search, OpenMP",
        bound=(20, 40),
        argv=lambda place: [place.compiled("graph.cpp", "g++", "-O2", "-fopenmp"), 3_000_000, 8],
        debian=("g++:g++",),
        reach=OBJECTS,
    ),
    Program(
        "OpenMPI, two ranks",
        bound=(4, 6),
        argv=lambda place: [
            "mpirun",
            "--allow-run-as-root",
            "--oversubscribe",
            "-np",
            2,
            place.compiled("exchange.c", "mpicc", "-O2"),
            8_000_000,
        ],
        debian=("mpicc:libopenmpi-dev", "mpirun:openmpi-bin"),
        env={"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},
    ),
    Program(
        "xz",
        bound=(4, 20),
        argv=lambda place: shell(f"xz -T1 --lzma2=preset=1,dict=64MiB -c {place.lines(8)} | sha256sum"),
        debian=("xz:xz-utils",),
    ),
    Program(
        "zstd, long window",
        bound=(4, 12),
        argv=lambda place: shell(f"zstd -q -9 --long=27 -T2 -c {place.lines(64)} | sha256sum"),
        debian=("zstd:zstd",),
        reach=OBJECTS,
    ),
    Program(
        "ffmpeg, x264",
        bound=(6, 10),
        argv=lambda place: shell(
            "ffmpeg -v error -nostdin -f lavfi -i testsrc2=size=1920x1080:rate=30 -frames:v 50 -threads 2 "
            "-c:v libx264 -preset veryfast -f h264 - | sha256sum"
        ),
        debian=("ffmpeg:ffmpeg",),
        reach=OTHER,
    ),
    Program(
        "g++",
        bound=(4, 4),
        argv=lambda place: shell(
            "g++ -std=c++17 -O2 -S -DPLACE=whole -DREGEX -DPART=0 -DCOUNT=2 -o - "
            f"{HERE}/templates.cpp | sha256sum"
        ),
        debian=("g++:g++",),
        reach=OTHER,
    ),
    Program(
        "make -j2",
        bound=(4, 4),
        argv=lambda place: ["make", "-sB", "-j2", "-f", HERE / "Makefile", f"OUT={place.home}"],
        debian=("make:make", "g++:g++"),
    ),
    Program("fork pool", bound=(6, 8), argv=work("fork_pool", 150), reach=OBJECTS),
    Program(
        "multiprocessing, spawn", bound=(6, 6), argv=work("spawn_pool", 6), python=("numpy:numpy>=1.26,<3",)
    ),
    Program("loky", bound=(4, 6), argv=work("loky", 6), python=("joblib:joblib", "numpy:numpy>=1.26,<3")),
    Program(
        "Jupyter kernel",
        bound=(6, 6),
        argv=work("jupyter", 64),
        python=("ipykernel:ipykernel", "jupyter_client:jupyter_client", "numpy:numpy>=1.26,<3"),
        reach=OTHER,
    ),
    Program(
        "Chromium, headless",
        bound=(8, 35),
        argv=lambda place: [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-quic",
            f"--user-data-dir={place.home}/chromium",
            "--dump-dom",
            f"file://{HERE}/page.html",
        ],
        debian=("chromium:chromium",),
        reach=OTHER,
    ),
    Program(
        "bubblewrap",
        bound=(6, 25),
        argv=lambda place: [
            "bwrap",
            "--unshare-pid",
            "--unshare-ipc",
            "--ro-bind",
            "/",
            "/",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--bind",
            "/dev/shm",
            "/dev/shm",
            "--tmpfs",
            "/tmp",
            "--cap-add",
            "CAP_SYS_PTRACE",
            PYTHON,
            HERE / "work.py",
            "sqlite",
            500_000,
        ],
        debian=("bwrap:bubblewrap",),
    ),
]


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def named(parts):
    """The programs whose name contains one of these, or all."""
    wanted = [re.sub(r"\W+", " ", part).lower() for part in parts]
    return [
        each
        for each in PROGRAMS
        if not wanted or any(part in re.sub(r"\W+", " ", each.name).lower() for part in wanted)
    ]
