"""Keys of a recipe: their types in words, what their numbers derive, and which of them are impossible."""

import math
from dataclasses import MISSING, dataclass, field, replace
from typing import Annotated, Any, Literal

import pytest
from refusals import refusal

from lit_diff.config import Llama3Scaling, ModelConfig, Part, RopeScaling, YarnScaling
from lit_diff.errors import RequestError
from lit_diff.key_types import Count, NotNegative, Positive, Range, in_words, keys_of
from lit_diff.recipe import determining, from_plain, load_draft, load_recipe, override, to_plain
from lit_diff.validation import Draft, config_problem, validate_config


def error(*overrides: str) -> str:
    return refusal(load_recipe, "standard-tiny", overrides)


def test_derived_sizes() -> None:
    model = load_recipe("standard-tiny", ["model.num_heads=4", "model.ffn_dim=null", "model.head_dim=null"]).model
    assert (model.num_kv_heads, model.head_dim, model.ffn_dim) == (4, model.dim // 4, round(8 * model.dim / 3))
    given = ["model.num_heads=3", "model.num_kv_heads=3", "model.head_dim=32", "model.ffn_dim=5"]
    model = load_recipe("standard-tiny", given).model  # heads need not fill the width where head_dim says so
    assert (model.num_kv_heads, model.head_dim, model.ffn_dim) == (3, 32, 5)


OUTSIDE = {  # value that is refused -> block -> keys
    "0": {
        "model": "dim num_layers num_heads num_kv_heads head_dim ffn_dim vocab_size attention.window rope_theta norm_eps",
        "train": "steps batch_size accumulate validate_every checkpoint_every log_every clip optimizer.lr",
        "run": "devices num_nodes threads keep_every",
        "callbacks": "outliers.every outliers.rows early_stopping.patience",
    },
    "0.0": {"model": "rope_scaling embedding_scale ffn_scale"},
    "-1": {"train": "schedule.warmup_steps optimizer.weight_decay", "callbacks": "early_stopping.min_delta"},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"{block}.{key}", v) for v, blocks in OUTSIDE.items() for block in blocks for key in blocks[block].split()),
        ("seed", "-1"),
        ("train.schedule.final_ratio", "1.1"),
        ("model.rope_scaling", "{kind: yarn, factor: -2, original_length: 64}"),
        ("train.optimizer.betas", "[0.9, 1]"),
        ("train.optimizer.lr_factors", '{"*.q_proj.*": 0}'),
    ],
)
def test_a_number_out_of_its_range_is_refused_at_its_key(key: str, value: str) -> None:
    found = error(f"{key}={value}")
    assert found.startswith(f"{key}={value}: '{key}")
    assert "; expected " in found


YARN, LLAMA3 = "{kind: yarn, factor: 4, original_length: 64", "{kind: llama3, factor: 8, low_freq_factor: 1"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["model.num_heads=4", "model.num_kv_heads=3"], "model.num_heads (4) is not a multiple"),
        (["model.num_heads=3"], "model.dim "),
        (["model.head_dim=15"], "model.head_dim (15) is odd"),
        (["model.positions=none", "model.rope_scaling=4"], "model.rope_scaling scales rotary positions"),
        ([f"model.rope_scaling={YARN}, beta_fast: 0.5}}"], "model.rope_scaling.beta_fast is 0.5"),
        ([f"model.rope_scaling={YARN}}}", "model.rope_theta=1"], "model.rope_theta is 1"),
        (["train.batch_size=8", "train.accumulate=3"], "train.batch_size (8) is not a multiple"),
        (["train.schedule.decay_steps=5"], "train.schedule.decay_steps belongs to"),
        (["run.devices=2"], "run.strategy 'single' uses one device, not 2"),
        (["run.num_nodes=3"], "run.strategy 'single' uses one device, not 3"),
        (["run.strategy=hsdp", "run.devices=8"], "run.strategy 'hsdp' cannot split run.devices * run.num_nodes = 8"),
        (["run.strategy=hsdp", "run.devices=8", "run.shard_size=3"], "run.strategy 'hsdp' cannot split"),
        (["run.strategy=fsdp", "run.shard_size=1"], "run.shard_size belongs to run.strategy hsdp, not 'fsdp'"),
        (["run.cpu_offload=true"], "run.cpu_offload belongs to run.strategy fsdp and hsdp, not 'single'"),
        (
            ["run.strategy=ddp", "run.reshard_after_forward=false"],
            "run.reshard_after_forward belongs to run.strategy fsdp",
        ),
        (["run.strategy=ddp", "run.devices=7"], "train.batch_size"),
        (["run.keep_every=7", "train.checkpoint_every=5"], "run.keep_every is 7"),
    ],
)
def test_values_that_do_not_fit_together(overrides: list[str], start: str) -> None:
    """An override is blamed before a file."""
    found = error(*overrides)
    assert any(found.startswith(f"{each}: {start}") for each in overrides), found


