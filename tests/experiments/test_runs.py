"Configurations, splits, the result store under kills and concurrency, and the summary against a loop, on small packs."

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from test_benchmarks import alive, children

from ega.data.arrays import InputError, normalize
from ega.data.packs import EmbeddingSet, path_of_pack, write_pack
from ega.experiments import runs
from ega.experiments.grids import (
    GRIDS,
    Grid,
    ResultStore,
    cached_table,
    run_grid,
)
from ega.experiments.protocols import BENCHMARKS, Protocol, build_split, load_embedding_sets
from ega.experiments.runs import TUNING_EPOCHS, TUNING_STRENGTHS, RunConfig, build_config, run_experiment
from ega.experiments.summary import (
    add_mean_over_benchmarks,
    choose_settings,
    format_path_changes,
    mean_change,
    path_changes,
    path_replicates,
    summarize,
)
from ega.measure import search
from ega.measure.evaluation import label_hits
from ega.method.closed_form import DiscriminantWhitening
from ega.method.config import METHODS, parse_config

SMALL_TRAINING = dict(hidden=16, epochs=2)


def make_packs(root):
    "One small pack for each that a benchmark names, with clusters, train and test rows and a few unlabelled rows."
    rng = np.random.default_rng(0)
    for name, encoder in sorted({(n, b.encoder) for b in BENCHMARKS.values() for n in (b.train, b.unseen)}):
        classes = 10 if name == "cifar10" else 12
        y = np.r_[np.arange(180) % classes, [-1] * 7]
        x = normalize(rng.normal(size=(187, 12)) + 0.7 * rng.normal(size=(classes + 1, 12))[y])
        split = np.where(np.arange(187) // classes % 2, "train", "test")
        write_pack(
            EmbeddingSet(x, y, split=split, meta={"set": name, "encoder": encoder}), path_of_pack(name, encoder, root)
        )


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    root = tmp_path_factory.mktemp("packs")
    make_packs(root)
    return root


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("split_seed", [42, 0])
def test_unseen_splits_are_disjoint_in_rows_and_classes(packs, benchmark, split_seed):
    config = build_config("unseen", benchmark, "frozen", split_seed=split_seed)
    es, other = load_embedding_sets(config, packs)
    s, b = build_split(config, es, other), BENCHMARKS[benchmark]
    assert (es.y >= 0).all() and (other.y >= 0).all()
    assert not np.intersect1d(s.fit, s.seen_queries).size and set(es.y[s.seen_queries]) <= set(es.y[s.fit])
    if b.train == b.unseen:
        assert not set(es.y[s.fit]) & set(other.y[s.unseen_queries]) and len(set(es.y[s.fit])) == round(0.8 * 12)
    if b.own_split:
        assert set(es.split[s.fit]) == set(other.split[s.unseen_gallery]) == {"train"}
        assert set(es.split[s.seen_queries]) == set(other.split[s.unseen_queries]) == {"test"}
    else:
        assert np.array_equal(s.unseen_gallery, s.unseen_queries)


def test_in_distribution_split_has_three_disjoint_parts_of_every_class(packs):
    config = build_config("in_distribution", "cub100", "frozen")
    es, other = load_embedding_sets(config, packs)
    s = build_split(config, es, other)
    parts = [s.fit, s.seen_gallery, s.seen_queries]
    assert sorted(np.concatenate(parts).tolist()) == list(range(180)) and all(set(es.y[p]) == set(es.y) for p in parts)
    assert abs(len(s.fit) / 180 - 0.5) < 0.05


def test_run_id_covers_the_whole_configuration():
    base = build_config("unseen", "cub100", "supcon_preserve", **SMALL_TRAINING)
    changed = [
        replace(base, seed=1),
        replace(base, split_seed=1),
        replace(base, benchmark="tiny200"),
        replace(base, loss=replace(base.loss, lam=9.0)),
        replace(base, train=replace(base.train, lr=2e-4)),
        replace(base, adapter=replace(base.adapter, hidden=17)),
        replace(base, task="in_distribution"),
    ]
    assert len({c.run_id for c in (base, *changed)}) == len(changed) + 1
    assert parse_config(RunConfig, json.loads(json.dumps(dict(vars(base)), default=vars))).run_id == base.run_id


@pytest.mark.parametrize(
    "method, task", [("supcon rho=1", "unseen"), ("supcon strength=0.5", "unseen"), ("supcon epoch=2", "path")]
)
def test_settings_without_effect_are_refused(method, task):
    with pytest.raises(InputError, match="setting"):
        build_config(task, "cub100", method)


@pytest.mark.parametrize("method", METHODS)
def test_method_runs_and_means_equal_those_of_its_queries(packs, method):
    config = build_config("unseen", "cub100", method, **SMALL_TRAINING)
    rows, (_, other) = run_experiment(config, packs, device="cpu"), load_embedding_sets(config, packs)
    assert rows.query_set.tolist() == ["seen", "unseen"]
    for row in rows.itertuples():
        assert len(row.query) == len(row.hit) == len(row.neighbour) == len(row.ivf_ar) == row.n
        assert np.isclose(row.hit.mean(), row.lp_at_1, atol=1e-6)
        assert np.array_equal(other.y[row.query], row.query_class)
        if method != "no_residual":  # its two points are ties: the first neighbour is any
            assert np.isclose((other.y[row.neighbour] == row.query_class).mean(), row.lp_at_1, atol=0.03)
        assert len(row.active_ratio_history) == (SMALL_TRAINING["epochs"] if METHODS[method].loss else 0)
    assert not (rows.neighbour[1] == rows["query"][1]).any()


@pytest.mark.parametrize("crowd", [1, 30])
@pytest.mark.parametrize("k", [1, 3])
def test_leave_one_out_equals_a_search_in_every_fold(crowd, k, monkeypatch):
    "With 30 duplicates in one fold, no stored neighbour lies in the other folds, and the queries are searched again."
    from ega.measure.search import SearchConfig

    rng = np.random.default_rng(0)
    y = rng.integers(5, size=240 // crowd)
    x = np.repeat(normalize(rng.normal(size=(len(y), 6)) + np.eye(6)[y]), crowd, 0)
    fold = np.repeat(np.arange(len(y)) % 4, crowd) if crowd > 1 else rng.integers(4, size=240)
    y, index, searched = np.repeat(y, crowd), SearchConfig("ivf", k, 6, 2), []
    monkeypatch.setattr(runs, "row_split", lambda *a, **kw: [np.flatnonzero(fold == f) for f in range(4)])
    monkeypatch.setattr(runs, "knn", lambda xq, xb, k: searched.append(len(xq)) or search.knn(xq, xb, k))
    got = runs.evaluate_leave_one_out(x, y, index, 4, None)
    again, searched[:] = sum(searched), []
    for f in range(4):
        q, b = np.flatnonzero(fold == f), np.flatnonzero(fold != f)
        v = runs.evaluate_settings(x[q], x[b], y[q], y[b], Protocol(index=index))[index]
        assert np.allclose(got.ivf_hit[q], v.ivf_hit) and np.allclose(got.ivf_ar[q], v.ivf_ar)
    assert sum(searched) == 240 and again == (240 if crowd > 1 else 0)
    assert 0 < got.ivf_ar.mean() < 1 or crowd > 1


def test_same_configuration_gives_same_digits_in_any_process(packs, tmp_path):
    configs = [build_config("unseen", "grocery", m, **SMALL_TRAINING) for m in ("ega_paper", "supcon", "lora_triplet")]
    stores = ResultStore(tmp_path / "a", "unseen"), ResultStore(tmp_path / "b", "unseen")
    for store, order, workers in zip(stores, (configs, configs[::-1]), (2, 1)):
        assert run_grid(order, store, packs, workers=workers, progress=False) == 3
        store.merge_parts()
    a, b = (store.read() for store in stores)
    columns = ["run_id", "query_set", "lp_at_1", "ar_at_1", "displacement"]
    assert a[columns].equals(b[columns])
    for column in ("hit", "neighbour", "loss_history"):
        assert all(np.array_equal(p, q) for p, q in zip(a[column], b[column]))
    assert run_grid(configs, stores[0], packs, progress=False) == 0 and not stores[0].parts.exists()


GRID = textwrap.dedent("""
    import sys
    sys.path.insert(0, {tests!r})
    from test_runs import ResultStore, grid_of, run_grid
    if __name__ == "__main__":
        store = ResultStore({results!r}, "unseen")
        print(run_grid(grid_of({epochs}), store, {packs!r}, workers=2, progress=False), len(store.ids()))
""")


def grid_of(epochs):
    "Eight runs, of which the four of the closed forms take no time."
    options = dict(methods=("frozen", "wccn", "ega_released"), hidden=16, epochs=epochs, splits=(42,), seeds=(0, 1))
    return list(Grid("unseen", ("cub100", "grocery"), **options).configs())


def start_grid(folder, packs, epochs, before=""):
    "Run the grid in a process of its own, into the folder."
    script = folder / "grid.py"
    where = dict(tests=os.path.dirname(__file__), results=str(folder / "r"), packs=str(packs))
    script.write_text(before + GRID.format(epochs=epochs, **where))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(script)], env=env, stdout=pipe, stderr=pipe, text=True)


