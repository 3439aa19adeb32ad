"AdaptedIndex and IndexStore against transform-then-search; saving, migration, distillation, query-only search."

import json
import pickle
import time
import warnings
from pathlib import Path

import cranfield
import numpy as np
import pandas as pd
import pytest
import sklearn.decomposition
import torch

from ega.data.arrays import InputError, normalize
from ega.data.packs import EmbeddingSet, write_pack
from ega.deploy import index as module
from ega.deploy.index import (
    AdaptedIndex,
    IndexStore,
    SentenceAdapter,
    as_search_transforms,
    as_transform,
    distill,
    fit_query_only,
    load_transform,
    map_queries_only,
    mapped_norms,
    rescale_for_query_only,
    save_transform,
    to_pretransform,
)
from ega.estimator import EmbeddingAdapter
from ega.measure.search import knn
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
from ega.testing import error_message

faiss = pytest.importorskip("faiss", reason="ega.deploy.index needs FAISS: pip install 'ega[cpu]'")
D, N = 24, 900


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
xq = normalize(x[::9] + 0.1 * unit(100, seed=7))
gen = torch.Generator().manual_seed(0)
NONLINEAR = trained(ReleasedEGA(D, hidden=32, gen=gen), 0.03)
LINEAR, AFFINE = trained(LinearAdapter(D)), trained(LinearAdapter(D, bias=True), seed=4)
ADAPTERS = {
    "linear": LINEAR,
    "lora": trained(LoRAAdapter(D, rank=4, gen=gen)),
    "white, linear": [WCCN(0.4).fit(x, y), LINEAR],
    "lda": LDAMap(9).fit(x, y),
    "wide": np.random.default_rng(3).normal(size=(40, D)).astype("f4"),
    "affine": AFFINE,
    "affine, linear": [AFFINE, LINEAR],
    "centred": WCCN(0.4, center=True).fit(normalize(x + 0.2), y),
}
FACTORIES = {"Flat": {}, "IVF12,Flat": {"nprobe": 5}, "HNSW8": {"efSearch": 40}, "IVF12,SQ8": {"nprobe": 12}}


# -- transforms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ADAPTERS)
def test_transform_equals_its_matrix(kind):
    "Compared with the matrix and the offset in float64, and with the adapter's own transform."
    m, a = as_transform(ADAPTERS[kind]), ADAPTERS[kind]
    z = x.astype("f8") @ m.matrix.astype("f8").T + (0 if m.offset is None else m.offset)
    assert (m.offset is not None) == (kind in ("affine", "affine, linear", "centred"))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    expected = (
        a.transform(x)
        if hasattr(a, "transform")
        else transform(a, x, device="cpu")
        if isinstance(a, torch.nn.Module)
        else transform(a[1], as_transform(a[0]).transform(x), device="cpu")
        if isinstance(a, list)
        else None
    )
    assert (
        np.abs(m.transform(x) - z).max() < 1e-6
        and m.matrix.shape == (m.output_dim, m.input_dim)
        and (expected is None or np.abs(expected - z).max() < 2e-6)
    )


def test_fingerprint_depends_on_weights_and_order(tmp_path):
    save_adapter(NONLINEAR, tmp_path / "a.safetensors")
    assert as_transform(LINEAR).fingerprint == adapter_fingerprint(LINEAR) and as_transform(
        tmp_path / "a.safetensors"
    ).fingerprint == as_transform(NONLINEAR).fingerprint == adapter_fingerprint(NONLINEAR)
    assert (
        len(
            {
                as_transform(a).fingerprint
                for a in (*ADAPTERS.values(), NONLINEAR, [LINEAR, ADAPTERS["white, linear"][0]])
            }
        )
        == 10
    )  # order counts
    assert (
        as_transform([LINEAR]).fingerprint == as_transform(LINEAR).fingerprint
        and as_transform(as_transform(LINEAR)) is not None
    )


def test_nonlinear_chain_is_applied_in_order():
    m = as_transform([NONLINEAR, LINEAR])
    assert m.matrix is None and np.array_equal(
        m.transform(x), as_transform(LINEAR).transform(transform(NONLINEAR, x, device="cpu"))
    )


def test_a_later_adapter_with_an_offset_is_applied_after_the_normalisation():
    "l2(M l2(W x) + b) is no map l2(A x + c) of one matrix, unless the offset is 0."
    m = as_transform([LINEAR, AFFINE])
    z = transform(AFFINE, transform(LINEAR, x, device="cpu"), device="cpu")
    assert m.matrix is None and m.offset is None and np.abs(m.transform(x) - z).max() < 1e-6
    assert "linear or affine" in error_message(lambda: to_pretransform(m, faiss.IndexFlatL2(D)))
    assert as_transform([LINEAR, LinearAdapter(D, bias=True)]).matrix is not None


def test_estimator_and_custom_object_are_accepted():
    class Estimator:
        adapter_ = LINEAR

    class CustomAdapter:
        d, dim, fingerprint = D, 3, "f" * 64

        def transform(self, rows):
            return normalize(rows[:, :3])

    assert as_transform(Estimator()).fingerprint == as_transform(LINEAR).fingerprint
    i = AdaptedIndex(CustomAdapter()).add(x)
    assert np.array_equal(i.search(xq, 3).I, knn(normalize(xq[:, :3]), normalize(x[:, :3]), 3).I)


@pytest.mark.parametrize(
    "bad", (None, "nowhere.safetensors", [], 3.0, np.full((2, 2), np.nan), WCCN(0.5), [LINEAR, np.eye(3, dtype="f4")])
)
def test_as_transform_refuses_what_is_no_adapter(bad):
    with pytest.raises(InputError):
        as_transform(bad)


@pytest.mark.parametrize("kind", (*ADAPTERS, "nonlinear"))
def test_transform_is_saved_and_loaded(tmp_path, kind):
    m = as_transform(ADAPTERS.get(kind, NONLINEAR))
    save_transform(m, tmp_path)
    again = load_transform(tmp_path, m.fingerprint)
    assert (
        np.array_equal(again.transform(x), m.transform(x))
        and again.fingerprint == m.fingerprint
        and load_transform(tmp_path, m.fingerprint, ADAPTERS.get(kind, NONLINEAR)) is not None
    )
    assert "expected the adapter with fingerprint" in error_message(lambda: load_transform(tmp_path, "0" * 64))


