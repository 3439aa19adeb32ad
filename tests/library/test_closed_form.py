"Closed forms: identities and parity with scikit-learn."

import itertools

import numpy as np
import pytest

from ega.arrays import InputError, normalize
from ega.closed_form import WCCN, LDAMap, PCAMap, Ridge, ValidatedWCCN, class_covariances, inverse_sqrt

MAPS = [
    WCCN(),
    WCCN(0.2, power=0.5, center=True),
    ValidatedWCCN(),
    LDAMap(),
    LDAMap(3, shrinkage=0.5, center=True),
    PCAMap(),
    PCAMap(4, shrinkage=0.3),
    PCAMap(whiten=False),
    Ridge(0.01),
]


def clouds(classes=20, n=15, d=8, seed=0, width=0.6):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), n)
    spread = np.linalg.qr(rng.normal(size=(d, d)))[0] * np.geomspace(width, width / 10, d)
    return normalize(normalize(rng.normal(size=(classes, d)))[y] + rng.normal(size=(len(y), d)) @ spread.T), y


def distances(z):
    return np.linalg.norm(z[:, None].astype("f8") - z[None], axis=2)


def test_scatter_is_the_loop_over_classes():
    x, y = clouds(5, 9, 4)
    keep = np.random.default_rng(0).permutation(45)[:37]  # unbalanced
    x, y = x[keep].astype("f8"), y[keep]
    groups, mean = [x[y == c] for c in range(5)], x.mean(0)
    Sw = sum(np.outer(r - g.mean(0), r - g.mean(0)) for g in groups for r in g) / 37
    Sb = sum(len(g) * np.outer(g.mean(0) - mean, g.mean(0) - mean) for g in groups) / 37
    got = class_covariances(x, y)
    assert np.allclose(got[0], Sw, atol=1e-7) and np.allclose(got[1], Sb, atol=1e-7)


def test_shrinkage_is_scikit_learns():
    from sklearn.covariance import shrunk_covariance

    S = class_covariances(*clouds())[0]
    for l in (0.0, 0.3, 1.0):
        assert np.allclose(
            np.linalg.inv(inverse_sqrt(S, l)) @ np.linalg.inv(inverse_sqrt(S, l)), shrunk_covariance(S, shrinkage=l)
        )


def test_wccn_is_the_formula_with_mean_squared_row_norm_one():
    x, y = clouds()
    S = class_covariances(x, y)[0]
    w, V = np.linalg.eigh(S)
    w = 0.7 * w + 0.3 * w.mean()
    M = V @ np.diag(w**-0.4) @ V.T
    got = WCCN(0.3, power=0.8).fit(x, y).matrix_
    assert (
        np.allclose(got, M / np.sqrt((M**2).sum(1).mean()), atol=1e-6)
        and (got == got.T).all()
        and np.isclose((got**2).sum(1).mean(), 1)
    )


def test_wccn_makes_classes_round():
    x, y = clouds()
    after = class_covariances(x @ WCCN(0.0).fit(x, y).matrix_, y)[0]
    assert np.abs(after / after[0, 0] - np.eye(8)).max() < 1e-4  # the matrix is float32, condition number 10
    before = class_covariances(x, y)[0]
    assert np.abs(before / before[0, 0] - np.eye(8)).max() > 0.5


@pytest.mark.parametrize("frozen", [WCCN(1.0), WCCN(0.3, power=0.0), Ridge(1e7)])
def test_the_end_of_the_dial_is_frozen(frozen):
    x, y = clouds()
    assert np.abs(frozen.fit_transform(x, y) - x).max() < 1e-6


def test_half_powers_multiply():
    x, y = clouds()
    half, whole = WCCN(0.1, power=0.5).fit(x, y).matrix_.astype("f8"), WCCN(0.1).fit(x, y).matrix_
    assert np.allclose(half @ half / np.linalg.norm(half @ half), whole / np.linalg.norm(whole), atol=1e-6)


@pytest.mark.parametrize("solver", ["svd", "eigen"])
def test_wccn_and_lda_have_scikit_learns_distances(solver):
    "C - 1 >= d, no shrinkage, before l2: one metric up to a factor (n against n - C degrees of freedom)."
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, y = clouds(20, 15, 8)
    theirs = distances(LinearDiscriminantAnalysis(solver=solver).fit(x, y).transform(x))
    for ours in (WCCN(0.0), LDAMap(shrinkage=0.0)):
        d = distances(x @ ours.fit(x, y).matrix_)
        assert np.allclose(d / d.mean(), theirs / theirs.mean(), atol=1e-4)
    frozen = distances(x)
    assert not np.allclose(frozen / frozen.mean(), theirs / theirs.mean(), atol=0.1)


