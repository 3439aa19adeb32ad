"""Bounds that a constructed case attains exactly, so that a missing factor breaks them; certificates against adversaries."""
import numpy as np
import pytest
import torch
from torch import nn

from ega.adapters import Capped, EGABlock, Linear, transform
from ega.certificates import certified, chord_of, largest_alpha, normal, radius, reach, turn_of
from ega.core import InputError, message, normalize, streams, torch_generator
from ega.losses import supcon, triplet_terms
from ega.metrics import displacement
from ega.sparsity import Triplets, class_index, place_whole_set
from ega.theory import (Recorder, descend, effective_rank, frobenius, gradient_norms, gradient_rows, jacobian, ladder, push, pushed_mass,
                        span_of, spectral_norms, weights_of)
from ega.training import Objective, Step, TrainConfig, dense, train, whole_set


def block(d=6, hidden=5, seed=0):
    "A small block away from the identity, and unit rows; float64."
    gen = torch_generator(streams(seed).init)
    adapter = EGABlock(d, hidden=hidden, gen=gen).double().eval()
    with torch.no_grad(): [p.add_(.3*torch.randn(p.shape, generator=gen, dtype=p.dtype)) for p in adapter.parameters()]
    return adapter, nn.functional.normalize(torch.randn(9, d, generator=gen, dtype=torch.float64), dim=1)


# Jacobians

def differences(adapter, x, h=1e-6):
    "The dense Jacobian by central differences, one weight at a time."
    columns = []
    for p in adapter.parameters():
        for i in range(p.numel()):
            with torch.no_grad():
                flat = p.view(-1); was = flat[i].clone()
                flat[i] = was + h; up = adapter(x); flat[i] = was - h; down = adapter(x); flat[i] = was
            columns.append((up - down)/(2*h))
    return torch.stack(columns, 2)


def test_jacobian_and_pushes_are_the_differences():
    adapter, x = block()
    J = jacobian(adapter, x)
    assert torch.allclose(J, differences(adapter, x), atol=1e-8)
    v = {k: torch.full_like(p, .1).cumsum(0) for k, p in weights_of(adapter).items()}
    assert torch.allclose(push(adapter, x, v), J @ torch.cat([t.flatten() for t in v.values()]), atol=1e-11)


def test_a_training_adapter_is_looked_at_and_left_as_it_is():
    adapter, x = block()
    before = jacobian(adapter, x)
    assert torch.equal(jacobian(adapter.train(), x), before) and adapter.training


def test_spectral_norm_comes_from_below_and_arrives():
    adapter, x = block()
    exact = torch.linalg.matrix_norm(jacobian(adapter, x), 2)
    for steps in (1, 3, 10): assert (spectral_norms(adapter, x, gen=torch.Generator().manual_seed(2), steps=steps)[0] <= exact*(1 + 1e-12)).all()
    found, u = spectral_norms(adapter, x, gen=torch.Generator().manual_seed(2), steps=400, tol=1e-13)
    assert torch.allclose(found, exact, rtol=1e-5)
    again, _ = spectral_norms(adapter, x, first=u, steps=1)
    assert torch.allclose(again, exact, rtol=1e-5)


def test_frobenius_exact_and_probed():
    adapter, x = block()
    exact = (jacobian(adapter, x)**2).sum((1, 2))
    assert torch.allclose(frobenius(adapter, x)[0], exact)
    runs, claimed = map(torch.stack, zip(*(frobenius(adapter, x, gen=torch.Generator().manual_seed(s), probes=4, chunk=9) for s in range(24))))
    assert ((runs.mean(0) - exact).abs() < 4*runs.std(0)/24**.5).all()                     # unbiased
    assert ((claimed**2).mean(0).sqrt()/runs.std(0)).log().abs().max() < .6               # and its error is what it says, within the noise of 24 runs


