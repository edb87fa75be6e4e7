"""Writes files with extension types and empty row groups for the tests of internal/text/data.

    pip install pyarrow==26.0.1 datasets==5.2.0
    python scripts/oracle/logical.py

testdata/rows/logical.jsonl has the values that pyarrow and datasets give; empty-*.parquet have row groups without rows.
"""

import json
import pathlib
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = pathlib.Path(__file__).parents[2] / "internal/text/data/testdata/rows"

MESSAGES = [[{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the tide"}]] * 3
TOOLS = [
    [{"name": "f", "parameters": {"a": {"type": "integer", "default": None}, "n": 18446744073709551616}}],
    [{"name": "g", "parameters": {"b": ["x", 1.5, True]}}, {"name": "h", "parameters": {}}],
    None,
]
KEYS = [{"u": uuid.UUID(int=i), "b": i % 2 == 0, "n": 2**64 - 1 - i, "j": {"deep": [i]}} for i in range(3)]


def extension(kind, values, storage):
    return pa.ExtensionArray.from_storage(kind, pa.array(values, storage))


def tools(large):
    """Lists of structs with a field of type json, or of json alone."""
    flat = [t for row in TOOLS for t in row or []]
    offsets, at = [], 0
    for row in TOOLS:
        offsets.append(None if row is None else at)
        at += len(row or [])
    storage = pa.large_string() if large else pa.string()
    if large:
        items = extension(pa.json_(storage), [json.dumps(t) for t in flat], storage)
        return pa.LargeListArray.from_arrays(pa.array(offsets + [at], pa.int64()), items)
    parameters = extension(pa.json_(storage), [json.dumps(t["parameters"]) for t in flat], storage)
    items = pa.StructArray.from_arrays([pa.array([t["name"] for t in flat]).dictionary_encode(), parameters],
                                       fields=[pa.field("name", pa.dictionary(pa.int32(), pa.string())), pa.field("parameters", parameters.type)])
    return pa.ListArray.from_arrays(pa.array(offsets + [at], pa.int32()), items)


def table(large):
    kwargs = pa.StructArray.from_arrays(
        [extension(pa.uuid(), [k["u"].bytes for k in KEYS], pa.binary(16)),
         extension(pa.bool8(), [int(k["b"]) for k in KEYS], pa.int8()),
         pa.array([k["n"] for k in KEYS], pa.uint64()),
         extension(pa.json_(), [json.dumps(k["j"]) for k in KEYS], pa.string())],
        names=["u", "b", "n", "j"])
    return pa.table({"messages": pa.array(MESSAGES), "tools": tools(large), "chat_template_kwargs": kwargs})


def main():
    with open(ROWS / "logical.jsonl", "w") as f:
        for m, t, k in zip(MESSAGES, TOOLS, KEYS):
            row = {"messages": m, "chat_template_kwargs": {**k, "u": str(k["u"])}}
            f.write(json.dumps(row | ({"tools": t} if t is not None else {})) + "\n")
    for name, large in (("logical", False), ("logical-large", True)):
        t = table(large)
        with pa.OSFile(str(ROWS / f"{name}.arrow"), "wb") as f, pa.ipc.new_stream(f, t.schema) as w:
            w.write_table(t, max_chunksize=2)
        pq.write_table(t, ROWS / f"{name}.parquet", store_schema=not large)
    bad = pa.table({"messages": pa.array(MESSAGES), "tools": extension(pa.json_(), ['[1]', '[', '[]'], pa.string())})
    pq.write_table(bad, ROWS / "bad-json.parquet")
    with pa.OSFile(str(ROWS / "bad-json.arrow"), "wb") as f, pa.ipc.new_stream(f, bad.schema) as w:
        w.write_table(bad)
    long = pa.table({"text": ["a" * 999, "b" * 999, "c" * 999]})
    with pa.OSFile(str(ROWS / "zstd.arrow"), "wb") as f:
        with pa.ipc.new_stream(f, long.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as w:
            w.write_table(long)
    texts = pa.table({"text": ["one", "two", "three"], "id": [1, 2, 3]})
    for name, sizes in {"first": [0, 3], "middle": [0, 1, 0, 0, 2], "last": [2, 1, 0], "all": [0, 0]}.items():
        with pq.ParquetWriter(ROWS / f"empty-{name}.parquet", texts.schema) as w:
            at = 0
            for n in sizes:
                w.write_table(texts.slice(at, n))
                at += n


main()
