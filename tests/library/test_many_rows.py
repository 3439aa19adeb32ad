"Fits on rows that stay on disk: equal to those in memory, resumed after a kill, on Ray, and what they cost."

import os
import signal
import sys
import tracemalloc
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.exceptions import NotFittedError

from ega import EmbeddingAdapter, InputError, estimator, read_matrix, transform_file
from ega.cli import main
from ega.cost import estimate_cost
from ega.data import vectors
from ega.method.adapters import LinearAdapter, save_adapter
from ega.method.config import build_method_config

D, N = 16, 9000
FEW_STEPS = build_method_config("affine_nca", epochs=2)
FEW_STEPS = replace(FEW_STEPS, train=replace(FEW_STEPS.train, steps_per_epoch=2, batch_size=64))


@pytest.fixture(scope="module")
def rows():
    "Rows (9000, 16) of 24 classes that scatter along the same four directions, and labels, a tenth of them missing."
    rng = np.random.default_rng(0)
    y = rng.integers(24, size=N)
    noise = rng.normal(size=(N, D)) * np.r_[np.full(4, 3.0), np.full(D - 4, 0.5)]
    x = (rng.normal(size=(24, D))[y] + noise).astype("f4")
    return x, np.where(rng.random(N) < 0.1, -1, y)


@pytest.fixture
def folder(rows, tmp_path, monkeypatch):
    "The rows as a folder of three Parquet files; they count as too many for the memory, and a part has 2048 of them."
    monkeypatch.setattr(vectors, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(estimator, "_PART_ROWS", 2048)
    x, y = rows
    (tmp_path / "x").mkdir()
    for i, part in enumerate(np.array_split(np.arange(N), [100, 5000])):
        table = pa.table({"vector": pa.FixedSizeListArray.from_arrays(pa.array(x[part].ravel()), D), "label": y[part]})
        pq.write_table(table, tmp_path / f"x/{i}.parquet", row_group_size=1000)
    return tmp_path / "x"


def settings(**given):
    return dict(candidates=(("few steps", FEW_STEPS),), max_unseen_loss=50.0, strengths=(0, 1)) | given


def same(a, b, x):
    "The same choice, and the same map to rounding."
    assert not a.frozen_ and a.selection_.table.drop(columns="seconds", errors="ignore").equals(
        b.selection_.table.drop(columns="seconds", errors="ignore")
    )
    assert (a.selection_.method, a.selection_.strength) == (b.selection_.method, b.selection_.strength)
    assert a.data_fingerprint_ == b.data_fingerprint_ and np.array_equal(a.fit_row_hashes_, b.fit_row_hashes_)
    assert np.abs(a.transform(x) - b.transform(x)).max() < 1e-6


@pytest.mark.parametrize("n_jobs, max_bytes", [(None, None), (2, 16)])
def test_a_fit_on_disk_is_that_in_memory(rows, folder, n_jobs, max_bytes):
    x, y = rows
    whole = EmbeddingAdapter(**settings(max_bytes=max_bytes)).fit(x, y)
    matrix = read_matrix(folder)
    made = EmbeddingAdapter(**settings(n_jobs=n_jobs, max_bytes=max_bytes)).fit(matrix, matrix.labels())
    same(whole, made, x)
    assert isinstance(z := made.transform(matrix), np.memmap) and np.array_equal(z, made.transform(x))
    assert np.allclose(made.statistics_.squares, whole.statistics_.squares)


@pytest.mark.parametrize("method", ["supcon", "wccn", "lda"])  # lda and supcon use all labelled rows
def test_other_methods_too(rows, folder, method):
    x, y = rows
    method = (method, build_method_config(method, epochs=1))
    whole, made = (EmbeddingAdapter(method, max_unseen_loss=None).fit(given, y) for given in (x, read_matrix(folder)))
    same(whole, made, x)


def test_rows_on_disk_are_added_and_forgotten(rows, folder):
    x, y = rows
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x[y < 20], y[y < 20])
    before = adapter.transform(x)
    more = folder.parent / "more.parquet"
    late = y >= 20
    pq.write_table(pa.table({"vector": list(x[late]), "label": y[late]}), more)
    matrix = read_matrix(more)
    adapter.partial_fit(matrix, matrix.labels())
    assert len(adapter.classes_) == 24 and np.abs(adapter.transform(x) - before).max() > 1e-3
    adapter.forget(matrix, matrix.labels())
    assert np.allclose(adapter.transform(x), before, atol=1e-5)


def test_a_killed_fit_goes_on_where_it_was(rows, folder, tmp_path, monkeypatch):
    x, y = rows
    read, unit_blocks = [], vectors.StoredMatrix.unit_blocks

    def stop_in_the_third_part(self, first=0, size=2**14, stop=None):
        read.append(first)
        if read == [0, 2048, 4096]:
            raise KeyboardInterrupt
        return unit_blocks(self, first, size, stop)

    monkeypatch.setattr(vectors.StoredMatrix, "unit_blocks", stop_in_the_third_part)
    adapter, matrix = EmbeddingAdapter(**settings(checkpoint=str(tmp_path / "parts"))), read_matrix(folder)
    with pytest.raises(KeyboardInterrupt):
        adapter.fit(matrix, y)
    with pytest.raises(NotFittedError):
        adapter.transform(x)
    adapter.fit(matrix, y)
    assert read == [0, 2048, 4096, 4096, 6144, 8192]
    same(EmbeddingAdapter(**settings()).fit(x, y), adapter, x)
    adapter.fit(matrix, np.where(y == 3, -1, y))  # other labels: every part that has such a row is summed again
    assert len(read) == 11


