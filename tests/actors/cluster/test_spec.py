"""cluster.yaml, overrides and the checks: every wrong value names key, value, rule and place."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import typing
import warnings
from pathlib import Path

import pytest

from outrider.actors.cluster import reader
from outrider.actors.cluster import spec as spec_module
from outrider.actors.cluster.kinds import NPU_MAX_ROWS, NPU_PAGE_TOKENS
from outrider.actors.cluster.reader import load_spec, parse_set
from outrider.actors.cluster.spec import Spec
from outrider.actors.engine import limits_of
from outrider.model.config import ConfigError, load_config
from outrider.model.plan import memory_plan
from outrider.parallel import affinity
from tests import checkpoints

HERE = frozenset({0, 1, 2, 3, 4})


@pytest.fixture(autouse=True)
def five_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: HERE)
    monkeypatch.setattr(affinity, "can_pin", lambda: True)


def write(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def made(**overrides: object) -> Spec:
    return load_spec(None, {"model": "m", **overrides})


def test_the_shipped_file_holds_every_key_at_its_default(repo: Path) -> None:
    shipped = load_spec(repo / "cluster.yaml")
    assert set(shipped.origins) == set(reader._keys())
    assert dataclasses.replace(shipped, model="m") == made()
    assert "not Ray's cluster-launcher" in (repo / "cluster.yaml").read_text().splitlines()[0]


def test_every_key_has_a_docstring() -> None:
    for cls in (Spec, *spec_module.SECTIONS.values()):
        source = inspect.getsource(cls).splitlines()
        for name in typing.get_type_hints(cls):
            at = next(i for i, x in enumerate(source) if x.startswith(f"    {name}: "))
            assert name in spec_module.SECTIONS or source[at + 1].strip().startswith('"""'), name


def test_an_option_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "model: m\nspeculation: {draft_tokens: 7}\nlimits: {max_slots: 2}\n")
    assert load_spec(file).speculation.draft_tokens == 7
    spec = load_spec(file, {"draft_tokens": 0, "limits": {"max_queue": 5}, "model": Path("n")})
    assert (spec.speculation.draft_tokens, spec.limits.max_slots, spec.limits.max_queue) == (
        0,
        2,
        5,
    )
    assert spec.model == "n"
    assert spec.resolved_page_tokens == 16


def test_a_section_of_comments_only_is_empty(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, "model: m\ncache:\n  # page_tokens: 3\n")) == made()


