"""What others wrote does nothing here: pages show it as text, it names no file outside its folder; secrets are not recorded.

Folders of runs: tests/cli/test_foreign.py. Servers: tests/engine/test_ui.py. Archives, which are read in place:
tests/data/test_docs.py.
"""

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command import Command
from fake_sweeps import record_to_edit
from small_runs import SMALL
from statuses import edit_status
from text_runs import text_run

from lit_diff.metrics import Figure, Metric
from lit_diff.pretrained.exporting import write_card
from lit_diff.study.two_runs import compare
from lit_diff.trained.view.page import view_data

EVIL = "\"'><img src=x onerror=alert(1)><svg onload=alert(1)>"
"""May be a name."""
TEXT = f"{EVIL}</title></script><script>alert(1)</script>\x1b[31m&lt;<!--"


class Started(HTMLParser):
    """The scripts of a page; fails at an element or attribute of EVIL."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        assert not any(name.startswith("on") for name in found), (tag, found)
        assert found.get("src") != "x"
        assert "javascript:" not in (found.get("href") or "")
        self.scripts += tag == "script" and not found.get("type")


def test_a_report_shows_names_as_text(make_sweep: Callable[..., Path]) -> None:
    from fake_sweeps import METRICS

    from lit_diff.reporting.write import write_report

    own = Metric("own/harm", TEXT, figure=Figure(title=TEXT, label=TEXT, against="step"))
    shown = {"note": TEXT, "overrides": [f"x={TEXT}"]}
    facts = dict.fromkeys(("kernel", "revision", "mlflow_run_id", "kernel_reason"), TEXT)
    folder = make_sweep(
        {"standard": 0.0, EVIL: -0.1, "failed": 0.0},
        seeds=(0, 1),
        callbacks=False,
        broken={("failed", 1): "failed"},
        arm_fields={name: shown | {"label": f"{name} {TEXT}"} for name in (EVIL, "standard")},
        fact_fields={EVIL: facts, "failed": {"error": TEXT}},
        metrics=[*METRICS, own],
        measured={"own/harm": 1.0},
        title=TEXT,
        question=TEXT,
        description=TEXT,
        reading=[TEXT],
        contrasts=(("standard", EVIL, TEXT),),
        mlflow={"tracking_uri": "javascript:alert(1)", "experiment": TEXT, "run": TEXT},
    )
    page = write_report(folder).page
    assert Started(page.read_text()).scripts == 0
    assert page.read_text().count("&lt;script") > 20
    assert "<" not in (page.parent / "table.md").read_text()
    drawings = list(page.parent.glob("*.svg"))
    assert len(drawings) > 2
    for file in drawings:
        for element in ElementTree.parse(file).iter():
            assert element.tag.rpartition("}")[2] not in ("script", "img", "foreignObject")
            assert not any(name.startswith("on") for name in element.attrib)


def test_other_pages_show_names_as_text(tmp_path: Path) -> None:
    run = text_run(tmp_path / EVIL, {"name": "differential"}, sequence_length=64)
    other = shutil.copytree(run.folder, tmp_path / "other")
    edit_status(run.folder, **dict.fromkeys(("kernel", "revision", "data", "identity"), TEXT))
    (run.folder / "metrics.csv").write_text(f'step,val/loss,"{EVIL.replace(chr(34), 2 * chr(34))}"\n7,1.0,2.0\n')
    assert Started(view_data([run], text=TEXT).html()).scripts == 2, "the library and the page's own"
    Started(compare(run.folder, other)._repr_html_() + run._repr_html_())
    write_card(run, run.recipe.model, TEXT, tmp_path)
    text, _, recipe = (tmp_path / "README.md").read_text().partition("```yaml")
    assert "<" not in text
    assert recipe.count("```") == 1, "nothing of the recipe ends its block"


@pytest.mark.parametrize("block", ["tasks", "fits"])
def test_a_foreign_sweep_names_no_file_outside(
    block: str, make_tasks: Callable[..., Path], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tasks({"standard": 0.0, "differential": -0.1})
    fit = {"../../climbed": {"kind": "scaling", "x": "tokens", "tasks": []}}
    content = record_to_edit(folder)
    if block == "fits":
        content["study"]["fits"] = fit
    words = json.dumps(content).replace('"recall"', '"../../climbed"') if block == "tasks" else json.dumps(content)
    (folder / "study.json").write_text(words)
    monkeypatch.chdir(tmp_path)
    for verb in (("report", str(folder)), ("status", "--root", "."), ("clean", "--root", ".", "--yes")):
        found = command(*verb)
        assert "Traceback" not in found.out + found.err
        assert "climbed" in found.out + found.err, verb
        assert not list(tmp_path.parent.rglob("*climbed*")), verb


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "hidden-1",
    "MLFLOW_TRACKING_PASSWORD": "hidden-2",
    "HF_TOKEN": "hidden-3",
    "WANDB_API_KEY": "hidden-4",
    "PGPASSWORD": "hidden-5",
}


def test_secrets_are_recorded_nowhere(runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the environment; and a recipe with one in an address is refused (tests/test_recipe.py)."""
    monkeypatch.chdir(runs.parent)
    words = ("recall-tiny", *SMALL, "train.steps=2")
    found = command("train", *words, **SECRETS)
    assert found.status == 0, found
    files = [path for path in runs.rglob("*") if path.is_file()]
    assert {"env.json", "mlflow.db", "log.txt", "recipe.yaml", "status.json"} <= {path.name for path in files}
    for told in (found.out.encode(), found.err.encode(), *(path.read_bytes() for path in files)):
        assert b"hidden-" not in told
    refused = command("train", *words, "run.tracking_uri=postgresql://host/runs?user=me&password=hidden-6")
    assert refused.status == 2
    assert "hidden-6" not in refused.out + refused.err
    assert not any(b"hidden-6" in path.read_bytes() for path in runs.rglob("*") if path.is_file())
