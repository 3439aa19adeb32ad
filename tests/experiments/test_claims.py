"Claims: rules, and every effect against a loop over replicates of made-up outcomes."

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ega.experiments.claims import (
    CENTERED_WHITENING,
    EFFECTS,
    OVER_THE_BATCH,
    PAPER_METHODS,
    TUNED_EFFECTS,
    Outcomes,
    change_at_seen_gain,
    decide,
    evaluate_claims,
    load_claims,
    mean_difference_at_equal_seen_gain,
    read_tuned_outcomes,
)
from ega.experiments.grids import ResultStore
from ega.experiments.protocols import MAIN_BENCHMARKS
from ega.experiments.summary import add_mean_over_benchmarks
from ega.measure.statistics import grouped_rank_correlation

CLAIMS = Path(__file__).resolve().parents[2] / "data/claims.toml"
EPOCHS = (0, 10, 150)
TRAINED = (*PAPER_METHODS, "ega_preserve", "supcon_preserve")


@pytest.fixture(scope="module")
def outcomes():
    "Random replicates of all methods and epochs."
    rng, made = np.random.default_rng(0), Outcomes.__new__(Outcomes)
    columns = [("frozen", 0), (CENTERED_WHITENING, 0), *product(TRAINED, EPOCHS)]
    searches = [*product(("seen", "unseen"), ("own", "mixed"), ("lp_at_1",)), ("unseen", "mixed", "capture_rate")]
    tables = {}
    for benchmark, search in product(MAIN_BENCHMARKS, searches):
        values = pd.DataFrame(50 + 10 * rng.normal(size=(31, len(columns))), columns=pd.MultiIndex.from_tuples(columns))
        for method in TRAINED:
            values[method, 0] = values["frozen", 0]
        tables[(benchmark, *search)] = values
    made.replicates = add_mean_over_benchmarks(tables)
    made.last_epoch = EPOCHS[-1]
    keys = pd.MultiIndex.from_product([MAIN_BENCHMARKS, PAPER_METHODS, EPOCHS[1:]])
    made.quantities = pd.DataFrame(rng.random((len(keys), 2)), index=keys, columns=["active_ratio", "displacement"])
    return made


def change(outcomes, row, benchmark, query_set, gallery, method, epoch=150, metric="lp_at_1"):
    table = outcomes.replicates[benchmark, query_set, gallery, metric]
    return table[method, epoch].iloc[row] - table["frozen", 0].iloc[row]


def mean(outcomes, row, *where, **kwargs):
    "Mean of five benchmarks on unseen classes; on seen ones the two of tiny200 count once."
    weight = {b: 0.5 if where[0] == "seen" and b.startswith("tiny200") else 1 for b in MAIN_BENCHMARKS}
    total = sum(weight[b] * change(outcomes, row, b, *where, **kwargs) for b in MAIN_BENCHMARKS)
    return total / sum(weight.values())


def expected(outcomes, row, gallery):
    "Every effect of one replicate, in the words of claims.toml."

    def of(method, query_set="unseen", where=gallery, **kwargs):
        return mean(outcomes, row, query_set, where, method, **kwargs)

    def worst_value(method):
        return min(outcomes.replicates[b, "unseen", gallery, "lp_at_1"][method, 150].iloc[row] for b in MAIN_BENCHMARKS)

    def worst_change(method, query_set="unseen"):
        return min(change(outcomes, row, b, query_set, gallery, method) for b in MAIN_BENCHMARKS)

    pairs = list(product(MAIN_BENCHMARKS, PAPER_METHODS))
    rank = grouped_rank_correlation(
        np.array([outcomes.quantities.active_ratio[(*pair, 150)] for pair in pairs]),
        np.array([change(outcomes, row, b, "unseen", gallery, m) for b, m in pairs]),
        np.repeat(range(5), 7),
    )
    captured = {m: of(m, where="mixed", metric="capture_rate") for m in (*OVER_THE_BATCH, "ega_released")}
    rivals = ("icon_self_included", "nca_half_repulsion", "lora_supcon", "lora_triplet")
    whitening = {q: of(CENTERED_WHITENING, q, epoch=0) for q in ("seen", "unseen")}
    return {
        ("ega_gains_on_seen", "EGA (paper)"): worst_change("ega_paper", "seen"),
        ("ega_gains_on_seen", "EGA (released)"): worst_change("ega_released", "seen"),
        ("ega_preserves", "EGA (paper)"): worst_change("ega_paper"),
        ("ega_preserves", "EGA (released)"): worst_change("ega_released"),
        ("ega_best_worst_case", ""): worst_value("ega_released") - max(map(worst_value, rivals)),
        ("triplet_loss_harms_less", ""): of("ega_released") - max(map(of, OVER_THE_BATCH)),
        ("few_active_triplets", ""): rank,
        ("ega_captures_less", ""): min(captured[m] for m in OVER_THE_BATCH) - captured["ega_released"],
        ("mixed_gallery_is_harder", ""): of("ega_released", where="mixed") - of("ega_released", where="own"),
        ("penalty_protects", ""): min(of("ega_preserve") - of("ega_released"), of("supcon_preserve") - of("supcon")),
        ("geometry_is_enough", ""): whitening["unseen"] - max(map(of, PAPER_METHODS)),
        ("training_gains_on_seen_classes", ""): max(of(m, "seen") for m in PAPER_METHODS) - whitening["seen"],
        ("longer_training_costs_more", ""): np.mean([of(m) - of(m, epoch=10) for m in PAPER_METHODS]),
    }


