"""`flashqsa doctor`: it tells the truth about this installation, and finds what is made wrong on purpose."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashqsa
from flashqsa.cache import CacheLayout
from flashqsa.commands import doctor as doctor_command
from flashqsa.commands import doctor_parts, doctor_trial, doctor_vllm
from flashqsa.commands.app import main
from flashqsa.commands.doctor import RELEASED, DoctorOptions, diagnose
from flashqsa.commands.doctor_backends import backend_findings, taken_backend
from flashqsa.commands.doctor_checkpoint import read_weights
from flashqsa.config import QSAConfig
from flashqsa.errors import UnsupportedError
from flashqsa.integrations.vllm_plugin.seams import CPU as CPU_NAMES
from flashqsa.integrations.vllm_plugin.seams import FORWARDS, OPERATORS, STREAMS, Seam

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.transformers

Changed = Callable[[Callable[[Path], Any]], Path]
EditWeights = Callable[[Callable[[dict[str, torch.Tensor]], Any]], Callable[[Path], None]]
Capture = pytest.CaptureFixture[str]
Refuse = Callable[..., Any]

PART = {"name": str, "version": (str, None), "least": (str, None), "serves": str, "state": str}
SEAM = {"engine": str, "version": (str, None), "fits": (bool, None), "told": str}
DEVICE = {
    "name": str,
    "told": str,
    "capability": (str, None),
    "free_bytes": int,
    "total_bytes": int,
    "kernels": (str, None),
}
SHAPES = (
    "q_heads", "kv_heads", "head_dim", "index_heads", "index_head_dim", "block_tokens", "budget_tokens", "max_positions"
)  # fmt: skip
LINES = {"torch": str, "triton": str, "reference": str}
COST = {
    "kv_dtype": str,
    "index_dtype": str,
    "token_bytes": float,
    "request_bytes": int,
    "tokens_that_fit": (int, None),
    "longest_context": (int, None),
}
FORM = {
    "versions": {"flashqsa": str, "python": str},
    "packages": [PART],
    "seams": [SEAM],
    "devices": [DEVICE],
    "checkpoint": (str, None),
    "shapes": dict.fromkeys(SHAPES, int) | {"qsa_layer_ids": [int]},
    "device": str,
    "dtype": str,
    "stages": {"prepare": LINES, "select_blocks": LINES, "attend": LINES},
    "trials": [{"stage": str, "backend": str, "works": bool, "told": str}],
    "page_tokens": int,
    "memory_bytes": int,
    "weight_bytes": (int, None),
    "caches": [COST],
    "findings": [{"problem": bool, "about": str, "told": str, "remedy": str}],
    "problems": int,
}


def _json(capfd: Capture, *words: Any, code: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["doctor", *map(str, words), "--json"]) == code
    captured = capfd.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    return result


def test_doctor_of_a_checkpoint_in_json(
    small_checkpoint: Path, capfd: Capture, assert_form: Callable[[Any, Any], None]
) -> None:
    result = _json(capfd, small_checkpoint, "--device", "cpu", "--memory-gib", 1, "--page-tokens", 16)
    assert_form(result, FORM)
    assert result["versions"]["flashqsa"] == flashqsa.__version__
    versions = {part["name"]: part for part in result["packages"]}
    assert versions["torch"]["version"] == torch.__version__
    assert versions["transformers"] == {
        "name": "transformers",
        "version": transformers.__version__,
        "least": "5.16.1",
        "serves": "the drop-in; generate, inspect, needle",
        "state": "ok",
    }
    assert result["seams"][0]["fits"] is True
    assert (result["device"], result["dtype"], result["problems"]) == ("cpu", "float32", 0)
    assert result["shapes"]["qsa_layer_ids"] == [3]
    assert result["stages"] == flashqsa.explain("cpu")
    assert all(trial["works"] for trial in result["trials"])
    assert [trial["backend"] for trial in result["trials"]] == ["torch"] * 3
    model = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint)
    assert result["weight_bytes"] == sum(p.numel() * 4 for p in model.state_dict().values() if p.is_floating_point())
    plain, index, both = result["caches"]
    # one layer: K and V of 2 heads of 64, a block key of 32 for 4 tokens; a ring of 4 keys of 32 and 3 positions each
    assert plain["token_bytes"] == 2 * 2 * 64 * 4 + 32 * 4 / 4
    assert index["token_bytes"] == 2 * 2 * 64 * 4 + 32 / 4
    assert both["token_bytes"] == 2 * 2 * 64 + 32 / 4
    assert {cost["request_bytes"] for cost in result["caches"]} == {4 * (32 * 4 + 3 * 8)}
    left = 2**30 - result["weight_bytes"] - plain["request_bytes"]
    assert plain["tokens_that_fit"] == left // (16 * int(plain["token_bytes"])) * 16
    assert plain["longest_context"] == min(262_144, plain["tokens_that_fit"])


def test_doctor_of_the_released_shapes_for_people(capfd: Capture) -> None:
    assert main(["doctor", "--device", "cpu", "--memory-gib", "0.5"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    for part in ("packages", "engines", "devices", "stages: the released shapes, bfloat16 on cpu", "caches",
                 "no: kernels run on CUDA devices",
                 "12 QSA layers", "without weights, which are not known", "25,344", "0 problems"):  # fmt: skip
        assert part in captured.out, part
    assert captured.out.count("works") == 3


def test_the_documentation_names_all_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("## flashqsa doctor")[2].partition("\n## ")[0]
    for name in {*FORM, *PART, *SEAM, *DEVICE, *COST, "works", "about", "remedy"}:
        assert f"`{name}`" in section, name


def test_doctor_counts_with_the_dtype_asked_for(small_checkpoint: Path, capfd: Capture) -> None:
    options = (small_checkpoint, "--device", "cpu", "--memory-gib", 1)
    wide, narrow = (_json(capfd, *options, "--dtype", dtype) for dtype in ("float32", "bfloat16"))
    assert narrow["weight_bytes"] * 2 == wide["weight_bytes"]
    assert narrow["caches"][0]["token_bytes"] * 2 == wide["caches"][0]["token_bytes"]
    assert narrow["trials"][0]["works"]


def test_doctor_tells_weights_that_do_not_fit(small_checkpoint: Path, capfd: Capture) -> None:
    result = _json(capfd, small_checkpoint, "--device", "cpu", "--memory-gib", 0.001, code=4)
    (problem,) = (finding for finding in result["findings"] if finding["problem"])
    assert problem["about"] == "memory"
    assert result["caches"][0]["tokens_that_fit"] == 0
    assert result["findings"][0] == problem, "problems come first"


def test_fault_55_doctor_misses_the_weights_of_an_indexer(
    changed: Changed, edit_weights: EditWeights, capfd: Capture
) -> None:
    lost = "model.layers.3.self_attn.indexer.k_layernorm.weight"
    path = changed(edit_weights(lambda tensors: tensors.pop(lost)))
    result = _json(capfd, path, "--device", "cpu", code=4)
    (problem,) = (finding for finding in result["findings"] if finding["problem"])
    assert "layer 3: k_layernorm" in problem["told"]
    assert main(["doctor", str(path), "--device", "cpu"]) == 4
    out = capfd.readouterr().out
    assert out.rstrip().endswith("1 problem")
    assert "problem: " in out


def test_doctor_misses_weights_altogether(changed: Changed, capfd: Capture) -> None:
    path = changed(lambda folder: (folder / "model.safetensors").unlink())
    result = _json(capfd, path, "--device", "cpu", code=4)
    assert result["weight_bytes"] is None
    assert result["findings"][0]["told"] == "holds no safetensors file"


def test_weights_keep_the_size_of_what_is_quantised(
    changed: Changed, edit_weights: EditWeights, small_checkpoint: Path
) -> None:
    config = QSAConfig.from_checkpoint(small_checkpoint)
    whole = read_weights(small_checkpoint, config)
    assert whole is not None
    path = changed(
        edit_weights(
            lambda tensors: tensors.update({"q": torch.zeros(100, dtype=torch.int8), "b": torch.zeros(7).bool()})
        )
    )
    more = read_weights(path, config)
    assert more is not None
    assert more.other_bytes == whole.other_bytes + 107
    for dtype in (torch.float32, torch.bfloat16):
        assert more.loaded_bytes(dtype) - whole.loaded_bytes(dtype) == 107


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no/such/folder"], "must hold a config.json"),
        (["--dtype", "int4"], "dtype must be among auto, float32, bfloat16, float16, got int4"),
        (["--device", "abacus"], "device must be auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "device must be there, got cuda:99"),
        (["--page-tokens", "6"], "page_tokens must be a multiple of block_tokens"),
        (["--memory-gib", "-1"], "memory-gib must be a number above 0"),
        (["--memory-gib", "nan"], "memory-gib must be a number above 0"),
        (["--memory-gib", "1e300"], "memory-gib must be a number above 0 and at most 1,000,000,000"),
        (["--memory-gib", "much"], "Invalid value for '--memory-gib'"),
    ],
)
def test_doctor_tells_a_bad_option_in_one_line(words: list[str], told: str, capfd: Capture) -> None:
    assert main(["doctor", *words]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:100_000]), "bytes of tensors"),
        (lambda file: file.write_bytes(b"\xff" * 64), "header is too long"),
        (lambda file: file.write_bytes((3).to_bytes(8, "little") + b"[1]"), "safetensors"),
        (lambda file: file.write_bytes(b""), "safetensors"),
        (lambda file: (file.parent / "config.json").write_text("{"), "must be JSON"),
    ],
)
def test_doctor_tells_a_damaged_checkpoint_in_one_line(
    damage: Callable[[Path], Any], told: str, changed: Changed, capfd: Capture
) -> None:
    path = changed(lambda folder: damage(folder / "model.safetensors"))
    assert main(["doctor", str(path), "--device", "cpu"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert told in line


@pytest.mark.parametrize("at", ["look_at_devices", "try_stages", "print_diagnosis"])
def test_doctor_interrupted_is_one_line(at: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, at, lambda *args: signal.raise_signal(signal.SIGINT))
    assert main(["doctor", "--device", "cpu"]) == 130
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == "flashqsa: interrupted"


def test_parts_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.9.1+cu130", "transformers": "5.16.0", "triton": None, "vllm": "0.30.9", "safetensors": None}
    versions["tokenizers"] = "of unknown version"
    monkeypatch.setattr(doctor_parts, "_version", lambda name: versions.get(name, "99.0"))
    parts = doctor_parts.look_at_parts()
    states = {part.name: part.state for part in parts}
    assert states == {
        "torch": "too old",
        "triton": "missing",
        "transformers": "too old",
        "safetensors": "missing",
        "tokenizers": "ok",
        "matplotlib": "ok",
        "vllm": "too old",
    }
    findings = {finding.about: finding for finding in doctor_parts.part_findings(parts)}
    assert set(findings) >= {"torch", "transformers", "vllm", "safetensors"}
    assert "triton" not in findings, "it is needed on a GPU alone, where its stages say so"
    assert findings["transformers"].remedy == "pip install 'transformers>=5.16.1'"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.16.1", (5, 16, 1)), ("2.11.0.dev20260101", (2, 11, 0)), ("of unknown", ())],
)
def test_version_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert doctor_parts.version_numbers(version) == numbers


def test_a_cpu_build_of_torch_beside_an_nvidia_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(doctor_parts, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor_parts.part_findings(()) == []
    driver.write_text("NVRM version: 1")
    (finding,) = doctor_parts.part_findings(())
    assert "a build without CUDA" in finding.told


def test_a_transformers_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashqsa.integrations import hf

    def refuse(model: Any) -> None:
        raise UnsupportedError("enable: Qwen4ExpTextAttention must have o_proj, got a version without. Use another.")

    monkeypatch.setattr(hf, "qsa_layers", refuse)
    seams = doctor_parts.look_at_seams(doctor_parts.look_at_parts())
    assert seams[0].fits is False
    (finding,) = doctor_parts.seam_findings(seams)
    assert "o_proj" in finding.told


def _vllm_source(root: Path, seams: Iterable[Seam]) -> Path:
    """Modules with just these names: functions, and methods of classes."""
    bodies: dict[str, list[str]] = {}
    for seam in seams:
        *classes, name = seam.name.split(".")
        line = f"def {name}({', '.join(seam.arguments)}): pass"
        bodies.setdefault(seam.module, []).append(f"class {classes[0]}:\n    {line}" if classes else line)
    for module, lines in bodies.items():
        file = root / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines))
    return root


@pytest.fixture
def known_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Source with every name that the plugin knows, and nothing chosen."""
    monkeypatch.delenv("FLASHQSA_VLLM", raising=False)
    monkeypatch.setattr(doctor_vllm, "_installed", lambda name: False)
    return _vllm_source(tmp_path, (*OPERATORS, *FORWARDS, *CPU_NAMES, *STREAMS))


