"Statistics: compared with loops, formulas, simulations, scipy, statsmodels and brute force."

from decimal import Decimal
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ega.data.runtime import spawn_rngs
from ega.measure.statistics import (
    _draw_sums,
    _mean_squares,
    bootstrap_worst,
    class_means,
    cluster_bootstrap_means,
    design_effect,
    grouped_rank_correlation,
    hit_counts_matching_printed,
    hit_counts_matching_printed_mean_sd,
    holm,
    null_lead_probability,
    paired_test,
    required_queries,
    variance_components,
)


def rng(seed=0):
    return np.random.default_rng(seed)


def simulate(rng, splits, seeds, y, split_sd, class_sd, seed_sd, query_sd, rest_sd):
    "Outcomes of every split and their classes, drawn from the model with these standard deviations."
    out = []
    for _ in range(splits):
        query = rng.normal(0, split_sd) + rng.normal(0, class_sd, y.max() + 1)[y] + rng.normal(0, query_sd, len(y))
        out.append(0.6 + query + rng.normal(0, seed_sd, (seeds, 1)) + rng.normal(0, rest_sd, (seeds, len(y))))
    return out, [y] * splits


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


# ---- variance components


def test_mean_squares_of_one_class_equal_two_way_anova():
    "One class: the classical ANOVA of seeds by queries, from statsmodels."
    sm, formula = pytest.importorskip("statsmodels.api"), pytest.importorskip("statsmodels.formula.api")
    import pandas as pd

    h = rng().normal(size=(3, 11)) + rng(1).normal(size=11) + rng(2).normal(size=(3, 1))
    table = pd.DataFrame([(j, q, h[j, q]) for j, q in product(range(3), range(11))], columns=["seed", "query", "h"])
    anova = sm.stats.anova_lm(formula.ols("h ~ C(seed) + C(query)", table).fit())
    squares = anova.sum_sq / anova.df
    mean, seed, query, rest, free = _mean_squares(h, np.zeros(11, int))
    assert np.isclose(mean, h.mean()) and free == 10
    assert np.allclose([seed * 11, query * 33, rest * 11], squares[["C(seed)", "C(query)", "Residual"]])


def test_variance_components_recover_the_simulated_variances():
    "Many splits: the components equal the simulated ones; the total equals the measured variance of the mean of a run."
    y, r = np.repeat(np.arange(8), [3, 5, 8, 8, 10, 12, 20, 30]), rng(3)
    o, c = simulate(r, 4000, 2, y, 0.03, 0.1, 0.02, 0.3, 0.2)
    got = variance_components([(o, c)], r, n_draws=200)
    share = np.bincount(y) / len(y)
    expected = np.sqrt([0.03**2 + 0.01 * (share**2).sum(), 0.02**2, (0.09 + 0.04) / len(y)])
    assert np.allclose([p.mean for p in got[:3]], expected, rtol=0.06)
    assert np.isclose(got.total.mean, np.std([h[0].mean() for h in o]), rtol=0.05)
    assert np.isclose(got.total.mean**2, sum(p.mean**2 for p in got[:3]))


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


def test_holm_equals_statsmodels():
    "Random p-values with ties, zeros and ones."
    multiple, r = pytest.importorskip("statsmodels.stats.multitest"), rng(5)
    for m in [1, 2, *r.integers(3, 13, 60)]:
        p = r.choice([0.0, 0.001, 0.01, 0.02, 0.04, 0.05, 0.3, 1.0], m)
        assert np.allclose(holm(p), multiple.multipletests(p, method="holm")[1])


def test_class_means_by_hand():
    assert class_means([1, 0, 1, 1], [7, 7, 2, 2]).tolist() == [1, 0.5]


# ---- power


@pytest.mark.parametrize("lead, rate, correlation", [(0.042, 0.59, 0.6), (0.02, 0.9, 0.3), (0.1, 0.5, -0.2)])
def test_required_queries_equals_statsmodels(lead, rate, correlation):
    power = pytest.importorskip("statsmodels.stats.power")
    sd = (2 * rate * (1 - rate) * (1 - correlation)) ** 0.5
    theirs = power.NormalIndPower().solve_power(lead / sd, alpha=0.05, power=0.8, ratio=0)
    assert abs(required_queries(lead, rate, correlation) - theirs) < 1 + 1e-3 * theirs
    assert abs(required_queries(lead, rate, correlation, design_effect=1.5) - 1.5 * theirs) < 1 + 2e-3 * theirs


@pytest.mark.parametrize("hits, queries, rate, correlation", [(7, 168, 0.59, 0.6), (1, 5, 0.5, 0), (3, 40, 0.9, 0.2)])
def test_null_lead_probability_is_a_mixture_of_binomials(hits, queries, rate, correlation):
    "Among m queries on which exactly one method has a hit, each of the two is equally likely."
    m = np.arange(queries + 1)
    discordant = stats.binom.pmf(m, queries, 2 * rate * (1 - rate) * (1 - correlation))
    tail = [2 * stats.binom.sf(np.ceil((k + hits) / 2) - 1, k, 0.5) for k in m]
    assert np.isclose(null_lead_probability(hits, queries, rate, correlation), (discordant * np.minimum(tail, 1)).sum())


def test_design_effect_is_the_ratio_of_cluster_robust_to_plain_variance():
    sm = pytest.importorskip("statsmodels.api")
    c = np.repeat(np.arange(7), [3, 5, 8, 2, 9, 4, 4])
    d = rng(6).normal(size=35) + rng(7).normal(size=7)[c]
    model = sm.OLS(d, np.ones(35))
    robust = model.fit(cov_type="cluster", cov_kwds={"groups": c}).cov_params()[0, 0]
    assert np.isclose(design_effect(d, c), robust / model.fit().cov_params()[0, 0])


# ---- printed numbers


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 300))
def test_consistent_counts_equal_brute_force(value, n):
    text = f"{value / 1000:.3f}"
    assert list(hit_counts_matching_printed(text, n)) == [
        k for k in range(n + 1) if abs(Decimal(k) / n - Decimal(text)) <= Decimal("0.0005")
    ]


def test_consistent_seed_counts_equal_brute_force():
    n, tolerance = 30, 0.0005 + 1e-12
    brute = [
        hits
        for hits in combinations_with_replacement(range(n + 1), 3)
        if abs(np.mean(hits) / n - 0.611) <= tolerance and abs(np.std(hits) / n - 0.042) <= tolerance
    ]
    assert hit_counts_matching_printed_mean_sd("0.611", "0.042", n) == brute
    made = (95, 103, 110)
    printed = f"{np.mean(made) / 168:.3f}", f"{np.std(made) / 168:.3f}"
    assert made in hit_counts_matching_printed_mean_sd(*printed, 168)
    assert hit_counts_matching_printed_mean_sd("0.612", "0.020", 168) == []


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
