"""Adapt a frozen encoder for vector search without breaking the classes it has not seen."""

from typing import TYPE_CHECKING

__version__ = "0.2.0"
__all__ = [
    "AdaptedIndex",
    "EmbeddingAdapter",
    "EmbeddingSet",
    "InputError",
    "Monitor",
    "PairAdapter",
    "estimate_gain",
    "evaluate",
    "normalize",
    "read_matrix",
    "read_pack",
    "transform_file",
    "write_pack",
]

if TYPE_CHECKING:  # editors and type checkers see the names; nothing is imported at run time
    from .data.arrays import InputError, normalize
    from .estimator import EmbeddingAdapter
    from .measure.evaluation import evaluate
    from .gain import estimate_gain
    from .pairs import PairAdapter
    from .deploy.index import AdaptedIndex
    from .deploy.monitor import Monitor
    from .data.packs import EmbeddingSet, read_pack, write_pack
    from .data.vectors import read_matrix
    from .deploy.transform import transform_file

_MODULE_OF = {
    "AdaptedIndex": "deploy.index",
    "EmbeddingAdapter": "estimator",
    "EmbeddingSet": "data.packs",
    "InputError": "data.arrays",
    "Monitor": "deploy.monitor",
    "PairAdapter": "pairs",
    "estimate_gain": "gain",
    "evaluate": "measure.evaluation",
    "normalize": "data.arrays",
    "read_matrix": "data.vectors",
    "read_pack": "data.packs",
    "transform_file": "deploy.transform",
    "write_pack": "data.packs",
}


def __getattr__(name):
    "Load a public name when it is first used, so that `import ega` itself loads no torch."
    from importlib import import_module

    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ega' has no attribute {name!r}")
    return getattr(import_module(f"ega.{_MODULE_OF[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
