"The command `ega`: exit codes, messages, files, and the time that help takes."

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ega import cli
from ega.adapters import LinearAdapter, ReleasedEGA, save_adapter, transform
from ega.arrays import normalize
from ega.packs import EmbeddingSet, write_pack
from ega.search import knn

COMMANDS = ("embed", "fit", "evaluate", "report", "info", "transform", "migrate", "search", "completion")
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
        ("fit", "--max-unseen-loss --confidence --n-jobs --overwrite"),
        ("embed", "--precision --batch-size --overwrite"),
        ("transform", "--precision --batch-size"),
        ("migrate", "--vectors --index-factory --activate"),
    ],
)
def test_flags_have_their_names(command, flags):
    subparser = cli.parser()._subparsers._group_actions[0].choices[command]
    assert set(flags.split()) <= set(subparser._option_string_actions)


@pytest.mark.parametrize(
    "args, words",
    [
        (("info", "nothing.parquet"), "no such pack"),
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
        (("embed", "--dataset", "mnist", "--encoder", "x"), "got 'mnist'"),
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
        code = cli.main(list(args))
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("place, raw", (("db/t.lance", "vector"), ("versions", None)), ids=("lancedb", "faiss"))
def test_migrate_activate_and_search_a_store(store, place, raw, call):
    "Results equal exact search among adapted vectors, and an earlier version can be activated again."
    pytest.importorskip("lancedb" if raw else "faiss")
    es, adapter = store
    migrate = ("migrate", "a.safetensors", place, "--vectors", "rows.parquet", "--quiet")
    search = ("search", "a.safetensors", place, "rows.parquet")
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
    assert lines[0].split() == ["query", "rank", "distance", "id"] and lines[1].split() == ["r0", "1", "0.000", "r0"]
    assert len(lines) == 61
    if raw:
        found = json.loads(call(*search, "--where", "split = 'test'", "--json")[1])
        assert {h["id"] for h in found} <= set(es.ids[1::2])
        assert call("migrate", "a.safetensors", place, "--activate", "vector")[0] == 0 and call(*search)[0] == 2
    else:
        assert call(*search, "--where", "x = 1")[0] == 2
        assert call("migrate", "a.safetensors", place)[0] == 2  # needs --vectors
    assert call(*migrate, "--activate", "nonsense")[0] == 2


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
