"""The contenders of the speed comparison: `ega`, other libraries, and a lower bound of unavoidable work."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import joblib
from harness import (
    Group,
    Job,
    NotRunError,
    Worker,
    busy_processes,
    cpu_seconds,
    exit_with_parent,
    run_group,
)

from ega.data.arrays import InputError, import_optional
from ega.data.files import atomic_write
from ega.testing import peak_memory_mb


def make_clusters(
    n,  # rows
    d,  # columns
    classes,  # number of classes
    *,
    rng,  # np.random.Generator
    inner=16,  # dimension of the subspace of the classes, at most d
    within=0.55,  # standard deviation inside a class; that of the centres is 1
):  # (n, d) float32 unit rows, (n,) int64 labels
    "Random unit rows in classes that overlap a little."
    import numpy as np

    y = np.arange(n) % classes
    centres = rng.normal(size=(classes, inner))
    basis = np.linalg.qr(rng.normal(size=(d, inner)))[0]
    inside = centres[y] + within * rng.normal(size=(n, inner))
    x = inside @ basis.T + 0.02 * rng.normal(size=(n, d)) * (inner / d) ** 0.5
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), y


def torch_released_ega(
    d,  # columns
    hidden,  # width of the hidden layer
    state=None,  # state dict to start from; None: torch's initialisation with a zero last layer
):  # nn.Module with the parameter names of ReleasedEGA
    "The released adapter in ordinary torch."
    from torch import nn

    class TorchReleasedEGA(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = nn.Sequential(nn.Linear(d, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, d))
            for p in self.branch[3].parameters():
                nn.init.zeros_(p)

        def forward(self, x):
            return nn.functional.normalize(x + self.branch(x), dim=-1)

    adapter = TorchReleasedEGA()
    if state:
        adapter.load_state_dict(state)
    return adapter.train()


BenchmarkData = namedtuple("BenchmarkData", "x y state size")


def benchmark_data(
    size,  # dict: n, d, classes, hidden, batch, epochs, margin, lr
    folder,  # shared folder
):  # BenchmarkData: rows and labels as tensors, the weights to start from, and the size
    "The data and weights that all training contenders start from; the weights are trained once, then read from a file."
    import numpy as np
    import torch

    keys = [size[k] for k in ("n", "d", "classes", "hidden", "batch")]
    n, d, classes = keys[:3]
    x, y = map(torch.from_numpy, make_clusters(n, d, classes, rng=np.random.default_rng(0)))
    path = Path(folder) / f"warm-{'-'.join(map(str, keys))}.pt"
    torch.manual_seed(0)
    if not path.exists():
        start = BenchmarkData(x, y, {}, {**size, "epochs": 3, "margin": 0.2, "lr": 1e-4})
        job, current = training_loop_job(start, one_pass_dataset_triplet_loss(start))
        job.prepare()
        job.run()
        with atomic_write(path) as temporary:
            torch.save(current.adapter.state_dict(), temporary)
    return BenchmarkData(x, y, torch.load(path, weights_only=True), size)


def _n_steps(size):
    "Units of work of a repeat: batches of anchors, counting the last short one as a fraction."
    return size["epochs"] * size["n"] / size["batch"]


def training_loop_job(
    start,  # BenchmarkData
    loss,  # function of (adapter, batch, gen) -> scalar
    *,
    batches=None,  # function of gen -> iterable of batches; None: shuffled row numbers
    fused=True,  # whether AdamW is fused; None: torch's default
):  # Job, and a namespace with the adapter of the current repeat
    "A reference PyTorch training loop as a Job."
    import torch

    size, current = start.size, SimpleNamespace()

    def shuffled_rows(gen):
        return torch.randperm(size["n"], generator=gen).split(size["batch"])

    def prepare():
        current.gen = torch.Generator().manual_seed(1)
        current.adapter = torch_released_ega(size["d"], size["hidden"], start.state)
        parameters = current.adapter.parameters()
        current.optimizer = torch.optim.AdamW(parameters, lr=size["lr"], weight_decay=1e-4, fused=fused)

    def run():
        for _ in range(size["epochs"]):
            for batch in (batches or shuffled_rows)(current.gen):
                current.optimizer.zero_grad()
                loss(current.adapter, batch, current.gen).backward()
                current.optimizer.step()

    return Job(run, _n_steps(size), prepare), current


class PerItemTripletDataset:
    "A dataset of (anchor, positive, negative) that draws the partners of one row at a time from the whole set."

    def __init__(self, x, y):
        self.x, self.y, self.rows = x, y, {}
        for i, c in enumerate(y):
            self.rows.setdefault(c, []).append(i)
        self.classes = list(self.rows)

    def __len__(self):
        return len(self.x)

    def draw(self, i):
        "Row numbers of a positive (possibly i itself) and of a negative from a uniformly drawn other class."
        import numpy as np

        positive = np.random.choice(self.rows[self.y[i]])
        other_class = np.random.choice(self.classes)
        while other_class == self.y[i]:
            other_class = np.random.choice(self.classes)
        return positive, np.random.choice(self.rows[other_class])

    def __getitem__(self, i):
        positive, negative = self.draw(i)
        return self.x[i], self.x[positive], self.x[negative]


def three_pass_triplet_loss(
    start,  # BenchmarkData
):  # function of (adapter, (anchors, positives, negatives), gen) -> scalar
    "Triplet loss with three forward passes, over stacked anchors, positives and negatives."
    from torch import nn

    criterion = nn.TripletMarginLoss(margin=start.size["margin"])
    return lambda adapter, triplets, gen: criterion(*(adapter(part) for part in triplets))


def one_pass_dataset_triplet_loss(
    start,  # BenchmarkData
):  # function of (adapter, row numbers, gen) -> scalar
    "Triplet loss with one forward pass; the triplets of a batch are drawn from the whole set at once."
    from ega.method.active_ratio import index_rows_by_class, random_dataset_triplets

    index, loss = index_rows_by_class(start.y), three_pass_triplet_loss(start)

    def batch_loss(adapter, rows, gen):
        triplets = random_dataset_triplets(index, rows, gen=gen)
        return loss(adapter, [start.x[part] for part in triplets], gen)

    return batch_loss


def torch_dataloader_dataset_triplets(size, folder):
    "The loop of the released code: a Dataset, a DataLoader and three forward passes."
    from torch.utils.data import DataLoader

    start = benchmark_data(size, folder)
    loader = DataLoader(PerItemTripletDataset(start.x, start.y.numpy()), batch_size=size["batch"], shuffle=True)
    job, _ = training_loop_job(start, three_pass_triplet_loss(start), batches=lambda gen: loader, fused=None)
    return job


def torch_dataset_triplets(size, folder):
    "Plain torch with data in memory, triplets from the whole set."
    start = benchmark_data(size, folder)
    job, _ = training_loop_job(start, one_pass_dataset_triplet_loss(start))
    return job


def _ega_training_job(size, folder, build_objective):
    "Job of `ega.method.training.train`; `build_objective` is a function of BenchmarkData."
    import numpy as np
    import torch

    from ega.data.runtime import spawn_rngs
    from ega.method.adapters import ReleasedEGA
    from ega.method.config import TrainConfig
    from ega.method.training import train

    start, current = benchmark_data(size, folder), SimpleNamespace()
    x, y, objective = start.x.numpy(), start.y.numpy(), build_objective(start)
    config = TrainConfig(epochs=size["epochs"], batch_size=size["batch"], lr=size["lr"])

    def prepare():
        current.adapter = ReleasedEGA(size["d"], hidden=size["hidden"], gen=torch.Generator().manual_seed(0))
        current.adapter.load_state_dict(start.state)

    def run():
        history = train(current.adapter, objective, x, y, rngs=spawn_rngs(0), config=config, device="cpu")
        return {"rho": float(np.mean(history.rho))}

    return Job(run, _n_steps(size), prepare)


def ega_dataset_triplets(size, folder):
    "`ega.method.training.train`, triplets from the whole set."
    from ega.method.active_ratio import index_rows_by_class
    from ega.method.training import dataset_triplet_objective

    return _ega_training_job(
        size, folder, lambda start: dataset_triplet_objective(size["margin"], index_rows_by_class(start.y))
    )


def ega_batch_triplets(size, folder):
    "`ega.method.training.train`, triplets from the batch."
    from ega.method.training import batch_triplet_objective

    return _ega_training_job(size, folder, lambda start: batch_triplet_objective(size["margin"]))


def count_distinct_and_active_rows(
    start,  # BenchmarkData
    draw,  # function of (rows, gen) -> Triplets of row numbers, and the rows that are forwarded
):  # list of (N, M), one a step: distinct rows forwarded, and rows in an active triplet
    "Distinct rows, and rows of active triplets, in each step of one repeat of a plain training loop."
    import torch

    from ega.method.losses import triplet_violations

    steps = []

    def loss(adapter, rows, gen):
        triplets, rows = draw(rows, gen)
        rows = torch.unique(rows)
        z = adapter(start.x[rows])
        a, p, n = (torch.searchsorted(rows, part) for part in triplets)
        violations = triplet_violations(z[a], z[p], z[n], start.size["margin"])
        active_rows = torch.unique(torch.cat([part[violations > 0] for part in (a, p, n)]))
        steps.append((len(rows), len(active_rows)))
        return violations.relu().mean()

    job, _ = training_loop_job(start, loss)
    job.prepare()
    job.run()
    return steps


def _products(steps, d, hidden, similarities=False):
    "Function that runs the matrix products of the steps (N, M), by the routine that `ega` uses."
    import torch

    from ega.data.runtime import linear

    N = max(n for n, _ in steps)
    gen = torch.Generator().manual_seed(0)

    def matrix(*shape):
        return torch.randn(*shape, generator=gen) / shape[1] ** 0.5

    x, dz, w1, w2, s = matrix(N, d), matrix(N, d), matrix(hidden, d), matrix(d, hidden), matrix(N, N)

    def run():
        for n, m in steps:
            h = linear(x[:n], w1)
            z = linear(h, w2)
            if similarities:
                linear(z, z)
                linear(s[:n, :n], z.T)
            linear(dz[:m].T, h[:m].T)
            dh = linear(dz[:m], w2.T)
            linear(dh.T, x[:m].T)

    return run


def _floor_job(size, folder, build_draw, active_only=False):
    "Job of the matrix products alone, backward over all rows or only over those in an active triplet."
    start = benchmark_data(size, folder)
    counts = count_distinct_and_active_rows(start, build_draw(start))
    steps = counts if active_only else [(n, n) for n, _ in counts]
    return Job(_products(steps, size["d"], size["hidden"]), _n_steps(size))


def _whole_set_draw(start):
    "Draw triplets from the whole set; anchors and partners are forwarded."
    import torch

    from ega.method.active_ratio import index_rows_by_class, random_dataset_triplets

    index = index_rows_by_class(start.y)

    def draw(rows, gen):
        triplets = random_dataset_triplets(index, rows, gen=gen)
        return triplets, torch.cat([rows, *triplets])

    return draw


def _in_batch_draw(start):
    "Draw triplets from the batch; the batch is forwarded."
    from ega.method.active_ratio import random_batch_triplets

    def draw(rows, gen):
        places = random_batch_triplets(start.y[rows], gen=gen)
        return type(places)(*(rows[part] for part in places)), rows

    return draw


def floor_dataset_triplets(size, folder):
    "Lower bound: the five matrix products over the distinct rows of a step, triplets from the whole set."
    return _floor_job(size, folder, _whole_set_draw)


def sparse_floor_dataset_triplets(size, folder):
    "Lower bound: as `floor_dataset_triplets`, with the backward pass over rows of active triplets only."
    return _floor_job(size, folder, _whole_set_draw, active_only=True)


def floor_batch_triplets(size, folder):
    "Lower bound: the five matrix products over a batch, triplets from the batch."
    return _floor_job(size, folder, _in_batch_draw)


def sparse_floor_batch_triplets(size, folder):
    "Lower bound: as `floor_batch_triplets`, with the backward pass over rows of active triplets only."
    return _floor_job(size, folder, _in_batch_draw, active_only=True)


def torch_batch_triplets(size, folder):
    "Plain torch with one forward pass per batch, triplets from the batch."
    from torch import nn

    from ega.method.active_ratio import random_batch_triplets

    start, criterion = benchmark_data(size, folder), nn.TripletMarginLoss(margin=size["margin"])

    def loss(adapter, rows, gen):
        z, t = adapter(start.x[rows]), random_batch_triplets(start.y[rows], gen=gen)
        return criterion(z[t.a], z[t.p], z[t.n])

    return training_loop_job(start, loss)[0]


def pml_one_triplet_per_anchor(size, folder):
    "pytorch-metric-learning, one triplet per anchor."
    return _pairwise_loss_job(benchmark_data(size, folder), _pml_triplet_loss(size))


def _pairwise_loss_job(start, criterion):
    "Job of a training loop with a loss of adapted embeddings and labels."
    return training_loop_job(start, lambda adapter, rows, gen: criterion(adapter(start.x[rows]), start.y[rows]))[0]


def _pml_triplet_loss(size):
    "The triplet loss of pytorch-metric-learning with one triplet per anchor and the plain mean."
    import_optional("pytorch_metric_learning", "bench")
    from pytorch_metric_learning import losses, reducers

    return losses.TripletMarginLoss(margin=size["margin"], triplets_per_anchor=1, reducer=reducers.MeanReducer())


def pml_all_triplets(size, folder):
    "pytorch-metric-learning, miner and loss as documented."
    import_optional("pytorch_metric_learning", "bench")
    from pytorch_metric_learning import losses, miners

    start = benchmark_data(size, folder)
    criterion = losses.TripletMarginLoss(margin=size["margin"])
    miner = miners.TripletMarginMiner(margin=size["margin"], type_of_triplets="all")

    def loss(z, y):
        return criterion(z, y, miner(z, y))

    return _pairwise_loss_job(start, loss)


def pml_trainer(size, folder):
    "pytorch-metric-learning, with its own training loop."
    criterion = _pml_triplet_loss(size)
    import torch
    from pytorch_metric_learning.trainers import MetricLossOnly

    start, current = benchmark_data(size, folder), SimpleNamespace()

    def prepare():
        adapter = torch_released_ega(size["d"], size["hidden"], start.state)
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=size["lr"], weight_decay=1e-4, fused=True)
        current.trainer = MetricLossOnly(
            {"trunk": adapter},
            {"trunk_optimizer": optimizer},
            size["batch"],
            {"metric_loss": criterion},
            torch.utils.data.TensorDataset(start.x, start.y),
            data_device="cpu",
            dataloader_num_workers=0,
        )

    n_steps = size["epochs"] * (size["n"] // size["batch"])  # it drops the last short batch
    return Job(lambda: current.trainer.train(num_epochs=size["epochs"]), n_steps, prepare)


def _vector_model(x, build_adapter):
    "A SentenceTransformer of one module, which looks up rows of the tensor x by number and adapts them."
    from ega.data.datasets import patch_torchvision

    patched = patch_torchvision()
    import_optional("sentence_transformers", "bench")
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import InputModule

    class RowAdapter(InputModule):
        def __init__(self):
            super().__init__()
            self.adapter = build_adapter()
            self.patched = patched  # must live as long as the model

        def preprocess(self, inputs, prompt=None, **kw):
            return {"sentence_embedding": x[torch.tensor(inputs)]}  # the name its trainer looks for

        def forward(self, row):
            return row | {"sentence_embedding": self.adapter(row["sentence_embedding"])}

        def save(self, *args, **kw):
            pass

        def get_embedding_dimension(self):
            return x.shape[1]

    return SentenceTransformer(modules=[RowAdapter()], device="cpu")


def _st_job(size, folder, columns, loss):
    "Job of the Trainer of sentence-transformers; `columns` is a function of BenchmarkData, `loss` of the model."
    for package in ("datasets", "accelerate"):
        import_optional(package, "bench")
    start, current = benchmark_data(size, folder), SimpleNamespace()
    model = _vector_model(start.x, lambda: torch_released_ega(size["d"], size["hidden"], start.state))
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    options = SentenceTransformerTrainingArguments(
        f"{folder}/out",
        num_train_epochs=size["epochs"],
        per_device_train_batch_size=size["batch"],
        learning_rate=size["lr"],
        weight_decay=1e-4,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_dict(columns(start))

    def prepare():
        model[0].adapter.load_state_dict(start.state)
        current.trainer = SentenceTransformerTrainer(model=model, args=options, train_dataset=rows, loss=loss(model))

    return Job(lambda: current.trainer.train(), _n_steps(size), prepare)


def sentence_transformers_dataset_triplets(size, folder):
    "sentence-transformers, TripletLoss on triplets that are drawn before the timing."
    import torch

    from ega.method.active_ratio import index_rows_by_class, random_dataset_triplets

    def columns(start):
        index, rows = index_rows_by_class(start.y), torch.arange(len(start.y))
        triplets = random_dataset_triplets(index, rows, gen=torch.Generator().manual_seed(1))
        return {name: part.tolist() for name, part in zip(("anchor", "positive", "negative"), triplets)}

    def loss(model):
        from sentence_transformers.sentence_transformer.losses import TripletLoss

        return TripletLoss(model, triplet_margin=size["margin"])

    return _st_job(size, folder, columns, loss)


def sentence_transformers_batch_triplets(size, folder):
    "sentence-transformers, all triplets of the batch."

    def loss(model):
        from sentence_transformers.sentence_transformer.losses import BatchAllTripletLoss

        return BatchAllTripletLoss(model, margin=size["margin"])

    def columns(start):
        return {"row": list(range(len(start.y))), "label": start.y.tolist()}

    return _st_job(size, folder, columns, loss)


def _torch_supcon_loss(z, y, tau=0.07):
    "Supervised contrastive loss, written from its equation."
    import torch

    own = torch.eye(len(z), dtype=torch.bool)
    positive = (y[:, None] == y[None]) & ~own
    log_q = torch.log_softmax((z @ z.T / tau).masked_fill(own, float("-inf")), 1)
    return -(log_q.masked_fill(~positive, 0).sum(1) / positive.sum(1).clamp(min=1)).mean()


def _torch_nca_loss(z, y, tau=0.07):
    "Neighbourhood components analysis, written from its equation."
    import torch

    own = torch.eye(len(z), dtype=torch.bool)
    positive = (y[:, None] == y[None]) & ~own
    log_q = torch.log_softmax((z @ z.T / tau).masked_fill(own, float("-inf")), 1)
    per_anchor = -log_q.masked_fill(~positive, torch.finfo(z.dtype).min).logsumexp(1)
    return per_anchor.masked_fill(~positive.any(1), 0).mean()


def torch_supcon(size, folder):
    "Plain torch, SupCon."
    return _pairwise_loss_job(benchmark_data(size, folder), _torch_supcon_loss)


def torch_nca(size, folder):
    "Plain torch, NCA."
    return _pairwise_loss_job(benchmark_data(size, folder), _torch_nca_loss)


def pml_supcon(size, folder):
    "pytorch-metric-learning, SupCon."
    import_optional("pytorch_metric_learning", "bench")
    from pytorch_metric_learning import losses

    return _pairwise_loss_job(benchmark_data(size, folder), losses.SupConLoss(temperature=0.07))


def pml_nca(size, folder):
    "pytorch-metric-learning, NCA."
    import_optional("pytorch_metric_learning", "bench")
    from pytorch_metric_learning import losses

    return _pairwise_loss_job(benchmark_data(size, folder), losses.NCALoss(softmax_scale=1 / (2 * 0.07)))


def ega_supcon(size, folder):
    "`ega.method.training.train`, SupCon."
    from ega.method.losses import supcon
    from ega.method.training import pairwise_objective

    return _ega_training_job(size, folder, lambda start: pairwise_objective(partial(supcon, tau=0.07)))


def ega_nca(size, folder):
    "`ega.method.training.train`, NCA."
    from ega.method.losses import nca
    from ega.method.training import pairwise_objective

    return _ega_training_job(size, folder, lambda start: pairwise_objective(partial(nca, tau=0.07)))


def floor_contrastive(size, folder):
    "Lower bound: the seven matrix products of a step of SupCon or NCA."
    batches = [min(size["batch"], size["n"] - i) for i in range(0, size["n"], size["batch"])]
    steps = [(n, n) for n in batches] * size["epochs"]
    return Job(_products(steps, size["d"], size["hidden"], similarities=True), _n_steps(size))


def margin_for_active_ratio(
    start,  # BenchmarkData
    rho,  # active ratio to reach, 0 to 1
):  # margin > 0
    "The margin at which this share of whole-set triplets is active."
    import torch

    from ega.method.active_ratio import index_rows_by_class, random_dataset_triplets
    from ega.method.losses import triplet_violations

    index, rows = index_rows_by_class(start.y), torch.arange(len(start.y))
    t = random_dataset_triplets(index, rows, gen=torch.Generator().manual_seed(2))
    with torch.no_grad():
        z = torch_released_ega(start.size["d"], start.size["hidden"], start.state)(start.x)
    gaps = -triplet_violations(z[t.a], z[t.p], z[t.n], 0.0)
    return max(float(gaps.quantile(rho)) + 1e-4, 1e-3)


def _size_at_rho(size, folder):
    "The size with a margin that gives its active ratio, and a learning rate that keeps it."
    start = benchmark_data({**size, "margin": 0.2}, folder)
    return {**size, "lr": 1e-7, "margin": margin_for_active_ratio(start, size["rho"])}


def torch_at_active_ratio(size, folder):
    "Plain torch at a given active ratio, with a backward pass over all rows."
    contender = {"whole set": torch_dataset_triplets, "in batch": torch_batch_triplets}[size["sampler"]]
    return contender(_size_at_rho(size, folder), folder)


def ega_at_active_ratio(size, folder):
    "`ega.method.training.train` at a given active ratio, with a backward pass over rows with a gradient only."
    contender = {"whole set": ega_dataset_triplets, "in batch": ega_batch_triplets}[size["sampler"]]
    return contender(_size_at_rho(size, folder), folder)


def _gallery(size):
    "Random gallery and queries."
    import numpy as np

    n, d = size["n"] + size["queries"], size["d"]
    x, _ = make_clusters(n, d, 100, rng=np.random.default_rng(0), inner=min(32, d))
    return x[: size["n"]], x[size["n"] :]


def faiss_exact(size, folder):
    "Exact search with IndexFlatL2 of FAISS."
    faiss, (xb, xq) = import_optional("faiss", "cpu"), _gallery(size)

    def run():
        index = faiss.IndexFlatL2(size["d"])
        index.add(xb)
        index.search(xq, size["k"])

    return Job(run, size["queries"])


def ega_exact(size, folder):
    "Exact search with `ega.measure.search.knn`."
    from ega.measure.search import knn

    xb, xq = _gallery(size)
    return Job(lambda: knn(xq, xb, size["k"]), size["queries"])


def faiss_loo(size, folder):
    "Leave-one-out with FAISS: k + 1 neighbours, the own row dropped."
    import numpy as np

    faiss, (xb, _) = import_optional("faiss", "cpu"), _gallery(size)

    def run():
        index = faiss.IndexFlatL2(size["d"])
        index.add(xb)
        D, I = index.search(xb, size["k"] + 1)
        other = I != np.arange(len(xb))[:, None]
        other[other.all(1), -1] = False  # a duplicate took the place of the own row
        return D[other].reshape(len(xb), -1), I[other].reshape(len(xb), -1)

    return Job(run, size["n"])


def ega_loo(size, folder):
    "Leave-one-out with `ega.measure.search.loo_knn`."
    from ega.measure.search import loo_knn

    xb, _ = _gallery(size)
    return Job(lambda: loo_knn(xb, size["k"]), size["n"])


_KS, _NPROBES, _NLIST = (1, 3, 5, 10), (1, 5, 10), 10


def _faiss_ivf(faiss, xb):
    "A trained IVF index of FAISS with the gallery added."
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(xb.shape[1]), xb.shape[1], _NLIST, faiss.METRIC_L2)
    index.train(xb)
    index.add(xb)
    return index


def _n_answers(size):
    return size["queries"] * len(_KS) * len(_NPROBES)


def faiss_index_rebuilt_per_setting(size, folder):
    "A FAISS index and a search for every pair of K and nprobe."
    faiss, (xb, xq) = import_optional("faiss", "cpu"), _gallery(size)

    def run():
        for k in _KS:
            for p in _NPROBES:
                index = _faiss_ivf(faiss, xb)
                index.nprobe = p
                index.search(xq, k)

    return Job(run, _n_answers(size))


def faiss_index_built_once(size, folder):
    "One FAISS index, and a search for every pair of K and nprobe."
    faiss, (xb, xq) = import_optional("faiss", "cpu"), _gallery(size)

    def run():
        index = _faiss_ivf(faiss, xb)
        for k in _KS:
            for p in _NPROBES:
                index.nprobe = p
                index.search(xq, k)

    return Job(run, _n_answers(size))


def ega_sweep(size, folder):
    "All pairs of K and nprobe with `ega.measure.search.ivf_sweep`."
    from ega.measure.search import ivf_sweep

    import_optional("faiss", "cpu")
    xb, xq = _gallery(size)

    def run():
        ivf_sweep(xq, xb, nlist=_NLIST, nprobes=_NPROBES, k=max(_KS), device="cpu")

    return Job(run, _n_answers(size))


def _rows_to_transform(size):
    "Random unit rows, and adapter weights from torch's initialisation."
    import numpy as np
    import torch

    torch.manual_seed(0)
    x, _ = make_clusters(size["n"], size["d"], 100, rng=np.random.default_rng(0))
    return x, torch_released_ega(size["d"], size["hidden"]).state_dict()


def torch_transform(size, folder):
    "Plain torch in blocks of 4,096 rows."
    import torch

    x, state = _rows_to_transform(size)
    adapter = torch_released_ega(size["d"], size["hidden"], state).eval()

    def run():
        with torch.no_grad():
            torch.cat([adapter(block) for block in torch.from_numpy(x).split(4096)]).numpy()

    return Job(run, size["n"])


def ega_transform(size, folder):
    "`ega.method.adapters.transform`."
    import torch

    from ega.method.adapters import ReleasedEGA, transform

    x, state = _rows_to_transform(size)
    adapter = ReleasedEGA(size["d"], hidden=size["hidden"], gen=torch.Generator().manual_seed(0)).eval()
    adapter.load_state_dict(state)
    return Job(lambda: transform(adapter, x, device="cpu"), size["n"])


def floor_transform(size, folder):
    "Lower bound: the two matrix products of a block of rows."
    import torch

    x, state = _rows_to_transform(size)
    x = torch.from_numpy(x)
    w1, w2 = state["branch.0.weight"], state["branch.3.weight"]
    h, z = torch.empty(4096, size["hidden"]), torch.empty(4096, size["d"])

    def run():
        for block in x.split(4096):
            n = len(block)
            torch.mm(block, w1.T, out=h[:n])
            torch.mm(h[:n], w2.T, out=z[:n])

    return Job(run, size["n"])


FitData = namedtuple("FitData", "x y x_unseen y_unseen")


def _write_fit_data(folder, n, d, classes, rows_at_once=2**16):
    "Write the arrays of FitData: unit rows whose classes share the covariance within them."
    import numpy as np

    rng, n_unseen = np.random.default_rng(0), min(5000, n // 4)
    signal, nuisance = min(24, d // 2), min(8, d // 4)
    spread = np.full(d, 0.05, np.float32)  # standard deviation within a class
    spread[:signal], spread[signal : signal + nuisance] = 0.7, 3.0
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0].astype(np.float32)
    for name, n_rows, n_classes in (("", n, classes), ("_unseen", n_unseen, classes // 4)):
        centres = np.zeros((n_classes, d), np.float32)
        centres[:, :signal] = rng.normal(size=(n_classes, signal))
        y = np.arange(n_rows) % n_classes
        np.save(folder / f"y{name}.npy", y)
        x = np.lib.format.open_memmap(folder / f"x{name}.npy", "w+", np.float32, (n_rows, d))
        for i in range(0, n_rows, rows_at_once):
            labels = y[i : i + rows_at_once]
            rows = (centres[labels] + spread * rng.standard_normal((len(labels), d), np.float32)) @ rotation
            x[i : i + rows_at_once] = rows / np.linalg.norm(rows, axis=1, keepdims=True)


def fit_data(
    size,  # dict: n, d, classes
    folder,  # shared folder
):  # FitData, read into memory
    "The rows that are fitted on and those of further classes; made once, then read from files."
    import numpy as np

    path = Path(folder) / f"fit-{size['n']}-{size['d']}-{size['classes']}"
    if not path.exists():
        temporary = Path(tempfile.mkdtemp(dir=folder))
        _write_fit_data(temporary, size["n"], size["d"], size["classes"])
        try:
            temporary.rename(path)
        except OSError:
            shutil.rmtree(temporary)  # another contender was first
    return FitData(*(np.load(path / f"{name}.npy") for name in FitData._fields))


class _StopTraining(Exception):
    "Ends the training of another library inside one of its callbacks."


class FitClock:
    "Seconds and CPU seconds of a fit, and its LP@1 on unseen classes, which is measured outside of them."

    def __init__(
        self,
        data,  # FitData
        limit_s,  # seconds after which a training ends
        target=float("inf"),  # LP@1 at which a training ends
    ):
        self.data, self.limit_s, self.target = data, limit_s, target
        self.wall_s = self.cpu_s = 0.0
        self.lp_at_1, self.next_measure = float("nan"), limit_s / 100

    def start(self):
        "Start or continue the clock."
        self.begun = time.perf_counter(), cpu_seconds()

    def stop(self):
        "Stop the clock and add what has passed."
        self.wall_s += time.perf_counter() - self.begun[0]
        self.cpu_s += cpu_seconds() - self.begun[1]

    def measure(
        self,
        transform,  # function of (m, d) rows -> (m, d) adapted rows, an array or a tensor
    ):
        "Measure LP@1 while the clock stands."
        import numpy as np

        from ega.measure.metrics import loo_lp_at_k

        z = np.asarray(transform(self.data.x_unseen))
        self.lp_at_1 = float(loo_lp_at_k(z, self.data.y_unseen).mean())

    def is_over(
        self,
        transform,  # as for `measure`
    ):  # bool
        "Whether a running training has reached the target or its limit; LP@1 is measured at growing intervals."
        self.stop()
        if self.wall_s >= min(self.limit_s, self.next_measure):
            self.next_measure = 1.25 * self.wall_s
            self.measure(transform)
        over = self.wall_s >= self.limit_s or self.lp_at_1 >= self.target
        self.start()
        return over


def fit_with_ega(data, clock, size):
    "`EmbeddingAdapter().fit`, with its default settings."
    from ega.estimator import EmbeddingAdapter

    clock.start()
    adapter = EmbeddingAdapter(device="cpu").fit(data.x, data.y)
    clock.stop()
    clock.measure(adapter.transform)


def fit_with_products(data, clock, size):
    "Lower bound: the product of the rows with themselves and one eigendecomposition."
    import numpy as np

    clock.start()
    np.linalg.eigh((data.x.T @ data.x).astype(np.float64))
    clock.stop()


def _linear_head(d):
    "A linear map that starts at the identity, followed by normalisation, in ordinary torch."
    import torch

    class LinearHead(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.normalize(super().forward(x), dim=-1)

    head = LinearHead(d, d, bias=False)
    torch.nn.init.eye_(head.weight)
    return head


def _apply(head):
    "Function from rows to adapted rows, without gradients."
    import torch

    return torch.no_grad()(lambda x: head(torch.from_numpy(x)).numpy())


def fit_with_pml(data, clock, size):
    "pytorch-metric-learning: its trainer, sampler, miner and loss."
    import torch
    from pytorch_metric_learning import losses, miners, samplers
    from pytorch_metric_learning.trainers import MetricLossOnly

    def stop_when_over(trainer):
        if clock.is_over(transform):
            raise _StopTraining

    torch.manual_seed(0)
    clock.start()
    head = _linear_head(size["d"])
    transform, optimizer = _apply(head), torch.optim.AdamW(head.parameters(), lr=size["lr"], fused=True)
    trainer = MetricLossOnly(
        {"trunk": head},
        {"trunk_optimizer": optimizer},
        size["batch"],
        {"metric_loss": losses.TripletMarginLoss(margin=0.2)},
        torch.utils.data.TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y)),
        mining_funcs={"tuple_miner": miners.MultiSimilarityMiner()},
        sampler=samplers.MPerClassSampler(data.y, m=4, length_before_new_iter=max(size["n"], size["batch"])),
        data_device="cpu",
        dataloader_num_workers=0,
        end_of_iteration_hook=stop_when_over,
    )
    try:
        trainer.train(num_epochs=10**6)
    except _StopTraining:
        clock.stop()


def fit_with_sentence_transformers(data, clock, size):
    "sentence-transformers: its trainer on precomputed rows, with a loss over the labels of a batch."
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    class StopWhenOver(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = clock.is_over(_apply(head))

    model = _vector_model(torch.from_numpy(data.x), lambda: _linear_head(size["d"]))
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import BatchAllTripletLoss

    head = model[0].adapter
    clock.start()
    with tempfile.TemporaryDirectory() as out:
        options = SentenceTransformerTrainingArguments(
            out,
            num_train_epochs=10**4,
            per_device_train_batch_size=size["batch"],
            batch_sampler="group_by_label",
            learning_rate=size["lr"],
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        rows = Dataset.from_dict({"row": list(range(size["n"])), "label": data.y.tolist()})
        loss, callbacks = BatchAllTripletLoss(model, margin=0.2), [StopWhenOver()]
        trainer = SentenceTransformerTrainer(
            model=model, args=options, train_dataset=rows, loss=loss, callbacks=callbacks
        )
        trainer.train()
    clock.stop()


def fit_with_nca(data, clock, size):
    "scikit-learn's NeighborhoodComponentsAnalysis, from the identity."
    from sklearn.neighbors import NeighborhoodComponentsAnalysis

    from ega.data.arrays import normalize

    def stop_when_over(matrix, iteration):
        matrix = matrix.reshape(size["d"], size["d"])
        if clock.is_over(lambda x: normalize(x @ matrix.T)):
            raise _StopTraining

    nca = NeighborhoodComponentsAnalysis(init="identity", max_iter=10**4, callback=stop_when_over)
    clock.start()
    try:
        nca.fit(data.x, data.y)
    except _StopTraining:
        clock.stop()
    else:  # it has converged
        clock.stop()
        clock.measure(lambda x: normalize(x @ nca.components_.T))


def time_fit(
    name,  # of one of the functions above
    size,  # dict: n, d, classes, limit_s, batch, lr
    folder,  # shared folder; `ega` leaves its LP@1 there, the target of the others
):  # dict: wall_s, cpu_s, peak_rss_mb, lp_at_1
    "Time one fit in this process."
    data, target = fit_data(size, folder), Path(folder) / f"lp-{size['n']}-{size['d']}.json"
    known = json.loads(target.read_text()) if target.exists() else float("inf")
    clock = FitClock(data, size["limit_s"], known)
    globals()[name](data, clock, size)
    if name == "fit_with_ega":
        with atomic_write(target) as temporary:
            temporary.write_text(json.dumps(clock.lp_at_1))
    elif name != "fit_with_products" and clock.lp_at_1 != clock.lp_at_1:
        raise RuntimeError(f"{name} ended before its LP@1 was measured")
    return {
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "peak_rss_mb": peak_memory_mb(),
        "lp_at_1": clock.lp_at_1,
    }


def time_fit_main():
    "Main function of the process of one fit: the last line that it prints is the result."
    exit_with_parent(sys.argv[3])
    print("\n" + json.dumps(time_fit(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])))


def _fit_job(name, size, folder):
    "Job of one fit, in a new process if the size says so, beside busy processes."
    fit_data(size, folder)
    code = "from contenders import time_fit_main; time_fit_main()"
    command = [sys.executable, "-c", code, name, json.dumps(size), str(folder)]

    def run():
        with busy_processes(size["busy"]):
            if not size["new_process"]:
                return time_fit(name, size, folder)
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(printed.splitlines()[-1])

    return Job(run, 1)


def ega_fit(size, folder):
    "`ega`, whose LP@1 is the target of the others."
    return _fit_job("fit_with_ega", size, folder)


def pml_fit(size, folder):
    "pytorch-metric-learning."
    import_optional("pytorch_metric_learning", "bench")
    return _fit_job("fit_with_pml", size, folder)


def sentence_transformers_fit(size, folder):
    "sentence-transformers."
    from ega.data.datasets import patch_torchvision

    patched = patch_torchvision()  # noqa: F841 must live while the package is imported
    for package in ("datasets", "accelerate", "sentence_transformers"):
        import_optional(package, "bench")
    return _fit_job("fit_with_sentence_transformers", size, folder)


def nca_fit(size, folder):
    "scikit-learn, where all pairs of rows fit into memory."
    needed_gb = 4 * 8 * size["n"] ** 2 / 2**30  # about four matrices of float64
    if needed_gb > _memory_gb() / 2:
        raise NotRunError(f"needs {needed_gb:,.0f} GB for all pairs of rows")
    return _fit_job("fit_with_nca", size, folder)


def floor_fit(size, folder):
    "Lower bound: matrix products."
    return _fit_job("fit_with_products", size, folder)


def _write_onnx_network(path, side, width=32):
    "Write an ONNX network: five strided convolutions with random weights, then the mean over the map."
    onnx = import_optional("onnx", "bench")
    import numpy as np

    h, rng = onnx.helper, np.random.default_rng(0)
    channels = [3] + [width << i for i in range(5)]
    nodes, weights = [], []
    for i, (n_in, n_out) in enumerate(zip(channels, channels[1:])):
        kernel = rng.normal(0, (2 / n_in / 9) ** 0.5, (n_out, n_in, 3, 3)).astype(np.float32)
        weights.append(onnx.numpy_helper.from_array(kernel, f"w{i}"))
        nodes.append(h.make_node("Conv", [f"r{i}", f"w{i}"], [f"c{i}"], strides=[2, 2], pads=[1] * 4))
        nodes.append(h.make_node("Relu", [f"c{i}"], [f"r{i + 1}"]))
    nodes.append(h.make_node("ReduceMean", [f"r{len(weights)}"], ["embedding"], axes=[2, 3], keepdims=0))

    def value(name, shape):
        return h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    inputs, outputs = [value("r0", ["n", 3, side, side])], [value("embedding", ["n", channels[-1]])]
    graph = h.make_graph(nodes, "net", inputs, outputs, weights)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)
    with atomic_write(path) as temporary:
        onnx.save(model, temporary)


def _write_pictures(folder, n):
    "Write JPEG files of smooth random fields, unless the folder exists; return the folder."
    Image = import_optional("PIL.Image", "bench")
    import numpy as np

    if folder.exists():
        return folder
    rng, temporary = np.random.default_rng(0), Path(tempfile.mkdtemp(dir=folder.parent))
    for i in range(n):
        field = Image.fromarray(rng.integers(0, 256, (25, 33, 3), np.uint8))
        picture = field.resize((500, 375), Image.Resampling.BICUBIC)
        picture.save(temporary / f"{i:04d}.jpg", quality=90)
    try:
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary)  # another contender was first
    return folder


def _pictures_and_encoder(size, folder):
    "Source and encoder; the process is limited to as many cores as there are threads."
    from ega.data.datasets import read_image_folder
    from ega.data.encoders import ImagePreprocessing, OnnxImageEncoder

    import_optional("onnxruntime", "bench")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: size["threads"]])
    side = size["side"]
    network = Path(folder) / f"net-{side}.onnx"
    if not network.exists():
        _write_onnx_network(network, side)
    source = read_image_folder(_write_pictures(Path(folder) / f"pictures-{size['n']}", size["n"]))
    preprocess = ImagePreprocessing(resize=side, crop=side)
    return source, OnnxImageEncoder(network, preprocess=preprocess, threads=size["threads"])


def encoder_alone(size, folder):
    "The encoder alone, on decoded inputs."
    source, encoder = _pictures_and_encoder(size, folder)
    decoded = [encoder.prepare(source.read(i)) for i in range(size["n"])]

    def run():
        for i in range(0, size["n"], 16):
            encoder.encode(decoded[i : i + 16])

    return Job(run, size["n"])


def decode_then_encode(size, folder):
    "Decode and encode batch after batch."
    source, encoder = _pictures_and_encoder(size, folder)

    def run():
        for i in range(0, size["n"], 16):
            batch = range(i, min(i + 16, size["n"]))
            encoder.encode([encoder.prepare(source.read(j)) for j in batch])

    return Job(run, size["n"])


def ega_embed(size, folder):
    "`ega.data.embed.embed`."
    from ega.data.embed import embed

    source, encoder = _pictures_and_encoder(size, folder)
    out = Path(tempfile.mkdtemp(dir=folder)) / "pack.parquet"
    return Job(lambda: embed(source, encoder, out, progress=False), size["n"], lambda: out.unlink(missing_ok=True))


_PRINT_PEAK = (  # the peak memory of the started process in kB, as the last word that it prints
    "\nfinally: print('\\n', next(l.split()[1] for l in open('/proc/self/status') if l[:5] == 'VmHWM'))"
    if Path("/proc/self/status").exists()
    else "\nfinally: pass"
)


def _start_job(size, statement):
    "Job of starting Python processes that run a statement."
    command = [sys.executable, "-c", f"try: {statement}{_PRINT_PEAK}"]

    def run():
        for _ in range(size["processes"]):
            words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return {"peak_rss_mb": int(words[-1]) / 1024} if words else {}

    return Job(run, size["processes"])


def start_python(size, folder):
    "Start Python without importing anything."
    return _start_job(size, "pass")


def start_ega(size, folder):
    "Import the package."
    return _start_job(size, "import ega")


def start_ega_help(size, folder):
    "Print the help of the command."
    return _start_job(size, "from ega.cli import parser; parser().format_help()")


def start_torch(size, folder):
    "Import torch, which `import ega` must not load."
    return _start_job(size, "import torch")


_AIRCRAFT = dict(n=2664, d=512, classes=80, hidden=2048, batch=256, epochs=1, margin=0.2, lr=1e-4)
_TINY = dict(n=256, d=32, classes=16, hidden=64, batch=64, epochs=1, margin=0.2, lr=1e-4)

_RHOS = {"whole set": (0.01, 0.1, 0.3, 1.0), "in batch": (0.01, 0.1, 1.0)}


def _rho_sizes(base, rhos=_RHOS):
    base = {k: v for k, v in base.items() if k not in ("margin", "lr")}
    return tuple(base | {"sampler": sampler, "rho": rho} for sampler, values in rhos.items() for rho in values)


def _exact_sizes(*ns, ds=(128, 384, 768, 1280)):
    return tuple({"n": n, "d": d, "queries": 1000, "k": k} for n in ns for d in ds for k in (1, 10))


def _sweep_sizes(*ns):
    return tuple({"n": n, "d": 128, "queries": 1000} for n in ns)


_TINY_SEARCH = ({"n": 500, "d": 16, "queries": 20, "k": 10},)

GROUPS = {
    "whole-set": Group(
        title="triplet step, partners from the whole set",
        unit="step of 256 anchors",
        reference="per-item loop",
        floor="floor",
        contenders={
            "per-item loop": torch_dataloader_dataset_triplets,
            "torch, resident": torch_dataset_triplets,
            "sentence-transformers": sentence_transformers_dataset_triplets,
            "ega": ega_dataset_triplets,
            "floor": floor_dataset_triplets,
            "floor of the work left": sparse_floor_dataset_triplets,
        },
        sizes=(_AIRCRAFT,),
        quick_sizes=(_TINY,),
    ),
    "in-batch": Group(
        title="triplet step, partners from the batch",
        unit="step of 256 anchors",
        reference="per-item loop",
        floor="floor",
        contenders={
            "per-item loop": torch_dataloader_dataset_triplets,
            "torch, resident": torch_batch_triplets,
            "PML, one an anchor": pml_one_triplet_per_anchor,
            "PML, all triplets": pml_all_triplets,
            "PML, trainer": pml_trainer,
            "sentence-transformers": sentence_transformers_batch_triplets,
            "ega": ega_batch_triplets,
            "floor": floor_batch_triplets,
            "floor of the work left": sparse_floor_batch_triplets,
        },
        sizes=(_AIRCRAFT,),
        quick_sizes=(_TINY,),
    ),
    "supcon": Group(
        title="supervised contrastive step",
        unit="step",
        reference="torch, resident",
        floor="floor",
        contenders={"torch, resident": torch_supcon, "PML": pml_supcon, "ega": ega_supcon, "floor": floor_contrastive},
        sizes=(_AIRCRAFT, _AIRCRAFT | {"batch": 1024}),
        quick_sizes=(_TINY,),
    ),
    "nca": Group(
        title="NCA step",
        unit="step",
        reference="torch, resident",
        floor="floor",
        contenders={"torch, resident": torch_nca, "PML": pml_nca, "ega": ega_nca, "floor": floor_contrastive},
        sizes=(_AIRCRAFT,),
        quick_sizes=(_TINY,),
    ),
}

GROUPS |= {
    "rho": Group(
        title="triplet step at a given active ratio",
        unit="step of 256 anchors",
        reference="torch, resident",
        floor=None,
        contenders={"torch, resident": torch_at_active_ratio, "ega": ega_at_active_ratio},
        sizes=_rho_sizes(_AIRCRAFT),
        quick_sizes=_rho_sizes(_TINY, {"whole set": (0.3,)}),
        repeats=3,
    ),
    "exact": Group(
        title="exact neighbours",
        unit="query",
        reference="FAISS",
        floor=None,
        contenders={"FAISS": faiss_exact, "ega": ega_exact},
        sizes=_exact_sizes(10**3, 10**4, 10**5) + _exact_sizes(10**6, ds=(128,)),
        quick_sizes=_TINY_SEARCH,
    ),
    "leave-one-out": Group(
        title="exact neighbours of every row among the others",
        unit="query",
        reference="FAISS",
        floor=None,
        contenders={"FAISS": faiss_loo, "ega": ega_loo},
        sizes=_exact_sizes(10**3, 10**4),
        quick_sizes=_TINY_SEARCH,
    ),
    "sweep": Group(
        title="all K and nprobe of an inverted file",
        unit="query and setting",
        reference="FAISS, anew",
        floor=None,
        contenders={
            "FAISS, anew": faiss_index_rebuilt_per_setting,
            "FAISS, once": faiss_index_built_once,
            "ega": ega_sweep,
        },
        sizes=_sweep_sizes(10**3, 10**4, 3 * 10**4),
        quick_sizes=_TINY_SEARCH,
    ),
    "transform": Group(
        title="rows through a trained adapter",
        unit="row",
        reference="torch, by hand",
        floor="floor",
        contenders={"torch, by hand": torch_transform, "ega": ega_transform, "floor": floor_transform},
        sizes=tuple({"n": 40_000, "d": 512, "hidden": 2048, "threads": t} for t in (1, 2)),
        quick_sizes=({"n": 5000, "d": 32, "hidden": 64, "threads": 1},),
        repeats=3,
    ),
}

GROUPS |= {
    "extraction": Group(
        title="pictures to a pack",
        unit="picture",
        reference="in turn",
        floor="encoder alone",
        contenders={"in turn": decode_then_encode, "ega": ega_embed, "encoder alone": encoder_alone},
        sizes=({"n": 96, "side": 224, "threads": 2},),
        quick_sizes=({"n": 8, "side": 32, "threads": 2},),
    ),
    "start-up": Group(
        title="a fresh process",
        unit="process",
        reference="import torch",
        floor="python -c pass",
        contenders={
            "import torch": start_torch,
            "import ega": start_ega,
            "ega --help": start_ega_help,
            "python -c pass": start_python,
        },
        sizes=({"processes": 1},),
        quick_sizes=({"processes": 1},),
    ),
}


def _fit_sizes(n, d, classes, limit_s, settings):
    "Sizes of one fit; `settings` are numbers of threads and of busy processes beside it."
    size = dict(n=n, d=d, classes=classes, limit_s=limit_s, batch=256, lr=1e-3, new_process=True)
    return tuple(size | {"threads": threads, "busy": busy} for threads, busy in settings)


_TINY_FIT = dict(n=600, d=32, classes=30, limit_s=0.5, batch=120, lr=1e-3, new_process=False, threads=1, busy=1)

GROUPS["fit"] = Group(
    title="a matrix and labels to a fitted adapter",
    unit="fit",
    reference="ega",
    floor="floor",
    contenders={
        "ega": ega_fit,  # first: its LP@1 is the target of the others
        "PML, trainer": pml_fit,
        "sentence-transformers": sentence_transformers_fit,
        "scikit-learn, NCA": nca_fit,
        "floor": floor_fit,
    },
    sizes=_fit_sizes(10**4, 384, 200, 30, product((1, 2), (0, 1)))
    + _fit_sizes(10**5, 768, 1000, 90, [(1, 0)])
    + _fit_sizes(10**6, 768, 1000, 120, [(1, 0)]),
    quick_sizes=(_TINY_FIT,),
    repeats=3,
    warm_up=False,
    by_default=False,
)


def _memory_gb():
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return float("nan")


def _cpu_model():
    try:
        return next(line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


_VERSIONED = "numpy torch faiss-cpu faiss-gpu onnxruntime pytorch-metric-learning sentence-transformers".split()


def describe_machine():
    "What times depend on: platform, processor, cores this process may use, memory, and versions of the libraries."
    from importlib.metadata import PackageNotFoundError, version

    import ega
    from ega.experiments.runs import platform_tag

    versions = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            pass
    return {
        "machine": platform_tag(),
        "cpu": _cpu_model(),
        "cores": joblib.cpu_count(),
        "memory_gb": _memory_gb(),
        "versions": json.dumps(versions),
        "ega": ega.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def run_benchmarks(
    groups=None,  # names of groups; None: all that run by default, in a smoke test all
    *,
    quick=False,  # smoke test: tiny sizes, two rounds, one process for all contenders
    threads=1,  # of every contender, where a size does not state them
    progress=False,  # a bar with the remaining time
):  # DataFrame, one row for each group, size, contender and round
    "Time the groups, one after the other."
    import pandas as pd
    from tqdm import tqdm

    unknown = sorted(set(groups or ()) - set(GROUPS))
    if unknown:
        raise InputError(f"unknown groups {unknown}; there are {', '.join(GROUPS)}")
    todo = []
    for name, group in GROUPS.items():
        if name in groups if groups else quick or group.by_default:
            todo += [(name, size) for size in (group.quick_sizes if quick else group.sizes)]
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    bar = tqdm(total=len(todo), unit="group", disable=not progress, dynamic_ncols=True)
    with folder as path, bar:
        worker = Worker(path, threads) if quick else None
        try:
            rows = []
            for name, size in todo:
                bar.set_postfix_str(name)
                repeats = 2 if quick else GROUPS[name].repeats
                timed = run_group(GROUPS[name], size, folder=path, threads=threads, repeats=repeats, worker=worker)
                rows += [{"group": name} | row for row in timed]
                bar.update()
        finally:
            if worker:
                worker.close()
    return pd.DataFrame(rows).reindex(columns=COLUMNS).assign(**describe_machine())


COLUMNS = "group contender size repeat wall_s cpu_s peak_rss_mb work title unit rho lp_at_1".split()
COLUMNS += "threads reference floor status".split()


def write_results(
    frame,  # rows of `run_benchmarks`
    out,  # folder
):  # Path of the table
    "Write the rows to speed.parquet in a folder, completely or not at all."
    path = Path(out) / "speed.parquet"
    with atomic_write(path) as temporary:
        frame.to_parquet(temporary, compression="zstd", index=False)
    return path
