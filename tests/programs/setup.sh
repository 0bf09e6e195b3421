#!/bin/sh
# What the suites over real programs need: a C and C++ compiler, Redis, and Python with NumPy in a virtual environment of the checkout's own.
# Installs what is missing where it may; says what to do where it may not.
set -eu
cd "$(dirname "$0")/../.."

missing=""
for tool in gcc:gcc g++:g++ redis-server:redis-server sort:coreutils gdb:gdb; do
    command -v "${tool%%:*}" >/dev/null 2>&1 || missing="$missing ${tool##*:}"
done
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        # Waits for a lock that another process holds, but not for ever.
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 update -qq
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y -qq --no-install-recommends $missing
    else
        echo "these packages are needed:$missing (as root: apt-get install -y$missing)" >&2
        exit 1
    fi
fi
# Installing the package may start a server of the system's own; the tests start theirs.
if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import numpy' 2>/dev/null; then
    python3 -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check 'numpy>=1.26,<3'
fi
# A test of its own decodes its datatypes; where it cannot be had, that test is skipped.
.venv/bin/python -c 'import mpi4py' 2>/dev/null || .venv/bin/pip install --quiet --disable-pip-version-check 'mpi4py>=4,<5' || true