@pytest.mark.parametrize(
    ("version", "chosen", "fits", "told"),
    [
        ("0.33.0", None, True, "has all 9 names; mode off (FLASHQSA_VLLM is not set)"),
        ("0.33.0", "full", True, "has all 9 names; mode full (FLASHQSA_VLLM is full)"),
        ("0.33.0", "shadow:4", True, "has all 7 names; mode shadow"),
        ("0.32.0+cpu", None, True, "has all 17 names; mode full (FLASHQSA_VLLM is not set)"),
        ("0.32.0+cpu", "shadow", False, "the CPU build has no operators for mode shadow: the plugin leaves"),
        ("0.31.0", "ops", True, "has all 6 names; mode ops"),
        ("0.31.0", "full", False, "version 0.31.0 has no forwards for mode full, while mode ops serves it"),
        ("0.31.0+cpu", None, False, "version 0.31.0+cpu is not known as a CPU build"),
        ("0.99.1", None, False, "version 0.99.1 is not known: the plugin leaves it untouched"),
        ("0.33.0", "fast", False, "FLASHQSA_VLLM must be one of off, ops, full, shadow or shadow:N, got 'fast'"),
    ],
)
def test_vllm_against_the_seams(
    version: str, chosen: str | None, fits: bool, told: str, known_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen is not None:
        monkeypatch.setenv("FLASHQSA_VLLM", chosen)
    found = doctor_vllm.vllm_fits(version, known_vllm)
    assert found[0] is fits
    assert told in found[1]


def test_vllm_with_other_names_does_not_fit(known_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = known_vllm / "vllm/models/qwen4_exp/nvidia/ops/qsa.py"
    whole = file.read_text()
    file.write_text(whole.replace("slot_mapping, rows", "slots, rows").replace("def qsa_sparse", "def sparse"))
    for chosen, more in (("off", " (and 1 more)"), ("full", " (and 1 more)"), ("ops", " (and 1 more)")):
        monkeypatch.setenv("FLASHQSA_VLLM", chosen)
        told = f"vllm.models.qwen4_exp.nvidia.ops.qsa.qsa_sparse_paged_attention is missing{more}: the plugin leaves it"
        assert doctor_vllm.vllm_fits("0.33.0", known_vllm) == (False, f"{told} untouched")
    elsewhere = file.with_name("elsewhere.py")
    elsewhere.write_text(whole)
    file.write_text("from .elsewhere import (qsa_compress_groups_with_ratio, qsa_sparse_paged_attention,\n"
                    "    qsa_store_cache_rows)\n")  # fmt: skip
    assert doctor_vllm.vllm_fits("0.33.0", known_vllm)[0], "looked up where it is defined"
    file.write_text("(")
    assert not doctor_vllm.vllm_fits("0.33.0", known_vllm)[0]


def test_a_vllm_that_does_not_fit_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor_parts, "_version", lambda name: "0.33.0" if name == "vllm" else None)
    monkeypatch.delenv("FLASHQSA_VLLM", raising=False)
    seams = doctor_parts.look_at_seams(doctor_parts.look_at_parts())
    assert (seams[1].version, seams[1].fits) == ("0.33.0", False)
    (finding,) = doctor_parts.seam_findings(seams)
    assert finding.problem
    assert "qsa_prepare is missing (and 8 more)" in finding.told
    assert "a vLLM of 0.31, 0.32, 0.33" in finding.remedy


def test_backends_that_are_refused_on_a_gpu() -> None:
    """Lines as `explain_stages` makes them where kernels refuse one stage."""
    stages = {stage: {"torch": "refused by auto: kernels are faster", "triton": "taken"} for stage in ("a", "b")}
    device = torch.device("cuda", 0)
    assert backend_findings(stages, device) == []
    stages["b"] = {"torch": "taken: plain torch serves every device", "triton": "refused: head_dim is 512, above 256"}
    assert [taken_backend(lines) for lines in stages.values()] == ["triton", "torch"]
    (finding,) = backend_findings(stages, device)
    assert finding.problem
    assert "head_dim is 512" in finding.told
    stages["b"]["triton"] = "refused: triton is not installed"
    assert backend_findings(stages, device)[0].remedy == "pip install triton"


def _trials(monkeypatch: pytest.MonkeyPatch, name: str, replacement: Any) -> dict[str, doctor_trial.Trial]:
    config = replace(RELEASED, budget_tokens=32, head_dim=64, q_heads=4, index_head_dim=64)
    layout = CacheLayout.from_config(config, page_tokens=16, dtype=torch.float32)
    monkeypatch.setattr(doctor_trial, name, replacement)
    cpu = torch.device("cpu")
    trials = doctor_trial.try_stages(config, layout, torch.float32, cpu, flashqsa.explain(cpu))
    return {trial.stage: trial for trial in trials}


def _wrong(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Any], Any]) -> dict[str, doctor_trial.Trial]:
    right = getattr(doctor_trial, name)

    def call(*args: Any, backend: str, **kwargs: Any) -> Any:
        made = right(*args, backend=backend, **kwargs)
        if backend == "torch":
            spoil(made)
        return made

    return _trials(monkeypatch, name, call)


