"""Which files are the user's: by where PyTorch and onnxtrain lie, not by what folders are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onnxtrain
from onnxtrain.capture import source_line
from onnxtrain.capture.key import snapshot

pytestmark = pytest.mark.everywhere

PACKAGE, PYTORCH = Path(onnxtrain.__file__).parent, Path(torch.__file__).parent
USERS = (
    PACKAGE.parent / "tests" / "model.py",
    PACKAGE.parent / "onnxtrain_experiments" / "model.py",  # beside the package, and its name begins with the package's
    PYTORCH.parent / "torchvision" / "models" / "resnet.py",
    Path("/home/user/onnxtrain/model.py"),
    Path("/home/user/torch/nn/model.py"),
)
OTHERS = (PACKAGE / "frontend" / "ort_module.py", PACKAGE / "capture" / "capture.py", PYTORCH / "fx" / "graph.py")


@pytest.mark.parametrize("file", USERS, ids=str)
def test_users_file(file: Path) -> None:
    assert source_line.is_user_file(str(file))
    assert snapshot._is_forward(str(file))


@pytest.mark.parametrize("file", OTHERS, ids=str)
def test_file_of_pytorch_or_onnxtrain(file: Path) -> None:
    assert not source_line.is_user_file(str(file))
    assert not snapshot._is_forward(str(file))


def test_layers_of_pytorch_are_forwards_but_not_the_users() -> None:
    layer = str(PYTORCH / "nn" / "modules" / "linear.py")
    assert snapshot._is_forward(layer)
    assert not snapshot._is_forward(torch.nn.modules.module.__file__)
    assert not source_line.is_user_file(layer)


def test_an_error_keeps_the_frames_of_a_package_named_alike() -> None:
    """The traceback of torchvision's own error shows its frame."""
    file = str(PYTORCH.parent / "torchvision" / "models" / "resnet.py")
    namespace: dict[str, object] = {}
    exec(compile("def forward():\n    raise ValueError('of a layer')", file, "exec"), namespace)
    with pytest.raises(ValueError, match="of a layer") as caught:
        namespace["forward"]()  # type: ignore[operator]
    assert source_line.hide_own_frames(caught.value)
    assert source_line.in_error(caught.value) == f"{file}:2 in forward"
