"The door of the library under every kind of array, good and bad; streams; interruptions."

import signal
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ega.arrays import (
    RNG_NAMES,
    InputError,
    check_embeddings,
    check_labels,
    check_unit_norm,
    defer_sigint,
    encode_labels,
    import_optional,
    normalize,
    pick_device,
    rows_by_class,
    spawn_rngs,
    torch_generator,
)
from ega.testing import EXAMPLES, circle_points, simplex_vertices

REAL = st.floats(-1e6, 1e6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6)


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 9)), elements=REAL))
def test_normalize_gives_unit_rows_of_the_same_direction_or_names_the_zero_rows(a):
    zero = np.flatnonzero((a == 0).all(1))
    if len(zero):
        with pytest.raises(InputError, match=f"{len(zero)} rows of norm 0, first row {zero[0]}"):
            normalize(a)
        return
    x = normalize(a)
    assert x.dtype == np.float32 and x.flags.c_contiguous and np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-6)
    wide = a.astype(np.float64)
    assert np.allclose(x, wide / np.linalg.norm(wide, axis=1, keepdims=True), atol=1e-6)
    assert np.allclose(normalize(x), x, atol=2e-7)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e20, 1e37])
def test_normalize_survives_the_ends_of_float32(scale):
    a = np.random.default_rng(0).normal(size=(4, 6))
    assert np.allclose(normalize((a * scale).astype(np.float32)), normalize(a), atol=1e-5)


def test_every_container_is_one_thing(tmp_path):
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
    assert (
        check_embeddings(a) is a and check_embeddings(np.load(tmp_path / "a.npy", mmap_mode="r")).base is not None
    )  # no copy


@pytest.mark.parametrize(
    "bad,words",
    [
        (np.ones(3), r"shape \(n, d\), got \(3,\)"),
        (np.ones((2, 2, 2)), "flatten"),
        (np.ones((0, 4)), "empty"),
        (np.ones((4, 0)), "empty"),
        (np.full((2, 2), np.nan), "in 2 of 2 rows"),
        (np.array([[1, 2], [np.inf, 1]]), "first in row 1"),
        (np.array([[1e300, 1]]), "NaN or inf"),
        (np.array([["a", "b"]]), "real numbers"),
        (np.ones((2, 2), complex), "real numbers"),
        (np.array([[None, 1]]), "real numbers"),
        (np.ones((2, 2), bool), "real numbers"),
        ([[1.0], [1.0, 2.0]], "rectangular"),
        ("text", "real numbers"),
        (None, "real numbers"),
        (3.5, "shape"),
    ],
)
def test_bad_rows_are_refused_with_the_reason(bad, words):
    with pytest.raises(InputError, match=words):
        check_embeddings(bad)


def test_the_required_dimension_is_checked():
    with pytest.raises(InputError, match="xq must have 3 columns, got 2"):
        check_embeddings(np.ones((1, 2)), "xq", dim=3)


def test_check_unit_prints_the_offence_and_lets_half_precision_pass():
    x = normalize(np.random.default_rng(0).normal(size=(9, 64)))
    assert check_unit_norm(x) is x and len(check_unit_norm(x.astype(np.float16).astype(np.float32)))
    with pytest.raises(InputError, match="norm - 1| = 0.5"):
        check_unit_norm(1.5 * x)
    with pytest.raises(InputError, match="unit rows"):
        check_unit_norm(np.full((1, 2), np.nan))


@given(st.lists(st.integers(-1, 50), max_size=40))
def test_labels_pass_through_every_container(some):
    y = [*some, 0]  # at least one label
    for a in (y, np.array(y), np.array(y, np.int8), np.array(y, float), torch.tensor(y)):
        assert check_labels(a).tolist() == y and check_labels(a).dtype == np.int64


