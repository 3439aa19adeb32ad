"Files of pairs, embedding of queries and documents, splits without a common query or document."

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from relevance_sets import random_set
from test_embed import LetterCounts

from ega import EmbeddingSet, InputError
from ega.data.relevance import (
    RelevanceSet,
    check_pairs,
    embed_relevance,
    match_pairs,
    read_beir,
    read_pairs,
    read_relevance_set,
    read_text_pairs,
    write_relevance_set,
)

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
    assert tuple(read_pairs(tmp_path / name).to_dict("list").values()) == (
        ["001", "001", "2"],
        ["d1", "d2", "d1"],
        [2, 0, 1],
    )


def test_parquet_and_utf16_give_the_same_pairs(tmp_path):
    table = pa.table({"qid": ["001", "2"], "doc": [1, 2], "grade": [1.0, 3.0]})
    pq.write_table(table, tmp_path / "p.parquet")
    assert tuple(read_pairs(tmp_path / "p.parquet").to_dict("list").values()) == (["001", "2"], ["1", "2"], [1, 3])
    (tmp_path / "p.csv").write_bytes("qid,doc\nä,1\n".encode("utf-16"))
    assert tuple(read_pairs(tmp_path / "p.csv").to_dict("list").values()) == (["ä"], ["1"], [1])


def test_triplets_give_relevant_and_irrelevant_documents(tmp_path):
    rows = [{"anchor": "a?", "positive": "b", "negative_1": "c", "negative_2": "d"}] * 2
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = read_text_pairs(tmp_path / "t.jsonl")
    assert [texts.documents.read(i) for i in range(3)] == ["b", "c", "d"] and len(texts.queries) == 1
    assert sorted(texts.pairs.tolist()) == [[0, 0, 1], [0, 1, 0], [0, 2, 0]]


BROKEN = {
    "empty.csv": "",
    "no_header.csv": "q1,d1,1\nq2,d2,1\n",
    "negative.csv": "query,document,grade\nq,a,-1\nq,b,1\n",
    "fraction.csv": "query,document,grade\nq,a,0.5\nq,b,nan\n",
    "short.qrels": "q 0 a 1\nq 0 b\n",
    "no_id.csv": "query,document\n,a\n",
    "no_id.jsonl": '{"query": "q", "doc": null}\n',
    "float_id.jsonl": '{"query": 1.5, "doc": "d"}\n',
    "cut.jsonl": '{"query": "q", "doc": "d"}\n{"query"',
    "deep.jsonl": "[" * 100_000,
    "not.parquet": "text",
}


@pytest.mark.parametrize("name", [*BROKEN, "missing.csv", "missing.jsonl", "bytes.csv", "bytes.jsonl"])
def test_a_broken_file_is_refused_by_name(name, tmp_path):
    if name in BROKEN:
        (tmp_path / name).write_text(BROKEN[name])
    elif name.startswith("bytes"):
        (tmp_path / name).write_bytes(bytes(range(128, 256)) * 3)
    with pytest.raises(InputError, match=name):
        read_pairs(tmp_path / name)


def table_of(queries, documents, grades):
    return pd.DataFrame({"query": queries, "document": documents, "grade": grades})


UNMATCHED = {
    "missing document": (table_of(["q"], ["u"], [1]), ["q"], ["a"]),
    "swapped columns": (table_of(["a"], ["q"], [1]), ["q"], ["a"]),
    "row numbers from 1": (table_of(["1", "2"], ["1", "2"], [1, 1]), ["0", "1"], ["0", "1"]),
    "two grades of a pair": (table_of(["q", "q"], ["a", "a"], [1, 2]), ["q"], ["a"]),
}


@pytest.mark.parametrize("table, query_ids, document_ids", UNMATCHED.values(), ids=UNMATCHED)
def test_pairs_that_do_not_match_are_refused(table, query_ids, document_ids):
    with pytest.raises(InputError):
        match_pairs(table, query_ids, document_ids)


def test_missing_ids_can_be_skipped():
    table = table_of(["q"] * 3, ["a", "u", "v"], [1] * 3)
    assert match_pairs(table, ["q"], ["a"], on_missing="skip").tolist() == [[0, 0, 1]]
    with pytest.raises(InputError):
        match_pairs(table, ["other"], ["a"], on_missing="skip")


GRADES = [[(0, 0, -1)], [(0, 0, 0.5)], [(0, 0, np.nan)], [(0, 0, np.inf)], [(0, 0, 1), (0, 0, 2)]]


