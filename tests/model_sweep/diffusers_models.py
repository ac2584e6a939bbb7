"""Models of diffusers at a size that trains in milliseconds: mostly width 32, two layers, images of 16 to 24 pixels.

diffusers declares neither tasks nor inputs of its classes, so each has its config and its call here.
"""

from __future__ import annotations

from importlib.util import find_spec

from tests.model_sweep.diffusers_autoencoders import AUTOENCODERS
from tests.model_sweep.diffusers_base import DiffusersModel
from tests.model_sweep.diffusers_transformers import IMAGE_TRANSFORMERS, VIDEO_TRANSFORMERS
from tests.model_sweep.diffusers_unets import AUDIO, CONTROLS, UNETS

MODELS: dict[str, DiffusersModel] = {
    **UNETS,
    **IMAGE_TRANSFORMERS,
    **VIDEO_TRANSFORMERS,
    **AUTOENCODERS,
    **CONTROLS,
    **AUDIO,
}


def installed() -> bool:
    """Whether diffusers can be imported."""
    return find_spec("diffusers") is not None
