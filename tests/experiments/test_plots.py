"Plots: labels do not overlap, each method has one style, and functions change no global state."

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
    place_labels,
    plot_quantity_vs_unseen,
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
    x, y = 3 + spread * 3 * rng.normal(size=12), spread * 3 * rng.normal(size=12)
    return pd.DataFrame({"method": METHODS, "x": x, "y": y, "low": y - 0.5, "high": y + 0.5})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [1.0, 0.3])
def test_labels_neither_overlap_nor_leave_the_axes(seed, spread):
    ax = plot_quantity_vs_unseen(axes(), plane(np.random.default_rng(seed), spread), size=5.5)
    frame, boxes = ax.get_window_extent().extents, np.array([t.get_window_extent().extents for t in ax.texts])
    assert len(ax.texts) == 12 and shared(ax) == 0
    assert (boxes[:, :2] >= frame[:2]).all() and (boxes[:, 2:] <= frame[2:]).all()


def test_labels_of_coinciding_marks_do_not_overlap():
    ax = axes()
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    place_labels(ax, [0.5] * 6, [0.5] * 6, ["a name"] * 6, ["k"] * 6)
    assert shared(ax) == 0


def test_every_method_has_its_own_colour_marker_and_name():
    "The values of the dial are one method with one colour and marker, and have names of their own."
    styles = {m.split(" strength=")[0]: style for m, style in METHOD_STYLES.items()}
    assert len(styles) == len(METHOD_STYLES) - 5
    for part in zip(*styles.values()):
        assert len(set(part)) == len(styles)
    assert len({style.label for style in METHOD_STYLES.values()}) == len(METHOD_STYLES)
