"Plots: labels do not overlap, each method has one style, and functions change no global state."

import ast
import io
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from ega.experiments.grids import GRIDS
from ega.experiments.plots import (
    METHOD_STYLES,
    _bars,
    _spread_heights,
    method_style,
    place_labels,
    plot_active_ratio,
    plot_intervals,
    plot_quantity_vs_unseen,
    plot_seen_unseen,
)

ROOT = Path(__file__).parents[2]
METHODS = [m for m in GRIDS["full"]["main"].methods if m != "frozen"]


@pytest.fixture(autouse=True)
def style():
    with plt.style.context(ROOT / "paper/style.mplstyle"):
        yield
    plt.close("all")


def axes(width=2.25, height=2.0):
    return plt.figure(figsize=(width, height)).add_axes([0.13, 0.13, 0.86, 0.76])


def shared(ax):
    boxes = np.array([t.get_window_extent().extents for t in ax.texts])
    low, high = np.maximum(boxes[:, None, :2], boxes[None, :, :2]), np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    return int(np.triu((high > low).all(-1), 1).sum())


def plane(rng, spread=1.0):
    t = pd.DataFrame(
        {"method": METHODS, "seen": 3 + spread * 3 * rng.normal(size=12), "unseen": spread * 3 * rng.normal(size=12)}
    )
    for c in ("seen", "unseen"):
        t[f"{c}_low"], t[f"{c}_high"] = t[c] - rng.uniform(0.1, 1, 12), t[c] + rng.uniform(0.1, 1, 12)
    return t


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [1.0, 0.3])
def test_labels_neither_overlap_nor_leave_the_axes(seed, spread):
    ax = plot_seen_unseen(axes(), plane(np.random.default_rng(seed), spread), size=5.5)
    frame, boxes = ax.get_window_extent().extents, np.array([t.get_window_extent().extents for t in ax.texts])
    assert len(ax.texts) == 13 and shared(ax) == 0
    assert (boxes[:, :2] >= frame[:2]).all() and (boxes[:, 2:] <= frame[2:]).all()


def test_labels_stay_near_their_marks():
    ax = plot_seen_unseen(axes(), plane(np.random.default_rng(0)), size=5.5)
    t = plane(np.random.default_rng(0)).set_index("method")
    for text in ax.texts:
        box = np.array(text.get_window_extent().extents)
        mark = ax.transData.transform(
            next(
                ([t.loc[m, "seen"], t.loc[m, "unseen"]] for m in METHODS if method_style(m).label == text.get_text()),
                [0, 0],
            )
        )
        assert (
            np.linalg.norm(np.clip(mark, box[:2], box[2:]) - mark) <= 41 * ax.figure.dpi / 72
        )  # the outermost ring is 40 points


def test_single_label_is_beside_its_mark_without_leader():
    ax = axes()
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    (note,) = place_labels(ax, [0.5], [0.5], ["x"], ["k"])
    assert not ax.lines and np.hypot(*note.get_position()) < 12


def test_labels_of_coinciding_marks_do_not_overlap():
    ax = axes()
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    place_labels(ax, [0.5] * 6, [0.5] * 6, ["a name"] * 6, ["k"] * 6)
    assert shared(ax) == 0


def test_placement_is_deterministic():
    def positions():
        return [t.get_position() for t in plot_seen_unseen(axes(), plane(np.random.default_rng(3))).texts]

    assert positions() == positions()


def test_axes_always_include_frozen():
    far = plane(np.random.default_rng(0))
    far[["seen", "seen_low", "seen_high"]] += 50
    ax = plot_seen_unseen(axes(), far)
    assert ax.get_xlim()[0] < 0 < ax.get_xlim()[1] and ax.get_ylim()[0] < 0 < ax.get_ylim()[1]


def test_missing_intervals_are_drawn_without_bars():
    t = plane(np.random.default_rng(0))
    t[["seen_low", "seen_high", "unseen_low", "unseen_high"]] = np.nan
    ax = plot_seen_unseen(axes(), t)
    assert np.isfinite([*ax.get_xlim(), *ax.get_ylim()]).all()
    assert _bars([1.0], [np.nan], [2.0]).tolist() == [[0.0], [0.0]]
    assert _bars([1.0], [0.5], [3.0]).tolist() == [[0.5], [2.0]]


def test_spread_heights_keeps_order_and_mean_and_makes_gaps():
    y = np.array([0.1, 0.5, 0.11, 0.12])
    out = _spread_heights(y, 0.1)
    assert np.argsort(out).tolist() == np.argsort(y).tolist() and np.diff(np.sort(out)).min() >= 0.1 - 1e-12
    assert out.mean() == pytest.approx(y.mean()) and _spread_heights([0.0, 1.0], 0.1).tolist() == [0.0, 1.0]


