"""What no file may contain: code that data could run, swallowed errors, words that are not about the product."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
from pathlib import Path

import pytest

from tiered_cache import errors

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    if (path := ROOT / name).is_file() and path != Path(__file__)
)
PYTHON = {path: ast.parse(path.read_text()) for path in FILES if path.suffix == ".py"}
PRODUCT = {path: tree for path, tree in PYTHON.items() if path.is_relative_to(ROOT / "tiered_cache")} | {
    path: tree for path, tree in PYTHON.items() if path.is_relative_to(ROOT / "actors")
}

# Frames, traces and settings are data. These turn bytes or text into code, or into whatever objects they name.
CODE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CODE_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load"}

FOREIGN_WORDS = re.compile(
    r"/work/|shared/DESIGN|DESIGN\.md|POLICY\.md|\bissue\s*#?\d|helper agent"
    r"|pypi\.org|pythonhosted|npmjs|debian\.org",
    re.IGNORECASE,
)
DATA_BESIDE_THE_CHECKOUT = re.compile(r"\.\./shared")


def where(path: Path, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_nothing_turns_data_into_code() -> None:
    found = []
    for path, tree in PRODUCT.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [str(node.module), *(name.name for name in node.names)]
            else:
                modules = []
            if isinstance(node, ast.Import | ast.ImportFrom) and CODE_MODULES & {m.split(".")[-1] for m in modules}:
                found.append(where(path, node))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CODE_CALLS:
                found.append(where(path, node))
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                found.append(where(path, node.value))
    assert not found


def test_no_error_is_swallowed() -> None:
    """A bare `except`, or one for every exception whose body does nothing."""
    found = [
        where(path, node)
        for path, tree in PYTHON.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (
                ast.unparse(node.type) in {"Exception", "BaseException"}
                and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)
            )
        )
    ]
    assert not found


def test_no_assertion_is_a_constant() -> None:
    found = [
        where(path, node)
        for path, tree in PYTHON.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant)
    ]
    assert not found


def test_every_python_file_says_what_it_is() -> None:
    assert not [str(path.relative_to(ROOT)) for path, tree in PYTHON.items() if not ast.get_docstring(tree)]


def test_the_repository_speaks_of_the_product_alone() -> None:
    found = []
    for path in FILES:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # packed test data
        in_tests = path.is_relative_to(ROOT / "tests")
        for number, line in enumerate(text.splitlines(), 1):
            if FOREIGN_WORDS.search(line) or (not in_tests and DATA_BESIDE_THE_CHECKOUT.search(line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found


ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.TieredCacheError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_cross_a_process_whole(kind: type[errors.TieredCacheError]) -> None:
    """Ray moves an exception by its class and `args`; what an operator reads must be the same at both ends."""
    full = ("rows differ: 7 against 8", "frames/ab12", "disk")
    examples = [kind(full[0]), kind(*full)]
    if issubclass(kind, errors.TierError):
        examples += [kind(*full, True), kind(*full, False)]
    for error in examples:
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is kind
        assert (copied.args, str(copied), vars(copied)) == (error.args, str(error), vars(error))
    assert str(examples[1]) == "rows differ: 7 against 8 (tier disk, key frames/ab12)"
