"""A million rows of 1,280 components as float32, int8 and bits: encode, build, search and size on disk.

    python benchmarks/million.py  # about ten minutes on one thread; 6 GB of memory, 6 GB of disk

Rows and queries are made up: their directions are random, which changes neither bytes nor time of an exhaustive
search. The floor is one pass over the bytes of all rows.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import torch

import ega
from ega.data.arrays import normalize
from ega.deploy.index import AdaptedIndex
from ega.experiments.runs import platform_tag, use_one_thread
from ega.method.adapters import LinearAdapter, with_projection
from ega.method.compression import RowFormat, fit_projection
from ega.method.interface import as_adapter

RECORD = Path(__file__).parents[1] / "data/results/million.csv"
N, D, BLOCK, QUERIES, ROUNDS = 1_000_000, 1280, 20_000, 100, 3
FORMATS = (RowFormat(D), RowFormat(D // 5, "int8"), RowFormat(D, "binary"))


def blocks(seed=0):
    "Random unit rows in blocks."
    rng = np.random.default_rng(seed)
    for _ in range(N // BLOCK):
        yield normalize(rng.standard_normal((BLOCK, D), dtype=np.float32))


def make_adapter(row_format):
    "An affine adapter whose rows are stored in a format."
    torch.manual_seed(0)
    adapter = LinearAdapter(D, bias=True).eval()
    with torch.no_grad():
        adapter.weight.add_(0.01 * torch.randn(D, D))
        adapter.offset.add_(0.01 * torch.randn(D))
    sample = as_adapter(adapter).transform(next(blocks(1)))
    return replace(as_adapter(with_projection(adapter, fit_projection(sample, row_format))), row_format=row_format)


def timed(work):
    "Seconds, and what the work returns."
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def measure(row_format, folder):
    "Times of one format, the shortest of the rounds of a search, and the size of the index on disk."
    adapter = make_adapter(row_format)
    index, encode, build = AdaptedIndex(adapter), 0.0, 0.0
    for x in blocks():
        seconds, z = timed(lambda x=x: adapter.apply(x))
        encode += seconds
        build += timed(lambda z=z: index.index.add(z))[0]
    queries = next(blocks(2))[:QUERIES]
    index.index.search(adapter.apply(queries[:2]), 10)  # the first call touches all pages
    many = min(timed(lambda: index.index.search(adapter.apply(queries), 10))[0] for _ in range(ROUNDS)) / QUERIES
    z = adapter.apply(queries)
    alone = min(timed(lambda: [index.index.search(q[None], 10) for q in z[:10]])[0] for _ in range(ROUNDS)) / 10
    path = Path(folder) / "index.faiss"
    faiss.write_index(index.index, str(path))
    held = np.frombuffer(path.read_bytes(), np.uint8)[: N * row_format.n_bytes // 8 * 8].view(np.uint64)
    floor = min(timed(held.sum)[0] for _ in range(ROUNDS))
    return {
        "n_components": row_format.n_components,
        "precision": row_format.precision,
        "n_bytes": row_format.n_bytes,
        "disk_bytes": path.stat().st_size,
        "encode_s": encode,
        "build_s": build,
        "query_of_100_ms": 1e3 * many,
        "query_alone_ms": 1e3 * alone,
        "floor_ms": 1e3 * floor,
    }


def main():
    use_one_thread()
    faiss.omp_set_num_threads(1)
    lines = []
    for row_format in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(measure(row_format, folder))
        print(lines[-1], flush=True)
    about = {"n_rows": N, "index": "exhaustive", "version": ega.__version__, "machine": platform_tag()}
    pd.DataFrame(lines).assign(**about).to_csv(RECORD, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
