#!/usr/bin/env python3
"""Writes the files of this directory with pyarrow and datasets, and expect.jsonl: their records, one a line.

Usage: python make.py (pyarrow 26, datasets 5.2)
"""
import json
import pathlib
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

here = pathlib.Path(__file__).parent
texts = ["The Light", "", "h\u00e9llo \u4e16\u754c \"quoted\"\n", "a longer text " * 20, "last"]
ids = [[1, 2, 3], [], [7], list(range(40)), [5, 4]]
labels = [[-100, 2, 3], [], [-100], [i if i % 2 else -100 for i in range(40)], None]
masks = [[0, 1, 1], [], None, [1] * 40, [0, 1]]
pads = [[1, 1, 0], [], [1], [1] * 30 + [0] * 10, None]


def save(name, table, chunk=2, **options):
    pq.write_table(table, here / f"{name}.parquet", **options)
    with pa.OSFile(str(here / f"{name}.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as w:
        w.write_table(table, max_chunksize=chunk)


def expect(name, rows):
    with open(here / f"{name}.jsonl", "w") as f:
        for row in rows:
            f.write(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n")


rows = [{"text": t} for t in texts]
expect("text", rows)
save("text", pa.table({"text": texts, "meta": [{"n": i, "tags": ["x", None]} for i in range(5)]}), compression="zstd")
large = pa.table({"text": pa.array(texts, pa.large_string())})
save("large", large, row_group_size=2, data_page_version="2.0", compression="snappy")
save("dictionary", pa.table({"text": pa.array(texts).dictionary_encode()}), compression="gzip")
save("view", pa.table({"text": pa.array(texts, pa.string_view())}), use_dictionary=False, compression="none")

rows = [dict(zip(["input_ids", "labels", "assistant_masks", "attention_mask"], r))
        for r in zip(ids, labels, masks, pads)]
expect("ids", rows)
types = {"input_ids": pa.int32(), "labels": pa.int64(), "assistant_masks": pa.int8(), "attention_mask": pa.uint8()}
columns = {k: [r[k] for r in rows] for k in types}
save("ids", pa.table({k: pa.array(columns[k], pa.list_(t)) for k, t in types.items()}), row_group_size=3)
save("large-ids", pa.table({k: pa.array(columns[k], pa.large_list(t)) for k, t in types.items()}), compression="brotli",
     column_encoding={"input_ids.list.element": "DELTA_BINARY_PACKED"}, use_dictionary=False)
many = [str(i) for i in range(100)]
expect("many", [{"text": t} for t in many])
save("many", pa.table({"text": many}), chunk=37, row_group_size=37)
pairs = [[1, 2], [3, 4], [5, 6]]
expect("fixed", [{"input_ids": p} for p in pairs])
save("fixed", pa.table({"input_ids": pa.array(pairs, pa.list_(pa.uint16(), 2))}))
# One column is null in each row: both kinds of record in one file.
both = [{"text": "words", "input_ids": None}, {"text": None, "input_ids": [1, 2]}]
expect("both", both)
save("both", pa.table({k: [r[k] for r in both] for k in ("text", "input_ids")}))
(here / "both.arrow").unlink()

for name in ("text", "ids"):
    path = here / f"{name}-dataset"
    shutil.rmtree(path, ignore_errors=True)
    data = datasets.Dataset.from_parquet(str(here / f"{name}.parquet"), cache_dir="/tmp/make-rows")
    data.save_to_disk(path, num_shards=2)
    (path / "dataset_info.json").write_text("{}\n")  # it names the machine's paths
shutil.rmtree("/tmp/make-rows")
for file in here.glob("*.arrow"):
    if file.stem not in ("large", "dictionary", "view", "large-ids", "fixed", "many"):
        file.unlink()

bad = {
    "null-id": pa.table({"input_ids": [[1, None, 2]]}),
    "float": pa.table({"input_ids": [[1.5]]}),
    "binary": pa.table({"text": pa.array([b"text"])}),
    "chosen": pa.table({"chosen": ["a"], "rejected": ["b"]}),
    "messages": pa.table({"messages": [[{"role": "user", "content": "hi"}]]}),
    "mask": pa.table({"text": ["a"], "my_mask": [[1]]}),
    "outside": pa.table({"input_ids": [[1], [1000]]}),
    "nested": pa.table({"input_ids": [[[1]]]}),
}
for name, table in bad.items():
    save(f"bad-{name}", table)
pq.write_table(pa.table({"text": ["a"]}), here / "bad-lz4.parquet", compression="lz4")
