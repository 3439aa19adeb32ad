"Files of every kind that the library reads, what reads them, and how to damage them: test_fuzz.py and tests/nightly."

import io
import json
import os
import pickle
from collections import namedtuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save_file

from ega import EmbeddingAdapter, PairAdapter
from ega.data import packs
from ega.data.arrays import check_X, check_y, normalize
from ega.data.files import hash_arrays
from ega.data.vectors import read_labels, read_matrix
from ega.deploy.index import AdaptedIndex
from ega.deploy.monitor import Monitor
from ega.experiments import grids
from ega.method import training
from ega.method.adapters import LinearAdapter, LoRAAdapter, load_adapter, save_adapter

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


def png(colour, size=(9, 7)):
    from PIL import Image

    f = io.BytesIO()
    Image.new("RGB", size, colour).save(f, "PNG")
    return f.getvalue()


def embedding_set(n=N, **meta):
    split = np.where(np.arange(n) % 3, "train", "test")
    return packs.EmbeddingSet(rows(n), labels(n), split=split, meta={"set": "toy", "encoder": "noise"} | meta)


def write_pack(folder):
    packs.write_pack(embedding_set(), folder / "p.parquet", dtype="float32")


def read_pack(folder):
    es = packs.read_pack(folder / "p.parquet")
    return hash_arrays(es.x, es.y, es.ids, es.split), es.classes, json.dumps(es.meta, sort_keys=True)


def write_arrays(folder):
    np.save(folder / "x.npy", rows())
    np.savez(folder / "x.npz", x=rows())
    save_file({"x": rows()}, folder / "x.safetensors")
    pq.write_table(pa.table({"v": list(rows()), "name": [str(i) for i in range(N)]}), folder / "x.parquet")


def read_arrays(folder):
    names = ("x.npy", "x.npz", "x.safetensors", "x.parquet")
    return [hash_arrays(check_X(read_matrix(folder / name).array())) for name in names]


def write_label_files(folder):
    np.save(folder / "y.npy", labels())
    (folder / "y.csv").write_text("id,label\n" + "".join(f"{i},kind {c}\n" for i, c in enumerate(labels())))


def read_label_files(folder):
    return [str(check_y(read_labels(folder / name), N)) for name in ("y.npy", "y.csv")]


def write_adapter(folder):
    save_adapter(LoRAAdapter(D, rank=2, gen=torch.Generator().manual_seed(0)), folder / "f.safetensors")


def read_adapter(folder):
    return hash_arrays(*(p.numpy() for p in load_adapter(folder / "f.safetensors").state_dict().values()))


def write_estimator(folder):
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None, device="cpu").fit(rows(), labels())
    adapter.save(folder / "a", statistics=True)


def read_estimator(folder):
    adapter = EmbeddingAdapter.load(folder / "a")
    adapter.forget(rows()[:9], labels()[:9])
    return hash_arrays(adapter.transform(rows()))


def write_pair_estimator(folder):
    pairs = np.column_stack([np.arange(N), np.arange(N)])
    PairAdapter("both", max_unseen_loss=None).fit(rows(), rows()[:, ::-1].copy(), pairs).save(folder / "a")


def read_pair_estimator(folder):
    adapter = PairAdapter.load(folder / "a")
    return hash_arrays(adapter.transform_queries(rows()), adapter.transform_documents(rows()))


def _training_state():
    adapter, history = LinearAdapter(D), training.TrainHistory([1.0, 2.0], [1.0, 1.0], 3.0)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
    adapter(torch.from_numpy(rows())).sum().backward()
    optimizer.step()
    return adapter, optimizer, [torch.Generator().manual_seed(i) for i in (0, 1)], history


def write_checkpoint(folder):
    training.save_checkpoint(folder / "c.safetensors", *_training_state(), epoch=2, owner="o" * 64)


