"""From records to a right-padded DraftBatch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.dataset import TrainingRecord
from data.store import supervised_rows
from models.base import DraftBatch


def collate(items: Sequence[TrainingRecord]) -> DraftBatch:
    """One record a row; each row is one document."""
    records = [item.record for item in items]
    lengths = [len(record.input_ids) for record in records]
    first_rows = torch.tensor([0, *[len(record.last_hidden) for record in records]]).cumsum(0)
    row_ids = []
    for record, first in zip(records, first_rows.tolist(), strict=False):
        ids = torch.full((len(record.input_ids),), -1)
        rows = supervised_rows(record.loss_mask)
        ids[rows] = torch.arange(first, first + len(rows))
        row_ids.append(ids)
    return DraftBatch(
        input_ids=_pad([record.input_ids.long() for record in records], 0),
        position_ids=_pad([torch.arange(length) for length in lengths], 0),
        document_ids=_pad([torch.zeros(length, dtype=torch.int64) for length in lengths], -1),
        loss_mask=_pad([record.loss_mask for record in records], False),
        features=_pad([item.features for item in items], 0.0),
        last_hidden=torch.cat([record.last_hidden for record in records]),
        last_hidden_ids=_pad(row_ids, -1),
        anchors=_pad([item.anchors for item in items], -1),
    )


def _pad(rows: list[Tensor], value: float) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)
