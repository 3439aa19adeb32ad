"Build of the report: published numbers as printed, ours as stored, the same bytes twice, text for missing results."

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
import pytest

from ega import config as method_config
from ega.arrays import InputError
from ega.experiments import grids, protocols, runs, tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "nbs/paper"
sys.path.insert(0, str(ROOT / "paper"))
import build as paper

sys.path.pop(0)

PUBLISHED = pd.read_csv(ROOT / "data/published.csv", dtype=str, keep_default_na=False)
SIZE, CLASSES = 80, 8

METHODS = grids.GRIDS["full"]["unseen"].methods


def made_up_row(config, query_set):
    "A stored row with made-up outcomes; methods differ by a shift that every benchmark shares."
    m, b = list(method_config.METHODS).index(config.method), list(protocols.BENCHMARKS).index(config.benchmark)
    rng, classes = np.random.default_rng([b, config.split_seed, query_set == "seen"]), np.arange(SIZE) % CLASSES
    shift = 0 if m == 0 else 0.02 * m if query_set == "seen" else 0.04 * (m - 8)
    hit = np.float32(rng.random(SIZE) < 0.5 + shift)
    epochs = config.train.epochs if config.train else 0
    rho = np.float32(0.3 / (1 + np.arange(epochs))) + np.float32(0.01 * m)
    return dict(
        run_id=config.run_id,
        task=config.task,
        protocol="strict",
        benchmark=config.benchmark,
        method=config.method,
        split_seed=config.split_seed,
        seed=config.seed,
        query_set=query_set,
        n=SIZE,
        gallery=SIZE,
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
        seconds=1.0,
        version="0.0",
        machine="none",
        config=json.dumps(asdict(config), sort_keys=True),
        query=np.arange(SIZE, dtype=np.int32),
        query_class=classes.astype(np.int32),
        neighbour=np.zeros(SIZE, np.int32),
        hit=hit,
        ivf_hit=hit,
        ivf_ar=np.full(SIZE, 0.9, np.float32),
    )


def store(folder, experiment, configs, change=lambda f: f):
    sets = ("seen",) if experiment == "in_distribution" else ("seen", "unseen")
    frame = change(pd.DataFrame([made_up_row(c, q) for c in configs for q in sets]))
    grids.ResultStore(folder, experiment).write(frame)
    return frame


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    frames = {e: store(folder, e, list(grids.GRIDS["quick"][e].configs())) for e in ("unseen", "in_distribution")}
    long = list(grids.GRIDS["full"]["long"].configs())
    return folder, frames | {"long": store(folder, "long", long)}


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
    csv = pd.read_csv(built / f"tables/{name}_published.csv", dtype=str, keep_default_na=False).set_index(
        ["dataset", "method"]
    )
    for r in want.itertuples():
        assert (
            csv.loc[(r.dataset, r.method), r.metric.lower()],
            csv.loc[(r.dataset, r.method), f"{r.metric.lower()}_std"],
        ) == (r.value, r.std)
    assert (csv[["lp", "ar"]] != "").sum().sum() == len(want)


def test_published_numbers_are_in_the_row_of_their_method(built):
    t = table(built / "tables/unseen.md")
    lp = PUBLISHED[(PUBLISHED["artefact"] == "tab:ood_summary") & (PUBLISHED["metric"] == "LP")]
    for r in lp.itertuples():
        (cell,) = t.loc[t["the paper's name"] == r.method, f"paper: {r.dataset}"]
        assert cell == r.value + (f" ± {r.std}" if r.std else "")
    assert t.loc[t["the paper's name"] == "EGA", "method"].tolist() == [
        "EGA (released)"
    ]  # the published tables were made with this form


def test_training_on_queries_is_marked(built):
    t = table(built / "tables/in_distribution.md").set_index("the paper's name")
    assert (
        t.loc["ICon", "paper: CIFAR-100"].endswith("†")
        and not t.loc["EGA", "paper: CIFAR-100"].endswith("†")
        and not t.loc["ICon", "paper: ImageNet-1K"].endswith("†")
    )


@pytest.mark.parametrize("name", ["unseen", "in_distribution", "unseen_recall"])
def test_our_and_published_numbers_share_no_column(built, name):
    ours, theirs = (
        {c.split(": ")[1] for c in table(built / f"tables/{name}.md") if c.startswith(w)} for w in ("ours: ", "paper: ")
    )
    assert ours and theirs and not ours & theirs
    assert ours <= {b.replace(">", " → ") for b in protocols.BENCHMARKS} | {"mean", "worst"}
    assert theirs <= set(PUBLISHED["dataset"])


