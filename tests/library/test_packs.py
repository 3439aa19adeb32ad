"Packs: round trips and damaged files. Splits: disjoint, exhaustive, part sizes within one row of the expected ones."

import doctest
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ega.data.packs
from ega.data.arrays import InputError, normalize
from ega.data.packs import (
    PACK_DTYPES,
    EmbeddingSet,
    dequantize,
    hash_all_but_matrix,
    path_of_pack,
    quantize,
    read_pack,
    row_split,
    split_classes,
    write_pack,
)

PACKS = Path(__file__).parents[2] / "data" / "packs"
labels = st.lists(st.integers(-1, 6), min_size=1, max_size=80).map(lambda v: np.array(v, np.int64))
seeds = st.integers(0, 2**32 - 1)


def make(n=40, d=12, seed=0):
    "Return a small set with unlabelled rows, three splits and ids that need UTF-8."
    rng = np.random.default_rng(seed)
    y = rng.integers(-1, 4, n)
    return EmbeddingSet(
        normalize(rng.normal(size=(n, d))),
        y,
        [f'{i}/Käse, "{i}"\n' for i in range(n)],
        rng.choice(["train", "val", ""], n),
        ("a", "ö", "c", "never used"),
        {"set": "toy", "encoder": "noise", "licence": "none", "source": "a, b", "notes": "", "preprocessing": "-"},
    )


def same(a, b):
    "Whether two sets have equal fields."
    arrays = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("x", "y", "ids", "split"))
    return arrays and a.classes == b.classes and a.meta == b.meta


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return write_pack(make(), tmp_path_factory.mktemp("pack") / "toy.parquet")


# -- sets ----------------------------------------------------------------------------------------------------


def test_rows_are_selected_by_mask_slice_and_numbers():
    es = make()
    assert same(es.take(es.y == 2), es.take(np.flatnonzero(es.y == 2)))
    assert es.take(slice(3, 5)).ids.tolist() == es.ids[3:5].tolist()


def test_rows_are_brought_to_norm_1_and_names_may_be_numbers():
    es = EmbeddingSet(2 * np.eye(3), [0.0, 1.0, 1.0], ids=[0.0, 1.0, 2.0], classes=(0.5, 1.5))
    assert np.array_equal(es.x, np.eye(3)) and es.y.dtype == np.int64
    assert es.ids.tolist() == ["0.0", "1.0", "2.0"] and es.classes == ("0.5", "1.5")


@pytest.mark.parametrize(
    "wrong, word",
    [
        (dict(x=np.zeros((3, 3))), "norm 0"),
        (dict(y=[0, 1]), "integers"),
        (dict(y=[0, 1, -2]), "integers"),
        (dict(y=[0, 1, np.nan]), "integers"),
        (dict(y=["a", "b", "c"]), "integers"),
        (dict(y=[0, 1, 10**9]), "1,000,000"),
        (dict(ids=["a", None, "c"]), "missing"),
        (dict(ids=[b"a", "b", "c"]), "bytes"),
        (dict(ids=["a", "b"]), "id"),
        (dict(ids=["a", "b", "a"]), "distinct"),
        (dict(split="train"), "sequence"),
        (dict(classes=["a", "b", "a"]), "distinct"),
        (dict(classes=["a"]), "name"),
    ],
)
def test_what_does_not_make_a_set_is_refused(wrong, word):
    with pytest.raises(InputError, match=word):
        EmbeddingSet(**{"x": np.eye(3), "y": [0, 1, 0]} | wrong)


# -- packs ---------------------------------------------------------------------------------------------------


def test_round_trip_without_labels(tmp_path):
    es = EmbeddingSet(np.eye(3, dtype="f4"), [-1] * 3, meta={"set": "s", "encoder": "e"})
    back = read_pack(write_pack(es, tmp_path / "p.parquet"))
    assert back.classes == () and back.y.tolist() == [-1] * 3 and back.ids.tolist() == ["0", "1", "2"]


@given(n=st.integers(1, 30), d=st.integers(1, 40), seed=seeds, dtype=st.sampled_from(PACK_DTYPES))
@settings(max_examples=40)
def test_round_trip(tmp_path_factory, n, d, seed, dtype):
    es = make(n, d, seed)
    path = write_pack(es, tmp_path_factory.mktemp("t") / "p.parquet", dtype=dtype)
    back = read_pack(path)
    # int8: one rounding by at most half of 1/127 of the largest entry, then a correction of the norm; float16: 11 bits
    atol = {"int8": 1 / 127, "float16": 2**-10, "float32": 0}[dtype]
    assert np.abs(back.x - es.x).max() <= atol
    assert np.abs(np.linalg.norm(back.x, axis=1) - 1).max() < 1e-6
    assert (back.ids == es.ids).all() and (back.y == es.y).all() and (back.split == es.split).all()
    assert back.classes == es.classes
    if dtype != "float16":
        assert write_pack(back, path.with_name("again.parquet"), dtype=dtype).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("max_code", [1, 95, 127])
