"Validation of arrays and labels, random generators, devices, deferred Ctrl-C and the example point sets."

import doctest
import shlex
import signal
import subprocess
import sys
import threading
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
    RNG_NAMES,
    InputError,
    check_embeddings,
    check_feature_names,
    check_index,
    check_labels,
    check_rows_per_class,
    check_unit_norm,
    check_y,
    defer_sigint,
    import_optional,
    linear,
    match_classes,
    normalize,
    parse_label_fields,
    pick_device,
    rows_by_class,
    spawn_rngs,
    torch_generator,
)
from ega.testing import EXAMPLES, circle_points, simplex_vertices

REAL = st.floats(-1e6, 1e6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6)


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 9)), elements=REAL))
def test_normalize_keeps_directions_or_reports_zero_rows(a):
    zero = np.flatnonzero((a == 0).all(1))
    if len(zero):
        with pytest.raises(InputError):
            normalize(a)
        return
    x = normalize(a)
    assert x.dtype == np.float32 and x.flags.c_contiguous and np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)
    wide = a.astype(np.float64)
    assert np.allclose(x, wide / np.linalg.norm(wide, axis=1, keepdims=True), atol=1e-6)
    assert np.allclose(normalize(x), x, atol=2e-7)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e20, 1e37])
def test_normalize_near_the_limits_of_float32(scale):
    a = np.random.default_rng(0).normal(size=(4, 6))
    assert np.allclose(normalize((a * scale).astype(np.float32)), normalize(a), atol=1e-5)


def test_check_embeddings_accepts_every_container(tmp_path):
    a = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    np.save(tmp_path / "a.npy", a)
    same = [
        a,
        a.astype(np.float64),
        np.asfortranarray(a),
        a[::-1][::-1],
        np.load(tmp_path / "a.npy", mmap_mode="r"),
        torch.tensor(a),
        torch.tensor(a, requires_grad=True),
        torch.tensor(a).T.contiguous().T,
        a.tolist(),
        [*a],
        np.repeat(a, 2, 1)[:, ::2],
    ]
    for b in same:
        assert np.array_equal(check_embeddings(b), a) and check_embeddings(b).flags.c_contiguous
    for b in (a.astype(np.float16), torch.tensor(a).bfloat16()):
        assert np.allclose(check_embeddings(b), a, atol=0.02)
    assert np.array_equal(check_embeddings(np.arange(6).reshape(2, 3)), np.arange(6, dtype=np.float32).reshape(2, 3))
    # float32 C-contiguous input is not copied
    assert check_embeddings(a) is a
    assert check_embeddings(np.load(tmp_path / "a.npy", mmap_mode="r")).base is not None


@pytest.mark.parametrize(
    "bad",
    [
        np.ones(3),
        np.ones((2, 2, 2)),
        [],
        np.ones((0, 4)),
        np.ones((4, 0)),
        np.full((2, 2), np.nan),
        np.array([[1, 2], [np.inf, 1]]),
        np.array([[1e300, 1]]),
        np.array([[1, 2], [1e-300, 1e-40]]),
        [["a text"], ["b"]],
        ["a text", "b"],
        [["0.5"]],
        pd.DataFrame({"a": [1.0], "name": ["x"]}),
        pd.DataFrame({"a": [1.0, None], "b": [1, 2]}).astype("Float64"),
        pd.DataFrame({"v": [[1.0, 2.0], [2.0, 1.0]]}),
        pd.Series([[1.0, 2.0], [2.0, 1.0]]),
        sparse.csr_matrix(np.eye(3)),
        (row for row in np.eye(3)),
        [[None, 1]],
        np.array([["2020-01-01"]], "M8[D]"),
        np.array([["a", "b"]]),
        np.ones((2, 2), complex),
        np.array([[None, 1]]),
        np.ones((2, 2), bool),
        np.zeros(2, [("\n", "?")]),
        np.zeros(2, [("a", "f4"), ("b", "f4")]),
        [[1.0], [1.0, 2.0]],
        "text",
        None,
        3.5,
    ],
)
def test_check_embeddings_rejects_bad_input(bad):
    with pytest.raises(InputError):
        check_embeddings(bad)


