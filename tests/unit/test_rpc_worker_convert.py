"""What a router says of a request is what a worker reads, every field of it; and the other way round."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2
from common.logprobs import TokenLogprobs
from common.rpc import worker_convert as convert
from common.rpc.worker_messages import Fork, LoadReport, SequenceSpec, Timings, TransferTarget, WorkerIdentity
from common.sampling_params import SamplingParams, choice_seed

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
NAME = st.text(max_size=20)
F32 = st.floats(-100, 100, width=32)
COUNT = st.none() | st.integers(0, 20)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=U32,
    temperature=F32,
    top_k=U32,
    top_p=F32,
    min_p=F32,
    seed=U64,
    stop_token_ids=st.lists(U32, max_size=3).map(tuple),
    min_tokens=U32,
    presence_penalty=F32,
    frequency_penalty=F32,
    repetition_penalty=st.floats(0.125, 10, width=32),
    logit_bias=st.dictionaries(U32, F32, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    logprobs=COUNT,
    prompt_logprobs=COUNT,
)
SPEC = st.builds(
    SequenceSpec,
    NAME,
    NAME,
    st.lists(U32, max_size=5),
    U32,
    st.binary(max_size=16),
    SAMPLING,
    st.just(7.5),
    NAME,
    st.lists(st.builds(Fork, NAME, U64), max_size=3).map(tuple),
)
TOKEN_LOGPROBS = st.builds(TokenLogprobs, U32, F32, U32, st.lists(st.tuples(U32, F32), max_size=3).map(tuple))
SECONDS = st.floats(0, 1e6)
TIMINGS = st.builds(
    Timings, queue_s=SECONDS, prefill_s=SECONDS, transfer_s=SECONDS, transfer_bytes=U64, decode_s=SECONDS
)
TARGET = st.builds(TransferTarget, NAME, st.builds(WorkerIdentity, NAME, NAME), st.binary(max_size=16), U32)
LOAD = st.builds(LoadReport, U32, U32, U32, U32, U32, U32, U64, U64)


@given(SPEC)
def test_a_spec_survives_the_wire_with_what_is_left_of_its_deadline(spec: SequenceSpec) -> None:
    wire = worker_pb2.SequenceSpec.FromString(convert.spec_to_proto(spec, now=5.0).SerializeToString())
    assert wire.timeout_ms == 2500
    assert convert.spec_from_proto(wire, now=5.0, max_timeout_s=60.0) == spec


def test_the_wire_has_a_field_for_every_sampling_parameter() -> None:
    wire = {field.name for field in worker_pb2.SamplingParams.DESCRIPTOR.fields}
    assert wire == set(SamplingParams.__slots__)


@given(TIMINGS, TARGET, LOAD, st.lists(TOKEN_LOGPROBS, max_size=3))
def test_news_survive_the_wire(timings, target, load, logprobs) -> None:
    assert convert.timings_from_proto(convert.timings_to_proto(timings)) == timings
    assert convert.target_from_proto(convert.target_to_proto(target)) == target
    assert convert.load_from_proto(convert.load_to_proto(load)) == load
    wire = [common_pb2.TokenLogprobs.FromString(m.SerializeToString()) for m in convert.logprobs_to_proto(logprobs)]
    assert convert.logprobs_from_proto(wire) == logprobs


@given(U64)
def test_choices_have_seeds_of_their_own_and_the_first_the_requests(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(8)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 8
    assert all(0 <= s < 1 << 64 for s in seeds)
    assert seeds == [choice_seed(seed, index) for index in range(8)]


def test_the_seeds_of_choices_stay_the_same_across_releases() -> None:
    """A stream may migrate between versions."""
    assert (
        np.array([choice_seed(7, 1), choice_seed(7, 2)], dtype="<u8").tobytes().hex()
        == "cd2813dc5285db8b3eaa9cbbad6bfc34"
    )
