"""Does a method's whole round lower and compile for a GPU and a TPU, and what do their compilers say of it?

Weights are abstract: shapes of published targets and drafters, no chip and no checkpoint.
"""

import dataclasses
import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from graft_jax import decode, methods, sampling
from graft_jax.bench import aot
from graft_jax.config import ModelConfig
from graft_jax.decode import MAX_STOP_TOKENS, DecodeSpec
from graft_jax.drafters.base import Params
from graft_jax.models import dflash, eagle3, transformer
from graft_jax.models.dflash_config import DFlashConfig, DominoConfig
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.tree import structure
from graft_jax.tree.structure import DraftTree
from pallas_kernels import dispatch

DTYPE = "bfloat16"
MAX_LENGTH = 2048  # tokens of a row, as the engine has it
# An 8B target with a drafter is larger than a v5e's 16 GB.
TPU_OF = {"qwen3-4b": aot.TPU_V5E, "llama-3.1-8b": aot.TPU_V6E}
MODELS = tuple(TPU_OF)
FUNCTIONS = ("decode_step", "run")
_HOST = re.compile(r"callback|send_to_host|recv_from_host|stablehlo\.(send|recv|infeed|outfeed)", re.IGNORECASE)
_CALL = re.compile(r"custom_call @([\w$.]+)")
_PALLAS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A method on a target's shapes, for a chip."""

    method: str
    model: str
    target: str

    def __str__(self) -> str:
        return f"{self.method}-{self.model}-{self.target}"


def cases(configs: Path) -> list[Case]:
    """Every method that exists, on every model for which the drafter that it needs is published."""
    return [
        Case(name, model, target)
        for model in MODELS
        for target in (aot.GPU, TPU_OF[model])
        for name in methods.METHODS
        if available(configs, name, model)
    ]


def verify_cases(configs: Path) -> list[Case]:
    """One case for each size of a verify pass, by model, target, rows and taps."""
    sizes = {}
    for case in cases(configs):
        drafter = build(configs, case.method, case.model)[0].drafter
        sizes.setdefault((case.model, case.target, drafter.capacity, drafter.taps), case)
    return list(sizes.values())


def _published(configs: Path, kind: str, model: str) -> Path | None:
    path = configs / "drafters" / f"{kind}-{model}.json"
    return path if path.exists() else None


def available(configs: Path, method: str, model: str) -> bool:
    """Whether a drafter that the method needs is published for the model."""
    return not methods.get(method).heads or _head(configs, method, model) is not None


def _head(configs: Path, method: str, model: str) -> str | None:
    """The first kind of head that the method takes and that is published for the model."""
    return next((kind for kind in methods.get(method).heads if _published(configs, kind, model)), None)


def read_model(configs: Path, name: str) -> ModelConfig:
    path = configs / "models" / f"{name}.json"
    return ModelConfig.from_hf(json.loads(path.read_text()), where=str(path))


def shrunk(config: ModelConfig) -> ModelConfig:
    """A model of the same kind, small enough for any machine."""
    return dataclasses.replace(
        config, vocab_size=640, num_tokens=0, hidden_size=64, intermediate_size=128, num_layers=6, num_heads=4,
        num_kv_heads=2, head_dim=16, eos_token_ids=(),
    )  # fmt: skip


def read_drafter(configs: Path, kind: str, name: str, model: ModelConfig, small: bool) -> tuple[Any, Any]:
    """Configuration and abstract weights of the published drafter of that kind, or of a small one."""
    path = configs / "drafters" / f"{kind}-{name}.json"
    raw = json.loads(path.read_text())
    if kind != "eagle3":
        head = DominoConfig(gru_size=64, rank=16, prefix=1, shift=True) if kind == "domino" else None
        config = (
            DFlashConfig.for_target(model, num_layers=2, block_size=8, mask_token_id=0, domino=head) if small
            else DFlashConfig.from_hf(raw, model, where=str(path))
        )  # fmt: skip
        return config, dflash.abstract_params(config, DTYPE)
    if small:
        config = Eagle3Config.for_target(model, draft_vocab_size=320)
    else:
        # The head's width is read off a tensor of the checkpoint, which is not here.
        width = raw["num_attention_heads"] * raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        shapes = {"midlayer.self_attn.q_proj.weight": (width, 2 * raw["hidden_size"])}
        config = Eagle3Config.from_hf(raw, model, shapes=shapes, where=str(path))
    return config, eagle3.abstract_params(config, DTYPE)


