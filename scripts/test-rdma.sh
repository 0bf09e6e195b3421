#!/bin/bash
# RDMA without a card: `make test-rdma`. A small virtual machine has two soft-RoCE devices connected by a
# cable. Over them run UCX's own benchmark, the conformance suite of transports, and a server and a client in
# processes of their own. docs/internals/transports.md says more.
#
# Few kernels have soft-RoCE; Debian's has. It is downloaded as a package and unpacked into target/kernel, never
# installed, and emulated, so that neither KVM nor root is needed. It ends by itself, after
# RAMPOOL_RDMA_SECONDS (600) at the latest. It passes if everything passed.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
target=${CARGO_TARGET_DIR:-target}
work=$(mkdir -p "$target/rdma" && cd "$target/rdma" && pwd)
limit=${RAMPOOL_RDMA_SECONDS:-600}

fail() {
    echo "rdma: $*" >&2
    exit 1
}

[ "$(uname -m)" = x86_64 ] || fail "this is for x86-64: the virtual machine runs what was built here"
exec 9>"$work/lock"
flock -n 9 || fail "is running already ($work/lock)"

# --- a kernel, and tools for it -----------------------------------------------------------------------------------------------------
. scripts/debian-kernel.sh
debian_kernel "$target/kernel"

# --- what runs there ----------------------------------------------------------------------------------------------------------------
echo "rdma: building the tests"
built() { # NAME, then what `cargo test` is told: the program of that name, as cargo says
    local name=$1
    shift
    cargo test --quiet --no-run --message-format json "$@" | python3 -c '
import json, sys
made = [json.loads(line) for line in sys.stdin]
print([m["executable"] for m in made if m.get("executable") and m["target"]["name"] == sys.argv[1]][-1])' "$name"
}
suite=$(built rampool_net -p rampool-net --lib)
client=$(built serve -p rampool-cli --test serve)
rampool=$target/debug/rampool
[ -x "$suite" ] && [ -x "$client" ] && [ -x "$rampool" ] || fail "the tests were built, and are not where cargo puts them"

