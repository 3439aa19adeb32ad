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
from ega.experiments import grids, runs
from ega.experiments.grids import (
    GRIDS,
    Grid,
    ResultStore,
    Sweep,
    TunedGrid,
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
        assert set(es.split[s.fit]) == set(other.split[s.unseen_gallery]) == {"train"} and set(
            other.split[s.unseen_queries]
        ) == set(es.split[s.seen_queries]) == {"test"}
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


def test_unknown_names_are_refused(packs):
    for change, words in (
        (dict(benchmark="x"), "benchmark must be one of"),
        (dict(method="x"), "method must be a key of"),
        (dict(method="supcon tau=warm"), "name=number, got 'tau=warm'"),
        (dict(method="supcon tau"), "name=number"),
        (dict(method="supcon rho=1"), "no setting 'rho'; choose center, strength"),
        (dict(method="supcon strength=0.5"), "no setting 'strength'"),
        (dict(method="supcon strength=2", task="path"), "strength must be"),
    ):
        with pytest.raises(InputError, match=words):
            build_config(**(dict(task="unseen", benchmark="cub100", method="ega_paper") | change))
    with pytest.raises(InputError, match="methd"):
        parse_config(RunConfig, {"methd": "ega_paper"})
    base = build_config("unseen", "cub100", "ega_paper", **SMALL_TRAINING)
    for make, words in (
        (lambda: replace(base.loss, sampler="x"), "LossConfig.sampler"),
        (lambda: run_experiment(replace(base, task="x"), packs, device="cpu"), "task"),
        (lambda: run_experiment(replace(base, loss=replace(base.loss, kind="x")), packs, device="cpu"), "loss kind"),
    ):
        with pytest.raises(InputError, match=words):
            make()


@pytest.mark.parametrize("method", METHODS)
def test_method_runs_and_means_equal_those_of_its_queries(packs, method):
    rows = run_experiment(build_config("unseen", "cub100", method, **SMALL_TRAINING), packs, device="cpu").set_index(
        "query_set"
    )
    assert list(rows.index) == ["seen", "unseen"]
    for _, r in rows.iterrows():
        assert len(r["query"]) == len(r.hit) == len(r.neighbour) == len(r.ivf_ar) == r.n and np.isclose(
            r.hit.mean(), r.lp_at_1, atol=1e-6
        )
        es, other = load_embedding_sets(parse_config(RunConfig, json.loads(r.config)), packs)
        assert np.array_equal(other.y[r["query"]], r.query_class)
        if method != "no_residual":
            assert np.isclose(
                (other.y[r.neighbour] == r.query_class).mean(), r.lp_at_1, atol=0.03
            )  # its two points are ties: the first neighbour is any
    assert not (rows.loc["unseen", "neighbour"] == rows.loc["unseen", "query"]).any()
    assert len(rows.active_ratio_history.iloc[0]) == (SMALL_TRAINING["epochs"] if METHODS[method].loss else 0)


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
    a, b = ResultStore(tmp_path / "a", "unseen"), ResultStore(tmp_path / "b", "unseen")
    assert (
        run_grid(configs, a, packs, workers=2, progress=False) == 3
        and run_grid(configs[::-1], b, packs, workers=1, progress=False) == 3
    )
    a.merge_parts(), b.merge_parts()
    for column in ("run_id", "query_set", "lp_at_1", "ar_at_1", "displacement"):
        assert a.read()[column].equals(b.read()[column])
    for column in ("hit", "neighbour", "loss_history"):
        assert all(np.array_equal(p, q) for p, q in zip(a.read()[column], b.read()[column]))
    assert run_grid(configs, a, packs, progress=False) == 0 and not a.parts.exists()


GRID = textwrap.dedent("""
    import sys
    sys.path.insert(0, {tests!r})
    from test_runs import *
    if __name__ == "__main__":
        methods = ("frozen", "wccn", "ega_released", "supcon", "ega_paper")
        grid = Grid(
            "unseen", ("cub100", "grocery"), methods=methods, hidden=16, epochs=40, splits=(42,), seeds=(0, 1)
        )
        store = ResultStore({results!r}, "unseen")
        print(run_grid(list(grid.configs()), store, {packs!r}, workers=2, progress=False), len(store.ids()))
""")


def test_grid_resumes_after_three_kills(packs, tmp_path):
    script = tmp_path / "grid.py"
    script.write_text(GRID.format(tests=os.path.dirname(__file__), results=str(tmp_path / "killed"), packs=str(packs)))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    store, stamps = ResultStore(tmp_path / "killed", "unseen"), {}
    for kept in (1, 4, 8):
        process = subprocess.Popen(
            [sys.executable, str(script)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while len(store.ids()) < kept and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = {p.name: p.stat().st_mtime_ns for p in store.parts.glob("*.parquet")}
        assert stamps.items() <= now.items() and all(
            len(pd.read_parquet(store.parts / p)) for p in now
        )  # earlier parts are unchanged and complete
        stamps = now
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(done[1]) == 16 and int(done[0]) <= 16 - len(stamps)
    whole = ResultStore(tmp_path / "whole", "unseen")
    grid = Grid(
        "unseen",
        ("cub100", "grocery"),
        methods=("frozen", "wccn", "ega_released", "supcon", "ega_paper"),
        hidden=16,
        epochs=40,
        splits=(42,),
        seeds=(0, 1),
    )
    run_grid(list(grid.configs()), whole, packs, workers=2, progress=False)
    assert store.read()[["run_id", "query_set", "lp_at_1", "ar_at_1"]].equals(
        whole.read()[["run_id", "query_set", "lp_at_1", "ar_at_1"]]
    )


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
    script = tmp_path / "grid.py"
    script.write_text(
        INTERRUPT_INSIDE_LOCK
        + GRID.format(tests=os.path.dirname(__file__), results=str(tmp_path / "r"), packs=str(packs))
        .replace('"frozen", "wccn", ', "")
        .replace("epochs=40", "epochs=1_000_000")
    )  # the runs never finish
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr


def one_row(i):
    return pd.DataFrame(
        [dict(run_id=f"{i:016x}", query_set="unseen", benchmark="b", method="frozen", config="{}", lp_at_1=0.5)]
    )


def test_workers_exit_when_their_parent_is_killed(packs, tmp_path):
    script = tmp_path / "grid.py"
    script.write_text(
        GRID.format(tests=os.path.dirname(__file__), results=str(tmp_path / "r"), packs=str(packs)).replace(
            "epochs=40", "epochs=1_000_000"
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end, store = time.time() + 60, ResultStore(tmp_path / "r", "unseen")
    while len(store.ids()) < 2 and time.time() < end:
        time.sleep(0.1)  # both workers have finished a run
    left = children(process.pid)
    assert len(left) == 3 and all(map(alive, left))  # the third is multiprocessing's resource tracker
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.time() + 10
    while any(map(alive, left)) and time.time() < end:
        time.sleep(0.1)
    assert not any(map(alive, left))


def test_failing_run_stops_the_grid_and_keeps_finished_runs(packs, tmp_path):
    good, bad = (
        build_config("unseen", "cub100", "frozen"),
        replace(
            build_config("unseen", "cub100", "ega_paper", **SMALL_TRAINING),
            loss=replace(METHODS["ega_paper"].loss, kind="x"),
        ),
    )
    store = ResultStore(tmp_path, "unseen")
    with pytest.raises(InputError, match="loss kind"):
        run_grid([good, bad], store, packs, workers=1, progress=False)
    assert store.ids() == {good.run_id}


def test_two_stores_may_add_to_one_folder(packs, tmp_path):
    rows = run_experiment(build_config("unseen", "grocery", "frozen"), packs, device="cpu")
    a, b = ResultStore(tmp_path, "unseen"), ResultStore(tmp_path, "unseen")
    a.add(rows)
    b.add(rows.assign(seconds=9.0))
    a.add(rows.assign(run_id="f" * 16))
    a.merge_parts()
    b.merge_parts()
    assert len(a.read()) == 4 and a.ids() == {rows.run_id[0], "f" * 16} and not a.parts.exists()


def test_unreadable_result_file_is_reported(tmp_path):
    with pytest.raises(InputError, match="no results"):
        ResultStore(tmp_path, "unseen").read()
    (tmp_path / "unseen.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputError, match="no readable table"):
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
    line = (
        summarize(results, n_boot=50)
        .query("metric in ('lp_at_1', 'ar_at_1')")
        .set_index(["query_set", "method", "metric", "benchmark"])
        .sort_index()
    )
    for b in ("cub100", "grocery"):
        of = {
            m: results[(results.query_set == "unseen") & (results.benchmark == b) & (results.method == m)]
            for m in ("frozen", "supcon")
        }
        value = {
            m: np.concatenate([np.mean(np.stack(g.hit.to_list()), 0) for _, g in f.groupby("split_seed")]).mean() * 100
            for m, f in of.items()
        }
        assert np.isclose(line.loc[("unseen", "supcon", "lp_at_1", b)].value, value["supcon"]) and np.isclose(
            line.loc[("unseen", "supcon", "lp_at_1", b)]["diff"], value["supcon"] - value["frozen"]
        )
        assert (
            line.loc[("unseen", "frozen", "lp_at_1", b)]["diff_low"]
            == line.loc[("unseen", "frozen", "lp_at_1", b)]["diff_high"]
            == 0
        )
    both = line.loc[("unseen", "supcon", "lp_at_1")].loc[["cub100", "grocery"]]
    assert np.isclose(line.loc[("unseen", "supcon", "lp_at_1", "mean")].value, both.value.mean()) and np.isclose(
        line.loc[("unseen", "supcon", "lp_at_1", "worst")]["diff"], both["diff"].min()
    )
    assert (line.low <= line.value + 1e-9).all() and (line.value <= line.high + 1e-9).all()


def test_summary_interval_equals_a_bootstrap_over_classes_then_queries(results):
    "Against a plain loop over classes and queries, within the noise of two independent bootstraps."
    r = results[
        (results.query_set == "unseen")
        & (results.benchmark == "grocery")
        & (results.method == "supcon")
        & (results.split_seed == 42)
    ]
    only = results[(results.benchmark == "grocery") & (results.split_seed == 42)]
    line = (
        summarize(only, n_boot=4000)
        .query("query_set == 'unseen' and method == 'supcon' and metric == 'lp_at_1'")
        .iloc[0]
    )
    hits, classes, rng = np.mean(np.stack(r.hit.to_list()), 0), r.query_class.iloc[0], np.random.default_rng(1)
    groups = [hits[classes == c] for c in np.unique(classes)]
    means = []
    for _ in range(4000):
        drawn = [rng.choice(groups[g], len(groups[g])) for g in rng.integers(len(groups), size=len(groups))]
        means.append(np.concatenate(drawn).mean())
    assert np.allclose([line.low, line.high], 100 * np.percentile(means, [2.5, 97.5]), atol=2.5)


def test_every_quick_run_is_a_run_of_the_full_profile():
    full = {config.run_id for grid in GRIDS["full"].values() for config in grid.configs()}
    for grid in GRIDS["quick"].values():
        assert {config.run_id for config in grid.configs()} <= full


# ---- protocols of the audit


def test_sweep_changes_one_setting_and_names_it():
    grid = Grid("unseen", ("cub100",), hidden=16, epochs=1, splits=(42,), seeds=(0,))
    frozen, *moved = Sweep(grid, (("ega_released", {"margin": (0.05, 0.2)}), ("lora_supcon", {"rank": (8,)}))).configs()
    assert [c.method for c in moved] == [
        "ega_released margin=0.05",
        "ega_released margin=0.2",
        "lora_supcon rank=8",
    ] and frozen.method == "frozen"
    base = build_config("unseen", "cub100", "ega_released", hidden=16, epochs=1)
    assert (
        replace(moved[1], method="ega_released") == base
        and moved[0].loss == replace(base.loss, margin=0.05)
        and moved[2].adapter.rank == 8
    )
    assert len({c.run_id for c in (frozen, *moved, base)}) == 5


@pytest.mark.parametrize("benchmark", ["cub100", "grocery", "tiny200>cifar10"])
def test_held_out_protocol_uses_seen_classes_only(benchmark, packs):
    true, held = (build_config("unseen", benchmark, "frozen", protocol=p) for p in ("strict", "held_out"))
    es, other = load_embedding_sets(held, packs)
    a, b = build_split(true, *load_embedding_sets(true, packs)), build_split(held, es, other)
    known = set(es.y[a.fit])
    assert (
        other is es
        and not set(es.y[b.fit]) & set(es.y[b.unseen_queries])
        and set(es.y[b.fit]) | set(es.y[b.unseen_queries]) == known
    )
    assert abs(len(set(es.y[b.fit])) - 0.8 * len(known)) < 1
    if benchmark != "tiny200>cifar10":
        assert not known & set(es.y[a.unseen_queries])


def test_curve_at_strength_one_equals_the_run(packs):
    for method in ("wccn", "lda"):
        run = run_experiment(build_config("unseen", "grocery", method), packs).set_index("query_set")
        curve = (
            run_experiment(build_config("curve", "grocery", method), packs)
            .set_index(["query_set", "strength"])
            .sort_index()
        )
        frozen = run_experiment(build_config("unseen", "grocery", "frozen"), packs).set_index("query_set")
        for q in ("seen", "unseen"):
            assert np.array_equal(curve.loc[(q, 1.0)].hit, run.hit[q]) and np.array_equal(
                curve.loc[(q, 1.0)]["query"], run["query"][q]
            )
            assert np.isclose(curve.loc[(q, 0.5)].within.sum(), 1) and np.isclose(
                curve.loc[(q, 0.5)]["between"].sum(), 1
            )
    zero = run_experiment(build_config("curve", "grocery", "frozen"), packs).set_index("query_set")
    assert (zero.strength == 0).all() and all(np.array_equal(zero.hit[q], frozen.hit[q]) for q in ("seen", "unseen"))


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


def test_a_path_evaluated_at_its_end_has_the_same_rows_there(packs):
    "Frozen rows are searched once in a process; neither this nor fewer epochs changes a digit."
    config = build_config("path", "tiny200>cifar10", "supcon", **SMALL_TRAINING)
    every, end = (
        run_experiment(config, packs, device="cpu", path_epochs=e).drop(columns="seconds") for e in ((1, 2), (2,))
    )
    assert sorted(set(every.epoch)) == [0, 1, 2] and sorted(set(end.epoch)) == [0, 2]
    pd.testing.assert_frame_equal(every[every.epoch != 1].reset_index(drop=True), end)


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
        assert values["supcon", 2].iloc[1:].std() > 0
    with pytest.raises(InputError, match="frozen is missing"):
        path_replicates(rows[rows.method != "frozen"])


def test_changes_of_a_path_and_their_mean_over_benchmarks(packs):
    configs = [
        build_config("path", b, m, split_seed=0)
        for b in ("tiny200", "tiny200>cifar10", "cub100")
        for m in ("frozen", "wccn")
    ]
    rows = pd.concat([run_experiment(c, packs, device="cpu") for c in configs], ignore_index=True)
    replicates = path_replicates(rows, n_boot=50)
    table = path_changes(add_mean_over_benchmarks(replicates))
    printed = format_path_changes(table, "cub100", {"wccn": "WCCN"}).loc["WCCN", "unseen, mixed"]
    row = table.set_index(["benchmark", "query_set", "gallery_kind", "metric", "method"])
    row = row.loc[("cub100", "unseen", "mixed", "lp_at_1", "wccn")]
    assert printed == f"{row.change:+.1f} [{row.low:+.1f}, {row.high:+.1f}]"
    keys = ["benchmark", "query_set", "gallery_kind", "metric", "method"]
    table = table.set_index(keys)
    tiny, cifar, cub, mean = (table.loc[b] for b in ("tiny200", "tiny200>cifar10", "cub100", "mean"))
    wccn = ("own", "lp_at_1", "wccn")
    assert np.isclose(
        mean.change[("unseen", *wccn)], np.mean([t.change[("unseen", *wccn)] for t in (tiny, cifar, cub)])
    )
    of_tiny = (tiny.change[("seen", *wccn)] + cifar.change[("seen", *wccn)]) / 2
    assert np.isclose(mean.change[("seen", *wccn)], (of_tiny + cub.change[("seen", *wccn)]) / 2)
    values = replicates["cub100", "unseen", "own", "lp_at_1"]
    change = values["wccn", 0] - values["frozen", 0]
    assert np.isclose(cub.change[("unseen", *wccn)], change[0]) and (table.change != 0).any()
    assert np.isclose(cub.low[("unseen", *wccn)], np.percentile(change[1:], 2.5))
    frozen = table.xs("frozen", level="method")
    assert (frozen[["change", "low", "high"]] == 0).all(axis=None)


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


def test_stacked_columns_mix_similarities():
    from ega.experiments.runs import _at_strength

    rng = np.random.default_rng(0)
    x, z = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (rng.normal(size=(7, 5)), rng.normal(size=(7, 3))))
    e = _at_strength(x, z, 0.3)
    assert e.shape == (7, 8) and np.allclose(e @ e.T, 0.7 * x @ x.T + 0.3 * z @ z.T, atol=1e-6)


def test_choose_settings_takes_the_best_on_held_out_classes():
    def row(method, strength, seen, unseen, protocol="held_out"):
        return [
            dict(benchmark="cub100", split_seed=42, method=method, epoch=5, strength=strength)
            | dict(query_set=q, lp_at_1=v, protocol=protocol)
            for q, v in (("seen", seen), ("unseen", unseen))
        ]

    rows = (
        row("frozen", 0.0, 0.5, 0.99)
        + row("supcon tau=0.1", 0.5, 0.6, 0.8)
        + row("supcon tau=0.1", 1.0, 0.9, 0.7)
        + row("supcon tau=0.05", 0.5, 0.7, 0.8)
        + row("wccn shrinkage=0.3", 1.0, 0.1, 0.2)
    )
    chosen = choose_settings(pd.DataFrame(rows), unseen_share=1)
    assert chosen[["method", "strength"]].values.tolist() == [
        ["wccn shrinkage=0.3 epoch=5 strength=1", 1.0],
        ["supcon tau=0.05 epoch=5 strength=0.5", 0.5],
    ] and np.allclose(chosen.unseen, [20, 80])
    by_both = choose_settings(pd.DataFrame(rows), unseen_share=0.5)  # 0.9 and 0.7 against 0.7 and 0.8
    assert by_both[["method", "strength"]].values.tolist()[1] == ["supcon tau=0.1 epoch=5 strength=1", 1.0]
    with pytest.raises(InputError, match="under the protocol held_out, got strict"):
        choose_settings(pd.DataFrame(row("frozen", 0.0, 0.5, 0.5, "strict")), unseen_share=1)


def test_a_tuned_grid_runs_each_choice_on_its_split_alone(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    lines = ["benchmark,split_seed,method,strength", "cub100,42,supcon epoch=2 strength=0.5,0.5", "grocery,0,wccn,1"]
    (tmp_path / "data/chosen.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(grids.ega, "__file__", str(tmp_path / "ega/__init__.py"))
    grid = Grid("tuning", ("cub100", "grocery"), epochs=20, splits=(42, 0), seeds=(0,))
    *frozen, supcon, wccn = TunedGrid(grid, "chosen.csv").configs()
    assert len(frozen) == 4 and {c.method for c in frozen} == {"frozen"}
    assert (supcon.benchmark, supcon.split_seed, supcon.epoch) == ("cub100", 42, 2)
    assert (wccn.benchmark, wccn.split_seed, wccn.epoch) == ("grocery", 0, None)


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
    with pytest.raises(InputError, match="epoch of supcon epoch=21"):
        tuning_rows(packs, "supcon epoch=21")


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


# ---- cached tables


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_cached_table_resumes_after_interruption(tmp_path, ending):
    "The second call computes what the first did not, and the table equals that of an uninterrupted call."
    arms, made = [("a", 0.25), ("a", 1.0), ("b", 0.25)], []

    def rows(name, cap):
        if len(made) == 2 and made[-1] != "again":
            made.append("again")
            raise KeyboardInterrupt
        made.append((name, cap))
        return pd.DataFrame({"name": [name] * 2, "cap": cap, "value": [1 / 3, cap]})

    path = tmp_path / f"t.{ending}"
    with pytest.raises(KeyboardInterrupt):
        cached_table(path, arms, ("name", "cap"), rows, progress=False)
    assert made == [*arms[:2], "again"] and [p.name for p in tmp_path.iterdir()] == [path.name]
    whole = cached_table(path, arms, ("name", "cap"), rows, progress=False)
    assert (
        made == [*arms[:2], "again", arms[2]]
        and whole[["name", "cap"]].drop_duplicates().apply(tuple, axis=1).tolist() == arms
    )
    unbroken = cached_table(tmp_path / f"u.{ending}", arms, ("name", "cap"), rows, progress=False)
    assert (
        whole.equals(unbroken)
        and np.isclose(whole.value[0], 1 / 3, rtol=1e-14)
        and (tmp_path / f"u.{ending}").read_bytes() == path.read_bytes()
    )
    assert cached_table(path, arms, ("name", "cap"), lambda *a: 1 / 0, progress=False).equals(
        cached_table(path, arms[:1], ("name", "cap"), lambda *a: 1 / 0, progress=False)
    )


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    "arms",
    [
        [("042",), ("None",), ("nan",), ("",), ("1",), ("True",)],
        [(1 / 3,), (1234567.5,), (1e-9,)],
        [("a", 1), ("a", 2), ("a", 1)],
    ],
)
def test_cached_table_recognises_its_keys(tmp_path, ending, arms):
    keys, made = ["name", "n"][: len(arms[0])], []

    def rows(*arm):
        made.append(arm)
        return dict(zip(keys, arm)) | {"value": None if len(made) == 2 else 0.1}

    for _ in range(2):
        table = cached_table(tmp_path / f"t.{ending}", iter(arms), keys, rows, progress=False)
    assert (
        made == list(dict.fromkeys(arms))
        and list(table[keys].itertuples(index=False, name=None)) == made
        and table.value.isna().tolist() == [i == 1 for i in range(len(made))]
    )
