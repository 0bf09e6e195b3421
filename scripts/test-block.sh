#!/bin/bash
# Block devices from the pool, used by the kernel: `make test-block`. A small virtual machine has its disks on a memory server that runs here: a file system is made,
# filled, checked and trimmed, programs use more memory than they have with swap on the server (one for glibc, one for musl, one in Go, all static), and the server is killed under both. docs/guide/block.md says more.
#
# Debian's kernel has the client. It is downloaded as a package and unpacked into target/kernel, never installed, and emulated, so that neither KVM nor root is needed. It ends
# by itself, after RAMPOOL_BLOCK_SECONDS (1800) at the latest; it passes if everything did.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
target=${CARGO_TARGET_DIR:-target}
work=$(mkdir -p "$target/block" && cd "$target/block" && pwd)
limit=${RAMPOOL_BLOCK_SECONDS:-1800}
rampool=${RAMPOOL_BIN:-$target/release/rampool}

fail() {
    echo "block: $*" >&2
    exit 1
}

[ "$(uname -m)" = x86_64 ] || fail "this is for x86-64: the virtual machine runs what was built here"
[ -x "$rampool" ] || fail "$rampool is not built: make build"
exec 9>"$work/lock"
flock -n 9 || fail "is running already ($work/lock)"
. scripts/debian-kernel.sh
debian_kernel "$target/kernel"

# --- what runs there ----------------------------------------------------------------------------------------------------------------
root=$work/root
rm -rf "$root"
mkdir -p "$root"/{dev,proc,sys,tmp,mnt,etc,var/run,usr/bin,usr/sbin,usr/lib/modules,usr/lib64}
ln -s usr/{bin,sbin,lib,lib64} "$root/"
ln -s /proc/mounts "$root/etc/mtab"
cp "$unpacked/bin/busybox" "$root/bin/"
for name in dmesg tail sh mount umount mkdir modprobe sleep cat poweroff grep kill seq timeout ip dd sha256sum fstrim mkswap swapon swapoff sync rm cut free; do
    ln -s busybox "$root/bin/$name"
done
# Where the kernel looks for it when it wants a module itself.
ln -s /bin/busybox "$root/sbin/modprobe"
gcc -O2 -static -o "$root/bin/larger" tests/block/larger.c
musl-gcc -O2 -static -o "$root/bin/larger-musl" tests/block/larger.c
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$root/bin/gomap" tests/block/gomap.go
for program in nbd-client mkfs.ext4 e2fsck; do cp -L "$(command -v $program)" "$root/sbin/"; done
modules=$root/lib/modules/$version
mkdir -p "$modules"
cp "$unpacked/lib/modules/$version"/modules.{order,builtin,builtin.modinfo} "$modules/"
(cd "$unpacked/lib/modules/$version" &&
    find . -name '*.ko*' | grep -E '/(nbd|zram|zsmalloc|virtio|virtio_ring|virtio_pci|virtio_pci_modern_dev|virtio_pci_legacy_dev|virtio_net|net_failover|failover|ext4|jbd2|mbcache|crc16|crc32c_generic|libcrc32c|crc32c-intel|lz4[a-z0-9_]*|lzo[a-z_-]*|842[a-z_]*)\.ko') |
    while read -r module; do
        mkdir -p "$modules/$(dirname "$module")"
        cp "$unpacked/lib/modules/$version/$module" "$modules/$module"
    done
find "$modules" -name '*.ko.xz' -exec xz -d {} +
depmod -b "$root" "$version"
{
    echo /lib64/ld-linux-x86-64.so.2
    ldd "$root"/sbin/nbd-client "$root"/sbin/mkfs.ext4 "$root"/sbin/e2fsck | grep -o ' /[^ ]*\.so[^ ]*'
} | sort -u | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done

cat >"$root/init" <<'INIT'
#!/bin/sh
/bin/busybox mount -t proc proc /proc
export PATH=/bin:/sbin HOME=/tmp
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
cd /tmp
exec </dev/null
over() {
    echo "block: $1"
    sleep 1
    poweroff -f
}
# Asks the machine that runs this one for something, and waits until it has been done.
host() {
    echo "block: please $1"
    for i in $(seq 300); do
        grep -q "done $1" /tmp/answers && return
        sleep 0.1
    done
    over "failed: nothing came of \"$1\""
}
cat /dev/ttyS1 >/tmp/answers &
now() { cut -d. -f1 /proc/uptime; }
for module in virtio_pci virtio_net nbd crc32c_generic ext4 zram; do modprobe $module || over "failed: no module $module"; done
ip link set lo up
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
port=$(grep -o 'nbd_port=[0-9]*' /proc/cmdline | cut -d= -f2)

