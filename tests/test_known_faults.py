"""Public fault reports of this field, each tied to the test that notices it: planted, the test must fail.

The numbers are those of a list kept outside the repository (../shared/reference/known_faults.md, parts A to D); where
it is present, every row of it has to appear here.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import data.chat as chat_module
import eval.decode as decode_module
import eval.stats as stats_module
import eval.verify as verify_module
import models.attention as attention_module
import models.base as base_module
import models.checkpoint as checkpoint_module
import models.dspark as dspark_module
import models.eagle3 as eagle3_module
import models.layers as layers_module
import models.masks as masks_module
import models.target as target_module
import models.vocab_loss as losses_module
import train.setup as training_setup
from eval.costs import CostTable
from eval.schedule import ScheduleName
from eval.verify import Rule
from models.base import SlotLayout
from models.block import BlockDrafter
from models.cache import KVCache
from models.dspark import DSpark
from models.eagle3 import Eagle3
from models.independent import IndependentDrafter
from models.layers import PairLayer
from models.sampling import Sampler
from models.target import Target
from tests import planted_faults as faults
from tests import (
    test_block,
    test_chat,
    test_checkpoint,
    test_decode,
    test_drafters,
    test_dspark,
    test_eagle3,
    test_eagle3_options,
    test_extract,
    test_independent,
    test_layers,
    test_lossless,
    test_penalties,
    test_resume,
    test_schedule,
    test_soft_losses,
    test_stats,
    test_target,
    test_train,
    test_training_batches,
    test_trees,
)
from tests.resumed_training import runs  # noqa: F401 (fixtures of the tests below)
from tests.test_checkpoint import native  # noqa: F401 (fixtures of the tests below)
from tests.test_decode import chains, varied  # noqa: F401 (fixtures of the tests below)
from tests.test_drafters import texts  # noqa: F401
from tests.test_eagle3_options import reduced  # noqa: F401
from tests.test_train import run_training  # noqa: F401
from train import trainer

LIST = Path(__file__).parents[1] / "../shared/reference/known_faults.md"


@dataclass(frozen=True)
class Covered:
    """`test` fails when `owner.name` is replaced by `fault`. `arguments` are its parameters that are no fixtures."""

    test: Callable[..., None]
    owner: Any
    name: str
    fault: Any
    arguments: Callable[[pytest.FixtureRequest], dict[str, Any]] = field(default=lambda request: {})


def given(**values: Any) -> Callable[[pytest.FixtureRequest], dict[str, Any]]:
    return lambda request: values


def drafter_of(kind: str, name: str = "lively") -> Callable[[pytest.FixtureRequest], dict[str, Any]]:
    fixtures = ("tiny_target", "tiny_target_config")
    return lambda request: {
        name: test_training_batches.make_lively(kind, *(request.getfixturevalue(f) for f in fixtures))
    }


def trained_of(model: str) -> Callable[[pytest.FixtureRequest], dict[str, Any]]:
    fixtures = ("tiny_target", "tiny_target_config", "tiny_store")
    return lambda request: {"drafter": test_drafters.trained(model, *(request.getfixturevalue(f) for f in fixtures))}


NOT_APPLICABLE = {
    29: "DFlash 2, whose start as DFlash 1 is asked for here, is not among the drafters yet",
    51: "there is no prefix cache here: every request reads its whole prompt",
    53: "recurrent layers are refused when a target is loaded: test_target_loading.py plants one",
    57: "nothing is quantised here but stored features, which eval.py feature_dtype= feeds to any drafter",
    34: "no drafter here has a learned key or value column that all queries share; keys come from tokens and features",
}
ROWS: dict[int, Covered] = {
    1: Covered(
        test_chat.test_one_token_answer_at_index_zero_has_nothing_that_predicts_it,
        chat_module,
        "_supervise",
        faults.runs_to_the_end,
    ),
    2: Covered(
        test_chat.test_every_answer_is_supervised_up_to_its_end_of_turn,
        chat_module,
        "_supervise",
        faults.supervises_all,
        given(template=test_chat.CHATML),
    ),
    3: Covered(
        test_training_batches.test_a_chat_without_supervision_trains_nothing_and_harms_nothing,
        trainer,
        "global_denominators",
        faults.unguarded,
        drafter_of("dspark"),
    ),
    4: Covered(
        test_chat.test_end_of_turn_is_supervised_and_end_of_text_is_not,
        chat_module,
        "_end_ids",
        lambda tokenizer: {tokenizer.eos_token_id},
    ),
    6: Covered(
        test_eagle3.test_exactly_the_answer_tokens_have_a_gradient_at_their_logits,
        eagle3_module,
        "find_chains",
        faults.mask_at_the_input,
        drafter_of("eagle3", "drafter"),
    ),
    7: Covered(
        test_training_batches.test_labels_follow_the_newest_token_from_the_store_on,
        BlockDrafter,
        "supervised_slots",
        faults.shifted_twice,
        drafter_of("dspark"),
    ),
    8: Covered(
        test_drafters.test_training_reports_an_oracle_as_perfect_in_its_own_layout_only,
        BlockDrafter,
        "supervised_slots",
        faults.teacher_one_late,
        given(layout=SlotLayout.in_place),
    ),
    9: Covered(
        test_block.test_anchors_one_apart_differ_by_the_feature_between_them,
        masks_module,
        "sees_context",
        faults.sees_one_more,
        drafter_of("dspark", "drafter"),
    ),
    10: Covered(
        test_drafters.test_training_logits_equal_decoding_logits,
        attention_module,
        "attend_blocks",
        faults.causal_in_decoding,
        trained_of("dflash"),
    ),
    11: Covered(
        test_training_batches.test_packed_documents_train_as_alone,
        attention_module,
        "context_spans",
        faults.blind_to_documents,
        drafter_of("dspark"),
    ),
    14: Covered(
        test_training_batches.test_every_run_has_its_own_draft_vocabulary,
        training_setup,
        "choose_draft_vocabulary",
        faults.cached_vocabulary,
    ),
    16: Covered(
        test_extract.test_head_of_stored_rows_is_the_models_own_logits,
        Target,
        "forward_whole",
        faults.without_norm,
        given(family="gemma3"),
    ),
    17: Covered(
        test_target.test_every_captured_layer_is_the_one_asked_for,
        target_module,
        "_capture",
        faults.layer_inputs,
        given(family="qwen3", layer_ids=(1, 3), sums=[11, 1111]),
    ),
    19: Covered(
        test_layers.test_rotation_keeps_the_norm_of_every_head,
        layers_module.Rotary,
        "__call__",
        faults.stretched,
        given(head_dim=192, parameters={"rope_type": "default", "rope_theta": 1e4}),
    ),
    20: Covered(
        test_drafters.test_an_oracle_scores_the_full_block_in_its_own_layout_only,
        BlockDrafter,
        "_run_blocks",
        faults.one_early,
        given(layout=SlotLayout.anchor_first, num_prompt=450),
    ),
    21: Covered(
        test_drafters.test_an_oracle_scores_the_full_block_in_its_own_layout_only,
        BlockDrafter,
        "num_slots",
        property(lambda drafter: drafter.num_draft_tokens),
        given(layout=SlotLayout.in_place, num_prompt=7),
    ),
    22: Covered(
        test_drafters.test_training_reports_an_oracle_as_perfect_in_its_own_layout_only,
        BlockDrafter,
        "slot_metrics",
        faults.skips_slot_0,
        given(layout=SlotLayout.anchor_first),
    ),
    23: Covered(
        test_eagle3.test_the_tokens_fed_are_the_true_ones_whatever_the_draft_says,
        Eagle3,
        "step",
        faults.feeds_its_own_tokens,
    ),
    25: Covered(
        test_train.test_how_a_batch_is_split_changes_no_weight,
        trainer,
        "global_denominators",
        faults.per_micro_batch,
        given(tokens_per_batch=32, packing=True),
    ),
    26: Covered(
        test_soft_losses.test_rows_out_of_reach_have_no_loss_and_count_as_misses,
        losses_module,
        "_compare",
        faults.counts_rows_out_of_reach,
    ),
    27: Covered(
        test_eagle3_options.test_maps_come_back_in_a_fresh_object,
        Eagle3,
        "draft_ids",
        property(lambda drafter: drafter.d2t),
    ),
    28: Covered(
        test_checkpoint.test_all_tensors_that_do_not_fit_are_named_at_once,
        checkpoint_module,
        "load_weights",
        faults.loads_what_fits,
        given(folder_name="native"),
    ),
    30: Covered(
        test_dspark.test_contradictory_options_are_named,
        dspark_module,
        "check_heads",
        lambda config: None,
        given(changes={"markov_rank": 0}, message=r"model\.confidence_with_markov=true needs"),
    ),
    32: Covered(
        test_eagle3.test_training_equals_chains_unrolled_one_by_one,
        PairLayer,
        "pair",
        faults.normed_residual,
        given(changes={}),
    ),
    33: Covered(
        test_training_batches.test_a_target_in_another_basis_is_refused,
        base_module,
        "differ",
        lambda ours, theirs: False,
    ),
    35: Covered(
        test_train.test_a_resumed_run_has_the_rates_and_weights_of_an_undisturbed_one,
        trainer,
        "read_progress",
        faults.restarts_the_schedule,
    ),
    37: Covered(
        test_resume.test_extending_trains_on_by_a_schedule_of_its_own,
        trainer,
        "learning_rate",
        faults.stays_at_zero,
    ),
    40: Covered(
        test_lossless.test_drafts_over_many_columns_follow_the_target,
        test_lossless.BigramDrafter,
        "drawn_from",
        faults.drawn_by_a_rounded_sum,
    ),
    41: Covered(
        test_lossless.test_emitted_sequences_follow_the_target,
        test_lossless.BigramDrafter,
        "drawn_from",
        faults.drawn_greedily,
        given(options="ratio", drafter="other"),
    ),
    42: Covered(
        test_penalties.test_speculation_with_penalties_gives_the_vanilla_sample,
        Sampler,
        "probs",
        faults.forgets_what_was_drafted,
        given(kind="independent"),
    ),
    43: Covered(
        test_trees.test_a_verified_tree_emits_exactly_the_target_distribution,
        verify_module,
        "_verify_tree",
        faults.takes_a_sibling,
        given(name="siblings"),
    ),
    44: Covered(
        test_decode.test_greedy_speculation_equals_plain_decoding_in_batches_of_1_3_and_12,
        KVCache,
        "advance",
        faults.commits_the_whole_step,
        given(rule=Rule.ratio),
    ),
    45: Covered(
        test_decode.test_a_round_ended_by_an_accepted_stop_counts_neither_bonus_nor_what_follows,
        decode_module.Ends,
        "find",
        faults.looks_at_the_last_token_only,
        given(offset=3),
    ),
    47: Covered(
        test_stats.test_pooled_and_per_request_lengths_are_different_means,
        stats_module,
        "_mean_length",
        faults.leaves_the_bonus_out,
    ),
    48: Covered(
        test_independent.test_a_state_after_accepted_rounds_is_that_of_a_fresh_start,
        IndependentDrafter,
        "advance",
        faults.never_writes_the_last_draft,
        given(kind="independent"),
    ),
    50: Covered(
        test_decode.test_requests_that_take_over_a_row_decode_as_alone,
        KVCache,
        "put",
        faults.takes_over_without_keys,
        given(kind="dspark"),
    ),
    54: Covered(
        test_schedule.test_a_cliff_in_the_costs_moves_the_cut,
        CostTable,
        "verify_seconds",
        faults.costs_nothing_more,
        given(name=ScheduleName.algorithm1),
    ),
    56: Covered(
        test_decode.test_greedy_speculation_equals_plain_decoding_in_batches_of_1_3_and_12,
        DSpark,
        "propose",
        faults.proposes_nothing,
        given(rule=Rule.ratio),
    ),
    38: Covered(
        test_extract.test_a_ragged_batch_equals_one_by_one,
        Target,
        "forward_whole",
        faults.neighbours_rows,
    ),
}


def run(row: Covered, request: pytest.FixtureRequest) -> None:
    arguments = row.arguments(request)
    for name in inspect.signature(row.test).parameters:
        if name not in arguments:
            arguments[name] = request.getfixturevalue(name)
    row.test(**arguments)


@pytest.mark.parametrize("number", ROWS)
def test_a_known_fault_is_noticed_where_it_is_planted(
    number: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[number]
    with monkeypatch.context() as patch:
        patch.setattr(row.owner, row.name, row.fault)
        with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
            run(row, request)


@pytest.mark.skipif(not LIST.is_file(), reason=f"the list of known faults is not at {LIST}")
def test_every_row_of_the_list_is_covered_or_not_applicable() -> None:
    parts = re.split(r"^### ", LIST.read_text(), flags=re.MULTILINE)
    numbers = [
        int(n) for part in parts if part[:1] in "ABCD" for n in re.findall(r"^\| (\d+) \|", part, flags=re.MULTILINE)
    ]
    assert len(numbers) > 20
    assert sorted(numbers) == sorted([*ROWS, *NOT_APPLICABLE])
    assert all(len(reason) > 20 for reason in NOT_APPLICABLE.values())
