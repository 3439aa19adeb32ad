"Metrics: hand values, all orders of a tie, parity with scikit-learn and faiss contrib, bootstrap against loops and formulas."

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ega.arrays import InputError, normalize, spawn_rngs
from ega.metrics import _pairs, ar_at_k, displacement, loo_lp_at_k, lp_at_k, negative_cosine_std, pair_stats
from ega.search import Neighbours, ivf_sweep, knn
from ega.statistics import _sums, bootstrap, bootstrap_worst, cluster_bootstrap
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
def test_ties_are_the_mean_over_all_orders(found, k):
    "Brute force: every order of the rows, kept where it ascends."
    k = min(k, len(found))
    found = sorted(found, key=lambda r: r[0])
    D, hits = np.array([[float(d) for d, _ in found]]), np.array([h for _, h in found])
    orders = [o for o in itertools.permutations(range(len(found))) if (np.diff(D[0, list(o)]) >= 0).all()]
    expected = np.mean([hits[list(o)][:k].mean() for o in orders])
    got = lp_at_k(Neighbours(D, np.arange(len(found))[None]), hits.astype(int), [1], k)
    assert np.isclose(got[0], expected)


def test_padding_is_a_miss_whatever_the_last_label():
    D, I = np.array([[0.1, np.inf, np.inf], [np.inf] * 3], "f4"), np.array([[0, -1, -1], [-1] * 3])
    yb = np.array([5, 1, 5])  # a reader of labels[-1] sees hits
    for k, expected in ((1, [1, 0]), (2, [0.5, 0]), (3, [1 / 3, 0])):
        assert np.allclose(lp_at_k((D, I), yb, [5, 5], k), expected)
    raw = np.where(np.isinf(D), np.float32(3.4028235e38), D)  # faiss' own padding distance
    assert np.allclose(lp_at_k((raw, I), yb, [5, 5], 2), [0.5, 0])


def test_unlabelled_gallery_rows_never_hit():
    assert lp_at_k(knn(circle_points(0), circle_points(1, 50), 2, device="cpu"), np.array([-1, 0]), [0], 2)[0] == 0.5


def test_nearly_equal_distances_are_a_tie_and_others_are_not():
    I, yb = np.array([[0, 1]]), np.array([1, 0])
    assert lp_at_k((np.array([[0.5, 0.5 + 5e-7]]), I), yb, [0])[0] == 0.5
    assert lp_at_k((np.array([[0.5, 0.5 + 5e-5]]), I), yb, [0])[0] == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 3]))
def test_loo_lp_is_invariant(seed, k):
    "Rotation, reflection, scale and row order; half of the rows have an exact twin."
    rng = np.random.default_rng(seed)
    x, y = clouds(5, 8, 4, seed=seed % 1000)
    x = np.concatenate([x, x[::2]])
    y = np.concatenate([y, rng.permutation(y[::2])])
    base, order = loo_lp_at_k(x, y, k, device="cpu"), rng.permutation(len(x))
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    assert np.allclose(loo_lp_at_k(x[order], y[order], k, device="cpu"), base[order])
    assert np.allclose(loo_lp_at_k(x @ turn, y, k, device="cpu"), base)  # twins stay within tol of each other
    assert np.allclose(loo_lp_at_k(x * 2, y, k, device="cpu"), base)


def test_a_class_of_one_row_counts_zero():
    assert loo_lp_at_k(circle_points(0, 1, 2), [0, 0, 1], device="cpu").tolist() == [
        1,
        0.5,
        0,
    ]  # row 1 lies between: a tie


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


def test_ar_counts_distance_not_identity():
    exact, other = (
        Neighbours(np.array([[0.2, 0.2]]), np.array([[0, 1]])),
        Neighbours(np.array([[0.2, 0.3]]), np.array([[7, 8]])),
    )
    assert ar_at_k(other, exact, 1)[0] == 1 and ar_at_k(other, exact, 2)[0] == 0.5


def test_ar_of_padding_and_of_a_small_gallery():
    exact = knn(circle_points(0), circle_points(10, 20), 4, device="cpu")
    approx = Neighbours(np.where(exact.I == 0, exact.D, np.inf)[:, :4], np.where(exact.I == 0, 0, -1))
    assert ar_at_k(approx, exact, 4)[0] == 0.5 and ar_at_k(exact, exact, 4)[0] == 1


