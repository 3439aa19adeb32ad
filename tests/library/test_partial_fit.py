"""EmbeddingAdapter.partial_fit and forget: equality with a fit on all rows, what is refused, files and the shell."""

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from test_selection import world

from ega.cli import main
from ega.data.arrays import InputError, normalize, spawn_rngs
from ega.data.packs import row_split
from ega.estimator import EmbeddingAdapter, estimate_update
from ega.measure.evaluation import label_hits
from ega.method.adapters import transform
from ega.method.closed_form import ClassStatistics
from ega.method.config import build_method_config
from ega.method.methods import can_update, fit_adapter, update_adapter

CLOSED = ["wccn", "discriminant_whitening"]
ROUNDING = 2e-6  # of float32 rows of norm 1; the sums are of float64


def fit(x, y, method="wccn"):
    return EmbeddingAdapter(method, max_unseen_loss=None, device="cpu").fit(x, y)


@pytest.fixture
def rows():
    "Twelve classes, of which the last two arrive later, together with rows of the others; one class of one row."
    x, y = world(0)
    is_first = (y < 10) & (np.arange(len(y)) % 4 > 0)
    kept = (y != 11) | (np.arange(len(y)) == np.flatnonzero(y == 11)[0])
    return x[kept], y[kept], is_first[kept]


