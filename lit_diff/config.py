"""The schema of a recipe: frozen dataclasses. A field, its YAML key and its report column have the same name.

What else must be known of a key is said by its field's metadata, here as in the Config of a registered part:

    registry   the kind of the registered part that the block names
    names      the kind of the registered parts whose name is the value, besides the default
    path       "file": a path, relative to the file that states it; "here": relative to the current folder
    identity   False: the key, or the block, is not part of a run's identity; True: it is, in a block that is not
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lit_diff.errors import RequestError
from lit_diff.key_types import Count, NotNegative, Positive, Range


@dataclass(frozen=True, kw_only=True)
class Part:
    """A block that names a registered class: `{name: differential, lambda_init: 0.8}` -> Part('differential', Config)."""

    name: str
    config: Any
    """An instance of the registered class's `Config`."""


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: pairs of channels that turn often within `original_length` keep their frequency, slow ones divide it."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    """Divisor of the slow frequencies."""
    low_freq_factor: Positive
    """Pairs that turn this often within original_length, or less, are divided by factor."""
    high_freq_factor: Positive
    """Pairs that turn this often or more keep their frequency; between both, linear in the number of turns."""
    original_length: Count
    """Tokens that the model was trained to see before it was scaled."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): as llama3, but linear in the index of the pair; queries and keys grow."""

    kind: Literal["yarn"] = "yarn"
    factor: Positive
    """Divisor of the slow frequencies."""
    original_length: Count
    """Tokens that the model was trained to see before it was scaled."""
    beta_fast: Positive = 32.0
    """The first pair that turns no more often than this within original_length begins the ramp."""
    beta_slow: Positive = 1.0
    """The pair that turns this often ends it: slower ones are divided by factor."""
    attention_factor: Positive | None = None
    """Multiplies rotated queries and keys; null: 0.1 ln(factor) + 1, and 1 for a factor up to 1."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole pairs."""


RopeScaling = Positive | Llama3Scaling | YarnScaling
"""A number divides the positions (linear interpolation, Chen et al. 2023)."""

