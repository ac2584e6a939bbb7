"""accelerate, Hugging Face's Trainer and Lightning under DDP, FSDP2 and DeepSpeed: as over eager, bit for bit.

Two processes on gloo. On a CPU, accelerate's check of the device makes DistributedDataParallel of `fsdp` and
`deepspeed` configs. Here that check answers as on a GPU; all that follows is accelerate's. Lightning runs DeepSpeed on
GPUs only.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import onnxtrain
from tests.module.test_prepare import WIDTH, Tower

WORLD, STEPS, ACCUMULATED = 2, 4, 2
BLOCKWISE = ("fsdp2", "zero3")  # what gathers the parameters of a block around its call
Prepare = Callable[[], object]
pytestmark = pytest.mark.slow


class Regression(nn.Module):
    """A model that returns its loss, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = Tower()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.manual_seed(dist.get_rank())
        return {"loss": (self.tower(x) - labels).square().mean()}


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(WIDTH, generator=generator), "labels": torch.randn(3, generator=generator)}
        for _ in range(count)
    ]


def zero_config(sharding: str) -> dict[str, Any]:
    """A config of DeepSpeed that shards every parameter, of which accelerate and the Trainer fill in the rest."""
    keeps_gathered = ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(sharding.removeprefix("zero")), **dict.fromkeys(keeps_gathered, 0)},
    }


def check_wrapper(wrapped: nn.Module, sharding: str) -> None:
    """The trainer has distributed the model as it was asked to."""
    names = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPRegression"}
    assert type(wrapped).__name__ == names.get(sharding, "DeepSpeedEngine")


def accelerate_losses(model: Regression, sharding: str, prepare: Prepare, folder: Path) -> list[float]:
    """Train by accelerate, which is to shard after `prepare`, with accumulation and clipping."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    plugins: dict[str, Any] = {}
    if sharding == "fsdp2":
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    elif sharding != "ddp":
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=zero_config(sharding))
    accelerator = Accelerator(cpu="deepspeed_plugin" not in plugins, gradient_accumulation_steps=ACCUMULATED, **plugins)
    prepare()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(batches(2 * WORLD * STEPS), batch_size=2)  # type: ignore[arg-type]
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check_wrapper(wrapped, sharding)
    losses = []
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


def trainer_losses(model: Regression, sharding: str, prepare: Prepare, folder: Path) -> list[float]:
    """Train by Hugging Face's Trainer with an `fsdp` or a `deepspeed` config."""
    from transformers import Trainer, TrainingArguments

    configs: dict[str, dict[str, Any]] = {
        "ddp": {"use_cpu": True, "ddp_backend": "gloo"},
        "fsdp2": {
            "use_cpu": True,
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Block"]},
        },
    }
    prepare()
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=0.05,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **(configs[sharding] if sharding in configs else {"deepspeed": zero_config(sharding)}),
    )
    trainer = Trainer(model, arguments, train_dataset=batches(4 * STEPS))
    trainer.train()
    check_wrapper(trainer.model_wrapped, sharding)
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def lightning_losses(model: Regression, sharding: str, prepare: Prepare, folder: Path) -> list[float]:
    """Train by Lightning's strategy for DDP, and by that for FSDP2, for which the user shards the model."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if isinstance(model, FSDPModule):
                return
            prepare()
            if sharding != "fsdp2":
                return
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for block in model.tower.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

    strategies: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(WORLD, 1, process_group_backend="gloo"),
    }
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategies[sharding](),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(2 * WORLD * STEPS), batch_size=2))  # type: ignore[arg-type]
    losses: list[float] = module.losses
    return losses


TRAINERS = {"accelerate": accelerate_losses, "trainer": trainer_losses, "lightning": lightning_losses}
SHARDINGS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CASES = [
    pytest.param(trainer, sharding, id=f"{trainer}-{sharding}")
    for trainer in TRAINERS
    for sharding in SHARDINGS
    if not (trainer == "lightning" and sharding.startswith("zero"))
]


def parameters_of(model: nn.Module, sharding: str) -> list[list[Any]]:
    """The elements of each parameter, of a shard under FSDP2."""
    gathered: Any = nullcontext()
    if sharding == "zero3":
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters([*model.parameters()])
    with gathered:
        return [(p.to_local() if isinstance(p, DTensor) else p).tolist() for p in model.parameters()]


def check(trainer: str, sharding: str, folder: Path) -> None:
    """Losses and parameters are eager's, and each block or the whole tower is a graph."""
    from accelerate.state import AcceleratorState

    results = []
    for graphs in (False, True):
        AcceleratorState._reset_state(True)
        model = Regression()
        tower = model.tower
        prepare: Prepare = functools.partial(onnxtrain.prepare, tower, rng="torch") if graphs else list
        losses = TRAINERS[trainer](model, sharding, prepare, folder)
        assert all(isinstance(block, FSDPModule) == (sharding == "fsdp2") for block in tower.blocks)
        assert hasattr(next(model.parameters()), "ds_id") == (sharding == "zero3")
        results.append((losses, parameters_of(model, sharding)))
        if graphs:
            report = onnxtrain.report_of(tower)
            assert report.by_block or sharding not in BLOCKWISE
            assert all(region.compiled is not None for region in report.regions), str(report)
    assert len(losses) >= STEPS
    assert results[0] == results[1]


def work(rank: int, folder: str, trainer: str, sharding: str) -> None:
    torch.set_num_threads(1)
    sizes = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    torchrun = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **torchrun, "ACCELERATE_TORCH_DEVICE": "cpu"}
    rendezvous: dict[str, Any] = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": WORLD}
    if sharding.startswith("zero"):
        os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see test_deepspeed.py
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **rendezvous)
    else:
        dist.init_process_group("gloo", **rendezvous)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    if sharding != "ddp":
        from accelerate.state import DistributedType, PartialState

        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    check(trainer, sharding, Path(folder))
    dist.destroy_process_group()


@pytest.mark.parametrize(("trainer", "sharding"), CASES)
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_training_is_bitwise_that_over_eager(trainer: str, sharding: str, tmp_path: Path) -> None:
    if sharding.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path), trainer, sharding), WORLD, start_method="forkserver")
