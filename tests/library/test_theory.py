"""Bounds that a constructed case attains exactly, so that a missing factor breaks them; certificates against adversaries."""

import numpy as np
import pytest
import torch
from torch import nn

from ega.adapters import BoundedAdapter, LinearAdapter, ReleasedEGA, transform
from ega.arrays import InputError, normalize, spawn_rngs, torch_generator
from ega.certificates import (
    angle_to_chord,
    certified_queries,
    certified_radius,
    chord_to_angle,
    largest_certified_strength,
    max_query_angle,
    unit_float64,
)
from ega.losses import supcon, triplet_violations
from ega.metrics import displacement
from ega.sparsity import Triplets, class_index, sample_dataset_triplets
from ega.testing import error_message
from ega.theory import (
    TrajectoryRecorder,
    adapter_parameters,
    drift_bounds,
    effective_rank,
    gradient_subspace,
    jacobian,
    jacobian_frobenius,
    jacobian_spectral_norms,
    jvp,
    sgd,
    subspace_energy,
    triplet_gradient_norms,
    triplet_gradients,
)
from ega.training import LossOutput, Objective, TrainConfig, dataset_triplet_objective, pairwise_objective, train


def block(d=6, hidden=5, seed=0):
    "A small block away from the identity, and unit rows; float64."
    gen = torch_generator(spawn_rngs(seed).init)
    adapter = ReleasedEGA(d, hidden=hidden, gen=gen).double().eval()
    with torch.no_grad():
        [p.add_(0.3 * torch.randn(p.shape, generator=gen, dtype=p.dtype)) for p in adapter.parameters()]
    return adapter, nn.functional.normalize(torch.randn(9, d, generator=gen, dtype=torch.float64), dim=1)


# Jacobians


def differences(adapter, x, h=1e-6):
    "The dense Jacobian by central differences, one weight at a time."
    columns = []
    for p in adapter.parameters():
        for i in range(p.numel()):
            with torch.no_grad():
                flat = p.view(-1)
                was = flat[i].clone()
                flat[i] = was + h
                up = adapter(x)
                flat[i] = was - h
                down = adapter(x)
                flat[i] = was
            columns.append((up - down) / (2 * h))
    return torch.stack(columns, 2)


def test_jacobian_and_pushes_are_the_differences():
    adapter, x = block()
    J = jacobian(adapter, x)
    assert torch.allclose(J, differences(adapter, x), atol=1e-8)
    v = {k: torch.full_like(p, 0.1).cumsum(0) for k, p in adapter_parameters(adapter).items()}
    assert torch.allclose(jvp(adapter, x, v), J @ torch.cat([t.flatten() for t in v.values()]), atol=1e-11)


def test_a_training_adapter_is_looked_at_and_left_as_it_is():
    adapter, x = block()
    before = jacobian(adapter, x)
    assert torch.equal(jacobian(adapter.train(), x), before) and adapter.training


def test_spectral_norm_comes_from_below_and_arrives():
    adapter, x = block()
    exact = torch.linalg.matrix_norm(jacobian(adapter, x), 2)
    for steps in (1, 3, 10):
        assert (
            jacobian_spectral_norms(adapter, x, gen=torch.Generator().manual_seed(2), steps=steps)[0]
            <= exact * (1 + 1e-12)
        ).all()
    found, u = jacobian_spectral_norms(adapter, x, gen=torch.Generator().manual_seed(2), steps=400, tol=1e-13)
    assert torch.allclose(found, exact, rtol=1e-5)
    again, _ = jacobian_spectral_norms(adapter, x, first=u, steps=1)
    assert torch.allclose(again, exact, rtol=1e-5)


def test_frobenius_exact_and_probed():
    adapter, x = block()
    exact = (jacobian(adapter, x) ** 2).sum((1, 2))
    assert torch.allclose(jacobian_frobenius(adapter, x)[0], exact)
    runs, claimed = map(
        torch.stack,
        zip(
            *(
                jacobian_frobenius(adapter, x, gen=torch.Generator().manual_seed(s), probes=4, chunk=9)
                for s in range(24)
            )
        ),
    )
    assert ((runs.mean(0) - exact).abs() < 4 * runs.std(0) / 24**0.5).all()  # unbiased
    assert (
        (claimed**2).mean(0).sqrt() / runs.std(0)
    ).log().abs().max() < 0.6  # and its error is what it says, within the noise of 24 runs