def test_load_transform_refuses_changed_matrix_or_offset(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    m, path = as_transform(AFFINE), tmp_path / "matrix.safetensors"
    assert save_transform(m, tmp_path) == [path.name]
    with safe_open(path, "np") as f:
        tensors, about = load_file(path), f.metadata()
    A, b = tensors["matrix"], tensors["offset"]
    for changed, words in (
        ({"matrix": A + np.float32(1e-3), "offset": b}, "changed after it was saved"),
        ({"matrix": A, "offset": b + np.float32(1e-3)}, "changed after it was saved"),
        ({"matrix": A}, "changed after it was saved"),
        ({"matrix": A, "offset": b[:5]}, "offset must have 24 columns"),
        ({"matrix": A, "offset": np.nan * b}, "offset has NaN"),
        ({"offset": b}, "cannot be read"),
    ):
        save_file(changed, path, about)
        assert words in error_message(lambda: load_transform(tmp_path, m.fingerprint)), list(changed)
    path.write_bytes(b"junk")
    assert "cannot be read" in error_message(lambda: load_transform(tmp_path, m.fingerprint))


# -- AdaptedIndex ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("kind", ("linear", "lda", "affine", "nonlinear"))
def test_search_equals_transform_then_search(factory, kind):
    "The reference is a FAISS index of embeddings adapted beforehand; the batch size does not change the result."
    a = ADAPTERS.get(kind, NONLINEAR)
    m = as_transform(a)
    z, zq = m.transform(x), m.transform(xq)
    oracle = faiss.index_factory(m.output_dim, factory)
    oracle.train(z)
    oracle.add(z)
    for name, value in FACTORIES[factory].items():
        faiss.ParameterSpace().set_index_parameter(oracle, name, value)
    mine = (
        AdaptedIndex(a, factory).tune(**FACTORIES[factory]).add(x[:600], batch_size=77).add(x[600:])
        if factory == "Flat"
        else AdaptedIndex(a, factory).tune(**FACTORIES[factory]).add(x, batch_size=len(x))
    )
    D_, I_ = oracle.search(zq, 7)
    found = mine.search(xq, 7)
    assert np.array_equal(found.I, I_) and np.allclose(found.D, D_, atol=1e-6) and len(mine) == N


def test_add_in_small_batches_from_memory_map(tmp_path):
    np.save(tmp_path / "x.npy", x)
    whole, pieces = (
        AdaptedIndex(LINEAR).add(x),
        AdaptedIndex(LINEAR)
        .add(np.load(tmp_path / "x.npy", mmap_mode="r"), batch_size=64)
        .add(torch.from_numpy(x[:3])),
    )
    assert len(pieces) == N + 3 and np.allclose(whole.search(xq, 1).D, pieces.search(xq, 1).D, atol=1e-6)


@pytest.mark.parametrize(
    "ids", (np.arange(N) * 7 + 10**12, [f"ü/{i}" for i in range(N)], np.arange(N).astype(object).astype(str))
)
def test_ids_are_returned_and_saved(tmp_path, ids):
    i = AdaptedIndex(LINEAR, "Flat").add(x, ids)
    rows = knn(as_transform(LINEAR).transform(xq), as_transform(LINEAR).transform(x), 4).I
    assert (i.search(xq, 4).I == np.asarray(ids)[rows]).all()
    again = AdaptedIndex.load(i.save(tmp_path / "i"))
    assert (again.search(xq, 4).I == i.search(xq, 4).I).all() and again.ids.dtype == i.ids.dtype


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_an_index_survives_pickle(kind):
    adapter = (LINEAR, [LINEAR, LINEAR], ReleasedEGA(D, hidden=4, gen=torch.Generator().manual_seed(0)).eval())[kind]
    index = AdaptedIndex(adapter).add(x)
    again = pickle.loads(pickle.dumps(index))
    for a, b in zip(index.search(xq, 3), again.search(xq, 3)):
        assert np.array_equal(a, b)


def test_missing_neighbours_are_padded():
    probed = AdaptedIndex(LINEAR, "IVF100,Flat").tune(nprobe=1)
    texts = AdaptedIndex(LINEAR, "IVF100,Flat").tune(nprobe=1).add(x, [f"{i}" for i in range(N)])
    for i, missing_id in ((probed.add(x), -1), (texts, "")):
        found = i.search(xq, 200)  # one list has fewer rows
        assert (found.I[:, -1] == missing_id).all() and np.isinf(found.D[:, -1]).all()
    found = AdaptedIndex(LINEAR).search(xq, 2)
    assert found.I.tolist() == [[-1]] * len(xq) and np.isinf(found.D).all()


@pytest.mark.parametrize("k", (3, 10**12))
def test_no_more_neighbours_than_rows_are_returned(k):
    found, expected = AdaptedIndex(LINEAR).add(x[:2], ["a", "b"]).search(xq, k), exact_of_two()
    assert np.array_equal(found.I, np.array(["a", "b"])[expected.I]) and np.abs(found.D - expected.D).max() < 1e-5


def exact_of_two():
    m = as_transform(LINEAR)
    return knn(m.transform(xq), m.transform(x[:2]), 2)


@pytest.mark.parametrize("bad", (np.nan, 0.0))
@pytest.mark.parametrize("factory", ("Flat", "IVF4,Flat"))
def test_a_refused_add_adds_and_trains_nothing(factory, bad):
    rows = x.copy()
    rows[500] = bad
    i = AdaptedIndex(LINEAR, factory)
    assert "row 500 of x" in error_message(lambda: i.add(rows, batch_size=77))
    assert len(i) == 0 and i.index.is_trained == (factory == "Flat")
    i.add(x, batch_size=77)
    assert len(i) == len(i.ids) == N


def test_an_interrupted_add_is_reported_by_later_calls(tmp_path):
    class Interrupted:
        d, fingerprint, calls = D, "interrupted", 0

        def transform(self, rows):
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return rows

    i = AdaptedIndex(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        i.add(x, batch_size=77)
    for call in (lambda: i.search(xq, 1), lambda: i.add(x), lambda: i.save(tmp_path / "i")):
        assert "154 rows, but 0 ids" in error_message(call)
    assert not (tmp_path / "i").exists()


def named(rows, kind="texts"):
    return pd.DataFrame(rows, columns=[f"f{i}" for i in range(D)] if kind == "texts" else range(5, 5 + D))


@pytest.fixture(scope="module", params=("texts", "integers"))
def fitted_on_names(request):
    "An estimator that was fitted on a DataFrame, the DataFrame, and its columns in the order of another."
    frame = named(x, request.param)
    return EmbeddingAdapter("wccn", max_unseen_loss=None).fit(frame, y), frame, frame[frame.columns[::-1]]


def test_an_index_checks_the_columns_of_a_dataframe_as_transform_does(fitted_on_names, tmp_path):
    e, frame, moved = fitted_on_names
    index = AdaptedIndex(e).add(frame)
    message = error_message(lambda: e.transform(moved))
    loaded = AdaptedIndex.load(index.save(tmp_path / "i"))
    passed = AdaptedIndex.load(tmp_path / "i", e.adapter_)
    chained = AdaptedIndex([e, LINEAR]).add(frame)
    for i in (index, loaded, passed, chained, AdaptedIndex(pickle.loads(pickle.dumps(index.adapter))).add(x)):
        for call in (i.search, i.add):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert error_message(lambda: call(moved)) == message and len(i) == N
        for rows in (frame, x, x.tolist(), pd.DataFrame(x)):  # an array and columns 0, 1, ... have no names
            assert (i.search(rows, 1).I[:, 0] == np.arange(N)).mean() > 0.99
    other = frame.rename(columns={"f0": "other"})
    if isinstance(frame.columns[0], str):  # integers that are not those of fit are no names, as in transform
        assert error_message(lambda: index.search(other)) == error_message(lambda: e.transform(other))
    assert len(loaded.add(e.transform(moved.iloc[:, ::-1]), np.arange(N, 2 * N), adapted_by=e.fingerprint_)) == 2 * N


def test_other_functions_of_raw_rows_check_the_columns(fitted_on_names):
    e, frame, moved = fitted_on_names
    message, rng = error_message(lambda: e.transform(moved)), np.random.default_rng(0)
    for call in (
        lambda rows: distill(e, rows, rng),
        lambda rows: fit_query_only(e, rows, rng),
        lambda rows: map_queries_only(rows, e),
        lambda rows: rescale_for_query_only(rows, e),
        lambda rows: mapped_norms(rows, e),
    ):
        call(frame)
        assert error_message(lambda: call(moved)) == message


@pytest.mark.parametrize("columns", ("f0", {}, [], ["f0"], [["f0"]] * D, ["f0"] * D, [1.5] * D, ["a", *range(1, D)]))
def test_damaged_names_of_columns_are_refused(fitted_on_names, tmp_path, columns):
    about = AdaptedIndex(fitted_on_names[0]).add(x[:9]).save(tmp_path / "i") / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"columns": columns}))
    with pytest.raises(InputError, match=f"about.json: columns must be {D} distinct texts or integers"):
        AdaptedIndex.load(tmp_path / "i")
    about.write_text(json.dumps({k: v for k, v in json.loads(about.read_text()).items() if k != "columns"}))
    assert AdaptedIndex.load(tmp_path / "i").adapter.documents.columns is None


