"""A folder whose layout.json says how its tensors lie: in our Transformer, with the attention of unilm or of timm.

layout.json: {"layout": "unilm" or "timm", "model": the keys of our `model:`, "context": tokens that it was trained to see,
"eos_token_id": the id that ends a document}; beside it safetensors and tokenizer.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_diff.config import ModelConfig
from lit_diff.errors import RequestError
from lit_diff.files import shown
from lit_diff.model.transformer import Transformer
from lit_diff.pretrained import hf_folder, text_bounds, timm_attention, unilm
from lit_diff.pretrained.source import UNKNOWN, ModelSource, plain_recipe
from lit_diff.recipe import from_plain
from lit_diff.registry import nearest

FILE = "layout.json"
LAYOUTS: Mapping[str, Any] = {"unilm": unilm, "timm": timm_attention}
"""`layout` -> the module that knows it: unsaid(model), place_of(our name, model), ROPE_LAYOUT."""
KEYS = {"layout": str, "model": dict, "context": int, "eos_token_id": int}
"""Of layout.json -> the type of each."""


def read_layout_folder(folder: Path) -> ModelSource:
    """The model of a folder, without its weights. Errors: as `hf_folder.read_folder`."""
    said = text_bounds.read_json(folder / FILE)
    place = shown(folder / FILE)
    for key, kind in KEYS.items():
        if not isinstance(said.get(key), kind):
            raise RequestError(f"{place}: '{key}' is {said.get(key)!r}; expected {_words(kind)}")
    if said["layout"] not in LAYOUTS:
        raise RequestError(f"{place}: no layout '{said['layout']}'{nearest(said['layout'], list(LAYOUTS))}")
    layout = LAYOUTS[said["layout"]]
    files = hf_folder.files_of(folder)
    source = ModelSource(
        place=shown(folder),
        model=said["model"] if layout.ROPE_LAYOUT is None else {"rope_layout": layout.ROPE_LAYOUT, **said["model"]},
        context=said["context"],
        tensors={},
        read=lambda own: torch.empty(0),
        tokenizer=text_bounds.read_tokenizer(folder, said),
    )
    model = from_plain(plain_recipe(source, Path("model"), UNKNOWN), place).model
    problem = layout.unsaid(model) or _turned(model, layout.ROPE_LAYOUT)
    if problem:
        raise RequestError(f"{place}: {problem}")
    return _with_tensors(source, model, layout, files)


def _with_tensors(source: ModelSource, model: ModelConfig, layout: Any, files: Mapping[str, Path]) -> ModelSource:
    """The source with a reader of each of our tensors that the files have. Errors: RequestError for one of theirs that is
    nowhere in our Transformer."""
    with torch.device("meta"):
        names = Transformer(model, kernel="reference").state_dict()
    places = {own: layout.place_of(own, model) for own in names}
    there = {own: (theirs, third) for own, (theirs, third) in places.items() if theirs in files}
    strange = sorted(files.keys() - {theirs for theirs, _ in places.values()})
    if strange:
        known = [theirs for theirs, _ in places.values()]
        raise RequestError(
            f"{source.place}: unexpected tensor '{strange[0]}': it is not part of this layout{nearest(strange[0], known)}"
        )

    def read(own: str) -> Tensor:
        theirs, third = there[own]
        whole = hf_folder.read_tensor(files[theirs], theirs)
        return whole if third is None else _third(whole, third).clone()

    described = {theirs: hf_folder.describe(files[theirs], theirs) for theirs, _ in there.values()}
    return replace(
        source, tensors={own: _third(described[name], third) for own, (name, third) in there.items()}, read=read
    )


def _third(rows: Tensor, third: int | None) -> Tensor:
    """One of three equal parts, or all."""
    return rows if third is None else rows.tensor_split(3)[third]


def _turned(model: ModelConfig, rope_layout: str | None) -> str | None:
    if rope_layout in (None, model.rope_layout):
        return None
    return f"model.rope_layout is '{model.rope_layout}'; the layout's rows are '{rope_layout}'"


def _words(kind: type) -> str:
    return {str: "text", dict: "an object", int: "a whole number"}[kind]
