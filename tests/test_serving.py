"""A running engine beside the runtime: an equal drafter has equal counts, others are reported, bad servers refused."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval import connection, engines
from eval.config import EvalConfig, parse_temperatures
from eval.decode import decode
from eval.markdown import server_verdict
from eval.plans import MAIN, PassPlan
from eval.schedule import FIXED
from eval.serving import Serving
from eval.stats import Pass
from eval.subject import VANILLA, Subject
from eval.verify import Rule
from models.checkpoint import save_drafter
from models.config import to_dataclass
from models.dspark import DSpark
from models.files import read_json
from models.target import Target, TargetConfig, TargetIdentity
from tests.chat_server import ChatServer, echo, serve  # noqa: F401 (fixture)
from tests.engine_servers import FAKES, FakeEngine, FakeSglang, FakeVllm, K, Step, fake, running  # noqa: F401
from tests.test_conf import compose_and_type
from tests.test_scripts import Script, prompts_file, script  # noqa: F401 (fixtures)

LIMIT, NUM_PROMPTS = 24, 10


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "backoff", lambda attempt: 0.01 * attempt)
    monkeypatch.setattr(engines, "SETTLE_SECONDS", 0.001)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dspark: DSpark, tiny_identity: TargetIdentity) -> Path:
    """Of the drafter that is measured."""
    path = tmp_path_factory.mktemp("drafter")
    save_drafter(tiny_dspark, path, target=asdict(tiny_identity))
    return path


def config_of(url: str, *overrides: str) -> EvalConfig:
    node = compose_and_type("eval", [f"server={url}", f"max_new_tokens={LIMIT}", *overrides])
    return to_dataclass(EvalConfig, node, section="eval")


@pytest.fixture
def subject(folder: Path, tiny_dspark: DSpark) -> Subject:
    return Subject("dspark", tiny_dspark, "anchor_first", "x", folder)


@pytest.fixture
def measure(
    subject: Subject, tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]]
) -> Callable[..., dict[str, Any]]:
    """The report's part on two tasks, of passes at every temperature."""
    target = tiny_target.capturing(subject.layer_ids)
    prompts, domains = tiny_prompts[:NUM_PROMPTS], ["sums"] * 4 + ["counts"] * (NUM_PROMPTS - 4)

    def run(url: str, *overrides: str) -> dict[str, Any]:
        config = config_of(url, *overrides)
        serving = Serving(config, tiny_target, subject)
        serving.probe(prompts)
        passes = []
        for temperature in parse_temperatures(config.temperature):
            plan = PassPlan(subject, temperature, K, FIXED, Rule.ratio, MAIN)
            about = plan.about(config, tiny_target_config, quantization=None, device="cpu")
            result = decode(target, subject.drafter, prompts, plan.decoding(config))
            passes.append(Pass(**vars(result), about=about, domains=domains, prompts=prompts))
        return json.loads(json.dumps(serving.report(passes)))

    return run


def test_eval_py_puts_a_server_into_its_reports(
    script: Script, prompts_file: Path, fake: Callable[..., FakeEngine], folder: Path, tmp_path: Path
) -> None:
    common = [f"draft={folder}", f"output_dir={tmp_path}", f"tasks=[{prompts_file}]", "num_prompts=6", "batch_size=1"]
    common += [f"max_new_tokens={LIMIT}", "baselines=[]", "replay=null", "check_transformers=0"]
    with running(fake("vLLM")) as url:
        shown = script("eval", *common, f"server={url}")
    (row,) = read_json(tmp_path / "eval" / "report.json")["server"]["rows"]
    assert row["equal_counts"] == row["equal_outputs"] == row["num_prompts"] == 6
    page = (tmp_path / "eval" / "report.html").read_text()
    assert 'id="server"' in page and "6 of 6" in page
    for text in (shown, (tmp_path / "summary.md").read_text(), page):
        assert "vLLM 0.32.0 at T=0, K=4" in text and "the same counts on every prompt" in text


@pytest.mark.parametrize("name", FAKES)
def test_an_equal_drafter_has_the_engines_counts_on_every_prompt(
    name: str, fake: Callable[..., FakeEngine], measure: Callable[..., dict[str, Any]]
) -> None:
    with running(fake(name)) as url:
        report = measure(url, "batch_size=1")
    assert (report["engine"], report["url"], report["concurrency"]) == (name, url, 1)
    (row,) = report["rows"]
    assert row["equal_outputs"] == row["equal_counts"] == row["num_prompts"] == NUM_PROMPTS
    assert row["counts"] == row["offline_counts"] and row["difference"] == 0 and row["agrees"] and not row["causes"]
    assert [task["num_prompts"] for task in row["tasks"]] == [4, 6]
    for key in ("rounds", "accepted", "proposed"):
        assert sum(task["counts"][key] for task in row["tasks"]) == row["counts"][key] > 0
    assert sum(task["num_tokens"] for task in row["tasks"]) == row["num_tokens"] < NUM_PROMPTS * LIMIT
    assert row["survival"] == row["offline_survival"] and (row["survival"] is not None) == (name == "vLLM")
    assert "the same counts on every prompt" in server_verdict(report, row)


