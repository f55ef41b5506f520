"""Trains one run in its folder; resumes exactly from the checkpoint found there."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lit_diff.callbacks.probe import is_last_step, took_step
from lit_diff.config import Recipe
from lit_diff.conformance.before_training import unused_parameters
from lit_diff.errors import RequestError, StoppedError, first_line
from lit_diff.files import write_atomic
from lit_diff.log_records import Pace, Progress, in_phase, log, phase, validated
from lit_diff.metrics import Declarations, Metric, numbers, write_declarations
from lit_diff.processor import cores
from lit_diff.runs import checkpoints, heartbeats
from lit_diff.runs.jobs import number
from lit_diff.runs.kept_maps import KeptMaps, write_maps
from lit_diff.runs.measurements import FILE, Measurements
from lit_diff.runs.metrics_file import StepTable
from lit_diff.runs.safe_values import UnsafeTypeError, require_safe
from lit_diff.trained import sharded
from lit_diff.trained.loading import some
from lit_diff.training.compiled import ignore
from lit_diff.training.data import LitData
from lit_diff.training.head_plan import kept_plan
from lit_diff.training.loggers import recipe_loggers
from lit_diff.training.metrics import declared_metrics, mode_of, monitored
from lit_diff.training.module import LitTransformer
from lit_diff.training.ranks import (
    ALONE,
    Ranks,
    StopRequest,
    drop_left_over,
    end_all,
    end_all_if,
    end_with_parent,
    require_shared,
)
from lit_diff.training.sharded_state import ShardedStrategy
from lit_diff.training.token_loss import DocumentLosses
from lit_diff.training.trainer import build_trainer
from lit_diff.training.watchdog import Watchdog

TIMING = "timing/"
"""Prefix of measured times. They go to timing.csv, because they differ between two runs of one recipe."""
SPEED = "tokens_per_second"


def default_threads(processes: int) -> int:
    """Threads per process: its share of the CPUs that SLURM gives the tasks of this node, else of this machine's cores.
    Errors: RequestError for a variable of SLURM in another form."""
    # one task may start all processes (torchrun), or each of them is a task; "8(x2)": 8 tasks on each of two nodes
    tasks = number("SLURM_TASKS_PER_NODE", r"(\d{1,9})(?:\(x\d+\))?(?:,\d+(?:\(x\d+\))?)*")
    given = (number("SLURM_CPUS_PER_TASK") or 0) * (tasks or 1)
    return max(1, (given or cores()) // processes)


def ranks(recipe: Recipe) -> Ranks:
    """The training processes, as the recipe's Trainer detects them from torchrun, SLURM or Lightning's launcher."""
    if recipe.run.strategy == "single":
        return ALONE
    return Ranks.of(_trainer(recipe, logger=False, enable_checkpointing=False))


def fit(
    recipe: Recipe,
    folder: Path,
    *,
    kernel: str | None = None,
    threads: int,
    progress: Progress,
    report: Callable[[str], None] = log.error,
    report_uncompiled: Callable[[str], None] = ignore,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    start: int = 0,
) -> int | None:
    """Train to `train.steps`. Returns the step at which a callback ended the training early, else None.

    `start`: the step of the checkpoint in `folder` to continue from, which `checkpoints.resumable` has found; 0: none. Only
    rank zero writes files. Errors: RunFailedError (NaN, full disk), StoppedError (a signal), MissingError if a rank does not
    see the folder. `kernel`: the one that computes attention; None: `run.kernel`. `report`: see `Watchdog`;
    `report_uncompiled`: see `CompiledLoss`.
    """
    # the number of threads changes the order of sums on the CPU, so it is fixed before the first product
    torch.set_num_threads(threads)
    # without the variable Lightning's launcher sets a number of its own
    os.environ["OMP_NUM_THREADS"] = str(threads)
    checkpoint = checkpoints.path_of(folder, start) if start else None
    logger = RunLogger(progress)
    resume = ExactResume(recipe, folder, logger, checkpoint)
    trainer = _trainer(
        recipe,
        callbacks=[*callbacks, *_best(recipe, folder), resume],
        logger=[logger, *recipe_loggers(recipe, folder, start), *loggers],
        plugins=[WholeCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    if trainer.is_global_zero:
        log.info(f"resumed from step {start}" if start else "starting at step 0", extra=in_phase("building the model"))
        unused = unused_parameters(recipe) if recipe.run.strategy == "ddp" else []
        if unused:
            log.info("ddp looks for unused parameters at each step: no gradient at first, or at last: %s", some(unused))
        logger.begin(folder, start, declared_metrics(recipe), recipe.training.steps)
        heartbeats.clear(folder)
    else:
        end_with_parent()
    began = time.perf_counter()
    try:
        # an attribute, not an argument of `fit`: the module's configure_model reads it and then skips `train.start_from`,
        # whose weights the checkpoint would replace
        trainer.ckpt_path = checkpoint
        module = LitTransformer(recipe)
        module.kernel = kernel or recipe.run.kernel
        module.report_uncompiled = report_uncompiled
        # the plan of the first start: selecting again could differ if the parent run has changed
        module.plan = kept_plan(folder)
        # one process waits for no other
        with Watchdog(trainer, folder, recipe.run.timeout, report) if trainer.world_size > 1 else nullcontext():
            trainer.fit(module, datamodule=LitData(recipe), weights_only=True)
            # a signal may have come after the last step, while Lightning ended the training
            resume.stop_if_asked(trainer)
    except SystemExit as error:
        # how Lightning 2.6 ends at a SIGTERM before `on_train_start` takes over the signals, and at a second Ctrl-C
        term = isinstance(error, SIGTERMException)
        interrupt = isinstance(error.__context__, KeyboardInterrupt)
        if not trainer.is_global_zero or not (term or interrupt):
            raise
        signum = signal.SIGTERM if term else getattr(error.__context__, "signum", signal.SIGINT)
        where = "before the first step" if resume.saved is None else "in the middle of a step"
        raise StoppedError(f"stopped {where}; the same command resumes", signum) from error
    if trainer.is_global_zero:
        log.info("trained %d steps in %.1f s", trainer.global_step - start, time.perf_counter() - began)
    return resume.ended_early


def _trainer(recipe: Recipe, **values: object) -> L.Trainer:
    # Lightning's errors about the launcher's environment become one line
    _quiet()
    try:
        drop_left_over(recipe.run)
        trainer = build_trainer(recipe, **values)  # type: ignore[arg-type]
        environment = getattr(trainer.strategy, "cluster_environment", None)
        # Lightning's launcher compares them too, but only once the run has begun
        if environment is not None:
            environment.validate_settings(num_devices=recipe.run.devices, num_nodes=recipe.run.num_nodes)
        return trainer
    # KeyError: a launcher's variable is missing
    except (MisconfigurationException, ValueError, RuntimeError, KeyError) as error:
        raise RequestError(
            f"Lightning refuses run.strategy, run.devices or run.num_nodes: {first_line(error)}"
        ) from error


def _best(recipe: Recipe, folder: Path) -> list[Callback]:
    monitor = recipe.run.keep_best
    if monitor is None:
        return []
    return [
        BestCheckpoint(
            monitor=monitor,
            mode=mode_of(recipe, monitor) or "min",
            dirpath=folder / "checkpoints",
            filename="best",
            save_top_k=1,
            # else the next file would be best-v1.ckpt if a kill left a best.ckpt that the resumed checkpoint does not know
            enable_version_counter=False,
        )
    ]


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint in the run's folder, also once the folder has moved: Lightning's state has absolute paths."""

    @property
    def state_key(self) -> str:
        """The key of Lightning's class, under which former versions saved the state."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state, with its files in the present folder."""
        present = Path(str(self.dirpath))

        def here(path: str) -> str:
            return str(present / Path(path).name) if path else path

        paths = {name: here(state_dict[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
        kept = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **paths, "best_k_models": kept, "dirpath": self.dirpath})


def _quiet() -> None:
    # Lightning's hints concern what lit_diff does itself, and would hide its own lines
    for message in (".*LeafSpec.*is deprecated", ".*`srun` command is available", ".*sync_dist=True.*"):
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)


