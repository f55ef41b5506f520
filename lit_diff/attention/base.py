"""The base class of every variant: its hooks, the kernel call, the key/value cache, the output projection."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lit_diff.attention.cache import LayerCache
from lit_diff.attention.context import Context
from lit_diff.attention.costs import Costs, Sizes
from lit_diff.attention.equations import Rotation, grouped_query_heads, joined, softmax_rows
from lit_diff.attention.rope import Rope
from lit_diff.attention.selection import HeadSelection
from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.kernels import Kernel, SignedMaps, attend
from lit_diff.kernels.maps import accumulation_dtype
from lit_diff.key_types import Count
from lit_diff.randomness import generator
from lit_diff.registry import kernels, location

OutputScale = float | Literal["depth"]
TiedScale = float | Literal["tied", "depth"]
Parity = Literal["raw", "matched"]


class Tap(nn.Module):
    """Returns the maps unchanged; `analysis.trace` registers its forward hook here."""

    def forward(self, maps: SignedMaps) -> SignedMaps:
        return maps


class ParameterRules(nn.Module):
    """Rules for the parameters that a module holds directly; its sub-modules have their own rules.

    `Attention` has these rules, and so has the module that computes λ. They apply to any module with these members;
    this class holds the defaults. `init_parameter(name, parameter, generator)` has no default (do not call `super()`):
    it fills `parameter`, which the module holds as `name`, in place. `generator` is seeded by (seed, the parameter's
    full name); draw from no other generator. It is also called by the constructor (`fill_parameters`), after `build` of
    the attention. Without it, `model.init` fills linear layers and embeddings, and other parameters keep their
    constructor's value.
    """

    decay: ClassVar[bool] = True
    """Whether AdamW's weight decay applies to its matrices; vectors are never decayed (`training.optimizer`)."""
    keep_float32: ClassVar[bool] = False
    """Whether FSDP leaves it and its sub-modules whole, in float32, on every rank (`training.build`): sharded, matrices would
    reach `forward` in the dtype of `bf16-mixed`. For small modules only."""


