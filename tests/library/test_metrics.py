"Metrics: hand-worked values, all orders of a tie, comparison with scikit-learn and faiss contrib."

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ega.data.arrays import normalize
from ega.measure.metrics import (
    _draw_pairs,
    ar_at_k,
    cosine_std_of_negative_pairs,
    loo_lp_at_k,
    lp_at_k,
    pair_distances,
    pair_separation,
)
from ega.measure.search import Neighbours, ivf_sweep, knn
from ega.testing import circle_points, simplex_vertices


def rows(n, d, seed=0):
    return normalize(np.random.default_rng(seed).normal(size=(n, d)))


def clouds(classes=8, n=25, d=6, noise=0.6, seed=0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), n)
    return normalize(rows(classes, d, seed + 1)[y] + noise * rng.normal(size=(classes * n, d))), y


# ---- label precision


def test_lp_at_1_is_nearest_neighbour_accuracy():
    from sklearn.neighbors import KNeighborsClassifier

    x, y = clouds()
    db, q = np.arange(0, 200, 2), np.arange(1, 200, 2)
    expected = KNeighborsClassifier(1).fit(x[db], y[db]).predict(x[q]) == y[q]
    assert (lp_at_k(knn(x[q], x[db], 5, device="cpu"), y[db], y[q]) == expected).all() and 0 < expected.mean() < 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=2, max_size=6), st.integers(1, 4))
def test_ties_are_averaged_over_all_orders(found, k):
    "Brute force over all orders of the neighbours with ascending distances."
    k = min(k, len(found))
    found = sorted(found, key=lambda r: r[0])
    D, hits = np.array([[float(d) for d, _ in found]]), np.array([h for _, h in found])
    orders = [o for o in itertools.permutations(range(len(found))) if (np.diff(D[0, list(o)]) >= 0).all()]
    expected = np.mean([hits[list(o)][:k].mean() for o in orders])
    got = lp_at_k(Neighbours(D, np.arange(len(found))[None]), hits.astype(int), [1], k)
    assert np.isclose(got[0], expected)


def test_padding_is_a_miss():
    D, I = np.array([[0.1, np.inf, np.inf], [np.inf] * 3], "f4"), np.array([[0, -1, -1], [-1] * 3])
    yb = np.array([5, 1, 5])  # labels[-1] would be a hit
    for k, expected in ((1, [1, 0]), (2, [0.5, 0]), (3, [1 / 3, 0])):
        assert np.allclose(lp_at_k((D, I), yb, [5, 5], k), expected)
    raw = np.where(np.isinf(D), np.float32(3.4028235e38), D)  # the padding distance of faiss
    assert np.allclose(lp_at_k((raw, I), yb, [5, 5], 2), [0.5, 0])


def test_unlabelled_gallery_rows_are_misses():
    assert lp_at_k(knn(circle_points(0), circle_points(1, 50), 2, device="cpu"), np.array([-1, 0]), [0], 2)[0] == 0.5


@pytest.mark.parametrize("gap, lp", [(5e-7, 0.5), (5e-5, 0)])
def test_distances_within_the_tolerance_are_a_tie(gap, lp):
    assert lp_at_k((np.array([[0.5, 0.5 + gap]]), np.array([[0, 1]])), [1, 0], [0])[0] == lp


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 3]))
def test_loo_lp_does_not_change_under_rotation_scale_and_order(seed, k):
    "Rotation, reflection, scale and row order; half of the rows have an exact duplicate."
    rng = np.random.default_rng(seed)
    x, y = clouds(5, 8, 4, seed=seed % 1000)
    x = np.concatenate([x, x[::2]])
    y = np.concatenate([y, rng.permutation(y[::2])])
    base, order = loo_lp_at_k(x, y, k, device="cpu"), rng.permutation(len(x))
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    assert np.allclose(loo_lp_at_k(x[order], y[order], k, device="cpu"), base[order])
    assert np.allclose(loo_lp_at_k(x @ turn, y, k, device="cpu"), base)  # duplicates stay within the tolerance
    assert np.allclose(loo_lp_at_k(x * 2, y, k, device="cpu"), base)