def test_gradients_of_triplets_one_by_one():
    adapter, x = block()
    a, p, n = x[[0, 1, 2, 3, 4]], x[[5, 6, 7, 8, 0]], x[[1, 2, 3, 4, 5]]
    rows = triplet_gradients(adapter, a, p, n, 0.2, chunk=2)
    for i in range(5):
        loss = triplet_violations(adapter(a[[i]]), adapter(p[[i]]), adapter(n[[i]]), 0.2).clamp(min=0).sum()
        by_hand = torch.cat([g.flatten() for g in torch.autograd.grad(loss, adapter.parameters())])
        assert torch.allclose(rows[i], by_hand, atol=1e-12)
    assert (
        torch.allclose(triplet_gradient_norms(adapter, a, p, n, 0.2, chunk=2), rows.norm(dim=1))
        and (rows.norm(dim=1) == 0).any()
        and (rows.norm(dim=1) > 0).any()
    )
    assert (triplet_gradient_norms(adapter, a, p, n, -5.0) == 0).all()


def test_span_is_the_projector():
    adapter, x = block()
    J, rows = jacobian(adapter, x), triplet_gradients(adapter, x[:4], x[4:8], x[[1, 2, 3, 0]], 2.0)
    rows = torch.cat([rows, rows[:2] + rows[2:]])  # dependent rows add nothing
    span, P = gradient_subspace(rows), torch.linalg.pinv(rows[:4]) @ rows[:4]
    assert len(span.basis) == 4 and torch.allclose(
        span.basis @ span.basis.T, torch.eye(4, dtype=torch.float64), atol=1e-10
    )
    assert torch.allclose(span.basis.T @ span.basis, P, atol=1e-8)
    assert torch.allclose(subspace_energy(adapter, x, span.basis).sum(1), ((J @ P) ** 2).sum((1, 2)))
    assert torch.allclose(span.singular, torch.linalg.svdvals(rows), atol=1e-7)
    assert "no triplet is open" in error_message(lambda: gradient_subspace(torch.zeros(3, 7)))


# The ladder on a case that attains every rung


class Slide(nn.Module):
    "f(x) = (x_0 + theta x_1, 0): linear in its one weight, and J(x) = x_1."

    def __init__(self):
        super().__init__()
        self.d, self.theta = 2, nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return torch.stack([x[..., 0] + self.theta * x[..., 1], torch.zeros_like(x[..., 0])], -1)


ROWS = torch.tensor(
    [[0.0, 0.0], [90.0, 1.0], [1.0, 0.0], [1000.0, 0.0]], dtype=torch.float64
)  # anchor, positive, a near and a far negative
OPEN = Triplets(
    *torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [2, 3, 3, 3]])
)  # one of four is open, with a gradient of exactly 1
PROBES = torch.tensor([[7.0, 3.0], [7.0, 1.0]], dtype=torch.float64)


def slid(optimizer, eta=0.5, steps=6):
    "The walk of the slide, one open triplet in four at every step."

    def place(y, rows, u):
        return OPEN, torch.ones(4, dtype=torch.bool)

    def step(forward, x, y, rows, u):
        z = forward(torch.arange(4))
        terms = triplet_violations(*(z[part] for part in OPEN), 0.2)
        return LossOutput(terms.relu().mean(), (terms.detach() > 0).double().mean(), z)

    adapter, recorder = (
        Slide(),
        TrajectoryRecorder(Objective(step), PROBES, gen=torch.Generator().manual_seed(0), place=place, margin=0.2),
    )
    if optimizer == "sgd":
        sgd(adapter, recorder, ROWS, torch.tensor([0, 0, 1, 2]), streams=spawn_rngs(0), lr=eta, steps=steps)
    else:
        engine = torch.optim.AdamW(adapter.parameters(), lr=eta, weight_decay=0.0)
        for _ in range(steps):
            loss = recorder(adapter, ROWS, None, torch.arange(4), torch.Generator()).loss
            engine.zero_grad()
            loss.backward()
            engine.step()
    return recorder.walk(adapter)


def test_every_rung_is_attained():
    walk = slid("sgd")
    rungs = np.stack(drift_bounds(walk, 0.5))  # (7, 2)
    assert (
        np.allclose(walk.rho, 0.25) and np.allclose(walk.largest, 1, atol=1e-5) and np.allclose(walk.norm, [[3, 1]] * 6)
    )
    assert np.allclose(rungs[:, 0], 0.5 * 3 * 1 * 0.25 * 6, rtol=1e-5)  # eta L G sum rho, and the drift itself
    assert np.allclose(rungs[:-1, 1], 0.5 * 1 * 1 * 0.25 * 6, rtol=1e-5) and np.allclose(rungs[-1, 1], rungs[-1, 0])


