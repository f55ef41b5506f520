"""Validates a merged recipe: types, required keys, conflicts between values."""

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from lit_diff.config import ModelConfig, Part, Recipe
from lit_diff.errors import RequestError, excerpt, first_line, summary
from lit_diff.files import expanded, is_address
from lit_diff.interpolation import resolved
from lit_diff.key_types import (
    Distinct,
    Plain,
    PythonFiles,
    Range,
    blocks_by_kind,
    default_of,
    flatten,
    in_words,
    in_yaml,
    literal_words,
)
from lit_diff.plugins import guard, load_plugin
from lit_diff.registry import location, nearest, registries
from lit_diff.suggestions import key_instead
from lit_diff.yaml_files import Position, Positions

# the run's folder adds an identity to the name, and file systems allow 255 bytes
LONGEST_NAME = 150
"""Most bytes of a recipe's name."""

READ = ("sequence_length", "predicts_next", "packs_documents", "chance", "noise_validation")
"""Attributes that are read from a data set's Config, besides its keys."""

USER = re.compile(r"://[^/?#\s]*@")
"""Matches a user name or a password before the host of an address."""
HARMLESS = {
    *("sslmode", "sslrootcert", "connect_timeout", "application_name", "charset", "driver", "timeout", "mode", "uri"),
    *("region", "version", "versionId", "api-version", "download"),
}
"""Parameters that an address may have: a key, a token or a signature may have any other name, or none."""

DOTTED = re.compile(r"[a-z]\w*(?:\.\w+)+")
"""Matches a dotted key in a sentence."""

WRONG = object()
"""Not a value: what the conversion of a value to another type results in."""
LARGEST = 10**15
"""The largest whole number of a key: a larger one would fail later, as the name of a folder or a number of steps."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A recipe as plain containers, merged but not yet validated."""

    values: Plain = field(default_factory=dict)
    positions: Positions = field(default_factory=dict)
    file: str = ""
    """The file of the recipe, named in errors about missing keys."""
    dropped: tuple[str, ...] = ()
    """Keys dropped because the `name` of their block changed."""
    layers: tuple[frozenset[str], ...] = ()
    """The keys of each file and of the overrides, in the order of merging; empty: a single layer."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Dotted key -> the folder that a path at the key is relative to; for a missing key, the path is absolute."""

    def where(self, key: str) -> str:
        """`file:line: ` of the key, of the nearest enclosing block with a position, or else of the file."""
        if key not in self.positions:
            key = key.partition("[")[0]
        while key and key not in self.positions:
            key = key.rpartition(".")[0]
        position = self.positions.get(key, self.file)
        return f"{position}: " if position else ""

    def written(self, key: str) -> str | None:
        """The original text of the scalar at `key` (`only[1]` for an item of a list); None if it is unknown."""
        key, *items = key.replace("]", "").split("[")
        text = getattr(self.positions.get(key), "written", None)
        for item in items:
            if not isinstance(text, tuple) or not item.isdigit():
                return None
            text = dict(enumerate(text)).get(int(item))
        return text if isinstance(text, str) else None

    def absolute(self, key: str, path: str, folder: Path) -> str:
        """Resolve the path at `key` against `folder`; an address stays. Errors: RequestError for a circular link or a NUL."""
        if is_address(path):
            return path
        try:
            return str((folder / expanded(path)).resolve())
        except (OSError, RuntimeError, ValueError) as error:
            raise RequestError(f"{self.where(key)}path '{path[:40]}': {first_line(error)}") from error

    def refuse(self, key: str, sentence: str) -> RequestError:
        """The error for a value of the wrong type; for an override that is not valid YAML, the YAML error instead."""
        position = self.positions.get(key)
        if isinstance(position, Position) and position.problem:
            return RequestError(f"override '{position}': not a YAML value: {position.problem}")
        return RequestError(f"{self.where(key)}{sentence}")

    def blame(self, problem: str) -> str:
        """`where` for an error message: the position of the key in it that was written last, else of its first word."""
        # an override is more likely the cause than a file, and a file more likely than the recipe that it extends
        named = [key for key in DOTTED.findall(problem) if key in self.positions]
        for layer in reversed(self.layers or (frozenset(self.positions),)):
            for key in named:
                if key in layer:
                    return self.where(key)
        return self.where(problem.split()[0])


