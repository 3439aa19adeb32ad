"The command `ega`: exit codes, messages, files, and that help loads nothing heavy."

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cranfield
import numpy as np
import pandas as pd
import pytest
import torch

from ega import cli
from ega.data.arrays import normalize
from ega.data.packs import EmbeddingSet, read_pack, write_pack
from ega.data.vectors import read_labels, read_matrix
from ega.deploy.report import write_report
from ega.estimator import EmbeddingAdapter
from ega.measure.evaluation import evaluate
from ega.measure.search import knn
from ega.method.adapters import LinearAdapter, ReleasedEGA, save_adapter, transform
from ega.pairs import PairAdapter

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
CLASSES, UNSEEN = 11, 3  # classes that are fitted on, and further ones
STORES = {  # package: how `ega migrate` and `ega search` name a store, and its vectors before any adapter
    "lancedb": ("db/t.lance", "vector"),
    "faiss": ("versions", None),
    "qdrant_client": ("q --collection t", "vector"),
}


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


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help_fits_80_columns_and_one_screen(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"] if command else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 66


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


def test_info_describes_a_pack(data, call):
    contents = json.loads(call("info", "rows.parquet", "--json")[1])
    assert (contents["rows"], contents["set"], contents["splits"]) == (60, "s", {"test": 30, "train": 30})
    assert "unlabelled  0" in call("info", "rows.parquet")[1]


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
    assert code == 2 and "adapter" in message


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


@pytest.fixture
def data(tmp_path, monkeypatch):
    "Embeddings and labels of 12 classes, a pack, weights and files that are refused, in a working folder of its own."
    monkeypatch.chdir(tmp_path)
    rng, y = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    x = normalize(rng.normal(size=(12, 8))[y] + 0.5 * rng.normal(size=(120, 8)))
    for name, a in {"x": x, "y": y, "short": y[1:], "cube": x.reshape(120, 4, 2), "none": np.full(120, -1)}.items():
        np.save(f"{name}.npy", a)
    np.save("objects.npy", y.astype(str).astype(object), allow_pickle=True)
    pd.DataFrame({"label": y}).to_csv("y.csv", index=False)
    pd.DataFrame({"label": y}).to_csv("headless.csv", index=False, header=False)
    pd.DataFrame({"id": np.arange(120)[::-1], "label": y}).to_csv("shuffled.csv", index=False)
    pd.DataFrame({"v": list(x), "n": y}).to_parquet("x.parquet")
    write_pack(made_pack(), "rows.parquet", dtype="float32")
    save_adapter(LinearAdapter(8), "a.safetensors")
    for folder in ("there", "fitted", "t.lance"):
        Path(folder).mkdir()
    Path("there/file").write_text("kept")
    Path("texts.csv").write_text("text\nhello\n")
    Path("taken.html").write_text("kept")
    save_adapter(LinearAdapter(8), "fitted/adapter.safetensors")
    return x, y


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


def test_unlabelled_texts_are_asked_about_once_and_then_left_out(labelled, tmp_path, call):
    x, labels, _ = labelled
    np.save(tmp_path / "x.npy", x)
    texts = pd.Series(["-1" if label is None else f"kind {label}" for label in labels])
    texts.to_frame("label").to_csv(tmp_path / "marked.csv", index=False)
    fit = ("fit", tmp_path / "x.npy", tmp_path / "marked.csv", "--method", "wccn", "--quiet", "--json")
    code, _, message = call(*fit, "-o", tmp_path / "a")
    assert code == 2 and "--unlabelled -1" in message and not (tmp_path / "a").exists()
    for name, flags, n_unlabelled in (("a", ("--unlabelled", "-1"), 0), ("b", ("--no-unlabelled",), 1)):
        code, out, _ = call(*fit, "-o", tmp_path / name, *flags)
        assert code == 0 and json.loads(out)["n_classes"] == CLASSES + UNSEEN + n_unlabelled


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
    for name, words in (("y.npy", "must be texts"), ("zeros.csv", "spelling")):
        for command in (("evaluate",), ("report", "-o", tmp_path / "r.md")):
            code, _, err = call(*command, tmp_path / "a", pack, tmp_path / name)
            assert code == 2 and words in err
    assert call("fit", pack, tmp_path / "y.csv", "-o", tmp_path / "b", "--method", "wccn", "--quiet")[0] == 0
    code, _, err = call("evaluate", tmp_path / "b", pack)
    assert code == 2 and "must be integers" in err


WRONG = {  # arguments: a word of the message
    "fit missing.npy y.npy -o out": "missing.npy",
    "fit x.npy missing.csv -o out": "missing.csv",
    "fit x.npy -o out": "labels",
    "fit x.npy short.npy -o out": "119",
    "fit x.npy x.npy -o out": "y",
    "fit y.npy x.npy -o out": "y.npy",
    "fit cube.npy y.npy -o out": "cube.npy",
    "fit objects.npy y.npy -o out": "objects",
    "fit x.npy objects.npy -o out": "objects",
    "fit x.npy none.npy -o out": "label",
    "fit x.npy y.csv --label-column class -o out": "class",
    "fit x.npy y.npy --column v -o out": "column",
    "fit x.parquet y.npy --column n -o out": "column",
    "fit x.npy headless.csv -o out": "119",
    "fit x.npy shuffled.csv -o out": "order",
    "fit x.npy y.npy -o there": "there",
    "fit x.npy y.npy -o x.npy": "x.npy",
    "fit there y.npy -o out": "folder",
    "fit x.npy y.npy -o out --method nope": "nope",
    "fit x.npy y.npy -o out --max-unseen-loss=-1": "max_unseen_loss",
    "fit x.npy y.npy -o out --confidence 1": "confidence",
    "fit x.npy y.npy -o out --n-jobs 0": "n_jobs",
    "fit x.npy y.npy -o out --device tpu": "tpu",
    "fit x.npy y.npy -o out --max-unseen-loss none": "max_unseen_loss",
    "fit x.npy y.npy -o out --split test": "--pairs",
    "fit x.npy y.npy -o out --unlabelled 99": "99",
    "evaluate a.safetensors x.npy y.npy": ".json",
    "evaluate there x.npy y.npy": "there",
    "evaluate none x.npy y.npy": "none",
    "report fitted x.npy y.npy -o r.pdf": ".pdf",
    "report fitted x.npy y.npy -o taken.html": "taken.html",
    "transform none x.npy -o z.npy": "none",
    "transform a.safetensors missing.npy -o z.npy": "missing.npy",
    "transform a.safetensors x.npy -o y.npy": "y.npy",
    "transform a.safetensors x.npy -o z.parquet": ".npy",
    "transform a.safetensors y.csv -o z.csv": ".csv",
    "migrate a.safetensors x.npy --vectors x.npy": "x.npy",
    "migrate a.safetensors t.lance --vectors x.npy": "was not found",
    "migrate a.safetensors fitted --vectors x.npy": "fitted",
    "migrate a.safetensors other": "other",
    "migrate a.safetensors versions --collection=": "empty",
    "search a.safetensors nowhere x.npy": "nowhere",
    "info x.npy": "x.npy",
    "info there": "there",
    "info x.parquet": "x.parquet",
    "embed texts.csv --encoder nothing": "nothing",
    "embed missing --encoder timm:x": "missing",
    "embed there --dataset pet --encoder timm:x": "both",
    "embed there --encoder timm:x --splits train": "splits",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_mistake_is_one_sentence_with_exit_code_2_and_changes_no_file(command, data, call):
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    code, _, message = call(*command.split())
    assert code == 2 and WRONG[command] in message and message.count("\n") == 1, message
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_cheap_mistakes_are_found_before_torch_is_loaded(data):
    commands = ["fit missing.npy y.npy -o out", "fit x.npy missing.csv -o out", "fit x.npy y.npy -o there"]
    commands += ["fit x.npy y.csv --label-column class -o out", "fit x.npy short.npy -o out", "info missing.parquet"]
    code = f"""if True:
        import sys
        from ega.cli import main
        assert all(main(command.split()) == 2 for command in {commands})
        print(sorted({{'torch', 'sklearn'}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "args", [("fit", "x.npy", "nope"), ("fit", "x.npy", "-o", "a", "--seed", "x"), ("search", "-k", "0")]
)
def test_what_argparse_refuses_has_exit_code_2(args, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(list(args))
    assert "usage: ega" in capsys.readouterr().err


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


@pytest.mark.parametrize("source", ["x.npy", "v.parquet", "p.parquet"])
def test_labels_whose_ids_are_in_another_order_are_refused(source, data, call):
    x, y = data
    pd.DataFrame({"id": np.arange(120), "vector": list(x)}).to_parquet("v.parquet")
    write_pack(EmbeddingSet(x, y, meta={"set": "s", "encoder": "e"}), "p.parquet")
    fit = ("--method", "wccn", "--max-unseen-loss", "none", "--quiet")
    code, _, message = call("fit", source, "shuffled.csv", "-o", "out", *fit)
    assert code == 2 and "in another order" in message and not Path("out").exists()
    pd.read_csv("shuffled.csv")[::-1].to_csv("sorted.csv", index=False)
    assert call("fit", source, "sorted.csv", "-o", "out", *fit)[0] == 0


def test_transform_refuses_weights_that_the_description_is_not_of(data, call):
    assert call("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet")[0] == 0
    save_adapter(ReleasedEGA(8, gen=torch.Generator().manual_seed(0)), "out/adapter.safetensors")
    code, _, err = call("transform", "out", "x.npy", "-o", "z.npy", "--quiet")
    assert code == 2 and "describes other weights" in err and not Path("z.npy").exists()


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


def set_weights(path, seed):
    "Save a linear adapter of 8 columns with random weights."
    adapter = LinearAdapter(8)
    with torch.no_grad():
        adapter.weight.copy_(0.4 * torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)))
    save_adapter(adapter, path)


@pytest.mark.parametrize(
    "source, labels", [("x.parquet", "--label-column n"), ("rows.parquet", ""), ("x.npy", "y.npy")]
)
def test_every_command_refuses_a_file_that_was_adapted(source, labels, data, call):
    "Files and packs record the adapter; every command that would apply it again refuses."
    pytest.importorskip("faiss")
    fit, labels, z = ("--method", "wccn", "--max-unseen-loss", "none", "--quiet"), labels.split(), f"z{source[1:]}"
    assert call("fit", source, *labels, "-o", "a", *fit)[0] == 0
    assert call("transform", "a", source, "-o", z, "--quiet")[0] == 0
    before = set(Path().rglob("*"))
    for command in (
        ("transform", "a", z, "-o", f"zz{source[1:]}"),
        ("fit", z, *labels, "-o", "b", *fit),
        ("evaluate", "a", z, *labels),
        ("report", "a", z, *labels, "-o", "r.md"),
        ("migrate", "a", "indexes", "--vectors", z),
    ):
        code, out, message = call(*command)
        assert code == 2 and "not adapted" in message and not out, (command, message)
    assert set(Path().rglob("*")) == before


def test_sentences_have_the_width_of_the_terminal(data, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = call("fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet")[1]
    sentences = out[out.index("Brackets") :].splitlines()
    assert len(sentences) > 5 and max(map(len, sentences)) <= 40
    table, _, sentences = call("evaluate", "out", "x.npy", "y.npy")[1].partition("\n\n")
    assert "adapted" in table and max(map(len, sentences.splitlines())) <= 40


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


def test_options_may_stand_between_files(data, call):
    assert call("fit", "x.npy", "--method", "wccn", "y.npy", "-o", "out", "--quiet")[0] == 0
    expected = call("evaluate", "out", "x.npy", "y.npy")
    assert expected[0] == 0 and expected == call("evaluate", "out", "x.npy", "--seed", "0", "y.npy")
    assert expected == call("evaluate", "--seed", "0", "out", "x.npy", "y.npy")
    for wrong in (("y.npy", "y.npy"), ("--nothing", "y.npy")):
        with pytest.raises(SystemExit, match="2"):
            call("evaluate", "out", "x.npy", "--seed", "0", *wrong)


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


@pytest.fixture
def pairs(beir, tmp_path, monkeypatch, call):
    "The folder `set` of queries and documents, embedded by `LetterCounts`, in a working folder of its own."
    monkeypatch.setattr(cli, "_load_encoder", lambda args: LetterCounts())
    monkeypatch.chdir(tmp_path)
    embed = ("embed", beir, "--pairs", "--encoder", "x", "-o", "set", "--dtype", "float32", "--quiet")
    assert call(*embed)[:2] == (0, "80 queries, 40 documents, 80 pairs in set\n")


def test_pairs_from_texts_to_evaluation(pairs, call):
    code, out, _ = call("fit", "set", "--pairs", "--split", "train", "-o", "fitted")
    assert code == 0 and "64 queries, 40 documents, 64 pairs" in out and "known documents" in out
    assert max(map(len, out.splitlines())) <= 80
    groups = json.loads(call("evaluate", "fitted", "set", "--pairs", "--json")[1])
    groups = {row["group"]: row for row in groups if row["measure"] == "ndcg@10"}
    assert set(groups) == {"all", "new documents", "fitted queries"}
    assert groups["new documents"]["n_queries"] == 16 and groups["new documents"]["change"] > 5
    code, out, _ = call("evaluate", "fitted", "set", "--pairs", "--split", "test")
    assert code == 0 and "new documents" in out and "fitted queries" not in out
    assert {"queries": 64, "documents": 32}.items() <= json.loads(call("info", "fitted", "--json")[1]).items()
    budget = call("fit", "set", "--pairs", "--split", "train", "--max-bytes", "16", "-o", "small", "--json")[1]
    fitted = json.loads(budget[budget.index("{") :])
    assert fitted["n_bytes"] <= 16 and not fitted["frozen"]
    assert json.loads(call("info", "small", "--json")[1])["bytes"] == fitted["n_bytes"]
    np.save("documents.npy", read_pack("set/documents.parquet").x)
    to_bits = ("transform", "small", "documents.npy", "--side", "document", "--dtype", "binary", "-o", "bits.npy")
    assert call(*to_bits, "--quiet")[0] == 0
    assert np.load("bits.npy").shape == (40, -(-fitted["n_components"] // 8)) and np.load("bits.npy").dtype == np.uint8
    Path("other.csv").write_text("query,document\na,b\n")
    for command, word in {
        "evaluate fitted set/queries.parquet": "add --pairs",
        "report fitted set --pairs --show none": "none",
        "report fitted set --pairs --show other.csv": "no text",
        "update fitted set/queries.parquet -o other": "pairs",
        "fit set -o other": "folder",
        "fit set --pairs --split dev -o other": "test, train",
        "fit set --pairs --method wccn -o other": "method",
        "fit set --side query -o other": "side",
        "fit set/queries.parquet --documents set/documents.parquet --pairs other.csv -o other": "missing",
        "fit set/queries.parquet --pairs -o other": "--documents",
    }.items():
        code, _, message = call(*command.split())
        assert code == 2 and word in message, (command, message)
    assert not Path("other").exists()


def test_a_report_shows_the_texts_of_lost_and_won_queries(pairs, beir, monkeypatch, call):
    "Texts where --show names them, ids where it does not; the page and the command have the same sentence."
    pytest.importorskip("jinja2")
    monkeypatch.setenv("COLUMNS", "80")
    call("fit", "set", "--pairs", "--split", "train", "-o", "fitted")
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


def test_pairs_of_row_numbers_and_three_files_give_the_same_adapter(pairs, call):
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
    assert code == 2 and "none.csv" in message


@pytest.mark.parametrize(
    "package, store", [("lancedb", "store/documents.lance"), ("qdrant_client", "store --collection documents")]
)
def test_from_texts_to_an_adapted_search_in_four_commands(package, store, pairs, call):
    pytest.importorskip(package)
    commands = (
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
        ("adapter",): "add --side",
        (
            "one.safetensors",
            "--side",
            "query",
        ): "leave out --side",
    }
    queries = Path("adapter/adapter.queries.safetensors")
    for (path, *side), words in wrong.items():
        code, _, message = call("transform", path, "x.npy", *side, "-o", "z.npy")
        assert code == 2 and words in message
    save_adapter(LinearAdapter(x.shape[1]), queries)
    code, _, message = call("transform", "adapter", "x.npy", "--side", "document", "-o", "z.npy")
    assert code == 2 and "describes other weights than those" in message and not Path("z.npy").exists()