def test_a_table_of_arrow_has_names_of_columns():
    table = pa.table({"a": [1.0], "b": [2.0]})
    estimator = SimpleNamespace()
    check_feature_names(estimator, table, reset=True)
    assert list(estimator.feature_names_in_) == ["a", "b"]
    with pytest.raises(InputError):
        check_feature_names(estimator, table.select(["b", "a"]), reset=False)


@pytest.mark.parametrize(
    "names",
    [np.arange(3.0), pd.to_datetime(["2020", "2021", "2022"]), [b"a", b"b", b"c"], [("a", 1), ("a", 2), ("b", 1)]],
)
def test_names_of_columns_without_an_order_are_refused(names):
    frame = pd.DataFrame(np.eye(3), columns=names)
    with pytest.raises(InputError):
        check_feature_names(SimpleNamespace(), frame, reset=True)


def test_check_unit_norm_reports_deviation_and_accepts_float16():
    x = normalize(np.random.default_rng(0).normal(size=(9, 64)))
    assert check_unit_norm(x) is x and len(check_unit_norm(x.astype(np.float16).astype(np.float32)))
    with pytest.raises(InputError):
        check_unit_norm(1.5 * x)
    with pytest.raises(InputError):
        check_unit_norm(np.full((1, 2), np.nan))


@given(st.lists(st.integers(-1, 50), max_size=40))
def test_check_labels_accepts_every_container(some):
    y = [*some, 0]  # at least one label
    for a in (y, np.array(y), np.array(y, np.int8), np.array(y, float), torch.tensor(y)):
        assert check_labels(a).tolist() == y and check_labels(a).dtype == np.int64


@pytest.mark.parametrize(
    "bad, kwargs",
    [
        ([[0]], {}),
        ([0, 1], {"n": 3}),
        ([0, -2], {}),
        ([0.5], {}),
        ([1, np.nan], {}),
        (["a"], {}),
        ([0, 0], {"min_classes": 2}),
        ([-1, -1], {"min_classes": 1}),
        ([], {"min_classes": 1}),
        ([True, False], {}),
    ],
)
def test_check_labels_rejects_bad_input(bad, kwargs):
    with pytest.raises(InputError):
        check_labels(bad, **kwargs)


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=3)


@given(st.lists(st.one_of(st.none(), NAMES), min_size=1))
def test_encode_labels_round_trip(names):
    for container in (names, np.array(names, dtype=object), pd.Series(names, dtype=object)):
        y, classes = check_y(container, unlabelled=[])
        assert [classes[i] if i >= 0 else "" for i in y] == [name or "" for name in names]
        assert classes.tolist() == sorted(set(names) - {None, ""}) and y.dtype == np.int64


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**53)), min_size=1))
def test_encode_labels_gives_the_same_for_every_container_of_integers(numbers):
    "A float holds integers up to 2**53 exactly."
    filled = [-1 if v is None else v for v in numbers]
    expected = np.unique([v for v in filled if v >= 0]).astype(int).tolist()
    for y in (
        numbers,
        filled,
        np.array(filled),
        np.array([np.nan if v is None else v for v in numbers]),
        pd.Series(numbers, dtype="Int64"),
        pd.Series(numbers, dtype="Float64"),
        pd.Series(numbers, dtype="int64[pyarrow]"),
        pd.Categorical(filled),
        torch.tensor(filled),
        np.ma.masked_array([v or 0 for v in numbers], [v is None for v in numbers]),
    ):
        labels, classes = check_y(y, len(numbers))
        assert classes.dtype == np.int64 and classes.tolist() == expected
        assert [None if i < 0 else classes[i] for i in labels] == numbers


MARKS = ["-1", "-1.0", "nan", "NaN", "NA", "n/a", "#N/A", "None", "NULL", "<NA>", "NaT", " ", "\t", " nan "]