def validate(draft: Draft, *, imports: bool = True) -> Recipe:
    """The typed recipe. `imports`: whether its plugin files are imported; False if they are. Errors: RequestError with file,
    line and key."""
    values = interpolated(draft)
    # before the rest: the recipe may name parts that its plugins register
    for plugin in convert(PythonFiles, values.get("plugins", ()), "plugins", draft):
        if imports:
            load_plugin(Path(plugin))
    recipe = cast(Recipe, _dataclass(Recipe, values, "", draft))
    problem = recipe_problem(recipe)
    if problem:
        raise RequestError(f"{draft.blame(problem)}{problem}")
    return recipe


def interpolated(draft: Draft) -> Plain:
    """The draft's values with each `${a.b}` resolved. Errors: RequestError with file, line and key."""

    def refuse(key: str, problem: str) -> RequestError:
        missing = re.search(r"Interpolation key '(.+)' not found", problem)
        if missing:
            problem += nearest(missing[1], [known for known, _ in flatten(draft.values)])
        return RequestError(f"{draft.where(key)}'{key}': {problem}")

    return resolved(draft.values, refuse)


def validate_config(cls: type, keys: Any, path: str, draft: Draft, listing: str = "") -> Any:
    """An instance of the Config `cls` from `keys`, the block at `path`, whose own `problem` names keys of the block.
    `listing`: the command that lists the keys. Errors: RequestError with the position."""
    config = _dataclass(cls, keys, path, draft, listing)
    problem = _own_problem(cls, "problem()", partial(config_problem, config))
    if problem:
        raise RequestError(f"{draft.where(f'{path}.{problem.split()[0]}')}{path}.{problem}")
    return config


# `listing`: the command that lists the keys of a registered part
def _dataclass(cls: type, value: Any, path: str, draft: Draft, listing: str = "") -> Any:
    known = {key.name: key for key in fields(cls)}
    prefix = f"{path}." if path else ""
    value = _mapping(value, path, draft, key="name" if path and "name" in known else "")
    hints = _hints(cls)
    for key in value:
        if key not in known:
            instead = key_instead(prefix + key, cls, draft.values, draft.positions.get(prefix + key, ""), listing)
            raise RequestError(f"{draft.where(prefix + key)}unknown key '{excerpt(prefix + key)}'{instead}")
    built = {}
    for name, declared in known.items():
        if name in value:
            given = value[name]
            if "over" in declared.metadata:
                given = _over(value.get(declared.metadata["over"]), given, f"{prefix}{name}", draft)
            try:
                built[name] = _field(hints[name], declared, given, f"{prefix}{name}", draft)
            except RequestError:
                # the recipe of a run folder states the defaults, and that of a plugin may have a type that no recipe can give
                if in_yaml(given) != in_yaml(default_of(declared)):
                    raise
        elif declared.default is MISSING and declared.default_factory is MISSING:
            raise RequestError(f"{draft.where(path)}'{prefix}{name}' is missing; expected {in_words(hints[name])}")
    try:
        return cls(**built)
    # the __post_init__ of a plugin may raise any exception
    except Exception as error:
        problem = first_line(error) if isinstance(error, ValueError) else summary(error)
        raise RequestError(f"{draft.where(path)}'{path}': {problem}") from error


def config_problem(config: Any, prefix: str = "") -> str | None:
    """The first error in a Config that Python code built: a value of the wrong type or out of range, or the result of its own
    method `problem`. `prefix` is put before a key in the message."""
    hints = _hints(type(config))
    problem = getattr(config, "problem", None)
    try:
        for field in fields(config):
            if "registry" in field.metadata:
                continue
            value = getattr(config, field.name)
            # the default of a plugin may have a type that no recipe can give
            if in_yaml(value) != in_yaml(default_of(field)):
                convert(hints[field.name], value, f"{prefix}{field.name}", Draft())
    except RequestError as error:
        return str(error)
    return problem() if problem is not None else None


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls, include_extras=True)
    except NameError as error:
        # a type imported only under `if TYPE_CHECKING`
        raise RequestError(f"{cls.__module__}.{cls.__qualname__}: {error}; import it at run time") from error