# ---- ANN recall


def test_ar_equals_faiss_contrib_without_ties():
    evaluation = pytest.importorskip("faiss.contrib.evaluation")
    xq, xb = rows(150, 8, 1), rows(900, 8, 2)
    exact = knn(xq, xb, 10, device="cpu")
    for nprobe, found in ivf_sweep(xq, xb, nlist=20, nprobes=(1, 4, 20), k=10, device="cpu").items():
        for k in (1, 5, 10):
            expected = evaluation.knn_intersection_measure(
                np.ascontiguousarray(found.I[:, :k]), np.ascontiguousarray(exact.I[:, :k])
            )
            assert np.isclose(ar_at_k(found, exact, k).mean(), expected)
        assert nprobe < 20 or (ar_at_k(found, exact, 10) == 1).all()


def test_ar_with_padding_and_with_a_gallery_smaller_than_k():
    exact = knn(circle_points(0), circle_points(10, 20), 2, device="cpu")
    padding = ((0, 0), (0, 2))
    exact = Neighbours(np.pad(exact.D, padding, constant_values=np.inf), np.pad(exact.I, padding, constant_values=-1))
    approx = Neighbours(np.where(exact.I == 0, exact.D, np.inf)[:, :4], np.where(exact.I == 0, 0, -1))
    assert ar_at_k(approx, exact, 4)[0] == 0.5 and ar_at_k(exact, exact, 4)[0] == 1


# ---- displacement and pairs


def test_pairs_are_positive_or_negative_and_classes_uniform():
    "The tolerance is 4 standard deviations of a binomial share."
    y = np.concatenate([np.repeat(0, 500), np.repeat(1, 20), np.repeat(2, 3), [3], np.repeat(-1, 50)])
    y = y[np.random.default_rng(0).permutation(len(y))]
    (a, p), (b, n) = _draw_pairs(y, np.random.default_rng(1), 30_000)
    assert (y[a] == y[p]).all() and (a != p).all() and (y[b] != y[n]).all()
    for rows, shares in ((a, [1 / 3, 1 / 3, 1 / 3, 0]), (b, [1 / 4] * 4), (n, [1 / 4] * 4)):
        assert y[rows].min() >= 0
        assert np.abs(np.bincount(y[rows], minlength=4) / 30_000 - shares).max() < 0.012
    tiny = np.flatnonzero(y == 2)
    assert len({(i, j) for i, j in zip(a, p) if i in tiny}) == 6  # every ordered pair occurs


def test_negative_cosine_std_equals_that_of_all_negative_pairs():
    x, y = clouds(6, 10, 5)
    cosines = (x @ x.T)[y[:, None] != y]
    assert abs(cosine_std_of_negative_pairs(x, y, np.random.default_rng(5)) - cosines.std()) < 0.01
    classes = np.array([0, 0, 1, 2, 3])
    assert cosine_std_of_negative_pairs(simplex_vertices(4)[classes], classes, np.random.default_rng(5)) < 1e-6


def test_pair_stats_of_the_drawn_pairs():
    "AUC by counting all comparisons of a negative with a positive distance, ties half; many distances are equal."
    x, y = clouds(6, 10, 5)
    x = np.round(x * 4) / 4
    keep = np.abs(x).sum(1) > 0
    positive, negative = pair_distances(normalize(x[keep]), y[keep], np.random.default_rng(5), n_pairs=3000)
    got = pair_separation(positive, negative)
    auc = ((negative[:, None] > positive).mean() + (negative[:, None] >= positive).mean()) / 2
    assert np.isclose(got.auc, auc, rtol=0, atol=1e-12) and np.unique(positive).size < 500
    assert np.isclose(got.d_pos, positive.mean()) and np.isclose(got.d_neg, negative.mean())
    bins = [np.bincount(np.minimum((v / 0.01).astype(int), 199), minlength=200) / 3000 for v in (positive, negative)]
    assert abs(got.overlap - np.minimum(*bins).sum()) < 0.02  # a distance at the edge of a bin may count in either