# ---- displacement and pairs


def test_displacement_is_the_chord():
    x, z = rows(30, 7, 3), rows(30, 7, 4)
    assert np.allclose(displacement(z, x) ** 2, 2 - 2 * (x * z).sum(1), atol=1e-6) and (displacement(x, x) == 0).all()


def test_pairs_are_of_their_kind_and_class_uniform():
    y = np.concatenate([np.repeat(0, 500), np.repeat(1, 20), np.repeat(2, 3), [3], np.repeat(-1, 50)])
    y = y[np.random.default_rng(0).permutation(len(y))]
    (a, p), (b, n) = _pairs(y, np.random.default_rng(1), 30_000)
    assert (
        (y[a] == y[p]).all()
        and (a != p).all()
        and (y[b] != y[n]).all()
        and min(y[a].min(), y[b].min(), y[n].min()) >= 0
    )
    assert (
        np.abs(np.bincount(y[a], minlength=4) / 30_000 - [1 / 3, 1 / 3, 1 / 3, 0]).max() < 0.012
    )  # 4 sd of a binomial share
    assert (
        np.abs(np.bincount(y[b]) / 30_000 - 1 / 4).max() < 0.012
        and np.abs(np.bincount(y[n]) / 30_000 - 1 / 4).max() < 0.012
    )
    tiny = np.flatnonzero(y == 2)
    assert len({(i, j) for i, j in zip(a, p) if i in tiny}) == 6  # every ordered pair occurs


def test_cosine_spread_is_that_of_all_pairs_of_two_classes():
    x, y = clouds(6, 10, 5)
    cosines = (x @ x.T)[y[:, None] != y]
    assert abs(negative_cosine_std(x, y, np.random.default_rng(5)) - cosines.std()) < 0.01
    assert negative_cosine_std(simplex_vertices(4)[[0, 0, 1, 2, 3]], [0, 0, 1, 2, 3], np.random.default_rng(5)) < 1e-6


def test_pair_stats_equal_scikit_learn_on_the_same_pairs():
    from sklearn.metrics import roc_auc_score

    x, y = clouds(6, 10, 5)
    x = np.round(x * 4) / 4
    keep = np.abs(x).sum(1) > 0  # coarse: many equal distances
    x, y = normalize(x[keep]), y[keep]
    got = pair_stats(x, y, np.random.default_rng(5), pairs=3000)
    d = [np.linalg.norm(x[a] - x[b], axis=1) for a, b in _pairs(y, np.random.default_rng(5), 3000)]
    assert np.isclose(got.auc, roc_auc_score(np.repeat([0, 1], 3000), np.concatenate(d)))
    assert np.isclose(got.d_pos, d[0].mean()) and np.isclose(got.d_neg, d[1].mean())
    bins = [np.bincount(np.minimum((v / 0.01).astype(int), 199), minlength=200) / 3000 for v in d]
    assert abs(got.overlap - np.minimum(*bins).sum()) < 0.02  # a distance on a bin's edge may fall either way


# ---- bootstrap


def loop(values, classes, rng, n_boot):
    "The definition: for each replicate draw classes, then queries within each drawn class."
    out, groups = [], [values[classes == c] for c in np.unique(classes)]
    for _ in range(n_boot):
        drawn = [groups[c] for c in rng.integers(len(groups), size=len(groups))]
        out.append(np.concatenate([rng.choice(g, len(g)) for g in drawn]).mean())
    return np.array(out)


def test_replicates_equal_the_nested_loop():
    "Unbalanced classes, real values: mean, spread and quantiles agree within Monte Carlo error."
    rng = np.random.default_rng(0)
    classes = np.repeat(np.arange(6), [1, 2, 5, 9, 20, 40])
    values = rng.normal(size=77) + classes
    fast, slow = (
        cluster_bootstrap(values, classes, np.random.default_rng(1), n_boot=20_000),
        loop(values, classes, np.random.default_rng(2), 5000),
    )
    sd = slow.std()
    assert abs(fast.mean() - slow.mean()) < 4 * sd / 5000**0.5 and abs(fast.std() / sd - 1) < 4 / 10_000**0.5
    assert np.abs(np.quantile(fast, [0.025, 0.5, 0.975]) - np.quantile(slow, [0.025, 0.5, 0.975])).max() < 0.1 * sd


