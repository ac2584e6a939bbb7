"""The user's files are recognized by the installed locations of PyTorch and onnxtrain, not by folder names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onnxtrain
from onnxtrain.capture import source_location
from onnxtrain.capture.key import attribute_accesses

pytestmark = pytest.mark.everywhere

PACKAGE, PYTORCH = Path(onnxtrain.__file__).parent, Path(torch.__file__).parent
USERS = (
    PACKAGE.parent / "tests" / "model.py",
    PACKAGE.parent / "onnxtrain_experiments" / "model.py",  # its name starts with the package's
    PYTORCH.parent / "torchvision" / "models" / "resnet.py",
    Path("/home/user/onnxtrain/model.py"),
    Path("/home/user/torch/nn/model.py"),
)
OTHERS = (PACKAGE / "frontend" / "ort_module.py", PACKAGE / "capture" / "capture.py", PYTORCH / "fx" / "graph.py")


@pytest.mark.parametrize("file", USERS, ids=str)
def test_user_files(file: Path) -> None:
    assert source_location.is_user_file(str(file))
    assert attribute_accesses._may_be_forward(str(file))


@pytest.mark.parametrize("file", OTHERS, ids=str)
def test_files_of_pytorch_and_onnxtrain(file: Path) -> None:
    assert not source_location.is_user_file(str(file))
    assert not attribute_accesses._may_be_forward(str(file))


def test_layers_of_pytorch_are_forward_code_but_not_user_code() -> None:
    layer = str(PYTORCH / "nn" / "modules" / "linear.py")
    assert attribute_accesses._may_be_forward(layer)
    assert not attribute_accesses._may_be_forward(torch.nn.modules.module.__file__)
    assert not source_location.is_user_file(layer)


def test_an_error_keeps_the_frames_of_a_package_with_a_similar_name() -> None:
    """The traceback of an error in torchvision shows the frame of torchvision."""
    file = str(PYTORCH.parent / "torchvision" / "models" / "resnet.py")
    namespace: dict[str, object] = {}
    exec(compile("def forward():\n    raise ValueError('of a layer')", file, "exec"), namespace)
    with pytest.raises(ValueError, match="of a layer") as caught:
        namespace["forward"]()  # type: ignore[operator]
    assert source_location.hide_own_frames(caught.value)
    assert source_location.of_error(caught.value) == f"{file}:2 in forward"
