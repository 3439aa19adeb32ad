"Losses against hand-worked values, other libraries and naive formulas; invariances and degenerate batches."

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ega.arrays import InputError
from ega.losses import (
    cosface,
    displacement_penalty,
    icon,
    icon_self_included,
    nca,
    nca_half_repulsion,
    proxy_anchor,
    supcon,
    supcon_in,
    triplet,
    triplet_violations,
)
from ega.testing import EXAMPLES, circle_points

A, D, B, E, P = (tuple(map(torch.tensor, EXAMPLES[k])) for k in "ADBEP")
PAIRS = (supcon, supcon_in, icon, icon_self_included, nca, nca_half_repulsion)
PROXIES = (cosface, proxy_anchor)


def batch(n=24, d=6, classes=5, seed=0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=gen, dtype=torch.float64), dim=1).to(dtype), torch.randint(
        classes, (n,), generator=gen
    )


def value_and_grad(f, *inputs):
    "Loss and its gradients in every floating input."
    inputs = [v.clone().requires_grad_() for v in inputs]
    loss = f(*inputs)
    return loss.detach(), torch.autograd.grad(loss, inputs, allow_unused=True)


def same(f, g, *inputs, atol=1e-12):
    "Equal value and gradient."
    (u, us), (v, vs) = value_and_grad(f, *inputs), value_and_grad(g, *inputs)
    assert abs(u - v) < atol, (u.item(), v.item())
    for p, q in zip(us, vs, strict=True):
        assert torch.allclose(p, q, atol=atol), (p - q).abs().max()


def on_sphere(f):
    "pytorch-metric-learning normalises inside the loss, so its gradient is the component along the sphere."
    return lambda z: f(F.normalize(z, dim=1))


# loops over the formulas, kept here as references


def naive_supcon(z, y, tau):
    total = 0
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        bottom = sum(torch.exp(z[i] @ z[a] / tau) for a in others)
        if positives:
            total = total - sum(z[i] @ z[p] / tau - torch.log(bottom) for p in positives) / len(positives)
    return total / len(z)


def naive_supcon_in(z, y, tau, mean=True):
    total = 0
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        top = sum(torch.exp(z[i] @ z[p] / tau) for p in positives)
        if positives:
            total = total - torch.log(
                top / (len(positives) if mean else 1) / sum(torch.exp(z[i] @ z[a] / tau) for a in others)
            )
    return total / len(z)


def official_supcontrast(z, y, tau):
    "HobbitLong/SupContrast losses.py:69-106 with one view and equal temperatures: max subtracted, self masked."
    mask = (y[:, None] == y[None]).to(z.dtype)
    logits = z @ z.T / tau
    logits = logits - logits.max(1, keepdim=True).values.detach()
    off = torch.ones_like(mask) - torch.eye(len(z), dtype=z.dtype)
    mask = mask * off
    log_prob = logits - torch.log((torch.exp(logits) * off).sum(1, keepdim=True))
    pairs = mask.sum(1)
    pairs = torch.where(pairs < 1e-6, torch.ones_like(pairs), pairs)
    return -((mask * log_prob).sum(1) / pairs).mean()


def released_supcon(z, y, tau):
    "The released formula: 1e-8 in the denominator; an anchor without a positive counts as 0 in the mean."
    n, total = len(z), 0
    for i in range(n):
        bottom = sum(torch.exp(z[i] @ z[k] / tau) for k in range(n) if k != i) + 1e-8
        for j in range(n):
            if j != i and y[j] == y[i]:
                total = total - (z[i] @ z[j] / tau - torch.log(bottom)) / max(1, int((y == y[i]).sum()) - 1)
    return total / n


def released_icon(z, y, tau):
    "The released formula: self pairs in q and in t, 1e-8 added to n_i."
    n, total = len(z), 0
    for i in range(n):
        bottom = sum(torch.exp(z[i] @ z[k] / tau) for k in range(n))
        for j in range(n):
            if y[j] == y[i]:
                t = 1 / (int((y == y[i]).sum()) + 1e-8)
                total = total + t * (math.log(t) - (z[i] @ z[j] / tau - torch.log(bottom)))
    return total / n