root=$work/root
rm -rf "$root"
mkdir -p "$root"/{dev,proc,sys,tmp,usr/bin,usr/sbin,usr/lib/modules,usr/lib64,etc/libibverbs.d}
ln -s usr/{bin,sbin,lib,lib64} "$root/"
cp "$unpacked/bin/busybox" "$root/bin/"
for name in sh mount mkdir modprobe sleep cat poweroff grep kill seq timeout tail sed; do ln -s busybox "$root/bin/$name"; done
# Not where busybox would take its own for them.
for program in ip rdma chrt ucx_perftest; do cp "$(command -v $program)" "$root/sbin/"; done
strip -o "$root/bin/suite" "$suite"
strip -o "$root/bin/client" "$client"
strip -o "$root/bin/rampool" "$rampool"
echo "driver rxe" >"$root/etc/libibverbs.d/rxe.driver"
modules=$root/lib/modules/$version
cp -r "$unpacked/lib/modules/$version" "$root/lib/modules/"
find "$modules" -name '*.ko*' | grep -vE 'infiniband/(core|sw/rxe)/|net/veth|udp_tunnel|/kernel/(crypto|lib)/' | xargs rm -f
find "$modules" -name '*.ko.xz' -exec xz -d {} +
depmod -b "$root" "$version"
# Libraries lie where the loader has them; plug-ins, which nothing links to, lie next to them.
ucp=$(ldconfig -p | sed -n 's/.*libucp\.so\.0 .*=> //p' | head -n 1)
libraries=$(dirname "$ucp")
plugins=$(ls "$libraries"/ucx/*.so.0 "$libraries"/libibverbs/librxe-rdmav*.so "$ucp")
{
    echo /lib64/ld-linux-x86-64.so.2
    echo "$plugins"
    # shellcheck disable=SC2086
    ldd "$root"/bin/{suite,client,rampool} "$root"/sbin/* $plugins | grep -o ' /[^ ]*\.so[^ ]*'
} | sort -u | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done

cat >"$root/init" <<'INIT'
#!/bin/sh
/bin/busybox mount -t proc proc /proc
export PATH=/bin HOME=/tmp
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
cd /tmp
over() {
    echo "rdma: $1"
    poweroff -f
}
# The checksum of RoCE is an algorithm that nothing else loads.
for module in veth crc32_generic ib_uverbs rdma_rxe; do modprobe $module || over "failed: no module $module"; done
/sbin/ip link set lo up
# Two network cards and a cable. What goes from one to the other by their link-local addresses really goes: addresses of IPv4 would lead to the same host and never leave it.
/sbin/ip link add left mtu 4300 type veth peer name right mtu 4300 || over "failed: no network"
for card in left right; do
    echo 0 >/proc/sys/net/ipv6/conf/$card/accept_dad
    /sbin/ip link set $card up
    /sbin/rdma link add rxe_$card type rxe netdev $card || over "failed: no soft-RoCE"
done
/sbin/rdma link
for i in $(seq 100); do grep -q ^fe80 /sys/class/infiniband/rxe_left/ports/1/gids/0 && grep -q ^fe80 /sys/class/infiniband/rxe_right/ports/1/gids/0 && break; sleep 0.1; done
export UCX_IB_GID_INDEX=0 UCX_IB_ASYNC_EVENTS=n
# A spinning process yields to soft-RoCE, which runs in threads of the kernel.
idle="/sbin/chrt -i 0"
packets() {
    cat /sys/class/infiniband/rxe_$1/ports/1/hw_counters/sent_pkts
}
for transports in rc_verbs,ud_verbs ud_verbs; do
    echo "rdma: over $transports"
    export UCX_TLS=$transports
    # UCX by itself: what fails here is not rampool's.
    UCX_NET_DEVICES=rxe_right:1 $idle timeout 60 /sbin/ucx_perftest >perftest 2>&1 &
    other=$!
    for i in $(seq 100); do grep -q Waiting perftest && break; sleep 0.2; done
    UCX_NET_DEVICES=rxe_left:1 $idle timeout 60 /sbin/ucx_perftest 127.0.0.1 -t ucp_am_lat -s 64 -n 1000 -w 10 >latency 2>&1 ||
        { cat perftest latency; over "failed: ucx_perftest over $transports; nothing of rampool has run"; }
    grep Final: latency | while read -r _ count median average _; do
        echo "rdma: ucx_perftest, 64 B there and back, halved: $median us (median of $count), $average us on average; emulated"
    done
    wait $other
    # A server on the one card, a client on the other.
    left=$(packets left) right=$(packets right)
    UCX_NET_DEVICES=rxe_right:1 $idle rampool serve --memory 64M --no-lock --listen ucx:127.0.0.1:7117 --ucx-clients trusted >served 2>&1 &
    server=$!
    for i in $(seq 100); do grep -q 'ucx:127.0.0.1:7117' served && break; sleep 0.2; done
    (echo one; echo three; exec sleep 60) | RAMPOOL_TEST_UCX_CLIENT=ucx:127.0.0.1:7117 UCX_NET_DEVICES=rxe_left:1 \
        $idle client --exact --nocapture a_client_over_ucx_in_a_process_of_its_own >client 2>&1 &
    client=$!
    for i in $(seq 300); do
        [ "$(grep -c 'answer: ' client)" = 2 ] && break
        kill -0 $server || break
        sleep 0.2
    done
    [ "$(grep -c 'answer: same' client)" = 2 ] || { cat served client; over "failed: wrong or no answers over $transports"; }
    rampool status --server 127.0.0.1:7117
    # The client is killed, and the server stays.
    kill -9 $client
    wait $client
    sleep 1
    rampool status --server 127.0.0.1:7117 >/dev/null || { cat served; over "failed: the server has ended with its client over $transports"; }
    kill -9 $server
    wait $server
    left=$(($(packets left) - left)) right=$(($(packets right) - right))
    echo "rdma: 6 MB written and read back, every byte compared; packets of RoCE: $left from the client, $right from the server"
    # Six million bytes in packets of at most 4 KiB.
    [ $left -gt 1400 ] && [ $right -gt 1400 ] || over "failed: the bytes have not gone over RDMA"
done
unset UCX_TLS
echo "rdma: the conformance suite"
RAMPOOL_TEST_UCX="rc_verbs,ud_verbs ud_verbs" $idle suite --test-threads 1 transport::tests || over "failed: the conformance suite"
over "passed"
INIT
chmod 755 "$root/init"
(cd "$root" && find . | "$unpacked/bin/busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$work/initrd"
rm -rf "$root"

# --- the machine --------------------------------------------------------------------------------------------------------------------
echo "rdma: starting Linux $version, emulated"
began=$SECONDS
timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 2048 -nic none -display none -no-reboot -serial stdio -monitor none \
    -kernel "$vmlinuz" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1" </dev/null 2>&1 | sed -u 's/\r//g' | tee "$work/log" || true
rm -f "$work/initrd"
echo
grep -qx 'rdma: passed' "$work/log" || fail "$(grep '^rdma: failed' "$work/log" || echo "the machine ended, or was ended after $limit s, before it was through"); $work/log has what was said"
echo "rdma: passed, in $((SECONDS - began)) s"