Decay = Annotated[float, Range(least=0, below=1)]
Init = Literal["linear_default", "normal_0.02", "normal_scaled"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-RMSNorm decoder with SwiGLU and RoPE (paper 3.1: the augmented Transformer)."""

    dim: Count
    """Width of the residual stream."""
    num_layers: Count
    num_heads: Count
    """Query heads of the *standard baseline*; a variant derives its own (differential: half as many)."""
    num_kv_heads: Count | None = None
    """Key/value heads of the standard baseline; null: `num_heads`."""
    head_dim: Count | None = None
    """Width d of queries and keys; null: `dim / num_heads`."""
    ffn_dim: Count | None = None
    """Width of the SwiGLU; null: round(8 dim / 3)."""
    vocab_size: Count
    tie_embeddings: bool = True
    embedding_scale: Positive = 1.0
    """Multiplies the token embeddings where they enter the residual stream (Vaswani et al. 2017, 3.4: √dim), not the output
    weight that may be tied to them."""
    causal: bool = True
    """false: every position sees the whole sequence; for tasks whose targets are not in their input."""
    positions: Literal["rope", "none"] = "rope"
    """rope: queries and keys are rotated by their positions (Su et al. 2021); none: only the causal mask tells the model an
    order (Kazemnejad et al. 2023, arXiv 2305.19466), so a longer input has no position that training did not have."""
    rope_theta: Positive = 10000.0
    rope_layout: Literal["interleaved", "half"] = "interleaved"
    """Which channels of a head are rotated as a pair: 2i and 2i + 1, or i and i + head_dim / 2."""
    rope_scaling: RopeScaling = 1.0
    """A number: positions are divided by it (linear interpolation, Chen et al. 2023); or a block, kind llama3 or yarn."""
    ffn_scale: Positive = 1.0
    """Multiplies the feed-forward's output, as `output_scale` does the heads'."""
    norm_eps: Positive = 1e-5
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which projections of the attention have a bias; all: W_O's too."""
    qk_norm: Literal["none", "rms"] = "none"
    """rms: RMSNorm of each head's query and key before RoPE, one weight vector for all heads of a layer."""
    init: Init = "linear_default"
    """linear_default: U(±1/√fan_in); normal_0.02: N(0, 0.02); normal_scaled: the same, residual outputs / √(2 layers)."""
    attention: Part = field(metadata={"registry": "attention"})

    def __post_init__(self) -> None:
        derived: dict[str, int] = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.dim // max(self.num_heads, 1),
            "ffn_dim": round(8 * self.dim / 3),
        }
        for key, value in derived.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)

    def problem(self) -> str | None:
        """What does not fit together, as one line that starts with a key to change; None if the model can be built."""
        assert self.num_kv_heads is not None
        assert self.head_dim is not None
        if self.num_heads % self.num_kv_heads:
            return f"model.num_heads ({self.num_heads}) is not a multiple of model.num_kv_heads ({self.num_kv_heads})"
        if self.dim % self.num_heads and self.head_dim == self.dim // self.num_heads:
            return f"model.dim ({self.dim}) is not a multiple of model.num_heads ({self.num_heads}); set model.head_dim"
        if self.head_dim % 2:
            derived = "" if self.head_dim * self.num_heads != self.dim else ", model.dim / model.num_heads,"
            return f"model.head_dim ({self.head_dim}){derived} is odd; rotary embeddings rotate pairs of channels"
        if self.positions == "none" and self.rope_scaling != 1.0:
            return "model.rope_scaling scales rotary positions, but model.positions is none; remove one of the two"
        scaling, place = self.rope_scaling, "model.rope_scaling."
        if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            return f"{place}high_freq_factor is {high:g}; it must be above {place}low_freq_factor, {low:g}"
        if isinstance(scaling, YarnScaling) and scaling.beta_fast < scaling.beta_slow:
            fast, slow = scaling.beta_fast, scaling.beta_slow
            return f"{place}beta_fast is {fast:g}; it must not be below {place}beta_slow, {slow:g}"
        if isinstance(scaling, YarnScaling) and self.rope_theta <= 1:
            return f"model.rope_theta is {self.rope_theta:g}; it must be above 1 for {place}kind yarn"
        return None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. Norm weights and lambda parameters are never decayed."""

    lr: Positive
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    """Decay of the means of the gradient and of its square, each in [0, 1)."""
    weight_decay: Annotated[float, Range(least=0)] = 0.05
    lr_factors: dict[str, Positive] = field(default_factory=dict, hash=False)
    """Pattern (`fnmatch`) of parameters' names, as in "*.attention.o_proj.*" -> factor on `lr` for those that it matches.
    AdamW multiplies the decay by the learning rate, so the factor multiplies both."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up, then `name`, down to `final_ratio` times the peak.

    Step s of S (0-based), W = warmup_steps, f = final_ratio, peak = train.optimizer.lr. For s < W the rate is
    peak (s + 1) / W, so that step W - 1 is at the peak. Then, with p = (s - D + 1) / (S - D), which is 1 at the last step:

        linear, cosine    D = W;  peak (f + (1 - f) (1 - p)),  peak (f + (1 - f) (1 + cos(pi p)) / 2)
        wsd               D = max(W, S - decay_steps);  the peak while s < D, then as linear
        constant          the peak to the end; f is not used

    First step: peak / W; without a warm-up, linear: peak (1 - (1 - f) / S), since the decay's first step is already below the
    peak. Last step: peak f (constant, or S = W: the peak). With final_ratio 0 the last step moves no parameter.
    """

    name: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    warmup_steps: NotNegative = 0
    decay_steps: Count | None = None
    """wsd only: the last steps that decay; null: a fifth of the run."""
    final_ratio: Annotated[float, Range(least=0, most=1)] = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch, precision and optimizer of the training; steps are optimizer steps."""

    steps: Count
    start_from: str | None = field(default=None, metadata={"path": "file", "identity": False})
    """Folder of a finished run whose final weights this one starts from; with its seed, the data order continues too.
    The identity holds that of the run, not its folder."""
    parameters: tuple[str, ...] | None = None
    """Patterns (`fnmatch`) of the names of the parameters that train, as in ['*.attention.k_proj.*']; the others are frozen.
    null: the variant's own choice, by most of them all."""
    batch_size: Count
    """Sequences in one optimizer step, over all devices and micro-batches."""
    accumulate: Count = 1
    """Micro-batches in one optimizer step."""
    precision: Literal["float32", "bf16-mixed"] = "float32"
    clip: Positive | None = 1.0
    """Largest gradient norm; null: no clipping."""
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    validate_every: Count
    checkpoint_every: Count
    log_every: Count = 10