def released_srl(z, y, tau, lam):
    "The released formula: n_i counts the anchor although its own term is 0; 1e-8 added to n_i and in the logarithm."
    n, attract, spread = len(z), 0, 0
    for i in range(n):
        terms = [torch.exp(z[i] @ z[j] / tau) for j in range(n)]
        spread = spread + torch.log(sum(terms[j] for j in range(n) if j != i))
        top = sum((terms[j] for j in range(n) if j != i and y[j] == y[i]), torch.zeros((), dtype=z.dtype))
        attract = attract + torch.log(top / (int((y == y[i]).sum()) + 1e-8) + 1e-8)
    return -attract / n + lam * spread / n


@pytest.mark.parametrize("tau", (1.0, 0.5, 0.1, 0.07))
@pytest.mark.parametrize(
    "data", (A, D, B, E, batch(), batch(9, 3, 7, 1)), ids=("A", "D", "B", "E", "random", "many singletons")
)
def test_pair_losses_equal_naive_formulas(data, tau):
    "atol 1e-6 for the released forms: their 1e-8 is a part of the formula that ours leaves out."
    z, y = data
    same(lambda z: supcon(z, y, tau), lambda z: naive_supcon(z, y, tau) + 0 * z.sum(), z, atol=1e-11)
    same(lambda z: supcon(z, y, tau), lambda z: official_supcontrast(z, y, tau), z, atol=1e-11)
    same(lambda z: supcon_in(z, y, tau), lambda z: naive_supcon_in(z, y, tau) + 0 * z.sum(), z, atol=1e-11)
    same(lambda z: nca(z, y, tau), lambda z: naive_supcon_in(z, y, tau, mean=False) + 0 * z.sum(), z, atol=1e-11)
    same(lambda z: icon_self_included(z, y, tau), lambda z: released_icon(z, y, tau), z, atol=1e-6)
    same(lambda z: nca_half_repulsion(z, y, tau), lambda z: released_srl(z, y, tau, 0.5), z, atol=1e-6)
    if tau > 0.06 and data is not A and data is not D:
        same(lambda z: supcon(z, y, tau), lambda z: released_supcon(z, y, tau), z, atol=1e-5)


# hand values


@pytest.mark.parametrize(
    "loss, data, args, value",
    [
        (supcon, A, (1.0,), 0.948501),
        (supcon, A, (0.5,), 0.989836),
        (supcon, A, (0.07,), 4.401915),
        (supcon, D, (0.5,), 0.991774),
        (supcon, E, (0.5,), 0.965215),
        (icon, A, (0.5,), 0.989836),
        (nca, A, (0.5,), 0.989836),
        (icon_self_included, A, (0.5,), 0.580908),
        (icon_self_included, D, (0.5,), 0.581334),
        (icon_self_included, E, (0.5,), 0.189339),
        (nca_half_repulsion, A, (1.0,), 1.042398),
        (nca_half_repulsion, A, (0.5,), 0.938065),
        (nca_half_repulsion, A, (0.1,), 0.988114),
        (nca_half_repulsion, A, (0.5, 1.0), 1.682983),
    ],
)
def test_hand_worked_values(loss, data, args, value):
    assert abs(loss(*data, *args) - value) < 1e-5
    assert abs(loss(data[0].float(), data[1], *args) - value) < 1e-5


def test_supcon_of_each_anchor_on_example_a():
    "Anchor by anchor at tau .5, from the softmax over the other three rows."
    z, y = A
    mate, others = (1, 0, 3, 2), [[j for j in range(4) if j != i] for i in range(4)]
    parts = [-F.log_softmax((z[i] @ z.T / 0.5)[others[i]], 0)[others[i].index(mate[i])] for i in range(4)]
    assert torch.allclose(
        torch.stack(parts), torch.tensor([0.349012, 1.167727, 2.034998, 0.407606]).double(), atol=1e-5
    )
    assert abs(sum(parts) / 4 - supcon(z, y, 0.5)) < 1e-12


