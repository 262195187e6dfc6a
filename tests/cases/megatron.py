"""Megatron's layers and models with our products, against the same with Megatron's own."""

import itertools
import types
from unittest import mock

import pytest
import torch

import flux_ops
from tests.cases.base import BF16, FP32
from tests.cases.layers import Calls
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_bias, exact_x, generator
from tests.harness.megatron import megatron, needs_megatron

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


def sources():
    """The modules that have the layers: Megatron's and ours."""
    from megatron.core.tensor_parallel import layers

    from flux_ops.integrations import megatron as ours

    return layers, ours


def pair(ctx, kind, config, **options):
    """The same layer, Megatron's and ours."""
    return [build(ctx, module, kind, config, **options) for module in sources()]


def data(ctx, layer, seed=0, whole_input=False):
    """(x, dY) of this rank."""
    rows = SEQUENCE * ctx.world
    scattered = layer.sequence_parallel
    in_rows, out_rows = rows, rows
    columns_in, columns_out = layer.weight.shape[1], layer.weight.shape[0]
    if NAMES["row"] in [one.__name__ for one in type(layer).__mro__]:
        out_rows = SEQUENCE if scattered else rows
        columns_in = IN if whole_input else columns_in
        alike_in, alike_out = whole_input, not scattered
    else:
        in_rows = SEQUENCE if scattered else rows
        columns_out = OUT if layer.gather_output else columns_out
        alike_in, alike_out = not scattered, layer.gather_output
    x = exact_x((in_rows, BATCH, columns_in), BF16, generator(ctx.device, seed, "x", 0 if alike_in else ctx.rank))
    grad = exact_x(
        (out_rows, BATCH, columns_out), BF16, generator(ctx.device, seed, "grad", 0 if alike_out else ctx.rank)
    )
    return x, grad


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
            theirs, ours = pair(ctx, kind, config, **options)
            x, grad = data(ctx, theirs, seed, whole_input="input_is_parallel" in options)
            want = results(theirs, x, grad)
            for frozen in (False, True):
                ours.weight.requires_grad_(not frozen)
                ours.zero_grad()
                if frozen:  # Megatron's frozen layer is no measure: it loses the gradient of a bias that is not
                    want["gradient of weight"] = None
                flux_ops.dispatch_counts(reset=True)
                with without_megatrons_product():
                    got = results(ours, x, grad)
                compare(ctx, findings, f"{options}, frozen {frozen}", got, want)
                ran = {op for op, *_ in flux_ops.dispatch_counts()}
                assert ran == ({"ag_gemm", "gemm_rs"} if sequence_parallel else {"gemm_ar"} if kind == "row" else set())
    return findings.finish()


def accumulation(ctx, kind, sequence_parallel):
    """Without apex, the weight's gradients add up in main_grad."""
    findings = Findings()
    with megatron(ctx):
        config = config_of(ctx, sequence_parallel)
        fusing = config_of(ctx, sequence_parallel, gradient_accumulation_fusion=True)
        theirs, _ = pair(ctx, kind, config)
        ours = build(ctx, sources()[1], kind, fusing)
        assert ours.config is fusing
        ours.weight.main_grad = torch.zeros_like(ours.weight, dtype=FP32)
        ours.weight.grad_added_to_main_grad = False
        total = torch.zeros_like(ours.weight.main_grad)
        for seed in range(3):
            x, grad = data(ctx, theirs, seed)
            theirs.zero_grad()
            ours.zero_grad()
            want, got = results(theirs, x, grad), results(ours, x, grad)
            total += want.pop("gradient of weight").float()
            del got["gradient of weight"]
            compare(ctx, findings, f"backward {seed}", got, want)
        compare(ctx, findings, "main_grad", {"sum": ours.weight.main_grad}, {"sum": total})
        assert ours.weight.grad_added_to_main_grad is True
    return findings.finish()


