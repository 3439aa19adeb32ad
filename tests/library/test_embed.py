"embed: resuming after a kill, shards, unreadable inputs, the cost of eight bits."

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ega.data.arrays import InputError
from ega.data.embed import embed
from ega.data.encoders import ImagePreprocessing, preprocess_image
from ega.data.packs import dequantize, quantize, read_pack
from ega.measure.metrics import loo_lp_at_k

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
QUIET = dict(progress=False, shard_rows=8, batch_size=4)


class BlockEncoder:
    "Encode an image by mean and standard deviation of 2 x 2 blocks; counts its batches."

    modality, name, preprocessing, weights = "image", "blocks", "8 x 8", "0"

    def __init__(self, hang=None):
        self.hang, self.calls = hang, 0

    def prepare(self, raw):
        return preprocess_image(raw, ImagePreprocessing(resize=8, crop=8))

    def encode(self, batch):
        self.calls += 1
        if self.calls == self.hang:
            time.sleep(600)
        a = np.stack(batch).reshape(len(batch), 3, 4, 2, 4, 2)
        return np.concatenate([a.mean((3, 5)).reshape(len(batch), -1), a.std((3, 5)).reshape(len(batch), -1)], 1)


def picture(seed, size=(11, 9), kind="PNG", **options):
    "Bytes of a random image."
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)).save(
        file, kind, **options
    )
    return file.getvalue()


def photos(root, n=30, classes=("b", "a", "c")):
    for i in range(n):
        path = root / classes[i % len(classes)] / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(i))
    return root


@pytest.fixture
def folder(tmp_path):
    return photos(tmp_path / "photos")


class LetterCounts:
    "Encode a text by how often each letter occurs."

    modality, name, preprocessing, weights = "text", "letters", "a to z", "0"

    def prepare(self, text):
        if not text.strip():
            raise ValueError("empty text")
        return text

    def encode(self, batch):
        return np.array([[t.lower().count(chr(c)) for c in range(97, 123)] for t in batch], np.float32)


# -- resume ---------------------------------------------------------------------------------------

CHILD = """
import sys; sys.path[:0] = [{root!r}, {tests!r}]
from test_embed import BlockEncoder, embed
embed({folder!r}, BlockEncoder(hang=6), {out!r}, shard_rows=8, batch_size=4, on_error="skip", progress=False)
"""


def test_embed_resumes_after_kill_with_the_same_bytes(folder, tmp_path):
    (folder / "a" / "013.png").write_bytes(b"broken")
    whole = embed(folder, BlockEncoder(), tmp_path / "whole.parquet", on_error="skip", **QUIET)
    out = tmp_path / "killed.parquet"
    shards = tmp_path / "killed.parquet.shards"
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CHILD.format(root=str(ROOT), tests=str(Path(__file__).parent), folder=str(folder), out=str(out)),
        ]
    )
    limit = time.time() + 60
    while len(list(shards.glob("0*.npz"))) < 2 and child.poll() is None and time.time() < limit:
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not out.exists()
    assert len(list(shards.glob("0*.npz"))) == 2  # killed in the third of four shards
    second = BlockEncoder()
    again = embed(folder, second, out, on_error="skip", **QUIET)
    assert second.calls == 4  # two shards of two batches
    assert out.read_bytes() == whole.path.read_bytes() and again.skipped == whole.skipped == {
        "a/013.png": "UnidentifiedImageError: cannot identify image file"
    }
    assert not shards.exists()


