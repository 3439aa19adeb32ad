"The checks of embeddings and labels: every container, values by another formula, and one table of wrong inputs each."

import doctest
import subprocess
import sys
import unicodedata
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

import ega.data.arrays
from ega.data.arrays import (
    InputError,
    check_feature_names,
    check_index,
    check_label_column,
    check_matrix,
    check_rows_per_class,
    check_X,
    check_y,
    import_optional,
    iter_unit_rows,
    match_classes,
    normalize,
    parse_label_fields,
    rows_by_class,
)

REAL = st.floats(-1e6, 1e6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6)


# -- embeddings ----------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 9)), elements=REAL))
def test_rows_keep_their_directions_or_zero_rows_are_refused(a):
    zero = np.flatnonzero((a == 0).all(1))
    if len(zero):
        with pytest.raises(InputError, match=f"row {zero[0]},"):
            check_X(a)
        return
    expected = a.astype(np.float64) / np.linalg.norm(a.astype(np.float64), axis=1, keepdims=True)
    for x in (normalize(a), check_X(a)):
        assert x.dtype == np.float32 and x.flags.c_contiguous and np.allclose(x, expected, atol=1e-6)
    assert check_X(x) is x and np.allclose(normalize(x), x, atol=2e-7)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e20, 1e37])
def test_rows_near_the_limits_of_float32(scale):
    a = np.random.default_rng(0).normal(size=(4, 6))
    assert np.allclose(normalize((a * scale).astype(np.float32)), normalize(a), atol=1e-5)
    assert np.array_equal(normalize([[1e-37, 0.0], [3e38, 1e-300]]), [[1, 0], [1, 0]])


def test_every_container_gives_the_same_rows(tmp_path):
    a = normalize(np.random.default_rng(0).normal(size=(6, 5)))
    np.save(tmp_path / "a.npy", a)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    frame = pd.DataFrame(a, columns=list("abcde"))
    same = [
        *(a, a.astype(np.float64), np.asfortranarray(a), a[::-1][::-1], np.repeat(a, 2, 1)[:, ::2], mapped),
        *(torch.tensor(a), torch.tensor(a, requires_grad=True), torch.tensor(a).T.contiguous().T),
        *(a.tolist(), [*a], [*torch.tensor(a, requires_grad=True)], np.ma.masked_less(a, -9)),
        *(frame, frame.astype("Float32"), frame.astype({"a": "Float64"}), pa.table({c: frame[c] for c in frame})),
        *(pd.Series([*a]), pa.array([*a]), pa.chunked_array([pa.FixedSizeListArray.from_arrays(a.ravel(), 5)])),
    ]
    for b in same:
        assert np.array_equal(check_X(b), a) and check_X(b).flags.c_contiguous
    for b in (a.astype(np.float16), torch.tensor(a).bfloat16()):
        assert np.allclose(check_X(b), a, atol=0.02)
    assert np.allclose(check_X(np.array([[3, 4]])), [[0.6, 0.8]])
    assert check_X(a) is a and np.shares_memory(check_X(mapped), mapped)


def test_blocks_are_the_rows_of_the_whole():
    a = np.random.default_rng(0).normal(size=(10, 3))
    for X in (a, torch.tensor(a)):
        blocks = list(iter_unit_rows(check_matrix(X, 3), 4))
        assert [first for first, _ in blocks] == [0, 4, 8]
        assert np.array_equal(np.concatenate([x for _, x in blocks]), check_X(X))
    a[7] = np.nan
    with pytest.raises(InputError, match="row 7"):
        list(iter_unit_rows(check_matrix(a), 4))


@pytest.mark.parametrize("lists", [[[1.0, 2.0], [3.0]], [[1.0, 2.0], None], [["a"], ["b"]]])
def test_columns_of_lists_that_are_no_matrix_are_refused(lists):
    for column in (pd.Series(lists), pa.array(lists)):
        with pytest.raises(InputError):
            check_X(column)


