"""Models of transformers with mechanisms of their own train as one graph: two sizes, and in eval mode."""

from __future__ import annotations

import pytest

from tests.model_sweep.catalog import entries
from tests.model_sweep.training import trained

# The class, and its mechanism.
MODELS = {
    "HubertForCTC": "masks of spans that numpy samples in forward, of the lengths that the graph computes",
    "UniSpeechForCTC": "the same, before a quantizer",
    "Wav2Vec2ForCTC": "the same, with an adapter",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_graph(name: str) -> None:
    outcome = trained(next(entry for entry in entries() if entry.name == name))
    assert (outcome.kind, outcome.detail) == ("graph", "")