def test_under_adamw_the_gradient_bounds_nothing():
    rungs = drift_bounds(slid("adamw"), 0.5)
    assert (rungs.gradient < 0.3 * rungs.drift).all() and (rungs.sparse < rungs.drift).any()  # the violated bound
    assert np.allclose(rungs.drift, rungs.steps, rtol=1e-5)  # the one that holds is attained here


def spheres(seed=0, d=12):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(6, d)) / d**0.5
    x = np.repeat(means, 15, 0) + 0.3 * rng.normal(size=(90, d)) / d**0.5
    return torch.tensor(x / np.linalg.norm(x, axis=1, keepdims=True)), torch.arange(6).repeat_interleave(15)


@pytest.mark.parametrize("loss, lr", [("triplet", 0.3), ("dense", 0.02)])
def test_the_ladder_is_climbed(loss, lr):
    x, y = spheres()
    seen, index = y < 4, class_index(y[y < 4])

    def place(y, rows, u):
        return sample_dataset_triplets(index, rows, u)

    adapter = ReleasedEGA(12, hidden=8, gen=torch_generator(spawn_rngs(0).init)).double()
    recorder = TrajectoryRecorder(
        dataset_triplet_objective(0.2, index) if loss == "triplet" else pairwise_objective(supcon),
        x[~seen][::3],
        gen=torch.Generator().manual_seed(0),
        place=place if loss == "triplet" else None,
        margin=0.2,
        tol=1e-4,
    )
    walk = recorder.walk(sgd(adapter, recorder, x[seen], y[seen], streams=spawn_rngs(0), lr=lr, steps=6, batch=64))
    rungs = drift_bounds(walk, lr)
    for low, high in zip(rungs[:-1], rungs[1:]):
        assert (low <= high * (1 + 1e-9)).all()
    assert np.allclose(rungs.steps, rungs.gradient) and (rungs.drift > 1e-3).all()


def test_the_remainder_of_a_step_is_of_second_order():
    x, y = spheres()

    def one(lr):
        adapter = LinearAdapter(12).double()
        recorder = TrajectoryRecorder(pairwise_objective(supcon), x[60:], gen=torch.Generator().manual_seed(0))
        return recorder.walk(
            sgd(adapter, recorder, x[:60], y[:60], streams=spawn_rngs(0), lr=lr, steps=1)
        ).remainder.sum()

    assert 3.9 < one(2e-3) / one(1e-3) < 4.1


def test_a_recorder_changes_no_bit_of_a_training():
    x, y = (v.float().numpy() if v.is_floating_point() else v.numpy() for v in spheres())
    index, config = class_index(torch.tensor(y)), TrainConfig(epochs=3, batch_size=32, lr=1e-3)
    plain, watched = (ReleasedEGA(12, hidden=8, gen=torch_generator(spawn_rngs(0).init)) for _ in range(2))
    inner = dataset_triplet_objective(0.2, index)
    recorder = TrajectoryRecorder(
        inner,
        torch.tensor(x[:5]),
        gen=torch.Generator().manual_seed(0),
        place=lambda y, rows, u: sample_dataset_triplets(index, rows, u),
        margin=0.2,
        every=4,
    )
    a = train(plain, inner, x, y, streams=spawn_rngs(1), config=config, device="cpu")
    b = train(watched, recorder, x, y, streams=spawn_rngs(1), config=config, device="cpu")
    walk = recorder.walk(watched)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), watched.parameters()))
    assert (
        np.allclose(walk.rho, a.rho)
        and np.allclose(walk.loss, b.loss)
        and len(walk.step) == 9
        and walk.theta <= walk.step.sum()
    )
    assert np.allclose(walk.drift, displacement(transform(watched, x[:5], device="cpu"), x[:5]), atol=1e-6)
    assert "nothing was recorded" in error_message(
        lambda: TrajectoryRecorder(inner, torch.tensor(x[:5]), gen=torch.Generator()).walk(plain)
    )


def test_effective_rank():
    assert np.isclose(effective_rank([2, 2, 0]), 2) and effective_rank([3]) == 1 and 1 < effective_rank([1, 0.1]) < 2
    for bad in ([-1, 2], [0, 0], [[1.0]]):
        assert "singular values" in error_message(lambda: effective_rank(bad))


# Certificates


