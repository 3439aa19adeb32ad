"The monitor: signals by brute force, p-values, significance, power, saving."

import json
from itertools import combinations
from math import comb

import numpy as np
import pandas as pd
import pytest
import torch

from ega.data.arrays import InputError, normalize
from ega.deploy.monitor import Monitor, _smallest_batch, permutation_test, query_signals
from ega.estimator import EmbeddingAdapter
from ega.method.adapters import LinearAdapter, ReleasedEGA, transform
from ega.method.closed_form import WCCN, LDAMap
from ega.method.interface import as_adapter

D = 12


def unit(n, seed, shift=0.0):
    return normalize(np.random.default_rng(seed).standard_normal((n, D), dtype=np.float32) + shift)


gallery, y = unit(200, 0), np.arange(200) % 10
cone = unit(200, 20, 0.8)
WHITE, MLP = WCCN(0.3).fit(gallery, y), ReleasedEGA(D, hidden=16, gen=torch.Generator().manual_seed(0)).eval()
with torch.no_grad():
    MLP.branch[3].weight.add_(0.2)
AFFINE = LinearAdapter(D, bias=True).eval()
with torch.no_grad():
    AFFINE.weight.copy_(0.2 * torch.from_numpy(unit(D, 21)))
    AFFINE.offset.copy_(0.5 * torch.from_numpy(unit(1, 22)[0]))


@pytest.mark.parametrize(
    "adapter", (WHITE, MLP, LDAMap(4).fit(gallery, y), AFFINE), ids=("whitening", "mlp", "narrow", "affine")
)
def test_signals_by_brute_force(adapter):
    x, m = unit(30, 1), as_adapter(adapter)
    found = query_signals(x, adapter, gallery, k=7)
    map_rows = (lambda v: transform(adapter, v, device="cpu")) if adapter is AFFINE else m.transform
    z, zb = (map_rows(v).astype("f8") for v in (x, gallery))
    for i in range(30):
        before, after = (np.argsort(((v - vb) ** 2).sum(1))[:7] for v, vb in ((x[i].astype("f8"), gallery), (z[i], zb)))
        assert found["neighbour_overlap"][i] == len({*before} & {*after}) / 7
        assert np.isclose(found["nearest_distance"][i], np.linalg.norm(z[i] - zb, axis=1).min(), atol=1e-5)
        if m.output_dim == D:
            assert np.isclose(found["displacement"][i], np.linalg.norm(z[i] - x[i]), atol=1e-5)
    assert list(found) == ["displacement"] * (m.output_dim == D) + ["neighbour_overlap", "nearest_distance"]


def test_p_value_approximates_enumeration_of_all_subsets():
    "Seven pooled rows, batches of two: the 21 subsets are enumerated; random subsets give nearly the same p-value."
    rng = np.random.default_rng(3)
    pooled = rng.standard_normal((7, 2))
    pooled[2, 1] = pooled[4, 1]  # a tie
    from scipy.stats import rankdata

    r = rankdata(pooled, axis=0)
    r = (r - r.mean(0)) / r.std(0)
    T = {c: np.abs(r[list(c)].mean(0)).max() for c in combinations(range(7), 2)}
    exact = np.mean([t >= T[0, 1] - 1e-12 for t in T.values()])
    p, shift = permutation_test(pooled[2:], pooled[:2], n_permutations=4_999)
    assert abs(p - exact) < 4 * (exact * (1 - exact) / 5_000) ** 0.5 + 1e-4 and np.allclose(shift, r[:2].mean(0))


def test_p_value_depends_on_ranks_alone():
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((60, 3)), rng.standard_normal((12, 3)) + 0.4
    a_changed, b_changed = (np.stack([np.exp(v[:, 0]), -v[:, 1], v[:, 2] ** 3], 1) for v in (a, b))
    p = permutation_test(a, b, n_permutations=499)[0]
    assert p == permutation_test(a_changed, b_changed, n_permutations=499)[0]


def test_check_reports_and_counts_batches():
    m = Monitor.fit(unit(300, 10, 0.8), WHITE, cone, horizon=3)
    usual, new = m.check(unit(40, 11, 0.8)), m.check(unit(40, 12))
    assert not usual.alert and new.alert and new.p_value == 1 / 300 and new.threshold == pytest.approx(0.05 / 3)
    assert usual.sentence.startswith("no alert: batch 1 of 3") and new.sentence.startswith("alert: ")
    assert [m.check(unit(40, 13, 0.8)).batch_number for _ in range(2)] == [3, 4]
    assert "beyond" in m.check(unit(40, 13, 0.8)).sentence
    distances = query_signals(unit(40, 12), WHITE, cone)["nearest_distance"]
    assert new.medians["nearest_distance"][1] == pytest.approx(np.median(distances))


@pytest.mark.parametrize("n, smallest", ((7, 7), (20, 4), (62, 2), (63, 2), (240, 2), (1998, 2), (1999, 1)))
def test_the_smallest_batch_has_enough_subsets(n, smallest):
    "2,000 are needed by default; the farthest queries alert in a batch of one more."
    assert comb(n + smallest, smallest) >= 2000 > comb(n + smallest - 1, smallest - 1)
    assert _smallest_batch(n, 100 / 0.05) == smallest
    far = np.linspace(2, 3, smallest + 1)[:, None]
    assert permutation_test(np.linspace(0, 1, n)[:, None], far, n_permutations=9999)[0] <= 0.05 / 100


