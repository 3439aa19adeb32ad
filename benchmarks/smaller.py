"""Adapters and quantisers at equal bytes a row, on the classes they were fitted on and on classes they were not.

    python benchmarks/smaller.py [BENCHMARK ...]  # resumes; about three hours of one core

The quantisers are those of FAISS, trained on the rows that the adapter is fitted on: PCA with int8, OPQ with a product
quantiser, RaBitQ, ITQ, each before and after the float32 adapter. The Matryoshka-Adaptor (Yoon et al. 2024, arXiv
2407.20243) is written from its text. Every row of a gallery is stored at the budget; queries stay float32, except
those of ITQ, whose Hamming distance compares bits with bits.

Fixed before the run, for `EmbeddingAdapter(max_bytes)` in the mixed gallery over three class splits: at a 32nd of the
bytes the lower ends of the 95 % intervals of both changes should lie above -0.5 points on every benchmark, and the
mean changes over the benchmarks should be at least +3 on seen and +1 on unseen classes; at a 20th, +7 and +1.
"""

import sys
import time
from functools import lru_cache
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

import ega
from ega import EmbeddingAdapter
from ega.data.arrays import normalize
from ega.data.runtime import spawn_rngs
from ega.experiments.grids import cached_table
from ega.experiments.protocols import MAIN_BENCHMARKS
from ega.experiments.runs import build_config, load_joint_rows, platform_tag
from ega.measure.calibration import Margins, ausuc
from ega.measure.evaluation import adapt_rows
from ega.method.adapters import transform
from ega.method.compression import RowFormat, as_stored, fit_projection, formats_within, project
from ega.selection import leave_classes_out

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "data/results/smaller.parquet"
RATIOS = (32, 20)  # how many times smaller than float32 a row is
SPLITS = range(3)  # of all contestants
COVERAGE_SPLITS = range(20)  # of the adapter at a 32nd
N_BOOT = 200


def load_rows(benchmark, split):
    "The rows of a class split; every fifth row of CIFAR-10 is a query."
    rows = load_joint_rows(build_config("path", benchmark, "frozen", split_seed=split), ROOT / "data/packs")
    return rows._replace(unseen_queries=rows.unseen_queries[:: 5 if benchmark == "tiny200>cifar10" else 1])


# -- nearest rows: functions of row numbers of queries and gallery, which return distance and row number --------------


def _nearest_other(index, z, queries, gallery):
    "Search an index that holds the gallery; a query is not its own neighbour."
    D, I = index.search(z[queries], 2)
    at = (gallery[I[:, 0]] == queries).astype(int)
    rows = np.arange(len(queries))
    return D[rows, at], gallery[I[rows, at]]


def stored_rows(z, stored):
    "Squared distances of float queries z to stored rows."

    def nearest(queries, gallery):
        index = faiss.IndexFlatL2(z.shape[1])
        index.add(stored[gallery])
        return _nearest_other(index, z, queries, gallery)

    return nearest


def faiss_index(index, z, fit):
    "A quantiser of FAISS, trained on the rows `fit` of z."
    if not index.is_trained:
        index.train(z[fit])

    def nearest(queries, gallery):
        index.reset()
        index.add(z[gallery])
        return _nearest_other(index, z, queries, gallery)

    return nearest


# -- contestants ------------------------------------------------------------------------------------------------------


def product_quantiser(width, n_bytes):
    "A product quantiser of a byte for each part."
    index = faiss.IndexPQ(width, n_bytes, 8)
    index.pq.cp.niter, index.pq.cp.min_points_per_centroid = 10, 1  # the latter: no warning for each of the parts
    return index


def _random_rotation(d):
    return np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))[0].astype(np.float32)


