"""A replay holds every token of an output once, when it came and where it came from."""

import pytest

from eval.decode import decode
from eval.replay import pieces, replay_of, steps_of
from eval.rounds import Generation, Round
from eval.stats import Pass
from models.dspark import DSpark
from models.target import Target, TargetConfig, load_tokenizer
from tests.test_decode import config_of


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_of_several_tokens_appears_with_its_last() -> None:
    tokens = list("aé€b".encode())
    found = pieces(tokens, Bytes())  # type: ignore[arg-type]
    assert found == ["a", "", "é", "", "", "€", "b"]
    assert pieces(tokens[:2], Bytes()) == ["a", "\ufffd"], "what is cut off is shown as it is"  # type: ignore[arg-type]


def test_steps_hold_every_token_once_with_its_origin_and_time() -> None:
    rounds = [Round(3, 2, True), Round(3, 1, False), Round(3, 3, True)]  # the second ended by a stop token it drafted
    generation = Generation(0, list(b"abcdefg"), rounds, "length", 0.5, [1.0, 2.0, 3.0])
    steps = list(steps_of(generation, Bytes()))  # type: ignore[arg-type]
    assert steps == [
        (0.5, [("a", False)]),
        (1.0, [("b", True), ("c", True), ("d", False)]),
        (2.0, [("e", True)]),
        (3.0, [("f", True), ("g", True)]),  # the rest of this round was beyond the limit
    ]


@pytest.mark.parametrize("with_drafter", [False, True])
def test_a_lane_of_real_decoding_has_the_outputs_text_at_rising_times(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_dspark: DSpark,
    tiny_prompts: list[list[int]],
    with_drafter: bool,
) -> None:
    tokenizer = load_tokenizer(tiny_target_config)
    target = tiny_target.capturing(tiny_dspark.target_layer_ids)
    config = config_of(max_new_tokens=30, batch_size=1)
    result = decode(target, tiny_dspark if with_drafter else None, tiny_prompts[:1], config)
    about = {"drafter": "x", "temperature": 0.0, "num_draft_tokens": 4}
    measured = Pass(**vars(result), about=about, domains=["a"], prompts=tiny_prompts[:1])
    replay = replay_of([measured], "count", tokenizer)
    (lane,) = replay["lanes"]
    tokens = result.generations[0].tokens
    assert sum(len(step["tokens"]) for step in lane["steps"]) == len(tokens) == lane["num_tokens"]
    text = "".join(piece for step in lane["steps"] for piece, _ in step["tokens"])
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    times = [step["at_seconds"] for step in lane["steps"]]
    assert times == sorted(times) and times[0] > 0 and times[-1] == lane["seconds"] <= result.seconds
    assert any(drafted for step in lane["steps"] for _, drafted in step["tokens"]) == with_drafter
