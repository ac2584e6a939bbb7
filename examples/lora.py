"""LoRA: train low-rank adapters on a frozen language model with PEFT.

pip install '.[qlora]'
python -m examples.lora
"""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from onnxtrain import ORTModule

VOCABULARY = 64


def counting(rows: int, steps: int = 16) -> torch.Tensor:
    """Return sequences that count upwards from a random number."""
    return (torch.randint(0, VOCABULARY, (rows, 1)) + torch.arange(steps)) % VOCABULARY


def main(steps: int = 60) -> list[float]:
    """Train the adapters; return the loss of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    base = LlamaForCausalLM(config)  # or .from_pretrained("...")
    adapted = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.print_trainable_parameters()

    model = ORTModule(adapted, keep_outputs=("loss",))  # the logits are unused: the loss computes them in chunks
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-2)
    losses = []
    for step in range(steps):
        tokens = counting(16)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    folder = tempfile.mkdtemp()
    adapted.save_pretrained(folder)  # the adapters alone
    print(f"adapters saved to {folder}")
    return losses


if __name__ == "__main__":
    main()
