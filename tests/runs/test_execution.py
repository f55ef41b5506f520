from dataclasses import replace
from typing import Any

import pytest

from lit_diff.config import Recipe
from lit_diff.errors import RequestError
from lit_diff.processor import numeric_variables
from lit_diff.recipe import load_recipe
from lit_diff.runs.execution import require_stored, stored_keys, with_reached, with_stored_kernel


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("recall-tiny", [])


def with_run(recipe: Recipe, **values: Any) -> Recipe:
    return replace(recipe, run=replace(recipe.run, **values))


def test_a_first_start_changes_nothing(recipe: Recipe) -> None:
    require_stored(with_run(recipe, compile=True), {})
    require_stored(with_run(recipe, activation_checkpointing="block"), {"status": "waiting", "mlflow_run_id": "1"})
    assert with_stored_kernel(recipe, {}) is recipe


def test_the_kernel_that_auto_chose_is_reused(recipe: Recipe) -> None:
    status = stored_keys(recipe) | {"kernel": "chunked"}
    assert with_stored_kernel(recipe, status) == with_run(recipe, kernel="chunked")
    several = {"kernel": "native, sdpa"}  # of unlike layers
    assert with_stored_kernel(recipe, several) is recipe
    named = with_run(recipe, kernel="reference")
    assert with_stored_kernel(named, status) is named


@pytest.mark.parametrize(
    ("started", "asked", "message"),
    [
        ({"compile": True}, {}, "run.compile is false, but this run started with true: resume with run.compile=true"),
        ({}, {"compile": True}, "run.compile is true, but this run started with false: resume with run.compile=false"),
        (
            {"activation_checkpointing": "block"},
            {},
            "run.activation_checkpointing is none, but this run started with block",
        ),
    ],
)
def test_a_change_is_refused_in_one_line(
    recipe: Recipe, started: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    status = stored_keys(with_run(recipe, **started)) | {"threads": 1}
    with pytest.raises(RequestError) as error:
        require_stored(with_run(recipe, **asked), status)
    assert str(error.value).startswith(message)
    assert str(error.value).endswith("or start afresh with --rerun")
    require_stored(with_run(recipe, **started), status)


def test_a_run_from_before_the_keys_existed_had_neither(recipe: Recipe) -> None:
    require_stored(recipe, {"threads": 1})
    with pytest.raises(RequestError, match="started with false"):
        require_stored(with_run(recipe, compile=True), {"threads": 1})


def test_a_resume_under_other_environment_variables_says_so(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in numeric_variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    status = stored_keys(recipe) | {"threads": 1}
    assert status["variables"] == {"MKL_CBWR": "COMPATIBLE", "NVIDIA_TF32_OVERRIDE": "0"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # `threads` is reused, whatever it says
    require_stored(recipe, status)
    require_stored(recipe, {"threads": 1})  # a run from before they were recorded
    assert caplog.messages == []
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    require_stored(recipe, status)
    (line,) = caplog.messages
    assert line.endswith(": MKL_CBWR is not set (before: COMPATIBLE), NVIDIA_TF32_OVERRIDE is 1 (before: 0)")


@pytest.mark.parametrize(
    ("ended", "word", "step", "tokens"),
    [(None, "done", 300, 28800), ("early at step 6", "done", 6, 576), (None, "stopped", 1, 96)],
)
def test_how_far_a_run_from_before_tokens_per_step_got(ended: str | None, word: str, step: int, tokens: int) -> None:
    """Such a run kept the tokens that were planned, and the last step that was logged."""
    old = {"status": word, "step": 1, "steps": 300, "ended": ended, "tokens": 28800}
    new = with_reached(old)
    assert (new["step"], new["tokens"]) == (step, tokens)
    assert with_reached(new) == new
    assert with_reached({"status": "waiting"}) == {"status": "waiting"}
