"""The demonstration: fine-tune a pretrained MiniLM in eager PyTorch and onnxtrain, interleaved on the same batches."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything needed is installed: no request leaves the machine
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log lines would break the live display
