"""The native executor gives what the torch reference gives, for any shape, batch and block layout; and the same bits
for a sequence however its tokens are cut into steps, whoever shares them, and however many threads work."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.batch import Batch, ScheduledSequence, build_batch
from common.kernels.cpu.build import CpuIsa, read_cpu_flags, supported_isas
from common.kernels.cpu.executor import NativeModel
from common.kernels.cpu.library import load_library
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.config import load_model_config
from common.model.interface import Model
from common.model.loader import load_model
from common.model.weights import iter_weights
from common.sampling_params import SamplingParams
from tests.tiny_model import make_tiny_model

CPU = torch.device("cpu")
NUM_BLOCKS = 300
ISAS = supported_isas(read_cpu_flags())
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Sizes that no vector length divides; head groups of 1, 2, 3 and 16; head_dim below, at and off the vector length.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd_sizes": {
        "hidden_size": 90,
        "intermediate_size": 74,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "vocab_size": 301,
        "tie_word_embeddings": True,
    },
    "head_dim_80": {"hidden_size": 72, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80},
    "head_dim_128": {"head_dim": 128, "rope_scaling": LLAMA3},
    "long_sums": {"intermediate_size": 4300, "num_hidden_layers": 1},
    "one_kv_head": {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 34},
}


def native(
    folder: Path, dtype: torch.dtype, num_threads: int = 2, isa: CpuIsa | None = None, **kwargs: Any
) -> NativeModel:
    config = load_model_config(folder)
    return NativeModel(config, iter_weights(folder, config), dtype, num_threads, library=load_library(isa), **kwargs)


@dataclass
class Run:
    """Sequences that advance by chosen numbers of tokens a step, in blocks that lie scattered over the cache."""

    model: Model
    block_size: int = 16
    num_blocks: int = NUM_BLOCKS
    cache: KvCache = field(init=False)
    free: list[int] = field(init=False)
    tables: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config
        dtype = str(self.model.dtype).removeprefix("torch.")
        layout = KvLayout(config.num_layers, self.block_size, config.num_kv_heads, config.head_dim, dtype)
        self.cache = KvCache(layout, self.num_blocks, CPU)
        self.free = list(range(self.num_blocks))
        random.Random(7).shuffle(self.free)

    def batch(self, tokens: dict[int, Sequence[int]], silent: Sequence[int] = ()) -> Batch:
        """A step that gives each sequence its next tokens; those in `silent` want no logits."""
        scheduled = []
        for name, ids in tokens.items():
            start = self.done.get(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < start + len(ids):
                table.append(self.free.pop())
            self.done[name] = start + len(ids)
            scheduled.append(ScheduledSequence(ids, start, list(table), None if name in silent else GREEDY))
        return build_batch(scheduled, self.block_size, CPU)

    def step(self, tokens: dict[int, Sequence[int]], silent: Sequence[int] = ()) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.forward(self.batch(tokens, silent), self.cache).clone()

    def kv(self, name: int) -> torch.Tensor:
        """The sequence's KV in position order: [layers, 2, heads, tokens, head_dim]."""
        data = self.cache.data[:, self.tables[name]].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        return data[:, :, :, : self.done[name]].clone()


def tokens_of(seed: int, count: int, vocab_size: int = 300) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def ragged_steps() -> Iterator[tuple[dict[int, list[int]], list[int]]]:
    """Long and short prompts in chunks, decodes beside them, contexts on both sides of tile and block borders."""
    t = {name: tokens_of(name, 600) for name in range(5)}
    yield {0: t[0][:70], 1: t[1][:1]}, [0]
    yield {0: t[0][70:300], 1: t[1][1:2], 2: t[2][:255], 3: t[3][:16]}, [0]
    yield {0: t[0][300:301], 1: t[1][2:3], 2: t[2][255:256], 3: t[3][16:33], 4: t[4][:40]}, []
    yield {0: t[0][301:302], 2: t[2][256:257], 3: t[3][33:34]}, [2]
    yield {0: t[0][302:540]}, []
    yield {0: t[0][540:541]}, []


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The reference's matrices are too small to share out, and torch's threads wait for each other by spinning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp(request.param), max_position_embeddings=1024, **SHAPES[request.param]
    )


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), max_position_embeddings=2048)


@dataclass(frozen=True)
class Truth:
    """The reference's answers for ragged_steps: logits a step in float32 and bfloat16, KV a sequence in float32."""

    exact: list[torch.Tensor]
    rounded: list[torch.Tensor]
    kv: dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    exact, rounded = (Run(load_model(folder, dtype, CPU)) for dtype in (torch.float32, torch.bfloat16))
    logits = [[run.step(*step) for step in ragged_steps()] for run in (exact, rounded)]
    return Truth(logits[0], logits[1], {name: exact.kv(name) for name in exact.tables})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_size", [16, 5])
