"""The round with interpreted kernels says the same tokens as with XLA's versions and as plain decoding."""

import dataclasses
import functools

import numpy as np
import pytest
import toy

from graft_jax import methods
from graft_jax.engine import SpeculativeDecoder
from graft_jax.io.drafter import load_eagle3
from graft_jax.methods import Context, Options

NEW = 24


@functools.cache
def _world():
    config, params = toy.load("llama")
    return config, params, load_eagle3(toy.FOLDER / "llama-eagle3", config, dtype="float32")


def _decoder(method, kernels):
    """With a small table, for an interpreted kernel copies its arrays in every program."""
    config, params, head = _world()
    context = Context(config, head[0] if method == "graft" else None)
    built = methods.get(method).build(context, Options(kernels=kernels, budget=5))
    table = dataclasses.replace(built.drafter.table, log2_rows=6)
    drafter = dataclasses.replace(built.drafter, table=table)
    head = head if method == "graft" else None
    return SpeculativeDecoder(
        config, params, None, drafter, max_length=64, method=method, head=head, thresholds=built.thresholds
    )


# Each kernel's round once: the table's two kernels under either backend, the head's top-k beside them.
@pytest.mark.parametrize(
    "method, kernels", [("recycling", "pallas-triton"), ("recycling", "pallas-tpu"), ("graft", "pallas-triton")]
)
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
        assert made[name][0].stats.policy["kernels"] == dict.fromkeys(("retrieval_lookup", "topk_rows"), name)
    accepted = [[out.stats.accepted for out in outs] for outs in made.values()]
    assert accepted[0] == accepted[1]


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="kernels='cuda' must be one of"):
        Options(kernels="cuda")
