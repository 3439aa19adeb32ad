"""Losses against other libraries and naive formulas; gradients, invariances and degenerate batches.

A loss from outside the package: registered, compared, fitted, saved, sent to other processes."""

import copy
import functools
import inspect
import json
import math
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from torch.nn import functional as F

from ega import EmbeddingAdapter, read_pack
from ega.data.arrays import InputError, check_X, check_y
from ega.data.runtime import spawn_rngs
from ega.method.adapters import LinearAdapter
from ega.method.config import (
    AdapterConfig,
    LossConfig,
    MethodConfig,
    TrainConfig,
    config_to_dict,
    parse_config,
)
from ega.method.losses import (
    LOSSES,
    cosface,
    displacement_penalty,
    find_loss,
    icon,
    nca,
    nca_half_repulsion,
    register_loss,
    supcon,
    supcon_in,
    triplet,
    triplet_violations,
)
from ega.method.methods import build_objective
from ega.method.training import pairwise_objective, train
from ega.testing import EXAMPLES

root = Path(__file__).resolve().parents[2]
A, D, B, E = (tuple(map(torch.tensor, EXAMPLES[k])) for k in "ADBE")
BUILT_IN = dict(LOSSES)


def at_temperature(name):
    "A pairwise loss as a function of (z, y, tau), also if it has no temperature."
    loss = BUILT_IN[name]

    @functools.wraps(loss.function)
    def call(z, y, tau):
        return loss.function(z, y, **({"tau": tau} if "tau" in loss.options else {}))

    return call


PAIRS = tuple(at_temperature(name) for name, loss in BUILT_IN.items() if loss.inputs == "pairs")
PROXIES = tuple(loss.function for loss in BUILT_IN.values() if loss.inputs == "proxies")


def seeded():
    return torch.Generator().manual_seed(3)


def batch(n=24, d=6, classes=5, seed=0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(n, d, generator=gen, dtype=torch.float64), dim=1)
    return z.to(dtype), torch.randint(classes, (n,), generator=gen)


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


# references: loops over the formulas, and pytorch-metric-learning


def naive_supcon_in(z, y, tau):
    total = 0
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        if positives:
            top = sum(torch.exp(z[i] @ z[p] / tau) for p in positives) / len(positives)
            total = total - torch.log(top / sum(torch.exp(z[i] @ z[a] / tau) for a in others))
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


def metric_learning(name, z, y, w=None, proxies=None, **options):
    "A loss of pytorch-metric-learning, for the mean over all rows, not over those with a positive; w: its proxies."
    loss = getattr(pytest.importorskip("pytorch_metric_learning.losses"), name)
    if w is not None:
        weights = {proxies: w if proxies == "proxies" else w.T}
        return torch.func.functional_call(loss(len(w), z.shape[1], **options).double(), weights, (z, y))
    return loss(**options)(z, y) * ((y[:, None] == y[None]).sum(1) > 1).double().mean()


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


def kernel_icon(z, y, tau):
    "The kernel of the official code on the cosine distance, 2 sigma^2 = tau; a row without a positive counts as 0."
    off = ~torch.eye(len(z), dtype=bool)
    p, q = ((y[:, None] == y[None]) & off).to(z.dtype), torch.exp(-(1 - z @ z.T) / tau) * off
    p, q = p / p.sum(1, keepdim=True).clamp(min=1), q / q.sum(1, keepdim=True)
    return -(p[off] * q[off].log()).sum() / len(z)


def metric_learning_cosface(z, y, w, tau=1 / 30):
    return metric_learning("CosFaceLoss", z, y, w, "W", margin=0.65, scale=1 / tau)


def metric_learning_proxy_anchor(z, y, w, tau=1 / 32):
    return metric_learning("ProxyAnchorLoss", z, y, w, "proxies", margin=0.1, alpha=1 / tau)


