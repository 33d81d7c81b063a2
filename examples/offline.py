"""A script that starts an engine on this machine, asks it a batch of prompts and streams one.

    python examples/offline.py            (from the repository's root, where cluster.yaml is)

It prints the texts, and how many drafts were made and accepted.
"""

from __future__ import annotations

from outrider import Engine, Sampling

PROMPTS = ["To create a new project,", "By default, the server", "A view is a function that"]


def main() -> None:
    with Engine.from_config("cluster.yaml", draft_tokens=3) as engine:
        for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, Sampling(max_tokens=32))):
            print(f"{prompt}{answer.text}\n---")
        for chunk in engine.stream(PROMPTS[0], Sampling(max_tokens=32, temperature=0.8, seed=7)):
            print(chunk.text, end="", flush=True)
        stats = engine.stats()
    print(f"\n{stats['accepted']} of {stats['drafted']} drafts accepted")


if __name__ == "__main__":
    main()
