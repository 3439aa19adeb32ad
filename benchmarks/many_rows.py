"""Fit, transform and encode up to ten million rows of 512 numbers, and what bounds them.

    python benchmarks/many_rows.py  # about 25 minutes; 5 GB of disk. Needs duckdb and, for the last lines, ega[ray]

Rows are made block by block and never stored; a million of them also lie in a folder of Parquet files. The floor of a
fit is making or reading the blocks and one product of each with itself in float64, that of transform and encode the
blocks and one product of float32. Each line is a process of its own with one thread.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

import ega
from ega import EmbeddingAdapter, read_matrix
from ega.cost import estimate_cost
from ega.data.arrays import normalize
from ega.data.vectors import StoredMatrix
from ega.experiments.runs import platform_tag, use_one_thread
from ega.method.adapters import LinearAdapter, transform
from ega.method.compression import quantize_embeddings
from ega.testing import peak_memory_mb

RECORD = Path(__file__).parents[1] / "data/results/many_rows.csv"
D, CLASSES, BLOCK, ROWS_PER_FILE = 512, 5000, 2**14, 2**17
SIZES, STORED = (10**5, 10**6, 10**7), 10**6


@functools.lru_cache(1)
def labels(n):
    "A class for each row, drawn with a seed."
    return np.random.default_rng(0).integers(CLASSES, size=n)


class MadeMatrix(StoredMatrix):
    "Rows that are made when they are read: a centre for each class and noise of the same size."

    def blocks(self, first=0, size=BLOCK, stop=None):
        centres = np.random.default_rng(1).standard_normal((CLASSES, D), dtype=np.float32)
        stop = self.n if stop is None else stop
        for start in range(first, stop, size):
            part = labels(self.n)[start : min(start + size, stop)]
            noise = np.random.default_rng((2, start)).standard_normal((len(part), D), dtype=np.float32)
            yield normalize(centres[part] + 2 * noise)


def made(n):
    return MadeMatrix(Path("made"), n, D)


def write_folder(folder):
    "Write a million rows with their labels to Parquet files."
    y, matrix = labels(STORED), made(STORED)
    schema = pa.schema([("vector", pa.list_(pa.float32(), D)), ("label", pa.int64())])
    for first in range(0, STORED, ROWS_PER_FILE):
        with pq.ParquetWriter(f"{folder}/{first:07}.parquet", schema, use_dictionary=False) as writer:
            for x in matrix.blocks(first, stop=min(first + ROWS_PER_FILE, STORED)):
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), D)
                writer.write_table(pa.table([vectors, y[first : first + len(x)]], schema=schema))
                first += len(x)


def floor(matrix, product):
    "Seconds of reading all blocks and of one product of each."
    started = time.perf_counter()
    for x in matrix.blocks():
        product(x)
    return time.perf_counter() - started


def square(x):
    "The sum of the outer products of the rows with themselves."
    x = x.astype(np.float64)
    return x.T @ x


def fit(matrix, y, *, select, **options):
    "Seconds of a fit: with the default settings, or of a closed form without comparison."
    if not select:
        options |= dict(method="discriminant_whitening", max_unseen_loss=None)
    started = time.perf_counter()
    EmbeddingAdapter(**options).fit(matrix, y)
    return time.perf_counter() - started


def scan(matrix):
    "Seconds of reading the vectors of a folder."
    return floor(matrix, len)


def scan_by_pyarrow(folder):
    "The same by pyarrow."
    started = time.perf_counter()
    batches = pyarrow.dataset.dataset(folder).to_batches(columns=["vector"], batch_size=BLOCK, use_threads=False)
    assert sum(map(len, batches)) == STORED
    return time.perf_counter() - started


def scan_by_duckdb(folder):
    "The same by DuckDB."
    import duckdb

    duckdb.execute("set threads = 1")
    started = time.perf_counter()
    reader = duckdb.sql(f"select vector from '{folder}/*.parquet'").to_arrow_reader(BLOCK)
    assert sum(map(len, reader)) == STORED
    return time.perf_counter() - started


def adapt(matrix, precision):
    "Seconds of adapting all rows and of encoding them at a precision."
    adapter, started = LinearAdapter(D).eval(), time.perf_counter()
    for x in matrix.unit_blocks():
        quantize_embeddings(transform(adapter, x), precision)
    return time.perf_counter() - started


def fit_on_ray(folder, y, workers):
    "Seconds of the closed form on a Ray cluster of this machine, after its start."
    import ray

    ray.init(num_cpus=workers, log_to_driver=False, logging_level="ERROR")
    return fit(read_matrix(folder, ray=""), y, select=False)


def measure(task, n, folder, workers):
    "Seconds of a task, and the peak of the memory; for some the seconds of the floor."
    use_one_thread()
    matrix = read_matrix(folder) if folder else made(n)
    y, product = labels(n), np.eye(D, dtype=np.float32)
    if task == "estimate":
        cost = estimate_cost(matrix, y)
        return {"estimated_seconds": cost.seconds, "estimated_mb": cost.memory_bytes / 2**20}
    run, bare = {
        "fit": (lambda: fit(matrix, y, select=True), square),
        "closed form": (lambda: fit(matrix, y, select=False, n_jobs=workers), square),
        "closed form on Ray": (lambda: fit_on_ray(folder, y, workers), None),
        "transform": (lambda: adapt(matrix, "float32"), lambda x: x @ product),
        "encode": (lambda: adapt(matrix, "binary"), lambda x: x @ product),
        "scan by ega": (lambda: scan(matrix), None),
        "scan by pyarrow": (lambda: scan_by_pyarrow(folder), None),
        "scan by DuckDB": (lambda: scan_by_duckdb(folder), None),
    }[task]
    measured = {"seconds": run(), "peak_mb": peak_memory_mb()}
    return measured if bare is None else measured | {"floor_seconds": floor(matrix, bare)}


def in_a_process(**job):
    "The result of `measure` in a process of its own."
    done = subprocess.run([sys.executable, __file__, "--measure", json.dumps(job)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--measure", help="one line, as JSON; used by the script itself")
    given = arguments.parse_args().measure
    if given:
        print(json.dumps(measure(**json.loads(given))))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder)
        stored, lines = dict(n=STORED, folder=folder), []
        jobs = [dict(task=f"scan by {name}", **stored, workers=1) for name in ("ega", "pyarrow", "DuckDB")]
        jobs += [dict(task="closed form", **stored, workers=w) for w in (1, 2)]
        if find_spec("ray"):
            jobs += [dict(task="closed form on Ray", **stored, workers=w) for w in (1, 2)]
        jobs += [dict(task=t, n=n, folder=None, workers=1) for n in SIZES for t in ("fit", "transform", "encode")]
        for job in jobs:
            line = dict(task=job["task"], source="Parquet" if job["folder"] else "made", n_rows=job["n"])
            line |= {"workers": job["workers"]} | in_a_process(**job)
            lines.append(line | (in_a_process(**job | {"task": "estimate"}) if job["task"] == "fit" else {}))
            print(lines[-1], flush=True)
    about = {"dim": D, "classes": CLASSES, "version": ega.__version__, "machine": platform_tag()}
    pd.DataFrame(lines).assign(**about).to_csv(RECORD, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
