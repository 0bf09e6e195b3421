"""SQLite in memory: rows, an index, random look-ups, a scan, an update, a sort that spills into memory."""
import hashlib
import random
import sqlite3
import sys

rows, lookups, seed = (int(a) for a in sys.argv[1:4])
db = sqlite3.connect(":memory:")
db.execute("pragma temp_store = memory")
db.execute("create table t (id integer primary key, k integer, name text, body blob)")


def body(i):
    return hashlib.shake_128(b"%d.%d" % (seed, i)).digest(120)


db.executemany(
    "insert into t values (?, ?, ?, ?)", ((i, i * 7919 % rows, f"name-{i:09d}", body(i)) for i in range(rows))
)
db.execute("create index t_k on t (k)")
rng, found = random.Random(seed), hashlib.sha256()
for _ in range(lookups):
    i = rng.randrange(rows)
    name, blob = db.execute("select name, body from t where id = ?", (i,)).fetchone()
    assert name == f"name-{i:09d}" and blob == body(i), i
    found.update(blob)
for _ in range(lookups // 10):
    k = rng.randrange(rows)
    for (i,) in db.execute("select id from t where k = ?", (k,)):
        assert i * 7919 % rows == k
        found.update(b"%d" % i)
scan = db.execute("select count(*), sum(k), sum(length(body)), max(name) from t").fetchone()
db.execute("update t set name = name || '!' where id % 3 = 0")
top = db.execute("select id, name from t order by body limit 50").fetchall()
assert db.execute("pragma integrity_check").fetchone() == ("ok",)
print("ok", scan, hashlib.sha256(repr(top).encode()).hexdigest(), found.hexdigest())
