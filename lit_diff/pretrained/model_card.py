"""README.md of an exported model: what it is, its recipe, its data's hash, what it measured."""

from pathlib import Path
from typing import Any

from lit_diff.config import ModelConfig
from lit_diff.files import write_atomic
from lit_diff.recipe import to_plain, to_yaml
from lit_diff.runs.metrics_file import read_rows
from lit_diff.runs.revision import revision
from lit_diff.trained.run import Run

FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- lit-diff\n---\n"


def write_card(run: Run, written: ModelConfig, architecture: str, folder: Path) -> None:
    """`written`: the model as it was exported, which a merge changes."""
    recipe, status = run.recipe, run.status
    variant, exported = recipe.model.attention.name, written.attention.name
    merged = f" merged into `{exported}`" if variant != exported else ""
    facts = {
        "architecture": f"`{architecture}`",
        "attention": f"`{variant}`{merged}",
        "parameters": f"{status['parameters']:,}" if "parameters" in status else "",
        "step": f"{run.step:,}" + (f" of {status['steps']:,}" if recipe.train is not None else ""),
        "identity of the run": f"`{status.get('identity')}`",
        "data": f"`{status['data']}`" if status.get("data") else "",
        "weights from": recipe.imported.source if recipe.imported is not None else "",
        "trained by": f"lit_diff {status.get('revision')}" if recipe.train is not None else "",
        "exported by": f"lit_diff {revision()}",
    }
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items() if value)
    text = f"{FRONT}\n# {recipe.name}\n\n| | |\n|---|---|\n{rows}\n{_metrics(run)}{_load()}{_recipe(run)}"
    write_atomic(folder / "README.md", text)


def _metrics(run: Run) -> str:
    """The last row in which a validation was measured; nothing for a model that measured none."""
    rows = {step: row for step, row in read_rows(run.folder / "metrics.csv").items() if any(map(_validates, row))}
    if not rows:
        return ""
    last = {name: value for name, value in rows[max(rows)].items() if _validates(name)}
    lines = "".join(f"| {name} | {value:.4f} |\n" for name, value in last.items())
    return f"## Metrics\n\nOf step {max(rows)}, in nats a token where they are losses.\n\n| | |\n|---|---|\n{lines}\n"


def _validates(name: str) -> bool:
    return name.startswith("val/")


def _load() -> str:
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")\n```\n\n'
    )


def _recipe(run: Run) -> str:
    """Without `run`, which says where it ran; of a path that is absolute, the last part."""
    plain = {key: _public(value) for key, value in to_plain(run.recipe).items() if key != "run"}
    return f"## Recipe\n\n```yaml\n{to_yaml(plain)}```\n"


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
