"""One table says how an error leaves; the protocol and the router keep to it."""

from __future__ import annotations

import grpc
import pytest

from baton.common.v1 import common_pb2
from common.errors import ERROR_TABLE, ErrorKind
from router.request import RETRYABLE

STATUS_OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: {400},
    grpc.StatusCode.UNAUTHENTICATED: {401},
    grpc.StatusCode.PERMISSION_DENIED: {403},
    grpc.StatusCode.NOT_FOUND: {404},
    grpc.StatusCode.RESOURCE_EXHAUSTED: {429},
    grpc.StatusCode.CANCELLED: {499},
    grpc.StatusCode.INTERNAL: {500},
    grpc.StatusCode.ABORTED: {500},
    grpc.StatusCode.UNAVAILABLE: {503},
    grpc.StatusCode.DEADLINE_EXCEEDED: {504},
}


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_has_a_row_whose_two_statuses_agree(kind):
    row = ERROR_TABLE[kind]
    assert row.http_status in STATUS_OF_CODE[row.grpc_status]


@pytest.mark.parametrize("kind", ErrorKind)
def test_the_openai_sdk_retries_exactly_what_the_table_allows_a_client(kind):
    """It retries 408, 409, 429 and everything from 500 on by itself; "inside" kinds reach no client."""
    row = ERROR_TABLE[kind]
    assert (row.http_status == 429 or row.http_status >= 500) == (row.retry in ("client", "inside"))


def test_the_protocol_knows_every_kind_and_no_other():
    known = {name.removeprefix("ERROR_KIND_") for name in common_pb2.ErrorKind.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert known == set(ErrorKind.__members__)


def test_what_must_never_leave_is_tried_again_by_the_router():
    assert {kind for kind, row in ERROR_TABLE.items() if row.retry == "inside"} <= RETRYABLE