# Another implementation of every built-in loss, and the tolerance: 1e-6 for the released forms, whose 1e-8 is a part
# of the formula that ours leaves out.
REFERENCES = {
    "supcon": (official_supcontrast, 1e-11),
    "supcon_in": (naive_supcon_in, 1e-11),
    "nca": (lambda z, y, tau: metric_learning("NCALoss", z, y, softmax_scale=1 / (2 * tau)), 1e-10),
    "icon": (kernel_icon, 1e-10),
    "icon_self_included": (released_icon, 1e-6),
    "nca_half_repulsion": (functools.partial(released_srl, lam=0.5), 1e-6),
    "cosface": (metric_learning_cosface, 1e-10),
    "proxy_anchor": (metric_learning_proxy_anchor, 1e-9),
    "triplet": (torch.nn.TripletMarginLoss(margin=0.2), 1e-12),
}
BATCHES = {"A": A, "D": D, "B": B, "E": E, "random": batch(), "many singletons": batch(9, 3, 7, 1)}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("data", BATCHES)
def test_every_built_in_loss_equals_another_implementation(name, data):
    "In value and gradient along the sphere; a loss without an entry in REFERENCES fails here."
    reference, atol = REFERENCES[name]
    loss, (z, y) = BUILT_IN[name], BATCHES[data]
    if loss.inputs == "triplets":
        same(loss.function, reference, z, z.roll(1, 0), z.flip(0), atol=atol)
        return
    w = torch.randn(int(y.max()) + 2, z.shape[1], generator=seeded(), dtype=z.dtype)
    proxies = (w,) if loss.inputs == "proxies" else ()
    for options in [{"tau": t} for t in (1.0, 0.5, 0.1, 0.07)] if "tau" in loss.options else [{}]:

        def ours(z, *proxies, options=options):
            return loss.function(F.normalize(z, dim=1), y, *proxies, **options)

        def theirs(z, *proxies, options=options):
            return reference(F.normalize(z, dim=1), y, *proxies, **options) + 0 * z.sum()

        same(ours, theirs, z, *proxies, atol=atol)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 6), st.floats(0.05, 2))
def test_identities_on_random_batches(seed, n, classes, tau):
    "L_in <= L_out; ICon = SupCon; NCA = L_in - mean log|P|; with weight 1 half repulsion is NCA + mean log n_i."
    z, y = batch(n, 3, classes, seed)
    positives = (y[:, None] == y[None]).sum(1) - 1
    has = positives > 0
    assert supcon_in(z, y, tau) <= supcon(z, y, tau) + 1e-12
    same(lambda z: icon(z, y, tau), lambda z: supcon(z, y, tau), z, atol=1e-10)
    assert abs(nca(z, y, tau) - supcon_in(z, y, tau) + positives[has].double().log().sum() / n) < 1e-10
    if (positives == 1).all():
        same(lambda z: supcon_in(z, y, tau), lambda z: supcon(z, y, tau), z, atol=1e-10)
    if has.all() and tau >= 0.5:
        gap = nca_half_repulsion(z, y, tau, 1.0) - nca(z, y, tau)
        assert abs(gap - (positives + 1).double().log().mean()) < 1e-5  # its 1e-8


# triplet


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("margin", (0.05, 0.2, 0.6))
def test_triplet_equals_torch(dtype, atol, margin):
    "Also where the positive is the anchor, and where it is the negative: the loss is the margin."
    a, p, n = (batch(200, 8, seed=s, dtype=dtype)[0] for s in range(3))
    for triplets in ((a, p, n), (a, a, n), (a, p, p)):
        same(lambda *v: triplet(*v, margin), torch.nn.TripletMarginLoss(margin=margin), *triplets, atol=atol)
    terms = triplet_violations(a, p, n, margin)
    assert terms.shape == (200,) and (terms < 0).any() and abs(terms.relu().mean() - triplet(a, p, n, margin)) < atol


def test_triplet_without_triplets_and_of_equal_rows():
    z = batch(50, 5)[0].requires_grad_()
    loss = triplet(z[:0], z[:0], z[:0])
    assert loss == 0 and not torch.autograd.grad(loss, z)[0].any()
    _, (g,) = value_and_grad(lambda z: triplet(z, z, z), z.detach())
    assert g.isfinite().all() and g.abs().max() < 1e-12  # p = n = a: the gradients cancel


# gradients