def test_supcon_and_supcon_in_hand_worked_values():
    z, y = torch.tensor(circle_points(0, 30, 70, 100, 140, 200)), torch.tensor([0, 0, 0, 1, 1, 1])
    assert abs(supcon(z, y, 0.5) - 1.262063) < 1e-5 and abs(supcon_in(z, y, 0.5) - 1.118907) < 1e-5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 6), st.floats(0.05, 2))
def test_identities_on_random_batches(seed, n, classes, tau):
    "L_in <= L_out; ICon = SupCon; NCA = L_in - mean log|P|; lambda = 1 is NCA + mean log n_i; values are finite."
    z, y = batch(n, 3, classes, seed)
    positives = (y[:, None] == y[None]).sum(1) - 1
    has = positives > 0
    assert supcon_in(z, y, tau) <= supcon(z, y, tau) + 1e-12
    same(lambda z: icon(z, y, tau), lambda z: supcon(z, y, tau), z, atol=1e-10)
    assert abs(nca(z, y, tau) - supcon_in(z, y, tau) + positives[has].double().log().sum() / n) < 1e-10
    if (positives == 1).all():
        same(lambda z: supcon_in(z, y, tau), lambda z: supcon(z, y, tau), z, atol=1e-10)
    if has.all() and tau >= 0.5:
        assert (
            abs(nca_half_repulsion(z, y, tau, 1.0) - nca(z, y, tau) - (positives + 1).double().log().mean()) < 1e-5
        )  # its 1e-8


@pytest.mark.parametrize("leak", (0.0, 0.1, 0.5, 1.0))
def test_icon_leak_is_linear(leak):
    z, y = batch()
    uniform = -torch.stack(
        [F.log_softmax((z[i] @ z.T / 0.5)[torch.arange(len(z)) != i], 0).mean() for i in range(len(z))]
    ).mean()
    assert abs(icon(z, y, 0.5, leak=leak) - (1 - leak) * supcon(z, y, 0.5) - leak * uniform) < 1e-12
    assert abs(icon(*A, 0.5, leak=0.1) - 1.044301) < 1e-5


def test_icon_equals_gaussian_kernel_formula():
    "The kernel of the official code with sigma, on the cosine distance and on the squared Euclidean one."
    z, y = batch()
    off = ~torch.eye(len(z), dtype=bool)
    p = ((y[:, None] == y[None]) & off).double()
    p = p / p.sum(1, keepdim=True)
    for distance, sigma, tau in ((1 - z @ z.T, 0.5, 0.5), (torch.cdist(z, z) ** 2, 0.5, 0.25)):
        q = torch.exp(-distance / (2 * sigma**2)) * off
        q = q / q.sum(1, keepdim=True)
        assert abs(-(p[off] * q[off].log()).sum() / len(z) - icon(z, y, tau)) < 1e-10


# triplet


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("margin", (0.05, 0.2, 0.6))
def test_triplet_equals_torch(dtype, atol, margin):
    a, p, n = (batch(200, 8, seed=s, dtype=dtype)[0] for s in range(3))
    same(lambda *v: triplet(*v, margin), torch.nn.TripletMarginLoss(margin=margin), a, p, n, atol=atol)
    same(
        lambda *v: triplet(*v, margin), torch.nn.TripletMarginLoss(margin=margin), a, a, n, atol=atol
    )  # the positive may be the anchor
    same(lambda *v: triplet(*v, margin), torch.nn.TripletMarginLoss(margin=margin), a, p, p, atol=atol)  # loss = margin
    terms = triplet_violations(a, p, n, margin)
    assert terms.shape == (200,) and (terms < 0).any() and abs(terms.relu().mean() - triplet(a, p, n, margin)) < atol


