"""Saved activations of real PyTorch in the pool. Its package in the registry is for GPUs and has gigabytes,
so these tests take Debian's."""

import os
import subprocess
import sys

import pytest

import rampool

torch = pytest.importorskip("torch")

from rampool.torch import offload  # noqa: E402


def model(width=512, depth=4):
    torch.manual_seed(3)
    layers = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)]
    return torch.nn.Sequential(*layers)


def gradients(net, batch, **hooks):
    net.zero_grad()
    if hooks:
        with offload(hooks["pool"], over=hooks["over"]) as offloaded:
            loss = net(batch).square().sum()
        held = offloaded.nbytes
    else:
        loss, offloaded, held = net(batch).square().sum(), None, 0
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters()], offloaded, held


def test_gradients_are_equal_bit_by_bit(pool):
    net, batch = model(), torch.randn(600, 512, requires_grad=True)
    plain, _, _ = gradients(net, batch)
    for _ in range(2):
        saved, offloaded, held = gradients(net, batch, pool=pool, over=1 << 16)
        assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))
        # Some tensors are saved by two operations, and travel once.
        assert held >= 4 * 2 * 600 * 512 * 4 and offloaded.nbytes_saved == held
        assert offloaded.nbytes == 0, "what autograd has let go of is gone"
    _, offloaded, _ = gradients(net, batch, pool=pool, over=1 << 30)
    assert offloaded.nbytes_saved == 0


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64"])
def test_kinds_and_layouts(pool, dtype):
    kind = getattr(torch, dtype)
    a = torch.randn(40, 30, dtype=torch.float64).to(kind).requires_grad_()
    b = torch.randn((), dtype=torch.float64).to(kind).requires_grad_()

    def step():
        a.grad = b.grad = None
        moved = (a.t() * b).exp()[::2]
        (moved * moved).sum().abs().backward()
        return a.grad.clone(), b.grad.clone()

    plain = step()
    with offload(pool, over=0):
        saved = step()
    assert all(torch.equal(x, y) for x, y in zip(plain, saved, strict=True))


def test_a_tensor_changed_in_place_is_saved_anew(pool):
    a = torch.ones(1000, requires_grad=True)

    with offload(pool, over=0):
        x = torch.zeros(1000)
        y = a * x  # saves x
        x += 2
        z = a * x  # saves x, which is another by now
    (y + z).sum().backward()
    assert torch.equal(a.grad, torch.full((1000,), 2.0))


def test_a_full_lease_is_an_error_of_the_forward_step(own_server):
    with rampool.connect(own_server.address, memory="4M") as pool:
        net, batch = model(), torch.randn(3000, 512)
        # PyTorch makes it a RuntimeError of its own, with the text.
        with pytest.raises((rampool.NoRoom, RuntimeError), match="no room"), offload(pool, over=0):
            net(batch)


PEAK = """
import os, resource, sys, torch, rampool
from rampool.torch import offload
torch.set_num_threads(1)
net = torch.nn.Sequential(*[m for _ in range(24) for m in (torch.nn.Linear(64, 64), torch.nn.Sigmoid())])
batch = torch.randn(64_000, 64)          # 15.6 MiB: 24 x 2 of these are saved, or 24 where they are the same
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pool = rampool.connect(os.environ["SERVER"], memory="900M")
if sys.argv[1] == "offload":
    with offload(pool):
        loss = net(batch).sum()
else:
    loss = net(batch).sum()
loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_the_peak_is_lower(server):
    def peak(how):
        environment = {**os.environ, "SERVER": server}
        words = [sys.executable, "-c", PEAK, how]
        return int(
            subprocess.run(words, env=environment, capture_output=True, check=True, timeout=300).stdout
        )

    plain, offloaded = peak("plain"), peak("offload")
    assert offloaded < plain * 0.6, (plain, offloaded)