@pytest.mark.parametrize("loss", PAIRS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tau", (1.0, 0.1))
def test_gradcheck_pair_losses(loss, tau):
    "By finite differences; a loss that detaches a part of itself has another gradient on purpose and is left out here."
    for z, y in (A, D, batch(7, 3, 3)):
        assert torch.autograd.gradcheck(lambda z: loss(z, y, tau), z.clone().requires_grad_())


def test_gradcheck_other_losses():
    z, y = batch(7, 3, 3)
    w = torch.randn(4, 3, generator=seeded(), dtype=torch.float64)
    a, p, n = (batch(9, 4, seed=s)[0].requires_grad_() for s in range(3))
    assert torch.autograd.gradcheck(lambda a, p, n: triplet(a, p, n, 0.5), (a, p, n))
    assert torch.autograd.gradcheck(triplet_violations, (a, p, n))
    assert torch.autograd.gradcheck(displacement_penalty, (a, p))
    for f in PROXIES:
        both = z.clone().requires_grad_(), w.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda z, w: f(z, y, w, tau=0.5), both)


LABELS = {
    "classes": lambda n: torch.arange(n) % 7,
    "one class": lambda n: torch.zeros(n, dtype=torch.long),
    "all distinct": lambda n: torch.arange(n),
    "single members": lambda n: torch.where(torch.arange(n) < n // 2, 0, torch.arange(n)),
}


@pytest.mark.parametrize("onednn", (True, False))
@pytest.mark.parametrize("loss", (supcon, nca), ids=lambda f: f.__name__)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("n, d", [(1, 4), (2, 3), (37, 16), (64, 64), (150, 96)])
def test_fused_losses_equal_their_definitions(loss, labels, n, d, onednn, monkeypatch):
    "In float64 and, also with oneDNN's products, in float32; a gradient that reaches the loss is multiplied in."
    if not onednn:
        monkeypatch.setattr("ega.data.runtime._onednn_linear", lambda: None)
    y, z64 = LABELS[labels](n), F.normalize(torch.randn(n, d, dtype=torch.float64, generator=seeded()), dim=1)
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for tau in (1.0, 0.07, 0.01):
            z = z64.to(dtype).requires_grad_()
            values = loss(z, y, tau), loss.__wrapped__(z, y, tau)
            ours, theirs = (torch.autograd.grad(3 * v, z)[0] for v in values)
            assert abs(values[0] - values[1]) <= atol / tau and values[0].dtype == dtype
            assert (ours - theirs).abs().max() <= atol / tau * max(1, theirs.abs().max())


@pytest.mark.parametrize("loss", (supcon, nca), ids=lambda f: f.__name__)
def test_derivatives_of_a_contrastive_gradient(loss):
    "The second derivative by finite differences, and the transformations of torch.func."
    z, y = batch()
    z = z.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z: loss(z, y, 0.5), z)
    (expected,) = torch.autograd.grad(loss(z, y, 0.5), z)
    assert torch.allclose(torch.func.grad(lambda z: loss(z, y, 0.5))(z.detach()), expected, atol=1e-12)


# invariances


ROTATION = torch.linalg.qr(torch.randn(6, 6, generator=seeded(), dtype=torch.float64))[0]


@pytest.mark.parametrize("loss", PAIRS, ids=lambda f: f.__name__)
def test_invariances_of_pair_losses(loss):
    "Rotating all rows, permuting the batch and renaming the classes change nothing."
    z, y = batch()
    order, expected = torch.randperm(24, generator=seeded()), loss(z, y, 0.2)
    names = torch.tensor([7, 100, 0, 3, 2])
    for changed in ((z @ ROTATION, y), (z[order], y[order]), (z, names[y])):
        assert abs(loss(*changed, 0.2) - expected) < 1e-12
    _, (g,) = value_and_grad(lambda v: loss(v, y, 0.2), z)
    _, (rotated,) = value_and_grad(lambda v: loss(v, y, 0.2), z @ ROTATION)
    assert torch.allclose(g @ ROTATION, rotated, atol=1e-12)


