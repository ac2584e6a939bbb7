"""The argument MODEL: a function in a file, a folder with a config, an ONNX file."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.cli.model import load_model
from onnxtrain.errors import OptionError
from onnxtrain.testing import assert_no_worse_than_eager

SOURCE = """
import torch
from beside_the_net import WIDTH

def build():
    return torch.nn.Linear(WIDTH, 2), torch.ones(3, WIDTH)

def keywords():
    return torch.nn.Linear(WIDTH, 2), {"input": torch.ones(3, WIDTH)}

def no_inputs():
    return torch.nn.Linear(WIDTH, 2)

WORD = "no function"
"""

SMALL = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}
FOLDERS = {
    "BertForSequenceClassification": {"model_type": "bert", **SMALL},
    "BertForMaskedLM": {"model_type": "bert", **SMALL},
    "BertForTokenClassification": {"model_type": "bert", **SMALL},
    "BertForQuestionAnswering": {"model_type": "bert", **SMALL},
    "GPT2LMHeadModel": {
        "model_type": "gpt2", "vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20,
    },
    "LlamaForCausalLM": {"model_type": "llama", **SMALL},
    "T5ForConditionalGeneration": {
        "model_type": "t5", "vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2,
    },
    "ViTForImageClassification": {"model_type": "vit", **SMALL, "image_size": 8, "patch_size": 4},
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside_the_net.py").write_text("WIDTH = 4\n")
    (tmp_path / "net_of_a_test.py").write_text(SOURCE)
    return tmp_path / "net_of_a_test.py"


@pytest.mark.parametrize("function", ["build", "keywords"])
def test_a_function_in_a_file(file: Path, function: str) -> None:
    loaded = load_model(f"{file}:{function}")
    assert loaded.name == function
    assert loaded().shape == (3, 2)


def test_a_decoder_without_labels_gets_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**FOLDERS["T5ForConditionalGeneration"], "architectures": ["T5Model"]})
    )
    loaded = load_model(str(tmp_path), batch=3, length=8)
    assert loaded().last_hidden_state.shape == (3, 8, 16)


@pytest.mark.parametrize("architecture", FOLDERS)
def test_a_folder_with_a_config(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FOLDERS[architecture], "architectures": [architecture]}))
    loaded = load_model(str(tmp_path), batch=3, length=64)
    assert type(loaded.module).__name__ == loaded.name == architecture
    assert loaded.module.training
    assert loaded().loss.isfinite()


def test_an_onnx_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    ).eval()
    path, x = tmp_path / "net.onnx", torch.randn(2, 3, 8, 8)
    open_batch = ({0: torch.export.Dim.DYNAMIC},)
    torch.onnx.export(net, (x,), str(path), dynamo=True, dynamic_shapes=open_batch, verbose=False)
    loaded = load_model(str(path), batch=7)
    assert [tuple(x.shape) for x in loaded.args] == [(7, 3, 8, 8)]

    module, exact = ORTModule(loaded.module, fallback_policy="FALLBACK_DISABLE"), copy.deepcopy(net).double()
    for rows in (2, 5):  # as the exported module, gradients too
        x = torch.randn(rows, 3, 8, 8)
        cotangent = torch.randn(rows, 5)
        results = []
        for model in (module, net, exact):
            model.zero_grad()
            kind = next(model.parameters()).dtype
            output = model(x.to(kind))
            output.backward(cotangent.to(kind))
            results.append([output, *(p.grad for p in model.parameters())])
        for index, (ours, eager, wanted) in enumerate(zip(*results, strict=True)):
            assert_no_worse_than_eager(f"value {index} of {rows} rows", ours, eager, wanted)


class Residual(torch.nn.Module):
    """A sum that could overwrite the value that tanh's backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = torch.nn.Linear(256, 256), torch.nn.Linear(256, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(x)
        result: torch.Tensor = self.out(torch.tanh(hidden) + hidden)
        return result


def test_the_module_of_an_onnx_file_runs_under_autograd(tmp_path: Path) -> None:
    """Run and copy it as `verify` and `memory` do."""
    torch.manual_seed(0)
    net = Residual().eval()
    path, x = tmp_path / "net.onnx", torch.randn(300, 256)  # large enough for other libraries than PyTorch's own
    torch.onnx.export(net, (x,), str(path), dynamo=True, verbose=False)
    twin, exact = copy.deepcopy(load_model(str(path)).module), copy.deepcopy(net).double()
    results = []
    for model in (twin, net, exact):
        output = model(x.to(next(model.parameters()).dtype))
        output.square().mean().backward()
        results.append([output.detach(), *(p.grad for p in model.parameters())])
    for index, (ours, eager, wanted) in enumerate(zip(*results, strict=True)):
        assert_no_worse_than_eager(f"value {index}", ours, eager, wanted)


def test_invalid_models_are_refused(file: Path, tmp_path: Path) -> None:
    def refused(text: str, word: str) -> None:
        with pytest.raises(OptionError, match=word):
            load_model(text)

    refused(f"{file}:no_inputs", r"\(module, inputs\)")
    refused(f"{file}:WORD", "no function 'WORD'")
    refused(f"{file}:other", "no function 'other'")
    refused(str(tmp_path / "none.py:build"), "no such file")
    refused(str(tmp_path / "none.onnx"), "no such file")
    refused(str(file), "something else")
    refused(str(tmp_path), "config.json")
    (tmp_path / "config.json").write_text("{")
    refused(str(tmp_path), "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refused(str(tmp_path), "architectures")
