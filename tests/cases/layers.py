"""The parallel layers against one whole nn.Linear, in exact data: results, gradients, and what is not computed."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import BF16, FP16, FP32, FP64
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_bias, exact_x, generator

KINDS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
FORMS = tuple(itertools.product(KINDS, (False, True)))  # kind, sequence_parallel
IN, OUT, TOKENS = 192, 384, 8  # divided by 2, 3, 4 and 8 ranks they are multiples of 8
NEEDS = ((1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1))  # x, weight, bias

over_forms = pytest.mark.parametrize("kind, sequence_parallel", FORMS)


class Cell:
    """A layer and the whole nn.Linear that it is a shard of, with input and gradient for both."""

    def __init__(
        self, ctx, kind, sequence_parallel, *, bias=True, leading=(), seed=0, dtype=BF16, tokens=TOKENS, **options
    ):
        self.ctx, self.kind, self.sequence_parallel = ctx, kind, sequence_parallel
        device = ctx.device
        self.whole = nn.Linear(IN, OUT, bias=bias, dtype=dtype, device=device)
        m = tokens * ctx.world
        with torch.no_grad():
            self.whole.weight.copy_(exact_x((OUT, IN), dtype, generator(device, seed, "weight")))
            if bias:
                self.whole.bias.copy_(exact_bias(OUT, dtype, generator(device, seed, "bias")))
        self.layer = KINDS[kind].from_linear(self.whole, sequence_parallel=sequence_parallel, **options)
        self.whole.to(FP64)
        self.x_whole = exact_x((m, *leading, IN), FP64, generator(device, seed, "x"))
        self.grad_whole = exact_x((m, *leading, OUT), FP64, generator(device, seed, "grad"))
        self.x, self.grad = self.of_input(self.x_whole).to(dtype), self.of_output(self.grad_whole).to(dtype)

    def _rows(self, whole):
        return whole.chunk(self.ctx.world)[self.ctx.rank]

    def _columns(self, whole):
        return whole.chunk(self.ctx.world, dim=-1)[self.ctx.rank]

    def of_input(self, whole):
        """This rank's part of x, or of its gradient."""
        if self.kind == "row":
            return self._columns(whole)
        return self._rows(whole) if self.sequence_parallel else whole

    def of_output(self, whole):
        if self.kind == "column":
            return self._columns(whole)
        return self._rows(whole) if self.sequence_parallel else whole

    def require(self, needs):
        """What wants a gradient: x, weight, bias."""
        for tensor, wanted in zip((self.x, self.layer.weight, self.layer.bias), needs, strict=True):
            if tensor is not None:
                tensor.requires_grad_(bool(wanted))
        return self

    def expected(self, times=1):
        """(y, dX, dW, db) of this rank in fp64, from the whole layer; gradients of `times` backwards."""
        x = self.x_whole.clone().requires_grad_()
        whole = copy.deepcopy(self.whole).requires_grad_()
        y = whole(x)
        y.backward(self.grad_whole * times)
        world, rank = self.ctx.world, self.ctx.rank
        weight = whole.weight.grad.chunk(world, 0 if self.kind == "column" else 1)[rank]
        bias = None if whole.bias is None else whole.bias.grad
        if bias is not None and self.kind == "column":
            bias = bias.chunk(world)[rank]
        return self.of_output(y.detach()), self.of_input(x.grad), weight, bias

    def compare(self, findings, what, got, want):
        if want is not None and got is not None:
            problem = first_difference(got, want.to(got.dtype), rank=self.ctx.rank)
        else:
            problem = None if want is got else f"rank {self.ctx.rank}: got {got}, expected {want}"
        findings.add(f"{self.kind}, sequence_parallel {self.sequence_parallel}: {what}", problem)

    def compare_grads(self, findings, what, needs=(1, 1, 1), times=1):
        """After the backward: gradients of what needs one, the replicated bias's added up; none of the others."""
        flux_ops.nn.allreduce_sequence_parallel_grads(self.layer, self.layer.group)
        _, *wants = self.expected(times)
        weight_grad = getattr(self.layer.weight, "main_grad", self.layer.weight.grad)
        bias = self.layer.bias
        gots = (self.x.grad, weight_grad, None if bias is None else bias.grad)
        for name, got, want, wanted in zip(("x", "weight", "bias"), gots, wants, needs, strict=True):
            self.compare(findings, f"{what}: gradient of {name}", got, want if wanted else None)


