"""Run several generations on one gRPC stream, abort one of them, and read the others' tokens interleaved.

python examples/grpc_client.py --address 127.0.0.1:8001
"""

from __future__ import annotations

import argparse
import queue
from collections.abc import Iterator

import grpc

from baton.common.v1 import common_pb2
from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc

PROMPTS = {"sea": "The sea is", "counting": "1, 2, 3, 4,", "endless": "Once upon a time"}


def start(request_id: str, text: str, max_tokens: int) -> pb.GenerateRequest:
    # "endless" must still be running when it is aborted, so no generation ends by itself here.
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(start=pb.StartGeneration(request_id=request_id, text=text, sampling=sampling))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:8001", help="gRPC address of `baton serve --grpc-port`")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()

    outgoing: queue.SimpleQueue[pb.GenerateRequest | None] = queue.SimpleQueue()
    for request_id, text in PROMPTS.items():
        outgoing.put(start(request_id, text, 2000 if request_id == "endless" else args.max_tokens))

    requests: Iterator[pb.GenerateRequest] = iter(outgoing.get, None)
    texts = dict.fromkeys(PROMPTS, "")
    running = set(PROMPTS)
    with grpc.insecure_channel(args.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        print("models:", [model.id for model in stub.ListModels(pb.ListModelsRequest()).models])
        for frame in stub.Generate(requests):
            request_id, kind = frame.request_id, frame.WhichOneof("frame")
            if kind == "chunk":
                if request_id == "endless" and not texts[request_id]:
                    outgoing.put(pb.GenerateRequest(abort=pb.AbortGeneration(request_id=request_id)))
                texts[request_id] += frame.chunk.text
                continue
            if kind == "finished":
                reason = common_pb2.FinishReason.Name(frame.finished.finish_reason)
                end = f"{reason}, {frame.finished.usage.completion_tokens} tokens"
            else:
                end = f"{common_pb2.ErrorKind.Name(frame.error.kind)}: {frame.error.message}"
            print(f"{request_id}: {PROMPTS[request_id]}{texts[request_id]!r} [{end}]")
            running.discard(request_id)
            if not running:
                outgoing.put(None)  # half-close: the server ends the stream


if __name__ == "__main__":
    main()
