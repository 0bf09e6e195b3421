# Sourced by tests that boot an emulated machine: a Debian kernel and busybox, downloaded as packages and unpacked, never installed.
#
# `debian_kernel DIRECTORY` sets `unpacked` (where they are), `vmlinuz` and `version`. The caller has `fail`.

debian_kernel() {
    local directory image newest package
    directory=$(mkdir -p "$1" && cd "$1" && pwd)
    unpacked=$directory/unpacked
    if ! ls "$unpacked"/boot/vmlinuz-* >/dev/null 2>&1; then
        # A package that only names the newest of its kind; which one there is depends on the release.
        for newest in linux-image-6.12-amd64 linux-image-amd64; do
            image=$(apt-cache depends "$newest" 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\).*/\1/p' | head -n 1)
            [ -z "$image" ] || break
        done
        [ -n "$image" ] || fail "the package lists have no Debian kernel; on Debian, as root: apt-get update"
        echo "downloading $image and busybox-static"
        rm -rf "$directory/download" "$unpacked.part"
        mkdir "$directory/download"
        (cd "$directory/download" && apt-get -qq download "$image" busybox-static 2>&1) || fail "cannot download $image"
        for package in "$directory"/download/*.deb; do dpkg-deb -x "$package" "$unpacked.part"; done
        mv "$unpacked.part" "$unpacked"
        rm -rf "$directory/download"
    fi
    vmlinuz=$(ls "$unpacked"/boot/vmlinuz-*)
    version=${vmlinuz##*/vmlinuz-}
}
