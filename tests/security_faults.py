"""The faults of tests/mutants.py in what keeps clients and neighbours apart (docs/security.md).

What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import Fault

SECURITY = "tests/actors/http/test_security.py::test_"
ESCAPING = "tests/model/test_escaping.py::test_"
GROUP = "tests/parallel/test_group.py::test_"
HAPROXY = "tests/actors/cluster/test_haproxy.py::test_"
MIDDLEWARE = "tests/actors/http/test_middleware.py::test_"
READERS = (
    "tests/actors/http/test_slow_readers.py::test_a_client_that_reads_nothing_for_long_is_closed"
)
READING = "tests/actors/http/test_reading.py::test_"

SECURITY_FAULTS = (
    Fault(
        "a special token in a message closes the turn",
        "model/escaping.py",
        "text = text.replace(name, name + MARK)",
        "pass",
        SECURITY + "special_tokens_in_messages_are_plain_text",
    ),
    Fault(
        "texts that a template puts together become a token",
        "model/escaping.py",
        "if any(tail in self._starts for tail in tails):",
        "if not text:",
        ESCAPING + "texts_that_a_template_puts_together_make_no_token",
    ),
    Fault(
        "refused bodies keep their memory",
        "actors/http/reading.py",
        "refusal.__context__ = None",
        "refusal.__context__ = error.__context__",
        READING + "refused_bodies_leave_no_memory_behind",
    ),
    Fault(
        "rank 0's store listens on all addresses",
        "parallel/group.py",
        "socket.create_server((host, 0)",
        'socket.create_server(("", 0)',
        GROUP + "a_store_listens_on_its_address_alone_and_keeps_its_keys",
    ),
    Fault(
        "a rank opens shared memory of anybody",
        "parallel/group.py",
        "S_IMODE(about.st_mode) != 0o600",
        "S_IMODE(about.st_mode) > 0o777",
        GROUP + "a_rank_opens_no_segment_that_rank_0_did_not_make[mode]",
    ),
    Fault(
        "connections of one client are not counted",
        "actors/cluster/haproxy_start.py",
        'f"tcp-request connection reject if',
        'f"# {most}',
        HAPROXY + "unfinished_headers_silence_nobody",
    ),
    Fault(
        "HAProxy outlives whoever started it",
        "actors/cluster/haproxy_start.py",
        "prctl(PR_SET_PDEATHSIG, signal.SIGKILL)",
        "getpid()",
        HAPROXY + "it_outlives_sigterm_and_not_its_parent",
    ),
    Fault(
        "a body may take for ever",
        "actors/http/middleware.py",
        "asyncio.timeout(deadline_s - time.monotonic())",
        "asyncio.timeout(None)",
        MIDDLEWARE + "a_body_that_does_not_come_is_408",
    ),
    Fault(
        "requests of another server's proxy are answered",
        "actors/http/middleware.py",
        "if self._instance and not",
        "if False and not",
        MIDDLEWARE + "what_another_servers_proxy_sends_is_503",
    ),
    Fault(
        "a client that stops reading is waited for",
        "actors/http/middleware.py",
        "asyncio.timeout(self._serve.reader_timeout_s)",
        "asyncio.timeout(None)",
        READERS,
    ),
    Fault(
        "an error that ends a stream is not followed by its end",
        "actors/http/answering.py",
        "encoded(writer.error_events(refusal)) + writer.stream_end",
        "encoded(writer.error_events(refusal))",
        "tests/actors/http/test_endpoints.py::test_what_drains_too_long_ends_with_an_error_that_says_so",
    ),
)
