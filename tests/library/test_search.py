"Search: equal to FAISS, scikit-learn and brute force; duplicates, padding, printed warnings, memory, determinism."

import os
import subprocess
import sys
import tracemalloc
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np
import pytest

from ega.data.arrays import InputError, normalize
from ega.measure import search
from ega.measure.search import SearchConfig, build_ivf, ivf_search, ivf_sweep, knn, loo_knn

ROOT = Path(__file__).parents[2]
faiss = pytest.importorskip("faiss")


def rows(n, d, seed=0):
    return normalize(np.random.default_rng(seed).normal(size=(n, d)))


def brute(xq, xb):
    "All squared distances in float64, from differences."
    return np.square(xq[:, None].astype("f8") - xb[None].astype("f8")).sum(2)


def flat(xq, xb, k):
    index = faiss.IndexFlatL2(xb.shape[1])
    index.add(xb)
    return index.search(xq, k)


@pytest.mark.parametrize(
    "nq, nb, d, k", [(1, 1, 1, 1), (7, 50, 3, 50), (300, 2000, 32, 1), (300, 2000, 32, 10), (30, 5, 8, 5)]
)
def test_knn_equals_faiss_flat(nq, nb, d, k):
    xq, xb = rows(nq, d, 1), rows(nb, d, 2)
    D, I = flat(xq, xb, k)
    found = knn(xq, xb, k, device="cpu")
    assert (found.I == I).all()
    assert np.abs(found.D - D).max() < 2e-6  # float32 rounding of |q|^2 - 2qb + |b|^2
    assert found.D.dtype == np.float32 and found.I.dtype == np.int64


@pytest.mark.parametrize("k", [10, 10**12])
def test_no_more_neighbours_than_rows_are_returned(k):
    "A result of the k asked for would not fit the memory."
    x = rows(9, 4, 40)
    swept = ivf_sweep(x, x, nlist=3, nprobes=(3,), k=k, device="cpu")[3]
    for found, every in (
        (knn(x, x, k, device="cpu"), knn(x, x, 9, device="cpu")),
        (loo_knn(x, k, device="cpu"), loo_knn(x, 8, device="cpu")),
        (swept, knn(x, x, 9, device="cpu")),
    ):
        assert (found.I == every.I).all() and (found.D == every.D).all() and (every.I >= 0).all()


@pytest.mark.parametrize(
    "change",
    [
        np.asfortranarray,
        lambda x: np.repeat(x, 2, 1)[:, ::2],
        lambda x: x[::-1][::-1],
        np.float64,
        lambda x: x.astype("f4").tolist(),
    ],
)
def test_results_do_not_depend_on_memory_layout_or_dtype(change):
    "Values that float16 represents exactly, in several layouts and types."
    xq, xb = (np.random.default_rng(s).integers(-64, 64, (n, 16)).astype("f2") for s, n in ((30, 40), (31, 200)))
    plain, index = knn(xq.astype("f4"), xb.astype("f4"), 6, device="cpu"), build_ivf(xb.astype("f4"), nlist=4)
    for got in (knn(xq, xb, 6, device="cpu"), knn(change(xq), change(xb), 6, device="cpu")):
        assert (got.I == plain.I).all() and got.D.tobytes() == plain.D.tobytes()
    left = loo_knn(xb.astype("f4"), 6, device="cpu")
    for x in (xb, change(xb)):
        assert (loo_knn(x, 6, device="cpu").I == left.I).all()
    for q in (xq, change(xq)):
        assert (ivf_search(index, q, change(xb), k=3, nprobe=4, device="cpu").I == plain.I[:, :3]).all()


@pytest.mark.parametrize("k", [1, 3, 30])
def test_loo_knn_equals_brute_force_without_the_diagonal(k):
    x = rows(25, 4, 8)
    true = brute(x, x)
    np.fill_diagonal(true, np.inf)
    found, m = loo_knn(x, k, device="cpu"), min(k, 24)
    assert (found.I[:, :m] == true.argsort(1)[:, :m]).all() and (found.I[:, m:] == -1).all()


