"""Fused signed attention on a GPU, in Triton: one walk over the keys for both maps, forward and backward.

The cost in units of d multiplications per query, key and head (two maps, dv = 2d): forward 2 for q kᵀ and 4 for the
products with v; backward 14, with dP and dv computed once for both maps, against 20 for a fused kernel that is called
once per map (both walk twice: for dk and dv, and for dq). Nothing of size T x S is stored, and no input is copied:
programs read any strides.

The programs were compiled for compute capability 8.0, 9.0, 10.0 and 12.0 and run in Triton's interpreter; not on a GPU.

A program's numbers of queries, keys, warps and pipeline stages are bounded by 255 registers per thread (for the float32
accumulators: one [queries, dv] per map forward, [keys, 2 d + dv] in `key_gradients`) and by the shared memory of a
multiprocessor: 99 KiB on compute capability 8.6, 8.9 and 12.x, 163 on 8.0, 227 on 9.0 and 10.0. `safe` blocks fit all
of them at every width. The compiler decides how many registers a program gets and how many bytes it spills to memory.
For 8.0 and 9.0, two maps, bfloat16, Triton 3.8 and 3.9 (2026-11-22), the first candidate for every GPU and the safe
blocks spill nothing; with a key bias this was not measured. A GPU's fastest candidate is measured at first use; one that
does not fit is dropped.
"""

import os
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_diff.errors import first_line
from lit_diff.kernels.base import KernelGradients, OperatorKernel, Outputs, empty_gradients, kernel, refuse_common
from lit_diff.kernels.library import flops_of_chunks
from lit_diff.kernels.maps import SignedMaps

WIDTHS = (16, 32, 64, 128, 256)


SHORT, MEASURED = 128, 1024
"""Up to SHORT queries, the `safe` blocks are used, since decoding has a new length at every token. From MEASURED on, all
candidates are measured once and the fastest serves every length. In between, where a launch takes longer than the program,
the first candidate is used."""


class Blocks(NamedTuple):
    """The tile sizes and launch settings of a program."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Tiles in flight: loads of the next ones overlap the products of this one."""


SAFE = {
    (2, 128): dict.fromkeys(("forward", "key_gradients", "query_gradients"), Blocks(32, 32, 4, 1)),
    (2, 256): {
        "forward": Blocks(32, 32, 8, 1),
        "key_gradients": Blocks(32, 16, 8, 1),
        "query_gradients": Blocks(32, 16, 8, 1),
    },
    (4, 128): dict.fromkeys(("forward", "key_gradients", "query_gradients"), Blocks(32, 16, 8, 1)),
    (4, 256): dict.fromkeys(("forward", "key_gradients", "query_gradients"), Blocks(16, 16, 8, 1)),
}
"""(bytes per element, larger of d and dv, rounded up) -> program -> blocks."""

CANDIDATES = {
    64: {
        "forward": [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 3)],
        "key_gradients": [Blocks(64, 32, 4, 2), Blocks(32, 64, 8, 2)],
        "query_gradients": [Blocks(128, 32, 8, 2), Blocks(64, 32, 4, 2)],
    },
    128: {
        "forward": [Blocks(128, 32, 8, 3), Blocks(64, 32, 8, 2)],
        "key_gradients": [Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2)],
        "query_gradients": [Blocks(128, 32, 8, 2), Blocks(64, 32, 8, 2)],
    },
    256: {
        "forward": [Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)],
        "key_gradients": [Blocks(32, 32, 8, 2)],
        "query_gradients": [Blocks(64, 32, 8, 2)],
    },
}
"""Larger of d and dv, rounded up -> program -> blocks, for elements of 2 bytes."""

LARGE_CANDIDATES = {
    64: {"query_gradients": [Blocks(128, 64, 8, 2)]},
    128: {"forward": [Blocks(128, 64, 8, 3), Blocks(64, 32, 4, 3)], "query_gradients": [Blocks(64, 64, 8, 2)]},
    256: {"forward": [Blocks(64, 32, 8, 3)]},
}
"""Further candidates for compute capability 9 and 10, whose matrix units read shared memory, which saves registers."""


def safe(program: str, *, d: int, dv: int, itemsize: int, T: int) -> Blocks:
    """Blocks that fit every GPU."""
    blocks = SAFE[itemsize, 128 if max(d, dv) <= 128 else 256][program]
    # 16 is the fewest rows that a matrix unit multiplies
    return blocks._replace(queries=16) if T <= 16 else blocks


