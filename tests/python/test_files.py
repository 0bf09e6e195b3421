"""Libraries that read and write files through the pool's filesystem."""

import numpy as np
import pytest

import rampool

pytest.importorskip("fsspec")

# Without an installed package its entry point is not there.
import rampool.fsspec  # noqa: E402, F401


def test_filesystems_of_a_pool_have_the_same_files(pool, server):
    import fsspec

    from rampool.fsspec import filesystem

    with fsspec.open("rampool://shared/a.txt", "w", pool=pool) as file:
        file.write("words")
    assert filesystem(pool).cat("shared/a.txt") == b"words"
    assert fsspec.filesystem("rampool", pool=pool).find("shared") == ["shared/a.txt"]
    with rampool.connect(server, memory="16M") as other:
        assert filesystem(other).ls("", detail=False) == []
    with pytest.raises(TypeError, match="this process's alone"):
        import pickle

        pickle.dumps(filesystem(pool))
    with pytest.raises(FileNotFoundError):
        filesystem(pool).open("none")


def test_threads_write_and_read_on_from_where_others_were(pool):
    from concurrent.futures import ThreadPoolExecutor

    from rampool.fsspec import filesystem

    parts = [bytes([n]) * 1000 for n in range(40)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other, filesystem(pool).open(
        "turns", "wb+"
    ) as file:
        for n, part in enumerate(parts):
            (one if n % 2 else other).submit(file.write, part).result()
        one.submit(file.seek, 0).result()
        other.submit(file.seek, 0).result()
        assert one.submit(file.read, 1000).result() == parts[0]
        other.submit(file.seek, 1000).result()
        assert [(one if n % 3 else other).submit(file.read, 1000).result() for n in range(39)] == parts[1:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "feather", "csv", "pickle"])
def test_pandas_writes_and_reads(pool, kind):
    pd = pytest.importorskip("pandas")
    if kind in ("parquet", "feather"):
        pytest.importorskip("pyarrow")
    frame = pd.DataFrame(
        {"a": np.arange(100_000), "b": np.random.default_rng(1).random(100_000), "c": ["x", "y"] * 50_000}
    )
    where, options = f"rampool://frames/f.{kind}", {"storage_options": {"pool": pool}}
    index = {"index": False} if kind == "csv" else {}
    getattr(frame, f"to_{kind}")(where, **options, **index)
    again = getattr(pd, f"read_{kind}")(where, **options)
    pd.testing.assert_frame_equal(frame, again)
    if kind == "parquet":
        assert pd.read_parquet(where, columns=["b"], **options).shape == (100_000, 1)
        frame.to_parquet("rampool://frames/parted", partition_cols=["c"], **options)
        assert len(pd.read_parquet("rampool://frames/parted", **options)) == 100_000


@pytest.mark.slow
def test_zarr_has_its_chunks_in_the_pool(pool):
    zarr = pytest.importorskip("zarr")
    from rampool.fsspec import filesystem

    store = zarr.storage.FsspecStore.from_url("rampool://cubes", storage_options={"pool": pool})
    here = np.random.default_rng(2).random((200, 300))
    group = zarr.open_group(store, mode="w")
    array = group.create_array("a", shape=here.shape, chunks=(50, 100), dtype=here.dtype)
    array[:] = here
    array[10:20, ::3] = 7
    here[10:20, ::3] = 7
    again = zarr.open_group(store, mode="r")
    np.testing.assert_array_equal(again["a"][:], here)
    np.testing.assert_array_equal(again["a"][5:15, 290:], here[5:15, 290:])
    assert list(again.array_keys()) == ["a"]
    assert len(filesystem(pool).find("cubes/a/c")) == 12
    group.create_array("b", shape=(3,), chunks=(3,), dtype="i4")
    del group["a"]
    assert sorted(zarr.open_group(store, mode="r").array_keys()) == ["b"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::rampool.FetchWarning")
def test_xarray(pool):
    xr = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    import zarr

    here = np.random.default_rng(3).random((24, 10, 5))
    there = pool.remote(None, here.shape)
    there[...] = here
    array = xr.DataArray(there, dims=("time", "y", "x"), coords={"time": np.arange(24)})
    np.testing.assert_allclose(array.sel(time=5), here[5])
    np.testing.assert_allclose(array.mean("time"), here.mean(0))
    np.testing.assert_allclose(array.isel(time=slice(None, None, 4)).sum(), here[::4].sum())
    np.testing.assert_allclose((array * 2 + 1).max("x"), (here * 2 + 1).max(2))
    np.testing.assert_allclose(array.where(array > 0.5).sum(), here[here > 0.5].sum())
    store = zarr.storage.FsspecStore.from_url("rampool://set", storage_options={"pool": pool})
    array.to_dataset(name="v").to_zarr(store, mode="w", consolidated=False)
    again = xr.open_zarr(store, consolidated=False)
    np.testing.assert_allclose(again["v"], here)
