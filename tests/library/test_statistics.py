"Comparison: parts of variance against a mixed model and known worlds, tests against scipy and statsmodels, counts against brute force."

from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ega.arrays import InputError
from ega.statistics import (
    _mean_squares,
    class_means,
    consistent_counts,
    consistent_seed_counts,
    design_effect,
    holm,
    null_lead_probability,
    paired_test,
    rank_correlation,
    required_queries,
    variance_components,
)


def rng(seed=0):
    return np.random.default_rng(seed)


def world(rng, splits, seeds, y, split_sd, class_sd, seed_sd, query_sd, rest_sd):
    "Outcomes of every split and their classes; each part drawn as the model says."
    out = []
    for _ in range(splits):
        query = rng.normal(0, split_sd) + rng.normal(0, class_sd, y.max() + 1)[y] + rng.normal(0, query_sd, len(y))
        out.append(0.6 + query + rng.normal(0, seed_sd, (seeds, 1)) + rng.normal(0, rest_sd, (seeds, len(y))))
    return out, [y] * splits


# ---- parts of variance


def test_mean_squares_are_those_of_a_two_way_table():
    "One class: the classical ANOVA of seeds by queries, from statsmodels."
    sm, formula = pytest.importorskip("statsmodels.api"), pytest.importorskip("statsmodels.formula.api")
    import pandas as pd

    h = rng().normal(size=(3, 11)) + rng(1).normal(size=11) + rng(2).normal(size=(3, 1))
    table = pd.DataFrame([(j, q, h[j, q]) for j, q in product(range(3), range(11))], columns=["seed", "query", "h"])
    anova = sm.stats.anova_lm(formula.ols("h ~ C(seed) + C(query)", table).fit())
    squares = anova.sum_sq / anova.df
    mean, seed, query, rest, free = _mean_squares(h, np.zeros(11, int))
    assert np.isclose(mean, h.mean()) and free == 10
    assert (
        np.isclose(seed * 11, squares["C(seed)"])
        and np.isclose(query * 3 * 11, squares["C(query)"])
        and np.isclose(rest * 11, squares["Residual"])
    )


def test_the_spread_of_one_runs_mean_is_recovered():
    "Many splits: parts equal the variances put in; total equals the variance of a single run's mean, measured."
    y, r = np.repeat(np.arange(8), [3, 5, 8, 8, 10, 12, 20, 30]), rng(3)
    o, c = world(r, 4000, 2, y, 0.03, 0.1, 0.02, 0.3, 0.2)
    got = variance_components([(o, c)], r, n_draws=200)
    share = np.bincount(y) / len(y)
    expected = np.sqrt([0.03**2 + 0.01 * (share**2).sum(), 0.02**2, (0.09 + 0.04) / len(y)])
    assert np.allclose([p.mean for p in got[:3]], expected, rtol=0.06)
    assert np.isclose(got.total.mean, np.std([h[0].mean() for h in o]), rtol=0.05) and np.isclose(
        got.total.mean**2, sum(p.mean**2 for p in got[:3])
    )


def test_intervals_hold_the_truth():
    "300 worlds of 5 splits and 3 seeds; 0.95 within 4 standard errors of a binomial share, or wider."
    y, r, truth = np.repeat(np.arange(12), 10), rng(4), np.sqrt([0.04**2 + 0.09**2 / 12, 0.03**2, (0.09 + 0.04) / 120])
    found = [variance_components([world(r, 5, 3, y, 0.04, 0.09, 0.03, 0.3, 0.2)], r, n_draws=800) for _ in range(300)]
    for k in range(3):
        assert np.mean([f[k].low <= truth[k] <= f[k].high for f in found]) > 0.95 - 4 * (0.95 * 0.05 / 300) ** 0.5


def test_the_interval_of_one_mean_square_is_exact():
    "Without query noise and seed effects only the split part is left: the chi-square interval of a variance."
    means = rng(5).normal(size=6)
    o = [np.full((2, 4), m) for m in means]
    got = variance_components([(o, [np.array([0, 0, 1, 1])] * 6)], rng(6), n_draws=200_000).split
    exact = np.sqrt(5 * means.var(ddof=1) / stats.chi2.ppf([0.975, 0.025], 5))
    assert np.isclose(got.mean, means.std(ddof=1)) and np.allclose([got.low, got.high], exact, rtol=0.01)


def test_the_interval_of_seeds_alone_is_exact():
    "Runs that differ in their mean only: the chi-square interval with 4 (3 - 1) degrees of freedom."
    runs = rng(5).normal(size=(4, 3))
    got = variance_components(
        [([np.repeat(r[:, None], 4, 1) for r in runs], [np.array([0, 0, 1, 1])] * 4)], rng(6), n_draws=200_000
    ).seed
    pooled = runs.var(axis=1, ddof=1).mean()
    assert np.isclose(got.mean, pooled**0.5) and np.allclose(
        [got.low, got.high], np.sqrt(8 * pooled / stats.chi2.ppf([0.975, 0.025], 8)), rtol=0.01
    )


