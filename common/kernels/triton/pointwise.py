"""RMSNorm with the residual's addition, gated SiLU, and RoPE with the write of K and V: bound by bytes, one pass each.

Each program takes a row whole, in registers: what is read twice is read from memory once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps, n, heads, x_row, x_head, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, head): out = norm(x), or with ADD norm(residual += x). Sums in float32."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < n
    x = tl.load(x_ptr + row * x_row + head * x_head + column, mask=inside, other=0.0)
    dtype = x.dtype
    if ADD:
        residual = residual_ptr + row * n + column
        x = (x.to(tl.float32) + tl.load(residual, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / n + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normal = (wide * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + (row * heads + head) * n + column, (normal * weight).to(dtype), mask=inside)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Program (row, piece of n): silu(x[:n]) * x[n:], the first factor rounded as the reference rounds it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    gate = tl.load(x_ptr + row * 2 * n + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * n + n + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * n + column, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def rope_write_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, num_heads, num_kv_heads, block_size, qkv_row,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, head): a head of q is rotated in place, one of k rotated and stored, one of v stored.

    A negative slot is padding: nothing is stored for it.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = D // 2
    column = tl.arange(0, BLOCK)
    inside = column < half
    place = qkv_ptr + row * qkv_row + head * D + column
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + half, mask=inside, other=0.0)
    dtype = first.dtype
    if head < num_heads + num_kv_heads:
        cos = tl.load(cos_ptr + row * half + column, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * half + column, mask=inside, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
        tl.store(place, first, mask=inside)
        tl.store(place + half, second, mask=inside)
    slot = tl.load(slots_ptr + row)
    if (head >= num_heads) & (slot >= 0):
        # Heads of k then v, in the order in which a block holds them.
        in_block = (head - num_heads) * block_size + slot % block_size
        target = pool_ptr + (slot // block_size * 2 * num_kv_heads * block_size + in_block) * D + column
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x: [T, n] or [T, heads, n], the last dimension dense. residual: [T, n], contiguous; x is added to it first."""
    shaped = x if x.dim() == 3 else x[:, None]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows, heads, n = shaped.shape
    block = triton.next_power_of_2(n)
    rms_norm_kernel[(rows, heads)](
        shaped, x if residual is None else residual, weight, out, eps, n, heads, shaped.stride(0), shaped.stride(1),
        ADD=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2 * n], contiguous."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(n))
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(n, block))](gate_up, out, n, BLOCK=block, num_warps=4)
    return out


def rope_write_kv(
    qkv: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """qkv: [T, num_heads + 2 * num_kv_heads, D], the last two dimensions dense."""
    rows, heads, head_dim = qkv.shape
    block = triton.next_power_of_2(head_dim // 2)
    rope_write_kv_kernel[(rows, heads)](
        qkv, cos, sin, pool, slots, num_heads, pool.shape[2], pool.shape[3], qkv.stride(0),
        D=head_dim, BLOCK=block, num_warps=1,
    )  # fmt: skip
