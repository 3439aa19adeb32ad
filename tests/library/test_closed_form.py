"Closed forms: identities, parity with scikit-learn, behaviour as scikit-learn estimators."

import tracemalloc

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from ega.data.arrays import InputError, normalize
from ega.method.closed_form import (
    WCCN,
    ClassStatistics,
    DiscriminantWhitening,
    LDAMap,
    LogitMap,
    PCAMap,
    ValidatedWCCN,
    shrunk_inverse_power,
)

MAPS = [WCCN(), WCCN(0.2, power=0.5, center=True), ValidatedWCCN(), LDAMap(), LDAMap(3, shrinkage=0.5, center=True)]
MAPS += [
    PCAMap(),
    PCAMap(4, shrinkage=0.3),
    PCAMap(whiten=False),
    LogitMap(),
    DiscriminantWhitening(0.4, shrinkage=0.2),
]


def elongated_classes(classes=20, n=15, d=8, seed=0, width=0.6):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), n)
    spread = np.linalg.qr(rng.normal(size=(d, d)))[0] * np.geomspace(width, width / 10, d)
    return normalize(normalize(rng.normal(size=(classes, d)))[y] + rng.normal(size=(len(y), d)) @ spread.T), y


def statistics_of(x, y):
    return ClassStatistics(x.shape[1]).update(x, y)


def class_covariances(x, y):
    return statistics_of(x, y).covariances()


def distances(z):
    return np.linalg.norm(z[:, None].astype("f8") - z[None], axis=2)


def test_class_covariances_equal_a_loop_over_classes():
    x, y = elongated_classes(5, 9, 4)
    keep = np.random.default_rng(0).permutation(45)[:37]  # unbalanced
    x, y = x[keep].astype("f8"), y[keep]
    groups, mean = [x[y == c] for c in range(5)], x.mean(0)
    Sw = sum(np.outer(r - g.mean(0), r - g.mean(0)) for g in groups for r in g) / 37
    Sb = sum(len(g) * np.outer(g.mean(0) - mean, g.mean(0) - mean) for g in groups) / 37
    got = class_covariances(x, y)
    assert np.allclose(got[0], Sw, atol=1e-7) and np.allclose(got[1], Sb, atol=1e-7)


def test_shrinkage_equals_scikit_learn():
    from sklearn.covariance import shrunk_covariance

    S = class_covariances(*elongated_classes())[0]
    for l in (0.0, 0.3, 1.0):
        root = np.linalg.inv(shrunk_inverse_power(S, l))
        assert np.allclose(root @ root, shrunk_covariance(S, shrinkage=l))


def test_wccn_equals_its_formula_with_mean_squared_row_norm_one():
    x, y = elongated_classes()
    w, V = np.linalg.eigh(class_covariances(x, y)[0])
    M = V @ np.diag((0.7 * w + 0.3 * w.mean()) ** -0.4) @ V.T
    got = WCCN(0.3, power=0.8).fit(x, y).matrix_
    assert np.allclose(got, M / np.sqrt((M**2).sum(1).mean()), atol=1e-6) and np.isclose((got**2).sum(1).mean(), 1)


@pytest.mark.parametrize("solver", ["svd", "eigen"])
def test_wccn_and_lda_distances_equal_scikit_learn(solver):
    "C - 1 >= d, no shrinkage, before l2: one metric up to a factor (n against n - C degrees of freedom)."
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, y = elongated_classes(20, 15, 8)
    theirs = distances(LinearDiscriminantAnalysis(solver=solver).fit(x, y).transform(x))
    for ours in (WCCN(0.0), LDAMap(shrinkage=0.0)):
        d = distances(x @ ours.fit(x, y).matrix_)
        assert np.allclose(d / d.mean(), theirs / theirs.mean(), atol=1e-4)
    frozen = distances(x)
    assert not np.allclose(frozen / frozen.mean(), theirs / theirs.mean(), atol=0.1)


@pytest.mark.parametrize("center", [False, True])
def test_lda_with_few_classes_equals_scikit_learn(center):
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    x, y = elongated_classes(5, 30, 8)
    theirs = LinearDiscriminantAnalysis(solver="eigen").fit(x, y)
    ours = LDAMap(shrinkage=0.0, center=center).fit(x, y)
    a, b = distances(x @ ours.matrix_), distances(theirs.transform(x)[:, :4])
    assert ours.matrix_.shape == (8, 4) and np.allclose(a / a.mean(), b / b.mean(), atol=1e-4)
    if center:
        t = normalize((x - x.mean(0)) @ theirs.scalings_[:, :4])
        assert np.allclose(distances(ours.transform(x)), distances(t), atol=1e-3)


