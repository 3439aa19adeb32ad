"""The benchmark harness and its contenders: measurements, order, equal work, and failing contenders."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from bench_contenders import broken_import, exiting, failing, recording, thread_variable

from ega.data.arrays import InputError
from ega.data.datasets import patch_torchvision
from ega.experiments import benchmarks, cli, harness
from ega.method.active_ratio import (
    index_rows_by_class,
    random_batch_triplets,
    random_dataset_triplets,
    triplet_active_ratio,
)
from ega.method.adapters import ReleasedEGA

SMALL = dict(n=240, d=32, classes=12, hidden=64, batch=64, epochs=1, margin=0.6, lr=1e-4)


def group(*setups, reference=None):
    return harness.Group(
        "test", "call", reference or setups[0].__name__, None, {f.__name__: f for f in setups}, ({},), ({},), 2
    )


def alive(pid):
    "Whether a process runs; a zombie does not."
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(p) for p in done]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    "The harness run on contenders of known cost."
    frame = pd.DataFrame(
        harness.run_group(
            harness.SELF_CHECKS, harness.SELF_CHECKS.sizes[0], repeats=2, folder=tmp_path_factory.mktemp("checks")
        )
    )
    return frame.set_index("contender")


def test_time_cpu_and_memory_of_known_contenders(checked):
    assert checked.wall_s["sleep"].between(0.05, 0.5).all() and (checked.cpu_s["sleep"] < 0.02).all()
    assert (checked.cpu_s["busy"] >= 0.05).all() and (checked.wall_s["busy"] > 0.045).all()
    if not checked.peak_rss_mb["sleep"].isna().any():
        assert 190 < checked.peak_rss_mb["memory"].min() - checked.peak_rss_mb["sleep"].max() < 260


def test_missing_package_is_listed_with_its_command(checked):
    assert (
        checked.status["not installed"]
        == "this needs the package 'no_such_package'; install it with: pip install 'ega[bench]'"
    )
    frame = checked.reset_index().assign(group="checks", floor=None)
    text = harness.format_ratios(frame)
    assert (
        "  not installed  " in text
        and "not installed: pip install 'ega[bench]'" in text
        and max(map(len, text.splitlines())) <= 80
    )


def test_contenders_alternate_in_processes_of_their_own(tmp_path):
    g = harness.Group("test", "call", "a", None, {"a": recording, "b": recording, "c": recording}, ({},), ({},))
    rows = harness.run_group(g, {}, repeats=3, folder=tmp_path)
    pids = (tmp_path / "order.txt").read_text().split()
    name = dict(zip(pids[:3], "abc"))  # in the warm-up
    assert len(name) == 3 and str(os.getpid()) not in name
    assert "".join(name[p] for p in pids[3:]) == "abcbcacab" == "".join(r["contender"] for r in rows)
    assert [r["repeat"] for r in rows] == [0] * 3 + [1] * 3 + [2] * 3


def test_shared_worker_runs_all_contenders_in_one_process(tmp_path):
    worker = harness.Worker(tmp_path, 1)
    g = harness.Group(
        "test",
        "call",
        "a",
        None,
        {"a": recording, "b": recording, "absent": harness.missing_package_contender},
        ({},),
        ({},),
    )
    try:
        rows = harness.run_group(g, {}, repeats=1, folder=tmp_path, worker=worker)
    finally:
        worker.close()
    assert len(set((tmp_path / "order.txt").read_text().split())) == 1 and [r["status"] == "ok" for r in rows] == [
        False,
        True,
        True,
    ]


def test_thread_count_is_set_in_the_environment(tmp_path):
    assert harness.run_group(group(thread_variable), {}, threads=3, repeats=1, folder=tmp_path)[0]["rho"] == 3
    (row,) = harness.run_group(group(thread_variable), {"threads": 2}, threads=3, repeats=1, folder=tmp_path)
    assert row["rho"] == row["threads"] == 2


@pytest.mark.parametrize(
    "setup, words",
    [
        (failing, "'failing' ended with exit code 1.*no apples today"),
        (exiting, "'exiting' ended with exit code 7"),
        (broken_import, "No module named 'ega.no_such_part'"),
    ],
)
def test_crash_is_reported_and_leaves_no_process(tmp_path, setup, words):
    with pytest.raises(RuntimeError, match=words):
        harness.run_group(
            group(harness.sleep_contender, setup), {"seconds": 0.01, "fruit": "apples"}, repeats=1, folder=tmp_path
        )
    assert not [p for p in children(os.getpid()) if alive(p)]


def test_killed_benchmark_leaves_no_process_and_no_folder(tmp_path):
    code = """if True:
        import sys, tempfile; sys.path.insert(0, {tests!r})
        from ega.experiments import benchmarks, harness; import bench_contenders as t
        contenders = {{"a": harness.sleep_contender, "b": t.slow}}
        benchmarks.GROUPS["slow"] = harness.Group("slow", "call", "a", None, contenders, ({{"seconds": .01}},), ())
        benchmarks.write_results(benchmarks.run_benchmarks(["slow"]), {out!r})""".format(
        tests=str(Path(__file__).parent), out=str(tmp_path / "out")
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        end = time.monotonic() + 60
        while len(started := children(parent.pid)) < 2:
            assert parent.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1)
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + 20
    while any(map(alive, started)) or any(tmp_path.iterdir()):
        assert time.monotonic() < end, (started, list(tmp_path.iterdir()))
        time.sleep(0.1)


# -- the same work -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return benchmarks.benchmark_data(SMALL, tmp_path_factory.mktemp("data"))


def gradient(adapter, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, adapter.parameters())])


def blocks(start):
    "The adapter of the other contenders and ours, with the same weights."
    ours = ReleasedEGA(32, hidden=64, gen=torch.Generator())
    ours.load_state_dict(start.state)
    return benchmarks.torch_released_ega(32, 64, start.state), ours


def seeded():
    return torch.Generator().manual_seed(3)


def assert_same(*gradients):
    "Equal to 1e-5 of the largest entry: float32 sums of some hundred terms in another order."
    first = gradients[0]
    assert first.abs().max() > 1e-4
    for g in gradients[1:]:
        assert (g - first).abs().max() < 1e-5 * first.abs().max()


def test_whole_set_contenders_have_equal_gradients(start):
    from ega.method.training import dataset_triplet_objective

    rows, index = torch.arange(0, 240, 3), index_rows_by_class(start.y)
    t = random_dataset_triplets(index, rows, gen=seeded())

    class GivenTriplets(benchmarks.PerItemTripletDataset):
        def draw(self, i):
            j = t.a.tolist().index(i)
            return t.p[j], t.n[j]

    (apn,) = torch.utils.data.DataLoader(GivenTriplets(start.x, start.y.numpy()), batch_size=80, sampler=rows.tolist())
    plain, ours = blocks(start)
    assert_same(
        gradient(plain, benchmarks.three_pass_triplet_loss(start)(plain, apn, None)),
        gradient(plain, benchmarks.one_pass_dataset_triplet_loss(start)(plain, rows, seeded())),
        gradient(ours, dataset_triplet_objective(0.6, index)(ours, start.x, start.y, rows, seeded()).loss),
    )


def test_in_batch_contenders_have_equal_gradients(start):
    from pytorch_metric_learning import losses, reducers

    from ega.method.training import batch_triplet_objective

    rows = torch.arange(0, 240, 2)
    t, (plain, ours) = random_batch_triplets(start.y[rows], gen=seeded()), blocks(start)
    z = plain(start.x[rows])
    pml = losses.TripletMarginLoss(margin=0.6, reducer=reducers.MeanReducer())
    assert_same(
        gradient(ours, batch_triplet_objective(0.6)(ours, start.x, start.y, rows, seeded()).loss),
        gradient(plain, torch.nn.TripletMarginLoss(margin=0.6)(z[t.a], z[t.p], z[t.n])),
        gradient(plain, pml(plain(start.x[rows]), start.y[rows], tuple(t))),
    )


def test_supcon_contenders_have_equal_gradients(start):
    from pytorch_metric_learning.losses import SupConLoss

    from ega.method.losses import supcon

    plain, ours = blocks(start)
    rows, y = start.x[::2], start.y[::2]
    assert_same(
        gradient(ours, supcon(ours(rows), y, tau=0.07)),
        gradient(plain, benchmarks._torch_supcon_loss(plain(rows), y)),
        gradient(plain, SupConLoss(temperature=0.07)(plain(rows), y)),
    )


def test_nca_contenders_have_equal_gradients(start):
    from pytorch_metric_learning.losses import NCALoss

    from ega.method.losses import nca

    plain, ours = blocks(start)
    rows, y = start.x[::2], start.y[::2]
    assert_same(
        gradient(ours, nca(ours(rows), y, tau=0.07)),
        gradient(plain, benchmarks._torch_nca_loss(plain(rows), y)),
        gradient(plain, NCALoss(softmax_scale=1 / 0.14)(plain(rows), y)),
    )


def test_torch_adapter_has_no_sparse_backward(start):
    plain, ours = blocks(start)
    assert type(plain.branch[0]) is torch.nn.Linear and not isinstance(plain.branch, type(ours.branch))
    assert plain.training and torch.allclose(plain(start.x), ours(start.x), atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "torch_dataloader_dataset_triplets",
        "torch_dataset_triplets",
        "torch_batch_triplets",
        "torch_supcon",
        "torch_nca",
        "pml_one_triplet_per_anchor",
        "pml_all_triplets",
        "pml_supcon",
        "pml_nca",
        "pml_trainer",
        "ega_dataset_triplets",
        "ega_batch_triplets",
        "ega_supcon",
        "ega_nca",
    ],
)
def test_training_contenders_train_from_the_same_state(tmp_path, start, monkeypatch, name):
    "Each repeat starts from the same weights and moves them by about the learning rate a step."
    made, block = [], benchmarks.torch_released_ega
    monkeypatch.setattr(benchmarks, "torch_released_ega", lambda *args: made.append(block(*args)) or made[-1])

    class Ours(ReleasedEGA):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            made.append(self)

    monkeypatch.setattr("ega.method.adapters.ReleasedEGA", Ours)
    torch.save(start.state, tmp_path / "warm-240-32-12-64-64.pt")
    job = getattr(benchmarks, name)(SMALL, tmp_path)
    job.prepare()
    assert all(torch.equal(v, start.state[k]) for k, v in made[-1].state_dict().items())
    returned = job.run()
    moved = max((v - start.state[k]).abs().max() for k, v in made[-1].state_dict().items())
    assert 1e-4 < moved < 1e-3 and job.n_units in (3, 3.75)
    if name.startswith("ega_"):
        assert 0 < returned["rho"] <= 1


@pytest.mark.parametrize("name", ["sentence_transformers_dataset_triplets", "sentence_transformers_batch_triplets"])
def test_sentence_transformers_trains_from_the_same_state(tmp_path, start, monkeypatch, name):
    patch_torchvision()  # a broken one would keep sentence-transformers from being imported
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made, block = [], benchmarks.torch_released_ega
    monkeypatch.setattr(benchmarks, "torch_released_ega", lambda *args: made.append(block(*args)) or made[-1])
    torch.save(start.state, tmp_path / "warm-240-32-12-64-64.pt")
    job = getattr(benchmarks, name)(SMALL, tmp_path)
    job.prepare()
    job.run()
    job.prepare()
    assert all(torch.equal(v, start.state[k]) for k, v in made[-1].state_dict().items())  # every repeat starts afresh
    job.run()
    assert 1e-4 < max((v - start.state[k]).abs().max() for k, v in made[-1].state_dict().items()) < 1e-3


def test_item_triplets_draw_as_the_released_code():
    items = benchmarks.PerItemTripletDataset(torch.eye(6), np.array([0, 0, 1, 1, 2, 2]))
    drawn = np.array([items.draw(0) for _ in range(300)])
    assert set(drawn[:, 0]) == {0, 1} and set(drawn[:, 1]) == {2, 3, 4, 5}  # the anchor may be its own positive
    assert all(torch.equal(a, torch.eye(6)[4]) for a in items[4][:1])


def test_active_ratio_at_full_size_is_a_few_percent(tmp_path):
    "At full size (some seconds): a few percent after the warm-up, as on Aircraft."
    size = benchmarks._AIRCRAFT | {"hidden": 512}
    full = benchmarks.benchmark_data(size, tmp_path)
    t = random_dataset_triplets(index_rows_by_class(full.y), torch.arange(2664), gen=seeded())
    with torch.no_grad():
        z = benchmarks.torch_released_ega(512, 512, full.state)(full.x)
    assert 0.005 < triplet_active_ratio(z, t, 0.2).rho <= 0.05


@pytest.mark.parametrize("rho", [0.05, 0.3, 1.0])
def test_margin_for_reaches_the_active_ratio(start, rho):
    t = random_dataset_triplets(index_rows_by_class(start.y), torch.arange(240), gen=torch.Generator().manual_seed(2))
    with torch.no_grad():
        z = benchmarks.torch_released_ega(32, 64, start.state)(start.x)
    assert abs(triplet_active_ratio(z, t, benchmarks.margin_for_active_ratio(start, rho)).rho - rho) < 0.01


def test_floors_count_the_rows_of_a_step(start):
    "Against brute force on the first step of the epoch that is replayed."
    for draw in (benchmarks._whole_set_draw(start), benchmarks._in_batch_draw(start)):
        steps = benchmarks.count_distinct_and_active_rows(start, draw)
        gen = torch.Generator().manual_seed(1)
        rows = torch.randperm(240, generator=gen).split(64)[0]
        t, forward = draw(rows, gen)
        with torch.no_grad():
            z = benchmarks.torch_released_ega(32, 64, start.state)(start.x)
        still = [i for i in range(len(t.a)) if (z[t.a[i]] - z[t.p[i]]).norm() + 0.6 > (z[t.a[i]] - z[t.n[i]]).norm()]
        touched = {int(part[i]) for part in t for i in still}
        assert steps[0] == (len(set(forward.tolist())), len(touched)) and len(steps) == 4


def test_search_contenders_find_the_same_neighbours():
    faiss = pytest.importorskip("faiss")
    size = {"n": 400, "d": 16, "queries": 30, "k": 10}
    xb, xq = benchmarks._gallery(size)
    D, I = benchmarks.faiss_loo(size, None).run()
    from ega.measure.search import ivf_sweep, loo_knn

    assert (loo_knn(xb, 10, device="cpu").I == I).mean() > 0.99  # ties alone may differ
    swept = ivf_sweep(xq, xb, nlist=10, nprobes=(1, 5), k=10, device="cpu")
    index = benchmarks._faiss_ivf(faiss, xb)
    for p in (1, 5):
        index.nprobe = p
        assert (index.search(xq, 10)[1] == swept[p].I).mean() > 0.99


# -- a whole fit -------------------------------------------------------------------------------------------

FIT = dict(n=300, d=16, classes=20, limit_s=30, batch=60, lr=1e-3, new_process=True, busy=1)


def test_fit_rows_are_unit_rows_of_two_sets_of_classes(tmp_path):
    for name, rows_at_once in (("a", 7), ("b", 2**16)):
        (tmp_path / name).mkdir()
        benchmarks._write_fit_data(tmp_path / name, 300, 16, 20, rows_at_once)
    for name in benchmarks.FitData._fields:
        a, b = (np.load(tmp_path / folder / f"{name}.npy") for folder in "ab")
        assert np.allclose(a, b, atol=1e-6)  # products of blocks of another size
    fit = benchmarks.fit_data(FIT, tmp_path)
    assert fit.x.shape == (300, 16) and len(set(fit.y)) == 20 and len(set(fit.y_unseen)) == 5
    assert np.allclose(np.linalg.norm(np.r_[fit.x, fit.x_unseen], axis=1), 1, atol=1e-6)
    again = benchmarks.fit_data(FIT, tmp_path)
    assert np.array_equal(fit.x, again.x) and len(list(tmp_path.glob("fit-*"))) == 1


def test_fit_clock_counts_no_measurement_and_ends_at_target_or_limit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(benchmarks.time, "perf_counter", lambda: now[0])
    labels = np.repeat(np.arange(5), 2)
    good = np.eye(5, dtype=np.float32)[labels]
    lines = {"good": good, "bad": np.roll(good, 1, axis=0)}  # LP@1 of 1 and 0
    data = benchmarks.FitData(None, None, good, labels)

    def pass_and_transform(name):
        def transform(x):
            now[0] += 50  # a measurement
            return lines[name]

        return transform

    clock = benchmarks.FitClock(data, 10, target=0.5)
    clock.start()
    over = []
    for name in ("bad", "bad", "good"):
        now[0] += 1
        over.append(clock.is_over(pass_and_transform(name)))
    clock.stop()
    assert over == [False, False, True] and clock.wall_s == 3 and clock.lp_at_1 == 1

    clock = benchmarks.FitClock(data, 10, target=0.5)
    clock.start()
    for seconds, over in ((9.5, False), (1, True)):
        now[0] += seconds
        assert clock.is_over(pass_and_transform("bad")) == over
    assert clock.lp_at_1 == 0


def test_fit_in_a_new_process_beside_a_busy_one_leaves_neither(tmp_path):
    timed = harness.time_once(benchmarks.floor_fit(FIT, tmp_path))
    assert 0 < timed["wall_s"] < 5 and timed["cpu_s"] > 0 and timed["work"] == 1 and np.isnan(timed["lp_at_1"])
    assert not [p for p in children(os.getpid()) if alive(p)]


def test_busy_processes_use_a_core_and_end():
    with harness.busy_processes(1):
        (busy,) = (p for p in children(os.getpid()) if alive(p))
        end = time.monotonic() + 30
        while sum(map(int, Path(f"/proc/{busy}/stat").read_text().split(")")[-1].split()[11:13])) < 20:
            assert time.monotonic() < end  # 0.2 seconds of CPU time
            time.sleep(0.05)
    assert not alive(busy)


@pytest.mark.parametrize("fit", ["fit_with_pml", "fit_with_sentence_transformers", "fit_with_nca"])
def test_other_libraries_stop_at_the_label_precision_of_ega(tmp_path, fit):
    patched = patch_torchvision()  # noqa: F841
    pytest.importorskip({"fit_with_pml": "pytorch_metric_learning", "fit_with_nca": "sklearn"}.get(fit, "datasets"))
    assert benchmarks.time_fit("fit_with_ega", FIT, tmp_path)["lp_at_1"] > 0
    target = tmp_path / "lp-300-16.json"
    target.write_text("0.01")
    done = benchmarks.time_fit(fit, FIT, tmp_path)
    assert done["lp_at_1"] >= 0.01 and done["wall_s"] < 30
    target.write_text("2")
    done = benchmarks.time_fit(fit, FIT | {"limit_s": 0.5}, tmp_path)
    assert done["wall_s"] < 15 and done["lp_at_1"] < 2
    assert done["wall_s"] >= 0.5 or fit == "fit_with_nca"  # which converges


def test_pairs_of_a_million_rows_do_not_fit(tmp_path):
    size = FIT | {"n": 10**6}
    with pytest.raises(harness.NotRunError, match="needs 29,802 GB"):
        benchmarks.nca_fit(size, tmp_path)
    g = group(harness.sleep_contender, benchmarks.nca_fit)
    rows = harness.run_group(g, size | {"seconds": 0.01}, repeats=1, folder=tmp_path)
    assert [r["status"] for r in rows] == ["needs 29,802 GB for all pairs of rows", "ok"]


def test_groups_that_take_hours_run_only_when_named(monkeypatch):
    named = []
    monkeypatch.setattr(benchmarks, "run_group", lambda g, *args, **kw: named.append(g.title) or [])
    everything = {g.title for g in benchmarks.GROUPS.values()}
    hours = {benchmarks.GROUPS["fit"].title}
    for arguments, expected in (
        (dict(), everything - hours),
        (dict(quick=True), everything),
        (dict(groups=["fit"]), hours),
    ):
        named.clear()
        benchmarks.run_benchmarks(**arguments)
        assert set(named) == expected


# -- ratios, table, command --------------------------------------------------------------------------------


def worked():
    "Two rounds: plain 2 and 1.5 s a unit; quick .5 and .25; halves 1 and 1.5."
    rows = [
        ("plain", 0, 8.0, 4.0),
        ("plain", 1, 6.0, 4.0),
        ("quick", 0, 2.0, 4.0),
        ("quick", 1, 1.0, 4.0),
        ("halves", 0, 2.0, 2.0),
        ("halves", 1, 3.0, 2.0),
    ]
    frame = pd.DataFrame(rows, columns=["contender", "repeat", "wall_s", "work"])
    return frame.assign(
        cpu_s=frame.wall_s * 2,
        peak_rss_mb=[100, 100, 50, 50, 200, 200],
        group="g",
        size="{}",
        reference="plain",
        floor="quick",
        status="ok",
        title="two rounds",
        unit="call",
        threads=1,
        rho=np.nan,
    )


def test_ratios_are_formed_within_a_round():
    r = ratios = harness.ratios(worked()).set_index("contender")
    assert np.allclose(r.speed, [1, 5, 1.5]) and np.allclose([r.low["quick"], r.high["quick"]], [4.5, 5.5])  # 4 and 6
    assert (
        np.allclose(r.cpu, [1, (1 / 4 + 1 / 6) / 2, 0.75])
        and np.allclose(r.memory, [1, 0.5, 2])
        and np.allclose(r.over_floor, [5, 1, 4])
    )
    assert np.allclose(r.best, [1, 6, 1.5]) and np.allclose(r.best_over_floor, [6, 1, 4])  # 1.5, .25 and 1 s a unit
    assert ratios.rounds.tolist() == [2] * 3 and (harness.ratios(worked(), "halves").reference == "halves").all()


def test_ratios_without_the_reference_are_nan():
    frame = worked()
    gone = frame[frame.contender != "plain"]
    absent = frame.iloc[[0]].assign(
        repeat=-1, status="this needs the package 'x'; install it with: pip install 'ega[bench]'", wall_s=np.nan
    )
    r = harness.ratios(pd.concat([absent, gone])).set_index("contender")
    assert (
        r.speed.isna().all()
        and np.allclose(r.over_floor[["quick", "halves"]], [1, 4])
        and "not installed" in harness.format_ratios(pd.concat([absent, gone]))
    )


def test_groups_are_complete():
    for name, g in benchmarks.GROUPS.items():
        assert (
            {g.reference} | ({g.floor} - {None}) <= set(g.contenders) and g.sizes and g.quick_sizes and g.repeats >= 3
        ), name
        assert all(len(n) <= 24 for n in g.contenders) and all(
            getattr(benchmarks, f.__name__) is f for f in g.contenders.values()
        )


@pytest.mark.parametrize("wrong", [dict(groups=["grid"]), dict(threads=0), dict(threads=True)])
def test_invalid_arguments_are_refused(wrong):
    with pytest.raises(InputError):
        benchmarks.run_benchmarks(**wrong)


def test_machine_description_is_complete():
    about = benchmarks.describe_machine()
    assert (
        about["cores"] >= 1
        and about["memory_gb"] > 0
        and about["cpu"]
        and "torch" in json.loads(about["versions"])
        and "torch" in about["machine"]
    )


def test_bench_command_runs_every_contender(tmp_path, capsys):
    "`ega-paper bench --quick`; on two free cores half a minute."
    begun = time.monotonic()
    assert cli.main(["bench", "--quick", "--out", str(tmp_path / "out")]) == 0
    seconds, out = time.monotonic() - begun, capsys.readouterr().out
    frame = pd.read_parquet(tmp_path / "out/speed.parquet")
    assert set(frame.group) == set(benchmarks.GROUPS) and all(
        c in out for g in benchmarks.GROUPS.values() for c in g.contenders
    )
    assert set(frame[frame.status != "ok"].contender) <= {
        "PML",
        "PML, trainer",
        "PML, one an anchor",
        "PML, all triplets",
        "sentence-transformers",
        "in turn",
        "ega",
        "encoder alone",
    }
    assert (
        (frame[frame.status == "ok"].wall_s > 0).all()
        and max(map(len, out.splitlines()[:-1])) <= 80
        and [p.name for p in (tmp_path / "out").iterdir()] == ["speed.parquet"]
    )
    assert seconds < 60 * max(
        1, os.getloadavg()[0] / len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    )


def test_bench_command_prints_ratios_as_json(tmp_path, capsys):
    assert cli.main(["bench", "--quick", "--groups", "exact", "--json", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    assert {r["contender"] for r in rows} == {"FAISS", "ega"} and "4 rows" in said.err
    assert cli.main(["bench", "--groups", "grid"]) == 2
