"""The Triton kernels, run by Triton's interpreter, give what the torch reference gives: odd shapes, both dtypes."""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence

import pytest
import torch

from common.engine.batch import Batch, ScheduledSequence, build_batch
from common.kernels.reference import ReferenceKernels
from common.kernels.triton import attention as triton_attention
from common.kernels.triton.block_copy import gather_blocks, scatter_blocks
from common.kernels.triton.kernels import TritonKernels

CPU = torch.device("cpu")
REFERENCE, TRITON = ReferenceKernels(), TritonKernels()
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32: sums in another order. bfloat16: the interpreter cuts where a GPU rounds, a unit (2⁻⁷) an operation."""
    close = {"rtol": 1e-5, "atol": 2e-5} if expected.dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(actual, expected, **close)


def step(shapes: Sequence[tuple[int, int]], block_size: int) -> tuple[Batch, int]:
    """shapes: (start, new tokens) a sequence. A batch over scattered blocks, and how many blocks the pool needs."""
    counts = [-(-(start + new) // block_size) for start, new in shapes]
    ids = list(range(sum(counts)))
    python_random.Random(3).shuffle(ids)
    scheduled = [
        ScheduledSequence([0] * new, start, [ids.pop() for _ in range(n)])
        for (start, new), n in zip(shapes, counts, strict=True)
    ]
    return build_batch(scheduled, block_size, CPU), sum(counts)


RAGGED = [(37, 1), (0, 5), (70, 9), (0, 1), (12, 20)]
ATTENTION_CASES = [
    # q heads, KV heads, head_dim, block_size, sequences
    (4, 4, 64, 16, RAGGED),
    (9, 3, 64, 5, RAGGED),
    (8, 1, 80, 16, [(0, 1)]),
    (4, 2, 96, 7, [(129, 1), (63, 1), (0, 1), (64, 1)]),
    (6, 2, 128, 32, [(3, 70), (99, 1)]),
    (16, 1, 16, 1, [(20, 3), (6, 1)]),
    (10, 2, 8, 256, [(0, 2)]),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_equals_the_reference(
    case: tuple[int, int, int, int, list[tuple[int, int]]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_heads, num_kv_heads, head_dim, block_size, shapes = case
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 64)  # several splits without long contexts
    batch, num_blocks = step(shapes, block_size)
    pool = random(num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    qkv = random(batch.token_ids.numel(), num_heads + 2, head_dim, seed=1, dtype=dtype)
    q = qkv[:, :num_heads]  # as models pass it: a view with gaps between rows
    scale = head_dim**-0.5
    expected = REFERENCE.attention(q, pool, REFERENCE.plan_attention(batch, block_size, dtype), scale)
    assert_near(TRITON.attention(q, pool, TRITON.plan_attention(batch, block_size, dtype), scale), expected)


def test_attention_reads_no_token_past_a_sequence() -> None:
    batch, num_blocks = step([(0, 3), (4, 1), (0, 1)], 4)
    pool = random(num_blocks, 2, 1, 4, 16)
    dirty = torch.full_like(pool, torch.nan)
    for table, length in zip(batch.block_tables.tolist(), batch.seq_lens.tolist(), strict=True):
        for token in range(length):
            where = (table[token // 4], slice(None), slice(None), token % 4)
            dirty[where] = pool[where]
    q = random(5, 2, 16)
    plan = TRITON.plan_attention(batch, 4, q.dtype)
    assert torch.equal(TRITON.attention(q, dirty, plan, 0.3), TRITON.attention(q, pool, plan, 0.3))


def test_attention_of_a_sequence_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 64)
    pool = random(40, 2, 2, 8, 16)
    own = ScheduledSequence([0], 100, list(range(13)))
    q = random(3, 4, 16)
    results = []
    for others in ([], [ScheduledSequence([0], 200, list(range(13, 39)))], [ScheduledSequence([0] * 2, 0, [39])]):
        batch = build_batch([own, *others], 8, CPU)
        plan = TRITON.plan_attention(batch, 8, q.dtype)
        results.append(TRITON.attention(q[: batch.token_ids.numel()], pool, plan, 0.25)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 576), (3, 90), (2, 1)])
def test_norms_equal_the_reference(rows: int, n: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, n, dtype=dtype), random(n, seed=2, dtype=dtype)
    residuals = [random(rows, n, seed=1, dtype=dtype) for _ in range(2)]
    expected = REFERENCE.add_rms_norm(x, residuals[0], weight, 1e-5)
    assert_near(TRITON.add_rms_norm(x, residuals[1], weight, 1e-5), expected)
    assert_near(*residuals)
    heads = random(rows, 5, n, seed=3, dtype=dtype)[:, 1:4]  # the norm of q and k: a view with gaps
    assert_near(TRITON.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(1, 1536), (3, 37)])
def test_silu_mul_equals_the_reference(rows: int, n: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * n, dtype=dtype)
    assert_near(TRITON.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 6])
def test_rope_and_the_write_of_kv_equal_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, block_size = 3, 2, 5
    angles = random(4, head_dim // 2, seed=1)
    angles = (angles.cos().to(dtype), angles.sin().to(dtype))
    slots = torch.tensor([17, 2, 24, 9])
    written = []
    for kernels in (REFERENCE, TRITON):
        qkv = random(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        pool = random(5, 2, num_kv_heads, block_size, head_dim, seed=2, dtype=dtype)
        kernels.rope_write_kv(qkv, num_heads, angles, pool, slots)
        written.append((qkv, pool))
    assert_near(written[1][0], written[0][0])
    assert_near(written[1][1], written[0][1])


def test_a_slot_of_padding_is_not_written() -> None:
    pool = random(2, 2, 1, 4, 8)
    before = pool.clone()
    ones = torch.ones(1, 4)
    TRITON.rope_write_kv(random(1, 3, 8, seed=1), 1, (ones, ones), pool, torch.tensor([-1]))
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "experts", "each"), [(1, 24, 40, 4, 2), (7, 70, 65, 8, 2), (40, 16, 8, 2, 1)]
)
def test_mixture_of_experts_equals_the_reference(
    rows: int, hidden: int, inner: int, experts: int, each: int, dtype: torch.dtype
) -> None:
    x = random(rows, hidden, dtype=dtype)
    router = random(experts, hidden, seed=1, dtype=dtype)
    gate_up = (random(experts, 2 * inner, hidden, seed=2) * hidden**-0.5).to(dtype)
    down = (random(experts, hidden, inner, seed=3) * inner**-0.5).to(dtype)
    arguments = (x, router, gate_up, down, each)
    assert_near(TRITON.mixture_of_experts(*arguments), REFERENCE.mixture_of_experts(*arguments))


@pytest.mark.parametrize("words", [7, 1300])
def test_blocks_are_gathered_and_scattered_whole(words: int) -> None:
    pool = torch.arange(3 * 6 * words).view(3, 6, words)
    ids = torch.tensor([4, 0, 5])
    packed = gather_blocks(pool[1:], ids)
    assert torch.equal(packed, pool[1:, ids])
    target = torch.zeros_like(pool)
    expected = target.clone()
    expected[1:, ids] = packed
    scatter_blocks(target[1:], ids, packed)
    assert torch.equal(target, expected)
