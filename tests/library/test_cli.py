"The command `ega`: exit codes, messages, files, and the time that help takes."

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import cranfield
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from ega import cli
from ega.data.arrays import InputError, normalize
from ega.data.packs import EmbeddingSet, read_pack, write_pack
from ega.data.vectors import read_labels, read_matrix
from ega.deploy.report import write_report
from ega.estimator import EmbeddingAdapter
from ega.measure.evaluation import evaluate
from ega.measure.search import knn
from ega.method.adapters import LinearAdapter, ReleasedEGA, save_adapter, transform
from ega.pairs import PairAdapter

COMMANDS = (
    "embed",
    "estimate",
    "fit",
    "update",
    "evaluate",
    "report",
    "info",
    "transform",
    "migrate",
    "search",
    "completion",
)
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def run(*args, cwd=None):
    "The command in a process of its own."
    command = [sys.executable, "-m", "ega", *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)


def test_help_is_quick_and_loads_nothing_heavy():
    code = """if True:
        import sys
        from ega.cli import parser
        parser().format_help()
        print(sorted({'numpy', 'torch', 'pandas', 'sklearn', 'faiss', 'pyarrow'} & set(sys.modules)))"""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.perf_counter() - start < 2  # 0.2 s on a quiet machine; the limit is for a busy one


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_80_columns_and_names_every_argument(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"] if command else ["--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    if command is None:
        assert all(f"\n    {name}" in text for name in COMMANDS)
        return
    subparser = cli.parser()._subparsers._group_actions[0].choices[command]
    assert all(action.help or action.choices for action in subparser._actions)
    assert subparser.description.endswith(".") and subparser.description in " ".join(text.split())


@pytest.mark.parametrize(
    "command, flags",
    [
        ("fit", "--max-unseen-loss --confidence --n-jobs --overwrite --unlabelled --no-unlabelled --label-column"),
        ("evaluate", "--unlabelled --label-column"),
        ("report", "--unlabelled --label-column"),
        ("embed", "--precision --batch-size --overwrite"),
        ("transform", "--precision --batch-size"),
        ("migrate", "--vectors --index-factory --activate --collection"),
        ("search", "--collection --where --encoder"),
    ],
)
def test_flags_have_their_names(command, flags):
    subparser = cli.parser()._subparsers._group_actions[0].choices[command]
    assert set(flags.split()) <= set(subparser._option_string_actions)


@pytest.mark.parametrize(
    "args, words",
    [
        (("info", "nothing.parquet"), "no such file; expected a pack"),
        (("embed", "nothing", "--encoder", "all-MiniLM-L6-v2", "--out", "x.parquet"), "nothing"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, args, words):
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("args", [(), ("reproduce",), ("fit", "x.npy", "-o", "a", "--budget", "1")])
def test_unknown_arguments_give_exit_code_2(args):
    done = run(*args)
    assert done.returncode == 2 and done.stderr.startswith("usage: ega")


@pytest.mark.parametrize("policy", [None, "active"])
def test_waiting_threads_sleep_unless_the_user_set_a_policy(policy, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy) if policy else monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert cli.main(["info", "nothing.parquet"]) == 2
    assert os.environ["OMP_WAIT_POLICY"] == (policy or "PASSIVE")


def made_pack(**changes):
    "60 rows of 6 classes."
    rng = np.random.default_rng(0)
    values = dict(
        x=normalize(rng.standard_normal((60, 8), dtype=np.float32)),
        y=np.repeat(np.arange(6), 10),
        ids=[f"r{i}" for i in range(60)],
        split=["train", "test"] * 30,
        classes=tuple("abcdef"),
        meta={"set": "s", "encoder": "e"},
    )
    return EmbeddingSet(**values | changes)


def test_info_describes_a_pack(tmp_path, capsys):
    y = np.repeat(np.arange(6), 10)
    y[:7] = -1
    write_pack(made_pack(y=y), tmp_path / "p.parquet")
    assert cli.main(["info", str(tmp_path / "p.parquet"), "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert contents["rows"] == 60 and contents["unlabelled"] == 7 and contents["set"] == "s"
    assert contents["splits"] == {"test": 30, "train": 30}
    assert cli.main(["info", str(tmp_path / "p.parquet")]) == 0 and "unlabelled  7" in capsys.readouterr().out


def test_info_describes_an_adapter(data, call):
    assert call("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet")[0] == 0
    adapter = EmbeddingAdapter.load("out")
    code, out, _ = call("info", "out", "--json")
    contents = json.loads(out)
    assert code == 0 and contents["fingerprint"] == adapter.fingerprint_ and contents["reason"]
    assert (contents["dim"], contents["classes"], contents["rows"]) == (8, 12, 120)
    assert (contents["method"], contents["strength"]) == (adapter.selection_.method, adapter.selection_.strength)
    assert re.search(r"^ +classes  12\n +rows  120\n", call("info", "out")[1], re.M)
    code, _, message = call("info", "fitted")
    assert code == 2 and "adapter.json" in message


def test_transform_resumes_after_interruption(tmp_path):
    adapter = ReleasedEGA(64, hidden=4096, gen=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        adapter.branch[3].weight.add_(0.1)
    save_adapter(adapter, tmp_path / "f.safetensors")
    x = normalize(np.random.default_rng(0).standard_normal((200_000, 64), dtype=np.float32))
    np.save(tmp_path / "x.npy", x)
    args = ("transform", "f.safetensors", "x.npy", "-o", "z.npy", "--threads", "1", "--device", "cpu", "--quiet")
    progress = tmp_path / "z.npy.part.json"
    # Background jobs of a shell ignore ctrl-c, so the process restores its default.
    code = """if True:
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from ega.cli import main
        sys.exit(main())"""
    command = [sys.executable, "-c", code, *args]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (progress.exists() and json.loads(progress.read_text())["rows"]):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    message = process.communicate(timeout=60)[1]
    assert "same command again" in message and process.returncode == 130 and not (tmp_path / "z.npy").exists()
    done = run(*args, "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["rows"] == 200_000 and result["path"] == "z.npy"
    assert 0 < result["resumed_rows"] < 200_000
    seam = slice(64 * 1024, 66 * 1024)
    assert np.array_equal(np.load(tmp_path / "z.npy")[seam], transform(adapter, x[seam], device="cpu"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.safetensors", "x.npy", "z.npy"]


def test_transform_of_a_folder_and_its_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["transform", "none.safetensors", "x.npy", "-o", "z.npy"]) == 2
    assert "no such adapter" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    save_adapter(LinearAdapter(2), "f")
    os.mkdir("x")
    np.save("x/0.npy", np.eye(2, dtype="f4"))
    assert cli.main(["transform", "f", "x", "-o", "z", "--ray"]) == 1 and "ega[ray]" in capsys.readouterr().err
    assert cli.main(["transform", "f", "x", "-o", "z", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("2 rows in z; ") and np.array_equal(np.load("z/0.npy"), np.eye(2))


def test_embed_of_photographs(tmp_path):
    "A folder of photographs through a tiny ONNX encoder."
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from PIL import Image

    h = onnx.helper
    nodes = [
        h.make_node("AveragePool", ["pixels"], ["p"], kernel_shape=[56, 56], strides=[56, 56]),
        h.make_node("Flatten", ["p"], ["embedding"]),
    ]
    graph = h.make_graph(
        nodes,
        "mean",
        [h.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, ["n", 3, 224, 224])],
        [h.make_tensor_value_info("embedding", onnx.TensorProto.FLOAT, ["n", 48])],
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "mean.onnx")
    rng = np.random.default_rng(0)
    for c in ("red", "blue"):
        (tmp_path / "photos" / c).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(tmp_path / f"photos/{c}/{i}.png")
    (tmp_path / "photos/red/broken.png").write_bytes(b"no picture")
    args = ("embed", "photos", "--encoder", "mean.onnx", "--out", "photos.parquet", "--quiet")
    failed = run(*args, cwd=tmp_path)
    assert failed.returncode == 2 and "broken.png" in failed.stderr and not (tmp_path / "photos.parquet").exists()
    done = run(*args, "--on-error", "skip", cwd=tmp_path)
    assert done.returncode == 0 and "6 rows in photos.parquet" in done.stdout and "broken.png" in done.stderr
    assert pd.read_parquet(tmp_path / "photos.parquet").label.tolist() == [0, 0, 0, 1, 1, 1]


def test_embed_of_a_public_set_by_name(tmp_path):
    "The files of a public set through an untrained architecture; wrong requests are one sentence."
    for package in ("torchvision", "timm"):
        importlib.util.find_spec(package) or pytest.skip(f"needs {package}")
    from PIL import Image

    top = tmp_path / "sets/CUB_200_2011"
    for i, c in enumerate(("001.A", "002.B")):
        (top / "images" / c).mkdir(parents=True)
        Image.new("RGB", (40, 30), ("red", "blue")[i]).save(top / "images" / c / "x.jpg")
    for name, lines in {
        "images": "1 001.A/x.jpg\n2 002.B/x.jpg",
        "image_class_labels": "1 1\n2 2",
        "train_test_split": "1 1\n2 1",
        "classes": "1 001.A\n2 002.B",
    }.items():
        (top / f"{name}.txt").write_text(lines)
    args = (
        "embed",
        "--dataset",
        "CUB-200",
        "--root",
        "sets",
        "--encoder",
        "timm:vit_tiny_patch16_224",
        "--weights",
        "random",
        "--quiet",
        "--no-download",
    )
    failed = run(*args, cwd=tmp_path)
    assert failed.returncode == 2 and "expected 11788 rows in train, test, found 2" in failed.stderr
    done = run(*args, "--splits", "train", "--device", "cpu", cwd=tmp_path)
    assert (
        done.returncode == 0
        and "2 rows in build/packs/cub200_train__vit_tiny_patch16_224_untrained.parquet" in done.stdout
    ), done.stderr
    for wrong, words in (
        (("embed", "--encoder", "x"), "neither"),
        (("embed", "sets", "--dataset", "pet", "--encoder", "x"), "both"),
        (("embed", "--dataset", "mnist", "--encoder", "timm:x"), "got 'mnist'"),
    ):
        failed = run(*wrong, cwd=tmp_path)
        assert failed.returncode == 2 and words in failed.stderr and "Traceback" not in failed.stderr


@pytest.fixture
def store(tmp_path, monkeypatch):
    "A pack of 60 rows of 6 classes, and an adapter for them; the working folder is where they are."
    es, adapter = made_pack(), LinearAdapter(8)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        adapter.weight.copy_(torch.from_numpy(0.4 * rng.standard_normal((8, 8), dtype=np.float32)))
    write_pack(es, tmp_path / "rows.parquet", dtype="float32")
    save_adapter(adapter, tmp_path / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    return es, adapter


@pytest.fixture
def call(capsys):
    "call(*args): exit code, standard output and standard error of a command."

    def call(*args):
        capsys.readouterr()
        code = cli.main(list(map(str, args)))
        return code, *capsys.readouterr()

    return call


STORES = {  # package: how `ega migrate` and `ega search` name a store, and its vectors before any adapter
    "lancedb": ("db/t.lance", "vector"),
    "faiss": ("versions", None),
    "qdrant_client": ("q --collection t", "vector"),
}


@pytest.mark.parametrize("package", ["lancedb", "qdrant_client"])
def test_migrate_refuses_rows_of_another_width_before_it_writes(store, package, call):
    pytest.importorskip(package)
    place, *collection = STORES[package][0].split()
    es, _ = store
    narrow = es.x[:, :3] / np.linalg.norm(es.x[:, :3], axis=1, keepdims=True)
    write_pack(EmbeddingSet(narrow, es.y, classes=es.classes, meta=es.meta), "narrow.parquet")
    code, _, message = call("migrate", "a.safetensors", place, *collection, "--vectors", "narrow.parquet", "--quiet")
    assert code == 2 and f"expected vectors of {es.dim} numbers, got 3" in message
    assert package != "lancedb" or not Path(place).exists()
    assert call("migrate", "a.safetensors", place, *collection, "--vectors", "rows.parquet", "--quiet")[0] == 0


@pytest.mark.parametrize("package", ["lancedb", "qdrant_client"])
def test_migrate_shows_the_rows_that_it_writes_and_adapts(store, package, call, monkeypatch):
    pytest.importorskip(package)
    place, *collection = STORES[package][0].split()
    migrate = ("migrate", "a.safetensors", place, *collection, "--vectors", "rows.parquet")
    assert call(*migrate)[2] == ""  # no terminal
    monkeypatch.setattr(cli, "_show_progress", lambda args: True)
    place = place.replace("t.lance", "u.lance").replace("q", "other")
    shown = call("migrate", "a.safetensors", place, *migrate[3:])[2]
    assert "write: 100%" in shown and "adapt: 100%" in shown and "60.0/60.0" in shown


@pytest.mark.parametrize("package", STORES)
def test_migrate_activate_and_search_a_store(store, package, call):
    "Results equal exact search among adapted vectors, and an earlier version can be activated again."
    pytest.importorskip(package)
    (place, *collection), raw = STORES[package][0].split(), STORES[package][1]
    es, adapter = store
    migrate = ("migrate", "a.safetensors", place, *collection, "--vectors", "rows.parquet", "--quiet")
    search = ("search", "a.safetensors", place, "rows.parquet", *collection)
    assert call(*migrate)[1].endswith(f"active: {raw or 'none'} (--activate activates the new ones)\n")
    assert call(*search, "--json")[0] == 2  # no adapted version is active
    code, out, _ = call(*migrate, "--activate", "--json")
    result = json.loads(out)
    assert code == 0 and result["rows"] == 60
    assert result["previous"] == raw and result["active"] == result["version"]
    z = transform(adapter, es.x)
    hits, exact = json.loads(call(*search, "-k", "3", "--json")[1]), knn(z, z, 3)
    assert [h["id"] for h in hits] == es.ids[exact.I].ravel().tolist()
    assert [h["query"] for h in hits[::3]] == es.ids.tolist()
    assert np.allclose([h["distance"] for h in hits], np.sqrt(np.maximum(exact.D, 0)).ravel(), atol=1e-3)
    lines = call(*search, "-k", "1")[1].splitlines()
    assert lines[0].split() == ["query", "rank", "L2", "distance", "id"] and lines[1].split() == [
        "r0",
        "1",
        "0.000",
        "r0",
    ]
    assert len(lines) == 61
    everything = json.loads(call(*search, "-k", 10**20, "--json")[1])
    assert len(everything) == 60 * 60 and everything[:3] == json.loads(call(*search, "-k", "3", "--json")[1])[:3]
    if raw:
        activated = call("migrate", "a.safetensors", place, *collection, "--activate", "vector")
        assert activated[:2] == (0, f"60 rows in vector; active: vector, before: {result['version']}\n")
        assert call(*search)[0] == 2
    else:
        assert "--vectors" in call("migrate", "a.safetensors", "other")[2]
    if package == "lancedb":
        assert call(*migrate, "--activate")[0] == 0
        found = json.loads(call(*search, "--where", "split = 'test'", "--json")[1])
        assert {h["id"] for h in found} <= set(es.ids[1::2])
    else:
        assert call(*search, "--where", "x = 1")[0] == 2
    assert call(*migrate, "--activate", "nonsense")[0] == 2


def test_migrate_takes_the_column_that_is_named(store, call):
    pytest.importorskip("faiss")
    x = store[0].x
    pd.DataFrame({"other": list(-x), "v": list(x)}).to_parquet("two.parquet")
    migrate = ("migrate", "a.safetensors", "versions", "--vectors", "two.parquet", "--activate", "--quiet")
    assert "column=" in call(*migrate)[2] and not Path("versions").exists()
    assert call(*migrate, "--column", "v")[0] == 0
    hits = json.loads(call("search", "a.safetensors", "versions", "two.parquet", "--column", "v", "--json")[1])
    assert [hit["id"] for hit in hits if hit["rank"] == 1] == list(range(len(x)))
    code, _, message = call("migrate", "a.safetensors", "db/t.lance", "--vectors", "two.parquet", "--column", "v")
    assert code == 2 and "--column has no effect for a LanceDB table" in message


def test_wrong_use_of_a_qdrant_collection_is_one_sentence(store, call):
    "Nothing is changed by it."
    client_module = pytest.importorskip("qdrant_client")
    q = ("--collection", "t")
    migrate = ("migrate", "a.safetensors", "q", *q, "--vectors", "rows.parquet", "--quiet")
    assert call(*migrate)[0] == 0
    write_pack(made_pack(x=np.tile(np.eye(4, dtype="f4"), (15, 1))), "narrow.parquet", dtype="float32")
    save_adapter(LinearAdapter(4), "narrow.safetensors")
    set_weights("other.safetensors", seed=2)
    (Path("files") / "x").mkdir(parents=True)
    wrong = {
        (
            "search",
            "a.safetensors",
            "q",
            "rows.parquet",
            *q,
        ): "`ega migrate ADAPTER STORE --activate`",
        (
            "search",
            "a.safetensors",
            "q",
            "rows.parquet",
        ): "this is a folder of Qdrant; name one of its collections with",
        ("migrate", "a.safetensors", "q"): "this is a folder of Qdrant; name one of its collections with --collection",
        ("migrate", "a.safetensors", "q", "--collection", "u"): "there is no collection 'u'; existing collections: t",
        ("search", "a.safetensors", "q", "rows.parquet", "--collection", "u"): "existing collections: t",
        ("migrate", "a.safetensors", "none", *q): "none: no such file; expected a LanceDB table",
        ("migrate", "a.safetensors", "files", *q): "files: expected a folder of Qdrant",
        ("migrate", "a.safetensors", "rows.parquet", *q): "rows.parquet: this is a file; expected a LanceDB table",
        ("migrate", "a.safetensors", "http://localhost:6333", *q): "a server is migrated and searched in Python",
        ("search", "a.safetensors", "http://localhost:6333", "rows.parquet", *q): "a server is migrated and searched",
        ("migrate", "a.safetensors", "q", "--collection", "a/b", "--vectors", "rows.parquet"): "can be no collection",
        ("migrate", "narrow.safetensors", "q", *q): "expected vectors of 4 numbers, got 8",
        (
            "migrate",
            "narrow.safetensors",
            "q",
            *q,
            "--vectors",
            "narrow.parquet",
        ): "expected vectors of 4 numbers, got 8",
        ("migrate", "a.safetensors", "q", *q, "--activate", "adapted"): "there is no version 'adapted'",
        ("migrate", "a.safetensors", "q", *q, "--index-factory", "Flat"): "no effect for a Qdrant collection",
        ("migrate", "a.safetensors", "q", *q, "--vectors", "x.npy"): "x.npy: no such file",
        ("migrate", "a.safetensors", "t.lance", *q): "--collection has no effect for a LanceDB table",
    }
    for args, words in wrong.items():
        code, _, message = call(*args)
        assert code == 2 and words in message and message.count("\n") == 1, (args, message)
    assert call(*migrate, "--activate")[0] == 0
    code, _, message = call("search", "other.safetensors", "q", "rows.parquet", *q)
    assert code == 2 and "not those of this adapter" in message
    client = client_module.QdrantClient(path="q")
    assert client.count("t").count == 60
    assert "q is in use by another client of Qdrant; close that one first" in call(*migrate)[2]
    client.close()
    Path("q/meta.json").write_text("{")
    code, _, message = call(*migrate)
    assert code == 2 and "q: this folder of Qdrant cannot be opened" in message


@pytest.mark.parametrize("place", ["db/cranfield.lance", "versions"])
@pytest.mark.parametrize("side", ["query", "two"])
def test_migrate_and_search_with_an_adapter_of_pairs(call, tmp_path, monkeypatch, place, side):
    "Stored rows are adapted as documents, queries as queries; the adapter of queries alone leaves a table as it is."
    pytest.importorskip("lancedb" if place.endswith("lance") else "faiss")
    monkeypatch.chdir(tmp_path)
    adapter, (zq, rows) = cranfield.fitted(side), (cranfield.XQ[:4], cranfield.FOLDER / "documents.parquet")
    adapter.save("adapter")
    np.save("queries.npy", zq)
    code, out, _ = call("migrate", "adapter", place, "--vectors", rows, "--activate", "--quiet")
    says = "the documents are not changed by this adapter, so there is nothing to migrate"
    assert code == 0 and out.startswith(says) == (place != "versions" and side == "query")
    hits = json.loads(call("search", "adapter", place, "queries.npy", "-k", "3", "--json")[1])
    assert [hit["id"] for hit in hits] == cranfield.DOCUMENT_IDS[cranfield.exact(adapter, 3).I[:4]].ravel().tolist()


def test_index_of_vectors_of_any_norm(store, call):
    "The same as unit rows, for the weights alone and for the folder of `ega fit`."
    pytest.importorskip("faiss")
    es, _ = store
    Path("e").mkdir()
    Path("e/adapter.safetensors").write_bytes(Path("a.safetensors").read_bytes())
    np.save("unit.npy", es.x)
    np.save("long.npy", 7 * es.x)

    def migrate(adapter, place, rows):
        return call("migrate", adapter, place, "--vectors", rows, "--activate", "--quiet")

    def search(adapter, place, rows):
        return [h["id"] for h in json.loads(call("search", adapter, place, rows, "-k", "4", "--json")[1])]

    assert migrate("a.safetensors", "unit", "unit.npy")[0] == 0
    assert migrate("a.safetensors", "long", "long.npy")[0] == 0
    assert migrate("e", "folder", "long.npy")[0] == 0
    ids = search("a.safetensors", "unit", "unit.npy")
    assert len(ids) == 4 * len(es.x)
    assert search("a.safetensors", "long", "long.npy") == ids == search("e", "folder", "long.npy")


def test_completion_script_has_every_command():
    pytest.importorskip("shtab")
    done = run("completion", "bash")
    assert done.returncode == 0 and all(f"_shtab_ega_{command}" in done.stdout for command in COMMANDS)


CLASSES, UNSEEN = 11, 3  # classes that are fitted on, and further ones


@pytest.fixture(scope="module")
def labelled():
    "Embeddings and integer labels from 3 on, a tenth of them None."
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(CLASSES + UNSEEN), 9)
    x = rng.normal(size=(CLASSES + UNSEEN, 8))[y] + rng.normal(size=(len(y), 8)) * np.r_[np.full(4, 2), np.full(4, 0.3)]
    labels = [None if i % 10 == 0 else int(label) + 3 for i, label in enumerate(y)]
    return normalize(x), labels, y < CLASSES


def write_integers(folder, labels):
    "The same integers with missing ones in every container: name -> file, or labels for Python."
    series = pd.Series(labels, dtype="Int64")
    filled = series.fillna(-1).astype(int)
    np.save(folder / "int.npy", filled)
    np.save(folder / "float.npy", series.astype(float))
    series.astype(float).to_frame("label").to_csv(folder / "float.csv")
    series.to_frame("label").to_csv(folder / "int.csv", sep=";", encoding="utf-16", index=False)
    filled.to_frame("label").to_csv(folder / "filled.csv", index=False)
    series.to_frame("label").to_parquet(folder / "Int64.parquet")
    series.astype(float).astype("category").to_frame("label").to_parquet(folder / "category.parquet")
    files = ("int.npy", "float.npy", "float.csv", "int.csv", "filled.csv", "Int64.parquet", "category.parquet")
    in_python = {
        "Int64": series,
        "arrow": series.astype("int64[pyarrow]"),
        "list": labels,
        "tensor": torch.tensor(filled),
    }
    return {name: folder / name for name in files} | in_python


def write_texts(folder, labels):
    "The same texts with missing ones in every container."
    series = pd.Series([None if label is None else f"kind {label}" for label in labels])
    np.save(folder / "text.npy", series.fillna("").to_numpy(str))
    series.to_frame("label").to_csv(folder / "text.csv", index=False)
    series.to_frame("label").to_csv(folder / "tab.csv", sep="\t", index=False, encoding="utf-8-sig")
    series.to_frame("label").to_parquet(folder / "text.parquet")
    series.astype("category").to_frame("label").to_parquet(folder / "category of texts.parquet")
    files = ("text.npy", "text.csv", "tab.csv", "text.parquet", "category of texts.parquet")
    in_python = {"string": series.astype("string"), "categorical": pd.Categorical(series), "objects": series.tolist()}
    return {name: folder / name for name in files} | in_python


@pytest.mark.parametrize("write", [write_integers, write_texts])
def test_labels_of_the_same_classes_give_the_same_digits_from_any_container(write, labelled, tmp_path):
    "Fit on each container, save, load, evaluate and report on another one."
    x, labels, seen = labelled
    (tmp_path / "fit").mkdir()
    containers, of_fit = write(tmp_path, labels), write(tmp_path / "fit", [y for y, s in zip(labels, seen) if s])
    results, names = set(), list(containers)
    for i, name in enumerate(names):

        def given(labels, fitted=()):
            is_text = any(isinstance(c, str) for c in fitted)
            return read_labels(labels, as_texts=is_text) if isinstance(labels, Path) else labels

        adapter = EmbeddingAdapter("lda", max_unseen_loss=None).fit(x[seen], given(of_fit[name]))
        adapter.save(tmp_path / "adapter")
        adapter = EmbeddingAdapter.load(tmp_path / "adapter")
        y = given(containers[names[i - 1]], adapter.classes_)
        table = evaluate(adapter, x, y)
        page = write_report(adapter, x, y, tmp_path / "report.md").evaluation
        fingerprints = adapter.fingerprint_ + adapter.data_fingerprint_
        results.add(fingerprints + str(adapter.classes_.tolist()) + table.to_json() + page.to_json())
    assert len(results) == 1
    assert set(table.group) == {"trained on", "unseen"} and (table[table.group == "unseen"].n_classes == UNSEEN).all()


def test_commands_read_labels_from_any_file_and_print_the_same(labelled, tmp_path, call):
    x, labels, seen = labelled
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "fit.npy", x[seen])
    files = {k: v for k, v in write_integers(tmp_path, labels).items() if isinstance(v, Path)}
    pd.DataFrame({"label": labels, "vector": list(x)}).to_parquet(tmp_path / "x.parquet")  # pandas makes them floats
    pd.DataFrame({"kind": labels, "vector": list(x)}).to_parquet(tmp_path / "kind.parquet")
    (tmp_path / "fit").mkdir()
    y = write_integers(tmp_path / "fit", [y for y, s in zip(labels, seen) if s])["float.csv"]
    out = tmp_path / "adapter"
    assert call("fit", tmp_path / "fit.npy", y, "-o", out, "--method", "wccn", "--quiet")[0] == 0
    inputs = [(tmp_path / "x.npy", path) for path in files.values()]
    inputs += [(tmp_path / "x.parquet",), (tmp_path / "kind.parquet", "--label-column", "kind")]
    results = {call("evaluate", out, *given, "--json") for given in inputs}
    assert len(results) == 1 and next(iter(results))[0] == 0
    assert '"unseen"' in next(iter(results))[1]


def test_unlabelled_texts_are_asked_about_once_and_then_left_out(labelled, tmp_path, call):
    x, labels, _ = labelled
    np.save(tmp_path / "x.npy", x)
    texts = pd.Series(["" if label is None else f"kind {label}" for label in labels])
    for name, mark in (("blank", ""), ("marked", "-1"), ("na", "n/a")):
        texts.replace("", mark).to_frame("label").to_csv(tmp_path / f"{name}.csv", index=False)
    fit = ("fit", tmp_path / "x.npy", tmp_path / "marked.csv", "--method", "wccn", "--quiet", "--json")
    code, _, err = call(*fit, "-o", tmp_path / "a")
    assert code == 2 and "'-1' (13 rows)" in err and "--unlabelled -1" in err and not (tmp_path / "a").exists()
    code, out, _ = call(*fit, "-o", tmp_path / "a", "--unlabelled", "-1")
    assert code == 0 and json.loads(out)["n_classes"] == CLASSES + UNSEEN
    code, out, _ = call(*fit, "-o", tmp_path / "b", "--no-unlabelled")
    assert code == 0 and json.loads(out)["n_classes"] == CLASSES + UNSEEN + 1
    evaluated = {
        name: call("evaluate", tmp_path / "a", tmp_path / "x.npy", tmp_path / f"{name}.csv", "--json", *flags)
        for name, flags in (("blank", ()), ("marked", ("--unlabelled", "-1")), ("na", ("--unlabelled", "n/a")))
    }
    assert len(set(evaluated.values())) == 1 and '"unseen"' not in evaluated["blank"][1]
    two = texts.replace({"": "-1", "kind 3": "nan"}).to_frame("label")
    two.to_csv(tmp_path / "two.csv", index=False)
    code, out, _ = call(
        "fit",
        "--unlabelled",
        "-1",
        "--unlabelled",
        "nan",
        *fit[1:2],
        tmp_path / "two.csv",
        *fit[3:],
        "-o",
        tmp_path / "c",
    )
    assert code == 0 and json.loads(out)["n_classes"] == CLASSES + UNSEEN - 1
    report = ("report", tmp_path / "a", tmp_path / "x.npy", tmp_path / "na.csv", "-o", tmp_path / "r.md")
    assert call(*report)[0] == 2 and call(*report, "--unlabelled", "n/a")[0] == 0


def test_classes_named_by_digits_keep_their_identity(labelled, tmp_path, call):
    "A pack names its classes by texts; a CSV file of the same digits is then read as texts."
    x, labels, _ = labelled
    y = np.array([-1 if label is None else label for label in labels])
    pack = tmp_path / "p.parquet"
    write_pack(EmbeddingSet(x, y, meta={"set": "s", "encoder": "e"}), pack, dtype="float32")
    np.save(tmp_path / "y.npy", y)
    pd.DataFrame({"label": labels}).to_csv(tmp_path / "y.csv", index=False)  # as 3.0, with blanks
    pd.DataFrame({"label": [f"{label:03}" for label in y]}).to_csv(tmp_path / "zeros.csv", index=False)
    assert call("fit", pack, "-o", tmp_path / "a", "--method", "wccn", "--quiet")[0] == 0
    expected = call("evaluate", tmp_path / "a", pack)
    assert expected[0] == 0 and call("evaluate", tmp_path / "a", pack, tmp_path / "y.csv") == expected
    for name, words in (("y.npy", "must be texts, as in fit"), ("zeros.csv", "are the same number")):
        for command in (("evaluate",), ("report", "-o", tmp_path / "r.md")):
            code, _, err = call(*command, tmp_path / "a", pack, tmp_path / name)
            assert code == 2 and words in err
    assert call("fit", pack, tmp_path / "y.csv", "-o", tmp_path / "b", "--method", "wccn", "--quiet")[0] == 0
    code, _, err = call("evaluate", tmp_path / "b", pack)
    assert code == 2 and "must be integers, as in fit, got texts" in err


@pytest.mark.parametrize(
    "args, words",
    [
        (("x.npy",), "is not a pack, so its labels are not known; name a"),
        (("x.npy", "y.npy", "--label-column", "kind"), "a .npy file has no columns"),
        (("x.npy", "--label-column", "kind"), "--label-column has no effect"),
        (("p.parquet", "--label-column", "kind"), "--label-column has no effect"),
        (("v.parquet",), "the columns are"),
        (("x.npy", "ids.csv"), "126 classes for 126 labelled rows"),
        (("x.npy", "short.csv"), "126 rows, got 1 labels below the header '3'"),
        (("x.npy", "y.npy", "--unlabelled", "99"), "no row has the label '99'"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(args, words, labelled, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, labels, _ = labelled
    y = np.array([-1 if label is None else label for label in labels])
    np.save("x.npy", x)
    np.save("y.npy", y)
    write_pack(EmbeddingSet(x, y, meta={"set": "s", "encoder": "e"}), "p.parquet")
    pd.DataFrame({"kind": labels, "vector": list(x)}).to_parquet("v.parquet")
    Path("ids.csv").write_text("label\n" + "".join(f"{i};cancel\n" for i in range(len(x))))
    Path("short.csv").write_text("3\n7\n")
    code, _, err = call("fit", *args, "-o", "a")
    assert code == 2 and words in err and not Path("a").exists()


def write_data():
    "Embeddings and labels of 12 classes, a pack, an adapter and files of the wrong kind, in the working folder."
    rng, y = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    x = normalize(rng.normal(size=(12, 8))[y] + 0.5 * rng.normal(size=(120, 8)))
    np.save("x.npy", x)
    np.save("y.npy", y)
    np.save("short.npy", y[1:])
    np.save("text.npy", np.array(["a"] * 120))
    Path("y.csv").write_text("label\n" + "\n".join(map(str, y)))
    pd.DataFrame({"v": list(x), "n": y}).to_parquet("x.parquet")
    pd.DataFrame(x, columns=[f"d{i}" for i in range(8)]).to_parquet("wide.parquet")
    write_pack(made_pack(), "rows.parquet", dtype="float32")
    save_adapter(LinearAdapter(8), "a.safetensors")
    Path("there").mkdir()
    Path("there/file").write_text("kept")
    Path("taken.html").write_text("kept")
    Path("versions").mkdir()
    Path("t.lance").mkdir()
    write_wrong_labels(x, y)
    return x, y


def write_wrong_labels(x, y):
    "Files of labels and of embeddings that are refused, and the folder of an adapter."
    for name in ("y.json", "y.txt", "labels"):
        Path(name).write_text("\n".join(map(str, y)))
    np.save("cube.npy", x.reshape(120, 4, 2))
    np.savez("y.npz", y=y)
    Path("model.pt").write_text("weights")
    pd.DataFrame({"id": np.arange(120), "v": list(x)}).to_parquet("ids.parquet")
    pd.DataFrame({"id": 0, "label": y}).to_csv("twice.ids.csv", index=False)
    pd.DataFrame({"id": np.arange(120) + 1000, "label": y}).to_csv("other.ids.csv", index=False)
    np.save("objects.npy", y.astype(str).astype(object), allow_pickle=True)
    np.save("none.npy", np.full(120, -1))
    Path("spaced.csv").write_text("id, label\n" + "".join(f"{i}, {label}\n" for i, label in enumerate(y)))
    Path("twice.csv").write_text("label,label\n" + "".join(f"{label},{label}\n" for label in y))
    pq.write_table(pa.table([pa.array(y), pa.array(y)], names=["label", "label"]), "twice.parquet")
    pq.write_table(pa.table([pa.array(list(x)), pa.array(list(x))], names=["v", "v"]), "same.parquet")
    np.save("column.npy", y[:, None])
    lengths = np.where(np.arange(120) == 7, 5, 8)
    pd.DataFrame({"v": [row[:length] for row, length in zip(x, lengths)]}).to_parquet("ragged.parquet")
    pd.DataFrame({"label": [*y, 1, 1]}).to_csv("more.csv", index=False)
    pd.DataFrame({"label": y}).to_csv("headless.csv", index=False, header=False)
    np.save("transposed.npy", x.T)
    pd.DataFrame({"id": np.arange(120)[::-1], "label": y}).to_csv("shuffled.csv", index=False)
    np.save("cases.npy", np.where(np.arange(120) % 2, "alarm", "Alarm"))
    Path("fitted").mkdir()
    save_adapter(LinearAdapter(8), "fitted/adapter.safetensors")


@pytest.fixture
def data(tmp_path, monkeypatch):
    "The data of `write_data`, in a working folder of its own."
    monkeypatch.chdir(tmp_path)
    return write_data()


WRONG = {  # arguments, = for an empty one: words of the message
    "fit missing.npy y.npy -o out": "missing.npy: no such file; expected embeddings in .npy, .npz, .safetensors",
    "fit x.npy missing.csv -o out": "missing.csv: no such file; expected labels in .npy, .csv or .parquet",
    "fit x.npy short.npy -o out": "y must have one label per row: 120 rows, 119 labels",
    "fit x.npy x.npy -o out": "y must have shape (n,)",
    "fit x.npy y.csv --label-column class -o out": "expected a column 'class', the columns are label",
    "fit x.npy y.npy --column v -o out": "a .npy file has no columns, got column 'v'; leave out column= (--column)",
    "fit x.parquet y.npy --column n -o out": "column 'n' must hold lists of floats, got int64; candidates: v",
    "fit wide.parquet y.npy -o out": "make one of a float column for each dimension with pd.DataFrame(",
    "fit x.npy y.npy -o there": "there exists already; choose another name, or pass overwrite=True (--overwrite)",
    "fit x.npy y.npy -o x.npy": "x.npy is a file, expected a folder",
    "fit x.npy y.npy -o x.npy/out": "x.npy is a file; choose another folder",
    "fit x.npy y.npy -o out.safetensors": "out.safetensors: expected the name of a folder",
    "fit x.npy y.npy -o out.npy": "out.npy: expected the name of a folder",
    "fit x.npy y.npy -o =": "--out is empty; give a value",
    "fit x.npy y.npy -o there --overwrite": "there: this folder holds files and no adapter to replace; choose another",
    "fit = y.npy -o out": "source is empty; give a value",
    "fit x.npy y.csv --label-column = -o out": "--label-column is empty; expected a value",
    "fit y.npy x.npy -o out": "y.npy: expected embeddings, which x.npy holds; the embeddings come first, then the",
    "fit y.csv x.npy -o out": "y.csv: expected embeddings, which x.npy holds; the embeddings come first, then the",
    "fit y.npy y.npy -o out": "y.npy: expected rows of shape (n, d), got (120,); name the file of embeddings; one",
    "fit cube.npy column.npy -o out": "got (120, 4, 2); flatten all axes but the first",
    "fit objects.npy y.npy -o out": "it holds objects: convert numbers by astype('float32'), texts by astype(str)",
    "fit ragged.parquet y.npy -o out": "row 7 of column 'v' has 5 numbers, expected 8, as row 0 has; use vectors from",
    "fit x.npy more.csv -o out": "120 rows, got 122 labels below the header 'label'; give the labels of the same rows",
    "fit x.npy headless.csv -o out": "got 119 labels below the header '0'; the first line of the file must be",
    "fit transposed.npy y.npy -o out": "got shape (8, 120) and 120 labels, as many as there are columns; save the",
    "fit x.npy shuffled.csv -o out": "x.npy has no ids, so its row numbers count, and the column 'id' holds them in",
    "fit x.npy cases.npy -o out": "labels 'Alarm' and 'alarm' differ only in case; write them alike",
    "fit cube.npy y.npy -o out": "got (120, 4, 2); flatten all axes but the first",
    "fit /dev/null y.npy -o out": "/dev/null: not a regular file; expected embeddings",
    "fit x.npy /dev/null -o out": "/dev/null: not a regular file; expected labels",
    "fit model.pt y.npy -o out": "got '.pt'; save its matrix with np.save, or rename the file",
    "fit x.npy y.npz -o out": "got '.npz'; save the array of labels by itself with np.save",
    "fit ids.parquet twice.ids.csv -o out": "but in row 1 the column 'id' holds '0' and not '1'; give the labels of",
    "fit ids.parquet other.ids.csv -o out": "but in row 0 the column 'id' holds '1000' and not '0'; give the labels of",
    "fit x.npy y.npy -o out --method witened_nca": "such as whitened_nca",
    "fit x.npy y.npy -o out --method ?": "such as affine_nca, wccn, lda; got '?'",
    "fit x.npy y.npy -o out --method wcnn": "such as wccn",
    "fit x.npy y.npy -o out --method nope": "such as affine_nca, wccn, lda; got 'nope'",
    "fit x.npy y.npy -o out --method whitening": "such as whitened_nca",
    "fit x.npy y.npy -o out --device tpu": "device must be such as cpu, cuda or cuda:1, got 'tpu'",
    "fit x.npy y.npy -o out --max-unseen-loss inf": "value must be a finite number >= 0, got inf",
    "fit x.npy y.npy -o out --max-unseen-loss nan": "value must be a finite number >= 0, got nan",
    "fit x.npy y.npy -o out --max-unseen-loss=-1": "value must be a finite number >= 0, got -1.0",
    "fit x.npy y.npy -o out --confidence 1": "value must be a finite number in [0.5, 1), got 1.0",
    "fit x.npy y.npy -o out --n-jobs 0": "value must be an integer other than 0, got '0'; -1 uses all cores",
    "fit x.npy y.npy -o out --n-jobs x": "value must be an integer other than 0, got 'x'",
    "fit x.npy y.npy -o out --seed x": "value must be an integer, got 'x'",
    "fit x.npy y.npy -o out --max-unseen-loss x": "value must be a number, got 'x'",
    "fit x.npy y.npy -o out --max-unseen-loss none": "so --method must name what to fit",
    "fit x.npy y.npy -o out --method lda --max-unseen-loss none --unseen-share 0": "--unseen-share has no effect with",
    "fit x.npy y.npy -o out --method lda --max-unseen-loss none --confidence .9 --n-jobs 2": "--confidence, --n-jobs "
    "have no effect with --max-unseen-loss none, which compares nothing; leave them out",
    "fit x.npy y.npy -o out --method mine": "got 'mine'",
    "fit there y.npy -o out": "there: this is a folder; expected embeddings in .npy",
    "fit x.npy there -o out": "there: this is a folder; expected labels in .npy, .csv or .parquet",
    "fit y.csv y.npy -o out": "convert it: np.save('embeddings.npy', pd.read_csv('y.csv').to_numpy('float32'))",
    "fit text.npy y.npy -o out": "expected embeddings, which are real numbers, got dtype <U1; name the file of emb",
    "fit x.npy objects.npy -o out": "it holds objects: convert numbers by astype('float32'), texts by astype(str)",
    "fit x.npy none.npy -o out": "expected labels, but none of the 120 rows has one",
    "fit x.npy spaced.csv -o out": "expected a column 'label', the header has ' label'; remove blanks around names",
    "fit x.npy twice.csv -o out": "several columns are named 'label': rename all but one",
    "fit x.npy twice.parquet -o out": "several columns are named 'label'; rename all but one",
    "fit same.parquet y.npy -o out": "found v, v; these columns have the same name: rename all but one",
    "fit x.npy y.npy -o out --unlabelled 3 --no-unlabelled": "--no-unlabelled: not allowed with argument --unlabelled",
    "fit x.npy --unlabelled nan -1 -o out": "unrecognized arguments: -1; --unlabelled takes one value: repeat",
    "fit x.npy --unlabelled nan NA -o out": "NA: no such file of labels; --unlabelled takes one value: repeat",
    "fit x.npy --unlabelled 99 y.npy -o out": "no row has the label '99'; correct it or leave it out (labels: 0, 1,",
    "fit x.npy y.json -o out": "y.json: expected labels in .npy, .csv or .parquet, got '.json'; save them as .csv",
    "fit x.npy y.txt -o out": "got '.txt'; rename it to .csv if its first line is a header such as label, else write",
    "fit x.npy labels -o out": "labels: expected labels in .npy, .csv or .parquet, got 'no ending'",
    "evaluate a.safetensors x.npy y.json": "y.json: expected labels in .npy, .csv or .parquet, got '.json'",
    "evaluate a.safetensors x.npy y.npy --show there": "--show has no effect without --pairs; `ega report`",
    "report a.safetensors x.npy y.npy --split test": "--split has no effect without --pairs",
    "report a.safetensors there --pairs --show missing": "missing: no such file; expected the folder in the layout",
    "evaluate x.npy y.npy": "or a .safetensors file, got a file of data; the adapter comes first",
    "transform a.safetensors y.csv -o z.csv": "expected a .npy or .parquet file, got '.csv'; if its columns",
    "migrate a.safetensors x.npy": "x.npy: this is a file; expected a LanceDB table, FOLDER/NAME.lance, or a folder",
    "migrate a.safetensors /dev/null --vectors x.npy": "/dev/null: this is a file; expected a LanceDB table",
    "migrate a.safetensors new.npy --vectors x.npy": "new.npy: expected the name of a folder, got that of a file",
    "migrate a.safetensors versions --activate =": "--activate is empty; expected a value",
    "migrate a.safetensors versions --collection =": "--collection is empty; expected a value",
    "migrate a.safetensors q --collection c --vectors x.npy": "x.npy: expected a pack (.parquet), from which rows are",
    "migrate a.safetensors t.lance --collection c": "--collection has no effect for a LanceDB table; leave it out",
    "search a.safetensors versions x.npy --collection c --where n=1": "--where has no effect for Qdrant; in Python",
    "info x.parquet": "x.parquet: expected a pack, but this Parquet file lacks the JSON metadata",
    "info a.safetensors": "expected the folder written by `ega fit`, got weights without the description a.json",
    "evaluate a.safetensors x.npy y.npy": "expected the folder written by `ega fit`, got weights without",
    "report fitted x.npy y.npy": "fitted: expected the folder written by `ega fit`, got weights without",
    "migrate a.safetensors fitted --vectors x.npy": "fitted: this is the folder of an adapter; expected a LanceDB",
    "migrate a.safetensors t.lance --vectors x.npy": "x.npy: expected a pack (.parquet)",
    "search a.safetensors versions x.npy -k x": "value must be an integer, got 'x'",
    "info x.npy": "x.npy: expected a pack, a .parquet file of `ega embed`, or the folder of `ega fit`",
    "info there": "there: this folder holds no adapter; expected a pack",
    "info /dev/null": "/dev/null: expected a pack, a .parquet file of `ega embed`, or the folder of `ega fit`",
    "fit x.npy y.npy -o out --seed -1": "value must be an integer >= 0, got -1",
    "evaluate none x.npy y.npy": "none: no such adapter; expected the folder written by `ega fit`",
    "evaluate a.safetensors missing.npy y.npy": "missing.npy: no such file",
    "evaluate there x.npy y.npy": "but this folder lacks adapter.safetensors; copy the whole folder",
    "report a.safetensors x.npy y.npy -o r.pdf": "r.pdf: expected a file ending in .html or .md, got '.pdf'",
    "report a.safetensors x.npy y.npy -o taken.html": "taken.html exists already",
    "report a.safetensors x.npy y.npy -o there": "there is a folder, expected a file ending in .html or .md",
    "report a.safetensors x.npy y.npy -o r": "r: expected a file ending in .html or .md, got 'no ending'",
    "report a.safetensors x.npy y.npy --show missing": "missing: no such file; expected a folder of images",
    "transform none x.npy -o z.npy": "none: no such adapter",
    "transform a.safetensors missing.npy -o z.npy": "missing.npy: no such file",
    "transform a.safetensors x.npy -o y.npy": "y.npy exists already; remove it or choose another target",
    "transform a.safetensors x.npy -o z.parquet": "z.parquet: expected a file ending in .npy, got '.parquet'",
    "transform a.safetensors x.npy -o z.npy --threads 0": "value must be an integer >= 1, got 0",
    "transform a.safetensors x.npy -o z.npy --column v": "a .npy file has no columns",
    "transform a.safetensors x.npy -o z.npy --device cuda --threads 2": "--threads has no effect with --device cuda",
    "transform a.safetensors x.npy -o z.npy --device gpu": "got 'gpu'",
    "migrate a.safetensors other": "other: no such file; expected a LanceDB table",
    "migrate a.safetensors t.lance --index-factory Flat": "--index-factory has no effect for a LanceDB table",
    "migrate a.safetensors versions --vectors x.npy --activate v1": "--vectors has no effect with --activate v1",
    "search a.safetensors versions x.npy --where n=1": "--where has no effect for a FAISS index",
    "search a.safetensors versions x.npy -k 0": "value must be an integer >= 1, got 0",
    "search a.safetensors versions x.npy --column v": "a .npy file has no columns",
    "search a.safetensors versions x.npy --encoder timm:x --column v": "--column has no effect with --encoder",
    "search a.safetensors versions x.npy --encoder nothing": "encoder must be one of",
    "search a.safetensors nowhere x.npy": "nowhere: no such file",
    "embed there --encoder nothing": "encoder must be one of",
    "embed there --encoder missing.onnx": "missing.onnx: no such ONNX file",
    "embed there --encoder timm:x --splits train": "--splits has no effect without --dataset",
    "embed there --encoder timm:x --seed 3": "--seed has no effect without --per-class",
    "embed there --encoder timm:x -o x.npy/y.parquet": "x.npy is a file; choose another folder",
    "embed there --encoder timm:x -o e.npy": "e.npy: expected the name of a folder, got that of a file",
    "embed missing --encoder timm:x": "missing: no such file",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    "Exit code, message and heavy packages loaded so far for each wrong command, in one process; and changed files."
    for package in ("faiss", "lancedb", "timm", "onnxruntime", "jinja2", "matplotlib"):
        importlib.util.find_spec(package) or pytest.skip(f"needs {package}")
    folder = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_data()
    code = """if True:
        import contextlib, io, json, sys
        from ega.cli import main
        for command in json.load(sys.stdin):
            with contextlib.redirect_stderr(io.StringIO()) as message:
                try:
                    exit_code = main(["" if word == "=" else word for word in command.split()])
                except SystemExit as error:
                    exit_code = error.code
            heavy = sorted({"torch", "sklearn"} & set(sys.modules))
            print(json.dumps([exit_code, " ".join(message.getvalue().split()), heavy]))"""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(WRONG)),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    return dict(zip(WRONG, map(json.loads, done.stdout.splitlines()), strict=True)), before, after


@pytest.mark.parametrize("command", WRONG)
def test_a_mistake_is_found_before_torch_is_loaded(command, refused):
    exit_code, message, heavy = refused[0][command]
    assert exit_code == 2 and message and "Traceback" not in message and heavy == []


def test_a_mistake_changes_no_file(refused):
    _, before, after = refused
    assert before == after


def test_a_device_that_is_not_there_is_found_before_the_files_are_read(data, call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cli, "_read_inputs", None)
    code, _, message = call("fit", "x.npy", "y.npy", "-o", "out", "--device", "cuda")
    assert code == 2 and "use device='cpu'" in message and not Path("out").exists()


def test_a_folder_that_cannot_be_written_is_found_before_the_fit(data, call, monkeypatch):
    from ega.data import files

    def refuse(dir):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(cli, "_read_inputs", None)
    for args in (("fit", "x.npy", "y.npy", "-o", "out"), ("report", "a.safetensors", "x.npy", "y.npy")):
        code, _, message = call(*args)
        assert code == 2 and "cannot be written" in message


@pytest.mark.parametrize(
    "package, extra, command",
    [
        ("jinja2", "report", "report a.safetensors x.npy y.npy"),
        ("matplotlib", "report", "report a.safetensors x.npy y.npy"),
        ("lancedb", "deploy", "migrate a.safetensors t.lance"),
        ("lancedb", "deploy", "search a.safetensors t.lance x.npy"),
        ("faiss", "cpu", "migrate a.safetensors versions"),
        ("faiss", "cpu", "search a.safetensors versions x.npy"),
        ("qdrant_client", "qdrant", "migrate a.safetensors there --collection c"),
        ("qdrant_client", "qdrant", "search a.safetensors there x.npy --collection c"),
        ("timm", "encoders", "embed there --encoder timm:x"),
        ("open_clip", "encoders", "embed there --encoder clip-vit-b32"),
        ("sentence_transformers", "offline", "embed there --encoder all-MiniLM-L6-v2"),
        ("ray", "ray", "transform a.safetensors there -o z --ray"),
    ],
)
def test_a_missing_package_is_named_before_the_work(package, extra, command, data, call, monkeypatch):
    from ega.data import arrays

    def find(name):
        return None if name == package else True

    monkeypatch.setattr(arrays.importlib.util, "find_spec", find)
    monkeypatch.setattr(cli, "_read_inputs", None)
    code, _, message = call(*command.split())
    assert code == 1 and f"this needs the package {package!r}" in message and f"pip install 'ega[{extra}]'" in message


@pytest.mark.parametrize(
    "command, extras",
    [
        ("report", ["report"]),
        ("embed", ["encoders", "offline"]),
        ("transform", ["ray"]),
        ("migrate", ["deploy", "cpu", "qdrant"]),
        ("search", ["deploy", "cpu", "qdrant"]),
        ("completion", ["completion"]),
        ("fit", []),
        ("evaluate", []),
    ],
)
def test_help_names_the_extras_of_a_command(command, extras, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"'ega[{extra}]'" in text for extra in extras) and ("pip install" in text) == bool(extras)


def test_a_report_is_replaced_only_with_overwrite(data, call):
    assert call("fit", "x.npy", "y.npy", "-o", "adapter", "--method", "wccn", "--quiet")[0] == 0
    report = ("report", "adapter", "x.npy", "y.npy", "-o", "page.md")
    assert call(*report)[0] == 0
    page = Path("page.md").read_text()
    assert call(*report)[0] == 2 and Path("page.md").read_text() == page
    assert call(*report, "--overwrite")[0] == 0


def strict(text):
    "JSON without NaN and Infinity."

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_json_has_no_nan_and_no_infinity(data, call):
    "Also where the frozen embeddings are selected, and where a table has missing values."
    np.save("seen.npy", data[1] % 6)
    assert strict(call("fit", "x.npy", "seen.npy", "-o", "frozen", "--json", "--quiet")[1])["frozen"]
    assert strict(call("fit", "x.npy", "y.npy", "-o", "adapter", "--method", "wccn", "--json", "--quiet")[1])
    assert strict(call("evaluate", "frozen", "x.npy", "y.npy", "--json")[1])
    assert strict(call("report", "adapter", "x.npy", "y.npy", "-o", "r.md", "--json")[1])
    for name in ("frozen", "adapter"):
        strict(Path(name, "adapter.json").read_text())


def test_a_second_fit_into_a_folder_is_refused_while_the_first_works(data, call, monkeypatch):
    second = []

    def fit(args):
        second.append(subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True))

    command = [sys.executable, "-m", "ega", "fit", "x.npy", "y.npy", "-o", "out", "--quiet"]
    monkeypatch.setattr(cli, "_fit", fit)
    assert call(*command[3:])[0] == 0
    assert second[0].returncode == 2 and "being written by another process; wait for it" in second[0].stderr
    assert not Path("out").exists()  # this fit wrote nothing


def test_the_message_after_ctrl_c_in_a_fit_is_true(data, call, monkeypatch):
    "Before the adapter is saved nothing is left and the same command works; afterwards the message says so."

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    fit = ("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--json", "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(cli, "_read_inputs", interrupt)
        code, _, message = call(*fit)
        assert code == 130 and "interrupted; nothing was written; the same command starts anew" in message
        assert not Path("out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(cli, "print", lambda *a, file=None: print(*a, file=file) if file else interrupt(), raising=False)
        code, _, message = call(*fit)
        assert code == 130 and "interrupted; out was written" in message
    assert call("evaluate", "out", "x.npy", "y.npy")[0] == 0 and call(*fit)[0] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_the_message_after_ctrl_c_says_what_the_command_leaves(command):
    resumes = {"embed", "transform", "migrate"}
    args = {
        "completion": ["bash"],
        "info": ["p"],
        "fit": ["x", "-o", "o"],
        "update": ["a", "x", "-o", "o"],
        "embed": ["x", "--encoder", "e"],
    }
    args |= {"transform": ["a", "x", "-o", "z"], "migrate": ["a", "s"], "search": ["a", "s", "x"]}
    parsed = cli.parser().parse_args([command, *args.get(command, ["a", "x"])])
    assert hasattr(parsed, "interrupted") != (command in resumes)


INTERRUPTED_IMPORT = """if True:
    import importlib, signal, sys

    class Interrupt:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == place:
                signal.raise_signal(signal.SIGINT)

    entry, place, *sys.argv = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.meta_path.insert(0, Interrupt)
    module, function = entry.split(":")
    sys.exit(getattr(importlib.import_module(module), function)())"""


@pytest.mark.parametrize(
    "place, args",
    [
        ("ega.cli", ("ega", "info", "p.parquet")),
        ("argparse", ("ega", "--help")),
        ("numpy", ("ega", "info", "p.parquet")),
        ("ega.experiments.cli", ("ega-paper", "--help")),
        ("numpy", ("ega-paper", "rerun", "x")),
    ],
)
def test_ctrl_c_while_modules_load_is_one_sentence(place, args):
    "At the entry point that pip installs, when a module is about to be imported."
    entry = re.search(f'^{args[0]} = "(.+)"$', Path(__file__).parents[2].joinpath("pyproject.toml").read_text(), re.M)[
        1
    ]
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, entry, place, *args]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr == f"{args[0]}: interrupted; run the same command again\n"


@pytest.mark.parametrize("module", ["ega", "ega.experiments"])
def test_python_m_is_the_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("ega ")


def test_transform_refuses_weights_that_the_description_is_not_of(data, call):
    assert call("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet")[0] == 0
    save_adapter(ReleasedEGA(8, gen=torch.Generator().manual_seed(0)), "out/adapter.safetensors")
    code, _, err = call("transform", "out", "x.npy", "-o", "z.npy", "--quiet")
    assert code == 2 and "describes other weights" in err and not Path("z.npy").exists()


@pytest.mark.parametrize("source", ["x.npy", "v.parquet", "p.parquet"])
def test_labels_whose_ids_are_in_another_order_are_refused(source, data, call):
    x, y, order = np.load("x.npy"), np.load("y.npy"), np.arange(120)
    pd.DataFrame({"id": order, "vector": list(x)}).to_parquet("v.parquet")
    write_pack(EmbeddingSet(x, y, meta={"set": "s", "encoder": "e"}), "p.parquet")
    table = pd.DataFrame({"id": order, "label": y})
    for name, write in (("y.csv", pd.DataFrame.to_csv), ("y.parquet", pd.DataFrame.to_parquet)):
        write(table[::-1], name, index=False)
        code, _, err = call("fit", source, name, "-o", "out", "--method", "wccn", "--quiet")
        words = "in another order"
        assert code == 2 and words in err and not Path("out").exists()
        write(table, name, index=False)
        assert call("fit", source, name, "-o", "out", "--method", "wccn", "--quiet", "--overwrite")[0] == 0
        shutil.rmtree("out")
        write(table[["label"]].sample(frac=1, random_state=0), name)  # with the index of the DataFrame
        code, _, err = call("fit", source, name, "--label-column", "label", "-o", "out", "--method", "wccn", "--quiet")
        assert code == 2 and "in another order" in err, err
        write(table[["label"]].set_index(3 * order), name)  # of rows that were chosen from more
        assert call("fit", source, name, "--label-column", "label", "-o", "out", "--method", "wccn", "--quiet")[0] == 0
        shutil.rmtree("out")


@pytest.mark.parametrize("args", ["--version", "fit --help", "evaluate --help"])
def test_a_full_output_of_the_help_is_an_error(args):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ega", *args.split()]
        done = subprocess.run(command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "ega: the standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("args", ["--help", "fit --help", "info rows.parquet", "info rows.parquet --json"])
def test_a_closed_pipe_ends_the_command_quietly(args, data):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ega", *args.split()]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == "" and done.returncode in (0, 141)


def test_no_command_leaves_a_file_open(data):
    "In the development mode of Python, where a file that is not closed is a warning."
    pytest.importorskip("faiss")
    pytest.importorskip("lancedb")
    pytest.importorskip("qdrant_client")
    code = """if True:
        import sys
        from ega.cli import main
        for line in sys.stdin.read().splitlines():
            assert main(line.split()) == 0, line"""
    commands = """fit x.npy y.csv -o f --method wccn --quiet
        evaluate f x.npy y.csv
        report f x.npy y.csv -o r.md
        info rows.parquet
        transform f x.npy -o z.npy --quiet
        transform f rows.parquet -o z.parquet --quiet
        migrate f versions --vectors rows.parquet --activate --quiet
        search f versions rows.parquet -k 1
        migrate f db/t.lance --vectors rows.parquet --activate --quiet
        search f db/t.lance rows.parquet -k 1
        migrate f q --collection t --vectors rows.parquet --activate --quiet
        search f q rows.parquet --collection t -k 1"""
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-W", "always::ResourceWarning", "-c", code]
    done = subprocess.run(command, input=commands, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line for line in done.stderr.splitlines() if "ResourceWarning" in line]
    assert not found, done.stderr[-3000:]


@pytest.mark.parametrize("package", STORES)
def test_an_earlier_version_is_activated_without_the_vectors(package, store, call):
    "By the earlier adapter, or by the name of its version; nothing is adapted again."
    pytest.importorskip(package)
    place = STORES[package][0].split()
    other = LinearAdapter(8)
    with torch.no_grad():
        other.weight.add_(0.2)
    save_adapter(other, "b.safetensors")
    versions = [
        json.loads(call("migrate", a, *place, "--vectors", "rows.parquet", "--activate", "--json", "--quiet")[1])[
            "active"
        ]
        for a in ("a.safetensors", "b.safetensors")
    ]
    Path("rows.parquet").unlink()
    code, out, message = call("migrate", "a.safetensors", *place, "--activate", "--json")
    assert code == 0 and json.loads(out)["active"] == versions[0] and json.loads(out)["rows"] == 60, message
    code, out, message = call("migrate", "a.safetensors", *place, "--activate", versions[1], "--json")
    assert code == 0 and json.loads(out) == {
        "version": versions[1],
        "rows": 60,
        "previous": versions[0],
        "active": versions[1],
    }
    assert call("migrate", "a.safetensors", *place, "--activate", "nothing")[0] == 2


def test_a_wrong_condition_is_one_sentence(store, call):
    pytest.importorskip("lancedb")
    assert call("migrate", "a.safetensors", "db/t.lance", "--vectors", "rows.parquet", "--activate", "--quiet")[0] == 0
    for where in ("nope = 1", "split =", "label"):
        code, _, message = call("search", "a.safetensors", "db/t.lance", "rows.parquet", "--where", where)
        assert code == 2 and f"where={where!r} must be SQL on the columns id, label" in message
        assert len(message.strip().splitlines()) == 1


def set_weights(path, seed):
    "Save a linear adapter of 8 columns with random weights."
    adapter = LinearAdapter(8)
    with torch.no_grad():
        adapter.weight.copy_(0.4 * torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))
    save_adapter(adapter, path)


@pytest.mark.parametrize("source", ("x.parquet", "rows.parquet", "x.npy"))
def test_every_command_refuses_a_file_that_was_adapted(source, data, call):
    "Files and packs record the adapter; every command that would apply it again refuses, another may follow."
    for package in ("faiss", "lancedb"):
        pytest.importorskip(package)
    labels = {"rows.parquet": (), "x.parquet": ("--label-column", "n"), "x.npy": ("y.npy",)}[source]
    names = [f"{name}{Path(source).suffix}" for name in ("z", "bz", "zz")]
    fit = ("--method", "wccn", "--max-unseen-loss", "none", "--quiet")
    assert call("fit", source, *labels, "-o", "a", *fit)[0] == 0
    set_weights("b.safetensors", 1)
    assert call("transform", "a", source, "-o", names[0], "--quiet")[0] == 0
    assert call("transform", "b.safetensors", source, "-o", names[1], "--quiet")[0] == 0
    for z in names[:2]:  # adapted by the same adapter, and by another one
        commands = [
            ("transform", "a", z, "-o", names[2]),
            ("fit", z, *labels, "-o", "b", *fit),
            ("evaluate", "a", z, *labels),
            ("report", "a", z, *labels, "-o", "r.md"),
            ("migrate", "a", "indexes", "--vectors", z),
        ]
        if source != "x.npy":
            commands.append(("migrate", "a", "db/new.lance", "--vectors", z))
        for command in commands:
            code, out, message = call(*command)
            assert code == 2 and f"{z}: expected vectors that are not adapted" in message and not out, (
                command,
                message,
            )
    assert call("migrate", "a", "indexes", "--vectors", source, "--activate", "--quiet")[0] == 0
    assert call("search", "a", "indexes", source)[0] == 0
    assert "expected vectors that are not adapted" in call("search", "a", "indexes", names[0])[2]
    assert not any(Path(name).exists() for name in (names[2], "r.md", "db", "b"))
    assert call("evaluate", "a", source, *labels)[0] == 0


def test_fit_prints_its_rows_and_what_decides(data, call):
    labels = data[1].copy()
    labels[:5] = -1
    np.save("some.npy", labels)
    code, out, _ = call("fit", "x.npy", "some.npy", "-o", "out", "--method", "wccn", "--confidence", "0.9", "--quiet")
    text = " ".join(out.split())
    assert code == 0 and out.startswith("120 rows, 115 labelled, 12 classes\n")
    assert (
        "one-sided lower bounds at confidence 0.9: by them held-out classes must lose at most max_unseen_loss=1" in text
    )
    assert max(map(len, out.splitlines())) <= 80


def test_sentences_have_the_width_of_the_terminal(data, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = call("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet")[1]
    sentences = out[out.index("Brackets") :].splitlines()
    assert len(sentences) > 5 and max(map(len, sentences)) <= 40
    table, _, sentences = call("evaluate", "out", "x.npy", "y.npy")[1].partition("\n\n")
    assert "adapted" in table and max(map(len, sentences.splitlines())) <= 40


def test_fit_without_comparison_and_with_any_number_of_jobs(data, call):
    "As `EmbeddingAdapter(max_unseen_loss=None)` and as joblib counts."
    fit = ("fit", "x.npy", "y.npy", "--method", "lda", "--json", "--quiet", "--max-unseen-loss")
    found = json.loads(call(*fit, "none", "-o", "out")[1])
    adapter = EmbeddingAdapter("lda", max_unseen_loss=None).fit(*data)
    assert found["fingerprint"] == adapter.fingerprint_ and found["table"] == []
    parsed = cli.parser().parse_args([*fit, "2", "-o", "out", "--n-jobs", "-3"])
    assert parsed.n_jobs == -3 and parsed.max_unseen_loss == 2


def test_embeddings_of_another_width_are_named_by_their_file(data, call):
    assert call("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet")[0] == 0
    np.save("narrow.npy", data[0][:, :5])
    for command in (("evaluate",), ("report", "-o", "r.md")):
        code, _, message = call(*command, "out", "narrow.npy", "y.npy")
        assert code == 2 and "narrow.npy: expected 8 columns, as the adapter has, got 5" in message


def test_labels_with_ids_beside_a_pack_without_ids_are_read(data, call):
    "Such a pack holds the row numbers, which are no ids of its maker."
    write_pack(EmbeddingSet(*data, meta={"set": "s", "encoder": "e"}), "p.parquet")
    fit = ("fit", "p.parquet", "other.ids.csv", "-o", "out", "--method", "wccn", "--max-unseen-loss", "none")
    assert call(*fit, "--quiet")[0] == 0
    write_pack(EmbeddingSet(*data, ids=[f"r{i}" for i in range(120)], meta={"set": "s", "encoder": "e"}), "q.parquet")
    code, _, message = call("fit", "q.parquet", *fit[2:], "--overwrite", "--quiet")
    assert code == 2 and "in row 0 the column 'id' holds '1000' and not 'r0'" in message


def test_evaluate_and_report_name_the_classes_that_the_adapter_lacks(data, call):
    "Names that differ from those of the fit count as unseen, and the output says so."
    x, y = data
    names = np.array([f"kind {label}" for label in y])
    np.save("names.npy", names)
    np.save("other.npy", np.where(y < 6, names, np.char.replace(names, "kind", "sort")))
    assert call("fit", "x.npy", "names.npy", "-o", "out", "--method", "wccn", "--quiet")[0] == 0
    for command in (("evaluate",), ("report", "-o", "r.md")):
        text = " ".join(call(*command, "out", "x.npy", "other.npy")[1].split())
        assert (
            "Classes: 6 of the 12 that the adapter was fitted on occur; 6 others are unknown to it and count as "
            "unseen: sort 10, sort 11, sort 6, sort 7, sort 8, ..." in text
        )
    np.save("one.npy", np.where(y > 0, names, "other"))
    text = " ".join(call("evaluate", "out", "x.npy", "one.npy")[1].split())
    assert "occur; 1 other is unknown to it and counts as unseen: other." in text
    text = " ".join(call("evaluate", "out", "x.npy", "names.npy")[1].split())
    assert "Classes: 12 of the 12 that the adapter was fitted on occur, and no others." in text


@pytest.mark.parametrize("page", ["r.md", "r.html"])
def test_a_full_disk_while_the_report_is_written_is_one_sentence(page, data, call, monkeypatch):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    assert call("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet")[0] == 0
    files = sorted(Path().rglob("*"))

    def write_half(path, content):
        with open(path, "wb") as f:
            f.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    code, out, message = call("report", "out", "x.npy", "y.npy", "-o", page)
    expected = "cannot be read or written: No space left on device; make room on the disk or choose another"
    assert code == 1 and out == "" and message == f"ega: {page} {expected}\n"
    assert sorted(Path().rglob("*")) == files


def test_a_store_whose_active_vectors_are_not_adapted_says_what_to_type(store, call):
    pytest.importorskip("lancedb")
    assert call("migrate", "a.safetensors", "db/t.lance", "--vectors", "rows.parquet", "--quiet")[0] == 0
    code, _, message = call("search", "a.safetensors", "db/t.lance", "rows.parquet")
    assert code == 2 and "holds frozen embeddings" in message
    assert "`ega migrate ADAPTER STORE --activate`" in message
    assert call("migrate", "a.safetensors", "db/t.lance", "--activate", "--quiet")[0] == 0
    assert call("search", "a.safetensors", "db/t.lance", "rows.parquet")[0] == 0


def test_a_version_of_other_vectors_says_what_to_do_without_python(store, call):
    pytest.importorskip("faiss")
    migrate = ("migrate", "a.safetensors", "versions", "--quiet", "--vectors")
    assert call(*migrate, "rows.parquet")[0] == 0
    np.save("other.npy", store[0].x[1:])
    code, _, message = call(*migrate, "other.npy")
    assert code == 2 and "activate another version and drop this one" in message and "IndexStore" not in message


def test_options_may_stand_between_files(data, call):
    assert call("fit", "x.npy", "--method", "wccn", "y.npy", "-o", "out", "--quiet")[0] == 0
    expected = call("evaluate", "out", "x.npy", "y.npy")
    assert expected[0] == 0 and expected == call("evaluate", "out", "x.npy", "--seed", "0", "y.npy")
    assert expected == call("evaluate", "--seed", "0", "out", "x.npy", "y.npy")
    for wrong in (("y.npy", "y.npy"), ("--nothing", "y.npy")):
        with pytest.raises(SystemExit, match="2"):
            call("evaluate", "out", "x.npy", "--seed", "0", *wrong)


def test_integer_embeddings_are_read_as_in_python(data, call):
    "int8 in every format; the file that is transformed too."
    x, y = (100 * data[0]).astype(np.int8), data[1]
    np.save("i.npy", x)
    np.savez("i.npz", x=x, y=y[:, None].astype("U3"))
    pd.DataFrame({"v": x.tolist(), "n": y}).to_parquet("i.parquet")
    save_file({"x": torch.from_numpy(x)}, "i.safetensors")
    expected = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, y)
    for source in ("i.npy", "i.npz", "i.parquet", "i.safetensors"):
        fit = ("fit", source, "y.npy", "-o", source[2:], "--method", "wccn", "--max-unseen-loss", "none", "--json")
        code, out, message = call(*fit, "--quiet")
        assert code == 0, message
        assert json.loads(out)["fingerprint"] == expected.fingerprint_
    assert call("transform", "npy", "i.npy", "-o", "z.npy", "--quiet")[0] == 0
    assert np.array_equal(np.load("z.npy"), expected.transform(x))


def test_archives_prefer_floats_and_read_bfloat16(data):
    x = torch.from_numpy(data[0]).bfloat16()
    save_file({"x": x, "tokens": torch.ones(120, 4, dtype=torch.int64)}, "b.safetensors")
    assert np.array_equal(read_matrix("b.safetensors").array(), x.float().numpy())
    assert read_matrix("b.safetensors", column="tokens").array().shape == (120, 4)
    with pytest.raises(InputError, match="expected one matrix"):
        read_matrix("b.safetensors", column="none")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "args, unbuffered", [("fit --help", ""), ("info rows.parquet", ""), ("info rows.parquet --json", "1")]
)
def test_an_output_that_takes_nothing_is_one_sentence(args, unbuffered, data):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ega", *args.split()]
        environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and re.fullmatch("ega: .*standard output cannot be .*: No space left.*\n", done.stderr)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("args", ("fit x.npy y.npy -o /proc/a", "transform a.safetensors x.npy -o /proc/z.npy"))
def test_a_folder_that_takes_no_files_is_found_before_the_work(args, data, call, monkeypatch):
    monkeypatch.setattr(cli, "_read_inputs", None)
    code, _, message = call(*args.split())
    assert code == 2 and "cannot be written" in message


def test_a_condition_that_no_row_meets_is_said(store, call):
    pytest.importorskip("lancedb")
    assert call("migrate", "a.safetensors", "db/t.lance", "--vectors", "rows.parquet", "--activate", "--quiet")[0] == 0
    search = ("search", "a.safetensors", "db/t.lance", "rows.parquet", "--where", "split = 'none'")
    assert call(*search)[:2] == (0, "no row meets the condition split = 'none'\n")
    assert call(*search, "--json")[:2] == (0, "[]\n")


@pytest.fixture(scope="module")
def beir(tmp_path_factory):
    "A folder in the layout of BEIR: 40 documents and two queries for each, of which the last 8 documents are in test."
    folder, rng = tmp_path_factory.mktemp("beir"), np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 24)) for _ in range(40)]
    (folder / "qrels").mkdir()
    lines = {
        "corpus.jsonl": [{"_id": f"d{i}", "title": "", "text": word} for i, word in enumerate(words)],
        "queries.jsonl": [
            {"_id": f"q{i}", "text": words[i // 2] + "".join(rng.choice(list("abcd"), 30))} for i in range(80)
        ],
    }
    for name, objects in lines.items():
        (folder / name).write_text("\n".join(map(json.dumps, objects)))
    for split, rows in (("train", range(64)), ("test", range(64, 80))):
        pairs = "\n".join(f"q{i}\td{i // 2}\t1" for i in rows)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{pairs}\n")
    return folder


class LetterCounts:
    "An encoder of texts: how often each of 16 letters occurs. Queries have many more of the first four."

    modality, name, preprocessing, weights = "text", "letters", "none", "none"

    def prepare(self, text):
        return [text.count(letter) for letter in "abcdefghijklmnop"]

    def encode(self, batch):
        return np.array(batch, np.float32) + 0.01


def test_pairs_from_texts_to_evaluation(beir, tmp_path, monkeypatch, call):
    monkeypatch.setattr("ega.data.encoders.check_encoder", lambda name: None)
    monkeypatch.setattr(cli, "_load_encoder", lambda args: LetterCounts())
    monkeypatch.chdir(tmp_path)
    embed = ("embed", beir, "--pairs", "--encoder", "all-MiniLM-L6-v2", "-o", "set", "--dtype", "float32", "--quiet")
    assert call(*embed)[:2] == (0, "80 queries, 40 documents, 80 pairs in set\n")
    code, out, _ = call("fit", "set", "--pairs", "--split", "train", "-o", "fitted")
    assert code == 0 and "64 queries, 40 documents, 64 pairs" in out and "known documents" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = call("evaluate", "fitted", "set", "--pairs", "--json")
    groups = {row["group"]: row for row in json.loads(out) if row["measure"] == "ndcg@10"}
    assert set(groups) == {"all", "new documents", "fitted queries"}
    new = groups["new documents"]
    assert (
        new["n_queries"] == 16 and new["change"] > 5 and new["adapted"] == pytest.approx(new["frozen"] + new["change"])
    )
    code, out, _ = call("evaluate", "fitted", "set", "--pairs", "--split", "test")
    assert code == 0 and "new documents" in out and "fitted queries" not in out
    code, out, _ = call("info", "fitted", "--json")
    assert {"queries": 64, "documents": 32}.items() <= json.loads(out).items()
    Path("other.csv").write_text("query,document\na,b\n")
    Path("empty").mkdir()
    for args, words in (
        (("evaluate", "fitted", "set/queries.parquet"), "this adapter was fitted on pairs; add --pairs"),
        (("report", "fitted", "set/queries.parquet"), "this adapter was fitted on pairs; add --pairs"),
        (("evaluate", "fitted", "set", "--pairs", "--show", "none"), "none: no such file; expected the folder in the"),
        (
            ("evaluate", "fitted", "set", "--pairs", "--show", "other.csv"),
            "of all queries, but 79 of 80 ids are missing",
        ),
        (
            ("evaluate", "fitted", "set", "--pairs", "--show", beir, "--json"),
            "--json has no effect with --show; `ega report --json`",
        ),
        (("update", "fitted", "set/queries.parquet", "-o", "other"), "fit it again with all pairs"),
        (("fit", "set", "-o", "other"), "this folder holds queries, documents and pairs; add --pairs"),
        (("fit", "set", "--pairs", "--split", "dev", "-o", "other"), "theirs are: test, train"),
        (("fit", "set", "--pairs", "--documents", "d.npy", "-o", "other"), "no effect where the source is a folder"),
        (("fit", "set", "--pairs", "--method", "wccn", "-o", "other"), "--method has no effect with --pairs"),
        (("fit", "set", "--side", "query", "-o", "other"), "--side has no effect without --pairs"),
        (
            ("fit", "set", "other.csv", "--pairs", "-o", "other"),
            "the file of pairs follows the option: --pairs other.csv",
        ),
        (
            (
                "fit",
                "set/queries.parquet",
                "--documents",
                "set/documents.parquet",
                "--pairs",
                "other.csv",
                "-o",
                "other",
            ),
            "other.csv: pairs name 1 queries that are missing",
        ),
        (("evaluate", "empty", "set", "--pairs"), "this folder is empty, as after a fit that was stopped; fit again"),
        (("fit", "set/queries.parquet", "--pairs", "-o", "other"), "--documents FILE --pairs FILE"),
    ):
        code, _, message = call(*args)
        assert code == 2 and words in message, message
    assert not Path("other").exists()


def test_texts_that_are_skipped_are_counted(beir, tmp_path, monkeypatch, call):
    class NoEmptyText(LetterCounts):
        def prepare(self, text):
            if not text:
                raise ValueError("empty text")
            return super().prepare(text)

    monkeypatch.setattr("ega.data.encoders.check_encoder", lambda name: None)
    monkeypatch.setattr(cli, "_load_encoder", lambda args: NoEmptyText())
    monkeypatch.chdir(tmp_path)
    corpus = beir / "corpus.jsonl"
    first, *others = corpus.read_text().splitlines()
    corpus.write_text("\n".join([json.dumps({"_id": json.loads(first)["_id"], "text": ""}), *others]))
    embed = ("embed", beir, "--pairs", "--encoder", "x", "-o", "set", "--dtype", "float32", "--quiet")
    assert "d0 cannot be encoded (ValueError: empty text)" in call(*embed)[2]
    code, out, message = call(*embed, "--on-error", "skip")
    assert (code, out) == (0, "80 queries, 39 documents, 78 pairs in set\n")
    assert "skipped 0 queries, 1 documents, 2 pairs: texts that could not be encoded" in message


def test_evaluate_and_report_show_the_texts_of_lost_and_won_queries(beir, tmp_path, monkeypatch, call):
    "Texts where --show names them, ids where it does not; the page and the command have the same sentence."
    pytest.importorskip("jinja2")
    monkeypatch.setattr("ega.data.encoders.check_encoder", lambda name: None)
    monkeypatch.setattr(cli, "_load_encoder", lambda args: LetterCounts())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    call("embed", beir, "--pairs", "--encoder", "x", "-o", "set", "--dtype", "float32", "--quiet")
    call("fit", "set", "--pairs", "--split", "train", "-o", "fitted")
    code, plain, _ = call("evaluate", "fitted", "set", "--pairs")
    assert code == 0 and plain.startswith("Queries for new documents gain") and "also documents that no" in plain
    code, out, _ = call("evaluate", "fitted", "set", "--pairs", "--show", beir)
    assert code == 0 and out.startswith(plain) and max(map(len, out.splitlines())) <= 80
    assert "\nWon queries for new documents\n" in out and "known documents" not in out.split("none does.")[1]
    corpus = {line["_id"]: line["text"] for line in map(json.loads, (beir / "corpus.jsonl").read_text().splitlines())}
    report = ("report", "fitted", "set", "--pairs", "--split", "test")
    code, said, message = call(*report, "--show", beir, "-o", "texts.html")
    assert code == 0 and said.endswith("texts.html\n"), message
    example = json.loads(call(*report, "-o", "ids.md", "--json")[1])["examples"][-1]
    assert example["outcome"] == "won" and example["document"] == f"d{int(example['query'][1:]) // 2}"
    page, ids = Path("texts.html").read_text(), Path("ids.md").read_text()
    assert said.split("\n")[0].split(".")[0] in " ".join(page.split())
    for name in (example["document"], example["other"]):
        assert f"{name}: {corpus[name]}" in page and f": id {name}\n" in ids and corpus[name] not in ids
    assert f"rank {example['frozen_rank']} frozen, {example['adapted_rank']} adapted" in page
    assert call(*report, "--show", beir, "-o", "texts.html")[0] == 2  # it exists


def test_pairs_of_row_numbers_and_three_files_give_the_same_adapter(beir, tmp_path, monkeypatch, call):
    monkeypatch.setattr("ega.data.encoders.check_encoder", lambda name: None)
    monkeypatch.setattr(cli, "_load_encoder", lambda args: LetterCounts())
    monkeypatch.chdir(tmp_path)
    call("embed", beir, "--pairs", "--encoder", "x", "-o", "set", "--dtype", "float32", "--quiet")
    for side in ("queries", "documents"):
        np.save(f"{side}.npy", read_matrix(f"set/{side}.parquet").array())
    Path("pairs.csv").write_text("query,document\n" + "\n".join(f"{i},{i // 2}" for i in range(80)))
    three = ("--pairs", "pairs.csv", "--documents", "documents.npy")
    fits = (
        ("set", "--pairs"),
        ("queries.npy", *three),
        ("set/queries.parquet", "--documents", "set/documents.parquet", "--pairs", "set/qrels.tsv"),
    )
    found = []
    for number, args in enumerate(fits):
        code, out, message = call("fit", *args, "-o", f"fit{number}", "--json")
        assert code == 0, message
        found.append(json.loads(out)["fingerprint"])
    assert len(set(found)) == 1
    code, _, message = call("evaluate", "fit1", "queries.npy", "--pairs", "none.csv", "--documents", "documents.npy")
    assert code == 2 and "none.csv: no such file; expected a file of pairs" in message


@pytest.mark.parametrize(
    "package, store", [("lancedb", "store/documents.lance"), ("qdrant_client", "store --collection documents")]
)
def test_from_texts_to_an_adapted_search_in_five_commands(package, store, beir, tmp_path, monkeypatch, call):
    pytest.importorskip(package)
    monkeypatch.setattr("ega.data.encoders.check_encoder", lambda name: None)
    monkeypatch.setattr(cli, "_load_encoder", lambda args: LetterCounts())
    monkeypatch.chdir(tmp_path)
    commands = (
        f"embed {beir} --pairs --encoder all-MiniLM-L6-v2 -o set --dtype float32 --quiet",
        "fit set --pairs --split train -o adapter",
        "evaluate adapter set --pairs",
        f"migrate adapter {store} --vectors set/documents.parquet --activate",
        f"search adapter {store} set/queries.parquet -k 1 --json",
    )
    for command in commands:
        code, out, message = call(*command.split())
        assert code == 0, message
    found = {hit["query"]: hit["id"] for hit in json.loads(out)}
    adapter = PairAdapter.load("adapter")
    queries, documents = (read_pack(f"set/{side}.parquet") for side in ("queries", "documents"))
    nearest = knn(adapter.transform_queries(queries.x), adapter.transform_documents(documents.x), 1).I[:, 0]
    assert found == dict(zip(queries.ids.tolist(), documents.ids[nearest].tolist()))
    is_right = [found[f"q{i}"] == f"d{i // 2}" for i in range(64, 80)]
    assert np.mean(is_right) > (knn(queries.x[64:], documents.x, 1).I[:, 0] == np.arange(64, 80) // 2).mean()


def test_transform_takes_a_side_of_an_adapter_of_pairs(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter, x = cranfield.fitted("two"), cranfield.XQ[:6]
    adapter.save("adapter")
    np.save("x.npy", x)
    save_adapter(adapter.query_adapter_, "one.safetensors")
    expected = {"query": adapter.transform_queries(x), "document": adapter.transform_documents(x)}
    assert np.abs(expected["query"] - expected["document"]).max() > 0.01
    for side, z in expected.items():
        code, _, message = call("transform", "adapter", "x.npy", "--side", side, "-o", f"{side}.npy", "--quiet")
        assert code == 0 and np.allclose(np.load(f"{side}.npy"), z, atol=1e-6), message
    wrong = {
        ("adapter",): "has two sides; add --side document for stored documents, --side query for queries",
        (
            "one.safetensors",
            "--side",
            "query",
        ): "--side has no effect unless the adapter is a folder of `ega fit --pairs`",
    }
    queries = Path("adapter/adapter.queries.safetensors")
    for (path, *side), words in wrong.items():
        code, _, message = call("transform", path, "x.npy", *side, "-o", "z.npy")
        assert code == 2 and words in message
    save_adapter(LinearAdapter(x.shape[1]), queries)
    code, _, message = call("transform", "adapter", "x.npy", "--side", "document", "-o", "z.npy")
    assert code == 2 and "describes other weights than those" in message and not Path("z.npy").exists()