def test_triplet_gradient_at_the_margin_equals_torch():
    "Where the argument of the hinge is exactly 0, the gradient is that of torch's clamp: 1 in torch 2.13, 0 in 2.15."
    corner = torch.zeros(1, requires_grad=True)
    corner.clamp(min=0).sum().backward()
    a, p, n = (batch(200, 8, seed=s)[0][:, None] for s in range(3))  # 200 batches of one triplet
    margins = [-triplet_violations(*v, 0.0).item() for v in zip(a, p, n)]
    hits = 0
    for u, v, w, m in zip(a, p, n, margins):
        dp, dn = F.pairwise_distance(u, v), F.pairwise_distance(u, w)
        if m <= 0 or (dp - dn + m) != 0 or (m + dp - dn) != 0:
            continue  # torch adds in the second order
        same(lambda *t: triplet(*t, m), torch.nn.TripletMarginLoss(margin=m), u, v, w)
        _, (_, g, _) = value_and_grad(lambda *t: triplet(*t, m), u, v, w)
        assert abs(g.norm() - corner.grad.item()) < 1e-12
        hits += 1
    assert hits >= 10


def test_infinite_diagonal_would_make_icon_nan():
    "0 * log q stays 0 on the masked diagonal; with -inf ICon's cross-entropy would be NaN on every batch."
    z, y = batch(5)
    logq = (z @ z.T).fill_diagonal_(-torch.inf).log_softmax(1)
    assert (torch.zeros(5, 5) * logq).sum().isnan() and icon(z, y).isfinite()


def test_triplet_against_pytorch_metric_learning():
    "PML averages over the active ones of all triplets of the batch; its distance has no eps, hence the tolerance 1e-5."
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    z, y = batch(12, 4, 3)
    a, p, n = zip(
        *[
            (i, j, k)
            for i in range(12)
            for j in range(12)
            for k in range(12)
            if i != j and y[i] == y[j] and y[i] != y[k]
        ]
    )
    a, p, n = map(list, (a, p, n))

    def ours(z):
        active = (triplet_violations(z[a], z[p], z[n], 0.05) > 0).sum()
        return triplet(z[a], z[p], z[n], 0.05) * len(a) / active

    same(on_sphere(ours), lambda z: losses.TripletMarginLoss(margin=0.05)(z, y), z, atol=1e-5)


def test_triplet_gradient_norms_and_degenerate_triplets():
    "Gradients sum to 0, unit vectors at p and n; loss m for equal rows; d(u, u) = eps sqrt(d); 0 without triplets."
    a, p, n = (batch(50, 5, seed=s)[0] for s in range(3))
    _, (ga, gp, gn) = value_and_grad(lambda *v: triplet(*v, 5.0), a, p, n)  # margin 5: all active
    assert (
        (ga + gp + gn).abs().max() < 1e-12
        and torch.allclose(50 * gp.norm(dim=1), torch.ones(50).double())
        and torch.allclose(50 * gn.norm(dim=1), torch.ones(50).double())
    )
    same_rows = torch.ones(4, 512).double() / 512**0.5
    assert abs(triplet(same_rows, same_rows, same_rows, 0.2) - 0.2) < 1e-12
    left, right = (
        same_rows * torch.tensor([1.0, -1.0]).repeat(256),
        same_rows * torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(128),
    )
    assert (
        abs(triplet_violations(left, left, right, 0.0)[0] - (2.2627417e-5 - 2**0.5)) < 1e-9
    )  # a right angle whose difference sums to 0: eps enters in second order, 2e-10
    z = a[:0].clone().requires_grad_()
    loss = triplet(z, z, z)
    assert loss == 0 and torch.autograd.grad(loss, z)[0].shape == (0, 5)
    _, (g,) = value_and_grad(lambda z: triplet(z, z, z), a)
    assert g.isfinite().all() and g.abs().max() < 1e-12  # p = n = a: the gradients cancel


# pytorch-metric-learning


