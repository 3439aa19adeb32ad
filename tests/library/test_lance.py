"LanceDB tables: writing, migration and its resumption, activation, search, errors."

import cranfield
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from ega.data.arrays import InputError, normalize
from ega.data.packs import EmbeddingSet
from ega.deploy.index import as_transform
from ega.deploy.lance import AdaptedTable, activate, active_column, migrate_table, open_table, write_table
from ega.estimator import EmbeddingAdapter
from ega.measure.search import knn
from ega.method.adapters import LinearAdapter, transform
from ega.method.closed_form import WCCN, LDAMap
from ega.testing import error_message

lancedb = pytest.importorskip("lancedb", reason="needs LanceDB: pip install 'ega[deploy]'")
D, N = 16, 300
y = np.repeat(np.arange(10), N // 10)


def unit(n, seed):
    return normalize(np.random.default_rng(seed).standard_normal((n, D), dtype=np.float32))


x, xq = unit(N, 0), unit(20, 1)
SET = EmbeddingSet(x, y, [f"ü'{i}" for i in range(N)], ["train", "test"] * (N // 2), tuple("abcdefghij"), {})
WHITENING, LDA = WCCN(0.3).fit(x, y), LDAMap(5).fit(x, y)
AFFINE = LinearAdapter(D, bias=True).eval()
with torch.no_grad():
    AFFINE.weight.copy_(0.2 * torch.from_numpy(unit(D, 3)))
    AFFINE.offset.copy_(0.5 * torch.from_numpy(unit(1, 4)[0]))


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "db" / "t.lance", SET, batch_size=128)


def exact(adapter, k):
    if adapter is AFFINE:
        return knn(transform(adapter, xq, device="cpu"), transform(adapter, x, device="cpu"), k)
    m = as_transform(adapter)
    return knn(m.transform(xq), m.transform(x), k)


def test_queries_in_a_dataframe_are_checked_as_transform_does(table):
    columns = [f"f{i}" for i in range(D)]
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(pd.DataFrame(x, columns=columns), y)
    activate(table, migrate_table(table, e))
    searched, frame = AdaptedTable(table, e), pd.DataFrame(xq, columns=columns)
    assert np.array_equal(searched.search(frame, 3).I, searched.search(xq, 3).I)
    message = error_message(lambda: e.transform(frame[columns[::-1]]))
    for call in (searched.search, searched.rows):
        assert error_message(lambda: call(frame[columns[::-1]])) == message


def test_table_contains_the_embedding_set(table):
    rows = table.search().select(["id", "label", "split", "vector"]).limit(N).to_arrow()
    assert (
        rows["id"].to_pylist() == SET.ids.tolist()
        and rows["label"].to_pylist() == y.tolist()
        and rows["split"].to_pylist() == SET.split.tolist()
    )
    assert np.array_equal(rows["vector"].combine_chunks().flatten().to_numpy().reshape(N, -1), x)


@pytest.mark.parametrize("adapter", (WHITENING, LDA, AFFINE), ids=("square", "narrow", "affine"))
def test_migrated_table_equals_exact_search(table, adapter):
    activate(table, migrate_table(table, adapter, batch_size=77))
    found, expected = AdaptedTable(table, adapter).search(xq, 5), exact(adapter, 5)
    assert (found.I == SET.ids[expected.I]).all() and np.abs(found.D - expected.D).max() < 1e-5


def test_migration_resumes_while_raw_column_is_searched(tmp_path, table, monkeypatch):
    "From another connection; rows added in between are adapted too."
    adapted = []
    m = as_transform(WHITENING)._replace(
        adapt=lambda rows: (adapted.append(len(rows)), as_transform(WHITENING).transform(rows))[1]
    )
    column = migrate_table(table, m, batch_size=50, max_rows=120)
    assert (
        adapted == [50, 50, 20]
        and "180 rows have no vector" in error_message(lambda: activate(table, column))
        and active_column(table) == "vector"
    )
    again = lancedb.connect(str(tmp_path / "db")).open_table("t")
    assert (
        again.search(xq[0], vector_column_name="vector").limit(1).to_list()[0]["id"]
        == SET.ids[knn(xq[:1], x, 1).I[0, 0]]
    )
    again.add([{"id": "new", "label": 3, "split": "late", "vector": xq[3]}])
    assert migrate_table(again, m) == column and migrate_table(again, m) == column
    assert sum(adapted) == 2 * (N + 1)  # the call that ends a migration in parts compares every row, the next one none
    activate(again, column)
    assert AdaptedTable(again, WHITENING).search(xq[3:4], 1).I.tolist() == [["new"]]


def test_conditions_columns_and_padding(table):
    activate(table, migrate_table(table, WHITENING))
    t = AdaptedTable(table, WHITENING)
    found = t.search(xq, 3, where="label = 4 AND split = 'test'")
    member = np.flatnonzero((y == 4) & (SET.split == "test"))
    z = as_transform(WHITENING).transform(x)
    assert (found.I == SET.ids[member][knn(as_transform(WHITENING).transform(xq), z[member], 3).I]).all()
    few = t.search(xq[:2], 4, where="id = 'ü''7'")
    assert few.I.tolist() == [["ü'7", "", "", ""]] * 2 and np.isinf(few.D[:, 1:]).all()
    one = t.rows(xq[:1], 2, columns=["id", "label"])
    assert set(one.column_names) == {"id", "label", "_distance", "query_index"} and one["query_index"].to_pylist() == [
        0,
        0,
    ]


def test_index_on_adapted_column(table):
    from lancedb.index import IvfFlat

    column = migrate_table(table, WHITENING)
    table.create_index(column, config=IvfFlat(distance_type="l2", num_partitions=4), replace=True)
    activate(table, column)
    found, few = (AdaptedTable(table, WHITENING).search(xq, 5, nprobes=n) for n in (4, 1))
    assert (found.I == SET.ids[exact(WHITENING, 5).I]).all() and 0.1 < (few.I == found.I).mean() < 1


def test_two_adapted_columns_and_back_to_raw(table):
    first, second = migrate_table(table, WHITENING), migrate_table(table, LDA)
    activate(table, first)
    activate(table, second)
    assert (
        active_column(table) == second
        and "was adapted by" in error_message(lambda: AdaptedTable(table, WHITENING))
        and (AdaptedTable(table, LDA).search(xq, 2).I == SET.ids[exact(LDA, 2).I]).all()
    )
    activate(table, first)
    assert (AdaptedTable(table, WHITENING).search(xq, 2).I == SET.ids[exact(WHITENING, 2).I]).all()
    activate(table, "vector")
    assert "'vector', whose vectors are not adapted" in error_message(lambda: AdaptedTable(table, WHITENING))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda t: migrate_table(t, np.eye(3, dtype="f4")), "3 numbers"),
        (lambda t: migrate_table(t, WHITENING, vector_column="nothing"), "columns"),
        (lambda t: migrate_table(t, WHITENING, id_column="label"), "must be distinct"),
        (lambda t: activate(t, "adapted_0"), "no column"),
        (lambda t: active_column(t, "nothing"), "no column"),
        (lambda t: AdaptedTable(t, WHITENING), "are not adapted"),
        (lambda t: activate(t, WHITENING), "column must be a name"),
        (lambda t: activate(t, x), "column must be a name, such as migrate_table returns it, got ndarray"),
        (lambda t: activate(t, None), "column must be a name"),
        (lambda t: migrate_table(t, WHITENING, id_column="vector"), "must hold integers or texts"),
        (lambda t: activate(t, "label"), "no vectors adapted by ega"),
        (lambda t: activate(t, "id"), "no vectors adapted by ega"),
    ],
)
def test_bad_input_raises(table, call, words):
    assert words in error_message(lambda: call(table))


