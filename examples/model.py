"""A Llama-shaped decoder, tensor-parallel: written once, for the layers of flux_ops.nn and for those of plain PyTorch.

    x = embedding(tokens)
    x = x + attention(RMSNorm(x))           for each block; rotary positions, grouped-query attention
    x = x + mlp(RMSNorm(x))                 down(silu(gate(x)) * up(x))
    logits = head(RMSNorm(x))

Activations are [s, b, h]: position, sequence, hidden. A rank holds its heads, its columns of the MLP and its part of
the vocabulary. For training, the model is sequence-parallel: between the layers a rank holds s / TP of the positions,
each column-parallel layer gathers them (ag_gemm), each row-parallel layer scatters them (gemm_rs). For inference of
few tokens it isn't: all ranks hold all tokens, and a row-parallel layer ends in an all-reduce (gemm_ar).
"""

import dataclasses
import types

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn

import flux_ops
from examples import plain

LAYERS = {"flux": flux_ops.nn, "plain": plain}


@dataclasses.dataclass(frozen=True)
class Config:
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 256
    tied: bool = False  # the head has the weight of the embedding
    rope_theta: float = 500_000.0
    epsilon: float = 1e-5


TINY = Config(hidden=128, ffn=384, layers=2, heads=4, kv_heads=4, head_dim=32, tied=True)
SMALL = Config(hidden=1024, ffn=4096, layers=8, heads=16, kv_heads=8, head_dim=64)
LAYERS_OF_8B = Config(hidden=4096, ffn=14336, layers=4, heads=32, kv_heads=8, head_dim=128)
CONFIGS = {"tiny": TINY, "small": SMALL, "8b-layers": LAYERS_OF_8B}


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How the model is spread, and whose linear layers it has."""

    layers: types.ModuleType = flux_ops.nn
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = True
    save_gathered: bool = (
        True  # the layers of flux_ops.nn keep what was gathered for the backward, as the plain ones do
    )
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def _common(self):
        return {
            "group": self.group,
            "sequence_parallel": self.sequence_parallel,
            "dtype": self.dtype,
            "device": self.device,
        }

    def column(self, inputs, outputs, **options):
        options |= {"save_gathered": self.save_gathered, **self._common()}
        return self.layers.ColumnParallelLinear(inputs, outputs, bias=False, **options)

    def row(self, inputs, outputs):
        return self.layers.RowParallelLinear(inputs, outputs, bias=False, **self._common())

    def norm(self, config):
        norm = nn.RMSNorm(config.hidden, config.epsilon, device=self.device, dtype=self.dtype)
        # Each rank has the gradient of its own tokens; flux_ops.nn.allreduce_sequence_parallel_grads adds them up.
        norm.weight.sequence_parallel = self.sequence_parallel
        return norm


class Embedding(nn.Module):
    """Each rank looks up the tokens that are in its part of the vocabulary; the sum over the ranks has all of them."""

    def __init__(self, config, parallel):
        super().__init__()
        whole = parallel.column(config.hidden, config.vocab)
        self.weight = whole.weight  # [vocab / TP, hidden], cut as that of a column-parallel layer
        self.first = whole.rank * self.weight.shape[0]
        self.group, self.sequence_parallel = parallel.group, parallel.sequence_parallel

    def forward(self, tokens):
        own, local = own_tokens(tokens, self.first, self.weight.shape[0])
        x = F.embedding(local, self.weight) * own.unsqueeze(-1)
        if self.sequence_parallel:
            return collectives.reduce_scatter_tensor_autograd(x, "sum", 0, self.group or dist.group.WORLD)
        dist.all_reduce(x, group=self.group)
        return x


def own_tokens(tokens, first, count):
    """(which tokens this rank has, where in its part of the vocabulary they are)."""
    own = (tokens >= first) & (tokens < first + count)
    return own, torch.where(own, tokens - first, 0)


def rotation(config, positions):
    """cos and sin of the angles of rotary positions, [s, head_dim] each."""
    exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    angles = torch.outer(positions.float(), config.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """x is [b, heads, s, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-high, low], dim=-1) * sin.to(x.dtype)