@pytest.mark.parametrize("method", CLOSED)
def test_closed_forms_equal_a_fit_on_all_rows(rows, method):
    x, y, first = rows
    whole, later = fit(x, y, method), fit(x[first], y[first], method)
    assert np.abs(whole.transform(x) - later.transform(x)).max() > 1e-3
    assert later.partial_fit(x[~first], y[~first]) is later
    assert np.allclose(later.transform(x), whole.transform(x), rtol=0, atol=ROUNDING)
    assert np.array_equal(later.classes_, whole.classes_)
    assert np.array_equal(later.fit_row_hashes_, whole.fit_row_hashes_)
    assert np.array_equal(later.statistics_.counts, np.bincount(y))
    assert np.allclose(later.statistics_.squares, whole.statistics_.squares, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_closed_form_of_a_selected_strength_equals_a_fit_on_all_rows(rows, strength):
    x, y, first = rows
    method = "discriminant_whitening" if strength else "affine_nca"
    settings = dict(max_unseen_loss=100.0, strengths=(strength,), cv=2)
    adapters = [EmbeddingAdapter(method, **settings, device="cpu").fit(x[r], y[r]) for r in (first, y >= 0)]
    assert all(a.selection_.strength == strength and a.selection_.method == method for a in adapters)
    changed, whole = adapters
    changed.partial_fit(x[~first], y[~first])
    assert np.allclose(changed.transform(x), whole.transform(x), rtol=0, atol=ROUNDING)


def test_the_order_of_updates_changes_only_rounding(rows):
    x, y, first = rows
    parts = np.array_split(np.flatnonzero(~first), 3)
    made = []
    for order in ((0, 1, 2), (2, 0, 1)):
        adapter = fit(x[first], y[first])
        for part in order:
            adapter.partial_fit(x[parts[part]], y[parts[part]])
        made.append(adapter.transform(x))
    assert np.allclose(*made, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("method", CLOSED)
def test_forget_is_the_inverse_of_partial_fit(rows, method):
    x, y, first = rows
    names = np.array([f"kind {c:02d}" for c in y])
    original, changed = (fit(x[first], names[first], method) for _ in range(2))
    changed.partial_fit(x[~first], names[~first]).forget(x[~first], names[~first])
    assert np.allclose(changed.transform(x), original.transform(x), rtol=0, atol=ROUNDING)
    assert changed.classes_.tolist() == original.classes_.tolist()  # without rows a class vanishes
    assert np.array_equal(changed.fit_row_hashes_, original.fit_row_hashes_)
    assert np.array_equal(changed.statistics_.counts, original.statistics_.counts)
    assert changed.data_fingerprint_ != original.data_fingerprint_


def test_trained_part_follows_and_gains_on_the_later_classes():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(40), 12)
    spread = np.r_[np.full(8, 4.0), np.full(24, 0.6)]
    x = normalize(rng.normal(size=(40, 32))[y] + rng.normal(size=(480, 32)) * spread)
    first = y < 24
    adapter, again = (fit(x[first], y[first], "affine_nca") for _ in range(2))
    kept = adapter.transform(x)
    adapter.partial_fit(x[~first], y[~first])
    again.partial_fit(x[~first], y[~first])
    assert adapter.fingerprint_ == again.fingerprint_ and np.abs(adapter.transform(x) - kept).max() > 1e-3
    one_class = fit(x[first], y[first], "affine_nca").partial_fit(x[y == 24], y[y == 24])  # nothing to train on
    assert np.isfinite(one_class.transform(x)).all() and len(one_class.classes_) == 25


@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_update_without_a_change_of_rows_returns_the_same_adapter(rows, strength):
    x, y, first = rows
    config = build_method_config("affine_nca", epochs=3)
    adapter = fit_adapter(config, x[first], y[first], strength=strength, device="cpu")
    before = ClassStatistics(x.shape[1]).update(x[first], y[first])
    same = update_adapter(config, adapter, before, before, strength=strength)
    assert np.allclose(transform(same, x), transform(adapter, x), rtol=0, atol=1e-5)
    scale = same.as_matrix().norm() / adapter.as_matrix().norm()  # a root mean square norm beside a mean norm
    assert abs(scale.item() - 1) < 0.1


def test_the_share_of_new_rows_sets_the_epochs(rows):
    x, y, first = rows
    config = build_method_config("affine_nca", epochs=20)
    adapter = fit_adapter(config, x[first], y[first], device="cpu")
    before, new = (ClassStatistics(x.shape[1]).update(x[r], y[r]) for r in (first, ~first))
    after, finished = ClassStatistics(x.shape[1]).merge(before).merge(new), []
    settings = dict(device="cpu", on_epoch=lambda done, epochs, _: finished.append(epochs))
    update_adapter(config, adapter, before, after, x=x[~first], y=y[~first], **settings)
    assert finished == [5] * 5  # at most a quarter
    few = np.flatnonzero(~first)[:: (~first).sum() // 8]
    finished.clear()
    update_adapter(config, adapter, before, after, x=x[few], y=y[few], **settings)
    assert finished == [round(20 * len(few) / after.n)] * len(finished) and 0 < len(finished) < 5


def test_an_estimator_that_is_not_fitted_is_fitted(rows):
    x, y, _ = rows
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None).partial_fit(x, y)
    assert adapter.fingerprint_ == fit(x, y).fingerprint_ and adapter.n_features_in_ == x.shape[1]
    with pytest.raises(NotFittedError):
        EmbeddingAdapter().forget(x, y)
    assert not hasattr(clone(adapter), "statistics_") and "statistics" not in adapter.get_params()


def test_frozen_embeddings_stay_frozen_and_rows_are_counted(rows):
    x, y, first = rows
    adapter = EmbeddingAdapter("frozen").fit(x[first], y[first]).partial_fit(x[~first], y[~first])
    assert adapter.frozen_ and np.allclose(adapter.transform(x), normalize(x), atol=1e-6)
    assert adapter.classes_.tolist() == np.unique(y).tolist() and adapter.statistics_.n == len(y)
    assert adapter.forget(x[~first], y[~first]).statistics_.n == first.sum()


def test_unlabelled_rows_are_not_added(rows):
    x, y, first = rows
    marked = np.where(first, -1, y)
    a, b = fit(x[first], y[first]).partial_fit(x, marked), fit(x[first], y[first]).partial_fit(x[~first], y[~first])
    assert np.allclose(a.transform(x), b.transform(x), rtol=0, atol=ROUNDING)
    assert np.array_equal(a.fit_row_hashes_, b.fit_row_hashes_) and a.statistics_.n == len(y)


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_a_call_that_is_refused_leaves_the_estimator_as_it_was(rows):
    x, y, first = rows
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])])
    adapter = fit(frame[first], y[first])
    state = (adapter.fingerprint_, adapter.data_fingerprint_, adapter.statistics_.n, len(adapter.fit_row_hashes_))
    one, many = np.flatnonzero(first)[:1], np.flatnonzero(first & (y < 9))
    repeated = np.setdiff1d(np.flatnonzero(first), [np.flatnonzero(first & (y == c))[0] for c in range(10)])
    calls = [
        (lambda: adapter.partial_fit(x[:, :5], y), "X has 5 features"),
        (lambda: adapter.partial_fit(frame[frame.columns[::-1]], y), "same order as they were in fit"),
        (lambda: adapter.partial_fit(x, y[:-1]), "one label per row"),
        (lambda: adapter.partial_fit(x, np.full(len(y), -1)), "none of the .* rows has one"),
        (lambda: adapter.partial_fit(x, [f"kind {c}" for c in y]), "labels must be integers"),
        (lambda: adapter.partial_fit(np.full_like(x, np.nan), y), "NaN"),
        (lambda: adapter.forget(x[y == 11], y[y == 11]), "class 11 has no rows to remove"),
        (lambda: adapter.forget(x[~first], np.zeros((~first).sum(), int)), "distinct rows of X were not fitted on"),
        (lambda: adapter.forget(np.repeat(x[one], 99, 0), np.repeat(y[one], 99)), "rows of class"),
        (lambda: adapter.forget(x[repeated], y[repeated]), "a class with at least two rows"),
        (lambda: adapter.forget(x[many], y[many]), "at least 2 classes must be left, got 1"),
    ]
    for call, words in calls:
        with pytest.raises(InputError, match=words):
            call()
    assert state == (
        adapter.fingerprint_,
        adapter.data_fingerprint_,
        adapter.statistics_.n,
        len(adapter.fit_row_hashes_),
    )


