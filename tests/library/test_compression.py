"Formats of stored rows: codes against sentence-transformers, projections, and the selection at the stored size."

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import TruncatedSVD

from ega import AdaptedIndex, EmbeddingAdapter, EmbeddingSet, InputError, PairAdapter, evaluate, normalize, write_pack
from ega.data.datasets import patch_torchvision
from ega.data.vectors import read_matrix
from ega.deploy.report import compare_spaces, write_report
from ega.deploy.stores import IndexStore, open_store
from ega.deploy.transform import transform_file
from ega.measure.evaluation import adapt_rows, evaluate_embeddings, read_rows
from ega.method.adapters import transform
from ega.method.compression import (
    PRECISIONS,
    RowFormat,
    as_stored,
    fit_projection,
    formats_within,
    project,
    quantize_embeddings,
)
from ega.method.interface import as_adapter
from ega.method.methods import fit_path
from ega.pairs import evaluate_pairs
from ega.selection import compare_on_fold, leave_classes_out, resolve_candidate


def world(seed, classes=16, rows=20, d=32, scatter=1.0):
    "Classes on a sphere, with noise of unequal size in the coordinates."
    rng = np.random.default_rng(seed)
    noise = scatter * rng.normal(size=(classes, rows, d)) * np.r_[np.full(d // 4, 1.5), np.full(d - d // 4, 0.3)]
    y = np.repeat(np.arange(classes), rows)
    return normalize((rng.normal(size=(classes, 1, d)) + noise).reshape(-1, d)), y


X, Y = world(0)
HARD = world(1, scatter=3.0)[0]  # of the same classes, whose rows overlap


def test_bits_are_those_of_sentence_transformers():
    patch_torchvision()
    quantization = pytest.importorskip("sentence_transformers.util", reason="needs sentence-transformers")
    theirs = quantization.quantize_embeddings(X, precision="ubinary")
    assert np.array_equal(quantize_embeddings(X, "binary"), theirs)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("k", [32, 13])
def test_stored_rows_have_the_stated_bytes_and_nearly_the_directions_of_the_rows(precision, k):
    z, least = normalize(X[:, :k]), {"binary": 0.5, "int8": 0.9999}.get(precision, 1 - 1e-6)
    codes, stored = quantize_embeddings(z, precision), as_stored(z, RowFormat(k, precision))
    assert codes[0].nbytes == RowFormat(k, precision).n_bytes
    assert np.allclose(np.linalg.norm(stored, axis=1), 1, atol=1e-6) and (stored * z).sum(1).min() > least


def test_formats_within_a_budget():
    assert formats_within(160, 1280) == [(160, "int8"), (1280, "binary")]
    assert formats_within(4, 1280) == [(4, "int8"), (32, "binary")]
    assert [formats_within(n, 100) for n in (100, 200, 399, 400)] == [
        [(100, p)] for p in ("int8", "float16", "float16", "float32")
    ]


def test_the_projection_is_that_of_a_truncated_svd():
    P = fit_projection(X, RowFormat(5, "int8"))
    svd = TruncatedSVD(5, algorithm="arpack").fit(X)
    assert np.allclose(np.abs(P @ svd.components_.T), np.eye(5), atol=1e-3)
    assert fit_projection(X, RowFormat(32, "int8")) is None and project(X, None) is X


def test_bits_are_taken_after_a_rotation_that_no_component_survives():
    P = fit_projection(X, RowFormat(32, "binary"))
    assert np.array_equal(P, fit_projection(X[:50], RowFormat(32, "binary")))  # all rows, so it fits nothing
    assert np.allclose(P @ P.T, np.eye(32), atol=1e-5) and np.abs(P).max() < 0.9


@pytest.mark.parametrize("row_format", [RowFormat(32, "binary"), RowFormat(6, "int8")])
def test_folds_are_measured_as_the_index_stores_them(row_format):
    "By a loop over the queries, with the gallery decoded from its codes."
    fold, config = leave_classes_out(Y, np.random.default_rng(0))[0], resolve_candidate("wccn").config
    options = dict(strengths=(0.5,), formats=[row_format], device="cpu")
    done = compare_on_fold(X, Y, fold, [("made", config)], **options).changes["made", 0.5, row_format]
    z = transform(fit_path(config, X[fold.fit], Y[fold.fit], device="cpu").at(0.5), X, device="cpu")
    z = project(z, fit_projection(z[fold.fit], row_format))
    stored, gallery = as_stored(z, row_format), np.r_[fold.fit, fold.unseen]
    for part, queries in enumerate((fold.seen_queries, fold.unseen_queries)):
        changes = []
        for q in queries:
            others = gallery[gallery != q]
            hits = [Y[others[np.argmax(rows[others] @ query)]] == Y[q] for rows, query in ((stored, z[q]), (X, X[q]))]
            changes.append(float(hits[0]) - float(hits[1]))
        assert np.mean(np.array(changes) != done[part]) < 0.02  # near ties


@pytest.fixture(scope="module")
def small():
    return EmbeddingAdapter(candidates=("wccn",), max_bytes=16, max_unseen_loss=20.0, confidence=0.6).fit(X, Y)


def test_a_budget_is_kept_and_chosen_with_the_strength(small):
    table = small.selection_.table
    assert set(zip(table.n_components[1:], table.precision[1:])) == {(16, "int8"), (32, "binary")}
    assert (
        not small.frozen_
        and small.row_format_.n_bytes <= 4
        and f" x {small.row_format_.precision}" in repr(small.selection_)
    )
    z = small.transform(X)
    assert z.shape == (len(X), small.row_format_.n_components) and np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)
    assert len(small.get_feature_names_out()) == z.shape[1]


def test_the_projection_is_saved_and_part_of_one_matrix(small, tmp_path):
    loaded = EmbeddingAdapter.load(small.save(tmp_path / "a"))
    assert loaded.row_format_ == small.row_format_ and loaded.fingerprint_ == small.fingerprint_
    assert np.array_equal(loaded.transform(X), small.transform(X))
    a = as_adapter(small)
    assert a.matrix.shape == (small.row_format_.n_components, 32)
    assert np.allclose(a.transform(X), small.transform(X), atol=1e-5)


@pytest.mark.parametrize("factory", ["RaBitQ", "SQ8"])
def test_an_index_of_faiss_holds_the_rows(factory):
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None, precision="binary").fit(X, Y)
    found = AdaptedIndex(adapter, factory).add(X).search(X, k=2).I
    assert (Y[found[:, 1]] == Y).mean() > (Y[AdaptedIndex(np.eye(32)).add(X).search(X, k=2).I[:, 1]] == Y).mean() - 0.1