echo "block: a file system"
nbd-client 10.0.2.2 $port /dev/nbd0 -N disk -b 4096 -C 2 >said 2>&1 || { cat said; over "failed: nbd-client"; }
mkfs.ext4 -q -E nodiscard /dev/nbd0 || over "failed: mkfs"
mount -t ext4 /dev/nbd0 /mnt || over "failed: mount"
for file in 1 2 3 4; do dd if=/dev/urandom of=/mnt/$file bs=1M count=24 2>/dev/null || over "failed: writing a file"; done
(cd /mnt && sha256sum 1 2 3 4) >sums
umount /mnt || over "failed: umount"
e2fsck -f -n /dev/nbd0 >fsck 2>&1 || { cat fsck; over "failed: fsck"; }
echo 3 >/proc/sys/vm/drop_caches
mount -t ext4 /dev/nbd0 /mnt || over "failed: mount again"
(cd /mnt && sha256sum -c ../tmp/sums >/dev/null) || over "failed: other bytes came back"
host "look full"
rm /mnt/[1-4]
sync
fstrim /mnt || over "failed: fstrim"
host "look empty"
umount /mnt || over "failed: umount"
nbd-client -d /dev/nbd0 >/dev/null || over "failed: disconnecting"

echo "block: swap"
# As the guide says: what the network needs is kept free.
echo 32768 >/proc/sys/vm/min_free_kbytes
nbd-client 10.0.2.2 $port /dev/nbd1 -N swap -b 4096 -swap -timeout 10 >said 2>&1 || { cat said; over "failed: nbd-client"; }
mkswap /dev/nbd1 >/dev/null
swapon /dev/nbd1 || over "failed: swapon"
began=$(now)
larger 512 1 >/dev/null || over "failed: the program with swap on the server ended with $?"
took=$(($(now) - began))
echo "block: 512 MiB in 256 MiB of memory, written and checked: $took s with swap on the server"
mkdir /tmp/cgroup
mount -t cgroup2 cgroup /tmp/cgroup
echo +memory >/tmp/cgroup/cgroup.subtree_control
mkdir /tmp/cgroup/program
echo 48M >/tmp/cgroup/program/memory.max || over "failed: no limit of memory"
# Runs a program in 48 MiB. At least 32 MiB are to be swapped.
limited() {
    before=$(grep pswpout /proc/vmstat | cut -d' ' -f2)
    began=$(now)
    sh -c 'echo $$ >/tmp/cgroup/program/cgroup.procs; exec "$@"' sh "$@" >said 2>&1 || { cat said; over "failed: $1 ended with $?"; }
    pages=$(($(grep pswpout /proc/vmstat | cut -d' ' -f2) - before))
    [ $pages -ge 8192 ] || over "failed: of $1 only $pages pages were swapped"
    echo "block: $1 in 48 MiB of memory: right, $(($(now) - began)) s, $((pages / 256)) MiB swapped"
}
limited larger-musl 96 1
# Go's runtime sends its threads signals. One that comes while the kernel's client sends can end the connection ("Double reply").
GODEBUG=asyncpreemptoff=1 limited gomap 40000 2
swapoff /dev/nbd1 || over "failed: swapoff"
echo 768M >/sys/block/zram0/disksize
mkswap /dev/zram0 >/dev/null
swapon /dev/zram0 || over "failed: swapon zram"
began=$(now)
larger 512 1 >/dev/null || over "failed: the program with swap on zram ended with $?"
zram=$(($(now) - began))
swapoff /dev/zram0
echo "block: with swap on zram it took $zram s, a ratio of $((took * 10 / (zram + 1))) tenths; emulated"