def test_gradients_of_triplets_one_by_one():
    adapter, x = block()
    a, p, n = x[[0, 1, 2, 3, 4]], x[[5, 6, 7, 8, 0]], x[[1, 2, 3, 4, 5]]
    rows = gradient_rows(adapter, a, p, n, .2, chunk=2)
    for i in range(5):
        loss = triplet_terms(adapter(a[[i]]), adapter(p[[i]]), adapter(n[[i]]), .2).clamp(min=0).sum()
        by_hand = torch.cat([g.flatten() for g in torch.autograd.grad(loss, adapter.parameters())])
        assert torch.allclose(rows[i], by_hand, atol=1e-12)
    assert torch.allclose(gradient_norms(adapter, a, p, n, .2, chunk=2), rows.norm(dim=1)) and (rows.norm(dim=1) == 0).any() and (rows.norm(dim=1) > 0).any()
    assert (gradient_norms(adapter, a, p, n, -5.) == 0).all()


def test_span_is_the_projector():
    adapter, x = block()
    J, rows = jacobian(adapter, x), gradient_rows(adapter, x[:4], x[4:8], x[[1, 2, 3, 0]], 2.)
    rows = torch.cat([rows, rows[:2] + rows[2:]])                                           # dependent rows add nothing
    span, P = span_of(rows), torch.linalg.pinv(rows[:4]) @ rows[:4]
    assert len(span.basis) == 4 and torch.allclose(span.basis @ span.basis.T, torch.eye(4, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(span.basis.T @ span.basis, P, atol=1e-8)
    assert torch.allclose(pushed_mass(adapter, x, span.basis).sum(1), ((J @ P)**2).sum((1, 2)))
    assert torch.allclose(span.singular, torch.linalg.svdvals(rows), atol=1e-7)
    assert "no triplet is open" in message(lambda: span_of(torch.zeros(3, 7)))


# The ladder on a case that attains every rung

class Slide(nn.Module):
    "f(x) = (x_0 + theta x_1, 0): linear in its one weight, and J(x) = x_1."
    def __init__(self):
        super().__init__()
        self.d, self.theta = 2, nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x): return torch.stack([x[..., 0] + self.theta*x[..., 1], torch.zeros_like(x[..., 0])], -1)


ROWS = torch.tensor([[0., 0.], [90., 1.], [1., 0.], [1000., 0.]], dtype=torch.float64)    # anchor, positive, a near and a far negative
OPEN = Triplets(*torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [2, 3, 3, 3]]))               # one of four is open, with a gradient of exactly 1
PROBES = torch.tensor([[7., 3.], [7., 1.]], dtype=torch.float64)


def slid(optimizer, eta=.5, steps=6):
    "The walk of the slide, one open triplet in four at every step."
    def place(y, rows, u): return OPEN, torch.ones(4, dtype=torch.bool)
    def step(forward, x, y, rows, u):
        z = forward(torch.arange(4))
        terms = triplet_terms(*(z[part] for part in OPEN), .2)
        return Step(terms.relu().mean(), (terms.detach() > 0).double().mean(), z)
    adapter, recorder = Slide(), Recorder(Objective(step), PROBES, gen=torch.Generator().manual_seed(0), place=place, margin=.2)
    if optimizer == "sgd": descend(adapter, recorder, ROWS, torch.tensor([0, 0, 1, 2]), streams=streams(0), lr=eta, steps=steps)
    else:
        engine = torch.optim.AdamW(adapter.parameters(), lr=eta, weight_decay=0.)
        for _ in range(steps):
            loss = recorder(adapter, ROWS, None, torch.arange(4), torch.Generator()).loss
            engine.zero_grad(); loss.backward(); engine.step()
    return recorder.walk(adapter)


def test_every_rung_is_attained():
    walk = slid("sgd")
    rungs = np.stack(ladder(walk, .5))                                                      # (7, 2)
    assert np.allclose(walk.rho, .25) and np.allclose(walk.largest, 1, atol=1e-5) and np.allclose(walk.norm, [[3, 1]]*6)
    assert np.allclose(rungs[:, 0], .5*3*1*.25*6, rtol=1e-5)                               # eta L G sum rho, and the drift itself
    assert np.allclose(rungs[:-1, 1], .5*1*1*.25*6, rtol=1e-5) and np.allclose(rungs[-1, 1], rungs[-1, 0])


def test_under_adamw_the_gradient_bounds_nothing():
    rungs = ladder(slid("adamw"), .5)
    assert (rungs.gradient < .3*rungs.drift).all() and (rungs.sparse < rungs.drift).any()  # the violated bound
    assert np.allclose(rungs.drift, rungs.steps, rtol=1e-5)                                # the one that holds is attained here


