"Stores of LanceDB, Qdrant and FAISS: exact search, changes, resumed migrations, activation, other adapters, pairs."

import signal
import subprocess
import sys
import uuid

import cranfield
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from ega.data.arrays import InputError, normalize
from ega.data.packs import EmbeddingSet, write_pack
from ega.deploy.stores import Changes, IndexStore, LanceStore, QdrantStore, open_store
from ega.measure.search import knn
from ega.method.adapters import LinearAdapter, ReleasedEGA
from ega.method.closed_form import WCCN, LDAMap
from ega.method.interface import as_adapter
from ega.pairs import PairAdapter

D, N = 16, 240
y = np.repeat(np.arange(10), N // 10)


def unit(n, seed):
    return normalize(np.random.default_rng(seed).standard_normal((n, D), dtype=np.float32))


x, xq = unit(N, 0), unit(20, 1)
META = {"set": "toy", "encoder": "noise", "licence": "none", "source": "s", "notes": "", "preprocessing": "-"}
SET = EmbeddingSet(x, y, [f"ü'{i}" for i in range(N)], ["train", "test"] * (N // 2), tuple("abcdefghij"), META)
WHITENING, OTHER, LDA = WCCN(0.3).fit(x, y), WCCN(0.7).fit(x, y), LDAMap(5).fit(x, y)
AFFINE = LinearAdapter(D, bias=True).eval()
with torch.no_grad():
    AFFINE.weight.copy_(0.2 * torch.from_numpy(unit(D, 3)))
    AFFINE.offset.copy_(0.5 * torch.from_numpy(unit(1, 4)[0]))


def exact(adapter, k, rows=x):
    a = as_adapter(adapter)
    return knn(a.queries.transform(xq), a.documents.transform(rows), k)


@pytest.fixture(params=("lance", "qdrant"))
def kind(request):
    pytest.importorskip({"lance": "lancedb", "qdrant": "qdrant_client"}[request.param])
    return request.param


def opened(kind, folder):
    return open_store(folder / "t.lance") if kind == "lance" else open_store(folder / "q", collection="t")


def new_store(kind, folder):
    "A store without rows, that of Qdrant in memory, because it writes points one by one to a disk."
    if kind == "lance":
        return LanceStore(folder / "t.lance")
    from qdrant_client import QdrantClient

    return QdrantStore(QdrantClient(":memory:"), "t")


@pytest.fixture
def store(kind, tmp_path):
    "A store that holds the embedding set."
    store = new_store(kind, tmp_path)
    assert store.add(SET, batch_size=100) == Changes(N, 0, 0)
    return store


# -- every store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", (WHITENING, LDA, AFFINE), ids=("square", "narrow", "affine"))
def test_a_migrated_store_equals_exact_search(store, adapter):
    version = store.migrate(adapter, batch_size=77)
    assert store.active == "vector" and store.versions() == ["vector", version]
    found, expected = store.activate(version).search(adapter, xq, 5), exact(adapter, 5)
    assert (found.I == SET.ids[expected.I]).all() and np.abs(found.D - expected.D).max() < 1e-5


def test_faiss_equals_exact_search_from_a_file_a_pack_and_with_ids(tmp_path):
    store = IndexStore(tmp_path / "s")
    np.save(tmp_path / "x.npy", x)
    write_pack(SET, tmp_path / "x.parquet", dtype="float32")
    nonlinear = ReleasedEGA(D, hidden=8, gen=torch.Generator().manual_seed(0)).eval()
    for adapter, source, ids in (
        (WHITENING, "x.npy", np.arange(N)),
        (AFFINE, "x.parquet", SET.ids),
        (LDA, "x.npy", np.arange(N)),
        (nonlinear, "x.npy", np.arange(N) + 7),
    ):
        version = store.migrate(adapter, tmp_path / source, ids=ids if adapter is nonlinear else None, batch_size=50)
        found, expected = store.activate(version).search(adapter, xq, 5), exact(adapter, 5)
        assert (found.I == ids[expected.I]).all() and np.abs(found.D - expected.D).max() < 1e-5
        assert store.active == version == as_adapter(adapter).fingerprint[:16] and store.count(version) == N
    assert len(store.versions()) == 4


def test_added_embeddings_are_counted_and_changed_ones_replaced(store, kind, tmp_path):
    "Embeddings that changed under known ids are never found by their old vectors; those of other ids are kept."
    assert store.add(SET) == Changes(0, 0, N)
    store.activate(store.migrate(WHITENING))
    changed = x.copy()
    changed[[8, 30]] = xq[:2]
    if kind == "qdrant":  # a field that another program wrote
        store.client.set_payload("t", {"price": 5}, [str(uuid.uuid5(uuid.NAMESPACE_OID, str(SET.ids[8])))])
    es = EmbeddingSet(
        np.r_[changed[:100], xq[2:3]], [*y[:100], 3], [*SET.ids[:100], "new"], [""] * 101, SET.classes, META
    )
    assert store.add(es, batch_size=64) == store.changes == Changes(1, 2, 98)
    assert store.count(None) == N + 1
    with pytest.warns(UserWarning, match="3 of 241"):
        found = store.search(WHITENING, xq[:3], 300)
    assert not {SET.ids[8], SET.ids[30], "new"} & set(found.I.ravel())
    with pytest.raises(InputError):
        store.activate(store.versions()[1])
    store.migrate(WHITENING)
    found = store.search(WHITENING, xq[:3], 1)
    assert found.I[:, 0].tolist() == [SET.ids[8], SET.ids[30], "new"] and found.D.max() < 1e-6
    if kind == "qdrant":
        assert store.rows(WHITENING, xq[:1], 1)[0][0].payload["price"] == 5
    assert store.add(es) == Changes(0, 0, 101)


def test_a_migration_resumes_and_the_frozen_version_is_searched_meanwhile(store, kind, tmp_path):
    adapted = []

    class Counting:
        d, fingerprint = D, as_adapter(WHITENING).fingerprint

        def transform(self, rows):
            adapted.append(len(rows))
            return as_adapter(WHITENING).apply(rows)

    version = store.migrate(Counting(), batch_size=50, max_rows=120)
    assert adapted == [50, 50, 20] and store.active == "vector" and store.count(version) == 120
    with pytest.raises(InputError):
        store.activate(version)
    identity = np.eye(D, dtype="f4")
    assert (store.search(identity, xq, 3).I == SET.ids[exact(identity, 3).I]).all()
    again = opened(kind, tmp_path) if kind == "lance" else QdrantStore(store.client, "t")
    again.add(EmbeddingSet(xq[3:4], [3], ["new"], [""], SET.classes, META))
    assert again.migrate(Counting()) == again.migrate(WHITENING) == version
    assert again.activate(version).search(WHITENING, xq[3:4], 1).I.tolist() == [["new"]]


@pytest.mark.parametrize("batches", (0, 2))
def test_a_killed_migration_resumes(kind, tmp_path, batches):
    "In a process of its own that is killed before the next batch; the frozen version is active until the end."
    few, path = SET.take(slice(0, 60)), "t.lance" if kind == "lance" else "q"
    with opened(kind, tmp_path) as store:
        store.add(few)
    code = f"""
import os, signal, sys
import numpy as np
from ega.deploy.stores import open_store
store, calls = open_store({str(tmp_path / path)!r}, collection={None if kind == "lance" else "t"!r}), []
write = store._write
def dying(*args):
    if len(calls) == {batches}: os.kill(os.getpid(), signal.SIGKILL)
    calls.append(1)
    write(*args)
store._write = dying
store.migrate(np.diag(np.arange(1, {D + 1})).astype("f4"), batch_size=20)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    matrix = np.diag(np.arange(1, D + 1)).astype("f4")
    with opened(kind, tmp_path) as store:
        version = store.migrate(matrix, max_rows=0)
        assert store.active == "vector" and store.count(version) == 20 * batches
        found = store.activate(store.migrate(matrix)).search(matrix, xq, 4)
        assert (found.I == few.ids[exact(matrix, 4, few.x).I]).all()


def test_only_the_adapter_of_the_active_version_searches(store):
    first, second = store.migrate(WHITENING), store.migrate(OTHER)
    with pytest.raises(InputError):
        store.search(WHITENING, xq)  # the frozen version is active
    for version, adapter, other in ((first, WHITENING, OTHER), (second, OTHER, WHITENING), (first, WHITENING, OTHER)):
        store.activate(version)
        assert (store.search(adapter, xq, 3).I == SET.ids[exact(adapter, 3).I]).all()
        for wrong in (other, np.eye(D, dtype="f4")):
            for call in (store.search, store.rows):
                with pytest.raises(InputError):
                    call(wrong, xq)
    with pytest.raises(InputError):
        store.activate("vector").search(WHITENING, xq)


def test_faiss_searches_with_its_adapter_alone_and_keeps_what_is_active(tmp_path):
    np.save(tmp_path / "x.npy", x)
    store = IndexStore(tmp_path / "s")
    with pytest.raises(InputError):
        store.search(WHITENING, xq)
    first = store.migrate(WHITENING, tmp_path / "x.npy")
    second = store.activate(first).migrate(OTHER, tmp_path / "x.npy", index_factory="IVF4,Flat")
    assert store.active == first and store.migrate(OTHER) == second
    for wrong in (lambda: store.search(OTHER, xq), lambda: store.drop(first), lambda: store.activate("../x")):
        with pytest.raises(InputError):
            wrong()
    store.activate(second).drop(first)
    assert store.versions() == [second]
    (tmp_path / "s" / "current.json").write_text('{"version": "../s/v"}')
    with pytest.raises(InputError):
        store.open()


def test_faiss_refuses_another_file_factory_or_ids_and_too_few_rows(tmp_path):
    np.save(tmp_path / "x.npy", x), np.save(tmp_path / "other.npy", x[::-1])
    store = IndexStore(tmp_path / "s")
    version = store.migrate(WHITENING, tmp_path / "x.npy")
    assert store.migrate(WHITENING, tmp_path / "x.npy") == version
    before = sorted((tmp_path / "s").rglob("*"))
    for adapter, source, options in (
        (WHITENING, "other.npy", {}),
        (WHITENING, "x.npy", {"index_factory": "HNSW8"}),
        (WHITENING, "x.npy", {"ids": SET.ids}),
        (OTHER, "x.npy", {"ids": ["a"]}),
        (np.eye(5, dtype="f4"), "x.npy", {}),
    ):
        with pytest.raises(InputError):
            store.migrate(adapter, tmp_path / source, **options)
    with pytest.raises(InputError):
        store.migrate(OTHER)  # was never built
    assert sorted((tmp_path / "s").rglob("*")) == before


def test_neighbours_are_padded_as_faiss_pads(store):
    store.activate(store.migrate(WHITENING))
    found = store.search(WHITENING, xq, N + 5)
    assert found.I.shape == (len(xq), N + 5) and (found.I[:, -5:] == "").all() and np.isinf(found.D[:, -5:]).all()
    assert np.array_equal(found.I[:, :4], store.search(WHITENING, xq, 4).I)


@pytest.mark.parametrize("side", ["query", "both", "two"])
def test_a_pair_adapter_migrates_documents_and_adapts_queries(kind, tmp_path, side):
    "Nothing is migrated for an adapter of queries alone. As an object, and from its folder."
    adapter = cranfield.fitted(side)
    adapter.save(tmp_path / "adapter")
    store = new_store(kind, tmp_path)
    version = store.migrate(tmp_path / "adapter", cranfield.SET.documents)
    assert (version == "vector") == (side == "query") == (len(store.versions()) == 1)
    found, expected = store.activate(version).search(adapter, cranfield.XQ[:30]), cranfield.exact(adapter)
    assert np.abs(found.D - expected.D[:30]).max() < 1e-5
    ndcg = cranfield.ndcg(cranfield.DOCUMENT_IDS[expected.I[:30]])
    assert cranfield.ndcg(found.I) == pytest.approx(ndcg, abs=1e-9)


def test_a_refitted_query_side_needs_no_migration(store):
    "What is stored belongs to the document side, so another adapter with the same document side may search it."
    pairs = np.column_stack([np.arange(60), np.arange(60) // 2])
    both, two = (PairAdapter(side, max_unseen_loss=None).fit(x[:60], x[:30], pairs) for side in ("both", "two"))
    assert both.fingerprint_ != two.fingerprint_
    found = store.activate(store.migrate(both)).search(two, xq, 3)
    assert np.array_equal(found.I, SET.ids[exact(two, 3).I])


def test_wrong_input_is_refused_and_changes_nothing(store, tmp_path):
    narrow = EmbeddingSet(np.eye(3, dtype=np.float32), [0, 1, 2], ["p", "q", "r"], [""] * 3, tuple("abc"), META)
    for call in (
        lambda: store.migrate(np.eye(3, dtype="f4")),
        lambda: store.migrate(WHITENING, narrow),
        lambda: store.add(narrow),
        lambda: store.migrate("missing"),
        lambda: store.activate("adapted_0"),
        lambda: store.search(np.eye(D), xq[:, :3]),
    ):
        with pytest.raises(InputError):
            call()
    assert store.versions() == ["vector"] and store.count(None) == N


def test_rows_that_were_adapted_are_not_added(store):
    adapted = EmbeddingSet(x, y, classes=SET.classes, meta=META | {"notes": "adapted by LinearAdapter, weights 0"})
    with pytest.raises(InputError, match="not adapted"):
        store.add(adapted)


@pytest.mark.parametrize("wrong", ("none.lance", "hollow.lance", "f", "adapter", "qdrant"))
def test_open_store_refuses_what_is_no_store(tmp_path, wrong):
    pytest.importorskip("lancedb"), pytest.importorskip("qdrant_client")
    (tmp_path / "hollow.lance").mkdir(), (tmp_path / "adapter").mkdir()
    for name in ("f", "adapter/adapter.safetensors"):
        (tmp_path / name).touch()
    open_store(tmp_path / "qdrant", collection="c").close()
    with pytest.raises(ValueError):
        open_store(tmp_path / wrong, collection="c" if wrong == "adapter" else None).migrate(WHITENING)


# -- LanceDB ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lance():
    return pytest.importorskip("lancedb", reason="needs LanceDB: pip install 'ega[deploy]'")


def test_conditions_columns_and_an_index_of_lancedb(lance, tmp_path):
    from lancedb.index import IvfFlat

    store = LanceStore(tmp_path / "t.lance")
    version = store.migrate(WHITENING, SET)
    store.table.create_index(version, config=IvfFlat(distance_type="l2", num_partitions=4), replace=True)
    store.activate(version)
    whole, few = (store.search(WHITENING, xq, 5, nprobes=n) for n in (4, 1))
    assert (whole.I == SET.ids[exact(WHITENING, 5).I]).all()
    assert (few.I != whole.I).any() and (few.D >= whole.D - 1e-6).all()  # LanceDB draws its partitions
    member = np.flatnonzero((y == 4) & (SET.split == "test"))
    found = store.search(WHITENING, xq, 3, where="label = 4 AND split = 'test'", nprobes=4)
    assert (found.I == SET.ids[member][exact(WHITENING, 3, x[member]).I]).all()
    one = store.rows(WHITENING, xq[:1], 2, columns=["id", "class"])
    assert set(one.column_names) == {"id", "class", "_distance", "query_index"} and one.num_rows == 2
    for where in ("", "nothing = 3", "label ="):
        with pytest.raises(ValueError):
            store.search(WHITENING, xq, where=where)


def keyed_table(lance, tmp_path, keys, vectors):
    vectors = pa.array(vectors.tolist(), pa.list_(pa.float32(), D))
    return lance.connect(tmp_path / "keyed").create_table("t", pa.table({"key": pa.array(keys), "v": vectors}))


def test_a_table_of_others_is_migrated_by_its_own_names(lance, tmp_path):
    "With vectors as their encoder gave them, and ids that fit in int64."
    table = keyed_table(lance, tmp_path, pa.array(range(N), pa.uint64()), 3 * x)
    store = LanceStore(table, id_column="key", vector_column="v")
    found, expected = store.activate(store.migrate(WHITENING)).search(WHITENING, 5 * xq, 5), exact(WHITENING, 5)
    assert np.array_equal(found.I, expected.I) and np.abs(found.D - expected.D).max() < 1e-5
    assert found.I.dtype == np.int64 and store.search(WHITENING, xq, 2, where="key = 3").I[0].tolist() == [3, -1]
    table.add(
        pa.table({"key": pa.array([2**63 + 5], pa.uint64()), "v": pa.array(xq[:1].tolist(), pa.list_(pa.float32(), D))})
    )
    store.migrate(WHITENING)
    with pytest.raises(OverflowError):
        store.search(WHITENING, xq[:1])


@pytest.mark.parametrize("keys", ([1, 2, None], [1, 2, 2]), ids=("missing", "repeated"))
def test_missing_and_repeated_ids_leave_a_table_as_it_was(lance, tmp_path, keys):
    table = keyed_table(lance, tmp_path, keys, x[:3])
    with pytest.raises(InputError):
        LanceStore(table, id_column="key", vector_column="v").migrate(LDA)
    assert table.schema.names == ["key", "v"]


def test_wrong_vectors_leave_a_table_as_it_was(lance, tmp_path):
    rows = x[:5].copy()
    rows[3] = 0
    zero = keyed_table(lance, tmp_path, list("abcde"), rows)
    with pytest.raises(InputError, match="'d'"):
        LanceStore(zero, id_column="key", vector_column="v").migrate(WHITENING, batch_size=2)
    assert zero.schema.names == ["key", "v"]


def test_vectors_that_another_program_changed_are_adapted_again(lance, tmp_path):
    store = LanceStore(tmp_path / "t.lance")
    store.activate(store.migrate(WHITENING, SET))
    other = LanceStore(tmp_path / "t.lance").table
    other.update(where="id = 'ü''8'", values={"vector": xq[0].tolist()})
    other.add([{"id": "new", "label": 3, "split": "late", "vector": xq[3]}])
    store.migrate(WHITENING)
    found = store.search(WHITENING, xq[[0, 3]], 1)
    assert found.I.ravel().tolist() == ["ü'8", "new"] and found.D.max() < 1e-6


def test_two_columns_are_adapted_apart(lance, tmp_path):
    "By the same adapter, each into a version of its own, which serves its column alone."
    rows = pd.DataFrame({"id": range(N), "title": x.tolist(), "body": x[::-1].tolist()})
    vector = pa.list_(pa.float32(), D)
    schema = pa.schema([("id", pa.int64()), ("title", vector), ("body", vector)])
    table = lance.connect(tmp_path).create_table("two", pa.Table.from_pandas(rows, schema))
    title, body = (LanceStore(table, vector_column=name) for name in ("title", "body"))
    for store, vectors in ((title, x), (body, x[::-1])):
        found = store.activate(store.migrate(WHITENING)).search(WHITENING, xq, 3)
        assert np.array_equal(found.I, exact(WHITENING, 3, vectors).I)
    with pytest.raises(InputError):
        title.activate(body.active)


# -- Qdrant -----------------------------------------------------------------------------------------------------


@pytest.fixture
def qdrant():
    return pytest.importorskip("qdrant_client", reason="needs Qdrant: pip install 'ega[qdrant]'")


def filled(qdrant, vectors, distance="Cosine", names=("",), ids=None):
    "A client with a collection 'c' of points that carry their row numbers."
    client, models = qdrant.QdrantClient(":memory:"), qdrant.models
    params = models.VectorParams(size=vectors.shape[1], distance=models.Distance(distance))
    client.create_collection("c", vectors_config=dict.fromkeys(names, params) if names != ("",) else params)
    rows = [dict.fromkeys(names, row) if names != ("",) else row for row in vectors.tolist()]
    ids = range(len(vectors)) if ids is None else ids
    points = [models.PointStruct(id=i, vector=v, payload={"row": r}) for r, (i, v) in enumerate(zip(ids, rows))]
    client.upload_points("c", points)
    return client


@pytest.mark.parametrize("name", ("", "frozen"))
def test_a_collection_of_others_keeps_its_ids_and_payloads(qdrant, name):
    client, models = filled(qdrant, 3 * x, "Dot", (name,)), qdrant.models
    store = QdrantStore(client, "c")
    assert store.frozen == (name or "vector") == store.active
    store.activate(store.migrate(WHITENING, batch_size=50))
    found, expected = store.search(WHITENING, xq, 5), exact(WHITENING, 5)
    assert np.array_equal(found.I, expected.I) and np.abs(found.D - expected.D).max() < 1e-5
    points = store.rows(WHITENING, xq, 5)
    assert [[p.payload["row"] for p in row] for row in points] == expected.I.tolist()
    where = models.Filter(must=[models.FieldCondition(key="row", range=models.Range(gte=60))])
    found = store.search(WHITENING, xq, 5, where=where)
    assert np.array_equal(found.I, exact(WHITENING, 5, x[60:]).I + 60)
    few = models.Filter(must=[models.HasIdCondition(has_id=[7])])
    padded = store.search(WHITENING, xq[:2], 3, where=few)
    assert padded.I.tolist() == [[7, -1, -1]] * 2 and np.isinf(padded.D[:, 1:]).all()
    with pytest.raises(InputError):
        store.add(SET)  # the ids of its points are others
    assert store.count(None) == N


def test_norms_count_where_qdrant_does_not_compare_by_cosine(qdrant):
    "Then an adapter of queries alone gets the frozen embeddings at norm 1."
    store = QdrantStore(filled(qdrant, x * np.arange(1, N + 1, dtype=np.float32)[:, None], "Dot"), "c")
    identity = np.eye(D, dtype="f4")
    with pytest.raises(InputError):
        store.search(identity, xq)
    version = store.migrate(identity)
    assert version != "vector"
    assert np.array_equal(store.activate(version).search(identity, xq, 5).I, exact(identity, 5).I)


def test_ids_of_qdrant_may_be_uuids_and_a_collection_empty(qdrant):
    uuids = [f"00000000-0000-0000-0000-{i:012d}" for i in range(N)]
    store = QdrantStore(filled(qdrant, x, ids=uuids), "c")
    found = store.activate(store.migrate(WHITENING)).search(WHITENING, xq, 2)
    assert np.array_equal(found.I, np.array(uuids)[exact(WHITENING, 2).I])
    empty = QdrantStore(filled(qdrant, x[:0]), "c")
    found = empty.activate(empty.migrate(WHITENING)).search(WHITENING, xq, 2)
    assert found.I.tolist() == [[-1, -1]] * len(xq) and np.isinf(found.D).all()


def test_a_vector_of_others_is_named_and_never_activated(qdrant):
    client, models = filled(qdrant, x, names=("title", "body")), qdrant.models
    with pytest.raises(InputError):
        QdrantStore(client, "c")
    title, body = (QdrantStore(client, "c", vector=name) for name in ("title", "body"))
    first, second = title.migrate(WHITENING), body.migrate(WHITENING)
    assert first != second and title.activate(first).active == first and body.active == "body"
    for version in (second, "body"):
        with pytest.raises(InputError):
            title.activate(version)
    several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    params = models.VectorParams(size=D, distance=models.Distance.COSINE, multivector_config=several)
    client.create_collection("several", vectors_config=params)
    with pytest.raises(InputError):
        QdrantStore(client, "several").migrate(WHITENING)


@pytest.mark.parametrize("file", ["meta.json", "collection/t/storage.sqlite"])
def test_a_damaged_folder_of_qdrant_is_refused(qdrant, tmp_path, file):
    with opened("qdrant", tmp_path) as store:
        store.add(SET.take(slice(0, 9)))
        with pytest.raises(InputError):
            opened("qdrant", tmp_path)  # in use
    whole = (tmp_path / "q" / file).read_bytes()
    for content in (b"junk" * 300, whole[: len(whole) // 2]):
        (tmp_path / "q" / file).write_bytes(content)
        with pytest.raises(InputError):
            opened("qdrant", tmp_path)