@pytest.mark.parametrize("gallery", ["own", "mixed"])
def test_effects_equal_a_loop_over_replicates(outcomes, gallery):
    for row in (0, 7):
        for (claim, name), value in expected(outcomes, row, gallery).items():
            assert np.isclose(EFFECTS[claim][name](outcomes, gallery)[row], value), (claim, name)


def test_a_path_is_read_where_it_first_reaches_a_seen_gain():
    seen, unseen = np.array([0.0, 4.0, 3.0, 8.0]), np.array([0.0, -1.0, -2.0, -7.0])
    assert [change_at_seen_gain(seen, unseen, gain) for gain in (-1, 0, 2, 4, 6)] == [0, 0, -0.5, -1, -5]
    assert change_at_seen_gain(seen, unseen, 9) == -7


def test_paths_are_compared_at_the_smaller_of_their_largest_seen_gains(outcomes):
    methods = ("ega_released", "supcon")
    found = mean_difference_at_equal_seen_gain(outcomes, "own", *methods)
    for row in (0, 5):
        differences = []
        for benchmark in MAIN_BENCHMARKS:
            paths = [
                [np.array([change(outcomes, row, benchmark, q, "own", m, epoch=e) for e in EPOCHS]) for m in methods]
                for q in ("seen", "unseen")
            ]
            gain = min(seen.max() for seen in paths[0])
            a, b = (change_at_seen_gain(seen, unseen, gain) for seen, unseen in zip(*paths))
            differences.append(a - b)
        assert np.isclose(found[row], np.mean(differences))


def test_verdicts_follow_the_interval_of_the_replicates(outcomes):
    claims = load_claims(CLAIMS)
    assert [claim.id for claim in claims] == list(EFFECTS)
    table, by_id = evaluate_claims(claims, outcomes), {claim.id: claim for claim in claims}
    assert len(table) == 2 * 14 - 2  # two verdicts for each gallery, of two claims in the mixed one only
    for line in table.itertuples():
        values = EFFECTS[line.id][line.of](outcomes, line.gallery)
        assert line.estimate == values[0] and np.allclose([line.low, line.high], np.percentile(values[1:], [2.5, 97.5]))
        assert line.verdict == decide(by_id[line.id], line.low, line.high)
    verdicts = {(-2, -1): "held", (1, 2): "did not hold", (-1, 1): "undecided", (-1, 0): "undecided"}
    assert {ends: decide(by_id["mixed_gallery_is_harder"], *ends) for ends in verdicts} == verdicts


TUNED = ("wccn", "lda", *TRAINED, "whitened_supcon")
FOUR = ("cub100", "tiny200", "clinc150", "grocery")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    "Made-up rows of the experiment equal_tuned, whose chosen settings differ between benchmarks and splits."
    rng, rows = np.random.default_rng(1), []
    for benchmark, split, query_set in product(FOUR, (42, 0), ("seen", "unseen")):
        query = np.arange(40) + (100 if query_set == "unseen" else 0)
        for place, (method, gallery) in enumerate(product(("frozen", *TUNED), ("own", "mixed"))):
            name = method if method == "frozen" else f"{method} epoch={split % 7} strength=0.5"
            hit = np.float32(rng.random(40) < 0.3 + 0.02 * place)
            row = dict(
                run_id=f"{benchmark} {split} {method}", benchmark=benchmark, method=name, split_seed=split, seed=0
            )
            row |= dict(query_set=query_set, gallery_kind=gallery, epoch=split % 7, strength=0.5, protocol="strict")
            row |= dict(active_ratio=0.5, displacement=0.1, config="{}", query=query, query_class=query // 5, hit=hit)
            captures = (query_set, gallery) == ("unseen", "mixed")
            rows.append(row | dict(captured=1 - hit if captures else np.empty(0, np.float32)))
    folder, frame = tmp_path_factory.mktemp("tuned"), pd.DataFrame(rows)
    ResultStore(folder, "equal_tuned").write(frame)
    return frame, read_tuned_outcomes(folder, n_boot=30)


def test_tuned_effects_equal_a_loop_over_replicates(tuned):
    _, made = tuned
    claims = load_claims(CLAIMS.with_name("claims_tuning.toml"))
    for row in (0, 7):
        unseen, seen = ({m: made.change("mean", q, "mixed", m)[row] for m in TUNED} for q in ("unseen", "seen"))
        gain = {m: (seen[m] + unseen[m]) / 2 for m in TUNED}
        of_paper = [unseen[m] for m in PAPER_METHODS]
        effects = {
            "tuned_ega_protects": unseen["ega_released"] - unseen["supcon"],
            "tuned_methods_are_alike": max(of_paper) - min(of_paper),
            "tuned_methods_keep_unseen": min(of_paper),
            "tuned_geometry_is_enough": unseen["wccn"] - max(of_paper),
            "tuned_supcon_gains_more": gain["supcon"] - gain["ega_released"],
            "tuned_whitening_gains_more": gain["whitened_supcon"] - max(gain[m] for m in PAPER_METHODS),
        }
        assert [c.id for c in claims] == list(effects) == list(TUNED_EFFECTS)
        for claim, value in effects.items():
            assert np.isclose(TUNED_EFFECTS[claim][""](made, "mixed")[row], value), claim
    assert set(evaluate_claims(claims, made).gallery) == {"mixed"}
