"The number of threads inside the library, and that it is afterwards what it was before."

import math
import threading

import joblib
import numpy as np
import pytest
import torch
from threadpoolctl import ThreadpoolController, threadpool_limits

from ega import EmbeddingAdapter, estimator, selection
from ega.data import threads
from ega.data.arrays import normalize, spawn_rngs
from ega.data.threads import PARALLEL_FLOPS, limit_threads, usable_cores
from ega.measure import search
from ega.method import methods
from ega.method.adapters import LinearAdapter
from ega.method.closed_form import WCCN
from ega.method.config import TrainConfig, build_method_config
from ega.method.training import Objective, pairwise_objective, train
from ega.testing import simplex_vertices


def numbers():
    "The number of threads of torch and of every other library."
    pools = ThreadpoolController().info()
    return [torch.get_num_threads()] + sorted((pool["filepath"], pool["num_threads"]) for pool in pools)


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    "Three threads in every library, on a process with four cores, as far as `limit_threads` is told."
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    before = torch.get_num_threads()
    with threadpool_limits(3):
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)


def world():
    "Twelve classes that scatter along four shared directions."
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(12, 14, 12)) * np.r_[np.full(4, 3.0), np.full(8, 0.2)]
    return (rng.normal(size=(12, 1, 12)) + noise).reshape(-1, 12), np.repeat(np.arange(12), 14)


@pytest.mark.parametrize(
    "cores, flops, n_threads",
    [(4, 0, 1), (4, PARALLEL_FLOPS - 1, 1), (4, PARALLEL_FLOPS, 3), (2, PARALLEL_FLOPS, 2), (1, PARALLEL_FLOPS, 1)],
)
def test_small_products_have_one_thread_and_large_ones_all_that_are_set(monkeypatch, cores, flops, n_threads):
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    before = numbers()
    with limit_threads(flops):
        inside = numbers()
        assert inside[0] == n_threads and {n for _, n in inside[1:]} == {n_threads}
    assert numbers() == before and before[0] == 3


def test_number_set_by_the_user_is_the_most():
    pool = next(p for p in ThreadpoolController().lib_controllers if p.user_api == "blas")
    torch.set_num_threads(2)
    pool.set_num_threads(1)
    with limit_threads(PARALLEL_FLOPS):
        assert torch.get_num_threads() == 2 and pool.num_threads == 1
    assert torch.get_num_threads() == 2 and pool.num_threads == 1


def test_blocks_inside_may_use_more_unless_the_outer_one_says_how_many():
    seen = []
    with limit_threads():
        with limit_threads(PARALLEL_FLOPS):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
    with limit_threads(most=2), limit_threads(PARALLEL_FLOPS), limit_threads(PARALLEL_FLOPS, most=3):
        seen.append(torch.get_num_threads())
    assert seen == [3, 1, 2] and torch.get_num_threads() == 3


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_overlapping_blocks_of_two_threads_restore_the_first_number(first_ends_first):
    before, inside, end = numbers(), threading.Event(), threading.Event()
    found = {}

    def other():
        torch.get_num_threads()
        with limit_threads():
            inside.set()
            end.wait(10)
        found["other"] = torch.get_num_threads()

    thread = threading.Thread(target=other)
    with limit_threads():
        thread.start()
        assert inside.wait(10)
        if not first_ends_first:
            end.set()
            thread.join()
        assert torch.get_num_threads() == 1
    end.set()
    thread.join()
    assert numbers() == before and found == {"other": 3}


def test_number_that_all_python_threads_share_is_restored_with_the_last_block():
    settings, shared, own = threads._ThreadSettings(), [], []
    settings.settings, settings.n_blocks = [(shared.append, 3, True), (own.append, 3, False)], 2
    settings.leave(None)
    assert shared == [] and own == [3]
    settings.leave(None)
    assert shared == [3] and own == [3, 3]


class Stop(Exception):
    pass


