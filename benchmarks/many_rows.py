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


def measure(task, n, folder, workers):
    "Seconds of a task, of its floor, and the peak of the memory."
    use_one_thread()
    matrix = read_matrix(folder) if folder else made(n)
    y = matrix.labels() if folder else labels(n)
    if task in ("fit", "closed form"):
        seconds = fit(matrix, y, select=task == "fit", n_jobs=workers)
        peak = peak_memory_mb()
        return seconds, floor(matrix, square), peak
    if task == "closed form on Ray":
        import ray

        ray.init(num_cpus=workers, log_to_driver=False, logging_level="ERROR")
        return fit(read_matrix(folder, ray=""), y, select=False), np.nan, np.nan
    if task == "scan by DuckDB":
        import duckdb

        duckdb.execute("set threads = 1")
        started = time.perf_counter()
        reader = duckdb.sql(f"select vector from '{folder}/*.parquet'").to_arrow_reader(BLOCK)
        assert sum(len(batch) for batch in reader) == n
        return time.perf_counter() - started, np.nan, peak_memory_mb()
    if task == "scan by pyarrow":
        started = time.perf_counter()
        batches = pyarrow.dataset.dataset(folder).to_batches(columns=["vector"], batch_size=BLOCK, use_threads=False)
        assert sum(len(batch) for batch in batches) == n
        return time.perf_counter() - started, np.nan, peak_memory_mb()
    if task == "scan by ega":
        return floor(matrix, len), np.nan, peak_memory_mb()
    adapter, weight = LinearAdapter(D).eval(), np.eye(D, dtype=np.float32)
    started = time.perf_counter()
    for x in matrix.unit_blocks():
        z = transform(adapter, x)
        if task == "encode":
            quantize_embeddings(z, "binary")
    seconds, peak = time.perf_counter() - started, peak_memory_mb()
    return seconds, floor(matrix, lambda x: x @ weight), peak


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--measure", help="one line, as JSON; used by the script itself")
    given = arguments.parse_args().measure
    if given:
        print(json.dumps(measure(**json.loads(given))))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_folder(folder)
        stored = dict(n=STORED, folder=folder)
        jobs = [dict(task=f"scan by {name}", **stored, workers=1) for name in ("ega", "pyarrow", "DuckDB")]
        jobs += [dict(task="closed form", **stored, workers=w) for w in (1, 2)]
        if find_spec("ray"):
            jobs += [dict(task="closed form on Ray", **stored, workers=w) for w in (1, 2)]
        jobs += [dict(task=t, n=n, folder=None, workers=1) for n in SIZES for t in ("fit", "transform", "encode")]
        lines = []
        for job in jobs:
            command = [sys.executable, __file__, "--measure", json.dumps(job)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            seconds, floor_seconds, peak = json.loads(done.stdout.splitlines()[-1])
            source = "Parquet" if job["folder"] else "made"
            lines.append(
                dict(task=job["task"], source=source, n_rows=job["n"], workers=job["workers"], seconds=seconds)
                | dict(floor_seconds=floor_seconds, peak_mb=peak)
            )
            print(lines[-1], flush=True)
    about = {"dim": D, "classes": CLASSES, "version": ega.__version__, "machine": platform_tag()}
    pd.DataFrame(lines).assign(**about).to_csv(RECORD, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
