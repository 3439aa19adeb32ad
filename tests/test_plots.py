"The plots: labels that never overlap, one look a method, functions that leave global state alone."
import ast, io, subprocess, sys
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt, numpy as np, pandas as pd, pytest

from ega.core import InputError
from ega.plots import METHOD_STYLE, _bars, _spread, look, place_labels, plot_against, plot_plane, plot_ranges, plot_rho

ROOT = Path(__file__).parents[1]
METHODS = [m for m in METHOD_STYLE if m != "frozen"]

@pytest.fixture(autouse=True)
def style():
    with plt.style.context(ROOT/"paper/style.mplstyle"): yield
    plt.close("all")

def axes(width=2.25, height=2.): return plt.figure(figsize=(width, height)).add_axes([.13, .13, .86, .76])

def shared(ax):
    boxes = np.array([t.get_window_extent().extents for t in ax.texts])
    low, high = np.maximum(boxes[:, None, :2], boxes[None, :, :2]), np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    return int(np.triu((high > low).all(-1), 1).sum())

def plane(rng, spread=1.):
    t = pd.DataFrame({"method": METHODS, "seen": 3 + spread*3*rng.normal(size=12), "unseen": spread*3*rng.normal(size=12)})
    for c in ("seen", "unseen"): t[f"{c}_low"], t[f"{c}_high"] = t[c] - rng.uniform(.1, 1, 12), t[c] + rng.uniform(.1, 1, 12)
    return t

@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [1., .3])
def test_no_label_covers_another_or_leaves_the_panel(seed, spread):
    ax = plot_plane(axes(), plane(np.random.default_rng(seed), spread), size=5.5)
    frame, boxes = ax.get_window_extent().extents, np.array([t.get_window_extent().extents for t in ax.texts])
    assert len(ax.texts) == 13 and shared(ax) == 0
    assert (boxes[:, :2] >= frame[:2]).all() and (boxes[:, 2:] <= frame[2:]).all()

def test_labels_stay_near_their_marks():
    ax = plot_plane(axes(), plane(np.random.default_rng(0)), size=5.5)
    t = plane(np.random.default_rng(0)).set_index("method")
    for text in ax.texts:
        box = np.array(text.get_window_extent().extents)
        mark = ax.transData.transform(next(([t.loc[m, "seen"], t.loc[m, "unseen"]] for m in METHODS if look(m).label == text.get_text()), [0, 0]))
        assert np.linalg.norm(np.clip(mark, box[:2], box[2:]) - mark) <= 41*ax.figure.dpi/72   # the outermost ring is 40 points

def test_a_mark_alone_has_its_name_right_beside_it_and_no_leader():
    ax = axes(); ax.set_xlim(0, 1); ax.set_ylim(0, 1)
    note, = place_labels(ax, [.5], [.5], ["x"], ["k"])
    assert not ax.lines and np.hypot(*note.get_position()) < 12

def test_coinciding_marks_get_distinct_places():
    ax = axes(); ax.set_xlim(0, 1); ax.set_ylim(0, 1)
    place_labels(ax, [.5]*6, [.5]*6, ["a name"]*6, ["k"]*6)
    assert shared(ax) == 0

def test_placement_is_deterministic():
    def positions(): return [t.get_position() for t in plot_plane(axes(), plane(np.random.default_rng(3))).texts]
    assert positions() == positions()

def test_frozen_is_always_in_the_picture():
    far = plane(np.random.default_rng(0)); far[["seen", "seen_low", "seen_high"]] += 50
    ax = plot_plane(axes(), far)
    assert ax.get_xlim()[0] < 0 < ax.get_xlim()[1] and ax.get_ylim()[0] < 0 < ax.get_ylim()[1]

def test_missing_intervals_are_drawn_without_bars():
    t = plane(np.random.default_rng(0)); t[["seen_low", "seen_high", "unseen_low", "unseen_high"]] = np.nan
    ax = plot_plane(axes(), t)
    assert np.isfinite([*ax.get_xlim(), *ax.get_ylim()]).all()
    assert _bars([1.], [np.nan], [2.]).tolist() == [[0.], [0.]]
    assert _bars([1.], [.5], [3.]).tolist() == [[.5], [2.]]

def test_spread_keeps_order_mean_and_gap():
    y = np.array([.1, .5, .11, .12])
    out = _spread(y, .1)
    assert np.argsort(out).tolist() == np.argsort(y).tolist() and np.diff(np.sort(out)).min() >= .1 - 1e-12
    assert out.mean() == pytest.approx(y.mean()) and _spread([0., 1.], .1).tolist() == [0., 1.]