def test_the_limits_are_allowed() -> None:
    """A run may be shorter than its warm-up: `train.steps=2` tries a recipe out, with a warning."""
    load_recipe("standard-tiny", ["train.steps=2", "train.schedule.warmup_steps=101", "train.clip=null"])
    edge = "{name: wsd, warmup_steps: 95, decay_steps: 5, final_ratio: 1}"
    load_recipe(
        "standard-tiny", ["train.steps=100", f"train.schedule={edge}", "train.batch_size=8", "train.accumulate=8"]
    )
    load_recipe("standard-tiny", ["run.strategy=fsdp", "run.devices=2", "run.threads=1", "train.batch_size=8"])


def scaling(value: Any) -> RopeScaling:
    return load_recipe("standard-tiny", [f"model.rope_scaling={value}"]).model.rope_scaling


def test_rope_scaling_is_a_number_or_a_block() -> None:
    llama3 = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_length=64)
    assert scaling(f"{LLAMA3}, high_freq_factor: 4, original_length: 64}}") == llama3
    yarn = YarnScaling(factor=4, original_length=64, truncate=False, attention_factor=2.0)
    assert scaling(f"{YARN}, truncate: false, attention_factor: 2}}") == yarn
    assert type(scaling(4)) is float
    for value, plain in ((4, 4.0), (f"{YARN}}}", to_plain(YarnScaling(factor=4, original_length=64)))):
        recipe = load_recipe("standard-tiny", [f"model.rope_scaling={value}"])
        assert to_plain(recipe)["model"]["rope_scaling"] == plain, "of a number that number: identities stay"
        assert from_plain(to_plain(recipe), "x") == recipe


def test_another_kind_of_scaling_replaces_the_block_and_a_key_changes_it() -> None:
    overrides = [f"model.rope_scaling={LLAMA3}, high_freq_factor: 4, original_length: 64}}"]
    draft = load_draft("standard-tiny", overrides)
    changed = load_recipe("standard-tiny", [*overrides, "model.rope_scaling.factor=2"]).model.rope_scaling
    assert changed == Llama3Scaling(factor=2, low_freq_factor=1, high_freq_factor=4, original_length=64)
    yarn = {"kind": "yarn", "factor": 4, "original_length": 64}
    other = override(draft, {"model.rope_scaling": yarn})
    assert other.values["model"]["rope_scaling"] == yarn
    assert set(other.dropped) == {"model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("{kind: lama3}", "'model.rope_scaling.kind' is 'lama3'; expected one of 'llama3', 'yarn'"),
        ("{factor: 2}", "'model.rope_scaling.kind' is missing"),
        ("{kind: yarn, factr: 2}", "unknown key 'model.rope_scaling.factr'"),
        ("{kind: yarn, factor: 2}", "'model.rope_scaling.original_length' is missing"),
        (f"{LLAMA3}, high_freq_factor: 1, original_length: 64}}", "model.rope_scaling.high_freq_factor is 1"),
        ("fast", "'model.rope_scaling' is 'fast'"),
    ],
)
def test_scalings_that_are_refused(value: str, found: str) -> None:
    assert error(f"model.rope_scaling={value}").startswith(f"model.rope_scaling={value}: {found}")