def exact_order(z, stored):
    "Row numbers by ascending squared distance of float queries, and these distances."
    D = np.square(z[:, None] - stored).sum(2)
    return D.argsort(1, kind="stable"), np.sort(D, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("d", [32, 30])
def test_the_default_index_holds_rows_at_the_precision_of_the_adapter(precision, d, tmp_path):
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None, n_components=d, precision=precision).fit(HARD, Y)
    adapter.save(tmp_path / "a")
    index = AdaptedIndex(tmp_path / "a").add(HARD)
    assert index.index.sa_code_size() == adapter.row_format_.n_bytes
    z = adapter.transform(HARD[:50] + 0.01)
    order, D = exact_order(z, as_stored(adapter.transform(HARD), adapter.row_format_))
    index.save(tmp_path / "index")
    found = AdaptedIndex.load(tmp_path / "index").search(HARD[:50] + 0.01, 5)
    assert np.abs(found.D - D[:, :5]).max() < 0.05 and (found.I[:, 0] == order[:, 0]).mean() > 0.9


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_default_index_does_not_depend_on_the_rows_that_are_added_first(precision, by_precision):
    adapter = by_precision[precision]
    at_once = AdaptedIndex(adapter).add(HARD).search(HARD[:50], 5)
    in_turn = AdaptedIndex(adapter).add(HARD[:1]).add(HARD[1:]).search(HARD[:50], 5)
    assert np.allclose(at_once.D, in_turn.D, atol=1e-3)


