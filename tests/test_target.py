"""Tests of models/target.py: captured features, caches and masks against transformers' own forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from eval.decode import DecodeConfig, decode
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule
from models import target as target_module
from models.cached_attention import ATTENTION, grouped_attention
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig, TargetOutput
from tests.conftest import planted_fault
from tests.tiny_families import FAMILIES, VOCAB_SIZE, build, check_close, random_ids


def run_steps(target: Target, ids: Tensor, steps: list[int]) -> TargetOutput:
    """Feed ids [B, S] in pieces through a cache, everything committed."""
    cache, outputs, start = target.new_cache(len(ids), ids.shape[1]), [], 0
    for step in steps:
        outputs.append(target.forward(ids[:, start : start + step], cache))
        cache.advance(torch.full((len(ids),), step))
        start += step
    assert start == ids.shape[1]
    return TargetOutput(*(torch.cat([getattr(o, name) for o in outputs], dim=1) for name in ("hidden", "features")))


def check_equal(ours: TargetOutput, reference: TargetOutput) -> None:
    check_close(ours.hidden, reference.hidden)
    check_close(ours.features, reference.features)


@pytest.mark.parametrize("family", FAMILIES)
def test_last_hidden_through_the_head_is_the_models_own_logits(family: str) -> None:
    target, ids = build(family), random_ids(2, 20)
    target.model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = target.model(input_ids=ids, use_cache=False).logits
    target.model.set_attn_implementation(ATTENTION)
    logits = target.logits(target.forward_whole(ids).hidden)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)  # another attention kernel
    assert logits.std() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_outputs_of_the_layers(family: str) -> None:
    """Against hidden_states, which holds layer inputs: entry i + 1 is the output of layer i (but for the last)."""
    target, ids = build(family), random_ids(2, 20)
    with torch.inference_mode():
        states = target.backbone(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in target.layer_ids], dim=-1)
    check_close(target.forward_whole(ids).features, expected)


def captured_sums(monkeypatch: pytest.MonkeyPatch, family: str, layer_ids: tuple[int, ...]) -> list[float]:
    """Features of a model whose layer i adds 10^i to zero."""
    target = build(family)
    for index, layer in enumerate(target.layers):
        monkeypatch.setattr(layer, "forward", lambda states, *_, power=index, **__: states + 10.0**power)
    monkeypatch.setattr(target, "layer_ids", layer_ids)
    monkeypatch.setattr(target.backbone.embed_tokens, "forward", lambda ids: torch.zeros(*ids.shape, 32))
    output = target.forward(random_ids(1, 3), target.new_cache(1, 4))
    features = output.features.view(3, len(layer_ids), 32)
    assert bool((features == features[:1, :, :1]).all())
    return features[0, :, 0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layer_ids", "sums"), [((0, 1, 2, 3), [1, 11, 111, 1111]), ((1, 3), [11, 1111]), ((2,), [111])]
)
def test_every_captured_layer_is_the_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, family: str, layer_ids: tuple[int, ...], sums: list[float]
) -> None:
    assert captured_sums(monkeypatch, family, layer_ids) == sums


def test_a_capture_of_layer_inputs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = target_module._capture

    @contextmanager
    def one_early(layers: nn.ModuleList, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        with right(layers, tuple(i - 1 for i in layer_ids)) as captured:
            yield IndexedFromOne(captured)

    class IndexedFromOne(dict[int, Tensor]):
        def __init__(self, captured: dict[int, Tensor]) -> None:
            super().__init__({0: torch.empty(0)})
            self.captured = captured

        def __getitem__(self, index: int) -> Tensor:
            return self.captured[index - 1]

    with planted_fault(monkeypatch, target_module, "_capture", one_early):
        assert captured_sums(monkeypatch, "qwen3", (1, 3)) == [11, 1111]


def test_hooks_are_gone_after_a_forward_and_after_an_error() -> None:
    target = build("qwen3")
    hooks = [list(layer._forward_hooks) for layer in target.layers]  # transformers may have put its own
    target.forward_whole(random_ids(1, 3))
    assert [list(layer._forward_hooks) for layer in target.layers] == hooks
    with pytest.raises(IndexError):
        target.forward_whole(torch.tensor([[VOCAB_SIZE]]))
    assert [list(layer._forward_hooks) for layer in target.layers] == hooks


def test_features_can_be_left_out() -> None:
    target, ids = build("qwen3"), random_ids(2, 6)
    output = target.forward(ids, target.new_cache(2, 6), with_features=False)
    assert output.features.shape == (2, 6, 0)
    check_close(output.hidden, target.forward_whole(ids).hidden)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [[20], [1] * 20, [7, 1, 5, 7]])
def test_cached_steps_equal_the_whole_forward(family: str, steps: list[int]) -> None:
    """20 positions behind windows of 5: a mask without the window would show."""
    target, ids = build(family), random_ids(2, 20)
    check_equal(run_steps(target, ids, steps), target.forward_whole(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_equals_its_rows_one_by_one(family: str) -> None:
    target, counts = build(family), torch.tensor([9, 3, 6])
    prompts, step = random_ids(3, 9, seed=1), random_ids(3, 4, seed=2)
    cache = target.new_cache(3, 16)
    first = target.forward(prompts, cache)
    cache.advance(counts)
    second = target.forward(step, cache)
    for row, count in enumerate(counts.tolist()):
        alone = target.forward_whole(torch.cat((prompts[row : row + 1, :count], step[row : row + 1]), dim=1))
        for name in ("hidden", "features"):
            ours, expected = torch.cat((getattr(first, name)[row, :count], getattr(second, name)[row])), alone
            check_close(ours, getattr(expected, name)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_then_continue_equals_a_fresh_run(family: str) -> None:
    """Each row keeps another part of its step, as after verification; the rejected rest must leave no trace."""
    target, ids, drafts = build(family), random_ids(3, 8, seed=3), random_ids(3, 5, seed=4)
    cache = target.new_cache(3, 24)
    target.forward(ids, cache)
    cache.advance(torch.tensor([8, 8, 8]))
    target.forward(drafts, cache)
    kept = [0, 2, 5]
    cache.advance(torch.tensor(kept))
    cache.select(torch.tensor([2, 0, 1]))
    after = target.forward(random_ids(3, 6, seed=5), cache)
    for row, old in enumerate([2, 0, 1]):
        whole = torch.cat((ids[old], drafts[old, : kept[old]], random_ids(3, 6, seed=5)[row]))[None]
        expected = target.forward_whole(whole)
        check_close(after.hidden[row], expected.hidden[0, -6:])
        check_close(after.features[row], expected.features[0, -6:])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_are_computed_without_what_is_between(family: str) -> None:
    """Behind prompts of different lengths, and once more behind the part of them that was kept."""
    target, lengths = build(family), torch.tensor([9, 3, 6])
    counts, kept = torch.tensor([1, 5, 3]), torch.tensor([1, 2, 3])
    caches, widths = (target.new_cache(3, 20), target.new_cache(3, 20)), list[int]()
    with target.layers[0].register_forward_pre_hook(lambda _layer, inputs: widths.append(inputs[0].shape[:2].numel())):
        for cache, options in zip(caches, ({}, {"counts": counts}), strict=True):
            target.forward(random_ids(3, 9, seed=1), cache)
            cache.advance(lengths)
            for seed in (2, 3):
                output = target.forward(random_ids(3, 5, seed=seed), cache, **options)
                cache.advance(kept)
                if not options:
                    expected = output if seed == 3 else None
    assert widths == [27, 15, 15, 27, 9, 9]
    tokens = torch.arange(5) < counts[:, None]
    assert output.tokens is not None and torch.equal(output.tokens, tokens)
    assert expected is not None
    check_close(output.hidden[tokens], expected.hidden[tokens])
    check_close(output.features[tokens], expected.features[tokens])
    assert not output.hidden[~tokens].any()
    logits = target.logits(output.hidden, output.tokens)
    check_close(logits[tokens], target.logits(expected.hidden)[tokens])
    assert not logits[~tokens].any()


def test_padding_behind_a_row_does_not_change_it() -> None:
    target, ids = build("gemma3"), random_ids(1, 12)
    padded = torch.cat((ids, torch.zeros(1, 9, dtype=torch.int64)), dim=1)
    check_close(target.forward_whole(padded).hidden[:, :12], target.forward_whole(ids).hidden)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3", "gemma4", "gemma4_shared"])
def test_a_missing_window_is_noticed(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    with planted_fault(monkeypatch, Target, "_masks", lambda self, visible, *_: all_visible(self, visible)):
        test_cached_steps_equal_the_whole_forward(family, [7, 1, 5, 7])


def all_visible(target: Target, visible: Tensor) -> Any:
    return visible if target.one_mask else {"full_attention": visible, "sliding_attention": visible}


def test_greedy_decoding_equals_generate(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]]
) -> None:
    config = DecodeConfig(
        max_new_tokens=24,
        batch_size=4,
        num_draft_tokens=0,
        rule=Rule.ratio,
        schedule=Schedule(ScheduleName.fixed, 0.0),
        sampling=SamplingConfig(0.0, 0, 1.0, 0.0, 0),
    )
    ours = decode(tiny_target, None, tiny_prompts, config).generations
    model = AutoModelForCausalLM.from_pretrained(tiny_target_config.path, dtype=torch.float32)
    for prompt, generation in zip(tiny_prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        options = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=tiny_target.spec.eos_token_ids[0])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        assert generation.tokens == whole[0, len(prompt) :].tolist()


def naive_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Keys and values repeated for every query head of their group; [B, H, Q, d] -> [B, Q, H, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_grouped_attention_equals_attention_over_repeated_keys(num_kv_heads: int, num_queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, num_queries, 8, generator=generator)
    key, value = torch.randn(2, 2, num_kv_heads, 9, 8, generator=generator)
    mask = torch.rand(2, 1, num_queries, 9, generator=generator) < 0.6
    mask[..., 0] = True  # no query without a key
    module = SimpleNamespace(num_key_value_groups=6 // num_kv_heads, is_causal=True)
    output, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    check_close(output, naive_attention(query, key, value, mask, 0.3))


def test_grouped_attention_without_a_mask_is_causal() -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    output, _ = grouped_attention(module, query, key, value, None, scaling=0.3)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    check_close(output, naive_attention(query, key, value, causal, 0.3))
