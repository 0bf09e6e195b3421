#!/bin/bash
# Measures the figures of bench/figures.md again and makes its tables and plots, and the README's:
# `scripts/bench-all.sh [--quick] [--old] [--list] [PART...]`.
#
# Without PARTs all are measured, on a machine that does nothing else meanwhile; how long that takes is said first. --old measures those
# alone that are missing or older than the defaults that they measure, --list names all parts and their seconds. Root is needed for
# kernel swap and links. A part that fails does not keep the others from running; the script then ends with 1.
# RAMPOOL_BIN names another rampool to measure, whose figures are shown and not kept.
set -u
cd "$(dirname "$0")/.." || exit 1
quick=()
old=
names=()
declare -A takes
while read -r name seconds; do takes[$name]=$seconds; done < <(python3 scripts/defaults.py parts)
for argument in "$@"; do
    case $argument in
    --quick) quick=(--quick) ;;
    --old) old=yes ;;
    --list) exec python3 scripts/defaults.py parts ;;
    *)
        [ -n "${takes[$argument]:-}" ] || { echo "bench: there is no part $argument; scripts/bench-all.sh --list names all" >&2; exit 1; }
        names+=("$argument")
        ;;
    esac
done
if [ -n "$old" ]; then
    mapfile -t names < <(python3 scripts/defaults.py old)
    [ ${#names[@]} -gt 0 ] || { echo "bench: no figure is older than the defaults"; exit 0; }
elif [ ${#names[@]} -eq 0 ]; then
    mapfile -t names < <(python3 scripts/defaults.py parts | cut -d' ' -f1)
fi
sum=0
for name in "${names[@]}"; do sum=$((sum + takes[$name])); done
[ ${#quick[@]} -gt 0 ] || echo "bench: ${names[*]}: about $(((sum + 59) / 60)) minutes"

built=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release
cargo build --workspace --release --quiet || exit 1
RAMPOOL_BIN=$(realpath "${RAMPOOL_BIN:-$built/rampool}") || exit 1
export RAMPOOL_BIN
kept=yes
[ ${#quick[@]} -eq 0 ] || kept=
# The defaults that are recorded are those of this source.
[ "$RAMPOOL_BIN" = "$built/rampool" ] || { kept=; echo "bench: $RAMPOOL_BIN is not built from this source here: bench/data stays as it is"; }
bench=$(dirname "$RAMPOOL_BIN")/rampool-bench
[ -x "$bench" ] || bench=$built/rampool-bench
if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import numpy, matplotlib' 2>/dev/null; then
    python3 -m venv .venv && .venv/bin/pip install --quiet --disable-pip-version-check 'numpy>=1.26,<3' 'matplotlib>=3.8,<4' ||
        echo "bench: cannot install NumPy and matplotlib; benchmarks and plots that need them are left out" >&2
fi

measure() { # PART, then options
    case $1 in
    stream-loopback) "$bench" bench stream "${@:2}" ;;
    stream-10g | stream-1g) "$bench" bench stream --link "${1#stream-}" "${@:2}" ;;
    shared-time) "$bench" bench shared --only time "${@:2}" ;;
    fit | programs | miss | redundancy) python3 bench/paged.py "$@" ;;
    world) python3 bench/world.py "${@:2}" ;;
    block) python3 bench/block.py "${@:2}" ;;
    files) wheel && .venv/bin/python bench/files.py "${@:2}" ;;
    python) wheel && .venv/bin/python bench/python.py "${@:2}" ;;
    *) "$bench" bench "$@" ;;
    esac
}

wheel() { # the wheel of this source, in .venv and in .venv-torch if there is one
    scripts/setup.sh wheel && scripts/setup.sh test-python && scripts/wheel.sh || return 1
    for python in .venv/bin/python .venv-torch/bin/python; do
        ! [ -x $python ] || $python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "${built%/release}"/wheels/rampool-*.whl || return 1
    done
}

data=bench/data
[ -n "$kept" ] || data=$(mktemp -d)
mkdir -p "$data"
failed=()
running=
# A part has a process group of its own: nothing that ends this script leaves it behind.
end() {
    [ -z "$running" ] || kill "$running" 2>/dev/null
    rm -f "$data"/*.json.new
    [ -n "$kept" ] || rm -rf "$data"
}
trap end EXIT
trap 'exit 130' INT TERM HUP
export -f measure wheel
export bench built
for name in "${names[@]}"; do
    started=$SECONDS
    # A limit above every deadline inside, so that nothing hangs.
    timeout 5400 bash -c 'measure "$@"' measure "$name" "${quick[@]}" --json "$data/$name.json.new" &
    running=$!
    wait "$running" &&
        python3 scripts/defaults.py stamp "$name" "$data/$name.json.new" $((SECONDS - started)) &&
        mv "$data/$name.json.new" "$data/$name.json" || failed+=("$name")
    running=
    rm -f "$data/$name.json.new"
    echo
done

if [ -n "$kept" ]; then
    python=.venv/bin/python
    [ -x "$python" ] || python=python3
    "$python" scripts/plot.py || failed+=(plots)
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "bench: these failed: ${failed[*]}" >&2
    exit 1
fi
