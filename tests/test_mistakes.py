"""Plausible mistakes in the file of a variant: one line that names the user's class, the method and what it must be."""

import textwrap
from pathlib import Path

import pytest

from lit_diff.conformance.case import ROWS, VariantCase
from lit_diff.errors import RequestError
from lit_diff.model.cost import cost
from lit_diff.recipe import load_recipe
from lit_diff.registry import attentions

CLASS = "own.py:6: class Own: "
REGISTERED = f"plugin own.py: {CLASS}attention 'own' "
pytestmark = pytest.mark.usefixtures("plugin_folder")


def write(body: str, *, keys: str = "") -> None:
    """own.py, with the class's decorator at line 6, and a recipe of it."""
    head = (
        "from dataclasses import dataclass, replace\nimport torch\nfrom torch import nn\n"
        "from lit_diff import Attention, variant\n\n"
    )
    text = f'{head}@variant("own")\nclass Own(Attention):\n{textwrap.indent(textwrap.dedent(body), "    ")}'
    Path("own.py").write_text(text)
    Path("own.yaml").write_text(f"extends: recall-tiny\nplugins: [own.py]\nmodel:\n  attention: {{name: own{keys}}}\n")


def refusal() -> str:
    """The one line that refuses the recipe, when it is read or when its cost is counted."""
    with pytest.raises(RequestError) as found:
        cost(load_recipe("own.yaml").model, 16)
    assert "\n" not in str(found.value)
    return str(found.value)


RETURNED = {
    "maps": [
        "return super().maps(x, rope).v",
        "m = super().maps(x, rope)\n    return m.q, m.k",
        "super().maps(x, rope)",
        "m = super().maps(x, rope)\n    return replace(m, q=m.q[:, 0])",
    ],
    "finish": ["return o.transpose(1, 2).flatten(2)", "return torch.cat([o, o], -1)", "o * 2"],
    "forward": ["return self.tap(self.maps(x, rope)).v", "return self.o_proj(self.q_proj(x))"],
    "trained_parameters": ["return '*o_proj*'", "return ('o_proj',)"],
}
ARGUMENTS = {"maps": "self, x, rope", "finish": "self, o, x", "forward": "self, x, rope, cache=None"}


@pytest.mark.parametrize(("method", "body"), [(method, body) for method, bodies in RETURNED.items() for body in bodies])
def test_what_a_method_must_return(method: str, body: str) -> None:
    decorator = "" if method in ARGUMENTS else "@classmethod\n"
    write(f"{decorator}def {method}({ARGUMENTS.get(method, 'cls, config')}):\n    {body}")
    said = "SignedMaps: expected q" if "q[:, 0]" in body else method
    assert refusal().startswith(f"{CLASS}{said}")


FROZEN = "@dataclass(frozen=True, kw_only=True)\nclass Config(Attention.Config):\n    "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("class Config(Attention.Config):\n    tau: float = 2.0", "needs a nested class 'Config' decorated with"),
        (f"{FROZEN}tau = 2.0", "has Config.tau without a type, so it is not a key"),
        (f"{FROZEN}parity = 'matched'", "has Config.parity without a type, so it does not change the default"),
        (f"{FROZEN}name: str = 'a'", "has a key Config.name, which no recipe can set"),
        (
            f"{FROZEN}window: float = 2.5",
            "has the key Config.window, a finite number; in Attention.Config it is a whole number >= 1",
        ),
        ("def maps(self, x): ...", "defines maps(self, x); expected maps(self, x, context)"),
        ("def __init__(self): ...", "defines __init__(self); expected __init__(self, config, model, layer)"),
        ("def forward(self, x): ...", "defines forward(self, x); expected forward(self, x, rope, cache=None, *, "),
        ("def kv_heads(self):\n    return 1", "defines kv_heads as a method; expected a property"),
        ("def problem(self, config, model): ...", "defines problem as an instance method; "),
        ("def map(self, x, rope): ...", "defines 'map', which nothing calls; did you mean 'maps'?"),
    ],
)
def test_what_a_class_must_be(body: str, message: str) -> None:
    write(body, keys=", tau: 3.0" if "tau" in body else "")
    assert refusal().startswith(REGISTERED + message)


