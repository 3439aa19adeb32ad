"Properties that hold for all inputs; Hypothesis searches for counterexamples."

import csv

import numpy as np
import pandas as pd
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ega.data.arrays import InputError, check_labels, normalize, spawn_rngs
from ega.data.files import open_npy, read_csv_columns, read_npz
from ega.data.packs import EmbeddingSet, Split, read_pack, row_split, split_classes, write_pack
from ega.estimator import EmbeddingAdapter
from ega.experiments.grids import ResultStore
from ega.experiments.runs import RunConfig, build_config
from ega.measure.metrics import ar_at_k, lp_at_k
from ega.measure.search import knn, loo_knn
from ega.method.active_ratio import index_rows_by_class, random_batch_triplets, random_dataset_triplets
from ega.method.config import METHODS, config_to_dict, parse_config
from ega.selection import leave_classes_out, pick_candidate, score_candidates

SEEDS = st.integers(0, 2**32 - 1)
LABELS = hnp.arrays(np.int64, st.integers(1, 60), elements=st.integers(-1, 8))


def examine(check, pytestconfig, examples, **given_):
    "Run a check on so many examples, ten times as many with --slow."

    @settings(max_examples=examples * (10 if pytestconfig.getoption("--slow") else 1), deadline=None, database=None)
    @given(**given_)
    def each(**values):
        check(**values)

    each()


def test_normalize_returns_unit_rows_or_raises(pytestconfig):
    "Arrays of any type and shape, and nested lists of anything."
    arrays = st.one_of(
        hnp.arrays(
            st.one_of(hnp.scalar_dtypes(), hnp.array_dtypes()),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        st.recursive(
            st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=3), st.booleans()),
            lambda s: st.lists(s, max_size=4),
            max_leaves=12,
        ),
    )

    def check(a):
        try:
            x = normalize(a)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert (
                x.dtype == np.float32
                and x.ndim == 2
                and np.abs(np.linalg.norm(x.astype(np.float64), axis=1) - 1).max() < 1e-6
            )
        try:
            y = check_labels(a, min_classes=0)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert (
                y.dtype == np.int64
                and y.ndim == 1
                and (y >= -1).all()
                and y.tolist() == [int(v) for v in np.asarray(a).tolist()]
            )

    examine(check, pytestconfig, 250, a=arrays)


def test_array_files_round_trip_and_truncated_files_are_refused(tmp_path, pytestconfig):
    kinds = st.one_of(
        hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.boolean_dtypes(), hnp.unicode_string_dtypes(max_len=5)
    )

    def check(a, cut, order):
        a = np.asarray(a, order=order)
        np.save(tmp_path / "a.npy", a)
        np.savez(tmp_path / "a.npz", a=a, b=a[:0])
        for back in (
            open_npy(tmp_path / "a.npy"),
            read_npz(tmp_path / "a.npz")["a"],
            read_npz(tmp_path / "a.npz", ("b", "a"))["a"],
        ):
            assert back.dtype == a.dtype and back.shape == a.shape and back.tobytes() == a.tobytes()
        for name, read in (("a.npy", open_npy), ("a.npz", read_npz)):
            whole = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(whole[: int(cut * len(whole))])
            try:
                read(tmp_path / name)
            except InputError:
                continue
            raise AssertionError("a part was read")

    examine(
        check,
        pytestconfig,
        80,
        a=hnp.arrays(kinds, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5)),
        cut=st.floats(0, 1, exclude_max=True),
        order=st.sampled_from("CF"),
    )


def test_csv_tables_round_trip(tmp_path, pytestconfig):
    "Whatever csv.writer writes, line breaks, quotes and commas included."
    texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6)

    def check(names, n, data):
        # a header with another delimiter in a name that needs no quotes is ambiguous
        names = [f"{i} {c}".translate(dict.fromkeys(map(ord, ";\t|"))) for i, c in enumerate(names)]
        body = [[data.draw(texts) for _ in names] for _ in range(n)]
        with open(tmp_path / "t.csv", "w", encoding="utf-8", newline="") as f:
            csv.writer(f).writerows([names, *body])
        assert read_csv_columns(tmp_path / "t.csv", "a table") == {c: [r[i] for r in body] for i, c in enumerate(names)}

    examine(check, pytestconfig, 80, names=st.lists(texts, min_size=1, max_size=4), n=st.integers(0, 5), data=st.data())


def test_splits_do_not_leak(pytestconfig):
    "A split made from classes, then rows, passes Split.check; one misplaced row is found."

    def check(y, seed, share):
        rng = np.random.default_rng(seed)
        if len(np.unique(y[y >= 0])) < 2:
            return
        c = split_classes(y, rng, seen_fraction=share)
        seen = np.flatnonzero(np.isin(y, c.seen))
        fit, asked = (seen[p] for p in row_split(y[seen], rng))
        unseen = np.flatnonzero(np.isin(y, c.unseen))
        assert not set(c.seen) & set(c.unseen) and sorted([*fit, *asked, *unseen]) == np.flatnonzero(y >= 0).tolist()
        Split(fit, fit, asked, unseen, unseen).check(y)
        for bad in (
            (np.append(fit, unseen[0]), fit, asked, unseen, unseen),
            (np.append(fit, asked[:1]), fit, asked, unseen, unseen),
        ):
            if len(bad[0]) == len(fit):
                continue
            try:
                Split(*bad).check(y)
            except InputError:
                continue
            raise AssertionError("a leak was not found")

    examine(check, pytestconfig, 150, y=LABELS, seed=SEEDS, share=st.floats(0.05, 0.95))


