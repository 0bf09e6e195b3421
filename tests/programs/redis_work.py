"""A client that speaks Redis' own protocol, and what a test does with it: no library needed."""
import hashlib
import random
import socket
import time


class Client:
    def __init__(self, port, timeout=120):
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.socket = socket.create_connection(("127.0.0.1", port), timeout)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        self.socket.settimeout(timeout)
        self.buffer = self.socket.makefile("rb", 1 << 18)

    def send(self, commands):
        out = []
        for command in commands:
            out.append(b"*%d\r\n" % len(command))
            for part in command:
                out.append(b"$%d\r\n%s\r\n" % (len(part), part))
        self.socket.sendall(b"".join(out))

    def reply(self):
        line = self.buffer.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            if rest == b"-1":
                return None
            n = int(rest)
            return self.buffer.read(n + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        raise RuntimeError(f"redis says {line!r}")

    def __call__(self, *parts):
        self.send([[p if isinstance(p, bytes) else str(p).encode() for p in parts]])
        return self.reply()

    def many(self, commands):
        """Sends all, then reads all: at most a few hundred at once."""
        self.send(commands)
        return [self.reply() for _ in commands]


def value(key, version, size=1000):
    return hashlib.shake_128(b"%d.%d" % (key, version)).digest(size)


def chunks(items, size=200):
    items = list(items)
    return (items[i : i + size] for i in range(0, len(items), size))


def fill(client, keys):
    for part in chunks(range(keys)):
        assert all(r == b"OK" for r in client.many([[b"SET", b"k%d" % k, value(k, 0)] for k in part]))


def mix(client, versions, operations, seed, meanwhile=lambda: None):
    """Random GETs, each checked, and SETs."""
    rng = random.Random(seed)
    for part in chunks(range(operations), 100):
        commands, wanted = [], []
        for _ in part:
            k = rng.randrange(len(versions))
            if rng.random() < 0.7:
                commands.append([b"GET", b"k%d" % k])
                wanted.append(value(k, versions[k]))
            else:
                versions[k] += 1
                commands.append([b"SET", b"k%d" % k, value(k, versions[k])])
                wanted.append(b"OK")
        for command, got, want in zip(commands, client.many(commands), wanted, strict=True):
            assert got == want, f"{command[:2]} gives {len(got) if got else got} bytes that differ"
        meanwhile()


def verify(client, versions):
    for part in chunks(range(len(versions))):
        for k, got in zip(part, client.many([[b"GET", b"k%d" % k] for k in part]), strict=True):
            assert got == value(k, versions[k]), f"key k{k} holds other bytes than were stored"
