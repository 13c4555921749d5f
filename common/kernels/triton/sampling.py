"""Sampling as in common/engine/sampler.py, a row a program: same filters, same noise, keyed by (seed, output index).

top-k and top-p both ask for the least value v of which "more than v" holds less than a target: a count of tokens, or a
part of their mass. Floats order like the integers of their bits, so v is found by bisection over 2³² keys, exactly:

    v(weight, target) = least key with  Σ weight(token) over tokens with key > v   <   target

Where the reference exponentiates in float64, this does in float32 and sums in float64: the filters may differ by a
token whose cumulative mass is within 1e-6 of top_p. Noise and comparison are in float64, as there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed_bits(key, counter):
    """SplitMix64's output counter + 1 from state key, uint64 (random_bits.py)."""
    gamma = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    bits = (counter.to(tl.uint64) + 1) * gamma + key
    bits = (bits ^ (bits >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def gumbel(key, counter):
    """float64, of counter's shape."""
    uniform = ((mixed_bits(key, counter) >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def ordered(x):
    """int32 that order as the float32 do."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def scaled_at(row_ptr, token, vocab, highest, temperature):
    """(logit - highest) / temperature; -inf past the vocabulary."""
    x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
    return tl.div_rn(x - highest, temperature)


@triton.jit
def weight_above(row_ptr, vocab, highest, temperature, key, floor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Of tokens with keys above `key` and not below `floor`: their number, or the mass exp(scaled). float64."""
    acc = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        scaled = scaled_at(row_ptr, token, vocab, highest, temperature)
        found = ordered(scaled).to(tl.int64)
        wanted = (token < vocab) & (found > key) & (found >= floor)
        if COUNT:
            acc += tl.where(wanted, 1.0, 0.0).to(tl.float64)
        else:
            acc += tl.where(wanted, tl.exp(scaled), 0.0).to(tl.float64)
    return tl.sum(acc, axis=0)


@triton.jit
def least_key(row_ptr, vocab, highest, temperature, target, floor, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """v(weight, target), see above. int64."""
    # From -inf's key to that of 0, the largest scaled value.
    low, high = tl.full([], -2139095041, tl.int64), tl.full([], 0, tl.int64)
    while low < high:
        middle = (low + high) >> 1
        enough = weight_above(row_ptr, vocab, highest, temperature, middle, floor, COUNT, BLOCK) < target
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high


@triton.jit
def draw_unfiltered(row_ptr, vocab, highest, temperature, key, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """Two levels: a run of RUN tokens by its mass, then a token within."""
    best = tl.full([], float("-inf"), tl.float64)
    chosen = tl.full([], 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        scaled = scaled_at(row_ptr, start + tl.arange(0, BLOCK), vocab, highest, temperature)
        mass = tl.sum(tl.reshape(tl.exp(scaled), [BLOCK // RUN, RUN]), axis=1).to(tl.float64)
        run = (start // RUN + tl.arange(0, BLOCK // RUN)).to(tl.int64)
        value = tl.log(tl.where(mass > 0.0, mass, 1.0)) + gumbel(key, run + (1 << 32))
        value = tl.where(mass > 0.0, value, float("-inf"))
        highest_here = tl.max(value, axis=0)
        first = tl.min(tl.where(value == highest_here, run, 1 << 40), axis=0)
        chosen = tl.where(highest_here > best, first, chosen)
        best = tl.maximum(best, highest_here)
    token = chosen * RUN + tl.arange(0, RUN)
    value = scaled_at(row_ptr, token, vocab, highest, temperature).to(tl.float64) + gumbel(key, token)
    return tl.min(tl.where(value == tl.max(value, axis=0), token, 1 << 40), axis=0)


@triton.jit
def draw_filtered(row_ptr, vocab, highest, temperature, key, floor, nucleus, above, target, least, BLOCK: tl.constexpr):
    """Among tokens with keys from `floor` and `nucleus` on and values from `least` on. Of those at `nucleus` itself, by
    id, as many as it takes for the mass `above` it to reach `target`."""
    best = tl.full([], float("-inf"), tl.float64)
    chosen = tl.full([], 0, tl.int64)
    ties = tl.full([], 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        scaled = scaled_at(row_ptr, token, vocab, highest, temperature)
        found = ordered(scaled).to(tl.int64)
        tied = (found == nucleus) & (token < vocab)
        number = ties + tl.cumsum(tied.to(tl.int64), axis=0) - tied.to(tl.int64)
        within = (found > nucleus) | (tied & (above + number.to(tl.float64) * tl.exp(scaled).to(tl.float64) < target))
        kept = within & (found >= floor) & (scaled >= least) & (token < vocab)
        ties += tl.sum(tied.to(tl.int64), axis=0)
        if tl.sum(kept.to(tl.int32), axis=0) > 0:  # most blocks hold none, and noise is dear
            value = tl.where(kept, scaled.to(tl.float64) + gumbel(key, token), float("-inf"))
            highest_here = tl.max(value, axis=0)
            first = tl.min(tl.where(value == highest_here, token, 1 << 40), axis=0)
            chosen = tl.where(highest_here > best, first, chosen)
            best = tl.maximum(best, highest_here)
    return chosen


@triton.jit
def sample_kernel(
    logits_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, least_ptr, out_ptr, vocab, logits_row,
    BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Program (row): a token, or -1 where the row holds NaN or +inf or nothing but -inf.

    temperature 0: the likeliest, the first of equals. top_k 0, top_p 1, least -inf (log of min-p): unfiltered.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row
    highest = tl.full([], float("-inf"), tl.float32)
    likeliest = tl.full([], 0, tl.int64)
    bad = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        bad += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
        x = tl.where(x != x, float("-inf"), x)
        highest_here = tl.max(x, axis=0)
        first = tl.min(tl.where(x == highest_here, token.to(tl.int64), 1 << 40), axis=0)
        likeliest = tl.where(highest_here > highest, first, likeliest)
        highest = tl.maximum(highest, highest_here)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, least = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(least_ptr + row)
    key = tl.load(keys_ptr + row).to(tl.uint64)
    result = likeliest
    if (bad > 0) | (highest == float("-inf")):
        result = tl.full([], -1, tl.int64)
    elif temperature > 0.0:
        floor = tl.full([], -2139095041, tl.int64)
        nucleus, above, target = floor, tl.full([], 0, tl.float64), tl.full([], 1, tl.float64)
        if (top_k > 0) & (top_k < vocab):
            floor = least_key(row_ptr, vocab, highest, temperature, top_k.to(tl.float64), floor, True, BLOCK)
            nucleus = floor
        if top_p < 1.0:
            mass = weight_above(row_ptr, vocab, highest, temperature, floor - 1, floor, False, BLOCK)
            target = mass * top_p
            nucleus = least_key(row_ptr, vocab, highest, temperature, target, floor, False, BLOCK)
            above = weight_above(row_ptr, vocab, highest, temperature, nucleus, floor, False, BLOCK)
        else:
            target = tl.full([], float("inf"), tl.float64)
        if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (least > float("-inf")):
            result = draw_filtered(
                row_ptr, vocab, highest, temperature, key, floor, nucleus, above, target, least, BLOCK
            )
        else:
            result = draw_unfiltered(row_ptr, vocab, highest, temperature, key, BLOCK, RUN)
    tl.store(out_ptr + row, result)


@triton.jit
def logprobs_kernel(logits_ptr, tokens_ptr, logprob_ptr, rank_ptr, vocab, logits_row, BLOCK: tl.constexpr):
    """Program (row): log-softmax at the row's token, and 1 + the number of likelier ones. The row is finite."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row
    value = tl.load(row_ptr + tl.load(tokens_ptr + row))
    highest = tl.full([], -1.0e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    likelier = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        likelier += tl.sum((x > value).to(tl.int32), axis=0)
        new_highest = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest), axis=0)
        highest = new_highest
    tl.store(logprob_ptr + row, value - highest - tl.log(total))
    tl.store(rank_ptr + row, likelier + 1)
