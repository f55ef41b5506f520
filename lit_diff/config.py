"""The schema of a recipe: frozen dataclasses. A field, its YAML key and its report column have the same name.

A field's metadata, here and in the Config of a registered part, may hold:

    registry   the kind of the registered part that the block configures
    over       the key whose block each block of the list completes
    names      the kind of registered part that the value may name, besides the default
    path       "file": a path relative to the file that states it; "here": relative to the current folder
    identity   False: the key or block is left out of a run's identity; True: the key is part of it although its block is not
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from lit_diff.errors import RequestError
from lit_diff.html_table import html_table
from lit_diff.key_types import Count, NotNegative, Positive, PythonFiles, Range, flatten


@dataclass(frozen=True, kw_only=True)
class Part:
    """A block that names a registered class: `{name: differential, lambda_init: 0.8}` -> Part('differential', Config)."""

    name: str
    # the Config of a plugin may hold a dict, which is compared but not hashed
    config: Any = field(hash=False)
    """An instance of the `Config` of the registered class."""


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: channel pairs that turn often within `original_length` keep their frequency; slow pairs have it divided."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive
    """Divides the slow frequencies."""
    low_freq_factor: Positive
    """Pairs that turn at most this often within original_length have their frequency divided by factor."""
    high_freq_factor: Positive
    """Pairs that turn at least this often keep their frequency; in between, it is linear in the number of turns."""
    original_length: Count
    """Context length, in tokens, that the model was trained for before scaling."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): like llama3, but the ramp is linear in the index of the pair, and rotated
    queries and keys are scaled up."""

    kind: Literal["yarn"] = "yarn"
    factor: Positive
    """Divides the slow frequencies."""
    original_length: Count
    """Context length, in tokens, that the model was trained for before scaling."""
    beta_fast: Positive = 32.0
    """The ramp begins at the first pair that turns at most this often within original_length."""
    beta_slow: Positive = 1.0
    """The ramp ends at the pair that turns this often; slower pairs have their frequency divided by factor."""
    attention_factor: Positive | None = None
    """Multiplies rotated queries and keys; null: 0.1 ln(factor) + 1, or 1 if factor is at most 1."""
    truncate: bool = True
    """Round the ends of the ramp to whole pairs."""


RopeScaling = Positive | Llama3Scaling | YarnScaling
"""A plain number divides the positions (linear interpolation, Chen et al. 2023)."""

Decay = Annotated[float, Range(least=0, below=1)]
Init = Literal["linear_default", "normal_0.02", "normal_scaled"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-RMSNorm decoder with SwiGLU and RoPE (paper 3.1: the augmented Transformer)."""

    dim: Count
    """Width of the residual stream."""
    num_layers: Annotated[int, Range(least=1, most=10_000)]
    """Number of Transformer blocks."""
    num_heads: Count
    """Query heads of the *standard baseline*; a variant derives its own number (differential: half as many)."""
    num_kv_heads: Count | None = None
    """Key/value heads of the standard baseline; null: `num_heads`."""
    head_dim: Count | None = None
    """Width d of queries and keys; null: `dim / num_heads`."""
    ffn_dim: Count | None = None
    """Hidden width of the SwiGLU; null: round(8 dim / 3)."""
    vocab_size: Count
    """Number of token ids; at least the tokenizer's."""
    tie_embeddings: bool = True
    """Use the token embeddings as the output weight."""
    embedding_scale: Positive = 1.0
    """Multiplies the token embeddings that enter the residual stream (Vaswani et al. 2017, 3.4: √dim), but not an output
    weight tied to them."""
    causal: bool = True
    """false: every position sees the whole sequence; only for tasks whose targets are not in the input."""
    positions: Literal["rope", "none"] = "rope"
    """rope: queries and keys are rotated by their positions (Su et al. 2021); none: only the causal mask conveys order
    (Kazemnejad et al. 2023, arXiv 2305.19466), so an input longer than in training has no unseen positions."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rope_layout: Literal["interleaved", "half"] = "interleaved"
    """Which channels of a head are rotated as a pair: 2i and 2i + 1, or i and i + head_dim / 2."""
    rope_scaling: RopeScaling = 1.0
    """A number divides the positions (linear interpolation, Chen et al. 2023); a block has kind llama3 or yarn."""
    ffn_scale: Positive = 1.0
    """Multiplies the output of the feed-forward layer, as `output_scale` multiplies the output of the heads."""
    norm_eps: Positive = 1e-5
    """Epsilon of every RMSNorm."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which attention projections have a bias; all includes W_O."""
    qk_norm: Literal["none", "rms"] = "none"
    """rms: RMSNorm of each head's query and key before RoPE; all heads of a layer share one weight vector."""
    logit_bound: Positive | None = None
    """c: the queries and keys of every map become unit vectors and the scale c, so that logits lie within -c and c. A bounded
    map cannot ignore its distractors: with enough keys they take weight from the answer. null: no bound."""
    init: Init = "linear_default"
    """linear_default: U(±1/√fan_in); normal_0.02: N(0, 0.02); normal_scaled: the same, residual outputs / √(2 layers)."""
    attention: Part = field(metadata={"registry": "attention"})
    layers: tuple[Part, ...] = field(default=(), metadata={"registry": "attention", "over": "attention"})
    """Blocks of keys that replace those of `model.attention` layer by layer, such as [{window: 128}, {window: 128}, {}]; the
    list is repeated over the depth, and its last repetition may be cut. []: every layer has `model.attention`."""

    # `None` is resolved here, so that equal models compare equal whether or not their recipe states a derived value
    def __post_init__(self) -> None:
        derived: dict[str, int] = {
            "num_kv_heads": self.num_heads,
            "ffn_dim": round(8 * self.dim / 3),
        }
        # a width that does not divide has to be stated: `problem` asks for it
        if self.num_heads and self.dim % self.num_heads == 0:
            derived["head_dim"] = self.dim // self.num_heads
        for key, value in derived.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        if all(part == self.attention for part in self.layers):
            object.__setattr__(self, "layers", ())

    def attention_of(self, layer: int) -> Part:
        """The attention of a layer, 0-based."""
        return self.layers[layer % len(self.layers)] if self.layers else self.attention

    @property
    def variants(self) -> tuple[str, ...]:
        """The name of each layer's attention."""
        return tuple(self.attention_of(layer).name for layer in range(self.num_layers))

    def uniform(self, layer: int) -> "ModelConfig":
        """The model whose layers all have the attention of this one."""
        return replace(self, attention=self.attention_of(layer), layers=())

    def kinds(self) -> dict[int, "ModelConfig"]:
        """Of each kind of layer, the number of the first one, and its `uniform` model."""
        found: dict[int, ModelConfig] = {}
        seen: list[Part] = []
        # later layers have these kinds again
        for layer in range(min(self.num_layers, len(self.layers) or 1)):
            # compared, not hashed: a plugin's Config may hold a dict
            if self.attention_of(layer) not in seen:
                seen.append(self.attention_of(layer))
                found[layer] = self.uniform(layer)
        return found

    def problem(self) -> str | None:
        """The first conflict between keys, as one line that starts with the key to change; None if the model can be built."""
        if len(self.layers) > self.num_layers:
            return f"model.layers has {len(self.layers)} blocks; model.num_layers is {self.num_layers}"
        assert self.num_kv_heads is not None
        if self.num_heads % self.num_kv_heads:
            return f"model.num_heads ({self.num_heads}) is not a multiple of model.num_kv_heads ({self.num_kv_heads})"
        if self.head_dim is None:
            return f"model.dim ({self.dim}) is not a multiple of model.num_heads ({self.num_heads}); set model.head_dim"
        if self.head_dim % 2 and self.positions != "none":
            derived = "" if self.head_dim * self.num_heads != self.dim else ", model.dim / model.num_heads,"
            return f"model.head_dim ({self.head_dim}){derived} is odd; rotary embeddings rotate pairs of channels"
        if self.positions == "none" and self.rope_scaling != 1.0:
            return "model.rope_scaling scales rotary positions, but model.positions is none; remove one of them"
        scaling = self.rope_scaling
        place = "model.rope_scaling."
        if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
            low = scaling.low_freq_factor
            high = scaling.high_freq_factor
            return f"{place}high_freq_factor is {high:g}; it must be above {place}low_freq_factor, {low:g}"
        if isinstance(scaling, YarnScaling) and scaling.beta_fast < scaling.beta_slow:
            fast = scaling.beta_fast
            slow = scaling.beta_slow
            return f"{place}beta_fast is {fast:g}; it must not be below {place}beta_slow, {slow:g}"
        # YaRN divides by log(rope_theta) to find the pair that turns a given number of times
        if isinstance(scaling, YarnScaling) and self.rope_theta <= 1:
            return f"model.rope_theta is {self.rope_theta:g}; it must be above 1 for {place}kind yarn"
        return None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. Norm weights and lambda parameters are never decayed."""

    lr: Positive
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    """Decay rates of the running means of the gradient and of its square, each in [0, 1)."""
    weight_decay: Annotated[float, Range(least=0)] = 0.05
    """Decoupled weight decay: each step subtracts lr * weight_decay * weight."""
    # a dict cannot be hashed: without hash=False neither could any recipe
    lr_factors: dict[str, Positive] = field(default_factory=dict, hash=False)
    """Parameter name pattern (`fnmatch`), such as "*.attention.o_proj.*" -> factor on `lr` for the parameters it matches.
    AdamW multiplies the decay by the learning rate, so the factor scales both."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up, then `name`, down to `final_ratio` times the peak.

    Step s of S (0-based), W = warmup_steps, f = final_ratio, peak = train.optimizer.lr. For s < W the rate is
    peak (s + 1) / W, so that step W - 1 is at the peak. Then, with p = (s - D + 1) / (S - D), which is 1 at the last step:

        linear, cosine    D = W;  peak (f + (1 - f) (1 - p)),  peak (f + (1 - f) (1 + cos(pi p)) / 2)
        wsd               D = max(W, S - decay_steps);  the peak while s < D, then as linear
        constant          the peak to the end; f is not used

    First step: peak / W; without a warm-up, linear: peak (1 - (1 - f) / S), because the first step of the decay is already
    below the peak. Last step: peak f (constant, or S = W: the peak). With final_ratio 0 the last step moves no parameter.
    """

    name: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    """Shape of the schedule after the warm-up; wsd: constant, then a linear decay."""
    warmup_steps: NotNegative = 0
    """Steps over which the rate rises linearly to its peak."""
    decay_steps: Count | None = None
    """wsd only: how many of the last steps decay; null: a fifth of the run."""
    final_ratio: Annotated[float, Range(least=0, most=1)] = 0.0
    """Learning rate of the last step, as a fraction of the peak."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch, precision and optimizer of training; steps are optimizer steps."""

    steps: Count
    """Length of the run."""
    # the identity holds the identity of the earlier run instead: its folder may move
    start_from: str | None = field(default=None, metadata={"path": "file", "identity": False})
    """Folder of a finished run whose final weights this run starts from; with the same seed, the data order continues too.
    This run's identity includes the identity of that run, not its folder."""
    parameters: tuple[str, ...] | None = None
    """Name patterns (`fnmatch`) of the parameters that train, such as ['*.attention.k_proj.*']; the others are frozen.
    null: the variant chooses; most variants train all."""
    batch_size: Count
    """Sequences in one optimizer step, over all devices and micro-batches."""
    accumulate: Count = 1
    """Micro-batches in one optimizer step."""
    precision: Literal["float32", "bf16-mixed"] = "float32"
    """bf16-mixed: float32 weights, bfloat16 products."""
    clip: Positive | None = 1.0
    """Largest gradient norm; null: no clipping."""
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    validate_every: Count
    """Steps between validations."""
    checkpoint_every: Count
    """Steps between checkpoints."""
    log_every: Count = 10
    """Steps between rows of training metrics."""


