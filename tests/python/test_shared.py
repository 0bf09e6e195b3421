"""Ranks that share memory."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import ranks as programs
from conftest import until

import rampool
from rampool.shared import launch

HERE = str(pathlib.Path(__file__).parent)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The ranks' processes import their functions by name."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("ranks, protocol", [(2, None), (4, "sc")])
def test_red_black_relaxation_is_as_in_one_process(ranks, protocol):
    expected = programs.serial_sor(120, 6)
    for grid in launch(programs.sor, ranks, 120, 6, protocol):
        assert np.array_equal(grid, expected)


def test_locks_and_words_lose_no_update():
    assert launch(programs.count, 3, 20) == [(rank, 60, 120, 30.0, 0) for rank in range(3)]


def test_a_rank_that_fails_ends_the_others_and_is_named():
    with pytest.raises(rampool.Error, match="rank 1 failed(.|\n)*ZeroDivisionError: on purpose"):
        launch(programs.fail, 3)


def test_a_rank_that_is_killed_ends_the_others():
    with pytest.raises(rampool.Error, match="rank [01] failed"):
        launch(programs.die, 2)


def test_an_interrupt_ends_a_wait(tmp_path):
    path = tmp_path / "pid"

    def interrupt():
        until(lambda: path.exists() and path.read_text(), "rank 0's number")
        time.sleep(0.2)  # Mostly it waits by now; if not, the barrier sees the signal at once.
        os.kill(int(path.read_text()), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    # The rank catches it, but the run is over.
    with pytest.raises(rampool.Error, match="it was interrupted|ended the run"):
        launch(programs.interrupted, 2, str(path))
    thread.join()


def test_mistakes_are_exceptions():
    expected = ["TypeError", "ValueError", "ValueError", "ValueError", "ValueError"]
    expected += ["ValueError", "TypeError", "IndexError", 7]
    assert launch(programs.mistakes, 1) == [expected]
    with pytest.raises(ValueError):
        launch(programs.mistakes, 0)


def test_under_torchruns_variables():
    program = """
from rampool.shared import join
with join() as ranks:
    a = ranks.array(1, "i8")
    ranks.fetch_add(a, 0, 1)
    ranks.barrier()
    print(ranks.rank, ranks.ranks, int(a[0]))
"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = []
    for rank in range(2):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
        words = [sys.executable, "-c", program]
        environment = {**os.environ, **variables, "RAMPOOL_RUN": f"torch-{port}"}
        started.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[0] for process in started]
    assert said == ["0 2 2\n", "1 2 2\n"]