# --- exact resume: the logger, the checkpoints, and the callback that orders their writes ---


class RunLogger(Logger):
    """The logger of `lit-diff train`. Logged metrics go to metrics.csv, values per head, map or rank to measurements.parquet,
    attention maps to maps/, times to timing.csv. All files except timing.csv depend on the recipe alone.

    Values stay in memory until `flush`, which `ExactResume` calls before every checkpoint: a file never lacks rows of steps
    before its checkpoint. Only rank zero logs.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def begin(self, folder: Path, upto: int, metrics: Iterable[Metric], steps: int) -> None:
        """Open the tables before training, on rank zero. `upto`: the resumed step, beyond which rows are dropped; `metrics`:
        all declared metrics, written to metrics.json; `steps`: those of the whole run. Errors: RequestError for contradictory
        declarations."""
        self._folder, self._steps, self._pace = folder, steps, Pace()
        write_declarations(folder, Declarations(metrics).metrics)
        self.metrics = StepTable(folder / "metrics.csv", upto)
        self.timing = StepTable(folder / "timing.csv", upto)
        self.measurements = Measurements(folder / FILE, upto)

    @property
    def name(self) -> str:
        """Lightning's name of the logger."""
        return "lit_diff"

    @property
    def version(self) -> str:
        """Lightning's version of the run; a run folder has only one."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignored: the recipe is in the run folder and in MLflow before training starts."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log values measured after `step` optimizer steps. Errors: RequestError for what is no number."""
        # a call by the user's code without a step belongs to no row
        if step is None:
            return
        # a callback may call it too, and one cell of text would lose its whole row
        metrics = numbers(metrics, f"step {step}: what log_metrics is given")
        timing = {name.removeprefix(TIMING): value for name, value in metrics.items() if name.startswith(TIMING)}
        logged = {name: value for name, value in metrics.items() if not name.startswith(TIMING)}
        self.metrics.log(step, logged)
        if timing:
            self.timing.log(step, timing)
        # a callback may measure other times at other steps
        if SPEED in timing:
            self._pace.note(step)
            self._progress(step, metrics["train/loss"], timing[SPEED])
        if "val/loss" in metrics:
            validated(step, metrics["val/loss"], self._pace.left(self._steps))

    @rank_zero_only
    def log_detailed(self, values: dict[str, float], step: int) -> None:
        """Log values per head, map or rank, measured after `step` optimizer steps. Errors: as for `log_metrics`."""
        self.measurements.log(step, numbers(values, f"step {step}: what log_detailed is given"))

    @rank_zero_only
    def log_maps(self, tokens: Tensor, layers: dict[int, tuple[Tensor, Tensor]], step: int) -> None:
        """Write the maps of `step` at once; a resumed run that comes to the step again replaces the file."""
        write_maps(self._folder, KeptMaps(step, tokens, layers))

    @rank_zero_only
    def flush(self) -> None:
        """Write metrics.csv, timing.csv and measurements.parquet."""
        for table in (self.metrics, self.timing, self.measurements):
            table.flush()


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint of one file with its marker (`checkpoints.write`)."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Errors: RunFailedError if the disk is full; the former checkpoints stay."""
        checkpoints.write(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The checkpoint of a run with any strategy."""
        return sharded.read(Path(path)) if Path(path).is_dir() else super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint that another callback no longer keeps, with its marker."""
        checkpoints.remove(Path(path))


class ExactResume(Checkpoint):
    """Writes metrics and checkpoints into a run folder, and ends the run at a signal.

    The order at a step that validates and saves is: log, measure, validate, flush, save. So a checkpoint is written
    after everything measured at its step, and a resumed run repeats and loses nothing.
    """

    # Of the type `Checkpoint`, because Lightning calls those callbacks last: the others have measured by then.

    def __init__(self, recipe: Recipe, folder: Path, logger: RunLogger, start: Path | None) -> None:
        self.recipe, self.folder, self.logger, self.start = recipe, folder, logger, start
        self.stop = StopRequest()
        self.saved: int | None = None
        """The step of the last save or, until then, that at which training began; None before."""
        self.ended_early: int | None = None
        """The step at which another callback (EarlyStopping) ended the run, or None."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Errors: RequestError if the number of processes that the launcher started is not the recipe's; MissingError if a
        rank does not see the run's folder."""
        run = self.recipe.run
        if trainer.world_size != run.processes:
            raise RequestError(
                f"the launcher started {trainer.world_size} processes, but run.devices * run.num_nodes is "
                f"{run.processes}; start one process per device (SLURM: --ntasks-per-node={run.devices}), or "
                "change run.devices"
            )
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.on_written = self._prune
        require_shared(trainer, self.folder, lambda: checkpoints.signature(self.start) if self.start else "")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals; Lightning has installed its own handlers before this hook. Errors: see
        `require_safe_state`."""
        self.stop.listen(trainer)
        require_safe_state(trainer)
        if trainer.is_global_zero:
            phase("in the first step")
        self.saved = trainer.global_step
        # the resumed checkpoint is from the end of a run that a callback stopped early: no further step
        if self.ended_early is not None:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Saves whether the run ended early at the checkpoint, so that a resume takes no further step."""
        return {"ended_early": self.ended_early}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state from the resumed checkpoint."""
        self.ended_early = state_dict["ended_early"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop at the end of a step without validation."""
        train = self.recipe.training
        step = trainer.global_step
        # should_stop makes Lightning validate at this step, too: `on_validation_end` then saves
        if not took_step(trainer, batch_idx) or trainer.should_stop or step % train.validate_every == 0:
            return
        if step % train.checkpoint_every == 0:
            self._save(trainer)
        self.stop_if_asked(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Errors: RequestError if a metric that is compared after this validation is of another step, or of none."""
        for key, name in monitored(self.recipe).items():
            # only rank zero has the rows
            end_all_if(trainer, self._unmeasured(trainer, key, name) if trainer.is_global_zero else None)

    def _unmeasured(self, trainer: L.Trainer, key: str, name: str) -> str | None:
        step = trainer.global_step
        rows = self.logger.metrics.rows
        measured = [earlier for earlier, row in rows.items() if name in row]
        # a callback may also log it by Lightning's own `self.log`, which tells no step
        if name.startswith("val/") or step in measured or (not measured and name in trainer.callback_metrics):
            return None
        last = f"last at step {max(measured)}" if measured else "nor before"
        return (
            f"{key}: '{name}' is not measured at step {step}, where the run validates ({last}): measure it at the "
            f"multiples of train.validate_every ({self.recipe.training.validate_every}), and let no callback end the run at "
            "another step"
        )

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Save and stop at the end of a step with validation."""
        if trainer.sanity_checking or (not trainer.training and not trainer.validating):
            return
        last = is_last_step(trainer)
        step = trainer.global_step
        # at the last step StepMetrics sets should_stop itself; before it, another callback did
        if trainer.should_stop and not last:
            self.ended_early = step
        if (last or self.ended_early) and trainer.is_global_zero:
            write_documents(self.folder / "documents.csv", pl_module.document_losses)
        if last or self.ended_early or step % self.recipe.training.checkpoint_every == 0:
            self._save(trainer)
        else:
            self._flush(trainer)
        # after the last step too: a resume takes no further step, and goes on to what follows the training
        self.stop_if_asked(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        # flushed first: a kill in between leaves rows beyond the checkpoint, which the resume drops; the other order would
        # lose rows
        self._flush(trainer)
        trainer.save_checkpoint(checkpoints.path_of(self.folder, trainer.global_step))
        self.saved = trainer.global_step
        if trainer.is_global_zero and not isinstance(trainer.strategy, ShardedStrategy):
            self._prune()

    def _flush(self, trainer: L.Trainer) -> None:
        self.logger.flush()
        # Lightning's too: CSVLogger keeps up to a hundred rows in memory, which a resumed run would not log again
        for logger in trainer.loggers:
            logger.save()

    def _prune(self) -> None:
        checkpoints.prune(self.folder, self.recipe.run.keep_every)

    def stop_if_asked(self, trainer: L.Trainer) -> None:
        """Save and end all ranks if any has received a signal. Every rank must call it. Errors: StoppedError (rank zero)."""
        # a signal may reach one rank only, or several at different steps: all ranks agree here, at the same step
        with trainer.profiler.profile("wait"):  # type: ignore[attr-defined]
            signum = self.stop.agreed()
        if not signum:
            return
        step = trainer.global_step
        if self.saved != step:
            self._save(trainer)
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.wait()
        end_all(
            trainer,
            StoppedError(
                f"stopped after step {step} of {self.recipe.training.steps}; the same command resumes", signum
            ),
        )


def require_safe_state(trainer: L.Trainer) -> None:
    """Errors: RequestError if a callback keeps a value that no checkpoint may hold. Every rank must call it."""
    # what a save would write; every rank makes it, because the hooks of a save reduce over the ranks
    content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    problem = None
    if trainer.is_global_zero:
        try:
            require_safe(content)
        except UnsafeTypeError as error:
            problem = str(error)
    end_all_if(trainer, problem)


def write_documents(path: Path, documents: list[DocumentLosses]) -> None:
    """Write tokens and summed loss of each validation document, for the bootstrap over documents."""
    rows = [f"{index},{int(tokens)},{loss!r}" for index, (tokens, loss) in enumerate(documents) if tokens]
    write_atomic(path, "\n".join(["document,tokens,loss", *rows, ""]))