def build(
    configs: Path, method: str, model: str, *, small: bool = False, **options: Any
) -> tuple[DecodeSpec, Params, tuple[float, ...]]:
    """What the engine would run on an accelerator.

    Args:
        small: the same composition over a small model.
        options: of `methods.Options`.

    Returns:
        The spec, parameters as shapes, and the thresholds of the gates.
    """
    config, chosen = read_model(configs, model), methods.get(method)
    config = shrunk(config) if small else config
    kind = _head(configs, method, model)
    head = (None, None) if kind is None else read_drafter(configs, kind, model, config, small)
    context = methods.Context(config, head[0], small=small, attention_block=0, cache_dtype=DTYPE)
    built = chosen.build(context, methods.Options(**options))
    length = 256 if small else MAX_LENGTH
    spec = DecodeSpec(config, built.drafter, length, (), 0, DTYPE)
    thresholds = jax.ShapeDtypeStruct((len(built.thresholds),), jnp.float32)
    return spec, Params(transformer.abstract_params(config, DTYPE), head[1], thresholds), built.thresholds


def abstract_state(spec: DecodeSpec, params: Params, batch: int = 1) -> decode.DecodeState:
    """The state of a batch before its prefill, as shapes."""

    def init(params, settings):
        count, tokens = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, spec.cache_size), jnp.int32)
        stops = jnp.zeros(MAX_STOP_TOKENS, jnp.int32)
        return decode.init_state(spec, params, tokens, count, count, count, stops, settings)

    return jax.eval_shape(init, params, sampling.make([0] * batch))


def verify_pass(spec: DecodeSpec, params: Params, state: decode.DecodeState, tree: DraftTree) -> Any:
    """The target's pass over a whole tree and its head, alone: what a round cannot do without."""
    mask = structure.ancestor_mask(tree.parents, spec.drafter.max_depth)
    positions = state.length[:, None] + tree.depth
    out = transformer.forward(
        spec.model, params.target, tree.tokens, positions, mask, state.cache, state.length, spec.drafter.taps
    )
    return transformer.logits(spec.model, params.target, out.hidden), out.block


def abstract_tree(spec: DecodeSpec, batch: int = 1) -> DraftTree:
    """A tree of the drafter's capacity, as shapes."""
    root = jnp.zeros(batch, jnp.int32)
    K = spec.drafter.capacity
    return jax.eval_shape(lambda: structure.chain(root, jnp.zeros((batch, K), jnp.int32), root))


def programs(spec: DecodeSpec, params: Params) -> dict[str, tuple[Any, tuple, tuple[int, ...]]]:
    """Function, arguments and donated ones of `FUNCTIONS` and of the verify pass."""
    state, rounds = abstract_state(spec, params), jax.ShapeDtypeStruct((), jnp.int32)
    bound = functools.partial
    return {
        "decode_step": (bound(decode.decode_step, spec), (params, state), (1,)),
        "run": (bound(decode.run, spec), (params, state, rounds), (1,)),
        "verify": (bound(verify_pass, spec), (params, state, abstract_tree(spec)), ()),
    }


def inspect(text: str, target: str, chosen: dict[str, dict[str, str]]) -> dict[str, Any]:
    """What a lowered module says: host calls, and which of the kernels chosen for the platform it holds.

    Args:
        chosen: of `dispatch.recording`.
    """
    platform = aot.platform(target)
    wanted = dispatch.chosen_for(platform, chosen)
    calls = _CALL.findall(text)
    return {
        "host_calls": sorted({found.group(0) for found in _HOST.finditer("\n".join([*calls, text]))}),
        "kernels": wanted,
        "kernels_found": sorted(name for name in wanted if _PALLAS[platform] in calls and f'"{name}"' in text),
        "custom_calls": {name: calls.count(name) for name in sorted(set(calls))},
    }


def measure(configs: Path, case: Case, function: str, *, compiles: bool = True) -> dict[str, Any]:
    """Lowers a function of a case, compiles it, and collects what is known of it.

    Args:
        function: a name of `programs`.
        compiles: False only lowers.

    Returns:
        A record for JSON. Bytes and operations are None where the compiler does not say.
    """
    spec, params, _ = build(configs, case.method, case.model)
    run, args, donated = programs(spec, params)[function]
    start = time.perf_counter()
    with dispatch.recording() as chosen:
        lowered = aot.lower(run, *args, target=case.target, compiles=compiles, donate_argnums=donated)
    record = {
        **dataclasses.asdict(case), "function": function, "jax": jax.__version__, "rows": spec.drafter.capacity + 1,
        "max_length": MAX_LENGTH,
        "cache_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args[1].cache)),
        "lower_seconds": time.perf_counter() - start,
        **inspect(lowered.as_text(), case.target, chosen),
    }  # fmt: skip
    if not compiles:
        return record
    start = time.perf_counter()
    compiled = lowered.compile()
    record["compile_seconds"] = time.perf_counter() - start
    memory = compiled.memory_analysis()
    for name in ("argument", "output", "alias", "temp", "generated_code"):
        record[f"{name}_bytes"] = getattr(memory, f"{name}_size_in_bytes", None)
    cost = compiled.cost_analysis() or {}
    return {**record, "flops": cost.get("flops"), "bytes": cost.get("bytes accessed")}
