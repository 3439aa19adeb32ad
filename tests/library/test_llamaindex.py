"LlamaIndex: an index behind an adapted embedding returns exact search among adapted embeddings; errors; async forms."

import asyncio
import pickle

import cranfield
import numpy as np
import pytest

from ega.data.arrays import InputError

pytest.importorskip("llama_index.core", reason="needs LlamaIndex: pip install 'ega[llamaindex]'")
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import IngestionCache, IngestionPipeline
from llama_index.core.schema import TextNode

from ega.deploy.llamaindex import AdaptedEmbedding

DOCUMENTS = dict(zip(cranfield.DOCUMENT_IDS.tolist(), (cranfield.XD * 3).tolist()))  # of any norm
QUERIES = dict(zip([f"q{i}" for i in range(20)], (cranfield.XQ * 0.5).tolist()))


class Stored(BaseEmbedding):
    "Embeddings by name."

    n_async: int = 0

    def _get_text_embedding(self, text):
        return DOCUMENTS[text]

    def _get_query_embedding(self, query):
        return QUERIES[query]

    async def _aget_text_embedding(self, text):
        self.n_async += 1
        return DOCUMENTS[text]

    async def _aget_query_embedding(self, query):
        self.n_async += 1
        return QUERIES[query]


def exact_ids(adapter):
    return cranfield.DOCUMENT_IDS[cranfield.exact(adapter).I[: len(QUERIES)]]


def search(filled_with, searched_with):
    index = VectorStoreIndex([TextNode(text=name) for name in DOCUMENTS], embed_model=filled_with)
    retriever = index.as_retriever(similarity_top_k=10, embed_model=searched_with)
    return [[node.text for node in retriever.retrieve(query)] for query in QUERIES]


@pytest.mark.parametrize("side", ["both", "two"])
def test_ndcg_through_an_index_is_that_of_exact_search(side):
    adapter = cranfield.fitted(side)
    adapted = AdaptedEmbedding(Stored(), adapter)
    expected = cranfield.ndcg(exact_ids(adapter))
    assert cranfield.ndcg(search(adapted, adapted)) == pytest.approx(expected, abs=1e-9)
    assert expected != pytest.approx(cranfield.ndcg(exact_ids(None)), abs=1e-3)


def test_an_existing_index_serves_an_adapter_of_queries():
    "Filled with frozen embeddings, searched with adapted queries."
    adapter = cranfield.fitted("query")
    found = search(Stored(), AdaptedEmbedding(Stored(), adapter))
    assert cranfield.ndcg(found) == pytest.approx(cranfield.ndcg(exact_ids(adapter)), abs=1e-9)


def test_single_and_asynchronous_forms_are_those_of_a_batch(tmp_path):
    adapter, names = cranfield.fitted("two"), list(DOCUMENTS)[:3]
    adapter.save(tmp_path / "adapter")
    stored = Stored()
    adapted = AdaptedEmbedding(stored, tmp_path / "adapter")
    batch = adapted.get_text_embedding_batch(names)
    assert np.allclose(batch, adapter.transform_documents(cranfield.XD[:3]), atol=1e-6)
    assert np.allclose([adapted.get_text_embedding(name) for name in names], batch, atol=1e-6)
    assert np.allclose(asyncio.run(adapted.aget_text_embedding_batch(names)), batch, atol=1e-6)
    assert np.allclose(asyncio.run(adapted.aget_text_embedding(names[0])), batch[0], atol=1e-6)
    query = adapted.get_query_embedding("q1")
    assert np.allclose(query, adapter.transform_queries(cranfield.XQ[1:2])[0], atol=1e-6)
    assert asyncio.run(adapted.aget_query_embedding("q1")) == query and stored.n_async == 5
    assert pickle.loads(pickle.dumps(adapted)).get_query_embedding("q1") == query
    assert adapted.get_text_embedding_batch([]) == []


def test_a_cache_of_another_adapter_is_not_used():
    "An ingestion pipeline finds embeddings in its cache by the name of the model."
    cache = IngestionCache()
    for side in ("query", "both", "query"):
        adapted = AdaptedEmbedding(Stored(), cranfield.fitted(side))
        nodes = IngestionPipeline(transformations=[adapted], cache=cache).run(nodes=[TextNode(id_="1", text="1")])
        z = cranfield.fitted(side).transform_documents(cranfield.XD[:1])[0]
        assert np.allclose(nodes[0].embedding, z, atol=1e-6)


@pytest.mark.parametrize("adapter", [None, "missing", np.ones(3), object()])
def test_wrong_adapters_are_refused(adapter):
    with pytest.raises(InputError):
        AdaptedEmbedding(Stored(), adapter)


def test_embeddings_of_another_width_are_refused():
    adapted = AdaptedEmbedding(Stored(), np.eye(3, dtype="float32"))
    for call in (lambda: adapted.get_query_embedding("q0"), lambda: adapted.get_text_embedding_batch(["1", "2"])):
        with pytest.raises(InputError, match="must have 3 columns, got 384"):
            call()


@pytest.mark.parametrize("embedding", [None, "all-MiniLM-L6-v2", Stored, object()])
def test_what_is_no_embedding_of_llamaindex_is_refused(embedding):
    with pytest.raises(InputError, match="embedding must be an embedding of LlamaIndex"):
        AdaptedEmbedding(embedding, cranfield.fitted("two"))