def forward_and_backward(ctx, kind, sequence_parallel, strategy):
    """Results and gradients for every combination of what needs one."""
    findings = Findings()
    for bias, leading, needs in itertools.product((True, False), ((), (3,)), NEEDS):
        if not bias and not any(needs[:2]):
            continue
        cell = Cell(ctx, kind, sequence_parallel, bias=bias, leading=leading, seed=sum(needs), strategy=strategy)
        y = cell.require(needs).layer(cell.x)
        what = f"bias {bias}, leading {leading}, needs {needs}"
        cell.compare(findings, f"{what}: y", y.detach(), cell.expected()[0])
        y.backward(cell.grad)
        cell.compare_grads(findings, what, needs)
    return findings.finish()


def bias_once(ctx, kind, sequence_parallel):
    """Without an input the result is the bias."""
    cell = Cell(ctx, kind, sequence_parallel)
    bias = torch.arange(OUT, device=ctx.device, dtype=BF16) % 7
    cell.layer.load_full_state_dict({"weight": cell.whole.weight, "bias": bias})
    y = cell.layer(torch.zeros_like(cell.x))
    findings = Findings()
    cell.compare(findings, "y", y.detach(), cell.layer.bias.detach().expand_as(y))
    return findings.finish()


LAUNCHES = {
    "flux::ag_gemm": "ag_gemm",
    "flux::gemm_rs": "gemm_rs",
    "flux::gemm_ar": "gemm_ar",
    "aten::mm": "product",
    "aten::addmm_": "product",
    "aten::addmm": "product",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::wait_tensor": "wait",
}


