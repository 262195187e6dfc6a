"""The layers in a group of one rank: they are nn.Linear; and what their constructors refuse."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear, main_grad

LAYERS = (ColumnParallelLinear, RowParallelLinear)
over_layers = pytest.mark.parametrize("cls, sequence_parallel", tuple(itertools.product(LAYERS, (False, True))))


def assert_is_linear(layer, x, times=1):
    """Results and gradients are those of the nn.Linear with the same parameters."""
    whole = nn.Linear(layer.in_features, layer.out_features, dtype=x.dtype)
    whole.load_state_dict(layer.full_state_dict())
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(ours), whole(theirs)
    torch.testing.assert_close(y, want)
    for _ in range(times):
        torch.sin(layer(ours)).sum().backward()
        torch.sin(whole(theirs)).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    weight_grad = layer.weight.main_grad if layer.gradient_accumulation_fusion else layer.weight.grad
    torch.testing.assert_close(weight_grad, whole.weight.grad)
    torch.testing.assert_close(layer.bias.grad, whole.bias.grad)


@over_layers
@pytest.mark.parametrize("fused", (False, True))
def test_one_rank_is_nn_linear(one_rank, cls, sequence_parallel, fused):
    layer = cls(8, 6, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=fused, dtype=torch.float64)
    if fused:
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    assert_is_linear(layer, torch.randn(5, 3, 8, dtype=torch.float64), times=2)


@over_layers
@pytest.mark.parametrize("skip_bias_add", (False, True))
def test_gradcheck(one_rank, cls, sequence_parallel, skip_bias_add):
    options = {"sequence_parallel": sequence_parallel, "skip_bias_add": skip_bias_add, "dtype": torch.float64}
    layer = cls(4, 3, **options)
    names, values = zip(*layer.named_parameters(), strict=True)

    def apply(x, *parameters):
        result = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        return result[0] * result[1] if skip_bias_add else result

    x = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(apply, (x, *values))


@over_layers
def test_second_derivatives_are_refused(one_rank, cls, sequence_parallel):
    layer = cls(4, 3, sequence_parallel=sequence_parallel)
    x = torch.randn(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"only once|differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize("cls", LAYERS)
def test_forms_of_the_result(one_rank, cls):
    x = torch.randn(2, 8)
    whole = nn.Linear(8, 6)
    y, bias = cls.from_linear(whole, skip_bias_add=True)(x)
    torch.testing.assert_close(y, F.linear(x, whole.weight))
    assert torch.equal(bias, whole.bias)
    y, bias = cls(8, 6, bias=False, skip_bias_add=True)(x)
    assert bias is None


def test_merged_results(one_rank):
    x, wholes = torch.randn(2, 8), [nn.Linear(8, size) for size in (6, 2, 4)]
    wants = [whole(x) for whole in wholes]
    for got, want in zip(ColumnParallelLinear.from_linear(wholes)(x), wants, strict=True):
        torch.testing.assert_close(got, want)
    unsplit = ColumnParallelLinear.from_linear(wholes, split_output=False)(x)
    torch.testing.assert_close(unsplit, torch.cat(wants, -1))
    ys, biases = ColumnParallelLinear.from_linear(wholes, skip_bias_add=True)(x)
    for y, bias, want in zip(ys, biases, wants, strict=True):
        torch.testing.assert_close(y + bias, want)
    y, bias = ColumnParallelLinear.from_linear(wholes, skip_bias_add=True, split_output=False)(x)
    torch.testing.assert_close(y + bias, torch.cat(wants, -1))
    gathered = ColumnParallelLinear.from_linear(wholes, gather_output=True, split_output=False)(x)
    torch.testing.assert_close(gathered, torch.cat(wants, -1))
    assert isinstance(ColumnParallelLinear(8, [6])(x), tuple)


def test_partition_stride(one_rank):
    """As Megatron counts it: the parts of a merged weight that are cut alike."""
    assert ColumnParallelLinear(8, 6).weight.partition_stride == 1
    assert ColumnParallelLinear(8, [6, 6]).weight.partition_stride == 2
    assert ColumnParallelLinear(8, [6, 2]).weight.partition_stride == 1


def test_meta(one_rank):
    layer = ColumnParallelLinear(8, 6, device="meta", dtype=torch.bfloat16)
    assert layer.weight.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.abs().max() <= 8**-0.5
    assert layer.weight.partition_dim == 0
    assert layer.bias.tensor_model_parallel


def test_repr(one_rank):
    assert repr(ColumnParallelLinear(8, [6, 2], bias=False, sequence_parallel=True)) == (
        "ColumnParallelLinear(in_features=8, out_features=[6, 2], bias=False, sequence_parallel=True, rank 0 of TP=1)"
    )
    assert "out_features=6, bias=True" in repr(RowParallelLinear(8, 6))


def replicated_columns(x, **options):
    return flux_ops.nn.column_parallel(x, [torch.ones(6, 8)], sequence_parallel=False, **options)


@pytest.mark.parametrize(
    "make, words",
    (
        (lambda: ColumnParallelLinear(0, 6), "in_features is 0"),
        (lambda: ColumnParallelLinear(8, 6.0), r"out_features is 6\.0"),
        (lambda: ColumnParallelLinear(8, []), "out_features is empty"),
        (lambda: ColumnParallelLinear(8, [6, -1]), "out_features is -1"),
        (lambda: RowParallelLinear(8, True), "out_features is True"),
        (lambda: ColumnParallelLinear(8, 6, gather_output=True, skip_bias_add=True), "gather_output and skip_bias_add"),
        (lambda: RowParallelLinear(8, 6, input_is_parallel=False, sequence_parallel=True), "input_is_parallel"),
        (lambda: RowParallelLinear(8, 6, sequence_parallel=True)(torch.ones(2, 7)), "K is 8 in weight and 7 in x"),
        (lambda: ColumnParallelLinear(8, 6, strategy="best"), "strategy is 'best'"),
        (lambda: ColumnParallelLinear(8, 6, strategy=None), "strategy is None"),
        (lambda: ColumnParallelLinear(8, "6"), "out_features is '6'"),
        (lambda: ColumnParallelLinear(8, [6, 2]).load_full_state_dict([]), "0 state dicts"),
        (
            lambda: ColumnParallelLinear(8, [6, 2]).load_full_state_dict(
                [nn.Linear(8, n).state_dict() for n in (2, 6)]
            ),
            r"weight of state dict 0 has shape \[2, 8\]; that of part 0 of \[6, 2\] has shape \[6, 8\]",
        ),
        (lambda: ColumnParallelLinear.from_linear([]), "linear is empty"),
        (lambda: ColumnParallelLinear.from_linear(nn.ReLU()), "linear is ReLU"),
        (lambda: RowParallelLinear.from_linear([nn.Linear(8, 6)]), r"out_features is \[6\]"),
        (lambda: ColumnParallelLinear(8, 6).load_full_state_dict({"weight": torch.ones(6, 8)}), "'bias'"),
        (lambda: RowParallelLinear(8, 6, bias=False).load_full_state_dict({"weight": torch.ones(8, 6)}), r"\[6, 8\]"),
        (lambda: ColumnParallelLinear.from_linear([nn.Linear(8, 6), nn.Linear(7, 6)]), "same in_features"),
        (lambda: flux_ops.nn.column_parallel(torch.ones(2, 8), []), "weights has 0"),
        (lambda: flux_ops.nn.column_parallel(torch.ones(2, 8), [torch.ones(6, 8)], [None, None]), "biases 2"),
        (lambda: replicated_columns(torch.ones(2, 8), strategy="best"), "column_parallel: strategy is 'best'"),
        (lambda: replicated_columns(torch.ones(8)), r"column_parallel: x must have at least 2 .* shape \[8\]"),
        (lambda: ColumnParallelLinear(8, 6)(torch.ones(8)), "ColumnParallelLinear: x must have at least 2 dimensions"),
        (lambda: flux_ops.nn.prepare(ColumnParallelLinear(8, 6, device="meta"), 64), "prepare: .* the meta device"),
    ),
)
def test_refusals(one_rank, make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def test_from_linear_takes_what_the_linear_has(one_rank):
    linear = nn.Linear(8, 6, bias=False, dtype=torch.float64).eval()
    linear.weight.requires_grad_(False)
    layer = RowParallelLinear.from_linear(linear)
    assert (layer.bias, layer.weight.dtype, layer.weight.requires_grad, layer.training) == (
        None,
        torch.float64,
        False,
        False,
    )
    with pytest.raises(TypeError, match=r"dtype is that of the nn\.Linear"):
        RowParallelLinear.from_linear(linear, dtype=torch.float32)


@pytest.mark.parametrize("total_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_product_is_added_in_the_dtype_of_the_total(dtype, total_dtype):
    if dtype == torch.float32 and total_dtype == torch.bfloat16:
        pytest.skip("main_grad is never narrower than the weight")
    a, b = torch.randn(5, 300).to(dtype), torch.randn(300, 7).to(dtype)
    start = torch.randn(5, 7).to(total_dtype)
    total = start.clone()
    main_grad.add_product(total, a, b)
    want = start.double() + a.double() @ b.double()
    torch.testing.assert_close(
        total, want.to(total_dtype), rtol=1e-5 if total_dtype == torch.float32 else 1e-2, atol=1e-5
    )


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch built for CUDA")
def test_product_for_a_wider_total_can_be_traced(monkeypatch):
    """On a GPU, which need not be there: tensors are fake while a graph is traced."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode():
        total = torch.empty(5, 7, device="cuda")
        a, b = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((5, 300), (300, 7)))
        main_grad.add_product(total, a, b)


