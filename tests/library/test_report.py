"The report: the digits of `ega evaluate`, its counts and sentences, one file in which all data are escaped."

import html
import json
import re

import cranfield
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

from ega.data.arrays import InputError, normalize
from ega.data.datasets import read_csv_source
from ega.deploy.report import (
    _colour,
    collapse_warning,
    compare_spaces,
    cosine_and_rank,
    write_comparison,
    write_pair_report,
    write_report,
)
from ega.estimator import EmbeddingAdapter
from ega.measure.evaluation import evaluate, evaluate_embeddings, summary_sentence
from ega.measure.metrics import loo_lp_at_k
from ega.measure.search import knn_among_rows
from ega.method.adapters import interpolate
from ega.pairs import evaluate_pairs


def clusters(n=240, classes=12, seed=0, noise=1.0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return normalize(rng.normal(size=(classes, 16))[y] + noise * rng.normal(size=(n, 16))), y


@pytest.fixture(scope="module")
def spaces():
    x, y = clusters()
    z = normalize(x + 0.5 * np.eye(12, 16, dtype=np.float32)[y] * (y < 6)[:, None])  # six classes are pulled apart
    y = np.r_[y[:230], [-1] * 10]
    return x, z, y


def groups(y):
    "Rows of seen classes, and forty of them that were trained on."
    seen = y < 6
    return seen, np.isin(np.arange(len(y)), np.flatnonzero((y >= 0) & seen)[:40])


@pytest.fixture(scope="module")
def c(spaces):
    return compare_spaces(*spaces, *groups(spaces[2]))


def shown(line):
    "The columns of a line of the table, as every output prints them."
    change = f"{line.change:+.1f} [{line.low:+.1f}, {line.high:+.1f}]"
    return [line.group, f"{line.n_queries:,}", f"{line.frozen:.1f}", f"{line.adapted:.1f}", change]


def tables_of(page):
    "The texts of the tables of an HTML page, by title."
    found = {}
    for title, body in re.findall(r'<table[^>]*aria-label="([^"]*)">(.*?)</table>', page, re.S):
        lines = re.findall(r"<tr>(.*?)</tr>", body, re.S)
        found[title] = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.S) for line in lines]
    return {html.unescape(title): lines for title, lines in found.items()}


def test_python_shell_json_and_page_give_the_same_digits(tmp_path, capsys):
    "evaluate, `ega evaluate --json`, `ega report --json` and the tables of the page."
    from ega.cli import main

    x, y = clusters(n=600, classes=30, noise=1.6)
    fit = (y < 20) & (np.arange(600) % 60 < 30)
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x[fit], y[fit])
    e.save(tmp_path / "a")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    files = [str(tmp_path / name) for name in ("a", "x.npy", "y.npy")]

    def run(*command):
        assert main([*command]) == 0
        return capsys.readouterr().out

    table = evaluate(e, x, y)
    assert table.groupby("gallery").size().to_dict() == {"mixed": 3, "seen": 2, "unseen": 1}
    records = json.loads(table.to_json(orient="records", double_precision=15))
    assert json.loads(run("evaluate", *files, "--json")) == records
    page_path = str(tmp_path / "r.html")
    report = json.loads(run("report", *files, "-o", page_path, "--json"))
    assert report["evaluation"] == records
    assert all(record["frozen"] == table.frozen[i] for i, record in enumerate(records))  # no digit is lost

    page = (tmp_path / "r.html").read_text()
    headline, own, *_ = tables_of(page).values()
    mixed = [shown(line) for line in table.itertuples() if line.gallery == "mixed"]
    assert [line[:5] for line in headline[1:]] == mixed
    assert [line[:5] for line in own[1:]] == [shown(line) for line in table.itertuples() if line.gallery != "mixed"]
    assert summary_sentence(table) in page.replace("\u00a0", " ")


def test_drawn_queries_are_the_same_in_the_report(spaces, tmp_path):
    x, z, y = spaces
    few = compare_spaces(x, z, y, *groups(y), max_queries=25, random_state=3)
    table = evaluate_embeddings(x, z, y, *groups(y), max_queries=25, random_state=3)
    pd.testing.assert_frame_equal(few.evaluation, table)
    assert len(few.queries) == 75 and (y[few.queries.row] == few.queries.label).all()
    page = write_comparison(few, tmp_path / "r.html").read_text()
    numbers = [line[1] for lines in list(tables_of(page).values())[:2] for line in lines[1:]]
    is_mixed = table.gallery == "mixed"
    assert numbers == [f"25 of {n}" for n in [*table[is_mixed].n_rows, *table[~is_mixed].n_rows]]
    assert f"Queries were drawn at random: 25 of {(y >= 6).sum()} unseen" in page and "Every labelled row" not in page


