"""vLLM's layers and a model of vLLM's with our layer, against the same with vLLM's own."""

import json
import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flux_ops
from tests.cases.base import BF16, FP16, FP32, FP64
from tests.harness.compare import Findings, first_difference
from tests.harness.ranks import Ranks
from tests.harness.vllm import ENV, describe_package, has_cpu_kernels, needs_vllm, vllm, with_plugin

IN, OUT = 48, 40
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def integers(*shape, seed):
    """From -2 to 2: products of IN of them are exact in every dtype."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def row_parallel(dtype, **options):
    """A RowParallelLinear as vLLM builds it, with weights that vLLM has loaded and prepared."""
    from vllm.model_executor.layers import linear

    layer = linear.RowParallelLinear(IN, OUT, params_dtype=dtype, **options)
    for seed, parameter in enumerate((layer.weight, layer.bias)):
        if parameter is not None:
            shape = (OUT, IN)[: parameter.dim()]
            parameter.weight_loader(parameter, integers(*shape, seed=seed).to(dtype))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def inputs(layer, *rows, dtype, ctx):
    x = integers(*rows, IN, seed=7).to(dtype)
    return x.chunk(ctx.world, -1)[ctx.rank] if layer.input_is_parallel and layer.tp_size > 1 else x


LAYERS = (
    ("bfloat16", BF16, {}, True),
    ("float16", FP16, {}, True),
    ("no bias", BF16, {"bias": False}, True),
    ("bias handed back", BF16, {"skip_bias_add": True}, True),
    ("result alone", BF16, {"return_bias": False}, True),
    ("float32", FP32, {}, False),
    ("whole input", BF16, {"input_is_parallel": False}, False),
    ("not reduced", BF16, {"reduce_results": False, "bias": False}, False),
    ("not parallel", BF16, {"disable_tp": True}, False),
)


def layers_agree(ctx, folder):
    findings = Findings()
    with vllm(ctx, folder), torch.inference_mode():
        for name, dtype, options, overlapped in LAYERS:
            theirs = row_parallel(dtype, **options)
            with with_plugin():
                ours = row_parallel(dtype, **options)
            kinds = (type(theirs).__name__, type(ours).__name__)
            findings.add(name, None if kinds == ("RowParallelLinear", "FluxRowParallelLinear") else f"{kinds}")
            for rows in ((1,), (5,), (2, 3)):
                x = inputs(ours, *rows, dtype=dtype, ctx=ctx)
                want = theirs(x)
                flux_ops.dispatch_counts(reset=True)
                got = ours(x)
                ran = bool(flux_ops.dispatch_counts())
                what = f"{name}, {rows}"
                findings.add(what, None if ran == overlapped else f"gemm_ar ran: {ran}")
                if isinstance(want, tuple):
                    same = got[1] is want[1] or torch.equal(got[1], want[1])
                    findings.add(f"{what}: bias", None if same else "another bias")
                    got, want = got[0], want[0]
                findings.add(what, first_difference(got, want, rank=ctx.rank))
    return findings.finish()


def layer_is_traced(ctx, folder):
    """vLLM compiles a model as one graph."""
    with vllm(ctx, folder), torch.inference_mode():
        theirs = row_parallel(BF16)
        with with_plugin():
            ours = row_parallel(BF16)
        x = inputs(ours, 5, dtype=BF16, ctx=ctx)
        flux_ops.dispatch_counts(reset=True)
        got, _ = torch.compile(ours, fullgraph=True, backend="aot_eager")(x)
        assert flux_ops.dispatch_counts()
        assert first_difference(got, theirs(x)[0], rank=ctx.rank) is None


def registered(ctx, folder):
    """vLLM calls plugins more than once. With ours, its key of compiled graphs is another."""
    with vllm(ctx, folder):
        from vllm.config.utils import hash_factors
        from vllm.envs import compile_factors

        from flux_ops.integrations.vllm import plugin, register

        without = hash_factors(compile_factors())
        with with_plugin():
            plugin()
            assert type(row_parallel(BF16)) is register()
            assert hash_factors(compile_factors()) != without
        assert hash_factors(compile_factors()) == without


def left_to_vllm(ctx, folder):
    """vLLM's own forward runs if results must not depend on the batch, and where vLLM has packed the weight."""
    with vllm(ctx, folder), torch.inference_mode():
        with with_plugin():
            layer = row_parallel(BF16)
        x = inputs(layer, 5, dtype=BF16, ctx=ctx)
        want, _ = layer(x)

        def same_without_us():
            flux_ops.dispatch_counts(reset=True)
            got, _ = layer(x)
            assert not flux_ops.dispatch_counts()
            assert first_difference(got, want, rank=ctx.rank) is None

        with mock.patch.dict(os.environ, {"VLLM_BATCH_INVARIANT": "1"}):
            same_without_us()
        weight, layer.weight = layer.weight, nn.Parameter(torch.empty(0), requires_grad=False)
        layer.cpu_linear = lambda x, _, bias: F.linear(x, weight, bias)
        same_without_us()


