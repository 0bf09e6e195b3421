#!/bin/bash
# Builds the wheel, into target/wheels: the extension module, the Python package, the command and the agents that it loads into programs.
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR=$target
data=crates/python/rampool.data

cargo build --workspace --release --quiet
rm -rf "$data"
mkdir -p "$data/scripts" "$data/data/lib/rampool"
strip -o "$data/scripts/rampool" "$target/release/rampool"
for library in librampool_agent.so librampool_agent_io.so; do
    strip --strip-unneeded -o "$data/data/lib/rampool/$library" "$target/release/$library"
done
chmod 755 "$data/scripts/rampool" "$data"/data/lib/rampool/*

# maturin looks at the extension alone. The wheel's tag is the newest C library that any of its files asks for.
newest=$(for file in "$data/scripts/rampool" "$data"/data/lib/rampool/*.so; do objdump -T "$file"; done |
    sed -n 's/.*GLIBC_2\.\([0-9]*\).*/\1/p' | sort -n | tail -n 1)
# What is asked for below 2.17 runs everywhere that Python 3.11 does.
[ "$newest" -ge 17 ] || newest=17
rm -f "$target"/wheels/rampool-*.whl
.venv/bin/maturin build --quiet --release --manifest-path crates/python/Cargo.toml --out "$target/wheels" \
    --compatibility "manylinux_2_$newest" ${WHEEL_PYTHON:+--interpreter "$WHEEL_PYTHON"}
ls -l "$target"/wheels/rampool-*.whl | awk '{printf "%s: %.1f MB\n", $NF, $5 / 1e6}'
