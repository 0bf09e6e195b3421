"""A network that misbehaves on demand: a TCP proxy between a client and a memory server."""

import random
import socket
import threading
import time


def _reset(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    try:
        s.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class Proxy:
    """Forwards to `target`. Its `mode` may change at any moment:
    `pass`, `slow` (each piece waits), `narrow` (bytes per second), `hole` (nothing passes, nothing ends),
    `deaf` and `mute` (the same of requests, and of answers), `cut` (connections are reset) and
    `corrupt` (now and then a bit of the server's answer is flipped)."""

    def __init__(self, target, seed=1):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.mode, self.delay_s, self.bytes_per_s = "pass", 0.01, 10 << 20
        self.corrupt_every, self.corrupted, self.random = 1 << 20, 0, random.Random(seed)
        self.passed, self.pairs, self.lock = 0, [], threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
                if self.mode in ("down", "cut"):
                    _reset(client)
                    continue
                server = socket.create_connection(self.target, 10)
            except OSError:
                return
            for s in (client, server):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                s.settimeout(None)
            with self.lock:
                self.pairs.append((client, server))
            for a, b, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(a, b, answers), daemon=True).start()

    def _pump(self, source, sink, answers):
        left = self.corrupt_every
        try:
            while data := source.recv(1 << 16):
                if self.mode == "slow":
                    time.sleep(self.delay_s)
                elif self.mode == "narrow":
                    time.sleep(len(data) / self.bytes_per_s)
                elif self.mode == "corrupt" and answers:
                    left -= len(data)
                    if left < 0 and len(data) > 2048:
                        left = self.corrupt_every
                        data = bytearray(data)
                        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                        self.corrupted += 1
                while self.mode in ("hole", "mute" if answers else "deaf"):
                    time.sleep(0.1)
                self.passed += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for s in (source, sink):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def interrupt(self, seconds=0):
        """Resets every connection; new ones are reset during this time, and pass after it."""
        before, self.mode = self.mode, "down"
        with self.lock:
            pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for s in pair:
                _reset(s)
        time.sleep(seconds)
        self.mode = before

    def cut(self):
        """Resets every connection; new ones are refused."""
        self.mode = "cut"
        # Closed alone, it would go on listening for as long as a thread waits in accept.
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.listener.close()
        with self.lock:
            for pair in self.pairs:
                for s in pair:
                    _reset(s)

    def close(self):
        self.cut()
        with self.lock:
            for pair in self.pairs:
                for s in pair:
                    s.close()
