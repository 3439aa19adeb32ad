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
from bench_contenders import exiting, failing, recording

from ega.experiments.summary import speed_ratios
from ega.method.active_ratio import (
    index_rows_by_class,
    random_dataset_triplets,
)
from ega.method.adapters import ReleasedEGA

SMALL = dict(n=240, d=32, classes=12, hidden=64, batch=64, epochs=1, margin=0.6, lr=1e-4)


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


@pytest.mark.parametrize("setup, words", [(failing, "no apples today"), (exiting, "exit code 7")])
def test_crash_is_reported_and_leaves_no_process(tmp_path, setup, words):
    before = children(os.getpid())  # of other tests in this process
    contenders = {"sleep": harness.sleep_contender, "other": setup}
    g = harness.Group("test", "call", "sleep", None, contenders, ({},), ({},), 2)
    with pytest.raises(RuntimeError, match=words):
        harness.run_group(g, {"seconds": 0.01, "fruit": "apples"}, repeats=1, folder=tmp_path)
    assert not [p for p in children(os.getpid()) if p not in before and alive(p)]


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
    ratios = speed_ratios(worked()).set_index("contender")
    expected = dict(speed=[1, 5, 1.5], cpu=[1, (1 / 4 + 1 / 6) / 2, 0.75], memory=[1, 0.5, 2], over_floor=[5, 1, 4])
    expected |= dict(best=[1, 6, 1.5], best_over_floor=[6, 1, 4])  # the shortest: 1.5, .25 and 1 s a unit
    assert all(np.allclose(ratios[name], values) for name, values in expected.items())
    assert np.allclose([ratios.low["quick"], ratios.high["quick"]], [4.5, 5.5])  # 4 and 6
    assert (ratios.rounds == 2).all() and (speed_ratios(worked(), "halves").reference == "halves").all()


def test_every_contender_runs(tmp_path):
    "`python benchmarks/run.py --quick`; a package that is missing is a status and not an error."
    command = [sys.executable, Path(benchmarks.__file__).with_name("run.py"), "--quick", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    frame = pd.read_parquet(tmp_path / "out/speed.parquet")
    assert set(frame.group) == set(benchmarks.GROUPS) and (frame[frame.status == "ok"].wall_s > 0).all()
    assert all(name in done.stdout for g in benchmarks.GROUPS.values() for name in g.contenders)
    assert {"ega", "floor"} <= set(frame[frame.status == "ok"].contender)
