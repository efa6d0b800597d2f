"""The safetensors format: eight bytes of header length, a JSON header, then the numbers.

Reading is our own so that tensors come a few rows at a time, bfloat16 needs no torch, and a broken file
is refused with the tensor's name. Layout: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graft_jax.io.tensors import BFLOAT16, PLAIN_DTYPES, Descriptor, PlainTensor

_MAX_HEADER = 100_000_000


def open_file(path: Path, dtypes: Mapping[str, np.dtype] = PLAIN_DTYPES) -> dict[str, PlainTensor]:
    """The tensors of one file, by name; numbers are read later.

    Args:
        dtypes: the stored types that are welcome.

    Raises:
        ValueError: the header is broken, a tensor's dtype is unsupported, or its bytes lie outside the file.
    """
    descriptor = Descriptor(path)
    if descriptor.size < 8:
        raise ValueError(f"{path}: {descriptor.size} bytes are too few for a safetensors file")
    length = int.from_bytes(descriptor.read(0, 8).tobytes(), "little")
    if not 2 <= length <= min(_MAX_HEADER, descriptor.size - 8):
        raise ValueError(f"{path}: header length {length} does not fit a file of {descriptor.size} bytes")
    header = parse_json(descriptor.read(8, length).tobytes(), f"{path}: header")
    header.pop("__metadata__", None)
    start, tensors, spans = 8 + length, {}, []
    for name, entry in header.items():
        kind, shape, begin, end = _entry(path, name, entry, dtypes)
        size = math.prod(shape) * dtypes[kind].itemsize
        if end - begin != size:
            raise ValueError(f"{path}: tensor {name} spans {end - begin} bytes; {kind} {list(shape)} needs {size}")
        if start + end > descriptor.size:
            raise ValueError(f"{path}: the file is cut off: tensor {name} ends at byte {start + end} of "
                             f"{descriptor.size}")  # fmt: skip
        tensors[name] = PlainTensor(name, str(path), kind, shape, descriptor, start + begin)
        spans.append((begin, end, name))
    spans.sort()
    for (_, end, first), (begin, _, second) in zip(spans, spans[1:]):
        if begin < end:
            raise ValueError(f"{path}: tensors {first} and {second} overlap")
    return tensors


def _entry(path: Path, name: str, entry: Any, dtypes: Mapping[str, np.dtype]) -> tuple[str, tuple[int, ...], int, int]:
    def natural(value) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    if not isinstance(entry, dict):
        raise ValueError(f"{path}: header entry of tensor {name} must be an object, got {entry!r}")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in dtypes:
        raise ValueError(f"{path}: tensor {name} has dtype {kind!r}; supported are {', '.join(dtypes)}")
    if not isinstance(shape, list) or not all(map(natural, shape)):
        raise ValueError(f"{path}: tensor {name} has shape {shape!r}; whole numbers are needed")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(natural, offsets)):
        raise ValueError(f"{path}: tensor {name} has data_offsets {offsets!r}; [begin, end] is needed")
    return kind, tuple(shape), offsets[0], offsets[1]


def open_folder(folder: Path, index: Path, dtypes: Mapping[str, np.dtype] = PLAIN_DTYPES) -> dict[str, PlainTensor]:
    """The tensors of all shards that an index file lists."""
    tensors: dict[str, PlainTensor] = {}
    for file, names in shards(folder, index).items():
        found = open_file(folder / file, dtypes)
        for name in names:
            if name not in found:
                raise ValueError(f"{folder / file}: tensor {name} is missing, though {index.name} names it")
        extra = sorted(set(found) - set(names))
        if extra:
            raise ValueError(f"{folder / file}: tensors that {index.name} does not place here: {extra[:8]}")
        tensors |= found
    return tensors


def shards(folder: Path, index: Path) -> dict[str, list[str]]:
    """File name -> tensor names, from the index of a sharded checkpoint.

    Raises:
        ValueError: the index is broken or names a file that is not there.
    """
    weight_map = parse_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: key 'weight_map' must be an object of tensor -> file, got {weight_map!r}")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"{index}: tensor {name} lies in {file!r}, which is no plain file name")
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        if not (folder / file).is_file():
            raise ValueError(f"{index}: names the shard {file} (for {names[0]}), which is not in the folder")
    return files


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object, or a ValueError that names `where`."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got a {type(value).__name__}")
    return value


def write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype,
               tensor: Callable[[str], np.ndarray]) -> None:  # fmt: skip
    """Writes one file, asking for one tensor at a time.

    Args:
        shapes: name -> shape, in the order of writing.
        dtype: of every tensor.
        tensor: name -> array of that shape and dtype.
    """
    kind = next(kind for kind, plain in PLAIN_DTYPES.items() if plain == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without a format
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            array = np.ascontiguousarray(tensor(name))
            assert array.shape == shape and array.dtype == dtype, (name, array.shape, array.dtype)
            file.write((array.view(np.uint16) if dtype == BFLOAT16 else array).data)
        file.flush()
        os.fsync(file.fileno())


def write_folder(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype,
                 tensor: Callable[[str], np.ndarray], shard_bytes: int) -> None:  # fmt: skip
    """Writes `model.safetensors`, or shards of at most `shard_bytes` (or one tensor) and their index."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        count = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + count > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += count
    if len(groups) == 1:
        return write_file(folder / "model.safetensors", shapes, dtype, tensor)
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / file, group, dtype, tensor)
        weight_map |= dict.fromkeys(group, file)
    total = sum(_bytes(shapes.values(), dtype))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _bytes(shapes: Iterable[tuple[int, ...]], dtype: np.dtype) -> Iterable[int]:
    return (math.prod(shape) * dtype.itemsize for shape in shapes)
