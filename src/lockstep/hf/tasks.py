"""Tasks for the `AutoModelFor...` classes of transformers. A loss is the sum over its tokens, and their number.

`HuggingFaceTask` has everything but the loss, and how a row becomes features; a subclass names its Auto class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.packing import PackedDataset, packed_batch
from lockstep.errors import UserError
from lockstep.hf import adapters, local
from lockstep.hf.fused import IGNORED, fuse_loss
from lockstep.hf.packed import attend_within_documents, packed_inputs
from lockstep.hf.rows import Encoded, Packed, Row, open_rows, pad
from lockstep.task import Loss, Task

BOUNDS = 64  # the number of documents in a packed batch is rounded up to a multiple of this

# Names of features that a row may already have.
FEATURES = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")


class CommonOptions(TypedDict, total=False):
    """Options that every task here takes by name. `HuggingFaceTask` has their defaults."""

    text: str  # the name of the text in a row
    max_length: int | None  # longer texts are truncated to this many tokens
    lora: Any  # options of peft.LoraConfig, or another config of peft; only adapters are then trained and saved
    collator: Any  # a data collator of transformers; None pads on the right
    tokenizer: Any  # a folder or a tokenizer, if it is not in `path`
    weight_decay: float  # for matrices only


class HuggingFaceTask(Task):
    """A model of `auto`, an Auto class of transformers, that is trained on rows of text or tokens."""

    auto: str = "AutoModel"
    task_type: str | None = None  # peft's name of the task
    unit = "token"

    # The defaults of transformers' Trainer; its learning rate is that of `optimizer`. Frozen weights come from the same
    # files again, so checkpoints leave them out, and hold their digests.
    defaults = {
        "epochs": 3,
        "global_batch": 8,
        "lr": {"schedule": "linear"},
        "clip": {"norm": 1.0},
        "checkpoint": {"frozen": False},
    }
    frozen_advice = "give the same model folder again (task.path)"

    def __init__(
        self,
        path: Any,
        data: Any = None,
        eval_data: Any = None,
        text: str = "text",
        max_length: int | None = None,
        lora: Any = None,
        collator: Any = None,
        tokenizer: Any = None,
        weight_decay: float = 0.0,
    ):
        """Keep the options; nothing is read yet. `CommonOptions` says what the others mean.

        `path`: a local model folder; a config.json or a config for random weights.
        `data`, `eval_data`: a file (.jsonl, .json, .txt, .csv, .parquet), a folder of datasets, or rows.
        """
        self.path = path
        self.rows = data
        self.eval_rows = eval_data
        self.text = text
        self.max_length = max_length

        self.lora = lora
        self.collator = collator
        self.tokenizer_path = tokenizer

        self.weight_decay = weight_decay

    # ---- the model ----

    def model(self) -> nn.Module:
        model = local.load_model(self.auto, self.path, **self.config_changes())
        # Auxiliary losses of mixtures of experts are means over a batch, which no sum over ranks could reproduce.
        if getattr(model.config, "output_router_logits", False):
            raise UserError(
                f"{type(model).__name__} adds a router loss, which is a mean over each micro-batch",
                "output_router_logits is true in its config",
                "set it to false in config.json, or write a task with a loss of your own",
            )

        model = self.changed(model)
        if self.lora is not None and self.lora is not False:
            model = adapters.add(model, self.lora, self.task_type)

        # from_pretrained returns a model in eval mode.
        return model.train()

    def changed(self, model: nn.Module) -> nn.Module:
        """Change the model before adapters are added to it."""
        return model

    def config_changes(self) -> dict[str, Any]:
        """Return changes to the model's config: the number of labels, ..."""
        return {}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Matrices are decayed; biases, norms and other vectors are not.
        trainable = [p for p in model.parameters() if p.requires_grad]
        decayed = [p for p in trainable if p.dim() >= 2]
        others = [p for p in trainable if p.dim() < 2]

        groups = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]

        return torch.optim.AdamW([group for group in groups if group["params"]], lr=5e-5, fused=True)

    def write_assets(self, folder: Path) -> None:
        """Write the config, the tokenizer and the adapter's config, which `lockstep ckpt export --format hf` needs."""
        config = local.load_config(self.path, **self.config_changes())
        config.architectures = [local.architecture(self.auto, config)]
        config.save_pretrained(folder)

        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

        base = None if local.starts_random(self.path) else local.local_folder(self.path)
        if base and (base / "generation_config.json").exists():
            (folder / "generation_config.json").write_bytes((base / "generation_config.json").read_bytes())

        if self.lora is not None and self.lora is not False:
            adapters.write_config(folder, self.lora, self.task_type, base)

    # ---- the data ----

    @cached_property
    def config(self) -> Any:
        """The model's config."""
        return local.load_config(self.path, **self.config_changes())

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, or None if there is none: rows must then have tokens."""
        given = self.tokenizer_path
        if given is not None and not isinstance(given, str | Path):
            return given

        if given is None and not isinstance(self.path, str | Path):
            return None

        return local.load_tokenizer(self.path if given is None else given)

    def data(self) -> Any:
        if self.rows is None:
            raise UserError("task.data is not set: there is nothing to train on", "", "set task.data=FILE.jsonl")

        return self.encoded(self.rows, training=True)

    def eval_data(self) -> Any:
        return None if self.eval_rows is None else self.encoded(self.eval_rows, training=False)

    def encoded(self, rows: Any, training: bool) -> Any:
        """Return the rows as features of the model."""
        return Encoded(open_rows(rows), self.encode)

    def encode(self, row: Row) -> dict[str, Any]:
        """Return the features of one row. Rows that have tokens already are taken as they are."""
        if "input_ids" in row:
            return {name: _plain(row[name]) for name in FEATURES if name in row}

        return self.tokens(row, self.text)

    def tokens(self, row: Row, name: str, **options: Any) -> dict[str, Any]:
        """Tokenize the text `name` of a row."""
        return dict(self._needed_tokenizer()(self._text(row, name), **self._limit(), **options))

    def _text(self, row: Row, name: str) -> str:
        if name not in row:
            raise UserError(
                f"a row of the data has no text {name!r} and no input_ids",
                f"its names are {', '.join(map(str, row))}",
                f"set task.text={next(iter(row), 'text')}",
            )

        if not isinstance(row[name], str):
            # A list of words would become a list of token lists.
            raise UserError(f"{name!r} of a row of the data is not a text", f"{row!r:.200}", "leave such rows out")

        return row[name]

    def _limit(self) -> dict[str, Any]:
        return {"truncation": True, "max_length": self.max_length} if self.max_length else {}

    def _needed_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UserError(
                "the data is text, and there is no tokenizer",
                f"{self.path} has none",
                "set task.tokenizer=FOLDER, or give rows with input_ids",
            )

        return self.tokenizer

    def collate(self, samples: list[Any]) -> Any:
        if self.collator is None:
            return pad(samples, {"input_ids": self._pad_token(), "labels": IGNORED})

        return dict(self.collator(samples))

    def _pad_token(self) -> int:
        # The model's own comes first: some models find the last token of a text by it. For others it does not matter
        # which token it is, since attention leaves it out, and it has no label.
        tokens = [getattr(owner, "pad_token_id", None) for owner in (self.config, self.tokenizer)]
        return next((token for token in tokens if token is not None), 0)


def _labels_of_tokens(features: dict[str, Any]) -> dict[str, Any]:
    """Return features with as many labels as tokens, or raise."""
    if len(features.get("labels", features["input_ids"])) != len(features["input_ids"]):
        raise UserError(
            "a row of the data has not as many labels as tokens",
            f"{len(features['labels'])} labels, {len(features['input_ids'])} input_ids",
            f"give each token a label, {IGNORED} if it does not count",
        )

    return features


def _plain(value: Any) -> Any:
    # `datasets` may give numpy arrays or tensors.
    return value.tolist() if hasattr(value, "tolist") else value


def output(model: nn.Module, batch: Mapping[str, Any], leave_out: Sequence[str] = ("labels",)) -> Any:
    """Return the model's output for a batch. A loss needs no KV cache."""
    inputs = {name: value for name, value in batch.items() if name not in leave_out}
    if getattr(getattr(model, "config", None), "use_cache", None):
        inputs["use_cache"] = False

    return model(**inputs)