def test_parts_follow_scale_and_forget_shift_and_order():
    y, r = np.repeat(np.arange(4), 6), rng(7)
    o, c = world(r, 3, 2, y, 0.1, 0.1, 0.1, 0.3, 0.2)
    parts = lambda o, c: np.array(variance_components([(o, c)], rng(8), n_draws=500))
    p = rng(9).permutation(len(y))
    assert np.allclose(parts([100 * h for h in o], c), 100 * parts(o, c)) and np.allclose(
        parts([h + 5 for h in o], c), parts(o, c), atol=1e-9
    )
    assert np.allclose(parts([h[:, p] for h in o], [v[p] for v in c]), parts(o, c), atol=1e-9)
    assert np.allclose(
        variance_components([(o, c)] * 2, rng(8), n_draws=10)[0].mean,
        variance_components([(o, c)], rng(8), n_draws=10)[0].mean,
    )


# ---- tests


def test_one_benchmark_is_the_paired_t_test():
    a, b = rng(0).random(20), rng(1).random(20) + 0.1
    theirs, got = stats.ttest_rel(a, b), paired_test([a - b])
    interval = theirs.confidence_interval(0.95)
    assert np.allclose([got.p, got.df, got.low, got.high], [theirs.pvalue, 19, interval.low, interval.high])


def test_two_benchmarks_are_welchs_test():
    "The mean of two means is half of a difference when the second has its sign turned."
    a, b = rng(0).normal(0.3, 1, 9), rng(1).normal(0, 3, 25)
    theirs, got = stats.ttest_ind(a, -b, equal_var=False), paired_test([a, b])
    assert np.allclose([got.p, got.df, got.mean], [theirs.pvalue, theirs.df, (a.mean() + b.mean()) / 2])


def test_it_errs_as_often_as_it_says():
    r = rng(2)
    p = np.array(
        [
            paired_test([r.normal(size=n) * s for n, s in ((10, 3), (20, 1), (20, 1), (30, 1), (40, 0.5))]).p
            for _ in range(3000)
        ]
    )
    assert (
        abs((p < 0.05).mean() - 0.05) < 4 * (0.05 * 0.95 / 3000) ** 0.5 + 0.005
    )  # Welch's degrees of freedom are approximate


def test_no_difference_at_all_is_no_difference():
    assert paired_test([np.zeros(4)]).p == 1 and paired_test([np.ones(4)]).p == 0


def test_holm_is_statsmodels():
    "Random p-values with ties, zeros and ones."
    multiple, r = pytest.importorskip("statsmodels.stats.multitest"), rng(5)
    for m in [1, 2, *r.integers(3, 13, 60)]:
        p = r.choice([0.0, 0.001, 0.01, 0.02, 0.04, 0.05, 0.3, 1.0], m)
        assert np.allclose(holm(p), multiple.multipletests(p, method="holm")[1])


def test_class_means_by_hand():
    assert class_means([1, 0, 1, 1], [7, 7, 2, 2]).tolist() == [1, 0.5]


# ---- power


@pytest.mark.parametrize("lead, rate, correlation", [(0.042, 0.59, 0.6), (0.02, 0.9, 0.3), (0.1, 0.5, -0.2)])
def test_queries_needed_is_statsmodels(lead, rate, correlation):
    power = pytest.importorskip("statsmodels.stats.power")
    sd = (2 * rate * (1 - rate) * (1 - correlation)) ** 0.5
    theirs = power.NormalIndPower().solve_power(lead / sd, alpha=0.05, power=0.8, ratio=0)
    assert abs(required_queries(lead, rate, correlation) - theirs) < 1 + 1e-3 * theirs
    assert abs(required_queries(lead, rate, correlation, design=1.5) - 1.5 * theirs) < 1 + 2e-3 * theirs


def test_that_many_queries_have_that_power():
    "The two methods right alone on shares b + lead and b of the queries."
    lead, rate, rho, r = 0.05, 0.6, 0.5, rng(3)
    n, b = required_queries(lead, rate, rho), rate * (1 - rate) * (1 - rho) - lead / 2
    u = r.random((4000, n))
    d = (u < b + lead).astype(int) - (u > 1 - b)
    t = d.mean(1) / (d.std(1) / n**0.5)
    assert abs((abs(t) > 1.96).mean() - 0.8) < 0.03


