"""POST /v1/completions and /v1/chat/completions: body in, generating response out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from common.errors import BatonError, invalid
from router.gateway.formats import AnswerFormat, ChatFormat, CompletionFormat, EchoedPrompt, Envelope
from router.gateway.group import GenerationGroup
from router.gateway.http_request import max_body_bytes, read_body, request_id_of, tenant_of, timeouts_of, trace_of
from router.gateway.openai_models import MAX_PROMPTS, ChatBody, CompletionBody, GenerationBody, parse_body
from router.gateway.prompts import Asked, Prompt, TextPrompt
from router.gateway.responses import EventStream, WholeAnswer
from router.gateway.state import GatewayState
from router.gateway.validation import check_choices, check_model, prepare
from router.spec import GenerationSpec
from router.tenancy.tenant import Tenant

# OpenAI's default for completions; a chat answer may go up to the context.
COMPLETION_MAX_TOKENS: Final = 16


class OpenAiEndpoints:
    """Stateless but for the gateway's parts. Everything here raises BatonError for the HTTP layer to write."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._max_body_bytes = max_body_bytes(state.model.max_prompt_chars, state.model.max_model_len, MAX_PROMPTS)

    async def completions(self, request: Request) -> Response:
        received_at = self._state.clock()
        body = parse_body(CompletionBody, await read_body(request, self._max_body_bytes))
        check_model(self._state.model, body.model or "")
        prompts = body.prompts()
        specs = await self._prepare(request, body, prompts, received_at, COMPLETION_MAX_TOKENS, "prompt")
        envelope = self._envelope(body, f"cmpl-{request_id_of(request)}")
        echoes = [self._echo(p, spec) for p, spec in zip(prompts, specs, strict=True)] if body.echo else []
        answer = CompletionFormat(envelope, echoes, body.num_shown)
        return self._respond(request, body, specs, answer)

    async def chat(self, request: Request) -> Response:
        received_at = self._state.clock()
        body = parse_body(ChatBody, await read_body(request, self._max_body_bytes))
        check_model(self._state.model, body.model or "")
        specs = await self._prepare(request, body, [body.prompt()], received_at, None, "messages")
        answer = ChatFormat(self._envelope(body, f"chatcmpl-{request_id_of(request)}"))
        return self._respond(request, body, specs, answer)

    async def _prepare(
        self,
        request: Request,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        received_at: float,
        default_max_tokens: int | None,
        prompt_param: str,
    ) -> list[GenerationSpec]:
        # Before work is put into tokenizing what would be turned away.
        sampling = body.asked_sampling()
        check_choices(sampling, self._state.settings.max_choices)
        _check_list(len(prompts), tenant_of(request))
        self._state.dispatcher.check_room(len(prompts) * sampling.num_choices, tenant_of(request))
        timeouts_s = timeouts_of(request, body.timeout)
        trace = trace_of(request, self._state.sampler)
        specs: list[GenerationSpec] = []
        try:
            for index, prompt in enumerate(prompts):
                asked = Asked(
                    request_id=request_id_of(request),
                    model=body.model or "",
                    prompt=prompt,
                    sampling=sampling,
                    default_max_tokens=default_max_tokens,
                    cache_salt=body.cache_salt or "",
                    timeouts_s=timeouts_s,
                    received_at=received_at,
                    prompt_param=prompt_param if len(prompts) == 1 else f"{prompt_param}[{index}]",
                    trace=trace if trace is None or index == 0 else trace.sibling(),
                    tenant=tenant_of(request),
                    priority=body.priority,
                )
                specs.append(await prepare(self._state, asked))
        except BaseException:
            # What was granted to the first prompts of a refused list is not held against the tenant's next request.
            for spec in specs:
                self._state.quotas.release(spec.lease_id, 0)
            raise
        return specs

    def _envelope(self, body: GenerationBody, answer_id: str) -> Envelope:
        return Envelope(
            answer_id=answer_id,
            created=int(time.time()),
            model=self._state.model.name,
            with_token_ids=bool(body.return_token_ids),
            with_usage=body.include_usage,
            token_bytes=self._state.model.token_bytes,
            num_logprobs=body.num_logprobs,
            with_prompt_logprobs=body.prompt_logprobs is not None,
        )

    def _echo(self, prompt: Prompt, spec: GenerationSpec) -> EchoedPrompt:
        if isinstance(prompt, TextPrompt):
            return EchoedPrompt(prompt.text, spec.prompt_token_ids)
        detokenizer = self._state.model.new_detokenizer()
        text = detokenizer.push(spec.prompt_token_ids) + detokenizer.flush()
        return EchoedPrompt(text, spec.prompt_token_ids)

    def _respond(
        self, request: Request, body: GenerationBody, specs: list[GenerationSpec], answer: AnswerFormat
    ) -> Response:
        def start() -> GenerationGroup:
            try:
                return GenerationGroup(self._state, specs)
            except BatonError as error:  # the room that there was a moment ago is taken
                # Under an id of its own: some of its prompts may have been begun, and given up again.
                trace = None if specs[0].trace is None else specs[0].trace.sibling()
                self._state.refuse(error, request_id, trace, specs[0].operation, specs[0].received_at)
                raise

        request_id, deadline = request_id_of(request), max(spec.deadline for spec in specs)
        if not body.stream:
            made, shown = specs[0].num_choices, body.num_shown
            return WholeAnswer(start, answer, request_id, deadline, num_made=made, num_shown=shown)
        sampling = specs[0].sampling
        wants_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        return EventStream(
            start,
            answer,
            request_id,
            deadline,
            with_usage=body.include_usage,
            with_empty_text=bool(body.return_token_ids),
            only_text=not body.return_token_ids and not wants_logprobs,
        )


def _check_list(num_prompts: int, tenant: Tenant) -> None:
    """Raises INVALID_REQUEST for more prompts in one request than the tenant can ever have: waiting would not help."""
    for limit in ("max_concurrent", "requests_per_minute"):
        bound = getattr(tenant, limit)
        if 0 < bound < num_prompts:
            message = f"`prompt` has {num_prompts} prompts; tenant {tenant.name} has a {limit} of {bound}: send fewer"
            raise invalid(message, "prompt")
