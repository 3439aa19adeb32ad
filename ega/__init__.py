"""Adapt a frozen encoder for vector search without breaking the classes it has not seen."""

__version__ = "0.1.0"

_MODULE_OF = {
    "InputError": "arrays",
    "normalize": "arrays",
    "EmbeddingSet": "packs",
    "read_pack": "packs",
    "write_pack": "packs",
    "evaluate": "evaluation",
    "EmbeddingAdapter": "estimator",
    "AdaptedIndex": "index",
    "Monitor": "monitor",
}


def __getattr__(name):
    "Load a public name when it is first used, so that `import ega` itself loads no torch."
    from importlib import import_module

    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ega' has no attribute {name!r}")
    return getattr(import_module(f"ega.{_MODULE_OF[name]}"), name)


def __dir__():
    return sorted([*globals(), *_MODULE_OF])
