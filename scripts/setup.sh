#!/bin/bash
# Makes sure that this machine has what a goal needs:
# `scripts/setup.sh build|wheel|test|soak|test-python|test-files|test-rdma|test-block|bench|docs`.
#
# Missing packages are installed if that needs no question (Debian or Ubuntu, as root, without a prompt).
# Otherwise this script lists everything to install, and how, and ends with 1. If nothing is missing it prints
# nothing.
set -u
cd "$(dirname "$0")/.." || exit 1
goal=${1:-build}
need_rust=1.89

packages=() # Debian packages to install
hints=()    # what no package manager can do for us

have() { command -v "$1" >/dev/null 2>&1; }
want() { # COMMAND PACKAGE: the package is needed unless the command is there
    have "$1" || packages+=("$2")
}

# --- to build -----------------------------------------------------------------------------------------------------------------------
if ! have cargo; then
    if [ -x "$HOME/.cargo/bin/cargo" ]; then
        hints+=("cargo is in ~/.cargo/bin, which is not in PATH: . ~/.cargo/env")
    else
        hints+=("Rust $need_rust or later: https://rustup.rs  (Debian's own package is older)")
    fi
else
    rust=$(rustc --version | sed -n 's/^rustc \([0-9]*\.[0-9]*\).*/\1/p')
    oldest=$(printf '%s\n%s\n' "$need_rust" "$rust" | sort -V | head -n 1)
    [ "$oldest" = "$need_rust" ] || hints+=("Rust $need_rust or later, here is $rust: rustup update stable")
fi
want cc gcc
want python3 python3
[ "$(uname -s)" = Linux ] || hints+=("Linux: rampool is built on userfaultfd")

# --- to test ------------------------------------------------------------------------------------------------------------------------
if [ "$goal" != build ] && have python3; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || hints+=("Python 3.11 or later, here is $(python3 --version)")
fi
if [ "$goal" = docs ]; then
    ! have python3 || python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
elif [ "$goal" = wheel ]; then
    want strip binutils
    ! have python3 || python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
elif [ "$goal" != build ]; then
    # UCX is loaded at run time, so that nothing is built with it.
    ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0' || /sbin/ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0' || packages+=(libucx0)
fi
# PyTorch for CPUs: the package registry has it for GPUs only, in gigabytes. Elsewhere than on Debian its tests are left out.
if [ "$goal" = test-python ] && have apt-get && ! /usr/bin/python3 -c 'import torch' 2>/dev/null; then
    packages+=(python3-torch)
fi
if [ "$goal" = test ] || [ "$goal" = soak ]; then
    # Allocators that purge.
    PATH=$PATH:/usr/sbin:/sbin
    want ldconfig libc-bin
    ldconfig -p | grep -q 'libjemalloc\.so' || packages+=(libjemalloc2)
    if ! ldconfig -p | grep -q 'libmimalloc\.so'; then
        mimalloc=$(apt-cache search --names-only '^libmimalloc[0-9.]*$' 2>/dev/null | cut -d ' ' -f 1 | sort -V | tail -n 1)
        packages+=("${mimalloc:-libmimalloc2.0}")
    fi
fi
if [ "$goal" = soak ]; then
    # What is missing is left out, and said.
    PATH=$PATH:/usr/sbin:/sbin
    want zramctl util-linux
    want swapon mount
    want redis-server redis-server
elif [ "$goal" = test-rdma ]; then
    PATH=$PATH:/usr/sbin:/sbin
    for tool in qemu-system-x86_64:qemu-system-x86 ip:iproute2 rdma:iproute2 depmod:kmod xz:xz-utils strip:binutils ucx_perftest:ucx-utils; do
        want "${tool%%:*}" "${tool##*:}"
    done
    ls /usr/lib/*/libibverbs/librxe-rdmav*.so >/dev/null 2>&1 || packages+=(ibverbs-providers)
elif [ "$goal" = test-block ]; then
    PATH=$PATH:/usr/sbin:/sbin
    for tool in qemu-system-x86_64:qemu-system-x86 nbd-client:nbd-client go:golang-go musl-gcc:musl-tools mkfs.ext4:e2fsprogs depmod:kmod xz:xz-utils; do
        want "${tool%%:*}" "${tool##*:}"
    done
    ls /usr/lib/*/libc.a >/dev/null 2>&1 || packages+=(libc6-dev)
