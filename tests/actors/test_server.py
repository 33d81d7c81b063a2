"""The life of `outrider serve`: what goes wrong at its start is one error that names the cause."""

from __future__ import annotations

import socket

import pytest
import ray
from ray import serve

from outrider.actors import server
from outrider.actors.errors import EngineDeadError
from outrider.actors.server import run_server, start_error
from outrider.model.config import ConfigError
from tests.test_end_to_end import TINY

TRACE = """The deployment failed to start 2 times in a row. Error:
  File "/x/serve.py", line 72, in __init__
    await self._driver.start()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_taken_port_is_known_before_anything_starts(no_cluster: None, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^{host}:{port} is taken; change serve.host"):
            run_server(None, {"model": str(TINY), "serve.host": host, "serve.port": port})
    assert not ray.is_initialized()


@pytest.mark.parametrize("host", ["192.0.2.77", "no.such.host.invalid"])
def test_an_address_of_others_cannot_be_listened_at(no_cluster: None, host: str) -> None:
    with pytest.raises(ConfigError, match=f"^{host}:8000 cannot be listened at: "):
        run_server(None, {"model": str(TINY), "serve.host": host})
    assert not ray.is_initialized()


def test_the_last_line_of_serves_account_is_the_cause() -> None:
    own = start_error(TRACE + "outrider.model.config.ConfigError: rank 0: no room: for pages\n\n")
    assert (type(own), str(own)) == (ConfigError, "rank 0: no room: for pages")
    other = start_error(TRACE + "KeyError: 'x'\n")
    assert isinstance(other, EngineDeadError)
    assert str(other) == "the server did not start: KeyError: 'x'"
    assert "serve.py" in other.detail
    assert str(start_error("")) == "the server did not start: "


def test_a_replica_that_hangs_at_the_end_is_left_to_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """serve.delete waits for 60 s; serve.drain_timeout_s may let a hung replica stay longer."""

    def delete(name: str) -> None:
        raise TimeoutError("Some of these applications weren't deleted after 60s")

    monkeypatch.setattr(serve, "delete", delete)
    server.delete_application()
    assert "Serve kills it after serve.drain_timeout_s" in caplog.text
