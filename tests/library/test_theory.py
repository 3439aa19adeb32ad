"Jacobians, recorded trainings and the chain of bounds, including an example in which every bound is attained."

import numpy as np
import pytest
import torch
from torch import nn

from ega.data.arrays import InputError
from ega.data.runtime import spawn_rngs, torch_generator
from ega.method.active_ratio import Triplets, index_rows_by_class, sample_dataset_triplets
from ega.method.adapters import BoundedDisplacementAdapter, ReleasedEGA
from ega.method.losses import supcon, triplet_violations
from ega.method.theory import (
    TrajectoryRecorder,
    adapter_parameters,
    drift_bounds,
    gradient_subspace,
    jacobian_energy_in_subspace,
    jacobian_spectral_norms,
    jacobian_squared_frobenius_norm,
    jvp,
    sgd,
    triplet_gradient_norms,
    triplet_gradients,
)
from ega.method.training import LossOutput, Objective, dataset_triplet_objective, pairwise_objective


def jacobian(adapter, x):
    "The dense Jacobian (n, d, number of parameters), row by row."
    parameters = list(adapter.parameters())

    def gradient(value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])

    return torch.stack([torch.stack([gradient(value) for value in adapter(row[None])[0]]) for row in x])


def random_adapter(d=6, hidden=5, seed=0):
    "A small adapter that is not the identity, and unit rows; float64."
    gen = torch_generator(spawn_rngs(seed).init)
    adapter = ReleasedEGA(d, hidden=hidden, gen=gen).double().eval()
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=gen, dtype=p.dtype))
    return adapter, nn.functional.normalize(torch.randn(9, d, generator=gen, dtype=torch.float64), dim=1)


# Jacobians


def finite_differences(adapter, x, h=1e-6):
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


def test_jacobian_and_jvp_equal_finite_differences():
    adapter, x = random_adapter()
    J = jacobian(adapter, x)
    assert torch.allclose(J, finite_differences(adapter, x), atol=1e-8)
    v = {k: torch.full_like(p, 0.1).cumsum(0) for k, p in adapter_parameters(adapter).items()}
    assert torch.allclose(jvp(adapter, x, v), J @ torch.cat([t.flatten() for t in v.values()]), atol=1e-11)


def test_products_use_eval_mode_and_leave_the_adapter_in_training_mode():
    adapter, x = random_adapter()
    v = {k: torch.ones_like(p) for k, p in adapter_parameters(adapter).items()}
    before = jvp(adapter, x, v)
    assert torch.equal(jvp(adapter.train(), x, v), before) and adapter.training


def test_spectral_norm_increases_to_the_exact_value():
    adapter, x = random_adapter()
    exact = torch.linalg.matrix_norm(jacobian(adapter, x), 2)
    start = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    for max_iter in (1, 3, 10):
        assert (jacobian_spectral_norms(adapter, x, start, max_iter=max_iter)[0] <= exact * (1 + 1e-12)).all()
    found, u = jacobian_spectral_norms(adapter, x, start, max_iter=400, tol=1e-13)
    assert torch.allclose(found, exact, rtol=1e-5)
    assert torch.allclose(jacobian_spectral_norms(adapter, x, u, max_iter=1)[0], exact, rtol=1e-5)


def test_frobenius_norm_is_unbiased_and_its_error_is_right():
    adapter, x = random_adapter()
    exact = (jacobian(adapter, x) ** 2).sum((1, 2))
    assert torch.allclose(jacobian_squared_frobenius_norm(adapter, x)[0], exact)
    gens = [torch.Generator().manual_seed(seed) for seed in range(24)]
    pairs = [jacobian_squared_frobenius_norm(adapter, x, gen=gen, n_probes=4) for gen in gens]
    runs, claimed = map(torch.stack, zip(*pairs))
    assert ((runs.mean(0) - exact).abs() < 4 * runs.std(0) / 24**0.5).all()  # unbiased
    ratio = (claimed**2).mean(0).sqrt() / runs.std(0)
    assert ratio.log().abs().max() < 0.6  # within the noise of 24 runs


