"AdaptedIndex against transform-then-search; ids, saving, FAISS with the adapter in front, query-only search."

import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import cranfield
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from test_interface import ADAPTERS, AFFINE, LINEAR, NONLINEAR, D, unit

from ega.data.arrays import InputError, normalize
from ega.deploy import index as module
from ega.deploy.index import AdaptedIndex, map_queries_only, rescale_for_query_only, to_pretransform
from ega.measure.search import knn
from ega.method.adapters import transform
from ega.method.interface import as_adapter

faiss = pytest.importorskip("faiss", reason="ega.deploy.index needs FAISS: pip install 'ega[cpu]'")
N = 900
x = normalize(unit(30, seed=5)[np.repeat(np.arange(30), 30)] + 0.2 * unit(N, seed=6))
xq = normalize(x[::9] + 0.1 * unit(100, seed=7))
FACTORIES = {"Flat": {}, "IVF12,Flat": {"nprobe": 5}, "HNSW8": {"efSearch": 40}, "IVF12,SQ8": {"nprobe": 12}}


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("kind", ("linear", "lda", "affine", "nonlinear"))
def test_search_equals_transform_then_search(factory, kind):
    "The reference is a FAISS index of embeddings adapted beforehand; the batch size does not change the result."
    adapter = ADAPTERS.get(kind, NONLINEAR)
    a = as_adapter(adapter)
    oracle = faiss.index_factory(a.output_dim, factory)
    oracle.train(a.transform(x))
    oracle.add(a.transform(x))
    for name, value in FACTORIES[factory].items():
        faiss.ParameterSpace().set_index_parameter(oracle, name, value)
    mine = AdaptedIndex(adapter, factory).tune(**FACTORIES[factory])
    mine = mine.add(x[:600], batch_size=77).add(x[600:]) if factory == "Flat" else mine.add(x, batch_size=len(x))
    (D_, I_), found = oracle.search(a.transform(xq), 7), mine.search(xq, 7)
    assert np.array_equal(found.I, I_) and np.allclose(found.D, D_, atol=1e-6) and len(mine) == N


@pytest.mark.parametrize("kind", ("integers", "texts", "range", "arrow"))
def test_ids_are_returned_and_saved(tmp_path, kind):
    texts = [f"ü/{i}" for i in range(N)]
    ids = {"integers": np.arange(N) * 7 + 10**12, "texts": texts, "range": range(N), "arrow": pa.array(texts)}[kind]
    index, a = AdaptedIndex(LINEAR).add(x, ids), as_adapter(LINEAR)
    rows = knn(a.transform(xq), a.transform(x), 4).I
    expected = np.asarray(texts if kind == "arrow" else ids)
    assert (index.search(xq, 4).I == expected[rows]).all()
    again = AdaptedIndex.load(index.save(tmp_path / "i"))
    assert (again.search(xq, 4).I == index.search(xq, 4).I).all() and again.ids.dtype == index.ids.dtype


WRONG_IDS = {
    "repeated": [1, 1],
    "negative": [-1, 2],
    "too large": [1, 2**63],
    "too few": [1],
    "missing": ["a", None],
    "empty": ["a", ""],
    "mixed": ["a", 1],
    "floats": [1.0, 2.0],
    "nullable": pd.Series([1, None], dtype="Int64"),
}


@pytest.mark.parametrize("ids", WRONG_IDS.values(), ids=WRONG_IDS)
def test_ids_without_a_meaning_are_refused(ids):
    index = AdaptedIndex(LINEAR)
    with pytest.raises((InputError, OverflowError)):
        index.add(x[:2], ids)
    assert len(index) == 0


def test_new_ids_must_fit_those_of_the_index():
    texts, numbers = AdaptedIndex(LINEAR).add(x[:2], ["a", "b"]), AdaptedIndex(LINEAR).add(x[:2], [3, 2**63 - 1])
    for index, ids in ((texts, None), (texts, [1, 2]), (texts, ["b", "c"]), (numbers, None), (numbers, ["a", "b"])):
        with pytest.raises((InputError, OverflowError)):
            index.add(x[2:4], ids)
    assert AdaptedIndex(LINEAR).add(x[:2], [3, 4]).add(x[2:4]).ids.tolist() == [3, 4, 5, 6]


