"""The gate: what passes, what does not, what is never looked at."""

from dataclasses import replace

import numpy as np
import pytest

from ega import selection
from ega.arrays import InputError, normalize, spawn_rngs
from ega.methods import METHODS, fit_adapter
from ega.metrics import lp_at_k
from ega.search import knn, loo_knn
from ega.selection import (
    MIN_CLASSES,
    leave_classes_out,
    pick_candidate,
    resolve_candidate,
    score_candidates,
    select_adapter,
)


def world(seed, shared=True, classes=12, n=14, d=12):
    "Rows whose scatter within a class lies along four shared directions (an adapter can learn to ignore them), or in all."
    rng = np.random.default_rng(seed)
    scatter = rng.normal(size=(classes, n, d)) * (np.r_[np.full(4, 3.0), np.full(d - 4, 0.2)] if shared else 1.0)
    return normalize((rng.normal(size=(classes, 1, d)) + scatter).reshape(-1, d)), np.repeat(np.arange(classes), n)


@pytest.fixture(scope="module")
def chosen():
    return select_adapter(*world(0), ("wccn", "whitened_nca"))


def test_each_class_is_left_out_once_and_its_rows_are_never_fitted_on():
    y = np.r_[np.repeat(np.arange(11), 5), [-1] * 4, np.arange(11, 31)]  # classes from 11 on have one row
    folds = leave_classes_out(y, np.random.default_rng(0), n_folds=4)
    assert sorted(np.concatenate([f.unseen for f in folds])) == np.flatnonzero(y >= 0).tolist()
    for f in folds:
        assert (
            set(y[f.fit]).isdisjoint(y[f.unseen])
            and set(y[f.queries]).isdisjoint(y[f.unseen])
            and set(y[f.queries]) <= set(y[f.fit])
            and set(f.fit).isdisjoint(f.queries)
        )


@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_the_table_is_that_of_a_loop_written_out(chosen, strength):
    x, y = world(0)
    folds = leave_classes_out(y, spawn_rngs(0).split, n_folds=4)
    gains = {"seen": [], "unseen": []}
    for f in folds:
        whole = (
            fit_adapter(resolve_candidate("wccn").config, x[f.fit], y[f.fit], device="cpu").as_matrix().detach().numpy()
        )
        A = (1 - strength) * np.eye(len(whole)) + strength * whole
        g, q, u = (normalize(x[rows] @ A.T) for rows in f)
        gains["seen"] += list(
            lp_at_k(knn(q, g, 1), y[f.fit], y[f.queries])
            - lp_at_k(knn(x[f.queries], x[f.fit], 1), y[f.fit], y[f.queries])
        )
        gains["unseen"] += list(
            lp_at_k(loo_knn(u, 1), y[f.unseen], y[f.unseen])
            - lp_at_k(loo_knn(x[f.unseen], 1), y[f.unseen], y[f.unseen])
        )
    row = chosen.table.query("method == 'wccn' and strength == @strength").iloc[0]
    assert row.seen == pytest.approx(100 * np.mean(gains["seen"]), abs=1e-6) and row.unseen == pytest.approx(
        100 * np.mean(gains["unseen"]), abs=1e-6
    )


def test_a_class_of_one_row_asks_nothing():
    "Nobody could be found for it, before or after."
    x, y = world(0)
    more = normalize(np.random.default_rng(1).normal(size=(8, 12)))
    found = [
        selection._ask_all(
            x_,
            y_,
            selection.ClassFold(np.flatnonzero(y_ < 8), np.flatnonzero(y_ < 8), np.flatnonzero(y_ >= 8)),
            [resolve_candidate("wccn")],
            (1.0,),
            "cpu",
            lambda name: None,
        )[0]["wccn", 1.0]
        for x_, y_ in ((x, y), (np.vstack([x, more]), np.r_[y, 20:28]))
    ]
    assert len(found[0][1]) == len(found[1][1]) == (y >= 8).sum()


def test_help_for_all_classes_is_found_and_the_largest_gain_taken(chosen):
    assert not chosen.frozen and chosen.strength > 0
    passed = chosen.table[chosen.table.verdict == "pass"]
    assert (
        passed.seen.max() == chosen.table.query("method == @chosen.method and strength == @chosen.strength").seen.item()
    )


def outcomes(unseen, seen=0.5, n=40):
    "Differences of one made-up candidate: every class gains `seen`; on the other ten classes `unseen` alternates around its mean."
    classes = np.repeat(np.arange(10), n)
    return {("made", 1.0): (np.full(10 * n, seen), unseen + np.where(classes % 2, 0.02, -0.02))}, (classes, classes)


