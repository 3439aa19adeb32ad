"Ranking measures against pytrec_eval and scikit-learn, files of pairs, splits without a common query or document."

import json
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval
from sklearn.cluster import KMeans
from sklearn.metrics import average_precision_score, ndcg_score

from ega import EmbeddingSet, InputError, normalize
from ega.data.relevance import (
    PairTable,
    RelevanceSet,
    check_pairs,
    embed_relevance,
    evaluate_ranking,
    match_pairs,
    queries_with_relevant,
    ranking_metrics,
    read_beir,
    read_pairs,
    read_relevance_set,
    read_text_pairs,
    split_by_document,
    split_by_query,
    write_relevance_set,
)
from ega.measure.search import knn

PACKS = Path(__file__).resolve().parents[2] / "data/packs"
SETS = ("scifact", "cranfield", "npl", "med")
TREC = {"ndcg": "ndcg_cut_{}", "recall": "recall_{}", "map": "map_cut_{}", "hit": "success_{}", "mrr": "recip_rank"}


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


@pytest.mark.parametrize("seed", range(5))
def test_grades_padding_and_judged_irrelevant_documents_equal_trec_eval(seed):
    relevance, rng = random_set(seed), np.random.default_rng(seed)
    rows = queries_with_relevant(relevance.pairs)
    I = knn(relevance.queries.x[rows], relevance.documents.x, 10, device="cpu").I
    I[rng.random(len(I)) < 0.5, 6:] = -1  # shorter lists
    assert_equal_to_trec_eval(I, relevance.pairs, rows, 10)


@pytest.mark.parametrize("name", SETS)
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


@pytest.mark.parametrize("name", SETS)
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


def test_unjudged_documents_count_as_not_relevant():
    relevance, rows, I = stored("cranfield")
    judged = {(q, d) for q, d, _ in relevance.pairs.tolist()}
    others = [(q, d, 0) for q, line in zip(rows.tolist(), I.tolist()) for d in line if (q, d) not in judged]
    more = np.concatenate([relevance.pairs, others])
    before, after = (ranking_metrics(I, pairs, queries=rows) for pairs in (relevance.pairs, more))
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_blocks_of_queries_give_the_values_of_all():
    relevance, rows, I = stored("scifact")
    whole = ranking_metrics(I, relevance.pairs, queries=rows)
    blocks = [ranking_metrics(I[i : i + 7], relevance.pairs, queries=rows[i : i + 7]) for i in range(0, len(rows), 7)]
    assert all(np.array_equal(whole[name], np.concatenate([block[name] for block in blocks])) for name in whole)
    order = np.random.default_rng(0).permutation(len(rows))
    shuffled = ranking_metrics(I[order], relevance.pairs, queries=rows[order])
    assert all(np.array_equal(whole[name][order], shuffled[name]) for name in whole)


def test_the_table_has_all_queries_and_those_of_new_documents():
    relevance, rows, I = stored("med")
    new = np.arange(len(rows)) < 8
    table = evaluate_ranking(I, relevance.pairs, queries=rows, new=new).set_index(["group", "measure"])
    values = ranking_metrics(I, relevance.pairs, queries=rows)
    assert table.n_queries["all"].eq(len(rows)).all() and table.n_queries["new documents"].eq(8).all()
    for name, value in values.items():
        assert table["mean"]["all", name] == pytest.approx(value.mean())
        assert table["mean"]["new documents", name] == pytest.approx(value[new].mean())
    assert ((table.low <= table["mean"]) & (table["mean"] <= table.high)).all()
    # the interval of a mean of independent queries, by the normal approximation
    ndcg = values["ndcg@10"]
    half = 1.96 * ndcg.std() / np.sqrt(len(ndcg))
    line = table.loc[("all", "ndcg@10")]
    assert line.high - line.low == pytest.approx(2 * half, rel=0.1)
    assert set(evaluate_ranking(I, relevance.pairs, queries=rows, new=new & False).group) == {"all"}


