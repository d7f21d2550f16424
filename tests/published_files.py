"""Writes checkpoints in the layouts of other projects, and compares the drafts of what is read back."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.base import Drafter
from models.spec import TargetSpec
from tests.draft_batches import enliven, greedy_sampler, stochastic_sampler

GENERATOR = torch.Generator().manual_seed(0)
EMBEDDING, HEAD = (torch.randn(60, 32, generator=GENERATOR) for _ in range(2))
LAYER_IDS = (1, 5, 8)  # the paper's outputs for 12 layers: 1, L/2 - 1, L - 4
SPEC = TargetSpec(
    model_type="llama",
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    global_head_dim=16,
    num_global_kv_heads=2,
    keys_are_values=False,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    logit_softcap=None,
    embedding_scale=1.0,
    tie_embeddings=False,
    initializer_range=0.02,
    bos_token_id=1,
    eos_token_ids=(3,),
    pad_token_id=None,
)
# The sizes of a config.json, as transformers 4 writes them.
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 5e5,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "num_target_layers": 12,
    "tie_word_embeddings": False,
}


def build(config: Any, *, layer_ids: tuple[int, ...] = LAYER_IDS) -> Any:
    torch.manual_seed(0)
    drafter = enliven(config.build(SPEC, target_layer_ids=layer_ids, mask_token_id=4)).bind(EMBEDDING, HEAD)
    if drafter.draft_vocab_size is not None:  # in no order, the stop token last
        ids = torch.randperm(60, generator=torch.Generator().manual_seed(3))
        ids = torch.cat((ids[ids != 3][: drafter.draft_vocab_size - 1], torch.tensor([3])))
        drafter.use_draft_vocabulary(ids)
    return drafter


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / "model.safetensors")
    return folder


@torch.no_grad()
def check_same_drafts(loaded: Drafter, expected: Drafter, *, bound: tuple[Tensor, Tensor] = (EMBEDDING, HEAD)) -> None:
    """Two rounds, greedy and sampled, of ragged prompts, with embedding and head of the target."""
    loaded.bind(*bound)
    assert loaded.target_layer_ids == expected.target_layer_ids
    assert loaded.num_draft_tokens == expected.num_draft_tokens and loaded.slot_layout == expected.slot_layout
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(60, (3, 12), generator=generator)
    features = torch.randn(3, 12, len(expected.target_layer_ids) * 32, generator=generator)
    proposals = []
    for drafter in (loaded, expected):
        state = drafter.start(tokens[:, :6], features[:, :6], torch.tensor([6, 1, 4]), 32)
        first = drafter.propose(state, tokens[:, 6], greedy_sampler(3), drafter.num_draft_tokens)
        drafter.advance(state, tokens[:, 6:9], features[:, 6:9], torch.tensor([3, 1, 2]))
        second = drafter.propose(state, tokens[:, 9], stochastic_sampler(torch.arange(3)), drafter.num_draft_tokens)
        proposals.append((first, second))
    for ours, reference in zip(*proposals, strict=True):
        assert ours.candidate_ids is not None or ours.probs.shape[-1] == 60
        for name in ("tokens", "probs", "lengths", "candidate_ids", "confidence"):
            a, b = getattr(ours, name), getattr(reference, name)
            assert (a is None and b is None) or torch.equal(a, b), name
