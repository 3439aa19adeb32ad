"LangChain: a store behind adapted embeddings returns exact search among adapted embeddings; errors; async forms."

import asyncio

import cranfield
import numpy as np
import pytest

from ega.data.arrays import InputError

pytest.importorskip("langchain_core", reason="needs LangChain: pip install 'ega[langchain]'")
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from ega.deploy.langchain import AdaptedEmbeddings

DOCUMENTS = dict(zip(cranfield.DOCUMENT_IDS.tolist(), (cranfield.XD * 3).tolist()))  # of any norm
QUERIES = dict(zip([f"q{i}" for i in range(20)], (cranfield.XQ * 0.5).tolist()))


class Stored(Embeddings):
    "Embeddings by name; only the asynchronous forms count their calls."

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


def exact_ids(adapter):
    return cranfield.DOCUMENT_IDS[cranfield.exact(adapter).I[: len(QUERIES)]]


def search(embeddings):
    store = InMemoryVectorStore(embeddings)
    store.add_texts(list(DOCUMENTS))
    return [[document.page_content for document in store.similarity_search(query, k=10)] for query in QUERIES]


@pytest.mark.parametrize("side", ["query", "both", "two"])
def test_ndcg_through_a_store_is_that_of_exact_search(tmp_path, side):
    adapter = cranfield.fitted(side)
    expected = cranfield.ndcg(exact_ids(adapter))
    assert cranfield.ndcg(search(AdaptedEmbeddings(Stored(), adapter))) == pytest.approx(expected, abs=1e-9)
    frozen = cranfield.ndcg(search(Stored()))
    assert frozen == pytest.approx(cranfield.ndcg(exact_ids(None)), abs=1e-9)
    assert frozen != pytest.approx(expected, abs=1e-3)
    adapter.save(tmp_path / "adapter")
    for folder in (tmp_path / "adapter", str(tmp_path / "adapter")):
        loaded = AdaptedEmbeddings(Stored(), folder)
        assert loaded.embed_query("q0") == AdaptedEmbeddings(Stored(), adapter).embed_query("q0")


def test_an_existing_store_serves_an_adapter_of_queries():
    "Filled with frozen embeddings, searched with adapted queries."
    adapter, store = cranfield.fitted("query"), InMemoryVectorStore(Stored())
    store.add_texts(list(DOCUMENTS))
    store.embedding = AdaptedEmbeddings(Stored(), adapter)
    found = [[document.page_content for document in store.similarity_search(query, k=10)] for query in QUERIES]
    expected = cranfield.ndcg(exact_ids(adapter))
    assert cranfield.ndcg(found) == pytest.approx(expected, abs=1e-9)


def test_asynchronous_forms_await_those_of_the_wrapped_embeddings():
    stored, names = Stored(), list(DOCUMENTS)[:3]
    adapted = AdaptedEmbeddings(stored, cranfield.fitted("two"))
    assert asyncio.run(adapted.aembed_documents(names)) == adapted.embed_documents(names)
    assert asyncio.run(adapted.aembed_query("q1")) == adapted.embed_query("q1")
    assert stored.n_async == 2
    z = cranfield.fitted("two").transform_queries(cranfield.XQ[1:2])[0]
    assert np.allclose(adapted.embed_query("q1"), z, atol=1e-6)  # rounding of rows of another norm


def test_no_text_gives_no_embedding():
    adapted = AdaptedEmbeddings(Stored(), cranfield.fitted("two"))
    assert adapted.embed_documents([]) == [] and asyncio.run(adapted.aembed_documents([])) == []


@pytest.mark.parametrize("adapter", [None, "missing", np.ones(3), object()])
def test_wrong_adapters_are_refused(adapter):
    with pytest.raises(InputError):
        AdaptedEmbeddings(Stored(), adapter)


def test_embeddings_of_another_width_are_refused():
    adapted = AdaptedEmbeddings(Stored(), np.eye(3, dtype="float32"))
    for call in (lambda: adapted.embed_query("q0"), lambda: adapted.embed_documents(list(DOCUMENTS)[:2])):
        with pytest.raises(InputError, match="must have 3 columns, got 384"):
            call()


@pytest.mark.parametrize("embeddings", [None, "all-MiniLM-L6-v2", Stored, object()])
def test_what_are_no_embeddings_of_langchain_is_refused(embeddings):
    with pytest.raises(InputError, match="embeddings must be LangChain embeddings"):
        AdaptedEmbeddings(embeddings, cranfield.fitted("two"))
