"""A batch is checked for padding with one copy from its device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule, to_device
from onnxtrain.execute import host_batch, packed_variants, packing
from onnxtrain.execute.host_batch import host_values
from onnxtrain.execute.packing import KeptTokens, PackingCheck, copied_to_host
from onnxtrain.passes.pack_tokens import PackingPlan, plan_packing
from tests.passes.less_work import WORDS
from tests.passes.test_pack_tokens import FORMS, Biased, Encoder, batch_of, bool_mask

_WAIT = {torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero,
         torch.Tensor.__bool__, torch.Tensor.__int__, torch.nonzero}  # fmt: skip


class DeviceTensor(torch.Tensor):
    """A tensor that reports another device; records calls that would wait for it."""

    waits: list[str] = []  # noqa: RUF012  # shared by all

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]  # a property of C
            return torch.device("meta")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in _WAIT:
            cls.waits.append(func.__name__)
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result
        return result


@pytest.fixture
def waits() -> list[str]:
    DeviceTensor.waits.clear()
    return DeviceTensor.waits


def test_tensors_of_all_types_are_copied_to_the_host_at_once(waits: list[str]) -> None:
    originals = [
        torch.tensor([[True, False, True]]),
        torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        torch.tensor(-5),
        torch.empty(0, 3, dtype=torch.int64),
        torch.arange(5, dtype=torch.uint8),
        torch.arange(-2, 2, dtype=torch.int64),
        torch.arange(3, dtype=torch.int16)[None],
    ]
    copies = copied_to_host([t.as_subclass(DeviceTensor) for t in originals])
    assert waits == ["cpu"]
    for copy, original in zip(copies, originals, strict=True):
        assert type(copy) is torch.Tensor
        assert copy.dtype == original.dtype
        assert torch.equal(copy, original)


def test_floating_tensors_are_not_copied_to_the_host(waits: list[str]) -> None:
    on_host = torch.ones(2)
    shaped, same = copied_to_host([torch.ones(4, 5, dtype=torch.float16).as_subclass(DeviceTensor), on_host])
    assert (shaped.shape, shaped.dtype, shaped.device.type) == ((4, 5), torch.float16, "cpu")
    assert same is on_host
    assert not waits


@pytest.mark.parametrize("head", ["mean", "labels"])
def test_a_batch_is_checked_with_one_copy(head: str, waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[tuple[KeptTokens | None, KeptTokens | None]] = []
    kept_tokens = PackingCheck.kept_tokens

    def recording(self: PackingCheck, tensors: Sequence[torch.Tensor], batch: int, steps: int) -> KeptTokens | None:
        kept = kept_tokens(self, tensors, batch, steps)
        answers.append((kept, kept_tokens(self, [t.as_subclass(DeviceTensor) for t in tensors], batch, steps)))
        return kept

    monkeypatch.setattr(PackingCheck, "kept_tokens", recording)
    torch.manual_seed(0)
    ORTModule(Encoder(bool_mask, head=head), skip_padding="always")(*batch_of(FORMS["right"]))
    ((kept, on_device),) = answers
    assert kept is not None
    assert on_device is not None
    assert on_device.rows.shape == kept.rows.shape
    assert on_device.causal == kept.causal
    assert waits == ["cpu"]


def test_a_batch_that_the_host_knows_is_not_copied_back(waits: list[str]) -> None:
    words = torch.arange(6).view(2, 3)
    batch = to_device({"words": words, "more": [torch.ones(2), (words > 2, "text")]}, "meta")
    assert [batch["words"].device.type, batch["more"][1][1]] == ["meta", "text"]
    expected = words.clone()
    words.zero_()
    assert torch.equal(host_values(batch["words"]), expected)
    assert torch.equal(host_values(batch["more"][1][0]), expected > 2)
    assert host_values(batch["more"][0]) is None  # floating-point values decide nothing
    with_host_values, other = (t.as_subclass(DeviceTensor) for t in (expected.clone(), expected.clone()))
    host_batch.remember(with_host_values, expected)
    assert copied_to_host([with_host_values])[0] is expected
    assert waits == []
    assert torch.equal(copied_to_host([with_host_values, other])[1], expected)
    assert waits == ["cpu"]
    other.data.fill_(7)  # no version tells: what the user did not pass to `to_device` is copied for each call
    assert torch.equal(copied_to_host([other])[0], torch.full_like(expected, 7))


def test_host_copies_of_tensors_changed_on_the_device_are_not_used() -> None:
    batch = to_device(torch.arange(6), "meta")
    view = batch.view(2, 3)
    assert host_values(view) is None
    assert host_values(batch) is not None
    view.add_(1)
    assert host_values(batch) is None
    assert to_device(torch.arange(3), "cpu").device.type == "cpu"
    with torch.inference_mode():  # without versions, a change would not be noticed
        assert host_values(to_device(torch.arange(6), "meta")) is None


def test_host_values_are_dropped_with_the_batch() -> None:
    count = len(host_batch._host_copies)
    batch = to_device(torch.arange(6), "meta")
    assert len(host_batch._host_copies) == count + 1
    del batch
    assert len(host_batch._host_copies) == count


def test_copies_to_a_gpu_are_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory, CUDA waits for earlier work if they are large."""
    pinned = []
    empty_like = torch.empty_like

    def counted(tensor: torch.Tensor, pin_memory: bool = False) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty_like(tensor)

    monkeypatch.setattr(torch, "empty_like", counted)
    original = torch.arange(3)
    copy = host_batch.staged(original, torch.device("cuda"))
    host_batch.staged(original, torch.device("meta"))
    assert pinned == [True, False]
    assert copy is not original
    assert torch.equal(copy, original)