def test_a_folder_of_faiss_holds_the_same_weights_at_two_precisions(by_precision, tmp_path):
    np.save(tmp_path / "x.npy", HARD)
    store = IndexStore(tmp_path / "s")
    sizes = {}
    for precision in ("float32", "int8"):
        store.activate(store.migrate(by_precision[precision], tmp_path / "x.npy"))
        sizes[precision] = store.open().index.sa_code_size()
    assert sizes == {"float32": 96, "int8": 24} and len(store.versions()) == 2
    assert AdaptedIndex([np.eye(32), by_precision["binary"]]).index.sa_code_size() == 3  # the last step says how


@pytest.fixture(scope="module")
def by_precision():
    settings = dict(max_unseen_loss=None, n_components=24)
    return {p: EmbeddingAdapter("wccn", precision=p, **settings).fit(HARD, Y) for p in PRECISIONS}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lancedb_holds_bits_and_halves_and_ranks_by_the_float_query(precision, by_precision, tmp_path):
    pytest.importorskip("lancedb")
    adapter, es, kept = by_precision[precision], EmbeddingSet(HARD, Y), {"int8": "float16"}.get(precision, precision)
    with open_store(tmp_path / "t.lance") as store:
        store.add(es)
        version = store.migrate(adapter, batch_size=100)
        store.activate(version)
        column = store.table.search().select([version]).limit(None).to_arrow()[version]
        assert column.nbytes / len(HARD) == pytest.approx(RowFormat(24, kept).n_bytes, rel=0.05)
        order, D = exact_order(adapter.transform(HARD[:9]), as_stored(adapter.transform(HARD), RowFormat(24, kept)))
        found = store.search(adapter, HARD[:9], 3)
        assert np.abs(found.D - D[:, :3]).max() < 1e-3 and (found.I[:, 0] == es.ids[order[:, 0]]).mean() > 0.8
        assert store.search(adapter, HARD[:1], 3, where="label = 2").I[0].tolist() != found.I[0].tolist()
        changed = HARD.copy()
        changed[5] = HARD[200]
        store.add(EmbeddingSet(changed, Y))
        store.migrate(adapter)
        assert {"5", "200"} == set(store.search(adapter, HARD[200:201], 2).I[0])


def test_a_float_and_a_binary_version_of_the_same_weights_lie_side_by_side(tmp_path):
    pytest.importorskip("lancedb")
    rotated = EmbeddingAdapter("wccn", max_unseen_loss=None, precision="binary").fit(X, Y)
    with open_store(tmp_path / "t.lance") as store:
        store.add(EmbeddingSet(X, Y))
        versions = [store.migrate(rotated), store.migrate(rotated.adapter_)]  # the module knows no precision
        assert len(set(versions)) == 2 and store.versions() == ["vector", *versions]
        for version in versions:
            found = store.activate(version).search(rotated, X[:20], 1)
            assert (found.I[:, 0].astype(int) == np.arange(20)).mean() > 0.8


@pytest.mark.parametrize("precision, codes", [("int8", "scalar"), ("binary", "binary"), ("float16", None)])
def test_qdrant_gets_its_own_quantisation(precision, codes, by_precision, tmp_path, monkeypatch):
    pytest.importorskip("qdrant_client")
    adapter, asked = by_precision[precision], []
    with open_store(tmp_path / "q", collection="t") as store:
        store.add(EmbeddingSet(HARD, Y))
        update = store.client.update_collection
        monkeypatch.setattr(store.client, "update_collection", lambda n, **kw: (asked.append(kw), update(n, **kw))[1])
        version = store.activate(store.migrate(adapter)).active
        given = [kw["vectors_config"][version] for kw in asked if "vectors_config" in kw]
        assert [hasattr(config.quantization_config, codes) for config in given] == ([True] if codes else [])
        _, z = next(store._rows([version]))
        assert np.array_equal(z, z.astype(np.float16))  # what a server rounds to must not count as changed later
        order, D = exact_order(adapter.transform(HARD[:9]), adapter.transform(HARD))  # it ranks by the rows
        found = store.search(adapter, HARD[:9], 3)
        assert np.abs(found.D - D[:, :3]).max() < 1e-3