def test_quantize_int8_against_a_loop(max_code):
    x = make(5, 7).x
    code, scale = quantize(x, max_code=max_code)
    for i in range(5):
        peak = max(abs(float(v)) for v in x[i])
        c = [round(float(v) * max_code / peak) for v in x[i]]
        assert code[i].tolist() == c and abs(scale[i] * sum(v * v for v in c) ** 0.5 - 1) < 1e-6


def test_both_parquet_encodings_decode_to_the_same_rows(tmp_path):
    "Codes are stored as a byte stream split if none is negative, else through a dictionary."
    es = make()
    positive = EmbeddingSet(np.abs(es.x), es.y, es.ids, es.split, es.classes, es.meta)
    for name, s in (("signed", es), ("positive", positive)):
        path = write_pack(s, tmp_path / f"{name}.parquet")
        encodings = pq.ParquetFile(path).metadata.row_group(0).column(4).encodings
        assert ("BYTE_STREAM_SPLIT" in encodings) == (name == "positive")
        assert np.array_equal(read_pack(path).x, dequantize(*quantize(s.x)))


def test_pack_of_another_writer_is_scaled_to_unit_rows(pack, tmp_path):
    "Another writer may choose scales that do not give unit rows, for example the largest entry of each row."
    es, table = read_pack(pack), pq.read_table(pack)
    scale = table["scale"].to_numpy() * np.float32(7)
    code = table["code"].combine_chunks().flatten().to_numpy().reshape(len(es), -1)
    meta = dict(es.meta) | {"sha256": ega.data.packs.hash_arrays(dequantize(code, scale))}
    meta["sha256_rest"] = hash_all_but_matrix(es.ids.tolist(), es.y, es.split.tolist(), meta)
    table = table.set_column(3, table.schema.field("scale"), pa.array(scale))
    pq.write_table(with_metadata(table, meta), tmp_path / "foreign.parquet")
    assert np.abs(read_pack(tmp_path / "foreign.parquet").x - es.x).max() < 1e-6


def test_metadata_of_json_are_stored_and_others_are_refused(tmp_path):
    meta = {"set": "s", "encoder": "e", "f": 1.0, "a": [1], "notes": "n"}
    stored = read_pack(write_pack(EmbeddingSet(np.eye(2), [0, 1], meta=meta), tmp_path / "p.parquet")).meta
    assert {key: stored[key] for key in meta} == meta
    for value in (object(), float("nan"), np.ones(2)):
        with pytest.raises((TypeError, ValueError)):
            write_pack(EmbeddingSet(np.eye(2), [0, 1], meta=meta | {"f": value}), tmp_path / "q.parquet")
    assert not (tmp_path / "q.parquet").exists()


