"Evaluation: compared with loops; duplicates, overlapping galleries, missing kinds of classes, unusual labels."

import hashlib
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from sklearn.exceptions import NotFittedError

from ega.data.arrays import InputError, normalize
from ega.data.vectors import read_matrix
from ega.estimator import EmbeddingAdapter
from ega.measure.evaluation import (
    caveats,
    change_against_frozen,
    evaluate,
    evaluate_embeddings,
    evaluate_with_curve,
    hash_unit_rows,
    label_hits,
    plan_searches,
    rows_with_classmate,
    summary_sentence,
)
from ega.measure.metrics import loo_lp_at_k
from ega.measure.search import knn_among_rows
from ega.measure.statistics import bootstrap


def clouds(classes=6, n=15, d=8, noise=0.7, seed=0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), n)
    return normalize(rng.normal(size=(classes, d))[y] + noise * rng.normal(size=(classes * n, d))), y


def lp_by_loop(x, y, queries, gallery):
    "LP@1 of each query: the mean hit over the other gallery rows at the smallest distance."
    out = []
    for q in queries:
        others = np.array([g for g in gallery if g != q])
        distance = ((x[others].astype("f8") - x[q].astype("f8")) ** 2).sum(1)
        nearest = others[distance <= distance.min() + 1e-6]
        out.append(np.mean(y[nearest] == y[q]))
    return np.array(out)


def tabulate(x, z, y, seen, trained_on=False, **options):
    "The table of `evaluate_embeddings`; seen and trained_on may be one value for all rows."
    seen, trained_on = (np.broadcast_to(v, len(y)) for v in (seen, trained_on))
    return evaluate_embeddings(x, z, y, seen, trained_on, device="cpu", **options)


@pytest.fixture(scope="module")
def fitted():
    "An estimator fitted on four of six classes, all rows and labels."
    x, y = clouds()
    return EmbeddingAdapter("lda", max_unseen_loss=None, device="cpu").fit(x[y < 4], y[y < 4]), x, y


# ---- search some rows among others


@pytest.mark.parametrize("kind", ["same", "reordered", "disjoint", "overlap", "subset"])
def test_knn_among_rows_equals_a_loop(kind):
    x, _ = clouds()
    rng = np.random.default_rng(1)
    gallery = rng.permutation(90)[:40]
    queries = {
        "same": gallery,
        "reordered": gallery[::-1],
        "disjoint": np.setdiff1d(np.arange(90), gallery),
        "overlap": rng.permutation(90)[:50],
        "subset": gallery[5:12],
    }[kind]
    D, I = knn_among_rows(x, queries, gallery, 4, device="cpu")
    for q, distances, positions in zip(queries, D, I):
        others = gallery[gallery != q]
        expected = np.sort(((x[others].astype("f8") - x[q].astype("f8")) ** 2).sum(1))[:4]
        assert q not in gallery[positions] and np.allclose(distances, expected, atol=1e-6)
        assert len(set(positions)) == 4


def test_a_gallery_of_the_query_alone_gives_padding_and_a_miss():
    x, y = clouds()
    alone = np.array([3])
    for queries in (alone, np.array([3, 4])):
        found = knn_among_rows(x, queries, alone, 2, device="cpu")
        assert found.I[0].tolist() == [-1] and np.isinf(found.D[0]).all()
    found = knn_among_rows(x, np.array([3, 4]), np.array([3, 5]), 10**12, device="cpu")
    assert found.I[0].tolist() == [1, -1] and sorted(found.I[1]) == [0, 1] and np.isinf(found.D).sum() == 1
    hits = label_hits(x, y, alone, alone, device="cpu")
    assert hits.hit.tolist() == [0] and hits.neighbour.tolist() == [-1]


def test_label_hits_equal_a_loop_with_duplicates_and_overlap():
    x, y = clouds(noise=0.9)
    x = x[np.random.default_rng(2).integers(90, size=90)]  # many rows occur several times, with different labels
    y = np.random.default_rng(3).permutation(y)
    queries, gallery = np.arange(0, 60), np.arange(30, 90)
    hits = label_hits(x, y, queries, gallery, device="cpu")
    assert np.allclose(hits.hit, lp_by_loop(x, y, queries, gallery))
    assert ((hits.hit > 0) & (hits.hit < 1)).any()  # ties were averaged
    assert (hits.neighbour != queries).all() and np.isin(hits.neighbour, gallery).all()
    everyone = np.arange(90)
    assert np.allclose(label_hits(x, y, everyone, everyone, device="cpu").hit, loo_lp_at_k(x, y, device="cpu"))


