"""Speculative decoding as evaluators write it: one sequence after another over Hugging Face's growing caches.

The slow reference of the runtime, greedy only: `make bench` compares speeds with it, a test compares outputs. Without
drafts it is the loop that transformers' own `generate` runs.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from models.attention import cache_mixer
from models.dspark import DSpark


@torch.inference_mode()
def decode_greedily(
    model: nn.Module,
    drafter: DSpark | None,
    prompt: list[int],
    *,
    max_new_tokens: int,
    num_draft_tokens: int = 0,
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """New tokens of one prompt, the first stop token kept."""
    cache, context = DynamicCache(), DynamicCache()
    with_states = drafter is not None and num_draft_tokens > 0
    output = _forward(model, torch.tensor([prompt]), cache, with_states=with_states, logits_to_keep=1)
    tokens = [int(output.logits[0, -1].argmax())]
    seen = 0  # positions whose features are in the drafter's context
    while True:
        end = next((i for i, token in enumerate(tokens) if token in eos_token_ids), max_new_tokens - 1)
        if end < len(tokens):
            return tokens[: end + 1]
        committed = len(prompt) + len(tokens) - 1  # positions in the cache; the newest token is not
        drafts: list[int] = []
        if with_states:
            assert drafter is not None
            add_to_context(drafter, context, output.hidden_states, seen, committed)
            seen = committed
            drafts = draft_block(drafter, context, tokens[-1], committed, num_draft_tokens)
        output = _forward(model, torch.tensor([[tokens[-1], *drafts]]), cache, with_states=with_states)
        choices = output.logits[0].argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
        tokens += choices[: accepted + 1]
        if accepted < len(drafts):
            cache.crop(accepted - len(drafts))  # negative: so many tokens fewer


def _forward(model: nn.Module, ids: Tensor, cache: DynamicCache, *, with_states: bool, **options: Any) -> Any:
    return model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=with_states, **options)


def add_to_context(
    drafter: DSpark, context: DynamicCache, hidden_states: tuple[Tensor, ...], start: int, end: int
) -> None:
    """Keys and values of the positions from `start` to `end`, the first that the newest forward computed."""
    layers = [hidden_states[index + 1][:, : end - start] for index in drafter.target_layer_ids]
    fused = drafter.hidden_norm(drafter.fc(torch.cat(layers, dim=-1)))
    rotary = drafter.rotary(torch.arange(start, end)[None])
    for index, layer in enumerate(drafter.block_layers()):
        context.update(*layer.self_attn.context(fused, *rotary), index)


def draft_block(drafter: DSpark, context: DynamicCache, last: int, position: int, num_draft_tokens: int) -> list[int]:
    """The likeliest block behind the token `last` at `position`."""
    slots = torch.arange(drafter.num_draft_tokens)
    rotary = drafter.rotary((position + slots)[None])
    x = drafter.embed(torch.where(slots == 0, last, drafter.mask_token_id)[None])
    mix = cache_mixer(torch.ones(1, 1, 1, position, dtype=torch.bool))
    for layer, seen in zip(drafter.block_layers(), context.layers, strict=True):
        assert seen.keys is not None and seen.values is not None
        x = layer.draft(x, rotary, (seen.keys, seen.values), mix, num_blocks=1)
    base = drafter.logits(drafter.norm(x)[0, :num_draft_tokens])
    assert drafter.markov_head is not None
    tokens, previous = [], torch.tensor(last)
    for logits in base:
        previous = (logits + drafter.markov_head.markov_w2(drafter.markov_head.markov_w1(previous))).argmax()
        tokens.append(int(previous))
    return tokens