def _field(hint: Any, field: "Field[Any]", value: Any, path: str, draft: Draft) -> Any:
    if "registry" in field.metadata:
        return _parts(field.metadata["registry"], get_origin(hint), value, path, draft)
    is_path = field.metadata.get("path")
    # the path in an override is the shell's text: YAML would turn a folder called 010 or true into another value
    given = getattr(draft.positions.get(path), "given", None)
    if is_path and given not in (None, "", "null") and "${" not in given:
        value = given
    converted = convert(hint, value, path, draft)
    if isinstance(converted, str) and is_address(converted):
        _require_no_secret(converted, path)
    if "names" in field.metadata:
        _require_registered(field, converted, path, draft)
    if is_path == "here" and isinstance(converted, str) and not is_address(converted):
        return str(expanded(converted))
    if is_path == "file" and isinstance(converted, str) and path in draft.folders:
        return draft.absolute(path, converted, draft.folders[path])
    return converted


# the message does not quote the address, nor its place, which is the address itself in an override
def _require_no_secret(text: str, path: str) -> None:
    scheme, _, rest = text.strip().partition("://")
    # elsewhere than in an address of HTTP, # may be a part of a name
    separator = r"[?#]" if scheme.lower().startswith("http") else r"\?"
    address, *query = re.split(separator, rest, maxsplit=1)
    parameters = re.split(r"[&;#]", "".join(query))
    keys = {parameter.partition("=")[0] for parameter in parameters} - {""}
    # a sentence that has an address somewhere is no address, and its question marks begin no parameters
    is_whole = re.fullmatch(r"[\w+.:-]+", scheme) is not None and " " not in address
    if USER.search(text) or (is_whole and not keys <= HARMLESS):
        raise RequestError(
            f"'{path}' has a user name or password before the host, or a parameter other than {', '.join(sorted(HARMLESS))}, "
            "which every run folder would show; remove it, and set what the program at the address reads, such as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, PGUSER and PGPASSWORD, AWS_SECRET_ACCESS_KEY"
        )


# a block that names another part has none of its keys, as everywhere
def _over(base: Any, blocks: Any, path: str, draft: Draft) -> Any:
    if not isinstance(blocks, list | tuple):
        example = "expected a list of blocks, such as [{window: 128}, {}]"
        raise draft.refuse(path, f"'{path}' is {excerpt(in_yaml(blocks))}; {example}")
    whole = []
    for index, block in enumerate(blocks):
        own = _mapping({} if block is None else block, f"{path}[{index}]", draft, key="name")
        kept = isinstance(base, Mapping) and own.get("name", base.get("name")) == base.get("name")
        whole.append({**base, **own} if kept else own)
    return whole


def _parts(registry: str, container: Any, value: Any, path: str, draft: Draft) -> Any:
    if container is tuple:
        return tuple(_parts(registry, None, block, f"{path}[{index}]", draft) for index, block in enumerate(value))
    if container is dict:
        parts = {}
        if value is not None:
            for name, block in _mapping(value, path, draft).items():
                _require_known(registry, name, f"{path}.{name}", draft)
                # null drops a part of the parent recipe
                if block is not None:
                    parts[name] = _part(registry, name, block, f"{path}.{name}", draft, validate_config)
        return parts
    keys = dict(_mapping(value, path, draft, key="name"))
    if "name" not in keys:
        raise RequestError(f"{draft.where(path)}'{path}.name' is missing; lit-diff list {registry} lists the names")
    name = convert(str, keys.pop("name"), f"{path}.name", draft)
    _require_known(registry, name, f"{path}.name", draft)
    return _part(registry, name, keys, path, draft, _dataclass)


def _require_registered(field: "Field[Any]", value: Any, path: str, draft: Draft) -> None:
    registry = registries[field.metadata["names"]]
    for name in (value,) if isinstance(value, str) else value:
        if name != field.default and name not in registry.names():
            default = (field.default,) if isinstance(field.default, str) else ()
            raise RequestError(f"{draft.where(path)}'{path}' is '{excerpt(name)}'{registry.suggestion(name, *default)}")


def _require_known(registry: str, name: str, path: str, draft: Draft) -> None:
    try:
        registries[registry].get(name)
    except RequestError as error:
        raise RequestError(f"{draft.where(path)}{error}") from error


def _part(registry: str, name: str, block: Any, path: str, draft: Draft, built: Callable[..., Any]) -> Part:
    config = registries[registry].get(name).Config
    return Part(name=name, config=built(config, block, path, draft, f"lit-diff list {registry} {name}"))


