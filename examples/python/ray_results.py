"""Ray: tasks that share an array at the memory servers, and leave large results in a store in the pool.

Ray's object store is this machine's shared memory, and what it spills goes to a disk: it has no hook for
anything
else. What lies in the pool takes no room there.

RAMPOOL_SERVERS names the memory servers. Needs ray.
"""

import numpy as np
import ray

import rampool


@ray.remote
def work(table, results, part):
    """Reads its rows where they lie, and keeps 8 MB of results."""
    rows = np.asarray(table[part * 250 : (part + 1) * 250])
    results[f"part {part}"] = np.outer(rows.sum(axis=1), np.ones(4000))
    return float(rows.sum())


if __name__ == "__main__":
    with rampool.connect(memory="256M") as pool:
        table = pool.remote("table", (1000, 100))
        table[...] = np.arange(100)
        results = pool.shared_store("results", keys=100)
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
        try:
            sums = ray.get([work.remote(table, results, part) for part in range(4)])
        finally:
            ray.shutdown()
        assert sums == [250 * sum(range(100))] * 4
        last = np.frombuffer(results["part 3"]).reshape(250, 4000)
        assert (last == sum(range(100))).all() and len(results) == 4
        print(f"{sum(map(len, results.values())) >> 20} MiB of results are in the pool")
