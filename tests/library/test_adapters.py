"Adapters: identity at the start, references, gradients, seeds, merging, interpolation, files, transform."

import copy
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from ega.data.arrays import InputError, normalize
from ega.data.runtime import spawn_rngs, torch_generator
from ega.method.adapters import (
    AblatedEGA,
    BoundedDisplacementAdapter,
    LinearAdapter,
    LoRAAdapter,
    PaperEGA,
    ReleasedEGA,
    adapter_fingerprint,
    interpolate,
    l2_normalize,
    load_adapter,
    merge_linear,
    save_adapter,
    scale_residual,
    transform,
)
from ega.method.losses import triplet
from ega.testing import circle_points

KINDS = ("PaperEGA", "ReleasedEGA", "LoRAAdapter", "LinearAdapter")


def make(kind, d, seed=0, hidden=32, rank=None):
    gen = torch_generator(spawn_rngs(seed).init)
    return {
        "PaperEGA": lambda: PaperEGA(d, hidden=hidden, gen=gen),
        "ReleasedEGA": lambda: ReleasedEGA(d, hidden=hidden, gen=gen),
        "LoRAAdapter": lambda: LoRAAdapter(d, rank=rank or min(4, d), gen=gen),
        "LinearAdapter": lambda: LinearAdapter(d, gen=gen),
    }[kind]()


def rows(n, d, seed=0):
    return torch.from_numpy(normalize(np.random.default_rng(seed).normal(size=(n, d))))


def trained(adapter, size=0.1, seed=9):
    "The adapter with every weight moved, as training would."
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(size * torch.randn(p.shape, generator=gen, dtype=p.dtype))
    return adapter


# the start


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", (1, 2, 7, 384, 514, 1152))
def test_identity_at_start(kind, d):
    "max |f(x) - x| <= 1e-6 in float32, also for norms off by 5e-7; a norm off by 1e-3 is corrected."
    x = rows(64, d)
    for seed in (0, 1):
        f = make(kind, d, seed)
        for v in (x, x * (1 + 5e-7), x * (1 - 5e-7)):
            assert (f(v) - v).abs().max() <= 1e-6
        assert (f(1.001 * x) - x).abs().max() <= 1e-6
        assert torch.allclose(f(x.view(4, 16, d)).view(64, d), x, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_weights(kind):
    "Same seed, same bits; another seed, other bits; the global generators are untouched."
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    a, b, c = make(kind, 20, 1), make(kind, 20, 1), make(kind, 20, 2)
    assert torch.equal(torch_state, torch.get_rng_state()) and (numpy_state == np.random.get_state()[1]).all()
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    assert kind == "LinearAdapter" or not all(map(torch.equal, a.parameters(), c.parameters()))


def test_lora_initial_weights_are_kaiming_uniform():
    "A is kaiming_uniform with a = sqrt 5, the first weights of the released LoRA; B is 0."
    ours, theirs = LoRAAdapter(50, rank=9, gen=torch.Generator().manual_seed(4)), torch.empty(9, 50)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        nn.init.kaiming_uniform_(theirs, a=5**0.5)
    assert torch.allclose(ours.A, theirs, atol=1e-7) and not ours.B.any() and ours.B.shape == (50, 9)


# the maps


def test_paper_ega_equals_plain_matrix_products():
    "The formula of the paper written with matrix products, all weights non-zero."
    f, x = trained(make("PaperEGA", 10, hidden=6)).double(), rows(5, 10).double()

    def gelu(v):
        return v * 0.5 * (1 + torch.erf(v / 2**0.5))

    u = x
    for k in (0, 1):
        w = {n.removeprefix(f"blocks.{k}."): p for n, p in f.named_parameters() if n.startswith(f"blocks.{k}.")}
        assert w["gate.0.weight"].shape == (3, 10) and len(w) == 8  # ceil(10/4) = 3, no gate bias
        h = u @ w["branch.0.weight"].T + w["branch.0.bias"]
        h = (h - h.mean(1, keepdim=True)) / (h.var(1, unbiased=False, keepdim=True) + 1e-5) ** 0.5
        h = gelu(h * w["branch.1.weight"] + w["branch.1.bias"])
        g = h @ w["branch.3.weight"].T + w["branch.3.bias"]
        c = gelu(g @ w["gate.0.weight"].T)
        u = u + g / (1 + torch.exp(-(c @ w["gate.2.weight"].T)))
    u = u + u @ f.refine.weight.T + f.refine.bias
    expected = u / (u * u).sum(1, keepdim=True) ** 0.5
    assert (f(x) - expected).abs().max() < 1e-12


class Released(nn.Module):
    "The released module (hpdic/EGA, models/ega_mlp.py), kept as the reference."

    def __init__(self, d, h):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.LayerNorm(h), nn.GELU(), nn.Linear(h, d))
        nn.init.zeros_(self.net[3].weight)
        nn.init.zeros_(self.net[3].bias)

    def forward(self, x):
        return F.normalize(x + self.net(x), p=2, dim=1)


