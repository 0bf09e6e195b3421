#!/bin/bash
# Makes Debian packages of what `make build` built, in target/deb:
#
#   rampool          the command, the agent for programs, manual pages, completions
#   rampool-server   the memory server as a service: its unit, its user, its settings
#   librampool0      the C library
#   librampool-dev   what compiling with it needs
#
# The same source and binaries give the same bytes. FAST=1 packs less tightly.
set -eu
cd "$(dirname "$0")/.."
built=${TARGET:-target}/release
out=${OUT:-${TARGET:-target}/deb}
arch=$(dpkg --print-architecture)
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
level=${FAST:+1}
level=${level:-6}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022

TARGET=${TARGET:-target} DESTDIR=$work/all PREFIX=/usr scripts/install.sh >/dev/null
all=$work/all/usr

take() { # PACKAGE PATH...: moves what was installed below /usr into the package
    local package=$1 path
    shift
    for path in "$@"; do
        mkdir -p "$work/$package/usr/$(dirname "$path")"
        mv "$all/$path" "$work/$package/usr/$path"
    done
}
below() { (cd "$all" && printf '%s\n' $1); }

# shellcheck disable=SC2046
take librampool0 $(below 'lib/librampool.so.*')
# shellcheck disable=SC2046
take librampool-dev include lib/librampool.so lib/librampool.a lib/pkgconfig lib/cmake
cp -r "$all" "$work/rampool.usr" && mkdir -p "$work/rampool" && mv "$work/rampool.usr" "$work/rampool/usr"
strip --strip-unneeded "$work"/rampool/usr/bin/rampool "$work"/rampool/usr/bin/rampool-bench \
    "$work"/rampool/usr/lib/rampool/*.so "$work"/librampool0/usr/lib/librampool.so.*.*
strip --strip-debug "$work"/librampool-dev/usr/lib/librampool.a

# --- the service --------------------------------------------------------------------------------------------------------------------
server=$work/rampool-server
mkdir -p "$server/usr/lib/systemd/system" "$server/usr/lib/sysusers.d" "$server/etc/rampool" "$server/usr/share/doc/rampool-server"
sed 's|/usr/local/bin|/usr/bin|' contrib/rampool.service >"$server/usr/lib/systemd/system/rampool.service"
echo 'u rampool - "rampool memory server" /nonexistent' >"$server/usr/lib/sysusers.d/rampool.conf"
install -m 644 contrib/serve.toml "$server/etc/rampool/serve.toml"
cp -r contrib/prometheus contrib/grafana "$server/usr/share/doc/rampool-server/"
# --- faults in all of memory, without root: for the members of a group --------------------------------------------------------------
mkdir -p "$work/rampool/usr/lib/udev/rules.d" "$work/rampool/usr/lib/sysusers.d"
echo 'KERNEL=="userfaultfd", GROUP="rampool-users", MODE="0660"' >"$work/rampool/usr/lib/udev/rules.d/60-rampool.rules"
echo 'g rampool-users -' >"$work/rampool/usr/lib/sysusers.d/rampool-users.conf"

users='if command -v systemd-sysusers >/dev/null; then systemd-sysusers %s.conf; fi'
script() { # PACKAGE NAME: from standard input
    { echo '#!/bin/sh' && echo 'set -e' && cat; } >"$work/$1/DEBIAN/$2"
    chmod 755 "$work/$1/DEBIAN/$2"
}
control() { # PACKAGE SECTION DEPENDS SUMMARY; the description from standard input
    local package=$1
    mkdir -p "$work/$package/DEBIAN" "$work/$package/usr/share/doc/$package"
    cat LICENSE-MIT >"$work/$package/usr/share/doc/$package/copyright"
    {
        printf 'Package: %s\nVersion: %s\nArchitecture: %s\nSection: %s\nPriority: optional\n' "$package" "$version" "$arch" "$2"
        printf 'Maintainer: rampool developers <rampool@localhost>\nDepends: %s\n' "$3"
        printf 'Installed-Size: %s\nDescription: %s\n' "$(du -sk --exclude=DEBIAN "$work/$package" | cut -f 1)" "$4"
        sed 's/^/ /'
    } >"$work/$package/DEBIAN/control"
    (cd "$work/$package" && find . -type f ! -path './DEBIAN/*' -printf '%P\n' | LC_ALL=C sort | xargs md5sum >DEBIAN/md5sums)
}

control librampool0 libs 'libc6 (>= 2.34), libgcc-s1' 'the RAM of many machines as one pool: C library' <<END
Puts, gets, arrays, queues and paged memory on memory servers, for C.
END
control librampool-dev libdevel "librampool0 (= $version)" 'the RAM of many machines as one pool: headers' <<END
Headers, the static library, and files for pkg-config and CMake.
END
control rampool utils 'libc6 (>= 2.34), libgcc-s1' 'the RAM of many machines as one pool, for any program' <<END
Runs unchanged programs with more memory than their machine has: pages that
do not fit go to memory servers. Watches runs and servers, and starts
programs with shared memory. Members of the group rampool-users may have
all kinds of page faults caught.
END
# shellcheck disable=SC2059
{ printf "$users\n" rampool-users; echo 'if command -v udevadm >/dev/null; then udevadm trigger --sysname-match=userfaultfd || true; fi'; } |
    script rampool postinst
control rampool-server utils "rampool (= $version)" 'the RAM of many machines as one pool: memory server' <<END
Lends this machine's memory as a service. Say how much in
/etc/rampool/serve.toml, make a key (rampool key /etc/rampool/pool.key),
then: systemctl enable --now rampool
END
echo /etc/rampool/serve.toml >"$server/DEBIAN/conffiles"
# It is not started: nobody has said yet how much it may lend.
# shellcheck disable=SC2059
{ printf "$users\n" rampool; echo 'if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi'; } | script rampool-server postinst
script rampool-server prerm <<'END'
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then systemctl disable --now rampool.service || true; fi
END
script rampool-server postrm <<'END'
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
# The key goes with the settings: other machines of the pool have it.
if [ "$1" = purge ]; then rm -rf /etc/rampool; fi
END

mkdir -p "$out"
for package in librampool0 librampool-dev rampool rampool-server; do
    find "$work/$package" -depth -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zxz "-z$level" --build "$work/$package" "$out/${package}_${version}_$arch.deb" >/dev/null
    echo "$out/${package}_${version}_$arch.deb"
done
