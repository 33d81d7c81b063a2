"""The project keeps its conventions, and a violation of each is found.

`test_the_project_keeps_the_rule` runs the rules of tests/architecture.py on this repository;
`test_a_violation_turns_the_rule_red` writes one deliberate violation into a small clean tree.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import (
    MAX_CORE_LINES,
    RULES,
    Rule,
    chips_are_not_named_outside_parallel,
    core_is_small,
    device_libraries_stay_in_backends,
    doors_open_one_way,
    environment_is_no_configuration,
    failures_are_not_swallowed,
    files_are_short,
    functions_are_short,
    host_syncs_stay_in_the_runner,
    imports_are_absolute,
    imports_form_no_circle,
    merges_are_finished,
    modules_open_with_a_map,
    names_say_what_is_inside,
    one_file_reads_yaml,
    our_code_is_imported_under_one_name,
    packages_hold_no_code,
    pages_name_files_that_exist,
    readme_tree_equals_the_disk,
)

MAP = '"""A map.\n\n    in -> out\n\nIt remembers nothing.\n"""\n'
README = """# Clean

```tree
README.md
parallel/     how
  backends/
    cpu.py    the definition
model/
  runner.py   waits
actors/
  cluster/
    placement.py
    reader.py reads
  ranks/
    rank.py
```
"""
CLEAN = {
    "README.md": README,
    "parallel/backends/cpu.py": MAP + "import triton\nlengths = rows.tolist()\n",
    "model/runner.py": MAP + "import outrider.parallel.device\ntokens = kept.tolist()\n",
    "actors/cluster/placement.py": MAP + "import os\nos.environ['A'] = 'b'\n",
    "actors/ranks/rank.py": MAP
    + "import os, ray\nfrom outrider.model import runner\nx = os.environ['A']\n",
    "actors/cluster/reader.py": MAP
    + "import yaml\ntry:\n    f()\nexcept Exception:\n    raise X from e\n",
}
"""A tree that keeps all rules and uses every exemption."""

VIOLATIONS: tuple[tuple[Rule, str, str], ...] = (
    (doors_open_one_way, "parallel/group.py", "from outrider.model import config\n"),
    (doors_open_one_way, "parallel/group.py", "def f():\n    import outrider.actors.ranks.rank\n"),
    (doors_open_one_way, "parallel/linear.py", "import ray\n"),
    (doors_open_one_way, "parallel/linear.py", "from transformers import AutoConfig\n"),
    (doors_open_one_way, "model/text.py", "from outrider.actors.cluster.spec import Spec\n"),
    (doors_open_one_way, "model/text.py", "if TYPE_CHECKING:\n    import ray.actor\n"),
    (doors_open_one_way, "actors/ranks/rank.py", "import torch_npu\n"),
    (doors_open_one_way, "actors/ranks/rank.py", "import outrider.actors.driver.driver\n"),
    (doors_open_one_way, "actors/ranks/rank.py", "importlib.import_module('flash_attn')\n"),
    (device_libraries_stay_in_backends, "model/gdn.py", "from fla.ops import gated\n"),
    (device_libraries_stay_in_backends, "parallel/graph.py", "import torch_npu\n"),
    (device_libraries_stay_in_backends, "parallel/graph.py", "import triton.language as tl\n"),
    (chips_are_not_named_outside_parallel, "model/mtp.py", "torch.cuda.synchronize()\n"),
    (chips_are_not_named_outside_parallel, "actors/ranks/rank.py", "from torch import npu\n"),
    (host_syncs_stay_in_the_runner, "model/mtp.py", "kept = agree.sum().item()\n"),
    (host_syncs_stay_in_the_runner, "model/mtp.py", "ids = tokens.tolist()\n"),
    (host_syncs_stay_in_the_runner, "parallel/vocab.py", "x = logits.cpu()\n"),
    (host_syncs_stay_in_the_runner, "parallel/vocab.py", "x = logits.numpy()\n"),
    (
        host_syncs_stay_in_the_runner,
        "actors/driver/driver.py",
        "x = logits.to('cpu', torch.int64)\n",
    ),
    (environment_is_no_configuration, "model/config.py", "x = os.environ.get('K')\n"),
    (environment_is_no_configuration, "actors/cli.py", "x = os.getenv('K')\n"),
    (environment_is_no_configuration, "parallel/device.py", "from os import environ\n"),
    (one_file_reads_yaml, "actors/cli.py", "import yaml\n"),
    (files_are_short, "model/cache.py", "x = 1\n" * 401),
    (functions_are_short, "model/cache.py", "def f():\n" + "    x = 1\n" * 60),
    (core_is_small, "parallel, model, actors", ""),
    (modules_open_with_a_map, "model/cache.py", ""),
    (modules_open_with_a_map, "benchmarks/bench.py", '"""One line."""\n'),
    (modules_open_with_a_map, "model/cache.py", '"""Long.\n' + "more\n" * 8 + '"""\n'),
    (packages_hold_no_code, "model/__init__.py", "from outrider.model.runner import Runner\n"),
    (imports_are_absolute, "model/mtp.py", "from .blocks import Norm\n"),
    (imports_are_absolute, "tests/test_x.py", "from . import test_y\n"),
    (imports_form_no_circle, "model/runner.py", "from outrider.model.other import f\n"),
    (our_code_is_imported_under_one_name, "model/mtp.py", "from model.blocks import Norm\n"),
    (names_say_what_is_inside, "model/utils.py", "x = 1\n"),
    (names_say_what_is_inside, "parallel/helpers/shapes.py", "x = 1\n"),
    (names_say_what_is_inside, "actors/types.py", "x = 1\n"),
    (failures_are_not_swallowed, "actors/ranks/group.py", "try:\n    f()\nexcept:\n    pass\n"),
    (failures_are_not_swallowed, "model/text.py", "try:\n    f()\nexcept Exception:\n    x = 1\n"),
    (
        failures_are_not_swallowed,
        "model/text.py",
        "def f():\n    try:\n        g()\n    except (OSError, BaseException):\n        x = 1\n",
    ),
    (readme_tree_equals_the_disk, "model/mtp.py", "x = 1\n"),
    (readme_tree_equals_the_disk, "parallel/backends/npu.py", "x = 1\n"),
    (readme_tree_equals_the_disk, "notes.txt", "x = 1\n"),
    (readme_tree_equals_the_disk, "model/gone.py", ""),
    (
        pages_name_files_that_exist,
        "docs/design.md",
        "Read actors/cluster/reader.py, model/gone.py.",
    ),
    (pages_name_files_that_exist, "NOTES.md", "tests/test_gone.py finds it."),
    (merges_are_finished, "CHANGELOG.md", "- one\n<<<<<<< HEAD\n- two\n"),
)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    for path, text in CLEAN.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: Rule, repo: Path) -> None:
    assert rule(repo) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clean_tree_keeps_the_rule(rule: Rule, clean: Path) -> None:
    assert rule(clean) == []


@pytest.mark.parametrize(("rule", "path", "text"), VIOLATIONS)
def test_a_violation_turns_the_rule_red(rule: Rule, path: str, text: str, clean: Path) -> None:
    if rule is core_is_small:
        for number in range(MAX_CORE_LINES // 400 + 1):
            (clean / f"model/part{number}.py").write_text("x = 1\n" * 400)
    elif path == "model/gone.py":
        (clean / "README.md").write_text(README.replace("  runner.py", "  gone.py\n  runner.py"))
    else:
        (clean / path).parent.mkdir(parents=True, exist_ok=True)
        (clean / path).write_text(text)
    if rule is imports_form_no_circle:
        (clean / "model/other.py").write_text("def f():\n    from outrider.model import runner\n")
    complaints = rule(clean)
    assert complaints
    assert all(path in complaint for complaint in complaints)


def test_every_rule_has_a_violation() -> None:
    assert {rule for rule, _, _ in VIOLATIONS} == set(RULES)
