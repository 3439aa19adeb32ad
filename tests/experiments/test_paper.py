"Build of the report: published numbers as printed, ours as stored, the same bytes twice, text for missing results."

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
import pytest

from ega.data.arrays import InputError
from ega.experiments import claims, grids, protocols, tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "nbs/paper"
sys.path.insert(0, str(ROOT / "paper"))
import build as paper

sys.path.pop(0)

PUBLISHED = pd.read_csv(ROOT / "data/published.csv", dtype=str, keep_default_na=False)
MAIN_FIGURES = ("overview", "benchmarks", "galleries", "paths", "mechanism", "falling", "pareto")


@pytest.fixture(scope="module", autouse=True)
def few_replicates():
    "The pages draw 40 bootstrap replicates of the main grid instead of 1,000."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "read_outcomes", functools.partial(claims.read_outcomes, n_boot=40))
        yield


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    "The runs of the quick profile, taken from the committed results."
    folder, stored = tmp_path_factory.mktemp("results"), {}
    for name, sources in {
        "main": ("main", "short"),
        "controls": ("controls",),
        "in_distribution": ("in_distribution",),
    }.items():
        run_ids = {config.run_id for config in grids.GRIDS["quick"][name].configs()}
        rows = pd.concat([grids.read_results(ROOT / "data/results", source) for source in sources])
        rows = rows[rows.run_id.isin(run_ids)].drop(columns="experiment")
        stored[name] = rows.drop_duplicates([key for key in grids.ROW_KEYS if key in rows])
        grids.ResultStore(folder, name).write(stored[name])
    return folder, stored


@pytest.fixture(scope="module")
def built(stored, tmp_path_factory):
    out = tmp_path_factory.mktemp("paper")
    paper.build(stored[0], out)
    return out


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def table(path):
    "A Markdown table as a DataFrame of text."
    rows = [[c.strip() for c in line.strip().strip("|").split(" | ")] for line in path.read_text().splitlines()]
    return pd.DataFrame(rows[2:], columns=rows[0])


@pytest.mark.parametrize("name, artefact", [("unseen", "tab:ood_summary"), ("in_distribution", "tab:indist_summary")])
def test_published_numbers_are_copied_as_printed(built, name, artefact):
    want = PUBLISHED[PUBLISHED["artefact"] == artefact]
    csv = pd.read_csv(built / f"tables/published_{name}.csv", dtype=str, keep_default_na=False)
    csv = csv.set_index(["dataset", "method"])
    for r in want.itertuples():
        row, metric = csv.loc[(r.dataset, r.method)], r.metric.lower()
        assert (row[metric], row[f"{metric}_std"]) == (r.value, r.std)
    assert (csv[["lp", "ar"]] != "").sum().sum() == len(want)


@pytest.mark.parametrize(
    "name, artefact, metric", [("in_distribution", "tab:indist_summary", "LP"), ("recall", "tab:ood_summary", "AR")]
)
def test_published_numbers_are_in_the_row_of_their_method_and_in_columns_of_their_own(built, name, artefact, metric):
    t = table(built / f"tables/{name}.md")
    for r in PUBLISHED[(PUBLISHED["artefact"] == artefact) & (PUBLISHED["metric"] == metric)].itertuples():
        (cell,) = t.loc[t["the paper's name"] == r.method, f"paper: {r.dataset}"]
        assert cell.rstrip("†") == r.value + (f" ± {r.std}" if r.std and metric == "LP" else "")
    assert t.loc[t["the paper's name"] == "EGA", "method"].tolist() == ["EGA (released)"]  # the tables are of this form
    ours, theirs = ({c.split(": ")[1] for c in t if c.startswith(word)} for word in ("ours: ", "paper: "))
    assert ours and theirs and not ours & theirs and theirs <= set(PUBLISHED["dataset"])


def test_our_numbers_equal_stored_outcomes(built, stored):
    t = pd.read_csv(built / "tables/main.csv")
    rows = stored[1]["main"]
    last = rows[rows.epoch == rows.groupby("run_id").epoch.transform("max")]
    keys = ["query_set", "gallery_kind", "benchmark", "method"]
    lp = 100 * last.set_index(keys).lp_at_1
    ours = t[t.metric == "lp_at_1"].set_index(keys).sort_index()
    for key, value in lp.items():
        assert ours.value[key] == pytest.approx(value, abs=1e-3)
        assert ours.change[key] == pytest.approx(value - lp[(*key[:3], "frozen")], abs=1e-3)
    half = {b: 0.5 if "tiny200" in b else 1.0 for b in protocols.MAIN_BENCHMARKS}  # the same seen classes twice
    for query_set, weights in (("unseen", dict.fromkeys(half, 1.0)), ("seen", half)):
        values = ours.change.loc[query_set, "mixed"].unstack("benchmark")
        mean = sum(w * values[b] for b, w in weights.items()) / sum(weights.values())
        assert np.allclose(values["mean"], mean, atol=1e-3)
    captured = t[(t.metric == "capture_rate") & (t.benchmark == "cub100")].set_index("method").value
    assert captured["lda"] == pytest.approx(
        100 * last.query("method == 'lda' and benchmark == 'cub100'").capture_rate.max(), abs=1e-3
    )


