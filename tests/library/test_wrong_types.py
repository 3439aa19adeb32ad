"Arguments of a wrong type or out of range, for every main object of the library: the error is an InputError."

import copy
import re
from importlib.util import find_spec

import api
import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from ega import (
    AdaptedIndex,
    EmbeddingAdapter,
    EmbeddingSet,
    InputError,
    Monitor,
    estimate_gain,
    evaluate,
    normalize,
    read_pack,
    write_pack,
)
from ega.data.arrays import spawn_rngs
from ega.data.embed import embed
from ega.data.relevance import (
    RelevanceSet,
    embed_relevance,
    read_beir,
    read_pairs,
    read_relevance_set,
    read_text_pairs,
    split_by_document,
    split_by_query,
    write_relevance_set,
)
from ega.data.vectors import check_same_order
from ega.deploy.report import write_report
from ega.deploy.stores import IndexStore, open_store
from ega.deploy.transform import transform_file
from ega.estimator import estimate_update
from ega.method.adapters import LinearAdapter, PaperEGA, ReleasedEGA, load_adapter, save_adapter, transform
from ega.method.config import TrainConfig
from ega.method.losses import supcon
from ega.method.training import pairwise_objective, train
from ega.pairs import PairAdapter, evaluate_pairs

NUMBERS = (None, "4", "x", b"x", [], [[1], [2, 3]], object(), {}, float("nan"), float("inf"), 1.5, -1, len)
MATRICES = (None, 3, "x", b"x", [], [[1], [2, 3]], object(), {}, float("nan"), ["a"], [["a"]], len, np.empty((0, 8)))
LABELS = (None, 3, "x", {}, [], float("nan"), -1, np.zeros((120, 2), int))
VALUES = (None, 3, "x", [], ["a"], [[1], [2, 3]], object(), {}, len, [float("nan")])
PATHS = (None, 3, 1.5, b"x", [], ["a"], object(), {}, "", len)
OBJECTS = (None, 3, "missing", b"x", [], [3], object(), {}, len)
DEVICES = (3, "tpu", "cuda:999", b"cpu", [], object(), len)
TENSORS = (torch.eye(8).to_sparse(), torch.empty(5, 8, device="meta"))
TEXTS = (3, b"x", [], object(), {}, "nothing", len)


class LetterCounts:
    "An encoder of texts."

    modality, name, preprocessing, weights = "text", "letters", "as it is", "none"

    def prepare(self, text):
        return [text.count(c) for c in "abc"]

    def encode(self, batch):
        return np.array(batch, "float32")


def wrong_pairs(D, I):
    "Distances and row numbers of another type or range."
    return (
        *((D, other) for other in (I.astype(float), I.astype(str), I - 500, I * np.nan)),
        *((other, I) for other in (D.astype(str), D + 0j, D.astype(object))),
        (D[:0], I[:0]),
    )


