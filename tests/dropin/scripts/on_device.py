"""On-device training: artifacts from blocks, then steps of the training API."""

import sys

import numpy as np
import onnx
import onnxruntime.training.onnxblock as onnxblock
import torch
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

folder = sys.argv[1]
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
torch.onnx.export(net, (torch.randn(4, 8),), f"{folder}/net.onnx", input_names=["input"], output_names=["output"],
                  dynamic_axes={"input": {0: "batch"}}, training=torch.onnx.TrainingMode.TRAINING,
                  do_constant_folding=False, dynamo=False)  # fmt: skip


class ScaledLoss(onnxblock.Block):
    def __init__(self):
        super().__init__()
        self.loss = onnxblock.loss.CrossEntropyLoss()
        self.scale = onnxblock.blocks.Mul()
        self.two = onnxblock.blocks.Constant(2.0)

    def build(self, output):
        return self.scale(self.loss(output), self.two())


model = onnx.load(f"{folder}/net.onnx")
trained = [name for name, _ in net.named_parameters()]
artifacts.generate_artifacts(
    model, requires_grad=trained, loss=ScaledLoss(), optimizer=artifacts.OptimType.AdamW, artifact_directory=folder
)
state = CheckpointState.load_checkpoint(f"{folder}/checkpoint")
module = Module(f"{folder}/training_model.onnx", state, f"{folder}/eval_model.onnx")
optimizer = Optimizer(f"{folder}/optimizer_model.onnx", module)
scheduler = LinearLRScheduler(optimizer, warmup_step_count=2, total_step_count=20, initial_lr=0.05)
data = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
labels = (data[:, 0] > 0).astype(np.int64)
losses = []
for _ in range(15):
    module.train()
    losses.append(float(module(data, labels)))
    optimizer.step()
    scheduler.step()
    module.lazy_reset_grad()
CheckpointState.save_checkpoint(state, f"{folder}/trained")
module.eval()
print("losses", losses[0], losses[-1], "eval", float(module(data, labels)))
