"""The list of deviations, the table of index sizes and the two runs with queries kept out of training and in it."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

from ega.experiments.grids import read_results
from ega.experiments.runs import RunConfig, build_config
from ega.method.config import parse_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("11_audit",)


def read_deviations():
    return pd.read_csv(ROOT / "data/deviations.csv", dtype=str, keep_default_na=False)


def named_sections(entry):
    "Headings of the sections that test a deviation; none for an entry that begins with 'no: '."
    return [] if entry.startswith("no: ") else entry.removeprefix("in part: ").split("; ")


def read_sections():
    "Heading -> text of each section of the audit."
    sections = {}
    for page in PAGES:
        cells = json.loads((ROOT / f"nbs/results/{page}.ipynb").read_text())["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        parts = re.split(r"^## (.+)$", text, flags=re.M)
        sections |= dict(zip(parts[1::2], parts[2::2]))
    return sections


def test_deviations_are_complete_and_listed_exactly_where_they_are_tested():
    deviations, sections = read_deviations(), read_sections()
    assert deviations.id.tolist() == [f"D{i}" for i in range(1, 34)]
    assert (deviations != "").all(axis=None)
    assert {heading for entry in deviations.tested for heading in named_sections(entry)} <= set(sections)
    for heading, text in sections.items():
        listed = re.search(r"^\*(D.+?)\*", text, re.M)
        named = set(re.findall(r"\bD\d+\b", listed[1])) if listed else set()
        assert named == {d.id for d in deviations.itertuples() if heading in named_sections(d.tested)}, heading


def test_table_of_index_sizes_is_a_full_grid_of_known_runs():
    table = pd.read_csv(ROOT / "data/results/nlist.csv")
    keys = ["benchmark", "method", "split_seed", "nlist"]
    assert len(table) == len(table[keys].drop_duplicates()) == np.prod([table[key].nunique() for key in keys])
    for row in table.drop_duplicates("run_id").itertuples():
        options = dict(hidden=512, epochs=10, split_seed=row.split_seed, seed=row.seed)
        config = build_config("unseen", row.benchmark, row.method, **options)
        assert parse_config(RunConfig, json.loads(row.config)) == config and row.run_id == config.run_id
    assert set(table.nprobe) == {1} and table[["scanned", "ar_at_1", "lp_at_1"]].stack().between(0, 1).all()
    assert (table.scanned >= 0.9 / table.nlist).all()  # lists of unequal size scan more than 1/nlist on average


def test_runs_with_queries_in_training_differ_in_fit_rows_alone():
    kept_out, in_training = (
        read_results(ROOT / "data/results", name).set_index("method").sort_index()
        for name in ("leak_closed", "leak_open")
    )
    assert kept_out.index.equals(in_training.index)
    assert all(np.array_equal(a, b) for a, b in zip(kept_out["query"], in_training["query"]))
    assert np.array_equal(kept_out.hit["frozen"], in_training.hit["frozen"])
    assert (kept_out.gallery == in_training.gallery).all()
    for one, other in zip(kept_out.config, in_training.config):
        one, other = json.loads(one), json.loads(other)
        assert one.pop("protocol") == "gallery_fitted" and other.pop("protocol") == "leaked"
        assert one == other