class Calls(TorchDispatchMode):
    """The products and collectives that are dispatched, in order."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = LAUNCHES.get(func._schema.name)
        if name:
            self.made.append(name)
        return func(*args, **(kwargs or {}))


def backward_calls(form, needs, save_gathered):
    """What the backward has to launch, in order, and nothing else."""
    x, weight, _ = needs
    if form == ("column", True):
        gathers = weight and not save_gathered
        calls = ["all_gather"] * gathers + ["gemm_rs"] * x + ["wait"] * gathers + ["product"] * weight
    elif form == ("row", True):
        calls = ["ag_gemm"] * x + ["all_gather", "wait"] * (weight and not x) + ["product"] * weight
    elif form == ("column", False):
        calls = ["product", "all_reduce"] * x + ["product"] * weight + ["wait"] * x
    else:
        calls = ["product"] * x + ["product"] * weight
    return calls


def launches(ctx):
    """Only what a wanted gradient needs is launched, with collectives ahead of the product that they overlap with."""
    findings = Findings()
    for form, needs, fused, save_gathered in itertools.product(FORMS, NEEDS, (False, True), (False, True)):
        if save_gathered and form != ("column", True):
            continue
        options = {"save_gathered": True} if save_gathered else {}
        cell = Cell(ctx, *form, gradient_accumulation_fusion=fused, **options).require(needs)
        if fused and needs[1]:
            cell.layer.weight.main_grad = torch.zeros_like(cell.layer.weight, dtype=FP32)
        with Calls() as calls:
            y = cell.layer(cell.x)
            calls.made.clear()
            y.backward(cell.grad)
        want = backward_calls(form, needs, save_gathered)
        # With more than two GPUs a collective may not run beside a kernel that waits for peers: it is waited for twice.
        made = calls.made if ctx.world == 2 or not ctx.is_cuda else [c for c in calls.made if c != "wait"]
        want = want if made is calls.made else [c for c in want if c != "wait"]
        what = f"{form}, needs {needs}, main_grad {fused}, save_gathered {save_gathered}"
        findings.add(what, None if made == want else f"rank {ctx.rank}: launched {made}, expected {want}")
        cell.compare_grads(findings, what, needs)
    return findings.finish()


def accumulation(ctx, kind, sequence_parallel):
    """main_grad adds up over backwards, in its own dtype, without the rounding of a 16-bit gradient in between."""
    findings = Findings()
    for main_dtype, options in itertools.product((FP32, BF16), ({}, {"save_gathered": True})):
        if options and kind == "row":
            continue
        cell = Cell(ctx, kind, sequence_parallel, gradient_accumulation_fusion=True, seed=2, **options).require(
            (1, 1, 1)
        )
        cell.layer.weight.main_grad = torch.zeros_like(cell.layer.weight, dtype=main_dtype)
        cell.layer.weight.grad_added_to_main_grad = False
        for _ in range(3):
            cell.layer(cell.x).backward(cell.grad)
        what = f"main_grad {main_dtype}"
        findings.add(what, None if cell.layer.weight.grad_added_to_main_grad else "grad_added_to_main_grad is False")
        grad = cell.layer.weight.grad
        findings.add(what, None if grad is not None and grad.shape == cell.layer.weight.shape else "no dummy gradient")
        cell.compare_grads(findings, what, times=3)

    tokens = 257  # of ones: a sum that 16 bits of bfloat16 don't hold
    cell = Cell(ctx, kind, sequence_parallel, gradient_accumulation_fusion=True)
    cell.layer.weight.main_grad = torch.full_like(cell.layer.weight, 1.0, dtype=FP32)
    gathers = kind == "column" and sequence_parallel
    rows = tokens if gathers else tokens * ctx.world if sequence_parallel else tokens
    x = torch.ones(rows, cell.x.shape[-1], dtype=BF16, device=ctx.device)
    y = cell.layer(x)
    y.backward(torch.ones_like(y))
    total = tokens * (ctx.world if sequence_parallel else 1) + 1.0
    want = torch.full_like(cell.layer.weight.main_grad, total)
    cell.compare(findings, "sum of many ones", cell.layer.weight.main_grad, want)
    findings.add("grad", None if cell.layer.weight.grad is None else "is not None")
    return findings.finish()


def recomputed_and_reused(ctx, kind, sequence_parallel):
    """Activation checkpointing, both kinds, and a layer twice in one graph."""
    findings = Findings()
    for fused, use_reentrant in itertools.product((False, True), (False, True)):
        cell = Cell(ctx, kind, sequence_parallel, gradient_accumulation_fusion=fused, seed=3).require((1, 1, 1))
        if fused:
            cell.layer.weight.main_grad = torch.zeros_like(cell.layer.weight, dtype=FP32)
        y = checkpoint(cell.layer, cell.x, use_reentrant=use_reentrant)
        y.backward(cell.grad)
        cell.compare_grads(findings, f"checkpoint, use_reentrant {use_reentrant}, main_grad {fused}")

        for tensor in (cell.x, cell.layer.bias, cell.layer.weight):
            tensor.grad = None
        if fused:
            cell.layer.weight.main_grad.zero_()
        (cell.layer(cell.x) + cell.layer(cell.x)).backward(cell.grad)
        cell.compare_grads(findings, f"used twice, main_grad {fused}", times=2)
    return findings.finish()


def bad_main_grad(ctx, kind, sequence_parallel):
    """Where the gradient can't go there, the forward says so, on every rank, and the next good call works."""
    cell = Cell(ctx, kind, sequence_parallel, gradient_accumulation_fusion=True).require((1, 1, 1))
    weight, messages = cell.layer.weight, []
    for error, main_grad in (
        (ValueError, None),
        (TypeError, torch.zeros_like(weight, dtype=FP16)),
        (TypeError, torch.zeros_like(weight, dtype=torch.int32)),
        (ValueError, torch.zeros(3, dtype=FP32, device=ctx.device)),
    ):
        weight.main_grad = main_grad
        with pytest.raises(error, match="main_grad") as caught:
            cell.layer(cell.x)
        messages.append(str(caught.value))
    weight.main_grad = torch.zeros_like(weight, dtype=FP32)
    cell.layer(cell.x).backward(cell.grad)
    findings = Findings()
    cell.compare_grads(findings, "after the errors")
    findings.finish()
    return messages


