"The committed Cranfield set and adapters fitted on half of its queries, for the tests of stores."

import functools
from pathlib import Path

import numpy as np

from ega.data.relevance import ranking_metrics, read_relevance_set, split_by_query
from ega.measure.search import knn
from ega.pairs import PairAdapter

FOLDER = Path(__file__).resolve().parents[2] / "data/packs/cranfield__all_minilm_l6_v2"
SET = read_relevance_set(FOLDER)
SPLIT = split_by_query(SET, np.arange(len(SET.queries)) % 2 == 1)
XQ, XD = SET.queries.x[SPLIT.test_queries], SET.documents.x  # queries that no adapter was fitted on; all documents
DOCUMENT_IDS = SET.documents.ids


@functools.cache
def fitted(side):
    "A PairAdapter fitted on the training pairs: side 'query', 'both' or 'two'."
    estimator = PairAdapter(side, max_unseen_loss=None, device="cpu")
    return estimator.fit(SET.queries.x, XD, SPLIT.train_pairs)


def ndcg(ids):
    "Mean nDCG@10 of lists of document ids, one list for each of the first rows of XQ."
    row_of_id = {name: row for row, name in enumerate(DOCUMENT_IDS.tolist())}
    rows = np.array([[row_of_id[name] for name in found] for found in np.asarray(ids).tolist()])
    return float(ranking_metrics(rows, SET.pairs, queries=SPLIT.test_queries[: len(rows)])["ndcg@10"].mean())


def exact(adapter, k=10):
    "Neighbours of exact search with both sides adapted; frozen for None."
    zq, zd = (XQ, XD) if adapter is None else (adapter.transform_queries(XQ), adapter.transform_documents(XD))
    return knn(zq, zd, k)