def test_the_shell_goes_on_too_and_leaves_nothing(rows, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    unit_blocks, fails = vectors.StoredMatrix.unit_blocks, [True]

    def fail_once(self, first=0, size=2**14, stop=None):
        if first == 4096 and fails.pop():
            raise OSError("the disk is gone")
        return unit_blocks(self, first, size, stop)

    monkeypatch.setattr(vectors.StoredMatrix, "unit_blocks", fail_once)
    command = ["fit", "x", "-o", "out", "--method", "wccn", "--max-unseen-loss", "none", "--quiet"]
    assert main(command) == 1 and {p.name for p in tmp_path.iterdir()} == {"x", "out.part"}
    half = next((tmp_path / "out.part").iterdir())
    half.with_name(f".{half.name}.0123abcd.tmp").touch()  # as a kill leaves it
    fails.append(False)
    assert main(command) == 0 and {p.name for p in tmp_path.iterdir()} == {"x", "out"}
    whole = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(*rows)
    assert np.allclose(EmbeddingAdapter.load(tmp_path / "out").transform(rows[0]), whole.transform(rows[0]), atol=1e-6)


@pytest.mark.parametrize("name", ["out.part", "out.part/notes.txt", "out.part/mine.npz"])
def test_the_shell_leaves_a_folder_of_others_alone(rows, folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    note = tmp_path / name
    note.parent.mkdir(exist_ok=True)
    note.write_text("mine")
    assert main(["fit", "x", "-o", "out", "--method", "wccn", "--max-unseen-loss", "none", "--quiet"]) == 2
    assert note.read_text() == "mine" and not (tmp_path / "out").exists()


def test_wrong_rows_are_refused(rows, folder, tmp_path):
    x, y = rows
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, y)
    narrow = tmp_path / "narrow.npy"
    np.save(narrow, x[:, :8])
    with pytest.raises(InputError, match="16"):
        adapter.transform(read_matrix(narrow))
    save_adapter(LinearAdapter(D), tmp_path / "a.safetensors")
    transform_file(tmp_path / "a.safetensors", folder, tmp_path / "adapted")
    with pytest.raises(InputError, match="adapted"):
        EmbeddingAdapter().fit(read_matrix(tmp_path / "adapted"), y)
    bad = tmp_path / "bad.npy"
    np.save(bad, np.where(np.arange(N)[:, None] == 7000, np.nan, x))
    for call in (lambda: EmbeddingAdapter().fit(read_matrix(bad), y), lambda: adapter.transform(read_matrix(bad))):
        with pytest.raises(InputError, match="row 7000"):
            call()


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "_IN_MEMORY_BYTES", 0)
    rng = np.random.default_rng(0)
    y = rng.integers(12, size=2**18)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "f4", (len(y), 128))
    for part in np.array_split(np.arange(len(y)), 16):
        x[part] = rng.normal(size=(12, 128))[y[part]] + rng.normal(size=(len(part), 128))
    matrix = read_matrix(tmp_path / "x.npy")
    tracemalloc.start()
    EmbeddingAdapter(("few steps", FEW_STEPS), max_unseen_loss=None).fit(matrix, y)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes / 2, f"{peak / 2**20:.0f} of {x.nbytes / 2**20:.0f} MB"


# -- cost --------------------------------------------------------------------------------------------------


def test_the_cost_is_about_that_of_a_fit(rows, folder):
    x, y = rows
    of_disk, of_array = estimate_cost(read_matrix(folder), y), estimate_cost(x, y, max_bytes=8)
    assert of_disk.n_rows == N and of_disk.index_bytes == N * 4 * D and of_array.index_bytes == N * 8
    assert of_disk.memory_bytes == of_array.memory_bytes > 4e8
    assert 0 < N / of_disk.rows_per_second < of_disk.seconds < 600
    few = estimate_cost(x[:40], y[:40])  # too few rows to compare anything
    assert few.seconds == pytest.approx(40 / few.rows_per_second)


def test_the_shell_prints_the_cost(rows, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    assert main(["estimate", "x", "--max-bytes", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].endswith("0.1 MB.")


# -- Ray ---------------------------------------------------------------------------------------------------


def sum_or_die(marker, *arguments):
    "Sum a part; the first process that is asked to dies instead."
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return estimator.sum_part(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'ega[ray]'")
def test_ray_gives_the_same_adapter_after_a_killed_worker(rows, folder, tmp_path, monkeypatch):
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=os.pathsep.join(sys.path))
    x, y = rows
    whole = EmbeddingAdapter(**settings()).fit(x, y)
    marker = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(estimator, "sum_part", partial(sum_or_die, marker))
        made = EmbeddingAdapter(**settings()).fit(read_matrix(folder, ray=""), y)
    assert marker.exists()
    same(whole, made, x)