@pytest.mark.parametrize(
    "rows, kept", [([0, 1, 2, 3], [0, 2]), ([5, 4, 3, 1], [5, 4, 3, 1]), ([6, 0, 7], [6, 7]), ([], [])]
)
def test_rows_with_classmate(rows, kept):
    y = np.array([0, 1, 0, 2, 1, 2, 10**15, 10**15])  # large labels must not allocate memory by their size
    assert rows_with_classmate(y, np.array(rows, int)).tolist() == kept


# ---- the change against frozen


def test_change_is_the_bootstrap_of_the_paired_difference():
    rng = np.random.default_rng(0)
    before, after = rng.integers(2, size=(2, 60))
    classes = rng.integers(7, size=60)
    got = change_against_frozen(before, after, classes, random_state=3, confidence=0.8)
    expected = bootstrap(100.0 * after - 100.0 * before, classes, np.random.default_rng(3), confidence=0.8)
    assert got[4:] == tuple(expected) and got[:4] == (60, 7, 100 * before.mean(), 100 * after.mean())


# ---- two galleries


def test_evaluate_embeddings_equals_a_loop_for_all_groups_and_galleries():
    x, y = clouds(noise=0.9)
    z = normalize(x @ np.random.default_rng(1).normal(size=(8, 5)))  # another number of columns
    y = y.copy()
    y[::9] = -1
    seen = np.isin(y, [0, 2, 5])
    trained_on = seen & (np.arange(90) % 2 == 0)
    table = tabulate(x, z, y, seen, trained_on).set_index(["group", "gallery"])
    labelled = y >= 0
    galleries = {"mixed": labelled, "seen": labelled & seen, "unseen": labelled & ~seen}
    groups = {"unseen": labelled & ~seen, "seen": labelled & seen & ~trained_on, "trained on": labelled & trained_on}
    own = {"unseen": "unseen", "seen": "seen", "trained on": "seen"}
    assert list(table.index) == [(group, gallery) for group in groups for gallery in ("mixed", own[group])]
    for (group, gallery), line in table.iterrows():
        queries = np.flatnonzero(groups[group])
        before, after = (lp_by_loop(v, y, queries, np.flatnonzero(galleries[gallery])) for v in (x, z))
        assert line.n_rows == line.n_queries == len(queries) and line.n_classes == 3
        assert np.isclose(line.frozen, 100 * before.mean()) and np.isclose(line.adapted, 100 * after.mean())
        change = change_against_frozen(before, after, y[queries])
        assert np.allclose([line.change, line.low, line.high], change[4:])


def test_drawn_queries_are_searched_in_complete_galleries():
    "Ten queries of each group are drawn; each is searched among all rows of the gallery."
    x, y = clouds(classes=8, noise=0.9)
    z = normalize(x + 0.4 * np.eye(8)[y])
    seen, trained_on = y < 5, (y < 5) & (np.arange(120) % 3 == 0)
    searches = plan_searches(y, seen, trained_on, max_queries=10, random_state=3)
    table = tabulate(x, z, y, seen, trained_on, max_queries=10, random_state=3)
    assert (table.n_queries == 10).all() and table.n_rows.tolist() == [45, 45, 50, 50, 25, 25]
    for search, line in zip(searches, table.itertuples()):
        assert len(search.gallery) == {"mixed": 120, "seen": 75, "unseen": 45}[line.gallery]
        assert np.isclose(line.frozen, 100 * lp_by_loop(x, y, search.queries, search.gallery).mean())
    other = plan_searches(y, seen, trained_on, max_queries=10, random_state=4)
    assert any((a.queries != b.queries).any() for a, b in zip(searches, other))


def test_capture_rate_by_hand():
    """Unseen rows 0..3 on a line: in x rows 0 and 1 are nearest to each other, 2 and 3 each to a seen row.

    In z row 2 moves next to row 3. So the capture rate is 2/4 in x and 0 in z.
    """
    angle = np.deg2rad([0, 1, 30, 60, 32, 58])
    x = np.stack([np.cos(angle), np.sin(angle)], 1)
    angle[2] = np.deg2rad(59.5)
    z = np.stack([np.cos(angle), np.sin(angle)], 1)
    y, seen = np.array([0, 0, 1, 1, 2, 2]), np.array([False] * 4 + [True] * 2)
    table = tabulate(x, z, y, seen).set_index(["group", "gallery"])
    line = table.loc[("unseen", "mixed")]
    assert (line.capture_rate_frozen, line.capture_rate_adapted) == (50, 0)
    assert (line.frozen, line.adapted, line.change) == (50, 100, 50)
    others = table.drop(("unseen", "mixed"))[["capture_rate_frozen", "capture_rate_adapted"]]
    assert others.isna().all(axis=None)


