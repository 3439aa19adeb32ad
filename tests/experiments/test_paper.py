"Build of the report: published numbers as printed, ours as stored, the same bytes twice, text for missing results."

import functools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
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
    "Made-up outcomes; methods differ by a shift that every benchmark shares."
    m, b = (
        list(method_config.METHODS).index(config.method.split()[0]),
        list(protocols.BENCHMARKS).index(config.benchmark),
    )
    rng = np.random.default_rng([b, config.split_seed, query_set == "seen", *more])
    shift = 0 if m == 0 else 0.02 * m if query_set == "seen" else 0.04 * (m - 8)
    return np.float32(rng.random(SIZE) < 0.5 + shift), m


def described(config):
    "The columns that say what a stored run is."
    return dict(
        run_id=config.run_id,
        task=config.task,
        protocol="strict",
        benchmark=config.benchmark,
        method=config.method,
        split_seed=config.split_seed,
        seed=config.seed,
        seconds=1.0,
        version="0.0",
        machine="none",
        config=json.dumps(asdict(config), sort_keys=True),
        n=SIZE,
        gallery=SIZE,
        query=np.arange(SIZE, dtype=np.int32),
        query_class=(np.arange(SIZE) % CLASSES).astype(np.int32),
    )


def made_up_row(config, query_set):
    "A stored row of a short task."
    hit, m = outcomes(config, query_set)
    epochs = config.train.epochs if config.train else 0
    rho = np.float32(0.3 / (1 + np.arange(epochs))) + np.float32(0.01 * m)
    return described(config) | dict(
        query_set=query_set,
        index="ivf",
        k=1,
        nlist=10,
        nprobe=1,
        lp_at_1=float(hit.mean()),
        lp_at_1_ivf=float(hit.mean()),
        ar_at_1=0.9,
        displacement=0.1 * m,
        active_ratio_final=float(rho[-1]) if epochs else float("nan"),
        active_ratio_history=rho,
        loss_history=rho,
        neighbour=np.zeros(SIZE, np.int32),
        hit=hit,
        ivf_hit=hit,
        ivf_ar=np.full(SIZE, 0.9, np.float32),
    )