def test_folds_leave_every_class_out_once(pytestconfig):
    def check(y, seed, folds):
        classes = np.unique(y[y >= 0])
        if len(classes) < folds:
            return
        parts = leave_classes_out(y, np.random.default_rng(seed), n_folds=folds)
        assert sorted(c for f in parts for c in np.unique(y[f.unseen])) == classes.tolist()
        for f in parts:
            assert (
                not set(y[f.fit]) & set(y[f.unseen])
                and not set(f.fit) & set(f.seen_queries)
                and set(y[f.seen_queries]) <= set(y[f.fit])
                and (y[np.r_[f.fit, f.seen_queries, f.unseen]] >= 0).all()
            )

    examine(check, pytestconfig, 100, y=LABELS, seed=SEEDS, folds=st.integers(2, 5))


def test_updates_equal_a_fit_on_the_rows_that_are_left(pytestconfig):
    "Rows added in any parts, others removed: the transform of a fit on the rest; or refused, and nothing changed."

    def check(n, n_classes, seed):
        rng = np.random.default_rng(seed)
        x, y = normalize(rng.normal(size=(n, 4))), rng.integers(-1, n_classes, n)
        part = rng.integers(0, 4, n)  # 0 and 3: fitted, 1 and 2: added, 2 and 3: removed
        is_left = (part < 2) & (y >= 0)
        try:
            adapter, rest = (
                EmbeddingAdapter("wccn", max_unseen_loss=None, device="cpu").fit(x[rows], y[rows])
                for rows in ((part == 0) | (part == 3), is_left)
            )
        except InputError:
            return  # too few rows to fit
        for change, number in (("partial_fit", 1), ("partial_fit", 2), ("forget", 3), ("forget", 2)):
            before = vars(adapter).copy()
            try:
                getattr(adapter, change)(x[part == number], y[part == number])
            except InputError as error:
                assert vars(adapter) == before and not (y[part == number] >= 0).any(), error
        assert np.allclose(adapter.transform(x), rest.transform(x), rtol=0, atol=1e-5)
        assert np.array_equal(adapter.classes_, rest.classes_) and adapter.statistics_.n == is_left.sum()
        assert np.array_equal(adapter.fit_row_hashes_, rest.fit_row_hashes_)

    sizes = dict(n=st.integers(8, 80), n_classes=st.integers(2, 6))
    examine(check, pytestconfig, 40, **sizes, seed=SEEDS)


def test_triplets_are_legal(pytestconfig):
    "The positive is another row of the anchor's class, the negative of another class; only anchors without either go."

    def check(y, seed):
        y, gen = torch.from_numpy(y[y >= 0]), torch.Generator().manual_seed(seed)
        sizes = torch.bincount(y, minlength=9)
        if (sizes > 0).sum() < 2:
            return
        whole, batch = (
            random_dataset_triplets(index_rows_by_class(y), torch.arange(len(y)), gen=gen),
            random_batch_triplets(y, gen=gen),
        )
        for t in (whole, batch):
            assert (y[t.p] == y[t.a]).all() and (t.p != t.a).all() and (y[t.n] != y[t.a]).all()
            assert t.a.tolist() == torch.arange(len(y))[sizes[y] > 1].tolist()

    examine(check, pytestconfig, 150, y=LABELS, seed=SEEDS)


