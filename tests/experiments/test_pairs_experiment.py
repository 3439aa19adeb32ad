"Peers that learn from pairs, against packages, brute force and values worked out by hand; the splits and one run."

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pairs import (
    DENSE_HEAD,
    LLAMA_INDEX,
    PEERS,
    choose_setting,
    in_batch_loss,
    lr_share,
    make_split,
    measure_split,
    ndcg_at_10,
    nudge,
    split_by_document,
    split_by_query,
    train_in_batch,
)
from relevance_sets import SETS, random_set, stored

from ega import EmbeddingSet, PairAdapter
from ega.data.arrays import normalize
from ega.data.relevance import RelevanceSet, queries_with_relevant, read_relevance_set
from ega.measure.ranking import ranking_metrics


def planted(n_documents=40, queries_each=2, d=12, seed=0):
    "A set in which queries differ from their documents along three directions."
    rng = np.random.default_rng(seed)
    documents = rng.normal(size=(n_documents, d))
    owner = np.repeat(np.arange(n_documents), queries_each)
    queries = documents[owner] + rng.normal(size=(len(owner), d)) * np.r_[np.full(3, 2.0), np.full(d - 3, 0.1)]
    pairs = np.column_stack([np.arange(len(owner)), owner])
    sides = [EmbeddingSet(np.float32(normalize(x)), [-1] * len(x)) for x in (queries, documents)]
    return RelevanceSet(*sides, pairs)


SET = planted()
QUERIES, DOCUMENTS, PAIRS = SET.queries.x, SET.documents.x, SET.pairs


def test_loss_is_that_of_its_formula():
    "In a loop: minus the log of the share of the own document, at 20 times the cosine."
    zq, zd = QUERIES[:7] * 3, DOCUMENTS[PAIRS[:7, 1]] * 2
    terms = []
    for i in range(7):
        cosines = [zq[i] @ d / np.linalg.norm(zq[i]) / np.linalg.norm(d) for d in zd]
        terms.append(np.log(np.sum(np.exp(20 * np.array(cosines)))) - 20 * cosines[i])
    assert float(in_batch_loss(torch.from_numpy(zq), torch.from_numpy(zd))) == pytest.approx(np.mean(terms), abs=1e-5)


@pytest.mark.parametrize("n_warmup", [0, 3])
def test_learning_rate_is_that_of_transformers(n_warmup):
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, n_warmup, 10)
    for step in range(10):
        assert lr_share(step, 10, n_warmup) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("side", ["query", "both"])
def test_first_step_of_adamw(side):
    "A single batch: AdamW moves each weight by the learning rate against the sign of its gradient."
    config = replace(LLAMA_INDEX, side=side, lr=1e-3, batch_size=len(PAIRS), weight_decay=0.1)
    matrix = torch.eye(12, requires_grad=True)
    xq, xd = torch.from_numpy(QUERIES), torch.from_numpy(DOCUMENTS[PAIRS[:, 1]])
    in_batch_loss(xq @ matrix, xd @ matrix if side == "both" else xd).backward()
    expected = (1 - 1e-4) * np.eye(12) - 1e-3 * np.sign(matrix.grad.numpy())
    assert np.allclose(train_in_batch(config, QUERIES, DOCUMENTS, PAIRS), expected, atol=1e-5)


def test_llama_index_takes_the_first_document_of_each_query_in_order():
    more = np.vstack([PAIRS, np.column_stack([PAIRS[:, 0], (PAIRS[:, 1] + 5) % 40, PAIRS[:, 2]])])
    config = replace(LLAMA_INDEX, lr=1e-2, epochs=2)
    expected = train_in_batch(config, QUERIES, DOCUMENTS, PAIRS)
    assert np.array_equal(train_in_batch(config, QUERIES, DOCUMENTS, more), expected)
    assert np.array_equal(train_in_batch(config, QUERIES, DOCUMENTS, PAIRS, seed=1), expected)
    config = replace(DENSE_HEAD, lr=1e-2)
    one, two = (train_in_batch(config, QUERIES, DOCUMENTS, PAIRS, seed=seed) for seed in (0, 1))
    assert not np.array_equal(one, two)
    assert not np.array_equal(train_in_batch(config, QUERIES, DOCUMENTS, more), one)


