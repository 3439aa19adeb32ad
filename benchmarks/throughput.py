"""The speed of `transform_file` against bare matrix products, and a resume test on ten million rows."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from ega.data.arrays import normalize
from ega.data.runtime import linear
from ega.data.vectors import read_matrix
from ega.deploy.transform import progress_file, transform_file
from ega.method.adapters import count_parameters, save_adapter, transform
from ega.testing import peak_memory_mb


def fraction_of_matmul_speed(
    adapter,  # nn.Module; its matrices are its two-dimensional weights
    folder,  # existing folder for the synthetic input and the output
    *,
    rows=16_384,  # of the input
    batch_size=1024,  # rows in a product
    threads=1,  # for both
    rounds=5,  # counted; one more comes first as a warm-up
    rng,  # np.random.Generator
):  # dict
    "How close the speed of `transform_file` comes to the bare matrix products of an adapter."
    source, target = Path(folder) / "share.npy", Path(folder) / "shared.npy"
    _write_synthetic(source, rows, adapter.d, rng)
    weights = [w.detach() for w in adapter.parameters() if w.ndim == 2]

    def transform_once():
        transform_file(adapter, source, target, batch_size=batch_size, threads=threads, device="cpu")
        target.unlink()

    calls = (_products(weights, rows, batch_size), transform_once)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = np.array([[_wall_and_cpu(call) for call in calls] for _ in range(rounds + 1)])
    finally:
        torch.set_num_threads(threads_before)
    source.unlink()
    seconds = seconds[1:]  # (rounds, 2 calls, wall and CPU), without the warm-up
    share, share_cpu = np.median(seconds[:, 0] / seconds[:, 1], 0).round(3).tolist()
    product_seconds, file_seconds = np.median(seconds[:, :, 0], 0).tolist()
    flop_a_row = sum(2 * w.numel() for w in weights)
    return {
        "adapter": _adapter_title(adapter),
        "dim": adapter.d,
        "rows": rows,
        "batch_size": batch_size,
        "threads": threads,
        "rounds": rounds,
        "share": share,
        "share_cpu": share_cpu,
        "rows_per_s": round(rows / file_seconds),
        "products_gflop_per_s": round(rows * flop_a_row / product_seconds / 1e9, 1),
    }


def _products(weights, rows, batch_size):
    "Function that computes one product for each weight and batch, as adapters do: by oneDNN where it is faster."
    operands = [(torch.randn(batch_size, w.shape[1]), w) for w in weights]

    def run():
        for _ in range(0, rows, batch_size):
            for x, w in operands:
                linear(x, w)

    return run


def _wall_and_cpu(call):
    "Wall time and CPU time of a call, in seconds."
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _adapter_title(adapter):
    return f"{type(adapter).__name__}({adapter.d}), {count_parameters(adapter):,} weights"


def _write_synthetic(
    path,  # .npy file to write
    n,  # rows
    d,  # columns
    rng,  # np.random.Generator
):
    "Write random unit rows in float32, one block at a time."
    block = 2**14
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": (n, d)})
        for i in range(0, n, block):
            rows = rng.standard_normal((min(block, n - i), d), dtype=np.float32)
            f.write(normalize(rows).data)


_CHILD = """
import json, sys
from ega.deploy.transform import transform_file
result = transform_file(*sys.argv[1:4], **json.loads(sys.argv[4]))
print(json.dumps(result[:3]))
"""


def _transform_in_process(
    paths,  # adapter, source, target
    options,  # keywords of transform_file
    kill_at=None,  # rows on disk at which the process is killed; None: it may finish
):  # dict: rows, seconds, resumed_rows (each None if it was killed), peak_rss_mb
    "Run `transform_file` in a process of its own and measure its peak memory."
    progress, peak, killed = progress_file(Path(paths[2])), 0, False
    command = [sys.executable, "-c", _CHILD, *map(str, paths), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, peak_memory_mb(process.pid))  # max ignores a nan in second place
            if kill_at and progress.exists() and _rows_on_disk(progress) >= kill_at:
                process.kill()
                process.wait()
                killed = True
            time.sleep(0.01)
        output = process.stdout.read()
    if not killed and process.returncode:
        raise RuntimeError(f"the process ended with exit code {process.returncode}")
    rows, seconds, resumed_rows = (None, None, None) if killed else json.loads(output)
    return {"rows": rows, "seconds": seconds, "resumed_rows": resumed_rows, "peak_rss_mb": round(peak)}


def _rows_on_disk(progress):
    return json.loads(progress.read_text())["rows"]


def resume_test(
    adapter,  # an adapter of ega.method.adapters
    folder,  # existing folder with room for input and output, which are not removed
    *,
    rows,  # of the synthetic input
    kill_share=0.4,  # share of the rows on disk when the first process is killed
    threads=1,  # of each process
    rng,  # np.random.Generator
):  # dict
    "Adapt a synthetic file in a process that is killed and started again, and compare every row."
    folder, options = Path(folder), {"threads": threads, "device": "cpu"}
    paths = adapter_path, source, target = folder / "adapter.safetensors", folder / "x.npy", folder / "z.npy"
    save_adapter(adapter, adapter_path)
    if not source.exists():
        _write_synthetic(source, rows, adapter.d, rng)
    first = _transform_in_process(paths, options, kill_at=kill_share * rows)
    killed_after = _rows_on_disk(progress_file(target))
    second = _transform_in_process(paths, options)
    return {
        "adapter": _adapter_title(adapter),
        "dim": adapter.d,
        "rows": rows,
        "gb_in": round(source.stat().st_size / 1e9, 2),
        "gb_out": round(target.stat().st_size / 1e9, 2),
        "threads": threads,
        "killed_after_rows": killed_after,
        "resumed_rows": second["resumed_rows"],
        "rows_per_s": round((rows - second["resumed_rows"]) / second["seconds"]),
        "peak_rss_mb": max(first["peak_rss_mb"], second["peak_rss_mb"]),
        "rows_equal": _count_equal_rows(adapter, source, target),
    }


def _count_equal_rows(adapter, source, target):
    "The number of rows in the target that equal, bit by bit, the rows of the source adapted in memory."
    x, z, block = read_matrix(source, adapter.d), read_matrix(target, adapter.d), 2**14
    equal = 0
    for before, after in zip(x.blocks(0, block), z.blocks(0, block), strict=True):
        equal += int((transform(adapter, before, device="cpu") == after).all(1).sum())
    return equal
