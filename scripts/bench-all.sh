#!/bin/bash
# Measures every figure of bench/figures.md again and makes its tables and plots: `scripts/bench-all.sh [--quick] [NAME...]`.
#
# NAMEs choose among: fault sequential stream-loopback stream-10g stream-1g fit programs server direct openmpi register fifo tenants examples shared shared-time predict. Takes about ten minutes on a quiet machine with two
# CPUs. A benchmark that fails does not keep the others from running; the script then ends with 1.
set -u
cd "$(dirname "$0")/.." || exit 1
quick=()
names=()
for argument in "$@"; do
    case $argument in
    --quick) quick=(--quick) ;;
    *) names+=("$argument") ;;
    esac
done
[ ${#names[@]} -gt 0 ] || names=(fault sequential stream-loopback stream-10g stream-1g fit programs server direct openmpi register fifo tenants examples shared shared-time predict)

rampool=${RAMPOOL_BIN:-${CARGO_TARGET_DIR:-target}/release/rampool}
[ -x "$rampool" ] || cargo build --workspace --release --quiet || exit 1
if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import numpy, matplotlib' 2>/dev/null; then
    python3 -m venv .venv && .venv/bin/pip install --quiet --disable-pip-version-check 'numpy>=1.26,<3' 'matplotlib>=3.8,<4' ||
        echo "bench: cannot install NumPy and matplotlib; benchmarks and plots that need them are left out" >&2
fi

data=bench/data
[ ${#quick[@]} -eq 0 ] || data=$(mktemp -d)
mkdir -p "$data"
failed=()
for name in "${names[@]}"; do
    case $name in
    stream-loopback) arguments=(stream) ;;
    stream-10g) arguments=(stream --link 10g) ;;
    stream-1g) arguments=(stream --link 1g) ;;
    shared-time) arguments=(shared --only time) ;;
    *) arguments=("$name") ;;
    esac
    # A limit above every deadline inside, so that nothing hangs.
    timeout 1800 "$rampool" bench "${arguments[@]}" "${quick[@]}" --json "$data/$name.json.new" &&
        mv "$data/$name.json.new" "$data/$name.json" || failed+=("$name")
    rm -f "$data/$name.json.new"
    echo
done

if [ ${#quick[@]} -eq 0 ]; then
    python=.venv/bin/python
    [ -x "$python" ] || python=python3
    "$python" scripts/plot.py || failed+=(plots)
else
    rm -rf "$data"
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "bench: these failed: ${failed[*]}" >&2
    exit 1
fi
