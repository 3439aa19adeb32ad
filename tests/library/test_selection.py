"""Selection by leaving classes out: the folds, the bounds, the safety check, the table and parallel folds."""

import io
from contextlib import redirect_stderr
from dataclasses import replace

import joblib
import numpy as np
import pytest

from ega import selection
from ega.data.arrays import InputError, normalize
from ega.data.runtime import spawn_rngs
from ega.measure.evaluation import label_hits
from ega.measure.statistics import cluster_bootstrap_means
from ega.method.adapters import transform
from ega.method.methods import fit_adapter, fit_path
from ega.method.training import TrainConfig
from ega.selection import (
    MIN_CLASSES,
    FitProgress,
    compare_on_fold,
    compared_rows,
    leave_classes_out,
    pick_candidate,
    resolve_candidate,
    score_candidates,
    select_adapter,
)


def world(seed, shared=True, classes=12, n=14, d=12):
    "Rows whose scatter within a class lies along four shared directions (an adapter can suppress them), or in all."
    rng = np.random.default_rng(seed)
    scatter = rng.normal(size=(classes, n, d)) * (np.r_[np.full(4, 3.0), np.full(d - 4, 0.2)] if shared else 1.0)
    return normalize((rng.normal(size=(classes, 1, d)) + scatter).reshape(-1, d)), np.repeat(np.arange(classes), n)


@pytest.fixture(scope="module")
def selected():
    return select_adapter(*world(0), ("wccn", "whitened_nca"))


def without_times(table):
    return table.drop(columns="seconds")


def test_each_class_is_left_out_once_and_its_rows_are_never_fitted_on():
    y = np.r_[np.repeat(np.arange(11), 5), [-1] * 4, np.arange(11, 31)]  # classes from 11 on have one row
    folds = leave_classes_out(y, np.random.default_rng(0), n_folds=4)
    assert sorted(np.concatenate([f.unseen for f in folds])) == np.flatnonzero(y >= 0).tolist()
    for f in folds:
        assert set(y[f.fit]).isdisjoint(y[f.unseen])
        assert set(y[f.seen_queries]).isdisjoint(y[f.unseen])
        assert set(y[f.seen_queries]) <= set(y[f.fit])
        assert set(f.fit).isdisjoint(f.seen_queries)


@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_table_equals_a_loop_over_folds(selected, strength):
    "Queries of both kinds are searched in the fitted rows and the held-out rows together."
    x, y = world(0)
    folds = leave_classes_out(y, spawn_rngs(0).split, n_folds=4)
    changes, captured = {"seen": [], "unseen": []}, []
    config = resolve_candidate("wccn").config
    for f in folds:
        full = fit_adapter(config, x[f.fit], y[f.fit], device="cpu").as_matrix().detach().numpy()
        A = (1 - strength) * np.eye(len(full)) + strength * full
        gallery = np.r_[f.fit, f.unseen]
        for part, queries in (("seen", f.seen_queries), ("unseen", f.unseen_queries)):
            before, after = (label_hits(rows, y, queries, gallery) for rows in (x, normalize(x @ A.T)))
            changes[part] += list(after.hit - before.hit)
        captured += list(np.isin(after.neighbour, f.fit))
    row = selected.table.query("method == 'wccn' and strength == @strength").iloc[0]
    assert row.seen == pytest.approx(100 * np.mean(changes["seen"]), abs=1e-6)
    assert row.unseen == pytest.approx(100 * np.mean(changes["unseen"]), abs=1e-6)
    assert row.gain == pytest.approx((row.seen + row.unseen) / 2) and row.capture_rate == 100 * np.mean(captured)


def outcomes(path, x, y, fold, strengths):
    "LP@1 of every query of a fold at every strength, from adapted rows and an ordinary search."
    gallery, queries = np.r_[fold.fit, fold.unseen], np.r_[fold.seen_queries, fold.unseen_queries]
    return {s: label_hits(transform(path.at(s), x, device="cpu"), y, queries, gallery).hit for s in strengths}


