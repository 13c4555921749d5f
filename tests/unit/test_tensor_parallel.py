"""However many ranks share a model out, together they hold all of it, and compute what one process does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.batch import Batch, ScheduledSequence, build_batch
from common.kernels.reference import ReferenceKernels
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.kvcache.reshape import Reshape
from common.model.config import ModelConfig, load_model_config
from common.model.llama import LlamaModel
from common.model.loader import load_model
from common.model.shard import Shard
from common.model.weights import LlamaWeights, load_weights
from common.parallel.batch_codec import decode_batch, encode_batch
from common.parallel.communicator import Communicator
from common.parallel.shared_kv import SharedKvPool, SharedMemory, part_layouts, part_of, pool_bytes
from common.sampling_params import SamplingParams
from tests.tiny_model import make_tiny_model

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 301},
    "one head": {"num_key_value_heads": 1},
    "uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 97},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
PROMPT = torch.randint(3, 300, (37,), generator=torch.Generator().manual_seed(3)).tolist()


def steps() -> list[Batch]:
    """A prompt in two chunks, then a decode; the last two sample."""
    table = range(10)
    return [
        build_batch([s], 4, CPU)
        for s in (
            ScheduledSequence(PROMPT[:20], 0, table[:5]),
            ScheduledSequence(PROMPT[20:36], 20, table[:9], GREEDY),
            ScheduledSequence(PROMPT[36:], 36, table, GREEDY),
        )
    ]


def layout_of(config: ModelConfig, block_size: int = 4) -> KvLayout:
    return KvLayout(config.num_layers, block_size, config.num_kv_heads, config.head_dim, "float32")


def in_ranks(size: int, work: Any) -> list[Any]:
    """work(shard) of each rank, in a thread each; an error is raised here."""
    with ThreadPoolExecutor(size) as pool:
        return [f.result(60) for f in [pool.submit(work, Shard(rank, size)) for rank in range(size)]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_the_logits_of_one_process(tmp_path: Path, family: str, size: int) -> None:
    folder = make_tiny_model(tmp_path / "model", **FAMILIES[family])
    config, kernels = load_model_config(folder), ReferenceKernels()
    alone, cache = load_model(folder, torch.float32, CPU), KvCache(layout_of(config), 16, CPU)
    parts = part_layouts(layout_of(config), config, size)

    def run(shard: Shard) -> list[torch.Tensor]:
        weights = load_weights(folder, config, torch.float32, CPU, shard=shard)
        model = LlamaModel(config, weights, kernels, Communicator(shard, tmp_path / "meet"))
        own = KvCache(parts[shard.rank], 16, CPU)
        with torch.inference_mode():
            return [model.forward(batch, own) for batch in steps()]

    together, *others = in_ranks(size, run)
    with torch.inference_mode():
        for batch, logits in zip(steps(), together, strict=True):
            torch.testing.assert_close(logits, alone.forward(batch, cache), rtol=1e-4, atol=1e-4)
    assert all(logits.numel() == 0 for rank in others for logits in rank)


def test_a_sum_has_the_same_bits_on_each_rank(tmp_path: Path) -> None:
    """Else ranks would route a token to different experts."""
    size, shape = 3, (5, 7)
    values = torch.randn(size, *shape, generator=torch.Generator().manual_seed(1))

    def run(shard: Shard) -> torch.Tensor:
        return Communicator(shard, tmp_path / "meet").all_reduce(values[shard.rank].bfloat16())

    first, *rest = in_ranks(size, run)
    assert first.dtype == torch.bfloat16
    assert all(torch.equal(first, other) for other in rest)
    assert torch.equal(first, values.bfloat16().float().sum(0).bfloat16())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_ranks_weights_are_slices_of_the_whole_model(tmp_path: Path, size: int, quantization: Any) -> None:
    """Also where a rank's columns begin amid a group that is rounded together."""
    folder = make_tiny_model(tmp_path, intermediate_size=100, num_attention_heads=9, num_key_value_heads=3)
    config = load_model_config(folder)
    whole = load_weights(folder, config, torch.float32, CPU, quantization)
    ranks = [load_weights(folder, config, torch.float32, CPU, quantization, Shard(r, size)) for r in range(size)]

    def joined(pick: Any, dim: int) -> torch.Tensor:
        return torch.cat([pick(rank) for rank in ranks], dim)

    def gate_of(weights: LlamaWeights) -> torch.Tensor:
        return weights.layers[1].gate_up.chunk(2)[0]

    assert torch.equal(joined(lambda w: w.embed, 0), whole.embed)
    assert torch.equal(joined(lambda w: w.lm_head, 0), whole.lm_head)
    assert torch.equal(joined(gate_of, 0), gate_of(whole))
    assert torch.equal(joined(lambda w: w.layers[1].down, 1), whole.layers[1].down)
    assert torch.equal(joined(lambda w: w.layers[0].o, 1), whole.layers[0].o)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 2), (8, 2, 4), (9, 3, 2), (9, 3, 4), (8, 1, 8)])