@pytest.mark.parametrize("center", [False, True])
def test_lda_with_few_classes_is_scikit_learns_projection(center):
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, y = clouds(5, 30, 8)
    theirs = LinearDiscriminantAnalysis(solver="eigen").fit(x, y)
    ours = LDAMap(shrinkage=0.0, center=center).fit(x, y)
    a, b = distances(x @ ours.matrix_), distances(theirs.transform(x)[:, :4])
    assert ours.matrix_.shape == (8, 4) and np.allclose(a / a.mean(), b / b.mean(), atol=1e-4)
    if center:
        t = normalize((x - x.mean(0)) @ theirs.scalings_[:, :4])
        assert np.allclose(distances(ours.transform(x)), distances(t), atol=1e-3)


def test_lda_with_enough_classes_is_wccn_after_l2():
    x, y = clouds()
    for l in (0.1, 0.6):
        assert np.allclose(
            LDAMap(shrinkage=l).fit_transform(x, y) @ LDAMap(shrinkage=l).fit_transform(x, y).T,
            WCCN(l).fit_transform(x, y) @ WCCN(l).fit_transform(x, y).T,
            atol=1e-5,
        )


def idle(classes=20, n=30, d=12, seed=0):
    "Classes that differ along the directions in which they are wide, and many narrow directions that say nothing."
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), n)
    return normalize(
        np.hstack(
            [rng.normal(size=(classes, d))[y] + rng.normal(size=(len(y), d)), 0.3 * rng.normal(size=(len(y), 16 * d))]
        )
    ), y


def test_the_guard_keeps_whitening_that_helps_and_drops_one_that_harms():
    for (x, y), helps in ((clouds(width=1.5), True), (idle(), False)):
        m = ValidatedWCCN().fit(x, y)
        assert len(m.change_) == 20 and (m.change_.mean() > 5 if helps else m.change_.mean() < -5)
        assert np.array_equal(m.matrix_, WCCN().fit(x, y).matrix_ if helps else np.eye(x.shape[1]))


@pytest.mark.parametrize("mean, harms", [(-2.0, True), (-0.5, False), (0.5, False)])
def test_a_harm_is_more_than_a_standard_error(mean, harms, monkeypatch):
    import ega.closed_form

    monkeypatch.setattr(
        ega.closed_form, "_left_out", lambda *_: (mean + np.tile([-4.0, 4.0], 8)) / 100
    )  # of a standard error of 1.03 points
    x, y = clouds()
    assert np.array_equal(ValidatedWCCN().fit(x, y).matrix_, np.eye(8)) == harms


def test_the_guard_asks_each_class_once_of_a_whitening_that_never_saw_it():
    x, y = clouds(9, 6, 8, width=3.0)
    m = ValidatedWCCN(folds=4, seed=3).fit(x, y)
    order, change = np.random.default_rng(3).permutation(9), []
    for part in np.array_split(order, 4):
        u = np.flatnonzero(np.isin(y, part))
        z = WCCN().fit(x[~np.isin(y, part)], y[~np.isin(y, part)]).transform(x[u])
        hits = [y[u][np.argsort(distances(v) + 9 * np.eye(len(u)), 1)[:, 0]] == y[u] for v in (x[u], z)]
        change += [100 * (hits[1][y[u] == c].mean() - hits[0][y[u] == c].mean()) for c in part]
    assert np.allclose(m.change_, change) and any(change)


def test_a_whitening_nobody_can_ask_about_stays():
    x, y = clouds(7)  # fewer than two classes a part
    assert len(ValidatedWCCN().fit(x, y).change_) == 0 and np.array_equal(
        ValidatedWCCN().fit(x, y).matrix_, WCCN().fit(x, y).matrix_
    )
    x, y = clouds(20, 15)
    lone = np.r_[np.arange(15 * 7), np.arange(15 * 7, 300, 15)]  # seven classes with mates and thirteen of one row
    assert len(ValidatedWCCN().fit(x[lone], y[lone]).change_) == 0


@pytest.mark.parametrize("limit", [2, 40])
def test_the_guard_asks_no_more_rows_than_its_limit(limit, monkeypatch):
    import ega.closed_form

    asked, loo_lp_at_k = [], ega.closed_form.loo_lp_at_k
    monkeypatch.setattr(ega.closed_form, "loo_lp_at_k", lambda x, y: asked.append(len(x)) or loo_lp_at_k(x, y))
    ValidatedWCCN(limit=limit).fit(*clouds())
    assert len(asked) == 8 and max(asked) <= limit


def test_learned_whitening_is_wccn():
    "All positive pairs of balanced classes, by a loop: S = 2n/(n-1) Sw."
    x, y = clouds(10, 6, 5)
    pairs = [(i, j) for i, j in itertools.permutations(range(60), 2) if y[i] == y[j]]
    difference = np.array([x[i].astype("f8") - x[j] for i, j in pairs])
    S = difference.T @ difference / len(pairs)
    assert np.allclose(S, 12 / 5 * class_covariances(x, y)[0], atol=1e-7)
    z, w = normalize(x @ np.linalg.inv(np.linalg.cholesky(S)).T), WCCN(0.0).fit_transform(x, y)
    assert np.allclose(z @ z.T, w @ w.T, atol=1e-5)