def test_embeddings_of_another_adapter_are_refused():
    i, other = AdaptedIndex(LINEAR).add(x), as_transform(NONLINEAR)
    for call in (
        lambda: i.add(x, adapted_by=other.fingerprint),
        lambda: i.search(xq, adapted_by=other.fingerprint),
        lambda: to_pretransform(ADAPTERS["lora"], i),
    ):
        assert "adapted by" in error_message(call) and len(i) == N
    z = as_transform(LINEAR).transform(xq)
    assert np.array_equal(i.search(z, 3, adapted_by=i.fingerprint).I, i.search(xq, 3).I) and len(
        i.add(z, adapted_by=i.fingerprint)
    ) == N + len(xq)


NEAR = np.eye(D, dtype="f4")


def filled_with_ids(factory):
    index = faiss.index_factory(D, factory)
    index.train(x)
    index.add_with_ids(x, np.arange(N)[::-1] + 7)
    return index


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: AdaptedIndex(LINEAR, faiss.IndexFlatL2(D + 1)), "columns"),
        (lambda: AdaptedIndex(LINEAR, faiss.IndexFlatIP(D)), "METRIC_L2"),
        (lambda: AdaptedIndex(LINEAR).add(x[:, :3]), "columns|shape"),
        (lambda: AdaptedIndex(LINEAR).add(0 * x), "rows of norm 0"),
        (lambda: AdaptedIndex(LINEAR).add(np.nan * x), "NaN"),
        (lambda: AdaptedIndex(LINEAR).add(x).search(xq, 0), "k must"),
        (lambda: AdaptedIndex(LINEAR).add(x).search(xq, 2.5), "k must be an integer"),
        (lambda: AdaptedIndex(LINEAR, "Flut"), "factory string .*'Flut'; FAISS says: could not parse"),
        (lambda: AdaptedIndex(LINEAR).tune(nprobe=3), "nprobe must be a search parameter of IndexFlat"),
        (
            lambda: AdaptedIndex(LINEAR, f"IVF{N + 1},Flat").add(x),
            f"{N} rows cannot train this index.*FAISS says: Number of training points",
        ),
        (lambda: AdaptedIndex(LINEAR).add(x, np.zeros(N, int)), "distinct"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], ["a", "b"]).add(x[2:4]), "must be given"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], ["a", "b"]).add(x[2:4], [1, 2]), "texts"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [-1, 2]), ">= 0"),
        (lambda: AdaptedIndex(LINEAR).add(x, [1]), "ids must be"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [1, 2**63]), "at most 9223372036854775807, got 9223372036854775808"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [-1, 2**63]), "at most 9223372036854775807, got 9223372036854775808"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [1, 2**70]), f"at most 9223372036854775807, got {2**70}"),
        (lambda: AdaptedIndex(LINEAR).add(x[:1], np.array([2**64 - 1], "u8")), f"got {2**64 - 1}"),
        (
            lambda: AdaptedIndex(LINEAR).add(x[:2], (i for i in "ab")),
            "2 integers or texts in an array .* got generator",
        ),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], {1, 2}), "2 integers or texts in an array or list, got set"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], ["a", "\ud800"]), "ids must be texts that UTF-8 can store"),
        (lambda: AdaptedIndex(WCCN()), "got WCCN; fit it first"),
        (lambda: AdaptedIndex(sklearn.decomposition.PCA()), "got PCA; fit it first"),
        (lambda: AdaptedIndex(sklearn.decomposition.PCA(2).fit(x)), "got PCA; give it a number d"),
        (lambda: AdaptedIndex("none"), "none: no such adapter; expected a file that save_adapter or EmbeddingAdapter"),
        (lambda: AdaptedIndex(torch.eye(D)), "got Tensor; make a matrix an array"),
        (lambda: AdaptedIndex(np.eye(D).tolist()), "make a matrix an array"),
        (lambda: AdaptedIndex(LINEAR).add(x[:1], [2**63 - 1]).add(x[1:2]), "got 9223372036854775808"),
        (lambda: AdaptedIndex(LINEAR, "IDMap,Flat"), "index must number its rows .* without IDMap"),
        (lambda: AdaptedIndex(LINEAR, "PCA8,IDMap2,Flat"), "columns|index must number its rows"),
        (lambda: AdaptedIndex(LINEAR, filled_with_ids("IDMap2,Flat"), ids=range(N)), "index must number its rows"),
        (lambda: AdaptedIndex(LINEAR, filled_with_ids("IVF4,Flat")), "index must number its rows"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [b"a", b"b"]), "such as b'a'; .* decode bytes"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [Path("a"), Path("b")]), r"str\(i\) for i in ids"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [1.0, 2.0]), r"got float64 of shape \(2,\); convert them"),
        (lambda: AdaptedIndex(LINEAR).add(x[:3], ["a", "b", "b"]), "distinct and new; 1 .* such as 'b'"),
        (lambda: AdaptedIndex(LINEAR).add(x[:2], [3, 4]).add(x[:2], [4, 5]), "distinct and new; 1 .* such as 4"),
        (
            lambda: to_pretransform(NEAR, AdaptedIndex(LINEAR).add(x)),
            f"by {as_transform(LINEAR).fingerprint[:12]}, got the adapter {as_transform(NEAR).fingerprint[:12]}; pass",
        ),
    ],
)
def test_bad_input_raises(call, words):
    import re

    assert re.search(words, error_message(call))


