"""PyTorch's saved activations in the pool: ``with rampool.torch.offload(pool): loss = model(x).sum()``.

Autograd keeps tensors of the forward step for the backward step. Within the block, large ones lie at the
memory servers in between, and come back in reverse order, one ahead of the backward step. The gradients are
the same, bit by bit. Needs PyTorch 1.13 or later.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore[import-not-found, unused-ignore]

from rampool._pool import Pool
from rampool._store import Store

__all__ = ["Offloaded", "offload"]


class Offloaded:
    """What :func:`offload` has in the pool."""

    def __init__(self, store: Store, over: int, ahead: int) -> None:
        self._store, self._over, self._ahead = store, over, ahead
        self._numbers = itertools.count()
        # Tensors in the pool by their numbers, which rise with the forward step.
        self._live: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        # A tensor that two operations save travels once.
        self._same: weakref.WeakValueDictionary[Any, _Saved] = weakref.WeakValueDictionary()
        self.nbytes_saved = 0
        """Bytes that went to the pool since the beginning."""

    @property
    def nbytes(self) -> int:
        """Bytes in the pool."""
        return self._store.nbytes

    def _pack(self, tensor: torch.Tensor) -> Any:
        nbytes = tensor.numel() * tensor.element_size()
        # Parameters stay in any case: to move them frees nothing.
        if nbytes < self._over or (tensor.is_leaf and tensor.requires_grad) or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
        place = StorageWeakRef(storage)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        name = (place.cdata, tensor.storage_offset(), shape, stride, tensor.dtype, tensor._version)
        saved = self._same.get(name)
        # Another tensor may lie where one lay that is gone.
        if saved is not None and not saved.place.expired():
            return saved
        saved = _Saved(self, next(self._numbers), place, tensor)
        self._live[saved.number] = self._same[name] = saved
        self.nbytes_saved += nbytes
        return saved

    @staticmethod
    def _unpack(saved: Any) -> torch.Tensor:
        return saved.fetch() if isinstance(saved, _Saved) else saved

    def _prefetch(self, number: int) -> None:
        """What was saved just before is wanted next."""
        live = (self._live.get(before) for before in range(number - 1, max(number - 9, -1), -1))
        for saved in itertools.islice((saved for saved in live if saved is not None), self._ahead):
            saved.start()


class _Saved:
    """A tensor that lies in the pool, until autograd lets go of it."""

    def __init__(self, owner: Offloaded, number: int, place: StorageWeakRef, tensor: torch.Tensor) -> None:
        self.number, self.place = number, place
        self._owner, self._key = owner, f"{id(owner)}-{number}"
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._value: Any = None
        here = tensor.detach().cpu().contiguous().reshape(-1)
        owner._store[self._key] = here.view(torch.uint8).numpy()

    def start(self) -> None:
        if self._value is None:
            self._value = self._owner._store._native.start_get(self._key.encode())

    def fetch(self) -> torch.Tensor:
        self.start()
        value, self._value = self._value, None
        self._owner._prefetch(self.number)
        bytes_here = torch.frombuffer(memoryview(value.take()), dtype=torch.uint8)
        return bytes_here.view(self._dtype).reshape(self._shape).to(self._device)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            del self._owner._store[self._key]


def _free_at_once(nbytes: int) -> None:
    """From now on the C library gives freed blocks of so many bytes back to the system at once. As it comes,
    it keeps them once a first one was freed; and glibc before 2.38 finds no use for an aligned block that it
    keeps, so that memory of tensors that are in the pool would stay here."""
    with contextlib.suppress(AttributeError, OSError):
        # M_MMAP_THRESHOLD; its greatest value is 32 MiB.
        ctypes.CDLL(None).mallopt(-3, min(max(nbytes, 128 << 10), 32 << 20))


@contextlib.contextmanager
def offload(pool: Pool, over: int = 1 << 20, ahead: int = 1) -> Iterator[Offloaded]:
    """Within the block, tensors that autograd saves lie in the pool until the backward step wants them.

    The backward step may come after the block. A tensor on a GPU goes through this machine's memory and comes
    back to its GPU. Tensors of another layout than strided, and parameters, stay where they are. A saved
    tensor comes back contiguous. For the whole process, the C library from now on gives freed blocks of
    ``over`` bytes back to the system at once (mallopt's M_MMAP_THRESHOLD).

    Args:
        pool: where they lie.
        over: tensors of fewer bytes stay.
        ahead: how many are brought back before the backward step asks for them; each takes local memory.

    Raises:
        rampool.NoRoom: from the forward step, when the lease is full; some versions of PyTorch raise a
            RuntimeError with its text instead.

    >>> pool = connect(SERVERS, memory="64M")  # doctest: +SKIP
    >>> with offload(pool) as offloaded:  # doctest: +SKIP
    ...     loss = model(batch).sum()
    >>> loss.backward()  # doctest: +SKIP
    """
    offloaded = Offloaded(pool.store(), over, ahead)
    _free_at_once(over)
    with torch.autograd.graph.saved_tensors_hooks(offloaded._pack, offloaded._unpack):
        yield offloaded
