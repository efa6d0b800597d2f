"""What is particular to a kind of drafter in training: where it starts, its loss, how it is saved and tried."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.io.block_drafter import save_block_drafter
from graft_jax.io.drafter import save_eagle3
from graft_jax.models import dflash, eagle3
from graft_jax.models.dflash_config import DFlashConfig, DominoConfig
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.transformer import TargetParams
from graft_jax.tokenizer import Tokenizer
from graft_jax.training import block_losses, losses, start
from graft_jax.training.features import Features
from graft_jax.types import Array, Float, Int

Loss = Callable[[Any, Features, Int[Array, ""]], tuple[Float[Array, ""], Any]]


def _check_start(start: str) -> None:
    if start not in ("target", "random"):
        raise ValueError(f"drafter.start={start!r} must be 'target' or 'random'")


class Recipe(Protocol):
    """A frozen dataclass of settings."""

    def config(self, target: ModelConfig, tokenizer: Tokenizer | None) -> Any:
        """The drafter's configuration; has `taps`."""
        ...

    def init(
        self, config: Any, key: Array, target_config: ModelConfig, target: TargetParams, tokens: np.ndarray
    ) -> Any:
        """Parameters to start from, float32. `tokens` are those that are trained on."""
        ...

    def loss(self, config: Any, target_config: ModelConfig, target: TargetParams, seed: int, steps: int) -> Loss:
        """(float32 parameters, batch, step) to the loss and to metrics; products in the target's dtype.

        Metrics have `losses` and `accuracy`, by training-time-test step or by slot.
        """
        ...

    def stored(self, params: Any) -> Any:
        """The parameters in bfloat16."""
        ...

    def save(self, folder: str | Path, config: Any, params: Any) -> None:
        """Writes float32 parameters as a Hugging Face folder, in bfloat16."""
        ...

    @property
    def method(self) -> str:
        """The method that tries it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Recipe:
    """An EAGLE-3 head.

    Attributes:
        draft_vocab_size: the most frequent tokens of what is trained on; the target's vocabulary if None.
        intermediate_size, taps: the target's and EAGLE's if None.
        ttt_steps: of the training-time test.
        start: "target" copies the target's weights as far as shapes allow, "random" does not.
    """

    draft_vocab_size: int | None = 32000
    intermediate_size: int | None = None
    taps: tuple[int, ...] | None = None
    ttt_steps: int = 7
    start: str = "target"

    def __post_init__(self):
        if self.ttt_steps < 1:
            raise ValueError(f"drafter.ttt_steps={self.ttt_steps} must be at least 1")
        _check_start(self.start)

    method = "eagle3"

    def config(self, target: ModelConfig, tokenizer: Tokenizer | None) -> Eagle3Config:
        sizes: dict[str, Any] = {"draft_vocab_size": min(self.draft_vocab_size or target.vocab_size, target.vocab_size)}
        for name in ("intermediate_size", "taps"):
            if getattr(self, name) is not None:
                sizes[name] = getattr(self, name)
        config = Eagle3Config.for_target(target, **sizes)
        if max(config.taps) > target.num_layers:
            raise ValueError(
                f"drafter.taps={list(config.taps)} must be at most {target.num_layers}, the target's layers"
            )
        return config

    def init(self, config, key, target_config, target, tokens):
        ids = None
        if config.draft_vocab_size < config.vocab_size:
            ids = start.draft_vocabulary(tokens, config.draft_vocab_size, config.vocab_size)
        if self.start == "target":
            return start.eagle3_from_target(config, key, target_config, target, ids)
        params = eagle3.init_params(config, key, jnp.float32)
        return params if ids is None else params.replace(draft_to_target=jnp.asarray(ids))

    def loss(self, config, target_config, target, seed, steps):
        half = target.dtype == jnp.bfloat16

        def loss(params, batch, step):
            cast = self.stored(params) if half else params
            return losses.eagle3_loss(config, cast, target, batch, steps=self.ttt_steps)

        return loss

    def stored(self, params):
        return eagle3.to_bfloat16(params)

    def save(self, folder, config, params):
        save_eagle3(folder, config, self.stored(params))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashRecipe:
    """A DFlash block drafter.

    Attributes:
        num_layers: of the backbone.
        block_size: slots, the anchor's included.
        anchors: blocks of a row that are trained in a step, drawn anew each time.
        gamma: slot d weighs exp(-d / gamma).
        mask_token_id: what fills empty slots; an unused special token if None.
        intermediate_size, taps: the target's and DFlash's if None; taps count as `transformer.forward` does.
        start: "target" copies the target's weights as far as shapes allow, "random" does not.
    """

    num_layers: int = 5
    block_size: int = 16
    anchors: int = 256
    gamma: float = 7.0
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    taps: tuple[int, ...] | None = None
    start: str = "target"

    def __post_init__(self):
        for name in ("num_layers", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter.{name}={getattr(self, name)} must be at least 1")
        if not self.gamma > 0:
            raise ValueError(f"drafter.gamma={self.gamma} must be above 0")
        _check_start(self.start)

    method = "ddtree"
    head, base_ratio = None, 1.0  # a Domino drafter's

    def config(self, target: ModelConfig, tokenizer: Tokenizer | None) -> DFlashConfig:
        mask = start.mask_token(tokenizer, target) if self.mask_token_id is None else self.mask_token_id
        sizes = {} if self.intermediate_size is None else {"intermediate_size": self.intermediate_size}
        config = DFlashConfig.for_target(
            target,
            num_layers=self.num_layers,
            block_size=self.block_size,
            mask_token_id=mask,
            domino=self.head,
            **sizes,
        )
        return config if self.taps is None else dataclasses.replace(config, taps=self.taps)

    def init(self, config, key, target_config, target, tokens):
        if self.start == "target":
            return start.block_from_target(config, key, target_config, target)
        return dflash.init_params(config, key, jnp.float32)

    def loss(self, config, target_config, target, seed, steps):
        half = target.dtype == jnp.bfloat16

        def loss(params, batch: Features, step):
            cast = self.stored(params) if half else params
            key = jax.random.fold_in(jax.random.key(seed), step)
            anchors, keep = block_losses.sample_anchors(key, batch.mask, self.anchors)
            weight = block_losses.base_anchor(step, steps, self.base_ratio)
            return block_losses.block_loss(
                config, cast, target_config, target, batch.taps, batch.tokens, batch.mask, anchors, keep, self.gamma,
                weight, batch.segments,
            )  # fmt: skip

        return loss

    def stored(self, params):
        return dflash.to_bfloat16(params)

    def save(self, folder, config, params):
        save_block_drafter(folder, config, self.stored(params))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoRecipe(DFlashRecipe):
    """A Domino drafter: DFlash's fields, and those of its head.

    Attributes:
        gru_size, rank, prefix, shift: see `DominoConfig`.
        base_ratio: the share of the steps in which the weight of the uncorrected logits goes from 1 to 0.
    """

    gru_size: int = 1024
    rank: int = 256
    prefix: int = 1
    shift: bool = True
    base_ratio: float = 1.0

    method = "dominotree"

    @property
    def head(self) -> DominoConfig:
        return DominoConfig(gru_size=self.gru_size, rank=self.rank, prefix=self.prefix, shift=self.shift)


RECIPES: dict[str, type] = {"eagle3": Eagle3Recipe, "dflash": DFlashRecipe, "domino": DominoRecipe}


def read_recipe(settings: Mapping[str, Any]) -> Recipe:
    """A recipe from its settings: `kind` and the fields of that kind.

    Raises:
        ValueError: a key or value is wrong; names it.
    """
    fields = dict(settings)
    kind = fields.pop("kind", None)
    if kind not in RECIPES:
        raise ValueError(f"drafter.kind={kind!r} must be one of {sorted(RECIPES)}")
    known = {field.name for field in dataclasses.fields(RECIPES[kind])}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"drafter: {', '.join(unknown)} not known for {kind}; it takes {', '.join(sorted(known))}")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return RECIPES[kind](**fields)