@pytest.mark.parametrize(
    "factory, words",
    [
        ("IVF121,Flat", "at most as many lists as there are rows to train it, 120, got 121; choose fewer"),
        ("PCA4,IVF121,Flat", "at most as many lists as there are rows to train it, 120, got 121; choose fewer"),
        ("PQ1", "120 rows cannot train this index"),
    ],
)
@pytest.mark.parametrize("has_version", [False, True])
def test_a_migration_with_too_few_rows_for_its_index_leaves_nothing(factory, words, has_version, tmp_path):
    np.save(tmp_path / "x.npy", x[:120])
    folder = tmp_path / "s"
    if has_version:
        IndexStore(folder).migrate(NONLINEAR, tmp_path / "x.npy")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=words):
        IndexStore(folder).migrate(LINEAR, tmp_path / "x.npy", index_factory=factory)
    assert sorted(tmp_path.rglob("*")) == before
    IndexStore(folder).migrate(LINEAR, tmp_path / "x.npy", index_factory="IVF12,Flat")


def test_migrate_refuses_unknown_factory_before_writing(tmp_path):
    np.save(tmp_path / "x.npy", x)
    assert (
        "Flut"
        in error_message(lambda: IndexStore(tmp_path / "s").migrate(LINEAR, tmp_path / "x.npy", index_factory="Flut"))
        and not (tmp_path / "s").exists()
    )


# -- on disk -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("affine", "affine, linear", "centred"))
def test_affine_adapter_is_loaded_with_an_index(tmp_path, kind):
    "The reference is the search among rows adapted by the modules themselves."
    before = AdaptedIndex(ADAPTERS[kind]).add(x)
    before.save(tmp_path / "i")
    after = AdaptedIndex.load(tmp_path / "i")
    steps = ADAPTERS[kind] if isinstance(ADAPTERS[kind], list) else [ADAPTERS[kind]]
    z, zq = x, xq
    for a in steps:
        z, zq = (a.transform(v) if hasattr(a, "transform") else transform(a, v, device="cpu") for v in (z, zq))
    expected = knn(zq, z, 4)
    found = after.search(xq, 4)
    clear = (np.diff(expected.D, axis=1) > 1e-5).all(1)
    assert np.abs(found.D - expected.D).max() < 1e-5 and (found.I == expected.I)[clear].all() and clear.mean() > 0.8
    assert np.array_equal(after.search(xq, 4).D, before.search(xq, 4).D)


