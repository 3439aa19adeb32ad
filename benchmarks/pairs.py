"""Peers that learn from pairs of query and document, and the measurement of all methods on one split.

Each peer is a function written from its documentation or paper; the packages themselves are not installed.
- LlamaIndex: `EmbeddingAdapterFinetuneEngine`, a matrix for the queries.
- Dense head: a matrix for both sides behind a model of sentence-transformers.
- NUDGE (Zeighami et al. 2024, arXiv 2409.02343) moves each document that training queries name towards their sum, by
  one length for all documents: NUDGE-M adds a vector of that length, NUDGE-N turns the document on the sphere.
A peer with settings chooses among six, or among 25 lengths, on a fifth of the training queries.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.sparse import csr_array
from torch.nn import functional as F

from ega.data.arrays import check_X, normalize
from ega.data.relevance import RelevanceSet, queries_with_relevant
from ega.data.runtime import limit_threads
from ega.measure.ranking import ranking_metrics
from ega.measure.search import knn
from ega.method.adapters import transform
from ega.pairs import PAIR_CANDIDATES, PairConfig, fit_pair_path, select_pair_adapter
from ega.selection import pick_candidate


class RelevanceSplit(NamedTuple):
    "Pairs to train on and queries to test on; no query is in both."

    train_pairs: np.ndarray  # (m, 3) int64: query row, document row, grade
    test_queries: np.ndarray  # (t,) ascending query rows
    new: np.ndarray  # (t,) bool: no relevant document of this query is in a training pair


def _as_split(pairs, train, test_queries):
    "The split of the pairs that are marked for training and the test queries."
    train_pairs = pairs[train & np.isin(pairs[:, 0], queries_with_relevant(pairs[train]))]
    relevant = pairs[pairs[:, 2] > 0]
    for_known = relevant[np.isin(relevant[:, 1], train_pairs[:, 1]), 0]
    return RelevanceSplit(train_pairs, test_queries, ~np.isin(test_queries, for_known))


def split_by_query(relevance, is_test):
    "Test on the queries that are marked (n_queries,)."
    rows = queries_with_relevant(relevance.pairs)
    return _as_split(relevance.pairs, ~is_test[relevance.pairs[:, 0]], rows[is_test[rows]])


def split_by_document(relevance, rng, *, test_fraction):
    """Hold documents out: no query and no document is on both sides.

    Queries are drawn one after another and the documents relevant to them are held out, until the queries whose
    relevant documents are all held out, which are tested, are at least `test_fraction` of all."""
    pairs, shape = relevance.pairs, (len(relevance.queries), len(relevance.documents))
    relevant = pairs[pairs[:, 2] > 0]
    links = csr_array((np.ones(len(relevant)), (relevant[:, 0], relevant[:, 1])), shape)
    has_relevant = np.diff(links.indptr) > 0
    held, is_test = np.zeros(shape[1], bool), np.zeros(shape[0], bool)
    for query in rng.permutation(np.flatnonzero(has_relevant)):
        if is_test.sum() >= test_fraction * has_relevant.sum():
            break
        held[links.indices[links.indptr[query] : links.indptr[query + 1]]] = True
        is_test = has_relevant & (links @ ~held == 0)
    return _as_split(pairs, ~is_test[pairs[:, 0]] & ~held[pairs[:, 1]], np.flatnonzero(is_test))


def make_split(relevance, kind, seed, n_queries=0):
    """Split a RelevanceSet into training pairs and test queries.

    `kind` is "own": test queries of the set; "query", "document": three tenths of the queries, drawn with `seed`.
    Of the training queries `n_queries` are kept, drawn; 0 keeps all."""
    rng = np.random.default_rng(seed)
    if kind == "document":
        split = split_by_document(relevance, rng, test_fraction=0.3)
    else:
        own = kind == "own"
        is_test = relevance.queries.split == "test" if own else rng.random(len(relevance.queries)) < 0.3
        split = split_by_query(relevance, is_test)
    if not n_queries:
        return split
    kept = rng.permutation(np.unique(split.train_pairs[:, 0]))[:n_queries]
    train = split.train_pairs[np.isin(split.train_pairs[:, 0], kept)]
    relevant = relevance.pairs[relevance.pairs[:, 2] > 0]
    known = np.unique(relevant[np.isin(relevant[:, 1], train[:, 1]), 0])
    return RelevanceSplit(train, split.test_queries, ~np.isin(split.test_queries, known))


def ndcg_at_10(zq, zd, pairs, rows):
    "nDCG@10 of the query rows `rows` when documents of any norm are searched by inner product."
    zq, squares = zq[rows], np.square(zd).sum(1)
    if np.ptp(squares) > 1e-4:
        zd = np.column_stack([zd, np.sqrt(squares.max() - squares)])
        zq = np.column_stack([zq, np.zeros(len(zq), zq.dtype)])
    k = min(10, len(zd))
    return ranking_metrics(knn(zq, zd, k).I, pairs, queries=rows, k=k)[f"ndcg@{k}"]


@dataclass(frozen=True)
class InBatch:
    "How a linear map is trained with the documents of a batch as negatives."

    side: str  # "query": queries alone; "both": the same map for queries and documents
    lr: float  # largest learning rate
    epochs: int
    batch_size: int
    weight_decay: float
    warmup: float  # share of the steps in which the learning rate rises
    one_document: bool  # only the first relevant document of each query, and no random order


LLAMA_INDEX = InBatch("query", 2e-5, 1, 10, weight_decay=0.01, warmup=0.1, one_document=True)
DENSE_HEAD = InBatch("both", 5e-5, 3, 8, weight_decay=0.0, warmup=0.0, one_document=False)


def in_batch_loss(zq: torch.Tensor, zd: torch.Tensor, scale: float = 20.0) -> torch.Tensor:  # scalar, nats
    "MultipleNegativesRankingLoss of (B, d) queries and the document of each, with its default cosine similarity."
    scores = scale * F.normalize(zq) @ F.normalize(zd).T
    return F.cross_entropy(scores, torch.arange(len(zq)))


def lr_share(step: int, n_steps: int, n_warmup: int) -> float:
    "Share of the largest learning rate at a step: linear from 0, then linear to 0."
    if step < n_warmup:
        return step / n_warmup
    return (n_steps - step) / max(1, n_steps - n_warmup)


@limit_threads()
def train_in_batch(config, queries, documents, pairs, *, seed=0):
    "Train a matrix for queries, or for queries and documents, with the documents of a batch as negatives."
    relevant = pairs[pairs[:, 2] > 0]
    if config.one_document:
        relevant = relevant[np.unique(relevant[:, 0], return_index=True)[1]]
    xq, xd = torch.from_numpy(queries[relevant[:, 0]]), torch.from_numpy(documents[relevant[:, 1]])
    matrix = torch.eye(xq.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([matrix], lr=config.lr, weight_decay=config.weight_decay)
    n_steps = config.epochs * -(-len(xq) // config.batch_size)
    n_warmup = int(config.warmup * n_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, n_steps, n_warmup))
    gen = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs):
        order = torch.arange(len(xq)) if config.one_document else torch.randperm(len(xq), generator=gen)
        for rows in order.split(config.batch_size):
            zd = xd[rows] @ matrix if config.side == "both" else xd[rows]
            optimizer.zero_grad()
            in_batch_loss(xq[rows] @ matrix, zd).backward()
            torch.nn.utils.clip_grad_norm_([matrix], 1.0)
            optimizer.step()
            schedule.step()
    return matrix.detach().numpy()


def fit_in_batch(config, queries, documents, pairs):  # adapted queries, adapted documents
    "Train a map on pairs and apply it."
    matrix = train_in_batch(config, queries, documents, pairs)
    zd = normalize(documents @ matrix) if config.side == "both" else documents
    return normalize(queries @ matrix), zd


LENGTHS = tuple(np.sqrt(0.02 * np.arange(25)).round(4).tolist())


def nudge(documents, queries, pairs, length, *, on_sphere):
    "Move documents that pairs name by a length towards the sum of their queries: NUDGE-M, on the sphere NUDGE-N."
    relevant = pairs[pairs[:, 2] > 0]
    named, place = np.unique(relevant[:, 1], return_inverse=True)
    sums = np.zeros((len(named), documents.shape[1]), np.float32)
    np.add.at(sums, place, queries[relevant[:, 0]])
    towards, x = normalize(sums), documents[named]
    moved = documents.copy()
    if not on_sphere:
        moved[named] = x + length * towards
        return moved
    cosine = (x * towards).sum(1, keepdims=True).clip(-1, 1)
    sideways = towards - cosine * x
    norm = np.linalg.norm(sideways, axis=1, keepdims=True)
    angle = np.minimum(2 * np.arcsin(length / 2), np.arccos(cosine))
    turned = np.cos(angle) * x + np.sin(angle) * sideways / np.maximum(norm, 1e-12)
    moved[named] = np.where(norm > 1e-6, turned, x)
    return moved


def fit_nudge(length, queries, documents, pairs, *, on_sphere):  # queries, moved documents
    "Apply NUDGE-M or, on the sphere, NUDGE-N: move each named document by `length`."
    return queries, nudge(documents, queries, pairs, length, on_sphere=on_sphere)


def choose_setting(settings, fit, queries, documents, pairs, *, seed=0):
    "The setting for `fit` with the best nDCG@10 on a fifth of the training queries; the first of equals."
    if len(settings) == 1:
        return settings[0]
    rows = np.random.default_rng(seed).permutation(queries_with_relevant(pairs))
    held = np.sort(rows[: max(1, len(rows) // 5)])
    train = pairs[~np.isin(pairs[:, 0], held)]
    values = [ndcg_at_10(*fit(s, queries, documents, train), pairs, held).mean() for s in settings]
    return settings[int(np.argmax(values))]


def _settings_of(config):
    "Three learning rates and two numbers of epochs; the first is the default."
    rates = (config.lr, 2e-4, 1e-3)
    return [replace(config, lr=lr, epochs=epochs) for epochs in (config.epochs, 10) for lr in rates]


PEERS = {  # name -> function that fits a setting, and the settings
    "LlamaIndex": (fit_in_batch, [LLAMA_INDEX]),
    "LlamaIndex, chosen": (fit_in_batch, _settings_of(LLAMA_INDEX)),
    "dense head": (fit_in_batch, [DENSE_HEAD]),
    "dense head, chosen": (fit_in_batch, _settings_of(DENSE_HEAD)),
    "NUDGE-M": (partial(fit_nudge, on_sphere=False), LENGTHS),
    "NUDGE-N": (partial(fit_nudge, on_sphere=True), LENGTHS),
}


def _row(arm, ndcg, seconds, choice=""):
    "A row of the table of `measure_split`."
    return {"arm": arm, "ndcg": np.uint16(np.round(10_000 * ndcg)), "cpu_seconds": seconds, "choice": choice}


def _measure_peers(queries, documents, split, pairs):
    "A row for the frozen embeddings and for each peer."
    rows = [_row("frozen", ndcg_at_10(queries, documents, pairs, split.test_queries), 0.0)]
    for name, (fit, settings) in PEERS.items():
        start = time.process_time()
        chosen = choose_setting(settings, fit, queries, documents, split.train_pairs)
        adapted = fit(chosen, queries, documents, split.train_pairs)
        seconds = time.process_time() - start
        text = f"lr={chosen.lr:g} epochs={chosen.epochs}" if isinstance(chosen, InBatch) else f"length={chosen:g}"
        rows.append(_row(name, ndcg_at_10(*adapted, pairs, split.test_queries), seconds, text))
    return rows


def _measure_candidates(queries, documents, split, pairs, table):
    "A row for centring, and for each candidate of `PairAdapter` at the strengths of its table of the selection."
    candidates = {name: config for name, config in PAIR_CANDIDATES.items() if name in set(table.method)}
    rows = []
    for name, config in ({"centring": PairConfig("both", 1.0)} | candidates).items():
        start = time.process_time()
        path = fit_pair_path(config, queries, documents, split.train_pairs, device="cpu")
        seconds = time.process_time() - start
        for strength in (1.0,) if name == "centring" else table.strength[table.method == name]:
            query_adapter, document_adapter = path.at(strength)
            zq = np.zeros_like(queries)
            zq[split.test_queries] = transform(query_adapter, queries[split.test_queries], device="cpu")
            zd = transform(document_adapter, documents, device="cpu")
            rows.append(_row(f"{name} at {strength:g}", ndcg_at_10(zq, zd, pairs, split.test_queries), seconds))
    return rows


ESTIMATES = ["seen", "seen_bound", "unseen", "unseen_bound", "unseen_bound_simultaneous"]


def add_estimates(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    "Add the estimates of the selection, and mark what it selects among all candidates and on the query side alone."
    estimates = table.assign(arm=table.method + " at " + table.strength.map("{:g}".format)).set_index("arm")
    estimates = estimates.rename({"frozen at 0": "frozen"})
    rows = rows.join(estimates[ESTIMATES].astype(np.float32), on="arm")
    rows["passes"] = rows.arm.map(estimates.safety_check == "pass").eq(True)
    by_side = estimates[estimates.method.isin(["frozen", "query"])]
    rows["is_default"] = rows.arm == pick_candidate(estimates).name
    rows["is_query_side"] = rows.arm == pick_candidate(by_side).name
    return rows


def measure_split(relevance: RelevanceSet, split: RelevanceSplit) -> pd.DataFrame:  # a row for each arm
    "Fit every method on the training pairs of a split and measure nDCG@10 of its test queries."
    queries, documents = check_X(relevance.queries.x, "queries"), check_X(relevance.documents.x, "documents")
    start = time.process_time()
    table = select_pair_adapter(queries, documents, split.train_pairs, device="cpu").table
    seconds = time.process_time() - start
    rows = _measure_peers(queries, documents, split, relevance.pairs)
    rows += _measure_candidates(queries, documents, split, relevance.pairs, table)
    rows = add_estimates(pd.DataFrame(rows), table)
    is_frozen = rows.arm == "frozen"
    rows.loc[is_frozen, "cpu_seconds"] = seconds  # of the selection
    relevant = relevance.pairs[relevance.pairs[:, 2] > 0]
    cluster = pd.Series(relevant[:, 1]).groupby(relevant[:, 0]).min()[split.test_queries].to_numpy()
    of_queries = {"query": np.int32(split.test_queries), "cluster": np.int32(cluster), "new": split.new}
    for name, values in of_queries.items():
        rows[name] = [values if frozen else values[:0] for frozen in is_frozen]
    return rows.assign(n_fitted=len(np.unique(split.train_pairs[:, 0])))