def test_methods_that_statistics_do_not_determine_are_refused(rows):
    x, y, first = rows
    mixed = EmbeddingAdapter("wccn", max_unseen_loss=100.0, strengths=(0.5,), cv=2).fit(x[first], y[first])
    for adapter, words in ((fit(x, y, "lda"), "lda at strength 1"), (mixed, "wccn at strength 0.5")):
        for call in (adapter.partial_fit, adapter.forget):
            with pytest.raises(InputError, match=f"{words} has no class statistics"):
                call(x, y)
        assert adapter.statistics_ is None
    assert not can_update(build_method_config("lda"), 1.0)
    assert not can_update(build_method_config("ega_released"), 1.0)
    assert can_update(build_method_config("whitened_supcon"), 0.5)


def test_statistics_are_saved_on_request(rows, tmp_path):
    x, y, first = rows
    adapter = fit(x[first], y[first])
    adapter.save(tmp_path / "a", statistics=True)
    loaded = EmbeddingAdapter.load(tmp_path / "a")
    for name in ("classes", "counts", "sums", "squares"):
        assert np.array_equal(getattr(loaded.statistics_, name), getattr(adapter.statistics_, name))
    loaded.partial_fit(x[~first], y[~first])
    assert loaded.fingerprint_ == adapter.partial_fit(x[~first], y[~first]).fingerprint_
    adapter.save(tmp_path / "a")  # without
    assert not (tmp_path / "a/adapter.statistics.npz").exists()
    loaded = EmbeddingAdapter.load(tmp_path / "a")
    for call in (
        lambda: loaded.partial_fit(x, y),
        lambda: loaded.forget(x, y),
        lambda: loaded.save("b", statistics=True),
    ):
        with pytest.raises(InputError, match="saved without its class statistics"):
            call()


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "statistics"),
        (lambda path: ClassStatistics(12).update(np.eye(12), np.arange(12)).save(path), "not the statistics that were"),
    ],
)
def test_statistics_of_another_adapter_are_refused(rows, tmp_path, harm, words):
    x, y, _ = rows
    fit(x, y).save(tmp_path / "a", statistics=True)
    harm(tmp_path / "a/adapter.statistics.npz")
    with pytest.raises(InputError, match=words):
        EmbeddingAdapter.load(tmp_path / "a")


