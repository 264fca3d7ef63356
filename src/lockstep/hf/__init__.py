"""Hugging Face models as tasks: `lockstep.hf.CausalLM("FOLDER", data="train.jsonl")`.

Any model of an `AutoModelFor...` class, from local files only: nothing is ever downloaded, and no code of a model
folder is run. transformers, peft and datasets are imported when they are needed.
"""

from lockstep.hf.fused import fuse_loss
from lockstep.hf.packed import attend_within_documents, packed_inputs
from lockstep.hf.tasks import (
    CausalLM,
    HuggingFaceTask,
    MaskedLM,
    Seq2SeqLM,
    SequenceClassification,
    TokenClassification,
)

__all__ = [
    "CausalLM",
    "HuggingFaceTask",
    "MaskedLM",
    "Seq2SeqLM",
    "SequenceClassification",
    "TokenClassification",
    "attend_within_documents",
    "fuse_loss",
    "packed_inputs",
]