def test_neighbours_equal_those_of_a_loop(pytestconfig):
    "Exact and leave-one-out search, label precision and recall equal those of float64 distances, in any gallery order."

    def check(n, d, k, seed, twins):
        rng = np.random.default_rng(seed)
        x = normalize(rng.normal(size=(n, d)))
        if twins:
            x[n // 2 :] = x[: n - n // 2]
        y = rng.integers(0, 3, n)
        D = np.square(x[:, None].astype(np.float64) - x[None]).sum(2)
        found, alone = knn(x, x, k), loo_knn(x, k)
        np.fill_diagonal(others := D.copy(), np.inf)
        for f, table in ((found, D), (alone, others)):
            best = np.sort(table, 1)[:, : min(k, n - (table is others))]
            assert f.I.shape == best.shape  # at most as many neighbours as rows
            assert ((f.I < 0) == np.isinf(best)).all() and np.allclose(
                np.where(f.I < 0, 0, f.D), np.where(np.isinf(best), 0, best), atol=1e-5
            )
            assert all(len(set(r[r >= 0])) == (r >= 0).sum() for r in f.I)
        hit = lp_at_k(found, y, y, min(k, n))
        assert ((hit >= 0) & (hit <= 1)).all() and (ar_at_k(found, found, min(k, n)) == 1).all()
        p = rng.permutation(n)
        if k == n:
            assert np.allclose(hit, lp_at_k(knn(x, x[p], k), y[p], y, k), atol=1e-6)

    examine(
        check,
        pytestconfig,
        100,
        n=st.integers(2, 24),
        d=st.integers(1, 5),
        k=st.integers(1, 30),
        seed=SEEDS,
        twins=st.booleans(),
    )


def test_selection_respects_max_unseen_loss(pytestconfig):
    "The chosen bound respects max_unseen_loss; a larger one never lowers the gain; candidate order is irrelevant."

    def check(seed, max_unseen_loss, gains):
        rng = np.random.default_rng(seed)
        classes = np.repeat(np.arange(8), 5), np.repeat(np.arange(6), 5)
        found = {
            (f"m{i}", 1.0): tuple(np.clip(g + 0.3 * rng.normal(size=len(c)), -1, 1) for g, c in zip(pair, classes))
            for i, pair in enumerate(gains)
        }

        options = dict(unseen_share=0.3, confidence=0.95, n_boot=60)

        def choose(f, b):
            table = score_candidates(f, classes, max_unseen_loss=b, rng=spawn_rngs(0).eval, **options)
            return pick_candidate(table)

        small, large = choose(found, max_unseen_loss), choose(found, max_unseen_loss + 20)
        assert small.method == "frozen" or small.unseen_bound >= -max_unseen_loss and small.gain_bound > 0
        assert large.gain >= small.gain

    examine(
        check,
        pytestconfig,
        40,
        seed=SEEDS,
        max_unseen_loss=st.floats(0, 30),
        gains=st.lists(st.tuples(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)), min_size=1, max_size=4),
    )


def test_configurations_round_trip_with_one_run_id(tmp_path, pytestconfig):
    "From JSON and back: the same configuration, the same run id; another field, another id."
    import json

    def check(method, epochs, seed, split, hidden):
        c = build_config("unseen", "cub100", method, hidden=hidden, epochs=epochs, seed=seed, split_seed=split)
        text = json.dumps(config_to_dict(c))
        assert (
            parse_config(RunConfig, text) == parse_config(RunConfig, json.loads(text)) == c
            and parse_config(RunConfig, text).run_id == c.run_id
        )
        assert (
            build_config(
                "unseen", "cub100", method, hidden=hidden, epochs=epochs, seed=seed + 1, split_seed=split
            ).run_id
            != c.run_id
        )

    examine(
        check,
        pytestconfig,
        80,
        method=st.sampled_from(sorted(METHODS)),
        epochs=st.integers(1, 999),
        seed=st.integers(0, 99),
        split=st.integers(0, 99),
        hidden=st.integers(1, 4096),
    )


def test_results_do_not_depend_on_the_order_of_runs(tmp_path_factory, pytestconfig):
    def rows(i):
        return pd.DataFrame(
            [
                dict(run_id=f"{i:016x}", query_set=q, benchmark="b", method="m", config="{}", lp_at_1=i / 7)
                for q in ("seen", "unseen")
            ]
        )

    def check(order, sealed):
        stores = [ResultStore(tmp_path_factory.mktemp("s"), "unseen") for _ in range(2)]
        for i, s in zip(order, sealed):
            stores[0].add(rows(i))
            stores[0].merge_parts() if s else None
        for i in sorted(set(order)):
            stores[1].add(rows(i))
        stores[1].merge_parts()
        assert stores[0].read().equals(stores[1].read()) and stores[0].ids() == stores[1].ids() == {
            f"{i:016x}" for i in order
        }

    examine(
        check,
        pytestconfig,
        20,
        order=st.lists(st.integers(0, 9), min_size=1, max_size=6),
        sealed=st.lists(st.booleans(), min_size=6, max_size=6),
    )


def test_packs_round_trip_any_text(tmp_path, pytestconfig):
    "Names, splits and classes of any characters that UTF-8 has."
    texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)

    def check(names, split, classes, seed):
        n, classes = len(names), sorted(set(classes)) or ["a"]
        ids = [f"{i}{c}" for i, c in enumerate(names)]
        es = EmbeddingSet(
            normalize(np.random.default_rng(seed).normal(size=(n, 3))),
            np.arange(n) % len(classes),
            ids,
            [split] * n,
            classes,
            {"set": "s", "encoder": "e"},
        )
        back = read_pack(write_pack(es, tmp_path / "p.parquet", dtype="float32"))
        assert (
            back.ids.tolist() == es.ids.tolist()
            and back.split.tolist() == es.split.tolist()
            and back.classes == es.classes
            and np.array_equal(back.x, es.x)
        )

    examine(
        check,
        pytestconfig,
        60,
        names=st.lists(texts, min_size=1, max_size=6),
        split=texts,
        classes=st.lists(texts, max_size=4),
        seed=SEEDS,
    )