def call(model: nn.Module, batch: Mapping[str, Any], leave_out: Sequence[str] = ("labels",)) -> Tensor:
    """Return the logits of a batch."""
    return output(model, batch, leave_out).logits


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """Return the labels of a batch."""
    if "labels" not in batch:
        raise UserError(
            "a batch has no labels",
            f"its names are {', '.join(map(str, batch))}",
            "give rows with labels, and leave the collator out or use one that makes labels",
        )

    return batch["labels"]


def sum_over_labels(logits: Tensor, labels: Tensor) -> Loss:
    """Return the cross-entropy, summed over all labels but -100, and their number.

    logits: (..., classes), labels: (...)
    """
    # In float32, as transformers computes it.
    total = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(total, (labels != IGNORED).sum())


class CausalLM(HuggingFaceTask):
    """Predicts the next token. A row has a text, tokens, `prompt` and `completion`, or `messages` of a chat.

    Of a prompt with its completion, only the completion has labels, and the end-of-text token is added to it.
    """

    auto = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"

    def __init__(
        self,
        path: Any,
        data: Any = None,
        eval_data: Any = None,
        *,
        pack: int | None = None,
        row_length: int | None = None,
        fused_loss: bool = False,
        **options: Unpack[CommonOptions],
    ):
        """Keep the options.

        `pack`: join all texts, and cut them into blocks of this many tokens.
        `row_length`: put whole texts into rows of this many tokens; no text sees another one of its row.
        `fused_loss`: compute the loss without storing the logits.
        """
        super().__init__(path, data, eval_data, **options)
        self.pack = pack
        self.row_length = row_length
        self.fused_loss = fused_loss

        if row_length and (pack or self.collator):
            other = f"task.pack={pack}" if pack else "a collator"
            raise UserError(f"task.row_length={row_length} excludes {other}", "", "leave one of them out")

    def changed(self, model: nn.Module) -> nn.Module:
        if self.row_length:
            model = attend_within_documents(model)

        return fuse_loss(model) if self.fused_loss else model

    def encoded(self, rows: Any, training: bool) -> Any:
        encoded = super().encoded(rows, training)
        if self.row_length:
            # Every text is encoded once, now, for its length.
            return PackedDataset(encoded, self.row_length)

        return Packed(encoded, self.pack) if self.pack else encoded

    def encode(self, row: Row) -> dict[str, Any]:
        if "prompt" in row and "completion" in row:
            return self._completed(row)

        if "messages" in row and "input_ids" not in row:
            return self._chat(row["messages"])

        return _labels_of_tokens(super().encode(row))

    def _chat(self, messages: Any) -> dict[str, Any]:
        tokenizer = self._needed_tokenizer()
        if not tokenizer.chat_template:
            raise UserError(
                "a row of the data has messages, and the tokenizer has no chat template",
                "",
                "set task.tokenizer to the folder of one that has; or write the chat as one text in each row",
            )

        try:
            return {
                "input_ids": tokenizer.apply_chat_template(messages, return_dict=True, **self._limit())["input_ids"]
            }
        except Exception as error:  # a template may raise anything
            raise UserError(
                "the tokenizer's chat template does not take the messages of a row",
                f"{type(error).__name__}: {error}; {messages!r:.200}",
                'give each message as {"role": "user", "content": "..."}',
            ) from None

    def _completed(self, row: Row) -> dict[str, Any]:
        tokenizer = self._needed_tokenizer()
        prompt = tokenizer(self._text(row, "prompt"))["input_ids"]
        completion = tokenizer(self._text(row, "completion"), add_special_tokens=False)["input_ids"]

        # The model must learn where to stop.
        if tokenizer.eos_token_id is not None:
            completion = [*completion, tokenizer.eos_token_id]

        labels = [*[IGNORED] * len(prompt), *completion]
        return {"input_ids": [*prompt, *completion][: self.max_length], "labels": labels[: self.max_length]}

    def collate(self, samples: list[Any]) -> Any:
        if self.row_length:
            batch = packed_batch(samples, self.row_length, self._pad_token(), bounds=BOUNDS)
            return {"labels": batch["labels"], **packed_inputs(batch)}

        # Without labels of its own, a row predicts each of its tokens. Padding has none.
        if self.collator is None:
            samples = [{**sample, "labels": sample.get("labels", sample["input_ids"])} for sample in samples]

        return super().collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        # The logits at a token predict the next one.
        labels = labels_of(batch)
        if self.fused_loss:
            return Loss(output(model, batch, leave_out=()).loss, (labels[:, 1:] != IGNORED).sum())

        return sum_over_labels(call(model, batch)[:, :-1], labels[:, 1:])


