"""transformers as the oracle, and the prompts on which Baton must agree with it token for token."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

PROSE = (
    "The lighthouse keeper counted the ships each evening, and wrote their names in a ledger that nobody would read. "
    "In autumn the fog came early, so he rang the bell by hand, one stroke a minute, until the lamps of the harbour "
    "answered. He had learned to tell the vessels by their engines: the slow cough of the trawlers, the hum of the "
    "ferry, the silence of sails. "
)
CODE = (
    "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n"
    "    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n"
    "        else:\n            result.append(right[j])\n            j += 1\n"
)
CJK = (
    "昔々、ある所にお爺さんとお婆さんが住んでいました。"
    "山里の冬は長く、雪が深く積もります。今天天气很好，我们去公园散步吧。"
)
EMOJI = "Launch day! 🚀🚀 The team 👩🏽‍💻👨‍💻 shipped v2.0 🎉 and the dashboards turned 🟢. Next stop: 🌍🛰️ "
QUESTIONS = (
    "What is the capital of France?",
    "Explain why the sky is blue in one sentence.",
    "List three prime numbers greater than 100.",
    "Write a haiku about rain.",
    "Translate 'good morning' into Spanish.",
)


class Oracle:
    """Greedy float32 generation by transformers on the same weights."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The cluster computes on the same cores: a second thread here would spend its time waiting for the first.
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def generate(self, token_ids: list[int], max_tokens: int) -> list[int]:
        key = (tuple(token_ids), max_tokens)
        if key not in self._known:
            prompt = torch.tensor([token_ids])
            with torch.inference_mode():
                out = self.model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False
                )
            self._known[key] = out[0, len(token_ids) :].tolist()
        return self._known[key]

    def chat(self, question: str) -> list[int]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return self.encode(text)

    def prompts(self) -> dict[str, list[int]]:
        """Name → token ids: 1 to 3,000 tokens; prose, code, CJK, emoji; lengths around multiples of block size 16."""
        prose, code = self.encode(PROSE * 60), self.encode(CODE * 40)
        found = {f"prose-{n}": prose[:n] for n in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 256, 257, 1024)}
        found |= {f"code-{n}": code[:n] for n in (16, 64, 65, 127, 128, 511, 2047, 2049)}
        found |= {f"question-{i}": self.chat(q) for i, q in enumerate(QUESTIONS)}
        found |= {"cjk": self.encode(CJK), "cjk-long": self.encode(CJK * 9), "emoji": self.encode(EMOJI)}
        found |= {"mixed-3000": (prose[:1400] + self.encode(EMOJI + CJK) + code)[:3000]}
        return found