def test_rho_draws_the_mean_and_the_whole_band():
    h = np.array([[.4, .2, .1], [.2, .2, .3]])
    ax = plot_rho(axes(), {"ega": h})
    line, = ax.lines
    assert line.get_xdata().tolist() == [1, 2, 3] and np.allclose(line.get_ydata(), [.3, .2, .2])
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(.1) and band[:, 1].max() == pytest.approx(.4)
    assert line.get_color() == look("ega").colour

def test_rho_of_one_run_one_epoch_or_nothing():
    plot_rho(axes(), {}); plot_rho(axes(), {"ega": [.5]}); ax = plot_rho(axes(), {m: [.1, .1] for m in ("ega", "ega_block", "lora_triplet")})
    assert shared(ax) == 0                                     # three lines that end in one point

def test_ranges_order_fill_and_missing_rows():
    t = pd.DataFrame({"method": ["ega", "wccn"], "value": [-2., .1], "low": [-3., -.4], "high": [-1., .5]})
    ax = plot_ranges(axes(), t, order=["wccn", "supcon", "ega"])
    assert [v.get_text() for v in ax.get_yticklabels()] == [look(m).label for m in ("wccn", "supcon", "ega")]
    marks = {v.get_ydata()[0]: v for v in ax.lines if v.get_marker() in ("o", "s")}
    assert set(marks) == {0, 2} and marks[0].get_markerfacecolor() == "white" and marks[2].get_markerfacecolor() == look("ega").colour
    assert ax.get_ylim()[0] > ax.get_ylim()[1]                 # the first of the order is on top

def test_against_drops_rows_without_a_value_and_names_means():
    t = pd.DataFrame({"method": ["ega", "ega", "supcon"], "x": [.1, .3, np.nan], "y": [-1., -3., 2.]})
    ax = plot_against(axes(), t)
    assert [v.get_text() for v in ax.texts] == [look("ega").label]
    assert any(np.allclose(v.get_xdata(), .2) and np.allclose(v.get_ydata(), -2) for v in ax.lines)

def test_unknown_method_is_named():
    with pytest.raises(InputError, match="supcom.*METHOD_STYLE"): look("supcom")
    with pytest.raises(InputError, match="nobody"): plot_ranges(axes(), pd.DataFrame({"method": ["nobody"], "value": [0], "low": [0], "high": [0]}), order=["nobody"])

def test_functions_return_their_axes_and_touch_no_global_state():
    t, before, ax = plane(np.random.default_rng(0)), dict(matplotlib.rcParams), axes()
    figures = plt.get_fignums()
    assert plot_plane(ax, t) is ax and plot_rho(axes(), {"ega": [.1, .2]}) is not ax
    r = t.rename(columns={"unseen": "value", "unseen_low": "low", "unseen_high": "high"})
    assert plot_ranges(ax, r, order=METHODS) is ax and plot_against(ax, t.rename(columns={"seen": "x", "unseen": "y"})) is ax
    assert dict(matplotlib.rcParams) == before and len(plt.get_fignums()) == len(figures) + 1    # the one made on the line above

def test_same_data_same_bytes():
    def pdf():
        out = io.BytesIO(); plot_plane(axes(), plane(np.random.default_rng(1))).figure.savefig(out, format="pdf", metadata={"CreationDate": None})
        return out.getvalue()
    assert pdf() == pdf()

def test_every_method_has_its_own_colour_marker_and_name():
    for part in zip(*METHOD_STYLE.values()): assert len(set(part)) == len(METHOD_STYLE)

def test_names_can_be_read_on_white():
    def luminance(c):
        c = np.array(matplotlib.colors.to_rgb(c)); return np.where(c <= .04045, c/12.92, ((c + .055)/1.055)**2.4) @ [.2126, .7152, .0722]
    contrast = {m: 1.05/(luminance(v.colour) + .05) for m, v in METHOD_STYLE.items()}
    assert min(contrast.values()) > 2.2, contrast              # sky blue and orange are the palest; WCAG asks 3 for large text, black on white has 21

def test_plots_import_neither_torch_nor_pyplot():
    code = "import sys, ega.plots; assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    tree = ast.parse((ROOT/"ega/plots.py").read_text())
    inside = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level}
    assert inside == {"core"}
