"""Text generation of transformers: static caches, greedy, sampled and beam search."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from tests.models.program import Program, Session, integers
from tests.models.transformers_models import TEXT, VOCABULARY, tiny

PROMPT, NEW = 5, 6


def _decoder(name: str, device: torch.device) -> Any:
    return tiny(getattr(transformers, name), TEXT, {}).to(device).eval()


def _prompts(number: int, device: torch.device, rows: int = 2) -> torch.Tensor:
    return integers(number, 3, VOCABULARY, rows, PROMPT, device=device)


def decode_step(name: str, device: torch.device, *, sample: bool = False) -> Session:
    """Capture one step of a loop over a static cache; the prompt is read eagerly."""
    model = _decoder(name, device)
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + NEW)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if not sample:
            return logits[:, -1:].argmax(-1)
        likely, which = (logits[:, -1] / 0.8).topk(8)
        return which.gather(1, torch.multinomial(likely.softmax(-1), 1))

    @torch.no_grad()
    def step_of(tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        output = model(
            input_ids=tokens, position_ids=position, past_key_values=cache, use_cache=True
        )
        return choose(output.logits)

    def turn(step: Any, number: int) -> torch.Tensor:
        cache.reset()
        prompt = _prompts(number, device)
        positions = torch.arange(PROMPT, device=device)[None].expand(2, -1)
        tokens = step_of(prompt, positions)
        outputs = [tokens.clone()]
        for i in range(NEW - 1):
            positions = torch.full((2, 1), PROMPT + i, device=device)
            tokens = step(tokens.clone(), positions)
            outputs.append(tokens.clone())
        return torch.cat(outputs, 1)

    return Session(step_of, turn)


def generated(
    make: Callable[[torch.device], Any], device: torch.device, *, own: bool = False, **how: Any
) -> Session:
    """Give the model a captured forward, as torch.compile is used, and call ``generate``.

    ``own``: the program passes one cache to every call, which makes one each otherwise.
    """
    model = make(device)
    if own:
        how["past_key_values"] = transformers.StaticCache(
            config=model.config, max_cache_len=PROMPT + NEW
        )

    def turn(step: Any, number: int) -> Any:
        model.forward = step
        if own:
            how["past_key_values"].reset()
        return model.generate(
            _prompts(number, device),
            attention_mask=torch.ones(2, PROMPT, dtype=torch.long, device=device),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            disable_compile=True,
            **how,
        )

    return Session(model.forward, turn)


def _translator(name: str, device: torch.device) -> Any:
    more = {"decoder_start_token_id": 0} if name.startswith("T5") else {}
    return tiny(getattr(transformers, name), TEXT, more).to(device).eval()


def beam_step(device: torch.device) -> Session:
    """Search with three beams by hand; the cache is reordered between captured steps."""
    beams = 3
    model = _decoder("LlamaForCausalLM", device)
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + NEW)

    @torch.no_grad()
    def scores_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        return logits[:, -1].log_softmax(-1)

    def turn(step: Any, number: int) -> Any:
        cache.reset()
        prompt = _prompts(number, device, 1).expand(beams, -1).contiguous()
        total, tokens = scores_of(prompt)[:1].topk(beams)
        total, tokens = total[0], tokens[0][:, None]
        text = tokens
        for _ in range(NEW - 1):
            scores = total[:, None] + step(tokens)
            total, flat = scores.flatten().topk(beams)
            source, tokens = flat // VOCABULARY, (flat % VOCABULARY)[:, None]
            cache.reorder_cache(source)
            text = torch.cat([text[source], tokens], 1)
        return text, total

    return Session(scores_of, turn)


def _programs() -> Iterator[Program]:
    decoders = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM")
    more = ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "MixtralForCausalLM", "PhiForCausalLM")
    ways: dict[str, dict[str, Any]] = {
        "greedy, static cache": {"do_sample": False, "cache_implementation": "static"},
        "greedy, one static cache": {"do_sample": False, "own": True},
        "greedy, dynamic cache": {"do_sample": False},
        "sampled, static cache": {"do_sample": True, "cache_implementation": "static"},
        "beams, static cache": {
            **{"do_sample": False, "num_beams": 3, "cache_implementation": "static"},
        },
    }
    needs = ("transformers",)
    for name in (*decoders, *more):
        start = functools.partial(decode_step, name)
        yield Program(f"generation/{name}/decode step", start, needs=needs)
    start = functools.partial(decode_step, decoders[0], sample=True)
    yield Program(f"generation/{decoders[0]}/sampled decode step", start, needs=needs)
    yield Program(f"generation/{decoders[0]}/beam step", beam_step, needs=needs)
    for name in (decoders[0], more[0]):
        for way, kwargs in ways.items():
            start = functools.partial(generated, functools.partial(_decoder, name), **kwargs)
            yield Program(f"generation/{name}/generate {way}", start, needs=needs)
    for name in ("T5ForConditionalGeneration", "BartForConditionalGeneration"):
        for way in ("greedy, static cache", "greedy, dynamic cache"):
            make = functools.partial(_translator, name)
            start = functools.partial(generated, make, **ways[way])
            yield Program(f"generation/{name}/generate {way}", start, needs=needs)


PROGRAMS = list(_programs())
