"""What results say of where they come from."""

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("graft_jax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def of(decoder) -> dict[str, Any]:
    return {
        "method": decoder.method,
        "model": decoder.name,
        "dtype": decoder.dtype,
        "device": device(),
        "versions": versions(),
    }


def device() -> str:
    import jax

    first = jax.devices()[0]
    return f"{first.platform} {first.device_kind} x {jax.device_count()}, {os.cpu_count()} CPU cores"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