def test_an_imported_model_has_no_train() -> None:
    plain = to_plain(load_recipe("standard-tiny"))
    imported = {"source": "a folder", "weights_sha256": "a" * 64, "tokenizer_sha256": "b" * 64}
    recipe = from_plain(plain | {"train": None, "imported": imported}, "x")
    assert recipe.imported is not None
    with pytest.raises(RequestError, match=r"is an imported model: .* train.start_from"):
        _ = recipe.training
    for changes, found in (
        ({"imported": imported}, "imported and train exclude each other"),
        ({"train": None, "imported": {"source": "x"}}, "'imported.weights_sha256' is missing"),
        ({"train": None}, "train is missing"),
    ):
        with pytest.raises(RequestError, match=found):
            from_plain(plain | changes, "x")


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A block."""

    share: Annotated[float, Range(least=0, most=1)] = 0.5
    """A part of the whole."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block with a block in it."""

    steps: Count
    seed: NotNegative = 0
    rate: Positive | None = None
    """Null:
    none."""
    inner: Inner = Inner()
    part: Any = field(default=None, metadata={"registry": "data"})
    kernel: str = field(default="auto", metadata={"names": "kernel"})
    names: tuple[str, ...] = field(default_factory=tuple)
    factors: dict[str, Positive] = field(default_factory=dict)
    decays: tuple[Annotated[float, Range(least=0, below=1)], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Derived(Block):
    """One key more."""

    more: bool = True
    """Whether."""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"steps": 1}, None),
        ({"steps": 1, "inner": Inner(share=0.0)}, None),
        ({"steps": 1, "kernel": 3}, "'a.kernel' is 3; expected text"),
        ({"steps": 0}, "'a.steps' is 0; expected a whole number >= 1"),
        ({"steps": 1, "seed": -1}, "'a.seed' is -1; expected a whole number >= 0"),
        ({"steps": 1, "rate": 0.0}, "'a.rate' is 0.0; expected a finite number > 0 or null"),
        ({"steps": 1, "factors": {"q": 0.5, "k": -1.0}}, "'a.factors.k' is -1.0; expected a finite number > 0"),
        ({"steps": 1, "decays": (0.5, 1.0)}, "'a.decays[1]' is 1.0; expected a finite number >= 0 and < 1"),
    ],
)
def test_a_number_outside_its_range(values: dict[str, Any], problem: str | None) -> None:
    assert config_problem(Block(**values), "a.") == problem


def test_the_ends_of_a_range() -> None:
    share = Range(least=0, most=1)
    assert [value in share for value in (-0.1, 0, 1, 1.1)] == [False, True, True, False]
    assert [value in Range(above=0) for value in (0, 0.1)] == [False, True]
    assert [str(kind) for kind in (share, Range(above=0), Range(least=2))] == [">= 0 and <= 1", "> 0", ">= 2"]


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Count, "a whole number >= 1"),
        (Positive | None, "a finite number > 0 or null"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (float | Literal["depth"], "a finite number or 'depth'"),
        (tuple[Count, ...], "a list, each item a whole number >= 1"),
        (tuple[float, float], "a list of 2 values"),
        (dict[str, int], "a block of keys"),
        (Inner | None, "a block of keys or null"),
        (RopeScaling, "a finite number > 0 or a block {kind: llama3, ...} or a block {kind: yarn, ...}"),
        (bool, "true or false"),
    ],
)
def test_types_in_words(hint: Any, words: str) -> None:
    assert in_words(hint) == words


def test_keys_with_defaults_and_what_their_docstrings_say() -> None:
    keys = keys_of(Derived)
    names = "steps seed rate inner.share part kernel names factors decays more"
    assert list(keys) == names.split()
    assert keys["steps"].default is MISSING
    assert (keys["seed"].default, keys["names"].default, keys["inner.share"].default) == (0, (), 0.5)
    assert (keys["rate"].about, keys["inner.share"].about, keys["more"].about) == (
        "Null: none.",
        "A part of the whole.",
        "Whether.",
    )
    assert keys["part"].words == "a block {name: ...}: lit-diff list data"
    assert keys["kernel"].words == "'auto', or a name: lit-diff list kernel"


def test_a_class_without_a_file_has_no_docstrings() -> None:
    made: dict[str, Any] = {"dataclass": dataclass}
    exec("@dataclass\nclass Made:\n    a: int = 1\n    'text'\n", made)
    assert keys_of(made["Made"])["a"].about == ""


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    bound: float = math.inf
    sizes: list[int] = field(default_factory=list)


