"""The native executor without memory for a step, by its own error path: the address space of a process is limited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# Few large steps need more than the headroom, their parts do not.
SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from common.engine.batch import ScheduledSequence
from common.engine.model_runner import ModelRunner
from common.engine.splitting_runner import SplittingRunner
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.config import load_model_config
from common.model.loader import load_model
from common.sampling_params import SamplingParams

torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = load_model_config(folder)
model = load_model(folder, torch.float32, torch.device("cpu"), kernels="native", num_threads=1, quantization="none")
layout = KvLayout(config.num_layers, 16, config.num_kv_heads, config.head_dim, "float32")

def new_runner():
    return ModelRunner(model, KvCache(layout, 64, torch.device("cpu")))

sampling = SamplingParams(max_tokens=1, temperature=0.0)
prompts = [[(7 * i + k) % 300 for k in range(96)] for i in range(8)]
step = [ScheduledSequence(p, 0, range(6 * i, 6 * i + 6), sampling) for i, p in enumerate(prompts)]
small, tight, free = new_runner(), new_runner(), new_runner()
small.execute(step[:1])
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (6 << 20)
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
try:
    tight.execute(step)
    failed = "nothing"
except (MemoryError, RuntimeError) as error:
    failed = str(error)
parts = SplittingRunner(tight, 16).execute(step)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
whole = free.execute(step)
print(failed)
print(list(parts.token_ids) == list(whole.token_ids), dict(parts.extras))
"""


def test_a_step_without_memory_is_run_in_parts_and_every_sequence_gets_its_token(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "wide", intermediate_size=8192)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed, result = done.stdout.splitlines()[-2:]
    assert "no memory" in failed or "can't allocate memory" in failed, done.stdout
    assert result == "True {}"
