"""onnxtrain.prepare works in place and keeps the model's class, names and state_dict."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import onnxtrain
from onnxtrain import ORTModule, errors, report_of
from tests.reference import assert_matches
from tests.thinned import covering
from tests.zoo.checks import Comparison
from tests.zoo.entry import Call, Draw, ZooModel, mean_square
from tests.zoo.models import ZOO

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(width, 16), nn.Dropout(0.3), nn.Linear(16, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x)))) * scale  # type: ignore[no-any-return]


class Tower(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (WIDTH,) * 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, widths))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Documented."""
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x)  # type: ignore[no-any-return]


def rows(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


TOWER = ZooModel("tower", Tower, rows, mean_square)
BOTH_WAYS = [pytest.param(False, id="whole"), pytest.param(True, id="blocks")]
in_both_ways = pytest.mark.parametrize("regional", BOTH_WAYS)


def compare_prepared(entry: ZooModel, regional: bool | str, **options: Any) -> Comparison:
    return Comparison(entry, wrap=lambda module: onnxtrain.prepare(module, regional, rng="torch", **options))


@pytest.mark.everywhere
@in_both_ways
def test_training_equals_eager(regional: bool) -> None:
    compare = compare_prepared(TOWER, regional)
    for batch in (3, 5, 1):
        compare.train(batch, 0)
    compare.train_steps(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    compare.change(nn.Module.eval)
    compare.train(3, 0)
    with torch.no_grad():
        compare.forward(2, 0)
    assert all(region.compiled is not None for region in report_of(compare.got.module).regions)


@pytest.mark.parametrize(("name", "regional"), covering(["mlp", "tied-weights", "checkpoint-non-reentrant"], BOTH_WAYS))
def test_models_of_the_zoo(name: str, regional: bool) -> None:
    entry = next(model for model in ZOO if model.name == name)
    compare = compare_prepared(entry, "auto" if regional else False)
    for sizes in entry.sizes:
        compare.train(*sizes)


@pytest.mark.slow
@in_both_ways
@pytest.mark.parametrize("entry", [e for e in ZOO if e.falls_back is None], ids=str)
def test_all_models_of_the_zoo(entry: ZooModel, regional: bool) -> None:
    try:
        compare = compare_prepared(entry, regional)
    except errors.OptionError:
        pytest.skip("a model without blocks")
    for sizes in entry.sizes:
        compare.train(*sizes)


@in_both_ways
def test_prepare_keeps_class_signature_and_state_dict(regional: bool) -> None:
    model = Tower()
    names, keys, signature = dir(model), list(model.state_dict()), inspect.signature(model.forward)
    assert onnxtrain.prepare(model, regional) is model
    assert type(model) is Tower
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(Block().forward)
    assert set(dir(model)) - set(names) <= {"_onnxtrain_forward"}
    model(torch.randn(2, WIDTH)).sum().backward()
    assert onnxtrain.unprepare(model) is model
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in Tower().modules()]
    model(torch.randn(2, WIDTH))


def test_equal_blocks_share_their_programs_and_others_do_not() -> None:
    model = onnxtrain.prepare(Tower(), True)
    model(torch.randn(2, WIDTH)).sum().backward()
    regions = report_of(model).regions
    assert [region.name for region in regions] == ["blocks.0", "blocks.1", "blocks.2"]
    assert not regions[0].shares_graph
    assert regions[2].shares_graph  # the first block's input needs no gradient, the others' do
    first, second, third = ([*block.parameters()] for block in model.blocks)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (*first, *second, *third))

    class Widths(Tower):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return sum(block(x.new_ones(2, block.up.in_features)).sum() for block in self.blocks)  # type: ignore[return-value]

    wide = onnxtrain.prepare(Widths((4, 8, 4)).eval(), True)
    eager = copy.deepcopy(wide)
    onnxtrain.unprepare(eager)
    assert_matches(wide(torch.ones(1)), eager, torch.ones(1))
    assert [region.shares_graph for region in report_of(wide).regions] == [False, False, True]


