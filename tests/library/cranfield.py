"The committed Cranfield set and adapters fitted on half of its queries, for the tests of stores."

import functools
from pathlib import Path

import numpy as np

from ega.data.relevance import queries_with_relevant, read_relevance_set
from ega.measure.ranking import ranking_metrics
from ega.measure.search import knn
from ega.pairs import PairAdapter

FOLDER = Path(__file__).resolve().parents[2] / "data/packs/cranfield__all_minilm_l6_v2"
SET = read_relevance_set(FOLDER)
TRAIN_PAIRS = SET.pairs[SET.pairs[:, 0] % 2 == 0]
TEST_QUERIES = queries_with_relevant(SET.pairs[SET.pairs[:, 0] % 2 == 1])
XQ, XD = SET.queries.x[TEST_QUERIES], SET.documents.x  # queries that no adapter was fitted on; all documents
DOCUMENT_IDS = SET.documents.ids


@functools.cache
def fitted(side):
    "A PairAdapter fitted on the training pairs: side 'query', 'both' or 'two'."
    estimator = PairAdapter(side, max_unseen_loss=None, device="cpu")
    return estimator.fit(SET.queries.x, XD, TRAIN_PAIRS)


def ndcg(ids):
    "Mean nDCG@10 of lists of document ids, one list for each of the first rows of XQ."
    row_of_id = {name: row for row, name in enumerate(DOCUMENT_IDS.tolist())}
    rows = np.array([[row_of_id[name] for name in found] for found in np.asarray(ids).tolist()])
    return float(ranking_metrics(rows, SET.pairs, queries=TEST_QUERIES[: len(rows)])["ndcg@10"].mean())


def exact(adapter, k=10):
    "Neighbours of exact search with both sides adapted; frozen for None."
    zq, zd = (XQ, XD) if adapter is None else (adapter.transform_queries(XQ), adapter.transform_documents(XD))
    return knn(zq, zd, k)
