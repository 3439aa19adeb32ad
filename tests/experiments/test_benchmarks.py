"""The benchmark harness and its contenders: measurements, order, equal work, and failing contenders."""

import os
import subprocess
import sys
from pathlib import Path

import contenders as benchmarks
import harness
import numpy as np
import pandas as pd
import pytest
import torch
from bench_contenders import broken_import, exiting, failing, recording

from ega.data.datasets import patch_torchvision
from ega.experiments.summary import speed_ratios
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


def test_contenders_alternate_in_processes_of_their_own(tmp_path):
    g = harness.Group("test", "call", "a", None, {"a": recording, "b": recording, "c": recording}, ({},), ({},))
    rows = harness.run_group(g, {}, repeats=3, folder=tmp_path)
    pids = (tmp_path / "order.txt").read_text().split()
    name = dict(zip(pids[:3], "abc"))  # in the warm-up
    assert len(name) == 3 and str(os.getpid()) not in name
    assert "".join(name[p] for p in pids[3:]) == "abcbcacab" == "".join(r["contender"] for r in rows)
    assert [r["repeat"] for r in rows] == [0] * 3 + [1] * 3 + [2] * 3


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
    r = ratios = speed_ratios(worked()).set_index("contender")
    assert np.allclose(r.speed, [1, 5, 1.5]) and np.allclose([r.low["quick"], r.high["quick"]], [4.5, 5.5])  # 4 and 6
    assert (
        np.allclose(r.cpu, [1, (1 / 4 + 1 / 6) / 2, 0.75])
        and np.allclose(r.memory, [1, 0.5, 2])
        and np.allclose(r.over_floor, [5, 1, 4])
    )
    assert np.allclose(r.best, [1, 6, 1.5]) and np.allclose(r.best_over_floor, [6, 1, 4])  # 1.5, .25 and 1 s a unit
    assert ratios.rounds.tolist() == [2] * 3 and (speed_ratios(worked(), "halves").reference == "halves").all()


def test_groups_are_complete():
    for name, g in benchmarks.GROUPS.items():
        assert (
            {g.reference} | ({g.floor} - {None}) <= set(g.contenders) and g.sizes and g.quick_sizes and g.repeats >= 3
        ), name
        assert all(len(n) <= 24 for n in g.contenders) and all(
            getattr(benchmarks, f.__name__) is f for f in g.contenders.values()
        )


def test_every_contender_runs(tmp_path):
    "`python benchmarks/run.py --quick`; a package that is missing is a status and not an error."
    command = [sys.executable, Path(benchmarks.__file__).with_name("run.py"), "--quick", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    frame = pd.read_parquet(tmp_path / "out/speed.parquet")
    assert set(frame.group) == set(benchmarks.GROUPS) and (frame[frame.status == "ok"].wall_s > 0).all()
    assert all(name in done.stdout for g in benchmarks.GROUPS.values() for name in g.contenders)
    assert {"ega", "floor"} <= set(frame[frame.status == "ok"].contender)
