"""A database in memory: fills a table, scans it, groups it, looks rows up at random. Prints what it found;
the same arguments give the same answers."""

import random
import sqlite3
import sys

rows, lookups = int(sys.argv[1]), int(sys.argv[2])
random.seed(7)
db = sqlite3.connect(":memory:")
db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, cents INTEGER, note BLOB)")
db.executemany(
    "INSERT INTO orders VALUES (?, ?, ?, ?)",
    ((i, random.randrange(1000), random.randrange(100_000), random.randbytes(400)) for i in range(rows)),
)
print("rows, cents", *db.execute("SELECT count(*), sum(cents) FROM orders").fetchone())
print("bytes of notes", *db.execute("SELECT sum(length(note)) FROM orders").fetchone())
for customer, cents in db.execute(
    "SELECT customer, sum(cents) AS all_cents FROM orders GROUP BY customer ORDER BY all_cents DESC, "
    "customer LIMIT 3"
):
    print("customer", customer, "cents", cents)
found = 0
for _ in range(lookups):
    cents, note = db.execute(
        "SELECT cents, note FROM orders WHERE id = ?", (random.randrange(rows),)
    ).fetchone()
    found = (found * 31 + cents + note[cents % 400]) % (1 << 61)
print("look-ups", lookups, "checksum", found)
