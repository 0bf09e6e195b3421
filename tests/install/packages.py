"""Packages, the image and the page of a server, as people get them."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from harness import procs
from harness.world import ROOT, TARGET, check, skip

PACKAGES = ("librampool0", "librampool-dev", "rampool", "rampool-server")
# In a mount namespace of its own, with a writable copy of this machine's files that is gone afterwards.
OVERLAY = """set -e
mount -t tmpfs none "$1" && mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
for each in proc dev sys; do mount --rbind "/$each" "$1/root/$each"; done
cp -r "$2" "$1/root/packages"
exec "$(command -v chroot || echo /usr/sbin/chroot)" "$1/root" sh -e -c "$3"
"""
# What an administrator does, and what is left at the end.
LIFE = r"""
dpkg -i packages/*.deb
rampool --version && man -w rampool-run >/dev/null 2>&1 || test -s /usr/share/man/man1/rampool-run.1*
printf '#include <rampool.h>\nint main(void) { return rampool_version() == 0; }\n' > /p.c
cc /p.c -o /p $(pkg-config --cflags --libs rampool) && /p && echo compiled
printf 'b = bytearray(48 << 20)\nb[::4096] = b"x" * 12288\nprint(sum(b[::4096]))\n' > /p.py
rampool run --local 16M --memory 256M -- python3 /p.py
rampool serve --config /etc/rampool/serve.toml --memory 8M --listen 127.0.0.1:0 --ready-file /ready & S=$!
while ! test -s /ready; do sleep 0.05; done; kill $S; wait $S && echo served
systemd-analyze verify /usr/lib/systemd/system/rampool.service 2>&1 | grep -i rampool || true
echo more >> /etc/rampool/serve.toml
dpkg --remove rampool-server && test -s /etc/rampool/serve.toml && echo kept
dpkg --purge rampool-server rampool librampool-dev librampool0
ls -d /etc/rampool /usr/bin/rampool /usr/include/rampool.h /usr/lib/rampool 2>/dev/null || echo gone
"""


def run(argv, *, timeout=300, **more):
    argv = [str(a) for a in argv]
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False, **more
    )


def debian_packages(world, scale):
    if not shutil.which("dpkg-deb"):
        return skip("dpkg", "no dpkg-deb")
    out = world.dir / "deb"
    env = {**os.environ, "TARGET": str(TARGET), "OUT": str(out), "FAST": "1"}
    done = run([ROOT / "scripts/deb.sh"], env=env)
    check(done.returncode == 0, f"making packages ends with {done.returncode}: {done.stdout}{done.stderr}")
    made = {path.name.split("_")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    check(sorted(made) == sorted(PACKAGES), f"there are {sorted(made)}")
    if not scale.reduced:
        run([ROOT / "scripts/deb.sh"], env=env)
        again = {
            path.name.split("_")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()
        }
        check(again == made, "the same source gives other packages")
    if os.geteuid() != 0:
        return skip("root", "installing packages")
    room = world.dir / "room"
    room.mkdir()
    done = run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", OVERLAY, "sh", room, out, LIFE]
    )
    said = done.stdout.splitlines()
    wanted = ["compiled", str((48 << 20) // 4096 * ord("x")), "served", "kept", "gone"]
    check(
        done.returncode == 0 and [line for line in said if line in wanted] == wanted,
        f"ends with {done.returncode}: {done.stdout}{done.stderr}",
    )
    check(not any("rampool.service:" in line for line in said), f"the unit is wrong: {done.stdout}")


def layers(image):
    """Every file of an image layout, checked against its digest, and its manifest and configuration."""
    with tarfile.open(image) as tar:
        files = {entry.name: tar.extractfile(entry).read() for entry in tar}
    for name, data in files.items():
        if name.startswith("blobs/"):
            check(hashlib.sha256(data).hexdigest() == name.rsplit("/", 1)[1], f"{name} has another digest")
    blob = lambda named: files["blobs/sha256/" + named["digest"].removeprefix("sha256:")]
    check(json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}, "no layout of an image")
    manifest = json.loads(blob(json.loads(files["index.json"])["manifests"][0]))
    return [blob(layer) for layer in manifest["layers"]], json.loads(blob(manifest["config"]))


def image(world, scale):
    made = world.dir / "image.tar"
    env = {**os.environ, "TARGET": str(TARGET)}
    done = run([sys.executable, ROOT / "scripts/image.py", made], env=env)
    check(done.returncode == 0, f"making the image ends with {done.returncode}: {done.stdout}{done.stderr}")
    first = hashlib.sha256(made.read_bytes()).hexdigest()
    run([sys.executable, ROOT / "scripts/image.py", made], env=env)
    check(hashlib.sha256(made.read_bytes()).hexdigest() == first, "the same source gives another image")
    check(made.stat().st_size < 30_000_000, f"it is {made.stat().st_size} bytes long")
    [layer], config = layers(made)
    root = world.dir / "root"
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        tar.extractall(root, filter="fully_trusted")
    if os.geteuid() != 0:
        return skip("root", "running the image")
    # As the image says, without rights, with nothing but its own files.
    socket = root / "run/rampool.sock"
    user, group = map(int, config["config"]["User"].split(":"))
    command = [
        shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin"),
        f"--userspec={user}:{group}",
        root,
        *config["config"]["Entrypoint"],
    ]
    argv = [
        str(a)
        for a in [*command, "serve", "--memory", "8M", "--no-lock", "--listen", "unix:/run/rampool.sock"]
    ]
    server = subprocess.Popen(
        argv,
        env={},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=procs.end_with_parent,
    )
    try:
        deadline = time.monotonic() + 30
        while not socket.exists():
            check(
                server.poll() is None and time.monotonic() < deadline,
                f"the server of the image ends: {server.stdout.read() if server.poll() is not None else ''}",
            )
            time.sleep(0.01)
        done = run([*command, "status", "--server", "unix:/run/rampool.sock"], env={})
        check(done.returncode == 0 and "8 MiB" in done.stdout, f"status says {done.stdout}{done.stderr}")
    finally:
        server.send_signal(signal.SIGTERM)
    check(server.wait(30) == 0, f"the server of the image ended with {server.returncode}")


def chart(world, scale):
    """The chart renders, plainly and with everything on, and refuses values that its schema does not know."""
    if not shutil.which("helm"):
        return skip("helm", "no helm")
    path = ROOT / "contrib/helm/rampool"
    done = run(["helm", "lint", "--strict", path])
    check(done.returncode == 0, f"helm lint says {done.stdout}{done.stderr}")
    render = ["helm", "template", "r", path, "--kube-version", "1.30.0"]
    more = ["metrics.podMonitor=true", "tenants=[tenant.a]", "lock=false", "extraArgs={--shards=2}"]
    for values, wanted in (([], "add: [IPC_LOCK]"), (more, "--tenants=/etc/rampool-tenants/tenants.toml")):
        done = run([*render, *(word for value in values for word in ("--set", value))])
        check(done.returncode == 0 and wanted in done.stdout, f"{values}: {done.stdout}{done.stderr}")
    for value in ("memoryMiB=lots", "memory=8G"):
        done = run([*render, "--set", value])
        check(done.returncode != 0, f"{value} is taken: {done.stdout}")


def page(world, scale):
    """The page of a server in a browser: the numbers are there, and nothing goes wrong in its script."""
    browser = next(filter(shutil.which, ["chromium", "chromium-browser", "google-chrome"]), None)
    if browser is None:
        return skip("browser", "no Chromium")
    server = world.serve("64M", "--metrics", "127.0.0.1:0")
    deadline = time.monotonic() + 20
    while "metrics on " not in (said := server.said()):
        check(time.monotonic() < deadline, f"no metrics: {said}")
        time.sleep(0.02)
    address = said.split("metrics on ", 1)[1].split("/metrics", 1)[0]
    flags = [
        "--headless",
        "--disable-gpu",
        "--no-sandbox",
        "--enable-logging=stderr",
        f"--user-data-dir={world.dir / 'browser'}",
    ]
    shot = world.dir / "page.png"
    done = run(
        [browser, *flags, "--virtual-time-budget=3000", "--dump-dom", f"--screenshot={shot}", f"{address}/"],
        timeout=120,
    )
    check(
        "64.0 MiB" in done.stdout and ">serving<" in done.stdout,
        f"the page shows {done.stdout}{done.stderr[-2000:]}",
    )
    check(
        "Uncaught" not in done.stderr and "Refused to" not in done.stderr,
        f"its script says {done.stderr[-2000:]}",
    )