@pytest.mark.parametrize(
    "bad, word",
    [
        (np.ones(3), "Reshape"),
        ([], "Reshape"),
        (np.ones((0, 4)), "0 sample"),
        (np.array([[1, 2], [np.nan, 1]]), "row 1"),
        (np.array([[1, 2], [np.inf, 1]]), "NaN or inf"),
        (np.array([[1, 2], [0, 0]]), "norm 0"),
        (np.array([[1e300, 1]]), "range"),
        (np.array([[1, 2], [1e-300, 1e-40]]), "range"),
        ([[None, 1]], "real numbers"),
        (np.ones((2, 2), bool), "real numbers"),
        (np.ones((2, 2), complex), "Complex"),
        (pd.DataFrame({"a": [1.0], "name": ["x"]}), "real numbers"),
        (pd.DataFrame({"a": [1.0, None], "b": [1, 2]}).astype("Float64"), "NaN"),
        (sparse.csr_matrix(np.eye(3)), "dense"),
        (np.ma.masked_less(np.arange(6.0).reshape(2, 3), 2), "masked"),
        ([[1.0], [1.0, 2.0]], "matrix"),
        (None, "matrix"),
    ],
)
def test_what_is_no_matrix_of_embeddings_is_refused(bad, word):
    for check in (check_X, normalize):
        with pytest.raises(InputError, match=word) as error:
            check(bad)
        assert "\n" not in str(error.value)


# -- labels --------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=3)


@given(st.lists(st.one_of(st.none(), NAMES), min_size=1))
def test_texts_round_trip_or_two_spellings_are_refused(names):
    present = set(names) - {None, ""}
    for container in (names, np.array(names, dtype=object), pd.Series(names, dtype=object)):
        if len({unicodedata.normalize("NFC", name.strip().casefold()) for name in present}) < len(present):
            with pytest.raises(InputError, match="case, blanks"):
                check_y(container, unlabelled=[])
            continue
        y, classes = check_y(container, unlabelled=[])
        assert [classes[i] if i >= 0 else "" for i in y] == [name or "" for name in names]
        assert classes.tolist() == sorted(present) and y.dtype == np.int64


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**53)), min_size=1))
def test_every_container_of_integers_gives_the_same(numbers):
    "A float holds integers up to 2**53 exactly."
    filled = [-1 if v is None else v for v in numbers]
    expected = sorted({v for v in filled if v >= 0})
    for y in (
        *(numbers, filled, np.array(filled), np.array([np.nan if v is None else v for v in numbers])),
        *(pd.Series(numbers, dtype=dtype) for dtype in ("Int64", "Float64", "int64[pyarrow]")),
        *(pd.Categorical(filled), torch.tensor(filled)),
        np.ma.masked_array([v or 0 for v in numbers], [v is None for v in numbers]),
    ):
        labels, classes = check_y(y, len(numbers))
        assert classes.dtype == np.int64 and classes.tolist() == expected
        assert [None if i < 0 else classes[i] for i in labels] == numbers


@pytest.mark.parametrize(
    "mark", ["-1", "-1.0", "NaN", "NA", "n/a", "#N/A", "None", "NULL", "<NA>", "NaT", " ", " nan "]
)
def test_texts_that_often_mean_unlabelled_are_neither_classes_nor_missing_without_being_asked(mark):
    y = ["owl", mark, "asp", mark]
    with pytest.raises(InputError, match="--unlabelled"):
        check_y(y)
    assert check_y(y, unlabelled=[mark])[0].tolist() == [1, -1, 0, -1]
    assert check_y(y, unlabelled=[])[1].tolist() == sorted({"owl", "asp", mark})


@pytest.mark.parametrize(
    "y, unlabelled, labels, classes",
    [
        ([7, 0, 3], [0], [1, -1, 0], [3, 7]),
        ([7, 0, 3], ["0"], [1, -1, 0], [3, 7]),  # as the shell gives it
        ([7.0, 0.0, np.nan], ["0.0"], [0, -1, -1], [7]),
        ([7, -99, 3], [-99], [1, -1, 0], [3, 7]),
        ([7, -1, 3], [], [1, -1, 0], [3, 7]),  # -1 in numbers always
        ([7, -1, np.nan], ["-1", "nan", None, np.nan], [0, -1, -1], [7]),  # numbers that are missing have any name
        (["owl", None], [None], [0, -1], ["owl"]),
        ([7, "?", 3], ["?"], [1, -1, 0], [3, 7]),  # removed before the rest is found to be numbers
        ([7, "", 3], None, [1, -1, 0], [3, 7]),
        (["owl", -1, "asp"], None, [1, -1, 0], ["asp", "owl"]),
        (["owl", "-1", "nan"], ["-1"], [1, -1, 0], ["nan", "owl"]),  # exactly these, nothing is asked
        (["1", "-1"], [-1], [0, -1], ["1"]),
        (np.array([2**62, 5], "u8"), None, [1, 0], [5, 2**62]),
        (pd.Series(["a", None], dtype="category"), None, [0, -1], ["a"]),
        (range(3), None, [0, 1, 2], [0, 1, 2]),
        ([None, np.nan], None, [-1, -1], []),
        ([], None, [], []),
    ],
)
def test_missing_labels(y, unlabelled, labels, classes):
    got = check_y(y, unlabelled=unlabelled)
    assert got[0].tolist() == labels and got[1].tolist() == classes


