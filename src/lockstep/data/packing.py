"""Sequence packing: ragged documents in rows of a fixed length, without attention from one document to another.

A packed batch is a dictionary. `position_ids` count from 0 in each document, so they also tell where documents begin.
The rest of a row is padding, in documents of its own, whose labels are ignored. So the sum of the loss over a
packed batch, its weight and its gradient are those of the documents one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lockstep.errors import UserError

IGNORED = -100  # a label that no loss of torch counts
OPEN_ROWS = 64  # rows that are filled at the same time


# ---- rows ----


class RowPacker:
    """Distributes items over rows of a fixed length, in one pass, so that it works for streams too.

    Each item goes to the open row with the least room that is enough for it. If there is none, a new row is opened, and
    if too many are open, the fullest one is completed. The result depends only on the items and their order.
    """

    def __init__(self, row_length: int, open_rows: int = OPEN_ROWS):
        self.row_length = row_length
        self.open_rows = open_rows
        self._rows: list[list[Any]] = []  # open rows, oldest first
        self._room: list[int] = []  # the tokens that still fit into each

    def add(self, item: Any, size: int) -> list[list[Any]]:
        """Put an item into a row. Return the rows that are completed by it, at most two."""
        if not 0 < size <= self.row_length:
            raise UserError(
                f"a document of {size} tokens does not fit into a row of {self.row_length}",
                "",
                f"set row_length={size} or more, or shorten or split the document" if size else "leave it out",
            )

        # Best fit: the row with the least room. Without one, the fullest row is closed for a new one.
        fitting = [index for index, room in enumerate(self._room) if room >= size]
        completed = []
        if not fitting:
            if len(self._rows) == self.open_rows:
                fullest = self._room.index(min(self._room))
                completed.append(self._complete(fullest))

            self._rows.append([])
            self._room.append(self.row_length)
            fitting = [len(self._rows) - 1]

        best = min(fitting, key=self._room.__getitem__)
        self._rows[best].append(item)
        self._room[best] -= size

        # Nothing fits into a full row any more.
        if not self._room[best]:
            completed.append(self._complete(best))

        return completed

    def flush(self) -> list[list[Any]]:
        """Complete all open rows, oldest first."""
        return [self._complete(0) for _ in range(len(self._rows))]

    def state_dict(self) -> dict[str, Any]:
        """Return the open rows: their items, as they were added, and the room in each."""
        return {"rows": [list(row) for row in self._rows], "room": list(self._room)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = [list(row) for row in state["rows"]]
        self._room = list(state["room"])

    def _complete(self, index: int) -> list[Any]:
        del self._room[index]
        return self._rows.pop(index)


def pack_all(sizes: Sequence[int], row_length: int, open_rows: int = OPEN_ROWS) -> list[list[int]]:
    """Return rows of item numbers: all items of these sizes, in rows of at most `row_length`."""
    packer = RowPacker(row_length, open_rows)
    rows = []
    for number, size in enumerate(sizes):
        rows += packer.add(number, int(size))

    return rows + packer.flush()


# ---- datasets and batches ----


class Row(NamedTuple):
    """The documents of one row: an item of `PackedDataset`."""

    documents: list[Any]


class PackedDataset:
    """A dataset of documents as a dataset of rows. `collate` must be `packed_batch`.

    Which documents share a row depends on the lengths and on the order of the dataset, not on the epoch; the order of
    the rows is the sampler's. A sample of the run is a row, also in `global_batch`.
    """

    def __init__(self, dataset: Any, row_length: int, lengths: Sequence[int] | None = None):
        self.dataset = dataset
        self.row_length = row_length

        # Without `lengths`, every document is read once, now.
        if lengths is None:
            lengths = [len(as_document(dataset[index])["input_ids"]) for index in range(len(dataset))]

        if len(lengths) != len(dataset):
            raise UserError(
                f"there are {len(lengths)} lengths for {len(dataset)} documents",
                "",
                "pass one length for each document",
            )

        self.rows = pack_all(lengths, row_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return Row([self.dataset[document] for document in self.rows[index]])


def as_document(sample: Any) -> dict[str, Tensor]:
    """Return `input_ids` (tokens,) and `labels` (tokens,) of a sample: a sequence of tokens, or a dictionary."""
    # Without labels, the tokens themselves are the labels, as in pre-training.
    fields = sample if hasattr(sample, "keys") else {"input_ids": sample}
    input_ids = torch.as_tensor(fields["input_ids"], dtype=torch.int64)
    labels = torch.as_tensor(fields.get("labels", input_ids), dtype=torch.int64)
    if input_ids.dim() != 1 or input_ids.shape != labels.shape:
        raise UserError(
            "a document must have one dimension, and a label for each token",
            f"input_ids of shape {tuple(input_ids.shape)}, labels of shape {tuple(labels.shape)}",
            "return the tokens of one document as a sequence, or as {'input_ids': ..., 'labels': ...}",
        )

    return {"input_ids": input_ids, "labels": labels}


def packed_batch(
    samples: list[Any], row_length: int, pad: int = 0, shifted: bool = True, bounds: int = 1
) -> dict[str, Tensor]:
    """Pack samples into rows: for `Task.collate`. Samples are documents, or rows of a `PackedDataset`.

    input_ids     (rows, row_length), filled up with `pad`
    labels        (rows, row_length), -100 for padding
    position_ids  (rows, row_length), from 0 in each document
    cu_seqlens    (documents + 1,) int32, where documents begin and end in all rows together, for `packed_attention`

    `shifted`: the loss compares each output with the next label, as causal language models do. Then the first label of
    a document belongs to the output before it, in another document, and is -100 as well.
    `bounds`: empty documents are added at the end until the length of `cu_seqlens` is a multiple of this, so that its
    shape is the same in most batches, and `torch.compile` compiles once.
    """
    # Rows of a PackedDataset were packed when it was made; other samples are packed now, within this batch.
    if isinstance(samples[0], Row):
        rows = [[as_document(document) for document in row.documents] for row in samples]
    else:
        documents = [as_document(sample) for sample in samples]
        lengths = [len(document["input_ids"]) for document in documents]

        # All rows stay open: there are few.
        numbers = pack_all(lengths, row_length, len(documents))
        rows = [[documents[number] for number in row] for row in numbers]

    filled = [_fill(row, row_length, pad, shifted) for row in rows]
    batch = {name: torch.stack([row[name] for row in filled]) for name in filled[0]}

    # Documents of length 0, at the very end, until the number of bounds is a multiple.
    found = document_bounds(batch["position_ids"])
    end = found[-1:].expand(-len(found) % bounds)
    return batch | {"cu_seqlens": torch.cat([found, end])}


def _fill(row: list[dict[str, Tensor]], row_length: int, pad: int, shifted: bool) -> dict[str, Tensor]:
    """Return the tensors (row_length,) of one row."""
    lengths = [len(document["input_ids"]) for document in row]
    rest = row_length - sum(lengths)
    if rest < 0:
        raise UserError(
            f"the documents of a row have {sum(lengths)} tokens, and a row has {row_length}",
            f"their lengths are {lengths}; PackedDataset was given others, or another row_length",
            "give PackedDataset the lengths of the documents, and both the same row_length",
        )

    # Padding is no longer than the longest document, so that its positions are among those that the model knows.
    pieces = [min(max(lengths), rest - start) for start in range(0, rest, max(lengths))]
    padding = [{"input_ids": torch.full((n,), pad), "labels": torch.full((n,), IGNORED)} for n in pieces]
    documents = [*row, *padding]

    # Copies, because the labels may be the dataset's own tensors.
    labels = [document["labels"].clone() for document in documents]
    if shifted:
        for of_document in labels:
            of_document[0] = IGNORED

    return {
        "input_ids": torch.cat([document["input_ids"] for document in documents]),
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(len(document["input_ids"])) for document in documents]),
    }


# ---- attention ----


def document_bounds(position_ids: Tensor) -> Tensor:
    """Return where documents begin in all rows together, and the end of the last one: (documents + 1,) int32.

    On a GPU the host waits here for their number, so `packed_batch` calls it before the batch is sent there.
    """
    # Rows follow each other. A document never goes on in the next row, because each row begins with a position 0.
    begins = (position_ids == 0).flatten().nonzero().flatten()
    end = begins.new_tensor([position_ids.numel()])
    return torch.cat([begins, end]).to(torch.int32)


def document_positions(cu_seqlens: Tensor, rows: int, length: int) -> Tensor:
    """Return the `position_ids` (rows, length) of documents with these bounds."""
    # The document of each place is the number of documents that end at or before it; empty ones are passed over.
    places = torch.arange(rows * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens[1:], places, right=True)
    return (places - cu_seqlens[document]).view(rows, length)


def attention_mask(position_ids: Tensor, causal: bool = True) -> Tensor:
    """Return a boolean mask (rows, 1, length, length): True where a token may attend to another of its document."""
    # (rows, length): the number of each token's document in its row, from 1.
    document = (position_ids == 0).cumsum(-1)
    mask = document[:, None, :, None] == document[:, None, None, :]
    return mask.tril() if causal else mask


def flex_mask(position_ids: Tensor, causal: bool = True) -> BlockMask:
    """Return the same mask for torch's `flex_attention`, which skips blocks in which everything is masked."""
    document = (position_ids == 0).cumsum(-1)
    rows, length = position_ids.shape

    # torch calls it with indices, for all of them at once.
    def may_attend(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = document[row, query] == document[row, key]
        return same & (query >= key) if causal else same

    return create_block_mask(may_attend, rows, None, length, length, device=position_ids.device)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the attention (rows, heads, length, size) within each document. The first three have the same shape.

    One of `position_ids` and `cu_seqlens` is enough. `scale` is that of the products, by default 1 / sqrt(size). With a
    `window`, a token attends to that many tokens, itself included; only for causal attention.

    In half precision on a GPU it is torch's `varlen_attn`, which computes nothing between documents, and needs
    `cu_seqlens` of the batch. Elsewhere it is `scaled_dot_product_attention` with `attention_mask`.
    """
    assert causal or window is None
    rows, _, length, _ = query.shape
    if cu_seqlens is None or not _has_varlen(query):
        if position_ids is None:
            assert cu_seqlens is not None
            position_ids = document_positions(cu_seqlens, rows, length)

        # (rows, 1, length, length). A window masks what is further back.
        mask = attention_mask(position_ids, causal)
        if window is not None:
            mask = mask.triu(1 - window)

        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

    from torch.nn.attention.varlen import varlen_attn

    # One sequence of all rows: (rows * length, heads, size).
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))

    # How many tokens to the left and to the right are seen, besides the token itself; -1: all of them.
    left = -1 if window is None else window - 1
    seen = (left, 0 if causal else -1)

    # No document is longer than a row, so the host need not ask for the longest.
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, length, length, window_size=seen, scale=scale)
    assert isinstance(out, Tensor)  # a tuple only if more is asked for
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def _has_varlen(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
