"""The gate: what passes, what does not, what is never looked at."""
from dataclasses import replace

import numpy as np
import pytest

from ega import selection
from ega.core import InputError, normalize, streams
from ega.metrics import lp_at_k
from ega.runs import METHODS, fit_adapter
from ega.search import knn, loo_knn
from ega.selection import MIN_CLASSES, best_of, candidate_of, decide, leave_classes_out, select


def world(seed, shared=True, classes=12, n=14, d=12):
    "Rows whose scatter within a class lies along four shared directions (an adapter can learn to ignore them), or in all."
    rng = np.random.default_rng(seed)
    scatter = rng.normal(size=(classes, n, d))*(np.r_[np.full(4, 3.), np.full(d - 4, .2)] if shared else 1.)
    return normalize((rng.normal(size=(classes, 1, d)) + scatter).reshape(-1, d)), np.repeat(np.arange(classes), n)


@pytest.fixture(scope="module")
def chosen(): return select(*world(0), ("wccn", "recipe"))


def test_each_class_is_left_out_once_and_its_rows_are_never_fitted_on():
    y = np.r_[np.repeat(np.arange(11), 5), [-1]*4, np.arange(11, 31)]        # classes from 11 on have one row
    folds = leave_classes_out(y, np.random.default_rng(0), folds=4)
    assert sorted(np.concatenate([f.unseen for f in folds])) == np.flatnonzero(y >= 0).tolist()
    for f in folds:
        assert set(y[f.fit]).isdisjoint(y[f.unseen]) and set(y[f.queries]).isdisjoint(y[f.unseen]) and set(y[f.queries]) <= set(y[f.fit]) and set(f.fit).isdisjoint(f.queries)


@pytest.mark.parametrize("alpha", [.25, 1.])
def test_the_table_is_that_of_a_loop_written_out(chosen, alpha):
    x, y = world(0)
    folds = leave_classes_out(y, streams(0).split, folds=4)
    gains = {"seen": [], "unseen": []}
    for f in folds:
        whole = fit_adapter(candidate_of("wccn").config, x[f.fit], y[f.fit], device="cpu").as_matrix().detach().numpy()
        A = (1 - alpha)*np.eye(len(whole)) + alpha*whole
        g, q, u = (normalize(x[rows] @ A.T) for rows in f)
        gains["seen"] += list(lp_at_k(knn(q, g, 1), y[f.fit], y[f.queries]) - lp_at_k(knn(x[f.queries], x[f.fit], 1), y[f.fit], y[f.queries]))
        gains["unseen"] += list(lp_at_k(loo_knn(u, 1), y[f.unseen], y[f.unseen]) - lp_at_k(loo_knn(x[f.unseen], 1), y[f.unseen], y[f.unseen]))
    row = chosen.table.query("method == 'wccn' and alpha == @alpha").iloc[0]
    assert row.seen == pytest.approx(100*np.mean(gains["seen"]), abs=1e-6) and row.unseen == pytest.approx(100*np.mean(gains["unseen"]), abs=1e-6)


def test_a_class_of_one_row_asks_nothing():
    "Nobody could be found for it, before or after."
    x, y = world(0)
    more = normalize(np.random.default_rng(1).normal(size=(8, 12)))
    found = [selection._ask_all(x_, y_, selection.Fold(np.flatnonzero(y_ < 8), np.flatnonzero(y_ < 8), np.flatnonzero(y_ >= 8)), [candidate_of("wccn")], (1.,), "cpu", lambda name: None)[0]["wccn", 1.]
             for x_, y_ in ((x, y), (np.vstack([x, more]), np.r_[y, 20:28]))]
    assert len(found[0][1]) == len(found[1][1]) == (y >= 8).sum()


def test_help_for_all_classes_is_found_and_the_largest_gain_taken(chosen):
    assert not chosen.frozen and chosen.alpha > 0
    passed = chosen.table[chosen.table.verdict == "pass"]
    assert passed.seen.max() == chosen.table.query("method == @chosen.method and alpha == @chosen.alpha").seen.item()