@pytest.mark.parametrize(
    "y, unlabelled, word",
    [
        (None, None, "None"),
        (np.zeros((3, 1), int), None, "one label per row"),
        (iter([1]), None, "iterator"),
        ("owl", None, "per row"),
        ([b"owl"], None, "bytes"),
        ([1, True], None, "bool"),
        (np.array(["2020-01-01"], "M8[D]"), None, "date"),
        ([np.timedelta64(1, "s")], None, "timedelta"),
        (["owl", 3], None, "all texts"),
        ([0.5, 1], None, "0.5"),
        (np.array([np.inf]), None, "inf"),
        ([1, -2], None, "-2"),
        (np.array([2**63], "u8"), None, "int64"),
        (["a\0", "a"], None, "blanks"),
        ([1, 2], "1", "list"),
        ([1, 2], [3], "no row"),
        (["owl", "-1"], ["nan"], "no row"),
        (["owl", "-1", None], ["nan"], "no row"),
        ([7, -1, 3], ["nan"], "no row"),
        ([7, np.nan], ["-1"], "no row"),
        ([7, 3], [None], "no row"),
    ],
)
def test_what_is_no_label_is_refused(y, unlabelled, word):
    with pytest.raises(InputError, match=word):
        check_y(y, unlabelled=unlabelled)


@pytest.mark.parametrize(
    "fields, unlabelled, labels",
    [
        (["3", "3.0", "3.", " 7 ", "-1", "0"], None, [3, 3, 3, 7, -1, 0]),
        (["3", "", " ", "nan", "NA", "None", "null", "N/A", "<NA>"], None, [3] + [-1] * 8),
        (["3", "007"], None, ["3", "007"]),
        (["3", "3.5", "owl"], None, ["3", "3.5", "owl"]),
        (["3", "9" * 19], None, ["3", "9" * 19]),  # beyond int64
        (["", "NA"], None, ["", "NA"]),  # no number at all
        (["3", "?"], None, ["3", "?"]),
        (["3", "?", "4.0"], ["?"], [3, "?", 4]),
        (["3", "owl", "?"], ["?"], ["3", "owl", "?"]),
        ([], None, []),
    ],
)
def test_a_column_holds_integers_only_if_every_field_is_one_or_missing(fields, unlabelled, labels):
    assert parse_label_fields(fields, unlabelled).tolist() == labels


@pytest.mark.parametrize(
    "classes, fitted, known",
    [
        (["a", "c"], ["a", "b"], [True, False]),
        (["7", "12"], ["7", "8"], [True, False]),
        ([3, 9], [1, 3], [True, False]),
        ([1, 2], ["1", "2"], None),
        (["1"], [1], None),
        (["7.0"], ["7"], None),
        (["7"], ["007"], None),
        (["Alarm", "timer"], ["alarm", "timer"], None),
        ([" alarm"], ["alarm", "timer"], None),
        (["0", "1", "2"], ["alarm", "timer"], None),
    ],
)
def test_classes_of_another_kind_or_spelling_are_refused_and_not_unseen(classes, fitted, known):
    if known is None:
        with pytest.raises(InputError):
            match_classes(np.array(classes), np.array(fitted))
    else:
        assert match_classes(np.array(classes), np.array(fitted)).tolist() == known
    assert not len(match_classes(np.array([], int), np.array(fitted)))


