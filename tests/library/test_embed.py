"embed: resuming after a kill, shards, unreadable inputs, the cost of eight bits."

import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ega.data.arrays import InputError
from ega.data.datasets import patch_torchvision
from ega.data.embed import embed
from ega.data.encoders import ImagePreprocessing, preprocess_image
from ega.data.packs import dequantize, quantize, read_pack
from ega.measure.metrics import loo_lp_at_k

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
QUIET = dict(progress=False, shard_rows=8, batch_size=4)


def needs(*packages, files=()):
    "Skip with a warning when packages or files are missing."
    absent = [p for p in packages if importlib.util.find_spec(p) is None] + [str(f) for f in files if not f.exists()]
    if absent:
        warnings.warn(f"NOT CHECKED: {', '.join(absent)} not here", stacklevel=2)
        pytest.skip(f"needs {', '.join(absent)}")
    patch_torchvision()


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


class LetterCounts:
    "Encode a text by how often each letter occurs."

    modality, name, preprocessing, weights = "text", "letters", "a to z", "0"

    def prepare(self, text):
        if not text.strip():
            raise ValueError("empty text")
        return text

    def encode(self, batch):
        return np.array([[t.lower().count(chr(c)) for c in range(97, 123)] for t in batch], np.float32)


def picture(seed, size=(11, 9), kind="PNG"):
    "Bytes of a random image."
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
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


# -- resume ------------------------------------------------------------------------------------------------

CHILD = """
import sys; sys.path[:0] = [{root!r}, {tests!r}]
from test_embed import BlockEncoder, embed
embed({folder!r}, BlockEncoder(hang=6), {out!r}, shard_rows=8, batch_size=4, on_error="skip", progress=False)
"""


def test_embed_resumes_after_kill_with_the_same_bytes(folder, tmp_path):
    (folder / "a" / "013.png").write_bytes(b"broken")
    whole = embed(folder, BlockEncoder(), tmp_path / "whole.parquet", on_error="skip", **QUIET)
    out, shards = tmp_path / "killed.parquet", tmp_path / "killed.parquet.shards"
    code = CHILD.format(root=str(ROOT), tests=str(Path(__file__).parent), folder=str(folder), out=str(out))
    child = subprocess.Popen([sys.executable, "-c", code])
    while len(list(shards.glob("0*.npz"))) < 2 and child.poll() is None:
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not out.exists()
    assert len(list(shards.glob("0*.npz"))) == 2  # killed in the third of four shards
    second = BlockEncoder()
    again = embed(folder, second, out, on_error="skip", **QUIET)
    assert second.calls == 4  # two shards of two batches
    assert out.read_bytes() == whole.path.read_bytes() and not shards.exists()
    assert again.skipped == whole.skipped == {"a/013.png": "UnidentifiedImageError: cannot identify image file"}


