"""The audit: its list of deviations, its stored runs, and the functions that its chapter defines."""

import json
import re
from decimal import Decimal
from itertools import combinations_with_replacement, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ega.experiments.grids import read_results
from ega.experiments.runs import RunConfig, build_config
from ega.method.config import parse_config

ROOT = Path(__file__).resolve().parents[2]
CELLS = json.loads((ROOT / "nbs/results/11_audit.ipynb").read_text())["cells"]


def read_deviations():
    return pd.read_csv(ROOT / "data/deviations.csv", dtype=str, keep_default_na=False)


def named_sections(entry):
    "Headings of the sections that test a deviation; none for an entry that begins with 'no: '."
    return [] if entry.startswith("no: ") else entry.removeprefix("in part: ").split("; ")


def read_sections():
    "Heading -> text of each section of the audit."
    text = "\n".join("".join(c["source"]) for c in CELLS if c["cell_type"] == "markdown")
    parts = re.split(r"^## (.+)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def test_deviations_are_complete_and_listed_exactly_where_they_are_tested():
    deviations, sections = read_deviations(), read_sections()
    assert deviations.id.tolist() == [f"D{i}" for i in range(1, 34)]
    assert (deviations != "").all(axis=None)
    assert {heading for entry in deviations.tested for heading in named_sections(entry)} <= set(sections)
    for heading, text in sections.items():
        listed = re.search(r"^\*(D.+?)\*", text, re.M)
        named = set(re.findall(r"\bD\d+\b", listed[1])) if listed else set()
        assert named == {d.id for d in deviations.itertuples() if heading in named_sections(d.tested)}, heading


def test_table_of_index_sizes_is_a_full_grid_of_known_runs():
    table = pd.read_csv(ROOT / "data/results/nlist.csv")
    keys = ["benchmark", "method", "split_seed", "nlist"]
    assert len(table) == len(table[keys].drop_duplicates()) == np.prod([table[key].nunique() for key in keys])
    for row in table.drop_duplicates("run_id").itertuples():
        options = dict(hidden=512, epochs=10, split_seed=row.split_seed, seed=row.seed)
        config = build_config("unseen", row.benchmark, row.method, **options)
        assert parse_config(RunConfig, json.loads(row.config)) == config and row.run_id == config.run_id
    assert set(table.nprobe) == {1} and table[["scanned", "ar_at_1", "lp_at_1"]].stack().between(0, 1).all()
    assert (table.scanned >= 0.9 / table.nlist).all()  # lists of unequal size scan more than 1/nlist on average


def test_runs_with_queries_in_training_differ_in_fit_rows_alone():
    kept_out, in_training = (
        read_results(ROOT / "data/results", name).set_index("method").sort_index()
        for name in ("leak_closed", "leak_open")
    )
    assert kept_out.index.equals(in_training.index)
    assert all(np.array_equal(a, b) for a, b in zip(kept_out["query"], in_training["query"]))
    assert np.array_equal(kept_out.hit["frozen"], in_training.hit["frozen"])
    assert (kept_out.gallery == in_training.gallery).all()
    for one, other in zip(kept_out.config, in_training.config):
        one, other = json.loads(one), json.loads(other)
        assert one.pop("protocol") == "gallery_fitted" and other.pop("protocol") == "leaked"
        assert one == other


# ---- functions of the chapter


def defined_by_the_chapter():
    "What the cells define that hold functions only, after its imports."
    sources = {cell["id"]: "".join(cell["source"]) for cell in CELLS}
    names = {}
    for cell in (
        *("8e722f4f", "whole-counts", "seed-counts", "queries-needed", "design-effect", "chance-of-lead"),
        *("mean-squares", "variance-parts"),
    ):
        exec(sources[cell], names)
    return SimpleNamespace(**names)


AUDIT = defined_by_the_chapter()


def rng(seed=0):
    return np.random.default_rng(seed)


def simulate(rng, splits, seeds, y, split_sd, class_sd, seed_sd, query_sd, rest_sd):
    "Outcomes of every split and their classes, drawn from the model with these standard deviations."
    out = []
    for _ in range(splits):
        query = rng.normal(0, split_sd) + rng.normal(0, class_sd, y.max() + 1)[y] + rng.normal(0, query_sd, len(y))
        out.append(0.6 + query + rng.normal(0, seed_sd, (seeds, 1)) + rng.normal(0, rest_sd, (seeds, len(y))))
    return out, [y] * splits


# ---- variance components


def test_mean_squares_of_one_class_equal_two_way_anova():
    "One class: the classical ANOVA of seeds by queries, from statsmodels."
    sm, formula = pytest.importorskip("statsmodels.api"), pytest.importorskip("statsmodels.formula.api")
    h = rng(0).normal(size=(3, 11)) + rng(1).normal(size=11) + rng(2).normal(size=(3, 1))
    table = pd.DataFrame([(j, q, h[j, q]) for j, q in product(range(3), range(11))], columns=["seed", "query", "h"])
    anova = sm.stats.anova_lm(formula.ols("h ~ C(seed) + C(query)", table).fit())
    squares = anova.sum_sq / anova.df
    mean, seed, query, rest, free = AUDIT._mean_squares(h, np.zeros(11, int))
    assert np.isclose(mean, h.mean()) and free == 10
    assert np.allclose([seed * 11, query * 33, rest * 11], squares[["C(seed)", "C(query)", "Residual"]])


def test_variance_components_recover_the_simulated_variances():
    "Many splits: the components equal the simulated ones; the total equals the measured variance of the mean of a run."
    y, r = np.repeat(np.arange(8), [3, 5, 8, 8, 10, 12, 20, 30]), rng(3)
    o, c = simulate(r, 4000, 2, y, 0.03, 0.1, 0.02, 0.3, 0.2)
    got = AUDIT.variance_components([(o, c)], r, n_draws=200)
    share = np.bincount(y) / len(y)
    expected = np.sqrt([0.03**2 + 0.01 * (share**2).sum(), 0.02**2, (0.09 + 0.04) / len(y)])
    assert np.allclose([p.mean for p in got[:3]], expected, rtol=0.06)
    assert np.isclose(got.total.mean, np.std([h[0].mean() for h in o]), rtol=0.05)
    assert np.isclose(got.total.mean**2, sum(p.mean**2 for p in got[:3]))


# ---- power


@pytest.mark.parametrize("lead, rate, correlation", [(0.042, 0.59, 0.6), (0.02, 0.9, 0.3), (0.1, 0.5, -0.2)])
def test_required_queries_equals_statsmodels(lead, rate, correlation):
    power = pytest.importorskip("statsmodels.stats.power")
    sd = (2 * rate * (1 - rate) * (1 - correlation)) ** 0.5
    theirs = power.NormalIndPower().solve_power(lead / sd, alpha=0.05, power=0.8, ratio=0)
    assert abs(AUDIT.required_queries(lead, rate, correlation) - theirs) < 1 + 1e-3 * theirs
    assert abs(AUDIT.required_queries(lead, rate, correlation, design_effect=1.5) - 1.5 * theirs) < 1 + 2e-3 * theirs


@pytest.mark.parametrize("hits, queries, rate, correlation", [(7, 168, 0.59, 0.6), (1, 5, 0.5, 0), (3, 40, 0.9, 0.2)])
def test_null_lead_probability_is_a_mixture_of_binomials(hits, queries, rate, correlation):
    "Among m queries on which exactly one method has a hit, each of the two is equally likely."
    m = np.arange(queries + 1)
    discordant = stats.binom.pmf(m, queries, 2 * rate * (1 - rate) * (1 - correlation))
    tail = [2 * stats.binom.sf(np.ceil((k + hits) / 2) - 1, k, 0.5) for k in m]
    assert np.isclose(
        AUDIT.null_lead_probability(hits, queries, rate, correlation), (discordant * np.minimum(tail, 1)).sum()
    )


def test_design_effect_is_the_ratio_of_cluster_robust_to_plain_variance():
    sm = pytest.importorskip("statsmodels.api")
    c = np.repeat(np.arange(7), [3, 5, 8, 2, 9, 4, 4])
    d = rng(6).normal(size=35) + rng(7).normal(size=7)[c]
    model = sm.OLS(d, np.ones(35))
    robust = model.fit(cov_type="cluster", cov_kwds={"groups": c}).cov_params()[0, 0]
    assert np.isclose(AUDIT.design_effect(d, c), robust / model.fit().cov_params()[0, 0])


# ---- printed numbers


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 300))
def test_consistent_counts_equal_brute_force(value, n):
    text = f"{value / 1000:.3f}"
    assert list(AUDIT.hit_counts_matching_printed(text, n)) == [
        k for k in range(n + 1) if abs(Decimal(k) / n - Decimal(text)) <= Decimal("0.0005")
    ]


def test_consistent_seed_counts_equal_brute_force():
    n, tolerance = 30, 0.0005 + 1e-12
    brute = [
        hits
        for hits in combinations_with_replacement(range(n + 1), 3)
        if abs(np.mean(hits) / n - 0.611) <= tolerance and abs(np.std(hits) / n - 0.042) <= tolerance
    ]
    assert AUDIT.hit_counts_matching_printed_mean_sd("0.611", "0.042", n) == brute
    made = (95, 103, 110)
    printed = f"{np.mean(made) / 168:.3f}", f"{np.std(made) / 168:.3f}"
    assert made in AUDIT.hit_counts_matching_printed_mean_sd(*printed, 168)
    assert AUDIT.hit_counts_matching_printed_mean_sd("0.612", "0.020", 168) == []
