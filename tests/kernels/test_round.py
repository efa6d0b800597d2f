"""The round with interpreted kernels says the same tokens as with XLA's versions and as plain decoding."""

import dataclasses
import functools

import numpy as np
import pytest
import toy

from graft_jax import methods
from graft_jax.engine import SpeculativeDecoder
from graft_jax.io.block_drafter import load_block_drafter
from graft_jax.methods import Context, Options

NEW = 24


KERNELS = {"recycling": ("retrieval_lookup", "topk_rows"),
           "graft-dominotree": ("retrieval_lookup", "topk_rows", "topm_score")}  # fmt: skip


@functools.cache
def _world():
    config, params = toy.load("llama")
    return config, params, load_block_drafter(toy.FOLDER / "domino", config, dtype="float32")


def _decoder(method, kernels):
    """With a small table, for an interpreted kernel copies its arrays in every program."""
    config, params, head = _world()
    options = Options(kernels=kernels, budget=5, candidates=24)
    built = methods.get(method).build(Context(config, head[0]), options)
    drafter = dataclasses.replace(built.drafter, table=dataclasses.replace(built.drafter.table, log2_rows=6))
    head = head if methods.get(method).heads else None
    return SpeculativeDecoder(
        config, params, None, drafter, max_length=64, method=method, head=head, thresholds=built.thresholds
    )


# The table's two kernels under either backend; all three in one round, which holds those of the first.
@pytest.mark.parametrize(
    "method, kernels",
    [
        pytest.param("recycling", "pallas-triton", marks=pytest.mark.slow),
        ("recycling", "pallas-tpu"), ("graft-dominotree", "pallas-triton"),
    ],
)  # fmt: skip
def test_kernels_change_no_token(method, kernels):
    prompts = [prompt[-12:] for prompt in toy.safe_prompts("llama", 2)]
    config, params, _ = _world()
    wanted, _ = toy.greedy(config, params, prompts, NEW)
    made = {}
    for name in ("xla", f"{kernels}-interpret"):
        decoder = _decoder(method, name)
        for _ in range(2):  # the second time the table is full of this very text
            made[name] = decoder.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        assert [out.token_ids for out in made[name]] == wanted.tolist()
        assert np.mean([out.stats.mean_acceptance_length for out in made[name]]) > 1.3
        assert made[name][0].stats.policy["kernels"] == dict.fromkeys(KERNELS[method], name)
    accepted = [[out.stats.accepted for out in outs] for outs in made.values()]
    assert accepted[0] == accepted[1]


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="kernels='cuda' must be one of"):
        Options(kernels="cuda")