@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("prepare", lambda made: made.index_q.mul_(1.001), "index_q differ from the definition by"),
        ("select_blocks", lambda made: made.block_ids[1].add_(1), "1 of 4 rows select other blocks"),
        ("attend", lambda made: made[2].add_(1e-4), "the output differ from the definition by"),
        ("attend", lambda made: made[2].fill_(torch.nan), "the output differ from the definition by nan"),
    ],
)
def test_trials_find_a_stage_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Any], Any], told: str
) -> None:
    trials = _wrong(monkeypatch, name, spoil)
    assert {stage for stage, trial in trials.items() if not trial.works} == {name}
    assert told in trials[name].told
    (finding,) = doctor_trial.trial_findings(tuple(trials.values()))
    assert finding.about == f"{name} on backend torch"


def test_trials_tell_a_stage_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError(2, "no compiler", "cc")

    trials = _trials(monkeypatch, "attend", fail)
    assert not trials["attend"].works
    assert trials["attend"].told.startswith("FileNotFoundError: ")


def test_a_budget_of_one_block_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashqsa.commands import doctor

    monkeypatch.setattr(doctor, "RELEASED", replace(RELEASED, budget_tokens=4, qsa_layer_ids=()))
    result = diagnose(None, DoctorOptions(device="cpu", page_tokens=4))
    assert all(trial.works for trial in result.trials)
    assert result.costs[0].tokens_that_fit is None, "without QSA layers nothing grows"


@pytest.mark.gpu
def test_doctor_takes_kernels_that_work_on_a_gpu(capfd: Capture, small_checkpoint: Path) -> None:
    for words in ((), (str(small_checkpoint),)):
        result = _json(capfd, *words, "--device", "cuda:0")
        assert [trial["backend"] for trial in result["trials"]] == ["triton"] * 3
        assert all(trial["works"] for trial in result["trials"]), result["trials"]
        assert result["devices"][1]["kernels"] is None