def test_a_model_folder_counts_from_the_file_and_a_hub_id_stays(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert load_spec(write(tmp_path, "model: tiny")).model == str(tmp_path / "tiny")
    assert load_spec(write(tmp_path, "model: owner/name")).model == "owner/name"
    assert load_spec(write(tmp_path, "model: tiny"), {"model": "tiny"}).model == "tiny"


def test_a_spec_travels_to_other_processes() -> None:
    spec = made(rank_cpus=["0", "1"])
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: m\nspeculation:\n  draft_tokns: 3", ["speculation.draft_tokns", "did you mean"]),
        ("model: m\ndraft_tokens: 3", ["draft_tokens", "did you mean speculation.draft_tokens?"]),
        ("model: m\nspeculations: {}", ["speculations", "did you mean speculation?"]),
        ("model: m\norigins: {}", ["unknown key origins"]),
        ("model: m\nfrobnicate: 1", ["key frobnicate; there are model, ", "sections parallel, "]),
        ("model: m\nlimits: {foo: 1}", ["limits.foo; section limits has max_slots,"]),
        ("model: m\nspeculation: {zz: 1}", ["speculation.zz; section speculation has draft_tok"]),
        ("model: m\nlimit: {max_slots: 1}", ["unknown key limit; did you mean limits?"]),
        ("model: m\nlimits: {frobnicate: 1}", ["limits.frobnicate; section limits has max_slots,"]),
        ("model: m\nspeculation: {draft_tokens: -1}", ["speculation.draft_tokens = -1", "least 0"]),
        ("model: m\nspeculation: {draft_tokens: 17}", ["= 17: must be an integer", "at most 16"]),
        ("model: m\nspeculation: {draft_tokens: 2.5}", ["= 2.5: must be an integer"]),
        ("model: m\nspeculation: {draft_tokens: true}", ["= True: must be an integer"]),
        ("model: m\nspeculation: {pin_rows: 1}", ["pin_rows = 1: must be true or false"]),
        ("model: m\ndevice: gpu", ['device = \'gpu\': must be "cpu" or "cuda" or "npu"']),
        ("model: m\ncache: {num_pages: 0}", ["num_pages = 0: must be an integer", 'or "auto"']),
        ("model: m\ncache: {max_memory_utilization: 1.5}", ["a number, above 0, at most 1"]),
        ("model: m\nrecovery: {decode_s: .nan}", ["recovery.decode_s = nan", "above 0"]),
        ("model: m\nray: {cpus_per_rank: 0}", ["ray.cpus_per_rank = 0", "device cpu"]),
        ("model: m\nparallel: 3", ["parallel = 3: must be a section"]),
        ("model: m\nparallel: {rank_cpus: 0-1}", ["= '0-1': must be a list"]),
        ("model: m\nparallel: {rank_cpus: [0]}", ["['0']", "has 1 ranges", "tensor_parallel = 2"]),
        ("model: m\nparallel: {rank_cpus: [0, 3-1]}", ['"3-1" runs backwards']),
        ("model: m\nparallel: {rank_cpus: [0, 9-11]}", ['"9-11"', 'may use "0-4"']),
        ("model: m\nparallel: {driver_cpus: 7}", ["parallel.driver_cpus = '7'", 'may use "0-4"']),
        ("model: m\nparallel: {collective: nccl}", ["collective = 'nccl'", "auto or shm or gloo"]),
        ("model: m\nlimits: {batch_buckets: [4, 2, 8]}", ["[4, 2, 8]", "must rise"]),
        ("model: m\nlimits: {batch_buckets: [1, 4]}", ["end with max_slots = 8"]),
        ("model: m\nserve: {cors_origins: app.x}", ["cors_origins = 'app.x': must be a list"]),
        ("model: m\nserve: {cors_origins: ['*']}", ["serve.cors_origins", '"*" is no origin']),
        ("model: m\nserve: {cors_origins: [app.x]}", ['"app.x" is no origin', "scheme://host"]),
        ("model: m\nserve: {cors_origins: ['http://x/']}", ['"http://x/"', "without a path"]),
        ("model: m\nserve: {cors_origins: ['http://X']}", ['"http://X"', "in lower case"]),
        ("model: m\nserve: {cors_origins: ['https://x:443']}", ['"https://x:443"', "the port"]),
        ("model:", ["model = null: must be a text"]),
        ("device: cpu", ["model is not set", "--model"]),
        ("model: m\nmodel: n", ["line 2", '"model" is written twice']),
        ("model: [", ["not a YAML file"]),
        ("model: m\n? [a, b]\n: c", ["not a YAML file", "unhashable key"]),
        ("- model", ["expected `key: value` lines, found list"]),
        ("provider: {type: aws}\nmax_workers: 2", ["max_workers, provider", "`ray up`"]),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_to_change(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_spec(file)
    for part in (str(file), *parts):
        assert part in str(caught.value)


def test_a_wrong_override_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "model: m")
    with pytest.raises(ConfigError, match=r"^override: speculation\.draft_tokens = -1"):
        load_spec(file, {"speculation.draft_tokens": -1})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot be read: No such file"):
        load_spec(tmp_path / "nope.yaml")


def test_origins_are_written_as_browsers_send_them() -> None:
    origins = ["http://localhost:3000", "https://app.example.com", "http://[::1]:80800"]
    origins += ["https://x:80", "http://127.0.0.1:5173", "chrome-extension://abcdef"]
    assert made(cors_origins=origins).serve.cors_origins == tuple(origins)
    assert made(cors_origins="*").serve.cors_origins == "*"
    assert made().serve.cors_origins == ()


def test_overlapping_ranges_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="rank 0 and rank 1 share CPUs 1-2"):
        made(rank_cpus=["0-2", "1-3"])
    with pytest.warns(UserWarning, match="rank 1 and the driver share CPUs 1"):
        made(rank_cpus=[0, 1], driver_cpus="1,2")