def test_grid_resumes_after_two_kills(packs, tmp_path):
    store, stamps = ResultStore(tmp_path / "r", "unseen"), {}
    for kept in (2, 6):
        process = start_grid(tmp_path, packs, 12)
        while len(store.ids()) < kept and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.communicate()
        now = {p.name: p.stat().st_mtime_ns for p in store.parts.glob("*.parquet")}
        assert stamps.items() <= now.items()  # earlier parts are unchanged
        assert all(len(pd.read_parquet(store.parts / name)) for name in now)
        stamps = now
    made, stored = start_grid(tmp_path, packs, 12).communicate()[0].split()
    assert int(stored) == 8 and int(made) <= 8 - len(stamps)
    whole = ResultStore(tmp_path / "whole", "unseen")
    run_grid(grid_of(12), whole, packs, workers=1, progress=False)
    columns = ["run_id", "query_set", "lp_at_1", "ar_at_1"]
    assert store.read()[columns].equals(whole.read()[columns])


INTERRUPT_INSIDE_LOCK = textwrap.dedent("""
    import concurrent.futures, signal
    signal.signal(signal.SIGINT, signal.default_int_handler)                # a shell's background jobs ignore ctrl-c
    wait = concurrent.futures.wait
    def wait_interrupted(runs, *how):
        lock = next(iter(runs))._condition
        lock.acquire(); signal.raise_signal(signal.SIGINT); lock.release()
        return wait(runs, *how)
    concurrent.futures.wait = wait_interrupted
""")