def make_calls(folder):
    "For each object of `api.TASKS`: [(function, its valid arguments, {name: wrong values of it})]."
    rng, y = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    x = normalize(rng.normal(size=(12, 8))[y] + 0.5 * rng.normal(size=(120, 8)))
    pairs = dict(queries=x, documents=x[:, ::-1].copy(), pairs=np.column_stack([np.arange(120), np.arange(120)]))
    matrix, out = np.eye(8, dtype="float32"), lambda name: str(folder / name)
    np.save(out("x.npy"), x)
    (folder / "texts.csv").write_text("text,label\na cab,0\nbach,1\n")
    (folder / "file").write_text("a file, where a folder is needed")
    (folder / "order.csv").write_text("id,label\n" + "".join(f"{i},{c}\n" for i, c in enumerate(y)))
    es = EmbeddingSet(x, y, meta={"set": "s", "encoder": "e"})
    write_pack(es, out("p.parquet"))
    fitted = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, y)
    fitted.save(out("fitted"))
    save_adapter(LinearAdapter(8), out("a.safetensors"))
    (folder / "pairs.csv").write_text("query,document\na cab,cabs\nbach,bees\n")
    (folder / "beir/qrels").mkdir(parents=True)
    for name, text in (
        ("corpus.jsonl", '{"_id": "d", "text": "a"}'),
        ("queries.jsonl", '{"_id": "q", "text": "b"}'),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq\td\t1\n"),
    ):
        (folder / "beir" / name).write_text(text)
    relevance = RelevanceSet(es, es, [(i, i + 1) for i in range(100)])
    index = AdaptedIndex(matrix, "IVF4,Flat").add(x)
    index.save(out("index"))
    monitor = Monitor.fit(x, matrix, k=3, horizon=10)
    monitor.save(out("monitor"))
    store = IndexStore(out("store"))
    store.migrate(matrix, out("x.npy"))
    gen = torch.Generator().manual_seed(0)
    data = dict(x=x, y=y)
    settings = {"max_unseen_loss": (*NUMBERS[1:-3], -1, len), "confidence": NUMBERS, "random_state": NUMBERS}
    settings |= {"candidates": (None, 5, "wccn", [3], [("a", 1)], object(), len), "n_jobs": NUMBERS[1:-2]}
    settings |= {"strengths": (None, "x", ["a"], [], [2.0], [float("nan")], 0.5, len, (1, 1.0)), "device": DEVICES}

    def fit(**parameters):
        return EmbeddingAdapter(**parameters).fit(x[:60], y[:60])

    def forget(X, y):
        return copy.copy(fitted).forget(X, y)

    def embed_texts(**changes):
        arguments = dict(source=out("texts.csv"), encoder=LetterCounts(), out=out("t.parquet"), overwrite=True)
        return embed(**arguments | changes, progress=False)

    def embed_pairs(**changes):
        arguments = dict(texts=read_text_pairs(out("pairs.csv")), encoder=LetterCounts(), out=out("set"))
        return embed_relevance(**arguments | changes, overwrite=True, progress=False)

    def transform_rows(**changes):
        target = folder / "z.npy"
        target.unlink(missing_ok=True)
        return transform_file(**dict(adapter=LinearAdapter(8), source=out("x.npy"), target=target) | changes)

    return {
        "data.embed.embed": [
            (embed_texts, {}, {"on_error": TEXTS}),
        ],
        "data.packs.EmbeddingSet": [
            (EmbeddingSet, data, {"x": MATRICES, "y": LABELS, "ids": OBJECTS[1:], "split": OBJECTS[1:]}),
            (es.take, {"index": [0, 3]}, {"index": (3, "a", [1.5], [10**6], [True], len)}),
            (EmbeddingSet, data, {"classes": (3, "x", object(), len), "meta": (None, 3, "x", [3], object(), len)}),
        ],
        "data.packs.read_pack": [(read_pack, {"path": out("p.parquet")}, {"path": PATHS})],
        "data.packs.write_pack": [
            (write_pack, dict(embeddings=es, path=out("q.parquet")), {"embeddings": OBJECTS, "path": PATHS}),
            (write_pack, dict(embeddings=es, path=out("q.parquet")), {"dtype": TEXTS, "max_code": (*NUMBERS, 500)}),
        ],
        "data.arrays.normalize": [(normalize, {"x": x}, {"x": (*MATRICES, es, *TENSORS)})],
        "data.vectors.check_same_order": [
            (check_same_order, dict(source=out("p.parquet"), labels=out("order.csv")), {"source": PATHS}),
            (check_same_order, dict(source=out("p.parquet"), labels=out("order.csv")), {"labels": PATHS}),
        ],
        "estimator.EmbeddingAdapter": [
            (fit, {"candidates": ("wccn",)}, settings | {"cv": NUMBERS, "method": (None, 3, "wcn", [], object(), len)}),
            (EmbeddingAdapter("wccn", max_unseen_loss=None).fit, {"X": x, "y": y}, {"X": MATRICES, "y": LABELS}),
            (fitted.transform, {"X": x}, {"X": (*MATRICES, *TENSORS)}),
            (copy.copy(fitted).partial_fit, {"X": x, "y": y}, {"X": MATRICES, "y": LABELS}),
            (forget, {"X": x[:20], "y": y[:20]}, {"X": MATRICES, "y": LABELS}),
            (
                estimate_update,
                {"estimator": fitted, "X": x, "y": y},
                {"estimator": OBJECTS, "X": MATRICES, "y": LABELS, "random_state": NUMBERS},
            ),
            (fitted.save, {"path": out("saved")}, {"path": (*PATHS, out("file"))}),
            (EmbeddingAdapter.load, {"path": out("fitted")}, {"path": PATHS}),
            (fitted.to_onnx, {"path": out("a.onnx")}, {"path": (*PATHS, out("a.npy"))}),
        ],
        "gain.estimate_gain": [
            (estimate_gain, {"X": x, "y": y}, {"X": MATRICES, "y": LABELS}),
        ],
        "method.adapters.LinearAdapter": [(LinearAdapter, {"d": 8}, {"d": NUMBERS})],
        "method.adapters.ReleasedEGA": [(ReleasedEGA, dict(d=8, hidden=4, gen=gen), {"d": NUMBERS, "hidden": NUMBERS})],
        "method.adapters.PaperEGA": [(PaperEGA, dict(d=8, hidden=4, gen=gen), {"d": NUMBERS, "hidden": NUMBERS})],
        "method.adapters.transform": [
            (transform, dict(adapter=LinearAdapter(8), x=x), {"adapter": OBJECTS, "x": MATRICES, "device": DEVICES}),
            (transform, dict(adapter=LinearAdapter(8), x=x), {"batch_size": NUMBERS}),
        ],
        "method.adapters.save_adapter": [
            (save_adapter, dict(adapter=LinearAdapter(8), path=out("s")), {"adapter": OBJECTS, "path": PATHS}),
            (save_adapter, dict(adapter=LinearAdapter(8), path=out("s")), {"path": (str(folder),)}),
            (load_adapter, {"path": out("a.safetensors")}, {"path": PATHS}),
        ],
        "method.training.train": [
            (
                train,
                dict(adapter=LinearAdapter(8), objective=pairwise_objective(supcon), rngs=spawn_rngs(0))
                | data
                | {"config": TrainConfig(epochs=1)},
                dict.fromkeys(("adapter", "objective", "rngs", "config"), (*OBJECTS, torch.nn.Identity()))
                | {"x": MATRICES, "y": LABELS, "device": DEVICES, "checkpoint": (3, [], object(), "")}
                | {"on_epoch": OBJECTS[1:-1], "checkpoint_interval": (*NUMBERS[:-3], -1)},
            ),
            (pairwise_objective, {"loss": supcon}, {"loss": OBJECTS[:-1]}),
            (TrainConfig, {}, dict.fromkeys(("epochs", "batch_size"), NUMBERS) | {"schedule": TEXTS}),
            (TrainConfig, {}, {"lr": (*NUMBERS[:-3], -1, 0, 0.0), "weight_decay": (*NUMBERS[:-3], -1)}),
        ],
        "measure.evaluation.evaluate": [
            (evaluate, dict(estimator=fitted, X=x, y=y), {"estimator": OBJECTS, "X": MATRICES, "y": LABELS}),
        ],
        "deploy.report.write_report": [
            (
                write_report,
                dict(estimator=fitted, X=x, y=y, path=out("r.md")),
                {"estimator": OBJECTS, "X": MATRICES, "y": LABELS, "path": (*PATHS, out("r.pdf"))}
                | {"source": OBJECTS[1:], "random_state": NUMBERS},
            )
        ],
        "deploy.transform.transform_file": [
            (transform_rows, {}, {"adapter": OBJECTS, "source": PATHS, "target": PATHS}),
            (transform_rows, {}, {"dtype": TEXTS, "precision": TEXTS, "batch_size": (0, -3)}),
        ],
        "deploy.index.AdaptedIndex": [
            (AdaptedIndex, {"adapter": matrix}, {"adapter": OBJECTS, "index": OBJECTS, "ids": ("a", 3, [1])}),
            (AdaptedIndex(matrix).add, {"x": x[:5]}, {"ids": OBJECTS[1:], "adapted_by": OBJECTS[1:]}),
            (index.search, {"xq": x}, {"xq": MATRICES, "adapted_by": OBJECTS[1:]}),
        ],
        "data.relevance.read_pairs": [
            (read_pairs, {"path": out("pairs.csv")}, {"path": (*PATHS, out("file"), out("p.parquet"), folder)})
        ],
        "data.relevance.read_beir": [(read_beir, {"folder": out("beir")}, {"folder": (*PATHS, out("file"), folder)})],
        "data.relevance.embed_relevance": [
            (embed_pairs, {}, {"on_error": TEXTS}),
        ],
        "data.relevance.RelevanceSet": [
            (
                RelevanceSet,
                dict(queries=es, documents=es, pairs=[(0, 1)]),
                {"queries": OBJECTS, "documents": OBJECTS, "pairs": (*VALUES, [(0, -1)], [(0, 1, 0.5)], [(120, 0)])},
            ),
            (write_relevance_set, {"relevance": relevance, "folder": out("rs")}, {"relevance": OBJECTS}),
            (write_relevance_set, {"relevance": relevance, "folder": out("rs2")}, {"folder": (*PATHS, out("file"))}),
            (read_relevance_set, {"folder": out("rs")}, {"folder": (*PATHS, out("file"))}),
        ],
        "data.relevance.split_by_query": [
            (
                split_by_query,
                dict(relevance=relevance, is_test=np.arange(120) < 30),
                {"relevance": OBJECTS, "is_test": (*VALUES, y, np.zeros(120, bool)), "groups": LABELS[1:]},
            ),
        ],
        "data.relevance.split_by_document": [
            (
                split_by_document,
                dict(relevance=relevance, rng=np.random.default_rng(0)),
                {"relevance": OBJECTS, "rng": OBJECTS, "test_fraction": NUMBERS, "groups": LABELS[1:]},
            ),
        ],
        "pairs.PairAdapter": [
            (
                lambda **given: PairAdapter("both", max_unseen_loss=None).fit(**given),
                pairs,
                {"queries": MATRICES, "documents": MATRICES, "pairs": VALUES},
            ),
            (lambda **given: PairAdapter(**given).fit(**pairs), {}, {"side": TEXTS, "confidence": NUMBERS}),
        ],
        "pairs.evaluate_pairs": [
            (
                evaluate_pairs,
                {"estimator": PairAdapter("both", max_unseen_loss=None).fit(**pairs)} | pairs,
                {"queries": MATRICES, "documents": MATRICES, "pairs": VALUES, "estimator": (*OBJECTS, fitted)}
                | {"k": (*NUMBERS, 121), "confidence": NUMBERS, "random_state": NUMBERS},
            ),
        ],
        "deploy.stores.open_store": [(open_store, {"path": out("store")}, {"path": PATHS})],
        "deploy.stores.IndexStore": [
            (IndexStore, {"folder": out("store")}, {"folder": PATHS}),
            (
                store.migrate,
                {"adapter": np.diag(np.arange(1.0, 9.0)).astype("float32"), "vectors": out("x.npy")},
                {"adapter": OBJECTS, "vectors": PATHS[1:], "ids": OBJECTS[1:], "index_factory": ("nothing", None)},
            ),
            (store.open, {"version": store.versions()[0]}, {"version": ("nothing", 3, object())}),
        ],
        "deploy.monitor.Monitor": [
            (
                Monitor.fit,
                dict(reference=x, adapter=matrix, k=3, horizon=10),
                {"reference": MATRICES, "adapter": OBJECTS, "gallery": MATRICES[1:]},
            ),
            (monitor.check, {"batch": x[:20]}, {"batch": MATRICES}),
            (monitor.save, {"folder": out("monitor2")}, {"folder": (out("file"),)}),
            (Monitor.load, {"folder": out("monitor")}, {"folder": (out("file"),), "adapter": OBJECTS[1:]}),
        ],
    }


