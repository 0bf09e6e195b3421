#!/usr/bin/env python3
"""Makes an OCI image of what `make build` built:
`scripts/image.py [FILE]`, target/rampool-image.tar by default.

It contains the command, the agent, and the libraries of this machine that they need, and nothing else: no
base image, no shell. `podman load`, `docker load` (25 and later) and `skopeo copy oci-archive:FILE` read it.
The same source and binaries give the same bytes. Python's standard library only.
"""

import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("TARGET", ROOT / "target"))
BUILT = TARGET / "release"
PROGRAMS = {"usr/bin/rampool": "rampool"}
AGENTS = {f"usr/lib/rampool/{name}": name for name in ("librampool_agent.so", "librampool_agent_io.so")}
# Nobody: the server needs no rights.
USER = "65534:65534"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def libraries(binaries):
    """What the binaries are linked with, by the path at which the loader looks for it."""
    found = {}
    for binary in binaries:
        said = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.M):
            found[path.lstrip("/")] = pathlib.Path(path).resolve()
    return found


def stripped(path):
    """The file without what only debuggers read."""
    with tempfile.NamedTemporaryFile() as out:
        done = subprocess.run(["strip", "--strip-unneeded", "-o", out.name, path], check=False)
        return pathlib.Path(out.name).read_bytes() if done.returncode == 0 else path.read_bytes()


def layer(files, when):
    """A tar of these files (content by path) with their directories."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        directories = {str(parent) for name in files for parent in pathlib.PurePath(name).parents} - {"."}
        for name in sorted({*directories, "tmp", "run", *files}):
            entry = tarfile.TarInfo(name)
            entry.mtime = when
            if name in files:
                entry.mode, entry.size = 0o755, len(files[name])
                tar.addfile(entry, io.BytesIO(files[name]))
            else:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "run") else 0o755
                tar.addfile(entry)
    return buffer.getvalue()


def version():
    return re.search(
        r'^\[workspace\.package\].*?^version = "(.*?)"', (ROOT / "Cargo.toml").read_text(), re.M | re.S
    ).group(1)


def image(when):
    """All files of an image layout, by path."""
    own = {name: BUILT / file for name, file in {**PROGRAMS, **AGENTS}.items()}
    missing = [str(path) for path in own.values() if not path.exists()]
    if missing:
        sys.exit(f"scripts/image.py: {', '.join(missing)}: not there; run `make build` first")
    content = {name: stripped(path) for name, path in own.items()}
    content |= {name: path.read_bytes() for name, path in libraries(own.values()).items()}
    content["etc/passwd"] = b"nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
    tar = layer(content, when)
    packed = gzip.compress(tar, mtime=0)
    layout = {}

    def blob(data, kind):
        digest = hashlib.sha256(data).hexdigest()
        layout[f"blobs/sha256/{digest}"] = data
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))
    labels = {"org.opencontainers.image.title": "rampool", "org.opencontainers.image.version": version()}
    config = {
        "created": created,
        "architecture": ARCHITECTURES[os.uname().machine],
        "os": "linux",
        "config": {
            "Entrypoint": ["/usr/bin/rampool"],
            "Cmd": ["--help"],
            "User": USER,
            "WorkingDir": "/",
            "Env": ["PATH=/usr/bin"],
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}"]},
        "history": [{"created": created, "created_by": "scripts/image.py"}],
    }
    text = lambda value: json.dumps(value, sort_keys=True).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(text(config), "config.v1+json"),
        "layers": [blob(packed, "layer.v1.tar+gzip")],
        "annotations": labels,
    }
    named = blob(text(manifest), "manifest.v1+json")
    named["annotations"] = {
        "org.opencontainers.image.ref.name": version(),
        "io.containerd.image.name": f"rampool:{version()}",
    }
    layout["index.json"] = text(
        {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [named]}
    )
    layout["oci-layout"] = text({"imageLayoutVersion": "1.0.0"})
    return layout


def main():
    to = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else TARGET / "rampool-image.tar")
    said = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    when = int(os.environ.get("SOURCE_DATE_EPOCH") or said or 0)
    to.parent.mkdir(parents=True, exist_ok=True)
    layout = image(when)
    with tarfile.open(to, "w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(layout):
            entry = tarfile.TarInfo(name)
            entry.mtime, entry.size, entry.mode = when, len(layout[name]), 0o644
            tar.addfile(entry, io.BytesIO(layout[name]))
    print(f"{to}: {to.stat().st_size / 1e6:.1f} MB, rampool:{version()}")


if __name__ == "__main__":
    main()
