"""Adapters from pairs: closed form, softmax over documents, folds, selection, estimator and evaluation."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from ega import EmbeddingAdapter, InputError
from ega import pairs as module
from ega.data.arrays import normalize
from ega.measure.ranking import ranking_metrics
from ega.measure.search import knn
from ega.method.adapters import transform
from ega.method.config import TrainConfig
from ega.pairs import (
    PAIR_CANDIDATES,
    PairAdapter,
    PairConfig,
    evaluate_pairs,
    fit_pair_path,
    load_estimator,
    pair_folds,
    select_pair_adapter,
    whiten_pairs,
)


def planted(n_documents=60, queries_each=2, d=16, seed=0):
    "Documents and their queries, which differ from them along four directions."
    rng = np.random.default_rng(seed)
    documents = rng.normal(size=(n_documents, d))
    owner = np.repeat(np.arange(n_documents), queries_each)
    noise = rng.normal(size=(len(owner), d)) * np.r_[np.full(4, 2.0), np.full(d - 4, 0.1)]
    pairs = np.column_stack([np.arange(len(owner)), owner, np.ones(len(owner), int)])
    return normalize(documents[owner] + noise), normalize(documents), pairs


QUERIES, DOCUMENTS, PAIRS = planted()


@pytest.mark.parametrize("shrinkage", [0.2, 0.5, 1.0])
def test_whitening_is_the_shrunk_inverse_root_of_the_differences(shrinkage):
    pairs = np.r_[PAIRS, [(0, 5, 3), (1, 7, 0)]]  # two grades for query 0; a pair of grade 0 has no weight
    weight = np.r_[0.25, np.ones(len(PAIRS) - 1), 0.75]
    weight /= weight.sum()
    q, d = QUERIES[pairs[:-1, 0]].astype(float), DOCUMENTS[pairs[:-1, 1]].astype(float)
    difference = (q - weight @ q) - (d - weight @ d)
    S = difference.T @ np.diag(weight) @ difference
    S = (1 - shrinkage) * S + shrinkage * np.trace(S) / len(S) * np.eye(len(S))
    white = whiten_pairs(QUERIES, DOCUMENTS, pairs, shrinkage=shrinkage)
    product = white.matrix.astype(float) @ S @ white.matrix
    np.testing.assert_allclose(product, product[0, 0] * np.eye(len(S)), atol=2e-5 * product[0, 0])
    np.testing.assert_allclose(np.square(white.matrix).sum(1).mean(), 1, rtol=1e-5)
    np.testing.assert_allclose(white.query_mean, weight @ q, atol=1e-6)
    np.testing.assert_allclose(white.document_mean, weight @ d, atol=1e-6)


def test_whitening_of_equal_rows_only_centres_them():
    white = whiten_pairs(DOCUMENTS, DOCUMENTS, np.array([(0, 0, 1), (1, 1, 1)]))
    np.testing.assert_array_equal(white.matrix, np.eye(16))


def plain_loss(z, zd, pairs, tau, lists=None):
    "The loss written out, with all scores at once; rows of `z` are the distinct queries of the pairs, ascending."
    total, rows = 0.0, np.unique(pairs[:, 0])
    for i, query in enumerate(rows):
        own = pairs[pairs[:, 0] == query]
        scores = z[i] @ zd.T / tau
        others = np.setdiff1d(np.arange(len(zd)) if lists is None else lists[query], own[:, 1])
        others = torch.from_numpy(others[others >= 0])
        for _, document, grade in own:
            term = torch.log1p(torch.exp(scores[others] - scores[document]).sum())
            total = total + grade / own[:, 2].sum() * term
    return total / len(rows)


@pytest.mark.parametrize("block", [2**14, 7])
@pytest.mark.parametrize("case", ["frozen", "whitened", "document", "given"])
def test_objective_equals_the_plain_loss(case, block, monkeypatch):
    monkeypatch.setattr(module, "_DOCUMENTS_AT_ONCE", block)
    pairs = np.array([(0, 0, 3), (0, 9, 1), (2, 1, 1), (5, 2, 2)])
    lists = np.random.default_rng(0).integers(-1, 60, (120, 6)) if case == "given" else None
    white = whiten_pairs(QUERIES, DOCUMENTS, PAIRS) if case == "whitened" else None
    index = module._PairIndex(module._weighted_pairs(pairs), "cpu", lists)
    corpus = module._Corpus(DOCUMENTS, "cpu", white)
    zd = torch.from_numpy(DOCUMENTS)
    if white is not None:
        zd = torch.nn.functional.normalize(
            (zd - torch.from_numpy(white.document_mean)) @ torch.from_numpy(white.matrix)
        )
    weight = torch.full((16, 16), 0.01, requires_grad=True)
    adapter = (lambda x: torch.nn.functional.normalize(x + x @ weight)) if case == "document" else None
    x = torch.from_numpy(QUERIES[index.queries])
    z = x.clone().requires_grad_()
    loss = (
        module._pair_objective(index, corpus, 0.2, adapter)
        .step(lambda rows: z[rows], x, None, torch.arange(3), None)
        .loss
    )
    leaf = weight if case == "document" else z
    want = plain_loss(x if adapter else z, adapter(zd) if adapter else zd, pairs, 0.2, lists)
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-5)
    got, expected = (torch.autograd.grad(value, leaf)[0] for value in (loss, want))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def test_a_query_whose_documents_are_all_relevant_has_no_loss():
    pairs = np.array([(0, 0, 1), (0, 1, 1), (1, 1, 1)])
    index = module._PairIndex(module._weighted_pairs(pairs), "cpu")
    z = torch.eye(4)[:2].requires_grad_()
    corpus = module._Corpus(np.eye(4, dtype=np.float32)[:2], "cpu")
    loss = module._pair_objective(index, corpus, 0.1).step(lambda rows: z[rows], z, None, torch.tensor([0]), None).loss
    assert loss == 0 and (torch.autograd.grad(loss, z)[0] == 0).all()


def test_negatives():
    nearest = module._find_negatives(3, QUERIES, DOCUMENTS, PAIRS)
    assert nearest.shape == (120, 3) and (nearest != PAIRS[:, 1:2]).all()
    scores = QUERIES @ DOCUMENTS.T
    scores[PAIRS[:, 0], PAIRS[:, 1]] = -2
    assert (np.sort(nearest) == np.sort(np.argsort(-scores)[:, :3])).all()


@pytest.mark.parametrize("negatives", [5, np.column_stack([PAIRS[:, 0], (PAIRS[:, 1] + 1) % 60])])
def test_negatives_change_what_is_trained(negatives):
    config = PairConfig("query", train=TrainConfig(epochs=2, batch_size=32))
    some, all_ = (fit_pair_path(config, QUERIES, DOCUMENTS, PAIRS, negatives=n).at(1.0)[0] for n in (negatives, None))
    assert not torch.equal(some.weight, all_.weight)
    selection = select_pair_adapter(QUERIES, DOCUMENTS, PAIRS, {"query": config}, negatives=negatives)
    assert len(selection.table) == 5


@pytest.mark.parametrize("name", PAIR_CANDIDATES)
def test_every_candidate_gains_where_queries_differ_from_documents_along_few_directions(name):
    config = PAIR_CANDIDATES[name]
    if config.train is not None:
        config = replace(config, train=TrainConfig(epochs=40, batch_size=16, lr=5e-3, weight_decay=1.0))
    path = fit_pair_path(config, QUERIES, DOCUMENTS, PAIRS[PAIRS[:, 1] < 40])
    held_out = PAIRS[PAIRS[:, 1] >= 40]

    def share_found(strength):
        zq, zd = (transform(a, x) for a, x in zip(path.at(strength), (QUERIES, DOCUMENTS)))
        return ((zq @ zd.T).argmax(1) == PAIRS[:, 1])[held_out[:, 0]].mean()

    frozen = ((QUERIES @ DOCUMENTS.T).argmax(1) == PAIRS[:, 1])[held_out[:, 0]].mean()
    assert share_found(1.0) > frozen
    if config.side != "two":
        assert share_found(0.0) == frozen
    for side, adapter, x in zip(("query", "document"), path.at(1.0), (QUERIES, DOCUMENTS)):
        is_adapted = config.side in (side, "both", "two")
        assert np.allclose(transform(adapter, x), x, atol=1e-6) != is_adapted


@pytest.mark.parametrize("group_size", [1, 3])
def test_folds_hold_out_documents(group_size):
    groups = np.arange(60) // group_size
    folds = pair_folds(PAIRS, groups, np.random.default_rng(0), n_folds=3)
    assert [bool(len(fold.new)) for fold in folds] == [True] * 3 + [False] * 3
    for fold in folds:
        named = set(groups[fold.train_pairs[:, 1]])
        fitted = set(fold.train_pairs[:, 0])
        assert not named & set(groups[PAIRS[fold.new, 1]]) and set(groups[PAIRS[fold.known, 1]]) <= named
        assert not fitted & {*fold.known, *fold.new} and bool(len(fold.known)) != bool(len(fold.new))
    if group_size == 1:
        assert sorted(np.concatenate([fold.new for fold in folds])) == list(range(120))
        assert len(folds[3].train_pairs) == 80 > len(folds[0].train_pairs)
    asked = np.concatenate([fold.known for fold in folds])
    assert len(asked) == len(set(asked)) > 60


def test_selection_is_the_same_with_several_jobs_and_finds_the_gain():
    one, two = (select_pair_adapter(QUERIES, DOCUMENTS, PAIRS, n_jobs=n) for n in (None, 2))
    assert one.table.drop(columns="seconds").equals(two.table.drop(columns="seconds"))
    assert not one.frozen and one.config == PAIR_CANDIDATES[one.method]
    best = one.table[one.table.safety_check == "pass"].gain.max()
    assert one.table[(one.table.method == one.method) & (one.table.strength == one.strength)].gain.item() == best > 5


def test_harm_on_new_documents_is_refused():
    rng = np.random.default_rng(0)
    queries = normalize(DOCUMENTS[PAIRS[:, 1]] + 0.1 * rng.normal(size=QUERIES.shape))
    too_fast = {"too fast": PairConfig("query", train=TrainConfig(epochs=3, batch_size=16, lr=10.0))}
    selection = select_pair_adapter(queries, DOCUMENTS, PAIRS, too_fast, strengths=(1.0,))
    assert selection.frozen and "queries for new documents may lose" in selection.table.reason[1]


def test_one_query_a_document_is_measured_on_new_documents_alone():
    selection = select_pair_adapter(*planted(n_documents=80, queries_each=1))
    assert "known documents, so these were not measured" in selection.reason
    assert np.allclose(selection.table.seen, selection.table.unseen)


def test_few_queries_keep_the_frozen_embeddings():
    selection = select_pair_adapter(QUERIES, DOCUMENTS, PAIRS[:10])
    assert selection.frozen and "too few queries" in selection.reason


@pytest.fixture(scope="module")
def fitted():
    return PairAdapter().fit(QUERIES * 2, DOCUMENTS, PAIRS[:100])


def test_saved_and_loaded(fitted, tmp_path):
    loaded = PairAdapter.load(fitted.save(tmp_path / "a"))
    assert loaded.selection_.config == fitted.selection_.config and loaded.fingerprint_ == fitted.fingerprint_
    table = evaluate_pairs(loaded, QUERIES, DOCUMENTS, PAIRS)
    assert table.equals(evaluate_pairs(fitted, QUERIES, DOCUMENTS, PAIRS))
    (tmp_path / "a" / "adapter.documents.safetensors").unlink()
    with pytest.raises(InputError, match="documents"):
        PairAdapter.load(tmp_path / "a")
    with pytest.raises(InputError, match="statistics"):
        fitted.save(tmp_path / "b", statistics=True)
    with pytest.raises(InputError, match="PairAdapter.load"):
        EmbeddingAdapter.load(tmp_path / "a")


def test_files_of_the_other_kind_do_not_stay(fitted, tmp_path):
    by_class = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(QUERIES, PAIRS[:, 1])
    fitted.save(tmp_path / "a")
    by_class.save(tmp_path / "a")
    assert load_estimator(tmp_path / "a").fingerprint_ == by_class.fingerprint_
    fitted.save(tmp_path / "a")
    assert load_estimator(tmp_path / "a").fingerprint_ == fitted.fingerprint_
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert "adapter.safetensors" not in names and "adapter.fit_documents.npy" in names


def test_sides_of_two_adapters_cannot_be_swapped(fitted, tmp_path):
    fitted.save(tmp_path / "a")
    queries, documents = (tmp_path / "a" / f"adapter.{side}.safetensors" for side in ("queries", "documents"))
    other = queries.read_bytes()
    queries.write_bytes(documents.read_bytes())
    documents.write_bytes(other)
    assert queries.read_bytes() != other  # else nothing was swapped
    with pytest.raises(InputError, match="save all files"):
        PairAdapter.load(tmp_path / "a")


@pytest.mark.parametrize("settings", [{}, {"side": "two", "max_unseen_loss": None}], ids=["selected", "two"])
def test_a_memory_map_gives_the_same_fit(tmp_path, settings, monkeypatch):
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    np.save(tmp_path / "d.npy", DOCUMENTS)
    mapped = np.load(tmp_path / "d.npy", mmap_mode="r")
    of_array, of_map = (PairAdapter(**settings).fit(QUERIES, d, PAIRS) for d in (DOCUMENTS, mapped))
    assert of_array.fingerprint_ == of_map.fingerprint_ and of_array.data_fingerprint_ == of_map.data_fingerprint_


def test_evaluation_tells_known_from_new_documents(fitted):
    table = evaluate_pairs(fitted, QUERIES, DOCUMENTS, PAIRS, k=5)
    counts = table[table.measure == "ndcg@5"].set_index("group").n_queries.to_dict()
    assert counts == {"all": 20, "new documents": 20, "fitted queries": 100}
    fewer = PairAdapter("both", max_unseen_loss=None).fit(QUERIES, DOCUMENTS, PAIRS[:100:2])
    counts = evaluate_pairs(fewer, QUERIES, DOCUMENTS, PAIRS).groupby("group").n_queries.first().to_dict()
    assert counts == {"all": 70, "known documents": 50, "new documents": 20, "fitted queries": 50}
    assert (table.low <= table.change).all() and (table.change <= table.high).all()
    np.testing.assert_allclose(table.adapted - table.frozen, table.change)


def test_examples_are_the_queries_that_lose_and_gain_most():
    "Their ranks are those of a search for all documents, and the other document changed sides with the answer."
    wrong = np.column_stack([PAIRS[:100:2, 0], np.roll(PAIRS[:100:2, 1], 1)])  # so that some queries lose
    adapter = PairAdapter("both", max_unseen_loss=None).fit(QUERIES, DOCUMENTS, wrong)
    found = module.find_pair_examples(adapter, QUERIES, DOCUMENTS, PAIRS, n_examples=4, k=5)
    z = adapter.transform_queries(QUERIES), adapter.transform_documents(DOCUMENTS)
    order = [knn(zq, zd, len(DOCUMENTS)).I for zq, zd in ((normalize(QUERIES), normalize(DOCUMENTS)), z)]
    before, after = (ranking_metrics(I, PAIRS, k=5)["ndcg@5"] for I in order)
    sizes = found.groupby(["group", "outcome"]).size()
    assert set(found.group) == {"known documents", "new documents"} and set(found.outcome) == {"lost", "won"}
    change = 100 * np.delete(after - before, range(0, 100, 2))  # of queries that were not fitted on
    assert sizes.max() <= 4
    assert [found.change.min(), found.change.max()] == pytest.approx([change.min(), change.max()])
    for e in found.itertuples():
        of_answer, of_other = ([I[e.query].tolist().index(d) + 1 for I in order] for d in (e.document, e.other))
        assert of_answer == [e.frozen_rank, e.adapted_rank] and [e.query, e.document] in PAIRS[:, :2].tolist()
        assert e.change == pytest.approx(100 * (after - before)[e.query]) and (e.change < 0) == (e.outcome == "lost")
        ahead, behind = (of_answer, of_other) if e.outcome == "lost" else (of_other, of_answer)
        assert ahead[0] < behind[0] and behind[1] < ahead[1]


@pytest.mark.parametrize(
    "known, new, word",
    [
        ((9.9, 16.8), (-1.6, 4.2), "most queries ask for known documents"),
        ((9.9, 16.8), (0.4, 2.0), "may be used"),
        ((9.9, 16.8), (-5.0, -1.0), "Do not use"),
        ((-0.2, 26.0), (-1.6, 4.2), "Nothing is shown"),
        ((9.9, 16.8), None, "evaluate queries"),
        (None, None, "fitted on"),
    ],
)
def test_the_summary_says_what_to_do(known, new, word):
    intervals = {"fitted queries": (1.0, 2.0), "known documents": known, "new documents": new}
    lines = [(name, "ndcg@10", 90, sum(ends) / 2, *ends) for name, ends in intervals.items() if ends]
    table = pd.DataFrame(lines, columns=["group", "measure", "n_queries", "change", "low", "high"])
    assert word in module.pairs_summary(table)