@pytest.mark.parametrize("pairs", [[(4, 0)], [(0, 9)], [(-1, 0)], [(0, np.nan)], [], [0, 0], [(0, 0, 0, 0)], *GRADES])
def test_wrong_pairs(pairs):
    with pytest.raises(InputError):
        check_pairs(pairs, 3, 5)


def test_named_columns_of_pairs_are_read_by_name():
    table = pd.DataFrame({"document": [4, 3], "grade": [2, 0], "query": [0, 1]})
    assert check_pairs(table, 3, 5).tolist() == [[0, 4, 2], [1, 3, 0]]
    assert check_pairs(table.set_axis(["a", "b", "c"], axis=1), 5, 3).tolist() == [[4, 2, 0], [3, 0, 1]]


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
    "changed",
    [
        {"corpus.jsonl": ""},
        {"corpus.jsonl": '{"_id": "1", "text": "a"}\n{"_id": "1", "text": "b"}'},  # an id twice
        {"corpus.jsonl": '{"_id": "01"}'},
        {"corpus.jsonl": '{"text": "a"}'},
        {"corpus.jsonl": '{"_id": "01", "text": "a"}'},  # pairs name 1
        {"queries.jsonl": '{"_id": "q1", "text": "a"}'},
        {"qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq1\t1\t1\n"},  # a query in two splits
        {"qrels/test.tsv": "q2\t1\t1\n"},
    ],
)
def test_a_broken_folder_of_beir(changed, tmp_path):
    with pytest.raises(InputError):
        read_beir(make_beir(tmp_path, **changed))


class Recorder(LetterCounts):
    "Records the texts that it encodes; can be told to stop at one."

    stop_at = None

    def __init__(self):
        self.seen = []

    def encode(self, batch):
        if self.stop_at in batch:
            raise KeyboardInterrupt
        self.seen += batch
        return super().encode(batch)


def test_prefixes_come_from_the_encoder_or_the_arguments(tmp_path):
    texts, encoder = read_beir(make_beir(tmp_path)), Recorder()
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
    texts, encoder, out = read_beir(make_beir(tmp_path)), Recorder(), tmp_path / "set"
    encoder.stop_at = "bb"
    with pytest.raises(KeyboardInterrupt):
        embed_relevance(texts, encoder, out, batch_size=1, progress=False)
    encoder.stop_at = None
    embed_relevance(texts, encoder, out, batch_size=1, progress=False)
    with pytest.raises(InputError):
        embed_relevance(texts, encoder, out, progress=False)
    embed_relevance(texts, encoder, out, overwrite=True, progress=False)
    assert sorted(p.name for p in out.iterdir()) == ["documents.parquet", "qrels.tsv", "queries.parquet"]


def test_pairs_of_texts_that_are_skipped_are_left_out(tmp_path):
    corpus = '{"_id": "01", "title": "", "text": " "}\n{"_id": "1", "text": "bb"}'
    texts = read_beir(make_beir(tmp_path, **{"corpus.jsonl": corpus}))
    with pytest.raises(InputError):
        embed_relevance(texts, LetterCounts(), tmp_path / "a", progress=False)
    relevance = embed_relevance(texts, LetterCounts(), tmp_path / "b", on_error="skip", progress=False)
    assert relevance.documents.ids.tolist() == ["1"] and relevance.pairs.tolist() == [[1, 0, 1]]


def test_ids_survive_the_folder(tmp_path):
    ids = ["001", "a\tb", 'say "hi"', "x,y;z", "ä ö"]
    side = EmbeddingSet(np.eye(5), [-1] * 5, ids=ids, meta={"set": "s", "encoder": "e"})
    relevance = RelevanceSet(side, side, [(i, 4 - i, i) for i in range(5)])
    back = read_relevance_set(write_relevance_set(relevance, tmp_path / "set"))
    assert np.array_equal(back.pairs, relevance.pairs) and back.queries.ids.tolist() == ids
    with pytest.raises(InputError):
        write_relevance_set(relevance, tmp_path / "set")
    with pytest.raises(InputError):
        RelevanceSet(side, EmbeddingSet(np.eye(3), [-1] * 3), [(0, 0)])
    (tmp_path / "set/qrels.tsv").unlink()
    with pytest.raises(InputError):
        read_relevance_set(tmp_path / "set")


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
    with pytest.raises(InputError):
        read_relevance_set(tmp_path / "set")