def test_released_ega_equals_the_released_module():
    "From one seed both have the same initial weights, and equal values and gradients after a change of all weights."
    with torch.random.fork_rng():
        torch.manual_seed(5)
        theirs = Released(12, 20)
    ours = ReleasedEGA(12, hidden=20, gen=torch.Generator().manual_seed(5))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-7)  # bound computed in another order
    ours.branch.load_state_dict(theirs.net.state_dict())
    trained(ours), trained(theirs)
    x, target = rows(8, 12), rows(8, 12, 1)
    for f in (ours, theirs):
        ((f(x) - target) ** 2).sum().backward()
    assert torch.equal(ours(x), theirs(x))
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)  # float32, sums in another order


@pytest.mark.parametrize("onednn", (True, False))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_active", (0, 3, 70, 150))
def test_training_gradients_equal_those_of_autograd_in_float32(kind, n_active, onednn, monkeypatch):
    "At sizes where oneDNN is used; also in a second backward pass through the same graph."
    if not onednn:
        monkeypatch.setattr("ega.data.runtime._onednn_linear", lambda: None)
    adapter, x = trained(make(kind, 96, hidden=80, rank=64), 0.05), rows(150, 96).requires_grad_()
    found = {}
    for training in (True, False):
        z = adapter.train(training)(x)
        loss, weights = ((z - x.detach().roll(1, 0))[:n_active] ** 2).sum(), (x, *adapter.parameters())
        found[training] = torch.autograd.grad(loss, weights, retain_graph=True)
        assert all(map(torch.equal, found[training], torch.autograd.grad(loss, weights)))
        assert torch.allclose(z.detach(), adapter.eval()(x.detach()), atol=1e-6)
    for ours, theirs in zip(found[True], found[False]):
        assert (ours - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("kind", KINDS)
def test_training_step_in_other_types(kind, dtype):
    adapter, x = trained(make(kind, 96, hidden=80, rank=64), 0.05).to(dtype).train(), rows(70, 96).to(dtype)
    z = adapter(x)
    ((z - x.roll(1, 0)) ** 2).sum().backward()
    assert z.dtype == dtype and all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in adapter.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_differences(kind):
    f = trained(make(kind, 5, hidden=4, rank=2)).double()
    x = rows(3, 5).double().requires_grad_()
    names = [k for k, _ in f.named_parameters()]
    values = tuple(p.detach().requires_grad_() for p in f.parameters())

    def call(x, *ws):
        return torch.func.functional_call(f, dict(zip(names, ws)), (x,))

    assert torch.autograd.gradcheck(call, (x, *values))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_independent_and_unit(kind):
    "Permuting, dropping or vmapping rows changes nothing for the others (LayerNorm, not BatchNorm)."
    f, x = trained(make(kind, 32)), rows(40, 32)
    z, order = f(x), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(z.norm(dim=1), torch.ones(40), atol=1e-6)
    assert torch.allclose(f(x[order]), z[order], atol=1e-6) and torch.allclose(f(x[3:4]), z[3:4], atol=1e-6)
    assert torch.allclose(torch.func.vmap(f)(x), z, atol=1e-6)
    assert torch.equal(f.train()(x), f.eval()(x))  # no dropout, no running statistics


def test_ablated_ega_lacks_each_named_part():
    x = rows(20, 9)

    def make(*without):
        return AblatedEGA(9, hidden=6, without=without, gen=torch.Generator().manual_seed(5))

    whole = ReleasedEGA(9, hidden=6, gen=torch.Generator().manual_seed(5))
    assert torch.equal(trained(make())(x), trained(whole)(x))
    assert torch.equal(make("residual")(x), torch.zeros_like(x))  # all rows start at 0
    drawn, free = make("residual", "zero_init"), trained(make("sphere"))
    assert torch.allclose(drawn(x), l2_normalize(drawn.branch(x))) and (drawn(x) - x).norm(dim=1).min() > 0.1
    assert torch.allclose(free(x), x + free.branch(x)) and (free(x).norm(dim=1) - 1).abs().max() > 1e-3
    assert (make("zero_init")(x) - x).norm(dim=1).min() > 1e-2


def test_ablation_without_residual_collapses_to_two_points():
    x, f = rows(60, 8), AblatedEGA(8, hidden=16, without=("residual",), gen=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(f.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        triplet(f(x[:20]), f(x[20:40]), f(x[40:])).backward()
        optimizer.step()
    z = f.eval()(x).detach()
    assert torch.allclose(z.abs(), torch.full_like(z, 8**-0.5), atol=1e-4) and (z.std(1) < 1e-4).all()


# strength and merging


def test_interpolate_ends_arc_and_array_types():
    x, z = (l2_normalize(rows(30, 5, seed).double()).numpy() for seed in (0, 1))
    assert np.allclose(interpolate(x, z, 0), x, atol=1e-15) and np.allclose(interpolate(x, z, 1), z, atol=1e-15)
    mid = interpolate(x, z, 0.3)
    assert np.allclose(mid, interpolate(torch.tensor(x), torch.tensor(z), 0.3).numpy(), atol=1e-15)

    def angle(u, v):
        return np.arccos((u * v).sum(1).clip(-1, 1))

    assert np.allclose(angle(x, mid) + angle(mid, z), angle(x, z), atol=1e-7)  # arccos loses half the digits near 1
    assert np.allclose(mid, interpolate(z, x, 0.7), atol=1e-15)
    assert interpolate(x.astype("f4"), z.astype("f4"), 0.5).dtype == np.float32


@pytest.mark.parametrize("k", [3, 6])
def test_centred_closed_form_becomes_one_adapter_with_a_bias(k, tmp_path):
    rng = np.random.default_rng(0)
    x, matrix, mean = normalize(rng.normal(size=(40, 6)) + 1), rng.normal(size=(6, k)), rng.normal(size=6)
    trained_on_u, u = trained(LinearAdapter(k)), normalize((x - mean) @ matrix)
    for adapter, expected in ((None, u), (trained_on_u, transform(trained_on_u, u, device="cpu"))):
        merged = merge_linear(matrix, adapter, mean=mean, x=x)
        z = transform(merged, x, device="cpu")
        assert merged.bias and np.abs(z[:, :k] - expected).max() < 1e-5 and not z[:, k:].any()
        if adapter is None:  # the scale is that of the closed form, also of what was trained on it
            inner = (torch.from_numpy(x) @ merged.as_matrix().T + merged.offset).detach()
            assert abs(inner.norm(dim=1).mean() - 1) < 1e-5
        loaded = load_adapter(save_adapter(merged, tmp_path / "f.safetensors"))
        assert loaded.bias and np.array_equal(transform(loaded, x, device="cpu"), z)


def test_scale_residual_scales_the_offset_too():
    x, adapter = rows(9, 5), trained(LinearAdapter(5, bias=True))
    expected = l2_normalize(x + 0.5 * (x @ adapter.weight.T + adapter.offset))
    assert torch.allclose(scale_residual(adapter, 0.5)(x), expected, atol=1e-6)
    assert torch.equal(scale_residual(adapter, 0.0)(x), l2_normalize(x))


def test_the_zero_vector_and_nested_blocks_are_refused():
    with pytest.raises(InputError):
        interpolate(circle_points(10), circle_points(190), 0.5)
    with pytest.raises(InputError):
        scale_residual(make("PaperEGA", 4), 0.5)


# transform


@pytest.mark.parametrize("kind", KINDS)
def test_transform(kind):
    "Equal to the module called directly; batch size, memory layout and adapter dtype do not matter."
    f, x = trained(make(kind, 18)), rows(101, 18).numpy()
    z = transform(f, x, device="cpu")
    assert z.dtype == np.float32 and np.allclose(z, f(torch.from_numpy(x)).detach().numpy(), atol=1e-6)
    for batch in (1, 7, 100, 101, 5000):
        assert np.allclose(z, transform(f, x, batch_size=batch, device="cpu"), atol=1e-6)
    assert np.allclose(z, transform(f, np.asfortranarray(x), device="cpu"), atol=1e-6)
    assert np.allclose(z, transform(copy.deepcopy(f).double(), x, device="cpu"), atol=1e-6)


def test_transform_runs_in_eval_mode_and_changes_neither_adapter_nor_input():
    class Noisy(LinearAdapter):
        def forward(self, x):
            return l2_normalize(F.dropout(super().forward(x), 0.5, self.training))

    f, x, state = Noisy(6).train(), rows(20, 6).numpy(), torch.get_rng_state()
    x.flags.writeable = False  # memory maps are read-only
    z = transform(f, x, device="cpu")
    assert np.allclose(z, x, atol=1e-6) and z.flags.writeable and not np.shares_memory(x, z)
    assert f.training and f.weight.requires_grad and f.weight.grad is None and not f.weight.any()
    assert torch.is_grad_enabled() and torch.equal(state, torch.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("kind", KINDS)
def test_transform_on_cuda(kind):
    f, x = trained(make(kind, 64)), rows(500, 64).numpy()
    assert np.allclose(transform(f, x), transform(f, x, device="cpu"), atol=1e-5)  # another order of sums
    assert next(f.parameters()).device.type == "cpu"


# files


@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_save_and_load_return_the_same_bits(tmp_path, kind, dtype, bounded):
    f, path, x = trained(make(kind, 18)), tmp_path / "f.safetensors", rows(9, 18).numpy()
    f = (BoundedDisplacementAdapter(f, 0.3) if bounded else f).to(dtype)
    g = load_adapter(save_adapter(f, path))
    assert type(g) is type(f) and g.d == 18 and not g.training and all(p.requires_grad for p in g.parameters())
    assert {k: v.dtype for k, v in g.state_dict().items()} == {k: v.dtype for k, v in f.state_dict().items()}
    assert np.array_equal(transform(f, x), transform(g, x)) and adapter_fingerprint(f) == adapter_fingerprint(g)
    before = path.read_bytes()
    assert save_adapter(g, path).read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
    path.write_bytes(b"")  # a memory map would now be a bus error
    assert np.array_equal(transform(f, x), transform(g, x))


def test_fingerprint_depends_on_class_sizes_and_weights():
    made = [
        trained(make("LoRAAdapter", 18)),
        trained(make("LoRAAdapter", 18), seed=3),
        trained(make("LoRAAdapter", 18, rank=3)),
        LoRAAdapter(18, rank=4, scale=3.0, gen=torch.Generator()),
        *(make("LinearAdapter", d) for d in (18, 17)),
        *(BoundedDisplacementAdapter(make("LinearAdapter", 18), bound) for bound in (0.3, 0.4)),
    ]
    assert len({adapter_fingerprint(f) for f in made}) == len(made)
    assert adapter_fingerprint(copy.deepcopy(made[0]).train()) == adapter_fingerprint(made[0])


class OtherModule(nn.Linear):
    d, hidden = 4, 4  # the attributes of ReleasedEGA


@pytest.mark.parametrize(
    "adapter",
    [nn.Linear(4, 4), BoundedDisplacementAdapter(OtherModule(4, 4), 0.1), trained(LinearAdapter(4), float("nan"))],
    ids=["class", "class within a bound", "NaN"],
)
def test_save_refuses_what_load_could_not_restore(tmp_path, adapter):
    with pytest.raises(InputError):
        save_adapter(adapter, tmp_path / "f.safetensors")
    assert not any(tmp_path.iterdir())


def test_save_does_not_replace_another_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    with pytest.raises(InputError):
        save_adapter(make("LinearAdapter", 4), path)
    assert path.read_text() == "notes"


def damage(path, *, about=None, state=None, drop=(), raw=None):
    "Give an adapter file other metadata, other tensors, or other bytes."
    if raw is not None:
        path.write_bytes(raw(path.read_bytes()))
        return
    with safe_open(path, "pt") as f:
        old, tensors = json.loads(f.metadata()["ega"]), {k: f.get_tensor(k).clone() for k in f.keys()}
    tensors = {k: v for k, v in (tensors | (state or {})).items() if k not in drop}
    save_file(tensors, path, {"ega": json.dumps(old | (about or {}))})


NESTED = {"inner": {"kind": "BoundedDisplacementAdapter", "sizes": {}}}


@pytest.mark.parametrize(
    "change",
    [
        dict(raw=lambda b: b""),
        dict(raw=lambda b: b[:-1]),
        dict(raw=lambda b: b[:-4] + np.float32(0.5).tobytes()),
        dict(about={"kind": "MLP"}),
        dict(about={"kind": "LinearAdapter"}),
        dict(about={"sizes": {"d": 10**12, "rank": 4, "scale": 2.0}}),
        dict(about={"sizes": {"d": -1, "rank": 4, "scale": 2.0}}),
        dict(about={"sizes": {"d": 18, "rank": 4, "scale": 3.0}}),
        dict(about={"kind": "BoundedDisplacementAdapter", "sizes": NESTED}),
        dict(about={"fingerprint": 7}),
        dict(drop=["A"]),
        dict(state={"C": torch.zeros(2)}),
        dict(state={"A": torch.zeros(4, 18, dtype=torch.int64)}),
        dict(state={"A": torch.zeros(4, 18, dtype=torch.float64)}),
    ],
)
def test_load_refuses_damaged_files(tmp_path, change):
    damage(save_adapter(make("LoRAAdapter", 18), tmp_path / "f.safetensors"), **change)
    with pytest.raises(InputError):
        load_adapter(tmp_path / "f.safetensors")


def test_load_refuses_another_bound_missing_files_and_pickles(tmp_path):
    path = save_adapter(BoundedDisplacementAdapter(make("LinearAdapter", 18), 0.3), tmp_path / "bound.safetensors")
    damage(path, state={"max_displacement": torch.tensor(0.2)})
    torch.save(make("LoRAAdapter", 18), tmp_path / "pickle")
    for name in ("bound.safetensors", "none", "pickle", "."):
        with pytest.raises(InputError):
            load_adapter(tmp_path / name)