def make_store_calls(folder):
    "The same for the main objects that need another library; nothing is made without it."
    matrix = np.eye(8, dtype="float32")
    path, adapters = str(save_adapter(LinearAdapter(8), folder / "stored.safetensors")), (*OBJECTS, torch.eye(8))

    def langchain():
        from langchain_core.embeddings import DeterministicFakeEmbedding

        from ega.deploy.wrappers import AdaptedEmbeddings

        valid = dict(embeddings=DeterministicFakeEmbedding(size=8), adapter=matrix)
        return [(AdaptedEmbeddings, valid, {"embeddings": OBJECTS, "adapter": adapters})]

    def llamaindex():
        from llama_index.core import MockEmbedding

        from ega.deploy.wrappers import AdaptedEmbedding

        valid = dict(embedding=MockEmbedding(embed_dim=8), adapter=matrix)
        return [(AdaptedEmbedding, valid, {"embedding": OBJECTS, "adapter": adapters})]

    def chroma():
        from chromadb.utils.embedding_functions import DefaultEmbeddingFunction

        from ega.deploy.wrappers import AdaptedEmbeddingFunction

        valid = dict(function=DefaultEmbeddingFunction(), adapter=path)
        return [(AdaptedEmbeddingFunction, valid, {"function": OBJECTS, "adapter": (*PATHS, "missing")})]

    makers = {"AdaptedEmbeddings": langchain, "AdaptedEmbedding": llamaindex, "AdaptedEmbeddingFunction": chroma}
    names = {f"deploy.wrappers.{name}": make for name, make in makers.items()}
    return {name: make() for name, make in names.items() if find_spec(api.NEEDS[name])}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    for package in ("faiss", "onnx"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("calls")
    return make_calls(folder) | make_store_calls(folder)


PLAIN = ("data.",)  # here Python itself reports a wrong type
BELOW = (
    "method.",
    "measure.search",
    "measure.metrics",
    "measure.statistics",
    "measure.ranking",
)  # they trust their arrays
NAMES = [name for names in api.TASKS.values() for name in names if not name.startswith(BELOW)]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_argument_is_an_input_error(name, calls):
    "Each wrong value in the place of a valid one: refused with the type that came or the rule, and not by accident."
    if package := api.NEEDS.get(name):
        pytest.importorskip(package)
    errors = (
        (ValueError, TypeError, AttributeError, LookupError) if name.startswith(PLAIN) else (InputError, NotFittedError)
    )
    for function, valid, wrong in calls[name]:
        if valid is not None:
            function(**valid)
        for parameter, values in wrong.items():
            for value in values:
                if name.startswith(PLAIN) and isinstance(value, str) and value == "":
                    continue  # the current folder
                try:
                    with pytest.raises(errors) as error:
                        function(**(valid or {}) | {parameter: value})
                except BaseException as failure:
                    raise AssertionError(f"{function} with {parameter}={value!r}") from failure
                assert re.search(r"\w{3,}", str(error.value))
