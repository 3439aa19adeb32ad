"Operating points: values from stored margins compared with loops, replicates that are shared, the choice."

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ega.experiments.claims import evaluate_claims, load_claims
from ega.experiments.operating import (
    FROZEN,
    OPERATING_EFFECTS,
    OperatingPoints,
    Point,
    choose_gammas,
    choose_points,
    contest_candidates,
    unseen_at_frozen_seen,
)
from ega.experiments.runs import MARGIN_STEP, build_config, load_joint_rows, run_experiment
from ega.measure.calibration import ausuc, choose_gamma, margins
from ega.method.closed_form import DiscriminantWhitening

root = Path(__file__).resolve().parents[2]
packs, RULES = root / "data/packs", root / "data/claims_operating.toml"
DIAL = "discriminant_whitening strength=0.3"


@pytest.fixture(scope="module")
def runs():
    return pd.concat([run_experiment(build_config("operating", "grocery", m), packs) for m in ("frozen", "wccn", DIAL)])


@pytest.fixture(scope="module")
def points(runs):
    return OperatingPoints(runs, n_boot=50)


def test_values_are_those_of_the_embeddings(points):
    rows = load_joint_rows(build_config("operating", "grocery", DIAL), packs)
    z = DiscriminantWhitening(0.3, shrinkage=0.5).fit(rows.x[rows.fit], rows.y[rows.fit]).transform(rows.x)
    seen = margins(z, rows.y, rows.seen_queries, rows.fit, rows.unseen_gallery)
    unseen = margins(z, rows.y, rows.unseen_queries, rows.unseen_gallery, rows.fit)
    cell, gamma = ("grocery", 42, Point(DIAL)), 3 * MARGIN_STEP
    value = {m: points.values(m, *cell)[0] for m in ("seen", "unseen", "seen_own", "captured", "area", "gain")}
    assert np.isclose(value["seen"], 100 * (seen.hit * (seen.margin > 0)).mean(), atol=0.2)
    assert np.isclose(value["unseen"], 100 * (unseen.hit * (unseen.margin > 0)).mean(), atol=0.3)
    assert np.isclose(value["seen_own"], 100 * seen.hit.mean(), atol=0.2)
    assert np.isclose(value["captured"], 100 * (unseen.margin < 0).mean(), atol=0.3)
    assert np.isclose(value["area"], 100 * ausuc(seen, unseen), atol=0.2)
    assert np.isclose(value["gain"], (value["seen"] + value["unseen"]) / 2)
    shifted = points.values("unseen", *cell, gamma)[0]
    assert np.isclose(shifted, 100 * (unseen.hit * (unseen.margin > -gamma)).mean(), atol=0.3)


def test_replicates_are_shared_and_means_weigh_splits_and_benchmarks_alike(runs):
    other = runs.assign(benchmark="other", hit=runs.hit.map(lambda hit: 0 * np.asarray(hit)))
    second = runs.assign(split_seed=7, hit=runs.hit.map(lambda hit: 0 * np.asarray(hit)))
    both = OperatingPoints(pd.concat([runs, second, other]), n_boot=20)
    one = OperatingPoints(runs, n_boot=20)
    assert np.allclose(both.mean("seen", FROZEN), one.mean("seen", FROZEN) / 4)
    assert np.allclose(both.mean("seen", FROZEN, benchmarks=["grocery"]), one.mean("seen", FROZEN) / 2)
    assert np.array_equal(one.change("seen", FROZEN), np.zeros(21))
    assert one.change("seen", Point("wccn")).std() < one.mean("seen", FROZEN).std()  # the same draws for both


def test_geometry_is_read_where_both_have_the_same_seen_precision(points):
    cell = ("grocery", 42, Point(DIAL))
    (seen, unseen), level = points.sides(*cell), points.values("seen", "grocery", 42, FROZEN)[0] / 100
    gammas = np.arange(-300, 301) * MARGIN_STEP
    of_seen = np.array([(seen.hit * (seen.margin > g)).mean() for g in gammas])
    nearest = gammas[np.abs(of_seen - level).argmin()]
    by_loop = 100 * (unseen.hit * (unseen.margin > -nearest)).mean()
    assert abs(unseen_at_frozen_seen(points, *cell)[0] - by_loop) < 1


def test_the_choice_is_made_on_held_out_classes_alone():
    configs = [build_config("operating", "grocery", m, protocol="held_out") for m in ("frozen", "wccn")]
    held_out = pd.concat([run_experiment(c, packs) for c in configs])
    assert "hit" not in held_out and set(held_out.query_set) == {"both"}
    candidates = [Point("wccn", s) for s in (0.1, 0.25, 0.5, 0.75, 1.0)]
    for objective, value in (("gain", held_out.seen + held_out.unseen), ("area", held_out.area)):
        best = held_out[held_out.method == "wccn"].strength.iloc[value[held_out.method == "wccn"].argmax()]
        assert choose_points(held_out, candidates, objective) == {("grocery", 42): Point("wccn", best)}
    rows = load_joint_rows(configs[0], packs)
    sides = [
        margins(rows.x, rows.y, *s)
        for s in (
            (rows.seen_queries, rows.fit, rows.unseen_gallery),
            (rows.unseen_queries, rows.unseen_gallery, rows.fit),
        )
    ]
    assert np.isclose(choose_gammas(held_out, FROZEN)["grocery", 42], choose_gamma(*sides))


def test_every_method_of_the_contest_has_at_most_ten_candidates_and_every_claim_an_effect():
    counts = {name: len(points) for name, points in contest_candidates().items()}
    assert max(counts.values()) == 10 and counts["supcon"] == counts["discriminant_whitening"] == 10
    assert [c.id for c in load_claims(RULES)] == list(OPERATING_EFFECTS)


def test_a_verdict_follows_from_the_interval(points):
    (claim,) = [c for c in load_claims(RULES) if c.id == "calibration_is_not_enough"]
    effects = {claim.id: {"": lambda p, _: p.change("area", Point(DIAL))}}
    (line,) = evaluate_claims([claim], points, effects).to_dict("records")
    assert line["verdict"] == "held" and line["p"] < 0.05 and line["low"] < line["estimate"] < line["high"]
