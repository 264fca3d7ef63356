"""Hugging Face tasks: the weights of a plain transformers loop, on any number of ranks, after a kill, with adapters.

Models are small and random; nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lockstep
from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.hf import CausalLM, HuggingFaceTask, MaskedLM, Seq2SeqLM, SequenceClassification, TokenClassification
from lockstep.testing import fail_at
from pool import Pool
from ranks.support import assert_user_errors, fit

pytest.importorskip("transformers")

# In the order of the data, with the optimizer's own rate, so that a plain loop can do the same.
BASE = {"global_batch": 4, "steps": 3, "data.shuffle": False, "clip.norm": 1.0, "checkpoint.frozen": False}
RATE = 0.1


def sentences(rows: int = 12, vocabulary: int = 19, first: int = 2) -> list[list[int]]:
    """Ragged tokens: 2 to 9 of them a row."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 10, (rows,), generator=g).tolist()
    return [torch.randint(first, vocabulary, (n,), generator=g).tolist() for n in lengths]


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
    return LlamaConfig(vocab_size=19, num_key_value_heads=1, max_position_embeddings=32, **sizes, **tokens, **changes)


def save_tiny(folder: Path, **changes: Any) -> Path:
    """Save a small Llama with random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    LlamaForCausalLM(llama(**changes)).save_pretrained(folder)
    return folder


class Tuned(CausalLM):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9)


def rows_of(tokens: list[list[int]]) -> list[dict[str, Any]]:
    """A third of the tokens of every other row have no label."""
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(tokens):
        labels = [-100] * (len(row) // 3) + row[len(row) // 3 :] if number % 2 else row
        rows.append({"input_ids": row, "labels": labels})
    return rows


def plain_loop(model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a script without Lockstep does: the model's own loss on whole batches, in one process."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    ids = [row["input_ids"] + [1] * (longest - len(row["input_ids"])) for row in rows]
    labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


def batches_of(rows: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [padded(rows[first : first + 4]) for first in range(0, 12, 4)]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) >= set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("world", "values"),
    [
        (1, {}),
        (2, {"strategy": "fsdp", "remat": "full", "micro_batch": 1}),
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(3, {"strategy": "fsdp"}, marks=pytest.mark.long),
        pytest.param(2, {"strategy": "tp"}, marks=pytest.mark.long),
        pytest.param(2, {"strategy": "pp", "micro_batch": 2}, marks=pytest.mark.long),
    ],
)
def test_a_causal_model_equals_a_plain_loop(pool: Pool, tmp_path: Path, world: int, values: dict[str, Any]) -> None:
    from transformers import LlamaForCausalLM

    pool.preload("transformers.models.llama.modeling_llama")
    folder = save_tiny(tmp_path / "tiny", tie_word_embeddings=world == 1)
    rows = rows_of(sentences())
    expected = plain_loop(LlamaForCausalLM.from_pretrained(folder), batches_of(rows))
    pool.run(fit, Tuned(str(folder), rows), BASE | values | {"run_dir": str(tmp_path / "run")}, world=world)
    assert_same(load_file(tmp_path / "run" / "model.safetensors"), expected)


@pytest.mark.parametrize(
    ("world", "values"),
    [
        (2, {"strategy": "fsdp", "micro_batch": 1}),
        pytest.param(3, {}, marks=pytest.mark.long),
        pytest.param(2, {"strategy": "zero1"}, marks=pytest.mark.long),
        pytest.param(2, {"strategy": "tp"}, marks=pytest.mark.long),
        pytest.param(2, {"strategy": "pp", "micro_batch": 2}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_loss_without_logits_equals_a_plain_loop(
    pool: Pool, tmp_path: Path, world: int, values: dict[str, Any], tied: bool
) -> None:
    from transformers import LlamaForCausalLM

    pool.preload("transformers.models.llama.modeling_llama")
    folder = save_tiny(tmp_path / "tiny", tie_word_embeddings=tied)
    rows = rows_of(sentences())
    expected = plain_loop(LlamaForCausalLM.from_pretrained(folder), batches_of(rows))
    task = Tuned(str(folder), rows, fused_loss=True)
    pool.run(fit, task, BASE | values | {"run_dir": str(tmp_path / "run")}, world=world)
    assert_same(load_file(tmp_path / "run" / "model.safetensors"), expected)


@pytest.mark.long
def test_packed_rows_equal_a_plain_loop(pool: Pool, tmp_path: Path) -> None:
    """All texts in every step, so that it does not matter which of them share a row."""
    from transformers import LlamaForCausalLM

    pool.preload("transformers.models.llama.modeling_llama")
    folder = save_tiny(tmp_path / "tiny")
    rows = rows_of(sentences())
    # The first token of a text has no label among packed ones, and none that counts anywhere else.
    expected = plain_loop(LlamaForCausalLM.from_pretrained(folder), [padded(rows)] * 3)
    task = Tuned(str(folder), rows, row_length=16)
    values = BASE | {"global_batch": len(task.data()), "run_dir": str(tmp_path / "run"), "micro_batch": 1}
    pool.run(fit, task, values, world=2)
    assert_same(load_file(tmp_path / "run" / "model.safetensors"), expected)


def lora_of(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"), autocast_adapter_dtype=False)


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}


def started_with(run: Path) -> dict[str, Tensor]:
    """The adapters that a run begins with: of a run of the same seed that does not learn."""
    return {name: tensor for name, tensor in load_file(run / "model.safetensors").items() if "lora_" in name}


class Still(Tuned):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


@pytest.mark.long
def test_adapters_equal_a_plain_loop_and_alone_are_saved_and_exported(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sharded on two ranks, stopped and resumed on one; then exported, reopened by peft, and merged."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    pool.preload("transformers.models.llama.modeling_llama", "peft")
    folder = save_tiny(tmp_path / "tiny", tie_word_embeddings=True)
    rows = rows_of(sentences())
    still = BASE | {"steps": 1, "run_dir": str(tmp_path / "still")}
    pool.run(fit, Still(str(folder), rows, lora=LORA), still, world=1)

    reference = lora_of(AutoModelForCausalLM.from_pretrained(folder))
    reference.load_state_dict(started_with(tmp_path / "still"), strict=False)
    expected = plain_loop(reference, batches_of(rows))

    run = tmp_path / "run"
    values = BASE | {"run_dir": str(run), "strategy": "fsdp"}
    pool.run(fit, Tuned(str(folder), rows, lora=LORA), values | {"steps": 2, "lr.schedule": "constant"}, world=2)
    pool.run(fit, Tuned(str(folder), rows, lora=LORA), values | {"resume": "auto"}, world=1)
    weights = load_file(run / "model.safetensors")
    assert sorted(weights) == sorted(expected)  # no frozen ones, under no name
    assert_same(weights, expected)

    # The base must be the same one.
    other = save_tiny(tmp_path / "other", hidden_act="gelu", tie_word_embeddings=False)
    errors = pool.errors(fit, Tuned(str(other), rows, lora=LORA), values | {"steps": 4, "resume": "auto"}, world=1)
    assert_user_errors(errors, "give the same model folder again")

    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    reference.eval()
    with torch.no_grad():
        logits = reference(tokens).logits
        adapters, merged = tmp_path / "adapters", tmp_path / "merged"
        assert main(["ckpt", "export", str(run), "--format", "hf", "--out", str(adapters)]) == 0
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapters.iterdir()}
        assert not list(adapters.glob("model*"))
        opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapters)
        torch.testing.assert_close(opened.eval()(tokens).logits, logits, rtol=1e-4, atol=1e-5)

        assert main(["ckpt", "export", str(run), "--format", "hf", "--out", str(merged), "--merge"]) == 0
        whole = AutoModelForCausalLM.from_pretrained(merged).eval()
        torch.testing.assert_close(whole(tokens).logits, logits, rtol=1e-4, atol=1e-5)

    assert main(["ckpt", "export", str(run), "--format", "hf", "--merge", "--base", str(other)]) == 2
    assert "not the one that the adapters were trained with" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("zygotes")
def test_adapters_survive_a_kill_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    # Ranks get this path, and a torchvision that only tests/zoo can import would break transformers there.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if Path(folder) != Path(sys.prefix) / "apart"])
    folder = save_tiny(tmp_path / "tiny", tie_word_embeddings=True)
    task = CausalLM(str(folder), rows_of(sentences()), lora=LORA)
    values = {"steps": 5, "global_batch": 4, "lr": {"peak": 0.01}, "checkpoint": {"every": 2, "frozen": False}}
    values |= {"log": {"progress": "off"}, "device": "cpu"}
    whole = lockstep.fit(task, values, nproc=2, run_dir=tmp_path / "whole")
    with fail_at(how="kill", rank=1, step=3):
        torn = lockstep.fit(task, values, nproc=2, run_dir=tmp_path / "torn")

    assert all("lora_" in name for name in torn.weights)
    for name, tensor in whole.weights.items():
        assert torch.equal(torn.weights[name], tensor), name


def test_an_export_opens_with_the_same_logits(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In shards, with tied weights, from a sharded checkpoint of float32 masters; as a whole or not at all."""
    from transformers import AutoModelForCausalLM

    pool.preload("transformers.models.llama.modeling_llama")
    folder = save_tiny(tmp_path / "tiny", tie_word_embeddings=True, dtype="bfloat16")
    task = Tuned(str(folder), rows_of(sentences()))
    run, out = tmp_path / "run", tmp_path / "out"
    pool.run(fit, task, BASE | {"run_dir": str(run), "strategy": "fsdp", "steps": 1}, world=2)
    command = ["ckpt", "export", str(run), "--format", "hf", "--out", str(out)]
    assert main([*command, "--max-shard-size", "4KB"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert "lm_head.weight" not in index["weight_map"]

    trained = task.model()
    trained.load_state_dict(load_file(run / "model.safetensors"), strict=False)
    opened = AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(opened.eval()(tokens).logits, trained.eval()(tokens).logits)

    # An existing folder stays, unless it is to be replaced.
    assert main(command) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run", "tiny"]

    # But what the export needs, and what is no model, is never deleted.
    for folder, says in ((run, "--overwrite would delete"), (tmp_path, "--overwrite would delete")):
        assert main([*command[:-1], str(folder), "--overwrite"]) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept")
    assert main([*command[:-1], str(tmp_path / "notes"), "--overwrite"]) == 2
    assert "is something else" in capsys.readouterr().err
    assert (tmp_path / "notes" / "mine.txt").read_text() == "kept"

    # What does not fit leaves nothing behind.
    other = save_tiny(tmp_path / "other", tie_word_embeddings=False)
    (other / "config.json").write_text((other / "config.json").read_text().replace("24", "32"))
    refused = ["ckpt", "export", str(run), "--format", "hf", "--out", str(tmp_path / "no"), "--assets", str(other)]
    assert main(refused) == 2
    assert "has in another shape" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["ckpt", "export", str(run), "--merge"]) == 2
    assert "--merge has no effect without --format hf" in capsys.readouterr().err


# ---- other classes ----


def bert(**changes: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(vocab_size=19, max_position_embeddings=32, pad_token_id=1, **sizes, **no_dropout, **changes)


def t5() -> Any:
    from transformers import T5Config

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5Config(vocab_size=19, decoder_start_token_id=0, pad_token_id=1, **sizes)


def labelled(kind: str) -> list[dict[str, Any]]:
    tokens = sentences()
    if kind == "classes":
        return [{"input_ids": row, "label": number % 3} for number, row in enumerate(tokens)]
    if kind == "a number":
        return [{"input_ids": row, "label": number / 3} for number, row in enumerate(tokens)]
    if kind == "a list":
        return [{"input_ids": row, "label": [number / 3]} for number, row in enumerate(tokens)]
    if kind == "numbers":
        return [{"input_ids": row, "label": [number / 3, 1.0, 0.5]} for number, row in enumerate(tokens)]
    if kind == "several":
        return [{"input_ids": row, "label": [float(number % 2), 1.0, 0.0]} for number, row in enumerate(tokens)]
    if kind == "a class a token":
        return [{"input_ids": row, "labels": [-100, *(token % 3 for token in row[1:])]} for row in tokens]
    return [{"input_ids": row, "labels": list(reversed(row))[: 2 + len(row) // 2]} for row in tokens]


OTHERS: dict[str, tuple[type[HuggingFaceTask], Any, str]] = {
    "classes": (SequenceClassification, lambda: bert(num_labels=3), "classes"),
    "a number": (SequenceClassification, lambda: bert(num_labels=1), "a number"),
    "a number in a list": (SequenceClassification, lambda: bert(num_labels=1), "a list"),
    "numbers": (SequenceClassification, lambda: bert(num_labels=3, problem_type="regression"), "numbers"),
    "classes by the last token": (SequenceClassification, lambda: llama(num_labels=3), "classes"),
    "several classes": (SequenceClassification, lambda: bert(num_labels=3), "several"),
    "tokens": (TokenClassification, lambda: bert(num_labels=3), "a class a token"),
    "masked": (MaskedLM, bert, "a class a token"),
    "seq2seq": (Seq2SeqLM, t5, "reversed"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", OTHERS)
def test_every_loss_is_that_of_the_model(tmp_path: Path, kind: str) -> None:
    """Sum / weight of a batch equals the model's own loss, and so does its gradient; the halves add up to the whole."""
    import transformers

    task_kind, config, labels = OTHERS[kind]
    task = task_kind(config(), labelled(labels))
    torch.manual_seed(0)
    model = task.model()
    samples = [task.data()[index] for index in range(4)]
    batch = task.collate(samples)

    own = model(**batch).loss
    loss = task.loss(model, batch)
    torch.testing.assert_close(loss.total / loss.weight, own, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(own, list(model.parameters()), allow_unused=True)
    found = torch.autograd.grad(loss.total / loss.weight, list(model.parameters()), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    halves = [task.loss(model, task.collate(part)) for part in (samples[:1], samples[1:])]
    torch.testing.assert_close(halves[0].total + halves[1].total, loss.total, rtol=1e-4, atol=1e-5)
    assert int(halves[0].weight) + int(halves[1].weight) == int(loss.weight)
    assert isinstance(model, getattr(transformers, type(model).__name__))


WORDS = "the cat sat on a mat and saw one more dog run far"


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "</s>", "<mask>", *WORDS.split()]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def test_rows_become_tokens(tmp_path: Path) -> None:
    task = CausalLM(llama(), [{"text": "the cat sat"}, {"prompt": "a dog", "completion": "saw"}], tokenizer=tokenizer())
    assert task.data()[0]["input_ids"] == [4, 5, 6]
    assert task.data()[1] == {"input_ids": [8, 14, 11, 2], "labels": [-100, -100, 11, 2]}
    batch = task.collate([task.data()[0], task.data()[1]])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 1], [8, 14, 11, 2]]
    assert batch["labels"].tolist() == [[4, 5, 6, -100], [-100, -100, 11, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]

    # A mask that only one row has is kept.
    batch = task.collate([{"input_ids": [4, 5]}, {"input_ids": [4, 5, 6], "attention_mask": [1, 0, 1]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 1]]

    # A mask is the same whenever a sample is read with the same seed, and never on labels.
    masked = MaskedLM(bert(), ["the cat sat on a mat and saw one more dog"] * 2, tokenizer=tokenizer())
    reads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        reads.append(masked.data()[0])
    assert reads[0] == reads[1] != reads[2]
    for token, label in zip(reads[0]["input_ids"], reads[0]["labels"], strict=True):
        assert label >= 4 or label == -100
        assert token == 3 or label != -100 or token >= 4
    masked.eval_rows = masked.rows
    assert masked.eval_data()[0] == masked.eval_data()[1]

    # Files and datasets give the same rows.
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "a dog saw")) + "\n")
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": ["the cat", "a dog saw"]})
    table.save_to_disk(tmp_path / "table")
    for data in (path, str(tmp_path / "table"), table, ["the cat", "a dog saw"]):
        rows = CausalLM(llama(), data, tokenizer=tokenizer()).data()
        assert [rows[index]["input_ids"] for index in range(len(rows))] == [[4, 5], [8, 14, 11]]

    packed = CausalLM(llama(), [{"input_ids": [2, 3, 4]}, {"input_ids": [5, 6]}, {"input_ids": [7]}], pack=4)
    tokens = [2, 3, 4, 5]
    assert [packed.data()[i] for i in range(len(packed.data()))] == [{"input_ids": tokens, "labels": tokens}]

    # Tokens of a prompt do not count in a block either.
    rows = [{"prompt": "a dog", "completion": "saw"}]
    assert CausalLM(llama(), rows, pack=4, tokenizer=tokenizer()).data()[0]["labels"] == [-100, -100, 11, 2]


def refused(says: str, task: HuggingFaceTask) -> None:
    """Expect this error from the loss of a batch of all samples."""

    def loss() -> None:
        rows = task.data()
        task.loss(task.model(), task.collate([rows[index] for index in range(len(rows))]))

    with pytest.raises(UserError, match=says):
        loss()


def test_padding_is_what_the_model_takes_for_padding() -> None:
    """A decoder finds the last token of a text by it, and would classify the padding."""
    rows = [{"input_ids": [3, 4, 5], "label": 1}, {"input_ids": [3], "label": 0}]
    task = SequenceClassification(llama(num_labels=2), rows)
    assert task.collate([task.data()[0], task.data()[1]])["input_ids"].tolist() == [[3, 4, 5], [3, 1, 1]]


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    words = tokenizer()
    refused("the tokenizer has no chat template", CausalLM(llama(), [{"messages": []}], tokenizer=words))
    words.chat_template = "{{ messages[0]['content'] }}"
    refused("does not take the messages", CausalLM(llama(), [{"messages": "hello"}], tokenizer=words))
    refused("'text' of a row of the data is not a text", CausalLM(llama(), [{"text": None}], tokenizer=words))
    refused("has no text 'target'", Seq2SeqLM(t5(), [{"text": "the cat"}], tokenizer=words))
    refused("not as many labels as tokens", CausalLM(llama(), [{"input_ids": [3, 4], "labels": [3]}]))
    some = [{"input_ids": [3, 4], "labels": [0, 1]}, {"input_ids": [3]}]
    refused("rows of the data have different names", TokenClassification(bert(), some))
    refused("a batch has no labels", TokenClassification(bert(), some[1:]))
    refused("has no model for the config LlamaConfig", MaskedLM(llama(), [{"input_ids": [3], "labels": [3]}]))

    for label, says in [
        ("good", "'good' of a row is not a number"),
        (3, "the label 3 of a row is no class"),
        ([0, 1, 0], "single_label_classification needs"),
        (1.0, "multi_label_classification needs"),
    ]:
        refused(says, SequenceClassification(bert(num_labels=3), [{"input_ids": [3, 4], "label": label}]))

    for name, content, says in [
        ("a.json", '{"a": 1}', "holds a dict, not a list"),
        ("b.json", "{", "cannot be read"),
        ("c.csv", "", "Empty CSV file"),
        ("d.parquet", "xx", "cannot be read"),
        ("e.jsonl", "3", "row 0 of the data is a int"),
        ("f.txt", b"caf\xe9", "row 0 of .* is not UTF-8"),
    ]:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        refused(says, CausalLM(llama(), tmp_path / name, tokenizer=words))


def test_what_is_not_there_is_explained_and_never_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: asked.append(address))
    with pytest.raises(UserError, match=r"there is no local model no/such-model(.|\n)*hf download no/such-model"):
        CausalLM("no/such-model").model()
    (tmp_path / "config.json").write_text(json.dumps(llama().to_dict()))
    with pytest.raises(UserError, match=r"holds no weights(.|\n)*name the config: .*config\.json"):
        CausalLM(tmp_path).model()
    assert sum(p.numel() for p in CausalLM(tmp_path / "config.json").model().parameters()) > 0
    with pytest.raises(UserError, match="the data is text, and there is no tokenizer"):
        _ = CausalLM(tmp_path, ["a text"]).data()[0]
    with pytest.raises(UserError, match=r"must be rows; this is a mapping(.|\n)*data\['train'\]"):
        CausalLM(tmp_path, {"train": []}).data()
    pytest.importorskip("peft")
    with pytest.raises(UserError, match=r"peft\.LoraConfig(.|\n)*rank"):
        CausalLM(llama(), lora={"rank": 3}).model()
    with pytest.raises(UserError, match=r"name its layers: task\.lora\.target_modules=.*down_proj"):
        CausalLM(llama(), lora={"target_modules": ["query"]}).model()
    assert not asked