def test_cpus_are_split_over_the_ranks_where_they_suffice() -> None:
    assert made().rank_cpu_sets() == ({0, 1, 2}, {3, 4})
    assert made().rank_cpu_sets(frozenset({7})) == (None, None)
    assert made(rank_cpus=None).rank_cpu_sets() == (None, None)
    assert made().driver_cpu_set() is None


def test_a_system_that_cannot_pin_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "can_pin", lambda: False)
    assert made().rank_cpu_sets() == (None, None)


def test_a_range_partly_outside_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r'"4-9": CPUs 5-9 are not available'):
        spec = made(rank_cpus=["0-3", "4-9"])
    with pytest.warns(UserWarning, match="not available"):
        assert spec.rank_cpu_sets() == ({0, 1, 2, 3}, {4})


def test_ranges_of_another_machine_are_not_checked_on_this_one() -> None:
    spec = made(rank_cpus=["240-279", "280-319"], device="npu")
    assert spec.rank_cpu_sets(frozenset(range(320)))[1] == frozenset(range(280, 320))
    with pytest.raises(ConfigError, match='may use "0-4"'):
        spec.rank_cpu_sets()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("limits.max_slots=16", "limits.max_slots", 16),
        ("a.b=[0-3, 4]", "a.b", ["0-3", 4]),
        ("parallel.rank_cpus=null", "parallel.rank_cpus", None),
        ("model=a=b", "model", "a=b"),
    ],
)
def test_set_takes_yaml_values(text: str, key: str, value: object) -> None:
    assert parse_set(text) == (key, value)