def test_ctrl_c_inside_a_lock_of_the_pool_ends_the_grid(packs, tmp_path):
    "Without deferring ctrl-c, the lock of a future would stay locked and the pool would wait for ever."
    process = start_grid(tmp_path, packs, 1_000_000, before=INTERRUPT_INSIDE_LOCK)  # the trained runs never finish
    _, error = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in error


def test_workers_exit_when_their_parent_is_killed(packs, tmp_path):
    process, store = start_grid(tmp_path, packs, 1_000_000), ResultStore(tmp_path / "r", "unseen")
    while len(store.ids()) < 4:  # the closed forms; then both workers train
        assert process.poll() is None
        time.sleep(0.1)
    left = children(process.pid)
    assert len(left) == 3 and all(map(alive, left))  # the third is multiprocessing's resource tracker
    process.kill()
    process.communicate()  # returns when no worker holds the pipe any more
    while any(map(alive, left)):
        time.sleep(0.1)


def test_unreadable_result_file_is_reported(tmp_path):
    with pytest.raises(InputError, match="no results"):
        ResultStore(tmp_path, "unseen").read()
    (tmp_path / "unseen.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputError, match="readable"):
        ResultStore(tmp_path, "unseen").read()


@pytest.fixture(scope="module")
def results(packs):
    return pd.concat(
        [
            run_experiment(build_config("unseen", b, m, split_seed=s, seed=t, **SMALL_TRAINING), packs, device="cpu")
            for b in ("cub100", "grocery")
            for m in ("frozen", "supcon")
            for s in (42, 0)
            for t in ((0, 1) if m == "supcon" else (0,))
        ],
        ignore_index=True,
    )


def test_summary_is_the_mean_over_pairs_of_split_and_query(results):
    keys = ["query_set", "method", "metric", "benchmark"]
    table = summarize(results, n_boot=50).query("metric in ('lp_at_1', 'ar_at_1')").set_index(keys).sort_index()
    unseen = results[results.query_set == "unseen"]
    for benchmark in ("cub100", "grocery"):
        value = {}
        for method, rows in unseen[unseen.benchmark == benchmark].groupby("method"):
            of_splits = [np.mean(np.stack(r.hit.to_list()), 0) for _, r in rows.groupby("split_seed")]
            value[method] = 100 * np.concatenate(of_splits).mean()
        row = table.loc[("unseen", "supcon", "lp_at_1", benchmark)]
        assert np.isclose(row.value, value["supcon"])
        assert np.isclose(row["diff"], value["supcon"] - value["frozen"])
        frozen = table.loc[("unseen", "frozen", "lp_at_1", benchmark)]
        assert frozen["diff_low"] == frozen["diff_high"] == 0
    of_supcon = table.loc[("unseen", "supcon", "lp_at_1")]
    both = of_supcon.loc[["cub100", "grocery"]]
    assert np.isclose(of_supcon.value["mean"], both.value.mean())
    assert np.isclose(of_supcon["diff"]["worst"], both["diff"].min())
    assert (table.low <= table.value + 1e-9).all() and (table.value <= table.high + 1e-9).all()


def test_every_quick_run_is_a_run_of_the_full_profile():
    full = {config.run_id for grid in GRIDS["full"].values() for config in grid.configs()}
    for grid in GRIDS["quick"].values():
        assert {config.run_id for config in grid.configs()} <= full


@pytest.mark.parametrize("benchmark", ["cub100", "grocery", "tiny200>cifar10"])
def test_held_out_protocol_uses_seen_classes_only(benchmark, packs):
    true, held = (build_config("unseen", benchmark, "frozen", protocol=p) for p in ("strict", "held_out"))
    es, other = load_embedding_sets(held, packs)
    a, b = build_split(true, *load_embedding_sets(true, packs)), build_split(held, es, other)
    known, fitted, held_classes = (set(es.y[rows]) for rows in (a.fit, b.fit, b.unseen_queries))
    assert other is es and not fitted & held_classes and fitted | held_classes == known
    assert abs(len(fitted) - 0.8 * len(known)) < 1
    if benchmark != "tiny200>cifar10":
        assert not known & set(es.y[a.unseen_queries])


@pytest.mark.parametrize("method, strength", [("wccn", 1.0), ("lda", 1.0), ("frozen", 0.0)])
def test_end_of_a_curve_equals_the_run(packs, method, strength):
    run = run_experiment(build_config("unseen", "grocery", method), packs).set_index("query_set")
    curve = run_experiment(build_config("curve", "grocery", method), packs).set_index(["query_set", "strength"])
    for query_set in ("seen", "unseen"):
        row = curve.loc[(query_set, strength)]
        assert np.array_equal(row.hit, run.hit[query_set]) and np.array_equal(row["query"], run["query"][query_set])
        assert np.isclose(row.within.sum(), 1) and np.isclose(row["between"].sum(), 1)


def path_rows(packs, method="supcon", benchmark="grocery", epochs=5, **kw):
    config = build_config("path", benchmark, method, hidden=16, epochs=epochs)
    return run_experiment(config, packs, device="cpu", **kw).set_index(["query_set", "gallery_kind", "epoch"])


@pytest.mark.parametrize("method, benchmark, epochs", [("supcon", "grocery", 2), ("whitened_supcon", "cub100", 1)])
def test_end_of_a_path_equals_the_run(packs, method, benchmark, epochs):
    path = path_rows(packs, method, benchmark, epochs)
    run = run_experiment(build_config("unseen", benchmark, method, hidden=16, epochs=epochs), packs, device="cpu")
    for row in run.itertuples():
        last = path.loc[(row.query_set, "own", epochs)]
        assert all(np.array_equal(last[c], getattr(row, c)) for c in ("query", "hit", "neighbour", "ivf_hit", "ivf_ar"))
        assert np.isclose(last.active_ratio, row.active_ratio_final) and np.isclose(last.loss, row.loss_history[-1])


@pytest.mark.parametrize("benchmark", ["grocery", "cub100", "tiny200>cifar10"])
def test_mixed_gallery_of_a_path_equals_a_search_by_hand(packs, benchmark):
    row = path_rows(packs, "frozen", benchmark).loc[("unseen", "mixed", 0)]
    config = build_config("path", benchmark, "frozen")
    es, other = load_embedding_sets(config, packs)
    split = build_split(config, es, other)
    x = np.concatenate([es.x[split.fit], other.x[split.unseen_gallery]])
    y = np.concatenate([es.y[split.fit], other.y[split.unseen_gallery] + 1000 * (es is not other)])
    some = np.arange(0, len(split.unseen_queries), 7)
    cosines = other.x[split.unseen_queries[some]] @ x.T
    if np.array_equal(split.unseen_queries, split.unseen_gallery):
        cosines[np.arange(len(some)), len(split.fit) + some] = -1
    nearest = cosines.argmax(1)
    same = y[nearest] == other.y[split.unseen_queries[some]] + 1000 * (es is not other)
    assert row.gallery == len(x) and np.mean(np.round(row.hit[some]) == same) > 0.99  # ties are averaged
    assert np.mean(row.captured[some] == (nearest < len(split.fit))) > 0.99


@pytest.mark.parametrize("benchmark", ["cub100", "tiny200>cifar10"])
def test_centred_rows_are_minus_the_mean_of_the_fit_rows(packs, benchmark):
    rows = path_rows(packs, "frozen center=1", benchmark)
    config = build_config("path", benchmark, "frozen")
    es, other = load_embedding_sets(config, packs)
    split = build_split(config, es, other)
    x = other.x[split.unseen_queries] - es.x[split.fit].mean(0)
    found = search.loo_knn(normalize(x), 1, device="cpu")
    y = other.y[split.unseen_queries]
    assert (np.float32(y[found.I[:, 0]] == y) == rows.hit["unseen", "own", 0]).mean() > 0.99  # ties are averaged
    frozen = path_rows(packs, "frozen", benchmark)
    assert (frozen.lp_at_1 != rows.lp_at_1).any() and (frozen.run_id != rows.run_id).all()
    assert (rows.displacement == 0).all()  # centring is part of the data
    trained = path_rows(packs, "supcon center=1", benchmark, epochs=1)
    assert np.array_equal(trained.hit["unseen", "mixed", 0], rows.hit["unseen", "mixed", 0])
    assert (trained.xs(1, level="epoch").displacement > 0).all()


def test_a_path_at_a_strength_is_the_map_of_that_strength(packs):
    config = build_config("path", "cub100", "discriminant_whitening strength=0.3")
    es, _ = load_embedding_sets(config, packs)
    split = build_split(config, es, es)
    z = DiscriminantWhitening(0.3).fit(es.x[split.fit], es.y[split.fit]).transform(es.x)
    found = label_hits(z, es.y, split.unseen_queries, np.union1d(split.fit, split.unseen_gallery))
    row = path_rows(packs, config.method, "cub100").loc["unseen", "mixed", 0]
    assert np.mean(row.hit == found.hit) > 0.99 and np.isclose(row.lp_at_1, found.hit.mean(), atol=0.005)
    whole, half = (path_rows(packs, f"whitened_supcon strength={s}", "cub100", epochs=2) for s in (1, 0.5))
    assert len(whole) == 12 and set(half.index.get_level_values("epoch")) == {2}
    start = path_rows(packs, "whitened_supcon strength=0", "cub100", epochs=2)
    assert np.mean(start.hit["seen", "own", 2] == whole.hit["seen", "own", 0]) > 0.99
    displacements = [rows.displacement["seen", "own", 2] for rows in (start, half, whole)]
    assert len(set(displacements)) == 3 and np.isclose(displacements[0], whole.displacement["seen", "own", 0])


def test_replicates_of_a_path_are_paired_means_of_its_queries(packs):
    configs = [
        build_config("path", "grocery", m, hidden=16, epochs=2, split_seed=split)
        for m in ("frozen", "supcon", "wccn")
        for split in ((0, 1) if m != "wccn" else (0,))
    ]
    rows = pd.concat([run_experiment(c, packs, device="cpu") for c in configs], ignore_index=True)
    replicates = path_replicates(rows, n_boot=20)
    assert len(replicates) == 5  # LP@1 of two query sets in two galleries, and the capture rate of one
    for (_, *searched, metric), values in replicates.items():
        assert values.shape == (21, 4) and "wccn" not in values  # frozen, and epochs 0, 1 and 2; wccn lacks a split
        assert np.allclose(values["frozen", 0], values["supcon", 0])  # the same draws for all columns
        is_searched = (rows[["query_set", "gallery_kind"]] == searched).all(axis=1)
        two = rows[is_searched & (rows.method == "supcon") & (rows.epoch == 2)]
        queries = np.concatenate(list(two["hit" if metric == "lp_at_1" else "captured"]))
        assert np.isclose(values["supcon", 2].iloc[0], 100 * queries.mean(dtype=float))
        assert values["supcon", 2].iloc[1:].std() > 0 or queries.mean() in (0, 1)
    with pytest.raises(InputError, match="frozen is missing"):
        path_replicates(rows[rows.method != "frozen"])


def test_changes_of_a_path_and_their_mean_over_benchmarks(packs):
    "In the mean over benchmarks seen classes of one training set count once."
    benchmarks = ("tiny200", "tiny200>cifar10", "cub100")
    configs = [build_config("path", b, m, split_seed=0) for b in benchmarks for m in ("frozen", "wccn")]
    rows = pd.concat([run_experiment(c, packs, device="cpu") for c in configs], ignore_index=True)
    replicates = path_replicates(rows, n_boot=50)
    changes = path_changes(add_mean_over_benchmarks(replicates))
    own = changes.query("gallery_kind == 'own' and metric == 'lp_at_1' and method == 'wccn'")
    table = own.pivot(index="query_set", columns="benchmark", values="change")
    assert np.isclose(table["mean"]["unseen"], table.loc["unseen", [*benchmarks]].mean())
    of_tiny = table.loc["seen", ["tiny200", "tiny200>cifar10"]].mean()
    assert np.isclose(table["mean"]["seen"], (of_tiny + table.cub100["seen"]) / 2)
    values = replicates["cub100", "unseen", "mixed", "lp_at_1"]
    drawn = values["wccn", 0] - values["frozen", 0]
    low, high = np.percentile(drawn[1:], [2.5, 97.5])
    printed = format_path_changes(changes, "cub100", {"wccn": "WCCN"}).loc["WCCN", "unseen, mixed"]
    assert printed == f"{drawn[0]:+.1f} [{low:+.1f}, {high:+.1f}]"
    assert (changes[changes.method == "frozen"][["change", "low", "high"]] == 0).all(axis=None)


def test_mean_change_counts_equal_seen_classes_once():
    "Constant changes: no uncertainty, and the mean is that of the benchmarks, or of their training sets."
    lines = pd.DataFrame(
        [
            {"benchmark": b, "change": np.full(6, c, np.float32), "query_class": np.arange(6) % 3}
            for b, c in (("tiny200", 2.0), ("tiny200>cifar10", 4.0), ("cub100", 9.0), ("cub100", 9.0))
        ]
    )
    assert mean_change(lines) == (5, 5, 5) and mean_change(lines, seen=True) == (6, 6, 6)
    lines["change"] = [np.float32([0, 3, 6, 0, 3, 6])] * 4  # differs between classes
    mean, low, high = mean_change(lines)
    assert mean == 3 and 0 < low < 3 < high < 6


def test_killed_path_resumes_with_the_same_rows(packs, tmp_path, monkeypatch):
    from ega.method import training

    whole, checkpoint = path_rows(packs), tmp_path / "run.safetensors"
    monkeypatch.setattr(training.time, "monotonic", iter(range(0, 10**6, 100)).__next__)  # saves after every epoch
    saved = training.save_checkpoint

    def save_and_stop(*args, epoch, **kw):
        saved(*args, epoch=epoch, **kw)
        if epoch == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        path_rows(packs, checkpoint=checkpoint)
    assert checkpoint.exists()
    monkeypatch.setattr(training, "save_checkpoint", saved)
    resumed = path_rows(packs, checkpoint=checkpoint)
    assert not list(tmp_path.iterdir()) and resumed.index.equals(whole.index)
    assert resumed.index.get_level_values("epoch").unique().tolist() == [0, 1, 2, 5]
    assert all(np.array_equal(a, b) for c in ("hit", "captured") for a, b in zip(resumed[c], whole[c]))


def test_choose_settings_takes_the_best_on_held_out_classes():
    columns = ["method", "strength", "seen", "unseen"]
    lines = [("frozen", 0.0, 0.5, 0.99), ("supcon tau=0.1", 0.5, 0.6, 0.8), ("supcon tau=0.1", 1.0, 0.9, 0.7)]
    lines += [("supcon tau=0.05", 0.5, 0.7, 0.8), ("wccn shrinkage=0.3", 1.0, 0.1, 0.2)]
    rows = pd.DataFrame(lines, columns=columns).melt(columns[:2], var_name="query_set", value_name="lp_at_1")
    rows = rows.assign(benchmark="cub100", split_seed=42, epoch=5, protocol="held_out")
    by_unseen, by_both = (choose_settings(rows, unseen_share=share) for share in (1, 0.5))
    wccn = "wccn shrinkage=0.3 epoch=5 strength=1"
    assert by_unseen.method.tolist() == [wccn, "supcon tau=0.05 epoch=5 strength=0.5"]  # the better of two on seen ones
    assert by_both.method.tolist() == [wccn, "supcon tau=0.1 epoch=5 strength=1"]
    with pytest.raises(InputError, match="held_out"):
        choose_settings(rows.assign(protocol="strict"), unseen_share=1)


def tuning_rows(packs, method, **kw):
    config = build_config("tuning", "grocery", method, hidden=16, epochs=20, **kw)
    rows = run_experiment(config, packs, device="cpu")
    return rows.set_index(["query_set", "gallery_kind", "epoch", "strength"]).sort_index()


def test_candidates_are_the_path_of_one_training_towards_the_frozen_embeddings(packs):
    candidates = tuning_rows(packs, "supcon")
    path = path_rows(packs, "supcon", "grocery", 20)
    assert len(candidates) == 2 * 2 * len(TUNING_EPOCHS) * len(TUNING_STRENGTHS)
    for query_set, kind, epoch in product(("seen", "unseen"), ("own", "mixed"), TUNING_EPOCHS):
        whole, at_end = candidates.loc[query_set, kind, epoch, 1.0], path.loc[query_set, kind, epoch]
        assert np.array_equal(whole.hit, at_end.hit) and np.array_equal(whole["query"], at_end["query"])
        moved = candidates.loc[query_set, kind, epoch].displacement
        assert 0 < moved[0.25] < moved[0.5] < moved[1.0]
    one = tuning_rows(packs, "supcon epoch=5 strength=0.5")
    assert set(one.index) == {(q, g, 5, 0.5) for q in ("seen", "unseen") for g in ("own", "mixed")}
    assert all(np.array_equal(one.hit[i], candidates.hit[i]) for i in one.index)


def test_candidates_under_held_out_are_means_in_the_mixed_gallery(packs):
    means = tuning_rows(packs, "lda", protocol="held_out")
    assert "hit" not in means and "query" not in means
    assert set(means.index) == {(q, "mixed", 0, s) for q in ("seen", "unseen") for s in TUNING_STRENGTHS}
    path = build_config("path", "grocery", "lda", protocol="held_out")
    path = run_experiment(path, packs, device="cpu").set_index(["query_set", "gallery_kind"])
    for query_set in ("seen", "unseen"):
        assert means.lp_at_1[query_set, "mixed", 0, 1.0] == pytest.approx(path.lp_at_1[query_set, "mixed"], abs=2e-3)
    frozen = tuning_rows(packs, "frozen")
    assert set(frozen.index) == {(q, g, 0, 0.0) for q in ("seen", "unseen") for g in ("own", "mixed")}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_cached_table_resumes_after_interruption(tmp_path, ending):
    "The second call computes what the first did not, and the table equals that of an uninterrupted call."
    keys, made = [("042", 0.25), ("None", 1e-9), ("nan", 1234567.5)], []

    def compute(name, cap):
        made.append((name, cap))
        if len(made) == 3:
            raise KeyboardInterrupt
        return pd.DataFrame({"name": [name] * 2, "cap": cap, "value": [1 / 3, np.nan]})

    path, other = tmp_path / f"t.{ending}", tmp_path / f"u.{ending}"
    with pytest.raises(KeyboardInterrupt):
        cached_table(path, keys, ("name", "cap"), compute, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    whole = cached_table(path, keys, ("name", "cap"), compute, progress=False)
    assert made == [*keys, keys[2]]
    assert whole[["name", "cap"]].drop_duplicates().apply(tuple, axis=1).tolist() == keys
    assert whole.equals(cached_table(other, keys, ("name", "cap"), compute, progress=False))
    assert path.read_bytes() == other.read_bytes() and np.isclose(whole.value[0], 1 / 3, rtol=1e-14)
    assert whole.equals(cached_table(path, keys[:1], ("name", "cap"), lambda *key: 1 / 0, progress=False))