@pytest.mark.parametrize("mean, harms", [(-2.0, True), (-0.5, False), (0.5, False)])
def test_whitening_is_rejected_for_a_loss_of_more_than_one_standard_error(mean, harms, monkeypatch):
    changes = (mean + np.tile([-4.0, 4.0], 8)) / 100  # their standard error is 1.03 points
    monkeypatch.setattr(ValidatedWCCN, "_left_out_changes", lambda *_: changes)
    x, y = elongated_classes()
    assert np.array_equal(ValidatedWCCN().fit(x, y).matrix_, np.eye(8)) == harms


def test_validation_equals_naive_leave_classes_out():
    x, y = elongated_classes(9, 6, 8, width=3.0)
    m = ValidatedWCCN(cv=4, random_state=3).fit(x, y)
    order, change = np.random.default_rng(3).permutation(9), []
    for part in np.array_split(order, 4):
        u = np.flatnonzero(np.isin(y, part))
        z = WCCN().fit(x[~np.isin(y, part)], y[~np.isin(y, part)]).transform(x[u])
        hits = [y[u][np.argsort(distances(v) + 9 * np.eye(len(u)), 1)[:, 0]] == y[u] for v in (x[u], z)]
        change += [100 * (hits[1][y[u] == c].mean() - hits[0][y[u] == c].mean()) for c in part]
    assert np.allclose(m.lp_changes_, change) and any(change)


def test_whitening_is_kept_with_too_few_classes_to_validate():
    x, y = elongated_classes(7)  # fewer than two classes a part
    m = ValidatedWCCN().fit(x, y)
    assert len(m.lp_changes_) == 0 and np.array_equal(m.matrix_, WCCN().fit(x, y).matrix_)
    x, y = elongated_classes(20, 15)
    lone = np.r_[np.arange(15 * 7), np.arange(15 * 7, 300, 15)]  # seven classes with mates and thirteen of one row
    assert len(ValidatedWCCN().fit(x[lone], y[lone]).lp_changes_) == 0


def test_pca_equals_scikit_learn():
    from sklearn.decomposition import PCA as Theirs

    x, _ = elongated_classes()
    for k in (3, 8):
        ours, theirs = PCAMap(k).fit(x).transform(x), normalize(Theirs(k, whiten=True).fit_transform(x.astype("f8")))
        assert np.allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-4)


@pytest.mark.parametrize("m", [WCCN(0.2), WCCN(0.2, center=True), LDAMap(), PCAMap(shrinkage=0.2)], ids=repr)
def test_cosines_do_not_change_when_the_space_is_rotated(m):
    x, y = elongated_classes()
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0]
    a, b = m.fit_transform(x, y), clone(m).fit_transform(normalize(x @ rotation), y)
    assert np.allclose(a @ a.T, b @ b.T, atol=2e-4)


@pytest.mark.parametrize("m", MAPS, ids=repr)
def test_every_map_is_linear_then_normalised(m):
    "Unit float32 rows; the order of rows, the values of labels and fitting again change nothing."
    x, y = elongated_classes()
    z = m.fit(x, y).transform(x)
    assert z.dtype == np.float32 == m.matrix_.dtype and np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    assert np.allclose(z, normalize((x - m.mean_) @ m.matrix_), atol=1e-6) and m.matrix_.shape == (8, z.shape[1])
    assert (m.fit(x, y).matrix_ == m.matrix_).all() and m.fit_transform(x, y).tobytes() == z.tobytes()
    order = np.random.default_rng(2).permutation(len(x))
    w = clone(m).fit(x[order], 100 - y[order]).transform(x)
    assert np.allclose(w @ w.T, z @ z.T, atol=1e-4)


@pytest.mark.parametrize("m", [m for m in MAPS if not isinstance(m, PCAMap)], ids=repr)
def test_unlabelled_rows_are_ignored(m):
    x, y = elongated_classes()
    noise = normalize(np.random.default_rng(3).normal(size=(50, 8)))
    at = np.arange(0, 300, 6)  # among the labelled rows
    a = m.fit(x, y).matrix_.copy(), m.mean_
    m.fit(np.insert(x, at, noise, 0), np.insert(y, at, -1))
    assert (m.matrix_ == a[0]).all() and (m.mean_ == a[1]).all()


@pytest.mark.parametrize("m", MAPS, ids=repr)
def test_maps_are_scikit_learn_estimators(m):
    "get_params, set_params, clone and repr; fitted attributes exist only after fit, and the constructor only stores."
    x, y = elongated_classes()
    params = m.get_params()
    new = clone(m)
    assert new.get_params() == params and set(vars(new)) == set(params)
    with pytest.raises(NotFittedError):
        new.transform(x)
    assert new.fit(x, y) is new and new.n_features_in_ == 8
    fitted = set(vars(new)) - set(params)
    assert {"matrix_", "mean_", "n_features_in_"} <= fitted and all(name.endswith("_") for name in fitted)
    assert new.get_params() == params