def outcomes(unseen, seen=.5, n=40):
    "Differences of one made-up candidate: every class gains `seen`; on the other ten classes `unseen` alternates around its mean."
    classes = np.repeat(np.arange(10), n)
    return {("made", 1.): (np.full(10*n, seen), unseen + np.where(classes % 2, .02, -.02))}, (classes, classes)


@pytest.mark.parametrize("unseen, seen, budget, verdict", [
    (0., .5, 5., "pass"), (-.1, .5, 5., "fail"), (-.1, .5, 15., "pass"), (0., .5, .1, "fail"), (.1, 0., 5., "fail"), (.1, -.1, 5., "fail")])
def test_a_verdict_weighs_the_lower_ends(unseen, seen, budget, verdict):
    table = decide(*outcomes(unseen, seen), budget=budget, confidence=.95, rng=np.random.default_rng(0))
    assert table.verdict.tolist() == ["pass", verdict] and best_of(table).method == ("made" if verdict == "pass" else "frozen")


def test_more_confidence_lowers_the_bound():
    bound = [decide(*outcomes(0.), budget=1., confidence=c, rng=np.random.default_rng(0)).unseen_bound[1] for c in (.6, .9, .99)]
    assert bound[0] > bound[1] > bound[2]


def test_a_loss_beyond_the_budget_is_refused_and_a_budget_accepts_it():
    "EGA's triplets on clouds without shared scatter cost pseudo-unseen rows."
    x, y = world(3, shared=False)
    worse = replace(candidate_of("wccn").config, adapter=replace(METHODS["wccn"].adapter, geometry="lda", shrinkage=.1))
    strict = select(x, y, [("lda", worse)], budget=0., alphas=(1.,))
    assert strict.frozen and "over the budget" in strict.table.reason[1]
    assert not select(x, y, [("lda", worse)], budget=100., alphas=(1.,)).frozen or strict.table.seen_bound[1] <= 0


@pytest.mark.parametrize("classes", [2, MIN_CLASSES - 1])
def test_too_few_classes_are_frozen_and_say_so(classes, monkeypatch):
    monkeypatch.setattr(selection, "fit_adapter", lambda *a, **kw: pytest.fail("nothing may be trained"))
    s = select(*world(0, classes=classes))
    assert s.frozen and s.alpha == 0 and "too few" in s.reason and s.classes == classes


def test_unlabelled_rows_change_nothing(chosen):
    x, y = world(0)
    far = normalize(np.random.default_rng(9).normal(size=(30, 12)))
    s = select(np.vstack([x, far]), np.r_[y, np.full(30, -1)], ("wccn", "recipe"))
    assert s.table.drop(columns="seconds").equals(chosen.table.drop(columns="seconds"))


def test_a_seed_is_a_table_and_another_seed_another():
    x, y = world(1)
    a, b, c = (select(x, y, ("wccn",), seed=s).table.drop(columns="seconds") for s in (0, 0, 1))
    assert a.equals(b) and not a.equals(c)


def test_a_limit_thins_every_class(monkeypatch):
    x, y = world(0, n=40)
    seen = []
    monkeypatch.setattr(selection, "fit_adapter", lambda c, x, y, **kw: seen.append(y) or fit_adapter(c, x, y, **kw))
    select(x, y, ("wccn",), limit=240)
    assert all(150 <= len(s) + 45 + 60 <= 300 and np.bincount(s)[np.unique(s)].min() >= 10 for s in seen) and len(seen) == 4


def test_hostile_arguments_are_named():
    x, y = world(0)
    for bad, words in ((dict(budget=-1), "budget"), (dict(budget=float("nan")), "budget"), (dict(confidence=1.), "confidence"), (dict(folds=1), "folds"), (dict(candidates=["x"]), "method must be"),
                       (dict(candidates=[("a", 1)]), "RunConfig"), (dict(candidates=[3]), "candidate"),
                       (dict(candidates="wccn"), r"write \('wccn',\)"), (dict(alphas=()), "alphas must be"), (dict(alphas=.5), "alphas must be"), (dict(alphas=(.5, 2.)), "alphas must be"), (dict(folds=2.5), "folds must be an integer")):
        with pytest.raises(InputError, match=words): select(x, y, **bad)
    with pytest.raises(InputError, match="unit"): select(2*x, y)
