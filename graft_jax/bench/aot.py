"""Lowering and compiling for an H100 or H200 or a TPU on a machine that has neither.

`lower` needs jax alone. To compile needs the platform's compiler: libtpu, or the CUDA plugin with ptxas and
libdevice (`make test-portability` installs both in a folder of its own); say where through `use_compilers` before
JAX is first used.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

GPU, TPU_V5E, TPU_V6E = "sm_90", "v5e", "v6e"
_KINDS = {GPU: "NVIDIA H100", TPU_V5E: "TPU v5 lite", TPU_V6E: "TPU v6 lite"}
TARGETS = tuple(_KINDS)


def platform(target: str) -> str:
    """What JAX calls the target's platform when it lowers."""
    return "cuda" if target == GPU else "tpu"


def use_compilers(folder: str | Path) -> None:
    """Finds the CUDA plugin, its tools and libtpu in a folder of wheels. Must come before JAX starts a backend."""
    folder = Path(folder).resolve()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there is no driver to ask
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nor a TPU's metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip that two processes could fight for
    os.environ.setdefault("TPU_LIBRARY_PATH", str(folder / "libtpu" / "libtpu.so"))
    for tools in sorted(folder.glob("nvidia/cu*")):
        os.environ["PATH"] = f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        os.environ.setdefault("CUDA_ROOT", str(tools))
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={tools}".strip()
    sys.path.append(str(folder))


@contextlib.contextmanager
def _described(target: str) -> Iterator[None]:
    """Newer versions of JAX ask the mesh what device a Pallas kernel is lowered for."""
    kind, is_gpu = _KINDS[target], target == GPU
    device = AbstractDevice(device_kind=kind, num_cores=None if is_gpu else 1, platform="gpu" if is_gpu else "tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)):
        yield


@functools.cache
def device(target: str) -> Any:
    """A device to compile for, described by the platform's compiler."""
    if target == GPU:
        described = (Path(__file__).parent / "gpu_sm90.txtpb").read_text()
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="one", topology="1x1x1", target_config=described
        )
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{target}:2x2")
    return topology.devices[0]


def lower(function: Callable, *args: Any, target: str, compiles: bool = False, **options: Any) -> Any:
    """`jax.jit(function, **options)` lowered for a target.

    Args:
        args: arrays or `jax.ShapeDtypeStruct`s.
        compiles: whether `.compile()` will be called on the result: it needs the platform's compiler, here already.
    """
    if compiles:
        place = NamedSharding(Mesh(np.array([device(target)]), ("x",)), PartitionSpec())
        options = {"in_shardings": place, "out_shardings": place, **options}
    with _described(target):
        return jax.jit(function, **options).trace(*args).lower(lowering_platforms=(platform(target),))
