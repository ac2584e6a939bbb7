"""What the configs of single models need beside the sizes of `small_configs`."""

from __future__ import annotations

from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = {
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Gemma4AssistantConfig": {"hidden_size_per_layer_input": 0},
    "LukeConfig": {"entity_vocab_size": 20, "entity_emb_size": 32},
}
