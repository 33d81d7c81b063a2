"""The bundled checkpoint behind Ray Serve and real HTTP, spoken to by the official client.

Every answer is compared with the offline engine's without drafts, and drafts are asserted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from outrider.actors import server
from outrider.actors.engine import Sampling
from outrider.actors.serve import api_keys, application, build, serving_spec
from outrider.actors.server import serving
from outrider.model.config import ConfigError, load_config
from outrider.model.text import Tokenizer
from tests.actors.footprint import Footprint
from tests.actors.parameters import MAX_TOKENS, cases
from tests.actors.served import QUEUE, SLOTS, K, Served, one_client
from tests.conftest import RunningCluster
from tests.test_end_to_end import PROMPTS, TINY
from tests.test_examples import python

pytestmark = pytest.mark.ray


def test_health_says_what_is_effective(served: Served) -> None:
    health = httpx.get(served.root + "/health").json()
    assert health["status"] == "ok"
    assert (health["mode"], health["slots"], health["draft_tokens"]) == ("multi-slot", SLOTS, K)
    assert health["line"].startswith(f"{SLOTS} slots; multi-slot speculation is active: {K} drafts")
    assert (health["head_group"], health["draft_body"]) == ([0, 1], "local")
    assert [rank["rank"] for rank in health["ranks"]] == [0, 1]


def test_the_client_gets_the_offline_answer_streamed_and_not(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").id == "tiny"
    right = served.right(PROMPTS[0], max_tokens=40)
    how: dict[str, Any] = {
        "model": "tiny", "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0
    }  # fmt: skip
    whole = served.client.completions.create(**how)
    assert whole.choices[0].text == right.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    usage = whole.usage.model_dump()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(right.prompt_ids), 40)
    assert usage["speculation"]["accepted_tokens"] > 0
    chunks = list(
        served.client.completions.create(**how, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == right.text
    assert chunks[-1].usage is not None
    streamed = chunks[-1].usage.model_dump()
    assert streamed.pop("prompt_tokens_details")["cached_tokens"] == len(right.prompt_ids)
    assert streamed == {name: usage[name] for name in streamed}
    assert len(chunks) > 5


def test_a_chat_is_the_template_and_the_offline_answer(served: Served) -> None:
    messages: Any = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("What is a ", "view?")]},
    ]
    ids = Tokenizer(TINY).apply_chat_template(
        [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is a view?"}]
    )
    right = served.right(ids, max_tokens=30, temperature=0.7, seed=3)
    how: dict[str, Any] = {
        "model": "tiny", "messages": messages, "max_completion_tokens": 30, "temperature": 0.7,
        "seed": 3, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = served.client.chat.completions.create(**how)
    choice = whole.choices[0]
    assert choice.message.content == right.text
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(right.token_ids)
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)
    text, told = "", 0
    for chunk in served.client.chat.completions.create(**how, stream=True):
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs and chunk.choices[0].logprobs.content:
            told += len(chunk.choices[0].logprobs.content)
    assert text == right.text
    assert told == len(right.token_ids)


def test_other_dialects_give_the_offline_answer(served: Served) -> None:
    """With drafts, by the clients that speak them, whole and streamed."""
    said = "What is a view?"
    ids = Tokenizer(TINY).apply_chat_template([{"role": "user", "content": said}])
    right = served.right(ids, max_tokens=30, temperature=0.7, seed=3)
    how: dict[str, Any] = {"model": "tiny", "extra_body": {"temperature": 0.7, "seed": 3}}
    whole = served.client.responses.create(input=said, max_output_tokens=30, **how)
    assert whole.output_text == right.text
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(right.token_ids)
    assert whole.usage.model_dump()["speculation"]["accepted_tokens"] > 0
    with served.client.responses.stream(input=said, max_output_tokens=30, **how) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(deltas) == right.text
    assert len(deltas) > 5
    anthropic: Any = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0) as client:
        how |= {"max_tokens": 30, "messages": [{"role": "user", "content": said}]}
        message = client.messages.create(**how)
        assert message.content[0].text == right.text
        read = message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert read == len(ids)
        with client.messages.stream(**how) as stream:
            assert "".join(stream.text_stream) == right.text
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            client.messages.create(**{**how, "model": "gpt"})
    served.settle()


def test_every_parameter_gives_the_offline_answer(served: Served) -> None:
    plain = served.right(PROMPTS[1], max_tokens=MAX_TOKENS)
    eos = load_config(TINY).eos_ids[0]
    for name, case in cases(plain.token_ids, plain.text, eos).items():
        sampling = Sampling(**{"max_tokens": MAX_TOKENS, "draft_tokens": 0, **case.how})
        (right,) = served.offline.generate(PROMPTS[1], sampling, stop=case.stop)
        body = {"prompt": PROMPTS[1], "max_tokens": MAX_TOKENS, "return_token_ids": True}
        got = httpx.post(served.url + "/completions", json=body | case.fields, timeout=60).json()
        (choice,) = got["choices"]
        answer = (choice["text"], choice["token_ids"], choice["finish_reason"])
        assert answer == (right.text, right.token_ids, right.finish_reason), name
        assert got["usage"]["speculation"]["drafted_tokens"] > 0, name


def test_choices_of_several_prompts_give_the_offline_answers(served: Served) -> None:
    how: dict[str, Any] = {"temperature": 0.8, "max_tokens": MAX_TOKENS}
    prompts = [PROMPTS[1], PROMPTS[2]]
    got = served.client.completions.create(
        model="tiny", prompt=prompts, seed=8, n=2, echo=True, user="u1", **how
    )
    rights = [(p, served.right(p, **how, seed=8 + i).text) for p in prompts for i in range(2)]
    assert [choice.text for choice in got.choices] == [prompt + text for prompt, text in rights]


def test_stops_are_named_and_cut(served: Served) -> None:
    plain = served.right(PROMPTS[0], max_tokens=60)
    stop = plain.text[30:34]
    before = plain.text[: plain.text.index(stop)]
    for stream in (False, True):
        how: dict[str, Any] = {
            "model": "tiny",
            "prompt": PROMPTS[0],
            "max_tokens": 60,
            "temperature": 0,
        }
        got: Any = served.client.completions.create(
            **how, stop=[stop, "\ufffd\ufffd"], stream=stream
        )
        chunks = list(got) if stream else [got]
        assert "".join(c.choices[0].text for c in chunks) == before
        assert chunks[-1].choices[0].finish_reason == "stop"
        stop_id = plain.token_ids[10]
        got = served.client.completions.create(
            **how, extra_body={"stop_token_ids": [stop_id], "return_token_ids": True}
        )
        count = plain.token_ids.index(stop_id) + 1
        assert got.choices[0].token_ids == plain.token_ids[:count]
        assert got.choices[0].finish_reason == "stop"
    served.settle()


def test_the_example_client_gets_its_answers(served: Served, repo: Path) -> None:
    out = python(repo, "examples/ask_server.py", served.url)
    right = served.right("To create a new project,", max_tokens=32)
    assert right.text in out
    assert "'drafted_tokens': " in out


def test_the_examples_of_the_documentation_run(served: Served, repo: Path) -> None:
    text = (
        (repo / "docs/serving.md").read_text("utf-8").replace("http://127.0.0.1:8000", served.root)
    )
    shell = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The second piece of Python is for models whose chat template has words for tools.
    assert (len(shell), len(code)) == (2, 2)
    out = [
        subprocess.run(
            ["bash", "-c", one], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for one in shell
    ]
    right = served.right("To create a new project,", max_tokens=24)
    assert json.loads(out[0])["choices"][0]["text"] == right.text
    assert out[1].rstrip().endswith("data: [DONE]")
    assert '"accepted_tokens":' in out[1]
    assert "drafted_tokens" in python(repo, "-c", code[0])


def test_the_kept_serve_config_is_what_is_built(repo: Path) -> None:
    config = ServeDeploySchema.model_validate(
        yaml.safe_load((repo / "examples/serve.yaml").read_text())
    )
    (application,) = config.applications
    assert application.import_path == "outrider.actors.serve:build"
    app = build({"config": str(repo / application.args["config"])})
    assert app._bound_deployment.name == "Outrider"


def test_errors_reach_the_client_as_its_own(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        served.client.completions.create(model="tiny", prompt="a", suffix="b")
    with pytest.raises(openai.NotFoundError, match="not served here"):
        served.client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="1 too many"):
        served.client.completions.create(model="tiny", prompt=[1] * 4096)


def test_32_streams_of_all_kinds_are_each_the_offline_answer(served: Served) -> None:
    dice = random.Random(4)
    bodies, rights, leaving = [], [], {}
    for number in range(32):
        prompt = PROMPTS[number % len(PROMPTS)][: dice.choice([20, 60, 400])]
        how: dict[str, Any] = {"max_tokens": dice.choice([3, 17, 40])}
        how |= {"temperature": 0.8, "seed": number} if number % 3 == 1 else {"temperature": 0.0}
        how |= {"presence_penalty": 0.7} if number % 5 == 2 else {}
        stop = ["e ", "."] if number % 4 == 3 else []
        if number % 8 == 0:
            how["max_tokens"] = 2000
            leaving[number] = dice.choice([1, 3])
        bodies.append({"prompt": prompt, "stop": stop, **how})
        most = 60 if number in leaving else how["max_tokens"]
        rights.append((prompt, stop, Sampling(**{**how, "max_tokens": most, "draft_tokens": 0})))
    answers = served.offline.generate([p for p, _, _ in rights], [s for _, _, s in rights])
    before = served.settle()

    async def all_of_them() -> list[tuple[int, str, str | None]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=served.root, timeout=90, limits=limits) as http:
            return await asyncio.gather(
                *(one_client(http, i, body, leaving.get(i)) for i, body in enumerate(bodies))
            )

    for number, text, finish in asyncio.run(all_of_them()):
        right, stop = answers[number], rights[number][1]
        ends = [end for s in stop if (end := right.text.find(s)) >= 0]
        if number in leaving:
            assert finish is None
            assert text
            assert right.text.startswith(text)
        elif ends:
            assert (text, finish) == (right.text[: min(ends)], "stop"), number
        else:
            assert (text, finish) == (right.text, right.finish_reason), number
    after = served.settle()
    assert after["requests_aborted"] - before["requests_aborted"] == len(leaving)
    assert after["accepted"] > before["accepted"]


def test_the_user_of_an_answer_is_in_the_replicas_log(served: Served) -> None:
    users = [f"user {secrets.token_hex(4)}\n" for _ in range(3)]
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "n": 2}
    for user, stream in zip(users[:2], (False, True), strict=True):
        httpx.post(served.url + "/completions", json=body | {"user": user, "stream": stream})
    refused = httpx.post(served.url + "/completions", json=body | {"user": users[2], "n": 0})
    assert refused.status_code == 400
    context = ray.get_runtime_context()
    logs = Path(context.get_temp_dir(), context.get_session_name(), "logs", "serve")
    text = "".join(file.read_text("utf-8") for file in logs.glob("replica_outrider_*.log"))
    told = [f"answered user {user!r}: choices: 2" in text for user in users]
    assert told == [True, True, False]


def test_two_runs_are_byte_identical(served: Served) -> None:
    def answer() -> bytes:
        body = {"prompt": PROMPTS[3], "max_tokens": 32, "temperature": 0.9, "seed": 11, "n": 2}
        choices = httpx.post(served.url + "/completions", json=body, timeout=60).json()["choices"]
        return json.dumps(choices).encode()

    assert answer() == answer()


def test_a_client_that_leaves_during_prefill_ends_it_within_a_chunk(served: Served) -> None:
    before = served.settle()
    body = {"prompt": [5] * 4000, "max_tokens": 5}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + "/completions", json=body, timeout=httpx.Timeout(5, read=0.15))
    after = served.settle()
    assert after["requests_aborted"] - before["requests_aborted"] == 1
    assert after["steps"] - before["steps"] < 8  # 8 chunks of 512 are the whole prompt
    assert after["tokens"] == before["tokens"]


def test_more_than_queue_and_slots_hold_are_429_and_the_rest_are_answered(served: Served) -> None:
    count = SLOTS + QUEUE + 30
    body = {"prompt": "a", "max_tokens": 16, "temperature": 0}

    async def all_of_them() -> list[Any]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=served.root, timeout=90, limits=limits) as http:
            return await asyncio.gather(
                *(http.post("/v1/completions", json=body) for _ in range(count))
            )

    answers = asyncio.run(all_of_them())
    codes = [a.status_code for a in answers]
    assert set(codes) == {200, 429}
    assert codes.count(200) >= SLOTS + QUEUE
    for refused in (a for a in answers if a.status_code == 429):
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
    assert len({a.json()["choices"][0]["text"] for a in answers if a.status_code == 200}) == 1
    served.settle()


def test_replicas_that_drain_answer_503_until_their_streams_have_ended(
    served: Served, cluster: RunningCluster, repo: Path
) -> None:
    """By the command of docs/serving.md, on the cluster of the other server."""
    text = (repo / "docs/serving.md").read_text("utf-8")
    (command,) = re.findall(r"^(python -c .*?\)')$", text, re.DOTALL | re.MULTILINE)
    command = command.replace("default", "ends").replace("python", sys.executable, 1)
    spec = serving_spec(None, {"model": str(TINY), "tensor_parallel": 1, "draft_tokens": 0})
    serve.run(application(spec), name="ends", route_prefix="/ends")
    root, body = served.root + "/ends", {"prompt": "a", "temperature": 0}
    try:
        with httpx.stream(
            "POST", root + "/v1/completions", json=body | {"max_tokens": 700, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            ending = subprocess.Popen(["bash", "-c", command], cwd=repo, env=cluster.environ())
            deadline_s = time.monotonic() + 60
            while (health := httpx.get(root + "/health")).status_code == 200:
                assert ending.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = httpx.post(root + "/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            assert ending.poll() is None
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert ending.wait(20) == 0
    finally:
        serve.delete("ends")


def test_an_application_that_is_deleted_ends_long_streams_with_an_error(served: Served) -> None:
    """What goes on beyond serve.drain_timeout_s; Serve would break the connection then."""
    overrides = {"model": str(TINY), "tensor_parallel": 1, "drain_timeout_s": 1.0}
    spec = serving_spec(None, {**overrides, "parallel.rank_cpus": None, "draft_tokens": 0})
    serve.run(application(spec), name="cut", route_prefix="/cut")
    body = {"prompt": "a", "max_tokens": 3500, "ignore_eos": True}
    url = served.root + "/cut/v1/completions"
    with (
        ThreadPoolExecutor(2) as pool,
        httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        whole = pool.submit(httpx.post, url, json=body | {"n": 2}, timeout=60)
        time.sleep(0.3)
        started_s, deleting = time.monotonic(), pool.submit(serve.delete, "cut")
        *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
        assert 1 <= time.monotonic() - started_s < 5
        got = whole.result()
        assert (got.status_code, got.json()["error"]["code"]) == (503, "draining")
        deleting.result()
        assert time.monotonic() - started_s < 20


def test_api_keys_are_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    spec = serving_spec(None, {"model": str(TINY), "serve.api_key_file": str(file)})

    def digests(text: str) -> list[bytes]:
        return [hashlib.sha256(key.encode()).digest() for key in text.split()]

    file.write_text("\ufeff# keys of team A\r\nsk-one\r\n\n  sk-two  \n#sk-old\n")
    assert list(api_keys(spec)) == digests("sk-one sk-two")
    for text, why in (
        ("sk-one\nsk two\n", "line 2: a line is one key without white space"),
        ("# a\n\nsk-one\ttab", "line 3: a line is one key without white space"),
        ("# only comments\n\n", "it holds none"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            api_keys(spec)


def test_a_route_that_another_application_has_is_an_error_of_one_line(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `serve run` leaves one behind at /; here it is the server of these tests."""
    monkeypatch.setattr(server, "APPLICATION", "second")
    spec = serving_spec(None, {"model": str(TINY), "rank_cpus": None})
    started_s = time.monotonic()
    says = r'Serve refuses: Prefix / .*by application "outrider"'
    with pytest.raises(ConfigError, match=says), serving(spec):
        pass
    assert time.monotonic() - started_s < 20
    assert served.settle()


def test_the_error_of_a_replica_that_cannot_start_is_shown(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["type"] = "Unheard"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(server, "APPLICATION", "second")
    monkeypatch.setattr(server, "ROUTE", "/second")
    spec = serving_spec(None, {"model": str(folder), "rank_cpus": None, "tensor_parallel": 1})
    says = rf"^{folder}/tokenizer\.json: cannot be loaded: "
    with pytest.raises(ConfigError, match=says), serving(spec):
        pass
    assert served.settle()


def test_ctrl_c_ends_serve_run_and_the_ranks(served: Served) -> None:
    """It shuts Ray Serve down: the last test of this module."""
    engine = served.settle()["engine"]
    footprint = Footprint.of(*(one["pid"] for one in (engine["driver"], *engine["ranks"])))
    assert len(footprint.pids) >= 3
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    footprint.wait_until_gone()
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.root + "/health")