echo "block: the server is killed"
# The kernel has much to say about that.
echo 1 >/proc/sys/kernel/printk
swapon /dev/nbd1 || over "failed: swapon again"
nbd-client 10.0.2.2 $port /dev/nbd0 -N disk -b 4096 -timeout 10 >said 2>&1 || { cat said; over "failed: nbd-client"; }
(while dd if=/dev/nbd0 of=/dev/null bs=1M iflag=direct 2>/dev/null; do :; done; echo "dd: error" >read) &
# Only the program's own pages are to be lost, and none of the shell that looks at it.
sh -c 'echo $$ >/tmp/cgroup/program/cgroup.procs; exec larger 128 0' >rounds 2>&1 &
program=$!
for i in $(seq 600); do grep -q "round 0" rounds && break; sleep 0.5; done
began=$(now)
host "kill the server"
for i in $(seq 300); do kill -0 $program 2>/dev/null || break; sleep 0.2; done
if kill -0 $program 2>/dev/null; then
    cat rounds /proc/$program/status /proc/$program/stack /proc/swaps /tmp/cgroup/program/memory.stat | grep -E 'larger|State|VmRSS|VmSwap|\[<|nbd|anon |swapcached'
    dmesg | tail -n 15
    over "failed: the program hangs"
fi
wait $program
code=$?
for i in $(seq 300); do [ -e read ] && break; sleep 0.2; done
[ -e read ] || over "failed: a read hangs"
# SIGBUS, or SIGKILL where the kernel itself wanted the page.
[ $code = 135 ] || [ $code = 137 ] || over "failed: the program ended with $code"
echo "block: the program ended by signal $((code - 128)) and the read with an error, $(($(now) - began)) s after the kill"
over "passed"
INIT
chmod 755 "$root/init"
(cd "$root" && find . | "$unpacked/bin/busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$work/initrd"
rm -rf "$root"

# --- the server, and the machine ----------------------------------------------------------------------------------------------------
rm -f "$work"/{serve.log,answers.in,answers.out}
"$rampool" serve --memory 1300M --no-lock --listen "unix:$work/server" --nbd 127.0.0.1:0 --export disk=256M --export swap=1G >"$work/serve.log" 2>&1 &
server=$!
# What the machine says there is not read: the kernel only repeats what it hears.
mkfifo "$work/answers.in"
ln -s /dev/null "$work/answers.out"
trap 'kill -9 $server 2>/dev/null || true; rm -f "$work"/{initrd,answers.in,answers.out}' EXIT
for _ in $(seq 200); do grep -q '^nbd on' "$work/serve.log" && break; sleep 0.05; done
port=$(sed -n 's/^nbd on 127.0.0.1://p' "$work/serve.log")
[ -n "$port" ] || fail "the server does not start: $(cat "$work/serve.log")"
used() { "$rampool" status --json --server "unix:$work/server" | python3 -c 'import json, sys; print([e["used_bytes"] for e in json.load(sys.stdin)[0]["status"]["exports"]][0] >> 20)'; }

echo "block: starting Linux $version, emulated"
began=$SECONDS
exec 8<>"$work/answers.in"
timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 256 -nic user,model=virtio-net-pci -display none -no-reboot -monitor none \
    -chardev stdio,id=console -serial chardev:console -chardev pipe,id=answers,path="$work/answers" -serial chardev:answers \
    -kernel "$vmlinuz" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1 nbd_port=$port" </dev/null 2>&1 | sed -u 's/\r//g' | while read -r line; do
    echo "$line"
    case $line in
    "block: please look full")
        [ "$(used)" -ge 96 ] || echo "block: failed: the files are not in the pool: $(used) MiB"
        echo "done look full" >&8
        ;;
    "block: please look empty")
        # What was trimmed is back within a second.
        for _ in 1 2 3 4 5 6 7 8 9 10; do [ "$(used)" -le 24 ] && break; sleep 0.1; done
        [ "$(used)" -le 24 ] || echo "block: failed: trimmed memory is not back: $(used) MiB"
        echo "block: $(used) MiB are in use after fstrim"
        echo "done look empty" >&8
        ;;
    "block: please kill the server")
        kill -9 "$server"
        echo "done kill the server" >&8
        ;;
    esac
done | tee "$work/log" || true
echo
if grep -q '^block: failed' "$work/log" || ! grep -qx 'block: passed' "$work/log"; then
    fail "$(grep '^block: failed' "$work/log" || echo "the machine ended, or was ended after $limit s, before it was through"); $work/log has what was said"
fi
echo "block: passed, in $((SECONDS - began)) s"