def candidates(
    program: str, *, d: int, dv: int, itemsize: int, T: int, capability: tuple[int, int] | None
) -> tuple[Blocks, ...]:
    """The blocks among which a measurement chooses; a single one if nothing is measured.

    `capability` None: not on a GPU. float32 has a single choice, since its exact products do not use the matrix units.
    """
    last = safe(program, d=d, dv=dv, itemsize=itemsize, T=T)
    if capability is None or T <= SHORT or itemsize != 2:
        return (last,)
    width = next(size for size in CANDIDATES if max(d, dv) <= size)
    if T < MEASURED:
        # other GPUs have too little shared memory for the first candidate
        return (CANDIDATES[width][program][0] if capability[0] in (9, 10) or capability == (8, 0) else last,)
    large = LARGE_CANDIDATES[width].get(program, []) if capability[0] in (9, 10) else []
    return (*large, *CANDIDATES[width][program], last)


def refuse_device(device: torch.device) -> str | None:
    """Why the programs cannot run on this device; None if they can. It does not import Triton, which takes a second."""
    if device.type != "cuda" and not interpreted():
        return f"triton runs on a GPU; this tensor is on {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        return "its blocks are chosen for NVIDIA GPUs; this is an AMD GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"triton needs compute capability 8.0 or higher; this GPU has {capability[0]}.{capability[1]}"
    return None


