"""Every reader of the library, valid files of its kind, and the ways to damage them, for `test_fuzz.py`.

`python tests/library/fuzzing.py EXTRA FOLDER READER...` runs in a process of its own and prints a line of JSON before
each file, so that a crash can be attributed, and one after it.
"""

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save_file

import ega.cli
from ega import estimator
from ega.data import arrays, datasets, embed, encoders, packs, vectors
from ega.data.arrays import InputError, normalize
from ega.data.files import hash_arrays, read_json
from ega.deploy import index, monitor, stores, transform
from ega.experiments import cli as paper_cli
from ega.experiments import grids, runs
from ega.method import training
from ega.method.adapters import LinearAdapter, LoRAAdapter, load_adapter, save_adapter
from ega.method.config import config_to_dict, parse_config
from ega.pairs import PairAdapter

SECONDS, MEGABYTES, ROOM = (
    10,
    800,
    6 * 2**30,
)  # of one file: wall time, growth of the resident memory, address space beyond the start
N, D = 60, 6


class Payload:
    "Unpickled, it leaves a mark."

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def rows(n=N, d=D, seed=0):
    return normalize(np.random.default_rng(seed).normal(size=(n, d)))


def labels(n=N):
    return np.arange(n) % 12


def digest(*arrays):
    return hash_arrays(*(np.asarray(a) for a in arrays))


def packed(n=N):
    return packs.EmbeddingSet(
        rows(n), labels(n), split=np.where(np.arange(n) % 3, "train", "test"), meta={"set": "toy", "encoder": "noise"}
    )


# -- what is done to any file ------------------------------------------------------------------------------


def foreign(folder):
    "Whole files of other kinds, under any name."
    x, bytes_ = rows(5), {}

    def kept(name, write):
        with tempfile.TemporaryDirectory() as t:
            write(Path(t) / name)
            bytes_[name] = (Path(t) / name).read_bytes()

    kept("a.npy", lambda p: np.save(p, x))
    kept("a.npz", lambda p: np.savez(p, x=x))
    kept("a.safetensors", lambda p: save_file({"x": x}, p))
    kept("a.parquet", lambda p: pq.write_table(pa.table({"a": [1, 2]}), p))
    kept("a.pt", lambda p: torch.save({"x": Payload(folder / "MARK")}, p))
    kept("a.pkl", lambda p: p.write_bytes(pickle.dumps(Payload(folder / "MARK"))))
    return bytes_ | {
        "a.json": b'{"a": [1, {"b": null}]}',
        "a.csv": b"a,b\n1,2\n",
        "a.html": b"<html><script>1</script></html>\n",
        "noise": np.random.default_rng(7).bytes(3000),
    }