@pytest.mark.parametrize("order", ["near first", "far first", "shuffled", "five points"])
@pytest.mark.parametrize("k", [1, 10])
def test_neighbours_do_not_depend_on_gallery_order(order, k):
    "The selection skips scores above the worst one kept: far rows first make it skip none, five points are all ties."
    xq, xb = rows(40, 8, 25), rows(1500, 8, 26)
    xb = {"five points": xb[np.arange(1500) % 5], "shuffled": xb}.get(
        order, xb[brute(xq[:1], xb)[0].argsort()[:: 1 if order == "near first" else -1]]
    )
    true = np.sort(brute(xq, xb), 1)[:, :k]
    for tile in (16, 100, 700, 1500):
        I, scores = search._nearest_by_product(xq, xb, k, tile=tile)
        assert all(len(set(i)) == k for i in I.tolist()) and (I >= 0).all()
        found = search._sort_by_distance(xq, xb, I)
        assert np.allclose(found.D, true, atol=2e-6) and np.allclose(
            np.sort(scores, 1) + (xq * xq).sum(1, keepdims=True), true, atol=2e-6
        )


def test_keys_order_by_score_then_by_row_number():
    scores = np.array([-np.inf, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 2.5, 3e38], "f4")
    rows = np.array([5, 0, 2**32 - 1])
    keys = search._pack(np.repeat(scores, 3), np.tile(np.sort(rows), 9))
    assert (np.diff(keys) > 0).all()
    I, found = search._unpack(keys)
    assert (I == np.tile(np.sort(rows), 9)).all() and found.tobytes() == np.repeat(scores, 3).tobytes()
    I, found = search._unpack(np.full(2, search._PADDING))
    assert (I == -1).all() and np.isinf(found).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("offset", [0, 1])
def test_the_longest_rows_that_are_accepted_give_finite_distances(offset):
    "Also where all rows point the same way, so that their mean is subtracted first."
    x = rows(60, 8, 35) + np.float32(20 * offset)
    x *= np.float32(1.4e18) / np.linalg.norm(x, axis=1).max()
    found, left = knn(x[:20], x[20:], 3, device="cpu"), loo_knn(x, 3, device="cpu")
    assert (found.I == np.argsort(brute(x[:20], x[20:]), 1, kind="stable")[:, :3]).all()
    assert np.isfinite(found.D).all() and np.isfinite(left.D).all()


def test_the_shortest_rows_that_are_accepted_are_told_apart():
    x = 1e-14 * rows(40, 8, 36)
    assert (knn(x, x, 1, device="cpu").I[:, 0] == np.arange(40)).all()
    assert (loo_knn(x, 3, device="cpu").I == loo_knn(1e14 * x, 3, device="cpu").I).all()
    assert (knn(np.zeros((2, 8)), x[:3], 1, device="cpu").I < 3).all()  # a row of zeros is a point like any other


def test_distances_are_not_negative_and_equal_for_equal_rows():
    x = np.repeat(rows(50, 384, 9), 5, 0)[np.random.default_rng(0).permutation(250)]
    found = knn(x, x, 250, device="cpu")
    assert found.D.min() == 0 and (found.D[:, :5] == 0).all() and (found.D[:, 5:] > 0).all()
    blocks = found.D.reshape(250, 50, 5)
    assert (blocks == blocks[:, :, :1]).all()  # duplicates have one distance, bit for bit


def test_neighbours_are_sorted_by_distance_then_row_number():
    x = np.repeat(rows(10, 6), 4, 0)
    found = knn(x[:5], x, 40, device="cpu")
    same = found.D[:, 1:] == found.D[:, :-1]
    assert (np.diff(found.D) >= 0).all() and (np.diff(found.I)[same] > 0).all() and same.any()


def test_memory_of_knn_is_bounded():
    "The full score matrix would be 640 MB; a tile of 4 MB, the norms and the result take 7 MB."
    xq, xb = rows(4000, 2), rows(40_000, 2, 1)
    tracemalloc.start()
    knn(xq, xb, 1, device="cpu")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 15e6


