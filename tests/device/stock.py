"""Train artifacts with stock onnxruntime only: every update is bound to the memory of its input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch

from onnxtrain.device import checkpoint


def session(path: Path | str, library: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def facts(path: Path | str) -> dict[str, Any]:
    model = onnx.load(str(path), load_external_data=False)
    metadata: dict[str, Any] = json.loads({p.key: p.value for p in model.metadata_props}["onnxtrain"])
    return metadata


class Stock:
    """A training in progress."""

    def __init__(self, folder: Path, prefix: str = "", lr: float = 1e-3, library: Path | None = None) -> None:
        self.folder, self.prefix, self.lr, self.steps, self.draws = folder, prefix, lr, 0, 0
        self.train = session(folder / f"{prefix}training_model.onnx", library)
        self.facts = facts(folder / f"{prefix}training_model.onnx")
        self.library = library
        state = checkpoint.load(folder / f"{prefix}checkpoint")
        self.values = {n: ort.OrtValue.ortvalue_from_numpy(np.array(a)) for n, a in state.parameters.items()}
        for name in self.facts["trainable"]:
            zeros = np.full_like(state.parameters[name], np.nan)  # a reset must not read them
            self.values[f"{name}_grad.accumulation.buffer"] = ort.OrtValue.ortvalue_from_numpy(zeros)

    def step(self, *inputs: np.ndarray, reset: bool = True) -> list[np.ndarray]:
        """One training call; gives the outputs, the loss first."""
        feeds = dict(zip(self.facts["inputs"], inputs, strict=True)) | {"lazy_reset_grad": np.array([reset])}
        if self.facts["draws"]:
            feeds["random_seed"] = np.array([self.draws])
            self.draws += 1
        return self._run(self.train, self.facts, feeds)

    def update(self) -> None:
        """One optimizer step."""
        path = self.folder / f"{self.prefix}optimizer_model.onnx"
        metadata = facts(path)
        if self.steps == 0:
            self.optimizer = session(path)
            for name in metadata["trainable"]:
                self.values[f"{name}_grad"] = self.values[f"{name}_grad.accumulation.buffer"]
                for state in metadata["state"]:
                    shape = self.values[name].numpy().shape
                    zeros = np.zeros(shape, metadata["state_dtype"][name])
                    self.values[f"{name}.{state}"] = ort.OrtValue.ortvalue_from_numpy(zeros)
        feeds = {"learning_rate": np.array([self.lr], np.float32), "step": np.array([self.steps])}
        self._run(self.optimizer, metadata, feeds)
        self.steps += 1

    def _run(
        self, run: ort.InferenceSession, metadata: dict[str, Any], feeds: dict[str, np.ndarray]
    ) -> list[np.ndarray]:
        binding = run.io_binding()
        memory = dict(self.values)
        for name in metadata.get("in_chunks", ()):  # two chunks of the same memory
            for tensor_name in (name, f"{name}_grad", *(f"{name}.{state}" for state in metadata["state"])):
                memory[tensor_name] = ort.OrtValue.ortvalue_from_numpy(self.values[tensor_name].numpy().reshape(2, -1))
        for value in run.get_inputs():
            given = feeds.get(value.name)
            bound = memory[value.name] if given is None else ort.OrtValue.ortvalue_from_numpy(given)
            binding.bind_ortvalue_input(value.name, bound)
        for value in run.get_outputs():
            if value.name in metadata["updates"]:
                binding.bind_ortvalue_output(value.name, memory[metadata["updates"][value.name]])
            else:
                binding.bind_output(value.name)
        run.run_with_iobinding(binding)
        outputs = dict(zip([v.name for v in run.get_outputs()], binding.get_outputs(), strict=True))
        return [outputs[name].numpy() for name in metadata["outputs"]]

    def train_on(self, batches: Iterable[tuple[torch.Tensor, ...]]) -> list[float]:
        """A step of the optimizer for each batch; gives the losses."""
        losses = []
        for batch in batches:
            losses.append(float(self.step(*(t.numpy() for t in batch))[0]))
            self.update()
        return losses

    def evaluate(self, *inputs: np.ndarray) -> dict[str, np.ndarray]:
        run = session(self.folder / f"{self.prefix}eval_model.onnx", self.library)
        metadata = facts(self.folder / f"{self.prefix}eval_model.onnx")
        feeds = dict(zip(metadata["inputs"], inputs, strict=True))
        feeds |= {v.name: self.values[v.name].numpy() for v in run.get_inputs() if v.name not in feeds}
        return dict(zip([v.name for v in run.get_outputs()], run.run(None, feeds), strict=True))

    def parameter(self, name: str) -> np.ndarray:
        array: np.ndarray = self.values[name].numpy()
        return array

    def gradients(self) -> dict[str, np.ndarray]:
        """The accumulated gradients, by the name of the parameter."""
        return {n: self.values[f"{n}_grad.accumulation.buffer"].numpy().copy() for n in self.facts["trainable"]}


def clipped(gradients: Sequence[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    """The gradients after PyTorch's clip_grad_norm_."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def train_torch(
    module: torch.nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: list[tuple[torch.Tensor, ...]],
    make_optimizer: Any,
    clip: float | None = None,
) -> torch.Tensor:
    """The losses of the same training in eager PyTorch; the last of a batch's tensors is the target."""
    optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
    losses = []
    for *inputs, target in batches:
        optimizer.zero_grad()
        value = loss(module(*inputs), target)
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)
