"""What a token takes on the disk, of whole stores."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.store import FeatureStore, StoreRecord
from tests import conftest
from tests.test_store import HEADER


@pytest.mark.parametrize(
    ("feature_dtype", "last_hidden_dtype", "most"),
    [("bf16", "bf16", 0.94), ("fp8", "bf16", 0.53), ("fp8", "fp8", 0.48), ("nf4", "bf16", 0.35), ("nf4", "fp8", 0.30)],
)
@pytest.mark.parametrize("hidden_size", [576, 2560])
def test_bytes_of_a_token_against_all_states_of_all_tokens_in_bf16(
    tmp_path: Path, hidden_size: int, feature_dtype: str, last_hidden_dtype: str, most: float
) -> None:
    """Whole files: five layers, 60 % of the tokens supervised; 2 * (layers + 1) * hidden + 6 is the yardstick."""
    header = replace(
        HEADER,
        layer_ids=(1, 3, 5, 7, 9),
        hidden_size=hidden_size,
        feature_dtype=feature_dtype,
        last_hidden_dtype=last_hidden_dtype,
    )
    num_tokens, num_records = 100, 8
    mask = torch.arange(num_tokens) >= 40
    features, last_hidden = torch.randn(100, 5 * hidden_size), torch.randn(60, hidden_size)
    records = [StoreRecord(str(i), torch.arange(100), mask, features, last_hidden) for i in range(num_records)]
    conftest.make_store(tmp_path, header, records, shard_size=num_records)
    size = sum(shard.bytes for shard in FeatureStore(tmp_path).manifest.shards)
    share = size / (num_tokens * num_records) / (2 * 6 * hidden_size + 6)
    assert most - 0.05 < share <= most