def damages(good, folder, extra):
    "Name -> bytes: cut, flipped, overwritten, lengthened, exchanged."
    rng, n = np.random.default_rng(zlib.crc32(good[:64]) % 2**16), len(good)
    out = {f"cut {i}/8": good[: n * i // 8] for i in range(8)} | {
        "cut to 1": good[:1],
        "cut to 8": good[:8],
        "cut by 1": good[:-1],
        "cut by 8": good[:-8],
        "and a byte": good + b"\0",
        "twice": good + good,
    }

    def put(at, piece):
        b = bytearray(good)
        b[at : at + len(piece)] = piece[: max(0, n - at)]
        return bytes(b)

    for i in range(16 * extra):
        at = int(rng.integers(n))
        out[f"bit {i}"] = put(at, bytes([good[at] ^ 1 << int(rng.integers(8))]))
    for i in range(12 * extra):
        at = int(rng.integers(min(n, 64)))
        out[f"bit of the head {i}"] = put(at, bytes([good[at] ^ 1 << int(rng.integers(8))]))
    for i in range(12 * extra):
        at = n - 1 - int(rng.integers(min(n, 256)))
        out[f"bit of the tail {i}"] = put(at, bytes([good[at] ^ 1 << int(rng.integers(8))]))
    for i in range(4 * extra):
        at = int(rng.integers(n))
        out[f"zeros {i}"], out[f"ones {i}"] = put(at, bytes(16)), put(at, b"\xff" * 16)
    for i, at in enumerate((0, 4, 8)):
        out[f"large number {i}"] = put(at, struct.pack("<Q", 2**63))
    return out | {f"exchanged for {name}": b for name, b in foreign(folder).items()}


def places(path):
    "Name -> function of the path: what else can lie where a file is expected."

    def fifo(p):
        os.mkfifo(p)

    return {
        "a folder": lambda p: p.mkdir(),
        "a dangling link": lambda p: p.symlink_to("nowhere"),
        "a link to itself": lambda p: p.symlink_to(p.name),
        "a pipe": fifo,
        "an endless device": lambda p: p.symlink_to("/dev/zero"),
        "nothing": lambda p: None,
    }


WORDS = (None, True, -1, 1.5, 10**30, "../../x", "", [], {}, [[1], 2], float("nan"))


def spoiled(value, depth=3):
    "Every variant of a JSON value with one part exchanged for something of another kind or left out."
    yield from WORDS
    if depth and isinstance(value, dict):
        for k in value:
            yield {a: b for a, b in value.items() if a != k}
        yield value | {"a key of nobody": 1}
        for k in value:
            for v in spoiled(value[k], depth - 1):
                yield value | {k: v}
    if depth and isinstance(value, list) and value:
        for v in spoiled(value[0], depth - 1):
            yield [v, *value[1:]]
        yield value[1:]


def spoiled_text(good):
    "The same as bytes, and texts that are no JSON."
    value = json.loads(good)
    out = {f"part {i}": json.dumps(v).encode() for i, v in enumerate(spoiled(value))}
    return out | {
        "deep": b"[" * 10**5,
        "deep and shut": b'{"a":' * 10**4 + b"1" + b"}" * 10**4,
        "a number of 9,999 digits": b'{"a": ' + b"9" * 9999 + b"}",
        "latin": '{"ä": 1}'.encode("latin1"),
        "UTF-16": good.decode().encode("utf-16"),
        "a mark": b"\xef\xbb\xbf" + good,
        "zeros": bytes(100),
    }


def hostile_npy(folder):
    "Headers that lie."

    def header(text, version=1):
        h = text.encode() + b" " * (-(10 + len(text) + 1) % 64) + b"\n"
        return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(h)) + h

    body = rows().tobytes()

    def say(shape, descr="'<f4'", order="False"):
        return header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}") + body

    objects = io.BytesIO()
    np.save(objects, np.array([Payload(folder / "MARK")], object), allow_pickle=True)
    return {
        "objects": objects.getvalue(),
        "objects said": say("(1,)", "'|O'"),
        "2**62 rows": say(f"({2**62}, 6)"),
        "an overflow": say(f"({2**33}, {2**33})"),
        "10**11 rows": say("(100000000000,)"),
        "10**9 rows": say("(1000000000, 6)"),
        "negative": say("(-60, 6)"),
        "no shape": say("()"),
        "floats in the shape": say("(60., 6)"),
        "a name in the shape": say("(n, 6)"),
        "code": say("(60, 6)", "__import__('os').system('touch MARK')"),
        "structure": say("(60,)", "[('a', '<f4', (6,))]"),
        "text": say("(1, 1)", f"'<U{2**28}'"),
        "times": say("(60, 6)", "'<m8[s]'"),
        "void": say("(60, 6)", "'|V4'"),
        "deep": header("(" * 9000),
        "a head of 64 KB": b"\x93NUMPY\x01\x00\xff\xff" + body,
        "version 2 of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + body,
        "version 9": b"\x93NUMPY\x09\x00" + body,
        "an order of nobody": say("(60, 6)", order="7"),
    }


def archive(**members):
    "A deflated .zip with these members."
    f = io.BytesIO()
    with zipfile.ZipFile(f, "w", zipfile.ZIP_DEFLATED) as z:
        for name, b in members.items():
            z.writestr(name, b)
    return f.getvalue()


