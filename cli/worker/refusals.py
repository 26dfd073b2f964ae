"""Why a request is not taken, and what a failed step is told as."""

from __future__ import annotations

from adapterd.cli.worker.requests import Request
from adapterd.loader.errors import AdapterdError, Code, Problem, reject

MAX_SEED = 1 << 63


def misfit(request: Request, vocabulary: int, positions: int) -> str:
    """What the model cannot do for this request, or nothing."""
    total = len(request.prompt) + request.max_tokens
    if not request.prompt or request.max_tokens < 1:
        return "a prompt of at least one token, and max_tokens of at least 1, are needed"
    if total > positions:
        return f"prompt and max_tokens are {total} tokens, the model has {positions} positions"
    if not all(0 <= token < vocabulary for token in request.prompt):
        return f"a token id is not in the vocabulary of {vocabulary}"
    if not 0 <= request.temperature < float("inf") or not 0 <= request.seed < MAX_SEED:
        return "temperature must be finite and not negative, seed at least 0 and below 2^63"
    return ""


def problems_of(fault: Exception) -> tuple[Problem, ...]:
    """Of whatever the model or torch raised; only the first line of it, and no traceback, goes to a caller."""
    if isinstance(fault, AdapterdError):
        return fault.problems
    code = Code.DEVICE_ERROR if isinstance(fault, RuntimeError) else Code.INTERNAL
    first = next(iter(str(fault).splitlines()), "")[:200]
    return (reject(code, "model", f"the step failed: {type(fault).__name__} {first}".rstrip(), "Ask again."),)
