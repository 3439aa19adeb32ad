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
from ega.data.arrays import InputError, normalize, spawn_rngs
from ega.data.packs import (
    PACK_DTYPES,
    EmbeddingSet,
    Split,
    dequantize,
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
    return (
        np.array_equal(a.x, b.x)
        and np.array_equal(a.y, b.y)
        and a.ids.tolist() == b.ids.tolist()
        and a.split.tolist() == b.split.tolist()
        and a.classes == b.classes
        and a.meta == b.meta
    )


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return write_pack(make(), tmp_path_factory.mktemp("pack") / "toy.parquet")


# -- packs -------------------------------------------------------------------------------------------------


def test_round_trip_without_labels(tmp_path):
    es = EmbeddingSet(np.eye(3, dtype="f4"), [-1] * 3, meta={"set": "s", "encoder": "e"})
    back = read_pack(write_pack(es, tmp_path / "p.parquet"))
    assert back.classes == () and back.y.tolist() == [-1] * 3 and back.ids.tolist() == ["0", "1", "2"]


@given(n=st.integers(1, 30), d=st.integers(1, 40), seed=seeds, dtype=st.sampled_from(PACK_DTYPES))
@settings(max_examples=40, deadline=None)
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


def test_quantize_float32_is_exact_and_every_dtype_is_idempotent():
    x = make(200, 33).x
    for dtype in PACK_DTYPES:
        once = dequantize(*quantize(x, dtype))
        twice = dequantize(*quantize(once, dtype))
        assert np.abs(once - twice).max() <= (0 if dtype != "float16" else 2**-10)
    assert np.array_equal(dequantize(*quantize(x, "float32")), x)


@pytest.mark.parametrize("max_code", [1, 95, 127])
def test_quantize_int8_against_a_loop(max_code):
    x = make(5, 7).x
    code, scale = quantize(x, max_code=max_code)
    for i in range(5):
        peak = max(abs(float(v)) for v in x[i])
        c = [round(float(v) * max_code / peak) for v in x[i]]
        assert code[i].tolist() == c and abs(scale[i] * sum(v * v for v in c) ** 0.5 - 1) < 1e-6


@pytest.mark.parametrize("max_code", [0, 128])
def test_quantize_rejects_max_code_out_of_range(max_code):
    with pytest.raises(InputError):
        quantize(make().x, max_code=max_code)


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
    from ega.data.files import hash_arrays
    from ega.data.packs import _hash_all_but_matrix

    es, table = read_pack(pack), pq.read_table(pack)
    scale = table["scale"].to_numpy() * np.float32(7)
    code = table["code"].combine_chunks().flatten().to_numpy().reshape(len(es), -1)
    meta = dict(es.meta) | {"sha256": hash_arrays(dequantize(code, scale))}
    meta["sha256_rest"] = _hash_all_but_matrix(es.ids.tolist(), es.y, es.split.tolist(), meta)
    table = table.set_column(3, table.schema.field("scale"), pa.array(scale)).replace_schema_metadata(
        {"ega": json.dumps(meta)}
    )
    pq.write_table(table, tmp_path / "foreign.parquet")
    assert np.abs(read_pack(tmp_path / "foreign.parquet").x - es.x).max() < 1e-6


def test_pandas_reads_a_pack(pack):
    import pandas as pd

    frame = pd.read_parquet(pack)
    assert list(frame.columns) == ["id", "label", "split", "scale", "code"] and frame.code[0].dtype == np.int8


def test_write_pack_is_atomic_and_deterministic(tmp_path, monkeypatch):
    path = write_pack(make(), tmp_path / "p.parquet")
    old = path.read_bytes()

    def write_half_and_stop(table, where, **kwargs):
        Path(where).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(pq, "write_table", write_half_and_stop)
        with pytest.raises(KeyboardInterrupt):
            write_pack(make(seed=1), path)
    assert path.read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ["p.parquet"]
    assert write_pack(make(), path).read_bytes() == old


@given(cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_truncated_pack_is_rejected(pack, tmp_path_factory, cut):
    raw = pack.read_bytes()
    bad = tmp_path_factory.mktemp("cut") / "bad.parquet"
    bad.write_bytes(raw[: int(cut * len(raw))])
    with pytest.raises(InputError):
        read_pack(bad)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=250, deadline=None)
def test_a_flipped_bit_is_refused_or_changes_nothing(pack, tmp_path_factory, where, bit):
    "Only bits that are never read (an unused statistic, the version of the writer) may flip without an error."
    raw = bytearray(pack.read_bytes())
    raw[int(where * len(raw))] ^= 1 << bit
    bad = tmp_path_factory.mktemp("flip") / "bad.parquet"
    bad.write_bytes(bytes(raw))
    try:
        es = read_pack(bad)
    except InputError as error:
        assert "bad.parquet" in str(error)
    else:
        assert same(es, read_pack(pack))


def rewrite(pack, path, edit):
    "Write the pack with its table replaced by `edit(table, meta)`."
    table = pq.read_table(pack)
    pq.write_table(edit(table, json.loads(table.schema.metadata[b"ega"])), path)
    return path


def with_column(t, name, values):
    return t.set_column(
        t.schema.get_field_index(name), pa.field(name, values.type, nullable=values.null_count > 0), values
    )


def with_metadata(t, m):
    return t.replace_schema_metadata({"ega": json.dumps(m)})


def with_columns_swapped(t, a, b):
    return with_column(with_column(t, a, t[b]), b, t[a])


def without_key(key):
    return lambda t, m: with_metadata(t, {k: v for k, v in m.items() if k != key})


EDITS = {  # name: edit of a table and its metadata
    "swapped text columns": lambda t, m: with_columns_swapped(t, "id", "split"),
    "swapped rows of text": lambda t, m: with_column(t, "id", t["id"].take(pa.array(range(39, -1, -1)))),
    "swapped number columns": lambda t, m: with_columns_swapped(t, "label", "scale"),
    "renamed column": lambda t, m: with_metadata(t.rename_columns(["id", "label", "split", "scale", "vector"]), m),
    "extra column": lambda t, m: with_metadata(t.append_column("more", t["id"]), m),
    "wide labels": lambda t, m: with_column(t, "label", t["label"].cast(pa.int64())),
    "ragged codes": lambda t, m: with_column(t, "code", pa.array(t["code"].to_pylist(), pa.list_(pa.int8()))),
    "null id": lambda t, m: with_column(t, "id", pa.array([None] + t["id"].to_pylist()[1:], pa.string())),
    "label changed": lambda t, m: with_column(t, "label", pa.array(np.roll(t["label"].to_numpy(), 1))),
    "wide scale": lambda t, m: with_column(t, "scale", pa.array(t["scale"].to_numpy().astype("f8"))),
    "scale changed a little": lambda t, m: with_column(
        t, "scale", pa.array(t["scale"].to_numpy() * np.float32(1.0001))
    ),
    "rows dropped": lambda t, m: t.slice(3),
    "no rows": lambda t, m: t.slice(0, 0),
    "rows twice": lambda t, m: pa.concat_tables([t, t]),
    "no metadata": lambda t, m: t.replace_schema_metadata(None),
    "metadata not JSON": lambda t, m: t.replace_schema_metadata({"ega": "{"}),
    "metadata a list": lambda t, m: t.replace_schema_metadata({"ega": "[]"}),
    "wrong dim": lambda t, m: with_metadata(t, m | {"dim": 13}),
    "wrong dtype": lambda t, m: with_metadata(t, m | {"dtype": "float16"}),
    "no such dtype": lambda t, m: with_metadata(t, m | {"dtype": None}),
    "counts disagree": lambda t, m: with_metadata(t, m | {"counts": m["counts"] | {"labelled": 3}}),
    "class names swapped": lambda t, m: with_metadata(t, m | {"classes": m["classes"][::-1]}),
    "class names lost": lambda t, m: with_metadata(t, m | {"classes": []}),
    "licence edited": lambda t, m: with_metadata(t, m | {"licence": "mine"}),
    "hash edited": lambda t, m: with_metadata(t, m | {"sha256": "0" * 64}),
}
for key in ("set", "encoder", "preprocessing", "source", "licence", "notes", "dim", "counts", "classes", "sha256"):
    EDITS[f"no {key}"] = without_key(key)


@pytest.mark.parametrize("name", EDITS)
def test_a_defect_is_refused(pack, tmp_path, name):
    with pytest.raises(InputError, match="bad.parquet"):
        read_pack(rewrite(pack, tmp_path / "bad.parquet", EDITS[name]))


def test_invalid_utf8_is_rejected(pack, tmp_path):
    table = pq.read_table(pack)
    good = table["id"].combine_chunks()
    text = bytearray(good.buffers()[2].to_pybytes())
    text[0] = 0xFF
    bad = pa.Array.from_buffers(pa.string(), len(good), [None, good.buffers()[1], pa.py_buffer(bytes(text))])
    pq.write_table(with_column(table, "id", bad), tmp_path / "bad.parquet")
    with pytest.raises(InputError):
        read_pack(tmp_path / "bad.parquet")


def test_verify_false_skips_the_hashes_only(pack, tmp_path):
    bad = rewrite(pack, tmp_path / "bad.parquet", EDITS["licence edited"])
    assert read_pack(bad, verify=False).meta["licence"] == "mine"
    with pytest.raises(InputError):
        read_pack(rewrite(pack, bad, EDITS["wide labels"]), verify=False)


def test_missing_file_folder_unnamed_set_and_bad_dtype(tmp_path):
    for path in (tmp_path / "none.parquet", tmp_path):
        with pytest.raises(InputError):
            read_pack(path)
    with pytest.raises(InputError):
        write_pack(EmbeddingSet(np.eye(2, dtype="f4"), [0, 1]), tmp_path / "p.parquet")
    with pytest.raises(InputError):
        write_pack(make(), tmp_path / "p.parquet", dtype="int4")
    with pytest.raises(InputError):
        write_pack(make(), tmp_path / "x.npy")
    assert not list(tmp_path.iterdir())


def test_docstring_examples():
    result = doctest.testmod(ega.data.packs)
    assert result.attempted and not result.failed


def test_take_by_mask_slice_and_numbers():
    es = make()
    assert same(es.take(es.y == 2), es.take(np.flatnonzero(es.y == 2)))
    assert es.take(slice(3, 5)).ids.tolist() == es.ids[3:5].tolist()
    with pytest.raises(InputError):
        es.take([])


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
        assert (es.y == -1).sum() == 1200
        assert list(dict.fromkeys(es.split.tolist())) == ["train", "val", "test", "oos_train", "oos_val", "oos_test"]
    if name == "grocery":
        assert es.meta["counts"]["splits"] == {"test": 2485, "train": 2640, "val": 296}


def test_committed_packs_are_small():
    assert sum(p.stat().st_size for p in PACKS.glob("*.parquet")) <= 35e6


# -- splits ------------------------------------------------------------------------------------------------


@given(y=labels, seed=seeds, seen=st.floats(0.05, 0.95))
@settings(max_examples=100, deadline=None)
def test_split_classes(y, seed, seen):
    found = np.unique(y[y >= 0])
    if len(found) < 2:
        with pytest.raises(InputError):
            split_classes(y, np.random.default_rng(seed), seen_fraction=seen)
        return
    a = split_classes(y, np.random.default_rng(seed), seen_fraction=seen)
    b = split_classes(y, np.random.default_rng(seed), seen_fraction=seen)
    assert sorted([*a.seen, *a.unseen]) == found.tolist() and all(np.array_equal(p, q) for p, q in zip(a, b))
    assert len(a.seen) >= 1 and len(a.unseen) >= 1 and abs(len(a.seen) - seen * len(found)) <= 1


@given(y=labels, seed=seeds, cut=st.lists(st.floats(0.01, 1), min_size=1, max_size=4), stratify=st.booleans())
@settings(max_examples=150, deadline=None)
def test_row_split(y, seed, cut, stratify):
    fractions = np.array(cut) / sum(cut)
    assume((y >= 0).any())
    parts = row_split(y, np.random.default_rng(seed), fractions=fractions, stratify=stratify)
    assert len(parts) == len(fractions) and all(p.dtype == np.int64 and (np.diff(p) > 0).all() for p in parts)
    assert sorted(np.concatenate(parts)) == np.flatnonzero(y >= 0).tolist()  # disjoint and exhaustive
    for c in np.unique(y[y >= 0]) if stratify else [None]:
        rows = y == c if stratify else y >= 0
        for p, f in zip(parts, fractions):
            assert abs(rows[p].sum() - f * rows.sum()) < 1 + 1e-6  # expected count rounded up or down


def test_row_split_is_unbiased_for_tiny_classes():
    "A class of one row falls into the smaller part with probability 1/4, within 4 standard errors of 4,000 draws."
    share = np.mean([len(row_split([0], np.random.default_rng(i))[1]) for i in range(4000)])
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5


def test_row_split_depends_on_its_generator_only():
    rngs, others = spawn_rngs(5), spawn_rngs(5)
    others.order.random(10)
    y = np.repeat(np.arange(9), 7)
    assert all(np.array_equal(a, b) for a, b in zip(row_split(y, rngs.split), row_split(y, others.split)))
    assert not np.array_equal(row_split(y, spawn_rngs(5).split)[0], row_split(y, spawn_rngs(6).split)[0])


@pytest.mark.parametrize("fractions", [(0.5, 0.4), (1.2, -0.2), (0.5, 0.6)])
def test_row_split_rejects_bad_fractions(fractions):
    with pytest.raises(InputError):
        row_split([0, 1], spawn_rngs(0).split, fractions=fractions)


def random_split(seed=0):
    "Return labels of 10 classes and the fields of a random valid `Split` of their rows."
    y = np.repeat(np.arange(10), 12)
    rng = spawn_rngs(seed).split
    classes = split_classes(y, rng)
    seen, unseen = np.flatnonzero(np.isin(y, classes.seen)), np.flatnonzero(np.isin(y, classes.unseen))
    fit, held_out = (seen[rows] for rows in row_split(y[seen], rng))
    return y, dict(fit=fit, seen_gallery=fit, seen_queries=held_out, unseen_gallery=unseen, unseen_queries=unseen)


@given(
    seed=seeds,
    leak=st.sampled_from(
        [
            "seen query",
            "unseen gallery row",
            "unseen query row",
            "unseen class",
            "twice",
            "range",
            "unlabelled",
            "negative",
            "gallery",
            "unseen overlap",
        ]
    ),
    pick=st.integers(0, 10**6),
)
@settings(max_examples=120, deadline=None)
def test_split_check_finds_every_leak(seed, leak, pick):
    y, rows = random_split(seed)
    Split(**rows).check(y)
    one = lambda a: a[pick % len(a)]
    y = y.copy()
    if leak == "seen query":
        rows["fit"] = np.r_[rows["fit"], one(rows["seen_queries"])]
    if leak == "unseen gallery row":
        rows["fit"] = np.r_[rows["fit"], one(rows["unseen_gallery"])]
        rows["unseen_queries"] = rows["unseen_gallery"][:0]
    if leak == "unseen query row":
        rows["fit"] = np.r_[rows["fit"], one(rows["unseen_queries"])]
        rows["unseen_gallery"] = rows["unseen_gallery"][:0]
    if leak == "unseen class":
        y[one(rows["unseen_queries"])] = y[one(rows["fit"])]
    if leak == "twice":
        rows["seen_queries"] = np.r_[rows["seen_queries"], one(rows["seen_queries"])]
    if leak == "range":
        y = y[:-1]
    if leak == "unlabelled":
        y[one(rows["fit"])] = -1
    if leak == "negative":
        rows["fit"] = np.r_[rows["fit"], -1]
    if leak == "gallery":
        rows["seen_gallery"] = np.r_[rows["seen_gallery"], one(rows["seen_queries"])]
    if leak == "unseen overlap":
        rows["unseen_queries"] = rows["unseen_gallery"][:3]
    with pytest.raises(InputError):
        Split(**rows).check(y)


def test_split_check_accepts_equal_row_numbers_of_another_set():
    y, rows = random_split()
    rows |= dict(unseen_gallery=np.arange(30), unseen_queries=np.arange(30))
    Split(**rows).check(y, np.zeros(30, int))
    with pytest.raises(InputError):
        Split(**rows).check(y)
    with pytest.raises(InputError):
        Split(**rows).check(y, np.zeros(29, int))


def test_split_save_and_load(tmp_path):
    _, rows = random_split()
    path = Split(**rows).save(tmp_path / "s.json")
    loaded = Split.load(path)
    for name, expected in rows.items():
        assert np.array_equal(getattr(loaded, name), expected) and getattr(loaded, name).dtype == np.int64
    for text in (
        "",
        "{",
        "[]",
        '{"fit": []}',
        json.dumps(dict.fromkeys(rows, "x")),
        json.dumps({k: [0.5] for k in rows}),
    ):
        path.write_text(text)
        with pytest.raises(InputError):
            Split.load(path)
    with pytest.raises(InputError):
        Split.load(tmp_path / "none.json")


def test_huge_labels_without_names_are_refused():
    "They would become a million names of classes and more."
    with pytest.raises(InputError):
        EmbeddingSet(np.eye(2), [5, 10**9])
    assert len(EmbeddingSet(np.eye(2), [5, 999_999]).classes) == 10**6


@pytest.mark.parametrize(
    "name, values",
    [
        ("ids", ["a", None, "c"]),
        ("ids", np.array([0, np.nan, 2])),
        ("ids", [b"a", "b", "c"]),
        ("ids", ["a", "b", "\ud800"]),
        ("ids", ["a", "b"]),
        ("ids", ["a", "b", "a"]),
        ("split", ["train", None, "test"]),
        ("split", "train"),
        ("classes", ["a", "\udcff"]),
        ("classes", [None] * 3),
        ("classes", ["a", "b", "a"]),
        ("classes", ["a"]),
    ],
)
def test_missing_and_repeated_names_are_refused(name, values):
    with pytest.raises(InputError):
        EmbeddingSet(np.eye(3), [0, 1, 0], **{name: values})


def test_all_metadata_of_json_is_stored_and_other_is_refused(tmp_path):
    meta = {"set": "s", "encoder": "e", "f": 1.0, "a": [1], "notes": "n"}
    embeddings = EmbeddingSet(np.eye(2), [0, 1], meta=meta)
    stored = read_pack(write_pack(embeddings, tmp_path / "p.parquet")).meta
    assert {key: stored[key] for key in meta} == meta
    for value in (object(), float("nan"), np.ones(2)):
        with pytest.raises(InputError):
            write_pack(EmbeddingSet(np.eye(2), [0, 1], meta=meta | {"f": value}), tmp_path / "q.parquet")
    assert not (tmp_path / "q.parquet").exists()


@pytest.mark.parametrize("share", (0, 1, 2, -1))
def test_a_share_of_classes_lies_between_0_and_1(share):
    with pytest.raises(InputError):
        split_classes(np.arange(60) % 12, np.random.default_rng(0), seen_fraction=share)


def test_names_may_be_numbers_but_not_missing():
    x = np.eye(3)
    assert EmbeddingSet(x, [0, 1, 1], ids=[0.0, 1.0, 2.0], classes=(0.5, 1.5)).ids.tolist() == ["0.0", "1.0", "2.0"]
    for ids in ([0.0, np.nan, 2.0], [None, "b", "c"], [b"a", b"b", b"c"]):
        with pytest.raises(InputError):
            EmbeddingSet(x, [0, 1, 1], ids=ids)
