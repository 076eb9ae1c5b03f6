"""Who may import whom: the layers, the lazy doors to Ray, no cycles, and nothing heavy on `import tiered_cache`."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

CORE = {"errors", "identity", "geometry"}
FRAMES = CORE | {"codecs", "frame"}
NODE = FRAMES | {
    "deadline",
    "executors",
    "in_flight",
    "flights",
    "tiers",
    "prefix_tree",
    "index",
    "policy",
    "namespace",
    "level",
    "config",
    "cache",
}
ENGINES = {"devices", "states", "engines"}

# Unit of tiered_cache -> the other units it may import, at any depth of nesting in its code.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "identity": {"errors"},
    "geometry": {"errors", "identity"},
    "codecs": CORE,
    "frame": CORE | {"codecs"},
    "devices": {"errors", "geometry"},
    "states": CORE | {"devices"},
    "deadline": {"errors"},
    "executors": set(),
    "in_flight": {"errors", "deadline"},
    "flights": {"errors", "identity", "deadline", "tiers"},
    "tiers": {"errors", "deadline", "executors"},  # a tier never learns what a frame is
    "prefix_tree": CORE,
    "index": CORE | {"prefix_tree"},
    "policy": CORE | {"prefix_tree", "index"},  # policies read the index, which never asks a policy
    "config": CORE | {"tiers"},
    "metrics": {"errors", "tiers"},
    "namespace": FRAMES | {"tiers", "prefix_tree", "index"},
    "level": NODE - {"level", "cache"},
    "cache": NODE - {"cache"},
    "engines": CORE | {"devices", "states"},
    "service": NODE | ENGINES,
    "check": NODE,
    "replay": NODE | ENGINES | {"service"},
    "report": {"errors", "replay"},
    "testing": NODE | ENGINES | {"service", "replay"},
    "cli": NODE | ENGINES | {"check", "service", "replay", "report"},
}
# Packages that may import more than their unit: the one engine that drives a cache from inside its process.
PACKAGE_MAY_IMPORT: dict[str, set[str]] = {"tiered_cache.engines.vllm": NODE | {"service"}}

# What takes seconds or a GPU to import. It may stand at the top of these modules only, which are loaded on demand.
HEAVY = {"ray", "torch", "cupy", "vllm", "transformers", "pytest", "hypothesis", "obstore", "matplotlib"}
LOADED_ON_DEMAND = (
    "tiered_cache.devices.cupy",
    "tiered_cache.engines.transformers",
    "tiered_cache.engines.vllm",
    "tiered_cache.report.drawing",
    "tiered_cache.testing",
    "tiered_cache.tiers.object_store",
)
# The units that may open the door to Ray and to the actors, inside a function.
RAY_INSIDE_FUNCTIONS = {"cli", "testing"}
ACTORS_INSIDE_FUNCTIONS = {"cli", "testing"}


class Import(NamedTuple):
    importer: str
    target: str
    line: int
    lazy: bool  # inside a function, or for the type checker alone

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for top in ("tiered_cache", "actors") for path in (ROOT / top).rglob("*.py")}


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_type_checking_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(module: str) -> Iterator[Import]:
    """Every import of a module; `from package import submodule` counts as one of the submodule."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(module, name.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for name in node.names:
                target = f"{node.module}.{name.name}"
                yield Import(module, target if target in MODULES else str(node.module), node.lineno, lazy)
        deferred = lazy or isinstance(node, FUNCTIONS) or is_type_checking_block(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, deferred)

    return visit(ast.parse(MODULES[module].read_text()), lazy=False)


IMPORTS = [found for module in sorted(MODULES) for found in imports_of(module)]


def unit(module: str) -> str:
    """`tiered_cache.tiers.disk` -> `tiers`; `actors.router` -> `actors`; `tiered_cache` -> `tiered_cache`."""
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "tiered_cache" and rest else top


def on_demand(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in LOADED_ON_DEMAND)


def allowed_to_package(module: str) -> set[str]:
    return {u for package, units in PACKAGE_MAY_IMPORT.items() if f"{module}.".startswith(f"{package}.") for u in units}


def test_every_unit_has_its_row_and_every_row_only_looks_down() -> None:
    units = {unit(module) for module in MODULES} - {"tiered_cache", "actors"}
    assert units <= MAY_IMPORT.keys(), f"units without a row: {units - MAY_IMPORT.keys()}"
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError


def test_units_import_only_what_their_row_allows() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.target.startswith("tiered_cache.")
        and unit(found.importer) in MAY_IMPORT
        and unit(found.target) != unit(found.importer)
        and unit(found.target) not in MAY_IMPORT[unit(found.importer)]
        and unit(found.target) not in allowed_to_package(found.importer)
    ]
    assert not wrong


def test_no_unit_imports_the_package_root() -> None:
    """The root gathers the public names from the units, so a unit that imports it back would be a cycle."""
    wrong = [
        str(found)
        for found in IMPORTS
        if found.target == "tiered_cache" and unit(found.importer) not in {"actors", "cli", "testing"}
    ]
    assert not wrong


def test_only_the_doors_import_the_actors() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if unit(found.target) == "actors"
        and unit(found.importer) != "actors"
        and not (found.lazy and unit(found.importer) in ACTORS_INSIDE_FUNCTIONS)
    ]
    assert not wrong


def test_the_actors_import_neither_command_line_nor_test_support() -> None:
    wrong = [
        str(found) for found in IMPORTS if unit(found.importer) == "actors" and unit(found.target) in {"cli", "testing"}
    ]
    assert not wrong


def test_the_core_does_not_know_ray() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.target.split(".")[0] == "ray"
        and unit(found.importer) != "actors"
        and not (found.lazy and unit(found.importer) in RAY_INSIDE_FUNCTIONS)
    ]
    assert not wrong


def test_nothing_heavy_stands_at_the_top_of_a_module() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.target.split(".")[0] in HEAVY
        and not found.lazy
        and unit(found.importer) != "actors"
        and not on_demand(found.importer)
    ]
    assert not wrong


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {
        module: {found.target for found in IMPORTS if found.importer == module and found.target in MODULES}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("everything", [False, True], ids=["root", "every-module"])
def test_import_loads_nothing_heavy_in_a_fresh_process(everything: bool) -> None:
    light = [m for m in sorted(MODULES) if unit(m) != "actors" and not on_demand(m)]
    script = "\n".join(
        [f"import {module}" for module in (light if everything else ["tiered_cache"])]
        + ["import sys", f"print(sorted({HEAVY!r} & sys.modules.keys()))"]
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_directory_with_modules_is_a_package() -> None:
    directories = {path.parent for path in MODULES.values()}
    assert not [str(d.relative_to(ROOT)) for d in directories if not (d / "__init__.py").exists()]
