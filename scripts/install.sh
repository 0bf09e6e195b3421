#!/bin/sh
# Installs what `make build` built: the binaries, the agent, the C library with its headers, manual pages and completions.
# PREFIX (default /usr/local), DESTDIR and TARGET come from the environment. With --remove it takes away what it would install.
set -eu
cd "$(dirname "$0")/.."
prefix=${PREFIX:-/usr/local}
dest=${DESTDIR:-}
built=${TARGET:-target}/release

if [ "${1:-}" = --remove ]; then
    cd "$dest$prefix"
    rm -f bin/rampool bin/rampool-bench bin/dlmm_server include/rampool.h include/rampool_mpi.h include/rampool_parmacs.h include/dlmm.h include/tsm.h lib/librampool.so lib/librampool.so.* lib/librampool.a \
        lib/pkgconfig/rampool.pc share/man/man1/rampool.1 share/man/man1/rampool-*.1 share/bash-completion/completions/rampool.bash \
        share/zsh/site-functions/_rampool share/fish/vendor_completions.d/rampool.fish
    rm -rf lib/rampool lib/cmake/rampool share/rampool
    exit 0
fi

[ -x "$built/rampool" ] || {
    echo "$built/rampool does not exist: run \`make build\` first, as a user with Rust" >&2
    exit 1
}
install -d "$dest$prefix/bin" "$dest$prefix/lib/rampool"
install -m 755 "$built/rampool" "$built/rampool-bench" "$dest$prefix/bin/"
ln -sf rampool "$dest$prefix/bin/dlmm_server"
install -m 755 "$built/librampool_agent.so" "$built/librampool_agent_io.so" "$dest$prefix/lib/rampool/"
crates/capi/pkg/install.sh "$built" "$prefix"
"$built/rampool" generate "$dest$prefix"
"$built/rampool-bench" manual "$dest$prefix"
[ -n "$dest" ] || [ "$(id -u)" != 0 ] || ldconfig
echo "installed into $dest$prefix: try \`$prefix/bin/rampool doctor\`"