def test_logit_map_predicts_with_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    x, y = elongated_classes()
    m = LogitMap(3.0).fit(x, y)
    expected = LogisticRegression(C=3.0, max_iter=1000).fit(x, y)
    assert np.array_equal(m.predict(x), expected.predict(x)) and np.allclose(m.matrix_, expected.coef_.T, atol=1e-6)


def same_statistics(a, b):
    return (
        np.array_equal(a.classes, b.classes)
        and np.array_equal(a.counts, b.counts)
        and np.allclose(a.sums, b.sums, atol=1e-10)
        and np.allclose(a.squares, b.squares, atol=1e-9)
    )


def test_statistics_equal_a_loop_over_rows():
    x, y = elongated_classes()
    y[::7] = -1
    s, rows = statistics_of(x, y), x[y >= 0].astype("f8")
    assert s.n == len(rows) and np.allclose(s.mean, rows.mean(0))
    assert np.allclose(s.squares, sum(np.outer(row, row) for row in rows))
    for c, count, total in zip(s.classes, s.counts, s.sums):
        assert count == (y == c).sum() and np.allclose(total, x[y == c].astype("f8").sum(0))


@pytest.mark.parametrize("seed", range(5))
def test_statistics_add_and_subtract_over_any_parts(seed, tmp_path):
    rng = np.random.default_rng(seed)
    x, y = elongated_classes(seed=seed)
    y[rng.random(len(y)) < 0.2] = -1
    part = rng.integers(0, 4, len(y))  # some parts may lack some classes
    parts = [statistics_of(x[part == p], y[part == p]) for p in range(4)]
    merged = ClassStatistics(x.shape[1])
    for p in rng.permutation(4):
        merged.merge(ClassStatistics.load(parts[p].save(tmp_path / f"{p}.npz")))
    assert same_statistics(merged, statistics_of(x, y))
    merged.subtract(parts[2])
    assert same_statistics(merged, statistics_of(x[part != 2], y[part != 2]))
    fits = [
        DiscriminantWhitening(0.4).fit_statistics(merged),
        DiscriminantWhitening(0.4).fit(x[part != 2], y[part != 2]),
    ]
    assert np.abs(fits[0].transform(x) - fits[1].transform(x)).max() < 1e-5


def test_a_class_without_rows_leaves_the_statistics():
    x, y = elongated_classes()
    s = statistics_of(x, y).subtract(statistics_of(x[y == 3], y[y == 3]))
    assert 3 not in s.classes and len(s.sums) == len(s.classes) == 19


@pytest.mark.parametrize("g", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("classes", [5, 20])  # fewer and more than the 8 dimensions
def test_discriminant_whitening_equals_its_formula(g, classes):
    x, y = elongated_classes(classes)
    within, between = class_covariances(x, y)
    R = shrunk_inverse_power(within, 0.5)
    l, U = np.linalg.eigh(R @ between @ R)
    v = (1 - g) + g * np.sqrt(np.clip(l, 0, None) / (np.clip(l, 0, None) + 0.1 * l.mean()))
    expected = normalize((x - x.mean(0)) @ (R @ U * v))
    z = DiscriminantWhitening(g).fit_transform(x, y)
    assert np.abs(z @ z.T - expected @ expected.T).max() < 1e-5


@pytest.mark.parametrize("m", [WCCN(center=True), LDAMap(2), DiscriminantWhitening()], ids=repr)
def test_a_fit_copies_no_whole_matrix(m):
    x, y = elongated_classes(10, 10_000, 32)
    tracemalloc.start()
    m.fit(x, y)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: WCCN().fit(x, y * 0),  # one class
        lambda x, y: WCCN().fit(x[::15], y[::15]),  # one row of each class
        lambda x, y: WCCN(0).fit(x[:48:8], y[:48:8]),  # fewer rows than dimensions
        lambda x, y: PCAMap().fit(x[:6]),
        lambda x, y: WCCN().fit(x, y).transform(0 * x),
        lambda x, y: WCCN().fit(x, y).transform(np.where(x == x[3, 3], np.nan, x)),
        lambda x, y: statistics_of(x, y).subtract(statistics_of(x[:16], 0 * y[:16])),  # class 0 has 15 rows
        lambda x, y: statistics_of(x, y).subtract(statistics_of(x[:1], y[:1] + 99)),
    ],
)
def test_input_that_gives_no_answer_is_refused(call):
    with pytest.raises(InputError):
        call(*elongated_classes())


def test_damaged_statistics_are_refused(tmp_path):
    path = statistics_of(*elongated_classes()).save(tmp_path / "s.npz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    for damaged in (bytes(data), bytes(data[:-40]), b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            ClassStatistics.load(path)