def test_triplet_gradients_equal_autograd_one_by_one():
    adapter, x = random_adapter()
    a, p, n = x[[0, 1, 2, 3, 4]], x[[5, 6, 7, 8, 0]], x[[1, 2, 3, 4, 5]]
    rows = triplet_gradients(adapter, a, p, n, 0.2)
    for i in range(5):
        loss = triplet_violations(adapter(a[[i]]), adapter(p[[i]]), adapter(n[[i]]), 0.2).clamp(min=0).sum()
        by_hand = torch.cat([g.flatten() for g in torch.autograd.grad(loss, adapter.parameters())])
        assert torch.allclose(rows[i], by_hand, atol=1e-12)
    norms = rows.norm(dim=1)
    assert torch.allclose(triplet_gradient_norms(adapter, a, p, n, 0.2), norms) and 0 < (norms == 0).sum() < 5
    assert (triplet_gradient_norms(adapter, a, p, n, -5.0) == 0).all()


def test_gradient_subspace_gives_the_projector():
    adapter, x = random_adapter()
    J, rows = jacobian(adapter, x), triplet_gradients(adapter, x[:4], x[4:8], x[[1, 2, 3, 0]], 2.0)
    rows = torch.cat([rows, rows[:2] + rows[2:]])  # dependent rows do not change the span
    subspace, P = gradient_subspace(rows), torch.linalg.pinv(rows[:4]) @ rows[:4]
    assert torch.allclose(subspace.basis @ subspace.basis.T, torch.eye(4, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(subspace.basis.T @ subspace.basis, P, atol=1e-8)
    assert torch.allclose(jacobian_energy_in_subspace(adapter, x, subspace.basis).sum(1), ((J @ P) ** 2).sum((1, 2)))
    assert torch.allclose(subspace.singular_values, torch.linalg.svdvals(rows), atol=1e-7)
    with pytest.raises(InputError, match="no triplet is active"):
        gradient_subspace(torch.zeros(3, 7))


# An example in which every bound is attained


class OneWeight(nn.Module):
    "f(x) = (x_0 + theta x_1, 0): linear in its one weight, and J(x) = x_1."

    def __init__(self):
        super().__init__()
        self.d, self.theta = 2, nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return torch.stack([x[..., 0] + self.theta * x[..., 1], torch.zeros_like(x[..., 0])], -1)


# anchor, positive, a near and a far negative
ROWS = torch.tensor([[0.0, 0.0], [90.0, 1.0], [1.0, 0.0], [1000.0, 0.0]], dtype=torch.float64)
# one of four is active, with a gradient of exactly 1
TRIPLETS = Triplets(*torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [2, 3, 3, 3]]))
PROBES = torch.tensor([[7.0, 3.0], [7.0, 1.0]], dtype=torch.float64)


def trajectory_of(optimizer, eta=0.5, steps=6):
    "The trajectory of `OneWeight`, with one active triplet in four at every step."

    def sample_triplets(y, rows, u):
        return TRIPLETS, torch.ones(4, dtype=torch.bool)

    def step(forward, x, y, rows, u):
        z = forward(torch.arange(4))
        terms = triplet_violations(*(z[part] for part in TRIPLETS), 0.2)
        return LossOutput(terms.relu().mean(), (terms.detach() > 0).double().mean(), z)

    adapter, options = OneWeight(), dict(sample_triplets=sample_triplets, margin=0.2)
    recorder = TrajectoryRecorder(Objective(step), PROBES, gen=torch.Generator().manual_seed(0), **options)
    if optimizer == "sgd":
        sgd(adapter, recorder, ROWS, torch.tensor([0, 0, 1, 2]), rngs=spawn_rngs(0), lr=eta, steps=steps)
    else:
        engine = torch.optim.AdamW(adapter.parameters(), lr=eta, weight_decay=0.0)
        for _ in range(steps):
            loss = recorder(adapter, ROWS, None, torch.arange(4), torch.Generator()).loss
            engine.zero_grad()
            loss.backward()
            engine.step()
    return recorder.trajectory(adapter)


def test_every_bound_is_attained():
    trajectory = trajectory_of("sgd")
    bounds = np.stack(drift_bounds(trajectory, 0.5))  # (7, 2)
    assert np.allclose(trajectory.rho, 0.25) and np.allclose(trajectory.largest_gradient, 1, atol=1e-5)
    assert np.allclose(trajectory.jacobian_norm, [[3, 1]] * 6)
    assert np.allclose(bounds[:, 0], 0.5 * 3 * 1 * 0.25 * 6, rtol=1e-5)  # eta L G sum rho, and the drift itself
    assert np.allclose(bounds[:-1, 1], 0.5 * 1 * 1 * 0.25 * 6, rtol=1e-5) and np.allclose(bounds[-1, 1], bounds[-1, 0])