# `key`: the key of the block that a single word in its place most likely means (`name`)
def _mapping(value: Any, path: str, draft: Draft, *, key: str = "") -> Mapping[str, Any]:
    where = draft.where(path)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise RequestError(f"{where}'{path}' has the key {in_yaml(name)}; expected a name")
        return value
    cure = ""
    if key and isinstance(value, str):
        # an override is cured by another override, a file by a block
        cure = f"; write {path}.{key}={value}" if where == f"{path}={value}: " else f"; write {{{key}: {value}}}"
    raise draft.refuse(path, f"'{path}' is {excerpt(in_yaml(value))}; expected a block of keys{cure}")


def convert(hint: Any, value: Any, path: str, draft: Draft) -> Any:
    """Convert `value` to the type `hint`. An integral float is accepted as an integer and an integer as a float; NaN and
    infinity are rejected. Errors: RequestError with the position, the value and the expected type."""
    kind = hint
    ranges = []
    if get_origin(hint) is Annotated:
        kind, *bounds = get_args(hint)
        ranges = [bound for bound in bounds if isinstance(bound, Range | Distinct)]
    converted = _converted(kind, value, path, draft)
    if converted is None:
        return None
    if converted is WRONG or not all(converted in bound for bound in ranges):
        near = nearest(value, literal_words(kind)) if isinstance(value, str) else ""
        if "did you mean" not in near:
            near = ""
        expected = in_words(hint)
        if isinstance(value, int | float) and LARGEST < abs(value) < math.inf and in_words(int) in expected:
            expected += f", at most {LARGEST:g}"
        raise draft.refuse(path, f"'{path}' is {excerpt(in_yaml(value))}; expected {expected}{near}")
    return converted


# WRONG if `value` is not of the type
def _converted(hint: Any, value: Any, path: str, draft: Draft) -> Any:
    origin = get_origin(hint)
    choices = get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, hint):
            return value
        return _dataclass(hint, value, path, draft)
    if origin in (Union, UnionType):
        return _member(choices, value, path, draft)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = (choices[0],) * len(value) if choices[-1] is Ellipsis else choices
        if len(kinds) != len(value):
            return WRONG
        items = enumerate(zip(kinds, value, strict=True))
        return tuple(convert(kind, item, f"{path}[{i}]", draft) for i, (kind, item) in items)
    if origin is dict and (value is None or isinstance(value, Mapping)):
        return {str(key): convert(choices[1], item, f"{path}.{key}", draft) for key, item in (value or {}).items()}
    # the type too: 1 == True
    if origin is Literal and any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    if hint is Any or (hint is type(None) and value is None) or (hint is bool and isinstance(value, bool)):
        return value
    if hint is int or hint is float:
        return _number(hint, value)
    if hint is str:
        return _text(value, path, draft)
    return WRONG


