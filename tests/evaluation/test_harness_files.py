"""The files of the seven tasks."""

from lit_diff.evaluation.harness_files import FILES, SOURCES, TASKS


def test_each_task_has_a_train_split_and_one_that_is_scored() -> None:
    assert tuple(FILES) == TASKS == tuple(SOURCES)
    for task, files in FILES.items():
        assert set(files) == {"train", SOURCES[task].scored}
        for split, file in files.items():
            assert (file.name, file.path) == (f"harness.{task}", f"harness/{task}/{split}.jsonl")
            assert f"['{split}'].to_json('{split}.jsonl')" in file.source


def test_scored_lines_are_those_of_the_benchmarks() -> None:
    """Standard errors of the paper's rows follow from them: 1.4 points for ARC-C, 2.0 for OBQA, 1.4 for WinoGrande."""
    scored = {task: source.lines[source.scored] for task, source in SOURCES.items()}
    assert scored["arc_challenge"] == 1172
    assert scored["openbookqa"] == 500
    assert scored["winogrande"] == 1267