def test_float32_equals_the_reference(folder: Path, truth: Truth, isa: CpuIsa, block_size: int) -> None:
    run = Run(native(folder, torch.float32, isa=isa), block_size)
    for step, expected in zip(ragged_steps(), truth.exact, strict=True):
        torch.testing.assert_close(run.step(*step), expected, rtol=1e-4, atol=2e-4)
    for name, expected in truth.kv.items():
        torch.testing.assert_close(run.kv(name), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_is_as_close_to_float32_as_the_reference(folder: Path, truth: Truth, isa: CpuIsa) -> None:
    """Both round; the executor, which keeps the residual stream in float32, must not stray further."""
    run = Run(native(folder, torch.bfloat16, isa=isa))
    logits = torch.cat([run.step(*step) for step in ragged_steps()])
    exact, rounded = torch.cat(truth.exact), torch.cat(truth.rounded)
    assert 0 < (logits - exact).norm() <= (rounded - exact).norm()


def test_logits_equal_transformers(plain_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float32)
    prompt = tokens_of(1, 700)
    logits = Run(native(plain_folder, torch.float32)).step({0: prompt})
    with torch.inference_mode():
        torch.testing.assert_close(logits[0], oracle(torch.tensor([prompt])).logits[0, -1], rtol=1e-4, atol=2e-4)


BUILDS = [(torch.float32, ISAS[0]), (torch.bfloat16, ISAS[0]), (torch.bfloat16, CpuIsa.AVX2)]
LENGTH = 530
PROMPT = tokens_of(11, LENGTH)


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def model(request: pytest.FixtureRequest, plain_folder: Path) -> NativeModel:
    dtype, isa = request.param
    return native(plain_folder, dtype, isa=isa)


@pytest.fixture(scope="module")
def whole(model: NativeModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the prompt's last token and its KV, from one step alone."""
    run = Run(model)
    return run.step({0: PROMPT}), run.kv(0)


@settings(max_examples=20)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=12), mates=st.lists(st.integers(1, 90), max_size=7))
def test_a_sequence_has_the_same_bits_in_any_company(
    model: NativeModel, whole: tuple[torch.Tensor, torch.Tensor], cuts: set[int], mates: list[int]
) -> None:
    """However it is chunked, and whatever chunks of other sequences share its steps."""
    run = Run(model, num_blocks=1000)
    start = 0
    for step, end in enumerate([*sorted(cuts), LENGTH]):
        others = {name: tokens_of(name * 100 + step, count) for name, count in enumerate(mates, start=1)}
        logits = run.step({0: PROMPT[start:end]} | others)
        start = end
    assert torch.equal(logits[0], whole[0][0])
    assert torch.equal(run.kv(0), whole[1])


def test_decode_computes_the_bits_that_prefill_computes(
    model: NativeModel, whole: tuple[torch.Tensor, torch.Tensor]
) -> None:
    run = Run(model)
    run.step({0: PROMPT[:250]}, silent=[0])
    for token in PROMPT[250:]:
        logits = run.step({0: [token]})
    assert torch.equal(logits, whole[0])
    assert torch.equal(run.kv(0), whole[1])


@pytest.mark.parametrize(("num_threads", "spin_us"), [(1, 50), (3, 0), (5, 50)])
def test_threads_change_no_bit(plain_folder: Path, num_threads: int, spin_us: int) -> None:
    """More threads than cores, and threads that sleep at once, also show that no wake-up gets lost."""
    few = Run(native(plain_folder, torch.bfloat16, num_threads=2))
    many = Run(native(plain_folder, torch.bfloat16, num_threads=num_threads, spin_us=spin_us))
    for run in (few, many):
        run.step({0: PROMPT[:400]})
    for token in PROMPT[400:]:
        assert torch.equal(few.step({0: [token]}), many.step({0: [token]}))


def test_many_rows_of_logits(model: NativeModel) -> None:
    """More than a tile, and than a thread normalises for itself."""
    together = Run(model)
    logits = together.step({name: PROMPT[name : name + 9] for name in range(45)})
    for name in (0, 11, 44):
        assert torch.equal(logits[name], Run(model).step({0: PROMPT[name : name + 9]})[0])


class Beside:
    """The library, where `first` happens once just before a step starts: what another thread may do there."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.first: Callable[[], object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def baton_model_forward(self, *args: Any) -> Any:
        first, self.first = self.first, None
        if first is not None:
            first()
        return self._library.baton_model_forward(*args)


def test_a_larger_step_from_another_thread_does_not_take_a_steps_logits_away(plain_folder: Path) -> None:
    """The step writes through a bare pointer: memory that is freed meanwhile would be someone else's."""
    library = Beside(load_library())
    config = load_model_config(plain_folder)
    model = NativeModel(config, iter_weights(plain_folder, config), torch.float32, 2, library=library)
    small, large = Run(model), Run(model)
    expected = Run(model).step({0: PROMPT[:9]})
    library.first = lambda: large.step({name: PROMPT[name : name + 2] for name in range(5)})
    assert torch.equal(small.step({0: PROMPT[:9]}), expected)