def test_our_numbers_equal_stored_outcomes(built, stored):
    t = pd.read_csv(built / "tables/unseen.csv").set_index(["benchmark", "method"])
    rows = stored[1]["unseen"].query("query_set == 'unseen'").set_index(["benchmark", "method"])["lp_at_1"] * 100
    for (b, m), v in rows.items():
        assert t.loc[(b, m), "lp_at_1"] == pytest.approx(v, abs=1e-3) and t.loc[(b, m), "diff"] == pytest.approx(
            v - rows[b, "frozen"], abs=1e-3
        )
    change = (rows - rows.xs("frozen", level=1).reindex(rows.index.get_level_values(0)).to_numpy()).unstack()
    for m in METHODS:
        assert t.loc[("mean", m), "diff"] == pytest.approx(change[m].mean(), abs=1e-3) and t.loc[
            ("worst", m), "diff"
        ] == pytest.approx(change[m].min(), abs=1e-3)


def test_sources_json_describes_stored_runs(built):
    source = json.loads((built / "tables/sources.json").read_text())["source"]
    assert [source[e]["profile"] for e in ("unseen", "in_distribution")] == ["quick", "quick"]
    assert [(source[e]["hidden"], source[e]["epochs"]) for e in ("unseen", "long")] == [("512", "10"), ("2048", "150")]
    assert source["unseen"]["queries"] == SIZE * 2 * 5 and source["unseen"]["runs"] == 13 * 5


def test_profile_name_of_unfinished_grid(stored):
    rows = stored[1]["unseen"].assign(experiment="unseen")
    assert tables.name_of_stored_grid(rows[rows["method"] != "lda"]) == "60 of 65 runs of quick"


def test_ranking_compares_trained_methods_only(built):
    t = pd.read_csv(built / "tables/ranking.csv")
    assert set(t["method"]) == {m for m in METHODS if method_config.METHODS[m].loss} and set(t["benchmark"]) == {
        "cub100"
    }
    from scipy.stats import spearmanr

    want = spearmanr(t["diff_short"], t["diff_long"]).statistic
    assert json.loads((built / "tables/numbers.json").read_text())["rank_correlation"]["cub100"] == pytest.approx(
        want, abs=1e-3
    )


def test_figure_titles_count_intervals(built):
    figures, t = (
        json.loads((built / "figures/figures.json").read_text()),
        pd.read_csv(built / "tables/unseen.csv").query("benchmark == 'mean' and method != 'frozen'"),
    )
    up, down = int((t["diff_low"] > 0).sum()), int((t["diff_high"] < 0).sum())
    assert (
        figures["unseen"]["title"]
        == f"Mean change on unseen classes: {up} of 12 adapters above frozen, {down} below, {12 - up - down} undecided"
        and up
        and down
    )
    seen = (
        pd.read_csv(built / "tables/seen.csv").query("benchmark == 'mean' and method != 'frozen'").set_index("method")
    )
    gain = seen.index[seen["diff_low"] > 0]
    lose = t.set_index("method").loc[gain, "diff_high"] < 0
    assert figures["plane"]["title"].startswith(
        f"{len(gain)} of 12 adapters gain on seen classes; {int(lose.sum())} of these lose on unseen classes"
    )


def test_figures_embed_fonts_and_have_no_date(built):
    for name in ("plane", "unseen", "mechanism"):
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
    assert not [
        f
        for f in left
        if re.search(r"unseen\.|seen\.|ranking|settings|in_distribution\.|\.pdf|\.png", f)
        and f != "report.pdf"
        and "published" not in f
    ]
    assert (
        left["tables/unseen_published.csv"] == first["tables/unseen_published.csv"]
        and left["report.pdf"] != first["report.pdf"]
    )
    assert set(pd.read_csv(again / "tables/claims.csv")["verdict"]) == {"not tested"}
    assert set(json.loads(left["tables/sources.json"])["absent"]) == {"unseen", "in_distribution", "long"} and set(
        json.loads(left["tables/numbers.json"])["absent"]
    ) == {"speed"}


