"""LLM: an engine in the caller's own process, for scripts. The names are those of vLLM's LLM."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from octavo.cache.prefix import PUBLIC
from octavo.config import EngineConfig
from octavo.engine.build import build_from_plan
from octavo.engine.plan import plan_engine
from octavo.engine.prefixes import Prefix, read_prefixes
from octavo.engine.streams import Prompt, prompt_parts
from octavo.errors import AdmissionRefused, ConfigError, OctavoError, RequestError
from octavo.plugins import discover
from octavo.request import Request, SamplingParams, check_request
from octavo.text.chat import Messages, render_chat, takes_tools
from octavo.text.output import OutputProcessor, RequestOutput
from octavo.text.tokenizer import Tokenizer, place_of
from octavo.wording import complaints


class LLM:
    """LLM("demo").generate("Hello") -> list of RequestOutput, in the order of the prompts.

    Keyword arguments are the fields of EngineConfig; ConfigError names one that is wrong. One thread at a time. The queue is unbounded:
    whoever hands over a list of prompts wants all of them.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        try:
            config = EngineConfig(model=model, **{"max_num_queued_reqs": 0, **options})
        except ValidationError as error:
            raise ConfigError(complaints("LLM.", EngineConfig, error, engine=True)) from error
        prefixes = read_prefixes(config.warm_prefixes) if config.warm_prefixes else []
        plan = plan_engine(config, discover(config.plugins))
        self.config = config
        self.tokenizer = Tokenizer.from_source(plan.source, config)
        self.tokenizer.check_fits(plan.facts.vocab_size, place_of(config, plan.source))
        self.engine = build_from_plan(plan)
        self._processor = OutputProcessor(self.tokenizer)
        self._ids = itertools.count()
        if prefixes:
            self._warm(prefixes)

    def get_tokenizer(self) -> Tokenizer:
        """vLLM's name for `tokenizer`."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text, token ids, or {"prompt_token_ids": [...]}).

        Every prompt is checked before any of them runs: RequestError names the first bad one's field.
        sampling_params: one for all, or one for each. priority: one for each, lower runs first; for scheduling_policy="priority".
        """
        batch = _as_list(prompts) if prompt_token_ids is None else list(prompt_token_ids)
        params = _per_prompt(sampling_params, len(batch))
        ranks = self._priorities(priority, len(batch))
        requests = [self._request(p, s, rank) for p, s, rank in zip(batch, params, ranks, strict=True)]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template, which shows `tools` (as OpenAI spells them)
        to the model. RequestError where it has no place for them."""
        if tools and not takes_tools(self.tokenizer):
            raise RequestError("tools: this model's chat template has no place for them", param="tools", code="unsupported")
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            render_chat(self.tokenizer, m, add_generation_prompt=add_generation_prompt, tools=tools)  # type: ignore[arg-type]
            for m in many
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _priorities(self, given: Sequence[int] | None, count: int) -> list[int]:
        if given is None:
            return [0] * count
        wrong = ""
        if len(given) != count:
            wrong = f"{len(given)} for {count} prompts; give one for each"
        elif any(given) and self.config.scheduling_policy != "priority":
            wrong = f'this engine runs first come, first served: scheduling_policy="priority" honours them, got {list(given)}'
        if wrong:
            raise RequestError(f"priority: {wrong}", param="priority", code="invalid_value")
        return list(given)

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> tuple[str | None, Request]:
        text, ids = prompt_parts(prompt)
        if ids is None:
            ids = self.tokenizer.encode(text or "")
        params = check_request(ids, params, self.engine.info)
        eos = self.engine.info.eos_token_ids
        return text, Request(id=f"r{next(self._ids)}", prompt=ids, params=params, eos_token_ids=eos, priority=priority)

    def _warm(self, prefixes: Sequence[Prefix]) -> None:
        """Compute each prefix once, and pin those that say so."""
        params, pinned = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), []
        requests: list[tuple[str | None, Request]] = []
        for prefix in prefixes:
            if prefix.messages is not None:
                ids = render_chat(self.tokenizer, list(prefix.messages), add_generation_prompt=False)
            else:
                ids = self.tokenizer.encode(prefix.prompt or "")
            check_request(ids, params, self.engine.info, param="warm_prefixes")
            requests.append((None, Request(id=f"r{next(self._ids)}", prompt=ids, params=params, domain=PUBLIC)))
            pinned += [ids] * prefix.pin
        self._run(requests, False)
        for ids in pinned:
            self.engine.prefixes.pin(ids)

    def _run(self, requests: list[tuple[str | None, Request]], show: bool) -> list[RequestOutput]:
        """Step until all are finished. Whatever interrupts it, no request is left behind."""
        final: dict[str, RequestOutput] = {}
        try:
            for text, request in requests:
                try:
                    self.engine.add(request)
                except AdmissionRefused as refusal:
                    param = "grammar" if refusal.code == "invalid_grammar" else "max_tokens"
                    raise RequestError(refusal.message, param=param, code=refusal.code) from refusal
                self._processor.add(request, text, final_only=True)
            with _progress(len(requests), show) as advance:
                while self.engine.busy:
                    outputs, aborts = self._processor.process(self.engine.step().events)
                    for output in outputs:
                        if output.error:
                            raise OctavoError(f"request {output.request_id} failed: {output.error}")
                        if output.finished:
                            final[output.request_id] = output
                            advance()
                    for request_id, sample in aborts:
                        self.engine.abort(request_id, sample)
        finally:
            for _, request in requests:
                if request.id not in final:
                    self.engine.abort(request.id)
                self._processor.remove(request.id)
        return [final[request.id] for _, request in requests]


def _as_list(prompts: Prompt | Sequence[Prompt] | None) -> list[Prompt]:
    """One prompt or many: a string, a mapping or a list of ints is one."""
    if prompts is None:
        raise RequestError("prompts: give a prompt or a list of them", param="prompts", code="invalid_value")
    if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # what is none of these is refused as a prompt
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            f"sampling_params: must be SamplingParams or a list of them, got {params!r:.80}",
            param="sampling_params",
            code="invalid_value",
        )
    if len(params) != count:
        raise RequestError(
            f"sampling_params: {len(params)} for {count} prompts; give one, or one for each",
            param="sampling_params",
            code="invalid_value",
        )
    return list(params)


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error when asked for; yields what to call per finished prompt."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