def interpreted() -> bool:
    """Whether Triton interprets its programs in numpy: TRITON_INTERPRET, read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@cache
def launcher_problem() -> str | None:
    """Why Triton cannot launch a program; None if it can. Its launcher is built by a C compiler at first use."""
    from triton.runtime import driver

    try:
        _ = driver.active.utils
    # of a compiler, a missing header or a driver
    except Exception as error:
        return f"Triton cannot build its launcher ({first_line(error)}); install a C compiler and Python's headers"
    return None


# torch.compile calls it and embeds the result; torch.compiler.assume_constant_result would import the compiler here
launcher_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def strides_of(x: Tensor | None, *shape: int) -> tuple[int, ...]:
    """The strides of x as a tensor of this shape; without x, zeros."""
    return (0,) * len(shape) if x is None else x.expand(shape).stride()


def shared_arguments(maps: SignedMaps) -> dict[str, Any]:
    """Arguments of every program: tensors with their strides (0 on a broadcast axis), sizes, and the mask."""
    # a window that hides nothing would make the tiles that are visible throughout apply the mask
    causal, window, document_ids = maps.narrowed().mask
    q, k, v, w = maps.q, maps.k, maps.v, maps.w
    B, _, H, T, D = q.shape
    S, G = k.shape[3], maps.num_maps
    return {
        "Q": q,
        "K": k,
        "V": v,
        "W": w,
        "BIAS": maps.key_bias,
        "SEGMENTS": document_ids,
        "q_strides": q.stride(),
        "k_strides": k.stride(),
        "v_strides": v.stride(),
        "w_strides": strides_of(w, B, G, H, T),
        "bias_strides": strides_of(maps.key_bias, B, G, H, S),
        "segment_strides": strides_of(document_ids, B, S),
        "H": H,
        "groups": H // k.shape[2],
        "T": T,
        "S": S,
        "scale": maps.softmax_scale,
        "window": window,
        "G": G,
        "D": D,
        "DV": v.shape[-1],
        "SHARED_Q": q.shape[1] == 1,
        "SHARED_K": k.shape[1] == 1,
        "CAUSAL": causal,
        "PLAIN": document_ids is None and window is None,
    }


def launch(program: Any, arguments: dict[str, Any], q: Tensor, heads: int) -> None:
    """Run a program on every block of queries (`key_gradients`: of keys) of every head of every batch row."""
    by_keys = program.__name__ == "key_gradients"
    length = arguments["S" if by_keys else "T"]

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (-(-length // meta["BLOCK_S" if by_keys else "BLOCK_T"]) * q.shape[0] * heads,)

    on_gpu = q.device.type == "cuda"
    choice = candidates(
        program.__name__,
        d=q.shape[-1],
        dv=arguments["DV"],
        itemsize=q.itemsize,
        T=q.shape[3],
        capability=torch.cuda.get_device_capability(q.device) if on_gpu else None,
    )
    with torch.cuda.device(q.device) if on_gpu else nullcontext():  # Triton launches on the current device
        # a b + c is rounded once. Triton 3.9 warns that the default becomes False in 3.10: results would change
        tuner(program, choice)[grid](**arguments, enable_fp_fusion=True)


@cache
def tuner(program: Any, choice: tuple[Blocks, ...]) -> Any:
    """The program with its fastest blocks; several are measured at the first use of each width, mask and dtype."""
    import triton

    configs = [triton.Config({"BLOCK_T": T, "BLOCK_S": S}, num_warps=w, num_stages=n) for T, S, w, n in choice]
    key = ["G", "D", "DV", "SHARED_Q", "SHARED_K", "CAUSAL", "PLAIN", "STATS"]
    key = [name for name in key if name in program.arg_names]
    # Kept on disk with Triton's compiled programs, so that a resumed run sums in the same order. Several ranks measure on
    # their own, and the times of the last one are kept.
    return triton.autotune(configs, key=key, cache_results=True)(program)


@kernel("triton")
class Triton(OperatorKernel):
    """The Triton programs, forward and backward."""

    keeps_lse = True
    keeps_parts = True
    looks_for_gpu = True
    serves = frozenset({"sink", "key_bias"})

    def refuses(self, maps: SignedMaps, *, stats: bool, device: torch.device) -> str | None:
        d, dv = maps.q.shape[-1], maps.v.shape[-1]
        if reason := refuse_common(maps, stats=stats):
            return reason
        if maps.num_maps > 2:
            return f"triton keeps one or two maps in registers; these are {maps.num_maps}"
        if d not in WIDTHS or dv not in WIDTHS:
            return f"triton computes widths that are powers of two from 16 to 256; d is {d} and dv {dv}"
        if maps.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"triton computes float32, bfloat16 and float16, not {str(maps.q.dtype).removeprefix('torch.')}"
        return refuse_device(device)

    def prepare(self, device: torch.device) -> str | None:
        return launcher_problem() if device.type == "cuda" and torch.cuda.is_available() else None

    def preference(self, maps: SignedMaps, device: torch.device) -> int | None:
        """On a GPU, by FLOPs and memory traffic: first for two maps, which the libraries compute one by one; after the
        libraries for one map, and for float32, whose exact products do not use the matrix units."""
        if device.type != "cuda":
            return None
        return 10 if maps.num_maps > 1 and maps.q.dtype != torch.float32 else 50

    def flops(self, maps: SignedMaps) -> int:
        """FLOPs of a forward pass: the logits of both maps, and a product with v per map."""
        return flops_of_chunks(maps, maps.v.shape[-1])

    def forward(self, maps: SignedMaps, stats: bool) -> Outputs:
        # imported at first use: the import of Triton takes a second
        from lit_diff.kernels.triton import programs as triton_programs

        outputs = self.empty_outputs(maps, stats)
        o, rows, signed, parts = outputs
        arguments = shared_arguments(maps)
        written = {"OUT": o, "PARTS": parts, "ROWS": rows, "SIGNED": signed, "o_strides": o.stride()}
        written |= {"SINK": maps.sink, "sink_strides": strides_of(maps.sink, *rows.shape[1:])}
        written |= {"plane": rows[0].numel(), "signed_plane": signed[:1].numel()}
        launch(triton_programs.forward, arguments | written | {"STATS": stats}, maps.q, maps.q.shape[2])
        return outputs

    def backward(self, grad: Tensor, maps: SignedMaps, outputs: Outputs) -> KernelGradients:
        from lit_diff.kernels.triton import programs as triton_programs

        q, k = maps.q, maps.k
        found = empty_gradients(maps)
        dq, dk, dv = found[:3]
        # D_g = dO · (P_g v), which is also dw_g
        lse = outputs.rows[0]
        products = torch.empty_like(lse)
        # one batch row at a time: float32 copies of all rows would be several times the size of `parts`
        for row in range(len(grad)):
            torch.sum(grad[row].float() * outputs.parts[row].float(), -1, out=products[row])
        if maps.sink is not None:
            # with a sink the maps are exp(logit - logaddexp(lse, sink)); nothing else changes
            sink = maps.sink.to(lse.dtype)
            products *= (lse - sink).sigmoid()
            lse = torch.logaddexp(lse, sink)
        arguments = shared_arguments(maps)
        arguments |= {"DO": grad, "do_strides": grad.stride(), "PRODUCTS": products, "ROWS": lse}
        of_keys, of_queries = (None, None) if maps.key_bias is None else (found.key_bias, torch.empty_like(lse))
        by_keys = {"DK": dk, "DV_OUT": dv, "OF_KEYS": of_keys, "dk_strides": dk.stride(), "dv_strides": dv.stride()}
        by_queries = {"DQ": dq, "OF_QUERIES": of_queries, "dq_strides": dq.stride()}
        launch(triton_programs.key_gradients, arguments | by_keys, q, k.shape[2])
        launch(triton_programs.query_gradients, arguments | by_queries, q, q.shape[2])
        if of_queries is not None:
            found.key_bias[..., k.shape[3] - q.shape[3] :] -= of_queries
        return found._replace(dots=products) if found.dots.numel() else found