def test_supcon_against_pytorch_metric_learning():
    "PML averages over non-zero losses: equal when every anchor has a positive, else N / (anchors with one) times ours."
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    z, _ = batch()
    y = torch.arange(24) % 5
    for tau in (0.07, 0.1, 1.0):
        same(on_sphere(lambda z: supcon(z, y, tau)), lambda z: losses.SupConLoss(temperature=tau)(z, y), z, atol=1e-10)
    same(
        on_sphere(lambda z: 5 / 4 * supcon(z, D[1], 0.5)),
        lambda z: losses.SupConLoss(temperature=0.5)(z, D[1]),
        D[0],
        atol=1e-10,
    )
    assert abs(losses.SupConLoss(temperature=0.5)(*D) - 1.239717) < 1e-5


def test_nca_against_pytorch_metric_learning():
    "c = 1/(2 tau); PML leaves anchors without a positive out of its mean."
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    z, _ = batch()
    y = torch.arange(24) % 5
    for c in (1, 5):
        same(
            on_sphere(lambda z: nca(z, y, 1 / (2 * c))), lambda z: losses.NCALoss(softmax_scale=c)(z, y), z, atol=1e-10
        )
    same(on_sphere(lambda z: 5 / 4 * nca(z, D[1], 0.5)), lambda z: losses.NCALoss()(z, D[1]), D[0], atol=1e-10)


def test_nca_against_scikit_learn():
    "scikit-learn maximises the sum of the probabilities, without a logarithm: 1.812380 on A at the identity."
    z, y = A
    off = ~torch.eye(4, dtype=bool)
    q = torch.softmax((-(torch.cdist(z, z) ** 2)).masked_fill(~off, -torch.inf), 1)
    right = (q * ((y[:, None] == y[None]) & off)).sum(1)
    assert abs(right.sum() - 1.812380) < 1e-5 and abs(-right.log().mean() - nca(z, y, 0.5)) < 1e-12


@pytest.mark.parametrize("margin, scale", [(0.65, 30), (0.35, 64), (0.0, 18)])
def test_cosface_against_pytorch_metric_learning(margin, scale):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    z, y = batch()
    w = torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs = losses.CosFaceLoss(5, 6, margin=margin, scale=scale).double()
    theirs.W.data = w.T.clone()
    _, (_, gw) = value_and_grad(lambda z, w: cosface(F.normalize(z, dim=1), y, w, margin=margin, tau=1 / scale), z, w)
    same(on_sphere(lambda z: cosface(z, y, w, margin=margin, tau=1 / scale)), lambda z: theirs(z, y), z, atol=1e-10)
    theirs(z, y).backward()
    assert torch.allclose(theirs.W.grad.T, gw, atol=1e-10)


def test_proxy_anchor_against_pytorch_metric_learning():
    "Also with a proxy that has no row in the batch (class 5)."
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    z, y = batch()
    theirs = losses.ProxyAnchorLoss(6, 6).double()
    w = theirs.proxies.data.clone()

    def ours(z, w):
        return proxy_anchor(F.normalize(z, dim=1), y, w)

    value, (gz, gw) = value_and_grad(ours, z, w)
    v = z.clone().requires_grad_()
    loss = theirs(v, y)
    loss.backward()
    assert (
        abs(loss.detach() - value) < 1e-9
        and torch.allclose(v.grad, gz, atol=1e-9)
        and torch.allclose(theirs.proxies.grad, gw, atol=1e-9)
    )


def test_proxy_losses_hand_worked_values():
    assert abs(cosface(*A, P[0]) - 3.703776) < 1e-5 and abs(cosface(*A, P[0], margin=0, tau=1 / 18) - 0.005944) < 1e-5
    assert abs(proxy_anchor(*A, P[0]) - 15.341110) < 1e-5 and abs(proxy_anchor(*A, P[0], tau=1.0) - 1.837601) < 1e-5
    for f in PROXIES:
        assert abs(f(*A, 7 * P[0]) - f(*A, P[0])) < 1e-12


def test_proxy_anchor_equals_naive_formula():
    z, y = batch(10, 3, 4)
    w = F.normalize(torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)

    def naive(z, w):
        pull = [
            torch.log(1 + sum(torch.exp(-4 * (z[i] @ w[c] - 0.1)) for i in range(10) if y[i] == c))
            for c in range(5)
            if (y == c).any()
        ]
        push = [
            torch.log(1 + sum(torch.exp(4 * (z[i] @ w[c] + 0.1)) for i in range(10) if y[i] != c)) for c in range(5)
        ]
        return sum(pull) / len(pull) + sum(push) / len(push)

    same(lambda z, w: proxy_anchor(z, y, w, tau=0.25), lambda z, w: naive(z, F.normalize(w, dim=1)), z, w)


