"""A sort larger than Spark's memory: spark_spills.py ROWS DIRECTORY. Prints the bytes spilled."""

import json
import sys
import urllib.request

from pyspark.sql import SparkSession

rows, at = int(sys.argv[1]), sys.argv[2]
options = {
    "spark.local.dir": at, "spark.driver.memory": "600m", "spark.memory.fraction": "0.2",
    "spark.driver.host": "127.0.0.1", "spark.ui.port": "0", "spark.sql.shuffle.partitions": "4",
    "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR",
}  # fmt: skip
spark = SparkSession.builder.master("local[2]").config(map=options).getOrCreate()
text = "repeat(sha1(string(id)), 4)"


def look(part):
    last, count, numbers, wrong = None, 0, 0, 0
    for key, number in part:
        wrong += last is not None and key < last
        last, count, numbers = key, count + 1, numbers + number
    yield last, count, numbers, wrong


spark.range(rows).selectExpr("id", "xxhash64(id) AS k", f"{text} AS s").orderBy("k").createTempView("t")
parts = spark.sql(f"SELECT k, IF(s = {text}, id, -1) FROM t").rdd.mapPartitions(look).collect()
lasts = [last for last, *_ in parts if last is not None]
found = [sum(part[number] for part in parts) for number in (1, 2, 3)]
if lasts != sorted(lasts) or found != [rows, rows * (rows - 1) // 2, 0]:
    sys.exit(f"rows, sum of their numbers, rows out of order: {found}; partitions end with {lasts}")
base = f"{spark.sparkContext.uiWebUrl}/api/v1/applications"
name = json.load(urllib.request.urlopen(base))[0]["id"]
print(sum(stage["diskBytesSpilled"] for stage in json.load(urllib.request.urlopen(f"{base}/{name}/stages"))))
spark.stop()