@pytest.mark.parametrize(
    "bad,kw,words",
    [
        ([[0]], {}, "shape"),
        ([0, 1], {"n": 3}, "3 rows, 2 labels"),
        ([0, -2], {}, ">= -1"),
        ([0.5], {}, "integer"),
        ([np.nan], {}, "integer"),
        (["a"], {}, "encode_labels"),
        ([0, 0], {"min_classes": 2}, "at least 2 classes, got 1"),
        ([-1, -1], {"min_classes": 1}, "got 0"),
        ([], {"min_classes": 1}, "got 0|integer"),
        ([True, False], {}, "integer"),
    ],
)
def test_bad_labels_are_refused_with_the_reason(bad, kw, words):
    with pytest.raises(InputError, match=words):
        check_labels(bad, **kw)


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=1))
def test_encoded_labels_decode(names):
    y, classes = encode_labels(names)
    assert [classes[i] if i >= 0 else "" for i in y] == [n or "" for n in names] and list(classes) == sorted(
        set(classes)
    )


@given(st.lists(st.integers(-1, 4)))
def test_class_rows_are_those_a_loop_finds(y):
    assert [rows.tolist() for rows in rows_by_class(y)] == [
        [i for i, c in enumerate(y) if c == k] for k in sorted(set(y) - {-1})
    ]


def test_streams_are_named_independent_and_repeatable():
    first = {n: getattr(spawn_rngs(3), n).integers(2**62, size=4).tolist() for n in RNG_NAMES}
    assert len({tuple(v) for v in first.values()}) == len(RNG_NAMES)
    s = spawn_rngs(3)
    for n in reversed(RNG_NAMES):
        assert getattr(s, n).integers(2**62, size=4).tolist() == first[n]  # order of use does not matter
    assert spawn_rngs(4).init.random() != spawn_rngs(3).init.random()
    assert torch.equal(
        torch.rand(3, generator=torch_generator(spawn_rngs(3).init)),
        torch.rand(3, generator=torch_generator(spawn_rngs(3).init)),
    )


@pytest.mark.parametrize("seed", [-1, 1.5, "7", None])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(InputError, match="seed"):
        spawn_rngs(seed)


def test_devices():
    assert pick_device("cpu").type == "cpu" and pick_device().type in ("cpu", "cuda")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA"):
            pick_device("cuda")


@pytest.fixture
def heard():
    "What an earlier handler of ctrl-c is told, which is there again afterwards."
    told = []

    def handler(*args):
        told.append(args[0])

    before = signal.signal(signal.SIGINT, handler)
    yield told
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)


def test_an_interruption_waits_for_a_step_or_the_end(heard):
    with defer_sigint() as take:
        take()
        assert not heard
        signal.raise_signal(signal.SIGINT)
        assert not heard
        take()
        take()
        assert heard == [signal.SIGINT]
        with defer_sigint() as inner:
            signal.raise_signal(signal.SIGINT)
            inner()
            assert len(heard) == 1  # the outer one decides
        assert len(heard) == 1
    assert len(heard) == 2
    with pytest.raises(ZeroDivisionError), defer_sigint():
        signal.raise_signal(signal.SIGINT)
        1 / 0
    assert len(heard) == 3


def test_an_interruption_is_not_lost_with_an_error():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised, defer_sigint():
            signal.raise_signal(signal.SIGINT)
            1 / 0
        assert isinstance(raised.value.__context__, ZeroDivisionError)
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_interruptions_do_not_come_nothing_is_changed(heard):
    def work():
        with defer_sigint() as take:
            take()
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    other = threading.Thread(target=work)
    other.start()
    other.join()
    mine = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, mine)
    assert seen == [mine, signal.SIG_IGN]


def test_a_missing_package_names_its_extra_and_a_broken_one_speaks_for_itself(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r"pip install 'ega\[encoders\]'"):
        import_optional("no_such_package.part", "encoders")
    (tmp_path / "broken_package.py").write_text("import another_missing_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="another_missing_thing"):
        import_optional("broken_package", "encoders")


def test_fixtures_are_what_the_table_says():
    assert np.allclose(circle_points(60), [[0.5, 3**0.5 / 2]]) and np.allclose(
        simplex_vertices(3) @ simplex_vertices(3).T, np.where(np.eye(3), 1, -0.5)
    )
    assert {k: (v.z.shape, v.y.tolist()) for k, v in EXAMPLES.items()} == {
        "A": ((4, 2), [0, 0, 1, 1]),
        "D": ((5, 2), [0, 0, 1, 1, 2]),
        "B": ((3, 3), [0, 0, 0]),
        "E": ((12, 4), [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3),
        "P": ((2, 2), [0, 1]),
    }