def test_blocks_that_differ_in_an_attribute_are_not_shared() -> None:
    model = Tower().eval()
    for number, block in enumerate(model.blocks):
        block.forward = MethodType(_scaled, block)
        block.factor = number + 1.0
    x, plain = torch.ones(2, WIDTH), copy.deepcopy(model)
    assert_matches(onnxtrain.prepare(model, True)(x), plain, x)
    assert not any(region.shares_graph for region in report_of(model).regions)
    onnxtrain.unprepare(model)
    assert all(block.forward.__func__ is _scaled for block in model.blocks)
    assert torch.equal(model(x), plain(x))


def _scaled(self: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x + self.down(torch.relu(self.up(x))) * self.factor  # type: ignore[no-any-return]


@pytest.mark.parametrize(("method", "regional"), covering(["deepcopy", "pickle", "save"], BOTH_WAYS[::-1]))
def test_copies_are_prepared_and_have_their_own_parameters(method: str, regional: bool) -> None:
    model = onnxtrain.prepare(Tower().eval(), regional)
    x = torch.randn(2, WIDTH)
    expected = model(x).detach()
    if method == "deepcopy":
        copied = copy.deepcopy(model)
    elif method == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        copied = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert report_of(copied).by_block == regional
    assert torch.equal(copied(x).detach(), expected)
    copied(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(region.compiled is not None for region in report_of(copied).regions)


@in_both_ways
def test_hooks_of_prepared_modules_run_once_around_the_graph(regional: bool) -> None:
    model = Tower()
    subject = model.blocks[1] if regional else model
    seen: list[Any] = []
    subject.register_forward_pre_hook(lambda _, args: seen.append(("before", type(args[0]))))
    subject.register_forward_hook(lambda _, args, output: seen.append(("after", type(output))))
    subject.register_full_backward_hook(lambda *_: seen.append(("backward", None)))
    onnxtrain.prepare(model, regional)
    for _ in range(3):
        seen.clear()
        model(torch.randn(2, WIDTH)).sum().backward()
        assert seen == [("before", torch.Tensor), ("after", torch.Tensor), ("backward", None)]
    assert all(region.compiled is not None for region in report_of(model).regions)


def test_auto_logs_its_decision_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "one process" in str(report_of(onnxtrain.prepare(Tower())))
    assert "no repeated blocks" in report_of(onnxtrain.prepare(nn.Linear(2, 2))).reason
    hooked = Tower()
    hooked.blocks[1].register_forward_hook(lambda *_: None)
    assert report_of(onnxtrain.prepare(hooked)).by_block
    assert "blocks.1" in report_of(hooked).reason
    monkeypatch.setattr("onnxtrain.system.ranks.world_size", lambda: 2)
    assert report_of(onnxtrain.prepare(Tower())).by_block
    assert not report_of(onnxtrain.prepare(Tower(), False)).by_block


def test_auto_decides_again_at_the_first_call_and_when_a_process_group_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, WIDTH)
    hooked = onnxtrain.prepare(Tower().eval())
    hooked.blocks[1].register_forward_hook(lambda *_: None)
    hooked(x)
    assert report_of(hooked).by_block
    models = [onnxtrain.prepare(Tower().eval(), regional, rng="torch") for regional in ("auto", False)]
    copied, plain = copy.deepcopy(models[0]), copy.deepcopy(models[0])
    onnxtrain.unprepare(plain)
    assert_matches(models[0](x), plain, x)
    held = models[0].forward
    assert not report_of(models[0]).by_block
    monkeypatch.setattr("onnxtrain.system.ranks.world_size", lambda: 2)
    for model in (*models, copied):
        model(x)
    assert [report_of(model).by_block for model in (*models, copied)] == [True, False, True]
    assert "several processes" in report_of(models[0]).reason
    assert models[0].blocks[0].forward.options.rng == "torch"
    for run in (models[0], held):
        assert_matches(run(x), plain, x)
    assert all(region.compiled is not None for region in report_of(models[0]).regions)
    assert "forward" not in vars(models[0])


def test_preparing_again_applies_the_new_mode_and_options() -> None:
    model = onnxtrain.prepare(Tower(), True)
    onnxtrain.prepare(model, False, rng="torch")
    assert [region.name for region in report_of(model).regions] == [""]
    assert model.forward.options.rng == "torch"
    with pytest.raises(errors.OptionError, match="Unknown option"):
        onnxtrain.prepare(model, speed=9)
    assert [region.name for region in report_of(model).regions] == [""]


def test_unsupported_models_and_arguments_are_refused() -> None:
    with pytest.raises(errors.OptionError, match="no repeated blocks"):
        onnxtrain.prepare(nn.Linear(2, 2), True)
    with pytest.raises(errors.OptionError, match="regional"):
        onnxtrain.prepare(Tower(), "sometimes")  # type: ignore[arg-type]
    with pytest.raises(errors.ORTModuleTorchModelException):
        onnxtrain.prepare(ORTModule(Tower()))
    with pytest.raises(errors.ORTModuleTorchModelException):
        onnxtrain.prepare(nn.DataParallel(Tower()))
    with pytest.raises(errors.OptionError, match="not prepared"):
        report_of(Tower())


@pytest.mark.filterwarnings("ignore:create_graph")
def test_a_second_derivative_runs_the_models_own_forward() -> None:
    model = Tower().eval()
    x = torch.randn(2, WIDTH, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    expected = torch.autograd.grad(first.square().sum(), [*model.parameters()], allow_unused=True)
    onnxtrain.prepare(model)
    (first,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    got = torch.autograd.grad(first.square().sum(), [*model.parameters()], allow_unused=True)
    assert all(map(torch.equal, got, expected))


def test_a_model_with_graph_breaks_is_prepared_in_parts() -> None:
    class Decides(Tower):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            hidden = super().forward(x, scale)
            return hidden * 2 if hidden.sum().item() > 0 else hidden

    model = Decides().eval()
    x = torch.randn(2, WIDTH)
    plain = copy.deepcopy(model)
    onnxtrain.prepare(model)
    with pytest.warns(UserWarning, match="Decides runs in PyTorch, not as one ONNX graph but in pieces"):
        assert_matches(model(x), plain, x)
    assert_matches(model(x), plain, x)


def test_a_wrapped_model_with_prepared_blocks_is_one_graph() -> None:
    model = Tower().eval()
    x, plain = torch.ones(2, WIDTH), copy.deepcopy(model)
    wrapped = ORTModule(onnxtrain.prepare(model, True))
    assert_matches(wrapped(x), plain, x)
    assert wrapped.report().stages
    assert all(region.compiled is None for region in report_of(model).regions)


def test_checkpointed_blocks() -> None:
    class Checkpointed(Tower):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)  # type: ignore[no-any-return]

    compare = compare_prepared(ZooModel("checkpointed", Checkpointed, rows, mean_square), True)
    for batch in (3, 2):
        compare.train(batch, 0)


# As libraries use models


def test_wrappers_that_read_the_function_of_forward() -> None:
    """As accelerate wraps forward for mixed precision, and unwraps it."""
    model = onnxtrain.prepare(Tower().eval())
    x = torch.randn(2, WIDTH)
    expected = model(x).detach()
    before, function = model.forward, model.forward.__func__
    assert [*inspect.signature(function).parameters] == ["self", "x", "scale"]
    model.forward = MethodType(lambda self, *args, **kwargs: function(self, *args, **kwargs) * 2, model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(copied(x), expected * 2)
    model.forward = MethodType(before.__func__, model)
    assert torch.equal(model(x), model.head.bias.expand(2, 3))
    onnxtrain.unprepare(model)
    assert torch.equal(model(x), model.head.bias.expand(2, 3))


def test_saving_and_generating_as_transformers_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.tensor([[3, 4, 5]])
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False)
    onnxtrain.prepare(model)
    assert model.config is config
    with pytest.warns(UserWarning, match="runs in PyTorch, not as an ONNX graph: forward changes a container"):
        assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), expected)
    model.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))


@pytest.mark.slow  # of a hand-written model: test_equal_blocks_share_their_programs_and_others_do_not
def test_blocks_of_a_transformer() -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = onnxtrain.prepare(BertForSequenceClassification(config), True)
    assert [region.name for region in report_of(model).regions] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([1])).loss.backward()
    assert [region.shares_graph for region in report_of(model).regions] == [False, True]
    states = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    assert len(states) == 3


def test_an_object_that_is_no_module_is_refused() -> None:
    with pytest.raises(errors.ORTModuleTorchModelException, match=r"torch\.nn\.Module"):
        onnxtrain.prepare(3)