def test_damaged_shard_is_encoded_again(folder, tmp_path):
    whole = embed(folder, BlockEncoder(), tmp_path / "whole.parquet", **QUIET).path.read_bytes()
    bad = folder / "c" / "029.png"
    good = bad.read_bytes()
    stat = bad.stat()
    bad.write_bytes(good[:40] + b"x" * (len(good) - 40))
    os.utime(bad, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time: the source looks unchanged
    with pytest.raises(InputError, match="c/029.png cannot be encoded .*on_error='skip'"):
        embed(folder, BlockEncoder(), tmp_path / "p.parquet", **QUIET)
    first, *_, last = sorted((tmp_path / "p.parquet.shards").glob("0*.npz"))
    bad.write_bytes(good)
    os.utime(bad, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    first.write_bytes(first.read_bytes()[:100])
    last.unlink()
    counting = BlockEncoder()
    assert embed(folder, counting, tmp_path / "p.parquet", **QUIET).path.read_bytes() == whole and counting.calls == 4


@pytest.mark.parametrize(
    "change", ["source", "encoder", "weights", "preprocessing", "precision", "shard_rows", "batch_size"]
)
def test_shards_of_a_different_run_are_rejected(folder, tmp_path, change):
    (folder / "a" / "028.png").write_bytes(b"broken")
    with pytest.raises(InputError, match="028.png"):
        embed(folder, BlockEncoder(), tmp_path / "p.parquet", **QUIET)
    other, settings = BlockEncoder(), dict(QUIET, on_error="skip")
    if change == "source":
        (folder / "a" / "028.png").write_bytes(picture(28))
    elif change in ("shard_rows", "batch_size"):
        settings[change] += 1
    else:
        setattr(other, {"encoder": "name"}.get(change, change), "other")
    with pytest.raises(InputError, match=f"different {change}.*overwrite=True"):
        embed(folder, other, tmp_path / "p.parquet", **settings)
    assert embed(folder, other, tmp_path / "p.parquet", overwrite=True, **settings).rows == (
        30 if change == "source" else 29
    )
    assert other.calls == (10 if change == "shard_rows" else 8)  # no shard was reused


def test_existing_pack_is_replaced_only_with_overwrite(folder, tmp_path):
    path = embed(folder, BlockEncoder(), tmp_path, **QUIET).path
    assert path == tmp_path / "photos__blocks.parquet"
    with pytest.raises(InputError, match="exists already"):
        embed(folder, BlockEncoder(), tmp_path, **QUIET)
    before = path.read_bytes()
    embed(folder, BlockEncoder(), tmp_path, overwrite=True, **QUIET)
    assert path.read_bytes() == before


def test_threads_and_progress_do_not_change_the_pack(folder, tmp_path, capsys):
    a = embed(folder, BlockEncoder(), tmp_path / "a.parquet", shard_rows=8, batch_size=4, threads=1)
    assert "row/s" in capsys.readouterr().err
    b = embed(folder, BlockEncoder(), tmp_path / "b.parquet", threads=7, **QUIET)
    assert capsys.readouterr().err == "" and a.path.read_bytes() == b.path.read_bytes()


def test_processes_do_not_change_the_pack(folder, tmp_path):
    "Two processes, one unreadable image; resumed after an interruption."
    (folder / "a" / "013.png").write_bytes(b"broken")
    whole = embed(folder, BlockEncoder(), tmp_path / "whole.parquet", on_error="skip", **QUIET)

    class Interrupted(BlockEncoder):
        def encode(self, batch):
            if self.calls == 5:
                raise KeyboardInterrupt
            return super().encode(batch)

    with pytest.raises(KeyboardInterrupt):
        embed(folder, Interrupted(), tmp_path / "p.parquet", on_error="skip", processes=2, **QUIET)
    assert len(list((tmp_path / "p.parquet.shards").glob("0*.npz"))) == 2
    second = BlockEncoder()
    done = embed(folder, second, tmp_path / "p.parquet", on_error="skip", processes=2, **QUIET)
    assert second.calls == 4 and done.path.read_bytes() == whole.path.read_bytes() and done.skipped == whole.skipped

    class RecordsProcess(BlockEncoder):
        def prepare(self, raw):
            return np.full((3, 8, 8), os.getpid(), np.float64)

        def encode(self, batch):
            seen.update(int(b.flat[0]) for b in batch)
            return np.ones((len(batch), 2))

    seen = set()
    embed(folder, RecordsProcess(), tmp_path / "w.parquet", processes=2, **QUIET)
    assert len(seen) == 2 and os.getpid() not in seen  # two other processes prepared the inputs


# -- unreadable inputs -------------------------------------------------------------------------------------


def test_unreadable_images_are_skipped_or_raise(folder, tmp_path):
    whole = (folder / "a" / "001.png").read_bytes()
    bad = {
        "a/001.png": whole[: len(whole) // 2],
        "b/006.png": b"",
        "c/002.png": b"GIF89a",
        "c/005.png": b"\x89PNG\r\n\x1a\n" + b"\0" * 40,
    }
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match="a/001.png cannot be encoded"):
        embed(folder, BlockEncoder(), tmp_path / "p.parquet", **QUIET)
    done = embed(folder, BlockEncoder(), tmp_path / "p.parquet", on_error="skip", **QUIET)
    es = read_pack(done.path)
    assert set(done.skipped) == set(bad) and done.rows == es.n == 26 and all(done.skipped.values())
    assert not set(bad) & set(es.ids.tolist()) and all(name in es.meta["notes"] for name in bad)
    full = embed(photos(tmp_path / "again"), BlockEncoder(), tmp_path / "full.parquet", **QUIET)
    rows = dict(zip(read_pack(full.path).ids, read_pack(full.path).x))
    assert all(
        np.array_equal(rows[i], x) for i, x in zip(es.ids, es.x)
    )  # leaving inputs out does not change the other vectors


def test_zero_and_nan_vectors_are_skipped_or_raise(folder, tmp_path):
    class ZeroAndNan(BlockEncoder):
        def encode(self, batch):
            a = super().encode(batch)
            a[0] = 0
            a[-1] = np.nan
            return a

    with pytest.raises(InputError, match="zero or not finite"):
        embed(folder, ZeroAndNan(), tmp_path / "p.parquet", **QUIET)
    assert (
        embed(folder, ZeroAndNan(), tmp_path / "p.parquet", on_error="skip", **QUIET).rows == 7 * 2
    )  # seven batches of 4 lose two each, the last of 2 loses both


def test_bad_arguments_are_rejected(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "x.jpg").write_bytes(b"no")
    with pytest.raises(InputError, match="none of the 1 inputs"):
        embed(empty, BlockEncoder(), tmp_path / "p.parquet", on_error="skip", **QUIET)
    for options, text in (
        (dict(on_error="ignore"), "on_error must be"),
        (dict(batch_size=0), "batch_size"),
        (dict(shard_rows=0), "shard_rows"),
    ):
        with pytest.raises(InputError, match=text):
            embed(folder, BlockEncoder(), tmp_path / "q.parquet", **(dict(QUIET) | options))

    class Flat(BlockEncoder):
        def encode(self, batch):
            return np.zeros(len(batch))

    with pytest.raises(InputError, match="one vector per input"):
        embed(folder, Flat(), tmp_path / "q.parquet", **QUIET)
    (tmp_path / "t.csv").write_text("text\nhello\n")
    with pytest.raises(InputError, match="takes images, but t holds texts"):
        embed(tmp_path / "t.csv", BlockEncoder(), tmp_path / "q.parquet", **QUIET)


def test_error_of_the_encoder_is_raised(folder, tmp_path):
    class Broken(BlockEncoder):
        def encode(self, batch):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        embed(folder, Broken(), tmp_path / "p.parquet", on_error="skip", **QUIET)


# -- the cost of eight bits -------------------------------------------------------------------------------


def test_committed_int8_cost_agrees_with_the_packs():
    "LP@1 of the int8 rows is computed again for the smallest set; the float32 column needs the original images."
    import pandas as pd

    row = pd.read_csv(ROOT / "data/results/int8.csv").set_index("set").loc["cifar100"]
    es = read_pack(ROOT / "data/packs/cifar100__efficientnet_lite0.parquet")
    assert np.array_equal(dequantize(*quantize(es.x)), es.x)  # quantizing again changes nothing
    assert (
        abs(loo_lp_at_k(es.x, es.y).mean() - row.lp_at_1_int8) < 1e-3 and row.rows == es.n == 2033
    )  # one neighbour may differ with another BLAS