def test_evaluation_searches_what_is_stored():
    "LP@1 by a matrix of scores; that of the float rows differs, so the test could tell."
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None, precision="binary").fit(HARD, Y)
    z = adapter.transform(HARD)
    stored, floats = (z @ rows.T for rows in (as_stored(z, adapter.row_format_), z))
    for scores in (stored, floats):
        np.fill_diagonal(scores, -np.inf)
    measured, other = (100 * (Y[scores.argmax(1)] == Y).mean() for scores in (stored, floats))
    table = evaluate(adapter, HARD, Y).set_index(["group", "gallery"])
    assert abs(table.adapted["trained on", "seen"] - measured) < 0.5 < abs(measured - other)


def test_an_update_keeps_the_projection():
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None, n_components=6, precision="int8").fit(X[Y < 12], Y[Y < 12])
    before = adapter.adapter_.projection.clone()
    adapter.partial_fit(X[Y >= 12], Y[Y >= 12])
    whole = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(X, Y)
    assert np.array_equal(adapter.adapter_.projection, before)
    assert np.allclose(adapter.transform(X), project(whole.transform(X), before.numpy()), atol=1e-4)


def test_where_no_format_passes_the_rows_stay_as_they_are():
    with pytest.warns(UserWarning, match="128 bytes"):
        adapter = EmbeddingAdapter(candidates=("wccn",), max_bytes=1, max_unseen_loss=0.0).fit(X, Y)
    assert adapter.frozen_ and adapter.row_format_ == RowFormat(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EmbeddingAdapter(candidates=("frozen",)).fit(X, Y)


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_bytes=4, precision="int8"),
        dict(max_bytes=4, n_components=3),
        dict(n_components=33),
        dict(max_bytes=0),
        dict(precision="int4"),
        dict(method="wccn", max_unseen_loss=None, max_bytes=4),
    ],
)
def test_settings_that_contradict_each_other_or_the_width(settings):
    with pytest.raises(InputError):
        EmbeddingAdapter(**settings).fit(X, Y)


@pytest.fixture(scope="module")
def narrow():
    return EmbeddingAdapter("wccn", max_unseen_loss=None, n_components=6, precision="int8").fit(X, Y)


@pytest.mark.parametrize("name", ["x.npy", "x.parquet", "pack.parquet"])
def test_files_get_the_components_that_are_kept(narrow, name, tmp_path):
    source, target = tmp_path / name, tmp_path / f"z_{name}"
    if name == "x.npy":
        np.save(source, X)
    elif name == "x.parquet":
        pd.DataFrame({"vector": list(X)}).to_parquet(source)
    else:
        write_pack(EmbeddingSet(X, Y, meta={"set": "s", "encoder": "e"}), source, dtype="float32")
    transform_file(narrow.adapter_, source, target, device="cpu")
    written = read_matrix(target)
    assert (written.n, written.dim) == (len(X), 6)
    assert np.allclose(written.array(), narrow.transform(X), atol=1e-5)


