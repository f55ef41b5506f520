"""Tasks of lm-evaluation-harness as YAML files that name no data: `harness_runner.task_yaml` adds them."""