class OnGpu(nn.Module):
    """Attention with heads of 8 elements, which flash attention supports."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score = nn.Embedding(WORDS, 32), nn.Linear(32, 3)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.words(words), src_key_padding_mask=words == 0)
        return self.score(x.masked_fill((words == 0)[..., None], 0.0).sum(1)).square().mean()


@contextmanager
def waits_raise() -> Iterator[None]:
    """Make a synchronization of the host with the GPU an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu_if_the_host_knows_the_batch() -> None:
    torch.manual_seed(0)
    words = torch.randint(1, WORDS, (3, 6)) * torch.tensor(FORMS["right"])
    wrapped = ORTModule(OnGpu().cuda().bfloat16(), skip_padding="always")
    wrapped(words.cuda()).backward()  # compiles
    batch = to_device(words, "cuda")
    with waits_raise():
        wrapped(batch).backward()


@pytest.mark.gpu
def test_a_step_waits_for_the_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the one copy, the step runs in a mode in which synchronizing raises."""
    torch.manual_seed(0)
    words = (torch.randint(1, WORDS, (3, 6)) * torch.tensor(FORMS["right"])).cuda()
    wrapped = ORTModule(OnGpu().cuda().bfloat16(), skip_padding="always")
    wrapped(words).backward()  # compiles
    waits = 0

    def recording(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal waits
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            copies = copied_to_host(tensors)
        torch.cuda.set_sync_debug_mode("error")
        waits += sum("synchroniz" in str(w.message) for w in caught)
        return copies

    monkeypatch.setattr(packing, "copied_to_host", recording)
    with waits_raise():
        wrapped(words).backward()
    assert waits == 1


@pytest.mark.parametrize(("bias", "flash", "waits"), [(None, True, False), (None, False, True), ("added", True, True)])
def test_attention_that_would_wait_for_lengths_is_not_packed(
    bias: str | None, flash: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[PackingPlan | None] = []

    def planned(*arguments: Any) -> PackingPlan | None:
        plans.append(plan_packing(*arguments))
        return plans[-1]

    monkeypatch.setattr(packed_variants, "plan_packing", planned)
    monkeypatch.setattr(packed_variants, "flash_runs", lambda *arguments: flash)
    ORTModule(Encoder(bool_mask) if bias is None else Biased(bias))(*batch_of(FORMS["right"]))
    (plan,) = plans
    assert plan is not None
    assert (packed_variants.waits_for_lengths(plan, torch.device("cuda")) is not None) == waits
