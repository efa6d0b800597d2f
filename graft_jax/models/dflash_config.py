"""The configuration of a DFlash block drafter, and of Domino's head on top of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from graft_jax.config import ModelConfig, Reader, refuse_mismatch

# Kept in `dflash_config` or at top level; of these only the value that switches the feature off is taken.
_OFF: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (1, None),
    "output_multiplier": (1, None),
    "final_logit_softcapping": (0, None),
}
# Parts of DFlash2: a candidate selector and dynamic convolutions.
_DFLASH2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
_ARCHITECTURES = ("DFlashDraftModel", "DominoDraftModel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoConfig:
    """Domino's correction of the block's logits by the tokens chosen so far.

    Attributes:
        gru_size: G, width of the state.
        rank: R, of the correction.
        prefix: slots that are left uncorrected (`pure_draft_prefix_len`).
        shift: slot i says the token after its own position, and slot 0 is used (`shift_label`).
    """

    gru_size: int
    rank: int
    prefix: int = 0
    shift: bool = False

    def __post_init__(self):
        if self.gru_size < 1 or self.rank < 1 or self.prefix < 0:
            raise ValueError(f"{self} needs sizes of at least 1 and a prefix of at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """A block drafter: a few non-causal qwen3 layers over target features and [anchor, MASK, ...].

    Attributes:
        model: the layers, as of a qwen3 model of the target's width and vocabulary.
        block_size: T, slots of a block, the anchor's included.
        mask_token_id: what fills the other slots.
        taps: target features, counted as in `transformer.forward`: layer id + 1, for the format counts outputs.
        num_target_layers: of the target that it was trained for.
        windows: one a layer: keys within this distance are seen; 0 sees all.
        causal: one a layer: whether slots see only slots before them.
        domino: the head on top, if there is one.
    """

    model: ModelConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    domino: DominoConfig | None = None

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2 slots")
        if not 0 <= self.mask_token_id < self.model.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.model.vocab_size}")
        if not self.taps or min(self.taps) < 1 or max(self.taps) > self.num_target_layers:
            ids = [tap - 1 for tap in self.taps]
            raise ValueError(f"target_layer_ids={ids} must name layers of the target's {self.num_target_layers}")
        if not len(self.windows) == len(self.causal) == self.model.num_layers:
            raise ValueError(f"windows and causal need one value for each of {self.model.num_layers} layers")
        if min(self.windows) < 0:
            raise ValueError(f"windows={self.windows} must not be negative")

    @property
    def first_slot(self) -> int:
        """The first slot that says something: the anchor's own only where labels are shifted."""
        return 0 if self.domino is not None and self.domino.shift else 1

    @property
    def kind(self) -> Literal["dflash", "domino"]:
        return "dflash" if self.domino is None else "domino"

    @property
    def num_drafted(self) -> int:
        """D, tokens that a block drafts."""
        return self.block_size - self.first_slot

    @classmethod
    def for_target(
        cls, target: ModelConfig, *, num_layers: int, block_size: int, mask_token_id: int,
        domino: DominoConfig | None = None, **sizes: Any,
    ) -> "DFlashConfig":  # fmt: skip
        """A new drafter of the target's width; `sizes` are fields of its layers' `ModelConfig`."""
        model = dataclasses.replace(
            target, model_type="qwen3", num_layers=num_layers, qk_norm=True, qkv_bias=False, o_bias=False,
            mlp_bias=False, tie_embeddings=False, num_tokens=target.vocab_size, eos_token_ids=(), **sizes,
        )  # fmt: skip
        return cls(
            model=model, block_size=block_size, mask_token_id=mask_token_id, domino=domino,
            taps=tuple(i + 1 for i in default_layer_ids(target.num_layers, num_layers)),
            num_target_layers=target.num_layers, windows=(0,) * num_layers, causal=(False,) * num_layers,
        )  # fmt: skip

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], target: ModelConfig, *, where: str = "config.json"
    ) -> "DFlashConfig":  # fmt: skip
        """Reads a drafter's `config.json`. What the format keeps in `dflash_config` may also stand at top level.

        Args:
            config: the parsed JSON object.
            target: the model that it drafts for.
            where: the file, for messages.

        Raises:
            ValueError: a key is missing, unknown, of a wrong type, unsupported, or does not fit the target.
        """
        config = dict(config)
        own = {key: config.pop(key) for key in _OWN_KEYS if key in config}
        nested = Reader(Reader(own, where).take("dflash_config", dict, {}), f"{where}: dflash_config")
        own.pop("dflash_config", None)
        outer = Reader(own, where)

        def take(key: str, kinds: Any, *default: Any) -> Any:
            first, second = nested.take(key, kinds, None), outer.take(key, kinds, None)
            if first is not None and second is not None and first != second:
                raise ValueError(f"{nested.where}: {key}={first!r} contradicts {key}={second!r} in {where}")
            found = first if first is not None else second
            return outer.take(key, kinds, *default) if found is None else found

        _refuse_others(config, take, where)
        model = ModelConfig.from_hf({"model_type": "qwen3", **config}, strict=True, where=where)
        if model.model_type != "qwen3" or model.qkv_bias:
            raise ValueError(f"{where}: model_type {model.model_type!r} or attention_bias is not supported")
        L, depth = model.num_layers, outer.take("num_target_layers", int, target.num_layers)
        ids = take("target_layer_ids", list, default_layer_ids(depth, L))
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ValueError(f"{where}: target_layer_ids={ids!r} must be a list of layer numbers")
        windows, causal = _attention(outer, L)
        settings: dict[str, Any] = dict(
            model=model,
            block_size=take("block_size", int, 16),
            mask_token_id=take("mask_token_id", int),
            taps=tuple(i + 1 for i in ids),
            num_target_layers=depth,
            windows=windows,
            causal=causal,
        )
        kind = take("projector_type", str, None)
        head = {key: take(key, kinds, default) for key, kinds, default in _HEAD_KEYS}
        nested.finish(strict=True)
        outer.finish(strict=True)
        try:
            if kind is not None:
                if head["gru_hidden_dim"] is None or head["emb_dim"] is None:
                    raise ValueError(f"projector_type {kind!r} needs gru_hidden_dim and emb_dim")
                settings["domino"] = DominoConfig(
                    gru_size=head["gru_hidden_dim"], rank=head["emb_dim"], prefix=head["pure_draft_prefix_len"],
                    shift=head["shift_label"],
                )  # fmt: skip
            found = cls(**settings)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        found.check_target(target, where)
        return found

    def check_target(self, target: ModelConfig, where: str) -> None:
        """Refuses a target that the drafter was not made for, with both numbers."""
        refuse_mismatch(
            where,
            ("hidden_size", self.model.hidden_size, target.hidden_size),
            ("vocab_size", self.model.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` object."""
        block: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in self.taps],
        }
        if self.domino is not None:
            block |= {
                "projector_type": "domino", "gru_hidden_dim": self.domino.gru_size, "emb_dim": self.domino.rank,
                "pure_draft_prefix_len": self.domino.prefix, "shift_label": self.domino.shift,
            }  # fmt: skip
        kinds = ["sliding_attention" if window else "full_attention" for window in self.windows]
        return {
            **self.model.to_hf(), "architectures": ["DFlashDraftModel"], "block_size": self.block_size,
            "num_target_layers": self.num_target_layers, "layer_types": kinds,
            "sliding_window": max(self.windows) or None, "use_sliding_window": any(self.windows),
            **({} if self.causal == tuple(map(bool, self.windows)) else {"is_causal": self.causal[0]}),
            "dflash_config": block,
        }  # fmt: skip


def drafter_kind(config: Mapping[str, Any]) -> Literal["eagle3", "dflash", "domino"]:
    """What a draft head's `config.json` describes; the keys that follow from it are checked on loading."""
    nested = config.get("dflash_config")
    own = {**config, **nested} if isinstance(nested, Mapping) else config
    if own.get("projector_type") is not None:
        return "domino"
    named = any(name in _ARCHITECTURES for name in config.get("architectures") or ())
    return "dflash" if named or "dflash_config" in config or "mask_token_id" in config else "eagle3"


def default_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """The format's own rule where `target_layer_ids` is absent: spread from layer 1 to the third last."""
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_layers - 1)) for i in range(num_layers)]


_HEAD_KEYS = (
    ("gru_hidden_dim", int, None),
    ("emb_dim", int, None),
    ("pure_draft_prefix_len", int, 0),
    ("shift_label", bool, False),
)
_OWN_KEYS = (
    "dflash_config", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "projector_type",
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
    "is_causal", *(key for key, _, _ in _HEAD_KEYS),
    *_OFF, *_DFLASH2,
)  # fmt: skip


def _refuse_others(config: Mapping[str, Any], take: Any, where: str) -> None:
    """Names what looks alike and computes something else."""
    for name in config.get("architectures") or ():
        if name not in _ARCHITECTURES:
            raise ValueError(f"{where}: architecture {name!r} is not supported; use one of {_ARCHITECTURES}")
    for key in _DFLASH2:
        if take(key, object, None) is not None:
            raise ValueError(f"{where}: {key} belongs to DFlash2, which is not supported")
    for key, allowed in _OFF.items():
        if (value := take(key, object, None)) not in allowed:
            raise ValueError(f"{where}: {key}={value!r} is not supported")
    kind = take("projector_type", str, None)
    if kind not in (None, "domino", "causal_v5"):
        raise ValueError(f"{where}: projector_type {kind!r} is not supported; only 'domino' is")


def _attention(outer: Reader, num_layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window and causality of each layer, by the rules of transformers' Qwen3Config and z-lab's attention.

    Only sliding layers have a window; unless `is_causal` says otherwise they alone are causal in the block.
    """
    used = outer.take("use_sliding_window", bool, False)
    window = outer.take("sliding_window", int, 4096 if used else None)
    from_layer = outer.take("max_window_layers", int, 28) if used else num_layers
    rule = ["sliding_attention" if i >= from_layer else "full_attention" for i in range(num_layers)]
    kinds = outer.take("layer_types", list, rule)
    causal = outer.take("is_causal", bool, None)
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"{outer.where}: layer_types={kinds!r} must name {num_layers} full or sliding layers")
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and (not used or window is None or window < 1):
        raise ValueError(f"{outer.where}: sliding layers need use_sliding_window (is {used}) and {window=} above 0")
    windows = tuple((window or 0) if slides else 0 for slides in sliding)
    return windows, tuple(slides if causal is None else causal for slides in sliding)