def test_interrupted_save_leaves_old_index(tmp_path, monkeypatch):
    first = AdaptedIndex(LINEAR, "HNSW8").add(x)
    first.save(tmp_path / "i")
    second = AdaptedIndex(NONLINEAR, "Flat").add(x[:50], [f"{i}" for i in range(50)])
    monkeypatch.setattr(module, "save_transform", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        second.save(tmp_path / "i")  # stopped before about.json
    assert AdaptedIndex.load(tmp_path / "i").fingerprint == first.fingerprint and np.array_equal(
        AdaptedIndex.load(tmp_path / "i").search(xq, 3).I, first.search(xq, 3).I
    )
    monkeypatch.undo()
    second.save(tmp_path / "i")
    assert AdaptedIndex.load(tmp_path / "i").fingerprint == second.fingerprint
    files = [f.name for f in (tmp_path / "i").rglob("*") if f.is_file()]
    assert len(files) == 4 and {Path(f).suffix for f in files} == {".json", ".faiss", ".safetensors"}


def test_load_refuses_damaged_folder(tmp_path):
    i = AdaptedIndex(LINEAR).add(x[:20])
    i.save(tmp_path / "i")
    assert "expected the adapter with fingerprint" in error_message(
        lambda: AdaptedIndex.load(tmp_path / "i", NONLINEAR)
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("kept")
    assert "files that are not of an index" in error_message(
        lambda: i.save(tmp_path / "notes")
    ) and "AdaptedIndex.save" in error_message(lambda: AdaptedIndex.load(tmp_path / "notes"))
    file = next((tmp_path / "i").glob("index-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "changed after writing" in error_message(lambda: AdaptedIndex.load(tmp_path / "i"))


@pytest.mark.parametrize("key", ["rows", "d", "dim"])
def test_load_compares_the_description_with_the_files(tmp_path, key):
    import json

    about = AdaptedIndex(LINEAR).add(x[:20]).save(tmp_path / "i") / "about.json"
    for value in (7, None):
        about.write_text(json.dumps(json.loads(about.read_text()) | {key: value}))
        assert f"expected {key} to be {20 if key == 'rows' else D}" in error_message(
            lambda: AdaptedIndex.load(tmp_path / "i")
        )


def test_rows_added_by_several_threads_have_distinct_ids():
    from concurrent.futures import ThreadPoolExecutor

    class Slow:
        d, fingerprint = D, "slow"

        def transform(self, rows):
            time.sleep(0.05)
            return rows

    index = pickle.loads(pickle.dumps(AdaptedIndex(LINEAR)))
    index.adapter = as_search_transforms(Slow())
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: index.add(x[i : i + 100]), (0, 100, 200)))
    assert len(index) == 300 and sorted(index.ids) == list(range(300))


@pytest.mark.parametrize(
    "factory",
    ("IVF40,Flat", "PQ4x4", "IVF40,PQ4x4", "OPQ1_2,Flat", "IVF20_HNSW8,Flat", "PQ4x4fs", "PQ4x4,RFlat", "RQ2x4"),
)
def test_training_on_few_rows_prints_nothing_and_changes_nothing(factory, capfd):
    few = as_transform(np.eye(D, dtype="f4")).transform(x[:480])
    expected = faiss.index_factory(D, factory)
    expected.train(few)
    expected.add(few)
    assert "clustering 480 points" in "".join(capfd.readouterr())
    index = AdaptedIndex(np.eye(D, dtype="f4"), factory).add(x[:480])
    assert capfd.readouterr() == ("", "")
    assert np.array_equal(faiss.serialize_index(index.index), faiss.serialize_index(expected))


def test_search_parameters_may_be_integers_of_numpy():
    index = AdaptedIndex(LINEAR, "IVF4,Flat").add(x).tune(nprobe=np.int64(2))
    assert index.index.nprobe == 2
    assert AdaptedIndex(LINEAR, "HNSW8").tune(efSearch=np.int64(9)).index.hnsw.efSearch == 9


def test_adapter_without_file_format_must_be_passed(tmp_path):
    chain = [NONLINEAR, LINEAR]
    AdaptedIndex(chain).add(x).save(tmp_path / "i")
    assert (
        "adapter=" in error_message(lambda: AdaptedIndex.load(tmp_path / "i"))
        and len(AdaptedIndex.load(tmp_path / "i", chain)) == N
    )


# -- IndexPreTransform -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_pretransform_returns_same_neighbours(tmp_path, factory, kind):
    "After write_index and read_index, with raw queries: distances to rounding, ids where no two distances are closer."
    mine = AdaptedIndex(ADAPTERS[kind], factory).add(x).tune(**FACTORIES[factory])
    faiss.write_index(to_pretransform(ADAPTERS[kind], mine), str(tmp_path / "f"))
    plain = faiss.read_index(str(tmp_path / "f"))
    for name, value in FACTORIES[factory].items():
        faiss.ParameterSpace().set_index_parameter(plain, name, value)
    (D1, I1), (D2, I2) = plain.search(xq, 6), mine.search(xq, 6)
    clear = (np.diff(D2, axis=1) > 1e-5).all(1)
    assert np.abs(D1 - D2).max() < 1e-5 and np.array_equal(I1[clear], I2[clear]) and clear.mean() > 0.8


def test_pretransform_adds_raw_embeddings():
    folded = to_pretransform(LINEAR, faiss.IndexFlatL2(D))
    folded.add(x)
    assert np.array_equal(folded.search(xq, 5)[1], AdaptedIndex(LINEAR).add(x).search(xq, 5).I)
    with_ids = to_pretransform(LINEAR, faiss.IndexIDMap2(faiss.IndexFlatL2(D)))
    with_ids.add_with_ids(x, np.arange(N) + 50)
    assert np.array_equal(with_ids.search(xq, 5)[1] - 50, folded.search(xq, 5)[1])


def test_pretransform_of_affine_adapter_holds_the_offset(tmp_path):
    "FAISS alone: the two transforms in front of the index return what the module returns, also from a file."
    index = to_pretransform(AFFINE, faiss.IndexFlatL2(D))
    index.add(x)
    faiss.write_index(index, str(tmp_path / "f"))
    again, z = faiss.read_index(str(tmp_path / "f")), transform(AFFINE, x, device="cpu")
    u = x
    for i in range(again.chain.size()):
        u = faiss.downcast_VectorTransform(again.chain.at(i)).apply(u)
    stored = faiss.downcast_index(again.index).reconstruct_n(0, N)
    assert np.abs(u - z).max() < 1e-5 and np.abs(stored - z).max() < 1e-5


def test_pretransform_refuses_nonlinear_and_wrong_width():
    assert "linear" in error_message(
        lambda: to_pretransform(NONLINEAR, faiss.IndexFlatL2(D))
    ) and "columns" in error_message(lambda: to_pretransform(LINEAR, faiss.IndexFlatL2(3)))


# -- distilled, query-only ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", (None, "Flat", x, as_transform(LINEAR)))
def test_pretransform_refuses_what_is_no_index(bad):
    with pytest.raises(InputError, match="^index must be a FAISS index or an AdaptedIndex, got"):
        to_pretransform(LINEAR, bad)


def test_ridge_solutions_have_zero_gradient():
    "Zero gradient of 1/n sum ||Bx - z||^2 + ridge tr(G)/d ||B - cS||^2 at B, where c fits cSx to z best."
    z, S = as_transform(NONLINEAR).transform(x).astype("f8"), np.random.default_rng(1).normal(size=(D, D))
    X = x.astype("f8")
    c = np.linalg.lstsq((X @ S.T).reshape(-1, 1), z.ravel(), rcond=None)[0][0]
    for ridge, B in zip(module.RIDGE_GRID, module._ridge_solutions(x, z, S)):
        lam = ridge * np.trace(X.T @ X) / len(X) / D
        assert np.abs((X @ B.T - z).T @ X / len(X) + lam * (B - c * S)).max() < 1e-7


def test_distill_measures_on_held_out_rows():
    same, nonlinear = distill(LINEAR, x, np.random.default_rng(0)), distill(NONLINEAR, x, np.random.default_rng(0))
    assert (
        same.cosine > 0.999
        and same.cosine > nonlinear.cosine > float((as_transform(NONLINEAR).transform(x) * x).sum(1).mean())
        and 0 < nonlinear.ar_at_1 <= 1
    )
    out = np.random.default_rng(0).permutation(N)[:180]  # the share is measured on held-out rows alone
    assert np.isclose(
        (normalize(x[out] @ nonlinear.matrix.T) * as_transform(NONLINEAR).transform(x[out])).sum(1).mean(),
        nonlinear.cosine,
        atol=1e-6,
    )
    assert "as many output as input" in error_message(
        lambda: distill(ADAPTERS["lda"], x, np.random.default_rng(0))
    ) and "held_out" in error_message(lambda: distill(NONLINEAR, x, np.random.default_rng(0), held_out=1.0))
    assert "rng must be a numpy.random.Generator" in error_message(lambda: distill(NONLINEAR, x, 0))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_query_only_search_of_rescaled_rows_is_exact(kind):
    "Inner products are the cosines of adapted rows times a factor of the query; the scale of A does not matter."
    m = as_transform(ADAPTERS[kind])
    cosines, rows = m.transform(xq) @ m.transform(x).T, rescale_for_query_only(x, m)
    scores = map_queries_only(xq, m, rescaled=True) @ rows.T
    factor = (scores * cosines).sum(1, keepdims=True) / np.square(cosines).sum(1, keepdims=True)
    assert np.allclose(scores, factor * cosines, atol=2e-5) and (factor > 0).all()
    columns = x if m.offset is None else np.c_[x, np.ones(N)]
    assert np.abs(rows * mapped_norms(x, m)[:, None] - columns).max() < 1e-5
    if m.offset is None:
        assert np.allclose(map_queries_only(xq, 5 * m.matrix), map_queries_only(xq, m), atol=1e-6)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_query_only_search_of_raw_rows_ranks_by_the_cosine_times_the_norm(kind):
    "z_q.(A x + b) = z_q.z ||A x + b||; the term z_q.b is the same for all rows. Rows of any norm but 0."
    m = as_transform(ADAPTERS[kind])
    scores = map_queries_only(3 * xq, m).astype("f8") @ x.T
    expected = m.transform(xq).astype("f8") @ (m.transform(x) * mapped_norms(2 * x, m)[:, None]).T
    change, wanted = scores - scores[:, :1], expected - expected[:, :1]
    factor = (change * wanted).sum(1, keepdims=True) / np.square(wanted).sum(1, keepdims=True)
    assert scores.shape == expected.shape and (factor > 0).all() and np.abs(change - factor * wanted).max() < 2e-5


def test_fit_query_only_reduces_variation_of_norms():
    m = as_transform([WCCN(0.1).fit(x, y), ADAPTERS["linear"]])
    done = fit_query_only(m, x, np.random.default_rng(0))

    def spread(A):
        return mapped_norms(x, A).std() / mapped_norms(x, A).mean()

    assert spread(done.matrix) < spread(m) and done.ar_at_1 >= done.adapter_ar_at_1
    affine = fit_query_only(AFFINE, x, np.random.default_rng(0))  # measured against the adapter with its offset
    out = np.random.default_rng(0).permutation(N)
    held, fitted, z = out[:180], out[180:], as_transform(AFFINE).transform(x)
    exact = knn(z[held], z[fitted], 1).I
    for adapter, share in ((affine.matrix, affine.ar_at_1), (AFFINE, affine.adapter_ar_at_1)):
        assert (knn(map_queries_only(x[held], adapter), x[fitted], 1).I == exact).mean() == share
    assert spread(affine.matrix) < spread(AFFINE)
    assert "linear" in error_message(
        lambda: fit_query_only(NONLINEAR, x, np.random.default_rng(0))
    ) and "linear" in error_message(lambda: map_queries_only(x, NONLINEAR))


# -- IndexStore -------------------------------------------------------------------------------------------


def pack(path):
    meta = {"set": "toy", "encoder": "noise", "licence": "none", "source": "s", "notes": "", "preprocessing": "-"}
    write_pack(
        EmbeddingSet(x, y, [f"id {i}" for i in range(N)], [""] * N, tuple("abcdefghijklmnopqrstuvwxyzABCD"), meta),
        path,
        dtype="float32",
    )
    return path


@pytest.mark.parametrize("kind", ("linear", "white, linear", "affine", "affine, linear", "centred", "nonlinear"))
@pytest.mark.parametrize("ending", (".npy", ".parquet"))
def test_migrated_version_equals_index_built_in_memory(tmp_path, kind, ending):
    a = ADAPTERS.get(kind, NONLINEAR)
    if ending == ".npy":
        np.save(tmp_path / "x.npy", x)
    else:
        pack(tmp_path / "x.parquet")
    store = IndexStore(tmp_path / "s")
    name = store.activate(store.migrate(a, tmp_path / f"x{ending}", batch_size=100)).current
    found, expected = (
        store.open().search(xq, 3),
        AdaptedIndex(a).add(x, [f"id {i}" for i in range(N)] if ending == ".parquet" else None).search(xq, 3),
    )
    assert (
        name == as_transform(a).fingerprint[:16]
        and (found.I == expected.I).all()
        and np.allclose(found.D, expected.D, atol=1e-5)
    )


def test_rows_left_by_a_kill_are_not_reused_for_another_file(tmp_path, monkeypatch):
    "Killed after the rows were adapted and before the index was saved; the next call has another file of equal size."
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "other.npy", x[::-1])
    store = IndexStore(tmp_path / "s")
    with monkeypatch.context() as m:
        m.setattr(AdaptedIndex, "save", lambda self, folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.migrate(NONLINEAR, tmp_path / "x.npy")
    assert len(list((tmp_path / "s").glob("*.rows-*"))) == 1
    store.activate(store.migrate(NONLINEAR, tmp_path / "other.npy"))
    assert (store.open().search(xq, 3).I == AdaptedIndex(NONLINEAR).add(x[::-1]).search(xq, 3).I).all() and not list(
        (tmp_path / "s").glob("*.rows-*")
    )


def test_save_transform_writes_only_adapters_with_a_file_format(tmp_path):
    for f in (
        AblatedEGA(8, hidden=4, without=("residual",), gen=torch.Generator()),
        BoundedDisplacementAdapter(AblatedEGA(8, hidden=4, without=("residual",), gen=torch.Generator()), 0.3),
        BoundedDisplacementAdapter(BoundedDisplacementAdapter(LinearAdapter(8), 0.3), 0.2),
    ):
        assert save_transform(f, tmp_path) == [] and not any(tmp_path.iterdir())
    assert save_transform(
        BoundedDisplacementAdapter(ReleasedEGA(8, hidden=4, gen=torch.Generator()), 0.3), tmp_path
    ) == ["adapter.safetensors"]


def test_migrate_resumes_after_kill_beside_current_version(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", x)
    store = IndexStore(tmp_path / "s")
    assert store.current is None and "migrate and activate" in error_message(store.open)
    old = store.migrate(LINEAR, tmp_path / "x.npy")
    store.activate(old)
    monkeypatch.setattr(module, "_add_file", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.migrate(NONLINEAR, tmp_path / "x.npy", index_factory="IVF12,Flat")  # rows are adapted, no index yet
    monkeypatch.undo()
    calls = []
    monkeypatch.setattr(module, "transform_file", lambda *a, **k: calls.append(a))
    assert store.versions() == [old] and "no finished version" in error_message(
        lambda: store.activate(as_transform(NONLINEAR).fingerprint[:16])
    )
    new = store.migrate(NONLINEAR, tmp_path / "x.npy", index_factory="IVF12,Flat", batch_size=100)
    assert (
        not calls
        and store.current == old
        and store.versions() == sorted([old, new])
        and store.migrate(NONLINEAR, tmp_path / "x.npy", index_factory="IVF12,Flat") == new
    )
    store.activate(new)
    assert (
        store.open().fingerprint == as_transform(NONLINEAR).fingerprint
        and store.open(old).fingerprint == as_transform(LINEAR).fingerprint
    )
    assert "current version" in error_message(lambda: store.drop(new)) and "no finished version" in error_message(
        lambda: store.drop("../x")
    )
    store.drop(old)
    assert store.versions() == [new] and sorted(f.name for f in (tmp_path / "s").iterdir()) == sorted(
        [new, "current.json"]
    )


def test_migrate_trains_on_evenly_spaced_rows(tmp_path, monkeypatch):
    "Every step-th row over all batches: the file may be sorted by class."
    np.save(tmp_path / "x.npy", x)
    monkeypatch.setattr(module, "MAX_TRAIN_ROWS", 225)
    seen = []
    real = faiss.IndexIVFFlat.train
    monkeypatch.setattr(faiss.IndexIVFFlat, "train", lambda self, rows: (seen.append(rows.copy()), real(self, rows))[1])
    IndexStore(tmp_path / "s").migrate(LINEAR, tmp_path / "x.npy", index_factory="IVF4,Flat", batch_size=50)
    assert np.allclose(seen[0], as_transform(LINEAR).transform(x[::4]), atol=1e-6)


def test_migrate_refuses_unsupported_input(tmp_path):
    np.save(tmp_path / "x.npy", x)
    store = IndexStore(tmp_path / "s")
    assert "square matrix" in error_message(
        lambda: store.migrate(ADAPTERS["lda"], tmp_path / "x.npy")
    ) and "ids must be" in error_message(lambda: store.migrate(LINEAR, tmp_path / "x.npy", ids=["a"]))


# -- SentenceAdapter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("white, linear", "lda", "affine", "nonlinear"))
def test_sentence_transformer_with_adapter_is_saved_and_loaded(tmp_path, monkeypatch, kind):
    "Random token vectors and a word tokenizer: the model encodes texts to adapted unit rows, also after save and load."
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: pip install 'ega[offline]'")
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate("? where is my card the parrot".split())}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    plain = st.SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=D)], device="cpu")
    texts, a = ["where is my card", "the parrot", "card"], ADAPTERS.get(kind, NONLINEAR)
    model = st.SentenceTransformer(modules=[plain[0], SentenceAdapter(a)], device="cpu")
    expected = as_transform(a).transform(normalize(plain.encode(texts)))
    assert (
        np.allclose(model.encode(texts), expected, atol=1e-6)
        and model.get_embedding_dimension() == as_transform(a).output_dim
    )
    model.save(str(tmp_path / "m"))
    again = st.SentenceTransformer(str(tmp_path / "m"), device="cpu", trust_remote_code=True)
    assert (
        np.array_equal(again.encode(texts), model.encode(texts))
        and again[-1].transform.fingerprint == as_transform(a).fingerprint
    )
    assert not [f for f in (tmp_path / "m").rglob("*") if f.suffix in (".bin", ".pkl", ".pt")]