# ---- sentences


@pytest.mark.parametrize(
    "intervals, advice",
    [
        ({"unseen": (-3, -1), "seen": (2, 4)}, "Keep the frozen embeddings where new classes arrive"),
        ({"unseen": (1, 3), "seen": (-4, -2)}, "Keep the frozen embeddings where most queries are of seen"),
        ({"unseen": (-1, 3), "seen": (0, 4)}, "No gain is certain"),
        ({"unseen": (1, 3), "seen": (2, 4)}, "can replace the frozen ones"),
        ({"unseen": (-1.5, 3), "seen": (2, 4)}, "if unseen classes may lose 1.5 points"),
    ],
)
def test_the_summary_says_what_changes_and_whether_to_use_the_adapter(intervals, advice):
    x, y = clouds()
    table = tabulate(x, x, y, y < 3, (y < 3) & (np.arange(90) % 2 == 0))
    low, high = ([float(intervals.get(group, (9, 9))[i]) for group in table.group] for i in (0, 1))
    sentence = summary_sentence(table.assign(change=np.add(low, high) / 2, low=low, high=high))
    assert advice in sentence and "trained" not in sentence  # no evidence beside new rows
    for group, (least, most) in intervals.items():
        verb = "gain" if least > 0 else "lose" if most < 0 else "change by"
        assert f"{group} classes {verb}" in sentence


def test_caveats():
    "Copies, training rows, missing classes, drawn queries."
    x, y = clouds()
    assert [note.split(":")[0] for note in caveats(tabulate(x, x, y, y < 3))] == ["Seen"]
    assert "No labelled row" in caveats(tabulate(x, x, y, False))[0]
    trained, no_unseen, drawn, few = caveats(tabulate(x, x, y, True, True, max_queries=20))
    assert "Trained on" in trained and "no query" in no_unseen and "20 of 90" in drawn and "20 trained on" in few
    x, y = np.concatenate([x, x[:7], x[80:]]), np.concatenate([y, y[:7], y[80:]])
    table = tabulate(x, np.roll(x, 1, axis=1), y, y < 3)
    assert dict(zip(table.group, table.n_copies)) == {"seen": 14, "unseen": 20}
    assert f"20 of {(y >= 3).sum()} unseen, 14 of {(y < 3).sum()} seen queries" in caveats(table)[-1]


# ---- a fitted estimator


def test_evaluate_compares_the_transformed_rows(fitted):
    e, x, y = fitted
    got = evaluate(e, 5 * x, y, random_state=2)
    expected = tabulate(x, e.transform(x), y, y < 4, y < 4, random_state=2)
    pd.testing.assert_frame_equal(got, expected)
    assert (got.frozen != got.adapted).any()
    with pytest.raises(ValueError):
        evaluate(e, x, y, max_queries=0)
    narrow = evaluate(e, x, y, random_state=2, confidence=0.5)
    assert (narrow.high - narrow.low < got.high - got.low).all()


def test_evaluate_on_seen_or_on_unseen_classes_only(fitted):
    e, x, y = fitted
    assert evaluate(e, x[y < 4], y[y < 4])[["group", "gallery"]].values.tolist() == [["trained on", "seen"]]
    assert evaluate(e, x[y >= 4], y[y >= 4]).gallery.tolist() == ["unseen"]
    renamed = evaluate(e, x, y + 100)  # rows that were fitted on are recognised under any label
    assert renamed.group.unique().tolist() == ["unseen", "trained on"] and renamed.n_rows.tolist() == [30, 30, 60, 60]


def test_rows_that_were_fitted_on_are_recognised_in_any_scale_order_and_company():
    x, y = clouds(classes=12, d=24)
    fit = (y < 8) & (np.arange(180) % 3 > 0)
    labels = np.where(np.arange(180) % 15 == 1, -1, y)  # some rows are without a label in fit
    e = EmbeddingAdapter("lda", max_unseen_loss=None, device="cpu").fit(7 * x[fit], labels[fit])
    n_fitted = (fit & (labels >= 0)).sum()
    order = np.random.default_rng(0).permutation(180)
    for copy in (3 * x[order], normalize(normalize(5 * x[order])), pd.DataFrame(x[order]), torch.from_numpy(x[order])):
        table = evaluate(e, copy, y[order]).set_index(["group", "gallery"]).n_rows
        assert table["trained on", "seen"] == n_fitted and table["seen", "seen"] == (y < 8).sum() - n_fitted
    new = normalize(x + 0.01 * np.random.default_rng(1).normal(size=x.shape))
    assert "trained on" not in set(evaluate(e, new, y).group)


