"The report: its counts and sentences, and that the page is one file in which all data are escaped."

import re

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from ega.arrays import InputError, normalize
from ega.datasets import read_csv_source
from ega.estimator import EmbeddingAdapter
from ega.metrics import loo_lp_at_k
from ega.report import (
    EffectiveRankStats,
    assign_seen_unseen_groups,
    caveats,
    collapse_warning,
    compare_spaces,
    effective_rank_stats,
    summary_sentence,
    write_comparison,
    write_report,
)


def clusters(n=240, classes=12, seed=0, noise=1.0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return normalize(rng.normal(size=(classes, 16))[y] + noise * rng.normal(size=(n, 16))), y


@pytest.fixture(scope="module")
def spaces():
    x, y = clusters()
    z = normalize(
        x + 0.5 * np.eye(12, 16, dtype=np.float32)[y] * (y < 6)[:, None]
    )  # the first six classes are pulled apart
    y = np.r_[y[:230], [-1] * 10]
    return x, z, y


@pytest.fixture(scope="module")
def c(spaces):
    return compare_spaces(*spaces, seen=range(6), fitted=np.flatnonzero((spaces[2] >= 0) & (spaces[2] < 6))[:40])


def test_counts_and_means_equal_leave_one_out(spaces, c):
    x, z, y = spaces
    rows = np.flatnonzero(y >= 0)
    before, after = (loo_lp_at_k(v[rows], y[rows]) for v in (x, z))
    groups = assign_seen_unseen_groups(y, range(6), np.flatnonzero((y >= 0) & (y < 6))[:40])[rows]
    assert dict(zip(c.groups.group, c.groups.n)) == {
        "trained on": 40,
        "seen": (y[rows] < 6).sum() - 40,
        "unseen": (y[rows] >= 6).sum(),
    }
    for r in c.groups.itertuples():
        m = groups == r.group
        assert (
            np.isclose(r.frozen, 100 * before[m].mean())
            and np.isclose(r.adapted, 100 * after[m].mean())
            and r.low <= r.change <= r.high
        )
        assert (r.gained, r.lost, r.unchanged) == (
            ((after - before)[m] > 0.5).sum(),
            ((before - after)[m] > 0.5).sum(),
            (before == after)[m].sum(),
        )
    assert (
        len(c.queries) == len(rows)
        and c.classes.n.sum() == len(rows)
        and np.isclose(c.unlabelled_displacement, np.linalg.norm(z[y < 0] - x[y < 0], axis=1).mean())
    )


def test_strength_curve_begins_frozen_and_ends_adapted(spaces, c):
    assert np.allclose(c.strength_curve.loc[0.0, c.groups.group], c.groups.frozen) and np.allclose(
        c.strength_curve.loc[1.0, c.groups.group], c.groups.adapted
    )


def test_adapter_to_another_width_has_no_curve_and_no_displacement(spaces, tmp_path):
    x, z, y = spaces
    small = compare_spaces(x, normalize(z[:, :9]), y, seen=range(6))
    assert (
        small.strength_curve is None
        and small.groups.displacement.isna().all()
        and "Which rows" in " ".join(caveats(small))
    )
    assert "input" not in re.sub(
        "<style>.*?</style>", "", write_comparison(small, tmp_path / "r.html").read_text(), flags=re.S
    )


def test_large_collection_is_sampled(spaces):
    x, z, y = spaces
    few = compare_spaces(x, z, y, seen=range(6), max_rows=120)
    assert (
        few.n_sampled == 120
        and "120 of 240 rows were drawn" in " ".join(caveats(few))
        and set(few.queries.row) <= set(range(240))
        and (y[few.queries.row] == few.queries.label).all()
    )
    assert few.queries.equals(compare_spaces(x, z, y, seen=range(6), max_rows=120).queries)


def test_missing_unseen_classes_are_noted(spaces):
    x, z, y = spaces
    only = compare_spaces(x, z, y, seen=range(12))
    assert "no row of an unseen class" in " ".join(caveats(only)) and "unseen" not in summary_sentence(only)


def test_summary_says_gain_or_loss_only_if_interval_excludes_zero(c):
    k = c.groups.head(1).assign(change=2.0, low=0.5, high=3.0)
    assert "gain 2.0 points [+0.5, +3.0]" in summary_sentence(c._replace(groups=k)) and "lose 2.0" in summary_sentence(
        c._replace(groups=k.assign(change=-2.0, low=-3.0, high=-1.0))
    )
    assert "change by +2.0" in summary_sentence(c._replace(groups=k.assign(low=-0.1)))


def test_collapse_warning_depends_on_rank_not_on_mean_cosine():
    x, _ = clusters(noise=2.0)
    cone = normalize(0.1 * x + np.eye(16, dtype=np.float32)[0])  # all near one point, with as many directions as before
    flat = normalize(x[:, :2])
    assert (
        effective_rank_stats(cone).mean_cosine > 0.9
        and collapse_warning(effective_rank_stats(x), effective_rank_stats(cone)) == ""
    )
    assert (
        effective_rank_stats(flat).effective_rank < 2.1
        and collapse_warning(
            effective_rank_stats(x), EffectiveRankStats(0, 0.19 * effective_rank_stats(x).effective_rank)
        )
        and not collapse_warning(
            effective_rank_stats(x), EffectiveRankStats(0, 0.21 * effective_rank_stats(x).effective_rank)
        )
    )


@pytest.mark.parametrize("ending", [".html", ".md"])
def test_names_are_escaped(spaces, c, tmp_path, ending):
    bad = "<script>alert(1)</script>|</style>"
    page = write_comparison(
        c,
        tmp_path / f"r{ending}",
        class_names=[bad] * 12,
        ids=[f'{bad}"{i}' for i in range(240)],
        title=bad,
        decision=bad,
    ).read_text()
    if ending == ".html":
        assert "<script>alert" not in page and page.count("<script>") == 1 and '"<' not in page.replace('"<svg', "")
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
    page = write_comparison(
        c, tmp_path / "p.html", source=read_csv_source(tmp_path / "p.csv"), n_examples=3
    ).read_text()
    shown = int(
        ((c.queries.adapted - c.queries.frozen) > 0.5).sum().clip(max=3)
        + ((c.queries.frozen - c.queries.adapted) > 0.5).sum().clip(max=3)
    )
    assert page.count("data:image/jpeg;base64") == 11 * shown and not re.search(r'(src|href)="(?!data:|#)', page)


def test_errors_leave_no_file(spaces, c, tmp_path):
    x, z, y = spaces
    two_texts = tmp_path / "w.csv"
    two_texts.write_text("text\na\nb\n")
    for call, message in (
        (lambda: write_comparison(c, tmp_path / "r.pdf"), "an .html or .md file"),
        (lambda: write_comparison(c, tmp_path / "r.html", source=read_csv_source(two_texts)), "the 240 rows"),
        (lambda: compare_spaces(x, z[:9], y, seen=()), "the same rows"),
        (lambda: compare_spaces(x[:9], z[:9], y[:9], seen=()), "at least 14 labelled rows"),
        (lambda: compare_spaces(x, z, y, seen=(), fitted=[0]), "`seen` must contain the class of every row"),
        (lambda: compare_spaces(2 * x, z, y, seen=()), "unit rows"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            call()
    assert not list(tmp_path.glob("r.*"))


def test_unfitted_estimator_writes_no_page(spaces, tmp_path):
    with pytest.raises(NotFittedError, match="not fitted"):
        write_report(EmbeddingAdapter(), spaces[0], spaces[2], tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_command_separates_training_rows_and_new_classes(tmp_path, capsys):
    from ega.cli import main

    x, y = clusters(n=600, classes=30)
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
        re.search('class="statement">(frozen|wccn at)', (tmp_path / "r.html").read_text())
        and "no row of an unseen class" in (tmp_path / "own.md").read_text()
    )
    assert (
        main(["report", path("a"), path("all.npy"), path("all_y.npy"), "-o", path("r.txt")]) == 2
        and not (tmp_path / "r.txt").exists()
    )