def test_a_damaged_shard_is_encoded_again(folder, tmp_path):
    whole = embed(folder, BlockEncoder(), tmp_path / "whole.parquet", **QUIET).path.read_bytes()
    bad = folder / "c" / "029.png"
    good, stat = bad.read_bytes(), bad.stat()

    def write(content):
        bad.write_bytes(content)
        os.utime(bad, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time: the source looks unchanged

    write(good[:40] + b"x" * (len(good) - 40))
    with pytest.raises(InputError, match="c/029.png"):
        embed(folder, BlockEncoder(), tmp_path / "p.parquet", **QUIET)
    first, *_, last = sorted((tmp_path / "p.parquet.shards").glob("0*.npz"))
    write(good)
    first.write_bytes(first.read_bytes()[:100])
    last.unlink()
    counting = BlockEncoder()
    assert embed(folder, counting, tmp_path / "p.parquet", **QUIET).path.read_bytes() == whole and counting.calls == 4


CHANGES = ["source", "encoder", "weights", "preprocessing", "precision", "shard_rows", "batch_size"]


@pytest.mark.parametrize("change", CHANGES)
def test_shards_of_a_different_run_are_refused(folder, tmp_path, change):
    (folder / "a" / "028.png").write_bytes(b"broken")
    with pytest.raises(InputError, match="028.png"):
        embed(folder, BlockEncoder(), tmp_path / "p.parquet", **QUIET)
    other, settings = BlockEncoder(), dict(QUIET, on_error="skip")
    if change == "source":
        (folder / "a" / "028.png").write_bytes(picture(28))
    elif change in settings:
        settings[change] += 1
    else:
        setattr(other, {"encoder": "name"}.get(change, change), "other")
    with pytest.raises(InputError, match=change):
        embed(folder, other, tmp_path / "p.parquet", **settings)
    done = embed(folder, other, tmp_path / "p.parquet", overwrite=True, **settings)
    assert done.rows == (30 if change == "source" else 29)
    assert other.calls == (10 if change == "shard_rows" else 8)  # no shard was reused


def test_an_existing_pack_is_replaced_only_with_overwrite(folder, tmp_path):
    path = embed(folder, BlockEncoder(), tmp_path, **QUIET).path
    before = path.read_bytes()
    assert path == tmp_path / "photos__blocks.parquet"
    with pytest.raises(InputError, match="exists"):
        embed(folder, BlockEncoder(), tmp_path, **QUIET)
    embed(folder, BlockEncoder(), tmp_path, overwrite=True, **QUIET)
    assert path.read_bytes() == before


def test_threads_processes_and_progress_do_not_change_the_pack(folder, tmp_path, capsys):
    (folder / "a" / "013.png").write_bytes(b"broken")
    options = dict(QUIET, on_error="skip")
    whole = embed(folder, BlockEncoder(), tmp_path / "a.parquet", threads=1, **dict(options, progress=True))
    assert "row/s" in capsys.readouterr().err
    many = embed(folder, BlockEncoder(), tmp_path / "b.parquet", threads=7, **options)
    assert capsys.readouterr().err == "" and many.path.read_bytes() == whole.path.read_bytes()

    class Interrupted(BlockEncoder):
        def encode(self, batch):
            if self.calls == 5:
                raise KeyboardInterrupt
            return super().encode(batch)

    with pytest.raises(KeyboardInterrupt):
        embed(folder, Interrupted(), tmp_path / "p.parquet", processes=2, **options)
    second = BlockEncoder()
    done = embed(folder, second, tmp_path / "p.parquet", processes=2, **options)
    assert second.calls == 4 and done.path.read_bytes() == whole.path.read_bytes() and done.skipped == whole.skipped


# -- unreadable inputs -------------------------------------------------------------------------------------


def test_unreadable_images_are_skipped_or_raise(folder, tmp_path):
    full = read_pack(embed(folder, BlockEncoder(), tmp_path / "full.parquet", **QUIET).path)
    half = (folder / "a" / "001.png").read_bytes()[:200]
    bad = {"a/001.png": half, "b/006.png": b"", "c/002.png": b"GIF89a", "c/005.png": b"\x89PNG\r\n\x1a\n" + b"\0" * 40}
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match="a/001.png"):
        embed(folder, BlockEncoder(), tmp_path / "p.parquet", **QUIET)
    done = embed(folder, BlockEncoder(), tmp_path / "p.parquet", on_error="skip", **QUIET)
    es = read_pack(done.path)
    assert set(done.skipped) == set(bad) and done.rows == es.n == 26 and all(done.skipped.values())
    assert all(name in es.meta["notes"] for name in bad)
    kept = ~np.isin(full.ids, list(bad))  # leaving inputs out does not change the other vectors
    assert np.array_equal(es.ids, full.ids[kept]) and np.array_equal(es.x, full.x[kept])


def test_zero_and_nan_vectors_are_skipped_or_raise(folder, tmp_path):
    class ZeroAndNan(BlockEncoder):
        def encode(self, batch):
            a = super().encode(batch)
            a[0] = 0
            a[-1] = np.nan
            return a

    with pytest.raises(InputError, match="zero"):
        embed(folder, ZeroAndNan(), tmp_path / "p.parquet", **QUIET)
    done = embed(folder, ZeroAndNan(), tmp_path / "p.parquet", on_error="skip", **QUIET)
    assert done.rows == 7 * 2  # seven batches of 4 lose two each, the last of 2 loses both


class FlatEncoder(BlockEncoder):
    def encode(self, batch):
        return np.zeros(len(batch))


class BrokenEncoder(BlockEncoder):
    def encode(self, batch):
        raise RuntimeError("out of memory")


WRONG = {
    "none can be read": ("none", BlockEncoder, dict(on_error="skip"), InputError),
    "flat vectors": ("photos", FlatEncoder, {}, InputError),
    "texts for an encoder of images": ("t.csv", BlockEncoder, {}, InputError),
    "ids that occur twice": ("twice.csv", LetterCounts, {}, InputError),
    "error of the encoder": ("photos", BrokenEncoder, dict(on_error="skip"), RuntimeError),
}


@pytest.mark.parametrize("source, encoder, options, error", WRONG.values(), ids=WRONG)
def test_wrong_inputs(folder, tmp_path, source, encoder, options, error):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x.jpg").write_bytes(b"no")
    (tmp_path / "t.csv").write_text("text\nhello\n")
    (tmp_path / "twice.csv").write_text("text,id\nhello,a\nbye,a\n")
    with pytest.raises(error):
        embed(tmp_path / source, encoder(), tmp_path / "q.parquet", **QUIET, **options)


# -- the cost of eight bits --------------------------------------------------------------------------------


def test_committed_int8_cost_agrees_with_the_packs():
    "LP@1 of the int8 rows is computed again for the smallest set; the float32 column needs the original images."
    row = pd.read_csv(ROOT / "data/results/int8.csv").set_index("set").loc["cifar100"]
    es = read_pack(ROOT / "data/packs/cifar100__efficientnet_lite0.parquet")
    assert np.array_equal(dequantize(*quantize(es.x)), es.x)  # quantizing again changes nothing
    assert row.rows == es.n == 2033
    assert abs(loo_lp_at_k(es.x, es.y).mean() - row.lp_at_1_int8) < 1e-3  # one neighbour may differ with another BLAS