elif [ "$goal" != build ] && [ "$goal" != wheel ] && [ "$goal" != docs ]; then
    want m4 m4
    # Clients of block devices.
    for tool in nbdcopy:libnbd-bin qemu-img:qemu-utils nbdkit:nbdkit fio:fio fusermount3:fuse3; do want "${tool%%:*}" "${tool##*:}"; done
    want mpicc libopenmpi-dev
    [ "$goal" != test-files ] || want java default-jre-headless
    if have cargo; then
        for part in fmt:rustfmt clippy:clippy; do
            cargo "${part%%:*}" --version >/dev/null 2>&1 || rustup component add "${part##*:}" >/dev/null 2>&1 ||
                hints+=("the Rust component ${part##*:}: rustup component add ${part##*:}")
        done
    fi
    # The real programs have a set-up of their own, which needs this.
    ! have python3 || python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
fi

install_packages() {
    local sudo=
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || return 1
        sudo="sudo -n"
    fi
    have apt-get || return 1
    echo "setup: installing $*" >&2
    { $sudo apt-get -qq update && DEBIAN_FRONTEND=noninteractive $sudo apt-get -qq install -y --no-install-recommends "$@"; } >&2 </dev/null
}

if [ ${#packages[@]} -gt 0 ] && ! install_packages "${packages[@]}"; then
    hints+=("packages (here by their Debian names): apt-get install ${packages[*]}")
fi

if [ ${#hints[@]} -gt 0 ]; then
    echo "This machine lacks what \`make $goal\` needs:" >&2
    printf '  * %s\n' "${hints[@]}" >&2
    exit 1
fi
python_packages() { # MODULE:REQUIREMENT ...: into the checkout's own environment, unless they are there
    local wanted=()
    [ -x .venv/bin/python ] || python3 -m venv .venv || exit 1
    for each in "$@"; do
        .venv/bin/python -c "import ${each%%:*}" 2>/dev/null || wanted+=("${each#*:}")
    done
    [ ${#wanted[@]} -eq 0 ] || .venv/bin/pip install --quiet --disable-pip-version-check "${wanted[@]}"
}
case $goal in
soak) python_packages 'duckdb:duckdb' || exit 1 ;;
docs) python_packages 'material:mkdocs-material>=9.5,<10' || exit 1 ;;
wheel) python_packages 'numpy:numpy>=1.26,<3' 'maturin:maturin>=1.9,<2' ;;
test | test-files)
    python_packages 'numpy:numpy>=1.26,<3' 'pytest:pytest>=8,<10' 'duckdb:duckdb' 'polars:polars' || exit 1
    [ "$goal" = test ] || python_packages 'ray:ray' 'pyspark:pyspark' || exit 1 ;;
test-python)
    python_packages 'numpy:numpy>=1.26,<3' 'pytest:pytest>=8,<10' 'mypy:mypy>=1.11' 'pandas:pandas' 'pyarrow:pyarrow' 'ipykernel:ipykernel' \
        'dask:dask[array]' 'distributed:distributed' 'zict:zict>=3' 'duckdb:duckdb' 'fsspec:fsspec' 'joblib:joblib' 'polars:polars' 'uv:uv' 'xarray:xarray' 'zarr:zarr>=3' || exit 1
    # Not for every Python: without it its tests are left out.
    python_packages 'ray:ray' 2>/dev/null
    if /usr/bin/python3 -c 'import sys, torch; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && ! .venv-torch/bin/python -c 'import numpy, pytest, torch' 2>/dev/null; then
        # That build of PyTorch is for NumPy 1.
        /usr/bin/python3 -m venv --system-site-packages .venv-torch &&
            .venv-torch/bin/pip install --quiet --disable-pip-version-check 'numpy>=1.26,<2' 'pytest>=8,<10'
    fi
    ;;
esac
if [ "$goal" = test ] || [ "$goal" = bench ]; then
    exec tests/programs/setup.sh
fi
