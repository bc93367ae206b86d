"""AsyncLLM: text in, text out, over engines in processes of their own. What the HTTP server uses.

Owns the names of several models: those that are added are AsyncLLMs of their own, in a ModelTable; what one
engine does is OneModel's. Never imports torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.client import STOP_SECONDS
from octavo.engine.liveness import PATIENCE
from octavo.engine.one_model import OneModel
from octavo.engine.streams import Prompt
from octavo.errors import ConfigError
from octavo.model.source import ModelSource
from octavo.request import SamplingParams
from octavo.text.output import RequestOutput

if TYPE_CHECKING:
    from octavo.engine.models import ModelTable


class AsyncLLM(OneModel):
    """Made by `await AsyncLLM.start(config)`; one event loop only."""

    def __init__(
        self, config: EngineConfig, source: ModelSource, *, relay_log: bool = False, patience: float | None = PATIENCE
    ) -> None:
        super().__init__(config, source, relay_log=relay_log, patience=patience)
        self._table: ModelTable | None = None  # once a second model has been added

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        tenant: str = "",
        domain: str = "",
        deadline: float | None = None,
        weight: float = 1.0,
        delta: bool = False,
        model: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt (text, token ids, or {"prompt_token_ids": [...]}) as they come.

        Without `delta` each item holds everything so far; with it, only what is new. Items that pile
        up while the consumer is slow arrive merged. Raises RequestError before anything is allocated,
        and AdmissionRefused or EngineDead, all from the first item on. Closing the iterator aborts
        the request. `request_id` is only echoed: two live requests may share one. `model` is a name
        given to add_model, or an alias; None is the default model.
        """
        options: dict[str, Any] = {"priority": priority, "tenant": tenant, "domain": domain, "deadline": deadline}
        options |= {"weight": weight, "delta": delta}
        if self._table is None:
            if model not in (None, self.config.model):
                raise ConfigError(f"model {model!r}: there is only {self.config.model!r}; add_model adds another")
            return self._generate(prompt, params, request_id, **options)
        return self._generate_by(self._table, model, prompt, params, request_id, **options)

    async def _generate_by(
        self, table: ModelTable, model: str | None, *request: Any, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        with table.lease(model) as lease:
            outputs = lease.llm._generate(*request, **options)
            try:
                async for output in outputs:
                    yield output
            finally:
                await outputs.aclose()

    async def add_model(self, name: str, model: str, **settings: Any) -> None:
        """Start another engine beside this one and let it answer to `name`; requests go on meanwhile.

        `settings` are fields of EngineConfig; device, scheduler and plugin settings of this engine are
        taken over where they are not given. Raises what `start` raises, and then nothing has changed.
        """
        from octavo.engine.models import ModelTable, beside

        if self._table is None:
            self._table = ModelTable()
            self._table.adopt(self.config.model, self)
        await self._table.add(name, beside(self.config, model, settings))

    def set_default_model(self, name: str) -> None:
        """Requests that name no model go to `name` from now on; running ones finish where they are."""
        self._models().set_default(name)

    async def remove_model(self, name: str, *, timeout: float = 30.0) -> None:
        """Take no new requests for `name`, let running ones finish for `timeout` seconds, end its engine."""
        await self._models().remove(name, timeout)

    @property
    def models(self) -> list[str]:
        """The names that `generate` takes."""
        return [self.config.model] if self._table is None else self._table.names

    def _models(self) -> ModelTable:
        if self._table is None:
            raise ConfigError(f"there is only {self.config.model!r}; add_model adds another")
        return self._table

    async def close(self, *, grace: float = STOP_SECONDS) -> None:
        """End the engine's process, which has `grace` seconds to leave by itself, and those of added models.
        Live requests raise EngineDead."""
        table, self._table = self._table, None
        if table is not None:
            await table.close(grace)
        await self.end(grace=grace)