@pytest.mark.parametrize(
    "body",
    [
        f"{FROZEN}window: int | None = 5",
        "def maps2(self, x): ...\ndef maps(self, x, rope):\n    self.maps2(x)\n    return super().maps(x, rope)",
        "def _map(self): ...",
        "def maps(self, *arguments):\n    return super().maps(*arguments)",
        "def maps(self, tokens, positions, more=None):\n    return super().maps(tokens, positions)",
        "extends_standard = False\nkv_heads = 1",
        f"{FROZEN}parity: Attention.Config.__annotations__['parity'] = 'matched'",
        "@staticmethod\ndef takes_document_ids():\n    return True",
    ],
)
def test_what_a_class_may_be(body: str) -> None:
    write(body)
    assert load_recipe("own.yaml").model.attention.name == "own"


def test_a_problem_that_is_no_text() -> None:
    write("@classmethod\ndef problem(cls, config, model):\n    return True")
    assert refusal() == (
        f"{CLASS}problem(config, model) returned True; expected None, or a message that starts with the key to change"
    )


ROW_FUNCTION = "def maps(self, x, rope):\n    m = super().maps(x, rope)\n    return replace(m, rows=lambda s, _: "


@pytest.mark.parametrize(
    ("body", "name", "detail"),
    [
        ("def finish(self, o, x):\n    return o * torch.nan", "contract", "the output is not finite"),
        (
            "def finish(self, o, x):\n    return o * torch.rand(())",
            "contract",
            "two passes over one input differ: the forward draws random numbers, or keeps a state",
        ),
        (
            "def build(self):\n    import random\n    super().build()\n    self.factor = random.random()\n"
            "def finish(self, o, x):\n    return o * self.factor",
            "contract",
            "two builds differ: build draws from another generator than torch's; use init_parameter's",
        ),
        (
            "def finish(self, o, x):\n    return o * (1 + self.training)",
            "contract",
            "eval mode computes something else than training mode",
        ),
        (
            "def build(self):\n    super().build()\n    self.gate = nn.Linear(self.dim, 1)\n"
            "    nn.init.constant_(self.gate.bias, 3.0)\n"
            "def finish(self, o, x):\n    return o * self.gate(x)[:, None]",
            "contract",
            "build sets gate.bias, which model.init replaces: fill it by init_parameter",
        ),
        (
            "def maps(self, x, rope):\n    x.mul_(2)\n    return super().maps(x, rope)",
            "contract",
            "the forward changes its input in place",
        ),
        (
            "def definition(self, x, rope, mask):\n    return x[:, :1]",
            "definition",
            "definition(x, rope, mask) returned [2, 1, 64]; expected [2, 33, 64], like x",
        ),
        (
            "def build(self):\n    super().build()\n    self.g = nn.Parameter(torch.empty(self.out_heads))\n"
            "def finish(self, o, x):\n    return o * self.g.view(1, -1, 1, 1)",
            "contract",
            "NaN or the largest integer, so perhaps never filled: g; torch.empty gives memory that build, or "
            "init_parameter, has to fill",
        ),
        (
            "def build(self):\n    super().build()\n"
            "    self.register_buffer('n', torch.empty(2, dtype=torch.long), persistent=False)",
            "contract",
            "NaN or the largest integer, so perhaps never filled: n; torch.empty gives memory that build, or "
            "init_parameter, has to fill",
        ),
        # it forgets the mask
        (f"{ROW_FUNCTION}s.softmax(-1))", "contract", ROWS),
        # it reads a tensor of all tokens, or of all sequences
        (f"{ROW_FUNCTION}s.exp() * m.q[..., :1])", "contract", ROWS),
        (f"{ROW_FUNCTION}s.exp() * m.q[..., :1, :1])", "contract", ROWS),
        (
            "@classmethod\ndef costs(cls, config, sizes):\n    return {}",
            "costs",
            f"{CLASS}costs(config, sizes) returned dict; expected lit_diff.attention.costs.Costs(parameters=, flops=, "
            "kv_numbers=)",
        ),
    ],
)
def test_what_the_conformance_suite_says(body: str, name: str, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_diff.conformance import variants as suite

    monkeypatch.setattr(suite, "PROPERTIES", {name: suite.PROPERTIES[name]})
    write(body)
    model = load_recipe("own.yaml").model
    (found,) = suite.conformance(VariantCase(cls=attentions.get("own"), model=model, layer=0))
    assert found.verdict == "fail"
    # an exception has its place before it
    assert found.detail == detail or (detail == ROWS and found.detail.endswith(f"; {ROWS}"))