@pytest.mark.parametrize("text", ["a.b", "=3", "a=[", ""])
def test_a_set_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_set(text)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"draft_tokens": 16}, r"speculation\.draft_tokens = 16: at most 15 on npu"),
        ({"page_tokens": 16}, r"cache\.page_tokens = 16: must be a multiple of 128 on npu"),
        ({"draft_head": "fp8"}, r"speculation\.draft_head = 'fp8': must be model on npu"),
        ({"decode_s": 200}, r"ray\.collective_timeout_s = 120.0: must exceed recovery\.decode_s"),
    ],
)
def test_what_an_npu_cannot_do_names_the_key(keys: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(device="npu", **keys)
    made(**keys)


def test_npu_rules_are_the_backends() -> None:
    from outrider.parallel.backends.npu import CAPABILITIES

    assert CAPABILITIES.max_rows == NPU_MAX_ROWS
    assert CAPABILITIES.page_multiple == NPU_PAGE_TOKENS
    assert made(device="npu").resolved_page_tokens == NPU_PAGE_TOKENS


def test_dtype_follows_the_device() -> None:
    assert made().resolved_dtype == "float32"
    assert made(device="cuda").resolved_dtype == "bfloat16"
    assert made(device="cuda", dtype="float32").resolved_dtype == "float32"


def test_the_run_config_carries_what_was_asked_for(planted_tiny: Path) -> None:
    model = load_config(planted_tiny)
    spec = made(draft_body="sharded", draft_tokens=5, pin_rows=True, batch_buckets=[1, 8])
    run = spec.run_config(model, planted_tiny, 99)
    assert (run.num_pages, run.draft_tokens, run.draft_body, run.pin_rows) == (99, 5, "sharded", 1)
    assert (run.tensor_parallel, run.batch_buckets, run.dtype) == (2, (1, 8), "float32")
    assert run.max_model_len == 4096
    short = dataclasses.replace(model, max_position_embeddings=100)
    assert spec.run_config(short, planted_tiny, 9).max_model_len == 100


def test_more_context_than_the_model_has_is_an_error(planted_tiny: Path) -> None:
    model = dataclasses.replace(load_config(planted_tiny), max_position_embeddings=100)
    with pytest.raises(ConfigError, match=r"limits\.max_model_len = 101: at most 100"):
        made(max_model_len=101).run_config(model, planted_tiny, 9)


def test_drafts_without_an_mtp_layer_are_an_error(planted_tiny: Path) -> None:
    model = dataclasses.replace(load_config(planted_tiny), num_mtp_layers=0)
    with pytest.raises(ConfigError, match=r"speculation\.draft_tokens = 3: must be 0"):
        made().run_config(model, planted_tiny, 9)
    assert made(draft_tokens=0).run_config(model, planted_tiny, 9).draft_tokens == 0


def test_auto_pages_hold_every_slot_at_full_length_or_what_fits(planted_tiny: Path) -> None:
    model = load_config(planted_tiny)
    spec = made(max_model_len=1000, max_slots=4, page_tokens=16)
    pages = spec.resolve_pages(model, planted_tiny, 10**10)
    assert pages == 4 * 63 + 1  # ceil((1000 + 2 * (K + 1)) / 16) a request, and the null page
    plan = memory_plan(model, spec.run_config(model, planted_tiny, 0))
    tight = int(plan.total_bytes(100) / 0.84) + 1
    assert spec.resolve_pages(model, planted_tiny, tight) == 100
    with pytest.raises(ConfigError, match=r"max_model_len = 1000 takes .* lower"):
        spec.resolve_pages(model, planted_tiny, int(plan.total_bytes(63) / 0.84) + 1)


def test_pages_of_a_device_are_settled_by_the_rank_that_sees_it(planted_tiny: Path) -> None:
    """The engine's process may have no device: it takes what is wanted, the host plays no part."""
    model = load_config(planted_tiny)
    spec = made(device="cuda", max_model_len=200_000, max_slots=64, page_tokens=16)
    wanted = 64 * 12501 + 1  # ceil((200000 + 2 * (K + 1)) / 16) a request
    assert spec.resolve_pages(model, planted_tiny) == wanted
    plan = memory_plan(model, spec.run_config(model, planted_tiny, 0))
    room = int(plan.total_bytes(20_000) / 0.84) + 1
    assert spec.resolve_pages(model, planted_tiny, room) == 20_000
    short = int((plan.total_bytes(12_502) - 1000) / 0.84)
    with pytest.raises(ConfigError, match=r"may be used, 1,00\d too few: lower limits"):
        spec.resolve_pages(model, planted_tiny, short)
    with pytest.raises(ConfigError, match=r"num_pages = 1: at least 2"):
        made(device="cuda", num_pages=1).resolve_pages(model, planted_tiny)


def test_a_head_in_fp8_has_no_logits_to_gather() -> None:
    for key in ("greedy_probabilities", "gather_logits"):
        with pytest.raises(
            ConfigError, match=rf"ablation\.{key} = True: needs .*draft_head = model"
        ):
            made(**{f"ablation.{key}": True, "draft_head": "fp8"})
        assert getattr(made(**{f"ablation.{key}": True}).ablation, key)


def test_pages_that_were_asked_for_must_fit(planted_tiny: Path) -> None:
    model = load_config(planted_tiny)
    assert made(num_pages=7).resolve_pages(model, planted_tiny, 10**9) == 7
    with pytest.raises(ConfigError, match=r"num_pages = 1000000: only \d+ .* [\d,]+ bytes too few"):
        made(num_pages=10**6).resolve_pages(model, planted_tiny, 10**9)
    with pytest.raises(ConfigError, match=r"cache\.num_pages = 1: at least 2"):
        made(num_pages=1).resolve_pages(model, planted_tiny, 10**9)


def test_without_a_given_memory_the_ranks_share_the_free_host(
    planted_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spec_module.free_host_bytes() > 2**20
    monkeypatch.setattr(spec_module, "free_host_bytes", lambda: 10**9)
    assert made(tensor_parallel=4).page_budget() == 210_000_000


def test_open_model_checks_the_checkpoint_against_the_spec(planted_tiny: Path) -> None:
    spec = made(model=str(planted_tiny))
    assert spec.open_model() == (planted_tiny, load_config(planted_tiny))
    with pytest.raises(ConfigError, match="cannot be split over 3 ranks"):
        made(model=str(planted_tiny), tensor_parallel=3).open_model()
    with pytest.raises(ConfigError, match="no such folder"):
        made(model=str(planted_tiny / "nope")).open_model()


def test_a_tied_checkpoints_own_head_is_used_with_a_notice(tmp_path: Path) -> None:
    text = checkpoints.config(tie_word_embeddings=True)
    weights = checkpoints.random_weights(text)
    head = weights["model.embed_tokens.weight"].flip(0)
    checkpoints.write(tmp_path, text, weights | {"lm_head.weight": head})
    spec = made(model=str(tmp_path), dtype="float32")
    with pytest.warns(UserWarning, match=r"lm_head\.weight that differs .* it is used"):
        model_dir, model = spec.open_model()
    tied, untied = (
        memory_plan(one, spec.run_config(one, model_dir, 0))
        for one in (load_config(tmp_path), model)
    )
    assert "head" not in tied.parts
    assert untied.weight_bytes - tied.weight_bytes == untied.parts["head"] == head.nbytes // 2


def test_limits_hold_the_tokenizers_end(tmp_path: Path, repo: Path) -> None:
    for file in (repo / "examples" / "tiny").iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    spec = made(model=str(tmp_path))
    model_dir, model = spec.open_model()
    assert limits_of(spec, model, spec.run_config(model, model_dir, 8)).eos_ids == (0, 2)


def test_limits_hold_the_models_defaults_unless_they_are_to_be_neutral(
    tmp_path: Path, planted_tiny: Path
) -> None:
    for file in planted_tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    for word, defaults, says in (
        ("model", {"temperature": 0.6, "top_k": 20}, "temperature 0.6, top_k 20 (generation_con"),
        ("neutral", {}, "no defaults of the model (serve.generation_defaults: neutral)"),
    ):
        spec = made(model=str(tmp_path), generation_defaults=word)
        model_dir, model = spec.open_model()
        limits = limits_of(spec, model, spec.run_config(model, model_dir, 8))
        assert limits.sampling_defaults == defaults
        assert says in spec.describe_defaults(model)
    assert "generation_config.json gives none" in made().describe_defaults(
        load_config(planted_tiny)
    )


def test_nothing_warns_when_nothing_is_wrong(repo: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_spec(repo / "cluster.yaml", {"rank_cpus": ["0-1", "2-3"], "driver_cpus": 4})


def test_a_bfloat16_state_needs_a_checkpoint_that_allows_it(planted_tiny: Path) -> None:
    model = load_config(planted_tiny)
    allows = dataclasses.replace(model, gdn=dataclasses.replace(model.gdn, coarse_state=True))
    asking = made(**{"cache.state_dtype": "bfloat16"})
    assert asking.run_config(allows, planted_tiny, 9).coarse_state
    assert (
        not made(**{"cache.state_dtype": "float32"})
        .run_config(allows, planted_tiny, 9)
        .coarse_state
    )
    with pytest.raises(ConfigError, match=r"cache.state_dtype.*float32.*mamba_ssm_dtype"):
        asking.run_config(model, planted_tiny, 9)
