"Ranking measures against pytrec_eval and scikit-learn."

import numpy as np
import pytest
import pytrec_eval
from relevance_sets import SETS, random_set, stored
from sklearn.metrics import average_precision_score, ndcg_score

from ega.data.relevance import queries_with_relevant
from ega.measure.ranking import ranking_metrics
from ega.measure.search import knn

TREC = {"ndcg": "ndcg_cut_{}", "recall": "recall_{}", "map": "map_cut_{}", "hit": "success_{}", "mrr": "recip_rank"}


def trec_values(run, pairs, rows, k):
    "The measures of pytrec_eval; `run`: for each query a dict of document id -> score, of at most k documents."
    qrels = {str(q): {} for q in rows}
    for q, d, grade in pairs.tolist():
        if str(q) in qrels:
            qrels[str(q)][f"d{d}"] = grade
    names = {name: measure.format(k) for name, measure in TREC.items()}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, set(names.values()))
    found = evaluator.evaluate({str(q): scores for q, scores in zip(rows, run)})
    return {f"{name}@{k}": np.array([found[str(q)][measure] for q in rows]) for name, measure in names.items()}


def assert_equal_to_trec_eval(I, pairs, rows, k):
    run = [{f"d{d}": -float(place) for place, d in enumerate(line[:k]) if d >= 0} for line in I.tolist()]
    ours, theirs = ranking_metrics(I, pairs, queries=rows, k=k), trec_values(run, pairs, rows, k)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-12, err_msg=name)


@pytest.mark.parametrize("k", [1, 10, 100])
@pytest.mark.parametrize("name", SETS)
def test_measures_equal_those_of_trec_eval(name, k):
    relevance, rows, I = stored(name)
    assert_equal_to_trec_eval(I, relevance.pairs, rows, k)


@pytest.mark.parametrize("seed", range(3))
def test_grades_padding_and_judged_irrelevant_documents_equal_trec_eval(seed):
    relevance, rng = random_set(seed), np.random.default_rng(seed)
    rows = queries_with_relevant(relevance.pairs)
    I = knn(relevance.queries.x[rows], relevance.documents.x, 10, device="cpu").I
    I[rng.random(len(I)) < 0.5, 6:] = -1  # shorter lists
    assert_equal_to_trec_eval(I, relevance.pairs, rows, 10)


@pytest.mark.parametrize("name", ["cranfield", "med"])
def test_ndcg_and_map_equal_scikit_learn(name):
    "A second implementation, on the full ranking: it takes scores of all documents and no lists."
    relevance, rows, _ = stored(name)
    rows, n = rows[:40], len(relevance.documents)
    I = knn(relevance.queries.x[rows], relevance.documents.x, n, device="cpu").I
    grades = np.zeros((len(relevance.queries), n))
    grades[tuple(relevance.pairs[:, :2].T)] = relevance.pairs[:, 2]
    scores = np.empty((len(rows), n))
    np.put_along_axis(scores, I, -np.arange(n, dtype=float)[None], 1)
    ours = ranking_metrics(I, relevance.pairs, queries=rows, k=n)
    mean_precision = [average_precision_score(g > 0, s) for g, s in zip(grades[rows], scores)]
    np.testing.assert_allclose(ours[f"map@{n}"], mean_precision, atol=1e-9)
    ten = ranking_metrics(I, relevance.pairs, queries=rows, k=10)["ndcg@10"]
    np.testing.assert_allclose(ten.mean(), ndcg_score(grades[rows], scores, k=10, ignore_ties=True), atol=1e-9)
    np.testing.assert_allclose(ours[f"ndcg@{n}"].mean(), ndcg_score(grades[rows], scores, ignore_ties=True), atol=1e-9)


@pytest.mark.parametrize("name", ["npl", "med"])
def test_equal_scores_keep_the_order_of_rows_as_trec_eval_that_of_ids(name):
    "Each document twice: equal scores. trec_eval puts the id that comes last in the alphabet first."
    relevance, rows, _ = stored(name)
    rows, n = rows[:30], min(500, len(relevance.documents))
    x = np.repeat(relevance.documents.x[:n], 2, 0)
    pairs = np.column_stack([np.repeat(rows, 3), np.tile([0, 7, 9], len(rows)), np.tile([1, 2, 1], len(rows))])
    near = knn(relevance.queries.x[rows], x, 20, device="cpu")
    assert (near.D[:, ::2] == near.D[:, 1::2]).all()  # ties indeed, within float32
    first = 2 * n
    qrels = {str(q): {f"{first - d:05d}": int(g) for _, d, g in pairs[pairs[:, 0] == q]} for q in rows}
    run = {
        str(q): {f"{first - d:05d}": -float(score) for d, score in zip(ids.tolist(), scores)}
        for q, ids, scores in zip(rows, near.I, near.D)
    }
    found = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut_5", "map_cut_5"}).evaluate(run)
    ours = ranking_metrics(near.I, pairs, queries=rows, k=5)
    for measure, trec in (("ndcg@5", "ndcg_cut_5"), ("map@5", "map_cut_5")):
        np.testing.assert_allclose(ours[measure], [found[str(q)][trec] for q in rows], atol=1e-12)