def test_command_does_not_change_notebooks_or_report_source(tmp_path):
    sources = [*PAGES.glob("*.ipynb"), ROOT / "paper/report.typ"]
    assert len(sources) == 5
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
        f.loc[f["method"] == "ega_paper", "nlist"] = 50
        return f

    configs = [runs.build_config("unseen", "cub100", m, epochs=1) for m in ("frozen", "ega_paper")]
    store(tmp_path / "r", "unseen", configs, other_index)
    with pytest.raises(InputError, match="nlist"):
        paper.build(tmp_path / "r", tmp_path / "out")


def test_tables_of_other_results_raise(stored, built, tmp_path):
    for folder in (tmp_path / "empty", built):
        some = stored[1]["unseen"].query("method in ('frozen', 'ega_paper')")
        grids.ResultStore(tmp_path / "r", "unseen").write(some)
        for name in ("02_verdicts", "03_figures"):
            with (
                paper.environment(PAGES, EGA_RESULTS=tmp_path / "r", EGA_PAPER=folder),
                pytest.raises(InputError, match="tables"),
            ):
                paper.run_notebook(PAGES / f"{name}.ipynb")


def test_build_with_one_benchmark_and_few_methods(tmp_path):
    store(
        tmp_path / "r",
        "unseen",
        [runs.build_config("unseen", "cub100", m, epochs=1) for m in ("frozen", "ega_paper", "wccn")],
    )
    paper.build(tmp_path / "r", tmp_path / "out")
    verdicts = pd.read_csv(tmp_path / "out/tables/claims.csv").set_index("claim")["verdict"]
    assert set(verdicts) == {"not tested"} and (tmp_path / "out/figures/plane.pdf").exists()


def changes(**by_method):
    "A tidy table over three benchmarks, its mean and worst: method=(low, high)."
    rows = [
        dict(benchmark=b, method=m, lp_at_1=50 + (l + h) / 2, diff=(l + h) / 2, diff_low=l, diff_high=h, rho=0.1)
        for b in ("a", "b", "c", "mean", "worst")
        for m, (l, h) in by_method.items()
    ]
    return pd.DataFrame(rows)


def test_verdict_rules(names):
    ega = dict(ega_paper=(1, 2), ega_released=(1, 2))
    assert names["claim_preserves"](changes(**ega))[0] == "held"
    assert names["claim_preserves"](changes(ega_paper=(-1, 1), ega_released=(-1, 1)))[0] == "held"
    assert names["claim_preserves"](changes(ega_paper=(-3, -2), ega_released=(-3, -2)))[0] == "did not hold"
    assert names["claim_preserves"](changes(ega_paper=(1, 2), ega_released=(-3, -2)))[0] == "undecided"
    assert (
        names["claim_in_distribution"](changes(**ega))[0] == "held"
        and names["claim_in_distribution"](changes(ega_paper=(-1, 1), ega_released=(-1, 1)))[0] == "did not hold"
    )
    rest = dict(icon_self_included=(-6, -5), nca_half_repulsion=(-6, -5), supcon=(-6, -5))
    assert names["claim_local"](changes(ega_released=(-4, -3), **rest))[0] == "held"
    assert names["claim_local"](changes(ega_released=(-5.5, -4), **rest))[0] == "undecided"  # intervals overlap
    assert names["claim_local"](changes(ega_released=(-8, -7), **rest))[0] == "did not hold"
    pair = dict(ega_preserve=(0, 1), supcon_preserve=(0, 1), supcon=(-3, -2))
    assert (
        names["claim_preserve"](changes(ega_released=(-3, -2), **pair))[0] == "held"
        and names["claim_preserve"](changes(ega_released=(-3, 0.5), **pair))[0] == "undecided"
    )


def test_sparsity_claim_needs_negative_correlation(names):
    t = changes(ega_paper=(0, 0), ega_released=(0, 0), lora_triplet=(0, 0))
    for sign, verdict in ((-1, "held"), (1, "did not hold")):
        assert names["claim_sparsity"](t.assign(rho=np.arange(len(t)), diff=sign * np.arange(len(t))))[0] == verdict
    assert names["claim_sparsity"](t.assign(rho=np.nan))[0] == "not tested"


def test_speed_is_median_ratio_within_rounds(names, tmp_path):
    from ega.experiments.benchmarks import COLUMNS

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


