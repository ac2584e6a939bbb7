"""ORTModule behaves as the nn.Module that it wraps, also at the autograd boundary."""

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onnxtrain import ORTModule
from onnxtrain.errors import KernelError, ORTModuleTorchModelException
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_each_no_worse, assert_matches, float64_by_default
from tests.thinned import covering, slow_but_every, slow_except


class Net(nn.Module):
    """Two layers, a buffer, an attribute and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(torch.tanh(self.first(x)))) * self.scale

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters())


@pytest.fixture
def pair() -> tuple[ORTModule, Net]:
    net = Net()
    return ORTModule(copy.deepcopy(net), rng="torch"), net


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """A fallback is a failure, except in tests that catch its warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch, not as an ONNX graph.*")
        yield


def data(rows: int = 5, *, grad: bool = False) -> torch.Tensor:
    x = torch.randn(rows, 6, dtype=torch.float32, generator=torch.Generator().manual_seed(rows))
    return x.to(torch.get_default_dtype()).requires_grad_(grad)


def both(pair: tuple[nn.Module, nn.Module], run: Callable[[nn.Module], Any]) -> None:
    """Run the same on both modules and compare results and all gradients."""
    ours, eager = pair
    exact = copy.deepcopy(eager)
    for p, q in zip(exact.parameters(), eager.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    exact.double()  # its gradients too
    results = [run(ours), run(eager)]
    with float64_by_default():
        results.append(run(exact))
    assert_each_no_worse("result", *results)
    for name in dict(eager.named_parameters()):
        assert_each_no_worse(f"gradient of {name}", *(m.get_parameter(name).grad for m in (ours, eager, exact)))
    for name in dict(eager.named_buffers()):
        assert_each_no_worse(name, *(m.get_buffer(name) for m in (ours, eager, exact)))


def captures(module: ORTModule) -> int:
    return engine_of(module).captures


# The nn.Module interface


def test_state_dict_keys_do_not_change(pair: tuple[ORTModule, Net]) -> None:
    ours, eager = pair
    assert list(ours.state_dict()) == list(eager.state_dict())
    changed = {k: v + 1 if v.is_floating_point() else v for k, v in eager.state_dict().items()}
    assert ours.load_state_dict(changed) == eager.load_state_dict(changed)
    both(pair, lambda m: m(data()))


def test_parameters_buffers_and_children_are_the_modules(pair: tuple[ORTModule, Net]) -> None:
    ours, eager = pair
    for method in ("named_parameters", "named_buffers", "named_children", "named_modules"):
        assert [n for n, _ in getattr(ours, method)()] == [n for n, _ in getattr(eager, method)()]
    assert ours.get_parameter("first.weight") is ours.module.first.weight
    assert all(p is q for p, q in zip(ours.parameters(), ours.module.parameters(), strict=True))


def test_attributes_and_methods_are_forwarded(pair: tuple[ORTModule, Net]) -> None:
    ours, eager = pair
    assert ours.count() == eager.count()
    assert ours.first is ours.module.first
    with pytest.raises(AttributeError):
        ours.nothing_of_this_name  # noqa: B018
    both(pair, lambda m: m(data()))
    for module in pair:
        module.scale = 3.0
    assert ours.module.scale == 3.0
    both(pair, lambda m: m(data()))
    assert captures(ours) == 2


def test_names_that_the_wrapper_hides_are_warned_of() -> None:
    class Reports(Net):
        def report(self) -> str:
            return "its own"

    with pytest.warns(
        UserWarning, match="Reports's attribute name report collides with ORTModule's attribute name"
    ) as told:
        ours = ORTModule(Reports())
    assert told[0].filename == __file__
    assert ours.module.report() == "its own"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(Net())


def test_train_and_eval(pair: tuple[ORTModule, Net]) -> None:
    for _ in range(2):
        both(pair, lambda m: m.train()(data()))
        both(pair, lambda m: m.eval()(data()))
        assert not pair[0].training
        assert not pair[0].module.training
    assert captures(pair[0]) == 2


def test_dtype_moves(pair: tuple[ORTModule, Net]) -> None:
    both(pair, lambda m: m(data()))
    assert pair[0].double() is pair[0]
    pair[1].double()
    both(pair, lambda m: m(data().double()))
    pair[0].to(torch.bfloat16)
    assert pair[0].first.weight.dtype == torch.bfloat16


def test_pickle_and_deepcopy(pair: tuple[ORTModule, Net]) -> None:
    ours, eager = pair
    both(pair, lambda m: m(data()))
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert copied.module is not ours.module
        both((copied, copy.deepcopy(eager)), lambda m: (m.zero_grad(), m(data()))[1])
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    assert list(torch.load(buffer, weights_only=False).state_dict()) == list(ours.state_dict())


def test_data_parallel_is_refused() -> None:
    with pytest.raises(ORTModuleTorchModelException, match="DataParallel"):
        ORTModule(nn.DataParallel(nn.Linear(2, 2)), fallback_policy="FALLBACK_DISABLE")
    with pytest.raises(ORTModuleTorchModelException):
        ORTModule(nn.Linear(2, 2)).add_module("x", nn.Linear(2, 2))


# Autograd


def test_gradients_of_inputs(pair: tuple[ORTModule, Net]) -> None:
    def run(module: nn.Module) -> torch.Tensor:
        x = data(grad=True)
        module(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    both(pair, run)


def test_gradient_accumulation_and_several_forwards_before_backward(pair: tuple[ORTModule, Net]) -> None:
    def run(module: nn.Module) -> torch.Tensor:
        outputs = [module(data(n)) for n in (5, 3, 4)]
        for output in reversed(outputs):
            output.square().sum().backward()
        return torch.cat(outputs).detach()

    both(pair, run)
    both(pair, run)
    assert captures(pair[0]) == 1


def test_retain_graph(pair: tuple[ORTModule, Net]) -> None:
    def run(module: nn.Module) -> torch.Tensor:
        loss = module(data()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    both(pair, run)
    again = pair[0](data()).sum()
    again.backward()
    with pytest.raises(RuntimeError, match="second time"):
        again.backward()


def test_autograd_grad_and_backward_inputs(pair: tuple[ORTModule, Net]) -> None:
    both(pair, lambda m: torch.autograd.grad(m(data()).square().sum(), [m.first.weight, m.second.bias]))

    def run(module: nn.Module) -> torch.Tensor:
        loss = module(data()).square().sum()
        loss.backward(inputs=[module.second.weight])
        assert module.first.weight.grad is None
        return loss.detach()

    both(pair, run)


def test_create_graph_is_exact_and_warns() -> None:
    def run(module: nn.Module) -> torch.Tensor:
        x = data(grad=True)
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        penalty = (gradient.norm() - 1).square()
        penalty.backward()
        return penalty.detach()

    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match="create_graph"):
        both((ORTModule(copy.deepcopy(net)), net), run)


def test_changes_between_forward_and_backward_are_refused_as_in_eager(pair: tuple[ORTModule, Net]) -> None:
    for module in pair:
        loss = module(data()).square().sum()
        with torch.no_grad():
            module.second.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_output_may_be_changed_in_place_where_eager_allows_it() -> None:
    def run(module: nn.Module) -> torch.Tensor:
        output = module(data(grad=True)) * 1.0
        output.mul_(2)
        output.sum().backward()
        return output.detach()

    net = nn.Linear(6, 4)
    both((ORTModule(copy.deepcopy(net)), net), run)


def test_saved_tensors_hooks_see_the_saved_tensors(pair: tuple[ORTModule, Net]) -> None:
    packed: list[torch.Size] = []

    def run(module: nn.Module) -> torch.Tensor:
        def pack(t: torch.Tensor) -> torch.Tensor:
            packed.append(t.shape)
            return t.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = module(data()).square().sum()
        loss.backward()
        return loss.detach()

    both(pair, run)
    packed.clear()
    run(pair[0])
    assert len(packed) > 3


def test_anomaly_mode(pair: tuple[ORTModule, Net]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            both(pair, lambda m: m(data()).square().sum().backward())
            with pytest.raises(RuntimeError, match="nan"):
                (pair[0](data()) * float("nan")).sum().backward()


def test_grad_scaler(pair: tuple[ORTModule, Net]) -> None:
    def run(module: nn.Module) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loss = module(data()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    both(pair, run)


@pytest.mark.parametrize("mode", slow_except([torch.no_grad, torch.inference_mode], torch.inference_mode))
def test_without_gradients(pair: tuple[ORTModule, Net], mode: Any) -> None:
    def run(module: nn.Module) -> torch.Tensor:
        with mode():
            output = module(data())
        assert not output.requires_grad
        assert output.is_inference() == (mode is torch.inference_mode)
        return output.clone()

    both(pair, lambda m: run(m.eval()))
    both(pair, lambda m: m.train()(data()).sum().backward())


def test_requires_grad_changes_between_steps(pair: tuple[ORTModule, Net]) -> None:
    def run(module: nn.Module) -> torch.Tensor:
        module.zero_grad()
        output = module(data())
        output.square().sum().backward()
        return output.detach()

    both(pair, run)
    for module in pair:
        module.first.requires_grad_(False)
    both(pair, run)
    assert pair[0].first.weight.grad is None
    for module in pair:
        module.first.weight.requires_grad_(True)
    both(pair, run)


class Several(nn.Module):
    """Outputs of all kinds: differentiable, integer, constant, an input, a view of an input, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        best = y.max(dim=1)
        return {
            "y": y,
            "both": (y.sum(), [y.mean()]),
            "index": best.indices,
            "value": best.values,
            "input": x,
            "view": x.view(-1),
            "slice": x[:, 1:3],
            "weight": self.linear.weight.t(),
            "rows": x.shape[0],
            "none": None,
            "text": "kept",
        }


def test_outputs_of_all_kinds() -> None:
    net = Several()
    ours = ORTModule(copy.deepcopy(net))

    def run(module: nn.Module) -> Any:
        x = data(grad=True)
        out = module(x)
        loss = out["y"].square().sum() + out["both"][0] + out["both"][1][0] + out["value"].sum()
        (loss + out["view"].sin().sum() + out["slice"].exp().sum() + (out["weight"] ** 2).sum()).backward()
        assert not out["index"].requires_grad
        assert out["rows"] == 5
        assert out["none"] is None
        assert out["text"] == "kept"
        return [x.grad, *(v.detach() for v in out.values() if isinstance(v, torch.Tensor))]

    both((ours, net), run)


def test_an_output_that_shares_an_inputs_memory_is_a_view_of_it() -> None:
    ours = ORTModule(Several())
    x = data()
    out = ours(x)
    assert out["input"] is x
    out["view"][0] = 77.0
    assert x[0, 0] == 77.0


def test_no_output_is_touched_by_a_later_step(pair: tuple[ORTModule, Net]) -> None:
    ours = pair[0]
    first = ours(data())
    kept = first.detach().clone()
    for n in (5, 5, 3):
        ours(data(n)).sum().backward()
    assert torch.equal(first, kept)
    grads = {n: p.grad.clone() for n, p in ours.named_parameters()}
    held = {n: p.grad for n, p in ours.named_parameters()}
    ours.zero_grad(set_to_none=True)
    ours(data(4)).sum().backward()
    assert all(torch.equal(held[n], grads[n]) for n in held)


def test_only_some_outputs_get_a_gradient() -> None:
    net = Several()
    ours = ORTModule(copy.deepcopy(net))
    for choose in (lambda o: o["value"].sum(), lambda o: o["both"][0], lambda o: o["y"].sum() + o["both"][1][0]):
        both((ours, net), lambda m, choose=choose: (m.zero_grad(), choose(m(data())).backward())[1])
    assert captures(ours) == 1


class Two(nn.Module):
    """Both outputs read the same matmul; the second may be detached."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.detached = detached

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y.sigmoid(), (y.detach() if self.detached else y).exp()


def test_a_detached_output_requires_no_gradient() -> None:
    net = Two(detached=True)
    ours = ORTModule(copy.deepcopy(net))
    for _ in range(2):
        for module in (ours, net):
            assert [output.requires_grad for output in module(data())] == [True, False]
        both((ours, net), lambda m: (m.zero_grad(), m(data())[0].sum().backward())[1])


@pytest.mark.parametrize("which", [0, 1])
def test_missing_cotangents_are_zeros(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the backward program for the passed cotangents read a value that forward does not keep."""
    monkeypatch.setattr(
        "onnxtrain.execute.unit_builder.BackwardPrograms._forward_keeps_all", lambda self, special: False
    )
    net = Two()
    ours = ORTModule(copy.deepcopy(net))
    both((ours, net), lambda m: (m.zero_grad(), m(data())[which].sum().backward())[1])
    both((ours, net), lambda m: (m.zero_grad(), sum(y.sum() for y in m(data())).backward())[1])


def test_a_mutated_input_is_copied_back() -> None:
    class Mutates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            seen.add_(x.detach().sum(0))
            return self.linear(x)

    net = Mutates()

    def run(module: nn.Module) -> Any:
        seen = torch.zeros(6)
        module(data(), seen).sum().backward()
        return seen

    both((ORTModule(copy.deepcopy(net)), net), run)


def test_channels_last_inputs() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    ours = ORTModule(copy.deepcopy(net))

    def run(module: nn.Module) -> torch.Tensor:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
        out = module(x)
        out.square().sum().backward()
        assert out.is_contiguous(memory_format=torch.channels_last)
        return out.detach()

    both((ours, net), run)


def test_two_modules_and_two_threads() -> None:
    nets = [Net() for _ in range(2)]
    ours = [ORTModule(copy.deepcopy(n)) for n in nets]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for n in (5, 3, 7):
                ours[index](data(n)).square().sum().backward()
        except Exception as error:  # noqa: BLE001  # whatever it is, the test fails with it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors

    def accumulated(net: nn.Module, batches: list[torch.Tensor]) -> list[Any]:
        for x in batches:
            net(x).square().sum().backward()
        return [p.grad for p in net.parameters()]

    for each, net in zip(ours, nets, strict=True):
        assert_matches([p.grad for p in each.parameters()], accumulated, net, [data(n) for n in (5, 3, 7)])


def test_tied_and_swapped_parameters(pair: tuple[ORTModule, Net]) -> None:
    both(pair, lambda m: m(data()).sum().backward())
    state = {k: v + 0.5 if v.is_floating_point() else v for k, v in pair[1].state_dict().items()}
    for module in pair:
        module.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    both(pair, lambda m: m(data()).sum().backward())


def test_errors_of_the_model_are_raised(pair: tuple[ORTModule, Net]) -> None:
    with pytest.raises(Exception, match=r"shape|size") as eager:
        pair[1](torch.randn(5, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(type(eager.value)):
            pair[0](torch.randn(5, 7))

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("the user's own")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyError, match=r"the user's own"):
            ORTModule(Raises())(data())


def test_hooks_on_the_wrapper_run(pair: tuple[ORTModule, Net]) -> None:
    seen: list[str] = []
    ours = pair[0]
    ours.register_forward_hook(lambda m, i, o: seen.append("forward"))
    ours.register_full_backward_hook(lambda m, i, o: seen.append("backward"))
    ours(data(grad=True)).sum().backward()
    assert seen == ["forward", "backward"]


def test_functional_transforms_and_functional_call(pair: tuple[ORTModule, Net]) -> None:
    state = {k: v.detach() * 2 if v.is_floating_point() else v for k, v in pair[1].state_dict().items()}
    got = torch.func.functional_call(pair[0].eval().module, state, (data(),))
    assert_matches(got, torch.func.functional_call, pair[1].eval(), state, (data(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torch.func.vmap(lambda row: pair[0](row[None]).squeeze(0))(data())
    assert_matches(rows, pair[1], data())


def test_inside_torch_compile_it_is_a_graph_break() -> None:
    inner = nn.Linear(6, 4)

    class Outer(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x * 2) + 1

    ours = Outer(ORTModule(copy.deepcopy(inner)))
    compiled = torch.compile(ours, backend="eager")

    def gradients(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(module(x).square().sum(), [*module.parameters()])

    grads = gradients(compiled, data())
    assert_matches(grads, gradients, Outer(inner), data())
    assert captures(ours.body) == 1


# Odd combinations


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.drop(torch.tanh(self.first(x)))))


@pytest.fixture
def dropping() -> tuple[ORTModule, Drops]:
    net = Drops()
    return ORTModule(copy.deepcopy(net), rng="torch"), net


def seeded(run: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Run from the same seed, without gradients."""

    def again(module: nn.Module) -> Any:
        torch.manual_seed(3)
        module.zero_grad()
        return run(module)

    return again


def _flips_between(module: nn.Module) -> torch.Tensor:
    """A gradient is computed if forward ran with requires_grad, whatever the flag is at backward."""
    module.requires_grad_(True)
    module.second.requires_grad_(False)
    y = module(data())
    module.first.requires_grad_(False)
    module.second.requires_grad_(True)
    y.square().sum().backward()
    return y.detach()


def _halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def _hooks_on_tensors(module: nn.Module) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    x = data(grad=True)
    y = module(x)
    y.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
    y.retain_grad()
    handles = [p.register_hook(lambda gradient: gradient * 3) for p in module.parameters()]
    handles += [p.register_post_accumulate_grad_hook(_halve) for p in module.parameters()]
    y.square().sum().backward()
    for handle in handles:
        handle.remove()
    return [*seen, y.grad, x.grad]


def _checkpointed(module: nn.Module, reentrant: bool) -> list[torch.Tensor]:
    x = data(grad=True)
    y = checkpoint(module, x, use_reentrant=reentrant)
    y.square().sum().backward()
    return [y.detach(), x.grad]


def _on_cpu(module: nn.Module) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = module(data()).square().sum()
    loss.backward()
    return loss.detach()


def _without_hooks(module: nn.Module) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = module(data()).square().sum()
    loss.backward()
    return loss.detach()


def _vectorized_jacobian(module: nn.Module) -> torch.Tensor:
    x = data(grad=True)
    y = module(x)
    (jacobian,) = torch.autograd.grad(y, x, torch.eye(y.numel()).view(-1, *y.shape), is_grads_batched=True)
    return jacobian


def _backward_elsewhere(module: nn.Module) -> torch.Tensor:
    loss = module(data()).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss.detach()


def _in_grad_under_no_grad(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        quiet = module(data())
        with torch.enable_grad():
            loss = module(data()).square().sum()
    loss.backward()
    return quiet + loss.detach()


def _empty(module: nn.Module) -> list[torch.Tensor]:
    module.eval()
    x = data(0, grad=True)
    y = module(x)
    y.sum().backward()
    module.train()
    return [y.detach(), x.grad]


def _after_inference(module: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        module(data())
        computed = data() * 2
    loss = module(computed.clone()).square().sum()
    loss.backward()
    return loss.detach()


def _one_input_twice(module: nn.Module) -> list[torch.Tensor]:
    x = data(grad=True)
    loss = (module(x) * module(x)).sum() + module(x).sum()
    loss.backward()
    return [loss.detach(), x.grad]


ODD: dict[str, Callable[[nn.Module], Any]] = {
    "requires_grad flipped between forward and backward": _flips_between,
    "hooks on tensors": _hooks_on_tensors,
    "inside a reentrant checkpoint": lambda m: _checkpointed(m, reentrant=True),
    "inside a non-reentrant checkpoint": lambda m: _checkpointed(m, reentrant=False),
    "saved on the CPU": _on_cpu,
    "saved tensors hooks disabled": _without_hooks,
    "batched gradients": _vectorized_jacobian,
    "backward in another thread": _backward_elsewhere,
    "enable_grad under no_grad": _in_grad_under_no_grad,
    "an empty batch": _empty,
    "after inference mode": _after_inference,
    "one input for several forwards": _one_input_twice,
}


@pytest.mark.parametrize("name", slow_but_every(2, ODD))
def test_odd_combinations(name: str, dropping: tuple[ORTModule, Drops]) -> None:
    """In the first call, and in a later one."""
    for _ in range(3):
        both(dropping, seeded(ODD[name]))


SECOND_ORDER: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "through inputs only": lambda m, x: torch.autograd.grad(m(x).square().sum(), x, create_graph=True)[0].norm(),
    "through parameters": lambda m, x: sum(
        g.square().sum() for g in torch.autograd.grad(m(x).square().sum(), [*m.first.parameters()], create_graph=True)
    ),
    "third order": lambda m, x: torch.autograd.grad(
        torch.autograd.grad(m(x).square().sum(), x, create_graph=True)[0].square().sum(), x, create_graph=True
    )[0].sum(),
}


@pytest.mark.parametrize(("frozen", "name"), covering([False, True], SECOND_ORDER))
def test_gradients_of_gradients(frozen: bool, name: str) -> None:
    def run(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        torch.manual_seed(3)
        x = data().double().requires_grad_()
        penalty = SECOND_ORDER[name](module, x)
        penalty.backward()
        return [penalty.detach(), x.grad]

    net = Drops().double().requires_grad_(not frozen)
    if frozen and name == "through parameters":
        net.first.requires_grad_(True)
    pair = ORTModule(copy.deepcopy(net), rng="torch"), net
    for _ in range(2):
        with pytest.warns(UserWarning, match="create_graph"):
            both(pair, run)


def test_create_graph_refuses_an_input_that_was_changed() -> None:
    """It would rerun forward on other values."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    kept, not_kept = torch.zeros(3, 6), plain[0].bias
    for changed, error in ((kept, (RuntimeError, "modified by an inplace")), (not_kept, (KernelError, "in place"))):
        y = ORTModule(plain)(kept)
        with torch.no_grad():
            changed.add_(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with pytest.raises(error[0], match=error[1]):
                torch.autograd.grad(y.sum(), [*plain.parameters()], create_graph=True)


def test_create_graph_after_a_later_forward_has_updated_buffers() -> None:
    """Forward is rerun with copies of the buffers as they were; eager's backward does not read them."""
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    def run(module: nn.Module) -> Any:
        x = data(grad=True)
        first = module(x)
        module(data(3))
        (gradient,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        gradient.norm().backward()
        return x.grad

    with pytest.warns(UserWarning, match="create_graph"):
        both((ORTModule(copy.deepcopy(net)), net), run)


def test_copies_after_the_first_step_are_independent(dropping: tuple[ORTModule, Drops]) -> None:
    step = seeded(lambda m: m(data()).square().sum().backward())
    both(dropping, step)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copied = pickle.loads(pickle.dumps(dropping[0], protocol)), copy.deepcopy(dropping[1])
        both(copied, step)
        assert all(p is not q for p, q in zip(copied[0].parameters(), dropping[0].parameters(), strict=True))
    copied = copy.deepcopy(dropping)
    for module in copied:
        module.second.weight.data.zero_()
        module.drop.p = 0.9
    both(copied, step)
    both(dropping, step)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x,
        lambda x: (x, x),
        lambda x: torch.tanh(x) * 2,
        lambda x: None,
        lambda x: {"x": x, "more": [x[1:], 3]},
    ],
    ids=["input", "input-twice", "function", "none", "containers"],
)
@pytest.mark.parametrize("needs", [False, True], ids=["plain", "needs-gradient"])
def test_a_module_without_parameters(forward: Callable[[torch.Tensor], Any], needs: bool) -> None:
    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(x)

    def run(module: nn.Module) -> Any:
        x = data(grad=needs)
        output = module(x)
        first = output[0] if isinstance(output, tuple) else output["x"] if isinstance(output, dict) else output
        if needs and first is not None:
            first.square().sum().backward()
        return [output is x, output, x.grad]

    both((ORTModule(Bare()), Bare()), run)


def test_saved_tensors_hooks_see_no_fake_tensor(dropping: tuple[ORTModule, Drops]) -> None:
    kinds: set[type] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kinds.add(type(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropping[0](data())
    assert kinds <= {torch.Tensor, nn.Parameter}


def test_many_threads_share_one_capture() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    ours = ORTModule(copy.deepcopy(net))
    errors: list[BaseException] = []

    def work(quiet: bool) -> None:
        try:
            for n in (5, 3, 7, 1):
                with torch.set_grad_enabled(not quiet):
                    y = ours(data(n))
                assert y.requires_grad != quiet
                assert_matches(y, net, data(n))
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test fails with it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert captures(ours) == 2, "with gradients, and without"


def test_a_capture_does_not_affect_other_threads() -> None:
    """A capture's patches are local to its thread."""

    class Triples(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 3

    class InTransforms(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 3

    stop, errors = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                x = data(grad=True)
                assert (torch.func.grad(lambda z: InTransforms.apply(z).sum())(x.detach()) == 3).all()
                y = Triples.apply(x)
                y.register_hook(lambda gradient: gradient * 2)
                y.retain_grad()
                y.sum().backward()
                assert (x.grad == 6).all()
                assert (y.grad == 2).all()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            ORTModule(Drops())(data()).sum().backward()
    finally:
        stop.set()
        thread.join()
    assert not errors


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, factor: int = 1) -> torch.Tensor:
        return super().forward(x) * factor


def test_the_log_says_why_a_module_is_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    model, x = ORTModule(Scaled(3, 3)), torch.randn(2, 3)
    calls = {
        "args[1]: 1 → 2": lambda: model(x, 2),
        "args_0: number of dimensions: 2 → 3": lambda: model(x[None], 1),
        "grad mode: True → False": lambda: torch.no_grad()(model)(x, 1),
    }
    model(x, 1)
    with caplog.at_level("INFO", logger="onnxtrain"):
        for reason, call in calls.items():
            caplog.clear()
            call()
            assert f"Scaled: captured again: {reason}" in caplog.text


def test_an_output_has_its_fields_in_the_order_in_which_forward_set_them() -> None:
    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> BaseModelOutputWithPooling:
            output = BaseModelOutputWithPooling(last_hidden_state=x * 2, hidden_states=(x * 3,))
            output.pooler_output = x * 4  # its field stands before hidden_states
            return output

    x = torch.randn(3)
    eager, got = Late()(x), ORTModule(Late(), fallback_policy="FALLBACK_DISABLE")(x)
    assert list(got) == list(eager) == ["last_hidden_state", "hidden_states", "pooler_output"]
    assert torch.equal(got[2], eager[2])