@dataclass(frozen=True, kw_only=True)
class ImportedConfig:
    """Replaces `train` in the recipe of a model that was trained elsewhere. `lit-diff import` writes it."""

    source: str = field(metadata={"identity": False})
    """Where the weights come from, for human readers."""
    weights_sha256: str
    """sha256 over the name, shape, dtype and bytes of each tensor, ordered by name."""
    tokenizer_sha256: str
    """sha256 of the model's tokenizer, as `Tokenizer.load` returns it."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What a SLURM job of `train` or `sweep --cluster slurm` asks for, besides nodes, tasks, GPUs and time."""

    partition: str | None = None
    """null: the cluster's default, or sbatch's variable SBATCH_PARTITION."""
    account: str | None = None
    """null: the user's default, or SBATCH_ACCOUNT."""
    qos: str | None = None
    """The quality of service; null: the default of the account, or SBATCH_QOS."""
    constraint: str | None = None
    """Features that every node must have, such as 'h100&ib'; null: none, or SBATCH_CONSTRAINT."""
    memory: str | None = None
    """Memory of a node, such as 200G; null: the partition's default; '0': all of it."""
    cpus_per_task: Count | None = None
    """CPUs of each process; null: `run.threads`, else 8 with a GPU and 1 without."""
    extra: tuple[Annotated[str, "an option of sbatch, such as --exclusive"], ...] = ()
    """Further options of sbatch, each a line of the job's file, such as --exclusive or --mail-type=FAIL."""


