"as_adapter against matrices in float64 and the adapters' own transforms; folders, fingerprints, wrong objects."

import cranfield
import numpy as np
import pandas as pd
import pytest
import torch

from ega.data.arrays import InputError, normalize
from ega.estimator import EmbeddingAdapter
from ega.method.adapters import (
    AblatedEGA,
    BoundedDisplacementAdapter,
    LinearAdapter,
    LoRAAdapter,
    ReleasedEGA,
    adapter_fingerprint,
    save_adapter,
    transform,
)
from ega.method.closed_form import WCCN, LDAMap
from ega.method.interface import as_adapter, as_module, read_adapter, write_adapter

D, N = 24, 300


def unit(n, d=D, seed=0):
    return normalize(np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32))


def trained(f, by=0.1, seed=1):
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in f.parameters():
            p.add_(by * torch.randn(p.shape, generator=gen))
    return f.eval()


y = np.repeat(np.arange(30), N // 30)
x = normalize(unit(30, seed=5)[y] + 0.2 * unit(N, seed=6))
gen = torch.Generator().manual_seed(0)
NONLINEAR = trained(ReleasedEGA(D, hidden=32, gen=gen), 0.03)
LINEAR, AFFINE = trained(LinearAdapter(D)), trained(LinearAdapter(D, bias=True), seed=4)
WIDE = np.random.default_rng(3).normal(size=(40, D)).astype("f4")
ADAPTERS = {
    "linear": LINEAR,
    "lora": trained(LoRAAdapter(D, rank=4, gen=gen)),
    "white, linear": [WCCN(0.4).fit(x, y), LINEAR],
    "lda": LDAMap(9).fit(x, y),
    "wide": WIDE,
    "affine": AFFINE,
    "affine, linear": [AFFINE, LINEAR],
    "centred": WCCN(0.4, center=True).fit(normalize(x + 0.2), y),
}


def apply_own(adapter, rows):
    "The rows adapted by the adapters themselves."
    for step in adapter if isinstance(adapter, list) else [adapter]:
        if isinstance(step, np.ndarray):
            rows = normalize(rows @ step.T)
        else:
            rows = step.transform(rows) if hasattr(step, "transform") else transform(step, rows, device="cpu")
    return rows


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_equals_its_matrix_and_its_own_transform(kind):
    a = as_adapter(ADAPTERS[kind])
    z = x.astype("f8") @ a.matrix.astype("f8").T + (0 if a.offset is None else a.offset)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    assert (a.offset is not None) == (kind in ("affine", "affine, linear", "centred"))
    assert a.matrix.shape == (a.output_dim, a.input_dim)
    assert np.abs(a.transform(3 * x) - z).max() < 1e-6 and np.abs(apply_own(ADAPTERS[kind], x) - z).max() < 2e-6


@pytest.mark.parametrize("steps", ([NONLINEAR, LINEAR], [LINEAR, AFFINE]))
def test_other_lists_are_applied_in_order(steps):
    "l2(M l2(W x) + b) is no map l2(A x + c) of one matrix."
    a = as_adapter(steps)
    assert a.matrix is None and a.offset is None
    assert np.abs(a.transform(x) - apply_own(steps, x)).max() < 1e-6
    assert as_adapter([LINEAR, LinearAdapter(D, bias=True)]).matrix is not None  # an offset of 0


def test_fingerprints_tell_adapters_and_their_order_apart(tmp_path):
    path = save_adapter(NONLINEAR, tmp_path / "a.safetensors")
    assert as_adapter(path).fingerprint == as_adapter(NONLINEAR).fingerprint == adapter_fingerprint(NONLINEAR)
    kinds = (*ADAPTERS.values(), NONLINEAR, [LINEAR, ADAPTERS["white, linear"][0]])
    assert len({as_adapter(a).fingerprint for a in kinds}) == len(kinds)
    assert as_adapter([LINEAR]).fingerprint == as_adapter(as_adapter(LINEAR)).fingerprint == adapter_fingerprint(LINEAR)


def test_an_object_of_others_is_accepted():
    class Custom:
        d, dim, fingerprint = D, 3, "f" * 64

        def transform(self, rows):
            return normalize(rows[:, :3])

    a = as_adapter(Custom())
    assert (a.input_dim, a.output_dim) == (D, 3) and np.array_equal(a.transform(x), normalize(x[:, :3]))


@pytest.mark.parametrize(
    "bad",
    (None, "nowhere.safetensors", [], np.full((2, 2), np.nan), WCCN(0.5), [LINEAR, np.eye(3, dtype="f4")]),
)
def test_what_is_no_adapter_is_refused(bad):
    with pytest.raises(InputError):
        as_adapter(bad)


def test_only_the_identity_changes_nothing():
    assert as_adapter(np.eye(4, dtype="f4")).is_identity
    for other in (np.eye(2, 3, dtype="f4"), 2 * np.eye(3, dtype="f4"), LINEAR, NONLINEAR):
        assert not as_adapter(other).is_identity


@pytest.mark.parametrize("kind", (*ADAPTERS, "nonlinear"))
def test_an_adapter_is_written_and_read(tmp_path, kind):
    a = as_adapter(ADAPTERS.get(kind, NONLINEAR))
    write_adapter(a, tmp_path)
    again = read_adapter(tmp_path, a.fingerprint)
    assert np.array_equal(again.transform(x), a.transform(x)) and again.fingerprint == a.fingerprint
    assert read_adapter(tmp_path, a.fingerprint, ADAPTERS.get(kind, NONLINEAR)).fingerprint == a.fingerprint
    for other in (None, WIDE[:5]):
        with pytest.raises(InputError):
            read_adapter(tmp_path, "0" * 64, other)


def test_only_adapters_with_a_file_format_are_written(tmp_path):
    ablated = AblatedEGA(8, hidden=4, without=("residual",), gen=torch.Generator())
    for f in (ablated, BoundedDisplacementAdapter(ablated, 0.3)):
        assert write_adapter(as_adapter(f), tmp_path) == [] and not any(tmp_path.iterdir())
        with pytest.raises(InputError):
            read_adapter(tmp_path, as_adapter(f).fingerprint)
    bounded = BoundedDisplacementAdapter(ReleasedEGA(8, hidden=4, gen=torch.Generator()), 0.3)
    assert write_adapter(as_adapter(bounded), tmp_path) == ["adapter.safetensors"]


def test_an_adapter_of_pairs_has_two_sides(tmp_path):
    estimator = cranfield.fitted("two")
    estimator.save(tmp_path / "adapter")
    for given in (estimator, tmp_path / "adapter", str(tmp_path / "adapter" / "adapter.safetensors")):
        a = as_adapter(given)
        assert a.fingerprint == estimator.fingerprint_
        assert np.allclose(a.queries.transform(cranfield.XQ), estimator.transform_queries(cranfield.XQ), atol=1e-6)
        assert np.allclose(a.documents.transform(cranfield.XD), estimator.transform_documents(cranfield.XD), atol=1e-6)
        for one_map in (lambda: a.transform(cranfield.XQ), lambda: as_adapter([a]), lambda: as_module(a)):
            with pytest.raises(InputError):
                one_map()
    (tmp_path / "folder").mkdir()
    write_adapter(a, tmp_path / "folder")
    assert read_adapter(tmp_path / "folder", a.fingerprint).fingerprint == a.fingerprint
    queries, documents = (tmp_path / "adapter" / f"adapter.{side}.safetensors" for side in ("queries", "documents"))
    documents.write_bytes(queries.read_bytes())
    with pytest.raises(InputError):
        as_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("columns", ([f"f{i}" for i in range(D)], list(range(5, 5 + D))), ids=("texts", "integers"))
def test_columns_of_a_dataframe_must_be_those_of_fit(columns, tmp_path):
    frame = pd.DataFrame(x, columns=columns)
    estimator = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, y)
    a = as_adapter(estimator)
    write_adapter(a, tmp_path)
    read = read_adapter(tmp_path, a.fingerprint, columns=a.columns)
    for adapter in (a, read, as_adapter([estimator, LINEAR])):
        for rows in (frame, x, x.tolist(), pd.DataFrame(x)):  # an array and columns 0, 1, ... have no names
            assert np.array_equal(adapter.transform(rows), adapter.transform(x))
        with pytest.raises(InputError):
            adapter.transform(frame[columns[::-1]])
    for damaged in ("f0", ["f0"], ["f0"] * D, True):
        with pytest.raises(InputError):
            read_adapter(tmp_path, a.fingerprint, columns=damaged)
