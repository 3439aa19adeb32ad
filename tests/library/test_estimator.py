"""EmbeddingAdapter: scikit-learn's conventions, containers, files, and the example of the README."""

import contextlib
import copy
import doctest
import inspect
import json
import pickle
import re
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator
from test_selection import world

import ega
from ega import estimator
from ega.cli import main
from ega.data.arrays import InputError, check_X, normalize
from ega.data.files import hash_arrays
from ega.data.packs import EmbeddingSet, write_pack
from ega.data.vectors import read_labels, read_matrix
from ega.deploy.report import write_report
from ega.estimator import EmbeddingAdapter
from ega.experiments.runs import build_config, fit_and_return_transform
from ega.measure.evaluation import evaluate, hash_rows
from ega.method.adapters import (
    LinearAdapter,
    LoRAAdapter,
    ReleasedEGA,
    adapter_fingerprint,
    load_adapter,
    save_adapter,
    scale_residual,
    transform,
)
from ega.method.config import build_method_config
from ega.method.methods import fit_adapter
from ega.selection import Selection, select_adapter

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


def test_docstring_examples_run():
    results = doctest.testmod(estimator)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("name", ["fit", "transform", "save", "load", "to_onnx", "push_to_hub", "from_pretrained"])
def test_help_explains_every_parameter(name):
    "In numpydoc form, with what is returned."
    method = getattr(EmbeddingAdapter, name)
    text, parameters = inspect.getdoc(method), [p for p in inspect.signature(method).parameters if p != "self"]
    assert "Returns\n-------" in text
    assert all(
        f"\n{'**' * (p == 'kwargs')}{p} :" in text or p == "kwargs" and "\n**kwargs\n" in text for p in parameters
    )


def test_help_explains_the_constructor_and_the_fitted_attributes(fitted):
    text = inspect.getdoc(EmbeddingAdapter)
    for section in ("Parameters", "Attributes", "See Also", "Notes", "Examples"):
        assert f"\n{section}\n{'-' * len(section)}\n" in text
    lines = text.replace('"', "'").splitlines()
    for name, parameter in inspect.signature(EmbeddingAdapter).parameters.items():
        assert any(line.startswith(f"{name} : ") and line.endswith(f"default={parameter.default!r}") for line in lines)
    attributes = text[text.index("Attributes\n") : text.index("See Also\n")]
    assert all(a in attributes for a in vars(fitted[0]) if a.endswith("_") and not a.startswith("_"))


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


def named(x, prefix="dim"):
    return pd.DataFrame(x, columns=[f"{prefix}{i}" for i in range(x.shape[1])])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("name", ("x", "x.safetensors"))
def test_save_refuses_a_folder_that_takes_no_files(fitted, name):
    with pytest.raises(InputError, match="cannot be written"):
        fitted[0].save(f"/proc/{name}")


def test_columns_of_a_dataframe_are_kept_and_compared(fitted, tmp_path):
    _, x, y = fitted
    frame = named(x)
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, y)
    assert e.feature_names_in_.tolist() == frame.columns.tolist()
    e.save(tmp_path / "a")
    for again in (e, EmbeddingAdapter.load(tmp_path / "a"), pickle.loads(pickle.dumps(e))):
        assert np.array_equal(again.transform(frame), e.transform(frame)) and type(again.transform(frame)) is np.ndarray
        for wrong, words in (
            (frame[frame.columns[::-1]], "same order"),
            (named(x, "col"), "unseen at fit time"),
            (frame.drop(columns="dim3"), "now missing"),
        ):
            with pytest.raises(InputError, match=words):
                again.transform(wrong)
    with pytest.warns(UserWarning, match="fitted with feature names"):
        e.transform(x)
    assert not hasattr(e.fit(x, y), "feature_names_in_")
    with pytest.warns(UserWarning, match="fitted without feature names"):
        e.transform(frame)


@pytest.mark.parametrize("compare", [evaluate, write_report], ids=["evaluate", "report"])
def test_columns_are_compared_wherever_an_estimator_reads_rows(fitted, tmp_path, compare):
    _, x, y = fitted
    rest = (tmp_path / "r.md",) if compare is write_report else ()
    frame = named(x)
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, y)
    compare(e, frame, y, *rest)
    with pytest.raises(InputError, match="same order"):
        compare(e, frame[frame.columns[::-1]], y, *rest)
    with pytest.warns(UserWarning, match="fitted with feature names"):
        compare(e, x, y, *rest)


@pytest.mark.parametrize("seed", range(3))
def test_names_and_numbers_of_classes_change_nothing(seed):
    "Near the edge of the safety check, another division of the classes would change the selection."
    x, y = world(seed, shared=False, classes=14)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(y))
    x, y = x[rows], y[rows]
    numbers, texts = rng.permutation(14), np.array([f"{c:x}" for c in rng.permutation(2**20)[:14]])
    renamed = [numbers[y], 10**9 - numbers[y], texts[y], texts[y].astype(object), pd.Categorical(texts[y]), y.tolist()]
    first = EmbeddingAdapter(candidates=("wccn", "linear_supcon")).fit(x, y)
    for labels in renamed:
        e = EmbeddingAdapter(candidates=("wccn", "linear_supcon")).fit(x, labels)
        assert e.selection_.table.drop(columns="seconds").equals(first.selection_.table.drop(columns="seconds"))
        assert e.fingerprint_ == first.fingerprint_ and e.classes_.tolist() == sorted(set(labels))


def test_one_bar_ends_with_the_fit_on_all_rows(capfd):
    x, y = world(0)
    e = EmbeddingAdapter(candidates=("wccn",), verbose=True).fit(x, y)
    drawn = capfd.readouterr().err.strip().split("\r")
    assert not e.frozen_ and "100%" in drawn[-1] and drawn[-1].endswith("wccn on all 168 labelled rows")
    EmbeddingAdapter(candidates=("wccn",)).fit(x, y)
    assert capfd.readouterr().err == ""