@pytest.mark.parametrize("kind", (*ADAPTERS, "nonlinear"))
def test_sentence_adapter_returns_adapted_rows(kind):
    a = ADAPTERS.get(kind, NONLINEAR)
    z = SentenceAdapter(a)({"sentence_embedding": torch.from_numpy(3 * x)})["sentence_embedding"]
    assert np.abs(z.detach().numpy() - as_transform(a).transform(x)).max() < 1e-5


def test_sentence_adapter_has_no_trainable_parameters_and_refuses_nonlinear_chains():
    assert not [p for p in SentenceAdapter(LINEAR).parameters() if p.requires_grad] and "distill" in error_message(
        lambda: SentenceAdapter([NONLINEAR, LINEAR])
    )


def test_a_version_is_not_reused_for_other_vectors_factory_or_ids(tmp_path):
    x = normalize(np.random.default_rng(0).normal(size=(40, 6)))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "other.npy", x[:30])
    np.save(tmp_path / "narrow.npy", x[:, :5])
    store, adapter = IndexStore(tmp_path / "store"), LinearAdapter(6)
    version = store.migrate(adapter, tmp_path / "x.npy")
    assert store.migrate(adapter, tmp_path / "x.npy") == version  # the same call is finished already
    for source, settings, words in (
        ("other.npy", {}, "from another file of vectors"),
        ("x.npy", {"index_factory": "HNSW8"}, "with index_factory='Flat'"),
        ("x.npy", {"ids": [f"d{i}" for i in range(40)]}, "with other ids"),
        ("narrow.npy", {}, "expected 6 columns"),
    ):
        with pytest.raises(InputError, match=words):
            store.migrate(adapter, tmp_path / source, **settings)
    np.save(tmp_path / "x.npy", normalize(x + 1))  # the file has changed
    with pytest.raises(InputError, match="the file has changed"):
        store.migrate(adapter, tmp_path / "x.npy")
    assert len(store.open(version)) == 40