def outputs(ctx):
    """What forward returns: gathered or not, split or not, the bias added or beside it; input whole or cut."""
    findings = Findings()
    for leading, fused in itertools.product(((), (2,)), (False, True)):
        options = {"leading": leading, "gradient_accumulation_fusion": fused}
        for sequence_parallel in (False, True):
            cell = Cell(ctx, "column", sequence_parallel, gather_output=True, **options)
            cell.of_output = lambda whole: whole
            check_once(cell, findings, "gather_output", cell.grad_whole.to(BF16))
        cell = Cell(ctx, "row", False, input_is_parallel=False, **options)
        cell.of_input, cell.x = lambda whole: whole, cell.x_whole.to(BF16)
        check_once(cell, findings, "input_is_parallel False", cell.grad)
        for form in FORMS:
            cell = Cell(ctx, *form, skip_bias_add=True, **options)
            check_once(cell, findings, "skip_bias_add", cell.grad, lambda result: result[0] + result[1])
    return findings.finish()


def check_once(cell, findings, what, grad, output=lambda result: result):
    cell.require((1, 1, 1))
    cell.layer.weight.main_grad = torch.zeros_like(cell.layer.weight, dtype=FP32)
    y = output(cell.layer(cell.x))
    cell.compare(findings, f"{what}: y", y.detach(), cell.expected()[0])
    y.backward(grad)
    if not cell.layer.gradient_accumulation_fusion:
        del cell.layer.weight.main_grad
    cell.compare_grads(findings, what)