def test_an_index_survives_pickle():
    index = AdaptedIndex([LINEAR, NONLINEAR]).add(x)
    again = pickle.loads(pickle.dumps(index))
    assert all(np.array_equal(a, b) for a, b in zip(index.search(xq, 3), again.search(xq, 3)))
    assert len(again.add(x)) == 2 * N


def test_missing_neighbours_are_padded_as_faiss_pads():
    numbers, texts = (AdaptedIndex(LINEAR, "IVF100,Flat").tune(nprobe=1) for _ in range(2))
    for index, missing in ((numbers.add(x), -1), (texts.add(x, [f"{i}" for i in range(N)]), "")):
        found = index.search(xq, 2 * N)  # one list has fewer rows, and k is larger than the index
        assert found.I.shape == (len(xq), 2 * N)
        assert (found.I[:, -1] == missing).all() and np.isinf(found.D[:, -1]).all()
    found = AdaptedIndex(LINEAR).search(xq, 2)
    assert found.I.tolist() == [[-1, -1]] * len(xq) and np.isinf(found.D).all()


@pytest.mark.parametrize("bad", (np.nan, 0.0))
@pytest.mark.parametrize("factory", ("Flat", "IVF4,Flat"))
def test_a_refused_add_adds_and_trains_nothing(factory, bad):
    rows = x.copy()
    rows[500] = bad
    index = AdaptedIndex(LINEAR, factory)
    with pytest.raises(InputError):
        index.add(rows, batch_size=77)
    assert len(index) == 0 and index.index.is_trained == (factory == "Flat")
    assert len(index.add(x, batch_size=77)) == len(index.ids) == N


def test_training_takes_evenly_spaced_rows_of_all_batches(monkeypatch):
    "The rows may be sorted by class."
    monkeypatch.setattr(module, "MAX_TRAIN_ROWS", 225)
    seen, real = [], faiss.IndexIVFFlat.train
    monkeypatch.setattr(faiss.IndexIVFFlat, "train", lambda self, rows: (seen.append(rows.copy()), real(self, rows))[1])
    AdaptedIndex(LINEAR, "IVF4,Flat").add(x, batch_size=50)
    assert np.allclose(seen[0], as_adapter(LINEAR).transform(x[::4]), atol=1e-6)


def test_an_interrupted_add_leaves_the_ids_of_the_rows_it_has_added():
    class Interrupted:
        d, fingerprint, calls = D, "interrupted", 0

        def transform(self, rows):
            self.calls += 1
            if self.calls == 15:  # 12 batches are checked first
                raise KeyboardInterrupt
            return rows

    index = AdaptedIndex(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        index.add(x, [f"a{i}" for i in range(N)], batch_size=77)
    assert len(index) == len(index.ids) == 2 * 77
    index.add(x[300:], [f"b{i}" for i in range(300, N)])
    found = index.search(x[[5, 400]], 1)
    assert found.I.ravel().tolist() == ["a5", "b400"]


def test_rows_added_by_several_threads_have_distinct_ids():
    class Slow:
        d, fingerprint = D, "slow"

        def transform(self, rows):
            time.sleep(0.02)
            return rows

    index = pickle.loads(pickle.dumps(AdaptedIndex(LINEAR)))
    index.adapter = as_adapter(Slow())
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: index.add(x[i : i + 100]), (0, 100, 200)))
    assert len(index) == 300 and sorted(index.ids) == list(range(300))


def test_embeddings_of_another_adapter_are_refused():
    index, other = AdaptedIndex(LINEAR).add(x), as_adapter(NONLINEAR)
    for call in (
        lambda: index.add(x, adapted_by=other.fingerprint),
        lambda: index.search(xq, adapted_by=other.fingerprint),
        lambda: to_pretransform(ADAPTERS["lora"], index),
    ):
        with pytest.raises(InputError):
            call()
    z = as_adapter(LINEAR).transform(xq)
    assert np.array_equal(index.search(z, 3, adapted_by=index.fingerprint).I, index.search(xq, 3).I)
    assert len(index.add(z, adapted_by=index.fingerprint)) == N + len(xq)