def test_ivf_equals_lists_read_by_hand():
    "Reference in NumPy: the nearest centres, then brute force within their lists."
    xq, xb = rows(40, 8, 13), rows(300, 8, 14)
    index = build_ivf(xb, nlist=7, kmeans_seed=3)
    centres = index.quantizer.reconstruct_n(0, 7)
    home = brute(xb, centres).argmin(1)
    for nprobe in (1, 3):
        found = ivf_search(index, xq, xb, k=4, nprobe=nprobe, device="cpu")
        probed = (brute(xq, centres).argsort(1)[:, :nprobe, None] == home).any(1)  # (nq, nb)
        true = np.where(probed, brute(xq, xb), np.inf)
        assert (found.I == true.argsort(1)[:, :4]).all()
        assert np.allclose(found.scanned, probed.mean(1))


@pytest.mark.parametrize("nprobe, k", [(1, 1), (1, 40), (3, 5), (8, 5)])
def test_search_by_lists_equals_faiss(nprobe, k):
    "Query after query (FAISS) and list after list (matrix products); k = 40 needs padding, and one list is empty."
    xq, xb = rows(900, 12, 28), rows(250, 12, 29) * np.linspace(0.5, 2, 250, dtype="f4")[:, None]
    index = build_ivf(xb, nlist=8, kmeans_seed=5)
    index.invlists.resize(3, 0)
    index.ntotal = 250  # a list without rows, as a k-means may leave one
    index.nprobe = nprobe
    found = search._sort_by_distance(xq, xb, search._search_lists(index, xq, index.quantizer.search(xq, nprobe)[1], k))
    by_faiss = search._sort_by_distance(xq, xb, index.search(xq, k)[1])
    assert (found.I == by_faiss.I).all() and found.D.tobytes() == by_faiss.D.tobytes()
    assert k < 40 or (found.I[:, 0] >= 0).any() and (found.I[:, -1] == -1).any()


def test_lists_with_many_queries_are_searched_by_matrix_product(monkeypatch):
    xq, xb, calls, scan = rows(600, 64, 33), rows(2000, 64, 34), [], search._search_lists
    index = build_ivf(xb, nlist=2)
    monkeypatch.setattr(search, "_search_lists", lambda *a: calls.append(len(a[1])) or scan(*a))
    many, few = (ivf_search(index, xq[:n], xb, k=3, nprobe=1, device="cpu") for n in (600, 60))
    assert calls == [600] and (many.I[:60] == few.I).all()


def test_probing_all_lists_equals_exact_search_bit_for_bit():
    xq, xb = rows(100, 8, 15), rows(500, 8, 16)
    exact, found = knn(xq, xb, 5, device="cpu"), ivf_sweep(xq, xb, nlist=9, nprobes=(9,), k=5, device="cpu")[9]
    assert (found.I == exact.I).all() and found.D.tobytes() == exact.D.tobytes() and (found.scanned == 1).all()


def test_padding_is_minus_one_and_inf():
    found = ivf_sweep(rows(50, 4, 17), rows(20, 4, 18), nlist=10, nprobes=(1,), k=8, device="cpu")[1]
    assert ((found.I == -1) == np.isinf(found.D)).all() and (found.I == -1).any() and (found.I[:, 0] >= 0).any()
    D, I = found
    assert D is found.D and I is found.I  # unpacks as (D, I)


def test_ivf_is_deterministic_and_seeded():
    xq, xb = rows(100, 16, 20), rows(6000, 16, 21)  # above 256 rows per list: the seed also samples
    first, again, other = (
        ivf_sweep(xq, xb, nlist=10, nprobes=(1,), k=3, kmeans_seed=s, device="cpu")[1] for s in (1, 1, 2)
    )
    assert (
        first.I.tobytes() == again.I.tobytes() and first.D.tobytes() == again.D.tobytes() and (first.I != other.I).any()
    )