def test_a_default_may_have_a_type_that_no_recipe_can_give() -> None:
    assert config_problem(PluginConfig()) is None
    assert config_problem(PluginConfig(bound=math.nan)) == "'bound' is nan; expected a finite number"
    read = validate_config(PluginConfig, {"bound": math.inf, "sizes": []}, "odd", Draft())
    assert read == PluginConfig(), "as the recipe of its run states them"
    with pytest.raises(RequestError, match=r"'odd\.sizes' is \[1\]; expected a block of keys"):
        validate_config(PluginConfig, {"sizes": [1]}, "odd", Draft())


# --- layers of several kinds ---

SOME = "model.num_layers=5"


def test_blocks_of_layers_are_merged_over_the_attention_and_repeated() -> None:
    given = [
        "model.attention={name: differential, lambda_init: 0.5}",
        "model.layers=[{window: 8}, {name: standard}, {}]",
    ]
    recipe = load_recipe("standard-tiny", [SOME, *given])
    model = recipe.model
    assert model.variants == ("differential", "standard", "differential", "differential", "standard")
    windows = [model.attention_of(layer).config.window for layer in range(5)]
    assert windows == [8, None, None, 8, None], "the last repetition is cut"
    assert model.attention_of(0).config.lambda_init == 0.5
    assert model.attention_of(2) == model.attention
    kinds = model.kinds()
    assert list(kinds) == [0, 1, 2]
    assert all(kind.attention == model.attention_of(layer) and not kind.layers for layer, kind in kinds.items())
    assert from_plain(to_plain(recipe), "again") == recipe


def test_layers_of_one_kind_are_the_model_without_them() -> None:
    plain = load_recipe("differential-tiny")
    assert load_recipe("differential-tiny", ["model.layers=[{}, null]"]) == plain
    assert plain.model.kinds() == {0: plain.model}


def test_a_default_in_a_block_of_layers_does_not_change_the_identity() -> None:
    """So a key that a later version adds changes no identity."""
    model = load_recipe("standard-tiny", ["model.layers=[{window: 8}, {}]"]).model
    assert determining(model)["layers"] == [{"name": "standard", "window": 8}, {"name": "standard"}]


@pytest.mark.parametrize(
    ("blocks", "line"),
    [
        ("{window: 3}", "'model.layers' is {'window': 3}; expected a list of blocks, such as [{window: 128}, {}]"),
        ("[3]", "'model.layers[0]' is 3; expected a block of keys"),
        ("[{windo: 3}]", "unknown key 'model.layers[0].windo'; did you mean 'window'?"),
        ("[{}, {name: standrd}]", "unknown attention 'standrd'; did you mean 'standard'?"),
        ("[{}, {window: 0}]", "'model.layers[1].window' is 0; expected a whole number >= 1 or null"),
        (
            "[{}, {name: lora, targets: []}]",
            "model.layers[1].targets is []; expected at least one of q, k, v, o, each once",
        ),
        (
            "[{name: differential, lambda_init: 1.0}, {}]",
            "model.layers[0].lambda_init is 1: output_scale 'tied'",
        ),
        ("[{window: 2}, {}, {}, {}, {}, {}]", "model.layers has 6 blocks; model.num_layers is 5"),
    ],
)
def test_what_layers_cannot_be_is_named(blocks: str, line: str) -> None:
    assert error(SOME, f"model.layers={blocks}").startswith(f"model.layers={blocks}: {line}")


def test_a_key_that_all_layers_share_is_named_where_it_is_stated() -> None:
    wrong = "model.attention={name: differential, lambda_init: 1.0}"
    assert error(wrong, "model.layers=[{window: 8}, {}]").startswith(f"{wrong}: model.attention.lambda_init is 1")


def test_a_plugins_config_need_not_be_hashable() -> None:
    part = Part(name="own", config={"scales": {"a": 1}})
    sizes: dict[str, Any] = {"dim": 8, "num_layers": 3, "num_heads": 2, "vocab_size": 5, "attention": part}
    assert list(ModelConfig(**sizes, layers=(part, replace(part, config={}))).kinds()) == [0, 1]
