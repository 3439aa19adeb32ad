"Triplet samplers against counting, the active ratio against its definition."

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from ega.method.active_ratio import (
    active_ratio,
    draw_for_dataset_triplets,
    index_rows_by_class,
    random_batch_triplets,
    random_dataset_triplets,
    sample_batch_triplets,
    sample_dataset_triplets,
)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(5))
def test_class_index_against_search(seed):
    y = torch.from_numpy(np.random.default_rng(seed).integers(0, 9, 200) * 3)
    i = index_rows_by_class(y)
    for c, label in enumerate(torch.unique(y)):
        rows = i.order[i.start[c] : i.start[c] + i.count[c]]
        assert torch.equal(rows, torch.nonzero(y == label)[:, 0])
        assert torch.equal(i.rank_in_class[rows], torch.arange(len(rows))) and (i.class_id[rows] == c).all()


@pytest.mark.parametrize("from_dataset", [True, False])
def test_triplets_have_a_positive_and_a_negative(from_dataset):
    y = torch.from_numpy(np.random.default_rng(0).integers(0, 40, 256))
    index, g = index_rows_by_class(y), gen()
    for _ in range(50):
        if from_dataset:
            t = random_dataset_triplets(index, torch.arange(256), gen=g)
        else:
            t = random_batch_triplets(y, gen=g)
        assert (t.a != t.p).all() and (y[t.a] == y[t.p]).all() and (y[t.a] != y[t.n]).all()


def test_anchors_without_positive_or_negative_are_left_out():
    y = torch.tensor([0, 0, 1, 2, 2, 2])
    assert 2 not in random_dataset_triplets(index_rows_by_class(y), torch.arange(6), gen=gen()).a
    assert 2 not in random_batch_triplets(y, gen=gen()).a
    assert len(random_batch_triplets(torch.zeros(4).long(), gen=gen()).a) == 0  # one class: no negative
    assert len(random_batch_triplets(torch.arange(4), gen=gen()).a) == 0  # all distinct: no positive


def test_batch_numbers_reach_every_allowed_row_equally_often():
    "Numbers on an even grid: each anchor gets each of its positives, and each of its negatives, equally often."
    y = torch.tensor([5, 2, 5, 0, 2, 5, 9])
    grid = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    drawn = [sample_batch_triplets(y, u.expand(2, len(y))) for u in grid]
    for anchor in range(len(y)):
        positives = [j for j in range(len(y)) if j != anchor and y[j] == y[anchor]]
        negatives = [j for j in range(len(y)) if y[j] != y[anchor]]
        assert all(bool(valid[anchor]) == bool(positives) for _, valid in drawn)
        for part, allowed in (("p", positives), ("n", negatives)):
            if positives:
                count = np.bincount([int(getattr(t, part)[anchor]) for t, _ in drawn], minlength=len(y))
                assert count.tolist() == [60 // len(allowed) * (j in allowed) for j in range(len(y))]


def test_self_positive_lets_an_anchor_be_its_own_positive():
    "The positive is uniform over the class, the anchor included; a row alone in its class is then its own positive."
    y = torch.tensor([0] * 4 + [1] * 10 + [2])
    index, g, own = index_rows_by_class(y), gen(), torch.zeros(20_000, dtype=torch.long)
    t, valid = sample_dataset_triplets(index, own, draw_for_dataset_triplets(len(own), g), self_positive=True)
    share = torch.bincount(t.p, minlength=15).double()[:4] / len(own)
    assert valid.all() and (abs(share - 0.25) < 4 * (0.25 * 0.75 / len(own)) ** 0.5).all() and (y[t.n] != 0).all()
    lone = torch.tensor([14])
    for allowed in (False, True):
        t, valid = sample_dataset_triplets(index, lone, draw_for_dataset_triplets(1, g), self_positive=allowed)
        assert bool(valid) == allowed and (not allowed or t.p == lone)


def test_active_ratio_counts_positive_hinges_and_is_nan_without_any():
    r = active_ratio(torch.tensor([-0.1, 0.0, 1e-9, 0.3]))
    assert r.rho == 0.5 and r.n == 4 and r.low < 0.5 < r.high
    assert np.isnan(active_ratio(torch.empty(0)).rho)


def test_wilson_interval_equals_scipy():
    for active, n in ((7, 200), (0, 50), (50, 50)):
        ci = binomtest(active, n).proportion_ci(method="wilson")
        r = active_ratio(torch.tensor([1.0] * active + [-1.0] * (n - active)), z_score=1.959963984540054)
        assert np.allclose((r.low, r.high), ci, atol=1e-9)