class Cache:
    """Keys and values of one layer, at fixed addresses: [b, kv_heads / TP, length, head_dim] each."""

    def __init__(self, config, parallel, batch, length):
        shape = (batch, config.kv_heads // dist.get_world_size(parallel.group), length, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=parallel.dtype, device=parallel.device) for _ in range(2))

    def update(self, keys, values, positions):
        self.keys.index_copy_(2, positions, keys)
        self.values.index_copy_(2, positions, values)
        return self.keys, self.values


class Attention(nn.Module):
    def __init__(self, config, parallel):
        super().__init__()
        self.head_dim = config.head_dim
        outputs = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
        self.qkv = parallel.column(config.hidden, outputs)
        self.out = parallel.row(outputs[0], config.hidden)

    def forward(self, x, positions, cos, sin, cache=None):
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for part in self.qkv(x))
        q, k, mask = rotate(q, cos, sin), rotate(k, cos, sin), None
        if cache is not None:
            k, v = cache.update(k, v, positions)
            mask = torch.arange(k.shape[2], device=k.device) <= positions.unsqueeze(-1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.out(y.permute(2, 0, 1, 3).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config, parallel):
        super().__init__()
        self.gate_up = parallel.column(config.hidden, [config.ffn, config.ffn])
        self.down = parallel.row(config.ffn, config.hidden)

    def forward(self, x):
        gate, up = self.gate_up(x)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x is [s / TP, b, h] where the model is sequence-parallel, else [s, b, h]; the positions are those of all s."""

    def __init__(self, config, parallel):
        super().__init__()
        self.attention_norm, self.attention = parallel.norm(config), Attention(config, parallel)
        self.mlp_norm, self.mlp = parallel.norm(config), Mlp(config, parallel)

    def forward(self, x, positions, cos, sin, cache=None):
        x = x + self.attention(self.attention_norm(x), positions, cos, sin, cache)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, config, parallel):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config, parallel)
        self.blocks = nn.ModuleList(Block(config, parallel) for _ in range(config.layers))
        self.norm = parallel.norm(config)
        self.head = parallel.column(config.hidden, config.vocab, gather_output=not parallel.sequence_parallel)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, positions=None, caches=None):
        """tokens [s, b], the same on all ranks.

        Returns logits [s, b, vocab / TP] of this rank's part of the vocabulary. With caches (one for each block) the
        tokens are those at `positions` [s] of the sequences, and the logits are the last position's, [b, vocab].
        """
        if positions is None:
            positions = torch.arange(len(tokens), device=tokens.device)
        cos, sin = rotation(self.config, positions)
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, positions, cos, sin, caches[i] if caches else None)
        x = self.norm(x)
        return self.head(x[-1]) if caches else self.head(x)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target], where each rank has the logits of its part of the vocabulary."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        ctx.dtype, logits = logits.dtype, logits.float()
        peak = logits.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        own, local = own_tokens(targets, dist.get_rank(group) * logits.shape[-1], logits.shape[-1])
        scores = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) * own
        exponentials = (logits - peak.unsqueeze(-1)).exp()
        sums = torch.stack([exponentials.sum(-1), scores])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials / sums[0].unsqueeze(-1), own, local)
        return sums[0].log() + peak - sums[1]

    @staticmethod
    def backward(ctx, grad):
        softmax, own, local = ctx.saved_tensors
        softmax = softmax.scatter_add(-1, local.unsqueeze(-1), -own.to(softmax.dtype).unsqueeze(-1))
        return (softmax * grad.unsqueeze(-1)).to(ctx.dtype), None, None


def loss_of(logits, targets, group=None):
    """Mean cross-entropy of all tokens, the same on all ranks of the group. targets [s, b]."""
    return VocabParallelCrossEntropy.apply(logits, targets, group).mean()
