"""Names of spans and of their attributes, all in this file: OpenTelemetry's GenAI names (gen_ai.*) are still moving.

They follow the semantic conventions for generative AI of OpenTelemetry 1.44; see docs/TRACING.md for what stands where.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class SpanName(StrEnum):
    """Parts of a request; also the phases of a timeline. The root's name is "{operation} {model}"."""

    ADMIT = "admit"  # receipt to acceptance: parse, validate, render, tokenize, hash
    QUEUE = "queue"  # waiting: at the router for its turn, at a worker for a first step or for blocks
    PLACE = "place"  # choosing the workers, the look-up in the prefix index included
    RESERVE = "reserve"  # asking the decode worker for blocks, to its answer
    PREFILL = "prefill"  # first step to first token
    TRANSFER = "transfer"  # first block sent to commit
    DECODE = "decode"  # first decode step to the end
    MIGRATE = "migrate"  # a worker failed: until tokens flow again


class EventName(StrEnum):
    """Moments inside a span."""

    CHUNK = "chunk"  # a chunk of the prompt has been computed


# OpenTelemetry: generative AI
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"

# OpenTelemetry: general
ERROR_TYPE: Final = "error.type"
ERROR_MESSAGE: Final = "error.message"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
SERVICE_NAME: Final = "service.name"
SERVICE_NAMESPACE: Final = "service.namespace"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
SERVICE_VERSION: Final = "service.version"

# Ours
CLUSTER: Final = "baton.cluster"
REQUEST_ID: Final = "baton.request_id"
TRANSFER_ID: Final = "baton.transfer_id"
WORKER_ID: Final = "baton.worker_id"
PLACED_WORKERS: Final = "baton.placed_workers"
FAILED_WORKERS: Final = "baton.failed_workers"
ATTEMPT: Final = "baton.attempt"
ATTEMPTS: Final = "baton.attempts"
PHASE: Final = "baton.phase"
OUTCOME: Final = "baton.outcome"
NUM_TOKENS: Final = "baton.num_tokens"
NUM_CACHED_TOKENS: Final = "baton.num_cached_tokens"
NUM_COMPUTED_TOKENS: Final = "baton.num_computed_tokens"
NUM_OUTPUT_TOKENS: Final = "baton.num_output_tokens"
TRANSFER_BYTES: Final = "baton.transfer_bytes"
TRANSFER_SIDE: Final = "baton.transfer_side"  # "sender" or "receiver"
