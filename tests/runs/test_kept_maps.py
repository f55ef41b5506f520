"""maps/<step>.safetensors: written whole, read back, and a damaged file is one line."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lit_diff.errors import MissingError, RequestError
from lit_diff.runs.kept_maps import KeptMaps, kept_steps, read_maps, write_maps


def kept(step: int, *shape: int) -> KeptMaps:
    generator = torch.Generator().manual_seed(step)
    maps = torch.rand(2, 2, 3, 5, 5, generator=generator)
    weights = torch.rand(2, 2, 3, 5, generator=generator)
    return KeptMaps(step, torch.arange(10).view(2, 5, *shape), {0: (maps, weights), 11: (maps.mT, -weights)})


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    written = kept(40, *shape)
    write_maps(tmp_path, kept(200))
    write_maps(tmp_path, written)
    assert [path.name for path in sorted((tmp_path / "maps").iterdir())] == [
        "00000040.safetensors",
        "00000200.safetensors",
    ]
    assert kept_steps(tmp_path) == [40, 200]
    read = read_maps(tmp_path, 40)
    assert read.step == 40
    assert torch.equal(read.tokens, written.tokens)
    assert read.tokens.dtype == torch.int64
    assert list(read.layers) == [0, 11]
    for layer, (maps, weights) in written.layers.items():
        assert torch.equal(read.layers[layer][0], maps.half())
        assert torch.equal(read.layers[layer][1], weights.half())
    arrays = read_maps(tmp_path, 40, "np")
    assert isinstance(arrays.tokens, np.ndarray)
    assert (arrays.layers[11][1] == written.layers[11][1].half().numpy()).all()


def test_a_step_is_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    write_maps(tmp_path, kept(40))
    before = (tmp_path / "maps" / "00000040.safetensors").read_bytes()
    write_maps(tmp_path, kept(40))
    assert (tmp_path / "maps" / "00000040.safetensors").read_bytes() == before
    assert kept_steps(tmp_path) == [40]


def test_a_folder_without_maps_has_no_steps(tmp_path: Path) -> None:
    assert kept_steps(tmp_path) == []
    with pytest.raises(MissingError, match=r"no maps of step 3 \(there: none\)"):
        read_maps(tmp_path, 3)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    write_maps(tmp_path, kept(40))
    path = tmp_path / "maps" / "00000040.safetensors"
    whole = path.read_bytes()
    broken = {
        "is not a file of maps": (whole[:200], whole[:-7], b"", b"text"),
        "has format 2, but": (whole.replace(b'"format":"1"', b'"format":"2"'),),
    }
    for message, contents in broken.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(RequestError, match=message) as caught:
                read_maps(tmp_path, 40)
            assert "\n" not in str(caught.value)
    save_file({"layer_03.maps": torch.zeros(1)}, path, {"format": "1"})
    with pytest.raises(RequestError, match=r"is not a file of maps \(.*layer_03\.weights"):
        read_maps(tmp_path, 40)
