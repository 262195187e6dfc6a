"""Megatron's layers and models with our products, against the same with Megatron's own."""

import copy
import itertools
from unittest import mock

import pytest
import torch

import flux_ops
from tests.cases.base import BF16, FP32, FP64
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_bias, exact_x, generator, random_values
from tests.harness.megatron import megatron, why_no_megatron

KINDS = ("column", "row")
FORMS = tuple(itertools.product(KINDS, (False, True)))  # kind, sequence_parallel
IN, OUT, SEQUENCE, BATCH = 192, 384, 8, 2  # SEQUENCE for each rank
NAMES = {"column": "ColumnParallelLinear", "row": "RowParallelLinear"}


def config_of(ctx, sequence_parallel=False, **options):
    from megatron.core.model_parallel_config import ModelParallelConfig

    return ModelParallelConfig(
        tensor_model_parallel_size=ctx.world,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        **{"params_dtype": BF16, **options},
    )


def build(ctx, module, kind, config, **options):
    """A layer of `module`, with exact values in its weight."""

    def init(weight):
        weight.copy_(exact_x(weight.shape, weight.dtype, generator("cpu", 0, "weight")))

    if kind == "row":
        options = {"input_is_parallel": True, "skip_bias_add": False, "bias": True, **options}
    with torch.no_grad():
        layer = getattr(module, NAMES[kind])(IN, OUT, config=config, init_method=init, **options)
        if layer.bias is not None:
            rank = ctx.rank if kind == "column" else 0
            layer.bias.copy_(exact_bias(layer.bias.numel(), layer.bias.dtype, generator("cpu", 0, "bias", rank)))
    return layer.to(ctx.device)


def pair(ctx, kind, config, **options):
    """The same layer, Megatron's and ours."""
    from megatron.core.tensor_parallel import layers

    from flux_ops.integrations import megatron as ours

    return build(ctx, layers, kind, config, **options), build(ctx, ours, kind, config, **options)


def data(ctx, layer, seed=0, whole_input=False):
    """(x, dY) of this rank."""
    rows = SEQUENCE * ctx.world
    scattered = layer.sequence_parallel
    in_rows, out_rows = rows, rows
    columns_in, columns_out = layer.weight.shape[1], layer.weight.shape[0]
    if isinstance_of(layer, "row"):
        out_rows = SEQUENCE if scattered else rows
        columns_in = IN if whole_input else columns_in
        alike_in, alike_out = whole_input, not scattered
    else:
        in_rows = SEQUENCE if scattered else rows
        columns_out = OUT if layer.gather_output else columns_out
        alike_in, alike_out = not scattered, layer.gather_output
    x = exact_x((in_rows, BATCH, columns_in), BF16, generator(ctx.device, seed, "x", 0 if alike_in else ctx.rank))
    grad = exact_x((out_rows, BATCH, columns_out), BF16, generator(ctx.device, seed, "grad", 0 if alike_out else ctx.rank))
    return x, grad


def isinstance_of(layer, kind):
    return any(NAMES[kind] == one.__name__ for one in type(layer).__mro__)


def results(layer, x, grad, **arguments):
    """What the layer returns for x, and the gradients of a backward, by name."""
    x = x.clone().requires_grad_()
    y, bias = layer(x, **arguments)
    if y.requires_grad:
        y.backward(grad)
    found = {"y": y.detach(), "returned bias": bias, "gradient of x": x.grad}
    return found | {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}


def compare(ctx, findings, what, got, want):
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    for name, one in want.items():
        if one is None or got[name] is None:
            problem = None if one is got[name] else f"rank {ctx.rank}: got {got[name]}, expected {one}"
        else:
            problem = first_difference(got[name].detach(), one.detach(), rank=ctx.rank)
        findings.add(f"{what}: {name}", problem)


def without_megatrons_product():
    """Inside, Megatron's own product is an error."""
    from megatron.core.tensor_parallel import layers

    names = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
    return mock.patch.multiple(layers, **{name: mock.Mock(side_effect=AssertionError(name)) for name in names})


def layers_agree(ctx, kind, sequence_parallel):
    """Results and gradients, for every option of the constructor that has a say in them."""
    findings = Findings()
    only_column = ({"gather_output": True}, {"stride": 2}) if kind == "column" else ()
    only_row = ({"input_is_parallel": False},) if kind == "row" and not sequence_parallel else ()
    every = ({}, {"skip_bias_add": True}, {"bias": False}, {"bias": False, "skip_bias_add": True})
    with megatron(ctx):
        config = config_of(ctx, sequence_parallel)
        for seed, options in enumerate((*every, *only_column, *only_row)):
            for frozen in (False, True):
                theirs, ours = pair(ctx, kind, config, **options)
                theirs.weight.requires_grad_(not frozen)
                ours.weight.requires_grad_(not frozen)
                x, grad = data(ctx, theirs, seed, whole_input="input_is_parallel" in options)
                want = results(theirs, x, grad)
                flux_ops.dispatch_counts(reset=True)
                with without_megatrons_product():
                    got = results(ours, x, grad)
                compare(ctx, findings, f"{options}, frozen {frozen}", got, want)
                if sequence_parallel:
                    ran = {op for op, *_ in flux_ops.dispatch_counts()}
                    assert ran == {"ag_gemm", "gemm_rs"}, ran
    return findings.finish()