def test_hooks_of_main_grad(one_rank):
    """Frameworks that wait for a gradient get one without meaning."""
    layer = ColumnParallelLinear(8, 6, gradient_accumulation_fusion=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer.weight.grad_added_to_main_grad = False
    layer.weight.zero_out_wgrad = True
    called = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: called.append(weight.grad.abs().max().item()))
    layer(torch.randn(3, 8)).sum().backward()
    assert called == [0.0]
    assert layer.weight.grad_added_to_main_grad is True
    assert layer.weight.main_grad.abs().max() > 0


def test_what_prepare_makes_ready(one_rank):
    model = nn.Sequential(ColumnParallelLinear(8, 6, sequence_parallel=True), nn.ReLU(), RowParallelLinear(6, 8))
    flux_ops.nn.prepare(model, 64)
    assert list(model[0].products()) == [("ag_gemm", 6, 8), ("gemm_rs", 8, 6)]
    assert list(model[0].products(training=False)) == [("ag_gemm", 6, 8)]
    assert list(model[2].products()) == [("gemm_ar", 8, 6)]
    with pytest.raises(ValueError, match="max_m"):
        flux_ops.nn.prepare(model[0], 0)


def test_groups_that_gradients_are_not_added_over(one_rank):
    model = RowParallelLinear(6, 8, sequence_parallel=True)
    model(torch.randn(4, 6)).sum().backward()
    before = model.bias.grad.clone()
    gone = dist.new_group([0])
    dist.destroy_process_group(gone)
    for error, words, group in (
        (TypeError, "group is 17", 17),
        (ValueError, "not a member", dist.GroupMember.NON_GROUP_MEMBER),
        (ValueError, "destroyed", gone),
    ):
        with pytest.raises(error, match=f"allreduce_sequence_parallel_grads: .*{words}"):
            flux_ops.nn.allreduce_sequence_parallel_grads(model, group)
    flux_ops.nn.allreduce_sequence_parallel_grads(model)
    assert model.bias.grad.equal(before)
