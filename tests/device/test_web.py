"""The web example: the same artifacts train in Node and in a real browser, to the same losses as in Python.

It takes Node.js 20 with the packages of examples/web/package.json, and for the page Chromium:

    npm install --prefix examples/web
    apt-get install chromium
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from examples.web.__main__ import Handler, assemble
from examples.web.artifacts import TRAINING_DIGITS, Network, digits, make
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.device import checkpoint
from tests.thinned import slow_except

WEB = Path(__file__).parents[2] / "examples" / "web"
NODE_MODULES = WEB / "node_modules"
CHROMIUM = shutil.which("chromium") or "chromium"
BATCH = 50
PROMISED = 1e-4  # docs/reference/training-api.md: Python's losses to four digits
INSTALL = "npm install --prefix examples/web"
pytestmark = pytest.mark.timeout(1800)  # a software GPU is slow; the scripts give up where nothing goes on


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip if Node.js or its packages are missing; the reason says how to install them."""
    if shutil.which("node") is None:
        return pytest.mark.skip("needs Node.js 20")
    missing = [package for package in packages if not (NODE_MODULES / package).is_dir()]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: {INSTALL}")


needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    assert make(folder) >= 0.97
    return folder


def node(script: str, *arguments: object) -> dict:
    """Run a script of the example and return the JSON that it prints last. Time out if there is no progress."""
    command = ["node", str(WEB / "node" / script), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result: dict = json.loads(ran.stdout.splitlines()[-1])
    return result


def opened(folder: Path, state: CheckpointState) -> tuple[Module, Optimizer]:
    """On one thread, for the same order of sums on every machine."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    module = Module(folder / "training_model.onnx", state, session_options=options)
    return module, Optimizer(folder / "optimizer_model.onnx", module)


def in_python(folder: Path, steps: int) -> tuple[list[float], CheckpointState]:
    """The steps that examples/web/node/train.js makes, on one thread."""
    pixels, labels = digits()
    images, labels = (pixels[:, None] / 16).astype(np.float32), labels.astype(np.int64)
    state = CheckpointState.load_checkpoint(folder / "untrained.safetensors")
    module, optimizer = opened(folder, state)
    losses = []
    for step in range(steps):
        start = step * BATCH % TRAINING_DIGITS
        batch = slice(start, min(start + BATCH, TRAINING_DIGITS))
        losses.append(float(module(images[batch], labels[batch])))
        optimizer.step()
        module.lazy_reset_grad()
    return losses, state


def continued(folder: Path, state: CheckpointState, after: int) -> list[float]:
    """The losses of the next two steps in Python, on the first batch."""
    images, labels = (digits()[0][:BATCH, None] / 16).astype(np.float32), digits()[1][:BATCH].astype(np.int64)
    module, optimizer = opened(folder, state)
    assert optimizer.step_count == after
    losses = []
    for _ in range(2):
        losses.append(float(module(images, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


@needs("onnxruntime-node", "onnxruntime-web")
@pytest.mark.parametrize("runtime", slow_except(["node", "web"], "node"))
def test_node_trains_as_python_does(runtime: str, artifacts: Path, tmp_path: Path) -> None:
    arguments = ("--runtime", runtime, "--out", tmp_path / "model.onnx", "--checkpoint", tmp_path / "checkpoint")
    result = node("train.js", artifacts, "--steps", 50, *arguments)
    losses, state = in_python(artifacts, 50)
    assert result["losses"] == pytest.approx(losses, rel=PROMISED)

    saved = checkpoint.load(tmp_path / "checkpoint")
    assert (saved.step, saved.learning_rate) == (50, 1e-3)
    assert saved.optimizer.keys() == {"first_order_moment", "second_order_moment"}
    for name, parameter in state.parameters:
        difference = np.linalg.norm(saved.parameters[name] - parameter.data)
        assert difference <= PROMISED * np.linalg.norm(parameter.data), name
    resumed = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert continued(artifacts, resumed, 50) == pytest.approx(continued(artifacts, state, 50), rel=PROMISED)

    images = (digits()[0][TRAINING_DIGITS:, None] / 16).astype(np.float32)
    assert accuracy_of(tmp_path / "model.onnx", images) == result["accuracy"]


def accuracy_of(path: Path, images: np.ndarray) -> float:
    """Of an exported model, on the digits that were not trained on."""
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(path)
    assert [value.name for value in session.get_inputs()] == ["image"]
    assert [value.name for value in session.get_outputs()] == ["logits"]
    logits = session.run(None, {"image": images})[0]
    return float((logits.argmax(1) == digits()[1][TRAINING_DIGITS:]).mean())


@needs("onnxruntime-node")
@pytest.mark.slow
def test_memory_in_node_stays_flat_over_a_thousand_steps(artifacts: Path) -> None:
    memory = node("train.js", artifacts, "--steps", 1500)["memory"]
    assert max(memory[5:]) < memory[4] * 1.05


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the folder as the command does; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page."""
    folder = tmp_path_factory.mktemp("page")
    assemble(folder)
    shutil.copytree(artifacts, folder / "artifacts")
    with served(folder) as address:
        yield address


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(image.flatten(1))))


