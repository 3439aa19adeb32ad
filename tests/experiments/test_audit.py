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


def markdown_of(name):
    "The markdown cells of a results notebook as one text."
    cells = json.loads((ROOT / f"nbs/results/{name}.ipynb").read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def read_deviations():
    return pd.read_csv(ROOT / "data/deviations.csv", dtype=str, keep_default_na=False)


def named_sections(entry):
    "Headings of the sections that test a deviation; none for an entry that begins with 'no: '."
    return [] if entry.startswith("no: ") else entry.removeprefix("in part: ").split("; ")


# (heading, newline, text) of each section on both pages of the audit
SECTIONS = [
    section.partition("\n")
    for name in ("13_audit", "14_deviations")
    for section in re.split(r"^## ", markdown_of(name), flags=re.M)[1:]
]
HEADINGS = {heading for heading, _, _ in SECTIONS}


def test_deviations_are_complete_and_point_to_existing_sections():
    deviations = read_deviations()
    assert deviations.id.tolist() == [f"D{i}" for i in range(1, 34)]
    assert (deviations.drop(columns="tested") != "").all(axis=None)
    for entry in deviations.tested:
        assert entry, "the column tested must name a section or begin with 'no: '"
        assert set(named_sections(entry)) <= HEADINGS, entry


def test_section_lists_exactly_the_deviations_that_point_to_it():
    deviations = read_deviations()
    for heading, _, text in SECTIONS:
        listed = re.search(r"^\*(D.+?)\*", text, re.M)
        named = set(re.findall(r"\bD\d+\b", listed[1])) if listed else set()
        pointing = {d.id for d in deviations.itertuples() if heading in named_sections(d.tested)}
        assert named == pointing, heading


def test_table_of_index_sizes_is_a_full_grid_of_known_runs():
    table = pd.read_csv(ROOT / "data/results/nlist.csv")
    keys = ["benchmark", "method", "split_seed", "nlist"]
    assert len(table) == len(table[keys].drop_duplicates()) == np.prod([table[key].nunique() for key in keys])
    assert set(table.nprobe) == {1}
    for row in table.drop_duplicates("run_id").itertuples():
        config = build_config(
            "unseen", row.benchmark, row.method, hidden=512, epochs=10, split_seed=row.split_seed, seed=row.seed
        )
        assert parse_config(RunConfig, json.loads(row.config)) == config
        assert row.run_id == config.run_id
    assert table[["scanned", "ar_at_1", "lp_at_1"]].stack().between(0, 1).all()
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
