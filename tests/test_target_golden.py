"""The target model against reference arrays that transformers computed (scripts/make_golden.py)."""

from pathlib import Path

import numpy as np
import pytest
import target_run
from tiny_checkpoints import random_params

from graft_jax.config import ModelConfig
from graft_jax.io.checkpoint import load_target

GOLDEN = np.load(Path(__file__).parent / "golden" / "target.npz")


@pytest.mark.parametrize("name", target_run.golden_configs())
def test_tiny_models(name):
    """Logits and taps of the last prompt rows and of a tree's nodes."""
    config = ModelConfig.from_hf(target_run.golden_configs()[name])
    logits, taps = target_run.run(config, random_params(config), *target_run.sample_tokens(config.vocab_size))
    rows = target_run.GOLDEN_ROWS
    np.testing.assert_allclose(logits[rows], GOLDEN[f"{name} logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(taps[:, rows], GOLDEN[f"{name} taps"], rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_smollm2():
    """The four best next tokens of each row, and their logits."""
    config, params, _ = load_target("smollm2-135m", dtype="float32")
    logits, _ = target_run.run(config, params, GOLDEN["smollm2 prompt"], GOLDEN["smollm2 tree"])
    best = GOLDEN["smollm2 best"]
    np.testing.assert_allclose(
        np.take_along_axis(logits, best, axis=-1), GOLDEN["smollm2 logits"], rtol=1e-4, atol=1e-3
    )
    np.testing.assert_array_equal(logits.argmax(-1), best[:, 0])