def test_active_ratio_draws_the_mean_and_the_range_of_runs():
    h = np.array([[0.4, 0.2, 0.1], [0.2, 0.2, 0.3]])
    ax = plot_active_ratio(axes(), {"ega_paper": h})
    (line,) = ax.lines
    assert line.get_xdata().tolist() == [1, 2, 3] and np.allclose(line.get_ydata(), [0.3, 0.2, 0.2])
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.1) and band[:, 1].max() == pytest.approx(0.4)
    assert line.get_color() == method_style("ega_paper").colour


def test_active_ratio_accepts_one_run_one_epoch_or_nothing():
    plot_active_ratio(axes(), {})
    plot_active_ratio(axes(), {"ega_paper": [0.5]})
    ax = plot_active_ratio(axes(), {m: [0.1, 0.1] for m in ("ega_paper", "ega_released", "lora_triplet")})
    assert shared(ax) == 0  # three lines that end in one point


def test_intervals_keep_order_and_fill_dots_that_exclude_zero():
    t = pd.DataFrame({"method": ["ega_paper", "wccn"], "value": [-2.0, 0.1], "low": [-3.0, -0.4], "high": [-1.0, 0.5]})
    ax = plot_intervals(axes(), t, order=["wccn", "supcon", "ega_paper"])
    assert [v.get_text() for v in ax.get_yticklabels()] == [
        method_style(m).label for m in ("wccn", "supcon", "ega_paper")
    ]
    marks = {v.get_ydata()[0]: v for v in ax.lines if v.get_marker() in ("o", "s")}
    assert (
        set(marks) == {0, 2}
        and marks[0].get_markerfacecolor() == "white"
        and marks[2].get_markerfacecolor() == method_style("ega_paper").colour
    )
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first of the order is on top


def test_quantity_plot_drops_missing_values_and_names_means():
    t = pd.DataFrame({"method": ["ega_paper", "ega_paper", "supcon"], "x": [0.1, 0.3, np.nan], "y": [-1.0, -3.0, 2.0]})
    ax = plot_quantity_vs_unseen(axes(), t)
    assert [v.get_text() for v in ax.texts] == [method_style("ega_paper").label]
    assert any(np.allclose(v.get_xdata(), 0.2) and np.allclose(v.get_ydata(), -2) for v in ax.lines)


def test_method_without_an_entry_is_drawn_in_grey_with_its_own_name():
    known = {part for style in METHOD_STYLES.values() for part in style}
    mine, other = method_style("linear_circle"), method_style("nobody")
    assert mine.label == "linear_circle" and other == mine._replace(label="nobody") and not known & set(mine)
    t = pd.DataFrame({"method": ["nobody", "supcon"], "value": [1.0, 2.0], "low": [0.0, 1.0], "high": [2.0, 3.0]})
    ax = plot_intervals(axes(), t, order=["nobody", "supcon"])
    assert "nobody" in [label.get_text() for label in ax.get_yticklabels()]


def test_functions_return_their_axes_and_change_no_global_state():
    t, before, ax = plane(np.random.default_rng(0)), dict(matplotlib.rcParams), axes()
    figures = plt.get_fignums()
    assert plot_seen_unseen(ax, t) is ax and plot_active_ratio(axes(), {"ega_paper": [0.1, 0.2]}) is not ax
    r = t.rename(columns={"unseen": "value", "unseen_low": "low", "unseen_high": "high"})
    assert (
        plot_intervals(ax, r, order=METHODS) is ax
        and plot_quantity_vs_unseen(ax, t.rename(columns={"seen": "x", "unseen": "y"})) is ax
    )
    assert (
        dict(matplotlib.rcParams) == before and len(plt.get_fignums()) == len(figures) + 1
    )  # the one made on the line above


def test_same_data_give_the_same_file():
    def pdf():
        out = io.BytesIO()
        plot_seen_unseen(axes(), plane(np.random.default_rng(1))).figure.savefig(
            out, format="pdf", metadata={"CreationDate": None}
        )
        return out.getvalue()

    assert pdf() == pdf()


def test_every_method_has_its_own_colour_marker_and_name():
    "The values of the dial are one method with one colour and marker, and have names of their own."
    styles = {m.split(" strength=")[0]: style for m, style in METHOD_STYLES.items()}
    assert len(styles) == len(METHOD_STYLES) - 5
    for part in zip(*styles.values()):
        assert len(set(part)) == len(styles)
    assert len({style.label for style in METHOD_STYLES.values()}) == len(METHOD_STYLES)


def test_colours_have_enough_contrast_on_white():
    def luminance(c):
        c = np.array(matplotlib.colors.to_rgb(c))
        return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    contrast = {m: 1.05 / (luminance(v.colour) + 0.05) for m, v in METHOD_STYLES.items()}
    assert min(contrast.values()) > 2.2, (
        contrast
    )  # sky blue and orange are the palest; WCAG asks 3 for large text, black on white has 21


def test_plots_import_neither_torch_nor_pyplot():
    code = "import sys, ega.experiments.plots; assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    tree = ast.parse((ROOT / "ega/experiments/plots.py").read_text())
    modules = {n.module.removeprefix("ega.") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert modules == {"collections"}
