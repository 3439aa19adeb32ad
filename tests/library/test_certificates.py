"Certificates: compared with closed forms, loops over all pairs, and gradient descent that tries to change the order."

import numpy as np
import pytest
import torch
from torch import nn

from ega.data.arrays import InputError
from ega.method import certificates
from ega.method.certificates import (
    certified_queries,
    certified_radius,
    chord_to_angle,
    largest_certified_strength,
    max_query_angle,
)


def unit_float64(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def triples(n, d=6, seed=0):
    "(n, 3, d) unit query, nearer row, farther row."
    v = unit_float64(np.random.default_rng(seed).normal(size=(n, 3, d)))
    swap = np.einsum("td,td->t", v[:, 0], v[:, 1]) < np.einsum("td,td->t", v[:, 0], v[:, 2])
    v[swap] = v[swap][:, [0, 2, 1]]
    return v


def cosines(v):
    return [np.einsum("td,td->t", v[:, a], v[:, b]) for a, b in ((0, 1), (0, 2), (1, 2))]


def minimize_gap(v, turns, steps=400, rate=0.02):
    "Smallest cos(q', j') - cos(q', i') that projected gradient descent reaches, each vector within its angle."
    start = torch.tensor(v)
    at = start.clone()
    turns = torch.as_tensor(turns, dtype=start.dtype)
    lowest = torch.full((len(v),), np.inf, dtype=start.dtype)
    for t in range(steps):
        at = at.detach().requires_grad_()
        gap = (at[:, 0] * at[:, 1]).sum(1) - (at[:, 0] * at[:, 2]).sum(1)
        lowest = torch.minimum(lowest, gap.detach())
        (g,) = torch.autograd.grad(gap.sum(), at)
        at = nn.functional.normalize(at - rate * (1 - t / steps) * g, dim=-1)
        c = (at * start).sum(-1, keepdim=True).clamp(-1, 1)
        side = nn.functional.normalize(at - c * start, dim=-1)
        limit = torch.cos(turns)[..., None] * start + torch.sin(turns)[..., None] * side
        at = torch.where(torch.acos(c) > turns[..., None], limit, at)
    return lowest.numpy()


def test_gradient_descent_changes_the_order_just_above_the_maximal_angle_only():
    v = triples(300)
    give = np.random.default_rng(1).uniform(0, 0.1, (300, 2))
    r = max_query_angle(*cosines(v), give.sum(1))
    keep = (r > 0.03) & (r < 1)
    v, give, r = v[keep], give[keep], r[keep]
    assert len(v) > 100
    assert (minimize_gap(v, np.column_stack([r * 0.995, give])) > 0).all()
    changed = minimize_gap(v, np.column_stack([r * 1.005 + 2e-4, give])) < 0
    assert changed.mean() > 0.98  # the descent may stop early on a few


def test_max_query_angle_is_at_least_that_of_the_triangle_inequality():
    v = triples(50)
    assert max_query_angle(0.2, 0.5, 0.1, 0.0) == 0  # wrong order
    assert max_query_angle(0.5, 0.2, 0.9, 1.0) == 0  # rows that can meet
    near, far, pair = cosines(v)
    triangle = (np.arccos(far) - np.arccos(near) - 0.05) / 2
    exact, stopped_early = max_query_angle(near, far, pair, 0.05), max_query_angle(near, far, pair, 0.05, steps=3)
    assert (exact >= triangle - 1e-9).all() and (stopped_early <= exact + 1e-12).all()  # smaller, hence still valid


def gallery(n=80, nq=25, d=5, seed=3):
    rng = np.random.default_rng(seed)
    return unit_float64(rng.normal(size=(nq, d))), unit_float64(rng.normal(size=(n, d))), rng


@pytest.mark.parametrize("k", [1, 3])
def test_certified_queries_equal_a_loop_over_all_pairs(k, monkeypatch):
    monkeypatch.setattr(certificates, "_QUERIES_AT_ONCE", 7)
    xq, xb, rng = gallery(n=24)
    eq, eb = rng.uniform(0, 0.03, len(xq)), rng.uniform(0, 0.03, len(xb))
    safe, turn, give = certified_queries(xq, xb, eq, eb, k=k), chord_to_angle(eq), chord_to_angle(eb)
    for q in range(len(xq)):
        order = np.argsort(-(xq[q] @ xb.T))
        pairs = [(i, o) for i in order[:k] for o in order[k:]]
        angles = [max_query_angle(xq[q] @ xb[i], xq[q] @ xb[o], xb[i] @ xb[o], give[i] + give[o]) for i, o in pairs]
        assert safe[q] == (min(angles) > turn[q])
    assert 0 < safe.mean() < 1


def test_gradient_descent_changes_only_uncertified_queries():
    xq, xb, _ = gallery(n=60)
    e = 0.05
    safe, turn = certified_queries(xq, xb, e, e), float(chord_to_angle(e))
    for q in range(len(xq)):
        order = np.argsort(-(xq[q] @ xb.T))
        v = np.stack([[xq[q], xb[order[0]], xb[o]] for o in order[1:20]])
        gap = minimize_gap(v, np.full((19, 3), turn), steps=250)
        assert (gap > 0).all() if safe[q] else gap.min() < 2e-4


@pytest.mark.parametrize("k", [1, 4])
def test_certified_radius_is_the_largest_certified_displacement(k):
    xq, xb, _ = gallery()
    r = certified_radius(xq, xb, k=k)
    for e in (0.005, 0.02, 0.05):
        assert (certified_queries(xq, xb, e, e, k=k) == (r > e)).all()


def test_excluded_rows_and_ties():
    _, xb, _ = gallery()
    alone = [certified_radius(xb[[i]], np.delete(xb, i, 0))[0] for i in range(10)]
    assert np.allclose(certified_radius(xb, xb, exclude=np.arange(len(xb)))[:10], alone)
    tie = np.concatenate([xb[:1], xb[:1]])
    assert certified_radius(xb[[5]], tie)[0] < 1e-7 and not certified_queries(xb[[5]], tie, 1e-6, 0.0)[0]


@pytest.mark.parametrize("displacement", [-1.0, 2.5, np.nan])
def test_displacements_of_no_unit_rows_are_refused(displacement):
    with pytest.raises(InputError):
        certified_queries(np.eye(3), np.eye(3), displacement, 0.0)


def test_largest_certified_strength_keeps_the_share():
    _, x, rng = gallery(d=9)
    z = unit_float64(x + 0.2 * rng.normal(size=x.shape))
    strength, share = largest_certified_strength(x, z, 0.6)
    assert 0.6 <= share < 1 and 0 < strength < 1 and largest_certified_strength(x, x, 0.9) == (1.0, 1.0)
