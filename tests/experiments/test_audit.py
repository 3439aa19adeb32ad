"The audit: its list of deviations, its table of index sizes, and the query sets of the leak."

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

from ega.experiments.grids import read_results
from ega.experiments.runs import RunConfig, build_config
from ega.methods import parse_config

root = Path(__file__).resolve().parents[2]
cells = [
    c
    for name in ("08_audit", "09_deviations")
    for c in json.loads((root / f"nbs/results/{name}.ipynb").read_text())["cells"]
]
headings = {
    re.match(r"## (.+)", "".join(c["source"]))[1]
    for c in cells
    if c["cell_type"] == "markdown" and "".join(c["source"]).startswith("## ")
}


def test_every_deviation_is_tested_somewhere_or_says_why_not():
    d = pd.read_csv(root / "data/deviations.csv", dtype=str, keep_default_na=False)
    assert d.id.tolist() == [f"D{i}" for i in range(1, 34)] and (d.drop(columns="tested") != "").all(axis=None)
    for line in d.tested:
        if line.startswith("no: "):
            continue
        assert set(line.removeprefix("in part: ").split("; ")) <= headings, line


def test_a_section_names_the_deviations_that_point_to_it():
    d = pd.read_csv(root / "data/deviations.csv", dtype=str, keep_default_na=False)
    sections = re.split(
        r"^## ", "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown"), flags=re.M
    )[1:]
    for section in sections:
        named = set(re.findall(r"\bD\d+\b", (re.search(r"^\*(D.+?)\*", section, re.M) or [""])[0]))
        heading = section.splitlines()[0]
        assert named == set(
            d.id[
                d.tested.map(lambda t: not t.startswith("no: ") and heading in t.removeprefix("in part: ").split("; "))
            ]
        ), heading


def test_the_table_of_index_sizes_is_a_full_grid_of_known_runs():
    t = pd.read_csv(root / "data/results/nlist.csv")
    keys = ["benchmark", "method", "split_seed", "nlist"]
    assert len(t) == t[keys].drop_duplicates().shape[0] == np.prod([t[k].nunique() for k in keys]) and set(
        t.nprobe
    ) == {1}
    for r in t.drop_duplicates("run_id").itertuples():
        config = build_config(
            "unseen", r.benchmark, r.method, hidden=512, epochs=10, split_seed=r.split_seed, seed=r.seed
        )
        assert parse_config(RunConfig, json.loads(r.config)) == config and r.run_id == config.run_id
    assert (
        t[["scanned", "ar_at_1", "lp_at_1"]].stack().between(0, 1).all() and (t.scanned >= 0.9 / t.nlist).all()
    )  # uneven lists scan more than one in nlist


def test_the_open_leak_differs_in_fit_rows_alone():
    a, b = (
        read_results(root / "data/results", e).set_index("method").sort_index() for e in ("leak_closed", "leak_open")
    )
    assert a.index.equals(b.index) and all(np.array_equal(x, y) for x, y in zip(a["query"], b["query"]))
    assert np.array_equal(a.hit["frozen"], b.hit["frozen"]) and (a.gallery == b.gallery).all()
    strip = lambda c: {k: v for k, v in json.loads(c).items() if k != "protocol"}
    assert all(strip(x) == strip(y) for x, y in zip(a.config, b.config))