# gradients


@pytest.mark.parametrize("loss", PAIRS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tau", (1.0, 0.1))
def test_gradcheck_pair_losses(loss, tau):
    for z, y in (A, D, batch(7, 3, 3)):
        assert torch.autograd.gradcheck(lambda z: loss(z, y, tau), z.clone().requires_grad_())


def test_gradcheck_other_losses():
    z, y = batch(7, 3, 3)
    w = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, p, n = (batch(9, 4, seed=s)[0].requires_grad_() for s in range(3))
    assert torch.autograd.gradcheck(lambda a, p, n: triplet(a, p, n, 0.5), (a, p, n)) and torch.autograd.gradcheck(
        triplet_violations, (a, p, n)
    )
    assert torch.autograd.gradcheck(displacement_penalty, (a, p))
    for f in PROXIES:
        assert torch.autograd.gradcheck(
            lambda z, w: f(z, y, w, tau=0.5), (z.clone().requires_grad_(), w.clone().requires_grad_())
        )


@pytest.mark.parametrize("lam", (0.0, 0.5, 1.0))
def test_half_repulsion_gradient_does_not_vanish(lam):
    "N dL/ds = lam q - r: each row sums to lam - 1; on E at tau .1, -.25 a positive pair, where SupCon has -3.6e-6."
    z, y = E
    off = ~torch.eye(12, dtype=bool)
    pos = (y[:, None] == y[None]) & off
    s = z @ z.T / 0.1
    q, r = s.masked_fill(~off, -torch.inf).softmax(1), s.masked_fill(~pos, -torch.inf).softmax(1)
    G = (lam * q - r) / 12
    _, (g,) = value_and_grad(lambda z: nca_half_repulsion(z, y, 0.1, lam), z)
    assert torch.allclose(g, (G + G.T) @ z / 0.1, atol=1e-9) and torch.allclose(
        12 * G.sum(1), torch.full((12,), lam - 1.0).double()
    )
    if lam == 0.5:
        assert abs(12 * G[0, 1] + 0.25) < 1e-5 and abs((q - pos / 2.0)[0, 1] + 3.6e-6) < 5e-8


# invariances


@pytest.mark.parametrize("loss", PAIRS, ids=lambda f: f.__name__)
def test_invariances_of_pair_losses(loss):
    "Rotating all rows, permuting the batch and renaming the classes change nothing."
    z, y = batch()
    gen = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=gen, dtype=torch.float64))[0]
    order = torch.randperm(24, generator=gen)
    expected = loss(z, y, 0.2)
    assert abs(loss(z @ rotation, y, 0.2) - expected) < 1e-12 and abs(loss(z[order], y[order], 0.2) - expected) < 1e-12
    assert abs(loss(z, torch.tensor([7, 100, 0, 3, 2])[y], 0.2) - expected) < 1e-12
    _, (g,) = value_and_grad(lambda v: loss(v, y, 0.2), z)
    _, (rotated,) = value_and_grad(lambda v: loss(v, y, 0.2), z @ rotation)
    assert torch.allclose(g @ rotation, rotated, atol=1e-12)


