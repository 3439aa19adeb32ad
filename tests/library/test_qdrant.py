"Qdrant inside the process: migration and its resumption, also after a kill, activation, search, errors."

import signal
import subprocess
import sys
import warnings
from contextlib import closing

import cranfield
import numpy as np
import pytest

from ega.data.arrays import InputError, normalize
from ega.data.packs import EmbeddingSet
from ega.deploy.index import as_search_transforms, as_transform
from ega.estimator import EmbeddingAdapter
from ega.measure.search import knn
from ega.method.closed_form import WCCN
from ega.testing import error_message

pytest.importorskip("qdrant_client", reason="needs Qdrant: pip install 'ega[qdrant]'")
from qdrant_client import QdrantClient, models

from ega.deploy.qdrant import (
    AdaptedCollection,
    activate,
    active_vector,
    count_points,
    migrate_collection,
    open_client,
    raw_vector,
    write_collection,
)

D, N = 16, 120
y = np.repeat(np.arange(10), N // 10)
x, xq = (np.random.default_rng(seed).standard_normal((n, D), dtype=np.float32) for seed, n in ((0, N), (1, 7)))
WHITENING, OTHER = WCCN(0.3).fit(x, y), WCCN(0.7).fit(x, y)
COSINE, DOT = models.Distance.COSINE, models.Distance.DOT


def fill(client, vectors=x, distance=COSINE, name="", ids=None):
    "A collection 'c' of vectors with the payload of their row numbers."
    params = models.VectorParams(size=vectors.shape[1], distance=distance)
    client.create_collection("c", vectors_config={name: params} if name else params)
    ids = range(len(vectors)) if ids is None else ids
    rows = [{name: row} if name else row for row in vectors.tolist()]
    client.upload_points(
        "c", [models.PointStruct(id=i, vector=v, payload={"row": r}) for r, (i, v) in enumerate(zip(ids, rows))]
    )
    return client


@pytest.fixture
def client():
    return fill(QdrantClient(":memory:"))


def exact(adapter, k, rows=slice(None)):
    m = as_transform(adapter)
    return knn(m.transform(xq), m.transform(x[rows]), k)


def test_ids_and_payloads_are_kept(client):
    before = client.scroll("c", limit=N, with_payload=True, with_vectors=False)[0]
    vectors = [p.vector for p in client.scroll("c", limit=N, with_vectors=True)[0]]
    name = migrate_collection(client, "c", WHITENING)
    after = client.scroll("c", limit=N, with_payload=True, with_vectors=True)[0]
    assert [(p.id, p.payload) for p in before] == [(p.id, p.payload) for p in after]
    assert [p.vector[""] for p in after] == vectors
    assert np.allclose([p.vector[name] for p in after], as_transform(WHITENING).transform(x), atol=1e-5)


@pytest.mark.parametrize("name", ["", "frozen"])
def test_search_equals_exact_search(name):
    client = fill(QdrantClient(":memory:"), distance=DOT, name=name)
    activate(client, "c", migrate_collection(client, "c", WHITENING, vector=name, batch_size=50), vector=name)
    collection = AdaptedCollection(client, "c", WHITENING, vector=name)
    found, expected = collection.search(xq, 5), exact(WHITENING, 5)
    assert np.array_equal(found.I, expected.I) and np.abs(found.D - expected.D).max() < 1e-5
    assert [[p.payload["row"] for p in points] for points in collection.points(xq, 5)] == expected.I.tolist()
    where = models.Filter(must=[models.FieldCondition(key="row", range=models.Range(gte=60))])
    assert np.array_equal(collection.search(xq, 5, where=where).I, exact(WHITENING, 5, slice(60, None)).I + 60)
    few = models.Filter(must=[models.HasIdCondition(has_id=[7])])
    padded = collection.search(xq[:2], 3, where=few)
    assert padded.I.tolist() == [[7, -1, -1]] * 2 and np.isinf(padded.D[:, 1:]).all()
    assert collection.search(xq, 10**9).I.shape == (len(xq), N)


@pytest.mark.parametrize("side", ["query", "both", "two"])
def test_ndcg_through_a_collection_is_that_of_exact_search(tmp_path, side):
    "An adapter fitted on pairs, as an object and from its folder; one of queries alone writes nothing."
    adapter, client = cranfield.fitted(side), fill(QdrantClient(":memory:"), cranfield.XD * 3)
    adapter.save(tmp_path / "adapter")
    name = migrate_collection(client, "c", tmp_path / "adapter")
    assert (name == "") == (side == "query")
    vectors = client.get_collection("c").config.params.vectors
    assert isinstance(vectors, dict) == (side != "query")
    activate(client, "c", name)
    found = AdaptedCollection(client, "c", adapter).search(cranfield.XQ[:30])
    expected = cranfield.exact(adapter)
    assert np.abs(found.D - expected.D[:30]).max() < 1e-5
    adapted, frozen = (cranfield.ndcg(cranfield.DOCUMENT_IDS[cranfield.exact(a).I[:30]]) for a in (adapter, None))
    assert cranfield.ndcg(cranfield.DOCUMENT_IDS[found.I]) == pytest.approx(adapted, abs=1e-9) != frozen


def test_norms_count_where_the_raw_vector_is_not_compared_by_cosine():
    "Then an adapter of queries alone gets the frozen embeddings at norm 1."
    client = fill(QdrantClient(":memory:"), x * np.arange(1, N + 1, dtype=np.float32)[:, None], DOT)
    name = migrate_collection(client, "c", np.eye(D))
    assert name != ""
    activate(client, "c", name)
    assert np.array_equal(AdaptedCollection(client, "c", np.eye(D)).search(xq, 5).I, exact(np.eye(D, dtype="f4"), 5).I)


def test_migration_resumes_and_the_raw_vector_is_searched_meanwhile(client):
    adapted = []
    m = as_transform(WHITENING)
    m = m._replace(adapt=lambda rows: (adapted.append(len(rows)), as_transform(WHITENING).adapt(rows))[1])
    name = migrate_collection(client, "c", m, batch_size=30, max_rows=70)
    assert adapted == [30, 30, 10] and active_vector(client, "c") == ""
    assert "50 points have no vector" in error_message(lambda: activate(client, "c", name))
    raw = [client.query_points("c", row, limit=3).points for row in xq.tolist()]
    assert [[p.id for p in points] for points in raw] == exact(np.eye(D, dtype="f4"), 3).I.tolist()
    client.upsert("c", [models.PointStruct(id=N, vector={"": xq[3].tolist()}, payload={"row": "new"})])
    assert migrate_collection(client, "c", m) == name
    activate(client, "c", name)
    assert AdaptedCollection(client, "c", WHITENING).search(xq[3:4], 1).I.tolist() == [[N]]


def test_changed_raw_vectors_are_adapted_again(client):
    name = migrate_collection(client, "c", WHITENING)
    client.update_vectors("c", [models.PointVectors(id=5, vector={"": xq[0].tolist()})])
    assert migrate_collection(client, "c", WHITENING) == name
    activate(client, "c", name)
    assert AdaptedCollection(client, "c", WHITENING).search(xq[:1], 1).I.tolist() == [[5]]


def test_points_added_later_are_not_found_and_counted_in_a_warning(client):
    activate(client, "c", migrate_collection(client, "c", WHITENING))
    client.upsert("c", [models.PointStruct(id=N, vector={"": xq[3].tolist()})])
    with pytest.warns(UserWarning, match="1 of 121 points have no vector") as caught:
        found = AdaptedCollection(client, "c", WHITENING).search(xq[3:4], 1)
    assert N not in found.I and len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("n_batches", [0, 2])
def test_a_killed_migration_leaves_the_raw_vectors_searchable(tmp_path, n_batches):
    "In a process of its own that is killed before the next batch; the same call resumes on the disk."
    client = fill(QdrantClient(path=str(tmp_path / "q")))
    client.close()
    np.save(tmp_path / "matrix.npy", as_transform(WHITENING).matrix)
    code = f"""
import os, signal, numpy as np
from qdrant_client import QdrantClient
from ega.deploy.qdrant import migrate_collection
client, calls = QdrantClient(path={str(tmp_path / "q")!r}), []
write = client.update_vectors
def dying(*args, **kwargs):
    if len(calls) == {n_batches}: os.kill(os.getpid(), signal.SIGKILL)
    calls.append(1)
    return write(*args, **kwargs)
client.update_vectors = dying
migrate_collection(client, "c", np.load({str(tmp_path / "matrix.npy")!r}), batch_size=20)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    client, matrix = QdrantClient(path=str(tmp_path / "q")), np.load(tmp_path / "matrix.npy")
    raw = [client.query_points("c", row, limit=3).points for row in xq.tolist()]
    assert [[p.id for p in points] for points in raw] == exact(np.eye(D, dtype="f4"), 3).I.tolist()
    assert active_vector(client, "c") == ""
    name = migrate_collection(client, "c", matrix, max_rows=0)
    have = client.count("c", models.Filter(must=[models.HasVectorCondition(has_vector=name)])).count
    assert have == 20 * n_batches
    activate(client, "c", migrate_collection(client, "c", matrix))
    client.close()
    client = QdrantClient(path=str(tmp_path / "q"))
    found, expected = AdaptedCollection(client, "c", matrix).search(xq, 4), exact(matrix, 4)
    assert np.array_equal(found.I, expected.I) and client.retrieve("c", [9])[0].payload == {"row": 9}
    client.close()


def test_two_adapters_and_the_way_back(client):
    first, second = (migrate_collection(client, "c", adapter) for adapter in (WHITENING, OTHER))
    for name, adapter, other in ((first, WHITENING, OTHER), (second, OTHER, WHITENING), (first, WHITENING, OTHER)):
        activate(client, "c", name)
        assert np.array_equal(AdaptedCollection(client, "c", adapter).search(xq, 3).I, exact(adapter, 3).I)
        assert "was adapted by" in error_message(lambda: AdaptedCollection(client, "c", other))
    message = error_message(lambda: AdaptedCollection(client, "c", np.eye(D)))
    assert "which this adapter does not change" in message
    activate(client, "c", "")
    assert "which is not adapted" in error_message(lambda: AdaptedCollection(client, "c", WHITENING))
    activate(client, "c", second)
    client.delete_vector_name("c", second)
    assert "has no vector" in error_message(lambda: AdaptedCollection(client, "c", OTHER))


def test_a_refitted_query_side_needs_no_migration(client):
    "What is stored belongs to the document side, so another adapter with the same document side may search it."
    pairs = np.column_stack([np.arange(60), np.arange(60) // 2])
    both, two = (
        EmbeddingAdapter(max_unseen_loss=None).fit_pairs(x[:60], x[:30], pairs, side=side) for side in ("both", "two")
    )
    assert both.fingerprint_ != two.fingerprint_
    name = migrate_collection(client, "c", both)
    activate(client, "c", name)
    assert as_search_transforms(two).documents.fingerprint == as_search_transforms(both).documents.fingerprint
    found = AdaptedCollection(client, "c", two).search(xq, 3)
    assert np.array_equal(found.I, knn(two.transform_queries(xq), two.transform_documents(x), 3).I)


def test_two_raw_vectors_are_adapted_apart():
    "By the same adapter; a point that lacks one of them keeps the other."
    client, cosine = QdrantClient(":memory:"), models.VectorParams(size=D, distance=COSINE)
    client.create_collection("c", vectors_config={"title": cosine, "body": cosine})
    rows = [models.PointStruct(id=i, vector={"title": x[i].tolist(), "body": x[-1 - i].tolist()}) for i in range(N)]
    client.upsert("c", rows)
    for _ in range(2):  # the second time nothing is left to do
        names = [migrate_collection(client, "c", WHITENING, vector=vector) for vector in ("title", "body")]
    assert len(set(names)) == 2
    client.delete_vectors("c", ["body"], [4])
    assert migrate_collection(client, "c", WHITENING, vector="body") == names[1]
    for vector, name, rows in (("title", names[0], x), ("body", names[1], x[::-1])):
        activate(client, "c", name, vector=vector)
        m = as_transform(WHITENING)
        found = AdaptedCollection(client, "c", WHITENING, vector=vector).search(xq, 3)
        assert np.array_equal(found.I, knn(m.transform(xq), m.transform(rows), 3).I)
    with pytest.raises(InputError, match="was not adapted by ega from the vector 'title'"):
        activate(client, "c", names[1], vector="title")


def test_ids_may_be_texts_and_a_collection_empty():
    uuids = [f"00000000-0000-0000-0000-{i:012d}" for i in range(N)]
    client = fill(QdrantClient(":memory:"), ids=uuids)
    activate(client, "c", migrate_collection(client, "c", WHITENING))
    assert np.array_equal(
        AdaptedCollection(client, "c", WHITENING).search(xq, 2).I, np.array(uuids)[exact(WHITENING, 2).I]
    )
    empty = fill(QdrantClient(":memory:"), x[:0])
    activate(empty, "c", migrate_collection(empty, "c", WHITENING))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = AdaptedCollection(empty, "c", WHITENING).search(xq, 5)
    assert found.I.tolist() == [[-1]] * len(xq) and np.isinf(found.D).all()


def test_vectors_without_a_direction_are_named_before_anything_is_written():
    bad = x.copy()
    bad[[3, 90]] = 0
    client = fill(QdrantClient(":memory:"), bad, DOT)
    message = error_message(lambda: migrate_collection(client, "c", WHITENING, batch_size=64))
    assert "first the one with id 3" in message
    assert not isinstance(client.get_collection("c").config.params.vectors, dict)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda c: migrate_collection(c, "c", np.eye(3, dtype="f4")), "must have 3 numbers"),
        (lambda c: migrate_collection(c, "nothing", WHITENING), "existing collections: c"),
        (lambda c: migrate_collection(c, 3, WHITENING), "collection must be a name"),
        (lambda c: migrate_collection("c", "c", WHITENING), "client must be a QdrantClient"),
        (lambda c: migrate_collection(c, "c", WHITENING, vector="frozen"), "has no vector 'frozen'; its vectors: ''"),
        (lambda c: migrate_collection(c, "c", WHITENING, vector=None), "has no vector None"),
        (lambda c: migrate_collection(c, "c", WHITENING, batch_size=0), "batch_size"),
        (lambda c: migrate_collection(c, "c", WHITENING, max_rows=-1), "max_rows"),
        (lambda c: migrate_collection(c, "c", "missing"), "no such adapter"),
        (lambda c: activate(c, "c", "nothing"), "has no vector 'nothing'"),
        (lambda c: active_vector(c, "c", vector="nothing"), "has no vector 'nothing'"),
        (lambda c: AdaptedCollection(c, "c", WHITENING), "which is not adapted"),
        (lambda c: AdaptedCollection(c, "c", np.eye(3)), "must have 3 numbers"),
        (lambda c: AdaptedCollection(c, "c", np.eye(D)).search(xq[:, :3]), "must have 16 columns"),
        (lambda c: AdaptedCollection(c, "c", np.eye(D)).search(xq, k=0), "k must"),
        (lambda c: AdaptedCollection(c, "c", np.eye(D)).search(xq, where="row > 3"), "where must be a qdrant"),
    ],
)
def test_wrong_use_is_refused(client, call, words):
    with pytest.raises(InputError) as error:
        call(client)
    assert words in str(error.value)


def test_a_written_collection_returns_the_ids_of_the_set_and_gets_what_it_lacks(tmp_path):
    "Also after it was migrated."
    es = EmbeddingSet(normalize(x), y, [f"doc {i}" for i in range(N)], classes=tuple("abcdefghij"))
    with closing(open_client(tmp_path / "q")) as client:
        write_collection(client, "c", es.take(np.arange(40)), batch_size=16)
        name = migrate_collection(client, "c", WHITENING)
        activate(client, "c", name)
        write_collection(client, "c", es, batch_size=16)
        assert client.count("c").count == N and raw_vector(client, "c") == ""
        assert count_points(client, "c", name) == 40  # what was there is not written again
        migrate_collection(client, "c", WHITENING)
        assert count_points(client, "c", name) == count_points(client, "c", "") == N
        client.delete_vectors("c", [name], [client.scroll("c", limit=1)[0][0].id])
        assert count_points(client, "c", name) == N - 1
    with closing(open_client(tmp_path / "q")) as client:
        migrate_collection(client, "c", WHITENING)
        write_collection(client, "c", es)
        collection, expected = AdaptedCollection(client, "c", WHITENING), exact(WHITENING, 3)
        assert np.array_equal(collection.search(xq, 3).I, es.ids[expected.I])
        payload = collection.points(xq[:1], 1)[0][0].payload
        row = expected.I[0, 0]
        assert payload == {"id": f"doc {row}", "label": y[row], "class": "abcdefghij"[y[row]], "split": ""}


def test_a_collection_of_others_is_not_written_to(client, tmp_path):
    es = EmbeddingSet(normalize(x), y)
    message = error_message(lambda: write_collection(client, "c", es))
    assert "collection 'c' was not written by write_collection" in message and client.count("c").count == N
    write_collection(client, "new", es.take(np.arange(3)))
    message = error_message(lambda: write_collection(client, "new", EmbeddingSet(np.eye(3), [0, 1, 2])))
    assert "must have 3 numbers, as in the embedding set, got 16" in message and client.count("new").count == 3
    dense = models.DenseVectorConfig(size=D, distance=COSINE)
    client.create_vector_name("c", "theirs", models.DenseVectorNameConfig(dense=dense))
    assert "must have one vector beside those that ega added, got '', 'theirs'" in error_message(
        lambda: raw_vector(client, "c")
    )


@pytest.mark.parametrize("file", ["meta.json", "collection/c/storage.sqlite"])
def test_a_damaged_folder_is_one_sentence(tmp_path, file):
    with closing(open_client(tmp_path / "q")) as client:
        write_collection(client, "c", EmbeddingSet(np.eye(3), [0, 1, 2]))
    whole = (tmp_path / "q" / file).read_bytes()
    texts = (b"", b"{", b"[]", b'{"collections": {"c": 3}, "aliases": {}}', b"junk" * 300, whole[: len(whole) // 2])
    for content in texts if file == "meta.json" else texts[-2:]:
        (tmp_path / "q" / file).write_bytes(content)
        with pytest.raises(InputError, match="expected a folder of Qdrant, but it cannot be opened"):
            open_client(tmp_path / "q")


def test_a_vector_that_ega_did_not_make_is_not_activated(client):
    dense = models.DenseVectorConfig(size=D, distance=COSINE)
    client.create_vector_name("c", "theirs", models.DenseVectorNameConfig(dense=dense))
    with pytest.raises(InputError, match="was not adapted by ega"):
        activate(client, "c", "theirs")
    several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    params = models.VectorParams(size=D, distance=COSINE, multivector_config=several)
    client.create_collection("several", vectors_config=params)
    with pytest.raises(InputError, match="got several"):
        migrate_collection(client, "several", WHITENING)