def output_layer(ctx, sequence_parallel):
    """As a model calls its last layer: with the weight of the embedding, and gathered on demand."""
    findings = Findings()
    with megatron(ctx):
        config = config_of(ctx, sequence_parallel)
        owners = pair(ctx, "column", config, bias=False, gather_output=True)
        options = {"config": config, "init_method": None, "bias": False, "skip_weight_param_allocation": True}
        heads = [module.ColumnParallelLinear(IN, OUT, **options) for module in sources()]
        x, grad = data(ctx, owners[0])
        found = []
        for head, owner in zip(heads, owners, strict=True):
            found.append(results(head, x, grad, weight=owner.weight, runtime_gather_output=True))
            found[-1]["gradient of weight"] = owner.weight.grad
            assert head.weight is None
        compare(ctx, findings, "head", found[1], found[0])
    return findings.finish()


def state(ctx, kind):
    """Initial values, attributes of the parameters, and checkpoints are Megatron's; either takes the other's."""
    from megatron.core import parallel_state

    findings = Findings()
    with megatron(ctx):
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        required = {"input_is_parallel": True, "skip_bias_add": False, "bias": True} if kind == "row" else {}
        for sequence_parallel, stride, initializes in itertools.product((False, True), (1, 2), (True, False)):
            config = config_of(ctx, sequence_parallel, perform_initialization=initializes)
            options = {"config": config, "init_method": torch.nn.init.normal_, "stride": stride, **required}
            made = []
            for module in sources():
                torch.manual_seed(3)
                made.append(getattr(module, NAMES[kind])(IN, OUT, keep_master_weight_for_test=True, **options))
            theirs, ours = made
            what = f"sequence_parallel {sequence_parallel}, stride {stride}"
            assert [vars(p) for p in theirs.parameters()] == [vars(p) for p in ours.parameters()]
            if initializes:
                compare(ctx, findings, what, ours.state_dict(), theirs.state_dict())
                compare(ctx, findings, what, {"whole": ours.master_weight}, {"whole": theirs.master_weight})
            for source, target in ((theirs, ours), (ours, theirs)):
                with torch.no_grad():
                    for parameter in source.parameters():
                        parameter.normal_()
                target.load_state_dict(source.state_dict())
                compare(ctx, findings, what, target.state_dict(), source.state_dict())
            sharded = [layer.sharded_state_dict("a.", (), metadata) for layer in made]
            places = [{key: place_of(value) for key, value in one.items()} for one in sharded]
            assert places[0] == places[1], places
            assert repr(theirs) == repr(ours)
    return findings.finish()


def place_of(value):
    """Of an entry of a sharded state dict."""
    return [
        getattr(value, name, None)
        for name in (
            "key",
            "dtype",
            "local_shape",
            "global_shape",
            "global_offset",
            "axis_fragmentations",
            "replica_id",
        )
    ]


def attributes(ctx, kind, sequence_parallel):
    """The parameters of flux_ops.nn's layers have the attributes that Megatron sets on its own, and no others."""
    with megatron(ctx):
        theirs = build(ctx, sources()[0], kind, config_of(ctx, sequence_parallel))
        ours = getattr(flux_ops.nn, NAMES[kind])(IN, OUT, sequence_parallel=sequence_parallel, device=ctx.device)
        for name in ("weight", "bias"):
            got, want = (vars(getattr(layer, name)) for layer in (ours, theirs))
            assert got == want, f"{name}: {got}, in Megatron {want}"


def experts(ctx, kind):
    """Their tokens are exchanged elsewhere, so that they remain Megatron's; without apex no fusion is promised."""
    findings = Findings()
    with megatron(ctx):
        options = {"is_expert": True, "skip_bias_add": True}
        theirs, ours = pair(ctx, kind, config_of(ctx, True), **options)
        x = exact_x((SEQUENCE, BATCH, theirs.weight.shape[1]), BF16, generator(ctx.device, 0, "x", ctx.rank))
        grad = exact_x((SEQUENCE, BATCH, theirs.weight.shape[0]), BF16, generator(ctx.device, 0, "grad", ctx.rank))
        flux_ops.dispatch_counts(reset=True)
        compare(ctx, findings, "expert", results(ours, x, grad), results(theirs, x, grad))
        assert not flux_ops.dispatch_counts()
        if kind == "column" and not sources()[0]._grad_accum_fusion_available:
            fusing = config_of(ctx, True, gradient_accumulation_fusion=True)
            for option in ("is_expert", "disable_grad_reduce"):
                with pytest.raises(NotImplementedError, match=f"gradient_accumulation_fusion is True.*{option}"):
                    build(ctx, sources()[1], kind, fusing, **{option: True})
    return findings.finish()