SCRIPT = """
import sys, hashlib, numpy as np
from ega.measure.search import knn, loo_knn, ivf_sweep
x = np.random.default_rng(0).normal(size=(3000, 32)).astype("f4")
a, b = loo_knn(x, 5, device="cpu"), ivf_sweep(x[:300], x, nlist=12, nprobes=(2,), k=5, device="cpu")[2]
print(hashlib.sha256(b"".join(v.tobytes() for v in (*a, *b))).hexdigest())
"""


def run(script, threads="1"):
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads)
    return subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_same_bytes_in_another_process():
    assert run(SCRIPT) == run(SCRIPT)


@pytest.mark.parametrize("offset, spread", [(1.0, 0.02), (100.0, 1.0), (1000.0, 0.1)])
def test_rows_far_from_zero_are_searched_exactly(offset, spread):
    x = np.float32(offset + spread * np.random.default_rng(0).standard_normal((300, 8)))
    distances = np.square(np.float64(x)[:, None] - np.float64(x)).sum(2)
    assert np.array_equal(knn(x, x, 1, device="cpu").I[:, 0], distances.argmin(1))
    np.fill_diagonal(distances, np.inf)
    assert np.array_equal(loo_knn(x, 1, device="cpu").I[:, 0], distances.argmin(1))


def test_read_only_arrays_are_searched_without_a_warning_of_torch(recwarn):
    x = np.random.default_rng(0).standard_normal((300, 64), np.float32)
    expected = loo_knn(x, 3, device="cpu").I
    x.flags.writeable = False
    assert np.array_equal(loo_knn(x, 3, device="cpu").I, expected)
    assert np.array_equal(knn(x, x, 4, device="cpu").I[:, 1:], expected) and not recwarn.list


def test_exact_search_needs_neither_torch_nor_faiss():
    script = """
import sys, numpy as np
from ega.measure.search import knn
knn(np.eye(3), np.eye(3), 2, device="cpu")
print([m for m in ("torch", "faiss") if m in sys.modules])
"""
    assert run(script) == "[]"


@pytest.mark.parametrize(
    "module, text",
    [
        (None, "ega[cpu]"),
        (module_from_spec(ModuleSpec("faiss", None)), "installed but empty"),
    ],
)
def test_missing_or_empty_faiss_raises_with_the_install_command(monkeypatch, module, text):
    monkeypatch.setitem(sys.modules, "faiss", module)
    with pytest.raises(ImportError) as error:
        build_ivf(rows(20, 4), nlist=2)
    assert text in str(error.value)
    assert knn(rows(3, 4), rows(3, 4), 1, device="cpu").I.tolist() == [[0], [1], [2]]


def test_gpu_index_is_used_for_cuda_devices(monkeypatch):
    "The GPU functions of FAISS are replaced by stubs that record their calls."
    import torch

    xq, xb = rows(10, 4), rows(60, 4)
    index, calls = build_ivf(xb, nlist=3), []
    monkeypatch.setattr(search, "pick_device", lambda device: torch.device(device or "cuda"))
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2, raising=False)
    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(
        faiss, "index_cpu_to_gpu", lambda resources, gpu, i: calls.append((resources, gpu)) or i, raising=False
    )
    for device in ("cuda:1", None, "cpu"):
        ivf_search(index, xq, xb, k=1, nprobe=1, device=device)
    assert calls == [("resources", 1), ("resources", 0)]
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    with pytest.raises(InputError, match="no GPU"):
        ivf_search(index, xq, xb, k=1, nprobe=1, device="cuda")


@pytest.mark.skipif(
    "not __import__('importlib').util.find_spec('torch') or not __import__('torch').cuda.is_available()",
    reason="needs a CUDA device",
)
def test_cuda_equals_cpu():
    xq, xb = rows(500, 64, 22), rows(5000, 64, 23)
    cpu, gpu = knn(xq, xb, 5, device="cpu"), knn(xq, xb, 5, device="cuda")
    assert (cpu.I == gpu.I).all() and cpu.D.tobytes() == gpu.D.tobytes()
    assert (loo_knn(xb, 3, device="cuda").I == loo_knn(xb, 3, device="cpu").I).all()


