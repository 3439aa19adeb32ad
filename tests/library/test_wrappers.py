"LangChain and LlamaIndex: retrieval through an adapter is exact search among adapted embeddings; async forms, caches."

import asyncio
import pickle

import cranfield
import numpy as np
import pytest

from ega.data.arrays import InputError
from ega.deploy.wrappers import AdaptedEmbedding, AdaptedEmbeddings

DOCUMENTS = dict(zip(cranfield.DOCUMENT_IDS.tolist(), (cranfield.XD * 3).tolist()))  # of any norm
QUERIES = dict(zip([f"q{i}" for i in range(20)], (cranfield.XQ * 0.5).tolist()))


def expected(adapter):
    return cranfield.ndcg(cranfield.DOCUMENT_IDS[cranfield.exact(adapter).I[: len(QUERIES)]])


# -- LangChain --------------------------------------------------------------------------------------------------


@pytest.fixture
def langchain():
    "The stored embeddings, and a function that searches a store that was filled with some and is searched with others."
    pytest.importorskip("langchain_core", reason="needs LangChain: pip install 'ega[langchain]'")
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import InMemoryVectorStore

    class Stored(Embeddings):
        n_async = 0

        def embed_documents(self, texts):
            return [DOCUMENTS[text] for text in texts]

        def embed_query(self, text):
            return QUERIES[text]

        async def aembed_documents(self, texts):
            self.n_async += 1
            return self.embed_documents(texts)

        async def aembed_query(self, text):
            self.n_async += 1
            return self.embed_query(text)

    def search(filled_with, searched_with):
        store = InMemoryVectorStore(filled_with)
        store.add_texts(list(DOCUMENTS))
        store.embedding = searched_with
        return [[document.page_content for document in store.similarity_search(query, k=10)] for query in QUERIES]

    return Stored(), search


@pytest.mark.parametrize("side", ["query", "both", "two"])
def test_a_store_of_langchain_returns_exact_search(langchain, tmp_path, side):
    (stored, search), adapter = langchain, cranfield.fitted(side)
    adapter.save(tmp_path / "adapter")
    adapted = AdaptedEmbeddings(stored, tmp_path / "adapter")
    found = cranfield.ndcg(search(adapted, adapted))
    assert found == pytest.approx(expected(adapter), abs=1e-9) != pytest.approx(expected(None), abs=1e-3)
    if side == "query":  # a store of frozen embeddings stays as it is
        assert cranfield.ndcg(search(stored, adapted)) == pytest.approx(expected(adapter), abs=1e-9)


def test_asynchronous_forms_of_langchain_await_those_of_the_wrapped_embeddings(langchain):
    stored, names = langchain[0], list(DOCUMENTS)[:3]
    adapted = AdaptedEmbeddings(stored, cranfield.fitted("two"))
    assert asyncio.run(adapted.aembed_documents(names)) == adapted.embed_documents(names)
    assert asyncio.run(adapted.aembed_query("q1")) == adapted.embed_query("q1")
    assert stored.n_async == 2 and adapted.embed_documents([]) == []
    z = cranfield.fitted("two").transform_queries(cranfield.XQ[1:2])[0]
    assert np.allclose(adapted.embed_query("q1"), z, atol=1e-6)


# -- LlamaIndex -------------------------------------------------------------------------------------------------


@pytest.fixture
def llamaindex():
    "The class of stored embeddings, and a function that searches an index."
    pytest.importorskip("llama_index.core", reason="needs LlamaIndex: pip install 'ega[llamaindex]'")
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import TextNode

    def search(filled_with, searched_with):
        index = VectorStoreIndex([TextNode(text=name) for name in DOCUMENTS], embed_model=filled_with)
        retriever = index.as_retriever(similarity_top_k=10, embed_model=searched_with)
        return [[node.text for node in retriever.retrieve(query)] for query in QUERIES]

    return StoredEmbedding(), search


try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
except ImportError:
    BaseEmbedding = object


class StoredEmbedding(BaseEmbedding):  # here, so that it can be pickled
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


@pytest.mark.parametrize("side", ["query", "both", "two"])
def test_an_index_of_llamaindex_returns_exact_search(llamaindex, side):
    (stored, search), adapter = llamaindex, cranfield.fitted(side)
    adapted = AdaptedEmbedding(stored, adapter)
    filled_with = stored if side == "query" else adapted  # an index of frozen embeddings stays as it is
    found = cranfield.ndcg(search(filled_with, adapted))
    assert found == pytest.approx(expected(adapter), abs=1e-9) != pytest.approx(expected(None), abs=1e-3)


def test_single_and_asynchronous_forms_of_llamaindex_are_those_of_a_batch(llamaindex, tmp_path):
    stored, adapter, names = llamaindex[0], cranfield.fitted("two"), list(DOCUMENTS)[:3]
    adapter.save(tmp_path / "adapter")
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


def test_a_cache_of_another_adapter_is_not_used(llamaindex):
    "An ingestion pipeline finds embeddings in its cache by the name of the model."
    from llama_index.core.ingestion import IngestionCache, IngestionPipeline
    from llama_index.core.schema import TextNode

    cache = IngestionCache()
    for side in ("query", "both", "query"):
        adapted = AdaptedEmbedding(llamaindex[0], cranfield.fitted(side))
        nodes = IngestionPipeline(transformations=[adapted], cache=cache).run(nodes=[TextNode(id_="1", text="1")])
        z = cranfield.fitted(side).transform_documents(cranfield.XD[:1])[0]
        assert np.allclose(nodes[0].embedding, z, atol=1e-6)


@pytest.mark.parametrize("adapter", (None, "missing", object(), np.eye(3, dtype="float32")), ids=range(4))
def test_wrong_adapters_and_widths_are_refused(langchain, llamaindex, adapter):
    with pytest.raises(InputError):
        AdaptedEmbeddings(langchain[0], adapter).embed_query("q0")
    with pytest.raises(InputError):
        AdaptedEmbedding(llamaindex[0], adapter).get_query_embedding("q0")
