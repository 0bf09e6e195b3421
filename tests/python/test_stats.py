"""What came from where."""

import xml.etree.ElementTree as xml

import numpy as np

import rampool


def test_a_picture_of_what_came_from_where(pool, tmp_path):
    t = pool.remote(None, 100_000)
    t[:] = np.ones(100_000)
    before = rampool.stats()
    assert np.asarray(t).sum() == 100_000
    a = pool.empty(1_000_000)  # 8 MB, of which 2 MiB may be here
    a += 1
    assert a.sum() == 1_000_000
    after = rampool.stats()
    name = pool.servers()[0]["name"]
    received = lambda stats: next(each for each in stats["servers"] if each["name"] == name)["received_bytes"]
    assert received(after) - received(before) >= 800_000
    rows = dict(after.rows())
    assert (
        rows["pages: written back"] >= 4_000_000
        and rows["pages: waited for"] + rows["pages: fetched ahead"] > 0
    )
    after.plot().save(tmp_path / "picture.svg")
    drawn = xml.parse(tmp_path / "picture.svg").getroot()
    bars = [each for each in drawn if each.tag.endswith("rect")]
    assert len(bars) == len(after.rows())
    widths = {name: float(bar.get("width")) for (name, _), bar in zip(after.rows(), bars, strict=True)}
    most = max(rows, key=rows.get)
    assert widths[most] == max(widths.values()) > 0
    assert widths["pages: written back"] / widths[most] - rows["pages: written back"] / rows[most] < 0.01


def test_without_a_pool_there_is_nothing():
    assert rampool.stats().plot().svg.startswith("<svg")