def spheres(seed=0, d=12):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(6, d))/d**.5
    x = np.repeat(means, 15, 0) + .3*rng.normal(size=(90, d))/d**.5
    return torch.tensor(x/np.linalg.norm(x, axis=1, keepdims=True)), torch.arange(6).repeat_interleave(15)


@pytest.mark.parametrize("loss, lr", [("triplet", .3), ("dense", .02)])
def test_the_ladder_is_climbed(loss, lr):
    x, y = spheres()
    seen, index = y < 4, class_index(y[y < 4])
    def place(y, rows, u): return place_whole_set(index, rows, u)
    adapter = EGABlock(12, hidden=8, gen=torch_generator(streams(0).init)).double()
    recorder = Recorder(whole_set(.2, index) if loss == "triplet" else dense(supcon), x[~seen][::3], gen=torch.Generator().manual_seed(0), place=place if loss == "triplet" else None, margin=.2, tol=1e-4)
    walk = recorder.walk(descend(adapter, recorder, x[seen], y[seen], streams=streams(0), lr=lr, steps=6, batch=64))
    rungs = ladder(walk, lr)
    for low, high in zip(rungs[:-1], rungs[1:]): assert (low <= high*(1 + 1e-9)).all()
    assert np.allclose(rungs.steps, rungs.gradient) and (rungs.drift > 1e-3).all()


def test_the_remainder_of_a_step_is_of_second_order():
    x, y = spheres()
    def one(lr):
        adapter = Linear(12).double()
        recorder = Recorder(dense(supcon), x[60:], gen=torch.Generator().manual_seed(0))
        return recorder.walk(descend(adapter, recorder, x[:60], y[:60], streams=streams(0), lr=lr, steps=1)).remainder.sum()
    assert 3.9 < one(2e-3)/one(1e-3) < 4.1


def test_a_recorder_changes_no_bit_of_a_training():
    x, y = (v.float().numpy() if v.is_floating_point() else v.numpy() for v in spheres())
    index, config = class_index(torch.tensor(y)), TrainConfig(epochs=3, batch=32, lr=1e-3)
    plain, watched = (EGABlock(12, hidden=8, gen=torch_generator(streams(0).init)) for _ in range(2))
    inner = whole_set(.2, index)
    recorder = Recorder(inner, torch.tensor(x[:5]), gen=torch.Generator().manual_seed(0), place=lambda y, rows, u: place_whole_set(index, rows, u), margin=.2, every=4)
    a = train(plain, inner, x, y, streams=streams(1), config=config, device="cpu")
    b = train(watched, recorder, x, y, streams=streams(1), config=config, device="cpu")
    walk = recorder.walk(watched)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), watched.parameters()))
    assert np.allclose(walk.rho, a.rho) and np.allclose(walk.loss, b.loss) and len(walk.step) == 9 and walk.theta <= walk.step.sum()
    assert np.allclose(walk.drift, displacement(transform(watched, x[:5], device="cpu"), x[:5]), atol=1e-6)
    assert "nothing was recorded" in message(lambda: Recorder(inner, torch.tensor(x[:5]), gen=torch.Generator()).walk(plain))


def test_effective_rank():
    assert np.isclose(effective_rank([2, 2, 0]), 2) and effective_rank([3]) == 1 and 1 < effective_rank([1, .1]) < 2
    for bad in ([-1, 2], [0, 0], [[1.]]): assert "singular values" in message(lambda: effective_rank(bad))


# Certificates

def triples(n, d=6, seed=0):
    "(n, 3, d) unit query, nearer row, farther row."
    v = normal(normalize(np.random.default_rng(seed).normal(size=(3*n, d)))).reshape(n, 3, d)
    swap = np.einsum("td,td->t", v[:, 0], v[:, 1]) < np.einsum("td,td->t", v[:, 0], v[:, 2])
    v[swap] = v[swap][:, [0, 2, 1]]
    return v


def cosines(v): return [np.einsum("td,td->t", v[:, a], v[:, b]) for a, b in ((0, 1), (0, 2), (1, 2))]


