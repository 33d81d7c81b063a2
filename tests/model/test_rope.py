"""Rotary positions: every spelling of config.json, and the tables of transformers to the bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from outrider.model.blocks import RotaryTable
from outrider.model.config import AttentionConfig
from outrider.model.rope import Rope, Yarn, read_rope
from outrider.parallel.devices import open_device
from outrider.parallel.group import alone

YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}


def read(**text: Any) -> Rope:
    return read_rope(text, 256, 512)


@pytest.mark.parametrize(
    "text",
    [
        {"rope_parameters": {**PLAIN, "rope_type": "yarn", **YARN}},
        {**PLAIN, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {**PLAIN, "rope_scaling": {"type": "yarn", **YARN}},
        {
            "rope_parameters": {**PLAIN, "rope_type": "default"},
            "rope_scaling": {"type": "yarn", **YARN},
        },
        {
            "rope_parameters": None,
            "rope_scaling": {**PLAIN, "type": "yarn", **YARN, "mscale": None},
        },
    ],
)
def test_yarn_is_read_in_each_of_its_spellings(text: dict[str, Any]) -> None:
    rope = read(**text)
    assert (rope.theta, rope.rotary_dim) == (1e7, 64)
    assert rope.yarn == Yarn(
        factor=4.0,
        original_positions=64,
        beta_fast=32,
        beta_slow=1,
        truncate=True,
        attention_factor=pytest.approx(1.1386294),
    )


def test_a_share_of_the_head_that_rotates_may_be_left_out() -> None:
    """It is a quarter in all models of the class, and transformers takes that, too."""
    assert read(rope_theta=1e6) == Rope(theta=1e6, rotary_dim=64)
    assert read(rope_theta=1e6, rope_scaling=None, partial_rotary_factor=1.0).rotary_dim == 256


CASES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "yarn": {"rope_type": "yarn", **YARN},
    "old type": {"type": "yarn", **YARN},
    "betas": {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2.5},
    "attention_factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.7},
    "mscale": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "mscale alone": {"rope_type": "yarn", **YARN, "mscale": 0.7},
    "not truncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "original left out": {"rope_type": "yarn", "factor": 4.0},
    "of 262,144": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144},
    "all slow": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6},
    "no range": {"rope_type": "yarn", **YARN, "beta_fast": 1.0001, "truncate": False},
}


@pytest.mark.parametrize("theta", [1e7, 1e4])
@pytest.mark.parametrize("name", CASES)
def test_the_tables_are_those_of_transformers(name: str, theta: float) -> None:
    keys = {"rope_theta": theta, "partial_rotary_factor": 0.25, **CASES[name]}
    rope = read_rope({"rope_parameters": dict(keys)}, 256, 512)
    config = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=256, rope=rope)
    table = RotaryTable(config, 600, open_device("cpu", 0, alone()))
    theirs = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(
        Qwen3_5TextConfig(
            num_attention_heads=1, num_key_value_heads=1, hidden_size=256, head_dim=256,
            max_position_embeddings=512, rope_parameters={**keys, "mrope_section": [11, 11, 10]},
        )
    )  # fmt: skip
    cos, sin = theirs(torch.zeros(1), torch.arange(600)[None])
    assert torch.equal(table.cos, cos[0])
    assert torch.equal(table.sin, sin[0])
    if rope.yarn:
        plain = RotaryTable(
            AttentionConfig(
                num_heads=1, num_kv_heads=1, head_dim=256, rope=Rope(theta=theta, rotary_dim=64)
            ),
            600,
            open_device("cpu", 0, alone()),
        )
        assert not torch.allclose(plain.cos, table.cos, atol=0.05)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({}, "rope_theta = None: a number above 1 is needed"),
        ({"rope_parameters": {"rope_theta": "1e7"}}, "rope_theta = '1e7': a number above 1"),
        ({**PLAIN, "partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: an even number"),
        ({**PLAIN, "partial_rotary_factor": 0.005}, "of the head_dim = 256 dimensions must rotate"),
        ({**PLAIN, "rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3' is not supported"),
        ({**PLAIN, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear' is not"),
        ({**PLAIN, "rope_scaling": {"factor": 4}}, "factor is not used by rope_type 'default'"),
        ({**PLAIN, "rope_scaling": "yarn"}, "rope_scaling = 'yarn': a table is needed"),
        ({**PLAIN, "rope_scaling": {"type": "yarn"}}, "factor = None: a number above 0 is needed"),
        (
            {**PLAIN, "rope_scaling": {"type": "yarn", **YARN, "factor": 0.5}},
            "YaRN needs at least 1",
        ),
        ({**PLAIN, "rope_scaling": {"type": "yarn", **YARN, "low": 1}}, "low is not used by"),
        (
            {**PLAIN, "rope_scaling": {"type": "yarn", **YARN, "beta_slow": 40}},
            "beta_fast = 32: more than beta_slow = 40 is needed",
        ),
        (
            {**PLAIN, "rope_scaling": {"type": "yarn", **YARN, "truncate": 1}},
            "truncate = 1: true or false is needed",
        ),
        (
            {**PLAIN, "rope_scaling": {"type": "yarn", **YARN, "attention_factor": -1}},
            "attention_factor = -1: a number above 0 is needed",
        ),
    ],
)
def test_what_cannot_be_run_is_named(text: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        read(**text)
