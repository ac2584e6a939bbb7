"""examples.torchrun_zero3 without the extension that DeepSpeed compiles for a CPU, which takes minutes."""

from __future__ import annotations

import deepspeed

from examples import torchrun_zero3

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torchrun_zero3.main()
