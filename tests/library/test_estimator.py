"""EmbeddingAdapter: scikit-learn's conventions, containers, files, and the example of the README."""

import copy
import json
import os
import pickle
import signal
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator
from test_selection import world

import ega
from ega import estimator
from ega.cli import main
from ega.data.arrays import InputError, check_X, normalize
from ega.data.files import hash_arrays
from ega.deploy.report import write_report
from ega.deploy.transform import transform_file
from ega.estimator import EmbeddingAdapter
from ega.experiments.runs import build_config, fit_and_return_transform
from ega.measure.evaluation import evaluate, hash_unit_rows
from ega.method.adapters import (
    LinearAdapter,
    LoRAAdapter,
    ReleasedEGA,
    adapter_fingerprint,
    save_adapter,
    scale_residual,
    transform,
)
from ega.method.compression import RowFormat, as_stored
from ega.method.config import build_method_config
from ega.method.interface import as_adapter
from ega.method.methods import fit_adapter
from ega.selection import Selection

root = Path(__file__).resolve().parents[2]
EXPECTED_FAILURES = {
    "check_estimators_dtypes": "its integer matrix has a row of zeros, which has no direction and is refused",
    "check_dtype_object": "arrays of objects are refused",
    "check_fit2d_1sample": "one row is refused because it has one class, and the check expects another message",
    "check_fit2d_1feature": "on a sphere of one dimension nothing can be whitened; the check expects another message",
}


@pytest.fixture(scope="module")
def fitted():
    x, y = world(0)
    return EmbeddingAdapter().fit(x, y), x, y


@pytest.mark.parametrize(
    "instance", [EmbeddingAdapter(), EmbeddingAdapter(method="wccn", max_unseen_loss=None)], ids=["auto", "one method"]
)
@pytest.mark.filterwarnings("ignore")
def test_check_estimator_of_scikit_learn(instance):
    failed = [c for c in check_estimator(instance, on_fail=None) if c["status"] == "failed"]
    assert {c["check_name"] for c in failed} <= set(EXPECTED_FAILURES), [
        (c["check_name"], c["exception"]) for c in failed
    ]


@pytest.mark.parametrize(
    "check",
    [
        "check_dataframe_column_names_consistency",
        "check_n_features_in_after_fitting",
        "check_transformer_get_feature_names_out",
        "check_transformer_get_feature_names_out_pandas",
        "check_set_output_transform",
        "check_set_output_transform_pandas",
        "check_global_output_transform_pandas",
    ],
)
@pytest.mark.filterwarnings("ignore:X .*feature names")
def test_checks_that_scikit_learn_makes_of_its_own_estimators(check):
    "check_estimator leaves them out, or has them under other names."
    getattr(estimator_checks, check)("EmbeddingAdapter", EmbeddingAdapter("wccn", max_unseen_loss=None))


@pytest.mark.parametrize("names", [[f"dim{i}" for i in range(12)], range(12)], ids=["texts", "integers"])
def test_columns_of_a_dataframe_are_kept_and_compared(fitted, names, tmp_path):
    _, x, y = fitted
    frame = pd.DataFrame(x, columns=names)
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, y)
    e.save(tmp_path / "a")
    for again in (e, EmbeddingAdapter.load(tmp_path / "a"), pickle.loads(pickle.dumps(e))):
        assert np.array_equal(again.transform(frame), e.transform(frame)) and type(again.transform(frame)) is np.ndarray
        with pytest.raises(InputError, match="order"):
            again.transform(frame[frame.columns[::-1]])
    for compare in (e.fit, lambda *xy: evaluate(e, *xy), lambda *xy: write_report(e, *xy, tmp_path / "r.md")):
        with pytest.raises(InputError, match="order"):
            compare(frame.set_axis(y), pd.Series(y[::-1], index=y[::-1]))
    if isinstance(names, list):
        assert e.feature_names_in_.tolist() == names
        with pytest.raises(InputError, match="missing"):
            e.transform(frame.drop(columns="dim3"))
        with pytest.warns(UserWarning, match="fitted with feature names"):
            e.transform(x)
        assert not hasattr(e.fit(x, y), "feature_names_in_")