@pytest.mark.parametrize("method", ["affine_nca", "discriminant_whitening", "wccn", "lora_supcon", "ega_released"])
def test_strengths_from_three_products_equal_a_search_of_adapted_rows(method):
    x, y = world(2)
    x[3], x[20] = x[2], x[2]  # copies: ties count by their average, also between classes
    config = resolve_candidate(method).config
    if config.train:
        config = replace(config, train=replace(config.train, epochs=2, lr=1e-2))
    fold = leave_classes_out(y, np.random.default_rng(0))[1]
    path = fit_path(config, x[fold.fit], y[fold.fit], device="cpu")
    frozen = outcomes(fit_path(resolve_candidate("frozen").config, x, y), x, y, fold, (1.0,))[1.0]
    done = compare_on_fold(x, y, fold, [("made", config)], strengths=(0.0, 0.3, 1.0), device="cpu").changes
    done = {key[:2]: change for key, change in done.items()}
    expected = outcomes(path, x, y, fold, (0.0, 0.3, 1.0))
    assert ("made", 0.0) in done or path.start is None
    for name, strength in done:
        assert np.allclose(np.concatenate(done[name, strength]), expected[strength] - frozen)


def test_adapter_without_strengths_is_compared_at_full_strength_alone():
    x, y = world(0)
    config = replace(resolve_candidate("ega_paper").config, train=TrainConfig(epochs=1))
    fold = leave_classes_out(y, np.random.default_rng(0))[0]
    changes = compare_on_fold(x, y, fold, [("made", config)], device="cpu").changes
    assert [key[:2] for key in changes] == [("made", 1.0)]


def score(changes, classes, *, max_unseen_loss=1.0, unseen_share=0.0, confidence=0.95):
    limits = dict(max_unseen_loss=max_unseen_loss, unseen_share=unseen_share, confidence=confidence)
    return score_candidates(changes, classes, rng=np.random.default_rng(0), **limits)


def made_changes(unseen, seen=0.5, n=40):
    "One made-up candidate: each of ten classes gains `seen`; `unseen` alternates around its mean by class."
    classes = np.repeat(np.arange(10), n)
    changes = (np.full(10 * n, seen), unseen + np.where(classes % 2, 0.02, -0.02))
    return {("made", 1.0): changes}, (classes, classes)


@pytest.mark.parametrize(
    "unseen, seen, max_unseen_loss, expected",
    [
        (0.0, 0.5, 5.0, "pass"),
        (-0.1, 0.5, 5.0, "fail"),
        (-0.1, 0.5, 15.0, "pass"),
        (0.0, 0.5, 0.1, "fail"),
        (0.1, 0.0, 5.0, "fail"),
        (0.1, -0.1, 5.0, "fail"),
    ],
)
def test_safety_check_uses_the_lower_bounds(unseen, seen, max_unseen_loss, expected):
    table = score(*made_changes(unseen, seen), max_unseen_loss=max_unseen_loss)
    assert table.safety_check.tolist() == ["pass", expected]
    assert pick_candidate(table).method == ("made" if expected == "pass" else "frozen")


@pytest.mark.parametrize("unseen_share, expected", [(0.0, 50.0), (0.25, 35.0), (1.0, -10.0)])
def test_gain_weighs_both_changes(unseen_share, expected):
    table = score(*made_changes(-0.1, 0.5), max_unseen_loss=20.0, unseen_share=unseen_share)
    assert table.gain[1] == pytest.approx(expected)
    assert table.safety_check[1] == ("fail" if unseen_share == 1 else "pass")


def random_changes(n_candidates, seed=0):
    "Candidates whose changes differ by class; the same changes on seen and on unseen classes."
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(20), 15)
    values = rng.normal(scale=0.1, size=(20, n_candidates))[classes] + rng.normal(scale=0.2, size=(300, n_candidates))
    return {(f"c{j}", 1.0): (values[:, j], values[:, j]) for j in range(n_candidates)}, (classes, classes)


def test_simultaneous_bounds_cover_all_candidates_at_once():
    "A share `confidence` of the bootstrap means lies above the bounds of all candidates; fewer above the others."
    changes, (classes, _) = random_changes(6)
    rng = np.random.default_rng(0)
    columns = np.stack([c[1] for c in changes.values()], 1)
    cluster_bootstrap_means(columns, classes, rng, n_boot=1000)  # the draws of the seen changes come first
    draws = 100 * cluster_bootstrap_means(columns, classes, rng, n_boot=1000)
    table = score(changes, (classes, classes), confidence=0.9).iloc[1:]
    all_above = [
        (draws >= table[c].to_numpy() - 1e-9).all(1).mean() for c in ("unseen_bound_simultaneous", "unseen_bound")
    ]
    assert all_above[0] == pytest.approx(0.9, abs=0.002) and all_above[1] < 0.8
    assert (table.unseen_bound_simultaneous < table.unseen_bound).all()