@pytest.mark.parametrize("on_sphere", [False, True])
@pytest.mark.parametrize("length", [0.2, 0.6, 1.5])
def test_nudge_is_the_best_of_all_moves_of_its_length(on_sphere, length):
    "No random move of at most that length has a larger sum of inner products with the training queries."
    rng, pairs = np.random.default_rng(0), PAIRS[:40]  # names the first 20 documents
    moved = nudge(DOCUMENTS, QUERIES, pairs, length, on_sphere=on_sphere)
    assert np.array_equal(moved[20:], DOCUMENTS[20:])
    assert (np.linalg.norm(moved - DOCUMENTS, axis=1) <= length + 1e-5).all()
    if on_sphere:
        assert np.allclose(np.linalg.norm(moved, axis=1), 1, atol=1e-5)
    for document in range(20):
        total = QUERIES[pairs[pairs[:, 1] == document, 0]].sum(0)
        tried = rng.normal(size=(3000, 12)) * 10.0 ** rng.uniform(-2, 0, (3000, 1))
        tried = moved[document] + tried
        if on_sphere:
            tried = normalize(tried)
        allowed = np.linalg.norm(tried - DOCUMENTS[document], axis=1) <= length
        assert allowed.sum() > 50
        assert (tried[allowed] @ total).max() <= moved[document] @ total + 1e-5


def test_search_is_by_inner_product():
    rng = np.random.default_rng(1)
    documents = DOCUMENTS * np.float32(rng.uniform(0.5, 2, (len(DOCUMENTS), 1)))
    rows = np.arange(5, 30)
    order = np.argsort(-(QUERIES[rows] @ documents.T), axis=1)[:, :10]
    expected = ranking_metrics(order, PAIRS, queries=rows)["ndcg@10"]
    assert np.allclose(ndcg_at_10(QUERIES, documents, PAIRS, rows), expected)
    by_distance = np.argsort(np.square(QUERIES[rows, None] - documents).sum(2), axis=1)[:, :10]
    assert not np.allclose(ranking_metrics(by_distance, PAIRS, queries=rows)["ndcg@10"], expected)


def test_choice_is_made_on_queries_that_were_not_fitted():
    seen = []

    def fit(setting, queries, documents, pairs):
        seen.append(set(pairs[:, 0].tolist()))
        return queries, documents if setting == "keep" else documents[::-1].copy()

    assert choose_setting(["reverse", "keep", "reverse"], fit, QUERIES, DOCUMENTS, PAIRS) == "keep"
    assert all(len(rows) == 64 for rows in seen) and len(seen) == 3  # four fifths of 80 queries
    assert choose_setting(["only"], None, QUERIES, DOCUMENTS, PAIRS) == "only"


@pytest.mark.parametrize("kind", ["own", "query", "document"])
def test_splits(kind):
    own = EmbeddingSet(QUERIES, [-1] * 80, split=["test" if i % 3 == 0 else "train" for i in range(80)])
    relevance = RelevanceSet(own, SET.documents, PAIRS)
    split, again = make_split(relevance, kind, 3), make_split(relevance, kind, 3)
    assert np.array_equal(split.train_pairs, again.train_pairs) and np.array_equal(split.new, again.new)
    assert not np.isin(split.test_queries, split.train_pairs[:, 0]).any()
    owner = PAIRS[split.test_queries, 1]
    assert np.array_equal(split.new, ~np.isin(owner, split.train_pairs[:, 1]))
    if kind == "document":
        assert split.new.all()
    few = make_split(relevance, kind, 3, n_queries=10)
    assert len(np.unique(few.train_pairs[:, 0])) == 10 and np.array_equal(few.test_queries, split.test_queries)
    assert np.isin(few.train_pairs[:, 0], split.train_pairs[:, 0]).all()
    assert np.array_equal(few.new, ~np.isin(owner, few.train_pairs[:, 1]))


