"""Training without a store: the target runs in the training process, on the same chats and through the same code."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from data.chat import RenderedChat
from data.codecs import find_codec, round_trip
from data.extraction import extract_records
from data.responses import RenderedRecord, Responses
from data.store import FeatureSource, StoreHeader, StoreRecord
from models.target import Target


class OnlineStore(FeatureSource):
    """Features of the chats that are asked for, computed and rounded as a store of `header` would hold them.

    All chats are rendered once and kept as tokens. Cannot be shared with loader processes: the target lives here.
    """

    def __init__(self, responses: Responses, target: Target, header: StoreHeader, *, tokens_per_batch: int) -> None:
        self.name, self.header = "online", header
        self.target, self.tokens_per_batch = target, tokens_per_batch
        self.ids = []
        self._chats: list[tuple[Tensor, Tensor]] = []  # tokens and mask; lists would take ten times the memory
        for index in range(responses.num_shards):
            for record in responses.shard(index).records:
                self.ids.append(record.id)
                tokens = torch.tensor(record.chat.input_ids, dtype=torch.int32)
                self._chats.append((tokens, torch.tensor(record.chat.loss_mask)))
        if not self.ids:
            least = responses.options.min_supervised_tokens
            raise ValueError(f"responses={responses.source}: no chat has {least} supervised tokens")
        self.lengths = torch.tensor([len(tokens) for tokens, _ in self._chats])
        self.num_supervised = torch.tensor([int(mask.sum()) for _, mask in self._chats])

    def read_many(self, indices: Sequence[int]) -> list[StoreRecord]:
        """One ragged batch of the target, or several where they exceed `tokens_per_batch`."""
        asked = []
        for index in indices:
            tokens, mask = self._chats[index]
            asked.append(RenderedRecord(self.ids[index], RenderedChat(tokens.tolist(), mask.tolist())))
        computed = dict(extract_records(self.target, asked, self.tokens_per_batch))
        return [self._rounded(computed[place]) for place in range(len(asked))]

    def count_supervised_tokens(self, vocab_size: int) -> Tensor:
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for tokens, mask in self._chats:
            counts += torch.bincount(tokens[mask].long(), minlength=vocab_size)
        return counts

    def _rounded(self, record: StoreRecord) -> StoreRecord:
        size = self.header.hidden_size
        values = {
            name: round_trip(getattr(record, name), find_codec(dtype, name), size).cpu()
            for name, dtype in (("features", self.header.feature_dtype), ("last_hidden", self.header.last_hidden_dtype))
        }
        return replace(record, **values)