def made_up_path(config):
    "The stored rows of a run that is evaluated along its training."
    epochs = [0, *(e for e in runs.PATH_EPOCHS if config.train and e <= config.train.epochs)]
    for epoch in epochs:
        for query_set in ("seen", "unseen"):
            for gallery in ("own", "mixed"):
                hit, m = outcomes(config, query_set, gallery == "own", epoch)
                captures = (query_set, gallery) == ("unseen", "mixed")
                captured = np.float32(np.arange(SIZE) % 10 < m // 2) if captures else np.empty(0, np.float32)
                yield described(config) | dict(
                    query_set=query_set,
                    gallery_kind=gallery,
                    epoch=epoch,
                    active_ratio=0.9 / (1 + epoch + m) if config.train else float("nan"),
                    loss=1.0,
                    displacement=0.1 * m + 0.01 * epoch,
                    lp_at_1=float(hit.mean()),
                    capture_rate=float(captured.mean()) if captures else float("nan"),
                    lp_at_1_ivf=0.5,
                    ar_at_1=0.9 if epoch == epochs[-1] and gallery == "own" else float("nan"),
                    hit=hit,
                    captured=captured,
                    neighbour=np.empty(0, np.int32),
                )


def store(folder, experiment, configs, change=lambda f: f):
    "Write made-up rows of an experiment; their table."
    configs = list(configs)
    if configs[0].task == "path":
        rows = [row for c in configs for row in made_up_path(c)]
    else:
        sets = ("seen",) if experiment == "in_distribution" else ("seen", "unseen")
        rows = [made_up_row(c, q) for c in configs for q in sets]
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


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    "The names that 01_tables and 02_verdicts define when there are no results."
    out = tmp_path_factory.mktemp("bare")
    with paper.environment(PAGES, EGA_RESULTS=out / "none", EGA_PAPER=out):
        tables_page = paper.run_notebook(PAGES / "01_tables.ipynb")
        return tables_page | paper.run_notebook(PAGES / "02_verdicts.ipynb")


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def table(path):
    "A Markdown table as a DataFrame of text."
    rows = [[c.strip() for c in line.strip().strip("|").split(" | ")] for line in path.read_text().splitlines()]
    return pd.DataFrame(rows[2:], columns=rows[0])


@pytest.mark.parametrize("name, artefact", [("unseen", "tab:ood_summary"), ("in_distribution", "tab:indist_summary")])
def test_published_numbers_are_copied_as_printed(built, name, artefact):
    want = PUBLISHED[PUBLISHED["artefact"] == artefact]
    csv = pd.read_csv(built / f"tables/published_{name}.csv", dtype=str, keep_default_na=False).set_index(
        ["dataset", "method"]
    )
    for r in want.itertuples():
        assert (
            csv.loc[(r.dataset, r.method), r.metric.lower()],
            csv.loc[(r.dataset, r.method), f"{r.metric.lower()}_std"],
        ) == (r.value, r.std)
    assert (csv[["lp", "ar"]] != "").sum().sum() == len(want)


@pytest.mark.parametrize(
    "name, artefact, metric", [("in_distribution", "tab:indist_summary", "LP"), ("recall", "tab:ood_summary", "AR")]
)
def test_published_numbers_are_in_the_row_of_their_method(built, name, artefact, metric):
    t = table(built / f"tables/{name}.md")
    printed = PUBLISHED[(PUBLISHED["artefact"] == artefact) & (PUBLISHED["metric"] == metric)]
    for r in printed.itertuples():
        (cell,) = t.loc[t["the paper's name"] == r.method, f"paper: {r.dataset}"]
        assert cell.rstrip("†") == r.value + (f" ± {r.std}" if r.std and metric == "LP" else "")
    assert t.loc[t["the paper's name"] == "EGA", "method"].tolist() == [
        "EGA (released)"
    ]  # the published tables were made with this form


@pytest.mark.parametrize("name", ["in_distribution", "recall"])
def test_our_and_published_numbers_share_no_column(built, name):
    ours, theirs = (
        {c.split(": ")[1] for c in table(built / f"tables/{name}.md") if c.startswith(w)} for w in ("ours: ", "paper: ")
    )
    assert ours and theirs and not ours & theirs
    assert ours <= {b.replace(">", " → ") for b in protocols.BENCHMARKS} | {"mean", "worst"}
    assert theirs <= set(PUBLISHED["dataset"])


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


def test_sources_json_describes_stored_runs(built):
    source = json.loads((built / "tables/sources.json").read_text())["source"]
    assert {s["profile"] for s in source.values()} == {"quick"}
    assert (source["main"]["hidden"], source["main"]["epochs"]) == ("512", "10")
    assert source["main"]["queries"] == SIZE * 2 * 5 and source["main"]["runs"] == 13 * 5


def test_an_unfinished_grid_makes_no_table_and_no_figure(stored, tmp_path):
    rows = stored[1]["main"].assign(experiment="main")
    assert tables.name_of_stored_grid(rows[rows["method"] != "lda"]) == "60 of 65 runs of quick"
    results = tmp_path / "r"
    shutil.copytree(stored[0], results)
    some = stored[1]["main"].query("method != 'lda' or benchmark != 'cub100'")
    grids.ResultStore(results, "main").write(some)
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


def test_figure_titles_count_intervals(built):
    figures = json.loads((built / "figures/figures.json").read_text())
    t = pd.read_csv(built / "tables/main.csv").query("benchmark == 'mean' and metric == 'lp_at_1'")
    t = t[t.method.isin([m for m in METHODS if method_config.uses_gradient_training(m)])]
    mixed = t[t.gallery_kind == "mixed"].set_index(["query_set", "method"])
    gain = mixed.loc["seen"].query("low > 0").index
    lose, win = (mixed.loc["unseen"].loc[gain, end] for end in ("high", "low"))
    assert len(gain) and figures["overview"]["title"] == (
        f"{len(gain)} of 10 trained methods gain on seen classes; {(lose < 0).sum()} of these lose on unseen classes, "
        f"{(win > 0).sum()} gain on them"
    )
    lost = [(t[(t.gallery_kind == g) & (t.query_set == "unseen")].high < 0).sum() for g in ("mixed", "own")]
    assert figures["galleries"]["title"] == (
        f"Unseen classes lose under {lost[0]} of 10 trained methods in the mixed gallery, under {lost[1]} in their own "
        "gallery"
    )


def test_figures_embed_fonts_and_have_no_date(built):
    for name in MAIN_FIGURES:
        pdf = (built / f"figures/{name}.pdf").read_bytes()
        assert b"CreationDate" not in pdf and b"/Type3" not in pdf and b"/FontFile2" in pdf
        assert (built / f"figures/{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert (built / "report.pdf").read_bytes()[:5] == b"%PDF-"


def test_build_is_reproducible_and_deletes_stale_output(stored, built, tmp_path):
    first = content(built)
    again = tmp_path / "again"
    paper.build(stored[0], again)
    assert content(again) == first
    paper.build(tmp_path / "nothing", again)  # without results their tables and figures are deleted
    left = content(again)
    stale = r"main|paths|quantities|recall|controls|equal_gain|correlations|settings|in_distribution\.|\.pdf|\.png"
    assert not [f for f in left if re.search(stale, f) and f != "report.pdf" and "published" not in f]
    assert (
        left["tables/published_unseen.csv"] == first["tables/published_unseen.csv"]
        and left["report.pdf"] != first["report.pdf"]
    )
    assert set(pd.read_csv(again / "tables/claims.csv")["verdict"]) == {"not tested"}
    assert json.loads(left["tables/chapters.json"]) == {}
    assert set(json.loads(left["tables/sources.json"])["absent"]) == {"main", "controls", "in_distribution"} and set(
        json.loads(left["tables/numbers.json"])["absent"]
    ) == {"speed"}


def test_command_does_not_change_notebooks_or_report_source(tmp_path):
    sources = [*PAGES.glob("*.ipynb"), ROOT / "paper/report.typ"]
    assert len(sources) == 6
    before = [p.read_bytes() for p in sources]
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "paper/build.py"),
            "--results",
            str(tmp_path / "none"),
            "--out",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
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
    with paper.environment(PAGES, EGA_RESULTS=results, EGA_PAPER=tmp_path):
        paper.run_notebook(PAGES / "05_numbers.ipynb")
    numbers = json.loads((tmp_path / "tables/chapters.json").read_text())
    runs = pd.read_parquet(results / "pairs.parquet", columns=["set", "kind", "seed"]).drop_duplicates()
    assert set(numbers) == {"pairs"} and numbers["pairs"]["partitions"] == (runs.kind == "document").sum()
    (results / clusters.name).write_text(clusters.read_text().replace("0.", "1.", 1))
    with paper.environment(PAGES, EGA_RESULTS=results, EGA_PAPER=tmp_path):
        paper.run_notebook(PAGES / "05_numbers.ipynb")
    assert json.loads((tmp_path / "tables/chapters.json").read_text()) == {}


def test_speed_is_median_ratio_within_rounds(names, tmp_path):
    from contenders import COLUMNS

    times = {"slow": (4.0, 6.0, 8.0), "ega": (1.0, 2.0, 2.0), "floor": (0.5, 1.0, 1.0)}
    rows = [
        {
            "group": "in-batch",
            "contender": c,
            "repeat": i,
            "wall_s": t,
            "cpu_s": t,
            "peak_rss_mb": 1.0,
            "work": 1.0,
            "size": '{"d": 8}',
            "reference": "slow",
            "floor": "floor",
            "status": "ok",
        }
        for c, ts in times.items()
        for i, t in enumerate(ts)
    ]
    about = dict(cpu="c", cores=2, memory_gb=1.0, machine="m", ega="0", date="d")
    pd.DataFrame(rows).reindex(columns=COLUMNS).assign(**about).to_parquet(tmp_path / "speed.parquet")
    t, machine = names["speed_table"](tmp_path / "speed.parquet")
    ega = t.set_index("contender").loc["ega"]
    assert ega.speed == 4 and ega.over_floor == 2 and ega.low == 3.5 and ega.high == 4 and machine == about
    assert names["speed_row"](ega.rename(None).to_frame().T.assign(contender="ega").iloc[0])[1:4] == [
        "ega",
        "4.00 [3.50, 4.00]",
        "2.00",
    ]
    assert names["speed_table"](tmp_path / "none.parquet") == (None, None)


def test_the_paper_s_other_tables_have_published_and_stored_numbers(built, names, stored):
    for name in names["COUNTERPARTS"]:
        csv = pd.read_csv(built / f"tables/{name}.csv", dtype=str, keep_default_na=False)
        want = PUBLISHED[
            (PUBLISHED["artefact"] == f"tab:{name}")
            & PUBLISHED["metric"].isin(["LP", "AR", "rho (percent)", "Recall (printed); is LP"])
            & PUBLISHED["K"].isin(["1", ""])
        ]
        assert sorted(v for c in ("LP", "AR", "rho_printed") for v in csv[c] if v) == sorted(want["value"])
    rho = pd.read_csv(built / "tables/rho_datasets.csv").set_index("benchmark").rho
    row = stored[1]["main"].query("benchmark == 'cub100' and method == 'ega_released' and epoch == 10").iloc[0]
    assert rho["cub100"] == pytest.approx(100 * row.active_ratio, abs=1e-3)
    assert (
        pd.read_csv(built / "tables/lora_rank.csv").query("method == 'LoRA+Triplet r=64'").lp_at_1.isna().all()
    )  # no sweep is stored: a dash, not a number


def test_report_source_contains_no_typed_results():
    "A decimal or a number with thousands that is not a length must come from tables/, not from the source."
    text = (ROOT / "paper/report.typ").read_text()
    assert re.findall(r"(?<![\d.])\d+\.\d+(?!\d|pt|em|in|fr|%)|\d,\d{3}", text) == []
