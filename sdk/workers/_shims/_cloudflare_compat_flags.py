"""The compatibility flags of the running worker as attributes: True if it has the flag."""

from workers import _runtime


def __getattr__(name: str) -> bool:
    if name.startswith("__"):
        raise AttributeError(name)
    return name in getattr(_runtime.runtime, "compatibility_flags", ())