def test_rows_of_any_norm_give_the_same_everywhere(fitted, tmp_path):
    "Estimator, evaluation, file and index; unit rows of float32 keep their bits."
    from ega.deploy.index import AdaptedIndex
    from ega.deploy.transform import transform_file
    from ega.method.interface import as_adapter

    e, x, y = fitted
    long = x * np.random.default_rng(0).uniform(0.01, 100, (len(x), 1)).astype(np.float32)
    z = transform(e.adapter_, x)
    assert np.array_equal(e.transform(x), z)
    m = as_adapter(e)
    assert np.array_equal(m.transform(x), normalize(x @ m.matrix.T + m.offset)) and e.adapter_.bias
    results = {"estimator": e.transform(long), "index": as_adapter(e).transform(long)}
    for name, rows in (("x", x), ("long", long)):
        np.save(tmp_path / f"{name}.npy", rows)
        e.save(tmp_path / "a")
        transform_file(tmp_path / "a/adapter.safetensors", tmp_path / f"{name}.npy", tmp_path / f"{name}_z.npy")
    assert np.array_equal(np.load(tmp_path / "x_z.npy"), z)
    results["file"] = np.load(tmp_path / "long_z.npy")
    for name, result in results.items():
        assert np.allclose(result, z, atol=1e-6), name
    assert evaluate(e, long, y).equals(evaluate(e, x, y))
    pytest.importorskip("faiss")
    found, expected = (AdaptedIndex(e).add(rows).search(rows, 5).I for rows in (long, x))
    assert np.array_equal(found[:, 0], expected[:, 0])


def test_set_output_makes_a_dataframe(fitted):
    _, x, y = fitted
    frame = named(x).set_index(np.arange(len(x)) + 100)
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).set_output(transform="pandas")
    z = e.fit_transform(frame, y)
    assert z.index.equals(frame.index) and z.columns.tolist() == e.get_feature_names_out().tolist()
    assert z.columns[0] == "embeddingadapter0" and np.array_equal(z, e.set_output(transform="default").transform(frame))


def test_import_of_the_name_loads_no_torch():
    code = (
        "import sys, ega; assert 'torch' not in sys.modules; "
        "from ega import EmbeddingAdapter; assert EmbeddingAdapter.__module__ == 'ega.estimator'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_parameters_survive_a_clone_and_a_pipeline(fitted):
    e, x, y = fitted
    twin = clone(e.set_params(max_unseen_loss=1.0))
    assert twin.get_params() == e.get_params() and not hasattr(twin, "adapter_")
    assert np.array_equal(make_pipeline(FunctionTransformer(), twin).fit(x, y).transform(x), e.transform(x))


def test_grid_search_over_strengths():
    x, y = world(0)
    grid = {"embeddingadapter__strengths": [(0.1,), (1.0,)], "embeddingadapter__n_jobs": [None]}
    line = make_pipeline(EmbeddingAdapter(candidates=("wccn",)), KNeighborsClassifier(1))
    search = GridSearchCV(line, grid, cv=KFold(3, shuffle=True, random_state=0)).fit(x, y)
    scores = dict(zip(search.cv_results_["param_embeddingadapter__strengths"], search.cv_results_["mean_test_score"]))
    assert search.best_params_["embeddingadapter__strengths"] == (1.0,) and scores[(1.0,)] > scores[(0.1,)] + 0.1
    assert search.best_estimator_[0].selection_.strength == 1.0


def test_estimator_survives_pickle(fitted):
    e, x, _ = fitted
    again = pickle.loads(pickle.dumps(e))
    assert np.array_equal(again.transform(x), e.transform(x)) and again.get_params() == e.get_params()
    assert again.selection_.table.equals(e.selection_.table)


@pytest.fixture(scope="module")
def own():
    "A candidate with a configuration that differs from every method in METHODS."
    base = build_method_config("whitened_nca", epochs=2, seed=7)
    return "mine", replace(base, adapter=replace(base.adapter, init_transform="wccn", shrinkage=0.3))


def test_own_candidate_survives_save_load_and_a_second_fit(own, tmp_path):
    x, y = world(0)
    e = EmbeddingAdapter(candidates=("wccn", own), strengths=(0.5, 1.0)).fit(x, y)
    assert "mine" in set(e.selection_.table.method)
    e.save(tmp_path / "a")
    again = EmbeddingAdapter.load(tmp_path / "a")
    assert again.get_params() == e.get_params() and again.selection_.config == e.selection_.config
    for twin in (again, clone(again), pickle.loads(pickle.dumps(again))):
        twin.fit(x, y)
        assert twin.fingerprint_ == e.fingerprint_
        assert twin.selection_.table.drop(columns="seconds").equals(e.selection_.table.drop(columns="seconds"))


@pytest.mark.parametrize("settings", [{"max_unseen_loss": None}, {"max_unseen_loss": 100.0, "strengths": (1.0,)}])
def test_own_method_survives_save_load_and_a_second_fit(own, tmp_path, settings):
    x, y = world(0)
    e = EmbeddingAdapter(own, **settings).fit(x, y)
    assert e.selection_.method == "mine" and e.selection_.config == own[1]
    e.save(tmp_path / "a")
    again = EmbeddingAdapter.load(tmp_path / "a")
    assert again.get_params() == e.get_params() and clone(again).fit(x, y).fingerprint_ == e.fingerprint_


def test_cv_results_are_those_of_the_selection_and_survive_save(fitted, tmp_path):
    e, x, y = fitted
    assert e.cv_results_ is e.selection_.cv_results and e.cv_results_["rank"].min() == 1
    e.save(tmp_path / "a")
    again = EmbeddingAdapter.load(tmp_path / "a").cv_results_
    assert set(again) == set(e.cv_results_) and again["params"] == e.cv_results_["params"]
    for key, values in e.cv_results_.items():
        assert key == "params" or np.array_equal(again[key], values) and again[key].dtype == values.dtype
    assert EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, y).cv_results_ == {}


