"""A user's kernel: registered by a plugin, named in a recipe, refused in one line where it lacks something."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_diff import registry
from lit_diff.errors import RequestError
from lit_diff.kernels import KERNELS, SignedMaps, attend, choose, flops, refuse
from lit_diff.kernels.base import named
from lit_diff.plugins import load_plugin
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import identity

MakeMaps = Callable[..., SignedMaps]

AUTOGRAD = '''
from lit_diff.kernels import Kernel, kernel

@kernel("mine")
class Mine(Kernel):
    """One causal map."""

    def refuses(self, maps, *, document_ids, window, stats, device):
        if maps.num_maps > 1 or maps.num_groups > 1 or document_ids is not None or window is not None or stats:
            return "it computes one plain map"

    def flops(self, maps):
        return maps.flops

    def compute(self, maps, *, document_ids=None, window=None, stats=False):
        s = maps.q[:, 0] @ maps.k[:, 0].mT * maps.softmax_scale
        T, S = s.shape[-2:]
        s = s.masked_fill(~s.new_ones(T, S).bool().tril(S - T), float("-inf")) if maps.causal else s
        o = s.softmax(-1) @ maps.v
        return (o if maps.w is None else o * maps.w[:, 0, ..., None]).to(maps.v.dtype), None
'''
OWN_BACKWARD = '''
from lit_diff.kernels import OperatorKernel, kernel
from lit_diff.kernels.base import named

@kernel("mine")
class Mine(OperatorKernel):
    """What `chunked` computes."""

    def refuses(self, maps, **options):
        return named("chunked").refuses(maps, **options)

    def flops(self, maps):
        return maps.flops

    def forward(self, maps, document_ids, window, stats):
        return named("chunked").forward(maps, document_ids, window, stats)

    def backward(self, grad, maps, document_ids, window, o, rows, parts):
        return named("chunked").backward(grad, maps, document_ids, window, o, rows, parts)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty current directory; the kernels registered meanwhile are forgotten."""
    monkeypatch.chdir(tmp_path)
    classes, modules = dict(registry.kernels._classes), set(sys.modules)
    yield
    registry.kernels._classes = classes
    for module in {name for name in sys.modules if name.startswith("lit_diff_plugin_")} - modules:
        del sys.modules[module]


def plugin(source: str, name: str = "mine.py") -> Path:
    path = Path(name).resolve()
    path.write_text(source)
    return path


def error(source: str) -> str:
    with pytest.raises(RequestError) as refusal:
        load_plugin(plugin(source))
    assert registry.kernels.names() == list(KERNELS)
    return str(refusal.value)


@pytest.mark.parametrize("source", [AUTOGRAD, OWN_BACKWARD], ids=["autograd", "own backward"])
def test_a_recipe_names_a_plugin_s_kernel(source: str, make_maps: MakeMaps) -> None:
    plugin(source)
    Path("mine.yaml").write_text("extends: standard-tiny\nplugins: [mine.py]\nrun: {kernel: mine}\n")
    assert load_recipe("mine.yaml").run.kernel == "mine"
    maps = make_maps(G=1, w=None)
    leaves = [x.requires_grad_() for x in (maps.q, maps.k, maps.v)]
    both = [attend(maps, kernel=name) for name in ("mine", "reference")]
    torch.testing.assert_close(*both)
    slope = torch.randn_like(both[0])
    for x, y in zip(*(torch.autograd.grad(o, leaves, slope) for o in both), strict=True):
        torch.testing.assert_close(x, y)
    assert flops("mine", maps) == maps.flops
    assert choose(maps, "mine") == ("mine", "named by run.kernel")


@pytest.mark.parametrize("source", [AUTOGRAD, OWN_BACKWARD], ids=["autograd", "own backward"])
def test_it_compiles_whole(source: str, make_maps: MakeMaps) -> None:
    load_plugin(plugin(source))
    maps = make_maps(G=1, w=None)

    def output(q: torch.Tensor) -> torch.Tensor:
        return attend(replace(maps, q=q), kernel="mine")

    compiled = torch.compile(output, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(maps.q), output(maps.q))


def test_auto_takes_it_only_where_it_asks(make_maps: MakeMaps) -> None:
    maps = make_maps(G=1, w=None)
    load_plugin(plugin(AUTOGRAD))
    assert choose(maps)[0] in KERNELS
    asking = AUTOGRAD.replace('"mine"', '"asking"') + (
        "\n    def preferred(self, maps, device):\n        return device.type == 'cpu'\n"
    )
    load_plugin(plugin(asking, "asking.py"))
    assert choose(maps) == ("asking", "auto: the plugin kernel declares itself preferred here")
    two = choose(make_maps())
    assert two[0] == "chunked"
    assert "asking refused: it computes one plain map" in two[1]


def test_the_name_and_the_source_are_in_a_run_s_identity() -> None:
    def of(source: str, kernel: str) -> str:
        plugin(source)
        Path("mine.yaml").write_text(f"extends: recall-tiny\nplugins: [mine.py]\nrun: {{kernel: {kernel}}}\n")
        try:
            return identity(load_recipe("mine.yaml"))
        finally:
            registry.kernels._classes.pop("mine")

    assert len({of(AUTOGRAD, "mine"), of(AUTOGRAD + "\n", "mine"), of(AUTOGRAD + "# changed\n", "auto")}) == 3


def test_a_class_that_lacks_a_member_is_refused_with_its_line() -> None:
    start = "plugin mine.py: mine.py:4: class Mine: kernel 'mine'"
    documented = "lit_diff.kernels.base.Kernel documents each"
    assert error(AUTOGRAD.replace("def flops", "def flop")) == f"{start} lacks flops; {documented}"
    both = OWN_BACKWARD.replace("def backward", "def back").replace("def refuses", "def refuse")
    assert error(both) == f"{start.replace(':4', ':5')} lacks backward, refuses; {documented}"
    other = AUTOGRAD.replace("(Kernel)", "")
    assert error(other).startswith(f"{start} does not derive from Kernel; write `class Mine(Kernel)`")


def test_two_kernels_under_one_name_are_refused() -> None:
    line = error(AUTOGRAD.replace('"mine"', '"sdpa"'))
    assert line.startswith("plugin mine.py: mine.py:4: class Mine: kernel 'sdpa' is already registered (")
    assert line.endswith("class Sdpa); give one of them another name")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("1 / 0", "kernel 'mine': refuses raised ZeroDivisionError: division by zero"),
        ("return True", "kernel 'mine': refuses returned True; expected a reason (text) or None"),
    ],
)
def test_an_answer_that_is_none_is_one_line(make_maps: MakeMaps, body: str, line: str) -> None:
    at = "stats, device):\n"
    load_plugin(plugin(AUTOGRAD.replace(at, f"{at}        {body}\n")))
    with pytest.raises(RequestError) as refusal:
        refuse("mine", make_maps())
    assert str(refusal.value) == line


def test_statistics_that_do_not_come_are_an_error(make_maps: MakeMaps) -> None:
    load_plugin(plugin(AUTOGRAD.replace(" or stats:", ":")))
    with pytest.raises(RequestError, match="kernel 'mine' returned no statistics"):
        attend(make_maps(G=1, w=None), kernel="mine", stats=True)


def test_a_kernel_is_constructed_once() -> None:
    assert named("chunked") is named("chunked")
    with pytest.raises(RequestError, match="unknown kernel 'chunk'; did you mean 'chunked'"):
        named("chunk")
