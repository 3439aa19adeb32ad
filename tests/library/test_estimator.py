"""The estimator: conventions, containers, files, and the example of the README."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from test_selection import world

import ega
from ega import estimator
from ega.adapters import (
    LinearAdapter,
    LoRAAdapter,
    ReleasedEGA,
    adapter_fingerprint,
    save_adapter,
    scale_residual,
    transform,
)
from ega.arrays import InputError, check_and_normalize, encode_partial_labels
from ega.cli import main
from ega.estimator import EmbeddingAdapter
from ega.evaluation import evaluate
from ega.experiments.runs import build_config, fit_map
from ega.methods import fit_adapter
from ega.packs import EmbeddingSet, write_pack
from ega.selection import Selection
from ega.vectors import open_vectors, read_embeddings, read_labels

root = Path(__file__).resolve().parents[2]
EXPECTED_FAILURES = {
    "check_estimators_dtypes": "its integer matrix has a row of zeros, which has no direction; ega refuses such rows everywhere",
    "check_dtype_object": "objects are refused: a matrix of embeddings is a matrix of numbers",
    "check_fit2d_1sample": "one row is refused for its one class, in other words than the check looks for",
    "check_fit2d_1feature": "on a sphere of one dimension there is nothing to whiten, in other words than the check looks for",
}


@pytest.fixture(scope="module")
def fitted():
    x, y = world(0)
    return EmbeddingAdapter().fit(x, y), x, y


@pytest.mark.parametrize(
    "estimator", [EmbeddingAdapter(), EmbeddingAdapter(method="wccn", max_unseen_loss=None)], ids=["auto", "one method"]
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_finds_nothing_else(estimator):
    failed = [c for c in check_estimator(estimator, on_fail=None) if c["status"] == "failed"]
    assert {c["check_name"] for c in failed} <= set(EXPECTED_FAILURES), [
        (c["check_name"], c["exception"]) for c in failed
    ]


def test_import_of_the_name_loads_no_torch():
    code = "import sys, ega; assert 'torch' not in sys.modules; from ega import EGA; assert EGA.__module__ == 'ega.estimator'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_parameters_survive_a_clone_and_a_pipeline(fitted):
    e, x, y = fitted
    twin = clone(e.set_params(max_unseen_loss=1.0))
    assert twin.get_params() == e.get_params() and not hasattr(twin, "adapter_")
    assert np.array_equal(make_pipeline(FunctionTransformer(), twin).fit(x, y).transform(x), e.transform(x))


def test_six_lines_of_the_readme(tmp_path, monkeypatch):
    x, y = world(0)
    monkeypatch.chdir(tmp_path)
    np.save("X.npy", x)
    pd.DataFrame({"label": [f"kind {c}" for c in y]}).to_csv("labels.csv", index=False)
    text = (root / "README.md").read_text()
    lines = text[text.index("from ega import EGA") :].split("```")[0]
    start = text[: text.index("from ega import EGA")].split("```python\n")[-1]
    scope = {}
    exec(start + lines, scope)
    assert len((start + lines).strip().splitlines()) <= 6
    assert scope["Z"].shape == x.shape and np.array_equal(EmbeddingAdapter.load("adapter").transform(x), scope["Z"])


@pytest.mark.parametrize(
    "method", ["wccn", "lda", "whitened_supcon", "linear_supcon", "lora_supcon", "supcon", "ega_paper"]
)
def test_one_adapter_is_what_the_two_steps_were(method):
    "Folding a closed form and the matrix behind it changes distances by rounding only; 2e-5 covers float32 sums of 12 terms at |x| = 1 through two normalisations."
    x, y = world(0)
    config = build_config("unseen", "cub100", method, hidden=8, epochs=2)
    two, one = fit_map(config, x, y)[0](x), transform(fit_adapter(config, x, y), x)
    assert np.allclose(two @ two.T, one @ one.T, atol=2e-5)


def test_what_does_not_fold_is_named():
    recipe = build_config("unseen", "cub100", "whitened_nca", epochs=1)
    block = replace(recipe, adapter=replace(recipe.adapter, kind="ega_released", hidden=8))
    for config, words in ((build_config("unseen", "cub100", "pca"), "subtracts a mean"), (block, "matrix alone")):
        with pytest.raises(InputError, match=words):
            fit_adapter(config, *world(0))


def test_rows_without_a_class_are_never_trained_on(fitted):
    e, x, y = fitted
    wild = np.random.default_rng(5).normal(size=(20, 12))
    with_ = EmbeddingAdapter().fit(np.vstack([wild, x]), np.r_[np.full(20, -1), y])
    assert with_.fingerprint_ == e.fingerprint_ and with_.data_fingerprint_ != e.data_fingerprint_


def test_containers_come_back(fitted, tmp_path):
    e, x, _ = fitted
    z = e.transform(x)
    np.save(tmp_path / "x.npy", x)
    mapped = e.transform(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert type(mapped) is np.memmap and np.array_equal(mapped, z) and type(z) is np.ndarray and z.dtype == np.float32
    for dtype in (torch.float32, torch.float64, torch.float16):
        t = e.transform(torch.from_numpy(x).to(dtype))
        assert (
            isinstance(t, torch.Tensor)
            and t.dtype == dtype
            and np.allclose(t.float().numpy(), z, atol=1e-6 if dtype != torch.float16 else 5e-3)
        )
    assert np.allclose(e.transform(7 * x), z, atol=1e-6)


def test_frozen_gives_the_rows_back():
    x, y = world(0, classes=4)
    e = EmbeddingAdapter().fit(x, y)
    assert e.frozen_ and "too few" in e.selection_.reason and np.allclose(e.transform(x), x, atol=1e-6)


def test_the_strength_that_was_chosen_is_what_is_kept(fitted):
    _, x, y = fitted
    e = EmbeddingAdapter(candidates=("wccn",), strengths=(0.5,)).fit(x, y)
    whole = fit_adapter(e.selection_.config, check_and_normalize(x), y, device="cpu")
    assert (e.selection_.method, e.selection_.strength) == ("wccn", 0.5)
    assert (
        adapter_fingerprint(e.adapter_) == adapter_fingerprint(scale_residual(whole, 0.5)) != adapter_fingerprint(whole)
    )


def test_what_was_asked_for_is_what_is_asked(fitted, monkeypatch):
    "Every setting reaches the selection under its own name; a method by name is the only candidate."
    _, x, y = fitted
    asked, frozen = [], Selection("frozen", 0.0, "", pd.DataFrame(), 1.0, 0.95, 12)
    monkeypatch.setattr(estimator, "select_adapter", lambda x, y, names, **how: asked.append((names, how)) or frozen)
    how = dict(max_unseen_loss=0.3, confidence=0.8, strengths=(0.4,), folds=3, seed=5, device="cpu", progress=True)
    EmbeddingAdapter(candidates=("lda",), **how).fit(x, y)
    EmbeddingAdapter("wccn", **how).fit(x, y)
    assert asked == [(("lda",), how), (("wccn",), how)]


def test_the_fingerprint_of_the_data_is_of_rows_and_labels(fitted):
    _, x, y = fitted
    made = [
        EmbeddingAdapter("wccn", max_unseen_loss=None).fit(*data).data_fingerprint_
        for data in ((x, y), (x, np.r_[y[:-1], -1]), (-x, y), (x, y))
    ]
    assert len(set(made)) == 3 and made[0] == made[3]


def test_without_a_budget_nothing_is_asked():
    x, y = world(0, classes=4)
    e = EmbeddingAdapter(method="wccn", max_unseen_loss=None).fit(x, y)
    assert not e.frozen_ and np.allclose(
        e.transform(x), fit_map(build_config("unseen", "cub100", "wccn"), x, y)[0](x), atol=1e-5
    )
    with pytest.raises(InputError, match="name a method"):
        EmbeddingAdapter(max_unseen_loss=None).fit(x, y)


@pytest.mark.parametrize("where", ["folder", "one.safetensors"])
def test_a_file_holds_everything(fitted, tmp_path, where):
    e, x, _ = fitted
    e.save(tmp_path / where)
    again = EmbeddingAdapter.load(tmp_path / where)
    assert np.array_equal(again.transform(x), e.transform(x)) and again.get_params() == e.get_params()
    for name in ("fingerprint_", "data_fingerprint_", "frozen_", "n_features_in_"):
        assert getattr(again, name) == getattr(e, name)
    assert np.array_equal(again.classes_, e.classes_) and again.selection_.table.verdict.equals(
        e.selection_.table.verdict
    )
    names = sorted(f.suffix for f in tmp_path.rglob("*.*") if f.is_file())
    assert names == [".json", ".safetensors"]


def spoil(folder, **change):
    "Change the description in place."
    path = folder / "adapter.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda f: (f / "adapter.json").unlink(), "no such description"),
        (lambda f: (f / "adapter.safetensors").unlink(), "no such adapter"),
        (lambda f: (f / "adapter.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "adapter.json").write_text("[" * 10**5), "cannot be read"),
        (lambda f: (f / "adapter.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (lambda f: spoil(f, fingerprint="0" * 64), "other weights"),
        (lambda f: spoil(f, n_features_in=3), "other weights"),
        (lambda f: spoil(f, settings={"method": "wccn", "steps": 3}), "no setting 'steps'"),
        (lambda f: spoil(f, selection={"table": []}), "cannot be read"),
        (lambda f: spoil(f, classes=[1, "a"]), "classes are neither"),
        (lambda f: spoil(f, classes=[1, 2**63]), "64-bit"),
        (lambda f: save_adapter(LinearAdapter(12), f / "adapter.safetensors"), "other weights"),
    ],
)
def test_hostile_files_are_named(fitted, tmp_path, harm, words):
    fitted[0].save(tmp_path / "a")
    harm(tmp_path / "a")
    with pytest.raises(InputError, match=words):
        EmbeddingAdapter.load(tmp_path / "a")


@pytest.mark.parametrize(
    "make",
    [
        lambda g: LinearAdapter(12),
        lambda g: LoRAAdapter(12, rank=3, gen=g),
        lambda g: ReleasedEGA(12, hidden=16, gen=g),
        lambda g: ega.adapters.PaperEGA(12, hidden=16, gen=g),
    ],
)
def test_onnx_is_torch(fitted, tmp_path, make):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    e, x, _ = fitted
    e = copy.copy(e)
    g = torch.Generator().manual_seed(0)
    e.adapter_ = make(g).eval()
    with torch.no_grad():
        [p.add_(0.3 * torch.randn(p.shape, generator=g)) for p in e.adapter_.parameters()]
    session = onnxruntime.InferenceSession(str(e.to_onnx(tmp_path / "a.onnx")), providers=["CPUExecutionProvider"])
    for rows in (5 * x[:1], x[:7]):
        assert np.abs(session.run(["z"], {"x": rows})[0] - e.transform(rows)).max() < 1e-5


def test_hub_and_back_without_a_network(fitted, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    e, x, _ = fitted
    sent = {}

    def upload_folder(self, *, repo_id, folder_path, **kw):
        sent[repo_id] = sorted(f.name for f in Path(folder_path).iterdir())
        e.save(tmp_path / "repo")

    monkeypatch.setattr(hub.HfApi, "create_repo", lambda self, repo_id, **kw: type("R", (), {"repo_id": repo_id})())
    monkeypatch.setattr(hub.HfApi, "upload_folder", upload_folder)
    e.push_to_hub("me/adapter")
    assert {"adapter.json", "adapter.safetensors"} <= set(sent["me/adapter"])
    assert np.array_equal(EmbeddingAdapter.from_pretrained(str(tmp_path / "repo")).transform(x), e.transform(x))
    fetched = []
    monkeypatch.setattr(
        hub,
        "snapshot_download",
        lambda name, **how: fetched.append((name, how["allow_patterns"])) or str(tmp_path / "repo"),
    )
    assert np.array_equal(
        estimator._hub_class(EmbeddingAdapter)._from_pretrained(model_id="me/adapter").estimator.transform(x),
        e.transform(x),
    ) and fetched == [("me/adapter", ["adapter.*"])]  # nothing else of a repository is fetched


def test_a_missing_extra_is_named(fitted, tmp_path, monkeypatch):
    for package, extra, call in (
        ("onnx", "onnx", lambda: fitted[0].to_onnx(tmp_path / "a.onnx")),
        ("huggingface_hub", "hub", lambda: fitted[0].push_to_hub("a/b")),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"ega\[{extra}\]"):
            call()
        assert f"\n{extra} = [" in (root / "pyproject.toml").read_text()


def test_labels_in_two_kinds():
    numbers, classes = encode_partial_labels(np.array([5.0, -1.0, 2.0]), 3)
    assert numbers.tolist() == [1, -1, 0] and classes.tolist() == [2, 5]
    numbers, classes = encode_partial_labels(["b", None, "a"], 3)
    assert numbers.tolist() == [1, -1, 0] and classes.tolist() == ["a", "b"]
    for bad in ([1, 2], ["a", "b"], [-2, 1, 1], [0.5, 1, 1]):
        with pytest.raises(InputError):
            encode_partial_labels(bad, 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "The same rows in every format."
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("files")
    x, y = world(0)
    np.save(folder / "x.npy", x)
    np.savez(folder / "x.npz", X=x, y=y)
    save_file({"X": x}, folder / "x.safetensors")
    np.save(folder / "y.npy", y)
    pq.write_table(pa.table({"v": list(x), "name": [str(i) for i in y]}), folder / "x.parquet")
    write_pack(
        EmbeddingSet(x, y, classes=[f"kind {i}" for i in range(12)], meta={"set": "s", "encoder": "e"}),
        folder / "pack.parquet",
        dtype="float32",
    )
    (folder / "y.csv").write_text("id,label\n" + "".join(f"{i},kind {c}\n" for i, c in enumerate(y)))
    return folder


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors", "x.parquet", "pack.parquet"])
def test_rows_are_read_from_every_format(files, name):
    x, labels = read_embeddings(files / name)
    assert np.allclose(x, world(0)[0], atol=1e-6) and (labels is None) == (name != "pack.parquet")
    if labels is not None:
        assert labels[0] == "kind 0" and len(labels) == len(x)


def test_wrong_files_are_named(files, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"PK")
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    for call, words in (
        (lambda: read_embeddings(tmp_path / "no.npz"), "no such file"),
        (lambda: read_embeddings(tmp_path / "bad.npz"), "cannot be read"),
        (lambda: read_embeddings(files / "x.npz", "z"), "expected one matrix 'z'"),
        (lambda: read_embeddings(files / "y.csv"), "ending"),
        (lambda: read_labels(tmp_path / "bad.csv"), "cannot be read"),
        (lambda: read_labels(tmp_path / "two.csv"), "--label-column"),
        (lambda: open_vectors(files / "x.npy", 5), "5 columns"),
    ):
        with pytest.raises(InputError, match=words):
            call()


def test_the_command_fits_evaluates_and_transforms(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y, out = str(files / "x.npy"), str(files / "y.csv"), str(tmp_path / "adapter")
    assert main(["fit", x, y, "-o", out, "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "pass" in text and "pseudo-unseen" in text and not EmbeddingAdapter.load(out).frozen_
    assert main(["fit", x, y, "-o", out]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main(["fit", str(files / "pack.parquet"), "-o", out, "--overwrite", "--json", "--method", "wccn"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "wccn" and told["classes"] == 12 and told["table"][0]["method"] == "frozen"
    assert main(["evaluate", out, x, y, "--json"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)
    assert seen["classes"] == "seen" and seen["low"] > 0 and seen["rows"] == 168
    assert main(["transform", out, x, "-o", str(tmp_path / "z.npy"), "--quiet"]) == 0
    assert np.allclose(np.load(tmp_path / "z.npy"), EmbeddingAdapter.load(out).transform(np.load(x)), atol=1e-6)
    np.save("long.npy", 3 * np.load(x))  # what fit takes, transform takes
    assert main(["transform", out, "long.npy", "-o", "y.npy", "--quiet"]) == 0 and np.allclose(
        np.load("y.npy"), np.load("z.npy"), atol=1e-6
    )
    assert (
        main(["transform", f"{out}/adapter.safetensors", "long.npy", "-o", "n.npy", "--quiet"]) == 2
        and "--normalize" in capsys.readouterr().err
    )
    capsys.readouterr()
    assert main(["fit", x, "-o", "b"]) == 2 and "labels" in capsys.readouterr().err
    assert main(["evaluate", "nowhere", x, y]) == 2 and "no such" in capsys.readouterr().err


def test_seen_and_unseen_are_told_apart(fitted):
    e, x, y = fitted
    other, names = world(7, classes=6)
    frame = evaluate(e, np.vstack([x, other]), np.r_[y, names + 100]).set_index("classes")
    assert frame.loc["seen", "count"] == 12 and frame.loc["unseen", "count"] == 6 and frame.loc["unseen", "rows"] == 84
    alone = evaluate(e, np.vstack([x, other[:1], other]), np.r_[y, 999, names + 100]).set_index(
        "classes"
    )  # has no classmate to be found
    assert (
        alone.loc["unseen"].drop("rows").equals(frame.loc["unseen"].drop("rows")) and alone.loc["unseen", "rows"] == 84
    )
    with pytest.raises(InputError, match="integers"):
        evaluate(e, x, [f"k{c}" for c in y])
    for call in (
        lambda: evaluate(EmbeddingAdapter(), x, y),
        lambda: EmbeddingAdapter().transform(x),
        lambda: EmbeddingAdapter().save("none"),
        lambda: EmbeddingAdapter().to_onnx("none"),
    ):
        with pytest.raises(NotFittedError):
            call()