def test_the_table_of_the_selection_survives_save_exactly(fitted, tmp_path):
    e = copy.deepcopy(fitted[0])
    column = e.selection_.table.select_dtypes(float).columns[0]
    e.selection_.table.loc[0, column] = 0.1 + 0.2  # 17 digits
    e.save(tmp_path / "a")
    assert EmbeddingAdapter.load(tmp_path / "a").selection_.table[column][0] == 0.1 + 0.2


def test_weights_changed_after_fit_are_not_saved(fitted, tmp_path):
    e = copy.deepcopy(fitted[0])
    for tensor in e.adapter_.state_dict().values():
        tensor += 0.1
    with pytest.raises(InputError, match="the weights of the adapter were changed after fit"):
        e.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_fold_without_queries_survives_save(fitted, tmp_path):
    "Its change is nan, which JSON does not have."
    e = copy.deepcopy(fitted[0])
    e.cv_results_["split0_seen_change"][1] = np.nan
    e.save(tmp_path / "a")
    json.loads((tmp_path / "a/adapter.json").read_text(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert np.isnan(EmbeddingAdapter.load(tmp_path / "a").cv_results_["split0_seen_change"][1])


def test_numpy_scalars_as_parameters_are_saved(fitted, tmp_path):
    _, x, y = fitted
    e = EmbeddingAdapter("wccn", max_unseen_loss=np.float32(1), cv=np.int64(4), random_state=np.int64(0))
    e.set_params(strengths=np.array([0.5, 1.0])).fit(x, y).save(tmp_path / "a")
    assert EmbeddingAdapter.load(tmp_path / "a").strengths == (0.5, 1.0)


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


@pytest.mark.parametrize(
    "method", ["wccn", "lda", "whitened_supcon", "linear_supcon", "lora_supcon", "supcon", "ega_paper"]
)
def test_merged_adapter_equals_closed_form_then_adapter(method):
    """Merging a closed form and the matrix behind it changes distances by rounding only.

    2e-5 covers float32 sums of 12 terms at |x| = 1 through two normalisations.
    """
    x, y = world(0)
    config = build_config("unseen", "cub100", method, hidden=8, epochs=2)
    two, one = fit_and_return_transform(config, x, y)[0](x), transform(fit_adapter(config, x, y), x)
    assert np.allclose(two @ two.T, one @ one.T, atol=2e-5)


def test_closed_form_before_a_network_is_refused():
    recipe = build_config("unseen", "cub100", "whitened_nca", epochs=1)
    block = replace(recipe, adapter=replace(recipe.adapter, kind="ega_released", hidden=8))
    with pytest.raises(InputError, match="'ega_released'"):
        fit_adapter(block, *world(0))


def test_unlabelled_rows_are_never_trained_on(fitted):
    e, x, y = fitted
    wild = np.random.default_rng(5).normal(size=(20, 12))
    with_ = EmbeddingAdapter().fit(np.vstack([wild, x]), np.r_[np.full(20, -1), y])
    assert with_.fingerprint_ == e.fingerprint_ and with_.data_fingerprint_ != e.data_fingerprint_


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


def test_frozen_returns_the_embeddings():
    x, y = world(0, classes=4)
    e = EmbeddingAdapter().fit(x, y)
    assert e.frozen_ and "too few" in e.selection_.reason and np.allclose(e.transform(x), x, atol=1e-6)


def test_fitted_adapter_has_the_selected_strength(fitted):
    _, x, y = fitted
    e = EmbeddingAdapter(candidates=("wccn",), strengths=(0.5,)).fit(x, y)
    full = fit_adapter(e.selection_.config, check_X(x), y, device="cpu")
    half = adapter_fingerprint(scale_residual(full, 0.5))
    assert (e.selection_.method, e.selection_.strength) == ("wccn", 0.5)
    assert e.fingerprint_ == adapter_fingerprint(e.adapter_) == half != adapter_fingerprint(full)


def test_every_parameter_reaches_the_selection(fitted, monkeypatch):
    "A method by name is the only candidate."
    _, x, y = fitted
    calls, frozen = [], Selection("frozen", 0.0, "", pd.DataFrame(), 1.0, 0.95, 12)

    def record(x, y, names, *, progress, **settings):
        assert progress.show
        calls.append((names, settings))
        return frozen

    monkeypatch.setattr(estimator, "select_adapter", record)
    same = dict(
        max_unseen_loss=0.3, unseen_share=0.2, confidence=0.8, strengths=(0.4,), random_state=5, device="cpu", n_jobs=2
    )
    EmbeddingAdapter(candidates=("lda",), cv=3, verbose=True, **same).fit(x, y)
    EmbeddingAdapter("wccn", cv=3, verbose=True, **same).fit(x, y)
    settings = same | {"n_folds": 3, "max_rows": len(x)}
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
    assert e.data_fingerprint_ == hash_arrays(unit, y)
    assert np.array_equal(e.fit_row_hashes_, np.unique(hash_rows(unit[y >= 0])))
    assert np.array_equal(e.transform(x), transform(e.adapter_, unit))
    bad = x.copy()
    bad[2**14 + 5] = np.nan
    for call in (lambda: e.transform(bad), lambda: EmbeddingAdapter().fit(bad, y)):
        with pytest.raises(InputError, match="row 16389"):
            call()


@pytest.mark.parametrize("strength", [1.0, None])  # None: selected
def test_many_rows_are_fitted_in_blocks_as_a_whole(many_rows, strength, tmp_path):
    x, y = many_rows
    np.save(tmp_path / "x.npy", x)
    settings = dict(max_unseen_loss=None) if strength else dict(max_unseen_loss=100.0, strengths=(0.5,))
    made = [
        EmbeddingAdapter(few_steps(), **settings).fit(rows, y)
        for rows in (x, np.load(tmp_path / "x.npy", mmap_mode="r"), torch.from_numpy(x))
    ]
    assert made[0].selection_.strength == (strength or 0.5)
    assert len({e.fingerprint_ for e in made}) == len({e.data_fingerprint_ for e in made}) == 1
    unit, known, numbers = check_X(x), y >= 0, estimator._number_by_first_occurrence(y)
    whole = fit_adapter(few_steps()[1], unit[known], numbers[known], strength=strength or 0.5, device="cpu")
    assert np.allclose(made[0].transform(x), transform(whole, unit), atol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["linear_supcon", "lda"])
def test_rows_that_cannot_be_written_are_fitted_and_stay_as_they_are(fitted, method):
    _, x, y = fitted
    given = check_X(x)
    kept = given.copy()
    given.flags.writeable = False
    EmbeddingAdapter(method, max_unseen_loss=None).fit(given, y).transform(given)
    assert np.array_equal(given, kept)


def test_the_selection_is_that_of_all_rows(many_rows):
    x, y = many_rows
    e = EmbeddingAdapter("wccn", random_state=3).fit(x, y)
    alone = select_adapter(check_X(x), estimator._number_by_first_occurrence(y), ["wccn"], random_state=3)
    drop = dict(columns="seconds")
    pd.testing.assert_frame_equal(e.selection_.table.drop(**drop), alone.table.drop(**drop))


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_a_memory_map_is_never_in_memory_as_a_whole(tmp_path, dtype):
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


def test_fingerprint_of_the_data_covers_embeddings_and_labels(fitted):
    _, x, y = fitted
    made = [
        EmbeddingAdapter("wccn", max_unseen_loss=None).fit(*data).data_fingerprint_
        for data in ((x, y), (x, np.r_[y[:-1], -1]), (-x, y), (x, y))
    ]
    assert len(set(made)) == 3 and made[0] == made[3]


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
    for name in ("fingerprint_", "data_fingerprint_", "frozen_", "n_features_in_"):
        assert getattr(again, name) == getattr(e, name)
    assert np.array_equal(again.classes_, e.classes_)
    assert again.selection_.table.safety_check.equals(e.selection_.table.safety_check)
    assert (again.selection_.config, again.selection_.n_classes) == (e.selection_.config, 12)
    names = sorted(f.suffix for f in tmp_path.rglob("*.*") if f.is_file())
    assert names == [".json", ".npy", ".safetensors"]
    assert again.fit_row_hashes_.dtype == np.uint64 and np.array_equal(again.fit_row_hashes_, e.fit_row_hashes_)
    assert len(e.fit_row_hashes_) == len(x)  # eight bytes for each row that was fitted on
    assert np.array_equal(again.get_feature_names_out(), e.get_feature_names_out())


def spoil(folder, **change):
    "Change the description in place."
    path = folder / "adapter.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def spoil_settings(folder, **change):
    spoil(folder, settings=json.loads((folder / "adapter.json").read_text())["settings"] | change)


def spoil_selection(folder, **change):
    spoil(folder, selection=json.loads((folder / "adapter.json").read_text())["selection"] | change)


def shorten_fit_rows(path):
    "Forget some rows, so that they would count as new ones."
    np.save(path, np.load(path)[5:])


@pytest.mark.parametrize(
    "harm",
    [
        lambda f: (f / "adapter.json").unlink(),
        lambda f: (f / "adapter.safetensors").unlink(),
        lambda f: (f / "adapter.json").write_text("{"),
        lambda f: (f / "adapter.json").write_text("[" * 10**5),
        lambda f: (f / "adapter.json").write_bytes(b"\xff\xfe\x00"),
        lambda f: spoil(f, fingerprint="0" * 64),
        lambda f: spoil(f, n_features_in=3),
        lambda f: spoil_settings(f, steps=3),
        lambda f: spoil(f, settings={"method": "wccn"}),
        lambda f: spoil_settings(f, **{"candidates": [3]}),
        lambda f: spoil_settings(f, **{"candidates": [{"name": 3, "config": {}}]}),
        lambda f: spoil_settings(f, **{"candidates": [{"name": "a", "config": {"x": 1}}]}),
        lambda f: spoil(f, selection={"table": []}),
        lambda f: spoil_selection(f, config={"x": 1}),
        lambda f: spoil_selection(f, strength="1"),
        lambda f: spoil_selection(f, n_classes=True),
        lambda f: spoil_selection(f, cv_results={"rank": [1]}),
        lambda f: spoil_selection(f, cv_results={"rank": ["x"] * 6}),
        lambda f: spoil(f, feature_names_in=["a"]),
        lambda f: spoil(f, classes=[1, "a"]),
        lambda f: spoil(f, classes=[1, 2**63]),
        lambda f: save_adapter(LinearAdapter(12), f / "adapter.safetensors"),
        lambda f: (f / "adapter.fit_rows.npy").unlink(),
        lambda f: (f / "adapter.fit_rows.npy").write_bytes(b"\x93NUMPY"),
        lambda f: shorten_fit_rows(f / "adapter.fit_rows.npy"),
        lambda f: spoil(f, fit_rows_fingerprint="0" * 64),
        lambda f: spoil(f, fit_rows_fingerprint=None),
    ],
)
def test_damaged_files_are_refused(fitted, tmp_path, harm):
    fitted[0].save(tmp_path / "a")
    harm(tmp_path / "a")
    with pytest.raises(InputError):
        EmbeddingAdapter.load(tmp_path / "a")


def leaves(value, path=()):
    "The places of all values in JSON that hold no other values."
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place for key, child in children for place in leaves(child, (*path, key))]
    return found or [path]


def test_every_value_of_a_description_is_covered_by_its_hash(fitted, tmp_path):
    "Each value replaced by another one that JSON can hold, and each key removed."
    fitted[0].save(tmp_path / "a")
    path = tmp_path / "a/adapter.json"
    text = path.read_text()
    places = leaves(json.loads(text))
    assert len(places) > 100
    for place in places:
        for change in ("other", "removed"):
            values = json.loads(text)
            parent = values
            for key in place[:-1]:
                parent = parent[key]
            if change == "removed":
                del parent[place[-1]]
            else:
                old = parent[place[-1]]
                parent[place[-1]] = old + 1 if type(old) in (int, float) else "other" if old != "other" else 1
            path.write_text(json.dumps(values))
            with pytest.raises(InputError):
                EmbeddingAdapter.load(tmp_path / "a")
    path.write_text(json.dumps(json.loads(text), indent=3, sort_keys=True))  # the same values, written otherwise
    assert np.array_equal(EmbeddingAdapter.load(tmp_path / "a").classes_, fitted[0].classes_)


@pytest.mark.parametrize("kind, sizes", [("Linear", {"d": 12}), ("EGA", {"d": 12, "hidden": 4})])
def test_files_of_version_0_1_0_are_refused(fitted, tmp_path, capsys, kind, sizes):
    "By the weights; and by the description, if it lies beside weights of this version."
    settings = {"method": "auto", "budget": 50.0, "confidence": 0.95, "candidates": ["wccn"]}
    selection = {"method": "wccn", "alpha": 1.0, "reason": "seen +24.2", "budget": 50.0, "confidence": 0.95}
    description = {
        "ega": "0.1.0",
        "settings": settings | {"alphas": [0.25, 0.5, 0.75, 1.0], "folds": 4, "seed": 0},
        "classes": list(range(12)),
        "n_features_in": 12,
        "selection": selection | {"classes": 12, "table": []},
        "fingerprint": fitted[0].fingerprint_,
        "data_fingerprint": "0" * 64,
    }
    fitted[0].save(tmp_path / "a")
    (tmp_path / "a/adapter.json").write_text(json.dumps(description))
    with pytest.raises(InputError, match="again"):
        EmbeddingAdapter.load(tmp_path / "a")
    header = {"kind": kind, "sizes": sizes, "fingerprint": "0" * 64}
    save_file({"weight": torch.zeros(12, 12)}, tmp_path / "a/adapter.safetensors", {"ega": json.dumps(header)})
    with pytest.raises(InputError):
        EmbeddingAdapter.load(tmp_path / "a")
    np.save(tmp_path / "x.npy", fitted[1])
    assert main(["transform", str(tmp_path / "a"), str(tmp_path / "x.npy"), "-o", str(tmp_path / "z.npy")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("ega: ") and message.count("\n") == 1 and not (tmp_path / "z.npy").exists()


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_a_description_with_nan_is_no_json(fitted, tmp_path, number):
    fitted[0].save(tmp_path / "a")
    path = tmp_path / "a/adapter.json"
    path.write_text(re.sub(r'"strength": [\d.]+', f'"strength": {number}', path.read_text(), count=1))
    with pytest.raises(InputError, match=f"{number} is not JSON"):
        EmbeddingAdapter.load(tmp_path / "a")


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
    e, x, _ = fitted
    sent = {}

    def upload_folder(self, *, repo_id, folder_path, **kw):
        sent[repo_id] = sorted(f.name for f in Path(folder_path).iterdir())
        e.save(tmp_path / "repo")

    monkeypatch.setattr(hub.HfApi, "create_repo", lambda self, repo_id, **kw: type("R", (), {"repo_id": repo_id})())
    monkeypatch.setattr(hub.HfApi, "upload_folder", upload_folder)
    e.push_to_hub("me/adapter")
    assert {"adapter.fit_rows.npy", "adapter.json", "adapter.safetensors"} <= set(sent["me/adapter"])
    assert np.array_equal(EmbeddingAdapter.from_pretrained(str(tmp_path / "repo")).transform(x), e.transform(x))
    fetched = []
    monkeypatch.setattr(
        hub,
        "snapshot_download",
        lambda name, **options: fetched.append((name, options["allow_patterns"])) or str(tmp_path / "repo"),
    )
    assert np.array_equal(
        estimator._hub_class(EmbeddingAdapter)._from_pretrained(model_id="me/adapter").estimator.transform(x),
        e.transform(x),
    ) and fetched == [("me/adapter", ["adapter.*"])]  # nothing else of a repository is fetched


def test_a_local_folder_is_loaded_without_the_hub_and_in_silence(fitted, tmp_path, monkeypatch, capfd, caplog):
    e, x, _ = fitted
    e.save(tmp_path / "a")
    capfd.readouterr()
    assert np.array_equal(EmbeddingAdapter.from_pretrained(tmp_path / "a").transform(x), e.transform(x))
    assert capfd.readouterr() == ("", "") and not caplog.records
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    EmbeddingAdapter.from_pretrained(str(tmp_path / "a"))


def test_missing_extra_is_named(fitted, tmp_path, monkeypatch):
    for package, extra, call in (
        ("onnx", "onnx", lambda: fitted[0].to_onnx(tmp_path / "a.onnx")),
        ("huggingface_hub", "hub", lambda: fitted[0].push_to_hub("a/b")),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"ega\[{extra}\]"):
            call()
        assert f"\n{extra} = [" in (root / "pyproject.toml").read_text()


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
def test_embeddings_are_read_from_every_format(files, name):
    matrix = read_matrix(files / name)
    x, labels = matrix.array(), matrix.labels()
    assert np.allclose(x, world(0)[0], atol=1e-6) and (labels is None) == (name != "pack.parquet")
    if labels is not None:
        assert labels[0] == "kind 0" and len(labels) == len(x)


def test_unusable_files_are_named(files, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"PK")
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    for call, words in (
        (lambda: read_matrix(tmp_path / "no.npz"), "no such file"),
        (lambda: read_matrix(tmp_path / "bad.npz"), "cannot be read"),
        (lambda: read_matrix(files / "x.npz", column="z"), "expected one matrix"),
        (lambda: read_matrix(files / "y.csv"), "expected embeddings"),
        (lambda: read_labels(tmp_path / "bad.csv"), "cannot be read"),
        (lambda: read_labels(tmp_path / "two.csv"), "--label-column"),
        (lambda: read_matrix(files / "x.npy", 5), r"\(n, 5\)"),
    ):
        with pytest.raises(InputError, match=words):
            call()


def test_commands_fit_evaluate_and_transform(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y, out = str(files / "x.npy"), str(files / "y.csv"), str(tmp_path / "adapter")
    assert main(["fit", x, y, "-o", out, "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "pass" in text and "held-out classes" in text and not EmbeddingAdapter.load(out).frozen_
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 120
    np.save("shuffled.npy", np.random.default_rng(0).permutation(np.load(files / "y.npy")))
    assert main(["fit", x, "shuffled.npy", "-o", out, "--max-unseen-loss", "0", "--overwrite", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert len(re.findall(" fail$", shown.out, re.M)) == shown.out.count(" fails: ") > 0 and shown.err == ""
    assert max(map(len, shown.out.replace(out, "").splitlines())) <= 80 and "more than max_unseen_loss=0" in shown.out
    assert main(["fit", x, y, "-o", out, "--overwrite"]) == 0
    assert capsys.readouterr().err == ""  # no terminal
    assert main(["fit", x, y, "-o", out]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main(["fit", str(files / "pack.parquet"), "-o", out, "--overwrite", "--json", "--method", "wccn"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "wccn" and result["n_classes"] == 12 and result["table"][0]["method"] == "frozen"
    assert main(["evaluate", out, x, y, "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["group"], line["gallery"], line["n_queries"]) == ("trained on", "seen", 168) and line["low"] > 0
    assert main(["transform", out, x, "-o", str(tmp_path / "z.npy"), "--quiet"]) == 0
    assert np.allclose(np.load(tmp_path / "z.npy"), EmbeddingAdapter.load(out).transform(np.load(x)), atol=1e-6)
    np.save("long.npy", 3 * np.load(x))  # what fit accepts, transform accepts
    assert main(["transform", out, "long.npy", "-o", "y.npy", "--quiet"]) == 0
    assert np.allclose(np.load("y.npy"), np.load("z.npy"), atol=1e-6)
    assert main(["transform", f"{out}/adapter.safetensors", "long.npy", "-o", "n.npy", "--quiet"]) == 0
    assert np.array_equal(np.load("y.npy"), np.load("n.npy"))
    assert main(["fit", x, "-o", "b"]) == 2 and "labels" in capsys.readouterr().err
    assert main(["evaluate", "nowhere", x, y]) == 2 and "no such" in capsys.readouterr().err


def test_command_evaluate_prints_80_columns(fitted, tmp_path, capsys):
    e, x, y = fitted
    other, names = world(7, classes=6)
    e.save(tmp_path / "a")
    np.save(tmp_path / "x.npy", np.vstack([x, other]))
    np.save(tmp_path / "y.npy", np.r_[y, names + 100])
    assert main(["evaluate", *(str(tmp_path / name) for name in ("a", "x.npy", "y.npy"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    frame = evaluate(e, np.load(tmp_path / "x.npy"), np.load(tmp_path / "y.npy"))
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["group", "gallery", "queries", "frozen", "adapted", "change", "[95", "%]"]
    first, line = lines[1].split(), frame.iloc[0]
    change = f"{line.change:+.1f} [{line.low:+.1f}, {line.high:+.1f}]"
    assert first == ["unseen", "mixed", "84", f"{line.frozen:.1f}", f"{line.adapted:.1f}", *change.split()]
    assert f"Seen classes capture {frame.capture_rate_adapted[0]:.1f} %" in " ".join(lines)
    assert lines[3].startswith("trained on") and "Trained on: rows the adapter was fitted on;" in " ".join(lines)


def test_seen_and_unseen_classes_are_evaluated_apart(fitted):
    e, x, y = fitted
    other, names = world(7, classes=6)
    frame = evaluate(e, np.vstack([x, other]), np.r_[y, names + 100]).set_index(["group", "gallery"])
    assert frame.index.tolist() == [
        ("unseen", "mixed"), ("unseen", "unseen"), ("trained on", "mixed"), ("trained on", "seen")
    ]  # fmt: skip
    assert frame.loc["trained on"].n_classes.tolist() == [12, 12] and frame.loc["unseen"].n_classes.tolist() == [6, 6]
    assert frame.loc["unseen"].n_queries.tolist() == [84, 84]
    single = evaluate(e, np.vstack([x, other[:1], other]), np.r_[y, 999, names + 100])
    assert single.n_queries.equals(frame.reset_index().n_queries)  # a class of one row is searched, but gives no query
    assert single.n_classes.equals(frame.reset_index().n_classes)
    with pytest.raises(InputError, match="integers"):
        evaluate(e, x, [f"k{c}" for c in y])


def test_methods_of_an_unfitted_estimator_raise_notfittederror(fitted):
    _, x, _ = fitted
    for call in (
        lambda: EmbeddingAdapter().transform(x),
        lambda: EmbeddingAdapter().save("none"),
        lambda: EmbeddingAdapter().to_onnx("none"),
        lambda: EmbeddingAdapter().push_to_hub("me/none"),
    ):
        with pytest.raises(NotFittedError):
            call()


@pytest.fixture
def sigint():
    "The SIGINT handler of Python, also where the tests were started in the background, which ignores the signal."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_fit_saves_leaves_both_files(sigint, files, tmp_path, monkeypatch):
    "The weights are written first; an interruption behind them waits until the description is written."
    x, y, out = files / "x.npy", files / "y.csv", tmp_path / "a"

    def interrupted(*args):
        save_adapter(*args)
        signal.raise_signal(signal.SIGINT)

    assert main(["fit", str(x), str(y), "-o", str(out), "--quiet"]) == 0
    before = EmbeddingAdapter.load(out)
    monkeypatch.setattr(estimator, "save_adapter", interrupted)
    assert main(["fit", str(x), str(y), "-o", str(out), "--quiet", "--overwrite", "--method", "wccn"]) == 130
    assert EmbeddingAdapter.load(out).method == "wccn" != before.method


def test_ctrl_c_during_fit_writes_nothing(sigint, files, tmp_path, monkeypatch):
    monkeypatch.setattr(estimator, "fit_adapter", lambda *args, **settings: signal.raise_signal(signal.SIGINT))
    out = tmp_path / "a"
    assert main(["fit", str(files / "x.npy"), str(files / "y.csv"), "-o", str(out), "--quiet"]) == 130
    assert not list(tmp_path.iterdir())


def test_integer_columns_in_another_order_are_refused(fitted, tmp_path):
    _, x, y = fitted
    frame = pd.DataFrame(x)
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, y)
    e.save(tmp_path / "a")
    for again in (e, EmbeddingAdapter.load(tmp_path / "a")):
        with pytest.raises(InputError, match="columns of X must be in the order of fit"):
            again.transform(frame[frame.columns[::-1]])
        for other in (frame, x, frame.set_axis(range(1, 13), axis=1)):
            assert np.array_equal(again.transform(other), e.transform(x))
    with pytest.raises(InputError, match="only supported if all input features have string names"):
        e.fit(frame.rename(columns={0: "a"}), y)


def test_labels_with_the_index_in_another_order_are_refused(fitted, tmp_path):
    e, x, y = fitted
    frame = pd.DataFrame(x, index=[f"r{i}" for i in range(len(x))])
    labels = pd.Series(y, index=frame.index)
    moved = labels.iloc[::-1]
    wccn = EmbeddingAdapter("wccn", max_unseen_loss=None)
    for call in (wccn.fit, lambda X, y: evaluate(e, X, y), lambda X, y: write_report(e, X, y, tmp_path / "r.md")):
        with pytest.raises(InputError, match="same index in another order"):
            call(frame, moved)
    assert wccn.fit(frame, moved.loc[frame.index]).fingerprint_ == wccn.fit(frame, labels).fingerprint_


def test_saving_never_replaces_a_file_that_save_did_not_write(fitted, tmp_path):
    "Files of an earlier save are replaced, and other files of the folder stay."
    e, *_ = fitted
    (tmp_path / "notes.txt").write_text("mine")
    assert e.save(e.save(tmp_path)) == tmp_path and (tmp_path / "notes.txt").read_text() == "mine"
    for name in ("adapter.json", "adapter.safetensors"):
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text("[1, 2]")
        with pytest.raises(InputError):
            e.save(tmp_path)
        assert (tmp_path / name).read_text() == "[1, 2]"
        (tmp_path / name).write_bytes(kept)
    for name in ("a.json", "a.pt", "a.joblib"):
        with pytest.raises(InputError, match="must be a folder or a .safetensors file"):
            e.save(tmp_path / name)


def test_files_of_another_kind_are_refused(fitted, tmp_path):
    e, *_ = fitted
    e.save(tmp_path / "a")
    plain = save_adapter(e.adapter_, tmp_path / "plain.safetensors")
    pickled = tmp_path / "e.joblib"
    pickled.write_bytes(pickle.dumps(e))
    for path in (plain, pickled, tmp_path / "a/adapter.json", tmp_path / "none"):
        with pytest.raises(InputError, match="EmbeddingAdapter.save"):
            EmbeddingAdapter.load(path)
    with pytest.raises(InputError):
        load_adapter(tmp_path / "a/adapter.json")
    with pytest.raises(InputError, match="EmbeddingAdapter"):
        save_adapter(e, tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    "name, value",
    [("method", np.zeros((3, 4))), ("verbose", "no"), ("max_unseen_loss", np.zeros((3, 4))), ("candidates", {"wccn"})],
)
def test_parameters_of_another_kind_are_refused(fitted, name, value):
    _, x, y = fitted
    with pytest.raises(InputError, match=name):
        EmbeddingAdapter(**{name: value}).fit(x, y)


@pytest.mark.parametrize(
    "name, value, default",
    [
        ("unseen_share", 0.2, np.float64(0.5)),
        ("confidence", 0.9, 0.95),
        ("candidates", ("lda",), ["affine_nca"]),
        ("strengths", (1.0,), np.array([0, 0.25, 0.5, 0.75, 1])),
        ("cv", 3, np.int64(4)),
        ("n_jobs", 2, None),
    ],
)
def test_a_parameter_without_effect_is_refused(fitted, name, value, default):
    _, x, y = fitted
    plain = EmbeddingAdapter("wccn", max_unseen_loss=None)
    with pytest.raises(InputError, match=f"^{name} has no effect"):
        clone(plain).set_params(**{name: value}).fit(x, y)
    plain.set_params(**{name: default}).fit(x, y)  # as a grid may give them
    compared = EmbeddingAdapter("wccn", candidates=("lda",))
    with pytest.raises(InputError, match="^candidates has no effect"):
        compared.fit(x, y)


def test_more_jobs_than_folds_are_accepted(fitted):
    _, x, y = fitted
    one, many = (EmbeddingAdapter(candidates=("wccn",), n_jobs=n).fit(x, y) for n in (1, 10**6))
    assert one.fingerprint_ == many.fingerprint_


def test_labels_that_are_all_missing_are_named(fitted):
    _, x, y = fitted
    with pytest.raises(InputError, match=f"none of the {len(x)} rows has one"):
        EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, np.full(len(x), -1))


def test_evaluate_names_a_pipeline_and_does_not_call_it_unfitted(fitted):
    e, x, y = fitted
    for other, words in (
        (make_pipeline(e), "got Pipeline"),
        (KNeighborsClassifier().fit(x, y), "must be an EmbeddingAdapter, got KNeighborsClassifier"),
        ("A", "got str"),
        (Path("A"), "EmbeddingAdapter"),
    ):
        with pytest.raises(InputError, match=words):
            evaluate(other, x, y)


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


def test_exchanged_arguments_are_named(fitted):
    e, x, y = fitted
    for call in (lambda: EmbeddingAdapter().fit(y, x), lambda: evaluate(e, pd.Series(y), pd.DataFrame(x))):
        with pytest.raises(InputError, match="X has shape .* and y has .* were they exchanged"):
            call()


def test_save_refuses_the_folder_of_a_monitor(fitted, tmp_path):
    e, x, _ = fitted
    ega.Monitor.fit(np.random.default_rng(0).normal(size=x.shape), e).save(tmp_path / "m")
    with pytest.raises(InputError, match="m holds a monitor, whose adapter would be replaced"):
        e.save(tmp_path / "m")


def test_a_repeated_index_in_another_order_is_refused(fitted):
    _, x, y = fitted
    frame = pd.DataFrame(x, index=y)
    with pytest.raises(InputError, match="the same index in another order"):
        EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, pd.Series(y[::-1], index=y[::-1]))
    EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, pd.Series(y, index=y))
    EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, pd.Series(y, index=y + 1))


def test_a_transposed_matrix_is_named():
    x, y = np.random.default_rng(0).normal(size=(1000, 384)), np.repeat(np.arange(50), 20)
    for labels in (y, y.tolist(), torch.as_tensor(y), pd.Series(y)):
        with pytest.raises(InputError, match="X has 384 rows and y has 1,000 labels, as many.*is X transposed"):
            EmbeddingAdapter().fit(x.T, labels)
    with pytest.raises(InputError, match="one label per row"):
        EmbeddingAdapter().fit(x.T, y[:-1])


def test_no_candidates_and_a_repository_without_a_name_are_refused(fitted):
    e, x, y = fitted
    with pytest.raises(InputError, match="candidates"):
        EmbeddingAdapter(candidates=()).fit(x, y)
    with pytest.raises(InputError, match="repo_id must name a repository, such as 'me/adapter', got ''"):
        e.push_to_hub("")


def test_strengths_that_leave_nothing_to_compare_are_refused():
    x, y = world(0)
    with pytest.raises(InputError, match="strengths must hold a number above 0"):
        EmbeddingAdapter("lda", strengths=(0,)).fit(x, y)


def test_an_empty_folder_keeps_its_rights_and_a_link_stays_a_link(fitted, tmp_path):
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("private", "link"):
        assert EmbeddingAdapter.load(fitted[0].save(tmp_path / name)).fingerprint_ == fitted[0].fingerprint_
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target/adapter.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "private", "target"]


def test_a_folder_that_another_save_fills_in_the_meantime_gets_the_files(fitted, tmp_path, monkeypatch):
    atomic_folder = estimator.atomic_folder

    @contextlib.contextmanager
    def overtaken(folder):
        with atomic_folder(folder) as temporary:
            yield temporary
            monkeypatch.undo()
            fitted[0].save(folder)

    monkeypatch.setattr(estimator, "atomic_folder", overtaken)
    fitted[0].save(tmp_path / "a")
    assert EmbeddingAdapter.load(tmp_path / "a").fingerprint_ == fitted[0].fingerprint_


def test_the_column_of_the_labels_is_not_fitted_on(fitted):
    _, x, y = fitted
    frame = named(x).assign(label=y)
    with pytest.raises(InputError, match="label"):
        EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, frame["label"])


@pytest.mark.parametrize(
    "setting",
    [
        dict(max_unseen_loss=-1),
        dict(max_unseen_loss=float("nan")),
        dict(confidence=1.0),
        dict(unseen_share=1.5),
        dict(cv=1),
        dict(cv=2.5),
        dict(n_jobs=0),
        dict(n_jobs=1.5),
        dict(random_state=-1),
        dict(candidates="wccn"),
        dict(candidates=["x"]),
        dict(candidates=[("a", 1)]),
        dict(candidates=[3]),
        dict(candidates=["wccn", "wccn"]),
        dict(candidates=[("frozen", build_method_config("wccn"))]),
        dict(strengths=()),
        dict(strengths=0.5),
        dict(strengths=(0.5, 2.0)),
        dict(strengths=(0.5, 0.5)),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(fitted, setting):
    _, x, y = fitted
    with pytest.raises(InputError):
        EmbeddingAdapter(**setting).fit(x, y)


def test_a_description_of_0_2_0_is_refused_though_its_hash_is_right(fitted, tmp_path):
    fitted[0].save(tmp_path / "a")
    path = tmp_path / "a/adapter.json"
    values = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("class", "hashes")}
    path.write_text(json.dumps(values | {"sha256": estimator._description_hash(values)}))
    with pytest.raises(InputError, match="again"):
        EmbeddingAdapter.load(tmp_path / "a")
