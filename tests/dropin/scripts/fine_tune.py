"""As the guide of ONNX Runtime Training has it: ORTModule, FusedAdam and FP16_Optimizer together, options by JSON."""

import argparse

import torch
from onnxruntime.training.optim import FP16_Optimizer, FusedAdam
from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule
from onnxruntime.training.ortmodule.experimental.json_config import load_from_json
from onnxruntime.training.utils import log_memory_usage
from transformers import BertConfig, BertForSequenceClassification


def build_model(args):
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    if args.ort:
        debug_options = DebugOptions(log_level=LogLevel.INFO, save_onnx=True, onnx_prefix="bert", save_path=args.output)
        model = ORTModule(model, debug_options)
        load_from_json(model, args.json)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ort", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--output")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(42)
    model = build_model(args)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = FusedAdam(groups, lr=1e-2)
    optimizer = FP16_Optimizer(optimizer)

    ids = torch.randint(0, 64, (8, 12))
    labels = ids[:, 0] % 2
    losses = []
    model.train()
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    log_memory_usage("after training")
    model.eval()
    with torch.no_grad():
        accuracy = (model(input_ids=ids).logits.argmax(-1) == labels).float().mean().item()
    torch.save(model.state_dict(), f"{args.output}/model.pt")
    print("losses", " ".join(f"{loss:.6f}" for loss in losses))
    print("accuracy", accuracy)


if __name__ == "__main__":
    main()
