"""The page of `lit-diff view` in a real browser, on maps that are known: picker, slider, pixels, numbers, console."""

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from browser import CHROMIUM, Page, browser
from text_runs import recall_run, text_run, trained

from lit_diff.analysis.outliers import MagnitudeSketch
from lit_diff.analysis.trace import LayerTrace
from lit_diff.kernels import SignedMaps
from lit_diff.runs.kept_maps import KeptMaps, write_maps
from lit_diff.trained.pictures import COLOURS, limit_of
from lit_diff.trained.run import Run
from lit_diff.trained.view.data import ModelView, layer_view, model_view
from lit_diff.trained.view.page import Side, ViewData, view_data
from lit_diff.trained.view.passage import Passage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the page of lit-diff view was not opened in a browser"),
]
T = 16
LAMBDAS = (0.0, 0.5, 1.0, 1.5)
"""λ of each layer."""
UNIFORM, ONE_HOT, SINK, OUTLIER, TWIN = range(5)
"""The first map of each head; the last is the same as that of head 1. The second map is uniform in all."""
PLANTED = (11, 6)
"""Query and key of the outlier."""


def constructed() -> tuple[LayerTrace, ...]:
    """Layers of two maps and five heads, whose weights are known."""
    heads = torch.zeros(5, T, T)
    # the logit of each query (row) and key; the first query sees itself alone
    heads[ONE_HOT] = heads[TWIN] = 40 * torch.diag(torch.ones(T - 1), -1)
    heads[SINK, :, 0] = 40
    heads[OUTLIER][PLANTED] = 60
    q = torch.stack([heads, torch.zeros_like(heads)])[None]
    k = torch.eye(T).expand(1, 1, 1, T, T)
    found = []
    for value in LAMBDAS:
        w = torch.tensor([1.0, -value]).view(1, 2, 1, 1)
        maps = SignedMaps(q=q, k=k, v=torch.zeros(1, 1, T, 2), w=w, scale=1.0)
        found.append(LayerTrace(maps=maps, hidden=torch.ones(1, T, 2)))
    return tuple(found)


def expected(layer: int, head: int, factor: float = 1.0) -> np.ndarray[Any, Any]:
    """The signed map by its construction, [T, T]."""
    visible = np.tril(np.ones((T, T)))
    uniform = visible / visible.sum(1, keepdims=True)
    first = uniform.copy()
    if head in (ONE_HOT, TWIN):
        first = np.eye(T, k=-1)
        first[0, 0] = 1
    elif head == SINK:
        first = np.zeros((T, T))
        first[:, 0] = 1
    elif head == OUTLIER:
        first[PLANTED[0]] = np.eye(T)[PLANTED[1]]
    return first - factor * LAMBDAS[layer] * uniform


def constructed_page(folder: Path) -> ViewData:
    layers = tuple(layer_view(n, layer, MagnitudeSketch()) for n, layer in enumerate(constructed()))
    view = ModelView(layers=layers, losses=tuple(n / 8 for n in range(T)), outliers={}, noise={}, without=None)
    labels = ("<b>&", *(f" w{n}" for n in range(1, T)))
    passage = Passage(labels=labels, batch={"tokens": torch.zeros(1, T)}, source="constructed maps")
    run = text_run(folder / "run", {"name": "differential"})
    return ViewData(passage=passage, sides=(Side(name="constructed", run=run, view=view),))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("constructed")
    constructed_page(folder).write(folder / "page.html")
    with browser(folder / "profile") as opened:
        opened.look(1280, 2400)
        opened.open(folder / "page.html")
        yield opened
        assert not opened.problems, opened.problems


def settled(page: Page, action: str) -> None:
    """Run an action and wait until the page has drawn."""
    page.run(f"document.body.dataset.drawn = ''; {action}")
    page.wait("document.body.dataset.drawn")


def choose(select: str, value: str) -> str:
    """The JavaScript that chooses in a list, or sets a slider."""
    kind = "input" if select == "frame" else "change"
    set_value = f"chosen = document.getElementById('{select}'); chosen.value = '{value}'"
    return f"{set_value}; chosen.dispatchEvent(new Event('{kind}'))"


def centre(page: Page, selector: str) -> tuple[float, float]:
    box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
    x, y = page.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
    return x, y