def test_hash_of_a_row_is_a_fixed_function_of_the_rounded_row():
    rows = normalize([[3.0, 4.0], [-4.0, 3.0], [3.0, 4.001], [3.0, 4.1]])
    hashes = hash_unit_rows(rows)
    assert hashes.dtype == np.uint64 and hashes[0] == hashes[2] and len(set(hashes.tolist())) == 3
    assert (hash_unit_rows(rows[1:2]) == hashes[1]).all()
    assert hashes[0] == int.from_bytes(hashlib.blake2b(np.array([600, 800], "<i2"), digest_size=8).digest(), "little")


@pytest.mark.parametrize("precision", ["float32", "int8", "binary"])
def test_rows_on_disk_give_the_table_and_the_curve_of_an_array(precision, tmp_path, monkeypatch):
    "Four blocks: of seen classes only, of all with copies of rows of the first, of all, and without labels."
    rng = np.random.default_rng(0)
    n = 3 * 2**14 + 1000
    y = rng.integers(40, size=n)
    y[: 2**14] %= 20
    x = (0.5 * rng.normal(size=(40, 48))[y] + rng.normal(size=(n, 48))).astype(np.float32)
    x[2**14 : 2**15 : 4] = x[: 2**12]
    y[rng.random(n) < 0.1], y[3 * 2**14 :] = -1, -1
    fitted_on = (y >= 0) & (y < 20) & (np.arange(n) % 2 == 0)
    e = EmbeddingAdapter("lda", max_unseen_loss=None, precision=precision, device="cpu")
    e.fit(x[fitted_on], y[fitted_on])
    table, compared = evaluate_with_curve(e, x, y, max_queries=300)
    assert len(table) == 6 and (table.n_copies > 0).sum() > 3 and (table.frozen != table.adapted).all()
    np.save(tmp_path / "x.npy", x)
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    for stored in (np.load(tmp_path / "x.npy", mmap_mode="r"), read_matrix(tmp_path / "x.npy")):
        of_disk, compared_on_disk = evaluate_with_curve(e, stored, y, max_queries=300)
        pd.testing.assert_frame_equal(of_disk, table, check_exact=True)
        pd.testing.assert_frame_equal(compared_on_disk.curves, compared.curves)
        assert np.allclose(np.hstack(compared_on_disk[1:]), np.hstack(compared[1:]))


@pytest.mark.parametrize(
    "kept",
    [lambda y: y < 4, lambda y: y >= 4, lambda y: y >= 0, lambda y: np.arange(90) % 15 < 2],
    ids=["one kind seen", "one kind unseen", "all", "few rows"],
)
def test_few_rows_and_one_kind_of_class_on_disk(fitted, kept, monkeypatch):
    e, x, y = fitted
    x, y = x[kept(y)], y[kept(y)]
    tables = [evaluate(e, x, y)]
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    tables.append(evaluate(e, read_matrix(pa.table({"vector": list(x)})), y))
    pd.testing.assert_frame_equal(*tables)


def test_rows_on_disk_are_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    rng = np.random.default_rng(0)
    y = rng.integers(12, size=2**17)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "f4", (len(y), 64))
    x[:] = rng.normal(size=(12, 64))[y] + rng.normal(size=x.shape)
    e = EmbeddingAdapter("lda", max_unseen_loss=None, device="cpu").fit(x[:1000], y[:1000] % 8)
    for stored in (x, read_matrix(tmp_path / "x.npy")):
        tracemalloc.start()
        evaluate(e, stored, y, max_queries=100)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < x.nbytes, f"{peak / 2**20:.0f} MB"


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x, [f"k{label}" for label in y]),  # texts after integers
        lambda x, y: (x, np.full(90, -1)),
        lambda x, y: (x, np.arange(90)),  # no class has two rows
        lambda x, y: (x, y[:9]),
        lambda x, y: (x[:, :5], y),
        lambda x, y: (np.where(x > 0.5, np.nan, x), y),
    ],
)
def test_wrong_input(fitted, change, on_disk, monkeypatch):
    e, x, y = fitted
    X, labels = change(x, y)
    if on_disk:
        monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
        X = read_matrix(pa.table({"vector": list(X)}))
    with pytest.raises(InputError):
        evaluate(e, X, labels)
    with pytest.raises(NotFittedError):
        evaluate(EmbeddingAdapter(), x, y)
