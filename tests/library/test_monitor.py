"The monitor: signals by brute force, an exact test, a rate that is kept, a folder without pickle."

import json
from itertools import combinations

import numpy as np
import pytest
import torch

from ega.adapters import LinearAdapter, ReleasedEGA
from ega.arrays import InputError, normalize
from ega.closed_form import WCCN, LDAMap
from ega.index import as_transform
from ega.monitor import Monitor, permutation_test, query_signals
from ega.testing import error_message

D = 12


def unit(n, seed, shift=0.0):
    return normalize(np.random.default_rng(seed).standard_normal((n, D), dtype=np.float32) + shift)


gallery, y = unit(200, 0), np.arange(200) % 10
cone = unit(200, 20, 0.8)
WHITE, BENT = WCCN(0.3).fit(gallery, y), ReleasedEGA(D, hidden=16, gen=torch.Generator().manual_seed(0)).eval()
with torch.no_grad():
    BENT.branch[3].weight.add_(0.2)


@pytest.mark.parametrize("adapter", (WHITE, BENT, LDAMap(4).fit(gallery, y)), ids=("white", "bent", "narrow"))
def test_signals_by_brute_force(adapter):
    x, m = unit(30, 1), as_transform(adapter)
    found, z, zb = (
        query_signals(x, adapter, gallery, k=7),
        m.transform(x).astype("f8"),
        m.transform(gallery).astype("f8"),
    )
    for i in range(30):
        before, after = (
            np.argsort(((x[i].astype("f8") - gallery) ** 2).sum(1))[:7],
            np.argsort(((z[i] - zb) ** 2).sum(1))[:7],
        )
        assert found["overlap"][i] == len({*before} & {*after}) / 7 and np.isclose(
            found["distance"][i], np.linalg.norm(z[i] - zb, axis=1).min(), atol=1e-5
        )
        if m.dim == D:
            assert np.isclose(found["displacement"][i], np.linalg.norm(z[i] - x[i]), atol=1e-5)
    assert list(found) == (["displacement"] if m.dim == D else []) + ["overlap", "distance"]


def test_the_identity_moves_nothing():
    found = query_signals(unit(20, 2), LinearAdapter(D), gallery)
    assert found["displacement"].max() < 1e-6 and (found["overlap"] == 1).all()


def test_p_is_that_of_all_choices():
    "Seven pooled rows, batches of two: 21 choices, counted by hand; random choices come near."
    rng = np.random.default_rng(3)
    pooled = rng.standard_normal((7, 2))
    pooled[2, 1] = pooled[4, 1]  # a tie
    from scipy.stats import rankdata

    r = rankdata(pooled, axis=0)
    r = (r - r.mean(0)) / r.std(0)
    T = {c: np.abs(r[list(c)].mean(0)).max() for c in combinations(range(7), 2)}
    exact = np.mean([t >= T[0, 1] - 1e-12 for t in T.values()])
    p, shift = permutation_test(pooled[2:], pooled[:2], choices=4_999)
    assert abs(p - exact) < 4 * (exact * (1 - exact) / 5_000) ** 0.5 + 1e-4 and np.allclose(shift, r[:2].mean(0))


def test_ranks_alone_count():
    "Any increasing change of a signal's scale, and its direction, leave p as it is; so does the order of rows."
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((60, 3)), rng.standard_normal((12, 3)) + 0.4

    def bent(v):
        return np.stack([np.exp(v[:, 0]), -v[:, 1], v[:, 2] ** 3], 1)

    p = permutation_test(a, b, choices=499)[0]
    assert p == permutation_test(bent(a), bent(b), choices=499)[0] == permutation_test(a, b, choices=499)[0]
    assert permutation_test(a[::-1], b[::-1], choices=499)[0] == pytest.approx(p, abs=0.1)


def test_a_constant_signal_is_harmless():
    rng = np.random.default_rng(5)
    a, b = (np.hstack([rng.standard_normal((n, 1)), np.ones((n, 1))]) for n in (50, 10))
    assert (
        permutation_test(a, b, choices=199)[0] == permutation_test(a[:, :1], b[:, :1], choices=199)[0]
        and permutation_test(np.ones((50, 2)), np.ones((10, 2)), choices=199)[0] == 1
    )


@pytest.mark.parametrize("law", ("normal", "counts", "heavy"))
def test_the_level_is_kept_for_any_distribution(law):
    "600 tests of two samples from one law: p <= .1 in at most a tenth of them, to three standard errors; and not far below."
    rng = np.random.default_rng(6)

    def draw(n):
        u = rng.standard_normal((n, 1))
        return {
            "normal": np.hstack([u, u + rng.standard_normal((n, 1))]),
            "counts": rng.poisson(1.5, (n, 2)),
            "heavy": np.hstack([rng.standard_cauchy((n, 1)), np.exp(3 * u)]),
        }[law]

    p = np.array([permutation_test(draw(60), draw(15), choices=99)[0] for _ in range(600)])
    assert 0.05 < (p <= 0.1).mean() <= 0.1 + 3 * (0.09 / 600) ** 0.5 and np.isclose(p * 100, np.round(p * 100)).all()


