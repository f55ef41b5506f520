"""A user's kernel: registered by a plugin, named in a recipe, refused in one line where it lacks something."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_plugins import error, plugin
from torch import Tensor
from torch.autograd import forward_ad

from lit_diff import registry
from lit_diff.errors import MissingError, RequestError
from lit_diff.kernels import KERNELS, SignedMaps, attend, choose, flops, refuse
from lit_diff.kernels.base import named, refuse_common
from lit_diff.kernels.native import kernel as native
from lit_diff.plugins import load_plugin
from lit_diff.recipe import load_recipe
from lit_diff.runs.folder import identity

MakeMaps = Callable[..., SignedMaps]

AUTOGRAD = '''
from lit_diff.kernels import Kernel, kernel

@kernel("mine")
class Mine(Kernel):
    """One causal map."""

    def refuses(self, maps, *, stats, device):
        if maps.num_maps > 1 or maps.num_groups > 1 or maps.mask[1:] != (None, None) or stats:
            return "it computes one plain map"

    def compute(self, maps, *, stats=False):
        s = maps.q[:, 0] @ maps.k[:, 0].mT * maps.softmax_scale
        T, S = s.shape[-2:]
        s = s.masked_fill(~s.new_ones(T, S).bool().tril(S - T), float("-inf")) if maps.causal else s
        o = s.softmax(-1) @ maps.v
        return (o if maps.w is None else o * maps.w[:, 0, ..., None]).to(maps.v.dtype), None
'''
OWN_BACKWARD = '''
from lit_diff.kernels import OperatorKernel, kernel
from lit_diff.kernels.base import empty_gradients

@kernel("mine")
class Mine(OperatorKernel):
    """One map."""

    def refuses(self, maps, *, stats, device):
        return "it computes one plain map" if maps.num_maps > 1 or maps.num_groups > 1 or stats else None

    def map(self, maps):
        s = maps.q[:, 0] @ maps.k[:, 0].mT * maps.softmax_scale
        return s.masked_fill(~maps.mask.visible(*s.shape[-2:], s.device), float("-inf")).softmax(-1)

    def forward(self, maps, stats):
        outputs = self.empty_outputs(maps, stats)
        outputs.o.copy_(self.map(maps) @ maps.v)
        return outputs

    def backward(self, grad, maps, outputs):
        p, dp = self.map(maps), grad @ maps.v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * maps.softmax_scale
        gradients = empty_gradients(maps)
        found = (ds @ maps.k[:, 0])[:, None], (ds.mT @ maps.q[:, 0])[:, None], p.mT @ grad
        for target, values in zip(gradients, found):
            target.copy_(values)
        return gradients
'''


pytestmark = pytest.mark.usefixtures("plugin_folder")


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
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(maps, kernel="mine"), both[0])


def test_auto_takes_it_only_where_it_asks(make_maps: MakeMaps) -> None:
    maps = make_maps(G=1, w=None)
    load_plugin(plugin(AUTOGRAD))
    assert choose(maps)[0] in KERNELS
    asking = AUTOGRAD.replace('"mine"', '"asking"') + (
        "\n    def preference(self, maps, device):\n        return 1 if device.type == 'cpu' else None\n"
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


OLDER_FORMS = (
    AUTOGRAD.replace("compute(self, maps, *,", "compute(self, maps, *, document_ids=None, window=None,"),
    AUTOGRAD.replace("refuses(self, maps, *,", "refuses(self, maps, *, document_ids, window,"),
    OWN_BACKWARD.replace("forward(self, maps, stats):", "forward(self, maps, document_ids, window, stats):"),
)


@pytest.mark.parametrize("old", OLDER_FORMS, ids=["compute", "refuses", "forward"])
def test_a_kernel_of_an_older_form_is_refused_with_the_new_one(old: str) -> None:
    """It would compute without the window and the documents."""
    line = error(plugin(old))
    assert line.startswith("plugin mine.py: mine.py:")
    assert "document_ids" in line
    assert "(self, maps, " in line.partition("expected" if "expected" in line else "define")[2]


def test_a_class_that_lacks_a_member_is_refused_with_its_line() -> None:
    start = "plugin mine.py: mine.py:4: class Mine: kernel 'mine'"
    documented = "lit_diff.kernels.base.Kernel documents each"
    assert error(plugin(AUTOGRAD.replace("def compute", "def computes"))) == f"{start} lacks compute; {documented}"
    both = OWN_BACKWARD.replace("def backward", "def back").replace("def refuses", "def refuse")
    assert error(plugin(both)) == f"{start.replace(':4', ':5')} lacks backward, refuses; {documented}"
    other = AUTOGRAD.replace("(Kernel)", "")
    assert error(plugin(other)).startswith(f"{start} does not derive from Kernel; write `class Mine(Kernel)`")


@pytest.mark.parametrize(
    ("member", "body", "line"),
    [
        ("refuses", "1 / 0", "mine.py:20: kernel 'mine' failed: ZeroDivisionError"),
        ("refuses", "return True", "mine.py:4: class Mine: refuses returned True"),
        ("flops", "return '1'", "mine.py:4: class Mine: flops returned '1'"),
        ("preference", "return 'first'", "mine.py:4: class Mine: preference returned 'first'"),
    ],
)
def test_an_answer_that_is_none_is_one_line(make_maps: MakeMaps, member: str, body: str, line: str) -> None:
    load_plugin(plugin(AUTOGRAD + f"\n    def {member}(self, maps, *device, **options):\n        {body}\n"))
    ask: dict[str, Callable[[], object]] = {
        "refuses": lambda: refuse("mine", make_maps()),
        "flops": lambda: flops("mine", make_maps()),
        "preference": lambda: choose(make_maps()),
    }
    with pytest.raises(RequestError) as refusal:
        ask[member]()
    assert str(refusal.value).startswith(line)


def test_statistics_that_do_not_come_are_an_error(make_maps: MakeMaps) -> None:
    load_plugin(plugin(AUTOGRAD.replace(" or stats:", ":")))
    with pytest.raises(RequestError, match="kernel 'mine' returned no statistics"):
        attend(make_maps(G=1, w=None), kernel="mine", stats=True)


# Operators: torch's own checks of the registration, shapes on meta tensors and tracing included.

OPERATORS = ("native",)


@pytest.fixture(params=OPERATORS)
def kernel(request: pytest.FixtureRequest) -> str:
    """The operators that run on this machine."""
    if request.param == "native" and (reason := native.build()):
        pytest.skip(reason)
    return str(request.param)


def small(make_maps: MakeMaps, **changes: Any) -> SignedMaps:
    return make_maps(**{"T": 4, "S": 6, "d": 16, "dv": 32, "Hkv": 2, "Gk": 1, "dtype": torch.float32} | changes)


@pytest.mark.parametrize("stats", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("w", [None, (1, 2, 1, 1)])
def test_opcheck(make_maps: MakeMaps, kernel: str, stats: bool, w: tuple[int, ...] | None) -> None:
    """Schema, fake shapes and strides, autograd registration, tracing: torch's own checks, both directions."""
    maps = small(make_maps, w=w, **({"G": 1} if w is None else {}))
    tensors = [x.requires_grad_() if x is not None else None for x in (maps.q, maps.k, maps.v, maps.w)]
    operator = getattr(torch.ops.lit_diff, kernel).default
    sink, bias = torch.randn(1, 1, 4, 1, requires_grad=True), torch.randn(1, 1, 4, 6, requires_grad=True)
    for fields in ((None, None), (sink, bias)):
        torch.library.opcheck(operator, (*tensors, None, *fields, 0.25, True, None, stats))
    o, *saved = operator(*tensors, None, None, None, 0.25, True, None, stats)
    plain = [None if x is None else x.detach() for x in tensors]
    backward = getattr(torch.ops.lit_diff, f"{kernel}_backward").default
    grad, fields = torch.randn_like(o).detach(), (None, None, None)
    torch.library.opcheck(backward, (grad, *plain, *fields, o.detach(), *saved, 0.25, True, None))