def test_ids_in_place_of_classes_are_refused():
    check_rows_per_class(np.arange(19), np.arange(19))  # too few rows to say
    check_rows_per_class(np.repeat(np.arange(10), 2), np.arange(10))
    for labels, classes in ((np.r_[np.arange(11), np.arange(9), -1], np.arange(11)), (np.array([-1]), [])):
        with pytest.raises(InputError):
            check_rows_per_class(labels, classes)


@given(st.lists(st.integers(-1, 4)))
def test_rows_by_class_against_a_loop(y):
    expected = [[i for i, label in enumerate(y) if label == c] for c in sorted(set(y) - {-1})]
    assert [rows.tolist() for rows in rows_by_class(y)] == expected


# -- names of columns, indexes, optional packages ------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [list("aba"), [2, 1, 1], ["a", 1, 2], np.arange(3.0), [b"a", b"b", b"c"], [("a", 1), ("a", 2), ("b", 1)]]
)
def test_names_of_columns_are_distinct_texts_or_integers(names):
    with pytest.raises(InputError):
        check_feature_names(SimpleNamespace(), pd.DataFrame(np.eye(3), columns=names), reset=True)


@pytest.mark.parametrize(
    "make", [pd.DataFrame, lambda a: pd.DataFrame(a).add_prefix("x"), lambda a: pa.table(dict(x=a[0], y=a[1]))]
)
def test_columns_in_another_order_are_refused(make):
    table, estimator = make(np.eye(2)), SimpleNamespace()
    exchanged = table.select(["y", "x"]) if isinstance(table, pa.Table) else table[table.columns[::-1]]
    check_feature_names(estimator, table, reset=True)
    check_feature_names(estimator, table, reset=False)
    with pytest.raises(InputError):
        check_feature_names(estimator, exchanged, reset=False)


def test_indexes_that_differ_but_share_names_and_exchanged_arguments_are_refused():
    frame = pd.DataFrame(np.eye(4), index=list("abcd"))
    for index in (list("abcd"), range(4), list("wxyz")):
        check_index(frame, pd.Series([0, 0, 1, 1], index=index))
    check_index(np.eye(4), pd.Series([0, 0, 1, 1], index=list("badc")))
    labels = [pd.Series([0, 0, 1, 1], index=list(index)) for index in ("badc", "abcx")]
    for X, y in [*((frame, y) for y in labels), (np.arange(4), np.eye(4))]:
        with pytest.raises(InputError):
            check_index(X, y)


@pytest.mark.parametrize("column", ["label", "class"])
@pytest.mark.parametrize("make", [pd.DataFrame, pa.Table.from_pandas])
def test_a_table_with_the_column_of_the_labels_is_refused(column, make):
    y = np.array([4, -1, 4, 9, 2, 9])
    labels, classes = check_y(y)
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(6, 3)), columns=list("xyz"))
    check_label_column(make(frame.assign(size=[1, 1, 2, 3, 2, 3])), labels)  # whole numbers that are no classes
    values = y if column == "label" else np.array([30, 10, 20])[labels]
    with pytest.raises(InputError, match=column):
        check_label_column(make(frame.assign(**{column: values})), labels)


def test_a_missing_package_is_named_with_its_extra_and_other_import_errors_pass(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r"pip install 'ega\[encoders\]'"):
        import_optional("no_such_package.part", "encoders")
    (tmp_path / "broken_package.py").write_text("import another_missing_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="another_missing_thing"):
        import_optional("broken_package", "encoders")


@pytest.mark.parametrize(
    "module, call, package",
    [
        ("deploy.wrappers", "AdaptedEmbeddings(None, None)", "langchain_core"),
        ("deploy.wrappers", "AdaptedEmbedding(None, None)", "llama_index"),
        ("deploy.wrappers", "AdaptedEmbeddingFunction(None, 'adapter')", "chromadb"),
        ("deploy.stores", "QdrantStore(None, 'texts')", "qdrant_client"),
    ],
)
def test_a_module_of_an_optional_package_is_imported_without_it(module, call, package):
    "In a process of its own, so that nothing here is imported anew."
    code = f"import sys; sys.modules[{package!r}] = None\nfrom ega.{module} import *\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"ImportError: this needs the package {package!r}" in done.stderr


def test_docstring_examples():
    result = doctest.testmod(ega.data.arrays)
    assert result.attempted and not result.failed