def test_measured_rows_are_those_of_the_estimator():
    split = make_split(SET, "query", 0)
    rows = measure_split(SET, split).set_index("arm")
    assert rows.is_default.sum() == rows.is_query_side.sum() == 1
    for side, column in (("auto", "is_default"), ("query", "is_query_side")):
        estimator = PairAdapter(side, device="cpu").fit(QUERIES, DOCUMENTS, split.train_pairs)
        selected, row = estimator.selection_, rows[rows[column]].iloc[0]
        assert row.name == ("frozen" if selected.frozen else f"{selected.method} at {selected.strength:g}")
        adapted = estimator.transform_queries(QUERIES), estimator.transform_documents(DOCUMENTS)
        assert np.abs(row.ndcg - 1e4 * ndcg_at_10(*adapted, PAIRS, split.test_queries)).max() <= 0.5 + 1e-6
        table = selected.table.set_index(["method", "strength"])
        if not selected.frozen:
            assert row.unseen_bound == pytest.approx(table.unseen_bound[selected.method, selected.strength], abs=1e-4)
    assert {*PEERS, "frozen", "centring at 1"} <= set(rows.index)
    assert all(len(ndcg) == len(split.test_queries) for ndcg in rows.ndcg)
    assert np.array_equal(rows["query"]["frozen"], split.test_queries)
    assert np.array_equal(rows.cluster["frozen"], PAIRS[split.test_queries, 1])


def test_a_stored_split_comes_out_again():
    "One split of MED, the smallest set: the stored nDCG of every arm within a point in the mean over queries."
    data = Path(__file__).resolve().parents[2] / "data"
    key = {"set": "med", "kind": "document", "seed": 0, "n_queries": 0}
    stored = pd.read_parquet(data / "results/pairs.parquet", filters=[(k, "==", v) for k, v in key.items()])
    relevance = read_relevance_set(data / "packs/med__all_minilm_l6_v2")
    rows = measure_split(relevance, make_split(relevance, "document", 0))
    assert rows.arm.tolist() == stored.arm.tolist() and rows.choice.tolist() == stored.choice.tolist()
    assert rows.is_default.tolist() == stored.is_default.tolist()
    for new, old in zip(rows.ndcg, stored.ndcg):
        assert abs(new.astype(float) - old.astype(float)).mean() < 100  # processors round differently
    assert np.allclose(rows.unseen.dropna(), stored.unseen.dropna(), atol=0.5)


def check_split(relevance, split):
    "No query on both sides; `new` by loops."
    assert not set(split.train_pairs[:, 0]) & set(split.test_queries)
    assert set(split.train_pairs[:, 0]) <= set(queries_with_relevant(split.train_pairs))
    known = set(split.train_pairs[:, 1])
    for query, new in zip(split.test_queries, split.new, strict=True):
        relevant = [d for q, d, grade in relevance.pairs if q == query and grade > 0]
        assert relevant and new == (not known & set(relevant))


@pytest.mark.parametrize("seed", range(10))
def test_splits_of_random_sets(seed):
    relevance, rng = random_set(seed, 30, 100, 90), np.random.default_rng(seed)
    is_test = rng.random(30) < 0.4
    by_query = split_by_query(relevance, is_test)
    check_split(relevance, by_query)
    assert by_query.test_queries.tolist() == [q for q in queries_with_relevant(relevance.pairs) if is_test[q]]
    by_document = split_by_document(relevance, rng, test_fraction=0.3)
    check_split(relevance, by_document)
    assert by_document.new.all()
    assert len(by_document.test_queries) >= 0.3 * len(queries_with_relevant(relevance.pairs))


@pytest.mark.parametrize("name", SETS)
def test_splits_of_the_public_sets(name):
    relevance = stored(name)[0]
    split = split_by_document(relevance, np.random.default_rng(0), test_fraction=0.2)
    again = split_by_document(relevance, np.random.default_rng(0), test_fraction=0.2)
    check_split(relevance, split)
    assert split.new.all() and all(np.array_equal(a, b) for a, b in zip(split, again))
    share = len(split.test_queries) / len(queries_with_relevant(relevance.pairs))
    assert 0.2 <= share <= 0.35 and len(split.train_pairs) > 0.25 * len(relevance.pairs)
