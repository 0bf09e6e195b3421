"""What the docstrings show is so."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import rampool

MODULES = sorted(
    name for _, name, _ in pkgutil.iter_modules(rampool.__path__) if name not in ("__main__", "_native")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(server, name):
    try:
        module = importlib.import_module(f"rampool.{name}")
    except ImportError as error:
        pytest.skip(f"{error}: rampool[{name}] is not installed")
    names = {
        "SERVERS": server,
        "np": np,
        "rampool": rampool,
        "connect": rampool.connect,
        "share": rampool.share,
        "local": rampool.local,
    }
    result = doctest.testmod(module, extraglobs=names)
    assert result.failed == 0


def test_the_packages_own(server):
    assert doctest.testmod(rampool, extraglobs={"SERVERS": server}).failed == 0


def test_every_name_is_documented():
    for name in rampool.__all__:
        value = getattr(rampool, name)
        assert value.__doc__, name
        for member, method in vars(value).items() if isinstance(value, type) else ():
            public = not member.startswith("_") and (callable(method) or isinstance(method, property))
            assert not public or getattr(value, member).__doc__, f"{name}.{member}"
