"Chroma: a collection behind adapted embeddings returns exact search; opening again, an exchanged adapter, errors."

import copy
import json
import subprocess
import sys
from pathlib import Path

import cranfield
import numpy as np
import pytest

from ega.data.arrays import InputError
from ega.method.adapters import LinearAdapter, save_adapter

chromadb = pytest.importorskip("chromadb", reason="needs Chroma, which is no part of dev: pip install 'ega[chroma]'")


from chroma_functions import Stored

from ega.deploy.wrappers import AdaptedEmbeddingFunction, open_collection

N_QUERIES = 20
EXACT = {"hnsw": {"ef_search": 2000, "ef_construction": 400, "max_neighbors": 64}}


class Plain(chromadb.EmbeddingFunction):
    "A function that cannot be configured, as the first ones of Chroma."

    def __init__(self):
        pass

    def __call__(self, input):
        return [np.array([len(text), 1.0]) for text in input]


def saved(folder, side):
    cranfield.fitted(side).save(folder)
    return folder


def fill(client, name, function):
    collection = client.create_collection(
        name, embedding_function=function, configuration=copy.deepcopy(EXACT)
    )  # which Chroma changes
    ids = cranfield.DOCUMENT_IDS.tolist()
    collection.add(ids=ids, documents=ids)
    return collection


def search(collection):
    return collection.query(query_texts=list(map(str, range(N_QUERIES))), n_results=10)["ids"]


def expected(adapter):
    return cranfield.ndcg(cranfield.DOCUMENT_IDS[cranfield.exact(adapter).I[:N_QUERIES]])


def settings():
    return chromadb.Settings(anonymized_telemetry=False)


@pytest.mark.parametrize("side", ["both", "two"])
def test_ndcg_through_a_collection_is_that_of_exact_search(tmp_path, side):
    client = chromadb.EphemeralClient(settings())
    function = AdaptedEmbeddingFunction(Stored(), saved(tmp_path / "adapter", side))
    found = search(fill(client, f"{side}-{tmp_path.name}", function))
    assert cranfield.ndcg(found) == pytest.approx(expected(cranfield.fitted(side)), abs=1e-9)
    assert cranfield.ndcg(found) != pytest.approx(expected(None), abs=1e-3)


def test_an_existing_collection_serves_an_adapter_of_queries(tmp_path):
    "Filled with frozen embeddings, searched with embeddings of adapted queries."
    client, function = chromadb.EphemeralClient(settings()), Stored()
    collection = client.create_collection(
        f"frozen-{tmp_path.name}",
        embedding_function=function,
        configuration={"hnsw": EXACT["hnsw"] | {"space": "cosine"}},
    )
    ids = cranfield.DOCUMENT_IDS.tolist()
    collection.add(ids=ids, documents=ids)
    adapted = AdaptedEmbeddingFunction(function, saved(tmp_path / "adapter", "query"))
    with pytest.raises(InputError, match="query_embeddings"):
        open_collection(client, collection.name, adapted)
    texts = list(map(str, range(N_QUERIES)))
    found = collection.query(query_embeddings=adapted.embed_query(texts), n_results=10)["ids"]
    assert cranfield.ndcg(found) == pytest.approx(expected(cranfield.fitted("query")), abs=1e-9)


def test_a_collection_is_opened_again_in_another_process(tmp_path):
    "Chroma builds the function from its stored configuration; the other process need not name the adapter."
    function = AdaptedEmbeddingFunction(Stored(), saved(tmp_path / "adapter", "two"))
    found = search(fill(chromadb.PersistentClient(str(tmp_path / "db"), settings()), "reopened", function))
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import chromadb, chroma_functions, ega.deploy.wrappers, json
client = chromadb.PersistentClient({str(tmp_path / "db")!r}, chromadb.Settings(anonymized_telemetry=False))
collection = client.get_collection("reopened")
texts = list(map(str, range({N_QUERIES})))
print(json.dumps(collection.query(query_texts=texts, n_results=10)["ids"]))
collection.add(ids=["new"], documents=["1"])
print(collection.count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again, count = done.stdout.splitlines()
    same = np.mean([len({*a} & {*b}) / 10 for a, b in zip(json.loads(again), found)])
    assert same >= 0.99 and int(count) == len(cranfield.XD) + 1  # the index of Chroma is approximate


def test_another_adapter_is_refused(tmp_path):
    client = chromadb.PersistentClient(str(tmp_path / "db"), settings())
    function = AdaptedEmbeddingFunction(Stored(), saved(tmp_path / "adapter", "both"))
    other = AdaptedEmbeddingFunction(Stored(), saved(tmp_path / "other", "query"))
    collection = fill(client, "exchanged", function)
    assert search(open_collection(client, "exchanged", function)) == search(collection)
    with pytest.raises(InputError, match="adapter"):
        open_collection(client, "exchanged", other)
    with pytest.raises(InputError, match="adapter"):
        function.validate_config_update(function.get_config(), other.get_config())
    saved(tmp_path / "adapter", "query")  # a new fit in the same folder
    with pytest.raises(InputError, match="former adapter"):
        search(client.get_collection("exchanged"))
    assert client.get_collection("exchanged").count() == len(cranfield.XD)  # a wrong adapter hides no collection


def test_a_function_without_configuration_is_given_again(tmp_path):
    path = save_adapter(LinearAdapter(2), tmp_path / "adapter.safetensors")
    function = AdaptedEmbeddingFunction(Plain(), path)
    with pytest.warns(DeprecationWarning):
        assert function.get_config() is NotImplemented
    with pytest.warns(DeprecationWarning):
        client = chromadb.PersistentClient(str(tmp_path / "db"), settings())
        client.create_collection("lengths", embedding_function=function).add(ids=["a"], documents=["a"])
        found = open_collection(client, "lengths", function).query(query_texts=["ab"], n_results=1)
    assert found["ids"] == [["a"]]