def test_write_table_resumes_and_open_table_checks_path(tmp_path):
    path = tmp_path / "db" / "t.lance"
    write_table(path, SET.take(slice(0, 110)), batch_size=50)
    table = write_table(path, SET, batch_size=50)  # the missing rows, none twice
    assert table.to_arrow()["id"].to_pylist() == SET.ids.tolist() and set(table.to_arrow()["class"].to_pylist()) == set(
        SET.classes
    )
    assert write_table(path, SET).count_rows() == N == open_table(path).count_rows()
    narrow = EmbeddingSet(np.eye(3, dtype=np.float32), [0, 1, 2], ["p", "q", "r"], [""] * 3, tuple("abc"), {})
    assert "got 16" in error_message(lambda: write_table(path, narrow)) and "NAME.lance" in error_message(
        lambda: write_table(tmp_path / "t", SET)
    )
    (tmp_path / "hollow.lance").mkdir()
    for wrong, words in (
        (tmp_path / "none.lance", "it does not exist"),
        (tmp_path, "another ending"),
        (tmp_path / "hollow.lance", "cannot be opened"),
    ):
        assert words in error_message(lambda: open_table(wrong))


def test_no_more_neighbours_than_rows_are_returned(table):
    activate(table, migrate_table(table, WHITENING))
    t = AdaptedTable(table, WHITENING)
    found, expected = t.search(xq, 10**12), t.search(xq, N)
    assert found.D.shape == (len(xq), N) and np.array_equal(found.I, expected.I)