@pytest.mark.parametrize(
    "I, pairs, options, words",
    [
        ([[0, 0]], [(0, 0)], {"k": 2}, "once in a list"),
        ([[0, 1]], [(0, 0)], {}, "search for more documents"),
        ([[0.5]], [(0, 0)], {"k": 1}, "document rows"),
        ([[0], [0, 1]], [(0, 0)], {"k": 1}, "different lengths"),
        ([[0], [1]], [(0, 0, 1), (1, 1, 0)], {"k": 1}, "1 of 2 have none, such as 1"),
        ([[0]], [(0, 0)], {"k": 1, "queries": [7]}, "relevant document"),
        ([[0]], [(0, 0)], {"k": 1, "queries": [0, 1]}, "one label per row"),
        ([[0]], [(0, 0, -1)], {"k": 1}, "not relevant the grade 0"),
    ],
)
def test_wrong_lists_and_pairs(I, pairs, options, words):
    with pytest.raises(InputError, match=words):
        ranking_metrics(I, pairs, **options)


FORMATS = {
    "trec.qrels": "001 0 d1 2\n001 0 d2 0\n2 0 d1 1\n",
    "trec_tabs.txt": "001\t0\td1\t2\r\n001\t0\td2\t0\r\n\r\n2\t0\td1\t1\r\n",
    "beir.tsv": "query-id\tcorpus-id\tscore\n001\td1\t2\n001\td2\t0\n2\td1\t1\n",
    "comma.csv": "query,document,grade\n001,d1,2\n001,d2,0\n2,d1,1\n",
    "semicolon.csv": "Query_ID;Doc_ID;Relevance\n001;d1;2\n001;d2;0.0\n2;d1;1\n",
    "bom.csv": "\ufeffqid,docid,label\n001,d1,2\n001,d2,0\n2,d1,1\n",
    "bom.qrels": "\ufeff001 0 d1 2\n001 0 d2 0\n2 0 d1 1\n",
    "swapped_header.csv": "doc,query,score\nd1,001,2\nd2,001,0\nd1,2,1\n",
    "lines.jsonl": '{"query-id": "001", "corpus-id": "d1", "score": 2}\n\n{"query-id": "001", "corpus-id": "d2", '
    '"score": 0}\n{"query-id": 2, "corpus-id": "d1", "score": 1}\n',
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_pairs(name, tmp_path):
    (tmp_path / name).write_text(FORMATS[name], encoding="utf-8", newline="")
    assert read_pairs(tmp_path / name) == (["001", "001", "2"], ["d1", "d2", "d1"], [2, 0, 1])


def test_parquet_and_utf16_give_the_same_pairs(tmp_path):
    table = pa.table({"qid": ["001", "2"], "doc": [1, 2], "grade": [1.0, 3.0]})
    pq.write_table(table, tmp_path / "p.parquet")
    assert read_pairs(tmp_path / "p.parquet") == (["001", "2"], ["1", "2"], [1, 3])
    (tmp_path / "p.csv").write_bytes("qid,doc\nä,1\n".encode("utf-16"))
    assert read_pairs(tmp_path / "p.csv") == (["ä"], ["1"], [1])


def test_triplets_give_relevant_and_irrelevant_documents(tmp_path):
    rows = [{"anchor": "a?", "positive": "b", "negative_1": "c", "negative_2": "d"}] * 2
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = read_text_pairs(tmp_path / "t.jsonl")
    assert [texts.documents.read(i) for i in range(3)] == ["b", "c", "d"] and len(texts.queries) == 1
    assert sorted(texts.pairs.tolist()) == [[0, 0, 1], [0, 1, 0], [0, 2, 0]]


BROKEN = {
    "empty.csv": ("", "empty"),
    "blank.jsonl": ("\n\n", "empty"),
    "header_only.csv": ("query,document\n", "no pair"),
    "no_header.csv": ("q1,d1,1\nq2,d2,1\n", "add the header as the first line"),
    "no_header.tsv": ("q1\td1\t1\nq2\td2\t1\n", "add the header as the first line"),
    "negative.csv": ("query,document,grade\nq,a,-1\nq,b,1\n", "1 others such as '-1'"),
    "fraction.csv": ("query,document,grade\nq,a,0.5\nq,b,nan\n", "2 others such as '0.5', 'nan'"),
    "words.csv": ("query,document,grade\nq,a,high\n", "round scores to grades"),
    "negative.qrels": ("q 0 a -1\nq 0 b 1\n", "1 others such as '-1'"),
    "short.qrels": ("q 0 a 1\nq 0 b\n", "first line 2"),
    "no_id.csv": ("query,document\n,a\n", "fill them in"),
    "no_id.jsonl": ('{"query": "q", "doc": null}\n', "fill them in"),
    "float_id.jsonl": ('{"query": 1.5, "doc": "d"}\n', "texts or integers"),
    "cut.jsonl": ('{"query": "q", "doc": "d"}\n{"query"', "line 2 is not JSON"),
    "list.jsonl": ('["q", "d"]\n', "line 1 is"),
    "deep.jsonl": ("[" * 100_000, "not JSON"),
    "not.parquet": ("text", "whole Parquet file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(name, tmp_path):
    content, words = BROKEN[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words) as error:
        read_pairs(tmp_path / name)
    assert name in str(error.value)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet", "x.qrels"])
def test_a_missing_file_and_bytes_that_are_no_text(name, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_pairs(tmp_path / name)
    (tmp_path / name).write_bytes(bytes(range(128, 256)) * 3)
    with pytest.raises(InputError, match=name):
        read_pairs(tmp_path / name)


def test_missing_ids_are_counted_and_three_named():
    table = PairTable(["q"] * 6, ["a", "u", "v", "v", "w", "z"], [1] * 6)
    with pytest.raises(InputError, match="4 documents that are missing: 'u', 'v', 'w'; add these documents"):
        match_pairs(table, ["q"], ["a"])
    assert match_pairs(table, ["q"], ["a"], on_missing="skip").tolist() == [[0, 0, 1]]
    with pytest.raises(InputError, match="no pair names"):
        match_pairs(table, ["other"], ["a"], on_missing="skip")
    with pytest.raises(InputError, match="swapped"):
        match_pairs(PairTable(["a"], ["q"], [1]), ["q"], ["a"])


def test_one_pair_with_two_grades():
    with pytest.raises(InputError, match="several for 1 pairs.*query 'q' and document 'b'"):
        match_pairs(PairTable(["q", "q", "q"], ["a", "b", "b"], [1, 1, 2]), ["q"], ["a", "b"])
    assert len(check_pairs([(0, 0, 1), (0, 0, 1)], 1, 1)) == 1
    with pytest.raises(InputError, match="swapped"):
        check_pairs([(4, 0)], 3, 5)


def make_beir(folder, **changed):
    files = {
        "corpus.jsonl": '{"_id": "01", "title": "cab", "text": "a"}\n{"_id": "1", "title": "", "text": "bb"}',
        "queries.jsonl": '{"_id": "q1", "text": "ab"}\n{"_id": "q2", "text": "c"}\n{"_id": "unused", "text": "b"}',
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq2\t1\t1\n",
        "qrels/train.tsv": "query-id\tcorpus-id\tscore\nq1\t01\t2\n",
    }
    for name, text in (files | changed).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_folder_of_beir(tmp_path):
    texts = read_beir(make_beir(tmp_path / "toy"))
    assert texts.documents.ids == ["01", "1"] and texts.queries.ids == ["q1", "q2"]
    assert texts.queries.split == ["train", "test"] and texts.documents.read(0) == "cab a"
    assert sorted(texts.pairs.tolist()) == [[0, 0, 2], [1, 1, 1]]


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"corpus.jsonl": ""}, "empty"),
        ({"corpus.jsonl": '{"_id": "1", "text": "a"}\n{"_id": "1", "text": "b"}'}, "occurs twice"),
        ({"corpus.jsonl": '{"_id": "01"}'}, "has no text"),
        ({"corpus.jsonl": '{"text": "a"}'}, "_id"),
        ({"corpus.jsonl": '{"_id": "01", "text": "a"}'}, "1 documents that are missing: '1'"),
        ({"queries.jsonl": '{"_id": "q1", "text": "a"}'}, "1 queries that are missing: 'q2'"),
        ({"qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq1\t1\t1\n"}, "keep it in one"),
        ({"qrels/test.tsv": "q2\t1\t1\n"}, "add the header"),
    ],
)
def test_a_broken_folder_of_beir(changed, words, tmp_path):
    with pytest.raises(InputError, match=words):
        read_beir(make_beir(tmp_path, **changed))