@pytest.mark.parametrize("classes", [2, MIN_CLASSES - 1])
def test_too_few_classes_select_frozen_and_train_nothing(classes, monkeypatch):
    monkeypatch.setattr(selection, "fit_path", lambda *a, **kw: pytest.fail("nothing may be trained"))
    s = select_adapter(*world(0, classes=classes))
    assert s.frozen and s.strength == 0 and "too few" in s.reason and s.n_classes == classes
    assert s.cv_results == {} and not len(s.table)


def test_unlabelled_rows_change_nothing(selected):
    x, y = world(0)
    far = normalize(np.random.default_rng(9).normal(size=(30, 12)))
    s = select_adapter(np.vstack([x, far]), np.r_[y, np.full(30, -1)], ("wccn", "whitened_nca"))
    assert without_times(s.table).equals(without_times(selected.table))


def test_rows_and_queries_are_thinned_within_each_class(monkeypatch):
    y = np.r_[np.repeat(np.arange(12), 40), np.full(9, -1)]
    monkeypatch.setattr(selection, "MAX_ROWS", 240)
    assert np.bincount(y[compared_rows(y)]).tolist() == [20] * 12
    for fold in leave_classes_out(y, np.random.default_rng(0), max_queries=5):
        assert len(fold.seen_queries) == len(fold.unseen_queries) == 5 and (np.diff(fold.unseen_queries) > 0).all()
        assert np.isin(fold.unseen_queries, fold.unseen).all() and not np.isin(fold.seen_queries, fold.fit).any()


def test_cv_results_repeat_the_table_by_fold(selected):
    table, results = selected.table, selected.cv_results
    assert all(len(values) == len(table) for values in results.values())
    names = ["method", "strength", "n_components", "precision"]
    assert results["params"] == table[names].to_dict("records")
    assert np.array_equal(results["unseen_change_bound"], table.unseen_bound)
    x, y = world(0)
    fold = leave_classes_out(y, spawn_rngs(0).split, n_folds=4)[2]
    (changes,) = compare_on_fold(x, y, fold, [resolve_candidate("wccn")], strengths=(0.5,)).changes.values()
    row = [(p["method"], p["strength"]) for p in results["params"]].index(("wccn", 0.5))
    for part, change in zip(("seen", "unseen"), changes):
        assert np.array_equal(results[f"mean_{part}_change"], table[part])
        assert results[f"split2_{part}_change"][row] == pytest.approx(100 * change.mean())
    rank, passed = results["rank"], results["safety_check"] == "pass"
    best = results["params"][int(np.argmin(rank))]
    assert (best["method"], best["strength"]) == (selected.method, selected.strength)
    assert passed.all() or rank[passed].max() < rank[~passed].min()


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_parallel_folds_give_the_same_selection(n_jobs):
    "Every integer: one thread a fold. LP@1 of these rows does not depend on the threads, so None agrees as well."
    x, y = world(1)
    one, many = (select_adapter(x, y, ("wccn", "whitened_nca"), n_jobs=n) for n in (None, n_jobs))
    assert without_times(one.table).equals(without_times(many.table)) and one.reason == many.reason


@pytest.mark.parametrize("n_jobs", [None, 2])
def test_the_bar_names_the_steps_and_counts_them(n_jobs):
    with joblib.parallel_config("threading"), redirect_stderr(io.StringIO()) as screen, FitProgress() as progress:
        select_adapter(*world(0), ("wccn",), n_folds=2, n_jobs=n_jobs, progress=progress)
    steps = ("wccn: 2 folds in parallel",) if n_jobs else ("wccn, fold 1 of 2", "wccn, fold 2 of 2")
    assert all(step in screen.getvalue() for step in (*steps, "bootstrap"))
    assert "100%" in screen.getvalue().split("\r")[-1]


def test_names_of_candidates_are_distinct_and_not_frozen():
    config = resolve_candidate("wccn").config
    for candidates in (["wccn", ("wccn", config)], [("frozen", config)]):
        with pytest.raises(InputError):
            select_adapter(*world(0), candidates)
