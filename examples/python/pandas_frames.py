"""pandas: a frame whose columns lie in the pool, and one in a Parquet file in the pool.

RAMPOOL_SERVERS names the memory servers. Needs pandas, pyarrow and rampool[fsspec].
"""

import numpy as np
import pandas as pd

import rampool
import rampool.fsspec  # noqa: F401

with rampool.connect(memory="256M", local="8M") as pool:
    # Columns on paged memory: at most 8 MiB of these 32 are in this machine's RAM. Without `copy=False`
    # pandas
    # would make columns of its own.
    rows = 1_000_000
    columns = {
        name: pool.empty(rows, kind)
        for name, kind in [("day", "i8"), ("shop", "i8"), ("sold", "f8"), ("price", "f8")]
    }
    columns["day"][:] = np.arange(rows) % 365
    columns["shop"][:] = np.arange(rows) % 7
    columns["sold"][:] = 1
    columns["price"][:] = np.arange(rows) % 10
    frame = pd.DataFrame(columns, copy=False)
    by_shop = frame.groupby("shop")["sold"].sum()
    assert by_shop.tolist() == [142_858.0] + [142_857.0] * 6

    # A file that is read by columns. It is this process's alone.
    where = {"storage_options": {"pool": pool}}
    frame.to_parquet("rampool://sales.parquet", **where)
    prices = pd.read_parquet("rampool://sales.parquet", columns=["price"], **where)
    assert prices["price"].sum() == 4.5 * rows
    print(f"{rows} rows, sold {by_shop.sum():.0f}, mean price {prices['price'].mean():.1f}")
    del frame, columns, by_shop