@pytest.mark.parametrize("seed", range(2))
def test_names_and_numbers_of_classes_change_nothing(seed):
    "Near the edge of the safety check, another division of the classes would change the selection."
    x, y = world(seed, shared=False, classes=14)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(y))
    x, y = x[rows], y[rows]
    numbers, texts = rng.permutation(14), np.array([f"{c:x}" for c in rng.permutation(2**20)[:14]])
    renamed = [numbers[y], texts[y], pd.Categorical(texts[y])]
    first = EmbeddingAdapter(candidates=("wccn", "linear_supcon")).fit(x, y)
    for labels in renamed:
        e = EmbeddingAdapter(candidates=("wccn", "linear_supcon")).fit(x, labels)
        assert e.selection_.table.drop(columns="seconds").equals(first.selection_.table.drop(columns="seconds"))
        assert e.fingerprint_ == first.fingerprint_ and e.classes_.tolist() == sorted(set(labels))


def test_rows_of_any_norm_give_the_same_everywhere(fitted, tmp_path):
    "Estimator, evaluation, file and index; unit rows of float32 keep their bits."
    e, x, y = fitted
    long = x * np.random.default_rng(0).uniform(0.01, 100, (len(x), 1)).astype(np.float32)
    z, m = transform(e.adapter_, x), as_adapter(e)
    assert np.array_equal(e.transform(x), z)
    assert np.array_equal(m.transform(x), normalize(x @ m.matrix.T + m.offset)) and e.adapter_.bias
    e.save(tmp_path / "a")
    for name, rows in (("x", x), ("long", long)):
        np.save(tmp_path / f"{name}.npy", rows)
        transform_file(tmp_path / "a/adapter.safetensors", tmp_path / f"{name}.npy", tmp_path / f"{name}_z.npy")
    assert np.array_equal(np.load(tmp_path / "x_z.npy"), z)
    for result in (e.transform(long), m.transform(long), np.load(tmp_path / "long_z.npy")):
        assert np.allclose(result, z, atol=1e-6)
    assert evaluate(e, long, y).equals(evaluate(e, x, y))


def test_results_and_numbers_of_numpy_survive_save_exactly(tmp_path):
    x, y = world(0)
    e = EmbeddingAdapter("wccn", max_unseen_loss=np.float32(1), cv=np.int64(4)).set_params(strengths=np.array([0.5, 1]))
    e.fit(x, y).selection_.table.loc[0, "gain"] = 0.1 + 0.2  # 17 digits
    e.cv_results_["split0_seen_change"][1] = np.nan  # of a fold without queries; JSON has no nan
    again = EmbeddingAdapter.load(e.save(tmp_path / "a"))
    assert again.strengths == (0.5, 1.0) and again.selection_.table.equals(e.selection_.table)
    assert list(again.cv_results_) == list(e.cv_results_) and again.cv_results_["params"] == e.cv_results_["params"]
    for key, values in e.cv_results_.items():
        if key != "params":
            np.testing.assert_array_equal(again.cv_results_[key], values)
            assert again.cv_results_[key].dtype == values.dtype


def test_weights_changed_after_fit_are_not_saved(fitted, tmp_path):
    e = copy.deepcopy(fitted[0])
    for tensor in e.adapter_.state_dict().values():
        tensor += 0.1
    with pytest.raises(InputError, match="weights"):
        e.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_readme_example_runs_in_six_lines(tmp_path, monkeypatch):
    x, y = world(0)
    monkeypatch.chdir(tmp_path)
    np.save("X.npy", x)
    pd.DataFrame({"label": [f"kind {c}" for c in y]}).to_csv("labels.csv", index=False)
    text = (root / "README.md").read_text()
    at = text.index("from ega import EmbeddingAdapter")
    code = text[:at].split("```python\n")[-1] + text[at:].split("```")[0]
    scope = {}
    exec(code, scope)
    assert len(code.strip().splitlines()) <= 6
    assert scope["Z"].shape == x.shape and np.array_equal(EmbeddingAdapter.load("adapter").transform(x), scope["Z"])