def pressed(v, turns, steps=400, rate=.02):
    "Smallest cos(q', j') - cos(q', i') an adversary reaches by projected gradient descent, each vector inside its cap."
    start = torch.tensor(v); at = start.clone(); turns = torch.as_tensor(turns, dtype=start.dtype)
    lowest = torch.full((len(v),), np.inf, dtype=start.dtype)
    for t in range(steps):
        at = at.detach().requires_grad_()
        gap = (at[:, 0]*at[:, 1]).sum(1) - (at[:, 0]*at[:, 2]).sum(1)
        lowest = torch.minimum(lowest, gap.detach())
        g, = torch.autograd.grad(gap.sum(), at)
        at = nn.functional.normalize(at - rate*(1 - t/steps)*g, dim=-1)
        c = (at*start).sum(-1, keepdim=True).clamp(-1, 1)
        side = nn.functional.normalize(at - c*start, dim=-1)
        at = torch.where(torch.acos(c) > turns[..., None], torch.cos(turns)[..., None]*start + torch.sin(turns)[..., None]*side, at)
    return lowest.numpy()


def test_no_adversary_beats_the_reach_and_a_hair_more_is_enough():
    v = triples(300)
    give = np.random.default_rng(1).uniform(0, .1, (300, 2))
    r = reach(*cosines(v), give.sum(1))
    keep = (r > .03) & (r < 1)
    v, give, r = v[keep], give[keep], r[keep]
    assert len(v) > 100
    assert (pressed(v, np.column_stack([r*.995, give])) > 0).all()
    assert (pressed(v, np.column_stack([r*1.005 + 2e-4, give])) < 0).mean() > .98         # the descent itself may stall on a few


def test_reach_in_closed_cases():
    v = triples(50)
    j_i = v[:, 1] - v[:, 2]
    assert np.allclose(np.sin(reach(*cosines(v), 0.)), np.einsum("td,td->t", v[:, 0], j_i)/np.linalg.norm(j_i, axis=1))
    assert np.allclose(reach(np.cos(.5), np.cos(.9), np.cos(1.4), .1), .15, atol=1e-7)     # between the two rows: the triangle inequality
    assert reach(.2, .5, .1, 0.) == 0 and reach(.5, .2, .9, 1.) == 0                       # wrong order; rows that can meet
    near, far, pair = cosines(v)
    triangle = (np.arccos(far) - np.arccos(near) - .05)/2
    assert (reach(near, far, pair, .05) >= triangle - 1e-9).all()
    assert (reach(near, far, pair, .05, steps=3) <= reach(near, far, pair, .05) + 1e-12).all()     # stopped early: smaller, so safe


def gallery(n=80, nq=25, d=5, seed=3):
    rng = np.random.default_rng(seed)
    return normal(normalize(rng.normal(size=(nq, d)))), normal(normalize(rng.normal(size=(n, d)))), rng


@pytest.mark.parametrize("k", [1, 3])
def test_certified_is_all_pairs(k):
    xq, xb, rng = gallery(n=40)
    eq, eb = rng.uniform(0, .03, len(xq)), rng.uniform(0, .03, len(xb))
    safe, turn, give = certified(xq, xb, eq, eb, k=k, block=7), turn_of(eq), turn_of(eb)
    for q in range(len(xq)):
        order = np.argsort(-(xq[q] @ xb.T))
        pairs = [(i, o) for i in order[:k] for o in order[k:]]
        by_hand = all(reach(xq[q] @ xb[i], xq[q] @ xb[o], xb[i] @ xb[o], give[i] + give[o]) > turn[q] for i, o in pairs)
        assert safe[q] == by_hand
    assert 0 < safe.mean() < 1


def test_no_movement_changes_a_certified_answer_and_some_movement_changes_the_others():
    xq, xb, _ = gallery(n=60)
    e = .05
    safe, turn = certified(xq, xb, e, e), float(turn_of(e))
    for q in range(len(xq)):
        order = np.argsort(-(xq[q] @ xb.T))
        v = np.stack([[xq[q], xb[order[0]], xb[o]] for o in order[1:20]])
        gap = pressed(v, np.full((19, 3), turn), steps=250)
        if safe[q]: assert (gap > 0).all()
        else: assert gap.min() < 2e-4