def test_outcomes_are_counted_in_the_mixed_gallery(spaces, c):
    x, z, y = spaces
    rows = np.flatnonzero(y >= 0)
    before, after = (dict(zip(rows, loo_lp_at_k(v[rows], y[rows]))) for v in (x, z))
    seen, trained_on = groups(y)
    members = {"unseen": ~seen & (y >= 0), "seen": seen & ~trained_on & (y >= 0), "trained on": trained_on}
    assert c.outcome_counts.group.tolist() == list(members)
    for line in c.outcome_counts.itertuples():
        m = np.flatnonzero(members[line.group])
        change = np.array([after[row] - before[row] for row in m])
        counts = ((change > 0.5).sum(), (change < -0.5).sum(), (np.abs(change) <= 0.5).sum())
        assert (line.gained, line.lost, line.unchanged) == counts
        assert np.isclose(line.displacement, np.linalg.norm(z[m] - x[m], axis=1).mean())
    assert len(c.queries) == len(rows) and c.classes.n.sum() == len(rows)
    assert np.isclose(c.unlabelled_displacement, np.linalg.norm(z[y < 0] - x[y < 0], axis=1).mean())


def test_examples_are_captured_lost_and_gained_queries_with_their_nearest_neighbours(spaces, c):
    x, z, y = spaces
    rows = np.flatnonzero(y >= 0)
    assert set(c.examples.outcome) == {"captured", "lost", "gained"} and c.examples.row.is_unique
    change = dict(zip(c.queries.row, c.queries.adapted - c.queries.frozen))
    for q in c.examples.itertuples():
        seen_first = [y[neighbours[0]] < 6 for neighbours in (q.frozen_neighbours, q.adapted_neighbours)]
        is_captured = q.group == "unseen" and seen_first == [False, True]
        assert is_captured == (q.outcome == "captured")
        if not is_captured:
            assert change[q.row] < -0.5 if q.outcome == "lost" else change[q.row] > 0.5
        for v, neighbours in ((x, q.frozen_neighbours), (z, q.adapted_neighbours)):
            assert neighbours.tolist() == rows[knn_among_rows(v, np.array([q.row]), rows, 3).I[0]].tolist()
    for _, q in c.examples.groupby("outcome"):
        unseen = (q.group == "unseen").to_numpy()
        assert (np.diff(unseen.astype(int)) <= 0).all()  # unseen queries first
        first = q[unseen].label.iloc[: q[unseen].label.nunique()]
        assert first.is_unique  # of as many classes as there are


def test_curve_between_its_ends_is_the_evaluation_of_the_mixture(spaces, c):
    x, z, y = spaces
    half = evaluate_embeddings(x, interpolate(x, z, 0.5), y, *groups(y))
    got = c.strength_curve[c.strength_curve.strength == 0.5].drop(columns="strength")
    pd.testing.assert_frame_equal(got.reset_index(drop=True), half.iloc[:3])  # not the rows that were trained on


def test_adapter_to_another_width_has_no_curve_and_no_displacement(spaces, tmp_path):
    x, z, y = spaces
    small = compare_spaces(x, normalize(z[:, :9]), y, *groups(y))
    assert small.strength_curve is None and small.outcome_counts.displacement.isna().all()
    page = write_comparison(small, tmp_path / "r.html").read_text()
    assert "share of this adapter" not in page and "–" in page


def test_missing_unseen_classes_are_noted(spaces, tmp_path):
    x, z, y = spaces
    only = compare_spaces(x, z, y, y < 12, groups(y)[1])
    page = write_comparison(only, tmp_path / "r.html").read_text()
    assert "no query of an unseen class" in page and "Mixed gallery" not in page
    assert "Seen gallery: each query is searched among all 230 labelled rows" in page and "Own gallery" not in page