def test_transform_returns_the_container_it_was_given(fitted, tmp_path):
    e, x, _ = fitted
    z = e.transform(x)
    np.save(tmp_path / "x.npy", x)
    mapped = e.transform(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert type(mapped) is np.memmap and np.array_equal(mapped, z) and type(z) is np.ndarray and z.dtype == np.float32
    for dtype in (torch.float32, torch.float64, torch.float16):
        t = e.transform(torch.from_numpy(x).to(dtype))
        tolerance = 1e-6 if dtype != torch.float16 else 5e-3
        assert isinstance(t, torch.Tensor) and t.dtype == dtype
        assert np.allclose(t.float().numpy(), z, atol=tolerance)
    assert np.allclose(e.transform(7 * x), z, atol=1e-6)


def test_fitted_adapter_has_the_selected_strength(fitted):
    _, x, y = fitted
    e = EmbeddingAdapter(candidates=("wccn",), strengths=(0.5,)).fit(x, y)
    full = fit_adapter(e.selection_.config, check_X(x), y, device="cpu")
    half = adapter_fingerprint(scale_residual(full, 0.5))
    assert (e.selection_.method, e.selection_.strength) == ("wccn", 0.5)
    assert e.fingerprint_ == adapter_fingerprint(e.adapter_) == half != adapter_fingerprint(full)


def by_first_occurrence(y):
    "Labels as 0, 1, ... in the order in which they first occur; -1 stays."
    numbers, known = y.copy(), y >= 0
    numbers[known] = pd.factorize(y[known])[0]
    return numbers


def test_every_parameter_reaches_the_selection(fitted, monkeypatch):
    "A method by name is the only candidate."
    _, x, y = fitted
    calls, frozen = [], Selection("", 1.0, 0.95, 12)

    def record(x, y, names, *, progress, **settings):
        calls.append((names, settings))
        return frozen

    monkeypatch.setattr(estimator, "select_adapter", record)
    same = dict(max_unseen_loss=0.3, unseen_share=0.2, confidence=0.8, strengths=(0.4,), random_state=5, n_jobs=2)
    EmbeddingAdapter(candidates=("lda",), cv=3, device="cpu", **same).fit(x, y)
    EmbeddingAdapter("wccn", cv=3, device="cpu", **same).fit(x, y)
    settings = same | {"n_folds": 3, "device": torch.device("cpu"), "formats": [RowFormat(x.shape[1])]}
    assert calls == [(("lda",), settings), (("wccn",), settings)]


@pytest.fixture(scope="module")
def many_rows():
    "More than two blocks of rows; some have norm 1, some no label."
    rng = np.random.default_rng(0)
    y = rng.integers(-1, 12, size=2**15 + 1000)
    noise = rng.normal(size=(len(y), 8)) * np.r_[np.full(3, 3.0), np.full(5, 0.5)]
    x = (rng.normal(size=(12, 8))[y] + noise).astype("f4")
    x[::3] = ega.normalize(x[::3])
    return x, y


def few_steps(method="affine_nca"):
    "A pair (name, MethodConfig) whose training needs 128 rows."
    config = build_method_config(method, epochs=2)
    return "few steps", replace(config, train=replace(config.train, steps_per_epoch=2, batch_size=32))


def test_rows_are_checked_and_hashed_in_blocks_as_a_whole(many_rows):
    x, y = many_rows
    e = EmbeddingAdapter(few_steps(), max_unseen_loss=None).fit(x, y)
    unit = check_X(x)
    assert e.data_fingerprint_ == hash_arrays(hash_unit_rows(unit), y)
    assert np.array_equal(e.fit_row_hashes_, np.unique(hash_unit_rows(unit[y >= 0])))
    assert np.array_equal(e.transform(x), transform(e.adapter_, unit))
    bad = x.copy()
    bad[2**14 + 5] = np.nan
    for call in (lambda: e.transform(bad), lambda: EmbeddingAdapter().fit(bad, y)):
        with pytest.raises(InputError, match="row 16389"):
            call()


@pytest.mark.filterwarnings("error")  # such as those of torch for rows that cannot be written
@pytest.mark.parametrize("strength", [1.0, None])  # None: selected
def test_many_rows_are_fitted_in_blocks_as_a_whole(many_rows, strength, tmp_path, monkeypatch):
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    x, y = many_rows
    np.save(tmp_path / "x.npy", x)
    settings = dict(max_unseen_loss=None) if strength else dict(max_unseen_loss=100.0, strengths=(0.5,))
    made = [
        EmbeddingAdapter(few_steps(), **settings).fit(rows, y)
        for rows in (x, np.load(tmp_path / "x.npy", mmap_mode="r"), torch.from_numpy(x))
    ]
    assert made[0].selection_.strength == (strength or 0.5)
    assert len({e.fingerprint_ for e in made}) == len({e.data_fingerprint_ for e in made}) == 1
    unit, known, numbers = check_X(x), y >= 0, by_first_occurrence(y)
    whole = fit_adapter(few_steps()[1], unit[known], numbers[known], strength=strength or 0.5, device="cpu")
    assert np.allclose(made[0].transform(x), transform(whole, unit), atol=1e-5)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_a_large_memory_map_is_never_in_memory_as_a_whole(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    rng = np.random.default_rng(0)
    y = rng.integers(12, size=2**17)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", dtype, (len(y), 64))
    x[:] = (rng.normal(size=(12, 64))[y] + rng.normal(size=x.shape)).astype(dtype)
    e = EmbeddingAdapter(few_steps(), max_unseen_loss=None)
    tracemalloc.start()
    e.fit(x, y)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * x.size, f"{peak / 2**20:.0f} MB"


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_score_is_leave_one_out_lp_at_1(precision):
    x, y = world(0, classes=6)
    y[:5], y[5] = -1, 99  # no label, and a class of one row
    e = EmbeddingAdapter("wccn", max_unseen_loss=None, precision=precision).fit(x, y)
    z = e.transform(x)
    stored = as_stored(z, e.row_format_) if precision == "int8" else z
    hits = []
    for i in np.flatnonzero((y >= 0) & (y != 99)):
        distances = np.where((np.arange(len(y)) == i) | (y < 0), np.inf, ((stored - z[i]) ** 2).sum(1))
        hits.append(y[distances.argmin()] == y[i])
    assert e.score(x, y) == pytest.approx(np.mean(hits)) and 0.2 < e.score(x, y) < 1
    with pytest.raises(InputError):
        e.score(x[:2], [0, 1])


def test_cross_validation_and_grid_search_take_the_adapter_as_it_is():
    x, y = world(0, classes=6)
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None)
    scores = cross_val_score(adapter, x, y, cv=3)
    assert scores.shape == (3,) and (scores > 0.2).all()
    search = GridSearchCV(adapter, {"method": ["wccn", "frozen"]}, cv=3).fit(x, y)
    assert search.best_score_ == max(scores.mean(), search.cv_results_["mean_test_score"][1])


def test_without_max_unseen_loss_nothing_is_compared():
    x, y = world(0, classes=4)
    e = EmbeddingAdapter(method="wccn", max_unseen_loss=None).fit(x, y)
    assert not e.frozen_ and np.allclose(
        e.transform(x), fit_and_return_transform(build_config("unseen", "cub100", "wccn"), x, y)[0](x), atol=1e-5
    )
    with pytest.raises(InputError, match="name a method"):
        EmbeddingAdapter(max_unseen_loss=None).fit(x, y)
    frozen = EmbeddingAdapter("frozen", max_unseen_loss=None).fit(x, y)
    assert frozen.frozen_ and frozen.selection_.strength == 0


@pytest.mark.parametrize("where", ["folder", "one.safetensors"])
def test_saved_estimator_loads_with_all_its_attributes(fitted, tmp_path, where):
    e, x, _ = fitted
    e.save(tmp_path / where)
    again = EmbeddingAdapter.load(tmp_path / where)
    assert np.array_equal(again.transform(x), e.transform(x)) and again.get_params() == e.get_params()
    for name in ("fingerprint_", "data_fingerprint_", "frozen_", "n_features_in_", "classes_", "fit_row_hashes_"):
        assert np.array_equal(getattr(again, name), getattr(e, name))
    assert (again.selection_.config, again.selection_.n_classes) == (e.selection_.config, 12)
    names = sorted(f.suffix for f in tmp_path.rglob("*.*") if f.is_file())
    assert names == [".json", ".npy", ".safetensors"]
    assert len(e.fit_row_hashes_) == len(x)  # eight bytes for each row that was fitted on


@pytest.mark.parametrize("other", ["none", "damaged", "of another adapter"])
@pytest.mark.parametrize("name", ["json", "safetensors", "fit_rows.npy", "statistics.npz"])
def test_files_that_do_not_belong_together_are_refused(fitted, tmp_path, name, other):
    _, x, y = fitted
    one, two = (EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x[: 168 - n], y[: 168 - n]) for n in (0, 20))
    one.save(tmp_path / "a", statistics=True)
    two.save(tmp_path / "b", statistics=True)
    file = tmp_path / "a" / f"adapter.{name}"
    if other == "none":
        file.unlink()
    elif other == "damaged":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        file.write_bytes((tmp_path / "b" / file.name).read_bytes())
    with pytest.raises(InputError):
        EmbeddingAdapter.load(tmp_path / "a")