@pytest.mark.parametrize(
    "unseen, seen, max_unseen_loss, verdict",
    [
        (0.0, 0.5, 5.0, "pass"),
        (-0.1, 0.5, 5.0, "fail"),
        (-0.1, 0.5, 15.0, "pass"),
        (0.0, 0.5, 0.1, "fail"),
        (0.1, 0.0, 5.0, "fail"),
        (0.1, -0.1, 5.0, "fail"),
    ],
)
def test_a_verdict_weighs_the_lower_ends(unseen, seen, max_unseen_loss, verdict):
    table = score_candidates(
        *outcomes(unseen, seen), max_unseen_loss=max_unseen_loss, confidence=0.95, rng=np.random.default_rng(0)
    )
    assert table.verdict.tolist() == ["pass", verdict] and pick_candidate(table).method == (
        "made" if verdict == "pass" else "frozen"
    )


def test_more_confidence_lowers_the_bound():
    bound = [
        score_candidates(*outcomes(0.0), max_unseen_loss=1.0, confidence=c, rng=np.random.default_rng(0)).unseen_bound[
            1
        ]
        for c in (0.6, 0.9, 0.99)
    ]
    assert bound[0] > bound[1] > bound[2]


def test_a_loss_beyond_the_budget_is_refused_and_a_budget_accepts_it():
    "EGA's triplets on clouds without shared scatter cost pseudo-unseen rows."
    x, y = world(3, shared=False)
    worse = replace(
        resolve_candidate("wccn").config, adapter=replace(METHODS["wccn"].adapter, init_transform="lda", shrinkage=0.1)
    )
    strict = select_adapter(x, y, [("lda", worse)], max_unseen_loss=0.0, strengths=(1.0,))
    assert strict.frozen and "over the max_unseen_loss" in strict.table.reason[1]
    assert (
        not select_adapter(x, y, [("lda", worse)], max_unseen_loss=100.0, strengths=(1.0,)).frozen
        or strict.table.seen_bound[1] <= 0
    )


@pytest.mark.parametrize("classes", [2, MIN_CLASSES - 1])
def test_too_few_classes_are_frozen_and_say_so(classes, monkeypatch):
    monkeypatch.setattr(selection, "fit_adapter", lambda *a, **kw: pytest.fail("nothing may be trained"))
    s = select_adapter(*world(0, classes=classes))
    assert s.frozen and s.strength == 0 and "too few" in s.reason and s.classes == classes


def test_unlabelled_rows_change_nothing(chosen):
    x, y = world(0)
    far = normalize(np.random.default_rng(9).normal(size=(30, 12)))
    s = select_adapter(np.vstack([x, far]), np.r_[y, np.full(30, -1)], ("wccn", "whitened_nca"))
    assert s.table.drop(columns="seconds").equals(chosen.table.drop(columns="seconds"))


def test_a_seed_is_a_table_and_another_seed_another():
    x, y = world(1)
    a, b, c = (select_adapter(x, y, ("wccn",), random_state=s).table.drop(columns="seconds") for s in (0, 0, 1))
    assert a.equals(b) and not a.equals(c)


def test_a_limit_thins_every_class(monkeypatch):
    x, y = world(0, n=40)
    seen = []
    monkeypatch.setattr(selection, "fit_adapter", lambda c, x, y, **kw: seen.append(y) or fit_adapter(c, x, y, **kw))
    select_adapter(x, y, ("wccn",), max_rows=240)
    assert (
        all(150 <= len(s) + 45 + 60 <= 300 and np.bincount(s)[np.unique(s)].min() >= 10 for s in seen)
        and len(seen) == 4
    )


def test_hostile_arguments_are_named():
    x, y = world(0)
    for bad, words in (
        (dict(max_unseen_loss=-1), "max_unseen_loss"),
        (dict(max_unseen_loss=float("nan")), "max_unseen_loss"),
        (dict(confidence=1.0), "confidence"),
        (dict(folds=1), "folds"),
        (dict(candidates=["x"]), "method must be"),
        (dict(candidates=[("a", 1)]), "RunConfig"),
        (dict(candidates=[3]), "candidate"),
        (dict(candidates="wccn"), r"write \('wccn',\)"),
        (dict(strengths=()), "strengths must be"),
        (dict(strengths=0.5), "strengths must be"),
        (dict(strengths=(0.5, 2.0)), "strengths must be"),
        (dict(folds=2.5), "folds must be an integer"),
    ):
        with pytest.raises(InputError, match=words):
            select_adapter(x, y, **bad)
    with pytest.raises(InputError, match="unit"):
        select_adapter(2 * x, y)