def filled_with_ids(factory):
    index = faiss.index_factory(D, factory)
    index.train(x)
    index.add_with_ids(x, np.arange(N)[::-1] + 7)
    return index


@pytest.mark.parametrize(
    "call",
    [
        lambda: AdaptedIndex(LINEAR, faiss.IndexFlatIP(D)),
        lambda: AdaptedIndex(LINEAR, "IDMap,Flat"),
        lambda: AdaptedIndex(LINEAR, filled_with_ids("IDMap2,Flat"), ids=range(N)),
        lambda: AdaptedIndex(LINEAR, filled_with_ids("IVF4,Flat")),
        lambda: AdaptedIndex(LINEAR).add(x[:, :3]),
        lambda: to_pretransform(NONLINEAR, faiss.IndexFlatL2(D)),
    ],
)
def test_wrong_input_is_refused(call):
    with pytest.raises(InputError):
        call()


@pytest.mark.parametrize("k", [0, -1])
def test_fewer_than_one_neighbour_is_refused(k):
    with pytest.raises(ValueError):
        AdaptedIndex(LINEAR).add(x).search(x[:2], k=k)


# -- on disk -----------------------------------------------------------------------------------------------


def test_an_interrupted_save_leaves_the_old_index(tmp_path, monkeypatch):
    first = AdaptedIndex(LINEAR, "HNSW8").add(x)
    first.save(tmp_path / "i")
    second = AdaptedIndex(NONLINEAR, "Flat").add(x[:50], [f"{i}" for i in range(50)])
    with monkeypatch.context() as m:
        m.setattr(module, "_hash_about", lambda about: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            second.save(tmp_path / "i")  # stopped before about.json
    again = AdaptedIndex.load(tmp_path / "i")
    assert again.fingerprint == first.fingerprint and np.array_equal(again.search(xq, 3).I, first.search(xq, 3).I)
    second.save(tmp_path / "i")
    assert AdaptedIndex.load(tmp_path / "i").fingerprint == second.fingerprint
    assert len([f for f in (tmp_path / "i").rglob("*") if f.is_file()]) == 4


def test_a_damaged_or_changed_folder_is_refused(tmp_path):
    folder = AdaptedIndex(LINEAR).add(x[:20]).save(tmp_path / "i")
    with pytest.raises(InputError):
        AdaptedIndex.load(folder, NONLINEAR)
    for file in [f for f in folder.rglob("*") if f.is_file()]:
        whole = file.read_bytes()
        for changed in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2], b""):
            file.write_bytes(changed)
            with pytest.raises(InputError):
                AdaptedIndex.load(folder)
        file.write_bytes(whole)
    about = json.loads((folder / "about.json").read_text())
    for key, value in (("columns", ["a"] * D), ("index", "../i.faiss"), ("fingerprint", None)):
        changed = about | {key: value}
        for description in (changed, changed | {"sha256": module._hash_about(changed)}):  # also by intent
            (folder / "about.json").write_text(json.dumps(description))
            with pytest.raises(InputError):
                AdaptedIndex.load(folder)


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(InputError):
        AdaptedIndex(LINEAR).add(x[:9]).save(tmp_path)
    with pytest.raises(InputError):
        AdaptedIndex.load(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["mine.txt"]


def test_an_adapter_without_file_format_must_be_passed(tmp_path):
    AdaptedIndex([NONLINEAR, LINEAR]).add(x).save(tmp_path / "i")
    with pytest.raises(InputError):
        AdaptedIndex.load(tmp_path / "i")
    assert len(AdaptedIndex.load(tmp_path / "i", [NONLINEAR, LINEAR])) == N


# -- pairs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["query", "both", "two"])
def test_an_index_adapts_both_sides_of_a_pair_adapter(tmp_path, side):
    "Added rows as documents, searched ones as queries: the neighbours of exact search; also when loaded."
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
    ):
        assert other.fingerprint == adapter.fingerprint_
        assert all((a == b).all() for a, b in zip(other.search(cranfield.XQ), found))