def test_a_stream_keeps_its_promise_and_only_by_the_correction():
    rng = np.random.default_rng(7)
    lowest = np.array(
        [
            min(
                permutation_test(rng.standard_normal((80, 2)), rng.standard_normal((10, 2)), choices=499)[0]
                for _ in range(10)
            )
            for _ in range(120)
        ]
    )
    assert (lowest <= 0.1 / 10).mean() <= 0.1 + 3 * (0.09 / 120) ** 0.5 and (lowest <= 0.1).mean() > 0.4


def test_power_grows_with_the_batch_and_the_shift():
    rng = np.random.default_rng(8)

    def power(b, shift):
        return np.mean(
            [
                permutation_test(rng.standard_normal((150, 2)), rng.standard_normal((b, 2)) + [shift, 0], choices=399)[
                    0
                ]
                <= 0.01
                for _ in range(40)
            ]
        )

    assert power(40, 1.0) > 0.9 > power(8, 1.0) and power(40, 1.0) > power(40, 0.3)


def test_a_monitor_alarms_speaks_and_counts():
    m = Monitor.fit(unit(300, 10, 0.8), WHITE, cone, horizon=3)
    calm, strange = m.check(unit(40, 11, 0.8)), m.check(unit(40, 12))
    assert not calm.alert and strange.alert and strange.p == 1 / 300 and strange.level == pytest.approx(0.05 / 3)
    assert (
        calm.sentence.startswith("quiet, 40 rows, batch 1 of 3")
        and strange.sentence.startswith("alert, ")
        and "median" in strange.sentence
    )
    assert [m.check(unit(40, 13, 0.8)).batch for _ in range(3)] == [3, 1, 2]  # the promise begins anew
    assert strange.medians["distance"][1] == pytest.approx(
        np.median(query_signals(unit(40, 12), WHITE, cone)["distance"])
    )


@pytest.mark.parametrize("p, alert", ((0.005, True), (0.0051, False), (0.04, False)))
def test_the_rule_is_alpha_over_the_horizon(monkeypatch, p, alert):
    monkeypatch.setattr("ega.monitor.permutation_test", lambda *a, **k: (p, np.zeros(3)))
    assert Monitor.fit(unit(60, 10), WHITE, gallery, horizon=10).check(unit(9, 11)).alert == alert


def test_without_a_gallery_every_other_row_becomes_one():
    rows = unit(100, 14)
    a, b = Monitor.fit(rows, WHITE), Monitor.fit(rows[1::2], WHITE, rows[::2])
    assert np.array_equal(a.gallery, b.gallery) and a.check(unit(9, 15)) == b.check(unit(9, 15))


@pytest.mark.parametrize("adapter", (WHITE, BENT), ids=("matrix", "module"))
def test_a_monitor_comes_back_without_pickle(tmp_path, adapter):
    m = Monitor.fit(unit(100, 16), adapter, gallery, significance=0.1, horizon=7)
    m.check(unit(5, 17))
    m.save(tmp_path / "m")
    again = Monitor.load(tmp_path / "m")
    assert again.check(unit(9, 18)) == m.check(unit(9, 18)) and (again.significance, again.horizon, again.k) == (
        0.1,
        7,
        10,
    )
    np.load(tmp_path / "m/monitor.npz", allow_pickle=False)
    json.loads((tmp_path / "m/monitor.json").read_text())
    assert {f.suffix for f in (tmp_path / "m").iterdir()} == {
        ".npz",
        ".json",
        ".safetensors",
    } and "made with" in error_message(lambda: Monitor.load(tmp_path / "m", LinearAdapter(D)))
    (tmp_path / "m/monitor.npz").write_bytes(b"junk")
    with pytest.raises(InputError, match="Monitor.save"):
        Monitor.load(tmp_path / "m")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Monitor.fit(unit(50, 0), WHITE, gallery, significance=0.0), "significance"),
        (lambda: Monitor.fit(unit(50, 0), WHITE, gallery, horizon=0), "horizon"),
        (lambda: query_signals(unit(5, 0), WHITE, gallery[:4]), "at least k"),
        (lambda: Monitor.fit(2 * unit(50, 0), WHITE, gallery), "unit rows"),
        (lambda: Monitor.fit(unit(50, 0), WHITE, gallery).check(unit(5, 1)[:, :4]), "columns"),
    ],
)
def test_bad_input_is_named(call, words):
    assert words in error_message(call)
