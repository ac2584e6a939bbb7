"""The file of a compiled program: a line of JSON, the constants, and PyTorch's artifact; `build` appends a digest."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import NamedTuple

import torch

from onnxtrain.native.build import DIGEST_BYTES


class StoredProgram(NamedTuple):
    """A compiled program.

    Attributes:
        artifact: what `program_compiler.load` loads.
        guards: a condition on the values of the symbols; None if there is none.
        constants: tensors that follow the arguments of each call.
    """

    artifact: bytes
    guards: str | None
    constants: list[torch.Tensor]

    def write(self, path: Path) -> None:
        file = io.BytesIO()
        torch.save([constant.cpu() for constant in self.constants], file)
        devices = [str(constant.device) for constant in self.constants]
        header = {"guards": self.guards, "devices": devices, "constants": file.tell()}
        path.write_bytes(json.dumps(header).encode() + b"\n" + file.getvalue() + self.artifact)

    @classmethod
    def read(cls, path: Path) -> StoredProgram:
        first_line, _, rest = path.read_bytes()[:-DIGEST_BYTES].partition(b"\n")
        header = json.loads(first_line)
        size = header["constants"]
        constants = torch.load(io.BytesIO(rest[:size]), weights_only=True)
        moved = [constant.to(device) for constant, device in zip(constants, header["devices"], strict=True)]
        return cls(rest[size:], header["guards"], moved)