def bomb(mb=600):
    "A .npy member that unfolds a thousandfold."
    f = io.BytesIO()
    with zipfile.ZipFile(f, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z:
        with z.open("x.npy", "w", force_zip64=True) as m:
            np.lib.format.write_array_header_1_0(
                m, {"descr": "<f4", "fortran_order": False, "shape": (mb * 2**18 // 6, 6)}
            )
            for _ in range(mb):
                m.write(bytes(mb * 2**18 // 6 * 24 // mb))
    return f.getvalue()


def hostile_npz(good, folder):
    "Archives whose members lie, climb, unfold or would be unpickled."
    with zipfile.ZipFile(io.BytesIO(good)) as z:
        members = {n: z.read(n) for n in z.namelist()}
    out = {
        f"{what} in {name}": archive(**(members | {name: b}))
        for name in members
        for what, b in hostile_npy(folder).items()
    }
    out |= {f"without {name}": archive(**{k: v for k, v in members.items() if k != name}) for name in members}
    out |= {
        f"{name} of other length": archive(
            **(members | {name: io.BytesIO() and _npy(np.load(io.BytesIO(members[name]))[:-1])})
        )
        for name in members
        if np.load(io.BytesIO(members[name])).ndim
    }
    out |= {
        f"{name} of one dimension more": archive(**(members | {name: _npy(np.load(io.BytesIO(members[name]))[None])}))
        for name in members
    }
    out |= {
        f"{name} as text": archive(**(members | {name: _npy(np.load(io.BytesIO(members[name])).astype("U40"))}))
        for name in members
    }
    sealed = bytearray(good)
    i = good.index(b"PK\x01\x02")
    sealed[i + 8] |= 1
    sealed[6] |= 1
    method = bytearray(good)
    method[8] = method[i + 10] = 99
    size = bytearray(good)
    size[i + 24 : i + 28] = struct.pack("<I", 2**31)
    return out | {
        "a climbing member": archive(**(members | {"../../MARK": b"1"})),
        "encrypted": bytes(sealed),
        "a method of nobody": bytes(method),
        "a size of 2 GB": bytes(size),
    }


def _npy(a):
    f = io.BytesIO()
    np.save(f, a)
    return f.getvalue()


def hostile_safetensors(good, folder):
    "Heads that lie."
    (n,) = struct.unpack("<Q", good[:8])
    head, body = json.loads(good[8 : 8 + n]), good[8 + n :]
    name = next(k for k in head if k != "__metadata__")

    def made(h, length=None, b=body):
        t = h if isinstance(h, bytes) else json.dumps(h).encode()
        return struct.pack("<Q", len(t) if length is None else length) + t + b

    def other(**change):
        return made(head | {name: head[name] | change})

    out = {f"a head of {v}": made(head, v) for v in (0, 1, 2**20, 2**31, 2**62, 2**63, 2**64 - 1)}
    out |= {
        "deep": made(b"[" * 10**5),
        "no JSON": made(b"{'a': 1}"),
        "no metadata": made({k: v for k, v in head.items() if k != "__metadata__"}),
        "metadata a list": made(head | {"__metadata__": [1]}),
        "metadata of numbers": made(head | {"__metadata__": {"ega": 3}}),
        "metadata no JSON": made(head | {"__metadata__": {"ega": "{"}}),
        "metadata deep": made(head | {"__metadata__": {"ega": "[" * 10**5}}),
        "nothing inside": made({"__metadata__": head.get("__metadata__", {})}, b=b""),
        "shape too large": other(shape=[2**40, 2**40]),
        "negative shape": other(shape=[-1]),
        "offsets beyond": other(data_offsets=[0, 2**40]),
        "offsets backwards": other(data_offsets=[8, 0]),
        "a dtype of nobody": other(dtype="Q7"),
        "another tensor": made(head | {"more": head[name]}),
    }
    size = {"F32": 4, "F64": 8, "U8": 1, "I64": 8}[head[name]["dtype"]]
    for dtype, width in (
        ("BOOL", 1),
        ("I32", 4),
        ("BF16", 2),
        ("F16", 2),
        ("F8_E4M3", 1),
        ("F8_E5M2", 1),
        ("C64", 8),
        ("U64", 8),
    ):
        if head[name]["shape"] and head[name]["shape"][-1] * size % width == 0:
            out[f"read as {dtype}"] = other(
                dtype=dtype, shape=[*head[name]["shape"][:-1], head[name]["shape"][-1] * size // width]
            )
    if "ega" in head.get("__metadata__", {}):
        for i, v in enumerate(spoiled(json.loads(head["__metadata__"]["ega"]))):
            out[f"description {i}"] = made(head | {"__metadata__": {"ega": json.dumps(v)}})
    return out


def unfolding(columns, n=40_000_000, store_schema=True):
    "A Parquet file of a few hundred kilobytes that repeats one value n times; texts decode without its Arrow schema."
    f, w = io.BytesIO(), None
    for _ in range(n // 10**6):
        t = pa.table(
            {
                k: pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int32)), pa.array([v]))
                if not isinstance(v, list)
                else pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(10**6 * len(v), np.float32)), len(v))
                for k, v in columns.items()
            }
        )
        w = w or pq.ParquetWriter(f, t.schema, compression="zstd", store_schema=store_schema)
        w.write_table(t)
    w.close()
    return f.getvalue()


def hostile_parquet(good, folder):
    "Tables whose description lies, that unfold, or that would once have been unpickled."
    t, f = pq.read_table(io.BytesIO(good)), io.BytesIO

    def written(table):
        b = f()
        pq.write_table(table, b)
        return b.getvalue()

    mark, schema = folder / "MARK", t.schema
    field = pa.field(
        schema.names[0],
        schema.field(0).type,
        metadata={
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickle.dumps(Payload(mark)),
        },
    )
    out = {
        "a pickled extension": written(t.cast(schema.set(0, field))),
        "a pickled description": written(
            t.replace_schema_metadata({"ega": pickle.dumps(Payload(mark)), "pandas": pickle.dumps(Payload(mark))})
        ),
        "a length of 2 GB": good[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
    }
    out |= {f"without {k}": written(t.drop_columns([k])) for k in t.schema.names if len(t.schema.names) > 1}
    out |= (
        {f"{k} as text": written(t.set_column(i, k, pa.array(["x"] * len(t)))) for i, k in enumerate(t.schema.names)}
        | {f"{k} null": written(t.set_column(i, k, pa.nulls(len(t)))) for i, k in enumerate(t.schema.names)}
        | {"no rows": written(t[:0])}
    )
    if b"ega" in (schema.metadata or {}):
        for i, v in enumerate(spoiled(json.loads(schema.metadata[b"ega"]), 2)):
            out[f"description {i}"] = written(t.replace_schema_metadata({"ega": json.dumps(v)}))
    return out


def hostile_csv(folder):
    return {
        "nothing": b"",
        "a line": b"\n",
        "zeros": bytes(200),
        "a quote that stays open": b'label\n"a' + b"x" * 1000,
        "a field of 10 MB": b"label\n" + b"x" * 10**7,
        "two names": b"label,label\na,b\n",
        "no names": b",\na,b\n",
        "superscripts": "label\n²\n".encode(),
        "two signs": b"label\n--5\n",
        "a number of 40 digits": b"label\n" + b"1" * 40 + b"\n",
        "latin": "label\nä\n".encode("latin1"),
        "UTF-16": "label\na\n".encode("utf-16"),
        "ragged": b"label,b\n1\n1,2,3\n",
        "carriage returns": b"label\ra\rb\r",
        "a million columns": b"a," * 10**6 + b"\n",
    }


# -- the readers -------------------------------------------------------------------------------------------

Reader = namedtuple("Reader", "make read strict step", defaults=(False, 1))
# make: folder -> names of files; read: folder -> a value; strict: an accepted file must give the valid value;
# step: every step-th damage is tried
READERS = {}


def command(*argv):
    "A command as a reader: its complaint is one line and exit code 2; anything else it prints is its value."

    def read(folder):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder):
            program = paper_cli if argv[0] in ("rerun", "reproduce") else ega.cli
            code = program.main([a.format(folder=folder) for a in argv])
        if code == 0:
            return "0"
        said = err.getvalue().strip()
        if code == 1 and said.startswith("ega-paper: LP differs") and "\n" not in said:
            return said  # what rerun is for
        if code != 2 or "\n" in said or not said.startswith(("ega: ", "ega-paper: ")):
            raise AssertionError(f"exit code {code}, {said[-300:]!r}")
        raise InputError(said)

    return read


def hostile(name, good, folder):
    "What is hostile for a kind of file."
    kind = Path(name).suffix
    if kind == ".json":
        return spoiled_text(good)
    if kind == ".csv":
        return hostile_csv(folder)
    if kind == ".npy":
        return hostile_npy(folder)
    if kind == ".npz":
        return hostile_npz(good, folder)
    if kind == ".safetensors":
        return hostile_safetensors(good, folder)
    if kind == ".parquet":
        return hostile_parquet(good, folder)
    return {}


def write_pack(folder):
    packs.write_pack(packed(), folder / "p.parquet", dtype="float32")
    return ["p.parquet"]


def of_pack(es):
    return (
        digest(es.x, es.y)
        + str(es.ids.tolist() + es.split.tolist())
        + str(es.classes)
        + json.dumps(es.meta, sort_keys=True)
    )


READERS["pack"] = Reader(write_pack, lambda f: of_pack(packs.read_pack(f / "p.parquet")), strict=True)
READERS["ega info"] = Reader(write_pack, command("info", "p.parquet"), step=4)


def write_npy(folder):
    np.save(folder / "x.npy", rows())
    np.save(folder / "y.npy", labels())
    return ["x.npy", "y.npy"]


def both(x, y):
    x = vectors.read_matrix(x).array()
    return digest(arrays.check_X(x), arrays.check_y(vectors.read_labels(y), len(x))[0])


READERS["embeddings and labels .npy"] = Reader(write_npy, lambda f: both(f / "x.npy", f / "y.npy"))


def write_npz(folder):
    np.savez(folder / "x.npz", x=rows())
    return ["x.npz"]


READERS["embeddings .npz"] = Reader(
    write_npz, lambda f: digest(arrays.check_X(vectors.read_matrix(f / "x.npz").array()))
)


def write_safetensors(folder):
    save_file({"x": rows()}, folder / "x.safetensors")
    return ["x.safetensors"]


READERS["embeddings .safetensors"] = Reader(
    write_safetensors, lambda f: digest(arrays.check_X(vectors.read_matrix(f / "x.safetensors").array()))
)


def write_parquet(folder):
    pq.write_table(pa.table({"v": list(rows()), "name": [str(i) for i in range(N)]}), folder / "x.parquet")
    return ["x.parquet"]


READERS["embeddings .parquet"] = Reader(
    write_parquet, lambda f: digest(arrays.check_X(vectors.read_matrix(f / "x.parquet").array()))
)


def write_csv(folder):
    (folder / "y.csv").write_text("id,label\n" + "".join(f"{i},kind {c}\n" for i, c in enumerate(labels())))
    return ["y.csv"]


READERS["labels .csv"] = Reader(write_csv, lambda f: str(arrays.check_y(vectors.read_labels(f / "y.csv"), N)))


def fit(folder):
    write_npy(folder)
    write_adapter(folder)
    return ["x.npy", "y.npy"]


def write_adapter(folder):
    save_adapter(LoRAAdapter(D, rank=2, gen=torch.Generator().manual_seed(0)), folder / "f.safetensors")
    return ["f.safetensors"]


READERS["adapter"] = Reader(
    write_adapter, lambda f: transform.adapter_fingerprint(load_adapter(f / "f.safetensors")), strict=True
)

_FITTED = []


def write_estimator(folder):
    if not _FITTED:
        _FITTED.append(
            estimator.EmbeddingAdapter("wccn", max_unseen_loss=None).fit(rows(), [f"kind {c}" for c in labels()])
        )
    _FITTED[0].save(folder / "a")
    np.save(folder / "x.npy", rows())
    write_csv(folder)
    return ["a/adapter.safetensors", "a/adapter.json", "a/adapter.fit_rows.npy"]


def write_updatable(folder):
    write_estimator(folder)
    _FITTED[0].save(folder / "a", statistics=True)
    return ["a/adapter.statistics.npz", "x.npy", "y.csv"]


def used(e):
    return digest(e.transform(rows())) + repr(e.selection_)[:20]


def write_estimator_of_pairs(folder):
    x = rows()
    e = PairAdapter("both", max_unseen_loss=None)
    pairs = np.column_stack([np.arange(len(x)), np.arange(len(x))])
    e.fit(x, x[:, ::-1].copy(), pairs).save(folder / "a")
    return [
        f"a/adapter.{name}" for name in ("queries.safetensors", "documents.safetensors", "json", "fit_documents.npy")
    ]


def used_on_both_sides(e):
    return digest(e.transform_queries(rows())) + digest(e.transform_documents(rows())) + repr(e.selection_)[:20]


READERS["estimator of pairs"] = Reader(
    write_estimator_of_pairs, lambda f: used_on_both_sides(PairAdapter.load(f / "a")), step=2
)
READERS["estimator"] = Reader(write_estimator, lambda f: used(estimator.EmbeddingAdapter.load(f / "a")))
READERS["ega evaluate"] = Reader(write_estimator, command("evaluate", "a", "x.npy", "y.csv", "--json"), step=4)
READERS["estimator with statistics"] = Reader(
    lambda f: write_updatable(f)[:1],
    lambda f: used(estimator.EmbeddingAdapter.load(f / "a").forget(rows()[:9], [f"kind {c}" for c in labels()[:9]])),
)
READERS["ega update"] = Reader(write_updatable, command("update", "a", "x.npy", "y.csv", "-o", "b"), step=4)
READERS["ega estimate"] = Reader(
    lambda f: write_npy(f) and write_csv(f) and ["x.npy", "y.csv"], command("estimate", "x.npy", "y.csv"), step=4
)
READERS["ega fit"] = Reader(
    lambda f: write_npy(f) and write_csv(f) and ["x.npy", "y.csv"],
    command("fit", "x.npy", "y.csv", "-o", "{folder}.out", "--overwrite", "--quiet", "--method", "wccn"),
    step=4,
)


def journal(folder):
    "An adaptation that was killed after the first block."
    write_adapter(folder)
    np.save(folder / "x.npy", rows())
    adapter = load_adapter(folder / "f.safetensors").to("cpu")
    owner = transform._provenance(
        adapter, [folder / "x.npy"], N, transform._Options(None, 8, "float32", "float32", 1, "cpu")
    )
    transform._write_progress(folder / "z.npy.part.json", owner, 8)
    header = transform._npy_header(N, D, np.dtype("f4"), transform._adapter_note(adapter, owner))
    (folder / "z.npy.part").write_bytes(header + bytes(8 * D * 4))
    return ["z.npy.part.json"]


def resumed(folder):
    "Only what an InputError leaves is looked at: the files of a transform that goes on are removed here."
    try:
        transform.transform_file(
            folder / "f.safetensors", folder / "x.npy", folder / "z.npy", batch_size=8, threads=1, device="cpu"
        )
        return "done"
    finally:
        if (folder / "z.npy").exists():
            (folder / "z.npy").unlink()


READERS["progress file of ega transform"] = Reader(journal, resumed)
READERS["ega transform .npy"] = Reader(
    lambda f: write_adapter(f) and write_npy(f) and ["x.npy", "f.safetensors"], lambda f: transformed(f, "npy"), step=4
)
READERS["ega transform .parquet"] = Reader(
    lambda f: write_adapter(f) and write_parquet(f), lambda f: transformed(f, "parquet"), step=4
)
READERS["ega transform of a pack"] = Reader(
    lambda f: write_adapter(f) and packs.write_pack(packed(), f / "x.parquet") and ["x.parquet"],
    lambda f: transformed(f, "parquet"),
    step=4,
)


def transformed(folder, kind):
    try:
        return command(
            "transform",
            "f.safetensors",
            f"x.{kind}",
            "-o",
            f"z.{kind}",
            "--batch-size",
            "8",
            "--threads",
            "1",
            "--quiet",
        )(folder)
    finally:
        if (folder / f"z.{kind}").exists():
            (folder / f"z.{kind}").unlink()


def write_checkpoint(folder, epoch=2, name="c.safetensors"):
    adapter, history = LinearAdapter(D), training.TrainHistory([1.0, 2.0], [1.0, 1.0], 3.0)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3, fused=True)
    adapter(torch.from_numpy(rows())).sum().backward()
    optimizer.step()
    training.save_checkpoint(
        folder / name,
        adapter,
        optimizer,
        [torch.Generator().manual_seed(i) for i in (0, 1)],
        history,
        epoch=epoch,
        owner=OWNER,
    )
    return [name]


OWNER = "o" * 64


def resume_training(folder):
    "Load, then take a step: what was loaded must be usable."
    adapter, history, generators = LinearAdapter(D), training.TrainHistory(), [torch.Generator(), torch.Generator()]
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3, fused=True)
    epoch = training.load_checkpoint(folder / "c.safetensors", adapter, optimizer, generators, history, owner=OWNER)
    adapter(torch.from_numpy(rows())).sum().backward()
    optimizer.step()
    return f"{epoch + 1} {len(history.loss)} " + digest(
        *(p.detach().numpy() for p in adapter.parameters()), torch.rand(3, generator=generators[1]).numpy()
    )


