"The command `ega-paper`: exit codes, messages, and stored runs that are made again."

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_runs import make_packs

from ega.experiments import cli
from ega.experiments.grids import ResultStore
from ega.experiments.runs import build_config, run_experiment

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "A small repository: packs, and results of three cheap runs, of two tasks."
    root = tmp_path_factory.mktemp("clone")
    (root / "nbs").mkdir()
    make_packs(root / "data/packs")
    store = ResultStore(root / "data/results", "unseen")
    for method in ("frozen", "wccn", "supcon"):
        config = build_config("unseen", "cub100", method, hidden=16, epochs=2)
        store.add(run_experiment(config, root / "data/packs", device="cpu"))
    store.merge_parts()
    # the runs of a path: as in the repository, what is trained stands in `short`, the rest in `main`
    for name, methods in (("main", ("frozen", "wccn")), ("short", ("frozen", "supcon"))):
        store = ResultStore(root / "data/results", name)
        for method in methods:
            config = build_config("path", "cub100", method, hidden=16, epochs=2)
            store.add(run_experiment(config, root / "data/packs", device="cpu"))
        store.merge_parts()
    return root


@pytest.mark.parametrize(
    "args, word",
    [
        (["reproduce", "--experiments", "rivals"], "quick"),
        (["reproduce", "--profile", "full", "--experiments", "nothing"], "nothing"),
        (["reproduce", "--epochs", "1"], "--protocol"),
        (["rerun", "zz"], "zz"),
    ],
)
def test_bad_input_is_one_sentence(root, args, word, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert cli.main(args) == 2
    said = capsys.readouterr().err.strip()
    assert word in said and "\n" not in said
    monkeypatch.chdir(root.parent)  # outside of a clone
    assert cli.main(args) == 2


def test_rerun_gives_the_stored_digits(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    run_id = ResultStore("data/results", "unseen").read().query("method == 'supcon'").run_id.iloc[0]
    assert cli.main(["rerun", run_id[:8]]) == 0
    out = capsys.readouterr().out
    assert out.count("first neighbours changed 0") == 2 and '"method": "supcon"' in out


def test_rerun_fails_at_other_digits(root, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(root)
    frame = ResultStore("data/results", "unseen").read()
    changed = frame.assign(lp_at_1=frame.lp_at_1 - 1e-4)
    ResultStore(tmp_path, "unseen").write(changed)
    assert cli.main(["rerun", frame.run_id[0], "--results", str(tmp_path)]) == 1
    assert "differs by 0.01 points" in capsys.readouterr().err
    ResultStore(tmp_path, "unseen").write(changed.assign(machine="another"))
    assert cli.main(["rerun", frame.run_id[0], "--results", str(tmp_path)]) == 0


def test_headline_compares_new_digits_with_committed_ones(root, tmp_path):
    committed = root / "data/results"
    frames = [ResultStore(committed, name).read() for name in ("main", "short")]
    frame = pd.concat(frames).drop_duplicates(["run_id", "query_set", "gallery_kind", "epoch"])
    changed = np.where(frame.method == "wccn", frame.lp_at_1 + 0.01, frame.lp_at_1)
    ResultStore(tmp_path, "main").write(frame.assign(lp_at_1=changed))
    text = cli.compare_with_committed(tmp_path, committed)
    assert "2 of 3 runs" in text and "1.00 points" in text and max(map(len, text.splitlines())) <= 80
    lp = frame.query("query_set == 'unseen' and gallery_kind == 'mixed'").set_index(["method", "epoch"]).lp_at_1
    (line,) = (line for line in text.splitlines() if line.startswith("wccn"))
    assert line.split()[1] == f"{100 * (lp['wccn', 0] + 0.01 - lp['frozen', 0]):+.1f}" != f"{0:+.1f}"
    assert "0 of 0 runs" in cli.compare_with_committed(tmp_path, tmp_path / "nothing")


@pytest.mark.parametrize(
    "experiment, method, lines, equal",
    [
        ("index", "frozen", 1, "64 of 64 rows equal"),
        ("margins", "frozen", 2, "1 of 1 rows equal"),
        ("controls", "affine_nca epochs=24", 4, "first neighbours changed 0"),
    ],
)
def test_rerun_takes_runs_of_every_task(experiment, method, lines, equal, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    path = REPOSITORY / f"data/results/{experiment}.parquet"
    runs = pd.read_parquet(path, columns=["run_id", "method", "benchmark"])
    run = runs[(runs.method == method) & (runs.benchmark == "grocery")]
    assert cli.main(["rerun", run.run_id.iloc[0]]) == 0
    assert capsys.readouterr().out.count(equal) == lines