def triples(n, d=6, seed=0):
    "(n, 3, d) unit query, nearer row, farther row."
    v = unit_float64(normalize(np.random.default_rng(seed).normal(size=(3 * n, d)))).reshape(n, 3, d)
    swap = np.einsum("td,td->t", v[:, 0], v[:, 1]) < np.einsum("td,td->t", v[:, 0], v[:, 2])
    v[swap] = v[swap][:, [0, 2, 1]]
    return v


def cosines(v):
    return [np.einsum("td,td->t", v[:, a], v[:, b]) for a, b in ((0, 1), (0, 2), (1, 2))]


def pressed(v, turns, steps=400, rate=0.02):
    "Smallest cos(q', j') - cos(q', i') an adversary reaches by projected gradient descent, each vector inside its cap."
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
        at = torch.where(
            torch.acos(c) > turns[..., None],
            torch.cos(turns)[..., None] * start + torch.sin(turns)[..., None] * side,
            at,
        )
    return lowest.numpy()


def test_no_adversary_beats_the_reach_and_a_hair_more_is_enough():
    v = triples(300)
    give = np.random.default_rng(1).uniform(0, 0.1, (300, 2))
    r = max_query_angle(*cosines(v), give.sum(1))
    keep = (r > 0.03) & (r < 1)
    v, give, r = v[keep], give[keep], r[keep]
    assert len(v) > 100
    assert (pressed(v, np.column_stack([r * 0.995, give])) > 0).all()
    assert (
        pressed(v, np.column_stack([r * 1.005 + 2e-4, give])) < 0
    ).mean() > 0.98  # the descent itself may stall on a few


def test_reach_in_closed_cases():
    v = triples(50)
    j_i = v[:, 1] - v[:, 2]
    assert np.allclose(
        np.sin(max_query_angle(*cosines(v), 0.0)), np.einsum("td,td->t", v[:, 0], j_i) / np.linalg.norm(j_i, axis=1)
    )
    assert np.allclose(
        max_query_angle(np.cos(0.5), np.cos(0.9), np.cos(1.4), 0.1), 0.15, atol=1e-7
    )  # between the two rows: the triangle inequality
    assert (
        max_query_angle(0.2, 0.5, 0.1, 0.0) == 0 and max_query_angle(0.5, 0.2, 0.9, 1.0) == 0
    )  # wrong order; rows that can meet
    near, far, pair = cosines(v)
    triangle = (np.arccos(far) - np.arccos(near) - 0.05) / 2
    assert (max_query_angle(near, far, pair, 0.05) >= triangle - 1e-9).all()
    assert (
        max_query_angle(near, far, pair, 0.05, steps=3) <= max_query_angle(near, far, pair, 0.05) + 1e-12
    ).all()  # stopped early: smaller, so safe


def gallery(n=80, nq=25, d=5, seed=3):
    rng = np.random.default_rng(seed)
    return unit_float64(normalize(rng.normal(size=(nq, d)))), unit_float64(normalize(rng.normal(size=(n, d)))), rng


@pytest.mark.parametrize("k", [1, 3])
def test_certified_is_all_pairs(k):
    xq, xb, rng = gallery(n=40)
    eq, eb = rng.uniform(0, 0.03, len(xq)), rng.uniform(0, 0.03, len(xb))
    safe, turn, give = certified_queries(xq, xb, eq, eb, k=k, block=7), chord_to_angle(eq), chord_to_angle(eb)
    for q in range(len(xq)):
        order = np.argsort(-(xq[q] @ xb.T))
        pairs = [(i, o) for i in order[:k] for o in order[k:]]
        by_hand = all(
            max_query_angle(xq[q] @ xb[i], xq[q] @ xb[o], xb[i] @ xb[o], give[i] + give[o]) > turn[q] for i, o in pairs
        )
        assert safe[q] == by_hand
    assert 0 < safe.mean() < 1


def test_no_movement_changes_a_certified_answer_and_some_movement_changes_the_others():
    xq, xb, _ = gallery(n=60)
    e = 0.05
    safe, turn = certified_queries(xq, xb, e, e), float(chord_to_angle(e))
    for q in range(len(xq)):
        order = np.argsort(-(xq[q] @ xb.T))
        v = np.stack([[xq[q], xb[order[0]], xb[o]] for o in order[1:20]])
        gap = pressed(v, np.full((19, 3), turn), steps=250)
        if safe[q]:
            assert (gap > 0).all()
        else:
            assert gap.min() < 2e-4


@pytest.mark.parametrize("k", [1, 4])
def test_radius_is_where_the_certificate_ends(k):
    xq, xb, _ = gallery()
    r = certified_radius(xq, xb, k=k, block=6)
    for e in (0.005, 0.02, 0.05):
        assert (certified_queries(xq, xb, e, e, k=k) == (r > e)).all()


