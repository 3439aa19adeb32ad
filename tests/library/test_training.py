"The training loop against plain PyTorch, its determinism, its checkpoints after a kill."

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from ega.data.arrays import InputError, normalize
from ega.data.files import hash_arrays
from ega.data.runtime import spawn_rngs, torch_generator
from ega.method.active_ratio import index_rows_by_class
from ega.method.adapters import LinearAdapter, LoRAAdapter, PaperEGA, ReleasedEGA
from ega.method.config import TrainConfig
from ega.method.losses import cosface, supcon
from ega.method.training import (
    _hinge_of_batch,
    _mean_hinge,
    batch_triplet_objective,
    dataset_triplet_objective,
    pairwise_objective,
    proxy_objective,
    train,
    with_displacement_penalty,
)


def make_data(n=150, d=20, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return normalize(rng.normal(size=(n, d)) + rng.normal(size=(classes, d))[y]), y


def weights_hash(adapter):
    return hash_arrays(*(v.numpy() for v in adapter.state_dict().values()))


SHORT = TrainConfig(epochs=6, batch_size=32, lr=1e-3)


def fit(objective, x, y, make=ReleasedEGA, seed=0, config=SHORT, **kw):
    s = spawn_rngs(seed)
    sizes = {LinearAdapter: {}, LoRAAdapter: {"rank": 4}}.get(make, {"hidden": 16})
    adapter = make(x.shape[1], **sizes, gen=torch_generator(s.init))
    return adapter, train(adapter, objective, x, y, rngs=s, config=config, device="cpu", **kw)


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_train_equals_a_plain_pytorch_loop(kind):
    "A plain loop with torch's scheduler and the same generators gives the same weights."
    x, y = make_data()
    config, s = TrainConfig(epochs=4, batch_size=64, lr=1e-3, schedule=kind), spawn_rngs(1)
    ours, _ = fit(pairwise_objective(supcon), x, y, seed=1, config=config)
    theirs = ReleasedEGA(20, hidden=16, gen=torch_generator(s.init))
    order = torch_generator(s.order)
    opt = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)
    tx, ty = torch.tensor(x), torch.tensor(y)
    for _ in range(4):
        for rows in torch.randperm(150, generator=order).split(64):
            loss = supcon(theirs(tx[rows]), ty[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if kind == "cosine":
            schedule.step()
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()):
        assert torch.allclose(a, b, atol=1e-5)


ADAPTERS = {
    "ega_paper": lambda g: PaperEGA(20, hidden=16, gen=g),
    "ega_released": lambda g: ReleasedEGA(20, hidden=16, gen=g),
    "lora": lambda g: LoRAAdapter(20, rank=6, gen=g),
    "linear": lambda g: LinearAdapter(20),
}


def changed(kind):
    "An adapter in float64 with all weights changed from their initial values."
    adapter = ADAPTERS[kind](torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for i, p in enumerate(adapter.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return adapter


def gradient(adapter, objective, x, y, rows, seed, whole):
    "The step's output, and the gradient of all weights as one vector, with or without skipping rows (`whole`)."
    step = objective(adapter.train(not whole), x, y, rows, torch.Generator().manual_seed(seed))
    return step, torch.cat([g.flatten() for g in torch.autograd.grad(step.loss, adapter.parameters())])


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("margin", [-3.0, 0.001, 0.2, 3.0])
@pytest.mark.parametrize("valid", ["all", "some", "none"])
def test_hinge_over_active_triplets_equals_the_hinge_over_all(margin, valid, dtype, atol):
    "Value, active ratio and gradient, with rows in several triplets, an anchor that is its own positive, equal rows."
    gen = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(30, 8, generator=gen, dtype=dtype), dim=1)
    z[4] = z[5]
    z.requires_grad_()
    a, p, n = torch.randint(30, (3, 50), generator=gen)
    p[0], (a[1], p[1]) = a[0], (4, 5)
    keep = {"all": torch.ones(50), "some": torch.arange(50) % 3, "none": torch.zeros(50)}[valid] > 0
    (ours, rho), (theirs, expected) = (f(z, a, p, n, keep, margin) for f in (_hinge_of_batch, _mean_hinge))
    assert torch.allclose(ours, theirs, atol=atol) and rho == expected and rho.dtype == ours.dtype == dtype
    ours, theirs = (torch.autograd.grad(2 * v, z)[0] for v in (ours, theirs))
    assert torch.allclose(ours, theirs, atol=atol) and (valid != "all" or (ours.abs().max() > 0) == (margin > 0))


def test_the_gradient_of_the_hinge_by_finite_differences():
    z = torch.nn.functional.normalize(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double(), dim=1)
    a, p, n = torch.arange(9), torch.arange(9).roll(1), torch.arange(9).roll(4)
    valid = torch.arange(9) < 8
    assert torch.autograd.gradcheck(lambda z: _hinge_of_batch(z, a, p, n, valid, 0.3)[0], z.requires_grad_())


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("margin", [0.001, 0.2, 1.0])
def test_skipping_rows_does_not_change_the_gradient(kind, margin):
    "In float64, over batches with few, some and nearly all triplets active."
    x, y = make_data()
    tx, ty, adapter = torch.tensor(x).double(), torch.tensor(y), changed(kind)
    for objective in (
        batch_triplet_objective(margin),
        dataset_triplet_objective(margin, index_rows_by_class(ty)),
        with_displacement_penalty(batch_triplet_objective(margin), 3.0),
        pairwise_objective(supcon),
    ):
        for seed in range(3):
            both = (gradient(adapter, objective, tx, ty, torch.arange(64), seed, whole) for whole in (False, True))
            (a, ga), (b, gb) = both
            assert torch.allclose(ga, gb, rtol=1e-10, atol=1e-13) and torch.allclose(a.loss, b.loss, rtol=1e-12)
            assert a.rho == b.rho


def test_backward_pass_uses_only_rows_with_gradient(monkeypatch):
    "One active triplet among 40 rows: three rows enter the matrix products; without an active triplet: none."
    from ega.method import adapters

    counts, rows_with_gradient = [], adapters._rows_with_gradient

    def counted(g):
        rows = rows_with_gradient(g)
        counts.append(len(g[rows]))
        return rows

    monkeypatch.setattr(adapters, "_rows_with_gradient", counted)
    adapter, x = changed("ega_paper"), torch.tensor(make_data()[0]).double()[:40]
    z = adapter.train()(x)
    for margin, rows in ((2.0, 3), (-2.0, 0)):
        (z[0] - z[1]).norm().sub((z[0] - z[2]).norm()).add(margin).relu().backward(retain_graph=True)
        assert set(counts) == {rows}
        counts.clear()


def test_global_random_state_is_neither_read_nor_changed():
    x, y = make_data()
    torch.manual_seed(0)
    np.random.seed(0)
    first, state = weights_hash(fit(batch_triplet_objective(0.2), x, y)[0]), torch.random.get_rng_state()
    torch.manual_seed(9)
    np.random.seed(9)
    assert weights_hash(fit(batch_triplet_objective(0.2), x, y)[0]) == first
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_batches_without_triplets_have_loss_and_rho_zero():
    "Batches of 2 rows among 40 classes: most hold no positive; loss 0, rho 0, finite weights."
    x, y = make_data(80, classes=40)
    adapter, history = fit(batch_triplet_objective(0.2), x, y, config=TrainConfig(epochs=2, batch_size=2))
    assert np.isfinite(history.loss).all() and min(history.rho) == 0
    assert all(torch.isfinite(p).all() for p in adapter.parameters())


def test_fewer_rows_than_a_batch_and_a_short_last_batch():
    for n in (10, 33):
        x, y = make_data(n, classes=3)
        assert len(fit(pairwise_objective(supcon), x, y)[1].loss) == 6 * -(-n // 32)


def test_proxies_start_at_class_means_and_are_trained_with_the_adapter():
    x, y = make_data()
    tx, ty = torch.tensor(x), torch.tensor(7 - 2 * y)  # labels need not be 0..C-1, nor in order
    objective = proxy_objective(cosface, index_rows_by_class(ty), tx)
    start = objective.parameters[0].detach().clone()
    means = torch.stack([tx[ty == c].mean(0) for c in ty.unique()])
    assert torch.allclose(start, torch.nn.functional.normalize(means, dim=1), atol=1e-6)
    adapter = LinearAdapter(x.shape[1])
    loss = objective(adapter, tx, ty, torch.arange(40), torch.Generator()).loss
    assert torch.allclose(loss, cosface(tx[:40], torch.unique(ty, return_inverse=True)[1][:40], means), atol=1e-5)
    config = TrainConfig(epochs=1, batch_size=len(x), lr=1e-3, weight_decay=0)
    fit(objective, x, y, make=LinearAdapter, config=config)
    largest = (objective.parameters[0] - start).abs().max()
    assert torch.allclose(largest, torch.tensor(0.1), rtol=0.01)  # AdamW's first step is the learning rate, 100 * lr


OBJECTIVES = {
    "batch": lambda x, y: batch_triplet_objective(0.2),
    "proxies": lambda x, y: proxy_objective(cosface, index_rows_by_class(torch.tensor(y)), torch.tensor(x)),
}


KILLED = """
import os, signal
from test_training import LONG, OBJECTIVES, fit, make_data
from ega.method.training import Objective

x, y = make_data()
objective, steps = OBJECTIVES[{name!r}](x, y), []

def step(*args):
    steps.append(args)
    if len(steps) == 33:  # in the seventh epoch
        os.kill(os.getpid(), signal.SIGKILL)
    return objective.step(*args)

interrupted = Objective(step, objective.draw, objective.parameters)
fit(interrupted, x, y, config=LONG, checkpoint={path!r}, checkpoint_interval=0)
"""
LONG = TrainConfig(epochs=12, batch_size=32, lr=1e-3)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_resumes_after_kill_with_the_same_bits(tmp_path, name):
    x, y = make_data()
    whole, history = fit(OBJECTIVES[name](x, y), x, y, config=LONG)
    path = tmp_path / "run.safetensors"
    code, env = KILLED.format(path=str(path), name=name), os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == -signal.SIGKILL and path.exists()
    resumed, again = fit(OBJECTIVES[name](x, y), x, y, config=LONG, checkpoint=path)
    assert weights_hash(resumed) == weights_hash(whole) and again.loss == history.loss and not path.exists()


@pytest.mark.parametrize("first_bad_step", [1, 8])
def test_a_loss_that_becomes_infinite_stops_the_training(first_bad_step):
    x, y = make_data()
    calls = []

    def blows_up(z, y):
        calls.append(z)
        return z.sum() if len(calls) < first_bad_step else (z * float("inf")).sum()

    with pytest.raises(FloatingPointError):
        fit(pairwise_objective(blows_up), x, y)


def test_checkpoints_of_another_run_and_damaged_ones_are_refused(tmp_path):
    x, y = make_data()
    path = tmp_path / "run.safetensors"
    objective = pairwise_objective(supcon)

    def stop(epoch, epochs, adapter):
        if epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(objective, x, y, checkpoint=path, checkpoint_interval=0, on_epoch=stop)
    whole = path.read_bytes()
    for other in ((x, (y + 1) % 5), (np.roll(x, 1, 0), y)):
        with pytest.raises(InputError):
            fit(objective, *other, checkpoint=path)
    with pytest.raises(InputError):  # another adapter
        fit(objective, x, y, make=LinearAdapter, checkpoint=path)
    for bytes_ in (whole[:100], whole[:-1], b"", b"PK" + whole):
        path.write_bytes(bytes_)
        with pytest.raises(InputError):
            fit(objective, x, y, checkpoint=path)
    path.write_bytes(whole)
    assert weights_hash(fit(objective, x, y, checkpoint=path)[0]) == weights_hash(fit(objective, x, y)[0])