@pytest.mark.parametrize("mark", MARKS)
def test_texts_that_may_mean_unlabelled_are_neither_classes_nor_missing_without_being_asked(mark):
    y = ["owl", mark, "asp", mark]
    with pytest.raises(InputError) as error:
        check_y(y)
    assert f"{mark!r} (2 rows)" in str(error.value) and "unlabelled=[]" in str(error.value)
    assert f"--unlabelled {shlex.quote(mark)}" in str(error.value)
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
        (["owl", "?", "asp", "-"], ["?", "-"], [1, -1, 0, -1], ["asp", "owl"]),
        (["owl", "-1", "nan"], ["-1"], [1, -1, 0], ["nan", "owl"]),  # exactly these, nothing is asked
        (["1", "-1"], [-1], [0, -1], ["1"]),
        (np.array([2**62, 5], "u8"), None, [1, 0], [5, 2**62]),
        (pd.Series(["a", None], dtype="category"), None, [0, -1], ["a"]),
        (range(3), None, [0, 1, 2], [0, 1, 2]),
        ([None, np.nan], None, [-1, -1], []),
        ([], None, [], []),
    ],
)
def test_encode_labels_reads_missing_labels(y, unlabelled, labels, classes):
    got = check_y(y, unlabelled=unlabelled)
    assert got[0].tolist() == labels and got[1].tolist() == classes


@pytest.mark.parametrize(
    "y, unlabelled",
    [
        (None, None),
        (np.zeros((3, 1), int), None),
        ([[0], [1]], None),
        (pd.DataFrame({"kind": [1, 2]}), None),
        (np.zeros((3, 2), int), None),
        ([np.zeros((2, 1)), np.zeros((2, 2))], None),
        ([[0], [1, 2]], None),
        ((v for v in [1, 2]), None),
        (iter([1]), None),
        (5, None),
        ("owl", None),
        ({1, 2}, None),
        ({0: 1, 1: 2}, None),
        ([b"owl"], None),
        (np.array([b"owl"]), None),
        ([True, False], None),
        (np.array([True]), None),
        (np.zeros(2, [("a", "i4"), ("b", "i4")]), None),
        (pd.Series([True, None], dtype="boolean"), None),
        (torch.tensor([True]), None),
        (np.array(["2020-01-01"], "M8[D]"), None),
        (pd.Series(pd.to_datetime(["2020-01-01"], utc=True)), None),
        (np.array([1], "m8[s]"), None),
        ([np.timedelta64(1, "s")], None),
        ([1j], None),
        (np.array([1j]), None),
        (["owl", 3], None),
        ([3, "nan"], None),
        ([3, "nan"], []),
        ([0.5, 1], None),
        (np.array([np.inf]), None),
        ([1, -2], None),
        (np.array([2**63], "u8"), None),
        ([2**70], None),
        ([1e300], None),
        (["a\0", "a"], None),
        ([1, 2], "1"),
        ([1, 2], 1),
        ([1, 2], [3]),
        (["owl"], ["olw"]),
        ([1, 2], ["owl"]),
        (["owl", "-1"], ["nan"]),
        (["owl", "nan"], [-1]),
        (["owl", "-1", None], ["nan"]),
        (["owl", "-1", ""], ["nan"]),
        ([7, -1, 3], ["nan"]),
        ([7, np.nan], ["-1"]),
        ([7, 3], [None]),
    ],
)
def test_encode_labels_refuses_what_is_no_label(y, unlabelled):
    with pytest.raises(InputError):
        check_y(y, unlabelled=unlabelled)


def test_encode_labels_checks_the_length():
    with pytest.raises(InputError):
        check_y(["a", "b"], 3)


