"""The device is a setting, asked about in one place; steps padded for graphs give what they give as they come."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.device import kernels_for, resolve_device, sampler_for, takes_native_model
from common.engine.batch import ScheduledSequence, build_batch
from common.engine.sampler import Sampler
from common.errors import StartupError
from common.kernels.reference import ReferenceKernels
from common.kernels.triton.graphs import GraphedModel, decode_shapes, fill, is_plain_decode, padding
from common.kernels.triton.kernels import TritonKernels
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.loader import load_model
from common.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
QUESTIONS = re.compile(r"device\.type\b|\.is_cuda\b|cuda\.is_available|cuda\.is_initialized|version\.cuda")


def test_only_the_device_layer_asks_which_device_it_is() -> None:
    packages = ("common", "kv_transfer", "prefill_service", "decode_service", "router", "deploy")
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    asking = {str(path.relative_to(ROOT)) for path in sources if QUESTIONS.search(path.read_text())}
    assert asking == {"common/device.py"}


def test_a_gpu_that_is_not_there_is_refused_and_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=r"device=cuda, but torch .* --device cpu does without"):
        resolve_device("cuda")
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == CUDA
    assert resolve_device("cpu") == CPU


def test_each_device_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [takes_native_model(CPU, kernels) for kernels in ("auto", "native", "torch")] == [True, True, False]
    assert not takes_native_model(CUDA, "auto")
    with pytest.raises(StartupError, match="kernels=native computes on CPUs"):
        takes_native_model(CUDA, "native")
    assert isinstance(kernels_for(CUDA, "auto"), TritonKernels)
    assert isinstance(kernels_for(CUDA, "torch"), ReferenceKernels)
    assert isinstance(kernels_for(CPU, "auto"), ReferenceKernels)
    assert isinstance(sampler_for(CPU), Sampler)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(StartupError, match="no Triton here"):
        kernels_for(CUDA, "auto")


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    assert isinstance(kernels_for(CPU, "triton"), TritonKernels)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(StartupError, match="needs a GPU"):
        kernels_for(CPU, "triton")


@given(st.integers(1, 130), st.integers(1, 600), st.integers(1, 130), st.integers(1, 600))
def test_every_decode_step_has_a_shape_that_holds_it(running: int, blocks: int, count: int, width: int) -> None:
    shapes = decode_shapes(running, blocks)
    found = shapes.fit(count, width)
    if count > running or width > blocks:
        assert found is None
    else:
        assert found is not None
        assert count <= found[0] <= max(running if count > running - 8 else 0, count + 7)
        assert width <= found[1] <= min(blocks, max(16, 4 * width))


@pytest.fixture
def cache() -> KvCache:
    layout = KvLayout(num_layers=2, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=16, dtype="float32")
    cache = KvCache(layout, 24, CPU)
    cache.data.normal_(generator=torch.Generator().manual_seed(1))
    return cache


class Recorder:
    """In the place of CUDA graphs: a captured step runs again each time, on the tensors that it was captured with."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            self.replays += 1
            return step()

        return replay


def decodes(*contexts: int) -> list[ScheduledSequence]:
    """Sequences of one new token; contexts count it."""
    blocks = iter(range(24))
    return [
        ScheduledSequence([5 + n], n - 1, [next(blocks) for _ in range(-(-n // BLOCK_SIZE))], GREEDY) for n in contexts
    ]


def test_a_padded_step_gives_what_the_step_gives_and_writes_no_more(tiny_model_folder: Path, cache: KvCache) -> None:
    model = load_model(tiny_model_folder, torch.float32, CPU, kernels="triton")
    recorder = Recorder()
    graphed = GraphedModel(model, cache, decode_shapes(4, 20), recorder)
    other = KvCache(cache.layout, cache.num_blocks, CPU)
    other.data.copy_(cache.data)
    for contexts in ((9, 1, 30), (3,)):  # the second leaves rows of the first behind
        batch = build_batch(decodes(*contexts), BLOCK_SIZE, CPU)
        with torch.inference_mode():
            torch.testing.assert_close(graphed.forward(batch, cache), model.forward(batch, other))
        torch.testing.assert_close(cache.data, other.data)
    assert recorder.replays == 2


def test_steps_that_have_no_graph_run_as_they_come(tiny_model_folder: Path, cache: KvCache) -> None:
    recorder = Recorder()
    model = load_model(tiny_model_folder, torch.float32, CPU)
    graphed = GraphedModel(model, cache, decode_shapes(2, 20), recorder)
    chunk = ScheduledSequence([1, 2], 0, [0], GREEDY)
    silent = ScheduledSequence([1], 0, [0], None)
    for step in ([chunk], [silent], decodes(1, 1, 1)):
        batch = build_batch(step, BLOCK_SIZE, CPU)
        with torch.inference_mode():
            assert graphed.forward(batch, cache).shape == (batch.logits_rows.numel(), 300)
    assert recorder.replays == 0


def test_what_a_longer_step_left_becomes_padding() -> None:
    static = padding(4, 8, CPU)
    fill(static, build_batch(decodes(9, 5, 6), BLOCK_SIZE, CPU))
    batch = build_batch(decodes(7), BLOCK_SIZE, CPU)
    fill(static, batch)
    assert is_plain_decode(static)
    assert static.seq_lens.tolist() == [7, 0, 0, 0]
    assert static.slot_mapping.tolist() == [*batch.slot_mapping.tolist(), -1, -1, -1]
    assert static.block_tables[0, :2].tolist() == [0, 1]
