"""By default, training leaves the user's process as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtrain.native import compiler

STATE = '''
import atexit, ctypes, gc, inspect, locale, logging, os, pathlib, signal, sys, threading, warnings
import psutil, torch, torch.export, torch._dynamo, torch._inductor.config

class Net(torch.nn.Module):
    """Work enough for compiled kernels; an LSTM makes PyTorch's export warn."""
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Linear(64, 64)
        self.steps = torch.nn.LSTM(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
    def forward(self, x):
        y = torch.nn.functional.gelu(self.table(x), approximate="tanh")
        return self.norm(torch.nn.functional.dropout(self.steps(y)[0], 0.1).flatten(0, 1))

class Branch(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x * 2 if x.sum().item() > 0 else x)

def allocator():
    get = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libc10.so"))._ZN3c1015GetCPUAllocatorEv
    get.restype = ctypes.c_void_p
    return get()

def configs():
    return {
        f"{name}.{key}": repr(value)
        for name in ("torch._dynamo.config", "torch._inductor.config", "torch._export.config")
        for key, value in sys.modules[name].get_config_copy().items()
    }

def functions():
    """Functions of PyTorch's modules and of its classes, and those of Python that are told from none by their use."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "warnings", "gc", "logging", "importlib", "builtins", "inspect"):
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[f"{name}.{key}"] = id(value)
                if issubclass(type(value), type) and name.startswith("torch") and value.__module__ == name:
                    for each, of in list(vars(value).items()):
                        if inspect.isroutine(of):
                            found[f"{name}.{key}.{each}"] = id(of)
    return found

def loggers():
    found = {"": logging.getLogger(), **logging.root.manager.loggerDict}
    return {
        name: (log.level, list(map(id, log.handlers)), list(map(id, log.filters)), log.disabled, log.propagate)
        for name, log in found.items() if isinstance(log, logging.Logger)
    }

def torch_settings():
    return {
        "default dtype": torch.get_default_dtype(), "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(), "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "anomaly": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "float32": torch.get_float32_matmul_precision(), "cudnn": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled, "denormal": (torch.tensor([1e-40]) * 1).item(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "fx metadata": torch.fx.traceback.should_preserve_node_meta,
        "lazy graphs": torch.fx._lazy_graph_module._use_lazy_graph_module_flag,
    }

def python_settings():
    return {
        "allocator": allocator(), "meta_path": list(map(id, sys.meta_path)),
        "path_hooks": list(map(id, sys.path_hooks)), "path": list(sys.path),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(map(id, gc.callbacks))),
        "frozen": gc.get_freeze_count() > 1000,
        "signals": {str(s): repr(signal.getsignal(s)) for s in signal.valid_signals()},
        "environment": dict(os.environ), "cwd": os.getcwd(),
        "umask": [line for line in open("/proc/self/status") if line.startswith("Umask")],
        "locale": locale.setlocale(locale.LC_ALL),
        "filters": (id(warnings.filters), list(warnings.filters)),
        "level names": dict(logging._levelToName), "logging disabled": logging.root.manager.disable,
        "hooks": tuple(map(id, (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook))),
        "tracing": (sys.gettrace(), sys.getprofile(), sys.getswitchinterval(), sys.getrecursionlimit()),
        "streams": tuple(map(id, (sys.stdout, sys.stderr))),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }

def state():
    return {**torch_settings(), **python_settings()}

def train(model, calls=3):
    for _ in range(calls):
        model(torch.randn(64, 8, 64)).sum().backward()

# What PyTorch does to its process when it trains, exports and compiles is not ours.
train(Net())
torch.export.export(Net(), (torch.randn(64, 8, 64),), strict=False)
train(torch.compile(Branch(64, 4), backend="eager"))
before, parts = state(), {"loggers": loggers(), "configs": configs(), "functions": functions()}
print("trains", file=sys.stderr)
'''

TRAIN = """
import onnxtrain
from onnxtrain.execute.reused_memory import LIBRARY

train(onnxtrain.ORTModule(Net()))
train(onnxtrain.prepare(Net()))
train(torch.compile(Net(), backend="onnxtrain"))
with warnings.catch_warnings(record=True):
    train(onnxtrain.ORTModule(Branch(64, 4)))
"""

AFTER = """
import time
limit = time.monotonic() + 240
ours = lambda: [t.name for t in threading.enumerate() if "onnxtrain" in t.name]
while (ours() or psutil.Process().children()) and time.monotonic() < limit:
    time.sleep(0.1)
assert not ours(), ours()
assert not psutil.Process().children(), "child processes are left"
gc.collect()
after = state()
different = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
for part, now in (("loggers", loggers()), ("configs", configs()), ("functions", functions())):
    was = parts[part]
    different.update({f"{part}: {key}": (was[key], now[key]) for key in was if key in now and was[key] != now[key]})
own = logging.getLogger("onnxtrain")
assert (own.level, own.handlers, own.filters) == (logging.NOTSET, [], []), "the log of onnxtrain"
assert not different, different
print("unchanged")
"""

AT_INFO = """
print("asks for more", file=sys.stderr)
os.environ["ORTMODULE_LOG_LEVEL"] = "INFO"
train(onnxtrain.ORTModule(Net()))
"""


def run(*sources: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    python = [sys.executable, "-W", "ignore:Guards may run slower on Python 3.13.0"]
    return subprocess.run(
        [*python, "-c", "\n".join(sources)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.compiler  # without one, a warning says so
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the allocator")
def test_training_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTMODULE_LOG_LEVEL", raising=False)
    done = run(STATE, TRAIN, AFTER, AT_INFO, ONNXTRAIN_CACHE_DIR=str(tmp_path))

    assert (done.stdout, done.returncode) == ("unchanged\n", 0), done.stderr
    usual, at_info = done.stderr.partition("trains\n")[2].split("asks for more\n")
    assert usual == "", "a usual training says nothing"
    assert "INFO onnxtrain: Net: initialisation took" in at_info
    if compiler.find() is not None:
        assert list(tmp_path.rglob("*.so")), "kernels were compiled beside it"


# Each of these an earlier version did without being asked.
ONCE_DONE = {
    "a finder": "sys.meta_path.insert(0, type('Finder', (), {'find_spec': None}))",
    "a frozen collector": "gc.freeze()",
    "a collector that is off": "gc.disable()",
    "a handler": "logging.getLogger('onnxtrain').addHandler(logging.StreamHandler())",
    "a level's name": "logging.addLevelName(15, 'DEVINFO')",
    "a warning filter": "warnings.simplefilter('ignore', FutureWarning)",
    "a signal handler": "signal.signal(signal.SIGUSR1, lambda *_: None)",
    "a function of PyTorch": "torch.Tensor.register_hook = lambda *_: None",
    "an option of PyTorch's": "torch._dynamo.config.suppress_errors = True",
    "a variable": "os.environ['OMP_WAIT_POLICY'] = 'passive'",
    "a child process": "import subprocess; subprocess.Popen(['sleep', '20'], stdout=-3, stderr=-3)",
}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the allocator")
@pytest.mark.parametrize("change", ONCE_DONE)
def test_a_change_is_noticed(change: str) -> None:
    after = AFTER.replace("+ 120", "+ 1")
    done = run(STATE, "import onnxtrain", ONCE_DONE[change], after, "")

    assert done.returncode == 1, done.stdout
    assert "Error" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(compiler.find() is None, reason="needs a C++ compiler")
def test_a_memory_option_is_noticed() -> None:
    ask = "model = onnxtrain.ORTModule(Net(), process_wide='reuse_memory'); assert LIBRARY.wait(); train(model)"
    done = run(STATE, TRAIN, ask, AFTER)

    assert done.returncode == 1, done.stdout
    assert "'allocator'" in done.stderr