@pytest.mark.parametrize(
    "fields, unlabelled, labels",
    [
        (["3", "3.0", "3.", " 7 ", "-1", "0"], None, [3, 3, 3, 7, -1, 0]),
        (["3", "", " ", "nan", "NA", "None", "null", "N/A", "<NA>"], None, [3] + [-1] * 8),
        (["3", "007"], None, ["3", "007"]),
        (["3", "3.5", "owl"], None, ["3", "3.5", "owl"]),
        (["3", "1e5"], None, ["3", "1e5"]),
        (["3", "9" * 19], None, ["3", "9" * 19]),  # beyond int64
        (["3", "-99"], None, [3, -99]),
        (["", "NA"], None, ["", "NA"]),  # no number at all
        (["3", "?"], None, ["3", "?"]),
        (["3", "?", "4.0"], ["?"], [3, "?", 4]),
        (["3", "owl", "?"], ["?"], ["3", "owl", "?"]),
        ([], None, []),
    ],
)
def test_a_column_holds_integers_only_if_every_field_is_one_or_missing(fields, unlabelled, labels):
    assert parse_label_fields(fields, unlabelled).tolist() == labels


def test_classes_of_another_kind_or_spelling_are_refused_and_not_unseen():
    assert match_classes(np.array(["a", "c"]), np.array(["a", "b"])).tolist() == [True, False]
    assert match_classes(np.array(["7", "12"]), np.array(["7", "8"])).tolist() == [True, False]
    assert not len(match_classes(np.array([], int), np.array(["a"])))
    for classes, fitted in (
        (np.array([1, 2]), np.array(["1", "2"])),
        (np.array(["1"]), np.array([1])),
        (np.array(["7.0"]), np.array(["7"])),
        (np.array(["7"]), np.array(["007"])),
    ):
        with pytest.raises(InputError):
            match_classes(classes, fitted)


def test_ids_in_place_of_classes_are_refused():
    check_rows_per_class(np.arange(19), np.arange(19))  # too few rows to say
    check_rows_per_class(np.repeat(np.arange(10), 2), np.arange(10))
    with pytest.raises(InputError):
        check_rows_per_class(np.r_[np.arange(11), np.arange(9), -1], np.arange(11))


@given(st.lists(st.integers(-1, 4)))
def test_rows_by_class_against_a_loop(y):
    expected = [[i for i, label in enumerate(y) if label == c] for c in sorted(set(y) - {-1})]
    assert [rows.tolist() for rows in rows_by_class(y)] == expected


def test_spawn_rngs_are_independent_and_repeatable():
    first = {name: getattr(spawn_rngs(3), name).integers(2**62, size=4).tolist() for name in RNG_NAMES}
    assert len({tuple(draws) for draws in first.values()}) == len(RNG_NAMES)
    rngs = spawn_rngs(3)
    for name in reversed(RNG_NAMES):  # the order of use does not matter
        assert getattr(rngs, name).integers(2**62, size=4).tolist() == first[name]
    assert spawn_rngs(4).init.random() != spawn_rngs(3).init.random()
    assert torch.equal(
        torch.rand(3, generator=torch_generator(spawn_rngs(3).init)),
        torch.rand(3, generator=torch_generator(spawn_rngs(3).init)),
    )


@pytest.mark.parametrize("seed", [-1, 1.5, "7", None])
def test_spawn_rngs_rejects_bad_seeds(seed):
    with pytest.raises(InputError):
        spawn_rngs(seed)


def test_pick_device():
    assert pick_device("cpu").type == "cpu" and pick_device().type in ("cpu", "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(InputError):
            pick_device("cuda")


@pytest.fixture
def received():
    "Signals received by a handler of Ctrl-C installed for the test; it must be installed again at the end."
    received = []

    def handler(*args):
        received.append(args[0])

    before = signal.signal(signal.SIGINT, handler)
    yield received
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)