def test_invariances_of_other_losses():
    z, y = batch()
    gen = torch.Generator().manual_seed(1)
    rotation, w = (
        torch.linalg.qr(torch.randn(6, 6, generator=gen, dtype=torch.float64))[0],
        torch.randn(5, 6, generator=gen, dtype=torch.float64),
    )
    order, rename = torch.randperm(24, generator=gen), torch.tensor([4, 2, 0, 1, 3])
    for f in PROXIES:
        assert (
            abs(f(z @ rotation, y, w @ rotation) - f(z, y, w)) < 1e-10
            and abs(f(z[order], y[order], w) - f(z, y, w)) < 1e-10
        )
        assert abs(f(z, rename[y], w[rename.argsort()]) - f(z, y, w)) < 1e-10
    a, p, n = (batch(30, 6, seed=s)[0] for s in range(3))
    assert abs(triplet(a @ rotation, p @ rotation, n @ rotation) - triplet(a, p, n)) < 1e-5  # eps does not rotate
    assert (
        abs(displacement_penalty(a @ rotation, p @ rotation) - displacement_penalty(a, p)) < 1e-12
        and abs(displacement_penalty(a, p) - (2 - 2 * (a * p).sum(1).mean())) < 1e-12
    )


# degenerate batches


def tangent(loss, z, y, *args):
    "Value, and norm of the gradient along the sphere."
    value, (g,) = value_and_grad(lambda z: loss(z, y, *args), z)
    return value.item(), (g - (g * z).sum(1, keepdim=True) * z).norm().item()


EQUAL = torch.ones(3, 2).double() / 2**0.5
TABLE = [  # at tau .5, lambda .5: (value, gradient norm) of supcon, icon_self_included, nca_half_repulsion
    ("A, one label", A[0], torch.zeros(4, dtype=int), (1.534494, 0.171004), (0.671255, 0.421019), (0.641377, 0.417637)),
    ("A, four labels", A[0], torch.arange(4), (0, 0), (0.524055, 0.329871), (19.165599, 0.417637)),
    ("B", *B, (math.log(2), 0), (math.log((math.e**2 + 2) / 3) - 2 / 3, 0.740812), (0.752039, 0.816497)),
    ("three equal", EQUAL, B[1], (0.693147, 0), (0, 0), (-0.247961, 0)),
]


@pytest.mark.parametrize("name, z, y, of_supcon, of_icon, of_half", TABLE, ids=[t[0] for t in TABLE])
def test_degenerate_batches(name, z, y, of_supcon, of_icon, of_half):
    for loss, expected in (
        (supcon, of_supcon),
        (icon, of_supcon),
        (icon_self_included, of_icon),
        (nca_half_repulsion, of_half),
    ):
        assert tangent(loss, z, y, 0.5) == pytest.approx(expected, abs=1e-5), loss.__name__
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    assert losses.SupConLoss(temperature=0.5)(z, y) == 0  # its column of the table
    if name == "B":
        assert tangent(nca_half_repulsion, z, y, 0.5, 1.0) == pytest.approx((math.log(3), 0), abs=1e-5)


def test_batch_without_positives():
    "Without any positive, SupCon, ICon and NCA are 0 with gradient 0; the released losses are not."
    z, y = batch(6, 4)[0], torch.arange(6)
    for f in (supcon, supcon_in, icon, nca):
        assert tangent(f, z, y, 0.5) == (0, 0)
    assert tangent(icon_self_included, z, y, 0.5)[1] > 0.1 and tangent(nca_half_repulsion, z, y, 0.5)[1] > 0.1
    constant = -math.log(1e-8)
    assert abs(nca_half_repulsion(z, y, 0.5, 0.0) - constant) < 1e-9 and abs(constant - 18.420681) < 1e-6


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_batch_of_one_row(dtype):
    z, y = batch(1, 4, dtype=dtype)
    for f in PAIRS:
        value, (g,) = value_and_grad(lambda z: f(z, y, 0.07), z)
        assert g.isfinite().all() and abs(value - (18.420681 if f is nca_half_repulsion else 0)) < 1e-5, f.__name__
        assert (g - (g * z).sum(1, keepdim=True) * z).abs().max() < 1e-5
    w = torch.eye(4, dtype=dtype)
    for f in PROXIES:
        assert all(v.isfinite().all() for v in value_and_grad(lambda z, w: f(z, y, w), z, w)[1])


