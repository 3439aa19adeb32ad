"Statistics: compared with loops, scipy and statsmodels."

import numpy as np
import pytest
from scipy import stats

from ega.data.runtime import spawn_rngs
from ega.measure.statistics import (
    _draw_sums,
    bootstrap_worst,
    class_means,
    cluster_bootstrap_means,
    grouped_rank_correlation,
    holm,
    paired_test,
)


def rng(seed=0):
    return np.random.default_rng(seed)


# ---- intervals


def nested_loop(values, classes, rng, n_boot):
    "The definition: for each replicate draw classes, then queries within each drawn class."
    out, groups = [], [values[classes == c] for c in np.unique(classes)]
    for _ in range(n_boot):
        drawn = [groups[c] for c in rng.integers(len(groups), size=len(groups))]
        out.append(np.concatenate([rng.choice(g, len(g)) for g in drawn]).mean())
    return np.array(out)


def test_cluster_bootstrap_has_the_distribution_of_the_nested_loop():
    "Unbalanced classes, real values: mean, spread and quantiles agree within Monte Carlo error."
    rng = np.random.default_rng(0)
    classes = np.repeat(np.arange(6), [1, 2, 5, 9, 20, 40])
    values = rng.normal(size=77) + classes
    fast = cluster_bootstrap_means(values, classes, np.random.default_rng(1), n_boot=20_000)
    slow = nested_loop(values, classes, np.random.default_rng(2), 5000)
    sd, levels = slow.std(), [0.025, 0.5, 0.975]
    assert abs(fast.mean() - slow.mean()) < 4 * sd / 5000**0.5 and abs(fast.std() / sd - 1) < 4 / 10_000**0.5
    assert np.abs(np.quantile(fast, levels) - np.quantile(slow, levels)).max() < 0.1 * sd


@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("block_size", [1, 100, 2**20])
def test_draw_sums_equal_the_sums_of_single_draws(columns, block_size):
    "The same generator, one value after another: the sums do not depend on the block size."
    values = np.random.default_rng(10).normal(size=(13,) if columns is None else (13, columns))
    draws, rng = np.array([13, 39, 13, 130, 26]), np.random.default_rng(11)
    by_loop = [values[[rng.integers(13, dtype=np.int32) for _ in range(n)]].sum(0) for n in draws]
    assert np.allclose(_draw_sums(values, draws, np.random.default_rng(11), block_size=block_size), by_loop, rtol=1e-12)


def test_the_same_generator_gives_paired_differences():
    rng = np.random.default_rng(6)
    classes, a, b = np.repeat(np.arange(9), 7), rng.random(63), rng.random(63)

    def draw(values):
        return cluster_bootstrap_means(values, classes, spawn_rngs(3).eval, n_boot=50)

    assert np.allclose(draw(a) - draw(b), draw(a - b))
    assert np.allclose(draw(np.stack([a, b], 1)), np.stack([draw(a), draw(b)], 1))


def test_bootstrap_worst_takes_the_minimum_within_each_replicate():
    rng = np.random.default_rng(7)
    sets = [(rng.random(40) < p, np.repeat(np.arange(8), 5)) for p in (0.5, 0.55, 0.9)]
    got, stream = bootstrap_worst(sets, np.random.default_rng(8), n_boot=300), np.random.default_rng(8)
    means = np.min([cluster_bootstrap_means(v, c, stream, n_boot=300) for v, c in sets], 0)
    assert np.isclose(got.mean, min(v.mean() for v, _ in sets))
    assert np.allclose(got[1:], np.quantile(means, [0.025, 0.975]))
    frozen = [(v + 0.1, c, v) for v, c in sets]
    assert np.allclose(bootstrap_worst(frozen, np.random.default_rng(8)), 0.1)  # the difference of two minima


# ---- tests


def test_paired_test_of_one_benchmark_is_the_paired_t_test():
    a, b = rng(0).random(20), rng(1).random(20) + 0.1
    theirs, got = stats.ttest_rel(a, b), paired_test([a - b])
    interval = theirs.confidence_interval(0.95)
    assert np.allclose([got.p, got.df, got.low, got.high], [theirs.pvalue, 19, interval.low, interval.high])


def test_paired_test_of_two_benchmarks_is_welchs_test():
    "The mean of two means is half of a difference when the second has its sign turned."
    a, b = rng(0).normal(0.3, 1, 9), rng(1).normal(0, 3, 25)
    theirs, got = stats.ttest_ind(a, -b, equal_var=False), paired_test([a, b])
    assert np.allclose([got.p, got.df, got.mean], [theirs.pvalue, theirs.df, (a.mean() + b.mean()) / 2])


def test_paired_test_of_constant_differences():
    assert paired_test([np.zeros(4)]).p == 1 and paired_test([np.ones(4)]).p == 0


def test_holm_equals_statsmodels(monkeypatch):
    "Random p-values with ties, zeros and ones."
    monkeypatch.setattr("gc.collect", lambda: 0)  # statsmodels calls it each time: half a second here
    multiple, r = pytest.importorskip("statsmodels.stats.multitest"), rng(5)
    for m in [1, 2, *r.integers(3, 13, 60)]:
        p = r.choice([0.0, 0.001, 0.01, 0.02, 0.04, 0.05, 0.3, 1.0], m)
        assert np.allclose(holm(p), multiple.multipletests(p, method="holm")[1])


def test_class_means_by_hand():
    assert class_means([1, 0, 1, 1], [7, 7, 2, 2]).tolist() == [1, 0.5]


def test_rank_correlation_is_spearmans_within_groups():
    a, b, where = rng().integers(6, size=(3, 90))  # with ties
    assert np.isclose(grouped_rank_correlation(a, b), stats.spearmanr(a, b)[0])
    ranks = np.zeros((2, 90))
    for g in range(6):
        ranks[:, where == g] = stats.rankdata([a[where == g], b[where == g]], axis=1) - (sum(where == g) + 1) / 2
    expected = np.corrcoef(*ranks)[0, 1]
    assert np.isclose(grouped_rank_correlation(a, b, where), expected)
    assert np.isclose(grouped_rank_correlation(a + 100 * where, b - 50 * where, where), expected)  # levels of groups
    assert np.isclose(grouped_rank_correlation(np.exp(a), b, where), expected)
    assert np.isnan(grouped_rank_correlation(where, b, where))
