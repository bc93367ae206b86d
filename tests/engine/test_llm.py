"""LLM, the names that vLLM scripts use, on a tiny model in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RequestError
from octavo.grammar import Grammar

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), dtype="float32", num_threads=1, max_model_len=256)


def test_prompts_come_back_in_order_with_their_text(llm: LLM) -> None:
    prompts = ["hello world", "page cache", "the model"]
    outputs = llm.generate(prompts, PARAMS)
    assert [o.prompt for o in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].text == llm.generate(prompt, PARAMS)[0].outputs[0].text
        assert len(output.outputs[0].token_ids) == 8 and output.finished


def test_text_token_ids_and_mappings_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello world")
    want = llm.generate("hello world", PARAMS)[0].outputs[0].token_ids
    for prompt in ([ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], [{"prompt": "hello world"}]):
        assert llm.generate(prompt, PARAMS)[0].outputs[0].token_ids == want
    assert llm.generate(prompt_token_ids=[ids], sampling_params=PARAMS)[0].outputs[0].token_ids == want


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate(["hello", "hello"], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5]
    with pytest.raises(RequestError, match="2 for 1 prompts"):
        llm.generate(["hello"], params)


def test_best_of_returns_the_best_by_mean_logprob(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=2, best_of=5, max_tokens=6, ignore_eos=True)
    best = llm.generate("hello", params)[0].outputs
    every = llm.generate("hello", SamplingParams(temperature=1.0, seed=1, n=5, max_tokens=6, ignore_eos=True, logprobs=0))[
        0
    ].outputs
    ranked = sorted(every, key=lambda o: -(o.cumulative_logprob or 0.0))
    assert [o.token_ids for o in best] == [o.token_ids for o in ranked[:2]]


def test_a_conversation_and_a_list_of_them(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    one = llm.chat(talk, PARAMS)
    two = llm.chat([talk, talk], PARAMS)
    assert len(one) == 1 and len(two) == 2
    assert one[0].outputs[0].token_ids == two[1].outputs[0].token_ids


def test_a_bad_prompt_costs_nothing(llm: LLM) -> None:
    for prompts in ([[]], [[-1]], [[1, 99999]], [[9] * 300], {"text": "x"}):
        with pytest.raises(RequestError):
            llm.generate(prompts, PARAMS)
    with pytest.raises(RequestError):
        llm.generate(None, PARAMS)
    assert llm.engine.stats().running == 0
    assert llm.generate("hello", PARAMS)[0].finished


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompts": b"hello"}, "prompt: must be text, token ids or a mapping, got bytes"),
        ({"prompts": 5}, "prompt: must be text, token ids or a mapping, got int"),
        ({"prompts": ["hello", None]}, "prompt: must be text, token ids or a mapping, got NoneType"),
        (
            {"prompts": "hello", "sampling_params": "greedy"},
            "sampling_params: must be SamplingParams or a list of them, got 'greedy'",
        ),
        ({"prompts": "hello", "sampling_params": [None]}, r"sampling_params: must be SamplingParams .*got \[None\]"),
        ({"prompts": "hello", "priority": [1, 2]}, "priority: 2 for 1 prompts"),
        ({"prompts": "hello", "priority": [1]}, r"priority: this engine runs first come, first served.*got \[1\]"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_name(llm: LLM, call: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(**call)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_stop_that_is_no_list_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: must be a list, got 5"):
        SamplingParams(**{name: 5})


def test_priorities_are_taken_where_the_policy_honours_them(tiny: Path) -> None:
    engine = LLM(str(tiny), dtype="float32", num_threads=1, max_model_len=64, max_num_seqs=1, scheduling_policy="priority")
    assert [len(o.outputs[0].token_ids) for o in engine.generate(["a", "b"], PARAMS, priority=[1, 0])] == [8, 8]


def test_a_wrong_option_is_named_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"max_modellen: unknown option.*max_model_len"):
        LLM("demo", max_modellen=3)
    with pytest.raises(TypeError, match="max_tokenz"):
        SamplingParams(max_tokenz=3)  # type: ignore[call-arg]


def test_another_models_tokenizer_is_refused_before_anything_is_built(tiny: Path, demo_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer demo: the tokenizer has 49152 tokens and the model's vocabulary 512"):
        LLM(str(tiny), tokenizer="demo", num_threads=1)


def test_an_answer_may_have_a_form_and_a_form_that_is_none_is_named(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0, max_tokens=20, grammar=Grammar.choice(["the model", "the page"]))
    assert llm.generate("hello", params)[0].outputs[0].text in ("the model", "the page")
    with pytest.raises(RequestError, match="unclosed group") as caught:
        llm.generate("hello", SamplingParams(grammar=Grammar.regex("(")))
    assert (caught.value.param, caught.value.code) == ("grammar", "invalid_grammar")


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_tools_are_shown_by_the_template_or_refused(llm: LLM, tiny: Path) -> None:
    asked = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError, match="no place for them"):
        llm.chat(asked, PARAMS, tools=TOOLS)
    template = Path(__file__).parents[2] / "examples" / "chatml_tools.jinja"
    other = LLM(str(tiny), dtype="float32", num_threads=1, max_model_len=512, chat_template=str(template))
    (shown,), (plain,) = other.chat(asked, PARAMS, tools=TOOLS), other.chat(asked, PARAMS)
    prompt = other.tokenizer.decode(shown.prompt_token_ids)
    assert '"name": "look"' in prompt and len(shown.prompt_token_ids) > len(plain.prompt_token_ids)
