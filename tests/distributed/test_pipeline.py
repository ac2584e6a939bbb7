"""DeepSpeed's pipeline of ORTModules; where DeepSpeed is missing, the import says so."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.mark.skipif(HAS_DEEPSPEED, reason="DeepSpeed is installed")
def test_without_deepspeed_the_import_says_what_to_do() -> None:
    with pytest.raises(ImportError, match=r"requires DeepSpeed.*pip install deepspeed"):
        importlib.import_module("onnxtrain.distributed.pipeline")


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_layers_are_graphs_and_train(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    from onnxtrain.distributed.pipeline import ORTPipelineModule
    from onnxtrain.frontend.ort_module import ORTModule

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)  # see test_deepspeed.py
    deepspeed.init_distributed("gloo")
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), lambda x: x * 2, torch.nn.Linear(8, 4)]
    model = ORTPipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    assert [isinstance(f, ORTModule) for f in model.forward_funcs] == [True, True, False, True]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={"train_batch_size": 4, "optimizer": optimizer}
    )
    batch = torch.randn(4, 8), torch.randn(4, 4)
    losses = [float(engine.train_batch(data_iter=iter([batch]))) for _ in range(4)]
    assert losses[-1] < losses[0]
    torch.distributed.destroy_process_group()