@pytest.mark.parametrize("hits, queries, rate, correlation", [(7, 168, 0.59, 0.6), (1, 5, 0.5, 0), (3, 40, 0.9, 0.2)])
def test_chance_of_a_lead_is_a_mixture_of_binomials(hits, queries, rate, correlation):
    "Among m queries on which one alone is right, the side is a fair coin."
    m = np.arange(queries + 1)
    discordant = stats.binom.pmf(m, queries, 2 * rate * (1 - rate) * (1 - correlation))
    tail = [2 * stats.binom.sf(np.ceil((k + hits) / 2) - 1, k, 0.5) for k in m]
    assert np.isclose(null_lead_probability(hits, queries, rate, correlation), (discordant * np.minimum(tail, 1)).sum())


def test_equal_outcomes_never_differ_and_more_queries_differ_less():
    assert null_lead_probability(1, 50, 0.6, 1) == 0
    assert null_lead_probability(7, 168, 0.6, 0.5) > null_lead_probability(70, 1680, 0.6, 0.5) > 0


def test_design_effect_of_independent_and_of_copied_queries():
    d, c = rng(4).normal(size=60_000), np.repeat(np.arange(6000), 10)
    assert abs(design_effect(d, c) - 1) < 0.1 and abs(design_effect(np.repeat(d[:6000], 10), c) - 10) < 0.01


def test_design_effect_is_the_cluster_robust_variance_over_the_plain_one():
    sm = pytest.importorskip("statsmodels.api")
    c = np.repeat(np.arange(7), [3, 5, 8, 2, 9, 4, 4])
    d = rng(6).normal(size=35) + rng(7).normal(size=7)[c]
    fit = sm.OLS(d, np.ones(35)).fit
    assert np.isclose(
        design_effect(d, c),
        fit(cov_type="cluster", cov_kwds={"groups": c}).cov_params()[0, 0] / fit().cov_params()[0, 0],
    )


# ---- printed numbers


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.data(), st.integers(2, 4))
def test_every_printed_proportion_fits_its_own_hits(n, data, places):
    k = data.draw(st.integers(0, n))
    for rounding in (ROUND_HALF_UP, ROUND_HALF_EVEN):
        text = str((Decimal(k) / n).quantize(Decimal(1).scaleb(-places), rounding))
        assert k in consistent_counts(text, n)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 300))
def test_counts_are_all_there_are(value, n):
    text = f"{value / 1000:.3f}"
    assert list(consistent_counts(text, n)) == [
        k for k in range(n + 1) if abs(Decimal(k) / n - Decimal(text)) <= Decimal("0.0005")
    ]


def test_seed_counts_equal_brute_force():
    n, mean, sd = 30, "0.611", "0.042"
    brute = [
        k
        for k in product(range(n + 1), repeat=3)
        if list(k) == sorted(k)
        and abs(np.mean(k) / n - 0.611) <= 0.0005 + 1e-12
        and abs(np.std(k) / n - 0.042) <= 0.0005 + 1e-12
    ]
    assert consistent_seed_counts(mean, sd, n) == brute
    made = (95, 103, 110)
    assert (
        made in consistent_seed_counts(f"{np.mean(made) / 168:.3f}", f"{np.std(made) / 168:.3f}", 168)
        and consistent_seed_counts("0.612", "0.020", 168) == []
    )


def test_rank_correlation_is_spearmans_inside_each_group():
    a, b, where = rng().integers(6, size=(3, 90))  # with ties
    assert np.isclose(rank_correlation(a, b), stats.spearmanr(a, b)[0])
    ranks = [
        np.concatenate([stats.rankdata(v[where == g]) - (sum(where == g) + 1) / 2 for g in range(6)]) for v in (a, b)
    ]
    assert np.isclose(rank_correlation(a, b, where), np.corrcoef(*ranks)[0, 1])
    assert np.isclose(
        rank_correlation(a + 100 * where, b - 50 * where, where), rank_correlation(a, b, where)
    )  # a level is no answer
    assert np.isclose(rank_correlation(np.exp(a), b, where), rank_correlation(a, b, where)) and np.isnan(
        rank_correlation(where, b, where)
    )


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: rank_correlation([1, 2], [1, 2, 3]), "three arrays"),
        (lambda: rank_correlation([1, 2], [1, 2], [0]), "three arrays"),
        (lambda: variance_components([([np.ones((1, 4))] * 2, [[0, 0, 1, 1]] * 2)], rng()), "two seeds"),
        (lambda: variance_components([([np.ones((2, 4))], [[0, 0, 1, 1]])], rng()), "two splits"),
        (lambda: variance_components([([np.ones((2, 2))] * 2, [[0, 1]] * 2)], rng()), "outnumber"),
        (lambda: paired_test([]), "two classes"),
        (lambda: holm([1.5]), "0..1"),
        (lambda: required_queries(0.1, 1, 0), "rate"),
        (lambda: null_lead_probability(0, 5, 0.5, 0), "hits"),
        (lambda: class_means([1, 2], [0]), "labels"),
    ],
)
def test_bad_input_is_named(call, text):
    with pytest.raises(InputError) as error:
        call()
    assert text in str(error.value)