@pytest.mark.parametrize("name", FAKES)
def test_requests_that_run_together_are_compared_as_far_as_the_engine_tells_them_apart(
    name: str, fake: Callable[..., FakeEngine], measure: Callable[..., dict[str, Any]]
) -> None:
    with running(fake(name)) as url:
        report = measure(url, "batch_size=4")
    (row,) = report["rows"]
    assert report["concurrency"] == 4 and row["counts"] == row["offline_counts"] and row["equal_outputs"] == NUM_PROMPTS
    assert row["equal_counts"] == (None if name == "vLLM" else NUM_PROMPTS)
    assert all(task["difference"] == 0 for task in row["tasks"])


@pytest.mark.parametrize("name", FAKES)
def test_a_drafter_that_is_fed_other_layers_is_reported(
    name: str, fake: Callable[..., FakeEngine], measure: Callable[..., dict[str, Any]]
) -> None:
    with running(fake(name, layer_ids=(1, 2, 3))) as url:
        report = measure(url, "batch_size=1")
    (row,) = report["rows"]
    assert row["difference"] < -0.03 and not row["agrees"] and row["equal_counts"] < NUM_PROMPTS
    assert row["equal_outputs"] == NUM_PROMPTS and "it is not the target: layer ids, slot layout" in row["causes"][0]
    said = server_verdict(report, row)
    assert "they DISAGREE by more than 3%" in said and row["causes"][0] in said