def test_ids_without_a_meaning_are_refused():
    x = normalize(np.random.default_rng(0).normal(size=(3, 6)))
    for ids in (["a", None, "c"], ["a", float("nan"), "c"], np.array(["a", 1, 2.5], dtype=object), ["", "b", "c"]):
        with pytest.raises(InputError, match="ids must"):
            AdaptedIndex(LinearAdapter(6)).add(x, ids=ids)


@pytest.mark.parametrize("kind", ("texts", "chunks", "dictionary", "numbers"))
def test_ids_may_be_arrow_arrays(kind):
    import pyarrow as pa

    texts = pa.array(["b", "a", "c"])
    ids = {
        "texts": texts,
        "chunks": pa.chunked_array([["b"], ["a", "c"]]),
        "dictionary": texts.dictionary_encode(),
        "numbers": pa.array([5, 3, 4]),
    }[kind]
    index = AdaptedIndex(LINEAR).add(x[:3], ids)
    assert index.search(x[:3], 1).I[:, 0].tolist() == ids.to_pylist()
    with pytest.raises(InputError, match="missing values, such as None"):
        AdaptedIndex(LINEAR).add(x[:3], pa.array(["b", None, "c"]))


def test_an_index_that_is_not_trained_and_a_setting_of_zero_are_refused():
    x = normalize(np.random.default_rng(0).normal(size=(60, 6)))
    index = AdaptedIndex(LinearAdapter(6), "IVF2,Flat")
    with pytest.raises(InputError, match="add embeddings before you search"):
        index.search(x)
    index.add(x)
    for nprobe in (0, -5, 2.7):
        with pytest.raises(InputError, match="nprobe must be an integer >= 1"):
            index.tune(nprobe=nprobe)


