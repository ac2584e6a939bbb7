"""The demonstration: fine-tunes a pretrained MiniLM, eager PyTorch and onnxtrain fed the same batches in turn."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything needed is installed: no request leaves the machine
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log lines would break the live display
