"""bitsandbytes' 4-bit layers under LoRA: each matmul with a frozen weight is one MatMulBnb4, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.capture.key.fast_path import Missed
from onnxtrain.errors import QuantizationError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager
from tests.thinned import covering

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra qlora")

LAYERS = 14  # of a Llama with two blocks


class Adapted(torch.nn.Module):
    """A 4-bit layer with an adapter of low rank."""

    def __init__(self, nested: bool = True, quant_type: str = "nf4", bias: bool = False, wide: int = 96) -> None:
        super().__init__()
        self.base = bitsandbytes.nn.Linear4bit(
            64, wide, bias=bias, compress_statistics=nested, quant_type=quant_type, compute_dtype=torch.float32
        )
        self.down, self.up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, wide, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(**settings: Any) -> Adapted:
    torch.manual_seed(3)
    return Adapted(**settings).to("cpu")  # bitsandbytes quantizes a layer when it is moved


def strict(module: torch.nn.Module) -> ORTModule:
    return ORTModule(module, rng="torch", fallback_policy="FALLBACK_DISABLE")


def exactly(module: torch.nn.Module) -> torch.nn.Module:
    """The module in float64, its 4-bit weights dequantized."""
    dense_module = copy.deepcopy(module)
    for name, layer in list(dense_module.named_modules()):
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            dense = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            dense.weight = torch.nn.Parameter(weight, requires_grad=False)
            dense.bias = layer.bias
            dense_module.set_submodule(name, dense)
    return dense_module.double()


def step(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Output, the input's gradient, and those of the parameters that have one."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = module(leaf)
    (y * torch.linspace(-1, 1, y.numel(), dtype=x.dtype).view_as(y)).sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


def same_step(ours: torch.nn.Module, eager: Adapted, x: torch.Tensor) -> None:
    triples = zip(step(ours, x), step(eager, x), step(exactly(eager), x.double()), strict=True)
    for index, (mine, theirs, exact) in enumerate(triples):
        assert mine is not None
        assert theirs is not None
        assert exact is not None
        assert_no_worse_than_eager(f"{index}", mine, theirs, exact)


@pytest.mark.everywhere
@pytest.mark.parametrize("wide", [96, 64], ids=["96x64", "square"])
@pytest.mark.parametrize(
    ("quant_type", "nested"),
    covering(["nf4", "fp4"], [pytest.param(False, id="plain"), pytest.param(True, id="nested")]),
)
def test_layer(quant_type: str, nested: bool, wide: int) -> None:
    module = adapted(nested=nested, quant_type=quant_type, wide=wide, bias=True)
    ours, eager = strict(module), copy.deepcopy(module)
    for rows in (5, 1, 8):
        same_step(ours, eager, torch.randn(rows, 3, 64))
    assert engine_of(ours).captures == 1
    graph = engine_of(ours).newest().captured.model.graph
    nodes = [node for node in graph if node.op_type == "MatMulBnb4"]
    assert len(nodes) == 1
    assert nodes[0].attributes["quant_type"].as_int() == ["fp4", "nf4"].index(quant_type)
    assert len(nodes[0].inputs) == (6 if nested else 3)
    assert not [node for node in graph if node.op_type in ("ATen", "PythonOp")]


def test_weight_and_scales_are_read_through_the_module() -> None:
    module = adapted()
    ours, eager = strict(module), copy.deepcopy(module)
    x = torch.randn(4, 64)
    same_step(ours, eager, x)
    for model in (module, eager):  # in place: the same capture
        model.base.weight.quant_state.state2.absmax.mul_(2)
        model.base.weight.quant_state.offset.add_(0.5)
        model.base.weight.data.bitwise_xor_(3)
    same_step(ours, eager, x)
    assert engine_of(ours).captures == 1
    for model in (module, eager):  # another weight, with scales of another number: captured again
        torch.manual_seed(9)
        other = torch.randn(96, 64)
        model.base.weight = bitsandbytes.nn.Params4bit(other, quant_type="fp4", blocksize=32, module=model.base)
        model.to("cpu")
    same_step(ours, eager, x)
    assert engine_of(ours).captures == 2


def test_a_frozen_bias_in_another_dtype_is_cast_in_the_graph() -> None:
    """PEFT's `prepare_model_for_kbit_training` makes biases float32, bitsandbytes' first forward bfloat16 for good."""
    module = adapted(bias=True).float()
    module.base.compute_dtype = torch.bfloat16
    module.base.bias.requires_grad_(False)
    ours, eager = strict(module), copy.deepcopy(module)
    for rows in (5, 1):
        same_step(ours, eager, torch.randn(rows, 64))
    assert engine_of(ours).captures == 1
    assert eager.base.bias.dtype == torch.bfloat16
    assert module.base.bias.dtype == torch.float32
    assert type(module.base) is bitsandbytes.nn.Linear4bit


def test_module_is_left_as_it_was() -> None:
    module = adapted()
    before = {name: id(p) for name, p in module.named_parameters()}
    state = module.base.weight.quant_state
    strict(module)(torch.randn(2, 64))
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert module.base.weight.quant_state is state
    assert bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module.__module__ == "bitsandbytes.nn.modules"


def test_the_fast_path_recognizes_the_call() -> None:
    module = adapted()
    ours, x = strict(module), torch.randn(4, 64)
    for _ in range(4):
        ours(x)
    fast_path = engine_of(ours)._fast_path
    assert fast_path((x,), {}) is not Missed
    module.base.weight.quant_state = copy.deepcopy(module.base.weight.quant_state)
    assert fast_path((x,), {}) is Missed


def test_eval_without_gradients() -> None:
    module = adapted().eval()
    ours, x = strict(module), torch.randn(3, 64)
    with torch.no_grad():
        y, eager, exact = ours(x), copy.deepcopy(module)(x), exactly(module)(x.double())
    assert_no_worse_than_eager("y", y, eager, exact)


def test_second_order_runs_in_pytorch() -> None:
    module = adapted()

    def second(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = torch.ones(2, 64, dtype=dtype, requires_grad=True)
        (first,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with pytest.warns(UserWarning, match="create_graph"):
        second_gradient = second(strict(module))
    assert_no_worse_than_eager(
        "second gradient", second_gradient, second(module), second(exactly(module), torch.float64)
    )


# Missing parts


def lose(path: str) -> Callable[[Any], None]:
    def apply(weight: Any) -> None:
        *steps, last = path.split(".")
        holder = weight
        for step in steps:
            holder = getattr(holder, step)
        setattr(holder, last, None)

    return apply


@pytest.mark.parametrize("lost", ["quant_state.state2", "quant_state.offset", "quant_state.state2.absmax"])
def test_missing_double_quantization_is_named(lost: str) -> None:
    module = adapted()
    lose(lost)(module.base.weight)
    with pytest.raises(QuantizationError, match="double-quantized 4-bit weight has an incomplete") as caught:
        ORTModule(module)(torch.randn(2, 64))
    assert caught.value.where == "base.weight"
    assert lost in str(caught.value.got)
    assert "nested_absmax" in str(caught.value.todo)


def test_missing_state_is_named() -> None:
    module = adapted()
    module.base.weight.quant_state = module.base.quant_state = None
    with pytest.raises(QuantizationError, match="no quantization state"):
        ORTModule(module)(torch.randn(2, 64))


def test_state_is_found_in_the_layer() -> None:
    """The state is where bitsandbytes looks for it after FSDP has exchanged the parameter."""
    module = adapted()
    eager = copy.deepcopy(module)
    module.base.weight.quant_state = None
    same_step(strict(module), eager, torch.randn(2, 64))


# A whole model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return Path(folder)


def llama(checkpoint: Path) -> torch.nn.Module:
    """Loaded in 4 bits, double-quantized, with LoRA on every layer: as the documentation of PEFT does it."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(1)
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        checkpoint, quantization_config=quantization, device_map="cpu"
    )
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted_model: torch.nn.Module = peft.get_peft_model(model, adapters)
    for name, parameter in adapted_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # zeros would give the other half no gradient
    return adapted_model


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(128, (4, 16))
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[1, 10:] = mask[3, 4:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def losses(module: torch.nn.Module, steps: int = 5) -> torch.Tensor:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    values = []
    for _ in range(steps):
        loss = module(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
    return torch.stack(values)


def peak_bytes(step: Callable[[], None]) -> int:
    """The most that a step has allocated at once, from the allocator's events."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    now = most = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]  # it has run
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


class Stack(torch.nn.Module):
    """Adapted layers one after the other."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Adapted(wide=64) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x))
        return x.square().mean()


def test_no_more_memory_than_in_pytorch() -> None:
    torch.manual_seed(3)
    eager = Stack().to("cpu")
    ours, x = strict(copy.deepcopy(eager)), torch.randn(256, 64)

    def peak(module: torch.nn.Module) -> int:
        module(x).backward()
        module.zero_grad()
        return peak_bytes(lambda: module(x).backward())

    assert peak(ours) <= peak(eager)
    unit = engine_of(ours).newest().unit
    kept = [v for v in unit.forward.part.outputs[unit.first_kept :] if v.producer() is not None]
    written_out = [v.name for v in kept if v.dtype.is_floating_point() and list(v.shape) in ([64, 64], [64 * 64])]
    assert not written_out, "a weight is kept for backward without its quantization"


@pytest.mark.everywhere
def test_llama_learns_as_in_pytorch_in_no_more_memory(checkpoint: Path) -> None:
    eager, module = llama(checkpoint), llama(checkpoint)
    assert sum(isinstance(m, bitsandbytes.nn.Linear4bit) for m in module.modules()) == LAYERS
    ours = strict(module)
    theirs = losses(eager)
    assert theirs[-1] < theirs[0]
    assert_no_worse_than_eager("losses", losses(ours), theirs, losses(exactly(llama(checkpoint))))
    assert engine_of(ours).captures == 1

    compiled = engine_of(ours).newest()
    nodes = list(compiled.captured.model.graph)
    assert sum(node.op_type == "MatMulBnb4" for node in nodes) == LAYERS
    assert not [node for node in nodes if node.op_type in ("ATen", "PythonOp")]
    (backward,) = compiled.unit._backwards.values()
    again = [node for node in backward.program.part.nodes if node.op_type == "MatMulBnb4"]
    assert len(again) == LAYERS - 3  # embeddings are frozen: the first block's q, k and v pass nothing on
    assert {node.attributes["transB"].as_int() for node in again} == {0}

    def one(model: torch.nn.Module) -> None:
        model(**batch()).loss.backward()

    peak = peak_bytes(lambda: one(ours))
    assert peak <= peak_bytes(lambda: one(eager))
    # Nor where dynamo evaluates the frames: a caller's keeps the arguments of the call that is going on.
    assert peak_bytes(torch._dynamo.run(lambda: one(ours))) == peak