def test_a_description_that_was_changed_or_is_of_another_version_is_refused(fitted, tmp_path):
    fitted[0].save(tmp_path / "a")
    path = tmp_path / "a/adapter.json"
    values = json.loads(path.read_text())
    changed = values | {"settings": values["settings"] | {"cv": 5}}
    removed = [{key: value for key, value in values.items() if key != gone} for gone in ("sha256", "files")]
    other_version = {"ega": "0.1.0", "settings": {"method": "auto", "budget": 50.0}, "classes": [0, 1]}
    for wrong in (changed, *removed, other_version):
        path.write_text(json.dumps(wrong))
        with pytest.raises(InputError):
            EmbeddingAdapter.load(tmp_path / "a")
    path.write_text(json.dumps(values, indent=3, sort_keys=True))  # the same values, written otherwise
    assert np.array_equal(EmbeddingAdapter.load(tmp_path / "a").classes_, fitted[0].classes_)


def test_what_an_interrupted_save_left_is_refused_and_replaced(fitted, tmp_path, monkeypatch):
    e, x, _ = fitted
    monkeypatch.setattr(estimator, "file_hash", lambda path: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        e.save(tmp_path / "a")
    monkeypatch.undo()
    with pytest.raises(InputError, match="no such file"):
        EmbeddingAdapter.load(tmp_path / "a")
    assert np.array_equal(EmbeddingAdapter.load(e.save(tmp_path / "a")).transform(x), e.transform(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda g: LinearAdapter(12),
        lambda g: LinearAdapter(12, bias=True),
        lambda g: LoRAAdapter(12, rank=3, gen=g),
        lambda g: ReleasedEGA(12, hidden=16, gen=g),
        lambda g: ega.method.adapters.PaperEGA(12, hidden=16, gen=g),
    ],
)
def test_onnx_equals_torch(fitted, tmp_path, make):
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
        z = e.adapter_(torch.from_numpy(normalize(rows))).detach().numpy()
        assert np.abs(session.run(["z"], {"x": rows})[0] - z).max() < 1e-5


def test_upload_and_download_without_a_network(fitted, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    (e, x, _), sent, fetched = fitted, [], []

    def upload_folder(self, *, folder_path, **options):
        sent.extend(os.listdir(folder_path))

    def snapshot_download(name, **options):
        fetched.append((name, options))
        return str(e.save(tmp_path / "r"))

    monkeypatch.setattr(hub.HfApi, "create_repo", lambda self, repo_id, **kw: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    e.push_to_hub("me/adapter")
    assert {"adapter.fit_rows.npy", "adapter.json", "adapter.safetensors"} <= set(sent)
    loaded = EmbeddingAdapter.from_pretrained("me/adapter", revision="v1")
    assert np.array_equal(loaded.transform(x), e.transform(x))
    assert fetched == [("me/adapter", {"allow_patterns": ["adapter.*"], "revision": "v1"})]  # and nothing else
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: open(tmp_path / "not here"))
    with pytest.raises(InputError, match="nobody/nothing"):
        EmbeddingAdapter.from_pretrained("nobody/nothing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert EmbeddingAdapter.from_pretrained(str(tmp_path / "r")).fingerprint_ == e.fingerprint_  # a local folder


@pytest.fixture
def sigint():
    "The SIGINT handler of Python, also where the tests were started in the background, which ignores the signal."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_fit_saves_leaves_all_files(sigint, tmp_path, monkeypatch):
    "The weights are written first; an interruption behind them waits until the description is written."
    monkeypatch.chdir(tmp_path)
    for name, values in zip("xy", world(0)):
        np.save(f"{name}.npy", values)

    def interrupted(*args):
        save_adapter(*args)
        signal.raise_signal(signal.SIGINT)

    assert main(["fit", "x.npy", "y.npy", "-o", "a", "--quiet"]) == 0
    before = EmbeddingAdapter.load("a")
    monkeypatch.setattr(estimator, "save_adapter", interrupted)
    assert main(["fit", "x.npy", "y.npy", "-o", "a", "--quiet", "--overwrite", "--method", "wccn"]) == 130
    assert EmbeddingAdapter.load("a").method == "wccn" != before.method


def test_saving_never_replaces_a_file_that_save_did_not_write(fitted, tmp_path):
    "Files of an earlier save are replaced, and other files of the folder stay."
    e, x, _ = fitted
    (tmp_path / "notes.txt").write_text("mine")
    assert e.save(e.save(tmp_path)) == tmp_path and (tmp_path / "notes.txt").read_text() == "mine"
    ega.Monitor.fit(np.random.default_rng(0).normal(size=x.shape), e).save(tmp_path / "m")
    (tmp_path / "adapter.json").write_text("[1, 2]")
    for folder in (tmp_path, tmp_path / "m"):
        with pytest.raises(InputError):
            e.save(folder)
    assert (tmp_path / "adapter.json").read_text() == "[1, 2]"


def test_a_fit_that_fails_leaves_the_earlier_one(fitted):
    _, x, y = fitted
    frame = pd.DataFrame(x, columns=[f"column {i}" for i in range(x.shape[1])])
    for first, second in ((x, frame), (frame, x)):
        e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(first, y)
        before = dict(vars(e))
        for wrong in ((second, y[:-1]), (second, -np.ones(len(y), int)), (second, np.zeros(len(y), int))):
            with pytest.raises(InputError):
                e.fit(*wrong)
            assert vars(e) == before
        e.fit(second, y)
        assert hasattr(e, "feature_names_in_") == (second is frame)