def test_an_unfinished_grid_makes_no_table_and_no_figure(stored, tmp_path):
    results = tmp_path / "r"
    shutil.copytree(stored[0], results)
    some = stored[1]["main"].query("method != 'lda' or benchmark != 'cub100'")
    grids.ResultStore(results, "main").write(some)
    assert tables.read_complete_runs(results, "main") is None
    paper.build(results, tmp_path / "out")
    left = content(tmp_path / "out")
    assert "tables/main.csv" not in left and "tables/in_distribution.csv" in left and "tables/controls.csv" in left
    assert set(pd.read_csv(tmp_path / "out/tables/claims.csv")["verdict"]) == {"not tested"}
    assert not [name for name in MAIN_FIGURES if f"figures/{name}.pdf" in left]


def test_claims_have_a_verdict_in_each_gallery(built):
    t = pd.read_csv(built / "tables/claims.csv", keep_default_na=False)
    decided = {c.id: c for c in claims.load_claims(ROOT / "data/claims.toml")}
    assert set(t["id"]) == set(decided) and "not tested" not in set(t["verdict"])
    for r in t.itertuples():
        assert r.verdict == claims.decide(decided[r.id], float(r.low), float(r.high))
    galleries = t.groupby("id").gallery.agg(set)
    assert all(galleries[i] == ({"own", "mixed"} if c.gallery == "both" else {c.gallery}) for i, c in decided.items())


def test_the_report_asks_for_verdicts_that_exist():
    text = (ROOT / "paper/report.typ").read_text()
    asked = re.findall(r'(?:verdicts-of|choose)\("(\w+)"(?:, of: "([^"]*)")?', text)
    assert {name for name, _ in asked} == set(claims.EFFECTS)
    assert all(form in claims.EFFECTS[name] for name, form in asked)


def test_build_is_reproducible_and_deletes_stale_output(stored, built, tmp_path):
    first, again = content(built), tmp_path / "again"
    paper.build(stored[0], again)
    assert content(again) == first
    paper.build(tmp_path / "nothing", again)  # without results their tables and figures are deleted
    left = content(again)
    stale = r"main|paths|quantities|recall|controls|equal_gain|correlations|settings|in_distribution\.|\.pdf|\.png"
    assert not [f for f in left if re.search(stale, f) and f != "report.pdf" and "published" not in f]
    assert left["tables/published_unseen.csv"] == first["tables/published_unseen.csv"]
    assert left["report.pdf"] != first["report.pdf"]
    assert set(pd.read_csv(again / "tables/claims.csv")["verdict"]) == {"not tested"}
    absent = [json.loads(left[f"tables/{name}.json"])["absent"] for name in ("sources", "numbers")]
    assert [set(names) for names in absent] == [{"main", "controls", "in_distribution"}, {"speed"}]


def test_tables_of_other_results_raise(stored, built, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(built, old)
    sources = json.loads((old / "tables/sources.json").read_text())
    sources["source"]["main"]["runs"] -= 1
    (old / "tables/sources.json").write_text(json.dumps(sources))
    for folder in (tmp_path / "empty", old):
        for name in ("02_verdicts", "03_figures"):
            with (
                paper.environment(PAGES, EGA_RESULTS=stored[0], EGA_PAPER=folder),
                pytest.raises(InputError, match="tables"),
            ):
                paper.run_notebook(PAGES / f"{name}.ipynb")


def test_numbers_of_a_chapter_need_its_results(tmp_path):
    "A chapter whose results are the committed ones gives its numbers; one with other results is left out."
    results, clusters = tmp_path / "r", ROOT / "data/results/pairs_clusters.csv"
    results.mkdir()
    for file in (clusters, clusters.with_name("pairs.parquet")):
        shutil.copy(file, results)

    def numbers():
        with paper.environment(PAGES, EGA_RESULTS=results, EGA_PAPER=tmp_path):
            paper.run_notebook(PAGES / "05_numbers.ipynb")
        return json.loads((tmp_path / "tables/chapters.json").read_text())

    assert set(numbers()) == {"pairs"}
    (results / clusters.name).write_text(clusters.read_text().replace("0.", "1.", 1))
    assert numbers() == {}


def test_report_source_contains_no_typed_results():
    "A decimal or a number with thousands that is not a length must come from tables/, not from the source."
    text = (ROOT / "paper/report.typ").read_text()
    assert re.findall(r"(?<![\d.])\d+\.\d+(?!\d|pt|em|in|fr|%)|\d,\d{3}", text) == []
