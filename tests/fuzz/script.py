"""Write a case as a standalone script that needs only PyTorch and onnxtrain, and prints the differences."""

from __future__ import annotations

from tests.fuzz.differential import STEPS
from tests.fuzz.worker import Case

_RUN = """
def step(run, model, inputs, number):
    model.zero_grad()
    torch.manual_seed(number)
    outputs = [o for o in pytree.tree_leaves(run(*inputs)) if isinstance(o, torch.Tensor)]
    ends = [o for o in outputs if o.requires_grad]
    pairs = [(o, torch.randn(o.shape, generator=torch.Generator().manual_seed(5)).to(o)) for o in ends]
    if PAIRS:
        torch.autograd.backward([o for o, _ in PAIRS], [c for _, c in PAIRS])
    found = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"gradient of input {i}": t.grad for i, t in enumerate(inputs) if t.is_leaf and t.requires_grad}
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


eager, model = Program(), Program()
ours = OURS
for number, make in enumerate(CALLS):
    theirs, mine = step(eager, eager, make(), number), step(ours, model, make(), number)
    for name, right in theirs.items():
        print(number, name, "ours", mine[name], "eager", right, sep="\\n  ")
"""


def script(case: Case) -> str:
    """The text of the script."""
    program, configuration = case.program, case.configuration
    calls = []
    for step in range(STEPS):
        row = [f"{t.written(1000 + 10 * step + t.number, t.shapes[step % len(t.shapes)])}" for t in program.inputs]
        grads = [".requires_grad_()" if t.trained else "" for t in program.inputs]
        calls.append("lambda: [" + ", ".join(f"({r}){g}" for r, g in zip(row, grads, strict=True)) + "]")
    options = "".join(f", {k}={v!r}" for k, v in configuration.options.items())
    rng = "" if "rng" in configuration.options else 'rng="torch", '
    options = f'{rng}fallback_policy="FALLBACK_DISABLE"{options}'
    ours = {
        "module": f"ORTModule(model, {options})",
        "prepare": f"prepare(model, regional=False, {options})",
        "regional": f"prepare(model, regional=True, {options})",
    }[configuration.entry]
    run = _RUN.replace("OURS", ours).replace("CALLS", "(" + ", ".join(calls) + ")")
    run = run.replace("PAIRS", "pairs[-1:] if number else pairs" if configuration.one_gradient else "pairs")
    notes = [f"seed {program.seed}, {case.verdict.kind}: {case.verdict.detail}"]
    if configuration.cached:
        notes.append("the second time it runs from a capture on the disk (cache_dir)")
    if configuration.regions:
        notes.append("the second step runs fused regions (tests/fuzz/regions.py)")
    if configuration.evaluates:
        notes.append("between the steps it is called in eval mode without gradients")
    head = "\n".join(f"# {line}" for note in notes for line in note.splitlines())
    source = program.source(configuration.entry == "regional")
    imports = "from torch.utils import _pytree as pytree\n\nfrom onnxtrain import ORTModule, prepare\n"
    first, rest = source.split("from torch import nn\n", 1)
    return f"{head}\n\n{first}from torch import nn\n{imports}{rest}\n{run}"