def test_query_heads_are_with_the_key_value_heads_they_read(
    tiny_model_folder: Path, heads: int, kv_heads: int, size: int
) -> None:
    config = replace(load_model_config(tiny_model_folder), num_heads=heads, num_kv_heads=kv_heads)
    seen = []
    for shard in (Shard(rank, size) for rank in range(size)):
        q, kv = shard.heads(config), shard.kv_heads(config)
        seen += range(q.start, q.stop)
        if q.stop > q.start:
            local_group = (q.stop - q.start) // (kv.stop - kv.start)
            for h in range(q.start, q.stop):
                assert kv.start + (h - q.start) // local_group == h // (heads // kv_heads)
    assert seen == list(range(heads))


class TestSharedPool:
    """Outside, the parts are one pool: bytes are those that a single process's cache gives and takes."""

    def pools(self, folder: Path, size: int, kv_heads: int) -> tuple[KvCache, SharedKvPool]:
        config = replace(load_model_config(folder), num_kv_heads=kv_heads)
        full = layout_of(config)
        layouts = part_layouts(full, config, size)
        memory = SharedMemory(pool_bytes(layouts, 6))
        memory.close()
        parts = [part_of(memory, layouts, rank, 6) for rank in range(size)]
        whole = KvCache(full, 6, CPU)
        whole.data.copy_(torch.randn(whole.data.shape, generator=torch.Generator().manual_seed(7)))
        for part in parts:
            part.data.copy_(whole.data[:, :, :, part.layout.first_kv_head : part.layout.end_kv_head])
        return whole, SharedKvPool(full, parts)

    @pytest.mark.parametrize(("size", "kv_heads"), [(2, 4), (4, 2), (3, 4), (4, 1), (3, 2)])
    def test_it_gathers_and_scatters_what_one_cache_does(
        self, tiny_model_folder: Path, size: int, kv_heads: int
    ) -> None:
        whole, pool = self.pools(tiny_model_folder, size, kv_heads)
        expected, found = (np.zeros(3 * whole.layout.block_bytes, np.uint8) for _ in range(2))
        assert whole.gather(1, 1, [4, 0, 5], expected) == pool.gather(1, 1, [4, 0, 5], found)
        assert (expected == found).all()
        whole.scatter(0, 1, [1, 2, 3], found)
        found.flags.writeable = False
        pool.scatter(0, 1, [1, 2, 3], found)
        pool.copy_blocks([(1, 5)])
        whole.copy_blocks([(1, 5)])
        self.assert_equal(whole, pool)

    def test_it_takes_blocks_of_another_size(self, tiny_model_folder: Path) -> None:
        whole, pool = self.pools(tiny_model_folder, 2, 2)
        reshape = Reshape(replace(whole.layout, block_size=8), whole.layout, 0, 4)
        wire = np.frombuffer(np.random.default_rng(0).bytes(4 * whole.layout.block_bytes), np.uint8)
        for each in (whole, pool):
            each.scatter_parts(1, 1, [3, 0, 5, 1], wire, reshape.parts(0, 2), reshape)
        self.assert_equal(whole, pool)

    def test_what_does_not_fit_is_refused_before_anything_is_copied(self, tiny_model_folder: Path) -> None:
        _, pool = self.pools(tiny_model_folder, 2, 2)
        right = np.zeros(pool.layout.block_bytes, np.uint8)
        for layer, ids, buffer in ((2, [0], right), (0, [6], right), (0, [-1], right), (0, [0], right[:-1])):
            with pytest.raises(ValueError, match=r"."):
                pool.scatter(layer, 1, ids, buffer)

    @staticmethod
    def assert_equal(whole: KvCache, pool: SharedKvPool) -> None:
        for part in pool._parts:
            held = part.layout
            own = whole.data[:, :, :, held.first_kv_head : held.end_kv_head]
            assert torch.equal(part.data.view(torch.int32), own.contiguous().view(torch.int32))


def test_a_batch_arrives_as_it_was_sent() -> None:
    for batch in steps():
        copy = decode_batch(encode_batch(batch), CPU)
        for name in Batch.__slots__:
            ours, theirs = getattr(batch, name), getattr(copy, name)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), name


def test_a_rank_that_does_not_come_fails_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.parallel.communicator.COLLECTIVE_TIMEOUT_S", 0.5)
    failed = threading.Event()

    def run(shard: Shard) -> None:
        group = Communicator(shard, tmp_path / "meet")
        if shard.rank == 0:
            with pytest.raises(RuntimeError):
                group.all_reduce(torch.ones(3))
            failed.set()
        else:
            assert failed.wait(30)

    in_ranks(2, run)