@pytest.mark.parametrize("tile", [7, 64, 1000])
@pytest.mark.parametrize("k", [1, 5, 100])
@pytest.mark.parametrize("by_torch", [False, True])
def test_every_tiling_gives_the_brute_force_neighbours(tile, k, by_torch):
    "The tensor path is the CUDA path on another device."
    x, xb = rows(60, 6, 5), rows(90, 6, 6) * np.linspace(0.5, 2, 90, dtype="f4")[:, None]  # norms differ
    if by_torch:
        import torch

        I = search._nearest_by_product_torch(torch.from_numpy(x), torch.from_numpy(xb), k, tile=tile)[0].numpy()
    else:
        I = search._nearest_by_product(x, xb, k, tile=tile)[0]
    I = np.sort(I, 1)
    assert (I[:, : k - 90] == -1).all() or k <= 90
    assert (I[:, max(0, k - 90) :] == np.sort(brute(x, xb).argsort(1)[:, :k], 1)).all()


@pytest.mark.parametrize("tile", [7, 64, 1000])
@pytest.mark.parametrize("k", [1, 6, 150])
def test_leave_one_out_equals_brute_force_for_every_tiling(tile, k):
    "Half of the tiles are computed and used twice; norms differ; k = 150: one entry is padded."
    x = rows(150, 5, 24) * np.linspace(0.5, 2, 150, dtype="f4")[:, None]
    true = brute(x, x)
    np.fill_diagonal(true, np.inf)
    found = search._nearest_others_by_product(x, k, tile=tile)
    true = np.where(np.sort(true, 1) < np.inf, true.argsort(1), -1)[:, :k]
    assert (np.sort(found, 1) == np.sort(true, 1)).all()


@pytest.mark.parametrize("accelerated", [False, True])
def test_no_row_is_its_own_neighbour_among_duplicates(monkeypatch, accelerated):
    "40 rows, three distinct points; the path of an accelerator is run on the CPU."
    if accelerated:
        monkeypatch.setattr(search, "_accelerator", lambda device: "cpu")
    x, own = rows(3, 5)[np.random.default_rng(7).integers(3, size=40)], np.arange(40)
    true = brute(x, x)
    true[own, own] = np.inf
    for k in (1, 5, 39):
        found = loo_knn(x, k)
        assert (found.I != own[:, None]).all() and (found.I >= 0).all()
        assert all(len(set(row)) == k for row in found.I.tolist())
        assert np.allclose(found.D, np.sort(true, 1)[:, :k], atol=1e-6)
    alone = loo_knn(x[:1], 2)
    assert alone.I.tolist() == [[-1]] and np.isinf(alone.D).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: knn(x * np.nan, x, 1),
        lambda x: knn(x, x * 1e20, 1),
        lambda x: loo_knn(x * 1e-22, 1),
        lambda x: ivf_sweep(x * 1e20, x, nlist=3, nprobes=[1], k=1),
        lambda x: SearchConfig("hnsw"),
        lambda x: SearchConfig(nprobe=1),
        lambda x: SearchConfig("ivf", 1, 10),
        lambda x: SearchConfig("ivf", 1, 4, 5),
    ],
)
def test_distances_out_of_range_and_settings_without_a_meaning_are_refused(call):
    with pytest.raises(InputError):
        call(rows(30, 4))


def test_search_follows_its_config():
    xq, xb = rows(20, 8), rows(200, 8, 1)
    assert (search.search(xq, xb, SearchConfig(k=3), device="cpu").I == knn(xq, xb, 3, device="cpu").I).all()
    ivf = SearchConfig("ivf", 3, 5, 2, kmeans_seed=7)
    expected = ivf_sweep(xq, xb, nlist=5, nprobes=(2,), k=3, kmeans_seed=7, device="cpu")[2].I
    assert (search.search(xq, xb, ivf, device="cpu").I == expected).all()