def test_a_step_may_want_no_logits(model: NativeModel) -> None:
    assert Run(model).step({0: PROMPT[:20]}, silent=[0]).shape == (0, model.config.vocab_size)


def test_greedy_is_the_first_of_the_largest(model: NativeModel) -> None:
    run = Run(model)
    logits, best = model.forward_greedy(run.batch({name: PROMPT[name : name + 3] for name in range(20)}), run.cache)
    assert torch.equal(best, logits.argmax(-1))


def test_greedy_says_which_rows_are_not_finite(model: NativeModel) -> None:
    run = Run(model)
    run.step({0: PROMPT[:5]})
    run.cache.data.fill_(float("nan"))
    logits, best = model.forward_greedy(run.batch({0: PROMPT[5:6], 1: PROMPT[:3]}), run.cache)
    assert best.tolist() == [-1, int(logits[1].argmax())]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", 300, "vocabulary"),
        ("token_ids", -1, "vocabulary"),
        ("positions", -1, "position"),
        ("slot_mapping", NUM_BLOCKS * 16, "slot"),
        ("slot_mapping", -1, "slot"),
        ("block_tables", NUM_BLOCKS, "block"),
        ("seq_lens", 17, "fit together"),
        ("seq_lens", 2, "fit together"),
        ("query_start", 3, "fit together"),
        ("logits_rows", 3, "logits row"),
    ],
)
def test_a_batch_that_reaches_outside_is_refused_untouched(
    model: NativeModel, name: str, value: int, message: str
) -> None:
    run = Run(model)
    batch = run.batch({0: PROMPT[:3]})
    getattr(batch, name).view(-1)[0] = value
    with pytest.raises(ValueError, match=message):
        model.forward(batch, run.cache)
    assert not run.cache.data.any()


@pytest.mark.parametrize(
    "layout",
    [KvLayout(2, 16, 4, 16, "float32"), KvLayout(3, 16, 2, 16, "bfloat16"), KvLayout(2, 16, 2, 8, "float32")],
    ids=str,
)
def test_a_foreign_cache_is_refused(model: NativeModel, layout: KvLayout) -> None:
    batch = Run(model).batch({0: PROMPT[:3]})
    with pytest.raises(ValueError, match="KV cache"):
        model.forward(batch, KvCache(layout, NUM_BLOCKS, CPU))


def test_a_cache_of_another_dtype_is_refused(plain_folder: Path) -> None:
    wide = native(plain_folder, torch.float32)
    batch = Run(wide).batch({0: PROMPT[:3]})
    with pytest.raises(ValueError, match="KV cache"):
        wide.forward(batch, KvCache(KvLayout(2, 16, 2, 16, "bfloat16"), NUM_BLOCKS, CPU))


def test_a_missing_and_a_misshapen_weight_are_named(plain_folder: Path) -> None:
    config = load_model_config(plain_folder)
    weights = dict(iter_weights(plain_folder, config))
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=name):
        NativeModel(config, [(name, weights[name].T)], torch.float32, 1)
    del weights[name]
    run = Run(NativeModel(config, weights.items(), torch.float32, 1))
    with pytest.raises(ValueError, match="never loaded"):
        run.step({0: [1]})


def test_helper_threads_end_with_the_model(plain_folder: Path) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    made = native(plain_folder, torch.float32, num_threads=4)
    assert threads() == before + 3
    del made
    assert threads() == before


def test_helper_threads_run_where_they_are_pinned(plain_folder: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    before = set(Path("/proc/self/task").iterdir())
    made = native(plain_folder, torch.float32, num_threads=3, cpus=[cpu, cpu])
    helpers = set(Path("/proc/self/task").iterdir()) - before
    assert [os.sched_getaffinity(int(task.name)) for task in helpers] == [{cpu}, {cpu}]
    del made
    with pytest.raises(ValueError, match="pinned"):
        native(plain_folder, torch.float32, num_threads=2, cpus=[os.cpu_count() or 1])
    with pytest.raises(ValueError, match="1 CPUs for 2"):
        native(plain_folder, torch.float32, num_threads=3, cpus=[cpu])


def test_an_idle_team_sleeps(plain_folder: Path) -> None:
    """After a step the helpers spin for a moment at most: the kernel soon reports each as sleeping, and it stays so."""
    before = set(Path("/proc/self/task").iterdir())
    run = Run(native(plain_folder, torch.float32, num_threads=3))
    helpers = set(Path("/proc/self/task").iterdir()) - before
    run.step({0: PROMPT[:50]})

    def switches() -> list[str]:
        """State and context switches of each helper: a thread that ran in between has changed one of them."""
        wanted = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
        lines = [line for task in helpers for line in (task / "status").read_text().splitlines()]
        return [line for line in lines if line.startswith(wanted)]

    deadline = time.monotonic() + 30
    while (now := switches()) != switches() or sum("S (sleeping)" in line for line in now) < len(helpers):
        assert time.monotonic() < deadline, now
