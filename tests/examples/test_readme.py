"""The README: its example runs as it is written, and what it names is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from tiered_cache.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_every_link_and_every_test_that_it_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    named = re.findall(r"\btests/[\w/.]*\w", README)
    places = {link for link in links if "://" not in link} | set(named)
    assert len(places) > 40
    assert [place for place in sorted(places) if not list(ROOT.glob(place.rstrip("/") + "*"))] == []


def commands() -> list[list[str]]:
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("tiered-cache ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_option_of_its_commands_is_one(words: list[str]) -> None:
    name, *arguments = words
    command = typer.main.get_group(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments)


def test_its_example_of_an_actor_runs_as_it_is_written(tmp_path: Path) -> None:
    (example,) = blocks("python")
    script = tmp_path / "example.py"
    script.write_text(example)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    first, second = (line for line in ran.stdout.splitlines() if "tokens restored" in line)
    assert first.endswith(": 0 tokens restored, or why not: not_stored")
    assert re.fullmatch(r"\S+: [1-9]\d* tokens restored, or why not: None", second)
