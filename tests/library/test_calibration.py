"Calibration: margins, curve and area compared with loops over queries, pairs and gammas."

import numpy as np
import pytest

from ega.data.arrays import normalize
from ega.estimator import EmbeddingAdapter
from ega.measure.calibration import (
    Margins,
    add_penalty,
    ausuc,
    ausuc_change,
    choose_gamma,
    csls_penalty,
    lp_at_gamma,
    margins,
    seen_unseen_curve,
)
from ega.measure.evaluation import evaluate, evaluate_with_curve
from ega.method.compression import as_stored


@pytest.fixture(scope="module")
def rows():
    "Eight classes, of which five are seen: unit rows, labels, fitted rows, seen queries, unseen rows."
    rng, y = np.random.default_rng(0), np.repeat(np.arange(8), 12)
    x = normalize(rng.normal(size=(8, 6))[y] + 0.9 * rng.normal(size=(96, 6)))
    seen = np.flatnonzero(y < 5)
    return x, y, seen[::2], seen[1::2], np.flatnonzero(y >= 5)


@pytest.fixture(scope="module")
def sides(rows):
    x, y, fit, queries, unseen = rows
    options = dict(device="cpu")
    return margins(x, y, queries, fit, unseen, **options), margins(x, y, unseen, unseen, fit, **options)


def right_by_loop(x, y, queries, gallery, penalty):
    "Whether the row of the largest cosine minus penalty, the query left out, has the label of each query."
    right = []
    for q in queries:
        others = gallery[gallery != q]
        right.append(y[others[np.argmax(x[others] @ x[q] - penalty[others])]] == y[q])
    return np.mean(right)


@pytest.mark.parametrize("gamma", [-0.3, -0.02, 0.0, 0.05, 0.4])
def test_label_precision_at_gamma_is_that_of_a_search_with_a_penalty(rows, sides, gamma):
    x, y, fit, queries, unseen = rows
    penalty, gallery = np.where(y < 5, gamma, 0.0), np.union1d(fit, unseen)
    found = [share[0] for share in lp_at_gamma(*sides, np.array([gamma]))]
    assert np.allclose(found, [right_by_loop(x, y, q, gallery, penalty) for q in (queries, unseen)])


def test_area_is_that_of_the_staircase_and_counts_pairs(sides):
    seen, unseen = sides
    pairs = [h * g * ((m + n > 0) + 0.5 * (m + n == 0)) for h, m in zip(*seen) for g, n in zip(*unseen)]
    assert np.isclose(ausuc(seen, unseen), np.mean(pairs))
    curve = seen_unseen_curve(seen, unseen)  # seen falls and unseen rises with gamma, in steps
    assert (np.diff(curve.seen) <= 0).all() and (np.diff(curve.unseen) >= 0).all()
    staircase = -(np.diff(curve.seen) * (curve.unseen.to_numpy()[1:] + curve.unseen.to_numpy()[:-1]) / 2).sum()
    assert np.isclose(staircase, ausuc(seen, unseen), atol=1e-3)


def test_area_does_not_change_with_gamma_and_choose_gamma_is_the_best_of_all(sides):
    seen, unseen = sides
    shifted = seen._replace(margin=seen.margin - 0.125), unseen._replace(margin=unseen.margin + 0.125)
    assert np.isclose(ausuc(*shifted), ausuc(seen, unseen))
    best = np.mean(lp_at_gamma(seen, unseen, np.array([choose_gamma(seen, unseen)])))
    assert best >= np.mean(lp_at_gamma(seen, unseen, np.linspace(-1, 1, 2001)), 0).max()


def test_equal_margins_count_half():
    seen, unseen = Margins(np.ones(1), np.array([0.25])), Margins(np.ones(1), np.array([-0.25]))
    assert ausuc(seen, unseen) == 0.5 and lp_at_gamma(seen, unseen, np.array([0.25]))[0] == 0.5


def test_penalties_rank_as_they_say(rows):
    x, y, fit, queries, unseen = rows
    gallery = np.union1d(fit, unseen)
    penalty = csls_penalty(x, gallery, 5, device="cpu")
    cosines = x[gallery] @ x[gallery].T - 2 * np.eye(len(gallery))
    assert np.allclose(penalty[gallery], np.sort(cosines, 1)[:, -5:].mean(1) / 2, atol=1e-6)
    assert not penalty[queries].any()
    as_queries, stored = add_penalty(x, penalty)
    distance = np.square(as_queries[queries][:, None] - stored[gallery]).sum(2)
    order = np.argsort(x[queries] @ x[gallery].T - penalty[gallery], 1)[:, ::-1]
    assert (np.diff(np.take_along_axis(distance, order, 1)) > -1e-5).all()
    found = margins(x, y, queries, fit, unseen, penalty=penalty, device="cpu")
    by_loop = [max(x[fit] @ x[q] - penalty[fit]) - max(x[unseen] @ x[q] - penalty[unseen]) for q in queries]
    assert np.allclose(found.margin, by_loop, atol=1e-5)


def test_interval_of_a_change_holds_it_and_is_zero_for_equal_maps(rows, sides):
    y, queries, unseen = rows[1], rows[3], rows[4]
    worse = tuple(side._replace(hit=side.hit * (np.arange(len(side.hit)) % 3 > 0)) for side in sides)
    frozen, adapted, (change, low, high) = ausuc_change(sides, worse, y[queries], y[unseen])
    assert np.isclose(change, adapted - frozen) and low < change < high < 0
    assert ausuc_change(sides, sides, y[queries], y[unseen])[2] == (0, 0, 0)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_curve_of_an_estimator_passes_through_the_table(rows, precision):
    x, y, fit, queries, unseen = rows
    e = EmbeddingAdapter("affine_nca", max_unseen_loss=None, precision=precision, device="cpu").fit(x[fit], y[fit])
    table, compared = evaluate_with_curve(e, x, y)
    assert table.equals(evaluate(e, x, y))
    z, seen = e.transform(x), np.flatnonzero(y < 5)
    options = dict(stored=as_stored(z, e.row_format_), device="cpu")
    side = margins(z, y, queries, seen, unseen, **options), margins(z, y, unseen, unseen, seen, **options)
    assert np.isclose(compared.adapted, 100 * ausuc(*side), atol=1e-3)
    mixed = table[table.gallery == "mixed"].set_index("group")
    for group, found in zip(("seen", "unseen"), lp_at_gamma(*side, np.zeros(1))):
        assert np.isclose(mixed.adapted[group], 100 * found[0], atol=1e-3)
    assert evaluate_with_curve(e, x[fit], y[fit])[1] is None  # no unseen class
