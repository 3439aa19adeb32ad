"Committed and random sets of queries and documents, for the tests of relevance and ranking."

from functools import cache
from pathlib import Path

import numpy as np

from ega import EmbeddingSet, normalize
from ega.data.relevance import RelevanceSet, queries_with_relevant, read_relevance_set
from ega.measure.search import knn

PACKS = Path(__file__).resolve().parents[2] / "data/packs"
SETS = ("scifact", "cranfield", "npl", "med")


@cache
def stored(name):
    "A committed set, its queries with a relevant document, and the rows of all documents, ranked for each of them."
    relevance = read_relevance_set(PACKS / f"{name}__all_minilm_l6_v2")
    rows = queries_with_relevant(relevance.pairs)[:300]
    return relevance, rows, knn(relevance.queries.x[rows], relevance.documents.x, 100, device="cpu").I


def random_set(seed, n_queries=12, n_documents=30, n_pairs=80):
    "A set with random embeddings and grades 0 to 3."
    rng = np.random.default_rng(seed)
    queries, documents = (
        EmbeddingSet(normalize(rng.normal(size=(n, 4))), [-1] * n, meta={"set": "s", "encoder": "e"})
        for n in (n_queries, n_documents)
    )
    cells = rng.choice(n_queries * n_documents, n_pairs, replace=False)
    pairs = np.column_stack([cells // n_documents, cells % n_documents, rng.integers(0, 4, n_pairs)])
    return RelevanceSet(queries, documents, pairs)