def test_rows_of_any_norm_are_migrated_and_searched_as_unit_rows(tmp_path, table):
    "A table that another program wrote, with vectors as its encoder gave them."
    raw = lancedb.connect(tmp_path).create_table("raw", [{"id": i, "vector": 3 * v} for v, i in zip(x, range(N))])
    activate(raw, migrate_table(raw, WHITENING))
    expected = exact(WHITENING, 5)
    found = AdaptedTable(raw, WHITENING).search(5 * xq, 5)
    assert np.array_equal(found.I, expected.I) and np.abs(found.D - expected.D).max() < 1e-5


@pytest.mark.parametrize("columns", ["id", 3, ["id", 3], {"id"}, np.array(["id"])])
def test_columns_are_a_list_of_names(table, columns):
    activate(table, migrate_table(table, WHITENING))
    message = error_message(lambda: AdaptedTable(table, WHITENING).rows(xq[:1], 2, columns=columns))
    assert message.startswith('columns must be a list of names, such as ["id", "label"], got')


def keyed_table(tmp_path, keys, vectors, kind=None):
    vectors = pa.array(vectors.tolist(), pa.list_(pa.float32(), D) if kind is None else kind)
    table = pa.table({"key": pa.array(keys), "v": vectors})
    return lancedb.connect(str(tmp_path / "keyed")).create_table("t", table)


def test_missing_ids_are_refused_before_and_after_the_migration(tmp_path):
    table = keyed_table(tmp_path, [1, 2, None], x[:3])
    names = {"id_column": "key", "vector_column": "v"}
    assert "must hold an id in every row, 1 are missing" in error_message(lambda: migrate_table(table, LDA, **names))
    assert table.schema.names == ["key", "v"]
    table.delete("key IS NULL")
    migrate_table(table, LDA, **names)
    table.add([{"key": None, "v": x[3]}])
    assert "1 are missing" in error_message(lambda: migrate_table(table, LDA, **names))


def test_a_migration_ends_if_no_row_is_found_again(table, monkeypatch):
    found_none = type("Merge", (), {"num_updated_rows": 0})()
    merge = type("Builder", (), {"when_matched_update_all": lambda s: s, "execute": lambda s, rows: found_none})
    monkeypatch.setattr(type(table), "merge_insert", lambda self, on: merge())
    assert "none of 300 rows was found again by its value in 'id'" in error_message(
        lambda: migrate_table(table, WHITENING)
    )


def test_vectors_without_a_direction_and_lists_of_any_length_leave_the_table_as_it_was(tmp_path, table):
    import pyarrow as pa

    rows = x[:5].copy()
    rows[3] = 0
    zero = keyed_table(tmp_path, list("abcde"), rows)
    names = {"id_column": "key", "vector_column": "v"}
    assert "first the one with id 'd'" in error_message(lambda: migrate_table(zero, WHITENING, batch_size=2, **names))
    assert zero.schema.names == ["key", "v"]
    lists = keyed_table(tmp_path / "lists", [1, 2], x[:2], pa.list_(pa.float32()))
    assert "must hold lists of a fixed size, 16 numbers" in error_message(
        lambda: migrate_table(lists, WHITENING, **names)
    )


def test_updated_vectors_are_adapted_by_the_next_call(table):
    activate(table, migrate_table(table, WHITENING))
    name = SET.ids[8].replace("'", "''")
    table.update(where=f"id = '{name}'", values={"vector": xq[0].tolist()})
    assert AdaptedTable(table, WHITENING).search(xq[:1], 1).D[0, 0] > 0.01
    migrate_table(table, WHITENING)
    found = AdaptedTable(table, WHITENING).search(xq[:1], 1)
    assert found.I.tolist() == [[SET.ids[8]]] and found.D[0, 0] < 1e-6


def test_a_table_that_was_changed_through_another_handle_is_migrated(table, tmp_path):
    open_table(tmp_path / "db" / "t.lance").add([{"id": "new", "label": 3, "split": "late", "vector": xq[3]}])
    column = migrate_table(table, WHITENING)
    assert table.count_rows(f"{column} IS NOT NULL") == N + 1


