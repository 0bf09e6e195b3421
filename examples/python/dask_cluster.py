"""Dask: workers that read an array at the memory servers and write another, and spill to the pool.

RAMPOOL_SERVERS names the memory servers. Needs rampool[dask] and dask[array].
"""

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

import rampool
import rampool.dask

if __name__ == "__main__":
    with rampool.connect(memory="64M") as pool:
        table = pool.remote("table", (1000, 1000))
        table[...] = np.arange(1000)
        result = pool.remote("result", (1000, 1000))
        # What a worker has no room for goes to a lease of its own.
        data = rampool.dask.spill(memory="64M", target="64MiB")
        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, memory_limit="1GiB", dashboard_address=None, data=data
            ) as cluster,
            Client(cluster),
        ):
            # Handles travel to the workers; blocks go between them and the memory servers.
            blocks = rampool.dask.from_array(table, chunks=(100, 1000))
            da.store(blocks * 2 + 1, result, lock=False)
            total = float(blocks.sum().compute())
        assert total == 1000 * sum(range(1000))
        assert result.sum() == 2 * total + 1_000_000
        print(f"sum {total:.0f}, and of the result {float(result.sum()):.0f}")