def test_replicates_have_the_enumerated_distribution():
    "Classes (0, 1) and (1, 1): AA gives mean of 4 draws of {0,1}, AB and BA (2 draws + 2)/4, BB gives 1."
    from math import comb

    exact = np.zeros(5)
    for j in range(5):
        exact[j] += comb(4, j) / 16 / 4
    for j in range(3):
        exact[j + 2] += comb(2, j) / 4 / 2
    exact[4] += 1 / 4
    means = cluster_bootstrap([0.0, 1, 1, 1], [0, 0, 1, 1], np.random.default_rng(3), n_boot=40_000)
    assert np.abs(np.bincount(np.round(means * 4).astype(int), minlength=5) / 40_000 - exact).max() < 0.01


@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("budget", [1, 100, 2**20])
def test_counts_times_outcomes_are_the_sums_of_the_draws(columns, budget):
    "The same stream, drawn one value after another: the sums are those of the drawn values, whatever the block."
    values = np.random.default_rng(10).normal(size=(13,) if columns is None else (13, columns))
    draws, rng = np.array([13, 39, 13, 130, 26]), np.random.default_rng(11)
    loop = [values[[rng.integers(13, dtype=np.int32) for _ in range(n)]].sum(0) for n in draws]
    assert np.allclose(_sums(values, draws, np.random.default_rng(11), budget=budget), loop, rtol=1e-12)


def test_each_draw_of_a_class_gets_its_own_queries():
    """Two classes of n queries: a class drawn twice (probability 1/2) has 2n independent draws, variance v/2n; one copy counted twice would have v/n.

    Variance of the mean = that of the class means over two draws, d^2/8, + v/2n; tolerance 4 standard errors of a variance of normal values."""
    v, c = np.array([0.0, 1] * 5 + [3.0, 4] * 5), np.repeat([0, 1], 10)
    got = cluster_bootstrap(v, c, np.random.default_rng(12), n_boot=40_000).var()
    assert abs(got / (9 / 8 + 0.25 / 20) - 1) < 4 * (2 / 40_000) ** 0.5
    within = cluster_bootstrap(
        v - 3 * c, c, np.random.default_rng(12), n_boot=40_000
    ).var()  # classes alike: only the queries vary
    assert abs(within / (0.25 / 20) - 1) < 4 * (2 / 40_000) ** 0.5


def test_many_outcomes_cost_little_more_than_one():
    "26 columns, as in a summary: one matrix product; gathering all draws took 5 s."
    classes, values = np.repeat(np.arange(10), 1000), np.random.default_rng(0).random((10_000, 26))
    start = time.process_time()
    cluster_bootstrap(values, classes, np.random.default_rng(1), n_boot=1000)
    assert time.process_time() - start < 2


