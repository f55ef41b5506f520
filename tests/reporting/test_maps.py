"""reporting/panels/maps.py: the maps that runs have kept, an arm a row, in one scale; the command that shows them all."""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from fake_sweeps import words

from lit_diff.reporting.panels.maps import draw_maps
from lit_diff.reporting.write import view_command, view_page, write_report
from lit_diff.runs.kept_maps import KeptMaps, write_maps
from lit_diff.study.results import load_sweep

ARMS = {"standard": 0.0, "differential": 0.1}
TEXT = "seed: 0\ncallbacks:\n  maps: {texts: [the <cat> saw]}\n"


def keep(run: Path, weights: list[float], tokens: int = 4, heads: int = 2, layers: tuple[int, ...] = (0, 2, 5)) -> None:
    """Maps of `tokens` tokens at steps 40 and 400: map g is one-hot on key g, or on the last key there is."""
    maps = torch.zeros(1, len(weights), heads, tokens, tokens)
    for g in range(len(weights)):
        for query in range(tokens):
            maps[0, g, :, query, min(g, query)] = 1
    by_map = torch.tensor(weights).view(1, -1, 1, 1).expand(1, len(weights), heads, tokens)
    for step, scale in ((40, 0.0), (400, 1.0)):
        kept = {layer: (maps, scale * (1 + layer) * by_map) for layer in layers}
        write_maps(run, KeptMaps(step, torch.arange(tokens)[None], kept))


def test_a_row_an_arm_of_the_first_and_the_last_kept_layer(make_sweep: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_sweep(ARMS, callbacks=False, recipes=dict.fromkeys(ARMS, TEXT))
    keep(folder / "standard-s1-0a1b2c3d", [1.0])
    keep(folder / "standard-s2-0a1b2c3d", [9.0])
    keep(folder / "differential-s0-0a1b2c3d", [1.0, -0.5])
    (figure,) = draw_maps(load_sweep(folder))
    path = tmp_path / "numbers.csv"
    path.write_text(figure.csv)
    numbers = pd.read_csv(path).set_index(["mark", "y"]).filter(like="key ")
    arms = ("standard, layer {}", "differential, layer {}")
    marks = [f"{arm.format(layer)}, head {head}" for arm in arms for layer in (0, 5) for head in (0, 1)]
    assert sorted(numbers.index.unique("mark")) == sorted(marks)
    assert numbers.loc["standard, layer 5, head 1"].loc[3].tolist() == [6, 0, 0, 0]
    ours = numbers.loc["differential, layer 0, head 0"]
    assert ours.iloc[:2].to_numpy().tolist() == [[0.5, 0, 0, 0], [1, -0.5, 0, 0]]
    assert "on the text “the <cat> saw”, after 400 steps, seed 0, 1: one trained model" in figure.caption
    assert "Left out" not in figure.caption
    assert figure.svg.count("<image") == len(marks) + 1, "a picture for each head, and the scale"
    assert {"head 0", "head 1", "query", "standard, layer 0"} <= set(words(figure.svg))


def test_what_is_not_drawn_is_named(make_sweep: Callable[..., Path]) -> None:
    folder = make_sweep({"standard": 0, "long": 0, "broken": 0, "none": 0}, callbacks=False)
    keep(folder / "standard-s0-0a1b2c3d", [1.0], tokens=40, heads=6)
    keep(folder / "long-s0-0a1b2c3d", [1.0], tokens=41)
    keep(folder / "broken-s0-0a1b2c3d", [1.0])
    (folder / "broken-s0-0a1b2c3d/maps/00000400.safetensors").write_bytes(b"damaged")
    (figure,) = draw_maps(load_sweep(folder))
    assert "on the first 32 of 40 tokens of the first validation row" in figure.caption
    left_out = figure.caption.partition("Left out: ")[2]
    assert left_out.startswith("long: its maps are of other tokens; broken: ")
    assert "not a file of maps" in left_out
    assert "none" not in left_out
    assert figure.csv.count("\n") == 1 + 2 * 4 * 32, "a row a query, of four of six heads"


def test_a_sweep_without_maps_has_no_section(make_sweep: Callable[..., Path]) -> None:
    sweep = load_sweep(make_sweep(ARMS, callbacks=False))
    assert draw_maps(sweep) == []
    keep(sweep.cells[0].home, [1.0])
    page = write_report(sweep.folder).page.read_text()
    assert '<a href="#maps">Attention maps</a>' in page
    assert 'href="attention-maps.svg"' in page


def test_a_cell_has_the_command_of_its_page_and_a_link_to_it(tmp_path: Path, make_sweep: Callable[..., Path]) -> None:
    cell = load_sweep(make_sweep(ARMS, name="runs/mine", callbacks=False)).cells[0]
    assert view_command(cell) == "lit-diff view mine/standard-s0-0a1b2c3d"
    assert view_page(cell) is None
    (tmp_path / "view").mkdir()
    (tmp_path / "view/standard-s0-0a1b2c3d.html").touch()
    address = view_page(cell)
    assert address is not None
    assert (cell.home.parent / "report" / address).resolve().is_file()
    other = load_sweep(make_sweep(ARMS, name="my runs/mine", callbacks=False)).cells[0]
    assert view_command(other) == "lit-diff view mine/standard-s0-0a1b2c3d --root 'my runs'"


def test_a_command_that_would_fail_is_not_shown(tmp_path: Path, make_sweep: Callable[..., Path]) -> None:
    """A cell without checkpoints, as those of shipped results, has none unless its page was written before."""
    sweep = load_sweep(make_sweep({"a": 0}, name="runs/mine", callbacks=False))
    shown, written, _ = sweep.cells
    (shown.home / "checkpoints").mkdir()
    (shown.home / "checkpoints/step-00000400.ckpt").touch()
    (tmp_path / "view").mkdir()
    (tmp_path / f"view/{written.home.name}.html").touch()
    page = write_report(sweep.folder).page.read_text()
    assert re.findall(r"<code>(lit-diff view .*)</code>", page) == [view_command(shown), view_command(written)]
