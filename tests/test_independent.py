"""Draft models of their own, and what any drafter's state holds after a round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.decode import decode
from eval.subject import is_language_model, load_subject
from eval.verify import Rule
from models.checkpoint import save_drafter
from models.independent import IndependentDrafter, first_layers
from models.target import Target, TargetConfig, TargetIdentity, load_tokenizer
from tests.chains import lively_eagle3
from tests.conftest import build_dspark
from tests.draft_batches import greedy_sampler, lively_dspark
from tests.draft_checks import IDENTITY
from tests.test_decode import GREEDY, SAMPLED, K, config_of, texts

TINY = TargetIdentity("tiny", "", "")


@pytest.fixture
def draft_model(tiny_target: Target) -> IndependentDrafter:
    return IndependentDrafter(tiny_target, K, tiny_target.spec.vocab_size)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_equal_to_the_target_has_every_draft_accepted(
    tiny_target: Target, draft_model: IndependentDrafter, tiny_prompts: list[list[int]], sampling: Any
) -> None:
    for batch_size in (1, 5):
        config = config_of(sampling=sampling, max_new_tokens=30, batch_size=batch_size)
        found = decode(tiny_target, draft_model, tiny_prompts, config).generations
        assert all(r.accepted == r.proposed for g in found for r in g.rounds)


def test_another_model_keeps_greedy_outputs_and_the_noise_of_the_match_rule(
    tiny_target: Target, tiny_prompts: list[list[int]]
) -> None:
    other = lively_other(tiny_target)
    for sampling, rule in ((GREEDY, Rule.ratio), (SAMPLED, Rule.match)):
        vanilla = decode(tiny_target, None, tiny_prompts, config_of(sampling=sampling)).generations
        found = decode(tiny_target, other, tiny_prompts, config_of(sampling=sampling, rule=rule)).generations
        assert texts(found) == texts(vanilla)
        accepted = {r.accepted for g in found for r in g.rounds}
        assert len(accepted) > 1 and max(accepted) < 30


def lively_other(target: Target) -> IndependentDrafter:
    """The target with noise on its head, so that some drafts are wrong, and a smaller vocabulary."""
    import copy

    model = copy.copy(target)
    noise = torch.randn(target.head.shape, generator=torch.Generator().manual_seed(1))
    model.head = (target.head + 0.3 * target.head.std() * noise)[:50]
    return IndependentDrafter(model, K, target.spec.vocab_size)


def state_caches(state: Any) -> list[Tensor]:
    cache = state.cache
    longest = int(cache.lengths.max())
    return [buffer[:, :, :longest] for buffer in (*cache._keys, *cache._values) if buffer is not None]


@torch.inference_mode()
def check_state(target: Target, drafter: Any, prompts: list[list[int]]) -> None:
    """Three rounds of K drafts, all accepted, against a fresh start over the same tokens."""
    layers = getattr(drafter, "target_layer_ids", ())
    target = target.capturing(layers)
    tokens = torch.tensor(prompts)
    cache = target.new_cache(len(prompts), 64)
    output, counts = target.forward(tokens, cache), torch.full((len(prompts),), tokens.shape[1])
    cache.advance(counts)
    state = drafter.start(tokens, output.features, counts, 64)
    last = target.logits(output.hidden[:, -1]).argmax(-1)
    sampler = greedy_sampler(len(prompts))
    for _ in range(3):
        drafts = drafter.propose(state, last, sampler, K).tokens
        fed = torch.cat((last[:, None], drafts), dim=1)
        output = target.forward(fed, cache)
        cache.advance(torch.full_like(last, K + 1))
        drafter.advance(state, fed, output.features, torch.full_like(last, K + 1))
        tokens, last = torch.cat((tokens, fed), dim=1), target.logits(output.hidden[:, -1]).argmax(-1)
    whole = target.forward(tokens, target.new_cache(len(prompts), 64))
    fresh = drafter.start(tokens, whole.features, torch.full_like(last, tokens.shape[1]), 64)
    assert torch.equal(state.lengths, fresh.lengths)
    for ours, expected in zip(state_caches(state), state_caches(fresh), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["independent", "dspark", "eagle3"])
def test_a_state_after_accepted_rounds_is_that_of_a_fresh_start(
    tiny_target: Target, tiny_target_config: TargetConfig, kind: str
) -> None:
    make = {
        "independent": lambda: lively_other(tiny_target),
        "dspark": lambda: lively_dspark(tiny_target, tiny_target_config),
        "eagle3": lambda: lively_eagle3(tiny_target, tiny_target_config),
    }
    check_state(tiny_target, make[kind](), [[5, 6, 7, 8], [9, 3, 2, 7]])


@torch.inference_mode()
def test_first_layers_give_the_features_behind_them_to_norm_and_head(tiny_target: Target) -> None:
    """And the target itself keeps all of its layers."""
    tokens, last = torch.tensor([[5, 6, 7, 8, 9]]), tiny_target.spec.num_layers - 1
    before = tiny_target.forward_whole(tokens).hidden
    for depth in range(1, last + 1):
        cut = first_layers(tiny_target, depth)
        behind = tiny_target.capturing((depth - 1,)).forward_whole(tokens).features
        assert torch.equal(cut.forward_whole(tokens).hidden, tiny_target.backbone.norm(behind))
        cached = cut.forward(tokens, cut.new_cache(1, 8)).hidden
        torch.testing.assert_close(cached, tiny_target.backbone.norm(behind), rtol=1e-5, atol=1e-5)
    assert torch.equal(tiny_target.forward_whole(tokens).hidden, before)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_first_layers_draft_without_changing_what_comes_out(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]], sampling: Any
) -> None:
    """By the match rule the vanilla sample; the deeper they are, the more is accepted."""
    vanilla = decode(tiny_target, None, tiny_prompts, config_of(sampling=sampling)).generations
    accepted = []
    for depth in (1, tiny_target.spec.num_layers - 1):
        subject = load_subject(f"first_layers:{depth}", tiny_target_config, TINY, torch.device("cpu"))
        subject.bind(tiny_target)
        config = config_of(sampling=sampling, rule=Rule.match, num_draft_tokens=subject.drafter.num_draft_tokens)
        found = decode(tiny_target, subject.drafter, tiny_prompts, config).generations
        assert texts(found) == texts(vanilla)
        accepted.append(sum(r.accepted for g in found for r in g.rounds) / sum(len(g.rounds) for g in found))
    assert accepted[0] < accepted[1]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("first_layers:0", r"draft=first_layers:0 needs some of the target's layers, not all: 1\.\."),
        ("first_layers:99", r"draft=first_layers:99 needs some of the target's layers, not all: 1\.\."),
        ("first_layers:half", r"draft=first_layers:half: a number of layers must stand behind the colon"),
        ("first_layers:", r"draft=first_layers:: a number of layers must stand behind the colon"),
    ],
)
def test_a_depth_that_the_target_does_not_have_is_named(
    tiny_target_config: TargetConfig, draft: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_subject(draft, tiny_target_config, TINY, torch.device("cpu"))


def test_a_folder_of_a_causal_lm_is_one_and_a_drafter_is_not(
    tiny_target: Target, tiny_target_config: TargetConfig, tmp_path: Path
) -> None:
    assert is_language_model(tiny_target_config.path)
    save_drafter(build_dspark(tiny_target, tiny_target_config), tmp_path, target=IDENTITY)
    assert not is_language_model(str(tmp_path))
    for name in ("outputs/demo/checkpoints", "./org/model", "/org/model", "nowhere"):
        assert not is_language_model(name)


def test_a_draft_model_is_loaded_by_its_folder(tiny_target_config: TargetConfig) -> None:
    subject = load_subject(tiny_target_config.path, tiny_target_config, TINY, torch.device("cpu"))
    assert subject.name == "independent" and subject.layer_ids == () and len(subject.fingerprint) == 64
    assert isinstance(subject.drafter, IndependentDrafter)


def test_a_draft_model_of_another_tokenizer_is_refused(tiny_target_config: TargetConfig, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_target_config.path, tmp_path / "other")
    tokenizer = load_tokenizer(tiny_target_config)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"draft=.*other has another tokenizer than target=tiny"):
        load_subject(str(tmp_path / "other"), tiny_target_config, TINY, torch.device("cpu"))
