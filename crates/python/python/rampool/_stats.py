"""What came from where."""

from __future__ import annotations

import html
import os
import pathlib
from collections import Counter
from typing import Any

from rampool import _pool

__all__ = ["Picture", "Stats", "stats"]

_PAGE = 4096
_WIDTH, _ROW, _LEFT, _RIGHT = 640, 26, 190, 110
_COLOURS = ("#4c9f70", "#8fb8de", "#3b6ea8", "#c98a3a")


class Picture:
    """A drawing, which a notebook shows by itself."""

    def __init__(self, svg: str) -> None:
        self.svg = svg
        """The text of an SVG file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file, whose name ends in ``.svg``."""
        pathlib.Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg


class Stats(dict[str, Any]):
    """What :func:`stats` gives.

    ``paged``: counters of the paged arrays, by the names that ``rampool top`` uses; pages are of 4096 bytes.
    ``servers``: for each server its ``name``, and of arrays at the servers ``requests``, ``sent_bytes`` and
    ``received_bytes``.
    """

    def rows(self) -> list[tuple[str, int]]:
        """What :meth:`plot` draws: names, and bytes."""
        paged: dict[str, int] = self["paged"]
        rows = [
            ("pages: new, zero", paged.get("zero_filled_pages", 0) * _PAGE),
            ("pages: back from eviction", paged.get("second_chance_pages", 0) * _PAGE),
            ("pages: fetched ahead", paged.get("prefetched_pages", 0) * _PAGE),
            ("pages: waited for", paged.get("demand_pages", 0) * _PAGE),
            ("pages: written back", paged.get("written_back_pages", 0) * _PAGE),
        ]
        for server in self["servers"]:
            rows.append((f"received from {server['name']}", server["received_bytes"]))
            rows.append((f"sent to {server['name']}", server["sent_bytes"]))
        return rows

    def plot(self) -> Picture:
        """Draws where bytes came from and went to, as bars: paged arrays above, arrays at the servers below.

        >>> with connect(SERVERS, memory="16M", local="1M") as pool:
        ...     total = pool.remote(None, 1000)[:].sum()
        ...     print(rampool.stats().plot().svg[:4])
        <svg
        """
        rows = self.rows()
        most = max([1, *(nbytes for _, nbytes in rows)])
        lines = []
        for number, (name, nbytes) in enumerate(rows):
            top = 8 + number * _ROW
            width = (_WIDTH - _LEFT - _RIGHT) * nbytes / most
            colour = _COLOURS[min(number, 3) if number < 5 else number % 2]
            short = name if len(name) <= 28 else f"{name[:13]}...{name[-12:]}"
            lines.append(
                f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{html.escape(short)}</text>'
                f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_ROW - 8}" fill="{colour}"/>'
                f'<text x="{_LEFT + width + 6:.1f}" y="{top + 14}">{_amount(nbytes)}</text>'
            )
        height = 16 + len(rows) * _ROW
        return Picture(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">'
            f"{''.join(lines)}</svg>"
        )


def _amount(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes} B"
        nbytes /= 1024  # type: ignore[assignment]
    return f"{nbytes:.4g} GiB"


def stats() -> Stats:
    """Counters of all open pools of this process, since each was opened.

    >>> import rampool
    >>> with connect(SERVERS, memory="16M") as pool:
    ...     pool.remote(None, 8)[:] = 1
    ...     rampool.stats()["servers"][0]["sent_bytes"] >= 64
    True
    """
    paged: Counter[str] = Counter()
    servers: dict[str, dict[str, Any]] = {}
    for pool in list(_pool._open):
        paged.update(pool.stats())
        for each in pool.servers():
            known = servers.setdefault(
                each["name"], {"name": each["name"], "requests": 0, "sent_bytes": 0, "received_bytes": 0}
            )
            for name in ("requests", "sent_bytes", "received_bytes"):
                known[name] += each[name]
    for name in ("pid", "state"):
        paged.pop(name, None)
    return Stats(paged=dict(paged), servers=list(servers.values()))