def test_a_row_does_not_answer_itself():
    _, xb, _ = gallery()
    own = np.arange(len(xb))
    r, alone = certified_radius(xb, xb, own=own), [certified_radius(xb[[i]], np.delete(xb, i, 0))[0] for i in range(10)]
    assert np.allclose(r[:10], alone)
    twins = np.concatenate([xb, xb[:1]])
    assert certified_radius(twins[[5]], twins[[0, -1]])[0] < 1e-7  # a tie is never certified
    assert not certified_queries(twins[[5]], twins[[0, -1]], 1e-6, 0.0)[0]
    assert "must lie in" in error_message(lambda: certified_radius(xb, xb[:1])) and "[0, 2]" in error_message(
        lambda: certified_queries(xb, xb, -1.0, 0.0)
    )
    assert np.allclose(angle_to_chord(chord_to_angle([0.0, 0.7, 2.0])), [0, 0.7, 2])


def test_largest_alpha_keeps_the_share():
    _, x, rng = gallery(d=9)
    z = unit_float64(normalize(x + 0.2 * rng.normal(size=x.shape)))
    strength, share = largest_certified_strength(x, z, 0.6)
    assert 0.6 <= share < 1 and 0 < strength < 1 and largest_certified_strength(x, x, 0.9) == (1.0, 1.0)
    assert "share" in error_message(lambda: largest_certified_strength(x, z, 0.0))


# The cap


@pytest.mark.parametrize("eps", [0.05, 0.5, 1.7])
def test_no_adversary_passes_the_cap(eps):
    "Gradient ascent on the displacement over the weights and over the input, from wild weights."
    gen = torch_generator(spawn_rngs(5).init)
    adapter = BoundedAdapter(ReleasedEGA(6, hidden=8, gen=gen), eps).double()
    with torch.no_grad():
        [p.add_(torch.randn(p.shape, generator=gen, dtype=p.dtype)) for p in adapter.parameters()]
    x = nn.functional.normalize(torch.randn(64, 6, generator=gen, dtype=torch.float64), dim=1)
    engine, worst = torch.optim.Adam(adapter.parameters(), lr=0.05), 0.0
    for _ in range(60):
        x = x.detach().requires_grad_()
        moved = (adapter(x) - x).norm(dim=1)
        worst = max(worst, moved.max().item())
        engine.zero_grad()
        (-moved.mean()).backward()
        engine.step()
        x = nn.functional.normalize(x.detach() + 0.3 * x.grad * -64, dim=1)
    assert 0.85 * eps < worst <= eps + 1e-7  # reached, never passed; eps itself is stored in float32
    assert torch.allclose(adapter(x).norm(dim=1), torch.ones(64, dtype=torch.float64))


def test_a_cap_far_away_changes_nothing_and_any_cap_starts_as_the_identity():
    gen = torch_generator(spawn_rngs(6).init)
    inner = ReleasedEGA(6, hidden=8, gen=gen)
    x = nn.functional.normalize(torch.randn(20, 6, generator=gen), dim=1)
    assert (BoundedAdapter(inner, 0.1)(x) - x).abs().max() < 1e-6
    with torch.no_grad():
        inner.branch[3].weight.add_(0.002 * torch.randn(6, 8, generator=gen))
    assert (
        torch.allclose(BoundedAdapter(inner, 1.9)(x), inner(x), atol=1e-4) and (inner(x) - x).norm(dim=1).max() > 1e-3
    )
    z = transform(BoundedAdapter(inner, 0.1), x, device="cpu")
    assert displacement(z, x.numpy()).max() <= 0.1 + 1e-6
    for bad in (0, 2.1, float("nan")):
        assert "(0, 2)" in error_message(lambda: BoundedAdapter(inner, bad), InputError)


def test_a_cap_can_be_trained():
    x, y = (v.float().numpy() if v.is_floating_point() else v.numpy() for v in spheres())
    adapter = BoundedAdapter(ReleasedEGA(12, hidden=16, gen=torch_generator(spawn_rngs(0).init)), 0.4)
    history = train(
        adapter,
        pairwise_objective(supcon),
        x,
        y,
        streams=spawn_rngs(0),
        config=TrainConfig(epochs=20, batch_size=45, lr=1e-2),
        device="cpu",
    )
    moved = displacement(transform(adapter, x, device="cpu"), x)
    assert history.loss[-1] < history.loss[0] - 0.05 and 0.2 < moved.mean() and moved.max() <= 0.4 + 1e-6