class MaskedLM(HuggingFaceTask):
    """Predicts tokens that are masked at random: the same ones on any number of ranks.

    Of the chosen tokens 80 % become the mask, 10 % a random token, and 10 % stay. In an evaluation, the choice depends
    on the text alone.
    """

    auto = "AutoModelForMaskedLM"
    share = 0.15  # the share of tokens to predict

    def encoded(self, rows: Any, training: bool) -> Any:
        # Twice would be too much, and a collator draws other masks on other numbers of ranks.
        if getattr(self.collator, "mlm", False):
            raise UserError(
                "MaskedLM masks tokens itself, and the collator would mask them again",
                f"{type(self.collator).__name__}(mlm=True)",
                "leave the collator out; the share of masked tokens is the attribute `share` of the task",
            )

        encode = self.encode
        return Encoded(open_rows(rows), lambda row: self._masked(_labels_of_tokens(encode(row)), training))

    def _masked(self, features: dict[str, Any], training: bool) -> dict[str, Any]:
        if "labels" in features:
            return features

        # Lockstep seeds the generator for each sample while it trains.
        tokenizer = self._needed_tokenizer()
        tokens = torch.tensor(features["input_ids"])
        generator = None if training else torch.Generator().manual_seed(int(tokens.sum()))
        special = tokenizer.get_special_tokens_mask(features["input_ids"], already_has_special_tokens=True)

        # Draws (3, tokens): which tokens are predicted, how each is replaced, and by which random one.
        draws = torch.rand(3, len(tokens), generator=generator)
        chosen = (draws[0] < self.share) & ~torch.tensor(special, dtype=torch.bool)
        random_tokens = (draws[2] * len(tokenizer)).long()

        # Of those, 80 % become the mask, 10 % a random token, and 10 % stay.
        masked = torch.where(draws[1] < 0.8, torch.full_like(tokens, tokenizer.mask_token_id), tokens)
        masked = torch.where(draws[1] >= 0.9, random_tokens, masked)

        inputs = torch.where(chosen, masked, tokens).tolist()
        labels = torch.where(chosen, tokens, torch.full_like(tokens, IGNORED)).tolist()
        return {**features, "input_ids": inputs, "labels": labels}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return sum_over_labels(call(model, batch), labels_of(batch))


