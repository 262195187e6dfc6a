"""The row-parallel layer for vLLM, with a stand-in for what it uses of vLLM; cases/vllm.py has the tests inside it."""

import sys
import types

import pytest
import torch.distributed as dist
import torch.nn.functional as F

import flux_ops
from flux_ops.integrations import vllm
from tests.cases.base import BF16, FP32, Case, make
from tests.harness.compare import Findings, first_difference


class UnquantizedLinearMethod:
    def apply(self, layer, x, bias):
        return F.linear(x, layer.weight, bias)


class Quantized(UnquantizedLinearMethod):
    pass


class RowParallelLinear:
    """The attributes and the forward of vLLM's class, as far as the layer meets them."""

    def __init__(self, operands, method, **options):
        self.weight, self.bias, self.quant_method = operands.weight, operands.bias, method
        self.tp_rank, self.tp_size = dist.get_rank(), dist.get_world_size()
        self.input_is_parallel, self.reduce_results, self.skip_bias_add, self.return_bias = True, True, False, True
        vars(self).update(options)

    def forward(self, x):
        y = self.quant_method.apply(self, x, self.bias if self.tp_rank == 0 and not self.skip_bias_add else None)
        if self.reduce_results:
            dist.all_reduce(y)
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y


class PluggableLayer:
    registered: dict = {}  # noqa: RUF012 (as in vLLM: one for all)

    @classmethod
    def register_oot(cls, layer, name):
        cls.registered[name] = layer


def stand_in():
    """sys.modules with the part of vLLM that flux_ops.integrations.vllm imports."""
    group = types.SimpleNamespace(device_group=dist.group.WORLD)
    linear = {"RowParallelLinear": RowParallelLinear, "UnquantizedLinearMethod": UnquantizedLinearMethod}
    contents = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "environment_variables": {}},
        "vllm.compilation.passes.pass_manager": {},  # without AsyncTPPass, as on CPUs
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.distributed": {"split_tensor_along_last_dim": None, "tensor_model_parallel_all_reduce": None},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer},
        "vllm.model_executor.layers.linear": linear,
    }
    modules = {}
    for name, members in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(modules[name]).update(members)
    modules["vllm.model_executor.layers"].linear = modules["vllm.model_executor.layers.linear"]
    return modules


def layer_in_vllm(ctx):
    findings = Findings()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_in().items():
            patch.setitem(sys.modules, name, module)
        patch.setenv("FLUX_VLLM", "1")
        vllm.register.cache_clear()
        vllm.plugin()
        ours = PluggableLayer.registered["RowParallelLinear"]
        cases = (
            ("plain", BF16, UnquantizedLinearMethod, {}, True),
            ("bias handed back", BF16, UnquantizedLinearMethod, {"skip_bias_add": True}, True),
            ("result alone", BF16, UnquantizedLinearMethod, {"return_bias": False}, True),
            ("quantised", BF16, Quantized, {}, False),
            ("not reduced", BF16, UnquantizedLinearMethod, {"reduce_results": False}, False),
            ("float32", FP32, UnquantizedLinearMethod, {}, False),
        )
        for name, dtype, method, options, overlapped in cases:
            operands = make(ctx, Case("gemm_rs", 4, 24, 40, dtype=dtype, bias=True))
            want = RowParallelLinear(operands, method(), **options).forward(operands.x)
            flux_ops.dispatch_counts(reset=True)
            got = ours(operands, method(), **options).forward(operands.x)
            ran = bool(flux_ops.dispatch_counts())
            findings.add(name, None if ran == overlapped else f"gemm_ar ran: {ran}")
            if isinstance(want, tuple):
                findings.add(f"{name}: bias", None if got[1] is want[1] else "another bias")
                got, want = got[0], want[0]
            findings.add(name, first_difference(got, want, rank=ctx.rank))
    return findings.finish()


def not_asked_for(ctx):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)  # an import of vllm fails
        patch.delenv("FLUX_VLLM", raising=False)
        vllm.register.cache_clear()
        vllm.plugin()
        patch.setenv("FLUX_VLLM", "0")
        vllm.plugin()
        patch.setenv("FLUX_VLLM", "yes")
        with pytest.raises(ValueError, match="FLUX_VLLM is 'yes'; it must be 0 or 1"):
            vllm.plugin()


class VllmCases:
    @pytest.mark.worlds(2, 4)
    def test_layer(self, ranks, record_property):
        record_property("cells", ranks.run(layer_in_vllm)[0])

    @pytest.mark.worlds(2, 4)
    def test_off_unless_asked_for(self, ranks):
        ranks.run(not_asked_for)
