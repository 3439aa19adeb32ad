"The report: what it counts, what it says, and that a page is one harmless file."

import re

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from ega.arrays import InputError, normalize
from ega.datasets import read_csv_source
from ega.estimator import EmbeddingAdapter
from ega.metrics import loo_lp_at_k
from ega.report import (
    RankStats,
    collapse_warning,
    compare_spaces,
    effective_rank_stats,
    reading_notes,
    row_groups,
    summary_sentence,
    write_comparison,
    write_report,
)


def made(n=240, classes=12, seed=0, noise=1.0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return normalize(rng.normal(size=(classes, 16))[y] + noise * rng.normal(size=(n, 16))), y


@pytest.fixture(scope="module")
def both():
    x, y = made()
    z = normalize(
        x + 0.5 * np.eye(12, 16, dtype=np.float32)[y] * (y < 6)[:, None]
    )  # the first six classes are pulled apart
    y = np.r_[y[:230], [-1] * 10]
    return x, z, y


@pytest.fixture(scope="module")
def c(both):
    return compare_spaces(*both, seen=range(6), fitted=np.flatnonzero((both[2] >= 0) & (both[2] < 6))[:40])


def test_counts_and_means_are_those_of_leave_one_out(both, c):
    x, z, y = both
    rows = np.flatnonzero(y >= 0)
    before, after = (loo_lp_at_k(v[rows], y[rows]) for v in (x, z))
    kind = row_groups(y, range(6), np.flatnonzero((y >= 0) & (y < 6))[:40])[rows]
    assert dict(zip(c.kinds.kind, c.kinds.n)) == {
        "trained on": 40,
        "seen": (y[rows] < 6).sum() - 40,
        "unseen": (y[rows] >= 6).sum(),
    }
    for r in c.kinds.itertuples():
        m = kind == r.kind
        assert (
            np.isclose(r.before, 100 * before[m].mean())
            and np.isclose(r.after, 100 * after[m].mean())
            and r.low <= r.change <= r.high
        )
        assert (r.won, r.lost, r.same) == (
            ((after - before)[m] > 0.5).sum(),
            ((before - after)[m] > 0.5).sum(),
            (before == after)[m].sum(),
        )
    assert (
        len(c.rows) == len(rows)
        and c.classes.n.sum() == len(rows)
        and np.isclose(c.unlabelled, np.linalg.norm(z[y < 0] - x[y < 0], axis=1).mean())
    )


def test_the_curve_begins_frozen_and_ends_adapted(both, c):
    assert np.allclose(c.curve.loc[0.0, c.kinds.kind], c.kinds.before) and np.allclose(
        c.curve.loc[1.0, c.kinds.kind], c.kinds.after
    )


def test_a_map_to_another_dimension_has_no_curve_and_no_distance(both, tmp_path):
    x, z, y = both
    small = compare_spaces(x, normalize(z[:, :9]), y, seen=range(6))
    assert small.curve is None and small.kinds.moved.isna().all() and "Which rows" in " ".join(reading_notes(small))
    assert "input" not in re.sub(
        "<style>.*?</style>", "", write_comparison(small, tmp_path / "r.html").read_text(), flags=re.S
    )


def test_a_large_collection_is_drawn_and_says_so(both):
    x, z, y = both
    few = compare_spaces(x, z, y, seen=range(6), max_rows=120)
    assert (
        few.sampled == 120
        and "120 of 240 rows were drawn" in " ".join(reading_notes(few))
        and set(few.rows.row) <= set(range(240))
        and (y[few.rows.row] == few.rows.label).all()
    )
    assert few.rows.equals(compare_spaces(x, z, y, seen=range(6), max_rows=120).rows)


def test_what_cannot_be_known_is_said(both):
    x, z, y = both
    only = compare_spaces(x, z, y, seen=range(12))
    assert "no row of an unseen class" in " ".join(reading_notes(only)) and "unseen" not in summary_sentence(only)


def test_gain_and_loss_need_an_interval_on_one_side(c):
    k = c.kinds.head(1).assign(change=2.0, low=0.5, high=3.0)
    assert "gain 2.0 points [+0.5, +3.0]" in summary_sentence(c._replace(kinds=k)) and "lose 2.0" in summary_sentence(
        c._replace(kinds=k.assign(change=-2.0, low=-3.0, high=-1.0))
    )
    assert "change by +2.0" in summary_sentence(c._replace(kinds=k.assign(low=-0.1)))


def test_collapse_is_seen_and_a_cone_is_not_one():
    x, _ = made(noise=2.0)
    cone = normalize(0.1 * x + np.eye(16, dtype=np.float32)[0])  # all near one point, and as many directions as before
    flat = normalize(x[:, :2])
    assert (
        effective_rank_stats(cone).cosine > 0.9
        and collapse_warning(effective_rank_stats(x), effective_rank_stats(cone)) == ""
    )
    assert (
        effective_rank_stats(flat).rank < 2.1
        and collapse_warning(effective_rank_stats(x), RankStats(0, 0.19 * effective_rank_stats(x).rank))
        and not collapse_warning(effective_rank_stats(x), RankStats(0, 0.21 * effective_rank_stats(x).rank))
    )


@pytest.mark.parametrize("ending", [".html", ".md"])
def test_names_are_text_whatever_they_are(both, c, tmp_path, ending):
    bad = "<script>alert(1)</script>|</style>"
    page = write_comparison(
        c, tmp_path / f"r{ending}", names=[bad] * 12, ids=[f'{bad}"{i}' for i in range(240)], title=bad, decision=bad
    ).read_text()
    if ending == ".html":
        assert "<script>alert" not in page and page.count("<script>") == 1 and '"<' not in page.replace('"<svg', "")
    else:
        assert "script>\\|<" in page


def test_texts_and_pictures_come_from_their_source(both, c, tmp_path):
    from PIL import Image

    words = tmp_path / "w.csv"
    words.write_text("text,label\n" + "\n".join(f"row & {i},a" for i in range(240)))
    page = write_comparison(c, tmp_path / "t.html", source=read_csv_source(words)).read_text()
    assert "row &amp; " in page and "row & " not in page
    for i in range(240):
        Image.new("RGB", (300, 200), (i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "p.csv").write_text("image,label\n" + "\n".join(f"{i}.png,a" for i in range(240)))
    page = write_comparison(c, tmp_path / "p.html", source=read_csv_source(tmp_path / "p.csv"), examples=3).read_text()
    shown = int(
        ((c.rows.after - c.rows.before) > 0.5).sum().clip(max=3)
        + ((c.rows.before - c.rows.after) > 0.5).sum().clip(max=3)
    )
    assert page.count("data:image/jpeg;base64") == 11 * shown and not re.search(r'(src|href)="(?!data:|#)', page)


def test_refusals_leave_nothing_behind(both, c, tmp_path):
    x, z, y = both
    words = tmp_path / "w.csv"
    words.write_text("text\na\nb\n")
    for call, words in (
        (lambda: write_comparison(c, tmp_path / "r.pdf"), "an .html or .md file"),
        (lambda: write_comparison(c, tmp_path / "r.html", source=read_csv_source(words)), "the 240 rows"),
        (lambda: compare_spaces(x, z[:9], y, seen=()), "the same rows"),
        (lambda: compare_spaces(x[:9], z[:9], y[:9], seen=()), "at least 14 labelled rows"),
        (lambda: compare_spaces(x, z, y, seen=(), fitted=[0]), "classes are not among the seen"),
        (lambda: compare_spaces(2 * x, z, y, seen=()), "unit rows"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            call()
    assert not list(tmp_path.glob("r.*"))


def test_an_estimator_that_was_not_fitted_writes_no_page(both, tmp_path):
    with pytest.raises(NotFittedError, match="not fitted"):
        write_report(EmbeddingAdapter(), both[0], both[2], tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_the_command_tells_own_rows_from_others_and_new_classes(tmp_path, capsys):
    from ega.cli import main

    x, y = made(n=600, classes=30)
    known = y < 20
    for name, m in (("own", known), ("all", y >= 0)):
        np.save(tmp_path / f"{name}.npy", x[m])
        np.save(tmp_path / f"{name}_y.npy", y[m])

    def path(name):
        return str(tmp_path / name)

    assert main(["fit", path("own.npy"), path("own_y.npy"), "-o", path("a"), "--method", "wccn", "--quiet"]) == 0
    assert (
        main(["report", path("a"), path("all.npy"), path("all_y.npy"), "-o", path("r.html")]) == 0
        and "unseen classes" in capsys.readouterr().out
    )
    assert (
        main(["report", path("a"), path("own.npy"), path("own_y.npy"), "-o", path("own.md"), "--json"]) == 0
        and '"trained on"' in capsys.readouterr().out
    )
    assert (
        re.search("class=verdict>(frozen|wccn at)", (tmp_path / "r.html").read_text())
        and "no row of an unseen class" in (tmp_path / "own.md").read_text()
    )
    assert (
        main(["report", path("a"), path("all.npy"), path("all_y.npy"), "-o", path("r.txt")]) == 2
        and not (tmp_path / "r.txt").exists()
    )
