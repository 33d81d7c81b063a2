"""A client of a running server, with the openai package: a completion, then a streamed chat.

    outrider serve --config cluster.yaml
    python examples/ask_server.py http://127.0.0.1:8000/v1

It prints both texts, and of the completion how many drafts were made and accepted.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model, prompt="To create a new project,", max_tokens=32, temperature=0
    )
    print(answer.choices[0].text)
    assert answer.usage is not None
    print(answer.usage.model_dump()["speculation"])
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a view?"}],
        max_completion_tokens=32,
        seed=7,
        stream=True,
        extra_body={"top_k": 20, "speculation": {"draft_tokens": 2}},
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