def test_default_gallery_is_every_other_row():
    rows = unit(100, 14)
    a, b = Monitor.fit(rows, WHITE), Monitor.fit(rows[1::2], WHITE, rows[::2])
    assert np.array_equal(a.gallery, b.gallery) and a.check(unit(9, 15)) == b.check(unit(9, 15))


@pytest.mark.parametrize("adapter", (WHITE, MLP, AFFINE), ids=("matrix", "module", "affine"))
def test_monitor_is_saved_and_loaded_without_pickle(tmp_path, adapter):
    m = Monitor.fit(unit(100, 16), adapter, gallery, significance=0.1, horizon=7)
    m.check(unit(5, 17))
    m.save(tmp_path / "m")
    again = Monitor.load(tmp_path / "m")
    assert again.check(unit(9, 18)) == m.check(unit(9, 18))
    assert (again.significance, again.horizon, again.k) == (0.1, 7, 10)
    np.load(tmp_path / "m/monitor.npz", allow_pickle=False)
    assert {f.suffix for f in (tmp_path / "m").iterdir()} == {".npz", ".json", ".safetensors"}
    with pytest.raises(InputError, match="fingerprint"):
        Monitor.load(tmp_path / "m", LinearAdapter(D))
    (tmp_path / "m/monitor.npz").write_bytes(b"junk")
    with pytest.raises(InputError):
        Monitor.load(tmp_path / "m")


def test_a_folder_with_other_files_is_refused(tmp_path):
    "As that of an adapter, whose weights have the name of those of a monitor."
    m, estimator = Monitor.fit(unit(50, 7), MLP, gallery), EmbeddingAdapter("wccn", max_unseen_loss=None)
    estimator.fit(unit(40, 1), np.arange(40) // 4).save(tmp_path / "A")
    before = {f.name: f.read_bytes() for f in (tmp_path / "A").iterdir()}
    with pytest.raises(InputError):
        m.save(tmp_path / "A")
    assert before == {f.name: f.read_bytes() for f in (tmp_path / "A").iterdir()}
    other = Monitor.fit(unit(50, 7), WHITE, gallery)
    for monitor in (m, other, m):  # the weights have another name in `other`
        assert Monitor.load(monitor.save(tmp_path / "m")).check(unit(9, 1)) == monitor.check(unit(9, 1))


@pytest.mark.parametrize("columns", ([f"f{i}" for i in range(D)], range(5, 5 + D)), ids=("texts", "integers"))
def test_columns_in_another_order_are_refused(tmp_path, columns):
    def frame(*args):
        return pd.DataFrame(unit(*args), columns=columns)

    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(pd.DataFrame(gallery, columns=columns), y)
    monitor = Monitor.fit(frame(50, 7), e, frame(200, 8))
    loaded = Monitor.load(monitor.save(tmp_path / "m"))
    assert loaded.check(frame(9, 1)) == monitor.check(unit(9, 1))
    moved = [frame(n, 7).iloc[:, ::-1] for n in (50, 200, 9)]
    for call in (
        lambda: Monitor.fit(moved[0], e, frame(200, 8)),
        lambda: Monitor.fit(frame(50, 7), e, moved[1]),
        lambda: monitor.check(moved[2]),
        lambda: loaded.check(moved[2]),
    ):
        with pytest.raises(InputError):
            call()
    assert monitor.batches_checked == loaded.batches_checked == 1


def test_reference_queries_in_the_gallery_are_refused():
    rows = unit(60, 3)
    with pytest.raises(InputError, match="^20 of 60"):
        Monitor.fit(rows, WHITE, np.vstack([cone, 3 * rows[:20]]))
    half = np.vstack([rows, rows[:2]])[[0, 60, *range(1, 60), 61]]  # two rows twice, one of them in both halves
    assert (Monitor.fit(half, WHITE).reference["nearest_distance"] > 1e-3).all()


def test_reference_queries_that_the_adapter_was_fitted_on_are_refused():
    rows = unit(80, 3)
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(rows[:60], np.arange(60) % 5)
    with pytest.raises(InputError, match="^10 of 30"):
        Monitor.fit(rows[50:], adapter, gallery)
    Monitor.fit(rows[60:], adapter, gallery)


@pytest.mark.parametrize("change", [{"k": 300}, {"horizon": 0}, {"significance": 2}, {"signals": ["a", "b", "c"]}])
def test_a_changed_description_is_refused(tmp_path, change):
    path = Monitor.fit(unit(50, 7), WHITE, gallery).save(tmp_path / "m") / "monitor.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError):
        Monitor.load(tmp_path / "m")


@pytest.mark.parametrize(
    "call",
    [
        lambda: Monitor.fit(unit(50, 7), WHITE, gallery, significance=0.0),
        lambda: Monitor.fit(unit(50, 7), WHITE, gallery[:4]),
        lambda: Monitor.fit(np.nan * unit(50, 7), WHITE, gallery),
        lambda: Monitor.fit(unit(1, 7), WHITE, k=1),
        lambda: Monitor.fit(unit(6, 7), WHITE, gallery),  # seven queries are the fewest that can raise an alert
        lambda: Monitor.fit(unit(5, 7).repeat(8, 0), WHITE),
        lambda: Monitor.fit(unit(50, 7), WHITE, gallery).check(unit(5, 1)[:, :4]),
        lambda: Monitor.fit(unit(50, 7), WHITE, gallery).check(unit(1, 1)),
    ],
)
def test_wrong_input_is_refused(call):
    with pytest.raises(InputError):
        call()
