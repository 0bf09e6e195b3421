#!/bin/sh
# Installs the C library: headers, the PARMACS macros, the Python module for mpi4py, librampool.so with its links, librampool.a, pkg-config and CMake files.
#
#     install.sh BUILD PREFIX [LIBDIR]
#
# BUILD is the directory with the built libraries (target/release). DESTDIR is put before every path that is written, but not
# before those written into files.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
build=$1
prefix=$2
libdir=${3:-$prefix/lib}
dest=${DESTDIR:-}
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$here/../../../Cargo.toml")
soversion=${version%.*}

mkdir -p "$dest$prefix/include" "$dest$libdir/pkgconfig" "$dest$libdir/cmake/rampool" "$dest$prefix/share/rampool"
cp "$here/../include/"*.h "$dest$prefix/include/"
cp "$here/../m4/rampool.m4" "$here/../python/rampool_mpi.py" "$dest$prefix/share/rampool/"
install -m 755 "$build/librampool.so" "$dest$libdir/librampool.so.$version"
ln -sf "librampool.so.$version" "$dest$libdir/librampool.so.$soversion"
ln -sf "librampool.so.$soversion" "$dest$libdir/librampool.so"
if [ -e "$build/librampool.a" ]; then
    install -m 644 "$build/librampool.a" "$dest$libdir/librampool.a"
fi

fill() {
    sed -e "s|@PREFIX@|$prefix|g" -e "s|@LIBDIR@|$libdir|g" -e "s|@VERSION@|$version|g" -e "s|@SOVERSION@|$soversion|g" "$here/$1" >"$dest$2"
}
fill rampool.pc.in "$libdir/pkgconfig/rampool.pc"
fill rampool-config.cmake.in "$libdir/cmake/rampool/rampool-config.cmake"
fill rampool-config-version.cmake.in "$libdir/cmake/rampool/rampool-config-version.cmake"
