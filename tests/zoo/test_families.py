"""Models of transformers with mechanisms of their own equal eager PyTorch: two sizes, and in eval mode."""

from __future__ import annotations

import pytest

from tests.model_sweep.catalog import entries
from tests.model_sweep.training import trained

# The class, and its mechanism.
MODELS = {
    "BambaForCausalLM": "layers of Mamba 2 and of attention",
    "FunnelForSequenceClassification": "pooling of tokens between layers, state that forward sets once",
    "Gemma4UnifiedForCausalLM": "heads of two widths, a window in every second layer",
    "HGNetV2Backbone": "a stem of two branches, convolutions with batch norms",
    "HubertForCTC": "masks of spans that numpy samples in forward, of the lengths that the graph computes",
    "JetMoeForCausalLM": "experts of attention and of the feed-forward layer, by the number of selected tokens",
    "LEDForConditionalGeneration": "chunks that overlap in memory, a branch on whether a token has global attention",
    "MiniMaxForCausalLM": "lightning attention, and experts",
    "MobileNetV1ForImageClassification": "depthwise convolutions and batch norms",
    "PegasusXForConditionalGeneration": "blocks of local attention with global tokens",
    "Qwen2MoeForCausalLM": "experts beside a shared one",
    "Qwen3NextForCausalLM": "gated delta nets in chunks",
    "SeamlessM4TForTextToText": "sinusoidal positions that depend on padding",
    "UniSpeechForCTC": "masks of spans that numpy samples, before a quantizer",
    "Wav2Vec2ForCTC": "masks of spans that numpy samples, with an adapter",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_graph(name: str) -> None:
    outcome = trained(next(entry for entry in entries() if entry.name == name))
    assert (outcome.kind, outcome.detail) == ("graph", "")