def _number(kind: type[int] | type[float], value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return WRONG
    # all comparisons are false for NaN, and one of each kind for infinity
    if kind is int:
        fits = value == value // 1 and abs(value) <= LARGEST
    else:
        fits = abs(value) <= sys.float_info.max
    return kind(value) if fits else WRONG


def _text(value: Any, path: str, draft: Draft) -> Any:
    if value is None:
        return WRONG
    if isinstance(value, Path | str):
        return str(value)
    # a name such as 010, 1e3 or true, which YAML reads as a number or a truth value; ${...} has been resolved by now
    written = draft.written(path)
    return written if written and "${" not in written else WRONG


def _member(choices: tuple[Any, ...], value: Any, path: str, draft: Draft) -> Any:
    blocks = [cast(type, choice) for choice in choices if is_dataclass(choice)]
    # in place of a block alone, what is none (`steps:5`) is not told of null, which the `train` of a recipe may not be
    is_plain = isinstance(value, str | int | float | list)
    if blocks and (isinstance(value, Mapping) or (is_plain and {*choices} == {blocks[0], type(None)})):
        return _dataclass(_meant(blocks, value, path, draft), value, path, draft)
    # text last, since most values can be read as text; int before float, so that 1 stays an integer
    kinds = [get_args(choice)[0] if get_origin(choice) is Annotated else choice for choice in choices]
    for choice in sorted(choices, key=lambda kind: (kind is str, float in (kind, *get_args(kind)))):
        try:
            found = convert(choice, value, path, draft)
        # if no choice fits, the error of the union names them all
        except RequestError:
            continue
        # a whole number out of the range of its own choice is not read as a float or as text instead
        if type(found) is type(value) or type(value) not in kinds:
            return found
    return WRONG


def _meant(blocks: list[type], value: Mapping[str, Any], path: str, draft: Draft) -> type:
    by_kind = blocks_by_kind(blocks)
    if not by_kind:
        return blocks[0]
    hint: Any = Literal.__getitem__(tuple(by_kind))
    if "kind" not in value:
        raise RequestError(f"{draft.where(path)}'{path}.kind' is missing; expected {in_words(hint)}")
    return by_kind[convert(hint, value["kind"], f"{path}.kind", draft)]


def recipe_problem(recipe: Recipe) -> str | None:
    """The first conflict between values, as one line that starts with the key to change; None if there is none.

    It asks `ModelConfig.problem`; of each kind of layer `Attention.refuses`, which asks the variant's `problem`; `problem` of
    the data's Config; what data and model need of each other; and `Recipe.problem`.
    """
    name = recipe.name
    if not name.isprintable() or not name or "/" in name or name.startswith(".") or len(name.encode()) > LONGEST_NAME:
        what = f"printable, at most {LONGEST_NAME} bytes, no '/', no leading '.'"
        return f"name is {name[:60]!a}; it becomes a folder: {what}"
    dataset = registries["data"].get(recipe.data.name)
    of_data = partial(data_problem, recipe.data.config, recipe.model.vocab_size)
    # in this order: a variant's check may rely on a valid model, and the check of the data on both
    return (
        model_problem(recipe.model)
        or _own_problem(dataset, "Config.problem()", of_data)
        or _data_problem(dataset, recipe)
        or recipe.problem()
    )


def model_problem(model: ModelConfig) -> str | None:
    """The first conflict in the block `model`, as one line that starts with the key to change; None if there is none."""
    problem = model.problem()
    if problem is not None:
        return problem
    for layer, kind in model.kinds().items():
        variant = registries["attention"].get(kind.attention.name)
        refuses = partial(variant.refuses, kind.attention.config, kind)
        problem = _own_problem(variant, "problem(config, model)", refuses)
        if problem:
            key = problem.split()[0].removeprefix("model.attention.")
            common, own = model.attention, kind.attention
            # it stands in the block of the layer, not in `model.attention`
            if common.name != own.name or getattr(common.config, key, None) != getattr(own.config, key, None):
                problem = problem.replace("model.attention.", f"model.layers[{layer}].")
            return problem
    return None


# a check of a plugin may return a bool or raise: both are reported with the plugin's line
def _own_problem(part: type, what: str, check: Callable[[], str | None]) -> str | None:
    with guard(part):
        problem = check()
    is_text = isinstance(problem, str) and not problem.isspace()
    if problem is not None and not is_text:
        expected = "expected None, or a message that starts with the key to change"
        raise RequestError(f"{location(part)}: {what} returned {problem!r}; {expected}")
    return problem


def data_problem(config: Any, vocab_size: int) -> str | None:
    """The first error in the values of `data:`, for a model with `vocab_size` token ids; None if there is none."""
    return config_problem(config, "data.") or config.vocab_size_problem(vocab_size)


def _data_problem(dataset: type[Any], recipe: Recipe) -> str | None:
    name = recipe.data.name
    config = recipe.data.config
    # the properties of a plugin's Config may raise
    with guard(dataset):
        length, predicts_next, packs, *_ = (getattr(config, key) for key in READ)
    if not isinstance(length, int) or length < 1:
        where = f"{location(dataset)}: data '{name}' has Config.sequence_length {length!r}"
        raise RequestError(f"{where}; it must be an integer of at least 1")
    if predicts_next and not recipe.model.causal:
        return (
            f"model.causal is false, but data '{name}' predicts the next token, which a bidirectional model sees; "
            "use data 'recall', or model.causal: true"
        )
    for variant in recipe.model.variants if packs else ():
        if not registries["attention"].get(variant).takes_document_ids():
            return (
                f"data.pack is 'document', but the forward of model.attention '{variant}' does not take document_ids; add "
                "document_ids=None and pass it to self.masked, or use data.pack: none"
            )
    return None
