"""examples.torchrun_fsdp2, in which rank 1 is killed in the middle of its fourth step, before the first restart."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from examples import torchrun_fsdp2

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    steps: list[None] = []
    update = torch.optim.AdamW.step

    def kill(self: Any, *args: Any) -> Any:
        steps.append(None)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *args)

    torch.optim.AdamW.step = kill  # type: ignore[method-assign]

torchrun_fsdp2.main(Path(sys.argv[1]))