@pytest.mark.parametrize("tau", (0.01, 0.07))
@pytest.mark.parametrize("name", ("equal", "opposite", "random", "one class", "all distinct", "equal and distinct"))
def test_finite_in_float32(tau, name):
    "e^100 and e^200 are beyond float32: nothing may overflow, and no gradient may be NaN at equal or opposite rows."
    z, y = batch(16, 4, 4, dtype=torch.float32)
    if name == "equal":
        z = z[:1].repeat(16, 1)
    if name == "opposite":
        z = torch.cat([z[:1], -z[:1]]).repeat(8, 1)
    if name == "one class":
        y = y * 0
    if name == "all distinct":
        y = torch.arange(16)
    if name == "equal and distinct":
        z, y = z[:1].repeat(16, 1), torch.arange(16)
    w = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    calls = [(f.__name__, lambda z, f=f: f(z, y, tau)) for f in PAIRS] + [
        (f.__name__, lambda z, f=f: f(z, y, w, tau=tau)) for f in PROXIES
    ]
    calls += [
        ("triplet", lambda z: triplet(z, z, z.flip(0))),
        ("displacement_penalty", lambda z: displacement_penalty(z, z.detach())),
    ]
    for called, f in calls:
        value, (g,) = value_and_grad(f, z)
        assert value.isfinite() and g.isfinite().all(), called


@pytest.mark.parametrize("loss", PAIRS, ids=lambda f: f.__name__)
def test_float32_agrees_with_float64_at_small_tau(loss):
    "Logits of 100 carry a float32 error near 1e-5: 1e-4 is ten of these."
    z, y = batch(32, 8)
    assert abs(loss(z.float(), y, 0.01) - loss(z.float().double(), y, 0.01)) < 1e-4 * abs(loss(z, y, 0.01)).clamp(min=1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_dtype_in_is_dtype_out(dtype):
    z, y = batch(dtype=dtype)
    w = torch.eye(6).to(dtype)  # torch.eye takes bfloat16 only from torch 2.3 on
    for value in (
        *(f(z, y, 0.1) for f in PAIRS),
        *(f(z, y, w) for f in PROXIES),
        triplet(z, z.flip(0), z.roll(1, 0)),
        displacement_penalty(z, z.flip(0)),
    ):
        assert value.shape == () and value.dtype == dtype and value.isfinite()


def test_losses_are_deterministic_and_change_no_input():
    z, y = batch(dtype=torch.float32)
    kept, labels, state = z.clone(), y.clone(), torch.get_rng_state()
    for f in PAIRS:
        (u, (g,)), (v, (h,)) = (value_and_grad(lambda z: f(z, y, 0.07), z) for _ in range(2))
        assert torch.equal(u, v) and torch.equal(g, h)
    assert torch.equal(z, kept) and torch.equal(y, labels) and torch.equal(state, torch.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_cuda_equals_cpu():
    z, y = batch()
    w = torch.eye(6).double()
    for f in PAIRS:
        assert abs(f(z.cuda(), y.cuda(), 0.1).cpu() - f(z, y, 0.1)) < 1e-10
    for f in PROXIES:
        assert abs(f(z.cuda(), y.cuda(), w.cuda()).cpu() - f(z, y, w)) < 1e-10


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda z, y: supcon(z, y[:2]), "4 rows"),
        (lambda z, y: supcon(z, y.numpy()), "ndarray"),
        (lambda z, y: nca(z, y, 0), "tau must be > 0"),
        (lambda z, y: icon(z, y, -1), "tau"),
        (lambda z, y: icon_self_included(z[:0], y[:0]), "at least one row"),
        (lambda z, y: supcon(z[0], y), r"\(N, d\)"),
        (lambda z, y: supcon(z, y, float("nan")), "tau"),
        (lambda z, y: cosface(z, y, torch.eye(3)), r"\(C, 2\)"),
        (lambda z, y: proxy_anchor(z, y, z[0]), "proxies"),
        (lambda z, y: displacement_penalty(z, z[:1]), "one shape"),
        (lambda z, y: triplet(z, z, z[:1]), r"one shape \(T, d\)"),
    ],
)
def test_bad_arguments_are_refused(call, words):
    with pytest.raises(InputError, match=words):
        call(*A)