def opq_rotation(x, n_bytes, steps=4):
    "The alternation of OPQ on at most 8,192 rows: quantise the rotated rows, then rotate to what was quantised."
    x = x[np.linspace(0, len(x) - 1, min(len(x), 8192)).astype(int)]
    width = x.shape[1] // n_bytes * n_bytes  # of the parts together, which are equally wide
    R = _random_rotation(x.shape[1])[:, :width]
    for _ in range(steps):
        index, z = product_quantiser(width, n_bytes), np.ascontiguousarray(x @ R)
        index.train(z)
        U, _, V = np.linalg.svd(x.T @ index.sa_decode(index.sa_encode(z)), full_matrices=False)
        R = U @ V
    return R


def itq_rotation(v, steps=20):
    "The alternation of ITQ: take the signs of the rotated rows, then rotate to the signs."
    R = _random_rotation(v.shape[1])
    for _ in range(steps):
        U, _, V = np.linalg.svd(v.T @ np.sign(v @ R))
        R = U @ V
    return R


def quantisers(x, fit, n_bytes):
    "Yield name, index of at most `n_bytes` a row and what it holds; rotations in NumPy, which FAISS takes long for."
    d = x.shape[1]
    yield "PCA, int8", faiss.index_factory(d, f"PCA{n_bytes},SQ8"), x
    rabitq = min(d, 8 * (n_bytes - 8))  # two floats a row belong to its code
    yield "RaBitQ", faiss.index_factory(d, f"PCAR{rabitq},RaBitQ"), x
    if 8 * n_bytes > d:  # a bit for each component is all that ITQ has, and OPQ takes minutes: at a 32nd alone
        return
    z = np.ascontiguousarray(x @ opq_rotation(x[fit], n_bytes))
    yield "OPQ, PQ", product_quantiser(z.shape[1], n_bytes), z
    v = x - x[fit].mean(0)
    v = np.ascontiguousarray(v @ itq_rotation(v[fit]))
    yield "ITQ", faiss.IndexLSH(d, d, False, False), v


class MatryoshkaAdaptor(torch.nn.Module):
    "x + f(x) with an f of one hidden layer; leading components are kept."

    def __init__(self, d):
        super().__init__()
        self.d = d
        self.f = torch.nn.Sequential(torch.nn.Linear(d, d), torch.nn.ReLU(), torch.nn.Linear(d, d))
        torch.nn.init.zeros_(self.f[2].weight)
        torch.nn.init.zeros_(self.f[2].bias)

    def forward(self, x):
        return F.normalize(x + self.f(x), dim=1)


def matryoshka_loss(z, x, y, widths, supervised):
    "Similarities of all pairs and of the ten nearest, reconstruction, and, supervised, the order by class."
    same, before = y[:, None] == y, x @ x.T
    near = before.topk(min(11, len(x)), 1).indices[:, 1:]
    loss = (z - x).abs().sum(1).mean()
    for width in widths:
        cut = F.normalize(z[:, :width], dim=1)
        s = cut @ cut.T
        off = (s - before).abs()
        loss = loss + off.mean() + off.gather(1, near).mean()
        if supervised:
            positive = s.masked_fill(~same, 2).masked_fill(torch.eye(len(x), dtype=bool), 2).amin(1)
            has = same.sum(1) > 1  # the farthest of its class against all of the others
            order = F.softplus(20 * (s - positive[:, None])).masked_fill(same, 0).sum(1) / (~same).sum(1)
            loss = loss + order[has].mean()
    return loss


