"""Greedy decoding of the embedded target, a real one: speculation gives the tokens of plain decoding."""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from data.prompts import builtin_prompts
from eval.decode import decode
from eval.identity import identity_of
from eval.rounds import DecodeResult
from eval.stats import Pass, acceptance_stats
from eval.tasks import render_prompts
from models.base import Drafter, Proposal
from models.sampling import Sampler
from models.target import Target, load_target, load_tokenizer
from tests.bench_decoding import ROOT, settings
from tests.bench_extract import embedded_target
from tests.bench_setting import dspark_config

pytestmark = pytest.mark.slow
NUM_PROMPTS, NUM_TOKENS, K = 200, 20, 7


@cache
def target() -> Target:
    return load_target(embedded_target(), torch.device("cpu"))


@cache
def prompts() -> list[list[int]]:
    config = embedded_target()
    return render_prompts(
        load_tokenizer(config), builtin_prompts(0, num_train=NUM_PROMPTS, num_heldout=0), config.thinking
    )


def run(drafter: Any, batch_size: int, some: list[list[int]]) -> DecodeResult:
    return decode(target(), drafter, some, settings(batch_size, K if drafter else 0, max_new_tokens=NUM_TOKENS))


@cache
def vanilla() -> DecodeResult:
    return run(None, 8, prompts())


class Recalling:
    """An untrained drafter, features and all, in whose blocks three tokens of four are the target's own."""

    needs_features = True
    num_draft_tokens = K

    def __init__(self, drafter: Drafter, texts: list[list[int]]) -> None:
        self.drafter, self.texts = drafter, texts
        self.start, self.advance = drafter.start, drafter.advance

    def propose(self, state: Any, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        proposal = self.drafter.propose(state, last, sampler, num_draft_tokens)
        for row, (request, length) in enumerate(zip(sampler.request_ids.tolist(), state.lengths.tolist(), strict=True)):
            for slot in range(num_draft_tokens):
                place = length + 1 + slot
                if place < len(self.texts[request]) and (request + place) % 4:
                    proposal.tokens[row, slot] = self.texts[request][place]
        proposal.probs = torch.nn.functional.one_hot(proposal.tokens, proposal.probs.shape[-1]).float()
        return proposal


def recalling() -> Recalling:
    torch.manual_seed(0)
    drafter = dspark_config(markov_rank=16).build(
        target().spec, target_layer_ids=target().layer_ids, mask_token_id=embedded_target().mask_token_id
    )
    drafter.bind(target().embedding, target().head)
    texts = [prompt + g.tokens for prompt, g in zip(prompts(), vanilla().generations, strict=True)]
    return Recalling(drafter, texts)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_greedy_outputs_of_200_prompts_are_those_of_plain_decoding(batch_size: int) -> None:
    found = run(recalling(), batch_size, prompts())
    stats = acceptance_stats(found.generations)
    assert stats.acceptance_length is not None and 2 < stats.acceptance_length < 5
    assert min(stats.survival[:3]) > 0.05
    ours, theirs = (Pass(**vars(r), about={}, domains=[], prompts=prompts()) for r in (found, vanilla()))
    result = identity_of(target(), ours, theirs)
    assert result["outputs_identical_to_vanilla"], result


def test_a_request_after_a_longer_one_equals_a_fresh_process() -> None:
    short, long = min(prompts(), key=len), max(prompts(), key=len)
    in_turn = run(None, 1, [long, short]).generations[1]
    script = (
        "import json; from tests.test_embedded_decoding import prompts, run; "
        "print(json.dumps(run(None, 1, [min(prompts(), key=len)]).generations[0].tokens))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == in_turn.tokens
