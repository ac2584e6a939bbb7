"""Convergence investigation: the statistics of two runs, side by side."""

import sys

import torch
from onnxruntime.training.ortmodule import ORTModule
from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh())
        self.head = torch.nn.Linear(12, 2)

    def forward(self, x):
        hidden = inspect_activation("hidden", self.body(x))
        return self.head(hidden)


def main():
    folder, kind = sys.argv[1:]
    torch.manual_seed(0)
    model = Net()
    if kind == "ort":
        model = ORTModule(model)
    GlobalSubscriberManager.subscribe(
        model, [StatisticsSubscriber(f"{folder}/{kind}_out", override_output_dir=True, start_step=1, end_step=3)]
    )
    for _ in range(4):
        torch.nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.tensor([0, 1, 0, 1])).backward()


if __name__ == "__main__":
    main()
