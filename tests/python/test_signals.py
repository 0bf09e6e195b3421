"""Ctrl-C while a call waits for a server that does not answer."""

import pathlib

PROGRAM = """
import os, signal, sys, threading
import numpy as np, rampool
sys.path.insert(0, os.environ["HERE"])
from conftest import stop
pool = rampool.connect(os.environ["SERVER"], memory="32M", local="1M", op_deadline_ms=100_000)
store, t, jobs = pool.store(), pool.remote("t", 1000, "i8"), pool.queue("q")
store["a"] = b"before"
big = np.ones(1 << 20)
server = int(os.environ["SERVER_PID"])
calls = {
    "put": lambda: store.__setitem__("a", big),
    "get": lambda: store["a"],
    "read": lambda: np.asarray(t),
    "write": lambda: t.__setitem__(slice(None), 1),
    "sum": lambda: t[:].sum(),
    "select": lambda: t[t[:] == 1],
    "fetch_add": lambda: t.fetch_add(0, 1),
    "compare_exchange": lambda: t.compare_exchange(0, 0, 1),
    "open": lambda: pool.remote("u", 10),
    "store": lambda: pool.store(),
    "queue": lambda: pool.queue("r"),
    "take": lambda: jobs.take(),
    "connect": lambda: rampool.connect(os.environ["SERVER"], memory="1M"),
}
name = os.environ["CALL"]
stop(server)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    calls[name]()
    print("returned")
except KeyboardInterrupt:
    print("interrupted")
except BaseException as error:
    print(type(error).__name__, error)
finally:
    os.kill(server, signal.SIGCONT)
assert bytes(store["a"]) == b"before"
store["b"] = big
assert np.frombuffer(store["b"]).sum() == big.sum()
assert t.fetch_add(999, 5) == (1 if name == "write" else 0)
pool.close()
"""

CALLS = "put get read write sum select fetch_add compare_exchange open store queue take connect".split()


def test_ctrl_c_ends_every_wait(python, own_server):
    pid, here = str(own_server.process.pid), str(pathlib.Path(__file__).parent)
    for call in CALLS:
        said = python(PROGRAM, SERVER=own_server.address, SERVER_PID=pid, CALL=call, HERE=here)
        assert said == "interrupted\n", call
