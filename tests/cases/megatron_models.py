"""A GPTModel of Megatron, and modules of its layer specs, with our layers, against the same with Megatron's own."""

import contextlib
import copy
from unittest import mock

import pytest
import torch

import flux_ops
from tests.cases.base import FP64
from tests.cases.megatron import sources, without_megatrons_product
from tests.harness.data import generator, random_values
from tests.harness.megatron import megatron, needs_megatron

VOCABULARY, HIDDEN, SEQUENCE, BATCH = 64, 32, 8, 2  # SEQUENCE for each rank


def transformer_config(ctx, sequence_parallel, gated=False, **options):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ctx.world,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=FP64,
        **options,
    )


def gpt(ctx, sequence_parallel, gated=False, **options):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = transformer_config(ctx, sequence_parallel, gated, **options)
    torch.manual_seed(5)
    length = SEQUENCE * ctx.world
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, length, position_embedding_type="rope").to(
        ctx.device
    )


def causal_mask(ctx):
    length = SEQUENCE * ctx.world
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=ctx.device).triu(1)


def run_model(ctx, model, seed=0):
    """The logits of a forward, after a backward."""
    length = SEQUENCE * ctx.world
    tokens = torch.randint(0, VOCABULARY, (BATCH, length), generator=generator("cpu", seed, "x")).to(ctx.device)
    positions = torch.arange(length, device=ctx.device).expand(BATCH, length)
    logits = model(tokens, positions, causal_mask(ctx))
    logits.backward(random_values(logits.shape, logits.dtype, generator(ctx.device, seed, "grad", ctx.rank)))
    return logits.detach()


def model_results(ctx, model):
    logits = run_model(ctx, model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in gradients.values())
    return {"logits": logits, **gradients}


def assert_near(got, want, what=""):
    """Results and gradients by name, in fp64, where only the order of additions differs."""
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    for name, one in want.items():
        torch.testing.assert_close(
            got[name], one, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{what}{name}: {text}"
        )


@contextlib.contextmanager
def with_ours(how):
    """Models that are built and run inside have our layers: all of them, or those of a backend for layer specs."""
    from megatron.core.models.gpt import gpt_layer_specs

    _, ours = sources()
    if how == "provider":
        with mock.patch.object(gpt_layer_specs, "LocalSpecProvider", ours.FluxSpecProvider):
            yield
        return
    ours.patch()
    try:
        with without_megatrons_product():
            yield
    finally:
        ours.unpatch()


def models_agree(ctx, sequence_parallel, gated, how):
    """A GPTModel with our layers takes the state of Megatron's, and gives it back."""
    with megatron(ctx):
        theirs = gpt(ctx, sequence_parallel, gated)
        want = model_results(ctx, theirs)
        state = copy.deepcopy(theirs.state_dict())
        with with_ours(how):
            model = gpt(ctx, sequence_parallel, gated)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            model.load_state_dict(state)
            flux_ops.dispatch_counts(reset=True)
            got = model_results(ctx, model)
            ran = sum(flux_ops.dispatch_counts().values())
        num_layers = 2 * 4 + (how == "patch")  # two in attention and two in the MLP; the output layer
        assert not sequence_parallel or ran == 2 * num_layers, ran
        assert_near(got, want)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.fill_(float("nan"))
        theirs.load_state_dict(model.state_dict())
        for key, value in state.items():
            assert value is None or torch.equal(theirs.state_dict()[key], value), key


def mlp(backend, config, groups):
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend

    return get_mlp_module_spec_for_backend(backend=backend)(config=config, pg_collection=groups, is_mtp_layer=False)


def attention(backend, config, groups):
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    submodules = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
    )
    spec = ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
    return build_module(spec, config=config, layer_number=1, pg_collection=groups)


MODULES = {"mlp": mlp, "attention": attention}


def module_results(ctx, module, sequence_parallel, **arguments):
    rows, rank = (SEQUENCE, ctx.rank) if sequence_parallel else (SEQUENCE * ctx.world, 0)
    shape = rows, BATCH, HIDDEN
    x = random_values(shape, FP64, generator(ctx.device, 0, "x", rank)).requires_grad_()
    y, bias = module(x, **arguments)
    (y + bias).backward(random_values(shape, FP64, generator(ctx.device, 0, "grad", rank)))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert len(gradients) == 4  # weight and bias of both layers
    return {"y": y.detach(), "bias": bias.detach(), "gradient of x": x.grad, **gradients}


def specs_agree(ctx, name, sequence_parallel):
    """A module whose spec is made with our backend, without a patch, against the same with Megatron's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection

    layers, ours = sources()
    with megatron(ctx):
        config = transformer_config(ctx, sequence_parallel)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        arguments = {"attention_mask": causal_mask(ctx)} if name == "attention" else {}
        providers = (LocalSpecProvider(), ours.FluxSpecProvider())
        theirs, module = (MODULES[name](one, config, groups).to(ctx.device) for one in providers)
        types = {type(one) for one in module.modules()}
        assert {ours.ColumnParallelLinear, ours.RowParallelLinear} <= types
        assert not {layers.ColumnParallelLinear, layers.RowParallelLinear} & types
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.ndim == 1:  # a bias, which Megatron makes of zeros
                    parameter.copy_(random_values(parameter.shape, FP64, generator(ctx.device, 0, "bias")))
        module.load_state_dict(theirs.state_dict())
        want = module_results(ctx, theirs, sequence_parallel, **arguments)
        flux_ops.dispatch_counts(reset=True)
        with without_megatrons_product():
            got = module_results(ctx, module, sequence_parallel, **arguments)
        ran = {op for op, *_ in flux_ops.dispatch_counts()}
        assert ran == ({"ag_gemm", "gemm_rs"} if sequence_parallel else {"gemm_ar"})
        assert_near(got, want)


@needs_megatron
@pytest.mark.worlds(2, 4)
class MegatronModelCases:
    @pytest.mark.parametrize("how", ("patch", "provider"))
    @pytest.mark.parametrize("sequence_parallel, gated", ((False, False), (True, False), (True, True)))
    def test_models_agree(self, ranks, sequence_parallel, gated, how):
        ranks.run(models_agree, sequence_parallel, gated, how)

    @pytest.mark.parametrize("sequence_parallel", (False, True))
    @pytest.mark.parametrize("name", MODULES)
    def test_specs_agree(self, ranks, name, sequence_parallel):
        ranks.run(specs_agree, name, sequence_parallel)