def test_a_folder_of_beir_with_missing_documents_can_be_read(tmp_path):
    texts = read_beir(make_beir(tmp_path, **{"corpus.jsonl": '{"_id": "01", "text": "a"}'}), on_missing="skip")
    assert texts.pairs.tolist() == [[0, 0, 2]]
    with pytest.raises(InputError, match="corpus.jsonl: no such file"):
        read_beir(tmp_path / "nothing")


class LetterCounts:
    "An encoder that can be told to stop at a text."

    modality, name, preprocessing, weights = "text", "letters", "as it is", "none"
    stop_at = None

    def __init__(self):
        self.seen = []

    def prepare(self, text):
        if not text.strip():
            raise ValueError("empty text")
        return text

    def encode(self, batch):
        if self.stop_at in batch:
            raise KeyboardInterrupt
        self.seen += batch
        return np.array([[text.count(c) for c in "abc"] for text in batch], "float32")


def test_prefixes_come_from_the_encoder_or_the_arguments(tmp_path):
    texts, encoder = read_beir(make_beir(tmp_path)), LetterCounts()
    embed_relevance(texts, encoder, tmp_path / "none", progress=False)
    assert encoder.seen == ["ab", "c", "cab a", "bb"]
    encoder.seen, encoder.query_prefix, encoder.document_prefix = [], "query: ", "passage: "
    embed_relevance(texts, encoder, tmp_path / "own", progress=False)
    assert encoder.seen == ["query: ab", "query: c", "passage: cab a", "passage: bb"]
    encoder.seen = []
    relevance = embed_relevance(
        texts, encoder, tmp_path / "given", query_prefix="", document_prefix="b", progress=False
    )
    assert encoder.seen == ["ab", "c", "bcab a", "bbb"] and "prefix 'b'" in relevance.documents.meta["notes"]
    assert relevance.queries.split.tolist() == ["train", "test"]
    back = read_relevance_set(tmp_path / "given")
    assert np.array_equal(back.pairs, relevance.pairs) and np.array_equal(back.documents.x, relevance.documents.x)