def test_sigint_is_deferred_to_the_next_call_or_the_end(received):
    with defer_sigint() as handle_pending:
        handle_pending()
        assert not received
        signal.raise_signal(signal.SIGINT)
        assert not received
        handle_pending()
        handle_pending()
        assert received == [signal.SIGINT]
        with defer_sigint() as handle_in_inner_block:
            signal.raise_signal(signal.SIGINT)
            handle_in_inner_block()
            assert len(received) == 1  # still deferred by the outer block
        assert len(received) == 1
    assert len(received) == 2
    with pytest.raises(ZeroDivisionError), defer_sigint():
        signal.raise_signal(signal.SIGINT)
        1 / 0
    assert len(received) == 3


def test_defer_sigint_changes_nothing_in_other_threads_or_without_a_handler(received):
    def work():
        with defer_sigint() as handle_pending:
            handle_pending()
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    other = threading.Thread(target=work)
    other.start()
    other.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [before, signal.SIG_IGN]


def test_import_optional_names_the_extra_and_passes_on_other_import_errors(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r"pip install 'ega\[encoders\]'"):
        import_optional("no_such_package.part", "encoders")
    (tmp_path / "broken_package.py").write_text("import another_missing_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="another_missing_thing"):
        import_optional("broken_package", "encoders")


def test_example_point_sets():
    assert np.allclose(circle_points(60), [[0.5, 3**0.5 / 2]])
    assert np.allclose(simplex_vertices(3) @ simplex_vertices(3).T, np.where(np.eye(3), 1, -0.5))
    assert {k: (v.z.shape, v.y.tolist()) for k, v in EXAMPLES.items()} == {
        "A": ((4, 2), [0, 0, 1, 1]),
        "D": ((5, 2), [0, 0, 1, 1, 2]),
        "B": ((3, 3), [0, 0, 0]),
        "E": ((12, 4), [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3),
        "P": ((2, 2), [0, 1]),
    }


def test_docstring_examples():
    result = doctest.testmod(ega.data.arrays)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    "labels",
    [
        ["alarm", "alarm ", "timer"],
        ["Alarm", "timer", "alarm"],
        ["Alarm", "timer", "alarm "],
    ],
)
def test_texts_that_differ_only_in_blanks_around_them_or_in_case_are_refused(labels):
    with pytest.raises(InputError):
        check_y(labels)
    assert check_y(["alarm", "alarms", "a larm"])[1].tolist() == ["a larm", "alarm", "alarms"]


@pytest.mark.parametrize(
    "labels",
    [
        ["Alarm", "timer"],
        [" alarm"],
        ["0", "1", "2"],
    ],
)
def test_classes_written_in_another_way_are_never_unseen(labels):
    fitted = np.array(["alarm", "timer"])
    with pytest.raises(InputError):
        match_classes(check_y(labels)[1], fitted)
    assert match_classes(np.array(["alarm", "song"]), fitted).tolist() == [True, False]
    assert match_classes(np.array(["song"]), fitted).tolist() == [False]


def test_masked_values_are_refused():
    x = np.ma.masked_less(np.arange(6.0).reshape(2, 3), 2)
    with pytest.raises(InputError):
        check_embeddings(x)
    assert check_embeddings(np.ma.masked_less(x, -1).filled(0)).shape == (2, 3)


def test_repeated_and_mixed_names_of_columns_are_named():
    "One sentence of this package, where scikit-learn and pandas have their own."
    x = np.eye(3)

    class Estimator:
        pass

    cases = {"several named 'a'; rename": ["a", "b", "a"], "several named 1; rename": [2, 1, 1], "string": ["a", 1, 2]}
    for _words, names in cases.items():
        with pytest.raises(InputError):
            check_feature_names(Estimator(), pd.DataFrame(x, columns=names), reset=True)
    twice = pd.DataFrame({"a": ["p", "q", "r"], "b": ["p", "q", "q"]}).set_axis(["label", "label"], axis=1)
    with pytest.raises(InputError):
        check_y(twice["label"])


def test_tensors_with_gradients_are_read_alone_and_in_lists():
    x = torch.eye(3, requires_grad=True)
    assert np.array_equal(check_embeddings(x), np.eye(3)) and np.array_equal(check_embeddings(list(x)), np.eye(3))


def test_float64_rows_within_the_range_of_float32_keep_their_values():
    x = np.array([[1e-37, 0.0], [0.0, 0.0], [3e38, 1e-300]])
    assert np.array_equal(check_embeddings(x), x.astype("f4"))


def test_an_index_in_another_order_is_refused():
    frame = pd.DataFrame(np.eye(4), index=list("abcd"))
    for index in (list("abcd"), range(4), list("wxyz"), list("abcx")):
        check_index(frame, pd.Series([0, 0, 1, 1], index=index))
    for other in (np.arange(4), list("abcd"), pd.Series([0, 1])):
        check_index(frame, other)
    check_index(np.eye(4), pd.Series([0, 0, 1, 1], index=list("badc")))
    with pytest.raises(InputError):
        check_index(frame, pd.Series([0, 0, 1, 1], index=list("badc")))


def test_nullable_columns_of_a_dataframe_are_numbers():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    for types in ({"a": "Float64", "b": "Int64"}, {"a": "Float32"}, {}):
        assert np.array_equal(check_embeddings(frame.astype(types)), [[1, 3], [2, 4]])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("n, n_in, n_out", [(1, 3, 2), (64, 64, 64), (63, 65, 70), (200, 96, 130)])
def test_linear_equals_the_product_of_torch(n, n_in, n_out, dtype):
    "Also of transposed and of sliced matrices; autograd does not record it."
    gen = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=gen).to(dtype).requires_grad_() for s in ((n, n_in), (n_out, n_in), (n_out,)))
    tol = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1}[dtype] * n_in**0.5  # sums in another order
    wide = torch.randn(n, 2 * n_in, generator=gen).to(dtype)
    for ours, theirs in (
        (linear(x, w, b), x @ w.T + b),
        (linear(x, w), x @ w.T),
        (linear(x.T, x.T), x.T @ x),
        (linear(wide[:, ::2], w), wide[:, ::2] @ w.T),
        (linear(x[1:], w.T.contiguous().T), x[1:] @ w.T),
        (linear(torch.stack([x, 2 * x]), torch.stack([w, w])), torch.stack([x @ w.T, 2 * x @ w.T])),
    ):
        assert ours.dtype == dtype and not ours.requires_grad and torch.allclose(ours, theirs, atol=tol)