def test_a_report_compares_stored_rows_and_no_coordinates_of_rotated_ones(tmp_path):
    "The table is that of `evaluate`; a rotation makes displacement and mixtures with frozen rows meaningless."
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None, precision="binary").fit(HARD[Y < 12], Y[Y < 12])
    comparison = write_report(adapter, HARD, Y, tmp_path / "r.md")
    pd.testing.assert_frame_equal(comparison.evaluation, evaluate(adapter, HARD, Y))
    assert comparison.strength_curve is None and comparison.queries.displacement.isna().all()
    rows, labels, _, seen, trained_on = read_rows(adapter, HARD, Y)
    x = rows[:]
    z, _ = adapt_rows(adapter, x)
    assert not compare_spaces(x, z, labels, seen, trained_on).evaluation.adapted.equals(comparison.evaluation.adapted)
    row_format = RowFormat(8, "int8")
    cut = project(z, fit_projection(z[seen], row_format))
    expected = evaluate_embeddings(x, cut, labels, seen, trained_on, stored=as_stored(cut, row_format))
    curve = comparison.size_curve.query("n_components == 8 and precision == 'int8'")
    assert curve.n_bytes.tolist() == [8] * len(curve) and "| 8 | 8 | int8 |" in (tmp_path / "r.md").read_text()
    assert curve.adapted.tolist() == expected[expected.gallery == "mixed"].adapted.tolist()


def planted_pairs(d=32):
    "Queries that differ from their documents along a quarter of the directions."
    rng = np.random.default_rng(2)
    documents, owner = rng.normal(size=(80, d)), np.repeat(np.arange(80), 2)
    noise = rng.normal(size=(160, d)) * np.r_[np.full(d // 4, 2.0), np.full(d - d // 4, 0.1)]
    return normalize(documents[owner] + noise), normalize(documents), np.column_stack([np.arange(160), owner])


@pytest.mark.parametrize("side", ["query", "document", "both", "two"])
def test_pairs_are_measured_with_documents_as_they_are_stored(side, tmp_path):
    queries, documents, pairs = planted_pairs()
    full = PairAdapter(side, max_unseen_loss=None).fit(queries, documents, pairs)
    small = PairAdapter(side, max_unseen_loss=None, n_components=24, precision="binary").fit(queries, documents, pairs)
    zd = full.transform_documents(documents)
    projection = fit_projection(zd, RowFormat(24, "binary"))
    assert np.allclose(small.transform_documents(documents), project(zd, projection), atol=1e-5)
    assert np.allclose(
        small.transform_queries(queries), project(full.transform_queries(queries), projection), atol=1e-5
    )
    small.save(tmp_path / "a")
    loaded = PairAdapter.load(tmp_path / "a")
    assert loaded.row_format_ == RowFormat(24, "binary") and loaded.fingerprint_ == small.fingerprint_
    scores = small.transform_queries(queries) @ as_stored(small.transform_documents(documents), small.row_format_).T
    rank = (scores > scores[np.arange(160), pairs[:, 1]][:, None]).sum(1)
    ndcg = 100 * np.where(rank < 10, 1 / np.log2(2 + rank), 0).mean()
    table = evaluate_pairs(small, queries, documents, pairs).set_index(["group", "measure"])
    assert abs(table.adapted["fitted queries", "ndcg@10"] - ndcg) < 0.1
    adapted = as_adapter(tmp_path / "a")
    assert adapted.documents.output_dim == adapted.queries.output_dim == 24


def test_a_budget_chooses_the_format_of_documents():
    queries, documents, pairs = planted_pairs()
    adapter = PairAdapter("both", max_bytes=16, strengths=(0.5, 1.0)).fit(queries, documents, pairs)
    table = adapter.selection_.table
    assert set(table.precision[1:]) == {"int8", "binary"} and (table.n_bytes[1:] <= 16).all()
    assert not adapter.frozen_ and adapter.row_format_.n_bytes <= 16
    with pytest.warns(UserWarning, match="128 bytes"):
        assert PairAdapter("both", max_bytes=1).fit(queries, documents, pairs).frozen_
    for settings in (dict(max_bytes=16, max_unseen_loss=None), dict(n_components=33, max_unseen_loss=None)):
        with pytest.raises(InputError):
            PairAdapter("both", **settings).fit(queries, documents, pairs)
