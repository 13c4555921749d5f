"""Ask Baton through the openai SDK: once streamed, once whole.

python examples/openai_client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where `baton serve` listens")
    parser.add_argument("--prompt", default="What is a relay race?")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    with OpenAI(base_url=f"{args.url}/v1", api_key="unused") as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": args.prompt}]

        print(f"{model}, streamed: ", end="")
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=args.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            if chunk.usage:
                print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")

        whole = client.chat.completions.create(
            model=model, messages=messages, max_tokens=args.max_tokens, temperature=0
        )
        print(f"{model}, whole: {whole.choices[0].message.content}")
        print(f"[finish reason: {whole.choices[0].finish_reason}]")


if __name__ == "__main__":
    main()
