"Wrong input of the main objects: what would give a wrong answer is refused, with a word that says what was wrong."

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline

from ega import (
    AdaptedIndex,
    EmbeddingAdapter,
    EmbeddingSet,
    InputError,
    Monitor,
    PairAdapter,
    estimate_gain,
    evaluate,
    normalize,
    read_pack,
    write_pack,
)
from ega.estimator import estimate_update
from ega.pairs import evaluate_pairs

rng, Y = np.random.default_rng(0), np.repeat(np.arange(12), 10)
X = normalize(rng.normal(size=(12, 8))[Y] + 0.5 * rng.normal(size=(120, 8)))
FRAME, PAIRS = pd.DataFrame(X).add_prefix("x").assign(label=Y), np.column_stack([np.arange(120), np.arange(120)])
FITTED = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(X, Y)
FITTED_PAIRS = PairAdapter("both", max_unseen_loss=None).fit(X, X[:, ::-1], PAIRS)
NAN, ZERO, WIDE, TEXTS = np.where(X == X[3, 3], np.nan, X), X * (Y > 0)[:, None], X[:, :5], [f"kind {c}" for c in Y]


def fit(X=X, y=Y, unlabelled=None, **parameters):
    return EmbeddingAdapter("wccn", max_unseen_loss=None).set_params(**parameters).fit(X, y, unlabelled=unlabelled)


def fit_pairs(queries=X, documents=X, pairs=PAIRS, groups=None, negatives=None, **parameters):
    adapter = PairAdapter("both", max_unseen_loss=None).set_params(**parameters)
    return adapter.fit(queries, documents, pairs, groups=groups, negatives=negatives)


def fit_monitor(reference=X):
    return Monitor.fit(reference, np.eye(8, dtype="float32"))


