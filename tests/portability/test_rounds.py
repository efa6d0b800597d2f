"""Every method's whole round lowers to one module and compiles for a GPU and a TPU, with no chip.

Run by `make test-portability`, which installs the compilers. Records go to build/portability, from which
scripts/portability_table.py makes docs/portability.md.
"""

import json
import os
from pathlib import Path

import jax
import pytest

from graft_jax.bench import aot, portability

pytestmark = pytest.mark.portability
ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "configs"
CASES = portability.cases(CONFIGS)
# Kernels that a method's own round must hold on a GPU; what stands here is not taken for granted from the record.
TABLE = {"retrieval_lookup", "topk_rows"}
KERNELS = {
    "recycling": TABLE, "graft": TABLE, "eagle3": {"topk_rows"}, "ddtree": {"topk_rows"}, "domino": {"topk_rows"},
    "dominotree": {"topk_rows", "topm_score"}, "graft-dflash": TABLE, "graft-dominotree": {*TABLE, "topm_score"},
}  # fmt: skip


@pytest.fixture(scope="session")
def record():
    """Adds a record to this version's and worker's file."""
    folder = os.environ.get("PORTABILITY_COMPILERS")
    if folder is None:
        pytest.skip("PORTABILITY_COMPILERS names no folder of compilers (make test-portability)")
    aot.use_compilers(folder)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    path = ROOT / "build" / "portability" / f"jax-{jax.__version__}-{worker}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield lambda entry: print(json.dumps(entry), file=file, flush=True)


@pytest.mark.parametrize("function", portability.FUNCTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_compiles(case, function, record):
    found = portability.measure(CONFIGS, case, function)
    record(found)
    assert found["host_calls"] == []
    platform = aot.platform(case.target)
    assert all(name == f"pallas-{'triton' if platform == 'cuda' else 'tpu'}" for name in found["kernels"].values())
    assert found["kernels_found"] == sorted(found["kernels"]) and KERNELS.get(case.method, set()) <= {*found["kernels"]}
    # Weights alone are gigabytes, and the cache is written in place.
    assert found["argument_bytes"] > 7e9 and found["alias_bytes"] > found["cache_bytes"] > 2.5e8


@pytest.mark.parametrize("case", portability.verify_cases(CONFIGS), ids=str)
def test_bare_verify_pass_compiles(case, record):
    """What rounds are compared with in the table."""
    found = portability.measure(CONFIGS, case, "verify")
    record(found)
    assert found["host_calls"] == [] and found["kernels"] == {}
