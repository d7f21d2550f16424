"""From records to a DraftBatch: packed into one row, or one record a row."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.dataset import TrainingRecord
from data.store import supervised_rows
from models.base import DraftBatch


def collate(items: Sequence[TrainingRecord], *, packing: bool) -> DraftBatch:
    """With `packing` all records are the documents of one row without padding, else each is a row of its own."""
    rows = [list(items)] if packing else [[item] for item in items]
    lengths = [[len(item.record.input_ids) for item in row] for row in rows]
    num_states = torch.tensor([0, *(len(item.record.last_hidden) for item in items)]).cumsum(0).tolist()
    state_ids = iter([_state_ids(item, first) for item, first in zip(items, num_states, strict=False)])
    return DraftBatch(
        input_ids=_pad([torch.cat([item.record.input_ids for item in row]).long() for row in rows], 0),
        position_ids=_pad([torch.cat([torch.arange(n) for n in row]) for row in lengths], 0),
        document_ids=_pad([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths], -1),
        loss_mask=_pad([torch.cat([item.record.loss_mask for item in row]) for row in rows], False),
        features=_pad([torch.cat([item.features for item in row]) for row in rows], 0.0),
        last_hidden=torch.cat([item.record.last_hidden for item in items]),
        last_hidden_ids=_pad([torch.cat([next(state_ids) for _ in row]) for row in rows], -1),
        anchors=_pad([_anchors(row) for row in rows], -1),
    )


def _state_ids(item: TrainingRecord, first: int) -> Tensor:
    """Row of the batch's last_hidden for each position, -1 where none is stored; `first` is the record's first row."""
    ids = torch.full((len(item.record.input_ids),), -1)
    rows = supervised_rows(item.record.loss_mask)
    ids[rows] = torch.arange(first, first + len(rows))
    return ids


def _anchors(row: list[TrainingRecord]) -> Tensor:
    """Positions in the row; ascending, as the documents are."""
    starts = torch.tensor([0, *(len(item.record.input_ids) for item in row)]).cumsum(0).tolist()
    return torch.cat([item.anchors + start for item, start in zip(row, starts, strict=False)])


def _pad(rows: list[Tensor], value: float) -> Tensor:
    return rows[0][None] if len(rows) == 1 else pad_sequence(rows, batch_first=True, padding_value=value)
