"""The reference kernels equal their definitions, written out token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.batch import ScheduledSequence, build_batch
from common.kernels import attention_plan
from common.kernels.attention_plan import plan_attention
from common.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")
KERNELS = ReferenceKernels()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend_by_definition(
    q: torch.Tensor, pool: torch.Tensor, scheduled: list[ScheduledSequence], scale: float
) -> torch.Tensor:
    """One query head of one token at a time."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = pool.shape
    out = np.zeros((num_tokens, num_heads, head_dim))
    row = 0
    for sequence in scheduled:
        for position in range(sequence.start, sequence.start + len(sequence.token_ids)):
            seen = range(position + 1)
            where = [(sequence.block_table[p // block_size], p % block_size) for p in seen]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                k, v = (
                    np.stack([pool[block, kind, kv_head, offset].double().numpy() for block, offset in where])
                    for kind in (0, 1)
                )
                scores = k @ q[row, head].double().numpy() * scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights / weights.sum() @ v
            row += 1
    return torch.from_numpy(out).view(num_tokens, -1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScheduledSequence], int]:
    """Chunks and decodes mixed, over blocks in any order; prefixes may be shared. And the block size."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    num_shared = draw(st.integers(0, 3))
    scheduled, next_block = [], num_shared
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, 12))
        count = draw(st.integers(1, 9))
        num_blocks = -(-(start + count) // block_size)
        shared = min(num_shared, start // block_size)
        own = list(range(next_block, next_block + num_blocks - shared))
        next_block += len(own)
        scheduled.append(ScheduledSequence([0] * count, start, [*range(shared), *reversed(own)]))
    return scheduled, block_size


@settings(max_examples=40)
@given(steps(), st.sampled_from([(4, 2), (3, 1), (2, 2)]), st.sampled_from([1, 3, 512]))
def test_attention_equals_its_definition(
    step: tuple[list[ScheduledSequence], int], heads: tuple[int, int], tile_rows: int
) -> None:
    scheduled, block_size = step
    num_heads, num_kv_heads = heads
    num_blocks = 1 + max(max(s.block_table) for s in scheduled)
    pool = random(num_blocks, 2, num_kv_heads, block_size, 8)
    batch = build_batch(scheduled, block_size, CPU)
    q = random(batch.token_ids.numel(), num_heads, 8, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "TILE_ROWS", tile_rows)
        patch.setattr("common.kernels.reference.TILE_ROWS", tile_rows)
        out = KERNELS.attention(q, pool, plan_attention(batch, block_size, q.dtype), 0.3)
    torch.testing.assert_close(out.double(), attend_by_definition(q, pool, scheduled, 0.3), rtol=1e-5, atol=1e-5)


def test_attention_reads_no_token_past_a_sequence() -> None:
    scheduled = [ScheduledSequence([0] * 3, 0, [0]), ScheduledSequence([0], 4, [1, 2]), ScheduledSequence([0], 0, [0])]
    pool = random(3, 2, 1, 4, 8)
    pool[0, :, :, 3:] = torch.nan
    pool[2, :, :, 1:] = torch.nan
    batch = build_batch(scheduled, 4, CPU)
    q = random(5, 2, 8)
    out = KERNELS.attention(q, pool, plan_attention(batch, 4, q.dtype), 0.3)
    clean = pool.nan_to_num(0.0)
    assert torch.equal(out, KERNELS.attention(q, clean, plan_attention(batch, 4, q.dtype), 0.3))


def test_decode_groups_bound_their_padding_and_size() -> None:
    lengths = [1, 5, 16, 250, 300, 900, 1000, 2500, 3000, *([4000] * 10)]
    scheduled = [ScheduledSequence([0], n - 1, [0] * -(-n // 16)) for n in lengths]
    groups = plan_attention(build_batch(scheduled, 16, CPU), 16, torch.float32).groups
    rows = torch.cat([group.rows for group in groups])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    for group in groups:
        contexts = [lengths[row] for row in group.rows.tolist()]
        assert max(contexts) <= max(256, 2 * min(contexts))
        assert group.mask.numel() <= 16 * 1024 + 16 * len(contexts)
        assert (group.mask == 0).sum(dim=1).tolist() == contexts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_is_written_to_its_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    pool = random(5, 2, 2, 4, 8, dtype=dtype)
    expected = pool.clone()
    k, v = random(3, 2, 8, seed=1, dtype=dtype), random(3, 2, 8, seed=2, dtype=dtype)
    for row, slot in enumerate([17, 2, 9]):
        expected[slot // 4, 0, :, slot % 4], expected[slot // 4, 1, :, slot % 4] = k[row], v[row]
    KERNELS.write_kv(k, v, pool, torch.tensor([17, 2, 9]))
    assert torch.equal(pool, expected)


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    x = random(3, 2, 8)
    angles = random(3, 4, seed=1)
    rotated = x.clone()
    KERNELS.rope(rotated, angles.cos(), angles.sin())
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(3, 4), angles)[:, None]
    torch.testing.assert_close(rotated, torch.cat([as_complex.real, as_complex.imag], dim=-1))


def test_add_rms_norm_updates_the_residual_and_normalises_the_sum() -> None:
    x, residual, weight = random(3, 16), random(3, 16, seed=1), random(16, seed=2)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual.double(), total)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    gate_up = random(3, 10)
    gate, up = gate_up[:, :5], gate_up[:, 5:]
    torch.testing.assert_close(KERNELS.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)