class TokenClassification(HuggingFaceTask):
    """A class for each token. A row has `input_ids` and `labels` of the same length."""

    auto = "AutoModelForTokenClassification"
    task_type = "TOKEN_CLS"

    def encode(self, row: Row) -> dict[str, Any]:
        return _labels_of_tokens(super().encode(row))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return sum_over_labels(call(model, batch), labels_of(batch))


class Seq2SeqLM(HuggingFaceTask):
    """Translates a text into another one. A row has a text and a `target`, or `input_ids` and `labels`."""

    auto = "AutoModelForSeq2SeqLM"
    task_type = "SEQ_2_SEQ_LM"
    target = "target"

    def encode(self, row: Row) -> dict[str, Any]:
        features = super().encode(row)
        if "labels" not in features:
            limit = self._limit()
            target = self._text(row, self.target)
            features["labels"] = self._needed_tokenizer()(text_target=target, **limit)["input_ids"]

        return features

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        # The model shifts the labels to get the decoder's inputs. Its own loss is a mean, and not used.
        return sum_over_labels(call(model, batch, leave_out=()), labels_of(batch))


class SequenceClassification(HuggingFaceTask):
    """A class for each text, several classes, or a number: as the labels and `problem_type` of the config say.

    `label` is the column with the labels, `num_labels` their number; 1 means a number to predict (regression). Logits
    have the shape [batch, num_labels].
    """

    auto = "AutoModelForSequenceClassification"
    task_type = "SEQ_CLS"
    unit = "sample"

    def __init__(
        self,
        path: Any,
        data: Any = None,
        eval_data: Any = None,
        *,
        label: str = "label",
        num_labels: int | None = None,
        **options: Unpack[CommonOptions],
    ):
        """Keep the options. `label`: the name of the label in a row. `num_labels`: None keeps the config's."""
        super().__init__(path, data, eval_data, **options)
        self.label = label
        self.num_labels = num_labels

    def config_changes(self) -> dict[str, Any]:
        return {} if self.num_labels is None else {"num_labels": self.num_labels}

    def encode(self, row: Row) -> dict[str, Any]:
        features = super().encode(row)
        if "labels" not in features:
            if self.label not in row:
                names = ", ".join(map(str, row))
                raise UserError(f"a row of the data has no {self.label!r}", f"its names are {names}", "set task.label")

            features["labels"] = self._label(_plain(row[self.label]))

        return features

    def _label(self, label: Any) -> Any:
        """Return the label of a row, or raise if it is no class of the model and no number."""
        classes = self.config.num_labels
        numbers = label if isinstance(label, list) else [label]
        if not all(isinstance(number, int | float) for number in numbers):
            raise UserError(f"the label {label!r} of a row is not a number", "", "give classes as numbers, from 0 on")

        if isinstance(label, int) and classes > 1 and label != IGNORED and not 0 <= label < classes:
            raise UserError(
                f"the label {label} of a row is no class of the model",
                f"it has {classes} classes, from 0 on",
                f"set task.num_labels={max(label, 0) + 1} or more",
            )

        return label

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits, labels = call(model, batch), labels_of(batch)

        # The same three losses that transformers chooses from, as sums.
        problem = getattr(self.config, "problem_type", None)
        if problem is None:
            several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
            problem = "regression" if logits.shape[-1] == 1 else several

        if problem != "single_label_classification":
            # One number may also come as a list.
            targets = labels.float().reshape(logits.shape) if labels.numel() == logits.numel() else labels.float()
            _check_shape(targets, logits.shape, labels, problem)
            if problem == "regression":
                return Loss(((logits.float() - targets) ** 2).sum(), targets.numel())

            return Loss(F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="sum"), targets.numel())

        _check_shape(labels, logits.shape[:-1], labels, problem)
        loss = sum_over_labels(logits, labels)
        loss.metrics["accuracy"] = (logits.argmax(dim=-1) == labels).sum()
        return loss


def _check_shape(targets: Tensor, shape: torch.Size, labels: Tensor, problem: str) -> None:
    if targets.shape != shape:
        raise UserError(
            f"labels of shape {tuple(labels.shape)} do not fit the model: problem_type {problem} needs {tuple(shape)}",
            f"the labels are {labels.dtype}",
            "give a whole number for a class, a list of floats with one for each class for several of them, and set "
            "task.num_labels",
        )