def attention(layer, query, key, value, *_, **__):
    """In place of vLLM's attention, which needs its cache of keys and values: causal, over one sequence of tokens."""
    q, k, v = (x.unflatten(-1, (-1, layer.head_size)).transpose(0, 1) for x in (query, key, value))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.impl.scale, enable_gqa=True)
    return y.transpose(0, 1).flatten(1)


def logits_of(config, state, tokens):
    """A Llama of vLLM's, with weights that vLLM has loaded and prepared."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()  # the attention layers of the model before
    with set_default_torch_dtype(BF16):
        model = LlamaForCausalLM(vllm_config=config)
    loaded = model.load_weights(iter(state.items()))
    assert loaded == set(dict(model.named_parameters()))
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    flux_ops.dispatch_counts(reset=True)
    with mock.patch.object(Attention, "forward", attention), set_forward_context(None, config):
        logits = model.compute_logits(model(tokens, torch.arange(len(tokens))))
    return logits, sum(flux_ops.dispatch_counts().values())


def models_agree(ctx, folder):
    """Against Transformers' Llama in fp64, the error is at most twice that of vLLM's own."""
    with vllm(ctx, folder):
        from transformers import LlamaConfig, LlamaForCausalLM
        from vllm.config import ModelConfig

        options = {"skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True}
        model_config = ModelConfig(str(folder / "model"), **options)
    uncompiled = torch.compiler.set_stance("force_eager")  # or the embedding is compiled, for ten seconds
    with vllm(ctx, folder, model_config=model_config) as config, torch.inference_mode(), uncompiled:
        torch.manual_seed(3)
        reference = LlamaForCausalLM(LlamaConfig(**MODEL)).to(BF16)
        state = reference.state_dict()
        tokens = torch.arange(11) * 7 % MODEL["vocab_size"]
        exact = reference.to(FP64)(tokens[None]).logits[0]
        theirs, ran = logits_of(config, state, tokens)
        assert ran == 0
        with with_plugin():
            ours, ran = logits_of(config, state, tokens)
        assert ran == 2 * MODEL["num_hidden_layers"]  # the last of attention and the last of the MLP
        errors = [(logits - exact).abs().max().item() for logits in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] < 0.1 * exact.abs().max().item(), errors


class InsideVllm:
    """Ranks that have vLLM, for the cases of a class."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("vllm")
        describe_package(folder)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        return folder

    @pytest.fixture(scope="class", params=(2, 4))
    @classmethod
    def ranks_with_vllm(cls, request, folder):
        env = {"FLUX_TIMEOUT": "20", "OMP_NUM_THREADS": "1", **ENV, "VLLM_CACHE_ROOT": str(folder)}
        with Ranks(request.param, "cpu", env) as running:
            yield running


@needs_vllm
class VllmCases(InsideVllm):
    def test_layers_agree(self, ranks_with_vllm, folder, record_property):
        record_property("cells", ranks_with_vllm.run(layers_agree, folder)[0])

    def test_layer_is_traced(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(layer_is_traced, folder)

    def test_registered(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(registered, folder)

    def test_left_to_vllm(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(left_to_vllm, folder)

    def test_models_agree(self, ranks_with_vllm, folder):
        if not all(ranks_with_vllm.run(has_cpu_kernels, folder)):
            pytest.skip("needs vLLM's compiled CPU kernels, which its wheel lacks; FLUX_TEST_VLLM names another build")
        ranks_with_vllm.run(models_agree, folder)