READERS["checkpoint"] = Reader(write_checkpoint, resume_training)


def write_index(folder):
    i = index.AdaptedIndex(np.eye(D, dtype="f4")).add(rows(), [f"row {j}" for j in range(N)])
    i.save(folder / "i")
    return [f.relative_to(folder).as_posix() for f in sorted((folder / "i").rglob("*")) if f.is_file()]


READERS["index of texts"] = Reader(
    write_index, lambda f: digest(*index.AdaptedIndex.load(f / "i").search(rows(3, seed=1), 3))
)


def write_numbers(folder):
    index.AdaptedIndex(LoRAAdapter(D, rank=2, gen=torch.Generator().manual_seed(0)).eval()).add(rows()).save(
        folder / "i"
    )
    return [
        f.relative_to(folder).as_posix()
        for f in sorted((folder / "i").rglob("*"))
        if f.is_file() and f.suffix in (".safetensors", ".json")
    ]


READERS["index of numbers"] = Reader(
    write_numbers, lambda f: digest(*index.AdaptedIndex.load(f / "i").search(rows(3, seed=1), 3))
)


def write_store(folder):
    index.AdaptedIndex(np.eye(D, dtype="f4")).add(rows()).save(folder / "s" / "v1")
    stores.IndexStore(folder / "s").activate("v1")
    return ["s/current.json"]