def test_invariances_of_other_losses():
    z, y = batch()
    w = torch.randn(5, 6, generator=seeded(), dtype=torch.float64)
    order, rename = torch.randperm(24, generator=seeded()), torch.tensor([4, 2, 0, 1, 3])
    for f in PROXIES:
        for changed in ((z @ ROTATION, y, w @ ROTATION), (z[order], y[order], w), (z, rename[y], w[rename.argsort()])):
            assert abs(f(*changed) - f(z, y, w)) < 1e-10
    a, p, n = (batch(30, 6, seed=s)[0] for s in range(3))
    assert abs(triplet(a @ ROTATION, p @ ROTATION, n @ ROTATION) - triplet(a, p, n)) < 1e-5  # eps does not rotate
    assert abs(displacement_penalty(a @ ROTATION, p @ ROTATION) - (2 - 2 * (a * p).sum(1).mean())) < 1e-12


# degenerate batches; their table of values is in the notebook


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_batch_of_one_row(dtype):
    z, y = batch(1, 4, dtype=dtype)
    for f in PAIRS:
        value, (g,) = value_and_grad(lambda z: f(z, y, 0.07), z)
        assert abs(value - (18.420681 if f.__name__ == "nca_half_repulsion" else 0)) < 1e-5
        assert (g - (g * z).sum(1, keepdim=True) * z).norm() < 1e-5  # along the sphere
    w = torch.eye(4, dtype=dtype)
    for f in PROXIES:
        assert all(v.isfinite().all() for v in value_and_grad(lambda z, w: f(z, y, w), z, w)[1])


@pytest.mark.parametrize("tau", (0.01, 0.07))
@pytest.mark.parametrize("labels", ("random", "one class", "all distinct"))
@pytest.mark.parametrize("rows", ("random", "equal", "opposite"))
def test_finite_in_float32(tau, rows, labels):
    "e^100 and e^200 are beyond float32: nothing may overflow, and no gradient may be NaN at equal or opposite rows."
    z, y = batch(16, 4, 4, dtype=torch.float32)
    z = {"random": z, "equal": z[:1].repeat(16, 1), "opposite": torch.cat([z[:1], -z[:1]]).repeat(8, 1)}[rows]
    y = {"random": y, "one class": y * 0, "all distinct": torch.arange(16)}[labels]
    w = torch.randn(16, 4, generator=seeded())
    calls = [lambda z, f=f: f(z, y, tau) for f in PAIRS] + [lambda z, f=f: f(z, y, w, tau=tau) for f in PROXIES]
    for f in [*calls, lambda z: triplet(z, z, z.flip(0)), lambda z: displacement_penalty(z, z.detach())]:
        value, (g,) = value_and_grad(f, z)
        assert value.isfinite() and g.isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_dtype_in_is_dtype_out(dtype):
    z, y = batch(dtype=dtype)
    w = torch.eye(6).to(dtype)  # torch.eye takes bfloat16 only from torch 2.3 on
    values = [f(z, y, 0.1) for f in PAIRS] + [f(z, y, w) for f in PROXIES]
    for value in [*values, triplet(z, z.flip(0), z.roll(1, 0)), displacement_penalty(z, z.flip(0))]:
        assert value.shape == () and value.dtype == dtype and value.isfinite()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_cuda_equals_cpu():
    z, y = batch()
    w = torch.eye(6).double()
    for f in PAIRS:
        assert abs(f(z.cuda(), y.cuda(), 0.1).cpu() - f(z, y, 0.1)) < 1e-10
    for f in PROXIES:
        assert abs(f(z.cuda(), y.cuda(), w.cuda()).cpu() - f(z, y, w)) < 1e-10


# a loss from outside the package


def circle(z, y, m=0.4, gamma=80.0):
    "Circle loss, Sun et al. 2020, eq. 6, each row as an anchor; one without a positive or a negative counts as 0."
    s, same = z @ z.T, y[:, None] == y[None]
    positive, lowest = same & ~torch.eye(len(z), dtype=torch.bool, device=z.device), torch.finfo(z.dtype).min
    attraction = -gamma * (1 + m - s.detach()).relu() * (s - (1 - m))
    repulsion = gamma * (s.detach() + m).relu() * (s - m)
    terms = attraction.masked_fill(~positive, lowest).logsumexp(1) + repulsion.masked_fill(same, lowest).logsumexp(1)
    return F.softplus(terms).mean()


@pytest.fixture
def registry():
    "LOSSES with `circle`; what a test registers is removed after it."
    before = dict(LOSSES)
    register_loss("circle", circle)
    yield LOSSES
    LOSSES.clear()
    LOSSES.update(before)