def test_memory_of_one_large_class_is_bounded():
    "20 million draws; 2,000 x 10,000 counts at once would be 160 MB."
    tracemalloc.start()
    cluster_bootstrap(np.ones(10_000), np.zeros(10_000, int), np.random.default_rng(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6


def test_spread_is_the_two_stage_formula():
    "Balanced classes: variance = (variance of class means + mean variance within / n) / C."
    rng = np.random.default_rng(4)
    v = rng.normal(size=(30, 12)) + rng.normal(size=(30, 1))
    expected = (v.mean(1).var() + v.var(1).mean() / 12) / 30
    got = cluster_bootstrap(v.ravel(), np.repeat(np.arange(30), 12), rng, n_boot=20_000).var()
    assert abs(got / expected - 1) < 4 * (2 / 20_000) ** 0.5


def test_ten_thousand_values_in_a_second():
    classes = np.repeat(np.arange(200), 50)
    values = np.random.default_rng(0).random(10_000)
    start = time.process_time()  # CPU time: the machine may be shared
    bootstrap(values, classes, np.random.default_rng(1))
    assert time.process_time() - start < 1


def test_same_stream_same_draws_so_differences_are_paired():
    rng = np.random.default_rng(6)
    classes, a, b = np.repeat(np.arange(9), 7), rng.random(63), rng.random(63)
    draw = lambda v: cluster_bootstrap(v, classes, spawn_rngs(3).eval, n_boot=50)
    assert np.allclose(draw(a) - draw(b), draw(a - b)) and np.allclose(
        draw(np.stack([a, b], 1)), np.stack([draw(a), draw(b)], 1)
    )
    assert draw(a).tobytes() == draw(a).tobytes()


def test_interval_of_a_constant_and_of_one_class():
    assert bootstrap(np.ones(12), np.repeat([0, 1, 2], 4), spawn_rngs(0).eval) == (1, 1, 1)
    one = bootstrap([0, 1, 0, 1], [3, 3, 3, 3], spawn_rngs(0).eval)
    assert one.mean == 0.5 and one.low < 0.5 < one.high


def test_level_widens_the_interval():
    v, c = np.random.default_rng(0).random(100), np.repeat(np.arange(10), 10)
    narrow, wide = (bootstrap(v, c, spawn_rngs(1).eval, confidence=l) for l in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high


def test_worst_takes_the_minimum_inside_each_replicate():
    rng = np.random.default_rng(7)
    sets = [(rng.random(40) < p, np.repeat(np.arange(8), 5)) for p in (0.5, 0.55, 0.9)]
    got, stream = bootstrap_worst(sets, np.random.default_rng(8), n_boot=300), np.random.default_rng(8)
    means = np.min([cluster_bootstrap(v, c, stream, n_boot=300) for v, c in sets], 0)
    assert np.isclose(got.mean, min(v.mean() for v, _ in sets)) and np.allclose(
        got[1:], np.quantile(means, [0.025, 0.975])
    )


def test_worst_of_one_is_the_bootstrap_and_against_itself_is_zero():
    v, c = np.random.default_rng(9).random(60), np.repeat(np.arange(6), 10)
    assert np.allclose(bootstrap_worst([(v, c)], spawn_rngs(2).eval), bootstrap(v, c, spawn_rngs(2).eval))
    assert bootstrap_worst([(v, c, v), (v**2, c, v**2)], spawn_rngs(2).eval) == (0, 0, 0)
    assert np.allclose(bootstrap_worst([(v + 0.1, c, v), (v**2 + 0.1, c, v**2)], spawn_rngs(2).eval), 0.1)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda n: lp_at_k(n, [0, 1], [0], 3), "1..2"),
        (lambda n: lp_at_k(n, [0, 1], [0], 0), "1..2"),
        (lambda n: lp_at_k(n, [0, 1], [-1]), "unlabelled"),
        (lambda n: lp_at_k(n, [0], [0]), "every gallery row"),
        (lambda n: lp_at_k(n, [0, 1], [0, 0]), "2 labels"),
        (lambda n: lp_at_k((-n.D, n.I), [0, 1], [0]), "ascend"),
        (lambda n: ar_at_k(n, Neighbours(np.zeros((2, 2)), np.zeros((2, 2), int))), "same queries"),
        (lambda n: ar_at_k(n, Neighbours(np.full((1, 2), np.inf), np.full((1, 2), -1))), "nothing"),
        (lambda n: displacement(np.eye(3), np.eye(2)), "columns"),
        (lambda n: displacement(np.eye(2) * 2, np.eye(2)), "unit"),
        (lambda n: displacement(np.eye(2)[:1], np.eye(2)), "same rows"),
        (lambda n: pair_stats(np.eye(2), [0, 0], spawn_rngs(0).eval), "2 classes"),
        (lambda n: bootstrap([], [], spawn_rngs(0).eval), "at least one"),
        (lambda n: bootstrap([1, np.nan], [0, 0], spawn_rngs(0).eval), "NaN"),
        (lambda n: bootstrap([1, 0], [0, 0], spawn_rngs(0).eval, confidence=95), "level"),
        (lambda n: loo_lp_at_k(np.eye(2), [0, -1]), "unlabelled"),
    ],
)
def test_bad_input_is_named(call, text):
    with pytest.raises(InputError) as error:
        call(knn(circle_points(0), circle_points(5, 90), 2, device="cpu"))
    assert text in str(error.value)