def read_checkpoint(folder):
    adapter, optimizer, generators, history = state = _training_state()
    epoch = training.load_checkpoint(folder / "c.safetensors", *state, owner="o" * 64)
    optimizer.step()
    return epoch, hash_arrays(*(p.detach().numpy() for p in adapter.parameters()))


def write_index(folder):
    AdaptedIndex(np.eye(D, dtype="f4")).add(rows(), [f"row {j}" for j in range(N)]).save(folder / "i")


def read_index(folder):
    return hash_arrays(*AdaptedIndex.load(folder / "i").search(rows(3, seed=1), 3))


def write_monitor(folder):
    Monitor.fit(rows(), np.eye(D, dtype="f4"), k=3, horizon=5).save(folder / "m")


def read_monitor(folder):
    return Monitor.load(folder / "m").check(rows(8, seed=3)).sentence


def write_results(folder):
    result = dict(run_id="0" * 16, query_set="seen", benchmark="b", method="frozen", config="{}", lp_at_1=0.5)
    grids.ResultStore(folder, "unseen").write(pd.DataFrame([result]))


def read_results(folder):
    return grids.ResultStore(folder, "unseen").read().to_json()


Reader = namedtuple("Reader", "write read is_hashed")  # is_hashed: what is read must be what was written
READERS = {
    "pack": Reader(write_pack, read_pack, True),
    "matrices": Reader(write_arrays, read_arrays, False),
    "labels": Reader(write_label_files, read_label_files, False),
    "adapter": Reader(write_adapter, read_adapter, True),
    "estimator": Reader(write_estimator, read_estimator, False),
    "estimator of pairs": Reader(write_pair_estimator, read_pair_estimator, False),
    "checkpoint": Reader(write_checkpoint, read_checkpoint, False),
    "index": Reader(write_index, read_index, False),
    "monitor": Reader(write_monitor, read_monitor, False),
    "results": Reader(write_results, read_results, False),
}


def files_in(folder):
    "The content of every file in a folder, by its path below it; None for what is no file."
    paths = sorted(folder.rglob("*"))
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() and not p.is_symlink() else None
        for p in paths
        if p.is_symlink() or not p.is_dir()
    }


def other_files(mark):
    "Whole files of other kinds, two of which leave a mark if they are unpickled."
    files = {"json": b'{"a": [1, {"b": null}]}', "csv": b"a,b\n1,2\n", "noise": np.random.default_rng(7).bytes(3000)}
    for kind, write in {
        "npy": lambda f: np.save(f, rows(5)),
        "objects npy": lambda f: np.save(f, np.array([[Payload(mark)]], object), allow_pickle=True),
        "npz": lambda f: np.savez(f, x=rows(5)),
        "parquet": lambda f: pq.write_table(pa.table({"a": [1, 2]}), f),
        "torch": lambda f: torch.save({"x": Payload(mark)}, f),
        "pickle": lambda f: f.write(pickle.dumps(Payload(mark))),
    }.items():
        write(f := io.BytesIO())
        files[kind] = f.getvalue()
    return files


def damages(good, mark):
    "Name -> bytes: the file cut off, with a bit flipped, lengthened, or exchanged for another."
    n, changed = len(good), {}
    for i in range(4):
        changed[f"cut at {i}/4"] = good[: n * i // 4]
    for at in {0, n // 3, n // 2, n - 1, max(0, n - 9)}:
        changed[f"bit of byte {at}"] = good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]
    changed |= {"cut by 1": good[:-1], "twice": good + good, "a large number": b"\xff" * 8 + good[8:]}
    return changed | {f"exchanged for {kind}": content for kind, content in other_files(mark).items()}


def places(path):
    "Name -> function: what else can lie where a file is expected."
    return {
        "a folder": path.mkdir,
        "a dangling link": lambda: path.symlink_to("nowhere"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a pipe": lambda: os.mkfifo(path),
        "an endless device": lambda: path.symlink_to("/dev/zero"),
        "nothing": lambda: None,
    }