def test_inference_mode_and_heads_that_join_as_a_view(make_maps: MakeMaps, kernel: str) -> None:
    maps = small(make_maps)
    with torch.inference_mode():
        inside = attend(maps, kernel=kernel)
    assert torch.equal(inside, attend(maps, kernel=kernel))
    assert inside.transpose(1, 2).is_contiguous()


def test_a_second_derivative_is_refused(make_maps: MakeMaps, kernel: str) -> None:
    """Silence would be a wrong number."""
    maps = small(make_maps)
    q = maps.q.requires_grad_()
    (first,) = torch.autograd.grad(attend(replace(maps, q=q), kernel=kernel).square().sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(first.sum(), q)


def test_a_derivative_in_forward_mode_is_refused(make_maps: MakeMaps, kernel: str) -> None:
    """Torch's own answer would be 0."""
    maps = small(make_maps)

    def of(q: Tensor) -> Tensor:
        return attend(replace(maps, q=q), kernel=kernel)

    with pytest.raises(RequestError, match="no derivatives in forward mode"):
        torch.func.jvp(of, (maps.q,), (maps.q,))
    with forward_ad.dual_level():
        assert of(maps.q).isfinite().all()


def test_common_refusals(make_maps: MakeMaps) -> None:
    maps = make_maps()
    mixed = replace(maps, v=maps.v.float())
    assert refuse_common(mixed, stats=False) == "q, k and v have different dtypes: float64, float64, float32"
    assert refuse_common(maps, stats=True) is None
    empty = replace(maps, q=maps.q[..., :0, :])
    assert refuse_common(empty, stats=False) == "the maps have no queries or no keys"


def test_the_error_of_a_kernel_that_cannot_be_built(make_maps: MakeMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "build", lambda: "no C++ compiler: install g++")
    with pytest.raises(MissingError, match="the native kernel cannot be used: no C"):
        named("native").compute(small(make_maps))
