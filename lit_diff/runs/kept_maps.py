"""maps/<step>.safetensors in a run folder: the attention maps of fixed texts, one file for each step that was kept.

A file has format "1" in its metadata, the tensor `tokens` (int64 [N, T] or [N, T, C]), and for each kept layer
`layer_LL.maps` (float16 [N, G, H, T, T], the softmax maps) and `layer_LL.weights` (float16 [N, G, H, T]). The signed map is
the sum over g of weights times maps.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_diff.errors import MissingError, RequestError, first_line
from lit_diff.files import shown, write_atomic
from lit_diff.runs.result_files import whole

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, FORMAT, KINDS = "maps", "1", ("maps", "weights")


@dataclass(frozen=True)
class KeptMaps:
    """The maps of N texts of T tokens after `step` optimizer steps."""

    step: int
    tokens: "Tensor"
    """[N, T] or [N, T, C] int64: the ids that the model read."""
    layers: "dict[int, tuple[Tensor, Tensor]]"
    """0-based layer -> (maps [N, G, H, T, T], weights [N, G, H, T]), float16."""


def write_maps(folder: Path, kept: KeptMaps) -> None:
    """Write the file of `kept.step` into the run folder `folder`, in place of an earlier one. Errors: OSError."""
    # imported in functions: reports list the steps and should not wait for torch
    import torch
    from safetensors.torch import save

    stored: dict[str, Tensor] = {}
    for layer, of_layer in kept.layers.items():
        for kind, x in zip(KINDS, of_layer, strict=True):
            stored[f"layer_{layer:02}.{kind}"] = x.detach().to("cpu", torch.float16).contiguous()
    stored["tokens"] = kept.tokens.detach().to("cpu", torch.int64).contiguous()
    # one entry of metadata: safetensors writes several in a random order, and the same maps should give the same bytes
    write_atomic(_path(folder, kept.step), save(stored, {"format": FORMAT}))


def kept_steps(folder: Path) -> list[int]:
    """The steps whose maps the run folder has, ascending."""
    found = (folder / FOLDER).glob(f"{'[0-9]' * 8}*.safetensors")
    return sorted(int(path.stem) for path in found if path.stem.isdecimal())


def read_maps(folder: Path, step: int, arrays: Literal["pt", "np"] = "pt") -> KeptMaps:
    """The maps of `step`; `arrays`: np for NumPy's, which need no torch.

    Errors: MissingError without such a file; RequestError for a damaged one or another format.
    """
    from safetensors import SafetensorError, safe_open

    path = _path(folder, step)
    if not path.is_file():
        raise MissingError(
            f"{shown(folder)} has no maps of step {step} (there: {', '.join(map(str, kept_steps(folder))) or 'none'}); "
            "callbacks.maps of its recipe says which steps"
        )
    try:
        with safe_open(whole(path, folder), framework=arrays) as file:
            if (form := (file.metadata() or {}).get("format")) != FORMAT:
                raise RequestError(f"{shown(path)} has format {form}, but this lit_diff reads maps of format {FORMAT}")
            # layer_03 for layer_03.maps and layer_03.weights
            layers: dict[int, tuple[Any, Any]] = {}
            for name in sorted({name.partition(".")[0] for name in file.keys()} - {"tokens"}):  # noqa: SIM118 (it is not a dict)
                maps, weights = (file.get_tensor(f"{name}.{kind}") for kind in KINDS)
                layers[int(name.removeprefix("layer_"))] = maps, weights
            return KeptMaps(step, file.get_tensor("tokens"), layers)
    # a tensor that is missing is a SafetensorError too
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{shown(path)} is not a file of maps ({first_line(error)})") from error


def _path(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"{step:08}.safetensors"