@pytest.mark.parametrize("k", [1, 4])
def test_radius_is_where_the_certificate_ends(k):
    xq, xb, _ = gallery()
    r = radius(xq, xb, k=k, block=6)
    for e in (.005, .02, .05): assert (certified(xq, xb, e, e, k=k) == (r > e)).all()


def test_a_row_does_not_answer_itself():
    _, xb, _ = gallery()
    own = np.arange(len(xb))
    r, alone = radius(xb, xb, own=own), [radius(xb[[i]], np.delete(xb, i, 0))[0] for i in range(10)]
    assert np.allclose(r[:10], alone)
    twins = np.concatenate([xb, xb[:1]])
    assert radius(twins[[5]], twins[[0, -1]])[0] < 1e-7                                     # a tie is never certified
    assert not certified(twins[[5]], twins[[0, -1]], 1e-6, 0.)[0]
    assert "must lie in" in message(lambda: radius(xb, xb[:1])) and "[0, 2]" in message(lambda: certified(xb, xb, -1., 0.))
    assert np.allclose(chord_of(turn_of([0., .7, 2.])), [0, .7, 2])


def test_largest_alpha_keeps_the_share():
    _, x, rng = gallery(d=9)
    z = normal(normalize(x + .2*rng.normal(size=x.shape)))
    alpha, share = largest_alpha(x, z, .6)
    assert .6 <= share < 1 and 0 < alpha < 1 and largest_alpha(x, x, .9) == (1., 1.)
    assert "share" in message(lambda: largest_alpha(x, z, 0.))


# The cap

@pytest.mark.parametrize("eps", [.05, .5, 1.7])
def test_no_adversary_passes_the_cap(eps):
    "Gradient ascent on the displacement over the weights and over the input, from wild weights."
    gen = torch_generator(streams(5).init)
    adapter = Capped(EGABlock(6, hidden=8, gen=gen), eps).double()
    with torch.no_grad(): [p.add_(torch.randn(p.shape, generator=gen, dtype=p.dtype)) for p in adapter.parameters()]
    x = nn.functional.normalize(torch.randn(64, 6, generator=gen, dtype=torch.float64), dim=1)
    engine, worst = torch.optim.Adam(adapter.parameters(), lr=.05), 0.
    for _ in range(60):
        x = x.detach().requires_grad_()
        moved = (adapter(x) - x).norm(dim=1)
        worst = max(worst, moved.max().item())
        engine.zero_grad(); (-moved.mean()).backward(); engine.step()
        x = nn.functional.normalize(x.detach() + .3*x.grad*-64, dim=1)
    assert .85*eps < worst <= eps + 1e-7                                                     # reached, never passed; eps itself is stored in float32
    assert torch.allclose(adapter(x).norm(dim=1), torch.ones(64, dtype=torch.float64))


def test_a_cap_far_away_changes_nothing_and_any_cap_starts_as_the_identity():
    gen = torch_generator(streams(6).init)
    inner = EGABlock(6, hidden=8, gen=gen)
    x = nn.functional.normalize(torch.randn(20, 6, generator=gen), dim=1)
    assert (Capped(inner, .1)(x) - x).abs().max() < 1e-6
    with torch.no_grad(): inner.branch[3].weight.add_(.002*torch.randn(6, 8, generator=gen))
    assert torch.allclose(Capped(inner, 1.9)(x), inner(x), atol=1e-4) and (inner(x) - x).norm(dim=1).max() > 1e-3
    z = transform(Capped(inner, .1), x, device="cpu")
    assert displacement(z, x.numpy()).max() <= .1 + 1e-6
    for bad in (0, 2.1, float("nan")): assert "(0, 2)" in message(lambda: Capped(inner, bad), InputError)


def test_a_cap_can_be_trained():
    x, y = (v.float().numpy() if v.is_floating_point() else v.numpy() for v in spheres())
    adapter = Capped(EGABlock(12, hidden=16, gen=torch_generator(streams(0).init)), .4)
    history = train(adapter, dense(supcon), x, y, streams=streams(0), config=TrainConfig(epochs=20, batch=45, lr=1e-2), device="cpu")
    moved = displacement(transform(adapter, x, device="cpu"), x)
    assert history.loss[-1] < history.loss[0] - .05 and .2 < moved.mean() and moved.max() <= .4 + 1e-6
