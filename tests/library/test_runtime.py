"Generators, devices, threads and Ctrl-C: what was set before is restored; products equal those of torch."

import signal
import threading

import joblib
import numpy as np
import pytest
import torch
from threadpoolctl import ThreadpoolController, threadpool_limits

from ega import EmbeddingAdapter, estimator, selection
from ega.data import runtime
from ega.data.arrays import InputError, normalize
from ega.data.runtime import (
    PARALLEL_FLOPS,
    Rngs,
    defer_sigint,
    limit_threads,
    linear,
    pick_device,
    spawn_rngs,
    torch_generator,
)
from ega.measure.search import knn, loo_knn
from ega.method.adapters import LinearAdapter
from ega.method.config import TrainConfig
from ega.method.training import Objective, pairwise_objective, train


def test_generators_are_independent_and_repeatable():
    first = {name: getattr(spawn_rngs(3), name).integers(2**62, size=4).tolist() for name in Rngs._fields}
    assert len({tuple(draws) for draws in first.values()}) == len(Rngs._fields)
    rngs = spawn_rngs(3)
    for name in reversed(Rngs._fields):  # the order of use does not matter
        assert getattr(rngs, name).integers(2**62, size=4).tolist() == first[name]
    assert spawn_rngs(4).init.random() != spawn_rngs(3).init.random()
    draws = [torch.rand(3, generator=torch_generator(spawn_rngs(3).init)) for _ in range(2)]
    assert torch.equal(*draws)


def test_a_device_that_is_not_there_is_refused():
    assert pick_device("cpu").type == "cpu" and pick_device().type in ("cpu", "cuda")
    for device in ("tpu", "cpu and more", *([] if torch.cuda.is_available() else ["cuda", "cuda:1"])):
        with pytest.raises(InputError):
            pick_device(device)


# -- products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("n, n_in, n_out", [(1, 3, 2), (64, 64, 64), (63, 65, 70), (200, 96, 130)])
def test_linear_equals_the_product_of_torch(n, n_in, n_out, dtype):
    "Also of transposed and of sliced matrices; autograd does not record it."
    gen = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=gen).to(dtype).requires_grad_() for s in ((n, n_in), (n_out, n_in), (n_out,)))
    tol = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1}[dtype] * n_in**0.5  # sums in another order
    wide = torch.randn(n, 2 * n_in, generator=gen).to(dtype)
    for ours, theirs in (
        (linear(x, w, b), x @ w.T + b),
        (linear(x, w), x @ w.T),
        (linear(x.T, x.T), x.T @ x),
        (linear(wide[:, ::2], w), wide[:, ::2] @ w.T),
        (linear(torch.stack([x, 2 * x]), torch.stack([w, w])), torch.stack([x @ w.T, 2 * x @ w.T])),
    ):
        assert ours.dtype == dtype and not ours.requires_grad and torch.allclose(ours, theirs, atol=tol)


@pytest.mark.parametrize("fails", [False, True])
def test_linear_uses_onednn_for_large_float32_matrices_alone_and_does_without_it(monkeypatch, fails):
    calls = []

    def product(x, weight, bias, *options):
        calls.append(tuple(x.shape))
        if fails:
            raise RuntimeError("could not create a primitive descriptor")
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(runtime, "_onednn_linear", lambda: product)
    large, small = torch.ones(64, 64), torch.ones(63, 64)
    for x, w in ((large, large), (small, large), (large, small), (large.double(), large.double())):
        assert torch.equal(linear(x, w), x @ w.T)
    assert calls == [(64, 64)]


# -- threads -------------------------------------------------------------------------------------------------


def numbers():
    "The number of threads of torch and of every other library."
    pools = ThreadpoolController().info()
    return [torch.get_num_threads()] + sorted((pool["filepath"], pool["num_threads"]) for pool in pools)


@pytest.fixture
def three_threads(monkeypatch):
    "Three threads in every library, on a process with four cores, as far as `limit_threads` is told."
    monkeypatch.setattr(joblib, "cpu_count", lambda: 4)
    before = torch.get_num_threads()
    with threadpool_limits(3):
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)


def world():
    "Unit rows of twelve classes that scatter along four shared directions, and labels."
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(12, 14, 12)) * np.r_[np.full(4, 3.0), np.full(8, 0.2)]
    return normalize((rng.normal(size=(12, 1, 12)) + noise).reshape(-1, 12)), np.repeat(np.arange(12), 14)


@pytest.mark.parametrize(
    "cores, flops, n_threads",
    [(4, 0, 1), (4, PARALLEL_FLOPS - 1, 1), (4, PARALLEL_FLOPS, 3), (2, PARALLEL_FLOPS, 2), (1, PARALLEL_FLOPS, 1)],
)
def test_small_products_have_one_thread_and_large_ones_all_that_are_set(
    three_threads, monkeypatch, cores, flops, n_threads
):
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores)
    before = numbers()
    with limit_threads(flops):
        inside = numbers()
        assert inside[0] == n_threads and {n for _, n in inside[1:]} == {n_threads}
    assert numbers() == before and before[0] == 3


def test_number_set_by_the_user_is_the_most(three_threads):
    pool = next(p for p in ThreadpoolController().lib_controllers if p.user_api == "blas")
    torch.set_num_threads(2)
    pool.set_num_threads(1)
    with limit_threads(PARALLEL_FLOPS):
        assert torch.get_num_threads() == 2 and pool.num_threads == 1
    assert torch.get_num_threads() == 2 and pool.num_threads == 1