def test_command_update_adds_and_removes(rows, tmp_path, monkeypatch, capsys):
    x, y, first = rows
    monkeypatch.chdir(tmp_path)
    for name, part in (("first", first), ("later", ~first)):
        np.save(f"{name}.npy", x[part])
        np.save(f"{name}_y.npy", y[part])
    fit_first = ["fit", "first.npy", "first_y.npy", "--method", "wccn", "--max-unseen-loss", "none", "--quiet"]
    assert main([*fit_first, "-o", "bare"]) == 0 and main([*fit_first, "-o", "a", "--keep-statistics"]) == 0
    capsys.readouterr()
    assert main(["update", "bare", "later.npy", "later_y.npy", "-o", "b"]) == 2
    assert "--keep-statistics" in capsys.readouterr().err and not (tmp_path / "b").exists()
    assert main(["update", "a", "later.npy", "later_y.npy", "-o", "b"]) == 0
    shown = capsys.readouterr().out
    start = f"Fitted on {len(y)} rows of 12 classes, the present adapter on {first.sum()} rows of 10. Method and"
    assert " ".join(shown.split()).startswith(start) and max(map(len, shown.splitlines())) <= 80
    assert "held out and searched among the others" in shown and "must be migrated" in shown
    assert np.allclose(EmbeddingAdapter.load("b").transform(x), fit(x, y).transform(x), rtol=0, atol=ROUNDING)
    np.save("one.npy", x[y == 10])
    np.save("one_y.npy", y[y == 10])
    assert main(["update", "a", "one.npy", "one_y.npy", "-o", "e"]) == 0
    assert "was not measured: it takes new rows of two classes" in " ".join(capsys.readouterr().out.split())
    assert main(["update", "b", "later.npy", "later_y.npy", "-o", "c"]) == 0
    assert f"{(~first).sum()} of the new rows are copies of others" in " ".join(capsys.readouterr().out.split())
    assert main(["update", "a", "later.npy", "later_y.npy", "-o", "a"]) == 2
    assert "a exists already; name a new folder" in capsys.readouterr().err
    assert main(["update", "b", "later.npy", "later_y.npy", "-o", "d", "--forget", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["classes"], result["classes_before"]) == (first.sum(), 10, 12)
    assert result["estimate"] is None and result["rows_before"] == len(y)
    left = EmbeddingAdapter.load("d").transform(x)
    assert np.allclose(left, EmbeddingAdapter.load("a").transform(x), rtol=0, atol=ROUNDING)


def test_command_fit_writes_no_statistics_where_there_are_none(rows, tmp_path, monkeypatch, capsys):
    "The fit is not lost."
    x, y, _ = rows
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", x)
    np.save("y.npy", y)
    options = ["--method", "lda", "--max-unseen-loss", "none", "--keep-statistics", "--quiet"]
    assert main(["fit", "x.npy", "y.npy", "-o", "a", *options]) == 0
    assert "lda at strength 1 is not fitted from class statistics" in capsys.readouterr().err
    assert EmbeddingAdapter.load("a").statistics_ is None


def test_estimate_of_an_update_is_that_of_a_trial_on_the_kept_rows(rows):
    x, y, first = rows
    adapter = fit(x[first], y[first])
    state = vars(adapter).copy()
    names = pd.DataFrame(x[~first], columns=[f"c{i}" for i in range(x.shape[1])])
    estimate = estimate_update(adapter, x[~first], y[~first])
    assert vars(adapter) == state
    kept, queries = row_split(y[~first], spawn_rngs(0).split, fractions=(0.75, 0.25))
    later, labels = x[~first], y[~first]
    queries = queries[np.isin(labels[queries], labels[kept])]
    trial = fit(x[first], y[first]).partial_fit(later[kept], labels[kept])
    present, updated = (
        100 * label_hits(a.transform(later), labels, queries, kept).hit.mean() for a in (adapter, trial)
    )
    assert estimate.n_queries == len(queries) and estimate.low <= estimate.change <= estimate.high
    assert np.allclose([estimate.present, estimate.updated], [present, updated], rtol=0, atol=1e-9)
    assert abs(estimate.change - (updated - present)) < 1e-9
    of_frame = estimate_update(fit(names, y[~first]), names, y[~first])
    assert of_frame.n_queries == estimate.n_queries


def test_estimate_of_an_update_without_queries_is_nan(rows):
    x, y, first = rows
    one_each = [np.flatnonzero(y == c)[0] for c in range(12)]
    estimate = estimate_update(fit(x[first], y[first]), x[one_each], y[one_each])
    assert estimate.n_queries == 0 and np.isnan(estimate.change)


def test_rows_of_one_new_class_say_nothing_about_an_update(rows):
    "Among rows of one class LP@1 is 100 for any embeddings."
    x, y, first = rows
    assert (y == 10).sum() > 8
    estimate = estimate_update(fit(x[first], y[first]), x[y == 10], y[y == 10])
    assert estimate.n_queries == 0 and np.isnan(estimate.change)


def test_an_adapter_of_another_version_is_named(rows, tmp_path):
    x, y, _ = rows
    fit(x, y).save(tmp_path / "a")
    path = tmp_path / "a/adapter.json"
    values = json.loads(path.read_text()) | {"ega": "0.1.0"}
    del values["statistics_fingerprint"]
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match="ega '0.1.0' wrote it, and this is .*: fit and save it again"):
        EmbeddingAdapter.load(tmp_path / "a")


def test_an_index_of_the_earlier_adapter_is_refused(rows, tmp_path):
    pytest.importorskip("faiss")
    from ega.deploy.index import AdaptedIndex

    x, y, first = rows
    adapter = fit(x[first], y[first])
    AdaptedIndex(adapter).add(x).save(tmp_path / "i")
    adapter.partial_fit(x[~first], y[~first])
    with pytest.raises(InputError, match="different adapters cannot be compared"):
        AdaptedIndex.load(tmp_path / "i", adapter)