def test_an_interrupted_call_resumes_and_a_finished_one_is_not_replaced(tmp_path):
    texts, encoder, out = read_beir(make_beir(tmp_path)), LetterCounts(), tmp_path / "set"
    encoder.stop_at = "bb"
    with pytest.raises(KeyboardInterrupt):
        embed_relevance(texts, encoder, out, batch_size=1, progress=False)
    encoder.stop_at = None
    embed_relevance(texts, encoder, out, batch_size=1, progress=False)
    with pytest.raises(InputError, match="exists already"):
        embed_relevance(texts, encoder, out, progress=False)
    embed_relevance(texts, encoder, out, overwrite=True, progress=False)
    assert sorted(p.name for p in out.iterdir()) == ["documents.parquet", "qrels.tsv", "queries.parquet"]


def test_pairs_of_texts_that_are_skipped_are_left_out(tmp_path):
    corpus = '{"_id": "01", "title": "", "text": " "}\n{"_id": "1", "text": "bb"}'
    texts = read_beir(make_beir(tmp_path, **{"corpus.jsonl": corpus}))
    with pytest.raises(InputError, match="01 cannot be encoded"):
        embed_relevance(texts, LetterCounts(), tmp_path / "a", progress=False)
    relevance = embed_relevance(texts, LetterCounts(), tmp_path / "b", on_error="skip", progress=False)
    assert relevance.documents.ids.tolist() == ["1"] and relevance.pairs.tolist() == [[1, 0, 1]]


def test_ids_survive_the_folder(tmp_path):
    ids = ["001", "a\tb", 'say "hi"', "x,y;z", "ä ö"]
    side = EmbeddingSet(np.eye(5), [-1] * 5, ids=ids, meta={"set": "s", "encoder": "e"})
    relevance = RelevanceSet(side, side, [(i, 4 - i, i) for i in range(5)])
    back = read_relevance_set(write_relevance_set(relevance, tmp_path / "set"))
    assert np.array_equal(back.pairs, relevance.pairs) and back.queries.ids.tolist() == ids
    with pytest.raises(InputError, match="exists already"):
        write_relevance_set(relevance, tmp_path / "set")
    (tmp_path / "set/qrels.tsv").unlink()
    with pytest.raises(InputError, match="lacks qrels.tsv"):
        read_relevance_set(tmp_path / "set")


