"""The rules of the code base that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "models": {"models"},
    "data": {"models", "data"},
    "train": {"models", "data", "train"},
    "eval": {"models", "data", "eval"},
}
SCRIPTS = ["generate.py", "extract.py", "train.py", "eval.py", "export.py", "race.py"]
SOURCES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def imported_packages(source: str) -> set[str]:
    """Own packages that a file imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names & set(ALLOWED)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_direction(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert imported_packages(path.read_text()) <= ALLOWED[package]


def test_the_import_check_sees_a_wrong_import() -> None:
    assert imported_packages("def f():\n    from eval.decode import decode") == {"eval"}


@pytest.mark.parametrize("name", ["train", "eval"])
def test_packages_win_over_the_scripts_of_their_name(name: str) -> None:
    code = f"import {name}; print({name}.__file__)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip().endswith(f"{name}/__init__.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_root_scripts_only_compose_type_and_call(script: str) -> None:
    assert len((ROOT / script).read_text().splitlines()) <= 55


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 80, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_read_no_environment_and_do_not_probe_attributes(path: Path) -> None:
    text = path.read_text()
    assert "os.environ" not in text and "os.getenv" not in text
    assert not re.search(r"\bhasattr\(", text)


def test_the_tests_folder_is_flat() -> None:
    """tests/train/ would hijack `import train`."""
    assert not [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"]