@pytest.fixture(scope="module")
def intents():
    "Embeddings and class names of 24 intents of a committed pack."
    es = read_pack(root / "data/packs/clinc150__all_minilm_l6_v2.parquet")
    rows = np.flatnonzero((es.y >= 0) & (es.y < 24) & (es.split == "val"))
    return es.x[rows], np.array(es.classes)[es.y[rows]]


def linear(loss, epochs=4):
    "A linear adapter trained with a loss."
    return MethodConfig(AdapterConfig("linear"), loss, TrainConfig(epochs, lr=3e-3))


CIRCLE = LossConfig("circle", options={"m": 0.25, "gamma": 16.0})


@pytest.mark.parametrize("m, gamma", [(0.4, 80), (0.25, 16)])
def test_the_loss_of_contributing_against_pytorch_metric_learning(m, gamma):
    assert inspect.getsource(circle) in (root / "CONTRIBUTING.md").read_text()
    z, y = batch()
    y[-1] = 9
    theirs = functools.partial(metric_learning, "CircleLoss", y=y, m=m, gamma=gamma)
    same(lambda z: circle(F.normalize(z, dim=1), y, m, gamma), theirs, z, atol=1e-9)


def test_a_registered_loss_is_trained_with_its_options(registry, intents):
    "The weights are those of the training loop with the function itself."
    x, y = check_X(intents[0]), intents[1]
    config = linear(CIRCLE)
    e = EmbeddingAdapter(("linear_circle", config), max_unseen_loss=None, device="cpu").fit(intents[0], y)
    labels, _ = check_y(y, len(x))
    adapter, objective = LinearAdapter(x.shape[1]), pairwise_objective(functools.partial(circle, m=0.25, gamma=16.0))
    train(adapter, objective, x, labels, rngs=spawn_rngs(0), config=config.train, device="cpu")
    assert torch.equal(e.adapter_.weight, adapter.weight) and adapter.weight.any()


def test_a_loaded_adapter_needs_no_loss_until_it_is_fitted_again(registry, intents, tmp_path):
    x, y = intents
    e = EmbeddingAdapter(("linear_circle", linear(CIRCLE)), max_unseen_loss=None, device="cpu").fit(x, y)
    e.save(tmp_path / "a")
    config = json.dumps(config_to_dict(CIRCLE))
    del registry["circle"]
    loaded = EmbeddingAdapter.load(tmp_path / "a")
    assert loaded.method == e.method and np.array_equal(loaded.transform(x), e.transform(x))
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a/adapter.json").read_bytes() == (tmp_path / "b/adapter.json").read_bytes()
    assert parse_config(LossConfig, config) == CIRCLE
    with pytest.raises(InputError):
        clone(loaded).fit(x, y)
    register_loss("circle", circle)
    assert clone(loaded).fit(x, y).fingerprint_ == e.fingerprint_


def test_an_unregistered_loss_is_reported_before_any_candidate_is_trained(intents, monkeypatch):
    monkeypatch.setattr("ega.selection.fit_path", lambda *a, **k: pytest.fail("trained"))
    with pytest.raises(InputError):
        EmbeddingAdapter(candidates=("wccn", ("mine", linear(LossConfig("circel"))))).fit(*intents)


PROCESSES = """
import numpy as np, torch
from torch.nn import functional as F
from ega import EmbeddingAdapter
from ega.method.config import AdapterConfig, LossConfig, MethodConfig, TrainConfig
from ega.method.losses import register_loss

{source}

if __name__ == "__main__":
    with np.load({data!r}) as data:
        x, y = data["x"], data["y"]
    tables = []
    for n_jobs in (1, 2):
        for sign in (-1, 1):  # the second definition must reach workers that know the first
            register_loss("circle", lambda z, y, gamma=16.0, sign=sign: sign * circle(z, y, 0.25, gamma))
            config = MethodConfig(AdapterConfig("linear"), LossConfig("circle"), TrainConfig(2, lr=3e-3))
            e = EmbeddingAdapter(("mine", config), cv=2, strengths=(1.0,), n_jobs=n_jobs, device="cpu").fit(x, y)
            tables.append(e.selection_.table[["seen", "unseen"]].to_numpy())
    assert np.array_equal(tables[0], tables[2]) and np.array_equal(tables[1], tables[3])
    assert not np.array_equal(tables[0], tables[1])
    print("equal")
"""