def test_tasks_that_disagree_are_named_where_all_together_agree(
    fake: Callable[..., FakeEngine], measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tasks one gains what the other loses."""
    engine = fake("SGLang")
    honest = engine.told

    def told(num_tokens: int, steps: list[Step]) -> dict[str, Any]:
        about = honest(num_tokens, steps)
        number = len(engine.bodies) - 4  # behind the probe
        shift = {1: 3, 5: -3}.get(number, 0)
        return about | {"spec_num_correct_drafts": about["spec_num_correct_drafts"] + shift}

    monkeypatch.setattr(engine, "told", told)
    with running(engine) as url:
        report = measure(url, "batch_size=1")
    (row,) = report["rows"]
    assert row["agrees"] and [task["agrees"] for task in row["tasks"]] == [False, False] and row["causes"]
    said = server_verdict(report, row)
    assert "they agree within 3%" in said and "by more than 3% on: sums +" in said and "counts -" in said
    assert "Likely causes: (1)" in said


def test_another_target_of_the_same_tokenizer_is_a_cause(
    fake: Callable[..., FakeEngine], measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that go their own way after a few tokens, as those of a quantised target may."""
    engine = fake("SGLang")
    engine.gets["/server_info"] = (200, {"version": "0.5.23", "dtype": "bfloat16"})
    honest = engine.whole

    def forgetful(prompt: list[int], limit: int, temperature: float) -> tuple[list[int], list[Step]]:
        tokens, steps = honest(prompt, limit, temperature)
        return tokens[:3], steps[:1]

    monkeypatch.setattr(engine, "whole", forgetful)
    with running(engine) as url:
        (row,) = measure(url)["rows"]
    assert row["equal_outputs"] < NUM_PROMPTS / 2 and not row["agrees"]
    assert "quantised" in row["causes"][0] and "its target is bfloat16, here it is float32" in row["causes"][-1]


@pytest.mark.slow
def test_sampled_answers_are_compared_by_an_interval(
    fake: Callable[..., FakeEngine], measure: Callable[..., dict[str, Any]]
) -> None:
    """Other draws of the same drafter: the interval of the difference holds 0, and no output is compared."""
    with running(fake("llama.cpp")) as url:
        rows = measure(url, "temperature=[1,0]", "batch_size=2")["rows"]
    assert [row["temperature"] for row in rows] == [1, 0]
    low, high = rows[0]["interval"]
    assert low < 0 < high and rows[0]["equal_outputs"] is None and rows[1]["interval"] is None
    assert rows[0]["agrees"] or ("chance" in rows[0]["causes"][0] and "likeliest tokens" in rows[0]["causes"][1])
    assert rows[1]["equal_counts"] == NUM_PROMPTS


@pytest.mark.parametrize("name", FAKES)
def test_everything_that_is_set_here_is_sent(
    name: str, fake: Callable[..., FakeEngine], measure: Callable[..., dict[str, Any]]
) -> None:
    """Also what is off: a server may have defaults of its own."""
    engine = fake(name)
    with running(engine) as url:
        measure(url, "temperature=0.7", "top_k=5", "top_p=0.9", "min_p=0.1", "seed=3")
    probes, asked = engine.bodies[:4], [body.get("sampling_params", body) for body in engine.bodies[4:]]
    assert len(asked) == NUM_PROMPTS and len(probes) == 4
    for body in asked:
        assert (body["temperature"], body["top_k"], body["top_p"], body["min_p"]) == (0.7, 5, 0.9, 0.1)
        assert LIMIT in (body.get("max_tokens"), body.get("max_new_tokens"), body.get("n_predict"))
    seeds = [body.get("seed", body.get("sampling_seed")) for body in asked]
    assert len(set(seeds)) == NUM_PROMPTS
    prompts = [body.get("prompt", body.get("input_ids")) for body in engine.bodies[4:]]
    assert all(isinstance(token, int) for prompt in prompts for token in prompt)
    if name == "llama.cpp":
        assert asked[0]["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    salts = [body.get("cache_salt") for body in engine.bodies]
    assert name != "vLLM" or len(set(salts)) == len(salts)
    with running(engine) as url:
        measure(url)
    off, last = {"vLLM": 0, "SGLang": -1, "llama.cpp": 0}[name], engine.bodies[-1]
    last = last.get("sampling_params", last)
    assert (last["temperature"], last["top_k"], last["top_p"], last["min_p"]) == (0, off, 1, 0)


@pytest.fixture
def probed(subject: Subject, tiny_target: Target, tiny_prompts: list[list[int]]) -> Callable[..., str]:
    """Connects and probes; the error."""

    def run(url: str, *overrides: str, other: Subject | None = None) -> str:
        config = config_of(url, *overrides)
        with pytest.raises(ValueError) as error:
            Serving(config, tiny_target, other or subject).probe(tiny_prompts)
        assert "\n" not in str(error.value)
        return str(error.value)

    return run


def test_a_server_that_is_not_there(probed: Callable[..., str]) -> None:
    found = probed("http://127.0.0.1:9")
    assert re.search(r"server http://127.0.0.1:9 does not answer .* start it or correct server=", found)
    assert "is no URL" in probed("localhost")
    assert "must be one URL" in probed("'http://a:1,http://b:2'")


def test_a_server_that_is_no_known_engine(probed: Callable[..., str], serve: Callable[..., ChatServer]) -> None:
    assert "says that it is None" in (found := probed(serve(echo).url)) and "vLLM, SGLang and llama.cpp" in found


def test_a_server_that_wants_a_key(probed: Callable[..., str], serve: Callable[..., ChatServer]) -> None:
    assert "api_key_file=PATH" in probed(serve(echo, authorization="Bearer x").url)


@pytest.mark.parametrize("name", FAKES)
def test_an_engine_without_speculation(
    name: str, fake: Callable[..., FakeEngine], probed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake(name)
    if isinstance(engine, FakeVllm):
        engine.speculates = False
    if isinstance(engine, FakeSglang):
        monkeypatch.setattr(engine, "told", lambda num_tokens, steps: {})
    monkeypatch.setattr(engine, "steps", plainly(engine.steps))
    with running(engine) as url:
        found = probed(url)
    flag = {"vLLM": "--speculative-config", "SGLang": "--speculative-algorithm", "llama.cpp": "--spec-draft-model"}[
        name
    ]
    assert f"server={url}" in found and ("no draft is counted" in found or "does not speculate" in found)
    assert f"start it with {flag}" in found or f"speculation on, {flag}" in found


def plainly(steps: Callable[..., Any]) -> Callable[..., Any]:
    """One token a step, of which none was drafted."""

    def found(*args: Any) -> Any:
        first, rounds = steps(*args)
        return first, (Step(0, 0, [token]) for step in rounds for token in step.tokens)

    return found


def test_counters_that_do_not_move(
    fake: Callable[..., FakeEngine], probed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake("vLLM")
    monkeypatch.setattr(engine, "count", lambda steps: None)
    with running(engine) as url:
        assert "answers, but no draft is counted" in probed(url)


def test_metrics_that_are_missing(fake: Callable[..., FakeEngine], probed: Callable[..., str]) -> None:
    engine = fake("vLLM")
    for reply, words in (
        ((404, {"detail": "Not Found"}), "GET /metrics was not answered: status 404"),
        ((200, "# HELP python_info\npython_info 1.0\n"), "without --disable-log-stats"),
    ):
        engine.gets["/metrics"] = reply
        with running(engine) as url:
            assert words in (found := probed(url)) and f"server={url}" in found


@pytest.mark.parametrize("name", FAKES)
def test_an_answer_that_lacks_a_field(
    name: str, fake: Callable[..., FakeEngine], probed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, field = fake(name), {"vLLM": "token_ids", "SGLang": "spec_num_correct_drafts", "llama.cpp": "tokens"}[name]
    honest = engine.post

    def older(path: str, body: dict[str, Any]) -> Any:
        status, reply = honest(path, body)
        return status, json.loads(json.dumps(reply).replace(f'"{field}"', '"other"'))

    monkeypatch.setattr(engine, "post", older)
    with running(engine) as url:
        assert f"'{field}'" in (found := probed(url)) and "update it to" in found


@pytest.mark.parametrize("name", FAKES)
def test_another_model(name: str, fake: Callable[..., FakeEngine], probed: Callable[..., str]) -> None:
    with running(fake(name, shift=1)) as url:
        assert "4 of 4 prompts begin otherwise" in (found := probed(url)) and "target=" in found


def test_another_vocabulary(fake: Callable[..., FakeEngine], probed: Callable[..., str]) -> None:
    engine = fake("llama.cpp")
    engine.gets["/v1/models"][1]["data"][0]["meta"]["n_vocab"] = 99
    with running(engine) as url:
        assert "vocabulary of 99 tokens, the target has 55" in probed(url)


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("length", [2, 3])
def test_another_number_of_draft_tokens(
    name: str, length: int, fake: Callable[..., FakeEngine], probed: Callable[..., str]
) -> None:
    """Both ways: the server's 2 or 4 against 4 or 3 here."""
    served, here = (2, 4) if length == 2 else (4, 3)
    with running(fake(name, num_draft_tokens=served)) as url:
        found = probed(url, f"num_draft_tokens={here}", "max_new_tokens=32")
    assert f"tokens a round, here num_draft_tokens={here}: set that to the server's" in found


def test_a_context_that_is_too_small(fake: Callable[..., FakeEngine], probed: Callable[..., str]) -> None:
    engine = fake("SGLang")
    engine.gets["/v1/models"][1]["data"][0]["max_model_len"] = 32
    with running(engine) as url:
        assert "has a context of 32 tokens, and 37 are needed" in probed(url)


def test_somebody_else_asks_it_too(
    fake: Callable[..., FakeEngine], probed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake("vLLM")
    honest = engine.count
    monkeypatch.setattr(engine, "count", lambda steps: honest([*steps, *[Step(K, 2, [1, 2, 3])] * 3]))
    with running(engine) as url:
        assert "others ask it at the same time" in probed(url)


def test_an_engine_that_answers_with_an_error_or_nothing(
    fake: Callable[..., FakeEngine], probed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for reply, words in (
        ((400, {"error": {"message": "min_p is not supported"}}), "status 400, min_p is not supported"),
        ((503, {"error": {"message": "Loading model"}}), "does not take POST /completion (status 503, Loading model)"),
        ((200, "<html>"), "gives no JSON object"),
    ):
        engine = fake("llama.cpp")
        monkeypatch.setattr(engine, "post", lambda path, body, reply=reply: reply)
        with running(engine) as url:
            assert words in probed(url)
            assert len(engine.bodies) == (4 if reply[0] == 503 else 1), "only what was not decoded is asked again"


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("schedule=confidence", "use schedule=fixed"),
        ("gate=true", "use gate=false"),
        ("tree.num_nodes=8", "use tree.num_nodes=null"),
        ("feature_dtype=fp8", "use feature_dtype=null"),
        ("stop_strings=[END]", "use stop_strings=[]"),
        ("repetition_penalty=1.1", "use repetition_penalty=1.0"),
        ("presence_penalty=0.5", "use presence_penalty=0.0"),
        ("rule=lossy_threshold", "use rule=ratio"),
    ],
)
def test_what_engines_do_otherwise_is_refused(override: str, way_out: str, probed: Callable[..., str]) -> None:
    found = probed("http://127.0.0.1:9", override)
    assert way_out in found and override.split("=")[0] in found


def test_plain_decoding_cannot_be_compared(probed: Callable[..., str]) -> None:
    assert "drafts nothing" in probed("http://127.0.0.1:9", "draft=vanilla", other=VANILLA)