def test_a_pair_adapter_needs_its_other_side(tmp_path):
    adapter, other = cranfield.fitted("two"), cranfield.fitted("both")
    index = AdaptedIndex(adapter).add(cranfield.XD[:20])
    folder = index.save(tmp_path / "index")
    for wrong in (other, adapter.document_adapter_, adapter.query_adapter_):
        with pytest.raises(InputError):
            AdaptedIndex.load(folder, wrong)
    zq, zd = adapter.transform_queries(cranfield.XQ[:5]), adapter.transform_documents(cranfield.XD[:20])
    queries, documents = (as_adapter(side).fingerprint for side in (adapter.query_adapter_, adapter.document_adapter_))
    again = AdaptedIndex(adapter).add(zd, adapted_by=documents)
    for fingerprint in (adapter.fingerprint_, queries):
        assert np.array_equal(again.search(zq, adapted_by=fingerprint).I, index.search(cranfield.XQ[:5]).I)
    with pytest.raises(InputError):  # documents are no queries
        index.search(zd, adapted_by=documents)


def test_an_index_of_frozen_documents_serves_adapted_queries():
    "An adapter that changes queries alone needs no new index."
    adapter = cranfield.fitted("query")
    existing = faiss.IndexFlatL2(cranfield.XD.shape[1])
    existing.add(cranfield.XD)
    found = AdaptedIndex(adapter, existing, cranfield.DOCUMENT_IDS).search(cranfield.XQ)
    assert np.array_equal(found.I, cranfield.DOCUMENT_IDS[cranfield.exact(adapter).I])


# -- FAISS alone, and queries alone ------------------------------------------------------------------------


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_pretransform_returns_the_same_neighbours(tmp_path, factory, kind):
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
    affine = to_pretransform(AFFINE, faiss.IndexFlatL2(D))
    affine.add(x)
    stored = faiss.downcast_index(affine.index).reconstruct_n(0, N)
    assert np.abs(stored - transform(AFFINE, x, device="cpu")).max() < 1e-5


@pytest.mark.parametrize("kind", ADAPTERS)
def test_query_only_search_of_rescaled_rows_is_exact(kind):
    "Inner products are the cosines of adapted rows times a factor of the query; the scale of A does not matter."
    a = as_adapter(ADAPTERS[kind])
    cosines = a.transform(xq) @ a.transform(x).T
    scores = map_queries_only(3 * xq, a, rescaled=True) @ rescale_for_query_only(2 * x, a).T
    factor = (scores * cosines).sum(1, keepdims=True) / np.square(cosines).sum(1, keepdims=True)
    assert np.allclose(scores, factor * cosines, atol=2e-5) and (factor > 0).all()
    if a.offset is None:
        assert np.allclose(map_queries_only(xq, 5 * a.matrix), map_queries_only(xq, a), atol=1e-6)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_query_only_search_of_raw_rows_ranks_by_the_cosine_times_the_norm(kind):
    "z_q.(A x + b) = z_q.z ||A x + b||; the term z_q.b is the same for all rows."
    a = as_adapter(ADAPTERS[kind])
    norms = np.linalg.norm(x @ a.matrix.T + (0 if a.offset is None else a.offset), axis=1)
    scores = map_queries_only(xq, a).astype("f8") @ x.T
    expected = a.transform(xq).astype("f8") @ (a.transform(x) * norms[:, None]).T
    change, wanted = scores - scores[:, :1], expected - expected[:, :1]
    factor = (change * wanted).sum(1, keepdims=True) / np.square(wanted).sum(1, keepdims=True)
    assert scores.shape == expected.shape and (factor > 0).all() and np.abs(change - factor * wanted).max() < 2e-5