def test_rival_changes_and_margin_correlation(names, tmp_path):
    rows = store(tmp_path, "rivals", list(grids.GRIDS["full"]["rivals"].configs()))
    t = names["rival_changes"](rows).set_index("method")
    wide = rows[rows["query_set"] == "unseen"].pivot(index="method", columns="benchmark", values="lp_at_1")
    change = 100 * (wide - wide.loc["frozen"])
    assert set(t.index) == set(method_config.BASELINES) and all(
        t.loc[m, "unseen"] == pytest.approx(change.loc[m].mean(), abs=1e-3)
        and t.loc[m, "worst"] == pytest.approx(change.loc[m].min(), abs=1e-3)
        for m in t.index
    )
    made = pd.DataFrame(
        {
            "method": [f"ega_released margin={v}" for v in (0.1, 0.2, 0.3)] + ["ega_released hidden=8"],
            "query_set": "unseen",
            "benchmark": "cub100",
            "active_ratio_final": [0.1, 0.2, 0.3, 0.4],
            "lp_at_1": [0.9, 0.8, 0.7, 1.0],
        }
    )
    assert names["margin_correlation"](made) == {"cub100": -1.0}


def test_budgets_use_the_chosen_strength(names, stored):
    grid = stored[1]["unseen"]
    two = grid[grid["benchmark"].isin(["cub100", "clinc150"])]
    whole = two[two["method"] == "wccn"].assign(method="wccn shrinkage=0.3", strength=1.0)
    half = whole.assign(strength=0.5, hit=[0 * h for h in whole["hit"]], lp_at_1=0.0)
    tuned = pd.concat([two[two["method"] == "frozen"].assign(strength=0.0), whole, half])
    chosen = pd.DataFrame({"benchmark": ["cub100", "clinc150"], "method": "wccn shrinkage=0.3", "strength": 1.0})
    (one,) = names["budgets"](tuned, chosen, grid).itertuples()
    assert (
        one.method == "wccn"
        and one.unseen == pytest.approx(one.unseen_once)
        and one.seen == pytest.approx(one.seen_once)
        and one.unseen_low <= one.unseen <= one.unseen_high
    )
    (other,) = names["budgets"](tuned, chosen.assign(strength=0.5), grid).itertuples()
    assert other.unseen < other.unseen_once - 1


def test_nine_tables_have_published_and_stored_numbers(built, names):
    for name in names["COUNTERPARTS"]:
        csv = pd.read_csv(built / f"tables/{name}.csv", dtype=str, keep_default_na=False)
        want = PUBLISHED[
            (PUBLISHED["artefact"] == f"tab:{name}")
            & PUBLISHED["metric"].isin(["LP", "AR", "rho (percent)", "Recall (printed); is LP"])
            & PUBLISHED["K"].isin(["1", ""])
        ]
        assert sorted(v for c in ("LP", "AR", "rho_printed") for v in csv[c] if v) == sorted(want["value"])
    infonce = pd.read_csv(built / "tables/ega_infonce.csv").set_index(["benchmark", "method"])
    ours = pd.read_csv(built / "tables/unseen.csv").set_index(["benchmark", "method"])
    assert infonce.loc[("cub100", "EGAMLP+InfoNCE"), "lp_at_1"] == pytest.approx(
        ours.loc[("cub100", "supcon"), "lp_at_1"], abs=1e-3
    )
    assert (
        pd.read_csv(built / "tables/lora_rank.csv").query("method == 'LoRA+Triplet r=64'").lp_at_1.isna().all()
    )  # no sweep is stored: a dash, not a number


def test_number_formats():
    points, span, latex = tables.format_percentage_points, tables.format_interval, tables.latex_table
    assert [points(v, True) for v in (1.26, -0.04, 0.04, np.nan, -12.35)] == [
        "+1.3",
        "0.0",
        "0.0",
        "–",
        "−12.3",
    ]  # -12.35 is just above in binary
    assert span(-1, np.nan) == "" and span(-1, 1, True) == "[−1.0,\N{NO-BREAK SPACE}+1.0]"
    assert r"50\% \& a\_b $\to$ $-$1 $\pm$ 2$\dagger$" in latex(["50% & a_b → −1 ± 2†"], []) and "[−1.0,~+1.0]".replace(
        "−", "$-$"
    ) in latex([span(-1, 1, True)], [])


def test_report_source_contains_no_typed_results():
    "A decimal or a number with thousands that is not a length must come from tables/, not from the source."
    text = (ROOT / "paper/report.typ").read_text().replace("[0.0]", "")  # how `points` writes zero
    assert re.findall(r"(?<![\d.])\d+\.\d+(?!\d|pt|em|in|fr|%)|\d,\d{3}", text) == []