def test_a_registered_loss_reaches_the_processes_of_joblib(intents, tmp_path):
    "From a script, whose functions no other process can import."
    x, y = intents
    np.savez(tmp_path / "data.npz", x=x, y=y)
    script = tmp_path / "script.py"
    script.write_text(PROCESSES.format(source=inspect.getsource(circle), data=str(tmp_path / "data.npz")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=root)
    assert done.stdout == "equal\n", done.stderr


def scaled(scale):
    "A loss that gives its scale for z = 1."

    def mine(z, y):
        return scale * z.sum()

    return mine


def test_a_pickled_configuration_brings_its_loss_to_another_process(registry):
    "A later pickle replaces the function that an earlier one brought, never one that was registered in the process."
    data = []
    for scale in (1, 2):  # the second replaces the first, as when a cell of a notebook is run again
        register_loss("mine", scaled(scale))
        data.append(pickle.dumps(LossConfig("mine")))

    def arrived(pickled):
        assert pickle.loads(pickled) == LossConfig("mine")
        return find_loss("mine").function(torch.ones(1), None)

    assert arrived(data[0]) == 2 and copy.deepcopy(CIRCLE) == CIRCLE and registry["circle"].function is circle
    del registry["mine"]  # as in another process
    assert [arrived(pickled) for pickled in data] == [1, 2]
    register_loss("mine", scaled(3))
    assert arrived(data[0]) == 3
    assert b"cloudpickle" in data[0] and b"cloudpickle" not in pickle.dumps(LossConfig("supcon", tau=0.1))


def test_a_loss_that_cannot_be_pickled_or_read_is_missing_in_the_other_process(registry, intents):
    "The configuration arrives, an adapter that was fitted with it transforms, and training says what is missing."
    lock = threading.Lock()

    def locked(z, y):
        with lock:
            return circle(z, y)

    register_loss("locked", locked)
    x, y = intents
    e = EmbeddingAdapter(("mine", linear(LossConfig("locked"))), max_unseen_loss=None, device="cpu").fit(x, y)
    data, state = pickle.dumps(e), CIRCLE.__getstate__() | {"function": b"cno_such_module\nloss\n."}
    del registry["locked"], registry["circle"]
    arrived = pickle.loads(data)
    object.__new__(LossConfig).__setstate__(state)
    assert np.array_equal(arrived.transform(x), e.transform(x)) and not {"locked", "circle"} & set(registry)
    with pytest.raises(InputError):
        arrived.fit(x, y)


def test_signatures_of_registered_losses(registry):
    "Callable objects, losses with proxies, and functions in C without a signature."
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    register_loss("theirs", losses.CircleLoss(m=0.25, gamma=16))
    register_loss("normalised_softmax", lambda z, y, proxies, tau=0.1: cosface(z, y, proxies, margin=0, tau=tau))
    register_loss("dot", torch.dot)
    found = {name: find_loss(name)[1:] for name in ("circle", "theirs", "normalised_softmax", "dot")}
    assert found.pop("circle") == ("pairs", ("m", "gamma")) and found.pop("normalised_softmax") == ("proxies", ("tau",))
    assert set(found.values()) == {("pairs", ())}


def test_options_of_a_built_in_loss():
    z, y = batch(dtype=torch.float32)
    objective = build_objective(LossConfig("icon", tau=0.5, options={"leak": 0.1}), z.numpy(), y.numpy(), device="cpu")
    loss = objective(torch.nn.Identity(), z, y, torch.arange(len(z)), torch.Generator()).loss
    assert loss == icon(z, y, 0.5, leak=0.1)


@pytest.mark.parametrize(
    "name, loss",
    [("supcon", circle), ("mine", lambda z, y, lam=0.5: (z * lam).sum()), ("mine", torch.nn.Linear(2, 2))],
    ids=["built in", "field of LossConfig", "parameters that are not trained"],
)
def test_what_cannot_be_registered_is_refused(registry, name, loss):
    before = dict(registry)
    with pytest.raises(InputError):
        register_loss(name, loss)
    assert registry == before
