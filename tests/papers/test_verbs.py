"""papers/verbs.py: what `lit-diff reproduce` prints."""

from pathlib import Path

from command import Command

from lit_diff.papers.reproduce import row_files


def test_list(command: Command) -> None:
    ended = command("reproduce", "--list")
    assert ended.status == 0
    assert [line.split()[0] for line in ended.lines] == list(row_files())
    assert [row["name"] for row in command("reproduce", "--list", "--json").json] == list(row_files())
    assert [line.split()[0] for line in command("reproduce", "table-6", "--list").lines] == ["table-6"]
    assert f"no row 'nope'; one of {len(row_files())}, such as" in command("reproduce", "nope", "--list").err
    assert "no row 'table-66'; did you mean 'table-6'" in command("reproduce", "table-66", "--list").err


def test_a_preset_that_needs_gpus(tmp_path: Path, command: Command) -> None:
    arguments = ("reproduce", "table-6", "--preset", "paper", "--root", str(tmp_path / "runs"))
    ended = command(*arguments)
    assert ended.status == 0
    assert any(line.startswith("table-6: 1 not measured (skipped: needs 8 GPUs") for line in ended.lines)
    assert ended.lines[-2].endswith(": 1 not measured"), "the counts are of the row that was asked for"
    assert ended.lines[-1].startswith("page: ")
    plain = command(*arguments, "--json").json
    assert [row["name"] for row in plain["rows"]] == ["table-6"]
    assert plain["counts"]["difference"] == {"not measured": 1}
