"""Adapters of queries and documents at a 32nd and a 20th of the bytes: `python benchmarks/smaller_pairs.py`.

Three tenths of the queries are tested, drawn alone (`query`) or with the documents that are relevant to them
(`document`); all documents are searched and stored at the budget, queries stay float32.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from pairs import make_split

import ega
from ega import PairAdapter
from ega.data.relevance import read_relevance_set
from ega.experiments.grids import cached_table
from ega.experiments.runs import platform_tag
from ega.measure.ranking import ranking_metrics
from ega.measure.search import knn
from ega.method.compression import as_stored, fit_projection, formats_within, project

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "data/results/smaller_pairs.parquet"
SETS, KINDS, SEEDS, RATIOS = ("scifact", "npl"), ("query", "document"), range(3), (32, 20)


def arms(queries, documents, pairs):
    "Yield name, adapted queries, stored documents, bytes of a document and what was selected."
    d = queries.shape[1]
    settings = [{}, *({"max_bytes": 4 * d // ratio} for ratio in RATIOS)]
    for given in settings:
        a = PairAdapter(device="cpu", **given).fit(queries, documents, pairs)
        zd = as_stored(a.transform_documents(documents), a.row_format_)
        name = f"PairAdapter({', '.join(f'{k}={v}' for k, v in given.items())})"
        yield name, a.transform_queries(queries), zd, a.row_format_.n_bytes, repr(a.selection_)
    for n_bytes in (4 * d // ratio for ratio in RATIOS):
        for row_format in formats_within(n_bytes, d):
            P = fit_projection(documents, row_format)
            zd = as_stored(project(documents, P), row_format)
            yield f"frozen, {row_format.precision}", project(queries, P), zd, row_format.n_bytes, ""


def measure(name, kind, seed):
    "A line for each arm: the change of nDCG@10 of each test query against the frozen float32 embeddings."
    relevance = read_relevance_set(ROOT / f"data/packs/{name}__all_minilm_l6_v2")
    queries, documents = relevance.queries.x, relevance.documents.x
    split = make_split(relevance, kind, seed)
    rows, relevant = split.test_queries, relevance.pairs[relevance.pairs[:, 2] > 0]
    first = np.full(len(queries), len(documents))
    np.minimum.at(first, relevant[:, 0], relevant[:, 1])  # the cluster of a query: its first relevant document

    def ndcg(zq, zd):
        return ranking_metrics(knn(zq[rows], zd, 10).I, relevance.pairs, queries=rows, k=10)["ndcg@10"]

    frozen, lines = ndcg(queries, documents), []
    about = {"set": name, "kind": kind, "seed": seed, "version": ega.__version__, "machine": platform_tag()}
    for arm, zq, zd, n_bytes, selected in arms(queries, documents, split.train_pairs):
        change = np.float32(ndcg(zq, zd) - frozen)
        line = about | {"method": arm, "n_bytes": n_bytes, "selected": selected, "frozen": 100 * frozen.mean()}
        lines.append(line | {"change": change, "new": split.new, "cluster": first[rows].astype(np.int32)})
    return pd.DataFrame(lines)


def main():
    keys = [(name, kind, seed) for seed in SEEDS for name in SETS for kind in KINDS]
    cached_table(RECORD, keys, ("set", "kind", "seed"), measure)


if __name__ == "__main__":
    main()