def test_pca_is_scikit_learns():
    from sklearn.decomposition import PCA as Theirs

    x, _ = clouds()
    for k in (3, 8):
        ours, theirs = PCAMap(k).fit(x).transform(x), normalize(Theirs(k, whiten=True).fit_transform(x.astype("f8")))
        assert np.allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-4)


def test_ridge_is_scikit_learns_on_the_residual():
    "W - I is an ordinary ridge of (class mean - row) on rows with alpha = n lam."
    from sklearn.linear_model import Ridge as Theirs

    x, y = clouds()
    keep = np.random.default_rng(0).random(300) < np.linspace(0.2, 1, 300)  # unbalanced classes
    x, y = x[keep], y[keep]
    means = np.stack([x[y == c].mean(0) for c in range(20)])[y]
    theirs = Theirs(alpha=len(x) * 0.02, fit_intercept=False, solver="cholesky").fit(
        x.astype("f8"), means - x.astype("f8")
    ).coef_.T + np.eye(8)
    assert np.allclose(Ridge(0.02).fit(x, y).matrix_, theirs, atol=1e-5)


@pytest.mark.parametrize(
    "m", [WCCN(0.2), WCCN(0.2, center=True), LDAMap(), PCAMap(shrinkage=0.2), Ridge(0.02)], ids=repr
)
def test_a_rotation_of_the_space_rotates_the_map(m):
    x, y = clouds()
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0]
    a, b = m.fit_transform(x, y), type(m)(**vars_of(m)).fit_transform(normalize(x @ turn), y)
    assert np.allclose(a @ a.T, b @ b.T, atol=2e-4)


def vars_of(m):
    return {k: v for k, v in vars(m).items() if not k.endswith("_")}


@pytest.mark.parametrize("m", MAPS, ids=repr)
def test_form_of_every_map(m):
    "Linear then l2; unit float32 rows; row order, label names and refits change nothing."
    x, y = clouds()
    z = m.fit(x, y).transform(x)
    assert z.dtype == np.float32 == m.matrix_.dtype and np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    assert np.allclose(z, normalize((x - m.mean_) @ m.matrix_), atol=1e-6) and m.matrix_.shape == (8, z.shape[1])
    assert (m.fit(x, y).matrix_ == m.matrix_).all() and m.fit_transform(x, y).tobytes() == z.tobytes()
    order = np.random.default_rng(2).permutation(len(x))
    w = type(m)(**vars_of(m)).fit(x[order], 100 - y[order]).transform(x)
    assert np.allclose(w @ w.T, z @ z.T, atol=1e-4)


@pytest.mark.parametrize("m", [m for m in MAPS if not isinstance(m, PCAMap)], ids=repr)
def test_unlabelled_rows_teach_nothing(m):
    x, y = clouds()
    noise, at = (
        normalize(np.random.default_rng(3).normal(size=(50, 8))),
        np.arange(0, 300, 6),
    )  # among the labelled rows
    a = m.fit(x, y).matrix_.copy(), m.mean_
    m.fit(np.insert(x, at, noise, 0), np.insert(y, at, -1))
    assert (m.matrix_ == a[0]).all() and (m.mean_ == a[1]).all()


def test_fewer_rows_than_dimensions_need_shrinkage():
    x, y = clouds(3, 2, 8)
    with pytest.raises(InputError, match="5 of 8 directions"):
        WCCN(0.0).fit(x, y)
    assert np.isfinite(WCCN(0.1).fit_transform(x, y)).all() and np.isfinite(LDAMap().fit_transform(x, y)).all()
    with pytest.raises(InputError, match="directions have any variance"):
        PCAMap().fit(x)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x, y: WCCN().fit(x, y * 0), "2 classes"),
        (lambda x, y: LDAMap().fit(x, y * 0 - 1), "2 classes"),
        (lambda x, y: Ridge().fit(x[::15], y[::15]), "one row each"),
        (lambda x, y: WCCN().fit(x[::15], y[::15]), "one row each"),
        (lambda x, y: WCCN(-0.1).fit(x, y), "[0, 1]"),
        (lambda x, y: LDAMap(shrinkage=2).fit(x, y), "[0, 1]"),
        (lambda x, y: PCAMap(shrinkage=2).fit(x), "[0, 1]"),
        (lambda x, y: PCAMap(9).fit(x), "1..8"),
        (lambda x, y: LDAMap(0).fit(x, y), "1..8"),
        (lambda x, y: Ridge(0).fit(x, y), "> 0"),
        (lambda x, y: ValidatedWCCN(0.0).fit(x, y), "(0, 1]"),
        (lambda x, y: ValidatedWCCN(folds=1).fit(x, y), "folds must be an integer >= 2"),
        (lambda x, y: ValidatedWCCN(limit=1).fit(x, y), "limit must be an integer >= 2"),
        (lambda x, y: WCCN().transform(x), "fitted"),
        (lambda x, y: WCCN().fit(x, y).transform(x[:, :3]), "8 columns"),
        (lambda x, y: WCCN().fit(x, y[:-1]), "one label a row"),
    ],
)
def test_bad_input_is_named(call, text):
    with pytest.raises(InputError) as error:
        call(*clouds())
    assert text in str(error.value)
