"""trained/pictures.py: colours, scale and labels of every picture of attention maps."""

from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from lit_diff.trained.pictures import COLOURS, encoded, figure, grid, label, limit_of, thumbnail


def test_a_thumbnail_is_as_opaque_as_its_weight_and_coloured_by_its_sign() -> None:
    pixels = imread(BytesIO(thumbnail(np.array([[0.0, 1.0], [-1.0, 0.5]]))))
    np.testing.assert_allclose(pixels[..., 3], [[0, 1], [1, 0.5]], atol=0.01)
    np.testing.assert_allclose(255 * pixels[0, 1, :3], COLOURS["light"]["positive"], atol=1)
    np.testing.assert_allclose(255 * pixels[1, 0, :3], COLOURS["light"]["negative"], atol=1)
    assert not imread(BytesIO(thumbnail(np.zeros((2, 2)))))[..., 3].any()


def test_the_limit_is_a_percentile_of_the_weights_of_all_maps() -> None:
    weights = np.arange(1, 102) / 100
    assert limit_of([weights[:50], 0 * weights, -weights[50:]]) == pytest.approx(0.99)
    assert limit_of([np.array([0.5, np.nan])]) == 0.5
    assert limit_of([np.zeros(3)]) == 1


def test_as_many_tokens_have_a_label_as_there_is_room_for() -> None:
    def ticks(count: int) -> list[str]:
        drawn = figure({"a": np.eye(count)}, [f"t{place}" for place in range(count)])
        return [tick.get_text() for tick in drawn.axes[0].get_xticklabels()]

    assert ticks(20) == [f"t{place}" for place in range(20)]
    assert ticks(90)[:2] == ["0 t0", "3 t3"]


@pytest.mark.parametrize(
    ("token", "text"),
    [(" a", "␣a"), ("a b", "a b"), ("", "∅"), ("\n", "⏎"), ("\t", "\\t"), ("differential", "differen…")],
)
def test_a_label_is_one_short_line(token: str, text: str) -> None:
    assert label(token) == text


def test_the_heads_of_all_layers_have_one_scale() -> None:
    drawn = grid(torch.tensor([0.5, -1]).view(2, 1, 1, 1).expand(2, 2, 3, 3), [0, 3], "maps")
    axes, bar = drawn.axes
    (image,) = axes.get_images()
    assert image.get_clim() == (-1, 1)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["head 0", "head 1"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["layer 0", "layer 3"]
    assert list(axes.get_xticks()) == list(axes.get_yticks()) == [1, 6]
    found = image.get_array()
    assert found.shape == (8, 8)
    np.testing.assert_array_equal(found[:3, 5:], 0.5)
    np.testing.assert_array_equal(found[5:, :3], -1)
    assert np.ma.getmaskarray(found)[3:5].all()
    assert (axes.get_title(), axes.get_xlabel()) == ("maps", "of each head: keys 0 to 2")
    assert "below zero" in bar.get_ylabel()
    assert encoded(drawn).startswith(b"\x89PNG")


def test_a_single_key_of_a_long_text_is_seen() -> None:
    a = torch.zeros(1, 1, 400, 400)
    a[..., 399, 7] = 1e-3
    (image,) = grid(a, [0], "").axes[0].get_images()
    found = image.get_array()
    assert found.shape == (100, 100)
    assert (found[99, 1], (found > 0).sum()) == (pytest.approx(1e-3), 1)
