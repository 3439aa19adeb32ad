"The command line as a user meets it: exit codes, messages, files, the time it takes to ask for help."

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_runs import make_packs

from ega import cli
from ega.arrays import InputError
from ega.experiments.grids import ResultStore
from ega.experiments.runs import build_config, run_experiment

HERE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "A repository in small: packs, and results of three cheap runs."
    root = tmp_path_factory.mktemp("clone")
    (root / "nbs").mkdir()
    make_packs(root / "data/packs")
    store = ResultStore(root / "data/results", "unseen")
    for method in ("frozen", "wccn", "supcon"):
        store.add(
            run_experiment(
                build_config("unseen", "cub100", method, hidden=16, epochs=2), root / "data/packs", device="cpu"
            )
        )
    store.seal()
    return root


def run(*args, cwd=None):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "ega", *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True
    )


def test_help_is_quick_and_loads_nothing_heavy():
    code = "import sys; from ega.cli import parser; parser().format_help(); print(sorted({'numpy', 'torch', 'pandas', 'sklearn', 'faiss', 'pyarrow'} & set(sys.modules)))"
    begun = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (
        out.strip() == "[]" and time.perf_counter() - begun < 2
    )  # 0.2 s on a quiet machine; no more is promised on a busy one


@pytest.mark.parametrize(
    "args,words",
    [
        (("info", "nothing.parquet"), "no such pack"),
        (("reproduce",), "inside a clone"),
        (("rerun", "ffff"), "inside a clone"),
        (("embed", "nothing", "--encoder", "all-MiniLM-L6-v2", "--out", "x.parquet"), "nothing"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, args, words):
    done = run(*args, cwd=tmp_path)
    assert (
        done.returncode == 2
        and words in done.stderr
        and "Traceback" not in done.stderr
        and len(done.stderr.strip().splitlines()) == 1
    )
    assert not any(tmp_path.iterdir())


def test_unknown_arguments_are_argparse_s_exit_code_2():
    assert run("reproduce", "--profile", "huge").returncode == 2 and run().returncode == 2


@pytest.mark.parametrize("policy", [None, "active"])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(policy, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy) if policy else monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert cli.main(["info", "nothing.parquet"]) == 2
    assert os.environ["OMP_WAIT_POLICY"] == (policy or "PASSIVE")


def test_info_says_what_a_pack_holds(root, capsys):
    assert cli.main(["info", str(root / "data/packs/cub100__efficientnet_lite0.parquet"), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["rows"] == 187 and about["unlabelled"] == 7 and about["set"] == "cub100"


def test_rerun_gives_the_stored_digits(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    run_id = ResultStore("data/results", "unseen").read().query("method == 'supcon'").run_id.iloc[0]
    assert cli.main(["rerun", run_id[:8]]) == 0
    out = capsys.readouterr().out
    assert out.count("first neighbours changed 0") == 2 and '"method": "supcon"' in out


def test_rerun_notices_other_digits(root, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(root)
    frame = ResultStore("data/results", "unseen").read()
    ResultStore(tmp_path, "unseen").write(frame.assign(lp_at_1=frame.lp_at_1 - 1e-4))
    assert (
        cli.main(["rerun", frame.run_id[0], "--results", str(tmp_path)]) == 1
        and "differs by 0.01 points" in capsys.readouterr().err
    )
    ResultStore(tmp_path, "unseen").write(frame.assign(lp_at_1=frame.lp_at_1 - 1e-4, machine="another"))
    assert cli.main(["rerun", frame.run_id[0], "--results", str(tmp_path)]) == 0
    assert cli.main(["rerun", "zz", "--results", str(tmp_path)]) == 2


def test_repository_is_found_from_below_and_missed_outside(root, tmp_path):
    assert cli.find_repository(root / "data" / "packs") == root
    with pytest.raises(InputError, match="clone"):
        cli.find_repository(tmp_path)


def test_headline_holds_new_digits_against_committed_ones(root, tmp_path):
    frame = ResultStore(root / "data/results", "unseen").read()
    ResultStore(tmp_path, "unseen").write(
        frame.assign(lp_at_1=np.where(frame.method == "wccn", frame.lp_at_1 + 0.01, frame.lp_at_1))
    )
    text = cli.headline(tmp_path, root / "data/results")
    assert "2 of 3 runs have the digits" in text and "is 1.00 points" in text and max(map(len, text.splitlines())) <= 80


def test_transform_adapts_a_file_and_goes_on_after_ctrl_c(tmp_path):
    "Interrupted, then the same command again; bad input, and an option that cannot be meant."
    import signal

    import torch

    from ega.adapters import ReleasedEGA, save_adapter, transform
    from ega.arrays import normalize

    f = ReleasedEGA(64, hidden=4096, gen=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        f.branch[3].weight.add_(0.1)
    save_adapter(f, tmp_path / "f.safetensors")
    x = normalize(np.random.default_rng(0).standard_normal((200_000, 64), dtype=np.float32))
    np.save(tmp_path / "x.npy", x)
    args, journal = (
        ("transform", "f.safetensors", "x.npy", "-o", "z.npy", "--threads", "1", "--device", "cpu", "--quiet"),
        tmp_path / "z.npy.part.json",
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from ega.cli import main; sys.exit(main())"  # a shell's background jobs ignore ctrl-c
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (journal.exists() and json.loads(journal.read_text())["rows"]):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert (
        "same command again" in process.communicate(timeout=60)[1]
        and process.returncode == 130
        and not (tmp_path / "z.npy").exists()
    )
    done = run(*args, "--json", cwd=tmp_path)
    about = json.loads(done.stdout)
    assert (
        done.returncode == 0
        and about["rows"] == 200_000
        and 0 < about["resumed_rows"] < 200_000
        and about["path"] == "z.npy"
    )
    assert np.array_equal(
        np.load(tmp_path / "z.npy")[64 * 1024 : 66 * 1024], transform(f, x[64 * 1024 : 66 * 1024], device="cpu")
    )  # at the seam
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.safetensors", "x.npy", "z.npy"]


def test_transform_refuses_in_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(["transform", "none.safetensors", "x.npy", "-o", "z.npy"]) == 2
        and "no such adapter" in capsys.readouterr().err
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    from ega.adapters import LinearAdapter, save_adapter

    save_adapter(LinearAdapter(2), "f")
    os.mkdir("x")
    np.save("x/0.npy", np.eye(2, dtype="f4"))
    assert cli.main(["transform", "f", "x", "-o", "z", "--ray"]) == 1 and "ega[ray]" in capsys.readouterr().err
    assert (
        cli.main(["transform", "f", "x", "-o", "z", "--quiet"]) == 0
        and capsys.readouterr().out.startswith("2 rows in z; ")
        and np.array_equal(np.load("z/0.npy"), np.eye(2))
    )


def test_embed_turns_photographs_into_a_pack(tmp_path):
    "A folder of photographs through a tiny ONNX encoder, as a user would."
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


def test_embed_takes_a_public_set_by_name(tmp_path):
    "One command, from the files of a set and a bare architecture to a pack; what is asked for wrongly is one sentence."
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


def test_an_experiment_outside_the_profile_is_refused_by_name(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert (
        cli.main(["reproduce", "--only", "rivals"]) == 2 and "quick has no experiment rivals" in capsys.readouterr().err
    )
    assert (
        cli.main(["reproduce", "--profile", "full", "--only", "nothing"]) == 2
        and "it has unseen, in_distribution" in capsys.readouterr().err
    )


@pytest.mark.parametrize("args", [("--epochs", "3"), ("--dry-run",), ("--packs", "x")])
def test_options_of_a_protocol_need_one(root, monkeypatch, capsys, args):
    monkeypatch.chdir(root)
    assert cli.main(["reproduce", *args]) == 2 and f"{args[0]} belongs to --protocol" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--profile", "full", "--protocol", "paper"])


@pytest.mark.parametrize("experiment, rows", [("index", 64), ("margins", 1)])
def test_rerun_takes_runs_of_every_task(experiment, rows, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    runs = pd.read_parquet(
        HERE / f"data/results/{experiment}.parquet", columns=["run_id", "method", "benchmark"]
    ).query("method == 'frozen' and benchmark == 'grocery'")
    assert cli.main(["rerun", runs.run_id.iloc[0]]) == 0 and f"{rows} of {rows} rows equal" in capsys.readouterr().out


@pytest.fixture
def store(tmp_path, monkeypatch):
    "A pack of 60 rows of 6 classes, and an adapter of them."
    from ega.adapters import LinearAdapter, save_adapter
    from ega.arrays import normalize
    from ega.packs import EmbeddingSet, write_pack

    rng = np.random.default_rng(0)
    es = EmbeddingSet(
        normalize(rng.standard_normal((60, 8), dtype=np.float32)),
        np.repeat(np.arange(6), 10),
        [f"r{i}" for i in range(60)],
        ["train", "test"] * 30,
        tuple("abcdef"),
        {"set": "s", "encoder": "e"},
    )
    adapter = LinearAdapter(8)
    with torch.no_grad():
        adapter.weight.copy_(torch.from_numpy(0.4 * rng.standard_normal((8, 8), dtype=np.float32)))
    write_pack(es, tmp_path / "rows.parquet", dtype="float32")
    save_adapter(adapter, tmp_path / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    return es, adapter


@pytest.mark.parametrize("place, raw", (("db/t.lance", "vector"), ("versions", None)), ids=("lancedb", "faiss"))
def test_a_store_is_migrated_switched_and_asked(store, place, raw, capsys):
    "Beside what is served, then instead of it; the answers are those of exact search in the adapted space; the way back is one command."
    pytest.importorskip("lancedb" if raw else "faiss")
    from ega.adapters import transform
    from ega.search import knn

    (es, adapter), ask = store, ("search", "a.safetensors", place, "rows.parquet", "-k", "3", "--json")

    def says(*args):
        code = cli.main(list(args))
        out = capsys.readouterr()
        return code, out.out, out.err

    assert says("migrate", "a.safetensors", place, "--vectors", "rows.parquet", "--quiet")[1].endswith(
        f"served: {raw or 'none'} (--activate serves the new ones)\n"
    )
    assert says(*ask)[0] == 2  # nothing adapted is served yet
    code, out, _ = says(
        "migrate", "a.safetensors", place, "--vectors", "rows.parquet", "--activate", "--json", "--quiet"
    )
    about = json.loads(out)
    assert code == 0 and about["rows"] == 60 and about["before"] == raw and about["serves"] == about["version"]
    z = transform(adapter, es.x)
    hits, exact = json.loads(says(*ask)[1]), knn(z, z, 3)
    assert [h["id"] for h in hits] == es.ids[exact.I].ravel().tolist() and [
        h["query"] for h in hits[::3]
    ] == es.ids.tolist()
    assert np.allclose([h["distance"] for h in hits], np.sqrt(np.maximum(exact.D, 0)).ravel(), atol=1e-3)
    shown = says("search", "a.safetensors", place, "rows.parquet", "-k", "1")[1].splitlines()
    assert (
        shown[0].split() == ["query", "rank", "distance", "id"]
        and shown[1].split() == ["r0", "1", "0.000", "r0"]
        and len(shown) == 61
    )
    if raw:
        assert {h["id"] for h in json.loads(says(*ask, "--where", "split = 'test'")[1])} <= set(es.ids[1::2])
        assert says("migrate", "a.safetensors", place, "--activate", "vector")[0] == 0 and says(*ask)[0] == 2
        assert says("migrate", "a.safetensors", place, "--normalize")[0] == 2
    else:
        assert says(*ask, "--where", "x = 1")[0] == 2
    assert (
        says("migrate", "a.safetensors", place, "--vectors", "rows.parquet", "--activate", "nonsense", "--quiet")[0]
        == 2
    )


def test_rows_of_any_length_reach_an_index(store, capsys):
    "Refused with the flag that cures it; with the flag, and for what `ega fit` made without it, as unit rows are."
    pytest.importorskip("faiss")
    es, _ = store
    Path("e").mkdir()
    Path("e/adapter.safetensors").write_bytes(Path("a.safetensors").read_bytes())
    np.save("unit.npy", es.x)
    np.save("long.npy", 7 * es.x)

    def answers(adapter, rows, *how):
        code = cli.main(
            ["migrate", adapter, f"s {adapter} {rows} {len(how)}", "--vectors", rows, "--activate", "--quiet", *how]
        )
        if code:
            return code, capsys.readouterr().err
        capsys.readouterr()
        cli.main(["search", adapter, f"s {adapter} {rows} {len(how)}", rows, "-k", "4", "--json"])
        return code, [h["id"] for h in json.loads(capsys.readouterr().out)]

    code, said = answers("a.safetensors", "long.npy")
    assert code == 2 and "--normalize" in said
    code, found = answers("a.safetensors", "unit.npy")
    assert (
        code == 0
        and len(found) == 4 * len(es.x)
        and answers("a.safetensors", "long.npy", "--normalize") == answers("e", "long.npy") == (0, found)
    )


def test_a_shell_learns_to_complete_every_command():
    pytest.importorskip("shtab")
    done = run("completion", "bash")
    assert done.returncode == 0 and all(
        f"_shtab_ega_{c}" in done.stdout for c in ("embed", "fit", "migrate", "search", "report")
    )