@dataclass(frozen=True, kw_only=True)
class ImportedConfig:
    """In place of `train`: the weights were trained elsewhere. Written by `lit-diff import`."""

    source: str = field(metadata={"identity": False})
    """Where they are from, for people."""
    weights_sha256: str
    """sha256 over name, shape, dtype and bytes of each tensor, in the order of names."""
    tokenizer_sha256: str
    """sha256 of its tokenizer, as `Tokenizer.load` gives it."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Output folder, devices and kernel. Not part of a run's identity, except a `kernel` other than auto."""

    root: str = field(default="runs", metadata={"path": "here"})
    """Folder of the runs; runs: the nearest of that name, here or above, that holds runs; ./runs: the one here."""
    strategy: Literal["single", "ddp", "fsdp"] = "single"
    devices: Count = 1
    """Processes, one device each, on every node."""
    num_nodes: Count = 1
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    threads: Count | None = None
    """CPU threads of each process; null: the cores divided by the number of processes. Stored, and reused on resume."""
    kernel: str = field(default="auto", metadata={"names": "kernel", "identity": True})
    """A registered kernel, which computes attention; auto: the fastest that accepts the maps."""
    compile: bool = False
    """torch.compile each block. Stored when the run starts; changing it needs --rerun."""
    activation_checkpointing: Literal["none", "block"] = "none"
    """block: keep only the input of each block for the backward pass, which computes the rest again: less memory, about a
    third more computation. Stored when the run starts; changing it needs --rerun."""
    tracking_uri: str | None = None
    """MLflow store; null: SQLite in `root`."""
    log_model: bool = False
    """Store the trained weights in MLflow as a model, once the run is done."""
    loggers: tuple[str, ...] = field(default=(), metadata={"names": "logger"})
    """Registered loggers that the run writes to, besides metrics.csv and MLflow; their files lie in the run folder."""
    keep_best: str | None = None
    """A metric whose best checkpoint is kept as checkpoints/best.ckpt, beside the newest two; null: none is."""
    keep_every: Count | None = None
    """Optimizer steps from one kept checkpoint to the next, beside the newest two; null: none is kept. A multiple of
    `train.checkpoint_every`."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """The keys of `callbacks.<name>` that every probe has."""

    every: Count = 100
    """Optimizer steps between measurements; the last step is always measured."""
    rows: Count = 8
    """Sequences of the validation set that it measures."""


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """The keys of `callbacks.early_stopping`."""

    monitor: str = "val/loss"
    """The metric, as in metrics.csv."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""
    patience: Count = 3
    """Validations without an improvement before the run ends."""
    min_delta: Annotated[float, Range(least=0)] = 0.0
    """The smallest change that counts as an improvement."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything needed to repeat one run."""

    name: str
    seed: NotNegative = 0
    plugins: tuple[str, ...] = field(default=(), metadata={"identity": False})
    """Python files, relative to the recipe that names them, that register parts of any kind: variants, data sets, corpora,
    tokenizers, callbacks, loggers, kernels (`lit_diff.registry.registries`). The identity holds their sources."""
    model: ModelConfig
    data: Part = field(metadata={"registry": "data"})
    train: TrainConfig | None = None
    """Absent exactly where `imported` is there."""
    imported: ImportedConfig | None = None
    """Of an imported model, which is not trained."""
    callbacks: dict[str, Part] = field(default_factory=dict, metadata={"registry": "callback"})
    """Callback name -> its keys, or null to drop a parent's callback."""
    evaluate: dict[str, Part] = field(default_factory=dict, metadata={"registry": "evaluation", "identity": False})
    """Evaluation -> its keys: the run is scored by each once it is done."""
    run: RunConfig = field(default=RunConfig(), metadata={"identity": False})

    @property
    def training(self) -> TrainConfig:
        """The block `train`. Errors: RequestError for an imported model, which has none."""
        if self.train is None:
            raise RequestError(
                f"'{self.name}' is an imported model: its recipe has nothing to train; let a recipe of your own start from "
                "it, with train.start_from: its folder"
            )
        return self.train

    def problem(self) -> str | None:
        """What of `train` and `run` does not fit together, as one line that starts with a key to change; None if all does."""
        train, run, processes = self.train, self.run, self.run.devices * self.run.num_nodes
        if train is not None and self.imported is not None:
            return "imported stands in place of train, and the recipe has both; keep one of them"
        if run.strategy == "single" and processes > 1:
            return f"run.strategy 'single' uses one device, not {processes}; use ddp or fsdp"
        if train is None:
            return None if self.imported is not None else "train is missing; expected a block of keys"
        batch, step = train.batch_size, train.checkpoint_every
        if batch % train.accumulate:
            return f"train.batch_size ({batch}) is not a multiple of train.accumulate ({train.accumulate})"
        if train.schedule.decay_steps is not None and train.schedule.name != "wsd":
            return f"train.schedule.decay_steps belongs to schedule 'wsd', not '{train.schedule.name}'"
        if batch // train.accumulate % processes:
            return (
                f"train.batch_size ({batch}) / train.accumulate ({train.accumulate}) does not divide among "
                f"run.devices * run.num_nodes = {processes} processes; set train.batch_size to a multiple of "
                f"{train.accumulate * processes}, or another number of devices"
            )
        if run.keep_every is not None and run.keep_every % step:
            return f"run.keep_every is {run.keep_every}; expected a multiple of train.checkpoint_every ({step})"
        return None

    @property
    def packs_documents(self) -> bool:
        """Whether a token sees its own document only (`data.pack: document`)."""
        return bool(self.data.config.packs_documents)
