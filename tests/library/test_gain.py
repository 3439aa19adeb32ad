"""estimate_gain: agreement with the parts it is made of, known gains, too little data, and the page it prints."""

import json
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from test_selection import world

from ega import estimate_gain
from ega.cli import main
from ega.data.arrays import InputError, normalize
from ega.data.runtime import spawn_rngs
from ega.data.vectors import read_matrix
from ega.measure.evaluation import label_hits
from ega.method.closed_form import DiscriminantWhitening
from ega.selection import leave_classes_out


def scattered(n_classes, n_rows, *, d=32, scale=3.0, noise=0.4, seed=0):
    "Classes that all scatter along the first quarter of the directions, which a closed form learns to suppress."
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(n_classes), n_rows)
    spread = np.r_[np.full(d // 4, scale), np.full(d - d // 4, noise)]
    return normalize(rng.normal(size=(n_classes, d))[y] + rng.normal(size=(len(y), d)) * spread), y


def folds_of(y):
    "The folds of an estimate with random_state 0."
    return leave_classes_out(y, spawn_rngs(0).split, n_folds=4, max_queries=500)


def test_frozen_numbers_are_those_of_a_loop():
    x, y = world(0)
    scores = (x @ x.T).astype(float)
    np.fill_diagonal(scores, -np.inf)
    expected = {"all": (y[scores.argmax(1)] == y).tolist(), "seen": [], "held-out": []}
    captured = []
    for fold in folds_of(y):
        gallery = np.r_[fold.fit, fold.unseen]
        for name, queries in (("seen", fold.seen_queries), ("held-out", fold.unseen_queries)):
            nearest = gallery[scores[np.ix_(queries, gallery)].argmax(1)]
            expected[name] += (y[nearest] == y[queries]).tolist()
            if name == "held-out":
                captured += np.isin(nearest, fold.fit).tolist()
    estimate = estimate_gain(x, y)
    for line in estimate.frozen.itertuples():
        assert line.n_queries == len(expected[line.classes])
        assert abs(line.lp_at_1 - 100 * np.mean(expected[line.classes])) < 1e-9
        assert line.low <= line.lp_at_1 <= line.high
    assert abs(estimate.capture_rate - 100 * np.mean(captured)) < 1e-9


@pytest.mark.parametrize("strength", [0.0, 0.25, 1.0])
def test_changes_are_those_of_the_closed_form_on_each_fold(strength):
    x, y = scattered(16, 12)
    found = []
    for fold in folds_of(y):
        gallery = np.r_[fold.fit, fold.unseen]
        z = DiscriminantWhitening(strength).fit(x[fold.fit], y[fold.fit]).transform(x)
        hits = [label_hits(v, y, fold.unseen_queries, gallery).hit for v in (x, z)]
        found.append(hits[1] - hits[0])
    line = estimate_gain(x, y).candidates.query("method != 'frozen' and strength == @strength").iloc[0]
    assert abs(line.unseen - 100 * np.concatenate(found).mean()) < 0.3  # float32 may turn a near tie


def test_copies_are_reported():
    x, y = scattered(12, 8)
    assert estimate_gain(np.r_[x, x[:24]], np.r_[y, y[:24]]).copies == pytest.approx(100 * 48 / 120)
    assert estimate_gain(x, y).copies == 0


def test_more_rows_help_where_few_rows_do_not_determine_the_covariance():
    x, y = scattered(24, 48, d=128, scale=4.0, noise=1.5)
    estimate = estimate_gain(x, y)
    parts = estimate.smaller.set_index("part")
    assert parts.loc["all", "rows_per_class"] == 36 and parts.loc["1/2 of the rows", "rows_per_class"] == 18
    assert parts.loc["1/2 of the classes", "n_classes"] == 9
    assert parts.loc["1/4 of the rows", "gain"] < parts.loc["1/2 of the rows", "gain"] < 0
    assert (parts.loc["all", ["seen", "unseen", "gain"]] == 0).all() and np.isnan(parts.loc["1/2 of the classes"].gain)
    assert "Twice as many rows a class may bring as much again" in " ".join(str(estimate).split())


def test_too_few_classes_or_rows_are_said_and_not_raised():
    x, y = scattered(12, 8)
    few = estimate_gain(x[y < 9], y[y < 9])
    assert few.candidates.empty and few.smaller.empty and np.isnan(few.strength) and not few.passes
    assert few.reason in " ".join(str(few).split()) and few.to_dict()["candidates"] == []
    single = np.r_[np.flatnonzero(y < 9), np.flatnonzero(y >= 9)[::8]]  # three classes of one row
    assert estimate_gain(x[single], y[single]).reason == few.reason
    pairs = np.flatnonzero(np.arange(len(y)) % 8 < 3)
    assert estimate_gain(x[pairs], y[pairs]).smaller.part.tolist() == ["all", "1/2 of the classes"]


def test_unlabelled_rows_and_the_container_change_nothing(tmp_path):
    x, y = scattered(12, 8)
    np.save(tmp_path / "x.npy", np.r_[x, 5 * x[:9]])
    mapped, marked = np.load(tmp_path / "x.npy", mmap_mode="r"), np.r_[y, np.full(9, -1)]
    expected = estimate_gain(x, y).to_dict()
    assert estimate_gain(mapped, marked).to_dict() == expected
    for stored in (read_matrix(tmp_path / "x.npy"), read_matrix(pa.table({"vector": list(mapped)}))):
        assert estimate_gain(stored, marked).to_dict() == expected
    names = [f"kind {c}" if c >= 0 else "" for c in marked]
    assert estimate_gain(pd.DataFrame(mapped), names).to_dict() == expected


def test_more_than_ten_thousand_rows_are_thinned():
    x, y = scattered(50, 240, d=8)
    estimate = estimate_gain(x, y)
    assert estimate.n_labelled == 12000 and 9900 < estimate.n_rows < 10100 and estimate.n_classes == 50


def test_of_rows_on_disk_only_those_that_take_part_are_in_memory(tmp_path, monkeypatch):
    x, y = scattered(16, 10_000, d=64)
    x, y = x[: 2**17], np.where(np.arange(2**17) % 128, -1, y[: 2**17])
    expected, n_bytes = estimate_gain(x, y).to_dict(), x.nbytes
    np.save(tmp_path / "x.npy", x)
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    for stored in (np.load(tmp_path / "x.npy", mmap_mode="r"), read_matrix(tmp_path / "x.npy")):
        tracemalloc.start()
        assert estimate_gain(stored, y).to_dict() == expected
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < n_bytes, f"{peak / 2**20:.0f} MB"


def test_command_estimate_prints_eighty_columns_and_writes_nothing(tmp_path, monkeypatch, capsys):
    x, y = scattered(14, 12)
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", x)
    pd.Series([f"kind {c}" for c in y], name="label").to_csv("y.csv", index=False)
    assert main(["estimate", "x.npy", "y.csv"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert main(["estimate", "x.npy", "y.csv", "--json", "--max-unseen-loss", "3", "--seed", "1"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert result.pop("cost")["n_rows"] == len(x)
    assert result == estimate_gain(x, y, max_unseen_loss=3.0, random_state=1).to_dict()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "y.csv"]


@pytest.mark.parametrize("rows, labels", [(96, np.zeros(96, int)), (12, np.arange(12)), (96, np.arange(96))])
def test_labels_that_say_nothing_are_refused(rows, labels):
    with pytest.raises(InputError):
        estimate_gain(scattered(12, 8)[0][:rows], labels)
