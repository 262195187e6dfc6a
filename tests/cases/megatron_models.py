"""A GPTModel of Megatron with our layers, against the same with Megatron's own."""

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


def gpt(ctx, sequence_parallel, gated):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
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
    )
    torch.manual_seed(5)
    length = SEQUENCE * ctx.world
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, length, position_embedding_type="rope").to(
        ctx.device
    )


def model_results(ctx, model):
    length = SEQUENCE * ctx.world
    tokens = torch.randint(0, VOCABULARY, (BATCH, length), generator=generator("cpu", 0, "x")).to(ctx.device)
    positions = torch.arange(length, device=ctx.device).expand(BATCH, length)
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=ctx.device).triu(1)
    logits = model(tokens, positions, future)
    logits.backward(random_values(logits.shape, logits.dtype, generator(ctx.device, 0, "grad", ctx.rank)))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in gradients.values())
    return {"logits": logits.detach(), **gradients}


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
    """A GPTModel with our layers takes the state of Megatron's, and gives it back. In fp64, where only the order of
    additions differs."""
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
        assert got.keys() == want.keys()
        for name, one in want.items():
            torch.testing.assert_close(
                got[name], one, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.fill_(float("nan"))
        theirs.load_state_dict(model.state_dict())
        for key, value in state.items():
            assert value is None or torch.equal(theirs.state_dict()[key], value), key


@needs_megatron
@pytest.mark.worlds(2, 4)
class MegatronModelCases:
    @pytest.mark.parametrize("how", ("patch", "provider"))
    @pytest.mark.parametrize("sequence_parallel, gated", ((False, False), (True, False), (True, True)))
    def test_models_agree(self, ranks, sequence_parallel, gated, how):
        ranks.run(models_agree, sequence_parallel, gated, how)
