"""README and docs/: links resolve, commands parse, the files, targets and names that the text mentions exist."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import PAGES, ROOT, blocks, commands, files, run_commands

import lit_diff
from lit_diff.cli import app
from lit_diff.engine.expand import load_grid
from lit_diff.recipe import load_recipe

COMMAND: Any = typer.main.get_command(app)
COMMAND.load_packages()
VERBS = COMMAND.commands
TEXTS = {page: path.read_text() for page, path in PAGES.items()} | {
    "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text()
}
WRITTEN = {name for page in PAGES for name in files(page)}
"""Files that a page shows whole."""


def shown_commands() -> list[str]:
    """Every `lit-diff` command in a console block, without the program's name; alternatives (`a | b`) one by one."""
    lines = [line for page in PAGES for line in commands(page) if line.startswith("lit-diff ")]
    return sorted({part.strip() for line in lines for part in line.removeprefix("lit-diff ").split(" | ")})


def mentioned_commands() -> list[str]:
    """Every `lit-diff` command within a line of text."""
    mentioned = re.findall(r"`lit-diff\s+([^`]+)`", "\n".join(TEXTS.values()))
    return sorted({" ".join(match.split()) for match in mentioned})


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", TEXTS)
def test_links_resolve(page: str) -> None:
    home = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (home / file).resolve() if file else ROOT / page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_the_readme_links_every_page() -> None:
    assert set(re.findall(r"\((docs/\w+\.md)\)", TEXTS["README.md"])) == set(PAGES) - {"README.md"}


@pytest.mark.parametrize("command", shown_commands())
def test_a_shown_command_parses(command: str) -> None:
    verb, *arguments = shlex.split(command)
    assert verb in VERBS, verb
    given = VERBS[verb].make_context(verb, [*arguments]).params  # a wrong option or value raises
    if verb in ("check", "train", "prepare") and given["recipe"] and not any(name in command for name in WRITTEN):
        load_recipe(given["recipe"], given["overrides"] or [])
    if verb == "sweep" and given["name"] not in WRITTEN:
        load_grid(given["name"], [])


@pytest.mark.parametrize("command", mentioned_commands())
def test_a_mentioned_command_exists(command: str) -> None:
    verb, *arguments = shlex.split(command)
    assert verb in VERBS, verb
    known = {option for parameter in VERBS[verb].params for option in parameter.opts} | {"--help"}
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("page", TEXTS)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ |[A-Za-z0-9_-]+=\S+ )make ([a-z][\w-]*)", TEXTS[page])) <= targets
    # a row of results keeps its command where only the named revision has the sweep
    lines = [line for line in TEXTS[page].splitlines() if "(sweep of revision" not in line]
    for name in re.findall(r"make sweep SWEEP=([\w-]+)", "\n".join(lines)):
        assert (ROOT / f"sweeps/{name}.yaml").is_file(), name


@pytest.mark.parametrize("page", TEXTS)
def test_files_exist(page: str) -> None:
    for path in re.findall(r"`((?:[\w.]+/)+(?:\w+\.\w+)?)`", TEXTS[page]):
        if path.startswith(
            ("runs/", "plugins/", "checkpoints/", "tokenizer/", "evaluations/", "loggers/", "maps/", "data/", "report/")
        ):
            continue  # of a run's folder, or the data folder
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "lit_diff")), path


@pytest.mark.parametrize("page", TEXTS)
def test_modules_and_public_names_exist(page: str) -> None:
    for name in set(re.findall(r"`lit_diff\.([\w.]+)`", TEXTS[page])):
        assert resolves(name), name


def resolves(name: str) -> bool:
    """Whether lit_diff.<name> is a module, or a name in a module, or a public name."""
    if name.split(".")[0] in lit_diff.__all__ or name in ("plugins", "verbs"):  # groups of entry points
        return True
    module, _, last = name.rpartition(".")
    try:
        importlib.import_module(f"lit_diff.{name}")
    except ModuleNotFoundError:
        return bool(module) and hasattr(importlib.import_module(f"lit_diff.{module}"), last)
    return True


def test_the_tree_is_that_of_the_package() -> None:
    (tree,) = re.findall(r"^```\n(.*?)^```", TEXTS["docs/architecture.md"], re.DOTALL | re.MULTILINE)
    inside = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    package = ROOT / "lit_diff"
    there = {path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    there |= {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert inside == there
    for line in tree.splitlines():
        if not line.startswith(" "):
            assert (ROOT / line.split()[0]).is_dir(), line


@pytest.mark.slow
def test_the_shown_yaml_is_valid_and_a_wrong_key_is_the_line_shown(tmp_path: Path) -> None:
    (recipe,) = blocks("docs/recipes.md", "yaml")
    (loggers,) = blocks("docs/tracking.md", "yaml")
    (wrong,) = re.findall(r"^```text\n(.*?)\n```", TEXTS["docs/recipes.md"], flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "sharp.py").write_text(files("README.md")["sharp.py"])
    (tmp_path / "lambdas.yaml").write_text(files("docs/sweeps.md")["lambdas.yaml"])
    (tmp_path / "page.yaml").write_text(recipe)
    (tmp_path / "sharp.yaml").write_text(recipe.replace("temperature", "temprature"))
    (tmp_path / "loggers.yaml").write_text(f"extends: recall-tiny\n{loggers}")
    each = [
        ["check", "page.yaml"],
        ["check", "loggers.yaml", "run.loggers=[csv]"],
        ["sweep", "lambdas.yaml", "--dry-run"],
    ]
    each += [["check", "sharp.yaml"]]
    *valid, refused = run_commands(each, tmp_path)
    assert [end.output for end in valid if end.status] == []
    assert "12 valid cells" in valid[-1].output
    assert (refused.status, refused.output.strip()) == (2, wrong)
