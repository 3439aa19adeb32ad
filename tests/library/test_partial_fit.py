"""EmbeddingAdapter.partial_fit and forget: equality with a fit on all rows, what is refused, files and the shell."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from test_selection import world

from ega.data.arrays import InputError, normalize
from ega.data.packs import row_split
from ega.data.runtime import spawn_rngs
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


@pytest.mark.parametrize("method", CLOSED)
def test_forget_is_the_inverse_of_partial_fit(rows, method):
    x, y, first = rows
    names = np.array([f"kind {c:02d}" for c in y])
    original, changed = (fit(x[first], names[first], method) for _ in range(2))
    changed.partial_fit(x[~first], names[~first]).forget(x[~first], names[~first])
    assert np.allclose(changed.transform(x), original.transform(x), rtol=0, atol=ROUNDING)
    assert changed.classes_.tolist() == original.classes_.tolist()  # without rows a class vanishes
    for hashes in ("fit_row_hashes_", "labelled_row_hashes_"):
        assert np.array_equal(getattr(changed, hashes), getattr(original, hashes))
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


def test_a_call_that_is_refused_leaves_the_estimator_as_it_was(rows):
    x, y, first = rows
    adapter = fit(x[first], y[first])
    state, one, many = vars(adapter).copy(), np.flatnonzero(first)[:1], np.flatnonzero(first & (y < 9))
    calls = [
        (adapter.partial_fit, x, np.full(len(y), -1), "labels"),
        (adapter.partial_fit, x, [f"kind {c}" for c in y], "integers"),
        (adapter.forget, x[y == 11], y[y == 11], "class 11"),
        (adapter.forget, x[~first], np.zeros((~first).sum(), int), "not fitted"),
        (adapter.forget, np.repeat(x[one], 99, 0), np.repeat(y[one], 99), "not fitted"),
        (adapter.forget, x[one], (y[one] + 1) % 9, "not fitted"),
        (adapter.forget, x[many], y[many], "2 classes"),
    ]
    for call, wrong_x, wrong_y, word in calls:
        with pytest.raises(InputError, match=word):
            call(wrong_x, wrong_y)
    assert vars(adapter) == state


def test_methods_that_statistics_do_not_determine_are_refused(rows):
    x, y, first = rows
    mixed = EmbeddingAdapter("wccn", max_unseen_loss=100.0, strengths=(0.5,), cv=2).fit(x[first], y[first])
    for adapter in (fit(x, y, "lda"), mixed):
        for call in (adapter.partial_fit, adapter.forget):
            with pytest.raises(InputError, match="no class statistics"):
                call(x, y)
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
    with pytest.raises(InputError, match="no class statistics"):
        loaded.partial_fit(x, y)
    with pytest.raises(InputError, match="no class statistics"):
        loaded.save("b", statistics=True)


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
    assert estimate_update(fit(names, y[~first]), names, y[~first]).n_queries == estimate.n_queries


@pytest.mark.parametrize("rows_of", ["one row of each class", "one class"])
def test_rows_that_say_nothing_about_an_update(rows, rows_of):
    "Among rows of one class LP@1 is 100 for any embeddings."
    x, y, first = rows
    chosen = np.unique(y, return_index=True)[1] if rows_of.startswith("one row") else y == 10
    estimate = estimate_update(fit(x[first], y[first]), x[chosen], y[chosen])
    assert estimate.n_queries == 0 and np.isnan(estimate.change)