READERS["index store"] = Reader(write_store, lambda f: len(stores.IndexStore(f / "s").open()) and "60")


def write_monitor(folder):
    monitor.Monitor.fit(rows(), np.eye(D, dtype="f4"), k=3, horizon=5).save(folder / "m")
    return ["m/monitor.json", "m/monitor.npz", "m/matrix.safetensors"]


READERS["monitor"] = Reader(write_monitor, lambda f: monitor.Monitor.load(f / "m").check(rows(8, seed=3)).sentence)


def write_results(folder):
    if not _RAN:
        with tempfile.TemporaryDirectory() as t:
            repository(Path(t))
            _RAN.append(
                runs.run_experiment(CONFIG, Path(t) / "data/packs", device="cpu").assign(seconds=1.0, machine="any")
            )
    grids.ResultStore(folder, "unseen").write(_RAN[0])
    return ["unseen.parquet"]


_RAN, CONFIG = [], runs.build_config("unseen", "cub100", "frozen")


def stored(folder):
    s = grids.ResultStore(folder, "unseen")
    f = s.read()
    return f"{sorted(s.ids())} {len(f)} {[parse_config(runs.RunConfig, c).run_id for c in f.config]}"


READERS["results"] = Reader(write_results, stored)
READERS["ega-paper rerun"] = Reader(
    lambda f: repository(f) or [f"data/results/{n}" for n in write_results(f / "data/results")],
    command("rerun", CONFIG.run_id),
    step=4,
)