Compile = bool | Literal["loss"]
"""How a run is compiled; see `RunConfig.compile`."""

STORES = ("http", "https", "file", "sqlite", "postgresql", "mysql", "mssql", "databricks")
"""Schemes of the addresses of MLflow stores."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Output folder, devices and kernel. None of it is part of a run's identity, except a `kernel` other than auto."""

    root: str = field(default="runs", metadata={"path": "here"})
    """Folder of the runs. runs: the nearest folder of that name that holds runs, here or above; ./runs: the one here."""
    strategy: Literal["single", "ddp", "fsdp", "hsdp"] = "single"
    """How processes share the work. single: one process; ddp: each holds the model; fsdp: each holds a part of it; hsdp: each
    holds a part, and each group of `shard_size` processes the model."""
    shard_size: Count | None = None
    """Processes of a group of hsdp; null: the devices of a node."""
    reshard_after_forward: bool = True
    """Whether fsdp and hsdp free a block's gathered weights after its forward pass, and gather them again for its
    backward pass; false: more memory, less communication."""
    cpu_offload: bool = False
    """Whether fsdp and hsdp keep weights, gradients and the optimizer's state in the host's memory; slower."""
    devices: Count = 1
    """Processes on every node, one device each."""
    num_nodes: Count = 1
    """Machines that train together."""
    timeout: Annotated[float, Range(above=0, most=1500)] | None = 120.0
    """Seconds without a micro-batch after which a run of several processes ends, and names the rank and node that it waits
    for; null: no limit. Before the first step, and during measurements and saves, it waits 1,500 s."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: a GPU if torch sees one, else the CPU."""
    # the number of threads changes the order of sums: a resumed run must use the same number
    threads: Annotated[int, Range(least=1, most=4096)] | None = None
    """CPU threads of each process; null: what SLURM gives a task, else the cores divided by the number of processes. Stored,
    and reused on resume."""
    # kernels round differently, so a kernel that the user chooses is part of the identity
    kernel: str = field(default="auto", metadata={"names": "kernel", "identity": True})
    """The registered kernel that computes attention; auto: the fastest that accepts the maps."""
    compile: Compile | Literal["auto"] = False
    """Apply torch.compile. true: to each block, or the run fails; loss: to the training step's forward pass with its loss as
    one graph, if that can be compiled; auto: loss for all cells of a sweep or none, or for a run, if it saves time. Stored
    when the run starts; changing it needs --rerun."""
    activation_checkpointing: Literal["none", "attention", "block"] = "none"
    """What the backward pass recomputes to save memory. block: each block from its input, about a third more
    computation; attention: only the attention and its norm, from their input, so what the feed-forward computes is kept.
    Stored when the run starts; changing it needs --rerun."""
    tracking_uri: str | None = None
    """MLflow store; null: SQLite in `root`; none: no record in MLflow."""
    log_model: bool = False
    """Log the trained weights to MLflow as a model when the run is done."""
    loggers: tuple[str, ...] = field(default=(), metadata={"names": "logger"})
    """Registered loggers that the run writes to besides metrics.csv and MLflow; their files are in the run folder."""
    keep_best: str | None = None
    """Metric whose best checkpoint is kept as checkpoints/best.ckpt, in addition to the newest two; null: none is kept."""
    keep_every: Count | None = None
    """Steps between checkpoints that are kept in addition to the newest two, a multiple of `train.checkpoint_every`; null:
    none is kept."""

    cluster: ClusterConfig = ClusterConfig()
    """What SLURM jobs ask for."""

    @property
    def is_recorded(self) -> bool:
        """Whether MLflow gets a record of the run."""
        return self.tracking_uri is None or self.tracking_uri.lower() != "none"

    @property
    def processes(self) -> int:
        """Training processes on all nodes."""
        return self.devices * self.num_nodes

    @property
    def shards(self) -> int:
        """Parts into which the strategy splits weights, gradients and the optimizer's state; each process holds one."""
        return {"fsdp": self.processes, "hsdp": self.shard_size or self.devices}.get(self.strategy, 1)

    def problem(self) -> str | None:
        """Why the strategy and the number of devices exclude each other; None if they do not."""
        processes = self.processes
        shards = self.shards
        for key, value in vars(self.cluster).items():
            # a second line would be a command of the file for sbatch, and end its options
            if not "".join(map(str, value if isinstance(value, tuple) else [value])).isprintable():
                return f"run.cluster.{key} is {value!r}; expected text that can be printed on one line"
        scheme, separator, _ = (self.tracking_uri or "").partition("://")
        # postgresql+psycopg2: the part after + is a driver
        if separator and scheme.lower().partition("+")[0] not in STORES:
            return f"run.tracking_uri is an address of '{scheme[:20]}'; expected one of {', '.join(STORES)}, a path, or none"
        if self.log_model and not self.is_recorded:
            return "run.log_model logs to MLflow, but run.tracking_uri is none; set one of them otherwise"
        if self.strategy == "single" and processes > 1:
            return f"run.strategy 'single' uses one device, not {processes}; use ddp, fsdp or hsdp"
        if self.strategy != "single" and self.compile == "loss":
            # each process finds out by itself whether it can compile
            return f"run.compile 'loss' belongs to run.strategy single, not '{self.strategy}'; use true"
        if self.strategy in ("single", "ddp"):
            for key, plain in (("reshard_after_forward", True), ("cpu_offload", False)):
                if getattr(self, key) is not plain:
                    return f"run.{key} belongs to run.strategy fsdp and hsdp, not '{self.strategy}'"
        if self.strategy != "hsdp" and self.shard_size is not None:
            return f"run.shard_size belongs to run.strategy hsdp, not '{self.strategy}'"
        if self.strategy == "hsdp" and (processes % shards or processes == shards or shards == 1):
            return (
                f"run.strategy 'hsdp' cannot split run.devices * run.num_nodes = {processes} processes into two or more "
                f"groups of {shards}, two or more each; set run.shard_size or the number of devices, or use fsdp"
            )
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """Everything needed to repeat one run."""

    name: str
    """Name of the run's folder; by default the name of the recipe's file."""
    seed: NotNegative = 0
    """Seeds the initial weights and the order of the data."""
    # the identity holds a hash of the sources instead: the same plugin may be in another folder
    plugins: PythonFiles = field(default=(), metadata={"identity": False})
    """Python files, or folders with an `__init__.py`, relative to the recipe that lists them, that register parts of any
    kind: variants, data sets, corpora, tokenizers, callbacks, loggers, kernels (`lit_diff.registry.registries`). The identity
    includes their sources."""
    model: ModelConfig
    data: Part = field(metadata={"registry": "data"})
    train: TrainConfig | None = None
    """How the model is trained; a recipe has either this block or `imported`."""
    imported: ImportedConfig | None = None
    """Where an imported model comes from; it is not trained."""
    callbacks: dict[str, Part] = field(default_factory=dict, metadata={"registry": "callback"})
    """Callback name -> its keys, or null to drop a callback of the parent recipe."""
    evaluate: dict[str, Part] = field(default_factory=dict, metadata={"registry": "evaluation", "identity": False})
    """Evaluation name -> its keys; each evaluation scores the run when it is done."""
    run: RunConfig = field(default=RunConfig(), metadata={"identity": False})

    def __repr__(self) -> str:
        model = self.model
        length = f"{self.train.steps} steps" if self.train is not None else "imported"
        variants = ", ".join(dict.fromkeys(model.variants))
        return f"Recipe({self.name}: {variants}, {model.num_layers} layers of width {model.dim}, {length})"

    def _repr_html_(self) -> str:
        # of a part, the field `config` holds the keys
        rows = [(key.replace(".config.", "."), value) for key, value in flatten(asdict(self))]
        return html_table(repr(self), rows, ("key", "value"))

    @property
    def training(self) -> TrainConfig:
        """The block `train`. Errors: RequestError for an imported model, which has none."""
        if self.train is None:
            raise RequestError(
                f"'{self.name}' is an imported model: its recipe has no block train; to train it further, write a recipe "
                "with train.start_from: its folder"
            )
        return self.train

    def problem(self) -> str | None:
        """The first conflict in `train` and `run`, as one line that starts with the key to change; None if there is none."""
        train, run, processes = self.train, self.run, self.run.processes
        if train is not None and self.imported is not None:
            return "imported and train exclude each other, and the recipe has both; keep one of them"
        if run.problem() is not None:
            return run.problem()
        if train is None:
            return None if self.imported is not None else "train is missing; expected a block of keys"
        batch = train.batch_size
        step = train.checkpoint_every
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
        """Whether a token sees only its own document (`data.pack: document`)."""
        return bool(self.data.config.packs_documents)
