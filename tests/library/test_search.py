"Search: equal to FAISS and brute force; duplicates, padding, determinism."

import numpy as np
import pytest

from ega.data.arrays import InputError, normalize
from ega.measure import search
from ega.measure.search import SearchConfig, ivf_sweep, knn, loo_knn

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


@pytest.mark.parametrize("k", [1, 4, 60])
def test_ivf_equals_the_index_of_faiss_and_lists_read_by_hand(k):
    "FAISS scans query by query; by hand: the nearest centres, then brute force in their lists. k = 60 needs padding."
    xq, xb = rows(400, 8, 13), rows(300, 8, 14) * np.linspace(0.5, 2, 300, dtype="f4")[:, None]
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(8), 8, 7)
    index.cp.seed, index.cp.min_points_per_centroid = 3, 1
    index.train(xb)
    index.add(xb)
    centres = index.quantizer.reconstruct_n(0, 7)
    home = brute(xb, centres).argmin(1)
    for index.nprobe, found in ivf_sweep(xq, xb, nlist=7, nprobes=(1, 3), k=k, kmeans_seed=3, device="cpu").items():
        D, I = index.search(xq, k)
        assert (found.I == I).all() and np.allclose(found.D[I >= 0], D[I >= 0], atol=1e-5)
        probed = (brute(xq, centres).argsort(1)[:, : index.nprobe, None] == home).any(1)  # (nq, nb)
        true = np.where(probed, brute(xq, xb), np.inf)
        assert (found.I[:, 0] == true.argmin(1)).all() and np.allclose(found.scanned, probed.mean(1))


def test_ivf_is_deterministic_and_seeded():
    xq, xb = rows(100, 16, 20), rows(6000, 16, 21)  # above 256 rows per list: the seed also samples
    first, again, other = (
        ivf_sweep(xq, xb, nlist=10, nprobes=(1,), k=3, kmeans_seed=s, device="cpu")[1] for s in (1, 1, 2)
    )
    assert (
        first.I.tobytes() == again.I.tobytes() and first.D.tobytes() == again.D.tobytes() and (first.I != other.I).any()
    )


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
@pytest.mark.parametrize("k", [1, 5, 90])
def test_every_tiling_gives_the_brute_force_neighbours(tile, k):
    x, xb = rows(60, 6, 5), rows(90, 6, 6) * np.linspace(0.5, 2, 90, dtype="f4")[:, None]  # norms differ
    found = search._nearest(x, xb, k, "cpu", tile=tile)
    assert (np.sort(found, 1) == np.sort(brute(x, xb).argsort(1)[:, :k], 1)).all()


@pytest.mark.parametrize("tile", [7, 64, 1000])
@pytest.mark.parametrize("k", [1, 6, 150])
def test_leave_one_out_equals_brute_force_for_every_tiling(tile, k):
    "Half of the tiles are computed and used twice; norms differ; k = 150: one entry is padded."
    x = rows(150, 5, 24) * np.linspace(0.5, 2, 150, dtype="f4")[:, None]
    true = brute(x, x)
    np.fill_diagonal(true, np.inf)
    found = search._nearest_others(x, k, "cpu", tile=tile)
    true = np.where(np.sort(true, 1) < np.inf, true.argsort(1), -1)[:, :k]
    assert (np.sort(found, 1) == np.sort(true, 1)).all()


def test_no_row_is_its_own_neighbour_among_duplicates():
    "40 rows, three distinct points."
    x, own = rows(3, 5)[np.random.default_rng(7).integers(3, size=40)], np.arange(40)
    true = brute(x, x)
    true[own, own] = np.inf
    for k in (1, 5, 39):
        found = loo_knn(x, k, device="cpu")
        assert (found.I != own[:, None]).all() and (found.I >= 0).all()
        assert all(len(set(row)) == k for row in found.I.tolist())
        assert np.allclose(found.D, np.sort(true, 1)[:, :k], atol=1e-6)
    alone = loo_knn(x[:1], 2, device="cpu")
    assert alone.I.tolist() == [[-1]] and np.isinf(alone.D).all()


@pytest.mark.parametrize("settings", [("hnsw",), ("exact", 1, None, 1), ("ivf", 1, 10), ("ivf", 1, 4, 5)])
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(InputError):
        SearchConfig(*settings)
