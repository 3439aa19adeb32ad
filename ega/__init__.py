"""Adapt a frozen encoder for vector search without breaking the classes it has not seen."""
__version__ = "0.1.0"

_HOMES = {
    "core": ("normalize", "encode_labels", "streams", "InputError"),
    "data": ("EmbeddingSet", "read_pack", "write_pack"),
    "estimator": ("EGA",),
}


def __getattr__(name):
    "Names of the modules above, loaded when first used: `import ega` itself stays instant."
    from importlib import import_module
    for module, names in _HOMES.items():
        if name in names: return getattr(import_module(f"ega.{module}"), name)
    raise AttributeError(f"module 'ega' has no attribute {name!r}")


def __dir__(): return sorted([*globals(), *(n for names in _HOMES.values() for n in names)])