def test_a_pack_needs_a_name_an_encoder_an_ending_and_a_dtype(tmp_path):
    for es, name, options in (
        (EmbeddingSet(np.eye(2), [0, 1]), "p.parquet", {}),
        (make(), "p.parquet", {"dtype": "int4"}),
        (make(), "p.parquet", {"max_code": 128}),
        (make(), "p.npy", {}),
    ):
        with pytest.raises(InputError):
            write_pack(es, tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


def with_column(t, name, values):
    kind = pa.field(name, values.type, nullable=values.null_count > 0)
    return t.set_column(t.schema.get_field_index(name), kind, values)


def with_metadata(t, m):
    return t.replace_schema_metadata({"ega": json.dumps(m)})


EDITS = {  # name: edit of a table and its metadata
    "swapped columns": lambda t, m: with_column(with_column(t, "id", t["split"]), "split", t["id"]),
    "swapped rows of text": lambda t, m: with_column(t, "id", t["id"].take(pa.array(range(39, -1, -1)))),
    "renamed column": lambda t, m: with_metadata(t.rename_columns(["id", "label", "split", "scale", "vector"]), m),
    "extra column": lambda t, m: with_metadata(t.append_column("more", t["id"]), m),
    "wide labels": lambda t, m: with_column(t, "label", t["label"].cast(pa.int64())),
    "ragged codes": lambda t, m: with_column(t, "code", pa.array(t["code"].to_pylist(), pa.list_(pa.int8()))),
    "null id": lambda t, m: with_column(t, "id", pa.array([None] + t["id"].to_pylist()[1:], pa.string())),
    "label changed": lambda t, m: with_column(t, "label", pa.array(np.roll(t["label"].to_numpy(), 1))),
    "scale changed": lambda t, m: with_column(t, "scale", pa.array(t["scale"].to_numpy() * np.float32(1.0001))),
    "rows dropped": lambda t, m: t.slice(3),
    "no rows": lambda t, m: t.slice(0, 0),
    "no metadata": lambda t, m: t.replace_schema_metadata(None),
    "metadata not JSON": lambda t, m: t.replace_schema_metadata({"ega": "{"}),
    "wrong dim": lambda t, m: with_metadata(t, m | {"dim": 13}),
    "no such dtype": lambda t, m: with_metadata(t, m | {"dtype": None}),
    "counts disagree": lambda t, m: with_metadata(t, m | {"counts": m["counts"] | {"labelled": 3}}),
    "class names swapped": lambda t, m: with_metadata(t, m | {"classes": m["classes"][::-1]}),
    "licence edited": lambda t, m: with_metadata(t, m | {"licence": "mine"}),
    "hash edited": lambda t, m: with_metadata(t, m | {"sha256": "0" * 64}),
    "no hash": lambda t, m: with_metadata(t, {k: v for k, v in m.items() if k != "sha256"}),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_defect_is_refused(pack, tmp_path, name):
    table = pq.read_table(pack)
    pq.write_table(EDITS[name](table, json.loads(table.schema.metadata[b"ega"])), tmp_path / "bad.parquet")
    with pytest.raises(InputError, match="bad.parquet"):
        read_pack(tmp_path / "bad.parquet")


COMMITTED = {  # rows, classes, labelled rows
    "tiny200": (10_000, 200, 10_000),
    "cifar10": (10_000, 10, 10_000),
    "cub100": (5902, 100, 5902),
    "grocery": (5421, 81, 5421),
    "cifar100": (2033, 100, 2033),
    "clinc150": (23_700, 150, 22_500),
}


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_pack(name):
    encoder = "all_minilm_l6_v2" if name == "clinc150" else "efficientnet_lite0"
    es = read_pack(path_of_pack(name, encoder, PACKS))
    assert (es.n, len(es.classes), int((es.y >= 0).sum())) == COMMITTED[name]
    assert len(np.unique(es.y[es.y >= 0])) == len(es.classes)
    assert es.dim == (384 if name == "clinc150" else 1280)
    assert all(es.meta[key] for key in ("source", "licence", "notes", "preprocessing"))
    if name == "clinc150":
        assert list(dict.fromkeys(es.split.tolist())) == ["train", "val", "test", "oos_train", "oos_val", "oos_test"]
    if name == "grocery":
        assert es.meta["counts"]["splits"] == {"test": 2485, "train": 2640, "val": 296}


def test_docstring_examples():
    result = doctest.testmod(ega.data.packs)
    assert result.attempted and not result.failed


# -- splits --------------------------------------------------------------------------------------------------


@given(y=labels, seed=seeds, seen=st.floats(0.05, 0.95))
@settings(max_examples=50)
def test_split_classes(y, seed, seen):
    found = np.unique(y[y >= 0])
    assume(len(found) >= 2)
    a = split_classes(y, np.random.default_rng(seed), seen_fraction=seen)
    b = split_classes(y, np.random.default_rng(seed), seen_fraction=seen)
    assert sorted([*a.seen, *a.unseen]) == found.tolist() and all(np.array_equal(p, q) for p, q in zip(a, b))
    assert len(a.seen) >= 1 and len(a.unseen) >= 1 and abs(len(a.seen) - seen * len(found)) <= 1


@given(y=labels, seed=seeds, cut=st.lists(st.floats(0.01, 1), min_size=1, max_size=4))
@settings(max_examples=80)
def test_row_split(y, seed, cut):
    fractions = np.array(cut) / sum(cut)
    assume((y >= 0).any())
    parts = row_split(y, np.random.default_rng(seed), fractions=fractions)
    assert len(parts) == len(fractions) and all(p.dtype == np.int64 and (np.diff(p) > 0).all() for p in parts)
    assert sorted(np.concatenate(parts)) == np.flatnonzero(y >= 0).tolist()  # disjoint and exhaustive
    for c in np.unique(y[y >= 0]):
        for p, f in zip(parts, fractions):
            assert abs((y[p] == c).sum() - f * (y == c).sum()) < 1 + 1e-6  # expected count rounded up or down


def test_row_split_is_unbiased_for_tiny_classes():
    "A class of one row falls into the smaller part with probability 1/4, within 4 standard errors of 4,000 draws."
    share = np.mean([len(row_split([0], np.random.default_rng(i))[1]) for i in range(4000)])
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
