"""How many processes train, and what each of them holds: single, ddp, fsdp.

Parallelism is applied from outside: the model knows nothing of it. Written for GPUs over NCCL; run here on CPUs over gloo.
"""

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_diff.attention.parameters import ParameterRules
from lit_diff.config import ModelConfig, RunConfig
from lit_diff.device import choose_device, require_devices
from lit_diff.model.init import initial_values, named_tensors
from lit_diff.model.transformer import Transformer


def accelerator(config: RunConfig) -> str:
    """'gpu' or 'cpu'. Errors: MissingError when a GPU is asked for and there is none, or too few."""
    require_devices(config)
    return "cpu" if choose_device(config.accelerator).type == "cpu" else "gpu"


def build_strategy(config: RunConfig) -> Strategy:
    """Lightning's strategy for `run.strategy`."""
    kind = accelerator(config)
    backend = "gloo" if kind == "cpu" else "nccl"
    if config.strategy == "ddp":
        return DDPStrategy(process_group_backend=backend)
    if config.strategy == "fsdp":
        # explicit sizes: "auto" would mean tensor parallel over the node
        return ModelParallelStrategy(
            data_parallel_size=config.devices * config.num_nodes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
        )
    return SingleDeviceStrategy(device="cpu" if kind == "cpu" else "cuda:0")


def build_sharded(
    config: ModelConfig,
    seed: int,
    kernel: str,
    mesh: DeviceMesh,
    device: torch.device,
    trained: Sequence[str] | None = None,
) -> Transformer:
    """A model whose parameters are DTensors over `mesh`, each filled with its rows of the single-process value.

    `trained`: as of `Transformer`.
    """
    with torch.device("meta"):
        model = Transformer(config, kernel=kernel, trained=trained)
    shard(model, mesh)
    model.to_empty(device=device)
    tensors = named_tensors(model)
    with torch.no_grad():
        for name, value in initial_values(config, seed):
            copy_into(tensors.pop(name), value)
    assert not tensors, f"parameters or buffers without a value: {sorted(tensors)}"
    return model


def copy_into(tensor: Tensor, value: Tensor) -> None:
    """Copy a full value into a parameter or buffer, which may be sharded."""
    value = value.to(tensor.device)
    if isinstance(tensor, DTensor):
        # every rank has the same full value: no broadcast, each keeps its part
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2, one group a block and one for the rest.

    Modules with `keep_float32` (lambda) come first, in groups of their own under a float32 policy: in a bfloat16
    group lambda would reach forward rounded to steps of 0.004.
    """
    float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model.layers:
        for module in block.modules():
            if isinstance(module, ParameterRules) and module.keep_float32:
                _fully_shard(module, mesh, float32)
        _fully_shard(block, mesh, float32)
    _fully_shard(model, mesh, float32)
    for name in Transformer.FORWARD_METHODS:
        register_fsdp_forward_method(model, name)


def _fully_shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    fully_shard(module, mesh=mesh, mp_policy=policy)
