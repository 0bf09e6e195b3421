"""DuckDB: a sort of more than its memory limit, which spills to the pool.

RAMPOOL_SERVERS names the memory servers. Needs rampool[duckdb].
"""

import duckdb

import rampool
import rampool.fsspec

with rampool.connect(memory="1G") as pool:
    connection = duckdb.connect()
    connection.register_filesystem(rampool.fsspec.filesystem(pool))
    connection.execute("SET memory_limit = '100MB'; SET threads = 2; SET temp_directory = 'rampool://spill'")
    rows = 8_000_000
    ordered = (
        f"SELECT i, h, lag(h) OVER (ORDER BY h) AS before FROM (SELECT i, hash(i) AS h FROM range({rows}) "
        "r(i))"
    )
    count, wrong = connection.execute(
        f"SELECT count(*), count(*) FILTER (before > h) FROM ({ordered})"
    ).fetchone()
    assert (count, wrong) == (rows, 0)
    spilled = sum(server["sent_bytes"] for server in pool.servers())
    assert spilled > 10 << 20, "nothing was spilled"
    connection.close()
    print(f"sorted {count} rows with 100 MB, {spilled >> 20} MiB went to the pool")
