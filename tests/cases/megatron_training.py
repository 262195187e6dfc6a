"""Megatron's DistributedDataParallel and its recomputation with our layers, against the same with Megatron's own."""

import copy

import pytest

import flux_ops
from tests.cases.base import FP32
from tests.cases.megatron import build, compare, config_of, data, over_forms, results, sources
from tests.cases.megatron_models import assert_near, gpt, model_results, run_model, transformer_config, with_ours
from tests.harness.compare import Findings
from tests.harness.megatron import megatron, needs_megatron

BUCKET_SIZE = 1000  # elements: several buckets for a model
RECOMPUTES = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def data_parallel(config, module, **options):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), module)


def main_grads(model):
    """Copies of main_grad by the parameter's name; each has to be a view of the model's buffers."""
    buffers = {buffer.grad_data.untyped_storage().data_ptr() for buffer in model.buffers}
    for name, parameter in model.module.named_parameters():
        assert parameter.main_grad.untyped_storage().data_ptr() in buffers, name
        assert parameter.grad is None, name
    return {f"main_grad of {name}": parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}


def step(ctx, model, seed):
    """The gradients of three microbatches, the sums of the last of which may overlap with its backward."""
    from megatron.core.distributed import finalize_model_grads

    model.zero_grad_buffer()
    with model.no_sync():
        run_model(ctx, model, seed)
        run_model(ctx, model, seed + 1)
    run_model(ctx, model, seed + 2)
    finalize_model_grads([model])
    return main_grads(model)


def data_parallel_models_agree(ctx, sequence_parallel, overlaps):
    """Our layers add to main_grad in their backward, Megatron's hooks what the layers of its own return. From the
    second step on the hooks start the sums of a bucket as soon as its gradients are there, if `overlaps`.
    """
    options = {"overlap_grad_reduce": overlaps, "bucket_size": BUCKET_SIZE}
    with megatron(ctx):
        theirs = gpt(ctx, sequence_parallel)
        state = copy.deepcopy(theirs.state_dict())
        theirs = data_parallel(theirs.config, theirs, **options)
        wants = [step(ctx, theirs, seed) for seed in (0, 3)]
        with with_ours("patch"):
            model = gpt(ctx, sequence_parallel, gradient_accumulation_fusion=True)
            model.load_state_dict(state)
            model = data_parallel(model.config, model, **options)
            for number, (seed, want) in enumerate(zip((0, 3), wants, strict=True)):
                assert_near(step(ctx, model, seed), want, f"step {number}: ")
        assert not overlaps or len(model.bucket_groups) > 2
        added = [name for name, parameter in model.named_parameters() if parameter.grad_added_to_main_grad]
        assert len(added) == 2 * 4 + 1, added  # the weights of our layers


def data_parallel_layers_agree(ctx, kind, sequence_parallel):
    """Weights in bfloat16 with main_grad in float32, bit for bit."""
    findings = Findings()
    with megatron(ctx):
        layers, ours = sources()
        theirs = build(ctx, layers, kind, config_of(ctx, sequence_parallel))
        fusing = config_of(ctx, sequence_parallel, gradient_accumulation_fusion=True)
        config = transformer_config(ctx, sequence_parallel)  # the only kind that it takes
        pair = [
            data_parallel(config, layer, grad_reduce_in_fp32=True) for layer in (theirs, build(ctx, ours, kind, fusing))
        ]
        for seed in range(3):
            x, grad = data(ctx, theirs, seed)
            want, got = (results(layer, x, grad) for layer in pair)
            compare(ctx, findings, f"backward {seed}", got, want)
        for layer in pair:
            layer.finish_grad_sync()
        want, got = map(main_grads, pair)
        assert got["main_grad of weight"].dtype == FP32
        compare(ctx, findings, "sum", got, want)
        assert pair[1].module.weight.grad_added_to_main_grad
    return findings.finish()


def recomputed_models_agree(ctx, sequence_parallel, fuses):
    """The backward runs each transformer layer once more; the gradients are those of Megatron's layers without that, in
    `grad`, or, if `fuses`, in main_grad under DistributedDataParallel.
    """
    with megatron(ctx):
        theirs = gpt(ctx, sequence_parallel)
        state = copy.deepcopy(theirs.state_dict())

        def gradients(model):
            return step(ctx, data_parallel(model.config, model), 0) if fuses else model_results(ctx, model)

        want, counts = gradients(theirs), []
        with with_ours("patch"):
            for options in ({}, RECOMPUTES):
                model = gpt(ctx, sequence_parallel, gradient_accumulation_fusion=fuses, **options)
                model.load_state_dict(state)
                flux_ops.dispatch_counts(reset=True)
                got = gradients(model)
                counts.append(sum(flux_ops.dispatch_counts().values()))
                assert_near(got, want, f"{options}: ")
        again = 2 * (4 if sequence_parallel else 2)  # calls of two transformer layers' forward
        assert counts[1] - counts[0] == again * (3 if fuses else 1), counts


@needs_megatron
@pytest.mark.worlds(2, 4)
class MegatronTrainingCases:
    @pytest.mark.parametrize("overlaps", (False, True))
    @pytest.mark.parametrize("sequence_parallel", (False, True))
    def test_data_parallel_models_agree(self, ranks, sequence_parallel, overlaps):
        ranks.run(data_parallel_models_agree, sequence_parallel, overlaps)

    @over_forms
    def test_data_parallel_layers_agree(self, ranks, record_property, kind, sequence_parallel):
        record_property("cells", ranks.run(data_parallel_layers_agree, kind, sequence_parallel)[0])

    @pytest.mark.parametrize("fuses", (False, True))
    @pytest.mark.parametrize("sequence_parallel", (False, True))
    def test_recomputed_models_agree(self, ranks, sequence_parallel, fuses):
        ranks.run(recomputed_models_agree, sequence_parallel, fuses)