def repository(folder):
    (folder / "nbs").mkdir()
    (folder / "data/packs").mkdir(parents=True)
    (folder / "data/results").mkdir()
    packs.write_pack(
        packs.EmbeddingSet(rows(), labels(), meta={"set": "cub100", "encoder": "efficientnet_lite0"}),
        folder / "data/packs/cub100__efficientnet_lite0.parquet",
    )


def write_config(folder):
    (folder / "c.json").write_text(json.dumps(config_to_dict(runs.build_config("unseen", "cub100", "supcon_preserve"))))
    return ["c.json"]


READERS["configuration"] = Reader(
    write_config, lambda f: parse_config(runs.RunConfig, read_json(f / "c.json", "a configuration")).run_id
)


def png(colour, size=(9, 7)):
    from PIL import Image

    f = io.BytesIO()
    Image.new("RGB", size, colour).save(f, "PNG")
    return f.getvalue()


class Mean:
    "An encoder without weights."

    modality, name, preprocessing, weights = "image", "mean", "none", "0"

    def prepare(self, raw):
        return encoders.preprocess_image(raw, encoders.ImagePreprocessing(resize=8, crop=8))

    def encode(self, batch):
        return np.stack(batch).reshape(len(batch), -1)[:, :D] + np.float32(2)


class Letters(Mean):
    modality, name = "text", "letters"

    def prepare(self, text):
        return text

    def encode(self, batch):
        return np.array([[1 + t.count(c) for c in "abcdef"] for t in batch], np.float32)


