"""Repeated blocks are traced twice, then copied: bit by bit, graphs and gradients are those of traced blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.capture import capture
from onnxtrain.capture.export.checkpoint_regions import REGION
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops import FROM_TORCH
from onnxtrain.torch_compat.patch_points import CALL_MODULE
from tests.reference import assert_matches
from tests.thinned import slow_except

WIDTH = 8


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(self.norm(x))
        return y


class Stack(nn.Module):
    """Blocks that are called one after another."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.first(x))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(kind: Callable[[int], nn.Module] = Block, count: int = 6) -> Stack:
    return Stack([kind(index) for index in range(count)])


# Blocks that can be copied


class Attention(nn.Module):
    """A block of self-attention, which compares its arguments by identity."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return y


class GroupedQueries(nn.Module):
    """A block of attention that repeats its one head of keys and values, which a graph's attention reads itself."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        query = self.query(x).view(batch, steps, 2, WIDTH // 2).transpose(1, 2)
        key, value = (
            layer(x)[:, None, None].expand(batch, 1, 2, steps, WIDTH // 2).reshape(batch, 2, steps, WIDTH // 2)
            for layer in (self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + y.transpose(1, 2).reshape(x.shape)


class Convolution(nn.Module):
    """A residual block that updates the buffers of a batch norm."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(5, 5, 3, padding=1)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.relu(self.norm(self.convolution(x)))
        return y


class Pair(nn.Module):
    """A block whose results are one of its arguments and a tuple."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, scale: float, *, mask: Tensor | None) -> dict[str, Any]:
        assert mask is None
        return {"x": self.layers(x) * scale, "old": (x, None, x.shape[0])}


class Pairs(Stack):
    def run(self, x: Tensor) -> Tensor:
        total = x.sum()
        for block in self.blocks:
            results = block(x, 0.5, mask=None)
            total = total + results["old"][0].sum() / results["old"][2]
            x = results["x"]
        return x + total


class Checkpointed(Block):
    """A block that runs in a checkpoint of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Repeated(Stack):
    """One block that is called six times."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.blocks[0](x)
        return x


class Flat(nn.Module):
    """A block without blocks in it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(x).tanh()
        return y


class WritesToSlice(Flat):
    """A block that writes to a part of a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[:, 1:] += x[:, :-1]
        return y


class WritesToTransposed(Flat):
    """A block with a write that only PyTorch functionalizes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.transpose(1, 2).mul_(0.5)
        return y


class ReadsScale(Flat):
    """A block that reads an attribute, which is another from the fourth block on."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = 1.0 if index < 3 else 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class UnreadState(Flat):
    """A block with state that nothing reads."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.unread = iter([index])


class AfterNoGrad(Stack):
    """Blocks after a region without gradients."""

    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.mean().sigmoid()
        return super().run(x * scale)


def tied() -> Stack:
    model = stack()
    for block in model.blocks:
        block.layers[0].weight = model.blocks[0].layers[0].weight
    return model


def frozen() -> Stack:
    model = stack()
    model.blocks[3].requires_grad_(False)
    return model


def partly_in_eval_mode() -> Stack:
    model = stack()
    model.blocks[3].eval()
    return model


def mixed() -> Stack:
    return Stack([(Block, Attention)[index % 2](index) for index in range(8)])


def first_differs() -> Stack:
    return Stack([Attention(0), *(Block(index) for index in range(6))])


class Backwards(Stack):
    """The first blocks that are called are the last in the module."""

    def run(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class ReadsParameters(Stack):
    """Forward reads parameters of blocks that it does not call, and of blocks that it will call or has called."""

    def run(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.blocks[4].layers[0].weight, self.blocks[4].layers[0].bias)[..., :WIDTH]
        for block in self.blocks[:5]:
            x = block(x)
        squares = sum(parameter.square().sum() for parameter in self.blocks.parameters())
        return x + squares + self.blocks[5].norm(x) + self.blocks[3].norm.weight


class CallsParts(Stack):
    """Forward calls the parts of some of the blocks."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) if index % 2 else x + block.layers(block.norm(x))
        return x


class CallsCopy(Stack):
    """Forward calls a block with other parameters, which are computed from its own."""

    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        scaled = {name: parameter * 0.5 for name, parameter in self.blocks[5].named_parameters()}
        return torch.func.functional_call(self.blocks[5], scaled, (x,))


COPIED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (stack, 4),
    "attention": (lambda: stack(Attention), 4),
    "grouped queries": (lambda: stack(GroupedQueries), 4),
    "batch norm": (lambda: stack(Convolution, 7), 4),
    "several results": (lambda: Pairs([Pair(index) for index in range(6)]), 4),
    "checkpoints": (lambda: stack(Checkpointed), 4),
    "one block, called often": (lambda: Repeated([Block()]), 3),
    "writes to a slice": (lambda: stack(WritesToSlice), 4),
    "writes to a transposed view": (lambda: stack(WritesToTransposed), 4),
    "another scale from the fourth on": (lambda: stack(ReadsScale), 2),
    "state that is not read": (lambda: stack(UnreadState), 4),
    "after a region without gradients": (lambda: AfterNoGrad([Block() for _ in range(6)]), 4),
    "tied weights": (tied, 4),
    "one frozen": (frozen, 3),
    "one in eval mode": (partly_in_eval_mode, 3),
    "every second another": (mixed, 4),
    "the first another": (first_differs, 4),
    "in reverse order": (lambda: Backwards([Block() for _ in range(6)]), 4),
    "parameters are read elsewhere": (lambda: ReadsParameters([Block() for _ in range(6)]), 2),
    "parts are called elsewhere": (lambda: CallsParts([Block() for _ in range(8)]), 4),
    "a block with other parameters": (lambda: CallsCopy([Block() for _ in range(6)]), 4),
}


# Blocks that each have to be traced

CALLS = SimpleNamespace(count=0)
CALL_NUMBER = 0
SEEN: list[float] = []


class ReadsIndex(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class CountsInGlobal(Flat):
    def forward(self, x: Tensor) -> Tensor:
        global CALL_NUMBER  # noqa: PLW0603  # a forward that does so
        CALL_NUMBER = CALL_NUMBER % 6 + 1
        return super().forward(x) / CALL_NUMBER


class CountsInObject(Flat):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.count = CALLS.count % 6 + 1
        return super().forward(x) / CALLS.count


class AppendsToGlobal(Flat):
    def forward(self, x: Tensor) -> Tensor:
        if len(SEEN) >= 6:
            SEEN.clear()
        SEEN.append(2.0)
        return super().forward(x) / len(SEEN)


class ReadsIterator(Flat):
    scales = itertools.cycle([1.0, 1.0, 2.0, 3.0, 4.0, 5.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / next(self.scales)


class ReadsList(Flat):
    """The caller changes the list between calls."""

    scales: list[float]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[-1]


class ChangesList(Stack):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__([kind(index) for index in range(6)])
        self.scales: list[float] = []
        for block in self.blocks:
            block.scales = self.scales

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            self.scales.append(max(1.0, index - 1.0))
            x = block(x)
        self.scales.clear()
        return x


class StoresResult(Flat):
    """The caller reads an attribute that forward assigns."""

    total: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.total = x.sum()
        return super().forward(x)


class SumsStored(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + block.total  # type: ignore[operator]  # a tensor
            block.total = None  # type: ignore[assignment]  # as in StoresResult
        return x


class AppendsToArgument(Flat):
    def forward(self, x: Tensor, results: list[Tensor]) -> Tensor:  # type: ignore[override]  # called by SumsAppended
        results.append(super().forward(x))
        return results[-1]


class SumsAppended(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            results: list[Tensor] = []
            x = x + block(x, results) + results[0]
        return x


class AppendsToOwnList(Flat):
    """The caller reads and clears a list that forward appends to."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(2.0)
        return super().forward(x)


class ClearsLists(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (1.0 + len(block.history))
            block.history.clear()
        return x


class WritesToCaller(Flat):
    """Forward sets an attribute of the module around it, which that module resets."""

    def __init__(self, index: int, callers: list[nn.Module]) -> None:
        super().__init__(index)
        self.callers = callers

    def forward(self, x: Tensor) -> Tensor:
        self.callers[0].factor = 3.0  # type: ignore[assignment]  # a float, not a module
        return super().forward(x)


class ReadsOwnAttribute(Stack):
    def __init__(self) -> None:
        callers: list[nn.Module] = []
        super().__init__([WritesToCaller(index, callers) for index in range(6)])
        callers.append(self)
        self.factor = 1.0

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.factor
            self.factor = 1.0
        return x


class WithoutGrad(Stack):
    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().run(x)


class ReadsConfig(Flat):
    """The caller changes an object between calls."""

    config: SimpleNamespace

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale


class ChangesConfig(Stack):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__([kind(index) for index in range(6)])
        self.config = SimpleNamespace(scale=1.0)
        for block in self.blocks:
            block.config = self.config

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            self.config.scale = max(1.0, index - 1.0)
            x = block(x)
        self.config.scale = 1.0
        return x


class ReturnsView(Flat):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # called by WritesToView
        return x[:, 1:], super().forward(x)


class WritesToView(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x.clone()
            view, y = block(x)
            view.mul_(2)
            x = x + y
        return x


class WritesToArgument(Flat):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(2)
        return y


class AddsWritten(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x.clone()
            x = block(x) + x
        return x


class OwnConstants(Flat):
    """Each block has a tensor of its own that is neither a parameter nor a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.offset = torch.full((WIDTH,), float(index))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


class DetachesParameter(Flat):
    """Forward changes a parameter in place, which a graph cannot."""

    def forward(self, x: Tensor) -> Tensor:
        if self.index == 5:
            self.layer.bias.requires_grad_(False)
        return super().forward(x)


class ReplacesParameter(Flat):
    def forward(self, x: Tensor) -> Tensor:
        if self.index == 5:
            self.layer.bias = nn.Parameter(x.new_zeros(WIDTH))
        return super().forward(x)


TRACED: dict[str, Callable[[], nn.Module]] = {
    "reads its index": lambda: stack(ReadsIndex),
    "counts in a global": lambda: stack(CountsInGlobal),
    "counts in an object": lambda: stack(CountsInObject),
    "appends to a global": lambda: stack(AppendsToGlobal),
    "reads an iterator": lambda: stack(ReadsIterator),
    "a list changes": lambda: ChangesList(ReadsList),
    "a config changes later": lambda: ChangesConfig(ReadsConfig),
    "appends to its own list": lambda: ClearsLists([AppendsToOwnList(index) for index in range(6)]),
    "assigns an attribute of its caller": ReadsOwnAttribute,
    "runs without gradients": lambda: WithoutGrad([Flat(index) for index in range(6)]),
    "assigns an attribute": lambda: SumsStored([StoresResult(index) for index in range(6)]),
    "changes its argument": lambda: SumsAppended([AppendsToArgument(index) for index in range(6)]),
    "returns a view of its argument": lambda: WritesToView([ReturnsView(index) for index in range(6)]),
    "writes to its argument": lambda: AddsWritten([WritesToArgument(index) for index in range(6)]),
    "tensors that are attributes": lambda: stack(OwnConstants),
    "a parameter is changed in place": lambda: stack(DetachesParameter),
    "a parameter is replaced": lambda: stack(ReplacesParameter),
}


# Models of transformers


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=6, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    return transformers.BertForMaskedLM(config)


def llama(attention_dropout: float = 0.0) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=50,
        use_cache=False,
        attention_dropout=attention_dropout,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    """Its embedding has several names."""
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=6, num_heads=2, vocab_size=50, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def recomputed_gpt2() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()  # type: ignore[operator]  # a method
    return model


LANGUAGE_MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2": (gpt2, 4),
    "bert": (bert, 4),
    "llama": (llama, 4),
    "llama with dropout": (lambda: llama(0.1), 4),
    "t5": (t5, 6),
    "gpt2 with checkpoints": (recomputed_gpt2, 4),
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of copied blocks of each capture."""
    counts: list[int] = []
    instantiate = capture.instantiate

    def counted(program: Any, copied: Sequence[Any], *arguments: Any) -> Any:
        counts.append(len(copied))
        return instantiate(program, copied, *arguments)

    monkeypatch.setattr(capture, "instantiate", counted)
    return counts


@pytest.fixture
def all_traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which all blocks are traced."""
    return lambda: monkeypatch.setattr(CALL_MODULE._entry, "_resolved", (None,))


def trained(make: Callable[[], nn.Module], calls: Sequence[dict[str, Tensor]]) -> tuple[ORTModule, list[Any]]:
    """Return an ORTModule of a model, and the bytes of its loss, gradients and buffers after each call."""
    torch.manual_seed(0)
    model = make()
    ours = ORTModule(model, rng="torch")
    torch.manual_seed(1)
    observed: list[Any] = []
    for call in calls:
        output = ours(**call)
        weights = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
        loss = output.loss if hasattr(output, "loss") else (output * weights).sum()
        loss.backward()
        tensors = [loss, *(p.grad for p in model.parameters()), *model.buffers()]
        observed.append([None if t is None else t.detach().numpy().tobytes() for t in tensors])
    return ours, observed


def run(make: Callable[[], nn.Module], calls: Sequence[dict[str, Tensor]]) -> list[Any]:
    """Return the graph of a model, then the bytes of its loss, gradients and buffers after each call."""
    ours, observed = trained(make, calls)
    assert engine_of(ours).captures == 1
    graph = engine_of(ours).newest().captured.model
    regions = [node.metadata_props.get(REGION) for node in graph.graph]
    first = {region: index for index, region in reversed([*enumerate(regions)])}  # their numbers differ in each capture
    for node in graph.graph:
        if REGION in node.metadata_props:
            node.metadata_props[REGION] = str(first[node.metadata_props[REGION]])
    return [describe(graph.graph), *observed]


def describe(graph: ir.Graph) -> list[str]:
    """Describe the nodes of a graph. Values are numbered: the numbers in their names depend on what was traced."""
    names: dict[ir.Value | None, str | None] = {None: None, **{value: value.name for value in graph.inputs}}
    names.update((value, str(value.const_value)) for value in graph.initializers.values())
    lines: list[str] = []
    for node in graph:
        names.update((value, f"{len(names)}: {value.dtype} {value.shape}") for value in node.outputs)
        attributes = [f"{a.name}={a.value}" for a in node.attributes.values()]
        outputs, inputs = ([names[value] for value in values] for values in (node.outputs, node.inputs))
        lines.append(f"{outputs} = {node.op_identifier()}({inputs}, {attributes}) {node.metadata_props}")
    return lines


def vectors(*batches: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.linspace(-2, 1, batch * 5 * WIDTH).view(batch, 5, WIDTH)} for batch in batches]


def tokens(*batches: int) -> list[dict[str, Tensor]]:
    ids = [torch.arange(batch * 7).view(batch, 7) * 3 % 50 for batch in batches]
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": i} for i in ids]


@pytest.mark.parametrize("name", slow_except(COPIED, *[*COPIED][::3], "grouped queries"))
def test_copies_equal_traces(name: str, copies: list[int], all_traced: Callable[[], None]) -> None:
    make, count = COPIED[name]
    with_copies = run(make, vectors(3, 4))
    assert copies == [count]
    all_traced()
    assert run(make, vectors(3, 4)) == with_copies
    assert copies == [count, 0]


def test_calls_of_copies_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that are traced are converted; in the others, the ONNX nodes are copied as well."""
    calls: list[int] = []
    convert = FROM_TORCH["aten.gelu.default"]

    def counted(op: Any, x: Any, **attributes: Any) -> Any:
        calls.append(1)
        return convert(op, x, **attributes)

    monkeypatch.setitem(FROM_TORCH, "aten.gelu.default", counted)
    ORTModule(stack())(torch.randn(2, 5, WIDTH))
    assert len(calls) == 2


def test_parameters_of_copies_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[int] = []
    export = torch.export.export

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        exported.append(len([*module.parameters()]))
        return export(module, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    model = stack()
    ours = ORTModule(model)
    ours(torch.randn(2, 5, WIDTH)).sum().backward()
    in_block = len([*model.blocks[0].parameters()])
    assert exported == [len([*model.parameters()]) - 4 * in_block]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_copies_under_autocast(copies: list[int], all_traced: Callable[[], None]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with_copies = run(stack, vectors(3, 4))
        assert copies == [4]
        all_traced()
        assert run(stack, vectors(3, 4)) == with_copies


def test_an_attribute_of_a_copied_block_changes(copies: list[int]) -> None:
    model = stack()
    ours = ORTModule(model)
    (call,) = vectors(3)
    ours(**call)
    assert copies == [4]
    model.blocks[4].layers[3].p = 0.5
    ours(**call)
    assert engine_of(ours).captures == 2


@pytest.mark.parametrize("name", slow_except(LANGUAGE_MODELS, "llama"))
def test_copies_in_language_models(name: str, copies: list[int], all_traced: Callable[[], None]) -> None:
    make, count = LANGUAGE_MODELS[name]
    with_copies = run(make, tokens(3, 4))
    assert copies == [count]
    all_traced()
    assert run(make, tokens(3, 4)) == with_copies
    assert copies == [count, 0]


# Each is much as another one.
OTHERS_TRACED = (
    *("counts in an object", "appends to a global", "a list changes", "changes its argument"),
    *("writes to its argument", "a parameter is replaced"),
)


@pytest.mark.parametrize("name", slow_except(TRACED, *(TRACED.keys() - {*OTHERS_TRACED})))
def test_a_block_that_depends_on_anything_else_is_traced(name: str, copies: list[int]) -> None:
    make = TRACED[name]
    torch.manual_seed(0)
    model = make()
    (call,) = vectors(3)
    model.eval()
    assert_matches(ORTModule(model)(**call), lambda model, call: model(**call), model, call)
    assert copies == [1 if name == "a config changes later" else 0] * len(copies)