@pytest.mark.parametrize("side", ["query", "both", "two"])
def test_index_adapts_both_sides_of_a_pair_adapter(tmp_path, side):
    "Added rows as documents, searched ones as queries: the neighbours and the nDCG of exact search; also when loaded."
    adapter = cranfield.fitted(side)
    index = AdaptedIndex(adapter).add(cranfield.XD, ids=cranfield.DOCUMENT_IDS)
    found, expected = index.search(cranfield.XQ), cranfield.exact(adapter)
    assert np.array_equal(found.I, cranfield.DOCUMENT_IDS[expected.I]) and np.abs(found.D - expected.D).max() < 1e-5
    index.save(tmp_path / "index")
    adapter.save(tmp_path / "adapter")
    for other in (
        AdaptedIndex.load(tmp_path / "index"),
        AdaptedIndex.load(tmp_path / "index", adapter),
        AdaptedIndex.load(tmp_path / "index", tmp_path / "adapter"),
        pickle.loads(pickle.dumps(index)),
        AdaptedIndex(tmp_path / "adapter").add(cranfield.XD, ids=cranfield.DOCUMENT_IDS),
    ):
        assert other.fingerprint == adapter.fingerprint_
        assert all((a == b).all() for a, b in zip(other.search(cranfield.XQ), found))


def test_a_pair_adapter_needs_its_other_side(tmp_path):
    adapter, other = cranfield.fitted("two"), cranfield.fitted("both")
    index = AdaptedIndex(adapter).add(cranfield.XD[:20])
    folder = index.save(tmp_path / "index")
    for wrong in (other, adapter.document_adapter_, adapter.query_adapter_):
        with pytest.raises(InputError, match="expected the adapter with fingerprint"):
            AdaptedIndex.load(folder, wrong)
    zq, zd = adapter.transform_queries(cranfield.XQ[:5]), adapter.transform_documents(cranfield.XD[:20])
    again = AdaptedIndex(adapter).add(zd, adapted_by=as_transform(adapter.document_adapter_).fingerprint)
    for fingerprint in (adapter.fingerprint_, as_transform(adapter.query_adapter_).fingerprint):
        assert np.array_equal(again.search(zq, adapted_by=fingerprint).I, index.search(cranfield.XQ[:5]).I)
    with pytest.raises(InputError, match="were adapted by"):  # documents are no queries
        index.search(zd, adapted_by=as_transform(adapter.document_adapter_).fingerprint)


def test_one_map_is_refused_for_a_pair_adapter(tmp_path):
    adapter = cranfield.fitted("two")
    adapter.save(tmp_path / "adapter")
    both = as_search_transforms(adapter)
    for wrong in (adapter, tmp_path / "adapter", str(tmp_path / "adapter" / "adapter.safetensors"), both, [adapter]):
        with pytest.raises(InputError, match="pass the query_adapter_ or the document_adapter_ of the estimator"):
            as_transform(wrong)
    (tmp_path / "adapter" / "adapter.documents.safetensors").write_bytes(
        (tmp_path / "adapter" / "adapter.queries.safetensors").read_bytes()
    )
    with pytest.raises(InputError, match="describes other weights"):
        as_search_transforms(tmp_path / "adapter")


@pytest.mark.parametrize(
    "sides",
    ["queries", ["a"], {}, {"queries": "a"}, {"queries": "a", "documents": "b"}, {"queries": 3, "documents": 4}, 3],
)
def test_wrong_sides_of_a_saved_index_are_refused(tmp_path, sides):
    about = AdaptedIndex(cranfield.fitted("two")).add(cranfield.XD[:9]).save(tmp_path / "i") / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"sides": sides}))
    with pytest.raises(InputError):
        AdaptedIndex.load(tmp_path / "i")


def test_columns_are_checked_on_both_sides():
    names = [f"f{i}" for i in range(8)]
    frame = pd.DataFrame(unit(60, 8), columns=names)
    pairs = np.column_stack([np.arange(60), np.arange(60) // 2])
    adapter = EmbeddingAdapter(max_unseen_loss=None).fit_pairs(frame, frame, pairs, side="both")
    index = AdaptedIndex(adapter).add(frame)
    for call in (index.add, index.search):
        with pytest.raises(InputError, match="order"):
            call(frame[names[::-1]])


def test_an_index_of_frozen_documents_serves_adapted_queries():
    "An adapter that changes queries alone needs no new index."
    adapter = cranfield.fitted("query")
    existing = faiss.IndexFlatL2(cranfield.XD.shape[1])
    existing.add(cranfield.XD)
    found = AdaptedIndex(adapter, existing, cranfield.DOCUMENT_IDS).search(cranfield.XQ)
    assert np.array_equal(found.I, cranfield.DOCUMENT_IDS[cranfield.exact(adapter).I])
    assert as_search_transforms(adapter).documents.is_identity and not as_search_transforms(adapter).queries.is_identity
    assert not as_transform(np.eye(2, 3, dtype="f4")).is_identity


def test_a_store_of_indexes_takes_a_pair_adapter(tmp_path):
    adapter, store = cranfield.fitted("two"), IndexStore(tmp_path / "store")
    np.save(tmp_path / "documents.npy", cranfield.XD)
    adapter.save(tmp_path / "adapter")
    store.activate(store.migrate(tmp_path / "adapter", tmp_path / "documents.npy"))
    assert np.array_equal(store.open().search(cranfield.XQ).I, cranfield.exact(adapter).I)
    assert store.current == adapter.fingerprint_[:16]