def merged(ctx, sequence_parallel):
    """Several outputs of one product, and several weights of one gather, against a layer for each."""
    findings = Findings()
    sizes = (64 * ctx.world, 16 * ctx.world, 16 * ctx.world)
    wholes = []
    for i, size in enumerate(sizes):
        linear = nn.Linear(IN, size, dtype=BF16, device=ctx.device)
        with torch.no_grad():
            linear.weight.copy_(exact_x((size, IN), BF16, generator(ctx.device, i, "weight")))
            linear.bias.copy_(exact_bias(size, BF16, generator(ctx.device, i, "bias")))
        wholes.append(linear)
    m = TOKENS * ctx.world
    x_whole = exact_x((m, 2, IN), BF16, generator(ctx.device, 0, "x"))
    x_own = x_whole.chunk(ctx.world)[ctx.rank] if sequence_parallel else x_whole
    grads_whole = [exact_x((m, 2, size), BF16, generator(ctx.device, i, "grad")) for i, size in enumerate(sizes)]
    grads = [grad.chunk(ctx.world, dim=-1)[ctx.rank] for grad in grads_whole]

    xs = x_whole.to(FP64).requires_grad_()
    want_ys = [copy.deepcopy(linear).to(FP64)(xs) for linear in wholes]
    torch.autograd.backward(want_ys, [grad.to(FP64) for grad in grads_whole])
    want_x = (xs.grad.chunk(ctx.world)[ctx.rank] if sequence_parallel else xs.grad).to(BF16)
    want_ys = [y.detach().chunk(ctx.world, dim=-1)[ctx.rank].to(BF16) for y in want_ys]

    layer = ColumnParallelLinear.from_linear(wholes, sequence_parallel=sequence_parallel)
    separate = [ColumnParallelLinear.from_linear(one, sequence_parallel=sequence_parallel) for one in wholes]
    shared = {
        "one layer": layer,
        "one gather": lambda x: flux_ops.nn.column_parallel(
            x,
            [one.weight for one in separate],
            [one.bias for one in separate],
            sequence_parallel=sequence_parallel,
        ),
        "separate": lambda x: tuple(one(x) for one in separate),
    }
    collected = {}
    for what, forward in shared.items():
        for module in (layer, *separate):
            module.zero_grad()
        x = x_own.clone().requires_grad_()
        with Calls() as calls:
            ys = forward(x)
        made = sum(call in ("ag_gemm", "all_gather") for call in calls.made)
        gathers = sequence_parallel * (len(separate) if what == "separate" else 1)
        findings.add(f"{what}: gathers", None if made == gathers else f"{calls.made}")
        with Calls() as calls:
            torch.autograd.backward(ys, grads)
        if what == "one gather" and sequence_parallel:  # one reduction for all, while the first's dW is computed
            at_the_end = ["product", "reduce_scatter", "product", "wait"]
            alone = calls.made[-4:] == at_the_end and not {"reduce_scatter", "gemm_rs"} & set(calls.made[:-4])
            findings.add(f"{what}: backward", None if alone else f"{calls.made}")
        for i, (y, want) in enumerate(zip(ys, want_ys, strict=True)):
            findings.add(f"{what}: y {i}", first_difference(y.detach(), want, rank=ctx.rank))
        findings.add(f"{what}: gradient of x", first_difference(x.grad, want_x, rank=ctx.rank))
        weights = [layer.weight.grad] if what == "one layer" else [one.weight.grad for one in separate]
        collected[what] = torch.cat(weights)
    for what, grad in collected.items():
        findings.add(f"{what}: weights", first_difference(grad, collected["separate"], rank=ctx.rank))

    unsplit = ColumnParallelLinear.from_linear(wholes, sequence_parallel=sequence_parallel, split_output=False)
    findings.add("unsplit", first_difference(unsplit(x_own).detach(), torch.cat(want_ys, -1), rank=ctx.rank))
    return findings.finish()


class LayerCases:
    @pytest.mark.parametrize("strategy", ("auto", "sequential"))
    @over_forms
    def test_results_and_gradients(self, ranks, kind, sequence_parallel, strategy, record_property):
        record_property("cells", ranks.run(forward_and_backward, kind, sequence_parallel, strategy)[0])

    @over_forms
    def test_the_bias_is_added_once(self, ranks, kind, sequence_parallel):
        ranks.run(bias_once, kind, sequence_parallel)

    def test_nothing_is_launched_in_vain(self, ranks, record_property):
        record_property("cells", ranks.run(launches)[0])

    @over_forms
    def test_main_grad_adds_up(self, ranks, kind, sequence_parallel):
        ranks.run(accumulation, kind, sequence_parallel)

    @pytest.mark.worlds(2, 4)
    @over_forms
    def test_main_grad_that_can_not_be_used(self, ranks, kind, sequence_parallel):
        for missing, fp16, int32, shape in ranks.run(bad_main_grad, kind, sequence_parallel):
            assert "has no main_grad" in missing
            assert "torch.float16" in fp16
            assert "torch.int32" in int32
            assert "[3]" in shape

    @over_forms
    def test_checkpointing_and_reuse(self, ranks, kind, sequence_parallel):
        ranks.run(recomputed_and_reused, kind, sequence_parallel)

    def test_forms_of_input_and_output(self, ranks):
        ranks.run(outputs)

    @pytest.mark.parametrize("sequence_parallel", (False, True))
    def test_merged_layers(self, ranks, sequence_parallel):
        ranks.run(merged, sequence_parallel)