def opened(folder, name, encoder):
    "Open a source and embed it, skipping what cannot be read."
    out = folder.parent / "out.parquet"
    try:
        embed.embed(
            datasets.open_input_source(folder / name), encoder, out, progress=False, overwrite=True, on_error="skip"
        )
        return of_pack(packs.read_pack(out))[:64]
    finally:
        out.unlink(missing_ok=True)


def write_images(folder):
    for i in range(4):
        (folder / "f" / f"{i % 2}").mkdir(parents=True, exist_ok=True)
        (folder / "f" / f"{i % 2}" / f"{i}.png").write_bytes(png((40 * i, 9, 200)))
    return ["f/0/0.png"]


READERS["images in a folder"] = Reader(write_images, lambda f: opened(f, "f", Mean()))


def write_archive(folder):
    files = [png((60 * i, 9, 200)) for i in range(4)]
    np.savez(
        folder / "a.npz",
        data=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        labels=np.array([0, 1, 0, 1]),
        names=np.array(["x", "y"]),
        ids=np.array(list("abcd")),
        split=np.array(["t"] * 4),
    )
    return ["a.npz"]


READERS["images in an archive"] = Reader(write_archive, lambda f: opened(f, "a.npz", Mean()))


def write_texts(folder):
    (folder / "t.csv").write_text(
        "text,label,split,id\n" + "".join(f"abc {'f' * i},k{i % 2},train,{i}\n" for i in range(5))
    )
    return ["t.csv"]


READERS["texts in a table"] = Reader(write_texts, lambda f: opened(f, "t.csv", Letters()))


def write_intents(folder):
    (folder / "i.json").write_text(
        json.dumps({s: [[f"abc {s}", "one"], [f"f {s}", "two"]] for s in ("train", "val", "oos_test")})
    )
    return ["i.json"]


READERS["CLINC150"] = Reader(write_intents, lambda f: opened(f, "i.json", Letters()))


def begun(folder):
    "A pack of which half the shards are there."
    write_images(folder)
    encoder = Mean()
    encoder.encode = lambda batch, left=[1]: Mean.encode(encoder, batch) if left.pop() else None
    try:
        embed.embed(
            datasets.open_input_source(folder / "f"),
            encoder,
            folder / "p.parquet",
            shard_rows=2,
            batch_size=2,
            progress=False,
        )
    except (IndexError, TypeError, InputError):
        pass
    return ["p.parquet.shards/plan.json", "p.parquet.shards/000000000.npz"]


def went_on(folder):
    "The pack itself is the value, and is removed again; so are shards that were made again."
    try:
        embed.embed(
            datasets.open_input_source(folder / "f"),
            Mean(),
            folder / "p.parquet",
            shard_rows=2,
            batch_size=2,
            progress=False,
        )
        return of_pack(packs.read_pack(folder / "p.parquet"))
    finally:
        (folder / "p.parquet").unlink(missing_ok=True)


READERS["shards of ega embed"] = Reader(begun, went_on, strict=True)


def onnx_file(folder, external=None, constant=None):
    from onnx import TensorProto, helper, numpy_helper

    def value(name, shape):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    w = numpy_helper.from_array(np.random.default_rng(0).normal(size=(D, 3, 2, 2)).astype("f4"), "w")
    if external:
        w.ClearField("raw_data")
        w.data_location = TensorProto.EXTERNAL
        e = w.external_data.add()
        e.key, e.value = "location", external
    nodes = [
        helper.make_node("Conv", ["pixels", "w"], ["c"], strides=[2, 2]),
        helper.make_node("ReduceMean", ["c"], ["out"], axes=[2, 3], keepdims=0),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [value("pixels", ["n", 3, 8, 8])], [value("out", ["n", D])], [w]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    return model.SerializeToString()


def write_onnx(folder):
    (folder / "e.onnx").write_bytes(onnx_file(folder))
    return ["e.onnx"]


def onnx_encoded(folder):
    e = encoders.OnnxImageEncoder(
        folder / "e.onnx", preprocess=encoders.ImagePreprocessing(resize=8, crop=8), threads=1
    )
    return digest(e.encode([e.prepare(png((9, 9, 9)))]))


READERS["encoder .onnx"] = Reader(write_onnx, onnx_encoded)


# -- one file after the other ------------------------------------------------------------------------------


def growth():
    "Peak of the resident memory in MB since it was last reset."
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def listing(folder):
    "What lies in a folder, and what is in it."
    return {
        p.relative_to(folder).as_posix(): (
            p.lstat().st_mode,
            p.read_bytes() if p.is_file() and not p.is_symlink() else None,
        )
        for p in sorted(folder.rglob("*"))
    }


class Slow(BaseException):
    pass


def rang(*_):
    raise Slow


def attempt(read, folder):
    "What a reader makes of a folder: (outcome, word about it, seconds, megabytes)."
    Path("/proc/self/clear_refs").write_text("5")
    start, begun = growth(), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        outcome, said = "read", read(folder)
    except InputError as error:
        outcome, said = "refused", str(error)
        if any(isinstance(e, MemoryError) for e in chain(error)):
            outcome = "allocated"
        if "\n" in said or len(said) > 1000:
            outcome = "long-winded"
    except Slow:
        outcome, said = "hung", ""
    except BaseException as error:
        outcome, said = "leaked", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return outcome, said, time.monotonic() - begun, growth() - start


def restore(folder, before):
    "Put a folder back as it was."
    for p in sorted(folder.rglob("*"), reverse=True):
        if p.is_dir() and not p.is_symlink():
            p.rmdir() if before.get(p.relative_to(folder).as_posix(), (0, b""))[1] is not None else None
        elif p.relative_to(folder).as_posix() not in before or p.is_symlink() or not p.is_file():
            p.unlink()
    for name, (_, content) in before.items():
        p = folder / name
        if content is None:
            p.mkdir(exist_ok=True, parents=True)
        elif not p.is_file() or p.read_bytes() != content:
            p.parent.mkdir(exist_ok=True, parents=True)
            p.write_bytes(content)


def cases(r, folder, names, extra):
    "(file, damage, function of the path that does it)"

    def put(content):
        return lambda p: p.write_bytes(content)

    for name in names:
        good = (folder / name).read_bytes()
        for what, content in (damages(good, folder, extra) | hostile(name, good, folder)).items():
            yield name, what, put(content)
        for what, lay in places(folder / name).items():
            yield name, what, lay


def main(extra, folder, *names):
    "Every file for every reader named; what libraries print goes to stderr."
    signal.signal(signal.SIGALRM, rang)
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM,) * 2)
    for i, name in enumerate(names):

        def say(**told):
            print(json.dumps({"reader": name} | told), file=out, flush=True)

        every(READERS[name], int(extra), Path(folder) / f"{i}" / "here", say)


