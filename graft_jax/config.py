"""Model and rope settings: frozen, validated, read from Hugging Face `config.json`.

Keys that change the computation are handled or refused by name and value; known inert keys pass;
any other key warns once, or is an error when `strict`.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")

# Keys that do not change what a forward pass computes.
_INERT = frozenset(
    """
    _name_or_path architectures auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward diversity_penalty do_sample dtype early_stopping finetuning_task
    gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder is_llama_config
    keys_to_ignore_at_inference label2id length_penalty max_length max_window_layers min_length
    name_or_path no_repeat_ngram_size num_beams num_return_sequences output_attentions
    output_hidden_states pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict sep_token_id task_specific_params temperature
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_cache
    """.split()
)
# Keys of which only one value means "this feature is off"; anything else is refused.
OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "attention_dropout": (0, 0.0, None),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "logits_scaling": (1, 1.0, None),
    "attention_multiplier": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "quantization_config": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: one of `ROPE_KINDS`.
        theta: base of the frequencies.
        factor: context extension factor (linear, llama3, yarn).
        original_max_position: context length before extension, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's wavelength bounds.
        beta_fast, beta_slow: yarn's rotation bounds.
        attention_factor: yarn's multiplier of cos and sin; None computes it from `factor`.
        mscale, mscale_all_dim: yarn's alternative attention factor; None means absent.
        truncate: yarn rounds its two bounds outwards to whole dimensions.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope_type {self.kind!r} is not supported; use one of {ROPE_KINDS}")
        if not self.theta > 1:
            raise ValueError(f"rope_theta={self.theta!r} must be a number above 1")
        if self.kind != "default" and not self.factor > 0:
            raise ValueError(f"rope factor={self.factor!r} must be a number above 0")
        if self.kind in ("llama3", "yarn") and self.original_max_position <= 0:
            raise ValueError(
                f"rope_type {self.kind!r} needs original_max_position_embeddings above 0, "
                f"got {self.original_max_position!r}"
            )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"rope high_freq_factor={self.high_freq_factor!r} must be above "
                f"low_freq_factor={self.low_freq_factor!r}"
            )
        if self.kind == "yarn" and not min(self.beta_fast, self.beta_slow) > 0:
            raise ValueError(f"rope beta_fast={self.beta_fast!r} and beta_slow={self.beta_slow!r} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only target model of the llama, qwen2 or qwen3 (dense) family.

    Attributes:
        model_type: the family, as in `config.json`.
        num_tokens: ids at or above it are padding rows of the embedding and are never emitted;
            `vocab_size` unless a tokenizer says less.
        eos_token_ids: ids that end a text.
        qk_norm: RMS norm of each query and key head before rope (qwen3).
        qkv_bias, o_bias, mlp_bias: which linear layers carry a bias.
        The other fields are the sizes that `config.json` names.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position: int = 2048
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    num_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type {self.model_type!r} is not supported; use one of {FAMILIES}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_position"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if not 0 <= self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps} must be a number from 0 to 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be divisible by num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, for rope turns pairs")
        if not self.num_tokens:
            object.__setattr__(self, "num_tokens", self.vocab_size)
        if not 0 < self.num_tokens <= self.vocab_size:
            raise ValueError(f"num_tokens={self.num_tokens} must be between 1 and vocab_size={self.vocab_size}")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"eos_token_id {token} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, strict: bool = False, where: str = "config.json") -> "ModelConfig":
        """Reads a Hugging Face `config.json`.

        Args:
            config: the parsed JSON object.
            strict: unknown keys are an error instead of a warning.
            where: the file, for messages.

        Raises:
            ValueError: a key is missing, has a wrong type, or asks for something unsupported.
        """
        reader = Reader(config, where)
        family = reader.take("model_type", str)
        if family not in FAMILIES:
            raise ValueError(f"{where}: model_type {family!r} is not supported; use one of {FAMILIES}")
        hidden = reader.take("hidden_size", int)
        heads = reader.take("num_attention_heads", int)
        max_position = reader.take("max_position_embeddings", int, 2048)
        activation = reader.take("hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"{where}: hidden_act {activation!r} is not supported; only 'silu' is")
        attention_bias = reader.take("attention_bias", bool, family == "qwen2")
        sliding_window = reader.take("sliding_window", (int, type(None)), None)
        # Only the qwen families carry a switch; a llama config with a window means it.
        windowed = reader.take("use_sliding_window", bool, family == "llama" and sliding_window is not None)
        layer_types = reader.take("layer_types", (list, type(None)), None) or []
        if windowed or any(kind != "full_attention" for kind in layer_types):
            raise ValueError(
                f"{where}: sliding_window={sliding_window} is in use and not supported; only full attention is"
            )
        eos = reader.take("eos_token_id", (int, list, type(None)), None)
        eos = [eos] if isinstance(eos, int) else eos or []
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in eos):
            raise ValueError(f"{where}: eos_token_id={eos!r} must be a whole number or a list of them")
        for key, allowed in OFF_VALUES.items():
            value = reader.take(key, object, None)
            if value not in allowed:
                raise ValueError(f"{where}: {key}={value!r} is not supported")
        settings: dict[str, Any] = dict(
            model_type=family,
            vocab_size=reader.take("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=reader.take("intermediate_size", int),
            num_layers=reader.take("num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=reader.take("num_key_value_heads", (int, type(None)), None) or heads,
            head_dim=reader.take("head_dim", (int, type(None)), None)
            or (128 if family == "qwen3" else hidden // max(heads, 1)),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            max_position=max_position,
            rope=read_rope(reader, max_position),
            tie_embeddings=reader.take("tie_word_embeddings", bool, False),
            qk_norm=family == "qwen3",
            qkv_bias=attention_bias,
            o_bias=attention_bias and family != "qwen2",
            mlp_bias=reader.take("mlp_bias", bool, False),
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )
        reader.finish(strict)
        try:
            return cls(**settings)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` object of this model."""
        scaling = rope_to_hf(self.rope)
        architectures = {
            "llama": "LlamaForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
        }
        return {
            "architectures": [architectures[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope.theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": self.tie_embeddings,
            **({} if self.model_type == "qwen2" else {"attention_bias": self.qkv_bias}),
            **({"mlp_bias": self.mlp_bias} if self.model_type == "llama" else {}),
            "eos_token_id": list(self.eos_token_ids) or None,
        }


def refuse_mismatch(where: str, *sizes: tuple[str, int, int]) -> None:
    """Refuses a target that a drafter was not made for, with both numbers.

    Args:
        sizes: name, the drafter's number, the target's.
    """
    for name, ours, theirs in sizes:
        if ours != theirs:
            raise ValueError(f"{where}: the drafter is made for {name} {ours}, but the target has {theirs}")


class Reader:
    """Takes keys out of a config with type checks, and knows which were left.

    null counts as absent where a key has a default.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "config.json"):
        self.config, self.where, self.taken = config, where, set()

    def take(self, key: str, types: Any, *default: Any) -> Any:
        self.taken.add(key)
        if key not in self.config:
            if not default:
                raise ValueError(f"{self.where}: key {key!r} is missing")
            return default[0]
        value = self.config[key]
        allowed = types if isinstance(types, tuple) else (types,)
        is_bool_for_number = isinstance(value, bool) and bool not in allowed and object not in allowed
        if value is None and default:
            return default[0]
        if is_bool_for_number or not isinstance(value, allowed):
            names = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
            raise ValueError(f"{self.where}: {key}={value!r} must be {names}")
        return value

    def number(self, key: str, *default: Any) -> Any:
        """A finite number as float."""
        value = self.take(key, (int, float), *default)
        if value is None:
            return None
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise ValueError(f"{self.where}: {key}={value!r} must be a finite number")
        return found

    def finish(self, strict: bool) -> None:
        unknown = sorted(set(self.config) - self.taken - _INERT)
        if unknown and strict:
            raise ValueError(f"{self.where}: unknown keys {unknown}")
        if unknown:
            warnings.warn(f"{self.where}: unknown keys {unknown} are ignored", stacklevel=4)


def read_rope(reader: Reader, max_position: int) -> RopeConfig:
    """Reads rope from `rope_theta` + `rope_scaling`, or from transformers 5's `rope_parameters`."""
    theta = reader.number("rope_theta", None)
    old = reader.take("rope_scaling", (dict, type(None)), None)
    new = reader.take("rope_parameters", (dict, type(None)), None)
    if old and new and old != new:
        raise ValueError(f"{reader.where}: rope_scaling={old!r} and rope_parameters={new!r} differ")
    where = f"{reader.where}: " + ("rope_parameters" if new else "rope_scaling")
    inner = Reader(new or old or {}, where)
    kinds = [inner.take(key, str, None) for key in ("rope_type", "type")]
    kind = next((kind for kind in kinds if kind), "default")
    if kind not in ROPE_KINDS:
        raise ValueError(f"{where}: rope_type {kind!r} is not supported; use one of {ROPE_KINDS}")
    if inner.number("partial_rotary_factor", 1.0) != 1:
        raise ValueError(f"{where}: partial_rotary_factor={inner.config['partial_rotary_factor']!r} is not supported")
    numbers = {
        key: inner.number(key, None)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                    "attention_factor", "mscale", "mscale_all_dim")
    }  # fmt: skip
    needed = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ("factor",))
    for key in needed:
        if numbers[key] is None:
            raise ValueError(f"{where}: rope_type {kind!r} needs {key}")
    length = "original_max_position_embeddings"
    original = _only_one(inner, reader, length, inner.take(length, int, None), reader.take(length, int, None))
    base = _only_one(inner, reader, "rope_theta", inner.number("rope_theta", None), theta)
    truncate = inner.take("truncate", bool, True)
    inner.taken.add("finetuned")  # inert: says only how the weights came about
    inner.finish(strict=True)
    try:
        return RopeConfig(
            kind=kind,
            theta=10000.0 if base is None else base,
            original_max_position=original or (max_position if kind in ("llama3", "yarn") else 0),
            truncate=truncate,
            **{key: value for key, value in numbers.items() if value is not None},
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _only_one(inner: Reader, outer: Reader, key: str, first: Any, second: Any) -> Any:
    """Of a key that may stand in two places: the value, if they do not contradict each other."""
    if first is not None and second is not None and first != second:
        raise ValueError(f"{inner.where}: {key}={first!r} contradicts {key}={second!r} in {outer.where}")
    return first if first is not None else second


def rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, key) is not None:
                scaling[key] = getattr(rope, key)
    return scaling
