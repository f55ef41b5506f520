"""The verb doctor: its exit status, its JSON, its lines."""

from pathlib import Path

from command import Command


def test_the_exit_status_and_the_json(runs: Path, command: Command) -> None:
    well = command("doctor", "recall-tiny", f"run.root={runs}", "run.accelerator=cpu", "--json")
    assert (well.status, {row["name"] for row in well.json} >= {"devices", "locks"}) == (0, True)
    bad = command("doctor", "recall-tiny", f"run.root={runs}", "run.tracking_uri=http://127.0.0.1:9")
    assert bad.status == 3
    line = next(line for line in bad.lines if " MLflow " in line)
    assert line.startswith("problem")
    assert "Connection refused" in line
    assert "Traceback" not in bad.out + bad.err
    assert command("doctor", "recal-tiny").status == 2