def test_two_sides_of_different_width():
    with pytest.raises(InputError, match="same width, got 2 and 3"):
        RelevanceSet(EmbeddingSet(np.eye(2), [-1] * 2), EmbeddingSet(np.eye(3), [-1] * 3), [(0, 0)])


def check_split(relevance, split, groups=None):
    "No query, no relevant document and no group on both sides; `new` by loops."
    groups = np.arange(len(relevance.documents)) if groups is None else groups
    assert not set(split.train_pairs[:, 0]) & set(split.test_queries)
    assert set(split.train_pairs[:, 0]) <= set(queries_with_relevant(split.train_pairs))
    known = set(groups[split.train_pairs[:, 1]])
    for query, new in zip(split.test_queries, split.new, strict=True):
        relevant = [groups[d] for q, d, grade in relevance.pairs if q == query and grade > 0]
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
    groups = rng.integers(0, 60, 100)
    check_split(relevance, split_by_query(relevance, is_test, groups=groups), groups)


@pytest.mark.parametrize("name", SETS)
def test_splits_of_the_public_sets(name):
    relevance = stored(name)[0]
    split = split_by_document(relevance, np.random.default_rng(0))
    again = split_by_document(relevance, np.random.default_rng(0))
    check_split(relevance, split)
    assert split.new.all() and all(np.array_equal(a, b) for a, b in zip(split, again))
    share = len(split.test_queries) / len(queries_with_relevant(relevance.pairs))
    assert 0.2 <= share <= 0.35 and len(split.train_pairs) > 0.25 * len(relevance.pairs)


def test_groups_of_documents_are_held_out_whole():
    relevance = stored("scifact")[0]
    groups = KMeans(200, n_init=1, max_iter=5, random_state=0).fit_predict(relevance.documents.x)
    split = split_by_document(relevance, np.random.default_rng(0), groups=groups)
    check_split(relevance, split, groups)
    assert split.new.all() and len(split.train_pairs) > 200
    with pytest.raises(InputError, match="more and smaller groups"):
        split_by_document(relevance, np.random.default_rng(0), groups=groups * 0)


def test_the_committed_packs_hold_no_texts_and_are_small():
    files = [file for name in SETS for file in (PACKS / f"{name}__all_minilm_l6_v2").iterdir()]
    assert len(files) == 12 and sum(file.stat().st_size for file in files) < 10e6
    for file in files:
        assert file.stat().st_size < 6e6
        if file.suffix == ".parquet":
            assert pq.read_schema(file).names == ["id", "label", "split", "scale", "code"]
            assert max(len(name) for name in pq.read_table(file, columns=["id"])["id"].to_pylist()) <= 12


def test_a_killed_overwrite_does_not_leave_old_pairs_beside_new_packs(tmp_path, monkeypatch):
    from ega.data import relevance as module

    write_relevance_set(random_set(0), tmp_path / "set")
    written, write_pack = [], module.write_pack

    def killed_at_documents(es, path, **kwargs):
        written.append(path.name)
        if path.name == "documents.parquet":
            raise KeyboardInterrupt
        write_pack(es, path, **kwargs)

    monkeypatch.setattr(module, "write_pack", killed_at_documents)
    with pytest.raises(KeyboardInterrupt):
        write_relevance_set(random_set(1), tmp_path / "set", overwrite=True)
    assert written == ["queries.parquet", "documents.parquet"]
    with pytest.raises(InputError, match="lacks qrels.tsv"):
        read_relevance_set(tmp_path / "set")


def test_a_missing_id_is_explained_by_its_cause():
    "Columns are called swapped only if exchanging them leaves fewer ids missing; row numbers begin with 0."
    swapped = PairTable(["a", "b", "lost"], ["q", "r", "q"], [1, 1, 1])
    with pytest.raises(InputError, match="'a', 'b', 'lost'; the columns .* seem to be swapped"):
        match_pairs(swapped, ["q", "r"], ["a", "b"])
    from_one = PairTable(["1", "2"], ["1", "3"], [1, 1])
    with pytest.raises(
        InputError, match="1 queries that are missing: '2'; the queries have row numbers .* begin with 0"
    ):
        match_pairs(from_one, ["0", "1"], ["0", "1", "2", "3"])
    with pytest.raises(InputError, match="'b'; add these documents, or take these pairs out"):
        match_pairs(PairTable(["q"], ["b"], [1]), ["q", "b"], ["a"])