def test_gradient_bounds_are_violated_under_adamw():
    bounds = drift_bounds(trajectory_of("adamw"), 0.5)
    assert (bounds.gradient < 0.3 * bounds.drift).all() and (bounds.sparse < bounds.drift).any()  # the violated bounds
    assert np.allclose(bounds.drift, bounds.steps, rtol=1e-5)  # the bound that holds is attained


def test_the_learning_rate_of_the_bounds_may_change_from_step_to_step():
    trajectory, lr = trajectory_of("sgd"), np.array([1.0, 0.5, 0.25, 0.0, 0.0, 0.0])
    constant = drift_bounds(trajectory, 0.5)
    assert all(np.allclose(a, b) for a, b in zip(drift_bounds(trajectory, np.full(6, 0.5)), constant))
    bounds = drift_bounds(trajectory, lr)
    assert np.allclose(bounds.sparse, 3 * 1 * 0.25 * 1.75, rtol=1e-5)  # L G sum eta rho
    assert np.allclose(bounds.gradient, [3 * 0.25 * 1.75, 0.25 * 1.75], rtol=1e-5)


def classes_on_a_sphere(seed=0, d=12):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(6, d)) / d**0.5
    x = np.repeat(means, 15, 0) + 0.3 * rng.normal(size=(90, d)) / d**0.5
    return torch.tensor(x / np.linalg.norm(x, axis=1, keepdims=True)), torch.arange(6).repeat_interleave(15)


@pytest.mark.parametrize("loss, lr", [("triplet", 0.3), ("dense", 0.02)])
def test_each_bound_is_not_smaller_than_the_one_before(loss, lr):
    x, y = classes_on_a_sphere()
    seen, index = y < 4, index_rows_by_class(y[y < 4])

    def sample_triplets(y, rows, u):
        return sample_dataset_triplets(index, rows, u)

    adapter = ReleasedEGA(12, hidden=8, gen=torch_generator(spawn_rngs(0).init)).double()
    recorder = TrajectoryRecorder(
        dataset_triplet_objective(0.2, index) if loss == "triplet" else pairwise_objective(supcon),
        x[~seen][::3],
        gen=torch.Generator().manual_seed(0),
        sample_triplets=sample_triplets if loss == "triplet" else None,
        margin=0.2,
        tol=1e-4,
    )
    sgd(adapter, recorder, x[seen], y[seen], rngs=spawn_rngs(0), lr=lr, steps=6, batch_size=64)
    trajectory = recorder.trajectory(adapter)
    bounds = drift_bounds(trajectory, lr)
    for lower, upper in zip(bounds[:-1], bounds[1:]):
        assert (lower <= upper * (1 + 1e-9)).all()
    assert np.allclose(bounds.steps, bounds.gradient) and (bounds.drift > 1e-3).all()


def test_norms_are_measured_at_the_given_steps():
    x, y = classes_on_a_sphere()

    def norms(every):
        adapter = ReleasedEGA(12, hidden=8, gen=torch_generator(spawn_rngs(0).init)).double()
        recorder = TrajectoryRecorder(
            pairwise_objective(supcon), x[60:64], gen=torch.Generator().manual_seed(0), every=every, tol=1e-7
        )
        return recorder.trajectory(sgd(adapter, recorder, x[:60], y[:60], rngs=spawn_rngs(0), lr=0.1, steps=8))

    sampled, full = norms({3, 7}).jacobian_norm, norms(1).jacobian_norm
    kept = full[[0, 0, 0, 3, 3, 3, 3, 7]]  # the first step is always measured
    assert np.allclose(sampled, kept, rtol=0.01) and not np.allclose(sampled, full, rtol=0.01)
    assert np.array_equal(norms(4).jacobian_norm, norms({4}).jacobian_norm)


@pytest.mark.parametrize("eps", [0.05, 0.5, 1.7])
def test_displacement_of_a_bounded_adapter_stays_within_eps(eps):
    "Gradient ascent on the displacement over the weights and the inputs, from large random weights."
    gen = torch_generator(spawn_rngs(5).init)
    adapter = BoundedDisplacementAdapter(ReleasedEGA(6, hidden=8, gen=gen), eps).double()
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn(p.shape, generator=gen, dtype=p.dtype))
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
    assert 0.85 * eps < worst <= eps + 1e-7  # nearly attained, never exceeded; eps is stored in float32
    assert torch.allclose(adapter(x).norm(dim=1), torch.ones(64, dtype=torch.float64))
