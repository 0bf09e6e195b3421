"""PyTorch: activations that lie in the pool between the forward and the backward step.

RAMPOOL_SERVERS names the memory servers. Needs rampool[torch].
"""

import torch

import rampool
import rampool.torch

torch.manual_seed(1)
net = torch.nn.Sequential(
    *[layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
)
batch = torch.randn(4000, 256)


def gradient(loss):
    net.zero_grad()
    loss.backward()
    return net[0].weight.grad.clone()


plain = gradient(net(batch).square().mean())
with rampool.connect(memory="256M") as pool:
    with rampool.torch.offload(pool, over=1 << 20) as offloaded:
        loss = net(batch).square().mean()
    held = offloaded.nbytes
    assert held > 20 << 20
    assert torch.equal(gradient(loss), plain), "the same, bit by bit"
    print(f"{held >> 20} MiB of activations were in the pool")