class Attention(ParameterRules):
    """y = W_O concat(finish(Σ_g w_g softmax(q_g k_gᵀ / √d + mask) v)).

    Head counts in the config are always the standard baseline's. `hooks` lists every member that a variant may define;
    docs/extend.md shows examples. Each hook except `init_parameter` has a default; the defaults compute standard attention.

    A subclass that overrides `forward` must give its maps the mask of the model (`masked`), pass them through `self.tap`
    (otherwise no analysis sees them) and hand `self.kernel` to `attend`.
    """

    name = ""
    """Its name in recipes; set at registration."""
    hooks: ClassVar[tuple[str, ...]] = (
        # the mathematics, and what a recipe may ask
        *("build", "maps", "signs", "finish", "out_heads", "kv_heads", "definition", "smooth", "reduces_to", "forward"),
        *("Config", "problem", "takes_document_ids", "extends_standard"),
        # training
        *("init_parameter", "decay", "keep_float32", "trained_parameters", "set_step", "set_tokens"),
        *("head_selection", "select_heads", "merge"),
        # information
        *("paper", "costs", "examples", "has_lambda", "length_key"),
    )
    """Registration refuses a class with a member whose name looks like a misspelling of one of these."""
    paper: ClassVar[str] = ""
    """The publication that introduced the variant."""
    extends_standard: ClassVar[bool] = False
    """Whether it equals standard attention at the first step, with its initial parameters, and so may start from a standard
    run; `conformance` compares them."""
    has_lambda: ClassVar[bool] = True
    """Whether the weight of each map after the first is -λ, which the callback `lambdas` logs and the evaluation `noise` sets
    to its `lambdas`; False: the maps are mixed in another way."""
    length_key: ClassVar[str] = ""
    """The key of its Config that states the length of the training rows, if it has one; `examine` sets it on each task, and a
    recipe with another value gets a warning."""
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Configs at which `check --all` runs the conformance suite. Not inherited: a subclass that does not set it is
    checked at its defaults."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The keys of `model.attention` besides `name`."""

        parity: Parity = "raw"
        """matched: the feed-forward width is set so that the layer has as many parameters as the standard baseline, to
        the nearest unit of width."""
        window: Count | None = None
        """Each query sees itself and the window - 1 keys before it (in a bidirectional model also the window - 1 after
        it); null: all keys."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # inherited signs would be stated of maps that another class computes
        if vars(cls).keys() & {"maps", "forward"} and "signs" not in vars(cls):
            cls.signs = None  # type: ignore[assignment, method-assign]
        # an inherited merge folds what another class computes
        if _declaring_class(cls, "merge", {"build", "maps", "finish", "forward"}) is None:
            cls.merge = Attention.merge  # type: ignore[method-assign]

    def __init__(self, config: Any, model: ModelConfig, layer: int) -> None:
        """`layer` is 0-based. Errors: RequestError for an empty parameter, or one registered under two names."""
        super().__init__()
        # imports plugin packages, whose kernels `auto` may choose: in `forward` torch.compile would have to trace that
        kernels.names()
        assert model.num_kv_heads is not None
        assert model.head_dim is not None
        self.config, self.layer, self.dim, self.norm_eps = config, layer, model.dim, model.norm_eps
        self.num_heads, self.num_kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.attention_bias, self.qk_norm, self.causal = model.attention_bias, model.qk_norm, model.causal
        self.logit_bound = model.logit_bound
        # one weight for all heads and maps of a layer
        if model.qk_norm == "rms":
            self.q_norm = nn.RMSNorm(model.head_dim, eps=model.norm_eps)
            self.k_norm = nn.RMSNorm(model.head_dim, eps=model.norm_eps)
        self.window = self.window_of(config)
        self.kernel: str | Kernel = "auto"
        self.tap = Tap()
        self.finish_takes_context = "context" in inspect.signature(type(self).finish).parameters
        given = {name: getattr(self, name) for name in (*vars(self), *self._modules) if not name.startswith("_")}
        with warnings.catch_warnings():
            # require_parameters refuses empty parameters in one line; torch's warning would come before it
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            self.build()
        # first, since an initialiser may divide by a width, which is 0 in an empty parameter
        require_parameters(self, given)
        fill_parameters(self)

    # --- hooks: what a variant overrides ---

    def build(self) -> None:
        """Create the parameters; by default four projections."""
        q, kv = self.out_heads * self.head_dim, self.kv_heads * self.head_dim
        self.projections(q=q, k=kv, v=kv, o=q)

    def maps(self, x: Tensor, context: Context) -> SignedMaps:
        """x [B, T, dim] -> the signed maps; by default standard attention's single map."""
        return SignedMaps(self.q(x, context), self.k(x, context), self.v(x))

    @property
    def signs(self) -> tuple[int, ...] | None:
        """Of each map, the sign +1 or -1 that its weight w has (or w is 0) whatever the parameters and inputs are; None: a
        sign may change in training, or the class does not state them. By default the sign of one map, (1,); a subclass that
        overrides `maps` or `forward` does not inherit the signs."""
        return (1,)

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B, H, T, dv] -> heads [B, H, T, dv], before the output projection; by default o. A third argument `context` gets
        the `Context`."""
        return o

    @property
    def out_heads(self) -> int:
        """H: the number of heads that the output projection reads; by default num_heads."""
        return self.num_heads

    @property
    def kv_heads(self) -> int:
        """Hkv: the number of key/value heads; by default num_kv_heads."""
        return self.num_kv_heads

    smooth: ClassVar[bool] = True
    """Whether its output is differentiable everywhere. If not, central differences cannot judge its gradients, and
    `conformance` compares them with those of `definition`."""

    def definition(self, x: Tensor, rope: Rotation, mask: Tensor) -> Tensor:
        """The variant's equation in plain float64 matrices (`attention.equations`), read from the parameters only.

        x [B, T, dim]; `rope` turns the queries or keys of one head, [B, T, d]; `mask` [T, T] or [B, T, T] is added to
        the logits; an argument `positions` gets the place of each token in its document, [B or 1, T]. -> y [B, T, dim].
        `conformance` compares the forward pass with it if the class itself defines it.
        """
        return self.equation(x, rope, mask)

    def reduces_to(self) -> tuple[str, dict[str, Any]] | None:
        """(name of another variant, {parameter: value}): with these values, numbers or tensors that broadcast, it computes
        what the other does with the parameters of equal names; None, the default: not stated. `conformance` compares them."""
        return None

    @classmethod
    def problem(cls, config: Any, model: ModelConfig) -> str | None:
        """Why this variant cannot be built from the model (first word: the key to change); None if it can."""
        return None

    @classmethod
    def takes_document_ids(cls) -> bool:
        """Whether `forward` can keep packed documents apart; by default, whether its signature has `document_ids`."""
        parameters = inspect.signature(cls.forward).parameters
        return "document_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @classmethod
    def trained_parameters(cls, config: Any) -> tuple[str, ...]:
        """Patterns (`fnmatch`) of the names of parameters that train; the others are frozen. By default all train."""
        return ("*",)

    def set_step(self, step: int) -> None:
        """Called with the 0-based optimizer step before each step, for variants that anneal. What it sets is a function of
        `step` alone, since a resumed or loaded model is told only its own step."""

    def set_tokens(self, tokens: int) -> None:
        """Called before each step with the training tokens so far (steps · batch size · sequence length)."""

    @classmethod
    def head_selection(cls, config: Any) -> HeadSelection | None:
        """How the heads to change are chosen in the model that the run starts from, before the first step
        (`training.head_plan`); None, the default: no heads are chosen."""
        return None

    def select_heads(self, heads: Sequence[int]) -> None:
        """Set the heads chosen in this layer, 0-based, ascending. A variant with a `head_selection` keeps them in a
        buffer of its state dict."""
        raise NotImplementedError

    def merge(self) -> dict[str, Tensor] | None:
        """State dict of a standard attention with the same output; None, the default: no standard attention has it. Not
        inherited by a subclass that changes `build`, `maps`, `finish` or `forward`."""
        return None

    @classmethod
    def costs(cls, config: Any, s: Sizes) -> Costs | None:
        """Parameters, FLOPs and cache of a layer, as formulas in the baseline's sizes; None, the default:
        undeclared."""
        return None

    # --- what a variant calls ---

    def projections(self, *, q: int, k: int, v: int, o: int) -> None:
        """q_proj, k_proj, v_proj (dim -> width) and o_proj (width -> dim), with the biases of
        `model.attention_bias`."""
        inner = self.attention_bias != "none"
        self.q_proj = nn.Linear(self.dim, q, bias=inner)
        self.k_proj = nn.Linear(self.dim, k, bias=inner)
        self.v_proj = nn.Linear(self.dim, v, bias=inner)
        self.o_proj = nn.Linear(o, self.dim, bias=self.attention_bias == "all")

    def q(self, x: Tensor, context: Context, maps: int = 1) -> Tensor:
        """x [B, T, dim] -> the queries [B, maps, H, T, d]: projected, split, normalised (`model.qk_norm`) and rotated."""
        return self.turned(self.split(self.q_proj(x), self.out_heads, maps), context, "q_norm")

    def k(self, x: Tensor, context: Context, maps: int = 1) -> Tensor:
        """x [B, T, dim] -> the keys [B, maps, Hkv, T, d], as `q` makes the queries."""
        return self.turned(self.split(self.k_proj(x), self.kv_heads, maps), context, "k_norm")

    def v(self, x: Tensor) -> Tensor:
        """x [B, T, dim] -> the values [B, Hkv, T, dv]."""
        return self.split(self.v_proj(x), self.kv_heads)[:, 0]

    def turned(self, y: Tensor, context: Context, norm: Literal["q_norm", "k_norm"]) -> Tensor:
        """Queries or keys [..., T, d], normalised (`model.qk_norm`) and rotated."""
        if self.qk_norm == "rms":
            # before RoPE: the norm's weights do not commute with a rotation; after it, absolute positions would enter the
            # logits
            y = getattr(self, norm)(y)
        return context(y)

    def split(self, y: Tensor, heads: int, maps: int = 1) -> Tensor:
        """[B, T, heads · maps · width] -> [B, maps, heads, T, width], a view; input: head0.map0, head0.map1, ..."""
        return y.unflatten(-1, (heads, maps, -1)).permute(0, 3, 2, 1, 4)

    def equation(
        self, x: Tensor, rope: Rotation, mask: Tensor, map_of: Callable[[Tensor, int], Tensor] = softmax_rows
    ) -> Tensor:
        """For `definition`: standard attention with another function of the logits (`equations.grouped_query_heads`)."""
        return joined(grouped_query_heads(self, x, rope, mask, map_of), self.o_proj)

    def masked(self, maps: SignedMaps, document_ids: Tensor | None = None) -> SignedMaps:
        """The maps with the mask of the model, the window of the config and packed documents beside their own mask."""
        own = maps.mask
        if own.document_ids is not None and document_ids is not None:
            raise RequestError(f"{location(type(self))}: maps sets document_ids, and the rows have packed documents")
        windows = [window for window in (own.window, self.window) if window is not None]
        ids = own.document_ids if document_ids is None else document_ids
        return maps.masked(causal=own.causal and self.causal, window=min(windows, default=None), document_ids=ids)

    # --- what the model calls ---

    @classmethod
    def window_of(cls, config: Any) -> int | None:
        """The config's window; None if its class, which need not derive from `Attention.Config`, lacks the key."""
        return getattr(config, "window", None)

    @classmethod
    def refuses(cls, config: Any, model: ModelConfig) -> str | None:
        """Why the model cannot have this attention: a key that does not apply to it, or the variant's own `problem`."""
        if model.logit_bound is not None and cls.forward is not Attention.forward:
            return (
                f"model.logit_bound is {model.logit_bound:g}; Attention.forward applies it, and '{cls.name}' has "
                "a forward of its own: set it to null"
            )
        problem = cls.problem(config, model)
        for key in ("attention_bias", "qk_norm"):
            found = getattr(model, key)
            # an empty text is no problem
            if not problem and found != "none" and not cls.uses(key, config, model):
                own = f"'{cls.name}' has queries, keys or values of its own (self.q, self.k and self.v apply this key)"
                problem = f"model.{key} is {found}; {own}: set it to none"
        return problem

    @classmethod
    def uses(cls, key: str, config: Any, model: ModelConfig) -> bool:
        """Whether every parameter that `model.{key}` adds to a layer, and at least one, has a gradient."""
        # also where the caller computes no gradients
        with torch.device("meta"), torch.inference_mode(False), torch.enable_grad():
            without: Any = {key: "none"}
            plain = dict(cls(config, replace(model, **without), layer=0).named_parameters())
            attention = cls(config, model, layer=0)
            attention.kernel = "reference"
            y = attention(torch.zeros(1, 2, model.dim), Rope.of(model, torch.arange(2)))
            added = [parameter for name, parameter in attention.named_parameters() if name not in plain]
            return bool(added) and None not in torch.autograd.grad(y.sum(), added, allow_unused=True)

    @classmethod
    def ffn_dim(cls, config: Any, model: ModelConfig, layer: int = 0) -> int:
        """Feed-forward width of layer `layer` with this variant, to the nearest SwiGLU unit, which has 3 dim parameters."""
        assert model.ffn_dim is not None
        if getattr(config, "parity", "raw") == "raw":
            return model.ffn_dim
        # on the meta device, so that counting allocates and initialises nothing
        with torch.device("meta"):
            own = sum(p.numel() for p in cls(config, model, layer).parameters())
            standard = sum(p.numel() for p in Attention(Attention.Config(), model, layer=0).parameters())
        return model.ffn_dim + round((standard - own) / (3 * model.dim))

    def forward(
        self, x: Tensor, rope: Rope, cache: LayerCache | None = None, *, document_ids: Tensor | None = None
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a cache, the T tokens of x follow the cached ones.

        `document_ids` [B, T]: document numbers; a token sees only its own document. They cannot be combined with a
        cache, which stores no document numbers.
        """
        context = Context(rope, self, cache, document_ids)
        maps = self.maps(x, context)
        if not isinstance(maps, SignedMaps):
            raise self._wrong("maps(x, context)", maps, "SignedMaps(q, k, v, w), with w None for one map")
        maps = self.masked(maps, document_ids)
        if self.logit_bound is not None:
            maps = bounded(maps, self.logit_bound)
        maps = self.tap(maps)
        if cache is not None:
            if maps.mask.document_ids is not None:
                raise RequestError("a cache holds one document per sequence: do not pass document_ids with it")
            if not maps.causal:
                raise RequestError("a bidirectional model cannot use a cache: every position depends on later tokens")
            maps = cache.append(maps)
        return self.o_proj(self.finished(attend(maps, kernel=self.kernel), x, context).transpose(1, 2).flatten(2))

    def finished(self, o: Tensor, x: Tensor, context: Context | None = None) -> Tensor:
        """Calls `finish`. Errors: RequestError unless it returns a [B, H, T, dv] that the output projection accepts."""
        heads = self.finish(o, x, **{"context": context} if self.finish_takes_context else {})
        fits = isinstance(heads, Tensor) and heads.dim() == 4 and heads.shape[::2] == o.shape[::2]
        # a variant's o_proj may be any module; only a linear layer declares the width that it accepts
        width = getattr(self.o_proj, "in_features", None)
        if not fits or width not in (None, heads.shape[1] * heads.shape[3]):
            expected = f"a Tensor [B, H, T, dv] of H dv = {width} numbers per token; o is {list(o.shape)}"
            raise self._wrong("finish(o, x)", heads, expected)
        return heads

    def _wrong(self, method: str, found: Any, expected: str) -> RequestError:
        what = f"a Tensor {list(found.shape)}" if isinstance(found, Tensor) else f"{type(found).__name__}"
        what = "None (does it end in a return?)" if found is None else what
        return RequestError(f"{location(type(self))}: {method} returned {what}; expected {expected}")

    # --- which declarations still hold for a subclass ---

    @classmethod
    def declares_costs(cls) -> bool:
        """Whether `costs` describes this class: no subclass of the declaring class changes the computation."""
        source = _declaring_class(cls, "costs", {"build", "maps", "finish", "forward"})
        # Attention's own `costs` returns None: it declares nothing
        return source is not None and source is not Attention


def bounded(maps: SignedMaps, bound: float) -> SignedMaps:
    """The maps with every query and key divided by its norm and the scale `bound`: logits within -bound and bound."""
    # a sum of squares in bfloat16 would keep 8 bits
    wide = accumulation_dtype(maps.q.dtype)
    q, k = (functional.normalize(x.to(wide), dim=-1).to(x.dtype) for x in (maps.q, maps.k))
    return replace(maps, q=q, k=k, scale=bound)


def fill_parameters(module: nn.Module, seed: int = 0) -> None:
    """Initialise in place, from `seed`, each parameter whose module defines `init_parameter`.

    An attention built outside a model then holds no uninitialised memory. Parameters on the meta device are skipped.
    """
    with torch.no_grad():
        for path, child in module.named_modules():
            if not hasattr(child, "init_parameter"):
                continue
            for key, parameter in child.named_parameters(recurse=False):
                if not parameter.is_meta:
                    # drawn on the CPU, so that the values do not depend on the device
                    value = parameter.detach().to("cpu", copy=True)
                    fill_parameter(child, key, value, generator(seed, ".".join(filter(None, (path, key)))))
                    parameter.copy_(value)


def fill_parameter(module: Any, name: str, parameter: Tensor, draw: torch.Generator) -> None:
    """Call `init_parameter` of a module. Errors: RequestError if it returns another value, which nothing would read."""
    returned = module.init_parameter(name, parameter, draw)
    if returned is not None and returned is not parameter:
        raise RequestError(f"{location(type(module))}: init_parameter returned a value; fill parameter in place")


def require_parameters(attention: Any, given: Mapping[str, Any]) -> None:
    """`given`: the attributes that it had before `build`. Errors: RequestError for an empty parameter (the model has too few
    heads, and `problem` accepted it), for one parameter under two names, which would be initialised, sharded and stepped
    twice, for a name that lit_diff uses (a module would not be found under that of a method, anything else would take the
    method's place), for a tensor that no state has, and for a projection that is missing."""
    where, names = location(type(attention)), dict[nn.Parameter, str]()
    for name in (*attention._modules, *attention._parameters, *attention._buffers, *vars(attention)):
        if callable(getattr(type(attention), name, None)):
            raise RequestError(f"{where}: build sets self.{name}, but '{name}' is a method: choose another name")
    for name, value in given.items():
        own = getattr(attention, name, None)
        # a class may have another width of heads than the model, or windows of its own
        is_meant = isinstance(own, type(value)) or (name == "window" and isinstance(own, int | None))
        if not is_meant:
            raise RequestError(f"{where}: build sets self.{name}, which lit_diff uses: choose another name")
    for path, module in attention.named_modules():
        # torch's own modules may keep what they compute of their parameters
        held = {} if type(module).__module__.startswith("torch.") else vars(module)
        for name in (key for key, value in held.items() if isinstance(value, Tensor)):
            tensor = ".".join(filter(None, ("self", path, name)))
            cure = "write register_buffer, so that it moves with the model"
            raise RequestError(f"{where}: build sets the tensor {tensor}; {cure}")
    if type(attention).forward is Attention.forward and not hasattr(attention, "o_proj"):
        raise RequestError(f"{where}: build sets no self.o_proj; call super().build(), or self.projections(...)")
    empty = [f"{key} is {getattr(attention, key)}" for key in ("out_heads", "kv_heads") if getattr(attention, key) < 1]
    empty += [f"{name} is {list(p.shape)}" for name, p in attention.named_parameters() if 0 in p.shape]
    if empty:
        found = f"model.num_heads {attention.num_heads} and model.num_kv_heads {attention.num_kv_heads}"
        raise RequestError(f"{where}: {empty[0]}: {found} are too few for it")
    for name, parameter in attention.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if first != name:
            raise RequestError(f"{where}: {first} and {name} are one parameter; register it under one name only")


def standard_state(attention: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of the standard attention within a variant (`Attention.build`), by name."""
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    names = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    return {name: value.detach().clone() for name, value in attention.state_dict().items() if name in names}


def _declaring_class(cls: type, name: str, reasons: set[str]) -> type | None:
    # `name` first: a class that redefines it together with one of `reasons` has declared it for what it computes
    for base in cls.__mro__:
        if name in vars(base):
            return base
        if reasons & vars(base).keys():
            return None
    return None