def patching(ctx, kind, sequence_parallel):
    """patch() holds for layers that are there, for new ones and for derived classes; unpatch() undoes it all."""
    findings = Findings()
    with megatron(ctx):
        layers, ours = sources()
        megatrons = getattr(layers, NAMES[kind])
        methods = dict(vars(megatrons))
        derived = type("Derived", (megatrons,), {})
        config = config_of(ctx, sequence_parallel)
        before = build(ctx, layers, kind, config)
        x, grad = data(ctx, before)
        want = results(before, x, grad)
        with pytest.raises(ValueError, match="strategy is 'fastest'"):
            ours.patch("fastest")
        assert dict(vars(megatrons)) == methods
        ours.patch("sequential")
        try:
            with without_megatrons_product():
                after = build(ctx, layers, kind, config)
                below = build(ctx, types.SimpleNamespace(**{NAMES[kind]: derived}), kind, config)
                assert type(after) is megatrons
                assert type(below) is derived
                for name, layer in (("before", before), ("after", after), ("derived", below)):
                    layer.zero_grad()
                    flux_ops.dispatch_counts(reset=True)
                    compare(ctx, findings, name, results(layer, x, grad), want)
                    if sequence_parallel:
                        assert {strategy for _, strategy, _ in flux_ops.dispatch_counts()} == {"sequential"}
        finally:
            ours.unpatch()
        assert dict(vars(megatrons)) == methods
        ours.unpatch()
        assert dict(vars(megatrons)) == methods
    return findings.finish()


def saving(ctx):
    """patch(save_gathered=True): no gather in the backward, and the same results."""
    findings = Findings()
    with megatron(ctx):
        megatrons, ours = sources()
        layer = build(ctx, megatrons, "column", config_of(ctx, True))
        x, grad = data(ctx, layer)
        want = results(layer, x, grad)
        for saves in (False, True):
            layer.zero_grad()
            ours.patch("sequential", save_gathered=saves)
            try:
                with Calls() as calls:
                    compare(ctx, findings, f"save_gathered={saves}", results(layer, x, grad), want)
            finally:
                ours.unpatch()
            gathers = calls.made.count("all_gather")
            findings.add(f"save_gathered={saves}", None if gathers == int(not saves) else f"{gathers} gathers")
    return findings.finish()


over_forms = pytest.mark.parametrize("kind, sequence_parallel", FORMS)


@needs_megatron
@pytest.mark.worlds(2, 4)
class MegatronCases:
    @over_forms
    def test_layers_agree(self, ranks, record_property, kind, sequence_parallel):
        record_property("cells", ranks.run(layers_agree, kind, sequence_parallel)[0])

    @over_forms
    def test_attributes_of_parameters(self, ranks, kind, sequence_parallel):
        ranks.run(attributes, kind, sequence_parallel)

    @over_forms
    def test_accumulation_in_main_grad(self, ranks, record_property, kind, sequence_parallel):
        record_property("cells", ranks.run(accumulation, kind, sequence_parallel)[0])

    @pytest.mark.parametrize("sequence_parallel", (False, True))
    def test_output_layer(self, ranks, sequence_parallel):
        ranks.run(output_layer, sequence_parallel)

    @pytest.mark.parametrize("kind", KINDS)
    def test_state(self, ranks, record_property, kind):
        record_property("cells", ranks.run(state, kind)[0])

    @pytest.mark.parametrize("kind", KINDS)
    def test_experts_remain_megatrons(self, ranks, kind):
        ranks.run(experts, kind)

    @over_forms
    def test_patch_and_unpatch(self, ranks, kind, sequence_parallel):
        ranks.run(patching, kind, sequence_parallel)

    def test_gathered_operand_is_kept(self, ranks):
        ranks.run(saving)