def train_matryoshka(x, y, widths, lr, epochs, seed=0):
    "Two stages, without and with labels; yields the adaptor after each of `epochs` of the second."
    torch.manual_seed(seed)
    model, rng = MatryoshkaAdaptor(x.shape[1]), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    for epoch in range(1 + max(epochs)):
        for batch in np.array_split(rng.permutation(len(x)), -(-len(x) // 256)):
            loss = matryoshka_loss(model(x[batch]), x[batch], y[batch], widths, supervised=epoch > 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch in epochs:
            yield epoch, model.eval()
            model.train()


def matryoshka_codes(model, x, n_bytes):
    "Leading components as int8, and the signs of all that fit."
    z = transform(model, x, device="cpu")
    for row_format in (RowFormat(n_bytes, "int8"), RowFormat(min(x.shape[1], 8 * n_bytes), "binary")):
        cut = normalize(z[:, : row_format.n_components])
        yield row_format, cut, as_stored(cut, row_format)


def fit_matryoshka(x, y, n_bytes, principal):
    "The adaptor with the best mean change on a held-out quarter of the classes, of two rates, epochs and formats."
    widths = sorted({n_bytes, x.shape[1] // 4, x.shape[1]})
    fold = leave_classes_out(y, spawn_rngs(0).split, n_folds=4)[0]
    x, tried = x @ principal, {}
    queries, gallery = [fold.seen_queries, fold.unseen_queries], np.r_[fold.fit, fold.unseen]
    for lr in (1e-3, 1e-4):
        for epoch, model in train_matryoshka(x[fold.fit], y[fold.fit], widths, lr, (2, 8)):
            for row_format, z, stored in matryoshka_codes(model, x, n_bytes):
                found = stored_rows(z, stored)
                hits = [(y[found(q, gallery)[1]] == y[q]).mean() for q in queries]
                tried[lr, epoch, row_format] = np.mean(hits)
    lr, epoch, row_format = max(tried, key=tried.get)
    *_, (_, model) = train_matryoshka(x, y, widths, lr, (epoch,))
    return model, row_format


@lru_cache(maxsize=1)
def fit_default(benchmark, split):
    "`EmbeddingAdapter()`, which keeps float32."
    rows = load_rows(benchmark, split)
    return EmbeddingAdapter(device="cpu").fit(rows.x[rows.fit], rows.y[rows.fit])


def contestants(benchmark, split, ratio):
    "Yield (name, nearest rows, bytes of a row, notes) of every contestant."
    rows = load_rows(benchmark, split)
    x, y, fit = rows.x, rows.y, rows.fit
    n_bytes = 4 * x.shape[1] // ratio
    ours = EmbeddingAdapter(max_bytes=n_bytes, device="cpu").fit(x[fit], y[fit])
    row = ours.selection_.table.set_index(["method", "strength", "n_components", "precision"])
    chosen = row.loc[(ours.selection_.method, ours.selection_.strength, *ours.row_format_)]
    z, stored = adapt_rows(ours, x)
    notes = {"selected": repr(ours.selection_), "safety_check": "frozen" if ours.frozen_ else "pass"}
    notes |= {"estimated_" + name: chosen[name] for name in ("seen", "unseen", "unseen_bound")}
    yield (
        "EmbeddingAdapter(max_bytes)",
        stored_rows(z, z if stored is None else stored),
        ours.row_format_.n_bytes,
        notes,
    )
    if split not in SPLITS:
        return
    full = fit_default(benchmark, split)
    adapted = transform(full.adapter_, x, device="cpu")
    yield "EmbeddingAdapter()", stored_rows(adapted, adapted), 4 * x.shape[1], {"selected": repr(full.selection_)}
    signs = formats_within(n_bytes, x.shape[1])[-1]
    rotated = project(x, fit_projection(x[fit], signs))
    yield "frozen, signs", stored_rows(rotated, as_stored(rotated, signs)), signs.n_bytes, {}
    for rows_of, name in ((x, "frozen"), (adapted, "adapted")):
        for quantiser, index, held in quantisers(rows_of, fit, n_bytes):
            yield f"{name}, {quantiser}", faiss_index(index, held, fit), index.sa_code_size(), {}
    principal = np.linalg.eigh(x[fit].T @ x[fit])[1][:, ::-1].astype(np.float32)  # leading components first
    model, row_format = fit_matryoshka(x[fit], y[fit], n_bytes, principal)
    (z, stored) = next(c[1:] for c in matryoshka_codes(model, x @ principal, n_bytes) if c[0] == row_format)
    yield "Matryoshka-Adaptor", stored_rows(z, stored), row_format.n_bytes, {"selected": str(tuple(row_format))}


# -- measures ---------------------------------------------------------------------------------------------------------


def search_both(nearest, rows):
    "For seen and unseen queries: hits among the fitted and among the unseen rows, and how much nearer the former are."
    found = {}
    for group, queries in (("seen", rows.seen_queries), ("unseen", rows.unseen_queries)):
        (D_seen, seen), (D_unseen, unseen) = (nearest(queries, g) for g in (rows.fit, rows.unseen_gallery))
        y = rows.y[queries]
        found[group] = rows.y[seen] == y, rows.y[unseen] == y, D_unseen - D_seen
    return found


def hits_of(found):
    "{(group, gallery): hits (n,)} from `search_both`."
    hits = {}
    for group, (of_seen, of_unseen, margin) in found.items():
        hits[group, "own"] = of_seen if group == "seen" else of_unseen
        hits[group, "mixed"] = np.where(margin >= 0, of_seen, of_unseen)
    return hits


def area_of(found, draws):
    "Area under the curve of seen against unseen hits, in points, of each draw of queries (two arrays of weights)."
    (seen, _, m_seen), (_, unseen, m_unseen) = found["seen"], found["unseen"]
    return 100 * ausuc(Margins(seen, m_seen), Margins(unseen, -m_unseen), *draws)


def class_draws(y, rng):
    "Weights of queries (1 + N_BOOT, n): all alike, then of draws of classes with replacement."
    _, number = np.unique(y, return_inverse=True)
    n = number.max() + 1
    counts = rng.multinomial(n, np.full(n, 1 / n), size=N_BOOT)
    return np.r_[np.ones((1, len(y))), counts[:, number]]


def measure(benchmark, split, ratio):
    "The lines of a benchmark, a split and a budget: each contestant, group of queries and gallery."
    rows, lines = load_rows(benchmark, split), []
    rng = np.random.default_rng(split)
    draws = [class_draws(rows.y[q], rng) for q in (rows.seen_queries, rows.unseen_queries)]
    before = search_both(stored_rows(rows.x, rows.x), rows)
    frozen, frozen_area = hits_of(before), area_of(before, draws)
    started = time.process_time()
    for name, nearest, n_bytes, notes in contestants(benchmark, split, ratio):
        found = search_both(nearest, rows)
        area, seconds = area_of(found, draws), time.process_time() - started
        about = dict(benchmark=benchmark, split=split, ratio=ratio, method=name, n_bytes=n_bytes, seconds=seconds)
        about |= {"version": ega.__version__, "machine": platform_tag()}
        about |= notes | {"area": area[0], "frozen_area": frozen_area[0], "area_change": np.float32(area - frozen_area)}
        print(f"{benchmark} {split} 1/{ratio} {name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        for (group, gallery), hit in hits_of(found).items():
            queries = rows.seen_queries if group == "seen" else rows.unseen_queries
            change = hit.astype(np.int8) - frozen[group, gallery].astype(np.int8)
            line = {"group": group, "gallery": gallery, "frozen": 100 * frozen[group, gallery].mean()}
            lines.append(about | line | {"change": change, "query_class": rows.y[queries].astype(np.int32)})
        started = time.process_time()
    return pd.DataFrame(lines)


def main(benchmarks):
    keys = [(b, split, ratio) for split in SPLITS for b in benchmarks for ratio in RATIOS]
    keys += [(b, split, RATIOS[0]) for split in COVERAGE_SPLITS for b in benchmarks if split not in SPLITS]
    cached_table(RECORD, keys, ("benchmark", "split", "ratio"), measure)


if __name__ == "__main__":
    main(sys.argv[1:] or MAIN_BENCHMARKS)