class Rows(nn.Module):
    """Reads an image row by row, in both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(8, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(768, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(image.flatten(1, 2))[0].flatten(1))


@needs("onnxruntime-web", "playwright-core")
@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "backend"),
    [
        pytest.param(network, backend, id=f"{name}-{backend}")
        for name, network in {
            "cnn": Network,
            "mlp": Mlp,
            **{kind.__name__.lower(): partial(Rows, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
        }.items()
        for backend in ("wasm", "webgpu")
    ],
)
def test_the_browser_trains_as_python_does(network: type[nn.Module], backend: str, tmp_path: Path) -> None:
    assemble(tmp_path)
    make(tmp_path / "artifacts", network())
    with served(tmp_path) as address:
        result = node("in_browser.js", address, "--backend", backend, "--steps", 30, "--chromium", CHROMIUM)
    losses, _ = in_python(tmp_path / "artifacts", 30)
    assert losses[-1] < losses[0] - 0.1
    assert result["losses"] == pytest.approx(losses, rel=PROMISED)


@needs("onnxruntime-web", "playwright-core")
@needs_chromium
@pytest.mark.slow  # a tenth of a minute in a browser; node runs the same artifacts and the same build of onnxruntime
@pytest.mark.parametrize(("backend", "steps"), [("wasm", 60), ("webgpu", 30)], ids=["wasm", "webgpu"])
def test_the_page_learns_drawn_digits(backend: str, steps: int, page: str, tmp_path: Path) -> None:
    """Draw seven digits, one of them by keyboard, and two triangles that the model shall read as fives."""
    model = tmp_path / "my-digits.onnx"
    arguments = ("--backend", backend, "--steps", steps, "--out", model, "--chromium", CHROMIUM)
    seen = node("drive.js", page, *arguments)
    assert seen["backend"] == backend
    assert seen["problem"] is None
    assert seen["problems"] == []
    before, after = seen["own"]
    assert before != "9 of 9"
    assert after == "9 of 9"
    assert seen["steps"] >= steps
    assert seen["loss"] < 0.5
    assert seen["overflow"] == 0
    images = (digits()[0][TRAINING_DIGITS:, None] / 16).astype(np.float32)
    shown = float(seen["test"][1].removesuffix(" %"))
    assert round(100 * accuracy_of(model, images), 1) == shown, "a percentage with one decimal is shown"
    assert shown > 93


@needs("onnxruntime-web", "playwright-core")
@needs_chromium
@pytest.mark.slow
def test_memory_in_the_browser_stays_flat_over_a_thousand_steps(page: str) -> None:
    megabytes = node("drive.js", page, "--steps", 1400, "--chromium", CHROMIUM)["megabytes"]
    assert max(megabytes[9:]) < max(megabytes[3:5]) * 1.1  # it goes up and down with the garbage collector


@needs("onnxruntime-web", "playwright-core")
@needs_chromium
@pytest.mark.slow
def test_the_page_fits_a_phone(page: str) -> None:
    seen = node("drive.js", page, "--steps", 5, "--phone", "--chromium", CHROMIUM)
    assert (seen["overflow"], seen["problem"], seen["problems"]) == (0, None, [])