def test_rows_added_after_the_migration_are_named_by_a_warning(table):
    activate(table, migrate_table(table, WHITENING))
    searched = AdaptedTable(table, WHITENING)
    table.add([{"id": "new", "label": 3, "split": "late", "vector": xq[3]}])
    with pytest.warns(UserWarning, match="1 of 301 rows have no vector"):
        found = searched.search(xq[:2], 400)
    assert found.D.shape == (2, N) and np.isfinite(found.D).all()
    migrate_table(table, WHITENING)
    assert searched.search(xq[3:4], 1).I.tolist() == [["new"]]  # a warning would be an error here


def test_unsigned_ids_are_returned_if_they_fit_in_int64(tmp_path):
    import pyarrow as pa

    ids, vectors = np.array([7, 2**63 + 5], "u8"), x[[0, 299]]
    rows = pa.table({"id": ids, "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), D)})
    table = lancedb.connect(tmp_path).create_table("t", rows)
    activate(table, migrate_table(table, WHITENING))
    searched = AdaptedTable(table, WHITENING)
    found = searched.search(vectors[:1], 2, where="id < 100")
    assert found.I.tolist() == [[7, -1]] and found.I.dtype == np.int64
    message = error_message(lambda: searched.search(vectors, 2))
    assert message.startswith(f"ids in column 'id' must fit in int64, at most {2**63 - 1}, got {2**63 + 5}")


@pytest.fixture
def documents(tmp_path):
    return write_table(tmp_path / "db" / "cranfield.lance", cranfield.SET.documents)


@pytest.mark.parametrize("side", ["both", "two"])
def test_pair_adapter_migrates_documents_and_adapts_queries(documents, side):
    "The nDCG of the table is that of exact search with both sides adapted."
    adapter = cranfield.fitted(side)
    activate(documents, migrate_table(documents, adapter))
    found = AdaptedTable(documents, adapter).search(cranfield.XQ)
    assert cranfield.ndcg(found.I) == pytest.approx(
        cranfield.ndcg(cranfield.DOCUMENT_IDS[cranfield.exact(adapter).I]), abs=1e-9
    )
    assert "was adapted by" in error_message(lambda: AdaptedTable(documents, cranfield.fitted("query")))
    assert "which this adapter does not change" in error_message(
        lambda: AdaptedTable(documents, cranfield.fitted("query"))
    )


def test_nothing_is_migrated_for_an_adapter_of_queries(documents):
    "The raw column serves as it is, also with an index, and its vectors may have any norm."
    adapter, version = cranfield.fitted("query"), documents.version
    assert migrate_table(documents, adapter) == "vector" and documents.version == version
    expected = cranfield.exact(adapter)
    scaled = pd.DataFrame({"id": cranfield.DOCUMENT_IDS, "vector": list(cranfield.XD * np.float32(3))})
    scaled.loc[::2, "vector"] = scaled.loc[::2, "vector"] * 0.1
    documents.merge_insert("id").when_matched_update_all().execute(pa_table(scaled, documents.schema))
    activate(documents, "vector")
    found = AdaptedTable(documents, adapter).search(cranfield.XQ)
    assert cranfield.ndcg(found.I) == pytest.approx(cranfield.ndcg(cranfield.DOCUMENT_IDS[expected.I]), abs=1e-9)
    assert np.abs(found.D - expected.D).max() < 1e-5
    with pytest.raises(InputError, match="'vector' must have 3 numbers per row"):
        AdaptedTable(documents, np.eye(3, dtype="f4"))


def pa_table(frame, schema):
    "A DataFrame of ids and vectors as an Arrow table with the types of another one."
    vectors = pa.array([v.tolist() for v in frame["vector"]], schema.field("vector").type)
    return pa.table({"id": frame["id"].tolist(), "vector": vectors})


def test_two_raw_columns_are_adapted_apart(tmp_path):
    "By the same adapter, each into a column of its own, which serves its raw column alone."
    rows = pd.DataFrame({"id": range(N), "title": x.tolist(), "body": x[::-1].tolist()})
    vector = pa.list_(pa.float32(), D)
    schema = pa.schema([("id", pa.int64()), ("title", vector), ("body", vector)])
    table = lancedb.connect(str(tmp_path)).create_table("two", pa.Table.from_pandas(rows, schema))
    title, body = (migrate_table(table, WHITENING, vector_column=name) for name in ("title", "body"))
    for raw, column, vectors in (("title", title, x), ("body", body, x[::-1])):
        activate(table, column, raw)
        found = AdaptedTable(table, WHITENING, vector_column=raw).search(xq, 3)
        m = as_transform(WHITENING)
        assert np.array_equal(found.I, knn(m.transform(xq), m.transform(vectors), 3).I)
    with pytest.raises(InputError, match="no vectors adapted by ega from 'title'"):
        activate(table, body, "title")