MATRIX = [
    (None, InputError, "numbers"),
    (X[0], InputError, "shape"),
    (NAN, InputError, "NaN"),
    (ZERO, InputError, "norm 0"),
]
LABELS = [
    (None, InputError, "None"),
    (Y[:-1], InputError, "one label per row"),
    (Y + 0.5, InputError, "integers or texts"),
    ([*Y[:-1], "a"], InputError, "texts"),
    (["nan", *TEXTS[1:]], InputError, "unlabelled"),
    (["Kind 0", *TEXTS[1:]], InputError, "case"),
    (["k\u00e9", "ke\u0301", *TEXTS[2:]], InputError, "Unicode"),
]
ROWS = [
    *((fit, {"X": value}, *expected) for value, *expected in MATRIX),
    *((fit, {"y": value}, *expected) for value, *expected in LABELS),
    (fit, {"X": Y, "y": X}, InputError, "exchanged"),
    (fit, {"X": FRAME, "y": FRAME["label"]}, InputError, "column"),
    (fit, {"X": FRAME, "y": np.where(Y == 3, -1, Y)}, InputError, "column"),
    (fit, {"X": FRAME.set_axis(Y), "y": pd.Series(Y[::-1], index=Y[::-1])}, InputError, "index"),
    (fit, {"X": pd.DataFrame(X).drop(index=0), "y": pd.Series(Y).drop(index=119)}, InputError, "index"),
    (fit, {"y": np.full(120, -1)}, InputError, "none of"),
    (fit, {"y": np.arange(120)}, InputError, "classes"),
    (fit, {"unlabelled": [99]}, InputError, "unlabelled"),
    (fit, {"method": "wcn"}, (InputError, KeyError), "wcn"),
    (fit, {"method": 3}, InputError, "method"),
    (fit, {"method": "auto"}, InputError, "auto"),
    (fit, {"device": "tpu", "max_unseen_loss": 1.0}, (InputError, RuntimeError), "tpu|device"),
    *((fit, {"max_unseen_loss": value}, InputError, "max_unseen_loss") for value in (-1, float("nan"), "x")),
    *((fit, {"confidence": value}, InputError, "confidence") for value in (1.0, 0.4, None)),
    *((fit, {"unseen_share": value}, InputError, "unseen_share") for value in (1.5, "x")),
    *((fit, {"cv": value}, InputError, "cv") for value in (1, 2.5)),
    *((fit, {"n_jobs": value}, InputError, "n_jobs") for value in (0, 1.5)),
    *((fit, {"random_state": value}, InputError, "random_state") for value in (-1, None)),
    *((fit, {"strengths": value}, InputError, "strengths") for value in (0.5, (0.5, 2.0), ("a",), (float("nan"),))),
    (fit, {"method": "lda", "max_unseen_loss": 1.0, "strengths": (0,)}, InputError, "strengths"),
    (fit, {"method": "auto", "max_unseen_loss": 1.0, "candidates": "wccn"}, InputError, "candidates"),
    *((FITTED.transform, {"X": value}, *expected) for value, *expected in MATRIX),
    (FITTED.transform, {"X": WIDE}, InputError, "features"),
    (FITTED.partial_fit, {"X": WIDE, "y": Y}, InputError, "features"),
    (FITTED.partial_fit, {"X": X, "y": TEXTS}, InputError, "integers"),
    (FITTED.forget, {"X": X[:, ::-1], "y": Y}, InputError, "not fitted"),
    (EmbeddingAdapter().transform, {"X": X}, NotFittedError, "fitted"),
    (EmbeddingAdapter.load, {"path": "nowhere"}, InputError, "no such file"),
    (PairAdapter.load, {"path": "nowhere"}, InputError, "no such file"),
    (estimate_update, {"estimator": FITTED, "X": WIDE, "y": Y}, InputError, "features"),
    (estimate_update, {"estimator": FITTED_PAIRS, "X": X, "y": Y}, InputError, "EmbeddingAdapter"),
    (evaluate, {"estimator": make_pipeline(FITTED), "X": X, "y": Y}, InputError, "Pipeline"),
    (evaluate, {"estimator": FITTED_PAIRS, "X": X, "y": Y}, InputError, "evaluate_pairs"),
    (evaluate, {"estimator": FITTED, "X": WIDE, "y": Y}, InputError, "features"),
    (evaluate, {"estimator": FITTED, "X": X, "y": TEXTS}, InputError, "integers"),
    (evaluate, {"estimator": FITTED, "X": X, "y": Y, "confidence": 0}, InputError, "confidence"),
    (estimate_gain, {"X": NAN, "y": Y}, InputError, "NaN"),
    (estimate_gain, {"X": FRAME, "y": Y}, InputError, "column"),
    (estimate_gain, {"X": X, "y": Y[:-1]}, InputError, "one label per row"),
    (fit_pairs, {"queries": NAN}, InputError, "NaN"),
    (fit_pairs, {"queries": X * 0}, InputError, "norm 0"),
    (fit_pairs, {"documents": ZERO}, InputError, "documents"),
    (fit_pairs, {"documents": WIDE}, InputError, "features"),
    (fit_pairs, {"documents": np.ones_like(X)}, InputError, "documents"),
    (fit_pairs, {"pairs": PAIRS[:, :1]}, InputError, "shape"),
    (fit_pairs, {"pairs": PAIRS + [0, 1]}, InputError, "swapped"),
    (fit_pairs, {"pairs": PAIRS.astype(str)}, InputError, "match_pairs"),
    (fit_pairs, {"pairs": np.column_stack([PAIRS, 0 * Y])}, InputError, "grade"),
    (fit_pairs, {"pairs": PAIRS[:1]}, InputError, "queries"),
    (fit_pairs, {"pairs": PAIRS * [1, 0]}, InputError, "documents"),
    (fit_pairs, {"negatives": 5}, InputError, "negatives"),
    (fit_pairs, {"groups": [0, 1]}, InputError, "one label per row"),
    (fit_pairs, {"groups": 0 * Y + (Y > 5), "max_unseen_loss": 1.0, "cv": 60}, None, ""),  # too few groups: frozen
    *((fit_pairs, {"negatives": value, "side": "query"}, InputError, "pairs") for value in (0, -3)),
    (fit_pairs, {"negatives": "hard", "side": "query"}, InputError, "row numbers"),
    *((fit_pairs, {"negatives": rows, "side": "query"}, InputError, "negatives") for rows in (PAIRS[:5, ::-1], PAIRS)),
    (fit_pairs, {"side": "left"}, InputError, "side"),
    (fit_pairs, {"side": "auto"}, InputError, "side"),
    (fit_pairs, {"max_unseen_loss": -1}, InputError, "max_unseen_loss"),
    (FITTED_PAIRS.transform_queries, {"X": WIDE}, InputError, "features"),
    (evaluate_pairs, dict(estimator=FITTED, queries=X, documents=X, pairs=PAIRS), InputError, "PairAdapter"),
    (evaluate_pairs, dict(estimator=FITTED_PAIRS, queries=X, documents=WIDE, pairs=PAIRS), InputError, "features"),
    (AdaptedIndex, {"adapter": make_pipeline(FITTED)}, InputError, "adapter"),
    *((AdaptedIndex(FITTED).add, {"x": value}, InputError, word) for value, word in ((NAN, "NaN"), (WIDE, "features"))),
    *((fit_monitor, {"reference": value}, InputError, word) for value, word in ((NAN, "NaN"), (WIDE, "features"))),
    (EmbeddingSet, {"x": NAN, "y": Y}, InputError, "NaN"),
    (EmbeddingSet, {"x": X, "y": Y[:-1]}, InputError, "120"),
    (normalize, {"x": ZERO}, InputError, "norm 0"),
    (read_pack, {"path": "nowhere"}, InputError, "no such file"),
    (write_pack, {"embeddings": EmbeddingSet(X, Y), "path": "p.parquet"}, InputError, "meta"),
]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_wrong_input_is_refused(row):
    function, given, errors, word = ROWS[row]
    if errors is None:
        assert function(**given).frozen_
        return
    with pytest.raises(errors, match=word):
        function(**given)
