"""The classes of models to sweep.

Those that the auto mappings of transformers name, PyTorch's own modules, and models of diffusers if it is installed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from tests.model_sweep import diffusers_models, torch_modules

LIBRARIES = ("transformers", "torch", "diffusers")

# Task: the mappings that list its classes. The base models (MODEL_MAPPING) are inside these.
_TASKS = {
    "language": ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "masked language": ("MASKED_LM",),
    "sequence classification": ("SEQUENCE_CLASSIFICATION",),
    "token classification": ("TOKEN_CLASSIFICATION",),
    "question answering": ("QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING"),
    "multiple choice": ("MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION"),
    "pretraining": ("PRETRAINING",),
    "image classification": ("IMAGE_CLASSIFICATION", "MASKED_IMAGE_MODELING", "CAUSAL_IMAGE_MODELING"),
    "image to image": ("IMAGE_TO_IMAGE", "DEPTH_ESTIMATION"),
    "segmentation": ("SEMANTIC_SEGMENTATION", "IMAGE_SEGMENTATION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
    "detection": ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "KEYPOINT_DETECTION"),
    "video": ("VIDEO_CLASSIFICATION",),
    "backbone": ("BACKBONE",),
    "audio": ("AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR"),
    "speech": ("CTC", "SPEECH_SEQ_2_SEQ", "TEXT_TO_SPECTROGRAM"),
    "image and text": (
        "IMAGE_TEXT_TO_TEXT",
        "VISUAL_QUESTION_ANSWERING",
        "DOCUMENT_QUESTION_ANSWERING",
        "ZERO_SHOT_IMAGE_CLASSIFICATION",
        "RETRIEVAL",
    ),
    "time series": ("TIME_SERIES_CLASSIFICATION", "TIME_SERIES_PREDICTION", "TIME_SERIES_REGRESSION"),
}


@dataclass(frozen=True)
class Entry:
    """A class to sweep.

    Attributes:
        name: that of the class; for a module of PyTorch its options follow.
        task: what the model is for.
        config: the name of the config class, for transformers.
        library: one of LIBRARIES.
    """

    name: str
    task: str
    config: str = ""
    library: str = "transformers"

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the class among all."""
        return self.library, self.name


def entries() -> list[Entry]:
    """Return every class once, in the order of libraries, tasks and names."""
    others = [Entry(name, module.task, library="torch") for name, module in torch_modules.MODULES.items()]
    if diffusers_models.installed():
        others += [Entry(name, model.task, library="diffusers") for name, model in diffusers_models.MODELS.items()]
    return _of_transformers() + sorted(others, key=lambda e: (LIBRARIES.index(e.library), e.task, e.name))


def _of_transformers() -> list[Entry]:
    """Return every class with the first task that lists it."""
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    configs = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    by_class: dict[str, Entry] = {}
    for task, names in _TASKS.items():
        for name in names:
            table = getattr(mappings, f"MODEL_FOR_{name}_MAPPING_NAMES", {})
            for model_type, classes in table.items():
                for cls in (classes,) if isinstance(classes, str) else classes:
                    if model_type in configs:
                        by_class.setdefault(cls, Entry(cls, task, configs[model_type]))
    order = {task: i for i, task in enumerate(_TASKS)}
    return sorted(by_class.values(), key=lambda e: (order[e.task], e.name))