def test_linear_uses_onednn_for_large_float32_matrices_alone(monkeypatch):
    calls = []

    def product(x, weight, bias, *options):
        calls.append(tuple(x.shape))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(ega.data.arrays, "_onednn_linear", lambda: product)
    large, small = torch.ones(64, 64), torch.ones(63, 64)
    for x, w in ((large, large), (small, large), (large, small), (large.double(), large.double())):
        linear(x, w)
    assert calls == [(64, 64)]


def test_linear_does_without_onednn_where_it_fails(monkeypatch):
    def product(*args):
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(ega.data.arrays, "_onednn_linear", lambda: product)
    assert torch.equal(linear(torch.eye(64), torch.ones(70, 64)), torch.ones(64, 70))


@pytest.mark.parametrize(
    "module, call, package, extra",
    [
        ("deploy.wrappers", "AdaptedEmbeddings(None, None)", "langchain_core", "langchain"),
        ("deploy.wrappers", "AdaptedEmbedding(None, None)", "llama_index", "llamaindex"),
        ("deploy.wrappers", "AdaptedEmbeddingFunction(None, 'adapter')", "chromadb", "chroma"),
        ("deploy.stores", "QdrantStore(None, 'texts')", "qdrant_client", "qdrant"),
    ],
)
def test_a_module_of_an_optional_package_is_imported_without_it(module, call, package, extra):
    "Its class says which extra is missing; in a process of its own, so that nothing here is imported anew."
    code = f"""
import sys
sys.modules[{package!r}] = None
import numpy as np
from ega.{module} import *
try: {call}
except ImportError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == f"this needs the package {package!r}; install it with: pip install 'ega[{extra}]'"
