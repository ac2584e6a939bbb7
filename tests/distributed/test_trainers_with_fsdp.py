"""accelerate, Hugging Face's Trainer and Lightning with FSDP2: two processes on gloo, bit for bit as over eager blocks.

On a CPU, accelerate's check of the device makes DistributedDataParallel of an `fsdp` config. Here that check answers as
on a GPU; all that follows is accelerate's.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import onnxtrain
from tests.module.test_prepare import WIDTH, Tower

WORLD, STEPS = 2, 4
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


def accelerate_losses(model: Regression, prepare: Callable[[], object] | None, folder: Path) -> list[float]:
    """Train by accelerate, which is to shard after `prepare`, with accumulation and clipping."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    assert accelerator.is_fsdp2
    if prepare is not None:
        prepare()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(batches(4 * STEPS), batch_size=2)  # type: ignore[arg-type]
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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


def trainer_losses(model: Regression, prepare: Callable[[], object] | None, folder: Path) -> list[float]:
    """Train by Hugging Face's Trainer with an `fsdp` config."""
    from transformers import Trainer, TrainingArguments

    if prepare is not None:
        prepare()
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        fsdp=True,  # type: ignore[arg-type]  # the declared type is the former one
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Block"]},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=batches(4 * STEPS))
    trainer.train()
    assert trainer.accelerator.is_fsdp2
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def lightning_losses(model: Regression, prepare: Callable[[], object] | None, folder: Path) -> list[float]:
    """Train by Lightning's strategy for FSDP2, for which the user shards the model."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if isinstance(model, FSDPModule):
                return
            if prepare is not None:
                prepare()
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

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=ModelParallelStrategy(WORLD, 1, process_group_backend="gloo"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(4 * STEPS), batch_size=2))  # type: ignore[arg-type]
    losses: list[float] = module.losses
    return losses


TRAINERS = (accelerate_losses, trainer_losses, lightning_losses)
Train = Callable[[Regression, Callable[[], object] | None, Path], list[float]]


def check(train: Train, folder: Path) -> None:
    """Losses and shards are eager's, and each block is a graph."""
    from accelerate.state import AcceleratorState

    results = []
    for graphs in (False, True):
        AcceleratorState._reset_state(True)
        model = Regression()
        prepare = (lambda tower: lambda: onnxtrain.prepare(tower, rng="torch"))(model.tower) if graphs else None
        losses = train(model, prepare, folder)
        assert isinstance(model.tower.blocks[0], FSDPModule)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        results.append([*losses, *(p.to_local().tolist() for p in model.parameters())])  # type: ignore[attr-defined]
        if graphs:
            report = onnxtrain.report_of(model.tower)
            assert report.by_block
            assert all(region.compiled is not None for region in report.regions), str(report)
    assert len(losses) >= STEPS
    assert results[0] == results[1]


def work(rank: int, folder: str, number: int) -> None:
    torch.set_num_threads(1)
    sizes = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    torchrun = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **torchrun, "ACCELERATE_TORCH_DEVICE": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    check(TRAINERS[number], Path(folder))
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(len(TRAINERS)), ids=[train.__name__ for train in TRAINERS])
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_training_is_bitwise_that_over_eager(number: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path), number), WORLD, start_method="forkserver")
