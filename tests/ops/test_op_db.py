"""PyTorch's operator database: how each differentiable operator is captured, and that its values are eager's.

`tools/unsupported.py`, and with it the reference page of operators, has the reason why an operator is not native, falls
back, or takes its gradient at run time.

A fixed sample always runs, the whole database with --slow. `python -m tests.ops.op_db_sweep` prints the counts.
"""

import pytest
from torch.testing._internal.opinfo.core import OpInfo

from tests.ops.op_db_sweep import Form, check_operator, differentiable, full_name
from tests.thinned import slow_but_every
from tests.torch_version import needs_torch
from tools.unsupported import PYTORCH_AT_RUN_TIME, PYTORCH_OPERATORS, PYTORCH_RUNS, PYTORCH_USES

OPERATORS = {full_name(op): op for op in differentiable()}

SAMPLE = {
    "nn.functional.linear": Form.NATIVE,
    "nn.functional.cross_entropy": Form.NATIVE,
    "softmax": Form.NATIVE,
    "scatter_add": Form.NATIVE,
    "trapezoid": Form.NATIVE,
    "to": Form.NATIVE,
    "cdist": Form.TRACED,
    "erfinv": Form.TRACED,
    "fft.fft": Form.TRACED,
    "linalg.solve": Form.TRACED,
    "kthvalue": Form.NATIVE,
    "cumprod": Form.NATIVE,
    "nn.functional.interpolate.bilinear": Form.NATIVE,
    "logcumsumexp": Form.TRACED,
    "nn.functional.rrelu": Form.RUN_TIME,
    "linalg.svdvals": Form.RUN_TIME,
}


@needs_torch(2, 13, "has another database than these tables")
def test_listed_operators_are_in_the_database() -> None:
    assert {*SAMPLE, *PYTORCH_RUNS, *PYTORCH_AT_RUN_TIME} <= OPERATORS.keys()


def test_few_operators_fall_back_or_take_gradients_at_run_time() -> None:
    assert len(PYTORCH_RUNS) <= 0.05 * len(OPERATORS)
    assert len(PYTORCH_AT_RUN_TIME) <= 0.10 * len(OPERATORS)


@pytest.mark.parametrize("name", slow_but_every(4, SAMPLE))
def test_sample(name: str) -> None:
    outcome = check_operator(OPERATORS[name], samples=2)
    assert outcome.form == SAMPLE[name], outcome.error or outcome.operators
    assert outcome.resized, "no sample was compared at a second size"


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS.values(), ids=full_name)
def test_all(op: OpInfo) -> None:
    outcome = check_operator(op, samples=2)
    name = full_name(op)
    if name in PYTORCH_RUNS:
        assert outcome.form == Form.FAILED, f"{name} is captured now: remove it from PYTORCH_RUNS"
        return
    assert outcome.form != Form.FAILED, outcome.error
    assert outcome.form < Form.RUN_TIME or name in PYTORCH_AT_RUN_TIME, outcome.reasons
    unlisted = {o.removeprefix("aten::") for o in outcome.operators} - PYTORCH_OPERATORS.keys() - PYTORCH_USES.keys()
    assert not unlisted, f"add the reason why these stay ATen nodes to tools/unsupported.py: {sorted(unlisted)}"