def test_collapse_warning_depends_on_rank_not_on_mean_cosine():
    x, _ = clusters(noise=2.0)
    cone = normalize(0.1 * x + np.eye(16, dtype=np.float32)[0])  # all near one point, with as many directions as before
    (_, frozen), (cosine, near), (_, flat) = map(cosine_and_rank, (x, cone, normalize(x[:, :2])))
    assert cosine > 0.9 and collapse_warning(frozen, near) == "" and flat < 2.1
    for share, warns in ((0.19, True), (0.21, False)):
        assert bool(collapse_warning(frozen, share * frozen)) == warns


@pytest.mark.parametrize("ending", [".html", ".md"])
def test_names_are_escaped(spaces, c, tmp_path, ending):
    bad = "<script>alert(1)</script>|</style>"
    names = dict(class_names=[bad] * 12, ids=[f'{bad}"{i}' for i in range(240)], title=bad, decision=bad)
    page = write_comparison(c, tmp_path / f"r{ending}", **names).read_text()
    if ending == ".html":
        assert "<script" not in page and '"<' not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    else:
        assert "script>\\|<" in page


def test_texts_and_pictures_come_from_source(spaces, c, tmp_path):
    from PIL import Image

    texts = tmp_path / "w.csv"
    texts.write_text("text,label\n" + "\n".join(f"row & {i},a" for i in range(240)))
    page = write_comparison(c, tmp_path / "t.html", source=read_csv_source(texts)).read_text()
    assert "row &amp; " in page and "row & " not in page
    for i in range(240):
        Image.new("RGB", (300, 200), (i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "p.csv").write_text("image,label\n" + "\n".join(f"{i}.png,a" for i in range(240)))
    page = write_comparison(c, tmp_path / "p.html", source=read_csv_source(tmp_path / "p.csv")).read_text()
    assert page.count("data:image/jpeg;base64") == 7 * len(c.examples)  # the query and three neighbours in each space
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_wrong_input_leaves_no_file(spaces, c, tmp_path):
    x, z, y = spaces
    two_texts = tmp_path / "w.csv"
    two_texts.write_text("text\na\nb\n")
    fitted = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, y)
    for call, error in (
        (lambda: write_comparison(c, tmp_path / "r.pdf"), InputError),
        (lambda: write_comparison(c, tmp_path / "r.html", source=read_csv_source(two_texts)), InputError),
        (lambda: write_report(fitted, x[:9], y[:9], tmp_path / "r.md"), InputError),
        (lambda: write_report(EmbeddingAdapter(), x, y, tmp_path / "r.html"), NotFittedError),
    ):
        with pytest.raises(error):
            call()
    assert not list(tmp_path.glob("r.*"))


def test_a_change_is_coloured_unless_its_printed_interval_contains_0():
    for text, kind in (("+3.5 [+1.5, +5.5]", "gain"), ("-3.5 [-5.5, -1.5]", "loss"), ("+0.4", "gain")):
        assert _colour("change", text) == {"class": kind} and _colour("adapted", text) == {}
    for text in ("-1.8 [-5.0, +0.0]", "+0.0 [+0.0, +0.0]", "+1.0 [-0.2, +2.2]", "-0.0", "–"):
        assert _colour("change", text) == {}


@pytest.mark.parametrize("ending", [".html", ".md"])
def test_the_page_of_pairs_escapes_texts_and_checks_them(tmp_path, ending):
    if ending == ".html":
        pytest.importorskip("jinja2")
        pytest.importorskip("matplotlib")
    adapter, pairs, n = cranfield.fitted("query"), cranfield.SET.pairs, len(cranfield.SET.queries)
    pairs = pairs[np.isin(pairs[:, 0], cranfield.TEST_QUERIES)]
    given = (adapter, cranfield.SET.queries.x, cranfield.XD, pairs)
    names = ["<b>query</b> " + "long " * 99] * n
    path = tmp_path / f"r{ending}"
    table, examples = write_pair_report(*given, path, query_names=names, n_examples=2)
    page = path.read_text()
    assert 4 <= len(examples) == page.count("…") and "row " in page
    assert ("<b>query" not in page) == (ending == ".html")
    pd.testing.assert_frame_equal(table, evaluate_pairs(*given))
    with pytest.raises(InputError, match="query_names"):
        write_pair_report(*given, tmp_path / f"s{ending}", query_names=["a"])
    assert not (tmp_path / f"s{ending}").exists()
