"Build of the report: published numbers as printed, ours as stored, the same bytes twice, text for missing results."

import functools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
import pytest

from ega.data.arrays import InputError
from ega.experiments import claims, grids, protocols, runs, tables
from ega.method import config as method_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "nbs/paper"
sys.path.insert(0, str(ROOT / "paper"))
import build as paper

sys.path.pop(0)

PUBLISHED = pd.read_csv(ROOT / "data/published.csv", dtype=str, keep_default_na=False)
SIZE, CLASSES = 80, 8
METHODS = grids.GRIDS["full"]["main"].methods
MAIN_FIGURES = ("overview", "benchmarks", "galleries", "paths", "mechanism", "falling", "pareto")


def outcomes(config, query_set, *more):
    "Made-up outcomes and a number of the method; methods differ by a shift that every benchmark shares."
    number = list(method_config.METHODS).index(config.method.split()[0])
    benchmark = list(protocols.BENCHMARKS).index(config.benchmark)
    rng = np.random.default_rng([benchmark, config.split_seed, query_set == "seen", *more])
    shift = 0 if number == 0 else 0.02 * number if query_set == "seen" else 0.04 * (number - 8)
    return np.float32(rng.random(SIZE) < 0.5 + shift), number


def described(config):
    "The columns that say what a stored run is."
    names = ("run_id", "task", "protocol", "benchmark", "method", "split_seed", "seed")
    row = {name: getattr(config, name) for name in names}
    row |= dict(seconds=1.0, version="0.0", machine="none", config=json.dumps(asdict(config), sort_keys=True))
    row |= dict(n=SIZE, gallery=SIZE, query=np.arange(SIZE), query_class=np.arange(SIZE) % CLASSES)
    return row


def made_up_row(config, query_set):
    "A stored row of a short task."
    hit, number = outcomes(config, query_set)
    epochs = config.train.epochs if config.train else 0
    rho = np.float32(0.3 / (1 + np.arange(epochs))) + np.float32(0.01 * number)
    row = dict(query_set=query_set, index="ivf", k=1, nlist=10, nprobe=1, displacement=0.1 * number)
    row |= dict(lp_at_1=hit.mean(), lp_at_1_ivf=hit.mean(), ar_at_1=0.9, active_ratio_history=rho, loss_history=rho)
    row |= dict(active_ratio_final=rho[-1] if epochs else np.nan, hit=hit, ivf_hit=hit)
    return described(config) | row | dict(ivf_ar=np.full(SIZE, 0.9, np.float32))


def made_up_path(config):
    "The stored rows of a run that is evaluated along its training."
    epochs = [0, *(e for e in runs.PATH_EPOCHS if config.train and e <= config.train.epochs)]
    for epoch, query_set, gallery in product(epochs, ("seen", "unseen"), ("own", "mixed")):
        hit, number = outcomes(config, query_set, gallery == "own", epoch)
        captures = (query_set, gallery) == ("unseen", "mixed")
        captured = np.float32(np.arange(SIZE if captures else 0) % 10 < number // 2)
        row = dict(query_set=query_set, gallery_kind=gallery, epoch=epoch, loss=1.0)
        row |= dict(active_ratio=0.9 / (1 + epoch + number) if config.train else np.nan)
        row |= dict(displacement=0.1 * number + 0.01 * epoch, lp_at_1=hit.mean(), lp_at_1_ivf=0.5, hit=hit)
        row |= dict(capture_rate=captured.mean() if captures else np.nan, captured=captured)
        has_index = epoch == epochs[-1] and gallery == "own"
        yield described(config) | row | dict(ar_at_1=0.9 if has_index else np.nan, neighbour=np.empty(0, np.int32))


def store(folder, experiment, configs, change=lambda f: f):
    "Write made-up rows of an experiment; their table."
    sets = ("seen",) if experiment == "in_distribution" else ("seen", "unseen")
    rows = []
    for config in configs:
        rows += made_up_path(config) if config.task == "path" else [made_up_row(config, q) for q in sets]
    frame = change(pd.DataFrame(rows))
    grids.ResultStore(folder, experiment).write(frame)
    return frame


@pytest.fixture(scope="module", autouse=True)
def few_replicates():
    "The pages draw 40 bootstrap replicates of the main grid instead of 1,000."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "read_outcomes", functools.partial(claims.read_outcomes, n_boot=40))
        yield


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    quick = grids.GRIDS["quick"]
    return folder, {e: store(folder, e, quick[e].configs()) for e in ("main", "controls", "in_distribution")}


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
    assert captured["lda"] == pytest.approx(100 * last.query("method == 'lda'").capture_rate.max())


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


def test_command_does_not_change_notebooks_or_report_source(tmp_path):
    sources = [*PAGES.glob("*.ipynb"), ROOT / "paper/report.typ"]
    before = [p.read_bytes() for p in sources]
    command = [sys.executable, ROOT / "paper/build.py", "--results", tmp_path / "none", "--out", tmp_path / "out"]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert (tmp_path / "out/report.pdf").exists() and [p.read_bytes() for p in sources] == before


def test_runs_with_different_indexes_raise(tmp_path):
    def other_index(f):
        f.loc[f["method"] == "ega_released", "nlist"] = 50
        return f

    store(tmp_path / "r", "in_distribution", grids.GRIDS["quick"]["in_distribution"].configs(), other_index)
    with pytest.raises(InputError, match="nlist"):
        paper.build(tmp_path / "r", tmp_path / "out")


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
