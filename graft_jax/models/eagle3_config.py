"""The configuration of an EAGLE-3 head, in the two formats that are about."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from graft_jax.config import OFF_VALUES, ModelConfig, Reader, RopeConfig, read_rope, refuse_mismatch, rope_to_hf

_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 draft head: fc over target features, one double-width decoder layer, a reduced vocabulary.

    Attributes:
        hidden_size: M, of the head.
        target_hidden_size: width of each tapped feature.
        vocab_size: the target's; `draft_vocab_size` tokens of it can be drafted.
        taps: target layers whose inputs are the features (`transformer.forward` counts alike).
        qk_norm: query and key norms (heads built on a Qwen3 layer).
        norm_before_residual: the layer's residual is the normed hidden state.
        norm_before_fc: one norm over the concatenated features.
        fc_norm: a norm over each feature (EAGLE-3.1); excludes the one above.
        recurse_normed: the next step receives the normed output (EAGLE-3.1's `norm_output`).
        layout: "eagle" (the reference, SpecForge, AngelSlim) or "speculators", for saving.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    max_position: int = 2048
    rope: RopeConfig = RopeConfig()
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    recurse_normed: bool = False
    layout: Literal["eagle", "speculators"] = "eagle"

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
                     "draft_vocab_size", "target_hidden_size"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be divisible by num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, for rope turns pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} is above vocab_size={self.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if not self.taps:
            raise ValueError("an EAGLE-3 head needs at least one target feature")

    @property
    def kind(self) -> Literal["eagle3"]:
        return "eagle3"

    @classmethod
    def for_target(cls, target: ModelConfig, **sizes: Any) -> "Eagle3Config":
        """A new head for a target: its widths and heads unless `sizes` say otherwise."""
        return cls(**{
            "hidden_size": target.hidden_size, "intermediate_size": target.intermediate_size,
            "num_heads": target.num_heads, "num_kv_heads": target.num_kv_heads, "head_dim": target.head_dim,
            "vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size, "taps": default_taps(target.num_layers),
            "rms_norm_eps": target.rms_norm_eps, "max_position": target.max_position,
            "rope": RopeConfig(theta=target.rope.theta), **sizes,
        })  # fmt: skip

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        target: ModelConfig,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        rope: str | int | float = "auto",
        where: str = "config.json",
    ) -> "Eagle3Config":
        """Reads a head's `config.json`.

        Args:
            config: the parsed JSON object.
            target: the model that it drafts for; must have the same vocabulary and width.
            shapes: stored shapes of the checkpoint's tensors, for what configs leave out or get wrong.
            rope: base of the rotary frequencies. "auto" takes the config's `rope_theta`, or 10000 where it has
                none, as the reference does; "config" insists on the config's; a number is taken as it is. The
                reference and AngelSlim trained every head with 10000, whatever their configs say, and older
                SpecForge ones too: where a head accepts little, try 10000.
            where: the file, for messages.

        Raises:
            ValueError: a key is missing, unknown, of a wrong type, or does not fit the target.
        """
        nested = "transformer_layer_config" in config
        outer = Reader(config, where)
        inner = outer
        if nested:
            inner = Reader(outer.take("transformer_layer_config", dict), f"{where}: transformer_layer_config")
            kind = outer.take("speculators_model_type", str, "eagle3")
            if kind != "eagle3":
                raise ValueError(f"{where}: speculators_model_type {kind!r} is not an EAGLE-3 head")
            for key in ("speculators_config", "speculators_version", "embed_requires_grad", "has_no_defaults_at_init"):
                outer.take(key, object, None)
        family = inner.take("model_type", str, "llama")
        if family not in ("llama", "qwen3", "qwen2"):
            raise ValueError(f"{inner.where}: model_type {family!r} is not supported for an EAGLE-3 head")
        layers = inner.take("num_hidden_layers", int, 1)
        if layers != 1:
            raise ValueError(f"{inner.where}: num_hidden_layers={layers}; EAGLE-3 heads of one layer are supported")
        for key, allowed in {**OFF_VALUES, "attention_bias": (False, None), "mlp_bias": (False, None)}.items():
            if inner.take(key, object, None) not in allowed:
                raise ValueError(f"{inner.where}: {key}={inner.config[key]!r} is not supported")
        for key in ("sliding_window", "use_sliding_window", "layer_types"):
            value = inner.take(key, object, None)
            if key == "layer_types" and any(layer != "full_attention" for layer in value or ()):
                raise ValueError(f"{inner.where}: {key}={value!r} is not supported")
        if inner.take("use_sliding_window", object, False):
            raise ValueError(f"{inner.where}: use_sliding_window is not supported")
        for key in ("tie_word_embeddings", "eos_token_id", "is_causal"):  # a head always stores its own rows
            inner.take(key, object, None)
            outer.take(key, object, None)
        activation = inner.take("hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"{inner.where}: hidden_act {activation!r} is not supported; only 'silu' is")

        heads = inner.take("num_attention_heads", int)
        hidden = inner.take("hidden_size", int)
        max_position = inner.take("max_position_embeddings", int, 2048)
        vocab = inner.take("vocab_size", int)
        draft_vocab = outer.take("draft_vocab_size", int, vocab)
        flags = {flag: outer.take(flag, bool, None) for flag in _FLAGS}
        block = Reader(outer.take("eagle_config", dict, {}), f"{where}: eagle_config")
        for flag in _FLAGS:
            flags[flag] = block.take(flag, bool, flags[flag])
        block.take("use_aux_hidden_state", bool, True)
        taps = _taps(outer, block, target.num_layers)
        theta = _theta(inner, rope)
        found_rope = read_rope(inner, max_position)
        settings: dict[str, Any] = dict(
            hidden_size=hidden,
            intermediate_size=inner.take("intermediate_size", int),
            num_heads=heads,
            num_kv_heads=inner.take("num_key_value_heads", int, heads),
            head_dim=_head_dim(inner, heads, shapes),
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            target_hidden_size=outer.take("target_hidden_size", int, None) or hidden,
            taps=taps,
            rms_norm_eps=inner.number("rms_norm_eps", 1e-6),
            max_position=max_position,
            rope=dataclasses.replace(found_rope, theta=theta),
            qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in shapes),
            norm_before_residual=bool(flags["norm_before_residual"]),
            norm_before_fc=bool(flags["norm_before_fc"]),
            fc_norm=bool(flags["fc_norm"]),
            recurse_normed=_recursion(flags, nested, where),
            layout="speculators" if nested else "eagle",
        )
        for reader in {id(r): r for r in (outer, inner, block)}.values():
            reader.finish(strict=True)
        try:
            found = cls(**settings)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        found.check_target(target, where)
        return found

    def check_target(self, target: ModelConfig, where: str) -> None:
        """Refuses a target that the head was not made for, with both numbers."""
        refuse_mismatch(
            where,
            ("target width", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` object in the head's own layout."""
        layer = {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim, "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps, "max_position_embeddings": self.max_position,
            "rope_theta": self.rope.theta, "rope_scaling": rope_to_hf(self.rope), "vocab_size": self.vocab_size,
        }  # fmt: skip
        sizes = {"draft_vocab_size": self.draft_vocab_size, "target_hidden_size": self.target_hidden_size}
        flags = dict(norm_before_residual=self.norm_before_residual, norm_before_fc=self.norm_before_fc,
                     fc_norm=self.fc_norm)  # fmt: skip
        if self.layout == "speculators":
            return {
                "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
                "transformer_layer_config": layer, **sizes, **flags, "norm_output": self.recurse_normed,
                _IDS: list(self.taps),
            }  # fmt: skip
        if self.recurse_normed:
            flags["norm_output"] = True
        block = {_IDS: [tap - 1 for tap in self.taps], "use_aux_hidden_state": True}
        on = {name: value for name, value in flags.items() if value}
        return {
            "architectures": ["LlamaForCausalLMEagle3"], **layer, "tie_word_embeddings": False, **sizes, **on,
            "eagle_config": block,
        }  # fmt: skip


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The reference's features: the inputs of layers 2, L // 2 and L - 3 (`modeling_llama_kv.py`)."""
    if num_layers < 5:
        return (1, num_layers // 2, num_layers - 1)  # too shallow for the rule: early, middle, late
    return (2, num_layers // 2, num_layers - 3)


def _taps(outer: Reader, block: Reader, num_layers: int) -> tuple[int, ...]:
    """Feature layers. Speculators' ids count layer inputs; SpecForge's, in `eagle_config`, count layer outputs.

    Either list is also known by its numbers where it is the standard one of the other counting.
    """
    plain, nested = outer.take(_IDS, list, None), block.take(_IDS, list, None)
    if plain is None and nested is None:
        return default_taps(num_layers)
    ids = plain if plain is not None else nested
    where = f"{(outer if plain is not None else block).where}: {_IDS}={ids!r}"
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{where} must be a list of layer numbers")
    standard = default_taps(num_layers)
    is_input = tuple(ids) == standard or (plain is not None and tuple(i + 1 for i in ids) != standard)
    taps = tuple(ids) if is_input else tuple(i + 1 for i in ids)
    if max(taps) >= num_layers:
        raise ValueError(f"{where} names layer {max(ids)}, but the target has {num_layers} layers")
    return taps


def _theta(inner: Reader, rope: str | int | float) -> float:
    if rope in ("auto", "config"):
        scaling = inner.config.get("rope_parameters") or inner.config.get("rope_scaling") or {}
        stated = inner.config.get("rope_theta", scaling.get("rope_theta") if isinstance(scaling, dict) else None)
        if stated is None and rope == "config":
            raise ValueError(f"{inner.where}: draft_rope='config', but there is no rope_theta")
        return 10000.0 if stated is None else Reader({"rope_theta": stated}, inner.where).number("rope_theta")
    try:
        theta = float(rope)
    except ValueError:
        theta = 0.0
    if not 1 < theta < float("inf"):
        raise ValueError(f"draft_rope={rope!r} must be 'auto', 'config' or a number above 1")
    return theta


def _head_dim(inner: Reader, heads: int, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """From q_proj, which never lies, checked against the config where that says something."""
    stated = inner.take("head_dim", int, None)
    rows = next((shape[0] for name, shape in shapes.items() if name.endswith("self_attn.q_proj.weight")), None)
    if rows is None or heads < 1:
        raise ValueError(f"{inner.where}: the checkpoint has no q_proj.weight to go with {heads} heads")
    if rows % heads:
        raise ValueError(f"{inner.where}: q_proj has {rows} rows, which {heads} heads do not divide")
    if stated is not None and stated != rows // heads:
        raise ValueError(f"{inner.where}: head_dim={stated}, but q_proj has {rows} rows for {heads} heads")
    return rows // heads


def _recursion(flags: Mapping[str, Any], nested: bool, where: str) -> bool:
    """Whether the normed output recurses. In the flat format `norm_output` has two meanings."""
    output = flags["norm_output"]
    if nested or output is None:
        return bool(output)
    if output and not flags["fc_norm"]:
        return False  # SpecForge writes true everywhere: "logits see the final norm", as they always do
    warnings.warn(
        f"{where}: norm_output={output} is read as EAGLE-3.1 defines it (the "
        f"{'normed' if output else 'plain'} output recurses); SpecForge means something else by it",
        stacklevel=3,
    )
    return bool(output)
