"""What a server leaves behind that is given up before it serves."""

from __future__ import annotations

import gc
import logging

import pytest

from common.errors import StartupError
from common.rpc.grpc_server import GrpcServer


async def test_no_log_record_holds_a_server_that_was_given_up_before_it_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC would log it while freeing it; the record's reference to freed memory ends the process, here or later."""
    with caplog.at_level(logging.DEBUG):
        bound = GrpcServer("127.0.0.1", 0, options={}, remedy="")
        with pytest.raises(StartupError, match="in use"):
            GrpcServer("127.0.0.1", bound.port, options={}, remedy="")
        await bound.stop(0.0)
        del bound
        gc.collect()
    assert not [record for record in caplog.records if record.msg.startswith("__dealloc__")]