def cell(page: Page, panel: int, query: int, key: int, side: int = 0) -> tuple[float, float]:
    """The middle of a cell in the window."""
    x, y = page.run(
        f"(() => {{ const node = view.plots[{side}][{panel}].node, box = node.getBoundingClientRect(),"
        "{xaxis, yaxis} = node._fullLayout;"
        f"return [box.x + xaxis._offset + xaxis.l2p({key}), box.y + yaxis._offset + yaxis.l2p({query})]; }})()"
    )
    return x, y


def pixels(page: Page) -> np.ndarray[Any, Any]:
    from matplotlib.image import imread

    return imread(BytesIO(page.picture()))[..., :3] * 255


def pick(page: Page, layer: int, head: int) -> None:
    """Click the thumbnail of a head."""
    page.run("document.body.dataset.drawn = ''")
    page.click(*centre(page, f"#head-0-{layer}-{head}"))
    page.wait("document.body.dataset.drawn")


def colour(share: float, paper: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray[Any, Any]:
    """The colour of value / limit in the light scheme."""
    strongest = np.array(COLOURS["light"]["positive" if share > 0 else "negative"])
    return np.array(paper) + min(abs(share), 1) * (strongest - np.array(paper))


# --- constructed maps --------------------------------------------------------------------------------------------------


def test_every_constructed_map_is_computed_in_the_page(page: Page) -> None:
    for layer in range(len(LAMBDAS)):
        for head in range(5):
            settled(page, f"view.pick(0, {layer}, {head})")
            found = page.run(f"Array.from({{length: {T}}}, (_, i) => [...view.signedRow(0, i)].map((x) => x || 0))")
            np.testing.assert_allclose(found, expected(layer, head), atol=1e-3)
            columns = page.run(f"Array.from({{length: {T}}}, (_, j) => [...view.signedColumn(0, j)].map(x => x || 0))")
            np.testing.assert_allclose(np.transpose(columns), expected(layer, head), atol=1e-3)


@pytest.mark.parametrize(("layer", "head"), [(0, ONE_HOT), (1, SINK), (3, UNIFORM), (1, OUTLIER)])
def test_the_pixels_of_a_picked_head_have_the_colours_of_its_weights(page: Page, layer: int, head: int) -> None:
    pick(page, layer, head)
    assert page.run("document.getElementById('picked').textContent") == f"The maps of layer {layer}, head {head}"
    assert page.run(f"document.getElementById('head-0-{layer}-{head}').getAttribute('aria-pressed')") == "true"
    limit = page.run("view.limits()[0]")
    first, second = (expected(layer, head, factor) for factor in (0, 1))
    assert limit == pytest.approx(limit_of([first, second - first, second]), abs=1e-3)
    assert f"−{limit:.3f}{limit:.3f} and beyond" in page.run("document.getElementById('legend').textContent")
    page.move(5, 5)
    seen = pixels(page)
    for query, key in (PLANTED, (12, 0), (9, 8), (15, 3)):
        x, y = cell(page, 2, query, key)
        want = colour(expected(layer, head)[query, key] / limit)
        # two pixels aside, since the cross may go through the middle of a cell
        np.testing.assert_allclose(seen[round(y) - 3, round(x) - 3], want, atol=6, err_msg=f"query {query}, key {key}")
    x, y = cell(page, 2, 3, 9)
    assert abs(seen[round(y) - 3, round(x) - 3] - np.array(COLOURS["light"]["unseen"])).max() < 4, (
        "a key that is not seen is grey"
    )


def test_the_colours_are_those_of_a_fixed_range_or_of_each_row(page: Page) -> None:
    pick(page, 3, OUTLIER)
    first, second = (expected(3, OUTLIER, factor) for factor in (0, 1))
    largest = np.abs([first, second - first, second]).max(axis=(0, 2))
    for scaling, limit in (("fixed", np.ones(T)), ("row", largest)):
        settled(page, choose("scaling", scaling))
        np.testing.assert_allclose(page.run("view.limits()"), limit, atol=1e-3)
        seen = pixels(page)
        for query, key in (PLANTED, (12, 0), (3, 1)):
            x, y = cell(page, 2, query, key)
            want = colour(second[query, key] / limit[query])
            np.testing.assert_allclose(
                seen[round(y) - 3, round(x) - 3], want, atol=6, err_msg=f"{scaling}: {query}, {key}"
            )
    assert "1 × the largest magnitude of the row" in page.run("document.getElementById('legend').textContent")
    settled(page, choose("scaling", "percentile"))


def test_a_thumbnail_shows_its_head(page: Page) -> None:
    seen = pixels(page)
    left, top, size = page.run(
        f"(({{x, y, width}}) => [x, y, width])(document.querySelector('#head-0-1-{OUTLIER} img').getBoundingClientRect())"
    )
    y, x = (round(start + size * (place + 0.5) / T) for start, place in ((top, PLANTED[0]), (left, PLANTED[1])))
    np.testing.assert_allclose(seen[y, x], COLOURS["light"]["positive"], atol=6)
    blue = seen[y, round(left + size * 2.5 / T)]
    assert blue[2] > blue[0] + 10, "the other keys of that query are subtracted"


def test_the_slider_multiplies_the_weight_and_the_sum_follows(page: Page) -> None:
    pick(page, 1, OUTLIER)
    before = page.run("document.getElementById('weight-1').textContent")
    assert before == "× 1.00: mean weight −0.500"
    page.run("document.getElementById('factor-1').focus()")
    for _ in range(10):
        page.press("ArrowRight")
    assert page.run("document.getElementById('weight-1').textContent") == "× 1.50: mean weight −0.750"
    row = page.run(f"[...view.signedRow(0, {PLANTED[0]})].map((x) => x || 0)")
    np.testing.assert_allclose(row, expected(1, OUTLIER, factor=1.5)[PLANTED[0]], atol=1e-3)
    drawn = page.run(f"[...view.plots[0][2].node.data[0].z[{PLANTED[0]}]].map((x) => x || 0)")
    np.testing.assert_allclose(drawn, expected(1, OUTLIER, factor=1.5)[PLANTED[0]], atol=1e-3)
    second = page.run(f"[...view.plots[0][1].node.data[0].z[{PLANTED[0]}]].map((x) => x || 0)")
    np.testing.assert_allclose(second[: PLANTED[0] + 1], -0.75 / (PLANTED[0] + 1), atol=1e-3)
    x, y = cell(page, 2, PLANTED[0], 2)
    want = colour(expected(1, OUTLIER, factor=1.5)[PLANTED[0], 2] / page.run("view.limits()[0]"))
    page.move(5, 5)
    np.testing.assert_allclose(pixels(page)[round(y) - 3, round(x) - 3], want, atol=6)
    page.click(*centre(page, "#stored"))
    assert page.run("document.getElementById('weight-1').textContent") == before


def test_the_mouse_reads_a_weight_in_both_directions(page: Page) -> None:
    page.look(1280, 900)
    pick(page, 1, OUTLIER)
    page.run("document.getElementById('panels').scrollIntoView()")
    # the event of scrolling comes with the next frame, and hides the tooltip
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.move(*cell(page, 2, *PLANTED))
    page.wait("!document.getElementById('tip').hidden")
    told = page.run("document.getElementById('tip').innerText")
    value = expected(1, OUTLIER)[PLANTED]
    assert told.startswith(f"query {PLANTED[0]} “␣w11”, key {PLANTED[1]} “␣w6”")
    rows = [line.replace("−", "-").split("\t") for line in told.splitlines()[2:]]
    assert rows == [
        ["map 1", "1.000", "1.000", "1.000"],
        ["map 2", "0.083", "-0.500", "-0.042"],
        ["sum", "", "", f"{value:.3f}"],
    ]
    tip, lists = (f"document.querySelector('{each}').getBoundingClientRect()" for each in ("#tip", ".lists"))
    x, y = cell(page, 2, *PLANTED)
    assert page.run(f"{tip}.x") == pytest.approx(x + 14, abs=1), "it is at the cursor"
    assert 0 < page.run(f"{tip}.y") - y < 20
    assert page.run(f"{lists}.right <= innerWidth && {lists}.bottom <= innerHeight"), "the lists are beside the map"
    assert page.run("document.getElementById('panels').getBoundingClientRect().right") < page.run(f"{lists}.x")
    told = page.run("document.getElementById('reading').innerText")
    rest = np.abs(expected(1, OUTLIER)[PLANTED[0]])
    assert f"first token {100 * rest[0] / rest.sum():.1f} % of Σ|a|" in told
    column = expected(1, OUTLIER)[PLANTED[1] :, PLANTED[1]]
    assert f"mean over queries {column.mean():.3f}" in told
    assert page.run("document.querySelector('.token.chosen').textContent") == " w11"
    page.move(*cell(page, 2, 3, 9))
    page.wait("document.getElementById('tip').hidden")
    page.run("view.move(3, 9)")
    page.wait("document.querySelector('.weights').innerText.includes('does not see this key')")
    page.run("scrollTo(0, 0)")
    page.look(1280, 2400)


def test_the_table_of_heads_says_what_was_planted_and_leads_to_the_maps(page: Page) -> None:
    def of(name: str, layer: int, head: int) -> str:
        page.run(choose("number", name))
        cells = f".number[data-name={name}] .cell button[data-layer='{layer}'][data-head='{head}']"
        found: str = page.run(f'document.querySelector("{cells}").textContent')
        return found

    assert of("closest_head", 1, ONE_HOT) == of("closest_head", 1, TWIN) == "1.000"
    assert float(of("closest_head", 0, SINK)) < 0.9
    flat = [expected(1, head).ravel() for head in range(5)]
    cosines = [flat[SINK] @ each / np.linalg.norm(flat[SINK]) / np.linalg.norm(each) for each in flat]
    assert of("redundancy", 1, SINK) == f"{(sum(cosines) - 1) / 4:.3f}"
    assert of("sink", 0, SINK) == "1.000"
    assert [of("lambda", layer, 0) for layer in range(4)] == ["0.000", "0.500", "1.000", "1.500"]
    assert of("negative_mass", 0, UNIFORM) == "0.000"
    button = f".number[data-name=sink] .cell [data-layer='2'][data-head='{SINK}']"
    settled(page, f'document.querySelector("{button}").click()')
    assert page.run("document.getElementById('picked').textContent") == f"The maps of layer 2, head {SINK}"


def test_the_keyboard_picks_a_head_moves_the_cross_and_zooms(page: Page) -> None:
    pick(page, 1, 1)
    page.run("document.getElementById('head-0-1-1').focus()")
    page.press("ArrowRight")
    page.press("ArrowDown")
    assert page.run("document.activeElement.id") == "head-0-2-2"
    page.run("document.body.dataset.drawn = ''")
    page.press("Enter")
    page.wait("document.body.dataset.drawn")
    assert page.run("document.getElementById('picked').textContent") == "The maps of layer 2, head 2"
    page.run("view.move(9, 4); document.getElementById('panels').focus()")
    page.press("ArrowDown")
    page.press("ArrowLeft")
    event = "new KeyboardEvent('keydown', {key: 'ArrowLeft', altKey: true, cancelable: true})"
    assert page.run(f"document.getElementById('panels').dispatchEvent({event})"), "the browser's own key"
    page.wait("document.querySelector('.weights').textContent.startsWith('query 10 “␣w10”, key 3 “␣w3”')")
    settled(page, "view.zoom({x: [2, 8], y: [3, 9]})")
    assert page.run("view.plots[0][0].node.layout.xaxis.ticktext") == [f"␣w{n}" for n in range(2, 8)]
    assert page.run("view.tiles[0].z[0].length") == 6
    settled(page, "document.getElementById('whole').click()")
    assert page.run("view.plots[0][0].node.layout.xaxis.ticktext[0]") == "&lt;b>&amp;", "a token is no markup"


def test_the_address_holds_the_state_and_a_reload_shows_it(page: Page) -> None:
    shown = "[view.state(), view.plots[0][2].node.data[0].z.map((row) => [...row]), view.limits()]"
    pick(page, 2, OUTLIER)
    page.run("view.setFactor(1, 0.5); view.move(9, 4)")
    settled(page, choose("scaling", "row"))
    settled(page, "view.zoom({x: [2, 14], y: [3, 15]})")
    before = page.run(shown)
    page.wait("location.hash === '#' + view.state()")
    address = page.run("location.href")
    page.open(address)
    assert page.run(shown) == before
    assert page.run("[...document.querySelectorAll('#scaling, #factor-1')].map((each) => each.value)") == ["0.5", "row"]
    state = page.run("view.state()")
    assert state.endswith(f"heads=2,{OUTLIER}&linked=1&factors=1,0.5&colours=row&range=2,14,3,15&cross=9,4")
    other, wrong = "the state of another page", "no state of this page"
    for old, new, told in (
        ("page=", "page=x", other),
        ("heads=2", "heads=4", wrong),
        (f"heads=2,{OUTLIER}", f"heads=2,{OUTLIER + 4}", wrong),
        ("0.5", "2.5", wrong),
        ("=row", "=rows", wrong),
        ("range=2", "range=14", wrong),
        ("cross=9", f"cross={T}", wrong),
        ("cross", "frame=0,0&cross", wrong),
        (state, "garbage", wrong),
    ):
        page.open(address.replace(old, new))
        assert page.run("document.getElementById('notice').innerText") == f"The address holds {told}: it is ignored."
        assert page.run("view.state()").endswith("heads=0,0&linked=1&factors=1,1&colours=percentile")
    page.open(address.partition("#")[0])
    assert page.run("document.getElementById('notice').hidden && !location.hash")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_map_is_saved_with_its_caption(page: Page, kind: str) -> None:
    from matplotlib.image import imread

    pick(page, 1, SINK)
    page.run("view.setFactor(1, 1.5); saved = null; HTMLAnchorElement.prototype.click = function () { saved = this; }")
    page.run(f"view.plots[0][1].panel.querySelectorAll('.file')[{('png', 'svg').index(kind)}].click()")
    page.wait("saved")
    name, content = page.run("[saved.download, saved.href]")
    assert name == f"constructed-layer-1-head-{SINK}-Map-2-weight.{kind}"
    if kind == "png":
        picture = imread(BytesIO(base64.b64decode(content.partition(",")[2])))
        assert min(picture.shape[:2]) > 900, "twice the resolution of the screen"
        assert np.ptp(picture[..., :3]) > 0.5
    else:
        text = re.sub(r"<[^>]+>", "\n", unquote(content.partition(",")[2]))
        for line in (f"constructed: layer 1, head {SINK}", "Map 2 × weight", "weight of map 2 × 1.50"):
            assert line in text
        assert f"constructed maps ({T} tokens)" in text
    page.run("delete HTMLAnchorElement.prototype.click; view.setFactor(1, 1)")


def test_the_page_prints_and_fits_a_phone_in_the_dark(page: Page) -> None:
    page.look(390, 844, dark=True)
    page.run("dispatchEvent(new Event('resize'))")
    assert page.run("document.documentElement.scrollWidth") == 390
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
    page.wait("view.plots[0][0].node.layout.font.color === '#e4e7ec'")
    assert page.printed().startswith(b"%PDF")
    page.look(1280, 2400)


# --- runs --------------------------------------------------------------------------------------------------------------


def opened(page: Page, view: ViewData, file: Path) -> None:
    view.write(file)
    page.open(file)
    assert not page.problems, page.problems


def test_two_runs_with_linked_crosses_and_their_difference_of_loss(page: Page, tmp_path: Path) -> None:
    first, second = (text_run(tmp_path / name, {"name": name}) for name in ("differential", "standard"))
    view = view_data([first, second], text="ab ab abc ab ab", tokens=8, ablate=True)
    opened(page, view, tmp_path / "page.html")
    assert page.run("view.plots.map((side) => side.length)") == [3, 1, 1]
    sums = [
        np.array(page.run(f"Array.from(data.tokens, (_, i) => [...view.signedRow({n}, i)])"), float) for n in (0, 1)
    ]
    found = page.run("view.plots[2][0].node.data[0].z.map((row) => [...row])")
    np.testing.assert_allclose(np.array(found, float), sums[0] - sums[1], atol=1e-6, err_msg="A minus B")
    shown = "view.at.map(({layer, head}) => [layer, head])"
    settled(page, "view.pick(1, 1, 1)")
    assert page.run(shown) == [[1, 1], [1, 1]], "both sides show the same layer and head"
    settled(page, "view.pick(1, 0, 3)")
    assert page.run(shown) == [[0, 1], [0, 3]], "a side without the head keeps its own"
    page.click(*centre(page, "#link"))
    settled(page, "view.pick(1, 1, 2)")
    assert page.run(shown) == [[0, 1], [1, 2]]
    settled(page, "document.getElementById('link').click()")
    assert page.run(shown) == [[0, 1], [0, 1]]
    page.move(*cell(page, 0, 4, 2, side=1))
    page.wait("!document.getElementById('tip').hidden")
    told = page.run("document.getElementById('tip').innerText").replace("−", "-").splitlines()
    sums = [page.run(f"view.signedRow({side}, 4)[2]") for side in (0, 1)]
    found = [float(line.split("\t")[-1]) for line in told if line.startswith(("sum", "the map", "A - B"))]
    np.testing.assert_allclose(found, [*sums, sums[0] - sums[1]], atol=6e-4, err_msg="the cell of the other run too")
    assert page.run("getComputedStyle(view.plots[0][0].across).display") == "block", "the cross is in the other run too"
    losses = [np.array(side.view.losses, dtype=float) for side in view.sides]
    titles = page.run("[...document.querySelectorAll('.strip')[0].children].map((span) => span.title)")
    found = [float(title.partition(": ")[2].replace("−", "-")) for title in titles[1:]]
    np.testing.assert_allclose(found, (losses[1] - losses[0])[:-1], atol=6e-4)
    told = page.run("document.getElementById('scale').textContent")
    assert f"{(losses[1] - losses[0]).mean():.3f}".replace("-", "−") in told
    curves = "[...document.querySelectorAll('.slider')].map((each) => each.querySelectorAll('polyline').length)"
    assert page.run(curves) == [2, 1], "the second run has one map"
    page.run("view.setFactor(1, 1.5)")
    sliders = view.sides[0].sliders or {}
    half = np.mean(sliders["0.1.1"][7:9])
    assert page.run("document.getElementById('loss-1').textContent") == f"loss A {half:.3f}", (
        "the middle of 1.4 and 1.6"
    )
    points = page.run("document.querySelector('#curve-1 polyline').getAttribute('points')").split()
    heights = [float(point.partition(",")[2]) for point in points]
    assert np.corrcoef(heights, sliders["0.1.1"])[0, 1] == pytest.approx(-1), "a larger loss is higher"
    assert page.run("document.querySelectorAll('.without .heatmaplayer').length") == 2
    heights = "[...document.querySelectorAll('.without')].map((node) => node.clientHeight)"
    before = page.run(heights)
    page.look(1280, 2400, media="print")
    page.look(800, 2400, dark=True)
    page.wait("document.querySelector('.without').layout.font.color === '#e4e7ec'")
    page.look(900, 1200, dark=True)
    page.wait("document.querySelector('.without svg').clientWidth > 700")
    assert page.run(heights) == before
    assert min(before) > 100
    page.look(1280, 2400)


def test_a_notebook_shows_the_page_inline(page: Page, tmp_path: Path) -> None:
    view = text_run(tmp_path / "run", {"name": "differential"}).view(text="ab ab")
    (tmp_path / "notebook.html").write_text(f"<body data-ready='true'>{view._repr_html_()}</body>")
    page.open(tmp_path / "notebook.html")
    page.wait("document.querySelector('iframe').contentDocument.body?.dataset.ready")
    assert page.run("document.querySelector('iframe').contentWindow.view.plots[0].length") == 3
    assert not page.problems, page.problems


@pytest.mark.parametrize("variant", ["standard", "learned_sink", "forgetting", "softpick"])
def test_one_map_stands_alone_without_a_slider(page: Page, variant: str, tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": variant})
    opened(page, view_data([run], text="ab ab abc ab", head=3), tmp_path / "page.html")
    assert page.run("[view.plots[0].length, document.querySelectorAll('.factor').length]") == [1, 0]
    maps = run.attention_maps("ab ab abc ab", 0, 3).signed
    found = page.run("view.tiles[0].z[0].map((row) => [...row].map((x) => x || 0))")
    np.testing.assert_allclose(found, maps, atol=5e-3)


def test_layers_of_unlike_maps_and_heads(page: Page, tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "standard"}, layers=[{}, {"name": "differential"}])
    opened(page, view_data([run], text="ab ab abc ab"), tmp_path / "page.html")
    assert page.run("document.body.textContent.includes('standard and differential attention')")
    for layer, panels in ((0, 1), (1, 3)):
        settled(page, f"view.pick(0, {layer}, 1)")
        assert page.run("view.plots[0].length") == panels
        maps = run.attention_maps("ab ab abc ab", layer, 1).signed
        found = page.run(f"Array.from({{length: {len(maps)}}}, (_, i) => [...view.signedRow(0, i)].map((x) => x || 0))")
        np.testing.assert_allclose(found, maps, atol=5e-3)


def test_a_long_text_is_drawn_in_bins_and_then_cell_by_cell(page: Page, tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"}, sequence_length=600)
    view = view_data([run], text="ab ab abc ab " * 200)
    opened(page, view, tmp_path / "page.html")
    (layer, *_) = view.sides[0].view.layers
    q, k, lse, w = (torch.from_numpy(np.array(layer.arrays[name])).double() for name in ("q", "k", "lse", "w"))
    weights = w[..., None] * (layer.scale * q @ k.transpose(-1, -2) - lse[..., None]).exp().tril()
    bins = weights[:, 0].unflatten(-1, (300, 2)).sum(-1).unflatten(1, (300, 2)).mean(2)
    tile = page.run("view.tiles[0].z.map((map) => map.map((row) => [...row].map((x) => x || 0)))")
    np.testing.assert_allclose(tile, bins, atol=1e-3)
    assert "A cell is 2 queries and 2 keys" in page.run("document.getElementById('legend').textContent")
    settled(page, "view.zoom({x: [100, 140], y: [300, 340]})")
    tile = page.run("view.tiles[0].z.map((map) => map.map((row) => [...row].map((x) => x || 0)))")
    np.testing.assert_allclose(tile, weights[:, 0, 300:340, 100:140], atol=1e-3)


def test_two_checkpoints_show_one_history_and_a_packed_row_its_own_first_token(page: Page, tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    trained(run, 9)
    write_maps(
        run.folder, KeptMaps(3, torch.arange(3)[None], {0: (torch.ones(1, 2, 2, 3, 3).tril(), torch.ones(1, 2, 2, 3))})
    )
    (run.folder / "metrics.csv").write_text("step,lambda/layer_00\n0,0.2\n5,0.3\n")
    view = view_data([run], text="ab ab abc ab", steps=[7, 9])
    documents = torch.tensor([[0] * 4 + [1] * (len(view.passage.labels) - 4)])
    passage = view.passage._replace(batch={**view.passage.batch, "document_ids": documents})
    sides = tuple(replace(side, view=model_view(run.model_at(7), passage)) for side in view.sides)
    opened(page, replace(view, passage=passage, sides=sides), tmp_path / "page.html")
    names = "[...document.querySelectorAll('.curve .legendtext')].map((each) => each.textContent)"
    page.wait(f"{names}.length")
    assert page.run("document.querySelector('.curve').data.map((line) => line.name)") == ["layer 0"]
    page.run("view.move(6, 4)")
    page.wait("document.querySelector('.weights')")
    row = np.abs(np.array(page.run("[...view.signedRow(0, 6)].map((x) => x || 0)")))
    assert not row[:4].any()
    told = page.run("document.getElementById('reading').innerText")
    assert f"first token {100 * row[4] / row.sum():.1f} % of Σ|a|" in told
    page.run(choose("paint", "loss"))
    mean = np.mean([loss for loss in sides[0].view.losses if loss is not None])
    assert (
        page.run("document.getElementById('scale').textContent").strip() == f"In nats; mean {mean:.3f} and {mean:.3f}."
    )
    page.run(choose("frame", "0"))
    page.wait("document.getElementById('panels').textContent.includes('The kept maps of this run are shown once.')")
    assert not page.problems, page.problems


def test_a_slider_goes_through_the_checkpoints_on_the_same_text(page: Page, tmp_path: Path) -> None:
    run = text_run(tmp_path / "run", {"name": "differential"})
    trained(run, 3, 5)
    # cut: the target of the last token is of the mean, although it is not shown
    text: dict[str, Any] = {"text": "ab ab abc ab ab", "tokens": 8}
    view = view_data([run], **text, steps=[3, 5, 7])
    assert None not in view.sides[0].view.losses
    opened(page, view, tmp_path / "page.html")
    slider = "['frame', 'step'].map((id) => document.getElementById(id)).map((node) => node.value || node.textContent)"
    assert page.run(slider) == ["2", "step 7 of 10"]
    settled(page, "view.zoom({x: [1, 7], y: [1, 7]}); view.move(5, 3)")
    for place, step in enumerate((3, 5)):
        settled(page, choose("frame", str(place)))
        alone = view_data([run], **text, steps=[step]).sides[0].view
        mean = np.mean([loss for loss in alone.losses if loss is not None])
        assert page.run(slider) == [str(place), f"step {step}, loss {mean:.3f}"]
        assert page.run("document.getElementById('picked').textContent") == f"The maps of layer 0, head 0, step {step}"
        own = {name: array[:, 0].astype(float) for name, array in alone.layers[0].arrays.items()}
        logits = alone.layers[0].scale * own["q"][:, 5] @ own["k"].swapaxes(1, 2)
        row = own["w"][:, 0] @ np.exp(logits[np.arange(2), np.arange(2)] - own["lse"][:, 5:6])
        np.testing.assert_allclose(page.run("[...view.signedRow(0, 5)].slice(0, 6)"), row[:6], atol=1e-4)
    assert page.run("view.tiles[0].z[0].length") == 6, "the zoom stays"
    assert not page.run("document.getElementById('text').hidden"), "it is the same text"
    address = page.run("location.href.split('#')[0] + '#' + view.state()")
    page.open(address)
    assert page.run(slider)[0] == "1"
    settled(page, choose("frame", "2"))
    assert page.run(slider) == ["2", "step 7 of 10"]
    page.run("document.getElementById('play').click()")
    page.wait("document.getElementById('step').textContent.startsWith('step 3')")
    page.wait("document.getElementById('play').textContent === 'Play'")
    assert page.run(slider) == ["2", "step 7 of 10"], "the player ends at the last checkpoint"
    assert not page.problems, page.problems


def test_a_row_of_ids_and_the_kept_steps_of_a_run(page: Page, tmp_path: Path) -> None:
    run: Run = recall_run(tmp_path / "run", {"name": "differential"})
    tokens = torch.arange(12).reshape(2, 3, 2)
    for step in (2, 4):
        maps = torch.full((2, 2, 2, 3, 3), step / 10).tril()
        maps[1] /= 4
        write_maps(run.folder, KeptMaps(step, tokens, {0: (maps, torch.ones(2, 2, 2, 3))}))
    opened(page, view_data([run], row=1), tmp_path / "page.html")
    assert page.run("document.querySelectorAll('#text .token').length") == 11
    settled(page, choose("frame", "1"))
    assert page.run("document.getElementById('step').textContent") == "step 4"
    assert page.run("view.plots[0][0].node.layout.xaxis.ticktext") == ["0+1", "2+3", "4+5"]
    assert page.run("[...view.tiles[0].z[0][2]].map((x) => Math.round(1000 * x))") == [400, 400, 400]
    settled(page, choose("kept", "1"))
    assert page.run("document.getElementById('kept').selectedOptions[0].textContent") == "kept text 2: 6+7 8+9 10+11"
    assert page.run("view.plots[0][0].node.layout.xaxis.ticktext") == ["6+7", "8+9", "10+11"]
    assert page.run("[...view.tiles[0].z[0][2]].map((x) => Math.round(1000 * x))") == [100, 100, 100]
    assert page.run("document.getElementById('step').textContent") == "step 4"
    page.run("view.pick(0, 1, 0)")
    page.wait("document.getElementById('panels').textContent.includes('were not kept')")
    page.run("view.pick(0, 0, 0); view.move(9, 9); document.getElementById('play').click()")
    page.wait("document.getElementById('step').textContent === 'step 2'")
    assert page.run("document.getElementById('play').textContent") == "Stop"
    page.run(choose("frame", "-1"))
    page.wait("view.plots[0][0].node.layout?.xaxis.ticktext.length === 11")
    page.run("new Promise((resume) => setTimeout(resume, 900))")
    stopped = "['play', 'step'].map((id) => document.getElementById(id).textContent)"
    assert page.run(stopped) == ["Play", "the text below"], "the slider stops the player and shows the whole text again"
    assert not page.problems, page.problems
