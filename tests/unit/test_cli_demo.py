"""The first things that a newcomer types, on the real model: they print what the README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def octavo(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words], input=stdin, capture_output=True, text=True, timeout=120, env=env
    )


@pytest.mark.usefixtures("demo_path")
class TestOnTheDemoModel:
    def test_generate_prints_the_answer_alone_on_stdout(self) -> None:
        done = octavo("generate", "demo", QUESTION, "--temperature", "0", "--max-tokens", "16")
        assert (done.returncode, done.stdout) == (0, ANSWER + "\n"), done.stderr

    def test_chat_answers_line_by_line_until_the_input_ends(self) -> None:
        done = octavo("chat", "demo", "--temperature", "0", "--max-tokens", "16", stdin=f"{QUESTION}\n/new\n{QUESTION}\n/what\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [ANSWER, ANSWER]
        assert "no command '/what'" in done.stderr

    def test_the_python_example_of_the_readme_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        block = next(
            b for b in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S) if "LLM(" in b
        )
        exec(compile(block, "README.md", "exec"), {})
        assert capsys.readouterr().out.splitlines()[-1] == ANSWER


@pytest.mark.usefixtures("tiny")
class TestOnATinyModel:
    def test_json_has_text_ids_and_counts(self, tiny: Path) -> None:
        words = (
            "generate",
            str(tiny),
            "hello",
            "--raw",
            "--json",
            "--n",
            "2",
            "--max-tokens",
            "3",
            "--ignore-eos",
            "--dtype",
            "float32",
        )
        done = octavo(*words)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert [o["index"] for o in found["outputs"]] == [0, 1]
        assert found["usage"]["completion_tokens"] == sum(len(o["token_ids"]) for o in found["outputs"]) == 6

    def test_log_probabilities_stand_in_the_json_and_nowhere_else(self, tiny: Path) -> None:
        words = (
            "generate",
            str(tiny),
            "hello",
            "--raw",
            "--max-tokens",
            "2",
            "--ignore-eos",
            "--logprobs",
            "2",
            "--prompt-logprobs",
            "1",
        )
        found = json.loads(octavo(*words, "--json").stdout)
        sample = found["outputs"][0]
        assert [token[0]["token_id"] for token in sample["logprobs"]] == sample["token_ids"]
        assert all(len(token) in (2, 3) and token[0]["logprob"] <= 0 for token in sample["logprobs"])
        assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"] and found["prompt_logprobs"][0] is None
        refused = octavo(*words)
        assert refused.returncode == 2 and "--logprobs: its values are printed with --json alone" in refused.stderr

    @pytest.mark.parametrize("words", [(), ("--json",), ("--n", "2")])
    def test_a_terminal_without_the_characters_gets_question_marks(
        self, tiny: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
        done = octavo("generate", str(tiny), "hello", "--raw", "--max-tokens", "40", "--ignore-eos", "--seed", "1", *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        text = json.loads(done.stdout)["outputs"][0]["text"] if words == ("--json",) else done.stdout
        assert ("\ufffd" if words == ("--json",) else "?") in text

    @pytest.mark.parametrize(
        ("errors", "said"),
        [("surrogateescape", b"PROMPT: is not text in utf-8: 'a\\udcff'"), ("strict", b"not text in utf-8: invalid")],
    )
    def test_bytes_that_are_no_text_are_refused(
        self, tiny: Path, errors: str, said: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONIOENCODING", f"utf-8:{errors}")
        command = [sys.executable, "-m", "octavo", "generate", str(tiny), "-"]
        done = subprocess.run(command, input=b"a\xff", capture_output=True, timeout=60)
        assert done.returncode == 2 and said in done.stderr

    def test_a_prompt_from_standard_input(self, tiny: Path) -> None:
        words = ("generate", str(tiny), "-", "--raw", "--temperature", "0", "--max-tokens", "3", "--json")
        piped, typed = octavo(*words, stdin="hello"), octavo(*(w if w != "-" else "hello" for w in words))
        assert piped.returncode == typed.returncode == 0
        assert piped.stdout == typed.stdout

    def test_a_prompt_that_cannot_fit_is_one_line_and_exit_1(self, tiny: Path) -> None:
        done = octavo("generate", str(tiny), "hello " * 50, "--raw", "--max-model-len", "16")
        assert done.returncode == 1
        assert "maximum context length is 16" in done.stderr and "Traceback" not in done.stderr

    @pytest.mark.parametrize("more", [(), ("--json",)])
    def test_logits_that_are_not_finite_are_an_error(self, tmp_path: Path, more: tuple[str, ...]) -> None:
        tiny_llama(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        weights["model.norm.weight"].fill_(float("nan"))
        save_file(weights, tmp_path / "model.safetensors")
        done = octavo("generate", str(tmp_path), "hello", "--raw", "--max-tokens", "3", *more)
        assert done.returncode == 1
        assert "octavo: error: the answer failed: " in done.stderr and "finite" in done.stderr and "Traceback" not in done.stderr

    def test_a_model_that_is_not_there_is_one_line_without_a_traceback(self) -> None:
        done = octavo("generate", "/nowhere/model", "hello")
        assert done.returncode in (1, 2)
        assert "/nowhere/model" in done.stderr and "Traceback" not in done.stderr