def test_blocks_inside_may_use_more_unless_the_outer_one_says_how_many(three_threads):
    seen = []
    with limit_threads():
        with limit_threads(PARALLEL_FLOPS):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
    with limit_threads(most=2), limit_threads(PARALLEL_FLOPS), limit_threads(PARALLEL_FLOPS, most=3):
        seen.append(torch.get_num_threads())
    assert seen == [3, 1, 2] and torch.get_num_threads() == 3


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_overlapping_blocks_of_two_threads_restore_the_first_number(three_threads, first_ends_first):
    before, inside, end = numbers(), threading.Event(), threading.Event()

    def other():
        with limit_threads():
            inside.set()
            end.wait(60)

    thread = threading.Thread(target=other)
    with limit_threads():
        thread.start()
        assert inside.wait(60)
        if not first_ends_first:
            end.set()
            thread.join()
        assert torch.get_num_threads() == 1
    end.set()
    thread.join()
    assert numbers() == before


def fit_and_watch(monkeypatch, module, function, cv):
    "Fit an adapter; return the numbers of threads at every call of a function, which are restored at the end."
    before, seen, fit = numbers(), [], getattr(module, function)
    monkeypatch.setattr(module, function, lambda *a, **kw: seen.append(numbers()) or fit(*a, **kw))
    EmbeddingAdapter(candidates=("wccn",), cv=cv, strengths=(1.0,), device="cpu").fit(*world())
    assert numbers() == before
    return [{first, *(n for _, n in rest)} for first, *rest in seen]


def test_fit_uses_one_thread_and_restores_the_others(three_threads, monkeypatch):
    assert fit_and_watch(monkeypatch, estimator, "fit_adapter", cv=2) == [{1}]


def test_workers_use_one_thread_for_large_products_too_and_restore_the_threads(three_threads, monkeypatch):
    monkeypatch.setattr(runtime, "PARALLEL_FLOPS", 0)
    with joblib.parallel_config("threading", n_jobs=2):
        assert fit_and_watch(monkeypatch, selection, "fit_path", cv=4) == [{1}] * 4


@pytest.mark.parametrize("batch, n_threads", [(8, 1), (10**6, 3)])
def test_training_chooses_by_the_products_of_a_step(three_threads, monkeypatch, batch, n_threads):
    "The product of a batch of all 48 rows with itself reaches the limit, that of a batch of 8 rows does not."
    monkeypatch.setattr(runtime, "PARALLEL_FLOPS", 2 * 48 * 48 * 4)
    x, y, seen = np.tile(np.eye(4, dtype="f4"), (12, 1)), np.tile(np.arange(4), 12), []

    def step(forward, x, y, rows, uniforms):
        seen.append(torch.get_num_threads())
        return objective.step(forward, x, y, rows, uniforms)

    objective = pairwise_objective(lambda z, y: z.square().mean())
    config = TrainConfig(epochs=1, batch_size=batch)
    train(LinearAdapter(4), Objective(step), x, y, rngs=spawn_rngs(0), config=config, device="cpu")
    assert set(seen) == {n_threads} and torch.get_num_threads() == 3


@pytest.mark.parametrize("k", [1, 4])
def test_a_search_on_several_threads_finds_the_same_neighbours(three_threads, monkeypatch, k):
    "A row with more copies than neighbours is still not its own neighbour."
    x = normalize(np.random.default_rng(0).normal(size=(301, 8)))
    x[40:50] = x[3]
    expected = knn(x[:70], x, k), loo_knn(x, k)
    monkeypatch.setattr(runtime, "PARALLEL_FLOPS", 1)
    found = knn(x[:70], x, k), loo_knn(x, k)
    copies = [3, *range(40, 50)]
    for many, one in zip(found, expected):
        rows = ~np.isin(one.I, copies).any(1)
        rows[copies] = False
        assert np.array_equal(many.I[rows], one.I[rows]) and np.allclose(many.D, one.D, atol=1e-6)
    assert (found[1].I != np.arange(301)[:, None]).all()


# -- Ctrl-C --------------------------------------------------------------------------------------------------


@pytest.fixture
def received():
    "Signals received by a handler of Ctrl-C installed for the test; it must be installed again at the end."
    received = []

    def handler(*args):
        received.append(args[0])

    before = signal.signal(signal.SIGINT, handler)
    yield received
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)


def test_sigint_is_deferred_to_the_next_call_or_the_end(received):
    with defer_sigint() as handle_pending:
        signal.raise_signal(signal.SIGINT)
        assert not received
        handle_pending()
        handle_pending()
        assert received == [signal.SIGINT]
        with defer_sigint() as handle_in_inner_block:
            signal.raise_signal(signal.SIGINT)
            handle_in_inner_block()
            assert len(received) == 1  # still deferred by the outer block
    assert len(received) == 2
    with pytest.raises(ZeroDivisionError), defer_sigint():
        signal.raise_signal(signal.SIGINT)
        1 / 0
    assert len(received) == 3


def test_sigint_is_not_touched_in_other_threads_or_without_a_handler(received):
    def work():
        with defer_sigint() as handle_pending:
            handle_pending()
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    other = threading.Thread(target=work)
    other.start()
    other.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [before, signal.SIG_IGN]