def every(r, extra, folder, say):
    "Every file for one reader."
    folder.mkdir(parents=True)
    names = r.make(folder)
    before, stamps = listing(folder), {p: p.stat() for p in folder.rglob("*") if p.is_file()}

    def whole():
        restore(folder, before)
        [os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns)) for p, s in stamps.items()]

    _, good, _, _ = first = attempt(r.read, folder)
    whole()
    say(
        file="",
        damage="",
        outcome=first[0] if first[0] != "read" else "good",
        said=str(good)[:300] if first[0] != "read" else "",
        seconds=first[2],
        megabytes=0,
    )
    for file, damage, do in list(cases(r, folder, names, extra))[:: 1 if extra > 1 else r.step]:
        say(file=file, damage=damage)
        (folder / file).unlink()
        do(folder / file)
        laid = listing(folder)
        outcome, said, seconds, megabytes = attempt(r.read, folder)
        if outcome == "read":
            outcome = "same" if said == good else "changed" if r.strict else "taken"
        elif outcome == "refused" and listing(folder) != laid:
            outcome, said = (
                "kept" if all(".part" in n for n in set(listing(folder)) ^ set(laid)) else "wrote",
                str(sorted(set(listing(folder)) ^ set(laid))),
            )
        if (folder / "MARK").exists() or (folder.parent / "MARK").exists() or Path("MARK").exists():
            outcome = "unpickled"
        say(
            file=file,
            damage=damage,
            outcome=outcome,
            said=str(said)[:300] if outcome != "same" else "",
            seconds=round(seconds, 3),
            megabytes=round(megabytes),
        )
        whole()


def write_table(path):
    "A table of texts, numbers and lists in two row groups; what reads it."
    table = pa.table({"id": [str(i) for i in range(N)], "n": np.arange(N), "v": pa.array(list(rows()))})
    pq.write_table(table, path, row_group_size=N // 2, write_page_checksum=True)
    return lambda: packs.read_parquet(path).equals(table)


def write_small_pack(path):
    "A pack; what reads it."
    packs.write_pack(packed(), path)
    return lambda: packs.read_pack(path).x.tobytes()


def flip_column_metadata(folder):
    "Print what becomes of two Parquet files with each bit of the metadata of their columns flipped in turn."
    told = {"refused": 0, "same": 0, "changed": 0, "size statistics": 0}
    for name, write in (("table", write_table), ("pack", write_small_pack)):
        path = Path(folder) / f"{name}.parquet"
        read = write(path)
        good, expected, meta = path.read_bytes(), read(), pq.read_metadata(path)
        footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
        last_leaf = meta.schema[len(meta.schema) - 1].name.encode()
        begin, end = good.index(last_leaf, footer) + len(last_leaf), good.index(b"ARROW:schema", footer)
        for bit in range(begin * 8, end * 8):
            damaged = bytearray(good)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            print(f"{name}, bit {bit}", file=sys.stderr, flush=True)
            try:
                told["same" if read() == expected else "changed"] += 1
            except InputError as error:
                told["refused"] += 1
                told["size statistics"] += "histogram size mismatch" in str(error)
    print(json.dumps(told))


if __name__ == "__main__":
    flip_column_metadata(sys.argv[2]) if sys.argv[1] == "bits" else main(*sys.argv[1:])
