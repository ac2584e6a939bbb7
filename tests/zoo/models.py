"""All models of the zoo."""

from __future__ import annotations

from tests.zoo import huggingface, modules

ZOO = (*huggingface.MODELS, *modules.MODELS)