@pytest.mark.parametrize("raised", [None, Stop, KeyboardInterrupt])
def test_fit_restores_the_threads(monkeypatch, raised):
    before, seen = numbers(), []

    def watch(module, name):
        function = getattr(module, name)

        def watched(*args, **kwargs):
            seen.append(numbers())
            if raised and len(seen) == 4:
                raise raised
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(selection, "fit_path")  # of two folds
    watch(estimator, "fit_adapter")
    watch(estimator, "adapter_fingerprint")
    adapter = EmbeddingAdapter(candidates=("wccn",), cv=2, strengths=(1.0,), device="cpu")
    if raised:
        with pytest.raises(raised):
            adapter.fit(*world())
    else:
        adapter.fit(*world())
    assert len(seen) == 4 and numbers() == before
    assert all(first == 1 and {n for _, n in rest} == {1} for first, *rest in seen)


@pytest.mark.parametrize("batch, n_threads", [(8, 1), (10**6, 3)])
def test_training_chooses_by_the_products_of_a_step(monkeypatch, batch, n_threads):
    "The product of a batch of all 48 rows with itself reaches the limit, that of a batch of 8 rows does not."
    monkeypatch.setattr(threads, "PARALLEL_FLOPS", 2 * 48 * 48 * 4)
    x, y, seen = np.tile(np.eye(4, dtype="float32"), (12, 1)), np.tile(np.arange(4), 12), []

    def step(forward, x, y, rows, uniforms):
        seen.append(torch.get_num_threads())
        return objective.step(forward, x, y, rows, uniforms)

    objective = pairwise_objective(lambda z, y: z.square().mean())
    config = TrainConfig(epochs=1, batch_size=batch)
    train(LinearAdapter(4), Objective(step), x, y, rngs=spawn_rngs(0), config=config, device="cpu")
    assert set(seen) == {n_threads} and torch.get_num_threads() == 3


@pytest.mark.parametrize("of", ["knn", "loo_knn"])
def test_search_chooses_by_its_size(monkeypatch, of):
    seen, product = [], search.linear
    monkeypatch.setattr(search, "linear", lambda *a: seen.append(torch.get_num_threads()) or product(*a))
    x = simplex_vertices(5)
    for limit, n_threads in ((2 * len(x) ** 2 * x.shape[1], 3), (2 * len(x) ** 2 * x.shape[1] + 1, 1)):
        monkeypatch.setattr(threads, "PARALLEL_FLOPS", limit)
        search.loo_knn(x, 2, device="cpu") if of == "loo_knn" else search.knn(x, x, 2, device="cpu")
        assert seen == [n_threads] and torch.get_num_threads() == 3
        seen.clear()


def test_closed_forms_use_one_thread(monkeypatch):
    seen, eigh = [], np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda S: seen.append(numbers()[1:]) or eigh(S))
    x, y = world()
    x = normalize(x)
    WCCN().fit(x, y)
    methods.fit_adapter(build_method_config("wccn"), x, y, device="cpu")
    assert len(seen) == 2 and {n for found in seen for _, n in found} == {1}


def test_workers_use_one_thread_for_large_products_too_and_restore_the_threads(monkeypatch):
    monkeypatch.setattr(threads, "PARALLEL_FLOPS", 0)
    before, seen, fit = numbers(), [], selection.fit_path
    monkeypatch.setattr(selection, "fit_path", lambda *a, **kw: seen.append(numbers()) or fit(*a, **kw))
    with joblib.parallel_config("threading", n_jobs=2):
        selection.select_adapter(*_unit(*world()), ("wccn",), n_folds=4)
    assert numbers() == before
    assert len(seen) == 4 and all(first == 1 and {n for _, n in rest} == {1} for first, *rest in seen)


def _unit(x, y):
    return normalize(x), y


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "400000 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}, 2),
    ],
)
def test_quota_of_a_container_is_the_smallest_of_its_groups(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")
    (tmp_path / "groups").write_text("1:cpu:/old\n0::/a/b\n")
    assert threads._cpu_quota(tmp_path / "root", tmp_path / "groups") == cores
    assert threads._cpu_quota(tmp_path / "root", tmp_path / "missing") == math.inf


@pytest.mark.parametrize("quota, cores", [(0.5, 1), (1.5, 2), (9, 4), (math.inf, 4)])
def test_usable_cores_count_a_part_of_a_core_as_one(monkeypatch, quota, cores):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(threads, "_cpu_quota", lambda: quota)
    assert usable_cores() == cores
